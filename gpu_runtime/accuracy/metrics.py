"""Scores of a network's outputs against labels: top-1 accuracy, or the caller's metric."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

Arrays = Mapping[str, np.ndarray]
Metric = Callable[[Arrays, np.ndarray], float]  # (outputs by name, labels), over all samples -> score; higher is better
TOP1 = "top-1 accuracy"


@dataclass(frozen=True, slots=True)
class Judge:
    """A metric with the labels of the samples. `labels`: one label per sample, for top-1 accuracy the number of its class;
    `metric`: None for top-1 accuracy.
    """

    labels: np.ndarray
    metric: Metric | None = None

    @property
    def name(self) -> str:
        return TOP1 if self.metric is None else getattr(self.metric, "__name__", type(self.metric).__name__)

    def score(self, outputs: Sequence[Arrays]) -> float:
        """Returns the metric's value for the outputs of consecutive batches.

        Raises ValueError if labels and outputs do not fit, or if the metric returns no finite number.
        """
        whole = {name: _joined([o[name] for o in outputs]) for name in outputs[0]}
        if self.metric is None:
            return _top1(whole, self.labels)
        found = self.metric(whole, self.labels)
        if not isinstance(found, (int, float, np.number)) or not math.isfinite(found):
            raise ValueError(f"metric: expected {self.name} to return a finite number, got {found!r}")
        return float(found)

    def check(self, outputs: Mapping[str, tuple[Sequence[int], np.dtype]]) -> None:
        """Checks, before a network runs, that the labels fit its outputs. Raises ValueError if they do not.

        `outputs`: name -> (shape for all samples together, type). The caller's metric is not checked, only top-1 accuracy.
        """
        if self.metric is None:
            self.score([{name: np.broadcast_to(np.zeros((), dtype), shape) for name, (shape, dtype) in outputs.items()}])

    def text(self, score: float) -> str:
        """Returns a score as text; for top-1 accuracy as a percentage, `71.25 %`."""
        return f"{100 * score:.2f} %" if self.metric is None else f"{score:.5g}"


def judge(labels: object, metric: Metric | None) -> Judge | None:
    """Returns a Judge for these labels and this metric; None if `labels` is None.

    Raises TypeError for a metric that is no function, ValueError for a metric without labels, and without a metric for labels
    that are no one-dimensional array of whole numbers.
    """
    if metric is not None and not callable(metric):
        raise TypeError(f"metric: expected a function of outputs by name and labels that returns a number, got {metric!r}")
    if labels is None:
        if metric is not None:
            raise ValueError("metric: it needs labels, which are its second argument")
        return None
    found = np.asarray(labels)
    if metric is None and (found.dtype.kind not in "iu" or found.ndim != 1 or not found.size):
        shape = "x".join(map(str, found.shape)) or "()"
        raise ValueError(
            f"labels: expected each sample's class, whole numbers in an array of one axis, got {found.dtype} of shape {shape}"
        )
    return Judge(found, metric)


def _joined(batches: Sequence[np.ndarray]) -> np.ndarray:
    """Returns the arrays joined along their first axes; of several scalars, each is one element."""
    return batches[0] if len(batches) == 1 else np.concatenate([np.atleast_1d(a) for a in batches])


def _top1(outputs: Arrays, labels: np.ndarray) -> float:
    """Returns the share of samples whose largest score is at the label's class.

    Scores are the one floating-point output [samples, classes], with more than one class; further axes of size 1 may follow.
    Raises ValueError if there is no such output or several, or if the labels do not fit it.
    """
    flat: dict[str, np.ndarray] = {
        name: y.reshape(y.shape[:2]) for name, y in outputs.items() if y.ndim >= 2 and set(y.shape[2:]) <= {1}
    }
    scores = {name: y for name, y in flat.items() if y.shape[1] > 1 and y.dtype.kind == "f"}
    if len(scores) != 1:
        shapes = ", ".join(f"{name} {'x'.join(map(str, y.shape))}" for name, y in outputs.items())
        raise ValueError(
            f"labels: expected one output of scores [samples, classes], got {shapes}: in Python, metric= takes a function of "
            "outputs and labels"
        )
    ((name, y),) = scores.items()
    if len(y) != len(labels):
        raise ValueError(f"labels: expected one for each of {len(y)} samples, got {len(labels)}")
    low, high, last = labels.min(), labels.max(), y.shape[1] - 1
    if low < 0 or high > last:
        raise ValueError(f"labels: expected classes of output {name!r}, from 0 to {last}, got {low} to {high}")
    return float((y.argmax(1) == labels).mean())
