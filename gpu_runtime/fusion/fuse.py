"""Clean onnx-ir graph -> layers: one operation each, with what its kernel does in the same breath.

Always fused: scales and shifts by constants (BatchNormalization, Mul, Add, ...) into the convolution before them, in
double precision, and the activation after it. A residual Add can go into either of its producers: those are
alternatives, and the plan chooses. Each such Add is a group of options, "apart" or "into <convolution>".

Depth-to-space after a convolution is that convolution's store, so that a residual Add behind it can be as well. Space-to-depth
and channel shuffles are layers: whether weights take them is an option (rewrites.blocks, rewrites.channels).

Pointwise nodes that read each other only are one layer, a chain: always, since apart they cost launches and bytes more.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import onnx_ir as ir

from gpu_runtime.frontend.importer import Imported
from gpu_runtime.frontend.queries import (
    attribute,
    constant,
    is_read,
    name_of,
    operand,
    operands,
    shape_of,
    single_reader,
)
from gpu_runtime.fusion import branches, concats
from gpu_runtime.fusion.chains import activation_after, chain_at, scaled_after
from gpu_runtime.fusion.common_pattern import common
from gpu_runtime.fusion.layers import (
    CONVOLUTIONS,
    SEVERAL,
    Layer,
    convolution_at,
    followed,
    leading_affine,
    of_chain,
    of_nodes,
    plain,
    with_activation,
    with_affine,
    with_last,
)
from gpu_runtime.fusion.normalizations import affine_axis, group_normalization_at, normalization_at
from gpu_runtime.fusion.shuffles import shuffle_at, with_depth_to_space
from gpu_runtime.network import APART, Group
from tactics.problems.operators import VIEWS
from tactics.problems.pointwise_ops import NONE, Activation, Stage

STEM_CHANNELS = 4  # what tactics/families/conv_stem.py takes: the one family that pools


@dataclass(frozen=True, slots=True)
class Fused:
    """All layers with all alternatives, in topological order; `groups`: (Add node, its options)."""

    imported: Imported
    layers: tuple[Layer, ...]
    groups: tuple[Group, ...]

    @property
    def graph(self) -> ir.Graph:
        return graph_of(self.imported)


def graph_of(imported: Imported) -> ir.Graph:
    if imported.model is None:
        raise ValueError("expected a model with its graph, got one whose layers are made already: read it again")
    return imported.model.graph


@dataclass(frozen=True, slots=True)
class State:
    """What rules have found so far: names of nodes that need no other, and convolutions that a residual Add alone reads, by the
    tensor they give."""

    covered: set[str] = field(default_factory=set)
    waiting: dict[ir.Value, Layer] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Found:
    """What a rule makes of a node: layers, each with the node in whose place it runs; `waits`: a convolution that becomes a
    layer with the residual Add that reads it."""

    layers: tuple[tuple[ir.Node, Layer], ...]
    groups: tuple[Group, ...] = ()
    waits: Layer | None = None


def fuse(imported: Imported) -> Fused:
    """Find the layers of a cleaned graph. Nothing fails here: what no rule covers stays a layer of its ONNX type."""
    layers, groups = _found(imported)
    layers, merged = branches.offer(layers)
    return Fused(imported, tuple(layers), (*groups, *merged))


def sums(imported: Imported) -> list[branches.Sum]:
    """The sums of branches that may be one convolution."""
    return branches.sums(_found(imported)[0])


def common_masks(imported: Imported) -> dict[str, np.ndarray]:
    """Which weights pruning to 2:4 keeps where branches may become one convolution (common_pattern)."""
    return {name: mask for s in sums(imported) for name, mask in common(s, imported.stored).masks.items()}


def _found(imported: Imported) -> tuple[list[Layer], tuple[Group, ...]]:
    """The layers and their groups of options, branches apart."""
    position = {node: i for i, node in enumerate(graph_of(imported))}
    state, placed, groups = State(), list[tuple[int, Layer]](), list[Group]()
    for node in position:
        if name_of(node) in state.covered:
            continue
        found = next(found for rule in RULES if (found := rule(node, state)) is not None)
        placed += [(position[at], layer) for at, layer in found.layers]
        groups += found.groups
        state.covered.update(name for _, layer in found.layers for name in layer.nodes)
        if found.waits is not None:
            state.covered.update(found.waits.nodes)
            state.waiting[found.waits.output] = found.waits
    placed.sort(key=lambda pair: pair[0])  # stable: alternatives of one node keep their order
    layers, more = _with_prologues(concats.into_convolutions([layer for _, layer in placed]))
    return layers, (*groups, *more)


# ---- rules, first to last


def _shuffle(node: ir.Node, state: State) -> Found | None:
    shuffle = shuffle_at(node)
    if shuffle is None:
        return None
    name = name_of(shuffle.nodes[len(shuffle.nodes) // 2])
    layer = of_nodes(shuffle.kind, node, shuffle.nodes, shuffle.source)
    return Found(((node, replace(layer, label=name, block=shuffle.size)),))


def _view(node: ir.Node, state: State) -> Found | None:
    return _other(node, state) if node.op_type in VIEWS else None


def _convolution(node: ir.Node, state: State) -> Found | None:
    layer = convolution_at(node)
    if layer is None:
        return None
    layer = with_depth_to_space(layer)
    if _residual_after(layer, state) is not None:
        return Found((), waits=layer)
    acts = (active := with_activation(layer)) is not layer
    layer = with_depth_to_space(with_affine(active) if acts and active.d2s == 1 else active)
    add = _residual_after(layer, state) if acts and layer.op != "ConvTranspose" else None
    if add is not None and _is_last(activation_after(add.outputs[0])):
        return Found((), waits=replace(layer, act_first=True))
    layer = with_last(layer) if acts else layer
    pool = _pool_after(layer)
    return Found(((node, layer),)) if pool is None else _pooled(layer, pool)


def _is_last(found: tuple[Activation, np.ndarray | None, tuple[ir.Node, ...]] | None) -> bool:
    """Whether a residual behind an activation may be followed by what was found: nothing, or an activation without weights."""
    return found is None or found[0].name != "prelu"


def _residual_after(layer: Layer, state: State) -> ir.Node | None:
    """The residual Add that alone reads the layer, and may be done in its epilogue."""
    add = single_reader(layer.output)
    return add if add is not None and _is_residual_add(add) and name_of(add) not in state.covered and layer.axis == 1 else None


def _pooled(layer: Layer, pool: ir.Node) -> Found:
    """Convolution and max pool apart, and as one."""
    group, option = name_of(pool), f"into {name_of(layer.node)}"
    one = followed(layer, [pool], pool=pool, when=((group, option),))
    apart = ((group, APART),)
    layers = (layer.node, replace(layer, when=apart)), (pool, replace(plain(pool), when=apart)), (pool, one)
    return Found(layers, ((group, (APART, option)),))


def _residual(node: ir.Node, state: State) -> Found | None:
    """An Add that convolutions wait for: apart, and into each of them."""
    convs = [state.waiting[v] for v in operands(node) if v in state.waiting]
    if not convs or not _is_residual_add(node):
        return None
    act, slope, activation = activation_after(node.outputs[0]) or (NONE, None, ())
    chain = chain_at(node, lambda n: name_of(n) in state.covered, (node, *activation)[-1])
    if chain is None:
        return None
    group = name_of(node)
    apart = replace(of_chain(chain), when=((group, APART),))
    options = (APART, *(f"into {name_of(conv.node)}" for conv in convs))
    layers = []
    for conv, option in zip(convs, options[1:], strict=True):
        alone = tuple((group, other) for other in options if other != option)
        layers.append((conv.node, replace(conv, act_first=False, when=alone)))
        into = followed(
            conv,
            chain.nodes,
            inputs=(conv.inputs[0], next(v for v in operands(node) if v is not conv.output)),
            weights=conv.weights if slope is None else {**conv.weights, "slope": slope},
            act=conv.act if conv.act_first else act,
            last=act if conv.act_first else NONE,
            residual=True,
            when=((group, option),),
        )
        layers.append((node, into))
    return Found((*layers, (node, apart)), ((group, options),))


def _outputs(node: ir.Node, state: State) -> Found | None:
    """A layer for each part or statistic that somebody wants."""
    if node.op_type not in SEVERAL:
        return None
    layers = []
    for i, y in enumerate(node.outputs):
        if is_read(y):
            name = f"{node.name} part {i}" if i or node.op_type == "Split" else name_of(node)
            layers.append((node, replace(of_nodes(node.op_type, node, [node], operand(node)), label=name, output=y)))
    return Found(tuple(layers))


def _normalization(node: ir.Node, state: State) -> Found | None:
    found = normalization_at(node)
    if found is None:
        return None
    epsilon, used = found
    weights = {"epsilon": np.array([epsilon], np.float64)}
    axis, shape = affine_axis(node), shape_of(operand(node))
    if len(shape) < 5:
        (scale, shift), scaled = scaled_after(used[-1].outputs[0], (np.ones(shape[axis]), np.zeros(shape[axis])), axis)
        weights |= {"scale": scale, "bias": shift} if scaled else {}
        used = (*used, *scaled)
    return Found(((used[-1], of_nodes("Standardize", node, used, operand(node), weights, axis)),))


def _group_normalization(node: ir.Node, state: State) -> Found | None:
    found = group_normalization_at(node)
    if found is None:
        return None
    (scale, shift), used, within = found
    weights = {"scale": scale, "bias": shift}
    return Found(((used[-1], of_nodes("GroupNormalization", within, used, operand(node), weights)),))


def _chain(node: ir.Node, state: State) -> Found | None:
    def ends_before(other: ir.Node) -> bool:
        """Whether a chain leaves `other` alone: it is done already, or a convolution's epilogue may do it."""
        return name_of(other) in state.covered or any(v in state.waiting for v in operands(other)) or _convolution_adds(other)

    chain = chain_at(node, ends_before)
    return None if chain is None else Found(((chain.nodes[-1], of_chain(chain)),))


def _other(node: ir.Node, state: State) -> Found:
    return Found(((node, plain(node)),))


# fmt: off
RULES: tuple[Callable[[ir.Node, State], Found | None], ...] = (
    _shuffle, _group_normalization, _view, _convolution, _residual, _outputs, _normalization, _chain, _other,
)
# fmt: on


# ---- conditions


def _pool_after(layer: Layer) -> ir.Node | None:
    """The max pool that alone reads an image's first convolution, whose kernel may store the maxima instead."""
    pool = single_reader(layer.output)
    if pool is None or pool.op_type != "MaxPool" or len(shape_of(operand(pool))) != 4 or any(map(is_read, pool.outputs[1:])):
        return None
    first = layer.op == "Conv" and layer.d2s == 1 and attribute(layer.node, "group", 1) == 1
    few = first and layer.weights["w"].shape[1] <= STEM_CHANNELS
    return pool if few and attribute(pool, "dilations", (1, 1)) == (1, 1) else None


def _is_residual_add(node: ir.Node) -> bool:
    """An Add of two different tensors of one shape, of at most two axes of pixels."""
    if node.op_type != "Add" or any(constant(v) is not None for v in node.inputs):
        return False
    a, b = operands(node)
    return a is not b and shape_of(a) == shape_of(b) and len(shape_of(a)) < 5


def _convolution_adds(node: ir.Node) -> bool:
    """Whether one side of a residual Add is what a convolution ends with, so that its epilogue may do the Add."""
    return _is_residual_add(node) and any(_ends_convolution(v, (node,)) for v in operands(node))


def _ends_convolution(value: ir.Value, readers: tuple[ir.Node, ...]) -> bool:
    while True:
        node = value.producer()
        if node is None or value.is_graph_output() or any(use.node not in readers for use in value.uses()):
            return False
        if node.op_type in CONVOLUTIONS:
            return convolution_at(node) is not None
        chain = chain_at(node, lambda n: False, node)
        if chain is None or len(chain.inputs) != 1:
            return False
        value, readers = chain.inputs[0], chain.nodes


# ---- prologues


def _with_prologues(layers: list[Layer]) -> tuple[list[Layer], list[Group]]:
    """Layers and groups: a scale, shift and ReLU that one 1x1 convolution alone reads, apart or in front of its product."""
    chains = {layer.output: (layer, found) for layer in layers if layer.op == "Chain" and (found := _scale_shift_relu(layer))}
    readers = {layer.node: chains[layer.inputs[0]] for layer in layers if _takes_prologue(layer) and layer.inputs[0] in chains}
    groups = {chain.output: (name_of(chain.node), (APART, f"into {name_of(node)}")) for node, (chain, _) in readers.items()}
    result = []
    for layer in layers:
        chain, affine = readers.get(layer.node, (layer, None))
        group, (apart, into) = groups.get(chain.output, ("", (APART, "")))
        result.append(replace(layer, when=(*layer.when, (group, apart))) if group else layer)
        if affine is not None:
            one = replace(layer, label=f"{chain.label} + {layer.label}", nodes=chain.nodes + layer.nodes, prologue=True)
            weights = {**layer.weights, **dict(zip(("scale", "shift"), affine, strict=True))}
            inputs, when = (chain.inputs[0], *layer.inputs[1:]), (*layer.when, (group, into))
            result.append(replace(one, inputs=inputs, weights=weights, when=when))
    return result, list(groups.values())


def _takes_prologue(layer: Layer) -> bool:
    if layer.op != "Conv" or "w" not in layer.weights or layer.pool is not None:
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
    affine, count = leading_affine(chain)
    if count < len(chain.stages) - 1:
        return None
    scale, shift = (np.broadcast_to(v, shape[1:2]) for v in affine)
    largest = np.abs([scale, shift]).max()
    if not largest <= 65504 or np.any((scale != 0) & (np.abs(scale) < 2.0**-14)):
        return None  # FP16 holds them badly or not at all
    return scale, shift
