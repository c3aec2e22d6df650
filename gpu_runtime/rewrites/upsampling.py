"""A residual that is another tensor with each pixel repeated u x u: read where it is small, by the convolution that adds it.

So super-resolution adds its enlarged input after depth-to-space, and pyramids of features add a coarser map. One more option
of the Add's fusion group; the repeated tensor then does not exist, unless somebody else reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gpu_runtime.network import Network, Op, readers_of
from tactics.problems.convolution import with_epilogue
from tactics.problems.problem import ConvProblem, MoveProblem
from tactics.problems.protocol import Feature


def offer(network: Network) -> Network:
    """The network with the alternatives added."""
    made = {op.output: op for op in network.ops if _repeats(op)}
    groups, more = {group: options for group, options in network.groups}, {}
    for op in network.ops:
        source = made.get(op.inputs[1]) if Feature.RESIDUAL in op.problem.needs else None
        if not isinstance(op.problem, ConvProblem):
            continue
        if source is not None and len(op.when) == 1 and op.problem.epilogue.d2s in (1, source.problem.step[1]):
            ((group, option),) = op.when
            problem = with_epilogue(op.problem, up=source.problem.step[1])
            groups[group] = (*groups[group], f"{option}, upsampled")
            more[op.name] = replace(
                op, name=f"{source.name} + {op.name}", problem=problem, inputs=(op.inputs[0], source.inputs[0]),
                nodes=(*source.nodes, *op.nodes), when=((group, f"{option}, upsampled"),),
            )  # fmt: skip
    if not more:
        return network
    before, readers, outputs = dict(network.groups), readers_of(network), {t.name for t in network.outputs}
    ops: list[Op] = []
    for op in network.ops:
        repeats = op is made.get(op.output) and op.output not in outputs
        if repeats and (group := _only_group(readers.get(op.output, ()))) in before and groups[group] != before[group]:
            op = replace(op, when=tuple((group, option) for option in before[group]))
        ops.append(op)
        if op.name in more:
            ops.append(more[op.name])
    return replace(network, ops=tuple(ops), groups=tuple(groups.items()))


def _repeats(op: Op) -> bool:
    p = op.problem
    if not isinstance(p, MoveProblem) or p.kind != "upsample" or op.when:
        return False
    return p.step[1] == p.step[2] > 1 and p.out == (p.c, p.h * p.step[1], p.w * p.step[1])


def _only_group(readers: Sequence[Op]) -> str | None:
    """The one fusion group that decides about every one of a tensor's readers."""
    deciding = [{group for group, _ in reader.when} for reader in readers]
    common = set.intersection(*deciding) if deciding else set()
    return min(common, default=None)
