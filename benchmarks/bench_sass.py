"""Machine code of our tensor-core kernels beside CUTLASS's and Triton's, through one assembler, with no GPU.

    python -m benchmarks.bench_sass [--sm sm_80] [--tiles 128x256x32] [--out out/sass.json]

For each architecture: what ptxas says (registers, blocks that fit an SM) and, from the emulator on one convolution, what a main
loop executes for each tensor-core instruction; all answers are compared, to the bit. Compiling what nvcc and Triton have not
compiled here before takes minutes, everything else seconds. What is not downloaded is left out, and said: make truth.
"""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.sass.kernels import DEVICES, KERNELS, Assembled, Kernel, assemble, cutlass, missing, selected, triton
from benchmarks.sass.runs import CHANNELS, DEPTHS, SIZE, TAPS, Counts, Ran, counts, operands, run
from cuda_kernels.files import write

NAME_WIDTH = 47


@dataclass(frozen=True, slots=True)
class Row:
    """A kernel on one architecture; `right`: whether its answers are the reference's, to the bit."""

    kernel: Kernel
    sm: str
    code: Assembled
    threads: int
    smem: int
    counts: Counts
    right: bool

    @property
    def blocks(self) -> int:
        return self.code.resident(DEVICES[self.sm], self.threads, self.smem)

    def record(self) -> dict[str, Any]:
        tile = {"m": self.kernel.tile.m, "n": self.kernel.tile.n, "k": self.kernel.tile.k, "stages": self.kernel.tile.stages}
        code = {"registers": self.code.regs, "spills": self.code.spills, "shared_memory": self.smem + self.code.static_smem}
        return {
            "kernel": str(self.kernel), "sm": self.sm, "tile": tile, "threads": self.threads, "blocks_per_sm": self.blocks,
            **code, "per_product": asdict(self.counts), "answers_equal": self.right,
        }  # fmt: skip


def compiled(kernels: list[Kernel]) -> None:
    """Compile what is not cached, two at a time."""
    if any(kernel.maker == "Triton" for kernel in kernels):
        triton()
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(cutlass, [kernel for kernel in kernels if kernel.maker == "CUTLASS"]))


def rows(kernel: Kernel, sms: list[str]) -> list[Row]:
    """A kernel on each architecture; the emulator runs others' PTX, which is one for all, once."""
    found, ran = [], dict[str, list[Ran]]()
    for sm in sms:
        key = sm if kernel.maker == "ours" else ""
        if key not in ran:
            ran[key] = [run(kernel, channels, sm=sm) for channels in DEPTHS]
        shallow, deep = ran[key]
        right = all(np.array_equal(r.answer.astype(np.float64), operands(c).y) for r, c in zip(ran[key], DEPTHS, strict=True))
        code = assemble(deep.ptx, sm)
        found.append(Row(kernel, sm, code, deep.threads, deep.smem, counts(shallow.stats, deep.stats), right))
    return found


HEADS = (("block", "KiB"), ("blocks", "per SM"), ("PTX", "instr."), ("", "loads"), ("", "copies"), ("shared", "bytes"),
         ("wave-", "fronts"), ("", "excess"))  # fmt: skip
HEADER = "\n".join([
    f"{'':<{NAME_WIDTH}}       " + " ".join(f"{above:>6}" for above, _ in HEADS),
    f"{'kernel':<{NAME_WIDTH}}  regs " + " ".join(f"{below:>6}" for _, below in HEADS) + "  answer",
])  # fmt: skip


def line(row: Row) -> str:
    c = row.counts
    blocks = str(row.blocks) if row.blocks else "none"
    return (f"{row.kernel!s:<{NAME_WIDTH}} {row.code.regs:>5} {row.smem / 1024:>6.0f} {blocks:>6} {c.instructions:>6.2f} "
            f"{c.loads:>6.3f} {c.copies:>6.3f} {c.shared_bytes:>6.0f} {c.wavefronts:>6.2f} {c.excess + c.excess_end:>6} "
            f" {'equal' if row.right else 'WRONG'}")  # fmt: skip


def side_by_side(found: list[Row], sm: str) -> str:
    """The table of one architecture."""
    device = DEVICES[sm]
    return "\n".join([f"\n{sm} ({device.title})", HEADER, *(line(row) for row in found if row.sm == sm)])


def present(kernels: list[Kernel]) -> list[Kernel]:
    """Those that can be had here; the others are said, with the reason."""
    why = {kernel: missing(kernel) for kernel in kernels}
    for reason in sorted({text for text in why.values() if text}):
        click.echo(f"left out: {', '.join(str(k) for k, text in why.items() if text == reason)}: {reason}")
    return [kernel for kernel, text in why.items() if not text]


def conditions() -> str:
    k = " and ".join(str(TAPS * TAPS * channels) for channels in DEPTHS)
    return (
        f"{TAPS}x{TAPS} convolution, {SIZE}x{SIZE} pixels to {CHANNELS} channels, K = {k}; instructions to wavefronts:\n"
        "what the deeper executes more, for each tensor-core instruction; excess: wavefronts that bank conflicts cost"
    )


@click.command(help=__doc__)
@click.option("--sm", "sms", multiple=True, type=click.Choice(list(DEVICES)), help="An architecture; all without it.")
@click.option("--tiles", multiple=True, metavar="MxNxK", help="Kernels with this tile only, as 128x256x32.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Write all figures there, as JSON.")
def main(sms: tuple[str, ...], tiles: tuple[str, ...], out: Path | None) -> None:
    try:
        kernels = present(selected(KERNELS, tiles))
    except ValueError as e:
        raise click.BadParameter(str(e), param_hint="--tiles") from None
    compiled(kernels)
    listed = [sm for sm in DEVICES if not sms or sm in sms]
    found = [row for kernel in kernels for row in rows(kernel, listed)]
    if found:
        click.echo("\n".join([conditions(), *(side_by_side(found, sm) for sm in listed)]))
    if out:
        write(out, json.dumps({"rows": [row.record() for row in found]}, indent=1).encode())
        click.echo(f"\nwritten: {out}")
    if any(not row.right for row in found):
        sys.exit(1)


if __name__ == "__main__":
    main()
