"""Scripts end without a word, whatever of ours is still alive: nothing that they did not close is complained of by Python."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import gpu_runtime as gr
from tests.reference_run import model, node

BEGIN = """
import atexit, gc, sys, threading, weakref, numpy as np, gpu_runtime as gr
engine = gr.load(sys.argv[1])
x = np.ones(engine.inputs[0].shape, np.float32)
open_one = lambda: engine.context(device="emulator")
"""
# Name of the thing that a script leaves behind -> the script's last lines. Each runs in a process of its own.
LEFT = {
    "a context": "ctx = open_one(); print(ctx.run({'x': x})['y'].shape)",
    "a context that has not run": "ctx = open_one()",
    "a session": "s = gr.InferenceSession(engine, providers=['CPUExecutionProvider']); s.run(None, {'x': x})",
    "futures of pending runs": "ctx = open_one(); futures = [ctx.run_async({'x': x}) for _ in range(8)]",
    "a future whose context is forgotten": "gc.disable(); future = open_one().run_async({'x': x})",
    "a circle": "a = [open_one()]; a.append(a); gc.disable(); del a",
    "an exit code": "ctx = open_one(); sys.exit(3)",
    "an owner that closes it in __del__": """
class Owner:
    def __init__(self): self.ctx = open_one()
    def __del__(self): self.ctx.close()
owner = Owner(); owner.ctx.run({'x': x})""",
    "an owner whose finalizer closes it": """
class Owner: pass
owner, ctx = Owner(), open_one()
weakref.finalize(owner, ctx.close)""",
    "a run at exit": "ctx = open_one(); atexit.register(lambda: print(ctx.run({'x': x})['y'].shape))",
    "a thread that still runs it": """
def work():
    for _ in range(20): ctx.run({'x': x})
ctx = open_one(); threading.Thread(target=work).start()""",
    "a daemon thread that never stops": """
def work():
    while True: ctx.run({'x': x}); ran.set()
ctx, ran = open_one(), threading.Event(); threading.Thread(target=work, daemon=True).start(); ran.wait()""",
}


def built(folder: Path, device: str | None) -> Path:
    w = np.ones((16, 16, 1, 1), np.float32) / 16
    gr.build(model([node("Conv", "x w", "y")], {"x": (2, 16, 6, 6)}, "y", {"w": w}), device=device).save(folder / "e.engine")
    return folder / "e.engine"


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    return built(tmp_path_factory.mktemp("engine"), "a100")


def ended(path: Path, script: str, *options: str) -> subprocess.CompletedProcess:
    command = [sys.executable, *options, "-c", BEGIN + script, path]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
@pytest.mark.parametrize("left", LEFT)
def test_a_script_ends_without_a_word(path, left):
    """Nor with one where every ResourceWarning is an error: what lives as long as the process was not dropped too early."""
    ran = ended(path, LEFT[left], "-W", "error::ResourceWarning")
    assert (ran.stderr, ran.returncode) == ("", 3 if "exit code" in left else 0)


def test_a_script_that_fails_says_that_and_no_more(path):
    ran = ended(path, "ctx = open_one(); future = ctx.run_async({'x': x})\nraise KeyError('mine')")
    assert ran.returncode == 1 and ran.stderr.startswith("Traceback") and ran.stderr.endswith("KeyError: 'mine'\n")
    assert "gnored" not in ran.stderr and ran.stderr.count("Traceback") == 1


def test_a_context_that_is_dropped_before_the_end_still_warns(path):
    ran = ended(path, "ctx = open_one(); del ctx; gc.collect()", "-W", "default")
    assert "ResourceWarning: a context was deleted without close()" in ran.stderr


@pytest.mark.gpu
def test_on_a_gpu_too(tmp_path):
    path = built(tmp_path, None)
    for left, script in LEFT.items():
        ran = ended(path, script.replace("['CPUExecutionProvider']", "None").replace("open_one()", "engine.context()"))
        assert (ran.stderr, ran.returncode) == ("", 3 if "exit code" in left else 0), left
