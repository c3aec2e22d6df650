"""The adapter's promises."""

import unittest

import numpy as np
import pytest
from reference_run import model, node, ort_run

from gpu_runtime import onnx_backend

TOLERANCE = {"rtol": 2e-3, "atol": 2e-3}


def test_run_model_takes_a_list_or_names():
    proto = model([node("Relu", "x", "y"), node("Sigmoid", "x", "z")], {"x": (1, 3, 4, 5)}, "y z")
    x = np.random.default_rng(0).normal(size=(1, 3, 4, 5)).astype(np.float32)
    expected = ort_run(proto, {"x": x})
    prepared = onnx_backend.prepare(proto, "CPU")
    for given in ([x], (x,), {"x": x}, x):
        y, z = prepared.run(given)
        np.testing.assert_allclose(y, expected["y"], **TOLERANCE)
        np.testing.assert_allclose(z, expected["z"], **TOLERANCE)
    assert prepared.run([x])["z"].dtype == np.float32
    np.testing.assert_allclose(onnx_backend.run_model(proto, [x]).y, expected["y"], **TOLERANCE)


def test_weights_that_are_inputs_are_constants_of_each_engine():
    rng = np.random.default_rng(0)
    proto = model([node("Conv", "x w b", "y", pads=(1, 1, 1, 1))], {"x": (1, 4, 5, 5), "w": (8, 4, 3, 3), "b": (8,)}, "y")
    prepared = onnx_backend.prepare(proto)
    x, w, b = (rng.uniform(-1, 1, shape).astype(np.float32) for shape in ((1, 4, 5, 5), (8, 4, 3, 3), (8,)))
    for weights in (w, 2 * w, w):
        np.testing.assert_allclose(
            prepared.run([x, weights, b]).y, ort_run(proto, {"x": x, "w": weights, "b": b})["y"], rtol=5e-3, atol=5e-3
        )
    assert len(prepared._contexts) == 2


def test_run_node():
    x = np.float32([[1, -2, 3]])
    np.testing.assert_array_equal(onnx_backend.run_node(node("Relu", "x", "y"), [x])[0], [[1, 0, 3]])
    add, half = node("Add", "x x", "y"), x.astype(np.float16)
    assert onnx_backend.run_node(add, [half, half], opset_version=14).y.dtype == np.float16
    assert onnx_backend.run_node(add, [half, half], outputs_info=[(np.float16, (1, 3))])[0].tolist() == [[2, -4, 6]]
    with pytest.raises(ValueError, match=r"inputs: expected 2 \(x, w\), got 1"):
        onnx_backend.run_node(node("MatMul", "x w", "y"), [x])


def test_sizes_may_be_known_at_the_first_run():
    proto = model([node("Abs", "x", "y")], {"x": ("n", 3)}, "y")
    prepared = onnx_backend.prepare(proto)
    for n in (2, 5):
        assert prepared.run([-np.ones((n, 3), np.float32)]).y.tolist() == [[1, 1, 1]] * n


def test_what_cannot_be_built_is_skipped_with_the_reason():
    proto = model([node("NonZero", "x", "y")], {"x": (2, 3)}, "y")
    with pytest.raises(unittest.SkipTest, match="(?s)^1 node of unsupported type.*NonZero y"):
        onnx_backend.prepare(proto)


def test_wrong_inputs():
    prepared = onnx_backend.prepare(model([node("Abs", "x", "y")], {"x": (2, 3)}, "y"))
    for given, message in (
        ([np.zeros((2, 3), np.float32)] * 2, r"expected 1 \(x\), got 2"),
        ({"z": np.zeros((2, 3), np.float32)}, r"expected the names \['x'\], got \['z'\]"),
        ([np.zeros((2, 3))], "expected dtype float32, got float64"),
    ):
        with pytest.raises(ValueError, match=message):
            prepared.run(given)


def test_devices():
    assert onnx_backend.supports_device("CPU") and not onnx_backend.supports_device("CUDA:7")
    with pytest.raises(ValueError, match="expected CPU or, where there is a GPU, CUDA, got 'TPU'"):
        onnx_backend.prepare(model([node("Abs", "x", "y")], {"x": (2, 3)}, "y"), "TPU")
