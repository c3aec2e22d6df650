"""Views, transpositions and windows that are not needed.

`direct` is the first pass of fusion. `once` and `windows`, one op for equal moves and for windows of windows, are the last,
since convolutions look for the moves of their own node before.
"""

from dataclasses import replace

import numpy as np

from gpu_runtime.network import Network, Op, Options, computes, joined, unique
from tactics.problems.gather import GatherProblem, ViewProblem
from tactics.problems.problem import MoveProblem, PointwiseProblem
from tactics.problems.protocol import Problem


def direct(network: Network) -> Network:
    """Returns the network in which a pointwise op reads another one directly, if the views between them lead back to the same
    shape.

    Ops on tensors of rank 5 run on four merged axes, between views: x [2,3,4,5,6] times o [3,4,1,1] becomes a product over
    [1,2,12,30]. If a second op uses the same four axes, it reads the first one's result there, and both can be one chain.
    """
    ops = [
        replace(op, inputs=tuple(_unviewed(network, t) for t in op.inputs)) if computes(op, PointwiseProblem) else op
        for op in network.ops
    ]
    return replace(network, ops=tuple(ops)).pruned()


def _unviewed(network: Network, tensor: str) -> str:
    """Returns the result of the pointwise op behind two views, if `tensor` is a view of a view of it in the same shape; else
    `tensor`.
    """
    back = network.producer(tensor)
    there = network.producer(back.inputs[0]) if computes(back, ViewProblem) else None
    source = there.inputs[0] if computes(there, ViewProblem) else tensor
    same = network.tensors[source] == network.tensors[tensor] and computes(network.producer(source), PointwiseProblem)
    return source if same else tensor


def once(network: Network) -> Network:
    """Merges equal views and transpositions of one tensor: their readers then read one tensor, so products of one input are
    recognised.
    """
    same: dict[str, str] = {}
    known: dict[tuple[Problem, tuple[str, ...]], int] = {}
    kept: list[Op[Problem]] = []
    for op in network.ops:
        op = replace(op, inputs=tuple(same.get(t, t) for t in op.inputs)) if same else op
        if isinstance(op.problem, ViewProblem | GatherProblem) and not op.when and op.output not in network.output_names:
            at = known.setdefault((op.problem, op.inputs), len(kept))
            if at < len(kept):
                same[op.output] = kept[at].output
                kept[at] = replace(kept[at], nodes=unique((*kept[at].nodes, *op.nodes)))
                continue
        kept.append(op)
    return replace(network, ops=tuple(kept)).pruned() if same else network


def windows(network: Network) -> Network:
    """Merges a Slice or Pad with the Slice or Pad that is its only reader, if one window computes exactly the same."""
    options, made = Options(network), set[int]()
    for second in network.ops:
        ops = network.row(second, MoveProblem, MoveProblem)
        if not ops or id(ops[0]) in made or any(op.problem.kind != "window" for op in ops):
            continue
        if (both := _composed(*(op.problem for op in ops))) is not None:
            made.add(id(second))
            options.instead(second, joined(*ops, problem=both, inputs=ops[0].inputs))
    return options.network()


def _composed(a: MoveProblem, b: MoveProblem) -> MoveProblem | None:
    """Returns window `b` of the result of window `a` as one window; None if no single window equals it."""
    for size, middle, out, s1, t1, s2, t2 in zip((a.c, a.h, a.w), a.out, b.out, a.start, a.step, b.start, b.step, strict=True):
        j = s2 + t2 * np.arange(out)
        source = s1 + t1 * j
        in_middle, in_x = (j >= 0) & (j < middle), (source >= 0) & (source < size)
        if np.any(in_x & ~in_middle) or (np.any(in_middle & ~in_x) and a.fill != b.fill):
            return None
    c, h, w = (s1 + t1 * s2 for s1, t1, s2 in zip(a.start, a.step, b.start, strict=True))
    step_c, step_h, step_w = (t1 * t2 for t1, t2 in zip(a.step, b.step, strict=True))
    return replace(b, c=a.c, h=a.h, w=a.w, start=(c, h, w), step=(step_c, step_h, step_w))
