"""Operators without a kernel, and those over integers and truth values -> library functions: attributes, constants, types."""

from __future__ import annotations

import numpy as np

from gpu_runtime.frontend.layers import Layer
from gpu_runtime.frontend.queries import attribute, constant, shape_of, type_of
from gpu_runtime.lowering.convolutions import begins
from gpu_runtime.lowering.moves import Refused, constants, nchw
from gpu_runtime.lowering.reductions import REDUCE
from tactics.problems.library import FLOAT, LibraryProblem
from tactics.problems.library_functions import FUNCTIONS

NUMPY = {"float32": "fp32", "int32": "int32", "int64": "int64", "bool": "bool"}
AS = dict.fromkeys(("Flatten", "Squeeze", "Unsqueeze"), "Reshape")
# Functions for what has kernels where it is floating-point.
KERNELS = (
    "Add", "Sub", "Mul", "Div", "Neg", "Max", "Min", "Abs", "Identity", "Reshape", "Transpose", "Concat", "Slice", "Expand",
    "Tile", "Split", "MaxPool", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceSum",
)  # fmt: skip
MOST_TAPS = 65_536  # of a window along one axis: a library function takes a step for each
STATIC = {"TopK": "k", "CumSum": "axis"}  # operators whose input 1, a constant, decides the output's size or the axis


def takes(layer: Layer) -> bool:
    """Whether a library function computes the layer: nothing else does, or it is not about floating-point tensors alone."""
    function, exact = AS.get(layer.op, layer.op), any(type_of(v) != FLOAT for v in (*layer.inputs, layer.output))
    if function == "Gather":
        return constant(layer.node.inputs[1]) is None or exact
    return function in FUNCTIONS and (function not in KERNELS or exact)


def problem(layer: Layer) -> tuple[LibraryProblem, dict[str, np.ndarray]]:
    """The problem, and its constants c0, c1, ... as stored. Raises Refused."""
    node = layer.node
    function, attributes = AS.get(layer.op, layer.op), {name: attribute(node, name) for name in node.attributes}
    values = list(node.inputs)
    if layer.op in STATIC:
        attributes[STATIC[layer.op]] = int(constants(layer, 1)[0][0])
        values = values[:1]
    if layer.op == "Tile":
        attributes, values = {"repeats": tuple(map(int, constants(layer, 1)[0]))}, values[:1]
    if layer.op == "Slice":
        attributes, values = _slices(layer), values[:1]
    if function in ("Reshape", "Expand"):
        attributes, values = {"out": shape_of(layer.output)}, values[:1]
    if layer.op == "Transpose":
        attributes.setdefault("perm", tuple(reversed(range(len(shape_of(values[0]))))))
    if layer.op == "Cast":
        attributes = {"to": {FLOAT: "float32"}.get(type_of(layer.output), type_of(layer.output))}
    if layer.op == "LpPool":
        attributes = _windows(layer) | {"p": attributes.get("p", 2)}
    if layer.op == "MaxPool":
        attributes = _windows(layer) | {"storage_order": attributes.get("storage_order", 0)}
    if layer.op == "CumSum" and not -len(shape_of(values[0])) <= attributes["axis"] < len(shape_of(values[0])):
        raise Refused(f"its axis {attributes['axis']} is none of its input's {len(shape_of(values[0]))}")
    if layer.op == "LRN" and (reach := min(attributes["size"], 2 * shape_of(values[0])[1])) > MOST_TAPS:
        raise Refused(f"a window of {reach} channels; expected {MOST_TAPS} at most")
    if max(attributes.get("kernel_shape", ()), default=0) > MOST_TAPS:
        raise Refused(f"a window of {list(attributes['kernel_shape'])}; expected {MOST_TAPS} at most along each axis")
    if layer.op == "Split":
        axis = attributes.get("axis", 0) % len(shape_of(values[0]))
        attributes, values = {"axis": axis, "sizes": tuple(shape_of(y)[axis] for y in node.outputs)}, values[:1]
    if layer.op in REDUCE:
        attributes, values = _reduction(layer, attributes), values[:1]
    arguments, inputs, weights = [], [], {}
    for v in values:
        array = constant(v)
        if v is None:
            arguments.append("")
        elif array is not None:
            arguments.append(f"c{len(weights)}")
            if array.dtype.name not in NUMPY:
                raise Refused(f"its constant {v.name!r} is of type {array.dtype.name}, expected one of {', '.join(NUMPY)}")
            weights[arguments[-1]] = np.asarray(array)
        else:
            arguments.append(f"t{len(inputs)}")
            inputs.append(v)
    for v in (*inputs, layer.output):
        if type_of(v) is None:
            raise Refused(f"{v.name!r} is of type {v.dtype}, expected float, int32, int64 or bool")
    shapes, shape = tuple(map(shape_of, inputs)), shape_of(layer.output)
    stored = tuple((a.shape, NUMPY[a.dtype.name]) for a in weights.values())
    return LibraryProblem(
        function, tuple(arguments), shapes, tuple(map(type_of, inputs)), shape, type_of(layer.output),
        tuple(map(nchw, (*shapes, shape))), tuple(sorted(attributes.items())), stored, node.outputs.index(layer.output),
    ), weights  # fmt: skip


def _slices(layer: Layer) -> dict:
    """Slice's constant inputs as first elements, numbers of them and steps along each axis."""
    starts, ends, axes, steps = constants(layer, 1, 2, 3, 4)
    shape = shape_of(layer.inputs[0])
    axes = [int(a) % len(shape) for a in axes or range(len(starts))]
    rows = [range(*slice(a, b, step).indices(shape[axis]))
            for a, b, step, axis in zip(starts, ends, steps or [1] * len(axes), axes, strict=True)]  # fmt: skip
    return {"axes": tuple(axes), "starts": tuple(r.start for r in rows), "counts": tuple(map(len, rows)),
            "steps": tuple(r.step for r in rows)}  # fmt: skip


def _reduction(layer: Layer, attributes: dict) -> dict:
    """Axes counted from 0, wherever they stand; all where none are given, unless those mean none."""
    axes, rank = constants(layer, 1)[0], len(shape_of(layer.inputs[0]))
    if not axes:
        axes = () if attributes.get("noop_with_empty_axes", 0) else range(rank)
    return {"axes": tuple(int(a) % rank for a in axes), "keepdims": attributes.get("keepdims", 1)}


def _windows(layer: Layer) -> dict:
    """A pool's attributes with pads, strides and the output's size spelled out."""
    attributes = {name: attribute(layer.node, name) for name in layer.node.attributes}
    size, out = shape_of(layer.inputs[0])[2:], shape_of(layer.output)[2:]
    n, kernel = len(size), attributes["kernel_shape"]
    strides, dilations = (attributes.get(name, (1,) * n) for name in ("strides", "dilations"))
    pads, mode = tuple(attributes.get("pads", (0,) * (2 * n))), attributes.get("auto_pad", "NOTSET")
    if mode.startswith("SAME"):
        reach = [(o - 1) * s + (k - 1) * d + 1 for o, s, k, d in zip(out, strides, kernel, dilations, strict=True)]
        total = [r - i for r, i in zip(reach, size, strict=True)]
        pads = tuple(begins(t, mode) for t in total) * 2
    return {"kernel_shape": kernel, "strides": strides, "dilations": dilations, "pads": pads, "out": out}
