"""The least sum of tables by HiGHS, for the variables whose elimination would need too large tables."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tactics.planner.factors import NEVER, Factor, summed


def solve(sizes: Sequence[int], factors: list[Factor], quantum: int, seconds: float) -> tuple[dict[int, int] | None, int]:
    """Minimises a sum of tables by HiGHS on the local polytope: one binary per state, and one column per finite cell, whose
    marginals are the states.

    Returns (the state of each variable in `factors`, or None if HiGHS found nothing; a lower bound of the sum). Costs are
    passed as whole quanta divided by 1000: one quantum must be well above HiGHS's absolute tolerances of 1e-6, or plans that
    differ by one look equal to it, and the largest costs well below 1e9.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import coo_array

    base = sum(int(table) for scope, table in factors if not scope)
    factors = _absorb([(scope, table) for scope, table in factors if scope], sizes)
    if base >= NEVER or any(table.min() >= NEVER for _, table in factors):
        return None, NEVER
    if not factors:
        return {}, base
    program = _program(sizes, factors, quantum)
    shape = (len(program.right), len(program.cost))
    matrix = coo_array((program.data, (program.rows, program.columns)), shape=shape).tocsr()
    found = milp(
        program.cost,
        constraints=LinearConstraint(matrix, program.right, program.right),
        integrality=np.arange(len(program.cost)) < program.num_states,
        bounds=Bounds(0, 1),
        options={"mip_rel_gap": 0, "time_limit": seconds},
    )
    if found.status == 2:
        return None, NEVER
    dual = found.mip_dual_bound
    # The bound is a float that carries rounding of its own: a hundredth of a quantum is given away before rounding up.
    extra = math.ceil(dual * 1000.0 - 0.01) if dual is not None and math.isfinite(dual) else 0
    bound = (base // quantum + program.floor + max(0, extra)) * quantum
    if found.x is None:
        return None, bound
    return {v: int(found.x[at : at + sizes[v]].argmax()) for v, at in program.first.items()}, bound


@dataclass(frozen=True, slots=True)
class Program:
    """An integer program in coordinate form: `rows`, `columns`, `data` of the constraints, each of which equals `right`.

    `cost`: of each column, in thousands of quanta above the constant `floor` (quanta); `first[v]`: the column of the first
    state of variable v. The first `num_states` columns are states, the others are cells.
    """

    rows: np.ndarray
    columns: np.ndarray
    data: np.ndarray
    right: np.ndarray
    cost: np.ndarray
    floor: int
    first: dict[int, int]
    num_states: int


def _program(sizes: Sequence[int], factors: list[Factor], quantum: int) -> Program:
    used = sorted({v for scope, _ in factors for v in scope})
    first, num_states = {}, 0
    for v in used:
        first[v] = num_states
        num_states += sizes[v]
    columns, floor, cost = num_states, 0, [np.zeros(num_states)]
    rows, cols = [np.repeat(np.arange(len(used)), [sizes[v] for v in used])], [np.arange(num_states)]
    data, right, num_rows = [np.ones(num_states)], [np.ones(len(used))], len(used)  # exactly one state each
    for scope, table in factors:
        where = np.nonzero(table < NEVER)
        whole = table[where] // quantum
        floor += int(whole.min())
        cost.append((whole - whole.min()) / 1000.0)
        cell = columns + np.arange(len(whole))
        columns += len(whole)
        for v, state in zip(scope, where, strict=True):  # the cells in which v has a state add up to the binary of that state
            rows += [num_rows + state, num_rows + np.arange(sizes[v])]
            cols += [cell, first[v] + np.arange(sizes[v])]
            data += [np.ones(len(cell)), -np.ones(sizes[v])]
            right.append(np.zeros(sizes[v]))
            num_rows += sizes[v]
    return Program(
        np.concatenate(rows),
        np.concatenate(cols),
        np.concatenate(data),
        np.concatenate(right),
        np.concatenate(cost),
        floor,
        first,
        num_states,
    )


def _absorb(factors: list[Factor], sizes: Sequence[int]) -> list[Factor]:
    """Adds each table to one whose variables include its own: fewer columns and a tighter relaxation."""
    kept: list[Factor] = []
    for scope, table in sorted(factors, key=lambda f: (-len(f[0]), f[0])):
        for i, (wide, _) in enumerate(kept):
            if set(scope) <= set(wide):
                kept[i] = wide, np.minimum(summed(sizes, wide, [kept[i], (scope, table)]), NEVER)
                break
        else:
            kept.append((scope, table))
    return kept
