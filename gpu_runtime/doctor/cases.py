"""Which small problems and tactics show that each kernel computes what it should, from the CASES of its family.

A problem there is small enough for NumPy and the emulator, and fits no tile: masks, padding and the tails of K are all reached.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from cuda_kernels.device import Device
from tactics.candidates import base_runner, candidates
from tactics.families import table
from tactics.kernels import KERNELS, ROWS
from tactics.problems.problem import Problem
from tactics.step import linear
from tactics.tactic import Tactic, Tile

# Kernel -> the problems that its family has for it; the first is run with every tile, the others with the smallest and the
# largest, and with tiles that those before do not have.
PROBLEMS: dict[str, tuple[Problem, ...]] = {k.name: table.OF_KERNEL[k.name].CASES[k.name] for k in ROWS}


def able(kernel: str, problem: Problem, device: Device) -> list[Tactic]:
    """The kernel's tactics for one of its problems: on FP32 tensors where it has none for others."""
    dtypes = () if KERNELS[kernel].problems else ("fp32",) * len(problem.all_shapes)
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
        """What a plan is denied where this fails: the kernel with its tile, whatever splits K; the kernel where it has none."""
        return base_runner(self.tactic)


def cases(device: Device, few: bool = False) -> list[Case]:
    """What is to be run on a device, kernel by kernel in turn, so that whatever ends early has seen something of each: of every
    kernel all tiles that a plan for the device may hold, once alone and once sharing K, and each mix of linear and vector
    tensors. `few`: of every kernel one dense corner and one with other formats, for the emulator."""
    device = replace(device, left_out=())
    found: dict[str, list[Case]] = {kernel: [] for kernel in PROBLEMS}
    for kernel, before in found.items():
        for problem in PROBLEMS[kernel]:
            chosen, had = _chosen(able(kernel, problem, device)), {case.unit for case in before}
            ends = {base_runner(t) for t in chosen[:1] + chosen[-1:]}
            before += [Case(problem, t) for t in chosen if not had or base_runner(t) not in had or base_runner(t) in ends]
    if few:
        found = {kernel: _few(of) for kernel, of in found.items()}
    return [case for turn in zip_longest(*found.values()) for case in turn if case]


def _chosen(tactics: Sequence[Tactic]) -> list[Tactic]:
    """Of each tile, alone and sharing K, the tactic with vectors on all sides, or else what there is; then of the first tile
    each other mix of sides. Small tiles first."""
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
    """The first, and the first that differs in its sides."""
    other = (c for c in of[1:] if _sides(c.tactic) != _sides(of[0].tactic))
    return [of[0], *list(other)[:1]]


def _sides(tactic: Tactic) -> tuple[tuple[str, bool], ...]:
    """Of each tensor its type, and whether it is linear."""
    return tuple((f.dtype, linear(f)) for f in (*tactic.ins, tactic.out))


def _shares_k(tactic: Tactic) -> tuple[bool, bool]:
    """Whether blocks split K, or share the stages of all tiles."""
    tile = tactic.tile
    return (tile.split > 1, tile.stream > 0) if isinstance(tile, Tile) else (False, False)


def _size(tactic: Tactic) -> int:
    tile = tactic.tile
    return 0 if tile is None else tile.m * tile.n if isinstance(tile, Tile) else tile.h * tile.w * tile.channels


def kernels_of(found: Iterable[Case]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(case.kernel for case in found))
