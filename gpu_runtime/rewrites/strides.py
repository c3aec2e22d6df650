"""Elements followed through ops that only move them, back to where they come from or on to where they go.

An index array says of each element of something (four indices) its number in a tensor, counted row-major.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from math import prod

import numpy as np

from gpu_runtime.network import Network, Op, computes
from tactics.problems.gather import GatherProblem, ViewProblem
from tactics.problems.problem import MoveProblem
from tactics.problems.protocol import Problem

INDEX = np.int32
MOST_ELEMENTS = 1 << 26  # of a tensor whose elements are followed: so many numbers are held for it
MOVES = (ViewProblem, GatherProblem, MoveProblem)
Passed = tuple[Op[Problem], ...]
Fits = Callable[[str, np.ndarray], bool]  # whether elements of a tensor lie as is wanted


def producer(network: Network, tensor: str) -> Op[Problem] | None:
    """The op that gives a tensor in every plan; None of network inputs, and where it depends on the plan."""
    made = network.producers.get(tensor, ())
    return made[0] if len(made) == 1 and not made[0].when else None


def backwards(network: Network, tensor: str, index: np.ndarray) -> Iterator[tuple[str, np.ndarray, Passed]]:
    """(a tensor that these elements are in as well, where, the ops between): one after the other, as far as they only move."""
    passed: Passed = ()
    while (op := producer(network, tensor)) is not None:
        passed = (*passed, op)
        if not computes(op, ViewProblem):  # which leaves every element its number
            source = _source(op.problem)
            if source is None:
                return
            index = source[index]
            if index.min() < 0:
                return
        tensor = op.inputs[0]
        yield tensor, index, passed


def farthest(network: Network, tensor: str, index: np.ndarray) -> tuple[str, np.ndarray, Passed]:
    """The last that `backwards` gives, or the tensor itself."""
    *_, last = ((tensor, index, ()), *backwards(network, tensor, index))
    return last


def forwards(network: Network, tensor: str, index: np.ndarray, fits: Fits) -> tuple[str, np.ndarray, list[Op[Problem]]]:
    """(the last tensor that these elements, all of `tensor`, are brought to, where, the ops between) of those in which they
    lie as they `fits`: as long as one op alone reads them and leaves none out."""
    best, passed = (tensor, index, list[Op[Problem]]()), list[Op[Problem]]()
    while len(readers := network.readers[tensor]) == 1 and tensor not in network.output_names:
        (op,) = readers
        source = None if op.when or len(op.inputs) != 1 else _source(op.problem)
        if source is None or source.size != index.size or len(network.producers[op.output]) != 1:
            break
        if source.min() < 0 or not (np.bincount(source, minlength=source.size) == 1).all():
            break
        index, tensor = np.argsort(source)[index], op.output
        passed.append(op)
        if fits(tensor, index):
            best = tensor, index, [*passed]
    return best


@lru_cache(maxsize=4)  # queries, keys and values come through the same transposition
def _source(problem: Problem) -> np.ndarray | None:
    """Of each element of an op's output its number in the input, -1 for what is filled; None for an op that computes, or for
    more elements than are followed."""
    if not isinstance(problem, MOVES) or max(map(prod, (*problem.in_shapes, problem.out_shape))) > MOST_ELEMENTS:
        return None
    if isinstance(problem, ViewProblem):
        return np.arange(prod(problem.shape), dtype=INDEX)
    if isinstance(problem, GatherProblem):
        index = np.arange(prod(problem.shape), dtype=INDEX).reshape(problem.shape).transpose(problem.perm)
        for axis, table in enumerate(problem.index):
            if table:
                chosen = np.asarray(table)
                shape = [1] * 4
                shape[axis] = -1
                index = np.where((chosen < 0).reshape(shape), -1, np.take(index, np.maximum(chosen, 0), axis=axis))
        return index.reshape(-1)
    (n, c, h, w), out = problem.in_shapes[0], problem.out_shape
    grid = np.meshgrid(*(np.arange(d) for d in out[1:]), indexing="ij")
    at = problem.source(*grid)
    inside = np.logical_and.reduce([(a >= 0) & (a < d) for a, d in zip(at, (c, h, w), strict=True)])
    one = np.where(inside, (at[0] * h + at[1]) * w + at[2], -1)
    images = np.arange(n).reshape(-1, 1, 1, 1) * (c * h * w)
    return np.where(one < 0, -1, one + images).reshape(-1).astype(INDEX)


def fitted(index: np.ndarray) -> tuple[int, tuple[int, int, int, int]] | None:
    """(start, steps) of an index array of four dimensions that is start + the sum of index * step; else None."""
    start = int(index[0, 0, 0, 0])
    steps = [0, 0, 0, 0]
    for axis in range(4):
        if index.shape[axis] > 1:
            at = [0, 0, 0, 0]
            at[axis] = 1
            steps[axis] = int(index[tuple(at)]) - start
    last = start + sum((d - 1) * s for d, s in zip(index.shape, steps, strict=True))
    if min(steps) < 0 or index[-1, -1, -1, -1] != last:  # as most that are none show at once
        return None
    n, c, h, w = (np.arange(d) * s for d, s in zip(index.shape, steps, strict=True))
    line = start + n[:, None, None, None] + c[:, None, None] + h[:, None] + w
    return (start, (steps[0], steps[1], steps[2], steps[3])) if np.array_equal(line, index) else None
