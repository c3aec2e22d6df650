"""`make gpu` without a GPU: what it asks for, what it leaves out, and that nothing emulated is read as hardware's."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import gpu, gpu_networks, hardware
from benchmarks.experiments import kernels, layers, peers
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
    from gpu_runtime.building.target import timing_record

    device = replace(H200, measured=True)
    driver("580.00.emulated")
    assert timing_record(device).label == f"measured({H200.title}, emulated driver)"
    driver("580.65.06")
    assert timing_record(device).label == f"measured({H200.title})"


def test_the_kernels_of_every_network_are_compiled_first(tmp_path):
    """Those of the plan, of all other tactics that a build times, and of what large convolutions are compared with."""
    wanted = set(kernels.of_row("networks", H200, True, tmp_path))
    (case,), note = gpu_networks.cases(True, tmp_path)
    assert "says how fast" in note
    from tactics.launches import launches

    work = gpu_networks.work(H200, True, tmp_path)
    timed = {
        (s.kernel, tuple(sorted(s.values)))
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


OFF_GPU = ("peers", "counters", "sanitizer", "compiled", "conv", "operators")  # machine code of others


@pytest.mark.driver
@timed
def test_every_row_runs_on_the_emulated_driver(tmp_path):
    """`make gpu` from beginning to end at a small size, the driver's checks on; rows that need a GPU's machine code
    are left out with the reason. The results are refused as hardware's. A second call has nothing left to do."""
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
    command = [sys.executable, "-m", "benchmarks.gpu", "--out", str(tmp_path), "--seconds", "500"]
    options = {"cwd": ROOT, "timeout": 560, "env": os.environ | {"PYTHONPATH": path}, "capture_output": True, "text": True}
    done = subprocess.run(command, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("ON AN EMULATED DRIVER, no hardware: NVIDIA H200")
    summary = json.loads((tmp_path / "summary.json").read_text())
    status = {name: row["status"] for name, row in summary["rows"].items()}
    ran = [row for row in gpu.ROWS if row.name not in OFF_GPU]
    assert [status[row.name] for row in ran] == ["ok"] * len(ran), done.stdout
    reasons = ("which the emulated driver cannot run", "needs NVIDIA's driver")
    assert all(status[name].startswith("left out: ") and status[name].endswith(reasons) for name in OFF_GPU)
    for file in ("summary.json", *(row.file for row in ran)):
        with pytest.raises(ValueError, match="its times are no hardware's"):
            hardware.read(tmp_path / file)
    found = {row.name: json.loads((tmp_path / row.file).read_text()) for row in ran}
    for layer in found["layers"]["layers"]:
        assert [t["kind"] for t in layer["tactics"]] == layers.kinds(layer["layer"]) and not layer["failed"]
    (measured,) = found["measured"]["rows"]
    assert measured["dense_measured"]["us"] > 0 < measured["sparse_predicted"]["us"] and measured["tactics timed"] > 2
    (ways,) = found["early"]["engines"].values()
    assert set(ways) == {"early", "rawkernel", "apart"} and all(way["graph"]["us"] > 0 for way in ways.values())
    assert " passed" in found["tests"]["last_line"] and [
        len(found[row]["rows"]) for row in ("changed", "untimed", "ends-1")
    ] == [2, 2, 2]
    assert (
        set(found["right"]["right"]) == {"pool", "resize"}
        and len(found["facts"]["writing: way, MB, blocks of an SM, us, GB/s"]) == 3
    )
    (row,) = found["networks"]["networks"]
    assert not {"errors", "left_out"} & {key for key in found["networks"] if found["networks"][key]}
    assert "unfinished" not in found["networks"] and row["timing"]["kind"] == "measured" and row["finite"]
    assert row["error_to_emulator"] < 1e-3 and row["error_to_onnxruntime"] < 1e-2 and row["network_us"]["us"] > 0
    assert len(row["layers"]) >= 2 and all(layer["profiled_us"] > 0 for layer in row["layers"])
    again = subprocess.run(command, **options)
    assert again.returncode == 0 and again.stdout.count(" is answered: ") == len(ran), again.stdout


@pytest.mark.driver
@timed
def test_the_row_of_peers_is_rehearsed_with_a_torch_that_computes_nothing(tmp_path):
    """Which calls are made, in which order, by which process: the numbers are no peer's."""
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT / "tests" / "fake_torch"), str(ROOT)]))
    command = [sys.executable, "-m", "benchmarks.experiments.peers", "--out", str(tmp_path / "peers.json"), "--seconds", "150"]
    done = subprocess.run(command, cwd=ROOT, timeout=300, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "peers.json").read_text())
    assert found["torch"]["version"] == "0.0 (rehearsal)" and len(found["layers"]) == 2
    for row in found["layers"]:
        labels = {*layers.kinds(row["layer"]), *(label for label in peers.LABELS if label not in layers.KINDS)}
        assert not row["failed"] and labels <= set(row)
        assert row["cusparselt"]["dtype"] == "float16" and row["cusparselt"]["rel_error"] < 1e-2
        assert all(row[label]["us"] > 0 and row[label]["watts"] > 0 for label in labels)


@pytest.mark.driver
@timed
def test_the_row_of_operators_is_rehearsed_with_a_torch_that_computes_nothing(tmp_path):
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT / "tests" / "fake_torch"), str(ROOT)]))
    out = tmp_path / "operators.json"
    command = [sys.executable, "-m", "benchmarks.experiments.operators", "--out", str(out), "--seconds", "150"]
    done = subprocess.run(command, cwd=ROOT, timeout=300, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    conv, linear = json.loads(out.read_text())["layers"]
    assert "sparse24" in conv["tactics"]["2:4"] and "sparse24" in linear["tactics"]["2:4"]
    assert not linear["failed"] and {"2:4", "ours", "torch", "cusparselt"} <= set(linear) and "cusparselt" not in conv
    assert all(row[label]["us"] > 0 and row[label]["host_us"] > 0 for row in (conv, linear) for label in ("2:4", "ours"))


NCU = """#!{python}
import subprocess, sys
at = sys.argv.index("--clock-control"), sys.argv.index("{python}")
assert sys.argv[at[0] + 1] == "none" and at[0] < at[1]
done = subprocess.run(sys.argv[at[1]:])
print('"ID","Kernel Name","gpu__time_duration.sum"\\n"","","us"')
print('"0","' + sys.argv[sys.argv.index("--kernel-name") + 1] + '","12.5"')
sys.exit(done.returncode)
"""


@pytest.mark.driver
@timed
def test_the_row_of_counters_is_rehearsed_with_an_ncu_that_counts_nothing(tmp_path):
    """ncu's arguments, and what it watches: both targets are launched."""
    program = tmp_path / "ncu"
    program.write_text(NCU.format(python=sys.executable))
    program.chmod(0o755)
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
    env = os.environ | {"PYTHONPATH": path, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    command = [sys.executable, "-m", "benchmarks.experiments.counters", "--out", str(tmp_path / "counters.json")]
    done = subprocess.run(command, cwd=ROOT, timeout=300, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "counters.json").read_text())["targets"]
    assert {name: of["metrics"]["gpu__time_duration.sum"] for name, of in found.items()} == {
        "64>256 residual": 12.5,
        "long 2:4": 12.5,
    }
