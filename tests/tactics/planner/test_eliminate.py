"""The planner's solver by itself, against enumeration, also where its tables are boxes."""

import itertools
import random

import numpy as np
import pytest

from tactics.planner import boxes, eliminate, factors
from tactics.planner.factors import NEVER
from tactics.planner.forced_plans import forced
from tactics.planner.plan import solve
from tests.planner_graphs import layers_of, sibling_graph, small_graph


def drawn(rng):
    """(sizes, tables): five variables, in state 0 (absent) but for one option of a hub, and what pairs of them cost."""
    sizes = [2, 3, *rng.integers(2, 5, 5).tolist()]
    tables = [((v, w), rng.integers(0, 9, (sizes[v], sizes[w]))) for v, w in itertools.combinations(range(2, 7), 2)]
    for v in range(2, 7):
        hub = int(rng.integers(2))
        there = np.arange(sizes[hub]) == rng.integers(sizes[hub])
        tables.append(((hub, v), np.where(there[:, None] == (np.arange(sizes[v]) > 0), 0, NEVER)))
    return sizes, tables


def test_boxes_hold_all_possible_cells():
    """Before a hub is gone and after both are; what lies outside the boxes is impossible, and most cells do."""
    boxed = whole = 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        sizes, tables = drawn(rng)
        supports = boxes.Supports(sizes, tables)
        for gone in (0, 1, 2):
            found = supports.boxes(gone, range(gone, 7), small=1)
            total = factors.summed(sizes, range(7), tables).min(axis=tuple(range(gone)))
            total = np.minimum(total, NEVER)
            scope = tuple(range(gone, 7))
            parts = boxes.joined(sizes, scope, [(box, boxes.within(scope, total, box)[1]) for box in found], 0)
            assert (np.asarray(parts) == total).all(), seed
            states = tuple(int(rng.integers(n)) for n in total.shape)
            assert (parts[(slice(None), *states[1:])] == total[:, *states[1:]]).all()
            assert parts[states] == total[states]
            boxed, whole = boxed + sum(map(boxes.count, found)), whole + total.size
    assert boxed < whole / 8


def test_where_boxes_overlap_the_least_cell_counts():
    found = [({0: np.array([0, 1])}, np.array([5, 7])), ({0: np.array([1, 2])}, np.array([6, 3]))]
    parts = boxes.joined([4], [0], found, 0)
    assert np.asarray(parts).tolist() == [5, 6, 3, NEVER] and parts.cells((np.array([3, 1]),)).tolist() == [NEVER, 6]


@pytest.mark.parametrize("make", [small_graph, sibling_graph])
def test_plans_are_the_same_box_by_box(make, monkeypatch):
    """Also with one layer after the other forced, from messages that are tables of boxes."""
    compared, used, cells_of = 0, [], boxes.Parts.cells
    monkeypatch.setattr(boxes.Parts, "cells", lambda *a: used.append(0) or cells_of(*a))
    for seed in range(60):
        graph = make(seed)
        wanted = [(names, sparse) for names in layers_of(graph) for sparse in (False, True)]
        answers = []
        for cells in (1 << 60, 0):
            for name in ("SLICED_CELLS", "BOXED_CELLS", "BOX_CELLS"):
                monkeypatch.setattr(eliminate, name, cells)
            before = len(used)
            try:
                best = solve(graph)
            except ValueError as e:
                answers.append(str(e))
            else:
                answers.append((best, forced(graph, best, wanted)))
            assert cells == 0 or len(used) == before
        assert answers[0] == answers[1], seed
        compared += not isinstance(answers[0], str)
    assert compared > 30 and len(used) > 50


@pytest.mark.parametrize("cells", [1 << 60, 0])
@pytest.mark.parametrize("share", [0.1, 0.6])
def test_minimise_equals_enumeration(monkeypatch, cells, share):
    """`cells`: also with every table in boxes and slices; `share`: of cells that are impossible."""
    for name in ("SLICED_CELLS", "BOXED_CELLS", "BOX_CELLS"):
        monkeypatch.setattr(eliminate, name, cells)
    for seed in range(60):
        rng = random.Random(seed)
        sizes = [rng.randint(1, 3) for _ in range(rng.randint(1, 6))]
        factors = []
        for _ in range(rng.randint(1, 7)):
            scope = tuple(rng.sample(range(len(sizes)), rng.randint(1, min(3, len(sizes)))))
            table = eliminate.np.empty([sizes[v] for v in scope], eliminate.np.int64)
            table.flat[:] = [NEVER if rng.random() < share else rng.randint(0, 9) for _ in range(table.size)]
            factors.append((scope, table))
        best = min(
            min(NEVER, sum(int(t[tuple(states[v] for v in scope)]) for scope, t in factors))
            for states in itertools.product(*map(range, sizes))
        )
        for max_cells in (10**6, 2, 0):
            found = eliminate.minimise(sizes, factors, max_cells=max_cells)
            assert found.cost == best and found.bound == best, (seed, max_cells)
            assert (found.states is None) == (best == NEVER)


def test_a_large_table_is_minimised_in_slices(monkeypatch):
    """Of 5 variables with 3 states, each two in a table: the first sum has 243 cells, of which 81 are there at a time."""
    monkeypatch.setattr(eliminate, "SLICED_CELLS", 0)
    rng, built = np.random.default_rng(0), []
    monkeypatch.setattr(eliminate, "summed", lambda *a: built.append(f := factors.summed(*a)) or f)
    pairs = [(pair, rng.integers(0, 99, (3, 3))) for pair in itertools.combinations(range(5), 2)]
    assert eliminate.minimise([3] * 5, pairs, max_cells=80, seconds=None) is None
    found, whole = (eliminate.minimise([3] * 5, pairs, max_cells=n, seconds=None) for n in (81, 243))
    assert found == whole and found.cost == min(
        sum(table[states[u], states[v]] for (u, v), table in pairs) for states in itertools.product(range(3), repeat=5)
    )
    assert max(f.size for f in built) == 81


def test_impossible_cells_of_many_tables_do_not_overflow():
    for count in range(1, 40):
        never = np.array([NEVER, 1])
        found = eliminate.minimise([2, 2], [((0,), never)] * count + [((0, 1), never + never[:, None] * 0)])
        assert (found.cost, found.states) == (count + 1, (1, 1)), count
