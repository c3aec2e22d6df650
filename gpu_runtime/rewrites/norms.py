"""Offers a layer norm in front of 1x1 convolutions as a part of them; separate or inside is a choice of the plan.

A block of such a convolution reads all channels of its pixels, so that it finds their mean and variance on the way. Scale and
shift of the norm become weights and bias, where FP16 holds these as exactly as any weights. A scale of columns keeps 2:4.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain
from math import prod
from typing import TypeGuard

import numpy as np

from cuda_kernels import sparse24
from gpu_runtime.element_maps import strides
from gpu_runtime.network import Network, Op, Options, computes, group_between, joined
from tactics.problems.problem import ConvProblem
from tactics.problems.prologue import Prologue
from tactics.problems.protocol import Feature, Problem
from tactics.problems.reductions import NormalizeProblem

IN_FRONT = "in front"
NOT_BESIDE = frozenset({Feature.SCALED_INPUT, Feature.GATED_INPUT, Feature.NORMALIZED_INPUT, Feature.MAX_POOL})
MOST_ERROR = 2.0**-11  # the largest rounding error of a row of weights times the scale, relative to the row's norm
Conv = Op[ConvProblem]
Norm = Op[NormalizeProblem]


@dataclass(frozen=True, slots=True)
class Taker:
    """A convolution that can normalize its input. `moves`: the moves between the norm and the convolution; `weights`: its
    weights with the norm's scale and shift.
    """

    conv: Conv
    moves: strides.Passed
    weights: Mapping[str, np.ndarray]


def offer(network: Network) -> Network:
    """Returns the network with the alternatives added. Norms that exist only under some options are left alone.

    A group may decide whether a convolution reads the norm, or one launch for this convolution and the next one, which cannot
    normalize. Such a group gets a further option, with the norm in the convolution.
    """
    options = Options(network)
    for norm in network.ops:
        if not computes(norm, NormalizeProblem) or not _plain(network, norm):
            continue
        able, others = _readers(network, norm)
        group = group_between([conv for conv, _ in able], others) if able and others else ""
        if not able or (others and not group):
            continue
        takers = [taker for conv, tensor in able if (taker := _taker(conv, network, norm, tensor))]
        if len(takers) < len(able):
            continue
        between = {id(move): move for taker in takers for move in taker.moves}
        made: list[tuple[Op[Problem], Op[Problem]]] = []
        for move in between.values():  # the moves, applied to the norm's input instead of its output
            x = norm.inputs[0] if move.inputs[0] == norm.output else _renamed(move.inputs[0], norm)
            made.append((move, replace(move, inputs=(x,), output=_renamed(move.output, norm))))
        made += [(taker.conv, _in_front(norm, taker)) for taker in takers]
        gone = [norm, *(op for op, _ in made)]
        if group:
            options.twins(group, gone, made, f", {IN_FRONT}")
        else:
            options.either(f"norm {norm.name}", gone, made, IN_FRONT)
    return options.network()


def _in_front(norm: Norm, taker: Taker) -> Conv:
    conv, end = taker.conv, replace(taker.conv.problem.epilogue, bias="b" in taker.weights)
    x = _renamed(taker.moves[0].output, norm) if taker.moves else norm.inputs[0]
    prologue = Prologue(normalized=True, epsilon=norm.problem.epsilon)
    problem = replace(conv.problem, prologue=prologue, epilogue=end)
    return joined(norm, conv, problem=problem, inputs=(x, *conv.inputs[1:]), weights=taker.weights)


def _renamed(tensor: str, norm: Norm) -> str:
    """Returns the name of a tensor between norm and convolution if the move moves the norm's input."""
    return f"{tensor} before {norm.name}"


def _plain(network: Network, norm: Norm) -> bool:
    """Whether the op is a layer norm of an FP16 tensor along one axis that exists in every plan."""
    p = norm.problem
    alone = network.producer(norm.output) is norm and norm.output not in network.output_names
    layer = p.kind == "standard" and len(p.axes) == 1 and p.groups == 1 and p.affine in ("", p.axes) and not p.added
    return layer and alone and not network.is_fp32(norm.inputs[0]) and not network.is_fp32(norm.output)


def _readers(network: Network, norm: Norm) -> tuple[list[tuple[Conv, str]], list[Op[Problem]]]:
    """Returns (the convolutions that can normalize the norm's output, directly or behind moves, each with the tensor that it
    reads; the other readers); no convolutions if the network returns such a tensor.
    """
    able, others, left = list[tuple[Conv, str]](), list[Op[Problem]](), [norm.output]
    while left:
        tensor = left.pop()
        for op in network.readers[tensor]:
            if isinstance(op.problem, strides.MOVES) and network.producer(op.output) is op:
                left.append(op.output)
                continue
            if _can_normalize(op, network, norm, tensor):
                able.append((op, tensor))
            else:
                others.append(op)
        if tensor in network.output_names:
            return [], others
    return able, others


def _taker(conv: Conv, network: Network, norm: Norm, tensor: str) -> Taker | None:
    """Returns the convolution as a taker; None unless the channels of a pixel are a row of the norm and FP16 can hold its
    weights.
    """
    moves, weights = _moves(network, norm, tensor), _folded(conv, norm)
    return None if moves is None or weights is None else Taker(conv, moves, weights)


def _can_normalize(op: Op[Problem], network: Network, norm: Norm, tensor: str) -> TypeGuard[Conv]:
    """Whether the op is a convolution whose kernel can normalize the tensor."""
    if not computes(op, ConvProblem) or op.inputs[0] != tensor or op.inputs.count(tensor) > 1:
        return False
    p = op.problem
    one = (p.r, p.s) == (1, 1) and p.groups == 1 and not any(p.pad) and not p.needs & NOT_BESIDE
    return one and p.c == prod(norm.problem.span(norm.problem.axes)) and not any(map(network.is_fp32, (*op.inputs, op.output)))


def _moves(network: Network, norm: Norm, tensor: str) -> strides.Passed | None:
    """Returns the moves from the norm to a tensor, the last first; None unless the channels of a pixel there are a row of the
    norm.
    """
    _, c, _, _ = shape = network.tensors[tensor]
    if prod(shape) > strides.MOST_ELEMENTS:
        return None
    index = np.arange(prod(shape), dtype=strides.INDEX).reshape(shape)
    places = chain([(tensor, index, strides.Passed())], strides.backwards(network, tensor, index))
    found = next(((at, passed) for name, at, passed in places if name == norm.output), None)
    if found is None:
        return None
    index, passed = found
    axis = "nchw".index(norm.problem.axes)
    step = prod(norm.problem.out_shape[axis + 1 :])
    channel = index // step % c
    rows = index - channel * step
    aligned = (channel == np.arange(c).reshape(1, -1, 1, 1)).all() and (rows == rows[:, :1]).all()
    return passed if aligned else None


def _folded(conv: Conv, norm: Norm) -> dict[str, np.ndarray] | None:
    """Returns the convolution's weights with scale and shift of the norm; None where FP16 would hold them less exactly than
    usual.
    """
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
