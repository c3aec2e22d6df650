"""Fixtures and hooks of all tests: real networks, the cases that only CI runs, the GPU, the command line."""

import gc
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest

import gpu_runtime as gr
from cuda_kernels.device import why_no_gpu
from gpu_runtime import cli as command_line
from tests.on_driver import ON_DRIVER
from tests.reference_run import model, node

ROOT = Path(__file__).parents[1]
MODELS = Path(os.environ.get("GPU_RUNTIME_MODELS", ROOT.parent / "shared" / "models"))
DIGITS = ROOT / "benchmarks" / "digits"
os.environ.pop("COLUMNS", None)  # texts are as wide as without a terminal, whichever process starts the tests


def pytest_configure():
    """Restores SIGINT: pytest-xdist's workers start with it ignored, and the processes that they start would ignore it too."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Exempts the collected tests from Python's garbage collector, which would take a third of the collection's time, and more
    during the tests.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        gc.set_threshold(10_000, 10, 100)  # caches of kernels and problems are exempted, too


@pytest.hookimpl(tryfirst=True)  # before -m looks at the marks
def pytest_collection_modifyitems(items):
    leave_to_ci(items)
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    reason = why_no_gpu() if gpu else ""
    for item in gpu:
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))
    for item in items:
        if item.get_closest_marker("driver") and not ON_DRIVER:
            item.add_marker(pytest.mark.skip(reason="runs on the emulated CUDA driver: make test-driver"))


_lost: list[str] = []  # the test that lost this process's GPU


@pytest.fixture(autouse=True)
def gpu_left_as_found(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test on a GPU that leaves a fault, another device or another stream behind. After a fault, later tests on the GPU
    fail with one line, since their results would mean nothing.
    """
    if not any(request.node.get_closest_marker(name) for name in ("gpu", "driver")):
        yield
        return
    if _lost:
        pytest.fail(f"not run: the GPU was lost to this process by {_lost[0]}", pytrace=False)
    yield
    if "cupy" not in sys.modules:
        return
    runtime, stream = sys.modules["cupy"].cuda.runtime, sys.modules["cupy"].cuda.get_current_stream()
    try:
        runtime.deviceSynchronize()
    except RuntimeError as e:
        _lost.append(request.node.nodeid)
        pytest.fail(f"the GPU is lost to this process: {e}", pytrace=False)
    if runtime.getDevice() != 0 or stream.ptr != 0:
        where = f"device {runtime.getDevice()}, stream {stream.ptr:#x}"
        runtime.setDevice(0)
        sys.modules["cupy"].cuda.Stream.null.use()
        pytest.fail(f"left behind as the current ones: {where}; expected device 0 and its default stream", pytrace=False)


def leave_to_ci(items: list[pytest.Item]) -> None:
    """Marks all but n cases of each test that is marked `sample(n)` as `full`; `long` cases do not count."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sample") and not item.get_closest_marker("long"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for found in cases.values():
        values = [{name: str(value) for name, value in item.callspec.params.items()} for item in found]
        kept = sample(values, found[0].get_closest_marker("sample").args[0])
        for i, item in enumerate(found):
            if i not in kept:
                item.add_marker("full")


def sample(cases: list[dict[str, str]], number: int) -> list[int]:
    """Returns the indices of `number` cases, each {parameter: value}, in which values occur about equally often; spread
    evenly."""
    seen: Counter[tuple[str, str]] = Counter()
    even = {i * len(cases) // number for i in range(number)}
    rest, kept = sorted(range(len(cases)), key=lambda i: (i not in even, i)), []
    while rest and len(kept) < number:
        kept.append(min(rest, key=lambda i: sum(seen[value] for value in cases[i].items())))
        rest.remove(kept[-1])
        seen.update(cases[kept[-1]].items())
    return kept


def model_path(name: str) -> Path:
    """Returns the path of a real network's file; skips the test, with the reason, if there is no such file."""
    path = MODELS / f"{name}.onnx"
    if not path.exists():
        pytest.skip(f"{path.name} not found in {MODELS}: set GPU_RUNTIME_MODELS to the folder of real networks")
    return path


@pytest.fixture(scope="module")
def small_heap() -> None:
    """Exempts all earlier objects from the garbage collector, so that it visits only the objects of this module's tests."""
    gc.collect()
    gc.freeze()


# ---- the command line, in this process


@pytest.fixture
def cli(tmp_path, monkeypatch, capsys):
    """Returns a function: cli("build tiny.onnx") -> (exit code, stdout, stderr), run in a folder with the files of `made`."""
    monkeypatch.chdir(tmp_path)

    def run(*args: str) -> tuple[int | str | None, str, str]:
        words = [word for arg in args for word in arg.split()]
        code: int | str | None = 0
        capsys.readouterr()
        try:
            command_line.main(words)
        except SystemExit as e:
            code = e.code
        out, err = capsys.readouterr()
        return code, out, without_progress(err)

    return run


def without_progress(err: str) -> str:
    """Returns a program's stderr without its lines on progress, which depend on the machine's speed."""
    return re.sub(r"^\[(\d+ min )?\d+ s\] .*\n", "", err, flags=re.M)


@pytest.fixture(scope="session")
def made(tmp_path_factory) -> dict[str, bytes]:
    """Returns name -> bytes of files: a model of two convolutions, its engine and input, the digits network, whose batch is
    open, and an empty timing cache.
    """
    folder = tmp_path_factory.mktemp("made")
    rng = np.random.default_rng(0)
    weights = {"w1": rng.normal(0, 0.1, (16, 8, 3, 3)), "w2": rng.normal(0, 1, (8, 16, 1, 1))}
    nodes = [
        node("Conv", "x w1", "a", name="first", pads=[1, 1, 1, 1]),
        node("Relu", "a", "b", name="act"),
        node("Conv", "b w2", "y", name="second"),
    ]
    onnx.save(
        model(nodes, {"x": (1, 8, 6, 6)}, "y", {k: w.astype(np.float32) for k, w in weights.items()}), folder / "tiny.onnx"
    )
    gr.build(folder / "tiny.onnx", device="h200").save(folder / "tiny.engine")
    np.save(folder / "x.npy", rng.uniform(-1, 1, (1, 8, 6, 6)).astype(np.float32))
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    return files | {"sparse.onnx": (DIGITS / "digits_sparse.onnx").read_bytes(), "times.jsonl": b""}


@pytest.fixture
def files(tmp_path, made) -> Path:
    for name, data in made.items():
        (tmp_path / name).write_bytes(data)
    return tmp_path
