"""Offers a residual that is another tensor with each pixel repeated u x u as the small tensor itself, read by the convolution
that adds it.

Super-resolution adds its enlarged input after depth-to-space in this way, and pyramids of features add a coarser map. It is one
more option of the Add's fusion group; the repeated tensor then does not exist, unless it has other readers.
"""

from collections.abc import Sequence

from gpu_runtime.network import Network, Op, Options, computes, joined
from tactics.problems.convolution import with_epilogue
from tactics.problems.problem import ConvProblem, MoveProblem
from tactics.problems.protocol import Feature, Problem


def offer(network: Network) -> Network:
    """Returns the network with the alternatives added."""
    options, before = Options(network), dict(network.groups)
    repeated = {op.output: op for op in network.ops if computes(op, MoveProblem) and _repeats(op)}
    offered = set()
    for op in network.ops:
        if not computes(op, ConvProblem) or Feature.RESIDUAL not in op.problem.needs or len(op.when) != 1:
            continue
        source = repeated.get(op.inputs[1])
        if source is None or op.problem.epilogue.d2s not in (1, source.problem.step[1]):
            continue
        ((group, option),) = op.when
        offered.add(group)
        options.group(group, f"{option}, upsampled")
        options.behind(
            op,
            joined(
                source,
                op,
                problem=with_epilogue(op.problem, up=source.problem.step[1]),
                inputs=(op.inputs[0], source.inputs[0]),
                when=((group, f"{option}, upsampled"),),
            ),
        )
    for t, op in repeated.items():
        group = _only_group(network.readers[t])
        if group in offered and t not in network.output_names:
            options.limit(op, group, *before[group])
    return options.network()


def _repeats(op: Op[MoveProblem]) -> bool:
    p = op.problem
    if p.kind != "upsample" or op.when:
        return False
    return p.step[1] == p.step[2] > 1 and p.out == (p.c, p.h * p.step[1], p.w * p.step[1])


def _only_group(readers: Sequence[Op[Problem]]) -> str:
    """Returns the one fusion group that decides about every reader of a tensor; "" if there is none."""
    deciding = [{group for group, _ in reader.when} for reader in readers]
    common = set.intersection(*deciding) if deciding else set()
    return min(common, default="")
