"""Plans whose batches may run in pieces beside the same without: predicted time, arena, layers, and the planner's time.

    python -m benchmarks.bench_pieces [--device l4,rtx4090] [--batch 1,32,128] [--all] [--table] [NAME ...]
    PYTHONPATH=OTHER python benchmarks/bench_pieces.py --before [...]

NAME: as benchmarks.bench_plan has it; without, eight known networks, with --all every network at hand. Rows are added to
benchmarks/results/pieces.jsonl, and a row that stands there is not made again: a run that ended goes on. Each is made in a
process of its own, so that no plan finds what another one has computed. `--table` prints the file. Weights are not pruned, and
no plan is sparse. `--before` plans with the packages of OTHER, a checkout from before batches ran in pieces, and adds rows to
results/planner_before.jsonl: the table's last column is the planner's time in that.
"""

import json
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import onnx

from benchmarks import light, processes
from benchmarks.bench_networks import model_of
from benchmarks.bench_plan import find
from benchmarks.plan_records import everything
from cuda_kernels.device import named
from gpu_runtime.assembly import assemble
from gpu_runtime.building.fit import fit
from gpu_runtime.building.load import lowered
from gpu_runtime.building.options import BuildOptions
from gpu_runtime.building.planner import Planner
from gpu_runtime.building.target import make_timer
from gpu_runtime.errors import ModelError, bounded
from gpu_runtime.frontend import importer
from gpu_runtime.planning import io_formats
from gpu_runtime.planning.alternatives import alternatives
from gpu_runtime.progress import ignore
from gpu_runtime.text import table

RESULTS = Path(__file__).resolve().parent / "results" / "pieces.jsonl"
BEFORE = RESULTS.with_name("planner_before.jsonl")
EIGHT: tuple[str, ...] = (
    *("resnet50", "tv_efficientnet_b0", "tv_convnext_tiny", "tv_mobilenet_v3_large", "tv_regnet_y_400mf", "tv_resnext50"),
    *("timm_repvgg_a0", "timm_ghostnet_100"),
)
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
    model = light.open_batch(onnx.load(path)) if shapes is None else onnx.load(path)
    first = light.first_input(model)
    sizes = next(v for v in model.graph.input if v.name == first).type.tensor_type.shape.dim
    image = (shapes or {}).get(first, tuple(d.dim_value for d in sizes))[1:]
    if not image or 0 in image:
        raise ModelError(f"{name}: its image has no size")
    return model, {first: (batch, *image)}


@bounded  # without the collector of cycles, as in a build
def row_of(name: str, batch: int, device: str, kinds: Sequence[str] = ("whole", "pieces")) -> Row:
    """Plans a network as a whole and with pieces; returns microseconds, bytes of the arena, layers and the planner's seconds of
    each.
    """
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, shapes = opened(name, batch, Path(folder))
        path = Path(folder) / "m.onnx"
        onnx.save(model, path)
        loaded = importer.load(path)
        network, _ = fit(loaded, lowered(loaded, shapes), None, ignore)
        network = alternatives(network)
    ends = io_formats.resolve(None, network.inputs, "input") | io_formats.resolve(None, network.outputs, "output")
    planner = Planner(named(device), make_timer(named(device)), BuildOptions(), ends)
    row: Row = {"network": name, "batch": batch, "device": device}
    plans, begun = {}, time.process_time()
    plan = planner(network)
    for kind in kinds:
        if kind == "pieces":
            plan = planner.in_pieces(*plan)
        plans[kind] = plan, time.process_time() - begun
    for kind, (plan, taken) in plans.items():
        data, _ = assemble.assemble(*plan)
        images = [layer.images[1] for layer in data.layers if layer.images] if kind == "pieces" else []
        row[kind] = {"us": plan[1].us, "arena": data.memory.activation_bytes, "layers": len(data.layers), "s": taken}
        row |= {"images": max(images)} if images else {}
    return row


def alone(name: str, batch: int, device: str, kinds: Sequence[str]) -> Row:
    """Returns the row, of RUNS runs, whose planner seconds are the median."""
    with processes.pool(1, 1) as pool:
        runs = [pool.submit(row_of, name, batch, device, kinds) for _ in range(RUNS)]
        return sorted((run.result() for run in runs), key=lambda row: row[kinds[-1]]["s"])[RUNS // 2]


def known(path: Path = RESULTS) -> list[Row]:
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def key(row: Row) -> tuple[str, int, str]:
    return row["network"], row["batch"], row["device"]


def text(found: list[Row]) -> list[str]:
    header = ["network", "batch", "GPU", "us whole", "us", "gain", "images", "MiB whole", "MiB", "planner", "before"]
    before = {key(row): row["whole"]["s"] for row in known(BEFORE)}
    made = [
        [
            *(row["network"], str(row["batch"]), row["device"]),
            *(f"{row[kind]['us']:.0f}" for kind in ("whole", "pieces")),
            f"{row['whole']['us'] / row['pieces']['us']:.2f}",
            str(row.get("images", "-")),
            *(f"{row[kind]['arena'] / MIB:.1f}" for kind in ("whole", "pieces")),
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
@click.option("--before", is_flag=True, help="Plan whole batches alone; with an old checkout's packages.")
def main(names: tuple[str, ...], devices: str, batches: str, every: bool, only_table: bool, before: bool) -> None:
    path, kinds = (BEFORE, ("whole",)) if before else (RESULTS, ("whole", "pieces"))
    wanted = names or (tuple(everything()) if every else EIGHT)
    of = [(name, batch) for name in wanted for batch in map(int, batches.split(","))]
    for name, batch in () if only_table else of:
        have = {row["device"] for row in known(path) if (row["network"], row["batch"]) == (name, batch)}
        if left := [device for device in devices.split(",") if device not in have]:
            try:
                made = [alone(name, batch, device, kinds) for device in left]
            except (ModelError, ValueError) as e:
                click.echo(f"{name} at batch {batch}: {e}", err=True)
                continue
            with path.open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in made)
            click.echo(f"{name} at batch {batch}", err=True)
    if before:
        return
    shown = [r for r in known() if (r["network"], r["batch"]) in of and r["device"] in devices.split(",")]
    click.echo("\n".join(text(sorted(shown, key=lambda r: (wanted.index(r["network"]), r["batch"], r["device"])))))


if __name__ == "__main__":
    main()
