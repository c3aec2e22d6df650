"""Minimise a sum of small integer tables exactly: variables with a few states and tables over some of them in, the
best state of every variable out. Bucket elimination where its tables stay small; HiGHS on what is left where not.

Knows nothing of networks, formats or kernels; `plan` writes its question in these terms.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

NEVER = 1 << 60  # the cost of an impossible cell
ADDED = 6  # so many cells of at most NEVER, added to one of at most NEVER, still fit int64
MANY_CELLS = 5_000_000  # tables of more cells than this in all: a better order is worth looking for
SMALL_CELLS = 4096  # variables whose table is at most this large are eliminated before HiGHS sees the rest

Factor = tuple[tuple[int, ...], np.ndarray]  # (variables, int64 table with one axis per variable)


@dataclass(frozen=True, slots=True)
class Solution:
    """`states[v]`: the state of variable v, or None: nothing was found. `cost` belongs to it; no assignment costs less
    than `bound`. `cost >= NEVER`: no assignment is possible. `width`: variables in the largest table, less one."""

    states: tuple[int, ...] | None
    cost: int
    bound: int
    method: str
    width: int


@dataclass(frozen=True, slots=True)
class Replaced:
    """The least sum with one table replaced, and states that reach it (None: impossible). `table`: the replacement, and
    `around`: the least sum of everything else, both over the same variables."""

    cost: int
    states: tuple[int, ...] | None
    table: np.ndarray
    around: np.ndarray


def minimise(
    sizes: Sequence[int],
    factors: Iterable[Factor],
    *,
    quantum: int = 1,
    max_cells: int = 20_000_000,
    seconds: float = 60.0,
) -> Solution:
    """The assignment with the least sum, and the first such one in a fixed order of variables and states.

    `sizes[v]`: number of states of variable v. All finite cells must be >= 0 and their sum < NEVER. `quantum`: cost
    below one quantum only breaks ties; elimination honours it and HiGHS ignores it. Tables of more than `max_cells`
    cells are not built: HiGHS then gets `seconds`, and `bound` may stay below `cost`.
    """
    given = [(tuple(scope), np.asarray(table, np.int64)) for scope, table in factors]
    factors, followers, _ = _substitute(sizes, given)
    scopes = [scope for scope, _ in factors]
    sequence, width = order(sizes, scopes, max_cells)
    if len(sequence) == len(sizes):
        tree = _up(sizes, factors, sequence)
        cost = _total(table for _, table, _ in tree.left)
        states = _trace(tree, followers, {}) if cost < NEVER else None
        return Solution(states, cost, cost, "elimination", width)

    sequence, _ = order(sizes, scopes, min(max_cells, SMALL_CELLS))
    tree = _up(sizes, factors, sequence)
    some, bound = _milp(tree.sizes, [(scope, table) for scope, table, _ in tree.left], quantum, seconds)
    if some is None:
        return Solution(None, NEVER, bound, "milp", width)
    states = _trace(tree, followers, some)
    cost = _total(table[tuple(states[v] for v in scope)] for scope, table in given)
    return Solution(states, cost, bound, "milp", width)


def replaced(
    sizes: Sequence[int],
    factors: Iterable[Factor],
    swaps: Sequence[tuple[int, np.ndarray]],
    *,
    max_cells: int = 20_000_000,
) -> list[Replaced] | None:
    """For each (factor number, table): the best assignment with that factor's table replaced by this one, all else as given.

    All answers come from one pass up and one pass down the elimination tree (min-marginals). A replacement must be
    NEVER wherever its original is. None where elimination would need a table of more than `max_cells`.
    """
    factors = [(tuple(scope), np.asarray(table, np.int64)) for scope, table in factors]
    for i, table in swaps:
        if (table[factors[i][1] >= NEVER] < NEVER).any():
            raise ValueError(f"factor {i}: the replacement allows what the factor forbids")
    factors, followers, tables = _substitute(sizes, factors, swaps)
    sequence, _ = order(sizes, [scope for scope, _ in factors], max_cells)
    if len(sequence) < len(sizes):
        return None

    tree = _up(sizes, factors, sequence)
    rest = _down(tree)
    home = {name: b for b, items in enumerate(tree.buckets) for *_, name in items}
    root = list(range(len(sequence)))
    for b in reversed(root):
        root[b] = root[tree.scopes[b][1]] if len(tree.scopes[b]) > 1 else b
    answers = []
    for (i, _), table in zip(swaps, tables, strict=True):
        if i not in home:  # a lone cell
            around = np.array(_total(t for _, t, name in tree.left if name != i))
            known = {}
        else:
            b = home[i]
            scope, table = tree.ranked(factors[i][0], table)
            elsewhere = _total(t for _, t, name in tree.left if name < len(factors) or root[name - len(factors)] != root[b])
            around = np.minimum(_without(tree, rest, b, i, scope) + elsewhere, NEVER)
            known = _upwards(tree, rest, b, i, (scope, table))
        cost = min(NEVER, int((around + table).min()))
        states = _trace(tree, followers, known) if cost < NEVER else None
        answers.append(Replaced(cost, states, table, around))
    return answers


@dataclass(frozen=True, slots=True)
class _Tree:
    """The elimination tree. Its variables are numbered by rank: those of `sequence` in that order, then the others; the axes
    of all tables are in that order too.

    `buckets[b]`: the tables that name variable b and none before it, each (scope, table, name): factors are named by their
    number, the message of bucket c, the minimum over its variable of all it holds, by `messages` + c. `scopes[b]`: the
    variables of them all, b first; the message goes to bucket scopes[b][1]. `left`: what names no variable of `sequence`.
    """

    rank: list[int]  # variable -> its rank
    sizes: list[int]
    buckets: list[list]
    scopes: list[tuple[int, ...]]
    left: list
    messages: int

    def ranked(self, scope, table) -> Factor:
        axes = sorted(range(len(scope)), key=lambda k: self.rank[scope[k]])
        return tuple(self.rank[scope[k]] for k in axes), table.transpose(axes)


def _up(sizes, factors, sequence) -> _Tree:
    """Minimises variable after variable out of the sum: what is left over has the same minimum."""
    first = set(sequence)
    by_rank = [*sequence, *(v for v in range(len(sizes)) if v not in first)]
    rank = [0] * len(sizes)
    for r, v in enumerate(by_rank):
        rank[v] = r
    tree = _Tree(rank, [sizes[v] for v in by_rank], [[] for _ in sequence], [], [], len(factors))

    def put(scope, table, name) -> None:
        inside = scope and scope[0] < len(sequence)
        (tree.buckets[scope[0]] if inside else tree.left).append((scope, table, name))

    for i, factor in enumerate(factors):
        put(*tree.ranked(*factor), i)
    for b, items in enumerate(tree.buckets):
        tree.scopes.append((b, *sorted({v for scope, *_ in items for v in scope[1:]})))
        table = _sum(tree.sizes, tree.scopes[b], [(scope, table) for scope, table, _ in items])
        put(tree.scopes[b][1:], np.minimum(table.min(axis=0), NEVER), len(factors) + b)
    return tree


def _trace(tree: _Tree, followers, known: dict[int, int]) -> tuple[int, ...]:
    """The best state of every variable. `known`: states of some ranks, those not eliminated among them."""
    states = dict(known)
    for b in reversed(range(len(tree.buckets))):
        if b not in states:
            cut = [t[(slice(None), *(states[v] for v in scope[1:]))] for scope, t, _ in tree.buckets[b]]
            states[b] = int(_added(cut).argmin()) if cut else 0
    found = [states.get(r, 0) for r in tree.rank]  # in no table: any state will do
    for v, u, state in reversed(followers):
        found[v] = int(state[found[u]])
    return tuple(found)


def _down(tree: _Tree) -> list[Factor | None]:
    """Per bucket, what all that its message does not know costs at least, over the message's variables."""
    rest: list[Factor | None] = [None] * len(tree.buckets)
    for b in reversed(range(len(rest))):
        over = tree.scopes[b][1:]
        if over:
            rest[b] = over, _without(tree, rest, over[0], tree.messages + b, over)
    return rest


def _without(tree: _Tree, rest, b: int, left_out: int, onto) -> np.ndarray:
    """Everything a bucket knows (its own tables, its children's messages, the rest of the tree) but one item, as the
    minimum over what `onto` does not name."""
    table = _sum(tree.sizes, tree.scopes[b], _known(tree, rest, b, left_out))
    return np.minimum(table.min(axis=tuple(k for k, v in enumerate(tree.scopes[b]) if v not in onto)), NEVER)


def _known(tree: _Tree, rest, b: int, left_out: int) -> list[Factor]:
    items = [(scope, table) for scope, table, name in tree.buckets[b] if name != left_out]
    return items if rest[b] is None else [*items, rest[b]]


def _upwards(tree: _Tree, rest, b: int, left_out: int, instead: Factor) -> dict[int, int]:
    """Best states of all variables from bucket `b` to its root, with `instead` for one of the bucket's tables."""
    known: dict[int, int] = {}
    extra = [instead]
    while True:
        scope = [v for v in tree.scopes[b] if v not in known]
        cut = [
            (tuple(v for v in s if v not in known), t[tuple(known.get(v, slice(None)) for v in s)])
            for s, t in [*_known(tree, rest, b, left_out), *extra]
        ]
        table = _sum(tree.sizes, scope, cut)
        known |= zip(scope, (int(k) for k in np.unravel_index(table.argmin(), table.shape)), strict=True)
        if len(tree.scopes[b]) == 1:
            return known
        left_out, extra, b = tree.messages + b, [], tree.scopes[b][1]


def order(sizes: Sequence[int], scopes: Iterable[tuple[int, ...]], max_cells: int) -> tuple[list[int], int]:
    """Elimination order, and the width: it ends early, with the width of the table refused, before the first table of more than
    `max_cells` cells. Least message next; where that takes MANY_CELLS in all, the cheapest of three orders."""
    scopes = list(scopes)
    found = _order(sizes, scopes, max_cells, _message)
    if found[2] > MANY_CELLS or len(found[0]) < len(sizes):
        others = [_order(sizes, scopes, max_cells, score) for score in (_table, _fill)]
        found = min((found, *others), key=lambda f: (-len(f[0]), f[2]))
    return found[:2]


def _table(sizes, near, v: int) -> int:
    """Cells of the table that eliminating v makes."""
    return sizes[v] * math.prod(sizes[u] for u in near[v])


def _message(sizes, near, v: int) -> int:
    """Cells of the table that is left when v is gone."""
    return math.prod(sizes[u] for u in near[v])


def _fill(sizes, near, v: int) -> int:
    """Pairs of neighbours that eliminating v is the first to bring together, by their states."""
    return sum(sizes[a] * sizes[b] for a, b in itertools.combinations(near[v], 2) if b not in near[a])


def _order(sizes, scopes, max_cells: int, score) -> tuple[list[int], int, int]:
    """(order, width, cells of all its tables): least score next, of variables near the last one scored anew (ties: lowest
    variable)."""
    near: list[set[int]] = [set() for _ in sizes]
    for scope in scopes:
        for v in scope:
            near[v].update(scope)
    for v, around in enumerate(near):
        around.discard(v)
    scores = [score(sizes, near, v) for v in range(len(sizes))]
    heap = [(c, v) for v, c in enumerate(scores)]
    heapq.heapify(heap)
    gone = [False] * len(sizes)
    sequence, width, total = [], 0, 0
    while heap:
        c, v = heapq.heappop(heap)
        if gone[v] or c != scores[v]:
            continue  # an older entry of this variable
        width, cells = max(width, len(near[v])), _table(sizes, near, v)
        if cells > max_cells:
            break
        gone[v] = True
        sequence.append(v)
        total += cells
        for u in near[v]:
            near[u] |= near[v]
            near[u] -= {u, v}
        for u in near[v]:
            scores[u] = score(sizes, near, u)
            heapq.heappush(heap, (scores[u], u))
    return sequence, width, total


def _substitute(sizes, factors: list[Factor], swaps=()) -> tuple[list[Factor], list, list[np.ndarray]]:
    """Where a table leaves variable v one state per state of u (a join of equal formats), write u for v everywhere:
    wide tables of joins fall apart. Returns the tables without such v, per v (v, u, state of v per state of u), and
    the tables of `swaps`, (factor number, table), rewritten as their factors were."""
    factors = list(factors)
    tables = [np.asarray(table, np.int64) for _, table in swaps]
    holds: list[list[int]] = [[] for _ in sizes]
    for i, (scope, _) in enumerate(factors):
        for v in scope:
            holds[v].append(i)
    followers = []
    for i in range(len(factors)):
        while found := _follows(*factors[i]):
            v, u, state = found
            followers.append((v, u, state))
            for j in holds[v]:
                scope, table = factors[j]

                def rewritten(table, scope=scope, state=state, u=u, v=v):
                    table = table.take(state, axis=scope.index(v))
                    return table.diagonal(0, scope.index(v), scope.index(u)) if u in scope else table

                for k, (number, _) in enumerate(swaps):
                    if number == j:
                        tables[k] = rewritten(tables[k])
                if u in scope:
                    factors[j] = (*(w for w in scope if w not in (u, v)), u), rewritten(table)
                else:
                    factors[j] = tuple(u if w == v else w for w in scope), rewritten(table)
                    holds[u].append(j)
    return factors, followers, tables


def _follows(scope, table) -> tuple[int, int, np.ndarray] | None:
    """(v, u, state of v per state of u) for the first v in this table that u determines."""
    finite = table < NEVER
    count = np.count_nonzero(finite)
    for i, j in itertools.permutations(range(len(scope)), 2):
        if table.shape[i] > 1 and count * table.shape[i] <= table.size:  # else u cannot determine v
            both = finite.any(axis=tuple(k for k in range(len(scope)) if k not in (i, j)))
            both = both if i < j else both.T
            if (both.sum(axis=0) <= 1).all():
                return scope[i], scope[j], both.argmax(axis=0)
    return None


def _sum(sizes, scope, factors) -> np.ndarray:
    """The sum of tables, over `scope`, which names their variables in the same order; cells of NEVER or more are impossible."""
    spread = [t.reshape([sizes[v] if v in variables else 1 for v in scope]) for variables, t in factors]
    shape = tuple(sizes[v] for v in scope)
    total = _added(sorted(spread, key=np.size)) if spread else np.zeros(shape, np.int64)
    return total if total.shape == shape else np.broadcast_to(total, shape)


def _added(tables: list[np.ndarray]) -> np.ndarray:
    """The sum of tables that broadcast, the first ones first: the small ones are best added up before they meet a large one."""
    total = tables[0]
    for i, table in enumerate(tables[1:]):
        if i % ADDED == ADDED - 1:
            total = np.minimum(total, NEVER)
        total = total + table
    return total


def _total(cells) -> int:
    return min(NEVER, sum(int(c) for c in cells))


def _milp(sizes, factors, quantum: int, seconds: float) -> tuple[dict[int, int] | None, int]:
    """HiGHS on the local polytope: one binary per state, one column per finite cell whose marginals are the states.

    Returns (states of the variables in `factors`, or None where it found nothing; lower bound of the sum). Whole quanta
    go in, divided by 1000: one quantum must stand well above HiGHS's absolute tolerances of 1e-6, or plans that differ
    by one look equal to it, and the largest costs well below 1e9.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import coo_array

    base = sum(int(table) for scope, table in factors if not scope)
    factors = _absorb([(scope, table) for scope, table in factors if scope], sizes)
    used = sorted({v for scope, _ in factors for v in scope})
    if base >= NEVER:
        return None, NEVER
    if not used:
        return {}, base
    first, columns = {}, 0
    for v in used:
        first[v] = columns
        columns += sizes[v]
    num_states = columns
    rows, cols, data, right, cost = [], [], [], [], [np.zeros(columns)]
    for i, v in enumerate(used):  # exactly one state each
        rows.append(np.full(sizes[v], i))
        cols.append(first[v] + np.arange(sizes[v]))
        data.append(np.ones(sizes[v]))
    num_rows = len(used)
    right.append(np.ones(num_rows))
    floor = base // quantum
    for scope, table in factors:
        where = np.nonzero(table < NEVER)
        if not len(where[0]):
            return None, NEVER
        whole = table[where] // quantum
        floor += int(whole.min())
        cost.append((whole - whole.min()) / 1000.0)
        cell = columns + np.arange(len(whole))
        columns += len(whole)
        for v, state in zip(scope, where, strict=True):  # cells with v in state s add up to that state's binary
            rows += [num_rows + state, num_rows + np.arange(sizes[v])]
            cols += [cell, first[v] + np.arange(sizes[v])]
            data += [np.ones(len(cell)), -np.ones(sizes[v])]
            right.append(np.zeros(sizes[v]))
            num_rows += sizes[v]
    matrix = coo_array((np.concatenate(data), (np.concatenate(rows), np.concatenate(cols))), shape=(num_rows, columns))
    right = np.concatenate(right)
    found = milp(
        np.concatenate(cost),
        constraints=LinearConstraint(matrix.tocsr(), right, right),
        integrality=np.arange(columns) < num_states,
        bounds=Bounds(0, 1),
        options={"mip_rel_gap": 0, "time_limit": seconds},
    )
    if found.status == 2:
        return None, NEVER
    dual = found.mip_dual_bound
    # The bound is a float that carries rounding of its own: a hundredth of a quantum is given away before rounding up.
    extra = math.ceil(dual * 1000.0 - 0.01) if dual is not None and math.isfinite(dual) else 0
    bound = (floor + max(0, extra)) * quantum
    if found.x is None:
        return None, bound
    return {v: int(found.x[first[v] : first[v] + sizes[v]].argmax()) for v in used}, bound


def _absorb(factors: list[Factor], sizes) -> list[Factor]:
    """Add each table into one whose variables include its own: fewer columns and a tighter relaxation."""
    kept: list[Factor] = []
    for scope, table in sorted(factors, key=lambda f: (-len(f[0]), f[0])):
        for i, (wide, _) in enumerate(kept):
            if set(scope) <= set(wide):
                kept[i] = wide, np.minimum(_sum(sizes, wide, [kept[i], (scope, table)]), NEVER)
                break
        else:
            kept.append((scope, table))
    return kept
