"""Quantised models as ModelOpt writes them: int8 with zero point 0, a QuantizeLinear and a DequantizeLinear in front of each
Conv and Gemm and on one branch of each residual Add; weights have a scale for each output channel; biases are floating point.
"""

from collections.abc import Mapping

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper


def ranges(model: onnx.ModelProto, feeds: Mapping[str, np.ndarray], tensors: list[str]) -> dict[str, float]:
    """Returns the largest magnitude of each tensor in a run by onnxruntime."""
    wide = onnx.ModelProto()
    wide.CopyFrom(model)
    outputs = {o.name for o in wide.graph.output}
    inputs = {i.name for i in wide.graph.input}
    wide.graph.output.extend(
        helper.make_tensor_value_info(t, TensorProto.FLOAT, None) for t in tensors if t not in outputs | inputs
    )
    session = ort.InferenceSession(wide.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [o.name for o in session.get_outputs()]
    found = dict(zip(names, session.run(names, dict(feeds)), strict=True)) | dict(feeds)
    return {t: float(np.abs(found[t]).max()) for t in tensors}


def modelopt(model: onnx.ModelProto, largest: Mapping[str, float], outputs: bool = False) -> onnx.ModelProto:
    """Returns the quantised model. `largest`: tensor -> its largest magnitude (see ranges); `outputs`: whether outputs of Convs
    are quantised too.
    """
    graph = model.graph
    constants = {t.name: numpy_helper.to_array(t) for t in graph.initializer}
    weighted = [n for n in graph.node if n.op_type in ("Conv", "Gemm")]
    made = {n.output[0]: n for n in graph.node}
    nodes: list[onnx.NodeProto] = []
    initializers = {t.name: t for t in graph.initializer}
    pairs: dict[str, str] = {}

    def pair(t: str) -> str:
        if t not in pairs:
            scale = np.float32(max(largest[t], 1e-6) / 127)
            for name, value in ((f"{t}_scale", scale), (f"{t}_zero", np.int8(0))):
                initializers[name] = numpy_helper.from_array(np.array(value), name)
            q = helper.make_node("QuantizeLinear", [t, f"{t}_scale", f"{t}_zero"], [f"{t}_q"], name=f"{t}_QuantizeLinear")
            dq = helper.make_node(
                "DequantizeLinear", [f"{t}_q", f"{t}_scale", f"{t}_zero"], [f"{t}_dq"], name=f"{t}_DequantizeLinear"
            )
            nodes.extend([q, dq])
            pairs[t] = f"{t}_dq"
        return pairs[t]

    for node in graph.node:
        new = onnx.NodeProto()
        new.CopyFrom(node)
        if node in weighted:
            new.input[0], w = pair(node.input[0]), constants[node.input[1]]
            scales = np.maximum(np.abs(w).reshape(len(w), -1).max(axis=1), 1e-9).astype(np.float32) / 127
            q = np.clip(np.rint(w / scales.reshape(-1, *[1] * (w.ndim - 1))), -128, 127).astype(np.int8)
            name = node.input[1]
            initializers.pop(name, None)
            for suffix, value in (("_int8", q), ("_scales", scales), ("_zeros", np.zeros(len(w), np.int8))):
                initializers[name + suffix] = numpy_helper.from_array(value, name + suffix)
            nodes.append(
                helper.make_node("DequantizeLinear", [name + s for s in ("_int8", "_scales", "_zeros")], [f"{name}_dq"], axis=0)
            )
            new.input[1] = f"{name}_dq"
        elif node.op_type == "Add" and all(t in made for t in node.input):
            skip = next((i for i in (1, 0) if made[node.input[i]].op_type != "Conv"), 1)  # of two convolutions the second
            new.input[skip] = pair(node.input[skip])
        if outputs and node.op_type == "Conv":
            new.output[0] += "_float"
            nodes.append(new)
            scale = np.float32(max(largest[node.output[0]], 1e-6) / 127)
            t = node.output[0]
            for name, value in ((f"{t}_out_scale", scale), (f"{t}_out_zero", np.int8(0))):
                initializers[name] = numpy_helper.from_array(np.array(value), name)
            nodes.append(helper.make_node("QuantizeLinear", [f"{t}_float", f"{t}_out_scale", f"{t}_out_zero"], [f"{t}_out_q"]))
            nodes.append(helper.make_node("DequantizeLinear", [f"{t}_out_q", f"{t}_out_scale", f"{t}_out_zero"], [t]))
            continue
        nodes.append(new)
    found = helper.make_graph(nodes, graph.name, graph.input, graph.output, list(initializers.values()))
    return helper.make_model(found, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def quantised(model: onnx.ModelProto, feeds: Mapping[str, np.ndarray], outputs: bool = False) -> onnx.ModelProto:
    weighted = [n for n in model.graph.node if n.op_type in ("Conv", "Gemm")]
    added = [n for n in model.graph.node if n.op_type == "Add"]
    constants = {t.name for t in model.graph.initializer}
    tensors = dict.fromkeys(t for n in weighted for t in (n.input[0], *n.output))
    tensors |= dict.fromkeys(t for n in added for t in n.input if t not in constants)
    return modelopt(model, ranges(model, feeds, [*tensors]), outputs)
