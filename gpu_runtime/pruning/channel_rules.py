"""Rules, one per ONNX operator, that carry channel labels (channel_spaces.py) from a node's inputs to its outputs.

A rule takes (walk, node, labels of each input) and returns the labels of each output; None stands for a tensor that no
permutation of channels changes. It also records constants that must be permuted with channels. A rule that cannot prove that
the node commutes with permutations raises Refused with a reason, and all tensors that the node reads are pinned
(channel_walk.py).

Example: a Conv with x's labels 0 to 7 and 16 filters gives new labels 8 to 23; its weights move with 0 to 7 along axis 1 and
with 8 to 23 along axis 0.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx

from gpu_runtime.errors import ModelError
from gpu_runtime.frontend.files.load import int_attribute, title
from gpu_runtime.pruning.channel_spaces import MOST_LABELS, Labels, Spaces
from gpu_runtime.pruning.channel_walk import NOT_ALIKE, Outputs, Refused, Rule, Shape, Walk, attributes_of, on_axis_1
from tactics.problems.operators import ALIKE, JOINED, REDUCE, RESHAPES, WINDOWS

SIZES = ("Shape", "Size", "ConstantOfShape")


def channel_spaces(graph: onnx.GraphProto, shapes: Mapping[str, Shape]) -> Spaces:
    """Returns the spaces of a checked, sorted graph. `shapes`: tensor -> its shape; a tensor without one is pinned.

    Raises ModelError if a node contains a graph.
    """
    walk = Walk(graph, shapes, RULES)
    for node in graph.node:
        if any(a.type in (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS) for a in node.attribute):
            raise ModelError(f"{title(node)} contains a subgraph, where channels cannot be followed: leave out --permute")
        if not (node.op_type == "Constant" or (node.output and node.output[0] in walk.sources)):
            walk.visit(node)
    walk.close()
    return walk.recorder.spaces()


# ---- rules


def _of_first(rule: Callable[[Walk, onnx.NodeProto, Labels], Outputs]) -> Rule:
    """Returns the rule of a node whose first input alone has channels: without labels, its output has none either."""
    return lambda walk, node, ins: [None] if ins[0] is None else rule(walk, node, ins[0])


def _alike(walk: Walk, node: onnx.NodeProto, ins: Sequence[Labels | None]) -> Outputs:
    if any(labels is not None for labels in ins[1:]) or len(node.output) > 1:
        raise Refused(f"{title(node)} has channels in a parameter input, or has several outputs")
    return [ins[0]]


def _dropout(walk: Walk, node: onnx.NodeProto, ins: Sequence[Labels | None]) -> Outputs:
    """Dropout, which outside of training copies its input and makes a mask of equal elements."""
    if len(node.input) > 2 and node.input[2]:
        raise Refused(f"{title(node)} is in training mode")
    return [ins[0], None]


def _elementwise(walk: Walk, node: onnx.NodeProto, ins: Sequence[Labels | None]) -> Outputs:
    """Broadcasting operators, whose inputs with channels must have them on the same axes; channels at one position become
    one."""
    rank = max(len(walk.dims(name)) for name in node.input)
    found = [Labels(*(a.reshape((1,) * (rank - a.ndim) + a.shape) for a in (x.ids, x.tags))) for x in ins if x is not None]
    if not found:
        return [None]
    first = found[0]
    if any(other.ids.shape != first.ids.shape for other in found[1:]):
        raise Refused(f"{title(node)} combines inputs whose channels lie on different axes")
    for name, labels in zip(node.input, ins, strict=True):
        if labels is None:
            _beside(walk, node, name, first, rank)
    for other in found[1:]:
        first = walk.recorder.join(first, other)
    return [first]


def _beside(walk: Walk, node: onnx.NodeProto, name: str, labels: Labels, rank: int) -> None:
    """Handles input `name`, which has no labels, of a broadcasting operator whose other inputs have `labels`, of that rank.

    A stored one is permuted with their channels. Raises Refused if it is computed and varies along their axes.
    """
    dims = (1,) * (rank - len(walk.dims(name))) + walk.dims(name)
    varies = [axis for axis in labels.axes if dims[axis] > 1]
    if name not in walk.sources:
        if varies and name not in walk.uniform:
            raise Refused(f"{title(node)} reads {name}, which {NOT_ALIKE}")
        return
    off = rank - len(walk.dims(name))
    if varies and len(labels.axes) > 1:
        raise Refused(f"{title(node)} has channels on several axes, along which {name} varies")
    moving = {axis - off: [labels.flat] for axis in varies}
    walk.use(node, name, moving)


def _conv(walk: Walk, node: onnx.NodeProto, ins: Sequence[Labels | None]) -> Outputs:
    name, group = node.input[1], int_attribute(node, "group", 1)
    if name not in walk.sources:
        raise Refused(f"the weights of {title(node)} are computed, not stored")
    x, dims, rank = on_axis_1(node, ins[0]), walk.dims(name), len(walk.dims(name))
    k, c = dims[0], dims[1] * group
    if rank < 3 or k % group or (x is not None and x.ids.size != c):
        raise Refused(f"the weights of {title(node)} do not fit its input")
    x = x or walk.recorder.pinned(c, f"{title(node)} reads a tensor that {NOT_ALIKE}")
    if group == c == k:  # depthwise
        return [_product(walk, node, x, {0: [x]}, rank)]
    out = walk.recorder.fresh(k, np.arange(k) // (k // group))
    if dims[1] == 1:
        walk.recorder.pin(x, f"{title(node)} makes several output channels from each input channel")
        return [_product(walk, node, out, {0: [out]}, rank)]
    if group > 1:
        walk.recorder.record(x, np.arange(c) // dims[1])
    columns = [Labels(x.ids[i : i + dims[1]], x.tags[i : i + dims[1]]) for i in range(0, c, dims[1])]
    return [_product(walk, node, out, {0: [out], 1: columns}, rank)]


def _product(
    walk: Walk, node: onnx.NodeProto, out: Labels, moving: Mapping[int, Sequence[Labels]], rank: int, axis: int = 1
) -> Labels:
    """Records that a product's weights and bias are permuted with channels; returns the labels of its output.

    `out`: the labels of the output channels, in one dimension; `moving`: axis of the weights -> the labels with which it is
    permuted, for a grouped convolution's input channels those of each group; `rank`, `axis`: the output's rank and its axis of
    channels.
    """
    if len(node.input) > 2 and node.input[2]:
        bias = node.input[2]
        if bias not in walk.sources and bias not in walk.uniform:
            raise Refused(f"the bias of {title(node)} is computed, not stored")
        if bias in walk.sources:
            dims = walk.dims(bias)
            walk.use(node, bias, {len(dims) - 1: [out]} if dims and dims[-1] > 1 else {})
    walk.use(node, node.input[1], moving)
    return out.along(axis, rank)


def _conv_transpose(walk: Walk, node: onnx.NodeProto, ins: Sequence[Labels | None]) -> Outputs:
    name = node.input[1]
    if name not in walk.sources or int_attribute(node, "group", 1) != 1:
        raise Refused(f"{title(node)} is grouped, or its weights are computed")
    dims = walk.dims(name)
    x = on_axis_1(node, ins[0]) or walk.recorder.pinned(dims[0], f"{title(node)} reads a tensor that {NOT_ALIKE}")
    if len(dims) < 3 or x.ids.size != dims[0]:
        raise Refused(f"the weights of {title(node)} do not fit its input")
    out = walk.recorder.fresh(dims[1])
    return [_product(walk, node, out, {0: [x], 1: [out]}, len(dims))]


def _gemm(walk: Walk, node: onnx.NodeProto, ins: Sequence[Labels | None]) -> Outputs:
    name = node.input[1]
    if name not in walk.sources or int_attribute(node, "transA", 0) or len(walk.dims(name)) != 2:
        raise Refused(f"{title(node)} transposes input A, or its input B is computed")
    columns = 1 if int_attribute(node, "transB", 0) else 0
    return [_matrix(walk, node, ins[0], columns, 2)]


def _matmul(walk: Walk, node: onnx.NodeProto, ins: Sequence[Labels | None]) -> Outputs:
    name = node.input[1]
    if name not in walk.sources or len(walk.dims(name)) != 2:
        raise Refused(f"the second input of {title(node)} is not a stored matrix")
    return [_matrix(walk, node, ins[0], 0, len(walk.dims(node.input[0])))]


def _matrix(walk: Walk, node: onnx.NodeProto, labels: Labels | None, columns: int, rank: int) -> Labels | None:
    """Returns the labels of the output of a MatMul or Gemm with a stored matrix, None if unknown. Axis `columns` of the matrix
    has the input channels, axis 1 - `columns` the output channels. `labels`, `rank`: of the tensor that is multiplied, whose
    last axis has the input channels."""
    dims = walk.dims(node.input[1])
    if labels is not None and labels.axes and labels.axes != (rank - 1,):
        if rank - 1 in labels.axes or len(node.input) > 2:
            raise Refused(f"{title(node)} has channels on several axes, or on the rows of its input")
        return labels
    x = walk.recorder.pinned(dims[columns], f"{title(node)} reads a tensor that {NOT_ALIKE}") if labels is None else labels.flat
    if x.ids.size != dims[columns]:
        raise Refused(f"the weights of {title(node)} do not fit its input")
    out = walk.recorder.fresh(dims[1 - columns])
    return _product(walk, node, out, {columns: [x], 1 - columns: [out]}, rank, rank - 1)


def _norm(walk: Walk, node: onnx.NodeProto, ins: Sequence[Labels | None]) -> Outputs:
    """BatchNormalization and InstanceNormalization, whose stored parameters are permuted with the channels on axis 1."""
    x = on_axis_1(node, ins[0])
    stored = [name for name in node.input[1:] if name not in walk.uniform]
    if len([name for name in node.output if name]) > 1 or any(name not in walk.sources for name in stored):
        raise Refused(f"{title(node)} is in training mode, or its parameters are computed")
    if x is not None:
        for name in stored:
            walk.use(node, name, {0: [x]})
    return [ins[0]]


def _window(walk: Walk, node: onnx.NodeProto, ins: Sequence[Labels | None]) -> Outputs:
    on_axis_1(node, ins[0])
    if len([name for name in node.output if name]) > 1:
        raise Refused(f"{title(node)} has an Indices output")
    return [ins[0]]


def _resize(walk: Walk, node: onnx.NodeProto, labels: Labels) -> Outputs:
    """Resize and Upsample, which must keep the axis of channels: its size, and a scale of 1 (not in tf_crop_and_resize)."""
    on_axis_1(node, labels)
    given = attributes_of(node)
    before, after = walk.dims(node.input[0]), walk.dims(node.output[0])
    slot = 1 if len(node.input) == 2 else 2  # after the regions of interest, since opset 11
    scales = np.asarray(given.get("scales", ()), np.float64)
    if slot < len(node.input) and node.input[slot]:
        scales = walk.values(node, slot)
    special = given.get("coordinate_transformation_mode") == b"tf_crop_and_resize" or given.keys() & {
        "axes",
        "keep_aspect_ratio_policy",
    }
    if special or before[1] != after[1] or (scales.size > 1 and scales[1] != 1):
        raise Refused(f"{title(node)} may resize the channel axis")
    return [labels]


def _pad(walk: Walk, node: onnx.NodeProto, labels: Labels) -> Outputs:
    pads, axes, rank = walk.numbers(node, 1, "pads", "paddings"), walk.numbers(node, 3), labels.ids.ndim
    if pads is None or len(pads) != 2 * (rank if axes is None else len(axes)):
        raise Refused(f"the pads of {title(node)} are not constant")
    half = len(pads) // 2
    around = {a % rank: (pads[i], pads[i + half]) for i, a in enumerate(range(rank) if axes is None else axes)}
    grown = [a for a in labels.axes if around.get(a, (0, 0)) != (0, 0)]
    if not grown:
        return [labels]
    constant = attributes_of(node).get("mode", b"constant") == b"constant"
    if len(labels.axes) > 1 or not constant or min(around[grown[0]]) < 0 or max(around[grown[0]]) > MOST_LABELS:
        raise Refused(f"{title(node)} pads or crops the channel axis")
    pieces = [walk.recorder.fresh(n) if n else None for n in around[grown[0]]]  # of one value, so they may change places
    return [_side_by_side(walk, node, [pieces[0], labels.flat, pieces[1]], grown[0], rank)]


def _side_by_side(walk: Walk, node: onnx.NodeProto, pieces: Sequence[Labels | None], axis: int, rank: int) -> Labels:
    key = node.output[0]
    found = [(p.ids, walk.recorder.retagged(p.tags, key, i)) for i, p in enumerate(pieces) if p is not None]
    ids, tags = (np.concatenate([f[i] for f in found]) for i in (0, 1))
    return walk.recorder.record(Labels(ids, tags)).along(axis, rank)


def _concat(walk: Walk, node: onnx.NodeProto, ins: Sequence[Labels | None]) -> Outputs:
    rank = len(walk.dims(node.output[0]))
    axis, held = int_attribute(node, "axis", 1), {a for labels in ins if labels is not None for a in labels.axes}
    axis += rank if axis < 0 else 0
    if not held:
        return [None]
    if held != {axis}:
        if axis in held:
            raise Refused(f"{title(node)} concatenates channels that lie on several axes")
        return _elementwise(walk, node, ins)  # joined along an axis without channels
    pieces = []
    for name, labels in zip(node.input, ins, strict=True):
        own = (
            walk.recorder.pinned(walk.dims(name)[axis], f"{title(node)} reads a tensor that {NOT_ALIKE}")
            if labels is None
            else labels
        )
        pieces.append(own.flat)
    return [_side_by_side(walk, node, pieces, axis, rank)]


def _taken(walk: Walk, labels: Labels, index: np.ndarray, axis: int) -> Labels:
    """Returns the labels at the positions `index` of an axis; an index without axes removes that axis, as in ONNX Gather."""
    if labels.ids.shape[axis] == 1:
        index = np.zeros(index.shape[:1] and (1,), np.int64)
    taken = Labels(labels.ids.take(index, axis), labels.tags.take(index, axis))
    if taken.ids.size < 2:  # the selected channel must stay the same one
        if labels.ids.size > 1:
            walk.recorder.pin(taken, "a node selects one of its channels alone")
        return taken
    walk.recorder.record(taken.flat)
    return taken


def _slice(walk: Walk, node: onnx.NodeProto, labels: Labels) -> Outputs:
    starts, ends = walk.numbers(node, 1, "starts"), walk.numbers(node, 2, "ends")
    if starts is None or ends is None:
        raise Refused(f"the starts or ends of {title(node)} are not constant")
    axes = walk.numbers(node, 3, "axes") or list(range(len(starts)))
    steps = walk.numbers(node, 4) or [1] * len(starts)
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        axis %= labels.ids.ndim
        if labels.ids.shape[axis] > 1:
            labels = _taken(walk, labels, np.arange(labels.ids.shape[axis])[start:end:step], axis)
    return [labels]


def _split(walk: Walk, node: onnx.NodeProto, ins: Sequence[Labels | None]) -> Outputs:
    labels, axis = ins[0], int_attribute(node, "axis", 0)
    if labels is None:
        return [None] * len(node.output)
    axis %= labels.ids.ndim
    if labels.ids.shape[axis] == 1:
        return [labels] * len(node.output)
    sizes = [walk.dims(name)[axis] for name in node.output]
    if sum(sizes) != labels.ids.shape[axis]:
        raise Refused(f"the output sizes of {title(node)} do not add up to its input size")
    ends = np.cumsum([0, *sizes])
    return [_taken(walk, labels, np.arange(a, b), axis) for a, b in zip(ends, ends[1:], strict=False)]


def _gather(walk: Walk, node: onnx.NodeProto, ins: Sequence[Labels | None]) -> Outputs:
    labels, axis = ins[0], int_attribute(node, "axis", 0)
    if labels is None or len(ins) != 2:
        raise Refused(f"{title(node)} reads a tensor that {NOT_ALIKE}")
    found = np.array(walk.numbers(node, 1))
    index = found.reshape(walk.dims(node.input[1]))
    if index.ndim > 1 or len(np.unique(index)) < index.size:
        raise Refused(f"{title(node)} selects a channel twice, or has indices of several axes")
    axis %= labels.ids.ndim
    if labels.ids.shape[axis] > 1 and not (-labels.ids.shape[axis] <= index.min() <= index.max() < labels.ids.shape[axis]):
        raise Refused(f"{title(node)} selects a channel that does not exist")
    return [_taken(walk, labels, index, axis)]


def _transpose(walk: Walk, node: onnx.NodeProto, labels: Labels) -> Outputs:
    perm = walk.numbers(node, 1, "perm") or list(range(labels.ids.ndim))[::-1]
    return [Labels(labels.ids.transpose(perm), labels.tags.transpose(perm))]


def _reshape(walk: Walk, node: onnx.NodeProto, labels: Labels) -> Outputs:
    """Reshape, Flatten, Squeeze and Unsqueeze, by the shapes before and after.

    Example: [1, 8, 2, 2] -> [1, 32] gives each label 4 times, once for each pixel, with a tag for the pixel.
    """
    before, after = walk.dims(node.input[0]), walk.dims(node.output[0])
    first, last, to, end = _touched(node, before, after, labels.axes)
    inner = before[first:last]
    if math.prod(inner) > MOST_LABELS:
        raise Refused(f"{title(node)} reshapes {math.prod(inner)} elements with channels; expected {MOST_LABELS} at most")
    kept = labels.ids.shape[first:last]
    ids = np.broadcast_to(labels.ids.reshape(kept), inner)
    tags = np.broadcast_to(labels.tags.reshape(kept), inner).copy()
    for axis, (size, held) in enumerate(zip(inner, kept, strict=True)):
        if held == 1 and size > 1:  # an axis without channels, as of pixels: each position has a tag of its own
            parts = np.moveaxis(tags, axis, 0)
            for i in range(size):
                parts[i] = walk.recorder.retagged(parts[i], node.output[0], axis, i)
    shape = (1,) * to + after[to:end] + (1,) * (len(after) - end)
    found = Labels(ids.reshape(shape), tags.reshape(shape))
    walk.recorder.record(found.flat)
    return [found]


def _touched(node: onnx.NodeProto, before: Shape, after: Shape, axes: Sequence[int]) -> tuple[int, int, int, int]:
    """Returns (first, end, first, end): the smallest span of the axes before that includes all of `axes` and has the same
    elements as a span of the axes after, and that span. [2, 8, 3, 5] -> [2, 8, 15], axes (1,): (1, 2, 1, 2).

    Raises Refused if the shapes have different numbers of elements.
    """
    if math.prod(before) != math.prod(after) or 0 in before:
        raise Refused(f"{title(node)}: shape {before} cannot become {after}")
    heads, tails = np.cumprod([1, *before]).tolist(), np.cumprod([1, *after]).tolist()
    first = next(i for i in range(axes[0], -1, -1) if heads[i] in tails)
    last = next(i for i in range(axes[-1] + 1, len(before) + 1) if heads[i] in tails)
    ends = [i for i, t in enumerate(tails) if t == heads[last]]
    return first, last, tails.index(heads[first]), ends[0]


def _symmetric(walk: Walk, node: onnx.NodeProto, labels: Labels) -> Outputs:
    """Softmax, LogSoftmax and LpNormalization, for which the order of the elements along an axis does not matter."""
    if len(labels.axes) > 1:
        raise Refused(f"{title(node)} has channels on several axes")
    return [labels]


def _reduce(walk: Walk, node: onnx.NodeProto, labels: Labels) -> Outputs:
    rank, axes = labels.ids.ndim, walk.numbers(node, 1, "axes")
    if not axes and int_attribute(node, "noop_with_empty_axes", 0):
        return [labels]
    reduced = {a % rank for a in axes} if axes else set(range(rank))
    if reduced.issuperset(labels.axes):
        return [None]  # a sum or a maximum over all channels
    if reduced.intersection(labels.axes):
        raise Refused(f"{title(node)} reduces some of the channel axes, but not all")
    if int_attribute(node, "keepdims", 1):
        return [labels]
    shape = tuple(size for i, size in enumerate(labels.ids.shape) if i not in reduced)
    return [Labels(labels.ids.reshape(shape), labels.tags.reshape(shape))]


def _size(walk: Walk, node: onnx.NodeProto, ins: Sequence[Labels | None]) -> Outputs:
    """Operators in SIZES, whose outputs depend only on sizes."""
    walk.used.update(node.input if node.op_type != "ConstantOfShape" else ())
    return [None] * len(node.output)


def _spread(walk: Walk, node: onnx.NodeProto, ins: Sequence[Labels | None]) -> Outputs:
    """Expand and CastLike of one number, as torch.onnx.export writes the bias of a convolution without one; CastLike reads only
    the type of its second input."""
    if not walk.is_uniform(node.input[0]):
        raise Refused(f"{title(node)} reads several numbers, expected one")
    walk.used.update(node.input if node.op_type == "CastLike" else ())
    walk.uniform.add(node.output[0])
    return [None]


def _coded(walk: Walk, node: onnx.NodeProto, ins: Sequence[Labels | None]) -> Outputs:
    """QuantizeLinear and DequantizeLinear: scales and zero points would have to move with channels of weights behind them."""
    raise Refused(f"{title(node)} keeps channels in their places: prune the model before it is quantized")


# fmt: off
RULES: Mapping[str, Rule] = {
    **dict.fromkeys(ALIKE, _alike), **dict.fromkeys(JOINED, _elementwise), **dict.fromkeys(WINDOWS, _window),
    **dict.fromkeys(REDUCE, _of_first(_reduce)), **dict.fromkeys(SIZES, _size),
    **dict.fromkeys(RESHAPES, _of_first(_reshape)), **dict.fromkeys(("Expand", "CastLike"), _spread),
    **dict.fromkeys(("Softmax", "LogSoftmax", "LpNormalization"), _of_first(_symmetric)),
    **dict.fromkeys(("BatchNormalization", "InstanceNormalization"), _norm),
    **dict.fromkeys(("Resize", "Upsample"), _of_first(_resize)),
    "Conv": _conv, "Dropout": _dropout, "ConvTranspose": _conv_transpose, "Gemm": _gemm, "MatMul": _matmul,
    **dict.fromkeys(("QuantizeLinear", "DequantizeLinear"), _coded),
    "Concat": _concat, "Split": _split, "Gather": _gather,
    "Pad": _of_first(_pad), "Slice": _of_first(_slice), "Transpose": _of_first(_transpose),
}
# fmt: on
