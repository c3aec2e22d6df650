"""A convolution while its epilogue grows: scales, an activation, depth-to-space, a residual and so on."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import numpy as np

from gpu_runtime.fusion.chains import Chains
from gpu_runtime.lowering.pointwise import Affine, then
from gpu_runtime.network import Network, Op, computes
from tactics.problems.convolution import ConvProblem, ConvTransposeProblem, with_epilogue
from tactics.problems.gather import GatherProblem, ViewProblem
from tactics.problems.pointwise_ops import ACTIVATIONS, NONE, STORED, Activation
from tactics.problems.problem import MoveProblem
from tactics.problems.protocol import Problem


@dataclass(frozen=True, slots=True)
class Conv:
    """A convolution while fusion extends it. `op`: its problem and weights so far; `head`, `tail`: the views and gathers of the
    same ONNX node before and behind it; `output`: the last tensor it makes; `axis`: the axis of nchw along which the channels
    lie there ("": none); `used`: the ops behind it that it has absorbed; `label`: its name.
    """

    op: Op[Any]
    head: tuple[Op[Any], ...]
    tail: tuple[Op[Any], ...]
    output: str
    axis: str
    label: str
    used: tuple[Op[Any], ...] = ()

    @property
    def nodes(self) -> tuple[str, ...]:
        return (*self.op.nodes, *(name for op in self.used for name in op.nodes))

    def ops(self, *when: tuple[str, str]) -> list[Op[Any]]:
        """Returns the convolution between the moves of its node; all of them exist under the options in `when`."""
        row = [*self.head, self.op, *self.tail]
        outputs = [*(f"{self.output} ({self.label} {i})" for i in range(len(row) - 1)), self.output]
        made: list[Op[Any]] = []
        for i, op in enumerate(row):
            kind = type(op.problem).__name__.removesuffix("Problem").lower()
            name = self.label if op is self.op else f"{self.label} ({kind} {i})"
            inputs = (outputs[i - 1], *op.inputs[1:]) if i else op.inputs
            made.append(replace(op, name=name, nodes=self.nodes, inputs=inputs, output=outputs[i], when=when))
        return made


def is_convolution(op: Op[Problem] | None) -> TypeGuard[Op[Any]]:
    """Whether an op is a convolution or product by constant weights."""
    return op is not None and isinstance(op.problem, ConvProblem | ConvTransposeProblem) and bool(op.layer)


def started(network: Network, op: Op[Any]) -> Conv:
    """Returns the convolution with the moves of its node, before anything is fused."""
    tail, head, axis, last, first = list[Op[Any]](), list[Op[Any]](), "c", op, network.producer(op.inputs[0])
    while (move := network.only_reader(last.output)) is not None and _is_own(move, op):
        axis, last = _through(move.problem, axis), move
        tail.append(move)
    while first is not None and _is_own(first, op):
        head.insert(0, first)
        first = network.producer(first.inputs[0])
    return Conv(op, tuple(head), tuple(tail), last.output, axis, op.name)


def _is_own(move: Op[Problem], conv: Op[Problem]) -> bool:
    return isinstance(move.problem, ViewProblem | GatherProblem) and move.nodes == conv.nodes


def _through(move: Problem, axis: str) -> str:
    """Returns the axis of a move's output along which only the elements along `axis` of its input lie; "" if there is none."""
    if not axis:
        return ""
    i = "nchw".index(axis)
    if isinstance(move, GatherProblem):
        return "" if any(move.index) else "nchw"[move.perm.index(i)]
    (shape,), out = move.in_shapes, move.out_shape
    axes = (j for j in range(4) if (out[j], math.prod(out[j + 1 :])) == (shape[i], math.prod(shape[i + 1 :])))
    return next(("nchw"[j] for j in axes), "")


def followed(conv: Conv, used: Sequence[Op[Any]], label: str = "", **changes: Any) -> Conv:
    """Returns the convolution with the ops `used` absorbed, and with these fields of its epilogue changed."""
    op = replace(conv.op, problem=with_epilogue(conv.op.problem, **changes)) if changes else conv.op
    if not used:
        return replace(conv, op=op)
    label = f"{conv.label} + {label or ' + '.join(o.name for o in used)}"
    return replace(conv, op=op, output=used[-1].output, label=label, used=(*conv.used, *used))


def weighted(conv: Conv, **more: np.ndarray) -> Conv:
    """Returns the convolution with these weights added or replaced."""
    return replace(conv, op=replace(conv.op, weights={**conv.op.weights, **more}))


def by_rows(array: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Multiplies each row of weights or bias [K, ...] by its scale, [K] or [1], in FP64."""
    return array.astype(np.float64) * scale.reshape(-1, *(1,) * (array.ndim - 1))


def spread(conv: Conv, v: np.ndarray) -> np.ndarray:
    """Turns values per channel of the output into values per channel of the sums; a single value stays one.

    With depth-to-space by b, b*b channels of the sums make one channel of the output, and each gets its value.
    """
    end = conv.op.problem.epilogue
    if end.d2s == 1 or v.size == 1:
        return v
    return np.tile(v, end.d2s**2) if end.d2s_mode == "dcr" else np.repeat(v, end.d2s**2)


def _scaled(conv: Conv, chains: Chains, shift: np.ndarray) -> tuple[Affine, tuple[Op[Any], ...]]:
    """Returns (scale, shift, each [K] FP64; the ops behind the convolution that scale and shift by constants). The result
    starts from scale 1 and the given shift, [1] or [K].
    """
    rows = conv.op.weights["w"].shape[:1]
    found, used = chains.scales_after(conv.output, conv.axis)
    affine = np.ones(rows), np.broadcast_to(shift, rows)
    for op, c in found:
        affine = then(affine, op, spread(conv, c)) or affine
    return affine, used


def with_scales(conv: Conv, chains: Chains) -> Conv:
    """Folds the constant scales and shifts behind the convolution into its weights and bias, in FP64."""
    w = conv.op.weights["w"]
    (scale, b), used = _scaled(conv, chains, conv.op.weights.get("b", np.zeros(1)))
    weights = {"w": by_rows(w, scale) if np.any(scale != 1) else w}
    if "b" in conv.op.weights or np.any(b):
        weights["b"] = b
    done = followed(conv, used, bias="b" in weights)
    return replace(done, op=replace(done.op, weights=weights), label=conv.label)


def with_depth_to_space(conv: Conv, chains: Chains) -> Conv:
    """Absorbs the depth-to-space that is the convolution's only reader; returns the same convolution where there is none."""
    p, reader = conv.op.problem, chains.reader(conv.output)
    if not isinstance(p, ConvProblem) or conv.tail or p.epilogue.d2s > 1 or not computes(reader, MoveProblem):
        return conv
    kind = reader.problem.kind
    if not kind.startswith("d2s") or (p.groups != 1 and (kind != "d2s_crd" or p.c == p.groups)):
        return conv  # only crd keeps a group's channels together; depthwise kernels cannot reorder their stores
    return followed(conv, [reader], " + ".join(reader.nodes), d2s=reader.problem.step[1], d2s_mode=kind[4:])


def with_activation(conv: Conv, chains: Chains) -> Conv:
    """Absorbs the activation that is the convolution's only reader; returns the same convolution where there is none."""
    found = chains.activation_after(conv.output, conv.axis)
    if found is None or (found.slope is not None and conv.tail):
        return conv
    conv = conv if found.slope is None else weighted(conv, slope=spread(conv, found.slope))
    return followed(conv, found.ops, act=found.act)


def with_affine(conv: Conv, chains: Chains) -> Conv:
    """Absorbs the constant scales and shifts behind the convolution's activation.

    Positive scales behind a homogeneous activation, such as ReLU, scale the weights instead.
    """
    act = conv.op.problem.epilogue.act
    (scales, shifts), used = _scaled(conv, chains, np.zeros(1))
    if used and act != NONE and ACTIVATIONS[act.name].homogeneous and np.all(scales > 0):
        conv = weighted(conv, **{name: by_rows(a, scales) for name, a in conv.op.weights.items() if name in ("w", "b")})
        scales = np.ones_like(scales)
    if not np.any(scales != 1) and not np.any(shifts):
        return followed(conv, used)
    return followed(weighted(conv, scales=scales, shifts=shifts), used, affine=True)


def with_last(conv: Conv, chains: Chains) -> Conv:
    """Absorbs a second activation; returns the same convolution where there is none."""
    found = chains.activation_after(conv.output, conv.axis)
    fits = found is not None and fits_last(found.act, conv.op.problem.epilogue.act)
    return followed(conv, found.ops, last=found.act) if found is not None and fits else conv


def fits_last(last: Activation, act: Activation) -> bool:
    """Whether an epilogue can end with an activation behind another: the kernel reads weights of one of the two, and a slope of
    the first.
    """
    return last.name != "prelu" and not {last.name, act.name} <= {*STORED}
