"""The measures of an output's error: signal-to-noise ratio, and whether each row's largest element stays the same."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(slots=True)
class Sums:
    """Sums for one output over all samples so far.

    `signal`, `noise`: squares of the expected values and of the difference; `rows`: samples of an output of the shape
    [samples, classes], 0 for other shapes; `same`: rows whose largest element is at the same position.
    """

    signal: float = 0.0
    noise: float = 0.0
    rows: int = 0
    same: int = 0

    def add(self, got: np.ndarray, expected: np.ndarray) -> None:
        """Adds one batch of the output: the values `got`, and the `expected` ones in an array of the same shape."""
        y = expected.astype(np.float64)
        self.signal += float(np.square(y).sum())
        self.noise += float(np.square(got.astype(np.float64) - y).sum())
        if y.ndim == 2 and y.shape[1] > 1 and expected.dtype.kind == "f":
            self.rows += len(y)
            self.same += int((got.argmax(1) == y.argmax(1)).sum())


@dataclass(frozen=True, slots=True)
class Accuracy:
    """The accuracy of a network's outputs, compared with expected outputs.

    `snr_db`: the signal-to-noise ratio of the worst output in dB, infinite without a difference; `agreement`: the share of
    samples whose top-1 class is the same, None if no output has classes; `score`: the metric's value, None without labels.
    """

    snr_db: float
    agreement: float | None
    score: float | None = None


@dataclass(slots=True)
class Difference:
    """The difference of a network's outputs from expected outputs, as sums for each output by name."""

    outputs: dict[str, Sums] = field(default_factory=dict)

    def add(self, got: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> None:
        """Adds one batch of the outputs by name; outputs without numbers or without elements are left out."""
        for name, y in expected.items():
            if y.dtype.kind in "fiub" and y.size:
                self.outputs.setdefault(name, Sums()).add(got[name], y)

    def accuracy(self) -> Accuracy:
        """Returns the accuracy over all batches so far, without a score."""
        shares = [s.same / s.rows for s in self.outputs.values() if s.rows]
        worst = min((snr(s.signal, s.noise) for s in self.outputs.values()), default=math.inf)
        return Accuracy(worst, min(shares, default=None))


def finite(value: Any) -> Any:
    """Returns a value for JSON: None in place of infinity and NaN."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def snr(signal: float, noise: float) -> float:
    """Returns the ratio of two sums of squares in dB; inf without noise; -inf with noise and no signal, or if the noise is NaN
    or infinite.

    >>> snr(100.0, 1.0), snr(1.0, 0.0)
    (20.0, inf)
    """
    if not math.isfinite(noise) or (noise and not signal):
        return -math.inf
    return 10 * math.log10(signal / noise) if noise else math.inf
