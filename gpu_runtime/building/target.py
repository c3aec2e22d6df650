"""Chooses the device to plan for, and times its kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from cuda_kernels import device as devices
from cuda_kernels.device import DEFAULT_DEVICE, Device
from cuda_kernels.files import cache_dir
from gpu_runtime.building.options import DEFAULTS, LEVEL, BuildOptions
from gpu_runtime.planning.surroundings import stays_in_l2
from gpu_runtime.progress import Progress, compiling
from gpu_runtime.runtime.plan_record import Timing
from tactics import predict
from tactics.measure import lazy, spread, timing
from tactics.measure.timing import driver_version

if TYPE_CHECKING:
    from gpu_runtime.network import Network
    from tactics.measure.timing import Timer


def pick_device(device: str | Device | None) -> Device:
    """Returns the device. None: the GPU at hand, without kernels that `gpu-runtime doctor` saw fail there, else the default
    named one; a name: that device, for prediction.
    """
    if isinstance(device, Device):
        return device
    if not isinstance(device, str | None):
        raise TypeError(f"device: expected a name such as 'a100', or None for the GPU at hand, got {device!r}")
    if device is not None:
        return devices.named(device)
    if not devices.has_gpu():
        return devices.named(DEFAULT_DEVICE)
    from gpu_runtime.doctor import known_failures

    return known_failures.applied(devices.current())


def _here() -> tuple[Device, str]:
    return pick_device(None), driver_version()


def is_here(device: Device) -> bool:
    """Whether this machine's GPU is of this kind."""
    return devices.has_gpu() and devices.current().key == device.key


def runs_whole(device: Device, options: BuildOptions) -> bool:
    """Whether plans are run, and improved, as a whole."""
    whole = device.measured and options.optimization_level >= LEVEL and not options.forced
    return whole and (options.spread is None or is_here(device))


def placed(options: BuildOptions) -> tuple[Device, BuildOptions]:
    """Returns the device as a build sees it, one to predict for where nothing is timed; and the options with the connected
    cluster, if tactics are timed on one.
    """
    ray, device = options.ray, options.device
    if ray is None or ray is False:
        found, options = pick_device(device), replace(options, ray=None)
    else:
        if not isinstance(ray, (bool, str, spread.Spread)):
            raise TypeError(f"ray: expected the address of a Ray cluster, True or False, got {ray!r}")
        on = ray if isinstance(ray, spread.Spread) else None
        if device is not None and (on is None or device != on.device):
            raise ValueError(f"device: expected None with ray, which measures on the cluster's GPUs, got {device}")
        on = on or spread.connected(ray if isinstance(ray, str) else "", _here)
        found, options = on.device, replace(options, ray=on)
    return found if options.optimization_level else replace(found, measured=False), options


def make_timer(device: Device, options: BuildOptions = DEFAULTS, networks: Sequence[Network] = ()) -> Timer:
    """Makes a timer: measured times where the device is at hand, else predicted ones (which are never cached).

    The options' listener gets the kernels that are compiled for it, the number of timed tactics, waits for the GPU, and the use
    of the cache when the timer is closed. `networks`: those that are built.
    """

    if not device.measured:
        return timing.Predicted(device)
    progress, cache, level = options.progress, options.timing_cache, options.optimization_level
    timer = timing.Measured(
        device,
        timing.Cache(None if cache is False else Path(cache or cache_dir() / "timings.jsonl")),
        progress=compiling(progress),
        waits=lambda: progress(Progress("wait", "the GPU, on which another process measures")),
        told=lambda text: None if cache is False else progress(Progress("cache", text)),
        only_known=options.only_cached_times,
        spread=options.spread,
    )
    timer.warm_l2 = bool(networks) and all(stays_in_l2(network, device) for network in networks)
    if level not in lazy.LEVELS:
        return timer
    return lazy.Lazy(timer, device, lazy.LEVELS[level], options.ended, lambda *of: progress(Progress("tune", "", *of)))


def timing_record(device: Device, driver: str | None = None) -> Timing:
    """Returns the origin of the plan's times; every printed time carries its `label`.

    `driver`: its version where the times were measured; None: this machine's.
    """
    if device.measured:
        driver = timing.driver_version() if driver is None else driver
        title = device.title + (", emulated driver" if timing.names_emulated(driver) else "")
        return Timing("measured", f"measured({title})", driver=driver, policy=timing.POLICY)
    return Timing("predicted", f"predicted({device.name})", max(predict.sigmas(device).values()))
