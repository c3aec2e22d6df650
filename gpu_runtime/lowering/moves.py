"""Lowers operators that only move elements: Slice, Split, Pad, Gather, Expand, Tile, Transpose, Resize, Concat.

A rule returns one problem or several in a row. Each may be stated over another NCHW shape of the same elements: `lower` puts
views in between. So an axis of a tensor of any rank becomes one of four (`frame`).
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate, groupby
from typing import Any, TypeVar

import numpy as np

from gpu_runtime.frontend.queries import Node, Value, attribute, constant, shape_of
from gpu_runtime.lowering.units import Unit
from tactics.problems.gather import COORDINATES, ROUNDINGS, GatherProblem, ResizeProblem, Scale, ViewProblem, nearest
from tactics.problems.problem import ConcatProblem, MoveProblem
from tactics.problems.protocol import Problem, Shape4

Shapes = Sequence[Shape4]
Weights = dict[str, np.ndarray]
Problems = Problem | tuple[Problem, ...]
H = TypeVar("H")
LONGEST_TABLE = 2**24  # indices along an axis
FLT_MAX = float(np.finfo(np.float32).max)
OF_LOWEST = ("MaxPool", "Max", "Relu", "Sigmoid")  # to them FP32's lowest number is -infinity
OF_HIGHEST = ("Min", "Sigmoid")


class Refused(Exception):
    """Raised with the reason why no problem can express a node."""


# ---- ONNX shapes and NCHW


def nchw(shape: tuple[int, ...]) -> Shape4:
    """Returns the NCHW shape of a tensor: [N,C] is [N,C,1,1], [N,C,L] is [N,C,1,L]; axes between the second and the last are
    rows."""
    if len(shape) >= 3:
        return shape[0], shape[1], math.prod(shape[2:-1]), shape[-1]
    n, c = shape if len(shape) == 2 else (1, *shape, 1)[:2]
    return n, c, 1, 1


def axis4(axis: int, rank: int) -> int:
    """Returns the position in NCHW of axis `axis` of a tensor of that rank, at most 4."""
    return {1: (1,), 2: (0, 1), 3: (0, 1, 3), 4: (0, 1, 2, 3)}[rank][axis]


def frame(shape: tuple[int, ...], axes: Iterable[int]) -> tuple[Shape4, dict[int, int]]:
    """Returns (an NCHW shape of the same elements, position in it of each of `axes`), in which none of `axes` is merged with
    another axis. Up to rank 4 the shape is `nchw(shape)`. Raises Refused if more than four axes are left after merging."""
    chosen, rank = set(axes), len(shape)
    if rank <= 4:
        return nchw(shape), {a: axis4(a, rank) for a in chosen}
    runs = runs_of(shape, lambda a: a if a in chosen else -1)
    sizes, at = [size for size, _ in runs], {a: i for i, (_, a) in enumerate(runs) if a in chosen}
    if len(sizes) > 4:
        raise Refused(
            f"expected at most 4 dimensions after neighbouring axes are merged: shape {list(shape)}, axes {sorted(chosen)}"
        )
    return as_shape4(sizes), {a: i + 4 - len(sizes) for a, i in at.items()}


def runs_of(shape: Sequence[int], key: Callable[[int], H], axes: Iterable[int] | None = None) -> list[tuple[int, H]]:
    """Merges neighbouring axes with one key: returns (size, key) of each run among `axes`, or among all."""
    every = range(len(shape)) if axes is None else axes
    return [(math.prod(shape[a] for a in run), found) for found, run in groupby(every, key)]


def as_shape4(sizes: Sequence[int]) -> Shape4:
    """Returns at most four sizes as an NCHW shape, with ones before them."""
    n, c, h, w = (*(1,) * (4 - len(sizes)), *sizes)
    return n, c, h, w


def constants(unit: Unit, *slots: int) -> list[list[Any]]:
    """Returns the constant inputs at `slots` as lists, an empty list for an absent one."""
    found = []
    for i in slots:
        v = unit.node.inputs[i] if i < len(unit.node.inputs) else None
        array = constant(v)
        if v is not None and array is None:
            raise Refused(f"its input {v.name!r} must be a constant")
        found.append([] if array is None else array.reshape(-1).tolist())
    return found


# ---- one table of indices per axis


def _check_length(*sizes: int) -> None:
    """Raises Refused for a table that would fill the memory."""
    if max(sizes, default=0) > LONGEST_TABLE:
        raise Refused(f"expected at most {LONGEST_TABLE} elements along an axis, got {max(sizes)}")


def indexed(shape: tuple[int, ...], tables: Mapping[int, Collection[int] | np.ndarray], fill: float = 0.0) -> Problem:
    """Selects along each axis of `tables` the elements at these indices, -1 for `fill`: a window where the indices form one,
    else a gather."""
    shape4, at = frame(shape, tables)
    _check_length(*map(len, tables.values()))
    rows = {at[a]: np.asarray(t, int) for a, t in tables.items()}
    if outside := [i for a, t in rows.items() for i in (t.min(initial=0), t.max(initial=0)) if not -1 <= i < shape4[a]]:
        raise Refused(f"index {outside[0]} is outside its axis of a tensor of shape {list(shape)}")
    rows = {a: t for a, t in rows.items() if not np.array_equal(t, np.arange(shape4[a]))}
    windows = {a: _window(t, shape4[a]) for a, t in rows.items()}
    c, h, w = (windows.get(a, (0, 1, shape4[a])) for a in (1, 2, 3))
    if 0 not in rows and c and h and w:
        start, step, size = zip(c, h, w, strict=True)
        return MoveProblem(*shape4, "window", size, start, step, fill=float(fill))
    images, *others = (tuple(rows[a].tolist()) if a in rows else () for a in range(4))
    return GatherProblem(shape4, index=(images, others[0], others[1], others[2]), fill=float(fill))


def _window(table: np.ndarray, size: int) -> tuple[int, int, int] | None:
    """(start, step, length) if the table is start + i * step, with -1 wherever that is outside; else None."""
    inside = np.flatnonzero(table >= 0)
    if not len(inside):
        return None
    step = int(table[inside[1]] - table[inside[0]]) if len(inside) > 1 else 1
    start = int(table[inside[0]]) - int(inside[0]) * step
    line = start + step * np.arange(len(table))
    fits = step > 0 and np.array_equal(np.where((line >= 0) & (line < size), line, -1), table)
    return (start, step, len(table)) if fits else None


def slice_(unit: Unit, shapes: Shapes, out: Shape4, weights: Weights) -> Problem:
    return indexed(shape_of(unit.inputs[0]), sliced(unit))


def sliced(unit: Unit) -> dict[int, range]:
    """Returns axis -> the indices that a Slice takes along it."""
    starts, ends, axes, steps = constants(unit, 1, 2, 3, 4)
    shape = shape_of(unit.inputs[0])
    axes = [int(a) % len(shape) for a in axes or range(len(starts))]
    rows = zip(axes, starts, ends, steps or [1] * len(axes), strict=True)
    return {axis: range(*slice(a, b, step).indices(shape[axis])) for axis, a, b, step in rows}


def split(unit: Unit, shapes: Shapes, out: Shape4, weights: Weights) -> Problem:
    """Lowers one part of a Split. The outputs' shapes give the sizes."""
    shape = shape_of(unit.inputs[0])
    axis = attribute(unit.node, "axis", 0) % len(shape)
    first = _starts(unit.node, axis)[unit.output]
    return indexed(shape, {axis: range(first, first + shape_of(unit.output)[axis])})


@lru_cache(maxsize=1)
def _starts(node: Node, axis: int) -> Mapping[Value, int]:
    """Returns output -> its first index along the axis of a Split."""
    ends = accumulate((shape_of(y)[axis] for y in node.outputs), initial=0)
    return dict(zip(node.outputs, ends, strict=False))


# mode -> source index of position i - before, of a row of `size`
PADDING: Mapping[str, Callable[[np.ndarray, int], np.ndarray]] = {
    "constant": lambda i, size: np.where((i >= 0) & (i < size), i, -1),
    "edge": lambda i, size: np.clip(i, 0, size - 1),
    "reflect": lambda i, size: size - 1 - np.abs(size - 1 - i % max(2 * size - 2, 1)),
    "wrap": lambda i, size: i % size,
}


def pad(unit: Unit, shapes: Shapes, out: Shape4, weights: Weights) -> Problem:
    pads, value, axes = constants(unit, 1, 2, 3)
    shape, mode = shape_of(unit.inputs[0]), attribute(unit.node, "mode", "constant")
    axes = [a % len(shape) for a in axes or range(len(shape))]
    _check_length(*shape_of(unit.output))
    tables = {}
    for i, a in enumerate(axes):
        before, after = pads[i], pads[i + len(axes)]
        if before or after:
            first, size = max(-before, 0), shape[a] - max(-before, 0) - max(-after, 0)  # after cropping, to be padded
            if size < 1 and mode != "constant":
                raise Refused(f"its pads remove all of axis {a} of {list(shape)}, so mode {mode} has nothing to repeat")
            table = PADDING[mode](np.arange(-max(before, 0), size + max(after, 0)), size)
            tables[a] = np.where(table < 0, -1, table + first)
    return indexed(shape, tables, _finite(unit, value[0]) if value else 0.0)


def _finite(unit: Unit, value: float) -> float:
    """Returns a Pad's value. An infinity becomes FP32's largest number where all readers treat both alike. Raises Refused."""
    if not math.isinf(value):
        return value
    readers = [use.node.op_type for use in unit.node.outputs[0].uses()]
    allowed = OF_LOWEST if value < 0 else OF_HIGHEST
    got = [
        *(["the model's output"] if unit.node.outputs[0].is_graph_output() else []),
        *(r for r in readers if r not in allowed),
    ]
    if got:
        raise Refused(
            f"pads by {value:g}: expected only {', '.join(allowed)} as readers, got {', '.join(got)}: pad by a number"
        )
    return math.copysign(FLT_MAX, value)


def gather(unit: Unit, shapes: Shapes, out: Shape4, weights: Weights) -> Problem:
    node = unit.node
    index = constant(node.inputs[1])
    if index is None or len(unit.inputs) != 1:
        raise Refused("expected a computed tensor and constant indices")
    shape = shape_of(unit.inputs[0])
    axis = attribute(node, "axis", 0) % len(shape)
    return indexed(shape, {axis: np.where(index < 0, index + shape[axis], index).reshape(-1)})


def expand(unit: Unit, shapes: Shapes, out: Shape4, weights: Weights) -> Problem:
    shape, target = shape_of(unit.inputs[0]), shape_of(unit.output)
    shape = (1,) * (len(target) - len(shape)) + shape
    return indexed(shape, {a: np.broadcast_to(0, t) for a, (s, t) in enumerate(zip(shape, target, strict=True)) if s != t})


def tile(unit: Unit, shapes: Shapes, out: Shape4, weights: Weights) -> Problem:
    (repeats,), shape = constants(unit, 1), shape_of(unit.inputs[0])
    _check_length(*shape_of(unit.output))
    return indexed(shape, {a: np.tile(np.arange(shape[a]), int(r)) for a, r in enumerate(repeats) if r != 1})


# ---- axes that change places


def transpose(unit: Unit, shapes: Shapes, out: Shape4, weights: Weights) -> tuple[Problem, ...]:
    shape = shape_of(unit.inputs[0])
    perm = attribute(unit.node, "perm") or tuple(reversed(range(len(shape))))
    if len(shape) <= 4:
        four = [0, 1, 2, 3]
        for a, p in enumerate(perm):
            four[axis4(a, len(shape))] = axis4(p, len(shape))
        return (GatherProblem(shapes[0], (four[0], four[1], four[2], four[3])),)
    return transposed(shape, perm) or (ViewProblem(shapes[0], out),)


def transposed(shape: tuple[int, ...], perm: tuple[int, ...]) -> tuple[Problem, ...]:
    """Returns gathers in a row, each over its own shape, that transpose a tensor of any rank; none where no element moves."""
    sizes, order = _runs(shape, perm)
    steps = []
    while len(sizes) > 4:  # bring the run that is to be first behind those already in place
        k = next(i for i, run in enumerate(order) if run != i)
        j = order[k]
        parts = math.prod(sizes[:k]), math.prod(sizes[k:j]), sizes[j], math.prod(sizes[j + 1 :])
        steps.append(GatherProblem(parts, (0, 2, 1, 3)))
        now = [*range(k), j, *(i for i in range(k, len(sizes)) if i != j)]
        sizes, order = _runs(tuple(sizes[i] for i in now), tuple(now.index(run) for run in order))
    ones = 4 - len(sizes)
    n, c, h, w = (*range(ones), *(run + ones for run in order))
    steps.append(GatherProblem(as_shape4(sizes), (n, c, h, w)))
    return tuple(s for s in steps if s.perm != (0, 1, 2, 3))


def _runs(shape: tuple[int, ...], perm: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """Returns (sizes of the runs of axes that stay neighbours, their order in the output); axes of size 1 vanish."""
    moved = [p for p in perm if shape[p] != 1]
    kept = sorted(moved)
    moved = [kept.index(p) for p in moved]
    heads = [p for i, p in enumerate(moved) if i == 0 or moved[i - 1] != p - 1]
    starts = sorted(heads)
    ends = [*starts[1:], len(moved)]
    sizes = [math.prod(shape[kept[i]] for i in range(a, b)) for a, b in zip(starts, ends, strict=False)]
    return sizes, [starts.index(p) for p in heads]


def shuffle(unit: Unit, shapes: Shapes, out: Shape4, weights: Weights) -> MoveProblem:
    return MoveProblem(*shapes[0], unit.op, (out[1], out[2], out[3]), step=(1, unit.block, unit.block))


def concat(unit: Unit, shapes: Shapes, out: Shape4, weights: Weights) -> ConcatProblem:
    shape = shape_of(unit.output)
    if len(unit.inputs) != len(unit.node.inputs):
        raise Refused("expected computed inputs, got a constant among them")
    axis = attribute(unit.node, "axis") % len(shape)
    whole, places = frame(shape, [axis])
    at = places[axis]
    a, b, c = whole[:at] + whole[at + 1 :]
    return ConcatProblem(tuple(shape_of(v)[axis] for v in unit.inputs), (a, b, c), at)


# ---- Resize


@dataclass(frozen=True, slots=True)
class _Scaling:
    """A Resize's scale along each axis, and the (start, end) of the region that is read, as fractions of each axis; `changed`:
    the axes that it changes."""

    coordinates: str
    scale: Mapping[int, Scale]
    crop: Mapping[int, tuple[float, float]]
    changed: list[int]


def resize(unit: Unit, shapes: Shapes, out: Shape4, weights: Weights) -> Problems:
    node, shape, target = unit.node, shape_of(unit.inputs[0]), shape_of(unit.output)
    mode, along = attribute(node, "mode", "nearest"), _scaling(unit)
    if along.coordinates not in COORDINATES or mode not in ("nearest", "linear", "cubic"):
        raise Refused(f"mode {mode} with {along.coordinates} is not known")
    if mode != "nearest":
        return _interpolated(unit, mode, along)
    rounding = attribute(node, "nearest_mode", "round_prefer_floor")
    if rounding not in ROUNDINGS:
        raise Refused(f"nearest_mode {rounding} is not known")
    tables = {
        a: nearest(shape[a], target[a], along.scale[a], along.coordinates, rounding, along.crop[a]) for a in along.changed
    }
    return _repeated(shape, tables) or indexed(shape, tables, attribute(node, "extrapolation_value", 0.0))


def _scaling(unit: Unit) -> _Scaling:
    node, shape, target = unit.node, shape_of(unit.inputs[0]), shape_of(unit.output)
    every = range(len(shape))
    roi, scales, sizes = constants(unit, 1, 2, 3)
    axes = [a % len(shape) for a in attribute(node, "axes") or every]
    coordinates, policy = (
        attribute(node, name, default)
        for name, default in (("coordinate_transformation_mode", "half_pixel"), ("keep_aspect_ratio_policy", "stretch"))
    )
    scale: dict[int, Scale] = {a: Fraction(t, s) for a, (s, t) in enumerate(zip(shape, target, strict=True))}
    if scales:
        scale |= dict(zip(axes, scales, strict=True))
    elif policy != "stretch":
        ratios = [Fraction(int(t), shape[a]) for a, t in zip(axes, sizes, strict=True)]
        scale |= dict.fromkeys(axes, min(ratios) if policy == "not_larger" else max(ratios))
    crop = dict.fromkeys(every, (0.0, 1.0))
    if roi and coordinates == "tf_crop_and_resize":
        crop |= {a: (roi[i], roi[i + len(axes)]) for i, a in enumerate(axes)}
    changed = [a for a in every if scale[a] != 1 or shape[a] != target[a] or crop[a] != (0.0, 1.0)]
    return _Scaling(coordinates, scale, crop, changed)


def _interpolated(unit: Unit, mode: str, along: _Scaling) -> tuple[Problem, ...]:
    """Interpolates two axes at a time, the last ones first: an interpolation over many axes is one of interpolations."""
    shape, target, changed = shape_of(unit.inputs[0]), shape_of(unit.output), along.changed
    steps: list[Problem] = []
    while changed or not steps:
        pair, changed = changed[-2:], changed[:-2]
        shape4, at = frame(shape, pair)
        steps += _of_two(unit, mode, along, shape4, {at[a]: a for a in pair})
        shape = tuple(target[a] if a in pair else size for a, size in enumerate(shape))
    return tuple(steps)


def _of_two(unit: Unit, mode: str, along: _Scaling, shape4: Shape4, pair: Mapping[int, int]) -> Iterator[Problem]:
    """Interpolates along at most two axes. `pair`: position in `shape4` -> axis of the tensor."""
    node, target = unit.node, shape_of(unit.output)
    places = list(pair)
    order = [0, 1, 2, 3] if places == [2] else [*(a for a in range(4) if a not in places), *places]
    # One axis alone is columns, but where it is rows already; no axis is both as they are.
    axes = [pair[2], None] if places == [2] else [*[None] * (2 - len(pair)), *pair.values()]
    n, c, h, w = (shape4[a] for a in order)
    high, wide = (size if a is None else target[a] for a, size in zip(axes, (h, w), strict=True))
    scale_h, scale_w = (1.0 if a is None else float(along.scale[a]) for a in axes)
    crop = [along.crop[a] if a is not None else (0.0, 1.0) for a in axes]
    problem = ResizeProblem(
        n,
        c,
        h,
        w,
        (high, wide),
        mode,
        along.coordinates,
        (scale_h, scale_w),
        float(attribute(node, "cubic_coeff_a", -0.75)),
        bool(attribute(node, "exclude_outside", 0)),
        bool(attribute(node, "antialias", 0)),
        (*crop[0], *crop[1]),
        float(attribute(node, "extrapolation_value", 0.0)),
    )
    if order == [0, 1, 2, 3]:
        yield problem
        return
    back = [order.index(a) for a in range(4)]
    yield GatherProblem(shape4, (order[0], order[1], order[2], order[3]))
    yield problem
    yield GatherProblem(problem.out_shape, (back[0], back[1], back[2], back[3]))


def _repeated(shape: tuple[int, ...], tables: Mapping[int, Sequence[int]]) -> MoveProblem | None:
    """Returns the move that repeats each pixel a whole number of times along rows and columns, which move.cu does without
    tables; None where the tables do otherwise."""
    shape4, factors = nchw(shape), [1, 1, 1, 1]
    if len(shape) > 4 or not tables:
        return None
    for a, table in tables.items():
        at = axis4(a, len(shape))
        factors[at] = max(1, len(table) // shape4[at])
        if at < 2 or not np.array_equal(table, np.arange(shape4[at] * factors[at]) // factors[at]):
            return None
    rows, columns = factors[2:]
    return MoveProblem(*shape4, "upsample", (shape4[1], shape4[2] * rows, shape4[3] * columns), step=(1, rows, columns))
