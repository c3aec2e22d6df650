"""Proof that every layer of a plan reads what was written for it: which bytes each tensor covers, layer by layer.

Memory is given out three times over: tensors share the arena over time (`memory`), pieces of a Concat and parts of a Split lie
in other tensors, and views have other tensors' bytes (`inplace`). Here none of that is believed. The layers are walked in the
order in which they run, with a record of what is where:

- a layer that launches writes its output's bytes, padded channels included: whatever else had one of them is gone;
- a layer that launches nothing must find every element of its output where its inputs have it already;
- whatever is read must still be where it was written, and be the tensor that the network says is read here.

Bytes are strided boxes, so a tensor of any size costs the same. Where two boxes are too intricate to be told apart, they count
as overlapping: a plan may be refused wrongly, but no wrong plan passes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import numpy as np

from gpu_runtime.network import Op
from gpu_runtime.runtime.fields import Span
from gpu_runtime.runtime.plan_record import Bound, Layer, Memory, Step, TensorPlace
from tactics.format import DTYPES, Format, Strides, padded_channels, strides
from tactics.problems.gather import GatherProblem, ViewProblem
from tactics.problems.problem import ConcatProblem, MoveProblem, ReformatProblem

MOST_BRANCHES = 4096  # of the search for a byte that two boxes share
Shape4 = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class Spot:
    """Where a tensor lies: byte `offset` in the arena, bytes per element, strides in elements, channels with padding."""

    offset: int
    item: int
    strides: Strides
    shape: Shape4
    padded: int

    def channels(self, c: np.ndarray) -> np.ndarray:
        """Bytes from channel 0 to channels `c`, of one image and pixel."""
        s = self.strides
        return ((c >> s.log2v) * s.block + (c & ((1 << s.log2v) - 1))) * self.item

    @property
    def pixels(self) -> int:
        return self.shape[2] * self.shape[3]


@dataclass(frozen=True, slots=True)
class Box:
    """The bytes from start + sum(k_i * step_i), k_i < count_i, on: `run` neighbours each. `dims`: (count, step), falling."""

    start: int
    dims: tuple[tuple[int, int], ...]
    run: int

    @property
    def end(self) -> int:
        return self.start + self.run + sum((n - 1) * step for n, step in self.dims)


@dataclass(slots=True)
class _Held:
    """A tensor that is somewhere. `tensor`: its name in the network; `intact`: nothing has been written over it."""

    tensor: str
    spot: Spot
    boxes: tuple[Box, ...]
    intact: bool = True
    by: str = ""  # the layer that overwrote it


class _Fault(Exception):
    pass


class Plan(Protocol):
    """What of a plan is looked at."""

    @property
    def inputs(self) -> Sequence[Bound]: ...
    @property
    def outputs(self) -> Sequence[Bound]: ...
    @property
    def layers(self) -> Sequence[Layer]: ...
    @property
    def steps(self) -> Sequence[Step]: ...
    @property
    def memory(self) -> Memory: ...


def fault(plan: Plan, ops: Mapping[str, Op]) -> str | None:
    """The first thing that is wrong with a plan's use of memory, as a sentence; None where there is nothing.

    `ops`: the network's, by name. The workspace is in any state before and after each launch.
    """
    try:
        walk = _Walk(plan, ops)
        for edge in plan.inputs:
            walk.hold(edge.name, edge, edge.name)
        for i, layer in enumerate(plan.layers):
            walk.layer(i, layer)
        for edge in (*plan.inputs, *plan.outputs):  # inputs stay: a recorded graph runs again on what they hold
            walk.read(edge.name, edge, edge.name, "the end")
    except _Fault as e:
        return str(e)
    return None


class _Walk:
    """The state between two layers: what is where."""

    def __init__(self, plan: Plan, ops: Mapping[str, Op]):
        self.ops, self.size = ops, plan.memory.activation_bytes
        self.zeros = [Box(offset, (), nbytes) for offset, nbytes in plan.memory.zeros]
        scratch = [] if plan.memory.workspace is None else [plan.memory.workspace]
        self.scratch = {offset: Box(offset, (), nbytes) for offset, nbytes in scratch}
        frees = dict(plan.memory.frees)
        self.pointers: dict[int, set[int]] = {}  # layer -> offsets of its launches' arguments in the arena
        self.freed: dict[int, list[Span]] = {}  # layer -> what nothing reads after it
        done = 0
        for i, step in enumerate(plan.steps):
            if not step.covers or min(step.covers) < done:
                raise _Fault(f"launch {i} is not in the order of the layers")
            done = max(step.covers)
            at = {int(a[1]) for a in step.args if a is not None and a[0] == "arena"}
            for covered in step.covers:
                self.pointers[covered] = self.pointers.get(covered, set()) | at
            self.freed.setdefault(max(step.covers), []).extend(frees.get(i, ()))
        most = len(plan.inputs) + sum(len(layer.outputs) for layer in plan.layers)
        self.held: list[_Held] = []
        self.named: dict[tuple[str, Spot, Format], _Held] = {}
        self.low, self.high = np.zeros(most, np.int64), np.zeros(most, np.int64)  # bytes that held tensors span; 0: none

    def layer(self, i: int, layer: Layer) -> None:
        """What layer number `i` reads is looked at, what it writes is held."""
        name, (out,) = layer.name, layer.outputs
        op, tensor, sources = self._sources(layer)
        if (layer.tactic is None) == (i in self.pointers):
            raise _Fault(f"{name} is {'launched, but moves nothing' if layer.tactic is None else 'computed by no launch'}")
        if layer.tactic is None:
            _prove_in_place(op, name, [s.spot for s in sources], _spot(out))
            self.hold(out.name, out, tensor)
            return
        boxes, used = _boxes(_spot(out)), self._scratch(i, layer)
        for box in (*boxes, *used):
            if any(_overlap(box, other) for s in sources for other in s.boxes):
                raise _Fault(f"{name} writes over what it reads")
        if any(_overlap(a, b) for a in boxes for b in used):
            raise _Fault(f"{name} writes its output over its workspace")
        for box in (*boxes, *used):
            self.overwrite(box, name)
        self.hold(out.name, out, tensor)
        for offset, nbytes in self.freed.get(i, ()):
            self.overwrite(Box(offset, (), nbytes), f"the end of {name}, where the plan frees it")

    def _sources(self, layer: Layer) -> tuple[Op | None, str, list[_Held]]:
        """(the layer's op, the tensor that it makes, what it reads); no op: the same tensor in another format, or the same
        bytes under another format's name."""
        if layer.problem is None or isinstance(layer.problem, ReformatProblem):
            held = self.read(layer.inputs[0].name, layer.inputs[0], None, layer.name)
            return None, held.tensor, [held]
        op = self.ops.get(layer.name)
        if op is None:
            raise _Fault(f"{layer.name} is no operation of the network")
        sources = [self.read(t.name, t, x, layer.name) for t, x in zip(layer.inputs, op.inputs, strict=True)]
        return op, op.output, sources

    def _scratch(self, i: int, layer: Layer) -> list[Box]:
        """The workspace, where the layer's launches are given it."""
        free = self.pointers[i] - {t.offset for t in layer.tensors}
        counters = {z.start for z in self.zeros}
        if unknown := sorted(free - set(self.scratch) - counters):
            raise _Fault(f"{layer.name} is given byte {unknown[0]} of the arena, which is none of its tensors")
        return [self.scratch[at] for at in free if at in self.scratch and at not in counters]

    def hold(self, name: str, record: TensorPlace | Bound, tensor: str) -> None:
        spot = _spot(record)
        boxes = _boxes(spot)
        if min(b.start for b in boxes) < 0 or max(b.end for b in boxes) > self.size:
            raise _Fault(f"tensor {name!r} reaches beyond the arena's {self.size} bytes")
        held = _Held(tensor, spot, boxes)
        i = len(self.held)
        self.low[i], self.high[i] = min(b.start for b in boxes), max(b.end for b in boxes)
        self.held.append(held)
        self.named[name, spot, record.format] = held

    def read(self, name: str, record: TensorPlace | Bound, tensor: str | None, reader: str) -> _Held:
        held = self.named.get((name, _spot(record), record.format))
        if held is None:
            raise _Fault(f"{reader} reads tensor {name!r} where no earlier layer put it")
        if not held.intact:
            raise _Fault(f"{reader} reads tensor {name!r}, which {held.by} has written over")
        if tensor is not None and held.tensor != tensor:
            raise _Fault(f"{reader} reads tensor {held.tensor!r}, expected {tensor!r}")
        return held

    def overwrite(self, box: Box, by: str) -> None:
        if any(_overlap(box, zero) for zero in self.zeros):
            raise _Fault(f"{by} writes over the counters")
        for i in np.flatnonzero((self.low < box.end) & (self.high > box.start)):
            if any(_overlap(box, other) for other in self.held[i].boxes):
                self.held[i].intact, self.held[i].by = False, by
                self.low[i] = self.high[i] = 0


# ---- bytes


def _spot(record: TensorPlace | Bound) -> Spot:
    """Where an input, an output or a layer's tensor lies."""
    fmt, shape, whole = record.format, record.shape4, record.inside
    item, own = DTYPES[fmt.dtype].itemsize, padded_channels(fmt.layout, shape[1])
    if whole is None:
        return Spot(record.offset, item, strides(fmt, shape), shape, own)
    if DTYPES[whole.format.dtype].itemsize != item or record.offset != whole.first_byte:
        raise _Fault(f"tensor {record.name!r} does not begin at channel {whole.channel} of the one around it")
    return Spot(record.offset, item, strides(whole.format, whole.shape4), shape, own)


def _boxes(spot: Spot) -> tuple[Box, ...]:
    """The bytes of a tensor, its padded channels included: whole vectors of channels, and what is left of one."""
    s, item, vector = spot.strides, spot.item, 1 << spot.strides.log2v
    around = (spot.shape[0], s.n * item), (spot.pixels, s.pixel * item)
    blocks, left = divmod(spot.padded, vector)
    found = []
    if blocks:
        found.append(_box(spot.offset, (*around, (blocks, s.block * item)), vector * item))
    if left:
        found.append(_box(spot.offset + blocks * s.block * item, around, left * item))
    return tuple(found)


def _box(start: int, dims: Iterable[tuple[int, int]], run: int) -> Box:
    """With as few dims as possible: neighbouring runs are one."""
    kept: list[tuple[int, int]] = []
    for n, step in sorted((d for d in dims if d[0] > 1), key=lambda d: d[1]):
        if not kept and step == run:
            run *= n
        elif kept and step == kept[-1][0] * kept[-1][1]:
            kept[-1] = kept[-1][0] * n, kept[-1][1]
        else:
            kept.append((n, step))
    return Box(start, tuple(reversed(kept)), run)


def _overlap(a: Box, b: Box) -> bool:
    """Whether two boxes share a byte; True also where finding out takes too long."""
    if a.start >= b.end or b.start >= a.end:
        return False
    reach: dict[int, list[int]] = {}  # step -> least and most times it is between a run of `a` and one of `b`
    for box, at in ((a, 1), (b, 0)):
        for n, step in box.dims:
            reach.setdefault(step, [0, 0])[at] += (n - 1) if at else 1 - n
    steps = sorted(reach, reverse=True)
    low, high = ([*accumulate((reach[s][i] * s for s in reversed(steps)), initial=0)][::-1] for i in (0, 1))
    budget = MOST_BRANCHES

    def meet(i: int, least: int, most: int) -> bool:
        """Whether steps i.. can add up to something from `least` to `most`."""
        nonlocal budget
        budget -= 1
        if budget < 0 or (least <= 0 <= most):
            return True
        if i == len(steps) or low[i] > most or high[i] < least:
            return False
        step = steps[i]
        first, last = max(-((high[i + 1] - least) // step), reach[step][0]), min((most - low[i + 1]) // step, reach[step][1])
        return any(meet(i + 1, least - k * step, most - k * step) for k in range(first, last + 1))

    return meet(0, b.start - a.start - a.run + 1, b.start - a.start + b.run - 1)


# ---- layers that launch nothing


def _prove_in_place(op: Op | None, name: str, ins: list[Spot], out: Spot) -> None:
    """Every element of the output, and its padding, lies where an input has it."""
    p, x = op.problem if op is not None else None, ins[0]
    if p is None or (isinstance(p, ViewProblem) and p.shape[:2] == p.out[:2]):
        same = _same(x, 0, out, 0, out.padded) and x.padded == out.padded
    elif isinstance(p, ConcatProblem) and p.axis == 1:
        same = _is_joined(ins, out, p.sizes)
    elif isinstance(p, MoveProblem) and p.is_part:
        same = _same(out, 0, x, p.start[0], out.padded) and p.start[0] + out.padded <= x.padded
        same &= out.padded == out.shape[1] or p.start[0] + out.shape[1] == p.c
    elif isinstance(p, ViewProblem):
        same = _is_permuted(x, out, (0, 1, 2, 3))
    elif isinstance(p, GatherProblem) and p.is_transpose:
        same = _is_permuted(x, out, p.perm)
    else:
        raise _Fault(f"{name} launches nothing, but is no view, Concat or Split")
    if not same:
        raise _Fault(f"{name} launches nothing, but its output is not where its inputs are")


def _is_joined(ins: list[Spot], out: Spot, sizes: Sequence[int]) -> bool:
    """Whether the inputs' channels, of these numbers, are the output's, one after the other."""
    firsts = (0, *accumulate(sizes))
    same = all(_same(x, 0, out, c, x.padded) for x, c in zip(ins, firsts, strict=False))
    same &= all(x.padded == size for x, size in zip(ins[:-1], sizes, strict=False))
    return same and firsts[-2] + ins[-1].padded == out.padded


def _is_permuted(x: Spot, out: Spot, perm: Sequence[int]) -> bool:
    """Whether `out` has the bytes of x with its axes in that order, all four as one sequence of elements."""
    before, after = _axes(x), _axes(out)
    if before is None or after is None or x.offset != out.offset:
        return False
    return _coalesced(d for a in perm for d in before[a]) == _coalesced(d for axis in after for d in axis)


def _same(x: Spot, x_first: int, y: Spot, y_first: int, count: int) -> bool:
    """Whether channels x_first .. + count of x are where channels y_first .. + count of y are, in all images and pixels."""
    if x.item != y.item or x.shape[0] != y.shape[0] or x.pixels != y.pixels:
        return False
    images = x.shape[0] == 1 or x.strides.n == y.strides.n
    pixels = x.pixels == 1 or x.strides.pixel == y.strides.pixel
    c = np.arange(count)
    return images and pixels and np.array_equal(x.offset + x.channels(x_first + c), y.offset + y.channels(y_first + c))


def _axes(spot: Spot) -> tuple[list[tuple[int, int]], ...] | None:
    """Of n, c, h and w: (count, step in bytes), the outer one first where there are two; None where channels are padded, or
    their last vector is not full."""
    s, (n, c, h, w), vector = spot.strides, spot.shape, 1 << spot.strides.log2v
    one = c <= vector or s.block == vector
    if spot.padded != c or not (one or c % vector == 0):
        return None
    channels = [(c, 1 if vector > 1 else s.block)] if one else [(c // vector, s.block), (vector, 1)]
    axes = [(n, s.n)], channels, [(h, w * s.pixel)], [(w, s.pixel)]
    return tuple([(count, step * spot.item) for count, step in axis] for axis in axes)


def _coalesced(digits: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """(count, step) of mixed-radix digits, the outer one first, with as few as possible: equal for equal functions."""
    found: list[tuple[int, int]] = []
    for n, step in digits:
        if n == 1:
            continue
        if found and found[-1][1] == n * step:
            found[-1] = found[-1][0] * n, step
        else:
            found.append((n, step))
    return found
