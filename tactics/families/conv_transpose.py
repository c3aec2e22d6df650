"""Transposed convolution as one ordinary convolution per output phase, without stuffing zeros.

With stride s, output row s*a + i is reached only by the taps r with (i + pad - r*dilation) % s == 0: every s-th tap (or
s/gcd(s, dilation)-th). These taps, in reverse, are an ordinary convolution of stride 1 over x, whose pixel (a, b) is output
pixel (s*a + i, s*b + j): the kernels' store map. So a phase is a ConvProblem and a Store, a tactic is one launch per phase, and
each phase has its own packed weights ("w0", "w1", ...; "b0", ...). A phase that no tap reaches keeps one zero tap.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import chain
from types import ModuleType
from typing import NamedTuple

import numpy as np

from cuda_kernels.device import Device
from tactics.families import conv_depthwise, conv_fp32, conv_gemm, conv_grouped
from tactics.format import Strides
from tactics.problems.epilogue import RELU
from tactics.problems.problem import ConvProblem, ConvTransposeProblem
from tactics.reason import Candidates, Reason, unsupported
from tactics.roofline import Counts
from tactics.step import Launch, Store
from tactics.tactic import Only, Patch, Tactic, on_kernel

OF_PHASES: dict[str, tuple[str, ModuleType]] = {  # kernel of the whole -> (kernel of its phases, that one's family)
    "transpose_dense": ("conv_dense", conv_gemm),
    "transpose_sparse24": ("conv_sparse24", conv_gemm),
    "transpose_grouped": ("conv_grouped", conv_grouped),
    "transpose_depthwise": ("conv_depthwise", conv_depthwise),
    "transpose_fp32": ("conv_fp32", conv_fp32),
}
OWN_KERNEL = {kernel: own for own, (kernel, _) in OF_PHASES.items()}


MAX_PHASES = 4096
_SPREAD = ConvTransposeProblem(2, 16, 4, 5, 24, 4, 4, (8, 10), (2, 2), (1, 1), epilogue=RELU, sparse24=True)
CASES = {
    "transpose_dense": (_SPREAD,),
    "transpose_sparse24": (_SPREAD,),
    "transpose_grouped": (ConvTransposeProblem(2, 32, 4, 5, 32, 3, 3, (9, 11), (2, 2), groups=4, epilogue=RELU),),
    "transpose_depthwise": (replace(_SPREAD, c=24, groups=24, sparse24=False),),
    "transpose_fp32": (ConvTransposeProblem(2, 6, 5, 4, 10, 3, 4, (11, 8), (2, 2), (0, 1), groups=2, epilogue=RELU),),
}


class Phase(NamedTuple):
    """A phase: its convolution, the Store of its outputs, and the filter's `rows` and `columns` that it has; -1: of zeros."""

    conv: ConvProblem
    store: Store
    rows: tuple[int, ...]
    columns: tuple[int, ...]


@lru_cache(maxsize=1024)
def phases(p: ConvTransposeProblem) -> tuple[Phase, ...]:
    """Returns every phase with output pixels."""
    rows, columns = ([_taps(p, i, phase) for phase in range(min(p.stride[i], p.out[i]))] for i in (0, 1))  # the rest is empty
    found: list[Phase] = []
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            if row is None or column is None:
                continue
            (r, dil_r, top, bottom), (s, dil_s, left, right) = row, column
            pad = top, left, bottom, right
            conv = ConvProblem(
                p.n, p.c, p.h, p.w, p.k, len(r), len(s), (1, 1), pad, (dil_r, dil_s), p.groups, p.sparse24, epilogue=p.epilogue
            )
            found.append(Phase(conv, Store(p.out_shape, (i, j), p.stride, str(len(found))), r, s))
    return tuple(found)


def _taps(p: ConvTransposeProblem, i: int, phase: int) -> tuple[tuple[int, ...], int, int, int] | None:
    """Returns (taps, dilation, padding before, padding after) of the convolution that computes the outputs phase, phase +
    stride, ... along rows (i = 0) or columns (i = 1); None if there are none. Negative padding leaves input pixels out.

    With 4 taps, stride 2 and padding 1, output 0 is tap 3 of input pixel -1 (padding) plus tap 1 of pixel 0: phase 0 has taps
    (3, 1).
    """
    stride, pad, dilation, out = p.stride[i], p.pad[i], p.dilation[i], p.out[i]
    size, image = (p.r, p.s)[i], (p.h, p.w)[i]
    count = -(-(out - phase) // stride)
    if count < 1:
        return None
    taps = tuple(t for t in reversed(range(size)) if (phase + pad - t * dilation) % stride == 0) or (-1,)
    reach = [(phase + pad - t * dilation) // stride for t in taps]  # input pixel of output 0, ascending
    step = reach[1] - reach[0] if len(taps) > 1 else 1
    return taps, step, -reach[0], count - image + reach[0] + step * (len(taps) - 1)


def _of_phase(tactic: Tactic) -> tuple[ModuleType, Tactic]:
    """Returns (the family that runs a phase, the tactic with which it does)."""
    kernel, family = OF_PHASES[tactic.kernel]
    return family, on_kernel(kernel, tactic)


def reason(p: ConvTransposeProblem) -> str:
    """Returns why no kernel runs this problem, or ""."""
    if math.prod(min(s, o) for s, o in zip(p.stride, p.out, strict=True)) > MAX_PHASES or max(p.r, p.s) > MAX_PHASES:
        return f"more than {MAX_PHASES} phases, each a launch, or taps along an axis"
    return ""


def candidates(p: ConvTransposeProblem, device: Device, only: Only = None) -> Candidates:
    """Yields (tactic or family, reason against it or None) for the tiles that every phase can run. `only`: restricts the
    tiles.
    """
    if why := reason(p):
        yield "transpose_dense", unsupported(why)
        return
    found: dict[Tactic | str, list[Reason | None]] = {}
    for conv in (phase.conv for phase in phases(p)):
        # The patch with the least halo differs by phase, so no patch is excluded by its halo; predicted times choose.
        patch = only if isinstance(only, Patch) else None
        tile = None if isinstance(only, Patch) else only
        families: list[Candidates] = []
        if only is None or patch:
            families.append(conv_depthwise.candidates(conv, device, patch, limit=math.inf))
        if only is None or tile:
            families[:0] = conv_gemm.candidates(conv, device, tile), conv_grouped.candidates(conv, device, tile)
        for tactic, against in chain(*families):
            found.setdefault(tactic, []).append(against)
    for tactic, reasons in found.items():
        first = next(filter(None, reasons), None)
        if isinstance(tactic, str):
            yield OWN_KERNEL.get(tactic, tactic), first
        elif len(reasons) == len(phases(p)):  # K may be split further in one phase than in another
            yield on_kernel(OWN_KERNEL[tactic.kernel], tactic), first


def launches(p: ConvTransposeProblem, tactic: Tactic, strided: tuple[Strides, ...] | None = None) -> tuple[Launch, ...]:
    family, own = _of_phase(tactic)
    return tuple(step for phase in phases(p) for step in family.launches(phase.conv, own, phase.store, strided))


def pack(p: ConvTransposeProblem, tactic: Tactic, weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns each phase's taps of weights [K,C/g,R,S], packed by its family, in sections "w0", "w1", ...

    Each phase also has its own bias and slope, since their order depends on how its groups are merged.
    """
    family, own = _of_phase(tactic)
    sections: dict[str, np.ndarray] = {}
    w = np.pad(np.asarray(weights["w"], np.float32), ((0, 0), (0, 0), (0, 1), (0, 1)))  # index -1: a tap of zeros
    for phase in phases(p):
        part = family.pack(phase.conv, own, {**weights, "w": w[:, :, phase.rows][:, :, :, phase.columns]})
        sections |= {name + phase.store.name: array for name, array in part.items()}
    return sections


def section_bytes(p: ConvTransposeProblem, tactic: Tactic) -> dict[str, int]:
    """Returns section name -> bytes of the sections that `pack` makes, computed from sizes alone."""
    family, own = _of_phase(tactic)
    return {name + at.store.name: n for at in phases(p) for name, n in family.section_bytes(at.conv, own).items()}


def counts(p: ConvTransposeProblem, tactic: Tactic, device: Device) -> list[Counts]:
    """Returns counts of each phase; phases run one after the other."""
    family, own = _of_phase(tactic)
    return [family.counts(phase.conv, own, device) for phase in phases(p)]
