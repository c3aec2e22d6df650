"""Convolutions with an output of the input's size, pixels in shared memory once for all taps (conv_strip.cu, and
conv_strip_sparse24.cu on mma.sp): tiles, launches, packing, time.

The tile's pixels with those that its taps reach beyond them, a strip, lie in shared memory 64 channels at a time; a turn is one
tap of these channels. The implicit GEMM writes a pixel there once for every tap, and draws it from L2 as often.

Prediction: that of the implicit GEMM (tactics/families/conv_gemm.py) with a strip's bytes in place of each stage's pixels. A
turn has the share of the tensor cores' peak that is simulated for one of 3x3 taps at W = 14, where a thread copies one pixel
of the next strip a turn at most. The first strip of a tile is waited for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import product

import numpy as np

from cuda_kernels import sparse24
from cuda_kernels.device import Device
from tactics import main_loops
from tactics.families import conv_gemm
from tactics.families.conv_gemm import not_sparse
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
from tactics.format import HALF_FORMATS, Strides, num_bytes, num_elements
from tactics.problems.problem import ConvProblem
from tactics.reason import Reason
from tactics.roofline import moved_us, result, sm_l2, tensor_peak, throttled, together
from tactics.step import Launch, ints, launch, linear
from tactics.tactic import Tactic, Tile, these
from tactics.tiles import STRIP_DENSE_TILES, STRIP_REGISTERS, STRIP_SPARSE_TILES


def candidates(p: ConvProblem, device: Device, only: Tile | None = None) -> Iterator[tuple[Tactic | str, str | Reason]]:
    """(tactic or family, reason against it or ""). `only`: of the tiles this one alone."""
    if p.r * p.s == 1 or 1 < p.groups == p.c:  # one tap reads every pixel once as it is; depthwise is no matrix product
        return
    if reason := family_reason(p):
        yield "conv_strip", reason
        return
    if max(num_elements(f, s) for f in HALF_FORMATS for s in (*p.in_shapes, p.out_shape)) >= 2**31:
        yield "conv_strip", "a tensor of 2**31 elements or more: kernels address with 32 bits"
        return
    dense_only: Reason | None = not_sparse(p)
    if dense_only:
        yield "conv_strip_sparse24", dense_only
    vectors = [f for f in HALF_FORMATS if not linear(f)]
    for kernel, tiles in (("conv_strip", STRIP_DENSE_TILES), ("conv_strip_sparse24", () if dense_only else STRIP_SPARSE_TILES)):
        for tile, x, y in product(these(tiles, only), vectors, HALF_FORMATS):
            tactic = Tactic(kernel, tile, (x, y) if p.epilogue.residual else (x,), y)
            yield tactic, tile_reason(p, tactic, device)


def launches(p: ConvProblem, tactic: Tactic, strided: tuple[Strides, ...] | None = None) -> tuple[Launch, ...]:
    t = tactic.gemm
    values = conv_gemm.values(p, tactic, None) | {"COPIES": copies(p, tactic)}
    args = conv_gemm.arguments(p, tactic, None, strided) | ints(k_tiles=turns(p))
    return (launch(tactic.kernel, values, (num_tiles(p, tactic), 1, 1), t.threads, smem_bytes(p, tactic), args),)


def pack(p: ConvProblem, tactic: Tactic, weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Weights [K,C,R,S] as [rows padded to 16][blocks of 64 channels, (r, s), channel] in fragment order, metadata
    as conv_sparse24 has it; bias and slope in the same rows."""
    rows, blocks = -(-p.k // 16) * 16, blocks_of_k(p)
    taps = np.zeros((rows, blocks * CHANNELS, p.r * p.s), np.float16)
    taps[: p.k, : p.c] = np.asarray(weights["w"], np.float16).reshape(p.k, p.c, -1)
    wide = np.ascontiguousarray(taps.reshape(rows, blocks, CHANNELS, -1).transpose(0, 1, 3, 2)).reshape(rows, -1)
    sections = {}
    if tactic.sparse:
        kept, codes = sparse24.compress(wide)
        sections["w"] = sparse24.pack_fragments(kept).reshape(-1)
        sections["meta"] = sparse24.pack_metadata(codes).reshape(-1)
    else:
        sections["w"] = sparse24.pack_fragments(wide).reshape(-1)
    for name in p.epilogue.vectors:
        row = np.zeros(rows, np.float32)
        if weights.get(name) is not None:
            row[: p.k] = np.asarray(weights[name], np.float32).reshape(-1)
        sections[name] = row
    return sections


def section_bytes(p: ConvProblem, tactic: Tactic) -> dict[str, int]:
    """Bytes of the sections that `pack` makes, from sizes alone."""
    rows, k = -(-p.k // 16) * 16, turns(p) * CHANNELS
    sections = {"w": rows * k * 2}
    if tactic.sparse:
        sections = {"w": rows * k, "meta": sparse24.metadata_bytes(rows, k)}
    return sections | dict.fromkeys(p.epilogue.vectors, 4 * rows)


def predict(p: ConvProblem, tactic: Tactic, device: Device) -> dict[str, float | str]:
    t, clk_us = tactic.gemm, 1 / device.clock_mhz
    tiles = num_tiles(p, tactic)
    resident = resident_blocks(p, tactic, device)
    per_sm = math.ceil(tiles / device.num_sms)
    hidden = min(resident, per_sm)
    bytes_per_clk = sm_l2(device, tiles)
    strip, blocks = strip_rows(p, tactic) * PIXEL_BYTES, blocks_of_k(p)
    drawn = weight_stage(tactic) + strip * (blocks - 1) / turns(p)  # of a turn: weights, and a part of the next strip
    products = t.m * t.n * t.k / tensor_peak(device, tactic.sparse)
    turn = products / main_loops.loop_share(tactic, p.prologue, device, hidden)
    arrival = conv_gemm.LOADED_LATENCY_CLK / ((t.stages - 1) * hidden)
    clk = {"mma": turn, "l2": drawn / bytes_per_clk, "latency": arrival}
    loop = turns(p) * (together(clk.values()) + throttled(device, products))  # of a block
    early = conv_gemm.EARLY_CLK if device.dependent_launch else 0  # of the first round of blocks
    end = conv_gemm.epilogue_clk(p, tactic, tiles, tiles, bytes_per_clk)
    rounds = math.ceil(per_sm / resident) * (conv_gemm.FILL_CLK + conv_gemm.EPILOGUE_CLK)
    sm = per_sm * (strip / bytes_per_clk + loop + end) + rounds - early
    x, y = num_bytes(tactic.ins[0], p.in_shapes[0]), num_bytes(tactic.out, p.out_shape)
    moved = moved_us(device, x + (y if p.epilogue.residual else 0), y, weight_bytes(p, tactic))
    worst = max(clk, key=clk.__getitem__)
    limits = {worst: sm * clk_us, **{k: v for k, v in moved.items() if k != worst}}
    return result(device, main_loops.untimed(limits), sparse=tactic.sparse)


def weight_bytes(p: ConvProblem, tactic: Tactic) -> int:
    """Bytes of the packed weights."""
    sections = section_bytes(p, tactic)
    return sections["w"] + sections.get("meta", 0)


def resident_blocks(p: ConvProblem, tactic: Tactic, device: Device) -> int:
    """Blocks of a tactic that one SM holds at a time."""
    t = tactic.gemm
    return max(
        1,
        min(
            device.smem_per_sm // (smem_bytes(p, tactic) + 1024),
            device.max_threads_per_sm // t.threads,
            device.regs_per_sm // (t.threads * STRIP_REGISTERS[tactic.sparse, t.m, t.n, t.k, t.warps_n]),
            device.max_blocks_per_sm,
        ),
    )
