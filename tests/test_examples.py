"""Each example runs in a test, or says at its top that none does; project metadata, and workflows beside the Makefile's."""

import ast
import os
import re
import subprocess
import sys
import tomllib

import pytest

from tests.conftest import ROOT

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
ELSEWHERE = {"ocr": "tests/test_wheel.py", "serve_ray": "tests/servers/test_ray_server.py"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_an_example_says_what_it_needs_and_where_it_runs(path):
    told = " ".join((ast.get_docstring(ast.parse(path.read_text())) or "").split())
    assert "It needs" in told and path.stem in told
    runs = ROOT / ELSEWHERE.get(path.stem, "tests/test_examples.py")
    assert ("does not run it" in told) != (path.stem in runs.read_text())


@pytest.mark.slow
def test_a_convolution_without_an_engine():
    said = subprocess.run(
        [sys.executable, "-m", "examples.sparse_conv"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert re.search(r"^y: \(8, 128, 28, 28\), .*runs (sparse|dense)", said) and "best 2:4 kernel" in said


@pytest.mark.slow
def test_the_loop_from_dense_to_sparse():
    """Without training: the network that training gives lies beside the dense one."""
    words = [sys.executable, "-m", "examples.prune_and_finetune", "--tuned", "benchmarks/digits/digits_sparse.onnx"]
    said = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    rows = {line.partition(":")[0]: re.search(r": ([\d.]+)% right, (\d+) of 16", line) for line in said[-3:]}
    right = {name: float(found[1]) for name, found in rows.items()}
    sparse = {name: int(found[2]) for name, found in rows.items()}
    assert right["pruned"] < 95 < 99 < min(right["dense"], right["tuned"])
    assert sparse["dense"] == 0 < sparse["pruned"] == sparse["tuned"]


@pytest.mark.full
def test_int8_is_as_right_as_fp16():
    pytest.importorskip("onnxruntime.quantization")
    words = [sys.executable, "-m", "examples.quantize", "l4"]
    said = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    rows = re.findall(r"^(\w+) (FP16|INT8): ([\d.]+)% .*, (\d+) layers in INT8, (\d+) sparse", said, re.M)
    assert [row[:2] for row in rows] == [(f"digits_{w}", kind) for w in ("dense", "sparse") for kind in ("FP16", "INT8")]
    assert all(float(right) > 98.5 and (int(whole) > 10) == (kind == "INT8") for _, kind, right, whole, _ in rows)
    assert int(rows[3][4]) > 8


@pytest.mark.parametrize("module", ["torch", "sklearn"])
def test_what_training_needs_is_told_before_pruning(module, tmp_path):
    """Where a package is missing: its name and the extra, and no line of results."""
    (tmp_path / f"{module}.py").write_text(f"raise ModuleNotFoundError('none', name={module!r})")
    if module == "sklearn":
        (tmp_path / "torch.py").touch()
    words = [sys.executable, "-m", "examples.prune_and_finetune"]
    path = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    run = subprocess.run(words, cwd=ROOT, env=path, capture_output=True, text=True)
    name, cure = {"torch": ("PyTorch", "training take it: pip install torch"), "sklearn": ("scikit-learn", "extra train")}[
        module
    ]
    assert run.returncode == 1 and run.stdout == "" and run.stderr.startswith(f"{name} is not installed: ")
    assert cure in run.stderr and "or give --tuned" in run.stderr


def test_the_workflow_runs_what_continuous_integration_runs():
    ours = set(re.findall(r"^part make (\S+)", (ROOT / ".ci" / "run").read_text(), re.M))
    text = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    matrix = re.search(r"target: \[(.*)\]", text)[1].split(", ")
    assert {*matrix, *re.findall(r"make (truth)", text)} == ours


def test_extras_that_hold_others_agree():
    extras = PROJECT["optional-dependencies"]
    assert extras["all"] == ["gpu-runtime[build,cuda13,compare,ray]"] and set("build cuda13 compare ray".split()) <= set(extras)
    version = re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.M)[1]
    assert version == PROJECT["version"] and PROJECT["authors"] == [{"name": "gpu_runtime"}]


def test_no_page_installs_from_an_index():
    """gpu-runtime is on none: pages install a clone or a wheel's file."""
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *EXAMPLES]
    assert not [p.name for p in pages if re.search(r"pip\S* .*install ['\"]?gpu[-_]runtime", p.read_text())]
