"""For each network: the plan's kernels, reformats and bytes beside the best single-format and the layer-by-layer plan.

    python -m benchmarks.bench_plan [--run] [--device h200] [--sparsity force] NAME[:shape] ...
    python -m benchmarks.bench_plan --run --table all
    python -m benchmarks.bench_plan --sparsity enable --table --before today

NAME is a script's network (benchmarks.networks, heavy, light, topologies), a file, or a model in GPU_RUNTIME_MODELS; shape sets
its first input's size, of a light network or topology its batch (super_resolution:180x320 gives a script's network its
arguments). "all" is every model in GPU_RUNTIME_MODELS and every light network, "today" every topology of torchvision and timm.
`--run` executes it in the emulator and adds the bytes that its launches touch, each 32-byte sector once per launch, and the CPU
seconds of emulation by kernel. `--table` ends with the table of docs/networks.md; `--before` ends with a table of today's
launches beside those in benchmarks/topologies_before.json, with the limits of the plan's kernels. Times are predicted, and each
line names the GPU.
"""

import json
import os
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import onnx

import gpu_runtime as gr
from benchmarks import heavy, light, topologies
from benchmarks.networks import NETWORKS
from cuda_kernels.device import named
from cuda_kernels.launch import Emulated
from gpu_runtime.commands.options import argument, flag, gathered
from gpu_runtime.runtime.plan_record import LaunchStep, PlanRecord
from tactics.predict import predict

MODELS = Path(os.environ.get("GPU_RUNTIME_MODELS", Path(__file__).parents[2] / "shared" / "models"))
FREE = ("noop",)
SIZES = {  # of inputs that a model leaves open, where none is given
    "carn_m_x2": "1x3x64x64",
    "ppocr_cls": "1x3x48x192",
    "ppocrv3_det_en": "1x3x224x224",
    "prisma_seg": "1x3x256x256",
    "realesr_animevideov3": "1x3x64x64",
    "realesr_animevideov3_fp16": "1x3x64x64",
    "resnet20_cifar10": "1x3x32x32",
    "super_resolution_10": "1x1x224x224",
}


def find(item: str, folder: Path) -> tuple[Path, dict[str, tuple[int, ...]] | None]:
    """Finds (the ONNX file, the shape of its first input) of NAME[:shape]; a network that a script makes is written into
    `folder`.
    """
    name, _, size = item.partition(":")
    size = size or SIZES.get(name, "")
    sizes = tuple(int(d) for d in size.split("x")) if size else ()
    scripts = NETWORKS | heavy.NETWORKS
    if name in scripts or name in light.NAMES or name in topologies.NAMES:
        path = folder / f"{name}.onnx"
        if name in scripts:
            onnx.save(scripts[name](*sizes), path)
            return path, None
        model = light.light(name) if name in light.NAMES else topologies.filled(name)
        onnx.save(light.open_batch(model) if sizes else model, path)
        return path, {light.first_input(model): sizes} if sizes else None
    for path in (Path(name), MODELS / f"{name}.onnx"):
        if path.exists():
            model = onnx.load(path, load_external_data=False)
            first = model.graph.input[0]
            if sizes and first.type.tensor_type.shape.dim[0].dim_value not in (0, sizes[0]):
                path = folder / path.name
                onnx.save(light.open_batch(model), path)
            return path, {first.name: sizes} if sizes else None
    raise click.ClickException(f"{name}: neither a script's network, nor a file, nor a model in {MODELS}")


def measure(path: Path, shapes, device: str, sparsity: str, run: bool) -> dict:
    """Plans a network; returns its row: counts, predicted times in microseconds, bytes."""
    engine = gr.build(path, sparsity=sparsity, device=device, shapes=shapes)
    plan, record, sparse = engine.plan, engine.record, engine.sparsity
    found, kinds, single = plan.solution, Counter(layer.type for layer in plan.layers), plan.solution.rivals.best_single_format
    row: dict[str, Any] = {
        "network": record.model.name,
        "input": "x".join(map(str, plan.inputs[0].shape)),
        "timing": record.timing.label,
        "sparsity": sparsity,
        "kernels": len(plan.steps),
        "layers": sum(n for kind, n in kinds.items() if kind not in FREE),
        "reformats": kinds["reformat"],
        "moves": kinds["move"] + kinds["concat"],
        "sparse": len(sparse.picked),
        "eligible": len(sparse.eligible),
        "total_us": round(found.total_us, 2),
        "device": record.device.title,
        "status": found.status,
        "all_dense_us": None if found.rivals.all_dense_us is None else round(found.rivals.all_dense_us, 2),
        "single_format": single and {"format": str(single.format), "us": single.us},
        "greedy_us": found.rivals.greedy_us,
        "weight_bytes": record.weight_bytes,
        "activation_bytes": plan.memory.activation_bytes,
        "bounds": bounds(plan, device),
    }
    if run:
        rng = np.random.default_rng(0)
        types = {"fp32": np.float32, "fp16": np.float16}
        inputs = {i.name: rng.standard_normal(i.shape).astype(types[i.dtype]) for i in engine.plan.inputs}
        with engine.context(device="emulator") as ctx:
            seconds = timed(ctx.gpu)
            ctx.run(inputs)
            stats = ctx.gpu.stats if isinstance(ctx.gpu, Emulated) else []
            row["touched_bytes"] = sum(s.launch_unique_bytes for s in stats)
        emulated: dict[str, float] = defaultdict(float)
        for step, s in zip(plan.steps, seconds, strict=True):
            emulated[step.kernel if isinstance(step, LaunchStep) else "library"] += round(s, 3)
        row["emulated_s"] = emulated
    return row


def bounds(plan: PlanRecord, device: str) -> dict[str, float]:
    """Returns limit -> the share of the plan's time in kernels that this limit bounds, by their predictions, largest first."""
    found: dict[str, float] = defaultdict(float)
    for layer in plan.layers:
        if layer.tactic is not None and layer.problem is not None and layer.time_us:
            found[str(predict(layer.problem, layer.tactic, named(device))["bound"])] += layer.time_us
    total = sum(found.values())
    return {bound: round(us / total, 3) for bound, us in sorted(found.items(), key=lambda item: -item[1])}


def timed(gpu) -> list[float]:
    """Returns a list that gets the CPU seconds, of all threads together, of each launch and call from now on."""
    seconds = []

    def measured(function):
        def run(*args):
            start = time.process_time()
            function(*args)
            seconds.append(time.process_time() - start)

        return run

    gpu.launch, gpu.call = measured(gpu.launch), measured(gpu.call)
    return seconds


def text(row: dict) -> str:
    """Returns the row as two lines."""
    single = row["single_format"]
    dense = row["all_dense_us"]
    beside = "no dense plan" if dense is None else f"all dense ~{dense:.1f} us"
    beside += f"; one format ({single['format']}) ~{single['us']:.1f} us" if single else ""
    beside += f"; layer by layer ~{row['greedy_us']:.1f} us" if row["greedy_us"] else ""
    touched = ""
    if "touched_bytes" in row:
        touched = f", touches {row['touched_bytes'] / 1e6:.2f} MB"
    seconds = row.get("emulated_s", {})
    families = ", ".join(f"{name} {s:.1f}" for name, s in Counter(seconds).most_common(5))
    emulated = f"\n    emulated in {sum(seconds.values()):.1f} CPU s: {families}" if seconds else ""
    return (
        f"{row['network']}: {row['kernels']} launches, {row['reformats']} reformats, {row['moves']} copies; sparse "
        f"{row['sparse']} of {row['eligible']} eligible layers{touched}\n"
        f"    ~{row['total_us']:.1f} us {row['timing']}, {row['status']}; {beside}{emulated}"
    )


# fmt: off
COLUMNS = (
    "network", "input", "launches", "reformats", "copies", "sparse / eligible", "MB", "plan", "all dense", "one format",
    "layer by layer",
)
# fmt: on
BEFORE = Path(__file__).with_name("topologies_before.json")
BESIDE = "network", "launches before", "launches", "reformats", "predicted us", "limited by"


def page(rows: Sequence[dict]) -> str:
    """Returns the rows as a Markdown table, which contains nothing of the machine that planned and emulated them."""
    cells = [
        (
            r["network"],
            r["input"],
            r["kernels"],
            r["reformats"],
            r["moves"],
            f"{r['sparse']} / {r['eligible']}",
            f"{r['touched_bytes'] / 1e6:.1f}" if "touched_bytes" in r else "",
            _total(r),
            "-" if r["all_dense_us"] is None else f"{r['all_dense_us']:.1f}",
            "{us:.1f} {format}".format(**r["single_format"]) if r["single_format"] else "",
            f"{r['greedy_us']:.1f}" if r["greedy_us"] else "",
        )
        for r in rows
    ]
    return markdown(COLUMNS, cells)


def beside(rows: Sequence[dict]) -> str:
    """Returns the rows as a Markdown table beside the launches that the networks took before their layers were fused."""
    before, cells = json.loads(BEFORE.read_text())["networks"], []
    for r in rows:
        limits = ", ".join(f"{bound} {share:.0%}" for bound, share in list(r["bounds"].items())[:3])
        counts = before[r["network"]] or "refused", r["kernels"], r["reformats"]
        cells.append((r["network"], *counts, _total(r), limits))
    return markdown(BESIDE, cells)


def _total(row: dict) -> str:
    return f"{row['total_us']:.1f}{'' if row['status'] == 'proven' else ' ' + row['status']}"


def markdown(header: Sequence, rows: Sequence[Sequence]) -> str:
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in (header, ["---"] * len(header), *rows))


@dataclass(frozen=True, slots=True)
class Asked:
    """The arguments and options of `main`."""

    names: tuple[str, ...] = argument(nargs=-1)
    run: bool = flag("--run", is_flag=True, help="Execute in the emulator and count bytes.")
    device: str = flag("--device", default="h200", show_default=True)
    sparsity: str = flag("--sparsity", type=click.Choice(["disable", "enable", "force"]), default="force", show_default=True)
    as_json: str | None = flag("--json", type=click.Path(), help="Also write the rows to this file.")
    table: bool = flag("--table", is_flag=True, help="Then print them as a Markdown table.")
    before: bool = flag("--before", is_flag=True, help="The table of launches before and now, of 'today'.")


@click.command()
@gathered(Asked)
def main(asked: Asked) -> None:
    rows, items = [], list(asked.names or NETWORKS)
    if items == ["all"]:
        items = [*sorted(path.stem for path in MODELS.glob("*.onnx")), *light.NAMES]
    if items == ["today"]:
        items = [*topologies.NAMES]
    with tempfile.TemporaryDirectory() as folder:
        for item in items:
            rows.append(measure(*find(item, Path(folder)), asked.device, asked.sparsity, asked.run))
            click.echo(text(rows[-1]))
    if asked.as_json:
        Path(asked.as_json).write_text(json.dumps(rows, indent=1) + "\n")
    if asked.table:
        click.echo(beside(rows) if asked.before else page(rows))


if __name__ == "__main__":
    main()
