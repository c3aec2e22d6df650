"""The stored weights of an ONNX model: the layers that read them, their axis of input channels, and their 2:4 pruning."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import numpy as np
import onnx
import onnx_ir as ir
from onnx import TensorProto, helper

from cuda_kernels import sparse24
from gpu_runtime.frontend.files import load, quantized
from gpu_runtime.frontend.files.check import FLOATS, SIZES, check_graph, check_values
from gpu_runtime.frontend.files.load import int_attribute, stored_tensors, title, to_array, type_name
from gpu_runtime.frontend.files.source import source_of
from gpu_runtime.stored_pattern import Stored, as_stored
from gpu_runtime.text import unused_name
from tactics.problems.operators import VIEWS

COPIES = ("Identity", "Cast")  # operators that keep the 2:4 pattern
CODINGS = ("QuantizeLinear", "DequantizeLinear")
LAYERS = ("Conv", "ConvTranspose", "Gemm", "MatMul")
MODULE = re.compile(r"\w[\w/-]*(?:\.[\w/-]+)*", re.ASCII)  # the name of a module in a framework, as "layer1.0.conv1"
MOST_MODULE = 200  # characters of such a name
OUTPUT = "the network's outputs"
BOUNDS: Mapping[int, tuple[int, int]] = {TensorProto.INT8: (-128, 127), TensorProto.UINT8: (0, 255)}


@dataclass(frozen=True, slots=True)
class Coding:
    """A QuantizeLinear, or with `back` a DequantizeLinear, of stored weights. `scales`, `zeros`: one value, or one for each
    index of `axis`; `bounds`: the least and the largest whole number.
    """

    back: bool
    scales: tuple[float, ...]
    zeros: tuple[int, ...]
    axis: int
    bounds: tuple[int, int]

    def applied(self, v: np.ndarray) -> np.ndarray:
        """Returns the node's result for an array, as FP32."""
        return self._real(v) if self.back else self._whole(v)

    def undone(self, v: np.ndarray) -> np.ndarray:
        """Returns the FP32 array from which the node computes `v`."""
        return self._whole(v) if self.back else self._real(v)

    def _real(self, q: np.ndarray) -> np.ndarray:
        scale, zero = self._along(q.ndim)
        return (q.astype(np.float32) - zero) * scale

    def _whole(self, x: np.ndarray) -> np.ndarray:
        scale, zero = self._along(x.ndim)
        return np.clip(np.rint(x.astype(np.float32) / scale) + zero, *self.bounds)

    def _along(self, rank: int) -> tuple[np.ndarray, np.ndarray]:
        scale, zero = np.array(self.scales, np.float32), np.array(self.zeros, np.float32)
        shape = [-1 if i == self.axis % max(rank, 1) else 1 for i in range(rank)]
        return scale.reshape(shape if scale.size > 1 else ()), zero.reshape(shape if zero.size > 1 else ())


# Between a stored tensor and its reader: "reshape" and a shape, "transpose" and a permutation, or a quantiser.
View = tuple[str, tuple[int, ...]] | Coding


def stored_by_layer(graph: onnx.GraphProto, pruned: Mapping[str, Stored]) -> dict[str, Stored]:
    """Returns node -> the pattern of its weights, for every layer whose weights can be 2:4. Nodes must have names.

    `pruned`: initializer -> its pattern before pruning, whose `lost` the result keeps.
    """
    found: dict[tuple[str, int], Stored] = {}
    rows = {}
    for w in weights(graph):
        if not w.reason and (values := w.values) is not None:
            if (w.name, w.axis) not in found:
                found[w.name, w.axis] = as_stored(values, w.axis, pruned.get(w.name))
            rows[w.node.name] = found[w.name, w.axis]
    return rows


def stored_weights(path: str | os.PathLike) -> list[Weight]:
    """Returns each constant that a Conv, ConvTranspose, Gemm or MatMul reads as weights, once for each layer.

    Sizes of inputs and unsupported operators do not matter. Raises ModelError.
    """
    return weights(checked(path).graph)


def checked(path: str | os.PathLike) -> onnx.ModelProto:
    """Returns a file's model with its graph and constants checked, and its nodes and layers named. Raises ModelError."""
    source = source_of(path)
    with load.named(source):
        proto = load.load_whole(source)
        check(proto)
        return proto


def check(proto: onnx.ModelProto) -> None:
    """Checks a model's graph and constants, and names its nodes and layers. Raises ModelError."""
    check_graph(proto.graph)
    quantized.spell(proto)
    check_values(proto.graph)
    quantized.check(proto.graph)
    name_layers(proto.graph)


def prune_weights(
    graph: onnx.GraphProto, masks: Mapping[str, np.ndarray] = MappingProxyType({})
) -> tuple[dict[str, Stored], tuple[tuple[str, str], ...]]:
    """Prunes the weights of convolutions and matrix products in place, to 2:4 along their input channels.

    Returns (changed weight -> its pattern before, ((weight, reason), ...) of weights that cannot be 2:4). A shared weight is
    pruned once; a weight that is 2:4 already is in neither. `masks`: node -> bool array, false where its weights become zero
    first.
    """
    pruned, kept = {}, {}
    for w in weights(graph):
        if w.reason or w.tensor is None:
            kept[w.name] = w.reason
        elif w.name not in pruned and (before := prune_one(w, masks.get(w.node.name))):
            pruned[w.name] = before
    return pruned, tuple(kept.items())


def prune_one(w: Weight, mask: np.ndarray | None = None) -> Stored | None:
    """Prunes one stored weight in place and returns its pattern before; None, without a change, if it is 2:4 already.

    If `mask` has its shape, weights where it is false become zero first, and `lost` includes the sum of their squares.
    """
    values = w.values
    if w.tensor is None or values is None or sparse24.fits(values, w.axis).all():
        return None
    before = as_stored(values, w.axis)
    if mask is None or mask.shape != values.shape:
        kept = sparse24.prune(values, w.axis)
    else:
        kept = sparse24.prune(np.where(mask, values, np.zeros((), values.dtype)), w.axis)
        before = replace(before, lost=float(np.square(values.astype(np.float64) - kept).sum()))
    put(w.name, w.tensor, w.views, kept)
    return before


@dataclass(frozen=True, slots=True)
class Weight:
    """The weights that the layer `node` reads: stored tensor `name`. `axis`: the axis of input channels; `reason`: why they
    cannot be 2:4, the same for all layers that share them, or "".

    `tensor` is None if the graph computes the weights. `views`: the views of the stored tensor that the layer reads; `axis` and
    `values` are as the layer reads them, after the views.
    """

    node: onnx.NodeProto
    name: str
    tensor: TensorProto | None
    axis: int
    reason: str
    views: tuple[View, ...] = ()

    @property
    def values(self) -> np.ndarray | None:
        """The values as the layer reads them; bfloat16 as FP32, which holds it exactly."""
        if self.tensor is None:
            return None
        values = to_array(self.name, self.tensor)
        wide = values.astype(np.float32) if self.tensor.data_type == TensorProto.BFLOAT16 else values
        return seen(wide, self.views)


def seen(values: np.ndarray, views: Iterable[View]) -> np.ndarray:
    """Returns the array that a layer reads through these views of a stored tensor."""
    for view in views:
        if isinstance(view, Coding):
            values = view.applied(values)
        else:
            values = values.reshape(view[1]) if view[0] == "reshape" else values.transpose(view[1])
    return values


def _unseen(values: np.ndarray, views: Sequence[View], t: TensorProto) -> np.ndarray:
    """Returns the values of stored tensor `t` with which a layer reads `values` through the views: the inverse of `seen`."""
    for i in reversed(range(len(views))):
        view = views[i]
        if isinstance(view, Coding):
            values = view.undone(values)
        else:
            values = values.reshape(seen_dims(t, views[:i])) if view[0] == "reshape" else values.transpose(np.argsort(view[1]))
    return values


def put(name: str, t: TensorProto, views: Iterable[View], values: np.ndarray) -> None:
    """Stores `values`, as a layer reads them through the views, in tensor `t`, whose type must hold each of them. `name`: for
    messages.

    In a quantised tensor, elements whose value does not change keep their whole number.
    """
    views, stored = tuple(views), to_array(name, t)
    new = _unseen(values, views, t)
    places = [view for view in views if not isinstance(view, Coding)]
    if len(places) < len(views):
        new = np.where(_unseen(seen(stored, views) == values, places, t), stored, new)
    for data in ("float_data", "int32_data", "int64_data", "double_data", "uint64_data"):
        t.ClearField(data)
    t.raw_data = np.ascontiguousarray(new.astype(stored.dtype)).tobytes()


@dataclass(frozen=True, slots=True)
class _Uses:
    """The readers of a constant. `layers`: the layers that read it as weights; `others`: the titles of all others."""

    layers: list[Weight] = field(default_factory=list)
    others: list[str] = field(default_factory=list)


def weights(graph: onnx.GraphProto) -> list[Weight]:
    """Returns every weight that a layer reads, once for each layer."""
    tensors = dict(stored_tensors(graph))
    producer = {out: node for node in graph.node for out in node.output}
    found = []
    for name, uses in _uses_of_constants(graph, tensors, producer).items():
        t = tensors.get(name)
        if uses.layers:
            reason = _against(t, uses) if t is not None else f"computed by {title(producer[name])}, not stored"
            found += [replace(uses.layers[0], node=use.node, reason=reason) for use in uses.layers]
    return found


def _uses_of_constants(
    graph: onnx.GraphProto, tensors: Mapping[str, TensorProto], producer: Mapping[str, onnx.NodeProto]
) -> dict[str, _Uses]:
    constant = set(tensors)
    for node in graph.node:
        if node.input and all(n in constant for n in load.read_by(node) if n):
            constant.update(node.output)
    sources = views_of_constants(graph, tensors, coded=True)
    found: dict[str, _Uses] = {}
    for node in graph.node:
        if node.output and node.output[0] in sources and node.op_type != "Constant":
            continue  # a view: its readers are the constant's
        for slot, read in enumerate(load.read_by(node)):
            if read not in constant or node.op_type in SIZES:
                continue
            name, views = sources.get(read, (read, ()))
            rank = len(seen_dims(tensors[name], views)) if name in tensors else 2
            axis, reason = _channel_axis(node, slot, rank)
            uses = found.setdefault(name, _Uses())
            if axis is None:
                uses.others.append(title(node))
            else:
                uses.layers.append(Weight(node, name, tensors.get(name), axis, reason, views))
    for v in graph.output:
        if v.name in sources:
            found.setdefault(sources[v.name][0], _Uses()).others.append(OUTPUT)
    return found


def views_of_constants(
    graph: onnx.GraphProto, tensors: Mapping[str, TensorProto], coded: bool = False
) -> dict[str, tuple[str, tuple[View, ...]]]:
    """Returns, for each stored tensor and each copy or view of one, its name -> (the stored tensor, the views between, in
    order). `coded`: outputs of quantisers count as views too."""
    found: dict[str, tuple[str, tuple[View, ...]]] = {name: (name, ()) for name in tensors}
    for node in graph.node:
        if node.op_type not in (*COPIES, *VIEWS, *CODINGS) or not node.input or not node.output:
            continue
        name, views = found.get(node.input[0], (node.input[0], ()))
        if name in tensors and (coded or node.op_type not in CODINGS):
            dims = seen_dims(tensors[name], views)
            if node.op_type in COPIES:
                found[node.output[0]] = name, views
            elif view := _coding(node, name, dims, tensors) if node.op_type in CODINGS else _view(node, dims, tensors):
                found[node.output[0]] = name, (*views, view)
    return found


def _coding(node: onnx.NodeProto, name: str, dims: tuple[int, ...], tensors: Mapping[str, TensorProto]) -> Coding | None:
    """Returns the Coding of a QuantizeLinear or DequantizeLinear whose input is stored tensor `name` in the shape `dims`; None
    if its scales are not stored, or are invalid.
    """
    back, axis = node.op_type == CODINGS[1], int_attribute(node, "axis", 1)
    scale, zero = (tensors.get(n) for n in (*node.input[1:], "")[:2])
    kind = zero.data_type if zero is not None else tensors[name].data_type if back else TensorProto.UINT8
    kind = TensorProto.UINT8 if zero is None and kind in FLOATS else kind  # QuantizeLinear's default
    if scale is None or any(n and n not in tensors for n in node.input[2:]) or kind not in BOUNDS:
        return None
    scales = to_array(scale.name, scale).astype(np.float32).reshape(-1)
    zeros = np.zeros(1, np.int32) if zero is None else to_array(zero.name, zero).astype(np.int32).reshape(-1)
    size = dims[axis] if -len(dims) <= axis < len(dims) else 1
    if not all(v.size in (1, size) for v in (scales, zeros)) or not (np.isfinite(scales) & (scales > 0)).all():
        return None
    return Coding(back, tuple(scales.tolist()), tuple(zeros.tolist()), axis, BOUNDS[kind])


def seen_dims(t: TensorProto, views: Iterable[View]) -> tuple[int, ...]:
    """Returns the shape of a stored tensor as a layer reads it through these views."""
    dims = tuple(t.dims)
    for view in views:
        if not isinstance(view, Coding):
            dims = view[1] if view[0] == "reshape" else tuple(dims[i] for i in view[1])
    return dims


def _view(node: onnx.NodeProto, dims: tuple[int, ...], tensors: Mapping[str, TensorProto]) -> View | None:
    """Returns the View that a node, one of VIEWS, makes of a stored tensor of shape `dims`; None if its sizes are not stored,
    or are invalid.
    """
    given = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    second = tensors.get(node.input[1]) if len(node.input) > 1 and node.input[1] else None
    if len(node.input) > 1 and node.input[1] and second is None:
        return None
    if node.op_type == "Transpose":
        perm = tuple(given.get("perm", range(len(dims))[::-1]))
        return ("transpose", perm) if sorted(perm) == list(range(len(dims))) else None
    try:
        numbers = None if second is None else [int(v) for v in to_array(second.name, second).reshape(-1)]
        probe = np.broadcast_to(np.zeros(1, np.uint8), dims)  # takes no memory, whatever the shape
        if node.op_type == "Reshape":
            keep, wanted = not given.get("allowzero", 0), numbers if numbers is not None else given.get("shape", ())
            sizes = [dims[i] if d == 0 and keep else d for i, d in enumerate(wanted)]
            return ("reshape", probe.reshape(sizes).shape) if min(sizes, default=0) >= -1 else None
        if node.op_type == "Flatten":
            at = int(given.get("axis", 1))
            at += len(dims) if at < 0 else 0
            return "reshape", (math.prod(dims[:at]), math.prod(dims[at:]))
        axes = tuple(numbers if numbers is not None else given.get("axes", ()))
        if node.op_type == "Unsqueeze":
            return "reshape", np.expand_dims(probe, axes).shape
        return "reshape", np.squeeze(probe, axes or None).shape
    except (ValueError, IndexError, OverflowError):
        return None  # onnx's own check reports it


def _against(t: TensorProto, uses: _Uses) -> str:
    """Returns why stored weights `t` with the readers `uses` cannot be 2:4, or ""."""
    first = uses.layers[0]
    if reason := next((use.reason for use in uses.layers if use.reason), ""):
        return reason
    if any((use.axis, use.views) != (first.axis, first.views) for use in uses.layers):
        return "shared by layers that read it along different axes"
    if uses.others:
        return f"also read by {uses.others[0]}"
    if t.data_type not in FLOATS and not any(isinstance(view, Coding) for view in first.views):
        return f"of type {type_name(t.data_type)}, not floating point"
    dims = seen_dims(t, first.views)
    if first.axis >= len(dims) or dims[first.axis] % 4:
        return f"shape {list(dims)}: the input channels (axis {first.axis}) are not a multiple of 4"
    return ""


def _channel_axis(node: onnx.NodeProto, slot: int, rank: int) -> tuple[int | None, str]:
    """Returns (axis, reason against 2:4 or "") for a node that reads a constant of that rank as input `slot`: the axis of input
    channels if the constant is its weights, else None.
    """
    if node.op_type == "Conv" and slot == 1:
        return 1, ""  # the input channels of one group
    if node.op_type == "ConvTranspose" and slot == 1:
        group = int_attribute(node, "group", 1)
        return 0, "" if group == 1 else f"grouped convolution (group={group})"
    if node.op_type == "Gemm" and slot == 1:
        return (1 if int_attribute(node, "transB", 0) else 0), ""
    if node.op_type == "MatMul" and rank >= 2:
        return (rank - 2 if slot == 1 else rank - 1), ""
    return None, ""


def name_nodes(nodes: Iterable[onnx.NodeProto] | ir.Graph) -> None:
    """Gives each node a unique name: to a node without one Operator_index, and an index to a name in use."""
    taken: set[str] = set()
    for i, node in enumerate(nodes):
        name = node.name or f"{node.op_type}_{i}"
        while name in taken:
            name = f"{name}_{i}"
        node.name = name
        taken.add(name)


def name_layers(graph: onnx.GraphProto) -> dict[str, str]:
    """Names nodes as `name_nodes` does, then layers after their modules (`layer1.0.conv1`); returns new name -> the former
    name.

    A module that is used several times gets a number behind its name. Must precede `load.drop_texts`, which drops the modules.
    Names without a known module stay.
    """
    name_nodes(graph.node)
    wanted = dict(_modules(graph))
    taken, changed = {node.name for i, node in enumerate(graph.node) if i not in wanted}, dict[str, str]()
    for i, module in wanted.items():
        node, name = graph.node[i], unused_name(module, taken)
        taken.add(name)
        if name != node.name:
            changed[name], node.name = node.name, name
    return changed


def _modules(graph: onnx.GraphProto) -> Iterator[tuple[int, str]]:
    """Yields (index of the node, module) for nodes with weights whose module is known: from the weight's name, the exporter's
    metadata, or a path as torch.onnx.export(dynamo=False) writes it.
    """
    sources = {name: name for name, _ in stored_tensors(graph)}  # constant, or view of one -> the constant
    for i, node in enumerate(graph.node):
        read = next((sources[name] for name in node.input[:2] if name in sources), "")
        if read and node.output and node.op_type in (*COPIES, *VIEWS, *CODINGS):
            sources[node.output[0]] = read
        if read and node.op_type in LAYERS:
            found = (read.removesuffix(".weight") if read.endswith(".weight") else "", _scope(node), _path(node))
            if module := next((m for m in found if len(m) <= MOST_MODULE and MODULE.fullmatch(m)), ""):
                yield i, module


def _scope(node: onnx.NodeProto) -> str:
    """Returns the innermost module in the metadata of torch.onnx.export, "" if there is none: `layer1.0` of
    `: Net/layer1: Sequential/layer1.0: Conv2d/conv2d: aten.conv2d.default`. A convolution into which a BatchNormalization was
    fused has the module of the normalization there.
    """
    text = next((entry.value for entry in node.metadata_props if entry.key == "namespace"), "")
    return text.split("/")[-2].partition(":")[0].strip() if text.count("/") > 1 else ""


def _path(node: onnx.NodeProto) -> str:
    """Returns the module in a node's name: `layer1.0.conv1` of `/layer1/layer1.0/conv1/Conv`, as a module in a list repeats the
    list's name; "" if there is none."""
    root, *modules, last = node.name.split("/") if node.name.startswith("/") else ("", "")
    if root or not modules or not last.startswith(node.op_type):
        return ""
    short = [m for m, after in zip(modules, (*modules[1:], ""), strict=True) if not after.startswith(f"{m}.")]
    return ".".join(short)
