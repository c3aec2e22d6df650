"""Repeats samples that were taken at a low SM clock. This module only decides, and runs without a GPU.

A GPU lowers its clock for some milliseconds when it draws too much power or is too warm. Samples at different clocks cannot be
compared, so a sample is repeated, with pauses between the tries, until the clock is as high as usual in this build.
"""

import math
import statistics
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

LOW = 0.97  # a sample is repeated if its clock is below this share of the usual clock; clocks are measured to within 1 %
TRIES = 20  # of one sample
PAUSE_MS, GROWTH, LONGEST_MS = 5.0, 1.4, 50.0  # the first pause, the factor of each next one, and the longest
# The usual clock is the larger of two medians: of the last RISING samples, which soon follows a clock that rises, and of the
# last LEVEL samples, which follows a clock that falls only slowly.
RISING, LEVEL = 9, 255
# After LASTING slow samples in a row, each of about 0.7 s, their clock is the usual one, as under a lower power limit.
LASTING = 3


class Sample(NamedTuple):
    """One measured time, in microseconds. `mhz`: the SM clock just before, None if unknown; `slow`: whether the sample counts
    although its clock is low."""

    us: float
    mhz: float | None
    slow: bool = False


class Steady:
    """A taker of samples that repeats those at a low clock.

    `mhz`: the usual clock to begin with; None: the first samples give it. `patience_ms`: milliseconds that all further pauses
    together may take; callers set it anew for each request.
    """

    def __init__(self, mhz: float | None = None) -> None:
        self.patience_ms = math.inf
        self._clocks = deque([mhz] * RISING if mhz else [], maxlen=LEVEL)
        self._slow: list[float] = []

    @property
    def mhz(self) -> float | None:
        """The usual clock: the larger of the medians of the last RISING and the last LEVEL clocks; None before the first
        sample.

        It soon follows a clock that rises, and a clock that falls step by step does not pass for the usual one.
        """
        if not self._clocks:
            return None
        clocks = list(self._clocks)
        return max(statistics.median(clocks), statistics.median(clocks[-RISING:]))

    def take(self, sample: Callable[[], tuple[float, float | None]], pause: Callable[[float], None]) -> Sample:
        """Returns a sample whose clock is not low, or after TRIES or the end of `patience_ms` the last one, marked `slow`.

        `sample`() returns (microseconds, MHz or None); `pause`(ms) lets the GPU rest for milliseconds.
        """
        tries, wait_ms, usual = 1, PAUSE_MS, self.mhz
        while True:
            us, mhz = sample()
            if mhz is None:
                return Sample(us, None)
            if usual is None or mhz >= LOW * usual:
                self._clocks.append(mhz)
                self._slow.clear()
                return Sample(us, mhz)
            if tries == TRIES or wait_ms > self.patience_ms:
                break
            pause(wait_ms)
            tries += 1
            self.patience_ms -= wait_ms
            wait_ms = min(GROWTH * wait_ms, LONGEST_MS)
        self._slow.append(mhz)
        if len(self._slow) == LASTING:
            self._clocks = deque(self._slow, maxlen=LEVEL)
            self._slow.clear()
        return Sample(us, mhz, slow=True)
