"""Write cuda_kernels/cycles/shares.json: the share of the tensor cores' peak of each tile on each architecture, simulated.

    python -m benchmarks.cycle_shares                       # what is missing or of other sources: a quarter of an hour
    python -m benchmarks.cycle_shares --sm sm_80 --print    # the table, nothing written

Change no kernel while it runs. Rows of other versions of NVRTC stay. What a kernel takes of an SM, and its loop, are of a 3x3
convolution with bias and ReLU.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import product

import click

from benchmarks.cycles import TILES, ours
from cuda_kernels.compile import CompileError, nvrtc_version, source_hash
from cuda_kernels.cycles.machine import Machine, Residency, device_of, machine, residency
from cuda_kernels.cycles.sass import Instruction, ToolMissing
from cuda_kernels.cycles.shares import TABLE, table
from cuda_kernels.cycles.simulate import Share, share_of
from cuda_kernels.device import ARCHITECTURES
from cuda_kernels.files import write
from tactics.tactic import Tile

DIGITS = 3


def simulated(kernel: str, at: Tile, sm: str) -> Share | None:
    """None where no block fits."""
    device = device_of(sm)
    code = ours(kernel, at, sm, {})
    if code.smem > device.smem_per_block:
        return None
    once = code.program.iteration(code.program.main_loop)
    r = residency(device, code.threads, code.registers, code.smem)
    return _share(once, replace(r, limit=""), replace(machine(device), device=""))


@lru_cache(maxsize=256)
def _share(once: tuple[Instruction, ...], r: Residency, at: Machine) -> Share:
    """Machine code for sm_86 and sm_89 is often the same."""
    return share_of(once, r, at)


def begun(known: Mapping[str, Mapping]) -> dict[str, dict]:
    """A table of each kernel, with the tiles that there are and the rows of `known` that are of the present sources."""
    found: dict[str, dict] = {}
    for kernel, tiles in TILES.items():
        old, source = known.get(kernel), source_hash(kernel)
        rows = old["shares"] if old and old["source"] == source else {}
        found[kernel] = {"source": source, "shares": {str(at): dict(rows[str(at)]) for at in tiles if str(at) in rows}}
    return found


def rows(sms: tuple[str, ...], known: Mapping[str, Mapping]) -> Iterator[tuple[str, str, str, list[float]]]:
    """(kernel, tile, architecture, [low, centre, high]), those of `known` as they stand there."""
    for sm, (kernel, tiles) in product(sms, TILES.items()):
        for at in tiles:
            if found := known[kernel]["shares"].get(str(at), {}).get(sm):
                yield kernel, str(at), sm, found
            elif share := simulated(kernel, at, sm):
                yield kernel, str(at), sm, [round(x, DIGITS) for x in (share.low, share.centre, share.high)]


def written(tables: Mapping[str, Mapping]) -> str:
    """JSON with a line for each tile."""
    versions = []
    for version, kernels in sorted(tables.items()):
        blocks = []
        for kernel, of in sorted(kernels.items()):
            lines = ",\n".join(f"   {json.dumps(at)}: {json.dumps(row, sort_keys=True)}" for at, row in of["shares"].items())
            blocks.append(f'  {json.dumps(kernel)}: {{"source": "{of["source"]}", "shares": {{\n{lines}\n  }}}}')
        versions.append(f" {json.dumps(version)}: {{\n" + ",\n".join(blocks) + "\n }")
    return "{\n" + ",\n".join(versions) + "\n}\n"


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--sm", "sms", multiple=True, type=click.Choice(ARCHITECTURES), help="architectures; default: all")
@click.option("--print", "only_print", is_flag=True, help="print the table instead of writing it")
def main(sms: tuple[str, ...], only_print: bool) -> None:
    """Simulate the main loops of conv_dense and conv_sparse24."""
    if sms and not only_print:
        raise click.UsageError("--sm: expected with --print; the table that is written has all architectures")
    try:
        version = nvrtc_version()
        kernels = begun(table().get(version, {}))
        for kernel, at, sm, share in rows(sms or ARCHITECTURES, kernels):
            new = kernels[kernel]["shares"].setdefault(at, {}).setdefault(sm, share) is share
            if only_print:
                click.echo(f"{kernel:14} {at:22} {sm:7} {Share(*share)}")
            elif new:  # with what was there: an interrupted run loses nothing, and the next one goes on
                write(TABLE, written({**table(), version: kernels}).encode())
    except (CompileError, ToolMissing) as e:
        raise click.ClickException(str(e)) from None
    if not only_print:
        click.echo(f"{TABLE.name}: {sum(len(of['shares']) for of in kernels.values())} tiles for NVRTC {version}")


if __name__ == "__main__":
    sys.exit(main())
