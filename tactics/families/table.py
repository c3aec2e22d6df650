"""The families of tactics.kernels, by kernel and by problem."""

from collections.abc import Mapping
from importlib import import_module
from types import ModuleType

from tactics.kernels import ROWS, Kernel
from tactics.problems.problem import Problem

OF_KERNEL: Mapping[str, ModuleType] = {k.name: import_module(f"tactics.families.{k.family}") for k in ROWS}
# Kind of problem -> the families that may have tactics for it, in the order of ROWS, and the first kernel of each.
OF_PROBLEM: dict[type[Problem], dict[ModuleType, Kernel]] = {}
# The same of kernels of which some tensors are bytes of whole numbers.
OF_WHOLE: dict[type[Problem], dict[ModuleType, Kernel]] = {}
for _k in ROWS:
    for _kind in _k.whole:
        OF_WHOLE.setdefault(_kind, {}).setdefault(OF_KERNEL[_k.name], _k)
    for _kind in _k.problems:
        OF_PROBLEM.setdefault(_kind, {}).setdefault(OF_KERNEL[_k.name], _k)


def missing(problem: Problem, kernel: Kernel) -> str:
    """The first feature that the problem needs and the kernel lacks, as "no ...", or ""."""
    found = sorted(problem.needs - kernel.supports)
    return f"no {found[0]}" if found else ""
