"""Contexts and engines as Python objects: what they say of themselves, examples in their docstrings, drops, forks, copies."""

import copy
import doctest
import gc
import io
import pickle
import shutil
import subprocess
import sys
import warnings
from dataclasses import FrozenInstanceError

import numpy as np
import pytest

import gpu_runtime as gr
from cuda_kernels import device as devices
from gpu_runtime import engine as engine_module
from gpu_runtime import inference_session, pipeline
from gpu_runtime.runtime import context as context_module
from gpu_runtime.runtime import future
from gpu_runtime.runtime.findings import Solution
from tests.reference_run import model, node

SHAPE = (2, 16, 6, 6)
X = np.ones(SHAPE, np.float32)


@pytest.fixture(scope="module")
def engine():
    w = np.ones((16, 16, 1, 1), np.float32) / 16
    w[:, 2::4] = w[:, 3::4] = 0
    proto = model([node("Conv", "x w", "y")], {"x": SHAPE}, "y", {"w": w})
    proto.graph.name = "net"
    return gr.build(proto, sparsity="enable", device="a100")


@pytest.fixture(scope="module")
def path(engine, tmp_path_factory):
    path = tmp_path_factory.mktemp("engine") / "e.engine"
    engine.save(path)
    return path


def test_an_engine_says_what_it_is(engine):
    text = repr(engine)
    assert text.startswith("Engine('net' for A100-SXM4-80GB: x 2x16x6x6 float32 -> y 2x16x6x6 float32; ")
    assert f"; {len(engine.plan.steps)} launches, 0 of 1 layers with weights sparse, " in text
    assert text.endswith("us predicted(a100))")


def test_many_inputs_are_not_all_shown():
    names = [f"input_{i}" for i in range(9)]
    proto = model([node("Concat", " ".join(names), "y", axis=1)], dict.fromkeys(names, (1, 8, 2, 2)), "y")
    text = repr(gr.build(proto, device="a100"))
    assert "input_2 1x8x2x2 float32, ... -> y 1x72x2x2 float32;" in text and "input_3" not in text


def test_a_repr_rounds_numbers_and_the_record_does_not():
    solution = Solution(0.2400000000000091, "proven", "")
    assert "=0.24," in repr(solution) and solution.total_us == 0.2400000000000091


def test_what_an_engine_takes_is_a_small_record(engine):
    (x,), (y,) = engine.inputs, engine.outputs
    assert x == gr.TensorSpec("x", SHAPE, np.dtype(np.float32)) and str(y) == "y 2x16x6x6 float32"
    assert x.dtype == np.float32 and np.zeros(x.shape, x.dtype).nbytes == X.nbytes
    with pytest.raises(FrozenInstanceError):
        x.shape = ()


def test_a_context_says_what_it_is(engine):
    with engine.context(device="emulator") as ctx:
        text = repr(ctx)
    assert text.startswith("<Context of 'net' in the emulator: A100-SXM4-80GB, ") and "KiB" in text
    assert repr(ctx) == "<Context of 'net', closed>"


@pytest.mark.parametrize("module", [context_module, engine_module, future, inference_session], ids=lambda m: m.__name__)
def test_examples_run(module, engine):
    found = doctest.testmod(module, extraglobs={"engine": engine, "x": X, "np": np, "gr": gr})
    assert found.attempted >= 2 and not found.failed


@pytest.mark.slow
def test_the_examples_of_the_package_and_of_build_run(tmp_path, monkeypatch):
    shutil.copy("benchmarks/digits/digits_sparse.onnx", tmp_path / "model.onnx")
    monkeypatch.chdir(tmp_path)
    found = doctest.testmod(gr, extraglobs={"x": np.zeros((1, 1, 8, 8), np.float32)})
    assert found.attempted == 4 and not found.failed and (tmp_path / "model.engine").exists()
    found = doctest.testmod(pipeline)
    assert found.attempted == 1 and not found.failed


def test_an_engine_goes_to_files_and_bytes(engine, path):
    file = io.BytesIO()
    engine.save(file)
    assert file.getvalue() == path.read_bytes() and gr.load(file.getvalue()).record == gr.load(path).record


@pytest.mark.slow
def test_a_dropped_context_warns_and_a_closed_one_does_not(engine):
    ctx = engine.context(device="emulator")
    with pytest.warns(ResourceWarning, match="a context was deleted without close"):
        del ctx
        gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with engine.context(device="emulator") as ctx:
            ctx.run({"x": X})
        with gr.InferenceSession(engine) as session:
            session.run(None, {"x": X})
        gr.InferenceSession(engine)  # as onnxruntime's, it closes by itself
        del ctx, session
        gc.collect()


def test_a_context_is_not_copied(engine):
    with engine.context(device="emulator") as ctx:
        for copied in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(TypeError, match="a context cannot be copied or sent to another process"):
                copied(ctx)


def test_without_a_gpu_a_context_on_one_says_why(engine, monkeypatch):
    """Whatever CuPy says; InferenceSession warns of a provider that is not there, and goes on."""
    monkeypatch.setattr(devices, "why_no_gpu", lambda: "compute capability 7.5 is below 8.0")
    with pytest.raises(gr.EngineError) as caught:
        engine.context(device="cuda:0")
    assert str(caught.value) == (
        "device: no GPU can be used here: compute capability 7.5 is below 8.0; device='emulator' runs the same kernels "
        "on the CPU"
    )


def test_what_is_no_device(engine, monkeypatch):
    """A number on a machine without a GPU is answered as "cuda" is."""
    for wrong in ("cpu", "cuda:", "cuda:x", "cuda:-1", "emulator:0", 0):
        with pytest.raises(ValueError, match="device: expected None, 'cuda', 'cuda:N' with the number of a GPU, or 'emulator'"):
            engine.context(device=wrong)
    monkeypatch.setattr(devices, "num_gpus", lambda: 0)
    monkeypatch.setattr(devices, "why_no_gpu", lambda: "the CUDA driver reports no device")
    with pytest.raises(gr.EngineError, match="no GPU can be used here: the CUDA driver reports no device"):
        engine.context(device="cuda:1")


FORK = """
import os, sys, threading, numpy as np, gpu_runtime as gr
ctx = gr.load(sys.argv[1]).context(device="emulator")
x = np.ones(ctx.engine.inputs[0].shape, np.float32)
y = ctx.run({"x": x})["y"]
hold, held = threading.Event(), threading.Event()
def work():  # a thread has the context's lock while the process is forked
    with ctx._lock:
        held.set(), hold.wait()
thread = threading.Thread(target=work); thread.start(); held.wait()
if not (pid := os.fork()):
    try:
        ctx.run({"x": x})
    except RuntimeError as e:
        print(e, flush=True)
    try:
        ctx.run_async({"x": x})
    except RuntimeError as e:
        print(type(e).__name__, flush=True)
    ctx.close()
    with gr.load(sys.argv[1]).context(device="emulator") as own:
        print(bool((own.run({"x": x})["y"] == y).all()), flush=True)
    os._exit(0)
print(os.waitpid(pid, 0)[1]); hold.set(); thread.join()
with ctx:
    assert (ctx.run({"x": x})["y"] == y).all()
"""


def test_a_context_does_not_cross_a_fork(path):
    """It says so, at once, whatever its threads were doing; a context of the child's own works, and the parent's goes on."""
    command = [sys.executable, "-W", "error::ResourceWarning", "-c", FORK, path]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    first, second, own, status = run.stdout.splitlines()
    assert first.startswith("this context was made before this process was forked") and "'spawn'" in first
    assert (second, own, status, run.stderr) == ("RuntimeError", "True", "0", "")
