"""Measured rates of GPUs, in addition to the peaks of `device`: the constants of estimates, each with its source.

A *bound* uses the peaks of `Device`, and no published time beats it. An *estimate* uses the rates here, which kernels have
reached in measurements. `Rates` are the hardware's, for every kernel. `Library` are the rates of cuBLAS, CUTLASS and TensorRT,
which use wgmma on Hopper and tcgen05 on B200. benchmarks/bench_predictions fits the latter to published times (`--fit` prints
them), and judges them.
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from cuda_kernels.device import Device, relative
from cuda_kernels.named_devices import ORINS


@dataclass(frozen=True, slots=True)
class Library:
    """The rates at which a library's matrix products use a device.

    `math_share`: of the tensor cores' peak in a long main loop; `sparse_rate`: 2:4 against dense in that loop; `sm_l2`, `l2`:
    bytes per clock that one SM and all SMs read from L2, counted per tile (data that a cluster shares counts for each);
    `fill_clk`, `block_clk`: clocks once per launch and per tile, start and end; `dram_share`: of the data sheet's bandwidth
    when weights are streamed; `persistent`: tiles are spread without whole rounds; `sparse_us`: a sparse kernel's fixed extra
    time.
    """

    math_share: float
    sparse_rate: float
    sm_l2: float
    l2: float
    fill_clk: float
    block_clk: float
    dram_share: float
    persistent: bool
    sparse_us: float
    source: str


# Shares of L2 up to which none, and from which all, of a step's reads and writes come from DRAM: by gpu-benches'
# scale kernels, which read the last kernel's output. `--fit` finds (0.3, 1.05) of an A100 and (0.3, 0.8) of an H200, whose L2
# has two halves, as those of H100 and B200; and (0.75, 1.7) of an A40, (0.65, 1.6) of an L40: the others are like these. They
# hold for libraries' kernels as for ours.
KEPT_HALVES, KEPT_WHOLE = (0.3, 1.0), (0.7, 1.65)
KEPT_SEEN = ("a100", "a100_pcie", "a100_40gb", "h100", "h200", "a40", "rtx_a6000", "l40s")  # measured, with that much L2


@dataclass(frozen=True, slots=True)
class Rates:
    """The rates of a device for every kernel.

    `l2`, `sm_l2`: bytes per clock that all SMs and one SM read from L2; `dram_share`: of the data sheet's bandwidth;
    `sync_share`: of the peak of `mma.sync`; `sparse_rate`: products of `mma.sp` per product of `mma.sync` without waiting
    warps; the share that loops reach is simulated (benchmarks/simulator). `boost`: the highest clock over the data sheet's,
    used by bounds; `sparse_us` and `sparse_us_sigma`: a sparse kernel's fixed cost. `sparse_rate_sigma`: the error of the
    logarithm of the loops' share of the sparse rate, if no pairs were timed on the device. `sustained`: the smallest and
    largest share of the data sheet's clock that a power limit leaves to busy tensor cores; 1 if `sync_share` includes it.
    `early_us`: time by which our launches are shorter than `Device.launch_us`, since they begin before the one ahead has ended.
    `kept`: shares of L2: data up to the first share all stays in L2, data from the second share on all comes from DRAM.
    """

    l2: float
    sm_l2: float
    dram_share: float
    sync_share: float
    sparse_rate: float
    boost: float
    sparse_us: float
    sparse_us_sigma: float
    source: str
    library: Library
    sparse_rate_sigma: float = 0.0
    sustained: tuple[float, float] = (1.0, 1.0)
    early_us: float = 0.0
    kept: tuple[float, float] = KEPT_HALVES

    @property
    def held(self) -> float:
        """The share of the clock that estimates use for busy tensor cores: the middle of `sustained`."""
        return sum(self.sustained) / 2

    @property
    def held_sigma(self) -> float:
        """The standard error of the natural logarithm of `held`: half of log(largest / smallest) of `sustained`; 0 without a
        range.
        """
        low, high = self.sustained
        return math.log(high / low) / 2


BENCHES = "gpu-benches (RRZE-HPC): L2 of A100 5.35, H200 9.9, L40 5.2 to 5.7, A40 2.43 TB/s; to one SM A100 35, H200 38 B/clk"
FITTED = "fitted to aiconfigurator's BF16 products"
PAIRS = "fitted to vllmbench's pairs of cuBLASLt and cuSPARSELt products"

# `python -m benchmarks.bench_predictions --fit` prints all but `persistent`. Devices without pairs of sparse and dense products
# have the sparse constants of a device with the same kind of dense rate.
FULL, HALF = (2.0, 1.96), (1.97, 1.47)  # sparse_rate and sparse_us for a full dense rate, and half (GeForce)
A100_LIB = Library(0.984, FULL[0], 24.5, 3800, 474, 3370, 0.681, False, FULL[1], f"{FITTED} on an A100 SXM, sparse {PAIRS}")
L40S_LIB = Library(0.628, HALF[0], 15.0, 2240, 4000, 0, 0.748, False, HALF[1], f"{FITTED} on an L40S, sparse as rtx4090")
RTX4090_LIB = replace(
    L40S_LIB,
    math_share=1.027,
    dram_share=0.9,
    source=f"as l40s; math, above the boost clock, DRAM, without the L40S's error correction, and sparse {PAIRS} (RTX 4090)",
)
GA102_LIB = replace(
    A100_LIB,
    l2=1350,
    dram_share=0.92,
    math_share=0.98,
    sparse_rate=HALF[0],
    source="as a100; math: CUTLASS convolutions on an RTX 3070; DRAM: A40 (gpu-benches)",
)
A10_LIB = replace(GA102_LIB, math_share=0.66, source="as rtx3070; math at the middle of the clocks that 150 W hold")
A40_LIB = replace(GA102_LIB, math_share=0.88, source="as rtx3070; math at the middle of the clocks that 300 W hold")
H100_LIB = Library(1.0, FULL[0], 59.8, 6240, 1510, 2700, 0.765, True, FULL[1], f"{FITTED} on an H100 SXM; sparse as a100")
H200_LIB = Library(1.0, FULL[0], 78.6, 6210, 1340, 2120, 0.799, True, FULL[1], f"{FITTED} on an H200 SXM; sparse as a100")
B200_LIB = Library(1.0, FULL[0], 78.0, 10700, 1140, 981, 0.661, True, FULL[1], f"{FITTED} on a B200; sparse as a100")
PRO_LIB = Library(0.916, HALF[0], 22.9, 2510, 2250, 4000, 0.859, False, HALF[1], f"{FITTED} on an RTX PRO 6000, sparse as l40s")

# Devices on which a library's dense products, or pairs of them with 2:4 ones, were timed and published; the others' rates are
# by analogy, as each `Library.source` says.
PEERS_TIMED = frozenset({"a100", "a100_pcie", "l40s", "rtx4090", "h100", "h200", "b200", "rtx_pro_6000"})

MAMF = "share of the math peak: MAMF finder, A100 86.9 %"
CUTLASS = "math 0.98: CUTLASS convolutions on an RTX 3070 (apache/tvm#9746)"
STREAM = "DRAM: A40 0.94, L40 0.89 to 0.98 of the data sheet (gpu-benches)"
SPARSE_RATE = "mma.sp at twice the rate of mma.sync: 1979 of 2048 measured on an A100 (arXiv 2206.02874), others by analogy"
FIXED = "fixed cost of a sparse kernel: cuSPARSELt +1.1 to +1.9 us up to 512^3 on an A100, ours assumed at a third"
HOPPER_SYNC = (
    "mma.sync 62.9 of at most 66.7 % of the wgmma peak (arXiv 2402.13499); mma.sp 1.0 to 1.3 of mma.sync: 768 x 4096 x 4096 in "
    "74.2 us on an H100 (cutlass#1335); 1.3 where no warp waits"
)
OURS = (
    "measured (benchmarks/results/h200): a launch that begins early 0.68 us; a sparse kernel's fixed cost, of tactics below "
    "7 us, between -0.3 and 0.1 us"
)
B200_SYNC = (
    "mma.sync 0.87, as an A100's, of at most 25 % of the tcgen05 peak; ptxas 13.0 spaces it by 8 clocks and mma.sp by 9 for "
    "sm_100a: that would be 1.78 of mma.sync, here 2 as an A100's; nobody has measured either"
)
# Power limits: W per SM of cards whose products were timed, and the share of the math peak that these reached, are 3.7 and 0.87
# (A100 SXM), 2.8 and 0.80 (A100 PCIe), 2.5 and 0.63 (L40S); at half the rate 3.5 and 1.0 (RTX 4090).
HOLD_300_W = "300 W, 3.6 for each SM, are taken to hold 80 to 100 % of the clock in tensor work"
ANALOGY = 0.09  # error of a gain timed only on other chips: half of the distance of 1.6 and 1.9, in logarithms
GA102 = Rates(1190, 32, 0.92, 0.87, 2.0, 1.0, 0.5, 0.35, "", GA102_LIB, ANALOGY, kept=KEPT_WHOLE)
AD102 = Rates(2240, 32, 0.92, 0.87, 2.0, 1.0, 0.5, 0.35, "", L40S_LIB, ANALOGY, kept=KEPT_WHOLE)

# fmt: off
RATES = {
    "a100": Rates(3800, 35, 0.87, 0.87, 2.0, 1.0, 0.5, 0.35, f"{BENCHES}; {MAMF}; {SPARSE_RATE}; {FIXED}", A100_LIB),
    "a100_pcie": Rates(
        3800, 35, 0.87, 0.80, 2.0, 1.0, 0.5, 0.35, f"as a100; math {PAIRS} on an A100 PCIe (300 W); {FIXED}",
        replace(A100_LIB, math_share=0.834, dram_share=0.754, source=f"as a100; math, DRAM and sparse {PAIRS} on an A100 PCIe"),
    ),
    "a100_40gb": Rates(3800, 35, 0.87, 0.87, 2.0, 1.0, 0.5, 0.35, "as a100", A100_LIB),
    "a10": replace(GA102, l2=1190, source=f"L2 16.5 B/clk and SM as the A40's ({BENCHES}); {STREAM}; {SPARSE_RATE}; {FIXED}; "
                   "150 W, 2.1 for each SM, are taken to hold 60 to 75 % of the clock in tensor work", library=A10_LIB,
                   sustained=(0.6, 0.75)),
    "a40": replace(GA102, l2=1390, source=f"{BENCHES}; {STREAM}; {SPARSE_RATE}; {FIXED}; {HOLD_300_W}", sustained=(0.8, 1.0),
                   library=A40_LIB),
    "rtx_a6000": replace(GA102, l2=1390, source=f"as a40: the same chip; {HOLD_300_W}", sustained=(0.8, 1.0), library=A40_LIB),
    "rtx3090": replace(GA102, l2=1350, sync_share=0.98, boost=1.12,
                       source=f"L2 16.5 B/clk and SM as the A40's ({BENCHES}); {CUTLASS}; {STREAM}; {FIXED}"),
    "rtx3070": replace(GA102, l2=760, sync_share=0.98, boost=1.12,
                       source=f"L2 16.5 B/clk and SM as the A40's ({BENCHES}); {CUTLASS}; {STREAM}; {FIXED}"),
    "rtx4090": replace(AD102, l2=2110, sync_share=0.98, boost=1.12, library=RTX4090_LIB, sparse_rate_sigma=0,
                       source=f"L2 16.5 B/clk and SM as the L40's ({BENCHES}); {CUTLASS}; {STREAM}; {FIXED}"),
    "l40s": replace(AD102, sync_share=0.63, source=f"{BENCHES}; {STREAM}; math as its library's: 350 W hold no boost clock; "
                    f"{SPARSE_RATE}; {FIXED}"),
    "l4": replace(AD102, l2=960, dram_share=0.78, sustained=(0.6, 0.75),
                  source=f"L2 16.5 B/clk and SM as the L40's ({BENCHES}); DRAM: NeuSight's L4; {SPARSE_RATE}; {FIXED}; "
                  "72 W, 1.2 for each SM, are taken to hold 60 to 75 % of the clock in tensor work"),
    "h100": Rates(5000, 38, 0.85, 0.943, 1.3, 1.08, 0.1, 0.2, f"{BENCHES}; {HOPPER_SYNC}; as the h200: {OURS}", H100_LIB, 0.13,
                  early_us=0.58),
    "h200": Rates(5000, 38, 0.85, 0.943, 1.3, 1.08, 0.1, 0.2, f"{BENCHES}; {HOPPER_SYNC}; DRAM: a copy at 0.90, a "
                  f"published kernel at 0.81; {OURS}", H200_LIB, 0.13, early_us=0.58),
    "b200": Rates(5600, 38, 0.81, 0.87, 2.0, 1.0, 0.5, 0.5, f"L2 per SM as the H200's ({BENCHES}); DRAM 6,669 of 8,000 "
                  f"GB/s; {B200_SYNC}; {FIXED}", B200_LIB, 0.13),
    "rtx5090": replace(AD102, l2=2260, sync_share=0.98, boost=1.12,
                       source=f"L2 13.3 B/clk and SM as fitted on an RTX PRO 6000; {CUTLASS}; {STREAM}; {FIXED}",
                       library=replace(PRO_LIB, math_share=0.98, source="as rtx_pro_6000; math as rtx4090")),
    "rtx_pro_6000": replace(AD102, l2=2500, sync_share=0.87, source=f"L2 {FITTED}; {STREAM}; {SPARSE_RATE}; {FIXED}",
                            library=PRO_LIB),
}
# As their relatives, with L2 by SMs: nobody has published times of products on them.
RATES |= {
    "a30": replace(RATES["a100_pcie"], l2=1970, source="as a100_pcie, whose 2.8 W for each SM are like 2.9; L2 by SMs",
                   library=replace(RATES["a100_pcie"].library, l2=1750, source="as a100_pcie; L2 by SMs")),
    "rtx3080": replace(RATES["rtx3090"], l2=1120, source="as rtx3090; L2 by SMs"),
    "a2": replace(GA102, l2=165, source="as a40; L2 by SMs; 60 W, 6 for each SM, hold the clock",
                  library=replace(GA102_LIB, l2=165, source=f"{GA102_LIB.source}; L2 by SMs")),
    "rtx4080": replace(RATES["rtx4090"], l2=1250, sparse_rate_sigma=ANALOGY, source="as rtx4090; L2 by SMs"),
    "rtx4070": replace(RATES["rtx4090"], l2=760, sparse_rate_sigma=ANALOGY, source="as rtx4090; L2 by SMs"),
    "l40": replace(RATES["l40s"], sync_share=0.98, source=f"as l40s; {CUTLASS}, whose 177 TFLOP/s are less than an L40S's 228",
                   library=replace(L40S_LIB, math_share=0.98, source="as l40s; math as rtx3070, at half the L40S's rate")),
    "rtx_6000_ada": replace(RATES["l40s"], sync_share=0.54, source="as l40s; math by watts, 300 instead of 350",
                            library=replace(L40S_LIB, math_share=0.54, source="as l40s; math by watts, 300 instead of 350")),
    "gh200": replace(RATES["h200"], source="as h200, the same chip"),
}
# Jetson modules have GA100's tensor cores and shared memory in SMs that are else GA10x's, and one L2 without halves.
RATES |= {
    orin.name: replace(RATES["a100"], l2=35 * orin.num_sms, kept=KEPT_WHOLE, sparse_rate_sigma=ANALOGY,
                       source="as a100; L2 by SMs, kept as GA102's; the share of LPDDR5 that kernels reach is assumed",
                       library=replace(A100_LIB, l2=35 * orin.num_sms, source="as a100; L2 by SMs"))
    for orin in ORINS
}
# fmt: on


def peers_are_timed(device: Device) -> bool:
    return device.model in PEERS_TIMED


@lru_cache(maxsize=64)
def rates(device: Device) -> Rates:
    """Returns the rates of a named device or its most similar one: L2 scaled by SMs, without the power limit, which belongs to
    a card.
    """
    like = relative(device)
    found, share = RATES[like.name], device.num_sms / like.num_sms
    if like.name == device.model:
        return found
    library = replace(found.library, l2=found.library.l2 * share)
    return replace(found, l2=found.l2 * share, library=library, sustained=(1.0, 1.0))
