"""What of a network decides how its tactics are timed."""

import numpy as np
import pytest

from cuda_kernels.device import named
from gpu_runtime.network import Network, Op
from gpu_runtime.target import stays_in_l2
from tests.problems import conv_case

KIB = 1 << 10


@pytest.mark.parametrize(("weights", "tensors", "fits"), [(1, 1, True), (1400, 1, False), (1, 1400, False), (500, 500, True)])
def test_a_network_of_less_than_half_the_l2_stays_in_it(weights, tensors, fits):
    """The RTX 3090 has 6 MiB: 1,536 Ki elements of FP16 are half of it. Weights of two ops count once."""
    w = np.zeros((weights, KIB), np.float32)
    problem = conv_case(1, 64, 8, 8, 64, 1, 1)
    ops = tuple(Op(name, problem, ("x",), name, weights={"w": w}) for name in "ab")
    shapes = {"x": (1, tensors, 32, 32), "a": (1, 64, 8, 8), "b": (1, 64, 8, 8), "c": (1, 200, 32, 32)}
    assert stays_in_l2(Network("n", (), (), shapes, ops), named("rtx3090")) == fits
