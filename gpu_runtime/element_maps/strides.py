"""Elements followed through ops that only move them, back to where they come from or on to where they go.

An index array says of each element of something (four indices) its number in a tensor, counted row-major.
"""

from collections.abc import Callable, Iterator
from math import prod

import numpy as np

from gpu_runtime.network import Network, Op
from tactics.problems.gather import GatherProblem, ViewProblem
from tactics.problems.problem import MoveProblem
from tactics.problems.protocol import Problem

INDEX = np.int32
MOST_ELEMENTS = 1 << 26  # of a tensor whose elements are followed: so many numbers are held for it
MOVES = (ViewProblem, GatherProblem, MoveProblem)
Passed = tuple[Op[Problem], ...]
Fits = Callable[[str, np.ndarray], bool]  # whether elements of a tensor lie as is wanted


def backwards(network: Network, tensor: str, index: np.ndarray) -> Iterator[tuple[str, np.ndarray, Passed]]:
    """(a tensor that these elements are in as well, where, the ops between): one after the other, as far as they only move."""
    passed: Passed = ()
    while (op := network.producer(tensor)) is not None and (found := sources(op.problem, index)) is not None:
        tensor, index, passed = op.inputs[0], found, (*passed, op)
        yield tensor, index, passed


def farthest(network: Network, tensor: str, index: np.ndarray) -> tuple[str, np.ndarray, Passed]:
    """The last that `backwards` gives, or the tensor itself."""
    *_, last = ((tensor, index, ()), *backwards(network, tensor, index))
    return last


def forwards(network: Network, tensor: str, index: np.ndarray, fits: Fits) -> tuple[str, np.ndarray, list[Op[Problem]]]:
    """(the last tensor that these elements, all of `tensor`, are brought to, where, the ops between) of those in which they
    lie as they `fits`: as long as one op alone reads them and leaves none out."""
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
    """The numbers in its input of those elements of an op's output; None where one of them has none, and for an op that
    computes."""
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
