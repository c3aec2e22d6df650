"""The settings of the emulated driver, and the structures in which the library takes them (driver.h has the same ones)."""

import ctypes
import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from fnmatch import fnmatchcase

from cuda_kernels.device import DRIVER_NAMES, NAMED, VISIBLE, Device, named

VARIABLE = "EMULATED_DRIVER"  # environment: the settings as JSON
ROOT_VARIABLE = "EMULATED_DRIVER_ROOT"  # environment: the folder that tests/ is in
ORDERS = ("late", "eager")
ERRORS = {
    "invalid_value": 1,
    "out_of_memory": 2,
    "illegal_address": 700,
    "out_of_resources": 701,
    "launch_timeout": 702,
    "illegal_instruction": 715,
    "misaligned_address": 716,
    "launch_failed": 719,
}
MEMORY_BUS_BITS = 1024  # any width will do: bandwidth is computed from it and the memory clock
TEGRA = "sm_87"  # whose driver calls each module "Orin", and gives the GPU's clock, and 64 or 256 bits, as its memory's


@dataclass(frozen=True)
class Fault:
    """A fault on request: `kernel` is a pattern of names; `nth` the launch of those that match, from 1 (0: every one). `error`:
    a key of ERRORS, "hang" or "wrong" (other values than it computed); `call`: the launch call itself returns the error, and
    the context survives.
    """

    kernel: str = "*"
    nth: int = 0
    error: str = "launch_failed"
    call: bool = False

    def __post_init__(self) -> None:
        if self.error not in (*ERRORS, "hang", "wrong"):
            raise ValueError(f"fault: expected error {', '.join(ERRORS)}, hang or wrong, got {self.error!r}")
        if self.call and self.error not in ERRORS:
            raise ValueError(f"fault: a launch call returns an error, got {self.error!r}")

    def hits(self, kernel: str, count: int) -> bool:
        """Whether the fault hits the `count`-th launch that matches the pattern."""
        return self.nth in (0, count)

    def matches(self, kernel: str) -> bool:
        return fnmatchcase(kernel, self.kernel)


@dataclass(frozen=True)
class Behind:
    """Launches of kernels that match the pattern `kernel` last `factor` times as long behind one that matches `after`."""

    kernel: str
    after: str
    factor: float

    def applies(self, kernel: str, before: str) -> bool:
        return fnmatchcase(kernel, self.kernel) and fnmatchcase(before, self.after)


@dataclass(frozen=True)
class Settings:
    """The settings. `order`: run work as late as CUDA allows, or as it is queued. `memory_gb`: of each device. `checks`: the
    emulator's. `repeats`: run launches of our own kernels even if they would only write the same bytes again, as most timed
    launches would.

    The virtual clock: `noise`, relative standard deviation; `drift_per_s`, relative growth in a second of device time;
    `tail_share` of the launches take `tail_factor` times as long; between `throttle_from_us` and `throttle_to_us` of device
    time the clock is `throttle_factor` of its own, and NVML says so; again in each `throttle_every_us`. A kernel that spins for
    some clocks lasts exactly these. `management`: whether NVML answers, as on no Jetson. `behind`: kernels that last longer
    behind others.
    """

    devices: tuple[str, ...] = ("h200",)
    order: str = "late"
    seed: int = 0
    memory_gb: float = 8.0
    checks: bool = True
    repeats: bool = False
    trace: bool = False
    noise: float = 0.01
    drift_per_s: float = 0.0
    tail_share: float = 0.0
    tail_factor: float = 1.0
    throttle_from_us: float = math.inf
    throttle_to_us: float = math.inf
    throttle_every_us: float = math.inf
    throttle_factor: float = 1.0
    management: bool = True
    faults: tuple[Fault, ...] = ()
    behind: tuple[Behind, ...] = ()

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise ValueError(f"order: expected late or eager, got {self.order!r}")
        if not self.devices:
            raise ValueError("devices: expected at least one name, got none")
        for name in self.devices:
            named(name)
        if not (0 < self.throttle_factor <= 1 and self.tail_factor > 0 and 0 <= self.tail_share <= 1 and self.noise >= 0):
            raise ValueError("expected 0 < throttle_factor <= 1, tail_factor > 0, 0 <= tail_share <= 1 and noise >= 0")

    def to_json(self) -> str:
        """Returns only the settings that differ from the defaults, so that older and newer drivers can read them, and they fit
        on a line.
        """
        default = asdict(Settings())
        return json.dumps({k: v for k, v in asdict(self).items() if v != default[k]})


def from_json(text: str) -> Settings:
    """Reads the settings. ValueError names an unknown one."""
    given = json.loads(text)
    known = {f.name for f in fields(Settings)}
    if not isinstance(given, dict) or given.keys() - known:
        raise ValueError(f"settings of the emulated driver: expected an object of {', '.join(sorted(known))}, got {text[:200]}")
    for name, kind in (("devices", str), ("faults", lambda f: Fault(**f)), ("behind", lambda b: Behind(**b))):
        if name in given:
            given[name] = tuple(map(kind, given[name]))
    return Settings(**given)


def from_environment(environ: Mapping[str, str] = os.environ) -> Settings:
    return from_json(environ.get(VARIABLE) or "{}")


def environment(**changes: object) -> dict[str, str]:
    """Returns the variables that a child's environment needs for these changes to the present settings."""
    return {VARIABLE: replace(from_environment(), **changes).to_json()}  # type: ignore[arg-type]


def visible(count: int, environ: Mapping[str, str] = os.environ) -> list[int]:
    """Returns the numbers of the devices that CUDA_VISIBLE_DEVICES leaves, in its order: up to the first entry that is no
    device's number.
    """
    listed = environ.get(VISIBLE)
    if listed is None:
        return list(range(count))
    found: list[int] = []
    for name in listed.split(","):
        if not name.strip().isdecimal() or int(name) >= count or int(name) in found:
            break
        found.append(int(name))
    return found


class CSettings(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int) for name in ("eager", "trace", "faults", "devices", "visible", "management")),
        *((name, ctypes.c_uint64) for name in ("seed", "memory_bytes")),
        *((name, ctypes.c_double) for name in ("noise", "drift_per_s", "tail_share", "tail_factor")),
        *((name, ctypes.c_double) for name in ("throttle_from_us", "throttle_to_us", "throttle_every_us", "throttle_factor")),
    ]


class CFacts(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char * 128),
        *(
            (name, ctypes.c_int)
            for name in (
                "number",
                "cc",
                "sms",
                "clock_mhz",
                "memory_clock_khz",
                "memory_bus_bits",
                "l2_bytes",
                "smem_per_block",
                "smem_per_sm",
                "threads_per_sm",
                "blocks_per_sm",
                "regs_per_sm",
                "integrated",
            )
        ),
    ]


def c_settings(s: Settings, shown: int) -> CSettings:
    return CSettings(
        s.order == "eager",
        s.trace,
        bool(s.faults),
        len(s.devices),
        shown,
        s.management,
        s.seed,
        int(s.memory_gb * 2**30),
        s.noise,
        s.drift_per_s,
        s.tail_share,
        s.tail_factor,
        s.throttle_from_us,
        s.throttle_to_us,
        s.throttle_every_us,
        s.throttle_factor,
    )


def c_facts(number: int, d: Device) -> CFacts:
    """Returns the driver's report on a device in our table; `device.reported` reads the same facts back."""
    titles = {name: title for title, name in DRIVER_NAMES.items()}
    tegra, bus_bits = d.sm == TEGRA, MEMORY_BUS_BITS
    memory_khz = math.ceil(d.dram_gbps * 8_000_000 / (2 * MEMORY_BUS_BITS))
    if tegra:
        memory_khz, bus_bits = 1000 * d.clock_mhz, 256 if d.dram_gbps > 200 else 64
    return CFacts(
        ("Orin" if tegra else titles.get(d.name, f"NVIDIA {d.title}")).encode(),
        number,
        d.cc,
        d.num_sms,
        d.clock_mhz,
        memory_khz,
        bus_bits,
        d.l2_bytes,
        d.smem_per_block,
        d.smem_per_sm,
        d.max_threads_per_sm,
        d.max_blocks_per_sm,
        d.regs_per_sm,
        tegra,
    )


def device_names() -> list[str]:
    return sorted(NAMED)
