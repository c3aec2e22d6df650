"""A Pad with an infinity: as onnxruntime where its readers make the same of FP32's largest number, else refused."""

import numpy as np
import pytest

from gpu_runtime.errors import ModelError
from tests.reference_run import check_against_ort, model, network, node

PADDED_BY = {
    "MaxPool": (-np.inf, [node("MaxPool", "p", "y", kernel_shape=(3, 3))], ""),
    "Sigmoid": (np.inf, [node("Sigmoid", "p", "y")], ""),
    "Min": (np.inf, [node("Min", "p c", "y")], ""),
    "minus": (
        np.inf,
        [node("MaxPool", "p", "y", kernel_shape=(3, 3))],
        "pads by inf: expected only Min, Sigmoid as readers, got MaxPool: pad",
    ),
    "product": (-np.inf, [node("Mul", "p c", "y")], "pads by -inf: .* as readers, got Mul: pad by a number"),
    "output": (-np.inf, [node("Relu", "x", "y")], "got the model's output: pad"),
    "one of two": (-np.inf, [node("Relu", "p", "r"), node("Abs", "p", "a"), node("Add", "r a", "y")], "got Abs: pad"),
}


@pytest.mark.parametrize("case", PADDED_BY)
@pytest.mark.parametrize("opset", [10, 18])
def test_a_pad_with_infinity_is_right_or_refused(case, opset):
    value, readers, refusal = PADDED_BY[case]
    amounts = [0, 0, 1, 2, 0, 0, 2, 1]
    pad = node("Pad", "x", "p", pads=amounts, value=float(value)) if opset == 10 else node("Pad", "x s v", "p")
    given = {"c": np.float32(3)} | ({} if opset == 10 else {"s": np.int64(amounts), "v": np.float32(value)})
    proto = model([pad, *readers], {"x": (1, 4, 5, 6)}, "p y" if case == "output" else "y", given, opset=opset)
    if refusal:
        with pytest.raises(ModelError, match=refusal):
            network(proto)
    else:
        check_against_ort(proto, 1e-5)
