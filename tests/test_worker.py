"""What the child process that measures does: data, the stopwatch, what is right and what is refused."""

import ctypes
import json
import math
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest

from cuda_kernels import device as devices
from tactics.candidates import candidates
from tactics.format import Format, num_bytes, to_memory
from tactics.measure import timing, worker
from tactics.measure.timing import Cache, Time
from tactics.problems.epilogue import AFFINE
from tactics.problems.problem import LibraryProblem, PoolProblem
from tactics.step import epilogue_values
from tactics.tactic import Tactic, Tile
from tests.problems import CONVS, PROBLEMS
from tests.test_timing import H200, HWC8, PROBLEM, ROOT, tactics


class Array(np.ndarray):
    """A NumPy array that has its address where a CuPy array has it."""

    @property
    def data(self):
        return SimpleNamespace(ptr=self.ctypes.data)


def pretend_cupy():
    def array(a):
        return np.ascontiguousarray(a).view(Array)

    ticks = iter(range(0, 10**9))
    return SimpleNamespace(
        asarray=array, ascontiguousarray=array, isnan=np.isnan,
        empty=lambda shape, dtype: array(np.empty(shape, dtype)), zeros=lambda shape, dtype: array(np.zeros(shape, dtype)),
        tile=lambda a, n: array(np.tile(a, n)), get_default_memory_pool=lambda: SimpleNamespace(free_all_blocks=lambda: None),
        cuda=SimpleNamespace(
            Event=lambda: SimpleNamespace(record=lambda stream: None, synchronize=lambda: None),
            get_elapsed_time=lambda start, stop: 0.05 + 0.001 * (next(ticks) % 5),
            Device=lambda: SimpleNamespace(pci_bus_id="0000:00:00.0"),
        ),
    )  # fmt: skip


class PretendGpu:
    """launch.Cuda as far as Bench uses it: host memory, and launches that write what `answer` says into the output."""

    def __init__(self, device, answer):
        self.device, self.answer, self.cupy, self.launched = device, answer, pretend_cupy(), []
        self.stream = type("Stream", (), {"use": lambda s: s, "__enter__": lambda s: s, "__exit__": lambda s, *_: None})()

    def allocate(self, nbytes):
        self._held = [*getattr(self, "_held", []), np.empty(nbytes, np.uint8)]
        return self._held[-1].ctypes.data

    def free(self, address):
        self._held = [a for a in self._held if a.ctypes.data != address]

    def write(self, address, array):
        ctypes.memmove(address, array.ctypes.data, array.nbytes)

    def load(self, compiled):
        return compiled

    def launch(self, kernel, grid, block, smem, params):
        self.launched.append(kernel)
        if kernel not in ("flush_l2", "reference_conv"):
            self.answer(params)

    def call(self, function, ins, out, nonfinite):
        def array(a):
            held = (ctypes.c_uint8 * (math.prod(a.shape) * a.dtype.itemsize)).from_address(a.address)
            return np.frombuffer(held, a.dtype).reshape(a.shape)

        self.launched.append("library")
        array(out)[...] = function(np, [a and array(a) for a in ins])

    def synchronize(self):
        pass

    def record(self, run):
        run()
        return run


@pytest.fixture
def bench(monkeypatch):
    """bench(problem, tactic, change=...) -> Bench.time of it on a pretend GPU whose kernel writes the right output, changed."""
    monkeypatch.setattr(worker, "compile_kernel", lambda kernel, values, sm: kernel)

    def make(problem, tactic, change=lambda flat: flat, samples=4):
        inputs, weights = worker.random_data(problem)
        expected = worker.reference(problem, inputs, weights)
        writes = [change(to_memory(expected, tactic.out))]

        def answer(params):  # the first launch is the one that is looked at
            if writes:
                flat = writes.pop()
                ctypes.memmove(made._out.ctypes.data, flat.ctypes.data, num_bytes(tactic.out, problem.out_shape))

        monkeypatch.setattr(worker, "Cuda", lambda device: PretendGpu(device, answer))
        made = worker.Bench(H200)
        made.set_problem(problem)
        return made.time(tactic, samples), made

    return make


@pytest.mark.parametrize("name", ["conv", "conv_residual_prelu", "pool_avg", "pointwise_channel", "concat_odd", "softmax",
                                  "reformat_fp16hwc8_fp32chw", "move_d2s_crd"])  # fmt: skip
def test_bench_accepts_right_outputs(bench, name):
    for tactic in candidates(PROBLEMS[name], H200)[::5]:
        reply, made = bench(PROBLEMS[name], tactic)
        assert len(reply["us"]) == 4 and all(0 < us < 100 for us in reply["us"]) and reply["rel_error"] < 1e-3
        assert json.loads(json.dumps(reply)) == reply and "flush_l2" in made.gpu.launched


TENSOR = ((1, 6, 5, 7),)
LRN = LibraryProblem("LRN", ("t0",), TENSOR, ("fp16",), *TENSOR, "fp16", TENSOR * 2, (("size", 3),))
BEST = LibraryProblem("ArgMax", ("t0",), TENSOR, ("fp16",), (1, 1, 5, 7), "int64", (*TENSOR, (1, 1, 5, 7)), (("axis", 1),))
CHOICE = LibraryProblem("Where", ("t0", "c0", "t1"), TENSOR * 2, ("bool", "fp16"), *TENSOR, "fp16", TENSOR * 3,
                        constants=(((7,), "fp32"),))  # fmt: skip


@pytest.mark.parametrize("problem", [LRN, BEST, CHOICE], ids=["lrn", "best", "choice"])
def test_bench_times_library_functions_without_a_graph(bench, problem):
    for tactic in candidates(problem, H200):
        reply, made = bench(problem, tactic)
        assert len(reply["us"]) == 4 and reply["rel_error"] < 1e-3 and made.gpu.launched.count("library") > 4
    assert timing.source_key("library") != timing.source_key("reduce")


def test_bench_compares_some_images_of_a_large_batch(bench):
    problem = PoolProblem(5, 64, 128, 128, "max", 1, 1, (128, 128))
    (tactic,) = [t for t in candidates(problem, H200) if t.ins[0] == t.out == HWC8]
    _, made = bench(problem, tactic)
    assert made._images.tolist() == [0, 2, 4]

    def wrong_in_the_last(flat):
        flat = flat.copy()
        flat[-100:] += 1
        return flat

    with pytest.raises(RuntimeError, match="relative error"):
        bench(problem, tactic, wrong_in_the_last)


def spoil(value, at):
    def change(flat):
        flat = flat.copy()
        flat[at] = value
        return flat

    return change


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (spoil(np.nan, 7), "1 of .* never written"),
        (spoil(0.5, -1), "padded channels"),  # the last of 72 channels padded to 96
        (spoil(30.0, 0), "relative error"),
    ],
)
def test_bench_refuses_wrong_outputs(bench, change, text):
    tactic = Tactic("conv_dense", Tile(64, 64, 64, 2, 2, 4), (HWC8,), Format("fp16", "chw32"))
    with pytest.raises(RuntimeError, match=text):
        bench(PROBLEMS["conv"], tactic, change)


def test_the_stopwatch_throws_away_what_the_host_was_too_slow_for(monkeypatch):
    monkeypatch.setattr(worker, "compile_kernel", lambda kernel, values, sm: kernel)
    watch = worker.Stopwatch(PretendGpu(H200, lambda params: None))
    assert len(watch.samples(lambda: time.sleep(0.001), lambda: None, 2)) == 2
    assert watch.discarded >= 4
    with pytest.raises(RuntimeError, match="overloaded"):
        watch.samples(lambda: time.sleep(0.02), lambda: None, 2)


def test_the_worker_says_why_it_cannot_measure_here():
    if devices.has_gpu():
        pytest.skip("there is a GPU")
    line = [sys.executable, "-m", "tactics.measure.worker"]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert "error" in json.loads(done.stdout.splitlines()[0])
    with pytest.raises(ValueError, match="nothing can be measured"):
        timing.measured(H200, Cache("/nonexistent/times.jsonl"), compile_first=False)(PROBLEM, tactics(1))


BY_DEFINITION = "conv_asymmetric", "conv_residual_prelu", "conv_residual_after", "conv_clip", "conv_tail"


@pytest.mark.parametrize("name", BY_DEFINITION)
def test_naive_convolution_agrees_with_the_reference_under_the_emulator(name):
    launch, compiling = pytest.importorskip("cuda_kernels.launch"), pytest.importorskip("cuda_kernels.compile")
    pytest.importorskip("cuda_kernels.emulator")
    problem = CONVS[name]
    inputs, weights = worker.random_data(problem)
    expected = worker.reference(problem, inputs, weights)
    gpu = launch.Emulated(H200)
    arrays = {
        "x": inputs[0], "w": weights["w"].astype(np.float16), "b": weights.get("b"), "slope": weights.get("slope"),
        "residual": inputs[1] if problem.epilogue.residual else None, **{name: weights.get(name) for name in AFFINE},
    }  # fmt: skip
    at = {}
    for key, array in arrays.items():
        at[key] = 0 if array is None else gpu.allocate(array.nbytes)
        if at[key]:
            gpu.write(at[key], array)
    y = gpu.allocate(expected.nbytes)
    values = epilogue_values(problem)
    params = worker.reference_params(problem, values, {**at, "weights": at["w"], "y": y})
    kernel = gpu.load(compiling.compile_kernel("reference_conv", values, "sm_90a"))
    gpu.launch(kernel, (-(-expected.size // 256), 1, 1), (256, 1, 1), 0, params)
    got = gpu.read(y, expected.nbytes).view(np.float32).reshape(expected.shape)
    assert worker.relative_error(got, expected) < 1e-4


def test_time_is_a_plain_record():
    assert Time(2.0, 1.0, 3.0) == Time(2.0, 1.0, 3.0)
