"""Clean onnx-ir graph -> layers: one operation each, with what its kernel does in the same breath.

Always fused: scales and shifts by constants (BatchNormalization, Mul, Add, ...) into the convolution before them, in
double precision, and the activation after it. A residual Add can go into either of its producers: those are
alternatives, and the plan chooses. Each such Add is a group of options, "apart" or "into <convolution>".

Depth-to-space after a convolution is that convolution's store; space-to-depth before one is a larger kernel and stride; a
channel shuffle is an order of weight rows (before it) or columns (after it). They stay layers only where nothing takes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import onnx_ir as ir

from gpu_runtime.onnx_import import Imported
from tactics.problem import NONE, Activation

FLT_MAX = 3.4028235e38
BINARY = {"Add": "add", "Sub": "sub", "Mul": "mul", "Div": "div", "Max": "max", "Min": "min"}
VIEWS = ("Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose")


@dataclass(frozen=True, slots=True)
class Layer:
    """One operation. `op`: the ONNX type that gives its meaning; `node`: where its attributes stand.

    `label` is its name and `nodes` every ONNX node covered. `weights`: conv "w" [K,C/g,R,S] (Gemm: [K,C]; ConvTranspose:
    [K,C,R,S]) and "b" [K],
    pointwise "operand" [C] or [1], activation "slope" [K], all FP64 or FP32, not yet rounded. `when`: for every group
    named, the option chosen must be one of those listed, or the layer does not exist. `d2s`, `d2s_mode`: the block and
    mode of depth-to-space over the result, before the residual; `act_first`: and the
    activation comes before the residual; `s2d`: the block of space-to-depth over the input, whose
    taps "w" holds already (kernel sizes, strides and pads of the node grow by it). `block`: of a shuffle left a layer.
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
    swap: bool = False
    d2s: int = 1
    d2s_mode: str = "dcr"
    s2d: int = 1
    block: int = 1
    when: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Fused:
    """All layers with all alternatives, in topological order; `groups`: (Add node, its options)."""

    imported: Imported
    layers: tuple[Layer, ...]
    groups: tuple[tuple[str, tuple[str, ...]], ...]


def fuse(imported: Imported) -> Fused:
    """Find the layers of a cleaned graph. Nothing fails here: what no rule covers stays a layer of its ONNX type."""
    graph = imported.model.graph
    position = {node: i for i, node in enumerate(graph)}
    found: list[tuple[int, Layer]] = []
    groups = []
    covered: set[ir.Node] = set()
    waiting: dict[ir.Value, Layer] = {}  # convolution results that a residual Add alone reads
    taken: dict[ir.Value, Shuffle] = {}  # shuffled tensors whose readers, convolutions all, read what was shuffled instead

    def emit(node: ir.Node, layer: Layer, used: list[ir.Node]) -> None:
        found.append((position[node], layer))
        covered.update(used)

    for node in graph:
        if node in covered:
            continue
        shuffle = _shuffle(node)
        if shuffle and _all_readers_take(shuffle):
            taken[shuffle.output] = shuffle
            covered.update(shuffle.nodes)
        elif shuffle:
            used = shuffle.nodes
            x, y = used[0].inputs[0], shuffle.output
            layer = Layer(shuffle.kind, used[0], used[len(used) // 2].name, _names(used), (x,), y, block=shuffle.size)
            emit(node, layer, used)
        elif node.op_type in VIEWS:
            emit(node, _plain(node), [node])
        elif node.op_type in ("Conv", "ConvTranspose", "Gemm", "MatMul") and (core := _convolution(node)):
            layer, used = core
            if node.op_type == "Conv" and node.inputs[0] in taken:
                layer = _unshuffled(layer, taken[node.inputs[0]])
            layer, more = _with_shuffle(layer)
            used = used + more
            reader = single_reader(layer.output)
            if reader is not None and _is_residual_add(reader):
                waiting[layer.output] = layer
                covered.update(used)
            else:
                layer, more = _with_activation(layer)
                layer, last = _with_shuffle(layer)
                reader = single_reader(layer.output)
                adds = reader is not None and _is_residual_add(reader) and not _activation_after(reader.outputs[0])
                if more and adds and layer.op != "ConvTranspose":
                    waiting[layer.output] = replace(layer, act_first=True)
                    covered.update(used + more + last)
                else:
                    emit(node, layer, used + more + last)
        elif node.op_type == "Add" and _is_residual_add(node):
            apart, more = _with_activation(Layer("Add", node, node.name, (node.name,), tuple(node.inputs), node.outputs[0]))
            convs = [waiting[v] for v in node.inputs if v in waiting]
            options = ("apart", *(f"into {c.node.name}" for c in convs))
            if convs:
                groups.append((node.name, options))
                apart = replace(apart, when=((node.name, "apart"),))
            for conv in convs:
                option = f"into {conv.node.name}"
                alone = tuple((node.name, o) for o in options if o != option)
                emit(conv.node, replace(conv, act_first=False, when=alone), [])
                other = next(v for v in node.inputs if v is not conv.output)
                into = replace(
                    conv,
                    label=f"{conv.label} + {apart.label}",
                    nodes=conv.nodes + apart.nodes,
                    inputs=(conv.inputs[0], other),
                    output=apart.output,
                    weights={**conv.weights, **apart.weights},
                    act=conv.act if conv.act_first else apart.act,
                    residual=True,
                    when=((node.name, option),),
                )
                emit(node, into, [])
            emit(node, apart, [node, *more])
        elif node.op_type == "BatchNormalization" and (affine := scale_and_shift(node, node.inputs[0])):
            y = node.outputs[0]
            middle = ir.Value(name=f"{y.name} (scaled)", shape=y.shape, type=y.type)
            names = (node.name,)
            emit(
                node,
                Layer("Mul", node, f"{node.name} (scale)", names, (node.inputs[0],), middle, {"operand": affine[0]}),
                [],
            )
            layer, more = _with_activation(Layer("Add", node, node.name, names, (middle,), y, {"operand": affine[1]}))
            emit(node, layer, [node, *more])
        elif alone := _activation_at(node):
            act, slope, used = alone
            weights = {} if slope is None else {"slope": slope}
            x, y = used[0].inputs[0], used[-1].outputs[0]
            emit(node, Layer("Identity", node, _label(used), _names(used), (x,), y, weights, act), used)
        elif node.op_type == "Split":
            for i, y in enumerate(node.outputs):  # a layer for each part that somebody wants
                if y.uses() or y.is_graph_output():
                    emit(node, Layer("Split", node, f"{node.name} part {i}", (node.name,), (node.inputs[0],), y), [node])
        else:
            layer, more = _with_activation(_binary(node)) if node.op_type in BINARY else (_plain(node), [])
            emit(node, layer, [node, *more])
    found.sort(key=lambda pair: pair[0])  # stable: alternatives of one node keep their order
    return Fused(imported, tuple(layer for _, layer in found), tuple(groups))


# ---- questions about the graph, shared with lower


def constant(value: ir.Value | None) -> np.ndarray | None:
    """The array of a stored constant, else None."""
    return None if value is None or value.const_value is None else value.const_value.numpy()


def attribute(node: ir.Node, name: str, default=None):
    """An attribute's Python value (strings as str, lists as tuple), or the default."""
    found = node.attributes.get(name)
    return default if found is None else tuple(found.value) if isinstance(found.value, (list, tuple)) else found.value


def shape_of(value: ir.Value) -> tuple[int, ...]:
    """The static ONNX shape."""
    return tuple(int(d) for d in value.shape)


def single_reader(value: ir.Value) -> ir.Node | None:
    """The one node that reads `value`, exactly once, if it is no network output."""
    uses = list(value.uses())
    return uses[0].node if len(uses) == 1 and not value.is_graph_output() else None


def per_channel(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray | None:
    """A constant that broadcasts over a tensor of `shape` along axis 1 only -> [C] or [1]; None if it does otherwise."""
    dims = (1,) * (len(shape) - array.ndim) + array.shape
    if len(dims) != len(shape) or any(d != 1 for i, d in enumerate(dims) if i != 1):
        return None
    if array.size not in (1, shape[1] if len(shape) > 1 else 1):
        return None
    return array.reshape(-1)


def scale_and_shift(node: ir.Node, x: ir.Value) -> tuple[np.ndarray, np.ndarray] | None:
    """FP64 (scale, shift), each [C] or [1], if node computes x * scale + shift with constants, else None."""
    one, zero = np.ones(1), np.zeros(1)
    if node.op_type == "BatchNormalization":
        stats = [constant(v) for v in node.inputs[1:5]]
        if x is not node.inputs[0] or any(a is None for a in stats) or attribute(node, "training_mode", 0):
            return None
        if any(a.shape != (shape_of(x)[1],) for a in stats):
            return None
        gamma, beta, mean, var = (a.astype(np.float64) for a in stats)
        with np.errstate(all="ignore"):  # lower refuses what is not finite
            scale = gamma / np.sqrt(var + attribute(node, "epsilon", 1e-5))
            return scale, beta - mean * scale
    if node.op_type not in ("Add", "Sub", "Mul", "Div") or shape_of(node.outputs[0]) != shape_of(x):
        return None
    a, b = node.inputs
    other = constant(b if a is x else a)
    c = None if other is None else per_channel(other.astype(np.float64), shape_of(x))
    if c is None:
        return None
    if node.op_type == "Add":
        return one, c
    if node.op_type == "Sub":
        return (one, -c) if a is x else (-one, c)
    if node.op_type == "Mul":
        return c, zero
    return (1 / c, zero) if a is x and np.all(c) else None


# ---- rules


def _names(nodes) -> tuple[str, ...]:
    return tuple(n.name for n in nodes)


def _label(nodes) -> str:
    return " + ".join(n.name for n in nodes)


def _plain(node: ir.Node) -> Layer:
    inputs = tuple(v for v in node.inputs if v is not None and v.const_value is None)
    return Layer(node.op_type, node, node.name, (node.name,), inputs, node.outputs[0])


def _binary(node: ir.Node) -> Layer:
    layer = _plain(node)
    if len(node.inputs) == 2 and len(layer.inputs) == 1:
        c = per_channel(constant(node.inputs[1 - node.inputs.index(layer.inputs[0])]), shape_of(node.outputs[0]))
        if c is not None:
            return replace(layer, weights={"operand": c}, swap=layer.inputs[0] is node.inputs[1])
    return layer


def _is_residual_add(node: ir.Node) -> bool:
    """An Add of two different tensors of one shape."""
    if node.op_type != "Add" or any(constant(v) is not None for v in node.inputs):
        return False
    a, b = node.inputs
    return a is not b and shape_of(a) == shape_of(b)


def _convolution(node: ir.Node) -> tuple[Layer, list[ir.Node]] | None:
    """Conv, ConvTranspose, Gemm or MatMul with constant weights, and the constants' scales and shifts after it folded in."""
    w = constant(node.inputs[1])
    if node.op_type == "ConvTranspose" and w is not None:
        if w.ndim != 4 or attribute(node, "group", 1) != 1:
            return None
        w = w.transpose(1, 0, 2, 3)
    bias = constant(node.inputs[2]) if len(node.inputs) > 2 else None
    if w is None or (bias is None and len(node.inputs) > 2 and node.inputs[2] is not None):
        return None
    if node.op_type in ("Gemm", "MatMul"):
        if w.ndim != 2 or len(node.inputs[0].shape) != 2 or attribute(node, "transA", 0):
            return None
        alpha = attribute(node, "alpha", 1.0)
        w = w if alpha == 1 else w.astype(np.float64) * alpha
        w = w if attribute(node, "transB", 0) else w.T
        if bias is not None:
            bias = per_channel(bias * attribute(node, "beta", 1.0), shape_of(node.outputs[0]))
            if bias is None:
                return None
    if bias is not None and bias.shape not in ((1,), w.shape[:1]):
        return None
    b = np.zeros(w.shape[0]) if bias is None else np.broadcast_to(bias.astype(np.float64), w.shape[:1])
    has_bias, used = bias is not None, [node]
    while (reader := single_reader(used[-1].outputs[0])) is not None:
        affine = scale_and_shift(reader, used[-1].outputs[0])
        if affine is None:
            break
        scale, shift = affine
        if np.any(scale != 1):
            w = w * scale.reshape(-1, *(1,) * (w.ndim - 1))  # FP64, as scale is
        b = b * scale + shift
        has_bias |= bool(np.any(shift))
        used.append(reader)
    weights = {"w": w, "b": b} if has_bias else {"w": w}
    return Layer(node.op_type, node, node.name, _names(used), (node.inputs[0],), used[-1].outputs[0], weights), used


def _with_activation(layer: Layer) -> tuple[Layer, list[ir.Node]]:
    """The layer with the activation that alone reads its output, and the nodes of that activation."""
    found = _activation_after(layer.output)
    if found is None:
        return layer, []
    act, slope, used = found
    if slope is not None and layer.d2s > 1:  # one slope for every corner of a block
        slope = np.tile(slope, layer.d2s**2) if layer.d2s_mode == "dcr" else np.repeat(slope, layer.d2s**2)
    return replace(
        layer,
        label=f"{layer.label} + {_label(used)}",
        nodes=layer.nodes + _names(used),
        output=used[-1].outputs[0],
        weights=layer.weights if slope is None else {**layer.weights, "slope": slope},
        act=act,
    ), used


def _activation_after(value: ir.Value):
    """(activation, slope, nodes) if everything that reads `value` is one activation."""
    readers = {use.node for use in value.uses()}
    if value.is_graph_output() or not readers:
        return None
    for node in readers:
        found = _activation_at(node)
        if found and found[2][0].inputs[0] is value and set(found[2]) >= readers:
            return found
    return None


def _activation_at(node: ir.Node) -> tuple[Activation, np.ndarray | None, list[ir.Node]] | None:
    """(activation, slope, nodes) that starts at `node`, x * Sigmoid(x) and x * HardSigmoid(x) included."""
    op, x = node.op_type, node.inputs[0] if node.inputs else None
    if op in ("Sigmoid", "HardSigmoid"):
        gate = (0.0, 0.0) if op == "Sigmoid" else (attribute(node, "alpha", 0.2), attribute(node, "beta", 0.5))
        name = "silu" if op == "Sigmoid" else "hard_swish"
        reader = single_reader(node.outputs[0])
        product = reader is not None and reader.op_type == "Mul" and any(v is x for v in reader.inputs)
        if product and (op == "Sigmoid" or np.allclose(gate, (1 / 6, 0.5), rtol=1e-5)):
            return Activation(name), None, [node, reader]
        return (Activation("sigmoid") if op == "Sigmoid" else Activation("hard_sigmoid", gate)), None, [node]
    if op in ("Relu", "Tanh"):
        return Activation(op.lower()), None, [node]
    if op == "HardSwish":
        return Activation("hard_swish"), None, [node]
    if op == "LeakyRelu":
        return Activation("leaky_relu", (attribute(node, "alpha", 0.01),)), None, [node]
    if op == "PRelu":
        slope = constant(node.inputs[1])
        slope = None if slope is None else per_channel(slope, shape_of(x))
        if slope is None:
            return None
        if slope.size == 1:
            return Activation("leaky_relu", (float(slope[0]),)), None, [node]
        return Activation("prelu"), slope.astype(np.float32), [node]
    if op == "Clip":
        bounds = [FLT_MAX if i else -FLT_MAX for i in range(2)]
        for i, v in enumerate(node.inputs[1:3]):
            if v is not None:
                if (c := constant(v)) is None or c.size != 1:
                    return None
                bounds[i] = float(np.clip(c.reshape(()), -FLT_MAX, FLT_MAX))
        if bounds[0] == 0 and bounds[1] >= 65504:  # no FP16 value is larger
            return Activation("relu"), None, [node]
        return Activation("clip", tuple(bounds)), None, [node]
    return None


# ---- tensors whose elements only change places


@dataclass(frozen=True, slots=True)
class Shuffle:
    """`kind`: d2s_dcr, d2s_crd, s2d_dcr or s2d_crd by blocks of `size`, or channels (a shuffle of `size` groups)."""

    kind: str
    size: int
    nodes: list[ir.Node]

    @property
    def output(self) -> ir.Value:
        return self.nodes[-1].outputs[0]


# Reshape to six dimensions, Transpose, Reshape: kind -> (where c and the two block sizes stand in the six, the permutation).
SIX = {
    "d2s_crd": ((1, 2, 3), (0, 1, 4, 2, 5, 3)), "d2s_dcr": ((3, 1, 2), (0, 3, 4, 1, 5, 2)),
    "s2d_crd": ((1, 3, 5), (0, 1, 3, 5, 2, 4)), "s2d_dcr": ((1, 3, 5), (0, 3, 5, 1, 2, 4)),
}  # fmt: skip


def _shuffle(node: ir.Node) -> Shuffle | None:
    """The shuffle that begins at `node`: DepthToSpace, SpaceToDepth, or one written as Reshape, Transpose, Reshape."""
    if node.op_type in ("DepthToSpace", "SpaceToDepth") and len(node.inputs[0].shape) == 4:
        mode = attribute(node, "mode", "DCR").lower()
        return Shuffle(f"{'d2s' if node.op_type == 'DepthToSpace' else 's2d'}_{mode}", attribute(node, "blocksize"), [node])
    if node.op_type != "Reshape" or len(node.inputs[0].shape) != 4:
        return None
    turn = single_reader(node.outputs[0])
    back = None if turn is None or turn.op_type != "Transpose" else single_reader(turn.outputs[0])
    if back is None or back.op_type != "Reshape":
        return None
    x, apart, y = (shape_of(v) for v in (node.inputs[0], node.outputs[0], back.outputs[0]))
    (n, c, h, w), perm, nodes = x, attribute(turn, "perm"), [node, turn, back]
    if perm in ((0, 2, 1, 3), (0, 2, 1, 3, 4)) and x == y and apart[0] == n and apart[1] * apart[2] == c:
        return Shuffle("channels", apart[1], nodes)
    for kind, (axes, order) in SIX.items() if len(apart) == 6 else ():
        k, b, b2 = (apart[i] for i in axes)
        if kind.startswith("d2s"):
            fits = apart[4:] == (h, w) and y == (n, k, h * b, w * b)
        else:
            fits = (k, apart[2], apart[4]) == (c, h // b, w // b) and y == (n, c * b * b, h // b, w // b)
        if perm == order and b == b2 and apart[0] == n and fits:
            return Shuffle(kind, b, nodes)
    return None


def _all_readers_take(shuffle: Shuffle) -> bool:
    """Whether every reader is a convolution that can read the tensor unshuffled, with its weights' columns shuffled."""
    readers = [(use.node, use.idx) for use in shuffle.output.uses()]
    if shuffle.kind.startswith("d2s") or shuffle.output.is_graph_output():
        return False
    for node, slot in readers:
        w = constant(node.inputs[1]) if node.op_type == "Conv" and slot == 0 else None
        if w is None or w.ndim != 4 or attribute(node, "group", 1) != 1 or _convolution(node) is None:
            return False
        plain = attribute(node, "auto_pad", "NOTSET") in ("NOTSET", "VALID")
        if shuffle.kind != "channels" and (not plain or attribute(node, "dilations", (1, 1)) != (1, 1)):
            return False
    return bool(readers)


def _unshuffled(layer: Layer, shuffle: Shuffle) -> Layer:
    """The convolution that reads a shuffle's input: channels trade places with taps, or with each other."""
    w, b = layer.weights["w"], shuffle.size
    k, c, r, s = w.shape
    if shuffle.kind == "channels":
        w = w[:, np.argsort(_order(c, b))]
    elif shuffle.kind == "s2d_dcr":
        w = w.reshape(k, b, b, c // b**2, r, s).transpose(0, 3, 4, 1, 5, 2).reshape(k, c // b**2, r * b, s * b)
    else:
        w = w.reshape(k, c // b**2, b, b, r, s).transpose(0, 1, 4, 2, 5, 3).reshape(k, c // b**2, r * b, s * b)
    return replace(
        layer,
        label=f"{_label(shuffle.nodes)} + {layer.label}",
        nodes=_names(shuffle.nodes) + layer.nodes,
        inputs=(shuffle.nodes[0].inputs[0], *layer.inputs[1:]),
        weights={**layer.weights, "w": w},
        s2d=1 if shuffle.kind == "channels" else b,
    )


def _with_shuffle(layer: Layer) -> tuple[Layer, list[ir.Node]]:
    """A convolution with the depth-to-space or channel shuffle that alone reads its output, and its nodes."""
    reader = single_reader(layer.output)
    shuffle = None if reader is None or layer.op != "Conv" or layer.d2s > 1 else _shuffle(reader)
    if shuffle is None or shuffle.kind.startswith("s2d"):
        return layer, []
    if attribute(layer.node, "group", 1) != 1 and (shuffle.kind != "d2s_crd" or layer.weights["w"].shape[1] == 1):
        return layer, []  # only crd keeps the channels of one group together; depthwise kernels store as they compute
    more = {"label": f"{layer.label} + {_label(shuffle.nodes)}", "nodes": layer.nodes + _names(shuffle.nodes),
            "output": shuffle.output}  # fmt: skip
    if shuffle.kind == "channels":
        order = _order(layer.weights["w"].shape[0], shuffle.size)
        return replace(layer, **more, weights={name: a[order] for name, a in layer.weights.items()}), shuffle.nodes
    return replace(layer, **more, d2s=shuffle.size, d2s_mode=shuffle.kind[4:]), shuffle.nodes


def _order(c: int, groups: int) -> np.ndarray:
    """Which channel each channel of a shuffle's output is."""
    return np.arange(c).reshape(groups, c // groups).T.reshape(-1)
