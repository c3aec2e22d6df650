"""What main loops and tiles take by benchmarks/simulator, at every point of its sweep, cached by content."""

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

ITERATIONS = 16  # of the main loop, of the tile that is simulated whole


@dataclass(frozen=True, slots=True)
class Asked:
    """What is to be simulated: a main loop with so many warps of a block, which multiply, and blocks on an SM of a device."""

    cubin: bytes
    device: str
    warps: int
    blocks: int
    every_point: bool = True
    ring: Ring | None = None  # of a loop that TMA feeds, the stages; nothing around such a loop is simulated


@dataclass(frozen=True, slots=True)
class Simulated:
    """The tensor cores' share at each point, the centre first; `once`: there, clocks of a tile beside its main loop; `shifted`:
    the centre's share with warps started otherwise, by L2's latency."""

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
        """Of phase locking, by L2's latency at a point: how far apart these shares lie, in logarithms."""
        loaded = max(0, point - 1) // len(SWEEP)
        found = self.shifted[loaded] if 0 < loaded < len(self.shifted) else (self.centre, *self.shifted[0])
        return math.log(max(found) / min(found))


def stage_clocks(tile: Tile, sparse: bool, share: float, blocks: int, device: Device) -> float:
    """From a block's stage to its next, where tensor cores are busy for that share of the clocks."""
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
    """Each from the cache or, those that are not there, simulated on all cores."""
    new = [a for a in dict.fromkeys(asked) if not _path(a).exists()]
    if new:
        workers = min(len(new), os.cpu_count() or 1)
        with processes.pool(workers) as pool:  # this process may have threads
            for a, found in zip(new, pool.map(_simulate, new), strict=True):
                write(_path(a), json.dumps([found.shares, found.once, found.shifted]).encode())
    kept = [json.loads(_path(a).read_text()) for a in asked]
    return [Simulated(tuple(shares), once, tuple(map(tuple, shifted))) for shares, once, shifted in kept]
