"""Times the plan as a whole on the GPU: its total, the layers that take longer in their places than alone, and whether close
rivals of its tactics are faster there.

A tactic is timed alone, behind itself, at one clock and with one state of L2; in the network it runs behind others. So a plan
that differs is taken only where the whole network, run in turns with it, is faster: first the plan that is best with the times
that layers take in their places, then each of a few tactics that are close to the plan's.
"""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING

import numpy as np

from cuda_kernels.launch import Cuda
from gpu_runtime.benchmark.inputs import random_inputs
from gpu_runtime.building.planner import PlannedNetwork, Planner
from gpu_runtime.building.record import trial
from gpu_runtime.planning import batch_pieces
from gpu_runtime.planning.entries import addresses
from gpu_runtime.progress import Progress, compiling, warn
from gpu_runtime.runtime.findings import Apart, Replaced
from tactics.kernels import KERNELS
from tactics.measure.timing import Around, Time, Timer, is_emulated
from tactics.planner.graph import Entry, to_ps
from tactics.planner.plan import solve
from tactics.sampling import faults

if TYPE_CHECKING:
    from gpu_runtime.runtime.context import Context
    from tactics.problems.problem import Problem
    from tactics.tactic import Tactic

MOST_RIVALS = 8
CLOSE, BETTER, APART = 0.03, 0.01, 0.15  # relative: a rival's time, a gain that counts, a layer's time in its place
SHORT_US = 0.5  # two times of a layer count as equal if they differ by less
TURN_S, EMULATED_TURN_S = 0.2, 0.002  # GPU time of one plan before the other's turn; the emulator is slow
SAMPLE_US = 500.0  # of replays between two events
LEAST_SAMPLES = 4  # of a turn
PROFILES = 20  # runs, each layer between two events
Change = Callable[[PlannedNetwork], PlannedNetwork]


def replay_us(context: Context, count: int = 1) -> float:
    """Returns the microseconds of one of `count` replays of a context's graph on a GPU, inputs already in place."""
    gpu = context.gpu
    if not isinstance(gpu, Cuda):
        raise TypeError("replays are timed on a GPU, got the emulator")
    start, stop = (gpu.cupy.cuda.Event() for _ in range(2))
    start.record(gpu.stream)
    for _ in range(count):
        context.replay()
    stop.record(gpu.stream)
    stop.synchronize()
    return 1e3 * float(gpu.cupy.cuda.get_elapsed_time(start, stop)) / count


class Running:
    """A plan that runs on the GPU, on random inputs; it is loaded at its first run, until `close`."""

    def __init__(self, planned: PlannedNetwork, planner: Planner):
        self.planned, self._planner, self._stack = planned, planner, ExitStack()
        self.engine = trial(planned.table, planned.chosen, planner.target)
        self.name = hashlib.sha256(repr(self.engine.plan.layers).encode()).hexdigest()[:24]
        self._count = max(1, round(SAMPLE_US / max(planned.chosen.us, 1.0)))  # runs in a sample

    @cached_property
    def _inputs(self) -> dict[str, np.ndarray]:
        return random_inputs(self.engine.inputs)

    @cached_property
    def _context(self) -> Context:
        context = self._stack.enter_context(
            self.engine.context(device="cuda", progress=compiling(self._planner.options.progress))
        )
        context.run(self._inputs)
        return context

    def close(self) -> None:
        self._stack.close()

    def turn(self) -> list[float]:
        """Returns samples of the microseconds of a run."""
        seconds = EMULATED_TURN_S if is_emulated() else TURN_S
        count = max(LEAST_SAMPLES, round(1e6 * seconds / SAMPLE_US))
        return [replay_us(self._context, self._count) for _ in range(count)]

    def layer(self, i: int) -> list[float]:
        """Returns the one sample of a layer's time in its place."""
        return [self._layers[i]]

    @cached_property
    def _layers(self) -> list[float]:
        """The microseconds of each layer in its place.

        An event between two layers takes time as well, the same at each: the median excess of a layer over its time alone.
        """
        layers = self.engine.plan.layers
        rows = self._context.profile(self._inputs, PROFILES)
        found = [statistics.median(row) for row in zip(*rows, strict=True)]
        longer = [us - layer.time_us for us, layer in zip(found, layers, strict=True) if layer.tactic is not None]
        extra = statistics.median(longer) if longer else 0.0
        return [max(0.05, us - extra) for us in found]


class _InPlace(Around):
    """A timer that knows how long some tactics take in their places in a network."""

    def __init__(self, timer: Timer, times: Mapping[tuple[Problem, Tactic], Time]):
        super().__init__(timer)
        self.times = times

    def __call__(self, problem: Problem, tactics: Iterable[Tactic]) -> dict[Tactic, Time]:
        return {t: self.times.get((problem, t), time) for t, time in self.timer(problem, tactics).items()}


def settle(planned: PlannedNetwork, planner: Planner) -> PlannedNetwork:
    """Runs several plans as a whole; returns the fastest, with the findings. The module's docstring says which are tried.

    Where the GPU has no memory for that, or the host no time, a RuntimeWarning says so, and the plan is the best so far.
    """
    planner.options.progress(Progress("network", planned.table.network.name))
    search = _Search(Running(planned, planner), planner)
    try:
        search.run()
    except Exception as e:
        if not (fault := faults.of_error(e)).passing:
            raise
        warn(f"{planned.table.network.name} was not run as a whole to the end: {fault.text}")
    finally:
        search.best.close()
    found = search.best.planned
    return replace(found, measured_us=search.whole_us, apart=search.apart, replaced=tuple(search.replaced))


class _Search:
    """A search for the plan that is fastest as a whole, `best`, with the findings about the others."""

    def __init__(self, best: Running, planner: Planner):
        self.best, self._planner, self._tried = best, planner, {best.name}
        self.apart: tuple[Apart, ...] = ()
        self.replaced: list[Replaced] = []
        self.whole_us: float | None = None

    def run(self) -> None:
        planner, timer = self._planner, self._planner.timer
        self.apart, corrected = _apart(self.best, timer)
        others: list[Change] = [partial(_replanned, planner, corrected)] if corrected else []
        others += [partial(_changed, op, entry) for op, entry in _rivals(self.best.planned)]
        if (whole := batch_pieces.without(self.best.planned.table.graph)) is not None:
            others.insert(0, lambda planned: replace(planned, chosen=solve(whole)))
        for change in others:
            if planner.options.ended():
                break
            rival = Running(change(self.best.planned), planner)
            if timer.early:  # timing ended while a plan was remade: it may hold unverified tactics
                break
            takes = rival.engine.plan.memory.activation_bytes
            if rival.name not in self._tried and (planner.options.activations is None or takes <= planner.options.activations):
                self._tried.add(rival.name)
                try:
                    self._compare(rival)
                finally:
                    if self.best is not rival:
                        rival.close()
        self.whole_us = timer.remembered(f"network {self.best.name}", "whole", self.best.turn).us

    def _compare(self, rival: Running) -> None:
        """Makes the rival the best plan if it is faster as a whole by more than noise."""
        mine, its, sigma = _in_turns(self.best, rival, self._planner.timer)
        if its >= mine * (1 - max(BETTER, 2 * sigma)):
            return
        before, after = self.best.planned.chosen.entries, rival.planned.chosen.entries
        swap = rival.planned.table is self.best.planned.table
        for op in after:
            was = before[op].name if op in before else ""
            if was != after[op].name:
                self.replaced.append(Replaced(op, was, after[op].name, round(mine, 6), round(its, 6), swap))
        self.best.close()
        self.best = rival


def _in_turns(mine: Running, its: Running, timer: Timer) -> tuple[float, float, float]:
    """Returns (microseconds of the one, of the other, the expected error of their quotient), from turns of both."""
    samples: tuple[list[float], list[float]] = ([], [])

    def measured(which: int) -> list[float]:
        for _ in range(0 if samples[0] else 2):
            for found, running in zip(samples, (mine, its), strict=True):
                found += running.turn()
        return samples[which]

    names = f"network {mine.name} in turns with {its.name}"
    times = [timer.remembered(names, which, partial(measured, i)) for i, which in enumerate(("the first", "the second"))]
    return times[0].us, times[1].us, math.hypot(*(_spread(t) for t in times)) / math.sqrt(LEAST_SAMPLES)


def _spread(time: Time) -> float:
    """The standard deviation of samples over their median: 60 % of them lie within 0.84 of it on either side."""
    return (time.high_us - time.low_us) / (2 * 0.84 * time.us)


def _apart(best: Running, timer: Timer) -> tuple[tuple[Apart, ...], dict[tuple[Problem, Tactic], Time]]:
    """Returns the layers whose times in their places differ from their times alone, and the times in place of their tactics."""
    found: list[Apart] = []
    times: dict[tuple[Problem, Tactic], list[float]] = {}
    before = ""
    for i, layer in enumerate(best.engine.plan.layers):
        if layer.tactic is None or layer.problem is None:
            continue
        us = timer.remembered(f"network {best.name}", f"layer {i}", partial(best.layer, i)).us
        if abs(us - layer.time_us) > max(APART * layer.time_us, SHORT_US):
            found.append(Apart(layer.name, round(layer.time_us, 6), round(us, 6), before))
            times.setdefault((layer.problem, layer.tactic), []).append(us)
        before = layer.name
    return tuple(found), {pair: Time(us := statistics.median(rows), us, us) for pair, rows in times.items()}


def _rivals(planned: PlannedNetwork) -> list[tuple[str, Entry]]:
    """Returns (op, another entry in its formats that takes about as long alone), the closest first."""
    table, chosen = planned.table, planned.chosen
    found: list[tuple[float, str, Entry]] = []
    for op, times in zip(table.network.ops, table.times, strict=True):
        entry = chosen.entry_of(op.name, op.when)
        if entry is None or entry.tactic is None:
            continue
        mine, at, own = times[entry.tactic], addresses(op.problem, entry.tactic), KERNELS[entry.tactic.kernel]
        most = mine.us * (1 + max(CLOSE, 2 * _spread(mine)))
        close = [
            (times[t].us, t.name, t)
            for t, time in times.items()
            if time.timed
            and time.us <= most
            and t != entry.tactic
            and addresses(op.problem, t) == at
            and (KERNELS[t.kernel].placed, KERNELS[t.kernel].placed_residual) == (own.placed, own.placed_residual)
        ]
        if close:
            us, _, rival = min(close)
            found.append((us / mine.us, op.name, replace(entry, tactic=rival, sparse=rival.sparse, time_ps=to_ps(us))))
    return [(name, entry) for _, name, entry in sorted(found, key=lambda row: row[:2])[:MOST_RIVALS]]


def _changed(op: str, entry: Entry, planned: PlannedNetwork) -> PlannedNetwork:
    """Returns the plan with this entry, if it has another one in the same formats; else the plan unchanged."""
    chosen, was = planned.chosen, planned.chosen.entries.get(op)
    if was is None or (was.ins, was.out) != (entry.ins, entry.out):
        return planned
    total = chosen.total_ps + entry.time_ps - was.time_ps
    return replace(planned, chosen=replace(chosen, entries={**chosen.entries, op: entry}, total_ps=total))


def _replanned(planner: Planner, corrected: Mapping[tuple[Problem, Tactic], Time], planned: PlannedNetwork) -> PlannedNetwork:
    """Returns the best plan with tactics' times corrected to their times in place."""
    table, chosen = replace(planner, timer=_InPlace(planner.timer, corrected))(planned.table.network)
    return replace(planned, table=table, chosen=chosen)
