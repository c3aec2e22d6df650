"""The speed of this machine's GPU compared with the tables of `device` and `rates`: clocks, bandwidth, launches, tensor
cores."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from cuda_kernels.device import Device
from cuda_kernels.rates import rates
from tactics.candidates import candidates
from tactics.main_loops import best_share
from tactics.measure.worker import Bench
from tactics.problems.epilogue import Epilogue
from tactics.problems.pointwise_ops import Activation, Stage
from tactics.problems.problem import ConvProblem, PointwiseProblem
from tactics.sampling.trial import Gpu, Run, trial
from tactics.tactic import Tactic

SAMPLES = 9
COPIED = 4  # bytes of a copy divided by the size of L2, so that copies read and write DRAM
LEAST_COPIED, MOST_COPIED = 64 << 20, 512 << 20  # bytes of a copy
MANY = 16  # launches that the longer of two CUDA graphs has more than the other
SMALL = PointwiseProblem(1, 8, 4, 4, (Stage("relu"),))
# 17 GFLOP, enough for the tensor cores' full rate; every SM of the largest device gets blocks of its largest tile.
PRODUCT = ConvProblem(2, 1024, 64, 64, 1024, 1, 1, epilogue=Epilogue(bias=True, act=Activation("relu")), sparse24=True)
LARGE = 128 * 128  # least number of outputs of a tile that may reach the tensor cores' rate


@dataclass(frozen=True, slots=True)
class Rate:
    """A rate of the GPU: the measured value and the value that plans use (`table`, from `source`), both in `unit`.

    `measured` is None if the rate was not measured, for the reason `why`.
    """

    name: str
    unit: str
    measured: float | None
    table: float
    source: str
    why: str = ""

    @property
    def share(self) -> float | None:
        """The measured value divided by the table's; None if it was not measured."""
        return None if self.measured is None else self.measured / self.table


def rate(device: Device, name: str, value: float | None, why: str = "") -> Rate:
    """Returns the record of a rate. `name`: a key of RATES; `value`: the measured value, or None with the reason `why`."""
    unit, table, source = _table(device)[name]
    return Rate(name, unit, None if value is None else float(f"{value:.4g}"), float(f"{table:.4g}"), source, why)


def _table(device: Device) -> dict[str, tuple[str, float, str]]:
    """Returns name -> (unit, the value that plans use, its source) for each rate of the device."""
    found = rates(device)
    share = device.mma_sync_share * found.sync_share * found.held * best_share(device, sparse=False)
    gain = found.sparse_rate * best_share(device, sparse=True) / best_share(device, sparse=False)
    return {
        "SM clock": ("MHz", device.clock_mhz, device.sources),
        "DRAM bandwidth": ("GB/s", device.dram_gbps * found.dram_share, found.source),
        "kernel launch": ("us", device.launch_us, device.sources),
        "dense products": ("TFLOP/s", device.dense_tflops * share, found.source),
        "2:4 over dense": ("x", gain, found.source),
    }


def _clock(bench: Bench) -> float:
    """Measures the SM clock in MHz between products on tensor cores."""
    bench.set_problem(PRODUCT)
    (clocks,) = bench.time(products(bench.gpu.device)[:1], SAMPLES)["mhz"].values()
    return statistics.median(clocks)


def _bandwidth(bench: Bench) -> float:
    """Measures the bandwidth of a copy in DRAM in GB/s; bytes read and bytes written both count."""
    gpu = bench.gpu
    nbytes = min(max(COPIED * gpu.device.l2_bytes, LEAST_COPIED), MOST_COPIED)
    source, to = gpu.allocate(nbytes), gpu.allocate(nbytes)
    try:
        us = statistics.median(bench.stopwatch.samples(_nothing, partial(gpu.copy, to, source, nbytes), SAMPLES))
    finally:
        gpu.free(source)
        gpu.free(to)
    return 2e-3 * nbytes / us


def _launch(bench: Bench) -> float:
    """Measures the microseconds that one more small launch adds to a CUDA graph of dependent launches."""
    found: list[float] = []

    def timed(gpu: Gpu, run: Run, poison: Run) -> None:
        graphs = [gpu.record(partial(_times, run, count)) for count in (1, 1 + MANY)]
        one, many = (statistics.median(bench.stopwatch.samples(_nothing, graph, SAMPLES)) for graph in graphs)
        found.append((many - one) / MANY)

    trial(bench.gpu, SMALL, candidates(SMALL, bench.gpu.device)[0], timed)
    return found[0]


def _product_us(bench: Bench, *, sparse: bool) -> float:
    """Measures the median microseconds of the large product with its fastest large tile, `sparse` or dense."""
    bench.set_problem(PRODUCT)
    rivals = [tactic for tactic in products(bench.gpu.device) if tactic.sparse == sparse]
    return min(map(statistics.median, bench.time(rivals, SAMPLES)["us"].values()))


def products(device: Device) -> list[Tactic]:
    """Returns the tactics for the large product that may reach the tensor cores' rate."""
    able = [t for t in candidates(PRODUCT, device) if t.kernel in ("conv_dense", "conv_sparse24")]
    vectors = [t for t in able if {f.layout for f in (*t.ins, t.out)} == {"hwc8"} and t.gemm.split == 1 and not t.gemm.stream]
    return [t for t in vectors if t.gemm.m * t.gemm.n >= LARGE]


def _times(run: Run, count: int) -> None:
    """Calls `run` `count` times."""
    for _ in range(count):
        run()


def _nothing() -> None:
    """Does nothing: leaves L2 as it is, where the stopwatch takes a function to prepare each run."""


# Name of a rate -> the function that measures it, in the unit that _table has for it.
RATES: dict[str, Callable[[Bench], float | None]] = {
    "SM clock": _clock,
    "DRAM bandwidth": _bandwidth,
    "kernel launch": _launch,
    "dense products": lambda bench: 2e-6 * PRODUCT.macs / _product_us(bench, sparse=False),
    "2:4 over dense": lambda bench: _product_us(bench, sparse=False) / _product_us(bench, sparse=True),
}
