"""A layer norm in the 1x1 convolutions that read it: what is offered, and its values."""

import random

import numpy as np
import onnx
import pytest

import gpu_runtime as gr
from cuda_kernels.device import named
from cuda_kernels.launch import Emulated
from gpu_runtime.rewrites import back_to_back
from gpu_runtime.rewrites.norms import offer
from tactics.families.conv_gemm import candidates
from tactics.problems.codec import from_json, to_json
from tactics.problems.pointwise_ops import Activation
from tactics.problems.problem import ConvProblem
from tactics.problems.prologue import Prologue
from tactics.problems.reductions import NormalizeProblem
from tactics.sampling.data import random_data, reference
from tactics.tactic import Tactic, Tile
from tests.engines import SPARSE_DEVICE, judge
from tests.problems import assert_right, conv_case, execute
from tests.reference_run import check_against_ort, model, network, node, relative_error

DEVICE = named("h200")
TILE = Tile(64, 32, 64, 2, 2, 4)
rng = np.random.default_rng(7)


def weights(*shape: int, sparse: bool = False) -> np.ndarray:
    w = (rng.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float16).astype(np.float32)
    if sparse:
        w[::2] = 0  # two of four
    return w


def layer_norm(c=24, k=40, n=1, size=6, last=True, sparse=False, more=(), outputs="y", scale=None) -> onnx.ModelProto:
    """A norm over channels, then a fully connected layer, and ReLU; channels `last` in the model, or moved."""
    nodes = [] if last else [node("Transpose", "x", "xt", perm=(0, 2, 3, 1))]
    nodes += [node("LayerNormalization", f"{'x' if last else 'xt'} g b", "m", axis=-1, epsilon=1e-5)]
    nodes += [node("MatMul", "m w", "z"), node("Add", "z v", "s"), *more, node("Relu", "s", "r" if not last else "y")]
    nodes += [] if last else [node("Transpose", "r", "y", perm=(0, 3, 1, 2))]
    given = {
        "g": rng.uniform(0.5, 2, c).astype(np.float32) if scale is None else scale,
        "b": weights(c),
        "v": weights(k),
        "w": weights(c, k, sparse=sparse),
    }
    return model(nodes, {"x": (n, size, size, c) if last else (n, c, size, size)}, outputs, given)


def in_front(net) -> list[ConvProblem]:
    return [op.problem for op in net.ops if isinstance(op.problem, ConvProblem) and op.problem.prologue.normalized]


@pytest.mark.parametrize("case", [{}, {"last": False}, {"n": 3, "c": 20}, {"n": 2, "c": 7, "k": 5, "last": False}], ids=str)
def test_both_options_compute_the_same(case):
    net = check_against_ort(layer_norm(**case), 1e-3, rewrite=offer)
    (problem,) = in_front(net)
    assert problem.prologue == Prologue(normalized=True, epsilon=problem.prologue.epsilon) and problem.epilogue.bias
    assert problem.prologue.epsilon == pytest.approx(1e-5) and [options for _, options in net.groups] == [("apart", "in front")]


def test_layers_that_read_one_norm_take_it_together():
    nodes = [node("LayerNormalization", "x g b", "m", axis=-1), node("MatMul", "m w", "y"), node("MatMul", "m v", "z")]
    given = {"g": weights(24), "b": weights(24), "w": weights(24, 16), "v": weights(24, 32)}
    net = check_against_ort(model(nodes, {"x": (1, 5, 5, 24)}, "y z", given), 1e-3, rewrite=offer)
    assert [p.k for p in in_front(net)] == [16, 32] and len(net.groups) == 1


def test_it_may_stand_beside_a_pair():
    """The convolution behind a norm may be one launch with the next one instead, which cannot normalize."""
    turned = node("Transpose", "x", "t", perm=[0, 2, 3, 1]), node("Transpose", "m", "u", perm=[0, 3, 1, 2])
    nodes = [turned[0], node("LayerNormalization", "t g b", "m", axis=-1), turned[1], node("Conv", "u w", "a")]
    given = {"g": weights(24), "b": weights(24), "w": weights(16, 24, 1, 1), "v": weights(40, 16, 1, 1)}
    both = model([*nodes, node("Conv", "a v", "y")], {"x": (1, 24, 6, 6)}, "y", given)
    net = check_against_ort(both, 1e-3, rewrite=lambda net: offer(back_to_back.offer(net)))
    assert [options for _, options in net.groups] == [("apart", "one", "apart, in front")] and len(in_front(net)) == 1


@pytest.mark.parametrize(
    "case",
    [
        {"outputs": "y m"},
        {"more": [node("Sigmoid", "m", "other")], "outputs": "y other"},
        {"scale": np.full(24, 1e30, np.float32)},
        {"scale": np.full(24, 1e-7, np.float32)},
    ],
    ids=["an output", "another reader", "weights beyond FP16", "weights that FP16 holds badly"],
)
def test_what_is_not_offered(case):
    assert not in_front(offer(network(layer_norm(**case))))


def test_rows_that_are_no_pixels_stay_apart():
    """A norm along the image's width is none of a pixel's channels."""
    nodes = [node("LayerNormalization", "x g b", "m", axis=-1), node("Conv", "m w", "y")]
    given = {"g": weights(24), "b": weights(24), "w": weights(16, 24, 1, 1)}
    net = network(model(nodes, {"x": (1, 24, 24, 24)}, "y", given))
    assert any(isinstance(op.problem, NormalizeProblem) for op in net.ops) and not in_front(offer(net))


@pytest.mark.slow
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_it_runs_in_one_launch(tmp_path, sparse):
    path = tmp_path / "norm.onnx"
    onnx.save(layer_norm(c=96, k=192, size=8, n=2, last=False, sparse=sparse), path)
    engine = gr.build(
        path,
        device=SPARSE_DEVICE,
        sparsity="enable" if sparse else "disable",
        risk=0.5,
        input_formats="fp16:hwc8",
        output_formats="fp16:hwc8",
    )
    (layer,) = (layer for layer in engine.plan.layers if layer.tactic)
    assert layer.problem.prologue.normalized and set(layer.nodes) >= {"m", "z"} and layer.problem.sparse24 == sparse
    judge(engine, path, {i.name: 3 + rng.standard_normal(i.shape).astype(np.float32) for i in engine.plan.inputs})


def tactics(p: ConvProblem) -> list[Tactic]:
    """One tile, dense and sparse, between vectors of 8."""
    found = {
        t.kernel: t
        for t, why in candidates(p, DEVICE, only=TILE)
        if isinstance(t, Tactic) and not why and all(f.layout == "hwc8" for f in (*t.ins, t.out))
    }
    return list(found.values())


def drawn(seed: int) -> tuple[ConvProblem, list[np.ndarray], dict]:
    """Sizes off every grid; pixels far from zero, or with a first channel far from the others."""
    pick = random.Random(f"norm {seed}")
    c, k, n = pick.choice((2, 5, 12, 20, 44, 64, 72, 100, 264)), pick.choice((3, 8, 40, 65)), pick.choice((1, 2, 3))
    p = conv_case(
        n,
        c,
        pick.randint(1, 9),
        pick.randint(1, 9),
        k,
        1,
        1,
        (pick.choice((1, 1, 2)),) * 2,
        bias=True,
        sparse24=c % 4 == 0,
        norm=pick.choice((1e-6, 1e-5, 1e-3)),
    )
    (x,), held = random_data(p, seed)
    wide = x.astype(np.float32) * pick.choice((1, 30)) + pick.choice((0, 5, -40))
    wide[:, 0] += pick.choice((0, 300))
    return p, [wide.astype(np.float16)], held


@pytest.mark.slow
@pytest.mark.sample(12)
@pytest.mark.parametrize("seed", range(24))
def test_drawn(seed):
    """As near to the exact result as a norm of its own, rounded to FP16, would be, or three times as far."""
    p, inputs, held = drawn(seed)
    exact = reference(p, inputs, held)
    rounded = p.prologue.normalize(inputs[0]).astype(np.float16)
    apart = conv_case(p.n, p.c, p.h, p.w, p.k, 1, 1, p.stride, bias=True)
    own = relative_error(reference(apart, [rounded], held).astype(np.float16).astype(np.float32), exact)
    assert len(tactics(p)) == 1 + p.sparse24
    for tactic in tactics(p):
        gpu = Emulated(DEVICE)
        got = execute(gpu, p, tactic, inputs, held)
        assert_right(p, tactic, got, exact)
        assert relative_error(got[:, : p.k].astype(np.float32), exact) <= 3 * own, tactic
        assert gpu.stats[-1].excess_wavefronts == 0


@pytest.mark.slow
@pytest.mark.parametrize("mean, std", [(300.0, 1.0), (60000.0, 500.0), (1e-3, 1e-4), (0.0, 60000.0), (7.0, 0.0)])
def test_what_fp16_holds_is_normalized(mean, std):
    """Pixels far from zero beside their spread, differences beyond FP16's range, pixels of one value."""
    p = conv_case(1, 72, 5, 7, 40, 1, 1, bias=True, sparse24=True, norm=1e-6)
    _, held = random_data(p)
    signs = np.random.default_rng(1).choice((-1.0, 1.0), (1, 72, 5, 7))
    x = (mean + std * signs).astype(np.float16)
    exact = reference(p, [x], held)
    for tactic in tactics(p):
        assert_right(p, tactic, execute(Emulated(DEVICE), p, tactic, [x], held), exact)


def test_what_a_prologue_may_be():
    with pytest.raises(ValueError, match="expected an input with scale and shift, or a gate"):
        Prologue(scaled=True, normalized=True)
    for wrong in ({"epsilon": 1e-5}, {"normalized": True, "epsilon": -1.0}, {"normalized": True, "epsilon": float("nan")}):
        with pytest.raises(ValueError, match="norm's epsilon"):
            Prologue(**wrong)
    with pytest.raises(ValueError, match="1 x 1 kernel"):
        conv_case(1, 8, 4, 4, 8, 1, 1, groups=2, norm=1e-5)
    p = conv_case(1, 8, 4, 4, 8, 1, 1, norm=1e-5, act=Activation("relu"))
    assert from_json(to_json(p)) == p and str(p) != str(conv_case(1, 8, 4, 4, 8, 1, 1, norm=1e-6, act=Activation("relu")))
    assert "in_epsilon1e-05" in str(p)
