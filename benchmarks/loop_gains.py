"""What faster main loops are predicted to bring networks: each planned with the loops as they were, and as they are.

    python -m benchmarks.loop_gains [--device a100] [--without KERNEL,KERNEL] [--sparsity disable] [NAME[:shape] ...]

Before: the share of the peak of each main loop of commit fdb982e, simulated as those of today are
(benchmarks/loops_before.json, written by benchmarks.cycle_shares with that commit's kernels; of sm_80 and sm_90a only), and no
strips and no Hopper kernels, of which there were none. With `--without`: today's plan without these kernels. All else is
today's: formats, fusions, the estimates of everything but loops. NAME: as benchmarks.bench_plan has it.
"""

import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path

import click

import gpu_runtime as gr
from benchmarks.bench_plan import find
from cuda_kernels import device as devices
from cuda_kernels import shares
from tactics.kernels import KERNELS

BEFORE = Path(__file__).with_name("loops_before.json")
WITHOUT = tuple(kernel for kernel in KERNELS if kernel.startswith("conv_strip") or KERNELS[kernel].sm)  # of fdb982e
# fmt: off
NAMES = (
    "super_resolution", "resnet18_n10", "resnet50_g1", "conv512", "forum", "light_resnet50", "light_vgg19",
    "light_inception_v1", "light_densenet121", "resnet20_cifar10:128x3x32x32", "super_resolution_10:8x1x224x224",
    "realesr_animevideov3:1x3x256x256", "carn_m_x2:1x3x256x256",
)
# fmt: on
PROCESSES = 2


@dataclass(frozen=True, slots=True)
class Planned:
    """Predicted microseconds of the plan, and how many layers it runs sparse."""

    us: float
    sparse: int


def planned(
    path: Path, shapes: dict[str, tuple[int, ...]] | None, device: str, without: tuple[str, ...], sparsity: str = "force"
) -> Planned:
    """In a process of its own: `without` kernels, which changes what all of it takes for the device; all those of WITHOUT: with
    the table of shares of before."""
    if without == WITHOUT:
        shares.TABLE = BEFORE
    left_out = tuple((kernel, "there was none") for kernel in without)
    devices.NAMED[device] = replace(devices.named(device), left_out=left_out)
    engine = gr.build(path, sparsity=sparsity, device=device, shapes=shapes)
    return Planned(engine.plan.solution.total_us, len(engine.sparsity.picked))


def row(name: str, before: Planned, now: Planned) -> str:
    sparse = f"{before.sparse} | {now.sparse}"
    return f"| {name} | {before.us:.1f} | {now.us:.1f} | {before.us / now.us:.2f} | {sparse} |"


@click.command(help=__doc__)
@click.argument("names", nargs=-1)
@click.option("--device", "on", default="a100", show_default=True, type=click.Choice(["a100", "h100", "h200"]))
@click.option("--without", default=",".join(WITHOUT), help="Kernels, of which before has none; by default as above.")
@click.option("--sparsity", default="force", show_default=True, type=click.Choice(["force", "disable"]))
def main(names: Sequence[str], on: str, without: str, sparsity: str) -> None:
    kind = {"force": "pruned", "disable": "dense"}[sparsity]
    click.echo(f"| network, {kind}, {devices.named(on).title} | us before | us | gain | sparse before | sparse |")
    click.echo("| --- | --- | --- | --- | --- | --- |")
    pool = ProcessPoolExecutor(PROCESSES, get_context("spawn"), max_tasks_per_child=1)
    with tempfile.TemporaryDirectory() as folder, pool:
        for name in names or NAMES:
            path, shapes = find(name, Path(folder))
            then = tuple(without.split(","))
            before, now = (pool.submit(planned, path, shapes, on, kernels, sparsity) for kernels in (then, ()))
            click.echo(row(name, before.result(), now.result()))


if __name__ == "__main__":
    main()
