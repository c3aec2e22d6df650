"""`gpu-runtime bench` on the emulated driver, end to end with real CuPy, in both orders: what it measures, writes and prints,
and what it does when the GPU hangs, fails or is slowed down, and at Ctrl-C."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnx
import pytest

import gpu_runtime as gr
from benchmarks.gpu_networks import fewer_tactics
from gpu_runtime import cli as command_line
from gpu_runtime.benchmark.inputs import random_inputs
from gpu_runtime.benchmark.measure import measure
from gpu_runtime.benchmark.records import Settings
from gpu_runtime.benchmark.summary import summarize
from tests.conftest import ROOT
from tests.emulated_driver import settings
from tests.on_driver import passes, timed
from tests.reference_run import model, node

pytestmark = pytest.mark.driver
QUICK = "--warmUp=0 --duration=0 --iterations=3"
FOLDER = "BENCH_TEST_FOLDER"  # environment: of the files of a child


@pytest.fixture
def folder(files, monkeypatch):
    monkeypatch.setenv(FOLDER, str(files))
    return files


def run(*args):
    """The exit code of a command in this process."""
    try:
        command_line.main(" ".join(args).split())
    except SystemExit as e:
        return e.code
    return 0


def all_options():
    """Streams, threads, graph and transfers in all combinations: times of every query, and outputs that are the emulator's."""
    os.chdir(os.environ[FOLDER])
    x = np.load("x.npy")
    x.tofile("x.raw")
    with gr.load("tiny.engine").context(device="emulator") as context:
        want = context.run({"x": x})["y"]
    for streams, more in ((1, ""), (2, ""), (2, "--threads")):
        for graph in ("", "--noCudaGraph --noSpinWait"):
            for copies in ("", "--noDataTransfers"):
                options = f"--streams={streams} {more} {graph} {copies} --loadInputs=x:{'x.raw' if graph else 'x.npy'}"
                assert run("bench tiny.engine", QUICK, options, "--exportTimes=t.json --exportOutput=o.json") == 0, options
                times, (output,) = json.loads(Path("t.json").read_text()), json.loads(Path("o.json").read_text())
                assert len(times) >= 3 * streams, options
                for t in times:
                    order = ("startH2dMs", "endH2dMs", "startComputeMs", "endComputeMs", "startD2hMs", "endD2hMs")
                    assert [t[a] <= t[b] for a, b in zip(order, order[1:], strict=False)] == [True] * 5, t
                    assert t["computeMs"] > 0 and t["startEnqMs"] <= t["endEnqMs"], t
                    assert (t["h2dMs"] > 0) == (t["d2hMs"] > 0) == (not copies), t
                    assert abs(t["latencyMs"] - t["h2dMs"] - t["computeMs"] - t["d2hMs"]) < 1e-5, t
                assert (output["name"], output["dimensions"]) == ("y", "1x8x6x6")
                assert np.abs(np.reshape(output["values"], want.shape) - want).max() < 0.02, options
    print("all of them")


@pytest.mark.parametrize("order", settings.ORDERS)
def test_all_options(folder, order):
    out = passes(all_options, order=order)
    assert out.endswith("all of them\n") and out.count("=== Performance summary") == 12
    assert "2 streams, a host thread each, launches one by one (--noCudaGraph), nothing copied (--noDataTransfers)" in out
    assert out.count("no GPU's times") == 12  # each block says whose clock it is


def other_plans():
    """A library function, around which there are several graphs; inputs and outputs that are packed on the host; and Python."""
    os.chdir(os.environ[FOLDER])
    rng = np.random.default_rng(0)
    w = {"w": rng.normal(0, 0.1, (16, 8, 3, 3)).astype(np.float32)}
    onnx.save(model([node("Conv", "x w", "a"), node("Hardmax", "a", "y", axis=1)], {"x": (1, 8, 6, 6)}, "y", w), "library.onnx")
    gr.build("library.onnx", device="h200").save("library.engine")
    gr.build("tiny.onnx", device="h200", input_formats="fp16:hwc8", output_formats="fp16:chw16").save("packed.engine")
    for name in ("library.engine", "packed.engine"):
        engine = gr.load(name)
        inputs = random_inputs(engine.inputs, seed=1)
        with engine.context(device="emulator") as context:
            want = context.run(inputs)["y"]
        for transfers in (True, False):
            few = Settings(warm_up_ms=0, iterations=2, duration_s=0, transfers=transfers)
            measured = measure(engine, inputs, few)
            assert np.abs(measured.outputs["y"] - want).max() < 0.02 and not measured.nonfinite
            found = summarize(measured.trace)
            assert found.queries >= 2 and found.compute.min > 0 and found.throughput > 0
    inputs["x"][...] = np.inf
    assert measure(engine, inputs, few).nonfinite
    with pytest.raises(ValueError, match="inputs: expected the names"):
        measure(engine, {}, few)


def test_other_plans(folder):
    passes(other_plans)


def bench(folder, *options, **changes):
    """A process that runs the command on a driver with these settings."""
    return subprocess.Popen(
        [sys.executable, "-m", "gpu_runtime", "bench", *options],
        cwd=folder,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | settings.environment(**changes) | {"PYTHONPATH": _path()},
    )


def _path():
    return os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(ROOT))))


def ended(process):
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def test_what_it_prints(folder):
    options = ["tiny.engine", "--warmUp=5", "--iterations=4", "--duration=0.2", "--avgRuns=2", "--percentile=50,99.5"]
    code, out, err = ended(bench(folder, *options, "--dumpOutput", "--verbose"))
    assert code == 0, err
    lines = out.splitlines()
    names = (
        "Timing tiny.engine on NVIDIA H200 (sm_90a): 1 stream, a CUDA graph, inputs and outputs copied",
        "Warmup completed ",
        "Timing trace has ",
        "",
        "=== Trace details ===",
        "Trace averages of 2 runs:",
        "Average on 2 runs - GPU latency: ",
    )
    assert all(line.startswith(name) for line, name in zip(lines, names, strict=False)), out
    for name in ("Latency", "Enqueue Time", "H2D Latency", "GPU Compute Time", "D2H Latency"):
        (line,) = (line for line in lines if line.startswith(f"{name}: min = "))
        values = [float(part.split(" = ")[1].removesuffix(" ms")) for part in line.split(", ")]
        assert "percentile(50%) = " in line and "percentile(99.5%) = " in line and len(values) == 6
        assert 0 < values[0] <= values[3] <= values[1]
    for start in ("Throughput: ", "Total Host Walltime: ", "Total GPU Compute Time: ", "=== Explanations", "y: (1x8x6x6)"):
        assert sum(line.startswith(start) for line in lines) >= 1, start
    assert float(out.partition("Total Host Walltime: ")[2].split()[0]) >= 0.2


@pytest.mark.parametrize(
    "nth, error, words",
    [
        (1, "hang", "the first run did not end for 15 s"),
        (12, "hang", "no query ended for 15 s"),
        (12, "illegal_address", "This process can no longer use the GPU"),
    ],
)
def test_a_gpu_that_hangs_or_fails(folder, nth, error, words):
    faults = (settings.Fault(nth=nth, error=error),)
    begun = time.monotonic()
    process = bench(folder, "tiny.engine", "--timeout=15", "--exportTimes=t.json", faults=faults)
    code, out, err = ended(process)
    assert code == 1 and words in err and "Performance" not in out and time.monotonic() - begun < 60
    assert not (folder / "t.json").exists()


def test_ctrl_c_while_the_first_run_hangs(folder):
    """Nothing is measured yet, and nothing that could be waited for ends."""
    process = bench(folder, "tiny.engine", "--exportTimes=t.json", faults=(settings.Fault(nth=1, error="hang"),))
    process.stderr.readline()  # a second after its start
    time.sleep(3)
    process.send_signal(signal.SIGINT)
    code, out, err = ended(process)
    assert (code, out) == (130, "") and "interrupted: nothing was written or overwritten" in err, err


@pytest.mark.parametrize("duration, expected", [("1000", 130), ("-1", 0)])
def test_ctrl_c_prints_what_there_is(folder, duration, expected):
    process = bench(folder, "tiny.engine", "--warmUp=0", f"--duration={duration}", "--exportTimes=t.json")
    line = process.stderr.readline()
    while "running" not in line:
        line = process.stderr.readline()
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    code, out, err = ended(process)
    assert code == expected and "=== Performance summary" in out and ("interrupted" in err) == (expected == 130)
    assert json.loads((folder / "t.json").read_text())


def test_a_clock_that_is_held_down_is_told(folder):
    slow = {"throttle_from_us": 0.0, "throttle_to_us": 1e9, "throttle_factor": 0.5}
    code, out, err = ended(bench(folder, "tiny.engine", *QUICK.split(), "--duration=0.3", **slow))
    assert code == 0 and "clock was held down while this was measured (power cap in " in out, out + err
    assert "MHz of at most" in out


def build_engine(folder, *options, **changes):
    done = subprocess.run(
        [sys.executable, "-m", "gpu_runtime", "build", *options],
        cwd=folder,
        text=True,
        capture_output=True,
        timeout=300,
        env=os.environ | settings.environment(**changes) | {"PYTHONPATH": _path()},
    )
    return done.returncode, done.stdout, done.stderr


def test_in_trtexecs_spelling(folder):
    """--loadEngine times an engine, and what it shows of its layers is there, too."""
    code, out, err = build_engine(
        folder,
        "--loadEngine=tiny.engine",
        *QUICK.split(),
        "--percentile=99",
        "--exportTimes=t.json",
        "--dumpProfile",
        "--exportProfile=p.json",
        "--useCudaGraph",
    )
    assert code == 0 and not [line for line in err.splitlines() if not line.startswith("[")], err
    places = [out.index(text) for text in ("Wrote p.json", "Timing tiny.engine", "percentile(99%)", "Wrote t.json")]
    assert places == sorted(places)
    assert len(json.loads((folder / "t.json").read_text())) >= 3


def measured_builds():
    """As trtexec does: the engine is written and explained, then timed, unless --skipInference."""
    os.chdir(os.environ[FOLDER])
    onnx.save(model([node("MaxPool", "x", "y", kernel_shape=[2, 2])], {"x": (1, 8, 6, 6)}, "y"), "pool.onnx")
    with fewer_tactics():
        assert run("build pool.onnx -o new.engine --timingCacheFile=times --exportOutput=o.json", QUICK) == 0
        print("---")
        assert run("build pool.onnx -o other.engine --timingCacheFile=times --skipInference") == 0


@timed
def test_after_a_build_that_was_measured(folder):
    first, _, second = passes(measured_builds).partition("---")
    assert first.index("Wrote new.engine: ") < first.index("Timing new.engine on NVIDIA H200") < first.index("Wrote o.json")
    assert "Wrote other.engine: " in second and "Performance" not in second


def test_an_engine_for_another_gpu(folder):
    code, out, err = ended(bench(folder, "tiny.engine", devices=("a100",)))
    assert code == 1 and not out
    assert "tiny.engine: the engine was built for H200 SXM 141GB (sm_90a); this device is sm_80. Build the engine again" in err


def test_more_streams_than_memory_holds(folder):
    code, _, err = ended(bench(folder, "tiny.engine", "--streams=64", *QUICK.split(), memory_gb=0.0001))
    assert code == 1 and "error: tiny.engine: stream " in err and " of 64: the engine takes " in err


def test_the_gpu_of_a_number(folder):
    two = {"devices": ("a100", "h200")}
    code, out, err = ended(bench(folder, "tiny.engine", "--device=1", *QUICK.split(), **two))
    assert code == 0 and "on NVIDIA H200" in out, err
    code, out, err = ended(bench(folder, "tiny.engine", "--device=2", *QUICK.split(), **two))
    assert code == 2 and "--device: GPU number 2 cannot be used here" in err
