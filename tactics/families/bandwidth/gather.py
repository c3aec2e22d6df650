"""Kernels that follow tables: gather (any permutation and any index per axis, also Concat along any axis) and resize."""

from collections.abc import Mapping
from itertools import product

import numpy as np

from cuda_kernels.device import Device
from tactics.families.bandwidth import movement
from tactics.format import HALF_FORMATS, Strides, padded_channels
from tactics.problems.gather import GatherProblem, ResizeProblem
from tactics.problems.problem import ConcatProblem
from tactics.problems.protocol import Shape4
from tactics.reason import Candidates, unsupported
from tactics.roofline import Counts
from tactics.step import NONFINITE, NULL, Launch, f32_values, floats, grid, ints, launch, linear, own_strides, view_args
from tactics.tactic import Tactic, tactic_of

Gathered = GatherProblem | ResizeProblem | ConcatProblem
CASES = {
    "gather": (GatherProblem((2, 9, 5, 3), (0, 3, 1, 2)),),
    "resize": (ResizeProblem(2, 20, 5, 4, (9, 7), "linear", "half_pixel", (9 / 5, 7 / 4)),),
}


def candidates(p: Gathered, device: Device) -> Candidates:
    """Yields (tactic, reason against it or None) for every combination of formats of the problem's tensors."""
    if isinstance(p, ConcatProblem) and p.axis == 1:
        yield "gather", unsupported("joins tensors along channels, which the move kernel does")
        return
    for x, y in product(HALF_FORMATS, HALF_FORMATS):
        if isinstance(p, ResizeProblem):
            mixed = "input and output have different vector widths" if linear(x) != linear(y) else ""
            yield tactic_of("resize", None, (x,), y), unsupported(mixed)
        else:
            yield tactic_of("gather", None, (x,) * len(p.in_shapes), y), None


def launches(p: Gathered, tactic: Tactic, strided: tuple[Strides, ...] | None = None) -> tuple[Launch, ...]:
    strided = strided or own_strides(p, tactic)
    if isinstance(p, ResizeProblem):
        return (_resize(p, tactic, strided),)
    if isinstance(p, GatherProblem):
        return (_gather(0, p, tactic, (0, 0, 0, 0), p.out_shape, strided),)
    result, first = [], 0
    for i, shape in enumerate(p.in_shapes):
        n, c, h, w = (first if axis == p.axis else 0 for axis in range(4))
        result.append(_gather(i, GatherProblem(shape), tactic, (n, c, h, w), p.out_shape, strided))
        first += shape[p.axis]
    return tuple(result)


def _gather(source: int, p: GatherProblem, tactic: Tactic, first: Shape4, whole: Shape4, strided: movement.At) -> Launch:
    """Launches the part of the output that begins at `first`, from input `source`."""
    x, y = tactic.ins[source], tactic.out
    n, c, h, w = p.out_shape
    covered = padded_channels(y.layout, whole[1])
    channels_stay = p.perm[1] == 1 and not p.index[1]
    values = {"IN_VEC": int(channels_stay and not linear(x)), "OUT_VEC": int(not linear(y)), **f32_values(x, y)}
    values["BY_CHANNEL"] = int(not linear(x) and not linear(y) and p.perm[1] == 1)
    starts, at = [], 0
    for table in p.index:
        starts.append(at if table else -1)
        at += len(table)
    args = {"nonfinite": NONFINITE, "x": ("in", source), "y": ("out", 0), "table": ("weights", "table") if at else NULL}
    args |= view_args("in", strided[source]) | view_args("out", strided[-1]) | floats(fill=p.fill)
    args |= ints(in_c=p.shape[1], in_w=p.shape[3], n=n, c=c, h=h, w=w, covered=covered, out_w=whole[3])
    for name, numbers in (("first", first), ("axis", p.perm), ("table", starts)):
        args |= ints(**{f"{name}_{axis}": v for axis, v in zip("nchw", numbers, strict=True)})
    return launch("gather", values, grid(n * -(-covered // 8) * h * w), 256, 0, args)


def _resize(p: ResizeProblem, tactic: Tactic, strided: tuple[Strides, ...]) -> Launch:
    x, y = tactic.ins[0], tactic.out
    vec = 1 if linear(x) else 8
    groups, in_groups = (padded_channels(f.layout, p.c) // vec for f in (y, x))
    args = {"nonfinite": NONFINITE, "x": ("in", 0), "y": ("out", 0)}
    args |= view_args("in", strided[0]) | view_args("out", strided[1])
    args |= {name: ("weights", name) for name in ("row", "column", "row_weight", "column_weight")}
    args |= ints(n=p.n, c=p.c, groups=groups, in_groups=in_groups, w=p.w, out_h=p.out[0], out_w=p.out[1])
    args |= ints(row_taps=p.num_taps(0), column_taps=p.num_taps(1)) | floats(outside=p.extrapolation)
    values = {"VEC": vec} | f32_values(x, y)
    return launch("resize", values, grid(p.n * groups * p.out[0] * p.out[1]), 256, 0, args)


def pack(p: Gathered, tactic: Tactic, weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the tables that follow from the problem."""
    return tables(p, tactic)


def section_bytes(p: Gathered, tactic: Tactic) -> dict[str, int]:
    """Bytes of the sections that `pack` makes, from sizes alone."""
    if isinstance(p, ResizeProblem):
        row, column = (4 * p.out[axis] * p.num_taps(axis) for axis in (0, 1))
        return {"row": row, "column": column, "row_weight": row, "column_weight": column}
    entries = sum(map(len, p.index)) if isinstance(p, GatherProblem) else 0
    return {"table": 4 * entries} if entries else {}


def tables(p: Gathered, tactic: Tactic) -> dict[str, np.ndarray]:
    """Returns the positions of each output pixel's inputs: sections that follow from the problem only."""
    if isinstance(p, ResizeProblem):
        (row, row_weight), (column, column_weight) = p.taps(0), p.taps(1)
        tables = {"row": row, "column": column, "row_weight": row_weight, "column_weight": column_weight}
        return {name: np.ascontiguousarray(t).reshape(-1) for name, t in tables.items()}
    if isinstance(p, GatherProblem) and any(p.index):
        return {"table": np.concatenate([np.asarray(t, np.int32) for t in p.index])}
    return {}


def counts(p: Gathered, tactic: Tactic, device: Device) -> Counts:
    """Counts bytes over bandwidth, as for all kernels that move more than they compute."""
    return movement.moved(p, tactic, device, launches(p, tactic), _per_element(p, tactic))


def _per_element(p: Gathered, tactic: Tactic) -> float:
    """Returns the instructions per element in addition to its access."""
    if not isinstance(p, ResizeProblem):
        return 12.0
    return movement.per_window(4.0, p.num_taps(0) * p.num_taps(1), p)
