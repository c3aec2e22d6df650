"""Runs a network in FP32 with NumPy, op by op, within one budget for each purpose.

NumPy replaces onnxruntime: for ResNet-50, DenseNet-121 and YOLOX-Nano onnxruntime runs 0.08, 0.15 and 0.10 s and NumPy 0.7, 0.1
and 0.1 s, but writing the model with every tensor as an output and loading it takes 0.5, 0.15 and 0.06 s more.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpu_runtime.network import Network, Op
from tactics.planner.graph import holds
from tactics.problems.library_problem import LibraryProblem
from tactics.problems.problem import ConvProblem, PoolProblem, Problem
from tactics.sampling.data import reference


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of a run: multiplications (an element of a window counts 4), and elements of all tensors together."""

    macs: int
    elements: int


QUICK = Budget(2_000_000_000, 2**28)  # about a second: networks within it run unchanged on random values
MOST = Budget(100_000_000_000, 2**28)  # about 15 s on two cores: for networks without a quick sample
CALIBRATION = Budget(1_000_000_000_000, 2**30)  # requested by the user: limited by memory only
PLAN = Budget(4_000_000_000, 2**28)  # for the plan itself, 10 s of the emulator per 1e9, once per plan


def too_large(network: Network, budget: Budget) -> str:
    """Why the network exceeds a budget, or ""."""
    macs = multiplications(network)
    elements = sum(map(math.prod, network.tensors.values())) + sum(_padding(op.problem) for op in network.ops)
    if macs > budget.macs:
        return f"{macs / 1e9:.1f} G multiplications"
    return f"{elements / 1e6:.0f} M elements in all tensors" if elements > budget.elements else ""


def multiplications(network: Network) -> int:
    """The cost of a run of the network, in multiplications."""
    return sum(_macs(op.problem) for op in network.ops)


def _macs(problem: Problem) -> int:
    """The cost of running a problem, in multiplications; a window runs along one axis after the other."""
    if isinstance(problem, PoolProblem):
        return 4 * (problem.r + problem.s) * math.prod(problem.out_shape)
    if isinstance(problem, LibraryProblem):
        attributes: dict[str, Any] = dict(problem.attributes)
        if problem.function == "Conv":
            share = problem.in_shapes[0][1] // attributes["group"]
            return math.prod(problem.out_shape) * share * math.prod(attributes["kernel_shape"])
        window = sum(attributes.get("kernel_shape", ())) + min(attributes.get("size", 0), 2 * problem.in_shapes[0][1])
        return 4 * window * max(map(math.prod, (problem.in_shapes[0], problem.out_shape)))
    return problem.macs


def _padding(problem: Problem) -> int:
    """Elements of the padding that running a problem adds to its input."""
    if not isinstance(problem, ConvProblem):
        return 0
    top, left, bottom, right = problem.pad
    return problem.n * problem.c * ((problem.h + top + bottom) * (problem.w + left + right) - problem.h * problem.w)


def plain(network: Network) -> list[Op]:
    """Returns the ops of the network with nothing fused."""
    choice = {group: options[0] for group, options in network.groups}
    return [op for op in network.ops if holds(op.when, choice)]


def inputs(network: Network, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Converts arrays in ONNX's shapes by name to the network's inputs as FP32 NCHW."""
    return {t.name: np.asarray(feeds[t.name], np.float32).reshape(t.shape4) for t in network.inputs}


def run(ops: Sequence[Op], given: Mapping[str, np.ndarray]) -> Iterator[tuple[Op, np.ndarray]]:
    """Yields each op with its output, in the order of `ops`, where inputs come first; `given`: NCHW by name.

    A tensor is kept until its last reader is done.
    """
    last = {t: i for i, op in enumerate(ops) for t in op.inputs}
    tensors = dict(given)
    for i, op in enumerate(ops):
        y = tensors[op.output] = reference(op.problem, [tensors[t] for t in op.inputs], op.weights)
        yield op, y
        for t in {t for t in op.inputs if last[t] == i}:
            del tensors[t]
