"""What every network's plan is, in a few numbers each: a change that is only to move code must leave all of them as they are.

    python -m benchmarks.plan_records [--write] [NAME ...]

Builds each network for each of DEVICES, with its weights as they are and pruned to 2:4, and compares total, launches (kernel,
values, grid, block, shared memory, arguments) and packed weights with tests/golden/plans.json; says what differs and exits
with 1. `--write` takes what is found as the record. Without names: all models in GPU_RUNTIME_MODELS, the scripts' networks
and the light ones that are planned in seconds.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from pathlib import Path

import click

import gpu_runtime as gr
from benchmarks import light
from benchmarks.bench_plan import MODELS, find
from benchmarks.networks import NETWORKS
from gpu_runtime.runtime.engine import Engine
from tactics import codec

RECORDS = Path(__file__).parents[1] / "tests" / "golden" / "plans.json"
DEVICES = ("h200", "a10")
MODES = ("enable", "force")
SLOW = ("light_bvlc_alexnet", "light_vgg19", "light_zfnet512")  # hundreds of megabytes of weights


def record(engine: Engine) -> dict[str, object]:
    """Total in picoseconds, numbers of launches and of sparse ones, and digests of the launches and of the weights."""
    plan, facts = engine.plan, ("kernel", "function", "values", "attributes", "grid", "block", "smem", "args")
    steps = [[codec.to_json(type(s), s).get(fact) for fact in facts] for s in plan.steps]
    weights = [s.sha256 for s in engine.record.sections if s.kind == "weights"]
    return {
        "total_ps": round(plan.solution.total_us * 1e6), "steps": len(steps),
        "sparse": sum(layer.is_sparse for layer in plan.layers),
        "launches": _digest(steps), "weights": _digest(weights), "bytes": plan.memory.activation_bytes,
    }  # fmt: skip


def _digest(value) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def found(name: str) -> dict[str, dict]:
    """"network device mode" -> record, of one network."""
    with tempfile.TemporaryDirectory() as folder:
        path, shapes = find(name, Path(folder))
        rows = {}
        for device in DEVICES:
            for mode in MODES:
                engine = gr.build(path, sparsity=mode, device=device, shapes=shapes)
                rows[f"{name} {device} {mode}"] = record(engine)
        return rows


@click.command()
@click.argument("names", nargs=-1)
@click.option("--write", is_flag=True, help="Take what is found as the record.")
def main(names, write) -> None:
    models = [path.stem for path in MODELS.glob("*.onnx")]
    known = json.loads(RECORDS.read_text()) if RECORDS.exists() else {}
    different = 0
    for name in names or sorted([*models, *NETWORKS, *(n for n in light.NAMES if n not in SLOW)]):
        for row, now in found(name).items():
            then = known.get(row)
            if then != now and not write:
                different += 1
                changes = [f"{k} {then[k]} -> {now[k]}" for k in now if then[k] != now[k]] if then else ["no record"]
                click.echo(f"{row}: {', '.join(changes)}")
            known[row] = now
        click.echo(f"{name}: looked at", err=True)
    if write:
        RECORDS.write_text("{\n" + ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(known.items())) + "\n}\n")
    if different:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
