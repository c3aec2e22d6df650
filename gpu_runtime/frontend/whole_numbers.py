"""Respells QuantizeLinear and DequantizeLinear of computed tensors in floating-point operators, in an onnx-ir graph.

QuantizeLinear(x, s, z) = saturate(round(x / s) + z). Its zero point subtracted, this is Clip(Round(x / s), low - z, high - z),
with low and high the bounds of its type: whole numbers, which FP32 and FP16 hold exactly. DequantizeLinear multiplies them by
its scale. Operators between the two that only move or compare elements compute with the whole numbers.

Example: s = 0.5, z = 3, uint8: x = 1.25 gives 2.5, then 2 (halves to even), within -3 to 252; ONNX stores 5. Dequantised: 1.
"""

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from gpu_runtime.errors import ModelError
from gpu_runtime.frontend.normalize import Steps, replace_by, stored
from gpu_runtime.frontend.quantized import DEQUANTIZE, QUANTIZE, check_parameters
from gpu_runtime.frontend.queries import attribute, constant, name_of, operand, operands, shape_of

BOUNDS = {ir.DataType.INT8: (-128, 127), ir.DataType.UINT8: (0, 255)}
# Operators of 8-bit tensors that place or compare their elements, whatever the zero point.
MOVES = frozenset(
    """Concat DepthToSpace Expand Flatten Gather Identity MaxPool Pad ReduceMax ReduceMin Reshape Resize Slice SpaceToDepth
    Split Squeeze Tile Transpose Unsqueeze""".split()
)


@dataclass(frozen=True, slots=True)
class Held:
    """What whole numbers lack of a quantised tensor: its zero point, FP64, a number or one for each channel; its type."""

    zero: np.ndarray
    dtype: ir.DataType


Quantized = dict[ir.Value, Held]  # of a tensor that holds whole numbers in place of its ONNX type


def respell(model: ir.Model) -> None:
    """Respells a graph of folded constants and inferred shapes in place. Raises ModelError."""
    quantized: Quantized = {}
    for node in list(model.graph):
        if node.op_type == QUANTIZE:
            _quantize(model, node, quantized)
        elif node.op_type == DEQUANTIZE:
            _dequantize(model, node, quantized)
        elif any(v in quantized for v in operands(node)):
            _move(model, node, quantized)
    for y, held in quantized.items():
        if y.is_graph_output():
            _end(model, y, held)


def _parameters(node: ir.Node) -> tuple[np.ndarray, np.ndarray]:
    """Returns scale and zero point, FP64, each a number, or shaped to broadcast along the node's axis. Raises ModelError."""
    x, rank, axis = operand(node), len(shape_of(operand(node))), attribute(node, "axis", 1)
    given = node.inputs[2] if len(node.inputs) > 2 else None
    title = f"{node.op_type} {node.name}"
    scale, zero = constant(operand(node, 1)), np.zeros((), np.float32) if given is None else constant(given)
    if scale is None or zero is None:
        lacks = "zero point" if scale is not None else "scale"
        raise ModelError(f"{title}: its {lacks} is computed while the network runs; expected a stored one: quantize statically")
    check_parameters(title, scale, zero if given else None, None if x.shape is None else shape_of(x), axis)

    def along(v: np.ndarray) -> np.ndarray:
        shape = [-1 if i == axis % rank else 1 for i in range(rank)] if v.size > 1 else ()
        return np.asarray(v, np.float64).reshape(shape)

    return along(scale), along(zero)


def _quantize(model: ir.Model, node: ir.Node, quantized: Quantized) -> None:
    (scale, zero), dtype = _parameters(node), node.outputs[0].dtype or ir.DataType.UINT8
    low, high = BOUNDS[dtype]
    build, y = Steps(model, name_of(node)), operand(node)
    # A division by a constant is lowered as a product with its reciprocal, which a convolution in front takes into its weights.
    # The reciprocal is that of FP64: the product differs from ONNX's quotient by its last bit at most, and is the quotient
    # where the scale is a power of two, with which halves, to be rounded to even, are frequent.
    if np.any(scale != 1):
        y = build.add("_scaled", "Div", y, build.stored("_scale", scale))
    y = build.add("_rounded", "Round", y)
    if zero.ndim:  # each channel has its own bounds
        y = build.add("_floored", "Max", y, build.stored("_low", low - zero))
        y = build.add("", "Min", y, build.stored("_high", high - zero))
    else:
        y = build.add("", "Clip", y, build.stored("_low", low - zero), build.stored("_high", high - zero))
    quantized[_replaced(model, node, build)] = Held(zero, dtype)


def _dequantize(model: ir.Model, node: ir.Node, quantized: Quantized) -> None:
    (scale, zero), x = _parameters(node), operand(node)
    build, y, shift = Steps(model, name_of(node)), x, -zero
    if x in quantized:
        shift = quantized[x].zero - zero
    elif x.dtype != ir.DataType.FLOAT:
        y = build.add("_input", "Cast", y, to=ir.DataType.FLOAT.value)
    if np.any(shift):
        y = build.add("_shifted", "Add", y, build.stored("_zero_point", shift))
    y = build.add("", "Mul", y, build.stored("_scale", scale))
    _replaced(model, node, build)


def _replaced(model: ir.Model, node: ir.Node, build: Steps) -> ir.Value:
    """Puts steps in the place of the node; returns their result."""
    replace_by(model, node, build.steps)
    result = build.steps[-1].outputs[0]
    for step in build.steps:
        step.outputs[0].dtype, step.outputs[0].shape = ir.DataType.FLOAT, result.shape
    return result


def _move(model: ir.Model, node: ir.Node, quantized: Quantized) -> None:
    """Lets an operator read whole numbers in place of a quantised tensor."""
    read = [v for v in operands(node) if v in quantized]
    held, title = quantized[read[0]], f"{node.op_type} {node.name}"
    if node.op_type == "Cast":
        node.replace_input_with(0, _with_zero_point(model, node, held))
        return
    smooth = node.op_type == "Resize" and attribute(node, "mode", "nearest") != "nearest"
    if node.op_type not in MOVES or smooth:
        raise ModelError(
            f"{title} reads the quantised tensor {read[0].name!r}, and no kernel computes it in integers: "
            "put a DequantizeLinear in front of it, and a QuantizeLinear behind"
        )
    if held.zero.ndim or any(not np.array_equal(quantized[v].zero, held.zero) for v in read):
        raise ModelError(f"{title}: expected quantised tensors of one zero point: dequantize them first")
    _move_constants(model, node, held)
    for y in node.outputs:
        y.dtype = ir.DataType.FLOAT
        quantized[y] = held


def _with_zero_point(model: ir.Model, node: ir.Node, held: Held) -> ir.Value:
    """Returns a Cast's input as ONNX's integers, in floating point."""
    x, build = operand(node), Steps(model, f"{node.name}_integers")
    y = build.add("", "Add", x, build.stored("_zero_point", held.zero))
    y.dtype, y.shape = ir.DataType.FLOAT, x.shape
    model.graph.insert_before(node, build.steps)
    return y


def _move_constants(model: ir.Model, node: ir.Node, held: Held) -> None:
    """Subtracts the zero point from constants of the tensor's type: those of a Concat, and the value of a Pad."""
    if node.op_type == "Pad" and (len(node.inputs) < 3 or node.inputs[2] is None) and held.zero:
        node.resize_inputs(max(3, len(node.inputs)))
        node.replace_input_with(2, stored(model, f"{node.name}_zero", np.zeros((), np.int8)))
    slots = {"Concat": range(len(node.inputs)), "Pad": range(2, min(3, len(node.inputs)))}.get(node.op_type, ())
    for i in slots:
        if (array := constant(node.inputs[i])) is not None:
            numbers = stored(model, f"{node.name}_numbers_{i}", (array - held.zero).astype(np.float32))
            node.replace_input_with(i, numbers)


def _end(model: ir.Model, y: ir.Value, held: Held) -> None:
    """Makes a network's quantised output from its whole numbers."""
    name, build = name_of(y), Steps(model, f"{name_of(y)}_integers")
    y.name = f"{name}_whole"
    z = build.add("_sum", "Add", y, build.stored("_zero_point", held.zero)) if np.any(held.zero) else y
    made = build.add("", "Cast", z, to=held.dtype.value)
    made.name, made.dtype, made.shape, z.dtype, z.shape = name, held.dtype, y.shape, ir.DataType.FLOAT, y.shape
    model.graph.extend(build.steps)
    for i, v in enumerate(model.graph.outputs):
        if v is y:
            model.graph.outputs[i] = made
