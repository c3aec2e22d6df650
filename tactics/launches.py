"""(problem, tactic) -> the launches that compute it, and its weights as the kernels read them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tactics import families
from tactics.problem import Problem
from tactics.step import Launch
from tactics.tactic import Tactic


def launches(problem: Problem, tactic: Tactic) -> tuple[Launch, ...]:
    """What to launch, in order. Shapes come from the problem, formats from the tactic."""
    return families.OF_KERNEL[tactic.kernel].launches(problem, tactic)


def pack_weights(problem: Problem, tactic: Tactic, weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """FP32 weights as `lower` gives them -> sections by name, each an array in the kernel's own order."""
    return families.OF_KERNEL[tactic.kernel].pack(problem, tactic, weights)
