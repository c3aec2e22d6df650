"""Operators that only move elements -> problems: Slice, Split, Pad, Gather, Expand, Tile, Transpose, Resize, Concat.

A rule returns one problem or several in a row. Each may be stated over another NCHW shape of the same elements than its
tensors have: `lower` puts views in between. So an axis of a tensor of any rank becomes one of four (`frame`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np

from gpu_runtime.frontend.layers import Layer
from gpu_runtime.frontend.queries import attribute, constant, shape_of
from tactics.problems.gather import COORDINATES, ROUNDINGS, GatherProblem, ResizeProblem, ViewProblem, nearest
from tactics.problems.problem import ConcatProblem, MoveProblem, Problem

Shape4 = tuple[int, int, int, int]
LONGEST_TABLE = 2**24  # indices along an axis
FLT_MAX = float(np.finfo(np.float32).max)


class Refused(Exception):
    """Why a node cannot be expressed as a problem."""


# ---- ONNX shapes and NCHW


def nchw(shape: tuple[int, ...]) -> Shape4:
    """[N,C] is [N,C,1,1], [N,C,L] is [N,C,1,L]; what lies between the second axis and the last is rows."""
    if len(shape) >= 3:
        return (shape[0], shape[1], math.prod(shape[2:-1]), shape[-1])
    return ((1, *shape, 1, 1, 1) if len(shape) < 2 else (*shape, 1, 1))[:4]


def axis4(axis: int, rank: int) -> int:
    """Where axis `axis` of a tensor of that rank, at most 4, stands in NCHW."""
    return {1: (1,), 2: (0, 1), 3: (0, 1, 3), 4: (0, 1, 2, 3)}[rank][axis]


def frame(shape: tuple[int, ...], axes: Iterable[int]) -> tuple[Shape4, dict[int, int]]:
    """(an NCHW shape of the same elements, where each of `axes` stands in it, alone): `nchw` itself up to rank 4."""
    axes, rank = set(axes), len(shape)
    if rank <= 4:
        return nchw(shape), {a: axis4(a, rank) for a in axes}
    sizes: list[int] = []
    at: dict[int, int] = {}
    for a, size in enumerate(shape):
        if a in axes or not sizes or a - 1 in axes:
            sizes.append(1)
        sizes[-1] *= size
        if a in axes:
            at[a] = len(sizes) - 1
    if len(sizes) > 4:
        raise Refused(f"expected axes that leave at most 4 runs of a tensor of {list(shape)}, got axes {sorted(axes)}")
    ones = 4 - len(sizes)
    return (*(1,) * ones, *sizes), {a: i + ones for a, i in at.items()}


def constants(layer: Layer, *slots: int) -> list[list | None]:
    """The constant inputs at `slots` as lists; None where absent."""
    found = []
    for i in slots:
        v = layer.node.inputs[i] if i < len(layer.node.inputs) else None
        array = constant(v)
        if v is not None and array is None:
            raise Refused(f"its input {v.name!r} must be a constant")
        found.append(None if array is None or (array.size == 0 and i) else array.reshape(-1).tolist())
    return found


# ---- one table of indices per axis


def _check_length(*sizes: int) -> None:
    """Refuse a table that would fill the memory."""
    if max(sizes, default=0) > LONGEST_TABLE:
        raise Refused(f"expected at most {LONGEST_TABLE} elements along an axis, got {max(sizes)}")


def indexed(shape: tuple[int, ...], tables: Mapping[int, Iterable[int]], fill: float = 0.0) -> Problem:
    """Along each axis of `tables` the elements at those indices, -1 for `fill`: a window where that is one, else a gather."""
    shape4, at = frame(shape, tables)
    _check_length(*map(len, tables.values()))
    rows = {at[a]: np.asarray(t, int) for a, t in tables.items()}
    if outside := [i for a, t in rows.items() for i in (t.min(initial=0), t.max(initial=0)) if not -1 <= i < shape4[a]]:
        raise Refused(f"an index lies outside its axis of a tensor of {list(shape)}: {outside[0]}")
    rows = {a: t for a, t in rows.items() if not np.array_equal(t, np.arange(shape4[a]))}
    windows = {a: _window(t, shape4[a]) for a, t in rows.items()}
    if 0 not in rows and None not in windows.values():
        start, step, size = ([windows.get(a, (0, 1, shape4[a]))[i] for a in (1, 2, 3)] for i in range(3))
        return MoveProblem(*shape4, "window", tuple(size), tuple(start), tuple(step), fill=float(fill))
    return GatherProblem(shape4, index=tuple(tuple(rows[a].tolist()) if a in rows else () for a in range(4)), fill=float(fill))


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


def slice_(layer: Layer, shapes, out, weights) -> Problem:
    starts, ends, axes, steps = constants(layer, 1, 2, 3, 4)
    shape = shape_of(layer.inputs[0])
    tables = {}
    for i, (a, b) in enumerate(zip(starts, ends, strict=True)):
        axis, step = (axes[i] if axes else i) % len(shape), steps[i] if steps else 1
        tables[axis] = range(*slice(a, b, step).indices(shape[axis]))
    return indexed(shape, tables)


def split(layer: Layer, shapes, out, weights) -> Problem:
    """One part of a Split: its sizes are those of the outputs, whatever said so."""
    outputs, shape = layer.node.outputs, shape_of(layer.inputs[0])
    axis = attribute(layer.node, "axis", 0) % len(shape)
    first = sum(shape_of(y)[axis] for y in outputs[: outputs.index(layer.output)])
    return indexed(shape, {axis: range(first, first + shape_of(layer.output)[axis])})


PADDING = {  # mode -> source index of position i - before, of a row of `size`
    "constant": lambda i, size: np.where((i >= 0) & (i < size), i, -1),
    "edge": lambda i, size: np.clip(i, 0, size - 1),
    "reflect": lambda i, size: size - 1 - np.abs(size - 1 - i % max(2 * size - 2, 1)),
    "wrap": lambda i, size: i % size,
}


def pad(layer: Layer, shapes, out, weights) -> Problem:
    pads, value, axes = constants(layer, 1, 2, 3)
    shape, mode = shape_of(layer.inputs[0]), attribute(layer.node, "mode", "constant")
    axes = [a % len(shape) for a in axes] if axes else range(len(shape))
    _check_length(*shape_of(layer.output))
    tables = {}
    for i, a in enumerate(axes):
        before, after = pads[i], pads[i + len(axes)]
        if before or after:
            first, size = max(-before, 0), shape[a] - max(-before, 0) - max(-after, 0)  # what is left is padded
            if size < 1 and mode != "constant":
                raise Refused(f"its pads leave nothing of axis {a} of {list(shape)} for mode {mode} to repeat")
            table = PADDING[mode](np.arange(-max(before, 0), size + max(after, 0)), size)
            tables[a] = np.where(table < 0, -1, table + first)
    return indexed(shape, tables, float(np.clip(value[0], -FLT_MAX, FLT_MAX)) if value else 0.0)


def gather(layer: Layer, shapes, out, weights) -> Problem:
    node = layer.node
    index = constant(node.inputs[1])
    if index is None or len(layer.inputs) != 1:
        raise Refused("expected a computed tensor and constant indices")
    shape = shape_of(layer.inputs[0])
    axis = attribute(node, "axis", 0) % len(shape)
    return indexed(shape, {axis: np.where(index < 0, index + shape[axis], index).reshape(-1)})


def expand(layer: Layer, shapes, out, weights) -> Problem:
    shape, target = shape_of(layer.inputs[0]), shape_of(layer.output)
    shape = (1,) * (len(target) - len(shape)) + shape
    return indexed(shape, {a: np.broadcast_to(0, t) for a, (s, t) in enumerate(zip(shape, target, strict=True)) if s != t})


def tile(layer: Layer, shapes, out, weights) -> Problem:
    (repeats,), shape = constants(layer, 1), shape_of(layer.inputs[0])
    _check_length(*shape_of(layer.output))
    return indexed(shape, {a: np.tile(np.arange(shape[a]), int(r)) for a, r in enumerate(repeats) if r != 1})


# ---- axes that change places


def transpose(layer: Layer, shapes, out, weights) -> tuple[Problem, ...]:
    shape = shape_of(layer.inputs[0])
    perm = attribute(layer.node, "perm") or tuple(reversed(range(len(shape))))
    if len(shape) <= 4:
        four = [0, 1, 2, 3]
        for a, p in enumerate(perm):
            four[axis4(a, len(shape))] = axis4(p, len(shape))
        return (GatherProblem(shapes[0], tuple(four)),)
    sizes, order = _runs(shape, perm)
    steps = []
    while len(sizes) > 4:  # bring the run that is to be first behind those already in place
        k = next(i for i, run in enumerate(order) if run != i)
        j = order[k]
        parts = [math.prod(sizes[:k]), math.prod(sizes[k:j]), sizes[j], math.prod(sizes[j + 1 :])]
        steps.append(GatherProblem(tuple(parts), (0, 2, 1, 3)))
        now = [*range(k), j, *(i for i in range(k, len(sizes)) if i != j)]
        sizes, order = _runs(tuple(sizes[i] for i in now), tuple(now.index(run) for run in order))
    ones = 4 - len(sizes)
    steps.append(GatherProblem((*(1,) * ones, *sizes), (*range(ones), *(run + ones for run in order))))
    return tuple(s for s in steps if s.perm != (0, 1, 2, 3)) or (ViewProblem(shapes[0], out),)


def _runs(shape: tuple[int, ...], perm: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """(sizes of the runs of axes that stay neighbours, their order in the output); axes of one element vanish."""
    moved = [p for p in perm if shape[p] != 1]
    kept = sorted(moved)
    moved = [kept.index(p) for p in moved]
    heads = [p for i, p in enumerate(moved) if i == 0 or moved[i - 1] != p - 1]
    starts = sorted(heads)
    ends = [*starts[1:], len(moved)]
    sizes = [math.prod(shape[kept[i]] for i in range(a, b)) for a, b in zip(starts, ends, strict=False)]
    return sizes, [starts.index(p) for p in heads]


def shuffle(layer: Layer, shapes, out, weights) -> MoveProblem:
    return MoveProblem(*shapes[0], layer.op, out[1:], step=(1, layer.block, layer.block))


def concat(layer: Layer, shapes, out, weights) -> ConcatProblem:
    shape = shape_of(layer.output)
    if len(layer.inputs) != len(layer.node.inputs):
        raise Refused("expected computed inputs, got a constant among them")
    axis = attribute(layer.node, "axis") % len(shape)
    whole, at = frame(shape, [axis])
    at = at[axis]
    return ConcatProblem(tuple(shape_of(v)[axis] for v in layer.inputs), whole[:at] + whole[at + 1 :], at)


# ---- Resize


def resize(layer: Layer, shapes, out, weights) -> Problem | tuple[Problem, ...]:
    node, shape, target = layer.node, shape_of(layer.inputs[0]), shape_of(layer.output)
    rank = len(shape)
    roi, scales, _ = constants(layer, 1, 2, 3)
    mode, turn = attribute(node, "mode", "nearest"), attribute(node, "coordinate_transformation_mode", "half_pixel")
    axes = [a % rank for a in attribute(node, "axes") or range(rank)]
    if turn not in COORDINATES or mode not in ("nearest", "linear", "cubic"):
        raise Refused(f"mode {mode} with {turn} is not known")
    scale = {a: t / s for a, (s, t) in enumerate(zip(shape, target, strict=True))}
    if scales:
        scale |= dict(zip(axes, scales, strict=True))
    elif attribute(node, "keep_aspect_ratio_policy", "stretch") != "stretch":
        asked = constants(layer, 3)[0]
        ratios = [t / shape[a] for a, t in zip(axes, asked, strict=True)]
        pick = min if attribute(node, "keep_aspect_ratio_policy") == "not_larger" else max
        scale |= dict.fromkeys(axes, pick(ratios))
    crop = dict.fromkeys(range(rank), (0.0, 1.0))
    if roi and turn == "tf_crop_and_resize":
        crop |= {a: (roi[i], roi[i + len(axes)]) for i, a in enumerate(axes)}
    changed = [a for a in range(rank) if scale[a] != 1 or shape[a] != target[a] or crop[a] != (0.0, 1.0)]
    outside = attribute(node, "extrapolation_value", 0.0)
    if mode == "nearest":
        rounding = attribute(node, "nearest_mode", "round_prefer_floor")
        if rounding not in ROUNDINGS:
            raise Refused(f"nearest_mode {rounding} is not known")
        tables = {a: nearest(shape[a], target[a], scale[a], turn, rounding, crop[a]) for a in changed}
        return _repeated(shape, tables) or indexed(shape, tables, outside)
    steps: list[Problem] = []
    while changed or not steps:  # two axes at a time, the last ones first: interpolation is one of interpolations
        pair, changed = changed[-2:], changed[:-2]
        shape4, at = frame(shape, pair)
        rows = [at[a] for a in pair]
        turned = (0, 1, 2, 3) if rows == [2] else (*(a for a in range(4) if a not in rows), *rows)
        pair = [*pair, None] if rows == [2] else [None] * (2 - len(pair)) + pair  # else one axis alone is columns
        n, c, h, w = (shape4[a] for a in turned)
        problem = ResizeProblem(
            n, c, h, w, tuple(size if a is None else target[a] for a, size in zip(pair, (h, w), strict=True)), mode, turn,
            tuple(1.0 if a is None else float(scale[a]) for a in pair), float(attribute(node, "cubic_coeff_a", -0.75)),
            bool(attribute(node, "exclude_outside", 0)), bool(attribute(node, "antialias", 0)),
            sum(((0.0, 1.0) if a is None else crop[a] for a in pair), ()), float(outside),
        )  # fmt: skip
        if turned == (0, 1, 2, 3):
            steps.append(problem)
        else:
            back = tuple(turned.index(a) for a in range(4))
            steps += [GatherProblem(shape4, turned), problem, GatherProblem(problem.out_shape, back)]
        shape = tuple(target[a] if a in pair else size for a, size in enumerate(shape))
    return tuple(steps)


def _repeated(shape: tuple[int, ...], tables) -> MoveProblem | None:
    """Each pixel repeated a whole number of times along rows and columns: what move.cu does without tables."""
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


# ---- windows of windows


def compose(a: MoveProblem, b: MoveProblem) -> MoveProblem | None:
    """One window that is b of a, where there is one."""
    for size, middle, out, s1, t1, s2, t2 in zip((a.c, a.h, a.w), a.out, b.out, a.start, a.step, b.start, b.step, strict=True):
        j = s2 + t2 * np.arange(out)
        source = s1 + t1 * j
        in_middle, in_x = (j >= 0) & (j < middle), (source >= 0) & (source < size)
        if np.any(in_x & ~in_middle) or (np.any(in_middle & ~in_x) and a.fill != b.fill):
            return None
    start = tuple(s1 + t1 * s2 for s1, t1, s2 in zip(a.start, a.step, b.start, strict=True))
    step = tuple(t1 * t2 for t1, t2 in zip(a.step, b.step, strict=True))
    return replace(b, c=a.c, h=a.h, w=a.w, start=start, step=step)
