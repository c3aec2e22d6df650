"""Follows elements through moves and Concats, back to one tensor that contains all of them."""

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from math import prod

import numpy as np

from gpu_runtime.element_maps.strides import INDEX, MOVES, sources
from gpu_runtime.network import Network, Op, computes
from tactics.problems.gather import GatherProblem
from tactics.problems.problem import ConcatProblem
from tactics.problems.protocol import Problem, Shape4

MOST_ELEMENTS = 1 << 24  # limit of followed elements: of one image, where images do not mix
Ops = Sequence[Op[Problem]]


def commons(network: Network, last: Op[Problem]) -> Iterator[tuple[str, Ops]]:
    """Yields (a tensor that contains all elements of the op's output, and no others, the ops between, last first), nearest
    first.

    Only ops that move elements, or join parts of one size, are passed.
    """
    heap, seen, passed = [(0, last.output)], {last.output}, list[Op[Problem]]()
    while (op := network.producer(heappop(heap)[1])) is not None:
        joins = computes(op, ConcatProblem) and len({*op.problem.sizes}) == 1
        if not (joins or isinstance(op.problem, MOVES)):
            return
        passed.append(op)
        for t in {*op.inputs} - seen:
            seen.add(t)
            heappush(heap, (-network.place.get(t, -1), t))
        if len(heap) == 1 and prod(network.tensors[heap[0][1]]) == prod(last.problem.out_shape):
            yield heap[0][1], tuple(passed)


def followed(shape: Shape4, source: str, passed: Ops) -> tuple[int, np.ndarray | None]:
    """Returns (images, the number of each element of the last op's output among the elements of `source`, of `shape`).

    With images > 1 the numbers are those of one image, as all are moved alike; else images is 1 and the numbers cover all
    images. The numbers are None where an element is a fill, or too many are followed.
    """
    images = shape[0] if all(_keeps_images(op.problem) for op in passed) else 1
    at = {source: np.arange(prod(shape) // images, dtype=INDEX)}
    for op in reversed(passed) if at[source].size <= MOST_ELEMENTS else ():
        if computes(op, ConcatProblem):
            parts = [at[t].reshape(s[0] // images, *s[1:]) for t, s in zip(op.inputs, op.problem.in_shapes, strict=True)]
            at[op.output] = np.concatenate(parts, op.problem.axis).reshape(-1)
        elif (of := sources(op.problem, np.arange(prod(op.problem.out_shape) // images))) is not None:
            at[op.output] = at[op.inputs[0]][of]
        else:
            return images, None
    return images, at.get(passed[0].output)


def _keeps_images(p: Problem) -> bool:
    """Whether each image is moved separately, and all alike."""
    if isinstance(p, GatherProblem):
        return p.perm[0] == 0 and not p.index[0]
    return p.axis > 0 if isinstance(p, ConcatProblem) else p.in_shapes[0][0] == p.out_shape[0]
