"""Lowers operators without a kernel, and operators over integers and truth values, to library functions."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from gpu_runtime.frontend.queries import Value, attribute, constant, operand, shape_of, type_of
from gpu_runtime.lowering.convolutions import window
from gpu_runtime.lowering.moves import Refused, Weights, constants, nchw, sliced
from gpu_runtime.lowering.units import Unit
from tactics.problems.array_functions import FUNCTIONS, OF_INTEGERS, SCATTERED
from tactics.problems.library_problem import EXACT, FLOAT, LibraryProblem
from tactics.problems.operators import REDUCE, RESHAPES

NUMPY = {"float32": "fp32"} | {name: name for name in EXACT}
AS = dict.fromkeys(RESHAPES, "Reshape")
MOST_TAPS = 65_536  # of a window along one axis, of a Conv in all: a library function takes a step for each
Attributes = dict[str, Any]


def takes(unit: Unit) -> bool:
    """Whether a library function computes the unit: no kernel does, or some of its tensors are not floating-point."""
    function, exact = AS.get(unit.op, unit.op), any(type_of(v) != FLOAT for v in (*unit.inputs, unit.output))
    if function == "Gather":
        return constant(unit.node.inputs[1]) is None or exact
    if function == "Conv":
        return "w" not in unit.weights
    return function in FUNCTIONS and (function not in OF_INTEGERS or exact)


def problem(unit: Unit) -> tuple[LibraryProblem, Weights]:
    """Returns (the problem, its constants c0, c1, ... as stored). Raises Refused."""
    node = unit.node
    function = AS.get(unit.op, unit.op)
    attributes: Attributes = {name: attribute(node, name) for name in node.attributes}
    if (rule := RULES.get(unit.op)) is not None:
        attributes = rule(unit, attributes)
    taps, among = (math.prod, "in all") if function == "Conv" else (max, "along each axis")
    if taps((1, *attributes.get("kernel_shape", ()))) > MOST_TAPS:
        raise Refused(f"a window of {list(attributes['kernel_shape'])}; expected {MOST_TAPS} at most {among}")
    values = list(node.inputs)[: 1 if unit.op in FIRST_ALONE else None]
    arguments, inputs, weights = _arguments(values)
    shapes, shape = tuple(map(shape_of, inputs)), shape_of(unit.output)
    stored = tuple((a.shape, NUMPY[a.dtype.name]) for a in weights.values())
    return LibraryProblem(
        function,
        arguments,
        shapes,
        tuple(map(_type, inputs)),
        shape,
        _type(unit.output),
        tuple(map(nchw, (*shapes, shape))),
        tuple(sorted(attributes.items())),
        stored,
        node.outputs.index(unit.output),
    ), weights


def _arguments(values: Sequence[Value | None]) -> tuple[tuple[str, ...], list[Value], Weights]:
    """Returns (for each value "" if absent, "c0", ... for a constant, "t0", ... for a tensor; the tensors; the constants)."""
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
        raise Refused(f"{value.name!r} is of type {value.dtype}, expected float or {', '.join(EXACT)}")
    return found


# ---- attributes, spelled out


def _rank(unit: Unit) -> int:
    return len(shape_of(operand(unit.node)))


def _cumulated(unit: Unit, attributes: Attributes) -> Attributes:
    axis = int(constants(unit, 1)[0][0])
    if not -_rank(unit) <= axis < _rank(unit):
        raise Refused(f"its axis {axis} is outside the {_rank(unit)} axes of its input")
    return attributes | {"axis": axis}


def _normalized(unit: Unit, attributes: Attributes) -> Attributes:
    reach = min(attributes["size"], 2 * shape_of(unit.inputs[0])[1])
    if reach > MOST_TAPS:
        raise Refused(f"a window of {reach} channels; expected {MOST_TAPS} at most")
    return attributes


def _parts(unit: Unit, attributes: Attributes) -> Attributes:
    axis = attributes.get("axis", 0) % _rank(unit)
    return {"axis": axis, "sizes": tuple(shape_of(y)[axis] for y in unit.node.outputs)}


def _to(unit: Unit, attributes: Attributes) -> Attributes:
    dtype = _type(unit.output)
    return {"to": "float32" if dtype == FLOAT else dtype}


def _shape(unit: Unit, attributes: Attributes) -> Attributes:
    return {"out": shape_of(unit.output)}


def _slices(unit: Unit, attributes: Attributes) -> Attributes:
    """Returns Slice's constant inputs as first elements, counts and steps along each axis."""
    rows = sliced(unit)
    return {
        "axes": tuple(rows),
        "starts": tuple(r.start for r in rows.values()),
        "counts": tuple(map(len, rows.values())),
        "steps": tuple(r.step for r in rows.values()),
    }


def _reduction(unit: Unit, attributes: Attributes) -> Attributes:
    """Returns the axes of the second input counted from 0; all axes where none are given and noop_with_empty_axes is 0."""
    axes, rank = constants(unit, 1)[0], len(shape_of(unit.inputs[0]))
    if not axes and not attributes.get("noop_with_empty_axes", 0):
        axes = list(range(rank))
    return {"axes": tuple(int(a) % rank for a in axes), "keepdims": attributes.get("keepdims", 1)}


def _windows(unit: Unit, attributes: Attributes, crop: bool = True) -> Attributes:
    """Returns the attributes of a pool, or of a Conv with computed weights: kernel_shape, strides, dilations, pads (of auto_pad
    too), and "out", the output's height and width. `crop`: pads may be negative, as `convolutions.window` says.
    """
    size, out = shape_of(operand(unit.node))[2:], shape_of(unit.output)[2:]
    strides, dilations, pads = window(unit.node, attributes["kernel_shape"], size, crop)
    return {"kernel_shape": attributes["kernel_shape"], "strides": strides, "dilations": dilations, "pads": pads, "out": out}


def _computed_weights(unit: Unit, attributes: Attributes) -> Attributes:
    x, w, group = shape_of(operand(unit.node)), shape_of(operand(unit.node, 1)), attributes.get("group", 1)
    if attributes.get("kernel_shape", w[2:]) != w[2:] or w[1] * group != x[1] or w[0] % group:
        raise Refused(f"weights {list(w)} in {group} group(s) do not fit its input {list(x)}")
    return _windows(unit, {"kernel_shape": w[2:]}, crop=False) | {"group": group}


def _scattered(unit: Unit, attributes: Attributes) -> Attributes:
    known, found = SCATTERED if _type(unit.output) == FLOAT else (), attributes.get("reduction", "none")
    if found not in ("none", *known):
        raise Refused(f"expected the reduction none{''.join(f', {name}' for name in known)}, got {found}")
    return attributes


RULES: Mapping[str, Callable[[Unit, Attributes], Attributes]] = {
    "TopK": lambda unit, attributes: attributes | {"k": int(constants(unit, 1)[0][0])},
    "Tile": lambda unit, attributes: {"repeats": tuple(map(int, constants(unit, 1)[0]))},
    "Transpose": lambda unit, attributes: {"perm": tuple(reversed(range(_rank(unit))))} | attributes,
    "LpPool": lambda unit, attributes: _windows(unit, attributes) | {"p": attributes.get("p", 2)},
    "MaxPool": lambda unit, attributes: _windows(unit, attributes) | {"storage_order": attributes.get("storage_order", 0)},
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
