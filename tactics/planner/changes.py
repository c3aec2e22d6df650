"""What a plan has otherwise than another: found, and applied, at the cost of what changes rather than of the whole plan."""

from __future__ import annotations

from collections import ChainMap, Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from tactics.planner import formulation
from tactics.planner.graph import Entry, Graph, Plan, holds
from tactics.planner.reformats import cost


@dataclass(frozen=True, slots=True)
class Change:
    """What a plan has otherwise than another: `options`, group -> the option taken; `entries`, op -> its entry, or None where
    it no longer exists; `gone`, `new`: the reformats that only one of the two has. `total_ps`: what the changed plan takes."""

    options: Mapping[str, str]
    entries: Mapping[str, Entry | None]
    gone: tuple[tuple[str, str, str], ...]
    new: tuple[tuple[str, str, str], ...]
    total_ps: int


class Changes:
    """Tells what states of a few variables change in a plan, at the cost of what changes."""

    def __init__(self, graph: Graph, model: formulation.Model, states: tuple[int, ...], width: int):
        self.graph, self.model = graph, model
        self.plan = formulation.read(graph, model, states, "elimination", width)
        self.value = [model.domains[v][s] for v, s in enumerate(states)]
        self.names = {v: name for name, (v, _) in model.groups.items()}
        self.entry: list[Entry | None] = []  # per choice
        self.made: dict[str, str] = {t: graph.pinned[t] for t in graph.inputs}
        self.wanted: dict[str, Counter[str]] = {t: Counter() for t in model.copies}  # tensor -> formats read, how often
        self.near: dict[int, list[int]] = {}  # variable -> the choices that depend on it
        self.hops: dict[str, list[tuple[str, str, str]]] = {}
        for t in graph.outputs:
            if t in graph.pinned:
                self.wanted[t][graph.pinned[t]] += 1
        for i, c in enumerate(graph.choices):
            for v in {*formulation.tensors(graph, model, i), *(model.groups[g][0] for g, _ in c.when)}:
                self.near.setdefault(v, []).append(i)
            entry = self.plan.entries[c.name] if holds(c.when, self.plan.options) else None
            self.entry.append(entry)
            if entry is not None:
                self.made[c.output] = entry.out
                for t, f in zip(c.inputs, entry.ins, strict=True):
                    self.wanted[t][f] += 1
        for hop in self.plan.reformats:
            self.hops.setdefault(hop[0], []).append(hop)

    def of(self, states: Mapping[int, int], cells: Mapping[int, Mapping[tuple, Entry]]) -> Change:
        """`states`: variable -> state, where it differs; `cells`: of the choices that have other cells than in the model."""
        graph, model = self.graph, self.model
        value = {v: model.domains[v][s] for v, s in states.items()}
        options = {self.names[v]: option for v, option in value.items() if v in self.names}
        taken = ChainMap(options, self.plan.options)
        changed: dict[int, Entry | None] = {}
        for i in dict.fromkeys((*cells, *(i for v in states for i in self.near.get(v, ())))):
            entry = None
            if holds(graph.choices[i].when, taken):
                *ins, out = (value.get(v, self.value[v]) for v in formulation.tensors(graph, model, i))
                entry = cells.get(i, model.cells[i])[tuple(ins), out]
            if entry != self.entry[i]:
                changed[i] = entry
        made: dict[str, str | None] = {}
        wanted: dict[str, Counter[str]] = {}
        for side, by in ((self.entry, -1), (changed, +1)):
            for i in changed:
                c, entry = graph.choices[i], side[i]
                if entry is not None:
                    made[c.output] = entry.out if by > 0 else None
                    for t, f in zip(c.inputs, entry.ins, strict=True):
                        wanted.setdefault(t, self.wanted[t].copy())[f] += by
        total, gone, new = self.plan.total_ps, [], []
        for i, entry in changed.items():
            total += (entry.time_ps if entry else 0) - (self.entry[i].time_ps if self.entry[i] else 0)
        for t in dict.fromkeys((*made, *wanted)):
            formats = {f for f, n in wanted.get(t, self.wanted[t]).items() if n}
            source = made.get(t, self.made.get(t))
            hops = [(t, *hop) for hop in model.copies[t].hops(source, formats)] if formats - {source} else []
            before = self.hops.get(t, [])
            gone += [hop for hop in before if hop not in hops]
            new += [hop for hop in hops if hop not in before]
        total += sum(graph.reformat_ps(*hop) for hop in new) - sum(graph.reformat_ps(*hop) for hop in gone)
        entries = {graph.choices[i].name: None for i in changed}
        entries |= {graph.choices[i].name: entry for i, entry in changed.items() if entry is not None}
        return Change(options, entries, tuple(gone), tuple(new), total)


def changed(graph: Graph, plan: Plan, change: Change) -> Plan:
    """The whole plan that a change makes of a plan."""
    options = {**plan.options, **change.options}
    found = {**plan.entries, **change.entries}
    entries = {c.name: found[c.name] for c in graph.choices if holds(c.when, options)}
    total, reformats = cost(graph, options, entries)
    return replace(plan, entries=entries, options=options, reformats=reformats, total_ps=total)


def difference(before: Plan, after: Plan) -> Change:
    """The change that makes `after` of `before`."""
    names = {name: None for name in (*before.entries, *after.entries) if before.entries.get(name) != after.entries.get(name)}
    return Change(
        {g: o for g, o in after.options.items() if before.options[g] != o}, {n: after.entries.get(n) for n in names},
        tuple(h for h in before.reformats if h not in set(after.reformats)),
        tuple(h for h in after.reformats if h not in set(before.reformats)), after.total_ps,
    )  # fmt: skip
