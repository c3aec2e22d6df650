"""The families of tactics.kernels, by kernel and by problem."""

from collections.abc import Mapping
from functools import lru_cache
from importlib import import_module
from types import ModuleType

from tactics.kernels import ROWS, Kernel
from tactics.problems.problem import Problem

OF_KERNEL: Mapping[str, ModuleType] = {k.name: import_module(f"tactics.families.{k.family}") for k in ROWS}


@lru_cache
def families(problem: type[Problem]) -> Mapping[ModuleType, Kernel]:
    """Those that may have tactics for a problem, in the order of ROWS, and the first kernel of each."""
    found: dict[ModuleType, Kernel] = {}
    for k in ROWS:
        if problem in k.problems:
            found.setdefault(OF_KERNEL[k.name], k)
    return found


def missing(problem: Problem, kernel: Kernel) -> str:
    """What the problem needs and the kernel cannot do, or an empty string."""
    found = sorted(problem.needs - kernel.supports)
    return f"no {found[0]}" if found else ""
