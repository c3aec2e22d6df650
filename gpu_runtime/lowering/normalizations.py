"""Normalizations as exporters write them in several nodes -> one unit, with the scale and shift behind it.

(x - mean) / sqrt(variance + epsilon) in seven nodes, from before LayerNormalization was an operator; and the normalization of
groups of channels, from before GroupNormalization was one: InstanceNormalization between two Reshapes.
"""

import numpy as np

from gpu_runtime.frontend.queries import Node, Value, attribute, constant, operand, per_channel, row, shape_of, single_reader
from gpu_runtime.lowering.pointwise import Affine, steps, then
from gpu_runtime.lowering.units import Unit, of_nodes

SCALES = ("Add", "Sub", "Mul", "Div", "BatchNormalization")  # by constants


def group_normalization_at(node: Node) -> tuple[Unit, Node] | None:
    """Returns (the GroupNormalization in several nodes that begins at `node`, its last node); None if none begins there.

    InstanceNormalization of groups of channels, between Reshape(x) to [N, groups, ...] and a Reshape to x's shape; then scales
    and shifts per channel.
    """
    nodes = row(node, "Reshape", "InstanceNormalization", "Reshape") or row(node, "InstanceNormalization")
    if not nodes:
        return None
    within, back = nodes[len(nodes) // 2], nodes[-1]
    y, shape, inside = back.outputs[0], shape_of(operand(node)), shape_of(operand(within))
    if len(shape) < 3 or shape_of(y) != shape or len(inside) < 3 or inside[0] != shape[0] or shape[1] % inside[1]:
        return None
    parameters = [np.asarray(a, np.float64).reshape(-1) for v in within.inputs[1:3] if (a := constant(v)) is not None]
    if [a.size for a in parameters] != [inside[1]] * 2:
        return None
    scale, shift = (a.repeat(shape[1] // inside[1]) for a in parameters)
    (scale, shift), scaled = _scaled_after(y, (scale, shift), 1)
    used, weights = (*nodes, *scaled), {"scale": scale, "bias": shift}
    return (of_nodes("GroupNormalization", within, used, operand(node), weights), used[-1]) if len(used) > 1 else None


def normalization_at(node: Node) -> tuple[Unit, Node] | None:
    """Returns (the normalization that begins at the ReduceMean `node`, with the scale and shift behind it; its last node); None
    if none begins there.

    mean = ReduceMean(x); d = Sub(x, mean); variance = ReduceMean(d * d or Pow(d, 2)); d / Sqrt(variance + epsilon).
    """
    first = row(node, "ReduceMean", "Sub") if _means(node) else ()
    if not first or list(first[1].inputs) != [node.inputs[0], node.outputs[0]]:
        return None
    less = first[1]
    found = _square_and_quotient(less)
    nodes = row(found[0], found[0].op_type, "ReduceMean", "Add", "Sqrt", "Div") if found is not None else ()
    if found is None or not nodes or not _means(nodes[1], node) or nodes[4] is not found[1]:
        return None
    epsilon = next((c for c in map(constant, nodes[2].inputs) if c is not None and c.size == 1), None)
    if epsilon is None:
        return None
    weights = {"epsilon": np.array([float(epsilon.reshape(()))], np.float64)}
    used, axis, shape = (node, less, *nodes), _affine_axis(node), shape_of(operand(node))
    if len(shape) < 5:
        (scale, shift), scaled = _scaled_after(used[-1].outputs[0], (np.ones(shape[axis]), np.zeros(shape[axis])), axis)
        weights |= {"scale": scale, "bias": shift} if scaled else {}
        used = (*used, *scaled)
    return of_nodes("Standardize", node, used, operand(node), weights, axis), used[-1]


def _square_and_quotient(less: Node) -> tuple[Node, Node] | None:
    """The two nodes that read the deviation d: d * d or Pow(d, 2), and Div(d, ...)."""
    d, readers = less.outputs[0], [use.node for use in less.outputs[0].uses()]
    square = next((n for n in readers if n.op_type in ("Mul", "Pow")), None)
    quotient = next((n for n in readers if n.op_type == "Div" and n.inputs[0] is d), None)
    if square is None or quotient is None or set(readers) != {square, quotient} or d.is_graph_output():
        return None
    power = constant(square.inputs[1]) if square.op_type == "Pow" and square.inputs[0] is d else None
    by_two = power is not None and power.size == 1 and float(power.reshape(())) == 2
    by_itself = square.op_type == "Mul" and list(square.inputs) == [d, d]
    return (square, quotient) if by_two or by_itself else None


def _means(node: Node, like: Node | None = None) -> bool:
    """Whether node is a ReduceMean that keeps its dimensions, over given axes (those of `like`)."""
    axes = _axes(node)
    if axes is None or not axes or attribute(node, "keepdims", 1) != 1:
        return False
    return like is None or axes == _axes(like)


def _affine_axis(node: Node) -> int:
    """Returns the axis of scale and shift behind the normalization that begins at the ReduceMean `node`: the last axis if it is
    normalized, else the channels'."""
    rank = len(shape_of(operand(node)))
    return rank - 1 if [a % rank for a in _axes(node) or ()] == [rank - 1] else 1


def _axes(node: Node) -> list[int] | None:
    axes = constant(node.inputs[1]) if node.op_type == "ReduceMean" and len(node.inputs) > 1 else None
    return None if axes is None else np.sort(axes, axis=None).tolist()


def _scaled_after(value: Value, affine: Affine, axis: int) -> tuple[Affine, tuple[Node, ...]]:
    """Returns (scale and shift along an axis, FP64; nodes): `affine` composed with all scales and shifts behind `value`. The
    values between have no other readers."""
    nodes: list[Node] = []
    while (node := single_reader(value)) is not None and (more := _with_node(affine, node, value, axis)) is not None:
        affine, value = more, node.outputs[0]
        nodes.append(node)
    return affine, tuple(nodes)


def _with_node(affine: Affine, node: Node, value: Value, axis: int) -> Affine | None:
    """Composes scale and shift with a node that reads `value`; None where the node is neither."""
    found = steps(node, value) if node.op_type in SCALES and shape_of(node.outputs[0]) == shape_of(value) else None
    together: Affine | None = affine if found else None
    for op, other, params in found or ():
        given = np.array(params) if other is None else other
        c = per_channel(given, shape_of(value), axis) if isinstance(given, np.ndarray) else None
        together = None if c is None or together is None else then(together, op, c)
    return together
