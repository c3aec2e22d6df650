"""The geometry of strips: how a convolution is cut into strips, tiles and turns, their shared memory, and the reasons against
them.
"""

from cuda_kernels import sparse24
from cuda_kernels.device import Device
from tactics.format import padded_channels
from tactics.problems.problem import ConvProblem
from tactics.reason import no_room
from tactics.tactic import Tactic

CHANNELS = 64  # of a strip, and of a turn
PIXEL_BYTES = 2 * CHANNELS
ZERO_BYTES = 8 * PIXEL_BYTES  # zeros, read for a tap outside of its image
MASK_BITS = 32  # of a register that tells which rows, or columns, of the kernel lie inside of the image (include/strip.cuh)


def family_reason(p: ConvProblem) -> str:
    """Why no strip serves this problem, or ""."""
    if p.groups > 1:
        return f"{p.groups} groups: a strip kernel supports one group only"
    if p.stride != (1, 1) or p.dilation != (1, 1):
        return f"stride {p.stride}, dilation {p.dilation}: strip kernels need stride 1 and dilation 1"
    if p.r % 2 == 0 or p.s % 2 == 0 or p.pad != (p.r // 2, p.s // 2) * 2:
        return f"{p.r} x {p.s} taps with padding {p.pad}: the output's size differs from the input's, or a kernel size is even"
    return ""


def tile_reason(p: ConvProblem, tactic: Tactic, device: Device) -> str:
    """Why this tile cannot run the problem on the device, or ""."""
    t = tactic.gemm
    if why := no_room(smem_bytes(p, tactic), device):
        return f"a strip of {strip_rows(p, tactic)} pixels: {why}"
    if max(p.r, p.s) * lane_pixels(tactic) >= MASK_BITS:
        return f"{p.r} x {p.s} taps of {lane_pixels(tactic)} pixels: the mask of the image border does not fit a register"
    if blocks_of_k(p) > 1 and p.r * p.s < t.stages - 1:
        return f"{p.r} x {p.s} taps: {t.stages} stages leave no step in which to copy the next strip"
    return ""


def lane_pixels(tactic: Tactic) -> int:
    """Pixels of a strip that a lane addresses per 32 (dense: 16) channels: ldmatrix reads 8 (16) of a warp's at once."""
    t = tactic.gemm
    return t.n // t.warps_n // (8 if tactic.sparse else 16)


def blocks_of_k(p: ConvProblem) -> int:
    return -(-p.c // CHANNELS)


def turns(p: ConvProblem) -> int:
    return blocks_of_k(p) * p.r * p.s


def strip_rows(p: ConvProblem, tactic: Tactic) -> int:
    """Returns the number of pixels in a strip."""
    return tactic.gemm.n + (p.r - 1) * p.w + p.s - 1


def copies(p: ConvProblem, tactic: Tactic) -> int:
    """Returns the most pixels of the next strip that a thread copies per turn: all copies begin at least STAGES - 1 turns
    before its first turn.
    """
    t = tactic.gemm
    if blocks_of_k(p) == 1:
        return 0
    return -(-strip_rows(p, tactic) // ((p.r * p.s - t.stages + 2) * (t.threads // (CHANNELS // 8))))


def weight_stage(tactic: Tactic) -> int:
    """Bytes of a turn's weights: dense FP16 values, or half of them and a metadata bit per element."""
    t = tactic.gemm
    return t.m * t.k + sparse24.metadata_bytes(t.m, t.k) if tactic.sparse else t.m * t.k * 2


def smem_bytes(p: ConvProblem, tactic: Tactic) -> int:
    """Bytes of dynamic shared memory: zeros, one strip or two in turn, stages of weights; or in their place the epilogue's
    tile.
    """
    t = tactic.gemm
    strips = min(2, blocks_of_k(p)) * -(-strip_rows(p, tactic) // 8) * 8 * PIXEL_BYTES
    return max(ZERO_BYTES + strips + t.stages * weight_stage(tactic), t.m * t.n * 2 + t.n * 4)


def num_tiles(p: ConvProblem, tactic: Tactic) -> int:
    t = tactic.gemm
    return -(-padded_channels(tactic.out.layout, p.k) // t.m) * -(-p.n * p.p * p.q // t.n)
