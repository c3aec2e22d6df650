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
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import click

import gpu_runtime as gr
from benchmarks.bench_plan import MODELS
from cuda_kernels.device import Device
from gpu_runtime.building import build as building
from gpu_runtime.text import table
from tactics.launches import binaries
from tactics.measure.lazy import LEVELS, Lazy
from tactics.measure.timing import Predicted, Time
from tactics.predict import predict_us
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


class Truth(Predicted):
    """A simulated GPU: the true times of tactics, and the tactics that were timed on it."""

    def __init__(self, device: Device, factor: float) -> None:
        super().__init__(device)
        self._factor, self.times = factor, dict[tuple[Problem, Tactic], Time]()

    def __call__(self, problem: Problem, tactics: Iterable[Tactic]) -> dict[Tactic, Time]:
        return {t: self._time(problem, t) for t in tactics}

    def known(self, problem: Problem, tactics: Iterable[Tactic]) -> dict[Tactic, Time]:
        return {}

    def _time(self, problem: Problem, tactic: Tactic) -> Time:
        if (problem, tactic) not in self.times:
            error = 0.15 * _drawn(str(problem)) + 0.10 * _drawn(f"{problem}{tactic.name}")
            us = predict_us(problem, tactic, self.device) * self._factor * math.exp(error)
            us = max(us, least_us(problem, tactic, self.device)[0])
            self.times[problem, tactic] = Time(us, us, us)
        return self.times[problem, tactic]

    @property
    def kernels(self) -> int:
        return len({item for problem, tactic in self.times for item in binaries(problem, tactic)})


def _drawn(text: str) -> float:
    return random.Random(zlib.crc32(text.encode())).gauss(0, 1)


def built(name: str, level: int, factor: float) -> tuple[float, Truth, float]:
    """Builds the network; returns (microseconds of the plan, the GPU with its timed tactics, CPU seconds of the build)."""
    path, shapes = NETWORKS[name]
    made: list[Truth] = []

    def make(device: Device, *_: Any) -> Any:
        made.append(Truth(device, factor))
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
        share = f"{100 * len(timed.times) / len(every.times):.1f} %"
        counts = f"{len(timed.times):,}", f"{len(every.times):,}", share, f"{timed.kernels:,}", f"{every.kernels:,}"
        rows.append([name, *counts, f"{us / best_us:.4f}", f"{seconds:.0f} s"])
    header = ["network", "timed", "of pairs", "share", "kernels", "of", "plan", "CPU"]
    click.echo("\n".join(table(header, rows, right=range(1, 8))))


if __name__ == "__main__":
    main()
