"""Pointwise nodes of an onnx-ir graph -> chains of stages (one launch each), and activations that an epilogue can apply.

A chain goes on while what it has computed is read by one pointwise node only: that saves a launch and a pass over memory.
A function that exporters write in several nodes, such as x * Sigmoid(x) or 0.5 * x * (1 + Erf(x / sqrt 2)), is recognised
by its values: whatever the spelling, the nodes between are evaluated on samples and compared with the functions known.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from gpu_runtime.frontend.queries import attribute, constant, per_channel, scale_and_shift, shape_of, single_reader, type_of
from tactics.problems.library import FLOAT
from tactics.problems.pointwise_ops import ACTIVATIONS, MAX_SOURCES, MAX_STAGES, OPERATIONS, Activation, Stage

FLT_MAX = 3.4028235e38
BINARY = {
    "Add": "add", "Sub": "sub", "Mul": "mul", "Div": "div", "Max": "max", "Min": "min", "Pow": "pow", "PRelu": "prelu",
}  # fmt: skip
SWAPPED = {"sub": "rsub", "div": "rdiv", "pow": "rpow"}
# ONNX type -> its stages, each (op, attributes that are its parameters with their defaults).
UNARY = {
    **{op: ((op.lower(), {}),) for op in ("Abs", "Ceil", "Erf", "Exp", "Floor", "Log", "Mish", "Relu", "Round", "Sigmoid",
                                          "Sign", "Softplus", "Softsign", "Sqrt", "Tanh")},
    "HardSwish": (("hard_swish", {}),),
    "Elu": (("elu", {"alpha": 1.0}),),
    "HardSigmoid": (("hard_sigmoid", {"alpha": 0.2, "beta": 0.5}),),
    "LeakyRelu": (("leaky_relu", {"alpha": 0.01}),),
    "Neg": (("mul", {"": -1.0}),),
    "Reciprocal": (("rdiv", {"": 1.0}),),
    "Selu": (("elu", {"alpha": 1.6732632423543772}), ("mul", {"gamma": 1.0507009873554805})),
    "ThresholdedRelu": (("thresholded_relu", {"alpha": 1.0}),),
}  # fmt: skip
OPS = {*UNARY, *BINARY, "BatchNormalization", "Celu", "Clip", "Gelu", "Identity"}
# Functions of one value that several nodes may spell, and where they are compared: far out too, where they differ most.
SPELLED = (
    Stage("silu"), Stage("hard_swish"), Stage("gelu"), Stage("gelu_tanh"), Stage("mish"), Stage("softplus"), Stage("sigmoid"),
    Stage("hard_sigmoid", params=(1 / 6, 0.5)), Stage("softsign"),
)  # fmt: skip
SAMPLES = np.concatenate([np.linspace(-9, 9, 73), [-50.0, -20.0, 20.0, 50.0]])
LONGEST_SPELLING = 12  # nodes


@dataclass(frozen=True, slots=True)
class Chain:
    """`stages` over `inputs` (t0, t1, ...) and `constants` (c0, c1, ... as stored, FP64) that give `output`."""

    nodes: tuple
    inputs: tuple
    output: object
    stages: tuple[Stage, ...]
    constants: Mapping[str, np.ndarray]


def chain_at(node, stop: Callable[[object], bool], last=None) -> Chain | None:
    """The chain that begins at `node`, or None if it is not pointwise; it ends before a node for which `stop` holds, and
    with node `last`."""
    values = [v for v in node.inputs if v is not None and constant(v) is None]
    if not values or node.op_type not in OPS or any(type_of(v) != FLOAT for v in (*values, *node.outputs)):
        return None
    spelled = ((v, function_of(v, node)) for v in values)
    free = ((v, found) for v, found in spelled if found and not any(stop(n) for n in found[1] if n is not node))
    value, found = next(free, (values[0], (steps(node, values[0]), (node,))))
    tensors, constants, stages, nodes = [value], {}, [], []
    while found and found[0] is not None:
        (more, used), sizes = found, (len(tensors), len(constants))
        staged = [_stage(step, tensors, constants) for step in more]
        full = len(stages) + len(staged) > MAX_STAGES or len(tensors) + len(constants) > MAX_SOURCES
        if full or (nodes and any(map(stop, used))):
            tensors, constants = tensors[: sizes[0]], dict(list(constants.items())[: sizes[1]])
            break
        stages, nodes = stages + staged, [*nodes, *used]
        value = nodes[-1].outputs[0]
        if nodes[-1] is last:
            break
        reader = single_reader(value)
        found = function_of(value) or (reader is not None and reader.op_type in OPS and (steps(reader, value), (reader,)))
    return Chain(tuple(nodes), tuple(tensors), value, tuple(stages), constants) if nodes else None


def activation_after(value) -> tuple[Activation, np.ndarray | None, tuple] | None:
    """(activation, slope of prelu [C], nodes) if everything that reads `value` is one activation."""
    readers = {use.node for use in value.uses()}
    found = function_of(value)
    if found is None and len(readers) == 1 and not value.is_graph_output():
        (node,) = readers
        if node.op_type in OPS and node.inputs[0] is value:
            found = steps(node, value), (node,)
    if found is None or found[0] is None or len(found[0]) != 1:
        return None
    ((op, operand, params),), nodes = found
    if op == "prelu" and isinstance(operand, np.ndarray):
        slope = per_channel(operand, shape_of(value))
        return None if slope is None else (Activation("prelu"), slope.astype(np.float32), nodes)
    return (Activation(op, params), None, nodes) if op in ACTIVATIONS and operand is None else None


def steps(node, value) -> list[tuple[str, object, tuple[float, ...]]] | None:
    """What `node` makes of `value`, one of its inputs: (op, operand, parameters) each; None if that is not pointwise.

    An operand is a value of the graph or an FP64 array; without one, an operation's parameter is its scalar.
    """
    op = node.op_type
    if op in UNARY:
        return [(name, None, tuple(float(attribute(node, a, d)) for a, d in given.items())) for name, given in UNARY[op]]
    if op == "Identity":
        return []
    if op == "BatchNormalization":
        affine = scale_and_shift(node, value)
        return affine and [_by_constant("mul", affine[0], shape_of(value)), _by_constant("add", affine[1], shape_of(value))]
    if op == "Gelu":
        return [("gelu_tanh" if attribute(node, "approximate", "none") == "tanh" else "gelu", None, ())]
    if op == "Celu":
        a = float(attribute(node, "alpha", 1.0))
        return [("mul", None, (1 / a,)), ("elu", None, (1.0,)), ("mul", None, (a,))]
    if op == "Clip":
        return _clip(node, value)
    if op not in BINARY or len(node.inputs) != 2 or (op == "PRelu" and value is not node.inputs[0]):
        return None
    first = node.inputs[0] is value
    name, operand = BINARY[op], node.inputs[1 if first else 0]
    name = name if first else SWAPPED.get(name, name)
    array = constant(operand)
    return [(name, operand, ()) if array is None else _by_constant(name, array, ())]


def _by_constant(op: str, array: np.ndarray, channels: tuple[int, ...]) -> tuple:
    """The cheapest step that combines with a constant; `channels`: the shape along whose axis 1 a vector lies."""
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


def _clip(node, value):
    bounds = [*node.inputs[1:3], None, None][:2]
    if node.inputs[0] is not value:
        return None
    arrays = [constant(v) for v in bounds]
    if any(v is not None and a is None for v, a in zip(bounds, arrays, strict=True)):
        return [(op, v, ()) if a is None else _by_constant(op, a, ())
                for op, v, a in zip(("max", "min"), bounds, arrays, strict=True) if v is not None]  # fmt: skip
    if any(a is not None and a.size != 1 for a in arrays):
        return None
    low, high = (s * FLT_MAX if a is None else float(np.clip(a.reshape(()), -FLT_MAX, FLT_MAX))
                 for s, a in zip((-1, 1), arrays, strict=True))  # fmt: skip
    if low == 0 and high >= np.finfo(np.float32).max:
        return [("relu", None, ())]
    return [("clip", None, (low, high))]


def _stage(step, tensors: list, constants: dict) -> Stage:
    """A step as a stage; its operand joins the chain's tensors or constants unless it is there already."""
    op, operand, params = step
    if operand is None:
        return Stage(op, "", params)
    if isinstance(operand, np.ndarray):
        name = f"c{len(constants)}"
        constants[name] = operand
        return Stage(op, name)
    at = next((i for i, t in enumerate(tensors) if t is operand), len(tensors))
    if at == len(tensors):
        tensors.append(operand)
    return Stage(op, f"t{at}")


# ---- functions in several nodes


def function_of(value, node=None) -> tuple[list, tuple] | None:
    """(steps, nodes) of the longest SPELLED function of `value` alone that has at least two nodes.

    All of its nodes between are read by nothing else. With `node`, it is one of them; else they are all that reads `value`.
    """
    order, known = [], {value: SAMPLES}
    todo = [use.node for use in value.uses()]
    while todo and len(order) < LONGEST_SPELLING:
        reader = todo.pop(0)
        y = None if reader in order or len(reader.outputs) != 1 else _evaluated(reader, known)
        if y is not None:
            order.append(reader)
            known[reader.outputs[0]] = y
            todo += [use.node for use in reader.outputs[0].uses()]
    for last in reversed(order):
        stage = _spelled(known[last.outputs[0]])
        if stage is None:
            continue
        used = {last}
        for n in reversed(order):
            if any(use.node in used for use in n.outputs[0].uses()):
                used.add(n)
        inside = [n.outputs[0] for n in used - {last}]
        hidden = all(not v.is_graph_output() and all(use.node in used for use in v.uses()) for v in inside)
        whole = node in used if node else not value.is_graph_output() and all(use.node in used for use in value.uses())
        if len(used) > 1 and hidden and whole:
            return [(stage.op, None, stage.params)], tuple(n for n in order if n in used and n is not last) + (last,)
    return None


def _evaluated(node, known: Mapping) -> np.ndarray | None:
    """The samples of `node`'s output; None unless all that it reads is known or a scalar."""
    value = next((v for v in node.inputs if v in known), None)
    found = steps(node, value) if value is not None and node.op_type in OPS else None
    if found is None:
        return None
    y = known[value]
    with np.errstate(all="ignore"):
        for op, operand, params in found:
            if operand is None:
                y = Stage(op, "", params).apply(y)
            elif not isinstance(operand, np.ndarray) and operand in known:
                y = OPERATIONS[op](y, known[operand])
            else:
                return None
    return y


@functools.cache
def _spelled_samples() -> np.ndarray:
    with np.errstate(all="ignore"):
        return np.stack([s.apply(SAMPLES) for s in SPELLED])


def _spelled(y: np.ndarray) -> Stage | None:
    """The function whose values at SAMPLES are `y`."""
    with np.errstate(all="ignore"):
        close = np.abs(_spelled_samples() - y) <= 2e-5 + 2e-5 * np.abs(y)
    found = np.flatnonzero(close.all(axis=1)) if np.isfinite(y).all() else ()
    return SPELLED[found[0]] if len(found) else None
