"""Write cuda_kernels/shares.json: the share of the tensor cores' peak of each main loop on each machine, simulated.

    python -m benchmarks.cycle_shares                       # loops that are missing or whose machine code changed
    python -m benchmarks.cycle_shares --sm sm_80 --print    # the table, nothing written
    python -m benchmarks.cycle_shares --loaded              # the shares with a loaded L2, nothing written

A row keeps a hash of its loop's machine code and of the machine: a kernel that changes elsewhere is compiled again, and not
simulated. Change no kernel while it runs. Rows of other versions of NVRTC stay. Registers, shared memory and the loop are those
of a convolution with bias and ReLU. Latencies that nobody has published are swept for vectors, on the machines of SWEPT, L2
idle.
"""

import hashlib
import json
import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass, replace

import click

from benchmarks import processes
from benchmarks.cycles import BYTES, KERNELS, LAYER, STRIPS, TILES, ours, tactic
from benchmarks.simulator.machine import CENTRE, LOADED, LOADED_SWEEP, SWEEP, Machine, Residency, interval, machine, residency
from benchmarks.simulator.sass import Instruction, ToolMissing
from benchmarks.simulator.simulate import share_of, steady_of
from cuda_kernels.compile import CompileError, nvrtc_version, source_hash
from cuda_kernels.device import NAMED, Device
from cuda_kernels.files import write
from cuda_kernels.shares import ALIKE, LOOPS, TABLE, machine_name, table
from tactics.families.conv_bytes import SOURCES, of_bytes
from tactics.families.conv_gemm import conv_smem, tile_reason
from tactics.families.strips import geometry
from tactics.format import HALF_FORMATS
from tactics.problems.prologue import Prologue
from tactics.step import linear
from tactics.tactic import Tactic, Tile

DIGITS = 3
PROCESSES = 2
SWEPT = ("sm_80/1024",)
SIMULATED = [device for device in NAMED.values() if device.sm not in ALIKE]
MACHINES = {machine_name(device): device for device in reversed(SIMULATED)}  # one device for each
ARCHITECTURES = tuple(dict.fromkeys(device.sm for device in SIMULATED))
PROLOGUES = {"scaled": Prologue(scaled=True), "gated": Prologue(gated=True), "normalized": Prologue(normalized=True)}
PLANES = next(f for f in HALF_FORMATS if linear(f))
LABEL = re.compile(r"\.L_\w+")


@dataclass(frozen=True, slots=True)
class Loop:
    """A loop of the table: a kernel's main loop with a tile and the compile-time values of LOOPS `name`."""

    kernel: str
    tile: Tile
    name: str

    @property
    def tactic(self) -> Tactic:
        vectors = tactic(self.kernel, self.tile)
        return replace(vectors, ins=(PLANES,)) if self.name == "linear" else vectors

    def fits(self, device: Device) -> bool:
        if self.kernel in STRIPS:
            return not geometry.tile_reason(LAYER, self.tactic, device)
        alone = self.kernel not in BYTES or of_bytes(device) == device
        return alone and not tile_reason(self.tactic, device, PROLOGUES.get(self.name, Prologue()))

    @property
    def machines(self) -> dict[str, Device]:
        """Returns name -> device for the machines on which the tile fits; of bytes without GeForce cards, which multiply them
        as workstation cards do.
        """
        return {name: device for name, device in MACHINES.items() if self.fits(device)}


def simulated(loop: Loop, sm: str, known: Mapping[str, list]) -> dict[str, list]:
    """Returns machine -> row for the machines of one architecture; `known`: rows by their hash, which need no simulation."""
    machines = {name: device for name, device in loop.machines.items() if device.sm == sm}
    if not machines:
        return {}
    code = ours(loop.kernel, loop.tile, sm, LOOPS[loop.name])
    once = code.program.iteration(code.program.main_loop)
    more = conv_smem(loop.tactic, PROLOGUES[loop.name]) - conv_smem(loop.tactic) if loop.name in PROLOGUES else 0
    rows = {}
    for name, device in machines.items():
        r = replace(residency(device, code.threads, code.registers, code.smem + more), limit="")
        at, swept = replace(machine(device), device=""), loop.name == "vectors" and name in SWEPT
        digest = _hash(once, r, *_figures(loop.kernel, at), swept)
        rows[name] = known.get(digest) or [digest, *_shares(loop, once, r, at, swept)]
    return rows


def _shares(loop: Loop, once: tuple[Instruction, ...], r: Residency, at: Machine, swept: bool) -> list[list[float]]:
    own = _own(loop, once, at)
    centre = [steady_of(once, replace(r, blocks=n), at).mma_share for n in range(1, r.blocks + 1)]
    rows = [[round(own * share, DIGITS) for share in centre]]
    if swept:
        span = share_of(once, r, at)
        rows.append([round(own * span.low, DIGITS), round(own * span.high, DIGITS)])
    return rows


def _own(loop: Loop, once: Sequence[Instruction], at: Machine) -> float:
    """Returns the share of the tensor cores' busy clocks in which they work on the tile: a norm's sums take 16 rows more, of
    dense products. ValueError if an iteration is no whole number of stages.
    """
    t, sparse = loop.tile, loop.tactic.sparse
    warps = t.threads // 32
    stage = t.m * t.n * t.k // warps // (16 * 8 * (32 if sparse else 16))
    sums = 16 * t.n * t.k // warps // (16 * 8 * 16) if loop.name == "normalized" else 0
    found = [interval(at, i) for i in once if i.mma]
    stages, rest = divmod(len(found), stage + sums)
    if rest or not stages:
        raise ValueError(f"{loop}: an iteration has {len(found)} products, expected {stage + sums} or several times as many")
    dense = [interval(at, i) for i in once if i.mma and ".SP." not in i.opcode]
    return 1 - (stages * sums * dense[0] / sum(found) if sums else 0)


def under_load(loop: Loop) -> dict[str, list[float]]:
    """Returns machine -> the factor by which each latency of LOADED changes the loop's share; on SWEPT machines also half of
    the sweep's range, in logarithms, with L2 idle and with these latencies.
    """
    found = {}
    for name, device in loop.machines.items():
        code, at = ours(loop.kernel, loop.tile, device.sm, LOOPS[loop.name]), machine(device)
        once, r = code.once, residency(device, code.threads, code.registers, code.smem)
        idle, *loaded = (steady_of(once, r, at, replace(CENTRE, l2_latency=n)).mma_share for n in (0, *LOADED))
        sweeps = ((), LOADED_SWEEP) if name in SWEPT else ()
        spans = [share_of(once, r, at, swept=(*SWEEP, *more)) for more in sweeps]
        found[name] = [*(x / idle - 1 for x in loaded), *(math.log(span.high / span.low) / 2 for span in spans)]
    return found


def load_table(of: Sequence[Mapping[str, list[float]]]) -> str:
    """Returns a table of the results of `under_load` for all loops, a line per machine."""
    lines = [f"{'machine':<12} loops" + "".join(f"  L2 at {n}: mean, least, most" for n in LOADED) + "  half of the range"]
    for name in MACHINES:
        columns = list(zip(*(found[name] for found in of if name in found), strict=True))
        moved = "".join(f"  {sum(x) / len(x):>+12.1%} {min(x):>+7.1%} {max(x):>+7.1%}" for x in columns[: len(LOADED)])
        halves = (f"{math.sqrt(sum(y * y for y in x) / len(x)):.2f}" for x in columns[len(LOADED) :])
        lines.append(f"{name:<12} {len(columns[0]):>5}{moved}  {', '.join(halves)}".rstrip())
    return "\n".join(lines)


def _hash(once: Sequence[Instruction], *rest: object) -> str:
    """Hashes the facts on which a row rests: the instructions, wherever they lie, warps and blocks, the machine and its
    sweep.
    """
    digest, first = hashlib.sha256(), once[0].address
    for i in once:
        operands = tuple(LABEL.sub("", text) for text in i.operands)
        digest.update(repr(replace(i, address=i.address - first, operands=operands, target=None)).encode())
    digest.update(repr((CENTRE, SWEEP, rest)).encode())
    return digest.hexdigest()[:8]


def _figures(kernel: str, at: Machine) -> tuple:
    """Returns the machine as hashes have it, for loops of bytes with their rate, which its text lacks."""
    return (at, at.bytes_per_clk) if kernel in BYTES else (at,)


def of_loop(loop: Loop, sms: Sequence[str], known: Mapping[str, list]) -> tuple[Loop, dict[str, list]]:
    """Returns (the loop, machine -> its row)."""
    rows: dict[str, list] = {}
    for sm in sms:  # the machine code of sm_86 and sm_89 is often the same, and so are their machines
        rows |= simulated(loop, sm, {row[0]: row for row in (*known.values(), *rows.values())})
    return loop, rows


def source(kernel: str) -> str:
    """Hashes the kernel's sources and the simulated machines."""
    figures = [(name, *_figures(kernel, machine(device))) for name, device in MACHINES.items()]
    return hashlib.sha256(repr((source_hash(SOURCES.get(kernel, kernel)), figures, CENTRE, SWEEP, SWEPT)).encode()).hexdigest()


def loops() -> Iterator[Loop]:
    """Yields all loops, the ones that most layers run first."""
    for name in LOOPS:
        for kernel, tiles in (KERNELS if name == "vectors" else TILES).items():
            for at in tiles:
                yield Loop(kernel, at, name)


def written(tables: Mapping[str, Mapping]) -> str:
    """Returns the tables as JSON, with a line for each loop of a tile."""
    versions = []
    for version, kernels in sorted(tables.items()):
        blocks = []
        for kernel, of in sorted(kernels.items()):
            tiles = []
            for at, rows in of["shares"].items():
                lines = ",\n".join(f"    {json.dumps(loop)}: {json.dumps(row, sort_keys=True)}" for loop, row in rows.items())
                tiles.append(f"   {json.dumps(at)}: {{\n{lines}\n   }}")
            head = f'  {json.dumps(kernel)}: {{"source": "{of["source"]}", "shares": {{'
            blocks.append("\n".join([head, ",\n".join(tiles), "  }}"]))
        versions.append(f" {json.dumps(version)}: {{\n" + ",\n".join(blocks) + "\n }")
    return "{\n" + ",\n".join(versions) + "\n}\n"


def in_order(rows: Mapping[Loop, Mapping[str, list]]) -> dict[str, dict]:
    """Returns {kernel: {tile: {loop: rows}}} in the order of the tiles, without empty ones."""
    tables: dict[str, dict] = {kernel: {} for kernel in KERNELS}
    for loop in loops():
        if rows.get(loop):
            tables[loop.kernel].setdefault(str(loop.tile), {})[loop.name] = rows[loop]
    return tables


def found(known: Mapping[str, Mapping]) -> Iterator[tuple[Loop, dict[str, list]]]:
    """Yields (loop, its rows) as they are simulated, by two processes: loops whose sources changed, and loops that lack a
    machine.
    """
    with processes.pool(PROCESSES) as pool:
        open_ones = [
            loop
            for loop in loops()
            if _known(known, loop).keys() != loop.machines.keys()
            or loop.machines
            and known[loop.kernel]["source"] != source(loop.kernel)
        ]
        futures = [pool.submit(of_loop, loop, ARCHITECTURES, _known(known, loop)) for loop in open_ones]
        try:
            for done in as_completed(futures):
                yield done.result()
        finally:
            pool.shutdown(cancel_futures=True)


def make(known: Mapping[str, Mapping], version: str, results: Iterable[tuple[Loop, dict[str, list]]]) -> int:
    """Writes the table after each loop that has changed, so that an interrupted run loses nothing and the next one goes on; a
    kernel's hash of sources is written last. Returns the number of loops that have rows.
    """
    rows, now = {loop: _known(known, loop) for loop in loops()}, {kernel: source(kernel) for kernel in KERNELS}

    def save(sources: Mapping[str, str]) -> None:
        kernels = {kernel: {"source": sources[kernel], "shares": of} for kernel, of in in_order(rows).items()}
        write(TABLE, written({**table(), version: kernels}).encode())

    before = {kernel: known.get(kernel, {}).get("source", "") for kernel in KERNELS}
    for loop, row in results:
        if row != rows[loop]:
            rows[loop] = row
            save(before)
    save(now)
    return sum(map(bool, rows.values()))


def _known(kernels: Mapping[str, Mapping], loop: Loop) -> dict[str, list]:
    return kernels.get(loop.kernel, {}).get("shares", {}).get(str(loop.tile), {}).get(loop.name, {})


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--sm", "sms", multiple=True, type=click.Choice(ARCHITECTURES), help="architectures; default: all")
@click.option("--print", "only_print", is_flag=True, help="print the table instead of writing it")
@click.option("--loaded", is_flag=True, help="print what a loaded L2 would make of FP16's loops of vectors; nothing is written")
def main(sms: tuple[str, ...], only_print: bool, loaded: bool) -> None:
    """Simulate the main loops of conv_dense and conv_sparse24, of FP16 and of bytes, and of strips."""
    if sms and not only_print:
        raise click.UsageError("--sm: expected with --print; the table that is written has all architectures")
    try:
        if loaded:
            plain = [x for x in loops() if x.name == "vectors" and x.kernel not in BYTES]
            with processes.pool(PROCESSES) as pool:
                return click.echo(load_table(list(pool.map(under_load, plain))))
        version = nvrtc_version()
        known = table().get(version, {})
        if only_print:
            for loop in loops():
                for name, (_, shares, *span) in of_loop(loop, sms or ARCHITECTURES, _known(known, loop))[1].items():
                    ranges = f" ({span[0][0]:.0%} to {span[0][1]:.0%})" if span else ""
                    listed = ", ".join(f"{share:.1%}" for share in shares)
                    click.echo(f"{loop.kernel:14} {loop.tile!s:20} {loop.name:10} {name:12} {listed}{ranges}")
            return
        click.echo(f"{TABLE.name}: {make(known, version, found(known))} loops for NVRTC {version}")
    except (CompileError, ToolMissing) as e:
        raise click.ClickException(str(e)) from None


if __name__ == "__main__":
    sys.exit(main())
