"""Loads a whole ModelProto: functions inlined, external data read. check.py then checks its content."""

import graphlib
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, inliner, numpy_helper

from cuda_kernels.files import open_regular
from gpu_runtime import file_kinds
from gpu_runtime.errors import ModelError, NoModelError
from gpu_runtime.frontend.files.source import Source

OLDEST_OPSET = 6
MOST_BYTES = 2**31 - 1  # of a model with its external data: the limit of protobuf
MOST_DIMS = 32
MOST_DENSE = 2**27  # elements of all sparse tensors, the zeros included: as many as the largest classifiers' weights have
MOST_NODES, MOST_COPIES = 10_000, 8  # nodes with functions and control flow written out: a number, or times the file's nodes
# Limits of a graph after inlining: several times the largest networks that are exported, and small enough that the libraries
# which read it, some of them in quadratic time, end within a minute.
LARGEST_GRAPH = {
    "nodes": 50_000,
    "initializers": 50_000,
    "inputs": 4_000,
    "outputs": 4_000,
    "names that nodes read and write": 500_000,
    "attributes of nodes": 500_000,
    "imported opsets": 100,
}
CONTROL = ("If", "Loop")
SMALL_BYTES = 1 << 16  # of an initializer small enough to be copied often
Function = tuple[str, str]  # domain and name
NOT_UTF8 = "expected names in UTF-8, got other bytes: the file is damaged, export or download it again"


@contextmanager
def named(path: Path | Source) -> Iterator[None]:
    """Puts the model's path or name before the message of a ModelError that the `with` block raises."""
    try:
        yield
    except ModelError as e:
        text = f"{path}: {e}"
        raise (NoModelError(text, e.filename) if isinstance(e, NoModelError) else ModelError(text)) from e.__cause__
    except UnicodeDecodeError:
        raise ModelError(f"{path}: {NOT_UTF8}") from None


def load_whole(source: Path | Source) -> onnx.ModelProto:
    """Returns the model with its functions inlined and its external data read. Raises ModelError."""
    proto = _parsed(source.data if isinstance(source, Source) else _file_bytes(source))
    _check_header(proto)
    _check_length(proto)
    if proto.functions:
        _check_functions(proto)
        try:
            proto = inliner.inline_local_functions(proto)
        except Exception as e:
            raise ModelError(f"its functions cannot be inlined: {first_line(e)}") from e
        _check_length(proto)
    _open_negative_sizes(proto.graph)
    _load_external(proto, None if isinstance(source, Source) else source.parent)
    _write_out_sparse(proto)
    return proto


def _open_negative_sizes(graph: onnx.GraphProto) -> None:
    """Makes declared sizes below zero unknown: PaddlePaddle writes -1 for an unknown size, and onnxruntime reads it so."""
    for v in (*graph.input, *graph.output, *graph.value_info):
        for d in v.type.tensor_type.shape.dim:
            if d.dim_value < 0:
                d.ClearField("dim_value")


def _file_bytes(path: Path) -> bytes:
    try:
        with open_regular(path) as file:
            if (size := os.fstat(file.fileno()).st_size) > MOST_BYTES:
                raise ModelError(f"it has {size} bytes, expected {MOST_BYTES} at most: keep the weights in external data")
            return file.read()
    except FileNotFoundError:
        raise NoModelError("no such file; give the path of an ONNX model", os.fspath(path)) from None
    except OSError as e:
        raise ModelError(f"cannot be read: {e.strerror or e}") from None
    except ValueError as e:
        raise e if isinstance(e, ModelError) else ModelError(f"cannot be read: {e}") from None  # a zero byte in the name


def _parsed(data: bytes) -> onnx.ModelProto:
    if file_kinds.is_engine(data[:16]):
        raise ModelError("expected an ONNX model, got an engine or another safetensors file: gpu-runtime inspect shows engines")
    try:
        proto = onnx.load_model_from_string(data)
    except Exception:
        if other := file_kinds.recognized(data[: file_kinds.HEAD_BYTES]):
            raise ModelError(f"expected an ONNX model, got {len(data)} bytes: {other}") from None
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


def _calls(nodes: Iterable[onnx.NodeProto]) -> Iterator[Function]:
    """Yields (domain, operator) of every node, including those inside nodes."""
    nodes = list(nodes)
    for node in (*nodes, *(n for graph in graphs_in(nodes) for n in graph.node)):
        yield node.domain, node.op_type


def _check_functions(proto: onnx.ModelProto) -> None:
    """Raises ModelError if two functions of the model have one name, if they are recursive, or if inlined they are too
    large."""
    functions = {(f.domain, f.name): f for f in proto.functions}
    if len(functions) < len(proto.functions):
        twice, _ = Counter((f.domain, f.name) for f in proto.functions).most_common(1)[0]
        raise ModelError(f"function {twice[1]!r} of domain {twice[0]!r} is defined twice: expected one of each name")
    calls = {key: Counter(_calls(f.node)) for key, f in functions.items()}
    needs = {key: [c for c in made if c in functions] for key, made in calls.items()}
    try:
        order = list(graphlib.TopologicalSorter(needs).static_order())
    except graphlib.CycleError as e:
        ring = " -> ".join(repr(name) for _, name in reversed(e.args[1]))
        raise ModelError(f"its functions call each other recursively: {ring}; expected functions without recursion") from None
    _check_growth(proto, calls, order)
    for node in (*proto.graph.node, *(n for f in proto.functions for n in f.node)):
        f = functions.get((node.domain, node.op_type))
        if f is not None and (len(node.input) > len(f.input) or len(node.output) > len(f.output)):
            raise ModelError(
                f"{title(node)}: function {f.name!r} takes {len(f.input)} inputs and has {len(f.output)} outputs, "
                f"got {len(node.input)} and {len(node.output)}"
            )


def _check_growth(proto: onnx.ModelProto, calls: Mapping[Function, Counter[Function]], order: Iterable[Function]) -> None:
    """Raises ModelError if there would be too many nodes after functions are inlined.

    `calls`: function -> {function or operator in it: how often}; in `order`, each function follows the functions that it calls.
    """
    size: dict[Function, int] = {}
    for key in order:
        size[key] = sum(n * size.get(c, 1) for c, n in calls[key].items())
    total = sum(n * size.get(c, 1) for c, n in Counter(_calls(proto.graph.node)).items())
    most = max(MOST_NODES, MOST_COPIES * (len(proto.graph.node) + sum(len(f.node) for f in proto.functions)))
    if total > most:
        cure = f"expected {most} at most: export it without functions"
        raise ModelError(f"with its functions inlined it would have {total} nodes, {cure}")


def _load_external(proto: onnx.ModelProto, folder: Path | None) -> None:
    """Reads external data into the tensors, after all places and the total size are checked. Raises ModelError.

    `folder`: the folder of the model's file, None for a model in memory.
    """
    found, total, whole = [], proto.ByteSize(), (proto.graph, *graphs_in(proto.graph.node))
    parts = ((name, t) for graph in whole for name, s, _ in _sparse_tensors(graph) for t in (s.values, s.indices))
    for name, t in (*(found for graph in whole for found in stored_tensors(graph)), *parts):
        if t.data_location == TensorProto.EXTERNAL:
            if folder is None:
                raise ModelError(
                    f"initializer {name!r} has external data, but the model is given without its folder: "
                    "give the path of its file, or onnx.load(path), which reads the data"
                )
            found.append((name, t, *_place(name, t, folder)))
            total += found[-1][-1]
    if total > MOST_BYTES:
        raise ModelError(
            f"with the external data of {len(found)} initializers it has {total} bytes, expected {MOST_BYTES} at most"
        )
    for name, t, target, offset, length in found:
        try:
            with open_regular(target) as f:
                f.seek(offset)
                t.raw_data = f.read(length)
        except OSError as e:
            raise _unreadable(name, target.name, e) from None
        t.data_location = TensorProto.DEFAULT
        del t.external_data[:]


def _sparse_tensors(graph: onnx.GraphProto) -> Iterator[tuple[str, onnx.SparseTensorProto, onnx.AttributeProto | None]]:
    """Yields (name, tensor, its attribute) of every sparse constant: initializers (attribute None) and Constant nodes."""
    for s in graph.sparse_initializer:
        yield s.values.name, s, None
    for node in graph.node:
        for a in node.attribute:
            if node.op_type == "Constant" and a.type == onnx.AttributeProto.SPARSE_TENSOR:
                yield ", ".join(node.output), a.sparse_tensor, a


def _write_out_sparse(proto: onnx.ModelProto) -> None:
    """Replaces sparse constants by dense ones, in place. Raises ModelError."""
    total = 0
    for graph in (proto.graph, *graphs_in(proto.graph.node)):
        for name, s, attribute in _sparse_tensors(graph):
            total += math.prod(s.dims)
            if not isinstance(name, str):
                raise ModelError(NOT_UTF8)
            if len(s.dims) > MOST_DIMS or min(s.dims, default=0) < 0 or total > MOST_DENSE:
                limits = f"{MOST_DIMS} dimensions, and {MOST_DENSE} elements of all sparse tensors, at most"
                raise ModelError(f"sparse tensor {name!r}: its shape is {list(s.dims)[: MOST_DIMS + 1]}; expected {limits}")
            t = numpy_helper.from_array(_dense(name, s), name)
            if attribute is None:
                graph.initializer.append(t)
            else:
                attribute.CopyFrom(helper.make_attribute("value", t))
        del graph.sparse_initializer[:]


def _dense(name: str, s: onnx.SparseTensorProto) -> np.ndarray:
    """Returns a sparse tensor as a dense array. Its indices, in any order, are [n], linear, or [n, rank]. Raises ModelError."""
    dims, values, at = tuple(s.dims), to_array(name, s.values), to_array(f"indices of {name}", s.indices)
    n, bounds = len(values) if values.ndim == 1 else -1, dims if at.ndim == 2 else (math.prod(dims),)
    if at.dtype.kind != "i" or values.dtype == object or at.shape not in ((n,), (n, len(dims) or -1)):
        got = f"{list(values.shape)} of type {values.dtype} and {list(at.shape)} of type {at.dtype}"
        expected = f"n numbers, and integers of the shape [n] or [n, {len(dims)}]"
        raise ModelError(f"sparse tensor {name!r}: expected as its values and indices {expected}, got {got}")
    if bad := at[(at < 0) | (at >= np.array(bounds, np.int64))].tolist():
        raise ModelError(f"sparse tensor {name!r}: its indices {bad[:5]} lie outside of its shape {list(dims)}")
    dense = np.zeros(math.prod(dims), values.dtype)
    dense[np.ravel_multi_index(tuple(at.astype(np.int64).T), bounds) if at.ndim == 2 else at] = values
    return dense.reshape(dims)


def _unreadable(name: str, location: str, e: OSError) -> ModelError:
    what = f"initializer {name!r}: external data {location!r} cannot be read: {e.strerror}"
    return ModelError(f"{what}; this file holds the model's weights: copy it to the model's folder, under this name")


def _place(name: str, t: TensorProto, folder: Path) -> tuple[Path, int, int]:
    """Returns (file, offset, number of bytes) of a tensor's external data. Raises ModelError if that is outside of the model's
    folder, or of the file.
    """
    info = {e.key: e.value for e in t.external_data}
    location = info.get("location", "")
    try:
        target = (folder / location).resolve()
        inside = location and not os.path.isabs(location) and target.is_relative_to(folder.resolve())
        regular = not target.exists() or target.is_file()
    except (OSError, ValueError, RuntimeError):  # too long a name, one with a zero byte, a link to itself
        inside = regular = False
    if not inside or not regular:
        raise ModelError(
            f"initializer {name!r} keeps its data in {location[:200]!r}, outside the model's folder; "
            "expected a file in the model's folder: move it there and correct the location"
        )
    try:
        end = target.stat().st_size
    except OSError as e:
        raise _unreadable(name, location, e) from None
    offset, length = (info.get(key, "0")[:20] for key in ("offset", "length"))
    if not all(text.strip().isdecimal() for text in (offset, length)):
        raise ModelError(
            f"initializer {name!r}: expected a number as offset and as length of its external data, got {offset!r}, {length!r}"
        )
    offset = int(offset)
    length = int(length) if "length" in info else max(end - offset, 0)
    if offset + length > end:
        raise ModelError(
            f"initializer {name!r}: expected {length} bytes at offset {offset} of {location!r}, "
            f"which has {end}: the file is truncated, fetch it again"
        )
    return target, offset, length


def set_aside(proto: onnx.ModelProto) -> tuple[onnx.ModelProto, dict[str, TensorProto]]:
    """Returns (a copy of the model with inputs in place of its large initializers, copies of these initializers by name).

    onnx's checker, converter and inference would copy large initializers many times, and do not need their values, except
    before opset 7 and with control flow: then all stay. Both results are copies because protobuf keeps all of a parsed message
    in memory as long as any part of it is in use.
    """
    graph, large = proto.graph, dict[str, TensorProto]()
    if opset_version(proto) < 7 or any(map(is_control, graph.node)):
        return proto, large
    for i in reversed(range(len(graph.initializer))):
        if len(graph.initializer[i].raw_data) > SMALL_BYTES:
            t = graph.initializer.pop(i)
            large[t.name] = TensorProto()
            large[t.name].CopyFrom(t)
            graph.input.append(onnx.helper.make_tensor_value_info(t.name, t.data_type, t.dims))
    return copied(proto), large


def _check_length(proto: onnx.ModelProto) -> None:
    graph = proto.graph
    counts = {
        "nodes": len(graph.node),
        "initializers": len(graph.initializer) + len(graph.sparse_initializer),
        "inputs": len(inputs_of(graph)),
        "outputs": len(graph.output),
        "names that nodes read and write": sum(len(n.input) + len(n.output) for n in graph.node),
        "attributes of nodes": sum(len(n.attribute) for n in graph.node),
        "imported opsets": len(proto.opset_import),
    }
    for kind, count in counts.items():
        if count > LARGEST_GRAPH[kind]:
            most = LARGEST_GRAPH[kind]
            raise ModelError(
                f"its graph has {count} {kind}, expected {most} at most: export it with fewer steps unrolled, or in parts"
            )


def _check_header(proto: onnx.ModelProto) -> None:
    newest, opset = onnx.defs.onnx_opset_version(), opset_version(proto)
    if not opset:
        raise ModelError("expected an import of the standard ONNX opset, got none")
    if sum(o.domain in ("", "ai.onnx") for o in proto.opset_import) > 1:
        raise ModelError("expected one import of the standard ONNX opset, got several: export the model again")
    if proto.ir_version > onnx.IR_VERSION or opset > newest:
        raise ModelError(
            f"opset {opset} in IR version {proto.ir_version} is newer than the installed onnx {onnx.__version__} knows "
            f"(opset {newest}, IR version {onnx.IR_VERSION}): pip install -U onnx"
        )
    if opset < OLDEST_OPSET:
        raise ModelError(f"expected opset {OLDEST_OPSET} or newer, got {opset}: export the model again")


def opset_version(proto: onnx.ModelProto) -> int:
    return next((o.version for o in proto.opset_import if o.domain in ("", "ai.onnx")), 0)


def int_attribute(node: onnx.NodeProto, name: str, default: int) -> int:
    return next((a.i for a in node.attribute if a.name == name), default)


def put_nodes(graph: onnx.GraphProto, nodes: Iterable[onnx.NodeProto]) -> None:
    """Replaces all nodes of a graph."""
    made = list(nodes)
    del graph.node[:]
    graph.node.extend(made)


def graphs_in(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.GraphProto]:
    """Yields every graph inside the nodes, and inside their graphs' nodes."""
    for a in (a for node in nodes for a in node.attribute):
        for graph in (a.g,) if a.type == onnx.AttributeProto.GRAPH else a.graphs:
            yield graph
            yield from graphs_in(graph.node)


def read_by(node: onnx.NodeProto) -> list[str]:
    """Returns a node's inputs, then the inputs of all nodes in its graphs."""
    return [*node.input, *(name for graph in graphs_in([node]) for each in graph.node for name in each.input)]


def is_control(node: onnx.NodeProto) -> bool:
    """Returns whether the node is an If or Loop, which are replaced by the nodes that run."""
    return node.op_type in CONTROL and node.domain in ("", "ai.onnx")


def copied(proto: onnx.ModelProto) -> onnx.ModelProto:
    made = onnx.ModelProto()
    made.CopyFrom(proto)
    return made


def inputs_of(graph: onnx.GraphProto) -> list[onnx.ValueInfoProto]:
    """Returns the inputs that are no initializers; old files name initializers among them."""
    stored = {t.name for t in graph.initializer}
    return [v for v in graph.input if v.name not in stored]


def stored_tensors(graph: onnx.GraphProto) -> Iterator[tuple[str, TensorProto]]:
    """Yields (name, tensor) of every stored constant: initializers and Constant nodes."""
    for t in graph.initializer:
        yield t.name, t
    for node in graph.node:
        for a in node.attribute:
            if a.type == onnx.AttributeProto.TENSOR:
                yield node.output[0] if node.op_type == "Constant" and node.output else f"value of {title(node)}", a.t


def drop_texts(proto: onnx.ModelProto) -> None:
    """Removes documentation and metadata, which every pass would copy."""
    graph = proto.graph
    for part in (proto, graph, *graph.node, *graph.initializer, *graph.input, *graph.output, *graph.value_info):
        part.ClearField("doc_string")
        part.ClearField("metadata_props")


def to_array(name: str, t: TensorProto) -> np.ndarray:
    if len(t.dims) > MOST_DIMS:
        raise ModelError(f"tensor {name!r} has {len(t.dims)} dimensions; expected {MOST_DIMS} at most")
    try:
        if any(d < 0 for d in t.dims):
            raise ValueError("negative dimension")
        return numpy_helper.to_array(t)
    except Exception as e:
        problem = f"its data do not match its type and shape {list(t.dims)}: {e}"
        raise ModelError(f"tensor {name!r}: {problem}; export the model again, with its weights") from None


def title(node: onnx.NodeProto) -> str:
    return f"{node.op_type} {node.name or '-> ' + ', '.join(node.output)}"


def type_name(t: int) -> str:
    """Returns ONNX's name of an element type, or a text for an unknown number."""
    return TensorProto.DataType.Name(t) if t in TensorProto.DataType.values() else f"number {t}, which ONNX does not define"


def first_line(e: BaseException) -> str:
    return next((line.strip() for line in str(e).splitlines() if line.strip()), type(e).__name__)


def with_weights(whole: onnx.ModelProto, pruned: onnx.ModelProto) -> bytes:
    """Returns the bytes of a model with the stored tensors of its pruned copy. Raises ModelError if they are too many."""
    stored = dict(stored_tensors(pruned.graph))
    for name, t in stored_tensors(whole.graph):
        if name in stored and t != stored[name]:
            t.CopyFrom(stored[name])
    try:
        return whole.SerializeToString()
    except ValueError as e:
        raise ModelError(f"the pruned model cannot be written as one file: {e}") from None
