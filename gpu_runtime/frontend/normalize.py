"""Respells operators of an onnx-ir graph, so that the later stages meet each operator in one form, and fewer layers remain.

Each function that takes a model changes it in place and keeps the values of its outputs; `respell` does so by a table of rules,
operator -> rule. group_norms and SPLIT come before constants are folded, the others after. A rule takes (Steps, node) and
returns the value that replaces the node's output, or None to keep the node.
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
    """Renames GroupNormalization to InstanceNormalization and keeps num_groups: onnx does not infer the shape of the former."""
    for node in model.graph:
        if node.op_type == "GroupNormalization":
            node.op_type = "InstanceNormalization"


def _sum(build: Steps, node: ir.Node) -> ir.Value | None:
    """Turns Sum, Mean, Max and Min of n tensors into a chain of operations of two tensors.

    Scalars without effect are removed: -infinity in Max, infinity in Min.
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
    """Turns Selu into Elu times gamma."""
    y = build.add("_elu", "Elu", operand(node), alpha=attribute(node, "alpha", 1.6732632423543772))
    return build.add("", "Mul", y, build.stored("_gamma", attribute(node, "gamma", 1.0507009873554805)))


def _gemm(build: Steps, node: ir.Node) -> ir.Value | None:
    """Turns a Gemm that can become neither a convolution nor a MatMul as it is into one that can.

    Transposition, alpha, and a third operand that is no constant per column become separate operators; a constant first matrix
    becomes the operand of a MatMul.
    """
    left, right = constant(node.inputs[0]), constant(node.inputs[1])
    folds, scales = _addend_folds(node), attribute(node, "alpha", 1.0) != 1
    if folds and (not attribute(node, "transA", 0) if right is not None else left is None and not scales):
        return None
    y = _product(build, node, folds)
    return y if folds or len(node.inputs) < 3 or node.inputs[2] is None else build.add("_sum", "Add", y, _addend(build, node))


def _addend_folds(node: ir.Node) -> bool:
    """Returns whether a Gemm has no third operand, or a constant one with a value per column and a constant second matrix."""
    if len(node.inputs) < 3 or node.inputs[2] is None:
        return True
    addend = constant(node.inputs[2])
    return constant(node.inputs[1]) is not None and addend is not None and math.prod(addend.shape[:-1]) == 1


def _product(build: Steps, node: ir.Node, folds: bool) -> ir.Value:
    """Returns alpha * A @ B of a Gemm, and plus beta * C if `folds`, as new nodes."""
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
    """Returns beta * C of a Gemm: C itself, a constant, or the output of a new Mul."""
    c, beta = operand(node, 2), attribute(node, "beta", 1.0)
    array = constant(c)
    if beta == 1:
        return c
    if array is not None:
        return build.stored("_addend", beta * array)
    return build.add("_addend", "Mul", c, build.stored("_beta", beta))


def _power(build: Steps, node: ir.Node) -> ir.Value | None:
    """Turns a Pow of a floating-point tensor with an integer exponent into one with a floating-point exponent."""
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
    """Adds the sizes of a Pad to the `pads` of its readers and removes it, if all are convolutions or pools with equal
    results."""
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
    """Returns a Pad's sizes as a convolution's `pads`, (before each axis, then behind each), if it adds a constant around
    pixels and changes no other axis; else None."""
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
    """Returns whether a reader's own `pads` can take over a Pad of sizes `rows` and value `fill` before its input `slot`."""
    own, without = attribute(node, "pads", (0,) * len(rows)), ("NOTSET", "VALID")
    if slot != 0 or attribute(node, "auto_pad", "NOTSET") not in without or len(own) != len(rows):
        return False
    if attribute(node, "ceil_mode", 0):
        return False
    if node.op_type == "AveragePool":
        return fill == 0 and (attribute(node, "count_include_pad", 0) == 1 or not any(own))
    if node.op_type == "MaxPool":  # its own padding never wins; a Pad of FP16's lowest number does not either
        size, step = attribute(node, "kernel_shape", ()), attribute(node, "dilations", (1,) * (len(rows) // 2))
        reach = [(k - 1) * d for k, d in zip(size, step, strict=True)] * 2
        some = all(a + b <= r for a, b, r in zip(own, rows, reach, strict=True))  # every window has a pixel of the image
        return fill <= LOWEST_HALF and len(node.outputs) == 1 and some
    return node.op_type == "Conv" and fill == 0


def softmax_where_it_lies(model: ir.Model) -> None:
    """Replaces a Softmax between a Transpose and its inverse by a Softmax of the first Transpose's input, along the same
    axis."""
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
    """A tensor of a Concat, with the number of zeros before and behind it that take the place of constants."""

    value: ir.Value
    before: int
    behind: int = 0


def _joined(build: Steps, node: ir.Node) -> ir.Value | None:
    """Turns a Concat of floating-point tensors and constants into an Add: the tensors padded with zeros, plus the constants
    padded with zeros. Kernels exist for all of it, and no value changes.

    Example: Concat(x, [1, 2], y) = Concat(Pad(x, behind 2), y) + [0, ..., 1, 2, 0, ...].
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
    """Returns (a Concat's constants joined, with zeros in place of its tensors; its tensors, with zeros in place of
    constants)."""
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
    """Turns a MatMul whose batches broadcast in a way that kernels do not support into one of repeated operands: of an Expand,
    or of a constant that is repeated here.

    Kernels support a constant with the last of the batch axes, and two computed tensors that broadcast along one or both of two
    batch axes.
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
    """Returns whether an operand with the batch sizes `batches` must be repeated to `over`, because kernels cannot broadcast
    it.

    `stored`: the operand is a constant; `both`: both operands are computed.
    """
    own = (1,) * (len(over) - len(batches)) + batches
    first = next((i for i, d in enumerate(own) if d != 1), len(own))
    if own == over or math.prod(own) == 1:
        return False
    return own[first:] != over[first:] if stored else len(over) > 2 or not both


def _einsum(build: Steps, node: ir.Node) -> ir.Value | None:
    """Turns an Einsum of one or two tensors into sums, moves, and one MatMul or Mul.

    Axes that only one tensor has, and the result lacks, are summed first. Example: bhwc,hkc->bhwk has batch h, rows b w, summed
    c, columns k: [h, b w, c] @ [h, c, k] = [h, b w, k], which is transposed to b h w k.
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
        """Returns the equation's tensor i, transposed and reshaped to one axis for each group of its axes; its other axes are
        summed.

        Axes have the names of _axes_of. An axis of a group that tensor i lacks is left out; a group without any axis of tensor
        i gives an axis of size 1. The result for a constant is computed here, for other tensors nodes are added.
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
    """Returns (the term of each tensor, the term of the result) of an equation; without ->, the result has the letters that
    occur once, in alphabetical order, after an ellipsis.
    """
    left, arrow, right = equation.replace(" ", "").partition("->")
    once = "".join(sorted(a for a in {*left} - {*".,"} if left.count(a) == 1))
    return left.split(","), right if arrow else "..." * ("..." in left) + once


def _axes_of(term: str, dots: int) -> list[str]:
    """Returns a name for each axis of a term: its letter, or for an axis of the ellipsis the number of ellipsis axes behind it.

    >>> _axes_of("b...c", 2)
    ['b', '1', '0', 'c']
    """
    before, ellipsis, behind = term.partition("...")
    return [*before, *map(str, reversed(range(dots if ellipsis else 0))), *behind]


class Steps:
    """New nodes, in order, that together replace one node; their names, and their constants', begin with that node's name."""

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
    """Replaces each node that has a rule by the rule's result, in place; the node stays if that is None."""
    for node in [n for n in model.graph if n.op_type in rules]:
        build = Steps(model, name_of(node))
        if rules[node.op_type](build, node) is not None:
            replace_by(model, node, build.steps)


def stored(model: ir.Model, name: str, array: np.ndarray) -> ir.Value:
    """Adds a constant `array` to the graph, as an initializer, and returns its value."""
    tensor = ir.tensor(array, name=name)
    value = ir.Value(name=name, const_value=tensor, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype))
    model.graph.register_initializer(value)
    return value


def shaped(value: ir.Value, shape: tuple[int, ...], like: ir.Value) -> ir.Value:
    """Sets a value's shape, and the type of `like`, for steps that run before shapes are inferred; returns the value."""
    value.shape, value.type = ir.Shape(shape), like.type
    return value


def replace_by(model: ir.Model, node: ir.Node, steps: list[ir.Node]) -> None:
    """Replaces `node` by `steps`; the last step's output takes the place and the name of the node's output."""
    y, made = node.outputs[0], steps[-1].outputs[0]
    made.shape, made.type = y.shape, y.type
    model.graph.insert_before(node, steps)
    stand_in(model, node, made)


def stand_in(model: ir.Model, node: ir.Node, value: ir.Value) -> None:
    """Puts `value` in the place of a node's only output, gives it the output's name, and removes the node."""
    name = node.outputs[0].name
    ir.convenience.replace_all_uses_with(node.outputs[0], value, replace_graph_outputs=True)
    model.graph.remove(node, safe=True)
    value.name = name
