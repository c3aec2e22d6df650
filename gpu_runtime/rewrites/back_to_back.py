"""Offers a convolution and its only reader, a 1x1 convolution, as one launch; separate or as one is a choice of the plan.

The one launch is dense, also where weights are 2:4: the log says so (one_launch). The tensor between the two then needs no
format and no memory.
"""

from functools import partial
from typing import Any

from gpu_runtime.network import Network, Op, Options, computes, joined, unique
from tactics.families.back_to_back import reason_against
from tactics.planner.grouping import grouped
from tactics.problems.problem import BackToBackProblem, ConvProblem
from tactics.problems.protocol import Problem


def offer(network: Network) -> Network:
    """Returns the network with the alternatives added; `Op.layers` of a new op names both layers. No layer is in two pairs."""
    options, taken = Options(network), {""}
    single = (op for op in network.ops if not op.problem.only_dense)  # an op with several layers has a group already
    alternatives = grouped((layer, op) for op in single for layer in op.layers or (op.layer,))
    for first in network.ops:
        seconds = network.takers(first.output, partial(_fits, first))
        layers = {first.layer, *(op.layer for op in seconds)}
        if len(layers) != 2 or layers & taken or network.is_fp32(first.output):
            continue
        if alternatives[first.layer] == [first] and alternatives[seconds[0].layer] == [*seconds]:
            group = f"{first.layer} -> {seconds[0].layer}"
            options.either(group, (first, *seconds), [(second, _one(first, second, group)) for second in seconds])
            taken |= layers
    return options.network()


def _fits(first: Op[Problem], second: Op[Problem]) -> bool:
    """Whether the two can be one launch, and the fusion groups that both depend on require the same options."""
    if not computes(first, ConvProblem) or not computes(second, ConvProblem) or first.output in second.inputs[1:]:
        return False
    common = {g for g, _ in first.when} & {g for g, _ in second.when}
    differ = any({w for w in first.when if w[0] == g} != {w for w in second.when if w[0] == g} for g in common)
    return not differ and not reason_against(first.problem, second.problem)


def _one(first: Op[Any], second: Op[Any], group: str) -> Op[BackToBackProblem]:
    return joined(
        first,
        second,
        problem=BackToBackProblem(first.problem, second.problem),
        inputs=(first.inputs[0], *second.inputs[1:]),
        weights={**first.weights, **{f"{name}2": array for name, array in second.weights.items()}},
        when=unique((*first.when, *second.when)),
        layer=group,
        layers=(first.layer, second.layer),
        branches=False,
    )
