"""The real `polygraphy run`, which compares gpu_runtime's runner with onnxruntime's."""

import os
import subprocess
import sys
import tomllib
from importlib.metadata import entry_points

import numpy as np
import onnx
import pytest

from tests.conftest import ROOT
from tests.reference_run import model, node

pytest.importorskip("polygraphy", reason="polygraphy is not installed: it is part of the extra `test`")
GROUP = "polygraphy.run.plugins"


@pytest.fixture
def run(tmp_path, made):
    """run(args) -> (exit code, what `polygraphy run` printed), in a folder with the files of `made`."""
    for name, data in made.items():
        (tmp_path / name).write_bytes(data)
    path = [str(ROOT), *sys.path]
    if not entry_points(group=GROUP, name="gpu-runtime"):  # installed before there was one: as pyproject has it
        declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][GROUP]
        info = tmp_path / "site" / "declared-0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: declared\nVersion: 0\n")
        (info / "entry_points.txt").write_text("\n".join([f"[{GROUP}]", *(f"{k} = {v}" for k, v in declared.items())]))
        path.append(str(info.parent))

    def polygraphy(args: str) -> tuple[int, str]:
        line = [sys.executable, "-c", "import sys, polygraphy.tools as t; sys.exit(t.main())", "run", *args.split()]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path)), "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(line, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
        return done.returncode, done.stdout + done.stderr

    return polygraphy


@pytest.mark.slow
def test_compared_with_onnxruntime(run):
    code, out = run("tiny.onnx --onnxrt --gpu-runtime --atol 2e-2 --rtol 1e-2")
    assert code == 0, out
    assert "onnxrt-runner-N0" in out and "gpu-runtime-runner-N0" in out and "Pass Rate: 100.00%" in out


@pytest.mark.slow
def test_a_difference_fails(run, tmp_path):
    """The engine is that of another model."""
    w = {"w1": np.ones((8, 8, 1, 1), np.float32)}
    onnx.save(model([node("Conv", "x w1", "y")], {"x": (1, 8, 6, 6)}, "y", w), tmp_path / "other.onnx")
    code, out = run("other.onnx --onnxrt --gpu-runtime --gpu-runtime-engine tiny.engine --atol 2e-2 --rtol 1e-2")
    assert code != 0 and "FAILED" in out and "gpu-runtime-runner-N0" in out


@pytest.mark.slow
def test_shapes_and_options_reach_the_build(run, tmp_path):
    code, out = run(
        "sparse.onnx --onnxrt --gpu-runtime --gpu-runtime-sparsity enable --gpu-runtime-device a100 --input-shapes x:[2,1,8,8] "
        "--atol 0.1 --rtol 2e-2 --gen-script script.py"
    )
    assert code == 0, out
    script = (tmp_path / "script.py").read_text()
    assert "GpuRuntimeRunner('sparse.onnx'" in script.replace('"', "'") or "sparse.onnx" in script
    assert "sparsity='enable'" in script and "device='a100'" in script and "(2, 1, 8, 8)" in script
    code, out = run(
        "sparse.onnx --onnxrt --gpu-runtime --gpu-runtime-sparsity enable --gpu-runtime-device a100 --input-shapes x:[2,1,8,8] "
        "--atol 0.1 --rtol 2e-2"
    )
    assert code == 0 and "Pass Rate: 100.00%" in out, out
