"""The small problems and tactics that test each kernel: a table, and the selection from it.

A problem here is small enough for NumPy and the emulator, and fits no tile, so it tests masks, padding and the tails of K.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from cuda_kernels.device import Device
from tactics.candidates import base_runner, candidates
from tactics.problems.attention import AttentionProblem, Operand
from tactics.problems.epilogue import Epilogue
from tactics.problems.gather import GatherProblem, ResizeProblem
from tactics.problems.library_problem import LibraryProblem
from tactics.problems.pointwise_ops import Activation, Stage
from tactics.problems.problem import (
    BackToBackProblem,
    ConcatProblem,
    ConvProblem,
    ConvTransposeProblem,
    MatmulProblem,
    MoveProblem,
    PointwiseProblem,
    PoolProblem,
    Problem,
    ReformatProblem,
    SqueezeExciteProblem,
)
from tactics.problems.prologue import Prologue
from tactics.problems.reductions import NormalizeProblem, ReduceProblem
from tactics.step import linear
from tactics.tactic import Tactic, Tile

RELU, SIGMOID = Activation("relu"), Activation("sigmoid")
PLAIN = Epilogue(bias=True, act=RELU)
SAME = (1, 1, 1, 1)
_SQUARE = ((1, 6, 5, 7),)

# Each problem with its kernels; with "fp32" all of its tensors are FP32. A kernel's first problem runs with every tile, the
# others with the smallest and the largest tile, and with tiles that the earlier problems do not have.
# fmt: off
PROBLEMS: tuple[tuple[Problem, tuple[str, ...], tuple[str, ...]], ...] = (
    (ConvProblem(2, 40, 9, 7, 72, 3, 3, pad=SAME, epilogue=PLAIN, sparse24=True), ("conv_dense", "conv_sparse24"), ()),
    (ConvProblem(2, 136, 9, 7, 72, 3, 3, pad=SAME, epilogue=replace(PLAIN, residual=True), sparse24=True),
     ("conv_strip", "conv_strip_sparse24"), ()),
    (ConvProblem(1, 24, 7, 10, 88, 1, 1, epilogue=replace(PLAIN, residual=True), sparse24=True),
     ("conv_dense", "conv_sparse24"), ()),
    *((ConvProblem(2, 72, 7, 9, 40, 1, 1, epilogue=PLAIN, sparse24=True, prologue=first), ("conv_dense", "conv_sparse24"), ())
      for first in (Prologue(scaled=True), Prologue(gated=True), Prologue(normalized=True, epsilon=1e-5))),
    (ConvProblem(1, 3, 23, 21, 33, 7, 7, (2, 2), (3, 3, 3, 3), epilogue=PLAIN), ("conv_stem",), ()),
    (ConvProblem(2, 32, 18, 21, 32, 3, 3, pad=SAME, groups=32, epilogue=PLAIN), ("conv_depthwise",), ()),
    (ConvProblem(1, 48, 23, 17, 48, 3, 3, (2, 2), SAME, groups=48, epilogue=PLAIN), ("conv_depthwise",), ()),
    (ConvProblem(1, 48, 9, 9, 48, 3, 3, pad=SAME, groups=6, epilogue=replace(PLAIN, act=Activation("none"), residual=True)),
     ("conv_grouped",), ()),
    (ConvProblem(2, 40, 9, 7, 72, 3, 3, pad=SAME, epilogue=PLAIN, sparse24=True), ("conv_fp32",), ("fp32",) * 2),
    (ConvTransposeProblem(2, 16, 4, 5, 24, 4, 4, (8, 10), (2, 2), (1, 1), epilogue=PLAIN, sparse24=True),
     ("transpose_dense", "transpose_sparse24"), ()),
    (ConvTransposeProblem(2, 32, 4, 5, 32, 3, 3, (9, 11), (2, 2), groups=4, epilogue=PLAIN), ("transpose_grouped",), ()),
    (ConvTransposeProblem(2, 24, 4, 5, 24, 4, 4, (8, 10), (2, 2), (1, 1), groups=24, epilogue=PLAIN),
     ("transpose_depthwise",), ()),
    (ConvTransposeProblem(2, 6, 5, 4, 10, 3, 4, (11, 8), (2, 2), (0, 1), groups=2, epilogue=PLAIN),
     ("transpose_fp32",), ("fp32",) * 2),
    (BackToBackProblem(
        ConvProblem(1, 32, 9, 7, 48, 3, 3, pad=SAME, epilogue=PLAIN), ConvProblem(1, 48, 9, 7, 72, 1, 1, epilogue=PLAIN),
     ), ("conv_back_to_back",), ()),
    (MatmulProblem((2, 3), (1, 3), 20, 66, 48), ("matmul",), ()),
    (MatmulProblem((1, 2), (2, 1), 9, 17, 40, True, True), ("matmul_fp32",), ("fp32",) * 3),
    (AttentionProblem(
        2, 2, 9, 9, 16, 16, ((18, 96, 1, 1),), (18, 32, 1, 1), Operand(0, 0, (864, 16, 96, 1)),
        Operand(0, 32, (864, 16, 96, 1)), Operand(0, 64, (864, 16, 96, 1)), Operand(1, 0, (288, 16, 32, 1)), bias="chw",
     ), ("attention",), ()),
    (AttentionProblem(
        2, 3, 8, 8, 20, 20, ((40, 72, 1, 1),), (40, 24, 1, 1), Operand(0, 0, (1440, 8, 1, 72)),
        Operand(0, 24, (1440, 8, 1, 72)), Operand(0, 48, (1440, 8, 1, 72)), Operand(1, 0, (480, 8, 1, 24)), unit=True,
        epsilon=1e-12,
     ), ("cross_covariance",), ()),
    (SqueezeExciteProblem(
        PoolProblem(2, 40, 6, 5, "avg", 6, 5, (1, 1)), ConvProblem(2, 40, 1, 1, 12, 1, 1, epilogue=PLAIN),
        ConvProblem(2, 12, 1, 1, 40, 1, 1, epilogue=Epilogue(bias=True, act=SIGMOID)),
     ), ("squeeze_excite",), ()),
    (PoolProblem(2, 40, 11, 9, "max", 3, 3, (6, 5), stride=(2, 2), pad=SAME), ("pool",), ()),
    (PoolProblem(3, 72, 7, 7, "avg", 7, 7, (1, 1)), ("pool_global",), ()),
    (PointwiseProblem(2, 40, 5, 3, (Stage("mul", "c0"), Stage("add", "t1"), Stage("relu")), ("nchw", "nchw"), ("c",)),
     ("pointwise",), ()),
    (ReduceProblem(2, 20, 5, 7, "mean", "hw"), ("reduce",), ()),
    (NormalizeProblem(2, 21, 5, 4, "softmax", "c"), ("reduce",), ()),
    (NormalizeProblem(2, 20, 31, 29, "standard", "chw", epsilon=1e-5, affine="c"), ("reduce",), ()),
    (ReformatProblem(2, 40, 6, 5, "fp32:chw", "fp16:hwc8"), ("move",), ()),
    (ReformatProblem(2, 40, 6, 5, "fp16:hwc8", "fp32:chw"), ("move",), ()),
    (ReformatProblem(2, 40, 6, 5, "fp16:chw", "fp16:chw32"), ("move",), ()),
    (MoveProblem(2, 40, 9, 8, "window", (16, 4, 7), start=(8, 1, 0), step=(1, 2, 1)), ("move",), ()),
    (ConcatProblem((16, 32, 16), (2, 5, 4)), ("move",), ()),
    (GatherProblem((2, 9, 5, 3), (0, 3, 1, 2)), ("gather",), ()),
    (ResizeProblem(2, 20, 5, 4, (9, 7), "linear", "half_pixel", (9 / 5, 7 / 4)), ("resize",), ()),
    (LibraryProblem("ArgMax", ("t0",), _SQUARE, ("fp16",), (1, 1, 5, 7), "int64", (*_SQUARE, (1, 1, 5, 7)), (("axis", 1),)),
     ("library",), ()),
)
# fmt: on


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
        """The part that plans leave out if this fails: the kernel with its tile, for any split of K; without a tile, the
        kernel."""
        return base_runner(self.tactic)


def cases(device: Device, few: bool = False) -> list[Case]:
    """The cases for a device. Kernels take turns, so that a run that ends early has tested some of each. Every kernel gets all
    tiles of plans for the device, once alone and once sharing K, and each mix of linear and vector tensors. `few`, for the
    emulator: one dense case per kernel, and one with other formats."""
    device = replace(device, left_out=())
    found: dict[str, list[Case]] = {}
    for problem, kernels, dtypes in PROBLEMS:
        able = candidates(problem, device, dtypes)
        for kernel in kernels:
            chosen, before = _chosen([t for t in able if t.kernel == kernel]), found.setdefault(kernel, [])
            had = {case.unit for case in before}
            before += [
                Case(problem, t)
                for t in chosen
                if not had or base_runner(t) not in had or base_runner(t) in (base_runner(chosen[0]), base_runner(chosen[-1]))
            ]
    if few:
        found = {kernel: _few(of) for kernel, of in found.items()}
    return [case for turn in zip_longest(*found.values()) for case in turn if case]


def _chosen(tactics: Sequence[Tactic]) -> list[Tactic]:
    """For each tile, alone and sharing K, the tactic with vectors on all sides if it exists, else any; then for the first tile
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
    """The first tactic, and the first with other sides."""
    other = (c for c in of[1:] if _sides(c.tactic) != _sides(of[0].tactic))
    return [of[0], *list(other)[:1]]


def _sides(tactic: Tactic) -> tuple[tuple[str, bool], ...]:
    """The type of each tensor, and whether the tensor is linear."""
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
