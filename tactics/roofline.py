"""The time model: from a family's counts of clocks and bytes to microseconds, and lower bounds for every kernel."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from cuda_kernels.device import Device
from cuda_kernels.rates import rates
from tactics.format import DTYPES, Shape4, num_bytes
from tactics.problems.gather import GatherProblem
from tactics.problems.problem import (
    ConvProblem,
    ConvTransposeProblem,
    MoveProblem,
)
from tactics.problems.protocol import Problem
from tactics.step import Launch
from tactics.tactic import Tactic

RESOLUTION_US = 0.01  # predictions are rounded to this: a smaller difference is a tie, and ties stay dense
# Latencies of a load from DRAM, and of one that hits L2: 479 and 263 clocks on an idle H100, much the same on A100 and Ada
# (arXiv 2402.13499, table of memory latencies); queues add to it.
LATENCY_CLK, L2_LATENCY_CLK = 600, 300
BYTES_IN_FLIGHT_PER_SM = 32 * 1024  # outstanding loads of one SM; bounds a launch that does not fill the GPU


ROUNDING = 4.0  # limits that meet add up: the norm of this order of all, as libraries' kernels show
FEW_WARPS, FULL_WARPS = 0.7, 8  # the tensor cores' rate with one warp of an SM at work, and the warps for the full rate


@dataclass(frozen=True, slots=True)
class Counts:
    """A family's counts of a tactic's launches, of which `predicted` makes times.

    Bytes of activations `read` and `written`, and of `weights`; `limits`: microseconds by name of the other limits (under the
    name of a memory resource, its time replaces the computed one); `sparse`: a sparse kernel, whose launch has a fixed cost;
    `untimed`: a factor on all limits, for kernels that nobody has timed; `kernel`: the launched kernel, where it is not the
    tactic's.
    """

    read: float
    written: float
    weights: float = 0.0
    limits: Mapping[str, float] = field(default_factory=dict)
    launches: int = 1
    sparse: bool = False
    untimed: float = 1.0
    kernel: str = ""


def traffic(shapes: Sequence[Shape4], tactic: Tactic) -> tuple[int, int]:
    """Returns the bytes of all inputs, and of the output, each moved once; `shapes`: of the inputs, then of the output."""
    *read, written = map(num_bytes, (*tactic.ins, tactic.out), shapes)
    return sum(read), written


def convolved(p: Any, tactic: Tactic, weights: float, limits: Mapping[str, float], gate: int = 0, **how: Any) -> Counts:
    """Makes the Counts of a convolution, whose residual has the output's format. `gate`: bytes of the gate, if any; `how`:
    Counts' other fields.
    """
    x, y = num_bytes(tactic.ins[0], p.in_shapes[0]), num_bytes(tactic.out, p.out_shape)
    return Counts(x + gate + (y if p.epilogue.residual else 0), y, weights, limits, sparse=tactic.sparse, **how)


def one_launch_us(device: Device) -> float:
    """Microseconds of one of our launches that does nothing, behind another one."""
    return device.launch_us - rates(device).early_us


def predicted(device: Device, counts: Counts) -> dict[str, float | str]:
    """Returns the parts of a prediction (microseconds by resource) with `bound`, the name of its limit, and `total_us`."""
    parts = {**moved_us(device, counts.read, counts.written, counts.weights), **counts.limits}
    if counts.untimed != 1.0:
        parts = {name: counts.untimed * us for name, us in parts.items()}
    launch = one_launch_us(device) * counts.launches + (rates(device).sparse_us if counts.sparse else 0.0)
    bound = max(parts, key=parts.__getitem__)
    total = launch + together(parts.values())
    return {
        "launch_us": launch,
        **{f"{name}_us": us for name, us in parts.items()},
        "bound": "launch" if parts[bound] < launch else bound,
        "total_us": round(total / RESOLUTION_US) * RESOLUTION_US,
    }


PARTITIONS, GRANULE = 4, 256  # parts of an SM's register file; registers, of which a warp gets a multiple


def resident(device: Device, threads: int, registers: int, smem: int) -> int:
    """Returns how many blocks an SM holds at a time, from their threads, a thread's registers and the bytes of shared memory.

    A warp's registers lie in one of the SM's four partitions, in pieces of 256 (CUDA's occupancy calculator, sm_80 and newer).

    >>> resident(device, threads=144, registers=183, smem=0)  # two warps of 23 x 256 in each partition are one block of five
    1
    """
    warps, of_warp = math.ceil(threads / 32), math.ceil(32 * registers / GRANULE) * GRANULE
    by_registers = PARTITIONS * (device.regs_per_sm // PARTITIONS // of_warp) // warps
    by_smem = device.smem_per_sm // (smem + 1024)
    return max(1, min(by_smem, device.max_threads_per_sm // (32 * warps), by_registers, device.max_blocks_per_sm))


# Blocks of a cluster, each alone on its SM -> clusters that run at a time on 132 SMs (an H200's cuOccupancyMaxActiveClusters,
# in benchmarks/results/h200): SMs in different parts of the chip form no cluster.
AT_ONCE = {1: 132, 2: 66, 3: 39, 4: 30, 5: 22, 6: 17, 7: 15, 8: 15}


def clusters_at_once(device: Device, blocks: int) -> int:
    return max(1, AT_ONCE[blocks] * device.num_sms // 132)


class Spent(NamedTuple):
    """Clocks that an SM spends on each `block`, on each `turn` of blocks that it holds at a time, and `once`."""

    block: float
    turn: float
    once: float = 0.0


class Extra(NamedTuple):
    """The work that a Share (tactics.step) adds to a convolution's block: instructions of each thread, clocks that nothing
    hides, and bytes of shared memory.
    """

    instructions: float = 0.0
    clocks: float = 0.0
    smem: int = 0


def rounds_us(device: Device, clocks: Mapping[str, float], blocks: int, at_once: int, spent: Spent) -> dict[str, float]:
    """Returns the microseconds of the SM with the most blocks, which holds `at_once` of them at a time, under the name of the
    largest of `clocks`.
    """
    per_sm = math.ceil(blocks / device.num_sms)
    sm = per_sm * spent.block + math.ceil(per_sm / at_once) * spent.turn + spent.once
    return {max(clocks, key=clocks.__getitem__): sm * (1 / device.clock_mhz)}


def together(limits: Iterable[float]) -> float:
    """Returns the time of a kernel with several limits at once, a little above the largest of them."""
    return sum([x**ROUNDING for x in limits]) ** (1 / ROUNDING)


def moved_us(
    device: Device, read: float, written: float, weights: float = 0.0, kept: tuple[float, float] | None = None
) -> dict[str, float]:
    """Microseconds in DRAM and L2: all weights come from DRAM, of activations a share that grows with their part of L2.

    The share grows from 0 to 1 between the limits `kept` (None: the device's rates). Kernels with weights move at the rate of a
    library's products, which is below the rate of a copy.
    """
    r = rates(device)
    low, high = kept or r.kept
    missed = min(1.0, max(0.0, ((read + written) / device.l2_bytes - low) / (high - low)))
    moved = weights + (read + written) * missed
    share = r.library.dram_share if weights else r.dram_share
    return {"dram": moved / (device.dram_gbps * 1e3 * share), "l2": (read + written + weights) / (r.l2 * device.clock_mhz)}


def sm_l2(device: Device, blocks: int) -> float:
    """Bytes per clock that one SM reads from L2 while `blocks` are at work: idle SMs leave their share to the others."""
    r = rates(device)
    return min(r.sm_l2, r.l2 / min(device.num_sms, blocks))


def tensor_peak(device: Device, sparse: bool = False) -> float:
    """Peak products per clock and SM of mma.sync, or of mma.sp counted in dense products, with no warp waiting.

    benchmarks/simulator simulates shares of this peak. `sync_share` is the part of the peak that clocks and power left on the
    card. It was measured with libraries' best kernels, whose loops reach 98 to 100 % by the same simulation: 2 % are charged
    twice.
    """
    r = rates(device)
    return device.mma_fma_per_clk * device.mma_sync_share * r.sync_share * (r.sparse_rate if sparse else 1.0)


def best_fma(device: Device) -> float:
    """Dense products per clock and SM of the device's best instruction for our kernels: wgmma on sm_90a, else mma.sync."""
    return device.mma_fma_per_clk * (1.0 if device.sm == "sm_90a" else device.mma_sync_share)


def tensor_rate(device: Device, warps: float) -> float:
    """Dense products per clock and SM of kernels whose loops are not simulated, with `warps` at work on an SM.

    With few warps, four tensor cores wait on latencies (a line through CUTLASS times on an RTX 3070).
    """
    return tensor_peak(device) * min(1.0, FEW_WARPS + (1 - FEW_WARPS) * warps / FULL_WARPS)


def throttled(device: Device, mma: float) -> float:
    """Clocks of the data sheet that a power limit adds to a kernel whose tensor cores work for `mma` clocks.

    Where they always work, `rates.held` of the clock is left; the less they work, the less power is drawn, and the higher the
    clock.
    """
    return mma * (1 / rates(device).held - 1)


@dataclass(frozen=True, slots=True)
class Axis:
    """Counts of a window along one axis: `read`, the input indices that some tap touches; `pairs`, the (output, tap) pairs on
    the input, not on padding; `taps`, the taps that touch the input anywhere.
    """

    read: int
    pairs: int
    taps: int


def axis(size: int, starts: np.ndarray, taps: int, dilation: int) -> Axis:
    """Counts a window's accesses along an axis of `size` elements.

    `starts`: the input index of each output's first tap, negative on padding; tap t lies `dilation` * t further.
    """
    touched, pairs, used = np.zeros(size, bool), 0, 0
    for t in range(taps):
        at = starts + t * dilation
        at = at[(at >= 0) & (at < size)]
        touched[at] = True
        pairs, used = pairs + len(at), used + bool(len(at))
    return Axis(int(touched.sum()), pairs, used)


def _window(p: ConvProblem, i: int, outputs: np.ndarray | None = None) -> Axis:
    """Counts rows (i = 0) or columns (1) of a convolution for `outputs`; None: for the outputs that its pool reads, or for
    all.
    """
    size, out, taps = ((p.h, p.p, p.r), (p.w, p.q, p.s))[i]
    if outputs is None and (pool := p.epilogue.pool):
        outputs = np.unique((np.arange(pool.out[i]) * pool.stride[i] - pool.pad[i])[:, None] + np.arange(pool.window[i]))
        outputs = outputs[(outputs >= 0) & (outputs < out)]
    starts = (np.arange(out) if outputs is None else outputs) * p.stride[i] - p.pad[i]
    return axis(size, starts, taps, p.dilation[i])


def _transposed(p: ConvTransposeProblem, i: int) -> Axis:
    """Counts rows (i = 0) or columns (1) of a transposed convolution: input j and tap t meet output j * stride + t * dilation -
    pad.
    """
    size, taps = ((p.h, p.r), (p.w, p.s))[i]
    meets = np.arange(size)[:, None] * p.stride[i] + np.arange(taps) * p.dilation[i] - p.pad[i]
    inside = (meets >= 0) & (meets < p.out[i])
    return Axis(int(inside.any(1).sum()), int(inside.sum()), int(inside.any(0).sum()))


def _needs(problem: Problem) -> tuple[int, int, int]:
    """Returns (elements of the first input that some product needs, products, weights that some product needs)."""
    read = products = weights = 0
    for i, part in enumerate(problem.parts):
        behind = problem.parts[i + 1] if i + 1 < len(problem.parts) else None
        if isinstance(part, ConvTransposeProblem):
            found = _counted(part, _transposed(part, 0), _transposed(part, 1))
        elif isinstance(part, ConvProblem):
            rows, columns = (_window(part, side, _read_of(part, behind, side)) for side in (0, 1))
            found = _counted(part, rows, columns)
        else:
            found = math.prod(part.in_shapes[0]), part.macs, 0
        read, products, weights = found[0] if i == 0 else read, products + found[1], weights + found[2]
    return read, products, weights


def _read_of(p: ConvProblem, behind: Problem | None, side: int) -> np.ndarray | None:
    """The rows (0) or columns (1) of p's output that a 1x1 convolution behind it, perhaps with a stride, reads; None: all."""
    if not isinstance(behind, ConvProblem):
        return None
    starts = np.arange((behind.p, behind.q)[side]) * behind.stride[side] - behind.pad[side]
    return starts[(starts >= 0) & (starts < (p.p, p.q)[side])]


def _counted(p: ConvProblem | ConvTransposeProblem, rows: Axis, columns: Axis) -> tuple[int, int, int]:
    weights = p.k * (p.c // p.groups)
    return p.n * p.c * rows.read * columns.read, p.n * weights * rows.pairs * columns.pairs, weights * rows.taps * columns.taps


def floors(p: Problem, device: Device, sizes: Sequence[int] = ()) -> dict[str, float | str]:
    """Lower bounds in microseconds for all our kernels on `device`, from its peak rates (`best_fma`).

    Returns `mma_us`, `dram_us`, `l2_us`, `launch_us` of the dense layer, `bound`, the largest of them, and `dense_us`,
    `sparse_us`: launch plus the largest of the others. For convolutions, also transposed, in pairs and with squeeze-excite.

    Only necessary work is counted: products with elements of the image, not of its padding; of the first input, the elements
    that some tap touches (of a 1x1 convolution with stride 2 a quarter), not the rest of their sectors; weights of taps that
    touch the input. `sizes`: bytes of an element of each input and the output, 2 where not given. Weights come from DRAM, and
    so do activations that L2 cannot have kept (before the launch) or keep (after it). 2:4 halves the products and keeps 9/16 of
    the weight bytes (half the values, 2 bits for each kept one).
    """
    read, macs, weights = _needs(p)
    counts = [read, *map(math.prod, p.in_shapes[1:]), math.prod(p.out_shape)]
    *ins, out = (n * size for n, size in zip(counts, sizes or (2,) * len(counts), strict=True))
    clock = device.clock_mhz * rates(device).boost
    mma = macs / (device.num_sms * best_fma(device) * clock)
    cold = max(0, sum(ins) - device.l2_bytes) + max(0, out - device.l2_bytes)

    def dram(w: float) -> float:
        return (w + cold) / (device.dram_gbps * 1e3)

    def l2(w: float) -> float:
        return (w + sum(ins) + out) / (device.l2_bytes_per_clk * clock)

    launch = one_launch_us(device)
    parts = {"mma": mma, "dram": dram(2 * weights), "l2": l2(2 * weights), "launch": launch}
    few = 2 * weights * 9 / 16
    return {
        **{f"{name}_us": us for name, us in parts.items()},
        "bound": max(parts, key=parts.__getitem__),
        "dense_us": launch + max(mma, parts["dram"], parts["l2"]),
        "sparse_us": launch + max(mma / 2, dram(few), l2(few)),
    }


def least_us(p: Problem, tactic: Tactic, device: Device) -> tuple[float, str]:
    """Returns (the lower bound in microseconds for launches of this problem, the name of its largest part).

    Layers with weights have `floors`; other problems the launch, and each product and byte once, of moved elements only those
    that reach the output.
    """
    if any(isinstance(part, (ConvProblem, ConvTransposeProblem)) for part in p.parts):
        found = floors(p, device, [DTYPES[f.dtype].itemsize for f in (*tactic.ins[: len(p.in_shapes)], tactic.out)])
        return float(found["sparse_us" if tactic.sparse else "dense_us"]), str(found["bound"])
    read, written = traffic(p.all_shapes, tactic)
    if isinstance(p, (MoveProblem, GatherProblem)):
        read = min(read, written)
    clock = device.clock_mhz * rates(device).boost
    cold = max(0, read - device.l2_bytes) + max(0, written - device.l2_bytes)
    parts = {
        "mma": p.macs / (device.num_sms * best_fma(device) * clock),
        "dram": cold / (device.dram_gbps * 1e3),
        "l2": (read + written) / (device.l2_bytes_per_clk * clock),
    }
    us, launch = max(parts.values()), one_launch_us(device)
    return launch + us, "launch" if us < launch else max(parts, key=parts.__getitem__)


def streamed(
    device: Device, steps: Sequence[Launch], read: float, written: float, instructions: float, turns: float = 1
) -> Counts:
    """Makes the Counts of kernels that move more than they compute.

    The time is bytes over bandwidth, bounded by the loads that the launched threads can keep in flight, by the `turns` in which
    a thread waits for its loads, and by the instructions of all threads.
    """
    blocks = sum(s.grid[0] for s in steps)
    active = min(device.num_sms, blocks)
    waves = math.ceil(blocks / (device.num_sms * 8))
    flight = (read + written) / (active * BYTES_IN_FLIGHT_PER_SM / LATENCY_CLK)
    latency, clk_us = max(flight, waves * (turns - 1) * LATENCY_CLK) + waves * LATENCY_CLK, 1 / device.clock_mhz
    limits = {"latency": latency * clk_us, "issue": instructions / (128 * active) * clk_us}
    return Counts(read, written, limits=limits, launches=len(steps))
