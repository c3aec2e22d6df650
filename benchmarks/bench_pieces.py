"""Plans whose batches may run in pieces beside the same without: predicted time, arena, layers, and the planner's time.

    python -m benchmarks.bench_pieces [--device l4,rtx4090] [--batch 1,32,128] [--all] [--table] [NAME ...]

NAME: as benchmarks.bench_plan has it; without, eight known networks, with --all every network at hand. Rows are added to
benchmarks/results/pieces.jsonl, and a row that stands there is not made again: a run that ended goes on. Each is made in a
process of its own, so that no plan finds what another one has computed. `--table` prints the file. Weights are not pruned, and
no plan is sparse. The table's last column is the planner's time in results/planner_before.jsonl, from before batches ran in
pieces.
"""

import json
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import click
import onnx

from benchmarks import light, processes
from benchmarks.bench_networks import model_of
from benchmarks.bench_plan import find
from benchmarks.plan_records import everything
from benchmarks.rewrite_gains import fitted, planner_of
from gpu_runtime.assembly import assemble
from gpu_runtime.errors import ModelError, bounded
from gpu_runtime.planning.alternatives import alternatives
from gpu_runtime.text import table

RESULTS = Path(__file__).resolve().parent / "results" / "pieces.jsonl"
BEFORE = RESULTS.with_name("planner_before.jsonl")
EIGHT: tuple[str, ...] = (
    *("resnet50", "tv_efficientnet_b0", "tv_convnext_tiny", "tv_mobilenet_v3_large", "tv_regnet_y_400mf", "tv_resnext50"),
    *("timm_repvgg_a0", "timm_ghostnet_100"),
)
KINDS = ("whole", "pieces")
MIB = 1 << 20
RUNS = 3
Row = dict[str, Any]


def opened(name: str, batch: int, folder: Path) -> tuple[onnx.ModelProto, dict[str, tuple[int, ...]] | None]:
    """Returns (the network at a batch, the shapes of its inputs if they are open). ModelError if the network has another fixed
    batch.
    """
    if name == "resnet50" or name.startswith(("tv_", "timm_")):
        return model_of(name, batch)
    path, shapes = find(name, folder)
    if shapes is not None:
        return onnx.load(path), {first: (batch, *image) for first, (_, *image) in shapes.items()}
    model, shapes = light.at_batch(onnx.load(path), batch)
    if any(not image or 0 in image for _, *image in shapes.values()):
        raise ModelError(f"{name}: its image has no size")
    return model, shapes


@bounded  # without the collector of cycles, as in a build
def row_of(name: str, batch: int, device: str) -> Row:
    """Plans a network as a whole and with pieces; returns microseconds, bytes of the arena, layers and the planner's seconds of
    each.
    """
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, shapes = opened(name, batch, Path(folder))
        path = Path(folder) / "m.onnx"
        onnx.save(model, path)
        network = alternatives(fitted(path, shapes))
    planner = planner_of(network, device)
    row: Row = {"network": name, "batch": batch, "device": device}
    plans, begun = {}, time.process_time()
    plan = planner(network)
    for kind in KINDS:
        if kind == "pieces":
            plan = planner.in_pieces(*plan)
        plans[kind] = plan, time.process_time() - begun
    for kind, (plan, taken) in plans.items():
        data, _ = assemble.assemble(*plan)
        images = [layer.images[1] for layer in data.layers if layer.images] if kind == "pieces" else []
        row[kind] = {"us": plan[1].us, "arena": data.memory.activation_bytes, "layers": len(data.layers), "s": taken}
        row |= {"images": max(images)} if images else {}
    return row


def alone(name: str, batch: int, device: str) -> list[Row]:
    """Returns the row, of RUNS runs, whose planner seconds are the median."""
    with processes.pool(1, 1) as pool:
        runs = [pool.submit(row_of, name, batch, device) for _ in range(RUNS)]
        return sorted((run.result() for run in runs), key=lambda row: row["pieces"]["s"])[RUNS // 2 :][:1]


def known(path: Path) -> list[Row]:
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def add(path: Path, rows: list[Row]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def key(row: Row) -> tuple[str, int, str]:
    return row["network"], row["batch"], row["device"]


def shown(path: Path, cases: Sequence[tuple], make: Callable[..., list[Row]], only_table: bool) -> list[Row]:
    """Returns the file's rows of these cases (`key`), after it has made those that it lacks."""
    have = set(map(key, known(path)))
    for case in () if only_table else (case for case in cases if case not in have):
        try:
            add(path, make(*case))
        except (ModelError, ValueError) as e:
            click.echo(f"{case[0]} at batch {case[1]}: {e}", err=True)
            continue
        click.echo(f"{case[0]} at batch {case[1]} on {case[2]}", err=True)
    return sorted((row for row in known(path) if key(row) in cases), key=lambda row: cases.index(key(row)))


def text(found: list[Row]) -> list[str]:
    header = ["network", "batch", "GPU", "us whole", "us", "gain", "images", "MiB whole", "MiB", "planner", "before"]
    before = {key(row): row["whole"]["s"] for row in known(BEFORE)}
    made = [
        [
            *(row["network"], str(row["batch"]), row["device"]),
            *(f"{row[kind]['us']:.0f}" for kind in KINDS),
            f"{row['whole']['us'] / row['pieces']['us']:.2f}",
            str(row.get("images", "-")),
            *(f"{row[kind]['arena'] / MIB:.1f}" for kind in KINDS),
            f"{row['pieces']['s'] / max(row['whole']['s'], 1e-9):.2f}",
            f"{row['pieces']['s'] / before[key(row)]:.2f}" if key(row) in before else "-",
        ]
        for row in found
    ]
    return table(header, made, right=(1, *range(3, len(header))))


@click.command()
@click.argument("names", nargs=-1)
@click.option("--device", "devices", default="a100,h200,l4,rtx4090", show_default=True)
@click.option("--batch", "batches", default="1,32,128", show_default=True)
@click.option("--all", "every", is_flag=True, help="Every network at hand.")
@click.option("--table", "only_table", is_flag=True, help="Print the file's rows; make none.")
def main(names: tuple[str, ...], devices: str, batches: str, every: bool, only_table: bool) -> None:
    wanted = names or (tuple(everything()) if every else EIGHT)
    cases = list(product(wanted, map(int, batches.split(",")), devices.split(",")))
    click.echo("\n".join(text(shown(RESULTS, cases, alone, only_table))))


if __name__ == "__main__":
    main()
