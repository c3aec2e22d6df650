"""Moves QuantizeLinear up and DequantizeLinear down an onnx-ir graph, so that the operators between see the whole numbers."""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from gpu_runtime.frontend.files.quantized import DEQUANTIZE, QUANTIZE
from gpu_runtime.frontend.normalize import stored
from gpu_runtime.frontend.queries import attribute, constant, is_read, operand, operands, single_reader

BOUNDS = {ir.DataType.INT8: (-128, 127), ir.DataType.UINT8: (0, 255)}
# Operators of 8-bit tensors that place or compare their elements, whatever the zero point.
MOVES = frozenset(
    """Concat DepthToSpace Expand Flatten Gather Identity MaxPool Pad ReduceMax ReduceMin Reshape Resize Slice SpaceToDepth
    Split Squeeze Tile Transpose Unsqueeze""".split()
)
LAYERS = ("Conv", "ConvTranspose", "Gemm", "MatMul")  # a scale in front of one is a scale behind it
ENLARGE = ("Expand", "Resize", "Tile")
# Operators past which QuantizeLinear moves up: they keep all elements, or the largest of their windows.
KEEP = ("DepthToSpace", "Flatten", "MaxPool", "Reshape", "Resize", "SpaceToDepth", "Squeeze", "Transpose", "Unsqueeze")


@dataclass(frozen=True, slots=True)
class Key:
    """The parameters of a quantiser. `zeros`: () if all are 0; `axis`: of several scales, else None."""

    scales: tuple[float, ...]
    zeros: tuple[int, ...]
    dtype: ir.DataType
    axis: int | None


def travel(model: ir.Model) -> set[ir.Node]:
    """Moves QuantizeLinear up and DequantizeLinear down through operators that place or compare elements, in place, and removes
    those that undo each other or are equal. Every tensor keeps its values.

    Returns the Relus between that now compare whole numbers with the zero point.
    """
    changed, moved = True, False
    while changed:
        changed = False
        for node in list(model.graph):
            if node.graph is None or node.op_type not in (QUANTIZE, DEQUANTIZE):
                continue
            if not is_read(node.outputs[0]):
                model.graph.remove(node, safe=True)
            elif key := _key(node):
                changed |= any(rule(model, node, key) for rule in (_once, _undone, _up, _down))
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
    y, q, place = operand(node), node.outputs[0], operand(node).producer()
    if node.op_type != QUANTIZE or key.axis is not None or q.is_graph_output() or single_reader(y) is not node:
        return False
    if place is None or not _places(place, (*KEEP, "Concat")):
        return False
    read = operands(place) if place.op_type == "Concat" else (operand(place),)
    own = (v.producer() and v.dtype == ir.DataType.FLOAT and single_reader(v) is place for v in read)  # of no other reader
    if not all(alone or _like(v.producer(), DEQUANTIZE, key) for v, alone in zip(read, own, strict=True)):
        return False
    for i, v in enumerate(read):
        made = ir.node(QUANTIZE, [v, *node.inputs[1:]], name=node.name if len(read) == 1 else f"{node.name}, {i}")
        made.outputs[0].dtype, made.outputs[0].shape = key.dtype, v.shape
        model.graph.insert_before(place, made)
        place.replace_input_with(i, made.outputs[0])
    y.dtype, y.name = key.dtype, q.name
    ir.convenience.replace_all_uses_with(q, y)
    model.graph.remove(node, safe=True)
    return True


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
    made.outputs[0].name, y.name = y.name, f"{y.name}, whole numbers"
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
