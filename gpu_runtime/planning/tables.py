"""Makes the planner's graph from a lowered network and the times of its tactics."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import product
from typing import NamedTuple

from cuda_kernels.device import Device
from gpu_runtime.errors import ModelError
from gpu_runtime.network import Network, Op
from gpu_runtime.planning import places
from gpu_runtime.planning.entries import (
    Cost,
    FormatsByTensor,
    Priced,
    Times,
    addresses,
    cost_of,
    fastest,
    fitting,
    in_place,
    kernels,
    namesakes,
    runnable,
    to_time,
    with_namesakes,
    workspace,
)
from tactics.candidates import candidates, rejected
from tactics.format import BYTE_LAYOUTS, PREFERRED, Format, Key, Shape4, canonical
from tactics.measure.timing import Time, Timer
from tactics.planner import plan
from tactics.planner.graph import MAX_FORMATS, Choice, Entry, Hop, to_ps
from tactics.problems.batches import at_batch
from tactics.problems.problem import ConvProblem, ConvTransposeProblem, Problem, ReformatProblem
from tactics.reason import Reason
from tactics.tactic import Tactic

MAX_EDGE_CHOICES = 64  # combinations of alternative input and output formats; one plan is solved for each


@dataclass(frozen=True, slots=True)
class Considered:
    """The tactics to consider. `sparse`: sparse ones, too; `exhaustive`: also time those whose formats are other names for the
    same addresses (the faster time counts for both); `scratch`: bytes of workspace that a tactic may use; `risk`: the least
    probability that a sparse kernel is the faster one, where times are predicted.
    """

    sparse: bool
    exhaustive: bool = False
    scratch: int | None = None
    risk: float | None = None


@dataclass(frozen=True, slots=True)
class Table:
    """All data that the planner needs, and the data that explain its choice afterwards.

    `times`: op index -> tactic -> Time; `io`: network input or output -> its Format outside; `how`: the tactics that were
    considered; `reformats`: the times of the reformats that the planner asked for, `hops`: hop -> its problem among these;
    `beside`: the result of places.formats_beside.
    """

    network: Network
    device: Device
    io: Mapping[str, Format]
    times: tuple[Times, ...]
    graph: plan.Graph
    how: Considered
    reformats: Mapping[ReformatProblem, Times]
    hops: Mapping[Hop, ReformatProblem]
    beside: Mapping[str, tuple[Format, ...]]


def tabulate(
    network: Network,
    device: Device,
    timer: Timer,
    io: Mapping[str, Format | tuple[Format, ...]],
    how: Considered,
    progress: Callable[[str, int, int], None] = lambda name, done, total: None,
) -> Table:
    """Times every candidate of every op in every format it may have. Raises ModelError where an op has none.

    `io`: the format of every network input and output outside, or several, of which the fastest plan's is taken; `progress`
    is called for each op before it is timed: its name, the number done, and the total.
    """
    outside = {t: (f,) if isinstance(f, Format) else tuple(f) for t, f in io.items()}
    if math.prod(map(len, outside.values())) > MAX_EDGE_CHOICES:
        raise ValueError(f"formats of inputs and outputs: more than {MAX_EDGE_CHOICES} combinations; give fewer alternatives")
    formats = _formats(network, outside)
    asked = _Asked(device, timer, how)
    network, times, unsure = _narrowed(network, _times(network, formats, asked, progress), device)
    usable = {t: {canonical(f, shape) for f in formats.usable(t)} for t, shape in network.tensors.items()}
    own = len(PREFERRED) + 2 + (len(BYTE_LAYOUTS) if any(of.whole for of in network.types.values()) else 0)
    inside = places.keys_inside(network, MAX_FORMATS - own, usable)
    reformats = _Reformats(network, formats, asked)
    graph = plan.Graph(
        choices(network, times, inside, cost_of(device, how.risk)),
        network.groups,
        {},
        tuple(i.name for i in network.inputs),
        tuple(o.name for o in network.outputs),
        _keys(network, formats, inside),
        reformats.ps,
    )
    tables = []
    for fmts in product(*outside.values()):
        ends = dict(zip(outside, fmts, strict=True))
        pinned = _pinned(network, graph, ends)
        more = how, reformats.times, reformats.problems, formats.beside
        tables.append(Table(network, device, ends, times, pinned, *more))
    if unsure:  # with ops of several decisions, some combinations of options, or all, may have no plan
        try:
            plan.solve(tables[0].graph)
        except ValueError:
            raise ModelError(unsure) from None
    return tables[0] if len(tables) == 1 else min(tables, key=lambda t: plan.solve(t.graph).total_ps)


# ---- stages of `tabulate`


@dataclass(frozen=True, slots=True)
class _Asked:
    """The arguments of `tabulate`."""

    device: Device
    timer: Timer
    how: Considered


class _Alike(NamedTuple):
    """All that decides which tactics of an op are timed. `straight`: FP16 tactics that store their FP32 sums as an FP32 output
    also count; `around`: for each input, then the output, the formats it may have, and the further ones at the network's edge.
    """

    problem: Problem
    dtypes: tuple[str, ...]
    straight: bool
    around: FormatsByTensor


@dataclass(frozen=True, slots=True)
class _Formats:
    """The formats of each tensor. `own`: the formats of kernels; `beside`: the result of places.formats_beside; `edges`: the
    formats of `beside`, and the requested formats of inputs and outputs, that place elements otherwise than every own format.
    """

    own: Mapping[str, tuple[Format, ...]]
    beside: Mapping[str, tuple[Format, ...]]
    edges: Mapping[str, tuple[Format, ...]]

    def usable(self, tensor: str) -> tuple[Format, ...]:
        return self.own[tensor] + self.edges[tensor]


def _formats(network: Network, outside: Mapping[str, tuple[Format, ...]]) -> _Formats:
    """Collects the formats of each tensor. `outside`: the requested formats of network inputs and outputs."""
    beside = places.formats_beside(network, outside)
    edges = {t: _outside(network, t, (*outside.get(t, ()), *beside.get(t, ()))) for t in network.tensors}
    return _Formats({t: network.formats(t) for t in network.tensors}, beside, edges)


def _times(network: Network, formats: _Formats, asked: _Asked, progress: Callable[[str, int, int], None]) -> list[Times]:
    """Times every tactic of each op; returns each op's times, in the network's order."""
    timed: dict[tuple[_Alike, tuple[int, ...]], Times] = {}  # by all that decides the times: equal ops are timed once
    found = []
    every = [
        (_Alike(op.problem, network.dtypes(op), network.is_straight(op), _around(network, op, formats)), op.batch_pieces)
        for op in network.ops
    ]
    asked.timer.prepare((of.problem, _wanted(of, asked.device, asked.how)[1]) for of, _ in dict.fromkeys(every))
    for done, (op, alike) in enumerate(zip(network.ops, every, strict=True)):
        progress(op.name, done, len(network.ops))
        if alike not in timed:
            timed[alike] = _of_pieces(*alike, asked) if op.batch_pieces else _timed(alike[0], asked)
        found.append(timed[alike])
    return found


def _of_pieces(whole: _Alike, pieces: tuple[int, ...], asked: _Asked) -> Times:
    """Times every tactic that can run all pieces of a batch, as the sum over the pieces."""
    sizes = {n: pieces.count(n) for n in pieces}
    problems = {n: problem for n in sizes if (problem := at_batch(whole.problem, n)) is not None}
    rows = [(n, _timed(whole._replace(problem=problem), asked)) for n, problem in problems.items()]
    if len(rows) < len(sizes):
        return {}

    able = set(rows[0][1]).intersection(*(times for _, times in rows[1:]))
    return {t: _in_all([(sizes[n], times[t]) for n, times in rows]) for t in rows[0][1] if t in able}


def _in_all(each: list[tuple[int, Time]]) -> Time:
    """Adds the times of all pieces; `each`: (number of equal pieces, the time of one)."""
    us = low = high = 0.0
    for n, time in each:
        us, low, high = us + n * time.us, low + n * time.low_us, high + n * time.high_us
    return Time(us, low, high, all(time.timed for _, time in each))


def _narrowed(network: Network, times: list[Times], device: Device) -> tuple[Network, tuple[Times, ...], str]:
    """Removes the options that need an op without a tactic: returns (the network, its times, an error's text).

    The text is "" unless some combinations of options, or all, may have no plan. Raises ModelError if such an op is needed with
    every option.
    """
    unable = [
        op for op, rows in zip(network.ops, times, strict=True) if not rows and not any((*places.views(op), *places.images(op)))
    ]
    if not unable:
        return network, tuple(times), ""
    lines = [f"{network.name}: no tactic runs these layers on {device.title}:"]
    for op in unable:
        reasons = dict.fromkeys(reason for _, reason in rejected(op.problem, device, network.dtypes(op)))
        lines.append(f"  {op.name}: {'; '.join(list(map(str, reasons))[:4]) or 'no tactic could be timed'}")
    left = _without(network, unable)
    if left is not None:  # other options remain: an option that no kernel can run is removed
        network = replace(network, ops=tuple(left.values()), groups=_options(network, unable))
        return network, tuple(times[i] for i in left), ""
    if not all(op.when for op in unable):
        raise ModelError("\n".join(lines))
    return network, tuple(times), "\n".join(lines)


def _keys(network: Network, formats: _Formats, inside: Mapping[str, tuple[Key, ...]]) -> dict[str, tuple[Key, ...]]:
    """Returns tensor -> all its keys inside the network: first those with memory of their own, then those with a home in
    another tensor.
    """
    found = {}
    for t, shape in network.tensors.items():
        own = (Key(canonical(f, shape)) for f in (*formats.own[t], *formats.beside.get(t, ())))
        found[t] = (*dict.fromkeys(own), *inside[t])
    return found


def _pinned(network: Network, graph: plan.Graph, ends: Mapping[str, Format]) -> plan.Graph:
    """Returns the graph with these formats of the network's inputs and outputs."""
    pinned = {t: Key(canonical(f, network.tensors[t])) for t, f in ends.items()}
    formats = {t: tuple(dict.fromkeys((*keys, *filter(None, [pinned.get(t)])))) for t, keys in graph.formats.items()}
    return replace(graph, pinned=pinned, formats=formats)


class _Reformats:
    """The times of all reformats that the planner asks for; each problem is timed once."""

    def __init__(self, network: Network, formats: _Formats, asked: _Asked):
        self.times: dict[ReformatProblem, Times] = {}
        self.problems: dict[Hop, ReformatProblem] = {}
        self._asked, self._shapes = asked, network.tensors
        self._batch_pieces = {op.output: tuple(Counter(op.batch_pieces).items()) for op in network.ops if op.batch_pieces}
        self._named = {(t, canonical(f, shape)): f for t, shape in network.tensors.items() for f in reversed(formats.usable(t))}
        self._known: dict[Hop, int | None] = {}
        self._alike: dict[tuple, tuple[ReformatProblem, int | None]] = {}  # shared by tensors with equal shape and pieces

    def ps(self, tensor: str, src: Key, dst: Key) -> int | None:
        """Returns the picoseconds of a reformat by its fastest tactic; None if no tactic can do it."""
        hop = tensor, src, dst
        if hop not in self._known:
            ends = self._named[tensor, src.format], self._named[tensor, dst.format]
            alike = self._shapes[tensor], self._batch_pieces.get(tensor), ends
            if alike not in self._alike:
                self._alike[alike] = self._timed(*alike)
            self.problems[hop], self._known[hop] = self._alike[alike]
        return self._known[hop]

    def _timed(
        self, shape: Shape4, pieces: tuple[tuple[int, int], ...] | None, ends: tuple[Format, Format]
    ) -> tuple[ReformatProblem, int | None]:
        whole = ReformatProblem(*shape, *map(str, ends))
        each = [(self._ps(replace(whole, n=n)), times) for n, times in pieces or ((whole.n, 1),)]
        if any(ps is None for ps, _ in each):
            return whole, None
        return whole, sum(ps * times for ps, times in each if ps is not None)

    def _ps(self, problem: ReformatProblem) -> int | None:
        if problem not in self.times:
            self.times[problem] = self._asked.timer(problem, candidates(problem, self._asked.device))
        return min((to_ps(t.us) for t in self.times[problem].values()), default=None)


def choices(network: Network, times: Sequence[Times], inside: Mapping[str, tuple[Key, ...]], cost: Cost) -> tuple[Choice, ...]:
    """Makes each op's choice with all entries that may run it; equal ops share one tuple of entries."""
    found: dict[tuple, tuple[Entry, ...]] = {}
    best: dict[int, list[Priced]] = {}
    made = []
    for op, rows in zip(network.ops, times, strict=True):
        homes = tuple(inside[t] for t in (*op.inputs, op.output))
        own = tuple(fitting(network, op, in_place(op, inside, places.types(network, op))))
        alike = id(rows), homes, own
        if alike not in found:
            if id(rows) not in best:
                best[id(rows)] = fastest(op.problem, rows, partial(cost, pieces=True) if op.batch_pieces else cost)
            found[alike] = plan.cheapest((*kernels(op.problem, best[id(rows)], homes), *own))
        made.append(Choice(op.name, op.inputs, op.output, found[alike], op.when))
    return tuple(made)


# ---- queries of a table


def if_sparse(table: Table, op: Op) -> tuple[Op, list[Tactic]]:
    """Returns (the op as if its weights had the 2:4 pattern, the sparse tactics that could then run it in this table)."""
    dtypes = table.network.dtypes(op)
    if not isinstance(op.problem, (ConvProblem, ConvTransposeProblem)) or "fp32" in dtypes:
        return op, []
    network, op = table.network, replace(op, problem=replace(op.problem, sparse24=True))
    around = {t: (*filter(None, [table.io.get(t)]), *table.beside.get(t, ())) for t in (*op.inputs, op.output)}
    edges = {t: _outside(network, t, formats) for t, formats in around.items()}
    both = tuple((network.formats(t) + edges[t], edges[t]) for t in (*op.inputs, op.output))
    return op, to_time(op.problem, candidates(op.problem, table.device, dtypes, only="sparse"), both, table.how.scratch)


def _outside(network: Network, tensor: str, formats: Iterable[Format]) -> tuple[Format, ...]:
    """Returns the formats of `formats` that place elements otherwise than every kernel's own format: the kernels that can use
    them do, the others need a reformat.
    """
    shape = network.tensors[tensor]
    own = {canonical(f, shape) for f in network.formats(tensor)}
    return tuple(f for f in dict.fromkeys(formats) if canonical(f, shape) not in own)


def format_of(table: Table, tensor: str, key: Key) -> Format:
    """Returns the format's name for a key of a tensor: the kernels' name, else the name at the network's edge."""
    shape = table.network.tensors[tensor]
    for fmt in (*table.network.formats(tensor), table.io.get(tensor), *table.beside.get(tensor, ())):
        if fmt is not None and canonical(fmt, shape) == key.format:
            return fmt
    raise ValueError(f"tensor {tensor} has no format {key}")


def untimed(table: Table, op: Op) -> dict[Tactic, Reason]:
    """Returns tactics that could run `op` but got no time -> the reason why they need none (the timer reports tactics that
    failed).
    """
    times = table.times[next(i for i, o in enumerate(table.network.ops) if o is op)]
    tactics = runnable(op.problem, table.device, table.network.dtypes(op), table.network.is_straight(op))
    same = namesakes(op.problem, tactics, times)
    formats = {t: table.graph.formats[t] for t in (*op.inputs, op.output)}
    reasons = {}
    for t in tactics:
        ends = zip(addresses(op.problem, t), (*op.inputs, op.output), strict=True)
        if table.how.scratch is not None and workspace(op.problem, t) > table.how.scratch:
            reasons[t] = Reason.of("workspace", needed=workspace(op.problem, t), allowed=table.how.scratch)
        elif t.sparse and not table.how.sparse:
            reasons[t] = Reason.of("sparsity_disabled")
        elif t in same:
            reasons[t] = Reason.of("same_addresses", formats=f"{','.join(map(str, same[t].ins))} -> {same[t].out}")
        elif t not in times and any(Key(at) not in formats[tensor] for at, tensor in ends):
            reasons[t] = Reason.of("formats_at_the_edge")
    return reasons


def _around(network: Network, op: Op, formats: _Formats) -> FormatsByTensor:
    """Returns, for each input of the op, then the output: (the formats that it may have, only FP32 ones if it must be FP32;
    further formats that kernels accept).
    """
    tensors, found = (*op.inputs, op.output), network.formats_in(op)
    must = [fmts != network.formats(t) for t, fmts in zip(tensors, found, strict=True)]
    *ins, (usable, edges) = (
        (f, f) if m else (formats.usable(t), formats.edges[t]) for m, t, f in zip(must, tensors, found, strict=True)
    )
    if network.is_straight(op):  # kernels for FP16 tensors store it as well, but in no type that cannot hold it
        usable, edges = (tuple(f for f in of if f.dtype == "fp32") for of in (usable, (*edges, *found[-1])))
    return *ins, (usable, edges)


def _timed(of: _Alike, asked: _Asked) -> Times:
    """Times every tactic for a problem."""
    tactics, wanted = _wanted(of, asked.device, asked.how)
    rows = asked.timer(of.problem, wanted)
    if not asked.how.exhaustive:
        return rows
    return with_namesakes(of.problem, rows, asked.timer(of.problem, list(namesakes(of.problem, tactics, wanted))))


@lru_cache(maxsize=1024)  # a network is tabulated again whenever more of its tactics are timed
def _wanted(of: _Alike, device: Device, how: Considered) -> tuple[tuple[Tactic, ...], tuple[Tactic, ...]]:
    """Returns two tuples: all tactics that can run the problem on tensors of its types, and the tactics to time.

    The second tuple keeps one tactic for each combination of kernel, tile and memory addresses, in versions for the
    network's edges, without sparse tactics if `how` excludes them, and within its limit of scratch memory (see
    entries.to_time).
    """
    tactics = runnable(of.problem, device, of.dtypes, of.straight)
    return tactics, tuple(to_time(of.problem, [t for t in tactics if how.sparse or not t.sparse], of.around, how.scratch))


def _options(network: Network, unable: Iterable[Op]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Returns the fusion groups without the options that need an op of `unable`."""
    gone = {pair for op in unable for pair in op.when}
    return tuple((group, tuple(o for o in options if (group, o) not in gone)) for group, options in network.groups)


def _without(network: Network, unable: Iterable[Op]) -> dict[int, Op] | None:
    """Returns position -> op for all ops that remain without the options that need an op of `unable`; None if such an op is
    needed with every option.
    """
    groups = dict(_options(network, unable))
    if not all(groups.values()) or any(len({group for group, _ in op.when}) != 1 for op in unable):
        return None
    left = {}
    for i, op in enumerate(network.ops):
        when = tuple((group, option) for group, option in op.when if option in groups[group])
        if {group for group, _ in when} == {group for group, _ in op.when}:
            left[i] = replace(op, when=when)
    return left
