"""How many tactics a build times on a GPU, and how good its plan is, on a simulated one.

    python -m benchmarks.bench_lazy [--level 3] [--factor 1.0] [NAME ...]

The truth of a tactic is its estimate times `--factor` and a log-normal error, 15 % of each problem and 10 % of each tactic, but
no less than any kernel needs. Each network is built with every tactic timed (level 5), and at `--level`.
"""

import math
import random
import time
import warnings
import zlib
from pathlib import Path
from typing import Any
from unittest import mock

import click

import gpu_runtime as gr
from benchmarks.bench_plan import MODELS
from benchmarks.experiments.kernels import Rehearsed, launched
from cuda_kernels.device import Device
from gpu_runtime.building import build as building
from gpu_runtime.text import table
from tactics.measure.lazy import LEVELS, Lazy
from tactics.problems.problem import Problem
from tactics.roofline import least_us
from tactics.tactic import Tactic

DIGITS = Path(__file__).parent / "digits" / "digits_sparse.onnx"
NETWORKS: dict[str, tuple[Path, dict[str, tuple[int, ...]] | None]] = {
    "digits": (DIGITS, {"x": (8, 1, 8, 8)}),
    "resnet20": (MODELS / "resnet20_cifar10.onnx", {"input": (32, 3, 32, 32)}),
    "squeezenet": (MODELS / "squeezenet11_fp16.onnx", None),
    "yolox_nano": (MODELS / "yolox_nano.onnx", None),
}


def truth(device: Device, factor: float) -> Rehearsed:
    """Returns a simulated GPU: the true times of tactics, and the tactics that were timed on it."""

    def us_of(problem: Problem, tactic: Tactic, us: float) -> float:
        error = 0.15 * _drawn(str(problem)) + 0.10 * _drawn(f"{problem}{tactic.name}")
        return max(us * factor * math.exp(error), least_us(problem, tactic, device)[0])

    return Rehearsed(device, us_of)


def kernels(gpu: Rehearsed) -> int:
    return len(set(launched(gpu.timed)))


def _drawn(text: str) -> float:
    return random.Random(zlib.crc32(text.encode())).gauss(0, 1)


def built(name: str, level: int, factor: float) -> tuple[float, Rehearsed, float]:
    """Builds the network; returns (microseconds of the plan, the GPU with its timed tactics, CPU seconds of the build)."""
    path, shapes = NETWORKS[name]
    made: list[Rehearsed] = []

    def make(device: Device, *_: Any) -> Any:
        made.append(truth(device, factor))
        return Lazy(made[0], device, LEVELS[level]) if level in LEVELS else made[0]

    begun = time.process_time()
    with mock.patch.object(building, "make_timer", make):
        engine = gr.build(path, sparsity="force", shapes=shapes, device="h200", risk=0.5)
    return engine.plan.solution.total_us, made[0], time.process_time() - begun


@click.command(help=__doc__)
@click.argument("names", nargs=-1, type=click.Choice([*NETWORKS]))
@click.option("--level", type=click.IntRange(1, 4), default=3, show_default=True)
@click.option("--factor", type=click.FloatRange(0, min_open=True), default=1.0, show_default=True)
def main(names: tuple[str, ...], level: int, factor: float) -> None:
    warnings.simplefilter("ignore", RuntimeWarning)
    rows = []
    for name in names or NETWORKS:
        best_us, every, _ = built(name, 5, factor)
        us, timed, seconds = built(name, level, factor)
        share = f"{100 * len(timed.timed) / len(every.timed):.1f} %"
        counts = f"{len(timed.timed):,}", f"{len(every.timed):,}", share, f"{kernels(timed):,}", f"{kernels(every):,}"
        rows.append([name, *counts, f"{us / best_us:.4f}", f"{seconds:.0f} s"])
    header = ["network", "timed", "of pairs", "share", "kernels", "of", "plan", "CPU"]
    click.echo("\n".join(table(header, rows, right=range(1, 8))))


if __name__ == "__main__":
    main()
