"""What stands behind a product is its epilogue's: activation, scale and shift, residual, a second activation."""

import numpy as np
import pytest

from cuda_kernels.device import named
from tactics.candidates import candidates
from tactics.planner.graph import holds
from tactics.problems.pointwise_ops import Activation
from tactics.problems.problem import ConvProblem, ConvTransposeProblem, PointwiseProblem
from tests.problems import TAILS, check, conv_case
from tests.reference_run import check_against_ort, model, node

PRODUCTS = {
    "Conv": (node("Conv", "x w", "p", pads=(1, 1, 1, 1)), (8, 6, 3, 3), (2, 6, 5, 7), 1),
    "depthwise": (node("Conv", "x w", "p", group=6), (6, 1, 3, 3), (2, 6, 5, 7), 1),
    "ConvTranspose": (node("ConvTranspose", "x w", "p", strides=(2, 2)), (6, 8, 3, 3), (2, 6, 5, 7), 1),
    "ConvTranspose of blocks": (node("ConvTranspose", "x w", "p", strides=(2, 2)), (6, 8, 2, 2), (2, 6, 5, 7), 1),
    "Gemm": (node("Gemm", "x w", "p", transB=1), (8, 6), (3, 6), 1),
    "MatMul": (node("MatMul", "x w", "p"), (6, 8), (2, 5, 6), 2),
}
SPELLED = {
    "Relu": [node("Relu", "p", "a")],
    "Gelu": [node("Gelu", "p", "a")],
    "Gelu in nodes": [
        node("Div", "p r", "e"),
        node("Erf", "e", "f"),
        node("Add", "f one", "g"),
        node("Mul", "p g", "h"),
        node("Mul", "h half", "a"),
    ],
    "tanh Gelu": [node("Gelu", "p", "a", approximate="tanh")],
    "Mish": [node("Mish", "p", "a")],
    "SiLU": [node("Sigmoid", "p", "e"), node("Mul", "e p", "a")],
    "Elu": [node("Elu", "p", "a", alpha=0.7)],
    "Selu": [node("Selu", "p", "a")],
    "Softplus": [node("Softplus", "p", "a")],
}


def case(rng, product, activation, behind=(), positive=True):
    """A model: the product, the activation and nodes behind it, of `a`, that end in y; and its inputs."""
    op, weights, x, axis = PRODUCTS[product]
    k = weights[1] if product.startswith("ConvTranspose") or product == "MatMul" else weights[0]
    w = {"w": rng.standard_normal(weights) / np.sqrt(np.prod(weights[1:])), "r": np.float32(2**0.5), "one": 1, "half": 0.5}
    shape = (k, 1, 1) if axis == 1 and len(x) == 4 else (k,)
    w |= {"s": rng.uniform(0.5, 2, shape) * (1 if positive else rng.choice([-1, 1], shape)), "t": rng.standard_normal(shape)}
    nodes = [op, *SPELLED[activation], *(behind or [node("Identity", "a", "y")])]
    return nodes, {name: np.asarray(a, np.float32) for name, a in w.items()}, x


def left(net):
    """The ops of the plan in which as much as possible is one."""
    choice = {group: options[-1] for group, options in net.groups}
    return [op for op in net.ops if holds(op.when, choice)]


def products(ops):
    return [op.problem for op in ops if isinstance(op.problem, (ConvProblem, ConvTransposeProblem))]


def chains(ops):
    return [op for op in ops if isinstance(op.problem, PointwiseProblem)]


@pytest.mark.parametrize("activation", SPELLED)
@pytest.mark.parametrize("product", PRODUCTS)
def test_activation_of_every_product(product, activation):
    nodes, w, x = case(np.random.default_rng(0), product, activation)
    net = check_against_ort(model(nodes, {"x": x}, "y", w, 20), 3e-3)
    assert not chains(net.ops)


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("shifted", [False, True])
def test_scale_and_shift_behind_an_activation(product, shifted):
    behind = [node("Mul", "a s", "m" if shifted else "y"), *([node("Add", "m t", "y")] if shifted else [])]
    nodes, w, x = case(np.random.default_rng(1), product, "Gelu", behind, positive=False)
    net = check_against_ort(model(nodes, {"x": x}, "y", w, 20), 3e-3)
    assert not chains(net.ops) and [p.epilogue.affine for p in products(net.ops)] == [True]


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("positive", [False, True])
def test_positive_scales_pass_a_relu_into_the_weights(product, positive):
    nodes, w, x = case(np.random.default_rng(2), product, "Relu", [node("Mul", "a s", "y")], positive)
    net = check_against_ort(model(nodes, {"x": x}, "y", w, 20), 3e-3)
    assert not chains(net.ops) and [p.epilogue.affine for p in products(net.ops)] == [not positive]


def test_batch_normalization_behind_a_relu():
    rng = np.random.default_rng(3)
    behind = [node("BatchNormalization", "a g b m v", "y")]
    nodes, w, x = case(rng, "Conv", "Relu", behind)
    w |= {"g": rng.uniform(0.5, 2, 8), "b": rng.standard_normal(8), "m": rng.standard_normal(8), "v": rng.uniform(0.5, 2, 8)}
    w = {name: np.asarray(a, np.float32) for name, a in w.items()}
    net = check_against_ort(model(nodes, {"x": x}, "y", w, 20), 3e-3)
    assert len(net.ops) == 1


@pytest.mark.parametrize("last", ["Relu", "Clip", "Gelu"])
@pytest.mark.parametrize("affine", [False, True])
def test_residual_and_a_second_activation(last, affine):
    behind = [*([node("Mul", "a s", "m")] if affine else []), node("Add", f"{'m' if affine else 'a'} z", "n")]
    behind += [node(last, "n half one" if last == "Clip" else "n", "y")]
    nodes, w, x = case(np.random.default_rng(4), "Conv", "Gelu", behind, positive=False)
    net = check_against_ort(model(nodes, {"x": x, "z": (2, 8, 5, 7)}, "y", w, 20), 3e-3)
    ops = left(net)
    assert len(ops) == 1 and ops[0].problem.epilogue.residual and ops[0].problem.epilogue.act_first
    assert ops[0].problem.epilogue.last.name == last.lower() and ops[0].problem.epilogue.affine == affine


def test_two_activations():
    nodes, w, x = case(np.random.default_rng(5), "Conv", "Gelu", [node("Clip", "a half one", "y")])
    net = check_against_ort(model(nodes, {"x": x}, "y", w, 20), 3e-3)
    assert len(net.ops) == 1 and str(net.ops[0].problem.epilogue.last) == "clip(0.5,1)"


def test_a_prelu_is_no_second_activation():
    nodes, w, x = case(np.random.default_rng(6), "Conv", "Gelu", [node("Add", "a z", "n"), node("PRelu", "n s", "y")])
    net = check_against_ort(model(nodes, {"x": x, "z": (2, 8, 5, 7)}, "y", w, 20), 3e-3)
    assert len(left(net)) == 2


def test_what_is_read_before_its_scale_stays_readable():
    nodes, w, x = case(np.random.default_rng(7), "Conv", "Gelu", [node("Mul", "a s", "y"), node("Neg", "a", "more")])
    check_against_ort(model(nodes, {"x": x}, "y more", w, 20), 3e-3)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["a100", "h200"])
def test_each_group_has_scales_of_its_own(device):
    """With every kernel that takes a group at a time."""
    problem = conv_case(2, 128, 6, 5, 144, 3, 3, groups=2, bias=True, act=Activation("prelu"), sparse24=True, **TAILS[""])
    first = {t.kernel: t for t in reversed(candidates(problem, named(device)))}
    assert {"conv_dense", "conv_sparse24"} <= set(first)
    for tactic in first.values():
        check(problem, tactic, named(device))
