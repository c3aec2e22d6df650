"""What a process imports before it works, and how long that takes: nothing that only another call would need."""

import json
import os
import resource
import subprocess
import sys

import numpy as np
import pytest

import gpu_runtime as gr
from cuda_kernels.device import has_driver
from tests.conftest import DIGITS, ROOT

# As in an installation: with the bytecode of every module.
ENV = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"} | {"PYTHONPATH": str(ROOT)}
LOAD = "import gpu_runtime as gr; gr.load"
BUILD = "import gpu_runtime as gr; gr.build"
WHOLE = f"{BUILD}({str(DIGITS / 'digits_sparse.onnx')!r}, sparsity='enable', shapes={{'x': (120, 1, 8, 8)}}, device='a100')"
RUN = "from gpu_runtime.cli import main; main('run digits.engine --input x=x.npy --output out.npz'.split())"
ONNX = ("onnx", "onnx_ir", "google.protobuf", "onnxscript")
PLANNER = ("gpu_runtime.planning", "gpu_runtime.rewrites", "gpu_runtime.explain", "tactics.planner", "tactics.measure")
PARSER = tuple(f"cuda_kernels.emulator.{name}" for name in ("parse", "decode", "decoder", "opcodes", "registers"))
ELSEWHERE = (
    "sympy.core",
    "scipy",
    "cupy",
    "numpy.ma",
    "benchmarks",
    "tactics.measure.worker",
    "gpu_runtime.doctor",
    "gpu_runtime.explain.autotuning",
)
LAUNCHES = ("cuda_kernels.launch", "cuda_kernels.emulator")
# Code that is run -> the modules that it does not import.
WITHOUT = {
    LOAD: (*ELSEWHERE, *ONNX, *PLANNER, "tactics.families", "tactics.candidates", *LAUNCHES, "tempfile", "difflib"),
    BUILD: (*ELSEWHERE, *ONNX, *PLANNER, "gpu_runtime.building.build", "tactics.families", *LAUNCHES),
    WHOLE: (*ELSEWHERE, *LAUNCHES),
    RUN: (*ELSEWHERE, *ONNX, *PLANNER, *PARSER),
}
# Of CPU; on a quiet machine 0.2, 0.3 and 0.9. Most of RUN are 16 emulated launches: 2.5 where other work shares the cores.
SECONDS = {LOAD: 0.4, BUILD: 0.8, RUN: 3.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The digits engine, an input, and nothing left to compile or to decode."""
    folder = tmp_path_factory.mktemp("startup")
    engine = gr.build(DIGITS / "digits_sparse.onnx", sparsity="enable", shapes={"x": (120, 1, 8, 8)}, device="a100")
    engine.save(folder / "digits.engine")
    with np.load(DIGITS / "heldout.npz") as heldout:
        np.save(folder / "x.npy", heldout["x"][:120])
    engine.context(device="emulator").close()
    return folder


def python(code: str, folder) -> str:
    env = ENV | {"PYTHONPYCACHEPREFIX": str(folder / "bytecode")}
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("code", WITHOUT, ids=["load", "build", "a whole build", "run"])
def test_only_what_is_needed_is_imported(folder, code):
    told = f"import sys, json\ntry:\n    {code}\nfinally:\n    print(json.dumps(sorted(sys.modules)))"
    modules = json.loads(python(told, folder).splitlines()[-1])
    unwanted = [n for n in WITHOUT[code] if n != "cupy" or not has_driver()]
    found = [m for m in modules if any(m == n or m.startswith(f"{n}.") for n in unwanted)]
    assert not found


@pytest.mark.slow
@pytest.mark.parametrize("code", SECONDS, ids=["load", "build", "run"])
def test_it_begins_at_once(folder, code):
    """CPU seconds of the whole process, the best of a few: the wall clock of a busy machine says little."""
    best = 9.0
    for _ in range(6):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        python(code, folder)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        best = min(best, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        if best < SECONDS[code]:
            break
    assert best < SECONDS[code]
