"""A convolution and its only reader, a 1x1 convolution, as one launch (conv_back_to_back.cu): tiles, packing, time.

All channels of the tensor between the two fit one block's tile, so that tensor stays in shared memory. This saves its store,
its load and a launch. The cost: the tile needs a row for each of these channels, and the second convolution waits for the
epilogue of the first.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import product

import numpy as np

from cuda_kernels.device import Device
from tactics.families import conv_gemm
from tactics.families.merged import padded_k
from tactics.format import HALF_FORMATS, Strides, padded_channels
from tactics.main_loops import SMEM_BYTES_PER_CLK, UNTIMED
from tactics.problems.epilogue import RELU
from tactics.problems.problem import BackToBackProblem, ConvProblem
from tactics.problems.protocol import Feature
from tactics.reason import Candidates, no_room, unsupported
from tactics.roofline import Counts, convolved, sm_l2, tensor_rate, throttled, together
from tactics.step import Launch, act_code, alpha_beta, conv_pointers, ints, launch, linear, member
from tactics.tactic import Only, Tactic, Tile, on_kernel, restrict, tactic_of
from tactics.tiles import stage_bytes

TILES = tuple(
    Tile(*t)
    for t in (
        (64, 128, 64, 2, 2, 3),
        (64, 64, 64, 2, 2, 4),
        (64, 32, 64, 2, 2, 4),
        (128, 128, 32, 2, 4, 4),
        (128, 64, 64, 2, 2, 3),
    )
)
# sm -> clocks between two turns (tiles of channels) of the second convolution, of all blocks of an SM; other GPUs are not
# timed.
TURN_CLK = {"sm_90a": 3500}
ADDED = frozenset({Feature.RESIDUAL, Feature.UPSAMPLED_RESIDUAL})  # features that the checks below handle
SECOND = ("w", "b", "slope")  # the second convolution's weights, whose names have a 2 appended
_FIRST = ConvProblem(1, 32, 9, 7, 48, 3, 3, pad=(1, 1, 1, 1), epilogue=RELU)
CASES = {"conv_back_to_back": (BackToBackProblem(_FIRST, ConvProblem(1, 48, 9, 7, 72, 1, 1, epilogue=RELU)),)}


def reason_against(first: ConvProblem, second: ConvProblem) -> str:
    """Returns why the two convolutions cannot be one launch, or ""."""
    for p, which in ((first, "first"), (second, "second")):
        if p.groups > 1 or p.needs - ADDED:
            return f"the {which} convolution has groups, a depth-to-space, a pool or a prologue"
    if Feature.UPSAMPLED_RESIDUAL in second.needs:
        return "the second convolution adds a residual with fewer pixels"
    if Feature.RESIDUAL in first.needs or max(first.r, first.s) > conv_gemm.MAX_TAPS:
        return f"the first convolution has a residual, or more than {conv_gemm.MAX_TAPS} taps along an axis"
    if second.in_shapes[0] != first.out_shape or (second.r, second.s) != (1, 1) or any(second.pad) or second.stride != (1, 1):
        return "the second is not a 1x1 convolution of the first one's output with stride 1"
    if first.k > max(t.m for t in TILES):
        return f"{first.k} channels between the two: a tile has {max(t.m for t in TILES)} at most"
    return ""


def candidates(p: BackToBackProblem, device: Device, only: Only = None) -> Candidates:
    """Yields (tactic, reason against it or None). `only`: restricts the tiles."""
    if why := reason_against(p.first, p.second):
        yield "conv_back_to_back", unsupported(why)
        return
    for tile, x, y in product(restrict("conv_back_to_back", TILES, only), HALF_FORMATS, HALF_FORMATS):
        tactic = tactic_of("conv_back_to_back", tile, (x, y) if p.epilogue.residual else (x,), y)
        if linear(x) or linear(y):
            why = "only whole vectors of 8 channels are loaded and stored"
        elif tile.m < p.first.k or tile.m >= 2 * max(64, -(-p.first.k // 64) * 64):
            why = f"{p.first.k} channels between the two do not suit a tile of {tile.m} channels"
        else:
            why = no_room(shared_bytes(tactic), device)
        yield tactic, unsupported(why)


def shared_bytes(tactic: Tactic) -> int:
    """Returns the bytes of a block's shared memory: the larger of the first convolution's pipeline, and, later in the same
    memory, the intermediate tile and the second convolution's staging tile, each with a table of n words.
    """
    t = tactic.gemm
    return max(t.stages * stage_bytes(tactic), 2 * (t.m * t.n * 2 + t.n * 4))


def launches(p: BackToBackProblem, tactic: Tactic, strided: tuple[Strides, ...] | None = None) -> tuple[Launch, ...]:
    one, two, t = p.first, p.second, tactic.gemm
    # The kernel's struct has the ConvParams of one convolution that loads x as the first does, and stores y as the second does.
    whole, dense = replace(one, k=two.k, epilogue=replace(two.epilogue, bias=True)), on_kernel("conv_dense", tactic)
    of_two, of_one = conv_pointers(two, "2"), conv_pointers(one)
    args = conv_gemm.arguments(whole, dense, None, strided) | {name: of_two[name] for name in ("bias", "slope")}
    args = member("c", args | ints(m16=-(-one.k // 16)))
    args |= {"w2": of_two["w"], "bias1": of_one["bias"], "slope1": of_one["slope"]}
    args |= ints(k1=one.k, steps=padded_k(two) // 16, m16=-(-two.k // 16)) | alpha_beta(one, "1")
    given = ("BM", "BN", "BK", "WARPS_M", "WARPS_N", "STAGES", "ACT", "RES")
    values = {name: v for name, v in conv_gemm.values(whole, dense, None).items() if name in given} | {"ACT1": act_code(one)}
    blocks = -(-one.n * one.p * one.q // t.n)
    return (launch("conv_back_to_back", values, (blocks, 1, 1), t.threads, shared_bytes(tactic), args),)


def pack(p: BackToBackProblem, tactic: Tactic, weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns both convolutions' weights, bias and slope, packed as for conv_dense; the second's section names end in 2."""
    dense = on_kernel("conv_dense", tactic)
    second = conv_gemm.pack(p.second, dense, {name: weights[name + "2"] for name in SECOND if name + "2" in weights})
    return conv_gemm.pack(p.first, dense, weights) | {name + "2": a for name, a in second.items()}


def section_bytes(p: BackToBackProblem, tactic: Tactic) -> dict[str, int]:
    """Returns section name -> bytes of the sections that `pack` makes."""
    dense = on_kernel("conv_dense", tactic)
    second = conv_gemm.section_bytes(p.second, dense)
    return conv_gemm.section_bytes(p.first, dense) | {name + "2": n for name, n in second.items()}


def counts(p: BackToBackProblem, tactic: Tactic, device: Device) -> Counts:
    """Returns counts: the first convolution's as for conv_dense, then per turn the products with the second's weights, which
    come from L2 into registers, and the pixels, which are in shared memory.
    """
    t, dense = tactic.gemm, on_kernel("conv_dense", tactic)
    of_first = replace(dense, ins=tactic.ins[:1], out=tactic.ins[0])
    first = conv_gemm.counts(p.first, of_first, device).limits  # without DRAM: the intermediate tensor is not written
    blocks = -(-p.first.n * p.first.p * p.first.q // t.n)
    per_sm, turns = math.ceil(blocks / device.num_sms), -(-padded_channels(tactic.out.layout, p.second.k) // t.m)
    mma = t.m * t.n * 16 / tensor_rate(device, min(per_sm, 4) * t.warps_m * t.warps_n)
    # One column of warps loads a step's weights from L2, the others then find them in L1; each row of warps loads its pixels.
    step = throttled(device, mma) + max(mma, t.m * 32 / sm_l2(device, blocks), t.n * 32 * t.warps_m / SMEM_BYTES_PER_CLK)
    store = t.m * t.n * 2 * (2 if p.epilogue.residual else 1) / 64
    rounds = math.ceil(per_sm / conv_gemm.resident_blocks(of_first, device, p.first.prologue))
    waits = rounds * TURN_CLK[device.sm] if device.sm in TURN_CLK else per_sm * conv_gemm.EPILOGUE_CLK
    clk = turns * (per_sm * (padded_k(p.second) // 16 * step + store) + waits)
    weights = sum(conv_gemm.weight_bytes(q, dense) for q in (p.first, p.second))
    return convolved(p, tactic, weights, {"mma": together(first.values()) + clk * (1 / device.clock_mhz)}, untimed=UNTIMED)
