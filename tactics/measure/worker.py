"""The process in which tactics are verified and timed on a GPU: `python -m tactics.measure.worker`, driven by
timing.py.

One JSON object per line on standard input, one answer each on standard output, with the request's id (version 2):

    (start)                                            {"device": title|sm|SMs|L2, "overhead_us": x}
    {"op": "problem", "problem": {...}, "warm_l2": bool, "mhz": m or null, "zeros": [bool]}      {} or {"error": text}
    {"op": "time", "tactics": [names], "samples": n}   {"us": {name: [n times]}, "mhz": {name: [n clocks]},
                                                        "rel_error": {name: x}, "slow": k} or {"error": text}

"problem": random data for it goes to the GPU. `warm_l2`: the network's weights and activations stay in L2 between its
layers. `mhz`: the build's running median clock so far, read by a new process only. `zeros`, may be left out: the inputs that
come from a ReLU, half of whose values are 0: what a GPU draws, and so its clock, depends on them.
"time": the samples of all tactics in turn, in random order. `slow`: samples whose clock stayed low (samples.py). Pauses for
a clock take up to PATIENCE_MS of a request.

Beside an error, `fatal` means that the CUDA context is lost, `passing` that the tactic is not to blame. The pieces
(Stopwatch, Bench) are also what tests and benchmarks are made of.
"""

import random
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from cuda_kernels.compile import compile_kernel
from cuda_kernels.device import Device, current
from cuda_kernels.launch import Cuda, Kernel
from tactics.format import DTYPES, LAYOUTS, Format, from_memory, is_bytes, num_bytes, to_memory
from tactics.launches import launches, packing_key
from tactics.measure.child import Answer, serve
from tactics.problems import codec
from tactics.problems.problem import Problem
from tactics.sampling.copies import Copies, Packed
from tactics.sampling.data import fits, random_data
from tactics.sampling.references import expected
from tactics.sampling.samples import PAUSE_MS, Sample, Steady
from tactics.sampling.stopwatch import Stopwatch
from tactics.sampling.trial import Addresses, Run, Scratch, Wrong, judge, runner, scratch_for
from tactics.step import Call
from tactics.tactic import Tactic

MAX_LAUNCHES = 10  # per sample
SAMPLE_US = 50.0  # what a sample aims to last
LOOKS = 20  # at the clock before the first sample, for a tenth of a second: a GPU that slept raises it
PATIENCE_MS = 10_000.0


@dataclass(frozen=True)
class Ready:
    """A tactic that was verified. `before`: leaves in L2 what `timed`, its `count` runs, is to find there. `weights`: memory
    that the runs read."""

    before: Run
    timed: Run
    count: int
    error: float
    weights: Any = None


class Bench:
    """One problem's data on the GPU, and its tactics verified and ready to be timed.

    `inputs`, `weights`: random_data's; `expected`: FP32 NCHW, a CuPy array. What a sample finds in L2: the inputs, as a copy
    just wrote them, and none of the weights, each run with a copy of its own; or, `warm_l2`, all that the run before left.
    """

    def __init__(self, device: Device):
        self.gpu = Cuda(device)
        self.cupy = self.gpu.cupy
        self._kernels: dict[tuple[str, tuple[tuple[str, int], ...]], Kernel] = {}
        self._scratch: dict[Tactic, Scratch] = {}
        self.stopwatch = Stopwatch(self.gpu)
        self.steady = Steady()

    def set_problem(
        self, problem: Problem, *, warm_l2: bool = False, zeros: Sequence[bool] = (), mhz: float | None = None
    ) -> None:
        """Draw the problem's data and compute what is expected of it. All of it is queued on the GPU's stream, where the
        kernels read it. The arguments are those of a request "problem"."""
        with self.gpu.current():
            self._zeros = zeros
            self._set_problem(problem, [Format("fp16", "chw")] * len(problem.in_shapes))
        self.gpu.synchronize()
        self.warm_l2, self._order = warm_l2, random.Random(str(problem))
        if self.steady.mhz is None:
            self.steady = Steady(mhz)
            for _ in range(LOOKS):
                self.stopwatch.pause(PAUSE_MS)
                self._sample(Ready(_nothing, _nothing, 1, 0.0))

    def _set_problem(self, problem: Problem, formats: Sequence[Format]) -> None:
        """`formats`: of the inputs, whose numbers those of bytes hold."""
        cupy, self._formats = self.cupy, formats
        self._packed_inputs: dict[tuple[int, Format], tuple[Any, Any]] = {}  # and what the end of each is copied from
        self._copies: Copies | None = None
        self._nchw: list[Any] = []  # arrays on the GPU, given back before others are made
        self._out: Any = None
        self.expected: Any = None
        for address in filter(None, sum(self._scratch.values(), ())):
            self.gpu.free(address)
        self._scratch = {}
        cupy.get_default_memory_pool().free_all_blocks()
        self.problem = problem
        self.inputs, self.weights = random_data(problem, zeros=self._zeros, formats=formats)
        self._nchw = [cupy.asarray(x) for x in self.inputs]
        most = max(num_bytes(Format("fp32", layout), problem.out_shape) for layout in LAYOUTS)
        self._out = cupy.empty(most, np.uint8)
        self.expected, self._images = expected(self.gpu, problem, self._nchw, self.inputs, self.weights)
        self._copies = Copies(self.gpu, problem, self.weights)

    def time(self, tactics: Sequence[Tactic], samples: int) -> dict[str, Any]:
        """The answer to a request "time". RuntimeError: the output of one of them is wrong."""
        for tactic in tactics:
            if not all(map(fits, self.inputs, tactic.ins)):  # from now on, tensors of bytes have such numbers
                with self.gpu.current():
                    both = zip(self._formats, tactic.ins, strict=True)
                    self._set_problem(self.problem, [new if is_bytes(new) else old for old, new in both])
                self.gpu.synchronize()
        keys = {packing_key(self.problem, tactic) for tactic in tactics}
        ready = {tactic: self.prepare(tactic, keys) for tactic in tactics}
        taken: dict[Tactic, list[Sample]] = {tactic: [] for tactic in tactics}
        self.steady.patience_ms = PATIENCE_MS
        for _ in range(samples):
            for tactic in self._order.sample(list(taken), len(taken)):
                taken[tactic].append(self._sample(ready[tactic]))
        return {
            "us": {t.name: [round(s.us, 4) for s in of] for t, of in taken.items()},
            "mhz": {t.name: [s.mhz and round(s.mhz, 1) for s in of] for t, of in taken.items()},
            "rel_error": {t.name: ready[t].error for t in taken},
            "slow": sum(s.slow for of in taken.values() for s in of),
        }

    def _sample(self, ready: Ready) -> Sample:
        take = partial(self.stopwatch.sample, ready.before, ready.timed, ready.count, flush=not self.warm_l2)
        return self.steady.take(take, self.stopwatch.pause)

    def prepare(self, tactic: Tactic, keep: Collection[Hashable] = ()) -> Ready:
        """Verify a tactic, then record a graph over copies of the weights. `keep`: as Copies.of says."""
        with self.gpu.current():
            assert self._copies is not None  # there is a problem
            most_bytes = 0 if self.warm_l2 else SAMPLE_US * 1e3 * self.gpu.device.dram_gbps  # a sample reads no more
            packed = self._copies.of(tactic, most_bytes, MAX_LAUNCHES, keep)
            if tactic not in packed.ready:
                packed.ready[tactic] = self._prepare(tactic, packed)
            ready: Ready = packed.ready[tactic]
            return ready

    def _prepare(self, tactic: Tactic, packed: Packed) -> Ready:
        steps = launches(self.problem, tactic)
        kernels = [None if isinstance(s, Call) else self._kernel(s.kernel, s.values) for s in steps]
        inputs = [self._input(i, fmt) for i, fmt in enumerate(tactic.ins)]
        out = self._out.data.ptr
        if tactic not in self._scratch:
            self._scratch[tactic] = scratch_for(self.gpu, steps)
        ins, scratch = [array.data.ptr for array, _ in inputs], self._scratch[tactic]
        runs = [runner(self.gpu, steps, kernels, Addresses(ins, out, copy, scratch)) for copy in packed.sections]
        self._out.fill(0xFF)  # NaN, in FP16 and in FP32
        runs[0]()
        error = self._check(tactic)
        before = runs[0] if self.warm_l2 else partial(self._write, inputs)
        # How many fit a sample is judged by one run, queue and all.
        once = min(self.stopwatch.sample(before, runs[0], flush=not self.warm_l2)[0] for _ in range(2))
        count = int(np.clip(SAMPLE_US / once, 1, MAX_LAUNCHES if self.warm_l2 else len(runs)))

        def timed() -> None:
            for i in range(count):
                runs[i % len(runs)]()

        # A library function allocates, as no graph can.
        return Ready(before, timed if None in kernels else self.gpu.record(timed), count, error, packed.memory)

    def _kernel(self, kernel: str, values: tuple[tuple[str, int], ...]) -> Kernel:
        if (kernel, values) not in self._kernels:
            self._kernels[kernel, values] = self.gpu.load(compile_kernel(kernel, dict(values), self.gpu.device.sm))
        return self._kernels[kernel, values]

    def _input(self, i: int, fmt: Format) -> tuple[Any, Any]:
        """Returns input i in format `fmt` as (the packed array in GPU memory, the array from which its last bytes are written
        anew).

        The second array holds as many bytes of the input's end as fit in L2: a write of them leaves L2 as the layer before
        would. It is a copy; with `warm_l2` it is a view of the first array itself. Both are made once for each (i, fmt).
        """
        if (i, fmt) not in self._packed_inputs:
            packed = to_memory(self._nchw[i], fmt, self.cupy)
            end = packed.reshape(-1).view(np.uint8)[-self.gpu.device.l2_bytes :]
            self._packed_inputs[i, fmt] = packed, end if self.warm_l2 else end.copy()
        return self._packed_inputs[i, fmt]

    def _write(self, inputs: Sequence[tuple[Any, Any]]) -> None:
        """Write the inputs anew, the first one last, as the layers before would have."""
        for packed, end in reversed(inputs):
            if end.nbytes:
                self.gpu.copy(packed.data.ptr + packed.nbytes - end.nbytes, end.data.ptr, end.nbytes)

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


def _nothing() -> None:
    """Nothing is queued."""


def begin() -> tuple[dict[str, Any], Answer]:
    """The first line, and the answer to each request."""
    bench = Bench(current())

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        if request["op"] == "problem":
            how = {"warm_l2": request["warm_l2"], "mhz": request["mhz"], "zeros": request.get("zeros", ())}
            bench.set_problem(codec.from_json(request["problem"]), **how)
            return {}
        return bench.time([Tactic.parse(name) for name in request["tactics"]], request["samples"])

    return {"device": bench.gpu.device.key, "overhead_us": bench.stopwatch.overhead_us}, answer


if __name__ == "__main__":
    serve(begin)
