"""Operators without a kernel, and those over integers and truth values -> library functions: attributes, constants, types."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from gpu_runtime.frontend.queries import Value, attribute, constant, operand, shape_of, type_of
from gpu_runtime.fusion.layers import Layer
from gpu_runtime.lowering.convolutions import window
from gpu_runtime.lowering.moves import Refused, Weights, constants, nchw
from tactics.problems.array_functions import FUNCTIONS, OF_INTEGERS, SCATTERED
from tactics.problems.library_problem import FLOAT, LibraryProblem
from tactics.problems.operators import REDUCE, RESHAPES

NUMPY = {"float32": "fp32", "int32": "int32", "int64": "int64", "bool": "bool"}
AS = dict.fromkeys(RESHAPES, "Reshape")
MOST_TAPS = 65_536  # of a window along one axis, of a Conv in all: a library function takes a step for each
Attributes = dict[str, Any]


def takes(layer: Layer) -> bool:
    """Whether a library function computes the layer: nothing else does, or it is not about floating-point tensors alone."""
    function, exact = AS.get(layer.op, layer.op), any(type_of(v) != FLOAT for v in (*layer.inputs, layer.output))
    if function == "Gather":
        return constant(layer.node.inputs[1]) is None or exact
    if function == "Conv":
        return "w" not in layer.weights
    return function in FUNCTIONS and (function not in OF_INTEGERS or exact)


def problem(layer: Layer) -> tuple[LibraryProblem, Weights]:
    """The problem, and its constants c0, c1, ... as stored. Raises Refused."""
    node = layer.node
    function = AS.get(layer.op, layer.op)
    attributes: Attributes = {name: attribute(node, name) for name in node.attributes}
    if (rule := RULES.get(layer.op)) is not None:
        attributes = rule(layer, attributes)
    taps, among = (math.prod, "in all") if function == "Conv" else (max, "along each axis")
    if taps((1, *attributes.get("kernel_shape", ()))) > MOST_TAPS:
        raise Refused(f"a window of {list(attributes['kernel_shape'])}; expected {MOST_TAPS} at most {among}")
    values = list(node.inputs)[: 1 if layer.op in FIRST_ALONE else None]
    arguments, inputs, weights = _arguments(values)
    shapes, shape = tuple(map(shape_of, inputs)), shape_of(layer.output)
    stored = tuple((a.shape, NUMPY[a.dtype.name]) for a in weights.values())
    return LibraryProblem(
        function,
        arguments,
        shapes,
        tuple(map(_type, inputs)),
        shape,
        _type(layer.output),
        tuple(map(nchw, (*shapes, shape))),
        tuple(sorted(attributes.items())),
        stored,
        node.outputs.index(layer.output),
    ), weights


def _arguments(values: Sequence[Value | None]) -> tuple[tuple[str, ...], list[Value], Weights]:
    """(of each value what it is to the function: "" if absent, a constant "c0", a tensor "t0"; the tensors; the constants)."""
    arguments, inputs, weights = list[str](), list[Value](), Weights()
    for v in values:
        array = constant(v)
        if v is None:
            arguments.append("")
        elif array is None:
            arguments.append(f"t{len(inputs)}")
            inputs.append(v)
        elif array.dtype.name not in NUMPY:
            raise Refused(f"its constant {v.name!r} is of type {array.dtype.name}, expected one of {', '.join(NUMPY)}")
        else:
            arguments.append(f"c{len(weights)}")
            weights[arguments[-1]] = np.asarray(array)
    return tuple(arguments), inputs, weights


def _type(value: Value) -> str:
    found = type_of(value)
    if found is None:
        raise Refused(f"{value.name!r} is of type {value.dtype}, expected float, int32, int64 or bool")
    return found


# ---- attributes, spelled out


def _rank(layer: Layer) -> int:
    return len(shape_of(operand(layer.node)))


def _cumulated(layer: Layer, attributes: Attributes) -> Attributes:
    axis = int(constants(layer, 1)[0][0])
    if not -_rank(layer) <= axis < _rank(layer):
        raise Refused(f"its axis {axis} is outside the {_rank(layer)} axes of its input")
    return attributes | {"axis": axis}


def _normalized(layer: Layer, attributes: Attributes) -> Attributes:
    reach = min(attributes["size"], 2 * shape_of(layer.inputs[0])[1])
    if reach > MOST_TAPS:
        raise Refused(f"a window of {reach} channels; expected {MOST_TAPS} at most")
    return attributes


def _parts(layer: Layer, attributes: Attributes) -> Attributes:
    axis = attributes.get("axis", 0) % _rank(layer)
    return {"axis": axis, "sizes": tuple(shape_of(y)[axis] for y in layer.node.outputs)}


def _to(layer: Layer, attributes: Attributes) -> Attributes:
    dtype = _type(layer.output)
    return {"to": "float32" if dtype == FLOAT else dtype}


def _shape(layer: Layer, attributes: Attributes) -> Attributes:
    return {"out": shape_of(layer.output)}


def _slices(layer: Layer, attributes: Attributes) -> Attributes:
    """Slice's constant inputs as first elements, numbers of them and steps along each axis."""
    starts, ends, axes, steps = constants(layer, 1, 2, 3, 4)
    shape = shape_of(layer.inputs[0])
    axes = [int(a) % len(shape) for a in axes or range(len(starts))]
    rows = [
        range(*slice(a, b, step).indices(shape[axis]))
        for a, b, step, axis in zip(starts, ends, steps or [1] * len(axes), axes, strict=True)
    ]
    return {
        "axes": tuple(axes),
        "starts": tuple(r.start for r in rows),
        "counts": tuple(map(len, rows)),
        "steps": tuple(r.step for r in rows),
    }


def _reduction(layer: Layer, attributes: Attributes) -> Attributes:
    """Axes counted from 0, wherever they stand; all where none are given, unless those mean none."""
    axes, rank = constants(layer, 1)[0], len(shape_of(layer.inputs[0]))
    if not axes and not attributes.get("noop_with_empty_axes", 0):
        axes = list(range(rank))
    return {"axes": tuple(int(a) % rank for a in axes), "keepdims": attributes.get("keepdims", 1)}


def _windows(layer: Layer, attributes: Attributes, crop: bool = True) -> Attributes:
    """A pool's attributes, or a Conv's, with pads, strides and the output's size spelled out."""
    size, out = shape_of(operand(layer.node))[2:], shape_of(layer.output)[2:]
    strides, dilations, pads = window(layer.node, attributes["kernel_shape"], size, crop)
    return {"kernel_shape": attributes["kernel_shape"], "strides": strides, "dilations": dilations, "pads": pads, "out": out}


def _computed_weights(layer: Layer, attributes: Attributes) -> Attributes:
    x, w, group = shape_of(operand(layer.node)), shape_of(operand(layer.node, 1)), attributes.get("group", 1)
    if attributes.get("kernel_shape", w[2:]) != w[2:] or w[1] * group != x[1] or w[0] % group:
        raise Refused(f"weights {list(w)} in {group} group(s) do not fit its input {list(x)}")
    return _windows(layer, {"kernel_shape": w[2:]}, crop=False) | {"group": group}


def _scattered(layer: Layer, attributes: Attributes) -> Attributes:
    known, found = SCATTERED if _type(layer.output) == FLOAT else (), attributes.get("reduction", "none")
    if found not in ("none", *known):
        raise Refused(f"expected the reduction none{''.join(f', {name}' for name in known)}, got {found}")
    return attributes


RULES: Mapping[str, Callable[[Layer, Attributes], Attributes]] = {
    "TopK": lambda layer, attributes: attributes | {"k": int(constants(layer, 1)[0][0])},
    "Tile": lambda layer, attributes: {"repeats": tuple(map(int, constants(layer, 1)[0]))},
    "Transpose": lambda layer, attributes: {"perm": tuple(reversed(range(_rank(layer))))} | attributes,
    "LpPool": lambda layer, attributes: _windows(layer, attributes) | {"p": attributes.get("p", 2)},
    "MaxPool": lambda layer, attributes: _windows(layer, attributes) | {"storage_order": attributes.get("storage_order", 0)},
    "CumSum": _cumulated,
    "Slice": _slices,
    "Cast": _to,
    "LRN": _normalized,
    "Conv": _computed_weights,
    **dict.fromkeys(("ScatterElements", "ScatterND"), _scattered),
    "Split": _parts,
    **dict.fromkeys((*RESHAPES, "Expand"), _shape),
    **dict.fromkeys(REDUCE, _reduction),
}
# Operators whose other inputs are attributes of the function.
FIRST_ALONE = {"TopK", "CumSum", "Tile", "Slice", "Split", "Expand", *RESHAPES, *REDUCE}
