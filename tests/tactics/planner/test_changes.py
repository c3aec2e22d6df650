"""Plans with a layer forced, all at once, against one solve each; and graphs that are split by the options of fusion groups."""

import math

import pytest

from tactics.planner import eliminate, formulation, splitting
from tactics.planner.changes import changed
from tactics.planner.forced_plans import forced
from tactics.planner.graph import Graph
from tactics.planner.plan import solve
from tests.planner_graphs import evaluate, faster, layers_of, sibling_graph, small_graph, solved

SEEDS = 500


def splitting_cells(graph: Graph) -> int | None:
    """Cells that are too few for the graph's tables, and enough where it is split by options of its groups."""
    model = formulation.model_of(graph)
    sizes = (n for n in (1, 2, 4, 8, 16, 32, 64) if eliminate.core(model.sizes, model.factors, n))
    return next((n for n in sizes if len(splitting.parts(model, n)) > 1), None)


@pytest.mark.slow
def test_a_graph_is_split_by_options_where_its_tables_are_too_wide():
    split = 0
    for seed in range(SEEDS):
        graph = small_graph(seed)
        best = solved(graph)
        if best and (cells := splitting_cells(graph)):
            found = solve(graph, max_cells=cells)
            assert (found.total_ps, found.status, found.method) == (best.total_ps, "proven", "elimination"), seed
            assert evaluate(graph, found) == found.total_ps and list(found.options) == [g for g, _ in graph.groups]
            split += 1
    assert split > 60


@pytest.mark.slow
@pytest.mark.parametrize(
    "make, seeds, least, wide",
    [
        (small_graph, 250, (500, 100), False),
        (sibling_graph, 40, (200, 60), False),
        (small_graph, 250, (150, 20), True),
    ],
)
def test_all_counterfactuals_at_once_equal_one_solve_each(make, seeds, least, wide, monkeypatch):
    """Min-marginals, also where a layer is several ops at once, and with a graph too `wide`, which is split."""
    checked = flips = 0
    for seed in range(seeds):
        graph = make(seed)
        cells = {}
        wanted = [(names, sparse) for names in layers_of(graph) for sparse in (False, True)]
        try:
            best = solve(graph)
        except ValueError:
            continue
        if wide:
            if not (few := splitting_cells(graph)):
                continue
            cells = {"max_cells": few}
        with monkeypatch.context() as patch:
            if not wide:
                patch.setattr("tactics.planner.plan.solve", None)  # none is solved by itself
            answers = forced(graph, best, wanted, **cells)
        for (names, sparse), found in zip(wanted, answers, strict=True):
            force = {n: (lambda e, s=sparse: e.sparse == s) for n in names}
            try:
                alone = solve(graph, force=force)
            except ValueError:
                assert found is None, (seed, names, sparse)
                continue
            whole = changed(graph, best, found.change)
            assert found.total_ps == whole.total_ps == alone.total_ps == evaluate(graph, whole), (seed, names, sparse)
            for entries, p in ((found.before, best), (found.after, whole)):
                assert sorted(map(str, entries)) == sorted(str(e) for n, e in p.entries.items() if n in names)
            assert all(e.sparse == sparse for e in found.after)
            assert (set(found.change.gone), set(found.change.new)) == (
                set(best.reformats) - set(whole.reformats),
                set(whole.reformats) - set(best.reformats),
            )
            checked += 1
            if best.total_ps < alone.total_ps and found.speedup < math.inf:
                flips += 1
                for factor, reaches in ((found.speedup * 1.001, True), (1 + (found.speedup - 1) * 0.9, False)):
                    total = solve(faster(graph, names, sparse, factor), force=force).total_ps
                    assert (total / 1e6 <= best.total_ps) == reaches, (seed, names, sparse, found.speedup)
                quick = {
                    n: (lambda e, f=found.flipped: (e.tactic, e.ins, e.out) in {(x.tactic, x.ins, x.out) for x in f})
                    for n in names
                }
                total = solve(faster(graph, names, sparse, found.speedup * 1.001), force=quick).total_ps
                assert total / 1e6 <= best.total_ps, "with these kernels, and no others"
    assert checked > least[0] and flips > least[1]
