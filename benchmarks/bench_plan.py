"""For each network: the plan's kernels, reformats and bytes beside the best single-format and the layer-by-layer plan.

    python -m benchmarks.bench_plan [--run] [--device h200] [--sparsity force] NAME[:shape] ...

NAME is a script's network (benchmarks.networks, benchmarks.light), a file, or a model in GPU_RUNTIME_MODELS; shape sets its
first input's size (super_resolution:180x320 gives a script's network its arguments). `--run` executes it in the emulator and
adds the bytes that its launches touch, each 32-byte sector once per launch. Times are predicted and say for which GPU.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections import Counter
from pathlib import Path

import click
import numpy as np
import onnx

import gpu_runtime as gr
from benchmarks import light
from benchmarks.networks import NETWORKS

MODELS = Path(os.environ.get("GPU_RUNTIME_MODELS", Path(__file__).parents[2] / "shared" / "models"))
FREE = ("noop",)


def find(name: str, size: str, folder: Path) -> Path:
    """The ONNX file of a script's network (written into `folder`), of a path, or of a model by name."""
    if name in NETWORKS:
        model = NETWORKS[name](*(int(d) for d in size.split("x"))) if size else NETWORKS[name]()
    elif name in light.NAMES:
        model = light.light(name)
    else:
        model = None
    if model is not None:
        onnx.save(model, folder / f"{name}.onnx")
        return folder / f"{name}.onnx"
    for path in (Path(name), MODELS / f"{name}.onnx"):
        if path.exists():
            return path
    raise click.ClickException(f"{name}: neither a script's network, nor a file, nor a model in {MODELS}")


def measure(path: Path, shapes, device: str, sparsity: str, run: bool) -> dict:
    """One row: counts, predicted times in microseconds, bytes."""
    start = time.perf_counter()
    engine = gr.build(path, sparsity=sparsity, device=device, shapes=shapes)
    plan = engine.plan
    rivals, kinds = plan["plan"]["rivals"], Counter(layer["type"] for layer in plan["layers"])
    row = {
        "network": plan["model"]["name"], "timing": plan["timing"]["label"], "sparsity": sparsity,
        "build_s": round(time.perf_counter() - start, 2), "kernels": len(plan["steps"]),
        "layers": sum(n for kind, n in kinds.items() if kind not in FREE), "reformats": kinds["reformat"],
        "moves": kinds["move"] + kinds["concat"], "sparse": len(engine.sparsity["picked"]),
        "eligible": len(engine.sparsity["eligible"]), "total_us": round(plan["plan"]["total_us"], 2),
        "status": plan["plan"]["status"], "all_dense_us": round(rivals["all_dense_us"], 2),
        "single_format": rivals["best_single_format"], "greedy_us": rivals["greedy_us"],
        "weight_bytes": plan["memory"]["weight_bytes"], "activation_bytes": plan["memory"]["activation_bytes"],
    }  # fmt: skip
    if run:
        rng = np.random.default_rng(0)
        types = {"fp32": np.float32, "fp16": np.float16}
        inputs = {i["name"]: rng.standard_normal(i["shape"]).astype(types[i["dtype"]]) for i in engine.inputs}
        with engine.context(device="emulator") as ctx:
            start = time.perf_counter()
            ctx.run(inputs)
            row["emulated_s"] = round(time.perf_counter() - start, 2)
            row["touched_bytes"] = sum(s.launch_unique_bytes for s in ctx.gpu.stats)
    return row


def text(row: dict) -> str:
    """The row as two lines."""
    single = row["single_format"]
    beside = f"all dense ~{row['all_dense_us']:.1f} us"
    beside += f"; one format ({single['format']}) ~{single['us']:.1f} us" if single else ""
    beside += f"; layer by layer ~{row['greedy_us']:.1f} us" if row["greedy_us"] else ""
    touched = ""
    if "touched_bytes" in row:
        touched = f", touches {row['touched_bytes'] / 1e6:.2f} MB ({row['emulated_s']} s emulated)"
    return (
        f"{row['network']}: {row['kernels']} kernels for {row['layers']} layers, {row['reformats']} reformats, {row['moves']} "
        f"copies; sparse {row['sparse']} of {row['eligible']}{touched}\n"
        f"    ~{row['total_us']:.1f} us {row['timing']}, {row['status']}; {beside}; built in {row['build_s']} s"
    )


@click.command()
@click.argument("names", nargs=-1)
@click.option("--run", is_flag=True, help="Execute in the emulator and count bytes.")
@click.option("--device", default="h200", show_default=True)
@click.option("--sparsity", type=click.Choice(["disable", "enable", "force"]), default="force", show_default=True)
@click.option("--json", "as_json", type=click.Path(), help="Also write the rows to this file.")
def main(names, run, device, sparsity, as_json) -> None:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for item in names or NETWORKS:
            name, _, size = item.partition(":")
            path = find(name, size, Path(folder))
            first = onnx.load(path, load_external_data=False).graph.input[0].name
            shapes = {first: tuple(int(d) for d in size.split("x"))} if size and name not in NETWORKS else None
            rows.append(measure(path, shapes, device, sparsity, run))
            click.echo(text(rows[-1]))
    if as_json:
        Path(as_json).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
