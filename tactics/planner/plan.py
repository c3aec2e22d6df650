"""The fastest plan: one tactic per op, one format per tensor, one option per fusion group, reformats included.

In: every entry (tactic x formats) with its time. Out: the assignment with the least serial sum, proven minimal for those times
or marked with the gap that remains.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from tactics.format import Key
from tactics.planner import changes, eliminate, formulation, splitting
from tactics.planner.changes import Change
from tactics.planner.factors import NEVER
from tactics.planner.graph import (
    Cell,
    Choice,
    Entry,
    Force,
    Graph,
    Impossible,
    Plan,
    all_cells,
    cells_of,
    check,
    cycle,
    formats_of,
    holds,
    may_close,
    only,
    tensors_of,
    why_none,
)
from tactics.planner.reformats import cost

F = TypeVar("F")
Rival = Callable[[Graph], Plan | None]  # makes a plan by another method, for use if HiGHS finds none
MOST_RINGS = 256  # combinations of fusions that may be forbidden one after the other

# ---- solving


def solve(graph: Graph, *, force: Force | None = None, max_cells: int = 20_000_000, milp_seconds: float = 60.0) -> Plan:
    """Returns the plan with the least total time; ties go to fewer launches, then fewer sparse tactics, then a fixed order.

    `force`: op name -> a test of which of its entries are allowed (a counterfactual). A layer that fusion puts into several ops
    must be forced under each of their names. If elimination would need more than `max_cells` table cells at once, the graph is
    split by the options of a few groups; if that does not help, HiGHS takes over. HiGHS's proof is exact up to its own
    floating-point bound, elimination's is integer arithmetic. If HiGHS runs out of `milp_seconds`, the plan found by then
    depends on the machine's speed. Raises ValueError if the graph is malformed, or no plan exists (it names the op).
    """
    check(graph)
    return _solve(only(graph, force or {}), max_cells, milp_seconds, (greedy, best_single_key))


def _solve(graph: Graph, max_cells: int, milp_seconds: float, rivals: tuple[Rival, ...]) -> Plan:
    """Solves a graph by elimination if possible; else each of its parts, if splitting by a few groups makes them narrow enough;
    else by HiGHS.
    """
    model = formulation.model_of(graph)
    plan = _without_rings(model, max_cells, None, rivals)
    if plan is not None:
        return plan
    plans = []
    for part in splitting.parts(model, max_cells) or [model]:
        with contextlib.suppress(Impossible):
            plans.append(_without_rings(part, max_cells, milp_seconds, rivals))
    found = [p for p in plans if p is not None]
    if not found:
        raise Impossible(why_none(graph))
    best = min(found, key=lambda p: (p.total_ps, len(p.entries) + len(p.reformats), sum(e.sparse for e in p.entries.values())))
    least = min(p.total_ps * (1 - p.gap) for p in found)
    if all(p.status == "proven" for p in found) or least >= best.total_ps:
        return replace(best, status="proven", gap=0.0)
    return replace(best, status="gap", gap=(best.total_ps - least) / best.total_ps)


def _without_rings(
    model: formulation.Model, max_cells: int, milp_seconds: float | None, rivals: tuple[Rival, ...]
) -> Plan | None:
    """Returns the best plan without a cycle: while the plan has one, its combination of fusions is forbidden and the graph
    solved again.

    Fusions that are legal alone may close a cycle together. Every plan with such a combination has the cycle, so the first plan
    without one is the best that can run. With `milp_seconds` None, returns None if elimination cannot solve it.
    """
    closed: list[dict[str, str]] = []
    while True:
        plan = _solve_once(model, closed, max_cells, milp_seconds, rivals)
        if plan is None:
            return None
        ring = cycle(model.graph, plan.options)
        if ring is None:
            return plan
        if not ring:
            raise ValueError("the graph has a cycle with every fusion option")
        closed.append(ring)
        if len(closed) > MOST_RINGS:
            raise ValueError(f"more than {MOST_RINGS} combinations of fusions form a cycle")


def _solve_once(
    model: formulation.Model,
    closed: list[dict[str, str]],
    max_cells: int,
    milp_seconds: float | None,
    rivals: tuple[Rival, ...],
) -> Plan | None:
    """Returns the best plan under which none of the combinations of options in `closed` is taken.

    `rivals`: other methods, whose plans are compared if HiGHS found no plan or no proven one. Returns None if elimination
    cannot solve it and `milp_seconds` is None.
    """
    graph, scale = model.graph, model.costs.scale
    factors = [*model.factors, *(formulation.forbidden(graph, ring) for ring in closed)]
    found = eliminate.minimise(model.sizes, factors, quantum=scale, max_cells=max_cells, seconds=milp_seconds)
    if found is None:
        return None
    if found.bound >= NEVER:
        raise Impossible(why_none(graph))
    bound_ps = found.bound // scale
    plans = []
    if found.states is not None and found.cost < NEVER:
        plan = formulation.read(graph, model, found.states, found.method, found.width)
        # HiGHS, stopped early, may hold a set of reformats that is not the cheapest for its formats; `read` takes that.
        if plan.total_ps > found.cost // scale or plan.total_ps < bound_ps:
            raise RuntimeError(f"planner: plan costs {plan.total_ps} ps, the solver said {found.cost // scale} ps")
        plans.append(plan)
    if found.method == "milp" and (not plans or plans[0].total_ps > bound_ps):
        tried = [_attempt(rival, graph) for rival in rivals]
        others = [p for p in tried if p is not None and cycle(graph, p.options) is None]
        plans += [replace(p, method="milp", width=found.width) for p in others]
    if not plans:
        raise ValueError(f"no plan found within {milp_seconds} s, though one may exist: raise max_cells or the time")
    plan = min(plans, key=lambda p: p.total_ps)
    if plan.total_ps <= bound_ps:
        return replace(plan, status="proven", gap=0.0)
    return replace(plan, status="gap", gap=(plan.total_ps - bound_ps) / plan.total_ps)


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
    usual = changes.Changes(graph, model, eliminate.assigned(tree, tree.best), best.width)
    return _Question(graph, best, model, tree, usual, may_close(graph))


def _all_forced(q: _Question, wanted: Iterable[tuple[tuple[str, ...], bool]]) -> list[Forced | None]:
    places: dict[str, list[int]] = {}
    for i, c in enumerate(q.graph.choices):
        places.setdefault(c.name, []).append(i)
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
        swaps = {q.model.ops[i]: formulation.op_factor(q.graph, q.model, i, table[i]) for i in mine}
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
    plan = _attempt(solve, graph, force={name: (lambda e: e.sparse == sparse) for name in names if name in there})
    if plan is None:
        return None
    before, after = (tuple(p.entries[n] for n in names if n in p.entries) for p in (best, plan))
    return Forced(changes.difference(best, plan), before, after, _break_even(after, plan.total_ps, best), after)


def cheapest(entries: Iterable[Entry]) -> tuple[Entry, ...]:
    """Keeps, for each combination of formats, the cheapest dense and the cheapest sparse entry. The plans stay the same, also
    with a layer forced, and are found in less time.
    """
    best: dict[tuple[Cell, bool], Entry] = {}
    for e in entries:
        kind = (e.ins, e.out), e.sparse
        if kind not in best or e.precedes(best[kind]):
            best[kind] = e
    return tuple(best.values())


# ---- rivals, for comparison with the plan


def greedy(graph: Graph) -> Plan:
    """Returns the plan with each op's fastest entry, each group's fastest option by that rule, and the reformats that these
    need.
    """
    check(graph)
    fastest: list[Entry | None] = []
    known: dict[int, Entry | None] = {}
    for cells in all_cells(graph):
        if id(cells) not in known:
            known[id(cells)] = _fastest(cells.values())
        fastest.append(known[id(cells)])
    options = {group: names[0] for group, names in graph.groups}
    deciding: dict[str, list[int]] = {}  # group -> the ops that it decides about
    for i, c in enumerate(graph.choices):
        for group in {group for group, _ in c.when}:
            deciding.setdefault(group, []).append(i)
    there = _Live(graph, fastest)
    for i, c in enumerate(graph.choices):
        if holds(c.when, options):
            there.switch(i, +1)
    for group, names in graph.groups:
        before, possible = options[group], []
        for k, name in enumerate(names):
            there.take(options, group, name, deciding.get(group, ()))
            if there.complete():
                possible.append((there.time, there.count, k, name))
        there.take(options, group, min(possible)[3] if possible else before, deciding.get(group, ()))
    if not there.complete():
        raise ValueError("greedy: the fastest entries and options make no complete plan")
    taken = [(c.name, fastest[i]) for i, c in enumerate(graph.choices) if holds(c.when, options)]
    return _rival(graph, options, {name: entry for name, entry in taken if entry is not None}, "greedy")


def _fastest(entries: Collection[Entry]) -> Entry | None:
    """Returns the fastest entry; of equal ones dense first, then by the names of the tactic and the formats. None without
    entries.
    """
    least = min(((e.time_ps, e.sparse) for e in entries), default=None)
    same = (e for e in entries if (e.time_ps, e.sparse) == least)
    return min(same, key=lambda e: (e.name, [*map(str, e.ins)], str(e.out)), default=None)


class _Live:
    """The ops that exist under some options, and their total time; taking another option of a group updates only the ops that
    it decides about.
    """

    def __init__(self, graph: Graph, fastest: list[Entry | None]):
        self.graph, self.fastest = graph, fastest
        self.time = self.count = self.unable = 0
        self.made, self.read = Counter(graph.inputs), Counter(graph.outputs)
        self.missing = sum(t not in self.made for t in self.read)  # the number of tensors that are read but not made

    def switch(self, i: int, by: int) -> None:
        """Makes op i exist (+1), or no longer (-1)."""
        c, entry = self.graph.choices[i], self.fastest[i]
        self.count += by
        if entry is None:
            self.unable += by
        else:
            self.time += by * entry.time_ps
        for t, counts in ((c.output, self.made), *((t, self.read) for t in c.inputs)):
            self.missing -= self.read[t] > 0 and self.made[t] == 0
            counts[t] += by
            self.missing += self.read[t] > 0 and self.made[t] == 0

    def take(self, options: dict[str, str], group: str, option: str, deciding: Iterable[int]) -> None:
        """Takes an option of a group; `deciding`: the ops that the group decides about."""
        before = [holds(self.graph.choices[i].when, options) for i in deciding]
        options[group] = option
        for i, was in zip(deciding, before, strict=True):
            by = holds(self.graph.choices[i].when, options) - was
            if by:
                self.switch(i, by)

    def complete(self) -> bool:
        return not self.unable and not self.missing


def best_single_format(graph: Graph, names: Mapping[F, Mapping[str, tuple[Key, ...]]]) -> tuple[F, Plan] | None:
    """Returns (format, plan): the best plan in which every tensor has the same format wherever its ops allow it; None if there
    is no such plan.

    `names`: format -> {tensor: its keys in that format}; one format has different keys on different tensors, and in different
    places.
    """
    check(graph)
    plans: list[tuple[F, Plan]] = []
    cells = all_cells(graph)
    for name, keys in names.items():
        choices: list[Choice] = []
        known: dict[tuple, tuple[Entry, ...]] = {}
        for c, usable in zip(graph.choices, cells, strict=True):
            wanted = tuple(keys.get(t, ()) for t in (*c.inputs, c.output))
            alike = id(usable), wanted
            if alike not in known:
                known[alike] = _fitting(usable, wanted)
            choices.append(replace(c, entries=known[alike]))
        least = sum(min((e.time_ps for e in c.entries), default=0) for c in choices if not c.when)
        if plans and least >= min(p.total_ps for _, p in plans):
            continue  # reformats, and ops that depend on options, would add to this time
        narrow = replace(graph, choices=tuple(choices))
        found = _attempt(_solve, narrow, 1_000_000, 5.0, ())
        if found is not None:
            plans.append((name, _rival(graph, found.options, found.entries, "single format")))
    return min(plans, key=lambda pair: pair[1].total_ps, default=None)


def best_single_key(graph: Graph) -> Plan | None:
    """Does the work of `best_single_format` with each key as a format; None if there is no such plan."""
    every = dict.fromkeys(key for t in tensors_of(graph) for key in formats_of(graph, t))
    found = best_single_format(graph, {key: dict.fromkeys(tensors_of(graph), (key,)) for key in every})
    return found and found[1]


def _fitting(cells: Mapping[Cell, Entry], wanted: tuple[tuple[Key, ...], ...]) -> tuple[Entry, ...]:
    """Returns the entries with the most tensors in the wanted formats."""
    fit = [sum(map(tuple.__contains__, wanted, (*ins, out))) for ins, out in cells]
    best = max(fit, default=0)
    return tuple(e for n, e in zip(fit, cells.values(), strict=True) if n == best)


def _rival(graph: Graph, options: Mapping[str, str], entries: Mapping[str, Entry], method: str) -> Plan:
    total, reformats = cost(graph, options, entries)
    return Plan(entries, options, reformats, total, "gap", method, 0, math.inf)


def _attempt(function: Callable[..., Plan | None], *args: Any, **options: Any) -> Plan | None:
    try:
        return function(*args, **options)
    except ValueError:
        return None
