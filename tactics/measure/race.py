"""The race of a problem's tactics: how many samples each tactic gets. It only decides; racing.py takes the samples.

The planner needs the best tactic of every cell (same formats, same sparseness), and most of all the best of the problem. So
each tactic gets one sample, those near the best of their cell get more, and those near the best of the problem most: up to
STEPS[-1]. A tactic is near if the noise of its samples could explain the difference, so a GPU with little noise needs fewer
samples.
"""

import math
import statistics
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

STEPS: tuple[int, ...] = (1, 2, 4, 7, 12, 20, 30, 45, 70, 120)  # samples that a tactic has after each request
MOST_IN_CELL = 30  # samples of a tactic that may be the best of its cell, but not of the problem
# A tactic is dropped that takes this many times as long as the best of its cell: FIRST_FAR after one sample, FAR after two, or
# FAR_SHORT after two if the best takes less than FAR_SHORT_US microseconds.
FIRST_FAR, FAR, FAR_SHORT, FAR_SHORT_US = 10.0, 1.5, 2.0, 10.0
HELD_UP = 1.5  # samples above this times the 20 % quantile (of 3 or more samples, at least the second) were held up by others
DOUBT = 2.5  # a tactic within this many standard errors of the best may be the best
ENOUGH = 0.004  # relative standard error from which on no further sample is needed


def quantiles(samples: Sequence[float]) -> tuple[float, float, float]:
    """Returns (20 % quantile, mean of the middle half, 80 % quantile) of the samples, without those that HELD_UP excludes.

    No outlier moves the mean of the middle half, nor the median; the mean has less noise: if the noise is normal, as little as
    the median of a third more samples has.
    """
    s = sorted(samples)
    usual = s[max(int(0.2 * (len(s) - 1)), min(1, len(s) // 3))]
    s = [x for x in s if x <= HELD_UP * usual]
    low, ends = int(0.2 * (len(s) - 1)), (len(s) + 1) // 4
    middle = s[ends : len(s) - ends]
    return s[low], min(max(statistics.fmean(middle), middle[0]), middle[-1]), s[-1 - low]


def times_of(samples: Sequence[float], digits: int = 4) -> dict[str, Any]:
    """Returns the quantiles of samples as a dict with the names that results use: low_us, us, high_us."""
    return dict(zip(("low_us", "us", "high_us"), (round(v, digits) for v in quantiles(samples)), strict=True))


class Race:
    """The state of a race: the samples of each tactic, in microseconds, and the tactics that need more.

    `cells`: tactic -> its cell, in which it competes; `begun`: tactic -> the samples that it has already; `known`: tactic ->
    (its time, the number of its samples) for tactics that need no more. Use: `settle`, then `add` the samples that `request`
    names, and again, until `request` names no tactic.
    """

    def __init__(
        self,
        cells: Mapping[str, Hashable],
        begun: Mapping[str, Sequence[float]],
        known: Mapping[str, tuple[float, int]],
    ):
        self._cells = cells
        self._times = dict(known)
        self.samples = {name: [*begun.get(name, ())] for name in cells if name not in known}
        self._left = list(self.samples)
        for name, samples in self.samples.items():
            self._count(name, samples)

    def add(self, name: str, samples: Iterable[float]) -> None:
        self.samples[name] += samples
        self._count(name, self.samples[name])

    def drop(self, name: str) -> None:
        """Removes a tactic that cannot be timed."""
        self._left.remove(name)

    def request(self) -> tuple[list[str], int]:
        """Returns (the tactics with the fewest samples, how many more samples each needs); ([], 0) at the end."""
        names = self._fewest()
        have = len(self.samples[names[0]]) if names else STEPS[-1]
        return names, next((step - have for step in STEPS if step > have), 0)

    def settle(self) -> list[str]:
        """Removes, and returns, those of the tactics with the fewest samples that need no more; none before the first
        samples."""
        names = self._fewest()
        if not names or not self.samples[names[0]]:
            return []
        best: dict[Hashable, str] = {}
        for name in sorted(self._times, key=self._times.__getitem__, reverse=True):
            best[self._cells[name]] = name
        noise, first = self._noise(), min(us for us, _ in self._times.values())
        done = [name for name in names if self._has_enough(name, best[self._cells[name]], first, noise)]
        gone = set(done)
        self._left = [name for name in self._left if name not in gone]
        return done

    def _fewest(self) -> list[str]:
        least = min((len(self.samples[name]) for name in self._left), default=0)
        return [name for name in self._left if len(self.samples[name]) == least]

    def _count(self, name: str, samples: Sequence[float]) -> None:
        if samples:
            self._times[name] = round(quantiles(samples)[1], 4), len(samples)

    def _has_enough(self, name: str, best: str, first: float, noise: float) -> bool:
        """Returns whether a tactic needs no more samples. `best`: the best tactic of its cell; `first`: the best time of the
        problem; `noise`: see _noise."""
        (us, count), (best_us, best_count) = self._times[name], self._times[best]
        if count <= 2:  # too few to know the noise; of two the shorter counts
            far = FIRST_FAR if count == 1 else FAR_SHORT if best_us < FAR_SHORT_US else FAR
            return min(self.samples[name]) > far * best_us
        doubt = DOUBT * noise
        if math.log(us / best_us) > doubt * math.sqrt(1 / count + 1 / best_count):
            return True
        near = math.log(us / first) <= doubt * math.sqrt(2 / count)
        return count >= (STEPS[-1] if near else min(MOST_IN_CELL, STEPS[-1])) or noise / math.sqrt(count) < ENOUGH

    def _noise(self) -> float:
        """Returns the relative standard deviation of a sample, estimated from the median deviation (1.4826 times it, for a
        normal distribution) of all tactics that are left. Few samples may agree by chance, so they count as more noise."""
        found = []
        for name in self._left:
            us, count = self._times.get(name, (0.0, 0))
            if count > 1:
                scale = math.sqrt(count / (count - 1))
                found += [abs(sample / us - 1) * scale for sample in self.samples[name]]
        return 1.4826 * statistics.median(found) * (1 + 6 / len(found)) if found else 0.0
