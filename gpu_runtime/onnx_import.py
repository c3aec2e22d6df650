"""ONNX file -> a clean onnx-ir graph: one opset, static shapes, FP32 constants, nothing left that constants decide.

In order: load, check in Python (onnx's C++ converter may abort on broken graphs), prune the stored weights if asked,
fix the input sizes, convert to one opset, erase FP16 (the runtime's tensors are all FP16; constants stay FP32 until
they are folded and rounded once), fold constants, infer shapes. Every complaint is a ModelError of one clear message.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import onnx
import onnx_ir as ir
from onnx import TensorProto, shape_inference, version_converter

from cuda_kernels.compile import write_atomic
from gpu_runtime.errors import ModelError
from gpu_runtime.onnx_check import FLOATS, LARGEST_TENSOR, check_graph, check_ops, check_schema, check_sizes, check_values
from gpu_runtime.onnx_clean import clean
from gpu_runtime.onnx_load import first_line, load_whole, named, opset_version, stored_tensors
from gpu_runtime.onnx_weights import int_attribute, name_nodes, prune_weights
from tactics.library_problem import EXACT

OPSET = 21  # every model is converted to this one

# What fuse and lower understand. Anything else must vanish by constant folding or is listed as unsupported.
OPS = {
    "Abs", "Acos", "Acosh", "Add", "And", "ArgMax", "ArgMin", "Asin", "Asinh", "Atan", "Atanh", "AveragePool",
    "BatchNormalization", "Cast", "Ceil", "Celu", "Clip", "Concat", "Constant", "Conv", "ConvTranspose", "Cos", "Cosh",
    "CumSum", "DepthToSpace", "Div", "Dropout", "Elu", "Equal", "Erf", "Exp", "Expand", "Flatten", "Floor", "Gather",
    "GatherElements", "GatherND", "Gelu", "Gemm", "GlobalAveragePool", "GlobalLpPool", "GlobalMaxPool", "Greater",
    "GreaterOrEqual", "GridSample", "GroupNormalization", "HardSigmoid", "HardSwish", "Hardmax", "Identity",
    "InstanceNormalization", "IsInf", "IsNaN", "LRN", "LayerNormalization", "LeakyRelu", "Less", "LessOrEqual", "Log",
    "LogSoftmax", "LpNormalization", "LpPool", "MatMul", "Max", "MaxPool", "Mean", "Min", "Mish", "Mod", "Mul", "Neg",
    "Not", "Or", "PRelu", "Pad", "Pow", "Reciprocal", "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp",
    "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum", "ReduceSumSquare", "Relu", "Reshape", "Resize",
    "Round", "Selu", "Shrink", "Sigmoid", "Sign", "Sin", "Sinh", "Slice", "Softmax", "Softplus", "Softsign",
    "SpaceToDepth", "Split", "Sqrt", "Squeeze", "Sub", "Sum", "Tan", "Tanh", "ThresholdedRelu", "Tile", "TopK",
    "Transpose", "Unsqueeze", "Upsample", "Where", "Xor",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Imported:
    """`model`: the cleaned graph, FP32 throughout. `dtypes`: of every network input and output as declared, "fp32", "fp16" or
    one of EXACT.

    `pruned`: initializers changed to 2:4; `not_pruned`: (initializer, reason) of those that cannot be.
    """

    model: ir.Model
    name: str
    dtypes: Mapping[str, str]
    pruned: tuple[str, ...] = ()
    not_pruned: tuple[tuple[str, str], ...] = ()


def read(
    path: str | os.PathLike,
    *,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    prune: bool = False,
    save_pruned: str | os.PathLike | BinaryIO | None = None,
) -> Imported:
    """Read and clean the model at `path`; `shapes` gives each dynamic input its ONNX shape, {"x": (1, 3, 224, 224)}.

    With `prune`, the two smallest of each four consecutive input channels of the stored weights become zero first, and
    `save_pruned` (a path, or a file opened for writing bytes) gets that very model as ONNX, all else as it was. Raises
    ModelError; OSError if `save_pruned` cannot be written.
    """
    path = Path(path)
    if save_pruned is not None and not prune:
        raise ValueError("save_pruned is given without prune: there is no pruned model to save")
    with named(path):
        proto = load_whole(path)
        as_stored = onnx.ModelProto()
        as_stored.CopyFrom(proto)
        check_graph(proto.graph)
        check_ops(proto, OPS)
        check_values(proto.graph)
        pruned, not_pruned = prune_weights(proto.graph) if prune else ((), ())
        dtypes = _dtypes(proto.graph)
        weights = {name: t for name, t in stored_tensors(proto.graph) if name in pruned}
        _fix_inputs(proto.graph, shapes or {})
        name_nodes(proto.graph.node)
        check_schema(proto)
        check_sizes(proto)
        model = clean(_convert(proto))
    if save_pruned is not None:
        for name, t in stored_tensors(as_stored.graph):
            if name in weights:
                t.CopyFrom(weights[name])
        save(save_pruned, as_stored.SerializeToString())
    return Imported(model, path.stem, dtypes, pruned, not_pruned)


def save(target: str | os.PathLike | BinaryIO, data: bytes) -> None:
    """Write `data` to a binary file object, or to a path by rename."""
    if hasattr(target, "write"):
        target.write(data)
    else:
        write_atomic(Path(target), data)


def _dtypes(graph: onnx.GraphProto) -> dict[str, str]:
    found, types = {}, FLOATS | {TensorProto.DataType.Value(name.upper()): name for name in EXACT}
    for kind, values in (("input", graph.input), ("output", graph.output)):
        for v in values:
            t = v.type.tensor_type.elem_type
            found[v.name] = types.get(t)
            if found[v.name] in (None, "bf16", "fp64"):
                got = TensorProto.DataType.Name(t).lower() if t else "no tensor type"
                raise ModelError(
                    f"{kind} {v.name!r}: expected float32, float16, int32, int64 or bool, got {got}: cast it outside the model"
                )
    return found


def _fix_inputs(graph: onnx.GraphProto, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Give every input its static shape, and forget the shapes of everything else: they follow."""
    names = [v.name for v in graph.input]
    if unknown := [n for n in shapes if n not in names]:
        raise ModelError(f"a shape is given for {unknown[0]!r}, but the inputs are {', '.join(map(repr, names))}")
    missing = []
    for v in graph.input:
        t = v.type.tensor_type
        ranked = t.HasField("shape")
        dims = [d.dim_value if d.HasField("dim_value") else d.dim_param or "?" for d in t.shape.dim]
        given = tuple(shapes.get(v.name, ()))
        text = "x".join(map(str, dims)) if ranked else "unknown"
        if v.name not in shapes:
            if not ranked or any(isinstance(d, str) for d in dims):
                usual = (1, 3, 224, 224) if len(dims) == 4 else (1,) * len(dims)
                example = [d if isinstance(d, int) else u for d, u in zip(dims, usual, strict=True)]
                missing.append((v.name, text, example or ["N", "C", "H", "W"]))
                continue
            given = tuple(dims)
        elif ranked and (
            len(given) != len(dims) or any(isinstance(d, int) and d != g for d, g in zip(dims, given, strict=True))
        ):
            raise ModelError(
                f"input {v.name!r}: the model declares {text}, the shape given is {'x'.join(map(str, given))}; "
                "only what is dynamic can be chosen"
            )
        if not (given or ranked) or min(given, default=1) < 1 or math.prod(given) > LARGEST_TENSOR:
            raise ModelError(
                f"input {v.name!r}: expected sizes of at least 1 and {LARGEST_TENSOR} elements at most, "
                f"got {'x'.join(map(str, given)) or 'none'}"
            )
        t.ClearField("shape")
        t.shape.SetInParent()  # a scalar has a shape too
        for g in given:
            t.shape.dim.add().dim_value = int(g)
    if missing:
        listed = ", ".join(f"{n!r} ({text})" for n, text, _ in missing)
        cure = ",".join(f"{n}:{'x'.join(map(str, example))}" for n, _, example in missing)
        raise ModelError(f"the size of input {listed} is dynamic: give it, for example --shapes={cure}")
    del graph.value_info[:]


def _align_by_axis(graph: onnx.GraphProto) -> None:
    """Before opset 7 a second operand's axes began at the first's axis `axis`, and PRelu's slopes were one per channel: give
    stored ones the ones after their last axis that NumPy's rule needs."""
    tensors = {t.name: t for t in graph.initializer}
    ranks = {v.name: len(v.type.tensor_type.shape.dim) for v in (*graph.input, *graph.value_info)}
    for node in graph.node:
        axis = 1 if node.op_type == "PRelu" else int_attribute(node, "axis", -1)
        t = tensors.get(node.input[1]) if len(node.input) == 2 else None
        more = ranks.get(node.input[0], 0) - axis - len(t.dims) if t is not None else 0
        aligned = node.op_type == "PRelu" or (axis >= 0 and int_attribute(node, "broadcast", 0))
        if not aligned or more <= 0 or math.prod(t.dims) == 1:
            continue
        copy = graph.initializer.add()
        copy.CopyFrom(t)
        copy.name = f"{node.name}_aligned"
        copy.dims.extend([1] * more)
        node.input[1] = copy.name
        kept = [a for a in node.attribute if a.name != "axis"]
        del node.attribute[:]
        node.attribute.extend(kept)


def _convert(proto: onnx.ModelProto) -> onnx.ModelProto:
    opset = opset_version(proto)
    if opset < 7:
        proto = shape_inference.infer_shapes(proto)
        _align_by_axis(proto.graph)
    for v in proto.graph.output:
        v.type.tensor_type.ClearField("shape")  # declared sizes may contradict those that follow from the inputs
    try:
        converted = proto if opset == OPSET else version_converter.convert_version(proto, OPSET)
    except Exception as e:
        raise ModelError(f"cannot be converted from opset {opset} to {OPSET}: {first_line(e)}") from e
    try:
        shape_inference.infer_shapes(converted, check_type=True, strict_mode=True, data_prop=True)
    except Exception as e:
        raise ModelError(f"its shapes or types contradict each other: {first_line(e)}") from e
    for node in converted.graph.node:
        if node.op_type == "Resize" and opset < 11:  # the converter loses Upsample's and Resize-10's meaning
            kept = [a for a in node.attribute if a.name not in ("coordinate_transformation_mode", "nearest_mode")]
            del node.attribute[:]
            node.attribute.extend(kept)
            node.attribute.append(onnx.helper.make_attribute("coordinate_transformation_mode", "asymmetric"))
            node.attribute.append(onnx.helper.make_attribute("nearest_mode", "floor"))
    return converted
