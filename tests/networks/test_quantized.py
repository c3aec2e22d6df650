"""Published quantised networks, against onnxruntime without its optimizer."""

import numpy as np
import pytest

from tactics.problems.problem import ConvProblem
from tests.reference_run import given_model, network, ort_run, relative_error, run

FORMS = ("u8s8", "s8s8sym", "trt", "modelopt")
SHAPE = (4, 3, 32, 32)


@pytest.mark.parametrize("form", FORMS)
def test_resnet20(form):
    """Quantised networks are chaotic: a sum in another order rounds otherwise. Even onnxruntime's optimizer moves outputs."""
    path = given_model(f"quantized/resnet20_cifar10.{form}")
    feeds = {"input": np.random.default_rng(7).random(SHAPE).astype(np.float32)}
    net = network(path)
    (name, expected), *_ = ort_run(path, feeds, optimized=False).items()
    other = ort_run(path, feeds)[name]
    assert relative_error(run(net, feeds)[name], expected) < 3 * relative_error(other, expected) + 0.01
    ends = [
        str(op.problem.epilogue.last) + str(op.problem.epilogue.act) for op in net.ops if isinstance(op.problem, ConvProblem)
    ]
    assert sum("quantize" in end for end in ends) >= 9, ends
