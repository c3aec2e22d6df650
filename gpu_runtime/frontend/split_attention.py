"""Replaces the sum of two groups of channels, weighted by a softmax of two (ResNeSt, SKNet), by a sigmoid gate.

    softmax(a, b) = (g, 1 - g) with g = sigmoid(a - b), so x0 g + x1 (1 - g) = (x0 - x1) g + x1

A convolution makes a and b, so with the differences of its rows as weights it makes a - b directly, and the softmax and the
views around it vanish. The gate depends on the average of x0 + x1; a convolution of that average equals a convolution of the
average of the concatenated groups with its weights repeated, so no sum of the groups is needed.

Example. Softmax over (8, 4) is (0.982, 0.018): g = sigmoid(4) = 0.982, and 3 g + 5 (1 - g) = (3 - 5) g + 5 = 3.04.
"""

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from gpu_runtime.frontend.normalize import Steps, replace_by, respell, shaped
from gpu_runtime.frontend.queries import attribute, constant, name_of, operand, operands, shape_of, single_reader
from tactics.problems.operators import VIEWS

MOST_GROUPS = 4  # whose average is taken: it multiplies the weights that read the average
MOST_LOGITS = 1 << 24  # whose numbers are followed through views


def of_two(model: ir.Model) -> None:
    """Replaces, in place, every sum over two groups that is weighted by a softmax of two."""
    respell({"Concat": _unstacked}, model)
    for node in [n for n in model.graph if n.op_type == "ReduceSum"]:
        groups = _groups(node, operand(node))
        product = operand(node).producer()
        if groups is not None:
            _average_both(model, node, groups)
        elif product is not None and product.op_type == "Mul" and single_reader(product.outputs[0]) is node:
            _gate(model, node, product)


# ---- groups


def _unstacked(build: Steps, node: ir.Node) -> ir.Value | None:
    """Turns a Concat of r tensors [N, 1, C, H, W] into a Concat along channels, [N, r C, H, W], reshaped to [N, r, C, H, W]."""
    shape = shape_of(node.outputs[0])
    stacked = [v.producer() for v in operands(node)]
    if len(shape) != 5 or attribute(node, "axis") not in (1, -4) or shape[1] != len(stacked):
        return None
    sources = [operand(before) for before in stacked if before is not None and before.op_type in ("Unsqueeze", "Reshape")]
    if len(sources) < len(stacked) or any(shape_of(source) != (shape[0], *shape[2:]) for source in sources):
        return None
    whole = build.add("_channels", "Concat", *sources, axis=1)
    shaped(whole, (shape[0], shape[1] * shape[2], *shape[3:]), node.outputs[0])
    return build.add("", "Reshape", whole, build.stored("_shape", np.array(shape), np.int64))


def _groups(node: ir.Node, x: ir.Value) -> ir.Value | None:
    """Returns the input [N, r C, H, W] of the Reshape that makes `x` [N, r, C, H, W], if `node` sums x over r; else None."""
    reshape = x.producer()
    if reshape is None or reshape.op_type != "Reshape" or len(shape_of(x)) != 5 or not _sums_groups(node):
        return None
    source, (n, r, c, *pixels) = operand(reshape), shape_of(x)
    return source if shape_of(source) == (n, r * c, *pixels) else None


def _sums_groups(node: ir.Node) -> bool:
    """Returns whether a ReduceSum of five axes sums the second axis only, and removes it."""
    axes = constant(node.inputs[1]) if len(node.inputs) > 1 else None
    five = len(shape_of(operand(node))) == 5
    return five and axes is not None and axes.tolist() in ([1], [-4]) and attribute(node, "keepdims", 1) == 0


# ---- the sum of all groups, averaged


def _average_both(model: ir.Model, node: ir.Node, groups: ir.Value) -> None:
    """Changes the average over pixels of node's output, the sum over r groups, into an average of `groups` [N, r C, H, W].

    The weights of the 1x1 convolutions that read the average are repeated r times, so that they add the groups. Nothing is
    changed if other nodes read the average.
    """
    mean = single_reader(node.outputs[0])
    if mean is None or not _averages_pixels(mean):
        return
    r = shape_of(operand(node))[1]
    readers = [use.node for use in mean.outputs[0].uses()]
    if r > MOST_GROUPS or mean.outputs[0].is_graph_output() or not all(_is_product(n, mean.outputs[0]) for n in readers):
        return
    for conv in readers:
        build = Steps(model, name_of(conv))
        w = np.asarray(constant(conv.inputs[1]))
        conv.replace_input_with(1, build.stored("_of_groups", np.tile(w, (1, r, 1, 1))))
    mean.replace_input_with(0, groups)
    mean.outputs[0].shape = ir.Shape((*shape_of(groups)[:2], 1, 1))


def _averages_pixels(node: ir.Node) -> bool:
    if node.op_type == "GlobalAveragePool":
        return True
    axes = constant(node.inputs[1]) if node.op_type == "ReduceMean" and len(node.inputs) > 1 else None
    return axes is not None and sorted(a % 4 for a in axes.tolist()) == [2, 3] and attribute(node, "keepdims", 1) == 1


def _is_product(node: ir.Node, x: ir.Value) -> bool:
    """Returns whether a node is a convolution of `x` by a constant 1x1 kernel, without groups or padding."""
    w = constant(node.inputs[1]) if node.op_type == "Conv" else None
    plain = w is not None and w.shape[2:] == (1, 1) and attribute(node, "group", 1) == 1
    return plain and node.inputs[0] is x and not any(attribute(node, "pads", (0,))) and constant(node.inputs[0]) is None


# ---- the weighted sum


@dataclass(frozen=True, slots=True)
class _Weights:
    """A convolution and, for each of C channels, the two of its output channels whose softmax weighs the two groups: `first`
    and `second`, both int [C]."""

    conv: ir.Node
    first: np.ndarray
    second: np.ndarray


def _gate(model: ir.Model, total: ir.Node, product: ir.Node) -> None:
    for slot in (0, 1):
        x, g = operand(product, slot), operand(product, 1 - slot)
        groups = _groups(total, x)
        found = None if groups is None or shape_of(x)[1] != 2 else _weights(g, shape_of(x))
        if groups is None or found is None:
            continue
        conv, build = found.conv, Steps(model, name_of(total))
        w = np.asarray(constant(conv.inputs[1]), np.float64)
        arrays = [w[found.first] - w[found.second]]
        if len(conv.inputs) > 2:
            b = np.asarray(constant(conv.inputs[2]), np.float64)
            arrays.append(b[found.first] - b[found.second])
        constants = [build.stored(f"_{i}", a.astype(np.float32)) for i, a in enumerate(arrays)]
        n, c = shape_of(groups)[0], len(found.first)
        sizes = build.stored("_sizes", np.array([c, c]), np.int64)
        split = ir.node("Split", [groups, sizes], {"axis": 1}, num_outputs=2, name=f"{name_of(total)}_groups")
        one, other = (shaped(half, (n, c, *shape_of(groups)[2:]), groups) for half in split.outputs)
        build.steps += [split, ir.node("Conv", [operand(conv), *constants], name=name_of(conv))]
        gate = build.add("_gate", "Sigmoid", build.steps[-1].outputs[0])
        build.add("", "Add", build.add("_weighted", "Mul", build.add("_apart", "Sub", one, other), gate), other)
        replace_by(model, total, build.steps)
        return


def _weights(g: ir.Value, shape: tuple[int, ...]) -> _Weights | None:
    """Returns the convolution from which the weights `g` [N, 2, C, 1, 1] of groups of `shape` [N, 2, C, H, W] come; None if
    there is no such convolution.

    Between the two there must be views, a softmax over two, and views, each the only reader of the one before.
    """
    n, _, c, *pixels = shape
    behind = _views_before(g)
    softmax = None if behind is None else behind[0].producer()
    if behind is None or softmax is None or softmax.op_type != "Softmax" or shape_of(g) != (n, 2, c, *(1 for _ in pixels)):
        return None
    logits = operand(softmax)
    axis = attribute(softmax, "axis", -1) % len(shape_of(logits))
    before = _views_before(logits) if single_reader(softmax.outputs[0]) is not None else None
    conv = None if before is None else before[0].producer()
    if before is None or conv is None or shape_of(logits)[axis] != 2 or not _is_product(conv, operand(conv)):
        return None
    if len(conv.inputs) > 2 and constant(conv.inputs[2]) is None or before[0].is_graph_output():
        return None
    if shape_of(before[0]) != (n, 2 * c, 1, 1) or n * 2 * c > MOST_LOGITS:
        return None
    index = _through(before[1], np.arange(n * 2 * c).reshape(n, 2 * c, 1, 1))
    partner = np.empty(n * 2 * c, np.int64)
    partner[index.ravel()] = np.flip(index, axis).ravel()
    at = _through(behind[1], index).reshape(n, 2, c)
    rows = at - np.arange(n).reshape(n, 1, 1) * 2 * c
    if not np.array_equal(partner[at[:, 0]], at[:, 1]) or np.any(rows != rows[:1]) or rows.min() < 0 or rows.max() >= 2 * c:
        return None
    return _Weights(conv, rows[0, 0], rows[0, 1])


def _views_before(value: ir.Value) -> tuple[ir.Value, list[ir.Node]] | None:
    """Returns (the input of the chain of views that ends in `value`, the nodes of the chain in order); None if another node
    reads a value inside of the chain.
    """
    views: list[ir.Node] = []
    while (node := value.producer()) is not None and node.op_type in (*VIEWS, "Identity"):
        if single_reader(value) is None:
            return None
        views.insert(0, node)
        value = operand(node)
    return (value, views) if single_reader(value) is not None else None


def _through(views: list[ir.Node], index: np.ndarray) -> np.ndarray:
    """Returns `index`, an array of the elements' numbers, after the views."""
    for node in views:
        if node.op_type == "Transpose":
            index = index.transpose(attribute(node, "perm", tuple(reversed(range(index.ndim)))))
        else:
            index = index.reshape(shape_of(node.outputs[0]))
    return index
