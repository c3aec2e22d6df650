"""Global average and the two fully connected layers behind it, offered as one launch; apart or one is a choice of the plan.

As in back_to_back, only where neither layer fits the 2:4 pattern: the one launch is dense.
"""

from __future__ import annotations

from dataclasses import replace

from gpu_runtime.network import Network, Op
from tactics.families.squeeze_excite import reason_against
from tactics.problems.problem import ConvProblem, PoolProblem, SqueezeExciteProblem


def offer(network: Network) -> Network:
    """The network with the alternatives added; their `Op.layers` names both fully connected layers."""
    readers: dict[str, list[Op]] = {}
    for op in network.ops:
        for name in op.inputs:
            readers.setdefault(name, []).append(op)
    outputs, ops, groups, apart = {t.name for t in network.outputs}, [], [], {}

    def only_reader(op: Op, kind: type) -> Op | None:
        found = readers.get(op.output, [])
        inside = len(found) == 1 and op.output not in outputs and not network.is_single(op.output)
        return found[0] if inside and isinstance(found[0].problem, kind) else None

    for op in network.ops:
        ops.append(op)
        first = only_reader(op, ConvProblem) if isinstance(op.problem, PoolProblem) and not op.when else None
        second = only_reader(first, ConvProblem) if first else None
        if not second or first.when or second.when or first.problem.sparse24 or second.problem.sparse24:
            continue
        if reason_against(op.problem, first.problem, second.problem):
            continue
        group = f"{first.layer} -> {second.layer} (squeeze-excite)"
        groups.append((group, ("apart", "one")))
        apart |= {part.name: (group, "apart") for part in (op, first, second)}
        weights = {**first.weights, **{f"{name}2": array for name, array in second.weights.items()}}
        ops.append(Op(
            f"{op.name} + {first.name} + {second.name}", SqueezeExciteProblem(op.problem, first.problem, second.problem),
            op.inputs, second.output, weights, op.nodes + first.nodes + second.nodes, ((group, "one"),),
            f"{first.layer} -> {second.layer}", (first.layer, second.layer),
        ))  # fmt: skip
    ops = [replace(op, when=(*op.when, apart[op.name])) if op.name in apart else op for op in ops]
    return replace(network, ops=tuple(ops), groups=(*network.groups, *groups)) if groups else network
