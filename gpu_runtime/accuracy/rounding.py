"""A model in FP32, and the same model with each tensor rounded to FP16, which shows the error of FP16 storage alone."""

import math
from collections.abc import Iterable, Mapping

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from gpu_runtime.frontend.files.check import inferred
from gpu_runtime.frontend.files.load import copied

ROOM = 2.0**14  # tensors with larger values are scaled down before rounding to FP16, as an engine stores them


def in_fp32(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Returns the same model with every FP16 weight, constant, Cast, input and output in FP32."""
    wide = copied(proto)
    graph = wide.graph
    for t in graph.initializer:
        _widen(t)
    for node in graph.node:
        for a in node.attribute:
            if a.type == onnx.AttributeProto.TENSOR:
                _widen(a.t)
            if node.op_type == "Cast" and a.name == "to" and a.i == TensorProto.FLOAT16:
                a.i = TensorProto.FLOAT
    for v in (*graph.input, *graph.output):
        if v.type.tensor_type.elem_type == TensorProto.FLOAT16:
            v.type.tensor_type.elem_type = TensorProto.FLOAT
    del graph.value_info[:]
    wide.ir_version = max(wide.ir_version, 4)  # in earlier versions initializers had to be inputs
    return wide


def _widen(t: TensorProto) -> None:
    """Converts a tensor in place from FP16 to FP32; tensors of other types stay as they are."""
    if t.data_type == TensorProto.FLOAT16:
        t.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(t).astype(np.float32), t.name))


def rounded(proto: onnx.ModelProto, high: Mapping[str, float]) -> onnx.ModelProto:
    """Returns an FP32 model in which a Cast to FP16 and back follows each node; constants stay as they are.

    `high`: tensor -> its largest magnitude. A tensor whose magnitude is above ROOM is multiplied by a power of two before it is
    rounded, and divided by it afterwards.
    """
    kinds = {v.name: v.type.tensor_type.elem_type for v in inferred(proto).graph.value_info}
    kinds |= {v.name: v.type.tensor_type.elem_type for v in proto.graph.output}
    cast = copied(proto)
    nodes = list(cast.graph.node)
    del cast.graph.node[:]
    for node in nodes:
        floats = [] if node.op_type == "Constant" else [n for n in node.output if n and kinds.get(n) == TensorProto.FLOAT]
        for i, name in enumerate(node.output):
            if name in floats:
                node.output[i] = f"{name} exact"
        cast.graph.node.append(node)
        for name in floats:
            reach = high.get(name, 0.0)
            scale = 2.0 ** math.floor(math.log2(ROOM / reach)) if ROOM < reach < math.inf else 1.0
            cast.graph.node.extend(_through_fp16(name, scale))
            if scale != 1:
                for value, text in ((scale, "down"), (1 / scale, "up")):
                    cast.graph.initializer.append(numpy_helper.from_array(np.array(value, np.float32), f"{name} {text}"))
    return cast


def _through_fp16(name: str, scale: float) -> Iterable[onnx.NodeProto]:
    """Returns the nodes from tensor "NAME exact" to `name`: Cast to FP16 and back, between two Mul unless `scale` is 1; their
    factors are the initializers "NAME down" and "NAME up".
    """
    if scale == 1:
        return (
            helper.make_node("Cast", [f"{name} exact"], [f"{name} fp16"], to=TensorProto.FLOAT16),
            helper.make_node("Cast", [f"{name} fp16"], [name], to=TensorProto.FLOAT),
        )
    return (
        helper.make_node("Mul", [f"{name} exact", f"{name} down"], [f"{name} scaled"]),
        helper.make_node("Cast", [f"{name} scaled"], [f"{name} fp16"], to=TensorProto.FLOAT16),
        helper.make_node("Cast", [f"{name} fp16"], [f"{name} back"], to=TensorProto.FLOAT),
        helper.make_node("Mul", [f"{name} back", f"{name} up"], [name]),
    )


def shown(proto: onnx.ModelProto, tensors: Iterable[str]) -> onnx.ModelProto:
    """Returns the model with these tensors as additional outputs."""
    made = copied(proto)
    there = {v.name for v in made.graph.output}
    made.graph.output.extend(onnx.ValueInfoProto(name=name) for name in tensors if name not in there)
    return made
