"""Random graphs of choices for the planner, small enough for brute force, which gives their optimum."""

import functools
import itertools
import random
from collections.abc import Iterable
from dataclasses import replace

from tactics.format import Key
from tactics.planner.graph import NEVER, Choice, Entry, Graph, Hop, Plan
from tactics.planner.plan import solve
from tactics.planner.reformats import hop_ps

SIX = ("chw", "chw16", "chw32", "hwc", "hwc8", "hwc16")
PAIRS = [(a, b) for a in SIX for b in SIX]


# ---- graphs


def small_graph(seed: int) -> Graph:
    """Returns a random graph of 1 to 6 ops with up to 3 formats: branches, joins, a tensor read twice, fusions that leave out
    tensors, ops without some formats, missing reformats, ends of fixed format. Times are small integers, so ties are common.
    """
    rng = random.Random(seed)
    names = ("a", "b", "c")[: rng.choice((2, 3, 3))]
    inputs = ("x0",) if rng.random() < 0.7 else ("x0", "x1")
    tensors, ops = list(inputs), []
    fan_out = rng.random() < 0.3
    for k in range(rng.randint(1, 5)):
        pool = tensors[:1] if fan_out and rng.random() < 0.7 else tensors[-3:]
        ins = tuple(rng.choice(pool) for _ in range(rng.choice((1, 1, 2))))
        if len(ins) == 2 and rng.random() < 0.2:
            ins = (ins[0], ins[0])
        ops.append((f"op{k}", ins, f"t{k}"))
        tensors.append(f"t{k}")
    formats = {t: names if rng.random() < 0.8 else tuple(sorted(rng.sample(names, len(names) - 1))) for t in tensors}

    def entries(num_inputs: int) -> tuple[Entry, ...]:
        made = []
        for k in range(rng.randint(1, 4)):
            ps = NEVER if rng.random() < 0.05 else rng.randint(0, 20)
            made.append(Entry(f"k{k}", tuple(rng.choice(names) for _ in range(num_inputs)), rng.choice(names), ps, k % 2 == 1))
        return tuple(made)

    choices = {name: [Choice(name, ins, out, entries(len(ins)))] for name, ins, out in ops}
    groups = []
    for name, ins, out in ops:  # `name` may run inside any of the ops that produce its inputs
        hosts = list(dict.fromkeys(op for op in ops if op[2] in ins and op[0] in choices))
        if not hosts or rng.random() < 0.5 or len(groups) == 2 or any(len(choices[h[0]]) > 1 for h in hosts):
            continue
        if choices[name][0].when or any(choices[h[0]][0].when for h in hosts):
            continue
        options = ("apart", *(f"into {h[0]}" for h in hosts))
        groups.append((name, options))
        choices[name] = [replace(choices[name][0], when=((name, "apart"),))]
        for host, host_ins, host_out in hosts:
            rest = [t for t in ins if t != host_out]
            left = [o for o in options if o != f"into {host}"]
            plain = choices[host][0]
            if rng.random() < 0.5:  # both ways to say "apart or into the other"
                choices[host] = [replace(plain, when=((name, o),)) for o in left]
            else:
                choices[host] = [replace(plain, when=tuple((name, o) for o in left))]
            both = (*host_ins, *rest)
            fused = Choice(f"{host} + {name}", both, out, entries(len(both)), ((name, f"into {host}"),))
            choices[host].append(fused)
    table = {}
    for t in tensors:
        for src, dst in itertools.permutations(names, 2):
            r = rng.random()
            table[t, src, dst] = None if r < 0.05 else NEVER if r < 0.1 else rng.randint(0, 15)
    read = {t for _, ins, _ in ops for t in ins}
    outputs = tuple(t for t in tensors[len(inputs) :] if t not in read or rng.random() < 0.1)
    pinned = {t: rng.choice(formats[t]) for t in inputs}
    pinned |= {t: rng.choice(names) for t in outputs if rng.random() < 0.7}
    every = tuple(c for cs in choices.values() for c in cs)
    return Graph(every, tuple(groups), pinned, inputs, outputs, formats, lambda t, a, b: table[t, a, b])


def conv_net(seed: int, blocks: tuple[int, ...] = (3, 4, 6, 3), formats=SIX, fuse: bool = True, tactics: int = 1) -> Graph:
    """Returns a graph like a bottleneck ResNet's: convolutions with every pair of formats, and Adds that are separate or, with
    `fuse`, inside one of the two convolutions before them.
    """
    rng = random.Random(seed)
    choices, groups, tensors = [], [], ["image"]

    def times(base, *rows):
        made = []
        for n in range(tactics):
            for ins, out in rows:
                ps = int(base * rng.lognormvariate(0, 0.35))
                made += [
                    Entry(f"dense{n}", ins, out, ps),
                    Entry(f"sparse{n}", ins, out, int(ps * rng.uniform(0.6, 1.4)), True),
                ]
        return tuple(made)

    def add_op(name, ins, rows, when=(), base=None, out=None):
        out = out or f"{name}.out"
        choices.append(Choice(name, ins, out, times(base or rng.lognormvariate(2.5, 0.8) * 1e6, *rows), when))
        if out not in tensors:
            tensors.append(out)
        return out

    pairs = [((a,), b) for a in formats for b in formats]
    same = [((a,), a) for a in formats]
    join = [((a, a), a) for a in formats]
    residual = [((a, b), b) for a in formats for b in formats]
    x = add_op("stem", ("image",), pairs)
    x = add_op("pool", (x,), same, base=3e6)
    for stage, count in enumerate(blocks):
        for b in range(count):
            n = f"s{stage}b{b}."
            y = add_op(n + "conv2", (add_op(n + "conv1", (x,), pairs),), pairs)
            g, out = n + "add", n + "add.out"
            hosts = [("conv3", y)] + ([("down", x)] if b == 0 else [])
            left = {
                h: [o for o in ("apart", "into conv3", "into down")[: len(hosts) + 1] if o != f"into {h}"] for h, _ in hosts
            }
            parts = [add_op(n + h, (src,), pairs, tuple((g, o) for o in left[h]) if fuse else ()) for h, src in hosts]
            parts = parts if b == 0 else [*parts, x]
            add_op(g, tuple(parts), join, ((g, "apart"),) if fuse else (), 3e6, out)
            if fuse:
                groups.append((g, ("apart", *(f"into {h}" for h, _ in hosts))))
                for k, (h, src) in enumerate(hosts):
                    add_op(f"{n}{h} + {g}", (src, parts[1 - k]), residual, ((g, f"into {h}"),), out=out)
            x = out
    out = add_op("fc", (add_op("mean", (x,), same, base=3e6),), pairs)
    table = {
        (t, a, b): int(3e6 + 1e6 * rng.lognormvariate(1, 0.8)) for t in tensors for a, b in itertools.permutations(formats, 2)
    }
    ends = {"image": formats[0], out: formats[0]}
    ports = ends, ("image",), (out,)
    return Graph(tuple(choices), tuple(groups), *ports, dict.fromkeys(tensors, formats), lambda t, a, b: table[t, a, b])


# ---- brute force: shares nothing with the planner


def holds(choice: Choice, options: dict) -> bool:
    """Returns whether a choice exists with these options (group -> option); literals of one group are alternatives."""
    return all(any(g == h and options[g] == o for g, o in choice.when) for h, _ in choice.when)


def spread(hop, names, produced, wanted) -> float:
    """Returns the least total time of a set of reformats (hops) that makes all `wanted` formats from `produced`."""
    hops = [(a, b) for a, b in itertools.permutations(names, 2) if hop(a, b) is not None and hop(a, b) < NEVER]
    best = float("inf")
    for chosen in itertools.product((False, True), repeat=len(hops)):
        taken = [h for h, yes in zip(hops, chosen, strict=True) if yes]
        reached = {produced}
        for _ in taken:
            reached |= {b for a, b in taken if a in reached}
        if reached >= wanted:
            best = min(best, sum(hop(a, b) for a, b in taken))
    return best


def brute(graph: Graph, allowed=None, cyclic: bool = False) -> float:
    """Returns the least total time over all options and entries, inf if there is no plan.

    `allowed`: op's name -> predicate on its entries; `cyclic`: plans whose ops wait for each other count too.
    """
    allowed = allowed or {}
    formats = {t: tuple(dict.fromkeys((*fs, graph.pinned.get(t, fs[0])))) for t, fs in graph.formats.items()}

    @functools.cache
    def reformats(tensor, produced, wanted):
        return spread(lambda a, b: graph.reformat_ps(tensor, a, b), formats[tensor], produced, wanted)

    best = float("inf")
    for taken in itertools.product(*(options for _, options in graph.groups)):
        options = {name: option for (name, _), option in zip(graph.groups, taken, strict=True)}
        live = [c for c in graph.choices if holds(c, options)]
        present = {*graph.inputs, *(c.output for c in live)}
        if not present.issuperset((*graph.outputs, *(t for c in live for t in c.inputs))):
            continue
        if not cyclic and not runs(graph, options):
            continue
        usable = [
            [
                e
                for e in c.entries
                if e.time_ps < NEVER
                and all(f in formats[t] for t, f in zip((*c.inputs, c.output), (*e.ins, e.out), strict=True))
                and allowed.get(c.name, lambda e: True)(e)
            ]
            for c in live
        ]
        for entries in itertools.product(*usable):
            made = {t: graph.pinned[t] for t in graph.inputs}
            made |= {c.output: e.out for c, e in zip(live, entries, strict=True)}
            wanted = {t: set() for t in made}
            for c, e in zip(live, entries, strict=True):
                for t, f in zip(c.inputs, e.ins, strict=True):
                    wanted[t].add(f)
            for t in graph.outputs:
                wanted[t] |= {graph.pinned[t]} if t in graph.pinned else set()
            total = sum(e.time_ps for e in entries)
            total += sum(reformats(t, made[t], frozenset(fs)) for t, fs in wanted.items())
            best = min(best, total)
    return best


def _check_entries(plan: Plan, live: list[Choice]) -> None:
    """Raises ValueError for wrong entries of a plan; `live`: the ops that exist with the plan's options."""
    if [c.name for c in live] != list(plan.entries):
        raise ValueError(f"plan has ops {list(plan.entries)}, its options make {[c.name for c in live]}")
    if wrong := [c.name for c in live if plan.entries[c.name] not in c.entries]:
        raise ValueError(f"op {wrong[0]} has no entry {plan.entries[wrong[0]]}")


def _add_targets(has: set[tuple[str, Key]], reformats: Iterable[Hop]) -> None:
    """Adds the results of the reformats, one after the other, to `has`: the (tensor, format) pairs that exist."""
    for t, src, dst in reformats:
        if (t, src) not in has or (t, dst) in has:
            raise ValueError(f"reformat of {t} from {src} to {dst}: source missing, or target there already")
        has.add((t, dst))


def evaluate(graph: Graph, plan: Plan) -> int:
    """Returns a plan's total in picoseconds, from the graph and the plan only. Raises ValueError if it is no plan of this
    graph."""
    live = [c for c in graph.choices if holds(c, plan.options)]
    _check_entries(plan, live)
    has = {(t, graph.pinned[t]) for t in graph.inputs} | {(c.output, plan.entries[c.name].out) for c in live}
    _add_targets(has, plan.reformats)
    needs = [(t, f) for c in live for t, f in zip(c.inputs, plan.entries[c.name].ins, strict=True)]
    needs += [(t, graph.pinned[t]) for t in graph.outputs if t in graph.pinned]
    if lacking := [need for need in needs if need not in has]:
        raise ValueError("tensor {} is wanted in {}, which nothing makes".format(*lacking[0]))
    lost = set(graph.outputs) - {t for t, _ in has}
    if lost:
        raise ValueError(f"network outputs {sorted(lost)} are not produced")
    return sum(e.time_ps for e in plan.entries.values()) + sum(hop_ps(graph, hop) for hop in plan.reformats)


def solved(graph: Graph, **kwargs):
    """Returns the planner's plan, after `evaluate` has confirmed its total; None if the planner finds no plan."""
    try:
        plan = solve(graph, **kwargs)
    except ValueError as e:
        assert str(e).startswith("no plan exists: "), e
        return None
    assert evaluate(graph, plan) == plan.total_ps
    assert list(plan.options) == [g for g, _ in graph.groups]
    return plan


def merging_graph(seed: int) -> Graph:
    """Returns a small random graph in which some pairs of ops may be merged into one op, whose output has a part for each. If
    one of a pair depends on the other, directly or through another merged pair, merging closes a cycle.
    """
    rng = random.Random(seed)
    names = ("a", "b")
    ops, tensors = [], ["x0"]
    for k in range(rng.randint(3, 4)):
        ops.append((f"op{k}", (rng.choice(tensors[-3:]),), f"t{k}"))
        tensors.append(f"t{k}")

    def entries(n: int, low: int, high: int) -> tuple[Entry, ...]:
        formats = [(tuple(rng.choice(names) for _ in range(n)), rng.choice(names)) for _ in range(2)]
        return tuple(Entry(f"k{i}", ins, out, rng.randint(low, high), i % 2 == 1) for i, (ins, out) in enumerate(formats))

    choices = {name: Choice(name, ins, out, entries(1, 5, 20)) for name, ins, out in ops}
    every, groups, used = [], [], set()
    for a, b in rng.sample(list(itertools.combinations(ops, 2)), rng.randint(1, 2)):
        if {a[0], b[0]} & used:
            continue
        used |= {a[0], b[0]}
        group = f"{a[0]} || {b[0]}"
        groups.append((group, ("apart", "merged")))
        ins = tuple(dict.fromkeys((*a[1], *b[1])))
        every.append(Choice(group, ins, f"{group}.out", entries(len(ins), 0, 8), ((group, "merged"),)))
        tensors.append(f"{group}.out")
        for name, _, out in (a, b):
            every.append(Choice(f"{name} part", (f"{group}.out",), out, entries(1, 0, 2), ((group, "merged"),)))
            choices[name] = replace(choices[name], when=((group, "apart"),))
    every += choices.values()
    hops = {(t, a, b): rng.randint(0, 9) for t in tensors for a, b in itertools.permutations(names, 2)}
    read = {t for c in every for t in c.inputs}
    outputs = tuple(t for t in (op[2] for op in ops) if t not in read) or (ops[-1][2],)
    return Graph(
        tuple(every), tuple(groups), {"x0": "a"}, ("x0",), outputs, dict.fromkeys(tensors, names), lambda t, a, b: hops[t, a, b]
    )


def sibling_graph(seed: int) -> Graph:
    """Returns a random graph like an inception module: two or three convolutions of one input, separate or merged. A join reads
    the first one's output and another tensor; it exists in two forms, for separate inputs and for the merged output.
    """
    rng = random.Random(seed)
    names = ("a", "b")
    members = ("f0", "f1", "f2")[: rng.choice((2, 2, 3))]

    def entries(n: int, low: int, high: int, count: int = 3) -> tuple[Entry, ...]:
        formats = [(tuple(rng.choice(names) for _ in range(n)), rng.choice(names)) for _ in range(count)]
        made = [(ins, out, rng.randint(low, high), rng.random() < 0.5) for ins, out in formats]
        return tuple(Entry(f"k{i}", *entry) for i, entry in enumerate(made))

    group, whole = " || ".join(members), "y of all"
    apart, merged, around = ((group, o) for o in ("apart", "merged", "around"))
    choices = [Choice(group, ("x",), whole, entries(1, 5, 20, 4), (merged, around))]
    for m in members:
        choices.append(Choice(f"{m} part", (whole,), f"y{m}", entries(1, 0, 2), (merged,) if m == "f0" else (merged, around)))
        choices.append(Choice(m, ("x",), f"y{m}", entries(1, 2, 12), (apart,)))
    choices.append(Choice("g", ("yf1",), "z", entries(1, 2, 9)))
    choices.append(Choice("join", ("yf0", "z"), "out", entries(2, 0, 4, 5), (apart, merged)))
    choices.append(Choice("join", (whole, "z"), "wide", entries(2, 0, 4, 5), (around,)))
    choices.append(Choice("join part", ("wide",), "out", entries(1, 0, 1), (around,)))
    tensors = ["x", *dict.fromkeys(c.output for c in choices)]
    hops = {(t, a, b): rng.randint(0, 5) for t in tensors for a, b in itertools.permutations(names, 2)}
    outputs = ("out", "yf2") if "f2" in members else ("out",)
    groups = ((group, ("apart", "merged", "around")),)
    return Graph(
        tuple(choices), groups, {"x": "a"}, ("x",), outputs, dict.fromkeys(tensors, names), lambda t, a, b: hops[t, a, b]
    )


def runs(graph: Graph, options: dict) -> bool:
    """Returns whether the ops that exist with these options can be ordered, that is, have no cycle."""
    left, made = [c for c in graph.choices if holds(c, options)], set(graph.inputs)
    while left:
        ready = [c for c in left if set(c.inputs) <= made]
        if not ready:
            return False
        made |= {c.output for c in ready}
        left = [c for c in left if c not in ready]
    return True


def chain(entries, pinned, reformat, formats=("a", "b", "c"), outputs=("y",)) -> Graph:
    """Returns a graph of one op with these entries, x -> y; `pinned`: the ends of fixed format."""
    return Graph(
        (Choice("f", ("x",), "y", tuple(entries)),), (), pinned, ("x",), outputs, {"x": formats, "y": formats}, reformat
    )


def faster(graph: Graph, names, sparse: bool, factor: float) -> Graph:
    """Returns the graph with the times of the sparse (or dense) entries of ops `names` divided by `factor`. All its times are
    in millionths of a picosecond, so that rounding loses nothing.
    """

    def entry(c, e):
        return replace(e, time_ps=round(e.time_ps * 1e6 / (factor if c.name in names and e.sparse == sparse else 1)))

    choices = tuple(replace(c, entries=tuple(entry(c, e) for e in c.entries)) for c in graph.choices)

    def reformat_ps(*hop):
        ps = graph.reformat_ps(*hop)
        return None if ps is None or ps >= NEVER else ps * 10**6

    return replace(graph, choices=choices, reformat_ps=reformat_ps)


def layers_of(graph: Graph) -> list[tuple[str, ...]]:
    """Returns, for each layer, the names of its ops: an op and its fused forms, siblings merged and separate, of which every
    plan has some.
    """
    absorbed = {name for name, _ in graph.groups}
    layers: dict[str, dict] = {}
    for c in graph.choices:
        host = c.name.split(" + ")[0]
        if host not in absorbed and "join" not in c.name and "part" not in c.name:
            layers.setdefault(host, {})[c.name] = None
    for merged, members in ((g, g.split(" || ")) for g in absorbed if " || " in g):
        for m in members:
            layers[m] = {m: None, merged: None}
        layers[merged] = dict.fromkeys((merged, *members))
    return [tuple(names) for names in layers.values()]
