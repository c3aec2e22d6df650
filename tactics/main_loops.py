"""Clocks of main loops of convolutions, from shares of the tensor cores' peak that were simulated from machine code.

cuda_kernels/shares.json has them by kernel, tile, what the loop does to its input, machine and blocks on an SM. In a
share is all that an SM does in a loop: fragments and copies through the port of shared memory, addresses, barriers, few
warps, the products that a norm adds. What lies beyond the SM (bandwidth of L2 that others use, latencies under load, a power
limit) is not.
"""

from functools import lru_cache

from cuda_kernels.device import Device
from cuda_kernels.shares import rows, share
from tactics.problems.prologue import Prologue
from tactics.roofline import tensor_peak
from tactics.step import linear
from tactics.tactic import Tactic, Tile

SMEM_BYTES_PER_CLK = 128
# Of our kernels' time over what loop, L2, DRAM, start and end take, since none was ever timed: the least, in steps of 0.05, at
# which on every device at most 5 % of the published rows that fit constants are promised to take 10 % less than cuBLAS took. At
# 1, where CUTLASS's loops by the same simulation meet cuBLAS in the mean, the scatter of single rows alone makes that 6 % on an
# A100 and 9 % on an L40S.
UNTIMED = 1.1


def loop_share(tactic: Tactic, prologue: Prologue, device: Device, blocks: int) -> float:
    """The share of `tensor_peak` that was simulated, with so many blocks on an SM. LookupError where the kernel has none."""
    return share(tactic.kernel, _name(tactic.gemm), _loop(tactic, prologue), device, blocks)


def _loop(tactic: Tactic, prologue: Prologue) -> str:
    """Its name in the table."""
    if linear(tactic.ins[0]):
        return "linear"
    return "scaled" if prologue.scaled else "gated" if prologue.gated else "normalized" if prologue.normalized else "vectors"


@lru_cache(maxsize=256)
def _name(tile: Tile) -> str:
    """Of the tile without its split, which leaves the loop as it is."""
    return str(tile.whole)


@lru_cache(maxsize=16384)
def stage(tactic: Tactic, prologue: Prologue, device: Device, blocks: int) -> tuple[str, float, float]:
    """(what limits the loop, clocks from a block's stage to its next over the `blocks` of an SM, clocks of them in which tensor
    cores work on the tile). The clocks are simulated; the name is that of the larger of products and bytes of shared memory."""
    t = tactic.gemm
    products = t.m * t.n * t.k / tensor_peak(device, tactic.sparse)
    a, b = t.m * t.k * (9 / 8 if tactic.sparse else 2), t.n * t.k * 2  # written once, read by each row or column of warps
    smem = (a * (1 + t.warps_n) + b * (1 + t.warps_m)) / SMEM_BYTES_PER_CLK
    name = "issue" if linear(tactic.ins[0]) else "smem" if smem > products else "mma"
    return name, products / loop_share(tactic, prologue, device, blocks), products


def best_share(device: Device, sparse: bool) -> float:
    """The most that an estimate takes, of any tile of vectors without a prologue, with as many blocks as fit."""
    kernel = "conv_sparse24" if sparse else "conv_dense"
    return max(share(kernel, tile, "vectors", device, device.max_blocks_per_sm) for tile in rows(kernel)) / UNTIMED
