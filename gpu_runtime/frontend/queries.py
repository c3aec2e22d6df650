"""Questions about an onnx-ir graph: constants, attributes, shapes, readers. Values and nodes are onnx-ir's."""

from typing import Any

import numpy as np
import onnx_ir as ir

from tactics.problems.library_problem import EXACT, FLOAT

Node = ir.Node  # the three types that lowering names; it imports no onnx of its own
Value = ir.Value
Graph = ir.Graph
TYPES = {"FLOAT": FLOAT} | {name.upper(): name for name in EXACT}


def operand(node: ir.Node, i: int = 0) -> ir.Value:
    """Returns input `i` of a node, which its operator demands. Raises ValueError if it is absent."""
    value = node.inputs[i]
    if value is None:
        raise ValueError(f"{node.op_type} {node.name}: expected an input {i}, got none")
    return value


def operands(node: ir.Node) -> tuple[ir.Value, ...]:
    """Returns the inputs that are present."""
    return tuple(v for v in node.inputs if v is not None)


def constant(value: ir.Value | None) -> np.ndarray | None:
    """Returns the array of a stored constant; None for any other value."""
    return None if value is None or value.const_value is None else value.const_value.numpy()


def attribute(node: ir.Node, name: str, default: Any = None) -> Any:
    """Returns an attribute's Python value (strings as str, lists as tuple), or `default` if the node has none."""
    found = node.attributes.get(name)
    return default if found is None else tuple(found.value) if isinstance(found.value, (list, tuple)) else found.value


def name_of(named: ir.Node | ir.Value) -> str:
    """Returns the name of a node or value of a clean graph, where all have one."""
    return named.name or ""


def shape_of(value: ir.Value) -> tuple[int, ...]:
    """Returns the static shape of a value, () if it is unknown."""
    return () if value.shape is None else value.shape.numpy()


def is_static(value: ir.Value | None) -> bool:
    """Returns whether all sizes of the value are known; False for None."""
    return value is not None and value.shape is not None and value.shape.is_static()


def type_of(value: ir.Value) -> str | None:
    """Returns the type that a tensor's elements have in memory: "fp16" for floating point, which is FP32 in the graph, else the
    graph's type; None if it is unknown.
    """
    return None if value.dtype is None else TYPES.get(value.dtype.name)


def is_read(value: ir.Value) -> bool:
    """Returns whether a node reads the value, or the value is a network output."""
    return bool(value.uses()) or value.is_graph_output()


def single_reader(value: ir.Value) -> ir.Node | None:
    """Returns the only reader of `value`, which reads it once; None if there are others, or if `value` is a network output."""
    uses = list(value.uses())
    return uses[0].node if len(uses) == 1 and not value.is_graph_output() else None


def row(node: ir.Node, *types: str) -> tuple[ir.Node, ...]:
    """Returns `node` and the nodes that follow it, if they have these operators in order and each is the only reader of the one
    before; else ()."""
    found: list[ir.Node] = []
    each: ir.Node | None = node
    for op in types:
        if each is None or each.op_type != op:
            return ()
        found.append(each)
        each = single_reader(each.outputs[0])
    return tuple(found)


def per_channel(array: np.ndarray, shape: tuple[int, ...], axis: int = 1) -> np.ndarray | None:
    """Returns a constant that varies along `axis` only, as it broadcasts over a tensor of `shape`, reshaped to [C], or to [1]
    if it is one number; None for any other constant.
    """
    dims = (1,) * (len(shape) - array.ndim) + array.shape
    if len(dims) != len(shape) or any(d != 1 for i, d in enumerate(dims) if i != axis):
        return None
    if array.size not in (1, shape[axis] if len(shape) > axis else 1):
        return None
    return array.reshape(-1)
