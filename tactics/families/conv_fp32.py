"""Convolution in FP32 on CUDA cores (conv_fp32.cu), for tensors that FP16 cannot hold: launches, packing, time.

Prediction: the largest of the times of all products at the CUDA cores' rate, of all instructions, of L1's and L2's traffic (the
input is read once for each tile of output channels), and of latencies. If SMs would be idle, several threads share the input
channels of a pixel.
"""

import math
from collections.abc import Mapping

import numpy as np

from cuda_kernels.device import Device
from cuda_kernels.rates import rates
from tactics.format import Strides, num_bytes
from tactics.problems.epilogue import RELU
from tactics.problems.problem import ConvProblem
from tactics.roofline import LATENCY_CLK, Counts, moved_us
from tactics.step import Launch, Store, conv_args, epilogue_instructions, epilogue_values, ints, launch, vector_sections
from tactics.tactic import Tactic

THREADS = 128
PIXELS = 4  # output pixels of a thread, if that leaves ENOUGH threads; else 1
ENOUGH = 256 * THREADS  # threads: two blocks for each of 128 SMs
SPLITS = (1, 8, 32, 128)  # the numbers of threads that may share a pixel
RESIDENT = {1: 7, PIXELS: 4}  # pixels of a thread -> blocks that fit on an SM by their registers
# Channels whose loads a thread has in flight; clocks that it waits for them, fitted to an H200's times.
AHEAD, STEP_CLK = 4, 480
JOIN_CLK = 150  # clocks in which a block joins the sums of threads that share a pixel: shuffles, a barrier, shared memory
ISSUE_PER_CLK = 128  # instructions of threads that an SM issues per clock: a warp's in each of its four parts
CASES = {"conv_fp32": (ConvProblem(2, 40, 9, 7, 72, 3, 3, pad=(1, 1, 1, 1), epilogue=RELU, sparse24=True),)}


def _channels(p: ConvProblem) -> int:
    """Returns the number of output channels, all of one group, that a thread computes."""
    mine = p.k // p.groups
    return 1 if mine == 1 else 4 if mine <= 4 else 8


def _tiles(p: ConvProblem) -> int:
    """Returns the number of tiles of one group's output channels."""
    return -(-(p.k // p.groups) // _channels(p))


def _pixels(p: ConvProblem) -> int:
    """Returns the number of output pixels that a thread computes."""
    return PIXELS if _threads(p) >= PIXELS * ENOUGH else 1


def _threads(p: ConvProblem) -> int:
    """Returns the number of threads if each has one output pixel and one tile of channels."""
    return p.n * p.p * p.q * p.groups * _tiles(p)


def _split(p: ConvProblem) -> int:
    """Returns the number of threads that share an output pixel: the first of SPLITS that gives ENOUGH threads, but each thread
    keeps at least 4 input channels and one final sum.
    """
    usable = [split for split in SPLITS if split == 1 or (4 * split <= p.c // p.groups and split >= _channels(p))]
    return next((split for split in usable if split * _threads(p) >= ENOUGH), usable[-1])


def launches(
    p: ConvProblem, tactic: Tactic, store: Store | None = None, strided: tuple[Strides, ...] | None = None
) -> tuple[Launch, ...]:
    end = p.epilogue
    store = store or Store(p.out_shape, step=(end.d2s, end.d2s))
    values = {
        "K_THREAD": _channels(p),
        "P_THREAD": _pixels(p),
        "SPLIT": _split(p),
        "X_F32": int(tactic.ins[0].dtype == "fp32"),
        "ADDED_F32": int(end.residual and tactic.ins[1].dtype == "fp32"),
        "Y_F32": int(tactic.out.dtype == "fp32"),
        **epilogue_values(p),
    }
    args = conv_args(p, tactic, store, strided, ("in", "out", "added"))
    args |= ints(pixels=p.n * p.p * p.q, r=p.r, s=p.s, out_w=store.out[3])
    args |= ints(c_group=p.c // p.groups, k_group=p.k // p.groups, tiles=_tiles(p))
    args |= ints(block=end.d2s, crd=end.d2s == 1 or end.d2s_mode == "crd")
    blocks = -(-p.n * p.p * p.q // (THREADS // _split(p) * _pixels(p))) * p.groups * _tiles(p)
    return (launch("conv_fp32", values, (blocks, 1, 1), THREADS, 0, args),)


def pack(p: ConvProblem, tactic: Tactic, weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns weights [K,C/g,R,S] as FP32 [group][tile][R][S][C/g][channels of a thread]; bias and slope as FP32 [K]."""
    mine, cg, wide = p.k // p.groups, p.c // p.groups, _channels(p)
    w = np.zeros((p.groups, _tiles(p) * wide, cg, p.r, p.s), np.float32)
    w[:, :mine] = np.asarray(weights["w"], np.float32).reshape(p.groups, mine, cg, p.r, p.s)
    w = w.reshape(p.groups, _tiles(p), wide, cg, p.r, p.s).transpose(0, 1, 4, 5, 3, 2)
    return {"w": np.ascontiguousarray(w).reshape(-1)} | vector_sections(p, weights, p.k)


def section_bytes(p: ConvProblem, tactic: Tactic) -> dict[str, int]:
    """Returns section name -> bytes of the sections that `pack` makes, computed from sizes alone."""
    w = p.groups * _tiles(p) * _channels(p) * (p.c // p.groups) * p.r * p.s * 4
    return {"w": w} | dict.fromkeys(p.epilogue.vectors, 4 * p.k)


def counts(p: ConvProblem, tactic: Tactic, device: Device) -> Counts:
    wide, deep, tiles = _channels(p), _pixels(p), p.groups * _tiles(p)
    (launch,), split = launches(p, tactic), _split(p)
    blocks, steps = launch.grid[0], p.r * p.s * math.ceil(p.c / p.groups / split)
    products = wide * deep * steps
    # A step of the inner loop has its products; 5 per pixel for a load, its test, conversion and address; the weights; the
    # loop.
    instructions = products + steps * (5 * deep + -(-wide // 4) + 6) + p.r * p.s * 15 * deep
    instructions += (30 + epilogue_instructions(p)) * wide * deep
    parts = max(1, split * 32 // THREADS)  # parts of a warp that have different input channels
    lines = deep * (parts if p.h * p.w > 1 else 1) + max(2 if wide == 8 else 1, parts * wide * 4 / 128)
    waves, clk_us = math.ceil(blocks / device.num_sms), 1 / device.clock_mhz
    rounds, ahead = math.ceil(waves / RESIDENT[deep]), min(AHEAD, math.ceil(p.c / p.groups / split))
    x, y = num_bytes(tactic.ins[0], p.in_shapes[0]), num_bytes(tactic.out, p.out_shape)
    added = num_bytes(tactic.ins[1], p.in_shapes[1]) if p.epilogue.residual else 0
    weights = section_bytes(p, tactic)["w"]
    again = x * (tiles / p.groups - 1) / rates(device).l2 * clk_us
    limits = {
        "l2": moved_us(device, x + added, y, weights)["l2"] + again,
        "alu": waves * THREADS * products / device.fp32_fma_per_clk * clk_us,
        "issue": waves * THREADS * instructions / ISSUE_PER_CLK * clk_us,
        "l1": waves * THREADS / 32 * steps * lines * clk_us,  # a clock for each line of 128 bytes that a warp's access touches
        "latency": rounds * (2 * LATENCY_CLK + steps / ahead * STEP_CLK + JOIN_CLK * (split > 1)) * clk_us,
    }
    return Counts(x + added, y, weights, limits)
