"""Proof that every layer of a plan reads the bytes written for it: the bytes of each tensor, layer by layer.

Memory is shared in three ways: tensors share the arena over time (`memory`), pieces of a Concat and parts of a Split lie inside
other tensors, and views share other tensors' bytes (`inplace`). The proof assumes none of this to be right, for new plans and
plans from files alike. It walks the layers in execution order with a record of the live tensors, those with a later reader:

- a layer with a launch writes its output's bytes, padded channels included, and no byte of a live tensor;
- a layer without a launch must find every element of its output already in place in its inputs;
- a tensor that is read must be where it was written and, if the network is known, be the tensor that the network reads here.

Bytes are strided boxes, so the cost does not depend on a tensor's size. Two boxes that are too complex to separate count as
overlapping: a correct plan may be refused, but no wrong plan passes.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import attrgetter
from typing import Protocol

from cuda_kernels.tensor_maps import SIZES, Map
from gpu_runtime.runtime.fields import ALIGN, Span, padded
from gpu_runtime.runtime.plan_record import Bound, Layer, Memory, TensorPlace
from tactics.format import DTYPES, Strides, padded_channels, strides
from tactics.problems.gather import GatherProblem, ViewProblem
from tactics.problems.problem import ConcatProblem, MoveProblem, ReformatProblem

MOST_BRANCHES = 4096  # in the search for a byte shared by two boxes
FEW_CHANNELS = 128  # more than any layout's vector
MOST_WORK = 4_000_000  # pairs of tensors in a block, and branches, per plan, so that every proof is quick
Shape4 = tuple[int, int, int, int]
Network = Mapping[str, tuple[Sequence[str], str]]  # an operation's name -> its inputs, its output
_place_of = attrgetter("offset", "shape4", "format", "inside")  # the bytes of a tensor, and their format


class Fault(ValueError):
    """Raised with a plan's fault, in words."""


@dataclass(frozen=True, slots=True)
class Spot:
    """A tensor's place: byte `offset` in the arena, bytes per element, strides in elements, channels with padding."""

    offset: int
    item: int
    strides: Strides
    shape: Shape4
    padded: int

    def channel(self, c: int) -> int:
        """Returns the byte offset of channel `c` in the first image and pixel."""
        return self.offset + self.strides.channel(c) * self.item

    @property
    def pixels(self) -> int:
        return self.shape[2] * self.shape[3]


@dataclass(frozen=True, slots=True)
class Box:
    """The bytes at start + sum(k_i * step_i) for all k_i < count_i, `run` neighbouring bytes each. `dims`: (count, step),
    falling.
    """

    start: int
    dims: tuple[tuple[int, int], ...]
    run: int

    @property
    def end(self) -> int:
        return self.start + self.run + sum((n - 1) * step for n, step in self.dims)


@dataclass(slots=True)
class _Held:
    """A live tensor. `tensor`: its name in the network, if known; `low`, `high`: the bytes that it spans."""

    record: TensorPlace | Bound
    tensor: str
    spot: Spot
    boxes: tuple[Box, ...]
    low: int
    high: int


@dataclass(slots=True)
class _Block:
    """A span of memory that some tensors share; `held`: the live ones among them (those that a later layer reads)."""

    start: int
    end: int
    held: dict[str, _Held]


class PlanParts(Protocol):
    """The parts of a plan that the proof reads."""

    @property
    def inputs(self) -> Sequence[Bound]: ...
    @property
    def outputs(self) -> Sequence[Bound]: ...
    @property
    def layers(self) -> Sequence[Layer]: ...
    @property
    def memory(self) -> Memory: ...


def prove(plan: PlanParts, using: Collection[int], network: Network | None = None) -> list[list[Span]]:
    """Returns, for each layer, the memory without a later reader. Raises Fault for the first error in a plan's use of memory.

    `using`: numbers of the layers whose launches use the workspace, whose content is undefined before and after each of them;
    `network`: its operations, None if only the plan is known.
    """
    walk, memory, freed = _Walk(plan, network), plan.memory, []
    at = "inputs"
    try:
        for edge in plan.inputs:
            walk.add(edge, edge.name, -1, written=True)
        for i, layer in enumerate(plan.layers):
            at = f"layers[{i}] ({layer.name[:40]!r})"
            walk.layer(i, layer, i in using)
            freed.append(walk.release(i))
        at = "after the last layer, the caller"
        for edge in (*plan.inputs, *plan.outputs):  # inputs stay live, because a recorded graph reads them again
            walk.read(edge, edge.name if network is not None else None)
        walk.release(len(plan.layers))
    except Fault as e:
        raise Fault(f"{at}: {e}") from None
    if using and memory.workspace:
        freed[max(using)].append(memory.workspace)
    end = padded(max(walk.end, sum(memory.workspace or ()), *map(sum, memory.zeros), 0))
    if memory.activation_bytes != end:
        raise Fault(f"memory.activation_bytes: expected {end}, where its tensors end, got {memory.activation_bytes}")
    return freed


class _Walk:
    """The state between two layers: the live tensors by name.

    Layers are numbered from 0; the caller writes the inputs before layer 0, and reads the outputs, and the inputs again, after
    the last layer.
    """

    def __init__(self, plan: PlanParts, network: Network | None):
        self.network, self.size = network, plan.memory.activation_bytes
        self.counters = [Box(offset, (), nbytes) for offset, nbytes in plan.memory.zeros]
        self.workspace = [] if plan.memory.workspace is None else [Box(plan.memory.workspace[0], (), plan.memory.workspace[1])]
        self.last = {t.name: i for i, layer in enumerate(plan.layers) for t in layer.inputs}
        self.last |= {edge.name: len(plan.layers) for edge in (*plan.inputs, *plan.outputs)}
        self.names: set[str] = set()
        self.held: dict[str, _Held] = {}
        self.blocks: list[_Block] = []  # disjoint, sorted by start
        self.ending: dict[int, list[str]] = defaultdict(list)  # a layer -> the tensors that it reads last
        self.end = self.work = 0

    def layer(self, i: int, layer: Layer, scratch: bool) -> None:
        """Checks the inputs of layer number `i` and records its output. `scratch`: it uses the workspace."""
        (out,) = layer.outputs
        tensor, sources = self._sources(layer)
        if layer.tactic is None:
            _prove_in_place(layer, [s.spot for s in sources], _spot(out))
            self.add(out, tensor, i, written=False)
            return
        if scratch:
            self.write(self.workspace)
        made = self.add(out, tensor, i, written=True)
        if scratch and any(self.overlap(a, b) for a in made.boxes for b in self.workspace):
            raise Fault("writes its output over its workspace")

    def _sources(self, layer: Layer) -> tuple[str, list[_Held]]:
        """Returns (a layer's output tensor, its inputs). A reformat, or another name for the same bytes, is no operation of the
        network.
        """
        if self.network is None:
            return "", [self.read(t) for t in layer.inputs]
        if layer.problem is None or isinstance(layer.problem, ReformatProblem):
            (source,) = (self.read(t) for t in layer.inputs)
            return source.tensor, [source]
        if layer.name not in self.network:
            raise Fault("is not an operation of the network")
        tensors, made = self.network[layer.name]
        return made, [self.read(t, x) for t, x in zip(layer.inputs, tensors, strict=True)]

    def read(self, record: TensorPlace | Bound, tensor: str | None = None) -> _Held:
        """Returns a live tensor that is read where `record` says; `tensor`: its required name in the network. Raises Fault
        otherwise.
        """
        held = self.held.get(record.name)
        if held is None or _place_of(held.record) != _place_of(record):
            raise Fault(f"reads tensor {record.name[:40]!r} at a place to which no earlier layer wrote it")
        if tensor is not None and held.tensor != tensor:
            raise Fault(f"reads tensor {held.tensor!r}, expected {tensor!r}")
        return held

    def write(self, boxes: Sequence[Box]) -> None:
        """Raises Fault if one of these boxes of bytes, which change, belongs to a live tensor or to the counters."""
        for box in boxes:
            if any(self.overlap(box, zero) for zero in self.counters):
                raise Fault("writes over the counters")
            for block in self.blocks[self._touching(box.start, box.end)]:
                self.work += len(block.held)
                for name, other in block.held.items():
                    if other.low < box.end and box.start < other.high and any(self.overlap(box, b) for b in other.boxes):
                        raise Fault(f"writes over tensor {name[:40]!r}, which is read later")

    def add(self, record: TensorPlace | Bound, tensor: str, i: int, *, written: bool) -> _Held:
        """Adds a tensor that is live from layer `i` on."""
        spot, name, whole = _spot(record), record.name, record.whole
        boxes = _boxes(spot)
        low, high = min(b.start for b in boxes), max(b.end for b in boxes)
        if low < 0 or high > self.size:
            raise Fault(f"tensor {name[:40]!r} reaches beyond the arena's {self.size} bytes")
        if name in self.names:
            raise Fault(f"tensor {name[:40]!r} was already written")
        if written:
            self.write(boxes)
        self.names.add(name)
        self.ending[self.last.get(name, i)].append(name)
        made = self.held[name] = _Held(record, tensor, spot, boxes, low, high)
        start, end = min(whole.offset, low), max(whole.offset + whole.nbytes, high)
        near = self._touching(start, end)
        block, *others = self.blocks[near] or [_Block(start, end, {})]
        for other in others:
            block.held |= other.held
            self.work += len(other.held)
        block.held[name] = made
        block.start, block.end = min(start, block.start), max(end, block.end, *(b.end for b in others))
        self.blocks[near] = [block]
        if self.work > MOST_WORK:
            raise Fault("shares memory with too many tensors")
        return made

    def release(self, i: int) -> list[Span]:
        """Drops the tensors whose last reader is layer number `i`; returns their memory."""
        freed = []
        for name in self.ending.pop(i, ()):
            gone = self.held.pop(name)
            near = self._touching(gone.low, gone.high)
            (block,) = self.blocks[near]
            del block.held[name]
            if not block.held:
                self.blocks[near] = []
                freed.append((block.start, block.end - block.start))
                self.end = max(self.end, block.end)
                if block.start % ALIGN:
                    raise Fault(f"expected a memory block at a multiple of {ALIGN}, got one at {block.start}")
        return freed

    def _touching(self, start: int, end: int) -> slice:
        """The range of blocks with at least one of these bytes."""
        first = bisect_right(self.blocks, start, key=attrgetter("end"))
        return slice(first, bisect_left(self.blocks, end, key=attrgetter("start")))

    def overlap(self, a: Box, b: Box) -> bool:
        """Returns whether two boxes share a byte; True also if the search would take too long."""
        found, branches = _overlap(a, b)
        self.work += branches
        return found


# ---- bytes


def _spot(record: TensorPlace | Bound) -> Spot:
    """Returns the place of an input, an output or a layer's tensor."""
    fmt, shape, whole = record.format, record.shape4, record.inside
    item, own = DTYPES[fmt.dtype].itemsize, padded_channels(fmt.layout, shape[1])
    if whole is None:
        return Spot(record.offset, item, strides(fmt, shape), shape, own)
    if DTYPES[whole.format.dtype].itemsize != item or record.offset != whole.first_byte:
        raise Fault(f"tensor {record.name!r} does not begin at channel {whole.channel} of the tensor that contains it")
    return Spot(record.offset, item, strides(whole.format, whole.shape4), shape, own)


def holds(record: TensorPlace | Bound, m: Map) -> bool:
    """Whether all bytes that a tensor map at the beginning of this tensor describes are in the tensor's first box."""
    box = _boxes(_spot(record))[0]
    dims = zip(m.dims[1:], m.strides, strict=True)
    mine = _box(record.offset, dims, m.dims[0] * SIZES[m.element])
    inner = list(mine.dims)
    for n, step in box.dims:
        if inner and inner[0][1] == step and inner[0][0] <= n:
            inner.pop(0)
    return Box(0, tuple(inner), mine.run).end <= box.run


def _boxes(spot: Spot) -> tuple[Box, ...]:
    """Returns the bytes of a tensor, padded channels included, as boxes.

    One box where a pixel's vectors of channels follow one another, else one of whole vectors and one of the rest of a partial
    vector.
    """
    s, item, vector = spot.strides, spot.item, 1 << spot.strides.log2v
    around = (spot.shape[0], s.n * item), (spot.pixels, s.pixel * item)
    blocks, left = divmod(spot.padded, vector) if s.block != vector else (0, spot.padded)
    found = []
    if blocks:
        found.append(_box(spot.offset, (*around, (blocks, s.block * item)), vector * item))
    if left:
        found.append(_box(spot.offset + blocks * s.block * item, around, left * item))
    return tuple(found)


def _box(start: int, dims: Iterable[tuple[int, int]], run: int) -> Box:
    """Makes the box with the fewest dims: neighbouring runs are joined."""
    kept: list[tuple[int, int]] = []
    for n, step in sorted((d for d in dims if d[0] > 1), key=lambda d: d[1]):
        if not kept and step == run:
            run *= n
        elif kept and step == kept[-1][0] * kept[-1][1]:
            kept[-1] = kept[-1][0] * n, kept[-1][1]
        else:
            kept.append((n, step))
    return Box(start, tuple(reversed(kept)), run)


def _overlap(a: Box, b: Box) -> tuple[bool, int]:
    """Returns (whether two boxes share a byte, the branches searched); also True if too many branches are needed."""
    if a.start >= b.end or b.start >= a.end:
        return False, 0
    reach: dict[int, list[int]] = {}  # step -> its smallest and largest multiple between a run of `a` and one of `b`
    for box, at in ((a, 1), (b, 0)):
        for n, step in box.dims:
            reach.setdefault(step, [0, 0])[at] += (n - 1) if at else 1 - n
    steps = sorted(reach, reverse=True)
    low, high = ([*accumulate((reach[s][i] * s for s in reversed(steps)), initial=0)][::-1] for i in (0, 1))
    branches = 0

    def meet(i: int, least: int, most: int) -> bool:
        """Returns whether the steps from number i on can add up to a value from `least` to `most`."""
        nonlocal branches
        branches += 1
        if branches > MOST_BRANCHES or (least <= 0 <= most):
            return True
        if i == len(steps) or low[i] > most or high[i] < least:
            return False
        step = steps[i]
        first, last = max(-((high[i + 1] - least) // step), reach[step][0]), min((most - low[i + 1]) // step, reach[step][1])
        return any(meet(i + 1, least - k * step, most - k * step) for k in range(first, last + 1))

    return meet(0, b.start - a.start - a.run + 1, b.start - a.start + b.run - 1), branches


# ---- layers that launch nothing


def _prove_in_place(layer: Layer, ins: list[Spot], out: Spot) -> None:
    """Checks that every element of the output, and its padding, lies where an input has it. Raises Fault otherwise."""
    if not ins:
        raise Fault("launches nothing and reads nothing")
    p, x = layer.problem, ins[0]
    if p is None or (isinstance(p, ViewProblem) and p.shape[:2] == p.out[:2]):
        same = _same(x, 0, out, 0, out.padded) and x.padded == out.padded
    elif isinstance(p, ConcatProblem) and p.axis == 1:
        same = _is_joined(ins, out, p.sizes)
    elif isinstance(p, ConcatProblem) and p.axis == 0:
        same = all(_are_images(x, out, first) for x, first in zip(ins, (0, *accumulate(p.sizes)), strict=False))
    elif isinstance(p, GatherProblem) and p.is_images:
        same = _are_images(out, x, p.index[0][0])
    elif isinstance(p, MoveProblem) and p.is_part:
        same = _same(out, 0, x, p.start[0], out.padded) and p.start[0] + out.padded <= x.padded
        same &= out.padded == out.shape[1] or p.start[0] + out.shape[1] == p.c
    elif isinstance(p, ViewProblem):
        same = _is_permuted(x, out, (0, 1, 2, 3))
    elif isinstance(p, GatherProblem) and p.is_transpose:
        same = _is_permuted(x, out, p.perm)
    else:
        raise Fault("launches nothing, but is not a view, Concat or Split")
    if not same:
        raise Fault("launches nothing, but its output does not lie where its inputs do")


def _is_joined(ins: list[Spot], out: Spot, sizes: Sequence[int]) -> bool:
    """Returns whether the inputs' channels, `sizes` of each and in this order, are the output's channels in memory."""
    firsts = (0, *accumulate(sizes))
    same = all(_same(x, 0, out, c, x.padded) for x, c in zip(ins, firsts, strict=False))
    same &= all(x.padded == size for x, size in zip(ins[:-1], sizes, strict=False))
    return same and firsts[-2] + ins[-1].padded == out.padded


def _are_images(part: Spot, whole: Spot, first: int) -> bool:
    """Whether `part` is the images of `whole` from `first` on, in the same memory."""
    at = replace(whole, offset=whole.offset + first * whole.strides.n * whole.item, shape=(part.shape[0], *whole.shape[1:]))
    return first + part.shape[0] <= whole.shape[0] and part.padded == whole.padded and _same(part, 0, at, 0, part.padded)


def _is_permuted(x: Spot, out: Spot, perm: Sequence[int]) -> bool:
    """Whether `out` has the bytes of x with its axes in the order `perm`, compared as sequences of all elements."""
    before, after = _axes(x), _axes(out)
    if before is None or after is None or x.offset != out.offset:
        return False
    return _coalesced(d for a in perm for d in before[a]) == _coalesced(d for axis in after for d in axis)


def _same(x: Spot, x_first: int, y: Spot, y_first: int, count: int) -> bool:
    """Whether channels x_first .. + count of x lie at channels y_first .. + count of y, in all images and pixels."""
    if x.item != y.item or x.shape[0] != y.shape[0] or x.pixels != y.pixels:
        return False
    images = x.shape[0] == 1 or x.strides.n == y.strides.n
    pixels = x.pixels == 1 or x.strides.pixel == y.strides.pixel
    if not images or not pixels or x.channel(x_first) != y.channel(y_first):
        return False
    (one, vector), (other, its) = _channel_steps(x), _channel_steps(y)
    if (one, vector) == (other, its) and (x_first - y_first) % vector == 0:
        return True
    few = count <= FEW_CHANNELS  # vectors with different widths or boundaries differ after the first
    return few and all(x.channel(x_first + c) == y.channel(y_first + c) for c in range(count))


def _channel_steps(spot: Spot) -> tuple[int, int]:
    """Returns (elements from one vector of channels to the next, channels of a vector), with vectors joined where they are
    contiguous.
    """
    s = spot.strides
    return (1, 1) if s.block == 1 << s.log2v else (s.block, 1 << s.log2v)


def _axes(spot: Spot) -> tuple[list[tuple[int, int]], ...] | None:
    """Returns, for each of n, c, h and w, its (count, step in bytes), the outer one first if there are two.

    None if channels are padded or their last vector is partial.
    """
    s, (n, c, h, w), vector = spot.strides, spot.shape, 1 << spot.strides.log2v
    one = c <= vector or s.block == vector
    if spot.padded != c or not (one or c % vector == 0):
        return None
    channels = [(c, 1 if vector > 1 else s.block)] if one else [(c // vector, s.block), (vector, 1)]
    axes = [(n, s.n)], channels, [(h, w * s.pixel)], [(w, s.pixel)]
    return tuple([(count, step * spot.item) for count, step in axis] for axis in axes)


def _coalesced(digits: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Joins (count, step) of mixed-radix digits, the outer one first, to as few as possible: equal for equal functions."""
    found: list[tuple[int, int]] = []
    for n, step in digits:
        if n == 1:
            continue
        if found and found[-1][1] == n * step:
            found[-1] = found[-1][0] * n, step
        else:
            found.append((n, step))
    return found
