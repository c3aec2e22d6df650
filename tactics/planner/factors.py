"""Tables of costs over some variables, and their sums: the form of the planner's question."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

NEVER = 1 << 60  # the cost of an impossible cell
ADDED = 6  # the number of cells, NEVER each at most, that added to another NEVER still fit int64

Factor = tuple[tuple[int, ...], np.ndarray]  # (variables, int64 table with one axis per variable)


def summed(sizes: Sequence[int] | Mapping[int, int], scope: Sequence[int], factors: Iterable[Factor]) -> np.ndarray:
    """Adds tables over `scope`, whose variables are in the order of the tables' own; cells of NEVER or more are impossible."""
    spread = [t.reshape([sizes[v] if v in variables else 1 for v in scope]) for variables, t in factors]
    shape = tuple(sizes[v] for v in scope)
    total = added(sorted(spread, key=np.size)) if spread else np.zeros(shape, np.int64)
    return total if total.shape == shape else np.broadcast_to(total, shape)


def added(tables: list[np.ndarray]) -> np.ndarray:
    """Adds tables that broadcast against each other, from first to last: put the small ones first."""
    total = tables[0]
    for i, table in enumerate(tables[1:]):
        if i % ADDED == ADDED - 1:
            total = np.minimum(total, NEVER)
        total = total + table
    return total
