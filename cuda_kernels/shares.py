"""Shares of the tensor cores' peak that our main loops reach, from a committed table: simulating one takes a second.

shares.json, written by `python -m benchmarks.cycle_shares`:

    {version of NVRTC: {kernel: {"source": hash, "shares": {tile: {loop: {machine: [hash, shares, range]}}}}}}

A loop is what the compile-time values of LOOPS make of the kernel; split K and stream-K change it by a few percent and have no
row. A machine is an architecture and its rate, "sm_86/256": a GeForce card's tensor cores take twice the clocks for a product
that a workstation card's take. `hash` is of what was simulated, `shares` are the centre's with one block on an SM, two, and
so on to as many as fit, `range` the lowest and highest there, of the machines that are swept.

The peak is `mma_fma_per_clk * mma_sync_share` products a clock and SM, of 2:4 ones `rates.sparse_rate` as many: what
`tactics.roofline.tensor_peak` takes, before what a power limit or a library's best kernel leaves of it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from cuda_kernels.device import Device, relative

TABLE = Path(__file__).parent / "shares.json"
LOOPS: Mapping[str, Mapping[str, int]] = {
    "vectors": {},
    "linear": {"IN_LINEAR": 1},
    "scaled": {"PRO": 1},
    "gated": {"GATE": 1},
    "normalized": {"NORM": 1},
}
Rows = Mapping[str, Mapping[str, Mapping[str, list]]]  # by tile, loop and machine


@dataclass(frozen=True, slots=True)
class Share:
    """Of the tensor cores' peak: the lowest and highest over the sweep, and the centre."""

    low: float
    centre: float
    high: float

    def __str__(self) -> str:
        return f"{self.centre:.0%} ({self.low:.0%} to {self.high:.0%})"


@lru_cache(maxsize=1)
def table() -> Mapping[str, Mapping]:
    """As committed; empty where there is none."""
    return json.loads(TABLE.read_text()) if TABLE.exists() else {}


def machine_name(device: Device) -> str:
    return f"{device.sm}/{device.mma_fma_per_clk * device.mma_sync_share:.0f}"


@lru_cache(maxsize=8)
def rows(kernel: str) -> Rows:
    """Of the newest compiler that the table has, whatever the kernel's sources were: an estimate must not jump while a kernel
    is edited. tests/benchmarks/test_cycles_command.py holds that the committed rows are of the present sources."""
    versions = [version for version in table() if kernel in table()[version]]
    return table()[max(versions, key=_numbers)][kernel]["shares"] if versions else {}


@lru_cache(maxsize=4096)
def share(kernel: str, tile: str, loop: str, device: Device, blocks: int) -> float:
    """The centre's share with so many blocks on an SM. Of a device that the table lacks, the share of its relative. A prologue
    that was not simulated there counts as none, another loop has the least share of the kernel, so that no tile is taken for
    what nobody simulated; LookupError where there is nothing at all."""
    for at in dict.fromkeys((loop, loop if loop == "linear" else "vectors")):
        for name in (machine_name(device), machine_name(relative(device))):
            if row := rows(kernel).get(tile, {}).get(at, {}).get(name):
                return row[1][min(blocks, len(row[1])) - 1]
    name = machine_name(relative(device))
    others = [row[name][1][0] for loops in rows(kernel).values() for row in loops.values() if name in row]
    if not others:
        raise LookupError(f"{TABLE.name} has no share of {kernel} on {name}: python -m benchmarks.cycle_shares")
    return min(others)


def span(kernel: str, tile: str, loop: str, machine: str) -> Share | None:
    """Lowest, centre and highest with as many blocks as fit, where the machine was swept."""
    row = rows(kernel).get(tile, {}).get(loop, {}).get(machine)
    return Share(row[2][0], row[1][-1], row[2][1]) if row and len(row) > 2 else None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())
