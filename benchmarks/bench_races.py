"""How often a race chooses a tactic that is slower than the best: the decisions of tactics/measure/race.py on a simulated GPU.

    python -m benchmarks.bench_races [--races 1000]

The problems are those of resnet20 (batch 32) and squeezenet with all their tactics, at most 200 drawn of each; a tactic's true
time is its prediction times a lognormal error of 10 %, so that rivals differ as real ones do. A sample has lognormal noise, and
takes as long as on a GPU: the L2's flush, a warm run, the run that is timed. A clock at 0.8 for 30 of every 100 ms slows them
all. A choice is wrong if it takes over 1 % more than the best tactic of the problem, or of the cell.
"""

import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import click

from benchmarks.bench_plan import MODELS
from benchmarks.gpu_networks import Collecting, fewer_tactics
from cuda_kernels.device import named
from gpu_runtime import pipeline
from tactics.measure.race import Race, quantiles
from tactics.measure.racing import cell_of
from tactics.planner.grouping import grouped
from tactics.sampling.samples import Steady

NETWORKS = {"resnet20_cifar10": {"input": (32, 3, 32, 32)}, "squeezenet11_fp16": None}
MOST, LEAST = 200, 20  # tactics of a race
ERROR = 0.10  # of the predictions
WRONG = 0.01
FLUSH_US, SAMPLE_US, HOST_US, FULL_MHZ = 80.0, 50.0, 20.0, 1980.0
Rivals = Sequence[tuple[str, object, float]]  # (name, cell, predicted microseconds) of each tactic
Clock = Callable[[float], float]  # microseconds since the start -> share of the full clock


def full(_: float) -> float:
    return 1.0


def throttled(now_us: float) -> float:
    return 0.8 if now_us % 100_000 < 30_000 else 1.0


@dataclass
class Gpu:
    """A simulated GPU with a child process that draws samples. `knows`: whether the child repeats samples taken at a low clock
    (tactics/sampling/samples.py).
    """

    times: Mapping[str, float]
    noise: float
    clock: Clock
    knows: bool
    rng: random.Random
    now_us: float = 0.0
    asked: int = 0
    steady: Steady = field(default_factory=Steady)

    def samples(self, names: Sequence[str], count: int) -> list[tuple[str, float]]:
        """Returns (name, microseconds) of `count` samples of each tactic, interleaved in random order."""
        order = [*names] * count
        self.rng.shuffle(order)
        return [(name, self._sample(self.times[name])) for name in order]

    def _sample(self, us: float) -> float:
        self.asked += 1
        if not self.knows:
            return self._once(us)[0]
        return self.steady.take(lambda: self._once(us), self._pause).us

    def _once(self, us: float) -> tuple[float, float]:
        """Returns (a sample, the MHz of the clock during the flush before it)."""
        clock = self.clock(self.now_us)
        self.now_us += FLUSH_US / clock + max(us, SAMPLE_US)
        slowed = us / self.clock(self.now_us)
        self.now_us += max(us, SAMPLE_US) + HOST_US
        return slowed * math.exp(self.rng.gauss(0, self.noise)), FULL_MHZ * clock

    def _pause(self, wait_ms: float) -> None:
        self.now_us += 1e3 * wait_ms


def raced(gpu: Gpu, cells: Mapping[str, object]) -> dict[str, float]:
    """Returns tactic -> its time, measured as tactics.measure.timing does: each tactic alone once, then rivals together."""
    race = Race(cells, {}, {})
    while True:
        race.settle()
        names, count = race.request()
        if not count:
            return {name: quantiles(samples)[1] for name, samples in race.samples.items()}
        alone = not race.samples[names[0]]
        for some in [[name] for name in names] if alone else [names]:
            for name, us in gpu.samples(some, count):
                race.add(name, [us])


def fixed(count: int) -> Callable[[Gpu, Mapping[str, object]], dict[str, float]]:
    """Returns a function that measures each tactic by the median of `count` samples."""

    def choose(gpu: Gpu, cells: Mapping[str, object]) -> dict[str, float]:
        return {name: statistics.median(us for _, us in gpu.samples([name], count)) for name in cells}

    return choose


ROWS = (  # title; (noise of a sample, clock, whether the child knows the clock, how samples are spent)
    ("race", 0.05, full, True, raced),
    ("10 samples each", 0.05, full, True, fixed(10)),
    ("30 samples each", 0.05, full, True, fixed(30)),
    ("race", 0.02, full, True, raced),
    ("race, clock at 0.8 for 30 of 100 ms", 0.02, throttled, True, raced),
    ("the same, samples kept whatever the clock", 0.02, throttled, False, raced),
)


def problems() -> list[Rivals]:
    """Returns the tactics of each problem of both networks that has more than a few."""
    timer = Collecting(named("h200"))
    with fewer_tactics(False, lambda *_: timer):
        for name, shapes in NETWORKS.items():
            pipeline.build(MODELS / f"{name}.onnx", sparsity="force", shapes=shapes, device="h200")
    asked = {str(problem): (problem, tactics) for problem, tactics in timer.work if len(tactics) > LEAST}
    times = [timer(problem, tactics) for problem, tactics in asked.values()]
    return [[(t.name, cell_of(t), time.us) for t, time in found.items()] for found in times]


def loss(times: Mapping[str, float], measured: Mapping[str, float], names: Sequence[str]) -> float:
    """Returns how much longer the tactic with the shortest measured time takes than the best one, as a share of the best."""
    return times[min(names, key=measured.__getitem__)] / min(times[name] for name in names) - 1


def row(rivals: Sequence[Rivals], races: int, noise: float, clock: Clock, knows: bool, choose: Callable) -> list[float]:
    """Returns percent of problems decided wrong, their mean loss, percent of cells decided wrong, samples of a tactic, its
    milliseconds.
    """
    whole, cells, samples, tactics, spent_us = [], [], 0, 0, 0.0
    for i in range(races):
        rng = random.Random(i)
        found = rivals[i % len(rivals)]
        some = rng.sample(found, min(MOST, len(found)))
        times = {name: us * math.exp(rng.gauss(0, ERROR)) for name, _, us in some}
        gpu = Gpu(times, noise, clock, knows, rng)
        measured = choose(gpu, {name: cell for name, cell, _ in some})
        whole.append(loss(times, measured, list(times)))
        cells += [loss(times, measured, names) for names in grouped((cell, name) for name, cell, _ in some).values()]
        samples, tactics, spent_us = samples + gpu.asked, tactics + len(some), spent_us + gpu.now_us
    wrong = [100 * sum(x > WRONG for x in losses) / len(losses) for losses in (whole, cells)]
    return [wrong[0], 100 * statistics.fmean(whole), wrong[1], samples / tactics, spent_us / tactics / 1e3]


@click.command()
@click.option("--races", default=1000, show_default=True, help="Races of a row.")
def main(races: int) -> None:
    rivals = problems()
    print(f"{races} races of a row; problems and cells whose choice takes over {WRONG:.0%} more than the best\n")
    print("| samples | noise | problems | mean loss | cells | samples a tactic | GPU ms a tactic |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for label, noise, clock, knows, choose in ROWS:
        problem, loss, cell, samples, ms = row(rivals, races, noise, clock, knows, choose)
        numbers = f"{problem:.1f} % | {loss:.2f} % | {cell:.1f} % | {samples:.1f} | {ms:.1f}"
        print(f"| {label} | {noise:.0%} | {numbers} |", flush=True)


if __name__ == "__main__":
    main()
