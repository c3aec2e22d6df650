"""ConvTranspose with SAME and output_padding: sizes and values are onnxruntime's, and the reference's where that agrees."""

import itertools

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

from tests.reference_run import network, node, ort_run, run


def transposed(mode: str, stride: int, kernel: int, extra: int, dilation: int, named: bool) -> onnx.ModelProto:
    attributes = {"auto_pad": mode, "strides": [stride] * 2, "output_padding": [extra] * 2, "dilations": [dilation] * 2}
    attributes |= {"kernel_shape": [kernel] * 2} if named else {}
    w = np.random.default_rng(0).uniform(-1, 1, (2, 3, kernel, kernel)).astype(np.float32)
    info = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        [node("ConvTranspose", "x w", "y", **attributes)],
        "g",
        [info("x", onnx.TensorProto.FLOAT, (1, 2, 3, 4))],
        [info("y", onnx.TensorProto.FLOAT, None)],
        [onnx.numpy_helper.from_array(w, "w")],
    )
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize("mode", ["SAME_UPPER", "SAME_LOWER"])
def test_output_padding_lies_within_the_size_of_same(mode):
    x = np.random.default_rng(1).uniform(-1, 1, (1, 2, 3, 4)).astype(np.float32)
    for stride, kernel, extra, dilation in itertools.product((2, 3), (1, 2, 3, 5), (0, 1, 2), (1, 2)):
        if extra >= stride:  # both refuse it
            continue
        proto = transposed(mode, stride, kernel, extra, dilation, kernel % 2 > 0)
        expected = ort_run(proto, {"x": x})["y"]
        got = run(network(proto), {"x": x})["y"]
        assert got.shape == expected.shape, (stride, kernel, extra, dilation)
        assert np.abs(got - expected).max() < 1e-5, (stride, kernel, extra, dilation)
        (also,) = ReferenceEvaluator(proto).run(None, {"x": x})
        whole = extra + (kernel - 1) * dilation + 1 >= stride  # else less is left, to which the reference adds zeros
        assert (also.shape == expected.shape) == whole
        assert not whole or np.abs(got - also).max() < 1e-5
