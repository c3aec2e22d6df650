"""A convolution and the 1x1 convolution that alone reads it, offered as one launch; apart or one is a choice of the plan.

The one launch is dense. So it is offered only where neither convolution fits the 2:4 pattern: otherwise it would hide from the
log that a layer could have run sparse. What lies between the two needs no format then and no memory.
"""

from __future__ import annotations

from gpu_runtime.network import Network, Op, Options, computes
from tactics.families.back_to_back import reason_against
from tactics.problems.problem import BackToBackProblem, ConvProblem, SqueezeExciteProblem
from tactics.problems.protocol import Problem

APART, ONE = "apart", "one"
Conv = Op[ConvProblem]


def offer(network: Network) -> Network:
    """The network with the alternatives added; their `Op.layers` names both layers."""
    options = Options(network)
    for first, seconds in _pairs(network):
        group = f"{first.layer} -> {seconds[0].layer}"
        options.group(group, APART, ONE)
        for op in (first, *seconds):
            options.limit(op, group, APART)
        for second in seconds:
            options.behind(second, _joined(first, second, group))
    return options.network()


def _pairs(network: Network) -> list[tuple[Conv, list[Conv]]]:
    """(a convolution, the alternatives of the one that alone reads it); no layer is in two pairs."""
    alternatives: dict[str, list[Op[Problem]]] = {}
    for op in network.ops:
        if not computes(op, SqueezeExciteProblem):  # a choice of its own
            for layer in op.layers or (op.layer,):
                alternatives.setdefault(layer, []).append(op)
    found: list[tuple[Conv, list[Conv]]] = []
    taken = {""}
    for first in network.ops:
        readers = network.readers[first.output]
        seconds = [op for op in readers if computes(op, ConvProblem) and _fits(first, op)]
        layers = {first.layer, *(op.layer for op in readers)}
        inside = first.output not in network.output_names and not network.is_fp32(first.output)
        if not computes(first, ConvProblem) or not inside or not seconds or len(seconds) < len(readers):
            continue
        alone = len(layers) == 2 and not layers & taken and len(alternatives[first.layer]) == 1
        if alone and alternatives[seconds[0].layer] == seconds:
            found.append((first, seconds))
            taken |= layers
    return found


def _fits(first: Op[Problem], second: Conv) -> bool:
    """Whether the two can be one launch, and what fusion decisions they have in common ask the same of both."""
    if not computes(first, ConvProblem) or first.output in second.inputs[1:]:
        return False
    common = {g for g, _ in first.when} & {g for g, _ in second.when}
    differ = any({w for w in first.when if w[0] == g} != {w for w in second.when if w[0] == g} for g in common)
    if first.problem.sparse24 or second.problem.sparse24 or differ:
        return False
    return not reason_against(first.problem, second.problem)


def _joined(first: Conv, second: Conv, group: str) -> Op[BackToBackProblem]:
    weights = {**first.weights, **{f"{name}2": array for name, array in second.weights.items()}}
    return Op(
        f"{first.name} + {second.name}",
        BackToBackProblem(first.problem, second.problem),
        (first.inputs[0], *second.inputs[1:]),
        second.output,
        weights,
        first.nodes + second.nodes,
        (*dict.fromkeys((*first.when, *second.when)), (group, ONE)),
        group,
        (first.layer, second.layer),
    )
