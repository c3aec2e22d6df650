"""GPUs in numbers: frozen facts of named devices, and `current()`, which asks the driver about this machine's GPU."""

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cuda_kernels import extras
from cuda_kernels.hashed import Hashed


@dataclass(frozen=True, slots=True)
class Device(Hashed):
    """Facts that candidates and predictions use.

    `mma_fma_per_clk`: dense FP16 products with FP32 accumulation, per clock and SM, at the best instruction's rate;
    `mma_sync_share`: the share of it that mma.sync reaches; 2:4 sparse instructions do twice the (nominal) products.
    `smem_per_block`: dynamic shared memory one block may ask for (bytes); `smem_per_sm` includes 1 KiB the driver
    reserves per block. Bandwidths in GB/s (1e9 bytes), clocks in MHz. `sources`: where the numbers come from; `assumed`: the
    unpublished numbers, taken from a related device. `left_out`: (a kernel, or a kernel with its tile; why) for the kernels
    that plans for this device leave out because they failed on it.
    """

    name: str
    title: str
    sm: str
    num_sms: int
    clock_mhz: int
    dram_gbps: int
    l2_bytes: int
    l2_bytes_per_clk: int
    smem_per_block: int
    smem_per_sm: int
    max_threads_per_sm: int
    max_blocks_per_sm: int
    mma_fma_per_clk: int
    mma_sync_share: float
    launch_us: float
    sources: str
    regs_per_sm: int = 65536
    measured: bool = False
    assumed: str = ""
    left_out: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        for field in ("num_sms", "clock_mhz", "dram_gbps", "l2_bytes", "smem_per_block", "mma_fma_per_clk"):
            if getattr(self, field) <= 0:
                raise ValueError(f"device {self.name}: {field} must be positive, got {getattr(self, field)}")
        if self.smem_per_block >= self.smem_per_sm:
            raise ValueError(f"device {self.name}: a block's shared memory exceeds the SM's")

    @property
    def model(self) -> str:
        """The name of a named device, by which plans are predicted, also where its driver reports it; else its title."""
        return self.name if self.name in NAMED else DRIVER_NAMES.get(self.title, self.title)

    @property
    def cc(self) -> int:
        """Compute capability as a number: 80 for sm_80, 90 for sm_90a."""
        return int(self.sm[3:].rstrip("a"))

    @property
    def fp32_fma_per_clk(self) -> int:
        """FP32 products of an SM's CUDA cores per clock: CUDA C++ Programming Guide, throughput of arithmetic instructions."""
        return 64 if self.cc == 80 else 128

    @property
    def dependent_launch(self) -> bool:
        """Whether a kernel may begin before the previous one has ended (programmatic dependent launch)."""
        return self.cc >= 90

    @property
    def launches_early(self) -> bool:
        """Whether our launches begin before the one ahead has ended.

        GPU_RUNTIME_LAUNCH=rawkernel turns early launches off, to measure their gain: CuPy's RawKernel launches then. Raises
        ValueError for another value of this variable.
        """
        way = os.environ.get("GPU_RUNTIME_LAUNCH", "")
        if way not in ("", "rawkernel"):
            raise ValueError(f"GPU_RUNTIME_LAUNCH: expected rawkernel, or no such variable, got {way!r}")
        return self.dependent_launch and not way

    @property
    def dense_tflops(self) -> float:
        return 2e-6 * self.num_sms * self.clock_mhz * self.mma_fma_per_clk

    @property
    def key(self) -> str:
        """The key of a GPU's stored measurements, without the driver."""
        return f"{self.title}|{self.sm}|{self.num_sms}|{self.l2_bytes}"

    def __str__(self) -> str:
        return f"{self.title} ({self.sm}, {self.num_sms} SMs, {self.clock_mhz} MHz, {self.dram_gbps} GB/s)"


KIB, MIB = 1024, 1024 * 1024

# For every device here: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
MAX_GRID, MAX_BLOCK, MAX_THREADS = (2**31 - 1, 65535, 65535), (1024, 1024, 64), 1024

# Per-SM limits: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability". Clocks are boost clocks, at
# which the rates of the data sheets hold: these are peaks; `rates` has the shares reached. FP16 with FP32
# accumulation runs at half the rate on GeForce cards, not on the data-center cards with the same chip. L2 bytes/clk is what
# all SMs together can draw from L2, published for the A100 only: where it is assumed, the others get the same per SM, and
# Hopper and B200 the 64 that an SM can read (measured on an H200: 41). launch_us is one dependent kernel inside a CUDA graph.
LAUNCH, L2 = "launch_us", "l2_bytes_per_clk"
HOPPER_SYNC = "ptxas 13.0 spaces mma.sync m16n8k16 by 6 clocks for sm_90a, two thirds of the wgmma peak"
GRAPHS = "graph launches of small kernels as gpu-benches measured them (A100 1.34, A40 1.1, L40 0.93, H200 1.26 us)"
GA100_L2 = "GA100 whitepaper (5120 B/clk L2)"
# fmt: off
NAMED = {
    d.name: d
    for d in (
        Device(
            "a100", "A100-SXM4-80GB", "sm_80", 108, 1410, 2039, 40 * MIB, 5120, 163 * KIB, 164 * KIB, 2048, 32,
            1024, 1.0, 1.34, f"NVIDIA A100 datasheet (312 TFLOP/s FP16, 2039 GB/s); {GA100_L2}; {GRAPHS}",
        ),
        Device(
            "a100_pcie", "A100-PCIE-80GB", "sm_80", 108, 1410, 1935, 40 * MIB, 5120, 163 * KIB, 164 * KIB, 2048, 32,
            1024, 1.0, 1.34, f"NVIDIA A100 datasheet (PCIe, 312 TFLOP/s FP16, 1935 GB/s, 300 W); {GA100_L2}; {GRAPHS}",
        ),
        Device(
            "a100_40gb", "A100-SXM4-40GB", "sm_80", 108, 1410, 1555, 40 * MIB, 5120, 163 * KIB, 164 * KIB, 2048, 32,
            1024, 1.0, 1.34, f"NVIDIA A100 datasheet (40 GB, 312 TFLOP/s FP16, 1555 GB/s); {GA100_L2}; {GRAPHS}",
        ),
        Device(
            "a10", "A10", "sm_86", 72, 1695, 600, 6 * MIB, 3413, 99 * KIB, 100 * KIB, 1536, 16,
            512, 1.0, 1.1, "NVIDIA A10 datasheet (125 TFLOP/s FP16 with FP32 accumulate: full rate, 600 GB/s); GA102 "
            f"whitepaper (6 MB L2); launch as the A40's, {GRAPHS}", assumed=f"{LAUNCH}, {L2}",
        ),
        Device(
            "a40", "A40", "sm_86", 84, 1740, 696, 6 * MIB, 3982, 99 * KIB, 100 * KIB, 1536, 16,
            512, 1.0, 1.1, "NVIDIA A40 datasheet (149.7 TFLOP/s FP16 with FP32 accumulate: full rate, 696 GB/s); GA102 "
            f"whitepaper (6 MB L2); {GRAPHS}", assumed=L2,
        ),
        Device(
            "rtx_a6000", "RTX A6000", "sm_86", 84, 1800, 768, 6 * MIB, 3982, 99 * KIB, 100 * KIB, 1536, 16,
            512, 1.0, 1.1, "NVIDIA RTX A6000 datasheet (768 GB/s, 300 W); GA102 whitepaper (154.8 TFLOP/s FP16 with FP32 "
            f"accumulate: full rate, 6 MB L2); launch as the A40's, {GRAPHS}", assumed=f"{LAUNCH}, {L2}",
        ),
        Device(
            "rtx3090", "GeForce RTX 3090", "sm_86", 82, 1695, 936, 6 * MIB, 3887, 99 * KIB, 100 * KIB, 1536, 16,
            256, 1.0, 1.1, "GA102 whitepaper: 71 TFLOP/s FP16 with FP32 accumulate (half rate), 936 GB/s, 6 MB L2; launch as "
            f"the A40's, {GRAPHS}", assumed=f"{LAUNCH}, {L2}",
        ),
        Device(
            "rtx3070", "GeForce RTX 3070", "sm_86", 46, 1725, 448, 4 * MIB, 2180, 99 * KIB, 100 * KIB, 1536, 16,
            256, 1.0, 1.1, "GA104 whitepaper: 40.6 TFLOP/s FP16 with FP32 accumulate (half rate), 448 GB/s, 4 MB L2; launch as "
            f"the A40's, {GRAPHS}", assumed=f"{LAUNCH}, {L2}",
        ),
        Device(
            "rtx4090", "GeForce RTX 4090", "sm_89", 128, 2520, 1008, 72 * MIB, 5120, 99 * KIB, 100 * KIB, 1536, 24,
            256, 1.0, 0.93, "Ada whitepaper: 165.2 TFLOP/s FP16 with FP32 accumulate (half rate), 1008 GB/s, 72 MB L2; "
            f"launch as the L40's, {GRAPHS}", assumed=f"{LAUNCH}, {L2}",
        ),
        Device(
            "l40s", "L40S", "sm_89", 142, 2490, 864, 96 * MIB, 6733, 99 * KIB, 100 * KIB, 1536, 24,
            512, 1.0, 0.93, "NVIDIA L40S datasheet (362 TFLOP/s FP16 dense: full rate, which 142 SMs reach at 2490 MHz; 864 "
            f"GB/s); Ada whitepaper (96 MB L2 of AD102); launch as the L40's, {GRAPHS}", assumed=f"{LAUNCH}, {L2}",
        ),
        Device(
            "l4", "L4", "sm_89", 58, 2040, 300, 48 * MIB, 2750, 99 * KIB, 100 * KIB, 1536, 24,
            512, 1.0, 0.93, "NVIDIA L4 datasheet (242 TFLOP/s FP16 sparse: 121 dense, full rate; 300 GB/s); 58 SMs, 48 MB "
            f"L2 of AD104; launch as the L40's, {GRAPHS}", assumed=f"{LAUNCH}, {L2}",
        ),
        Device(
            "h100", "H100 SXM 80GB", "sm_90a", 132, 1830, 3350, 50 * MIB, 8448, 227 * KIB, 228 * KIB, 2048, 32,
            2048, 0.667, 1.26, "NVIDIA H100 datasheet (989 TFLOP/s FP16 dense, 3.35 TB/s); H100 whitepaper (50 MB L2); "
            f"{HOPPER_SYNC}; launch as the H200's, {GRAPHS}", assumed=L2,
        ),
        Device(
            "h200", "H200 SXM 141GB", "sm_90a", 132, 1830, 4800, 60 * MIB, 8448, 227 * KIB, 228 * KIB, 2048, 32,
            2048, 0.667, 1.26, "NVIDIA H200 datasheet (989 TFLOP/s FP16 dense, 4.8 TB/s); L2 as the driver reports; "
            f"{HOPPER_SYNC}; {GRAPHS}", assumed=L2,
        ),
        Device(
            "b200", "B200", "sm_100a", 148, 1856, 8000, 126 * MIB, 9472, 227 * KIB, 228 * KIB, 2048, 32,
            4096, 0.25, 1.26, "NVIDIA DGX B200 datasheet (2.25 PFLOP/s FP16 dense per GPU, which 148 SMs reach at 1856 MHz; 8 "
            "TB/s); 148 SMs, 126 MB L2: Chips and Cheese, B200; ptxas 13.0 spaces mma.sync m16n8k16 by 8 clocks for sm_100a, a "
            "quarter of the tcgen05 peak; launch as the H200's", assumed=f"{LAUNCH}, {L2}",
        ),
        Device(
            "rtx5090", "GeForce RTX 5090", "sm_120", 170, 2407, 1792, 96 * MIB, 8059, 99 * KIB, 100 * KIB, 1536, 24,
            256, 1.0, 0.93, "RTX Blackwell whitepaper: 209.5 TFLOP/s FP16 with FP32 accumulate (half rate), 1792 GB/s, 96 MB "
            "L2; launch as the L40's", assumed=f"{LAUNCH}, {L2}",
        ),
        Device(
            "rtx_pro_6000", "RTX PRO 6000 Blackwell Server Edition", "sm_120", 188, 2617, 1597, 128 * MIB, 8913, 99 * KIB,
            100 * KIB, 1536, 24, 512, 1.0, 0.93, "RTX PRO 6000 Blackwell whitepaper: 503.8 TFLOP/s FP16 with FP32 accumulate "
            "(full rate), 128 MB L2; Server Edition datasheet: 1597 GB/s; launch as the L40's", assumed=f"{LAUNCH}, {L2}",
        ),
    )
}
# fmt: on

TURING = "compute capability 7.5: expected 8.0 or newer, 2:4 sparse tensor cores and cp.async begin there"
REFUSED = {"t4": TURING, "rtx2080ti": TURING, "v100": TURING.replace("7.5", "7.0")}

# Shared-memory limits by compute capability, for compiling and launching on devices that are not in the table.
# fmt: off
SMEM_PER_BLOCK = {80: 163 * KIB, 86: 99 * KIB, 87: 163 * KIB, 89: 99 * KIB, 90: 227 * KIB, 100: 227 * KIB, 103: 227 * KIB,
                  120: 99 * KIB}

# The driver's names of the named devices.
DRIVER_NAMES = {
    "NVIDIA A100-SXM4-80GB": "a100", "NVIDIA A10": "a10", "NVIDIA GeForce RTX 3090": "rtx3090", "NVIDIA L4": "l4",
    "NVIDIA GeForce RTX 4090": "rtx4090", "NVIDIA H100 80GB HBM3": "h100", "NVIDIA H200": "h200", "NVIDIA B200": "b200",
    "NVIDIA GeForce RTX 5090": "rtx5090", "NVIDIA A100 80GB PCIe": "a100_pcie", "NVIDIA A100-SXM4-40GB": "a100_40gb",
    "NVIDIA A40": "a40", "NVIDIA RTX A6000": "rtx_a6000", "NVIDIA GeForce RTX 3070": "rtx3070", "NVIDIA L40S": "l40s",
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": "rtx_pro_6000",
}
# fmt: on


VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class Relative:
    """The source of an unnamed device's unreported facts: the named device with the most similar SM, and the differences."""

    name: str
    mma_fma_per_clk: int
    source: str


# By compute capability and GeForce card or not; GeForce cards accumulate in FP32 at half rate.
RELATIVES = {
    (80, False): Relative("a100", 1024, "GA100 whitepaper"),
    (86, False): Relative("a10", 512, "GA102 whitepaper: RTX A6000 154.8 TFLOP/s with FP32 accumulation, full rate"),
    (86, True): Relative("rtx3090", 256, "GA102 whitepaper: half rate"),
    (87, False): Relative("a100", 1024, "Jetson AGX Orin technical brief: 42.5 TFLOP/s dense FP16 of 16 SMs at 1.3 GHz"),
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
# GB/s of the memory that an integrated GPU shares with the CPU, by compute capability and least bytes of L2: Tegra's driver
# reports 2.5 to 7 times too little (the GPU's clock, another width). Of modules alike the fastest, so that bounds are bounds.
INTEGRATED = (
    (87, 4 * MIB, 205),  # Jetson AGX Orin data sheet: 204.8, LPDDR5 of 256 bits
    (87, 0, 102),  # Jetson Orin NX and Orin Nano Super data sheets: 102.4, 128 bits
    (110, 0, 273),  # Jetson Thor data sheet
    (121, 0, 273),  # DGX Spark data sheet
)
ARCHITECTURES = ("sm_80", "sm_86", "sm_87", "sm_89", "sm_90a", "sm_120")


def named(name: str) -> Device:
    """Returns the device of that name. Raises ValueError with the known names."""
    lower = str(name).lower()
    if lower in REFUSED:
        raise ValueError(f"device {name}: {REFUSED[lower]}")
    try:
        return NAMED[lower]
    except KeyError:
        raise ValueError(f"unknown device {name!r}: expected one of {', '.join(sorted(NAMED))}") from None


DRIVER = "libcuda.so.1"
DEFAULT_DEVICE = "h200"  # the device of plans without a GPU or a name


def has_cupy() -> bool:
    """Whether CuPy is installed; without it no GPU is used."""
    return importlib.util.find_spec("cupy") is not None


def has_driver() -> bool:
    """Whether the linker finds CUDA's driver, by the name under which CuPy's runtime opens it."""
    import ctypes

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


# cudaDeviceAttr: what the driver reports beside cudaDeviceProp. It may answer 0 for clocks (virtual GPUs, MIG slices).
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
