"""The order in which variables are eliminated, which keeps the tables of `tactics.planner.eliminate` small."""

import heapq
from collections.abc import Callable, Iterable, Sequence

MANY_CELLS = 20_000_000  # if all tables together have more cells, a second order is tried
TOO_MANY = 1 << 60  # cells; a larger number counts as this

Score = Callable[[Sequence[int], Sequence[set[int]], int], int]


def order(sizes: Sequence[int], scopes: Iterable[tuple[int, ...]], max_cells: int, slices: int = 1) -> tuple[list[int], int]:
    """Returns (elimination order, width). The next variable is the one with the smallest message; if that order takes
    MANY_CELLS in all, or ends early, the order by fewest neighbours replaces it where it is better.

    The order ends before the first table of more than `slices` times `max_cells` cells, and the width includes that table; a
    table of more than `max_cells` cells is built one slice at a time.
    """
    scopes = list(scopes)
    found = _order(sizes, scopes, max_cells, slices, _message)
    if found[2] > MANY_CELLS or len(found[0]) < len(sizes):
        found = min(found, _order(sizes, scopes, max_cells, slices, _few), key=lambda f: (-len(f[0]), f[2]))
    return found[:2]


def _message(sizes: Sequence[int], near: Sequence[set[int]], v: int) -> int:
    """Returns the number of cells in the table that eliminating v leaves, at most TOO_MANY: a tensor may have thousands of
    readers.
    """
    cells = 1
    for u in near[v]:
        cells *= sizes[u]
        if cells >= TOO_MANY:
            return TOO_MANY
    return cells


def _few(sizes: Sequence[int], near: Sequence[set[int]], v: int) -> int:
    """Returns the number of neighbours of v: a table over many variables often has few possible states."""
    return len(near[v])


def _order(
    sizes: Sequence[int], scopes: Iterable[tuple[int, ...]], max_cells: int, slices: int, score: Score
) -> tuple[list[int], int, int]:
    """Returns (order, width, number of cells in all tables): the variable with the least score is next, of equal ones the
    lowest; the neighbours of an eliminated variable are scored again.
    """
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
            continue  # an outdated score of this variable
        width, cells = max(width, len(near[v])), min(TOO_MANY, sizes[v] * _message(sizes, near, v))
        if cells > min(slices, sizes[v]) * max_cells:
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
