"""Offers convolutions whose windows do not overlap and cover the image as products over all elements of a window.

Examples are the embedding of patches of transformers (16 x 16, stride 16), and the Gemm that reads a flattened image, or the
heads of attention [n, heads, d] as n rows of heads * d features. A window as large as the image is a row of features already: a
view, which moves no byte of a linear tensor; others need space-to-depth. Then the convolution is a 1x1 one over c*r*s channels.
Its kernels are fast whatever c is, and its weights may be 2:4 along all of these channels. The choice is an option of a group.

A window of 2 x 2, stride 2, over c channels: channel c*4 + i*2 + j of the product is pixel (i, j) of the window in channel c,
as the weights [k, c, 2, 2] have them, row-major.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from cuda_kernels import sparse24
from gpu_runtime.network import ONE, Network, Op, Options, computes
from gpu_runtime.rewrites.drafts import has_own_type
from tactics.problems.gather import ViewProblem
from tactics.problems.problem import ConvProblem, MoveProblem
from tactics.problems.protocol import Feature, Problem

UNFIT = {Feature.MAX_POOL, Feature.SCALED_INPUT, Feature.GATED_INPUT}  # they have a value per channel or pixel of the image


def offer(network: Network) -> Network:
    """Returns the network with the products as options."""
    options = Options(network)
    for tensor in network.tensors:
        readers: list[Op[Any]] = [op for op in network.readers[tensor] if _is_tiled(network, op, tensor)]
        windows = {(op.problem.r, op.problem.s) for op in readers}
        if len(windows) != 1:
            continue
        group, rows = f"windows of {tensor}", f"{tensor} by windows"
        move = Op(rows, _rows(readers[0].problem), (tensor,), rows)
        made = [(readers[0], move), *((op, _product(op, rows)) for op in readers)]
        options.either(group, readers, made, ONE)
    return options.network()


def _is_tiled(network: Network, op: Op[Problem], tensor: str) -> bool:
    if not computes(op, ConvProblem) or op.inputs[0] != tensor or op.inputs.count(tensor) != 1 or has_own_type(network, op):
        return False
    p = op.problem
    high, wide = p.h // p.r, p.w // p.s
    tiled = (p.r * high, p.s * wide) == (p.h, p.w) and (high, wide) == (p.p, p.q)
    plain = p.groups == 1 and not any(p.pad) and p.dilation == (1, 1) and not p.needs & UNFIT
    return plain and tiled and p.r * p.s > 1 and ((high, wide) == (1, 1) or (p.stride == (p.r, p.s) and p.r == p.s))


def _rows(p: ConvProblem) -> Problem:
    """Returns the problem that makes the elements of each window the channels of one pixel."""
    if (p.p, p.q) == (1, 1):
        return ViewProblem((p.n, p.c, p.h, p.w), (p.n, p.c * p.r * p.s, 1, 1))
    return MoveProblem(p.n, p.c, p.h, p.w, "s2d_crd", (p.c * p.r * p.s, p.p, p.q), step=(1, p.r, p.s))


def _product(op: Op[ConvProblem], rows: str) -> Op[ConvProblem]:
    p, w = op.problem, np.ascontiguousarray(op.weights["w"].reshape(op.problem.k, -1, 1, 1))
    fits = w.shape[1] % 4 == 0 and sparse24.is_sparse(w)
    problem = replace(p, c=w.shape[1], h=p.p, w=p.q, r=1, s=1, stride=(1, 1), sparse24=fits)
    return replace(
        op, name=f"{op.name} (product)", problem=problem, inputs=(rows, *op.inputs[1:]), weights={**op.weights, "w": w}
    )
