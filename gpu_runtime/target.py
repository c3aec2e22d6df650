"""The device that is planned for, and the times of its kernels."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
    from tactics.measure.spread import Spread
    from tactics.measure.timing import Timer


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


MOST_LEVEL = 5
LEVEL = 3


@dataclass(frozen=True, slots=True)
class Tuning:
    """How many tactics a build times on a GPU: by its `level` of optimization, 0 none, 5 every one; until it has `ended`;
    `spread`: on those of a cluster."""

    level: int = LEVEL
    ended: Callable[[], bool] = lambda: False
    spread: Spread | None = None

    def whole(self, device: Device) -> bool:
        """Whether plans are run as a whole, and improved by that."""
        return device.measured and self.level >= LEVEL and (self.spread is None or is_here(device))

    @property
    def sigmas(self) -> float:
        """How far below an estimate, in standard deviations, the bound of what is not timed lies."""
        from tactics.measure import lazy

        return lazy.LEVELS[self.level].sigmas if self.level in lazy.LEVELS else 0.0


def tuning(level: object, seconds: object, several: bool = False) -> Tuning:
    """`seconds`: how long at most, a function that says whether it is over, or None. `several`: one choice is for several plans
    at once, which is not made step by step: every tactic is timed, or none. Raises ValueError."""
    if type(level) is not int or not 0 <= level <= MOST_LEVEL:
        raise ValueError(f"optimization_level: expected a whole number from 0 to {MOST_LEVEL}, got {level!r}")
    level = MOST_LEVEL if several and level else level
    if callable(seconds):
        return Tuning(level, seconds)
    if seconds is None:
        return Tuning(level)
    if not isinstance(seconds, (int, float)) or isinstance(seconds, bool) or not 0 < seconds < math.inf:
        raise ValueError(f"tuning_time: expected seconds, more than 0, got {seconds!r}")
    ends: list[float] = []  # from when the first tactic is to be timed

    def ended() -> bool:
        ends.extend([] if ends else [time.monotonic() + seconds])
        return time.monotonic() >= ends[0]

    return Tuning(level, ended)


def _here() -> tuple[Device, str]:
    from tactics.measure.timing import driver_version

    return pick_device(None), driver_version()


def is_here(device: Device) -> bool:
    """Whether this machine's GPU is of that kind."""
    return devices.has_gpu() and devices.current().key == device.key


def placed(tuning: Tuning, device: str | Device | None, ray: str | bool | Spread | None) -> tuple[Device, Tuning]:
    """The device as a build sees it, one to predict for where nothing is timed; and where its tactics are timed."""
    if ray is None or ray is False:
        found = pick_device(device)
    else:
        from tactics.measure import spread

        if not isinstance(ray, (bool, str, spread.Spread)):
            raise TypeError(f"ray: expected the address of a Ray cluster, True or False, got {ray!r}")
        on = ray if isinstance(ray, spread.Spread) else None
        if device is not None and (on is None or device != on.device):
            raise ValueError(f"device: expected None with ray, which measures on the cluster's GPUs, got {device}")
        on = on or spread.connected(ray if isinstance(ray, str) else "", _here)
        found, tuning = on.device, replace(tuning, spread=on)
    return found if tuning.level else replace(found, measured=False), tuning


def make_timer(
    device: Device,
    timing_cache: str | os.PathLike | Literal[False] | None,
    progress: Listener = ignore,
    tuning: Tuning | None = None,
    only_cached: bool = False,
    networks: Sequence[Network] = (),
) -> Timer:
    """Measured times where the device is one at hand, else predicted ones (which no cache ever holds). `progress` is told of
    the kernels that are compiled for it, of how many tactics are timed, of waiting for the GPU, and of what the cache was good
    for when the timer is closed. `tuning`: of which level but 0; `networks`: what is built; the others are `build`'s."""
    from gpu_runtime.planning.surroundings import stays_in_l2
    from tactics.measure import lazy, timing

    asked = tuning or Tuning()
    if not device.measured:
        return timing.predicted(device)
    timer = timing.measured(
        device,
        timing.Cache(None if timing_cache is False else Path(timing_cache or cache_dir() / "timings.jsonl")),
        progress=compiling(progress),
        waits=lambda: progress(Progress("wait", "the GPU, on which another process measures")),
        told=lambda text: None if timing_cache is False else progress(Progress("cache", text)),
        only_known=only_cached,
        spread=asked.spread,
    )
    timer.warm_l2 = bool(networks) and all(stays_in_l2(network, device) for network in networks)
    if asked.level not in lazy.LEVELS:
        return timer
    return lazy.Lazy(timer, device, lazy.LEVELS[asked.level], asked.ended, lambda *of: progress(Progress("tune", "", *of)))


def timing_record(device: Device, driver: str | None = None) -> Timing:
    """How the plan's times came about; `label` is what every printed time carries. `driver`: its version where the times were
    measured, without: this machine's."""
    if device.measured:
        from tactics.measure import timing

        driver = timing.driver_version() if driver is None else driver
        title = device.title + (", emulated driver" if timing.names_emulated(driver) else "")
        return Timing("measured", f"measured({title})", driver=driver, policy=timing.POLICY)
    return Timing("predicted", f"predicted({device.name})", max(predict.sigmas(device).values()))
