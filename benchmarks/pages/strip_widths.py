"""The widest images that a strip of each tile fits shared memory for, of 3x3 and 5x5 convolutions.

    python -m benchmarks.pages.strip_widths

A column for each size of shared memory: of a block on the architectures that are named. Two widths: of more than 64 channels,
for which two strips take turns, and of at most 64. Wider ones run as implicit GEMMs; `--verbose` says so.
"""

from itertools import count

import click

from benchmarks.bench_plan import markdown
from benchmarks.cycles import STRIPS, VECTORS
from cuda_kernels.device import NAMED, Device
from tactics.families.strips.geometry import tile_reason
from tactics.planner.grouping import grouped
from tactics.problems.problem import ConvProblem
from tactics.tactic import Tactic, Tile

TAPS = (3, 5)


def widest(kernel: str, tile: Tile, device: Device, channels: int, taps: int) -> int:
    """Returns the widest image for which a strip fits; 0 if none fits, or if the kernel's taps leave no room."""
    tactic, pad = Tactic(kernel, tile, (VECTORS,), VECTORS), (taps // 2,) * 4
    for w in count(1):
        p = ConvProblem(1, channels, 64, w, 64, taps, taps, pad=pad, sparse24=True)
        if tile_reason(p, tactic, device):
            return w - 1
    raise AssertionError("a strip fits any width")


def columns() -> dict[str, Device]:
    """Returns title -> a device with that size of shared memory."""
    found = sorted(grouped((device.smem_per_block, device) for device in NAMED.values()).items())
    return {f"{', '.join(dict.fromkeys(d.sm for d in of))} ({size >> 10} KiB)": of[0] for size, of in found}


@click.command(help=__doc__)
def main() -> None:
    devices = columns()
    rows = []
    for kernel, tiles in STRIPS.items():
        for tile in tiles:
            cells = [f"{kernel} {tile}"]
            for device in devices.values():
                for taps in TAPS:
                    many, few = (widest(kernel, tile, device, c, taps) for c in (128, 64))
                    cells.append(f"{many}, {few}" if few else "-")
            rows.append(cells)
    click.echo(markdown(["tile", *(f"{title}, {t}x{t}" for title in devices for t in TAPS)], rows))


if __name__ == "__main__":
    main()
