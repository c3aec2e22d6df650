"""The digits networks as committed: small, FP16, dense or 2:4 as named, and right about held-out digits."""

import importlib
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper

from gpu_runtime.frontend.summaries import pattern
from gpu_runtime.pruning.prune import prune

DIGITS = Path(__file__).resolve().parents[2] / "benchmarks" / "digits"
DENSE, SPARSE = DIGITS / "digits_dense.onnx", DIGITS / "digits_sparse.onnx"
OPS = {"Cast", "Conv", "BatchNormalization", "Relu", "Add", "GlobalAveragePool", "Flatten", "Gemm"}
# fmt: off
CONVS = [  # K, C, R, S, stride, in the file's order
    (64, 1, 3, 3, 1),
    (64, 64, 3, 3, 1), (64, 64, 3, 3, 1),
    (128, 64, 3, 3, 2), (128, 128, 3, 3, 1), (128, 64, 1, 1, 2),
    (128, 128, 3, 3, 1), (128, 128, 3, 3, 1),
    (128, 128, 1, 1, 1), (128, 128, 3, 3, 1), (256, 128, 1, 1, 1), (256, 128, 1, 1, 1),
    (64, 256, 1, 1, 1), (64, 64, 3, 3, 1), (256, 64, 1, 1, 1),
]
# fmt: on


def weighted(path, *kinds):
    """(node, weight) of every node of these kinds."""
    graph = onnx.load(path).graph
    weights = {w.name: numpy_helper.to_array(w) for w in graph.initializer}
    return [(node, weights[node.input[1]]) for node in graph.node if node.op_type in kinds]


def share_24(weight):
    """Share of groups of 4 consecutive input channels with at most 2 non-zeros."""
    groups = weight.reshape(weight.shape[0], weight.shape[1] // 4, 4, -1)
    return float((np.count_nonzero(groups, axis=2) <= 2).mean())


@pytest.mark.parametrize("path", [DENSE, SPARSE], ids=lambda path: path.stem)
def test_file(path):
    assert path.stat().st_size < 2_000_000
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    assert {node.op_type for node in model.graph.node} == OPS
    assert all(w.data_type == onnx.TensorProto.FLOAT16 for w in model.graph.initializer)
    assert all(np.isfinite(numpy_helper.to_array(w)).all() for w in model.graph.initializer)
    strides = {n.name: a.ints[0] for n in model.graph.node for a in n.attribute if a.name == "strides"}
    assert [(*w.shape, strides[node.name]) for node, w in weighted(path, "Conv")] == CONVS
    assert [w.shape for _, w in weighted(path, "Gemm")] == [(10, 256)]


def test_sparse_is_24_and_dense_is_not():
    pairs = zip(weighted(DENSE, "Conv", "Gemm"), weighted(SPARSE, "Conv", "Gemm"), strict=True)
    for (node, dense), (_, sparse) in pairs:
        if dense.shape[1] % 4 == 0:
            assert share_24(sparse) == 1, node.name
            assert share_24(dense) < 0.5, node.name
            assert np.count_nonzero(sparse) > 0.4 * sparse.size, node.name


def test_sparse_stays_24_after_folding():
    graph = onnx.load(SPARSE).graph
    values = {w.name: numpy_helper.to_array(w).astype(np.float32) for w in graph.initializer}
    norms = {node.input[0]: node for node in graph.node if node.op_type == "BatchNormalization"}
    for node, weight in weighted(SPARSE, "Conv"):
        scale, _, _, var = (values[name] for name in norms[node.output[0]].input[1:])
        epsilon = norms[node.output[0]].attribute[0].f
        folded = weight * (scale / np.sqrt(var + epsilon))[:, None, None, None]
        assert np.isfinite(folded.astype(np.float16)).all(), node.name
        if weight.shape[1] % 4 == 0:
            assert share_24(folded.astype(np.float16)) == 1, node.name


def test_heldout():
    with np.load(DIGITS / "heldout.npz") as heldout:
        x, y = heldout["x"], heldout["y"]
    assert x.shape == (360, 1, 8, 8) and x.dtype == np.float32 and x.min() == 0 and x.max() == 1
    assert y.shape == (360,) and y.dtype == np.int64 and set(y.tolist()) == set(range(10))
    right = {}
    for path in (DENSE, SPARSE):
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        logits = session.run(["logits"], {"x": x})[0]
        assert logits.shape == (360, 10) and logits.dtype == np.float32
        right[path] = (logits.argmax(1) == y).mean()
    assert right[DENSE] >= 0.98
    assert right[SPARSE] >= right[DENSE] - 0.007


@pytest.mark.slow
def test_fine_tuning_holds_the_zeros_fixed(tmp_path):
    """The recipe of docs/pruning.md, for an epoch over some of the images."""
    torch = pytest.importorskip("torch", reason="the extra `train` is not installed: no torch")
    pytest.importorskip("sklearn", reason="the extra `train` is not installed: no scikit-learn")
    sys.path.insert(0, str(DIGITS))
    try:
        finetune = importlib.import_module("finetune")
    finally:
        sys.path.remove(str(DIGITS))
    (tmp_path / "pruned.onnx").write_bytes(prune(DENSE, permute=True).model)
    model = finetune.Torch()
    hold = finetune.Masks(finetune.parameters(model), tmp_path / "pruned.onnx")
    assert len(hold.zeros) == 15 and all(float(zero.float().mean()) == pytest.approx(0.5, abs=0.01) for _, zero in hold.zeros)
    with np.load(DIGITS / "heldout.npz") as heldout:
        x, y = (torch.from_numpy(heldout[name]) for name in ("x", "y"))
    before = [weight.detach().clone() for weight, _ in hold.zeros]
    finetune.train(model, x, y, epochs=1, rate=0.02, after_step=hold)
    for (weight, zero), old in zip(hold.zeros, before, strict=True):
        assert not weight.detach()[zero].any() and (weight.detach() != old).any()
    with pytest.raises(ValueError, match=r"expected a weight 'layer' of shape \(3,\), got none; it has "):
        finetune.Masks({"layer": torch.zeros(3)}, tmp_path / "pruned.onnx")
    finetune.save_onnx(model, tmp_path / "tuned.onnx")
    assert all(row["verdict"] == "2:4" for row in pattern.inspect(tmp_path / "tuned.onnx") if row["fit"] is not None)
