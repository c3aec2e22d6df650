"""Respells operators of an onnx-ir graph for the later stages: one spelling of each, and fewer layers.

Each function changes a model in place and keeps its results; `respell` does so by a table of rules, one for an operator:
group_norms and SPLIT before constants are folded, the others after.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import onnx_ir as ir

from gpu_runtime.errors import ModelError
from gpu_runtime.frontend.queries import attribute, constant, is_static, name_of, operand, operands, row, shape_of

LOWEST_HALF = -65504.0
INTEGERS = (ir.DataType.INT32, ir.DataType.INT64)
MOST_RUNS = 4  # groups of axes along which two tensors broadcast alike: elementwise kernels take no more
MOST_FOLDED = 2**27  # elements of all constants that an import computes: those of the largest classifiers' weights


def group_norms(model: ir.Model) -> None:
    """Renames GroupNormalization to InstanceNormalization that keeps num_groups, since onnx infers only the latter's shape."""
    for node in model.graph:
        if node.op_type == "GroupNormalization":
            node.op_type = "InstanceNormalization"


def _sum(build: Steps, node: ir.Node) -> ir.Value | None:
    """Turns Sum, Mean, Max and Min of n tensors into a chain of operations of two, so that each has one spelling.

    Removes a scalar without effect: -infinity in Max, infinity in Min.
    """
    nothing = {"Max": -math.inf, "Min": math.inf}.get(node.op_type)
    kept = [v for v in operands(node) if (c := constant(v)) is None or c.ndim or float(c) != nothing] or operands(node)
    if nothing is not None and len(kept) == len(node.inputs) == 2:
        return None
    y, *terms = kept
    for i, term in enumerate(terms):
        y = build.add(f"_{i}", {"Sum": "Add", "Mean": "Add"}.get(node.op_type, node.op_type), y, term)
    if node.op_type == "Mean" and terms:
        y = build.add("", "Mul", y, build.stored("_part", 1 / len(node.inputs)))
    y = y if terms else build.add("", "Identity", y)
    build.steps[-1].name = node.name
    return y


def _selu(build: Steps, node: ir.Node) -> ir.Value:
    """Turns Selu into Elu times its factor, which is a scale like any other."""
    y = build.add("_elu", "Elu", operand(node), alpha=attribute(node, "alpha", 1.6732632423543772))
    return build.add("", "Mul", y, build.stored("_gamma", attribute(node, "gamma", 1.0507009873554805)))


def _gemm(build: Steps, node: ir.Node) -> ir.Value | None:
    """Turns a Gemm that is neither a convolution nor a product into one, or into MatMul by a constant first matrix.

    Its transposition, its factor, and an addend that is not constant per column become separate operators.
    """
    left, right = constant(node.inputs[0]), constant(node.inputs[1])
    folds, scales = _addend_folds(node), attribute(node, "alpha", 1.0) != 1
    if folds and (not attribute(node, "transA", 0) if right is not None else left is None and not scales):
        return None
    y = _product(build, node, folds)
    return y if folds or len(node.inputs) < 3 or node.inputs[2] is None else build.add("_sum", "Add", y, _addend(build, node))


def _addend_folds(node: ir.Node) -> bool:
    """Whether a Gemm has no third operand, or one that is constant per column, with a constant second matrix."""
    if len(node.inputs) < 3 or node.inputs[2] is None:
        return True
    addend = constant(node.inputs[2])
    return constant(node.inputs[1]) is not None and addend is not None and math.prod(addend.shape[:-1]) == 1


def _product(build: Steps, node: ir.Node, folds: bool) -> ir.Value:
    """Makes a Gemm's product and factor, and its addend if it `folds`."""
    a, b, left = operand(node, 0), operand(node, 1), constant(node.inputs[0])
    alpha, turn_a, turn_b = attribute(node, "alpha", 1.0), attribute(node, "transA", 0), attribute(node, "transB", 0)
    if left is not None:
        matrix = build.stored("_left", alpha * (left.T if turn_a else left))
        return build.add("", "MatMul", matrix, build.add("_right", "Transpose", b, perm=[1, 0]) if turn_b else b)
    if constant(b) is not None:
        x = build.add("_left", "Transpose", a, perm=[1, 0]) if turn_a else a
        addend = [operand(node, 2)] if folds and len(node.inputs) > 2 and node.inputs[2] is not None else []
        return build.add("", "Gemm", x, b, *addend, alpha=alpha, beta=attribute(node, "beta", 1.0), transB=turn_b)
    y = build.add("", "Gemm", a, b, transA=turn_a, transB=turn_b)
    return y if alpha == 1 else build.add("_scaled", "Mul", y, build.stored("_alpha", alpha))


def _addend(build: Steps, node: ir.Node) -> ir.Value:
    """Makes a Gemm's third operand times beta."""
    c, beta = operand(node, 2), attribute(node, "beta", 1.0)
    array = constant(c)
    if beta == 1:
        return c
    if array is not None:
        return build.stored("_addend", beta * array)
    return build.add("_addend", "Mul", c, build.stored("_beta", beta))


def _power(build: Steps, node: ir.Node) -> ir.Value | None:
    """Turns integer exponents of floating-point tensors into floating-point ones."""
    x, exponent = operands(node)
    array = constant(exponent)
    if x.dtype != ir.DataType.FLOAT or (array is None and exponent.dtype not in INTEGERS):
        return None
    if array is None:
        return build.add("", "Pow", x, build.add("_exponent", "Cast", exponent, to=ir.DataType.FLOAT.value))
    return build.add("", "Pow", x, build.stored("_exponent", array))


def _swish(build: Steps, node: ir.Node) -> ir.Value:
    """Respells Swish, of opset 24, in older operators: x * Sigmoid(alpha * x)."""
    x, alpha = operand(node), attribute(node, "alpha", 1.0)
    scaled = x if alpha == 1 else build.add("_scaled", "Mul", x, build.stored("_alpha", alpha))
    return build.add("", "Mul", x, build.add("_gate", "Sigmoid", scaled))


def pads_into_windows(model: ir.Model) -> None:
    """Moves a Pad that only convolutions and pools read into their pads, where the result is the same."""
    for pad in [n for n in model.graph if n.op_type == "Pad" and not n.outputs[0].is_graph_output()]:
        rows = _padded_pixels(pad)
        readers = [(use.node, use.idx) for use in pad.outputs[0].uses()]
        if rows is None or not readers or not all(_takes_pads(node, slot, rows, _fill(pad)) for node, slot in readers):
            continue
        for node, slot in readers:
            own = attribute(node, "pads", (0,) * len(rows))
            node.attributes["pads"] = ir.AttrInt64s("pads", [a + b for a, b in zip(own, rows, strict=True)])
            node.attributes.pop("auto_pad", None)
            if node.op_type == "AveragePool":
                node.attributes["count_include_pad"] = ir.AttrInt64("count_include_pad", 1)
            node.replace_input_with(slot, pad.inputs[0])
        model.graph.remove(pad, safe=True)


def _padded_pixels(pad: ir.Node) -> tuple[int, ...] | None:
    """Returns a Pad's sizes in the form of a convolution's `pads`, if it only adds a constant around the pixels; else None."""
    x, pads, _, axes = (*pad.inputs, None, None)[:4]
    sizes, chosen = constant(pads), constant(axes)
    constants = all(v is None or constant(v) is not None for v in pad.inputs[1:])
    if x is None or x.shape is None or len(x.shape) < 3 or sizes is None or not constants:
        return None
    rank, counts = len(x.shape), [int(v) for v in sizes]
    at = range(rank) if chosen is None else [int(a) % rank for a in chosen]
    low, high = [0] * rank, [0] * rank
    for i, a in enumerate(at):
        low[a], high[a] = counts[i], counts[i + len(counts) // 2]
    plain = attribute(pad, "mode", "constant") == "constant" and not any((*low[:2], *high[:2])) and min((*low, *high)) >= 0
    return (*low[2:], *high[2:]) if plain else None


def _fill(pad: ir.Node) -> float:
    value = constant(pad.inputs[2]) if len(pad.inputs) > 2 else None
    return 0.0 if value is None else float(value.reshape(-1)[0])


def _takes_pads(node: ir.Node, slot: int, rows: tuple[int, ...], fill: float) -> bool:
    """Whether a reader's own pads of these sizes can replace a Pad before it."""
    own, without = attribute(node, "pads", (0,) * len(rows)), ("NOTSET", "VALID")
    if slot != 0 or attribute(node, "auto_pad", "NOTSET") not in without or len(own) != len(rows):
        return False
    if attribute(node, "ceil_mode", 0):
        return False
    if node.op_type == "AveragePool":
        return fill == 0 and (attribute(node, "count_include_pad", 0) == 1 or not any(own))
    if node.op_type == "MaxPool":  # its padding never wins: no more does what FP16 has no smaller value for
        size, step = attribute(node, "kernel_shape", ()), attribute(node, "dilations", (1,) * (len(rows) // 2))
        reach = [(k - 1) * d for k, d in zip(size, step, strict=True)] * 2
        some = all(a + b <= r for a, b, r in zip(own, rows, reach, strict=True))  # of the image is in every window
        return fill <= LOWEST_HALF and len(node.outputs) == 1 and some
    return node.op_type == "Conv" and fill == 0


def softmax_where_it_lies(model: ir.Model) -> None:
    """Replaces a Softmax between a Transpose and its inverse by a Softmax along the axis before the Transpose."""
    for node in [n for n in model.graph if n.op_type == "Transpose"]:
        found = row(node, "Transpose", "Softmax", "Transpose") or row(node, "Transpose", "LogSoftmax", "Transpose")
        if not found or any("perm" not in n.attributes for n in (found[0], found[2])):
            continue
        before, softmax, after = found
        perm = attribute(before, "perm")
        if [perm[i] for i in attribute(after, "perm")] != list(range(len(perm))):
            continue
        plain = ir.node(softmax.op_type, [before.inputs[0]], {"axis": perm[attribute(softmax, "axis", -1)]}, name=softmax.name)
        replace_by(model, after, [plain])
        model.graph.remove([softmax, before], safe=True)


@dataclass(slots=True)
class _Piece:
    """A tensor of a Concat, with the numbers of zeros before and behind it that stand in for constants."""

    value: ir.Value
    before: int
    behind: int = 0


def _joined(build: Steps, node: ir.Node) -> ir.Value | None:
    """Turns a Concat with constants among floating-point tensors into the tensors padded with zeros, plus the constants padded
    with zeros: moves and a sum, which have kernels and change no value.
    """
    if not all(map(is_static, node.inputs)) or not (rank := len(shape_of(operand(node)))):
        return None
    axis = attribute(node, "axis") % rank
    tensors = [v for v in operands(node) if v.const_value is None]
    constants = [v for v in operands(node) if v.const_value is not None]
    if {v.dtype for v in tensors} != {ir.DataType.FLOAT} or not any(shape_of(v)[axis] for v in constants):
        return None
    addend, pieces = _constants_and_pieces(node, axis)
    names, parts = iter(f"_{i}" for i in range(len(pieces) + 1)), []
    for i, piece in enumerate(pieces):
        value = piece.value
        if piece.before or piece.behind:
            pads = np.zeros((2, rank), np.int64)
            pads[:, axis] = piece.before, piece.behind
            value = build.add(next(names), "Pad", value, build.stored(f"_zeros_{i}", pads.reshape(-1), np.int64))
        parts.append(value)
    whole = build.add(next(names), "Concat", *parts, axis=axis) if len(parts) > 1 else parts[0]
    return build.add("", "Add", whole, build.stored("_constants", addend))


def _constants_and_pieces(node: ir.Node, axis: int) -> tuple[np.ndarray, list[_Piece]]:
    """Returns (a Concat's constants, with zeros in place of its tensors; its tensors)."""
    pieces: list[_Piece] = []
    arrays: list[np.ndarray] = []
    before = 0
    for v in operands(node):
        array, size = constant(v), shape_of(v)[axis]
        arrays.append(np.zeros(shape_of(v), np.float32) if array is None else array.astype(np.float32))
        if array is None:
            pieces.append(_Piece(v, 0 if pieces else before))
        elif pieces:
            pieces[-1].behind += size
        else:
            before += size
    return np.concatenate(arrays, axis), pieces


def _whole_batches(build: Steps, node: ir.Node) -> ir.Value | None:
    """Repeats the operands of a MatMul whose batches broadcast in a way that kernels do not support; constants are repeated
    here.

    Kernels take a constant of the last batches of a tensor that has all of them, and two tensors that repeat along one or both
    of two axes, or altogether.
    """
    if not all(map(is_static, node.inputs)):
        return None
    inputs, arrays = [*operands(node)], [constant(v) for v in node.inputs]
    shapes, both = [shape_of(v) for v in inputs], all(a is None for a in arrays)
    over = np.broadcast_shapes(*(s[:-2] for s in shapes))
    for slot, (array, shape) in enumerate(zip(arrays, shapes, strict=True)):
        wanted = (*over, *shape[-2:])
        if not _repeats_otherwise(shape[:-2], over, array is not None, both):
            continue
        if array is None:
            size = build.stored(f"_batches_{slot}", np.array(wanted), np.int64)
            inputs[slot] = build.add(f"_operand_{slot}", "Expand", inputs[slot], size)
        elif math.prod(wanted) <= MOST_FOLDED:
            inputs[slot] = build.stored(f"_operand_{slot}", np.ascontiguousarray(np.broadcast_to(array, wanted)))
    return build.add("", "MatMul", *inputs) if inputs != [*operands(node)] else None


def _repeats_otherwise(batches: tuple[int, ...], over: tuple[int, ...], stored: bool, both: bool) -> bool:
    """Whether an operand of these batches must be repeated because kernels cannot broadcast it.

    `stored`: it is a constant; `both`: both operands are computed.
    """
    own = (1,) * (len(over) - len(batches)) + batches
    first = next((i for i, d in enumerate(own) if d != 1), len(own))
    if own == over or math.prod(own) == 1:
        return False
    return own[first:] != over[first:] if stored else len(over) > 2 or not both


def _einsum(build: Steps, node: ir.Node) -> ir.Value | None:
    """Turns Einsum of one or two tensors into sums, moves, and one product: of matrices for each batch, or of elements.

    bhwc,hkc->bhwk: batch h, rows b w, summed c, columns k; [h, b w, c] @ [h, c, k] = [h, b w, k], which is moved to b h w k.
    Axes that only one tensor has, and the result lacks, are summed first.
    """
    if not all(map(is_static, node.inputs)):
        return None
    tensors, (written, result), y = operands(node), _sides_of(attribute(node, "equation")), node.outputs[0]
    dots = [len(shape_of(v)) - len(t.replace("...", "")) for v, t in zip(tensors, written, strict=True)]
    named, out = [_axes_of(t, n) for t, n in zip(written, dots, strict=True)], _axes_of(result, max(dots))
    given = [dict(zip(names, shape_of(v), strict=True)) for names, v in zip(named, tensors, strict=True)]
    sizes = {a: max(each.get(a, 1) for each in given) for a in {**given[0], **given[-1]}}
    if any(size not in (1, sizes[a]) for each in given for a, size in each.items()):
        raise ModelError(f"Einsum {node.name}: {attribute(node, 'equation')!r} does not fit {[shape_of(v) for v in tensors]}")
    own = [[a for a, size in each.items() if size == sizes[a]] for each in given]  # one element repeats, as without the axis

    def laid(i: int, *groups: list[str]) -> ir.Value:
        """Returns the equation's tensor i, moved and reshaped to one axis for each group of its axes; its other axes are
        summed.

        An axis is the letter that names it in the equation, or the number of an ellipsis axis. An axis of a group that
        tensor i lacks is left out; a group of none of its axes gives an axis of size 1. A constant is computed here, else
        nodes are added.
        """
        order = [a for group in groups for a in group if a in own[i]]
        shape = [math.prod(sizes[a] for a in group if a in own[i]) for group in groups]
        x, array, at = tensors[i], constant(tensors[i]), [*sizes].index
        if array is not None:
            moved = np.einsum(array, [at(a) for a in named[i]], [at(a) for a in order])
            return build.stored(f"_{i}", moved.reshape(shape), array.dtype.type)
        if gone := [n for n, a in enumerate(named[i]) if a not in order]:
            x = build.add(f"_sum_{i}", "ReduceSum", x, build.stored(f"_axes_{i}", np.array(gone), np.int64), keepdims=0)
        left = [a for a in named[i] if a in order]
        if left != order:
            x = build.add(f"_turn_{i}", "Transpose", x, perm=[left.index(a) for a in order])
        x = build.add(f"_{i}", "Reshape", x, build.stored(f"_shape_{i}", np.array(shape), np.int64))
        return shaped(x, tuple(shape), y)

    alone = [[a] for a in out]
    if len(own) == 1:
        return laid(0, *alone)
    both = [a for a in own[0] if a in own[1]]
    summed, batch = [a for a in both if a not in out], [a for a in both if a in out]
    turns = sum([a in axes for axes in own] != [b in axes for axes in own] for a, b in pairwise(out))
    if not summed and turns < MOST_RUNS:
        return build.add("", "Mul", laid(0, *alone), laid(1, *alone))
    rows, columns = ([a for a in axes if a in out and a not in both] for axes in own)
    head, order = [batch] if batch else [], [*batch, *rows, *columns]
    whole = build.add("", "MatMul" if summed else "Mul", laid(0, *head, rows, summed), laid(1, *head, summed, columns))
    whole = build.add("_shape", "Reshape", whole, build.stored("_sizes", np.array([sizes[a] for a in order]), np.int64))
    return build.add("_turn", "Transpose", whole, perm=[order.index(a) for a in out])


def _sides_of(equation: str) -> tuple[list[str], str]:
    """Splits an equation into (the axes of each tensor, the axes of the result: as written, else the letters that occur once,
    in order).
    """
    left, arrow, right = equation.replace(" ", "").partition("->")
    once = "".join(sorted(a for a in {*left} - {*".,"} if left.count(a) == 1))
    return left.split(","), right if arrow else "..." * ("..." in left) + once


def _axes_of(term: str, dots: int) -> list[str]:
    """Names each axis of a term: by its letter, or within an ellipsis by the number of ellipsis axes that follow."""
    before, ellipsis, behind = term.partition("...")
    return [*before, *map(str, reversed(range(dots if ellipsis else 0))), *behind]


class Steps:
    """Nodes that together replace one node, and their constants; every name begins with the replaced node's."""

    def __init__(self, model: ir.Model, name: str) -> None:
        self.model, self.name = model, name
        self.steps: list[ir.Node] = []

    def add(self, suffix: str, op: str, *inputs: ir.Value, **attributes: int | float | list[int]) -> ir.Value:
        self.steps.append(ir.node(op, inputs, attributes, name=self.name + suffix))
        return self.steps[-1].outputs[0]

    def stored(self, suffix: str, array: np.ndarray | float, dtype: type = np.float32) -> ir.Value:
        return stored(self.model, self.name + suffix, np.asarray(array, dtype))


Rule = Callable[[Steps, ir.Node], ir.Value | None]  # returns the output of the last step; None: the node stays
SPLIT: Mapping[str, Rule] = dict.fromkeys(("Sum", "Mean", "Max", "Min"), _sum) | {"Swish": _swish}
PLAIN: Mapping[str, Rule] = {"Selu": _selu, "Gemm": _gemm, "Pow": _power, "Einsum": _einsum}
JOINED: Mapping[str, Rule] = {"Concat": _joined, "MatMul": _whole_batches}


def respell(rules: Mapping[str, Rule], model: ir.Model) -> None:
    """Replaces each node by the result of its operator's rule."""
    for node in [n for n in model.graph if n.op_type in rules]:
        build = Steps(model, name_of(node))
        if rules[node.op_type](build, node) is not None:
            replace_by(model, node, build.steps)


def stored(model: ir.Model, name: str, array: np.ndarray) -> ir.Value:
    """Adds a stored constant to the graph and returns it."""
    tensor = ir.tensor(array, name=name)
    value = ir.Value(name=name, const_value=tensor, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype))
    model.graph.register_initializer(value)
    return value


def shaped(value: ir.Value, shape: tuple[int, ...], like: ir.Value) -> ir.Value:
    """Sets a value's shape, and its type from another one, where these are needed before shapes are inferred."""
    value.shape, value.type = ir.Shape(shape), like.type
    return value


def replace_by(model: ir.Model, node: ir.Node, steps: list[ir.Node]) -> None:
    """Replaces `node` by `steps`; the last one's output takes over the node's output and its name."""
    y, made = node.outputs[0], steps[-1].outputs[0]
    made.shape, made.type = y.shape, y.type
    model.graph.insert_before(node, steps)
    stand_in(model, node, made)


def stand_in(model: ir.Model, node: ir.Node, value: ir.Value) -> None:
    """Puts a value in the place of a node's output, whose name it takes, and removes the node."""
    name = node.outputs[0].name
    ir.convenience.replace_all_uses_with(node.outputs[0], value, replace_graph_outputs=True)
    model.graph.remove(node, safe=True)
    value.name = name
