"""Respells QuantizeLinear and DequantizeLinear of computed tensors in floating-point operators, in an onnx-ir graph.

QuantizeLinear(x, s, z) = saturate(round(x / s) + z). Its zero point subtracted, this is Clip(Round(x / s), low - z, high - z),
with low and high the bounds of its type: whole numbers, which FP32 and FP16 hold exactly. DequantizeLinear multiplies them by
its scale. Operators between the two that only move or compare elements compute with the whole numbers.

These have 9 bits where z is not 0. Where layers read them that can subtract z with their biases, they keep it, so that bytes
hold them: Clip(Round(x / s + z), low, high).

Example: s = 0.5, z = 3, uint8: x = 1.25 gives 2.5, then 2 (halves to even), within -3 to 252; ONNX stores 5. Dequantised: 1.
"""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from gpu_runtime.errors import ModelError
from gpu_runtime.frontend.files.quantized import DEQUANTIZE, QUANTIZE, check_parameters
from gpu_runtime.frontend.normalize import Steps, replace_by, stored
from gpu_runtime.frontend.queries import attribute, constant, name_of, operand, operands, shape_of, single_reader
from gpu_runtime.frontend.travel import BOUNDS, MOVES, travel
from tactics.planner.grouping import Together, grouped

SUBTRACTED = ", zero point subtracted"  # ends the name of a tensor in place of ONNX's
# Operators between DequantizeLinear and others that may read whole numbers with their zero point.
ELEMENTWISE = ("Add", "HardSigmoid", "HardSwish", "LeakyRelu", "Mul", "PRelu", "Relu", "Sigmoid", "Sub")


@dataclass(frozen=True, slots=True)
class Held:
    """The numbers subtracted, FP64, one or one for each channel, and the type of a tensor that is held as whole numbers."""

    zero: np.ndarray
    dtype: ir.DataType


Quantized = dict[ir.Value, Held]  # of a tensor that holds whole numbers in place of its ONNX type


def respell(model: ir.Model) -> None:
    """Respells a graph of folded constants and inferred shapes in place. Raises ModelError."""
    relus, quantized = travel(model), Quantized()
    kept = _kept(model)
    for node in list(model.graph):
        if node.op_type == QUANTIZE:
            _quantize(model, node, quantized, relus, node.outputs[0] in kept)
        elif node.op_type == DEQUANTIZE:
            _dequantize(model, node, quantized)
        elif node in relus and node.graph is not None:
            quantized[node.outputs[0]] = quantized[operand(node)]
            node.outputs[0].dtype = ir.DataType.FLOAT
        elif any(v in quantized for v in operands(node)):
            _move(model, node, quantized)
        elif node.op_type in ("Conv", "ConvTranspose") and attribute(node, "group", 1) > 1:
            _scaled_behind(model, node)
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


def _kept(model: ir.Model) -> set[ir.Value]:
    """Returns the quantised tensors that keep their zero points. Tensors that a Concat, a Slice or the like connects are one
    group, and all of a group keep theirs or none does.
    """
    together, held = Together[ir.Value](), dict[ir.Value, None]()
    for node in model.graph:
        read = [v for v in operands(node) if v in held]
        if node.op_type == QUANTIZE or (read and node.op_type != DEQUANTIZE):
            held |= dict.fromkeys(node.outputs)
            for v in (*node.outputs[1:], *read):
                together.unite(node.outputs[0], v)
    groups = grouped((together.root(v), v) for v in held)
    return {v for group in groups.values() if _bytes_serve(group) for v in group}


def _bytes_serve(group: Collection[ir.Value]) -> bool:
    """Whether a layer reads these tensors, and all layers that do can subtract a zero point with their biases."""
    uses = [use for v in group for use in v.uses()]
    sources = [node for v in group if (node := v.producer()) is not None and node.op_type == QUANTIZE]
    if not all(use.node.op_type in (*MOVES, DEQUANTIZE) for use in uses) or not all(map(_shifts, sources)):
        return False
    read = [use for of in uses if of.node.op_type == DEQUANTIZE for use in of.node.outputs[0].uses()]
    layers = [use for use in read if use.node.op_type not in ELEMENTWISE]
    return bool(layers) and all(_subtracts(use.node, use.idx) for use in layers)


def _shifts(node: ir.Node) -> bool:
    """Whether a QuantizeLinear has a zero point, and round(x / s + z) is round(x / s) + z: in FP32 for all x / s farther than
    2^-17 from a half. Halves are rounded to even, so an odd z moves them; they are frequent where s has few digits.
    """
    scale, zero = _parameters(node)
    few_digits = not (np.frexp(scale)[0] * 2**8 % 1).any()
    return not zero.ndim and not scale.ndim and bool(zero) and not (few_digits and zero % 2)


def _subtracts(node: ir.Node, i: int) -> bool:
    """Whether a layer can subtract the products of its weights and the zero point of input i as a bias."""
    if node.op_type == "Conv":
        return i == 0 and attribute(node, "group", 1) == 1
    return node.op_type in ("Gemm", "MatMul") and i == 0 and constant(node.inputs[1]) is not None


def _quantize(model: ir.Model, node: ir.Node, quantized: Quantized, relus: Collection[ir.Node], kept: bool) -> None:
    (scale, zero), dtype = _parameters(node), node.outputs[0].dtype or ir.DataType.UINT8
    low, high = (np.asarray(bound - zero) for bound in BOUNDS[dtype])
    build, (y, low, high) = Steps(model, name_of(node)), _within(operand(node), scale, low, high)
    relu = single_reader(node.outputs[0])
    if relu in relus:
        low = np.maximum(low, 0)
    shift = zero if kept else np.zeros(())
    zero, low, high = zero - shift, low + shift, high + shift
    # A division by a constant is lowered as a product with its reciprocal, which a convolution in front takes into its weights.
    # The reciprocal is that of FP64: the product differs from ONNX's quotient by its last bit at most, and is the quotient
    # where the scale is a power of two, with which halves, to be rounded to even, are frequent.
    if not scale.ndim and (terms := _dequantized_terms(y)):
        y = _sum(build, y.producer(), terms, scale, shift)
    else:
        y = build.add("_scaled", "Div", y, build.stored("_scale", scale)) if np.any(scale != 1) else y
        y = build.add("_shifted", "Add", y, build.stored("_zero_point", shift)) if shift else y
    y = build.add("_rounded", "Round", y)
    if zero.ndim:  # each channel has its own bounds
        y = build.add("_floored", "Max", y, build.stored("_low", low))
        y = build.add("", "Min", y, build.stored("_high", high))
    else:
        y = build.add("", "Clip", y, build.stored("_low", low), build.stored("_high", high))
    whole = _replaced(model, node, build)
    _hold(quantized, whole, Held(zero, dtype))
    if relu is not None and relu in relus:
        whole.name = relu.outputs[0].name
        ir.convenience.replace_all_uses_with(relu.outputs[0], whole)
        model.graph.remove(relu, safe=True)


def _within(y: ir.Value, scale: np.ndarray, low: np.ndarray, high: np.ndarray) -> tuple[ir.Value, np.ndarray, np.ndarray]:
    """Returns (the input of the Relu or Clip that makes y, the bounds with it), where only QuantizeLinear reads y; else the
    arguments.

    Clip(x, a, b) / s, rounded, lies between the rounded a / s and b / s, since rounding keeps order.
    """
    node = y.producer()
    alone = not y.is_graph_output() and all(use.node.op_type == QUANTIZE for use in y.uses())
    if node is None or node.op_type not in ("Relu", "Clip") or not alone or scale.ndim:
        return y, low, high
    if node.op_type == "Relu":
        return operand(node), np.maximum(low, 0), high
    given = [*node.inputs[1:], None, None][:2]
    a, b = (np.array(end) if v is None else constant(v) for v, end in zip(given, (-np.inf, np.inf), strict=True))
    if a is None or b is None or a.size != 1 or b.size != 1 or not float(a.item()) <= float(b.item()):
        return y, low, high
    inner = [np.clip(np.rint(np.float64(v.item()) / scale), low, high) for v in (a, b)]
    return operand(node), inner[0], inner[1]


def _dequantized_terms(y: ir.Value) -> list[tuple[ir.Node, np.ndarray]]:
    """Returns the two products of whole numbers and a scale, each with its scale, whose sum, with one reader, is y; [] for any
    other tensor.
    """
    add = y.producer()
    if add is None or add.op_type != "Add" or len(y.uses()) != 1 or y.is_graph_output():
        return []
    found = [v.producer() for v in operands(add)]
    products = [p for p in found if p is not None and p.meta.get("dequantizes") and shape_of(p.outputs[0]) == shape_of(y)]
    return [(p, np.asarray(constant(operand(p, 1)), np.float64)) for p in products] if len({*products}) == 2 else []


def _sum(
    build: Steps, add: ir.Node | None, terms: list[tuple[ir.Node, np.ndarray]], scale: np.ndarray, shift: np.ndarray
) -> ir.Value:
    """Makes (a * s + b * t) / u + shift as (a * (s / u) + shift) + b * (t / u): a convolution that makes a, the tensor with
    fewer readers, scales and shifts it, then adds b. Of a = q - z it makes q * (s / u), and the shift has -z * (s / u).
    """
    shift = shift + sum(of.meta["shift"] * s / scale for of, s in terms)
    products = []
    for of, s in sorted(terms, key=lambda term: len(term[0].outputs[0].uses())) if shift else terms:
        factor = build.stored(f", factor of {of.name}", s / scale)
        products.append(build.add(f", {of.name}", "Mul", of.meta["dequantizes"], factor))
    if shift:
        products[0] = build.add("_shifted", "Add", products[0], build.stored("_shift", shift))
    y = build.add("", "Add", *products)
    build.steps[-1].name = None if add is None else add.name  # which it stands for
    return y


def _dequantize(model: ir.Model, node: ir.Node, quantized: Quantized) -> None:
    (scale, zero), x = _parameters(node), operand(node)
    build, whole, shift = Steps(model, name_of(node)), x, -zero
    if x in quantized:
        shift = quantized[x].zero - zero
    elif x.dtype != ir.DataType.FLOAT:
        whole = build.add("_input", "Cast", x, to=ir.DataType.FLOAT.value)
    y = build.add("_shifted", "Add", whole, build.stored("_zero_point", shift)) if np.any(shift) else whole
    build.add("", "Mul", y, build.stored("_scale", scale))
    if not scale.ndim and not shift.ndim:
        build.steps[-1].meta.update(dequantizes=whole, shift=shift)
    _replaced(model, node, build)


def _scaled_behind(model: ir.Model, node: ir.Node) -> None:
    """Lets a convolution of groups, which has no kernel for integers, read whole numbers: its weights are scaled instead."""
    of, w = operand(node).producer(), constant(node.inputs[1])
    if of is not None and of.meta.get("dequantizes") and w is not None:
        node.replace_input_with(0, operand(of))
        node.replace_input_with(1, stored(model, f"{node.name}_scaled", w * constant(operand(of, 1))))


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
        name = name_of(read[0]).removesuffix(SUBTRACTED)
        raise ModelError(
            f"{title} reads the quantised tensor {name!r}, and no kernel computes it in integers: "
            "put a DequantizeLinear in front of it, and a QuantizeLinear behind"
        )
    if held.zero.ndim or any(not np.array_equal(quantized[v].zero, held.zero) for v in read):
        raise ModelError(f"{title}: expected quantised tensors of one zero point: dequantize them first")
    _move_constants(model, node, held)
    for y in node.outputs:
        y.dtype = ir.DataType.FLOAT
        _hold(quantized, y, held)


def _hold(quantized: Quantized, y: ir.Value, held: Held) -> None:
    """Notes that a tensor holds whole numbers, under another name than ONNX's where that tensor has other values."""
    quantized[y] = held
    if np.any(held.zero) and not y.is_graph_output():
        y.name = f"{y.name}{SUBTRACTED}"


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
