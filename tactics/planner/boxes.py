"""Large tables whose cells are mostly NEVER: finds a few boxes that contain all other cells, and stores only these boxes.

A tensor is absent under the options that do not make it. With three options, of which each makes two tensors, four of the six
tensors are absent in any possible cell: with nine formats each, 3 * 81 of a million cells are possible. `Supports` knows which
states of two variables go together if one table has both variables, or an eliminated variable connected them.

An example: variable 0 picks one of two options, variables 1 and 2 are in their state 0, absent, where the option is not theirs.

>>> mine, others = (np.array([[n, m, m], [m, n, n]]) for n, m in ((NEVER, 0), (0, NEVER)))
>>> supports = Supports([2, 3, 3], [((0, 1), mine), ((0, 2), others)])
>>> for box in supports.boxes(0, (0, 1, 2), small=4):
...     print({v: states.tolist() for v, states in box.items()})
{0: [1], 1: [0], 2: [1, 2]}
{0: [0], 1: [1, 2], 2: [0]}
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tactics.planner.factors import NEVER, Factor
from tactics.planner.grouping import grouped

WORTH = 0.75  # the largest part of a box's cells that a split may leave
MOST = 16  # boxes of a table, or a few more: each pair of boxes of two tables costs work

Box = Mapping[int, np.ndarray]  # variable -> states


@dataclass(frozen=True, slots=True)
class Parts:
    """A table of this `shape`, stored as boxes; every cell outside of all boxes is NEVER.

    A box is (places, cells): `places[axis][state]` is the index of a state along that axis of `cells`, or -1 for a state that
    is not in the box. Where boxes overlap, the least cell counts. A table of 3 x 3 whose only possible cell is [1, 2] = 7 is
    one box: ([-1, 0, -1], [-1, -1, 0]), [[7]].
    """

    shape: tuple[int, ...]
    boxes: tuple[tuple[tuple[np.ndarray, ...], np.ndarray], ...]

    def cells(self, at: Sequence[np.ndarray]) -> np.ndarray:
        """Returns the cells at all combinations of these states: `at[axis]` lists the states of an axis."""
        found = np.full([len(states) for states in at], NEVER)
        for places, table in self.boxes:
            into, source = list[np.ndarray](), list[np.ndarray]()
            for place, states in zip(places, at, strict=True):
                inside = place[states]
                into.append(np.flatnonzero(inside >= 0))
                if not len(into[-1]):
                    break
                source.append(inside[into[-1]])
            else:
                here = np.ix_(*into)
                found[here] = np.minimum(found[here], table[np.ix_(*source)])
        return found

    def __getitem__(self, index: tuple[int | slice, ...]) -> np.ndarray:
        at = [np.atleast_1d(np.arange(n)[i]) for n, i in zip(self.shape, index, strict=True)]
        return self.cells(at).reshape([len(s) for s, i in zip(at, index, strict=True) if isinstance(i, slice)])

    def __array__(self, dtype: type | None = None, copy: bool | None = None) -> np.ndarray:
        return self.cells(list(map(np.arange, self.shape))).astype(dtype or np.int64, copy=False)


Table = np.ndarray | Parts


def within(scope: Sequence[int], table: Table, box: Box) -> Factor:
    """Returns the table's cells in a box, as a factor over `scope`."""
    at = [box[v] for v in scope]
    if isinstance(table, Parts):
        return tuple(scope), table.cells(at)
    return tuple(scope), table if table.shape == tuple(map(len, at)) else table[np.ix_(*at)]


def joined(sizes: Sequence[int], scope: Sequence[int], found: Sequence[tuple[Box, np.ndarray]], dense: int) -> Table:
    """Joins (box, its cells) pairs to one table over `scope`: an array if it has at most `dense` cells, else Parts."""
    shape = tuple(sizes[v] for v in scope)
    if len(found) == 1 and found[0][1].shape == shape:
        return found[0][1]
    boxes = []
    for box, table in found:
        places = tuple(np.full(n, -1) for n in shape)
        for place, v in zip(places, scope, strict=True):
            place[box[v]] = np.arange(len(box[v]))
        boxes.append((places, table))
    parts = Parts(shape, tuple(boxes))
    return np.asarray(parts) if math.prod(shape) <= dense or not shape else parts


def count(box: Box) -> int:
    """Returns the number of cells in a box."""
    return math.prod(map(len, box.values()))


class Supports:
    """Tells which states of two variables may go together while the variables 0, 1, ... are eliminated in this order."""

    def __init__(self, sizes: Sequence[int], factors: Iterable[Factor]):
        self._sizes, self._done = sizes, 0
        self._near: list[dict[int, np.ndarray]] = [{} for _ in sizes]  # [u][v]: bool [state of u, state of v]
        for scope, table in factors:
            finite = table < NEVER
            for i, j in itertools.combinations(range(len(scope)), 2):
                others = tuple(k for k in range(len(scope)) if k not in (i, j))
                self._add(scope[i], scope[j], np.asarray(finite.any(axis=others)))

    def _add(self, u: int, v: int, both: np.ndarray) -> None:
        """Adds the relation `both` [state of u, state of v]: true where the two states are possible together. A relation that
        is true everywhere is not kept.
        """
        if not both.all():
            if v in self._near[u]:
                both = np.logical_and(both, self._near[u][v])
            self._near[u][v], self._near[v][u] = both, both.T

    def boxes(self, eliminated: int, scope: Sequence[int], small: int) -> list[Box]:
        """Returns boxes outside which the sum of all tables over `scope` is NEVER, after elimination of the variables below
        `eliminated`.

        Boxes of at most `small` cells are not split.
        """
        for gone in range(self._done, eliminated):
            left = [(v, both) for v, both in self._near[gone].items() if v > gone]
            for (u, mine), (v, others) in itertools.combinations(left, 2):
                self._add(u, v, mine.T @ others)
        self._done = max(self._done, eliminated)
        found, todo = list[Box](), [{v: np.arange(self._sizes[v]) for v in scope}]
        while todo:
            todo.sort(key=count)
            box = todo.pop()
            few = len(found) + len(todo) < MOST and count(box) > small
            parts = self._split(box) if few else None
            if parts is None:
                found.append(box)
            else:
                todo += parts
        return found

    def _split(self, box: dict[int, np.ndarray]) -> list[dict[int, np.ndarray]] | None:
        """Splits the box by the states of the variable whose split leaves the fewest cells; returns None if more than the share
        WORTH of the cells would be left.
        """
        whole = count(box)
        left, best = WORTH * whole, None
        for v in (v for v, states in box.items() if len(states) <= MOST):
            both = {u: able[np.ix_(box[v], box[u])] for u, able in self._near[v].items() if u in box}
            shares = [able.sum(1) / able.shape[1] for able in both.values()]
            cells = whole / len(box[v]) * np.prod(shares, axis=0).sum() if shares else whole
            if cells < left:
                left, best = cells, (v, both)
        return None if best is None else list(_by_state(box, *best))


def _by_state(box: Box, v: int, both: Mapping[int, np.ndarray]) -> Iterable[dict[int, np.ndarray]]:
    """Yields one box for each set of states of variable v that go with the same states of all other variables."""
    alike = grouped((tuple(able[state].tobytes() for able in both.values()), state) for state in range(len(box[v])))
    for states in alike.values():
        part = {**box, v: box[v][states], **{u: box[u][able[states[0]]] for u, able in both.items()}}
        if count(part):
            yield part
