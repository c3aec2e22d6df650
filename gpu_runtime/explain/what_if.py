"""An engine's plan solved again with some layers held to sparse, to dense or to a format, from the planner's tables that the
engine holds.

`store` makes a record of the planner's graph (findings.Choices), `graph` makes the graph from the record, and `what_if` solves
it under the conditions.
"""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial

from gpu_runtime.errors import EngineError
from gpu_runtime.explain.figures import PREDICTED, proof_text, summing, times_are, us_text
from gpu_runtime.explain.names import matching, others_of
from gpu_runtime.planning.tables import Table
from gpu_runtime.runtime.fields import Told
from gpu_runtime.runtime.findings import ChoiceRow, Choices, TensorKeys
from gpu_runtime.runtime.plan_record import EngineRecord, PlanRecord, Timing
from gpu_runtime.text import printable, suggest, versus, wrap
from gpu_runtime.text import table as text_table
from tactics.format import DTYPES, LAYOUTS, Format, Key, canonical, representative
from tactics.planner import graph as planned
from tactics.planner import plan as planner
from tactics.planner.changes import difference
from tactics.planner.graph import Choice, Graph, formats_of
from tactics.tactic import Tactic

Test = Callable[[planned.Entry], bool]
WISH = re.compile(r"sparse|dense|[a-z0-9:]+(->[a-z0-9:]+)?")


@dataclass(frozen=True, slots=True)
class Entry:
    """One way to run an op: its tactic, the formats of its first input and of its output, and its time in microseconds.

    If not `timed`, its time was not measured, and `us` is a lower bound.
    """

    op: str
    tactic: str
    in_: str
    out: str
    us: float
    timed: bool = True


@dataclass(frozen=True, slots=True)
class Change:
    """A layer's entry in the engine's plan (`before`) and in the new plan (`after`); None where another layer does its work."""

    name: str
    before: Entry | None
    after: Entry | None


@dataclass(frozen=True, slots=True)
class Hop:
    """A reformat: a tensor copied from one format to another in `us` microseconds."""

    tensor: str
    from_: str
    to: str
    us: float


Side = Entry | Hop | None


@dataclass(frozen=True, slots=True, repr=False)
class Answer(Told):
    """The best plan that grants the wishes, compared with the engine's own plan.

    `wishes`: layer or pattern -> wish; `before_us` and `after_us`: microseconds of the engine's and of the new plan; `status`:
    "proven" if the new plan is proven minimal; `layers`, `reformats_gone` and `reformats_new`: all differences of the new plan;
    `pruned`: layers whose weights are not 2:4 and would have to be pruned; `text`: the comparison as a table.
    """

    wishes: Mapping[str, str]
    before_us: float
    after_us: float
    status: str
    layers: tuple[Change, ...]
    reformats_gone: tuple[Hop, ...]
    reformats_new: tuple[Hop, ...]
    pruned: tuple[str, ...] = ()


def store(table: Table, pruned: Table | None = None) -> Choices:
    """Returns the planner's graph as a record: the times of reformats, and its ops with their entries (kernel, formats, time),
    for each combination of formats the fastest dense and the fastest sparse one.

    `pruned`: the table with pruned weights, whose sparse entries are added to ops without sparse entries; None: no entries are
    added.
    """
    g, network = table.graph, table.network
    tensors = {t: i for i, t in enumerate(network.tensors)}
    keys = {t: formats_of(g, t) for t in tensors}
    number = {t: {f: i for i, f in enumerate(each)} for t, each in keys.items()}
    tactics: dict[Tactic | None, int] = {}
    others = {c.name: [e for e in c.entries if e.sparse] for c in pruned.graph.choices} if pruned else {}
    choices = []
    for c, op in zip(g.choices, network.ops, strict=True):
        rows, bounds, more = [], list[int](), list[int]()
        able = any(e.sparse for e in c.entries)
        for e in (*c.entries, *(() if able else others.get(c.name, ()))):
            places = [number[t].get(f, -1) for f, t in zip((*e.ins, e.out), (*c.inputs, c.output), strict=True)]
            if -1 not in places:
                rows.append((tactics.setdefault(e.tactic, len(tactics)), *places, e.time_ps, e.premium_ps))
                bounds += [] if e.timed else [len(rows) - 1]
                more += [len(rows) - 1] if e.sparse and not able else []
        ins = tuple(tensors[t] for t in c.inputs)
        choices.append(
            ChoiceRow(
                c.name,
                op.layer,
                tuple(op.layers),
                ins,
                tensors[c.output],
                tuple(c.when),
                tuple(rows),
                tuple(bounds),
                tuple(more),
            )
        )

    def reformats(t: str) -> tuple[tuple[int | None, ...], ...]:
        return tuple(tuple(0 if a == b else g.reformat_ps(t, a, b) for b in keys[t]) for a in keys[t])

    return Choices(
        tuple(TensorKeys(t, shape, keys[t], reformats(t)) for t, shape in network.tensors.items()),
        tuple(tactics),
        tuple(choices),
        tuple((name, tuple(options)) for name, options in g.groups),
        dict(g.pinned),
        tuple(g.inputs),
        tuple(g.outputs),
    )


def graph(stored: Choices, pruned: Collection[str] = ()) -> Graph:
    """Returns the planner's graph from a record that `store` made. `pruned`: the ops that keep their entries for pruned
    weights, which other ops lose.
    """
    times, keys = {t.name: t.reformat_ps for t in stored.tensors}, {t.name: t.keys for t in stored.tensors}
    place = {name: {key: i for i, key in enumerate(each)} for name, each in keys.items()}

    def reformat_ps(tensor: str, src: Key, dst: Key) -> int | None:
        return times[tensor][place[tensor][src]][place[tensor][dst]]

    choices = []
    for c in stored.choices:
        *inputs, output = (stored.tensors[i].name for i in (*c.in_, c.out))
        entries = []
        bounds, left_out = set(c.bounds), set[int]() if c.op in pruned else set(c.pruned)
        for i, (number, *places, ps, premium_ps) in enumerate(c.entries):
            if i in left_out:
                continue
            *ins, out = (keys[t][i] for t, i in zip((*inputs, output), places, strict=True))
            tactic, timed = stored.tactics[number], i not in bounds
            sparse = tactic is not None and tactic.sparse
            entries.append(planned.Entry(tactic, tuple(ins), out, ps, sparse, premium_ps, timed))
        choices.append(Choice(c.op, tuple(inputs), output, tuple(entries), c.when))
    return Graph(tuple(choices), stored.groups, stored.pinned, stored.inputs, stored.outputs, keys, reformat_ps)


def what_if(record: EngineRecord, wishes: Mapping[str, str]) -> Answer:
    """Returns the best plan in which the named layers run as wished, compared with the engine's own plan.

    `wishes`: layer -> wish. A layer is a name or a pattern; a wish is "sparse", "dense", a format for input and output
    ("hwc8") or a pair of formats ("chw->hwc8"). All other layers may change. A layer whose weights are not 2:4 runs "sparse"
    as if it were pruned. Raises ValueError for an unknown layer or a wish that no kernel grants, EngineError if the engine
    holds no planner's tables.
    """
    if not isinstance(wishes, Mapping) or not all(isinstance(text, str) for pair in wishes.items() for text in pair):
        raise TypeError(f"wishes: expected layers and their kinds or formats, {{'conv1': 'sparse'}}, got {wishes!r}")
    plan, stored = record.plan, record.plan.choices
    if stored is None:
        raise EngineError("this engine does not contain the planner's tables: build it again")
    g, every = graph(stored), graph(stored, [c.op for c in stored.choices])
    force, sparse = dict[str, Test](), set[str]()
    for layer, wish in wishes.items():
        granted = _granted(plan, stored, every if wish == "sparse" else g, layer, wish)
        force |= granted
        sparse |= {*granted} if wish == "sparse" else set()
    before = planner.solve(g)
    try:
        after = planner.solve(graph(stored, sparse), force=force)
    except ValueError:
        raise ValueError("no plan fulfils " + ", ".join(f"{k}={v}" for k, v in wishes.items()) + " together") from None
    layers = {c.op: c.layer or c.op for c in stored.choices}
    sides = [{layers[name]: _entry(name, e) for name, e in p.entries.items()} for p in (before, after)]
    changed = (Change(name, sides[0].get(name), sides[1].get(name)) for name in dict.fromkeys(layers.values()))
    moved = difference(before, after)
    found = Answer(
        dict(wishes),
        before.us,
        after.us,
        after.status,
        tuple(c for c in changed if c.before != c.after),
        tuple(_hop(stored, g, h) for h in moved.gone),
        tuple(_hop(stored, g, h) for h in moved.new),
        tuple(dict.fromkeys(name for c in stored.choices if c.pruned and c.op in sparse for name in c.layers or (c.layer,))),
    )
    return replace(found, text=text(record, found))


def _granted(plan: PlanRecord, stored: Choices, g: Graph, wanted: str, wish: str) -> dict[str, Test]:
    """Returns op -> the test whether one of its entries grants the wish, for each op of the layers that `wanted` names.

    If `wanted` is a pattern, layers that cannot grant the wish are left out. Raises ValueError if no layer can.
    """
    others = others_of(plan)
    found = matching(
        wanted,
        stored.choices,
        lambda c: [x for x in (c.layer, c.op, *c.layers) if x],
        "layer of this engine",
        lambda c: others(c.layer or c.op, c.layers),
    )
    exact = any(wanted in (c.layer, c.op, *c.layers) for c in found)
    if not exact and wish in ("sparse", "dense"):  # only layers with weights, of those that fit a pattern
        found = [c for c in found if c.layer] or found
    layers = [wanted] if exact else list(dict.fromkeys(c.layer or c.op for c in found))
    force, test = dict[str, Test](), _test(stored, wish)
    for layer in layers:
        names = _ops(stored, layer)
        mine = [c for c in g.choices if c.name in names]
        if any(test(c, e) for c in mine for e in c.entries):
            force |= {c.name: partial(test, c) for c in mine}
    if not force:
        raise ValueError(f"{layers[0]}={wish}: {_why_none(plan, g, layers[0], wish, _ops(stored, layers[0]))}")
    return force


def text(record: EngineRecord, found: Answer) -> str:
    """Returns the answer as text with a table of all changes. The times shown add up to the two plans' times as shown."""
    timing, asked = record.timing, ", ".join(f"{layer}={wish}" for layer, wish in found.wishes.items())
    now_us, then_us = round(found.before_us, 2), round(found.after_us, 2)
    lines = wrap(printable(f"What if {asked}? {record.model.name} for {record.device.title}; {times_are(timing)}"))
    proof = proof_text(record.plan, timing, found.status)
    least = "" if all(c.after is None or c.after.timed for c in found.layers) else "at least "
    alone = record.plan.solution.rivals.own_us is not None
    whose = "For this batch alone, without --batchInvariant, the" if alone else "The"
    lines += wrap(
        f"{whose} plan would take {least}{us_text(then_us, timing)} ({proof}) instead of {us_text(now_us, timing)}: "
        f"{us_text(then_us - now_us, timing, sign='+')} ({versus(found.after_us, found.before_us)})"
    )
    if found.pruned:
        lines += wrap(printable(f"These weights are not 2:4, and sparse only once pruned: {', '.join(found.pruned)}"))
    moved: list[tuple[str, Side, Side]] = [(printable(c.name), c.before, c.after) for c in found.layers]
    moved += [(f"reformat of {printable(hop.tensor)} removed", hop, None) for hop in found.reformats_gone]
    moved += [(f"reformat of {printable(hop.tensor)} added", None, hop) for hop in found.reformats_new]
    if not moved:
        return "\n".join([*lines, f"Nothing changes: this is already the plan{' of this batch alone' * alone}.", ""])
    now, then = ([side.us if side else 0.0 for side in sides] for sides in list(zip(*moved, strict=True))[1:])
    sums = round(sum(now), 2), round(sum(now), 2) + then_us - now_us
    rows = [
        [name, _cell(before, after, a, timing), _cell(after, before, b, timing)]
        for (name, before, after), a, b in zip(moved, summing(sums[0], now), summing(sums[1], then), strict=True)
    ]
    rows.append(["together", *(us_text(us, timing) for us in sums)])
    return "\n".join([*lines, "", *text_table(["change", "now", "then"], rows, gap=True), ""])


def _cell(side: Side, other: Side, us: float, timing: Timing) -> str:
    """Returns one cell of a row: the time, formats and kernel of the entry or reformat on this side, "-" if there is none.

    `other`: the other side of the row; `us`: the time to show.
    """
    if side is None:
        return "-" if isinstance(other, Hop) else "- (fused into another)"
    if isinstance(side, Hop):
        return f"{us_text(us, timing)} {side.from_}->{side.to}"
    fused = f"\nas {printable(side.op)}" if isinstance(other, Entry) and other.op != side.op else ""
    least = "" if side.timed else "at least "
    return f"{least}{us_text(us, timing)} {side.in_}->{side.out}\n{side.tactic.partition('__')[0]}{fused}"


def _entry(op: str, e: planned.Entry) -> Entry:
    """Returns an entry of the planner's graph as a record for answers."""
    ins, out = (e.ins[0].format, e.out.format) if e.tactic is None else (e.tactic.ins[0], e.tactic.out)
    return Entry(op, e.name, str(ins), str(out), e.us, e.timed)


def _hop(stored: Choices, g: Graph, hop: planned.Hop) -> Hop:
    """Returns a reformat of the planner's graph as a record for answers, with its time."""
    tensor, src, dst = hop
    shape = next(t.shape4 for t in stored.tensors if t.name == tensor)
    names = {canonical(f, shape): str(f) for f in reversed(representative(shape))}
    return Hop(tensor, names.get(src.format, str(src.format)), names.get(dst.format, str(dst.format)), g.reformat_us(*hop))


def _ops(stored: Choices, layer: str) -> set[str]:
    """Returns the names of the ops that may compute a layer. `layer`: a layer's or an op's name; if it is merged with siblings,
    the ops of each sibling are included.
    """
    named = [c for c in stored.choices if layer in (c.layer, c.op, *c.layers)]
    members = {m for c in named if layer in (c.layer, c.op) for m in (c.layers or [c.layer])} - {""}
    same = [c for c in stored.choices if c.layer and members & {*(c.layers or [c.layer])}]
    return {c.op for c in (*named, *same)}


def _test(stored: Choices, wish: str) -> Callable[[Choice, planned.Entry], bool]:
    """Returns the test whether an entry of an op grants the wish. Raises ValueError for a text that is no wish."""
    if wish in ("sparse", "dense"):
        return lambda c, e: e.tactic is not None and e.sparse == (wish == "sparse")
    parts = wish.split("->")
    if not WISH.fullmatch(wish) or any(p.rpartition(":")[2] not in LAYOUTS for p in parts):
        close = suggest([wish], ("sparse", "dense", *LAYOUTS))
        raise ValueError(f"{wish!r}: expected sparse, dense, a format like hwc8, or two like 'chw->hwc8'{close}")
    first, last = (_named(p) for p in (parts[0], parts[-1]))
    shapes = {t.name: t.shape4 for t in stored.tensors}

    def among(key: Key, formats: tuple[Format, ...], tensor: str) -> bool:
        return key.format in {canonical(f, shapes[tensor]) for f in formats}

    return lambda c, e: among(e.ins[0], first, c.inputs[0]) and among(e.out, last, c.output)


def _named(text: str) -> tuple[Format, ...]:
    """Returns the formats that a text names: one for "fp16:hwc8"; one for each type for "hwc8", which names no type."""
    return tuple(Format.parse(f"{dtype}:{text}") for dtype in DTYPES) if ":" not in text else (Format.parse(text),)


def _why_none(plan: PlanRecord, g: Graph, layer: str, wish: str, names: set[str]) -> str:
    """Returns the sentence on why no entry of the layer grants the wish. `names`: the ops that may compute it."""
    row = next((r for r in plan.sparsity.rows if r.layer == layer or r.op in names), None)
    if wish == "sparse":
        why = f": {row.reason}" + (f" ({row.detail})" if row.detail else "") if row else ": it has no weights"
        if row and row.if_sparse:  # predictions, also in a measured plan
            then, now = (us_text(us, PREDICTED) for us in (row.if_sparse.us, row.if_sparse.dense_us))
            why += f"; pruned to 2:4, its kernel is predicted to take {then} instead of {now}"
        return f"no sparse kernel can run this layer{why}"
    entries = [_entry(c.name, e) for c in g.choices if c.name in names for e in c.entries]
    pairs = dict.fromkeys(f"{e.in_}->{e.out}" for e in entries)
    return f"no kernel of this layer has these formats; it can have {', '.join(pairs)}"
