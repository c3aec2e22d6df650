"""How far plans are above the floors of their launches: a row per network, and the launches that are far.

    python -m benchmarks.floor_gaps [--device h200] [--sparsity enable] [--jobs 2] NAME[:shape] ...
    python -m benchmarks.floor_gaps --table

Writes benchmarks/floor_gaps.json, where other networks stay; `--table` prints the file as docs/networks.md quotes it. NAME: as
benchmarks.bench_plan has it; "all": every network that benchmarks.plan_records and bench_plan know. Floors are those of
`gpu-runtime inspect --gap`: each product and byte once, at the device's peak rates. All times are predicted.
"""

import tempfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

import gpu_runtime as gr
from benchmarks import processes
from benchmarks.bench_plan import find
from benchmarks.plan_records import SLOW, everything
from benchmarks.rewrite_gains import keep, known
from gpu_runtime.explain.gaps import FAR, LONG_US, alike, by_kind, gaps

WHY = {  # kernels whose launches may be far from their floors, and the reason
    "conv_grouped_hmma_16816_16x128x16_w1x4_s1": "instructions: 3 outputs of 16 channels fill 3 of a product's 8 columns, and "
    "each has a load (44 % of them); patches with their halos (30 %); planes are stored in single halfs (26 %)",
    "conv_dense_hmma_16816_64x256x32_w1x4_s4": "rows of 2560 pixels fit no strip: each pixel is read for each of 9 taps, and "
    "32 channels are half of a stage; outputs count twice, as an H200's times say",
    "depthwise_scaled_32c8x8_t2x4": "two launches; 121 products in FP32 for each output, by blocks of two warps alone on SMs, "
    "which issue a quarter of the slots",
}
RESULTS = Path(__file__).with_suffix(".json")


def measure(name: str, device: str, sparsity: str) -> dict[str, Any]:
    """Returns the row of one network."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        path, shapes = find(name, Path(folder))
        found = gaps(gr.build(path, sparsity=sparsity, device=device, shapes=shapes).record)
    kinds = {
        kind: [round(sum(g.us for g in of), 2), round(sum(g.floor_us for g in of), 2)] for kind, of in by_kind(found).items()
    }
    far = [
        {
            "launches": len(of),
            "layer": of[0].layer,
            "problem": of[0].problem,
            "tactic": of[0].tactic,
            "us": round(of[0].us, 2),
            "floor_us": round(of[0].floor_us, 2),
            "bound": of[0].bound,
        }
        for of in alike([g for g in found if g.is_far])
    ]
    return {"launches": len(found), "kinds": kinds, "far": far}


def table(networks: dict[str, Any]) -> Iterator[str]:
    """Yields a line per network, then one per launch that is far from its floor."""
    yield "| network | layers | plan, us | floor, us | times | most above the floor |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for name, row in networks.items():
        us, floor = (sum(times[i] for times in row["kinds"].values()) for i in (0, 1))
        worst = [f"{kind} {times[0] - times[1]:.0f} us" for kind, times in list(row["kinds"].items())[:3]]
        yield f"| {name} | {row['launches']} | {us:.1f} | {floor:.1f} | {us / floor:.1f} | {', '.join(worst)} |"
    yield ""
    yield f"| more than {FAR:g} times its floor and {LONG_US:g} us | launches | problem | tactic | us | floor, us | reason |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for name, row in networks.items():
        for far in row["far"]:
            yield (
                f"| {name}: {_short(far['layer'])} | {far['launches']} | {far['problem']} | {far['tactic']} | {far['us']:.1f} "
                f"| {far['floor_us']:.1f} | {WHY.get(far['tactic'], 'not explained')} |"
            )


def _short(layer: str) -> str:
    """Returns the name of the first node of a launch."""
    first, *more = layer.split(" + ")
    return first + (f" and {len(more)} nodes" if more else "")


@click.command(help=__doc__)
@click.argument("names", nargs=-1)
@click.option("--device", default="h200", show_default=True)
@click.option("--sparsity", type=click.Choice(["disable", "enable", "force"]), default="enable", show_default=True)
@click.option("--jobs", default=2, show_default=True, help="Networks at a time.")
@click.option("--table", "only_table", is_flag=True, help="Print what the file says.")
@click.option("--out", type=click.Path(path_type=Path), default=RESULTS, show_default=True)
def main(names: Sequence[str], device: str, sparsity: str, jobs: int, only_table: bool, out: Path) -> None:
    networks = known(out, {} if only_table else {"device": device, "sparsity": sparsity})
    wanted = () if only_table else sorted([*everything(), *SLOW]) if names == ("all",) else names
    with processes.pool(jobs) as pool:
        for name, row in zip(wanted, pool.map(measure, wanted, *([v] * len(wanted) for v in (device, sparsity))), strict=True):
            networks[name] = row
            keep(out, networks, device, sparsity)
            click.echo(f"{name}: {len(row['far'])} far", err=True)
    click.echo("\n".join(table(networks)))


if __name__ == "__main__":
    main()
