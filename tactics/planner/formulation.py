"""Writes a planner's graph as variables and small integer tables, for `eliminate`, and reads states of the variables as a plan.

An example: f makes y of x in format A in 3 ps or in B in 5; g reads A in 6 ps or B in 1 and makes z in A; a reformat takes 4.
The variables: the formats that x is produced and read in, those of y, and the one in which z is produced. Variables of one
state are in no table.

>>> A, B = Key.parse("fp16:last8"), Key.parse("fp16:planes1")
>>> f = Choice("f", ("x",), "y", (Entry(None, (A,), A, 3), Entry(None, (A,), B, 5)))
>>> g = Choice("g", ("y",), "z", (Entry(None, (A,), A, 6), Entry(None, (B,), A, 1)))
>>> graph = Graph((f, g), (), {"x": A}, ("x",), ("z",), dict.fromkeys("xyz", (A, B)), lambda tensor, src, dst: 4)
>>> model = model_of(graph, Costs(scale=1, launch=0, sparse=0))
>>> [len(domain) for domain in model.domains]
[1, 1, 2, 2, 1]
>>> for variables, table in model.factors:
...     print(variables, table.tolist())
() 0
(2, 3) [[0, 4], [4, 0]]
() 0
(2,) [3, 5]
(3,) [6, 1]
>>> plan = read(model, (0, 0, 1, 1, 0), "elimination", 1)  # the states with the least sum, 0 + 0 + 0 + 5 + 1
>>> str(plan.entries["f"].out), plan.total_ps
('fp16:planes1', 6)
"""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import compress

import numpy as np

from tactics.format import Key
from tactics.planner.factors import NEVER, Factor
from tactics.planner.graph import (
    MOST_STATES,
    Cell,
    Choice,
    Entry,
    Graph,
    Impossible,
    Literals,
    Plan,
    all_cells,
    always,
    exclusive,
    formats_of,
    holds,
    tensors_of,
    why_none,
    worst_ps,
)
from tactics.planner.grouping import each_once, grouped
from tactics.planner.reformats import Copies, copies_of, cost

SMALL_TABLE = 1000  # cells of an op's table up to which it is stored as it is
FEW = 8  # blocks replace a larger table if its cells are at least this many times as many as the blocks,
WIDE_CELLS = 10_000  # and every table of more cells than this


@dataclass(frozen=True, slots=True)
class Costs:
    """The integer cost of a picosecond (`scale`), of a launch, and of a sparse tactic; the last two only decide between plans
    of equal time.
    """

    scale: int
    launch: int
    sparse: int

    def of(self, entry: Entry, faster: float = 1.0) -> int:
        """Returns an entry's cost, with its time divided by `faster`."""
        time = entry.time_ps * self.scale
        return (time if faster == 1.0 else round(time / faster)) + self.launch + self.sparse * entry.sparse


def costs_of(graph: Graph) -> Costs:
    n = len(graph.choices)
    scale = 1 + (n + 1) * (n + 1 + sum(len(formats_of(graph, t)) for t in tensors_of(graph)))
    worst = worst_ps(graph)
    if (worst + 1) * scale < NEVER:
        return Costs(scale, n + 1, 1)
    if worst >= NEVER // 2:
        raise ValueError(f"times add up to {worst} ps, more than the planner's {NEVER // 2} ps")
    return Costs(1, 0, 0)  # times too long for that: ties are then broken by order alone


@dataclass(frozen=True, slots=True)
class Model:
    """A graph's question as variables and factors.

    A variable stands for a group's option, for the format in which a tensor is produced, for the format that a reading slot of
    a tensor reads, for the set of formats made of a tensor with three slots and more, or for the block of cells taken by an op
    with many tensors. They are numbered in this order, tensor by tensor.
    """

    graph: Graph
    costs: Costs
    sizes: list[int]
    factors: list[Factor]
    domains: list[tuple]  # per variable, the meanings of its states; None: the tensor is absent
    produced: dict[str, int]  # tensor -> variable
    read: dict[tuple[int, int], int]  # (choice, input position) -> variable
    cells: list[dict[Cell, Entry]]  # per choice: (ins, out) -> cheapest entry
    ops: dict[int, int]  # choice -> number of its factor
    blocks: set[int]  # choices whose factor is over blocks of cells
    copies: dict[str, Copies]  # per tensor: its reformats
    groups: dict[str, tuple[int, tuple[str, ...]]]  # fusion group -> its variable, its options
    tables: dict[tuple, np.ndarray]  # shared by choices or tensors that are alike, while the model is made


def model_of(graph: Graph, costs: Costs | None = None) -> Model:
    """Makes the model of a graph. `costs`: None for `costs_of` this graph."""
    tensors, costs = tensors_of(graph), costs or costs_of(graph)
    copies = copies_of(graph, tensors, costs.scale, costs.launch)
    model = Model(graph, costs, [], [], [], {}, {}, all_cells(graph), {}, set(), copies, {}, {})
    for name, options in graph.groups:
        model.groups[name] = _variable(model, options), options

    makers = grouped((c.output, i) for i, c in enumerate(graph.choices))
    readers = grouped((t, (i, position)) for i, c in enumerate(graph.choices) for position, t in enumerate(c.inputs))
    same = grouped((c.name, i) for i, c in enumerate(graph.choices))  # name -> its ops, of which at most one is in a plan
    used = each_once(_formats_used, model.cells)
    for t in tensors:
        _add_tensor(model, t, makers.get(t, []), readers.get(t, []), used)

    prices = each_once(lambda cells: {cell: costs.of(e) for cell, e in cells.items()}, model.cells)
    for ops in same.values():
        _add_ops(model, {i: prices[i] for i in ops})
    return model


def _add_tensor(model: Model, t: str, makers: list[int], readers: list[tuple[int, int]], used: list[list[set[Key]]]) -> None:
    """Adds the variables of a tensor and the cost of its reformats. `makers`: the choices that produce it; `readers`: (choice,
    input position) of each reading.
    """
    graph = model.graph
    options, given, wanted = dict(graph.groups), t in graph.inputs, t in graph.outputs
    formats = formats_of(graph, t)
    whens: list[Literals] = [()] if given else [graph.choices[i].when for i in makers]
    there = always(options, whens)

    def domain(at: list[tuple[int, int]], exists: bool) -> tuple:
        columns = (used[i][k] for i, k in at if model.cells[i])
        return _domain(graph, formats, set().union(*columns), exists)

    own = _domain(graph, formats, {graph.pinned[t]}, True) if given else domain([(i, -1) for i in makers], there or wanted)
    model.produced[t] = p = _variable(model, own)
    if not there:
        model.factors.append(_presence(model, p, whens))
    slots = []
    for slot in _slots(graph, readers):  # ops that never exist together read through one slot
        v = _variable(model, domain(slot, always(options, [graph.choices[i].when for i, _ in slot])))
        slots.append(v)
        model.read.update(dict.fromkeys(slot, v))
    if wanted and t in graph.pinned:
        slots.append(_variable(model, (graph.pinned[t],)))
    _add_reformats(model, model.copies[t], p, slots)


def _formats_used(cells: Iterable[Cell]) -> list[set[Key]]:
    """Returns the formats of each input, then of the output."""
    return [set(column) for column in zip(*((*ins, out) for ins, out in cells), strict=True)]


def read(model: Model, states: tuple[int, ...], method: str, width: int) -> Plan:
    """Turns the states of all variables into a plan, with the cheapest reformats for it."""
    value = [model.domains[v][s] for v, s in enumerate(states)]
    options = {name: value[v] for name, (v, _) in model.groups.items()}
    entries = {}
    for i, c in enumerate(model.graph.choices):
        if holds(c.when, options):
            *ins, out = (value[v] for v in tensors(model, i))
            entries[c.name] = model.cells[i][tuple(ins), out]
    total, reformats = cost(model.graph, options, entries, model.copies)
    return Plan(entries, options, reformats, total, "gap", method, width, math.inf)


def forbidden(graph: Graph, ring: Mapping[str, str]) -> Factor:
    """Makes a table that forbids one combination of options."""
    over = [(v, names, ring[name]) for v, (name, names) in enumerate(graph.groups) if name in ring]
    table = np.zeros([len(names) for _, names, _ in over], np.int64)
    table[tuple(names.index(option) for _, names, option in over)] = NEVER
    return tuple(v for v, _, _ in over), table


# ---- ops


def op_factor(model: Model, i: int, costs: Mapping[tuple, int]) -> Factor:
    """Returns the cost of choice i over the options that it depends on and the formats of its tensors. `costs`: (ins, out) ->
    cost.
    """
    variables = _free(model, tensors(model, i))
    table = np.full([model.sizes[v] for v in variables], NEVER, np.int64)
    for state, value in _states(model, i, costs).items():
        table[state] = value
    return _where_taken(model, model.graph.choices[i], variables, table)


def tensors(model: Model, i: int) -> list[int]:
    """Returns the variables of a choice's inputs, then of its output."""
    c = model.graph.choices[i]
    return [*(model.read[i, k] for k in range(len(c.inputs))), model.produced[c.output]]


def _free(model: Model, variables: Iterable[int]) -> list[int]:
    """Returns the variables with several states. A tensor with one format is in no table: an array has at most 64 axes, and
    eliminating such a tensor would join all ops around it.
    """
    return [v for v in variables if model.sizes[v] > 1]


def _states(model: Model, i: int, costs: Mapping[tuple, int]) -> dict[tuple[int, ...], int]:
    """Converts (ins, out) -> cost to (states of the `_free` variables of choice i) -> cost."""
    variables = tensors(model, i)
    where = [{f: s for s, f in enumerate(model.domains[v])} for v in _free(model, variables)]
    free = [model.sizes[v] > 1 for v in variables]
    return {tuple(map(dict.__getitem__, where, compress((*ins, out), free))): value for (ins, out), value in costs.items()}


def _asked(model: Model, when: Iterable[tuple[str, str]]) -> list[tuple[int, str, tuple[str, ...]]]:
    """Returns (variable, name, options) of each fusion group named in `when`, ordered by variable."""
    return sorted((model.groups[name][0], name, model.groups[name][1]) for name in {name for name, _ in when})


def _where_taken(model: Model, choice: Choice, variables: list[int], table: np.ndarray) -> Factor:
    """Extends `table` by an axis in front for each group in the choice's `when`; its cells are 0 where the choice does not
    exist.
    """
    if not choice.when:
        return tuple(variables), table
    over = _asked(model, choice.when)
    if math.prod(len(names) for *_, names in over) > MOST_STATES:
        raise ValueError(f"op {choice.name}: depends on {len(over)} fusion decisions: more than {MOST_STATES} combinations")
    full = np.zeros([*(len(names) for *_, names in over), *table.shape], np.int64)
    full[np.ix_(*_taken(choice, over))] = table
    return (*(v for v, *_ in over), *variables), full


def _taken(choice: Choice, over: list[tuple[int, str, tuple[str, ...]]]) -> tuple[tuple[int, ...], ...]:
    """Returns, for each group in `over`, the states (numbers of options) with which the choice exists."""
    return tuple(tuple(s for s, o in enumerate(names) if (g, o) in choice.when) for _, g, names in over)


def _add_op(model: Model, i: int, costs: Mapping[tuple, int]) -> None:
    """Adds the table of choice i; equal choices share one table."""
    choice, variables = model.graph.choices[i], tensors(model, i)
    over = _asked(model, choice.when)
    alike = id(costs), *(model.domains[v] for v in variables), _taken(choice, over), *(len(o) for *_, o in over)
    if alike not in model.tables:
        model.tables[alike] = op_factor(model, i, costs)[1]
    model.ops[i] = len(model.factors)
    model.factors.append(((*(v for v, *_ in over), *_free(model, variables)), model.tables[alike]))


def _add_ops(model: Model, costs: Mapping[int, dict[tuple, int]]) -> None:
    """Adds tables of ops of which at most one exists.

    An op with many tensors would have a large table over all their formats: a join takes any of some formats for each input. If
    such a table has few different costs, or is very large, blocks of cells of one cost describe it. All such ops share a
    variable that picks a block, or none where none of the ops may exist; a small table for each tensor says which formats agree
    with a block.
    """
    picks: list[tuple[int | None, int, tuple]] = []  # (choice, cost, block)
    wide = []
    for i, cells in costs.items():
        size = math.prod(model.sizes[v] for v in tensors(model, i))
        blocks = _blocks(_states(model, i, cells)) if size > SMALL_TABLE else []
        if size <= SMALL_TABLE or (size <= WIDE_CELLS and FEW * len(blocks) > size):
            _add_op(model, i, cells)
        else:
            wide.append(i)
            picks += [(i, value, block) for value, block in blocks]
    if not wide:
        return
    if not always(dict(model.graph.groups), [model.graph.choices[i].when for i in wide]):
        picks.append((None, NEVER, ()))
    picked = _variable(model, picks)
    model.blocks.update(wide)
    for i in wide:
        for k, v in enumerate(_free(model, tensors(model, i))):
            states = range(model.sizes[v])
            agrees = [[0 if owner != i or s in block[k] else NEVER for s in states] for owner, _, block in picks]
            model.factors.append(((picked, v), np.array(agrees, np.int64)))
        table = np.array([value if owner == i else NEVER for owner, value, _ in picks], np.int64)
        model.ops[i] = len(model.factors)
        model.factors.append(_where_taken(model, model.graph.choices[i], [picked], table))


def _blocks(costs: Mapping[tuple[int, ...], int]) -> list[tuple[int, tuple]]:
    """Groups cells of equal cost into few products of sets: (cost, (states of the first tensor, states of the second, ...)).

    Cells (0, 0), (0, 1), (2, 0), (2, 1) of cost 5 are one block: (5, ((0, 2), (0, 1))).
    """
    found = []
    for value, cells in grouped((value, cell) for cell, value in costs.items()).items():
        todo: list[tuple[tuple, Iterable[tuple[int, ...]]]] = [((), cells)]
        while todo:  # states of the first tensor that go with the same states of all later ones form one set; then the second
            block, rest = todo.pop()
            tails = grouped((head, tuple(tail)) for head, *tail in rest)
            heads_of = grouped((tuple(sorted(tail)), head) for head, tail in tails.items())
            parts = [((*block, tuple(heads)), tail) for tail, heads in heads_of.items()]
            if parts[0][1][0]:
                todo += reversed(parts)
            else:
                found += [(value, whole) for whole, _ in parts]
    return found


# ---- tensors


def _presence(model: Model, produced: int, whens: list[Literals]) -> Factor:
    """Returns a table that is 0 where the tensor is absent exactly if none of its makers exists, else NEVER.

    Readers need no such table: a reader that exists has no cell for an absent tensor, and a reader that does not exist gains
    nothing by reading.
    """
    over = _asked(model, [pair for when in whens for pair in when])
    states = itertools.product(*(names for _, _, names in over))
    taken = ({name: option for (_, name, _), option in zip(over, state, strict=True)} for state in states)
    there = np.array([any(holds(when, options) for when in whens) for options in taken])
    is_format = np.array([f is not None for f in model.domains[produced]])
    table = np.where(there[:, None] == is_format, 0, NEVER)
    sizes = [model.sizes[v] for v, _, _ in over]
    return (*(v for v, _, _ in over), produced), table.reshape(*sizes, len(is_format))


def _variable(model: Model, domain: Iterable) -> int:
    model.domains.append(tuple(domain))
    model.sizes.append(len(model.domains[-1]))
    return len(model.sizes) - 1


def _domain(graph: Graph, formats: tuple[Key, ...], used: set[Key], there: bool) -> tuple:
    """Returns the formats in use, in the tensor's order, then None if the tensor or its reader may be absent."""
    domain = tuple(f for f in formats if f in used)
    if not there:
        return (*domain, None)
    if not domain:
        raise Impossible(why_none(graph))
    return domain


def _add_reformats(model: Model, copies: Copies, p: int, slots: list[int]) -> None:
    """Adds the cost of reformats from the produced format (variable `p`) to the formats that the slots read.

    Up to two slots that are free to differ share one table with `p`. More slots get a variable for the set of formats that are
    made, which must contain each slot's format.
    """

    def masks(v: int) -> np.ndarray:
        return np.array([0 if f is None else copies.mask([f]) for f in model.domains[v]], np.int64)

    def table(sets: np.ndarray) -> np.ndarray:
        """Returns reformat costs of shape (formats produced, *sets.shape); `sets`: bit masks of the formats to make. A cell is
        NEVER where the tensor is absent and a format is wanted.
        """
        rows = [
            np.where(sets == 0, 0, NEVER) if f is None else copies.serve[sets, copies.formats.index(f)]
            for f in model.domains[p]
        ]
        return np.stack(rows)

    def add(scope: tuple[int, ...], what: str, make: Callable[[], np.ndarray]) -> None:
        """Adds a factor over `scope` whose table `make` returns; tensors with equal copies, domains and `fixed` formats share
        it.
        """
        alike = id(copies), what, fixed, *(model.domains[v] for v in scope)
        if alike not in model.tables:
            model.tables[alike] = np.squeeze(make())
        model.factors.append((tuple(_free(model, scope)), model.tables[alike]))

    free = [v for v in dict.fromkeys(slots) if model.sizes[v] > 1]
    fixed = 0
    for v in slots:
        if model.sizes[v] == 1:
            fixed |= int(masks(v)[0])
    if len(free) <= 2:

        def both() -> np.ndarray:
            sets = np.array(fixed, np.int64)
            for v in free:
                sets = sets[..., None] | masks(v)
            return table(sets)

        add((p, *free), "slots", both)
        return
    bits = sorted({int(m) for v in free for m in masks(v)} - {0})
    sets = [fixed]
    for bit in bits:
        sets += [s | bit for s in sets if not s & bit]
    sets = [s for s in sorted(sets) if (s & ~fixed).bit_count() <= len(free)]
    made = _variable(model, sets)
    masked = np.array(sets, np.int64)
    add((p, made), "made", lambda: table(masked))

    def unread(v: int) -> np.ndarray:
        return np.where((masks(v)[:, None] & ~masked) != 0, NEVER, 0)

    for v in free:
        add((v, made), "read", partial(unread, v))


def _slots(graph: Graph, readers: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Groups a tensor's readers into slots, each of readers that never exist together: a reader joins the first slot where this
    holds.
    """
    slots: list[list[tuple[int, int]]] = []
    named: dict[str, dict[frozenset[str], set[int]]] = {}  # group -> options of it -> the slots of readers that want these
    for i, k in readers:
        when = graph.choices[i].when
        wants = {group: frozenset(o for g, o in when if g == group) for group, _ in when}
        others = (found for g, mine in wants.items() for options, found in named.get(g, {}).items() if not mine & options)
        for s in sorted(set().union(*others)):  # a slot with a reader that excludes this one
            if all(exclusive(when, graph.choices[j].when) for j, _ in slots[s]):
                break
        else:
            s = len(slots)
            slots.append([])
        slots[s].append((i, k))
        for g, mine in wants.items():
            named.setdefault(g, {}).setdefault(mine, set()).add(s)
    return slots
