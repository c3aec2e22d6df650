"""A product with one value per image and channel in the 1x1 convolution that reads it: what is offered, and its values."""

import numpy as np
import onnx
import pytest

import gpu_runtime as gr
from gpu_runtime.rewrites import back_to_back
from gpu_runtime.rewrites.squeeze_excite import gates
from tactics.problems.codec import from_json, to_json
from tactics.problems.pointwise_ops import Activation
from tactics.problems.problem import ConvProblem
from tactics.problems.prologue import Prologue
from tests.engines import judge
from tests.problems import conv_case
from tests.reference_run import check_against_ort, model, network, node

rng = np.random.default_rng(5)
RELU = Activation("relu")


def weights(*shape: int, sparse: bool = False) -> np.ndarray:
    w = (rng.standard_normal(shape) / 4).astype(np.float16).astype(np.float32)
    if sparse:
        w[:, ::2] = 0  # two of four
    return w


def gated(
    n=1, c=24, size=6, first="x g", between="", k=40, r=1, stride=1, sparse=False, more=(), outputs="y"
) -> onnx.ModelProto:
    """act(x * g), then a convolution, with a residual and an activation behind it."""
    nodes = [node("Mul", first, "m")]
    nodes += [node(between, "m", "a")] if between else []
    product = "a" if between else "m"
    nodes += [node("Conv", f"{product} w", "z", pads=(r // 2,) * 4, strides=(stride,) * 2), node("Add", "z t", "s"), *more]
    out = -(-size // stride)
    inputs = {"x": (n, c, size, size), "g": (n, c, 1, 1), "t": (n, k, out, out)}
    return model([*nodes, node("Relu", "s", "y")], inputs, outputs, {"w": weights(k, c, r, r, sparse=sparse)})


def in_front(net) -> list[ConvProblem]:
    return [op.problem for op in net.ops if isinstance(op.problem, ConvProblem) and op.problem.prologue.gated]


def test_a_product_with_another_function_behind_it_stays():
    """Only what GATED_ACTS names can stand between: an Add of a tensor, a function of its own."""
    for between in (node("Sigmoid", "m", "a"), node("Add", "m x", "a")):
        nodes = [node("Mul", "x g", "m"), between, node("Conv", "a w", "y", pads=(0,) * 4)]
        net = network(model(nodes, {"x": (1, 24, 6, 6), "g": (1, 24, 1, 1)}, "y", {"w": weights(40, 24, 1, 1)}))
        assert not in_front(gates(net))


@pytest.mark.parametrize(
    "case",
    [{}, {"n": 3}, {"first": "g x", "between": "Relu"}, {"between": "Relu", "n": 2, "c": 20}, {"size": 7, "stride": 2, "n": 2}],
    ids=str,
)
def test_both_options_compute_the_same(case):
    net = check_against_ort(gated(**case), 1e-5, rewrite=gates)
    alone, added = sorted(in_front(net), key=lambda p: p.epilogue.residual)
    assert added.epilogue.residual and not alone.epilogue.residual and added.prologue == alone.prologue
    assert added.prologue.act.name == ("relu" if "between" in case else "none")
    assert added.in_shapes[-1] == alone.in_shapes[-1] == (added.n, added.c, 1, 1)


@pytest.mark.parametrize(
    "case",
    [{"r": 3}, {"between": "Tanh"}, {"outputs": "y m"}, {"more": [node("Sigmoid", "m", "other")], "outputs": "y other"}],
    ids=["3x3", "another activation", "an output", "another reader"],
)
def test_what_is_not_offered(case):
    assert not in_front(gates(network(gated(**case))))


def test_it_may_stand_beside_a_pair():
    """The convolution behind a gate may be one launch with the next one instead."""
    nodes = [node("Mul", "x g", "m"), node("Conv", "m w", "a"), node("Conv", "a v", "y")]
    given = {"w": weights(16, 24, 1, 1), "v": weights(40, 16, 1, 1)}
    both = model(nodes, {"x": (1, 24, 8, 8), "g": (1, 24, 1, 1)}, "y", given)
    net = check_against_ort(both, 1e-3, rewrite=lambda net: gates(back_to_back.offer(net)))
    assert net.groups == (("a -> y", ("apart", "one", "apart, gated")),) and len(in_front(net)) == 1


@pytest.mark.parametrize("case", [{"n": 1}, {"n": 2, "between": "Relu"}, {"n": 2, "sparse": True}], ids=str)
def test_it_runs_in_one_launch(tmp_path, case):
    path = tmp_path / "gated.onnx"
    onnx.save(gated(c=64, size=14, k=64, **case), path)
    formats = {"input_formats": "fp16:hwc8", "output_formats": "fp16:hwc8"}
    engine = gr.build(path, device="h200", sparsity="enable" if "sparse" in case else "disable", **formats)
    (layer,) = engine.plan.layers
    assert layer.problem.prologue.gated and set(layer.nodes) >= {"m", "z"}
    judge(engine, path, {i.name: rng.standard_normal(i.shape).astype(np.float32) for i in engine.plan.inputs})


def test_what_a_prologue_may_be():
    with pytest.raises(ValueError, match="a gate and one of"):
        Prologue(gated=True, act=Activation("tanh"))
    with pytest.raises(ValueError, match="expected an input with scale and shift, or a gate"):
        Prologue(scaled=True, gated=True)
    with pytest.raises(ValueError, match="1 x 1 kernel"):
        conv_case(1, 8, 4, 4, 8, 3, 3, gated=RELU)
    p = conv_case(1, 8, 4, 4, 8, 1, 1, gated=RELU, act=RELU)
    assert from_json(to_json(p)) == p and str(p) != str(conv_case(1, 8, 4, 4, 8, 1, 1, gated=Activation("none"), act=RELU))
