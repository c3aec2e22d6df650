"""The weights of an ONNX model as stored: who reads them along which axis, and their 2:4 pruning."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto

from cuda_kernels import sparse24
from gpu_runtime.frontend.check import FLOATS, check_graph, check_values, to_array
from gpu_runtime.frontend.load import load_whole, named, stored_tensors, title, type_name


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
    for node, name, t, axis, reason in weights(graph):
        if not reason:
            if (name, axis) not in found:
                found[name, axis] = as_stored(_values(name, t), axis)
            rows[node.name] = found[name, axis]
    return rows


def _values(name: str, t: TensorProto) -> np.ndarray:
    """As stored; bfloat16 as FP32, which holds it."""
    values = to_array(name, t)
    return values.astype(np.float32) if t.data_type == TensorProto.BFLOAT16 else values


def stored_weights(path: str | os.PathLike) -> Iterator[tuple[str, str, str, np.ndarray | None, int, str]]:
    """(layer, op type, weight, values, axis, reason) of each constant that a Conv, ConvTranspose, Gemm or MatMul reads.

    `values` are as stored (bfloat16 as FP32), None where the graph computes them; `axis` is that of the input channels;
    `reason` tells why 2:4 cannot apply, or is empty. Sizes of inputs and unsupported operators do not matter.
    Raises ModelError.
    """
    path = Path(path)
    with named(path):
        proto = load_whole(path)
        check_graph(proto.graph)
        check_values(proto.graph)
        name_nodes(proto.graph.node)
        rows = list(weights(proto.graph))
    for node, name, t, axis, reason in rows:
        yield node.name, node.op_type, name, None if t is None else _values(name, t), axis, reason


def prune_weights(graph: onnx.GraphProto) -> tuple[dict[str, Stored], tuple[tuple[str, str], ...]]:
    """Prune weights of convolutions and matrix products in place along their input channels -> (changed: what each was,
    (name, reason) of those kept).

    A shared weight is pruned once; one that has the pattern already is in neither list.
    """
    pruned, kept = {}, {}
    for _, name, t, axis, reason in weights(graph):
        if reason:
            kept[name] = reason
        elif not sparse24.fits(w := to_array(name, t), axis).all():
            pruned[name] = as_stored(_values(name, t), axis)
            for field in ("float_data", "int32_data", "double_data"):
                t.ClearField(field)
            t.raw_data = sparse24.prune(w, axis).tobytes()
    return pruned, tuple(kept.items())


def weights(graph: onnx.GraphProto) -> list[tuple[onnx.NodeProto, str, TensorProto | None, int, str]]:
    """(node, weight, tensor, axis of the input channels, reason against 2:4 or "") of every weight that a layer reads.

    The reason is the weight's: the same in every layer that shares it. A weight that the graph computes has no tensor.
    """
    tensors = dict(stored_tensors(graph))
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
                    others.setdefault(name, []).append(title(node))
                else:
                    uses.setdefault(name, []).append((node, axis, reason))
    found = []
    for name, ways in uses.items():
        axis, t = ways[0][1], tensors.get(name)
        reason = next((r for *_, r in ways if r), "")
        if t is None:
            reason = f"computed by {title(producer[name])}, not stored"
        elif not reason and any(a != axis for _, a, _ in ways):
            reason = "shared by layers that read it along different axes"
        elif not reason and name in others:
            reason = f"also read by {others[name][0]}"
        elif not reason and t.data_type not in FLOATS:
            reason = f"of type {type_name(t.data_type)}, not floating point"
        elif not reason and (axis >= len(t.dims) or t.dims[axis] % 4):
            reason = f"shape {list(t.dims)}: the input channels (axis {axis}) are not a multiple of 4"
        found += [(node, name, t, axis, reason) for node, axis, _ in ways]
    return found


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


def name_nodes(nodes) -> None:
    """Unnamed nodes get Type_index; a name used twice gets an index too."""
    taken: set[str] = set()
    for i, node in enumerate(nodes):
        name = node.name or f"{node.op_type}_{i}"
        while name in taken:
            name = f"{name}_{i}"
        node.name = name
        taken.add(name)
