"""Space-to-depth written as strided Slices and a Concat, in front of convolutions (the Focus of some detectors).

Each Slice takes every b-th pixel of every b-th row; joined, they are b*b times the channels of a b-th of the size. Either that
is made (by one kernel, where the order is SpaceToDepth's); or there is no such tensor, and the convolutions read the image with
kernels and strides b times as large. Which, is an option of a fusion group.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from cuda_kernels import sparse24
from gpu_runtime.network import Network, Op, readers_of
from tactics.problems.problem import ConcatProblem, ConvProblem, MoveProblem
from tactics.problems.protocol import Feature

APART, IN_WEIGHTS = "apart", "in weights"


@dataclass(frozen=True, slots=True)
class Blocks:
    """A Concat's output: channels t*c .. of it are the c channels of `image` at pixel `corners[t]` of every block."""

    concat: Op
    image: str
    size: int
    corners: tuple[tuple[int, int], ...]
    nodes: tuple[str, ...]


def offer(network: Network) -> Network:
    """The network with both alternatives instead of the Slices and the Concat, where convolutions alone read that."""
    readers = readers_of(network)
    found = {blocks.concat.output: blocks for blocks in _blocks(network, readers)}
    if not found:
        return network
    slices = {t: blocks for blocks in found.values() for t in blocks.concat.inputs}
    ops = []
    for op in network.ops:
        if op.output in found:
            ops.append(_apart(network, found[op.output]))
        elif op.output in slices:
            only = len(readers[op.output]) == 1
            ops.append(replace(op, when=((_group(slices[op.output]), APART),)) if only else op)
        elif op.inputs[:1] and op.inputs[0] in found:
            ops += _convolutions(network, op, found[op.inputs[0]])
        else:
            ops.append(op)
    read = {t.name for t in network.outputs} | {t for op in ops for t in op.inputs}
    ops = [op for op in ops if op.output in read or op.output not in slices]
    used = {t.name for t in network.inputs} | {t for op in ops for t in (*op.inputs, op.output)}
    groups = tuple((_group(blocks), (APART, IN_WEIGHTS)) for blocks in found.values())
    tensors = {t: shape for t, shape in network.tensors.items() if t in used}
    return replace(network, ops=tuple(ops), tensors=tensors, groups=(*network.groups, *groups))


def _group(blocks: Blocks) -> str:
    return f"space to depth {blocks.concat.name}"


def _blocks(network: Network, readers: Mapping[str, list[Op]]) -> Iterator[Blocks]:
    made = {op.output: op for op in network.ops if isinstance(op.problem, MoveProblem) and not op.when}
    outputs = {t.name for t in network.outputs}
    for op in network.ops:
        slices = [made.get(t) for t in op.inputs]
        if not isinstance(op.problem, ConcatProblem) or op.problem.axis != 1 or op.when or None in slices:
            continue
        p, size = slices[0].problem, slices[0].problem.step[1]
        corners = tuple(s.problem.start[1:] for s in slices)
        alike = all(s.inputs == slices[0].inputs for s in slices)
        alike &= all(s.problem == replace(p, start=(0, *at)) for s, at in zip(slices, corners, strict=True))
        whole = (p.kind, p.out, p.step) == ("window", (p.c, p.h // size, p.w // size), (1, size, size))
        every = sorted(corners) == [(i, j) for i in range(size) for j in range(size)]
        fits = alike and whole and every and size > 1 and p.h % size == p.w % size == 0
        around = readers.get(op.output, ())
        if fits and op.output not in outputs and around and all(_takes(reader, op.output) for reader in around):
            nodes = tuple(dict.fromkeys(name for o in (*slices, op) for name in o.nodes))
            yield Blocks(op, slices[0].inputs[0], size, corners, nodes)


def _takes(op: Op, tensor: str) -> bool:
    p = op.problem
    plain = isinstance(p, ConvProblem) and p.groups == 1 and p.dilation == (1, 1)
    plain = plain and not p.needs & {Feature.MAX_POOL, Feature.SCALED_INPUT}
    return plain and op.inputs[0] == tensor and op.inputs.count(tensor) == 1


def _apart(network: Network, blocks: Blocks) -> Op:
    n, c, h, w = network.tensors[blocks.image]
    b = blocks.size
    if list(blocks.corners) != sorted(blocks.corners):
        return replace(blocks.concat, when=((_group(blocks), APART),))
    problem = MoveProblem(n, c, h, w, "s2d_dcr", (c * b * b, h // b, w // b), step=(1, b, b))
    return replace(
        blocks.concat, problem=problem, inputs=(blocks.image,), nodes=blocks.nodes, when=((_group(blocks), APART),)
    )  # fmt: skip


def _convolutions(network: Network, op: Op, blocks: Blocks) -> tuple[Op, Op]:
    """The convolution over the blocks, and over the image."""
    p, b = op.problem, blocks.size
    _, c, high, wide = network.tensors[blocks.image]
    corners = [blocks.corners.index((i, j)) for i in range(b) for j in range(b)]
    w = op.weights["w"].reshape(p.k, b * b, c, p.r, p.s)[:, corners].reshape(p.k, b, b, c, p.r, p.s)
    taps = np.ascontiguousarray(w.transpose(0, 3, 4, 1, 5, 2)).reshape(p.k, c, p.r * b, p.s * b)
    image = replace(
        p, c=c, h=high, w=wide, r=p.r * b, s=p.s * b, stride=tuple(d * b for d in p.stride), pad=tuple(d * b for d in p.pad)
    )  # fmt: skip
    image = replace(image, sparse24=p.sparse24 and c % 4 == 0 and bool(sparse24.fits(taps).all()))
    direct = replace(
        op, name=f"{blocks.concat.name} + {op.name}", problem=image, inputs=(blocks.image, *op.inputs[1:]),
        weights={**op.weights, "w": taps}, nodes=(*blocks.nodes, *op.nodes), when=(*op.when, (_group(blocks), IN_WEIGHTS)),
    )  # fmt: skip
    return replace(op, when=(*op.when, (_group(blocks), APART))), direct
