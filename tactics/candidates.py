"""candidates(problem, device): every tactic that can run it there; rejected(problem, device): the others, with reasons."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product

from cuda_kernels.device import Device
from tactics import families, single
from tactics.format import Format
from tactics.library_problem import LibraryProblem
from tactics.problem import Problem
from tactics.step import linear
from tactics.tactic import Tactic


def candidates(problem: Problem, device: Device, dtypes: tuple[str, ...] = ()) -> tuple[Tactic, ...]:
    """Every tactic that can run `problem` on `device`. `dtypes`: of its inputs and its output, where some of them are FP32."""
    return _split(problem, device, dtypes)[0]


def rejected(problem: Problem, device: Device, dtypes: tuple[str, ...] = ()) -> tuple[tuple[str, str], ...]:
    """(tactic or family, reason) for each one that cannot."""
    return _split(problem, device, dtypes)[1]


# Kernels that take a tensor's strides at run time: what reads (writes) hwc8 does so with every FP16 layout of V >= 8, what
# reads (writes) chw with every one of V < 8. Candidates name only the layouts of CONV_LAYOUTS.
ANY_INPUT = frozenset((
    "conv_dense", "conv_sparse24", "conv_depthwise", "transpose_dense", "transpose_sparse24", "transpose_depthwise", "move",
    "pool", "pool_global", "rows", "gather", "resize",
))  # fmt: skip
ANY_OUTPUT = ANY_INPUT | {"conv_stem"}
# These write FP32 as well, in linear memory, from linear inputs or from any.
FP32_OUTPUT = frozenset(("pointwise", "pool", "rows", "move", "gather", "resize"))
FP32_OUTPUT_OF_ANY = frozenset(("conv_dense", "conv_sparse24", "conv_stem", "transpose_dense", "transpose_sparse24"))


def at_edges(tactic: Tactic, ins: Sequence[Collection[Format]], out: Collection[Format]) -> Iterator[Tactic]:
    """`tactic` itself, then the same kernel on formats that a network's inputs (`ins`, per input) or outputs may have.

    Only the first input varies, and an output not where a second input shares its format; but what computes in FP32 anyway
    writes FP32 as well, beside a second input that lies likewise.
    """
    def others(fmt: Format, asked: Collection[Format], able: frozenset[str]) -> list[Format]:
        if tactic.kernel not in able or str(fmt) not in ("fp16:hwc8", "fp16:chw"):
            return [fmt]
        return [fmt, *(f for f in asked if f.dtype == "fp16" and linear(f) == linear(fmt) and f != fmt)]

    alone = len(tactic.ins) == 1
    for x, y in product(others(tactic.ins[0], ins[0], ANY_INPUT), others(tactic.out, out if alone else (), ANY_OUTPUT)):
        yield replace(tactic, ins=(x, *tactic.ins[1:]), out=y)
    same = {str(f) for f in (tactic.ins if tactic.kernel in FP32_OUTPUT else tactic.ins[1:])} | {str(tactic.out)}
    if tactic.kernel in FP32_OUTPUT | FP32_OUTPUT_OF_ANY and same == {"fp16:chw"}:
        yield from (replace(tactic, out=f) for f in out if f.dtype == "fp32" and f.layout in ("chw", "hwc")[: 1 + alone])


@lru_cache(maxsize=4096)
def _split(problem: Problem, device: Device, dtypes: tuple[str, ...]):
    good, bad = [], []
    if dtypes and not isinstance(problem, LibraryProblem):  # a library function takes either type anyway
        for tactic, reason in single.candidates(problem, dtypes):
            bad.append((str(tactic), reason)) if reason else good.append(tactic)
        return tuple(good), tuple(bad)
    for family in families.OF_PROBLEM[type(problem)]:
        if getattr(problem, "d2s", 1) > 1 and family not in families.DEPTH_TO_SPACE:
            bad.append((family.__name__.rpartition(".")[2], "no depth-to-space in its stores"))
            continue
        if getattr(problem, "up", 1) > 1 and family not in families.UPSAMPLING:
            bad.append((family.__name__.rpartition(".")[2], "no residual with fewer pixels"))
            continue
        if getattr(problem, "pre", False) and family not in families.SCALING:
            bad.append((family.__name__.rpartition(".")[2], "no scale and shift of its input"))
            continue
        if getattr(problem, "pool", ()) and family not in families.POOLING:
            bad.append((family.__name__.rpartition(".")[2], "no max pool in its stores"))
            continue
        for tactic, reason in family.candidates(problem, device):
            if reason:
                bad.append((str(tactic), reason))
            else:
                good.append(tactic)
    return tuple(good), tuple(bad)
