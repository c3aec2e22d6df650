"""Published times of matrix products, and estimates of the same by the simulated main loops of CUTLASS's tiles.

A row's time, in whole rounds of the blocks that all SMs hold: of each round the clocks of its stages and of a tile's start and
end, simulated with as many blocks on an SM as the round gives it, or, if longer, of its operands' way from L2; then
DRAM's time, if that is longer, and a launch. Rates of L2 and DRAM are measured ones (cuda_kernels/rates.py), none fitted here.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cuda_kernels.device import Device
from cuda_kernels.rates import rates
from tactics.peers import SPARSE_BYTES, Work, from_dram
from tactics.tactic import Tile

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Timed:
    """A simulated tile. By the number of blocks on an SM, from 1 on: `stage`, clocks from a block's stage to its next; `once`,
    clocks of a tile outside its stages.
    """

    tile: Tile
    sparse: bool
    stage: tuple[float, ...]
    once: tuple[float, ...]

    @property
    def blocks(self) -> int:
        return len(self.stage)


def estimates(work: Work, device: Device, tiles: Sequence[Timed], clock: float = 1.0) -> Floats:
    """Returns microseconds [tile, row]. `clock`: the share of the data sheet's clock that the power limit leaves."""
    return np.array([_of_tile(work, device, t, device.clock_mhz * clock) for t in tiles])


def _of_tile(work: Work, device: Device, timed: Timed, mhz: float) -> Floats:
    t, at, share = timed.tile, rates(device), SPARSE_BYTES if timed.sparse else 1.0
    stages = np.ceil(work.k / t.k)
    count = np.ceil(work.m / t.m) * np.ceil(work.n / t.n)
    held = device.num_sms * timed.blocks
    whole, rest = count // held, count % held
    last = np.ceil(rest / device.num_sms)  # blocks on the fullest SM of the last round
    loaded = (t.m * share + t.n) * t.k * 2  # bytes of a stage
    drawn = min(at.sm_l2, at.l2 / device.num_sms)  # bytes per clock of an SM
    total = np.zeros(len(work.m))
    for blocks in range(1, timed.blocks + 1):
        clocks = timed.once[blocks - 1] + stages * max(timed.stage[blocks - 1], blocks * loaded / drawn)
        total += clocks * (whole * (blocks == timed.blocks) + (last == blocks))
    dram = again(work, device, timed) / (device.dram_gbps * 1e3 * at.dram_share)
    return device.launch_us + np.maximum(total / mhz, dram)


def again(work: Work, device: Device, timed: Timed) -> Floats:
    """Returns bytes from DRAM: each operand once, and if L2 does not hold both, their rows and columns again for every round of
    tiles. Tiles run along m first; of a sparse product that operand has the weights.
    """
    t, share = timed.tile, SPARSE_BYTES if timed.sparse else 1.0
    least = from_dram(work, device, share)
    down, held = np.ceil(work.m / t.m), device.num_sms * timed.blocks
    rounds = np.ceil(down * np.ceil(work.n / t.n) / held)
    rows, columns = np.minimum(down, held), np.ceil(held / down)
    each = (rows * t.m * share + np.minimum(columns * t.n, work.n)) * work.k * 2
    spilled = work.x + work.w * share > device.l2_bytes
    return np.where(spilled, np.maximum(least, rounds * each + work.y), least)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The number of rows and their errors: bias, and mean |log(estimate / published)|."""

    rows: int
    bias: float
    error: float


def verdict(us: Floats, published: Floats) -> Verdict:
    e = np.log(us / published)
    return Verdict(len(e), float(e.mean()), float(np.abs(e).mean()))


def few(work: Work, device: Device, chosen: Sequence[Tile]) -> NDArray[np.bool_]:
    """Whether a row has fewer tiles than SMs, with the tile chosen for it."""
    m, n = (np.array([getattr(t, axis) for t in chosen]) for axis in ("m", "n"))
    return np.ceil(work.m / m) * np.ceil(work.n / n) < device.num_sms
