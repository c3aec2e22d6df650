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

NEVER = 1 << 61  # the cost of an impossible cell; the sum of two still fits int64
MANY_CELLS = 500_000  # tables of more cells than this in all: a better order is worth looking for
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
        left, choices = _eliminate(sizes, factors, sequence)
        cost = _total(table for _, table in left)
        states = _trace(sizes, followers + choices, {}) if cost < NEVER else None
        return Solution(states, cost, cost, "elimination", width)

    sequence, _ = order(sizes, scopes, min(max_cells, SMALL_CELLS))
    left, choices = _eliminate(sizes, factors, sequence)
    some, bound = _milp(sizes, left, quantum, seconds)
    if some is None:
        return Solution(None, NEVER, bound, "milp", width)
    states = _trace(sizes, followers + choices, some)
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

    # Up: each bucket sums what mentions its variable first, and sends the minimum over it to the next bucket.
    at = {v: i for i, v in enumerate(sequence)}
    buckets: list[list] = [[] for _ in sequence]  # per bucket: (scope, table, ("factor" | "child", number))
    base = []  # what mentions no variable any more: (cost, number of the bucket it comes from, or None)
    for i, (scope, table) in enumerate(factors):
        if scope:
            buckets[min(at[v] for v in scope)].append((scope, table, ("factor", i)))
        else:
            base.append((int(table), None, i))
    scopes, best, parent = [], [], [None] * len(sequence)
    for b, v in enumerate(sequence):
        others = sorted({u for scope, _, _ in buckets[b] for u in scope} - {v})
        scopes.append(others)
        table = _sum(sizes, [*others, v], [(s, t) for s, t, _ in buckets[b]])
        at_best, message = _least(table)
        best.append(at_best)
        if others:
            parent[b] = min(at[u] for u in others)
            buckets[parent[b]].append((tuple(others), message, ("child", b)))
        else:
            base.append((int(message), b, None))

    # Down: what the rest of the tree costs, as a table over the variables that a bucket shares with its parent.
    rest: list[Factor | None] = [None] * len(sequence)
    for b in reversed(range(len(sequence))):
        if parent[b] is not None:
            rest[b] = _without(sizes, sequence, buckets, scopes, rest, parent[b], ("child", b), scopes[b])
    root = list(range(len(sequence)))
    for b in reversed(range(len(sequence))):
        root[b] = b if parent[b] is None else root[parent[b]]

    home = {item[2][1]: b for b, items in enumerate(buckets) for item in items if item[2][0] == "factor"}
    choices = followers + [(v, scopes[b], best[b]) for b, v in enumerate(sequence)]
    answers = []
    for (i, _), table in zip(swaps, tables, strict=True):
        if i not in home:  # a lone cell
            around = np.array(_total(c for c, _, j in base if j != i))
            known = {}
        else:
            b, scope = home[i], factors[i][0]
            _, outside = _without(sizes, sequence, buckets, scopes, rest, b, ("factor", i), scope)
            around = np.minimum(outside + _total(c for c, r, _ in base if r != root[b]), NEVER)
            known = _upwards(sizes, sequence, buckets, scopes, rest, parent, b, ("factor", i), (scope, table))
        cost = min(NEVER, int((np.minimum(around, NEVER) + table).min()))
        states = _trace(sizes, choices, known) if cost < NEVER else None
        answers.append(Replaced(cost, states, table, around))
    return answers


def _upwards(sizes, sequence, buckets, scopes, rest, parent, b: int, left_out, instead: Factor) -> dict[int, int]:
    """Best states of all variables from bucket `b` to its root, with `instead` for one of the bucket's tables."""
    known: dict[int, int] = {}
    extra = [instead]
    while b is not None:
        scope = [v for v in (*scopes[b], sequence[b]) if v not in known]
        items = [(s, t) for s, t, name in buckets[b] if name != left_out] + extra
        items += [rest[b]] if rest[b] is not None else []
        cut = [
            (tuple(v for v in s if v not in known), t[tuple(known.get(v, slice(None)) for v in s)]) for s, t in items
        ]
        table = _sum(sizes, scope, cut)
        known |= zip(scope, (int(k) for k in np.unravel_index(table.argmin(), table.shape)), strict=True)
        left_out, extra, b = ("child", b), [], parent[b]
    return known


def _without(sizes, sequence, buckets, scopes, rest, b: int, left_out, onto) -> Factor:
    """Everything a bucket knows (its own tables, its children's messages, the rest of the tree) but one item, as the
    minimum over what `onto` does not name."""
    items = [(s, t) for s, t, name in buckets[b] if name != left_out] + ([rest[b]] if rest[b] is not None else [])
    scope = [*onto, *(v for v in [*scopes[b], sequence[b]] if v not in onto)]
    table = _sum(sizes, scope, items)
    return tuple(onto), table.min(axis=tuple(range(len(onto), len(scope)))) if len(scope) > len(onto) else table


def order(sizes: Sequence[int], scopes: Iterable[tuple[int, ...]], max_cells: int) -> tuple[list[int], int]:
    """Elimination order, and the width: it ends early, with the width of the table refused, before the first table of more than
    `max_cells` cells. Least table next; where that takes MANY_CELLS in all, the cheapest of three orders."""
    scopes = list(scopes)
    found = _order(sizes, scopes, max_cells, _table)
    if found[2] > MANY_CELLS or len(found[0]) < len(sizes):
        others = [_order(sizes, scopes, max_cells, score) for score in (_fill, _message)]
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
    wide tables of joins fall apart. Returns the tables without such v, per v what `_eliminate` returns for one, and
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
            followers.append((v, [u], state))
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


def _eliminate(sizes, factors, sequence):
    """Minimise variable after variable out of the sum. Returns the tables left (their sum has the same minimum) and
    per eliminated variable (variable, the variables its best state depends on, table of its best states)."""
    live: dict[int, Factor] = dict(enumerate(factors))
    holds: list[list[int]] = [[] for _ in sizes]
    for i, (scope, _) in live.items():
        for v in scope:
            holds[v].append(i)
    choices = []
    for v in sequence:
        mine = [live.pop(i) for i in holds[v] if i in live]
        if not mine:
            continue
        others = sorted({u for scope, _ in mine for u in scope} - {v})
        table = _sum(sizes, [*others, v], mine)
        best, message = _least(table)
        choices.append((v, others, best.astype(np.min_scalar_type(sizes[v]))))
        new = len(factors) + len(choices)
        live[new] = (tuple(others), message)
        for u in others:
            holds[u].append(new)
    return list(live.values()), choices


def _least(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(where, how much): the least of every row along the last axis."""
    rows = table.reshape(-1, table.shape[-1])
    best = rows.argmin(axis=1)
    least = rows[np.arange(len(rows)), best]  # min() would go through the table again, and slowly along a short axis
    return best.reshape(table.shape[:-1]), least.reshape(table.shape[:-1])


def _sum(sizes, scope, factors) -> np.ndarray:
    """The sum of tables, over `scope`, with NEVER as its ceiling."""
    axis = {v: i for i, v in enumerate(scope)}
    spread = []
    for variables, table in factors:
        places = [axis[v] for v in variables]
        shape = [1] * len(scope)
        for p in places:
            shape[p] = sizes[scope[p]]
        spread.append(table.transpose(np.argsort(places)).reshape(shape))
    spread.sort(key=np.size)  # the small ones are added up before they meet a large one
    total = spread[0] if spread else np.zeros([1] * len(scope), np.int64)
    for i, table in enumerate(spread[1:]):
        total = total + table
        if i % 2 or i == len(spread) - 2:  # three cells of NEVER still fit int64
            total = np.minimum(total, NEVER)
    shape = tuple(sizes[v] for v in scope)
    return total if total.shape == shape else np.broadcast_to(total, shape)


def _total(cells) -> int:
    return min(NEVER, sum(int(c) for c in cells))


def _trace(sizes, choices, known: dict[int, int]) -> tuple[int, ...]:
    states = dict(known)
    for v, others, best in reversed(choices):
        if v not in known:
            states[v] = int(best[tuple(states[u] for u in others)])
    return tuple(states.get(v, 0) for v in range(len(sizes)))  # in no table: any state will do


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
                kept[i] = (wide, _sum(sizes, list(wide), [kept[i], (scope, table)]))
                break
        else:
            kept.append((scope, table))
    return kept
