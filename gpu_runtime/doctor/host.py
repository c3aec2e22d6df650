"""The checks of a machine that need no GPU: versions, the compiler, the emulator, the caches."""

import os
import platform
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

from cuda_kernels.compile import CompileError, compile_anew, nvrtc_version
from cuda_kernels.device import Device
from cuda_kernels.files import cache_dir
from cuda_kernels.launch import Emulated
from gpu_runtime import installed_version
from gpu_runtime.doctor.measured_rates import SMALL
from tactics.candidates import candidates
from tactics.measure.cache import Cache
from tactics.measure.timing import driver_version
from tactics.sampling.trial import trial

Status = Literal["passed", "failed", "untested"]
PACKAGES = (  # one package of each row is enough: CUDA 13's or CUDA 12's
    ("numpy",),
    ("cupy-cuda13x", "cupy-cuda12x"),
    ("cuda-bindings",),
    ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"),
    ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12"),
    ("nvidia-ml-py",),
)
ABSOLUTE = re.compile(r"(?<![\w.~])/(?:[^/\s'\":,;()]+/)+")  # the folders of an absolute path


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict of one check. `words`: its observations, or the reason why it failed or is untested."""

    name: str
    status: Status
    words: str


def without_folders(text: str) -> str:
    """Returns a text in which every absolute path is cut to its last name, because folders identify users.

    >>> without_folders("no file /home/ada/x.so here")
    'no file x.so here'
    """
    return ABSOLUTE.sub("", text)


def versions() -> dict[str, str]:
    """Returns name -> version of gpu_runtime, Python, the driver, NVRTC and all packages that affect results; also "system",
    the operating system and architecture, and "processors", their number.
    """

    def installed(packages: tuple[str, ...]) -> dict[str, str]:
        there = {}
        for package in packages:
            with suppress(PackageNotFoundError):
                there[package] = version(package)
        return there or {packages[0]: "not installed"}

    found = {"gpu_runtime": installed_version(), "Python": platform.python_version(), "NVIDIA driver": driver_version()}
    found |= {"system": f"{platform.system()} {platform.machine()}", "processors": str(os.cpu_count())}
    found["NVRTC"] = _nvrtc()
    for packages in PACKAGES:
        found |= installed(packages)
    return found


def _nvrtc() -> str:
    """Returns the version of NVRTC, or "does not load: " and the reason."""
    try:
        return nvrtc_version()
    except Exception as e:  # no wheel, or a library that does not load
        return without_folders(f"does not load: {type(e).__name__}: {e}")[:300]


def checked(name: str, check: Callable[[], str]) -> Verdict:
    """Runs a check and returns its verdict: "passed" with the text that it returns and the seconds that it took, or "failed"
    with its exception as text.
    """
    begun = time.monotonic()
    try:
        words = check()
    except Exception as e:  # a broken installation raises errors of any type
        text = " ".join(without_folders(str(e)).split())
        return Verdict(name, "failed", f"{type(e).__name__}: {text}"[:500])
    return Verdict(name, "passed", f"{words} ({time.monotonic() - begun:.1f} s)")


def compiler(device: Device) -> Verdict:
    """Checks NVRTC: one kernel is compiled anew for the device's architecture."""

    def check() -> str:
        found = compile_anew("flush_l2", {}, device.sm)
        if not found.cubin or ".entry" not in found.ptx:
            raise CompileError(f"flush_l2 for {device.sm}: neither an error nor machine code")
        return f"NVRTC {nvrtc_version()} compiles for {device.sm}"

    return checked("compiler", check)


def emulator(device: Device) -> Verdict:
    """Checks the emulator: it is built if needed, and runs one kernel."""

    def check() -> str:
        error = trial(Emulated(device), SMALL, candidates(SMALL, device)[0])
        return f"runs a kernel's PTX for {device.sm}, relative error {error:.1e}"

    return checked("emulator", check)


def caches() -> Verdict:
    """Checks whether compiled kernels and measurements can be kept in the cache folder, and counts them."""

    def check() -> str:
        folder = cache_dir()
        with suppress(OSError):  # the next line finds a folder that could not be made
            folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError("the cache folder cannot be written: set GPU_RUNTIME_CACHE to a writable one")
        timings = Cache(folder / "timings.jsonl")
        kernels = sum(1 for _ in (folder / "kernels").glob("*/*.cubin"))
        torn = f", {timings.malformed} malformed lines" if timings.malformed else ""
        return f"{kernels} compiled kernels, {len(timings)} measurements{torn}"

    return checked("caches", check)
