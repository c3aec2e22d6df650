"""`make gpu` without a GPU: what it asks for, what it leaves out, and that nothing emulated is read as hardware's."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import gpu, gpu_networks, hardware
from cuda_kernels import device as devices
from tactics.measure import timing
from tactics.step import Launch
from tests.conftest import DIGITS, ROOT
from tests.on_driver import timed

H200 = devices.named("h200")


@pytest.fixture
def driver(monkeypatch):
    """driver(version): of the driver that answers."""
    return lambda version: monkeypatch.setattr(timing, "driver_version", lambda: version)


def written(folder: Path, name: str = "summary.json", **more) -> Path:
    hardware.write(folder / name, hardware.header(H200) | {"parts": {}} | more)
    return folder / name


def test_a_result_says_what_it_was_measured_on(driver, tmp_path):
    driver("580.65.06")
    found = hardware.read(written(tmp_path))
    assert found["driver"] == "580.65.06" and found["emulated"] is False and found["device"] == str(H200)


def test_results_of_the_emulated_driver_are_refused(driver, tmp_path, capsys):
    driver("580.00.emulated")
    path = written(tmp_path)
    assert json.loads(path.read_text())["device"].startswith("ON AN EMULATED DRIVER, no hardware: ")
    with pytest.raises(ValueError, match=r"emulated driver 580.00.emulated: its times are no hardware's"):
        hardware.read(path)
    assert hardware.main([str(tmp_path)]) == 1 and "no hardware's" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"driver": 5, "emulated": false}',
        '{"driver": "580", "emulated": 0}',
        '{"driver": "580.00.emulated", "emulated": false}',
    ],
)
def test_what_does_not_say_so_is_refused_too(tmp_path, text):
    (tmp_path / "summary.json").write_text(text)
    with pytest.raises(ValueError, match="summary.json: "):
        hardware.read(tmp_path / "summary.json")


def test_a_folder_without_results_is_an_error(tmp_path, capsys):
    assert hardware.main([str(tmp_path)]) == 1 and "summary.json" in capsys.readouterr().err


def test_a_plan_of_emulated_times_says_so(driver):
    from gpu_runtime.target import timing_record

    device = replace(H200, measured=True)
    driver("580.00.emulated")
    assert timing_record(device).label == f"measured({H200.title}, emulated driver)"
    driver("580.65.06")
    assert timing_record(device).label == f"measured({H200.title})"


def test_each_part_that_cannot_run_says_why(driver, monkeypatch):
    driver("580.00.emulated")
    assert "machine code" in gpu.why_left_out("conv") and "NVIDIA's driver" in gpu.why_left_out("sanitizer")
    driver("580.65.06")
    monkeypatch.setattr(gpu.importlib.util, "find_spec", lambda name: None)
    assert "pip install torch" in gpu.why_left_out("conv")
    assert not any(gpu.why_left_out(name) for name in ("compile", "tests", "networks", "sanitizer"))


def test_the_kernels_of_every_network_are_compiled_first(tmp_path):
    """Those of the plan, of all other tactics that a build times, and of what large convolutions are compared with."""
    wanted = set(gpu.variants(H200, True, tmp_path))
    (case,), note = gpu_networks.cases(True, tmp_path)
    assert "says how fast" in note
    from tactics.launches import launches

    work = gpu_networks.work(H200, True, tmp_path)
    timed = {
        (s.kernel, s.values)
        for p, tactics in work
        for t in gpu_networks.few(tactics)
        for s in launches(p, t)
        if isinstance(s, Launch)
    }
    assert timed and timed <= wanted and ("flush_l2", ()) in wanted
    assert {"conv_dense", "conv_sparse24", "move", "reference_conv"} <= {kernel for kernel, _ in wanted}


@pytest.mark.parametrize("what", ["build", "run"])
def test_what_ends_the_networks_early_leaves_what_was_measured(driver, monkeypatch, tmp_path, what):
    """The parent ends the part at its time: at any point the file holds all that is known by then."""
    driver("580.65.06")
    monkeypatch.setattr(gpu_networks, "current", lambda: H200)

    class Ended(BaseException):
        pass

    def end(*_, **__):
        raise Ended

    if what == "build":
        monkeypatch.setattr(gpu_networks.gr, "build", end)
    else:
        monkeypatch.setattr(gpu_networks, "replay_us", end)
        build = gpu_networks.gr.build
        monkeypatch.setattr(gpu_networks.gr, "build", lambda *args, **options: build(*args, **options, device=H200))
        monkeypatch.setattr(gpu_networks, "feeds_for", end)
    with pytest.raises(Ended):
        gpu_networks.networks_part(tmp_path, 100, small=True)
    found = hardware.read(tmp_path / "networks.json")
    assert found["unfinished"]["network"].startswith("two_layers") and found["networks"] == found["left_out"] == []
    assert ("plan" in found["unfinished"]) == (what == "run")


def test_networks_for_which_there_is_no_time_are_named(driver, monkeypatch, tmp_path):
    driver("580.65.06")
    monkeypatch.setattr(gpu_networks, "current", lambda: H200)
    monkeypatch.delenv("GPU_RUNTIME_MODELS", raising=False)
    assert gpu_networks.networks_part(tmp_path, 0, small=False) == 1
    found = hardware.read(tmp_path / "networks.json")
    assert len(found["left_out"]) == 4 and all(name.startswith("digits_") for name in found["left_out"])
    assert (DIGITS / "digits_sparse.onnx").exists() and "GPU_RUNTIME_MODELS is not set" in found["note"]


@pytest.mark.parametrize(
    ("finite", "error", "text"),
    [
        (True, 1e-3, ""),
        (True, "Unsupported: a kernel", ""),
        (False, float("nan"), "infinity or NaN"),
        (True, 0.3, "3.0e-01"),
        (True, float("nan"), "differ"),
    ],
)
def test_a_network_that_computes_something_else_is_an_error(finite, error, text):
    wrong = gpu_networks.why_wrong({"finite": finite, "error_to_emulator": error})
    assert text in wrong and bool(wrong) == bool(text)


@pytest.mark.parametrize("words", [["--parts", "compile,nonsense"], ["--seconds", "0"], ["--seconds", "nan"]])
def test_wrong_arguments_are_refused(words, capsys):
    with pytest.raises(SystemExit) as e:
        gpu.main(words)
    assert e.value.code == 2 and "expected" in capsys.readouterr().err


@pytest.mark.driver
@timed
def test_everything_runs_on_the_emulated_driver(tmp_path):
    """`make gpu` from beginning to end, the driver's checks on, with whole results that are refused as hardware's."""
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "--out", str(tmp_path)],
        cwd=ROOT,
        timeout=560,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("ON AN EMULATED DRIVER, no hardware: NVIDIA H200")
    found = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in ("summary", *gpu.PARTS[:3])}
    assert all(data["emulated"] and data["device"].startswith("ON AN EMULATED DRIVER") for data in found.values())
    status = {name: part["status"] for name, part in found["summary"]["parts"].items()}
    assert [status[name] for name in gpu.PARTS[:3]] == ["ok"] * 3
    assert "cuDNN is machine code" in status["conv"] and "compute-sanitizer needs NVIDIA's driver" in status["sanitizer"]
    assert found["compile"]["kernels"] > 50 and not found["compile"]["failed"] and found["compile"]["emulator"] == "built"
    assert found["tests"]["returncode"] == 0 and " passed" in found["tests"]["last_line"]
    (row,) = found["networks"]["networks"]
    assert not {"errors", "left_out"} & {key for key in found["networks"] if found["networks"][key]}
    assert "unfinished" not in found["networks"] and row["timing"]["kind"] == "measured" and row["finite"]
    assert row["error_to_emulator"] < 1e-3 and row["error_to_onnxruntime"] < 1e-2 and row["network_us"]["us"] > 0
    assert len(row["layers"]) >= 2 and all(layer["profiled_us"] > 0 for layer in row["layers"])
    for name in found:
        with pytest.raises(ValueError, match="its times are no hardware's"):
            hardware.read(tmp_path / f"{name}.json")
