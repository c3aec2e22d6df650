"""A pool or a normalization and the elementwise stages that alone read it, offered as one launch: activations, residuals.

Apart or as one is a choice of the plan: as one, the other tensors of the stages lie in the output's format.
"""

from __future__ import annotations

from gpu_runtime.network import Network, Op, Options, computes
from tactics.problems.problem import ChainedProblem, PointwiseProblem, PoolProblem
from tactics.problems.protocol import Problem
from tactics.problems.reductions import NormalizeProblem
from tactics.stages import reason_against

APART, ONE = "apart", "one"


def offer(network: Network) -> Network:
    """The network with the alternatives added. What exists under some options only is left alone."""
    options = Options(network)
    for first in network.ops:
        chain = _chain_of(network, first)
        if chain is None or first.when or chain.when:
            continue
        joined = _joined(first, chain)
        if joined is None or any(map(network.is_fp32, (*joined.inputs, joined.output))):
            continue
        group = joined.when[0][0]
        options.group(group, APART, ONE)
        for op in (first, chain):
            options.limit(op, group, APART)
        options.behind(chain, joined)
    return options.network()


def _chain_of(network: Network, first: Op[Problem]) -> Op[PointwiseProblem] | None:
    """The stages that alone read the whole of what `first` gives, where that can be kept out of memory."""
    readers = network.readers[first.output]
    inside = first.output not in network.output_names and not network.is_fp32(first.output)
    chain = readers[0] if inside and len(readers) == 1 else None
    if not computes(chain, PointwiseProblem) or not chain.problem.stages or reason_against(chain.problem):
        return None
    return chain if chain.problem.out_shape == first.problem.out_shape else None


def _joined(first: Op[Problem], chain: Op[PointwiseProblem]) -> Op[ChainedProblem] | None:
    """Both as one op; None unless the chain begins with what `first` gives and reads it nowhere else as another tensor."""
    p = first.problem
    begins = chain.inputs[0] == first.output and first.output not in chain.inputs[1:] and chain.problem.tensors[0] == "nchw"
    if not begins or (isinstance(p, PoolProblem) and p.is_global) or not isinstance(p, (PoolProblem, NormalizeProblem)):
        return None
    return Op(
        f"{first.name} + {chain.name}", ChainedProblem(p, chain.problem), (*first.inputs, *chain.inputs[1:]), chain.output,
        {**first.weights, **chain.weights}, first.nodes + chain.nodes, ((f"{first.name} + {chain.name}", ONE),),
    )  # fmt: skip
