"""Recognises functions that exporters spell in several nodes, such as 0.5 * x * (1 + Erf(x / sqrt 2)), by their values.

The values of the nodes at SAMPLES are compared with those of the known functions, whatever the spelling.
"""

import functools

import numpy as np

from tactics.problems.pointwise_ops import POINTWISE, Stage

SPELLED = tuple(Stage(name, params=row.spelled) for name, row in POINTWISE.items() if row.spelled is not None)
# The points at which functions are compared; far from 0 too, where they differ most.
SAMPLES = np.concatenate([np.linspace(-9, 9, 73), [-50.0, -20.0, 20.0, 50.0]])
LONGEST_SPELLING = 12  # ops


@functools.cache
def _known() -> np.ndarray:
    with np.errstate(all="ignore"):
        return np.stack([s.apply(SAMPLES) for s in SPELLED])


def spelled(y: np.ndarray) -> Stage | None:
    """Returns the function whose values at SAMPLES are `y`, else None."""
    with np.errstate(all="ignore"):
        close = np.abs(_known() - y) <= 2e-5 + 2e-5 * np.abs(y)
    if not np.isfinite(y).all():
        return None
    return next((stage for stage, same in zip(SPELLED, close.all(axis=1), strict=True) if same), None)
