"""What is fused always, what becomes an alternative, and that every alternative computes the same."""

import numpy as np
import pytest

from gpu_runtime.errors import ModelError
from tactics.planner.graph import holds
from tactics.problems.epilogue import MaxPool
from tactics.problems.problem import ConvProblem
from tactics.problems.protocol import Feature
from tests.reference_run import check_against_ort, choices, feeds_for, given_model, model, network, node, ort_run, run

rng = np.random.default_rng(3)
X = {"x": (2, 4, 6, 6)}
XZ = X | {"z": (2, 4, 6, 6)}
W = {f"w{i}": rng.standard_normal((4, 4, 3, 3)).astype(np.float16).astype(np.float32) / 4 for i in range(4)}


def conv(x: str, w: str, y: str):
    return node("Conv", f"{x} {w}", y, pads=(1, 1, 1, 1))


def summary(net):
    return [(op.name, op.inputs, op.output, op.when) for op in net.ops]


def test_residual_add_goes_into_either_producer():
    nodes = [conv("x", "w0", "a"), conv("z", "w1", "b"), node("Add", "a b", "s"), node("Relu", "s", "y")]
    net = check_against_ort(model(nodes, XZ, "y", W), 1e-5)
    assert net.groups == (("s", ("apart", "into a", "into b")),)
    assert summary(net) == [
        ("a", ("x",), "a", (("s", "apart"), ("s", "into b"))),
        ("b", ("z",), "b", (("s", "apart"), ("s", "into a"))),
        ("a + s + y", ("x", "b"), "y", (("s", "into a"),)),
        ("b + s + y", ("z", "a"), "y", (("s", "into b"),)),
        ("s + y", ("a", "b"), "y", (("s", "apart"),)),
    ]
    assert [op.layer for op in net.ops] == ["a", "b", "a", "b", ""]
    assert net.ops[0].weights["w"] is net.ops[2].weights["w"]
    assert [op.problem.epilogue.residual for op in net.ops if isinstance(op.problem, ConvProblem)] == [False, False, True, True]
    assert [op.name for op in net.ops if holds(op.when, {"s": "into b"})] == ["a", "b + s + y"]


def test_one_producer_is_an_activation():
    nodes = [conv("x", "w0", "a"), node("Relu", "a", "r"), conv("r", "w1", "b"), node("Add", "r b", "y")]
    net = check_against_ort(model(nodes, X, "y", W), 1e-5)
    assert net.groups == (("y", ("apart", "into b")),)
    assert [op.name for op in net.ops] == ["a + r", "b", "b + y", "y"]


def test_the_activation_may_come_before_the_add():
    nodes = [conv("x", "w0", "a"), node("LeakyRelu", "a", "r", alpha=0.2), node("Add", "x r", "y")]
    net = check_against_ort(model(nodes, X, "y", W), 1e-5)
    assert net.groups == (("y", ("apart", "into a")),)
    assert [op.name for op in net.ops] == ["a + r", "a + r + y", "y"]
    alone, into = net.ops[0].problem, net.ops[1].problem
    assert not alone.needs and not alone.epilogue.act_first and into.needs == {Feature.RESIDUAL} and into.epilogue.act_first
    assert str(into.epilogue.act) == "leaky_relu(0.2)"


@pytest.mark.parametrize(
    "name, tail, outputs",
    [
        ("a second reader", [node("Add", "a x", "y"), node("Tanh", "a", "z")], "y z"),
        ("a network output", [node("Add", "a x", "y")], "a y"),
        ("the same tensor twice", [node("Add", "a a", "y")], "y"),
    ],
)
def test_no_alternative(name, tail, outputs):
    net = check_against_ort(model([conv("x", "w0", "a"), *tail], X, outputs, W), 1e-5)
    assert net.groups == () and not any(Feature.RESIDUAL in op.problem.needs for op in net.ops), name


def test_chained_residuals_and_sum_of_three():
    nodes = [conv("x", "w0", "a"), conv("z", "w1", "b"), conv("v", "w2", "c"), node("Sum", "a b c", "s", name="total")]
    nodes += [node("Relu", "s", "r"), conv("r", "w3", "d"), node("Add", "r d", "y")]
    net = check_against_ort(model(nodes, XZ | {"v": (2, 4, 6, 6)}, "y", W), 1e-5)
    assert net.groups == (
        ("total_0", ("apart", "into a", "into b")),
        ("total", ("apart", "into c")),
        ("y", ("apart", "into d")),
    )
    feeds = feeds_for(net)
    results = [run(net, feeds, choice)["y"] for choice in choices(net, limit=100)]
    assert len(results) == 12 and all(np.allclose(r, results[0], atol=1e-5) for r in results)


def test_residual_into_a_matrix_product():
    w = {"p": rng.standard_normal((8, 6)).astype(np.float32), "q": rng.standard_normal((5, 6)).astype(np.float32)}
    nodes = [node("MatMul", "x p", "a"), node("Gemm", "z q", "b"), node("Add", "a b", "s"), node("Sigmoid", "s", "y")]
    net = check_against_ort(model(nodes, {"x": (3, 8), "z": (3, 5)}, "y", w), 2e-3)
    assert net.groups == (("s", ("apart", "into a", "into b")),)


def test_constants_after_a_convolution_fold_into_it():
    w = W | {"g": np.float32([2, -1, 0.5, 1]), "b": np.float32([1, 2, 3, 4]), "m": np.float32([0.5, 0, 1, 2])}
    w |= {"v": np.float32([1, 4, 0.25, 2]), "c": np.float32([1, 2, 4, 8]).reshape(1, 4, 1, 1), "h": np.float32(0.5)}
    nodes = [conv("x", "w0", "a"), node("BatchNormalization", "a g b m v", "n"), node("Mul", "n c", "p")]
    nodes += [node("Sub", "h p", "q"), node("Div", "q c", "r"), node("Add", "c r", "s"), node("Relu", "s", "y")]
    net = check_against_ort(model(nodes, X, "y", w))
    (op,) = net.ops
    assert op.name == "a + y" and op.nodes == ("a", "n", "p", "q", "r", "s", "y") and op.problem.epilogue.bias
    scale = -w["g"] / np.sqrt(w["v"] + 1e-5)
    assert np.allclose(op.weights["w"], w["w0"] * scale[:, None, None, None], rtol=1e-3)


def test_batch_normalization_of_half_weights_is_folded_before_rounding():
    """gamma/sqrt(var) is 1/3000: folded in FP16 it would keep few bits; a 2:4 pattern survives."""
    w = {"w": W["w0"].astype(np.float16), "m": np.float16([1, 2, 3, 4]), "b": np.float16([0.1, 0.2, 0.3, 0.4])}
    w |= {"g": np.float16([0.01, 0.02, 0.03, 0.04]), "v": np.float16([900, 3600, 8100, 14400])}
    w["w"][:, 1::2] = 0
    nodes = [conv("x", "w", "a"), node("BatchNormalization", "a g b m v", "y")]
    net = network(model(nodes, X, "y", w, dtype=np.float16))
    scale = w["g"].astype(np.float64) / np.sqrt(w["v"].astype(np.float64) + 1e-5)
    exact = w["w"].astype(np.float64) * scale[:, None, None, None]
    (op,) = net.ops
    assert op.name == "a" and op.problem.sparse24
    assert np.array_equal(op.weights["w"], exact.astype(np.float32))
    assert np.allclose(op.weights["b"], w["b"] - w["m"] * scale, rtol=1e-6)


def test_what_is_not_per_channel_does_not_fold():
    w = W | {"row": rng.standard_normal((6, 1)).astype(np.float32)}
    net = check_against_ort(model([conv("x", "w0", "a"), node("Add", "a row", "y")], X, "y", w))
    assert [op.name for op in net.ops] == ["a", "y"]


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize(
    "gate, meaning",
    [("Sigmoid", "silu"), ("HardSigmoid", "hard_swish")],
)
@pytest.mark.parametrize("order", ["a g", "g a"])
def test_gated_activations(alone, gate, meaning, order):
    attributes = {"alpha": 1 / 6} if gate == "HardSigmoid" else {}
    nodes = [conv("x", "w0", "a"), node(gate, "a", "g", **attributes), node("Mul", order, "y")]
    net = check_against_ort(model([*nodes, node("Tanh", "a", "z")] if alone else nodes, X, "y z" if alone else "y", W), 1e-5)
    assert [op.name for op in net.ops] == (["a", "g + y", "z"] if alone else ["a + g + y"])
    assert (str(net.ops[1].problem.stages[0]) if alone else str(net.ops[0].problem.epilogue.act)) == meaning


def test_gate_that_is_read_twice_stays_apart():
    nodes = [conv("x", "w0", "a"), node("Sigmoid", "a", "g"), node("Mul", "a g", "p"), node("Add", "p g", "y")]
    net = check_against_ort(model(nodes, X, "y", W), 1e-5)
    assert [op.name for op in net.ops] == ["a", "g", "p + y"]


def test_every_choice_of_a_real_network_computes_the_same():
    path = given_model("resnet20_cifar10")
    net = network(path, shapes={"input": (1, 3, 32, 32)})
    feeds = feeds_for(net, 0)
    expected = ort_run(path, feeds)["logits"]
    names = [g for g, _ in net.groups]
    for seed in range(4):
        pick = np.random.default_rng(seed)
        choice = {g: str(pick.choice(options)) for g, options in net.groups}
        assert np.allclose(run(net, feeds, choice)["logits"], expected, rtol=1e-2, atol=1e-2), (choice, names)
        live = [op for op in net.ops if holds(op.when, choice)]
        assert len({op.output for op in live}) == len(live)
        assert sum(op.layer != "" for op in live) == 20


# ---- pools into stems, normalisations into 1x1 convolutions


def bn(x: str, y: str, c: int, weights: dict, small: bool = False):
    for name, near in zip("gbmv", (1, 0, 0, 1), strict=True):
        weights[f"{y}.{name}"] = (near + 0.4 * rng.uniform(-1, 1, c)).astype(np.float32)
    weights[f"{y}.g"] *= 1e-6 if small else 1
    return node("BatchNormalization", " ".join([x, *(f"{y}.{s}" for s in "gbmv")]), y)


def test_the_pool_after_a_stem_is_an_alternative():
    w = {"w": rng.standard_normal((8, 3, 3, 3)).astype(np.float16).astype(np.float32) / 4}
    pool = node("MaxPool", "r", "y", kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    net = check_against_ort(model([conv("x", "w", "a"), node("Relu", "a", "r"), pool], {"x": (2, 3, 9, 12)}, "y", w), 1e-5)
    assert net.groups == (("y", ("apart", "into a")),)
    assert [op.name for op in net.ops] == ["a + r", "y", "a + r + y"]
    assert net.ops[2].problem.epilogue.pool == MaxPool((3, 3), (2, 2), (1, 1), (5, 6))
    assert net.ops[2].layer == net.ops[0].layer == "a"
    wide = {"w": rng.standard_normal((8, 8, 3, 3)).astype(np.float32)}
    assert not network(model([conv("x", "w", "r"), pool], {"x": (2, 8, 9, 12)}, "y", wide)).groups
    read_twice = [conv("x", "w", "r"), pool, node("Relu", "r", "z")]
    assert not network(model(read_twice, {"x": (2, 3, 9, 12)}, "y z", w)).groups


def test_a_normalisation_and_relu_in_front_of_a_1x1_convolution_is_an_alternative():
    w = {"w": rng.standard_normal((8, 4, 1, 1)).astype(np.float16).astype(np.float32)}
    nodes = [bn("x", "n", 4, w), node("Relu", "n", "r"), node("Conv", "r w", "y", strides=[2, 2])]
    net = check_against_ort(model(nodes, X, "y", w), 2e-3)  # in front of the product constants are FP16
    assert net.groups == (("r", ("apart", "into y")),)
    assert [op.name for op in net.ops] == ["n + r", "y", "n + r + y"] and [bool(op.layer) for op in net.ops] == [0, 1, 1]
    fused = net.ops[2]
    assert fused.problem.prologue.scaled and fused.inputs == ("x",) and fused.problem.in_shapes == ((2, 4, 6, 6),)


def test_a_normalisation_that_must_stay_apart():
    w = {"w": rng.standard_normal((8, 4, 1, 1)).astype(np.float32), "w3": rng.standard_normal((8, 4, 3, 3)).astype(np.float32)}
    product = node("Conv", "r w", "y")
    relu = node("Relu", "n", "r")
    for nodes, outputs in (
        ([bn("x", "n", 4, w), relu, product, node("Tanh", "r", "z")], "y z"),  # somebody else reads it
        ([bn("x", "n", 4, w), relu, node("Conv", "r w3", "y", pads=[1, 1, 1, 1])], "y"),  # padding is not max(shift, 0)
        ([bn("x", "n", 4, w), node("Tanh", "n", "r"), product], "y"),
        ([bn("x", "n", 4, w, small=True), relu, product], "y"),  # FP16 holds such scales badly
    ):
        assert not network(model(nodes, X, outputs, w)).groups


def test_a_residual_add_and_a_normalisation_are_chosen_apart_from_each_other():
    w = {"w": rng.standard_normal((4, 4, 1, 1)).astype(np.float16).astype(np.float32)}
    nodes = [bn("x", "n", 4, w), node("Relu", "n", "r"), node("Conv", "r w", "a"), node("Add", "a x", "y")]
    net = check_against_ort(model(nodes, X, "y", w), 2e-3)
    assert set(net.groups) == {("y", ("apart", "into a")), ("r", ("apart", "into a"))}
    both = {Feature.RESIDUAL, Feature.SCALED_INPUT}
    assert [op.problem.needs >= both for op in net.ops].count(True) == 1


@pytest.mark.parametrize(
    "behind", [node("Mul", "a big", "y"), node("BatchNormalization", "a ones ones ones zeros", "y", epsilon=0.0)]
)
def test_weights_that_folding_makes_infinite_are_refused(behind):
    one = np.ones(4, np.float32)
    w = {"w0": W["w0"], "big": np.float32(3e38) * one[:, None, None], "ones": one, "zeros": 0 * one}
    with pytest.raises(
        ModelError, match="a: its constants are not finite in FP32 after scales and shifts are folded in; expected"
    ):
        network(model([conv("x", "w0", "a"), behind], X, "y", w | {"w0": 100 * W["w0"]}))


def test_what_scales_a_convolution_is_folded_in_double_precision():
    """1e30 and 1e-30 one after the other: FP32 would hold neither the product in between nor its inverse."""
    w = W | {"up": np.full((4, 1, 1), 1e30, np.float32), "down": np.full((4, 1, 1), 1e-30, np.float32)}
    nodes = [conv("x", "w0", "a"), node("Mul", "a up", "b"), node("Mul", "b up", "c")]
    nodes += [node("Mul", "c down", "d"), node("Mul", "d down", "y")]
    (op,) = network(model(nodes, X, "y", w)).ops
    assert np.allclose(op.weights["w"], W["w0"], rtol=1e-6)
