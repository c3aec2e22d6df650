"""Tactics for problems with FP32 tensors, whose values FP16 cannot hold: results come before speed.

Such a tensor is linear (fp32:chw). Convolution then runs in FP32 on CUDA cores and takes its other tensors in any layout; the
other kernels are the FP16 ones with another type on that side and linear memory on all sides. A tensor that is FP16 inside a
network may be FP32 where it is the network's input or output.
"""

from collections.abc import Iterator, Sequence
from itertools import product, repeat

from tactics.families import conv_transpose, table
from tactics.format import HALF_FORMATS, Format, too_large
from tactics.kernels import ANY_FP16, OF_FP32
from tactics.problems.problem import ConcatProblem, ConvTransposeProblem, Problem
from tactics.problems.reductions import NormalizeProblem
from tactics.tactic import Tactic, tactic_of

FP32, HALF = Format("fp32", "chw"), Format("fp16", "chw")


def reason(problem: Problem) -> str:
    """Why no kernel runs this problem on FP32 tensors, or an empty string."""
    kind = type(problem)
    if kind not in OF_FP32:
        return f"no kernel for {kind.__name__.removesuffix('Problem').lower()} on FP32 tensors"
    if why := too_large(problem.all_shapes, repeat(FP32)):
        return why
    if isinstance(problem, ConvTransposeProblem) and (why := conv_transpose.reason(problem)):
        return why
    if isinstance(problem, NormalizeProblem) and problem.added:
        return "no sum in front of a normalization on FP32 tensors"
    why = table.missing(problem, OF_FP32[kind])
    return f"{why} in FP32" if why else ""


def candidates(problem: Problem, dtypes: Sequence[str]) -> Iterator[Tactic]:
    """Yields the tactics of a problem that has no `reason` against it.

    `dtypes`: of each input, then of the output; "fp32" where the tensor must be FP32, "fp16" where it may be either.
    """
    kernel = OF_FP32[type(problem)].name
    if isinstance(problem, ConcatProblem) and problem.axis != 1:
        kernel = "gather"
    either = (*(HALF_FORMATS if kernel in ANY_FP16 else (HALF,)), FP32)
    if isinstance(problem, ConcatProblem):  # of many inputs: not every mix of types
        either = (HALF,)
    for *ins, out in product(*((FP32,) if d == "fp32" else either for d in dtypes)):
        yield tactic_of(kernel, None, tuple(ins), out)
