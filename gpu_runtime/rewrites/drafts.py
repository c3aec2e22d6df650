"""Offers other forms of a network part by part: connected differences of a form are one option of a group.

A form computes the network's outputs in another way; tensors with equal names hold equal values in both. Two changes of a form
are connected if both read or make a tensor that only one of the two networks has.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from cuda_kernels import sparse24
from gpu_runtime.network import APART, Literal, Network, Op, Options, computes
from tactics.planner.grouping import Together, grouped
from tactics.problems.epilogue import VECTORS
from tactics.problems.gather import GatherProblem
from tactics.problems.problem import ConcatProblem, ConvProblem, MoveProblem
from tactics.problems.protocol import Feature, Problem, Shape4

ROWS, COLUMNS = ("w", *VECTORS), ("w", "scale", "shift")  # weights with an axis of output channels; of input channels


@dataclass(frozen=True, slots=True)
class Placed:
    """A tensor's place among other channels: its channel i is channel `index[i]` of `source`, which has `channels`."""

    source: str
    index: tuple[int, ...]
    channels: int

    @property
    def first(self) -> int | None:
        """The channel of `source` at which the tensor begins, if its channels are contiguous in the source; else None."""
        start = self.index[0]
        return start if self.index == tuple(range(start, start + len(self.index))) else None

    def of(self, shape: Shape4) -> Problem:
        """Returns the problem that extracts the tensor, of this shape, from the source: a contiguous part, or a gather."""
        n, c, h, w = shape
        if self.first is not None:
            return MoveProblem(n, self.channels, h, w, "window", (c, h, w), (self.first, 0, 0))
        return GatherProblem((n, self.channels, h, w), index=((), self.index, (), ()))

    def padded(self, shape: Shape4) -> Problem:
        """Returns the problem that makes the source from the tensor, of this shape, with zeros in all other channels."""
        n, c, h, w = shape
        if self.first is not None:
            return MoveProblem(n, c, h, w, "window", (self.channels, h, w), (-self.first, 0, 0))
        table = np.full(self.channels, -1)
        table[list(self.index)] = np.arange(c)
        return GatherProblem(shape, index=((), tuple(table.tolist()), (), ()))


@dataclass(frozen=True, slots=True)
class Draft:
    """A form of a network. `at`: name of an op -> the position, in the original network, of the op that it replaces."""

    network: Network
    at: Mapping[str, int]


# ---- convolutions over other channels


def is_dense(network: Network, op: Op[Problem] | None) -> bool:
    """Whether an op is a convolution whose rows and columns may be spread over more channels."""
    if not computes(op, ConvProblem) or not op.layer or op.problem.groups > 1 or has_own_type(network, op):
        return False
    return not op.problem.needs & {Feature.DEPTH_TO_SPACE, Feature.GATED_INPUT} and set(op.weights) <= {*ROWS, *COLUMNS}


def has_own_type(network: Network, op: Op[Problem]) -> bool:
    """Whether a tensor of the op is not HALF, which a replacement of it would be."""
    return any(t in network.types for t in (*op.inputs, op.output))


def spread(array: np.ndarray, index: Sequence[int], count: int, axis: int = 0, fill: float = 0.0) -> np.ndarray:
    """Spreads an array to `count` entries along an axis: entry i goes to `index[i]`, the others are `fill`."""
    shape = (*array.shape[:axis], count, *array.shape[axis + 1 :])
    wide = np.full(shape, fill, np.float32)
    wide[(slice(None),) * axis + (list(index),)] = array
    return wide


def with_rows(op: Op[ConvProblem], index: Sequence[int], count: int) -> Op[ConvProblem]:
    """Returns the convolution with `count` output channels: its own at `index`, rows of zeros elsewhere."""
    rows = {name: spread(a, index, count) for name, a in op.weights.items() if name in ROWS}
    return replace(op, problem=replace(op.problem, k=count), weights={**op.weights, **rows})


def with_columns(op: Op[ConvProblem], index: Sequence[int], count: int) -> Op[ConvProblem]:
    """Returns the convolution over `count` input channels, its own at `index`; the others have weights of zeros."""
    columns = {name: spread(a, index, count, int(name == "w")) for name, a in op.weights.items() if name in COLUMNS}
    fits = op.problem.sparse24 and count % 4 == 0 and sparse24.is_sparse(columns["w"])
    return replace(op, problem=replace(op.problem, c=count, sparse24=fits), weights={**op.weights, **columns})


def of_zeros(p: ConvProblem, residual: np.ndarray | None = None) -> np.ndarray:
    """Returns the output of rows of zeros, [1,n,1,1], for n values of a residual, or [1,1,1,1] without a residual."""
    none = np.zeros(1 if residual is None else residual.size, np.float32)
    added = None if residual is None else residual.reshape(1, -1, 1, 1)
    vectors = {name: none for name in p.epilogue.vectors if name not in ("b", "slope")}
    return p.epilogue.finish(none.reshape(1, -1, 1, 1), None, added, none, **vectors)


# ---- forms


def completed(network: Network, ops: Iterable[tuple[int, Op[Problem]]], missing: Mapping[str, tuple[str, Problem]]) -> Draft:
    """Returns the form with these (position, op) pairs, and with a copy for each tensor that is read but not made.

    `missing`: such a tensor -> (its source, the problem that makes it from the source).
    """
    made = list(ops)
    given = {t.name for t in network.inputs} | {op.output for _, op in made}
    read = dict.fromkeys([t for _, op in made for t in op.inputs] + [t.name for t in network.outputs])
    copies: dict[str, list[Op[Problem]]] = {}
    for t in read:
        if t not in given:
            source, problem = missing[t]
            when = _when([op for _, op in made if op.output == source])
            copies.setdefault(source, []).append(Op(f"{t} of {source}", problem, (source,), t, when=when))
    last = {op.output: i for i, (_, op) in enumerate(made)}
    placed = [(-1, copy) for t in network.inputs for copy in copies.get(t.name, ())]
    for i, (at, op) in enumerate(made):
        placed.append((at, op))
        if last[op.output] == i:
            placed += [(at, copy) for copy in copies.get(op.output, ())]
    tensors = {**network.tensors, **{op.output: op.problem.out_shape for _, op in placed}}
    form = replace(network, ops=tuple(op for _, op in placed), tensors=tensors).pruned()
    return Draft(form, {op.name: max(at, 0) for at, op in placed})


def _when(givers: Sequence[Op[Problem]]) -> tuple[Literal, ...]:
    """Returns the options under which one of the ops exists, of the groups on which all of them depend."""
    common = set.intersection(*({group for group, _ in op.when} for op in givers)) if givers else set()
    return tuple(dict.fromkeys(pair for op in givers for pair in op.when if pair[0] in common))


def offer(network: Network, forms: Mapping[str, Draft], title: str, *, convolutions: bool = False) -> Network:
    """Returns the network with the changes of each form as options.

    `title`: the beginning of the groups' names, before a tensor's name. `convolutions`: offers only changes of layers with
    weights.
    """
    options, changes, named = Options(network), _Changes(network, forms), {op.name for op in network.ops}
    for ops in changes.components():
        worth = [o for o in forms if any(op.name in changes.gone[o] and (op.layer or not convolutions) for op in ops)]
        made = {option: [op for op in changes.new[option] if changes.root(op) == changes.root(ops[0])] for option in worth}
        asked, group = _distinct(made), f"{title} {ops[0].output}"
        if not asked:
            continue
        options.group(group, APART, *asked)
        for op in ops:
            options.limit(op, group, APART, *(option for option in asked if op.name not in changes.gone[option]))
        for at, made_there in _by_position(asked, made, forms).items():
            for op, used in made_there:
                when = (*op.when, *((group, option) for option in used))
                name = f"{op.name} ({used[0]})" if op.name in named else op.name
                named.add(name)
                options.behind(network.ops[at], replace(op, name=name, when=when))
    return options.network()


def _by_position(
    asked: Sequence[str], made: Mapping[str, Sequence[Op[Problem]]], forms: Mapping[str, Draft]
) -> dict[int, list[tuple[Op[Problem], list[str]]]]:
    """Returns position -> (new op, its options) of all new ops there, producers before readers."""
    found: dict[int, dict[tuple, tuple[Op[Problem], list[str]]]] = {}
    for option in asked:
        for op in made[option]:
            found.setdefault(forms[option].at[op.name], {}).setdefault(_key(op), (op, []))[1].append(option)
    ordered: dict[int, list[tuple[Op[Problem], list[str]]]] = {}
    for at, ops in found.items():
        left, ordered[at] = list(ops.values()), []
        while left:
            given = {op.output for op, _ in left}
            first = next(i for i, (op, _) in enumerate(left) if not given & set(op.inputs))
            ordered[at].append(left.pop(first))
    return ordered


def _distinct(made: Mapping[str, Sequence[Op[Problem]]]) -> list[str]:
    """Returns the names of the options; of options with equal ops only the first."""
    found: dict[frozenset, str] = {}
    for option, ops in made.items():
        found.setdefault(frozenset(map(_key, ops)), option)
    return list(found.values())


def _key(op: Op[Problem]) -> tuple:
    """Returns a key of the op, equal for ops that compute the same."""
    weights = tuple((name, a.tobytes()) for name, a in op.weights.items())
    return op.name, op.inputs, op.output, op.problem, op.nodes, op.when, weights


class _Changes:
    """The differences of the forms. `gone`: option -> names of the network's ops that its form lacks; `new`: option -> the ops
    that only its form has.
    """

    def __init__(self, network: Network, forms: Mapping[str, Draft]) -> None:
        self.network = network
        self.gone: dict[str, set[str]] = {}
        self.new: dict[str, list[Op[Problem]]] = {}
        self._together: Together[int] = Together()
        own = {id(op) for op in network.ops}
        for option, form in forms.items():
            kept = {id(op) for op in form.network.ops}
            self.gone[option] = {op.name for op in network.ops if id(op) not in kept}
            self.new[option] = [op for op in form.network.ops if id(op) not in own]
            self._join(form.network, [op for op in network.ops if id(op) not in kept], self.new[option])

    def root(self, op: Op[Problem]) -> int:
        return self._together.root(id(op))

    def components(self) -> Iterator[list[Op[Problem]]]:
        """Yields the connected sets of the network's changed ops, in order."""
        changed = (op for op in self.network.ops if any(op.name in gone for gone in self.gone.values()))
        return iter(grouped((self.root(op), op) for op in changed).values())

    def _join(self, form: Network, gone: Sequence[Op[Problem]], new: Sequence[Op[Problem]]) -> None:
        givers: dict[str, Op[Problem]] = {}
        for op in (*gone, *new):
            self._together.unite(id(givers.setdefault(op.output, op)), id(op))
        for ops, other in ((gone, form), (new, self.network)):
            known = {t.name for t in other.inputs} | {op.output for op in other.ops}
            for op in ops:
                for t in op.inputs:
                    if t not in known:
                        self._together.unite(id(givers[t]), id(op))


def is_joined(op: Op[Problem]) -> bool:
    """Whether an op is a Concat of channels."""
    return computes(op, ConcatProblem) and op.problem.axis == 1
