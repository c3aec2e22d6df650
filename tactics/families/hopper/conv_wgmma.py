"""conv_gemm's convolution on Hopper's wgmma (conv_dense_sm90.cu) and wgmma.sp (conv_sparse24_sm90.cu), for sm_90a alone.

Weights, arguments and grids are those of conv_gemm; tiles differ, for the four warps of a warpgroup lie along channels, and
each has all pixels of the tile. No plan holds these kernels (`unplanned` in tactics.kernels), so they have no `counts`.
"""

from dataclasses import replace
from itertools import product

from cuda_kernels import sparse24
from cuda_kernels.device import Device
from tactics.families import conv_gemm
from tactics.families.conv_gemm import pack, section_bytes
from tactics.format import HALF_FORMATS, Strides, padded_channels, too_large
from tactics.kernels import KERNELS
from tactics.problems.epilogue import RELU
from tactics.problems.problem import ConvProblem
from tactics.reason import Candidates, Reason, no_room, unsupported
from tactics.step import Launch, Store, linear
from tactics.tactic import Tactic, Tile, restrict

__all__ = ["CASES", "TILES", "candidates", "launches", "pack", "section_bytes"]

NAMES = ("conv_dense_sm90", "conv_sparse24_sm90")
PATTERN_BYTES = 1024  # 8 pixels of 64 channels: the swizzle's pattern, at whose multiples pixels begin
# Of four stages one is filled, one arrives, one is read, and products in flight may still read the last one.
TILES = tuple(
    Tile(m, n, 64, warps, 1, 4)
    for m, n, warps in (
        *((128, 256, 8), (256, 128, 8), (128, 128, 8), (128, 128, 4)),
        *((64, 256, 4), (64, 128, 4), (64, 64, 4), (64, 32, 4)),
    )
)
CASES = dict.fromkeys(
    NAMES,
    (
        ConvProblem(2, 40, 9, 7, 72, 3, 3, pad=(1, 1, 1, 1), epilogue=RELU, sparse24=True),
        ConvProblem(1, 200, 7, 10, 88, 1, 1, epilogue=replace(RELU, residual=True), sparse24=True),
    ),
)


def candidates(p: ConvProblem, device: Device, only: Tile | None = None) -> Candidates:
    """(tactic or kernel, reason against it or None). `only`: of the tiles this one alone."""
    for kernel in NAMES:
        if why := _refused(p, kernel, device):
            yield kernel, why
            continue
        for tile, x, y in product(restrict(TILES, only), HALF_FORMATS, HALF_FORMATS):
            tactic = Tactic(kernel, tile, (x, *((y,) if p.epilogue.residual else ())), y)
            yield from _ways(p, tactic, device)


def _refused(p: ConvProblem, kernel: str, device: Device) -> Reason | None:
    """Why no tactic of the kernel may run this problem there; None: some may."""
    if device.sm != KERNELS[kernel].sm:
        return unsupported(f"{device.sm} has no wgmma: {KERNELS[kernel].sm} has")
    if 1 < p.groups == p.c:
        return unsupported(f"depthwise (groups = C = {p.c}): a matrix product would waste 7 of 8 multiplications")
    if p.prologue.needs:
        return unsupported("the input's scale and shift, gate or norm change pixels in registers: wgmma reads shared memory")
    k = p.r * p.s * padded_channels("hwc8", conv_gemm.merged(p).one.c)
    if k < conv_gemm.K_STAGE:
        return unsupported(f"K = {k}: less than a stage of {conv_gemm.K_STAGE}")
    if why := too_large(p.all_shapes, others=p.n * p.p * p.q):
        return unsupported(why)
    return conv_gemm.not_sparse(p) if KERNELS[kernel].sparse else None


def _ways(p: ConvProblem, tactic: Tactic, device: Device) -> Candidates:
    """A tactic alone, and its ways to share K."""
    if linear(tactic.ins[0]):
        yield tactic, unsupported("linear input: pixels are copied 8 channels at a time")
        return
    reason = no_room(_smem(tactic), device) or conv_gemm.problem_reason(p, tactic)
    yield tactic, unsupported(reason)
    shared = () if reason else (*conv_gemm.splits(p, tactic, device), *conv_gemm.streams(p, tactic, device))
    for tile in shared:
        yield replace(tactic, tile=tile), None


def _smem(tactic: Tactic) -> int:
    """Dynamic shared memory in bytes: the pipeline, in which metadata is followed by pixels at a pattern's beginning, or the
    epilogue's staging tile over it and its table of pixels."""
    t = tactic.gemm
    weights = t.m * t.k * 2
    if tactic.sparse:
        weights = weights // 2 + -(-sparse24.metadata_bytes(t.m, t.k) // PATTERN_BYTES) * PATTERN_BYTES
    return max(t.stages * (weights + t.n * t.k * 2), t.m * t.n * 2 + t.n * 4)


def launches(
    p: ConvProblem, tactic: Tactic, store: Store | None = None, strided: tuple[Strides, ...] | None = None
) -> tuple[Launch, ...]:
    return tuple(replace(one, smem=_smem(tactic)) for one in conv_gemm.launches(p, tactic, store, strided))
