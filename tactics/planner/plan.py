"""The fastest plan: one tactic per op, one format per tensor, one option per fusion group, reformats included.

In: every entry (tactic x formats) with its time. Out: the assignment with the least serial sum, proven minimal for those times
or marked with the gap that remains.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from tactics.format import Key
from tactics.planner import eliminate, formulation, splitting
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
    check,
    cycle,
    formats_of,
    holds,
    only,
    tensors_of,
    why_none,
)
from tactics.planner.grouping import each_once, grouped
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
        plan = formulation.read(model, found.states, found.method, found.width)
        # HiGHS, stopped early, may hold a set of reformats that is not the cheapest for its formats; `read` takes that.
        if plan.total_ps > found.cost // scale or plan.total_ps < bound_ps:
            raise RuntimeError(f"planner: plan costs {plan.total_ps} ps, the solver said {found.cost // scale} ps")
        plans.append(plan)
    if found.method == "milp" and (not plans or plans[0].total_ps > bound_ps):
        tried = [attempt(rival, graph) for rival in rivals]
        others = [p for p in tried if p is not None and cycle(graph, p.options) is None]
        plans += [replace(p, method="milp", width=found.width) for p in others]
    if not plans:
        raise ValueError(f"no plan found within {milp_seconds} s, though one may exist: raise max_cells or the time")
    plan = min(plans, key=lambda p: p.total_ps)
    if plan.total_ps <= bound_ps:
        return replace(plan, status="proven", gap=0.0)
    return replace(plan, status="gap", gap=(plan.total_ps - bound_ps) / plan.total_ps)


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
    fastest = each_once(lambda cells: _fastest(cells.values()), all_cells(graph))
    options = {group: names[0] for group, names in graph.groups}
    deciding = grouped((group, i) for i, c in enumerate(graph.choices) for group in {group for group, _ in c.when})
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
        found = attempt(_solve, replace(graph, choices=tuple(choices)), 1_000_000, 5.0, ())
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


def attempt(function: Callable[..., Plan | None], *args: Any, **options: Any) -> Plan | None:
    try:
        return function(*args, **options)
    except ValueError:
        return None
