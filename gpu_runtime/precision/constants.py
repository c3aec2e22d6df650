"""Constants beyond FP16's range, such as the masks of transformers, and the tensors that they reach.

A mask is added to the scores before a softmax: -1e9, FP32's minimum, or -infinity. A run of the network depends on its inputs:
a calibration input with a fully open mask shows no masked value. So these constants always count as reached.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass

import numpy as np

from gpu_runtime.network import FP16_MAX, Network, Op
from gpu_runtime.precision import execution
from tactics.problems.gather import GatherProblem, ViewProblem
from tactics.problems.library_problem import FLOAT, LibraryProblem
from tactics.problems.problem import ConcatProblem, MoveProblem, PointwiseProblem, PoolProblem

MOVES = (ViewProblem, MoveProblem, GatherProblem, ConcatProblem, PoolProblem)
SUMS = ("add", "sub", "rsub")
PASSES = ("max", "min", "abs")
HIGH = FP16_MAX / 2  # limit of a tensor on the calibration input; other inputs reach further


@dataclass(frozen=True, slots=True)
class Reach:
    """The values that constants give a tensor. `finite`: the largest magnitude, 0 without any; `infinite`: whether -infinity
    occurs.
    """

    finite: float = 0.0
    infinite: bool = False

    def __or__(self, other: Reach) -> Reach:
        return Reach(max(self.finite, other.finite), self.infinite or other.infinite)

    def times(self, factor: float) -> Reach:
        """Scales the reach. A tensor that no constant has reached counts as 1 if the factor alone is above HIGH."""
        finite = self.finite * (factor or 1.0) if self.finite else factor * (factor > HIGH)
        return Reach(finite, self.infinite)


def reach(network: Network, maskable: Container[str] = ()) -> dict[str, Reach]:
    """Returns tensor -> the values from constants, in the unfused network. `maskable`: inputs that may contain -infinity."""
    found = {t.name: Reach(infinite=t.name in maskable) for t in network.inputs}
    for op in execution.plain(network):
        found[op.output] = _reach(op, found)
    return found


def of_array(values: np.ndarray) -> Reach:
    """Returns the reach of a constant: the magnitude of its finite values, and whether it contains -infinity."""
    finite = np.abs(values[np.isfinite(values)])
    return Reach(float(finite.max(initial=0.0)), bool(np.isneginf(values).any()))


def _reach(op: Op, found: Mapping[str, Reach]) -> Reach:
    p, whole = op.problem, Reach()
    if isinstance(p, PointwiseProblem):
        return _chained(op, found)
    if isinstance(p, LibraryProblem) and p.function == "Where" and p.dtype == FLOAT:
        constants = [of_array(op.weights[a]) for a in p.arguments[1:] if a.startswith("c")]
        tensors = [found[op.inputs[int(a[1:])]] for a in p.arguments[1:] if a.startswith("t")]
        for part in (*constants, *tensors):
            whole |= part
    elif isinstance(p, MOVES):
        for t in op.inputs:
            whole |= found[t]
    return whole


def _chained(op: Op, found: Mapping[str, Reach]) -> Reach:
    """Returns the reach (the largest finite magnitude, and whether infinities occur) of a pointwise op's output. `found`:
    tensor -> its reach, for all inputs."""
    v = found[op.inputs[0]]
    for stage in op.problem.stages:
        if stage.operand.startswith("t"):
            other = found[op.inputs[int(stage.operand[1:])]]
        elif stage.operand:
            other = of_array(op.weights[stage.operand])
        else:
            other = of_array(np.array(stage.params[:1]))
        if stage.op in SUMS:
            v |= other
        elif stage.op == "mul":
            v = v.times(other.finite) | Reach(infinite=other.infinite)
        elif stage.op == "clip":
            most = float(np.abs(stage.params).max())
            v = Reach(most if v.infinite else min(v.finite, most))
        elif stage.op not in PASSES:
            v = Reach()
    return v
