"""The emulated CUDA driver's settings and its building; what it does itself is tested on it (test_emulated_*.py)."""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cuda_kernels.device import named, reported
from cuda_kernels.emulator.build import BuildError
from tests.conftest import ROOT
from tests.emulated_driver import build, settings
from tests.emulated_driver.settings import Fault, Settings, from_json, visible


def test_settings_survive_the_environment():
    some = Settings(("a100", "h200"), "eager", 3, checks=False, tail_share=0.1, faults=(Fault("conv*", 2, "hang"),))
    assert from_json(some.to_json()) == some and from_json(Settings().to_json()) == Settings()


@pytest.mark.parametrize(
    "text, words",
    [
        ('{"colour": 1}', "expected an object of behind, checks, devices"),
        ('{"order": "soon"}', "expected late or eager, got 'soon'"),
        ('{"devices": ["t4"]}', "2:4 sparse tensor cores"),
        ('{"faults": [{"error": "bad"}]}', "got 'bad'"),
        ('{"faults": [{"error": "hang", "call": true}]}', "a launch call returns an error"),
        ('{"throttle_factor": 2}', "0 < throttle_factor <= 1"),
        ("[]", "expected an object"),
    ],
)
def test_settings_that_are_refused(text, words):
    with pytest.raises(ValueError, match=words.replace("(", r"\(")):
        from_json(text)


@pytest.mark.parametrize("shown, expected", [(None, [0, 1, 2]), ("2,0", [2, 0]), ("1,9,0", [1]), ("", []), ("0,0", [0])])
def test_visible_devices(shown, expected):
    assert visible(3, {} if shown is None else {"CUDA_VISIBLE_DEVICES": shown}) == expected


@pytest.mark.parametrize("name", ["a100", "h200", "rtx5090"])
def test_facts_come_back_as_the_table_has_them(name):
    facts = settings.c_facts(0, named(name))
    properties = {
        "name": facts.name,
        "major": facts.cc // 10,
        "minor": facts.cc % 10,
        "multiProcessorCount": facts.sms,
        "l2CacheSize": facts.l2_bytes,
        "sharedMemPerBlockOptin": facts.smem_per_block,
        "sharedMemPerMultiprocessor": facts.smem_per_sm,
        "maxThreadsPerMultiProcessor": facts.threads_per_sm,
        "regsPerMultiprocessor": facts.regs_per_sm,
    }
    attributes = {13: facts.clock_mhz * 1000, 36: facts.memory_clock_khz, 37: facts.memory_bus_bits, 106: facts.blocks_per_sm}
    found, expected = reported(properties, attributes), named(name)
    same = ("sm", "num_sms", "clock_mhz", "dram_gbps", "l2_bytes", "smem_per_block", "max_blocks_per_sm", "mma_fma_per_clk")
    assert [getattr(found, f) for f in same] == [getattr(expected, f) for f in same]


# ---- building


def slow_fill(folder: Path) -> None:
    (folder / "first").write_text("1")
    time.sleep(0.3)
    (folder / "second").write_text("2")


def make(_: int) -> tuple[str, list[str]]:
    made = build._made("part", ["content"], slow_fill)
    return str(made), sorted(p.name for p in made.iterdir())


def test_two_that_build_at_once_get_one_whole_folder(tmp_path, monkeypatch):
    """Locks on files are of each opening, so threads stand for processes here."""
    monkeypatch.setenv("GPU_RUNTIME_CACHE", str(tmp_path))
    with ThreadPoolExecutor(2) as pool:
        (first, files), (second, others) = pool.map(make, range(2))
    assert first == second and files == others == ["first", "second"]
    assert [p.name for p in (tmp_path / "emulated_driver").iterdir() if p.is_dir()] == [Path(first).name]


def test_a_build_that_fails_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("GPU_RUNTIME_CACHE", str(tmp_path))

    def fails(folder: Path) -> None:
        (folder / "part").write_text("half")
        build._run("linking", [sys.executable, "-c", "import sys; sys.exit('error: no such thing')"])

    with pytest.raises(BuildError, match="linking failed: error: no such thing"):
        build._made("part", ["x"], fails)
    assert [p for p in (tmp_path / "emulated_driver").iterdir() if p.is_dir()] == []


def test_another_cupy_is_one_sentence(monkeypatch):
    monkeypatch.setattr(build, "CUPY", "1.2.3")
    with pytest.raises(BuildError, match=r"needs cupy-cuda13x 1\.2\.3, got [\d.]+: pip install cupy-cuda13x==1\.2\.3"):
        build.environment()


def refused(tmp_path: Path, *words: str, **variables: str) -> str:
    """What the command prints where it cannot run anything."""
    env = os.environ | {"GPU_RUNTIME_CACHE": str(tmp_path), "PYTHONPATH": str(ROOT)} | variables
    command = [sys.executable, "-m", "tests.emulated_driver", *words]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and not done.stdout, done.stderr
    return done.stderr


@pytest.mark.slow
def test_without_a_compiler_or_a_network_there_is_one_sentence(tmp_path):
    text = refused(tmp_path, "python", "-c", "1", PATH="/nonexistent", CXX="")
    assert "error: no C++ compiler found" in text and "Traceback" not in text
    offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}
    text = refused(tmp_path, "python", "-c", "1", **offline)
    assert "error: the emulated driver cannot be built: downloading" in text and "from the package index) failed" in text
    assert "Traceback" not in text


def test_wrong_arguments(tmp_path):
    assert "expected a command to run" in refused(tmp_path)
    assert "unknown device 'moon'" in refused(tmp_path, "--device", "moon", "true")
    assert "No such file" in refused(tmp_path, "--settings", "absent.json", "true")


# ---- processes and files that a test leaves behind

LEAVING = """
import cupy, pytest
pytestmark = pytest.mark.gpu
def test_another_stream(): cupy.cuda.Stream().use()
def test_the_default_one_again(): assert cupy.cuda.get_current_stream().ptr == 0
def test_a_fault():
    f = cupy.RawKernel('extern "C" __global__ void f(float* y) { y[1 << 20] = 1; }', "f")
    f((1,), (1,), (cupy.zeros(4, "f4"),))
def test_behind_it(): cupy.zeros(3)
"""


@pytest.mark.driver
def test_a_test_that_leaves_something_behind_fails_where_it_does(tmp_path):
    (tmp_path / "test_leaving.py").write_text(LEAVING)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "--rootdir", tmp_path, tmp_path],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    said = [line for line in done.stdout.splitlines() if line.startswith(("left behind", "the GPU is lost", "not run"))]
    assert [line.partition(":")[0] for line in said] == [
        "left behind as the current ones",
        "the GPU is lost to this process",
        "not run",
    ], done.stdout + done.stderr
    assert said[2].endswith("test_leaving.py::test_a_fault") and "PTX line" in done.stdout and "3 passed" in done.stdout
