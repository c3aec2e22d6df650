"""Follows elements through ops that only move them, backwards to their source or forwards to their destination.

An index array gives, for each element of an array with four indices, its number in a tensor, counted row-major.
"""

from collections.abc import Callable, Iterator
from math import prod

import numpy as np

from gpu_runtime.network import Network, Op
from tactics.problems.gather import GatherProblem, ViewProblem
from tactics.problems.problem import MoveProblem
from tactics.problems.protocol import Problem

INDEX = np.int32
MOST_ELEMENTS = 1 << 26  # limit of a tensor whose elements are followed: as many numbers are stored
MOVES = (ViewProblem, GatherProblem, MoveProblem)
Passed = tuple[Op[Problem], ...]
Fits = Callable[[str, np.ndarray], bool]  # (tensor, elements) -> whether their layout is acceptable


def backwards(network: Network, tensor: str, index: np.ndarray) -> Iterator[tuple[str, np.ndarray, Passed]]:
    """Yields (a tensor that contains these elements too, their numbers in it, the ops between), one after the other, while ops
    only move.
    """
    passed: Passed = ()
    while (op := network.producer(tensor)) is not None and (found := sources(op.problem, index)) is not None:
        tensor, index, passed = op.inputs[0], found, (*passed, op)
        yield tensor, index, passed


def farthest(network: Network, tensor: str, index: np.ndarray) -> tuple[str, np.ndarray, Passed]:
    """Returns the last result of `backwards`, or the tensor itself."""
    *_, last = ((tensor, index, ()), *backwards(network, tensor, index))
    return last


def forwards(network: Network, tensor: str, index: np.ndarray, fits: Fits) -> tuple[str, np.ndarray, list[Op[Problem]]]:
    """Returns (the last tensor that these elements, all of `tensor`, are moved to where they `fits`, their numbers there, the
    ops between).

    Follows while the elements have one reader that keeps all of them.
    """
    best, passed = (tensor, index, list[Op[Problem]]()), list[Op[Problem]]()
    while (op := network.only_reader(tensor)) is not None and network.producer(op.output) is op and len(op.inputs) == 1:
        size = prod(op.problem.out_shape)
        source = sources(op.problem, np.arange(size, dtype=INDEX)) if size == index.size else None
        if source is None or not (np.bincount(source, minlength=size) == 1).all():
            break
        index, tensor = np.argsort(source)[index], op.output
        passed.append(op)
        if fits(tensor, index):
            best = tensor, index, [*passed]
    return best


def sources(problem: Problem, at: np.ndarray) -> np.ndarray | None:
    """Returns, for the elements with flat indices `at` of the output of an op that moves elements, their flat indices in its
    input; None if one lies outside of the input, or the op computes."""
    if isinstance(problem, ViewProblem):
        return at
    if not isinstance(problem, (GatherProblem, MoveProblem)):
        return None
    (shape,), where = problem.in_shapes, tuple(np.unravel_index(at, problem.out_shape))
    if isinstance(problem, MoveProblem):
        where = where[0], *problem.source(*where[1:])
    else:
        axes = [where[0]] * 4
        for a, table, i in zip(problem.perm, problem.index, where, strict=True):
            axes[a] = np.asarray(table)[i] if table else i
        where = tuple(axes)
    inside = all(np.min(i) >= 0 and np.max(i) < size for i, size in zip(where, shape, strict=True))
    return np.ravel_multi_index(where, shape).astype(INDEX) if inside else None


def fitted(index: np.ndarray) -> tuple[int, tuple[int, int, int, int]] | None:
    """Returns (start, steps) of a four-dimensional index array that equals start + the sum of index * step; else None."""
    start = int(index[0, 0, 0, 0])
    seconds = (np.moveaxis(index, axis, 0)[:2, 0, 0, 0] for axis in range(4))  # of an axis of one element the first again
    steps = [int(elements[-1]) - start for elements in seconds]
    last = start + sum((d - 1) * s for d, s in zip(index.shape, steps, strict=True))
    if min(steps) < 0 or index[-1, -1, -1, -1] != last:  # most misfits show here at once
        return None
    n, c, h, w = np.ix_(*(np.arange(d) * s for d, s in zip(index.shape, steps, strict=True)))
    line = start + n + c + h + w
    return (start, (steps[0], steps[1], steps[2], steps[3])) if np.array_equal(line, index) else None
