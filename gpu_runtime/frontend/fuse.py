"""Clean onnx-ir graph -> layers: one operation each, with what its kernel does in the same breath.

Always fused: scales and shifts by constants (BatchNormalization, Mul, Add, ...) into the convolution before them, in
double precision, and the activation after it. A residual Add can go into either of its producers: those are
alternatives, and the plan chooses. Each such Add is a group of options, "apart" or "into <convolution>".

Depth-to-space after a convolution is that convolution's store; space-to-depth before one is a larger kernel and stride; a
channel shuffle is an order of weight rows (before it) or columns (after it). They stay layers only where nothing takes them.

Pointwise nodes that read each other only are one layer, a chain: always, since apart they cost launches and bytes more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import onnx_ir as ir

from gpu_runtime.frontend.chains import Chain, activation_after, chain_at
from gpu_runtime.frontend.importer import Imported
from gpu_runtime.frontend.normalizations import normalization_at
from gpu_runtime.frontend.queries import attribute, constant, per_channel, scale_and_shift, shape_of, single_reader
from tactics.problems.pointwise_ops import NONE, Activation, Stage

STEM_CHANNELS = 4  # what tactics/families/conv_stem.py takes: the one family that pools
SEVERAL = ("Split", "LayerNormalization", "TopK", "MaxPool")  # operators whose outputs are layers of their own
VIEWS = ("Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose")


@dataclass(frozen=True, slots=True)
class Layer:
    """One operation. `op`: the ONNX type that gives its meaning, or Chain; `node`: where its attributes stand.

    `label` is its name and `nodes` every ONNX node covered. `weights`: conv "w" [K,C/g,R,S] (Gemm: [K,C]; ConvTranspose:
    [K,C,R,S]) and "b" [K], chain "c0", "c1", ... as stored, Standardize "epsilon" [1], activation "slope" [K], all FP64 or
    FP32, not yet rounded. `when`: for every group named, the option chosen must be one of those listed, or the layer does
    not exist. `d2s`, `d2s_mode`: the block and mode of depth-to-space over the result, before the residual; `act_first`: and
    the activation comes before the residual; `s2d`: the block of space-to-depth over the input, whose
    taps "w" holds already (kernel sizes, strides and pads of the node grow by it). `block`: of a shuffle left a layer.
    `axis`: of the output, along which the rows of "w" lie (of a MatMul: the last, or the one before).
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
    stages: tuple[Stage, ...] = ()
    d2s: int = 1
    d2s_mode: str = "dcr"
    s2d: int = 1
    pool: ir.Node | None = None
    pre: bool = False
    axis: int = 1
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

    def ends_before(node: ir.Node) -> bool:
        """Whether a chain leaves `node` alone: it is done already, or a convolution's epilogue may do it."""
        return node in covered or any(v in waiting for v in node.inputs) or _convolution_adds(node)

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
            if reader is not None and _is_residual_add(reader) and reader not in covered and layer.axis == 1:
                waiting[layer.output] = layer
                covered.update(used)
            else:
                layer, more = _with_activation(layer)
                layer, last = _with_shuffle(layer)
                reader = single_reader(layer.output)
                adds = reader is not None and _is_residual_add(reader) and not activation_after(reader.outputs[0])
                if more and adds and reader not in covered and layer.op != "ConvTranspose" and layer.axis == 1:
                    waiting[layer.output] = replace(layer, act_first=True)
                    covered.update(used + more + last)
                elif pool := _pool_after(layer):
                    group, option = pool.name, f"into {node.name}"
                    groups.append((group, ("apart", option)))
                    emit(node, replace(layer, when=((group, "apart"),)), used + more + last)
                    emit(pool, replace(_plain(pool), when=((group, "apart"),)), [pool])
                    label, nodes = f"{layer.label} + {pool.name}", (*layer.nodes, pool.name)
                    pooled = {"label": label, "nodes": nodes, "output": pool.outputs[0], "when": ((group, option),)}
                    emit(pool, replace(layer, pool=pool, **pooled), [])
                else:
                    emit(node, layer, used + more + last)
        elif any(v in waiting for v in node.inputs) and _is_residual_add(node):
            act, slope, more = activation_after(node.outputs[0]) or (NONE, None, ())
            apart = _chain_layer(chain_at(node, covered.__contains__, [node, *more][-1]))
            apart = replace(apart, when=((node.name, "apart"),))
            convs = [waiting[v] for v in node.inputs if v in waiting]
            options = ("apart", *(f"into {c.node.name}" for c in convs))
            groups.append((node.name, options))
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
                    weights=conv.weights if slope is None else {**conv.weights, "slope": slope},
                    act=conv.act if conv.act_first else act,
                    residual=True,
                    when=((node.name, option),),
                )
                emit(node, into, [])
            emit(node, apart, [node, *more])
        elif node.op_type in SEVERAL:
            for i, y in enumerate(node.outputs):  # a layer for each part or statistic that somebody wants
                if y.uses() or y.is_graph_output():
                    label = f"{node.name} part {i}" if i or node.op_type == "Split" else node.name
                    emit(node, Layer(node.op_type, node, label, (node.name,), (node.inputs[0],), y), [node])
        elif norm := normalization_at(node):
            epsilon, used = norm
            inside = {"weights": {"epsilon": np.float64([epsilon])}}
            layer = Layer("Standardize", node, _label(used), _names(used), (node.inputs[0],), used[-1].outputs[0], **inside)
            emit(used[-1], layer, used)
        elif chain := chain_at(node, ends_before):
            emit(chain.nodes[-1], _chain_layer(chain), chain.nodes)
        else:
            emit(node, _plain(node), [node])
    found.sort(key=lambda pair: pair[0])  # stable: alternatives of one node keep their order
    layers, more = _with_prologues([layer for _, layer in found])
    return Fused(imported, tuple(layers), (*groups, *more))


# ---- rules


def _names(nodes) -> tuple[str, ...]:
    return tuple(n.name for n in nodes)


def _label(nodes) -> str:
    return " + ".join(n.name for n in nodes)


def _plain(node: ir.Node) -> Layer:
    inputs = tuple(v for v in node.inputs if v is not None and v.const_value is None)
    return Layer(node.op_type, node, node.name, (node.name,), inputs, node.outputs[0])


def _chain_layer(chain: Chain) -> Layer:
    last, names = chain.nodes[-1], _names(chain.nodes)
    return Layer("Chain", last, _label(chain.nodes), names, chain.inputs, chain.output, chain.constants, stages=chain.stages)


def _with_prologues(layers: list[Layer]) -> tuple[list[Layer], list[tuple[str, tuple[str, ...]]]]:
    """Layers and groups: a scale, shift and ReLU that one 1x1 convolution alone reads, apart or in front of its product."""
    chains = {layer.output: (layer, found) for layer in layers if layer.op == "Chain" and (found := _scale_shift_relu(layer))}
    readers = {layer.node: chains[layer.inputs[0]] for layer in layers if _takes_prologue(layer) and layer.inputs[0] in chains}
    groups, result = {}, []
    for node, (chain, _) in readers.items():
        groups[chain.output] = chain.node.name, ("apart", f"into {node.name}")
    for layer in layers:
        if layer.output in groups:
            result.append(replace(layer, when=(*layer.when, (groups[layer.output][0], "apart"))))
            continue
        result.append(layer)
        if layer.node in readers:
            chain, (scale, shift) = readers[layer.node]
            group, (apart, into) = groups[chain.output]
            result[-1] = replace(layer, when=(*layer.when, (group, apart)))
            result.append(replace(
                layer, label=f"{chain.label} + {layer.label}", nodes=chain.nodes + layer.nodes, pre=True,
                inputs=(chain.inputs[0], *layer.inputs[1:]), weights={**layer.weights, "scale": scale, "shift": shift},
                when=(*layer.when, (group, into)),
            ))  # fmt: skip
    return result, list(groups.values())


def _takes_prologue(layer: Layer) -> bool:
    if layer.op != "Conv" or "w" not in layer.weights or layer.pool is not None or layer.s2d > 1:
        return False
    if single_reader(layer.inputs[0]) is not layer.node:
        return False
    one = layer.weights["w"].shape[2:] == (1, 1) and attribute(layer.node, "group", 1) == 1
    return one and not any(attribute(layer.node, "pads", (0, 0, 0, 0)))


def _scale_shift_relu(chain: Layer) -> tuple[np.ndarray, np.ndarray] | None:
    """(scale, shift), each [C] and an FP16 value's double, of a chain max(x * scale + shift, 0) per channel, else None."""
    shape = shape_of(chain.output)
    if chain.when or len(chain.inputs) != 1 or len(shape) != 4 or not chain.stages or chain.stages[-1] != Stage("relu"):
        return None
    scale, shift = np.ones(shape[1]), np.zeros(shape[1])
    for stage in chain.stages[:-1]:
        value = chain.weights.get(stage.operand, np.array(stage.params, np.float64))
        value = per_channel(np.asarray(value, np.float64), shape)
        if stage.op not in ("mul", "add", "sub") or value is None:
            return None
        if stage.op == "mul":
            scale, shift = scale * value, shift * value
        else:
            shift = shift + value if stage.op == "add" else shift - value
    scale, shift = (np.broadcast_to(v, shape[1:2]) for v in (scale, shift))
    largest = np.abs([scale, shift]).max()
    if not largest <= 65504 or np.any((scale != 0) & (np.abs(scale) < 2.0**-14)):
        return None  # FP16 holds them badly or not at all
    return scale, shift


def _pool_after(layer: Layer) -> ir.Node | None:
    """The max pool that alone reads an image's first convolution, whose kernel may store the maxima instead."""
    pool = single_reader(layer.output)
    if layer.op != "Conv" or layer.d2s > 1 or pool is None or pool.op_type != "MaxPool" or len(shape_of(pool.inputs[0])) != 4:
        return None
    wanted = [v for v in pool.outputs[1:] if v.uses() or v.is_graph_output()]
    plain = attribute(pool, "dilations", (1, 1)) == (1, 1) and not wanted
    few = layer.weights["w"].shape[1] <= STEM_CHANNELS and attribute(layer.node, "group", 1) == 1
    return pool if plain and few else None


def _is_residual_add(node: ir.Node) -> bool:
    """An Add of two different tensors of one shape, of at most two axes of pixels."""
    if node.op_type != "Add" or any(constant(v) is not None for v in node.inputs):
        return False
    a, b = node.inputs
    return a is not b and shape_of(a) == shape_of(b) and len(shape_of(a)) < 5


def _convolution_adds(node: ir.Node) -> bool:
    """Whether one side of a residual Add is what a convolution ends with, so that its epilogue may do the Add."""
    return _is_residual_add(node) and any(_ends_convolution(v, (node,)) for v in node.inputs)


def _ends_convolution(value: ir.Value, readers: tuple[ir.Node, ...]) -> bool:
    while True:
        node = value.producer()
        if node is None or value.is_graph_output() or any(use.node not in readers for use in value.uses()):
            return False
        if node.op_type in ("Conv", "ConvTranspose", "Gemm", "MatMul"):
            return _convolution(node) is not None
        chain = chain_at(node, lambda n: False, node)
        if chain is None or len(chain.inputs) != 1:
            return False
        value, readers = chain.inputs[0], chain.nodes


def _convolution(node: ir.Node) -> tuple[Layer, list[ir.Node]] | None:
    """Conv, ConvTranspose, Gemm or MatMul with constant weights, and the constants' scales and shifts after it folded in."""
    x, w, axis = node.inputs[0], constant(node.inputs[1]), 1
    if node.op_type == "ConvTranspose" and w is not None:
        groups = attribute(node, "group", 1)
        if w.ndim not in (3, 4) or w.shape[0] % groups:
            return None
        c, k, *size = w.shape
        w = w.reshape(groups, c // groups, k, *size).swapaxes(1, 2).reshape(groups * k, c // groups, *size)
    if node.op_type == "MatMul":
        left = constant(x)
        if left is not None and len(node.inputs[1].shape) > 1:  # rows of the constant are output channels
            x, w, axis = node.inputs[1], left.T, len(node.inputs[1].shape) - 2
        else:
            axis = len(x.shape) - 1
    bias = constant(node.inputs[2]) if len(node.inputs) > 2 else None
    if w is None or (bias is None and len(node.inputs) > 2 and node.inputs[2] is not None):
        return None
    if node.op_type in ("Gemm", "MatMul"):
        if w.ndim != 2 or (node.op_type == "Gemm" and (len(x.shape) != 2 or attribute(node, "transA", 0))):
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
        affine = scale_and_shift(reader, used[-1].outputs[0], axis)
        if affine is None:
            break
        scale, shift = affine
        if np.any(scale != 1):
            w = w * scale.reshape(-1, *(1,) * (w.ndim - 1))  # FP64, as scale is
        b = b * scale + shift
        has_bias |= bool(np.any(shift))
        used.append(reader)
    weights = {"w": w, "b": b} if has_bias else {"w": w}
    return Layer(node.op_type, node, node.name, _names(used), (x,), used[-1].outputs[0], weights, axis=axis), used


def _with_activation(layer: Layer) -> tuple[Layer, list[ir.Node]]:
    """The layer with the activation that alone reads its output, and the nodes of that activation."""
    found = activation_after(layer.output)
    if found is None:
        return layer, []
    act, slope, used = found
    if slope is not None and layer.axis != 1:
        return layer, []
    used = list(used)
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
