"""The race of a problem's tactics: who gets how many samples, and when a tactic has enough. It decides, and asks nobody.

The planner needs the best tactic of every cell (same formats, same sparseness), and most of all the best of the problem. So all
get one sample, those near the best of their cell more, and those near the best of the problem most: up to STEPS[-1]. Who is
near is judged by the noise of the samples at hand, so a quiet GPU is asked less often.
"""

import math
import statistics
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

STEPS: tuple[int, ...] = (1, 2, 4, 7, 12, 20, 30, 45, 70, 120)  # samples that a tactic has after each request
MOST_IN_CELL = 30  # samples of a tactic that may be the best of its cell, but not of the problem
# Out with up to two samples: this many times the best of the cell, where that is shorter than FAR_SHORT_US the second.
FIRST_FAR, FAR, FAR_SHORT, FAR_SHORT_US = 10.0, 1.5, 2.0, 10.0
HELD_UP = 1.5  # times the 20 % quantile, of three samples or more at least the second: longer is none of the kernel's time
DOUBT = 2.5  # standard errors of the difference to the best within which a tactic may still be the best
ENOUGH = 0.004  # relative standard error from which on no further sample is needed


def quantiles(samples: Sequence[float]) -> tuple[float, float, float]:
    """The 20 % quantile, the mean of the middle half and the 80 % quantile, of the samples without launches that something
    held up. The mean is nearer to the truth than the median is (with normal noise as near as with a third more samples), and no
    outlier moves it either."""
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
    """`cells`: tactic -> what it competes in. `begun`: samples of tactics that have some; `known`: tactic -> (its time, number
    of its samples) of those that are done. Times in microseconds.

    Call `settle`, then ask for what `request` wants and `add` it, until there is nothing that it wants.
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
        """Removes a tactic that failed, or could not be asked."""
        self._left.remove(name)

    def request(self) -> tuple[list[str], int]:
        """Returns (the tactics with the fewest samples, how many more each is to get); ([], 0) at the end."""
        names = self._fewest()
        have = len(self.samples[names[0]]) if names else STEPS[-1]
        return names, next((step - have for step in STEPS if step > have), 0)

    def settle(self) -> list[str]:
        """Of those of the fewest samples, if they have any: the tactics that have enough, and are left in peace from now on."""
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
        """`best`: of its cell; `first`: the best time of the problem."""
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
        """The relative standard deviation of a sample, robust: from the median deviation of all that are in the race. More
        where that are few samples, which may agree by chance."""
        found = []
        for name in self._left:
            us, count = self._times.get(name, (0.0, 0))
            if count > 1:
                scale = math.sqrt(count / (count - 1))
                found += [abs(sample / us - 1) * scale for sample in self.samples[name]]
        return 1.4826 * statistics.median(found) * (1 + 6 / len(found)) if found else 0.0
