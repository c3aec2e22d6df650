"""Resize by sizes, in every mode: the lowered network and its tables against onnx's reference and onnxruntime."""

import itertools
import random
from fractions import Fraction
from functools import cache

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx.reference import ReferenceEvaluator

from tactics.problems.gather import COORDINATES, ROUNDINGS, nearest
from tests.reference_run import network, node, ort_run, run

pytestmark = pytest.mark.slow
SIZES = range(1, 41)
BOTH_ROUND = (9, 39)  # (32 + 0.5) * 9 / 39 - 0.5 is 7, which both witnesses compute as less: floor takes another pixel


def resize(how: dict, shape, rank: int = 1) -> onnx.ModelProto:
    info = onnx.helper.make_tensor_value_info
    crop = how["coordinate_transformation_mode"] == "tf_crop_and_resize"
    inputs = [info("x", onnx.TensorProto.FLOAT, shape), info("z", onnx.TensorProto.INT64, [rank])]
    roi = onnx.numpy_helper.from_array(np.float32([0] * rank + [1] * rank), "r")
    graph = onnx.helper.make_graph(
        [node("Resize", f"x {'r' if crop else '_'} _ z", "y", **how)],
        "g",
        inputs,
        [info("y", onnx.TensorProto.FLOAT, None)],
        [roi] if crop else [],
    )
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 19)], ir_version=9)


def fixed(proto: onnx.ModelProto, sizes) -> onnx.ModelProto:
    """The model with its sizes as a constant."""
    proto = onnx.ModelProto.FromString(proto.SerializeToString())
    del proto.graph.input[1]
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.int64(sizes), "z"))
    return proto


@cache
def sessions(turn: str, rounding: str):
    proto = resize({"mode": "nearest", "coordinate_transformation_mode": turn, "nearest_mode": rounding}, ["n"])
    options = ort.SessionOptions()
    options.log_severity_level = 3
    session = ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return ReferenceEvaluator(proto), session


@pytest.mark.sample(6)
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("turn", COORDINATES)
def test_nearest_takes_the_pixels_of_the_witnesses(turn, rounding):
    """Each pixel is that of both where they agree. Elsewhere one of them rounded a coordinate off the whole or half number
    that it is, and ours is the other's."""
    witness, session = sessions(turn, rounding)
    wrong = []
    for size, out in itertools.product(SIZES, SIZES):
        feeds = {"x": np.arange(size, dtype=np.float32), "z": np.array([out])}
        ours = np.array(nearest(size, out, Fraction(out, size), turn, rounding))
        first, second = witness.run(None, feeds)[0], session.run(None, feeds)[0]
        if not ((ours == first) | (ours == second)).all():
            wrong.append((size, out))
    halves = rounding == "floor" and "half_pixel" in turn
    assert wrong == ([BOTH_ROUND] if halves else [])


@pytest.mark.parametrize("size, out", [(7, 2), (7, 4), (13, 8), (14, 8), (21, 12)])
def test_ties_by_sizes_are_those_of_the_reference(size, out):
    how = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "round_prefer_ceil"}
    proto = fixed(resize(how, [1, 1, 1, size], 4), [1, 1, 1, out])
    feeds = {"x": np.arange(size, dtype=np.float32).reshape(1, 1, 1, size)}
    expected = ReferenceEvaluator(proto).run(None, feeds)[0]
    assert np.array_equal(run(network(proto), feeds)["y"], expected)
    assert np.array_equal(ort_run(proto, feeds)["y"], expected)


@pytest.mark.parametrize("turn", COORDINATES)
@pytest.mark.parametrize("mode", ["linear", "cubic"])
def test_interpolated_pixels_are_those_of_the_reference(mode, turn):
    rng = random.Random(f"{mode} {turn}")
    for _ in range(10):
        size, out = rng.choice(SIZES), rng.choice(SIZES[1:])  # for one pixel the reference contradicts ONNX's text
        proto = fixed(resize({"mode": mode, "coordinate_transformation_mode": turn}, [1, 1, 2, size], 4), [1, 1, 2, out])
        feeds = {"x": np.random.default_rng(size).uniform(-1, 1, (1, 1, 2, size)).astype(np.float32)}
        expected = ReferenceEvaluator(proto).run(None, feeds)[0]
        assert np.abs(run(network(proto), feeds)["y"] - expected).max() < 2e-5, (size, out)
