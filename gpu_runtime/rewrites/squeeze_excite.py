"""Global average and the two fully connected layers behind it, offered as one launch.

Apart or as one is a choice of the plan: an image's last block reads all weights of the second layer, so that of many hidden
values the layers are faster apart. As in back_to_back, only where neither layer fits the 2:4 pattern: the one launch is dense.
"""

from __future__ import annotations

from gpu_runtime.network import Network, Op, Options, computes
from tactics.families.squeeze_excite import reason_against
from tactics.problems.problem import ConvProblem, PoolProblem, SqueezeExciteProblem
from tactics.problems.protocol import Problem

APART, ONE = "apart", "one"


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
        options.group(group, APART, ONE)
        ops = pool, first, second
        for op in ops:
            options.limit(op, group, APART)
        weights = {**first.weights, **{f"{name}2": array for name, array in second.weights.items()}}
        options.behind(second, Op(
            " + ".join(op.name for op in ops), SqueezeExciteProblem(pool.problem, first.problem, second.problem), pool.inputs,
            second.output, weights, tuple(node for op in ops for node in op.nodes), ((group, ONE),), layer,
            (first.layer, second.layer),
        ))  # fmt: skip
    return options.network()


def _only_reader(network: Network, op: Op[Problem]) -> Op[Problem] | None:
    """The op that alone reads what `op` gives, where that can be kept out of memory."""
    readers = network.readers[op.output]
    inside = op.output not in network.output_names and not network.is_fp32(op.output)
    return readers[0] if inside and len(readers) == 1 else None
