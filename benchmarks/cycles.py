"""Where a kernel's main loop waits, by a simulation of its machine code (benchmarks/simulator, docs/cycles.md).

    python -m benchmarks.cycles conv_dense 128x256x32 --sm sm_80
    python -m benchmarks.cycles conv_sparse24 256x128x64_w4x2_s3 --device rtx4090 --brief
    python -m benchmarks.cycles conv_strip_sparse24 128x256x64 -D COPIES=1     # pixels of a strip that a thread copies per turn
    python -m benchmarks.cycles conv_dense 128x128x32_w2x4_s4 -D GATE=1        # another compile-time value
    python -m benchmarks.cycles conv_dense_int8 128x256x32 --device l4         # of whole numbers of 8 bits, 2 * 32 channels
    python -m benchmarks.cycles conv_dense_sm90 128x256x64_w8x1_s4             # Hopper's asynchronous products
    python -m benchmarks.cycles conv_sparse24_sm90 128x224x64_w8x1_s7_b1x14x16 # the same of a strip
    python -m benchmarks.cycles out/gemm.cubin --threads 256 --smem 73728      # any cubin

Prints one iteration of the loop: when a warp issues each instruction, how long it waited before and the reason, in Nsight
Compute's words; then the share of the tensor cores' peak, over the figures that are not published about the hardware.
"""

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path

import click

from benchmarks.simulator.machine import (
    BULK_SOURCES,
    BULK_SWEPT,
    CENTRE,
    LOADED,
    LOADED_SOURCE,
    SHIFTED,
    SOURCES,
    SWEEP_SOURCES,
    SWEPT,
    Bulk,
    Machine,
    Residency,
    Sweep,
    device_of,
    machine,
    residency,
)
from benchmarks.simulator.sass import GMMA, Instruction, Program, ToolMissing, program
from benchmarks.simulator.simulate import Steady, points_of, steady, tile_clocks
from benchmarks.simulator.state import REASONS
from benchmarks.simulator.steps import GROUP_WARPS
from benchmarks.simulator.warpgroups import Ring, ring
from cuda_kernels.compile import CompileError, compile_kernel
from cuda_kernels.device import Device, named
from gpu_runtime.commands.options import argument, flag, gathered
from tactics.families import conv_bytes
from tactics.families.hopper import conv_wgmma, ends
from tactics.format import HALF_FORMATS, Format
from tactics.kernels import KERNELS as EVERY_KERNEL
from tactics.launches import launches
from tactics.planner.grouping import grouped
from tactics.problems.epilogue import Activation, Epilogue
from tactics.problems.problem import ConvProblem
from tactics.step import Launch
from tactics.tactic import Tactic, Tile
from tactics.tiles import DENSE_TILES, SPARSE_TILES, STRIP_DENSE_TILES, STRIP_SPARSE_TILES

TILES = {"conv_dense": DENSE_TILES, "conv_sparse24": SPARSE_TILES}
STRIPS = {"conv_strip": STRIP_DENSE_TILES, "conv_strip_sparse24": STRIP_SPARSE_TILES}
BYTES = {kernel: TILES[source] for kernel, source in conv_bytes.SOURCES.items()}
KERNELS = TILES | STRIPS | BYTES
HOPPER = conv_wgmma.TILES
NAME = re.compile(r"(\d+)x(\d+)x(\d+)_w(\d+)x(\d+)_s(\d+)")  # of kernels without clusters
LAYER = ConvProblem(
    32, 256, 14, 14, 256, 3, 3, pad=(1, 1, 1, 1), sparse24=True, epilogue=Epilogue(bias=True, act=Activation("relu"))
)
VECTORS = next(f for f in HALF_FORMATS if f.layout == "hwc8")
WIDTH = 120
PIPE = "math pipe throttle"
FEW = 10  # instructions at which warps wait longest, of the summary


@dataclass(frozen=True, slots=True)
class Code:
    """A kernel's machine code, and the resources of its block. `multiplying`: the warpgroups that multiply at a time while
    others copy, or multiply another tile in turn (ping-pong); 0: all. `drawn`: the bytes of a TMA stage that the SM draws from
    L2, if fewer than it holds. `stages`: the number of TMA's stages, if known; else it follows from the products that read one.
    """

    title: str
    program: Program
    threads: int
    registers: int
    smem: int
    multiplying: int = 0
    drawn: int = 0
    stages: Ring | None = None

    @property
    def warpgroups(self) -> int:
        """Returns the number of warpgroups that multiply: all but one if TMA copies for a loop that waits for mbarriers."""
        produced = ring(self.once, 1, 1 << 30) is not None
        return self.multiplying or self.threads // 32 // GROUP_WARPS - produced

    @property
    def once(self) -> tuple[Instruction, ...]:
        return self.program.iteration(self.program.main_loop)

    @property
    def ring(self) -> Ring | None:
        if self.stages:
            return replace(self.stages, drawn=self.drawn or self.stages.drawn)
        return ring(self.once, self.warpgroups, self.smem, self.drawn)

    @property
    def k64(self) -> float:
        """Returns how many times 64 of K an iteration multiplies, for all rows and pixels of a warpgroup."""
        products = [(i.operands[0], int(m["k"])) for i in self.once if (m := GMMA.match(i.opcode))]
        return sum(k for _, k in products) / len({sums for sums, _ in products}) / 64

    def simulated(self, r: Residency) -> Residency:
        """Returns the residency without the warps that copy."""
        return replace(r, warps=GROUP_WARPS * self.warpgroups) if self.ring else r


def tile(kernel: str, text: str) -> Tile:
    """Returns the kernel's tile whose name is, or begins with, `text`; strips are among them. click.UsageError for others."""
    if kernel in HOPPER:
        with suppress(ValueError):
            return Tactic.parse(f"{kernel}_{EVERY_KERNEL[kernel].mark}_{text}__fp16.hwc8_fp16.hwc8").gemm
    if found := NAME.fullmatch(text):
        m, n, k, warps_m, warps_n, stages = map(int, found.groups())
        return Tile(m, n, k, warps_m, warps_n, stages)
    tiles = (KERNELS | HOPPER)[kernel]
    begun = [t for t in tiles if str(t) == text or str(t).startswith(f"{text}_")]
    if len(begun) == 1:
        return begun[0]
    names = ", ".join(map(str, begun or tiles))
    raise click.UsageError(
        f"tile {text!r}: {'several begin so' if begun else f'{kernel} has no such tile'}; expected one of {names}"
    )


def tactic(kernel: str, at: Tile) -> Tactic:
    vectors = Format("int8", "hwc16") if kernel in BYTES else VECTORS
    return Tactic(kernel, at, (vectors,), vectors)


def ours(kernel: str, at: Tile, sm: str, defined: Mapping[str, int], layer: ConvProblem = LAYER) -> Code:
    """Returns our kernel's code as it is launched for a layer, a 3x3 convolution with bias and ReLU, that of bytes with their
    own epilogue; `defined`: compile-time values that replace the usual ones.
    """
    end = conv_bytes.QUANTIZED if kernel in BYTES else layer.epilogue
    (launch,) = launches(replace(layer, epilogue=end), tactic(kernel, at))
    if not isinstance(launch, Launch):
        raise TypeError(f"{kernel} is a library's function: expected a kernel")
    values: dict[str, int | str] = {**dict(launch.values), **defined}
    compiled = compile_kernel(launch.kernel, values, sm)
    extra = "".join(f" {name}={value}" for name, value in defined.items())
    code = program(compiled.cubin, launch.kernel)
    smem = launch.smem + compiled.static_smem
    stages = None
    if kernel in HOPPER:
        held = ends.stage_bytes(at, EVERY_KERNEL[kernel].sparse)
        stages = Ring(held, from_l2(kernel, at), int(values["STAGES"]))
    return Code(f"{kernel} {at}{extra}", code, launch.block[0], compiled.regs, smem, int(at.pingpong), stages=stages)


def from_l2(kernel: str, at: Tile) -> int:
    """Returns the bytes of a stage that one SM draws from L2: if a cluster's blocks share an operand, each copies a part of
    it.
    """
    if kernel not in HOPPER:
        return 0
    along, across, _ = at.cluster
    pixels = ends.stage_bytes(at, True)  # weights in registers are loads of the warps that multiply
    return pixels // along + (ends.stage_bytes(at, EVERY_KERNEL[kernel].sparse) - pixels) // across


def listing(found: Steady) -> str:
    """Returns one iteration, a line per instruction."""
    lines = [f"{'address':>7} {'issued':>7} {'waited':>7}  {'for':27} instruction"]
    for i, issued, waited in zip(found.instructions, found.issued_at, found.waited, strict=True):
        clocks = sum(waited.values())
        reason = max(waited, key=lambda name: waited[name]) if clocks >= 1 else ""
        many = " and more" if reason and waited[reason] < 0.9 * clocks else ""
        shown = f"{clocks:7.0f}" if clocks >= 1 else " " * 7
        lines.append(f"{i.address:7x} {issued:7.0f} {shown}  {reason + many:27} {i}"[:WIDTH].rstrip())
    return "\n".join(lines)


def summary(found: Steady, r: Residency, at: Machine, code: Code) -> str:
    per_warp = dict.fromkeys(REASONS, 0.0)
    for _, waited in rows(found):
        for name, clocks in waited.items():
            per_warp[name] += clocks
    mma = sum(i.mma for i in found.instructions)
    blocks = "1 block" if r.blocks == 1 else f"{r.blocks} blocks"
    lines = [
        f"{code.title} on {at.device}",
        f"{blocks} of {r.warps} warps on an SM, limited by {r.limit}: {code.registers} registers a thread, "
        f"{code.smem} bytes of shared memory",
        *asynchronous(code),
        f"One iteration of a warp: {len(found.instructions)} instructions, {mma} products. Of all warps of an SM: "
        f"{found.clocks_per_stage:.0f} clocks",
        f"Busy: tensor cores {found.mma_share:.1%}, port of shared memory {found.port_share:.1%}, issue slots "
        f"{found.issue_share:.1%}",
        *([f"64 of K of a tile: {found.clocks_per_stage / code.k64:.0f} clocks"] if code.ring else []),
        "Clocks that a warp waits: " + (", ".join(f"{name} {x:.0f}" for name, x in per_warp.items() if x >= 1) or "none"),
        "Longest at, but for products that wait for products:",
    ]
    waits = [{name: x for name, x in waited.items() if not (i.mma and name == PIPE)} for i, waited in rows(found)]
    for i, waited in sorted(zip(found.instructions, waits, strict=True), key=lambda row: -sum(row[1].values()))[:FEW]:
        if why := ", ".join(f"{name} {x:.0f}" for name, x in sorted(waited.items(), key=lambda x: -x[1]) if x >= 1):
            lines.append(f"  {i.address:5x} {str(i)[:56]:56} {why}"[:WIDTH])
    return "\n".join(lines)


def asynchronous(code: Code) -> Iterator[str]:
    """Yields lines about the waits of a warpgroup."""
    if pending := [i.pending for i in code.once if i.pending is not None]:
        many = "1 warpgroup multiplies" if code.warpgroups == 1 else f"{code.warpgroups} warpgroups multiply"
        yield f"{many}; groups of products in flight behind the shortest wait: {min(pending)}"
    if code.ring:
        filled = (
            f"TMA fills {code.ring.stages} stages of {code.ring.held} bytes, this SM draws {code.ring.drawn} of them from L2"
        )
        yield f"{filled}; the warps that copy are not simulated"


def rows(found: Steady) -> Iterator[tuple[Instruction, Mapping[str, float]]]:
    return zip(found.instructions, found.waited, strict=True)


def ranges(code: Code, r: Residency, at: Machine, centre: float) -> str:
    """Describes the share over the sweep: its whole range, and its mean for each value of each parameter."""
    points = points_of(code.once)
    shares = {point: steady(code.program, r, at, point, ring=code.ring).mma_share for point in points}
    shifted = {of[0].l2_latency: [steady(code.program, r, at, p, ring=code.ring).mma_share for p in of] for of in SHIFTED}
    every = [centre, *shares.values()]
    lines = [
        f"Share of the tensor cores' peak: {centre:.0%} (from {min(every):.0%} to {max(every):.0%} over {len(points)} points)"
    ]
    if any("HGMMA.SP" in i.opcode for i in code.once):
        lines.append(f"  of the dense peak: {2 * centre:.2f} (from {2 * min(every):.2f} to {2 * max(every):.2f})")
    plain, bulk = ({p: x for p, x in shares.items() if (p.bulk == CENTRE.bulk) == alike} for alike in (True, False))
    named_ones = [field.name for field in fields(Sweep) if field.name not in ("bulk", "shift")]
    lines += [means(name, plain, lambda p: replace(p, l2_latency=p.l2_latency or at.l2_latency)) for name in named_ones]
    lines += [means(field.name, bulk, lambda p: p.bulk) for field in fields(Bulk) if bulk]
    noise = (f"{n or at.l2_latency} {min(x):.1%} to {max(x):.1%}" for n, x in shifted.items())
    lines.append(f"  noise where warps start otherwise, by l2_latency: {', '.join(noise)}")
    return "\n".join(lines)


def means(name: str, shares: Mapping[Sweep, float], part: Callable[[Sweep], Sweep | Bulk]) -> str:
    """Returns a line with the mean share for each value of a figure."""
    of = grouped((getattr(part(point), name), share) for point, share in shares.items())
    return f"  {name}: " + ", ".join(f"{value} {sum(x) / len(x):.0%}" for value, x in of.items())


def sourced(at: Machine) -> str:
    """Returns a Markdown table of the figures and their sources."""
    rows = [(f"`{name}`", str(getattr(at, name)), source) for name, source in SOURCES.items() if name != "device"]
    rows += [(f"`{name}`", " or ".join(map(_shown, values)), SWEEP_SOURCES[name]) for name, values in SWEPT.items()]
    rows.append(("`l2_latency`, loaded", " or ".join(map(str, (at.l2_latency, *LOADED))), LOADED_SOURCE))
    if at.device == machine(device_of("sm_90a")).device:
        rows += [(f"`{name}`", " or ".join(map(_shown, values)), BULK_SOURCES[name]) for name, values in BULK_SWEPT.items()]
    lines = [f"| {' | '.join(row)} |" for row in (("figure", f"on an {at.device}", "source"), ("---", "--:", "---"), *rows)]
    return "\n".join(lines)


def _shown(value: object) -> str:
    return f"{value[0]} and {value[1]}" if isinstance(value, tuple) else str(value)


@dataclass(frozen=True, slots=True)
class Asked:
    """The arguments and options of `main`."""

    kernel: str = argument(default="")
    tile_name: str = argument(metavar="[TILE]", default="")
    sm: str | None = flag(
        "--sm", help="architecture, at its full rate of products; sm_80 without it, sm_90a for Hopper's kernels"
    )
    device: str | None = flag("--device", help="a named device, such as rtx4090, instead of an architecture")
    defined: tuple[str, ...] = flag("-D", multiple=True, metavar="NAME=VALUE", help="compile-time value")
    function: str = flag("--function", default="", help="of a cubin: its kernel; otherwise the one with most products")
    threads: int | None = flag("--threads", type=int, help="of a cubin: threads of a block")
    smem: int = flag("--smem", type=int, default=0, help="of a cubin: bytes of shared memory of a block")
    registers: int | None = flag("--registers", type=int, help="of a cubin: registers of a thread, if not those that it names")
    blocks: int | None = flag("--blocks", type=int, help="blocks on an SM, if fewer than fit")
    warpgroups: int = flag("--warpgroups", type=int, default=0, help="that multiply at a time; all but one where TMA copies")
    drawn: int = flag(
        "--drawn", type=int, default=0, help="bytes of a stage of TMA's that this SM draws from L2, if a cluster shares it"
    )
    stages: int | None = flag(
        "--stages", type=int, help="also the clocks of a whole tile, of so many iterations of the main loop"
    )
    brief: bool = flag("--brief", is_flag=True, help="without the listing and the sweep")
    figures: bool = flag("--figures", is_flag=True, help="what the simulated SM is, with sources, and nothing else")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@gathered(Asked)
def main(asked: Asked) -> None:
    """Simulate KERNEL's main loop: conv_dense, conv_sparse24, conv_strip, conv_strip_sparse24, of bytes conv_dense_int8,
    conv_sparse24_int8, or Hopper's conv_dense_sm90 or conv_sparse24_sm90, with a TILE, or a file that ends in .cubin."""
    try:
        on = (
            named(asked.device)
            if asked.device
            else device_of(asked.sm or (EVERY_KERNEL[asked.kernel].sm if asked.kernel in HOPPER else "sm_80"))
        )
        if asked.figures:
            return click.echo(sourced(machine(on)))
        if asked.kernel.endswith(".cubin"):
            code = _file(Path(asked.kernel), asked.function, asked.threads, asked.smem, asked.registers)
        elif asked.kernel in KERNELS | HOPPER:
            code = ours(asked.kernel, tile(asked.kernel, asked.tile_name), on.sm, dict(_values(asked.defined)))
        else:
            raise click.UsageError(
                f"kernel {asked.kernel!r}: expected {', '.join(KERNELS | HOPPER)} or a file that ends in .cubin"
            )
        changed = replace(code, multiplying=asked.warpgroups or code.multiplying, drawn=asked.drawn or code.drawn)
        show(changed, on, asked.blocks, asked.stages, asked.brief)
    except (ValueError, CompileError, ToolMissing, OSError) as e:
        raise click.ClickException(str(e)) from None


def show(code: Code, device: Device, blocks: int | None, stages: int | None, brief: bool) -> None:
    at = machine(device)
    fit = residency(device, code.threads, code.registers, code.smem)
    if blocks is not None and not 1 <= blocks <= fit.blocks:
        raise click.UsageError(f"--blocks {blocks}: expected 1 to {fit.blocks}, which fit an SM of {device.title}")
    r = code.simulated(Residency(fit.warps, blocks, "--blocks") if blocks else fit)
    if stages is not None and code.ring:
        raise click.UsageError("--stages: expected without TMA, whose warps are not simulated, nor what is around their loop")
    found = steady(code.program, r, at, CENTRE, ring=code.ring)
    if not brief:
        click.echo(listing(found) + "\n")
    click.echo(summary(found, r, at, code))
    if stages is not None:
        clocks = tile_clocks(code.program, stages, r, at)
        loop = found.clocks_per_stage * stages
        click.echo(f"Tiles of {stages} stages: about {clocks} clocks, {loop:.0f} of them for the steady state")
    if not brief:
        click.echo(ranges(code, r, at, found.mma_share))


def _file(path: Path, function: str, threads: int | None, smem: int, registers: int | None) -> Code:
    if threads is None:
        raise click.UsageError(f"{path.name}: expected --threads, how many a block has; the cubin does not say")
    found = program(path.read_bytes(), function)
    held = registers or min(found.registers, 65536 // threads // 8 * 8)  # more than those by setmaxnreg
    return Code(f"{path.name} {found.name[:60]}", found, threads, held, smem)


def _values(defined: tuple[str, ...]) -> list[tuple[str, int]]:
    found = [re.fullmatch(r"(\w+)=(\d+)", text) for text in defined]
    if None in found:
        raise click.UsageError(f"-D {defined[found.index(None)]}: expected NAME=VALUE with a whole number, such as GATE=1")
    return [(m[1], int(m[2])) for m in found if m]


if __name__ == "__main__":
    sys.exit(main())
