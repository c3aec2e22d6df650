"""Removes variables whose state follows from another variable's, before elimination: wide tables of joins become small."""

import itertools
from collections.abc import Iterable

import numpy as np

from tactics.planner.factors import NEVER, Factor

Leaders = dict[int, tuple[int, np.ndarray]]  # variable v -> (u that determines it, state of v per state of u)


def substitute(factors: Iterable[Factor]) -> tuple[list[Factor], Leaders]:
    """Removes each variable v whose state follows from the state of another variable u, as in a join of equal formats: u takes
    the place of v in all tables. So wide tables of joins become small.

    Returns (the tables without such variables, v -> (u, state of v for each state of u)).
    """
    made: list[Factor] = []
    leaders: Leaders = {}
    # id of a table -> (the result of `_follows`, the table, which many factors may share)
    known: dict[int, tuple[tuple[int, int, np.ndarray] | None, np.ndarray]] = {}
    for factor in factors:
        while True:
            scope, table = factor = _led(factor, leaders)
            if id(table) not in known:
                known[id(table)] = _follows(table), table
            found = known[id(table)][0]
            if found is None:
                break
            leaders[scope[found[0]]] = scope[found[1]], found[2]
        made.append(factor)
    return [_led(factor, leaders) for factor in made], leaders


def _led(factor: Factor, leaders: Leaders) -> Factor:
    """Rewrites a table with each variable's leader in place of the variable."""
    scope, table = factor
    for v in scope:
        if v not in leaders:
            continue
        u, state = leader(v, leaders)
        table = table.take(state, axis=scope.index(v))
        if u in scope:
            table = table.diagonal(0, scope.index(v), scope.index(u))
            scope = (*(w for w in scope if w not in (u, v)), u)
        else:
            scope = tuple(u if w == v else w for w in scope)
    return scope, table


def leader(v: int, leaders: Leaders) -> tuple[int, np.ndarray]:
    """Returns (the last leader of a variable, the variable's state for each state of the leader), and shortens the path to it:
    a chain of a thousand variables is followed once.
    """
    path = [v]
    while leaders[path[-1]][0] in leaders:
        path.append(leaders[path[-1]][0])
    for w in reversed(path[:-1]):
        u, state = leaders[w]
        last, further = leaders[u]
        leaders[w] = last, state[further]
    return leaders[v]


def _follows(table: np.ndarray) -> tuple[int, int, np.ndarray] | None:
    """Returns (axis v, axis u, state of v for each state of u) for the first axis v whose state follows from the state of u;
    None if there is none.
    """
    finite = table < NEVER
    count = np.count_nonzero(finite)
    for i, j in itertools.permutations(range(table.ndim), 2):
        if table.shape[i] > 1 and count * table.shape[i] <= table.size:  # else u cannot determine v
            both = finite.any(axis=tuple(k for k in range(table.ndim) if k not in (i, j)))
            both = both if i < j else both.T
            if (both.sum(axis=0) <= 1).all():
                return i, j, both.argmax(axis=0)
    return None
