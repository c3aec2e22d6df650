"""Whether noise chooses a plan: builds that differ in nothing but the noise of their samples, on a simulated GPU.

    python -m benchmarks.bench_seeds [--seeds 10] [--level 3] [NAME ...]

The truth is that of benchmarks.bench_lazy. A sample has 2 % of log-normal noise; 5 % of samples take four times as long; the
clock is at 0.8 for 30 of every 100 ms, which the samples know. Decisions are those of tactics/measure/race.py and lazy.py.
"""

import math
import random
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import click

import gpu_runtime as gr
from benchmarks.bench_lazy import NETWORKS, Truth
from benchmarks.bench_races import Gpu, full, throttled
from cuda_kernels.device import Device
from gpu_runtime import pipeline
from gpu_runtime.text import table
from tactics.measure.lazy import LEVELS, Lazy
from tactics.measure.race import Race, quantiles
from tactics.measure.racing import cell_of
from tactics.measure.timing import Time
from tactics.problems.problem import Problem
from tactics.tactic import Tactic

NOISE, TAILS, TAIL = 0.02, 0.05, 4.0


@dataclass
class Tailed(Gpu):
    """A GPU of which some launches take longer."""

    tails: float = 0.0

    def _sample(self, us: float) -> float:
        return super()._sample(us) * (TAIL if self.rng.random() < self.tails else 1.0)


class Raced(Truth):
    """A timer that races on a simulated GPU; `clock`, `tails`: of that."""

    def __init__(self, device: Device, seed: int, clock: Callable[[float], float], tails: float) -> None:
        super().__init__(device, 1.0)
        self._gpu = Tailed({}, NOISE, clock, True, random.Random(seed), tails=tails)
        self._found: dict[Problem, dict[Tactic, tuple[float, int]]] = {}

    def __call__(self, problem: Problem, tactics: Iterable[Tactic]) -> dict[Tactic, Time]:
        asked, known = tuple(tactics), self._found.setdefault(problem, {})
        self._gpu.times = {t.name: self._time(problem, t).us for t in asked}
        race = Race({t.name: cell_of(t) for t in (*asked, *known)}, {}, {t.name: time for t, time in known.items()})
        while True:
            race.settle()
            names, count = race.request()
            if not count:
                break
            for some in [[name] for name in names] if not race.samples[names[0]] else [names]:
                for name, us in self._gpu.samples(some, count):
                    race.add(name, [us])
        found = {}
        for t in asked:
            low_us, us, high_us = quantiles(race.samples[t.name])
            found[t] = Time(us, low_us, high_us)
        known |= {t: (time.us, len(race.samples[t.name])) for t, time in found.items()}
        return found


def built(name: str, seed: int, level: int, clock: Callable[[float], float], tails: float) -> tuple[str, float]:
    """(the plan in words, what it truly takes without its reformats)."""
    path, shapes = NETWORKS[name]
    made: list[Raced] = []

    def make(device: Device, *_: Any) -> Any:
        made.append(Raced(device, seed, clock, tails))
        return Lazy(made[0], device, LEVELS[level])

    with mock.patch.object(pipeline, "make_timer", make):
        layers = gr.build(path, sparsity="force", shapes=shapes, device="h200", risk=0.5).plan.layers
    true = [made[0]._time(la.problem, la.tactic).us for la in layers if la.problem and la.tactic]
    return "\n".join(f"{la.name} {la.tactic_name}" for la in layers), math.fsum(true)


@click.command(help=__doc__)
@click.argument("names", nargs=-1, type=click.Choice([*NETWORKS]))
@click.option("--seeds", type=click.IntRange(2), default=10, show_default=True)
@click.option("--level", type=click.IntRange(1, 4), default=3, show_default=True)
def main(names: tuple[str, ...], seeds: int, level: int) -> None:
    warnings.simplefilter("ignore", RuntimeWarning)
    rows = []
    for name in names or ("resnet20", "squeezenet"):
        for what, clock, tails in (
            ("noise", full, 0.0),
            ("and tails", full, TAILS),
            ("and a clock that falls", throttled, TAILS),
        ):
            plans, us = zip(*(built(name, seed, level, clock, tails) for seed in range(seeds)), strict=True)
            rows.append(
                [name, what, str(len(set(plans))), f"{min(us):.2f}", f"{max(us):.2f}", f"{100 * (max(us) / min(us) - 1):.2f} %"]
            )
    click.echo("\n".join(table(["network", "samples with", "plans", "us, least", "most", "apart"], rows, right=range(2, 6))))


if __name__ == "__main__":
    main()
