"""Outputs, inputs and tensors of 8 bits, whole builds beside onnxruntime: a picture comes out as bytes."""

import numpy as np
import onnx
import onnxruntime
import pytest

import gpu_runtime as gr
from gpu_runtime.accuracy import compare
from gpu_runtime.errors import ModelError
from gpu_runtime.precision import intervals
from tests.reference_run import model, network, node

U8, I8, FLOAT = onnx.TensorProto.UINT8, onnx.TensorProto.INT8, onnx.TensorProto.FLOAT
rng = np.random.default_rng(8)
SCALES = {"scale": np.float32(255), "low": np.float32(0), "high": np.float32(255), "half": np.float32(0.5)}
PROGRAMS = {  # name -> (nodes, the output's type)
    "clipped": ([node("Mul", "x scale", "a"), node("Clip", "a low high", "b"), node("Cast", "b", "y", to=U8)], U8),
    "signed": ([node("Mul", "x half", "a"), node("Cast", "a", "y", to=I8)], I8),
    "beyond its range": ([node("Mul", "x scale", "a"), node("Cast", "a", "y", to=U8)], U8),
    "channels last": (
        [node("Mul", "x half", "a"), node("Cast", "a", "b", to=U8), node("Transpose", "b", "y", perm=(0, 2, 3, 1))],
        U8,
    ),
    "back to float": ([node("Cast", "x", "a", to=I8), node("Cast", "a", "b", to=FLOAT), node("Mul", "b half", "y")], FLOAT),
}


def build_and_compare(nodes, out: int, x: np.ndarray) -> None:
    """Outputs have onnxruntime's type and, from whole numbers of a picture on, its values."""
    read = {name for n in nodes for name in n.input}
    proto = model(nodes, {"x": x.shape}, "y", {k: v for k, v in SCALES.items() if k in read})
    proto.graph.input[0].type.tensor_type.elem_type = onnx.helper.np_dtype_to_tensor_dtype(x.dtype)
    proto.graph.output[0].type.tensor_type.elem_type = out
    del proto.graph.value_info[:]
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    (expected,) = session.run(None, {"x": x})
    (got,) = gr.Context(gr.build(proto, device="l4")).run({"x": x}).values()
    assert got.dtype == expected.dtype
    assert np.array_equal(got, expected)


@pytest.mark.parametrize("name", PROGRAMS)
def test_casts_to_8_bits_are_those_of_onnxruntime(name):
    x = rng.integers(-300, 600, (2, 3, 5, 7)).astype(np.float32) / (255 if name == "clipped" else 1)
    build_and_compare(*PROGRAMS[name], x)


def test_signed_bytes_come_in():
    nodes = [node("Transpose", "x", "t", perm=(0, 3, 1, 2)), node("Cast", "t", "a", to=FLOAT), node("Mul", "a half", "y")]
    build_and_compare(nodes, FLOAT, rng.integers(-128, 128, (1, 4, 6, 3)).astype(np.int8))


def test_a_fraction_becomes_zero():
    """0.5 to 1 as an int8 holds 0, which its interval has to."""
    nodes = [node("Clip", "x half one", "c"), node("Cast", "c", "a", to=I8), node("Cast", "a", "y", to=FLOAT)]
    proto = model(nodes, {"x": (1, 3, 4, 4)}, "y", {"half": np.float32(0.5), "one": np.float32(1)})
    assert (known := intervals.known(network(proto))["a"]).low == 0 and known.high == 1


def test_a_constant_of_8_bits_is_read():
    nodes = [node("Cast", "x", "a", to=U8), node("Max", "a bytes", "y")]
    proto = model(nodes, {"x": (1, 3, 4, 4)}, "y", {"bytes": np.full((1, 3, 1, 1), 100, np.uint8)})
    proto.graph.output[0].type.tensor_type.elem_type = U8
    x = rng.integers(0, 256, (1, 3, 4, 4)).astype(np.float32)
    (got,) = gr.Context(gr.build(proto, device="l4")).run({"x": x}).values()
    assert np.array_equal(got, np.maximum(x, 100).astype(np.uint8))


@pytest.mark.parametrize("off,agrees", [(1, True), (2, False)])
def test_a_picture_agrees_to_its_next_value(off, agrees):
    """FP16's convolution may end on the other side of a whole number; a value farther off is an error."""
    sums = compare._Sums()
    y = np.array([0, 7, 255], np.uint8)
    sums.add(np.array([0, 7, 255 - off], np.uint8), y, y, compare.Tolerance())
    assert (sums.changed, sums.largest > sums.least) == (int(not agrees), not agrees)


@pytest.mark.parametrize("kind", [onnx.TensorProto.INT16, onnx.TensorProto.UINT16])
def test_other_whole_numbers_are_refused_by_name(kind):
    proto = model([node("Cast", "x", "y", to=kind)], {"x": (1, 3, 4, 4)}, "y")
    proto.graph.output[0].type.tensor_type.elem_type = kind
    with pytest.raises(ModelError, match="output 'y': expected float32, .* got u?int16: cast it outside"):
        gr.build(proto, device="l4")
