"""Offers convolutions of quantised tensors on their whole numbers; FP16, or whole numbers, is a choice of the plan.

A quantised tensor q holds whole numbers of 8 bits, x = (q - zero) * scale. FP16 holds them exactly, so q may be stored as FP16
or as bytes (`mark`), and both have the same values. A convolution that reads x, with weights w = v * s of whole numbers v and a
scale s for each output channel, equals

    sum(w x) + b = sum(v q) * multipliers + b - zero * sum(v) * multipliers,    multipliers = s * scale

of which tensor cores compute the sum of v q exactly, in INT8 or in FP16, and the rest is the bias. Outside of the image x is 0
and q the zero point. A residual that is quantised enters in the same way.

Example: x = 0.5 q, and a channel's weights are (0.2, -0.1, 0), which are (2, -1, 0) times 0.1: its multiplier is 0.05.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import numpy as np

from gpu_runtime.network import APART, Network, Op, Options, Type, computes, joined, unique
from tactics.kernels import KERNELS
from tactics.problems.convolution import with_epilogue
from tactics.problems.gather import ViewProblem
from tactics.problems.intervals import ANY, Interval
from tactics.problems.pointwise_ops import MAX_STAGES, NONE, ROUNDING, Activation, Stage
from tactics.problems.problem import (
    ConcatProblem,
    ConvProblem,
    ConvTransposeProblem,
    MoveProblem,
    PointwiseProblem,
    PoolProblem,
)
from tactics.problems.prologue import Prologue
from tactics.problems.protocol import Feature, Problem

INTEGERS = "integers"
RANGES = {"int8": Interval(-128.0, 127.0), "uint8": Interval(0.0, 255.0)}
ROUNDED = 2.0**-12  # largest distance from a whole number: FP32 and folded scales leave 2**-15 of 127 steps
Numbers = Mapping[str, Interval | None]  # tensor -> the interval of its values if all are whole numbers


# ---- tensors


def mark(network: Network) -> Network:
    """Returns the network with the type `whole` for each FP16 tensor that holds only whole numbers of 8 bits."""
    types = dict(network.types)
    for t, v in _numbers(network).items():
        if v is not None and (name := _of_bytes(v)) and t not in types:
            types[t] = Type(whole=name)
    return network if len(types) == len(network.types) else replace(network, types=types)


def _numbers(network: Network) -> Numbers:
    found: dict[str, Interval | None] = {}
    for op in network.ops:
        v = _results(op, found)
        other = found.get(op.output, v)  # of another op that makes the tensor
        found[op.output] = v.hull(other) if v is not None and other is not None else None
    return found


def _results(op: Op[Any], found: Numbers) -> Interval | None:
    """Returns the interval of the op's results if they are whole numbers; else None. `found`: of the tensors before."""
    p = op.problem
    if not isinstance(p, (ViewProblem, MoveProblem, ConcatProblem)) and not (isinstance(p, PoolProblem) and p.kind == "max"):
        end = ending(p)
        return Stage(end.name, params=end.params).interval(ANY) if end.name in ROUNDING else None
    ins = [found.get(t) for t in op.inputs]
    if isinstance(p, MoveProblem) and p.kind == "window":
        ins.append(Interval(p.fill, p.fill) if p.fill == round(p.fill) else None)
    known = [v for v in ins if v is not None]
    return reduce(Interval.hull, known) if known and len(known) == len(ins) else None


def ending(p: Problem) -> Activation:
    """Returns the activation that makes a problem's results, of a composite its last part's; NONE where something else does."""
    p = p.parts[-1]
    if isinstance(p, PointwiseProblem):
        end = p.stages[-1] if p.stages else None
        return Activation(end.op, end.params) if end is not None and end.op in ROUNDING else NONE
    if not isinstance(p, (ConvProblem, ConvTransposeProblem)):
        return NONE
    end_of = p.epilogue
    behind = end_of.affine or (end_of.residual and end_of.act_first)
    return end_of.last if end_of.last != NONE or behind else end_of.act


# ---- weights


@dataclass(frozen=True, slots=True)
class Whole:
    """Weights [k,c,r,s] as whole numbers of 8 bits, FP32, and the scale [k] of each output channel, FP64."""

    numbers: np.ndarray
    scales: np.ndarray


def whole(w: np.ndarray) -> Whole | None:
    """Returns weights as whole numbers and scales; None if a channel's are no multiples of a scale, -128 to 127 times it.

    The scale of a channel is its largest magnitude divided by 127, or else the whole tensor's, as quantisers choose it, or else
    by the first other number for which all weights are whole.
    """
    rows = np.asarray(w, np.float64).reshape(len(w), -1)
    largest = np.abs(rows).max(axis=1)
    scales = np.ones(len(rows))
    left = np.flatnonzero(largest)
    for divided in (largest / 127, np.full_like(largest, largest.max() / 127), *(largest / n for n in range(128, 0, -1))):
        if not left.size:
            break
        fits = _multiples(rows[left], divided[left])
        scales[left[fits]] = divided[left[fits]]
        left = left[~fits]
    if left.size:
        return None
    return Whole(np.rint(rows / scales[:, None]).reshape(w.shape).astype(np.float32), scales)


def _multiples(rows: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Returns, for each row, whether it has only multiples of its scale, -128 to 127 times it."""
    v = rows / scales[:, None]
    return (np.abs(v - np.rint(v)).max(axis=1) <= ROUNDED) & (v.min(axis=1) > -128.5) & (v.max(axis=1) < 127.5)


# ---- convolutions


@dataclass(frozen=True, slots=True)
class Source:
    """The op that makes x = (q - zero) * scale of whole numbers q, both FP16 tensors."""

    op: Op[PointwiseProblem]
    scale: float
    zero: float


def offer(network: Network) -> Network:
    """Returns the network with the alternatives added.

    Each layer is a decision. So is each x that several layers may read or not: it is made, or no op reads it.
    """
    options, sources = Options(network), _sources(network)
    twins = {id(op): twin for op in network.ops if (twin := _twin(network, op, sources)) is not None}
    layers = dict.fromkeys(op.layer for op in network.ops if id(op) in twins)
    for layer in layers:
        options.group(group_of(layer), APART, INTEGERS)
    for op in network.ops:
        if id(op) in twins:
            options.limit(op, group_of(op.layer), APART)
            twin = twins[id(op)]
            options.behind(op, replace(twin, when=(*twin.when, (group_of(op.layer), INTEGERS))))
    for x, source in sources.items():
        readers = network.readers[x]
        deciding = {op.layer for op in readers if id(op) in twins}
        if x in network.output_names or not deciding:
            continue
        if len(deciding) == 1 and all(id(op) in twins for op in readers):
            options.limit(source.op, group_of(min(deciding)), APART)
        else:
            options.group(f"{x} in FP16", APART, INTEGERS)
            options.limit(source.op, f"{x} in FP16", APART)
    return options.network()


def summed(network: Network) -> Network:
    """Returns the network in which chains of elementwise stages read whole numbers q in place of x = (q - zero) * scale.

    Where a stage adds x, the value before it is divided by the scale first, and the sum multiplied by it:
    v + (q - zero) * scale = (v / scale + q - zero) * scale.
    """
    sources = _sources(network)
    made: list[Op[Any]] = []
    for op in network.ops:
        if computes(op, PointwiseProblem) and not any(map(network.is_fp32, (*op.inputs, op.output))):
            made.append(_on_whole(op, sources))
        else:
            made.append(op)
    return (
        replace(network, ops=tuple(made)).pruned()
        if any(a is not b for a, b in zip(made, network.ops, strict=True))
        else network
    )


def _on_whole(op: Op[PointwiseProblem], sources: Mapping[str, Source]) -> Op[PointwiseProblem]:
    """Returns the chain that reads whole numbers; unchanged if it has one input, or the stages would be too many."""
    p, stages, inputs, nodes = op.problem, list(op.problem.stages), list(op.inputs), [*op.nodes]
    if len(op.inputs) < 2 or p.tensors != ("nchw",) * len(p.tensors):
        return op
    for i, t in enumerate(op.inputs):
        used = [at for at, s in enumerate(stages) if s.operand == f"t{i}"]
        if t not in sources or (used and (i == 0 or len(used) > 1 or stages[used[0]].op != "add")):
            continue
        scale, at = sources[t].scale, used[0] if used else 0
        made = sources[t].op.problem.stages  # an Add of the negative zero point, if there is one, and a Mul
        stages[at : at + 1] = [Stage("mul", params=(1 / scale,)), stages[at], *made] if used else [*made, stages[0]]
        inputs[i], nodes = sources[t].op.inputs[0], [*sources[t].op.nodes, *nodes]
    stages = _joined(stages)
    if inputs == list(op.inputs) or len(stages) > MAX_STAGES:
        return op
    return replace(op, inputs=tuple(inputs), problem=replace(p, stages=tuple(stages)), nodes=unique(nodes))


def _joined(stages: list[Stage]) -> list[Stage]:
    """Returns the stages with products by scalars in a row as one."""
    found: list[Stage] = []
    for stage in stages:
        if found and (found[-1].op, stage.op) == ("mul", "mul") and not found[-1].operand and not stage.operand:
            found[-1] = Stage("mul", params=(found[-1].params[0] * stage.params[0],))
        else:
            found.append(stage)
    return found


def group_of(layer: str) -> str:
    """Returns the decision between a layer in FP16 and on whole numbers."""
    return f"{layer} in {INTEGERS}"


def _sources(network: Network) -> dict[str, Source]:
    """Returns x -> its source, for each x = (q - zero) * scale of whole numbers and a positive scale; a zero point other than 0
    is one of the numbers that q's bytes can hold.
    """
    numbers, found = _numbers(network), {}
    for op in network.ops:
        if not computes(op, PointwiseProblem) or op.problem.constants or op.problem.tensors != ("nchw",):
            continue
        stages = op.problem.stages
        if [s.op for s in stages] not in (["mul"], ["add", "mul"]) or any(s.operand for s in stages):
            continue
        *shift, (scale,) = (s.params for s in stages)
        v, zero = numbers.get(op.inputs[0]), -shift[0][0] if shift else 0.0
        if v is None or scale <= 0 or network.is_fp32(op.output):
            continue
        if not zero or (zero == round(zero) and _of_bytes(v.hull(Interval(zero, zero)))):
            found[op.output] = Source(op, scale, zero)
    return found


def _of_bytes(v: Interval) -> str:
    """Returns the type of 8 bits that has all whole numbers of an interval; "" if none has."""
    return next((name for name, r in RANGES.items() if r.low <= v.low and v.high <= r.high), "")


def offered(network: Network) -> list[Op[Any]]:
    """Returns the convolutions on whole numbers."""
    return [op for op in network.ops if Feature.MULTIPLIED in op.problem.needs]


def reason_against(network: Network, op: Op[Any]) -> str:
    """Why a layer is in FP16 and not in INT8. `network`: marked."""
    p, twins = op.problem, [twin for twin in offered(network) if twin.layer == op.layer]
    if twins and not network.type(twins[0].inputs[0]).whole:
        return "its input has a zero point, so that its numbers have 9 bits"
    if twins:
        return "no INT8 kernel stores FP32" if network.is_fp32(twins[0].output) else "the plan is faster with it in FP16"
    if not isinstance(p, (ConvProblem, ConvTransposeProblem)):
        return "one launch computes several layers"
    if isinstance(p, ConvTransposeProblem):
        return "no INT8 kernel transposes a convolution"
    if p.groups > 1:
        return "no INT8 kernel has groups"
    if op.inputs[0] not in _sources(network):
        return "its input is not quantised"
    if whole(op.weights["w"]) is None:
        return "its weights are not whole numbers of 8 bits"
    return "no INT8 kernel has its fused steps"


def _twin(network: Network, op: Op[Any], sources: Mapping[str, Source]) -> Op[ConvProblem] | None:
    """Returns the convolution on whole numbers that makes the op's output; None if it needs a step that kernels lack."""
    p = op.problem
    if not computes(op, ConvProblem) or not op.layer or op.inputs[0] not in sources or any(map(network.is_fp32, op.inputs)):
        return None
    plain = p.groups == 1 and p.prologue == Prologue() and p.epilogue.up == 1 and not p.epilogue.multiplied
    if not plain or not p.needs <= KERNELS["conv_dense"].supports:
        return None
    of = whole(op.weights["w"])
    if of is None:
        return None
    x, added = sources[op.inputs[0]], sources.get(op.inputs[1]) if p.epilogue.residual else None
    multipliers = of.scales * x.scale
    b = op.weights.get("b", np.zeros(p.k)) - of.numbers.sum(axis=(1, 2, 3), dtype=np.float64) * multipliers * x.zero
    if added is not None:
        b -= added.zero * added.scale
    weights = {**op.weights, "w": of.numbers, "multipliers": multipliers.astype(np.float32), "b": b.astype(np.float32)}
    if added is not None:
        weights["residual_multipliers"] = np.full(p.k, added.scale, np.float32)
    inputs = (x.op.inputs[0], *((added.op.inputs[0],) if added is not None else op.inputs[1:]))
    problem = with_epilogue(p, multiplied=True, residual_multiplied=added is not None)
    if any(p.pad):
        problem = replace(problem, prologue=Prologue(border=x.zero))
    return joined(x.op, op, name=f"{op.name} in {INTEGERS}", problem=problem, inputs=inputs, weights=weights, when=op.when)
