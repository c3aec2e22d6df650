"""Convolutions that read the same tensor in the same way, offered as one: `a || b`, as TensorRT writes it.

One kernel with the output channels of all; what each wrote is then a part of its output, in place where the channels begin at
whole vectors. Where only some are followed by a Relu, the one is followed by a PRelu with a slope per channel, 0 or 1
for the others. Merged or apart is an option of a fusion group: the plan chooses. Such a convolution cannot also take in a
residual, which one part's readers may depend on: an Add that is to go into one of them wants them apart. So no choice of
options ever closes a cycle.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from gpu_runtime.lower import Network, Op
from tactics.pointwise_ops import Activation
from tactics.problem import ConvProblem, MoveProblem

PRELU = Activation("prelu")
SLOPES = {"none": lambda: 1.0, "relu": lambda: 0.0, "leaky_relu": lambda alpha: alpha, "prelu": None}
VECTOR = 8  # parts begin at multiples of this many channels


def merge(network: Network) -> Network:
    """The network with the alternatives added; `Op.layers` of a merged convolution names the layers in it."""
    option: dict[str, tuple[str, str]] = {}  # layer -> the literal under which it exists by itself
    groups, before = [], {}
    for ops in _siblings(network):
        name = " || ".join(op.layer for op in ops)
        groups.append((f"siblings {name}", ("apart", "merged")))
        option |= {op.layer: (f"siblings {name}", "apart") for op in ops}
        before[ops[0].name] = _merged(ops, (f"siblings {name}", "merged"))
    if not groups:
        return network
    result, tensors = [], dict(network.tensors)
    for op in network.ops:
        for extra in before.get(op.name, ()):
            tensors[extra.output] = extra.problem.out_shape
            result.append(extra)
        result.append(replace(op, when=(*op.when, option[op.layer])) if op.layer in option else op)
    return replace(network, ops=tuple(result), tensors=tensors, groups=(*network.groups, *groups))


def _siblings(network: Network) -> Iterator[list[Op]]:
    """Lists of two or more convolutions that may be one."""
    found: dict[tuple, dict[str, list[Op]]] = {}
    for op in network.ops:
        p = op.problem
        if isinstance(p, ConvProblem) and op.layer and not p.residual and not p.pool and p.groups == p.d2s == 1:
            act = PRELU if p.act.name in SLOPES else p.act
            alike = replace(p, k=1, bias=False, sparse24=False, act_first=False, act=act)
            found.setdefault((op.inputs[0], alike), {}).setdefault(op.layer, []).append(op)
    for layers in found.values():
        ops = [alternatives[0] for alternatives in layers.values() if len(alternatives) == 1]
        if len(ops) > 1 and all(op.problem.k % VECTOR == 0 for op in ops[:-1]):
            yield ops


def _slope(op: Op) -> np.ndarray:
    """The activation as PRelu's slope per channel."""
    act = op.problem.act
    slope = op.weights["slope"] if act == PRELU else SLOPES[act.name](*act.params)
    return np.broadcast_to(np.asarray(slope, np.float32), op.problem.k)


def _merged(ops: list[Op], literal: tuple[str, str]) -> tuple[Op, ...]:
    """The one convolution, and a part of its output for each."""
    problems = [op.problem for op in ops]
    total = sum(p.k for p in problems)
    whole = replace(problems[0], k=total, bias=any(p.bias for p in problems), sparse24=all(p.sparse24 for p in problems))
    weights = {"w": np.concatenate([op.weights["w"] for op in ops])}
    if len({p.act for p in problems}) > 1 or whole.act == PRELU:
        whole = replace(whole, act=PRELU)
        weights["slope"] = np.concatenate([_slope(op) for op in ops])
    if whole.bias:
        weights["b"] = np.concatenate([op.weights.get("b", np.zeros(op.problem.k, np.float32)) for op in ops])
    name, y = " || ".join(op.name for op in ops), " || ".join(op.output for op in ops)
    layers = tuple(op.layer for op in ops)
    nodes = tuple(n for op in ops for n in op.nodes)
    merged = [Op(name, whole, ops[0].inputs, y, weights, nodes, (literal,), " || ".join(layers), layers)]
    first = 0
    for op, p in zip(ops, problems, strict=True):
        n, _, h, w = whole.out_shape
        part = MoveProblem(n, total, h, w, "window", (p.k, h, w), (first, 0, 0))
        merged.append(Op(f"{op.name} out of {name}", part, (y,), op.output, {}, (), (*op.when, literal)))
        first += p.k
    return tuple(merged)
