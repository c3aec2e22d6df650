"""What lowering is given: layers, one operation each, with the constants folded into them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx_ir as ir

from gpu_runtime.frontend.queries import (
    attribute,
    constant,
    name_of,
    operand,
    operands,
    per_channel,
    shape_of,
)
from gpu_runtime.fusion.chains import Affine, Chain, activation_after, scaled_after, then
from tactics.problems.pointwise_ops import ACTIVATIONS, NONE, Activation, Stage

EMPTY: Mapping[str, np.ndarray] = MappingProxyType({})
SEVERAL = ("Split", "LayerNormalization", "TopK", "MaxPool")  # operators whose outputs are layers of their own


@dataclass(frozen=True, slots=True)
class Layer:
    """One operation. `op`: the ONNX type that gives its meaning, or Chain; `node`: where its attributes stand.

    `label` is its name and `nodes` every ONNX node covered. `weights`: conv "w" [K,C/g,R,S] (Gemm: [K,C]; ConvTranspose:
    [K,C,R,S]) and "b" [K], chain "c0", "c1", ... as stored, Standardize "epsilon" [1], it and GroupNormalization "scale" and
    "bias" along `axis`, activation "slope" [K], by what its result is scaled and shifted "scales" and "shifts" [K], all FP64 or
    FP32, not yet rounded. `when`: for every group named, the option chosen must be one of those listed, or the layer does not
    exist. `d2s`, `d2s_mode`: the block and mode of depth-to-space over the result, before the residual; `act_first`: and the
    activation comes before the residual; `last`: a second activation, behind all of that. `prologue`: the input is scaled,
    shifted and rectified first, by "scale" and "shift" [C]. `block`: the size of a shuffle's blocks, or its number of groups.
    `axis`: of the output, along which the rows of "w" lie (of a MatMul: the last, or the one before). `merged`: the nodes of
    the convolutions that are one here.
    """

    op: str
    node: ir.Node
    label: str
    nodes: tuple[str, ...]
    inputs: tuple[ir.Value, ...]
    output: ir.Value
    weights: Mapping[str, np.ndarray] = field(default_factory=dict)
    act: Activation = NONE
    residual: bool = False
    act_first: bool = False
    last: Activation = NONE
    stages: tuple[Stage, ...] = ()
    d2s: int = 1
    d2s_mode: str = "dcr"
    pool: ir.Node | None = None
    prologue: bool = False
    axis: int = 1
    block: int = 1
    when: tuple[tuple[str, str], ...] = ()
    merged: tuple[str, ...] = ()


def names(nodes: Iterable[ir.Node]) -> tuple[str, ...]:
    return tuple(map(name_of, nodes))


def label(nodes: Iterable[ir.Node]) -> str:
    return " + ".join(names(nodes))


def plain(node: ir.Node) -> Layer:
    """A node as it is."""
    inputs = tuple(v for v in operands(node) if v.const_value is None)
    return Layer(node.op_type, node, name_of(node), names([node]), inputs, node.outputs[0])


def of_nodes(
    op: str, node: ir.Node, used: Sequence[ir.Node], x: ir.Value, weights: Mapping[str, np.ndarray] = EMPTY, axis: int = 1
) -> Layer:
    """What the nodes `used` compute of `x` together; `node`: the one whose attributes say what."""
    return Layer(op, node, label(used), names(used), (x,), used[-1].outputs[0], weights, axis=axis)


def of_chain(chain: Chain) -> Layer:
    return Layer(
        "Chain",
        chain.nodes[-1],
        label(chain.nodes),
        names(chain.nodes),
        chain.inputs,
        chain.output,
        chain.constants,
        stages=chain.stages,
    )


# ---- convolutions and products


@dataclass(frozen=True, slots=True)
class _Product:
    """Of a node: what it reads, its weights [K, ...], the output's axis along which their rows lie, and the bias [K] or [1]."""

    x: ir.Value
    w: np.ndarray
    axis: int = 1
    bias: np.ndarray | None = None


def _of_conv(node: ir.Node, bias: np.ndarray | None) -> _Product | None:
    w = constant(node.inputs[1])
    return None if w is None else _Product(operand(node), w, bias=bias)


def _of_conv_transpose(node: ir.Node, bias: np.ndarray | None) -> _Product | None:
    w, groups = constant(node.inputs[1]), attribute(node, "group", 1)
    if w is None or w.ndim not in (3, 4) or w.shape[0] % groups:
        return None
    c, k, *size = w.shape
    w = w.reshape(groups, c // groups, k, *size).swapaxes(1, 2).reshape(groups * k, c // groups, *size)
    return _Product(operand(node), w, bias=bias)


def _of_gemm(node: ir.Node, bias: np.ndarray | None) -> _Product | None:
    w, alpha = constant(node.inputs[1]), attribute(node, "alpha", 1.0)
    if w is None or w.ndim != 2 or len(shape_of(operand(node))) != 2 or attribute(node, "transA", 0):
        return None
    if bias is not None and (bias := per_channel(bias * attribute(node, "beta", 1.0), shape_of(node.outputs[0]))) is None:
        return None
    w = w if alpha == 1 else w.astype(np.float64) * alpha
    return _Product(operand(node), w if attribute(node, "transB", 0) else w.T, bias=bias)


def _of_matmul(node: ir.Node, bias: np.ndarray | None) -> _Product | None:
    (x, y), (left, right) = operands(node), map(constant, node.inputs)
    if left is not None and len(shape_of(y)) > 1:  # rows of the constant are output channels
        return _Product(y, left, len(shape_of(y)) - 2) if left.ndim == 2 else None
    return None if right is None or right.ndim != 2 else _Product(x, right.T, len(shape_of(x)) - 1)


CONVOLUTIONS = {"Conv": _of_conv, "ConvTranspose": _of_conv_transpose, "Gemm": _of_gemm, "MatMul": _of_matmul}


def convolution_at(node: ir.Node) -> Layer | None:
    """Conv, ConvTranspose, Gemm or MatMul with constant weights, and the constants' scales and shifts after it folded in, in
    FP64."""
    if node.op_type not in CONVOLUTIONS:
        return None
    third = node.inputs[2] if len(node.inputs) > 2 else None
    bias = constant(third)
    if third is not None and bias is None:
        return None
    found = CONVOLUTIONS[node.op_type](node, bias)
    if found is None or (found.bias is not None and found.bias.shape not in ((1,), found.w.shape[:1])):
        return None
    w, rows = found.w, found.w.shape[:1]
    b = np.zeros(rows) if found.bias is None else np.broadcast_to(found.bias.astype(np.float64), rows)
    (scale, b), scaled = scaled_after(node.outputs[0], (np.ones(rows), b), found.axis)
    w = by_rows(w, scale) if np.any(scale != 1) else w
    weights = {"w": w, "b": b} if found.bias is not None or np.any(b) else {"w": w}
    return replace(of_nodes(node.op_type, node, (node, *scaled), found.x, weights, found.axis), label=name_of(node))


def by_rows(array: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Weights or a bias [K, ...] in double precision, each row times its scale, [K] or [1]."""
    return array.astype(np.float64) * scale.reshape(-1, *(1,) * (array.ndim - 1))


def leading_affine(chain: Layer) -> tuple[Affine, int]:
    """(scale and shift per channel, each [C] or [1], FP64, of all stages of the kind that a chain begins with; how many)."""
    affine, count = (np.ones(1), np.zeros(1)), 0
    for stage in chain.stages:
        value = of_channels(chain, stage, shape_of(chain.output))
        found = None if value is None else then(affine, stage.op, value)
        if found is None:
            break
        affine, count = found, count + 1
    return affine, count


def of_channels(chain: Layer, stage: Stage, shape: tuple[int, ...]) -> np.ndarray | None:
    """The one constant of a stage, [C] or [1] in double precision, if that is what it has."""
    if stage.operand:
        array = chain.weights.get(stage.operand)
        return None if array is None else per_channel(array.astype(np.float64), shape)
    return np.array(stage.params, np.float64) if len(stage.params) == 1 else None


def with_activation(layer: Layer) -> Layer:
    """The layer with the activation that alone reads its output; the same one where none does."""
    found = activation_after(layer.output)
    if found is None or (found[1] is not None and layer.axis != 1):
        return layer
    act, slope, used = found
    if slope is not None and layer.d2s > 1:  # one slope for every corner of a block
        slope = np.tile(slope, layer.d2s**2) if layer.d2s_mode == "dcr" else np.repeat(slope, layer.d2s**2)
    return followed(layer, used, weights=layer.weights if slope is None else {**layer.weights, "slope": slope}, act=act)


def followed(layer: Layer, used: Sequence[ir.Node], **changes: Any) -> Layer:
    """The layer that does the nodes behind it too."""
    y = used[-1].outputs[0]
    return replace(layer, label=f"{layer.label} + {label(used)}", nodes=layer.nodes + names(used), output=y, **changes)


class Links:
    """Who gives and reads each tensor, in order, found once: what a question costs is its own size, not the graph's."""

    def __init__(self, layers: Iterable[Layer]) -> None:
        self._at: dict[int, int] = {}
        self.readers: dict[ir.Value, list[Layer]] = {}
        self.makers: dict[ir.Value, list[Layer]] = {}  # several where there are options
        for i, layer in enumerate(layers):
            self._at[id(layer)] = i
            self.makers.setdefault(layer.output, []).append(layer)
            for t in dict.fromkeys(layer.inputs):
                self.readers.setdefault(t, []).append(layer)

    def place(self, layer: Layer) -> int:
        """Of one of the layers, in their order."""
        return self._at[id(layer)]

    def only_reader(self, tensor: ir.Value) -> Layer | None:
        """The layer that alone reads a tensor that is no network output, in all plans."""
        readers = self.readers.get(tensor, [])
        return readers[0] if len(readers) == 1 and not readers[0].when and not tensor.is_graph_output() else None


def with_affine(layer: Layer) -> Layer:
    """The layer with the constants' scales and shifts behind its activation.

    What scales the result of a homogeneous activation by positive numbers scales its weights instead.
    """
    rows = layer.weights["w"].shape[:1]
    (scales, shifts), used = scaled_after(layer.output, (np.ones(rows), np.zeros(rows)), layer.axis)
    if not used:
        return layer
    weights = dict(layer.weights)
    if layer.act != NONE and ACTIVATIONS[layer.act.name].homogeneous and np.all(scales > 0):
        weights |= {name: by_rows(weights[name], scales) for name in {"w", "b"} & weights.keys()}
        scales = np.ones(rows)
    if np.any(scales != 1) or np.any(shifts):
        weights |= {"scales": scales, "shifts": shifts}
    return followed(layer, used, weights=weights)


def with_last(layer: Layer) -> Layer:
    """The layer with a second activation."""
    found = activation_after(layer.output)
    return layer if found is None or found[0].name == "prelu" else followed(layer, found[2], last=found[0])
