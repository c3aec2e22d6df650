"""A lowered network and the times of its tactics -> the planner's graph, the plan, its counterfactuals and its rivals."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product

from cuda_kernels.device import Device
from gpu_runtime.errors import ModelError
from gpu_runtime.network import Network, Op
from gpu_runtime.planning import places
from gpu_runtime.planning.places import base
from tactics.candidates import at_edges, candidates, rejected
from tactics.families.table import STRIDED, STRIDED_RESIDUAL
from tactics.format import HALF_FORMATS, PREFERRED, Format, canonical, representative
from tactics.launches import launches
from tactics.measure.timing import Time
from tactics.planner import plan
from tactics.planner.graph import MAX_FORMATS, Choice
from tactics.problems.problem import ConcatProblem, ConvProblem, ConvTransposeProblem, Problem, ReformatProblem
from tactics.problems.protocol import Feature
from tactics.tactic import Tactic

Timer = Callable[[Problem, Iterable[Tactic]], Mapping[Tactic, Time]]
MANY_PLACES = 64  # ways to place the inputs of one Concat that is copied; beyond, each has memory of its own

MAX_EDGE_CHOICES = 64  # combinations of alternative input and output formats: a plan is solved for each

__all__ = [
    "PREFERRED", "Table", "forced", "format_of", "if_sparse", "ops_of", "representative", "rivals", "tabulate", "untimed",
    "workspace",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Table:
    """Everything the planner needs to know, and what explains its choice afterwards.

    `times`: op index -> tactic -> Time; `io`: network input or output tensor -> the Format it has outside; `sparse`: whether
    sparse tactics were considered; `reformats`: the times of those the planner asked for; `scratch`: bytes of workspace that a
    tactic may use, None: any number; `beside`: what places.beside lets tensors be.
    """

    network: Network
    device: Device
    io: Mapping[str, Format]
    times: tuple[Mapping[Tactic, Time], ...]
    graph: plan.Graph
    sparse: bool = True
    reformats: Mapping[ReformatProblem, Mapping[Tactic, Time]] = field(default_factory=dict)
    scratch: int | None = None
    beside: Mapping[str, tuple[Format, ...]] = field(default_factory=dict)


def tabulate(network: Network, device: Device, timer: Timer, *, sparse: bool, io: Mapping[str, Format | tuple[Format, ...]],
             exhaustive: bool = False, scratch: int | None = None,
             progress: Callable[[str], None] = lambda text: None) -> Table:  # fmt: skip
    """Time every candidate of every op in every format it may have. Raises ModelError where an op has none.

    `sparse`: whether sparse tactics are considered; `io`: the format of every network input and output outside, or several,
    of which the fastest plan's is taken; `exhaustive`: time also those whose formats are other names for the same addresses
    (the faster time counts for both); `scratch`: bytes of workspace that a tactic may use; `progress` is told each op's name
    before it is timed.
    """
    asked = {t: (f,) if isinstance(f, Format) else tuple(f) for t, f in io.items()}
    if math.prod(map(len, asked.values())) > MAX_EDGE_CHOICES:
        raise ValueError(f"formats of inputs and outputs: more than {MAX_EDGE_CHOICES} combinations; name fewer alternatives")
    named = {t: network.formats(t) for t in network.tensors}
    beside = places.beside(network, asked)
    edges = {t: _outside(network, t, (*asked.get(t, ()), *beside.get(t, ()))) for t in named}
    usable = {t: named[t] + edges[t] for t in named}
    timed: dict[tuple, Mapping[Tactic, Time]] = {}  # by all that decides the times: ops alike are timed once
    times, missing, unable = [], [], []
    for op in network.ops:
        progress(op.name)
        around = _around(network, op, usable, edges)
        alike = op.problem, network.dtypes(op), network.is_straight(op), around
        if alike not in timed:
            timed[alike] = _timed(*alike, device, timer, sparse=sparse, exhaustive=exhaustive, scratch=scratch)
        times.append(timed[alike])
        if not times[-1] and not any(places.views(op)):
            reasons = dict.fromkeys(reason for _, reason in rejected(op.problem, device, network.dtypes(op)))
            missing.append(f"  {op.name}: {'; '.join(list(reasons)[:4]) or 'no tactic could be timed'}")
            unable.append(op)
    able, stuck = _without(network, unable), f"{network.name}: no tactic runs these layers on {device.title}:\n"
    if unable and able is not None:  # fused otherwise: an option that no kernel can do is none
        network, times = replace(network, ops=tuple(able.values()), groups=_options(network, unable)), [times[i] for i in able]
    elif not all(op.when for op in unable):
        raise ModelError(stuck + "\n".join(missing))

    formats = {t: (*fmts, *beside.get(t, ())) for t, fmts in named.items()}
    formats = {t: tuple(dict.fromkeys(canonical(f, network.tensors[t]) for f in fmts)) for t, fmts in formats.items()}
    placed = places.placed_keys(network, MAX_FORMATS - len(PREFERRED) - 2)
    formats = {t: (*own, *placed[t]) for t, own in formats.items()}
    known = {(t, canonical(f, network.tensors[t])): f for t, fmts in usable.items() for f in reversed(fmts)}
    reformats: dict[ReformatProblem, Mapping[Tactic, Time]] = {}

    @cache
    def reformat_ps(tensor: str, src: str, dst: str) -> int | None:
        problem = ReformatProblem(*network.tensors[tensor], str(known[tensor, base(src)]), str(known[tensor, base(dst)]))
        if problem not in reformats:
            reformats[problem] = timer(problem, candidates(problem, device))
        return min((_ps(t) for t in reformats[problem].values()), default=None)

    made: dict[tuple, tuple[plan.Entry, ...]] = {}  # ops alike share their entries, too
    fastest: dict[int, list[tuple[Tactic, int]]] = {}
    choices = []
    for op, rows in zip(network.ops, times, strict=True):
        at, own = tuple(placed[t] for t in (*op.inputs, op.output)), tuple(_fit(network, op, _in_place(op, placed)))
        alike = id(rows), at, own
        if alike not in made:
            if id(rows) not in fastest:
                fastest[id(rows)] = _fastest(op.problem, rows)
            made[alike] = plan.cheapest((*_entries(op.problem, fastest[id(rows)], at), *own))
        choices.append(Choice(op.name, op.inputs, op.output, made[alike], op.when))
    graph = plan.Graph(
        tuple(choices), network.groups, {}, tuple(i.name for i in network.inputs), tuple(o.name for o in network.outputs),
        formats, reformat_ps,
    )  # fmt: skip
    tables = []
    for fmts in product(*asked.values()):
        chosen = dict(zip(asked, fmts, strict=True))
        pinned = {t: canonical(f, network.tensors[t]) for t, f in chosen.items()}
        own = {t: tuple(dict.fromkeys((*formats[t], *filter(None, [pinned.get(t)])))) for t in formats}
        whole = replace(graph, pinned=pinned, formats=own)
        tables.append(Table(network, device, chosen, tuple(times), whole, sparse, reformats, scratch, beside))
    if unable and able is None:  # ops of several decisions: some combinations of options have no plan, or all
        try:
            plan.solve(tables[0].graph)
        except ValueError:
            raise ModelError(stuck + "\n".join(missing)) from None
    return tables[0] if len(tables) == 1 else min(tables, key=lambda t: plan.solve(t.graph).total_ps)


def if_sparse(table: Table, op: Op) -> tuple[Op, list[Tactic]]:
    """(the op with weights that have the 2:4 pattern, the sparse tactics that could then run it in this table)."""
    if not isinstance(op.problem, (ConvProblem, ConvTransposeProblem)) or table.network.dtypes(op):
        return op, []
    network, op = table.network, replace(op, problem=replace(op.problem, sparse24=True))
    around = {t: (*filter(None, [table.io.get(t)]), *table.beside.get(t, ())) for t in (*op.inputs, op.output)}
    edges = {t: _outside(network, t, formats) for t, formats in around.items()}
    able = [t for t in candidates(op.problem, table.device) if t.sparse]
    both = tuple((network.formats(t) + edges[t], edges[t]) for t in (*op.inputs, op.output))
    return op, _wanted(op.problem, able, both, table.scratch)


def _outside(network: Network, tensor: str, formats: Iterable[Format]) -> tuple[Format, ...]:
    """Those that no kernel's own format coincides with: read or written directly by what can, else reformatted."""
    shape = network.tensors[tensor]
    own = {canonical(f, shape) for f in network.formats(tensor)}
    return tuple(f for f in dict.fromkeys(formats) if canonical(f, shape) not in own)


def format_of(table: Table, tensor: str, key: str) -> Format:
    """The name of a canonical key on a tensor: that of the kernels, else that of the network's edge."""
    shape = table.network.tensors[tensor]
    for fmt in (*table.network.formats(tensor), table.io.get(tensor), *table.beside.get(tensor, ())):
        if fmt is not None and canonical(fmt, shape) == base(key):
            return fmt
    raise ValueError(f"tensor {tensor} has no format {key}")


def forced(table: Table, chosen: plan.Plan, wanted: Mapping[str, bool]) -> dict[str, plan.Forced | None]:
    """Layer -> sparse or not: the best plan with that one layer forced so, wherever fusion puts its weights, and how much
    faster its kernels would have to be for that; None where no such plan exists."""
    names = {layer: tuple(op.name for op in ops) for layer, ops in ops_by_layer(table.network, wanted).items()}
    found = plan.forced(table.graph, chosen, [(names[layer], sparse) for layer, sparse in wanted.items()])
    return dict(zip(wanted, found, strict=True))


def ops_of(network: Network, layer: str) -> list[Op]:
    """All alternatives with weights of this layer; of merged siblings, with those of any of them."""
    return ops_by_layer(network, (layer,))[layer]


def ops_by_layer(network: Network, layers: Iterable[str]) -> dict[str, list[Op]]:
    """`ops_of` several layers, from one walk through the network."""
    able = [*{op.name: op for op in network.ops if op.layer}.values()]
    members: dict[str, set[str]] = {}  # layer -> those whose weights its ops hold
    holding: dict[str, set[int]] = {}  # layer -> the ops that hold weights of it
    for i, op in enumerate(able):
        members.setdefault(op.layer, set()).update(op.layers or (op.layer,))
        for m in op.layers or (op.layer,):
            holding.setdefault(m, set()).add(i)
    return {x: [able[i] for i in sorted(set().union(*(holding[m] for m in members.get(x, ()))))] for x in layers}


def rivals(table: Table) -> dict:
    """What the plan is compared with: the all-dense optimum, one format everywhere, each layer's fastest for itself."""
    dense = dict.fromkeys((op.name for op in table.network.ops if op.layer), _is_dense)
    names = {
        str(f): {t: canonical(f, shape) for t, shape in table.network.tensors.items()} for f in HALF_FORMATS
    }
    known = table.graph.formats
    names = {f: {t: tuple(k for k in known[t] if base(k) == key) for t, key in keys.items()} for f, keys in names.items()}
    single = plan.best_single_format(table.graph, names)
    try:
        greedy = plan.greedy(table.graph).total_ps / 1e6
    except ValueError:
        greedy = None
    return {
        "all_dense_us": plan.solve(table.graph, force=dense).total_ps / 1e6,
        "best_single_format": single and {"format": single.method.rpartition(" ")[2], "us": single.total_ps / 1e6},
        "greedy_us": greedy,
    }


def _is_dense(entry: plan.Entry) -> bool:
    return not entry.sparse


def untimed(table: Table, op: Op) -> dict[Tactic, str]:
    """Tactics that could run `op` and got no time -> why they need none (those that failed are the timer's to tell)."""
    times = table.times[next(i for i, o in enumerate(table.network.ops) if o is op)]
    able = _able(op.problem, table.device, table.network.dtypes(op), table.network.is_straight(op))
    same = _namesakes(op.problem, able, times)
    formats = {t: table.graph.formats[t] for t in (*op.inputs, op.output)}
    proofs = {}
    for t in able:
        keys = zip(_addresses(op.problem, t), (*op.inputs, op.output), strict=True)
        if table.scratch is not None and workspace(op.problem, t) > table.scratch:
            proofs[t] = f"needs {workspace(op.problem, t)} bytes of workspace, {table.scratch} are allowed"
        elif t.sparse and not table.sparse:
            proofs[t] = "sparse, and --sparsity=disable was given"
        elif t in same:
            proofs[t] = (
                f"every element has the same address as in {','.join(map(str, same[t].ins))} -> {same[t].out}, so the launch "
                "reads and writes the same bytes"
            )
        elif t not in times and any(key not in formats[tensor] for key, tensor in keys):
            proofs[t] = "its tensors cannot have these formats here: they are not what was asked for at the network's edge"
    return proofs


def workspace(problem: Problem, tactic: Tactic) -> int:
    """Bytes of scratch memory that a tactic's launches need."""
    return max(launch.workspace for launch in launches(problem, tactic))


Around = tuple[tuple[tuple[Format, ...], tuple[Format, ...]], ...]  # per tensor, the output last: its formats, those of edges


def _around(
    network: Network, op: Op, usable: Mapping[str, tuple[Format, ...]], edges: Mapping[str, tuple[Format, ...]]
) -> Around:
    """Of each tensor of the op, the output last: the formats that it may have there, FP32 alone where it must be that; and
    those which kernels have beside their own."""
    tensors, found = (*op.inputs, op.output), network.formats_in(op)
    must = [fmts != network.formats(t) for t, fmts in zip(tensors, found, strict=True)]
    return tuple((f, f) if m else (usable[t], edges[t]) for m, t, f in zip(must, tensors, found, strict=True))


def _fit(network: Network, op: Op, entries: Iterable[plan.Entry]) -> Iterator[plan.Entry]:
    """Those entries in which every tensor that must be FP32 there is."""
    tensors = (*op.inputs, op.output)
    must = [
        None if fmts == network.formats(t) else {canonical(f, network.tensors[t]) for f in fmts}
        for t, fmts in zip(tensors, network.formats_in(op), strict=True)
    ]
    for e in entries:
        if all(keys is None or base(k) in keys for k, keys in zip((*e.ins, e.out), must, strict=True)):
            yield e


def _able(problem: Problem, device: Device, dtypes: tuple[str, ...], straight: bool) -> tuple[Tactic, ...]:
    """Every tactic that can run the problem on these types; `straight`: also those for FP16, as its output in FP32 is what
    they store from their accumulators (see at_edges)."""
    return candidates(problem, device, dtypes) + (candidates(problem, device) if straight else ())


def _timed(problem: Problem, dtypes: tuple[str, ...], straight: bool, around: Around, device: Device, timer: Timer, *,
           sparse: bool, exhaustive: bool, scratch: int | None) -> Mapping[Tactic, Time]:  # fmt: skip
    """The times of every tactic for a problem."""
    able = _able(problem, device, dtypes, straight)
    wanted = _wanted(problem, [t for t in able if sparse or not t.sparse], around, scratch)
    rows = timer(problem, wanted)
    return _with_namesakes(problem, rows, timer(problem, list(_namesakes(problem, able, wanted)))) if exhaustive else rows


def _namesakes(problem: Problem, able: Iterable[Tactic], timed: Iterable[Tactic]) -> dict[Tactic, Tactic]:
    """Tactic of `able` that is not timed -> the timed one that has its kernel, its tile and its addresses."""
    known = {(t.kernel, t.tile, _addresses(problem, t)): t for t in timed}
    found = {t: known.get((t.kernel, t.tile, _addresses(problem, t))) for t in able}
    return {t: same for t, same in found.items() if same is not None and same != t}


def _addresses(problem: Problem, tactic: Tactic) -> tuple[str, ...]:
    shapes = (*problem.in_shapes, problem.out_shape)
    return tuple(canonical(f, s) for f, s in zip((*tactic.ins, tactic.out), shapes, strict=True))


def _options(network: Network, unable: Iterable[Op]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """The fusion groups without the options that need an op of `unable`."""
    gone = {pair for op in unable for pair in op.when}
    return tuple((group, tuple(o for o in options if (group, o) not in gone)) for group, options in network.groups)


def _without(network: Network, unable: Iterable[Op]) -> dict[int, Op] | None:
    """Position -> op of all that is left without the options that need an op of `unable`; None where it is always needed."""
    groups = dict(_options(network, unable))
    if not all(groups.values()) or any(len({group for group, _ in op.when}) != 1 for op in unable):
        return None
    left = {}
    for i, op in enumerate(network.ops):
        when = tuple((group, option) for group, option in op.when if option in groups[group])
        if {group for group, _ in when} == {group for group, _ in op.when}:
            left[i] = replace(op, when=when)
    return left


def _with_namesakes(
    problem: Problem, times: Mapping[Tactic, Time], others: Mapping[Tactic, Time]
) -> dict[Tactic, Time]:
    best = {(t.kernel, t.tile, _addresses(problem, t)): time for t, time in times.items()}
    for t, time in others.items():
        key = t.kernel, t.tile, _addresses(problem, t)
        best[key] = min(best.get(key, time), time, key=lambda x: x.us)
    return {t: best[t.kernel, t.tile, _addresses(problem, t)] for t in times}


def _wanted(problem: Problem, able: Iterable[Tactic], around: Around, scratch: int | None) -> list[Tactic]:
    """`able` and what they become at the network's edges: of tactics with the same kernel, tile and addresses one, that whose
    formats bear the most usual names; none with addresses that its tensors cannot have, or that needs more than `scratch`."""
    usable, (*ins, out) = [fmts for fmts, _ in around], [edges for _, edges in around]
    shapes = (*problem.in_shapes, problem.out_shape)
    keys = [{canonical(f, s) for f in fmts} for fmts, s in zip(usable, shapes, strict=True)]
    best: dict[tuple, tuple[int, Tactic]] = {}
    for t in (v for tactic in able for v in at_edges(tactic, ins, out)):
        addresses = _addresses(problem, t)
        if all(key in able for key, able in zip(addresses, keys, strict=True)):
            odd = sum(f not in fmts for f, fmts in zip((*t.ins, t.out), usable, strict=True))
            cell = t.kernel, t.tile, addresses
            if cell not in best or odd < best[cell][0]:
                best[cell] = odd, t
    return [t for _, t in best.values() if scratch is None or workspace(problem, t) <= scratch]


def _fastest(problem: Problem, times: Mapping[Tactic, Time]) -> list[tuple[Tactic, int]]:
    """(tactic, picoseconds): of those with the same addresses that reach the same places the fastest dense and the fastest
    sparse one, which is all that a plan can want."""
    best: dict[tuple, tuple[int, str, Tactic]] = {}
    for t, time in times.items():
        cell = _addresses(problem, t), t.sparse, t.kernel in STRIDED, t.kernel in STRIDED_RESIDUAL
        if cell not in best or (_ps(time), t.name) < best[cell][:2]:
            best[cell] = _ps(time), t.name, t
    return [(t, ps) for ps, _, t in best.values()]


def _entries(
    problem: Problem, tactics: list[tuple[Tactic, int]], placed: tuple[tuple[str, ...], ...]
) -> Iterator[plan.Entry]:
    """The kernels that may run a problem: each tactic with its tensors in every place of `placed` that its kernel can reach."""
    for tactic, ps in tactics:
        own = _addresses(problem, tactic)
        ways = [[k] for k in own]
        if tactic.kernel in STRIDED:
            ways = [[k, *(p for p in keys if base(p) == k)] for k, keys in zip(own, placed, strict=True)]
        if isinstance(problem, ConcatProblem) and math.prod(map(len, ways)) > MANY_PLACES:
            ways[:-1] = [[k] for k in own[:-1]]
        free = tactic.kernel in STRIDED_RESIDUAL
        if Feature.RESIDUAL in problem.needs and not free:  # it is read with the output's strides
            ways[1:] = [[k] for k in own[1:]]
        for *ins, out in product(*ways):
            yield plan.Entry(tactic.name, tuple(ins), out, ps, tactic.sparse)


def _in_place(op: Op, placed: Mapping[str, tuple[str, ...]]) -> Iterator[plan.Entry]:
    """The ways in which an op launches nothing."""
    for ins, out in places.entries(op):
        keys = zip((*ins, out), (*op.inputs, op.output), strict=True)
        for *ins, out in product(*([k, *(p for p in placed[t] if base(p) == k)] for k, t in keys)):
            yield plan.Entry(places.IN_PLACE, tuple(ins), out, 0)
    for x, y in (*places.views(op), *places.through_views(op, placed)):
        yield plan.Entry(places.IN_PLACE, (x,), y, 0)


def _ps(time: Time) -> int:
    return round(time.us * 1e6)
