"""What would the plan be if a layer ran otherwise? Answered from an engine alone, which carries the planner's tables.

`store` makes a record of the planner's graph (plan_record.Choices), `graph` reads it back, and `what_if` solves it again with
some layers held to sparse, to dense or to a format.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from gpu_runtime.errors import EngineError
from gpu_runtime.explain.figures import proven, summing, times_are, us_text
from gpu_runtime.explain.names import matching
from gpu_runtime.planning.tables import Table
from gpu_runtime.runtime.findings import ChoiceRow, Choices, TensorKeys
from gpu_runtime.runtime.plan_record import EngineRecord, PlanRecord, Timing
from gpu_runtime.text import printable, versus, wrap
from gpu_runtime.text import table as text_table
from tactics.format import DTYPES, Format, Key, canonical, representative
from tactics.planner import graph as planned
from tactics.planner import plan as planner
from tactics.planner.graph import Choice, Graph
from tactics.tactic import Tactic

Test = Callable[[planned.Entry], bool]
WISH = re.compile(r"sparse|dense|[a-z0-9:]+(->[a-z0-9:]+)?")


@dataclass(frozen=True, slots=True)
class Entry:
    """How an operation runs: in, out are the formats of its first input and of its output."""

    op: str
    tactic: str
    in_: str
    out: str
    us: float


@dataclass(frozen=True, slots=True)
class Change:
    """A layer before and after; null where another layer does its work."""

    name: str
    before: Entry | None
    after: Entry | None


@dataclass(frozen=True, slots=True)
class Hop:
    """A reformat of a tensor."""

    tensor: str
    from_: str
    to: str
    us: float


@dataclass(frozen=True, slots=True)
class Answer:
    """The best plan that grants the wishes, beside the engine's own: what takes how long, and all that moves."""

    wishes: Mapping[str, str]
    before_us: float
    after_us: float
    status: str
    layers: tuple[Change, ...]
    reformats_gone: tuple[Hop, ...]
    reformats_new: tuple[Hop, ...]


def store(table: Table) -> Choices:
    """The planner's graph as a record: of the entries with the same formats only the fastest dense and the fastest sparse."""
    g, network = table.graph, table.network
    tensors = {t: i for i, t in enumerate(network.tensors)}
    keys = {t: tuple(dict.fromkeys((*g.formats.get(t, ()), *filter(None, [g.pinned.get(t)])))) for t in tensors}
    tactics: dict[Tactic | None, int] = {}
    choices = []
    for c, op in zip(g.choices, network.ops, strict=True):
        rows = []
        for e in c.entries:
            around = [*zip((*e.ins, e.out), (*c.inputs, c.output), strict=True)]
            if all(f in keys[t] for f, t in around):
                places = (keys[t].index(f) for f, t in around)
                rows.append((tactics.setdefault(e.tactic, len(tactics)), *places, e.time_ps, e.premium_ps))
        ins = tuple(tensors[t] for t in c.inputs)
        choices.append(ChoiceRow(c.name, op.layer, tuple(op.layers), ins, tensors[c.output], tuple(c.when), tuple(rows)))

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


def graph(stored: Choices) -> Graph:
    """The planner's graph as it was stored."""
    times, keys = {t.name: t.reformat_ps for t in stored.tensors}, {t.name: t.keys for t in stored.tensors}
    place = {name: {key: i for i, key in enumerate(each)} for name, each in keys.items()}

    def reformat_ps(tensor: str, src: Key, dst: Key) -> int | None:
        return times[tensor][place[tensor][src]][place[tensor][dst]]

    choices = []
    for c in stored.choices:
        *inputs, output = (stored.tensors[i].name for i in (*c.in_, c.out))
        entries = []
        for number, *places, ps, premium_ps in c.entries:
            *ins, out = (keys[t][i] for t, i in zip((*inputs, output), places, strict=True))
            tactic = stored.tactics[number]
            entries.append(planned.Entry(tactic, tuple(ins), out, ps, tactic is not None and tactic.sparse, premium_ps))
        choices.append(Choice(c.op, tuple(inputs), output, tuple(entries), c.when))
    return Graph(tuple(choices), stored.groups, stored.pinned, stored.inputs, stored.outputs, keys, reformat_ps)


def what_if(record: EngineRecord, wishes: Mapping[str, str]) -> Answer:
    """The best plan with each layer named, or that a pattern fits, held to "sparse", "dense", a format ("hwc8", in and out) or
    a pair of formats ("chw->hwc8"), beside the engine's own. Other layers are free to change. Raises ValueError for a layer or
    wish that there is none of, EngineError where the engine carries no tables."""
    plan, stored = record.plan, record.plan.choices
    if stored is None:
        raise EngineError("this engine carries no tables to plan with: build it again")
    g = graph(stored)
    force: dict[str, Test] = {}
    for layer, wish in wishes.items():
        force |= _granted(plan, stored, g, layer, wish)
    before = planner.solve(g)
    try:
        after = planner.solve(g, force=force)
    except ValueError:
        raise ValueError("no plan fulfils " + ", ".join(f"{k}={v}" for k, v in wishes.items()) + " together") from None
    layers = {c.op: c.layer or c.op for c in stored.choices}
    sides = [{layers[name]: _entry(name, e) for name, e in p.entries.items()} for p in (before, after)]
    changed = (Change(name, sides[0].get(name), sides[1].get(name)) for name in dict.fromkeys(layers.values()))
    gone = [h for h in before.reformats if h not in after.reformats]
    new = [h for h in after.reformats if h not in before.reformats]
    return Answer(
        dict(wishes),
        before.us,
        after.us,
        after.status,
        tuple(c for c in changed if c.before != c.after),
        tuple(_hop(stored, g, h) for h in gone),
        tuple(_hop(stored, g, h) for h in new),
    )


def _granted(plan: PlanRecord, stored: Choices, g: Graph, wanted: str, wish: str) -> dict[str, Test]:
    """What holds each layer of that name to the wish; of several that a pattern fits, those that can grant it. ValueError
    where none can."""
    found = matching(wanted, stored.choices, lambda c: [x for x in (c.layer, c.op, *c.layers) if x], "layer of this engine")
    exact = any(wanted in (c.layer, c.op, *c.layers) for c in found)
    if not exact and wish in ("sparse", "dense"):  # of what a pattern fits, the layers with weights
        found = [c for c in found if c.layer] or found
    layers = [wanted] if exact else list(dict.fromkeys(c.layer or c.op for c in found))
    force, refused = dict[str, Test](), list[ValueError]()
    for layer in layers:
        try:
            force |= _forced(plan, stored, g, layer, wish)
        except ValueError as e:
            refused.append(e)
    if not force:
        raise refused[0]
    return force


def _forced(plan: PlanRecord, stored: Choices, g: Graph, layer: str, wish: str) -> dict[str, Test]:
    """Operation -> whether one of its entries grants the wish. ValueError where none of the layer's does."""
    names, test = _ops(stored, layer), _test(stored, wish)
    mine = [c for c in g.choices if c.name in names]
    if not any(test(c, e) for c in mine for e in c.entries):
        raise ValueError(f"{layer}={wish}: {_why_none(plan, g, layer, wish, names)}")
    return {c.name: partial(test, c) for c in mine}


def text(record: EngineRecord, found: Answer) -> str:
    """What `what_if` found, as a table of all that moves; what is shown of it adds up to the plans' times as shown."""
    timing, asked = record.timing, ", ".join(f"{layer}={wish}" for layer, wish in found.wishes.items())
    now_us, then_us = round(found.before_us, 2), round(found.after_us, 2)
    lines = wrap(printable(f"What if {asked}? {record.model.name} for {record.device.title}; {times_are(timing)}"))
    verdict = proven(record.plan, timing) if found.status == "proven" else "not proven minimal"
    lines += wrap(
        f"The plan would take {us_text(then_us, timing)} ({verdict}) instead of {us_text(now_us, timing)}: "
        f"{us_text(then_us - now_us, timing, sign='+')} ({versus(found.after_us, found.before_us)})"
    )
    moved: list[tuple[Change | Hop, float | None, float | None]] = [
        *((c, c.before.us if c.before else None, c.after.us if c.after else None) for c in found.layers),
        *((hop, hop.us, None) for hop in found.reformats_gone),
        *((hop, None, hop.us) for hop in found.reformats_new),
    ]
    if not moved:
        return "\n".join([*lines, "Nothing moves: that is the plan already.", ""])
    now, then = [us or 0 for _, us, _ in moved], [us or 0 for _, _, us in moved]
    sums = round(sum(now), 2), round(sum(now), 2) + then_us - now_us
    shown = zip(moved, summing(sums[0], now), summing(sums[1], then), strict=True)
    rows = [_row(x, None if a is None else p, None if b is None else q, timing) for (x, a, b), p, q in shown]
    rows.append(["together", *(us_text(us, timing) for us in sums)])
    return "\n".join([*lines, "", *text_table(["what moves", "now", "then"], rows, gap=True), ""])


def _row(moved: Change | Hop, now_us: float | None, then_us: float | None, timing: Timing) -> list[str]:
    """What moves, and both sides of it with the times as they are shown; None: not there."""
    if isinstance(moved, Change):
        sides = (moved.before, now_us or 0), (moved.after, then_us or 0)
        return [printable(moved.name), *(_side(moved, entry, us, timing) for entry, us in sides)]
    cells = ("-" if us is None else f"{us_text(us, timing)} {moved.from_}->{moved.to}" for us in (now_us, then_us))
    return [f"reformat of {printable(moved.tensor)} {'goes' if then_us is None else 'comes'}", *cells]


def _side(change: Change, entry: Entry | None, us: float, timing: Timing) -> str:
    if entry is None:
        return "- (part of another)"
    ops = {e.op for e in (change.before, change.after) if e}
    fused = f"\nas {printable(entry.op)}" if len(ops) > 1 else ""
    return f"{us_text(us, timing)} {entry.in_}->{entry.out}\n{entry.tactic.partition('__')[0]}{fused}"


def _entry(op: str, e: planned.Entry) -> Entry:
    ins, out = (e.ins[0].format, e.out.format) if e.tactic is None else (e.tactic.ins[0], e.tactic.out)
    return Entry(op, e.name, str(ins), str(out), e.us)


def _hop(stored: Choices, g: Graph, hop: planned.Hop) -> Hop:
    tensor, src, dst = hop
    shape = next(t.shape4 for t in stored.tensors if t.name == tensor)
    names = {canonical(f, shape): str(f) for f in reversed(representative(shape))}
    return Hop(tensor, names.get(src.format, str(src.format)), names.get(dst.format, str(dst.format)), g.reformat_us(*hop))


def _ops(stored: Choices, layer: str) -> set[str]:
    """Names of the ops that a layer may be: by its own name or that of an op; of merged siblings, what each may be."""
    named = [c for c in stored.choices if layer in (c.layer, c.op, *c.layers)]
    members = {m for c in named if layer in (c.layer, c.op) for m in (c.layers or [c.layer])} - {""}
    same = [c for c in stored.choices if c.layer and members & {*(c.layers or [c.layer])}]
    return {c.op for c in (*named, *same)}


def _test(stored: Choices, wish: str) -> Callable[[Choice, planned.Entry], bool]:
    if wish in ("sparse", "dense"):
        return lambda c, e: e.tactic is not None and e.sparse == (wish == "sparse")
    if not WISH.fullmatch(wish):
        raise ValueError(f"{wish!r}: expected sparse, dense, a format like hwc8, or two like 'chw->hwc8'")
    parts = wish.split("->")
    first, last = (_named(p) for p in (parts[0], parts[-1]))
    shapes = {t.name: t.shape4 for t in stored.tensors}

    def among(key: Key, formats: tuple[Format, ...], tensor: str) -> bool:
        return key.format in {canonical(f, shapes[tensor]) for f in formats}

    return lambda c, e: among(e.ins[0], first, c.inputs[0]) and among(e.out, last, c.output)


def _named(text: str) -> tuple[Format, ...]:
    """The formats that `text` names: without a type, that layout in each of them."""
    return tuple(Format.parse(f"{dtype}:{text}") for dtype in DTYPES) if ":" not in text else (Format.parse(text),)


def _why_none(plan: PlanRecord, g: Graph, layer: str, wish: str, names: set[str]) -> str:
    """The sentence on a wish that no entry of the layer fulfils."""
    row = next((r for r in plan.sparsity.rows if r.layer == layer or r.op in names), None)
    if wish == "sparse":
        why = f": {row.reason}" + (f" ({row.detail})" if row.detail else "") if row else ": it has no weights"
        return f"no sparse kernel can run this layer{why}"
    entries = [_entry(c.name, e) for c in g.choices if c.name in names for e in c.entries]
    pairs = dict.fromkeys(f"{e.in_}->{e.out}" for e in entries)
    return f"no kernel of this layer does that; its formats are {', '.join(pairs)}"
