"""(x - mean) / sqrt(variance + epsilon) as exporters write it before LayerNormalization was an operator: seven nodes -> one."""

from __future__ import annotations

import numpy as np

from gpu_runtime.frontend.queries import attribute, constant, single_reader


def normalization_at(node) -> tuple[float, list] | None:
    """(epsilon, nodes) of the normalization that begins at the ReduceMean `node`; None if none does.

    mean = ReduceMean(x); d = Sub(x, mean); variance = ReduceMean(d * d or Pow(d, 2)); d / Sqrt(variance + epsilon).
    """
    if not _means(node):
        return None
    less = single_reader(node.outputs[0])
    if less is None or less.op_type != "Sub" or list(less.inputs) != [node.inputs[0], node.outputs[0]]:
        return None
    d, readers = less.outputs[0], [use.node for use in less.outputs[0].uses()]
    square = next((n for n in readers if n.op_type in ("Mul", "Pow")), None)
    last = next((n for n in readers if n.op_type == "Div" and n.inputs[0] is d), None)
    if square is None or last is None or set(readers) != {square, last} or d.is_graph_output():
        return None
    power = constant(square.inputs[1])
    if list(square.inputs) != [d, d] and not (square.op_type == "Pow" and square.inputs[0] is d and power is not None
                                             and power.size == 1 and float(power.reshape(())) == 2):  # fmt: skip
        return None
    variance = single_reader(square.outputs[0])
    add = None if variance is None or not _means(variance, node) else single_reader(variance.outputs[0])
    root = None if add is None or add.op_type != "Add" else single_reader(add.outputs[0])
    if root is None or root.op_type != "Sqrt" or single_reader(root.outputs[0]) is not last:
        return None
    epsilon = next((c for c in map(constant, add.inputs) if c is not None and c.size == 1), None)
    if epsilon is None:
        return None
    return float(epsilon.reshape(())), [node, less, square, variance, add, root, last]


def _means(node, like=None) -> bool:
    """Whether node is a ReduceMean that keeps its dimensions, over given axes (those of `like`)."""
    axes = constant(node.inputs[1]) if node.op_type == "ReduceMean" and len(node.inputs) > 1 else None
    same = like is None or (axes is not None and np.array_equal(np.sort(axes), np.sort(constant(like.inputs[1]))))
    return axes is not None and axes.size > 0 and attribute(node, "keepdims", 1) == 1 and same
