"""Lets convolutions make sums of parts of tensors.

If part of a convolution's channels is added to an earlier tensor, and the rest is joined to the sum unchanged, this is the
whole convolution with a residual that is zero in the rest:

    y0, y1 = Split(Conv(h)); Concat(y0 + x, y1)   is   Conv(h) + [x, 0]

A convolution whose result is read both alone and with part of another tensor added makes both, in twice the rows:

    a = Conv(h); b = a + p                        is   a, b = Split([Conv(h), Conv(h)] + [0, p])

It may also make part of another tensor next to its result, with rows of zeros, if a Concat joins both: then that part needs no
copy. No op computes the zeros next to x and p: the convolution that makes these has rows of zeros there too. Convolutions that
read any of this have columns of zeros. Zeros cost products and bytes, so all of this is an option.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from gpu_runtime.network import Op, adds_tensors, computes, joined, unique
from gpu_runtime.rewrites.drafts import (
    ROWS,
    Draft,
    Placed,
    completed,
    has_own_type,
    is_dense,
    is_joined,
    of_zeros,
    with_columns,
    with_rows,
)
from tactics.problems.convolution import with_epilogue
from tactics.problems.pointwise_ops import NONE
from tactics.problems.problem import ConcatProblem, ConvProblem, MoveProblem, PointwiseProblem
from tactics.problems.protocol import Feature, Problem

Conv = Op[ConvProblem]


@dataclass(frozen=True, slots=True)
class Part:
    """Channels `first` .. + `count` of a tensor."""

    tensor: str
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class SumOfConcat:
    """A Concat that equals the output of `conv` with the tensor `added` added to its channels from `first` on; `through`: all
    ops that the convolution with a residual replaces.
    """

    concat: Op[ConcatProblem]
    conv: Conv
    added: str
    first: int
    through: tuple[Op[Problem], ...]


@dataclass(frozen=True, slots=True)
class _ConcatInput:
    """An input of a Concat that begins at the Concat's channel `first`: the part `own` of a tensor or, if `add` is an op, the
    sum of `own` and `other` that `add` computes.
    """

    first: int
    own: str
    add: Op[Problem] | None
    other: str


@dataclass(frozen=True, slots=True)
class WidenedConv:
    """A convolution that makes `part` of another tensor next to its own output.

    If `add` is an op, the second half is the sum of the convolution's output and the part, which `add` computed before. Else
    the part is unchanged, and is the input `alone` of the Concat with the name `concat`.
    """

    conv: Conv
    part: Part
    add: Op[Problem] | None = None
    alone: str = ""
    concat: str = ""

    @property
    def second(self) -> str:
        """The name of the second tensor that the convolution makes."""
        return self.add.output if self.add else self.alone


def summed(draft: Draft) -> Draft:
    """Returns the form of a network in which convolutions compute the sums of parts of tensors, as residuals (see the example
    above); the same draft if the network has no such sum.
    """
    found = _Found(draft)
    return _Sums(draft, found).form() if found.concat_sums or found.widened else draft


class _Found:
    """The sums of a network. `zeros`: tensor -> channel -> the number of zero channels that must precede it."""

    def __init__(self, draft: Draft) -> None:
        self.network, self.at = draft.network, draft.at
        self.concat_sums: dict[str, SumOfConcat] = {}  # by the name of its Concat
        self.widened: dict[str, WidenedConv] = {}  # by the name of its convolution
        self.zeros: dict[str, dict[int, int]] = {}
        self.gone: set[str] = set()
        for op in self.network.ops:
            whole = self._sum_of_concat(op)
            if whole is not None and not any(x.name in self.gone for x in (*whole.through, op)):
                self.concat_sums[op.name] = whole
                self.gone |= {x.name for x in (*whole.through, op)}
        for op in self.network.ops:
            self._beside_sum(op)
        for op in self.network.ops:
            self._beside_input(op)
        for op in reversed(self.network.ops):
            self._widen(op)

    # ---- the roles of ops

    def maker(self, tensor: str) -> Conv | None:
        """Returns the convolution that makes a tensor in every plan, if its rows of zeros give zeros; else None.

        Only an activation and a residual may follow its sums.
        """
        op = self.network.producer(tensor)
        if not computes(op, ConvProblem) or not is_dense(self.network, op) or op.name in self.gone:
            return None
        plain = op.problem.needs <= {Feature.RESIDUAL, Feature.SCALED_INPUT, Feature.AFFINE, Feature.LAST_ACTIVATION}
        zero = np.zeros(1, np.float32) if op.problem.epilogue.residual else None
        inside = tensor not in self.network.output_names
        return op if plain and inside and not of_zeros(op.problem, zero).any() else None

    def part(self, tensor: str) -> Part:
        """Returns the part of another tensor that the tensor is; all of the tensor itself, if it is no part."""
        op = self.network.producer(tensor)
        if computes(op, MoveProblem) and op.problem.is_part:
            return Part(op.inputs[0], op.problem.start[0], op.problem.out[0])
        return Part(tensor, 0, self.network.tensors[tensor][1])

    def _takes(self, op: Op[Problem], tensor: str) -> bool:
        """Whether the op is a convolution that reads the tensor as its columns."""
        return is_dense(self.network, op) and op.inputs[0] == tensor and op.inputs.count(tensor) == 1

    def is_free(self, op: Op[Problem]) -> bool:
        """Whether the op is a Concat whose inputs may lie in any order, with other channels between them."""
        if not is_joined(op) or op.when or op.output in self.network.output_names or has_own_type(self.network, op):
            return False
        readers = self.network.readers[op.output]
        return op.name not in self.gone and bool(readers) and all(self._takes(reader, op.output) for reader in readers)

    # ---- the sums that are found

    def _sum_of_concat(self, op: Op[Problem]) -> SumOfConcat | None:
        """Returns the sum that a Concat equals, if its inputs are all parts of one tensor, in order, and another tensor is
        added to one of them; else None.
        """
        if not computes(op, ConcatProblem) or op.problem.axis != 1 or op.when or has_own_type(self.network, op):
            return None
        inputs, size = self._inputs_of(op), sum(op.problem.sizes)
        sources = {self.part(x.own).tensor for x in inputs}
        added = [x for x in inputs if x.add]
        if len(sources) != 1 or len(added) != 1:
            return None
        (y,), (total,) = sources, added
        conv = self.maker(y)
        if conv is None or conv.problem.needs - {Feature.AFFINE} or size != self.network.tensors[y][1]:
            return None
        parts = [giver for x in inputs for giver in self.network.producers[x.own]]
        through = (*parts, *(x.add for x in added if x.add))
        inside = self._only_within((y, *(x.output for x in through)), {x.name for x in (*through, op)})
        return SumOfConcat(op, conv, total.other, total.first, (conv, *through)) if inside else None

    def _inputs_of(self, op: Op[ConcatProblem]) -> list[_ConcatInput]:
        """Returns all inputs of a Concat; [] if one of them has another form than _ConcatInput."""
        firsts = accumulate(op.problem.sizes, initial=0)
        found = [self._input_at(t, first, c) for t, first, c in zip(op.inputs, firsts, op.problem.sizes, strict=False)]
        known = [given for given in found if given is not None]
        return known if len(known) == len(found) else []

    def _input_at(self, tensor: str, first: int, count: int) -> _ConcatInput | None:
        """Returns an input of a Concat, if it is the part of a tensor at the same channels, perhaps with another tensor added;
        else None.
        """
        add = self._sum(tensor)
        for own in add.inputs if add else (tensor,):
            if self._in_order(own, first, count):
                others = [x for x in add.inputs if x != own] if add else [""]
                return _ConcatInput(first, own, add, others[0]) if others else None
        return None

    def _only_within(self, tensors: Iterable[str], names: set[str]) -> bool:
        """Whether only the ops of these names read the tensors."""
        given = set(tensors)
        return not given & self.network.output_names and all(op.name in names for t in given for op in self.network.readers[t])

    def _in_order(self, tensor: str, first: int, count: int) -> bool:
        part = self.part(tensor)
        return part.tensor != tensor and (part.first, part.count) == (first, count)

    def _sum(self, tensor: str) -> Op[Problem] | None:
        """Returns the op that makes a tensor, if it only adds two tensors of that shape; else None."""
        op = self.network.producer(tensor)
        return op if op is not None and adds_tensors(op) and not has_own_type(self.network, op) else None

    def _beside_sum(self, op: Op[Problem]) -> None:
        add = self._sum(op.output)
        if add is not op or op.name in self.gone or len(set(op.inputs)) < 2:
            return
        for own, other in (op.inputs, op.inputs[::-1]):
            readers = [reader for reader in self.network.readers[own] if reader is not op]
            conv = self.maker(own)
            free = all(self.is_free(reader) or self._takes(reader, own) for reader in readers)
            if conv is not None and readers and free and self._put(WidenedConv(conv, self.part(other), add=op)):
                return

    def _beside_input(self, op: Op[Problem]) -> None:
        """Puts inputs of a Concat that are parts of other tensors, and so would be copied, next to inputs that convolutions
        make.
        """
        if not self.is_free(op):
            return
        for t in op.inputs:
            part = self.part(t)
            if part.tensor == t:
                continue
            for own in reversed(op.inputs):
                conv = self.maker(own)
                alone = len(self.network.readers[own]) == 1 and op.inputs.count(own) == op.inputs.count(t) == 1
                if conv is not None and alone and self._put(WidenedConv(conv, part, alone=t, concat=op.name)):
                    break

    def _put(self, wide: WidenedConv) -> bool:
        """Records a widened convolution, if it is possible and the part's producer can make zeros before the part; returns
        whether it did.
        """
        conv, part = wide.conv, wide.part
        source = self.maker(part.tensor)
        if source is None or conv.problem.needs - {Feature.AFFINE} or Feature.RESIDUAL in source.problem.needs:
            return False
        taken = {conv.name, source.name} & set(self.widened) or conv.output in self.zeros or source is conv
        if taken or self._cut(part) or self.at[source.name] >= self.at[conv.name]:
            return False
        readers = [op for op in self.network.readers[part.tensor] if op is not wide.add]
        if not all(self._takes(op, part.tensor) or (computes(op, MoveProblem) and op.problem.is_part) for op in readers):
            return False
        places = self.zeros.setdefault(part.tensor, {})
        places[part.first] = max(places.get(part.first, 0), conv.problem.k)
        self.widened[conv.name] = wide
        return True

    def _cut(self, part: Part) -> bool:
        """Whether zeros before the part would lie inside another part, or another part's zeros would lie inside this one."""
        others = [x.part for x in self.widened.values() if x.part.tensor == part.tensor]
        inside = any(part.first < at < part.first + part.count for at in self.zeros.get(part.tensor, {}))
        return inside or any(x.first < part.first < x.first + x.count for x in others)

    def _widen(self, op: Op[Problem]) -> None:
        """Passes a request for zero channels before or behind the output of `op` on to the tensor that `op` adds to it: to the
        addend of a Concat's sum, or to the residual of a convolution. The caller goes through the ops from the last to the
        first.
        """
        asked, c = self.zeros.get(op.output, {}), op.problem.out_shape[1]
        before, behind = asked.get(0, 0), asked.get(c, 0)
        if op.name in self.concat_sums:
            whole = self.concat_sums[op.name]
            count = self.network.tensors[whole.added][1]
            self._ask(whole.added, before + whole.first, behind + c - whole.first - count)
        elif asked and computes(op, ConvProblem) and op.problem.epilogue.residual:
            self._ask(op.inputs[1], before, behind)

    def _ask(self, tensor: str, before: int, behind: int) -> None:
        whole = any(whole.concat.output == tensor for whole in self.concat_sums.values())
        maker = self.maker(tensor)
        if maker is None if not whole else tensor in self.network.output_names:
            return
        if maker is not None and maker.name in self.widened:
            return
        if tensor in self.zeros and set(self.zeros[tensor]) - {0, self.network.tensors[tensor][1]}:
            return
        for at, count in ((0, before), (self.network.tensors[tensor][1], behind)):
            places = self.zeros.setdefault(tensor, {})
            places[at] = max(places.get(at, 0), count)


class _Sums:
    """Builds the form with all found sums; `placed`: tensor -> its place, if it lies in another tensor."""

    def __init__(self, draft: Draft, found: _Found) -> None:
        self.network, self.at, self.found = draft.network, draft.at, found
        self.placed: dict[str, Placed] = {}
        self.alone: dict[tuple[str, str], Placed] = {}  # (Concat's name, its input) -> the input's place
        for t, asked in found.zeros.items():
            c = self.network.tensors[t][1]
            index = tuple(i + sum(count for at, count in asked.items() if at <= i) for i in range(c))
            if total := sum(asked.values()):
                self.placed[t] = Placed(f"{t} with zeros", index, c + total)
        for wide in found.widened.values():
            t, k = wide.conv.output, wide.conv.problem.k
            both, channels = f"{t} beside {wide.second}", k + wide.part.count
            self.placed[t] = Placed(both, tuple(range(k)), channels)
            if wide.alone:
                self.alone[wide.concat, wide.alone] = Placed(both, tuple(range(k, channels)), channels)

    def form(self) -> Draft:
        adds = {wide.add.name: wide for wide in self.found.widened.values() if wide.add}
        made: list[tuple[int, Op[Problem]]] = []
        for op in self.network.ops:
            if op.name in self.found.concat_sums:
                new: Iterator[Op[Problem]] | Sequence[Op[Problem]] = self._summed(self.found.concat_sums[op.name])
            elif op.name in self.found.gone:
                new = ()
            elif op.name in adds:
                new = [self._second(adds[op.name], op)]
            elif op.name in self.found.widened:
                new = self._widened(self.found.widened[op.name])
            else:
                new = self._over(op)
            made += ((self.at[op.name], each) for each in new)
        missing = {t: (placed.source, placed.of(self.network.tensors[t])) for t, placed in self.placed.items()}
        return completed(self.network, made, missing)

    def _summed(self, whole: SumOfConcat) -> Iterator[Op[Problem]]:
        """Yields the convolution with a residual, in the place of its Concat."""
        conv = self._columns(whole.conv)
        end = _with_residual(conv.problem)
        t, size = whole.concat.output, conv.problem.k
        placed = self.placed.get(t, Placed(t, tuple(range(size)), size))
        residual, pads = self._padded(whole.added, placed.index[0] + whole.first, placed.channels, conv.name)
        yield from pads
        wide = with_rows(replace(conv, problem=end), placed.index, placed.channels)
        name = " + ".join((conv.name, *(x.name for x in whole.through if computes(x, PointwiseProblem))))
        both = joined(*whole.through, whole.concat, name=name)
        yield replace(wide, name=name, inputs=(conv.inputs[0], residual), output=placed.source, nodes=both.nodes)

    def _widened(self, wide: WidenedConv) -> Iterator[Op[Problem]]:
        """Yields the convolution with more rows, and a residual that is zero in its own rows."""
        conv, part = self._columns(wide.conv), wide.part
        source, placed = self.placed[part.tensor], self.placed[wide.conv.output]
        first, k = source.index[part.first] - conv.problem.k, conv.problem.k
        zeros = Placed(source.source, tuple(range(first, first + placed.channels)), source.channels)
        n, _, h, w = conv.problem.out_shape
        z = f"{placed.source}: added"
        yield Op(f"zeros and part for {conv.name}", zeros.of((n, placed.channels, h, w)), (source.source,), z)
        second = range(k, k + part.count) if wide.add else ()
        rows = {}
        for name, a in conv.weights.items():
            if name in ROWS:
                rows[name] = np.zeros((placed.channels, *a.shape[1:]), np.float32)
                rows[name][:k] = a
                rows[name][list(second)] = a[: len(second)]
        problem = _with_residual(replace(conv.problem, k=placed.channels))
        name = f"{conv.name} + {wide.add.name}" if wide.add else f"{conv.name} beside {wide.alone} of {wide.concat}"
        nodes = unique((*conv.nodes, *(wide.add.nodes if wide.add else ())))
        weights, inputs = {**conv.weights, **rows}, (conv.inputs[0], z)
        yield replace(conv, name=name, problem=problem, weights=weights, inputs=inputs, output=placed.source, nodes=nodes)

    def _second(self, wide: WidenedConv, add: Op[Problem]) -> Op[Problem]:
        placed, k = self.placed[wide.conv.output], wide.conv.problem.k
        part = Placed(placed.source, tuple(range(k, placed.channels)), placed.channels)
        return Op(f"{add.name} out of {placed.source}", part.of(add.problem.out_shape), (placed.source,), add.output)

    def _over(self, op: Op[Problem]) -> Iterator[Op[Problem]]:
        """Yields the op on the tensors that contain its inputs; the unchanged op if it needs its inputs in memory of their
        own.
        """
        if computes(op, ConcatProblem) and self.found.is_free(op) and any(t in self.placed for t in op.inputs):
            yield self._joined(op)
        elif computes(op, MoveProblem) and op.problem.is_part and op.inputs[0] in self.placed:
            source, p = self.placed[op.inputs[0]], op.problem
            here = Placed(source.source, source.index[p.start[0] : p.start[0] + p.out[0]], source.channels)
            new = here.of(p.out_shape)
            yield Op(f"{op.name} out of {source.source}", new, (source.source,), op.output, nodes=op.nodes, when=op.when)
        elif is_dense(self.network, op) and computes(op, ConvProblem):
            conv, placed = self._columns(op), self.placed.get(op.output)
            if placed is None:
                yield conv
                return
            inputs = conv.inputs
            if conv.problem.epilogue.residual:
                residual, pads = self._padded(op.inputs[1], placed.index[0], placed.channels, conv.name)
                yield from pads
                inputs = (inputs[0], residual)
            wide = with_rows(conv, placed.index, placed.channels)
            yield replace(wide, name=f"{op.name} with zeros", inputs=inputs, output=placed.source)
        else:
            yield op

    def _columns(self, op: Conv) -> Conv:
        placed = self.placed.get(op.inputs[0])
        if placed is None or op.inputs.count(op.inputs[0]) > 1:
            return op
        wide = with_columns(op, placed.index, placed.channels)
        return replace(wide, name=f"{op.name} over {placed.source}", inputs=(placed.source, *op.inputs[1:]))

    def _joined(self, op: Op[ConcatProblem]) -> Op[ConcatProblem]:
        """Returns the Concat of all tensors that contain its inputs, each once."""
        shapes = self.network.tensors
        known = [self.alone.get((op.name, t)) or self.placed.get(t) for t in op.inputs]
        own = [Placed(t, tuple(range(shapes[t][1])), shapes[t][1]) for t in op.inputs]
        pieces = [a or b for a, b in zip(known, own, strict=True)]
        sources, index, channels = list[str](), list[int](), list[int]()
        for piece in pieces:
            at = sources.index(piece.source) if piece.source in sources else len(sources)
            first = sum(channels[:at])
            if at == len(sources) or not {first + i for i in piece.index}.isdisjoint(index):  # an input may be joined twice
                first = sum(channels)
                sources.append(piece.source)
                channels.append(piece.channels)
            index += [first + i for i in piece.index]
        whole = f"{op.output} with its pieces' tensors"
        self.placed[op.output] = Placed(whole, tuple(index), sum(channels))
        problem = replace(op.problem, sizes=tuple(channels))
        return replace(op, name=f"{op.name} wide", problem=problem, inputs=tuple(sources), output=whole)

    def _padded(self, tensor: str, before: int, channels: int, reader: str) -> tuple[str, list[Op[Problem]]]:
        """Returns (the tensor with zeros before it and up to `channels`, the ops that make it)."""
        shape, placed = self.network.tensors[tensor], self.placed.get(tensor)
        n, c, h, w = shape
        if placed is None or placed.first is None or tensor not in self.found.zeros:
            name = f"{tensor} padded for {reader}"
            pad = Placed(name, tuple(range(before, before + c)), channels)
            return name, [Op(f"zeros around {tensor} for {reader}", pad.padded(shape), (tensor,), name)]
        start = placed.first - before
        if (start, channels) == (0, placed.channels):
            return placed.source, []
        name = f"{tensor} of {channels} channels for {reader}"
        part = Placed(placed.source, tuple(range(start, start + channels)), placed.channels)
        return name, [Op(f"part {name}", part.of((n, channels, h, w)), (placed.source,), name)]


def _with_residual(p: ConvProblem) -> ConvProblem:
    """Returns the convolution that adds a residual to its previous output."""
    return with_epilogue(p, residual=True, act_first=p.epilogue.act != NONE or p.epilogue.affine)
