"""Makes Concats of Concats, and of parts of one tensor, share one memory. No option is needed: fewer tensors are joined.

torchvision's DenseNet-121 joins all earlier outputs of a block anew for each layer, (a, b), (a, b, c), (a, b, c, d): as
prefixes of one memory they take 126 launches, else 719 and nearly twice the time (predicted).
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from gpu_runtime.network import Network, Options, computes
from tactics.problems.problem import ConcatProblem, MoveProblem

Parts = Mapping[str, tuple[str, int, int, int]]  # part -> (tensor, first channel, end channel, channels of the tensor)
Joined = Mapping[str, Mapping[tuple[str, ...], str]]  # first input of a Concat -> {all of its inputs: its output}


def share(network: Network) -> Network:
    """Returns the network in which a Concat that contains the inputs of another one reads that one's output instead.

    A run of inputs that an earlier Concat joins is replaced by its output (the blocks of a DenseNet become prefixes of one
    memory), and a run of all parts of one tensor, in order, by that tensor. Parts without readers are dropped.
    """
    parts: dict[str, tuple[str, int, int, int]] = {}
    joined: dict[str, dict[tuple[str, ...], str]] = {}
    options = Options(network)
    for op in network.ops:
        if op.when:
            continue
        if computes(op, MoveProblem) and op.problem.is_part:
            p = op.problem
            parts[op.output] = op.inputs[0], p.start[0], p.start[0] + p.out[0], p.c
        if computes(op, ConcatProblem) and op.problem.axis == 1:
            inputs, sizes = _shortest(op.inputs, op.problem.sizes, joined, parts)
            for run in (op.inputs, inputs):
                joined.setdefault(run[0], {}).setdefault(run, op.output)
            if inputs != op.inputs:
                options.instead(op, replace(op, inputs=inputs, problem=replace(op.problem, sizes=sizes)))
    return options.network()


def _shortest(
    inputs: tuple[str, ...], sizes: tuple[int, ...], joined: Joined, parts: Parts
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Returns (the inputs of a Concat after all replacements, their sizes); the longest run is replaced first, of equal ones
    the first.
    """
    while runs := [*_runs(inputs, joined, parts)]:
        length, at, whole = max(runs, key=lambda run: (run[0], -run[1]))
        sizes = (*sizes[:at], sum(sizes[at : at + length]), *sizes[at + length :])
        inputs = (*inputs[:at], whole, *inputs[at + length :])
    return inputs, sizes


def _runs(inputs: tuple[str, ...], joined: Joined, parts: Parts) -> Iterator[tuple[int, int, str]]:
    """Yields (length, position, tensor) of each run of at least two inputs that together are one tensor."""
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
