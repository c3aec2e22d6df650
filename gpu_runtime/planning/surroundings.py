"""The effects of a network on the timing of its tactics: whether it stays in the L2, and which tensors are half zeros."""

import math
from collections.abc import Mapping

from cuda_kernels.device import Device
from gpu_runtime.network import Network, Op
from tactics.problems.pointwise_ops import NONE
from tactics.problems.problem import ConvProblem, PointwiseProblem, Problem

HALF = 2  # bytes of an element


def stays_in_l2(network: Network, device: Device) -> bool:
    """Whether all weights and activations together take less than half the L2, so that a run finds them in L2 from the run
    before.

    Else each run reads its weights from DRAM. If a layer has alternatives, the largest weights count; shared weights count
    once.
    """
    weights: dict[object, int] = {}
    for op in network.ops:
        size, which = sum(w.size for w in op.weights.values()), op.layer or tuple(map(id, op.weights.values()))
        weights[which] = max(size, weights.get(which, 0))
    elements = sum(weights.values()) + sum(math.prod(shape) for shape in network.tensors.values())
    return HALF * elements < device.l2_bytes / 2


def half_zeros(network: Network) -> Mapping[Problem, tuple[bool, ...]]:
    """Returns problem -> for each input, whether it is the output of a ReLU; of several ops with the problem the last one
    counts.

    A GPU draws less power for zeros, and so runs at another clock.
    """
    behind = {op.output for op in network.ops if _ends_in_relu(op)}
    found = {op.problem: tuple(t in behind for t in op.inputs) for op in network.ops}
    return {problem: zeros for problem, zeros in found.items() if any(zeros)}


def _ends_in_relu(op: Op) -> bool:
    problem = op.problem
    if isinstance(problem, ConvProblem):
        end = problem.epilogue
        last = end.act if end.last == NONE and not (end.act_first and end.residual) and not end.affine else end.last
        return last.name == "relu"
    return isinstance(problem, PointwiseProblem) and [s.op for s in problem.stages[-1:]] == ["relu"]
