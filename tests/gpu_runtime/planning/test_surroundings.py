"""What the timing of tactics is told of their network."""

from dataclasses import replace

import numpy as np
import pytest

from cuda_kernels.device import named
from gpu_runtime.building.load import lowered
from gpu_runtime.frontend import importer
from gpu_runtime.frontend.files.source import source_of
from gpu_runtime.network import Network, Op
from gpu_runtime.planning.surroundings import half_zeros, stays_in_l2
from tests.problems import conv_case
from tests.reference_run import model, node

H200 = named("h200")


def network(*nodes, batch=1):
    w = np.random.default_rng(0).standard_normal((16, 16, 1, 1)).astype(np.float32)
    weights = {name: w for name in "ab" if any(name in n.input for n in nodes)}
    return lowered(importer.load(source_of(model(list(nodes), {"x": (batch, 16, 8, 8)}, "y", weights))), None)


CONVS = node("Conv", "x a", "c"), node("Conv", "r b", "y")


@pytest.mark.parametrize("between,expected", [("Relu", True), ("Sigmoid", False), ("HardSwish", False)])
def test_an_input_behind_a_relu_is_half_zeros(between, expected):
    net = network(CONVS[0], node(between, "c", "r"), CONVS[1])
    last = next(op for op in net.ops if op.output == "y")
    assert half_zeros(net).get(last.problem, (False,))[0] is expected
    assert not any(any(z) for p, z in half_zeros(net).items() if p != last.problem)


@pytest.mark.parametrize(("weights", "tensors", "fits"), [(1, 1, True), (1400, 1, False), (1, 1400, False), (500, 500, True)])
def test_a_network_of_less_than_half_the_l2_stays_in_it(weights, tensors, fits):
    """The RTX 3090 has 6 MiB: 1,536 Ki elements of FP16 are half of it. Weights of two ops count once."""
    w = np.zeros((weights, 1024), np.float32)
    problem = conv_case(1, 64, 8, 8, 64, 1, 1)
    ops = tuple(Op(name, problem, ("x",), name, weights={"w": w}) for name in "ab")
    shapes = {"x": (1, tensors, 32, 32), "a": (1, 64, 8, 8), "b": (1, 64, 8, 8), "c": (1, 200, 32, 32)}
    assert stays_in_l2(Network("n", (), (), shapes, ops), named("rtx3090")) == fits


def test_a_small_network_stays_in_l2():
    layers = CONVS[0], node("Relu", "c", "r"), CONVS[1]
    assert stays_in_l2(network(*layers), H200)
    assert not stays_in_l2(network(*layers, batch=4096 * 8), H200)
    assert not stays_in_l2(network(*layers), replace(H200, l2_bytes=4096))
