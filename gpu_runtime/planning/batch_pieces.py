"""Batches in pieces: a run of layers computes some images, then the next ones, so that L2 keeps the tensors between layers.

A network is a row of blocks: later blocks read only one tensor of a block. Each block runs whole or in pieces, a choice of the
plan (`offer`): its ops are in the network twice. Between a block in pieces and a whole block, or an end of the network, an op
splits a tensor into pieces or joins them. Images follow each other in memory, so this op launches nothing; its time is DRAM's
time for the tensor. All blocks are cut into pieces of the same sizes. `worthwhile` finds these sizes, and the blocks that may
gain; the whole version of a block has the ops of the plan without pieces. The plan is the best of all these. After `unrolled`,
a plan's layers run piece by piece.

An example: 32 images in 4 pieces, of blocks a, b, c the first two in pieces. The plan has a and b at 8 images, each at four
times its time; unrolled, the layers are a [0:8], b [0:8], a [8:16], ..., b [24:32], c.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, groupby
from typing import Any

from cuda_kernels.device import Device
from gpu_runtime.network import Group, Literal, Network, Op
from gpu_runtime.planning.tables import Table
from gpu_runtime.text import MOST_NAME, SHORT_NAME, piece_text
from tactics.candidates import accepts
from tactics.format import DTYPES, Key
from tactics.planner import plan
from tactics.planner.graph import Entry
from tactics.predict import kept_premium, predict, predict_us
from tactics.problems.batches import BatchPiecesProblem, at_batch, sizes_of
from tactics.problems.gather import GatherProblem, ViewProblem
from tactics.problems.problem import ConcatProblem, MoveProblem
from tactics.problems.protocol import Problem
from tactics.roofline import moved_us
from tactics.tactic import Tactic

WHOLE, PIECES, SUFFIX = "whole", "pieces", " in pieces"
LEAST_GAIN = 0.02  # of a plan's time: with less, no pieces. Of three networks with 1 to 2 %, two ran slower on an H200
MOST_PIECES = 128  # to bound memory: each piece has layers of its own
TAKEN = re.compile(rf"{SUFFIX}|^images of | \[\d+:\d+\]| of its pieces$")
_Made = tuple[Op[Problem], Entry]


@dataclass(frozen=True, slots=True)
class Block:
    """Neighbouring ops, of whose tensors later blocks read only `output`; "" for the last block."""

    ops: tuple[Op[Problem], ...]
    output: str


@dataclass(frozen=True, slots=True)
class BatchPieces:
    """A way to cut a batch: `sizes`, the images of each piece; `blocks`, the numbers of the blocks that may run in pieces;
    `forced`: the blocks among these that must.
    """

    sizes: tuple[int, ...]
    blocks: frozenset[int]
    forced: frozenset[int] = frozenset()


def blocks(network: Network) -> tuple[Block, ...]:
    """Splits the network into the smallest blocks, in order.

    A block's output must be written by one of its ops, not be a view of other memory. All ops that may make a tensor are in one
    block.
    """
    last = {t: i for i, op in enumerate(network.ops) for t in op.inputs}
    made = {op.output: i for i, op in enumerate(network.ops)}
    live: set[str] = set()
    found: list[Block] = []
    start, end = 0, 0  # the block's first op, and one past the last op that makes any of its tensors
    for i, op in enumerate(network.ops, 1):
        live = {t for t in (*live, op.output) if last.get(t, -1) >= i}
        end = max(end, made[op.output] + 1)
        makers = network.producers[next(iter(live))] if len(live) == 1 else ()
        own = network.ops[start:i]
        if i == len(network.ops) or (end == i and makers and all(any(m is o for o in own) and _writes(m) for m in makers)):
            found.append(Block(own, next(iter(live), "")))
            start = i
    return tuple(found)


def _writes(op: Op[Problem]) -> bool:
    """Whether the op's output has memory of its own in every plan."""
    return not isinstance(op.problem, (ViewProblem, GatherProblem, MoveProblem))


def _able(network: Network, block: Block, images: int) -> bool:
    """Whether the block can run in pieces: its ops compute each image independently, it writes network outputs into memory of
    their own, and images of FP32 tensors begin at multiples of 16 bytes.
    """
    return all(
        at_batch(op.problem, 1) is not None
        and op.problem.out_shape[0] == images
        and all(math.prod(network.tensors[t][1:]) % 4 == 0 for t in (*op.inputs, op.output) if network.type(t).copies)
        and (op.output not in network.output_names or _writes(op))
        for op in block.ops
    )


def worthwhile(table: Table, chosen: plan.Plan) -> BatchPieces | None:
    """Returns the pieces with the largest gain over the chosen plan, by predicted times of the plan's tactics; None if no gain
    reaches the share LEAST_GAIN of its time.
    """
    images, able = table.network.images, able_blocks(table.network)
    kernels = {i: _kernels(block, chosen) for i, block in able.items()}
    whole = {i: [predict(p, t, table.device) for p, t in of] for i, of in kernels.items()}
    us, launch = ({i: sum(float(p[of]) for p in parts) for i, parts in whole.items()} for of in ("total_us", "launch_us"))
    best, most = None, LEAST_GAIN * chosen.us
    for pieces in (1 << i for i in range(1, images.bit_length()) if able):
        if sum(max(0.0, us[i] - pieces * launch[i]) for i in able) <= most:
            break  # launches alone cost more than the gain
        sizes = sizes_of(images, pieces)
        gains = {i: _gain(table.device, of, sizes) for i, of in kernels.items()}
        total = sum(gain for gain in gains.values() if gain > 0)
        if best and total < most / 2:
            break  # smaller pieces gain even less
        if total > most:
            best, most = BatchPieces(sizes, _offered(table, able, gains)), total
    return best


def _offered(table: Table, able: Mapping[int, Block], gains: Mapping[int, float]) -> frozenset[int]:
    """Returns the numbers of the blocks that may run in pieces: all from the first block with a gain to the last one, and on
    either side, one after the other, blocks that lose less time than DRAM takes for the tensor between them and the range,
    since that tensor then stays in L2.

    `able`: number -> each block that can run in pieces; `gains`: number -> microseconds that its pieces save, negative for a
    loss.
    """
    found = [i for i, gain in gains.items() if gain > 0]
    first, last = min(found), max(found)

    def worth(i: int, ahead: int) -> bool:
        return i in able and gains[i] + _whole_us(table.network, table.device, able[ahead].output) >= 0

    while worth(first - 1, first - 1):
        first -= 1
    while worth(last + 1, last):
        last += 1
    return frozenset(able.keys() & range(first, last + 1))


def smaller(network: Network) -> Iterator[list[BatchPieces]]:
    """Yields, for 2, 4, 8, ... pieces up to MOST_PIECES, a list of ways to cut the batch so that activations take less memory.

    The first in a list forces no block into pieces, the next ones force the blocks with the largest tensors, then more blocks,
    at last all that can run in pieces.
    """
    able, last = able_blocks(network), min(network.images, MOST_PIECES)
    sizes = {t: math.prod(shape) for t, shape in network.tensors.items()}
    most = {i: max(sum(sizes[t] for t in {*op.inputs, op.output}) for op in block.ops) for i, block in able.items()}
    sets = [frozenset(i for i in able if most[i] >= least) for least in sorted({math.inf, *most.values()}, reverse=True)]
    for pieces in sorted({*(1 << i for i in range(1, last.bit_length())), last}) if able else ():
        yield [BatchPieces(sizes_of(network.images, pieces), frozenset(able), forced) for forced in sets]


def able_blocks(network: Network) -> dict[int, Block]:
    """Returns number -> block for the blocks that can run in pieces; {} for one image, or if a name of the network could be the
    name of a piece.
    """
    if network.images == 1 or any(map(_is_odd, (*network.tensors, *(op.name for op in network.ops)))):
        return {}
    return {i: block for i, block in enumerate(blocks(network)) if _able(network, block, network.images)}


def _is_odd(name: str) -> bool:
    """Whether a name could be the name of a piece, or leaves no room for its suffix."""
    return bool(TAKEN.search(name)) or len(name) > SHORT_NAME // 2 and len(repr(name)) > MOST_NAME - SHORT_NAME


def _kernels(block: Block, chosen: plan.Plan) -> tuple[tuple[Problem, Tactic], ...]:
    """Returns the problems and tactics that run the block's ops in the plan."""
    taken = ((op.problem, entry.tactic) for op in block.ops if (entry := chosen.entry_of(op.name, op.when)))
    return tuple((problem, tactic) for problem, tactic in taken if tactic is not None)


@lru_cache(maxsize=4096)
def _gain(device: Device, kernels: tuple[tuple[Problem, Tactic], ...], sizes: tuple[int, ...]) -> float:
    """Predicts how many microseconds these kernels save if they run in pieces of these sizes; at most 0 if one of them
    cannot.
    """
    gain, taken = 0.0, list[tuple[Problem, Tactic]]()
    for problem, tactic in kernels:
        for n in set(sizes):
            if (of := at_batch(problem, n)) is None:
                return 0.0
            gain -= sizes.count(n) * predict_us(of, tactic, device) * kept_premium(of, tactic, device)
            taken.append((of, tactic))
        gain += predict_us(problem, tactic, device)
    return gain if gain <= 0 or all(accepts(of, tactic, device) for of, tactic in taken) else 0.0


def offer(network: Network, pieces: BatchPieces, device: Device, chosen: plan.Plan) -> Network:
    """Returns the network in which each block of `pieces` may run in pieces or, unless it is forced, whole, with the ops of the
    chosen plan.
    """
    listed = blocks(network)
    groups = {i: f"images {i} {listed[i].ops[0].name}" for i in pieces.blocks}
    ops, bases = list[Op[Problem]](), dict[str, str]()
    inputs, shared = {t.name for t in network.inputs}, _shared(listed)
    tie = _ties(network, pieces.sizes, device)
    for i, block in enumerate(listed):
        if i not in groups:
            ops += block.ops
            continue
        own = dict.fromkeys(op.output for op in block.ops)
        read = dict.fromkeys(t for op in block.ops for t in op.inputs if t not in own)
        handed = listed[i - 1].output if i - 1 in groups else ""  # in pieces, if the block before runs in pieces
        names = {t: f"{t}{SUFFIX}{f' {i}' if t in inputs else ''}" for t in (*read, *own)}  # other blocks may read an input
        bases |= {new: t for t, new in names.items()}
        here = (groups[i], PIECES)
        ops += _whole(block, (groups[i], WHOLE), chosen, shared)
        ops += [tie(t, names[t], True, (*(((groups[i - 1], WHOLE),) if t == handed else ()), here)) for t in read]
        ops += [_piece(op, names, pieces.sizes, here) for op in block.ops]
        after = ((groups[i + 1], WHOLE),) if i + 1 in groups else ()
        ends = {block.output: (here, *after)} | {t: (here,) for t in own if t in network.output_names}
        ops += [tie(names[t], t, False, when) for t, when in ends.items() if t]
    forced = {groups[i] for i in pieces.forced}
    left = [op for op in ops if all(g not in forced or option == PIECES for g, option in op.when)]
    options = [(g, (PIECES,) if g in forced else (WHOLE, PIECES)) for g in groups.values()]
    return _with(network, left, bases, options)


def _shared(listed: Sequence[Block]) -> set[str]:
    """Returns the groups that decide about ops of more than one block."""
    found = Counter(g for block in listed for g in {g for op in block.ops for g, _ in op.when})
    return {g for g, count in found.items() if count > 1}


def _whole(block: Block, when: Literal, chosen: plan.Plan, shared: Collection[str]) -> list[Op[Problem]]:
    """Returns the block's ops of the chosen plan, or all of its ops if a group decides about other blocks too; `when` is added
    to each.
    """
    if any(g in shared for op in block.ops for g, _ in op.when):
        return [replace(op, when=(*op.when, when)) for op in block.ops]
    return [replace(op, when=(when,)) for op in block.ops if chosen.entry_of(op.name, op.when)]


def _piece(op: Op[Problem], names: Mapping[str, str], sizes: tuple[int, ...], when: tuple[str, str]) -> Op[Problem]:
    problem = at_batch(op.problem, sizes[0])
    assert problem is not None
    inputs, output = tuple(names[t] for t in op.inputs), names[op.output]
    return replace(op, problem=problem, inputs=inputs, output=output, when=(*op.when, when), batch_pieces=sizes)


def _ties(
    network: Network, sizes: tuple[int, ...], device: Device
) -> Callable[[str, str, bool, tuple[Literal, ...]], Op[Problem]]:
    """Returns the function that makes the op from `source` to `made` which splits a tensor into pieces (`apart`), or joins
    pieces to one tensor.
    """

    def tie(source: str, made: str, apart: bool, when: tuple[Literal, ...]) -> Op[Problem]:
        tensor = source if apart else made
        us = _whole_us(network, device, tensor)
        name, problem = f"images of {made}", BatchPiecesProblem(network.tensors[tensor], sizes, apart, us)
        exact = tensor in network.exact_outputs or network.type(tensor).copies  # it shares its source's memory, so its type
        return Op(name, problem, (source,), made, when=when, batch_pieces=sizes if apart else (), exact=exact)

    return tie


def _whole_us(network: Network, device: Device, tensor: str) -> float:
    """Returns DRAM's microseconds for the part of the whole tensor that L2 cannot hold."""
    element = {t.name: DTYPES[t.dtype].itemsize for t in (*network.inputs, *network.outputs)}
    nbytes = element.get(tensor, 2) * math.prod(network.tensors[tensor])
    return 0.0 if device.measured else moved_us(device, nbytes, 0)["dram"]


def _with(network: Network, ops: Sequence[Op[Problem]], bases: Mapping[str, str], groups: Sequence[Group]) -> Network:
    """Returns the network with these ops and groups; `bases`: new tensor -> the tensor whose type it has."""
    return replace(
        network,
        ops=tuple(ops),
        tensors={**network.tensors, **{op.output: op.problem.out_shape for op in ops}},
        groups=(*network.groups, *groups),
        types={**network.types, **{t: network.types[of] for t, of in bases.items() if of in network.types}},
    )


def whole(op: Op[Any]) -> Any:
    """Returns the op's problem for all images."""
    return at_batch(op.problem, sum(op.batch_pieces)) if op.batch_pieces else op.problem


def without(graph: plan.Graph) -> plan.Graph | None:
    """Returns the graph in which every block runs whole; None if no block of this graph can run in pieces."""
    groups = {g: options for g, options in graph.groups if options == (WHOLE, PIECES)}
    if not groups:
        return None
    left = tuple(c for c in graph.choices if all(g not in groups or o == WHOLE for g, o in c.when))
    return replace(graph, choices=left, groups=tuple((g, (WHOLE,) if g in groups else o) for g, o in graph.groups))


# ---- piece by piece


def unrolled(table: Table, chosen: plan.Plan) -> tuple[Table, plan.Plan]:
    """Returns the table and the plan in which each piece has layers of its own, in execution order; both unchanged if nothing
    runs in pieces.
    """
    network = table.network
    ops = [op for op in network.ops if chosen.entry_of(op.name, op.when)]
    if not any(op.batch_pieces for op in ops):
        return table, chosen
    made, parts = list[_Made](), dict[str, list[tuple[str, int]]]()  # tensor in pieces -> (name, images) of each piece
    for in_pieces, run in groupby(ops, key=lambda op: bool(op.batch_pieces) or isinstance(op.problem, BatchPiecesProblem)):
        listed = [(op, chosen.entries[op.name]) for op in run]
        made += _run(listed, parts) if in_pieces else [(replace(op, when=()), entry) for op, entry in listed]
    bases = {name: t for t, named in parts.items() for name, _ in named}
    shares = {name: n for named in parts.values() for name, n in named}
    hops = [(name, src, dst) for t, src, dst in chosen.reformats for name, _ in parts.get(t, [(t, 0)])]
    before = table.graph.reformat_ps

    def reformat_ps(tensor: str, src: Key, dst: Key) -> int | None:
        ps = before(bases.get(tensor, tensor), src, dst)
        return None if ps is None else ps * shares.get(tensor, network.images) // network.images

    flat = _with(replace(network, groups=()), [op for op, _ in made], bases, ())
    graph = replace(table.graph, reformat_ps=reformat_ps, groups=())
    beside = {**table.beside, **{name: table.beside[t] for name, t in bases.items() if t in table.beside}}
    entries = {op.name: entry for op, entry in made}
    return (
        replace(table, network=flat, graph=graph, beside=beside, times=()),
        replace(chosen, entries=entries, options={}, reformats=tuple(hops)),
    )


def _run(listed: Sequence[_Made], parts: dict[str, list[tuple[str, int]]]) -> list[_Made]:
    """Returns the layers of neighbouring ops that run in pieces: piece by piece, each with its share of the time, then the ops
    that join pieces. Adds (name, images) of each new piece to `parts`.
    """
    sizes, made = next(op.batch_pieces for op, _ in listed if op.batch_pieces), list[_Made]()
    own = {op.output for op, _ in listed if op.batch_pieces}
    for first, n in zip((0, *accumulate(sizes)), sizes, strict=False):
        part = piece_text(first, n)
        for op, entry in listed:
            if not op.batch_pieces:
                continue
            inputs, output = tuple(_named(t, part) if t in own else t for t in op.inputs), _named(op.output, part)
            name, problem = op.name + part, at_batch(op.problem, n)
            if isinstance(op.problem, BatchPiecesProblem):
                name, problem = output, GatherProblem(op.problem.shape, index=(tuple(range(first, first + n)), (), (), ()))
            assert problem is not None
            parts.setdefault(op.output, []).append((output, n))
            new = replace(op, name=name, problem=problem, inputs=inputs, output=output, when=(), images=(first, n))
            made.append((new, _share(entry, n, sum(sizes))))
    for op, entry in listed:
        if not op.batch_pieces and isinstance(op.problem, BatchPiecesProblem):
            joined = ConcatProblem(sizes, op.problem.shape[1:], 0)
            inputs = tuple(name for name, _ in parts[op.inputs[0]])
            new = replace(op, name=f"{op.output} of its pieces", problem=joined, inputs=inputs, when=())
            made.append((new, replace(entry, ins=entry.ins * len(sizes))))
    return made


def _named(tensor: str, part: str) -> str:
    """Returns the name of a piece of a tensor.

    >>> _named("x in pieces", " [0:8]"), _named("x in pieces 3", " [0:8]")
    ('x [0:8]', 'x 3 [0:8]')
    """
    base, _, number = tensor.rpartition(SUFFIX)
    return base + number + part


def _share(entry: Entry, n: int, images: int) -> Entry:
    return replace(entry, time_ps=entry.time_ps * n // images, premium_ps=entry.premium_ps * n // images)
