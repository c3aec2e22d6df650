"""Lowers reductions, softmax and normalizations to problems over rows; `lower` puts views in between where shapes differ."""

import math

import numpy as np

from gpu_runtime.frontend.queries import attribute, constant, operand, shape_of
from gpu_runtime.lowering.moves import Problems, Refused, Shapes, Weights, as_shape4, axis4, constants, nchw, runs_of
from gpu_runtime.lowering.units import Unit
from tactics.problems.operators import REDUCE
from tactics.problems.problem import PointwiseProblem, PoolProblem
from tactics.problems.protocol import Problem, Shape4
from tactics.problems.reductions import NormalizeProblem, ReduceProblem

OF_ITSELF = ("sum", "mean", "max", "min", "prod")  # kinds that may reduce some axes first and then the others


def _runs(shape: tuple[int, ...], axes: set[int]) -> tuple[Shape4, str]:
    """Returns (an NCHW shape of the same elements, the letters of `axes` in it): `nchw` itself up to rank 4, else neighbouring
    axes that are all reduced, or all kept, become one."""
    rank = len(shape)
    if rank <= 4:
        at = {axis4(a, rank) for a in axes}
        return nchw(shape), "".join(a for i, a in enumerate("nchw") if i in at)
    runs = runs_of(shape, axes.__contains__)
    if len(runs) > 4:
        raise Refused(
            f"expected at most 4 dimensions after neighbouring axes are merged: shape {list(shape)}, axes {sorted(axes)}"
        )
    ones = 4 - len(runs)
    letters = (a for a, (_, chosen) in zip("nchw"[ones:], runs, strict=True) if chosen)
    return as_shape4([size for size, _ in runs]), "".join(letters)


def reduce(unit: Unit, shapes: Shapes, out: Shape4, weights: Weights) -> Problems:
    shape, kind = shape_of(unit.inputs[0]), REDUCE[unit.op]
    listed = constants(unit, 1)[0]
    if not listed and attribute(unit.node, "noop_with_empty_axes", 0):
        if kind not in ("sum", "mean", "max", "min", "prod"):
            raise Refused("without axes, noop_with_empty_axes = 1 makes it elementwise: export it as elementwise operators")
        return PointwiseProblem(*shapes[0])
    chosen = {int(a) % len(shape) for a in listed} if listed else set(range(len(shape)))
    if kind in OF_ITSELF and len(runs_of(shape, chosen.__contains__)) > 4:
        return _one_run_after_the_other(shape, chosen, kind)
    shape4, axes = _runs(shape, chosen)
    if axes == "hw" and kind in ("mean", "max"):
        n, c, h, w = shape4
        return PoolProblem(n, c, h, w, "avg" if kind == "mean" else "max", h, w, (1, 1))
    if not axes:  # a scalar
        axes = "w"
    return ReduceProblem(*shape4, kind, axes)


def _one_run_after_the_other(shape: tuple[int, ...], axes: set[int], kind: str) -> tuple[Problem, ...]:
    """Reduces the last run of neighbouring axes first: each leaves axes of size 1."""
    problems: list[Problem] = []
    while axes:
        first = max(a for a in axes if a - 1 not in axes)
        run = {a for a in axes if a >= first}
        shape4, among = _runs(shape, run)
        problems.append(ReduceProblem(*shape4, kind, among))
        shape, axes = tuple(1 if a in run else size for a, size in enumerate(shape)), axes - run
    return tuple(problems)


def softmax(unit: Unit, shapes: Shapes, out: Shape4, weights: Weights) -> NormalizeProblem:
    shape = shape_of(unit.inputs[0])
    shape4, axes = _runs(shape, {attribute(unit.node, "axis", -1) % len(shape)})
    return NormalizeProblem(*shape4, "log_softmax" if unit.op == "LogSoftmax" else "softmax", axes)


def standardize(unit: Unit, shapes: Shapes, out: Shape4, weights: Weights) -> NormalizeProblem:
    """Lowers the normalization that `normalizations` found in several nodes, the first of them a ReduceMean."""
    shape = shape_of(unit.inputs[0])
    shape4, axes = _runs(shape, {int(a) % len(shape) for a in constants(unit, 1)[0]})
    affine = "nchw"[axis4(unit.axis, len(shape))] if "scale" in weights else ""
    return NormalizeProblem(*shape4, "standard", axes, epsilon=float(weights.pop("epsilon")[0]), affine=affine)


def group_normalization(unit: Unit, shapes: Shapes, out: Shape4, weights: Weights) -> NormalizeProblem:
    """Lowers the InstanceNormalization that `normalizations` found, over the groups of the Reshape before it, or over its own
    channels."""
    groups = attribute(unit.node, "num_groups", shape_of(operand(unit.node))[1])
    shape4, axes, groups = _channels_in_groups(shape_of(unit.inputs[0]), groups)
    return NormalizeProblem(*shape4, "standard", axes, groups, attribute(unit.node, "epsilon", 1e-5), "c")


def standard(unit: Unit, shapes: Shapes, out: Shape4, weights: Weights) -> NormalizeProblem | ReduceProblem:
    """Lowers LayerNormalization, InstanceNormalization, and GroupNormalization, which the import turns into it."""
    node, rank = unit.node, len(shape_of(unit.inputs[0]))
    epsilon, of_layer = attribute(node, "epsilon", 1e-5), unit.op == "LayerNormalization"
    shape4, axes, groups = _of_layer(unit, rank) if of_layer else _of_groups(unit)
    if len(node.inputs) < 2 or any(v is not None and constant(v) is None for v in node.inputs[1:]):
        raise Refused("expected constant scale and bias")
    if unit.output is not node.outputs[0]:  # LayerNormalization's statistics
        mean = unit.output is node.outputs[1]
        return ReduceProblem(*shape4, "mean", axes) if mean else ReduceProblem(*shape4, "inv_std", axes, epsilon)
    affine = axes if of_layer else "c"
    size = math.prod(d for a, d in zip("nchw", shape4, strict=True) if a in affine)
    scale, bias = constants(unit, 1, 2)
    if len(scale) != size or (bias and len(bias) != size):
        raise Refused(f"expected scale and bias of {size} values, got {len(scale)} and {len(bias)}")
    for name, slot in (("scale", 1), ("bias", 2)):
        array = constant(node.inputs[slot]) if slot < len(node.inputs) else None
        weights[name] = np.zeros(size, np.float32) if array is None else np.asarray(array, np.float32)
    return NormalizeProblem(*shape4, "standard", axes, groups, epsilon, affine)


def _of_layer(unit: Unit, rank: int) -> tuple[Shape4, str, int]:
    """Returns LayerNormalization's (shape, axes that are normalized together, number of groups of channels)."""
    chosen = set(range(attribute(unit.node, "axis", -1) % rank, rank))
    return *_runs(shape_of(unit.inputs[0]), chosen), 1


def _of_groups(unit: Unit) -> tuple[Shape4, str, int]:
    shape = shape_of(unit.inputs[0])
    return _channels_in_groups(shape, attribute(unit.node, "num_groups", shape[1]))


def _channels_in_groups(shape: tuple[int, ...], groups: int) -> tuple[Shape4, str, int]:
    rank, alone = len(shape), groups == shape[1]  # every channel by itself
    chosen = set(range(2 if alone else 1, rank))
    if rank > 4:
        shape, chosen = nchw(shape), {a for a in range(4) if a in chosen or (a == 3 and rank - 1 in chosen)}
    return *_runs(shape, chosen), 1 if alone else groups


RULES = {
    **dict.fromkeys(REDUCE, reduce),
    "Softmax": softmax,
    "LogSoftmax": softmax,
    "Standardize": standardize,
    "GroupNormalization": group_normalization,
    "InstanceNormalization": standard,
    "LayerNormalization": standard,
}
