"""Space-to-depth in front of convolutions: one operator, or strided Slices and a Concat (the Focus of some detectors).

Each corner of a block takes every b-th pixel of every b-th row; joined, they are b*b times the channels of a b-th of the size.
Either that is made, by one kernel where the order is SpaceToDepth's; or there is no such tensor, and the convolutions read the
image with kernels and strides b times as large. Which, is an option of a group.

Depth-to-space behind a convolution is its store, or a launch of its own: an option too, since a kernel that is faster may not
store blocks, and needs a multiple of b*b channels.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from cuda_kernels import sparse24
from gpu_runtime.network import APART, ONE, Network, Op, Options, computes, joined
from gpu_runtime.rewrites.drafts import has_own_type
from tactics.problems.convolution import with_epilogue
from tactics.problems.problem import ConcatProblem, ConvProblem, MoveProblem
from tactics.problems.protocol import Feature, Problem

IN_WEIGHTS = "in weights"


@dataclass(frozen=True, slots=True)
class Blocks:
    """A tensor of the blocks of `image`: channel `order[i][j][c]` of it is the image's channel c at pixel (i, j) of each.

    `op` gives it, or `made` in its place; `only`: ops that nothing but `op` reads.
    """

    op: Op[Problem]
    made: Op[Problem]
    image: str
    order: np.ndarray
    nodes: tuple[str, ...]
    only: tuple[Op[Problem], ...] = ()


def offer(network: Network) -> Network:
    """The network with both alternatives, where convolutions alone read such blocks."""
    options = Options(network)
    for blocks in _blocks(network):
        if readers := network.takers(blocks.op.output, partial(_takes, blocks.op.output)):
            options.instead(blocks.op, blocks.made)
            made = [(op, _over_image(network, op, blocks)) for op in readers]
            options.either(f"space to depth {blocks.op.name}", (blocks.op, *blocks.only, *readers), made, IN_WEIGHTS)
    for op in network.ops:
        if computes(op, ConvProblem) and op.problem.epilogue.d2s > 1 and not has_own_type(network, op):
            _offer_apart(options, op)
    return options.network()


def _offer_apart(options: Options, op: Op[ConvProblem]) -> None:
    """As an option, the convolution and depth-to-space as two launches; a residual of the larger size keeps them together."""
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
        if computes(op, MoveProblem) and op.problem.kind in ("s2d_dcr", "s2d_crd") and not op.when:
            c, b = op.problem.c, op.problem.step[1]
            order = np.arange(b * b * c).reshape(b, b, c)
            order = order if op.problem.kind == "s2d_dcr" else np.arange(c * b * b).reshape(c, b, b).transpose(1, 2, 0)
            yield Blocks(op, op, op.inputs[0], order, op.nodes)
        elif computes(op, ConcatProblem) and op.problem.axis == 1 and not op.when and (blocks := _sliced(network, op)):
            yield blocks


def _sliced(network: Network, concat: Op[ConcatProblem]) -> Blocks | None:
    """What a Concat joins, if that is every corner of blocks once."""
    slices = [op for t in concat.inputs for op in network.producers[t] if computes(op, MoveProblem) and not op.when]
    if len(slices) < len(concat.inputs):
        return None
    p, b, image = slices[0].problem, slices[0].problem.step[1], slices[0].inputs[0]
    corners = [(s.problem.start[1], s.problem.start[2]) for s in slices]
    alike = all(s.inputs == (image,) and s.problem == replace(p, start=(0, *at)) for s, at in zip(slices, corners, strict=True))
    if not alike or not _is_corner(p) or sorted(corners) != [(i, j) for i in range(b) for j in range(b)]:
        return None
    order = np.empty((b, b, p.c), int)
    for t, (i, j) in enumerate(corners):
        order[i, j] = np.arange(t * p.c, (t + 1) * p.c)
    whole, made = joined(*slices, concat, name=concat.name, inputs=(image,)), concat
    if corners == sorted(corners):
        problem = MoveProblem(p.n, p.c, p.h, p.w, "s2d_dcr", (p.c * b * b, p.h // b, p.w // b), step=(1, b, b))
        made = replace(whole, problem=problem)
    only = tuple(op for op in slices if len(network.readers[op.output]) == 1)
    return Blocks(concat, made, image, order, whole.nodes, only)


def _is_corner(p: MoveProblem) -> bool:
    """Whether it takes one pixel of every block."""
    b = p.step[1]
    whole = (p.kind, p.out, p.step) == ("window", (p.c, p.h // b, p.w // b), (1, b, b))
    return whole and p.h % b == p.w % b == 0 and b > 1


def _takes(tensor: str, op: Op[Problem]) -> bool:
    """Whether the convolution can read the image instead of the tensor of its blocks."""
    if not computes(op, ConvProblem) or op.problem.groups > 1 or op.problem.needs & {Feature.MAX_POOL, Feature.SCALED_INPUT}:
        return False
    return op.problem.dilation == (1, 1) and op.inputs[0] == tensor and op.inputs.count(tensor) == 1


def _over_image(network: Network, op: Op[ConvProblem], blocks: Blocks) -> Op[ConvProblem]:
    """The convolution over the image: channels of its weights become taps."""
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
