"""The process in which tactics are verified and timed on a GPU: `python -m tactics.measure.worker`, driven by
timing.py.

One JSON object per line on standard input, one answer each on standard output, with the request's id:

    (start)                                            {"device": title|sm|SMs|L2, "overhead_us": x}
    {"op": "problem", "problem": {...}}                {} or {"error": text}      random data for it goes to the GPU
    {"op": "time", "tactics": [names], "samples": n}   {"us": {name: [n times]}, "mhz": {name: [n]}, "rel_error": {name: x}} or
                                                       {"error": text}

Beside an error, `fatal` means that the CUDA context is lost, `passing` that the tactic is not to blame. The pieces below
(Stopwatch, Bench) are also what tests and benchmarks are made of.
"""

import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from cuda_kernels.compile import compile_kernel
from cuda_kernels.device import Device, current
from cuda_kernels.launch import Cuda, Kernel
from cuda_kernels.params import arrange, pack_params
from tactics.format import DTYPES, LAYOUTS, Format, from_memory, num_bytes, to_memory
from tactics.launches import launches, pack_weights, packing_key
from tactics.measure.child import Answer, serve
from tactics.measure.data import images, of_images, random_data, reference
from tactics.measure.faults import Overloaded
from tactics.measure.trial import Run, Wrong, judge, runner, scratch_for
from tactics.problems import codec
from tactics.problems.convolution import depth_to_space, space_to_depth
from tactics.problems.epilogue import AFFINE, VECTORS
from tactics.problems.pointwise_ops import NONE
from tactics.problems.problem import ConvProblem, Problem
from tactics.step import Args, Call, alpha_beta, epilogue_values, ints, window_args
from tactics.tactic import Tactic

MAX_LAUNCHES = 10  # per sample
SAMPLE_US = 50.0  # what a sample aims to last
FLUSH_US = 80.0  # how long the L2 is flushed before each sample, at least
COPIES_BYTES = 1 << 30  # at most, for the copies of one tactic's weights
SMALL_MACS = 30_000_000  # up to this a convolution's reference is computed by NumPy
SMALL_ELEMENTS = 4_000_000  # other problems are compared on as many images as fit in this, first and last among them


class Clock:
    """The SM clock in MHz from the management library, asked for at most every 0.2 s; None where it does not answer."""

    def __init__(self, pci_bus_id: str):
        self._at = -1.0
        self._mhz: int | None = None
        self._handle: Any = None
        try:
            import pynvml

            pynvml.nvmlInit()
            self._nvml = pynvml
            if pynvml.nvmlDeviceGetCount() == 1:
                self._handle = pynvml.nvmlDeviceGetHandleByIndex(0)
            else:
                self._handle = pynvml.nvmlDeviceGetHandleByPciBusId(pci_bus_id.encode())
        except Exception:  # no library, no permission, another form of id: times are kept without a clock
            self._handle = None

    def mhz(self) -> int | None:
        if self._handle is not None and time.monotonic() - self._at > 0.2:
            try:
                self._mhz = int(self._nvml.nvmlDeviceGetClockInfo(self._handle, self._nvml.NVML_CLOCK_SM))
            except Exception:  # as above
                self._handle = None
            self._at = time.monotonic()
        return self._mhz

    def watts(self) -> tuple[float, float] | None:
        """(drawn now, limit in force)."""
        try:
            nvml = self._nvml
            return nvml.nvmlDeviceGetPowerUsage(self._handle) / 1e3, nvml.nvmlDeviceGetEnforcedPowerLimit(self._handle) / 1e3
        except Exception:  # as above
            return None


class Stopwatch:
    """Times what is queued on a stream of `gpu` with the L2 cold but for what `warm` leaves there.

    One sample: flush the L2 -> warm() -> event -> timed() -> event. The flush lasts long enough for the host to have queued
    the rest; where it was not, the sample is thrown away and the flush made longer. `overhead_us`, what an empty graph costs
    beside its kernels, is measured at the start and subtracted.
    """

    def __init__(self, gpu: Cuda):
        self.gpu, cupy = gpu, gpu.cupy
        self._events = cupy.cuda.Event(), cupy.cuda.Event()
        self._kernel = gpu.load(compile_kernel("flush_l2", {}, gpu.device.sm))
        self._words = max(2 * gpu.device.l2_bytes, 32 << 20) // 16
        with gpu.current():
            self._data = cupy.zeros(self._words * 16 + 16, np.uint8)
        self._flush_us = FLUSH_US
        self.discarded = 0
        self.overhead_us = 0.0
        one, many = (gpu.record(partial(self._empty, n)) for n in (1, 17))
        t1, t17 = (statistics.median(self.samples(lambda: None, timed, 9)) for timed in (one, many))
        self.overhead_us = max(0.0, t1 - max(0.0, (t17 - t1) / 16))

    def samples(self, warm: Callable[[], None], timed: Callable[[], None], count: int, launches: int = 1) -> list[float]:
        """`count` times of `timed` in microseconds, each divided by the `launches` in it."""
        found = []
        for _ in range(4 * count + 16):
            us, queued_us = self._one(warm, timed)
            if queued_us < 0.85 * self._flush_us:
                found.append(us / launches)
            else:  # the GPU may have waited for the host
                self.discarded += 1
                self._flush_us = min(1.25 * self._flush_us, 5000.0)
            if len(found) == count:
                return found
        raise Overloaded("the host cannot queue work fast enough to time it: is the machine overloaded?")

    def _one(self, warm: Run, timed: Run) -> tuple[float, float]:
        """(microseconds of `timed`, microseconds that the host took to queue everything)."""
        start, stop = self._events
        begun = time.perf_counter()
        self._launch(self._words, int(self._flush_us * self.gpu.device.clock_mhz))
        warm()
        start.record(self.gpu.stream)
        timed()
        stop.record(self.gpu.stream)
        queued_us = 1e6 * (time.perf_counter() - begun)
        stop.synchronize()
        us = 1e3 * self.gpu.cupy.cuda.get_elapsed_time(start, stop)
        return max(us - self.overhead_us, 0.05), queued_us

    def _empty(self, count: int) -> None:
        for _ in range(count):
            self._launch(0, 0)

    def _launch(self, words: int, clocks: int) -> None:
        at = self._data.data.ptr
        args: Args = {"data": ("ptr", at), "sink": ("ptr", at + self._words * 16), "words": ("i64", words)}
        params = pack_params(arrange("flush_l2", (), args | {"clocks": ("i64", clocks)}))
        self.gpu.launch(self._kernel, (8 * self.gpu.device.num_sms if words else 1, 1, 1), (256, 1, 1), 0, params)


class Bench:
    """One problem's data on the GPU, and its tactics verified and ready to be timed.

    `inputs`, `weights`: random_data's; `expected`: FP32 NCHW, a CuPy array.
    """

    def __init__(self, device: Device):
        self.gpu = Cuda(device)
        self.cupy = self.gpu.cupy
        self._kernels: dict[tuple[str, tuple[tuple[str, int], ...]], Kernel] = {}
        self._scratch: list[int] = []
        self.stopwatch = Stopwatch(self.gpu)
        self.clock = Clock(self.cupy.cuda.Device().pci_bus_id)

    def set_problem(self, problem: Problem) -> None:
        """Draw the problem's data and compute what is expected of it. All of it is queued on the GPU's stream, where the
        kernels read it."""
        with self.gpu.current():
            self._set_problem(problem)
        self.gpu.synchronize()

    def _set_problem(self, problem: Problem) -> None:
        cupy = self.cupy
        self._packed_inputs: dict[tuple[int, Format], Any] = {}
        self._packed_weights: dict[Hashable, Any] = {}
        self._ready: dict[Tactic, tuple[Run, Run, int, float]] = {}
        self._nchw: list[Any] = []  # arrays on the GPU, given back before others are made
        self._out: Any = None
        self.expected: Any = None
        for address in self._scratch:
            self.gpu.free(address)
        self._scratch = []
        cupy.get_default_memory_pool().free_all_blocks()
        self.problem = problem
        self.inputs, self.weights = random_data(problem)
        self._nchw = [cupy.asarray(x) for x in self.inputs]
        most = max(num_bytes(Format("fp32", layout), problem.out_shape) for layout in LAYOUTS)
        self._out = cupy.empty(most, np.uint8)
        self.expected, self._images = self._reference()

    def time(self, tactic: Tactic, samples: int) -> dict:
        """Samples in microseconds per run of the tactic, and the relative error of its output. RuntimeError: it is wrong."""
        if tactic not in self._ready:
            self._ready[tactic] = self.prepare(tactic)
        warm, timed, count, error = self._ready[tactic]
        us = self.stopwatch.samples(warm, timed, samples, count)
        return {"us": [round(v, 4) for v in us], "clock_mhz": self.clock.mhz(), "rel_error": error}

    def prepare(self, tactic: Tactic) -> tuple[Run, Run, int, float]:
        """(warm, timed, runs inside timed, relative error): verify, then record a graph over copies of the weights."""
        with self.gpu.current():
            return self._prepare(tactic)

    def _prepare(self, tactic: Tactic) -> tuple[Run, Run, int, float]:
        steps = launches(self.problem, tactic)
        kernels = [None if isinstance(s, Call) else self._kernel(s.kernel, s.values) for s in steps]
        ins = [self._input(i, fmt).data.ptr for i, fmt in enumerate(tactic.ins)]
        copies = self._copies(tactic)
        out = self._out.data.ptr
        scratch = scratch_for(self.gpu, steps)
        self._scratch += [address for address in scratch if address]
        runs = [runner(self.gpu, steps, kernels, ins, out, copy, scratch) for copy in copies]
        self._out.fill(0xFF)  # NaN, in FP16 and in FP32
        runs[0]()
        error = self._check(tactic)
        # The last copy is for warming up. How many fit a sample is judged by one run, queue and all.
        once = min(self.stopwatch.samples(lambda: None, runs[0], 2))
        count = int(np.clip(SAMPLE_US / once, 1, len(runs) - 1))

        def timed() -> None:
            for run in runs[:count]:
                run()

        # A library function allocates, as no graph can.
        return runs[-1], timed if None in kernels else self.gpu.record(timed), count, error

    def _kernel(self, kernel: str, values: tuple[tuple[str, int], ...]) -> Kernel:
        if (kernel, values) not in self._kernels:
            self._kernels[kernel, values] = self.gpu.load(compile_kernel(kernel, dict(values), self.gpu.device.sm))
        return self._kernels[kernel, values]

    def _input(self, i: int, fmt: Format) -> Any:
        if (i, fmt) not in self._packed_inputs:
            self._packed_inputs[i, fmt] = to_memory(self._nchw[i], fmt, self.cupy)
        return self._packed_inputs[i, fmt]

    def _copies(self, tactic: Tactic) -> list[dict[str, int]]:
        """Section name -> address, for each copy of the packed weights; tactics that pack alike share them."""
        key = packing_key(self.problem, tactic)
        if key not in self._packed_weights:
            sections = pack_weights(self.problem, tactic, self.weights)
            places, end = {}, 0
            for name, array in sections.items():
                places[name] = end
                end += -(-array.nbytes // 256) * 256
            host = np.zeros(max(end, 256), np.uint8)
            for name, array in sections.items():
                host[places[name] : places[name] + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            count = int(np.clip(COPIES_BYTES // len(host), 2, MAX_LAUNCHES + 1))
            on_gpu = self.cupy.tile(self.cupy.asarray(host), count)
            self._packed_weights[key] = on_gpu, len(host), places
        on_gpu, nbytes, places = self._packed_weights[key]
        starts = range(on_gpu.data.ptr, on_gpu.data.ptr + on_gpu.nbytes, nbytes)
        return [{name: start + at for name, at in places.items()} for start in starts]

    def _reference(self) -> tuple[Any, np.ndarray]:
        """(expected FP32 NCHW on the GPU, the images it is for)."""
        p, cupy = self.problem, self.cupy
        every = np.arange(p.out_shape[0])
        if isinstance(p, ConvProblem):
            if p.macs > SMALL_MACS:
                return reference_conv(self.gpu, p, self._nchw, self.weights), every
            return cupy.asarray(reference(p, self.inputs, self.weights)), every
        total = images(p)
        if not total:
            return cupy.asarray(np.float32(reference(p, self.inputs, self.weights))), every
        per_image = max(int(np.prod(s[1:])) for s in (*p.in_shapes, p.out_shape))
        count = int(np.clip(SMALL_ELEMENTS // per_image, 1, total))
        some = np.unique(np.linspace(0, total - 1, count).astype(int)) if count > 1 else every[-1:]
        part = of_images(p, len(some))
        inputs = [x[some] if len(x) == total else x for x in self.inputs]
        return cupy.asarray(reference(part, inputs, self.weights)), some

    def _check(self, tactic: Tactic) -> float:
        """The output's relative error. RuntimeError where it is Wrong."""
        cupy, fmt, shape = self.cupy, tactic.out, self.problem.out_shape
        flat = self._out[: num_bytes(fmt, shape)].view(DTYPES[fmt.dtype])
        full = from_memory(flat, fmt, shape, padding=True, xp=self.cupy)
        images = None if len(self._images) == shape[0] else cupy.asarray(self._images)
        try:
            return judge(full, self.expected, shape[1], images)
        except Wrong as e:
            raise RuntimeError(f"wrong: {e}") from None


def reference_conv(gpu: Cuda, p: ConvProblem, inputs: Sequence[Any], weights: Mapping[str, np.ndarray]) -> Any:
    """The convolution by its definition, on the GPU: CuPy FP16 NCHW inputs and NumPy weights in, CuPy FP32 NCHW out. Reads what
    the caller has queued on CuPy's current stream, and returns when its result is there for any."""
    cupy = gpu.cupy
    gpu.follow()
    with gpu.current():
        w = cupy.asarray(weights["w"].astype(np.float16))
        rows = {name: cupy.asarray(weights[name]) for name in VECTORS if name in weights}
        y = cupy.empty((p.n, p.k, p.p, p.q), np.float32)
        x = inputs[0]
        if p.prologue.scaled:
            scale, shift = (cupy.asarray(weights[name].reshape(1, -1, 1, 1)) for name in ("scale", "shift"))
            x = cupy.maximum(x.astype(np.float32) * scale + shift, 0).astype(np.float16)
        if p.prologue.normalized:
            wide = x.astype(np.float32)
            spread = cupy.sqrt(wide.var(1, keepdims=True) + np.float32(p.prologue.epsilon))
            x = ((wide - wide.mean(1, keepdims=True)) / spread).astype(np.float16)
        if p.prologue.gated:
            x = (x.astype(np.float32) * inputs[-1].astype(np.float32)).astype(np.float16)
            act = p.prologue.act
            x = cupy.clip(x, *map(np.float16, act.params)) if act.params else cupy.maximum(x, 0) if act != NONE else x
        end = p.epilogue
        residual: Any = None
        if end.residual:
            residual = inputs[1].repeat(end.up, axis=2).repeat(end.up, axis=3)
            residual = cupy.ascontiguousarray(space_to_depth(residual, end.d2s, end.d2s_mode))
        named = {"x": x, "weights": w, "residual": residual if end.residual else None, "y": y, **rows}
        values = epilogue_values(p)
        params = reference_params(p, values, {name: 0 if a is None else a.data.ptr for name, a in named.items()})
        kernel = gpu.load(compile_kernel("reference_conv", values, gpu.device.sm))
        gpu.launch(kernel, (min(-(-y.size // 256), 1 << 20), 1, 1), (256, 1, 1), 0, params)
        result = p.maxima(y.get()) if end.pool else depth_to_space(y, end.d2s, end.d2s_mode)
        result = cupy.ascontiguousarray(cupy.asarray(result))
    gpu.synchronize()
    return result


def reference_params(p: ConvProblem, values: Mapping[str, int], addresses: Mapping[str, int]) -> bytes:
    """reference_conv.cu's parameters; 0 for a pointer that is not there. `addresses`: of x, weights, residual, y, and of the
    vectors by their names among the weights."""
    vectors = {"bias": "b", **{name: name for name in VECTORS[1:]}}
    named = {name: addresses.get(vectors.get(name, name), 0) for name in ("x", "weights", "residual", "y", *vectors)}
    args: Args = {name: ("ptr", named[name]) for name in named if name not in AFFINE or p.epilogue.affine}
    args["total"] = ("i64", p.n * p.k * p.p * p.q)
    args |= ints(c=p.c, h=p.h, w=p.w, k=p.k, p=p.p, q=p.q, r=p.r, s=p.s, groups=p.groups) | window_args(p) | alpha_beta(p)
    return pack_params(arrange("reference_conv", tuple(values.items()), args))


def begin() -> tuple[dict[str, Any], Answer]:
    """The first line, and the answer to each request."""
    bench = Bench(current())

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        if request["op"] == "problem":
            bench.set_problem(codec.from_json(request["problem"]))
            return {}
        count = request["samples"]
        found = {name: bench.time(Tactic.parse(name), count) for name in request["tactics"]}
        kinds = "us", "rel_error"
        reply = {kind: {name: times[kind] for name, times in found.items()} for kind in kinds}
        return {**reply, "mhz": {name: [times["clock_mhz"]] * count for name, times in found.items()}}

    return {"device": bench.gpu.device.key, "overhead_us": bench.stopwatch.overhead_us}, answer


if __name__ == "__main__":
    serve(begin)
