"""(x - mean) / sqrt(variance + epsilon) as exporters write it before LayerNormalization was an operator: seven nodes -> one."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from gpu_runtime.frontend.queries import attribute, constant, single_reader


def normalization_at(node: ir.Node) -> tuple[float, tuple[ir.Node, ...]] | None:
    """(epsilon, nodes) of the normalization that begins at the ReduceMean `node`; None if none does.

    mean = ReduceMean(x); d = Sub(x, mean); variance = ReduceMean(d * d or Pow(d, 2)); d / Sqrt(variance + epsilon).
    """
    less = _reader(node, "Sub") if _means(node) else None
    if less is None or list(less.inputs) != [node.inputs[0], node.outputs[0]]:
        return None
    found = _square_and_quotient(less)
    if found is None:
        return None
    square, quotient = found
    variance = _reader(square, "ReduceMean")
    add = _reader(variance, "Add") if variance is not None and _means(variance, node) else None
    root = _reader(add, "Sqrt")
    if variance is None or add is None or root is None or _reader(root, "Div") is not quotient:
        return None
    epsilon = next((c for c in map(constant, add.inputs) if c is not None and c.size == 1), None)
    return None if epsilon is None else (float(epsilon.reshape(())), (node, less, square, variance, add, root, quotient))


def _reader(node: ir.Node | None, op: str) -> ir.Node | None:
    """The node of that type that alone reads what `node` gives."""
    reader = None if node is None else single_reader(node.outputs[0])
    return reader if reader is not None and reader.op_type == op else None


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


def _axes(node: ir.Node) -> list[int] | None:
    axes = constant(node.inputs[1]) if node.op_type == "ReduceMean" and len(node.inputs) > 1 else None
    return None if axes is None else np.sort(axes, axis=None).tolist()
