"""A tensor multiplied by one value per image and channel, the scale of squeeze-excite, offered as part of what reads it: 1x1
convolutions multiply while they load, and the product never is in memory.

Apart or in front is a choice of the plan: images are computed apart then, which costs where a small one fills no tile.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeGuard

from gpu_runtime.network import Network, Op, Options, computes, unique
from tactics.problems.pointwise_ops import NONE, Activation
from tactics.problems.problem import ConvProblem, PointwiseProblem
from tactics.problems.prologue import GATED_ACTS, Prologue
from tactics.problems.protocol import Feature, Problem

APART, IN_FRONT = "apart", "in front"
NO_GATE = frozenset({Feature.SCALED_INPUT, Feature.GATED_INPUT, Feature.MAX_POOL})  # beside these


def offer(network: Network) -> Network:
    """The network with the alternatives added."""
    options = Options(network)
    for op in network.ops:
        if not computes(op, PointwiseProblem) or (act := _act(op.problem)) is None:
            continue
        readers = network.readers[op.output]
        takers = [reader for reader in readers if _takes(reader, op.output)]
        fixed = [reader for reader in readers if reader not in takers and not reader.when]
        inside = op.output not in network.output_names and not network.is_fp32(op.output)
        if op.when or not takers or fixed or not inside:
            continue
        group = f"gate {op.name}"
        options.group(group, APART, IN_FRONT)
        for each in (op, *readers):
            options.limit(each, group, APART)
        for taker in takers:
            gated = _gated(op, taker, act)
            options.behind(taker, replace(gated, when=(*taker.when, (group, IN_FRONT))))
    return options.network()


def _act(p: PointwiseProblem) -> Activation | None:
    """What follows the product of a tensor and a value per image and channel; None: that is not what the chain computes."""
    spans = {"c", "nc"} if p.n == 1 else {"nc"}
    gated = len(p.tensors) == 2 and not p.constants and "nchw" in p.tensors and bool(spans & set(p.tensors)) and p.h * p.w > 1
    if not gated or not 0 < len(p.stages) <= 2 or (p.stages[0].op, p.stages[0].operand) != ("mul", "t1"):
        return None
    last = p.stages[1:]
    act = Activation(last[0].op, last[0].params) if last else NONE
    return act if act.name in GATED_ACTS and not any(s.operand for s in last) else None


def _takes(reader: Op[Problem], tensor: str) -> TypeGuard[Op[ConvProblem]]:
    """Whether the reader can multiply while it loads."""
    if not computes(reader, ConvProblem) or reader.inputs[0] != tensor or reader.inputs.count(tensor) > 1:
        return False
    p = reader.problem
    return (p.r, p.s, p.groups) == (1, 1, 1) and not any(p.pad) and not p.needs & NO_GATE


def _gated(product: Op[PointwiseProblem], conv: Op[ConvProblem], act: Activation) -> Op[ConvProblem]:
    x, gate = product.inputs if product.problem.tensors[0] == "nchw" else reversed(product.inputs)
    return replace(
        conv, name=f"{product.name} + {conv.name}", problem=replace(conv.problem, prologue=Prologue(gated=True, act=act)),
        inputs=(x, *conv.inputs[1:], gate), nodes=unique((*product.nodes, *conv.nodes)),
    )  # fmt: skip
