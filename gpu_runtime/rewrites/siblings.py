"""Convolutions that read the same tensor in the same way, offered as one: `a || b`, as TensorRT writes it.

One kernel with the output channels of all; what each wrote is then a part of its output, in place where the channels begin at
whole vectors. Where only some are followed by a Relu, the one is followed by a PRelu with a slope per channel, 0 or 1
for the others. Merged or apart is an option of a fusion group: the plan chooses. Such a convolution cannot also take in a
residual, which one part's readers may depend on: an Add that is to go into one of them wants them apart. So no choice of
options ever closes a cycle.

Where some of the siblings are pieces of a Concat, as the 1x1 branch of an inception block is beside the reductions of the
others, these would be copied there. So a third option is offered: the Concat's memory begins (or ends) with the others too,
all that the merged convolution writes lies there, and what the Concat was is a part of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from gpu_runtime.network import Network, Op, readers_of
from tactics.format import Format
from tactics.problems.convolution import Epilogue, with_epilogue
from tactics.problems.pointwise_ops import Activation
from tactics.problems.problem import ConcatProblem, ConvProblem, MoveProblem
from tactics.problems.protocol import Feature

PRELU = Activation("prelu")
SLOPES = {"none": lambda: 1.0, "relu": lambda: 0.0, "leaky_relu": lambda alpha: alpha, "prelu": None}
HWC8 = Format("fp16", "hwc8")
MOST_MERGED = 32  # beyond, several are made: each part's name and options name all, and one product of so many gains no more
VECTOR = 8  # parts begin at multiples of this many channels


def merge(network: Network) -> Network:
    """The network with the alternatives added; `Op.layers` of a merged convolution names the layers in it."""
    option: dict[str, tuple[str, str]] = {}  # layer -> the literal under which it exists by itself
    groups, before, narrow = [], {}, []
    readers, position = readers_of(network), {op.name: i for i, op in enumerate(network.ops)}
    for ops in _siblings(network):
        group, options = f"siblings {' || '.join(op.layer for op in ops)}", ["apart", "merged"]
        option |= {op.layer: ((group, "apart"),) for op in ops}
        concats = {position[reader.name]: reader for op in ops for reader in readers.get(op.output, ())}
        joined = ((op, _order(ops, op)) for _, op in sorted(concats.items()) if op.name not in option)
        concat, order = next(((op, order) for op, order in joined if order), (None, ops))
        if concat is not None:
            options.append(f"around {concat.name}")
            option[concat.name] = (group, "apart"), (group, "merged")
        before[ops[0].name] = merged = _merged(ops, order, tuple((group, o) for o in options[1:]))
        if concat is not None:
            before[concat.name] = _around(merged[0], order, concat, (group, options[-1]))
            narrow.append(before[concat.name][0].output)
        groups.append((group, tuple(options)))
    if not groups:
        return network
    result, tensors = [], dict(network.tensors)
    for op in network.ops:
        for extra in before.get(op.name, ()):
            tensors[extra.output] = extra.problem.out_shape
            result.append(extra)
        result.append(replace(op, when=(*op.when, *option.get(op.layer or op.name, ()))))
    only = network.only | dict.fromkeys(narrow, HWC8)
    return replace(network, ops=tuple(result), tensors=tensors, groups=(*network.groups, *groups), only=only)


def _order(ops: list[Op], concat: Op) -> list[Op]:
    """The siblings, those that `concat` joins next to what else it joins. Empty unless these, some and not all, are its first
    pieces or its last, each once, beside others, and all of it exists in every plan."""
    if not isinstance(concat.problem, ConcatProblem) or concat.problem.axis != 1 or concat.when:
        return []
    made, last = {op.output: op for op in ops}, len(concat.inputs)
    at = [i for i, t in enumerate(concat.inputs) if t in made]
    inside = [concat.inputs[i] for i in at]
    others = [op for op in ops if op.output not in inside]
    if not 0 < len(set(inside)) == len(inside) < last or not others or any(op.when or op.problem.k % VECTOR for op in ops):
        return []
    pieces = [made[t] for t in inside]
    if at == [*range(len(at))]:
        return [*others, *pieces]
    return [*pieces, *others] if at == [*range(last - len(at), last)] else []


def _around(merged: Op, order: list[Op], concat: Op, literal: tuple[str, str]) -> tuple[Op, Op]:
    """The Concat with all of `merged` as one piece, and the part of it which `concat` computes. Both Concats share a name, and
    with it the places of the other pieces: only one of them is ever in a plan."""
    siblings = {op.output for op in order}
    rest = [t for t in concat.inputs if t not in siblings]
    leads = concat.inputs[0] in siblings
    inputs = (merged.output, *rest) if leads else (*rest, merged.output)
    sizes = {**dict(zip(concat.inputs, concat.problem.sizes, strict=True)), merged.output: merged.problem.k}
    problem = replace(concat.problem, sizes=tuple(sizes[t] for t in inputs))
    whole = replace(concat, problem=problem, inputs=inputs, output=f"{concat.output} with {merged.output}", when=(literal,))
    n, c, h, w = problem.out_shape
    kept = concat.problem.out_shape[1]
    part = MoveProblem(n, c, h, w, "window", (kept, h, w), (c - kept if leads else 0, 0, 0))
    return whole, Op(f"{concat.name} out of {whole.output}", part, (whole.output,), concat.output, {}, (), (literal,))


def _siblings(network: Network) -> Iterator[list[Op]]:
    """Lists of two or more convolutions that may be one."""
    found: dict[tuple, dict[str, list[Op]]] = {}
    reads: dict[str, set[str]] = {}
    for op in network.ops:
        reads.setdefault(op.layer, set()).add(next(iter(op.inputs), ""))
    for op in network.ops:
        p = op.problem
        plain = isinstance(p, ConvProblem) and op.layer and not p.needs - {Feature.SCALED_INPUT} and p.groups == 1
        plain = plain and not network.is_single(op.output)  # what is merged is one tensor, of one type
        if plain and len(reads[op.layer]) == 1:  # one whose alternatives read different tensors has choices enough
            end = Epilogue(act=PRELU if p.epilogue.act.name in SLOPES else p.epilogue.act)
            alike = replace(p, k=1, sparse24=False, epilogue=end)
            found.setdefault((op.inputs[0], alike), {}).setdefault(op.layer, []).append(op)
    for layers in found.values():
        alone = [alternatives[0] for alternatives in layers.values() if len(alternatives) == 1]
        for ops in (alone[i : i + MOST_MERGED] for i in range(0, len(alone), MOST_MERGED)):
            if len(ops) > 1 and all(op.problem.k % VECTOR == 0 for op in ops[:-1]):
                yield ops


def _slope(op: Op) -> np.ndarray:
    """The activation as PRelu's slope per channel."""
    act = op.problem.epilogue.act
    slope = op.weights["slope"] if act == PRELU else SLOPES[act.name](*act.params)
    return np.broadcast_to(np.asarray(slope, np.float32), op.problem.k)


def _merged(ops: list[Op], order: list[Op], literals: tuple[tuple[str, str], ...]) -> tuple[Op, ...]:
    """The one convolution, its output channels those of `order`, and a part of its output for each."""
    layers, ops = tuple(op.layer for op in ops), order
    problems = [op.problem for op in ops]
    total = sum(p.k for p in problems)
    bias = any(p.epilogue.bias for p in problems)
    whole = replace(with_epilogue(problems[0], bias=bias), k=total, sparse24=all(p.sparse24 for p in problems))
    weights = {"w": np.concatenate([op.weights["w"] for op in ops])}
    if len({p.epilogue.act for p in problems}) > 1 or whole.epilogue.act == PRELU:
        whole = with_epilogue(whole, act=PRELU)
        weights["slope"] = np.concatenate([_slope(op) for op in ops])
    if bias:
        weights["b"] = np.concatenate([op.weights.get("b", np.zeros(op.problem.k, np.float32)) for op in ops])
    name, y = " || ".join(op.name for op in ops), " || ".join(op.output for op in ops)
    nodes = tuple(n for op in ops for n in op.nodes)
    merged = [Op(name, whole, ops[0].inputs, y, weights, nodes, literals, " || ".join(layers), layers)]
    first = 0
    for op, p in zip(ops, problems, strict=True):
        n, _, h, w = whole.out_shape
        part = MoveProblem(n, total, h, w, "window", (p.k, h, w), (first, 0, 0))
        merged.append(Op(f"{op.name} out of {name}", part, (y,), op.output, {}, (), (*op.when, *literals)))
        first += p.k
    return tuple(merged)
