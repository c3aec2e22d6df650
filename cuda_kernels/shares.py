"""Shares of the tensor cores' peak that our main loops reach, from a committed table: simulating one takes a second.

shares.json, written by `python -m benchmarks.cycle_shares`:

    {version of NVRTC: {kernel: {"source": hash, "shares": {tile: {loop: {machine: [hash, shares, range]}}}}}}

A loop is a kernel variant by the compile-time values of LOOPS; split K and stream-K change it by a few percent and have no row.
A machine is an architecture and its rate, "sm_86/256": a GeForce card's tensor cores need twice the clocks of a workstation
card's for a product. `hash` covers the simulated code; `shares` are the centre's with one block on an SM, two, and so on up to
the largest number that fits; `range` is the lowest and highest share, for the machines that are swept.

Kernels of bytes (conv_dense_int8) have rows of machines with the products of FP16 at half the rate of bytes: "sm_86/512" also
stands for GeForce cards, which multiply bytes as workstation cards do.

The peak is `mma_fma_per_clk * mma_sync_share` products per clock and SM, for 2:4 times `rates.sparse_rate`, as in
`tactics.roofline.tensor_peak`, before the limits of power or of a library's best kernel.
"""

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
# Not simulated: an Orin's SM has GA100's tensor cores (1,024 products a clock, sm_86 has at most 512) and shared memory, which
# decide the rate of a loop; ptxas may order the rest of sm_87's code as sm_86's.
ALIKE: Mapping[str, str] = {"sm_87": "sm_80"}
Rows = Mapping[str, Mapping[str, Mapping[str, list]]]  # by tile, loop and machine


@dataclass(frozen=True, slots=True)
class Share:
    """Shares of the tensor cores' peak: the lowest and highest over the sweep, and the centre."""

    low: float
    centre: float
    high: float

    def __str__(self) -> str:
        return f"{self.centre:.0%} ({self.low:.0%} to {self.high:.0%})"


@lru_cache(maxsize=1)
def table() -> Mapping[str, Mapping]:
    """Reads the committed table; empty without a file."""
    return json.loads(TABLE.read_text()) if TABLE.exists() else {}


def machine_name(device: Device) -> str:
    """The machine whose loops stand for the device's: its own, or ALIKE's."""
    return f"{ALIKE.get(device.sm, device.sm)}/{device.mma_fma_per_clk * device.mma_sync_share:.0f}"


@lru_cache(maxsize=8)
def rows(kernel: str) -> Rows:
    """Returns the rows of the newest compiler in the table.

    They serve any kernel sources, because an estimate must not jump while a kernel is edited.
    tests/benchmarks/test_cycles_command.py checks that the committed rows match the present sources.
    """
    versions = [version for version in table() if kernel in table()[version]]
    return table()[max(versions, key=_numbers)][kernel]["shares"] if versions else {}


@lru_cache(maxsize=4096)
def share(kernel: str, tile: str, loop: str, device: Device, blocks: int) -> float:
    """Returns the centre's share with this number of blocks on an SM.

    A device outside the table gets a related device's share. Without a simulated row, a loop with a prologue gets the share
    without it, and any other loop the kernel's lowest share, so that no tile wins by a missing simulation. Raises LookupError
    without any row.
    """
    for at in dict.fromkeys((loop, loop if loop == "linear" else "vectors")):
        for name in (machine_name(device), machine_name(relative(device))):
            if row := rows(kernel).get(tile, {}).get(at, {}).get(name):
                return row[1][min(blocks, len(row[1])) - 1]
    names = {machine_name(device), name := machine_name(relative(device))}
    others = [row[at][1][0] for loops in rows(kernel).values() for row in loops.values() for at in names & row.keys()]
    if not others:
        raise LookupError(f"{TABLE.name} has no share of {kernel} on {name}: python -m benchmarks.cycle_shares")
    return min(others)


def span(kernel: str, tile: str, loop: str, machine: str) -> Share | None:
    """Returns the lowest, centre and highest share with as many blocks as fit; None if the machine was not swept."""
    row = rows(kernel).get(tile, {}).get(loop, {}).get(machine)
    return Share(row[2][0], row[1][-1], row[2][1]) if row and len(row) > 2 else None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())
