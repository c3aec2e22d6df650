"""Questions about an onnx-ir graph: constants, attributes, shapes, readers. Values and nodes are onnx-ir's."""

from __future__ import annotations

import numpy as np

from tactics.problems.library import EXACT, FLOAT


def constant(value) -> np.ndarray | None:
    """The array of a stored constant, else None."""
    return None if value is None or value.const_value is None else value.const_value.numpy()


def attribute(node, name: str, default=None):
    """An attribute's Python value (strings as str, lists as tuple), or the default."""
    found = node.attributes.get(name)
    return default if found is None else tuple(found.value) if isinstance(found.value, (list, tuple)) else found.value


def shape_of(value) -> tuple[int, ...]:
    """The static ONNX shape."""
    return tuple(int(d) for d in value.shape)


TYPES = {"FLOAT": FLOAT} | {name.upper(): name for name in EXACT}


def type_of(value) -> str | None:
    """What a tensor's elements are in memory: fp16 if floating-point (all are FP32 in the graph), else as they are."""
    return None if value.dtype is None else TYPES.get(value.dtype.name)


def single_reader(value):
    """The one node that reads `value`, exactly once, if it is no network output."""
    uses = list(value.uses())
    return uses[0].node if len(uses) == 1 and not value.is_graph_output() else None


def per_channel(array: np.ndarray, shape: tuple[int, ...], axis: int = 1) -> np.ndarray | None:
    """A constant that broadcasts over a tensor of `shape` along `axis` only -> [C] or [1]; None if it does otherwise."""
    dims = (1,) * (len(shape) - array.ndim) + array.shape
    if len(dims) != len(shape) or any(d != 1 for i, d in enumerate(dims) if i != axis):
        return None
    if array.size not in (1, shape[axis] if len(shape) > axis else 1):
        return None
    return array.reshape(-1)


def scale_and_shift(node, x, axis: int = 1) -> tuple[np.ndarray, np.ndarray] | None:
    """FP64 (scale, shift), each [C] or [1] along `axis`, if node computes x * scale + shift with constants, else None."""
    one, zero = np.ones(1), np.zeros(1)
    if node.op_type == "BatchNormalization":
        stats = [constant(v) for v in node.inputs[1:5]]
        if axis != 1 or x is not node.inputs[0] or any(a is None for a in stats) or attribute(node, "training_mode", 0):
            return None
        if any(a.shape != (shape_of(x)[1],) for a in stats):
            return None
        gamma, beta, mean, var = (a.astype(np.float64) for a in stats)
        with np.errstate(all="ignore"):  # lower refuses what is not finite
            scale = gamma / np.sqrt(var + attribute(node, "epsilon", 1e-5))
            return scale, beta - mean * scale
    if node.op_type not in ("Add", "Sub", "Mul", "Div") or shape_of(node.outputs[0]) != shape_of(x):
        return None
    a, b = node.inputs
    other = constant(b if a is x else a)
    c = None if other is None else per_channel(other.astype(np.float64), shape_of(x), axis)
    if c is None:
        return None
    if node.op_type == "Add":
        return one, c
    if node.op_type == "Sub":
        return (one, -c) if a is x else (-one, c)
    if node.op_type == "Mul":
        return c, zero
    return (1 / c, zero) if a is x and np.all(c) else None
