"""A pool with ceil_mode whose window, with its dilation, is larger than the padded image is refused, as a convolution's is."""

import numpy as np
import pytest

from gpu_runtime.errors import ModelError
from tests.reference_run import check_against_ort, model, network, node

REFUSAL = r"y: its output 'y' would have the size \[1, 4, {}, {}\] \(inputs .*give another input size with --shapes"


@pytest.mark.parametrize("op", ["MaxPool", "AveragePool", "LpPool", "Conv"])
def test_a_window_larger_than_the_padded_image_is_refused(op):
    for size, dilation, stride, pad in ((3, 3, 2, 0), (3, 4, 9, 1), (4, 2, 2, 0)):
        how = {"kernel_shape": [size] * 2, "dilations": [dilation] * 2, "strides": [stride] * 2, "pads": [pad] * 4}
        how |= {} if op == "Conv" else {"ceil_mode": 1}
        weights = {"w": np.ones((4, 4, size, size), np.float32)}
        inputs, given = ("x w", weights) if op == "Conv" else ("x", {})
        with pytest.raises(ModelError, match=REFUSAL.format(0, 0)):
            network(model([node(op, inputs, "y", **how)], {"x": (1, 4, 6, 6)}, "y", given, 19))


@pytest.mark.parametrize("op", ["MaxPool", "AveragePool"])
def test_the_largest_window_that_fits_is_not(op):
    for size, dilation, pad in ((3, 3, 1), (2, 5, 0), (6, 1, 0)):
        how = {"kernel_shape": [size] * 2, "dilations": [dilation] * 2, "strides": [2, 2], "pads": [pad] * 4, "ceil_mode": 1}
        check_against_ort(model([node(op, "x", "y", **how)], {"x": (1, 4, 6, 6)}, "y", {}, 19), 1e-5)


@pytest.mark.parametrize("op", ["MaxPool", "AveragePool"])
def test_without_ceil_mode_what_onnxruntime_computes_is_computed(op):
    how = {"kernel_shape": [7, 7], "strides": [2, 2], "pads": [0] * 4}
    check_against_ort(model([node(op, "x", "y", **how)], {"x": (1, 4, 6, 6)}, "y", {}, 19), 1e-5)
