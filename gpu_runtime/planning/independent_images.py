"""Tells whether the images of a batch are computed independently: then a batch may be filled with copies of an image, and cut
again.

Every element of a tensor is labelled with the number of the image that it depends on, or NONE. Moves carry labels along, so
images stay separate while the batch is another axis, or a part of one; images meet if an op combines elements of two of them.
Along an axis of size 1 a label stands for all elements: the labels of most tensors of ordinary networks are [N,1,1,1].
"""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields, is_dataclass, replace
from functools import reduce
from itertools import zip_longest
from typing import Any

import numpy as np

from gpu_runtime.network import Network, Op
from tactics.problems import problem as problems
from tactics.problems.array_functions import ALIKE, JOINED
from tactics.problems.library_problem import LibraryProblem
from tactics.problems.protocol import Problem

NONE = -1
UNKNOWN = "is not known to compute each image by itself"
EXACT = ("start", "step")  # fields of problems that are not sizes
LARGEST = 1 << 24  # elements of a tensor that is labelled one by one: FP32 holds their numbers
Labels = np.ndarray
Shape = tuple[int, ...]


class _Meet(Exception):
    """Raised if images meet; the message says how."""


def meeting(network: Network, *others: Network) -> str | None:
    """Returns None if each image of each output depends only on the image of the same number of the inputs, in the same way;
    else a sentence about the op in which images meet, or that may mix them.

    `network`: as lowered, at a batch above 1. `others`: the same model at other batches above 1; an input with one shape at all
    batches belongs to all images. Without `others`, every input counts as having a batch, and values that a model computes from
    its size go unnoticed.
    """
    named = [{t.name: t.shape for t in each.inputs} for each in (network, *others)]
    batched = {t for t, shape in named[0].items() if not others or any(shapes[t] != shape for shapes in named[1:])}
    try:
        for each in (network, *others):
            _check_apart(each, batched)
            _check_alike(network, each)
    except _Meet as how:
        return str(how)
    return None


def _check_apart(network: Network, batched: Collection[str]) -> None:
    batch = next((t.shape[0] for t in network.inputs if t.name in batched and t.shape), 0)
    labels = {t.name: np.full((1, 1, 1, 1), NONE) for t in network.inputs}
    for t in network.inputs:
        if t.name in batched and t.shape[:1] != (batch,):
            raise _Meet(f"input {t.name!r} {list(t.shape)}: expected a first size of {batch}, the batch")
        if t.name in batched:
            labels[t.name] = _viewed(np.arange(batch).reshape(-1, *(1,) * (len(t.shape) - 1)), t.shape, t.shape4)
    for op in network.ops:
        labels.setdefault(op.output, _of_output(op, [labels[t] for t in op.inputs]))
    for t in network.outputs:
        rows = np.broadcast_to(labels[t.name], t.shape4).reshape(*t.shape[:1], -1)
        if t.shape[:1] != (batch,) or ((rows != NONE) & (rows != np.arange(batch)[:, None])).any():
            raise _Meet(f"output {t.name!r} {list(t.shape)} does not have image after image, {batch} along its first axis")


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


def _joined(*parts: Labels) -> Labels:
    """Returns the labels of elements that depend on one element of each of `parts`. Raises _Meet."""
    most: Labels = reduce(np.maximum, parts)
    if any(((part != NONE) & (part != most)).any() for part in parts):
        raise _Meet("combines images of the batch")
    return most


def _over(labels: Labels, *axes: int) -> Labels:
    """Returns the labels of elements that depend on all elements along these axes, with size 1 there. Raises _Meet."""
    most: Labels = labels.max(axes, keepdims=True)
    if ((labels != NONE) & (labels != most)).any():
        raise _Meet("reduces over the batch, or over an axis that holds it")
    return most


def _viewed(labels: Labels, shape: Shape, out: Shape) -> Labels:
    """Returns the labels of the same elements, row-major, in another shape."""
    varying = max((a + 1 for a, size in enumerate(labels.shape) if size > 1), default=0)
    flat = np.broadcast_to(labels, (*shape[:varying], *labels.shape[varying:])).reshape(-1)
    inner, kept, tail = math.prod(shape[varying:]), len(out), 1  # `inner` neighbours share one label
    while kept and inner % (tail * out[kept - 1]) == 0:
        kept, tail = kept - 1, tail * out[kept - 1]
    return _compact(flat.repeat(inner // tail).reshape(*out[:kept], *(1,) * (len(out) - kept)))


def _compact(labels: Labels) -> Labels:
    """Reduces each axis along which all labels are equal to size 1."""
    for axis in range(labels.ndim):
        if (labels == labels.take([0], axis)).all():
            labels = labels.take([0], axis)
    return labels


def _alike(array: np.ndarray, labels: Labels) -> bool:
    """Whether an array has the same values, in the same order, for the elements of each image."""
    varying = [a for a, size in enumerate(labels.shape) if size > 1]
    if all(array.shape[a] == 1 for a in varying):
        return True
    shape = tuple(labels.shape[a] if a in varying else size for a, size in enumerate(array.shape))
    array = np.moveaxis(np.broadcast_to(array, shape), varying, range(len(varying)))
    where = labels.reshape([labels.shape[a] for a in varying])
    rows = [array[where == image] for image in range(labels.max() + 1)]
    return all(np.array_equal(rows[0], row) for row in rows)


def _whole(labels: Labels, shape: Shape) -> Labels:
    if math.prod(shape) > LARGEST:
        raise _Meet(f"moves the batch into other axes of more than {LARGEST} elements")
    return np.broadcast_to(labels, shape)


# ---- rules: the labels of the output from the labels of the inputs, for each kind of problem


def _windows(p: Any) -> list[int]:
    """Returns the axes along which an output element depends on more than one pixel, or on a pixel at another place."""
    rows, columns = ((k, s, *pads) for k, s, pads in zip((p.r, p.s), p.stride, (p.pad[::2], p.pad[1::2]), strict=True))
    return [axis for axis, sizes in ((2, rows), (3, columns)) if sizes != (1, 1, 0, 0)]


def _convolved(p: problems.ConvProblem, xs: list[Labels]) -> Labels:
    end = p.epilogue
    over = (2, 3) if end.d2s > 1 or end.up > 1 or end.pool else _windows(p)
    return _joined(*(_over(x, 1, *over) for x in xs))


def _product(p: problems.MatmulProblem, xs: list[Labels]) -> Labels:
    a, b = (x.swapaxes(2, 3) if turned else x for x, turned in zip(xs, (p.trans_a, p.trans_b), strict=True))
    return _joined(_over(a, 3), _over(b, 2))


def _gathered(p: problems.GatherProblem, xs: list[Labels]) -> Labels:
    found = xs[0].transpose(p.perm)
    for axis, table in enumerate(p.index):
        if table and found.shape[axis] > 1:
            missing = np.reshape([i < 0 for i in table], [-1 if a == axis else 1 for a in range(4)])
            found = np.where(missing, NONE, found.take(np.maximum(table, 0), axis))
    return _compact(found)


def _in_images(p: problems.MoveProblem, xs: list[Labels]) -> Labels:
    if xs[0].size == xs[0].shape[0]:
        return xs[0]
    return _compact(replace(p, fill=float(NONE)).reference(_whole(xs[0], p.in_shapes[0])).astype(int))


def _concatenated(p: problems.ConcatProblem, xs: list[Labels]) -> Labels:
    if all(x.shape == xs[0].shape and x.shape[p.axis] == 1 and (x == xs[0]).all() for x in xs):
        return xs[0]
    return _compact(np.concatenate([*map(_whole, xs, p.in_shapes)], p.axis))


ALONG = frozenset("ArgMax ArgMin CumSum Hardmax LpNormalization TopK".split())
ELEMENTWISE = frozenset("Add Sub Mul Div Max Min Pow Clip Neg Abs Identity Sign".split()) | ALIKE.keys() | JOINED.keys()


def _by_function(p: LibraryProblem, xs: list[Labels]) -> Labels:
    given: dict[str, Any] = dict(p.attributes)
    ts = [_viewed(x, four, shape) for x, four, shape in zip(xs, p.shapes4, p.shapes, strict=False)]
    if p.function in ELEMENTWISE and all(math.prod(shape) == 1 for shape, _ in p.constants):
        found = _joined(*(t.reshape(*(1,) * (len(p.shape) - t.ndim), *t.shape) for t in ts))
    elif p.function in ALONG or p.function.startswith("Reduce"):
        axes = given.get("axes", (given.get("axis", 0 if p.function.startswith("Arg") else -1),))
        found = _over(ts[0], *axes)
        found = found if found.ndim == len(p.shape) else found.squeeze(axes)
    elif p.function in ("LRN", "LpPool", "GlobalLpPool", "MaxPool"):
        found = _over(ts[0], *range(1, ts[0].ndim))
    else:
        raise _Meet(UNKNOWN)
    return _viewed(found, p.shape, p.shapes4[-1])


RULES: Mapping[type[Problem], Callable[..., Labels]] = {
    problems.ConvProblem: _convolved,
    problems.ConvTransposeProblem: lambda p, xs: _joined(*(_over(x, 1, 2, 3) for x in xs)),
    problems.PoolProblem: lambda p, xs: _over(xs[0], *_windows(p)),
    problems.ResizeProblem: lambda p, xs: _over(xs[0], 2, 3),
    problems.ReduceProblem: lambda p, xs: _over(xs[0], *map("nchw".index, p.axes)),
    problems.NormalizeProblem: lambda p, xs: _over(_joined(*xs), *map("nchw".index, p.axes)),
    problems.PointwiseProblem: lambda p, xs: _joined(*xs),
    problems.MatmulProblem: _product,
    problems.ViewProblem: lambda p, xs: _viewed(xs[0], p.shape, p.out),
    problems.GatherProblem: _gathered,
    problems.MoveProblem: _in_images,
    problems.ConcatProblem: _concatenated,
    LibraryProblem: _by_function,
}


# ---- the same at another batch


def _check_alike(a: Network, b: Network) -> None:
    """Raises _Meet if the network at another batch computes an image differently."""
    n, m = next(((t.shape[0], u.shape[0]) for t, u in zip(a.inputs, b.inputs, strict=True) if t.shape != u.shape), (1, 1))
    for x, y in zip_longest(a.ops, b.ops, fillvalue=a.ops[0]):
        if x.name != y.name or not _scaled((x.problem, *x.weights.values()), (y.problem, *y.weights.values()), n, m):
            raise _Meet(f"op {x.name!r} computes with the size of the batch: it is another one at another batch")


def _scaled(a: Any, b: Any, n: int, m: int) -> bool:
    """Whether two problems, or fields of them, are equal except for sizes that grow with the batches n and m."""
    if is_dataclass(a) and type(a) is type(b):
        names = [f.name for f in fields(a)]
        return all(_scaled(getattr(a, f), getattr(b, f), *((n, m) if f not in EXACT else (1, 1))) for f in names)
    if isinstance(a, np.ndarray):  # a constant may be repeated for each image
        return set(np.unique(a)) == set(np.unique(b)) if a.shape != b.shape else np.array_equal(a, b)
    if isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b):
        return all(_scaled(s, t, n, m) for s, t in zip(a, b, strict=True))
    if isinstance(a, tuple) and isinstance(b, tuple):  # a table of indices
        return all(type(v) is int for v in (*a, *b)) and len(a) * m == len(b) * n
    return bool(a == b) or (type(a) is type(b) is int and a * m == b * n)
