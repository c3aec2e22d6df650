"""Respells QuantizeLinear and DequantizeLinear of computed tensors in floating-point operators, in an onnx-ir graph.

QuantizeLinear(x, s, z) = saturate(round(x / s) + z). Its zero point subtracted, this is Clip(Round(x / s), low - z, high - z),
with low and high the bounds of its type: whole numbers, which FP32 and FP16 hold exactly. DequantizeLinear multiplies them by
its scale. Operators between the two that only move or compare elements compute with the whole numbers.

Example: s = 0.5, z = 3, uint8: x = 1.25 gives 2.5, then 2 (halves to even), within -3 to 252; ONNX stores 5. Dequantised: 1.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from gpu_runtime.errors import ModelError
from gpu_runtime.frontend.normalize import Steps, replace_by, stored
from gpu_runtime.frontend.quantized import DEQUANTIZE, QUANTIZE, check_parameters
from gpu_runtime.frontend.queries import attribute, constant, is_read, name_of, operand, operands, shape_of, single_reader

BOUNDS = {ir.DataType.INT8: (-128, 127), ir.DataType.UINT8: (0, 255)}
# Operators of 8-bit tensors that place or compare their elements, whatever the zero point.
MOVES = frozenset(
    """Concat DepthToSpace Expand Flatten Gather Identity MaxPool Pad ReduceMax ReduceMin Reshape Resize Slice SpaceToDepth
    Split Squeeze Tile Transpose Unsqueeze""".split()
)
LAYERS = ("Conv", "ConvTranspose", "Gemm", "MatMul")  # a scale in front of one is a scale behind it
ENLARGE = ("Expand", "Resize", "Tile")
# Those that QuantizeLinear passes on its way up: they keep all elements, or the largest of their windows.
KEEP = ("DepthToSpace", "Flatten", "MaxPool", "Reshape", "Resize", "SpaceToDepth", "Squeeze", "Transpose", "Unsqueeze")


@dataclass(frozen=True, slots=True)
class Held:
    """The zero point, FP64, a number or one for each channel, and the type of a tensor that is held as whole numbers."""

    zero: np.ndarray
    dtype: ir.DataType


Quantized = dict[ir.Value, Held]  # of a tensor that holds whole numbers in place of its ONNX type


def respell(model: ir.Model) -> None:
    """Respells a graph of folded constants and inferred shapes in place. Raises ModelError."""
    relus, quantized = travel(model), Quantized()
    for node in list(model.graph):
        if node.op_type == QUANTIZE:
            _quantize(model, node, quantized, relus)
        elif node.op_type == DEQUANTIZE:
            _dequantize(model, node, quantized)
        elif node in relus and node.graph is not None:
            quantized[node.outputs[0]] = quantized[operand(node)]
            node.outputs[0].dtype = ir.DataType.FLOAT
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


def _quantize(model: ir.Model, node: ir.Node, quantized: Quantized, relus: Collection[ir.Node]) -> None:
    (scale, zero), dtype = _parameters(node), node.outputs[0].dtype or ir.DataType.UINT8
    low, high = (np.asarray(bound - zero) for bound in BOUNDS[dtype])
    build, (y, low, high) = Steps(model, name_of(node)), _within(operand(node), scale, low, high)
    relu = single_reader(node.outputs[0])
    if relu in relus:
        low = np.maximum(low, 0)
    # A division by a constant is lowered as a product with its reciprocal, which a convolution in front takes into its weights.
    # The reciprocal is that of FP64: the product differs from ONNX's quotient by its last bit at most, and is the quotient
    # where the scale is a power of two, with which halves, to be rounded to even, are frequent.
    if not scale.ndim and (terms := _dequantized_terms(y)):
        y = _sum(build, y.producer(), terms, scale)
    elif np.any(scale != 1):
        y = build.add("_scaled", "Div", y, build.stored("_scale", scale))
    y = build.add("_rounded", "Round", y)
    if zero.ndim:  # each channel has its own bounds
        y = build.add("_floored", "Max", y, build.stored("_low", low))
        y = build.add("", "Min", y, build.stored("_high", high))
    else:
        y = build.add("", "Clip", y, build.stored("_low", low), build.stored("_high", high))
    whole = _replaced(model, node, build)
    quantized[whole] = Held(zero, dtype)
    if relu is not None and relu in relus:
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


def _sum(build: Steps, add: ir.Node | None, terms: list[tuple[ir.Node, np.ndarray]], scale: np.ndarray) -> ir.Value:
    """Makes (a * s + b * t) / u as a * (s / u) + b * (t / u): a convolution that makes a scales it, and then adds b."""
    products = []
    for of, s in terms:
        factor = build.stored(f", factor of {of.name}", s / scale)
        products.append(build.add(f", {of.name}", "Mul", operand(of), factor))
    y = build.add("", "Add", *products)
    build.steps[-1].name = None if add is None else add.name  # which it stands for
    return y


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
    build.steps[-1].meta["dequantizes"] = not scale.ndim
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


# ---- travelling: QuantizeLinear goes up, DequantizeLinear down, so that the operators between see the whole numbers


@dataclass(frozen=True, slots=True)
class Key:
    """The parameters of a quantiser. `zeros`: () if all are 0; `axis`: of several scales, else None."""

    scales: tuple[float, ...]
    zeros: tuple[int, ...]
    dtype: ir.DataType
    axis: int | None


Rule = Callable[[ir.Model, ir.Node, Key], bool]  # returns whether it changed the graph


def travel(model: ir.Model) -> set[ir.Node]:
    """Moves QuantizeLinear up and DequantizeLinear down through operators that place or compare elements, in place, and removes
    those that undo each other or are equal. Every tensor keeps its values.

    Returns the Relus between that now compare whole numbers with the zero point.
    """
    rules: tuple[Rule, ...] = (_once, _undone, _up, _down)
    changed, moved = True, False
    while changed:
        changed = False
        for node in list(model.graph):
            if node.graph is None or node.op_type not in (QUANTIZE, DEQUANTIZE):
                continue
            if not is_read(node.outputs[0]):
                model.graph.remove(node, safe=True)
            elif key := _key(node):
                changed |= any(rule(model, node, key) for rule in rules)
        moved |= changed
    if moved:
        model.graph.sort()
    return {node for node in model.graph if node.op_type == "Relu" and node.meta.get("moved")}


def _key(node: ir.Node) -> Key | None:
    """Returns the parameters of a node; None if they are computed."""
    scale, given = constant(operand(node, 1)), node.inputs[2] if len(node.inputs) > 2 else None
    zero, whole = constant(given), node.outputs[0] if node.op_type == QUANTIZE else operand(node)
    dtype = whole.dtype
    if scale is None or dtype not in BOUNDS or dtype is None or (given is not None and zero is None):
        return None
    zeros = () if zero is None or not zero.any() else tuple(zero.reshape(-1).tolist())
    axis = attribute(node, "axis", 1) if scale.size > 1 else None
    return Key(tuple(scale.reshape(-1).tolist()), zeros, dtype, axis)


def _like(node: ir.Node | None, op: str, key: Key) -> bool:
    return node is not None and node.op_type == op and _key(node) == key


def _once(model: ir.Model, node: ir.Node, key: Key) -> bool:
    """Removes another node that makes the same of the same tensor."""
    for use in operand(node).uses():
        other, y = use.node, use.node.outputs[0]
        if other is not node and use.idx == 0 and _like(other, node.op_type, key) and not y.is_graph_output():
            ir.convenience.replace_all_uses_with(y, node.outputs[0])
            model.graph.remove(other, safe=True)
            return True
    return False


def _undone(model: ir.Model, node: ir.Node, key: Key) -> bool:
    """Removes a QuantizeLinear behind a DequantizeLinear of the same parameters, which together change no whole number."""
    back, q = operand(node).producer(), node.outputs[0]
    if node.op_type != QUANTIZE or back is None or not _like(back, DEQUANTIZE, key) or q.is_graph_output():
        return False
    ir.convenience.replace_all_uses_with(q, operand(back))
    model.graph.remove(node, safe=True)
    return True


def _places(node: ir.Node, kinds: Collection[str]) -> bool:
    """Whether the node is of these operators, one that places or compares elements, and makes one tensor."""
    if node.op_type not in kinds or any(map(is_read, node.outputs[1:])):
        return False
    return node.op_type != "Resize" or attribute(node, "mode", "nearest") == "nearest"


def _up(model: ir.Model, node: ir.Node, key: Key) -> bool:
    """Moves a QuantizeLinear in front of the operator whose only reader it is, if that is the only reader of its inputs."""
    y, q = operand(node), node.outputs[0]
    place = y.producer()
    if node.op_type != QUANTIZE or key.axis is not None or q.is_graph_output() or single_reader(y) is not node:
        return False
    if place is None or not _places(place, (*KEEP, "Concat")):
        return False
    read = operands(place) if place.op_type == "Concat" else (operand(place),)
    if not all(_like(v.producer(), DEQUANTIZE, key) or _is_own(v, place) for v in read):
        return False
    for i, v in enumerate(read):
        made = ir.node(QUANTIZE, [v, *node.inputs[1:]], name=node.name if len(read) == 1 else f"{node.name}, {i}")
        made.outputs[0].dtype, made.outputs[0].shape = key.dtype, v.shape
        model.graph.insert_before(place, made)
        place.replace_input_with(i, made.outputs[0])
    y.dtype = key.dtype
    ir.convenience.replace_all_uses_with(q, y)
    model.graph.remove(node, safe=True)
    return True


def _is_own(v: ir.Value, place: ir.Node) -> bool:
    """Whether a computed tensor has this node as its only reader."""
    return v.producer() is not None and v.dtype == ir.DataType.FLOAT and single_reader(v) is place


def _down(model: ir.Model, node: ir.Node, key: Key) -> bool:
    """Moves a DequantizeLinear behind an operator that reads it; another one stays for other readers."""
    if node.op_type != DEQUANTIZE or key.axis is not None:
        return False
    for use in node.outputs[0].uses():
        place = use.node
        if (
            (use.idx and place.op_type != "Concat")
            or not _places(place, (*MOVES - {"Split"}, "Relu"))
            or not _passes(place, key)
        ):
            continue
        for i, v in enumerate(operands(place) if place.op_type == "Concat" else (operand(place),)):
            if (of := v.producer()) is not None:
                place.replace_input_with(i, operand(of))
        if _fills(place):
            place.resize_inputs(max(3, len(place.inputs)))
            zero = np.asarray((*key.zeros, 0)[0], key.dtype.numpy())
            place.replace_input_with(2, stored(model, f"{place.name}_whole_fill", zero))
        _behind(model, node, place, key)
        return True
    return False


def _behind(model: ir.Model, node: ir.Node, place: ir.Node, key: Key) -> None:
    """Puts a DequantizeLinear like `node` behind an operator that now reads whole numbers."""
    y = place.outputs[0]
    place.meta["moved"] = True
    made = ir.node(DEQUANTIZE, [y, *node.inputs[1:]], name=f"{node.name}, {place.name}")
    made.outputs[0].dtype, made.outputs[0].shape, y.dtype = ir.DataType.FLOAT, y.shape, key.dtype
    ir.convenience.replace_all_uses_with(y, made.outputs[0])
    made.replace_input_with(0, y)
    model.graph.insert_after(place, made)


def _fills(place: ir.Node) -> bool:
    return place.op_type == "Pad" and attribute(place, "mode", "constant") == "constant"


def _passes(place: ir.Node, key: Key) -> bool:
    """Whether whole numbers can pass through a node in place of dequantised ones, without more to compute."""
    y = place.outputs[0]
    if y.is_graph_output():
        return False
    if place.op_type == "Concat":
        return all(_like(v.producer(), DEQUANTIZE, key) for v in operands(place))
    if _fills(place):
        given = place.inputs[2] if len(place.inputs) > 2 else None
        fill = np.zeros(1) if given is None else constant(given)
        return fill is not None and not fill.any()
    if place.op_type in (*ENLARGE, "Relu"):  # if it becomes no larger, or no further operator
        layers = () if place.op_type == "Relu" else LAYERS
        return all(_like(use.node, QUANTIZE, key) or use.node.op_type in layers for use in y.uses())
    return True
