"""Convolutions on wgmma in the emulator: the cases of their tests, and the judgement of one."""

import math
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest

from cuda_kernels.device import named
from cuda_kernels.launch import Emulated
from tactics.candidates import candidates
from tactics.families.hopper.conv_wgmma import STRIPS, TILES, boxes, num_boxes
from tactics.families.merged import merged
from tactics.format import Format, padded_channels
from tactics.problems.pointwise_ops import Activation
from tactics.problems.problem import ConvProblem
from tactics.sampling.data import random_data, reference
from tactics.step import linear
from tactics.tactic import Tactic, Tile
from tests.problems import RELU, TAILS, assert_right, conv_case, execute

DEVICE = named("h200")
NAMES = DENSE, SPARSE = "conv_dense_sm90", "conv_sparse24_sm90"
ONE = (1, 1, 1, 1)
HWC8, CHW32, CHW = (Format("fp16", layout) for layout in ("hwc8", "chw32", "chw"))
SINGLE = tuple(Format("fp32", layout) for layout in ("chw", "hwc"))
# Few stages: the pipeline goes round in every case. A warpgroup; two that share a tile; two that take turns; strips, of boxes
# of one image, and of two. DEEPER: as many as a cluster's sums lie over.
SMALL = Tile(64, 32, 64, 4, 1, 3)
TWO = Tile(128, 64, 64, 8, 1, 3)
DEEPER = replace(TWO, stages=6)
TURNS = Tile(64, 64, 64, 4, 1, 3, pingpong=True)
BOX = Tile(64, 32, 64, 4, 1, 2, box=(1, 4, 8))
BOXES = Tile(128, 64, 64, 8, 1, 3, box=(2, 4, 8))
ORDERS = ({"async_mode": "late"}, {"seed": 1}, {"seed": 2, "async_mode": "late"}, {"seed": 3, "threads": 1})
MOST_BLOCKS = 8  # of a cluster that the emulator starts; tiles of larger ones are skipped
WAYS = ({}, {"persist": 1}, {"persist": 2}, {"persist": 3}, {"split": 2}, {"split": 3}, {"stream": 2}, {"stream": 3})
DEEP = tuple({"cluster": (1, 1, n)} for n in (2, 4))  # blocks of a cluster share K

# Purpose of each case -> its problem. No size is a multiple of a tile's.
CASES = {
    "one_stage": conv_case(1, 64, 5, 7, 40, 1, 1, bias=True, sparse24=True),
    "two_stages": conv_case(2, 100, 6, 5, 72, 1, 1, act=RELU, sparse24=True),
    "three_stages": conv_case(1, 64, 6, 9, 64, 1, 3, pad=(0, 1, 0, 1), bias=True, sparse24=True),
    "parts_of_a_stage": conv_case(2, 40, 9, 7, 72, 3, 3, pad=ONE, bias=True, act=RELU, sparse24=True),
    "few_channels": conv_case(1, 4, 12, 11, 24, 5, 5, pad=(2, 2, 2, 2), sparse24=True),
    "images_in_a_tile": conv_case(9, 72, 1, 3, 136, 3, 3, pad=ONE, bias=True, sparse24=True),
    "strides": conv_case(2, 64, 11, 13, 80, 3, 3, stride=(2, 3), pad=ONE, bias=True, sparse24=True),
    "strided_1x1": conv_case(3, 72, 11, 8, 40, 1, 1, stride=(2, 2), bias=True, sparse24=True),
    "padded_1x1": conv_case(2, 64, 4, 5, 24, 1, 1, pad=(1, 0, 0, 2), bias=True, sparse24=True),
    "dilations": conv_case(1, 64, 11, 13, 40, 3, 3, dilation=(2, 3), pad=(2, 3, 2, 3), sparse24=True),
    "asymmetric": conv_case(
        2, 12, 11, 13, 20, 3, 2, stride=(2, 1), pad=(0, 2, 1, 0), dilation=(2, 3), bias=True, sparse24=True
    ),
    "no_padding": conv_case(2, 72, 9, 8, 40, 4, 3, bias=True, sparse24=True),
    "long_k": conv_case(1, 132, 6, 6, 24, 3, 3, pad=ONE, bias=True, act=Activation("silu"), sparse24=True),
    "residual": conv_case(1, 200, 7, 10, 88, 1, 1, bias=True, residual=True, act=RELU, sparse24=True),
    "tail": conv_case(2, 72, 6, 5, 40, 3, 3, pad=ONE, bias=True, act=Activation("prelu"), sparse24=True, **TAILS[""]),
    "d2s": conv_case(1, 72, 5, 6, 48, 3, 3, pad=ONE, bias=True, act=RELU, d2s=2, sparse24=True),
    "d2s_crd": conv_case(2, 64, 5, 6, 72, 1, 1, bias=True, d2s=3, d2s_mode="crd", sparse24=True),
    "d2s_residual": conv_case(1, 64, 5, 6, 32, 3, 3, residual=True, act=RELU, act_first=True, d2s=2, sparse24=True),
    "upsampled_residual": conv_case(1, 64, 6, 9, 24, 1, 1, residual=True, up=3, sparse24=True),
    "groups": conv_case(2, 128, 6, 5, 144, 3, 3, pad=ONE, groups=2, bias=True, residual=True, sparse24=True),
    "groups_tail": conv_case(1, 192, 5, 6, 120, 3, 1, groups=3, bias=True, act=Activation("prelu"), sparse24=True, **TAILS[""]),
    "gemm": conv_case(5, 200, 1, 1, 10, 1, 1, bias=True, sparse24=True),
}


# 3 x 3 windows of stride 1, of which plans have strips: with one size of a box, with another, with boxes of several images.
STRIPPED = (
    conv_case(3, 72, 12, 14, 136, 3, 3, pad=ONE, bias=True, act=RELU, residual=True, sparse24=True),
    conv_case(1, 136, 19, 30, 72, 3, 3, pad=(0, 1, 2, 1), bias=True, act=RELU, sparse24=True),
    conv_case(5, 64, 4, 7, 200, 3, 2, pad=(1, 0, 1, 1), bias=True, act=Activation("silu"), sparse24=True),
)

# Weights that stay in registers: of 3 x 3 windows of 64 channels by im2col and by boxes, of 1 x 1 ones, of rows that a cluster
# shares. (problem, tile); blocks have one tile, some or all.
WIDE_TURNS = replace(TURNS, n=128)
KEPT = conv_case(2, 64, 13, 18, 64, 3, 3, pad=ONE, bias=True, act=RELU, residual=True, sparse24=True)
KEPT_1X1 = conv_case(3, 136, 9, 21, 128, 1, 1, bias=True, act=RELU, sparse24=True)
STAY = {
    "turns": (KEPT, replace(WIDE_TURNS, persist=3)),
    "turns of a block": (KEPT, replace(WIDE_TURNS, persist=1)),
    "boxes": (KEPT, replace(WIDE_TURNS, n=192, box=(1, 24, 8), persist=2)),
    "two warpgroups": (KEPT_1X1, replace(TWO, n=192, persist=2)),
    "two columns of rows": (replace(KEPT_1X1, k=256), replace(TWO, n=128, persist=4)),
    "a cluster": (replace(KEPT_1X1, k=256), replace(TWO, n=128, cluster=(2, 1, 1), persist=4)),
}


def named_tiles(kernels: tuple[str, ...] = NAMES) -> list:
    """Returns (kernel, tile) for every tile that plans may have, without strips."""
    skip = pytest.mark.skip(reason=f"the emulator starts clusters of {MOST_BLOCKS}")
    return [
        pytest.param(kernel, tile, id=f"{kernel}-{tile}", marks=[skip] * (math.prod(tile.cluster) > MOST_BLOCKS))
        for kernel in kernels
        for tile in TILES[kernel]
    ]


def strips(problem: ConvProblem, kernel: str) -> list[Tile]:
    """Returns the problem's strips outside of clusters, as plans have them but with two stages."""
    return [
        Tile(m, math.prod(box), 64, warps, 1, 2, pingpong=pingpong, box=box)
        for box in boxes(problem)
        for m, warps, pingpong in STRIPS
    ]


def fitting(tile: Tile, way: dict) -> ConvProblem:
    """Returns a problem of two or three tiles along channels and along pixels, of which the last one is partly filled, and so
    is the last cluster; 18 stages, every other one of 8 channels.
    """
    h = 13 if tile.n > 64 else 5
    k = tile.m * tile.cluster[0] + 8
    return conv_case(3, 72, h, 11, k, 3, 3, pad=ONE, bias=True, act=RELU, residual=not way, sparse24=True)


@lru_cache(maxsize=64)
def data(problem: ConvProblem) -> tuple[list[np.ndarray], dict[str, np.ndarray], np.ndarray]:
    """Returns (inputs, weights, expected), drawn and computed once."""
    inputs, weights = random_data(problem)
    return inputs, weights, reference(problem, inputs, weights)


def crafted(kernel: str, tile: Tile, problem: ConvProblem, out: Format = HWC8, x: Format = HWC8) -> Tactic:
    """Returns a tactic for the problem even if plans would not have it; a residual lies as the output does, in FP16."""
    added = Format("fp16", out.layout)
    return Tactic(kernel, tile, (x, *((added,) if problem.epilogue.residual else ())), out)


def tactics(problem: ConvProblem, kernel: str) -> list[Tactic]:
    found = candidates(problem, DEVICE)
    return [t for t in found if t.kernel == kernel and math.prod(t.gemm.cluster) <= MOST_BLOCKS]


def alone(tactic: Tactic) -> Tile:
    """Returns the tactic's tile as the tables have it: without split, stream-K, persistent blocks and a cluster along K."""
    return replace(tactic.gemm.whole, cluster=(*tactic.gemm.cluster[:2], 1))


def run(problem: ConvProblem, tactic: Tactic, **options):
    """Runs a tactic with checks on, and compares with the reference; returns (output with padding, counters)."""
    inputs, weights, expected = data(problem)
    gpu = Emulated(DEVICE, **options)
    got = execute(gpu, problem, tactic, inputs, weights)
    assert_right(problem, tactic, got, expected)
    return got, gpu.stats[-1]


def held(problem: ConvProblem, tactic: Tactic, orders=ORDERS) -> np.ndarray:
    """Runs a tactic in every order and mode: the output's bits are the same, its products are the ones that the tile needs, no
    bank conflict occurs. Returns the output.
    """
    got, stats = run(problem, tactic)
    t, m = tactic.gemm, merged(problem)
    assert not linear(tactic.ins[0])
    channels = padded_channels(tactic.out.layout, m.channels) if m.count == 1 else m.channels
    rows, pixels = problem.epilogue.d2s**2 * channels, problem.n * problem.p * problem.q
    tiles = -(-rows // t.m), num_boxes(problem, t.box) if t.box else -(-pixels // t.n)
    many = math.prod(-(-of // blocks) * blocks for of, blocks in zip(tiles, t.cluster, strict=False)) * m.count
    of_a_tap = -(-m.one.c // 64) * 64 if tactic.sparse or m.one.c > 48 else -(-m.one.c // 16) * 16
    k = problem.r * problem.s * of_a_tap
    products = many * k * t.m * t.n // (16 * 8 * (32 if tactic.sparse else 16))
    assert (stats.mma, stats.mma_sp) == ((0, products) if tactic.sparse else (products, 0))
    assert stats.excess_wavefronts == 0, f"bank conflicts: {stats.excess}"
    for options in orders:
        assert np.array_equal(got, run(problem, tactic, **options)[0], equal_nan=True), options
    return got


def shared(tile: Tile, way: dict) -> Tile:
    """Returns the tile with its work shared by the number of blocks that `way` gives; for a cluster by as many clusters."""
    return replace(
        tile, **{name: n if name in ("split", "cluster") else n * math.prod(tile.cluster) for name, n in way.items()}
    )
