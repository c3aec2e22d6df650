"""Microseconds of a layer with a tile of a Hopper kernel: rounds of tiles over the SMs, their ends, DRAM and L2 as a whole.

What is not the main loop is taken from the planner's model of our own kernels (tactics.families.conv_gemm, tactics.roofline):
clocks from a block's start to its first stage and from its last product to its end, instructions and bytes of the epilogue,
partial sums of a split K, bytes that DRAM and L2 deliver, a launch, a tenth for kernels that nobody has timed. Blocks are
persistent: the copying warpgroup fills the next tile's stages during an epilogue, and with `pingpong` an epilogue of one
warpgroup runs during the main loop of the other.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from tactics.families.hopper.figures import Figures
from tactics.families.hopper.tiles import K_STAGE, Box, HopperTile, refused, stage
from cuda_kernels.device import Device
from tactics.families.conv_gemm import EARLY_CLK, EPILOGUE_CLK, FILL_CLK
from tactics.format import LAYOUTS, Format, num_bytes
from tactics.main_loops import UNTIMED
from tactics.problems.problem import ConvProblem
from tactics.problems.protocol import Problem
from tactics.roofline import L2_LATENCY_CLK, Counts, predicted
from tactics.step import epilogue_instructions, linear

WAYS = ("", "split", "cluster", "stream")
SPLITS = (2, 3, 4, 6, 8, 12, 16)
PORTABLE_CLUSTER = 8  # blocks; more only where the driver says so
MAX_STRIDE, MAX_OFFSET = 8, 254
HWC8 = Format("fp16", "hwc8")
STRIP_COLS = (8, 16, 24, 32, 48, 56, 64)
STRIP_N = (128, 192, 256)


@dataclass(frozen=True, slots=True)
class Estimate:
    """Predicted microseconds of a layer, what bounds the loop or the launch, and how K is split: "", "split 4", "cluster 4"
    (sums through distributed shared memory) or "stream"."""

    us: float
    bound: str
    how: str


def reason(p: Problem, ins: Sequence[Format], out: Format, least_k: int = K_STAGE) -> str:
    """Why no Hopper kernel runs it, or an empty string."""
    if not isinstance(p, ConvProblem) or p.groups > 1:
        return "grouped"
    if p.prologue.needs:
        return "its pixels change in registers"
    if p.epilogue.pool:
        return "a pool in the epilogue"
    if any(linear(f) or f.dtype != "fp16" for f in (*ins, out)):
        return "a linear or FP32 tensor"
    if any(LAYOUTS[f.layout].blocked and p.c > LAYOUTS[f.layout].vector for f in ins[:1]):
        return "im2col cannot step between planes of channels"
    if p.c * p.r * p.s < least_k or p.c < 8:
        return "K is less than a stage"
    if max(p.stride) > MAX_STRIDE or max((p.r - 1) * p.dilation[0], (p.s - 1) * p.dilation[1]) > MAX_OFFSET:
        return "beyond im2col's limits"
    return ""


@lru_cache(maxsize=4096)
def k_stages(p: ConvProblem) -> int:
    """Stages of 64 of K: a tap takes a multiple of 64 channels, or 16 or 32 (swizzles of 32 and 64 bytes)."""
    per_tap = next((width for width in (16, 32) if p.c <= width), -(-p.c // 64) * 64)
    return -(-p.r * p.s * per_tap // K_STAGE)


@lru_cache(maxsize=4096)
def boxes(p: ConvProblem) -> tuple[Box, ...]:
    """Strips' shapes: of each size of n and number of copies the one that throws away least, then that copies least."""
    alike = (p.r, p.s) == (3, 3) and p.stride == p.dilation == (1, 1) and (p.p, p.q) == (p.h, p.w)
    if not alike or p.c < K_STAGE:
        return ()
    found: dict[tuple[int, int], tuple[float, Box]] = {}
    for copies in (1, p.s):
        for cols in sorted({c if copies > 1 else min(c, p.q) for c in STRIP_COLS}):
            for rows in range(1, min(p.p, 32) + 1):
                for images in (1, 2, 4) if rows == p.p and cols >= p.q else (1,):
                    box = Box(images, rows, cols, copies)
                    most = next((n for n in STRIP_N if box.n <= n), 0)
                    if most and box.n >= most - 64 and images <= p.n:
                        cost = num_boxes(p, box) * (box.n + 0.25 * box.copied * copies / 9)
                        if cost < found.get((most, copies), (math.inf, box))[0]:
                            found[most, copies] = cost, box
    return tuple(box for _, box in found.values())


def num_boxes(p: ConvProblem, box: Box) -> int:
    return -(-p.n // box.images) * -(-p.p // box.rows) * -(-p.q // box.cols)


def strips(p: ConvProblem) -> Iterator[HopperTile]:
    for box in boxes(p):
        for sparse in (False, True) if p.sparse24 else (False,):
            for weights in ("smem", "registers"):
                for m, groups in ((64, 1), (128, 2), (256, 2)):
                    for shared in ("", "pixels"):
                        tile = HopperTile(m, box.n, sparse, weights, shared, groups, box=box)
                        if not refused(tile):
                            yield tile


def estimate(
    p: ConvProblem,
    tile: HopperTile,
    device: Device,
    figures: Figures,
    formats: Sequence[Format] = (),
    ways: Sequence[str] = WAYS,
) -> Estimate | None:
    """The fastest of these ways of sharing tiles and K among SMs; None: a cluster has no second tile to share with. `formats`:
    of the inputs, then of the output; hwc8 where none are given."""
    rows = -(-p.k // tile.m)
    columns = num_boxes(p, tile.box) if tile.box else -(-p.n * p.p * p.q // tile.n)
    if {"pixels": rows, "weights": columns, "": 2}[tile.shared] < 2:
        return None
    rows += rows % 2 if tile.shared == "pixels" else 0
    columns += columns % 2 if tile.shared == "weights" else 0
    found = _clocks(p, tile, device, figures, rows * columns)
    clocks, how = min((clocks, how) for clocks, how in found if how.partition(" ")[0] in ways)
    name = "sm" if stage(tile, figures).bound != "tensor" else "mma"
    *given, out = formats or (HWC8,) * (2 + p.epilogue.residual)
    read = sum(num_bytes(f, s) for f, s in zip(given, p.in_shapes, strict=True))
    per_value = 9 / 8 if tile.sparse else 2.0
    counts = Counts(
        read,
        num_bytes(out, p.out_shape),
        -(-p.k // 16) * 16 * k_stages(p) * K_STAGE * per_value,
        {name: clocks / device.clock_mhz},
        sparse=tile.sparse,
        untimed=UNTIMED,
    )
    parts = predicted(device, counts)
    bound = str(parts["bound"])
    return Estimate(float(parts["total_us"]), stage(tile, figures).bound if bound == name else bound, how)


def _clocks(p: ConvProblem, tile: HopperTile, device: Device, f: Figures, tiles: int) -> Iterator[tuple[float, str]]:
    """(clocks of the SM with most work, how) of every way."""
    sms, steps = device.num_sms, k_stages(p)
    at = stage(tile, f)
    each = at.clocks / f.sparse_clock if tile.sparse else max(at.clocks, at.tensor / f.held)
    size = tile.m * tile.n
    end = size * (f.output + epilogue_instructions(p)) / 128 + size * 2 * (2 if p.epilogue.residual else 1) / f.l2
    begun = FILL_CLK + f.start - (EARLY_CLK if device.dependent_launch else 0)
    per_sm, loop = math.ceil(tiles / sms), steps * each
    if tile.loader == "cp.async":  # no block outlives its tile, as today
        for ways, turns in [(1, per_sm), *((s, math.ceil(tiles * s / sms)) for s in SPLITS if 2 * s <= steps)]:
            sums = (3 + ways) * L2_LATENCY_CLK + (1 + ways) * size * 4 / f.l2 if ways > 1 else 0.0
            part = math.ceil(steps / ways) * each + end + sums
            yield turns * (part + FILL_CLK + EPILOGUE_CLK) - EARLY_CLK, f"split {ways}" if ways > 1 else ""
        return
    if tile.pingpong:
        hidden = max(loop, (loop + end + EPILOGUE_CLK) / 2)
        yield begun + (per_sm - 1) * hidden + loop + end + EPILOGUE_CLK, ""
        return
    yield begun + per_sm * (loop + end + EPILOGUE_CLK), ""
    partial = size * 4
    for ways in SPLITS:
        if 2 * ways > steps or tiles * ways > 2 * sms:
            break
        turns, part = math.ceil(tiles * ways / sms), math.ceil(steps / ways) * each
        sums = (3 + ways) * L2_LATENCY_CLK + (1 + ways) * partial / f.l2
        yield begun + turns * (part + end + sums + EPILOGUE_CLK), f"split {ways}"
        if not tile.shared and ways <= PORTABLE_CLUSTER:
            sums = 2 * f.cluster_latency + partial * (ways - 1) / ways / f.cluster_rate
            yield begun + turns * (part + end / ways + sums + EPILOGUE_CLK), f"cluster {ways}"
    if 1.1 * tiles / sms < per_sm <= 8 and tiles * steps >= 2 * sms:  # as the planner's streams
        parts = math.ceil(sms / tiles) + 1
        ends = end + (3 + parts) * L2_LATENCY_CLK + (1 + parts) * partial / f.l2
        yield begun + EPILOGUE_CLK + tiles * steps / sms * each + ends * (per_sm + 1), "stream"
