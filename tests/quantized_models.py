"""Quantised models as ModelOpt writes them: int8 with zero point 0, a QuantizeLinear and a DequantizeLinear in front of each
Conv and Gemm and on one branch of each residual Add; weights have a scale for each output channel; biases are floating point.

    python -m tests.quantized_models [DEVICE] [BATCH]

prints how many of ResNet-50's convolutions, with 2:4 weights, a plan runs in INT8, and how many of these as 2:4.
"""

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import quant_pre_process

import gpu_runtime as gr
from benchmarks import networks
from benchmarks.light import open_batch
from cuda_kernels import sparse24


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


def quantised_resnet50() -> onnx.ModelProto:
    """Returns ResNet-50 with drawn weights, quantised, its batch open."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.onnx"
        onnx.save(networks.resnet50(), path)
        quant_pre_process(path, path, skip_symbolic_shape=True)
        model = onnx.load(path)
    return open_batch(quantised(model, {"x": np.random.default_rng(0).standard_normal((1, 3, 224, 224)).astype(np.float32)}))


class Counted(NamedTuple):
    """Convolutions of a network: all, those in INT8, those in INT8 as 2:4, and the predicted microseconds of the network."""

    all: int
    whole: int
    sparse: int
    us: float


def pruned_resnet50(folder: Path) -> onnx.ModelProto:
    """Returns ResNet-50 with drawn weights, 2:4 wherever 4 divides the input channels, its normalizations folded."""
    model, path = networks.resnet50(), folder / "m.onnx"
    for t in model.graph.initializer:
        w = numpy_helper.to_array(t)
        if w.ndim == 4 and w.shape[1] % 4 == 0:
            t.CopyFrom(numpy_helper.from_array(sparse24.prune(w).astype(np.float32), t.name))
    onnx.save(model, path)
    quant_pre_process(path, path, skip_symbolic_shape=True)
    return onnx.load(path)


def counted(model: onnx.ModelProto, device: str, batch: int, outputs: bool, folder: Path) -> Counted:
    """Quantises and plans a network; a plan's layers are counted, not the launches of a batch in pieces."""
    x = np.random.default_rng(0).standard_normal((1, 3, 224, 224)).astype(np.float32)
    onnx.save(open_batch(quantised(model, {"x": x}, outputs)), folder / "m.onnx")
    plan = gr.build(folder / "m.onnx", device=device, sparsity="enable", shapes={"x": (batch, *x.shape[1:])}).record.plan
    layers = {n.name for n in model.graph.node if n.op_type == "Conv"}
    whole = {layer for layer, reason in plan.int8.items() if not reason} & layers
    return Counted(len(layers), len(whole), len(whole & {*plan.sparsity.picked}), plan.solution.total_us)


def main(device: str = "l4", batch: str = "32") -> None:
    print(f"ResNet-50 with 2:4 weights, convolutions on {device}, batch {batch}, predicted")
    print(f"{'outputs':8} {'all':>5} {'INT8':>5} {'2:4':>5} {'us':>8}")
    with tempfile.TemporaryDirectory() as folder:
        model = pruned_resnet50(Path(folder))
        for outputs in (False, True):
            found = counted(model, device, int(batch), outputs, Path(folder))
            print(f"{'INT8' if outputs else 'FP16':8} {found.all:5} {found.whole:5} {found.sparse:5} {found.us:8.0f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
