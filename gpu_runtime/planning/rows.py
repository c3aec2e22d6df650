"""Whether the images of a batch are computed apart: then a batch may be filled up with copies of an image, and cut again.

Every element of a tensor is labelled with the image that it depends on, NONE where on none. Moves carry labels along, so a
batch that becomes another axis, or a part of one, and comes back stays apart; what combines elements of two images is where
they meet. Along an axis of size 1 a label stands for all elements: those of most tensors of ordinary networks are [N,1,1,1].
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import reduce
from typing import Any

import numpy as np

from gpu_runtime.network import Network, Op, TensorInfo
from tactics.problems import problem as problems
from tactics.problems.array_functions import ALIKE, JOINED, bound
from tactics.problems.library_problem import LibraryProblem
from tactics.problems.protocol import Problem

NONE = -1
LARGEST = 1 << 24  # elements of a tensor whose labels are looked at one by one: FP32 holds their numbers
Labels = np.ndarray
Shape = tuple[int, ...]


class _Meet(Exception):
    """How images meet."""


def meeting(network: Network, *others: Network) -> str | None:
    """None where each image of each output depends on the image of the same number of the inputs alone, in the same way; else a
    sentence about where images meet, or about what is not known to keep them apart.

    `network`: as lowered, at a batch above 1. `others`: the same at other batches above 1; without, what a model computes from
    the size of its batch goes unnoticed.
    """
    batch = next((t.shape[0] for t in network.inputs if t.shape), 0)
    try:
        labels = {t.name: _of_input(t, batch) for t in network.inputs}
        for op in network.ops:
            labels.setdefault(op.output, _of_output(op, [labels[t] for t in op.inputs]))
    except _Meet as how:
        return str(how)
    for t in network.outputs:
        rows = np.broadcast_to(labels[t.name], t.shape4).reshape(*t.shape[:1], -1)
        if t.shape[:1] != (batch,) or ((rows != NONE) & (rows != np.arange(batch)[:, None])).any():
            return f"output {t.name!r} {list(t.shape)} does not have image after image, {batch} along its first axis"
    return next(filter(None, (_differing(network, other) for other in others)), None)


def _of_input(t: TensorInfo, batch: int) -> Labels:
    if t.shape[:1] != (batch,):
        raise _Meet(f"input {t.name!r} {list(t.shape)}: expected a first size of {batch}, the batch")
    return _viewed(np.arange(batch).reshape(-1, *(1,) * (len(t.shape) - 1)), t.shape, t.shape4)


def _of_output(op: Op[Any], xs: list[Labels]) -> Labels:
    p, constants = op.problem, dict[str, str]()
    kind = p.function if isinstance(p, LibraryProblem) else type(p).__name__.removesuffix("Problem")
    try:
        if type(p) not in RULES:
            raise _Meet(UNKNOWN)
        found = RULES[type(p)](p, xs)
        if isinstance(p, problems.PointwiseProblem):
            constants = {f"c{i}": axes for i, axes in enumerate(p.constants)}
        elif isinstance(p, problems.NormalizeProblem) and p.affine:
            constants = dict.fromkeys(("scale", "bias"), p.affine)
        if not all(_alike(np.reshape(op.weights[name], p.span(axes)), found) for name, axes in constants.items()):
            raise _Meet("has a constant with other values for each image")
        return found
    except _Meet as how:
        raise _Meet(f"op {op.name!r} ({kind}) {how}") from None


# ---- labels

UNKNOWN = "is not known to keep the images of a batch apart"


def _joined(*parts: Labels) -> Labels:
    """Of what depends on an element of each."""
    most: Labels = reduce(np.maximum, parts)
    if any(((part != NONE) & (part != most)).any() for part in parts):
        raise _Meet("combines images of the batch")
    return most


def _over(labels: Labels, *axes: int) -> Labels:
    """Of what depends on all elements along these axes, with size 1 there."""
    most: Labels = labels.max(axes, keepdims=True)
    if ((labels != NONE) & (labels != most)).any():
        raise _Meet("reduces over the batch, or over an axis that holds it")
    return most


def _viewed(labels: Labels, shape: Shape, out: Shape) -> Labels:
    """Of the same elements, row-major, under another shape."""
    varying = max((a + 1 for a, size in enumerate(labels.shape) if size > 1), default=0)
    flat = np.broadcast_to(labels, (*shape[:varying], *labels.shape[varying:])).reshape(-1)
    inner, kept, tail = math.prod(shape[varying:]), len(out), 1  # so many neighbours have one label
    while kept and inner % (tail * out[kept - 1]) == 0:
        kept, tail = kept - 1, tail * out[kept - 1]
    return _compact(flat.repeat(inner // tail).reshape(*out[:kept], *(1,) * (len(out) - kept)))


def _compact(labels: Labels) -> Labels:
    """With size 1 along each axis along which they are the same."""
    for axis in range(labels.ndim):
        if (labels == labels.take([0], axis)).all():
            labels = labels.take([0], axis)
    return labels


def _alike(array: np.ndarray, labels: Labels) -> bool:
    """Whether an array beside a tensor has the same values for the elements of each image, in their order."""
    varying = [a for a, size in enumerate(labels.shape) if size > 1]
    if all(array.shape[a] == 1 for a in varying):
        return True
    shape = tuple(labels.shape[a] if a in varying else size for a, size in enumerate(array.shape))
    array = np.moveaxis(np.broadcast_to(array, shape), varying, range(len(varying)))
    where = labels.reshape([labels.shape[a] for a in varying])
    rows = [array[where == image] for image in range(labels.max() + 1)]
    return all(np.array_equal(rows[0], row) for row in rows)


def _moved(xs: Sequence[Labels], shapes: Sequence[Shape], move: Callable[..., np.ndarray]) -> Labels:
    """Of what only moves elements, each image's in the same way: its n-th element goes where the n-th of another goes. `move`
    takes arrays of labels, with `shapes` those of all elements."""
    if shapes and max(map(math.prod, shapes)) > LARGEST:
        raise _Meet(f"moves the batch into other axes of more than {LARGEST} elements")
    xs = [np.broadcast_to(x, shape) for x, shape in zip(xs, shapes, strict=True)] if shapes else xs
    ranks = [np.full(x.shape, NONE) for x in xs]
    for i, (x, rank) in enumerate(zip(xs, ranks, strict=True)):
        for image in range(x.max() + 1):
            rank[x == image] = np.arange((x == image).sum()) * len(xs) + i
    found = move(*xs)
    if not _alike(move(*ranks), found):
        raise _Meet("moves the elements of each image in another way")
    return _compact(found)


# ---- rules: of each kind of problem the labels of the output from those of the inputs


def _windows(p: Any) -> list[int]:
    """The axes along which an output element depends on more than one pixel, or on one elsewhere."""
    rows, columns = ((k, s, *pads) for k, s, pads in zip((p.r, p.s), p.stride, (p.pad[::2], p.pad[1::2]), strict=True))
    return [axis for axis, sizes in ((2, rows), (3, columns)) if sizes != (1, 1, 0, 0)]


def _convolved(p: problems.ConvProblem, xs: list[Labels]) -> Labels:
    end = p.epilogue
    over = (2, 3) if end.d2s > 1 or end.up > 1 or end.pool else _windows(p)
    return _joined(*(_over(x, 1, *over) for x in xs))


def _rows(p: problems.ReduceProblem | problems.NormalizeProblem, xs: list[Labels]) -> Labels:
    return _over(_joined(*xs), *map("nchw".index, p.axes))


def _product(p: problems.MatmulProblem, xs: list[Labels]) -> Labels:
    a, b = (x.swapaxes(2, 3) if turned else x for x, turned in zip(xs, (p.trans_a, p.trans_b), strict=True))
    return _joined(_over(a, 3), _over(b, 2))


def _gathered(p: problems.GatherProblem, xs: list[Labels]) -> Labels:
    def move(x: Labels) -> Labels:
        x = x.transpose(p.perm)
        for axis, table in enumerate(p.index):
            if table and x.shape[axis] > 1:
                missing = np.reshape([i < 0 for i in table], [-1 if a == axis else 1 for a in range(4)])
                x = np.where(missing, NONE, x.take(np.maximum(table, 0), axis))
        return x

    return _moved(xs, (), move)


def _in_images(p: problems.MoveProblem, xs: list[Labels]) -> Labels:
    if xs[0].size == xs[0].shape[0]:
        return xs[0]
    return _moved(xs, p.in_shapes, lambda x: replace(p, fill=float(NONE)).reference(x).astype(int))


def _concatenated(p: problems.ConcatProblem, xs: list[Labels]) -> Labels:
    if all(x.shape == xs[0].shape and x.shape[p.axis] == 1 and (x == xs[0]).all() for x in xs):
        return xs[0]
    return _moved(xs, p.in_shapes, lambda *parts: np.concatenate(parts, p.axis))


MOVES = frozenset(("Reshape", "Transpose", "Concat", "Slice", "Split", "Expand", "Tile"))
ALONG = {
    "ArgMax": 0,
    "ArgMin": 0,
    "CumSum": 0,
    "Hardmax": -1,
    "LpNormalization": -1,
    "TopK": -1,
}  # the axis where none is given
ELEMENTWISE = frozenset(
    ("Add", "Sub", "Mul", "Div", "Max", "Min", "Pow", "Clip", "Neg", "Abs", "Identity", "Sign", *ALIKE, *JOINED)
)


def _by_function(p: LibraryProblem, xs: list[Labels]) -> Labels:
    given: dict[str, Any] = dict(p.attributes)
    ts = [_viewed(x, four, shape) for x, four, shape in zip(xs, p.shapes4, p.shapes, strict=False)]
    scalars = all(math.prod(shape) == 1 for shape, _ in p.constants)
    if p.function in ELEMENTWISE and scalars:
        found = _joined(*(t.reshape(*(1,) * (len(p.shape) - t.ndim), *t.shape) for t in ts))
    elif p.function in MOVES and not p.constants:
        found = _moved(ts, p.shapes, lambda *arrays: bound(p.function, given, p.part)(np, list(arrays)))
    elif p.function in ALONG or p.function.startswith("Reduce"):
        axes = given.get("axes", (given.get("axis", ALONG.get(p.function)),))
        found = _over(ts[0], *axes)
        found = found if found.ndim == len(p.shape) else found.squeeze(tuple(axes))
    elif p.function in ("LRN", "LpPool", "GlobalLpPool", "MaxPool", "GridSample"):
        found = _joined(*(_over(t, *range(1, t.ndim)).reshape(-1, *(1,) * (len(p.shape) - 1)) for t in ts))
    else:
        raise _Meet(UNKNOWN)
    return _viewed(found, p.shape, p.shapes4[-1])


RULES: Mapping[type[Problem], Callable[..., Labels]] = {
    problems.ConvProblem: _convolved,
    problems.ConvTransposeProblem: lambda p, xs: _joined(*(_over(x, 1, 2, 3) for x in xs)),
    problems.PoolProblem: lambda p, xs: _over(xs[0], *_windows(p)),
    problems.ResizeProblem: lambda p, xs: _over(xs[0], 2, 3),
    problems.ReduceProblem: _rows,
    problems.NormalizeProblem: _rows,
    problems.PointwiseProblem: lambda p, xs: _joined(*xs),
    problems.MatmulProblem: _product,
    problems.ViewProblem: lambda p, xs: _viewed(xs[0], p.shape, p.out),
    problems.GatherProblem: _gathered,
    problems.MoveProblem: _in_images,
    problems.ConcatProblem: _concatenated,
    LibraryProblem: _by_function,
}


# ---- the same at another batch


def _differing(a: Network, b: Network) -> str:
    """How the network at another batch computes something else with an image, or an empty string."""
    batches = a.inputs[0].shape[0], b.inputs[0].shape[0]
    if [op.name for op in a.ops] != [op.name for op in b.ops]:
        return f"the model has other ops at batch {batches[1]} than at batch {batches[0]}"
    for x, y in zip(a.ops, b.ops, strict=True):
        pairs = [(w, y.weights.get(name, np.empty(0))) for name, w in x.weights.items()]
        same = all(np.array_equal(v, w) if v.shape == w.shape else set(np.unique(v)) == set(np.unique(w)) for v, w in pairs)
        if not same or not _scaled(x.problem, y.problem, batches):
            return f"op {x.name!r} computes with the size of the batch: {batches[1]} make another one than {batches[0]}"
    return ""


def _scaled(a: Any, b: Any, batches: tuple[int, int]) -> bool:
    """Whether two problems, or parts of them, are the same but for sizes that grow with the batch."""
    if type(a) is not type(b):
        return False
    if isinstance(a, problems.GatherProblem) and any(
        len(s) == len(t) and s != t for s, t in zip(a.index, b.index, strict=True)
    ):
        return False
    if is_dataclass(a):
        return all(_scaled(getattr(a, f.name), getattr(b, f.name), batches) for f in fields(a))
    if isinstance(a, tuple) and len(a) == len(b):
        return all(_scaled(s, t, batches) for s, t in zip(a, b, strict=True))
    if isinstance(a, tuple):
        return len(a) * batches[1] == len(b) * batches[0]
    return a == b or (type(a) is int and a * batches[1] == b * batches[0])
