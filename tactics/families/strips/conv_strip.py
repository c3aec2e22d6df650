"""Convolutions with an output of the input's size, pixels in shared memory once for all taps (conv_strip.cu, and
conv_strip_sparse24.cu on mma.sp): tiles, launches, packing, time.

A strip, the tile's pixels with their neighbours that taps reach, lies in shared memory 64 channels at a time; a turn is one tap
of these channels. The implicit GEMM instead writes a pixel there once for every tap, and reads it from L2 as often.

Prediction: as for the implicit GEMM (tactics/families/conv_gemm.py), with a strip's bytes in place of each stage's pixels. A
turn has the share of the tensor cores' peak that is simulated for one of 3x3 taps at W = 14, where a thread copies at most one
pixel of the next strip per turn. The first strip of a tile is waited for.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import product

import numpy as np

from cuda_kernels import sparse24
from cuda_kernels.device import Device
from tactics import main_loops
from tactics.families import conv_gemm
from tactics.families.strips.geometry import (
    CHANNELS,
    PIXEL_BYTES,
    blocks_of_k,
    copies,
    family_reason,
    num_tiles,
    smem_bytes,
    strip_rows,
    tile_reason,
    turns,
    weight_stage,
)
from tactics.format import HALF_FORMATS, Strides, too_large
from tactics.problems.epilogue import RELU
from tactics.problems.problem import ConvProblem
from tactics.reason import Candidates, unsupported
from tactics.roofline import Counts, Spent, convolved, resident, rounds_us, sm_l2, tensor_peak, throttled, together
from tactics.step import Launch, ints, launch, linear, vector_sections
from tactics.tactic import Only, Tactic, restrict, tactic_of
from tactics.tiles import STRIP_DENSE_TILES, STRIP_REGISTERS, STRIP_SPARSE_TILES

CASE = ConvProblem(2, 136, 9, 7, 72, 3, 3, pad=(1, 1, 1, 1), epilogue=replace(RELU, residual=True), sparse24=True)
CASES = {"conv_strip": (CASE,), "conv_strip_sparse24": (CASE,)}


def candidates(p: ConvProblem, device: Device, only: Only = None) -> Candidates:
    """Yields (tactic or family, reason against it or None). `only`: restricts the tiles."""
    if p.r * p.s == 1 or 1 < p.groups == p.c:  # one tap reads every pixel once anyway; depthwise is no matrix product
        return
    if reason := family_reason(p) or too_large(p.all_shapes):
        yield "conv_strip", unsupported(reason)
        return
    dense_only = conv_gemm.not_sparse(p)
    if dense_only:
        yield "conv_strip_sparse24", dense_only
    vectors = [f for f in HALF_FORMATS if not linear(f)]
    for kernel, tiles in (("conv_strip", STRIP_DENSE_TILES), ("conv_strip_sparse24", () if dense_only else STRIP_SPARSE_TILES)):
        for tile, x, y in product(restrict(kernel, tiles, only), vectors, HALF_FORMATS):
            tactic = tactic_of(kernel, tile, (x, y) if p.epilogue.residual else (x,), y)
            yield tactic, unsupported(tile_reason(p, tactic, device))


def launches(p: ConvProblem, tactic: Tactic, strided: tuple[Strides, ...] | None = None) -> tuple[Launch, ...]:
    t = tactic.gemm
    values = conv_gemm.values(p, tactic, None) | {"COPIES": copies(p, tactic)}
    args = conv_gemm.arguments(p, tactic, None, strided) | ints(k_tiles=turns(p))
    return (launch(tactic.kernel, values, (num_tiles(p, tactic), 1, 1), t.threads, smem_bytes(p, tactic), args),)


def pack(p: ConvProblem, tactic: Tactic, weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Packs weights [K,C,R,S] as [rows padded to 16][blocks of 64 channels, (r, s), channel] in fragment order, metadata as for
    conv_sparse24; bias and slope in the same rows.
    """
    rows, blocks = -(-p.k // 16) * 16, blocks_of_k(p)
    taps = np.zeros((rows, blocks * CHANNELS, p.r * p.s), np.float16)
    taps[: p.k, : p.c] = np.asarray(weights["w"], np.float16).reshape(p.k, p.c, -1)
    wide = np.ascontiguousarray(taps.reshape(rows, blocks, CHANNELS, -1).transpose(0, 1, 3, 2)).reshape(1, rows, -1)
    return sparse24.fragments(wide, tactic.sparse) | vector_sections(p, weights, rows)


def section_bytes(p: ConvProblem, tactic: Tactic) -> dict[str, int]:
    """Returns the bytes of the sections that `pack` makes, from sizes alone."""
    rows = -(-p.k // 16) * 16
    return sparse24.fragment_bytes(1, rows, turns(p) * CHANNELS, tactic.sparse) | dict.fromkeys(p.epilogue.vectors, 4 * rows)


def counts(p: ConvProblem, tactic: Tactic, device: Device) -> Counts:
    t, tiles = tactic.gemm, num_tiles(p, tactic)
    at_once = resident_blocks(p, tactic, device)
    hidden = min(at_once, math.ceil(tiles / device.num_sms))
    bytes_per_clk = sm_l2(device, tiles)
    strip = strip_rows(p, tactic) * PIXEL_BYTES
    drawn = weight_stage(tactic) + strip * (blocks_of_k(p) - 1) / turns(p)  # of a turn: weights, and a part of the next strip
    products = t.m * t.n * t.k / tensor_peak(device, tactic.sparse)
    turn = products / main_loops.loop_share(tactic, p.prologue, device, hidden)
    arrival = conv_gemm.LOADED_LATENCY_CLK / ((t.stages - 1) * hidden)
    clk = {"mma": turn, "l2": drawn / bytes_per_clk, "latency": arrival}
    loop = turns(p) * (together(clk.values()) + throttled(device, products))  # of a block
    block = strip / bytes_per_clk + loop + conv_gemm.epilogue_clk(p, tactic, tiles, tiles, bytes_per_clk)
    ends = conv_gemm.FILL_CLK + conv_gemm.EPILOGUE_CLK
    limits = rounds_us(device, clk, tiles, at_once, Spent(block, ends, conv_gemm.once(device)))
    return convolved(p, tactic, weight_bytes(p, tactic), limits, untimed=main_loops.UNTIMED)


def weight_bytes(p: ConvProblem, tactic: Tactic) -> int:
    """Bytes of the packed weights."""
    sections = section_bytes(p, tactic)
    return sections["w"] + sections.get("meta", 0)


def resident_blocks(p: ConvProblem, tactic: Tactic, device: Device) -> int:
    """Blocks of a tactic that one SM holds at a time."""
    t = tactic.gemm
    registers = STRIP_REGISTERS[tactic.sparse, t.m, t.n, t.k, t.warps_n]
    return resident(device, t.threads, registers, smem_bytes(p, tactic))
