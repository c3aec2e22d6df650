"""Moves a scale, a shift and an activation from behind a Concat into the convolutions before it, always: it saves a launch.

MixNet and its like split a layer's channels among kernels of several sizes, concatenate the results and normalize them.

Example. relu(concat(conv(x, w1), conv(x, w2)) * s) with 8 + 16 channels: concat(relu(conv(x, w1 * s[:8])), relu(conv(x, w2 *
s[8:]))).
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from gpu_runtime.fusion.convolutions import by_rows, is_convolution
from gpu_runtime.fusion.steps import activation, leading_affine, rest, steps
from gpu_runtime.network import Network, Op, Options, computes, unique
from tactics.problems.convolution import with_epilogue
from tactics.problems.epilogue import Epilogue
from tactics.problems.pointwise_ops import NONE, Activation
from tactics.problems.problem import ConcatProblem, PointwiseProblem


def into_convolutions(network: Network) -> Network:
    options = Options(network)
    for op in network.ops:
        if computes(op, ConcatProblem) and (chain := _behind(network, op)) is not None:
            _move(network, op, chain, options)
    return options.network()


def _behind(network: Network, concat: Op[ConcatProblem]) -> Op[PointwiseProblem] | None:
    """Returns the chain that is the only reader of a Concat along the channels whose inputs are all convolutions without other
    readers; else None.
    """
    y, chain = concat.output, network.only_reader(concat.output)
    if concat.problem.axis != 1 or concat.when or not computes(chain, PointwiseProblem) or chain.when:
        return None
    alone = all(network.only_reader(t) is concat and _takes(network.producer(t)) for t in concat.inputs)
    once = len({*concat.inputs}) == len(concat.inputs) and chain.inputs[0] == y and y not in chain.inputs[1:]
    return chain if alone and once else None


def _takes(op: Op[Any] | None) -> bool:
    """Whether an op is a convolution without an epilogue."""
    return is_convolution(op) and replace(op.problem.epilogue, bias=False) == Epilogue()


def _move(network: Network, concat: Op[Any], chain: Op[Any], options: Options) -> None:
    """Moves the leading scales and shifts of the chain, then an activation, into the convolutions."""
    found, channels = steps(chain, concat.output) or [], chain.problem.c
    affine, count = leading_affine(found, channels)
    act, vectors = NONE, dict(zip(("scale", "shift"), affine, strict=True))
    if count < len(found) and (one := activation(found[count], "c", channels)):
        act, count = one.act, count + 1
        vectors |= {} if one.slope is None else {"slope": one.slope}
    if not count:
        return
    first, pieces = 0, list[str]()
    for conv in (op for t in concat.inputs for op in network.producers[t]):
        rows = len(conv.weights["w"])
        part = {k: np.broadcast_to(v[first : first + rows] if v.size > 1 else v, rows) for k, v in vectors.items()}
        options.instead(conv, new := _with(conv, chain, act, part))
        pieces.append(new.output)
        first += rows
    if count == len(found):
        name, nodes = f"{concat.name} + {chain.name}", unique((*concat.nodes, *chain.nodes))
        options.without(concat)
        options.instead(chain, replace(concat, name=name, nodes=nodes, inputs=tuple(pieces), output=chain.output))
    else:
        y = f"{chain.output} before {chain.problem.stages[count]}"
        options.instead(concat, replace(concat, inputs=tuple(pieces), output=y))
        options.instead(chain, rest(network, chain, count, y))


def _with(conv: Op[Any], chain: Op[Any], act: Activation, part: Mapping[str, np.ndarray]) -> Op[Any]:
    """Returns `conv` with the affine function and activation that `chain` computed on its output in its own epilogue.

    `chain`: the pointwise op behind the Concat; it only gives its name and nodes. `act`: the activation to take over, or
    NONE. `part`: the slices of the chain's "scale" and "shift", and for PReLU of its "slope", for this convolution's K
    output channels: arrays [K].
    """
    b = conv.weights.get("b", np.zeros(1)).astype(np.float64) * part["scale"] + part["shift"]
    weights = {**conv.weights, "w": by_rows(conv.weights["w"], part["scale"]), "b": b}
    if "slope" in part:
        weights["slope"] = np.ascontiguousarray(part["slope"])
    problem, y = with_epilogue(conv.problem, bias=True, act=act), f"{conv.output} of {chain.output}"
    name, nodes = f"{conv.name} + {chain.name}", conv.nodes + chain.nodes
    return replace(conv, name=name, problem=problem, output=y, weights=weights, nodes=nodes)
