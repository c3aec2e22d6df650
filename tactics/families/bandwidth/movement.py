"""Kernels that move more than they compute: pool, pool_global, move (slice, pad, concat, reformat, ...)."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np

from cuda_kernels.device import Device
from tactics import stages
from tactics.format import (
    BYTE_LAYOUTS,
    DTYPES,
    HALF_FORMATS,
    LAYOUTS,
    WHOLE,
    Format,
    Strides,
    num_bytes,
    num_elements,
    padded_channels,
    strides,
    too_large,
)
from tactics.problems.gather import ResizeProblem
from tactics.problems.problem import (
    ChainedProblem,
    ConcatProblem,
    MoveProblem,
    PointwiseProblem,
    PoolProblem,
    Problem,
    ReformatProblem,
)
from tactics.problems.protocol import Shape4
from tactics.reason import Candidates, Reason, unsupported
from tactics.roofline import LATENCY_CLK, Counts, streamed, traffic
from tactics.step import (
    NONFINITE,
    Args,
    Launch,
    byte_values,
    f32_values,
    floats,
    grid,
    ints,
    launch,
    linear,
    member,
    own_strides,
    view_args,
    window_args,
)
from tactics.tactic import Tactic, tactic_of

Triple = tuple[int, int, int]
At = tuple[Strides, ...]  # of the inputs, then of the output
CASES = {
    "move": (
        ReformatProblem(2, 40, 6, 5, "fp32:chw", "fp16:hwc8"),
        ReformatProblem(2, 40, 6, 5, "fp16:hwc8", "fp32:chw"),
        ReformatProblem(2, 40, 6, 5, "fp16:chw", "fp16:chw32"),
        ReformatProblem(2, 40, 6, 5, "fp16:hwc8", "int8:hwc16"),
        ReformatProblem(2, 40, 6, 5, "uint8:chw32", "fp16:chw"),
        MoveProblem(2, 40, 9, 8, "window", (16, 4, 7), start=(8, 1, 0), step=(1, 2, 1)),
        ConcatProblem((16, 32, 16), (2, 5, 4)),
    ),
    "pool": (PoolProblem(2, 40, 11, 9, "max", 3, 3, (6, 5), stride=(2, 2), pad=(1, 1, 1, 1)),),
    "pool_global": (PoolProblem(3, 72, 7, 7, "avg", 7, 7, (1, 1)),),
}


def candidates(problem: Problem, device: Device) -> Candidates:
    """Yields (tactic, reason against it or None) for every combination of formats of the problem's tensors."""
    return CANDIDATES[type(problem)](problem)


def launches(problem: Problem, tactic: Tactic, strided: tuple[Strides, ...] | None = None) -> tuple[Launch, ...]:
    if strided is None and isinstance(problem, (PoolProblem, ChainedProblem)):
        strided = own_strides(problem, tactic)
    return LAUNCHERS[type(problem)](problem, tactic, strided)


def pack(problem: Problem, tactic: Tactic, weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Packs the weights of a chain behind a pool; other problems have none."""
    return stages.pack(problem.chain, weights) if isinstance(problem, ChainedProblem) else {}


def _same_width(p: PoolProblem) -> Iterator[tuple[Tactic, Reason | None]]:
    """Yields the pairs of formats of a pool; both must have one vector width, since pooling moves whole vectors."""
    kernel = "pool_global" if p.is_global else "pool"
    for x, y in product(HALF_FORMATS, HALF_FORMATS):
        reason = "" if linear(x) == linear(y) else "input and output have different vector widths"
        yield tactic_of(kernel, None, (x,), y), unsupported(reason)


def _pool_and_chain(p: ChainedProblem) -> Candidates:
    """Yields a pool's pairs of formats with those of the chain's other tensors, as pointwise kernels take them; nothing for a
    chain behind another problem.
    """
    if not isinstance(p.first, PoolProblem):
        return
    why = "the kernel for whole images supports no fused chain" if p.first.is_global else stages.reason_against(p.chain)
    against = unsupported(why)
    for tactic, reason in _same_width(p.first):
        for others in product(*stages.formats(p.chain, tactic.out, result=True)):
            yield tactic_of("pool", None, (*tactic.ins, *others), tactic.out), reason or against


def _any_pair(p: MoveProblem) -> Candidates:
    for x, y in product(HALF_FORMATS, HALF_FORMATS):
        yield tactic_of("move", None, (x,), y), None


def _concat_pairs(p: ConcatProblem) -> Candidates:
    for x, y in product(HALF_FORMATS, HALF_FORMATS):
        yield tactic_of("move", None, (x,) * len(p.sizes), y), unsupported("" if p.axis == 1 else "joins channels only")


def byte_candidates(problem: PoolProblem | MoveProblem | ConcatProblem, dtypes: Sequence[str]) -> Iterator[Tactic]:
    """Yields the tactics with tensors of bytes, all of one type: of maxima, moves and joined channels. `dtypes`: of each input,
    then of the output; "int8" or "uint8": FP16 or that.
    """
    dtype = dtypes[0]
    if {*dtypes} != {dtype} or dtype not in WHOLE or too_large(problem.all_shapes):
        return
    if isinstance(problem, PoolProblem) and (problem.kind != "max" or problem.is_global):
        return
    if isinstance(problem, ConcatProblem) and problem.axis != 1:
        return
    least, most = np.iinfo(DTYPES[dtype]).min, np.iinfo(DTYPES[dtype]).max
    if isinstance(problem, MoveProblem) and problem.fill not in range(least, most + 1):
        return
    for x, y in product([Format(dtype, layout) for layout in BYTE_LAYOUTS], repeat=2):
        yield tactic_of("pool" if isinstance(problem, PoolProblem) else "move", None, (x,) * len(problem.in_shapes), y)


def _reformat_pair(p: ReformatProblem) -> Candidates:
    yield tactic_of("move", None, (Format.parse(p.src),), Format.parse(p.dst)), None


def section_bytes(problem: Problem, tactic: Tactic) -> dict[str, int]:
    """Bytes of the sections that `pack` makes."""
    return stages.section_bytes(problem.chain) if isinstance(problem, ChainedProblem) else {}


CANDIDATES: dict[type[Problem], Callable[..., Candidates]] = {
    PoolProblem: _same_width,
    ChainedProblem: _pool_and_chain,
    MoveProblem: _any_pair,
    ConcatProblem: _concat_pairs,
    ReformatProblem: _reformat_pair,
}


def _pool(p: PoolProblem, tactic: Tactic, strided: At, chain: PointwiseProblem | None = None) -> tuple[Launch, ...]:
    x_fmt, y_fmt = tactic.ins[0], tactic.out
    vec = 1 if linear(x_fmt) else 8
    groups, in_groups = (padded_channels(f.layout, p.c) // vec for f in (y_fmt, x_fmt))
    values = {"AVG": int(p.kind == "avg"), "VEC": vec} | f32_values(x_fmt, y_fmt)
    values |= byte_values("X", x_fmt) | byte_values("Y", y_fmt)
    rows = p.out[0]
    if tactic.kernel == "pool" and p.r * p.s <= FIXED_WINDOW:
        values |= {"R": p.r, "S": p.s}
        outputs = _outputs(p, groups) if vec == 8 else 1
        if outputs > 1:
            values |= {"OUTPUTS": outputs, "STRIDE": p.stride[0]}
            rows = -(-rows // outputs)
    args = {"nonfinite": NONFINITE, "x": ("in", 0), "y": ("out", 0)}
    args |= view_args("in", strided[0]) | view_args("out", strided[-1])
    args |= ints(n=p.n, groups=groups, in_groups=in_groups)
    if tactic.kernel == "pool_global":
        args |= ints(pixels=p.h * p.w) | floats(scale=1.0 / (p.h * p.w))
        blocks = p.n * -(-groups // 8) if vec == 8 else -(-p.n * groups // 8)
        return (launch("pool_global", values, (blocks, 1, 1), 256, 0, args),)
    h_end, w_end = (p.h + p.pad[2], p.w + p.pad[3]) if p.count_pad else (p.h, p.w)
    args |= ints(h=p.h, w=p.w, p=p.out[0], q=p.out[1], r=p.r, s=p.s, h_end=h_end, w_end=w_end, count_pad=p.count_pad)
    if chain is not None:
        apart = stages.needs_rows(chain)
        values |= {"ROWS": int(apart)} | stages.values(chain, tactic.ins, result=True)
        args |= ints(c=p.c) | stages.args(chain, strided, apart, first=1)
    each = p.n * groups * rows * p.out[1]
    threads = 256 if each >= MANY_THREADS else 64  # few: on more SMs
    return (launch("pool", values, (-(-each // threads), 1, 1), threads, 0, args | window_args(p)),)


def _outputs(p: PoolProblem, groups: int) -> int:
    """Returns how many outputs of one column a thread of pool.cu computes: several if windows share rows and there are enough
    threads.
    """
    shared = p.dilation[0] == 1 and p.stride[0] < p.r and p.r * p.s <= 9  # rows; of more taps registers hold one window's
    most = (4 if p.stride[0] == 1 else 2) if shared else 1
    threads = p.n * groups * p.out[0] * p.out[1]
    return max(n for n in (1, 2, 4) if n == 1 or (n <= most and threads >= n * MANY_THREADS))


def _chained_pool(p: ChainedProblem, tactic: Tactic, strided: At) -> tuple[Launch, ...]:
    if not isinstance(p.first, PoolProblem):
        raise ValueError(f"pool: expected a chain behind a pool, got {p}")
    return _pool(p.first, tactic, strided, p.chain)


FIXED_WINDOW = 25  # taps of a window up to which pool.cu is compiled for it
MANY_THREADS = 128 * 1024  # the least number of threads at which one of pool.cu has more than one output
POOL_GLOBAL_PIXELS = 256  # in flight in a thread row of pool_global.cu: 32 lanes, AHEAD loads each
IN_TYPES = {"fp16": 0, "fp32": 1, "uint8": 2, "int8": 3}
MOVE_KINDS = ("window", "upsample", "d2s_dcr", "d2s_crd", "s2d_dcr", "s2d_crd", "channels", "part")


def _divisors(**numbers: int) -> Args:
    """The struct Divisor of move.cu for each number, with logarithm and reciprocal; reciprocals of 2^31 or more are
    unsigned.
    """
    args: Args = {}
    for name, by in numbers.items():
        shift = (by - 1).bit_length()
        args |= member(name, ints(by=by, reciprocal=-(-(2 ** (31 + shift)) // by) - 2**32, shift=shift))
    return args


def _kind_args(kind: str, c: int, start: Triple, step: Triple) -> Args:
    """Returns the arguments by which a kind of move selects elements of the input's `c` channels."""
    rows, columns = {"part": (1, 1), "window": (1, 1), "upsample": step[1:]}.get(kind, (step[1], step[1]))
    args = _divisors(rows=rows, columns=columns, inner={"s2d_dcr": c, "channels": rows}.get(kind, rows * rows))
    if kind == "channels":
        step = (c // rows, 1, 1)
    for name, numbers in (("start", start), ("step", step)):
        args |= ints(**{f"{name}_{axis}": v for axis, v in zip("chw", numbers, strict=True)})
    return args


def _in_eights(kind: str, c: int, part_c: int, start: Triple, step: Triple) -> bool:
    """Whether each group of eight output channels comes from one aligned group of eight input channels."""
    if kind in ("d2s_dcr", "s2d_dcr"):
        return (part_c if kind == "d2s_dcr" else c) % 8 == 0
    return kind in ("part", "window", "upsample") and step[0] == 1 and start[0] % 8 == 0


def _together(s: Strides, pixels: int, alone: bool) -> tuple[bool, bool]:
    """Returns (whether a pixel's channels lie together, whether each eight of them also begins at a multiple of 16 bytes)."""
    together = s.log2v == 0 and s.block == 1
    aligned = together and alone and s.n % 8 == 0 and (s.pixel % 8 == 0 or pixels == 1)
    return (True, True) if s.log2v >= 3 else (together, aligned)


class _Part(NamedTuple):
    """A part of the output, made of input `source`: the `whole` output's shape, the shape `part`, and its first channel
    `first_c` (`last`: it ends with the padded channels).
    """

    source: int
    in_shape: Shape4
    part: Shape4
    whole: Shape4
    first_c: int = 0
    last: bool = True


class _Read(NamedTuple):
    """The elements of the input that are read: `kind` is one of MOVE_KINDS; `fill`: the value of elements outside the input."""

    kind: str = "window"
    start: Triple = (0, 0, 0)
    step: Triple = (1, 1, 1)
    fill: float = 0.0


def _move_launch(made: _Part, read: _Read, tactic: Tactic, strided: At | None) -> Launch:
    """Makes one launch of move.cu. `strided`: strides of this input and the output, None where both begin at multiples of 16
    bytes.
    """
    (source, in_shape, part, whole, first_c, last), (kind, start, step, fill) = made, read
    x_fmt, y_fmt = tactic.ins[source], tactic.out
    (n, c, h, w), (_, part_c, out_h, out_w) = in_shape, part
    x, y = strided or (strides(x_fmt, in_shape), strides(y_fmt, whole))
    covered, first_pixel = padded_channels(y_fmt.layout, whole[1]) - first_c if last else part_c, 0
    stays = kind == "window" and (start[1:], step[1:], (h, w)) == ((0, 0), (1, 1), (out_h, out_w))
    if stays and step[0] == 1 and 0 <= start[0] <= c - part_c:
        kind = "part"
    if stays and not strided and (start[0], step[0]) == (0, 1) and in_shape == whole and x == y and x.log2v == 0:
        if (flat := math.prod(whole)) % 8 == 0:  # elements as they lie
            n, h, w, out_h, out_w, c, part_c, covered = 1, 1, 1, 1, 1, flat, flat, flat
            x = y = Strides(flat, 1, flat, 0)
    elif stays and not strided and x.log2v == y.log2v == 0 and x.pixel == y.pixel == 1 and h * w % 8 == 0:
        start, step, first_c, first_pixel = (0, 0, start[0]), (1, 1, step[0]), 0, first_c  # planes: pixels are channels
        c, h, w, out_h, out_w, part_c, covered = h * w, 1, c, 1, part_c, h * w, h * w
        x, y = Strides(x.n, 1, x.block, 0), Strides(y.n, 1, y.block, 0)
    pixels = out_h * out_w
    (x_together, x_vec), (y_together, y_vec) = _together(x, h * w, not strided), _together(y, pixels, not strided)
    in_vec, out_vec = x_vec and _in_eights(kind, c, part_c, start, step), y_vec and first_c % 8 == 0 and covered % 8 == 0
    wide = (in_vec and x_fmt.dtype == "fp32") or (out_vec and y_fmt.dtype == "fp32")
    groups = -(-covered // (4 if wide else 8))
    sector = 4 if y_fmt.dtype in WHOLE else 2  # runs of channels that fill 32 bytes
    fast = groups if x_together and y_together else min(groups, sector) if x_together or y_together else 1
    runs = -(-groups // fast)
    threads = n * runs * fast * pixels
    items = max(i for i in (1, 2) if i == 1 or (in_vec and threads >= i * MANY_THREADS))
    values = {
        "KIND": MOVE_KINDS.index(kind),
        "IN_VEC": int(in_vec),
        "OUT_VEC": int(out_vec),
        "IN_LINEAR": int(x.log2v == 0),
        "OUT_LINEAR": int(y.log2v == 0),
        "IN_TYPE": IN_TYPES[x_fmt.dtype],
        "OUT_F32": int(y_fmt.dtype == "fp32"),
        "ITEMS": items,
    } | byte_values("OUT", y_fmt)
    args = {"nonfinite": NONFINITE, "x": ("in", source), "y": ("out", 0)} | view_args("in", x) | view_args("out", y)
    args |= floats(fill=fill) | _kind_args(kind, c, start, step)
    args |= ints(n=n, c=c, h=h, w=w, out_c=covered, filled=part_c, first_c=first_c, first_pixel=first_pixel)
    args |= _divisors(fast=fast, pixels=pixels, runs=runs, width=out_w)
    return launch("move", values, grid(-(-threads // items)), 256, 0, args)


def _move(p: MoveProblem, tactic: Tactic, strided: At | None) -> tuple[Launch, ...]:
    read = _Read(p.kind, p.start, p.step, p.fill)
    return (_move_launch(_Part(0, p.in_shapes[0], p.out_shape, p.out_shape), read, tactic, strided),)


def _reformat(p: ReformatProblem, tactic: Tactic, strided: At | None) -> tuple[Launch, ...]:
    return (_move_launch(_Part(0, p.in_shapes[0], p.out_shape, p.out_shape), _Read(), tactic, strided),)


def _concat(p: ConcatProblem, tactic: Tactic, strided: At | None) -> tuple[Launch, ...]:
    result, first, shapes, whole = [], 0, p.in_shapes, p.out_shape
    for i, (c, x) in enumerate(zip(p.sizes, shapes, strict=True)):
        last = i == len(shapes) - 1
        lies = (strided[i], strided[-1]) if strided else None
        result.append(_move_launch(_Part(i, x, x, whole, first, last), _Read(), tactic, lies))
        first += c
    return tuple(result)


LAUNCHERS: dict[type[Problem], Callable[..., tuple[Launch, ...]]] = {
    PoolProblem: _pool,
    ChainedProblem: _chained_pool,
    MoveProblem: _move,
    ConcatProblem: _concat,
    ReformatProblem: _reformat,
}


def counts(problem: Problem, tactic: Tactic, device: Device) -> Counts:
    turns, steps = 1, launches(problem, tactic)
    if isinstance(problem, ChainedProblem):
        return _counts_chained(problem, tactic, device, steps[0])
    if isinstance(problem, PoolProblem) and tactic.kernel == "pool_global":
        turns = -(-problem.h * problem.w // POOL_GLOBAL_PIXELS)
    elif isinstance(problem, PoolProblem):
        return _pooled(problem, problem, tactic, device, steps[0])
    else:
        work = sum(s.grid[0] * s.block[0] * _instructions_of_a_thread(dict(s.values)) for s in steps)
        return streamed(device, steps, *traffic(problem.all_shapes, tactic), work)
    return moved(problem, tactic, device, steps, per_window(2.0, problem.r * problem.s, problem), turns)


def _counts_chained(problem: ChainedProblem, tactic: Tactic, device: Device, step: Launch) -> Counts:
    """Counts the pool's window, and the chain's stages and sources."""
    if not isinstance(problem.first, PoolProblem):
        raise ValueError(f"pool: expected a chain behind a pool, got {problem}")
    vec, sources = 1 if linear(tactic.out) else 8, len(problem.chain.tensors) - 1 + len(problem.chain.constants)
    elements = num_elements(tactic.out, problem.out_shape)
    return _pooled(problem, problem.first, tactic, device, step, elements * stages.instructions(problem.chain, vec, sources))


def _pooled(problem: Problem, p: PoolProblem, tactic: Tactic, device: Device, step: Launch, more: float = 0.0) -> Counts:
    """Counts pool.cu: instructions of a thread, of each of its loads and outputs, as compiled for sm_90a, and `more`."""
    values = dict(step.values)
    outputs, single = values.get("OUTPUTS", 1), values["VEC"] == 1
    loads = ((outputs - 1) * p.stride[0] + p.r) * p.s
    each = (28 if values["AVG"] and not single else 14) + (0 if "R" in values else 10) + (10 if "X_BYTES" in values else 0)
    work = step.grid[0] * step.block[0] * (100 + loads * each + outputs * (15 if single else 40)) + more
    large = outputs > 2 or p.r * p.s > 9
    at_once = 8 if single else 4 if "R" not in values else 2 if large else 3  # of 256 threads, as the kernel bounds registers
    limits = in_turns(device, step, at_once * 256 // step.block[0], LATENCY_CLK + 300, work)
    return Counts(*traffic(problem.all_shapes, tactic), limits=limits)


def in_turns(device: Device, step: Launch, at_once: int, clocks: float, instructions: float) -> dict[str, float]:
    """The limits of a launch other than bytes: turns of `clocks` in which an SM runs `at_once` blocks, and instructions."""
    turns = max(1.0, step.grid[0] / (device.num_sms * at_once))
    issue = instructions / (128 * min(device.num_sms, step.grid[0]))
    return {"latency": turns * clocks / device.clock_mhz, "issue": issue / device.clock_mhz}


def moved(
    problem: Problem, tactic: Tactic, device: Device, steps: tuple[Launch, ...], per_element: float, turns: int = 1
) -> Counts:
    """Counts bytes over bandwidth, bounded by the loads in flight of the launched threads, their `turns` of waiting, and
    `per_element` instructions.

    Where only one side is linear, a thread touches 16 of a pixel's 32-byte sectors, which wastes little in L1.
    """
    formats = (*tactic.ins, tactic.out)
    sectors = 1.3 if len({linear(f) for f in formats}) > 1 else 1.0
    *read, written = (num_bytes(f, s) * sectors for f, s in zip(formats, problem.all_shapes, strict=True))
    # A vector side costs one instruction per 16 bytes, a linear or FP32 one per element.
    elements = sum(_instructions(f, s) for f, s in zip(formats, problem.all_shapes, strict=True))
    return streamed(device, steps, sum(read), written, elements * per_element, turns)


def _instructions(fmt: Format, shape: Shape4) -> float:
    size = num_bytes(fmt, shape) / DTYPES[fmt.dtype].itemsize
    return size / 4 if LAYOUTS[fmt.layout].vector >= 8 and fmt.dtype == "fp16" else size


def _instructions_of_a_thread(values: Mapping[str, int]) -> int:
    """Instructions of a thread of move.cu, as compiled for sm_90a: each item's position and accesses; more for kinds that
    change the order more.
    """
    kind = MOVE_KINDS[values["KIND"]]
    places = 0 if kind == "part" else 40 if kind in ("window", "upsample") else 170
    halves = values["IN_TYPE"] < 2 or values["IN_LINEAR"]  # or an image
    converts = values.get("OUT_BYTES", 0) if halves else values["IN_TYPE"] + values.get("OUT_BYTES", 0) != 4
    each = 75 + places + 30 * bool(converts) + 45 * (not values["IN_VEC"]) + 50 * (not values["OUT_VEC"])
    return int(values["ITEMS"] * each)


def per_window(each: float, taps: int, problem: PoolProblem | ResizeProblem) -> float:
    """Instructions per element of input and output where each output element takes `each` for each of its `taps`."""
    out = math.prod(problem.out)
    return each * taps * out / (problem.h * problem.w + out)
