"""Pads channel slices that are no multiples of 8 to whole vectors, so that tensors need no copy to be joined, split off or
added to part of another tensor. The convolution that makes a padded tensor has rows of zeros, its readers have columns of
zeros.

The channels between slices hold zeros, transformed by the ops on their way: no reader's weights use them, but as zero times
infinity is NaN, they must be finite. So for each op that computes channel by channel these values are computed; an op that may
make infinity or NaN keeps its own tensors.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, product

import numpy as np

from gpu_runtime.network import FP16_MAX, Network, Op, computes
from gpu_runtime.padded_channels.layouts import ChannelSlices, Link, SliceStart
from gpu_runtime.padded_channels.partial_sums import summed
from gpu_runtime.rewrites import drafts
from gpu_runtime.rewrites.channels import of_channels
from tactics.problems.gather import ResizeProblem
from tactics.problems.problem import ConcatProblem, ConvProblem, MoveProblem, PointwiseProblem, PoolProblem
from tactics.problems.protocol import Feature, Problem

MOST_VALUES = 16  # values between slices of one tensor; with more, ops that compute channel by channel keep their tensors
Values = frozenset[float]
ZERO: Values = frozenset({0.0})


def on_grid(draft: drafts.Draft) -> drafts.Draft:
    """Returns the form of a network in which every slice begins at a whole vector; the same draft if each slice does
    already.
    """
    kept: set[str] = set()  # names of ops that keep their own tensors
    while True:
        grid = _Grid(draft, kept)
        if not grid.slices_moved:
            return draft
        ops = grid.ops()
        if not grid.unsafe:
            return drafts.completed(draft.network, ops, grid.missing())
        kept |= grid.unsafe


def _links(op: Op[Problem]) -> Iterator[Link]:
    """Yields the links between the op's tensors, whose channels must have the same layout; none for the input of a convolution
    over all channels.
    """
    p, y = op.problem, op.output
    if isinstance(p, ConcatProblem):
        yield from (Link(t, 0, y, first, c) for t, first, c in zip(op.inputs, (0, *accumulate(p.sizes)), p.sizes, strict=False))
    elif isinstance(p, MoveProblem) and p.is_part:
        yield Link(op.inputs[0], p.start[0], y, 0, p.out[0])
    elif isinstance(p, PointwiseProblem):
        yield from (Link(t, 0, y, 0, p.c) for t, axes in zip(op.inputs, p.tensors, strict=True) if "c" in axes)
    elif isinstance(p, ConvProblem) and p.groups == 1:
        yield from (Link(t, 0, y, 0, p.k) for t in op.inputs[1:])
    else:
        yield from (Link(t, 0, y, 0, p.out_shape[1]) for t in op.inputs)


def _known(network: Network, op: Op[Problem]) -> bool:
    """Whether the op can compute on padded tensors."""
    p = op.problem
    if drafts.has_own_type(network, op):
        return False
    if isinstance(p, ConvProblem):
        depthwise = 1 < p.groups == p.c == p.k and p.needs <= {Feature.RESIDUAL} and set(op.weights) <= {*drafts.ROWS}
        return drafts.is_dense(network, op) or (depthwise and bool(op.layer))
    if isinstance(p, PointwiseProblem):
        return p.c > 1 and all("c" in axes or _only_scales(p, i) for i, axes in enumerate(p.tensors))
    return drafts.is_joined(op) or (isinstance(p, MoveProblem) and p.is_part) or of_channels(p, 1) is not None


def _only_scales(p: PointwiseProblem, tensor: int) -> bool:
    """Whether the tensor is only a factor of values that are zero between slices."""
    return tensor > 0 and all(s.op == "mul" for s in p.stages if s.operand == f"t{tensor}")


class _Grid:
    """One attempt to pad a network, with the ops in `kept` unchanged; `unsafe`: further ops that must be kept, as `ops`
    found.
    """

    def __init__(self, draft: drafts.Draft, kept: set[str]) -> None:
        self._of, self._network = draft, draft.network
        self._able = {op.name for op in self._network.ops if op.name not in kept and _known(self._network, op)}
        givers = self._network.producers
        edge = {t.name for t in (*self._network.inputs, *self._network.outputs)}
        # A tensor is padded by all of its producers, or by none; in the latter case readers that need it padded get a copy.
        self._written = {t for t, ops in givers.items() if t not in edge and all(op.name in self._able for op in ops)}
        links = [link for op in self._network.ops if op.name in self._able for link in self._links(op)]
        channels = {t: shape[1] for t, shape in self._network.tensors.items()}
        self._slices = ChannelSlices(links, channels, {})
        phases = self._phases()
        if phases:
            self._slices = ChannelSlices(links, channels, phases)
        self.slices_moved = any(self._slices.moved(t) for t in channels)
        self._between: dict[str, Values | None] = {}  # tensor -> values between its slices; None: any finite value
        self.unsafe: set[str] = set()

    def _links(self, op: Op[Problem]) -> Iterator[Link]:
        return _links(op) if op.output in self._written else (link for link in _links(op) if link.b != op.output)

    def _phases(self) -> dict[SliceStart, int]:
        """Returns (tensor, first channel of a slice) -> the position modulo 4 that convolutions with 2:4 weights require."""
        found: dict[SliceStart, int] = {}
        for op in self._network.ops:
            if op.name in self._able and computes(op, ConvProblem) and op.problem.groups == 1 and op.problem.sparse24:
                t = op.inputs[0]
                found.update({(t, at): at % 4 for at in self._slices.starts(t)} if self._slices.moved(t) else {})
        return found

    def _name(self, tensor: str) -> str:
        return f"{tensor} ({self._slices.size(tensor)} channels)"

    def _reads(self, tensor: str) -> str:
        return self._name(tensor) if self._slices.moved(tensor) else tensor

    def missing(self) -> dict[str, tuple[str, Problem]]:
        """Returns tensor -> (source, problem) by which a padded tensor is made of the original, or the original of the padded
        one, if only the other exists.
        """
        found = {}
        for t, shape in self._network.tensors.items():
            if self._slices.moved(t):
                placed = drafts.Placed(self._name(t), self._slices.slots(t), self._slices.size(t))
                found[t], found[placed.source] = (placed.source, placed.of(shape)), (t, placed.padded(shape))
        return found

    def ops(self) -> list[tuple[int, Op[Problem]]]:
        """Returns (position, op) for all ops; those with padded tensors are changed."""
        found = []
        for op in self._network.ops:
            given = op.output in self._written and self._slices.moved(op.output)
            touched = op.name in self._able and (given or any(map(self._slices.moved, op.inputs)))
            made = self._moved(op) if touched else op
            if made is None:
                self.unsafe.add(op.name)
            found.append((self._of.at[op.name], made or op))
        return found

    def _moved(self, op: Op[Problem]) -> Op[Problem] | None:
        """Returns the op on padded tensors; None if infinity or NaN might come between the slices."""
        between = self._values(op)
        if between is not None and not all(abs(v) <= FP16_MAX for v in between):
            return None
        if op.output in self._written:
            before = self._between.get(op.output, frozenset())
            self._between[op.output] = None if between is None or before is None else between | before
        made = self._computed(op)
        if made is None:
            return None
        if op.output not in self._written:  # a convolution with only its columns changed
            return replace(made, name=f"{op.name} on the grid", inputs=(self._reads(op.inputs[0]), *op.inputs[1:]))
        inputs = tuple(map(self._reads, op.inputs))
        return replace(made, name=f"{op.name} on the grid", inputs=inputs, output=self._reads(op.output))

    def _computed(self, op: Op[Problem]) -> Op[Problem] | None:
        """Returns the op with its problem and weights for padded tensors; None if that is impossible."""
        p, size = op.problem, self._slices.size(op.output)
        if computes(op, ConvProblem) and op.problem.groups == 1:
            x, y = op.inputs[0], op.output
            if y in self._written and self._slices.moved(y):
                op = drafts.with_rows(op, self._slices.slots(y), size)
            return drafts.with_columns(op, self._slices.slots(x), self._slices.size(x)) if self._slices.moved(x) else op
        if op.output not in self._written:
            return None
        if computes(op, ConvProblem):
            return _depthwise(op, self._slices.slots(op.output), size)
        if isinstance(p, ConcatProblem):
            return replace(op, problem=replace(p, sizes=tuple(map(self._slices.size, op.inputs))))
        if isinstance(p, MoveProblem) and p.is_part:
            return replace(op, problem=self._part(op, p))
        if isinstance(p, PointwiseProblem):
            slots, fill = self._slices.slots(op.output), self._fill(op, p)[0]
            weights = {
                f"c{i}": _constant(op.weights[f"c{i}"], p, axes, slots, size, fill) for i, axes in enumerate(p.constants)
            }
            return replace(op, problem=replace(p, c=size), weights={**op.weights, **weights})
        problem = of_channels(p, size)
        return None if problem is None else replace(op, problem=problem)

    def _part(self, op: Op[Problem], p: MoveProblem) -> MoveProblem:
        x, size = op.inputs[0], self._slices.size(op.output)
        first = self._slices.slots(x)[p.start[0]] - self._slices.slots(op.output)[0]
        return replace(p, c=self._slices.size(x), out=(size, *p.out[1:]), start=(first, 0, 0))

    # ---- values between slices

    def _values(self, op: Op[Problem]) -> Values | None:
        """Returns the values that the op writes between slices: None for any finite values, NaN in the set if they may be
        NaN.
        """
        p = op.problem
        found = [self._between.get(t, ZERO) if self._slices.moved(t) else ZERO for t in op.inputs]
        if isinstance(p, ConvProblem):
            return _of_convolution(p, found[1] if len(found) > 1 else ZERO)
        if isinstance(p, ConcatProblem) or (isinstance(p, MoveProblem) and p.is_part):
            return _union(found)
        if isinstance(p, PointwiseProblem):
            return self._fill(op, p)[1]
        return _of_window(p, found[0])

    def _fill(self, op: Op[Problem], p: PointwiseProblem) -> tuple[float, Values]:
        """Returns (the value between slices of constants per channel, the op's values there): with the value 0 or 1 that gives
        zeros, else the one that gives finite numbers.
        """
        found = [self._between.get(t, ZERO) for t in op.inputs]
        tried = [(fill, _of_pointwise(op, p, found, fill)) for fill in (0.0, 1.0)]
        finite = [pair for pair in tried if all(abs(v) <= FP16_MAX for v in pair[1])]
        return next((pair for pair in finite if pair[1] == ZERO), (*finite, *tried)[0])


def _union(found: list[Values | None]) -> Values | None:
    sets = [values for values in found if values is not None]
    whole = frozenset().union(*sets)
    return whole if len(sets) == len(found) and len(whole) <= MOST_VALUES else None


def _of_convolution(p: ConvProblem, residual: Values | None) -> Values | None:
    """Returns the outputs of rows of zeros: the activation of the residual's values between its slices, or of zero without a
    residual.
    """
    if residual is None:
        return None
    beside = np.array(sorted(residual), np.float32) if p.epilogue.residual else None
    return frozenset(drafts.of_zeros(p, beside).reshape(-1).tolist())


def _of_window(p: Problem, x: Values | None) -> Values | None:
    """Returns the outputs of a pool, a resize or a window of pixels for channels whose pixels all hold one of these values;
    None if unknown.
    """
    if x is None:
        return None
    if isinstance(p, PoolProblem):
        return x if x == ZERO or p.kind == "max" or not p.count_pad else None
    if isinstance(p, ResizeProblem):
        return x | {p.extrapolation} if x == ZERO else None
    return x | {p.fill} if isinstance(p, MoveProblem) else None


def _of_pointwise(op: Op[Problem], p: PointwiseProblem, tensors: list[Values | None], fill: float) -> Values:
    """Returns the outputs of a chain for these values between the tensors' slices; NaN if a tensor's values are unknown."""
    found: set[float] = set()
    flat = [ZERO | {1.0} if "c" not in axes else values for values, axes in zip(tensors, p.tensors, strict=True)]
    constants: dict[str, Values] = {}
    for i, axes in enumerate(p.constants):
        own = op.weights[f"c{i}"]
        constants[f"c{i}"] = frozenset({fill} if "c" in axes else np.unique(own)[: MOST_VALUES + 1].tolist())
    sets = [values for values in (*flat, *constants.values()) if values is not None]
    if len(sets) < len(flat) + len(constants) or math.prod(map(len, sets)) > MOST_VALUES:
        return frozenset({float("nan")})
    one = replace(p, n=1, c=1, h=1, w=1)
    for values in product(*sets):
        numbers: list[np.ndarray] = [np.full((1, 1, 1, 1), v, np.float32) for v in values]
        xs, cs = numbers[: len(flat)], dict(zip(constants, numbers[len(flat) :], strict=True))
        with np.errstate(all="ignore"):
            found.add(float(one.reference(*xs, **cs).reshape(-1)[0]))
    factors = any("c" not in axes for axes in p.tensors)  # the factors are unknown: only zero keeps its value
    return frozenset(found) if not factors or found == {0.0} else frozenset({float("nan")})


def _depthwise(op: Op[ConvProblem], slots: tuple[int, ...], size: int) -> Op[ConvProblem]:
    weights = {name: drafts.spread(a, slots, size) for name, a in op.weights.items()}
    return replace(op, problem=replace(op.problem, c=size, k=size, groups=size), weights=weights)


def _constant(array: np.ndarray, p: PointwiseProblem, axes: str, slots: tuple[int, ...], size: int, fill: float) -> np.ndarray:
    """Spreads a constant over the padded channels, if it has one value for each channel."""
    return drafts.spread(array.reshape(p.span(axes)), slots, size, 1, fill) if "c" in axes else array


TITLE, GRID, SUMS = "channels on the grid:", "on the grid", "on the grid, sums in convolutions"


def offer(network: Network) -> Network:
    """Returns the network with an option for each connected part in which a slice does not begin at a whole vector."""
    start = drafts.Draft(network, {op.name: i for i, op in enumerate(network.ops)})
    return drafts.offer(network, {GRID: on_grid(start), SUMS: on_grid(summed(start))}, TITLE)
