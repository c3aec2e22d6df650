"""candidates(problem, device): every tactic that can run it there; rejected(problem, device): the others, with reasons."""

from __future__ import annotations

from functools import lru_cache

from cuda_kernels.device import Device
from tactics import families
from tactics.problem import Problem
from tactics.tactic import Tactic


def candidates(problem: Problem, device: Device) -> tuple[Tactic, ...]:
    """Every tactic that can run `problem` on `device`."""
    return _split(problem, device)[0]


def rejected(problem: Problem, device: Device) -> tuple[tuple[str, str], ...]:
    """(tactic or family, reason) for each one that cannot."""
    return _split(problem, device)[1]


@lru_cache(maxsize=4096)
def _split(problem: Problem, device: Device):
    good, bad = [], []
    for family in families.OF_PROBLEM[type(problem)]:
        if getattr(problem, "d2s", 1) > 1 and family not in families.DEPTH_TO_SPACE:
            bad.append((family.__name__.rpartition(".")[2], "no depth-to-space in its stores"))
            continue
        for tactic, reason in family.candidates(problem, device):
            if reason:
                bad.append((str(tactic), reason))
            else:
                good.append(tactic)
    return tuple(good), tuple(bad)
