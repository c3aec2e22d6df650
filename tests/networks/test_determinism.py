"""The same model, flags and times give the same bytes: the engine's, the log's and the layer information's."""

import os
import subprocess
import sys

import onnx
import pytest

from benchmarks.networks import Net
from tests.conftest import DIGITS, ROOT


def branches() -> onnx.ModelProto:
    """Merged siblings, a residual that either side may take, a Concat in place and a tie between equal branches."""
    n = Net("branches", (1, 32, 12, 12))
    left, right = n.relu(n.conv("x", "left", 32, 1), "left_relu"), n.relu(n.conv("x", "right", 32, 1), "right_relu")
    y = n.relu(n.add("Add", [n.conv(left, "a", 32), n.conv(right, "b", 32)], "add", 32), "add_relu")
    return n.finish(n.conv(n.add("Concat", [y, left, right], "cat", 96, axis=1), "last", 16, 1))


def built(model, folder, seed: int, *more: str) -> tuple[bytes, bytes, bytes]:
    """(engine, what was printed, layer information) of a build in a process of its own."""
    folder.mkdir()
    line = [sys.executable, "-m", "gpu_runtime", "build", str(model), "-o", "m.engine", "--device=h200", "--sparsity=force"]
    line += ["--verbose", "--exportLayerInfo=info.json", *more]
    env = os.environ | {"PYTHONHASHSEED": str(seed), "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(line, cwd=folder, env=env, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    return (folder / "m.engine").read_bytes(), done.stdout, (folder / "info.json").read_bytes()


def same(model, tmp_path, seeds, *more: str) -> None:
    first = built(model, tmp_path / "first", 0, *more)
    assert b"Autotuning format combination" in first[1]
    for seed in seeds:
        for what, a, b in zip(
            ("engine", "log", "layer information"), first, built(model, tmp_path / str(seed), seed, *more), strict=True
        ):
            assert a == b, f"{what} differs with hash seed {seed}"


@pytest.mark.slow
def test_two_processes_with_other_hash_seeds_agree(tmp_path):
    onnx.save(branches(), tmp_path / "m.onnx")
    same(tmp_path / "m.onnx", tmp_path, [1])


@pytest.mark.full
def test_ten_processes_with_other_hash_seeds_agree(tmp_path):
    same(DIGITS / "digits_sparse.onnx", tmp_path, range(1, 10), "--shapes=x:2048x1x8x8")
