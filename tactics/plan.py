"""The fastest plan: one tactic per op, one format per tensor, one option per fusion group, reformats included.

In: every entry (tactic x formats) with its time. Out: the assignment with the least serial sum, proven minimal for
those times or marked with the gap that remains.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from tactics import eliminate
from tactics.graph import (
    Choice,
    Entry,
    Force,
    Graph,
    Literals,
    Plan,
    always,
    cells_of,
    check,
    connected,
    cycle,
    exclusive,
    formats_of,
    holds,
    only,
    tensors_of,
    why_none,
    worst_ps,
)
from tactics.reformats import Copies, copies_of, cost

SMALL_TABLE, FEW = 1000, 8  # larger tables of ops are described by blocks of cells where these are fewer by this factor,
WIDE_CELLS = 10_000  # and from this size on in any case



# ---- solving


def solve(graph: Graph, *, force: Force | None = None, max_cells: int = 20_000_000, milp_seconds: float = 60.0) -> Plan:
    """The plan with the least total time; ties go to fewer launches, then fewer sparse tactics, then a fixed order.

    `force`: op name -> which of its entries are allowed (a counterfactual). A layer that fusion puts into several ops
    must be forced in each of their names. Above `max_cells` table cells HiGHS takes over; its proof is exact up to its
    own floating-point bound, elimination's is integer arithmetic. If HiGHS runs out of `milp_seconds` the plan found by
    then depends on the machine's speed. ValueError: the graph is malformed, or no plan exists (says which op).
    """
    check(graph)
    return _solve(only(graph, force or {}), max_cells, milp_seconds, (greedy, best_single_format))


def _solve(graph: Graph, max_cells: int, milp_seconds: float, rivals: tuple[Callable, ...]) -> Plan:
    """Fusions that are legal alone may close a cycle together: such a combination is forbidden, and all is solved again. Every
    plan with it is cyclic, so the first plan without a cycle is the best of those that can run."""
    closed: list[dict[str, str]] = []
    while True:
        plan = _solve_once(graph, closed, max_cells, milp_seconds, rivals)
        ring = cycle(graph, plan.options)
        if ring is None:
            return plan
        if not ring:
            raise ValueError("the graph has a cycle that no fusion option opens")
        closed.append(ring)


def _solve_once(graph: Graph, closed: list, max_cells: int, milp_seconds: float, rivals: tuple[Callable, ...]) -> Plan:
    """`closed`: combinations of options that may not be taken together; `rivals` stand in where HiGHS found no plan or a
    worse one."""
    scale, launch, sparse = _scale(graph)
    model = _model(graph, scale, launch, sparse)
    model.factors.extend(_forbidden(graph, ring) for ring in closed)
    found = eliminate.minimise(model.sizes, model.factors, quantum=scale, max_cells=max_cells, seconds=milp_seconds)
    if found.bound >= eliminate.NEVER:
        raise ValueError(why_none(graph))
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
        others = [p for p in others if p is not None and cycle(graph, p.options) is None]
        plans += [replace(p, method="milp", width=found.width) for p in others]
    if not plans:
        raise ValueError(f"no plan found within {milp_seconds} s, though one may exist: raise max_cells or the time")
    plan = min(plans, key=lambda p: p.total_ps)
    if plan.total_ps <= bound_ps:
        return replace(plan, status="proven", gap=0.0)
    return replace(plan, status="gap", gap=(plan.total_ps - bound_ps) / plan.total_ps)


def _scale(graph: Graph) -> tuple[int, int, int]:
    """(what a picosecond, a launch and a sparse entry cost): ties are decided below one picosecond."""
    n = len(graph.choices)
    scale = 1 + (n + 1) * (n + 1 + sum(len(formats_of(graph, t)) for t in tensors_of(graph)))
    worst = worst_ps(graph)
    if (worst + 1) * scale >= eliminate.NEVER:
        scale = 1  # times too long for that: ties are then broken by order alone
        if worst >= eliminate.NEVER // 2:
            raise ValueError(f"times add up to {worst} ps, more than the planner's {eliminate.NEVER // 2} ps")
    return (scale, n + 1, 1) if scale > 1 else (1, 0, 0)


@dataclass(frozen=True, slots=True)
class Forced:
    """The best plan with one layer forced. `speedup`: by what factor all of the forced kernels of that layer would have to
    be faster, all else as it is, for such a plan to cost no more than the best one; inf: none would do."""

    plan: Plan
    speedup: float


def forced(
    graph: Graph, best: Plan, wanted: Iterable[tuple[tuple[str, ...], bool]], *, max_cells: int = 20_000_000
) -> list[Forced | None]:
    """For each (ops, sparse): the best plan when these ops, wherever they exist, run only sparse (or only dense) entries;
    None where that is impossible. `best`: the plan without force; `ops` are the alternatives of one layer: at least one of
    them exists in every plan.

    Equal to `solve` with `force`, for all of them from one pass up and one down the elimination tree. Where several ops of a
    layer may exist at once, or the tree is too wide, the layer is solved alone, and `speedup` is an upper bound.
    """
    wanted = list(wanted)
    check(graph)
    scale, launch, sparse = _scale(graph)
    model = _model(graph, scale, launch, sparse)
    swaps, owners, alone = [], [], {}
    for w, (names, want) in enumerate(wanted):
        mine = [(i, c) for i, c in enumerate(graph.choices) if c.name in names]
        if any(not exclusive(a.when, b.when) for (_, a), (_, b) in itertools.combinations(mine, 2)):
            alone[w] = _forced_alone(graph, best, names, want)  # several of its ops at once
            continue
        for i, c in mine:
            variables = model.factors[model.ops[i]][0]
            domains = [model.domains[v] for v in variables[len(variables) - len(c.inputs) - 1 :]]
            table = np.full([len(d) for d in domains], eliminate.NEVER, np.int64)
            if table.ndim != len(c.inputs) + 1 or model.factors[model.ops[i]][1].shape[-table.ndim :] != table.shape:
                return [_forced_alone(graph, best, *pair) for pair in wanted]  # an op with a variable for its cell
            cells = cells_of(graph, replace(c, entries=tuple(e for e in c.entries if e.sparse == want)))
            for (ins, out), e in cells.items():
                state = tuple(d.index(f) for d, f in zip(domains, (*ins, out), strict=True))
                table[state] = e.time_ps * scale + launch + sparse * e.sparse
            swaps.append((model.ops[i], _where_taken(graph, c, table, eliminate.NEVER)))
            owners.append((w, i, cells))
    found = eliminate.replaced(model.sizes, model.factors, swaps, max_cells=max_cells)
    if found is None:
        return [_forced_alone(graph, best, *pair) for pair in wanted]
    answers: list[Forced | None] = []
    for w in range(len(wanted)):
        if w in alone:
            answers.append(alone[w])
            continue
        mine = [(f, i, cells) for f, (owner, i, cells) in zip(found, owners, strict=True) if owner == w]
        least, i, cells = min(mine, key=lambda m: m[0].cost, default=(None, 0, {}))
        if least is None or least.states is None:
            answers.append(None)
            continue
        there = replace(model, cells=[cells if k == i else own for k, own in enumerate(model.cells)])
        plan = _read(graph, there, eliminate.Solution(least.states, least.cost, least.cost, "elimination", best.width))
        if cycle(graph, plan.options) is not None:
            answers.append(_forced_alone(graph, best, *wanted[w]))
            continue
        if plan.total_ps != least.cost // scale:
            raise RuntimeError(f"planner: forced plan costs {plan.total_ps} ps, the solver said {least.cost // scale} ps")
        speedup = min(_break_even(f, best.total_ps, scale) for f, _, _ in mine)
        answers.append(Forced(replace(plan, status="proven", gap=0.0), speedup))
    return answers


def _break_even(found: eliminate.Replaced, total_ps: int, scale: int) -> float:
    """The least factor by which the replaced table's times must shrink for some cell to reach `total_ps` in all."""
    possible = (found.table < eliminate.NEVER) & (found.around < eliminate.NEVER)
    time, around = (np.where(possible, a, 0) // scale for a in (found.table, found.around))
    left = np.where(possible, total_ps - around, 0)  # what the kernel may take there
    ratio = np.divide(time, left, out=np.full(time.shape, math.inf), where=left > 0)
    return max(1.0, float(ratio.min(initial=math.inf)))


def _forced_alone(graph: Graph, best: Plan, names: tuple[str, ...], sparse: bool) -> Forced | None:
    plan = _attempt(solve, graph, force={name: (lambda e: e.sparse == sparse) for name in names})
    if plan is None:
        return None
    time = sum(e.time_ps for name, e in plan.entries.items() if name in names)
    left = time - (plan.total_ps - best.total_ps)
    return Forced(plan, max(1.0, time / left) if left > 0 else math.inf)


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
    check(graph)
    fastest: dict[int, Entry] = {}
    for i, choice in enumerate(graph.choices):
        cells = cells_of(graph, choice)
        if cells:
            fastest[i] = min(cells.values(), key=lambda e: (e.time_ps, e.sparse, e.tactic, e.ins, e.out))

    def size(options) -> tuple[int, int] | None:
        live = [i for i, c in enumerate(graph.choices) if holds(c.when, options)]
        if any(i not in fastest for i in live) or not connected(graph, [graph.choices[i] for i in live]):
            return None
        return sum(fastest[i].time_ps for i in live), len(live)

    options = {group: names[0] for group, names in graph.groups}
    for group, names in graph.groups:
        ranked = [(size(options | {group: name}), k, name) for k, name in enumerate(names)]
        possible = [r for r in ranked if r[0] is not None]
        if possible:
            options[group] = min(possible)[2]
    if size(options) is None:
        raise ValueError("greedy: the fastest entries and options make no complete plan")
    entries = {c.name: fastest[i] for i, c in enumerate(graph.choices) if holds(c.when, options)}
    return _rival(graph, options, entries, "greedy")


def best_single_format(graph: Graph, names: Mapping[str, Mapping[str, tuple[str, ...]]] | None = None) -> Plan | None:
    """The best plan in which every tensor has one and the same format wherever its ops allow; None if there is none.

    `names`: format name -> {tensor: its keys under that name}, as one format has different keys on different tensors,
    and in different places; without it, equal keys are one format.
    """
    check(graph)
    if names is None:
        keys = dict.fromkeys(key for t in tensors_of(graph) for key in formats_of(graph, t))
        names = {key: dict.fromkeys(tensors_of(graph), (key,)) for key in keys}
    plans = []
    for name, key in names.items():
        choices = []
        for c in graph.choices:
            usable = tuple(cells_of(graph, c).values())
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


def _attempt(function, *args, **options) -> Plan | None:
    try:
        return function(*args, **options)
    except ValueError:
        return None


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
    ops: dict[int, int]  # choice -> number of its factor
    copies: dict[str, Copies]  # per tensor: its reformats


def _model(graph: Graph, scale: int, launch: int, sparse: int) -> _Model:
    groups = [name for name, _ in graph.groups]
    cells = [cells_of(graph, c) for c in graph.choices]
    copies = copies_of(graph, tensors_of(graph), scale, launch)
    model = _Model([], [], [], {}, {}, cells, {}, copies)
    for _, names in graph.groups:
        _variable(model, names)

    makers: dict[str, list[int]] = {t: [] for t in tensors_of(graph)}
    readers: dict[str, list[tuple[int, int]]] = {t: [] for t in tensors_of(graph)}  # (choice, input position)
    for i, c in enumerate(graph.choices):
        makers[c.output].append(i)
        for k, t in enumerate(c.inputs):
            readers[t].append((i, k))
    for t in tensors_of(graph):
        formats = formats_of(graph, t)
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

    same: dict[str, list[int]] = {}  # name -> its ops, of which at most one is in a plan
    for i, c in enumerate(graph.choices):
        same.setdefault(c.name, []).append(i)
    for ops in same.values():
        costs = [{cell: e.time_ps * scale + launch + sparse * e.sparse for cell, e in cells[i].items()} for i in ops]
        for i, (variables, table) in zip(ops, _op_tables(graph, model, ops, costs), strict=True):
            asked = {name for name, _ in graph.choices[i].when}
            over = [v for v, name in enumerate(groups) if name in asked]
            model.ops[i] = len(model.factors)
            model.factors.append(((*over, *variables), _where_taken(graph, graph.choices[i], table, 0)))
    return model


def _where_taken(graph: Graph, choice: Choice, table: np.ndarray, elsewhere: int) -> np.ndarray:
    """`table` with an axis in front for each group in the op's `when`, and `elsewhere` where the op does not exist."""
    if not choice.when:
        return table
    asked = {name for name, _ in choice.when}
    over = [(name, names) for name, names in graph.groups if name in asked]
    taken = [[s for s, o in enumerate(names) if (g, o) in choice.when] for g, names in over]
    full = np.full([*(len(names) for _, names in over), *table.shape], elsewhere, np.int64)
    full[np.ix_(*taken)] = table
    return full


def _op_tables(graph: Graph, model: _Model, ops: list[int], costs: list[dict]) -> list[tuple[list[int], np.ndarray]]:
    """(variables, table) of each of these ops, of which at most one exists: what it costs in each of its cells. Where the table
    over all of its tensors' formats would be large and say little - a join takes any of some formats for each of its inputs -
    or very large, it is described by blocks of cells of one cost. All such `ops` share a variable that picks a block (or none,
    where none may exist), and a small table says with which formats of a tensor each of its states agrees."""
    found, picks, wide = {}, [], {}
    for i, cells in zip(ops, costs, strict=True):
        c = graph.choices[i]
        tensors = [*(model.read[i, k] for k in range(len(c.inputs))), model.produced[c.output]]
        where = [{f: s for s, f in enumerate(model.domains[v])} for v in tensors]
        states = {tuple(map(dict.__getitem__, where, (*ins, out))): value for (ins, out), value in cells.items()}
        size = math.prod(model.sizes[v] for v in tensors)
        blocks = _blocks(states) if size > SMALL_TABLE else []
        if size <= SMALL_TABLE or (size <= WIDE_CELLS and FEW * len(blocks) > size):
            table = np.full([model.sizes[v] for v in tensors], eliminate.NEVER, np.int64)
            for state, value in states.items():
                table[state] = value
            found[i] = tensors, table
        else:
            wide[i] = tensors
            picks += [(i, *block) for block in blocks]
    if wide:
        exists = always(graph, [graph.choices[i].when for i in wide])
        picked = _variable(model, picks if exists else [*picks, (None, eliminate.NEVER, ())])
    for i, tensors in wide.items():
        found[i] = [picked], np.array([value if j == i else eliminate.NEVER for j, value, _ in model.domains[picked]], np.int64)
        for k, v in enumerate(tensors):
            agrees = np.zeros((model.sizes[picked], model.sizes[v]), np.int64)
            for s, (j, _, block) in enumerate(model.domains[picked]):
                if j == i:
                    agrees[s] = eliminate.NEVER
                    agrees[s, block[k]] = 0
            model.factors.append(((picked, v), agrees))
    return [found[i] for i in ops]


def _blocks(costs: Mapping[tuple[int, ...], int]) -> list[tuple[int, tuple]]:
    """Cells of equal cost as products of sets, few of them: (their cost, (states of the first tensor, of the second, ...))."""

    def split(cells: Iterable[tuple[int, ...]]) -> list[tuple]:
        tails: dict[int, list] = {}
        for head, *tail in cells:
            tails.setdefault(head, []).append(tuple(tail))
        heads_of: dict[tuple, list[int]] = {}
        for head, tail in tails.items():
            heads_of.setdefault(tuple(sorted(tail)), []).append(head)
        return [(tuple(heads), *rest) for tail, heads in heads_of.items() for rest in (split(tail) if tail[0] else [()])]

    alike: dict[int, list[tuple[int, ...]]] = {}
    for cell, value in costs.items():
        alike.setdefault(value, []).append(cell)
    return [(value, block) for value, cells in alike.items() for block in split(cells)]


def _forbidden(graph: Graph, ring: Mapping[str, str]) -> eliminate.Factor:
    """A table that leaves out one combination of options."""
    over = [(v, names, ring[name]) for v, (name, names) in enumerate(graph.groups) if name in ring]
    table = np.zeros([len(names) for _, names, _ in over], np.int64)
    table[tuple(names.index(option) for _, names, option in over)] = eliminate.NEVER
    return tuple(v for v, _, _ in over), table


def _presence(graph: Graph, model: _Model, produced: int, whens: list[Literals]) -> eliminate.Factor:
    """The tensor is absent exactly where none of its makers exists. (Readers need no such table: one that exists has
    no cell for an absent tensor, and one that does not gains nothing by reading.)"""
    asked = {name for when in whens for name, _ in when}
    over = [(v, name, names) for v, (name, names) in enumerate(graph.groups) if name in asked]
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
    if not needed and not always(graph, whens):
        return (*domain, None)
    if not domain:
        raise ValueError(why_none(graph))
    return domain


def _add_reformats(model: _Model, copies: Copies, p: int, slots: list[int]) -> None:
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


def _slots(graph: Graph, readers: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    slots: list[list[tuple[int, int]]] = []
    for i, k in readers:
        when = graph.choices[i].when
        for slot in slots:
            if all(exclusive(when, graph.choices[j].when) for j, _ in slot):
                slot.append((i, k))
                break
        else:
            slots.append([(i, k)])
    return slots


def _read(graph: Graph, model: _Model, found: eliminate.Solution) -> Plan:
    """The solver's states as a plan, with the cheapest reformats for it."""
    value = [model.domains[v][s] for v, s in enumerate(found.states)]
    options = {name: value[v] for v, (name, _) in enumerate(graph.groups)}
    entries = {}
    for i, c in enumerate(graph.choices):
        if holds(c.when, options):
            ins = tuple(value[model.read[i, k]] for k in range(len(c.inputs)))
            entries[c.name] = model.cells[i][ins, value[model.produced[c.output]]]
    total, reformats = cost(graph, options, entries, model.copies)
    return Plan(entries, options, reformats, total, "gap", found.method, found.width, math.inf)
