"""Offers convolutions of channel slices of one tensor, whose results are joined again, as one convolution instead of as many
launches.

Equal convolutions (a grouped one, written as many) become one with as many groups. Depthwise ones become one whose kernel is as
large as the largest, with zeros around the others (MixNet's kernels of several sizes). Then neither the slices nor their
results are tensors. A sum behind the join may become the residual. Separate or as one is a choice of the plan, because zeros
are multiplied too.

Example: x has 8 channels, a = conv(x[:, :4]), b = conv(x[:, 4:]), y = concat(a, b). If both convolutions have equal sizes, y is
one convolution of x with two groups.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from gpu_runtime.network import ONE, Network, Op, Options, adds_tensors, computes, joined
from gpu_runtime.rewrites import squeeze_excite
from gpu_runtime.rewrites.siblings import stacked
from tactics.problems.convolution import with_epilogue
from tactics.problems.pointwise_ops import ACTIVATIONS, NONE, Activation
from tactics.problems.problem import ConcatProblem, ConvProblem, MoveProblem, PointwiseProblem

ADDED = "one, with the sum"
Conv = Op[ConvProblem]


def offer(network: Network) -> Network:
    """Returns the network with the alternatives added, also with a gate in front; `Op.layers` of the new ops names their
    layers.
    """
    options = Options(network)
    for concat in network.ops:
        if not computes(concat, ConcatProblem) or (sliced := _sliced_convs(network, concat)) is None:
            continue
        parts, convs = sliced
        if (problem := _grouped(convs) or _depthwise(convs)) is None:
            continue
        group, one = f"pieces {' || '.join(op.layer for op in convs)}", _one(parts, convs, concat, problem)
        options.either(group, (*parts, *convs, concat), [(concat, one)])
        if (total := _sum(network, concat)) is not None and (added := _added(one, concat, total)) is not None:
            options.either(group, [total], [(total, added)], ADDED)
            options.limit(total, group, ONE)
    return squeeze_excite.gates(options.network(), decided=True)


def _sliced_convs(network: Network, concat: Op[ConcatProblem]) -> tuple[list[Op[MoveProblem]], list[Conv]] | None:
    """Returns (slices, convolutions): the convolutions that a Concat joins and the slice that each reads, if these are all
    slices of one tensor, in order, and nothing else reads slices or results; else None.
    """
    if concat.problem.axis != 1 or concat.when or len(set(concat.inputs)) < max(2, len(concat.inputs)):
        return None
    parts: list[Op[MoveProblem]] = []
    convs: list[Conv] = []
    first = 0
    for t in concat.inputs:
        conv = network.alone(t)
        ops = network.row(conv, MoveProblem, ConvProblem) if conv is not None and conv.layer else ()
        if not ops or ops[1].problem.needs or not ops[0].problem.is_part:
            return None
        if ops[0].problem.start[0] != first or (parts and ops[0].inputs != parts[0].inputs):
            return None
        first += ops[0].problem.out[0]
        parts.append(ops[0])
        convs.append(ops[1])
    source = parts[0].inputs[0]
    whole = first == parts[0].problem.c and not network.is_fp32(source) and not network.is_fp32(concat.output)
    return (parts, convs) if whole else None


def _grouped(convs: Sequence[Conv]) -> ConvProblem | None:
    """Returns one convolution whose groups are these equal convolutions; None if they differ."""
    p, count = convs[0].problem, len(convs)
    if len({replace(with_epilogue(op.problem, bias=True), sparse24=False) for op in convs}) > 1:
        return None
    return _whole(convs, replace(p, c=count * p.c, k=count * p.k, groups=count * p.groups))


def _depthwise(convs: Sequence[Conv]) -> ConvProblem | None:
    """Returns one depthwise convolution whose kernel contains the kernels of all these depthwise ones, which may differ in size
    and pads; None if that is impossible.
    """
    ps = [op.problem for op in convs]
    alike = {(p.n, p.h, p.w, p.stride, p.p, p.q, p.epilogue.act, p.c == p.k == p.groups and p.dilation == (1, 1)) for p in ps}
    if len(alike) > 1 or not next(iter(alike))[-1]:
        return None
    p, (top, left) = ps[0], (max(p.pad[i] for p in ps) for i in (0, 1))
    r, s = max(top - p.pad[0] + p.r for p in ps), max(left - p.pad[1] + p.s for p in ps)
    bottom, right = (
        (o - 1) * step + taps - size
        for o, step, taps, size in ((p.p, p.stride[0], r, p.h + top), (p.q, p.stride[1], s, p.w + left))
    )
    channels = sum(p.c for p in ps)
    pad = top, left, max(0, bottom), max(0, right)
    found = replace(p, c=channels, k=channels, groups=channels, r=r, s=s, pad=pad)
    return _whole(convs, found) if (found.p, found.q) == (p.p, p.q) else None


def _whole(convs: Sequence[Conv], problem: ConvProblem) -> ConvProblem:
    bias, sparse = any(op.problem.epilogue.bias for op in convs), all(op.problem.sparse24 for op in convs)
    return replace(with_epilogue(problem, bias=bias), sparse24=sparse)


def _one(parts: Sequence[Op[MoveProblem]], convs: Sequence[Conv], concat: Op[ConcatProblem], problem: ConvProblem) -> Conv:
    weights = stacked(convs, [_placed(op, problem) for op in convs])
    if "slope" in convs[0].weights:
        weights["slope"] = np.concatenate([op.weights["slope"] for op in convs])
    whole, layers = joined(*parts, *convs, concat), tuple(op.layer for op in convs)
    name, layer = " || ".join(op.name for op in convs), " || ".join(layers)
    return Op(name, problem, parts[0].inputs, concat.output, weights, whole.nodes, (), layer, layers)


def _placed(op: Conv, whole: ConvProblem) -> np.ndarray:
    """Returns the weights of `op`, padded with zeros to their position in the kernel of `whole`."""
    p, w = op.problem, op.weights["w"]
    top, left = whole.pad[0] - p.pad[0], whole.pad[1] - p.pad[1]
    return np.pad(w, ((0, 0), (0, 0), (top, whole.r - p.r - top), (left, whole.s - p.s - left)))


def _sum(network: Network, concat: Op[ConcatProblem]) -> Op[PointwiseProblem] | None:
    """Returns the op that adds a whole tensor to the Concat's output and is its only reader; else None."""
    total = network.only_reader(concat.output)
    if not computes(total, PointwiseProblem) or total.when or any(map(network.is_fp32, (*total.inputs, total.output))):
        return None
    return total if adds_tensors(total, first=True) and total.inputs.count(concat.output) == 1 else None


def _added(one: Conv, concat: Op[ConcatProblem], total: Op[PointwiseProblem]) -> Conv | None:
    """Returns the one convolution with the sum, and the activation that may follow it, in its epilogue; None if that is
    impossible.
    """
    after = [Activation(s.op, s.params) for s in total.problem.stages[1:] if s.op in ACTIVATIONS and s.op != "prelu"]
    before = one.problem.epilogue.act
    if len(after) < len(total.problem.stages) - 1 or len(after) + (before != NONE) > 1:
        return None
    problem = with_epilogue(one.problem, residual=True, act=(after or [before])[0], act_first=before != NONE)
    (residual,) = (t for t in total.inputs if t != concat.output)
    both = joined(one, total)
    return replace(one, name=both.name, problem=problem, inputs=(*one.inputs, residual), output=total.output, nodes=both.nodes)
