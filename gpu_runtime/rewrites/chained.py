"""Offers a pool or a normalization, the sum that only it reads and the elementwise stages that are its only reader, as one
launch.

Separate or as one is a choice of the plan: as one, the other tensors of the stages have the output's format, and the two
addends of the sum share one.
"""

from dataclasses import replace
from typing import Any, TypeVar

from gpu_runtime.network import APART, Network, Op, Options, adds_tensors, computes, joined
from tactics.problems.problem import ChainedProblem, PointwiseProblem, PoolProblem
from tactics.problems.protocol import Problem
from tactics.problems.reductions import NormalizeProblem
from tactics.stages import reason_against

P = TypeVar("P", bound=Problem)
SUM, STAGES = "with the sum", "with the stages"


def offer(network: Network) -> Network:
    """Returns the network with one launch as an alternative for each pool or normalization together with its neighbours: the
    sum that only it reads, the elementwise stages that are its only reader, or both. Ops that exist only under some options are
    left as they are.
    """
    options, taken = Options(network), set[int]()
    for first in network.ops:
        before, chain = _free(network, _sum_of(network, first), taken), _free(network, _chain_of(network, first), taken)
        used = [op for op in (before, first, chain) if op is not None]
        if len(used) == 1 or _free(network, first, taken) is None:
            continue
        taken |= {id(op) for op in used}
        group, summed = " + ".join(op.name for op in used), _summed(before, first)
        if before is None or chain is None:
            options.either(group, used, [(first, summed) if chain is None else (chain, _one(summed, chain))])
            continue
        options.group(group, APART, SUM, STAGES)
        options.limit(before, group, STAGES)
        options.limit(chain, group, SUM)
        options.behind(first, replace(summed, when=((group, SUM),)))
        options.either(group, used, [(chain, _one(summed, chain))])
        options.behind(chain, replace(_one(first, chain), when=((group, STAGES),)))
    return options.network()


def _free(network: Network, op: Op[P] | None, taken: set[int]) -> Op[P] | None:
    """Returns the op; None if it exists only under some options, is `taken` by another group, or has FP32 tensors."""
    if op is None or op.when or id(op) in taken or any(map(network.is_fp32, (*op.inputs, op.output))):
        return None
    return op


def _sum_of(network: Network, first: Op[Problem]) -> Op[Problem] | None:
    """Returns the sum of two whole tensors that only a normalization reads; else None."""
    made = network.alone(first.inputs[0]) if computes(first, NormalizeProblem) and not first.problem.added else None
    return made if made is not None and adds_tensors(made) and made.problem.out_shape == first.problem.out_shape else None


def _chain_of(network: Network, first: Op[Problem]) -> Op[PointwiseProblem] | None:
    """Returns the elementwise chain that is the only reader of a pool's or a normalization's output, if its tensor 0 is that
    whole output; else None.
    """
    p, chain = first.problem, network.only_reader(first.output)
    if not isinstance(p, (PoolProblem, NormalizeProblem)) or (isinstance(p, PoolProblem) and p.is_global):
        return None
    if not computes(chain, PointwiseProblem) or not chain.problem.stages or reason_against(chain.problem):
        return None
    begins = chain.inputs[0] == first.output and first.output not in chain.inputs[1:] and chain.problem.tensors[0] == "nchw"
    return chain if begins and chain.problem.out_shape == p.out_shape else None


def _summed(before: Op[Problem] | None, first: Op[Problem]) -> Op[Problem]:
    """Returns the normalization that also computes the sum `before` it; unchanged without a sum."""
    if before is None or not computes(first, NormalizeProblem):
        return first
    return joined(before, first, problem=replace(first.problem, added=True), inputs=before.inputs)


def _one(first: Op[Any], chain: Op[PointwiseProblem]) -> Op[ChainedProblem]:
    inputs, weights = (*first.inputs, *chain.inputs[1:]), {**first.weights, **chain.weights}
    return joined(first, chain, problem=ChainedProblem(first.problem, chain.problem), inputs=inputs, weights=weights)
