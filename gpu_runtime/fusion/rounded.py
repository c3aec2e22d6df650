"""Rounds weights to FP32, each array once. Kernels on tensor cores round them to FP16 when they are packed; kernels for FP32
tensors do not."""

from dataclasses import replace
from typing import Any

import numpy as np

from cuda_kernels import sparse24
from gpu_runtime.errors import ModelError
from gpu_runtime.fusion.convolutions import is_convolution
from gpu_runtime.network import Network, Op, computes, touched
from tactics.problems.library_problem import LibraryProblem
from tactics.problems.pointwise_ops import FLT_MAX
from tactics.problems.protocol import Problem


def rounded(network: Network) -> Network:
    """Returns the network with FP32 weights, and with the 2:4 flag set on each convolution whose weights have the pattern. All
    alternatives of a layer share one array. Raises ModelError if a constant is no longer finite.
    """
    single: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # keeps the array too, so that no other array can get its id
    kernels: dict[str, tuple[np.ndarray, bool]] = {}
    ops = list[Op[Any]]()
    for op in network.ops:
        if not computes(op, LibraryProblem):
            for array in op.weights.values():
                if id(array) not in single:
                    single[id(array)] = array, _single(network, op, array)
            op = replace(op, weights={name: single[id(array)][1] for name, array in op.weights.items()})
        if is_convolution(op):
            w = op.weights["w"]
            if op.layer not in kernels:
                kernels[op.layer] = w, w.shape[1] % 4 == 0 and sparse24.is_sparse(w)
            w, fits = kernels[op.layer]
            op = replace(op, weights={**op.weights, "w": w}, problem=replace(op.problem, sparse24=fits))
        ops.append(op)
    return replace(network, ops=tuple(ops), tensors=touched(network.inputs, ops))


def _single(network: Network, op: Op[Problem], array: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):  # refused in the next lines
        found = np.array(array, np.float32, order="C")
    if not (np.isfinite(found) | np.isneginf(array)).all():  # -infinity as a mask
        text = f"{op.name}: its constants are not finite in FP32 after scales and shifts are folded in"
        raise ModelError(f"{network.name}: {text}; expected magnitudes up to {FLT_MAX:.1e}: rescale the model's weights")
    return found
