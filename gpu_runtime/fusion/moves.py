"""Merges equal views and transpositions of one tensor, and windows of windows, into one op each. This pass is the last, since
convolutions look for the moves of their own node before."""

from dataclasses import replace

import numpy as np

from gpu_runtime.network import Network, Op, Options, joined, unique
from tactics.problems.gather import GatherProblem, ViewProblem
from tactics.problems.problem import MoveProblem
from tactics.problems.protocol import Problem


def once(network: Network) -> Network:
    """Merges views and transpositions of one tensor that do the same: their readers then read one tensor, and products of one
    input are recognised."""
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
    """Merges a Slice or Pad with the Slice or Pad that is its only reader, where that is exact."""
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
    """Returns window `b` of window `a` as one window; None where no single window is equal."""
    for size, middle, out, s1, t1, s2, t2 in zip((a.c, a.h, a.w), a.out, b.out, a.start, a.step, b.start, b.step, strict=True):
        j = s2 + t2 * np.arange(out)
        source = s1 + t1 * j
        in_middle, in_x = (j >= 0) & (j < middle), (source >= 0) & (source < size)
        if np.any(in_x & ~in_middle) or (np.any(in_middle & ~in_x) and a.fill != b.fill):
            return None
    c, h, w = (s1 + t1 * s2 for s1, t1, s2 in zip(a.start, a.step, b.start, strict=True))
    step_c, step_h, step_w = (t1 * t2 for t1, t2 in zip(a.step, b.step, strict=True))
    return replace(b, c=a.c, h=a.h, w=a.w, start=(c, h, w), step=(step_c, step_h, step_w))
