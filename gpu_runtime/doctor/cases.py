"""The small problems and tactics that test each kernel, from the CASES of its family.

Each problem is small enough for NumPy and the emulator, and no multiple of a tile, so it tests masks, padding and the tails of
K.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from cuda_kernels.device import Device
from tactics.candidates import base_runner, candidates
from tactics.families import table
from tactics.kernels import KERNELS, ROWS
from tactics.problems.problem import PointwiseProblem, Problem
from tactics.step import linear
from tactics.tactic import Patch, Tactic, Tile

# Kernel -> the problems that its family has for it; the first problem is run with every tile, each other problem with its
# smallest and its largest tile, and with the tiles that no earlier problem has.
PROBLEMS: dict[str, tuple[Problem, ...]] = {k.name: table.OF_KERNEL[k.name].CASES[k.name] for k in ROWS}


def able(kernel: str, problem: Problem, device: Device) -> list[Tactic]:
    """Returns the kernel's tactics that can run one of its problems on a device.

    Tensors are FP16, or FP32 if the kernel's row in KERNELS has no `problems`. If the row's `whole` has the type of this
    problem, tactics with INT8 tensors are among them, except for a problem that ends with a quantization.
    """
    row = KERNELS[kernel]
    whole = type(problem) in row.whole and not (isinstance(problem, PointwiseProblem) and problem.stages[-1].op != "quantize")
    dtypes = ("int8" if whole else "fp16" if row.problems else "fp32",) * len(problem.all_shapes)
    return [t for t in candidates(problem, device, dtypes) if t.kernel == kernel]


@dataclass(frozen=True, slots=True)
class Case:
    """One tactic of a kernel on a small problem."""

    problem: Problem
    tactic: Tactic

    @property
    def kernel(self) -> str:
        return self.tactic.kernel

    @property
    def unit(self) -> str:
        """The name of the part that plans leave out if the case fails: the kernel with its tile, for any split of K, or the
        kernel if it has no tile.
        """
        return base_runner(self.tactic)


def cases(device: Device, few: bool = False) -> list[Case]:
    """Returns the cases for a device.

    Each kernel gets all tiles that plans use on the device, both without and with blocks that share K, and each mix of linear
    and vector tensors. Kernels take turns, so that a run that ends early has tested some cases of each. `few`, for the
    emulator: at most two cases per kernel, whose tensors have different formats.
    """
    device = replace(device, left_out=())
    found: dict[str, list[Case]] = {kernel: [] for kernel in PROBLEMS}
    for kernel, before in found.items():
        for problem in PROBLEMS[kernel]:
            chosen, had = _chosen(able(kernel, problem, device)), {case.unit for case in before}
            ends = {base_runner(t) for t in chosen[:1] + chosen[-1:]}
            before += [Case(problem, t) for t in chosen if not had or base_runner(t) not in had or base_runner(t) in ends]
    if few:
        found = {kernel: _few(of) for kernel, of in found.items() if of}
    return [case for turn in zip_longest(*found.values()) for case in turn if case]


def _chosen(tactics: Sequence[Tactic]) -> list[Tactic]:
    """Returns the tactics to test, small tiles first.

    For each tile, without and with blocks that share K, this is the tactic whose tensors are all hwc8 if there is one, else any
    other tactic. For the first tile it is one tactic for each mix of formats.
    """
    found: dict[tuple, Tactic] = {}
    ordered = sorted(tactics, key=lambda t: (_size(t), *(f.layout != "hwc8" for f in (*t.ins, t.out)), t.name))
    for t in ordered:
        found.setdefault((base_runner(t), _shares_k(t)), t)
    others: dict[tuple, Tactic] = {}
    for t in ordered:
        if base_runner(t) == base_runner(ordered[0]) and not any(_shares_k(t)):
            others.setdefault(_sides(t), t)
    return list(dict.fromkeys((*list(found.values())[:1], *others.values(), *found.values())))


def _few(of: Sequence[Case]) -> list[Case]:
    """Returns the first case, and the first case whose tensors have other types or layouts, if there is one."""
    other = (c for c in of[1:] if _sides(c.tactic) != _sides(of[0].tactic))
    return [of[0], *list(other)[:1]]


def _sides(tactic: Tactic) -> tuple[tuple[str, bool], ...]:
    """Returns, for each input and then the output, (its type, whether its layout is linear)."""
    return tuple((f.dtype, linear(f)) for f in (*tactic.ins, tactic.out))


def _shares_k(tactic: Tactic) -> tuple[bool, bool]:
    """Returns (whether blocks split K of one tile, whether blocks share the stages of all tiles)."""
    tile = tactic.tile
    return (tile.split > 1, tile.stream > 0) if isinstance(tile, Tile) else (False, False)


def _size(tactic: Tactic) -> int:
    """Returns the number of outputs of the tactic's tile; 0 without a tile."""
    tile = tactic.tile
    if isinstance(tile, Patch):
        return tile.h * tile.w * tile.channels
    return tile.m * tile.n if isinstance(tile, Tile) else 0
