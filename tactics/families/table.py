"""The families of the kernels in tactics.kernels, by kernel and by class of problem."""

from collections.abc import Mapping
from importlib import import_module
from types import ModuleType

from tactics.kernels import ROWS, Kernel
from tactics.problems.problem import Problem

OF_KERNEL: Mapping[str, ModuleType] = {k.name: import_module(f"tactics.families.{k.family}") for k in ROWS}
# Class of problem -> {family that may have tactics for it: the family's first kernel for it}, in the order of ROWS.
OF_PROBLEM: dict[type[Problem], dict[ModuleType, Kernel]] = {}
# The same for kernels that have tensors of whole numbers in bytes.
OF_WHOLE: dict[type[Problem], dict[ModuleType, Kernel]] = {}
for _k in ROWS:
    for _kind in _k.whole:
        OF_WHOLE.setdefault(_kind, {}).setdefault(OF_KERNEL[_k.name], _k)
    for _kind in _k.problems:
        OF_PROBLEM.setdefault(_kind, {}).setdefault(OF_KERNEL[_k.name], _k)


def missing(problem: Problem, kernel: Kernel) -> str:
    """Returns "no " and the first feature, in alphabetical order, that the problem needs and the kernel lacks; "" if none."""
    found = sorted(problem.needs - kernel.supports)
    return f"no {found[0]}" if found else ""
