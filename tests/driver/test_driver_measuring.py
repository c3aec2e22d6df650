"""Tactics verified and timed on a GPU or on the emulated driver, there through the child process too: a fault is told of the
tactic that it is of and the rest goes on; noise, drift and throttling change no choice."""

import json
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

import gpu_runtime as gr
from benchmarks.gpu_networks import fewer_tactics
from cuda_kernels.device import current, why_no_gpu
from gpu_runtime.progress import Progress
from tactics.candidates import candidates
from tactics.format import Format, num_bytes
from tactics.launches import packing_key
from tactics.measure import race, timing, worker
from tactics.measure.child import Child
from tactics.measure.timing import Cache
from tactics.problems.epilogue import Epilogue
from tactics.problems.problem import ConvProblem, LibraryProblem, PoolProblem
from tactics.problems.prologue import Prologue
from tactics.sampling import references, trial
from tactics.sampling.data import random_data, reference
from tactics.tactic import Tactic, Tile
from tests.conftest import DIGITS
from tests.emulated_driver import settings
from tests.on_driver import ON_DRIVER, finished, started, timed
from tests.problems import ACTS, CONVS, PROBLEMS, TAILS
from tests.reference_run import model, node
from tests.tactics.test_candidates_drawn import conv as geometry

WHY = why_no_gpu()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(WHY), reason=WHY), timed]
emulated = pytest.mark.driver  # it fails on request
CONV = CONVS["conv_1x1"]
HWC8 = Format("fp16", "hwc8")


@pytest.fixture(scope="module")
def device():
    return current()


@pytest.fixture(scope="module")
def bench(device):
    return worker.Bench(device)


def verified(bench, tactic, samples: int = 1) -> float:
    """The relative error of its output; there are as many samples as were asked for."""
    reply = bench.time([tactic], samples)
    assert len(reply["us"][tactic.name]) == len(reply["mhz"][tactic.name]) == samples
    return reply["rel_error"][tactic.name]


# ---- one process: right results are accepted, wrong ones refused


@pytest.mark.parametrize(
    "name",
    [
        "conv",
        "conv_residual_prelu",
        "pool_avg",
        "pointwise_channel",
        "concat_odd",
        "softmax",
        "reformat_fp16hwc8_fp32chw",
        "move_d2s_crd",
    ],
)
def test_right_outputs_are_accepted(bench, name):
    tactics = candidates(PROBLEMS[name], bench.gpu.device)
    bench.set_problem(PROBLEMS[name])
    for tactic in tactics[:: max(1, len(tactics) // 3)]:
        reply = bench.time([tactic], 4)
        us, error = reply["us"][tactic.name], reply["rel_error"][tactic.name]
        assert len(us) == 4 and all(0 < v < 1000 for v in us) and error < 1e-3
        assert json.loads(json.dumps(reply)) == reply


@pytest.mark.parametrize("name, kernel", [("conv_stem", "conv_stem"), ("squeeze_excite", "squeeze_excite")])
def test_tactics_that_pack_weights_otherwise_have_their_own(bench, name, kernel):
    able = [t for t in candidates(PROBLEMS[name], bench.gpu.device) if t.kernel == kernel]
    packings = {packing_key(PROBLEMS[name], t): t for t in reversed(able)}
    assert len(packings) > 1
    bench.set_problem(PROBLEMS[name])
    for tactic in [*packings.values()][:3]:
        assert verified(bench, tactic) < 1e-3


def test_data_is_made_and_read_on_one_stream_whichever_is_current(bench):
    """A `with` block on any stream undoes what use() made current: nothing here may rest on use(), or undo the caller's."""
    cupy, tactic = bench.cupy, candidates(CONV, bench.gpu.device)[0]
    mine = cupy.cuda.Stream(non_blocking=True)
    mine.use()
    try:
        bench.set_problem(CONV)
        assert verified(bench, tactic) < 1e-3
        assert cupy.cuda.get_current_stream() == mine
    finally:
        cupy.cuda.Stream.null.use()


TENSOR = ((1, 6, 5, 7),)
LRN = LibraryProblem("LRN", ("t0",), TENSOR, ("fp16",), *TENSOR, "fp16", TENSOR * 2, (("size", 3),))
BEST = LibraryProblem("ArgMax", ("t0",), TENSOR, ("fp16",), (1, 1, 5, 7), "int64", (*TENSOR, (1, 1, 5, 7)), (("axis", 1),))
CHOICE = LibraryProblem(
    "Where", ("t0", "c0", "t1"), TENSOR * 2, ("bool", "fp16"), *TENSOR, "fp16", TENSOR * 3, constants=(((7,), "fp32"),)
)


@pytest.mark.parametrize("problem", [LRN, BEST, CHOICE], ids=["lrn", "best", "choice"])
def test_library_functions_are_timed_without_a_graph(bench, problem, monkeypatch):
    monkeypatch.setattr(bench.gpu, "record", lambda run: pytest.fail("a library function allocates, as no graph can"))
    bench.set_problem(problem)
    for tactic in candidates(problem, bench.gpu.device):
        assert verified(bench, tactic, samples=2) < 1e-3


def spoiled(bench, monkeypatch, change: Callable) -> None:
    """From now on, `change` is applied to the output behind each launch of the bench, in the tactic's own type."""
    launch = bench.gpu.launch

    def changed(kernel, *how):
        launch(kernel, *how)
        if kernel.name != "flush_l2":
            with bench.gpu.current():
                change(bench._out)

    monkeypatch.setattr(bench.gpu, "launch", changed)


@pytest.mark.parametrize(
    ("value", "at", "text"),
    [
        (np.nan, 7, "1 of .* never written"),
        (0.5, -1, "padded channels"),  # the last of 72 channels padded to 96
        (30.0, 0, "relative error"),
    ],
)
def test_wrong_outputs_are_refused(bench, monkeypatch, value, at, text):
    tactic, problem = Tactic("conv_dense", Tile(64, 64, 64, 2, 2, 4), (HWC8,), Format("fp16", "chw32")), PROBLEMS["conv"]
    nbytes = num_bytes(tactic.out, problem.out_shape)

    def change(out):
        out[:nbytes].view(np.float16)[at] = value

    bench.set_problem(problem)
    spoiled(bench, monkeypatch, change)
    with pytest.raises(RuntimeError, match=text):
        bench.time([tactic], 1)


def test_some_images_of_a_large_batch_are_compared(bench, monkeypatch):
    monkeypatch.setattr(references, "SMALL_ELEMENTS", 3 * 64 * 8 * 8)
    problem = PoolProblem(5, 64, 8, 8, "max", 1, 1, (8, 8))
    (tactic,) = [t for t in candidates(problem, bench.gpu.device) if t.ins[0] == t.out == HWC8]
    bench.set_problem(problem)
    assert verified(bench, tactic) < 1e-3 and bench._images.tolist() == [0, 2, 4]

    def change(out):
        out[: num_bytes(HWC8, problem.out_shape)].view(np.float16)[-100:] += 1

    bench.set_problem(problem)
    spoiled(bench, monkeypatch, change)
    with pytest.raises(RuntimeError, match="relative error"):
        bench.time([tactic], 1)


def drawn(seed: int) -> ConvProblem:
    """A convolution of any geometry with any epilogue: an activation, what may follow it, depth-to-space."""
    pick, problem = random.Random(f"epilogue {seed}"), geometry(seed)
    tail = {"residual": pick.random() < 0.5} | pick.choice([{}, *TAILS.values()])
    if tail["residual"] and pick.random() < 0.5:
        tail["act_first"] = True
    end = Epilogue(bias=pick.random() < 0.5, act=pick.choice(ACTS), d2s=problem.epilogue.d2s, **tail)
    return replace(problem, epilogue=end, prologue=Prologue())


@pytest.mark.parametrize("problem", [*CONVS.values(), *map(drawn, range(40))], ids=[*CONVS, *map(str, range(40))])
def test_large_convolutions_are_judged_by_a_kernel_that_agrees_with_numpy(bench, monkeypatch, problem):
    """Above SMALL_MACS, what is expected comes from reference_conv: every epilogue, a residual before or behind."""
    monkeypatch.setattr(references, "SMALL_MACS", 0)
    bench.set_problem(problem)
    inputs, weights = random_data(problem)
    with bench.gpu.current():
        got = bench.expected.get()
    assert trial.relative_error(got, reference(problem, inputs, weights)) < 1e-4


# ---- through the child process


@pytest.fixture
def driver(monkeypatch):
    """driver([{...}], noise=0.1, ...): faults and settings of the emulated driver in child processes from now on."""

    def change(faults=(), **fields):
        made = settings.environment(faults=tuple(settings.Fault(**f) for f in faults), checks=False, **fields)
        monkeypatch.setenv(settings.VARIABLE, made[settings.VARIABLE])

    change()
    return change


@pytest.fixture
def children(monkeypatch):
    """Of each process that was started its Child, as it is started."""
    started, start = [], Child.start

    def starting(self, timeout_s):
        started.append(self)
        return start(self, timeout_s)

    monkeypatch.setattr(Child, "start", starting)
    return started


@pytest.fixture
def measure(device, tmp_path, monkeypatch):
    """measure(problem, tactics) -> (times, timer), in few samples; the cache is the test's own."""
    monkeypatch.setattr(race, "STEPS", (2, 4, 6))
    timers = []

    def run(problem, tactics, **options):
        timer = timing.Measured(device, Cache(tmp_path / "times.jsonl"), **options)
        timers.append(timer)
        return timer(problem, tactics), timer

    yield run
    for timer in timers:
        timer.close()


def some(device, kernel: str, count: int = 2) -> list[Tactic]:
    """`count` tactics of CONV, those of the smallest tiles first."""
    found = [t for t in candidates(CONV, device) if t.kernel == kernel and "_k" not in t.name and "_stream" not in t.name]
    return sorted(found, key=lambda t: (t.tile.m * t.tile.n, t.name))[:count]


def kept(path: Path) -> dict[str, dict]:
    """Tactic's name -> its last line in the cache."""
    return {record["tactic"]: record for record in map(json.loads, path.read_text().splitlines())}


FAULTS = [  # the error; whether the launch call returns it; the message; is it kept in the cache; is the child replaced
    ("illegal_address", False, "700|illegal|ILLEGAL", True, True),
    ("illegal_address", True, "cuLaunchKernelEx: CUDA_ERROR_ILLEGAL_ADDRESS", True, True),
    ("out_of_resources", True, "OUT_OF_RESOURCES", True, False),
    ("out_of_memory", True, "OUT_OF_MEMORY", False, False),
    ("wrong", False, "RuntimeError: wrong", True, False),
]


@emulated
@pytest.mark.parametrize(("error", "call", "text", "remembered", "replaced"), FAULTS, ids=[f"{f[0]}-{f[1]}" for f in FAULTS])
def test_a_fault_is_told_of_its_tactic_alone(device, driver, children, measure, error, call, text, remembered, replaced):
    good, (bad,) = some(device, "conv_dense"), some(device, "conv_sparse24", 1)
    driver([{"kernel": "conv_sparse24*", "error": error, "call": call}])
    times, timer = measure(CONV, [*good, bad])
    assert set(times) == set(good)
    told = timer.failures[str(CONV), bad.name]
    assert len(timer.failures) == 1 and any(part in told for part in text.split("|")), told
    found = kept(timer.cache.path)
    assert ("error" in found.get(bad.name, {})) == remembered and all("us" in found[t.name] for t in good)
    assert len(children) - 1 in ((1, 2) if replaced else (0,))  # a tactic that ends a child is tried once more in a fresh one
    timer.close()
    driver()  # nothing fails any more
    again, _ = measure(CONV, [*good, bad])
    assert set(again) == (set(good) if remembered else {*good, bad})


@emulated
def test_a_kernel_that_hangs_is_ended_and_remembered(device, driver, children, measure):
    good, (bad,) = some(device, "conv_dense", 1), some(device, "conv_sparse24", 1)
    driver([{"kernel": "conv_sparse24*", "error": "hang"}])
    times, timer = measure(CONV, [*good, bad], timeout_s=10.0)
    assert set(times) == set(good) and len(children) in (2, 3)
    assert kept(timer.cache.path)[bad.name]["error"] == "no answer in 10 s: the process hung and was killed"


@emulated
def test_a_child_killed_from_outside_is_no_tactics_fault(device, driver, children, measure):
    good, (bad,) = some(device, "conv_dense", 1), some(device, "conv_sparse24", 1)
    driver([{"kernel": "conv_sparse24*", "error": "hang"}])

    def kill():
        end = time.monotonic() + 120
        while time.monotonic() < end and not any(b"hangs, as the settings ask" in stderr_of(c) for c in children):
            time.sleep(0.1)
        os.kill(children[0]._process.pid, signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    times, timer = measure(CONV, [*good, bad], timeout_s=150.0)
    thread.join()
    assert set(times) == set(good) and "code -9, from outside" in timer.failures[str(CONV), bad.name]
    assert bad.name not in kept(timer.cache.path)
    timer.close()
    driver()
    assert set(measure(CONV, [*good, bad])[0]) == {*good, bad}


def stderr_of(child: Child) -> bytes:
    return os.pread(child._stderr.fileno(), 1 << 16, 0)


@emulated
def test_slow_tails_and_noise_move_no_median(device, driver, measure, tmp_path):
    tactics = some(device, "conv_dense")
    driver(noise=0.0)
    clean, timer = measure(CONV, tactics)
    timer.close()
    timer.cache.path.unlink()
    driver(noise=0.02, tail_share=0.01, tail_factor=4.0, drift_per_s=0.5, seed=3)
    noisy, timer = measure(CONV, tactics)
    assert all(noisy[t].us == pytest.approx(clean[t].us, rel=0.2) for t in tactics)
    assert any(noisy[t].low_us < noisy[t].high_us for t in tactics)


@emulated
def test_a_throttled_clock_stands_beside_the_times(device, driver, measure):
    driver(throttle_from_us=0.0, throttle_factor=0.5)
    times, timer = measure(CONV, some(device, "conv_dense", 1))
    assert len(times) == 1
    assert [r["clock_mhz"] for r in kept(timer.cache.path).values()] == pytest.approx([device.clock_mhz / 2], rel=0.005)


# ---- builds


@pytest.fixture
def network(tmp_path):
    weights = {"w": (np.random.default_rng(0).standard_normal((32, 64, 1, 1)) / 8).astype(np.float32)}
    nodes = [node("Conv", "x w", "a"), node("Relu", "a", "y")]
    onnx.save(model(nodes, {"x": (1, 64, 4, 4)}, "y", weights), tmp_path / "net.onnx")
    return tmp_path / "net.onnx"


@emulated
@pytest.mark.parametrize("error", ["illegal_address", "wrong"])
def test_a_build_ends_in_a_plan_of_what_works(driver, monkeypatch, network, tmp_path, error):
    monkeypatch.setattr(race, "STEPS", (1, 2, 3))
    driver([{"kernel": "conv_sparse24*", "error": error}])
    log: list[str] = []
    with fewer_tactics():
        engine = gr.build(network, sparsity="force", timing_cache=tmp_path / "times.jsonl", log=log.append)
    assert engine.record.timing.kind == "measured" and "emulated driver" in engine.record.timing.label
    assert not any(layer.tactic_name.startswith("conv_sparse24") for layer in engine.plan.layers)
    failed = [r for r in kept(tmp_path / "times.jsonl").values() if "error" in r]
    assert failed and all(r["tactic"].startswith("conv_sparse24") for r in failed)
    assert all(r["tactic"] in "\n".join(log) for r in failed)
    x = np.random.default_rng(1).standard_normal((1, 64, 4, 4)).astype(np.float32)
    with engine.context() as context, engine.context(device="emulator") as other:
        assert trial.relative_error(context.run({"x": x})["y"], other.run({"x": x})["y"]) < 2e-3


@emulated
def test_a_build_with_its_cache_alone_and_with_none(driver, monkeypatch, network, tmp_path):
    monkeypatch.setattr(race, "STEPS", (1, 2, 3))
    monkeypatch.setenv("GPU_RUNTIME_CACHE", str(tmp_path / "cache"))
    told: list[Progress] = []
    options: dict[str, Any] = {"sparsity": "force", "timing_cache": tmp_path / "times.jsonl", "progress": told.append}
    with fewer_tactics():
        with pytest.raises(ValueError, match="lacks times that the build needs, .* 0 of [0-9]+ times used"):
            gr.build(network, only_cached_times=True, **options)
        assert gr.build(network, **options | {"timing_cache": False}).record.timing.kind == "measured"
        assert not (tmp_path / "times.jsonl").exists() and not (tmp_path / "cache" / "timings.jsonl").exists()
        first = gr.build(network, **options)
        told.clear()
        again = gr.build(network, only_cached_times=True, **options)
    assert again.plan == first.plan
    (line,) = [p.text() for p in told if p.stage == "cache"]
    assert re.fullmatch(rf"timing cache {tmp_path}/times.jsonl: ([0-9]+) of \1 times used", line)


def built_beside_another() -> None:
    """The network of FOLDER, measured with the timing cache of both, is run as it was built; prints how many times it read."""
    race.STEPS = (1, 2, 3)
    folder = Path(os.environ["FOLDER"])
    before = len(Cache(folder / "times.jsonl"))
    (folder / f"ready_{os.getpid()}").touch()
    while len(list(folder.glob("ready_*"))) < 2:  # both begin at once
        time.sleep(0.01)
    with fewer_tactics():
        engine = gr.build(folder / "net.onnx", sparsity="force", timing_cache=folder / "times.jsonl")
    x = np.random.default_rng(1).standard_normal((1, 64, 4, 4)).astype(np.float32)
    with engine.context() as context, engine.context(device="emulator") as other:
        assert trial.relative_error(context.run({"x": x})["y"], other.run({"x": x})["y"]) < 2e-3
    print(before, engine.record.timing.kind)


@emulated
def test_two_processes_measure_at_once(driver, network, tmp_path, monkeypatch):
    """On one GPU, into one timing cache: both end in a plan, no line is torn, and a build after them times nothing."""
    monkeypatch.setenv("FOLDER", str(tmp_path))
    processes = [started(built_beside_another, checks=False) for _ in range(2)]
    for process in processes:
        with process:
            code, out, err = finished(process, 120)
        assert code == 0 and out.split() == ["0", "measured"], err[-3000:]
    times = tmp_path / "times.jsonl"
    size, found = times.stat().st_size, Cache(times)
    assert len(found) >= 4 and not found.malformed and times.read_bytes().endswith(b"\n")
    with fewer_tactics():
        gr.build(network, sparsity="force", timing_cache=times)
    assert times.stat().st_size == size


@pytest.mark.long
def test_a_trained_network_is_measured_saved_loaded_and_right(monkeypatch, tmp_path, children):
    """Of its tactics few on the emulated driver, through the real child; a second build finds all times in the cache."""
    source, options = DIGITS / "digits_sparse.onnx", {"sparsity": "enable", "shapes": {"x": (1, 1, 8, 8)}}
    with fewer_tactics(ON_DRIVER):
        gr.build(source, timing_cache=tmp_path / "times.jsonl", **options).save(tmp_path / "digits.engine")
        assert len(children) == 1
        again = gr.build(source, timing_cache=tmp_path / "times.jsonl", **options)
    engine = gr.load(tmp_path / "digits.engine")
    assert len(children) == 1 and again.plan == engine.plan and engine.record.timing.kind == "measured"
    assert not {name: r["error"] for name, r in kept(tmp_path / "times.jsonl").items() if "error" in r}
    with np.load(DIGITS / "heldout.npz") as heldout:
        images, labels = heldout["x"][:40].astype(np.float32), heldout["y"][:40]
    session = onnxruntime.InferenceSession(str(source), providers=["CPUExecutionProvider"])
    right = 0
    with engine.context() as context:
        for image, label in zip(images, labels, strict=True):
            (expected,), got = session.run(["logits"], {"x": image[None]}), context.run({"x": image[None]})["logits"]
            assert trial.relative_error(got, expected) < 1e-2
            right += int(got.argmax() == label)
    assert right >= 38
