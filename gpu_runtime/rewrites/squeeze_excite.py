"""Global average and the two fully connected layers behind it, offered as one launch, and the two layers alone as one.

One block reads a whole image, which pays for small ones; of a large one many blocks form the average first. Apart or as one
is a choice of the plan. As in back_to_back, only where neither layer fits the 2:4 pattern: the one launch is dense.
"""

from __future__ import annotations

from dataclasses import replace

from gpu_runtime.network import Network, Op, Options, computes
from tactics.families.squeeze_excite import reason_against
from tactics.problems.problem import ConvProblem, PoolProblem, SqueezeExciteProblem
from tactics.problems.protocol import Problem

APART, ONE, LAYERS = "apart", "one", "layers as one"


def offer(network: Network) -> Network:
    """The network with the alternatives added; their `Op.layers` names both fully connected layers."""
    options = Options(network)
    for pool in network.ops:
        first = _only_reader(network, pool)
        second = None if first is None else _only_reader(network, first)
        if not computes(pool, PoolProblem) or not computes(first, ConvProblem) or not computes(second, ConvProblem):
            continue
        dense = not (first.problem.sparse24 or second.problem.sparse24)
        if not dense or pool.when or first.when or second.when:
            continue
        if reason_against(pool.problem, first.problem, second.problem):
            continue
        layer = f"{first.layer} -> {second.layer}"
        group = f"{layer} (squeeze-excite)"
        options.group(group, APART, ONE, LAYERS)
        options.limit(pool, group, APART, LAYERS)
        for op in (first, second):
            options.limit(op, group, APART)
        weights = {**first.weights, **{f"{name}2": array for name, array in second.weights.items()}}
        average = replace(pool.problem, h=1, w=1, r=1, s=1)  # of an average
        whole = SqueezeExciteProblem(pool.problem, first.problem, second.problem)
        for option, before, problem in ((ONE, pool, whole), (LAYERS, None, replace(whole, average=average))):
            used = [op for op in (before, first, second) if op is not None]
            options.behind(pool, Op(
                " + ".join(op.name for op in used), problem, used[0].inputs, second.output, weights,
                tuple(node for op in used for node in op.nodes), ((group, option),), layer, (first.layer, second.layer),
            ))  # fmt: skip
    return options.network()


def _only_reader(network: Network, op: Op[Problem]) -> Op[Problem] | None:
    """The op that alone reads what `op` gives, where that can be kept out of memory."""
    readers = network.readers[op.output]
    inside = op.output not in network.output_names and not network.is_fp32(op.output)
    return readers[0] if inside and len(readers) == 1 else None
