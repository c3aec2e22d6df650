"""Offers a scale, shift and ReLU in front of the product of the 1x1 convolution that is their only reader."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from gpu_runtime.fusion.steps import leading_affine, steps
from gpu_runtime.lowering.pointwise import Affine
from gpu_runtime.network import FP16_MAX, FP16_NORMAL, Network, Op, Options, computes
from tactics.planner.grouping import grouped
from tactics.problems.pointwise_ops import Stage
from tactics.problems.problem import ConvProblem, PointwiseProblem
from tactics.problems.prologue import Prologue


def offer(network: Network) -> Network:
    """Returns the network with one more option for each chain max(x * scale + shift, 0) that only one 1x1 convolution reads.

    Scale and shift are constants per channel. The convolution must have no padding or groups; other forms of the same layer
    may read the chain, too. The option is an alternative op that the planner may choose: the convolution applies the chain
    to its input in its own kernel, so that the chain needs no launch. Each alternative form of the layer gets its own; the
    network without the option stays available.
    """
    options = Options(network)
    chains = {op.output: (op, affine) for op in network.ops if (affine := _scale_shift_relu(op)) is not None}
    takers = grouped((op.layer, op) for op in network.ops if op.inputs and op.inputs[0] in chains and _takes(network, op))
    for layer, ops in takers.items():
        chain, affine = chains[ops[0].inputs[0]]
        options.either(chain.nodes[-1], [chain, *ops], _behind(chain, affine, ops), f"into {layer}")
    return options.network()


def _behind(chain: Op[Any], affine: Affine, ops: list[Op[Any]]) -> Iterator[tuple[Op[Any], Op[Any]]]:
    for op in ops:
        name, nodes, inputs = f"{chain.name} + {op.name}", chain.nodes + op.nodes, (chain.inputs[0], *op.inputs[1:])
        problem, weights = replace(op.problem, prologue=Prologue(True)), {**op.weights, "scale": affine[0], "shift": affine[1]}
        yield op, replace(op, name=name, nodes=nodes, inputs=inputs, problem=problem, weights=weights)


def _takes(network: Network, op: Op[Any]) -> bool:
    """Whether an op is a 1x1 convolution that, with its alternatives, is the only reader of its input."""
    if not computes(op, ConvProblem) or not op.layer or op.problem.epilogue.pool:
        return False
    tensor, p = op.inputs[0], op.problem
    alone = all(reader.layer == op.layer and reader.inputs.count(tensor) == 1 for reader in network.readers[tensor])
    return alone and tensor not in network.output_names and (p.r, p.s, p.groups) == (1, 1, 1) and not any(p.pad)


def _scale_shift_relu(chain: Op[Any]) -> Affine | None:
    """Returns (scale, shift), each [C] FP64, of a chain max(x * scale + shift, 0) per channel; None for other chains, and if
    FP16 cannot hold the constants well.
    """
    if not computes(chain, PointwiseProblem) or chain.when or len(chain.inputs) != 1:
        return None
    p = chain.problem
    if not p.stages or p.stages[-1] != Stage("relu"):
        return None
    affine, count = leading_affine(steps(chain, chain.inputs[0]) or (), p.c)
    if count < len(p.stages) - 1:
        return None
    scale, shift = (np.broadcast_to(v, (p.c,)) for v in affine)
    if not np.abs([scale, shift]).max() <= FP16_MAX or np.any((scale != 0) & (np.abs(scale) < FP16_NORMAL)):
        return None  # subnormal or too large for FP16
    return scale, shift
