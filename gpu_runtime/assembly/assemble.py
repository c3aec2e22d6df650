"""Turns a plan into the contents of an engine: layers in execution order, places in memory, packed weights. Plain records
out.
"""

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import cast

import numpy as np

from gpu_runtime.assembly import memory
from gpu_runtime.engine import pack
from gpu_runtime.errors import InternalError
from gpu_runtime.network import Op, TensorInfo
from gpu_runtime.planning import places
from gpu_runtime.planning.batch_pieces import unrolled
from gpu_runtime.planning.places import Place
from gpu_runtime.planning.tables import Table, format_of
from gpu_runtime.runtime import dataflow
from gpu_runtime.runtime.derive import COUNTERS, WORKSPACE
from gpu_runtime.runtime.plan_record import Bound, Container, Layer, Memory, Section, TensorPlace, inner_name
from tactics.format import DTYPES, Format, Key, Strides, canonical, num_bytes, strides
from tactics.launches import launches, pack_weights
from tactics.planner import plan
from tactics.planner.grouping import grouped
from tactics.problems.problem import AnyProblem, ReformatProblem
from tactics.problems.protocol import Problem
from tactics.tactic import Tactic

Home = Mapping[Place, tuple[Place, int]]  # see places.homes
Alias = Mapping[Place, tuple[Place, int]]  # see places.aliases


@dataclass(slots=True)
class _Layer:
    """One layer during ordering; `ins` and `out` are (place, printed name, format). Without a tactic it is a NoOp. `images`:
    (first, number) of the piece of a batch that it computes, None for a whole batch."""

    name: str
    op: Op | None
    problem: Problem | None
    tactic: Tactic | None
    ins: list[tuple[Place, str, Format]]
    out: tuple[Place, str, Format]
    time_us: float
    shape: tuple[int, int, int, int] = (0, 0, 0, 0)  # of the tensor of a NoOp, which has no problem
    images: tuple[int, int] | None = None  # of a piece of a batch


@dataclass(frozen=True, slots=True)
class Assembled:
    """An engine's contents for a network: layers in execution order, places in memory, sections of weights."""

    inputs: tuple[Bound, ...]
    outputs: tuple[Bound, ...]
    layers: tuple[Layer, ...]
    memory: Memory
    sections: tuple[Section, ...]
    renamed: Mapping[str, str]  # of pieces of a batch: their names of sections -> those of the first piece's


def assemble(table: Table, chosen: plan.Plan) -> tuple[Assembled, np.ndarray]:
    """Returns (an engine's contents, weight arena uint8).

    Raises InternalError if a layer of the plan would read bytes that were not written for it.
    """
    table, chosen = unrolled(table, chosen)
    layers = _order(table, chosen)
    weights, renamed = _weights(layers)
    arena, sections = pack(weights)
    home, alias = places.homes(table.network, chosen), places.aliases(table.network, chosen)
    placement, blocks, using = _place(table, layers, home, alias)
    offsets = _offsets(table, layers, home, alias, placement.offsets)
    described = tuple(_describe(table, layer, offsets, home) for layer in layers)
    at = {b.name: (placement.offsets[b.name], b.nbytes) for b in blocks if b.name in (WORKSPACE, COUNTERS)}
    inputs, outputs = (
        tuple(_edge(table, t, offsets) for t in edges) for edges in (table.network.inputs, table.network.outputs)
    )
    zeros = (at[COUNTERS],) if COUNTERS in at else ()
    used = Memory(placement.total_bytes, placement.largest_live_bytes, at.get(WORKSPACE), zeros)
    data = Assembled(inputs, outputs, described, used, sections, renamed)
    try:
        dataflow.prove(data, using, {x.op.name: (x.op.inputs, x.op.output) for x in layers if x.op is not None})
    except dataflow.Fault as e:
        raise InternalError(
            f"{table.network.name}: the plan failed its check, so no engine is built: {e}. This is a defect of "
            "gpu_runtime, not of the model: please report it with the model"
        ) from None
    return data, arena


def arena_bytes(table: Table, chosen: plan.Plan) -> int:
    """Bytes of the plan's activations, as in Memory, computed without packing weights."""
    table, chosen = unrolled(table, chosen)
    home, alias = places.homes(table.network, chosen), places.aliases(table.network, chosen)
    return _place(table, _order(table, chosen), home, alias)[0].total_bytes


def _weights(layers: list[_Layer]) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Returns (the packed weights by section, names of sections of further pieces of a batch -> the first section with the same
    bytes).
    """
    found: dict[str, np.ndarray] = {}
    renamed: dict[str, str] = {}
    packed: dict[tuple[int, Problem, Tactic], dict[str, np.ndarray]] = {}  # of pieces, those alike once
    firsts: dict[tuple[int, str], str] = {}
    for layer in layers:
        op, tactic = layer.op, layer.tactic
        if op is None or tactic is None:
            continue
        alike = id(op.weights), op.problem, tactic
        arrays = packed.get(alike) or pack_weights(op.problem, tactic, op.weights)
        if op.batch_pieces:
            packed[alike] = arrays
        for name, array in arrays.items():
            section = f"{layer.name}.{name}"
            first = firsts.setdefault((id(op.weights), name), section) if op.batch_pieces else section
            if first != section and np.array_equal(found[first], array):
                renamed[section] = first
            else:
                found[section] = array
    return found, renamed


def _order(table: Table, chosen: plan.Plan) -> list[_Layer]:
    """Orders the ops of the plan, inputs first, each reformat just before its first reader."""
    network = table.network
    ops = [op for op in network.ops if chosen.entry_of(op.name, op.when)]
    images = {op.output: op.images for op in ops if op.images}
    hops = {Place(t, dst): src for t, src, dst in chosen.reformats}
    edges = {t.name for t in network.inputs}
    ready = {_at_edge(table, t): (t.name, table.io[t.name]) for t in network.inputs}
    layers: list[_Layer] = []

    def called(place: Place, fmt: Format, otherwise: str) -> str:
        """The printed name of a place: the output's own name where the caller gets it there, else `otherwise`."""
        t = place.tensor
        leaves = t in outside and fmt == table.io[t] and place.key == Key(canonical(fmt, network.tensors[t]))
        return t if leaves else otherwise

    def provide(place: Place, fmt: Format, label: str) -> str:
        """Makes `place` available under the format name `fmt`; returns the tensor's printed name there."""
        if place not in ready:
            src = Place(place.tensor, hops[place])
            src_fmt = format_of(table, src.tensor, src.key)
            src_name = provide(src, src_fmt, f"{label} by way of {src_fmt.layout}")
            problem = ReformatProblem(*network.tensors[place.tensor], str(src_fmt), str(fmt))
            name = called(place, fmt, f"Reformatted {label}")
            us = table.graph.reformat_us(place.tensor, src.key, place.key)
            move = Tactic("move", None, (src_fmt,), fmt)
            ins = [(src, src_name, src_fmt)]
            title = f"Reformatting CopyNode for {label}"
            part = images.get(place.tensor)
            layers.append(_Layer(title, None, problem, move, ins, (place, name, fmt), us, images=part))
            ready[place] = (name, fmt)
        name, have = ready[place]
        if have != fmt:  # the same bytes under another name: free, and shown as TensorRT shows it
            other = called(place, fmt, f"{label} as {fmt.layout}")
            shape, ins = network.tensors[place.tensor], [(place, name, have)]
            part = images.get(place.tensor)
            layers.append(_Layer(f"NoOp for {label}", None, None, None, ins, (place, other, fmt), 0.0, shape, part))
            return other
        return name

    outside = {t.name for t in network.outputs}
    for op in runnable(ops, edges):
        entry = chosen.entries[op.name]
        tactic, in_fmts, out_fmt = _formats(table, op, entry)
        ins = []
        for i, (tensor, key, fmt) in enumerate(zip(op.inputs, entry.ins, in_fmts, strict=True)):
            place = Place(tensor, key)
            ins.append((place, provide(place, fmt, f"Input Tensor {i} to {op.name}"), fmt))
        place = Place(op.output, entry.out)
        name = called(place, out_fmt, op.output if op.output not in outside else inner_name(op.output))
        layers.append(_Layer(op.name, op, op.problem, tactic, ins, (place, name, out_fmt), entry.us, images=op.images))
        ready[place] = (name, out_fmt)
    for i, t in enumerate(network.outputs):
        provide(_at_edge(table, t), table.io[t.name], f"Output Tensor {i} {t.name}")
    return layers


def _formats(table: Table, op: Op, entry: plan.Entry) -> tuple[Tactic | None, tuple[Format, ...], Format]:
    """Returns (tactic, or None without a launch; formats of the inputs; format of the output)."""
    if entry.tactic is None:
        ins = tuple(format_of(table, t, key) for t, key in zip(op.inputs, entry.ins, strict=True))
        return None, ins, format_of(table, op.output, entry.out)
    return entry.tactic, entry.tactic.ins, entry.tactic.out


def runnable(ops: list[Op], made: set[str]) -> Iterator[Op]:
    """Yields the ops in an order in which they can run after `made`: always the first op that can run."""
    waits = [len(set(op.inputs) - made) for op in ops]
    readers = grouped((t, i) for i, op in enumerate(ops) for t in set(op.inputs) - made)
    able = [i for i, n in enumerate(waits) if not n]
    while able:
        op = ops[heapq.heappop(able)]
        yield op
        for i in readers.pop(op.output, ()):
            waits[i] -= 1
            if not waits[i]:
                heapq.heappush(able, i)


def _place(
    table: Table, layers: list[_Layer], home: Home, alias: Alias
) -> tuple[memory.Placement, list[memory.Block], list[int]]:
    """Returns (offsets by "tensor@key" of the tensors with memory of their own, live as long as any tensor inside them; the
    blocks; the numbers of the layers that use the workspace).

    Time runs 0 (inputs bound), 1.. (layers), last (outputs read); inputs and outputs stay.
    """
    network, end = table.network, len(layers) + 1
    first: dict[Place, int] = {}
    last: dict[Place, int] = {}
    size: dict[Place, int] = {}

    memories: dict[Place, Place] = {}

    def touch(place: Place, when: int) -> None:
        place = _memory(place, home, alias, memories)
        first.setdefault(place, when)
        last[place] = max(last.get(place, when), when)
        size[place] = num_bytes(format_of(table, place.tensor, place.key), network.tensors[place.tensor])

    for t in network.inputs:
        touch(_at_edge(table, t), 0)
        touch(_at_edge(table, t), end)
    for i, layer in enumerate(layers, 1):
        for place, _, _ in (*layer.ins, layer.out):
            touch(place, i)
    for t in network.outputs:
        touch(_at_edge(table, t), end)
    blocks = [memory.Block(_name(p), size[p], first[p], last[p]) for p in first]
    launching = [(i, x.problem, x.tactic) for i, x in enumerate(layers, 1) if x.problem is not None and x.tactic]
    scratch = [(i, s) for i, problem, tactic in launching for s in launches(problem, tactic) if s.workspace]
    if scratch:  # one workspace shared by all launches, and counters that are zero between launches
        when = [i for i, _ in scratch]
        blocks.append(memory.Block(WORKSPACE, max(s.workspace for _, s in scratch), min(when), max(when)))
        blocks.append(memory.Block(COUNTERS, max(s.counters for _, s in scratch), 0, end))
    return memory.place(blocks), blocks, [i - 1 for i, _ in scratch]


def _whole(table: Table, place: Place) -> tuple[Format, tuple[int, int, int, int], Strides]:
    """Returns format, shape and strides of a place that has strides of its own."""
    fmt, shape = format_of(table, place.tensor, place.key), table.network.tensors[place.tensor]
    return fmt, shape, strides(fmt, shape)


def _memory(place: Place, home: Home, alias: Alias, known: dict[Place, Place]) -> Place:
    """Returns the place with memory of its own that contains `place`; `known`: earlier results, to which this one is added."""
    way = []
    while place not in known and (place in home or place in alias):
        way.append(place)
        place = home[place][0] if place in home else alias[place][0]
    place = known.get(place, place)
    known |= dict.fromkeys(way, place)
    return place


def _offsets(table: Table, layers: list[_Layer], home: Home, alias: Alias, own: Mapping[str, int]) -> dict[str, int]:
    """Returns the byte offset of every place.

    A place inside another begins at its first channel there, an alias at one of the other place's images.
    """

    found: dict[str, int] = {}
    for place in dict.fromkeys(place for layer in layers for place, _, _ in (*layer.ins, layer.out)):
        way = []
        while _name(place) not in found and (place in alias or place in home):
            way.append(place)
            place = alias[place][0] if place in alias else home[place][0]
        at = found[_name(place)] = found[_name(place)] if _name(place) in found else own[_name(place)]
        for inner in reversed(way):
            if inner in alias:
                fmt, _, s = _whole(table, inner)
                at += alias[inner][1] * s.n * DTYPES[fmt.dtype].itemsize
            else:
                root, c = home[inner]
                fmt, _, s = _whole(table, root)
                at += s.channel(c) * DTYPES[fmt.dtype].itemsize
            found[_name(inner)] = at
    return dict(own) | found


def _name(place: Place) -> str:
    return f"{place.tensor}@{place.key}"


def _at_edge(table: Table, info: TensorInfo) -> Place:
    """Returns the place of a network input or output as the caller gives or gets it."""
    return Place(info.name, Key(canonical(table.io[info.name], info.shape4)))


def _edge(table: Table, info: TensorInfo, offsets: Mapping[str, int]) -> Bound:
    return Bound(info.name, tuple(info.shape), info.shape4, table.io[info.name], offsets[_name(_at_edge(table, info))])


def _describe(table: Table, layer: _Layer, offsets: Mapping[str, int], home: Home) -> Layer:
    op, problem = layer.op, layer.problem

    def tensor(place: Place, name: str, fmt: Format, shape: tuple[int, int, int, int]) -> TensorPlace:
        inside = None
        if place in home:
            root, channel = home[place]
            whole, shape4, _ = _whole(table, root)
            inside = Container(shape4, whole, offsets[_name(root)], channel)
        return TensorPlace(name, shape, fmt, offsets[_name(place)], inside)

    shapes = problem.in_shapes if problem is not None else (layer.shape,)
    weights = op.layer_weights if op is not None and problem is not None else ()
    return Layer(
        layer.name,
        cast("AnyProblem | None", problem),
        layer.tactic,
        tuple(tensor(p, n, f, s) for (p, n, f), s in zip(layer.ins, shapes, strict=True)),
        (tensor(*layer.out, problem.out_shape if problem is not None else layer.shape),),
        round(layer.time_us, 6),
        tuple(table.network.onnx_names.get(node, node) for node in op.nodes) if op else (),
        op.layer or None if op else None,
        sum(int(w.size) for w in weights),
        layer.images,
    )
