"""Convolutions of the pieces of one tensor as one convolution: what is offered, its values, and inside a network."""

import numpy as np
import onnx
import pytest

import gpu_runtime as gr
from gpu_runtime.rewrites import pieces
from tactics.problems.problem import ConvProblem
from tests.engines import judge
from tests.reference_run import check_against_ort, model, network, node

rng = np.random.default_rng(8)


def weights(*shape: int) -> np.ndarray:
    return (rng.standard_normal(shape) / 4).astype(np.float16).astype(np.float32)


def mixed(
    sizes=(8, 8),
    kernels=(1, 1),
    k=(),
    depthwise=False,
    stride=1,
    h=9,
    w=7,
    act="",
    order=None,
    behind=(),
    outputs="y",
    pads=None,
    n=1,
    wide=0,
) -> onnx.ModelProto:
    """Split, a convolution of each piece, Concat; `behind`: nodes from c (the Concat's output) and t to y."""
    k = k or sizes
    given = {"s": np.array([*sizes, *([wide] if wide else [])])}
    parts = [f"p{i}" for i in range(len(sizes))]
    nodes = [node("Split", "x s", " ".join([*parts, *(["unused"] if wide else [])]), axis=1)]
    for i, (c, r, out) in enumerate(zip(sizes, kernels, k, strict=True)):
        given |= {f"w{i}": weights(out, 1 if depthwise else c, r, r), f"b{i}": weights(out)}
        pad = (pads or [(r // 2,) * 4] * len(sizes))[i]
        bias = f" b{i}" if i else ""  # one of them has none
        nodes.append(node("Conv", f"p{i} w{i}{bias}", f"z{i}", pads=pad, strides=(stride,) * 2, group=c if depthwise else 1))
        nodes += [node(act, f"z{i}", f"a{i}")] if act else []
    joined = [f"{'a' if act else 'z'}{i}" for i in (order or range(len(sizes)))]
    out = -(-h // stride), -(-w // stride)
    nodes += [node("Concat", " ".join(joined), "c" if behind else "y", axis=1), *behind]
    inputs = {"x": (n, sum(sizes) + wide, h, w)} | ({"t": (n, sum(k), *out)} if behind else {})
    return model(nodes, inputs, outputs, given)


def joined(net) -> list[ConvProblem]:
    return [op.problem for op in net.ops if isinstance(op.problem, ConvProblem) and len(op.layers) > 1]


ADD, ADD_RELU = [node("Add", "c t", "y")], [node("Add", "t c", "d"), node("Relu", "d", "y")]


@pytest.mark.parametrize(
    "case, groups, window",
    [
        ({}, 2, 1),
        ({"kernels": (3, 3), "n": 2, "act": "Relu"}, 2, 3),
        ({"sizes": (5, 5, 5), "kernels": (1,) * 3, "k": (7,) * 3}, 3, 1),
        ({"sizes": (8, 3, 5), "kernels": (3, 5, 7), "depthwise": True}, 16, 7),
        ({"sizes": (8, 8), "kernels": (5, 3), "depthwise": True, "stride": 2, "n": 2, "act": "Sigmoid"}, 16, 5),
        ({"sizes": (4, 8), "kernels": (3, 5), "depthwise": True, "pads": [(0, 1, 2, 1), (1, 2, 3, 2)]}, 12, 5),
    ],
)
def test_both_options_compute_the_same(case, groups, window):
    net = check_against_ort(mixed(**case), 1e-5, rewrite=pieces.offer)
    (problem,) = joined(net)
    assert (problem.groups, problem.r, problem.s) == (groups, window, window) and problem.epilogue.bias


@pytest.mark.parametrize(
    "case, act, first",
    [
        ({"behind": ADD}, "none", False),
        ({"behind": ADD_RELU}, "relu", False),
        ({"behind": ADD, "act": "Relu"}, "relu", True),
    ],
)
def test_a_sum_behind_may_be_the_residual(case, act, first):
    net = check_against_ort(mixed(**case), 1e-5, rewrite=pieces.offer)
    alone, added = joined(net)
    assert added.epilogue.residual and not alone.epilogue.residual
    assert (added.epilogue.act.name, added.epilogue.act_first) == (act, first)


def test_two_activations_around_a_sum_stay_apart_from_it():
    net = check_against_ort(mixed(behind=ADD_RELU, act="Tanh"), 1e-5, rewrite=pieces.offer)
    (alone,) = joined(net)
    assert not alone.epilogue.residual


@pytest.mark.parametrize(
    "case",
    [
        {"order": (1, 0)},
        {"wide": 8},
        {"kernels": (1, 3)},
        {"k": (8, 16)},
        {"outputs": "y z0"},
        {"sizes": (8, 4), "kernels": (3, 3), "k": (8, 4), "pads": [(1, 1, 1, 1)] * 2},
    ],
    ids=["another order", "not all of it", "other kernels", "other sizes", "an output", "other channels"],
)
def test_what_is_not_offered(case):
    assert not joined(pieces.offer(network(mixed(**case))))


def test_a_gate_stands_in_front_of_groups():
    nodes = [node("Mul", "x g", "m"), node("Split", "m s", "p q", axis=1), node("Conv", "p w", "a"), node("Conv", "q v", "b")]
    nodes += [node("Concat", "a b", "c", axis=1), node("Add", "c t", "y")]
    given = {"s": np.array([8, 8]), "w": weights(8, 8, 1, 1), "v": weights(8, 8, 1, 1)}
    both = model(nodes, {"x": (2, 16, 6, 5), "g": (2, 16, 1, 1), "t": (2, 16, 6, 5)}, "y", given)
    net = check_against_ort(both, 1e-5, rewrite=pieces.offer)
    gated = [p for p in joined(net) if p.prologue.gated]
    assert len(gated) == 2 and {p.groups for p in gated} == {2}


@pytest.mark.parametrize(
    "case",
    [
        {"sizes": (16, 8, 8), "kernels": (3, 5, 7), "depthwise": True, "h": 14, "w": 14, "act": "Relu"},
        {"sizes": (20, 20), "kernels": (1, 1), "h": 14, "w": 14, "behind": ADD, "k": (12, 12), "n": 2},
    ],
    ids=str,
)
def test_a_mixed_convolution_is_one_launch(tmp_path, case):
    path = tmp_path / "mixed.onnx"
    onnx.save(mixed(**case), path)
    engine = gr.build(path, device="h200", input_formats="fp16:hwc8", output_formats="fp16:hwc8")
    (step,) = engine.plan.steps
    (row,) = engine.sparsity.rows
    assert len(row.layers) == len(case["sizes"])
    judge(engine, path, {i.name: rng.standard_normal(i.shape).astype(np.float32) for i in engine.plan.inputs})
