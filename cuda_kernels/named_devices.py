"""GPUs in numbers: the facts of named devices, each with its source, and the names by which they are known."""

import os
import re
from dataclasses import dataclass

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
        """The key of a GPU's stored measurements, without the driver: with the clock that the power mode of an integrated GPU
        sets, since its driver gives all of a generation one title."""
        mode = f"|{self.clock_mhz}" if self.cc in {cc for cc, *_ in INTEGRATED} else ""
        return f"{self.title}|{self.sm}|{self.num_sms}|{self.l2_bytes}{mode}"

    def __str__(self) -> str:
        return f"{self.title} ({self.sm}, {self.num_sms} SMs, {self.clock_mhz} MHz, {self.dram_gbps} GB/s)"


KIB, MIB = 1024, 1024 * 1024

# For every device here: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
MAX_GRID, MAX_BLOCK, MAX_THREADS = (2**31 - 1, 65535, 65535), (1024, 1024, 64), 1024

# Per-SM limits: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability". Clocks are boost clocks, at
# which the rates of the data sheets hold: these are peaks; `rates` has the shares reached. FP16 with FP32
# accumulation runs at half the rate on GeForce cards, not on the data-center cards with the same chip. L2 bytes/clk is the
# rate at which all SMs together read L2, published for the A100 only: other devices are assumed to have the same per SM, and
# Hopper and B200 the 64 that an SM can read (measured on an H200: 41). launch_us is one dependent kernel inside a CUDA graph.
LAUNCH, L2 = "launch_us", "l2_bytes_per_clk"
HOPPER_SYNC = "ptxas 13.0 spaces mma.sync m16n8k16 by 6 clocks for sm_90a, two thirds of the wgmma peak"
GRAPHS = "graph launches of small kernels as gpu-benches measured them (A100 1.34, A40 1.1, L40 0.93, H200 1.26 us)"
GA100_L2 = "GA100 whitepaper (5120 B/clk L2)"
# fmt: off
# Jetson modules in the power mode MAXN without Super: lower modes have fewer SMs and lower clocks. Data sheets give the dense
# INT8 rate of the GPU, twice the FP16 rate; deviceQuery prints SMs, clocks (NX 8GB: from its INT8 rate) and L2.
ORINS = tuple(
    Device(
        name, f"Jetson {title}", "sm_87", sms, mhz, gbps, l2 * MIB, round(5120 * sms / 108), 163 * KIB, 164 * KIB, 1536, 16,
        1024, 1.0, 1.34, f"Jetson {title} data sheet ({tops} TOPS of dense INT8 without DLAs: half for FP16; {gbps} GB/s); "
        f"deviceQuery: {sms} SMs, {l2} MiB L2; mma.sync at the full rate, launch and L2 per SM as the A100's",
        assumed=f"{LAUNCH}, {L2}, mma_sync_share",
    )
    for name, title, sms, mhz, gbps, l2, tops in (
        ("orin_agx64", "AGX Orin 64GB", 16, 1300, 205, 4, 85),
        ("orin_agx32", "AGX Orin 32GB", 14, 930, 205, 4, 54),
        ("orin_nx16", "Orin NX 16GB", 8, 918, 102, 2, 30),
        ("orin_nx8", "Orin NX 8GB", 8, 765, 102, 2, 25),
        ("orin_nano8", "Orin Nano 8GB", 8, 625, 68, 2, 20),
    )
)
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
            "a30", "A30", "sm_80", 56, 1440, 933, 24 * MIB, 2655, 163 * KIB, 164 * KIB, 2048, 32,
            1024, 1.0, 1.34, "NVIDIA A30 datasheet (165 TFLOP/s FP16, 933 GB/s, 165 W); 56 SMs, 24 MB L2: TechPowerUp, A30; "
            f"launch as the A100's, {GRAPHS}", assumed=f"{LAUNCH}, {L2}",
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
            "a2", "A2", "sm_86", 10, 1770, 200, 2 * MIB, 474, 99 * KIB, 100 * KIB, 1536, 16,
            512, 1.0, 1.1, "NVIDIA A2 datasheet (18 TFLOP/s FP16 with FP32 accumulate: full rate, 200 GB/s, 60 W); 10 SMs, 2 "
            f"MB L2: TechPowerUp, A2; launch as the A40's, {GRAPHS}", assumed=f"{LAUNCH}, {L2}",
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
            "rtx3080", "GeForce RTX 3080", "sm_86", 68, 1710, 760, 5 * MIB, 3223, 99 * KIB, 100 * KIB, 1536, 16,
            256, 1.0, 1.1, "GA102 whitepaper: 59.5 TFLOP/s FP16 with FP32 accumulate (half rate), 760 GB/s, 5 MB L2 (10 GB); "
            f"launch as the A40's, {GRAPHS}", assumed=f"{LAUNCH}, {L2}",
        ),
        *ORINS,
        Device(
            "rtx4090", "GeForce RTX 4090", "sm_89", 128, 2520, 1008, 72 * MIB, 5120, 99 * KIB, 100 * KIB, 1536, 24,
            256, 1.0, 0.93, "Ada whitepaper: 165.2 TFLOP/s FP16 with FP32 accumulate (half rate), 1008 GB/s, 72 MB L2; "
            f"launch as the L40's, {GRAPHS}", assumed=f"{LAUNCH}, {L2}",
        ),
        Device(
            "rtx4080", "GeForce RTX 4080", "sm_89", 76, 2505, 717, 64 * MIB, 3040, 99 * KIB, 100 * KIB, 1536, 24,
            256, 1.0, 0.93, "Ada whitepaper: 97.5 TFLOP/s FP16 with FP32 accumulate (half rate), 716.8 GB/s, 64 MB L2; "
            f"launch as the L40's, {GRAPHS}", assumed=f"{LAUNCH}, {L2}",
        ),
        Device(
            "rtx4070", "GeForce RTX 4070", "sm_89", 46, 2475, 504, 36 * MIB, 1840, 99 * KIB, 100 * KIB, 1536, 24,
            256, 1.0, 0.93, "NVIDIA's table of GeForce RTX 40 (46 SMs, 2475 MHz, 504 GB/s, 36 MB L2), half rate as on each "
            f"GeForce (58.3 TFLOP/s FP16 with FP32 accumulate); launch as the L40's, {GRAPHS}", assumed=f"{LAUNCH}, {L2}",
        ),
        Device(
            "l40s", "L40S", "sm_89", 142, 2490, 864, 96 * MIB, 6733, 99 * KIB, 100 * KIB, 1536, 24,
            512, 1.0, 0.93, "NVIDIA L40S datasheet (362 TFLOP/s FP16 dense: full rate, which 142 SMs reach at 2490 MHz; 864 "
            f"GB/s); Ada whitepaper (96 MB L2 of AD102); launch as the L40's, {GRAPHS}", assumed=f"{LAUNCH}, {L2}",
        ),
        Device(
            "l40", "L40", "sm_89", 142, 2490, 864, 96 * MIB, 6733, 99 * KIB, 100 * KIB, 1536, 24,
            256, 1.0, 0.93, "NVIDIA L40 datasheet (181 TFLOP/s FP16 dense: half of the L40S's; 864 GB/s, 300 W); Ada "
            f"whitepaper (96 MB L2 of AD102); {GRAPHS}", assumed=L2,
        ),
        Device(
            "rtx_6000_ada", "RTX 6000 Ada Generation", "sm_89", 142, 2505, 960, 96 * MIB, 6733, 99 * KIB, 100 * KIB, 1536, 24,
            512, 1.0, 0.93, "Ada whitepaper: RTX 6000, 364.2 TFLOP/s FP16 with FP32 accumulate (full rate), 960 GB/s, 96 MB "
            f"L2; launch as the L40's, {GRAPHS}", assumed=f"{LAUNCH}, {L2}",
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
            "gh200", "GH200 96GB HBM3", "sm_90a", 132, 1830, 4000, 60 * MIB, 8448, 227 * KIB, 228 * KIB, 2048, 32,
            2048, 0.667, 1.26, "NVIDIA GH200 datasheet (990 TFLOP/s FP16 dense, 4 TB/s of 96 GB HBM3); L2 as the H200's, which "
            f"has as many HBM stacks; {HOPPER_SYNC}; launch as the H200's, {GRAPHS}", assumed=f"{LAUNCH}, l2_bytes, {L2}",
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
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": "rtx_pro_6000", "NVIDIA A30": "a30", "NVIDIA A2": "a2", "NVIDIA L40": "l40",
    "NVIDIA GeForce RTX 3080": "rtx3080", "NVIDIA GeForce RTX 4080": "rtx4080", "NVIDIA GeForce RTX 4070": "rtx4070",
    "NVIDIA RTX 6000 Ada Generation": "rtx_6000_ada", "NVIDIA GH200 480GB": "gh200",
}
# fmt: on

# GB/s of the memory that an integrated GPU shares with the CPU, by compute capability and least bytes of L2: Tegra's driver
# reports 2.5 to 7 times too little (the GPU's clock, another width). Of modules alike the fastest, so that bounds are bounds.
INTEGRATED = (
    (87, 4 * MIB, 205),  # Jetson AGX Orin data sheet: 204.8, LPDDR5 of 256 bits
    (87, 0, 102),  # Jetson Orin NX and Orin Nano Super data sheets: 102.4, 128 bits
    (110, 0, 273),  # Jetson Thor data sheet
    (121, 0, 273),  # DGX Spark data sheet
)


def _spoken(name: str) -> str:
    """A name without case, maker, brand, spaces and signs: "NVIDIA GeForce RTX 4090" and "rtx-4090" are both "rtx4090"."""
    return "".join(c for c in re.sub("nvidia|geforce|tesla|jetson", "", name.lower()) if c.isalnum())


# Names, titles and the driver's names, which nvidia-smi prints, as they are compared -> name.
SPOKEN = {_spoken(said): name for said, name in DRIVER_NAMES.items()}
SPOKEN |= {_spoken(said): d.name for d in NAMED.values() for said in (d.title, d.name)} | {_spoken(n): n for n in REFUSED}


def named(name: str) -> Device:
    """Returns the device of that name, or of the name that nvidia-smi prints. Raises ValueError with the known names."""
    said = _spoken(str(name))
    known = SPOKEN.get(said, "")
    if known in REFUSED:
        raise ValueError(f"device {name}: {REFUSED[known]}")
    if known:
        return NAMED[known]
    import difflib  # only an error needs it

    near = [other for other in SPOKEN if other.startswith(said)] if len(said) > 1 else []
    near = near or difflib.get_close_matches(said, SPOKEN, n=4, cutoff=0.5 if len(said) > 1 else 1)
    close = [name for name in dict.fromkeys(SPOKEN[other] for other in near) if name in NAMED]
    meant = f"did you mean {' or '.join(close)}? " if close else ""
    raise ValueError(f"unknown device {name!r}: {meant}expected one of {', '.join(sorted(NAMED))}")
