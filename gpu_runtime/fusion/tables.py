"""Puts tables in the place of elementwise operators between two tensors of whole numbers of 8 bits.

A quantiser writes SiLU as x, quantised -> Sigmoid, quantised -> product with x, quantised. The whole number of x, one of 256,
decides all of it: the table has the last result at each of them, as ONNX says, in FP32.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeGuard

import numpy as np

from gpu_runtime.network import Network, Op, Options, computes, joined
from tactics.problems.pointwise_ops import Stage
from tactics.problems.problem import PointwiseProblem

# The tensor of whole numbers that alone decides another tensor, and the other's value at each of these numbers, FP32. A tensor
# that decides others is decided by none, so it decides all that they do.
Decided = tuple[str, np.ndarray]


def offer(network: Network) -> Network:
    """Returns the network with a table for each longest such chain, which quantises its input itself where nothing else reads
    that. `network`: one op for each node. The outputs of Clips stay as they are.
    """
    known, options = dict[str, Decided](), Options(network)
    for op in network.ops:
        if found := _decided(op, known):
            root, y = known[op.output] = found
            x = known[root][1]
            if _only(op, "quantize") and not np.array_equal(y, np.clip(x, y[0], y[-1])):
                options.instead(op, _table(network, op, root, (x[0], x[-1], *y)))
        elif _only(op, "quantize"):
            low, high = op.problem.stages[0].params
            known[op.output] = op.output, np.arange(low, high + 1, dtype=np.float32)
    return _quantizing(options.network())


def _only(op: Op[Any] | None, stage: str) -> TypeGuard[Op[PointwiseProblem]]:
    return computes(op, PointwiseProblem) and [s.op for s in op.problem.stages] == [stage]


def _decided(op: Op[Any], known: Mapping[str, Decided]) -> Decided | None:
    """Returns the tensor that alone decides the op's output, and the output at each of its numbers; None without one, or where
    an output is not finite.
    """
    p = op.problem
    if not isinstance(p, PointwiseProblem) or p.constants or {*p.tensors} != {"nchw"} or not known.keys() >= {*op.inputs}:
        return None
    root, first = known[op.inputs[0]]
    if any(known[t][0] != root for t in op.inputs):
        return None
    if _only(op, "mul") and p.stages[0].params:  # by a reciprocal in doubles: rounded, the quotient of FP32
        y = (first * np.float64(p.stages[0].params[0])).astype(np.float32)
    else:
        row = replace(p, n=1, c=1, h=1, w=first.size)
        y = row.reference(*(known[t][1].reshape(row.out_shape) for t in op.inputs)).reshape(-1)
    return (root, y) if np.isfinite(y).all() else None


def _table(network: Network, last: Op[Any], root: str, params: tuple[float, ...]) -> Op[Any]:
    """Makes one op, which reads `root`, of all ops between that tensor and the op `last`."""
    todo, between = [last], set[int]()
    while todo:
        op = todo.pop()
        between.add(id(op))
        todo += [maker for t in op.inputs if t != root for maker in network.producers[t] if id(maker) not in between]
    problem = replace(last.problem, stages=(Stage("table", params=tuple(map(float, params))),), tensors=("nchw",))
    return joined(*(op for op in network.ops if id(op) in between), problem=problem, inputs=(root,))


def _quantizing(network: Network) -> Network:
    """Returns the network in which a table whose input has no other reader quantises that itself."""
    options = Options(network)
    for op in network.ops:
        if _only(op, "table") and _only(maker := network.alone(op.inputs[0]), "quantize"):
            options.without(maker)
            options.instead(op, joined(maker, op, inputs=maker.inputs))
    return options.network()
