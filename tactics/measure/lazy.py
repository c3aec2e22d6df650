"""A timer that times few tactics and gives the others a lower bound, so that a plan of timed tactics is known to be the best.

A tactic that is not timed gets a lower bound: its estimate (tactics.predict) times the mean ratio of measured to estimated time
of its kernel so far, lowered by some standard deviations, but at least the hardware's least time (tactics.roofline). A planner
solves, lets the tactics of its plan be timed (`refine`), and solves again; once all tactics of a plan are timed, no other plan
is faster, unless a bound is too high. The ratios depend on the set of known times and not on their order, so a build with a
full cache ends with the same plan.

Example: tactic A is estimated at 10 us, tactic B at 14 us, both with an error of 15 %. At 2 standard deviations, with a ratio
of 1, the bounds are 7.4 and 10.4 us. A is timed: 9 us. B takes at least 10.4 us, so it is not timed.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

from cuda_kernels.device import Device
from tactics.measure.racing import cell_of
from tactics.measure.timing import Around, Time, Timer
from tactics.predict import predict, regime, sigmas
from tactics.problems.problem import Problem
from tactics.roofline import least_us
from tactics.tactic import Tactic

Pair = tuple[Problem, Tactic]
FEW = 5  # times of a kernel that correct its estimates; with fewer, those of all kernels do
UNSEEN = 0.3  # doubt about a kernel by other kernels' times: a standard deviation of the logarithm
USUAL = 0.1  # the share of all pairs that builds time in the end (docs/timing.md)
OPTIMISTIC = -0.35  # the logarithm of measured / estimated that is assumed before anything is measured


@dataclass(frozen=True, slots=True)
class Level:
    """How much is timed. `sigmas`: standard deviations by which bounds are below estimates; `nearest`: the number of further
    tactics of the same formats that are timed together with each tactic of a plan."""

    sigmas: float
    nearest: int


LEVELS = {1: Level(1.0, 1), 2: Level(1.0, 4), 3: Level(2.0, 4), 4: Level(3.0, 8)}  # by --builderOptimizationLevel


@dataclass(frozen=True, slots=True)
class _Estimate:
    """A predicted time. `log_us`: natural logarithm of the microseconds; `error`: standard deviation of `log_us`; `least`: the
    hardware's least time in microseconds."""

    log_us: float
    error: float
    least: float


class Lazy(Around):
    """A timer that lets another timer, `timer`, time the tactics given to `refine`, and gives the others lower bounds.

    `ended` returns whether timing is to stop: from then on a tactic without a time gets its corrected estimate, not a bound.
    `told`(done, total, expected) is called before each problem's tactics are timed: the number of timed tactics, of all, and of
    those that will probably be timed in the end.
    """

    def __init__(
        self,
        timer: Timer,
        device: Device,
        level: Level,
        ended: Callable[[], bool] = lambda: False,
        told: Callable[[int, int, int], None] = lambda done, total, expected: None,
    ):
        super().__init__(timer)
        self._device, self.level, self._ended, self._told = device, level, ended, told
        self._errors = sigmas(device)
        self._stale = False  # whether times became known after bounds were returned that these times correct
        self._times: dict[Problem, dict[Tactic, Time]] = {}
        self._open: dict[Problem, dict[Tactic, _Estimate]] = {}
        self._logs: dict[str, list[float]] = {}  # kernel -> logarithms of measured / estimated
        self._corrections: dict[str, tuple[float, float]] = {}

    def __call__(self, problem: Problem, tactics: Iterable[Tactic]) -> dict[Tactic, Time]:
        """Returns the known times, and lower bounds for the other tactics; tactics that failed are left out."""
        tactics = tuple(tactics)
        times, untimed = self._times.setdefault(problem, {}), self._open.setdefault(problem, {})
        if new := [t for t in tactics if t not in times and t not in untimed and not self._failed(problem, t)]:
            untimed.update((t, self._estimate(problem, t)) for t in new)
            self._learn(problem, known := self.timer.known(problem, new))
            self._stale |= bool(known)
            for t in filter(partial(self._failed, problem), new):  # as the timer has just told
                untimed.pop(t, None)
        found = ((t, times.get(t) or (self._bound(t, untimed[t]) if t in untimed else None)) for t in tactics)
        return {t: time for t, time in found if time is not None}

    def refine(self, pairs: Iterable[Pair]) -> bool:
        """Times the tactics of `pairs` that have no time yet, and with each the `level.nearest` untimed tactics of the same
        formats. Returns whether a time or a bound changed.
        """
        if self._stale and not self.early:
            self._stale = False
            return True
        wanted: dict[Problem, dict[Tactic, None]] = {}
        for problem, tactic in pairs:
            if tactic in self._open.get(problem, ()):
                wanted.setdefault(problem, {}).update(dict.fromkeys((tactic, *self._near(problem, tactic))))
        if not wanted or self.early:
            return False
        left = sum(map(len, wanted.values()))
        self.timer.prepare((p, tuple(tactics)) for p, tactics in wanted.items())
        for problem, tactics in wanted.items():
            if self._ended():
                self.early = True
                break
            done, total = self.counts
            self._told(done, total, max(round(USUAL * total), done + left))
            left -= len(tactics)
            self._learn(problem, self.timer(problem, tactics))
            for tactic in tactics:  # those that failed
                self._open[problem].pop(tactic, None)
        self._corrections.clear()
        return True

    @property
    def counts(self) -> tuple[int, int]:
        """Returns (the number of timed tactics, the number of all tactics that could be timed)."""
        timed = sum(map(len, self._times.values()))
        return timed, timed + sum(map(len, self._open.values()))

    def prepare(self, work: Iterable[tuple[Problem, Iterable[Tactic]]]) -> None:
        """Does nothing: which tactics are timed is not known before `refine`."""

    def _failed(self, problem: Problem, tactic: Tactic) -> bool:
        return bool(self.failures) and (str(problem), tactic.name) in self.failures

    def _estimate(self, problem: Problem, tactic: Tactic) -> _Estimate:
        parts = predict(problem, tactic, self._device)
        error, least = self._errors[regime(str(parts["bound"]))], least_us(problem, tactic, self._device)[0]
        return _Estimate(math.log(float(parts["total_us"])), error, least)

    def _learn(self, problem: Problem, times: Mapping[Tactic, Time]) -> None:
        untimed = self._open[problem]
        for tactic, time in times.items():
            self._logs.setdefault(tactic.kernel, []).append(math.log(time.us) - untimed.pop(tactic).log_us)
            self._times[problem][tactic] = time
        self._corrections.clear()

    def _bound(self, tactic: Tactic, of: _Estimate) -> Time:
        if tactic.kernel not in self._corrections:
            self._corrections[tactic.kernel] = self._correction(tactic.kernel)
        shift, doubt = self._corrections[tactic.kernel]
        sigmas = 0.0 if self.early else self.level.sigmas
        us = max(of.least, math.exp(of.log_us + shift - sigmas * math.hypot(of.error, doubt)))
        return Time(us, us, us, timed=False)

    def _correction(self, kernel: str) -> tuple[float, float]:
        """Returns (the mean of log(measured / estimated) for the kernel, a standard deviation to add to the estimate's own
        error: UNSEEN if the mean is of other kernels). The order of the times must not change the sum, hence fsum."""
        own = self._logs.get(kernel, [])
        if len(own) >= FEW:
            return math.fsum(own) / len(own), 0.0
        every = [x for logs in self._logs.values() for x in logs]
        return (math.fsum(every) / len(every) if every else OPTIMISTIC), UNSEEN

    def _near(self, problem: Problem, tactic: Tactic) -> list[Tactic]:
        """Returns the `level.nearest` untimed tactics with the lowest bounds among those of the same formats and sparseness."""
        cell = cell_of(tactic)
        same = [(self._bound(t, e).us, t.name, t) for t, e in self._open[problem].items() if cell_of(t) == cell]
        return [t for _, _, t in sorted(same) if t != tactic][: self.level.nearest]
