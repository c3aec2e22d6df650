"""The difference between two plans: found and applied at the cost of the changed parts, not of the whole plan."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tactics.format import Key
from tactics.planner import formulation
from tactics.planner.graph import Cell, Entry, Graph, Hop, Plan, holds
from tactics.planner.grouping import grouped
from tactics.planner.reformats import cost, hop_ps

Cells = Mapping[Cell, Entry]


@dataclass(frozen=True, slots=True)
class Change:
    """The difference of a changed plan from another one.

    `options`: group -> the option that the changed plan takes, where it differs; `entries`: op -> its entry in the changed
    plan, or None for an op that no longer exists; `gone`: reformats that only the other plan has; `new`: reformats that only
    the changed plan has; `total_ps`: the time of the changed plan.
    """

    options: Mapping[str, str]
    entries: Mapping[str, Entry | None]
    gone: tuple[Hop, ...]
    new: tuple[Hop, ...]
    total_ps: int


class Changes:
    """Computes how a plan's total cost and choices change when a few variables change state, without summing the whole plan
    again: the work is proportional to the choices that read these variables."""

    def __init__(self, model: formulation.Model, states: tuple[int, ...], width: int):
        graph = self.graph = model.graph
        self.model = model
        self.plan = formulation.read(model, states, "elimination", width)
        self.value = [model.domains[v][s] for v, s in enumerate(states)]
        self.names = {v: name for name, (v, _) in model.groups.items()}
        self.entry: list[Entry | None] = []  # by choice: its entry in the plan, None where it does not exist
        self.made: dict[str, Key] = {t: graph.pinned[t] for t in graph.inputs}
        self.wanted: dict[str, Counter[Key]] = {t: Counter() for t in model.copies}  # tensor -> format -> number of its readers
        self.near: dict[int, list[int]] = {}  # variable -> the choices that depend on it
        self.hops = grouped((hop[0], hop) for hop in self.plan.reformats)
        for t in graph.outputs:
            if t in graph.pinned:
                self.wanted[t][graph.pinned[t]] += 1
        for i, c in enumerate(graph.choices):
            for v in {*formulation.tensors(model, i), *(model.groups[g][0] for g, _ in c.when)}:
                self.near.setdefault(v, []).append(i)
            entry = self.plan.entries[c.name] if holds(c.when, self.plan.options) else None
            self.entry.append(entry)
            if entry is not None:
                self.made[c.output] = entry.out
                for t, f in zip(c.inputs, entry.ins, strict=True):
                    self.wanted[t][f] += 1

    def of(self, states: Mapping[int, int], cells: Mapping[int, Cells]) -> Change:
        """Returns the change of the plan that these states make.

        `states`: variable -> its new state; `cells`: choice -> its cells, for choices whose entries are restricted.
        """
        graph, model = self.graph, self.model
        value = {v: model.domains[v][s] for v, s in states.items()}
        options = {self.names[v]: option for v, option in value.items() if v in self.names}
        taken = {**self.plan.options, **options}
        changed = self._entries(states, value, taken, cells)
        made, wanted = self._formats(changed)
        gone, new = self._hops(made, wanted)
        total = self.plan.total_ps + sum(_ps(entry) - _ps(self.entry[i]) for i, entry in changed.items())
        total += sum(hop_ps(graph, hop) for hop in new) - sum(hop_ps(graph, hop) for hop in gone)
        entries: dict[str, Entry | None] = {graph.choices[i].name: None for i in changed}
        entries |= {graph.choices[i].name: entry for i, entry in changed.items() if entry is not None}
        return Change(options, entries, tuple(gone), tuple(new), total)

    def _entries(
        self, states: Mapping[int, int], value: Mapping[int, Any], taken: Mapping[str, str], cells: Mapping[int, Cells]
    ) -> dict[int, Entry | None]:
        """Returns choice -> its entry in the changed plan, for the choices whose entry changes; None for an op that no longer
        exists.

        `value`: variable -> its new value; `taken`: group -> option of the changed plan.
        """
        changed: dict[int, Entry | None] = {}
        for i in dict.fromkeys((*cells, *(i for v in states for i in self.near.get(v, ())))):
            entry = None
            if holds(self.graph.choices[i].when, taken):
                *ins, out = (value.get(v, self.value[v]) for v in formulation.tensors(self.model, i))
                entry = cells.get(i, self.model.cells[i])[tuple(ins), out]
            if entry != self.entry[i]:
                changed[i] = entry
        return changed

    def _formats(self, changed: Mapping[int, Entry | None]) -> tuple[dict[str, Key | None], dict[str, Counter[Key]]]:
        """Returns (tensor -> the format in which it is made now, or None; tensor -> how many ops read each of its formats now),
        for the tensors of the changed entries.
        """
        made: dict[str, Key | None] = {}
        wanted: dict[str, Counter[Key]] = {}
        before = {i: self.entry[i] for i in changed}
        for side, by in ((before, -1), (changed, +1)):
            for i, entry in side.items():
                c = self.graph.choices[i]
                if entry is not None:
                    made[c.output] = entry.out if by > 0 else None
                    for t, f in zip(c.inputs, entry.ins, strict=True):
                        wanted.setdefault(t, self.wanted[t].copy())[f] += by
        return made, wanted

    def _hops(self, made: Mapping[str, Key | None], wanted: Mapping[str, Counter[Key]]) -> tuple[list[Hop], list[Hop]]:
        """Returns (the reformats that only the present plan has, the reformats that only the changed plan has)."""
        gone: list[Hop] = []
        new: list[Hop] = []
        for t in dict.fromkeys((*made, *wanted)):
            formats = {f for f, n in wanted.get(t, self.wanted[t]).items() if n}
            source = made.get(t, self.made.get(t))
            hops: list[Hop] = []
            if source is not None and formats - {source}:
                hops = [(t, *hop) for hop in self.model.copies[t].hops(source, formats) or ()]
            before = self.hops.get(t, [])
            gone += [hop for hop in before if hop not in hops]
            new += [hop for hop in hops if hop not in before]
        return gone, new


def _ps(entry: Entry | None) -> int:
    return entry.time_ps if entry else 0


def changed(graph: Graph, plan: Plan, change: Change) -> Plan:
    """Applies a change to a plan and returns the whole new plan."""
    options = {**plan.options, **change.options}
    found = {**plan.entries, **change.entries}
    entries = {c.name: entry for c in graph.choices if holds(c.when, options) and (entry := found[c.name]) is not None}
    total, reformats = cost(graph, options, entries)
    return replace(plan, entries=entries, options=options, reformats=reformats, total_ps=total)


def difference(before: Plan, after: Plan) -> Change:
    """Returns the change from `before` to `after`."""
    names = {name: None for name in (*before.entries, *after.entries) if before.entries.get(name) != after.entries.get(name)}
    return Change(
        {g: o for g, o in after.options.items() if before.options[g] != o},
        {n: after.entries.get(n) for n in names},
        tuple(h for h in before.reformats if h not in set(after.reformats)),
        tuple(h for h in after.reformats if h not in set(before.reformats)),
        after.total_ps,
    )
