"""The launches that compute a problem by a tactic, and its weights as the kernels read them."""

from collections.abc import Hashable, Mapping

import numpy as np

from tactics.families import table
from tactics.format import Strides
from tactics.kernels import KERNELS
from tactics.problems.problem import Problem
from tactics.problems.protocol import Feature
from tactics.step import Call, Launch, linear
from tactics.tactic import Tactic, Tile

Binary = tuple[str, tuple[tuple[str, int], ...]]  # a kernel and its compile-time values


def launches(problem: Problem, tactic: Tactic, strided: tuple[Strides, ...] | None = None) -> tuple[Launch | Call, ...]:
    """Returns the launches, in order. Shapes come from the problem, formats from the tactic.

    `strided`: the strides of the inputs, then of the output, where one of them lies inside another tensor's memory (for kernels
    that are `placed`); linear ones may then begin between multiples of 16 bytes.
    """
    family = table.OF_KERNEL[tactic.kernel]
    return family.launches(problem, tactic, strided=strided) if strided else family.launches(problem, tactic)


def binaries(problem: Problem, tactic: Tactic) -> list[Binary]:
    """The kernel and compile-time values of each launch."""
    return [(s.kernel, s.values) for s in launches(problem, tactic) if isinstance(s, Launch)]


def pack_weights(problem: Problem, tactic: Tactic, weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Packs FP32 weights, by the names that `lower` gives them, into sections by name, each an array in the kernel's own
    order.
    """
    family = table.OF_KERNEL[tactic.kernel]
    return (family.pack(problem, tactic, weights) if hasattr(family, "pack") else {}) | _entries(problem)


def section_bytes(problem: Problem, tactic: Tactic) -> dict[str, int]:
    """Returns the bytes of each section that pack_weights makes, from sizes alone, without packing."""
    family = table.OF_KERNEL[tactic.kernel]
    entries = {name: array.nbytes for name, array in _entries(problem).items()}
    return (family.section_bytes(problem, tactic) if hasattr(family, "pack") else {}) | entries


def _entries(problem: Problem) -> dict[str, np.ndarray]:
    """Returns the section with the entries of the activation that is a table; none without one."""
    return {"table": np.array(problem.table, np.float16)} if problem.table else {}


def tables(problem: Problem, tactic: Tactic) -> dict[str, np.ndarray]:
    """Returns the sections of pack_weights that follow from the problem alone: tables by which kernels address memory."""
    return table.OF_KERNEL[tactic.kernel].tables(problem, tactic) if KERNELS[tactic.kernel].tables else {}


def packing_key(problem: Problem, tactic: Tactic) -> Hashable:
    """A key that is equal for tactics of a problem with the same packed weights.

    Such tactics have the same kernel, tables and sizes; with depth-to-space, which decides the order of rows, also the same
    output format. A strip of boxes has its own order of K; a stem with vector output orders rows by the rows of a warp.
    """
    found = {name: array.tobytes() for name, array in tables(problem, tactic).items()}
    rows = tactic.out if Feature.DEPTH_TO_SPACE in problem.needs else None
    box = isinstance(tactic.tile, Tile) and bool(tactic.tile.box)
    stem = tactic.kernel == "conv_stem" and not linear(tactic.out)
    warp = tactic.gemm.m // tactic.gemm.warps_m if stem else 0
    return tactic.kernel, rows, box, warp, tuple(section_bytes(problem, tactic).items()), tuple(found.items())
