"""Normalizations as exporters write them in several nodes -> one layer, with the scale and shift behind it.

(x - mean) / sqrt(variance + epsilon) in seven nodes, from before LayerNormalization was an operator; and the normalization of
groups of channels, from before GroupNormalization was one: InstanceNormalization between two Reshapes.
"""

import numpy as np
import onnx_ir as ir

from gpu_runtime.frontend.queries import attribute, constant, operand, row, shape_of
from gpu_runtime.fusion.chains import Affine, scaled_after


def group_normalization_at(node: ir.Node) -> tuple[Affine, tuple[ir.Node, ...], ir.Node] | None:
    """(scale and shift, each [C], all nodes, the InstanceNormalization among them) of a normalization with constants in several
    nodes that begins at `node`; None if none does.

    InstanceNormalization, of groups of channels between Reshape(x) to [N, groups, ...] and a Reshape to x's shape; then scales
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
    affine, scaled = scaled_after(y, (scale, shift), 1)
    used = (*nodes, *scaled)
    return (affine, used, within) if len(used) > 1 else None


def normalization_at(node: ir.Node) -> tuple[float, tuple[ir.Node, ...]] | None:
    """(epsilon, nodes) of the normalization that begins at the ReduceMean `node`; None if none does.

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
    add = nodes[2]
    epsilon = next((c for c in map(constant, add.inputs) if c is not None and c.size == 1), None)
    return None if epsilon is None else (float(epsilon.reshape(())), (node, less, *nodes))


def _square_and_quotient(less: ir.Node) -> tuple[ir.Node, ir.Node] | None:
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


def _means(node: ir.Node, like: ir.Node | None = None) -> bool:
    """Whether node is a ReduceMean that keeps its dimensions, over given axes (those of `like`)."""
    axes = _axes(node)
    if axes is None or not axes or attribute(node, "keepdims", 1) != 1:
        return False
    return like is None or axes == _axes(like)


def affine_axis(node: ir.Node) -> int:
    """The axis along which scale and shift lie behind the normalization that begins at the ReduceMean `node`: its own if it
    goes along the last one, else the channels'."""
    rank = len(shape_of(operand(node)))
    return rank - 1 if [a % rank for a in _axes(node) or ()] == [rank - 1] else 1


def _axes(node: ir.Node) -> list[int] | None:
    axes = constant(node.inputs[1]) if node.op_type == "ReduceMean" and len(node.inputs) > 1 else None
    return None if axes is None else np.sort(axes, axis=None).tolist()
