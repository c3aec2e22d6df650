"""Quantised models as networks of whole numbers, against onnxruntime without its optimizer."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from gpu_runtime.errors import ModelError
from tests.reference_run import model, network, node, ort_run, run

SHAPE = (2, 4, 5, 6)
ZEROS = {"int8": np.int8(-7), "uint8": np.uint8(131)}


def feeds(low=-3.0, high=3.0):
    return {"x": np.random.default_rng(0).uniform(low, high, SHAPE).astype(np.float32)}


def same(proto: onnx.ModelProto, given=None, off: float = 1e-6) -> dict[str, np.ndarray]:
    """Runs a model as a network and by onnxruntime; the outputs must agree."""
    given = given or feeds()
    got, expected = run(network(proto), given), ort_run(proto, given, optimized=False)
    for name, y in expected.items():
        assert got[name].shape == y.shape and np.abs(got[name] - y).max() <= off * max(1, np.abs(y).max()), name
    return got


@pytest.mark.parametrize("opset", [10, 13, 19, 21, 22])
@pytest.mark.parametrize("dtype", [*ZEROS, None])
def test_a_pair_rounds_and_saturates_as_onnx_says(opset, dtype):
    zero = {} if dtype is None else {"z": ZEROS[dtype]}
    names = "s z" if zero else "s"
    nodes = [node("QuantizeLinear", f"x {names}", "q"), node("DequantizeLinear", f"q {names}", "y")]
    got = same(model(nodes, {"x": SHAPE}, "y", {"s": np.float32(0.015625), **zero}, opset=opset))
    assert len(np.unique(got["y"])) > 90


def test_halves_round_to_even():
    proto = model([node("QuantizeLinear", "x s z", "q"), node("DequantizeLinear", "q s z", "y")], {"x": (8,)}, "y", {
        "s": np.float32(0.5), "z": np.int8(1)})  # fmt: skip
    got = same(proto, {"x": np.array([0.25, 0.75, 1.25, -0.25, -0.75, 63.25, 100, -100], np.float32)})
    assert got["y"].tolist() == [0.0, 1.0, 1.0, 0.0, -1.0, 63.0, 63.0, -64.5]


@pytest.mark.parametrize("axis", [1, -1, 2])
def test_a_scale_for_each_index_of_an_axis(axis):
    size, rng = SHAPE[axis], np.random.default_rng(1)
    weights = {"s": rng.uniform(0.01, 0.1, size).astype(np.float32), "z": rng.integers(0, 255, size).astype(np.uint8)}
    nodes = [node("QuantizeLinear", "x s z", "q", axis=axis), node("DequantizeLinear", "q s z", "y", axis=axis)]
    same(model(nodes, {"x": SHAPE}, "y", weights, opset=13))


def conv(opset: int, half: bool, **changes) -> onnx.ModelProto:
    """A convolution in the way of quantisers: int8 weights, an int32 bias, uint8 pixels."""
    rng, kind = np.random.default_rng(2), np.float16 if half else np.float32
    weights = {
        "s": kind(0.05), "z": np.uint8(120), "w": rng.integers(-127, 128, (8, 4, 3, 3)).astype(np.int8),
        "ws": np.asarray(rng.uniform(0.01, 0.02, 8 if opset > 12 else ()), kind), "b": rng.integers(-999, 999, 8, np.int32),
        "so": kind(0.75), "zo": np.int8(-128), **changes,
    }  # fmt: skip
    weights["bs"] = np.asarray(weights["s"] * weights["ws"], kind)
    axis = {"axis": 0} if opset > 12 else {}
    nodes = [
        node("QuantizeLinear", "x s z", "q"), node("DequantizeLinear", "q s z", "d"),
        node("DequantizeLinear", "w ws", "wd", **axis), node("DequantizeLinear", "b bs", "bd", **axis),
        node("Conv", "d wd bd", "c", pads=[1, 1, 1, 1]), node("Relu", "c", "r"),
        node("QuantizeLinear", "r so zo", "p"), node("DequantizeLinear", "p so zo", "y"),
    ]  # fmt: skip
    return model(nodes, {"x": SHAPE}, "y", weights, opset=opset, dtype=kind)


@pytest.mark.parametrize("opset", [10, 13, 19, 21, 23])
def test_a_convolution_ends_in_whole_numbers(opset):
    net = network(conv(opset, False))
    assert [op.problem.TYPE for op in net.ops] == ["pointwise", "pointwise", "conv"]
    end = net.ops[2].problem.epilogue
    assert (str(end.act), end.affine, str(end.last)) == ("quantize(0,255)", True, "none")  # the scale behind is of no other op
    got, expected = run(net, feeds())["y"], ort_run(conv(opset, False), feeds(), optimized=False)["y"]
    steps = np.abs(got - expected) / 0.75
    assert steps.max() < 1.01 and (steps > 0.5).mean() < 2e-3  # a sum in another order may round otherwise


def test_fp16_models_with_fp16_scales():
    got = run(network(conv(19, True)), {"x": feeds()["x"].astype(np.float16)})["y"]
    expected = ort_run(conv(19, False), feeds(), optimized=False)["y"]
    assert np.linalg.norm(got - expected) < 0.02 * np.linalg.norm(expected)


def test_operators_between_see_whole_numbers():
    weights = {"s": np.float32(0.04), "z": np.uint8(99), "pads": np.array([0, 0, 1, 0, 0, 0, 0, 2]),
               "v": np.uint8(99), "k": np.full((2, 4, 1, 8), 7, np.uint8)}  # fmt: skip
    nodes = [
        node("QuantizeLinear", "x s z", "q"),
        node("MaxPool", "q", "m", kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
        node("Pad", "m pads v", "p"),
        node("Concat", "p k", "c", axis=2),
        node("Transpose", "c", "t", perm=[0, 3, 1, 2]),
        node("DequantizeLinear", "t s z", "y"),
    ]
    same(model(nodes, {"x": SHAPE}, "y", weights, opset=13))


def test_zero_points_that_differ():
    weights = {"s": np.float32(0.04), "z": np.uint8(99), "s2": np.float32(0.03), "z2": np.uint8(12)}
    nodes = [node("QuantizeLinear", "x s z", "q"), node("DequantizeLinear", "q s2 z2", "y")]
    same(model(nodes, {"x": SHAPE}, "y", weights, opset=13))


def test_computed_weights_are_folded():
    rng = np.random.default_rng(3)
    weights = {"w": rng.uniform(-1, 1, (4, 8)).astype(np.float32), "ws": rng.uniform(0.004, 0.01, 8).astype(np.float32),
               "wz": np.zeros(8, np.int8)}  # fmt: skip
    nodes = [
        node("Transpose", "w", "t", perm=[1, 0]), node("QuantizeLinear", "t ws wz", "q", axis=0),
        node("DequantizeLinear", "q ws wz", "d", axis=0), node("Transpose", "d", "u", perm=[1, 0]), node("MatMul", "x u", "y"),
    ]  # fmt: skip
    proto = model(nodes, {"x": (3, 4)}, "y", weights, opset=13)
    same(proto, {"x": rng.uniform(-1, 1, (3, 4)).astype(np.float32)})
    assert len(network(proto).ops) == 1


def with_ends(x=TensorProto.FLOAT, y=TensorProto.FLOAT):
    weights = {"s": np.float32(0.04), "z": np.asarray(99, np.uint8), "zi": np.asarray(-3, np.int8)}
    z = "zi" if TensorProto.INT8 in (x, y) else "z"
    first = [node("QuantizeLinear", f"x s {z}", "q")] if x == TensorProto.FLOAT else []
    last = [node("Relu", "d", "y")]
    if y != TensorProto.FLOAT:
        last = [node("Relu", "d", "r"), node("QuantizeLinear", f"r s {z}", "y")]
    middle = node("DequantizeLinear", f"{'q' if first else 'x'} s {z}", "d")
    proto = model([*first, middle, *last], {"x": SHAPE}, "y", {k: v for k, v in weights.items() if k in ("s", z)}, opset=13)
    proto.graph.input[0].type.tensor_type.elem_type = x
    proto.graph.output[0].type.tensor_type.elem_type = y
    return proto


@pytest.mark.parametrize("dtype", ["uint8", "int8"])
def test_inputs_and_outputs_in_integers(dtype):
    kind, rng = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), np.random.default_rng(0)
    low, high = (0, 256) if dtype == "uint8" else (-128, 128)
    same(with_ends(x=kind), {"x": rng.integers(low, high, SHAPE).astype(dtype)})
    same(with_ends(y=kind))


@pytest.mark.parametrize(
    "between, says",
    [
        (node("Relu", "q", "p"), "reads the quantised tensor 'q', and no kernel computes it in integers"),
        (node("Concat", "q r", "p", axis=1), "expected quantised tensors of one zero point"),
    ],
)
def test_integers_that_no_kernel_computes(between, says):
    weights = {"s": np.float32(0.04), "z": np.int8(9), "z2": np.int8(8)}
    nodes = [node("QuantizeLinear", "x s z", "q"), node("QuantizeLinear", "x s z2", "r"), between,
             node("DequantizeLinear", "p s z", "y")]  # fmt: skip
    with pytest.raises(ModelError, match=says):
        network(model(nodes, {"x": SHAPE}, "y", weights, opset=14))


def test_scales_that_the_network_computes():
    nodes = [node("ReduceMax", "x", "s", keepdims=0), node("QuantizeLinear", "x s", "q"), node("DequantizeLinear", "q s", "y")]
    with pytest.raises(ModelError, match="its scale is computed while the network runs"):
        network(model(nodes, {"x": SHAPE}, "y", opset=13))
