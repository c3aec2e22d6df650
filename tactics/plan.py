"""The fastest plan: one tactic per op, one format per tensor, one option per fusion group, reformats included.

In: every entry (tactic x formats) with its time. Out: the assignment with the least serial sum, proven minimal for
those times or marked with the gap that remains. Formats are opaque keys; all times are integer picoseconds.

A tensor is produced once, in one format, and its other formats are made by reformats: from the produced one or from
one made before, so a chain's first hop serves whoever wants that format too. Each (tensor, target format) is made and
charged once, however many ops read it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from tactics import eliminate

NEVER = 1 << 60  # a time of this much or more, in picoseconds: cannot run
WIDE_CELLS = 10_000  # an op whose formats combine in more ways is described cell by cell
MAX_FORMATS = 12  # per tensor: its table of reformats has 2**formats rows

Literals = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Entry:
    """One way to run an op: `ins`, `out` are format keys, one per input position. (tactic, ins, out) is unique."""

    tactic: str
    ins: tuple[str, ...]
    out: str
    time_ps: int
    sparse: bool = False


@dataclass(frozen=True, slots=True)
class Choice:
    """An op that is in the plan when all literals (group, option) of `when` hold; two of one group mean either.

    Choices that never hold together may share a name, and may produce the same tensor.
    """

    name: str
    inputs: tuple[str, ...]
    output: str
    entries: tuple[Entry, ...]
    when: Literals = ()


@dataclass(frozen=True, slots=True)
class Graph:
    """What may run. A tensor whose producer is not in the plan is absent, and so must be all its readers.

    `groups`: (fusion group, options), exactly one option taken. `pinned`: the format in which a network input exists
    (all are pinned), and in which a network output must be delivered (else: as it is produced). `formats`: per tensor
    those it may take; entries with others are left out. `reformat_ps(tensor, src, dst)`: NEVER or None: there is none.
    """

    choices: tuple[Choice, ...]
    groups: tuple[tuple[str, tuple[str, ...]], ...]
    pinned: Mapping[str, str]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    formats: Mapping[str, tuple[str, ...]]
    reformat_ps: Callable[[str, str, str], int | None]


@dataclass(frozen=True, slots=True)
class Plan:
    """`entries`: op name -> entry, for the ops that exist, in the graph's order; `options`: group -> option taken.

    `reformats`: (tensor, src, dst) hops, src != dst, each (tensor, dst) once and after the hop that makes its src; a
    hop of 0 ps is listed too. `total_ps`: the sum of both. `status`: "proven" or "gap"; `gap`: (total - lower bound) /
    total, 0.0 when proven, inf where no bound was computed (rivals). `method`: "elimination", "milp", a rival's name.
    """

    entries: Mapping[str, Entry]
    options: Mapping[str, str]
    reformats: tuple[tuple[str, str, str], ...]
    total_ps: int
    status: str
    method: str
    width: int
    gap: float


Force = Mapping[str, Callable[[Entry], bool]]


# ---- solving


def solve(graph: Graph, *, force: Force | None = None, max_cells: int = 20_000_000, milp_seconds: float = 60.0) -> Plan:
    """The plan with the least total time; ties go to fewer launches, then fewer sparse tactics, then a fixed order.

    `force`: op name -> which of its entries are allowed (a counterfactual). A layer that fusion puts into several ops
    must be forced in each of their names. Above `max_cells` table cells HiGHS takes over; its proof is exact up to its
    own floating-point bound, elimination's is integer arithmetic. If HiGHS runs out of `milp_seconds` the plan found by
    then depends on the machine's speed. ValueError: the graph is malformed, or no plan exists (says which op).
    """
    _check(graph)
    return _solve(_forced(graph, force or {}), max_cells, milp_seconds, (greedy, best_single_format))


def _solve(graph: Graph, max_cells: int, milp_seconds: float, rivals: tuple[Callable, ...]) -> Plan:
    """`rivals` stand in where HiGHS found no plan or a worse one."""
    scale, launch, sparse = _scale(graph)
    model = _model(graph, scale, launch, sparse)
    found = eliminate.minimise(model.sizes, model.factors, quantum=scale, max_cells=max_cells, seconds=milp_seconds)
    if found.bound >= eliminate.NEVER:
        raise ValueError(_why_none(graph))
    bound_ps = found.bound // scale
    plans = []
    if found.states is not None and found.cost < eliminate.NEVER:
        plan = _read(graph, model, found)
        # HiGHS, stopped early, may hold a set of reformats that is not the cheapest for its formats; `_read` takes that.
        if plan.total_ps > found.cost // scale or plan.total_ps < bound_ps:
            raise RuntimeError(f"planner: plan costs {plan.total_ps} ps, the solver said {found.cost // scale} ps")
        plans.append(plan)
    if found.method == "milp" and (not plans or plans[0].total_ps > bound_ps):
        others = [_attempt(rival, graph) for rival in rivals]
        plans += [replace(p, method="milp", width=found.width) for p in others if p is not None]
    if not plans:
        raise ValueError(f"no plan found within {milp_seconds} s, though one may exist: raise max_cells or the time")
    plan = min(plans, key=lambda p: p.total_ps)
    if plan.total_ps <= bound_ps:
        return replace(plan, status="proven", gap=0.0)
    return replace(plan, status="gap", gap=(plan.total_ps - bound_ps) / plan.total_ps)


def _scale(graph: Graph) -> tuple[int, int, int]:
    """(what a picosecond, a launch and a sparse entry cost): ties are decided below one picosecond."""
    n = len(graph.choices)
    scale = 1 + (n + 1) * (n + 1 + sum(len(_formats(graph, t)) for t in _tensors(graph)))
    worst = _worst_ps(graph)
    if (worst + 1) * scale >= eliminate.NEVER:
        scale = 1  # times too long for that: ties are then broken by order alone
        if worst >= eliminate.NEVER // 2:
            raise ValueError(f"times add up to {worst} ps, more than the planner's {eliminate.NEVER // 2} ps")
    return (scale, n + 1, 1) if scale > 1 else (1, 0, 0)


def forced(graph: Graph, wanted: Iterable[tuple[tuple[str, ...], bool]], *, max_cells: int = 20_000_000) -> list[int | None]:
    """For each (ops, sparse): the least total in picoseconds when these ops, wherever they exist, run only sparse (or
    only dense) entries; None where that is impossible. `ops` are the alternatives of one layer: one of them exists in
    every plan. Equal to `solve` with `force`, for all of them from one pass up and one down the elimination tree.
    """
    wanted = list(wanted)
    _check(graph)
    scale, launch, sparse = _scale(graph)
    model = _model(graph, scale, launch, sparse)
    swaps, owners = [], []
    for w, (names, want) in enumerate(wanted):
        for i, c in enumerate(graph.choices):
            if c.name not in names:
                continue
            variables = model.factors[model.ops[i]][0]
            domains = [model.domains[v] for v in variables[len(variables) - len(c.inputs) - 1 :]]
            table = np.full([len(d) for d in domains], eliminate.NEVER, np.int64)
            if table.ndim != len(c.inputs) + 1 or model.factors[model.ops[i]][1].shape[-table.ndim :] != table.shape:
                return [_forced_alone(graph, *pair) for pair in wanted]  # an op with a variable for its cell
            for (ins, out), e in _cells(graph, replace(c, entries=tuple(e for e in c.entries if e.sparse == want))).items():
                state = tuple(d.index(f) for d, f in zip(domains, (*ins, out), strict=True))
                table[state] = e.time_ps * scale + launch + sparse * e.sparse
            swaps.append((model.ops[i], _where_taken(graph, c, table, eliminate.NEVER)))
            owners.append(w)
    found = eliminate.replaced(model.sizes, model.factors, swaps, max_cells=max_cells)
    if found is None:
        return [_forced_alone(graph, *pair) for pair in wanted]
    best = [eliminate.NEVER] * len(wanted)
    for w, total in zip(owners, found, strict=True):
        best[w] = min(best[w], total)
    return [None if b >= eliminate.NEVER else b // scale for b in best]


def _forced_alone(graph: Graph, names: tuple[str, ...], sparse: bool) -> int | None:
    plan = _attempt(solve, graph, force={name: (lambda e: e.sparse == sparse) for name in names})
    return plan and plan.total_ps


def prune(graph: Graph) -> Graph:
    """Per op and formats only the cheapest dense and the cheapest sparse entry: the same plans, also when one forces
    dense or sparse, in less time per solve."""
    choices = []
    for choice in graph.choices:
        best: dict[tuple, Entry] = {}
        for e in choice.entries:
            cell = (e.ins, e.out, e.sparse)
            if cell not in best or (e.time_ps, e.tactic) < (best[cell].time_ps, best[cell].tactic):
                best[cell] = e
        choices.append(replace(choice, entries=tuple(best.values())))
    return replace(graph, choices=tuple(choices))


# ---- rivals, to print beside the plan


def greedy(graph: Graph) -> Plan:
    """Each op's fastest entry and each group's fastest option by that rule, then whatever reformats that takes."""
    _check(graph)
    fastest: dict[int, Entry] = {}
    for i, choice in enumerate(graph.choices):
        cells = _cells(graph, choice)
        if cells:
            fastest[i] = min(cells.values(), key=lambda e: (e.time_ps, e.sparse, e.tactic, e.ins, e.out))

    def attempt(options) -> tuple[int, int] | None:
        live = [i for i, c in enumerate(graph.choices) if holds(c.when, options)]
        if any(i not in fastest for i in live) or not _connected(graph, [graph.choices[i] for i in live]):
            return None
        return sum(fastest[i].time_ps for i in live), len(live)

    options = {group: names[0] for group, names in graph.groups}
    for group, names in graph.groups:
        ranked = [(attempt(options | {group: name}), k, name) for k, name in enumerate(names)]
        possible = [r for r in ranked if r[0] is not None]
        if possible:
            options[group] = min(possible)[2]
    if attempt(options) is None:
        raise ValueError("greedy: the fastest entries and options make no complete plan")
    entries = {c.name: fastest[i] for i, c in enumerate(graph.choices) if holds(c.when, options)}
    return _rival(graph, options, entries, "greedy")


def best_single_format(graph: Graph, names: Mapping[str, Mapping[str, tuple[str, ...]]] | None = None) -> Plan | None:
    """The best plan in which every tensor has one and the same format wherever its ops allow; None if there is none.

    `names`: format name -> {tensor: its keys under that name}, as one format has different keys on different tensors,
    and in different places; without it, equal keys are one format.
    """
    _check(graph)
    if names is None:
        keys = dict.fromkeys(key for t in _tensors(graph) for key in _formats(graph, t))
        names = {key: dict.fromkeys(_tensors(graph), (key,)) for key in keys}
    plans = []
    for name, key in names.items():
        choices = []
        for c in graph.choices:
            usable = tuple(_cells(graph, c).values())
            fit = [sum(f in key.get(t, ()) for t, f in zip(c.inputs, e.ins, strict=True)) for e in usable]
            fit = [n + (e.out in key.get(c.output, ())) for n, e in zip(fit, usable, strict=True)]
            best = max(fit, default=0)
            choices.append(replace(c, entries=tuple(e for n, e in zip(fit, usable, strict=True) if n == best)))
        narrow = replace(graph, choices=tuple(choices))
        found = _attempt(_solve, narrow, 1_000_000, 5.0, ())
        if found is not None:
            plans.append(_rival(graph, found.options, found.entries, f"single format {name}"))
    return min(plans, key=lambda p: p.total_ps, default=None)


def _rival(graph, options, entries, method: str) -> Plan:
    total, reformats = cost(graph, options, entries)
    return Plan(entries, options, reformats, total, "gap", method, 0, math.inf)


def _attempt(function, *args) -> Plan | None:
    try:
        return function(*args)
    except ValueError:
        return None


# ---- what a plan costs


def cost(
    graph: Graph, options: Mapping[str, str], entries: Mapping[str, Entry]
) -> tuple[int, tuple[tuple[str, str, str], ...]]:
    """(total_ps, reformats): the least that these entries cost, with the reformats for it. ValueError: none will do."""
    live = [c for c in graph.choices if holds(c.when, options)]
    made = {t: graph.pinned[t] for t in graph.inputs} | {c.output: entries[c.name].out for c in live}
    wanted: dict[str, list[str]] = {t: [] for t in _tensors(graph)}
    for c in live:
        for t, f in zip(c.inputs, entries[c.name].ins, strict=True):
            wanted[t].append(f)
    for t in graph.outputs:
        wanted[t].append(graph.pinned.get(t, made.get(t)))
    for t, formats in wanted.items():
        if formats and t not in made:
            raise ValueError(f"tensor {t} is read, but no op in the plan produces it")
    todo = [t for t, formats in wanted.items() if set(formats) - {made.get(t)}]
    copies = _copies(graph, todo, 1, 0)
    reformats = []
    for t in todo:
        hops = copies[t].hops(made[t], wanted[t])
        if hops is None:
            raise ValueError(f"tensor {t}: no reformats lead from {made[t]} to {', '.join(sorted(set(wanted[t])))}")
        reformats += [(t, src, dst) for src, dst in hops]
    total = sum(entries[c.name].time_ps for c in live) + sum(graph.reformat_ps(*hop) for hop in reformats)
    return total, tuple(reformats)


def evaluate(graph: Graph, plan: Plan) -> int:
    """The plan's total in picoseconds, from the graph and the plan alone. ValueError: not a plan of this graph."""
    live = [c for c in graph.choices if holds(c.when, plan.options)]
    if [c.name for c in live] != list(plan.entries):
        raise ValueError(f"plan has ops {list(plan.entries)}, its options make {[c.name for c in live]}")
    has = {(t, graph.pinned[t]) for t in graph.inputs}
    for c in live:
        if plan.entries[c.name] not in c.entries:
            raise ValueError(f"op {c.name} has no entry {plan.entries[c.name]}")
        has.add((c.output, plan.entries[c.name].out))
    total = sum(e.time_ps for e in plan.entries.values())
    for t, src, dst in plan.reformats:
        if (t, src) not in has or (t, dst) in has:
            raise ValueError(f"reformat of {t} from {src} to {dst}: source missing, or target there already")
        has.add((t, dst))
        total += graph.reformat_ps(t, src, dst)
    needs = [(t, f) for c in live for t, f in zip(c.inputs, plan.entries[c.name].ins, strict=True)]
    needs += [(t, graph.pinned[t]) for t in graph.outputs if t in graph.pinned]
    for t, f in needs:
        if (t, f) not in has:
            raise ValueError(f"tensor {t} is wanted in {f}, which nothing makes")
    lost = set(graph.outputs) - {t for t, _ in has}
    if lost:
        raise ValueError(f"network outputs {sorted(lost)} are not produced")
    return total


# ---- reformats of one tensor


@dataclass(frozen=True, slots=True)
class _Copies:
    """A tensor's reformats, costs by sets of formats (bit i: formats[i]) and by the produced format p.

    `step[a, b]`: one hop. `near[A, f]`: cheapest hop into f from a member of A. `exact[A, p]`: making exactly the set
    A, which holds p. `serve[A, p]`: making at least A; its reformats may pass through formats that nobody reads.
    """

    formats: tuple[str, ...]
    step: np.ndarray
    near: np.ndarray
    exact: np.ndarray
    serve: np.ndarray

    def mask(self, formats: Iterable[str]) -> int:
        mask = 0
        for f in formats:
            mask |= 1 << self.formats.index(f)
        return mask

    def hops(self, produced: str, wanted: Iterable[str]) -> list[tuple[str, str]] | None:
        """Cheapest (src, dst) list that makes `wanted` out of `produced`, sources first; None: impossible."""
        p, need = self.formats.index(produced), self.mask(wanted)
        least = int(self.serve[need, p])
        if least >= eliminate.NEVER:
            return None
        sets = [a for a in range(len(self.exact)) if a & need == need and self.exact[a, p] == least]
        made = min(sets, key=lambda a: (a.bit_count(), a))
        hops = []
        while made != 1 << p:  # take the formats off again, last made first
            members = [f for f in range(len(self.formats)) if made >> f & 1]
            for f in members:
                before = made & ~(1 << f)
                if f != p and self.exact[before, p] + self.near[before, f] == self.exact[made, p]:
                    src = min((a for a in members if a != f), key=self.step[:, f].__getitem__)
                    hops.append((self.formats[src], self.formats[f]))
                    made = before
                    break
        return hops[::-1]


def _copies(graph: Graph, tensors: list[str], scale: int, launch: int) -> dict[str, _Copies]:
    """The reformat tables of these tensors, a hop costing its picoseconds * scale + launch. All tensors with the same
    number of formats are computed in one go, as arrays with the tensor in front."""
    found: dict[str, _Copies] = {}
    by_size: dict[int, list[str]] = {}
    for t in tensors:
        by_size.setdefault(len(_formats(graph, t)), []).append(t)
    for n, ts in by_size.items():
        step = np.array([_steps(graph, t, scale, launch) for t in ts], np.int64).reshape(len(ts), n, n)
        near = np.full((len(ts), 1 << n, n), eliminate.NEVER, np.int64)
        exact = np.full((len(ts), 1 << n, n), eliminate.NEVER, np.int64)
        for a in range(1, 1 << n):
            members = np.array([f for f in range(n) if a >> f & 1])
            near[:, a] = np.minimum(near[:, a & (a - 1)], step[:, members[0]])
            if len(members) == 1:
                exact[:, a, members[0]] = 0
            else:  # whichever of them was made last
                before = a ^ (1 << members)
                ways = exact[:, before] + near[:, before, members][..., None]
                exact[:, a] = np.minimum(ways.min(axis=1), eliminate.NEVER)
        serve = exact.copy()
        for f in range(n):  # minimum over supersets, one format at a time
            pairs = serve.reshape(len(ts), -1, 2, 1 << f, n)
            np.minimum(pairs[:, :, 0], pairs[:, :, 1], out=pairs[:, :, 0])
        for i, t in enumerate(ts):
            found[t] = _Copies(_formats(graph, t), step[i], near[i], exact[i], serve[i])
    return found


def _steps(graph: Graph, tensor: str, scale: int, launch: int) -> list[list[int]]:
    formats = _formats(graph, tensor)
    rows = []
    for src in formats:
        times = [0 if src == dst else graph.reformat_ps(tensor, src, dst) for dst in formats]
        if any(ps is not None and ps < 0 for ps in times):
            raise ValueError(f"tensor {tensor}: a reformat from {src} takes negative time")
        rows.append([eliminate.NEVER if ps is None or ps >= NEVER else ps * scale + launch for ps in times])
    return rows


# ---- the graph as variables and tables


@dataclass(frozen=True, slots=True)
class _Model:
    """Variables: first one per group (its options), then per tensor the format it is produced in, one per reading slot
    (the format read there), from three slots on the set of formats it is made in; and the cell of an op that has
    many tensors."""

    sizes: list[int]
    factors: list[eliminate.Factor]
    domains: list[tuple]  # per variable, what its states stand for; None: the tensor is absent
    produced: dict[str, int]  # tensor -> variable
    read: dict[tuple[int, int], int]  # (choice, input position) -> variable
    cells: list[dict[tuple, Entry]]  # per choice: (ins, out) -> cheapest entry
    ops: list[int]  # per choice: number of its factor


def _model(graph: Graph, scale: int, launch: int, sparse: int) -> _Model:
    groups = [name for name, _ in graph.groups]
    cells = [_cells(graph, c) for c in graph.choices]
    model = _Model([], [], [], {}, {}, cells, [])
    copies = _copies(graph, _tensors(graph), scale, launch)
    for _, names in graph.groups:
        _variable(model, names)

    makers: dict[str, list[int]] = {t: [] for t in _tensors(graph)}
    readers: dict[str, list[tuple[int, int]]] = {t: [] for t in _tensors(graph)}  # (choice, input position)
    for i, c in enumerate(graph.choices):
        makers[c.output].append(i)
        for k, t in enumerate(c.inputs):
            readers[t].append((i, k))
    for t in _tensors(graph):
        formats = _formats(graph, t)
        if t in graph.inputs:
            whens, domain = [()], {graph.pinned[t]}
        else:
            whens = [graph.choices[i].when for i in makers[t]]
            domain = {e.out for i in makers[t] for e in cells[i].values()}
        model.produced[t] = p = _variable(model, _domain(graph, formats, domain, whens, t in graph.outputs))
        model.factors.append(_presence(graph, model, p, whens))

        slots = []
        for slot in _slots(graph, readers[t]):  # ops that never exist together read through one slot
            whens = [graph.choices[i].when for i, _ in slot]
            domain = {ins[k] for i, k in slot for ins, _ in cells[i]}
            v = _variable(model, _domain(graph, formats, domain, whens))
            slots.append(v)
            model.read.update(dict.fromkeys(slot, v))
        if t in graph.outputs and t in graph.pinned:
            slots.append(_variable(model, (graph.pinned[t],)))
        _add_reformats(model, copies[t], p, slots)

    for i, c in enumerate(graph.choices):
        tensors = [*(model.read[i, k] for k in range(len(c.inputs))), model.produced[c.output]]
        costs = {(*ins, out): e.time_ps * scale + launch + sparse * e.sparse for (ins, out), e in cells[i].items()}
        variables, table = _op_table(model, tensors, costs, bool(c.when))
        over = [groups.index(g) for g in groups if any(g == name for name, _ in c.when)]
        model.ops.append(len(model.factors))
        model.factors.append(((*over, *variables), _where_taken(graph, c, table, 0)))
    return model


def _where_taken(graph: Graph, choice: Choice, table: np.ndarray, elsewhere: int) -> np.ndarray:
    """`table` with an axis in front for each group in the op's `when`, and `elsewhere` where the op does not exist."""
    over = [names for name, names in graph.groups if any(name == g for g, _ in choice.when)]
    named = [name for name, _ in graph.groups if any(name == g for g, _ in choice.when)]
    if not over:
        return table
    taken = [[s for s, o in enumerate(names) if (g, o) in choice.when] for g, names in zip(named, over, strict=True)]
    full = np.full([*(len(names) for names in over), *table.shape], elsewhere, np.int64)
    full[np.ix_(*taken)] = table
    return full


def _op_table(model: _Model, tensors: list[int], costs: dict[tuple, int], optional: bool) -> tuple[list[int], np.ndarray]:
    """(variables, table): what an op costs in each of its cells. An op with so many tensors that the table over all of
    their formats is large gets a variable for its cell (`optional` ops: or for none), and a small table per tensor."""
    where = [{f: s for s, f in enumerate(model.domains[v])} for v in tensors]
    states = [tuple(place[f] for place, f in zip(where, cell, strict=True)) for cell in costs]
    if math.prod(model.sizes[v] for v in tensors) <= WIDE_CELLS:
        table = np.full([model.sizes[v] for v in tensors], eliminate.NEVER, np.int64)
        for state, value in zip(states, costs.values(), strict=True):
            table[state] = value
        return tensors, table
    picked = _variable(model, (*costs, None) if optional else costs)
    for k, v in enumerate(tensors):
        agrees = np.full((model.sizes[picked], model.sizes[v]), eliminate.NEVER, np.int64)
        agrees[np.arange(len(states)), np.array([state[k] for state in states], int)] = 0
        agrees[len(states) :] = 0
        model.factors.append(((picked, v), agrees))
    return [picked], np.array([*costs.values()] + [eliminate.NEVER] * optional, np.int64)


def _presence(graph: Graph, model: _Model, produced: int, whens: list[Literals]) -> eliminate.Factor:
    """The tensor is absent exactly where none of its makers exists. (Readers need no such table: one that exists has
    no cell for an absent tensor, and one that does not gains nothing by reading.)"""
    over = [(v, name, names) for v, (name, names) in enumerate(graph.groups) if name in {g for w in whens for g, _ in w}]
    states = itertools.product(*(names for _, _, names in over))
    taken = ({name: option for (_, name, _), option in zip(over, state, strict=True)} for state in states)
    there = np.array([any(holds(when, options) for when in whens) for options in taken])
    is_format = np.array([f is not None for f in model.domains[produced]])
    table = np.where(there[:, None] == is_format, 0, eliminate.NEVER)
    sizes = [model.sizes[v] for v, _, _ in over]
    return (*(v for v, _, _ in over), produced), table.reshape(*sizes, len(is_format))


def _variable(model: _Model, domain: Iterable) -> int:
    model.domains.append(tuple(domain))
    model.sizes.append(len(model.domains[-1]))
    return len(model.sizes) - 1


def _domain(graph, formats, used, whens, needed: bool = False) -> tuple:
    """The formats in use, in the tensor's order, and None where the tensor or reader may be absent."""
    domain = tuple(f for f in formats if f in used)
    if not needed and not _always(graph, whens):
        return (*domain, None)
    if not domain:
        raise ValueError(_why_none(graph))
    return domain


def _add_reformats(model: _Model, copies: _Copies, p: int, slots: list[int]) -> None:
    """What the formats read at `slots` cost beyond the one produced: one table for two slots that are free to differ,
    else a variable for the set made, which each slot's format must be in."""

    def masks(v: int) -> np.ndarray:
        return np.array([0 if f is None else copies.mask([f]) for f in model.domains[v]], np.int64)

    def table(sets: np.ndarray) -> np.ndarray:
        """Cost over (produced, *sets.shape); from an absent tensor nothing can be made."""
        rows = [
            np.where(sets == 0, 0, eliminate.NEVER) if f is None else copies.serve[sets, copies.formats.index(f)]
            for f in model.domains[p]
        ]
        return np.stack(rows)

    free = [v for v in dict.fromkeys(slots) if model.sizes[v] > 1]
    fixed = 0
    for v in slots:
        if v not in free:
            fixed |= int(masks(v)[0])
    if len(free) <= 2:
        sets = np.array(fixed, np.int64)
        for v in free:
            sets = sets[..., None] | masks(v)
        model.factors.append(((p, *free), table(sets)))
        return
    bits = sorted({int(m) for v in free for m in masks(v)} - {0})
    sets = [fixed]
    for bit in bits:
        sets += [s | bit for s in sets if not s & bit]
    sets = [s for s in sorted(sets) if (s & ~fixed).bit_count() <= len(free)]
    made = _variable(model, sets)
    sets = np.array(sets, np.int64)
    model.factors.append(((p, made), table(sets)))
    for v in free:
        lacks = (masks(v)[:, None] & ~sets) != 0
        model.factors.append(((v, made), np.where(lacks, eliminate.NEVER, 0)))


def _read(graph: Graph, model: _Model, found: eliminate.Solution) -> Plan:
    """The solver's states as a plan, with the cheapest reformats for it."""
    value = [model.domains[v][s] for v, s in enumerate(found.states)]
    options = {name: value[v] for v, (name, _) in enumerate(graph.groups)}
    entries = {}
    for i, c in enumerate(graph.choices):
        if holds(c.when, options):
            ins = tuple(value[model.read[i, k]] for k in range(len(c.inputs)))
            entries[c.name] = model.cells[i][ins, value[model.produced[c.output]]]
    total, reformats = cost(graph, options, entries)
    return Plan(entries, options, reformats, total, "gap", found.method, found.width, math.inf)


# ---- reading the graph


def _cells(graph: Graph, choice: Choice) -> dict[tuple, Entry]:
    """(ins, out) -> its cheapest usable entry; ties: dense first, then by name."""
    allowed = [frozenset(_formats(graph, t)) for t in (*choice.inputs, choice.output)]
    best: dict[tuple, Entry] = {}
    for e in choice.entries:
        cell = (e.ins, e.out)
        old = best.get(cell)
        if old is None:
            if e.time_ps < NEVER and all(f in ok for f, ok in zip((*e.ins, e.out), allowed, strict=True)):
                best[cell] = e
        elif e.time_ps <= old.time_ps and (e.time_ps, e.sparse, e.tactic) < (old.time_ps, old.sparse, old.tactic):
            best[cell] = e
    return best


def holds(when: Iterable[tuple[str, str]], options: Mapping[str, str]) -> bool:
    """Is, for each group named in `when`, one of the options named there taken?"""
    return {g for g, _ in when} == {g for g, o in when if options[g] == o}


def _exclusive(a: Literals, b: Literals) -> bool:
    """Can the two never hold together? (Some group allows them different options only.)"""
    return any(not {o for h, o in a if h == g} & {o for h, o in b if h == g} for g in {g for g, _ in a} & {g for g, _ in b})


def _always(graph: Graph, whens: list[Literals]) -> bool:
    """Does at least one of `whens` hold whatever options are taken?"""
    over = sorted({g for when in whens for g, _ in when})
    names = dict(graph.groups)
    return () in whens or all(
        any(holds(when, dict(zip(over, state, strict=True))) for when in whens)
        for state in itertools.product(*(names[g] for g in over))
    )


def _slots(graph: Graph, readers: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    slots: list[list[tuple[int, int]]] = []
    for i, k in readers:
        when = graph.choices[i].when
        for slot in slots:
            if all(_exclusive(when, graph.choices[j].when) for j, _ in slot):
                slot.append((i, k))
                break
        else:
            slots.append([(i, k)])
    return slots


def _tensors(graph: Graph) -> list[str]:
    return list(dict.fromkeys((*graph.inputs, *(c.output for c in graph.choices))))


def _formats(graph: Graph, tensor: str) -> tuple[str, ...]:
    pinned = (graph.pinned[tensor],) if tensor in graph.pinned else ()
    return tuple(dict.fromkeys((*graph.formats.get(tensor, ()), *pinned)))


def _connected(graph: Graph, live: list[Choice]) -> bool:
    made = {*graph.inputs, *(c.output for c in live)}
    return made.issuperset((*graph.outputs, *(t for c in live for t in c.inputs)))


def _worst_ps(graph: Graph) -> int:
    """More than any plan can cost."""
    total = 0
    for c in graph.choices:
        total += max((e.time_ps for e in c.entries if e.time_ps < NEVER), default=0)
    for t in _tensors(graph):
        formats = _formats(graph, t)
        hops = [graph.reformat_ps(t, a, b) for a in formats for b in formats if a != b]
        # A table with two readers may count the set again in each of its cells, never more than all hops at once.
        total += (len(formats) - 1) * max((ps for ps in hops if ps is not None and ps < NEVER), default=0)
    return total


def _forced(graph: Graph, force: Force) -> Graph:
    unknown = sorted(set(force) - {c.name for c in graph.choices})
    if unknown:
        raise ValueError(f"force names ops that the graph does not have: {', '.join(unknown)}")
    choices = []
    for c in graph.choices:
        if c.name in force:
            c = replace(c, entries=tuple(e for e in c.entries if force[c.name](e)))
        choices.append(c)
    return replace(graph, choices=tuple(choices))


def _why_none(graph: Graph) -> str:
    bare = [c.name for c in graph.choices if not _cells(graph, c)]
    if bare:
        return f"no plan exists: no usable entry (after force, in formats its tensors may take) for {', '.join(bare)}"
    return "no plan exists: every op has entries, but no reformats and fusion options connect them"


def _check(graph: Graph) -> None:
    """ValueError with a sentence where the graph contradicts itself."""
    options = dict(graph.groups)
    if len(options) != len(graph.groups) or not all(options.values()):
        raise ValueError("fusion groups must have distinct names and at least one option each")
    for t in graph.pinned:
        if t not in graph.inputs and t not in graph.outputs:
            raise ValueError(f"pinned tensor {t} is neither an input nor an output of the network")
    for t in graph.inputs:
        if t not in graph.pinned:
            raise ValueError(f"network input {t} is not pinned to the format in which it exists")
    makers: dict[str, list[Choice]] = {}
    readers = {t: "the network's output" for t in graph.outputs}
    names: dict[str, list[Choice]] = {}
    for c in graph.choices:
        for g, o in c.when:
            if o not in options.get(g, ()):
                raise ValueError(f"op {c.name} exists when {g} = {o!r}, which is not an option of a group")
        if c.output in graph.inputs:
            raise ValueError(f"network input {c.output} is also produced by {c.name}")
        makers.setdefault(c.output, []).append(c)
        names.setdefault(c.name, []).append(c)
        readers |= dict.fromkeys(c.inputs, c.name)
        for e in c.entries:
            if len(e.ins) != len(c.inputs) or e.time_ps < 0:
                raise ValueError(f"op {c.name}: {e} must have {len(c.inputs)} input formats and no negative time")
    for t, by in readers.items():
        if t not in graph.inputs and t not in makers:
            raise ValueError(f"tensor {t}, read by {by}, is neither a network input nor produced by an op")
    for what, sets in (("produce tensor", makers), ("are named", names)):
        for key, same in sets.items():
            for a, b in itertools.combinations(same, 2):
                if not _exclusive(a.when, b.when):
                    raise ValueError(f"two ops that may exist together {what} {key}: {a.name}, {b.name}")
    for t in _tensors(graph):
        if not 1 <= len(_formats(graph, t)) <= MAX_FORMATS:
            raise ValueError(f"tensor {t} has {len(_formats(graph, t))} formats, expected 1 to {MAX_FORMATS}")
