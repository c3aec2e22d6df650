"""Library functions (array_functions.py) as tactics on linear tensors: one tactic per combination of element types."""

import math
from collections.abc import Mapping
from itertools import product

import numpy as np

from cuda_kernels.device import Device
from tactics.format import DTYPES, Format
from tactics.problems.library_problem import FLOAT, LibraryProblem
from tactics.reason import Candidates
from tactics.roofline import Counts, traffic
from tactics.step import Call, CallArray
from tactics.tactic import Tactic, tactic_of

_ROW, _MOST = (1, 6, 5, 7), (1, 1, 5, 7)
CASES = {"library": (LibraryProblem("ArgMax", ("t0",), (_ROW,), ("fp16",), _MOST, "int64", (_ROW, _MOST), (("axis", 1),)),)}


def accepts(p: LibraryProblem, tactic: Tactic) -> bool:
    """Returns whether `candidates` yields `tactic`, without listing them: there are up to 2^(inputs + 1)."""
    formats = zip((*tactic.ins, tactic.out), (*p.dtypes, p.dtype), strict=True)
    return all(f.layout == "chw" and f.dtype in (("fp16", "fp32") if d == FLOAT else (d,)) for f, d in formats)


def candidates(p: LibraryProblem, device: Device) -> Candidates:
    """Yields a tactic for every combination of types: a floating-point tensor is FP16 or FP32 (for inputs and outputs of the
    network), any other has its own type.
    """
    ways = [[Format(t, "chw") for t in (("fp16", "fp32") if d == FLOAT else (d,))] for d in (*p.dtypes, p.dtype)]
    for *ins, out in product(*ways):
        yield tactic_of("library", None, tuple(ins), out), None


def launches(p: LibraryProblem, tactic: Tactic) -> tuple[Call, ...]:
    tensors = enumerate(zip(tactic.ins, p.shapes, strict=True))
    known = {f"t{i}": CallArray(("in", i), f.dtype, shape) for i, (f, shape) in tensors}
    known |= {f"c{i}": CallArray(("weights", f"c{i}"), dtype, shape) for i, (shape, dtype) in enumerate(p.constants)}
    args = tuple(known.get(name) for name in p.arguments)
    return (Call(p.function, p.attributes, args, CallArray(("out", 0), tactic.out.dtype, p.shape), p.part),)


def pack(p: LibraryProblem, tactic: Tactic, weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the constants, unchanged."""
    return {name: np.ascontiguousarray(a) for name, a in weights.items()}


def section_bytes(p: LibraryProblem, tactic: Tactic) -> dict[str, int]:
    """Returns section name -> bytes of the sections that `pack` makes, computed from sizes alone."""
    return {f"c{i}": math.prod(shape) * DTYPES[dtype].itemsize for i, (shape, dtype) in enumerate(p.constants)}


def counts(p: LibraryProblem, tactic: Tactic, device: Device) -> Counts:
    """Returns counts of each tensor moved once, by one launch. They are neither a lower bound nor an estimate: a gather may
    read less, and the library's function may take longer.
    """
    return Counts(*traffic(p.all_shapes, tactic))
