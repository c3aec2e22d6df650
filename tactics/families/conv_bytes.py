"""Convolutions of whole numbers of 8 bits: conv_dense.cu and conv_sparse24.cu on bytes, with FP16 or bytes as results.

A register holds four bytes or two halfs, so operands lie as those of FP16 with half the channels, each of two bytes: tiles,
copies and fragments are conv_gemm's for the problem `halved`. Only metadata is twice as much, a bit for each weight.

Example: 64 int8 channels of a pixel are 64 bytes, 32 halfs: chunks of 16 bytes 0 to 3, of channels 0 to 15, 16 to 31, ...
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product

import numpy as np

from cuda_kernels import sparse24
from cuda_kernels.device import Device
from tactics import main_loops
from tactics.families import conv_gemm
from tactics.families.merged import merged
from tactics.format import BYTE_LAYOUTS, HALF_FORMATS, WHOLE, Format, Strides, padded_channels, too_large
from tactics.problems.epilogue import RELU
from tactics.problems.pointwise_ops import Activation
from tactics.problems.problem import ConvProblem
from tactics.problems.prologue import Prologue
from tactics.reason import no_room
from tactics.roofline import Counts, convolved
from tactics.step import Launch, byte_values, own_strides
from tactics.tactic import Only, Tactic, restrict, tactic_of
from tactics.tiles import no_room_for_border

SOURCES = {"conv_dense_int8": "conv_dense", "conv_sparse24_int8": "conv_sparse24"}
# Products of bytes per clock and SM, which GeForce cards do at the workstation cards' rate (data sheets).
INT8_FMA_PER_CLK = {"sm_80": 2048, "sm_86": 1024, "sm_87": 2048, "sm_89": 1024, "sm_90a": 4096, "sm_120": 1024}
QUANTIZED = replace(RELU, multiplied=True, act=Activation("quantize", (0.0, 127.0)))
CASES = dict.fromkeys(
    SOURCES,
    (
        ConvProblem(2, 40, 9, 7, 72, 3, 3, pad=(1, 1, 1, 1), epilogue=QUANTIZED, sparse24=True),
        ConvProblem(1, 24, 9, 7, 40, 3, 3, pad=(1, 1, 1, 1), prologue=Prologue(border=37.0), epilogue=QUANTIZED, sparse24=True),
        ConvProblem(
            1, 48, 7, 10, 88, 1, 1, epilogue=replace(QUANTIZED, residual=True, residual_multiplied=True), sparse24=True
        ),
    ),
)


def byte_candidates(p: ConvProblem, dtypes: Sequence[str], device: Device, only: Only = None) -> Iterator[Tactic]:
    """Yields the tactics that read bytes. `dtypes`: of each input, then of the output; "int8", "uint8": FP16 or that."""
    x_type, *residual, y_type = dtypes
    end = p.epilogue
    able = p.groups == 1 and p.prologue == Prologue(border=p.prologue.border) and (end.d2s, end.up, end.pool) == (1, 1, None)
    able = able and max(p.r, p.s) <= conv_gemm.MAX_TAPS and end.multiplied and x_type in WHOLE
    if not able or too_large(p.all_shapes, others=p.n * p.p * p.q):
        return
    outs = [*HALF_FORMATS]
    if y_type in WHOLE and all(d == y_type for d in residual):
        outs += [Format(y_type, layout) for layout in BYTE_LAYOUTS]
    half = halved(p)
    for kernel, source in SOURCES.items():
        if kernel.startswith("conv_sparse24") and conv_gemm.not_sparse(p):
            continue
        tiles = restrict(kernel, conv_gemm.TILES[source], only)
        for tile, layout, y in product(tiles, BYTE_LAYOUTS, outs):
            tactic = tactic_of(kernel, tile, (Format(x_type, layout), *((y,) * len(residual))), y)
            if no_room(conv_gemm.conv_smem(tactic), device) or (p.prologue.border and no_room_for_border(tactic)):
                continue
            yield tactic
            for shared in (*conv_gemm.splits(half, tactic, device), *conv_gemm.streams(half, tactic, device)):
                yield tactic_of(kernel, shared, tactic.ins, y)


@lru_cache(maxsize=4096)
def halved(p: ConvProblem) -> ConvProblem:
    """Returns the problem on channels of two bytes, padded to chunks of 16 bytes."""
    return replace(p, c=padded_channels("hwc16", p.c) // 2)


def as_halves(tactic: Tactic) -> Tactic:
    """Returns conv_gemm's tactic for the halved problem: the input's bytes named as halfs."""
    x = Format("fp16", "hwc8")
    return tactic_of(SOURCES[tactic.kernel], tactic.tile, (x, *tactic.ins[1:]), tactic.out)


def of_bytes(device: Device) -> Device:
    """Returns the device with products of FP16, with FP32 sums, at half the rate of products of bytes."""
    return replace(device, mma_fma_per_clk=INT8_FMA_PER_CLK.get(device.sm, 2 * device.mma_fma_per_clk) // 2)


def launches(p: ConvProblem, tactic: Tactic, strided: tuple[Strides, ...] | None = None) -> tuple[Launch, ...]:
    x, *others = strided or own_strides(p, tactic)
    in_halves = Strides(x.n // 2, x.block // 2, x.pixel // 2, x.log2v - 1)
    (made,) = conv_gemm.launches(halved(p), as_halves(tactic), strided=(in_halves, *others))
    types = byte_values("X", tactic.ins[0]) | byte_values("Y", tactic.out)
    return (replace(made, values=tuple(sorted((*made.values, *types.items()))), smem=conv_gemm.conv_smem(tactic)),)


def pack(p: ConvProblem, tactic: Tactic, weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Packs whole weights [K,C,R,S] as bytes in fragment order, and the epilogue's vectors."""
    k = 2 * merged(halved(p)).k
    flat, vectors = conv_gemm.matrix(p, tactic, weights, padded_channels("hwc16", p.c), k, 16)
    around = {"border": np.full(16, p.prologue.border, tactic.ins[0].dtype)} if p.prologue.border else {}
    return sparse24.byte_fragments(flat[0].astype(np.int8), tactic.sparse) | vectors | around


def section_bytes(p: ConvProblem, tactic: Tactic) -> dict[str, int]:
    """Returns the bytes of the sections that `pack` makes, from sizes alone."""
    found = conv_gemm.section_bytes(halved(p), as_halves(tactic))
    return found | ({"meta": 2 * found["meta"]} if tactic.sparse else {})


def counts(p: ConvProblem, tactic: Tactic, device: Device) -> Counts:
    """Counts as conv_gemm does, with the simulated shares of these kernels' own loops."""
    limits = conv_gemm.limits(halved(p), tactic, of_bytes(device))
    weights = sum(size for name, size in section_bytes(p, tactic).items() if name in ("w", "meta"))
    return convolved(p, tactic, weights, limits, untimed=main_loops.UNTIMED)
