"""Estimates of other libraries' kernels: times of matrix products of cuBLAS, cuSPARSELt, CUTLASS and TensorRT.

Published times judge this model (benchmarks/bench_predictions); our model, in the families, shares its constants of the
hardware and is never fitted to it. A library tries TILES, with K split where tiles are few, and takes the fastest. Per tile an
SM spends

    K / 64 stages   the larger of the products at the library's rate and of the bytes from L2, rounded where they meet
    its end         the output's bytes through L2, and `block_clk` to begin and end

in whole rounds of tiles, while DRAM delivers the bytes that L2 does not hold. All values are arrays over problems.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from cuda_kernels.device import Device
from cuda_kernels.rates import Library, rates
from tactics.problems.problem import ConvProblem, Problem
from tactics.roofline import axis

Floats = NDArray[np.float64]
K_STEP = 64
SPLITS = (1, 2, 3, 4, 6, 8, 16)
# fmt: off
SHAPES = (
    (256, 128), (128, 256), (128, 128), (256, 64), (64, 256), (128, 64), (64, 128), (64, 64), (32, 64), (64, 32), (32, 128),
    (128, 32), (16, 64), (16, 128), (64, 16),
)
# fmt: on
TILES = np.array([(*shape, split) for shape in SHAPES for split in SPLITS], np.float64).T
PASS = 128  # rows and columns of cuSPARSELt's tiles, inferred from how often it reads weights again
SPARSE_BYTES = 9 / 16  # of the dense weights: half of the values, two bits of metadata for each
# The rate with one warp's share of a tile against a full one, when few warps work: a line through 133 times of CUTLASS
# convolutions with known tiles on an RTX 3070 (apache/tvm#9746).
FEW_WARPS = 0.7
ROUNDING = 4.0  # order of the norm in place of max(a, b): two equal limits cost 2 ** (1 / 4) of one
TAPS_DRAWN = 0.5  # of a tile's activations when taps overlap: the other half is assumed to hit L1


@dataclass(frozen=True, slots=True)
class Work:
    """Products of m x k activations with k x n weights, as arrays with one element per problem.

    `x`, `w`, `y`: bytes of activations (residual included), dense weights and output; `copies`: how many copies of the weights
    are cycled through, infinite where other layers evict them; `drawn`: the share of a tile's activations that comes from L2,
    below 1 only where taps overlap.
    """

    m: Floats
    n: Floats
    k: Floats
    x: Floats
    w: Floats
    y: Floats
    copies: Floats
    drawn: Floats


@dataclass(frozen=True, slots=True)
class PeerTime:
    """A library's times for a layer: microseconds of dense kernels, the `bound` of the slowest, and microseconds of 2:4 kernels
    (None where the weights lack the pattern).
    """

    us: float
    bound: str
    sparse_us: float | None


def convolutions(problem: Problem) -> tuple[ConvProblem, ...]:
    """Returns the convolutions and matrix products that a library would run for a problem; () if there is no estimate: for
    grouped and depthwise convolutions, for those of whole numbers, which a library runs in INT8, and for all other problems.
    """
    able = (p for p in problem.parts if isinstance(p, ConvProblem) and p.groups == 1 and not p.epilogue.multiplied)
    found = tuple(able)
    return found if len(found) == len(problem.parts) else ()


@lru_cache(maxsize=65536)
def time_of(problem: Problem, device: Device) -> PeerTime | None:
    """A layer's time with a library, its weights evicted from L2 by other layers; None without an estimate.

    Additions and activations are in the epilogues, and a pool, a normalization or a gate in our kernel costs the library
    nothing: the estimate favours the library.
    """
    if not (found := convolutions(problem)):
        return None
    work, library = work_of(found), rates(device).library
    us, bounds = estimate(work, device, library)
    sparse = estimate(work, device, library, sparse=True)[0] if all(p.sparse24 for p in found) else None
    return PeerTime(float(us.sum()), str(bounds[us.argmax()]), None if sparse is None else float(sparse.sum()))


def work_of(problems: Sequence[ConvProblem], out_bytes: int = 2) -> Work:
    """Counts the work of convolutions, with the input elements that their taps touch."""
    rows = [_counts(p, out_bytes) for p in problems]
    m, n, k, x, w, y, drawn = np.array(rows, np.float64).T
    return Work(m, n, k, x, w, y, np.full(len(rows), np.inf), drawn)


def _counts(p: ConvProblem, out_bytes: int) -> tuple[float, ...]:
    rows = axis(p.h, np.arange(p.p) * p.stride[0] - p.pad[0], p.r, p.dilation[0]).read
    columns = axis(p.w, np.arange(p.q) * p.stride[1] - p.pad[1], p.s, p.dilation[1]).read
    m, k = p.n * p.p * p.q, p.c * p.r * p.s
    x, y = 2 * p.n * p.c * rows * columns, out_bytes * m * p.k
    overlap = p.r > p.stride[0] or p.s > p.stride[1]
    return m, p.k, k, x + (2 * m * p.k if p.epilogue.residual else 0), 2 * k * p.k, y, TAPS_DRAWN if overlap else 1.0


def estimate(
    work: Work, device: Device, lib: Library, sparse: bool = False, accumulate: float = 1.0
) -> tuple[Floats, NDArray[np.str_]]:
    """Returns (microseconds inside a CUDA graph, bound: launch, math, l2 or dram) of each problem.

    `accumulate`: the rate of the products relative to FP32 accumulation: 2 on GeForce cards that accumulate in FP16.
    """
    m, n, k = work.m[:, None], work.n[:, None], work.k[:, None]
    bm, bn, split = TILES
    w_share = SPARSE_BYTES if sparse else 1.0
    tiles = np.ceil(m / bm) * np.ceil(n / bn) * split
    rounds = np.maximum(1, tiles / device.num_sms) if lib.persistent else np.ceil(tiles / device.num_sms)
    at_work = FEW_WARPS + (1 - FEW_WARPS) * np.minimum(1, bm * bn / 128**2 * np.minimum(rounds, 2))
    rate = device.mma_fma_per_clk * accumulate * lib.math_share * (lib.sparse_rate if sparse else 1.0)
    drawn = np.minimum(lib.sm_l2, lib.l2 / np.minimum(device.num_sms, tiles))  # bytes per clock of an SM at work
    rows, columns, steps = np.minimum(m, bm), np.minimum(n, bn), np.ceil(k / K_STEP / split)
    math = steps * bm * bn * K_STEP / (rate * at_work)
    loads = steps * (rows * work.drawn[:, None] + columns * w_share) * K_STEP * 2 / drawn
    stores = rows * columns * 2 / drawn
    reduced = np.where(split > 1, 300 + split * bm * bn * 4 / 64, 0)  # partial sums out and back
    sm = (rounds * (_norm(math, loads) + stores + lib.block_clk) + lib.fill_clk + reduced) / device.clock_mhz
    moved = from_dram(work, device, w_share)[:, None]
    if sparse:  # tiles run along the weights first: weights that L2 cannot keep are read again for every row of tiles
        passes = np.ceil(np.ceil(m / PASS) / np.maximum(1, device.num_sms // np.ceil(n / PASS)))
        moved = moved + (passes - 1) * (work.w * w_share * _missed(work.w * w_share, device))[:, None]
    dram = moved / (device.dram_gbps * 1e3 * lib.dram_share)
    total = _norm(sm, dram)
    best = np.arange(len(work.m)), total.argmin(1)
    parts = np.stack(
        [
            device.launch_us + ((rounds * lib.block_clk + lib.fill_clk) / device.clock_mhz)[best],
            (rounds * math / device.clock_mhz)[best],
            (rounds * (loads + stores) / device.clock_mhz)[best],
            np.broadcast_to(dram, total.shape)[best],
        ]
    )
    extra = device.launch_us + (lib.sparse_us if sparse else 0.0)
    return extra + total[best], np.array(["launch", "math", "l2", "dram"])[parts.argmax(0)]


def from_dram(work: Work, device: Device, w_share: float = 1.0) -> Floats:
    """Returns the bytes that L2 does not hold: of weights with all their copies, of activations with one copy."""
    w = work.w * w_share
    with np.errstate(invalid="ignore"):
        cycled = np.where(w > 0, work.copies * w, 0.0)
    missed, spilled = _missed(cycled + work.x + work.y, device), _missed(w + work.x + work.y, device)
    return w * missed + (work.x + work.y) * spilled


def least(work: Work, device: Device, most_clock: float, accumulate: float = 1.0) -> Floats:
    """A lower bound of the times in microseconds, from peak rates alone.

    Counted are dense products at the tensor cores' full rate, each byte once through L2, and from DRAM the bytes that do not
    fit L2 even with one copy of the weights, before and after. `most_clock`: the device's highest clock relative to the data
    sheet's.
    """
    clock = device.clock_mhz * most_clock
    math = work.m * work.n * work.k / (device.num_sms * device.mma_fma_per_clk * accumulate * clock)
    l2 = (work.x + work.w + work.y) / (device.l2_bytes_per_clk * clock)
    cold = np.maximum(0, work.x + work.w - device.l2_bytes) + np.maximum(0, work.y - device.l2_bytes)
    return np.maximum(np.maximum(math, l2), cold / (device.dram_gbps * 1e3))


def _norm(a: Floats, b: Floats) -> Floats:
    high, low = np.maximum(a, b), np.minimum(a, b)
    return high * (1 + (low / np.maximum(high, 1e-9)) ** ROUNDING) ** (1 / ROUNDING)


def _missed(footprint: Floats, device: Device) -> Floats:
    low, high = rates(device).kept
    return np.clip((footprint / device.l2_bytes - low) / (high - low), 0, 1)
