"""A pool or a normalization, the sum that it alone reads and the elementwise stages that alone read it, offered as one launch.

Apart or as one is a choice of the plan: as one, the other tensors of the stages lie in the output's format, and the two of the
sum in one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from gpu_runtime.network import Network, Op, Options, computes
from tactics.problems.pointwise_ops import Stage
from tactics.problems.problem import ChainedProblem, PointwiseProblem, PoolProblem
from tactics.problems.protocol import Problem
from tactics.problems.reductions import NormalizeProblem
from tactics.stages import reason_against

P = TypeVar("P", bound=Problem)
APART, SUM, STAGES, ONE = "apart", "with the sum", "with the stages", "one"


def offer(network: Network) -> Network:
    """The network with the alternatives added. What exists under some options only is left alone."""
    options, taken = Options(network), set[int]()
    for first in network.ops:
        before, chain = _free(network, _sum_of(network, first), taken), _free(network, _chain_of(network, first), taken)
        used = [op for op in (before, first, chain) if op is not None]
        if len(used) == 1 or _free(network, first, taken) is None:
            continue
        taken |= {id(op) for op in used}
        group, summed = " + ".join(op.name for op in used), _summed(before, first)
        both = before is not None and chain is not None
        options.group(group, APART, *((SUM, STAGES) if both else ()), ONE)
        options.limit(first, group, APART)
        if before is not None:
            options.limit(before, group, APART, *((STAGES,) if both else ()))
            options.behind(first, replace(summed, when=((group, SUM if both else ONE),)))
        if chain is not None:
            options.limit(chain, group, APART, *((SUM,) if both else ()))
            options.behind(chain, replace(_joined(summed, chain), when=((group, ONE),)))
        if before is not None and chain is not None:
            options.behind(chain, replace(_joined(first, chain), when=((group, STAGES),)))
    return options.network()


def _free(network: Network, op: Op[P] | None, taken: set[int]) -> Op[P] | None:
    """The op, unless it exists under some options only, is `taken` by another group or has tensors in FP32."""
    if op is None or op.when or id(op) in taken or any(map(network.is_fp32, (*op.inputs, op.output))):
        return None
    return op


def _sum_of(network: Network, first: Op[Problem]) -> Op[Problem] | None:
    """The sum of two whole tensors that a normalization alone reads."""
    made = network.producers.get(first.inputs[0], ())
    if not computes(first, NormalizeProblem) or first.problem.added or len(made) != 1:
        return None
    if network.only_reader(made[0].output) is not first:
        return None
    p = made[0].problem
    whole = isinstance(p, PointwiseProblem) and p.stages == (Stage("add", "t1"),) and p.tensors == ("nchw", "nchw")
    return made[0] if whole and p.out_shape == first.problem.out_shape else None


def _chain_of(network: Network, first: Op[Problem]) -> Op[PointwiseProblem] | None:
    """The stages that alone read the whole of what a pool or a normalization gives, and begin with it."""
    p, chain = first.problem, network.only_reader(first.output)
    if not isinstance(p, (PoolProblem, NormalizeProblem)) or (isinstance(p, PoolProblem) and p.is_global):
        return None
    if not computes(chain, PointwiseProblem) or not chain.problem.stages or reason_against(chain.problem):
        return None
    begins = chain.inputs[0] == first.output and first.output not in chain.inputs[1:] and chain.problem.tensors[0] == "nchw"
    return chain if begins and chain.problem.out_shape == p.out_shape else None


def _summed(before: Op[Problem] | None, first: Op[Problem]) -> Op[Problem]:
    """The normalization of the sum itself; without a sum as it is."""
    if before is None or not computes(first, NormalizeProblem):
        return first
    return replace(
        first,
        name=f"{before.name} + {first.name}",
        problem=replace(first.problem, added=True),
        inputs=before.inputs,
        nodes=before.nodes + first.nodes,
    )


def _joined(first: Op[Problem], chain: Op[PointwiseProblem]) -> Op[Problem]:
    """Both as one op."""
    p = first.problem
    if not isinstance(p, (PoolProblem, NormalizeProblem)):
        raise TypeError(f"{first.name}: expected a pool or a normalization, got {p}")
    return Op(
        f"{first.name} + {chain.name}",
        ChainedProblem(p, chain.problem),
        (*first.inputs, *chain.inputs[1:]),
        chain.output,
        {**first.weights, **chain.weights},
        first.nodes + chain.nodes,
    )
