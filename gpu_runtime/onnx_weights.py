"""The weights of an ONNX model as stored: who reads them along which axis, and their 2:4 pruning."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto

from cuda_kernels import sparse24
from gpu_runtime.onnx_check import FLOATS, check_graph, check_values, to_array
from gpu_runtime.onnx_load import load_whole, named, stored_tensors, title, type_name


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
        values = None if t is None else to_array(name, t)
        if t is not None and t.data_type == TensorProto.BFLOAT16:
            values = values.astype(np.float32)
        yield node.name, node.op_type, name, values, axis, reason


def prune_weights(graph: onnx.GraphProto) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    """Prune weights of convolutions and matrix products in place along their input channels -> (changed, (name, reason) of
    those kept).

    A shared weight is pruned once; one that has the pattern already is in neither list.
    """
    pruned, kept = [], {}
    for _, name, t, axis, reason in weights(graph):
        if reason:
            kept[name] = reason
        elif not sparse24.fits(w := to_array(name, t), axis).all():
            for field in ("float_data", "int32_data", "double_data"):
                t.ClearField(field)
            t.raw_data = sparse24.prune(w, axis).tobytes()
            pruned.append(name)
    return tuple(pruned), tuple(kept.items())


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
