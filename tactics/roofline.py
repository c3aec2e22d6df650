"""Clocks and bytes to microseconds: what the kernel families' predictions share, and what no kernel can go below."""

from __future__ import annotations

import math
from collections.abc import Sequence

from cuda_kernels.device import Device
from tactics.problem import ConvProblem, ConvTransposeProblem
from tactics.step import Launch

RESOLUTION_US = 0.01  # predictions are rounded to this: a smaller difference is a tie, and ties stay dense
DRAM_EFFICIENCY, L2_EFFICIENCY = 0.85, 0.7
# Of a load that misses L1, and of one that hits L2: 479 and 263 clocks on an idle H100, much the same on A100 and Ada
# (arXiv 2402.13499, table of memory latencies); queues add to it.
LATENCY_CLK, L2_LATENCY_CLK = 600, 300
BYTES_IN_FLIGHT_PER_SM = 32 * 1024  # what one SM can have outstanding; bounds a launch that does not fill the GPU


def result(device: Device, parts: dict[str, float], num_launches: int = 1) -> dict[str, float | str]:
    """The parts of a prediction (microseconds by resource) with `bound`, what limits it, and `total_us`."""
    launch = device.launch_us * num_launches
    bound = max(parts, key=parts.get)
    bound = "launch" if parts[bound] < launch else bound
    return {"launch_us": launch, **{f"{k}_us": v for k, v in parts.items()}, "bound": bound,
            "total_us": round((launch + max(parts.values())) / RESOLUTION_US) * RESOLUTION_US}  # fmt: skip


def moved_us(device: Device, read: float, written: float, weights: float = 0.0) -> dict[str, float]:
    """Activations come from L2 while they fit in half of it, weights always from DRAM."""
    clk_us = 1 / device.clock_mhz
    dram = weights + (read + written if read + written > device.l2_bytes / 2 else 0)
    l2 = (read + written + weights) / (device.l2_bytes_per_clk * L2_EFFICIENCY) * clk_us
    return {"dram": dram / (device.dram_gbps * 1e3 * DRAM_EFFICIENCY), "l2": l2}


def floors(p: ConvProblem | ConvTransposeProblem, device: Device) -> dict[str, float | str]:
    """What no kernel with `mma.sync` can go below on `device`, from its peak rates: `mma_us`, `dram_us`, `l2_us`,
    `launch_us` of the dense layer, `bound`, the largest of them, and `dense_us`, `sparse_us`: launch plus the largest of the
    others. 2:4 halves the products and keeps 9/16 of the weight bytes (half the values, 2 bits for each kept one);
    activations are counted as in `moved_us`, unpadded.
    """
    moved = 2 * (sum(math.prod(shape) for shape in p.in_shapes) + math.prod(p.out_shape))
    parts = (p.first, p.second) if hasattr(p, "first") else (p,)
    weights = 2 * sum(q.k * (q.c // q.groups) * q.r * q.s for q in parts)
    mma = p.macs / (device.num_sms * device.mma_fma_per_clk * device.mma_sync_share * device.clock_mhz)
    cold = moved if moved > device.l2_bytes / 2 else 0

    def dram(w: float) -> float:
        return (w + cold) / (device.dram_gbps * 1e3)

    def l2(w: float) -> float:
        return (w + moved) / (device.l2_bytes_per_clk * device.clock_mhz)

    few = weights * 9 / 16
    parts = {"mma": mma, "dram": dram(weights), "l2": l2(weights), "launch": device.launch_us}
    return {
        **{f"{name}_us": us for name, us in parts.items()},
        "bound": max(parts, key=parts.get),
        "dense_us": device.launch_us + max(mma, dram(weights), l2(weights)),
        "sparse_us": device.launch_us + max(mma / 2, dram(few), l2(few)),
    }


def streamed(device: Device, steps: Sequence[Launch], read: float, written: float, instructions: float, turns: int = 1):
    """`result` for kernels that move more than they compute: bytes over bandwidth, bounded by what the launched threads can
    keep in flight, by the `turns` in which a thread waits for its loads, and by the instructions that all of them issue."""
    clk_us = 1 / device.clock_mhz
    blocks = sum(s.grid[0] for s in steps)
    active = min(device.num_sms, blocks)
    waves = math.ceil(blocks / (device.num_sms * 8))
    flight = (read + written) / (active * BYTES_IN_FLIGHT_PER_SM / LATENCY_CLK)
    parts = moved_us(device, read, written)
    latency = max(flight, waves * (turns - 1) * LATENCY_CLK) + waves * LATENCY_CLK
    parts |= {"latency": latency * clk_us, "issue": instructions / (128 * active) * clk_us}
    return result(device, parts, len(steps))
