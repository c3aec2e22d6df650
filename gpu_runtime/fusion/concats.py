"""A scale, a shift and an activation behind a Concat of convolutions -> the convolutions' own, always: it saves a launch.

MixNet and its like split a layer's channels among kernels of several sizes, concatenate what they give, and normalize that.

Example. relu(concat(conv(x, w1), conv(x, w2)) * s) with 8 + 16 channels: concat(relu(conv(x, w1 * s[:8])),
relu(conv(x, w2 * s[8:]))).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from gpu_runtime.frontend.queries import attribute, name_of, shape_of
from gpu_runtime.fusion.layers import Layer, Links, by_rows, leading_affine, of_channels
from tactics.problems.pointwise_ops import ACTIVATIONS, NONE, Activation


@dataclass(frozen=True, slots=True)
class _Found:
    """A Concat of `convs` and the chain behind it, whose first `count` stages scale by `scale`, add `shift` (each [C] or [1])
    and apply `act` with `slope` [C]."""

    concat: Layer
    chain: Layer
    convs: tuple[Layer, ...]
    scale: np.ndarray
    shift: np.ndarray
    act: Activation
    slope: np.ndarray | None
    count: int


def into_convolutions(layers: Sequence[Layer]) -> list[Layer]:
    links, instead = Links(layers), dict[int, list[Layer]]()
    for layer in layers:
        if layer.op == "Concat" and (found := _behind(layer, links)) is not None:
            instead |= {id(old): new for old, new in _moved(found)}
    return [new for layer in layers for new in instead.get(id(layer), [layer])]


def _behind(concat: Layer, links: Links) -> _Found | None:
    y, chain = concat.output, links.only_reader(concat.output)
    rank = len(shape_of(y))
    if rank < 3 or attribute(concat.node, "axis") not in (1, 1 - rank) or concat.when or chain is None:
        return None
    if chain.op != "Chain" or chain.inputs[0] is not y or y in chain.inputs[1:]:
        return None
    convs = tuple(conv for t in concat.inputs for conv in links.makers.get(t, ()) if links.only_reader(t) is concat)
    alone = len({conv.output for conv in convs}) == len(convs) == len(concat.inputs)
    return _start_of(concat, chain, convs) if alone and all(map(_takes, convs)) else None


def _takes(layer: Layer) -> bool:
    """Whether a layer is a convolution that ends with its sums."""
    plain = layer.op in ("Conv", "ConvTranspose") and layer.act == NONE and not layer.residual and layer.pool is None
    return plain and not layer.when and layer.d2s == 1 and layer.axis == 1


def _start_of(concat: Layer, chain: Layer, convs: tuple[Layer, ...]) -> _Found | None:
    """What the convolutions can do of the chain."""
    shape = shape_of(concat.output)
    (scale, shift), count = leading_affine(chain)
    act, slope = NONE, None
    if count < len(chain.stages):
        stage = chain.stages[count]
        slope = of_channels(chain, stage, shape) if stage.op == "prelu" else None
        if stage.op in ACTIVATIONS and (not stage.operand or slope is not None):
            act, count = Activation(stage.op, () if stage.operand else stage.params), count + 1
    return _Found(concat, chain, convs, scale, shift, act, slope, count) if count else None


def _moved(found: _Found) -> list[tuple[Layer, list[Layer]]]:
    """The layers, each with what stands in its place."""
    chain, result, first = found.chain, [], 0
    for conv in found.convs:
        part = slice(first, first + shape_of(conv.output)[1])
        result.append((conv, [_with(found, conv, part)]))
        first = part.stop
    pieces = tuple(new[0].output for _, new in result)
    nodes = tuple(dict.fromkeys((*found.concat.nodes, *chain.nodes)))
    label = f"{found.concat.label} + {chain.label}"
    left = chain.stages[found.count :]
    if not left:
        whole = replace(found.concat, inputs=pieces, output=chain.output, nodes=nodes, label=label)
        return [*result, (found.concat, []), (chain, [whole])]
    y = _like(found.concat.output, f"{name_of(chain.output)} before {left[0]}")
    kept = {name: a for name, a in chain.weights.items() if any(stage.operand == name for stage in left)}
    rest = replace(chain, inputs=(y, *chain.inputs[1:]), stages=left, weights=kept)
    return [*result, (found.concat, [replace(found.concat, inputs=pieces, output=y)]), (chain, [rest])]


def _with(found: _Found, conv: Layer, part: slice) -> Layer:
    """The convolution with its part of what follows."""
    w, rows = conv.weights["w"], len(conv.weights["w"])
    scale, shift = (np.broadcast_to(v[part] if v.size > 1 else v, rows) for v in (found.scale, found.shift))
    b = conv.weights.get("b", np.zeros(rows)).astype(np.float64) * scale + shift
    weights = {**conv.weights, "w": by_rows(w, scale), "b": b}
    if found.slope is not None:
        slope = found.slope[part] if found.slope.size > 1 else found.slope
        weights["slope"] = np.broadcast_to(slope, rows).astype(np.float32)
    y = _like(conv.output, f"{name_of(conv.output)} of {name_of(found.chain.output)}")
    return replace(
        conv,
        label=f"{conv.label} + {found.chain.label}",
        nodes=conv.nodes + found.chain.nodes,
        output=y,
        weights=weights,
        act=found.act,
    )


def _like(value: ir.Value, name: str) -> ir.Value:
    return ir.Value(name=name, shape=value.shape, type=value.type)
