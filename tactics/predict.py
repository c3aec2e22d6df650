"""Analytical time of a tactic on a named device, for machines without a GPU. Never shown as measured.

A kernel takes launch + max(DRAM, L2, SMs). An SM works through its share of the blocks; for a convolution one block costs
per pipeline stage the largest of

    tensor cores   m*n*k products at the device's rate (2:4: twice the products per clock)
    shared memory  stage written once; A read by every column of warps, B by every row of warps; 128 bytes per clock
    L2             the stage's bytes at the SM's share of L2 bandwidth

plus filling the pipeline and the epilogue, which other resident blocks hide in part. The shape follows DeLTA (arXiv
1904.01691) and the shared-memory model that reproduces published wgmma latencies; efficiencies are the constants below.
Nothing here has been calibrated on hardware: SIGMA is the relative error to expect of one prediction, SIGMA_RATIO of the
quotient of two tactics of the same layer, whose errors are mostly common.
"""

from __future__ import annotations

import math
from functools import lru_cache

from cuda_kernels.device import Device
from tactics.format import DTYPES, LAYOUTS, Format, num_bytes
from tactics.launches import conv_smem, launches, linear, padded_k, stage_bytes
from tactics.problem import ConvProblem, Problem
from tactics.tactic import Tactic

SIGMA, SIGMA_RATIO = 0.30, 0.12
RESOLUTION_US = 0.01  # predictions are rounded to this: a smaller difference is a tie, and ties stay dense
MMA_EFFICIENCY = 0.85  # of the tensor cores' rate in a main loop with enough warps
DRAM_EFFICIENCY, L2_EFFICIENCY, SMEM_BYTES_PER_CLK = 0.85, 0.7, 128
FILL_CLK = 900  # first loads of a block: address arithmetic, DRAM and L2 latency, barriers
EPILOGUE_CLK = 600
BYTES_IN_FLIGHT_PER_SM = 32 * 1024  # what one SM can have outstanding; bounds a launch that does not fill the GPU
LATENCY_CLK = 800
SM_L2_BYTES_PER_CLK = 64


def predict_us(problem: Problem, tactic: Tactic, device: Device) -> float:
    """Microseconds of all launches of `tactic` on `device`, inside a CUDA graph."""
    return predict(problem, tactic, device)["total_us"]


@lru_cache(maxsize=65536)
def _cached(problem: Problem, tactic: Tactic, device: Device):
    if isinstance(problem, ConvProblem):
        return _conv(problem, tactic, device)
    return _stream(problem, tactic, device)


def predict(problem: Problem, tactic: Tactic, device: Device) -> dict[str, float | str]:
    """The parts of the prediction in microseconds, `total_us`, and `bound`: what limits it."""
    return dict(_cached(problem, tactic, device))


def _result(device: Device, parts: dict[str, float], num_launches: int = 1) -> dict[str, float | str]:
    launch = device.launch_us * num_launches
    bound = max(parts, key=parts.get)
    bound = "launch" if parts[bound] < launch else bound
    return {"launch_us": launch, **{f"{k}_us": v for k, v in parts.items()}, "bound": bound,
            "total_us": round((launch + max(parts.values())) / RESOLUTION_US) * RESOLUTION_US}  # fmt: skip


def _moved_us(device: Device, read: float, written: float, weights: float = 0.0) -> dict[str, float]:
    """Activations come from L2 while they fit in half of it, weights always from DRAM."""
    clk_us = 1 / device.clock_mhz
    dram = weights + (read + written if read + written > device.l2_bytes / 2 else 0)
    l2 = (read + written + weights) / (device.l2_bytes_per_clk * L2_EFFICIENCY) * clk_us
    return {"dram": dram / (device.dram_gbps * 1e3 * DRAM_EFFICIENCY), "l2": l2}


def _conv(p: ConvProblem, tactic: Tactic, device: Device) -> dict[str, float | str]:
    t, clk_us = tactic.tile, 1 / device.clock_mhz
    blocks = launches(p, tactic)[0].grid[0]
    stages = padded_k(p) / t.k
    resident = max(1, min(
        device.smem_per_sm // (conv_smem(tactic) + 1024),
        device.max_threads_per_sm // t.threads,
        device.regs_per_sm // (t.threads * _registers(tactic)),
        device.max_blocks_per_sm,
    ))  # fmt: skip
    rate = device.mma_fma_per_clk * device.mma_sync_share * MMA_EFFICIENCY * (2 if tactic.sparse else 1)
    # Four tensor cores per SM: fewer than 8 warps at work leave them waiting on each other's latencies.
    per_sm = math.ceil(blocks / device.num_sms)
    warps = min(resident, per_sm) * t.warps_m * t.warps_n
    mma = t.m * t.n * t.k / (rate * min(1.0, 0.4 + 0.075 * warps))
    a_bytes = stage_bytes(tactic) - t.n * t.k * 2
    b_bytes = t.n * t.k * 2
    smem = (a_bytes * (1 + t.warps_n) + b_bytes * (1 + t.warps_m)) / SMEM_BYTES_PER_CLK
    # A linear input is read 2 bytes at a time: sectors are whole along pixels, but every load is an instruction.
    issue = 0.0 if not linear(tactic.ins[0]) else t.n * t.k * 6.0 / 128
    # Idle SMs leave their share of L2 to the others, up to what one SM can take.
    active = min(device.num_sms, blocks)
    l2 = stage_bytes(tactic) / min(SM_L2_BYTES_PER_CLK, device.l2_bytes_per_clk * L2_EFFICIENCY / active)
    # A stage cannot arrive faster than latency allows with STAGES - 1 of them in flight; plain loads hold only one.
    in_flight = 1 if linear(tactic.ins[0]) else t.stages - 1
    arrival = LATENCY_CLK / (in_flight * min(resident, per_sm))
    clk = {"mma": mma, "smem": smem, "l2": l2, "issue": issue, "latency": arrival}
    loop = stages * max(clk.values())
    epilogue = EPILOGUE_CLK + t.m * t.n * 2 * (2 if p.residual else 1) * (4 if linear(tactic.out) else 1) / 64
    hidden = min(resident, per_sm)
    # Partly filled last rounds cost a whole block's time.
    sm = per_sm * loop + math.ceil(per_sm / resident) * (FILL_CLK + epilogue) + (hidden - 1) * epilogue / 2
    y = num_bytes(tactic.out, p.out_shape)
    weights = launches_weight_bytes(p, tactic)
    moved = _moved_us(device, num_bytes(tactic.ins[0], p.in_shapes[0]) + (y if p.residual else 0), y, weights)
    worst = max(clk, key=clk.get)
    parts = _result(device, {worst: sm * clk_us, **{k: v for k, v in moved.items() if k != worst}})
    return parts


def launches_weight_bytes(p: ConvProblem, tactic: Tactic) -> int:
    """Bytes of the packed weights a convolution tactic reads from DRAM."""
    dense = -(-p.k // 16) * 16 * padded_k(p) * 2
    return dense // 2 + dense // 16 if tactic.sparse else dense


def _registers(tactic: Tactic) -> int:
    """Registers per thread, roughly: accumulators, operands, addresses."""
    t = tactic.tile
    acc = t.m * t.n // t.threads
    return min(255, acc + acc // 4 + 48)


def _sectors(fmt: Format, shape, whole_vectors: bool) -> float:
    """Bytes that travel for one pass over a tensor; a thread that takes 16 of a pixel's 32-byte sectors wastes little in L1."""
    return num_bytes(fmt, shape) * (1.0 if whole_vectors else 1.3)


def _stream(problem: Problem, tactic: Tactic, device: Device) -> dict[str, float | str]:
    """Kernels that only move data: bytes over bandwidth, bounded by what the launched threads can keep in flight."""
    clk_us = 1 / device.clock_mhz
    steps = launches(problem, tactic)
    mixed = len({linear(f) for f in (*tactic.ins, tactic.out)}) > 1
    read = sum(_sectors(f, s, not mixed) for f, s in zip(tactic.ins, problem.in_shapes, strict=True))
    written = _sectors(tactic.out, problem.out_shape, not mixed)
    parts = _moved_us(device, read, written)
    blocks = sum(s.grid[0] for s in steps)
    waves = math.ceil(blocks / (device.num_sms * 8))
    active = min(device.num_sms, blocks)
    flight = (read + written) / (active * BYTES_IN_FLIGHT_PER_SM / LATENCY_CLK) * clk_us
    # A vector side costs one instruction per 16 bytes, a linear or FP32 one per element.
    elements = sum(_instructions(f, s) for f, s in zip((*tactic.ins, tactic.out), (*problem.in_shapes, problem.out_shape),
                                                       strict=True))  # fmt: skip
    work = elements * _per_element(problem) / (128 * active) * clk_us
    parts |= {"latency": flight + waves * LATENCY_CLK * clk_us, "issue": work}
    return _result(device, parts, len(steps))


def _instructions(fmt: Format, shape) -> float:
    size = num_bytes(fmt, shape) / DTYPES[fmt.dtype].itemsize
    return size / 4 if LAYOUTS[fmt.layout].vector >= 8 and fmt.dtype == "fp16" else size


def _per_element(problem: Problem) -> float:
    """Instructions per element beside the access itself: a pooling window reads every input r*s / stride times."""
    kind = type(problem).__name__
    if kind == "PoolProblem":
        return 2.0 * max(1.0, problem.r * problem.s / (problem.stride[0] * problem.stride[1]))
    return {"SoftmaxProblem": 24.0, "PointwiseProblem": 6.0}.get(kind, 8.0)
