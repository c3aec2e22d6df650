"""The best plan with a layer forced to run sparse, or dense: all of these from one elimination tree."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from tactics.planner import changes, eliminate, formulation, splitting
from tactics.planner.changes import Change
from tactics.planner.factors import NEVER
from tactics.planner.graph import Cell, Entry, Graph, Plan, cells_of, check, cycle, may_close
from tactics.planner.grouping import grouped
from tactics.planner.plan import attempt, solve


@dataclass(frozen=True, slots=True)
class Forced:
    """The best plan with one layer forced to run sparse or dense, as the change from the best plan.

    `before`, `after`: the entries of the layer's ops in the best and in the forced plan. `speedup`: the factor by which all
    forced kernels of the layer would have to be faster, all else unchanged, for a forced plan to cost no more than the best
    one; inf: no factor suffices. `flipped`: the entries of the layer's ops in the forced plan that breaks even first, with
    their present times.
    """

    change: Change
    before: tuple[Entry, ...]
    after: tuple[Entry, ...]
    speedup: float
    flipped: tuple[Entry, ...]

    @property
    def total_ps(self) -> int:
        return self.change.total_ps


def forced(
    graph: Graph, best: Plan, wanted: Iterable[tuple[tuple[str, ...], bool]], *, max_cells: int = 20_000_000
) -> list[Forced | None]:
    """Returns, for each (ops, sparse), the best plan in which these ops, wherever they exist, run only sparse (or only dense)
    entries; None if that is impossible.

    `best`: the plan without force. `ops`: the names of all alternatives of one layer, of which every plan has at least one;
    siblings that a plan may merge are several ops at once in a plan that does not merge them.

    The plans equal those of `solve` with `force`. All come from one pass up and one down the elimination tree; the time of each
    is proportional to the part of the plan that it changes. If the tree is too wide, the graph is split; if that does not help,
    or such a plan has a cycle, the layer is solved alone, and `speedup` is an upper bound.
    """
    check(graph)
    wanted = list(wanted)
    if not wanted:
        return []
    model = formulation.model_of(graph)
    question = _question(model, best, max_cells)
    if question is not None:
        return _all_forced(question, wanted)
    narrow = [q for part in splitting.parts(model, max_cells) if (q := _question(part, best, max_cells)) is not None]
    if not narrow:
        return [_forced_alone(graph, best, names, sparse) for names, sparse in wanted]
    each = zip(*(_all_forced(q, wanted) for q in narrow), strict=True)
    return [_least_forced([f for f in found if f is not None]) for found in each]


def _least_forced(found: list[Forced]) -> Forced | None:
    """Combines the results of a graph's parts: the plan with the least time, with the smallest speedup of any part."""
    if not found:
        return None
    first = min(found, key=lambda f: f.speedup)
    return replace(min(found, key=lambda f: f.total_ps), speedup=first.speedup, flipped=first.flipped)


def _question(model: formulation.Model, best: Plan, max_cells: int) -> _Question | None:
    """Prepares counterfactuals; returns None if elimination would need larger tables, or the graph has no plan."""
    graph = model.graph
    tree = eliminate.calibrate(model.sizes, model.factors, max_cells=max_cells)
    if tree is None or tree.cost >= NEVER:
        return None
    usual = changes.Changes(model, eliminate.assigned(tree, tree.best), best.width)
    return _Question(graph, best, model, tree, usual, may_close(graph))


def _all_forced(q: _Question, wanted: Iterable[tuple[tuple[str, ...], bool]]) -> list[Forced | None]:
    places = grouped((c.name, i) for i, c in enumerate(q.graph.choices))
    return [_forced(q, names, [i for name in names for i in places.get(name, ())], sparse) for names, sparse in wanted]


@dataclass(frozen=True, slots=True)
class _Question:
    """The data that all counterfactuals share; `usual`: the plan of the tree, equal to `best` unless cycles were forbidden."""

    graph: Graph
    best: Plan
    model: formulation.Model
    tree: eliminate.Tree
    usual: changes.Changes
    may_close: bool

    def after(self, change: Change, names: tuple[str, ...]) -> tuple[Entry, ...]:
        """Returns the entries of these ops in the changed plan."""
        found = (change.entries[n] if n in change.entries else self.usual.plan.entries.get(n) for n in names)
        return tuple(e for e in found if e is not None)

    def cyclic(self, change: Change) -> bool:
        return self.may_close and cycle(self.graph, {**self.usual.plan.options, **change.options}) is not None

    def break_even(self, change: Change, names: tuple[str, ...]) -> float:
        """Returns the factor by which these ops must be faster for the changed plan to cost as much as the best one; inf if
        that plan has a cycle.
        """
        left = _break_even(self.after(change, names), change.total_ps, self.best)
        return math.inf if left < math.inf and self.cyclic(change) else left


def _forced(q: _Question, names: tuple[str, ...], mine: list[int], sparse: bool) -> Forced | None:
    """Solves one counterfactual; `mine`: the numbers of the choices with these names."""
    if not mine or q.model.blocks & set(mine):  # a part of a graph may have none of them
        return _forced_alone(q.graph, q.best, names, sparse)
    cells = {i: _only(q.graph, i, sparse) for i in mine}

    def least(faster: float, below: int = NEVER) -> tuple[Change, int] | None:
        """Returns (the change to the best forced plan, its cost) if all kernels of the layer were faster by this factor; None
        if its cost is not `below` the limit.
        """
        table = {i: {cell: q.model.costs.of(e, faster) for cell, e in cells[i].items()} for i in mine}
        swaps = {q.model.ops[i]: formulation.op_factor(q.model, i, table[i]) for i in mine}
        found = eliminate.replaced(q.tree, swaps, below)
        return found and (q.usual.of(found[0], cells), found[1])

    found = least(1.0)
    if found is None:
        return None
    first, cost = found
    if q.cyclic(first):
        return _forced_alone(q.graph, q.best, names, sparse)
    if first.total_ps != cost // q.model.costs.scale:
        raise RuntimeError(f"planner: forced plan costs {first.total_ps} ps, the solver said {cost // q.model.costs.scale} ps")
    # The least break-even over all plans, by Dinkelbach's method: each next plan is cheaper at the last one's break-even.
    rival, faster, speedup = first, 1.0, q.break_even(first, names)
    if speedup == math.inf:  # this plan never breaks even, even with kernels of no time; another forced plan may
        faster = math.inf
        rival, cost = least(faster) or (rival, cost)
        speedup = q.break_even(rival, names)
    costs = q.model.costs
    while 1.0 < speedup < math.inf:
        found = least(speedup, cost + sum(costs.of(e, speedup) - costs.of(e, faster) for e in q.after(rival, names)))
        if found is None or q.break_even(found[0], names) >= speedup:
            break
        (rival, cost), faster = found, speedup
        speedup = q.break_even(rival, names)
    before = tuple(q.best.entries[n] for n in names if n in q.best.entries)
    after = q.after(first, names)
    if q.usual.plan.entries != q.best.entries:
        first = changes.difference(q.best, changes.changed(q.graph, q.usual.plan, first))
    return Forced(first, before, after, speedup, q.after(rival, names))


def _only(graph: Graph, i: int, sparse: bool) -> dict[Cell, Entry]:
    """Returns the cells of choice i, made of its sparse or of its dense entries only."""
    c = graph.choices[i]
    return cells_of(graph, replace(c, entries=tuple(e for e in c.entries if e.sparse == sparse)))


def _break_even(kernels: Iterable[Entry], total_ps: int, best: Plan) -> float:
    time = sum(e.time_ps for e in kernels)
    left = time - (total_ps - best.total_ps)
    return max(1.0, time / left) if left > 0 else math.inf


def _forced_alone(graph: Graph, best: Plan, names: tuple[str, ...], sparse: bool) -> Forced | None:
    there = {c.name for c in graph.choices}
    plan = attempt(solve, graph, force={name: (lambda e: e.sparse == sparse) for name in names if name in there})
    if plan is None:
        return None
    before, after = (tuple(p.entries[n] for n in names if n in p.entries) for p in (best, plan))
    return Forced(changes.difference(best, plan), before, after, _break_even(after, plan.total_ps, best), after)
