"""Plans without Hopper kernels, for hopper_tiles: problems, formats and predicted times of layers, in a file.

    python -m benchmarks.hopper.plans [--device h200] [NETWORK ...]

plans.json, written by that command (a minute for each plan; layers that are alike are one row with a count):

    {"problems": [...], "plans": {"NETWORK n32 h200 dense": {"us": total, "layers": [[problem, kernel and tile, inputs'
    formats, output's format, microseconds, count], ...]}}}

Only convolutions and products with weights are listed. `us` has all of the plan: what is not listed stays as it is.
"""

import json
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import click
import onnx

import gpu_runtime as gr
from benchmarks import topologies
from benchmarks.bench_plan import MODELS
from benchmarks.light import first_input, light, open_batch
from cuda_kernels.device import named
from tactics.codec import from_json, to_json
from tactics.format import Format
from tactics.kernels import ROWS
from tactics.problems.problem import BackToBackProblem, ConvProblem

PLANS = Path(__file__).with_name("plans.json")
NETWORKS = ("resnet50", "vgg19", "realesr", "efficientnet_b0")
BATCHES = (1, 32, 128)
DEVICES = ("h200", "h100")
MODES = {"dense": "disable", "2:4": "force"}
Layers = ConvProblem | BackToBackProblem
LAYER: Any = Layers  # as the codec takes it


@dataclass(frozen=True, slots=True)
class PlannedLayer:
    """A layer of today's plan: its tactic without formats, formats of inputs and output, predicted time; `count` alike."""

    problem: Layers
    tactic: str
    ins: tuple[Format, ...]
    out: Format
    us: float
    count: int


@dataclass(frozen=True, slots=True)
class Plan:
    """A network's plan, `us` of all of it, and its convolutions and products."""

    us: float
    layers: tuple[PlannedLayer, ...]


def name_of(network: str, batch: int, device: str, mode: str) -> str:
    return f"{network} n{batch} {device} {mode}"


@lru_cache(maxsize=1)
def stored() -> dict[str, Any]:
    return json.loads(PLANS.read_text()) if PLANS.exists() else {"problems": [], "plans": {}}


@lru_cache(maxsize=64)
def plan(name: str) -> Plan:
    """Of the file. KeyError for a plan that it does not have."""
    found, problems = stored()["plans"][name], stored()["problems"]
    layers = tuple(
        PlannedLayer(from_json(LAYER, problems[i]), tactic, tuple(map(Format.parse, ins)), Format.parse(out), us, count)
        for i, tactic, ins, out, us, count in found["layers"]
    )
    return Plan(found["us"], layers)


def model_of(network: str, folder: Path) -> tuple[Path, str]:
    """(an ONNX file with an open batch, the name of its input)."""
    path = folder / f"{network}.onnx"
    if network == "realesr":
        model = onnx.load(MODELS / "realesr_animevideov3.onnx")
    elif network == "efficientnet_b0":
        model = topologies.filled("tv_efficientnet_b0")
    else:
        model = light(f"light_{network}")
    model = open_batch(model)
    onnx.save(model, path)
    return path, first_input(model)


def shape_of(network: str, batch: int) -> tuple[int, ...]:
    """realesr's images are 256 x 256, of the largest batch 128 x 128: its tensors would be too large for our kernels."""
    size = 224 if network != "realesr" else 128 if batch == 128 else 256
    return (batch, 3, size, size)


def planned(network: str, batch: int, device: str, mode: str) -> dict[str, Any]:
    """{"us", "layers"}, the latter with whole problems as JSON text."""
    with tempfile.TemporaryDirectory() as folder:
        path, first = model_of(network, Path(folder))
        before = replace(named(device), left_out=tuple((k.name, "before them") for k in ROWS if k.sm))
        engine = gr.build(path, sparsity=MODES[mode], device=before, shapes={first: shape_of(network, batch)})
    rows: Counter[tuple[str, ...]] = Counter()
    for layer in engine.plan.layers:
        t = layer.tactic
        if t is not None and isinstance(layer.problem, Layers):
            tactic = f"{t.kernel} {t.tile}"
            problem = json.dumps(to_json(LAYER, layer.problem))
            rows[(problem, tactic, " ".join(map(str, t.ins)), str(t.out), f"{layer.time_us:.4f}")] += 1
    layers = [(p, tactic, ins.split(), out, float(us), n) for (p, tactic, ins, out, us), n in rows.items()]
    return {"us": round(engine.plan.solution.total_us, 4), "layers": layers}


def numbered(found: dict[str, dict[str, Any]], problems: list[Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The plans with a number for each problem, whose list grows."""
    numbers = {json.dumps(p): i for i, p in enumerate(problems)}
    for name, of in found.items():
        layers = []
        for p, *rest in of["layers"]:
            if p not in numbers:
                numbers[p] = len(problems)
                problems.append(json.loads(p))
            layers.append([numbers[p], *rest])
        yield name, of | {"layers": layers}


def write(problems: list[Any], plans: dict[str, Any]) -> None:
    """A line for each problem and layer, so that changes can be read."""
    text = ["{", '"problems": [', ",\n".join(json.dumps(p) for p in problems), "],", '"plans": {']
    each = []
    for name in sorted(plans):
        rows = ",\n".join(json.dumps(row) for row in plans[name]["layers"])
        each.append(f'{json.dumps(name)}: {{"us": {plans[name]["us"]}, "layers": [\n{rows}\n]}}')
    PLANS.write_text("\n".join([*text, ",\n".join(each), "}}"]) + "\n")


@click.command(help=__doc__)
@click.argument("networks", nargs=-1)
@click.option("--device", "on", multiple=True, type=click.Choice(DEVICES), help="Both where none is named.")
@click.option("--jobs", default=2, show_default=True)
def main(networks: Sequence[str], on: Sequence[str], jobs: int) -> None:
    todo = [(n, b, d, m) for d in on or DEVICES for n in networks or NETWORKS for b in BATCHES for m in MODES]
    with ProcessPoolExecutor(jobs, get_context("spawn"), max_tasks_per_child=1) as pool:
        futures = [(of, pool.submit(planned, *of)) for of in todo]
        for of, future in futures:
            one = {name_of(*of): future.result()}
            stored.cache_clear()
            before = stored()
            problems = before["problems"]
            write(problems, before["plans"] | dict(numbered(one, problems)))
            click.echo(f"{name_of(*of)}: {one[name_of(*of)]['us']:.1f} us, {len(one[name_of(*of)]['layers'])} kinds of layers")


if __name__ == "__main__":
    main()
