"""Pointwise nodes of an onnx-ir graph -> chains of stages (one launch each), and activations that an epilogue can apply.

A chain goes on while what it has computed is read by one pointwise node only: that saves a launch and a pass over memory.
A function that exporters write in several nodes, such as x * Sigmoid(x) or 0.5 * x * (1 + Erf(x / sqrt 2)), is recognised
by its values: whatever the spelling, the nodes between are evaluated on samples and compared with the functions known.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from gpu_runtime.frontend.queries import (
    attribute,
    constant,
    operand,
    per_channel,
    shape_of,
    single_reader,
    type_of,
)
from tactics.problems.library_problem import FLOAT
from tactics.problems.operators import BINARY, UNARY
from tactics.problems.pointwise_ops import ACTIVATIONS, FLT_MAX, MAX_SOURCES, MAX_STAGES, POINTWISE, Activation, Stage

SWAPPED = {"sub": "rsub", "div": "rdiv", "pow": "rpow"}
# Functions of one value that several nodes may spell, and where they are compared: far out too, where they differ most.
SPELLED = tuple(Stage(name, params=row.spelled) for name, row in POINTWISE.items() if row.spelled is not None)
SAMPLES = np.concatenate([np.linspace(-9, 9, 73), [-50.0, -20.0, 20.0, 50.0]])
Affine = tuple[np.ndarray, np.ndarray]  # a scale and a shift
SCALES = ("Add", "Sub", "Mul", "Div", "BatchNormalization")  # by constants
LONGEST_SPELLING = 12  # nodes


# (operation, operand, parameters): an operand is a value of the graph or an FP64 array; without one, the parameter of an
# operation is its scalar.
Step = tuple[str, ir.Value | np.ndarray | None, tuple[float, ...]]
Steps = tuple[Sequence[Step], tuple[ir.Node, ...]]  # and the nodes that say so


@dataclass(frozen=True, slots=True)
class Chain:
    """`stages` over `inputs` (t0, t1, ...) and `constants` (c0, c1, ... as stored, FP64) that give `output`."""

    nodes: tuple[ir.Node, ...]
    inputs: tuple[ir.Value, ...]
    output: ir.Value
    stages: tuple[Stage, ...]
    constants: Mapping[str, np.ndarray]


def chain_at(node: ir.Node, stop: Callable[[ir.Node], bool], last: ir.Node | None = None) -> Chain | None:
    """The chain that begins at `node`, or None if it is not pointwise; it ends before a node for which `stop` holds, and
    with node `last`."""
    values = [v for v in node.inputs if v is not None and constant(v) is None]
    if not values or node.op_type not in OPS or any(type_of(v) != FLOAT for v in (*values, *node.outputs)):
        return None
    value, found = _first(node, values, stop)
    chain = Chain((), (value,), value, (), {})
    while found is not None:
        steps, nodes = found
        longer = _longer(chain, steps, nodes)
        full = len(longer.stages) > MAX_STAGES or len(longer.inputs) + len(longer.constants) > MAX_SOURCES
        if full or (chain.nodes and any(map(stop, nodes))):
            break
        chain = longer
        if nodes[-1] is last:
            break
        reader = single_reader(chain.output)
        found = function_of(chain.output) or (None if reader is None else _of_node(reader, chain.output))
    return chain if chain.nodes else None


def _first(node: ir.Node, values: list[ir.Value], stop: Callable[[ir.Node], bool]) -> tuple[ir.Value, Steps | None]:
    """What a chain at `node` begins with: a function in several nodes of one of its inputs, else the node itself."""
    for value in values:
        spelled = function_of(value, node)
        if spelled and not any(stop(n) for n in spelled[1] if n is not node):
            return value, spelled
    return values[0], _of_node(node, values[0])


def _of_node(node: ir.Node, value: ir.Value) -> Steps | None:
    found = steps(node, value) if node.op_type in OPS else None
    return None if found is None else (found, (node,))


def _longer(chain: Chain, steps: Sequence[Step], nodes: tuple[ir.Node, ...]) -> Chain:
    """The chain with more steps; an operand joins its tensors or constants unless it is there already."""
    tensors, constants, stages = list(chain.inputs), dict(chain.constants), list(chain.stages)
    for op, other, params in steps:
        name = ""
        if isinstance(other, np.ndarray):
            name = f"c{len(constants)}"
            constants[name] = other
        elif other is not None:
            if not any(t is other for t in tensors):
                tensors.append(other)
            name = f"t{next(i for i, t in enumerate(tensors) if t is other)}"
        stages.append(Stage(op, name, () if name else params))
    return Chain((*chain.nodes, *nodes), tuple(tensors), nodes[-1].outputs[0], tuple(stages), constants)


def activation_after(value: ir.Value) -> tuple[Activation, np.ndarray | None, tuple[ir.Node, ...]] | None:
    """(activation, slope of prelu [C], nodes) if everything that reads `value` is one activation."""
    found = function_of(value)
    readers = {use.node for use in value.uses()}
    if found is None and len(readers) == 1 and not value.is_graph_output():
        (node,) = readers
        found = _of_node(node, value) if node.inputs[0] is value else None
    if found is None or len(found[0]) != 1:
        return None
    ((op, other, params),), nodes = found
    if op == "prelu" and isinstance(other, np.ndarray):
        slope = per_channel(other, shape_of(value))
        return None if slope is None else (Activation("prelu"), slope.astype(np.float32), nodes)
    return (Activation(op, params), None, nodes) if op in ACTIVATIONS and other is None else None


def steps(node: ir.Node, value: ir.Value) -> list[Step] | None:
    """What `node` makes of `value`, one of its inputs; None if that is not pointwise."""
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


def _batch_normalization(node: ir.Node, value: ir.Value) -> list[Step] | None:
    stats = [a.astype(np.float64) for a in map(constant, node.inputs[1:5]) if a is not None]
    if value is not node.inputs[0] or len(stats) != 4 or attribute(node, "training_mode", 0):
        return None
    gamma, beta, mean, var = stats
    if any(a.shape != (shape_of(value)[1],) for a in stats):
        return None
    with np.errstate(all="ignore"):  # lower refuses what is not finite
        scale = gamma / np.sqrt(var + attribute(node, "epsilon", 1e-5))
        return [_by_constant("mul", scale, shape_of(value)), _by_constant("add", beta - mean * scale, shape_of(value))]


def _celu(node: ir.Node, value: ir.Value) -> list[Step]:
    a = float(attribute(node, "alpha", 1.0))
    return [("mul", None, (1 / a,)), ("elu", None, (1.0,)), ("mul", None, (a,))]


def _gelu(node: ir.Node, value: ir.Value) -> list[Step]:
    return [("gelu_tanh" if attribute(node, "approximate", "none") == "tanh" else "gelu", None, ())]


def _by_constant(op: str, array: np.ndarray, channels: tuple[int, ...]) -> Step:
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


def _clip(node: ir.Node, value: ir.Value) -> list[Step] | None:
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
SPECIAL: Mapping[str, Callable[[ir.Node, ir.Value], list[Step] | None]] = {
    "BatchNormalization": _batch_normalization,
    "Celu": _celu,
    "Clip": _clip,
    "Gelu": _gelu,
}
OPS = {*UNARY, *BINARY, *SPECIAL}


# ---- scales and shifts


def then(affine: Affine, op: str, c: np.ndarray) -> Affine | None:
    """What a scale and a shift, followed by an operation with constants, are together; None where that is neither."""
    scale, shift = affine
    if op == "mul":
        return scale * c, shift * c
    signs = {"add": (1, 1), "sub": (1, -1), "rsub": (-1, 1)}.get(op)
    return None if signs is None else (signs[0] * scale, signs[0] * shift + signs[1] * c)


def scaled_after(value: ir.Value, affine: Affine, axis: int) -> tuple[Affine, tuple[ir.Node, ...]]:
    """(scale and shift along an axis, FP64, nodes): `affine`, then all that nodes behind `value` do of the kind. Nothing else
    reads what lies between."""
    nodes: list[ir.Node] = []
    while (node := single_reader(value)) is not None and (more := _with_node(affine, node, value, axis)) is not None:
        affine, value = more, node.outputs[0]
        nodes.append(node)
    return affine, tuple(nodes)


def _with_node(affine: Affine, node: ir.Node, value: ir.Value, axis: int) -> Affine | None:
    """The scale and shift with those of a node that reads `value`."""
    found = steps(node, value) if node.op_type in SCALES and shape_of(node.outputs[0]) == shape_of(value) else None
    together: Affine | None = affine if found else None
    for op, other, params in found or ():
        given = np.array(params) if other is None else other
        c = per_channel(given, shape_of(value), axis) if isinstance(given, np.ndarray) else None
        together = None if c is None or together is None else then(together, op, c)
    return together


# ---- functions in several nodes


def function_of(value: ir.Value, node: ir.Node | None = None) -> Steps | None:
    """(steps, nodes) of the longest SPELLED function of `value` alone that has at least two nodes.

    All of its nodes between are read by nothing else. With `node`, it is one of them; else they are all that reads `value`.
    """
    order, known = _evaluable(value)
    for last in reversed(order):
        stage = _spelled(known[last.outputs[0]])
        if stage is None:
            continue
        used = {last}
        for n in reversed(order):
            if any(use.node in used for use in n.outputs[0].uses()):
                used.add(n)
        hidden = all(_read_only_by(used, n.outputs[0]) for n in used - {last})
        whole = node in used if node else _read_only_by(used, value)
        if len(used) > 1 and hidden and whole:
            return [(stage.op, None, stage.params)], tuple(n for n in order if n in used and n is not last) + (last,)
    return None


def _read_only_by(nodes: set[ir.Node], value: ir.Value) -> bool:
    return not value.is_graph_output() and all(use.node in nodes for use in value.uses())


def _evaluable(value: ir.Value) -> tuple[list[ir.Node], dict[ir.Value, np.ndarray]]:
    """(nodes behind `value` that depend on it alone, in order; the samples of what they give)."""
    order: list[ir.Node] = []
    known = {value: SAMPLES}
    todo = [use.node for use in value.uses()]
    while todo and len(order) < LONGEST_SPELLING:
        reader = todo.pop(0)
        y = None if reader in order or len(reader.outputs) != 1 else _evaluated(reader, known)
        if y is not None:
            order.append(reader)
            known[reader.outputs[0]] = y
            todo += [use.node for use in reader.outputs[0].uses()]
    return order, known


def _evaluated(node: ir.Node, known: Mapping[ir.Value, np.ndarray]) -> np.ndarray | None:
    """The samples of `node`'s output; None unless all that it reads is known or a scalar."""
    value = next((v for v in node.inputs if v is not None and v in known), None)
    found = steps(node, value) if value is not None and node.op_type in OPS else None
    if value is None or found is None:
        return None
    y = known[value]
    with np.errstate(all="ignore"):
        for op, other, params in found:
            if other is None:
                y = Stage(op, "", params).apply(y)
            elif isinstance(other, ir.Value) and other in known:
                y = POINTWISE[op].meaning(y, known[other])
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
    if not np.isfinite(y).all():
        return None
    return next((stage for stage, same in zip(SPELLED, close.all(axis=1), strict=True) if same), None)
