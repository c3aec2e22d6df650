"""Checks QuantizeLinear and DequantizeLinear of a ModelProto, of ONNX or com.microsoft, and gives them one spelling."""

from collections.abc import Mapping, Sequence
from itertools import chain

import numpy as np
import onnx
from onnx import TensorProto, helper

from gpu_runtime.errors import ModelError
from gpu_runtime.frontend.load import graphs_in, stored_tensors, title, to_array, type_name

QUANTIZE, DEQUANTIZE = "QuantizeLinear", "DequantizeLinear"
MICROSOFT = "com.microsoft"
BYTES = (TensorProto.INT8, TensorProto.UINT8)
FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)
LEAST_SCALE = 2.0**-126  # its reciprocal is finite in FP32
CURE = "quantize the model to int8, with one scale for each tensor or channel"


def is_quantizer(node: onnx.NodeProto) -> bool:
    """Returns whether the node is a QuantizeLinear or DequantizeLinear."""
    return node.op_type in (QUANTIZE, DEQUANTIZE) and node.domain in ("", "ai.onnx", MICROSOFT)


def spell(graph: onnx.GraphProto) -> None:
    """Makes all QuantizeLinear and DequantizeLinear those of ONNX, without the attributes of newer opsets. Raises ModelError
    where these ask for what kernels lack.
    """
    for node in chain(graph.node, *(each.node for each in graphs_in(graph.node))):
        if is_quantizer(node):
            node.domain = ""
            _spell_attributes(graph, node)


def _spell_attributes(graph: onnx.GraphProto, node: onnx.NodeProto) -> None:
    for a in [a for a in node.attribute if a.name != "axis"]:
        to, what = a.i, f"{title(node)}: its attribute {a.name} is {a.i}"
        if a.name == "block_size" and to:
            raise ModelError(f"{what}; expected no scale for each block of an axis: {CURE}")
        if a.name == "output_dtype" and to and to not in (BYTES if node.op_type == QUANTIZE else FLOATS):
            raise ModelError(f"{title(node)}: its output_dtype is {type_name(to).lower()}, which no kernel has: {CURE}")
        if a.name == "output_dtype" and to in BYTES and not any(node.input[2:]):
            name = f"{node.output[0]}, zero point"
            graph.initializer.append(helper.make_tensor(name, to, [], [0]))
            del node.input[2:]
            node.input.append(name)
        node.attribute.remove(a)


def check(graph: onnx.GraphProto) -> None:
    """Raises ModelError for the first QuantizeLinear or DequantizeLinear whose types, scale or zero point are invalid."""
    tensors = dict(stored_tensors(graph))
    for node in graph.node:
        if is_quantizer(node):
            _check_node(node, tensors)


def _check_node(node: onnx.NodeProto, tensors: Mapping[str, TensorProto]) -> None:
    if not 2 <= len(node.input) <= 3 or len(node.output) != 1 or not all(node.input[:2]):
        raise ModelError(f"{title(node)}: expected a tensor, a scale and perhaps a zero point, got {list(node.input)}")
    x, scale, zero = (tensors.get(name) for name in (*node.input, "")[:3])
    allowed = BYTES if node.op_type == QUANTIZE else (*BYTES, TensorProto.INT32)
    of_numbers = [("zero point", zero)] if node.op_type == QUANTIZE else [("zero point", zero), ("input", x)]
    for what, t in of_numbers:
        if t is not None and t.data_type not in allowed:
            raise ModelError(
                f"{title(node)}: its {what} is of type {type_name(t.data_type).lower()}, which no kernel has: {CURE}"
            )
    if node.op_type == DEQUANTIZE and x is not None and zero is not None and x.data_type != zero.data_type:
        types = f"{type_name(x.data_type).lower()} and {type_name(zero.data_type).lower()}"
        raise ModelError(f"{title(node)}: expected an input and a zero point of one type, got {types}")
    if scale is None:
        return  # computed: respell examines it once constants are folded
    if scale.data_type not in FLOATS:
        raise ModelError(f"{title(node)}: expected a scale in floating point, got {type_name(scale.data_type).lower()}")
    axis, zeros = (
        next((a.i for a in node.attribute if a.name == "axis"), 1),
        None if zero is None else to_array(zero.name, zero),
    )
    scales = to_array(scale.name, scale).astype(np.float32)
    check_parameters(title(node), scales, zeros, None if x is None else list(x.dims), axis)


def check_parameters(node: str, scale: np.ndarray, zero: np.ndarray | None, dims: Sequence[int] | None, axis: int) -> None:
    """Raises ModelError for a scale, FP32, or zero point that ONNX does not allow. `dims`: of the tensor, None if unknown."""
    if bad := [float(s) for s in scale.reshape(-1) if not LEAST_SCALE <= s < np.inf][:1]:
        raise ModelError(
            f"{node}: expected scales above zero, normal numbers of FP32, got {bad[0]:g}: calibrate the model again"
        )
    if zero is not None and zero.shape != scale.shape and (zero.size, scale.size) != (1, 1):
        raise ModelError(f"{node}: expected a scale and a zero point of one shape, got {scale.shape} and {zero.shape}")
    if scale.size == 1 and scale.ndim < 2:
        return
    if scale.ndim != 1:
        raise ModelError(f"{node}: its scale has the shape {list(scale.shape)}; expected a number or a vector: {CURE}")
    if dims is not None and not (-len(dims) <= axis < len(dims) and dims[axis] == scale.size):
        raise ModelError(
            f"{node}: expected {scale.size} elements along axis {axis}, one for each scale, got the shape {list(dims)}"
        )
