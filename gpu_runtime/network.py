"""The network to compute, with every alternative: ops between named tensors of shape NCHW. All stages between ONNX and the plan
take a `Network` and return one; none of them changes it in place.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Generic, TypeGuard, TypeVar

import numpy as np

from gpu_runtime.text import shortened
from tactics.format import Format, representative
from tactics.planner.grouping import grouped
from tactics.problems.convolution import ConvProblem, ConvTransposeProblem
from tactics.problems.pointwise_ops import Stage
from tactics.problems.problem import PointwiseProblem
from tactics.problems.protocol import Feature, Problem, Shape4

FP32 = Format("fp32", "chw")
FP16_MAX = 65504.0
FP16_NORMAL = 2.0**-14  # the least magnitude with all bits
FP16_OVERFLOW = 65520.0  # the least magnitude that rounds to infinity
P_co = TypeVar("P_co", bound=Problem, covariant=True)
Q = TypeVar("Q", bound=Problem)
H = TypeVar("H", bound=Hashable)
Literal = tuple[str, str]  # a group and one of its options
Group = tuple[str, tuple[str, ...]]  # a decision and its options
APART, ONE = "apart", "one"  # options: the model's own ops; one op in place of several


@dataclass(frozen=True, slots=True)
class Type:
    """The type in which a tensor is written.

    `copies`: the tensor is FP32, but ops that are not `exact` may read an FP16 copy of it; `layout`: the required layout; "":
    FP16 tensors have the choice, and others are linear. `whole`: "int8" or "uint8" where an FP16 tensor has only such whole
    numbers, so that it may be stored as them; else "".
    """

    dtype: str = "fp16"
    copies: bool = False
    layout: str = ""
    whole: str = ""

    @property
    def fixed(self) -> bool:
        """Whether the type allows only one format."""
        return bool(self.layout) or not (self.copies or self.dtype == "fp16")


HALF, SINGLE, WIDE = Type(), Type("fp32"), Type("fp32", copies=True)


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A network input or output. `shape` is ONNX's, `dtype` "fp32", "fp16", "uint8" (of inputs) or one of EXACT as declared;
    `shape4` the same elements, NCHW."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    shape4: Shape4


@dataclass(frozen=True, slots=True)
class Op(Generic[P_co]):
    """One problem between named tensors.

    `inputs`: conv (x,) or (x, residual), else in the problem's order. `weights`, FP32 as in the model: conv "w" [K,C/g,R,S],
    which tensor cores read rounded to FP16 (precision.ranges changes weights that FP16 cannot hold), "b" [K] if there is a
    bias; pointwise "c0", "c1", ...; prelu "slope" [K]. `nodes`: the ONNX nodes that it computes. `when`: (group, option) pairs;
    the op exists if each group named here has one of its options named here (see `exists`).

    `layer`: the Conv or Gemm node that owns the weights, the same in every alternative; `layers`: several nodes, if siblings
    are merged, or, with `branches`, parallel branches that were added (then also of a single one that absorbed its own input).
    `batch_pieces`: the op runs once for each of these numbers of images, and `problem` has the first and largest number
    (planning.batch_pieces); `images`: (first image, number of images) of one of those runs. `exact`: it reads its inputs as
    they are written, no copies; then all ops with the same output do.
    """

    name: str
    problem: P_co
    inputs: tuple[str, ...]
    output: str
    weights: Mapping[str, np.ndarray] = field(default_factory=dict)
    nodes: tuple[str, ...] = ()
    when: tuple[Literal, ...] = ()
    layer: str = ""
    layers: tuple[str, ...] = ()
    branches: bool = False
    batch_pieces: tuple[int, ...] = ()
    images: tuple[int, int] | None = None
    exact: bool = False

    @property
    def layer_weights(self) -> list[np.ndarray]:
        """The weights [K,C/g,R,S] of each of its layers, in execution order."""
        return [self.weights[name] for name in ("w", "w2", "w22") if name in self.weights]


def joined(*ops: Op[Problem], **changes: Any) -> Op[Any]:
    """Makes one op of all these ops: the last one with `changes`, and with the names and nodes of all."""
    name = " + ".join(op.name for op in ops)
    return replace(ops[-1], **{"name": name, "nodes": unique(n for op in ops for n in op.nodes), **changes})


def computes(op: Op[Problem] | None, kind: type[Q]) -> TypeGuard[Op[Q]]:
    """Whether the op is not None, and its problem is of that kind."""
    return op is not None and isinstance(op.problem, kind)


def adds_tensors(op: Op[Problem] | None, *, first: bool = False) -> bool:
    """Whether an op only adds two tensors of its output's shape; with `first`, stages without another operand may follow."""
    if not computes(op, PointwiseProblem) or (op.problem.tensors, op.problem.constants) != (("nchw", "nchw"), ()):
        return False
    return (op.problem.stages[:1] if first else op.problem.stages) == (Stage("add", "t1"),)


@dataclass(frozen=True)
class Network:
    """All ops with all alternatives, topologically ordered. `tensors`: the NCHW shape of every tensor of an op.

    `groups`: fusion decisions (name, options), of which exactly one option each is chosen. `types`: the tensors that are not
    HALF: integers and truth values; SINGLE if FP16 cannot hold the values; WIDE if FP16's rounding would ruin later results;
    and FP16 in one required layout. `onnx_names`: name in `Op.nodes` -> name in the file, where the two differ.
    """

    name: str
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    tensors: Mapping[str, Shape4]
    ops: tuple[Op[Problem], ...]
    groups: tuple[Group, ...] = ()
    types: Mapping[str, Type] = field(default_factory=dict)
    onnx_names: Mapping[str, str] = field(default_factory=dict)

    @property
    def images(self) -> int:
        """The batch: the first input's number of images."""
        return self.inputs[0].shape4[0] if self.inputs else 1

    @cached_property
    def readers(self) -> Mapping[str, tuple[Op[Problem], ...]]:
        """Tensor -> the ops that read it, each once, in the network's order; () for a tensor without readers."""
        found = grouped((t, op) for op in self.ops for t in dict.fromkeys(op.inputs))
        return dict.fromkeys(self.tensors, ()) | {t: tuple(ops) for t, ops in found.items()}

    @cached_property
    def producers(self) -> Mapping[str, tuple[Op[Problem], ...]]:
        """Tensor -> the ops that make it, of which each plan has one; () for network inputs."""
        found = grouped((op.output, op) for op in self.ops)
        return dict.fromkeys(self.tensors, ()) | {t: tuple(ops) for t, ops in found.items()}

    @cached_property
    def place(self) -> Mapping[str, int]:
        """Tensor -> the position of its last producer in the network's order. Network inputs have none."""
        return {op.output: i for i, op in enumerate(self.ops)}

    @cached_property
    def output_names(self) -> frozenset[str]:
        return frozenset(t.name for t in self.outputs)

    @cached_property
    def exact_outputs(self) -> frozenset[str]:
        """The outputs of the ops that read their inputs as they are written."""
        return frozenset(op.output for op in self.ops if op.exact)

    def with_exact(self, outputs: Collection[str]) -> Network:
        """Returns the network in which all ops that make these tensors read their inputs as they are written."""
        return replace(self, ops=tuple(replace(op, exact=True) if op.output in outputs else op for op in self.ops))

    def only_reader(self, tensor: str) -> Op[Problem] | None:
        """Returns the only op that reads a tensor, if the tensor is no network output; else None."""
        readers = self.readers[tensor]
        return readers[0] if len(readers) == 1 and tensor not in self.output_names else None

    def producer(self, tensor: str) -> Op[Problem] | None:
        """Returns the op that makes a tensor in every plan; None for network inputs, and where the op depends on the plan."""
        made = self.producers.get(tensor, ())
        return made[0] if len(made) == 1 and not made[0].when else None

    def alone(self, tensor: str) -> Op[Any] | None:
        """Returns the op that makes a tensor in every plan, if the tensor is FP16, has only one reader and is no network
        output; else None.
        """
        maker = self.producer(tensor)
        return maker if maker is not None and self.only_reader(tensor) is not None and not self.is_fp32(tensor) else None

    def row(self, last: Op[Problem], *kinds: type[Problem]) -> tuple[Op[Any], ...]:
        """Returns a row of ops of these kinds that ends with `last`: each exists in every plan, and its first input is the
        output of the op before, which has no other reader. () if there is no such row.
        """
        found: list[Op[Problem]] = []
        op: Op[Problem] | None = last
        for kind in reversed(kinds):
            if not computes(op, kind) or op.when:
                return ()
            found.insert(0, op)
            op = self.alone(op.inputs[0])
        return tuple(found)

    def takers(self, tensor: str, takes: Callable[[Op[Problem]], bool]) -> tuple[Op[Any], ...]:
        """Returns all readers of a tensor if each of them `takes` another tensor in its place; else ()."""
        readers = self.readers[tensor]
        return readers if tensor not in self.output_names and all(map(takes, readers)) else ()

    def pruned(self) -> Network:
        """Returns the network without ops whose outputs have no readers, and without tensors of no op."""
        kept, read = [], set(self.output_names)
        for op in reversed(self.ops):
            if op.output in read:
                kept.append(op)
                read.update(op.inputs)
        used = {t.name for t in self.inputs} | read | {op.output for op in kept}
        tensors = {t: shape for t, shape in self.tensors.items() if t in used}
        return replace(self, ops=tuple(reversed(kept)), tensors=tensors)

    def type(self, tensor: str) -> Type:
        return self.types.get(tensor, HALF)

    def formats(self, tensor: str) -> tuple[Format, ...]:
        """Returns the formats that a tensor may have inside the network, one name for each memory layout."""
        of = self.type(tensor)
        if of.fixed:
            return (Format(of.dtype, of.layout or "chw"),)
        shape = self.tensors[tensor]
        return (*((FP32,) if of.copies else ()), *representative(shape), *(representative(shape, of.whole) if of.whole else ()))

    def is_fp32(self, tensor: str) -> bool:
        """Whether the tensor is written in FP32, since FP16 cannot hold its values or would round them too much."""
        return self.type(tensor).dtype == "fp32"

    def dtypes(self, op: Op[Problem]) -> tuple[str, ...]:
        """Returns the types of the op's inputs, then of its output: "fp32" where a tensor must be FP32, "int8" or "uint8" where
        it may be that or FP16, else "fp16"; () if all are "fp16".
        """
        found = (fmts[-1].dtype for fmts in self.formats_in(op))
        whole = (self.type(t).whole for t in (*op.inputs, op.output))
        types = tuple(w or (d if d == "fp32" else "fp16") for w, d in zip(whole, found, strict=True))
        return types if {*types} != {"fp16"} else ()

    def is_straight(self, op: Op[Problem]) -> bool:
        """Whether the op makes an FP32 tensor from FP16 inputs, with weights that FP16 holds.

        Then kernels for FP16 tensors can run it, which store their FP32 sums unchanged. For values beyond FP16 only
        convolutions' kernels do so.
        """
        if "fp32" in self.dtypes(op)[:-1] or not self.is_fp32(op.output):
            return False
        return self.type(op.output).copies or (
            isinstance(op.problem, (ConvProblem, ConvTransposeProblem)) and float(np.abs(op.weights["w"]).max()) < FP16_OVERFLOW
        )

    def formats_in(self, op: Op[Problem]) -> tuple[tuple[Format, ...], ...]:
        """Returns the formats that each input of the op, then its output, may have in this op."""
        *ins, out = (self.type(t).copies for t in (*op.inputs, op.output))
        added = Feature.RESIDUAL in op.problem.needs and out  # the sum must be exact
        must = [*(copies and (op.exact or (added and i == 1)) for i, copies in enumerate(ins)), out]
        return tuple((FP32,) if m else self.formats(t) for m, t in zip(must, (*op.inputs, op.output), strict=True))


def touched(inputs: Iterable[TensorInfo], ops: Iterable[Op[Problem]]) -> dict[str, Shape4]:
    """Returns tensor -> NCHW shape: the inputs, then all tensors that the ops read and write, in their order."""
    found = {t.name: t.shape4 for t in inputs}
    for op in ops:
        found.update(zip((*op.inputs, op.output), op.problem.all_shapes, strict=True))
    return found


def named_shortly(network: Network) -> Network:
    """Returns the network with long names, which fusions and alternatives made of many others, shortened to an engine's
    limit.
    """
    new = {name: short for name in _names(network) if (short := shortened(name)) != name}
    if not new:
        return network

    def of(name: str) -> str:
        return new.get(name, name)

    ops = tuple(
        replace(
            op,
            name=of(op.name),
            inputs=tuple(map(of, op.inputs)),
            output=of(op.output),
            layer=of(op.layer),
            when=tuple((of(group), of(option)) for group, option in op.when),
            layers=tuple(map(of, op.layers)),
        )
        for op in network.ops
    )
    return replace(
        network,
        ops=ops,
        tensors={of(t): shape for t, shape in network.tensors.items()},
        groups=tuple((of(group), tuple(map(of, options))) for group, options in network.groups),
        types={of(t): written for t, written in network.types.items()},
    )


def _names(network: Network) -> set[str]:
    """Returns the names of ops, layers, tensors and groups; a model's own are short (frontend.files.check)."""
    found = set(network.tensors)
    for group, options in network.groups:
        found.update((group, *options))
    for op in network.ops:
        found.update((op.name, op.layer, *op.layers, op.output))
    return found


class Options:
    """Collects other ways to compute parts of a network, each an option of a group; `network()` returns the network with all of
    them.

    Ops that an option lacks are `limit`ed to the other options; its new ops are put `before` or `behind` an op of the network,
    in topological order. All options of a group must compute the same outputs. If options of several groups together leave a
    tensor without its op, no plan has all of them. Ops are distinguished by identity; all ops that make the output of an exact
    op are exact.
    """

    def __init__(self, network: Network) -> None:
        self._of = network
        self._groups = dict(network.groups)
        self.types: dict[str, Type] = {}  # of new tensors
        self._now: dict[int, Op[Problem] | None] = {id(op): op for op in network.ops}
        self._before: dict[int, list[Op[Problem]]] = {}
        self._behind: dict[int, list[Op[Problem]]] = {}

    def group(self, name: str, *options: str) -> None:
        """Adds a decision between these options, or more options to an existing group."""
        self._groups[name] = (*self._groups.get(name, ()), *options)

    def limit(self, op: Op[Problem], group: str, *options: str) -> None:
        """Limits the op to these options of a group."""
        if (now := self._now[id(op)]) is not None:
            self._now[id(op)] = replace(now, when=(*now.when, *((group, option) for option in options)))

    def either(
        self, group: str, gone: Iterable[Op[Problem]], made: Iterable[tuple[Op[Problem], Op[Problem]]], option: str = ONE
    ) -> None:
        """Adds an option to a group: the ops `gone` do not exist in it, the ops `made` do. The first option is added beside
        APART, the model's own ops.

        `made`: (op of the network, new op that is put behind it).
        """
        self.group(group, *((option,) if group in self._groups else (APART, option)))
        for op in gone:
            self.limit(op, group, APART)
        for place, new in made:
            self.behind(place, replace(new, when=(*new.when, (group, option))))

    def twins(
        self, group: str, gone: Iterable[Op[Problem]], made: Sequence[tuple[Op[Problem], Op[Problem]]], ending: str
    ) -> None:
        """Gives each option of an existing group that has an op of `made` a twin, named with the ending. In the twin the new
        ops replace these ops, the ops `gone` do not exist, and all else is the same.

        `made`: (op of the network, new op that replaces it and is put behind it).
        """
        before, names = self._groups[group], {option for op, _ in made for g, option in op.when if g == group}
        twins = {option: f"{option}{ending}" for option in before if option in names}
        self.group(group, *twins.values())
        left = {id(op) for op in gone}
        for op in self._of.ops:
            if id(op) in left:
                self.limit(op, group, *(() if any(g == group for g, _ in op.when) else before))
            else:
                self.limit(op, group, *(twins[option] for g, option in op.when if g == group and option in twins))
        for op, new in made:
            when = tuple((g, twins[option] if g == group else option) for g, option in op.when)
            named = any(g == group for g, _ in when)
            self.behind(op, replace(new, when=when if named else (*when, *((group, twin) for twin in twins.values()))))

    def instead(self, op: Op[Problem], new: Op[Problem]) -> None:
        """Replaces the op by `new`, which makes the same tensor; later calls still name the original op."""
        self._now[id(op)] = new

    def without(self, *ops: Op[Problem]) -> None:
        """Leaves ops out, because other ops make their tensors, or these have no readers."""
        self._now.update((id(op), None) for op in ops)

    def before(self, op: Op[Problem], *new: Op[Problem]) -> None:
        self._before.setdefault(id(op), []).extend(new)

    def behind(self, op: Op[Problem], *new: Op[Problem]) -> None:
        self._behind.setdefault(id(op), []).extend(new)

    def network(self) -> Network:
        """Returns the network with all changes, without ops whose outputs have no readers."""
        ops: list[Op[Problem]] = []
        for op in self._of.ops:
            now = self._now[id(op)]
            ops += [*self._before.get(id(op), ()), *(() if now is None else (now,)), *self._behind.get(id(op), ())]
        if len(ops) == len(self._of.ops) and all(a is b for a, b in zip(ops, self._of.ops, strict=True)):
            return self._of
        tensors = {**{op.output: op.problem.out_shape for op in ops}, **self._of.tensors}
        groups, types = tuple(self._groups.items()), {**self._of.types, **self.types}
        found = replace(self._of, ops=tuple(ops), tensors=tensors, groups=groups, types=types)
        return found.with_exact(self._of.exact_outputs).pruned()


def unique(things: Iterable[H]) -> tuple[H, ...]:
    """Returns each thing once, in order: for example names or literals."""
    return tuple(dict.fromkeys(things))


def group_between(ops: Sequence[Op[Problem]], others: Sequence[Op[Problem]]) -> str:
    """Returns the group that decides whether the ops exist or the others do; "" if there is none."""
    for group in dict.fromkeys(g for g, _ in ops[0].when):
        mine, theirs = ({option for op in some for g, option in op.when if g == group} for some in (ops, others))
        if not mine & theirs and all(any(g == group for g, _ in op.when) for op in (*ops, *others)):
            return group
    return ""
