"""`gpu-runtime bench` as it is typed on a machine without a GPU: what it predicts, and what it refuses. What it measures is
tested on the emulated driver (test_driver_bench.py), its statistics in test_summary.py."""

from dataclasses import astuple, replace

import numpy as np
import pytest

import gpu_runtime as gr
from cuda_kernels import device as devices
from gpu_runtime.benchmark.inputs import load_inputs, random_inputs
from gpu_runtime.benchmark.summary import predicted
from gpu_runtime.benchmark.wording import predicted_text
from gpu_runtime.runtime.findings import Solution
from gpu_runtime.runtime.plan_record import Timing


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(devices, "why_no_gpu", lambda: "the CUDA driver reports no device")


def test_without_a_gpu_it_says_so_and_what_to_do(files, cli):
    code, out, err = cli("bench tiny.engine --exportTimes=t.json")
    assert (code, out) == (1, "") and not (files / "t.json").exists()
    assert err == (
        "error: no GPU can be used here to time inferences: the CUDA driver reports no device. "
        "gpu-runtime bench tiny.engine --predict prints the predicted time\n"
    )


def test_every_predicted_time_says_so(files, cli):
    code, out, err = cli("bench tiny.engine --predict")
    assert (code, err) == (0, "")
    us = gr.load("tiny.engine").plan.solution.total_us
    throughput, compute = (line for line in out.splitlines() if "~" in line)
    assert throughput.startswith(f"Throughput: ~{1e6 / us:.6g} qps, predicted(h200)")
    assert compute.startswith(f"GPU Compute Time: ~{us / 1e3:.4f} ms, predicted(h200): ")
    for line in out.splitlines():
        assert " ms" not in line and " qps" not in line or "predicted(h200)" in line
    assert "=== Performance summary (predicted, nothing was measured) ===" in out


def test_the_error_of_a_prediction(files):
    record = gr.load(files / "tiny.engine").record
    found = predicted(record)
    assert found.low_us < found.us < found.high_us and found.us**2 == pytest.approx(found.low_us * found.high_us)
    assert 1.1 < found.high_us / found.us < 1.5
    plan = replace(record.plan, solution=Solution(1e6, "", ""))
    timed = replace(record, timing=Timing("measured", "measured(a GPU)"), plans=(plan,))
    assert astuple(predicted(timed)) == pytest.approx(astuple(found))
    assert predicted_text(timed).count("predicted(h200)") == 2


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("--batch=8", "--batch: the batch is part of the input's size: give --shapes=NAME:Nx3x224x224"),
        ("--fp16", "--fp16: an option of builds: an engine runs as it was built"),
        ("--strems=4", "No such option '--strems'. (Did you mean one of: "),
    ],
)
def test_options_of_trtexec_that_are_of_builds(files, cli, option, text):
    code, out, err = cli(f"bench tiny.engine {option}")
    assert (code, out) == (2, "") and text in err


def test_what_predicting_does_not_do(files, cli):
    code, out, err = cli("bench tiny.engine --predict --exportTimes=t.json --dumpOutput --iterations=3")
    assert (code, out) == (2, "") and "--predict runs nothing: leave out --dumpOutput, --exportTimes" in err
    code, out, err = cli("bench tiny.engine --predict --streams=4")
    assert code == 0 and err == "ignored: --streams: --predict runs nothing\n" and "predicted" in out


@pytest.mark.parametrize(
    "typed, words",
    [
        ("--percentile=101", "--percentile: expected numbers from 0 to 100, as 90,95,99, got '101'"),
        ("--percentile=", "--percentile: expected numbers"),
        ("--percentile=nan", "--percentile: expected numbers"),
        ("--streams=0", "'--streams' / '--infStreams': 0 is not in the range 1<=x<=64"),
        ("--iterations=0", "'--iterations'"),
        ("--duration=-2", "--duration: expected a time from 0 on, got -2"),
        ("--duration=nan", "--duration: expected a time"),
        ("--warmUp=inf", "--warmUp: expected a time"),
        ("--timeout=0", "--timeout: expected a time above 0, got 0"),
        ("--avgRuns=0", "'--avgRuns'"),
        ("--device=h200", "--device: expected the number of a GPU here, got 'h200'"),
        ("--device=0", "--device: GPU number 0 cannot be used here: the CUDA driver reports no device"),
    ],
)
def test_wrong_usage(typed, words, files, cli):
    code, out, err = cli(f"bench tiny.engine {typed}")
    assert (code, out) == (2, "") and words in err


def test_files_that_cannot_be_written_are_refused_before_any_work(files, cli):
    for typed, words in (("--exportTimes=no/t.json", "no existing folder"), ("--exportOutput=tiny.engine", "is a file that")):
        code, out, err = cli(f"bench tiny.engine {typed}")
        assert (code, out) == (1, "") and words in err
    code, _, err = cli("bench none.engine --predict")
    assert code == 1 and err.startswith("error: none.engine: ")
    code, _, err = cli("bench tiny.onnx --predict")
    assert code == 1 and err.startswith("error: tiny.onnx: ")


# ---- inputs


@pytest.fixture
def edges(files):
    return gr.load(files / "tiny.engine").plan.inputs


def test_random_inputs_are_the_same_each_time(edges):
    specs = [i.spec for i in edges]
    a, b, c = random_inputs(specs), random_inputs(specs), random_inputs(specs, 1)
    assert a["x"].dtype == np.float32 and a["x"].shape == (1, 8, 6, 6) and (a["x"] == b["x"]).all() and (a["x"] != c["x"]).any()
    assert -1 <= a["x"].min() < -0.9 and 0.9 < a["x"].max() <= 1


def test_inputs_of_files(files, edges, monkeypatch):
    monkeypatch.chdir(files)
    x = np.load("x.npy")
    x.tofile("x.bin")
    for text in ("x:x.npy", "x:x.bin", "'x':x.bin", '"x":./x.bin'):
        assert (load_inputs(text, edges)["x"] == x).all()
    assert (load_inputs("", edges)["x"] == random_inputs([i.spec for i in edges])["x"]).all()


HOSTILE = {
    "short.bin": (b"1234", "expected 1152 bytes, 1x8x6x6 of float32, got 4: write it with array.astype(np.float32).tofile("),
    "empty.bin": (b"", "expected 1152 bytes, 1x8x6x6 of float32, got 0"),
    "long.bin": (bytes(1153), "got 1153"),
    "short.npy": (b"1234", "not a readable .npy file, as numpy.save writes it: "),
    "long.npy": (
        bytes(1 << 18),
        "not a readable .npy file, as numpy.save writes it: it has 262144 bytes, but the input has 1152",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files(name, files, edges, monkeypatch):
    monkeypatch.chdir(files)
    data, words = HOSTILE[name]
    (files / name).write_bytes(data)
    with pytest.raises(ValueError) as e:
        load_inputs(f"x:{name}", edges)
    assert str(e.value).startswith(f"--loadInputs x: {name}: ") and words in str(e.value)


def test_arrays_that_are_no_input(files, edges, monkeypatch):
    monkeypatch.chdir(files)
    np.save("wide.npy", np.zeros((1, 8, 6, 7), np.float32))
    np.save("double.npy", np.zeros((1, 8, 6, 6)))
    np.save("object.npy", np.array([{}]), allow_pickle=True)
    for name, words in (
        ("wide", "expected shape 1x8x6x6, got 1x8x6x7"),
        ("double", "expected dtype float32, got float64"),
        ("object", "not a readable .npy file"),
    ):
        with pytest.raises(ValueError, match=words):
            load_inputs(f"x:{name}.npy", edges)
    (files / "folder").mkdir()
    for path in ("none.bin", "folder", "none.npy"):
        with pytest.raises(ValueError, match=f"--loadInputs x: {path}: cannot be read: .*expected 1152 raw bytes, or a .npy"):
            load_inputs(f"x:{path}", edges)


@pytest.mark.parametrize("text", ["x", "x:", "y:x.npy", "x.npy", "x:x.npy,", ":x.npy"])
def test_texts_that_name_no_input(text, edges):
    with pytest.raises(ValueError, match=r"--loadInputs: expected NAME:FILE \(several with commas\), NAME being 'x', got "):
        load_inputs(text, edges)


def test_an_input_that_is_given_twice(edges):
    with pytest.raises(ValueError, match="--loadInputs: input 'x' is given twice, as a.npy and as b.npy"):
        load_inputs("x:a.npy,x:b.npy", edges)
