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

Values = Mapping[str, np.ndarray]  # tensor of whole numbers -> what another tensor is at each of them, FP32


def offer(network: Network) -> Network:
    """Returns the network with a table for each longest such chain, which quantises its input itself where nothing else reads
    that. `network`: one op for each node. What a Clip computes stays.
    """
    known, options = dict[str, Values](), Options(network)
    for op in network.ops:
        known[op.output] = values = _values(op, known)
        if _only(op, "quantize"):
            root, y = next(iter(values.items()), (op.output, np.full(1, np.nan)))
            if np.isfinite(y).all() and not np.array_equal(y, np.clip(x := known[root][root], y[0], y[-1])):
                options.instead(op, _table(network, op, root, (x[0], x[-1], *y)))
            low, high = op.problem.stages[0].params
            known[op.output] = {**values, op.output: np.arange(low, high + 1, dtype=np.float32)}
    return _quantizing(options.network())


def _only(op: Op[Any] | None, stage: str) -> TypeGuard[Op[PointwiseProblem]]:
    return computes(op, PointwiseProblem) and [s.op for s in op.problem.stages] == [stage]


def _values(op: Op[Any], known: Mapping[str, Values]) -> Values:
    """Returns the op's results at the numbers of each tensor that decides them: tensor -> results."""
    p, found = op.problem, dict[str, np.ndarray]()
    if not isinstance(p, PointwiseProblem) or p.constants or {*p.tensors} != {"nchw"}:
        return found
    first, *others = (known.get(t, {}) for t in op.inputs)
    for root in (root for root in first if all(root in values for values in others)):
        if _only(op, "mul") and p.stages[0].params:  # by a reciprocal in doubles: rounded, the quotient of FP32
            found[root] = (first[root] * np.float64(p.stages[0].params[0])).astype(np.float32)
        else:
            row = replace(p, n=1, c=1, h=1, w=first[root].size)
            found[root] = row.reference(*(v[root].reshape(row.out_shape) for v in (first, *others))).reshape(-1)
    return found


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
