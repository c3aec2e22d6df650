"""The process in which tactics are verified and timed on a GPU: `python -m tactics.measure.worker`, started by racing.py.

It reads one JSON object per line from standard input, and writes one answer each, with the request's id, to standard output
(protocol version 2):

    (start)                                            {"device": title|sm|SMs|L2, "overhead_us": x}
    {"op": "problem", "problem": {...}, "warm_l2": bool, "mhz": m or null, "zeros": [bool]}      {} or {"error": text}
    {"op": "time", "tactics": [names], "samples": n}   {"us": {name: [n times]}, "mhz": {name: [n clocks]},
                                                        "rel_error": {name: x}, "slow": k} or {"error": text}

"problem" copies random data for a problem to the GPU. `warm_l2`: the network's weights and activations stay in L2 between its
layers. `mhz`: the build's running median SM clock so far, used by a new process only. `zeros` (optional): for each input,
whether it comes from a ReLU, so that half of its values are 0; the GPU's power, and so its clock, depends on the values.

"time" takes n samples of each tactic, the tactics by turns in random order. `slow`: the number of samples whose clock stayed
low (samples.py). Pauses for the clock take at most PATIENCE_MS of a request.

An answer with an error also has `fatal`, whether the CUDA context is lost, and `passing`, whether the tactic is not to blame.
Tests and benchmarks use Stopwatch and Bench too.
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
SAMPLE_US = 50.0  # microseconds that a sample should take: short runs are repeated within it, up to MAX_LAUNCHES times
LOOKS = 20  # readings of the clock before the first sample, for a tenth of a second in which an idle GPU raises it
PATIENCE_MS = 10_000.0  # see the module's text


@dataclass(frozen=True)
class Ready:
    """A verified tactic, ready to be timed. `before` brings L2 into the state in which `timed` is to start; `timed` runs the
    tactic `count` times; `error`: its relative error; `weights`: the memory with the weights that the runs read, kept alive."""

    before: Run
    timed: Run
    count: int
    error: float
    weights: Any = None


class Bench:
    """One problem's data on the GPU, with the tactics that were verified on it and are ready to be timed.

    `inputs`, `weights`: random_data's; `expected`: the output, FP32 NCHW, a CuPy array. When a sample starts, L2 holds the
    inputs, just written, and no weights, since each run reads a copy of its own; with `warm_l2`, L2 is as the last run
    left it.
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
        """Draws the problem's data, copies them to the GPU and computes the expected output, all on the stream on which kernels
        will read them. The arguments are those of a request "problem"."""
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
        """Draws the data. `formats`: for each input, a format that must hold its values: whole numbers for formats of bytes."""
        cupy, self._formats = self.cupy, formats
        self._packed_inputs: dict[tuple[int, Format], tuple[Any, Any]] = {}  # see _input
        self._copies: Copies | None = None
        self._nchw: list[Any] = []  # the last problem's arrays are released before new ones are allocated
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
        """Returns the answer to a request "time". Raises RuntimeError if a tactic's output is wrong."""
        for tactic in tactics:
            if not all(map(fits, self.inputs, tactic.ins)):  # draw again, now with whole numbers for inputs in bytes
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
        """Verifies a tactic, then records its runs, each with a copy of the weights, as a CUDA graph. `keep`: see Copies.of.
        Raises RuntimeError if its output is wrong."""
        with self.gpu.current():
            assert self._copies is not None  # set_problem was called
            most_bytes = 0 if self.warm_l2 else SAMPLE_US * 1e3 * self.gpu.device.dram_gbps  # DRAM gives a sample no more
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
        # The number of runs per sample follows from the time of one run, its wait in the queue included.
        once = min(self.stopwatch.sample(before, runs[0], flush=not self.warm_l2)[0] for _ in range(2))
        count = int(np.clip(SAMPLE_US / once, 1, MAX_LAUNCHES if self.warm_l2 else len(runs)))

        def timed() -> None:
            for i in range(count):
                runs[i % len(runs)]()

        # A library function allocates memory, which cannot be captured in a graph.
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
        """Writes the ends of the inputs (see _input), the first input last, so that L2 is as the layers before leave it."""
        for packed, end in reversed(inputs):
            if end.nbytes:
                self.gpu.copy(packed.data.ptr + packed.nbytes - end.nbytes, end.data.ptr, end.nbytes)

    def _check(self, tactic: Tactic) -> float:
        """Returns the output's relative error. Raises RuntimeError if the output is wrong."""
        cupy, fmt, shape = self.cupy, tactic.out, self.problem.out_shape
        flat = self._out[: num_bytes(fmt, shape)].view(DTYPES[fmt.dtype])
        full = from_memory(flat, fmt, shape, padding=True, xp=self.cupy)
        images = None if len(self._images) == shape[0] else cupy.asarray(self._images)
        try:
            return judge(full, self.expected, shape[1], images)
        except Wrong as e:
            raise RuntimeError(f"wrong: {e}") from None


def _nothing() -> None:
    """Queues no work."""


def begin() -> tuple[dict[str, Any], Answer]:
    """Returns (the first line, the function that answers a request), for child.serve."""
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
