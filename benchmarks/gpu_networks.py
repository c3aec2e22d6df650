"""The part of `make gpu` that builds whole networks with measured times, runs and compares them; and the kernels to compile
first.

Networks: from benchmarks/digits, and from the folder GPU_RUNTIME_MODELS where it is set. `small`: one of two layers, and of
their tactics few, for a machine on which a kernel takes seconds; such a plan says nothing of speed.
"""

import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import onnx

import gpu_runtime as gr
from benchmarks import hardware
from benchmarks.networks import Net
from cuda_kernels.device import Device, current
from gpu_runtime.accuracy import sessions
from gpu_runtime.building import build as building
from gpu_runtime.building.in_network import replay_us
from gpu_runtime.engine import Engine
from gpu_runtime.runtime.context import Context
from gpu_runtime.runtime.findings import Solution, SparsityRecord
from tactics import codec
from tactics.measure.race import times_of
from tactics.measure.timing import Around, Predicted, Time, Timer
from tactics.problems.problem import Problem
from tactics.tactic import Tactic, Tile

MOST_ERROR = 2e-2  # difference from the emulator's outputs, of their range: sums in another order, FP16 after each layer
ROOT = Path(__file__).resolve().parents[1]
DIGITS = ROOT / "benchmarks" / "digits"
# file: {input: shape} for dynamic sizes, in the order in which networks are run.
MODELS: dict[str, dict[str, tuple[int, ...]]] = {
    "resnet20_cifar10": {"input": (32, 3, 32, 32)},
    "super_resolution_10": {"input": (1, 1, 224, 224)},
    "realesr_animevideov3": {"input": (1, 3, 64, 64)},
    "squeezenet11_fp16": {},
}


@dataclass(frozen=True, slots=True)
class Case:
    """A network of the benchmark. `shapes`: of its inputs, if they are dynamic."""

    path: Path
    shapes: Mapping[str, tuple[int, ...]]
    sparsity: str

    def __str__(self) -> str:
        return f"{self.path.stem} {self.sparsity} {' '.join('x'.join(map(str, s)) for s in self.shapes.values())}".strip()


def cases(small: bool, out: Path) -> tuple[list[Case], str]:
    """Returns (the networks to build, a text on those that are left out). The small network is written into the folder
    `out`.
    """
    if small:
        note = "small: one network of two layers and few of its tactics; nothing here says how fast anything is"
        return [Case(two_layers(out / "two_layers.onnx"), {}, "force")], note
    folder = os.environ.get("GPU_RUNTIME_MODELS")
    digits = [(f"digits_{kind}.onnx", n) for kind in ("dense", "sparse") for n in (360, 1)]
    todo = [Case(DIGITS / name, {"x": (n, 1, 8, 8)}, "enable") for name, n in digits]
    for name, shapes in MODELS.items() if folder else ():
        todo += [Case(Path(str(folder)) / f"{name}.onnx", shapes, sparsity) for sparsity in ("disable", "force")]
    return todo, "" if folder else "GPU_RUNTIME_MODELS is not set: only the networks of benchmarks/digits"


def two_layers(path: Path) -> Path:
    """Saves a network of a convolution, a ReLU and a convolution; returns its path."""
    n = Net("two_layers", (1, 16, 6, 6))
    x = n.relu(n.conv("x", "first", 32, bias=False), "relu")
    onnx.save(n.finish(n.conv(x, "second", 16, 1, bias=False)), path)
    return path


# ---- fewer tactics, and their launches


def few(tactics: Iterable[Tactic]) -> list[Tactic]:
    """Returns, for each kernel and formats, the tactic of the smallest tile; if some have linear or channels-last formats, only
    these.
    """
    tactics = list(tactics)
    usual = [t for t in tactics if {f.layout for f in (*t.ins, t.out)} <= {"chw", "hwc8"}]
    smallest: dict[Any, tuple[int, Tactic]] = {}
    for t in usual or tactics:
        size, cell = t.tile.m * t.tile.n if isinstance(t.tile, Tile) else 0, (t.kernel, t.ins, t.out)
        if cell not in smallest or size < smallest[cell][0]:
            smallest[cell] = size, t
    return [t for _, t in smallest.values()]


class Few(Around):
    """A timer that times few of the tactics that it is asked for, as if the others could not run."""

    def __call__(self, problem: Problem, tactics: Iterable[Tactic]) -> Mapping[Tactic, Time]:
        return self.timer(problem, few(tactics))

    def prepare(self, work: Iterable[tuple[Problem, Sequence[Tactic]]]) -> None:
        self.timer.prepare((problem, few(tactics)) for problem, tactics in work)

    def refine(self, pairs: Iterable[tuple[Problem, Tactic]]) -> bool:
        changed = self.timer.refine(pairs)
        self.early = self.timer.early
        return changed


class Collecting(Predicted):
    """A timer that predicts, and keeps the tactics that it was asked for."""

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self.work: list[tuple[Problem, Sequence[Tactic]]] = []

    def __call__(self, problem: Problem, tactics: Iterable[Tactic]) -> dict[Tactic, Time]:
        asked = tuple(tactics)
        self.work.append((problem, asked))
        return super().__call__(problem, asked)


@contextlib.contextmanager
def fewer_tactics(small: bool = True, make: Callable[..., Timer] = building.make_timer) -> Iterator[None]:
    """In the block, builds use the timers of `make`, with few tactics if `small`."""

    def timer(*args: Any, **options: Any) -> Any:
        return Few(make(*args, **options)) if small else make(*args, **options)

    with mock.patch.object(building, "make_timer", timer):
        yield


def work(device: Device, small: bool, folder: Path) -> list[tuple[Problem, Sequence[Tactic]]]:
    """Returns the problems of all networks, each with the tactics that a build times for it."""
    timer = Collecting(device)
    with fewer_tactics(small, lambda *_, **__: timer):
        for case in cases(small, folder)[0]:
            if case.path.exists():
                shapes = dict(case.shapes) or None
                # A level at which no plan runs as a whole.
                gr.build(case.path, sparsity=case.sparsity, shapes=shapes, device=device, optimization_level=1)
    return timer.work


# ---- build, run, compare, time


def networks_part(out: Path, seconds: float, small: bool) -> int:
    """Builds, runs and compares the networks; returns the exit status. The result is written after each step of each network,
    so that an early end loses that step only.
    """
    end = time.monotonic() + seconds
    todo, note = cases(small, out)
    data: dict[str, Any] = hardware.header(current())
    data |= {"note": note, "networks": [], "errors": {}, "left_out": [str(c) for c in todo]}
    path = out / "networks.json"
    hardware.write(path, data)
    for case in todo:
        label = str(case)
        if time.monotonic() > end - 10:
            break
        row: dict[str, Any] = {"network": label}
        data["left_out"].remove(label)
        data["unfinished"] = row

        def save() -> None:
            hardware.write(path, data)

        try:
            if not case.path.exists():
                raise FileNotFoundError(case.path.name)
            network(case, row, out / "timings.jsonl", small, save)
            data["networks"].append(row)
            print(f"{label}: {line(row)}", flush=True)
            if wrong := why_wrong(row):
                data["errors"][label] = wrong
        except Exception as e:  # one network's failure leaves the others
            data["errors"][label] = f"{type(e).__name__}: {e}"[:2000]
            print(f"{label}: {data['errors'][label]}"[:400], flush=True)
        del data["unfinished"]
        save()
    return 1 if data["errors"] or not data["networks"] else 0


def network(case: Case, row: dict[str, Any], cache: Path, small: bool, save: Callable[[], None]) -> None:
    """Builds one network with measured times, runs it, compares it with the emulator and onnxruntime, and times it. The results
    of each step are put into `row`, and saved.
    """
    with tempfile.TemporaryDirectory() as temp:
        pruned = Path(temp) / "pruned.onnx"
        saved = pruned if case.sparsity == "force" else None
        begun = time.monotonic()
        save()
        with fewer_tactics(small):
            shapes = dict(case.shapes) or None
            engine = gr.build(case.path, sparsity=case.sparsity, shapes=shapes, timing_cache=cache, save_pruned=saved)
        row |= {"build_s": time.monotonic() - begun, "timing": asdict(engine.record.timing)}
        row["plan"] = codec.to_json(Solution, engine.plan.solution, defaults=True)
        row["sparsity"] = codec.to_json(SparsityRecord, engine.sparsity, defaults=True)
        save()
        feeds = feeds_for(engine, case.path)
        with engine.context() as ctx:
            outputs = ctx.run(feeds)
            row["finite"] = all(bool(np.isfinite(v).all()) for v in outputs.values())
            row["network_us"] = replay_times(ctx, 5 if small else 50)
            save()
            per_layer = ctx.profile(feeds, 2 if small else 10)
        row["layers"] = [
            {
                "name": la.name,
                "tactic": la.tactic_name,
                "planned_us": la.time_us,
                "profiled_us": round(statistics.median(times[i] for times in per_layer), 2),
            }
            for i, la in enumerate(engine.plan.layers)
        ]
        save()
        row["error_to_emulator"] = compared(outputs, lambda: emulated(engine, feeds))
        save()
        judged = pruned if pruned.exists() else case.path
        row["error_to_onnxruntime"] = compared(outputs, lambda: onnxruntime_run(judged, feeds))
    if case.path.parent == DIGITS and len(feeds["x"]) == 360:
        with np.load(DIGITS / "heldout.npz") as heldout:
            row["accuracy"] = float((outputs["logits"].argmax(1) == heldout["y"]).mean())


def why_wrong(row: dict[str, Any]) -> str:
    """Says why the network's outputs on the GPU are wrong; "" if they are right."""
    error = row["error_to_emulator"]
    if not row["finite"]:
        return "outputs hold infinity or NaN"
    if isinstance(error, float) and not error < MOST_ERROR:
        return f"outputs differ from the emulator's by {error:.1e} of their range, at most {MOST_ERROR:.0e} is allowed"
    return ""


def compared(outputs: dict[str, np.ndarray], run: Callable[[], dict[str, np.ndarray]]) -> float | str:
    """Returns the worst error, or a text on why there is none: a comparison that fails does not undo the measurement."""
    try:
        return worst_error(outputs, run())
    except Exception as e:  # any error: the result holds its text
        return f"{type(e).__name__}: {e}"[:500]


def emulated(engine: Engine, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    with engine.context(device="emulator") as ctx:
        return ctx.run(feeds)


def feeds_for(engine: Engine, path: Path) -> dict[str, np.ndarray]:
    """Returns random values in 0..1 for every input; for the digits network the held-out images."""
    rng = np.random.default_rng(0)
    feeds = {}
    for info in engine.plan.inputs:
        dtype = {"fp16": np.float16, "fp32": np.float32}[info.dtype]
        feeds[info.name] = rng.random(info.shape, np.float32).astype(dtype)
    if path.parent == DIGITS:
        with np.load(DIGITS / "heldout.npz") as heldout:
            feeds["x"] = heldout["x"][: len(feeds["x"])].astype(feeds["x"].dtype)
    return feeds


def replay_times(ctx: Context, count: int) -> dict[str, Any]:
    """Returns the median and quantiles of a replay of the context's graph, inputs already in place."""
    times = [replay_us(ctx) for _ in range(count + 5)][5:]
    return {**times_of(times, 2), "what": "one graph replay between two events, launch included"}


def worst_error(got: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> float:
    """Returns the largest difference relative to the expected range, the worst of all outputs."""
    errors = []
    for name, y in expected.items():
        y = np.asarray(y, np.float32)
        span = float(y.max() - y.min()) or 1.0
        errors.append(float(np.abs(np.asarray(got[name], np.float32).reshape(y.shape) - y).max()) / span)
    return max(errors)


def onnxruntime_run(path: Path, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return sessions.run(sessions.session(onnx.load(path)), feeds)


def table(data: dict[str, Any]) -> Iterator[str]:
    yield from (f"{row['network']}: {line(row)}" for row in data["networks"])


def line(row: dict[str, Any]) -> str:
    """Returns a network's row as one line."""

    def error(key: str) -> str:
        return f"{row[key]:.1e}" if isinstance(row[key], float) else "none"

    us = row["network_us"]["us"] if row["network_us"] else float("nan")
    picked, eligible = len(row["sparsity"]["picked"]), len(row["sparsity"]["eligible"])
    accuracy = f", accuracy {row['accuracy']:.4f}" if "accuracy" in row else ""
    return (
        f"{us:.1f} us (sum of layers {row['plan']['total_us']:.1f}), sparse {picked} of {eligible} eligible, "
        f"error to emulator {error('error_to_emulator')}, to onnxruntime {error('error_to_onnxruntime')}{accuracy}, "
        f"built in {row['build_s']:.1f} s"
    )


def main(argv: list[str] | None = None) -> int:
    from benchmarks.experiments.run import begun

    x = begun(__doc__ or "", argv)
    return networks_part(x.out.parent, x.left, x.small)


if __name__ == "__main__":
    sys.exit(main())
