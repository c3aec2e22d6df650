"""The weights of an ONNX model as stored: who reads them along which axis, and their 2:4 pruning."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
from onnx import TensorProto

from cuda_kernels import sparse24
from gpu_runtime.frontend.check import FLOATS, check_graph, check_values, to_array
from gpu_runtime.frontend.load import load_whole, named, stored_tensors, title, type_name

COPIES = ("Identity", "Cast")  # what leaves the pattern as it is


@dataclass(frozen=True, slots=True)
class Stored:
    """How weights stand to 2:4 as the file stores them, before anything is folded into them and before FP16.

    `groups`: number of 4-groups of input channels; `fitting`: those with at most 2 non-zeros; `energy`: sum of the squared
    weights; `lost`: the part of it that the nearest 2:4 pattern, which --sparsity=force prunes to, sets to zero.
    """

    groups: int
    fitting: int
    lost: float
    energy: float

    @property
    def fits(self) -> bool:
        return self.fitting == self.groups

    @property
    def share(self) -> float:
        return self.fitting / self.groups if self.groups else 1.0

    @property
    def lost_energy(self) -> float:
        """The share of the squared weights that pruning would set to zero, 0 to 0.5: the one that every command shows."""
        return self.lost / self.energy if self.energy else 0.0


def as_stored(w: np.ndarray, axis: int) -> Stored:
    ok = sparse24.fits(w, axis)
    return Stored(ok.size, int(ok.sum()), *sparse24.energy(w, axis))


def together(parts: Iterable[Stored]) -> Stored:
    """Several weights as one."""
    rows = [(p.groups, p.fitting, p.lost, p.energy) for p in parts]
    return Stored(*(sum(column) for column in zip(*rows, strict=True))) if rows else Stored(0, 0, 0.0, 0.0)


def stored_by_layer(graph: onnx.GraphProto) -> dict[str, Stored]:
    """Node -> its weights, of every layer whose weights can have the pattern. Nodes have their names by now."""
    found: dict[tuple[str, int], Stored] = {}
    rows = {}
    for w in weights(graph):
        if not w.reason and (values := w.values) is not None:
            if (w.name, w.axis) not in found:
                found[w.name, w.axis] = as_stored(values, w.axis)
            rows[w.node.name] = found[w.name, w.axis]
    return rows


def stored_weights(path: str | os.PathLike) -> list[Weight]:
    """Each constant that a Conv, ConvTranspose, Gemm or MatMul reads. Sizes of inputs and unsupported operators do not matter.
    Raises ModelError."""
    path = Path(path)
    with named(path):
        proto = load_whole(path)
        check_graph(proto.graph)
        check_values(proto.graph)
        name_nodes(proto.graph.node)
        return weights(proto.graph)


def prune_weights(graph: onnx.GraphProto) -> tuple[dict[str, Stored], tuple[tuple[str, str], ...]]:
    """Prune weights of convolutions and matrix products in place along their input channels -> (changed: what each was,
    (name, reason) of those kept).

    A shared weight is pruned once; one that has the pattern already is in neither list.
    """
    pruned, kept = {}, {}
    for w in weights(graph):
        if w.reason or w.tensor is None:
            kept[w.name] = w.reason
        elif not sparse24.fits(array := to_array(w.name, w.tensor), w.axis).all():
            pruned[w.name] = as_stored(_values(w.name, w.tensor), w.axis)
            for data in ("float_data", "int32_data", "double_data"):
                w.tensor.ClearField(data)
            w.tensor.raw_data = sparse24.prune(array, w.axis).tobytes()
    return pruned, tuple(kept.items())


@dataclass(frozen=True, slots=True)
class Weight:
    """A layer's weights: `axis` is that of the input channels, `reason` what stands against 2:4, or empty. The reason is the
    weight's: the same in every layer that shares it. A weight that the graph computes has no tensor."""

    node: onnx.NodeProto
    name: str
    tensor: TensorProto | None
    axis: int
    reason: str

    @property
    def values(self) -> np.ndarray | None:
        """As stored; bfloat16 as FP32, which holds it."""
        return None if self.tensor is None else _values(self.name, self.tensor)


def _values(name: str, t: TensorProto) -> np.ndarray:
    values = to_array(name, t)
    return values.astype(np.float32) if t.data_type == TensorProto.BFLOAT16 else values


@dataclass(frozen=True, slots=True)
class _Uses:
    """Who reads a constant: layers, as (node, axis of the input channels, reason against 2:4), and titles of other nodes."""

    layers: list[tuple[onnx.NodeProto, int, str]] = field(default_factory=list)
    others: list[str] = field(default_factory=list)


def weights(graph: onnx.GraphProto) -> list[Weight]:
    """Every weight that a layer reads, once for each layer."""
    tensors = dict(stored_tensors(graph))
    producer = {out: node for node in graph.node for out in node.output}
    found = []
    for name, uses in _uses_of_constants(graph, tensors, producer).items():
        t = tensors.get(name)
        if uses.layers:
            reason = _against(t, uses) if t is not None else f"computed by {title(producer[name])}, not stored"
            found += [Weight(node, name, t, uses.layers[0][1], reason) for node, *_ in uses.layers]
    return found


def _uses_of_constants(
    graph: onnx.GraphProto, tensors: Mapping[str, TensorProto], producer: Mapping[str, onnx.NodeProto]
) -> dict[str, _Uses]:
    constant = set(tensors)
    for node in graph.node:
        if node.input and all(n in constant for n in node.input if n):
            constant.update(node.output)

    def stored(name: str) -> str:
        """Back through copies and casts, which leave the pattern as it is."""
        while name not in tensors and name in producer and producer[name].op_type in COPIES:
            name = producer[name].input[0]
        return name

    found: dict[str, _Uses] = {}
    for node in graph.node:
        for slot, name in enumerate(map(stored, node.input) if node.op_type not in COPIES else ()):
            if name in constant:
                axis, reason = _channel_axis(node, slot, len(tensors[name].dims) if name in tensors else 2)
                uses = found.setdefault(name, _Uses())
                if axis is None:
                    uses.others.append(title(node))
                else:
                    uses.layers.append((node, axis, reason))
    return found


def _against(t: TensorProto, uses: _Uses) -> str:
    """Why 2:4 cannot apply to a stored weight, or an empty string."""
    axis = uses.layers[0][1]
    if reason := next((reason for *_, reason in uses.layers if reason), ""):
        return reason
    if any(other != axis for _, other, _ in uses.layers):
        return "shared by layers that read it along different axes"
    if uses.others:
        return f"also read by {uses.others[0]}"
    if t.data_type not in FLOATS:
        return f"of type {type_name(t.data_type)}, not floating point"
    if axis >= len(t.dims) or t.dims[axis] % 4:
        return f"shape {list(t.dims)}: the input channels (axis {axis}) are not a multiple of 4"
    return ""


def _channel_axis(node: onnx.NodeProto, slot: int, rank: int) -> tuple[int | None, str]:
    """Axis of the input channels when `node` reads a constant of that rank at `slot` as its weights, else None."""
    if node.op_type == "Conv" and slot == 1:
        return 1, ""  # of one group, where there are several
    if node.op_type == "ConvTranspose" and slot == 1:
        group = int_attribute(node, "group", 1)
        return 0, "" if group == 1 else f"grouped convolution (group={group})"
    if node.op_type == "Gemm" and slot == 1:
        return (1 if int_attribute(node, "transB", 0) else 0), ""
    if node.op_type == "MatMul" and rank >= 2:
        return (rank - 2 if slot == 1 else rank - 1), ""
    return None, ""


def int_attribute(node: onnx.NodeProto, name: str, default: int) -> int:
    return next((a.i for a in node.attribute if a.name == name), default)


def name_nodes(nodes: Iterable[onnx.NodeProto] | ir.Graph) -> None:
    """Unnamed nodes get Type_index; a name used twice gets an index too."""
    taken: set[str] = set()
    for i, node in enumerate(nodes):
        name = node.name or f"{node.op_type}_{i}"
        while name in taken:
            name = f"{name}_{i}"
        node.name = name
        taken.add(name)
