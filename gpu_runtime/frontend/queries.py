"""Questions about an onnx-ir graph: constants, attributes, shapes, readers. Values and nodes are onnx-ir's."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from tactics.problems.library_problem import EXACT, FLOAT

Node = ir.Node  # the two types that lowering names; it imports no onnx of its own
Value = ir.Value
Affine = tuple[np.ndarray, np.ndarray]  # a scale and a shift
TYPES = {"FLOAT": FLOAT} | {name.upper(): name for name in EXACT}


def operand(node: ir.Node, i: int = 0) -> ir.Value:
    """Input `i` of a node whose operator demands it."""
    value = node.inputs[i]
    if value is None:
        raise ValueError(f"{node.op_type} {node.name}: expected an input {i}, got none")
    return value


def operands(node: ir.Node) -> tuple[ir.Value, ...]:
    """The inputs that it has."""
    return tuple(v for v in node.inputs if v is not None)


def constant(value: ir.Value | None) -> np.ndarray | None:
    """The array of a stored constant, else None."""
    return None if value is None or value.const_value is None else value.const_value.numpy()


def attribute(node: ir.Node, name: str, default: Any = None) -> Any:
    """An attribute's Python value (strings as str, lists as tuple), or the default."""
    found = node.attributes.get(name)
    return default if found is None else tuple(found.value) if isinstance(found.value, (list, tuple)) else found.value


def name_of(named: ir.Node | ir.Value) -> str:
    """The name that every node and value of a cleaned graph has."""
    return named.name or ""


def shape_of(value: ir.Value) -> tuple[int, ...]:
    """The static ONNX shape."""
    return () if value.shape is None else value.shape.numpy()


def is_static(value: ir.Value | None) -> bool:
    """Whether all sizes are known."""
    return value is not None and value.shape is not None and value.shape.is_static()


def type_of(value: ir.Value) -> str | None:
    """What a tensor's elements are in memory: fp16 if floating-point (all are FP32 in the graph), else as they are."""
    return None if value.dtype is None else TYPES.get(value.dtype.name)


def is_read(value: ir.Value) -> bool:
    """Whether a node or the network's caller reads it."""
    return bool(value.uses()) or value.is_graph_output()


def single_reader(value: ir.Value) -> ir.Node | None:
    """The one node that reads `value`, exactly once, if it is no network output."""
    uses = list(value.uses())
    return uses[0].node if len(uses) == 1 and not value.is_graph_output() else None


def row(node: ir.Node, *types: str) -> tuple[ir.Node, ...]:
    """Nodes of these types from `node` on, each of which alone reads what the one before gives; none where they are others."""
    found: list[ir.Node] = []
    each: ir.Node | None = node
    for op in types:
        if each is None or each.op_type != op:
            return ()
        found.append(each)
        each = single_reader(each.outputs[0])
    return tuple(found)


def per_channel(array: np.ndarray, shape: tuple[int, ...], axis: int = 1) -> np.ndarray | None:
    """A constant that broadcasts over a tensor of `shape` along `axis` only -> [C] or [1]; None if it does otherwise."""
    dims = (1,) * (len(shape) - array.ndim) + array.shape
    if len(dims) != len(shape) or any(d != 1 for i, d in enumerate(dims) if i != axis):
        return None
    if array.size not in (1, shape[axis] if len(shape) > axis else 1):
        return None
    return array.reshape(-1)


def scale_and_shift(node: ir.Node, x: ir.Value, axis: int = 1) -> tuple[np.ndarray, np.ndarray] | None:
    """FP64 (scale, shift), each [C] or [1] along `axis`, if node computes x * scale + shift with constants, else None."""
    if node.op_type == "BatchNormalization":
        return _batch_normalization(node, x) if axis == 1 and x is node.inputs[0] else None
    if node.op_type not in ("Add", "Sub", "Mul", "Div") or shape_of(node.outputs[0]) != shape_of(x):
        return None
    first = node.inputs[0] is x
    other = constant(node.inputs[1 if first else 0])
    c = None if other is None else per_channel(other.astype(np.float64), shape_of(x), axis)
    if c is None:
        return None
    one, zero = np.ones(1), np.zeros(1)
    if node.op_type == "Div":
        return (1 / c, zero) if first and np.all(c) else None
    return {"Add": (one, c), "Sub": (one, -c) if first else (-one, c), "Mul": (c, zero)}[node.op_type]


def scaled_after(value: ir.Value, affine: Affine, axis: int) -> tuple[Affine, tuple[ir.Node, ...]]:
    """(scale and shift along an axis, FP64, nodes): `affine`, then all that nodes behind `value` do of the kind. Nothing else
    reads what lies between."""
    (scale, shift), nodes = affine, list[ir.Node]()
    while (node := single_reader(value)) is not None and (more := scale_and_shift(node, value, axis)) is not None:
        scale, shift, value = scale * more[0], shift * more[0] + more[1], node.outputs[0]
        nodes.append(node)
    return (scale, shift), tuple(nodes)


def _batch_normalization(node: ir.Node, x: ir.Value) -> tuple[np.ndarray, np.ndarray] | None:
    stats = [a.astype(np.float64) for a in map(constant, node.inputs[1:5]) if a is not None]
    if len(stats) != 4 or attribute(node, "training_mode", 0) or any(a.shape != (shape_of(x)[1],) for a in stats):
        return None
    gamma, beta, mean, var = stats
    with np.errstate(all="ignore"):  # lower refuses what is not finite
        scale = gamma / np.sqrt(var + attribute(node, "epsilon", 1e-5))
        return scale, beta - mean * scale
