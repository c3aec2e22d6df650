"""What follows a Concat of convolutions is done in each of them, and gives what onnxruntime gives."""

import numpy as np
import pytest

from tactics.problems.problem import ConvProblem, PointwiseProblem
from tests.reference_run import check_against_ort, model, node

SIZES = (8, 16, 4)
BEHIND = {
    "norm": [node("BatchNormalization", "c g b m v", "y")],
    "norm, relu": [node("BatchNormalization", "c g b m v", "n"), node("Relu", "n", "y")],
    "norm, silu": [node("BatchNormalization", "c g b m v", "n"), node("Sigmoid", "n", "s"), node("Mul", "n s", "y")],
    "prelu": [node("PRelu", "c slope", "y")],
    "scalar, clip": [node("Mul", "c three", "n"), node("Clip", "n zero three", "y")],
    "sub": [node("Sub", "c slope", "n"), node("Elu", "n", "y")],
}


def split_convolution(rng, shape=(2, 12, 7, 5), *, groups=(1, 1, 1), act="", axis=1):
    """Convolutions of x by kernels of 1, 3 and 5, concatenated as c."""
    nodes, w = [], {}
    for i, (k, g) in enumerate(zip(SIZES, groups, strict=True)):
        size = 2 * i + 1
        w[f"w{i}"] = (rng.standard_normal((k, shape[1] // g, size, size)) / (size * size)).astype(np.float32)
        nodes.append(node("Conv", f"x w{i}", f"a{i}" if act and i == 1 else f"c{i}", pads=(i,) * 4, group=g))
        if act and i == 1:
            nodes.append(node(act, "a1", "c1"))
    total = sum(SIZES)
    w |= {
        "slope": rng.uniform(0.1, 2, (total, 1, 1)).astype(np.float32),
        "three": np.float32(3),
        "zero": np.float32(0),
        "g": rng.uniform(0.5, 2, total).astype(np.float32),
        "b": rng.standard_normal(total).astype(np.float32),
        "m": rng.standard_normal(total).astype(np.float32),
        "v": rng.uniform(0.5, 2, total).astype(np.float32),
    }
    return [*nodes, node("Concat", "c0 c1 c2", "c", axis=axis)], w


def pointwise(net):
    return [[str(s) for s in op.problem.stages] for op in net.ops if isinstance(op.problem, PointwiseProblem)]


@pytest.mark.parametrize("behind", BEHIND.values(), ids=BEHIND)
def test_scale_shift_and_activation(behind):
    nodes, w = split_convolution(np.random.default_rng(0), groups=(1, 2, 4))
    net = check_against_ort(model([*nodes, *behind], {"x": (2, 12, 7, 5)}, "y", w), 2e-3)
    assert sum(isinstance(op.problem, ConvProblem) for op in net.ops) == 3
    assert not pointwise(net)


def test_the_rest_of_the_chain_stays_behind():
    nodes, w = split_convolution(np.random.default_rng(1))
    behind = [node("BatchNormalization", "c g b m v", "n"), node("Add", "n z", "r"), node("Relu", "r", "y")]
    net = check_against_ort(model([*nodes, *behind], {"x": (2, 12, 7, 5), "z": (2, 28, 7, 5)}, "y", w), 2e-3)
    assert pointwise(net) == [["add(t1)", "relu"]]


def test_constants_of_the_rest_are_counted_from_zero_again():
    nodes, w = split_convolution(np.random.default_rng(1))
    behind = [node("BatchNormalization", "c g b m v", "n"), node("Add", "n z", "r"), node("Mul", "r slope", "y")]
    net = check_against_ort(model([*nodes, *behind], {"x": (2, 12, 7, 5), "z": (2, 28, 7, 5)}, "y", w), 2e-3)
    assert pointwise(net) == [["add(t1)", "mul(c0)"]]


@pytest.mark.parametrize("spoilt", ["read elsewhere", "output", "activation before", "by pixel", "one twice", "pixels"])
def test_what_cannot_move_stays(spoilt):
    nodes, w = split_convolution(np.random.default_rng(2), act="Relu" if spoilt == "activation before" else "")
    outputs, behind = "y", [*BEHIND["norm, relu"]]
    if spoilt == "read elsewhere":
        nodes.append(node("Neg", "c0", "z"))
        outputs = "y z"
    if spoilt == "output":
        outputs = "y c"
    if spoilt == "by pixel":
        w["p"] = np.random.default_rng(3).uniform(0.5, 2, (7, 5)).astype(np.float32)
        behind = [node("Mul", "c p", "y")]
    if spoilt == "one twice":
        nodes[-1] = node("Concat", "c0 c0 c2 c2 c2", "c", axis=1)
    if spoilt == "pixels":
        nodes[-1] = node("Concat", "c1 c1", "c", axis=-1)
        behind = [node("Relu", "c", "y")]
    net = check_against_ort(model([*nodes, *behind], {"x": (2, 12, 7, 5)}, outputs, w), 2e-3)
    assert len(pointwise(net)) >= 1
