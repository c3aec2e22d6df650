"""Running engines needs neither onnx nor SciPy, reading plans no NVRTC, the emulator no CuPy; what is missing is one sentence
with the extra that brings it."""

import json
import os
import re
import subprocess
import sys

import pytest

from cuda_kernels.extras import EXTRAS, why_missing
from gpu_runtime.cli import COMMANDS
from tests.conftest import ROOT

# Runs programs, one after the other, in a process in which modules cannot be imported, as if they were not installed.
BLOCKED = """
import contextlib, io, json, sys
blocked, programs = json.loads(sys.argv[1])

sys.modules.update(dict.fromkeys(blocked))
from gpu_runtime.cli import main

def run(words):
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(words.split())
        except SystemExit as e:
            code = e.code
    return code, out.getvalue(), err.getvalue()

results = [run(words) for words in programs]
print(json.dumps(results))
"""
BUILD = ("onnx", "onnx_ir", "onnxscript", "scipy")
NVRTC, CUPY = ("cuda", "nvidia"), ("cupy", "cupy_backends", "pynvml")
PLANNED = "tiny.onnx --shapes=x:1x8x6x6"
RUN = "run tiny.engine --input x=x.npy --output out.npz"
EMULATED = (RUN, "doctor --emulate h200 --kernels move")
READ = (
    "inspect tiny.engine",
    "inspect tiny.engine --json --exportTrace=trace.json",
    "explain tiny.engine",
    "explain tiny.engine --what-if first=hwc8",
    "report tiny.engine -o report.html",
    "bench tiny.engine --predict",
    "triton-repo tiny.engine -o repo --name net",
    "cache list times.jsonl",
    "--help",
    "build --help",
    "--version",
)
BUILT = (
    "build tiny.onnx",
    "plan tiny.onnx --devices h200",
    "inspect tiny.onnx",
    "inspect-sparsity tiny.onnx",
    "prune tiny.onnx -o pruned.onnx",
    "compare tiny.onnx tiny.engine",
    "inspect tiny.engine --exportOnnx=seen.onnx --onnx tiny.onnx",
)


def python(files, *args: str) -> subprocess.CompletedProcess:
    """This Python in the folder `files`, which imports this tree."""
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, *args], cwd=files, env=env, capture_output=True, text=True, timeout=300)


@pytest.fixture
def without(files):
    """without(blocked modules, programs) -> program -> (exit code, stdout, stderr)."""

    def run(blocked, programs) -> dict[str, tuple[int, str, str]]:
        done = python(files, "-c", BLOCKED, json.dumps([blocked, programs]))
        assert done.returncode == 0, done.stderr
        return dict(zip(programs, json.loads(done.stdout), strict=True))

    return run


def one_sentence(result: tuple[int, str, str], module: str) -> None:
    code, out, err = result
    assert (code, out, err) == (1, "", f"error: {why_missing(module)}\n")


def test_every_command_is_tried():
    tried = {words.split()[0] for words in (*EMULATED, *READ, *BUILT)}
    assert {*COMMANDS} == {name for name in tried if not name.startswith("-")}


@pytest.mark.slow
def test_running_engines_needs_nothing_that_building_does(files, without):
    found = without(BUILD, (*EMULATED, *READ, *BUILT))
    for words in (*EMULATED, *READ):
        assert found[words][0] == 0, found[words]
    for words in BUILT:
        one_sentence(found[words], "onnx")
    assert "pip install '.[build]' in a clone" in found["build tiny.onnx"][2]
    assert not (files / "pruned.onnx").exists() and (files / "out.npz").exists()


@pytest.mark.slow
def test_the_emulator_needs_no_cupy(without):
    found = without(CUPY, (RUN, "build tiny.onnx"))
    assert [code for code, *_ in found.values()] == [0, 0]
    assert "No GPU was looked for, since CuPy is not installed: pip install '.[cuda13]' in a clone" in found[RUN][2]


@pytest.mark.slow
def test_an_installation_of_nothing_but_the_package_reads_engines(without):
    found = without((*BUILD, *NVRTC, *CUPY), (*READ, RUN, "build tiny.onnx", "doctor"))
    for words in READ:
        assert found[words][0] == 0, found[words]
    one_sentence(found[RUN], "cuda")
    one_sentence(found["build tiny.onnx"], "onnx")
    code, out, err = found["doctor"]
    assert code == 5 and why_missing("cuda") in " ".join(out.split()), err


@pytest.mark.slow
def test_plans_with_predicted_times_need_no_nvrtc(without):
    words = ("build tiny.onnx --device h200 -o own.engine", "inspect own.engine", "plan tiny.onnx --devices l4")
    found = without((*NVRTC, *CUPY), words)
    assert [code for code, *_ in found.values()] == [0, 0, 0], found
    assert "NVRTC none" in found["inspect own.engine"][1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("onnxscript", "build tiny.onnx"),
        ("scipy", "prune tiny.onnx -o pruned.onnx --permute"),
    ],
)
def test_a_package_that_is_asked_for_late_is_named_too(without, module, words):
    code, _, err = without([module], [words])[words]
    assert code == 1 and err.endswith(f"error: {why_missing(module)}\n")


@pytest.mark.parametrize(
    ("code", "module"),
    [
        ("import gpu_runtime as gr; gr.build('tiny.onnx')", "onnx"),
        ("from gpu_runtime import plan; plan('tiny.onnx', 'l4')", "onnx"),
        ("import gpu_runtime as gr; gr.load('tiny.engine').context(device='cuda')", "cupy"),
    ],
)
def test_python_says_the_same(files, code, module):
    hook = BLOCKED.partition("from gpu_runtime.cli")[0]
    done = python(files, "-c", hook + code, json.dumps([["onnx", "cupy"], []]))
    assert done.returncode == 1 and done.stderr.endswith(f"ModuleNotFoundError: {why_missing(module)}\n"), done.stderr


def test_the_table_names_what_each_extra_holds():
    """Every module of the table is brought by the extra that its sentence names."""
    import tomllib

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for package, cure in EXTRAS.values():
        named = [name for name in extras if re.search(rf"\b{name}\b", cure)]
        assert named or package == "PyTorch", "which has an index for each GPU"
        for name in named:
            brought = [line.lower().partition("-cuda1")[0] for line in extras[name]]
            assert any(line.startswith(package.lower()) for line in brought), (package, name)
