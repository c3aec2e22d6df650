"""Lowers pointwise nodes to stages of a PointwiseProblem, and composes scales and shifts with other operations."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from gpu_runtime.frontend.queries import Node, Value, attribute, constant, name_of, operand, shape_of, single_reader, type_of
from gpu_runtime.lowering.units import Unit, of_nodes
from tactics.problems.library_problem import FLOAT
from tactics.problems.operators import BINARY, UNARY
from tactics.problems.pointwise_ops import FLT_MAX, Stage

SWAPPED = {"sub": "rsub", "div": "rdiv", "pow": "rpow"}
Affine = tuple[np.ndarray, np.ndarray]  # a scale and a shift
# (operation, operand, parameters): an operand is a value of the graph or an FP64 array; without one, the parameter of an
# operation is its scalar.
Step = tuple[str, Value | np.ndarray | None, tuple[float, ...]]


def pointwise_at(node: Node) -> Unit | None:
    """Returns the node as stages over its first computed input; None if it is not pointwise, or not over floating-point
    tensors."""
    values = [v for v in node.inputs if v is not None and constant(v) is None]
    if not values or node.op_type not in OPS or any(type_of(v) != FLOAT for v in (*values, *node.outputs)):
        return None
    found = steps(node, values[0])
    tensors, constants, stages = values[:1], dict[str, np.ndarray](), list[Stage]()
    for op, other, params in found or ():
        name = ""
        if isinstance(other, np.ndarray):
            name = f"c{len(constants)}"
            constants[name] = other
        elif other is not None:
            tensors += [other] if other not in tensors else []
            name = f"t{tensors.index(other)}"
        stages.append(Stage(op, name, () if name else params))
    unit = of_nodes("Pointwise", node, [node], values[0], constants)
    return None if found is None else replace(unit, inputs=tuple(tensors), stages=tuple(stages))


def quantize_at(node: Node) -> Unit | None:
    """Returns a Round and the Clip to whole numbers that is its only reader as one stage; None for other nodes."""
    clip = single_reader(node.outputs[0]) if node.op_type == "Round" else None
    if clip is None or clip.op_type != "Clip" or len(clip.inputs) != 3 or type_of(operand(node)) != FLOAT:
        return None
    bounds = [float(a.reshape(())) for a in map(constant, clip.inputs[1:]) if a is not None and a.size == 1]
    if len(bounds) < 2 or any(b != round(b) for b in bounds if math.isfinite(b)) or not all(map(math.isfinite, bounds)):
        return None
    unit = replace(of_nodes("Pointwise", clip, [node, clip], operand(node)), label=name_of(clip))
    return replace(unit, stages=(Stage("quantize", params=tuple(bounds)),))


def steps(node: Node, value: Value) -> list[Step] | None:
    """Returns the steps that `node` applies to `value`, one of its inputs; None if it is not pointwise."""
    op = node.op_type
    if op in SPECIAL:
        return SPECIAL[op](node, value)
    if op in UNARY:
        return [(name, None, tuple(float(attribute(node, a, d)) for a, d in params.items())) for name, params in UNARY[op]]
    if op not in BINARY or len(node.inputs) != 2 or (op == "PRelu" and value is not node.inputs[0]):
        return None
    first = node.inputs[0] is value
    name, other = BINARY[op], operand(node, 1 if first else 0)
    name = name if first else SWAPPED.get(name, name)
    array = constant(other)
    return [(name, other, ()) if array is None else _by_constant(name, array, ())]


def _batch_normalization(node: Node, value: Value) -> list[Step] | None:
    stats = [a.astype(np.float64) for a in map(constant, node.inputs[1:5]) if a is not None]
    if value is not node.inputs[0] or len(stats) != 4 or attribute(node, "training_mode", 0):
        return None
    gamma, beta, mean, var = stats
    if any(a.shape != (shape_of(value)[1],) for a in stats):
        return None
    with np.errstate(all="ignore"):  # fusion.rounded refuses constants that are not finite
        scale = gamma / np.sqrt(var + attribute(node, "epsilon", 1e-5))
        return [_by_constant("mul", scale, shape_of(value)), _by_constant("add", beta - mean * scale, shape_of(value))]


def _celu(node: Node, value: Value) -> list[Step]:
    a = float(attribute(node, "alpha", 1.0))
    return [("mul", None, (1 / a,)), ("elu", None, (1.0,)), ("mul", None, (a,))]


def _gelu(node: Node, value: Value) -> list[Step]:
    return [("gelu_tanh" if attribute(node, "approximate", "none") == "tanh" else "gelu", None, ())]


def _by_constant(op: str, array: np.ndarray, channels: tuple[int, ...]) -> Step:
    """Returns the cheapest step for an operation with a constant; `channels`: the shape along whose axis 1 a vector lies."""
    c = np.asarray(array, np.float64)
    if channels:
        c = c.reshape(-1, *(1,) * (len(channels) - 2))
    if op == "sub":
        op, c = "add", -c
    if op == "div" and np.all(c):
        op, c = "mul", 1 / c
    if c.size > 1:
        return op, c, ()
    scalar = float(c.reshape(()))
    if op == "pow" and scalar in (2.0, 0.5):
        return "square" if scalar == 2 else "sqrt", None, ()
    return "leaky_relu" if op == "prelu" else op, None, (scalar,)


def _clip(node: Node, value: Value) -> list[Step] | None:
    bounds = [*node.inputs[1:3], None, None][:2]
    if node.inputs[0] is not value:
        return None
    arrays = [constant(v) for v in bounds]
    if any(v is not None and a is None for v, a in zip(bounds, arrays, strict=True)):
        return [
            (op, v, ()) if a is None else _by_constant(op, a, ())
            for op, v, a in zip(("max", "min"), bounds, arrays, strict=True)
            if v is not None
        ]
    if any(a is not None and a.size != 1 for a in arrays):
        return None
    low, high = (
        s * FLT_MAX if a is None else float(np.clip(a.reshape(()), -FLT_MAX, FLT_MAX))
        for s, a in zip((-1, 1), arrays, strict=True)
    )
    if low == 0 and high >= np.finfo(np.float32).max:
        return [("relu", None, ())]
    return [("clip", None, (low, high))]


# Operators whose steps depend on more than the values of their attributes.
SPECIAL: Mapping[str, Callable[[Node, Value], list[Step] | None]] = {
    "BatchNormalization": _batch_normalization,
    "Celu": _celu,
    "Clip": _clip,
    "Gelu": _gelu,
}
OPS = {*UNARY, *BINARY, *SPECIAL}


# ---- scales and shifts


def then(affine: Affine, op: str, c: np.ndarray) -> Affine | None:
    """Composes scale and shift with a following operation with constants; None where the result is no scale and shift."""
    scale, shift = affine
    if op == "mul":
        return scale * c, shift * c
    signs = {"add": (1, 1), "sub": (1, -1), "rsub": (-1, 1)}.get(op)
    return None if signs is None else (signs[0] * scale, signs[0] * shift + signs[1] * c)
