"""Clocks of convolutions' main loops, from simulated shares of the tensor cores' peak.

cuda_kernels/shares.json has the shares by kernel, tile, prologue, machine and blocks on an SM; they were simulated from machine
code. A share includes all that an SM does in a loop: fragments and copies through the port of shared memory, addresses,
barriers, few warps, the products that a norm adds. It excludes everything beyond the SM (bandwidth of L2 that others use,
latencies under load, a power limit).
"""

from functools import lru_cache

from cuda_kernels.device import Device
from cuda_kernels.shares import rows, share
from tactics.problems.prologue import Prologue
from tactics.roofline import tensor_peak
from tactics.step import linear
from tactics.tactic import Tactic, Tile

SMEM_BYTES_PER_CLK = 128
# A factor on our kernels' predicted time (loop, L2, DRAM, start and end), as no GPU has timed them: the least, in steps of
# 0.05, with which on every device at most 5 % of the published rows that fit constants are promised to take 10 % less than
# cuBLAS took. With 1, at which CUTLASS's loops by the same simulation equal cuBLAS in the mean, the scatter of single rows
# makes these 6 % on an A100 and 9 % on an L40S.
UNTIMED = 1.1


def loop_share(tactic: Tactic, prologue: Prologue, device: Device, blocks: int) -> float:
    """Returns the simulated share of `tensor_peak` that the main loop reaches with this number of blocks on an SM. Raises
    LookupError if the kernel has no row.
    """
    return share(tactic.kernel, _name(tactic.gemm), _loop(tactic, prologue), device, blocks)


def _loop(tactic: Tactic, prologue: Prologue) -> str:
    """Returns the loop's name in the table of shares."""
    if linear(tactic.ins[0]):
        return "linear"
    return "scaled" if prologue.scaled else "gated" if prologue.gated else "normalized" if prologue.normalized else "vectors"


@lru_cache(maxsize=256)
def _name(tile: Tile) -> str:
    """The tile's name without its split, which leaves the loop as it is."""
    return str(tile.whole)


@lru_cache(maxsize=16384)
def stage(tactic: Tactic, prologue: Prologue, device: Device, blocks: int) -> tuple[str, float, float]:
    """Returns (limit of the loop, clocks from a block's stage to its next with `blocks` on an SM, clocks of these in which
    tensor cores work on the tile).

    The clocks are simulated. The limit is "issue" for linear inputs, else "mma" or "smem", whichever needs more clocks.
    """
    t = tactic.gemm
    products = t.m * t.n * t.k / tensor_peak(device, tactic.sparse)
    a, b = t.m * t.k * (9 / 8 if tactic.sparse else 2), t.n * t.k * 2  # written once, read by each row or column of warps
    smem = (a * (1 + t.warps_n) + b * (1 + t.warps_m)) / SMEM_BYTES_PER_CLK
    name = "issue" if linear(tactic.ins[0]) else "smem" if smem > products else "mma"
    return name, products / loop_share(tactic, prologue, device, blocks), products


def best_share(device: Device, sparse: bool) -> float:
    """Returns the highest share that an estimate uses: of any tile of vectors without a prologue, with as many blocks as
    fit.
    """
    kernel = "conv_sparse24" if sparse else "conv_dense"
    return max(share(kernel, tile, "vectors", device, device.max_blocks_per_sm) for tile in rows(kernel)) / UNTIMED
