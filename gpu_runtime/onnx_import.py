"""ONNX file -> a clean onnx-ir graph: one opset, static shapes, FP32 constants, nothing left that constants decide.

In order: load, check in Python (onnx's C++ converter may abort on broken graphs), prune the stored weights if asked,
fix the input sizes, convert to one opset, erase FP16 (the runtime's tensors are all FP16; constants stay FP32 until
they are folded and rounded once), fold constants, infer shapes. Every complaint is a ModelError of one clear message.
"""

from __future__ import annotations

import graphlib
import math
import os
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import onnx
import onnx_ir as ir
from onnx import TensorProto, checker, inliner, numpy_helper, shape_inference, version_converter

from cuda_kernels import sparse24
from cuda_kernels.compile import write_atomic
from gpu_runtime.errors import ModelError

OPSET = 21  # every model is converted to this one
OLDEST_OPSET = 6
LARGEST_TENSOR = 2**31 - 1  # elements
NOT_UTF8 = "expected names in UTF-8, got other bytes: the file is damaged, export or download it again"
FLOATS = {
    TensorProto.FLOAT: "fp32", TensorProto.FLOAT16: "fp16", TensorProto.BFLOAT16: "bf16", TensorProto.DOUBLE: "fp64",
}  # fmt: skip

# What fuse and lower understand. Anything else must vanish by constant folding or is listed as unsupported.
OPS = {
    "Abs", "Add", "AveragePool", "BatchNormalization", "Cast", "Ceil", "Celu", "Clip", "Concat", "Constant", "Conv",
    "ConvTranspose", "DepthToSpace", "Div", "Dropout", "Elu", "Erf", "Exp", "Expand", "Flatten", "Floor", "Gather", "Gelu",
    "Gemm", "GlobalAveragePool", "GlobalMaxPool", "GroupNormalization", "HardSigmoid", "HardSwish", "Identity",
    "InstanceNormalization", "LayerNormalization", "LeakyRelu", "Log", "LogSoftmax", "MatMul", "Max", "MaxPool", "Mean",
     "Min", "Mish", "Mul", "Neg", "PRelu", "Pad", "Pow", "Reciprocal", "ReduceL1", "ReduceL2",
    "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum", "ReduceSumSquare",
    "Relu", "Reshape", "Resize", "Round", "Selu", "Sigmoid", "Sign", "Slice", "Softmax", "Softplus", "Softsign",
    "SpaceToDepth", "Split", "Sqrt", "Squeeze", "Sub", "Sum", "Tanh", "ThresholdedRelu", "Tile", "Transpose", "Unsqueeze",
    "Upsample",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Imported:
    """`model`: the cleaned graph, FP32 throughout. `dtypes`: declared "fp32" or "fp16" of every network input and output.

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
    with _named(path):
        proto = _load_whole(path)
        as_stored = onnx.ModelProto()
        as_stored.CopyFrom(proto)
        _check_graph(proto.graph)
        _check_ops(proto)
        _check_values(proto.graph)
        pruned, not_pruned = _prune(proto.graph) if prune else ((), ())
        dtypes = _dtypes(proto.graph)
        weights = {name: t for name, t in _tensors(proto.graph) if name in pruned}
        _fix_inputs(proto.graph, shapes or {})
        _name_nodes(proto.graph.node)
        _check_schema(proto)
        _check_sizes(proto)
        model = _clean(_convert(proto))
    if save_pruned is not None:
        for name, t in _tensors(as_stored.graph):
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


# ---- load and check, in Python


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Put the model's path before the message of a ModelError."""
    try:
        yield
    except ModelError as e:
        raise ModelError(f"{path}: {e}") from e.__cause__
    except UnicodeDecodeError:
        raise ModelError(f"{path}: {NOT_UTF8}") from None


def _load_whole(path: Path) -> onnx.ModelProto:
    """The model with its functions inlined and its external data read."""
    proto = _load(path)
    _check_header(proto)
    if proto.functions:
        proto = inliner.inline_local_functions(proto)
    _load_external(proto, path.parent)
    return proto


def _load(path: Path) -> onnx.ModelProto:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise ModelError("no such file; give the path of an ONNX model") from None
    except OSError as e:
        raise ModelError(f"cannot be read: {e.strerror or e}") from None
    try:
        proto = onnx.load_model_from_string(data)
    except Exception:
        raise ModelError(
            f"expected an ONNX model (a protobuf ModelProto), got {len(data)} bytes that do not parse as one; "
            "the file is truncated or of another kind: export or download it again"
        ) from None
    if not proto.opset_import or not proto.graph.node:
        lacks = "nodes" if proto.opset_import else "opset_import"
        raise ModelError(
            f"expected an ONNX model with a graph and an opset, got {len(data)} bytes without {lacks}; "
            "the file is truncated or of another kind: export or download it again"
        )
    return proto


def _tensors(graph: onnx.GraphProto) -> Iterator[tuple[str, TensorProto]]:
    """(name, tensor) of every stored constant: initializers and Constant nodes."""
    for t in graph.initializer:
        yield t.name, t
    for node in graph.node:
        for a in node.attribute:
            if a.type == onnx.AttributeProto.TENSOR:
                yield node.output[0] if node.op_type == "Constant" and node.output else f"value of {_title(node)}", a.t


def _load_external(proto: onnx.ModelProto, folder: Path) -> None:
    for name, t in _tensors(proto.graph):
        if t.data_location != TensorProto.EXTERNAL:
            continue
        info = {e.key: e.value for e in t.external_data}
        location = info.get("location", "")
        target = (folder / location).resolve()
        if not location or os.path.isabs(location) or not target.is_relative_to(folder.resolve()):
            raise ModelError(
                f"initializer {name!r} keeps its data in {location!r}, outside the model's folder; "
                "expected a file beside the model: move it there and correct the location"
            )
        try:
            offset, end = int(info.get("offset", 0)), target.stat().st_size
            length = int(info.get("length", end - offset))
            if offset < 0 or length < 0 or offset + length > end:
                raise ModelError(
                    f"initializer {name!r}: expected {length} bytes at offset {offset} of {location!r}, "
                    f"which has {end}: the file is truncated, fetch it again"
                )
            with open(target, "rb") as f:
                f.seek(offset)
                t.raw_data = f.read(length)
        except (OSError, ValueError) as e:
            if isinstance(e, ModelError):
                raise
            raise ModelError(f"initializer {name!r}: external data {location!r} cannot be read: {e}") from None
        t.data_location = TensorProto.DEFAULT
        del t.external_data[:]


def _opset(proto: onnx.ModelProto) -> int:
    return next((o.version for o in proto.opset_import if o.domain in ("", "ai.onnx")), 0)


def _check_header(proto: onnx.ModelProto) -> None:
    newest, opset = onnx.defs.onnx_opset_version(), _opset(proto)
    if not opset:
        raise ModelError("expected an import of the standard ONNX opset, got none")
    if proto.ir_version > onnx.IR_VERSION or opset > newest:
        raise ModelError(
            f"opset {opset} in IR version {proto.ir_version} is newer than the installed onnx {onnx.__version__} knows "
            f"(opset {newest}, IR version {onnx.IR_VERSION}): pip install -U onnx"
        )
    if opset < OLDEST_OPSET:
        raise ModelError(f"expected opset {OLDEST_OPSET} or newer, got {opset}: export the model again")


def _check_graph(graph: onnx.GraphProto) -> None:
    """Names, order and initializers; nodes out of order are sorted. Initializers are taken off the inputs."""
    names = [v.name for v in (*graph.input, *graph.output, *graph.initializer)]
    for node in graph.node:
        names += [node.op_type, node.domain, node.name, *node.input, *node.output, *(a.name for a in node.attribute)]
    if not all(isinstance(name, str) for name in names):  # protobuf hands out what it cannot decode as bytes
        raise ModelError(NOT_UTF8)
    stored = {t.name for t in graph.initializer}
    if graph.sparse_initializer:
        raise ModelError("sparse_initializer is not supported: store the weights as dense initializers")
    for kind, names in (
        ("input", [v.name for v in graph.input]),
        ("initializer", [t.name for t in graph.initializer]),
        ("output", [v.name for v in graph.output]),
    ):
        if twice := sorted({n for n in names if names.count(n) > 1} if len(set(names)) < len(names) else ()):
            raise ModelError(f"{kind} names must be unique, got twice: {', '.join(map(repr, twice))}")
    inputs = [v for v in graph.input if v.name not in stored]
    del graph.input[:]
    graph.input.extend(inputs)
    if not inputs:
        raise ModelError("the graph has no input that is not an initializer: nothing to run")
    if not graph.output:
        raise ModelError("the graph has no output: nothing to run")
    given = stored | {v.name for v in inputs}
    producer: dict[str, int] = {}
    for i, node in enumerate(graph.node):
        for out in filter(None, node.output):
            if out in given or out in producer:
                other = f"by {_title(graph.node[producer[out]])}" if out in producer else "as an input or initializer"
                raise ModelError(f"tensor {out!r} is defined twice: {other} and by {_title(node)}")
            producer[out] = i
    for node in graph.node:
        for name in filter(None, node.input):
            if name not in given and name not in producer:
                raise ModelError(
                    f"tensor {name!r}, read by {_title(node)}, is no input, initializer or node output: "
                    "an initializer is missing, export the model again"
                )
    for v in graph.output:
        if v.name not in given and v.name not in producer:
            raise ModelError(f"output {v.name!r} is not computed by any node")
    depends = {i: {producer[n] for n in node.input if n in producer} for i, node in enumerate(graph.node)}
    if any(d >= i for i, ds in depends.items() for d in ds):
        try:
            order = list(graphlib.TopologicalSorter(depends).static_order())
        except graphlib.CycleError as e:
            ring = " -> ".join(_title(graph.node[i]) for i in reversed(e.args[1]))
            raise ModelError(f"the graph has a cycle: {ring}") from None
        nodes = [onnx.NodeProto.FromString(graph.node[i].SerializeToString()) for i in order]
        del graph.node[:]
        graph.node.extend(nodes)


def _title(node: onnx.NodeProto) -> str:
    return f"{node.op_type} {node.name or '-> ' + ', '.join(node.output)}"


def _check_ops(proto: onnx.ModelProto) -> None:
    """List every node that neither this runtime nor constant folding can take."""
    versions = {"" if o.domain == "ai.onnx" else o.domain: o.version for o in proto.opset_import}
    constant = {t.name for t in proto.graph.initializer}
    bad = []
    for node in proto.graph.node:
        domain = "" if node.domain == "ai.onnx" else node.domain
        known = not domain and onnx.defs.has(node.op_type, max_inclusive_version=versions[""], domain="")
        nested = any(a.type in (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS) for a in node.attribute)
        if known and not nested and (node.op_type in ("Shape", "Size") or all(n in constant for n in node.input if n)):
            constant.update(node.output)
        elif not known or node.op_type not in OPS:
            bad.append(f"  {_title(node)} ({domain or 'ai.onnx'} {versions.get(domain, '?')})")
    if bad:
        plural = "s" if len(bad) > 1 else ""
        raise ModelError(
            f"{len(bad)} node{plural} of unsupported type, by operator, name, domain and opset:\n"
            + "\n".join(bad)
            + "\nexport the model without them, or compute them outside it; supported are:\n"
            + textwrap.fill(", ".join(sorted(OPS)), 110, initial_indent="  ", subsequent_indent="  ")
        )


def _check_values(graph: onnx.GraphProto) -> None:
    for name, t in _tensors(graph):
        array = _array(name, t)
        if array.dtype.kind != "f" and t.data_type not in FLOATS:
            continue
        wide = array.astype(np.float32) if array.dtype.itemsize == 2 else array
        # A lone infinity may be a bound of Clip or a Pad value.
        if np.isnan(wide).any() or (wide.size > 1 and np.isinf(wide).any()):
            index = tuple(int(i) for i in np.argwhere(~np.isfinite(wide))[0]) if wide.ndim else ()
            raise ModelError(
                f"tensor {name!r} holds {np.count_nonzero(~np.isfinite(wide))} values that are NaN or infinite, "
                f"first at {list(index)}: expected finite weights"
            )


def _check_schema(proto: onnx.ModelProto) -> None:
    proto.ir_version = max(proto.ir_version, 10)  # of the opset to come
    for v in proto.graph.output:
        v.type.tensor_type.shape.SetInParent()  # the checker wants one; every reader does without
    try:
        checker.check_model(proto)
    except Exception as e:
        raise ModelError(f"it breaks the ONNX specification: {_first_line(e)}") from e


def _check_sizes(proto: onnx.ModelProto) -> None:
    """Infer sizes node by node, so that an image too small for the network stops here: onnx's C++ would abort later."""
    opset = _opset(proto)
    types = {v.name: v.type for v in proto.graph.input}
    data = {}
    for name, t in _tensors(proto.graph):
        types[name] = onnx.helper.make_tensor_type_proto(t.data_type, t.dims)
        if math.prod(t.dims) <= 64:
            data[name] = t
    for node in proto.graph.node:
        if any(n and n not in types for n in node.input):
            continue  # a size that only constant folding will find
        try:
            found = shape_inference.infer_node_outputs(
                onnx.defs.get_schema(node.op_type, opset, ""),
                node,
                {n: types[n] for n in node.input if n},
                {n: data[n] for n in node.input if n in data},
                opset_imports=[onnx.helper.make_opsetid("", opset)],
                ir_version=proto.ir_version,
            )
        except Exception as e:
            raise ModelError(f"{_title(node)}: {_first_line(e)}") from e
        for name, kind in found.items():
            dims = [d.dim_value for d in kind.tensor_type.shape.dim if d.HasField("dim_value")]
            if len(dims) < len(kind.tensor_type.shape.dim):
                continue
            if any(d < (node.op_type != "Constant") for d in dims) or math.prod(dims) > LARGEST_TENSOR:
                sizes = [[d.dim_value for d in types[n].tensor_type.shape.dim] for n in node.input if n]
                raise ModelError(
                    f"{_title(node)}: its output {name!r} would have the size {dims} (inputs {sizes}); expected sizes "
                    f"of at least 1 and {LARGEST_TENSOR} elements at most: give another input size with --shapes"
                )
            types[name] = kind


def _array(name: str, t: TensorProto) -> np.ndarray:
    try:
        if any(d < 0 for d in t.dims):
            raise ValueError("negative dimension")
        return numpy_helper.to_array(t)
    except Exception as e:
        raise ModelError(f"tensor {name!r}: its data do not match its type and shape {list(t.dims)}: {e}") from None


# ---- the weights as stored, and their 2:4 pruning


def stored_weights(path: str | os.PathLike) -> Iterator[tuple[str, str, str, np.ndarray | None, int, str]]:
    """(layer, op type, weight, values, axis, reason) of each constant that a Conv, ConvTranspose, Gemm or MatMul reads.

    `values` are as stored (bfloat16 as FP32), None where the graph computes them; `axis` is that of the input channels;
    `reason` tells why 2:4 cannot apply, or is empty. Sizes of inputs and unsupported operators do not matter.
    Raises ModelError.
    """
    path = Path(path)
    with _named(path):
        proto = _load_whole(path)
        _check_graph(proto.graph)
        _check_values(proto.graph)
        _name_nodes(proto.graph.node)
        rows = list(_weights(proto.graph))
    for node, name, t, axis, reason in rows:
        values = None if t is None else _array(name, t)
        if t is not None and t.data_type == TensorProto.BFLOAT16:
            values = values.astype(np.float32)
        yield node.name, node.op_type, name, values, axis, reason


def _prune(graph: onnx.GraphProto) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    """Prune weights of convolutions and matrix products in place along their input channels -> (changed, (name, reason) of
    those kept).

    A shared weight is pruned once; one that has the pattern already is in neither list.
    """
    pruned, kept = [], {}
    for _, name, t, axis, reason in _weights(graph):
        if reason:
            kept[name] = reason
        elif not sparse24.fits(w := _array(name, t), axis).all():
            for field in ("float_data", "int32_data", "double_data"):
                t.ClearField(field)
            t.raw_data = sparse24.prune(w, axis).tobytes()
            pruned.append(name)
    return tuple(pruned), tuple(kept.items())


def _weights(graph: onnx.GraphProto) -> list[tuple[onnx.NodeProto, str, TensorProto | None, int, str]]:
    """(node, weight, tensor, axis of the input channels, reason against 2:4 or "") of every weight that a layer reads.

    The reason is the weight's: the same in every layer that shares it. A weight that the graph computes has no tensor.
    """
    tensors = dict(_tensors(graph))
    producer = {out: node for node in graph.node for out in node.output}
    constant = set(tensors)
    for node in graph.node:
        if node.input and all(n in constant for n in node.input if n):
            constant.update(node.output)

    def stored(name: str) -> str:
        """Back through copies and casts, which leave the pattern as it is."""
        while name not in tensors and name in producer and producer[name].op_type in ("Identity", "Cast"):
            name = producer[name].input[0]
        return name

    uses: dict[str, list[tuple[onnx.NodeProto, int, str]]] = {}  # weight -> (node, axis, reason against) of every use
    others: dict[str, list[str]] = {}  # tensor -> nodes that read it as anything else
    for node in graph.node:
        if node.op_type in ("Identity", "Cast"):
            continue
        for slot, name in enumerate(node.input):
            name = stored(name)
            if name in constant:
                axis, reason = _channel_axis(node, slot, len(tensors[name].dims) if name in tensors else 2)
                if axis is None:
                    others.setdefault(name, []).append(_title(node))
                else:
                    uses.setdefault(name, []).append((node, axis, reason))
    found = []
    for name, ways in uses.items():
        axis, t = ways[0][1], tensors.get(name)
        reason = next((r for *_, r in ways if r), "")
        if t is None:
            reason = f"computed by {_title(producer[name])}, not stored"
        elif not reason and any(a != axis for _, a, _ in ways):
            reason = "shared by layers that read it along different axes"
        elif not reason and name in others:
            reason = f"also read by {others[name][0]}"
        elif not reason and t.data_type not in FLOATS:
            reason = f"of type {TensorProto.DataType.Name(t.data_type)}, not floating point"
        elif not reason and (axis >= len(t.dims) or t.dims[axis] % 4):
            reason = f"shape {list(t.dims)}: the input channels (axis {axis}) are not a multiple of 4"
        found += [(node, name, t, axis, reason) for node, axis, _ in ways]
    return found


def _channel_axis(node: onnx.NodeProto, slot: int, rank: int) -> tuple[int | None, str]:
    """Axis of the input channels when `node` reads a constant of that rank at `slot` as its weights, else None."""
    if node.op_type == "Conv" and slot == 1:
        return 1, ""  # of one group, where there are several
    if node.op_type == "ConvTranspose" and slot == 1:
        group = _int_attribute(node, "group", 1)
        return 0, "" if group == 1 else f"grouped convolution (group={group})"
    if node.op_type == "Gemm" and slot == 1:
        return (1 if _int_attribute(node, "transB", 0) else 0), ""
    if node.op_type == "MatMul" and rank >= 2:
        return (rank - 2 if slot == 1 else rank - 1), ""
    return None, ""


def _int_attribute(node: onnx.NodeProto, name: str, default: int) -> int:
    return next((a.i for a in node.attribute if a.name == name), default)


# ---- sizes, names, opset


def _dtypes(graph: onnx.GraphProto) -> dict[str, str]:
    found = {}
    for kind, values in (("input", graph.input), ("output", graph.output)):
        for v in values:
            t = v.type.tensor_type.elem_type
            if FLOATS.get(t) not in ("fp32", "fp16"):
                got = TensorProto.DataType.Name(t).lower() if t else "no tensor type"
                raise ModelError(f"{kind} {v.name!r}: expected float32 or float16, got {got}: cast it outside the model")
            found[v.name] = FLOATS[t]
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


def _name_nodes(nodes) -> None:
    """Unnamed nodes get Type_index; a name used twice gets an index too."""
    taken: set[str] = set()
    for i, node in enumerate(nodes):
        name = node.name or f"{node.op_type}_{i}"
        while name in taken:
            name = f"{name}_{i}"
        node.name = name
        taken.add(name)


def _align_by_axis(graph: onnx.GraphProto) -> None:
    """Before opset 7 a second operand's axes began at the first's axis `axis`, and PRelu's slopes were one per channel: give
    stored ones the ones after their last axis that NumPy's rule needs."""
    tensors = {t.name: t for t in graph.initializer}
    ranks = {v.name: len(v.type.tensor_type.shape.dim) for v in (*graph.input, *graph.value_info)}
    for node in graph.node:
        axis = 1 if node.op_type == "PRelu" else _int_attribute(node, "axis", -1)
        t = tensors.get(node.input[1]) if len(node.input) == 2 else None
        more = ranks.get(node.input[0], 0) - axis - len(t.dims) if t is not None else 0
        aligned = node.op_type == "PRelu" or (axis >= 0 and _int_attribute(node, "broadcast", 0))
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
    opset = _opset(proto)
    if opset < 7:
        proto = shape_inference.infer_shapes(proto)
        _align_by_axis(proto.graph)
    for v in proto.graph.output:
        v.type.tensor_type.ClearField("shape")  # declared sizes may contradict those that follow from the inputs
    try:
        converted = proto if opset == OPSET else version_converter.convert_version(proto, OPSET)
    except Exception as e:
        raise ModelError(f"cannot be converted from opset {opset} to {OPSET}: {_first_line(e)}") from e
    try:
        shape_inference.infer_shapes(converted, check_type=True, strict_mode=True, data_prop=True)
    except Exception as e:
        raise ModelError(f"its shapes or types contradict each other: {_first_line(e)}") from e
    for node in converted.graph.node:
        if node.op_type == "Resize" and opset < 11:  # the converter loses Upsample's and Resize-10's meaning
            kept = [a for a in node.attribute if a.name not in ("coordinate_transformation_mode", "nearest_mode")]
            del node.attribute[:]
            node.attribute.extend(kept)
            node.attribute.append(onnx.helper.make_attribute("coordinate_transformation_mode", "asymmetric"))
            node.attribute.append(onnx.helper.make_attribute("nearest_mode", "floor"))
    return converted


def _first_line(e: Exception) -> str:
    return next((line.strip() for line in str(e).splitlines() if line.strip()), type(e).__name__)


# ---- the graph as onnx-ir


def _clean(proto: onnx.ModelProto) -> ir.Model:
    from onnx_ir.passes import common
    from onnxscript import optimizer

    try:
        model = ir.from_proto(proto)
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
        _erase_half(model)
        _split_sums(model)
        _group_norms(model)
        common.ShapeInferencePass()(model)
        optimizer.fold_constants(
            model,
            onnx_shape_inference=True,
            input_size_limit=1 << 40,
            output_size_limit=1 << 40,
            should_fold=lambda node: True if node.op_type == "ConstantOfShape" else None,
        )
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
        _drop_identities(model)
        common.RemoveUnusedNodesPass()(model)
        common.TopologicalSortPass()(model)
        common.ShapeInferencePass()(model)
    except Exception as e:
        cause = e.__cause__ or e
        raise ModelError(f"its constants cannot be folded: {_first_line(cause)}") from e
    for v in model.graph.outputs:
        if v.is_initializer():
            raise ModelError(f"output {v.name!r} does not depend on any input: remove it from the model")
    unknown = [
        f"{out.name!r} of {node.op_type} {node.name}"
        for node in model.graph
        for out in node.outputs
        if out.uses() and (out.shape is None or not out.shape.is_static())
    ]
    if unknown:
        raise ModelError(f"the sizes of {', '.join(unknown[:5])} depend on the data; expected sizes that the inputs fix")
    _name_nodes(model.graph)
    for node in model.graph:
        if node.op_type == "Reshape" and math.prod(node.inputs[0].shape) != math.prod(node.outputs[0].shape):
            before, after = ([int(d) for d in v.shape] for v in (node.inputs[0], node.outputs[0]))
            raise ModelError(f"Reshape {node.name}: {before} cannot become {after}; the model is fixed to other input sizes")
    return model


def _erase_half(model: ir.Model) -> None:
    """Make every floating-point constant, input and Cast FP32; forget the types of the values between."""
    floats = {ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE}
    for v in (*model.graph.inputs, *model.graph.initializers.values()):
        if v.dtype in floats or (v.const_value is not None and v.const_value.dtype in floats):
            if v.const_value is not None:
                v.const_value = ir.tensor(v.const_value.numpy().astype(np.float32), name=v.name)
            v.dtype = ir.DataType.FLOAT
    for node in model.graph:
        to = node.attributes.get("to")
        if node.op_type == "Cast" and to is not None and ir.DataType(to.value) in floats:
            node.attributes["to"] = ir.AttrInt64("to", ir.DataType.FLOAT.value)
        fill = node.attributes.get("value")
        if node.op_type == "ConstantOfShape" and fill is not None and fill.value.dtype in floats:
            node.attributes["value"] = ir.AttrTensor("value", ir.tensor(fill.value.numpy().astype(np.float32)))
        for out in node.outputs:
            out.type = out.shape = None


def _drop_identities(model: ir.Model) -> None:
    """Remove copies; one that gives a second name to an input or output stays."""
    for node in [n for n in model.graph if n.op_type == "Identity"]:
        x, y = node.inputs[0], node.outputs[0]
        if y.is_graph_output():
            if x.producer() is None or x.is_graph_output():
                continue
            name = y.name
            ir.convenience.replace_all_uses_with(y, x, replace_graph_outputs=True)
            model.graph.remove(node, safe=True)
            x.name = name
        else:
            ir.convenience.replace_all_uses_with(y, x)
            model.graph.remove(node, safe=True)


def _group_norms(model: ir.Model) -> None:
    """GroupNormalization -> InstanceNormalization that keeps num_groups: onnx infers the shape of that one only."""
    for node in model.graph:
        if node.op_type == "GroupNormalization":
            node.op_type = "InstanceNormalization"


def _split_sums(model: ir.Model) -> None:
    """Sum, Mean, Max and Min of n tensors -> a chain of operations with two, so that each has one spelling."""
    many = [n for n in model.graph if n.op_type in ("Sum", "Mean") or (n.op_type in ("Max", "Min") and len(n.inputs) != 2)]
    for node in many:
        total, terms = node.inputs[0], node.inputs[1:]
        op = {"Sum": "Add", "Mean": "Add"}.get(node.op_type, node.op_type)
        steps = []
        for i, term in enumerate(terms):
            steps.append(ir.Node("", op, [steps[-1].outputs[0] if steps else total, term], name=f"{node.name}_{i}"))
        if node.op_type == "Mean" and terms:
            part = f"{node.name}_part"
            share = ir.Value(name=part, const_value=ir.tensor(np.float32(1 / len(node.inputs)), name=part))
            model.graph.register_initializer(share)
            steps.append(ir.Node("", "Mul", [steps[-1].outputs[0], share], name=node.name))
        steps = steps or [ir.Node("", "Identity", [total], name=node.name)]
        steps[-1].name = node.name
        name = node.outputs[0].name
        model.graph.insert_before(node, steps)
        ir.convenience.replace_all_uses_with(node.outputs[0], steps[-1].outputs[0], replace_graph_outputs=True)
        model.graph.remove(node, safe=True)
        steps[-1].outputs[0].name = name
