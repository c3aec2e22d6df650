"""Makes one choice for several batches of a network: each op has the same tactic, formats and order of sums at all of them, so
that an image's result has the same bits in every batch (see order_of_sums.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from gpu_runtime.errors import ModelError
from gpu_runtime.planning.counterfactuals import without_sparse
from gpu_runtime.planning.entries import Times, addresses, cost_of
from gpu_runtime.planning.order_of_sums import order, steady
from gpu_runtime.planning.tables import Table, choices
from tactics.format import Key
from tactics.measure.timing import Time
from tactics.planner import plan
from tactics.planner.graph import Choice, Entry, Graph, Impossible, Literals, Plan, to_ps, to_us
from tactics.problems.problem import Problem
from tactics.tactic import Tactic

Place = tuple[str, Literals, tuple[str, ...], str]  # (name, when, inputs, output) of an op, equal at all points
_Shared = dict[Tactic, tuple[Time, tuple[Tactic, ...]]]  # tactic at the first point -> (sum of the times, tactic at each point)


def solve(tables: Sequence[Table], dense: bool = False) -> list[Plan]:
    """Returns a plan for each table, all with one choice: the common choice with the least sum of times. `dense`: without
    sparse tactics.

    Tables: of one network at several batches, with the same formats outside. Raises ModelError if they have no choice in
    common.
    """
    name = f"{tables[0].network.name}: batches {', '.join(str(t.network.inputs[0].shape[0]) for t in tables)}"
    name += " have no plan in common that gives an image the same bits"
    cure = "; axes of size 1 vanish: begin with batch 2" if tables[0].network.inputs[0].shape[0] == 1 else ""
    if any(t.network.groups != tables[0].network.groups or t.graph.pinned != tables[0].graph.pinned for t in tables):
        raise ModelError(f"{name}: formats outside, or fusion options, differ{cure}")
    places = [{(op.name, op.when, op.inputs, op.output): i for i, op in enumerate(t.network.ops)} for t in tables]
    found, known = dict[Place, _Shared](), dict[tuple, _Shared]()
    for place in places[0]:
        if all(place in own for own in places):
            at = [(t.network.ops[own[place]].problem, t.times[own[place]]) for t, own in zip(tables, places, strict=True)]
            alike = tuple((p, id(times)) for p, times in at)
            if alike not in known:
                known[alike] = _shared(tables, at)
            found[place] = known[alike]
    try:
        best = plan.solve(_graph(tables, places, found), force=without_sparse(tables[0].network) if dense else None)
    except Impossible as e:
        raise ModelError(f"{name}: {e}{cure}") from None
    return [_own(table, i, best, found) for i, table in enumerate(tables)]


def _shared(tables: Sequence[Table], at: Sequence[tuple[Problem, Times]]) -> _Shared:
    every = [{steady(t): t for t in times} for _, times in at]
    costs = [cost_of(t.device, t.how.risk) for t in tables]
    found: _Shared = {}
    for alike, first in every[0].items():
        own = tuple(e[alike] for e in every if alike in e)
        how = {(order(p, t), addresses(p, t)) for (p, _), t in zip(at, own, strict=False)}
        if len(own) == len(at) and len(how) == 1 and None not in next(iter(how)):
            ps = sum(cost(p, t, rows[t]) for cost, (p, rows), t in zip(costs, at, own, strict=True))
            found[first] = Time(to_us(ps), 0.0, 0.0), own
    return found


def _graph(tables: Sequence[Table], places: Sequence[Mapping[Place, int]], found: Mapping[Place, _Shared]) -> Graph:
    """Makes the graph of the choices that all points have; an entry's time, and a reformat's, is the sum over the points.

    An op that some point lacks has no entries, so that no plan has it.
    """
    network, graphs = tables[0].network, [t.graph for t in tables]
    formats = dict(graphs[0].formats)
    for t, keys in graphs[0].formats.items():
        formats[t] = tuple(k for k in keys if all(k in g.formats.get(t, keys) for g in graphs)) or keys
    inside = {t: tuple(k for k in keys if k.home) for t, keys in formats.items()}
    times = [{t: time for t, (time, _) in found.get(place, {}).items()} for place in places[0]]
    made = []
    for place, choice in zip(places[0], choices(network, times, inside, lambda p, t, time: to_ps(time.us)), strict=True):
        at = [g.choices[own[place]] for g, own in zip(graphs, places, strict=True)] if place in found else []
        free = [{(e.ins, e.out) for e in c.entries if e.tactic is None} for c in at]
        able = (e for e in choice.entries if at and (e.tactic or all((e.ins, e.out) in cells for cells in free)))
        made.append(replace(choice, entries=tuple(able)))
    for name, when, _, _ in dict.fromkeys(place for own in places[1:] for place in own if place not in places[0]):
        lacking = f"{name} of another batch"
        made.append(Choice(lacking, (), lacking, (), when))
        formats[lacking] = next(iter(formats.values()))

    def reformat_ps(tensor: str, src: Key, dst: Key) -> int | None:
        ps = [g.reformat_ps(tensor, src, dst) for g in graphs if {src, dst} <= {*g.formats.get(tensor, ())}]
        return None if None in ps else sum(filter(None, ps))

    return replace(graphs[0], choices=tuple(made), formats=formats, reformat_ps=reformat_ps)


def _own(table: Table, point: int, best: Plan, found: Mapping[Place, _Shared]) -> Plan:
    """Returns the common choice with the tactics and times of one point."""
    entries, cost = dict[str, Entry](), cost_of(table.device, table.how.risk)
    for op, times in zip(table.network.ops, table.times, strict=True):
        if entry := best.entry_of(op.name, op.when):
            if entry.tactic is not None:
                tactic = found[op.name, op.when, op.inputs, op.output][entry.tactic][1][point]
                ps = cost(op.problem, tactic, times[tactic])
                entry = replace(entry, tactic=tactic, time_ps=ps, premium_ps=ps - to_ps(times[tactic].us))
            entries[op.name] = entry
    total = sum(e.time_ps for e in entries.values()) + sum(table.graph.reformat_ps(*hop) or 0 for hop in best.reformats)
    return replace(best, entries=entries, total_ps=total)
