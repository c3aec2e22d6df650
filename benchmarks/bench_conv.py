"""Our best dense and best 2:4 tactic beside cuDNN on ResNet-50's convolutions, in one run on one GPU.

    python -m benchmarks.bench_conv [--seconds 150] [--batches 1,32,128] [--out benchmarks/results/conv.json]

Ours: channels-last in and out (fp16:hwc8, the 3-channel image padded to 8), FP32 accumulation, bias and ReLU fused; dense and
sparse run on the same 2:4 weights. cuDNN: torch, channels_last, FP16, `benchmark=True`; `fused` is
torch.cudnn_convolution_relu (bias and ReLU in the convolution), `plain` the convolution alone; ratios are against the
faster of the two. All are CUDA graphs under one stopwatch (tactics/sampling/stopwatch.py): activations as a copy just wrote
them, a copy of the weights per launch and none of them in L2, random normal data, samples interleaved, medians. Shapes that
do not fit in --seconds are left out and listed.
"""

import argparse
import json
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import hardware
from benchmarks.experiments.run import interleaved
from benchmarks.torch_twin import event_us, prepared
from cuda_kernels.compile import nvrtc_version, source_hash
from cuda_kernels.device import current, why_no_gpu
from cuda_kernels.driver import is_fatal
from cuda_kernels.files import write
from gpu_runtime.benchmark.clocks import management
from tactics.candidates import candidates
from tactics.measure.race import times_of
from tactics.measure.timing import Cache, Measured, driver_version
from tactics.measure.worker import Bench
from tactics.problems.epilogue import Epilogue
from tactics.problems.pointwise_ops import Activation
from tactics.problems.problem import ConvProblem

ROUNDS = 15
# name: (how often in the network, C, H = W, K, R = S, stride); ResNet-50 v1.5, 224 x 224.
SHAPES = {
    "stem 7x7/2": (1, 3, 224, 64, 7, 2),
    "56 1x1 64>64": (1, 64, 56, 64, 1, 1),
    "56 3x3 64": (3, 64, 56, 64, 3, 1),
    "56 1x1 64>256": (4, 64, 56, 256, 1, 1),
    "56 1x1 256>64": (2, 256, 56, 64, 1, 1),
    "56 1x1 256>128": (1, 256, 56, 128, 1, 1),
    "56 3x3/2 128": (1, 128, 56, 128, 3, 2),
    "56 1x1/2 256>512": (1, 256, 56, 512, 1, 2),
    "28 1x1 128>512": (4, 128, 28, 512, 1, 1),
    "28 1x1 512>128": (3, 512, 28, 128, 1, 1),
    "28 3x3 128": (3, 128, 28, 128, 3, 1),
    "28 1x1 512>256": (1, 512, 28, 256, 1, 1),
    "28 3x3/2 256": (1, 256, 28, 256, 3, 2),
    "28 1x1/2 512>1024": (1, 512, 28, 1024, 1, 2),
    "14 1x1 256>1024": (6, 256, 14, 1024, 1, 1),
    "14 1x1 1024>256": (5, 1024, 14, 256, 1, 1),
    "14 3x3 256": (5, 256, 14, 256, 3, 1),
    "14 1x1 1024>512": (1, 1024, 14, 512, 1, 1),
    "14 3x3/2 512": (1, 512, 14, 512, 3, 2),
    "14 1x1/2 1024>2048": (1, 1024, 14, 2048, 1, 2),
    "7 1x1 512>2048": (3, 512, 7, 2048, 1, 1),
    "7 1x1 2048>512": (2, 2048, 7, 512, 1, 1),
    "7 3x3 512": (2, 512, 7, 512, 3, 1),
}
# Measured first: one of each kind and depth, so that whatever the time allows is a sample of the whole.
FIRST = ("14 3x3 256", "56 1x1 64>256", "28 3x3 128", "14 1x1 1024>256", "7 3x3 512", "stem 7x7/2", "28 3x3/2 256")


def problem(shape: str, batch: int) -> ConvProblem:
    _, c, size, k, r, stride = SHAPES[shape]
    return ConvProblem(
        batch,
        c,
        size,
        size,
        k,
        r,
        r,
        stride=(stride, stride),
        pad=(r // 2,) * 4,
        epilogue=Epilogue(bias=True, act=Activation("relu")),
        sparse24=c % 4 == 0,
    )


def tactics(p: ConvProblem, device):
    """Returns the tactics for the problem with channels-last input and output, as cuDNN's tensors lie."""
    return [t for t in candidates(p, device) if t.ins[0].layout == t.out.layout == "hwc8"]


class Clock:
    """The SM clock in MHz and the power from NVIDIA's management library; None where it does not answer."""

    def __init__(self, pci_bus_id: str):
        self._nvml: Any = None
        with suppress(Exception):  # no library, no permission, another form of id: times are kept without a clock
            self._nvml, self._handle = management(pci_bus_id)

    def mhz(self) -> int | None:
        with suppress(Exception):  # as above
            return int(self._nvml.nvmlDeviceGetClockInfo(self._handle, self._nvml.NVML_CLOCK_SM))
        return None

    def watts(self) -> tuple[float, float] | None:
        """Returns (watts drawn now, the power limit in force), or None."""
        with suppress(Exception):  # as above
            nvml = self._nvml
            return nvml.nvmlDeviceGetPowerUsage(self._handle) / 1e3, nvml.nvmlDeviceGetEnforcedPowerLimit(self._handle) / 1e3
        return None


def facts(device, clock: Clock, torch: dict[str, Any]) -> dict:
    """Returns the facts that the times depend on: GPU, driver, clocks, power, versions, date. Clocks are read, never set.
    `torch`: PyTorch's versions.
    """
    import cupy

    watts = clock.watts()
    versions = {
        "python": platform.python_version(),
        "numpy": np.__version__,
        "cupy": cupy.__version__,
        "nvrtc": nvrtc_version(),
    }
    return {
        "gpu": device.title,
        "sm": device.sm,
        "sms": device.num_sms,
        "l2_bytes": device.l2_bytes,
        "driver": driver_version(),
        "max_clock_mhz": device.clock_mhz,
        "clock_mhz_now": clock.mhz(),
        "power_w_now": watts and watts[0],
        "power_limit_w": watts and watts[1],
        "clocks": "as found, not locked",
        "versions": versions | {"torch": torch["version"], "cuda": torch["cuda"], "cudnn": torch["cudnn"]},
        "kernel_source": source_hash(),
        "date": hardware.now(),
    }


def ceilings(torch, clock: Clock) -> dict:
    """Measures this GPU's ceilings: an FP16 8192^3 matrix product (TFLOP/s) and a device-to-device copy (GB/s, read +
    written).
    """
    n = 8192
    a, b = (torch.randn(n, n, device="cuda", dtype=torch.float16) for _ in range(2))
    free = torch.cuda.mem_get_info()[0]
    size = min(4 << 30, free // 4)
    source = torch.randint(0, 255, (size,), device="cuda", dtype=torch.uint8)
    to = torch.empty_like(source)

    def median_us(run) -> float:
        return statistics.median([event_us(torch, run) for _ in range(18)][3:])

    gemm_us, mhz = median_us(lambda: torch.matmul(a, b)), clock.mhz()
    copy_us = median_us(lambda: to.copy_(source))
    return {
        "gemm_tflops": 2e-6 * n**3 / gemm_us,
        "gemm": "torch.matmul, fp16, 8192^3, random normal",
        "gemm_clock_mhz": mhz,
        "copy_gbps": 2e-3 * size / copy_us,
        "copy": f"torch copy_ of {size} bytes, counting bytes read and written",
    }


class Cudnn:
    """A convolution by cuDNN on the data of our tactics, recorded over copies of the weights as ours is."""

    def __init__(self, torch, bench: Bench, p: ConvProblem):
        self.torch, self.bench, self.p = torch, bench, p
        last = torch.channels_last
        self.x = torch.from_numpy(bench.inputs[0]).cuda().contiguous(memory_format=last)
        self.source = self.x.clone()
        w = torch.from_numpy(bench.weights["w"].astype(np.float16)).cuda()
        count = int(np.clip((1 << 30) // (2 * w.numel()), 1, 16))
        self.w = [w.clone().contiguous(memory_format=last) for _ in range(count)]
        self.b = torch.from_numpy(bench.weights["b"].astype(np.float16)).cuda()

    def fused(self, i: int):
        p = self.p
        return self.torch.cudnn_convolution_relu(self.x, self.w[i], self.b, p.stride, p.pad[:2], p.dilation, 1)

    def plain(self, i: int):
        p = self.p
        return self.torch.nn.functional.conv2d(self.x, self.w[i], None, p.stride, p.pad[:2], p.dilation, 1)

    def prepare(self, run, stream):
        """Returns (before, timed, number of runs inside timed) for a Stopwatch, on torch's current stream `stream`."""
        torch, watch = self.torch, self.bench.stopwatch
        for _ in range(3):  # `benchmark=True` picks the algorithm here
            run(0)
        torch.cuda.synchronize()
        once = min(watch.samples(self.write, lambda: run(0), 2))
        count = int(np.clip(100 / once, 1, len(self.w)))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for i in range(count):
                run(i)
        graph.replay()
        torch.cuda.synchronize()
        return self.write, graph.replay, count

    def write(self) -> None:
        """Writes the input again, as a layer before would."""
        self.x.copy_(self.source)

    def error(self) -> float:
        """Returns the error of the fused output against the FP32 reference, relative to the reference's range."""
        y = self.torch.relu(self.fused(0).float())
        expected = self.torch.from_dlpack(self.bench.expected)
        return float((y - expected).abs().max() / (expected.max() - expected.min()))


def measure(torch, bench: Bench, timer, p: ConvProblem) -> dict:
    """Returns one row's times in microseconds. Our dense and our 2:4 tactic are the winners of the timer's race; then the
    samples of all contestants alternate.
    """
    times = timer(p, tactics(p, bench.gpu.device))
    best = {}
    for kind, sparse in (("dense", False), ("sparse", True)):
        of_kind = [t for t in times if t.sparse == sparse]
        if of_kind:
            best[kind] = min(of_kind, key=lambda t: times[t].us)
    bench.set_problem(p)
    stream = torch.cuda.ExternalStream(bench.gpu.stream.ptr)
    with torch.cuda.stream(stream):
        contestants: dict[str, tuple[Callable[[], None], Callable[[], None], int]] = {}
        row: dict[str, Any] = {"failed": {}}
        for kind, tactic in best.items():
            ready = bench.prepare(tactic)
            contestants[kind] = ready.before, ready.timed, ready.count
            row[kind] = {"tactic": tactic.name, "rel_error": ready.error}
        cudnn = Cudnn(torch, bench, p)
        for kind, run in (("cudnn_fused", cudnn.fused), ("cudnn_plain", cudnn.plain)):
            try:
                contestants[kind] = cudnn.prepare(run, stream)
                row[kind] = {"rel_error": cudnn.error()} if kind == "cudnn_fused" else {}
            except RuntimeError as e:  # torch has no fused convolution for this shape or version
                row["failed"][kind] = str(e)[:300]
        samples = interleaved({kind: partial(bench.stopwatch.sample, *how) for kind, how in contestants.items()}, ROUNDS)
        torch.cuda.synchronize()
    for kind, taken in samples.items():
        row[kind] |= times_of([us for us, _ in taken], 3)
        row[kind] |= {"tflops": round(2e-6 * p.macs / row[kind]["us"], 1), "launches_per_sample": contestants[kind][2]}
    row["clock_mhz"] = round(statistics.median(mhz for taken in samples.values() for _, mhz in taken), 1)
    row["tactics_timed"] = len(times)
    if timer.failures:
        row["failed"] |= {name: text for (key, name), text in timer.failures.items() if key == str(p)}
    return row


def compare(row: dict, p: ConvProblem, ceiling: dict) -> None:
    """Adds to the row the ratios to cuDNN (above 1: ours is faster) and the share of the roofline of a dense FP16
    convolution.
    """
    moved = 2 * (math.prod(p.in_shapes[0]) + math.prod(p.out_shape) + p.k * p.c * p.r * p.s)
    row["roofline_us"] = max(2e-6 * p.macs / ceiling["gemm_tflops"], 1e-3 * moved / ceiling["copy_gbps"])
    theirs = [row[kind]["us"] for kind in ("cudnn_fused", "cudnn_plain") if kind in row]
    for kind in ("dense", "sparse"):
        if kind in row:
            row[f"{kind}_of_roofline"] = round(row["roofline_us"] / row[kind]["us"], 3)
            row[f"{kind}_vs_cudnn"] = round(min(theirs) / row[kind]["us"], 3) if theirs else None


def summary(rows: list[dict], batches) -> dict:
    """Per batch: geometric means of the ratios over the shapes measured, and the sum over the network's convolutions."""
    result = {}
    for batch in batches:
        mine = [r for r in rows if r["batch"] == batch]
        entry: dict[str, float] = {"shapes": len(mine), "of": len(SHAPES)}
        for kind in ("dense", "sparse"):
            ratios = [r[f"{kind}_vs_cudnn"] for r in mine if r.get(f"{kind}_vs_cudnn")]
            if ratios:
                entry[f"{kind}_vs_cudnn"] = round(math.exp(statistics.mean(map(math.log, ratios))), 3)
        if len(mine) == len(SHAPES):
            kinds = {"dense_us": ("dense",), "best_us": ("dense", "sparse"), "cudnn_us": ("cudnn_fused", "cudnn_plain")}
            for key, of in kinds.items():
                fastest = [r["count"] * min((r[k]["us"] for k in of if k in r), default=math.nan) for r in mine]
                if not any(map(math.isnan, fastest)):
                    entry[key] = round(sum(fastest), 1)
        result[str(batch)] = entry
    return result


def table(data: dict[str, Any]) -> Iterator[str]:
    def us(row, kind):
        return f"{row[kind]['us']:9.2f}" if kind in row else "        -"

    def ratio(row, key):
        return f"{row[key]:6.2f}" if row.get(key) else "     -"

    yield f"{'us':20}{'batch':>6}{'dense':>9}{'2:4':>9}{'cudnn+br':>9}{'cudnn':>9}{'d/cu':>6}{'s/cu':>6}{'roof':>6}"
    for r in data["rows"]:
        yield (
            f"{r['shape']:20}{r['batch']:6}{us(r, 'dense')}{us(r, 'sparse')}{us(r, 'cudnn_fused')}{us(r, 'cudnn_plain')}"
            f"{ratio(r, 'dense_vs_cudnn')}{ratio(r, 'sparse_vs_cudnn')}{ratio(r, 'dense_of_roofline')}"
        )


def order(batches) -> list[tuple[str, int]]:
    """Returns every (shape, batch), the shapes of FIRST before the others, all batches of a shape together."""
    names = [*FIRST, *(s for s in SHAPES if s not in FIRST)]
    return [(name, batch) for name in names for batch in batches]


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=150.0, help="stop before this much time is over")
    parser.add_argument("--batches", default="1,32,128")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/conv.json"))
    parser.add_argument("--cache", type=Path, help="timing cache; default: conv_timings.jsonl beside --out")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    begun = time.monotonic()
    batches = [int(b) for b in args.batches.split(",")]
    try:
        torch, versions = prepared()
    except ImportError:
        print("bench_conv needs PyTorch with CUDA and cuDNN: pip install torch", file=sys.stderr)
        return 1
    if why_no_gpu() or not torch.cuda.is_available():
        print(f"bench_conv needs a CUDA GPU of sm_80 or newer: {why_no_gpu() or 'torch sees none'}", file=sys.stderr)
        return 1

    device = current()
    bench = Bench(device)
    clock = Clock(bench.cupy.cuda.Device().pci_bus_id)
    timer = Measured(device, Cache(args.cache or args.out.with_name("conv_timings.jsonl")))
    todo = order(batches)
    result: dict[str, Any] = hardware.header(device) | {
        "what": __doc__.strip(),
        "machine": facts(device, clock, versions),
        "ceilings": ceilings(torch, clock),
        "overhead_us": bench.stopwatch.overhead_us,
        "rows": [],
        "left_out": [],
        "errors": {},
    }
    print(f"{device}: {result['ceilings']['gemm_tflops']:.0f} TFLOP/s, {result['ceilings']['copy_gbps']:.0f} GB/s", flush=True)

    def save() -> None:
        result["summary"] = summary(result["rows"], batches)
        result["seconds"] = round(time.monotonic() - begun, 1)
        write(args.out, json.dumps(result, indent=1).encode() + b"\n")

    timer.prepare((p, tactics(p, device)) for p in (problem(*item) for item in todo))
    compiled = time.monotonic()
    for done, (shape, batch) in enumerate(todo):
        each = (time.monotonic() - compiled) / done if done else 0.0
        if time.monotonic() - begun + 1.5 * each > args.seconds:
            result["left_out"] = [f"{s} batch {b}" for s, b in todo[done:]]
            break
        p = problem(shape, batch)
        try:
            row = {"shape": shape, "batch": batch, "count": SHAPES[shape][0], "macs": p.macs} | measure(torch, bench, timer, p)
            compare(row, p, result["ceilings"])
            result["rows"].append(row)
        except Exception as e:  # one shape's failure is a line of the result, unless the context is lost
            result["errors"][f"{shape} batch {batch}"] = f"{type(e).__name__}: {e}"[:1000]
            if is_fatal(e):
                result["left_out"] = [f"{s} batch {b}" for s, b in todo[done + 1 :]]
                break
        save()
    timer.close()
    result["machine_after"] = facts(device, clock, versions)
    save()
    tell(result, len(todo))
    return 0 if result["rows"] and not result["errors"] else 1


def tell(result: dict[str, Any], asked: int) -> None:
    """Prints the results; `asked`: the number of shapes and batches that were requested."""
    print("\n".join(table(result)))
    if result["left_out"]:
        print(f"{len(result['left_out'])} of {asked} left out for lack of time: {'; '.join(result['left_out'][:6])}; ...")
    for name, text in result["errors"].items():
        print(f"failed: {name}: {text[:200]}")
    for batch, entry in result["summary"].items():
        print(f"batch {batch}: " + ", ".join(f"{k} {v}" for k, v in entry.items()))


if __name__ == "__main__":
    sys.exit(main())
