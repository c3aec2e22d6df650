"""Clocks and bytes to microseconds: what the kernel families' predictions share."""

from __future__ import annotations

from cuda_kernels.device import Device

RESOLUTION_US = 0.01  # predictions are rounded to this: a smaller difference is a tie, and ties stay dense
DRAM_EFFICIENCY, L2_EFFICIENCY = 0.85, 0.7
LATENCY_CLK = 800  # of a load that misses L1


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
