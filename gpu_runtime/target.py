"""The device that is planned for, and the times of its kernels."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from cuda_kernels import device as devices
from cuda_kernels.device import DEFAULT_DEVICE, Device
from cuda_kernels.files import cache_dir
from gpu_runtime.progress import Listener, Progress, compiling, ignore
from gpu_runtime.runtime.plan_record import Timing
from tactics import predict

if TYPE_CHECKING:
    from gpu_runtime.network import Network
    from gpu_runtime.planning import tables


def pick_device(device: str | Device | None) -> Device:
    """None: the GPU at hand, denied what `gpu-runtime doctor` saw fail there, else the default named one; a name: that device,
    for prediction."""
    if isinstance(device, Device):
        return device
    if not isinstance(device, str | None):
        raise TypeError(f"device: expected a name such as 'a100', or None for the GPU at hand, got {device!r}")
    if device is not None:
        return devices.named(device)
    if not devices.has_gpu():
        return devices.named(DEFAULT_DEVICE)
    from gpu_runtime.doctor import findings

    return findings.applied(devices.current())


def make_timer(
    device: Device,
    timing_cache: str | os.PathLike | Literal[False] | None,
    progress: Listener = ignore,
    only_cached: bool = False,
    networks: Sequence[Network] = (),
) -> tables.Timer:
    """Measured times where the device is one at hand, else predicted ones (which no cache ever holds). `progress` is told of
    the kernels that are compiled for it, of waiting for the GPU, and of what the cache was good for when the timer is closed.
    `networks`: what is built; the other arguments are `build`'s."""
    from tactics.measure import timing

    if not device.measured:
        return timing.predicted(device)
    path = None if timing_cache is False else Path(timing_cache or cache_dir() / "timings.jsonl")
    timer = timing.measured(
        device,
        timing.Cache(path),
        progress=compiling(progress),
        waits=lambda: progress(Progress("wait", "the GPU, on which another process measures")),
        told=lambda text: progress(Progress("cache", text)),
        only_known=only_cached,
    )
    timer.warm_l2 = bool(networks) and all(stays_in_l2(network, device) for network in networks)
    return timer


def stays_in_l2(network: Network, device: Device) -> bool:
    """Whether its weights and tensors, in FP16, take less than half of the L2: then a run finds there what the one before it
    left, weights too."""
    weights = {id(array): array.size for op in network.ops for array in op.weights.values()}
    return 2 * (sum(weights.values()) + sum(map(math.prod, network.tensors.values()))) < device.l2_bytes / 2


def timing_record(device: Device) -> Timing:
    """How the plan's times came about; `label` is what every printed time carries."""
    if device.measured:
        from tactics.measure import timing

        found = timing.environment()
        title = device.title + (", emulated driver" if timing.is_emulated() else "")
        return Timing("measured", f"measured({title})", driver=found["driver"], policy=found["policy"])
    return Timing("predicted", f"predicted({device.name})", max(predict.sigmas(device).values()))
