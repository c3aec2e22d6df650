"""Concats of Concats, and of parts of one tensor, as one memory. No option: it takes nothing away, fewer tensors are joined."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from gpu_runtime.network import Network
from tactics.problems.problem import ConcatProblem, MoveProblem


def share(network: Network) -> Network:
    """The same network in which Concats that hold others hold them as one piece.

    A run of inputs that is all that an earlier Concat joins is replaced by its output (the blocks of a DenseNet become
    prefixes of one memory), and a run that is all parts of one tensor, in order, by that tensor. Parts that nothing
    reads any more are dropped.
    """
    parts: dict[str, tuple[str, int, int, int]] = {}  # part -> tensor, first channel, end, channels of the tensor
    joined: dict[str, dict[tuple[str, ...], str]] = {}  # first input of a Concat -> all of its inputs -> its output
    result = []
    for op in network.ops:
        p = op.problem
        if isinstance(p, MoveProblem) and p.is_part and not op.when:
            parts[op.output] = op.inputs[0], p.start[0], p.start[0] + p.out[0], p.c
        if isinstance(p, ConcatProblem) and p.axis == 1 and not op.when:
            inputs, sizes = _shortest(op.inputs, p.sizes, joined, parts)
            for run in (op.inputs, inputs):
                joined.setdefault(run[0], {}).setdefault(run, op.output)
            op = replace(op, inputs=inputs, problem=replace(p, sizes=sizes))
        result.append(op)
    read = {t.name for t in network.outputs} | {t for op in result for t in op.inputs}
    ops = tuple(op for op in result if op.output in read or op.output not in parts)
    used = {t.name for t in network.inputs} | {t for op in ops for t in (*op.inputs, op.output)}
    return replace(network, ops=ops, tensors={t: shape for t, shape in network.tensors.items() if t in used})


def _shortest(inputs, sizes, joined, parts) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The pieces of a Concat after all replacements, the longest run first, of equals the first."""
    while runs := [*_runs(inputs, joined, parts)]:
        length, at, whole = max(runs, key=lambda run: (run[0], -run[1]))
        sizes = (*sizes[:at], sum(sizes[at : at + length]), *sizes[at + length :])
        inputs = (*inputs[:at], whole, *inputs[at + length :])
    return inputs, sizes


def _runs(inputs, joined, parts) -> Iterator[tuple[int, int, str]]:
    """(length, position, tensor) of each run of two inputs or more that is all of a tensor."""
    for at, first in enumerate(inputs):
        for run, whole in joined.get(first, {}).items():
            if len(run) > 1 and inputs[at : at + len(run)] == run:
                yield len(run), at, whole
        if first not in parts or parts[first][1]:
            continue
        source, _, end, channels = parts[first]
        for length, t in enumerate(inputs[at + 1 :], 2):
            if t not in parts or parts[t][:2] != (source, end):
                break
            end = parts[t][2]
            if end == channels:
                yield length, at, source
                break
