"""Offers convolutions that read the same tensor in the same way as one: `a || b`, as TensorRT writes it.

One kernel has the output channels of all; each original output is then a part of its output, in place where the channels begin
at whole vectors. Where only some are followed by a Relu, the one is followed by a PRelu with a slope per channel, 0 or 1 for
the others. Merged or separate is an option of a fusion group: the plan chooses. A merged convolution cannot also take in a
residual, which may depend on readers of one of its parts: an Add that goes into one of the convolutions needs them separate. So
no choice of options ever closes a cycle.

Where some of the siblings are pieces of a Concat, such as the 1x1 branch of an inception block beside the reductions of the
others, these would be copied there. So a third option is offered: the Concat's memory begins (or ends) with the others too, the
merged convolution writes all its output there, and the original Concat is a part of this memory.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np

from gpu_runtime.network import APART, Literal, Network, Op, Options, Type, computes
from tactics.problems.convolution import with_epilogue
from tactics.problems.epilogue import Epilogue
from tactics.problems.pointwise_ops import Activation
from tactics.problems.problem import ConcatProblem, ConvProblem, MoveProblem
from tactics.problems.protocol import Feature

PRELU = Activation("prelu")
SLOPES: Mapping[str, Callable[..., float]] = {  # activation -> slope below zero
    "none": lambda: 1.0,
    "relu": lambda: 0.0,
    "leaky_relu": lambda alpha: alpha,
}
HWC8 = Type(layout="hwc8")
MOST_MERGED = 32  # siblings of one merge: each part's name lists all of them, and larger products gain no more
VECTOR = 8  # parts begin at multiples of this many channels
MERGED = "merged"
Conv = Op[ConvProblem]


def merge(network: Network) -> Network:
    """Returns the network with the alternatives added; `Op.layers` of a merged convolution names its layers."""
    options, around = Options(network), set[str]()
    for ops in _siblings(network):
        layers = tuple(op.layer for op in ops)
        group = f"siblings {' || '.join(layers)}"
        concat, order = _concat(network, ops, around)
        names = [MERGED] if concat is None else [MERGED, f"around {concat.name}"]
        options.group(group, APART, *names)
        for op in network.ops:
            if op.layer in layers:
                options.limit(op, group, APART)
        whole, *parts = _merged(order, layers, tuple((group, name) for name in names))
        options.before(ops[0], whole, *parts)
        if concat is not None:
            around.add(concat.name)
            options.limit(concat, group, APART, MERGED)
            joined, part = _around(whole.output, order, concat, (group, names[-1]))
            options.before(concat, joined, part)
            options.types[joined.output] = HWC8
    return options.network()


def _concat(network: Network, ops: list[Conv], used: set[str]) -> tuple[Op[ConcatProblem] | None, list[Conv]]:
    """Returns (the first Concat whose memory may hold all of the siblings, or None; the siblings' order in it, or their present
    order).
    """
    readers = {id(reader) for op in ops for reader in network.readers[op.output]}
    for op in network.ops:
        if id(op) in readers and computes(op, ConcatProblem) and op.name not in used and (order := _order(ops, op)):
            return op, order
    return None, ops


def _order(ops: list[Conv], concat: Op[ConcatProblem]) -> list[Conv]:
    """Orders the siblings so that those that `concat` joins are next to its other inputs.

    Returns [] unless some, but not all, of the siblings are the Concat's first inputs or its last, each once; the Concat has
    other inputs; and no option decides whether it exists.
    """
    if concat.problem.axis != 1 or concat.when:
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


def _around(
    merged: str, order: list[Conv], concat: Op[ConcatProblem], literal: Literal
) -> tuple[Op[ConcatProblem], Op[MoveProblem]]:
    """Makes the Concat with all of `merged` as one piece, and the part of it that equals `concat`.

    Both Concats share a name, and with it the places of the other pieces: only one of them is ever in a plan.
    """
    siblings = {op.output for op in order}
    rest = [t for t in concat.inputs if t not in siblings]
    leads = concat.inputs[0] in siblings
    inputs = (merged, *rest) if leads else (*rest, merged)
    sizes = dict(zip(concat.inputs, concat.problem.sizes, strict=True)) | {merged: sum(op.problem.k for op in order)}
    problem = replace(concat.problem, sizes=tuple(sizes[t] for t in inputs))
    output = f"{concat.output} with {merged}"  # both are FP16: no reader needs them exact
    whole = replace(concat, problem=problem, inputs=inputs, output=output, when=(literal,), exact=False)
    n, c, h, w = problem.out_shape
    kept = concat.problem.out_shape[1]
    part = MoveProblem(n, c, h, w, "window", (kept, h, w), (c - kept if leads else 0, 0, 0))
    return whole, Op(f"{concat.name} out of {whole.output}", part, (whole.output,), concat.output, {}, (), (literal,))


def _siblings(network: Network) -> Iterator[list[Conv]]:
    """Yields lists of two or more convolutions that may be merged."""
    found: dict[tuple[str, ConvProblem], dict[str, list[Conv]]] = {}
    reads: dict[str, set[str]] = {}
    for op in network.ops:
        reads.setdefault(op.layer, set()).add(next(iter(op.inputs), ""))
    for op in network.ops:
        if not computes(op, ConvProblem) or not op.layer or op.problem.needs - {Feature.SCALED_INPUT}:
            continue
        if op.problem.groups > 1 or network.is_fp32(op.output):  # the merged output is one tensor, of one type
            continue
        if len(reads[op.layer]) == 1:  # layers whose alternatives read different tensors are left alone
            act = op.problem.epilogue.act
            end = Epilogue(act=PRELU if act.name in SLOPES else act)
            alike = replace(op.problem, k=1, sparse24=False, epilogue=end)
            found.setdefault((op.inputs[0], alike), {}).setdefault(op.layer, []).append(op)
    for layers in found.values():
        alone = [alternatives[0] for alternatives in layers.values() if len(alternatives) == 1]
        for ops in (alone[i : i + MOST_MERGED] for i in range(0, len(alone), MOST_MERGED)):
            if len(ops) > 1 and all(op.problem.k % VECTOR == 0 for op in ops[:-1]):
                yield ops


def stacked(ops: Sequence[Conv], kernels: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the weights of one convolution: the kernels stacked, and the biases too if one of the convolutions has a bias."""
    weights = {"w": np.concatenate(kernels)}
    if any(op.problem.epilogue.bias for op in ops):
        weights["b"] = np.concatenate([op.weights.get("b", np.zeros(op.problem.k, np.float32)) for op in ops])
    return weights


def _slope(op: Conv) -> np.ndarray:
    """Returns the activation as PRelu's slope per channel, [K]."""
    act = op.problem.epilogue.act
    slope = op.weights["slope"] if act == PRELU else SLOPES[act.name](*act.params)
    return np.broadcast_to(np.asarray(slope, np.float32), op.problem.k)


def _merged(ops: list[Conv], layers: tuple[str, ...], literals: tuple[Literal, ...]) -> tuple[Conv | Op[MoveProblem], ...]:
    """Returns the one convolution with the output channels of all `ops`, then the op that takes each original output from its
    output; `layers`: the layers in the order of the channels.
    """
    problems = [op.problem for op in ops]
    ends = [0, *accumulate(p.k for p in problems)]
    bias = any(p.epilogue.bias for p in problems)
    whole = replace(with_epilogue(problems[0], bias=bias), k=ends[-1], sparse24=all(p.sparse24 for p in problems))
    weights = stacked(ops, [op.weights["w"] for op in ops])
    if len({p.epilogue.act for p in problems}) > 1 or whole.epilogue.act == PRELU:
        whole = with_epilogue(whole, act=PRELU)
        weights["slope"] = np.concatenate([_slope(op) for op in ops])
    name, y = " || ".join(op.name for op in ops), " || ".join(op.output for op in ops)
    nodes = tuple(n for op in ops for n in op.nodes)
    n, k, h, w = whole.out_shape
    parts = []
    for op, first in zip(ops, ends, strict=False):
        part = MoveProblem(n, k, h, w, "window", (op.problem.k, h, w), (first, 0, 0))
        parts.append(Op(f"{op.name} out of {name}", part, (y,), op.output, {}, (), (*op.when, *literals)))
    return Op(name, whole, ops[0].inputs, y, weights, nodes, literals, " || ".join(layers), layers), *parts
