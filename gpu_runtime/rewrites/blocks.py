"""Offers space-to-depth in front of convolutions as part of their weights, however the model writes it, in any order (the Focus
of some detectors).

Each corner of a block takes every b-th pixel of every b-th row; joined, they are b*b times the channels of a b-th of the size.
Either this tensor is made, by one kernel where one can; or it does not exist, and the convolutions read the image with kernels
and strides b times as large. The choice is an option of a group.

Depth-to-space behind a convolution is its store, or a launch of its own: an option too, since a faster kernel may not be able
to store blocks, and needs a multiple of b*b channels.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from cuda_kernels import sparse24
from gpu_runtime.element_maps.joins import Ops, commons, followed
from gpu_runtime.element_maps.strides import sources
from gpu_runtime.network import APART, ONE, Network, Op, Options, computes, joined
from gpu_runtime.rewrites.drafts import has_own_type
from tactics.problems.convolution import with_epilogue
from tactics.problems.problem import ConvProblem, MoveProblem
from tactics.problems.protocol import Feature, Problem

IN_WEIGHTS = "in weights"


@dataclass(frozen=True, slots=True)
class Blocks:
    """A tensor of the blocks of `image`: its channel `order[i][j][c]` is the image's channel c at pixel (i, j) of each block.

    `op` makes it; `only`: the ops whose results only `op` needs; `nodes`: the ONNX nodes of all of them.
    """

    op: Op[Problem]
    image: str
    order: np.ndarray
    nodes: tuple[str, ...]
    only: tuple[Op[Problem], ...] = ()


def offer(network: Network) -> Network:
    """Returns the network with both alternatives, if only convolutions read such a tensor of blocks."""
    options = Options(network)
    for blocks in _blocks(network):
        if readers := network.takers(blocks.op.output, partial(_takes, blocks.op.output)):
            made = [(op, _over_image(network, op, blocks)) for op in readers]
            options.either(f"space to depth {blocks.op.name}", (blocks.op, *blocks.only, *readers), made, IN_WEIGHTS)
    for op in network.ops:
        if computes(op, ConvProblem) and op.problem.epilogue.d2s > 1 and not has_own_type(network, op):
            _offer_apart(options, op)
    return options.network()


def _offer_apart(options: Options, op: Op[ConvProblem]) -> None:
    """Offers the convolution and its depth-to-space as two launches; not if a residual has the larger size."""
    end, group, whole = op.problem.epilogue, f"depth to space of {op.name}", f"{op.output} (before depth to space)"
    if end.residual:
        return
    problem = with_epilogue(op.problem, d2s=1, d2s_mode="dcr")
    move = MoveProblem(*problem.out_shape, f"d2s_{end.d2s_mode}", op.problem.out_shape[1:], step=(1, end.d2s, end.d2s))
    options.group(group, ONE, APART)
    options.limit(op, group, ONE)
    apart = (*op.when, (group, APART))
    options.behind(op, replace(op, name=f"{op.name} (before depth to space)", problem=problem, output=whole, when=apart))
    options.behind(op, Op(f"{op.name} (depth to space)", move, (whole,), op.output, when=apart))


def _blocks(network: Network) -> Iterator[Blocks]:
    for op in network.ops:
        if not op.when and any(computes(reader, ConvProblem) for reader in network.readers[op.output]):
            yield from [found for common in commons(network, op) if (found := _of(network, op, *common))][:1]


def _of(network: Network, op: Op[Problem], image: str, passed: Ops) -> Blocks | None:
    """Returns the op's output as Blocks, if it contains every pixel of each block of an image once; else None."""
    n, c, h, w = shape = network.tensors[image]
    k, high, wide = op.problem.out_shape[1:]
    b = h // high
    if b < 2 or (n, c * b * b, high * b, wide * b) != (op.problem.out_shape[0], k, h, w):
        return None
    (images, index), move = followed(shape, image, passed), MoveProblem(*shape, "s2d_dcr", (k, high, wide), step=(1, b, b))
    in_order = sources(move, np.arange(k * high * wide))
    if images != n or index is None or in_order is None:
        return None
    index, in_order = index.reshape(k, -1), in_order.reshape(k, -1)
    order, dcr = np.argsort(index[:, 0]), np.argsort(in_order[:, 0])
    if not np.array_equal(index[order], in_order[dcr]):
        return None
    only: list[Op[Problem]] = []
    for inner in passed[1:]:
        readers = {*map(id, network.readers[inner.output])}
        if inner.output not in network.output_names and readers <= {*map(id, (op, *only))}:
            only.append(inner)
    places = order[np.argsort(dcr)].reshape(b, b, c)
    return Blocks(op, image, places, joined(*reversed(passed)).nodes, tuple(only))


def _takes(tensor: str, op: Op[Problem]) -> bool:
    """Whether the convolution can read the image instead of the tensor of its blocks."""
    if not computes(op, ConvProblem) or op.problem.groups > 1 or op.problem.needs & {Feature.MAX_POOL, Feature.SCALED_INPUT}:
        return False
    return op.problem.dilation == (1, 1) and op.inputs[0] == tensor and op.inputs.count(tensor) == 1


def _over_image(network: Network, op: Op[ConvProblem], blocks: Blocks) -> Op[ConvProblem]:
    """Makes the convolution over the image: channels of its weights become taps."""
    p, b = op.problem, blocks.order.shape[0]
    _, c, high, wide = network.tensors[blocks.image]
    w = op.weights["w"][:, blocks.order.reshape(-1)].reshape(p.k, b, b, c, p.r, p.s)
    taps = np.ascontiguousarray(w.transpose(0, 3, 4, 1, 5, 2)).reshape(p.k, c, p.r * b, p.s * b)
    stride, (top, left, bottom, right) = p.stride, p.pad
    problem = replace(
        p,
        c=c,
        h=high,
        w=wide,
        r=p.r * b,
        s=p.s * b,
        stride=(stride[0] * b, stride[1] * b),
        pad=(top * b, left * b, bottom * b, right * b),
        sparse24=p.sparse24 and c % 4 == 0 and sparse24.is_sparse(taps),
    )
    inputs, weights = (blocks.image, *op.inputs[1:]), {**op.weights, "w": taps}
    return joined(replace(blocks.op, nodes=blocks.nodes), op, problem=problem, inputs=inputs, weights=weights)
