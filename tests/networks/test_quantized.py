"""Published quantised networks, against onnxruntime without its optimizer."""

import numpy as np
import pytest

from tactics.problems.problem import ConvProblem
from tests.reference_run import given_model, network, ort_run, relative_error, run

FORMS = ("u8s8", "s8s8sym", "trt", "modelopt")
SHAPE = (4, 3, 32, 32)
FEEDS = {"input": np.random.default_rng(7).random(SHAPE).astype(np.float32)}
# Quantised networks are chaotic: a sum in another order rounds otherwise. Even onnxruntime's optimizer moves these outputs, by
# up to 2 % on processors with VNNI, and on others, where it saturates sums of 16 bits, by a tenth and more.
CHAOS = 0.04


@pytest.mark.parametrize("form", FORMS)
def test_resnet20(form):
    path = given_model(f"quantized/resnet20_cifar10.{form}")
    net = network(path)
    (name, expected), *_ = ort_run(path, FEEDS, optimized=False).items()
    assert relative_error(run(net, FEEDS)[name], expected) < CHAOS
    ends = [op.problem.epilogue for op in net.ops if isinstance(op.problem, ConvProblem)]
    assert sum("quantize" in (end.act.name, end.last.name) for end in ends) >= 9, ends


def test_resnet20_of_integer_operators():
    """It is u8s8's network, which onnxruntime computes in floating point, and this one in integers."""
    net = network(given_model("quantized/resnet20_cifar10.qop"))
    (expected,) = ort_run(given_model("quantized/resnet20_cifar10.u8s8"), FEEDS, optimized=False).values()
    (got,) = run(net, FEEDS).values()
    assert relative_error(got, expected) < CHAOS
