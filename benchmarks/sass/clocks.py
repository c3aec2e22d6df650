"""Clocks of main loops and tiles by benchmarks/simulator, at every point of its sweep, cached by content."""

import hashlib
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from benchmarks import processes, simulator
from benchmarks.simulator.machine import CENTRE, SHIFTED, SWEEP, Residency, machine
from benchmarks.simulator.sass import program
from benchmarks.simulator.simulate import points_of, steady, tile_clocks
from benchmarks.simulator.warpgroups import Ring
from cuda_kernels.device import Device, named
from cuda_kernels.files import cache_dir, write
from tactics.tactic import Tile

ITERATIONS = 16  # stages of the tile that is simulated as a whole


@dataclass(frozen=True, slots=True)
class Asked:
    """A main loop to simulate, with this number of a block's warps that multiply, and of blocks on an SM of a device."""

    cubin: bytes
    device: str
    warps: int
    blocks: int
    every_point: bool = True
    ring: Ring | None = None  # of a loop that TMA feeds, the stages; nothing around such a loop is simulated


@dataclass(frozen=True, slots=True)
class Simulated:
    """The results. `shares`: the tensor cores' share of time at each point of the sweep, the centre first; `once`: at the
    centre, clocks of a tile outside its main loop; `shifted`: L2 latency -> the centre's shares with other starts of the warps.
    """

    shares: tuple[float, ...]
    once: float = 0.0
    shifted: tuple[tuple[float, ...], ...] = ()

    @property
    def centre(self) -> float:
        return self.shares[0]

    @property
    def low(self) -> float:
        return min(self.shares)

    @property
    def high(self) -> float:
        return max(self.shares)

    def noise(self, point: int) -> float:
        """Returns the noise of phase locking at a point, by its L2 latency: the range of the shifted shares, in logarithms."""
        loaded = max(0, point - 1) // len(SWEEP)
        found = self.shifted[loaded] if 0 < loaded < len(self.shifted) else (self.centre, *self.shifted[0])
        return math.log(max(found) / min(found))


def stage_clocks(tile: Tile, sparse: bool, share: float, blocks: int, device: Device) -> float:
    """Returns the clocks from a block's stage to its next, if tensor cores are busy for that share of the time."""
    at = machine(device)
    return blocks * tile.m * tile.n * tile.k / (4 * at.products_per_clk * (at.sparse_ratio if sparse else 1) * share)


@lru_cache(maxsize=1)
def _sources() -> bytes:
    folder = Path(next(iter(simulator.__path__)))
    return b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))


def _path(asked: Asked) -> Path:
    parts = (
        asked.cubin,
        _sources(),
        repr((named(asked.device), asked.warps, asked.blocks, asked.every_point, asked.ring)).encode(),
    )
    return cache_dir() / "independent" / f"clocks-{hashlib.sha256(b'|'.join(parts)).hexdigest()[:20]}.json"


def _simulate(asked: Asked) -> Simulated:
    code, at, r = program(asked.cubin), machine(named(asked.device)), Residency(asked.warps, asked.blocks)
    points = (CENTRE, *(points_of(code.iteration(code.main_loop)) if asked.every_point else ()))  # the centre comes first
    found = [steady(code, r, at, point, ring=asked.ring) for point in points]
    groups = SHIFTED if asked.every_point else ()
    shifted = tuple(tuple(steady(code, r, at, point, ring=asked.ring).mma_share for point in of) for of in groups)
    once = 0 if asked.ring else tile_clocks(code, ITERATIONS, r, at) - ITERATIONS * found[0].clocks_per_stage
    return Simulated(tuple(s.mma_share for s in found), once, shifted)


def simulated(asked: Sequence[Asked]) -> list[Simulated]:
    """Returns the result of each, from the cache or simulated on all cores."""
    new = [a for a in dict.fromkeys(asked) if not _path(a).exists()]
    if new:
        workers = min(len(new), os.cpu_count() or 1)
        with processes.pool(workers) as pool:  # this process may have threads
            for a, found in zip(new, pool.map(_simulate, new), strict=True):
                write(_path(a), json.dumps([found.shares, found.once, found.shifted]).encode())
    kept = [json.loads(_path(a).read_text()) for a in asked]
    return [Simulated(tuple(shares), once, tuple(map(tuple, shifted))) for shares, once, shifted in kept]
