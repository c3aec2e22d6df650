"""Machine code of our tensor-core kernels beside CUTLASS's and Triton's, through one assembler, with no GPU.

    python -m benchmarks.bench_sass [--sm sm_80] [--tiles 128x256x32] [--out out/sass.json]
    python -m benchmarks.bench_sass --found

For each architecture two tables. The first has ptxas' numbers: registers, blocks that fit an SM. The second has the counts of a
main loop for each tensor-core instruction, from the emulator on one convolution, all answers compared to the bit; and the share
of the tensor cores' peak by benchmarks/simulator, its range and centre, with clocks of a tile. For sm_90a one table: ptxas'
numbers, and the main loop of the warps that multiply. Last the requirements, each with the value found and whether it is met,
without --sm and --tiles also against published times. --out: all of it and every point of the range as JSON. --found: the
requirements as benchmarks/sass/found.json has them, with nothing compiled or simulated.

Code that nvcc and Triton have not compiled here before takes 5 minutes on 2 idle cores, loops that were not simulated 5, the
rest half a minute. Kernels that are not downloaded are left out, with a message: make truth.
"""

import json
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.bench_predictions import by_device
from benchmarks.published_rows import FOLDER, read
from benchmarks.sass import hopper
from benchmarks.sass.clocks import Asked, Simulated, simulated, stage_clocks
from benchmarks.sass.kernels import (
    AMPERE,
    DEVICES,
    GEMMS,
    HOPPER,
    KERNELS,
    ON_HOPPER,
    Assembled,
    Kernel,
    assemble,
    cutlass,
    missing,
    selected,
    triton,
)
from benchmarks.sass.published import Timed
from benchmarks.sass.required import BESIDE, Requirement, against_cublas, beside, cube, listed
from benchmarks.sass.runs import CHANNELS, DEPTHS, SIZE, TAPS, Counts, Ran, counts, depths, operands, run
from benchmarks.simulator.sass import program
from cuda_kernels.compile import CompileError
from cuda_kernels.device import named
from cuda_kernels.emulator import EmulatorError
from cuda_kernels.files import fault, write

NAME_WIDTH = 47
FOUND = Path(__file__).parent / "sass" / "found.json"
DEEP = (576, 2304, 4608)  # the K for which the clocks of whole tiles are given


@dataclass(frozen=True, slots=True)
class Row:
    """A kernel on one architecture; `right`: whether its outputs equal the reference's in every bit."""

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

    @property
    def asked(self) -> Asked:
        if self.sm not in HOPPER:
            return Asked(self.code.cubin, DEVICES[self.sm].name, self.threads // 32, self.blocks)
        warps, ring = hopper.consumers(self.kernel, self.code, self.threads, self.smem)
        return Asked(self.code.cubin, DEVICES[self.sm].name, warps, self.blocks, ring=ring)

    @property
    def instructions(self) -> float:
        """Returns the instructions of a main loop's iteration for each tensor-core instruction."""
        code = program(self.code.cubin)
        path = code.iteration(code.main_loop)
        return len(path) / sum(i.mma for i in path)

    def tile_clocks(self, found: Simulated, k: int) -> float:
        """Returns the clocks of a tile with depth `k` on a full SM, at the centre of the sweep."""
        tile, device = self.kernel.tile, DEVICES[self.sm]
        return found.once + -(-k // tile.k) * stage_clocks(tile, self.kernel.sparse, found.centre, self.blocks, device)

    def record(self, found: Simulated | None) -> dict[str, Any]:
        tile = {"m": self.kernel.tile.m, "n": self.kernel.tile.n, "k": self.kernel.tile.k, "stages": self.kernel.tile.stages}
        code = {"registers": self.code.regs, "spills": self.code.spills, "shared_memory": self.smem + self.code.static_smem}
        share = found and dict(centre=found.centre, low=found.low, high=found.high, points=found.shares, shifted=found.shifted)
        clocks = found and self.sm not in HOPPER and {str(k): self.tile_clocks(found, k) for k in DEEP}
        more = hopper.record(self.code, self.asked.ring) if self.sm in HOPPER else {}
        return {
            "kernel": str(self.kernel),
            "sm": self.sm,
            "tile": tile,
            "threads": self.threads,
            "blocks_per_sm": self.blocks,
            **code,
            "per_product": asdict(self.counts),
            "machine_instructions_per_product": self.instructions,
            "answers_equal": self.right,
            "share_of_peak": share,
            "tile_clocks": clocks or None,
            **more,
        }


def compiled(kernels: list[Kernel]) -> None:
    """Compiles the kernels that are not cached, two at a time."""
    if any(kernel.maker == "Triton" for kernel in kernels):
        triton()
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(cutlass, [kernel for kernel in kernels if kernel.maker == "CUTLASS"]))


def rows(kernel: Kernel, sms: list[str]) -> list[Row]:
    """Returns a kernel's row on each architecture. The emulator runs the PTX of others' kernels, which is the same for all,
    once. ClickException if it fails.
    """
    found, ran = [], dict[str, list[Ran]]()
    for sm in sms:
        key = sm if kernel.maker == "ours" else ""
        if key not in ran:
            try:
                ran[key] = [run(kernel, channels, sm=sm) for channels in depths(kernel)]
            except (CompileError, EmulatorError, RuntimeError) as e:
                raise click.ClickException(f"{kernel} for {sm}: {e}") from None
        shallow, deep = ran[key]
        answers = zip(ran[key], depths(kernel), strict=True)
        right = all(np.array_equal(r.answer.astype(np.float64), operands(c).y) for r, c in answers)
        code = assemble(deep.ptx, sm, deep.entry if sm in HOPPER else "")
        found.append(Row(kernel, sm, code, deep.threads, deep.smem, counts(shallow.stats, deep.stats), right))
    return found


def simulations(found: list[Row]) -> dict[Row, Simulated]:
    """Simulates the rows whose kernel fits an SM."""
    fitting = [row for row in found if row.blocks]
    return dict(zip(fitting, simulated([row.asked for row in fitting]), strict=True))


def timed(kernels: list[Kernel], sm: str) -> list[Timed]:
    """Simulates CUTLASS's tiles with each number of blocks that an SM holds, at the centre of the sweep."""
    device, asked, where = DEVICES[sm], list[Asked](), list[tuple[Kernel, int]]()
    for kernel in kernels:
        ran = run(kernel, DEPTHS[0])
        code = assemble(ran.ptx, sm)
        for blocks in range(1, code.resident(device, ran.threads, ran.smem) + 1):
            asked.append(Asked(code.cubin, device.name, ran.threads // 32, blocks, every_point=False))
            where.append((kernel, blocks))
    clocks: dict[Kernel, list[tuple[float, float]]] = {}
    for (kernel, blocks), found in zip(where, simulated(asked), strict=True):
        stage = stage_clocks(kernel.tile, kernel.sparse, found.centre, blocks, device)
        clocks.setdefault(kernel, []).append((stage, found.once))
    return [Timed(kernel.tile, kernel.sparse, *map(tuple, zip(*of, strict=True))) for kernel, of in clocks.items()]


# fmt: off
HEADS = (("block", "KiB"), ("blocks", "per SM"), ("PTX", "instr."), ("", "loads"), ("", "copies"), ("shared", "bytes"),
         ("wave-", "fronts"), ("", "excess"))
# fmt: on
HEADER = "\n".join(
    [
        f"{'':<{NAME_WIDTH}}       " + " ".join(f"{above:>6}" for above, _ in HEADS),
        f"{'kernel':<{NAME_WIDTH}}  regs " + " ".join(f"{below:>6}" for _, below in HEADS) + "  answer",
    ]
)


def line(row: Row) -> str:
    c = row.counts
    blocks = str(row.blocks) if row.blocks else "none"
    return (
        f"{row.kernel!s:<{NAME_WIDTH}} {row.code.regs:>5} {row.smem / 1024:>6.0f} {blocks:>6} {c.instructions:>6.2f} "
        f"{c.loads:>6.3f} {c.copies:>6.3f} {c.shared_bytes:>6.0f} {c.wavefronts:>6.2f} {c.excess + c.excess_end:>6} "
        f" {'equal' if row.right else 'WRONG'}"
    )


def share_line(row: Row, found: Simulated | None) -> str:
    if found is None:
        return f"{row.kernel!s:<{NAME_WIDTH}} does not fit an SM"
    clocks = " ".join(f"{row.tile_clocks(found, k):>7.0f}" for k in DEEP)
    return (
        f"{row.kernel!s:<{NAME_WIDTH}} {row.instructions:>7.2f} {found.low:>7.1%} {found.centre:>7.1%} {found.high:>7.1%} "
        f"{clocks}"
    )


SHARES = "\n".join(
    [
        f"{'':<{NAME_WIDTH}}   SASS  share of the tensor peak  clocks of a tile, K =",
        f"{'kernel':<{NAME_WIDTH}}  instr.     low  centre    high " + " ".join(f"{k:>7}" for k in DEEP),
    ]
)


def shares(found: list[Row], at: dict[Row, Simulated], sm: str) -> str:
    return "\n".join(["", SHARES, *(share_line(row, at.get(row)) for row in found if row.sm == sm)])


def side_by_side(found: list[Row], sm: str) -> str:
    """Returns the table of one architecture."""
    device = DEVICES[sm]
    return "\n".join([f"\n{sm} ({device.title})", HEADER, *(line(row) for row in found if row.sm == sm)])


def present(kernels: list[Kernel]) -> list[Kernel]:
    """Returns the kernels that can be had here; prints the reason for each of the others."""
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


def measured() -> list[Requirement]:
    """Returns the requirements beside measured and published times, which need all of CUTLASS's tiles; [] if some cannot be
    had.
    """
    if missing(GEMMS[0]):
        return []
    compiled(list(GEMMS))
    dense = {sm: timed(list(GEMMS), sm) for sm in ("sm_80", "sm_89")}
    found = list(cube(dense["sm_80"], timed([k for k in KERNELS if k.maker == "CUTLASS" and k.sparse], "sm_80")))
    judged = by_device([row for row in read(FOLDER)[0] if row.judged], "gemm")
    for name, tiles in (("a100", dense["sm_80"]), ("l40s", dense["sm_89"])):
        found += against_cublas(named(name), tiles, judged[name])
    return found


def last() -> list[Requirement]:
    """Returns the requirements as benchmarks/sass/found.json records them: ours beside CUTLASS's at every point that it holds,
    the others as they were found.
    """
    kept = json.loads(FOUND.read_text())
    kernels = {str(kernel): kernel for kernel in (*KERNELS, *ON_HOPPER)}
    fitting = [((kernels[r["kernel"]], r["sm"]), of) for r in kept["rows"] if (of := r["share_of_peak"])]
    shares = {key: Simulated(tuple(of["points"]), shifted=tuple(map(tuple, of["shifted"]))) for key, of in fitting}
    return [*beside(shares), *(Requirement(**r) for r in kept["requirements"] if r["kind"] != BESIDE)]


@click.command(help=__doc__)
@click.option("--sm", "sms", multiple=True, type=click.Choice(list(DEVICES)), help="An architecture; all without it.")
@click.option("--tiles", multiple=True, metavar="MxNxK", help="Kernels with this tile only, as 128x256x32.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Write all figures there, as JSON.")
@click.option("--found", "kept", is_flag=True, help="Print what was required and found when that was last written down.")
def main(sms: tuple[str, ...], tiles: tuple[str, ...], out: Path | None, kept: bool) -> None:
    if kept:
        click.echo(listed(last()).lstrip())
        click.echo(hopper.table([r for r in json.loads(FOUND.read_text())["rows"] if r["sm"] in HOPPER]))
        return
    if out and (wrong := fault(out, make_folders=True)):
        raise click.BadParameter(f"{out}: {wrong}", param_hint="--out")
    try:
        wanted = [kernel for kernel in (*KERNELS, *ON_HOPPER) if not sms or set(sms) & set(kernel.sms)]
        kernels = present(selected(wanted, tiles))
    except ValueError as e:
        raise click.BadParameter(str(e), param_hint="--tiles") from None
    if not kernels:
        return
    compiled(kernels)
    shown = [sm for sm in DEVICES if sm in sms or not sms]
    found = [row for kernel in kernels for row in rows(kernel, [sm for sm in shown if sm in kernel.sms])]
    at = simulations(found)
    tables = [f"{side_by_side(found, sm)}\n{shares(found, at, sm)}" for sm in shown if sm in AMPERE]
    click.echo("\n".join([conditions(), *tables]))
    if on_hopper := [row.record(at.get(row)) for row in found if row.sm in HOPPER]:
        click.echo(hopper.table(on_hopper))
    required = [*beside({(row.kernel, row.sm): s for row, s in at.items()}), *(() if tiles or sms else measured())]
    click.echo(listed(required))
    if out:
        records = {"rows": [row.record(at.get(row)) for row in found], "requirements": [asdict(r) for r in required]}
        lines = re.sub(r"\[\s+([-\d][^][{}]*?)\s+\]", lambda m: f"[{' '.join(m[1].split())}]", json.dumps(records, indent=1))
        write(out, f"{lines}\n".encode())  # numbers of a list in one line
        click.echo(f"\nwritten: {out}")
    if not all(row.right for row in found):
        sys.exit(1)


if __name__ == "__main__":
    main()
