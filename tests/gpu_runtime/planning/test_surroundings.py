"""What the timing of tactics is told of their network."""

from dataclasses import replace

import numpy as np
import pytest

from cuda_kernels.device import named
from gpu_runtime.frontend import importer
from gpu_runtime.frontend.source import source_of
from gpu_runtime.planning import stages
from gpu_runtime.planning.surroundings import half_zeros, stays_in_l2
from tests.reference_run import model, node

H200 = named("h200")


def network(*nodes, batch=1):
    w = np.random.default_rng(0).standard_normal((16, 16, 1, 1)).astype(np.float32)
    weights = {name: w for name in "ab" if any(name in n.input for n in nodes)}
    return stages.lowered(importer.load(source_of(model(list(nodes), {"x": (batch, 16, 8, 8)}, "y", weights))), None)


CONVS = node("Conv", "x a", "c"), node("Conv", "r b", "y")


@pytest.mark.parametrize("between,expected", [("Relu", True), ("Sigmoid", False), ("HardSwish", False)])
def test_an_input_behind_a_relu_is_half_zeros(between, expected):
    net = network(CONVS[0], node(between, "c", "r"), CONVS[1])
    last = next(op for op in net.ops if op.output == "y")
    assert half_zeros(net).get(last.problem, (False,))[0] is expected
    assert not any(any(z) for p, z in half_zeros(net).items() if p != last.problem)


def test_a_small_network_stays_in_l2():
    layers = CONVS[0], node("Relu", "c", "r"), CONVS[1]
    assert stays_in_l2(network(*layers), H200)
    assert not stays_in_l2(network(*layers, batch=4096 * 8), H200)
    assert not stays_in_l2(network(*layers), replace(H200, l2_bytes=4096))
