"""Whether what lies in the activations' memory lies apart: two tensors share bytes only as an in-place layer says, or at
different times.

Layers that launch nothing (views, parts, pieces of a Concat) declare which tensors share memory: those are one block, alive
from the first layer that touches one of them to the last. Blocks alive together are disjoint; inside a block, what a layer
writes touches nothing that was written before and is still to be read. Time: 0 inputs bound, 1.. layers, last outputs read.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple

from gpu_runtime.runtime.plan_record import Bound, PlanRecord, TensorPlace
from tactics.format import DTYPES, LAYOUTS, padded_channels, strides

MOST_PAIRS = 4_000_000  # of writes and tensors that share a block, so that no plan takes long to check


class Region(NamedTuple):
    """`runs` runs of `run` bytes, `step` apart, from `start`."""

    start: int
    run: int
    step: int
    runs: int

    @property
    def end(self) -> int:
        return self.start + (self.runs - 1) * self.step + self.run

    def touches(self, other: Region) -> bool:
        """Whether two regions share a byte; runs that are differently far apart count as one run each."""
        if self.end <= other.start or other.end <= self.start:
            return False
        if self.step != other.step or self.runs == 1 or other.runs == 1:
            return True
        ahead = (other.start - self.start) % self.step
        return not (self.run <= ahead and ahead + other.run <= self.step)


def region(tensor: TensorPlace | Bound) -> Region:
    """The bytes of a tensor, padded channels of its own included."""
    whole = tensor.inside
    if whole is None:
        return Region(tensor.offset, tensor.nbytes, tensor.nbytes, 1)
    fmt, (n, channels, h, w) = whole.format, whole.shape4
    size, s, c = DTYPES[fmt.dtype].itemsize, strides(fmt, whole.shape4), tensor.shape4[1]
    if whole.channel + c == channels:  # the last piece owns the padding
        c = padded_channels(fmt.layout, channels) - whole.channel
    if LAYOUTS[fmt.layout].blocked:
        return Region(tensor.offset, (c >> s.log2v) * s.block * size, s.n * size, n)
    return Region(tensor.offset, c * size, s.pixel * size, n * h * w)


@dataclass(slots=True)
class Value:
    """A tensor of the plan: its record, its block, and when it is written and last read."""

    record: TensorPlace | Bound
    block: int
    first: int
    last: int


@dataclass(slots=True)
class Block:
    """Memory that its values share. `writes`: (time, value) of the launches among their layers."""

    start: int
    end: int
    first: int
    last: int
    writes: list[tuple[int, int]] = field(default_factory=list)


def fault(plan: PlanRecord, launching: Sequence[bool], scratch: Sequence[Block]) -> tuple[str | None, list[Block]]:
    """(what is wrong with where tensors lie, or None; all blocks). `launching`: of each layer, whether it launches something;
    `scratch`: workspace and counters."""
    values: list[Value] = []
    held: dict[str, int] = {}
    end = len(plan.layers) + 1
    parent: list[int] = []

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    def add(record: TensorPlace | Bound, first: int, last: int) -> int:
        held[record.name] = len(values)
        parent.append(len(values))
        values.append(Value(record, len(values), first, last))
        return len(values) - 1

    for bound in plan.inputs:
        if bound.name in held:
            return f"input {bound.name!r} is there twice", []
        add(bound, 0, end)
    written: list[tuple[int, int]] = []
    for time, (layer, launches) in enumerate(zip(plan.layers, launching, strict=True), 1):
        members = []
        for t in layer.inputs:
            i = held.get(t.name)
            if i is None or not _same_place(values[i].record, t):
                return f"layers[{time - 1}]: nothing before it writes {t.name!r} to where it is read", []
            values[i].last = max(values[i].last, time)
            members.append(i)
        (out,) = layer.outputs
        if out.name in held:
            return f"layers[{time - 1}]: {out.name!r} is written before", []
        made = add(out, time, time)
        if launches:
            written.append((time, made))
            mine = region(out)
            if any(mine.touches(region(t)) for t in layer.inputs):
                return f"layers[{time - 1}]: its output {out.name!r} lies where an input does", []
        else:
            for i in members:
                parent[root(i)] = root(made)
    for bound in plan.outputs:
        i = held.get(bound.name)
        if i is None or not _same_place(values[i].record, bound):
            return f"output {bound.name!r}: no layer writes it there", []
        values[i].last = end
    blocks = _blocks(values, root)
    for time, i in written:
        blocks[values[i].block].writes.append((time, i))
    return _apart([*blocks.values(), *scratch]) or _inside(blocks, values), [*blocks.values(), *scratch]


def _same_place(one: TensorPlace | Bound, other: TensorPlace | Bound) -> bool:
    """Whether two records are of the same bytes, in the same format."""
    mine, its = ((t.shape4, t.format, t.offset, t.inside) for t in (one, other))
    return mine == its


def _blocks(values: list[Value], root: Callable[[int], int]) -> dict[int, Block]:
    """The blocks by their number, which each value is told."""
    found: dict[int, Block] = {}
    for i, v in enumerate(values):
        v.block = root(i)
        start, nbytes = v.record.whole.offset, v.record.whole.nbytes
        b = found.setdefault(v.block, Block(start, start + nbytes, v.first, v.last))
        b.start, b.end = min(b.start, start), max(b.end, start + nbytes)
        b.first, b.last = min(b.first, v.first), max(b.last, v.last)
    return found


def _apart(blocks: list[Block]) -> str | None:
    """Whether some of those alive at one time share bytes: only neighbours are compared, as all before them are apart."""
    alive: list[tuple[int, int]] = []
    ending: list[tuple[int, int, int]] = []
    for b in sorted((b for b in blocks if b.end > b.start), key=lambda b: b.first):
        while ending and ending[0][0] < b.first:
            _, *gone = heappop(ending)
            del alive[bisect_left(alive, tuple(gone))]
        at = bisect_left(alive, (b.start, b.end))
        if (at and alive[at - 1][1] > b.start) or (at < len(alive) and alive[at][0] < b.end):
            return f"memory: bytes {b.start} to {b.end} belong to two tensors at one time, at layers[{max(b.first - 1, 0)}]"
        insort(alive, (b.start, b.end))
        heappush(ending, (b.last, b.start, b.end))
    return None


def _inside(blocks: Mapping[int, Block], values: list[Value]) -> str | None:
    """Whether a launch writes what lies in its output's block and is still to be read."""
    members: dict[int, list[Value]] = defaultdict(list)
    for v in values:
        members[v.block].append(v)
    if sum(len(b.writes) * len(members[k]) for k, b in blocks.items() if len(members[k]) > 1) > MOST_PAIRS:
        return "layers: too many tensors share memory"
    for k, b in blocks.items():
        if len(members[k]) > 1 and b.writes:
            regions = [(v, region(v.record)) for v in members[k]]
            for time, i in b.writes:
                mine = region(values[i].record)
                if any(v.first < time <= v.last and mine.touches(r) for v, r in regions):
                    return f"layers[{time - 1}]: writes what a later layer reads"
    return None
