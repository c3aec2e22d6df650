"""Decides which samples count: those taken while the SM clock was as high as usual in this build. Needs no GPU.

A GPU lowers its clock for some milliseconds where it draws too much power or is too warm. Rivals that are timed before and
during such a time cannot be compared, so a sample is repeated until the clock is back, with pauses between the tries.
"""

import math
import statistics
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

LOW = 0.97  # of the running median: the clock of a sample that is repeated. Measured clocks are off by less than 1 %.
TRIES = 20
PAUSE_MS, GROWTH, LONGEST_MS = 5.0, 1.4, 50.0  # the first pause, how much longer the next one is, and the longest
# Samples: a clock that rises is followed after half of the first, one that falls after half of the second.
RISING, LEVEL = 9, 255
LASTING = 3  # slow samples in a row, about 0.7 s each: this is the clock from now on, as under a lower power limit


class Sample(NamedTuple):
    """A time with `mhz`, the SM clock just before, None if unknown. `slow`: it counts although its clock is low."""

    us: float
    mhz: float | None
    slow: bool = False


class Steady:
    """Takes samples at a steady clock.

    `mhz`: the running median clock to begin with; None: from the first samples. `patience_ms`: the total of pauses from now on;
    callers set it again whenever pauses are allowed.
    """

    def __init__(self, mhz: float | None = None) -> None:
        self.patience_ms = math.inf
        self._clocks = deque([mhz] * RISING if mhz else [], maxlen=LEVEL)
        self._slow: list[float] = []

    @property
    def mhz(self) -> float | None:
        """The running median clock, None before the first sample; a short median, where it is higher.

        So a clock that rises is followed at once, and one that falls step by step is not taken for the usual one.
        """
        if not self._clocks:
            return None
        clocks = list(self._clocks)
        return max(statistics.median(clocks), statistics.median(clocks[-RISING:]))

    def take(self, sample: Callable[[], tuple[float, float | None]], pause: Callable[[float], None]) -> Sample:
        """Returns a sample whose clock is not low, or the last of TRIES.

        `sample` -> (microseconds, MHz or None); `pause` waits for a number of milliseconds.
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
