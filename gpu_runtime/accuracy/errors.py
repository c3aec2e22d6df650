"""What an error of an output is: a ratio of signal to noise, and whether the largest of each row stays where it was."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np


@dataclass(slots=True)
class Sums:
    """Of one output over all samples so far: squares of what was expected, of the difference from it, and rows whose largest
    element is the same. `rows` is 0 where an output has no rows of scores: [samples, classes] and no other shape."""

    signal: float = 0.0
    noise: float = 0.0
    rows: int = 0
    same: int = 0

    def add(self, got: np.ndarray, expected: np.ndarray) -> None:
        y = expected.astype(np.float64)
        self.signal += float(np.square(y).sum())
        self.noise += float(np.square(got.astype(np.float64) - y).sum())
        if y.ndim == 2 and y.shape[1] > 1 and expected.dtype.kind == "f":
            self.rows += len(y)
            self.same += int((got.argmax(1) == y.argmax(1)).sum())


@dataclass(frozen=True, slots=True)
class Accuracy:
    """`snr_db`: ratio of signal to noise of the worst output, infinite where nothing differs; `agreement`: share of samples
    whose top-1 is the same, None where no output has classes."""

    snr_db: float
    agreement: float | None


@dataclass(slots=True)
class Difference:
    """Sums of all outputs by name."""

    outputs: dict[str, Sums] = field(default_factory=dict)

    def add(self, got: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> None:
        for name, y in expected.items():
            if y.dtype.kind in "fiub" and y.size:
                self.outputs.setdefault(name, Sums()).add(got[name], y)

    def accuracy(self) -> Accuracy:
        shares = [s.same / s.rows for s in self.outputs.values() if s.rows]
        worst = min((snr(s.signal, s.noise) for s in self.outputs.values()), default=math.inf)
        return Accuracy(worst, min(shares, default=None))


def snr(signal: float, noise: float) -> float:
    """In dB. NaN or infinity in an output is no signal at all."""
    if not math.isfinite(noise) or (noise and not signal):
        return -math.inf
    return 10 * math.log10(signal / noise) if noise else math.inf
