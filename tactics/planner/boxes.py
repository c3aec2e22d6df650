"""Large tables that are NEVER in most cells: the boxes that hold the others, and tables that keep these boxes alone.

A tensor that an option does not make is absent. So of six tensors, two of each of three options, four are absent in any cell
that is possible: with nine formats each, 3 * 81 of a million. `Supports` knows which states of two variables go together where
these stand in one table, or a variable that was eliminated stood between them.

An example: variable 0 picks one of two options, variables 1 and 2 are in their state 0, absent, where it is not theirs.

>>> mine, others = (np.array([[n, m, m], [m, n, n]]) for n, m in ((NEVER, 0), (0, NEVER)))
>>> supports = Supports([2, 3, 3], [((0, 1), mine), ((0, 2), others)])
>>> for box in supports.boxes(0, (0, 1, 2), small=4):
...     print([states.tolist() for states in box])
[[1], [0], [1, 2]]
[[0], [1, 2], [0]]
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tactics.planner.factors import NEVER, Factor

WORTH = 0.75  # of a box's cells: a split is made where no more than these are left

MOST = 16  # boxes of a table, or a few more: with each pair of a box here and one of a table that it needs there is work

Box = tuple[np.ndarray, ...]  # of each axis, the states


def _cells(box: Box) -> int:
    return math.prod(map(len, box))


@dataclass(frozen=True, slots=True)
class Parts:
    """A table that is NEVER outside some boxes. `shape`: of all of it; `boxes`: of each, the place in it of each state of an
    axis (-1: not there), and its cells. Where boxes overlap, the least cell counts."""

    shape: tuple[int, ...]
    boxes: tuple[tuple[Box, np.ndarray], ...]

    @staticmethod
    def of(shape: tuple[int, ...], found: Iterable[tuple[Box, np.ndarray]]) -> "Parts":
        boxes = []
        for box, table in found:
            places = tuple(np.full(n, -1) for n in shape)
            for place, states in zip(places, box, strict=True):
                place[states] = np.arange(len(states))
            boxes.append((places, table))
        return Parts(shape, tuple(boxes))

    def cells(self, box: Box) -> np.ndarray:
        """The cells of a box."""
        found = np.full([len(states) for states in box], NEVER)
        for places, table in self.boxes:
            into, source = list[np.ndarray](), list[np.ndarray]()
            for place, states in zip(places, box, strict=True):
                at = place[states]
                into.append(np.flatnonzero(at >= 0))
                if not len(into[-1]):
                    break
                source.append(at[into[-1]])
            else:
                here = np.ix_(*into)
                found[here] = np.minimum(found[here], table[np.ix_(*source)])
        return found

    def __getitem__(self, index: tuple[int | slice, ...]) -> np.ndarray:
        box = tuple(np.atleast_1d(np.arange(n)[i]) for n, i in zip(self.shape, index, strict=True))
        return self.cells(box).reshape([len(s) for s, i in zip(box, index, strict=True) if isinstance(i, slice)])

    def __array__(self, dtype: type | None = None, copy: bool | None = None) -> np.ndarray:
        return self.cells(tuple(map(np.arange, self.shape))).astype(dtype or np.int64, copy=False)


class Supports:
    """Which states of two variables may go together while one variable after the other is eliminated: 0, 1, ..."""

    def __init__(self, sizes: Sequence[int], factors: Iterable[Factor]):
        self._sizes, self._done = sizes, 0
        self._near: list[dict[int, np.ndarray]] = [{} for _ in sizes]  # a variable, another: [state, state of the other]
        for scope, table in factors:
            finite = table < NEVER
            for i, j in itertools.combinations(range(len(scope)), 2):
                others = tuple(k for k in range(len(scope)) if k not in (i, j))
                self._add(scope[i], scope[j], np.asarray(finite.any(axis=others)))

    def _add(self, u: int, v: int, both: np.ndarray) -> None:
        """`both`: [state of u, state of v]; what rules out nothing is not kept."""
        if not both.all():
            if v in self._near[u]:
                both = np.logical_and(both, self._near[u][v])
            self._near[u][v], self._near[v][u] = both, both.T

    def boxes(self, eliminated: int, scope: Sequence[int], small: int) -> list[Box]:
        """Boxes outside which the sum of all tables over `scope` is NEVER, when the variables below `eliminated` are gone.
        Boxes of at most `small` cells are not split."""
        for gone in range(self._done, eliminated):
            left = [(v, both) for v, both in self._near[gone].items() if v > gone]
            for (u, mine), (v, others) in itertools.combinations(left, 2):
                self._add(u, v, mine.T @ others)
        self._done = max(self._done, eliminated)
        whole = tuple(np.arange(self._sizes[v]) for v in scope)
        found, todo = list[Box](), [whole]
        while todo:
            todo.sort(key=_cells)
            box = todo.pop()
            few = len(found) + len(todo) < MOST and _cells(box) > small
            parts = self._split(scope, box) if few else None
            if parts is None:
                found.append(box)
            else:
                todo += parts
        return found

    def _split(self, scope: Sequence[int], box: Box) -> list[Box] | None:
        """The box by the states of the variable that leaves the fewest cells; None where that is not worth it."""
        whole, axes = _cells(box), {v: k for k, v in enumerate(scope)}
        left, best = WORTH * whole, None
        for v, k in ((v, k) for v, k in axes.items() if len(box[k]) <= MOST):
            both = {axes[u]: able[np.ix_(box[k], box[axes[u]])] for u, able in self._near[v].items() if u in axes}
            shares = [able.sum(1) / able.shape[1] for able in both.values()]
            cells = whole / len(box[k]) * np.prod(shares, axis=0).sum() if shares else whole
            if cells < left:
                left, best = cells, (k, both)
        return None if best is None else list(_by_state(box, *best))


def _by_state(box: Box, axis: int, both: Mapping[int, np.ndarray]) -> Iterable[Box]:
    """The box by the states of an axis, those together that go with the same states of all others."""
    alike: dict[tuple[bytes, ...], list[int]] = {}
    for state in range(len(box[axis])):
        alike.setdefault(tuple(able[state].tobytes() for able in both.values()), []).append(state)
    for states in alike.values():
        part = list(box)
        part[axis] = box[axis][states]
        for k, able in both.items():
            part[k] = box[k][able[states[0]]]
        if all(map(len, part)):
            yield tuple(part)
