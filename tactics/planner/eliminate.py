"""Minimises a sum of small integer tables exactly: takes variables with a few states each, and tables of costs over some of
these variables; returns the best state of every variable. The method is bucket elimination, and HiGHS where its tables would be
too large. `formulation` writes the planner's question in these terms.

An example: variable 0 costs 3 or 5, by its state, variable 1 costs 6 or 1, and 4 more where their states differ. Eliminating
variable 0 leaves a message over variable 1: min(3 + 0, 5 + 4) = 3 for its state 0, min(3 + 4, 5 + 0) = 5 for its state 1.
Added to its own table: 9 or 6, so variable 1 is in state 1, and then variable 0, whose 5 + 0 was the minimum, too:

>>> alone = [((0,), np.array([3, 5])), ((1,), np.array([6, 1]))]
>>> found = minimise([2, 2], [*alone, ((0, 1), np.array([[0, 4], [4, 0]]))])
>>> found.states, found.cost
((1, 1), 6)
"""

import heapq
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tactics.planner import integer_program
from tactics.planner.boxes import Box, Supports, Table, count, joined, within
from tactics.planner.elimination_order import order
from tactics.planner.factors import NEVER, Factor, added, summed
from tactics.planner.substitution import Leaders, leader, substitute

SLICES = 4  # parts into which a large table is cut along its first variable, to be minimised one after the other
SLICED_CELLS = 1 << 16  # tables of more cells than this are minimised in slices
BOXED_CELLS = 1 << 21  # the first table of more cells begins work box by box: finding boxes takes time too
BOX_CELLS = 1 << 15  # a box of at most this many cells is not split
SMALL_CELLS = 4096  # variables whose table is at most this large are eliminated before HiGHS sees the rest


@dataclass(frozen=True, slots=True)
class Solution:
    """The best assignment: `states[v]` is the state of variable v, `cost` the sum; `states` is None if nothing was found.

    No assignment costs less than `bound`; a `cost` of NEVER or more: no assignment is possible. `width`: the number of
    variables in the largest table, less one.
    """

    states: tuple[int, ...] | None
    cost: int
    bound: int
    method: str
    width: int


def minimise(
    sizes: Sequence[int],
    factors: Iterable[Factor],
    *,
    quantum: int = 1,
    max_cells: int = 20_000_000,
    seconds: float | None = 60.0,
) -> Solution | None:
    """Returns the assignment with the least sum; among equal ones the first in a fixed order of variables and states.

    `sizes[v]`: number of states of variable v. All finite cells must be >= 0 and their sum < NEVER. `quantum`: differences
    below one quantum only break ties; elimination honours them, HiGHS ignores them. Elimination builds at most `max_cells`
    cells at once, of a table with at most SLICES times as many. If that does not suffice, HiGHS gets `seconds`, and `bound` may
    stay below `cost`; with `seconds` None the result is None.
    """
    factors = [(tuple(scope), np.asarray(table, np.int64)) for scope, table in factors]
    found = _eliminated(sizes, factors, max_cells)
    if found is None and seconds is not None:
        return _by_program(sizes, factors, quantum, max_cells, seconds)
    return found


def _eliminated(sizes: Sequence[int], factors: Sequence[Factor], max_cells: int) -> Solution | None:
    """Does the work of `minimise` by elimination; returns None if a table would have more cells than SLICES times
    `max_cells`.
    """
    placed, leaders = substitute(factors)
    sequence, width = order(sizes, [scope for scope, _ in placed], max_cells, SLICES)
    if len(sequence) < len(sizes):
        return None
    tree = _up(sizes, placed, leaders, sequence)
    cost = tree.cost
    return Solution(assigned(tree, _ranks(tree, {})) if cost < NEVER else None, cost, cost, "elimination", width)


def core(sizes: Sequence[int], factors: Sequence[Factor], max_cells: int) -> list[int]:
    """Returns the variables that elimination leaves, because their tables would have more than `max_cells` cells."""
    placed, _ = substitute(factors)
    gone = set(order(sizes, [scope for scope, _ in placed], max_cells)[0])
    return [v for v in range(len(sizes)) if v not in gone]


def _by_program(sizes: Sequence[int], factors: Sequence[Factor], quantum: int, max_cells: int, seconds: float) -> Solution:
    """Does the work of `minimise` by HiGHS, after elimination of the variables with small tables."""
    placed, leaders = substitute(factors)
    sequence, width = order(sizes, [scope for scope, _ in placed], min(max_cells, SMALL_CELLS))
    tree = _up(sizes, placed, leaders, sequence)
    some, bound = integer_program.solve(
        tree.sizes, [(scope, np.asarray(t)) for scope, t, _ in tree.buckets[-1]], quantum, seconds
    )
    if some is None:
        return Solution(None, NEVER, bound, "milp", width)
    states = assigned(tree, _ranks(tree, some))
    cost = _total(table[tuple(states[v] for v in scope)] for scope, table in factors)
    return Solution(states, cost, bound, "milp", width)


# ---- the elimination tree


@dataclass(frozen=True, slots=True)
class Tree:
    """The elimination tree. A variable's number in it is its rank: eliminated variables in the order of their elimination, then
    the others; axes of tables follow the ranks.

    `place[v]`: (the rank that stands for variable v, the state of v for each state of that rank, or None if the states are
    equal). `buckets[b]`: the tables that name rank b and no earlier rank, as (scope, table, name). A factor's name is its
    number; `messages` + c is the name of bucket c's message, the minimum of the bucket's sum over rank c. The last bucket holds
    the tables that name no eliminated rank. `home[name]`: the bucket that holds a table. `scopes[b]`: the ranks that the tables
    of bucket b name, b first. `boxes[b]`: boxes that contain all possible cells of the bucket's sum, for a bucket with a large
    sum.

    Only `calibrate` fills these: `rest[b]`, the least cost of all tables that are not part of bucket b's message, over the
    message's ranks; `best[r]`, the state of rank r in the best assignment; `near[r]`, the earlier buckets whose scope names
    rank r; `stands[r]`, the variables for which rank r stands.
    """

    place: list[tuple[int, np.ndarray | None]]
    sizes: list[int]
    buckets: list[list[tuple[tuple[int, ...], Table, int]]]
    home: dict[int, int]
    scopes: list[tuple[int, ...]]
    boxes: dict[int, list[Box]]
    messages: int
    rest: list[tuple[tuple[int, ...], Table]]
    best: list[int]
    near: list[list[int]]
    stands: list[list[int]]

    def ranked(self, scope: Sequence[int], table: np.ndarray) -> Factor:
        """Rewrites a table over variables as one over ranks."""
        for axis, v in enumerate(scope):
            states = self.place[v][1]
            table = table if states is None else table.take(states, axis)
        ranks = [self.place[v][0] for v in scope]
        over = sorted(set(ranks))
        if over == ranks:
            return tuple(over), table
        return tuple(over), np.einsum(table, [over.index(r) for r in ranks], range(len(over)))

    @property
    def cost(self) -> int:
        """The least sum, if all variables are eliminated."""
        return _total(np.asarray(table) for _, table, _ in self.buckets[-1])

    def boxes_of(self, b: int) -> list[Box]:
        """Returns boxes that contain all possible cells of the sum of a bucket's tables."""
        return self.boxes[b] if b in self.boxes else [{v: np.arange(self.sizes[v]) for v in self.scopes[b]}]

    def receiver(self, b: int) -> int:
        """Returns the bucket that holds the message of bucket b."""
        return min((*self.scopes[b][1:], len(self.buckets) - 1))


def calibrate(sizes: Sequence[int], factors: Sequence[Factor], *, max_cells: int = 20_000_000) -> Tree | None:
    """Returns the tree that `replaced` needs, after a pass from its first bucket to the last and one back; None if a table, or
    a box of one, would have more than `max_cells` cells.
    """
    placed, leaders = substitute(factors)
    sequence, _ = order(sizes, [scope for scope, _ in placed], max_cells, SLICES)
    if len(sequence) < len(sizes):
        return None
    made = _up(sizes, placed, leaders, sequence)
    if any(count(box) > max_cells for b in range(len(made.buckets)) for box in made.boxes_of(b)):
        return None
    made.best.extend(_ranks(made, {}))
    made.near.extend([] for _ in sizes)
    for b, scope in enumerate(made.scopes[:-1]):
        for r in scope[1:]:
            made.near[r].append(b)
    made.stands.extend([] for _ in sizes)
    for v, (rank, _) in enumerate(made.place):
        made.stands[rank].append(v)
    made.rest.extend([((), np.array(0))] * len(made.buckets))
    for to in reversed(range(len(made.buckets))):  # a message excludes the other tables of the bucket that receives it
        found: dict[int, list[tuple[Box, np.ndarray]]] = {}
        for box in made.boxes_of(to):
            own = [within(s, t, box) for s, t, name in made.buckets[to] if name < made.messages]
            sent = [(name - made.messages, within(s, t, box)) for s, t, name in made.buckets[to] if name >= made.messages]
            sizes_here = {v: len(states) for v, states in box.items()}
            known = summed(sizes_here, made.scopes[to], [*own, within(*made.rest[to], box)])
            for b, table in _without_each(sizes_here, made.scopes[to], sent, known):
                gone = tuple(k for k, v in enumerate(made.scopes[to]) if v not in made.scopes[b][1:])
                found.setdefault(b, []).append((box, np.minimum(table.min(axis=gone), NEVER)))
        for b, parts in found.items():
            made.rest[b] = made.scopes[b][1:], joined(made.sizes, made.scopes[b][1:], parts, SLICED_CELLS)
    return made


def _without_each(
    sizes: Mapping[int, int], scope: tuple[int, ...], items: list[tuple[int, Factor]], known: np.ndarray
) -> Iterator[tuple[int, np.ndarray]]:
    """Yields (name, the sum over `scope` of `known` and of all other items) for each (name, table) of `items`.

    The items are halved again and again, so that each table is added log2(n) times, not n times. Of items a, b, c, d: c + d is
    added once for a and b, then b for a, and a for b.
    """
    if len(items) <= 1:
        yield from ((name, known) for name, _ in items)
        return
    half = len(items) // 2
    for mine, others in ((items[:half], items[half:]), (items[half:], items[:half])):
        rest = summed(sizes, scope, [(scope, known), *(factor for _, factor in others)])
        yield from _without_each(sizes, scope, mine, np.minimum(rest, NEVER))


def replaced(tree: Tree, swaps: Mapping[int, Factor], below: int = NEVER) -> tuple[dict[int, int], int] | None:
    """Returns the best assignment if these factors, number -> factor over the same variables, replace the tree's.

    The result is (variable -> its state, where that differs from the tree's best assignment; cost), or None if no cost is
    `below` the limit. A cell that was NEVER must stay NEVER. Among equal costs, the states of the tree's best assignment win.
    Only the messages between the replaced factors and the first bucket that all of these reach are computed again; the rest is
    known from the pass back (min-marginals). States are sought from there on, as far as they differ.
    """
    new: dict[int, Table] = {i: tree.ranked(*factor)[1] for i, factor in swaps.items()}
    b, remade = _remade(tree, new, {tree.home[i] for i in swaps})
    found = _climbed(tree, new, b, below)
    if found is None:
        return None
    states, cost = found
    _descended(tree, new, remade, states)
    changed: dict[int, int] = {}
    for rank, state in states.items():
        for v in tree.stands[rank] if state != tree.best[rank] else ():
            by = tree.place[v][1]
            changed[v] = state if by is None else int(by[state])
    return changed, cost


def _remade(tree: Tree, new: dict[int, Table], changed: set[int]) -> tuple[int, set[int]]:
    """Adds to `new` the messages of the `changed` buckets, up to the first bucket that receives all of them; returns (that
    bucket, the buckets before it).
    """
    todo: set[int] = set()
    while len(changed) > 1:
        b = min(changed)
        new[tree.messages + b] = _message(tree, b, new)
        changed = changed - {b} | {tree.receiver(b)}
        todo.add(b)
    return min(changed), todo


def _climbed(tree: Tree, new: Mapping[int, Table], b: int, below: int) -> tuple[dict[int, int], int] | None:
    """Returns (rank -> best state, cost), from bucket b towards the last bucket until no state differs from the tree's best;
    None if the cost is not `below` the limit.
    """
    states: dict[int, int] = {}
    cost = None
    while True:
        found, best = _least_cell(tree, [(s, new.get(name, t)) for s, t, name in tree.buckets[b]] + [tree.rest[b]], b, states)
        cost = found if cost is None else cost
        if cost >= below:
            return None
        states |= best
        if all(states[v] == tree.best[v] for v in tree.scopes[b][1:]):
            return states, cost
        b = tree.receiver(b)


def _least_cell(
    tree: Tree, items: Sequence[tuple[tuple[int, ...], Table]], b: int, states: Mapping[int, int]
) -> tuple[int, dict[int, int]]:
    """Returns (the least sum of a bucket's tables where these ranks have these `states`, the best states of the bucket's other
    ranks). Among equal sums the states of the tree's best assignment win, then the first ones.
    """
    free = [v for v in tree.scopes[b] if v not in states]
    usual = tuple(tree.best[v] for v in free)
    if b not in tree.boxes:
        cut = [(tuple(v for v in s if v not in states), t[tuple(states.get(v, slice(None)) for v in s)]) for s, t in items]
        table = summed(tree.sizes, free, cut)
        return int(table.min()), dict(zip(free, _least(table, usual), strict=True))
    found = [(NEVER, usual)]
    for box in tree.boxes[b]:
        at = {v: own if v not in states else own[own == states[v]] for v, own in box.items()}
        if all(map(len, at.values())):
            table = summed({v: len(own) for v, own in at.items()}, tree.scopes[b], [within(s, t, at) for s, t in items])
            best = np.unravel_index(table.argmin(), table.shape)
            where = {v: int(at[v][k]) for v, k in zip(tree.scopes[b], best, strict=True)}
            found.append((int(table.min()), tuple(where[v] for v in free)))
    at_usual = {v: np.array([states.get(v, tree.best[v])]) for v in tree.scopes[b]}
    found.append((sum(int(within(s, t, at_usual)[1].min()) for s, t in items), usual))
    cost = min(cost for cost, _ in found)
    best_states = usual if found[-1][0] == cost else min(found)[1]
    return min(cost, NEVER), dict(zip(free, best_states, strict=True))


def _descended(tree: Tree, new: Mapping[int, Table], remade: set[int], states: dict[int, int]) -> None:
    """Adds to `states` the best states of the earlier buckets that depend on a state that differs or on a message that was
    computed again.
    """
    heap = [-b for b in remade.union(*(tree.near[v] for v, state in states.items() if state != tree.best[v]))]
    heapq.heapify(heap)
    while heap:
        b = -heapq.heappop(heap)
        if b in states:
            continue
        cut = [
            _column(new.get(name, t), [states.get(v, tree.best[v]) for v in scope[1:]]) for scope, t, name in tree.buckets[b]
        ]
        (states[b],) = _least(added(cut), (tree.best[b],)) if cut else (0,)
        if states[b] != tree.best[b]:
            for near in tree.near[b]:
                heapq.heappush(heap, -near)


def _column(table: Table, states: Sequence[int]) -> np.ndarray:
    """Returns a table's cells along its first variable, with the other variables in these states."""
    found: np.ndarray = table[(slice(None), *states)]  # type: ignore[arg-type]  # numpy's stubs know no such index
    return found


def _least(table: np.ndarray, usual: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the index of a least cell: `usual` if the cell at `usual` is one."""
    if table[usual] == table.min():
        return usual
    return tuple(int(k) for k in np.unravel_index(table.argmin(), table.shape))


def _up(sizes: Sequence[int], factors: Sequence[Factor], leaders: Leaders, sequence: Sequence[int]) -> Tree:
    """Eliminates the variables in sequence: a message, the minimum of all tables that name a variable, replaces these
    tables.
    """
    first = set(sequence)
    by_rank = [*sequence, *(v for v in range(len(sizes)) if v not in first)]
    rank = dict(zip(by_rank, range(len(sizes)), strict=True))
    place = []
    for v in range(len(sizes)):
        last, states = leader(v, leaders) if v in leaders else (v, None)
        place.append((rank[last], states))
    buckets: list[list[tuple[tuple[int, ...], Table, int]]] = [[] for _ in range(len(sequence) + 1)]
    made = Tree(place, [sizes[v] for v in by_rank], buckets, {}, [], {}, len(factors), [], [], [], [])
    ranked, supports = [made.ranked(*factor) for factor in factors], None

    def put(scope: tuple[int, ...], table: Table, name: int) -> None:
        made.home[name] = b = min((*scope, len(sequence)))
        made.buckets[b].append((scope, table, name))

    for i, factor in enumerate(ranked):
        put(*factor, i)
    for b, items in enumerate(made.buckets[:-1]):
        made.scopes.append((b, *sorted({v for scope, *_ in items for v in scope[1:]})))
        cells = math.prod(made.sizes[v] for v in made.scopes[b])
        if cells > BOXED_CELLS:
            supports = supports or Supports(made.sizes, ranked)
        if cells > SLICED_CELLS and supports:
            made.boxes[b] = supports.boxes(b, made.scopes[b], BOX_CELLS)
        if items:  # else no table names the variable
            put(made.scopes[b][1:], _message(made, b, {}), made.messages + b)
    made.scopes.append(tuple(sorted({v for scope, *_ in made.buckets[-1] for v in scope})))
    return made


def _message(tree: Tree, b: int, new: Mapping[int, Table]) -> Table:
    """Returns the least sum of a bucket's tables over its first rank; `new`: name -> the table that replaces the tree's."""
    scope, items = tree.scopes[b], [(s, new.get(name, t)) for s, t, name in tree.buckets[b]]
    if b not in tree.boxes:
        return _least_sum(tree.sizes, scope, [(s, np.asarray(t)) for s, t in items])
    found = []
    for box in tree.boxes[b]:
        sizes = {v: len(states) for v, states in box.items()}
        found.append((box, _least_sum(sizes, scope, [within(s, t, box) for s, t in items])))
    return joined(tree.sizes, scope[1:], found, SLICED_CELLS)


def _least_sum(sizes: Sequence[int] | Mapping[int, int], scope: Sequence[int], items: Sequence[Factor]) -> np.ndarray:
    """Returns the least sum over the first variable of `scope`, which all tables name first; a large sum is built state by
    state.
    """
    if math.prod(sizes[v] for v in scope) <= SLICED_CELLS:
        return np.minimum(summed(sizes, scope, items).min(axis=0), NEVER)
    least = np.full([sizes[v] for v in scope[1:]], NEVER, np.int64)
    for state in range(sizes[scope[0]]):
        np.minimum(least, summed(sizes, scope[1:], [(s[1:], table[state]) for s, table in items]), out=least)
    return least


def _ranks(tree: Tree, known: Mapping[int, int]) -> list[int]:
    """Returns the best state of every rank. `known`: the states of some, including all that are not eliminated."""
    states = dict(known)
    for b in reversed(range(len(tree.buckets) - 1)):
        if b not in states:
            cut: list[np.ndarray] = [_column(t, [states[v] for v in scope[1:]]) for scope, t, _ in tree.buckets[b]]
            states[b] = int(added(cut).argmin()) if cut else 0  # in no table: any state will do
    return [states.get(rank, 0) for rank in range(len(tree.sizes))]


def assigned(tree: Tree, ranks: Sequence[int]) -> tuple[int, ...]:
    """Returns the states of all variables, from the states of the ranks."""
    return tuple(ranks[rank] if by is None else int(by[ranks[rank]]) for rank, by in tree.place)


def _total(cells: Iterable[np.ndarray]) -> int:
    return min(NEVER, sum(int(c) for c in cells))
