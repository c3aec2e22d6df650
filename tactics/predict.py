"""Analytical time of a tactic on a named device, for machines without a GPU. Never shown as measured.

A kernel takes launch + max(DRAM, L2, SMs); each family says how long the SMs take. Nothing here has been calibrated on
hardware: SIGMA is the relative error to expect of one prediction, SIGMA_RATIO of the quotient of two tactics of the same
layer, whose errors are mostly common.
"""

from __future__ import annotations

from functools import lru_cache

from cuda_kernels.device import Device
from tactics.families import table
from tactics.problems.problem import Problem
from tactics.tactic import Tactic

SIGMA, SIGMA_RATIO = 0.30, 0.12


def predict_us(problem: Problem, tactic: Tactic, device: Device) -> float:
    """Microseconds of all launches of `tactic` on `device`, inside a CUDA graph."""
    return float(_cached(problem, tactic, device)["total_us"])


def predict(problem: Problem, tactic: Tactic, device: Device) -> dict[str, float | str]:
    """The parts of the prediction in microseconds, `total_us`, and `bound`: what limits it."""
    return dict(_cached(problem, tactic, device))


@lru_cache(maxsize=65536)
def _cached(problem: Problem, tactic: Tactic, device: Device) -> dict[str, float | str]:
    return table.OF_KERNEL[tactic.kernel].predict(problem, tactic, device)
