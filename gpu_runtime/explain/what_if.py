"""What would the plan be if a layer ran otherwise? Answered from an engine alone, which carries the planner's tables.

`store` writes the planner's graph into plain data (runtime.engine describes it as `choices`), `graph` reads it back, and
`what_if` solves it again with some layers held to sparse, to dense or to a format.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from gpu_runtime.errors import EngineError
from gpu_runtime.planning.tables import Table
from gpu_runtime.text import printable, tactic_text, times_are, us_text, versus, wrap
from gpu_runtime.text import table as text_table
from tactics.format import DTYPES, Format, Key, canonical, representative
from tactics.planner import plan as planner
from tactics.planner.graph import Choice, Entry, Graph, Hop
from tactics.tactic import IN_PLACE, Tactic

WISH = re.compile(r"sparse|dense|[a-z0-9:]+(->[a-z0-9:]+)?")


def store(table: Table) -> dict:
    """The planner's graph as plain data: of the entries with the same formats only the fastest dense and the fastest sparse."""
    g, network = table.graph, table.network
    tensors = {t: i for i, t in enumerate(network.tensors)}
    keys = {t: list(dict.fromkeys((*g.formats.get(t, ()), *filter(None, [g.pinned.get(t)])))) for t in tensors}
    tactics: dict[str, int] = {}
    choices = []
    for c, op in zip(g.choices, network.ops, strict=True):
        rows = []
        for e in c.entries:
            if all(f in keys[t] for f, t in zip((*e.ins, e.out), (*c.inputs, c.output), strict=True)):
                places = [keys[t].index(f) for f, t in zip((*e.ins, e.out), (*c.inputs, c.output), strict=True)]
                rows.append([tactics.setdefault(e.name, len(tactics)), *places, e.time_ps])
        choices.append({
            "op": c.name, "layer": op.layer, "layers": list(op.layers),
            "in": [tensors[t] for t in c.inputs], "out": tensors[c.output],
            "when": [list(w) for w in c.when], "entries": rows,
        })  # fmt: skip
    return {
        "tensors": [
            {"name": t, "shape4": list(shape), "keys": [*map(str, keys[t])],
             "reformat_ps": [[0 if a == b else g.reformat_ps(t, a, b) for b in keys[t]] for a in keys[t]]}
            for t, shape in network.tensors.items()
        ],
        "tactics": list(tactics), "choices": choices, "groups": [[name, list(options)] for name, options in g.groups],
        "pinned": {t: str(key) for t, key in g.pinned.items()}, "inputs": list(g.inputs), "outputs": list(g.outputs),
    }  # fmt: skip


def graph(stored: Mapping) -> Graph:
    """The planner's graph as it was stored."""
    tensors = stored["tensors"]
    tactics = [None if name == IN_PLACE else Tactic.parse(name) for name in stored["tactics"]]
    times = {t["name"]: t["reformat_ps"] for t in tensors}
    keys = {t["name"]: tuple(map(Key.parse, t["keys"])) for t in tensors}
    place = {name: {key: i for i, key in enumerate(each)} for name, each in keys.items()}

    def reformat_ps(tensor: str, src: Key, dst: Key) -> int | None:
        return times[tensor][place[tensor][src]][place[tensor][dst]]

    choices = []
    for c in stored["choices"]:
        *inputs, output = (tensors[i]["name"] for i in (*c["in"], c["out"]))
        entries = []
        for number, *places, ps in c["entries"]:
            *ins, out = (keys[t][i] for t, i in zip((*inputs, output), places, strict=True))
            tactic = tactics[number]
            entries.append(Entry(tactic, tuple(ins), out, ps, tactic is not None and tactic.sparse))
        choices.append(Choice(c["op"], tuple(inputs), output, tuple(entries), tuple(tuple(w) for w in c["when"])))
    return Graph(
        tuple(choices), tuple((name, tuple(options)) for name, options in stored["groups"]),
        {t: Key.parse(key) for t, key in stored["pinned"].items()}, tuple(stored["inputs"]), tuple(stored["outputs"]), keys,
        reformat_ps,
    )  # fmt: skip


def what_if(plan: Mapping, wishes: Mapping[str, str]) -> dict:
    """The best plan with each named layer held to "sparse", "dense", a format ("hwc8", in and out) or a pair of formats
    ("chw->hwc8"), beside the engine's own: {wishes, before_us, after_us, status, layers: [{name, before, after}] that change
    (each {op, tactic, in, out, us} or null), reformats_gone, reformats_new: [{tensor, from, to, us}]}. Other layers are free to
    change. Raises ValueError for a layer or wish that there is none of, EngineError where the engine carries no tables.
    """
    stored = plan.get("choices")
    if not stored:
        raise EngineError("this engine carries no tables to plan with: it was written by an older version; build it again")
    g = graph(stored)
    force: dict[str, Callable[[Entry], bool]] = {}
    for layer, wish in wishes.items():
        names = _ops(stored, layer)
        test = _test(stored, wish)
        for c in g.choices:
            if c.name in names:
                force[c.name] = lambda e, c=c, test=test: test(c, e)
        if not any(test(c, e) for c in g.choices if c.name in names for e in c.entries):
            raise ValueError(f"{layer}={wish}: {_why_none(plan, g, layer, wish, names)}")
    before = planner.solve(g)
    try:
        after = planner.solve(g, force=force)
    except ValueError:
        raise ValueError("no plan fulfils " + ", ".join(f"{k}={v}" for k, v in wishes.items()) + " together") from None
    layers = {c["op"]: c["layer"] or c["op"] for c in stored["choices"]}
    sides = [{}, {}]
    for side, p in zip(sides, (before, after), strict=True):
        for name, e in p.entries.items():
            side[layers[name]] = {"op": name, **_entry(e)}
    changed = [
        {"name": name, "before": sides[0].get(name), "after": sides[1].get(name)}
        for name in dict.fromkeys(layers.values())
        if sides[0].get(name) != sides[1].get(name)
    ]
    gone = [h for h in before.reformats if h not in after.reformats]
    new = [h for h in after.reformats if h not in before.reformats]
    return {
        "wishes": dict(wishes), "before_us": before.total_ps / 1e6, "after_us": after.total_ps / 1e6, "status": after.status,
        "layers": changed, "reformats_gone": [_hop(stored, g, h) for h in gone],
        "reformats_new": [_hop(stored, g, h) for h in new],
    }  # fmt: skip


def text(plan: Mapping, found: Mapping) -> str:
    """What `what_if` found, as a table of all that moves."""
    asked = ", ".join(f"{layer}={wish}" for layer, wish in found["wishes"].items())
    cost = found["after_us"] - found["before_us"]
    lines = wrap(printable(f"What if {asked}? {plan['model']['name']} for {plan['device']['title']}; {times_are(plan)}"))
    verdict = "proven minimal" if found["status"] == "proven" else "not proven minimal"
    lines += wrap(
        f"The plan would take {us_text(found['after_us'], plan)} ({verdict}) instead of {us_text(found['before_us'], plan)}: "
        f"{us_text(cost, plan, sign='+')} ({versus(found['after_us'], found['before_us'])})"
    )
    rows = [[printable(c["name"]), *(_side(c, side, plan) for side in ("before", "after"))] for c in found["layers"]]
    for key, what in (("reformats_gone", "goes"), ("reformats_new", "comes")):
        for hop in found[key]:
            cell = f"{us_text(hop['us'], plan)} {hop['from']}->{hop['to']}"
            rows.append([f"reformat of {printable(hop['tensor'])} {what}", *((cell, "-") if what == "goes" else ("-", cell))])
    if not rows:
        return "\n".join([*lines, "Nothing moves: that is the plan already.", ""])
    return "\n".join([*lines, "", *text_table(["what moves", "now", "then"], rows, caps=(40, 38, 38), gap=True), ""])


def _side(change: Mapping, side: str, plan: Mapping) -> str:
    entry = change[side]
    if entry is None:
        return "- (part of another)"
    ops = {e["op"] for e in (change["before"], change["after"]) if e}
    fused = f"\nas {printable(entry['op'])}" if len(ops) > 1 else ""
    return f"{us_text(entry['us'], plan)} {entry['in']}->{entry['out']}\n{tactic_text(entry['tactic'])}{fused}"


def _entry(e: Entry) -> dict:
    ins, out = (e.ins[0].format, e.out.format) if e.tactic is None else (e.tactic.ins[0], e.tactic.out)
    return {"tactic": e.name, "in": str(ins), "out": str(out), "us": e.time_ps / 1e6}


def _hop(stored: Mapping, g: Graph, hop: Hop) -> dict:
    tensor, src, dst = hop
    shape = next(t["shape4"] for t in stored["tensors"] if t["name"] == tensor)
    names = {canonical(f, tuple(shape)): str(f) for f in reversed(representative(tuple(shape)))}
    return {
        "tensor": tensor, "from": names.get(src.format, str(src.format)), "to": names.get(dst.format, str(dst.format)),
        "us": g.reformat_ps(*hop) / 1e6,
    }  # fmt: skip


def _ops(stored: Mapping, layer: str) -> set[str]:
    """Names of the ops that a layer may be: by its own name or that of an op; of merged siblings, what each may be."""
    named = [c for c in stored["choices"] if layer in (c["layer"], c["op"], *c["layers"])]
    members = {m for c in named if layer in (c["layer"], c["op"]) for m in (c["layers"] or [c["layer"]])} - {""}
    same = [c for c in stored["choices"] if c["layer"] and members & {*(c["layers"] or [c["layer"]])}]
    names = {c["op"] for c in (*named, *same)}
    if not names:
        known = list(dict.fromkeys(c["layer"] or c["op"] for c in stored["choices"]))
        raise ValueError(f"{layer!r} is no layer of this engine: expected one of {', '.join(known)}")
    return names


def _test(stored: Mapping, wish: str) -> Callable[[Choice, Entry], bool]:
    if wish in ("sparse", "dense"):
        return lambda c, e: e.tactic is not None and e.sparse == (wish == "sparse")
    if not WISH.fullmatch(wish):
        raise ValueError(f"{wish!r}: expected sparse, dense, a format like hwc8, or two like 'chw->hwc8'")
    parts = wish.split("->")
    first, last = (_named(p) for p in (parts[0], parts[-1]))
    shapes = {t["name"]: tuple(t["shape4"]) for t in stored["tensors"]}

    def among(key: Key, formats: tuple[Format, ...], tensor: str) -> bool:
        return key.format in {canonical(f, shapes[tensor]) for f in formats}

    return lambda c, e: among(e.ins[0], first, c.inputs[0]) and among(e.out, last, c.output)


def _named(text: str) -> tuple[Format, ...]:
    """The formats that `text` names: without a type, that layout in each of them."""
    return tuple(Format.parse(f"{dtype}:{text}") for dtype in DTYPES) if ":" not in text else (Format.parse(text),)


def _why_none(plan: Mapping, g: Graph, layer: str, wish: str, names: set[str]) -> str:
    """The sentence on a wish that no entry of the layer fulfils."""
    row = next((r for r in plan["sparsity"]["rows"] if r["layer"] == layer or r["op"] in names), None)
    if wish == "sparse":
        why = f": {row['reason']}" + (f" ({row['detail']})" if row.get("detail") else "") if row else ": it has no weights"
        return f"no sparse kernel can run this layer{why}"
    entries = [_entry(e) for c in g.choices if c.name in names for e in c.entries]
    pairs = dict.fromkeys(f"{e['in']}->{e['out']}" for e in entries)
    return f"no kernel of this layer does that; its formats are {', '.join(pairs)}"
