"""A convolution and the 1x1 convolution that alone reads it, offered as one launch; apart or one is a choice of the plan.

The one launch is dense. So it is offered only where neither convolution fits the 2:4 pattern: otherwise it would hide from the
log that a layer could have run sparse. What lies between the two needs no format then and no memory.
"""

from __future__ import annotations

from dataclasses import replace

from gpu_runtime.network import Network, Op
from tactics.families.back_to_back import reason_against
from tactics.problems.problem import BackToBackProblem, ConvProblem, SqueezeExciteProblem


def offer(network: Network) -> Network:
    """The network with the alternatives added; their `Op.layers` names both layers."""
    groups, apart, beside = [], {}, {}
    for first, seconds in _pairs(network):
        name = f"{first.layer} -> {seconds[0].layer}"
        groups.append((name, ("apart", "one")))
        for op in (first, *seconds):
            apart[op.name] = (name, "apart")
        for second in seconds:
            beside[second.name] = _joined(first, second, name)
    ops = []
    for op in network.ops:
        ops.append(replace(op, when=(*op.when, apart[op.name])) if op.name in apart else op)
        if op.name in beside:
            ops.append(beside[op.name])
    return replace(network, ops=tuple(ops), groups=(*network.groups, *groups)) if groups else network


def _pairs(network: Network) -> list[tuple[Op, list[Op]]]:
    """(a convolution, the alternatives of the one that alone reads it); no layer is in two pairs."""
    readers, alternatives = {}, {}
    for op in network.ops:
        for name in op.inputs:
            readers.setdefault(name, []).append(op)
        if not isinstance(op.problem, SqueezeExciteProblem):  # a choice of its own
            for layer in op.layers or (op.layer,):
                alternatives.setdefault(layer, []).append(op)
    whole, found, taken = {t.name for t in network.outputs} | {t for t in network.tensors if network.is_single(t)}, [], set()
    for first in network.ops:
        seconds = readers.get(first.output, [])
        layers = {op.layer for op in seconds}
        if first.output in whole or len(layers) != 1 or layers & {"", *taken} or first.layer in taken:
            continue
        if alternatives[first.layer] != [first] or not all(_fits(first, op) for op in seconds):
            continue
        if alternatives[seconds[0].layer] == seconds:
            found.append((first, seconds))
            taken |= {first.layer, *layers}
    return found


def _fits(first: Op, second: Op) -> bool:
    """Whether the two can be one launch, and what fusion decisions they have in common ask the same of both."""
    p, q = first.problem, second.problem
    if not (isinstance(p, ConvProblem) and isinstance(q, ConvProblem)) or second.inputs[1:].count(first.output):
        return False
    common = {g for g, _ in first.when} & {g for g, _ in second.when}
    differ = any({w for w in first.when if w[0] == g} != {w for w in second.when if w[0] == g} for g in common)
    if p.sparse24 or q.sparse24 or differ:
        return False
    return not reason_against(p, q)


def _joined(first: Op, second: Op, group: str) -> Op:
    weights = {**first.weights, **{f"{name}2": array for name, array in second.weights.items()}}
    return Op(
        f"{first.name} + {second.name}", BackToBackProblem(first.problem, second.problem),
        (first.inputs[0], *second.inputs[1:]), second.output, weights, first.nodes + second.nodes,
        (*dict.fromkeys((*first.when, *second.when)), (group, "one")), group, (first.layer, second.layer),
    )  # fmt: skip
