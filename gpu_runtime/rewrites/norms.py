"""A layer norm in front of 1x1 convolutions, offered as a part of them; or a launch of its own, as the plan chooses.

A block of such a convolution reads all channels of its pixels, so that it finds their mean and variance on the way. Scale and
shift of the norm become weights and bias, where FP16 holds these as exactly as any weights. A scale of columns keeps 2:4.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import TypeGuard

import numpy as np

from cuda_kernels import sparse24
from gpu_runtime.network import Network, Op, Options, computes, unique
from gpu_runtime.rewrites import strides
from tactics.problems.problem import ConvProblem
from tactics.problems.prologue import Prologue
from tactics.problems.protocol import Feature, Problem
from tactics.problems.reductions import NormalizeProblem

APART, IN_FRONT = "apart", "in front"
NOT_BESIDE = frozenset({Feature.SCALED_INPUT, Feature.GATED_INPUT, Feature.NORMALIZED_INPUT, Feature.MAX_POOL})
MOST_ERROR = 2.0**-11  # of a row of weights with the scale in it, of its norm: what rounding to FP16 costs at most
Conv = Op[ConvProblem]
Norm = Op[NormalizeProblem]


@dataclass(frozen=True, slots=True)
class Taker:
    """A convolution that can normalize itself, the moves between the norm and it, and its weights for that."""

    conv: Conv
    moves: strides.Passed
    weights: Mapping[str, np.ndarray]


def offer(network: Network) -> Network:
    """The network with the alternatives added. Norms that exist under some options only are left alone."""
    options = Options(network)
    for norm in network.ops:
        if not computes(norm, NormalizeProblem) or not _plain(network, norm):
            continue
        takers = _takers(network, norm)
        if not takers:
            continue
        group = f"norm {norm.name}"
        options.group(group, APART, IN_FRONT)
        between = {id(move): move for taker in takers for move in taker.moves}
        for op in (norm, *between.values(), *(taker.conv for taker in takers)):
            options.limit(op, group, APART)
        for move in between.values():  # of the norm's input instead of its output
            x = norm.inputs[0] if move.inputs[0] == norm.output else _renamed(move.inputs[0], norm)
            options.behind(move, replace(move, inputs=(x,), output=_renamed(move.output, norm), when=((group, IN_FRONT),)))
        for taker in takers:
            conv = taker.conv
            x = _renamed(taker.moves[0].output, norm) if taker.moves else norm.inputs[0]
            problem = replace(
                conv.problem,
                prologue=Prologue(normalized=True, epsilon=norm.problem.epsilon),
                epilogue=replace(conv.problem.epilogue, bias="b" in taker.weights),
            )
            options.behind(
                conv,
                replace(
                    conv,
                    name=f"{norm.name} + {conv.name}",
                    problem=problem,
                    inputs=(x, *conv.inputs[1:]),
                    weights=taker.weights,
                    nodes=unique((*norm.nodes, *conv.nodes)),
                    when=(*conv.when, (group, IN_FRONT)),
                ),
            )
    return options.network()


def _renamed(tensor: str, norm: Norm) -> str:
    """What a move between norm and convolution gives where it moves the norm's input."""
    return f"{tensor} before {norm.name}"


def _plain(network: Network, norm: Norm) -> bool:
    """Whether it is a layer norm of an FP16 tensor along one axis, the same in every plan."""
    p = norm.problem
    alone = len(network.producers[norm.output]) == 1 and not norm.when and norm.output not in network.output_names
    layer = p.kind == "standard" and len(p.axes) == 1 and p.groups == 1 and p.affine in ("", p.axes) and not p.added
    return layer and alone and not network.is_fp32(norm.inputs[0]) and not network.is_fp32(norm.output)


def _takers(network: Network, norm: Norm) -> list[Taker]:
    """All that reads the norm, behind moves, where each can take it in; else none."""
    found = []
    for reader, tensor in _readers(network, norm.output):
        taker = _taker(network, norm, reader, tensor)
        if taker is None:
            return []
        found.append(taker)
    return found


def _readers(network: Network, tensor: str) -> Iterator[tuple[Op[Problem] | None, str]]:
    """(what computes with the tensor's elements, the tensor it reads them from); None for a network's output."""
    left = [tensor]
    while left:
        tensor = left.pop()
        if tensor in network.output_names:
            yield None, tensor
        for op in network.readers[tensor]:
            if isinstance(op.problem, strides.MOVES) and not op.when and len(network.producers[op.output]) == 1:
                left.append(op.output)
            else:
                yield op, tensor


def _taker(network: Network, norm: Norm, reader: Op[Problem] | None, tensor: str) -> Taker | None:
    """None where the norm cannot be in front of what reads the tensor."""
    if reader is None or not _can_normalize(reader, network, tensor):
        return None
    if reader.problem.c != prod(norm.problem.span(norm.problem.axes)):
        return None
    moves = _moves(network, norm, tensor)
    weights = None if moves is None else _folded(reader, norm)
    return None if moves is None or weights is None else Taker(reader, moves, weights)


def _can_normalize(op: Op[Problem], network: Network, tensor: str) -> TypeGuard[Conv]:
    """Whether it is a convolution whose kernel can normalize the tensor."""
    if not computes(op, ConvProblem) or op.inputs[0] != tensor or op.inputs.count(tensor) > 1:
        return False
    p = op.problem
    one = (p.r, p.s) == (1, 1) and p.groups == 1 and not any(p.pad) and not p.needs & NOT_BESIDE
    return one and not any(map(network.is_fp32, (*op.inputs, op.output)))


def _moves(network: Network, norm: Norm, tensor: str) -> strides.Passed | None:
    """The moves from the norm to a tensor, the last first; None where a pixel's channels there are no row of the norm."""
    _, c, _, _ = shape = network.tensors[tensor]
    if prod(shape) > strides.MOST_ELEMENTS:
        return None
    index, passed = np.arange(prod(shape), dtype=strides.INDEX).reshape(shape), strides.Passed()
    for name, at, ops in strides.backwards(network, tensor, index) if tensor != norm.output else ():
        index, passed = at, ops
        if name == norm.output:
            break
    else:
        if tensor != norm.output:
            return None
    axis = "nchw".index(norm.problem.axes)
    step = prod(norm.problem.out_shape[axis + 1 :])
    channel = index // step % c
    rows = index - channel * step
    aligned = (channel == np.arange(c).reshape(1, -1, 1, 1)).all() and (rows == rows[:, :1]).all()
    return passed if aligned else None


def _folded(conv: Conv, norm: Norm) -> dict[str, np.ndarray] | None:
    """The convolution's weights with scale and shift of the norm; None where FP16 would hold them worse than others."""
    weights, affine = dict(conv.weights), norm.problem.affine
    if not affine:
        return weights
    scale, shift = (np.asarray(norm.weights[name], np.float64).reshape(-1) for name in ("scale", "bias"))
    w = np.asarray(weights["w"], np.float64)
    exact = w * scale.reshape(1, -1, 1, 1)
    with np.errstate(over="ignore"):
        rounded = sparse24.stored(exact).astype(np.float64)
        bias = (np.asarray(weights.get("b", 0.0), np.float64) + (w[:, :, 0, 0] @ shift)).astype(np.float32)
        error, size = (np.sqrt(np.square(a).sum((1, 2, 3))) for a in (rounded - exact, exact))
    if not np.isfinite(rounded).all() or not np.isfinite(bias).all() or (error > MOST_ERROR * size).any():
        return None
    return weights | {"w": exact.astype(np.float32), "b": bias}
