"""candidates(problem, device): every tactic that can run it there; rejected(problem, device): the others, with reasons."""

from __future__ import annotations

from functools import lru_cache
from itertools import product

from cuda_kernels.device import Device
from tactics.format import CONV_LAYOUTS, Format, num_elements
from tactics.launches import conv_smem, linear
from tactics.problem import (
    ConcatProblem,
    ConvProblem,
    MoveProblem,
    PointwiseProblem,
    PoolProblem,
    Problem,
    ReformatProblem,
    SoftmaxProblem,
)
from tactics.tactic import Tactic, Tile

HALF_FORMATS = tuple(Format("fp16", layout) for layout in CONV_LAYOUTS)

# Tiles to try. Large ones reuse most per byte, small ones fill the GPU when a layer is small; few warps leave more registers
# to each. 16 and 32 rows serve layers with few output channels.
DENSE_TILES = tuple(
    Tile(*t)
    for t in (
        (128, 256, 32, 2, 4, 3), (256, 128, 32, 4, 2, 3), (128, 128, 64, 2, 4, 3), (128, 128, 32, 2, 4, 4),
        (128, 128, 32, 2, 2, 4), (128, 64, 64, 2, 2, 3), (64, 128, 64, 2, 2, 3), (64, 256, 32, 1, 4, 4),
        (64, 64, 64, 2, 2, 4), (64, 32, 64, 2, 2, 4), (32, 128, 64, 1, 4, 4), (32, 64, 64, 1, 4, 4),
        (16, 128, 64, 1, 4, 4),
    )
)  # fmt: skip
SPARSE_TILES = tuple(
    Tile(*t)
    for t in (
        (256, 128, 64, 4, 2, 3), (128, 256, 64, 2, 4, 3), (128, 256, 64, 2, 4, 2), (128, 128, 64, 2, 4, 3),
        (128, 128, 64, 2, 2, 3), (64, 256, 64, 1, 4, 3), (64, 256, 64, 1, 4, 2), (128, 64, 64, 2, 2, 4),
        (64, 128, 64, 2, 2, 4), (64, 64, 64, 2, 2, 4),
        (64, 32, 64, 2, 2, 4), (32, 128, 64, 1, 4, 4), (32, 64, 64, 1, 4, 4), (16, 128, 64, 1, 4, 4),
    )
)  # fmt: skip


def candidates(problem: Problem, device: Device) -> tuple[Tactic, ...]:
    """Every tactic that can run `problem` on `device`."""
    return _split(problem, device)[0]


def rejected(problem: Problem, device: Device) -> tuple[tuple[str, str], ...]:
    """(tactic or family, reason) for each one that cannot."""
    return _split(problem, device)[1]


@lru_cache(maxsize=4096)
def _split(problem: Problem, device: Device):
    good, bad = [], []
    for tactic, reason in CANDIDATES[type(problem)](problem, device):
        if reason:
            bad.append((str(tactic), reason))
        else:
            good.append(tactic)
    return tuple(good), tuple(bad)


def sparse_family_reason(p: ConvProblem) -> str:
    """Why no sparse tactic may run these weights, or an empty string."""
    if p.groups != 1:
        return "grouped_conv: sparse tactics exist for groups = 1 only"
    if p.c % 4:
        return f"channels_not_multiple_of_4: C = {p.c}"
    return "" if p.sparse24 else "pattern_violation: the weights are not 2:4 along the input channels"


def _conv(p: ConvProblem, device: Device):
    if p.groups != 1:
        yield "conv_dense", f"grouped convolution (groups = {p.groups}) has no tactic yet"
        return
    if p.n * p.p * p.q >= 2**31 or max(num_elements(f, s) for f in HALF_FORMATS for s in p.in_shapes) >= 2**31:
        yield "conv_dense", "a tensor of 2**31 elements or more: kernels address with 32 bits"
        return
    sparse_reason = sparse_family_reason(p)
    if sparse_reason:
        yield "conv_sparse24", sparse_reason
    for kernel, tiles in (("conv_dense", DENSE_TILES), ("conv_sparse24", () if sparse_reason else SPARSE_TILES)):
        for tile, x, y in product(tiles, HALF_FORMATS, HALF_FORMATS):
            tactic = Tactic(kernel, tile, (x, y) if p.residual else (x,), y)
            yield tactic, _tile_reason(tactic, device)


def _tile_reason(tactic: Tactic, device: Device) -> str:
    tile, smem = tactic.tile, conv_smem(tactic)
    if smem > device.smem_per_block:
        return f"needs {smem} bytes of shared memory per block, {device.sm} gives {device.smem_per_block}"
    if linear(tactic.ins[0]) and tile.threads % tile.n and tile.n % tile.threads:
        return f"linear input: {tile.n} pixels do not divide over {tile.threads} threads"
    if linear(tactic.ins[0]) and tile.n * tile.k // 8 // tile.threads > 8:
        return f"linear input: {tile.n * tile.k // 8 // tile.threads} chunks per thread in registers would spill"
    return ""


def _same_width(p: Problem, device: Device):
    """Any pair of formats of one vector width: pooling moves whole vectors."""
    kernel = "pool_global" if p.is_global else "pool"
    for x, y in product(HALF_FORMATS, HALF_FORMATS):
        reason = "" if linear(x) == linear(y) else "pooling reads and writes vectors of one width"
        yield Tactic(kernel, None, (x,), y), reason


def _same_format(p: PointwiseProblem, device: Device):
    for f in HALF_FORMATS:
        yield Tactic("pointwise", None, (f,) * len(p.in_shapes), f), ""


def _any_pair(p: Problem, device: Device):
    kernel = "softmax" if isinstance(p, SoftmaxProblem) else "move"
    for x, y in product(HALF_FORMATS, HALF_FORMATS):
        yield Tactic(kernel, None, (x,), y), ""


def _concat(p: ConcatProblem, device: Device):
    for x, y in product(HALF_FORMATS, HALF_FORMATS):
        yield Tactic("move", None, (x,) * len(p.channels), y), ""


def _reformat(p: ReformatProblem, device: Device):
    yield Tactic("move", None, (Format.parse(p.src),), Format.parse(p.dst)), ""


CANDIDATES = {
    ConvProblem: _conv, PoolProblem: _same_width, PointwiseProblem: _same_format, MoveProblem: _any_pair,
    ConcatProblem: _concat, SoftmaxProblem: _any_pair, ReformatProblem: _reformat,
}  # fmt: skip
