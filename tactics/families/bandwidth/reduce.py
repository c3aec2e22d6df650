"""The reduce kernel, over rows of a tensor: reductions along any axes, softmax, and instance, group and layer normalization;
behind these, a chain of elementwise stages.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from math import prod

import numpy as np

from cuda_kernels.device import Device
from tactics import stages
from tactics.families.bandwidth.movement import in_turns
from tactics.format import HALF_FORMATS, Format, Strides, num_bytes, num_elements, padded_channels, strides, too_large
from tactics.problems.problem import ChainedProblem, PointwiseProblem
from tactics.problems.protocol import spanned
from tactics.problems.reductions import NORMALIZATIONS, REDUCTIONS, NormalizeProblem, ReduceProblem
from tactics.reason import Candidates, unsupported
from tactics.roofline import LATENCY_CLK, Counts, resident, streamed
from tactics.step import (
    NONFINITE,
    NULL,
    Launch,
    constant_bytes,
    constant_section,
    constant_strides,
    f32_values,
    floats,
    ints,
    launch,
    linear,
    member,
    spread_args,
)
from tactics.tactic import Tactic, tactic_of

Rows = ReduceProblem | NormalizeProblem
Problem = Rows | ChainedProblem
THREADS = 256
NEIGHBOURS = 8  # vectors of channels that a block reads side by side, where rows keep their channels: 128 bytes of a pixel
FEW_ROWS = 1024  # below this many vectors, two side by side: a sector; more blocks are worth more than wider ones
L1_BYTES = 64 * 1024  # a row larger than this comes from L2 in every pass
# Long rows, each by several blocks: vectors of a part, two for each thread of a block; the most parts of a row; the least, as
# joining fewer costs more than it saves.
PART, MOST_PARTS, LEAST_PARTS = 2 * THREADS, 64, 4
LONG_GROUP = 2048  # elements of a group of channels from which joining sums of channels is quicker than reading one by one
AHEAD, FROM_L1 = 4, 0.2  # elements that a thread has in flight (reduce.cu); its latency of L1 as a part of its latency of L2
JOINING = 5  # L2 latencies of a block because of parts: ticket, arrival, waiting for it, reading parts, reading the row again
# Rows that a few lanes keep in registers.
HELD = (3, 2, 4, 1)  # vectors of a lane, at most, in the order of preference
FEW_THREADS, FEW_BLOCKS = 64 * 1024, 2048  # up to this many threads load scales first; fewer blocks are smaller ones
HELD_INSTRUCTIONS, HELD_CLK = (75, 150), 500  # instructions (of a vector, of a thread); a thread's clocks beside its first wait
# Vectors of a lane -> registers as compiled for sm_90a, without and with scales loaded first.
HELD_REGISTERS = {1: (40, 48), 2: (48, 76), 3: (64, 96), 4: (80, 128)}
CASES = {
    "reduce": (
        ReduceProblem(2, 20, 5, 7, "mean", "hw"),
        NormalizeProblem(2, 21, 5, 4, "softmax", "c"),
        NormalizeProblem(2, 20, 31, 29, "standard", "chw", epsilon=1e-5, affine="c"),
    )
}


def candidates(problem: Problem, device: Device) -> Candidates:
    """Yields (tactic, reason against it or None) for any pair of formats; an output with one channel is hwc8 or chw.

    Nothing for a chain behind a pool.
    """
    rows, chain = _split(problem)
    if rows is None:
        return
    outs = (Format("fp16", "hwc8"), Format("fp16", "chw")) if single_channel(rows) else HALF_FORMATS
    for x, y in product(HALF_FORMATS, outs):
        for others in product(*stages.formats(chain, y, result=True)) if chain else ((),):
            tactic = tactic_of("reduce", None, (x,) * (1 + rows.added) + others, y)
            why = _reason(rows, tactic) or (chain and stages.reason_against(chain)) or ""
            yield tactic, unsupported(why or too_large(problem.all_shapes, (*tactic.ins, y)))


def _split(p: Problem) -> tuple[Rows | None, PointwiseProblem | None]:
    """Returns (the rows, the chain behind them or None); (None, None) for a chain behind a pool."""
    if not isinstance(p, ChainedProblem):
        return p, None
    return (p.first, p.chain) if isinstance(p.first, NormalizeProblem) else (None, None)


def _rows(p: Problem) -> tuple[Rows, PointwiseProblem | None]:
    """Returns (the rows, the chain behind them or None) of a problem of this family, as `_split` does. Raises ValueError for a
    chain behind a pool.
    """
    rows, chain = _split(p)
    if rows is None:
        raise ValueError(f"reduce: expected a normalization, got {p}")
    return rows, chain


def single_channel(p: Rows) -> bool:
    return isinstance(p, ReduceProblem) and "c" in p.axes


def _reason(p: Rows, tactic: Tactic) -> str:
    if single_channel(p) and linear(tactic.ins[0]) and not linear(tactic.out):
        return "a kernel with a linear input cannot write the padded channels of this output"
    if p.groups > 1 and not _by_channel(p, tactic) and p.c != padded_channels(tactic.out.layout, p.c):
        return "groups of channels, and padded channels that belong to no group"
    return ""


def _vector(p: Rows, tactic: Tactic) -> int:
    """Channels per access: 8 where both sides are vectors and none spans two groups, else 1."""
    across = p.groups > 1 and p.c // p.groups % 8 and not _by_channel(p, tactic)
    return 1 if linear(tactic.ins[0]) or linear(tactic.out) or across else 8


def _by_channel(p: Rows, tactic: Tactic) -> bool:
    """Whether groups of channels are reduced in two steps, first each channel, then the group: if a group ends within a vector,
    or padding follows it.
    """
    if p.groups == 1 or p.kind != "standard" or linear(tactic.ins[0]) or linear(tactic.out) or "n" in p.axes:
        return False
    if any(d > 1 and a not in p.axes for a, d in (("h", p.h), ("w", p.w))):
        return False
    padded = p.c != padded_channels(tactic.out.layout, p.c)
    return padded or (p.c // p.groups % 8 > 0 and _count(p) >= LONG_GROUP)


def _sizes(p: Rows, chain: PointwiseProblem | None, tactic: Tactic) -> tuple[list[int], list[int], bool]:
    """Returns (sizes along n, c, h, w of the set of rows, sizes inside a row, whether h and w are indexed separately)."""
    vec, groups = _vector(p, tactic), p.groups
    n, _, h, w = p.in_shapes[0]
    c = padded_channels(tactic.out.layout if p.out_shape[1] == p.c else tactic.ins[0].layout, p.c) // vec
    affine = p.affine
    apart = ("h" in p.axes) != ("w" in p.axes) or ("h" in affine) != ("w" in affine)
    apart = apart or (chain is not None and stages.needs_rows(chain))
    sizes = (n, c, h, w) if apart else (n, c, 1, h * w)
    inside = [d if a in p.axes else 1 for a, d in zip("nchw", sizes, strict=True)]
    if not apart:
        inside[3] = h * w if "h" in p.axes else 1
    kept = [d // i for d, i in zip(sizes, inside, strict=True)]
    if _by_channel(p, tactic):
        kept[1], inside[1] = c, 1
    elif groups > 1:
        kept[1], inside[1] = groups, c // groups
    return kept, inside, apart


@dataclass(frozen=True, slots=True)
class _Blocks:
    """The distribution of rows: `lanes` threads of one row, `step` apart; `count` blocks.

    `parts`: blocks that sum each row, and as many others that normalize it; 0: one block does both.
    """

    lanes: int
    step: int
    parts: int
    count: int


def _blocks(p: Rows, rows: int, elements: int, inner: bool, joined: bool) -> _Blocks:
    """Distributes rows so that neighbouring threads read neighbouring memory (`inner`: of one row). `joined`: always in
    parts.
    """
    lanes, step = min(THREADS, 1 << (elements - 1).bit_length()), 1
    if not inner:
        lanes = min(lanes, THREADS // (NEIGHBOURS if rows >= FEW_ROWS else 2))
        step = THREADS // lanes
    alone = -(-rows // (THREADS // lanes))
    parts = min(elements * (THREADS // lanes) // PART, MOST_PARTS // alone, lanes)
    if joined:
        parts = max(parts, 1)
    elif p.kind != "standard" or parts < LEAST_PARTS:
        return _Blocks(lanes, step, 0, alone)
    return _Blocks(lanes, step, parts, 2 * alone * parts)


@dataclass(frozen=True, slots=True)
class _Held:
    """Rows that stay in registers: each of `lanes` threads has `vectors` of a row, in `count` blocks of `threads`.

    `early`: scale and bias are loaded first; `whole`: every vector of every lane belongs to the row.
    """

    lanes: int
    vectors: int
    threads: int
    count: int
    early: bool
    whole: bool


def _held(p: Rows, tactic: Tactic, strided: tuple[Strides, ...], kept: list[int], inside: list[int]) -> _Held | None:
    """Returns how rows stay in registers; None if they are not whole vectors of channels in consecutive memory."""
    rows, elements = prod(kept), inside[1]
    own = (*strided[: 1 + p.added], strided[-1])
    fits = p.c % 8 == 0 and prod(inside) == elements and all(s.block == 1 << s.log2v for s in own)
    if not fits or _vector(p, tactic) == 1 or "c" not in (p.affine or "c") or "c" not in p.axes or _by_channel(p, tactic):
        return None
    ways = [s for s in ((1 << i, -(-elements // (1 << i))) for i in range(9)) if s[1] in HELD]
    if not ways:
        return None
    lanes, vectors = min(ways, key=lambda s: (s[0] > 32, s[0] * s[1], HELD.index(s[1])))
    threads = THREADS
    while threads > max(32, lanes) and rows * lanes < threads * FEW_BLOCKS:
        threads //= 2
    early, whole = bool(p.affine) and rows * lanes <= FEW_THREADS, lanes * vectors * 8 == p.c // p.groups
    return _Held(lanes, vectors, threads, -(-rows * lanes // threads), early, whole)


def _flat(p: Rows, chain: PointwiseProblem | None, tactic: Tactic) -> tuple[Rows, PointwiseProblem | None, Tactic]:
    """Returns the same rows read as vectors of 8, if they are the last axes of linear FP16 tensors: each row then is an image
    whose channels are the row's elements. Other problems are returned unchanged.
    """
    if not isinstance(p, NormalizeProblem) or p.groups > 1 or not "nchw".endswith(p.axes):
        return p, chain, tactic
    length = prod(p.out_shape[-len(p.axes) :])
    constants = (p.affine, *(chain.constants if chain else ()))
    same = all(a in ("", "w") and a in ("", p.axes) for a in constants)  # of more axes they lie in another order
    same = same and (chain is None or all(a == "nchw" for a in chain.tensors))
    if length % 8 or not same or any(str(f) != "fp16:chw" for f in (*tactic.ins, tactic.out)):
        return p, chain, tactic
    rows, hwc8 = prod(p.out_shape) // length, Format("fp16", "hwc8")
    if chain is not None:
        chain = replace(chain, n=rows, c=length, h=1, w=1, constants=tuple("c" if a else "" for a in chain.constants))
    p = replace(p, n=rows, c=length, h=1, w=1, axes="c", affine="c" if p.affine else "")
    return p, chain, replace(tactic, ins=(hwc8,) * len(tactic.ins), out=hwc8)


def _blocks_of(p: Rows, chain: PointwiseProblem | None, tactic: Tactic) -> _Blocks:
    """Distributes rows that do not stay in registers."""
    kept, inside, _ = _sizes(p, chain, tactic)
    inner = inside[1 if _vector(p, tactic) == 8 or not linear(tactic.ins[0]) else 3] > 1
    return _blocks(p, prod(kept), prod(inside), inner, _by_channel(p, tactic))


def launches(problem: Problem, tactic: Tactic, strided: tuple[Strides, ...] | None = None) -> tuple[Launch, ...]:
    p, chain = _rows(problem)
    if strided is None:
        p, chain, tactic = _flat(p, chain, tactic)
        shapes = (*p.in_shapes, *(chain.in_shapes[1:] if chain else ()), p.out_shape)
        strided = tuple(strides(f, s) for f, s in zip((*tactic.ins, tactic.out), shapes, strict=True))
    vec, (kept, inside, apart) = _vector(p, tactic), _sizes(p, chain, tactic)
    c_fast = vec == 8 or not linear(tactic.ins[0])
    rows, elements = prod(kept), prod(inside)
    joined = _by_channel(p, tactic)
    mix = "c" in p.axes and not joined
    blocks = _blocks_of(p, chain, tactic)
    kind = [*REDUCTIONS, *NORMALIZATIONS].index(p.kind)
    values = {"KIND": kind, "VEC": vec, "MIX": int(mix), "C_FAST": int(c_fast), **f32_values(tactic.ins[0], tactic.out)}
    affine = p.affine
    constant = constant_strides(spanned(p.in_shapes[0], affine)) if affine else Strides(0, 0, 0, 0)
    _, c, h, w = p.in_shapes[0]
    args = {"nonfinite": NONFINITE, "x.at": ("in", 0), "y": ("out", 0)} | spread_args("x.spread", strided[0], "nchw", w, apart)
    args |= {name: ("weights", name) if affine else NULL for name in ("scale", "bias")}
    args |= spread_args("out", strided[-1], "nchw", p.out_shape[3], apart)
    args |= spread_args("affine", constant, affine, spanned(p.in_shapes[0], affine)[3] if affine else 1, apart)
    for name, (n, channel, row, column) in (("kept", kept), ("element", inside)):
        args |= member(name, ints(image=n, channel=channel, row=row, column=column))
    args |= ints(rows=rows, elements=elements, lanes=blocks.lanes, lane_step=blocks.step, c=c, per_vector="c" in affine)
    args |= floats(count=_count(p), epsilon=p.epsilon)
    if p.added:
        values |= {"ADDED": 1}
        args |= {"added.at": ("in", 1)} | spread_args("added.spread", strided[1], "nchw", w, apart)
    if chain is not None:
        values |= stages.values(chain, tactic.ins[p.added :], result=True)
        args |= stages.args(chain, strided[p.added :], apart, first=1 + p.added)
    held = None if blocks.parts else _held(p, tactic, strided, kept, inside)
    if held is not None:
        values |= {"HELD": held.vectors, "LANES": held.lanes, "SCALED": bool(affine), "EARLY": held.early, "WHOLE": held.whole}
        return (launch("reduce", {k: int(v) for k, v in values.items()}, (held.count, 1, 1), held.threads, 0, args),)
    if not blocks.parts:
        return (launch("reduce", values, (blocks.count, 1, 1), THREADS, 0, args),)
    values |= {"SPLIT": 2 if joined else 1}
    args |= {"partial": ("workspace", 0), "counters": ("counters", 0)} | ints(parts=blocks.parts, group=c // p.groups)
    workspace, counters = rows * blocks.parts * (1 if mix else vec) * 16, 12
    return (launch("reduce", values, (blocks.count, 1, 1), THREADS, 0, args, workspace, counters),)


def _count(p: Rows) -> int:
    """Returns the number of elements in a row."""
    return prod(d for a, d in zip("nchw", p.in_shapes[0], strict=True) if a in p.axes) // p.groups


def pack(problem: Problem, tactic: Tactic, weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Packs scale and bias as FP32 in the order n, h, w, c, and a chain's constants."""
    p, chain = _rows(problem)
    own = {name: constant_section(weights[name], spanned(p.in_shapes[0], p.affine)) for name in _affine(p)}
    return own | (stages.pack(chain, weights) if chain else {})


def section_bytes(problem: Problem, tactic: Tactic) -> dict[str, int]:
    """Bytes of the sections that `pack` makes."""
    p, chain = _rows(problem)
    own = {name: constant_bytes(spanned(p.in_shapes[0], p.affine)) for name in _affine(p)}
    return own | (stages.section_bytes(chain) if chain else {})


def _affine(p: Rows) -> tuple[str, ...]:
    return ("scale", "bias") if p.affine else ()


def counts(problem: Problem, tactic: Tactic, device: Device) -> Counts:
    """Counts a pass over the input for each statistic and one for the result.

    Passes after the first read L1 where a row fits; of rows in parts, only the last pass reads L2.
    """
    steps, written = launches(problem, tactic), num_bytes(tactic.out, problem.out_shape)
    read = [num_bytes(f, s) for f, s in zip(tactic.ins, problem.in_shapes, strict=True)]
    p, chain, tactic = _flat(*_rows(problem), tactic)
    own = sum(read[: 1 + p.added])
    vec, elements = _vector(p, tactic), num_elements(tactic.ins[0], p.in_shapes[0])
    passes = 1 + (p.kind in ("log_sum_exp", "inv_std", *NORMALIZATIONS)) + (p.kind in NORMALIZATIONS)
    work, again = elements * passes * (60 / vec + 4), 1  # taking positions apart, addresses, conversions
    work += elements * passes * (15 / vec + 2) * p.added
    more = 0.0
    if chain is not None:
        more = elements * stages.instructions(chain, vec, len(chain.tensors) - 1 + len(chain.constants))
    if "HELD" in dict(steps[0].values):
        return Counts(sum(read), written, limits=_held_limits(steps[0], device, more))
    work += more
    blocks = _blocks_of(p, chain, tactic)
    alone = -(-prod(_sizes(p, chain, tactic)[1]) // (blocks.lanes * max(1, blocks.parts)))  # elements of a thread
    turns = -(-alone // AHEAD) * (passes - (1 - FROM_L1) * (passes > 1))
    if steps[0].workspace:
        again, turns = 2, turns + JOINING
        half = steps[0].grid[0] // 2  # of the blocks, half at work at a time
        if _by_channel(p, tactic):  # each thread finds the groups of its channels, twice
            work += half * THREADS * 2 * vec * -(-p.c // p.groups * blocks.parts // blocks.lanes) * 15
        work *= min(device.num_sms, 2 * half) / min(device.num_sms, half)
    elif 2 * vec * prod(_sizes(p, chain, tactic)[1]) * (1 + p.added) > L1_BYTES:
        again = passes
    return streamed(device, steps, own * again + sum(read) - own, written, work, turns)


def _held_limits(step: Launch, device: Device, more: float) -> dict[str, float]:
    """The limits of rows in registers; `more`: instructions of a chain."""
    values, (threads, _, _) = dict(step.values), step.block
    held, (of_vector, of_thread) = values["HELD"], HELD_INSTRUCTIONS
    at_once = resident(device, threads, HELD_REGISTERS[held][values["EARLY"]], 0)
    work = step.grid[0] * threads * (of_thread + held * (of_vector + 25 * values.get("ADDED", 0))) + more
    return in_turns(device, step, at_once, LATENCY_CLK + HELD_CLK, work)
