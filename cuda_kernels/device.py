"""The GPU at hand: `current()`, which asks its driver, and whether one can be used. `named_devices` has the tables."""

import ctypes
import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cuda_kernels import extras
from cuda_kernels.named_devices import DRIVER_NAMES, INTEGRATED, L2, LAUNCH, NAMED, Device
from cuda_kernels.named_devices import named as named  # of this module, too

VISIBLE = "CUDA_VISIBLE_DEVICES"
ARCHITECTURES = ("sm_80", "sm_86", "sm_87", "sm_89", "sm_90a", "sm_120")


@dataclass(frozen=True, slots=True)
class Relative:
    """The named device with the most similar SM, whose facts an unnamed device gets if its driver does not report them;
    `mma_fma_per_clk`: in place of that device's; `source`: the differences, in words.
    """

    name: str
    mma_fma_per_clk: int
    source: str


# By compute capability and GeForce card or not; GeForce cards accumulate in FP32 at half rate.
RELATIVES = {
    (80, False): Relative("a100", 1024, "GA100 whitepaper"),
    (86, False): Relative("a10", 512, "GA102 whitepaper: RTX A6000 154.8 TFLOP/s with FP32 accumulation, full rate"),
    (86, True): Relative("rtx3090", 256, "GA102 whitepaper: half rate"),
    (87, False): Relative("orin_agx64", 1024, "Jetson AGX Orin technical brief: 42.5 TFLOP/s dense FP16 of 16 SMs at 1.3 GHz"),
    (89, False): Relative("l4", 512, "L40S datasheet: 362 TFLOP/s dense FP16, full rate"),
    (89, True): Relative("rtx4090", 256, "Ada whitepaper: half rate"),
    (90, False): Relative("h200", 2048, "H100 whitepaper"),
    (100, False): Relative("b200", 4096, "DGX B200 datasheet"),
    (103, False): Relative("b200", 4096, "DGX B300 datasheet: 2.25 PFLOP/s dense FP16, as the B200"),
    (110, False): Relative("b200", 4096, "Jetson Thor datasheet: 2070 TFLOP/s sparse FP4, an eighth of it dense FP16"),
    (120, False): Relative("rtx5090", 512, "RTX PRO 6000 Blackwell whitepaper: 503.8 TFLOP/s, full rate"),
    (120, True): Relative("rtx5090", 256, "RTX Blackwell whitepaper: half rate"),
    (121, False): Relative("rtx5090", 512, "DGX Spark datasheet: 1 PFLOP/s sparse FP4, an eighth of it dense FP16"),
}

DRIVER = "libcuda.so.1"
DEFAULT_DEVICE = "h200"  # the device of plans without a GPU or a name


def has_cupy() -> bool:
    """Whether CuPy is installed; without it no GPU is used."""
    return importlib.util.find_spec("cupy") is not None


def has_driver() -> bool:
    """Whether the linker finds CUDA's driver, by the name under which CuPy's runtime opens it."""
    try:
        ctypes.CDLL(DRIVER)
    except OSError:
        return False
    return True


def has_gpu() -> bool:
    """Whether a CUDA driver with at least one device of sm_80 or newer answers."""
    return why_no_gpu() == ""


def only(number: int) -> None:
    """Restricts this process, and the processes that it starts, to one GPU by its number under CUDA_VISIBLE_DEVICES.

    Call it before any other use of a GPU. Raises ValueError without a usable GPU of that number.
    """
    before = os.environ.get(VISIBLE)
    listed = None if before is None else [name.strip() for name in before.split(",") if name.strip()]
    if listed is not None and number >= len(listed):
        reason = f"{VISIBLE} leaves {len(listed)}"
    else:
        os.environ[VISIBLE] = str(number) if listed is None else listed[number]
        if not (reason := why_no_gpu()):
            return
        os.environ.pop(VISIBLE)
        if before is not None:
            os.environ[VISIBLE] = before
    raise ValueError(f"GPU number {number} cannot be used here: {reason}; give a name to plan with predicted times, as h200")


def num_gpus() -> int:
    """The number of GPUs that CUDA shows this process; 0 where it does not answer, see why_no_gpu."""
    if not (has_cupy() and has_driver()):
        return 0
    try:
        import cupy

        return int(cupy.cuda.runtime.getDeviceCount())
    except Exception:  # the driver's own errors have no common class across CuPy versions
        return 0


def why_no_gpu() -> str:
    """Why this process has no usable GPU, or "". Imports CuPy, which is slow, only if a GPU is possible."""
    if has_cupy() and not has_driver():
        return f"no CUDA driver is found ({DRIVER})"
    try:
        import cupy

        count = cupy.cuda.runtime.getDeviceCount()
        if count < 1:
            return "the CUDA driver reports no device"
        cc = int(cupy.cuda.Device().compute_capability)
        return "" if cc >= 80 else f"compute capability {cc / 10} is below 8.0"
    except ModuleNotFoundError as e:
        return extras.why_missing(e.name) or f"CuPy does not load: {e}"
    except ImportError as e:  # a missing library
        return f"CuPy does not load: {str(e).partition(chr(10))[0]}"
    except Exception as e:  # the driver's own errors have no common class across CuPy versions
        return f"the CUDA driver does not answer: {str(e).partition(':')[0]}"


# cudaDeviceAttr: attributes that cudaDeviceProp lacks. The driver may answer 0 for clocks (virtual GPUs, MIG slices).
CLOCK_KHZ, MEMORY_CLOCK_KHZ, MEMORY_BUS_BITS, MAX_BLOCKS_PER_SM = 13, 36, 37, 106


def current() -> Device:
    """Describes this machine's GPU, from the driver; facts that no driver reports come from the same or most similar named
    device.
    """
    with extras.named():
        import cupy

    i = cupy.cuda.Device().id
    runtime = cupy.cuda.runtime
    numbers = (CLOCK_KHZ, MEMORY_CLOCK_KHZ, MEMORY_BUS_BITS, MAX_BLOCKS_PER_SM)
    return reported(runtime.getDeviceProperties(i), {n: runtime.deviceGetAttribute(n, i) for n in numbers})


def reported(p: Mapping, attributes: Mapping[int, int]) -> Device:
    """Makes the device that a driver describes: `p` is its cudaDeviceProp, `attributes` are by number; 0 means not reported."""
    cc = 10 * p["major"] + p["minor"]
    title = p["name"].decode() if isinstance(p["name"], bytes) else p["name"]
    known, relative = DRIVER_NAMES.get(title), _relative(cc, "GeForce" in title)
    like = NAMED[known or relative.name]
    clock_mhz = attributes[CLOCK_KHZ] // 1000
    dram_gbps = 2 * attributes[MEMORY_CLOCK_KHZ] * attributes[MEMORY_BUS_BITS] // 8_000_000  # two transfers a clock
    if p.get("integrated"):
        dram_gbps = next((gbps for of, l2, gbps in INTEGRATED if of == cc and p["l2CacheSize"] >= l2), dram_gbps)
    sms = p["multiProcessorCount"]
    reported: dict[str, Any] = {
        "clock_mhz": clock_mhz,
        "dram_gbps": dram_gbps,
        "max_blocks_per_sm": attributes[MAX_BLOCKS_PER_SM],
    }
    guessed = ", ".join([*(field for field, value in reported.items() if value <= 0), LAUNCH, L2, "mma_sync_share"])
    return Device(
        name=title.lower().replace(" ", "-"),
        title=title,
        sm=f"sm_{cc}" + ("a" if cc in (90, 100, 103) else ""),
        num_sms=sms,
        l2_bytes=p["l2CacheSize"] or like.l2_bytes,
        l2_bytes_per_clk=round(like.l2_bytes_per_clk * sms / like.num_sms),
        smem_per_block=p["sharedMemPerBlockOptin"],
        smem_per_sm=p["sharedMemPerMultiprocessor"],
        max_threads_per_sm=p["maxThreadsPerMultiProcessor"],
        mma_fma_per_clk=like.mma_fma_per_clk if known else relative.mma_fma_per_clk,
        mma_sync_share=like.mma_sync_share,
        launch_us=like.launch_us,
        regs_per_sm=p["regsPerMultiprocessor"],
        measured=True,
        **{field: value if value > 0 else getattr(like, field) for field, value in reported.items()},
        sources=f"CUDA driver; else {like.title}: {like.sources}"
        if known
        else f"CUDA driver; products per clock: {relative.source}; else as {like.title}",
        assumed=like.assumed if known else guessed,
    )


def relative(device: Device) -> Device:
    """Returns the named device that equals `device` or, for facts that its driver does not report, resembles it most."""
    return NAMED.get(device.model) or NAMED[_relative(device.cc, "GeForce" in device.title).name]


def _relative(cc: int, geforce: bool) -> Relative:
    """Returns the relative for the newest compute capability in the table up to `cc`. Raises ValueError below 8.0."""
    at = max((known for known, _ in RELATIVES if known <= cc), default=None)
    if at is None:
        raise ValueError(f"compute capability {cc / 10}: expected 8.0 or newer, 2:4 sparse tensor cores begin there")
    return RELATIVES[at, geforce and (at, True) in RELATIVES]
