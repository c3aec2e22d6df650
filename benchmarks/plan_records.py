"""A record of every network's plan, a few numbers each: a change that only moves code must leave all of them equal.

    python -m benchmarks.plan_records [--write] [--jobs 2] [NAME ...]

Builds each network for each of DEVICES, with its weights as they are and pruned to 2:4, and compares total, launches (kernel,
values, grid, block, shared memory, arguments), packed weights and verdicts with tests/golden/plans.json; prints differences and
exits with 1. Weights that are products of others (timm_edgenext_x_small's) depend on NumPy's BLAS: the record has those of
OPENBLAS_CORETYPE=Haswell and one thread (OPENBLAS_NUM_THREADS=1). `--write` stores the plans found as the
record. Its text is made here, so that it outlives the engine's format.
Names: networks, or "six", which take a minute; without, all models in GPU_RUNTIME_MODELS, the scripts' networks, the light ones
that are planned in seconds, and the topologies.
"""

import hashlib
import json
import tempfile
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import click

import gpu_runtime as gr
from benchmarks import light, processes, topologies
from benchmarks.bench_plan import MODELS, find
from benchmarks.networks import NETWORKS
from gpu_runtime.engine import Engine
from gpu_runtime.runtime.plan_record import LaunchStep

RECORDS = Path(__file__).parents[1] / "tests" / "golden" / "plans.json"
DEVICES = ("h200", "a10")
MODES = ("enable", "force")
SLOW = ("light_bvlc_alexnet", "light_vgg19", "light_zfnet512")  # hundreds of megabytes of weights
SIX = ("fastestdet", "resnet20_cifar10", "squeezenet11_fp16", "timm_edgenext_x_small", "timm_ghostnet_100", "ultraface_rfb320")


def record(engine: Engine) -> dict[str, object]:
    """Returns an engine's record: total in picoseconds, numbers of launches and of sparse ones, digests of launches, weights
    and verdicts.
    """
    plan = engine.plan
    weights = (section.sha256 for section in engine.record.sections if section.kind == "weights")
    return {
        "total_ps": round(plan.solution.total_us * 1e6),
        "steps": len(plan.steps),
        "sparse": sum(layer.is_sparse for layer in plan.layers),
        "launches": digest(map(_step, plan.steps)),
        "weights": digest(weights),
        "bytes": plan.memory.activation_bytes,
        "verdicts": digest(f"{row.layer} {row.verdict} {row.reason}" for row in plan.sparsity.rows),
    }


def _step(step) -> str:
    """Returns one launch, or a library function's call, as a line."""
    if not isinstance(step, LaunchStep):
        attributes = " ".join(f"{name}={value}" for name, value in sorted(step.attributes.items()))
        args = " ".join("none" if a is None else f"{a[0]}+{a[1]}:{a[2]}:{list(a[3])}" for a in step.args)
        return f"{step.function} {attributes} part {step.part} {args}"
    values = ",".join(f"{name}={value}" for name, value in sorted(step.values.items()))
    args = " ".join(f"{kind}:{value if kind == 'map' else format(float(value), '.9g')}" for kind, value in step.args)
    return f"{step.kernel}({values}) grid {list(step.grid)} block {list(step.block)} smem {step.smem} args {args}"


def digest(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def found(name: str) -> dict[str, dict[str, object]]:
    """Returns "network device mode" -> record, for one network."""
    rows = {}
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        path, shapes = find(name, Path(folder))
        for device in DEVICES:
            for mode in MODES:
                engine = gr.build(path, sparsity=mode, device=device, shapes=shapes)
                rows[f"{name} {device} {mode}"] = record(engine)
    return rows


def differences(row: str, then: dict[str, object] | None, now: dict[str, object]) -> str:
    """Returns a line with the differences from the record; "" if there are none."""
    if then is None:
        return f"{row}: no record"
    changes = [f"{fact} {then.get(fact)} -> {value}" for fact, value in now.items() if then.get(fact) != value]
    return f"{row}: {', '.join(changes)}" if changes else ""


def by_line(rows: Mapping[str, object]) -> str:
    """Returns a JSON object with a line for each entry, sorted by key."""
    return "{\n" + ",\n".join(f"{json.dumps(key)}: {json.dumps(rows[key])}" for key in sorted(rows)) + "\n}"


def everything() -> list[str]:
    models = [path.stem for path in MODELS.glob("*.onnx")]
    return sorted([*models, *NETWORKS, *(n for n in light.NAMES if n not in SLOW), *topologies.NAMES])


def held(
    records: Path, find_rows: Callable[[str], dict[str, dict[str, object]]], names: Sequence[str], write: bool, jobs: int
) -> int:
    """Compares rows of these networks with a file of records; prints each difference and returns their number. `write`: the
    found rows become the record.
    """
    known = json.loads(records.read_text()) if records.exists() else {}
    wanted = [n for name in names for n in (SIX if name == "six" else (name,))] or everything()
    different = 0
    with processes.pool(jobs) as pool:
        for name, rows in zip(wanted, pool.map(find_rows, wanted), strict=True):
            for row, now in rows.items():
                if not write and (told := differences(row, known.get(row), now)):
                    different += 1
                    click.echo(told)
                known[row] = now
            click.echo(f"{name}: looked at", err=True)
    if write:
        records.write_text(by_line({row: now for row, now in known.items() if names or row.split()[0] in wanted}) + "\n")
    return different


@click.command()
@click.argument("names", nargs=-1)
@click.option("--write", is_flag=True, help="Take what is found as the record.")
@click.option("--jobs", default=2, show_default=True, help="Networks at a time.")
def main(names: tuple[str, ...], write: bool, jobs: int) -> None:
    if held(RECORDS, found, names, write, jobs):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
