"""Elementwise stages in the launch of the pool or normalization before them, and long rows by several blocks: values, orders of
blocks, what is offered, and inside a network."""

import numpy as np
import onnx
import pytest

import gpu_runtime as gr
from cuda_kernels.device import ARCHITECTURES, named
from cuda_kernels.launch import Emulated
from gpu_runtime.explain.layer_info import layer_info
from gpu_runtime.rewrites import chained
from tactics.candidates import candidates
from tactics.launches import launches
from tactics.predict import predict_us
from tactics.problems import codec
from tactics.problems.pointwise_ops import Stage
from tactics.problems.problem import ChainedProblem, PointwiseProblem, PoolProblem
from tactics.problems.reductions import NormalizeProblem
from tactics.sampling.data import images, of_images, random_data
from tests.compiled import takes
from tests.engines import judge
from tests.problems import CHAINED, PROBLEMS, ROWS, assert_written_once, execute
from tests.reference_run import check_against_ort, model, network, node

DEVICE = named("h200")
PARTS = [name for name in (*ROWS, *CHAINED) if "parts" in name or "channels" in name or "padded" in name]
rng = np.random.default_rng(5)


def vectors(problem):
    """The tactic whose tensors are all hwc8."""
    (tactic,) = [t for t in candidates(problem, DEVICE) if {str(f) for f in (*t.ins, t.out)} == {"fp16:hwc8"}]
    return tactic


@pytest.mark.parametrize("name", PARTS)
def test_parts_are_joined_to_the_same_bits_in_any_order_of_blocks(name):
    """With few blocks at a time too: none waits for one that has not begun."""
    problem = PROBLEMS[name]
    tactic = vectors(problem) if "layer" not in name else candidates(problem, DEVICE)[0]
    (launch,) = launches(problem, tactic)
    assert dict(launch.values)["SPLIT"] == (1 if "parts" in name else 2) and launch.workspace and launch.counters == 12
    assert launch.grid[0] >= (2 if "padded" in name else 4)
    inputs, weights = random_data(problem)
    modes = ({}, {"resident_blocks": 1, "threads": 1}, {"seed": 1}, {"seed": 2, "resident_blocks": 3}, {"async_mode": "late"})
    got = [execute(Emulated(DEVICE, **mode), problem, tactic, inputs, weights) for mode in modes]
    assert all(np.array_equal(y, got[0]) for y in got)
    assert_written_once(problem, tactic, DEVICE, inputs, weights)


def test_only_few_long_rows_are_taken_apart():
    """What one block does as quickly stays with one block; a map of 64 x 56 x 56 is four times as quick with many."""
    for p in (
        NormalizeProblem(1, 64, 8, 8, "standard", "chw"),
        NormalizeProblem(64, 512, 14, 14, "standard", "hw"),
        NormalizeProblem(1, 3136, 1, 96, "standard", "w"),
        NormalizeProblem(1, 64, 56, 56, "softmax", "chw"),
    ):
        assert not any(launch.workspace for launch in launches(p, vectors(p)))
    large = NormalizeProblem(1, 64, 56, 56, "standard", "chw", epsilon=1e-5, affine="c")
    assert predict_us(large, vectors(large), DEVICE) < 4 < 8 < 31


@pytest.mark.parametrize("name", CHAINED)
def test_problems_survive_json_and_images_stand_alone(name):
    p = CHAINED[name]
    assert codec.from_json(codec.to_json(p)) == p and p.in_shapes == (*p.first.in_shapes, *p.chain.in_shapes[1:])
    assert images(p) == p.n and of_images(p, 7).out_shape == (7, *p.out_shape[1:])


def test_wrong_chains_are_refused():
    pool = PoolProblem(1, 8, 6, 6, "max", 2, 2, (5, 5))
    for shape, tensors in (((1, 8, 6, 6), ("nchw",)), ((1, 8, 5, 5), ("c",))):
        with pytest.raises(ValueError, match="chained: expected a chain whose first tensor"):
            ChainedProblem(pool, PointwiseProblem(*shape, (Stage("relu"),), tensors))
    with pytest.raises(ValueError, match="chained: expected"):
        ChainedProblem(pool, PointwiseProblem(1, 8, 5, 5))


@pytest.mark.slow
@pytest.mark.parametrize("sm", ARCHITECTURES)
@pytest.mark.parametrize("name", [*PARTS, "group_norm_added", "softmax_added", "pool_and_rows", "layer_norm_and_rows"])
def test_they_compile_without_spills(name, sm):
    problem = PROBLEMS[name]
    for tactic in {t.ins[0].layout == "chw": t for t in candidates(problem, DEVICE)}.values():
        for launch in launches(problem, tactic):
            takes(launch.kernel, launch.values, sm)


# ---- in networks


def values(*shape):
    return rng.uniform(0.5, 1.5, shape).astype(np.float32)


def metaformer(c=16, size=12, groups=1) -> onnx.ModelProto:
    """A block whose tokens are mixed by a pool: norm, pool minus its input, scale, residual; norm, SiLU."""
    w = {
        "to": np.int64([0, groups, -1]),
        "back": np.int64([1, c, size, size]),
        "one": np.ones(groups, np.float32),
        "none": np.zeros(groups, np.float32),
        "w": np.float32(np.float16(rng.standard_normal((c, 8, 3, 3)) / 8)),
    }
    w |= {name: values(c, 1, 1) for name in "abcde"}
    nodes = [node("Conv", "x w", "stem", pads=(1, 1, 1, 1))]
    for i, (source, scale, shift) in enumerate((("stem", "a", "b"), ("r", "c", "d"))):
        nodes += [
            node("Reshape", f"{source} to", f"t{i}"),
            node("InstanceNormalization", f"t{i} one none", f"i{i}"),
            node("Reshape", f"i{i} back", f"u{i}"),
            node("Mul", f"u{i} {scale}", f"m{i}"),
            node("Add", f"m{i} {shift}", f"n{i}"),
        ]
        if i == 0:
            nodes += [
                node("AveragePool", "n0", "p", kernel_shape=(3, 3), pads=(1, 1, 1, 1)),
                node("Sub", "p n0", "s"),
                node("Mul", "s e", "q"),
                node("Add", "stem q", "r"),
            ]
    return model([*nodes, node("Sigmoid", "n1", "g"), node("Mul", "n1 g", "y")], {"x": (1, 8, size, size)}, "y", w)


@pytest.mark.parametrize("groups", [1, 2])
def test_a_block_takes_a_launch_for_each_statistic_and_one_for_the_pool(groups, tmp_path):
    path = tmp_path / "m.onnx"
    onnx.save(metaformer(groups=groups), path)
    engine = gr.build(path, device="h200")
    launched = [layer for layer in engine.plan.layers if layer.tactic and layer.type != "reformat"]
    assert [layer.type for layer in launched] == ["conv", "normalize", "pool", "normalize"]
    told = {row["Name"]: row for row in layer_info(engine.record)["Layers"]}
    assert told[launched[2].name]["LayerType"] == "Pooling" and told[launched[2].name]["NbOperations"] == 3
    assert told[launched[3].name]["LayerType"] == "Normalization" and told[launched[3].name]["NbOperations"] == 1
    judge(engine, path, {"x": rng.standard_normal((1, 8, 12, 12)).astype(np.float32)})


def test_all_options_compute_the_same():
    net = check_against_ort(metaformer(), 1e-5, rewrite=chained.offer)
    assert [options for _, options in net.groups] == [("apart", "one")] * 2


def test_it_is_not_offered_where_what_lies_between_is_wanted_or_the_stages_begin_elsewhere():
    def groups(nodes, outputs, w=None):
        return chained.offer(network(model(nodes, {"x": (1, 8, 6, 6)}, outputs, w or {}))).groups

    pool, relu = node("MaxPool", "x", "p", kernel_shape=(2, 2)), node("Relu", "p", "y")
    assert len(groups([pool, relu], "y")) == 1
    assert not groups([pool, relu], "y p")
    assert not groups([pool, relu, node("Tanh", "p", "z")], "y z")
    assert not groups([node("GlobalMaxPool", "x", "p"), relu], "y")
    assert not groups([node("GlobalMaxPool", "x", "p"), node("Mul", "x p", "y")], "y")
    twice = [node("Softmax", "x", "s", axis=1), node("Exp", "x", "e"), node("Mul", "e s", "y")]  # the chain begins with x
    assert not groups(twice, "y")


def after_norms(activation=True) -> onnx.ModelProto:
    """Two tensors that no convolution ends with, added, then normalized, scaled and activated."""
    w = {"s": values(24), "b": values(24)}
    nodes = [
        node("Tanh", "x", "t"),
        node("Split", "t", "p q", axis=1, num_outputs=2),
        node("Add", "p q", "sum"),
        node("LayerNormalization", "sum s b", "n", axis=-1),
    ]
    if activation:
        nodes.append(node("Gelu", "n", "a"))
    nodes.append(node("MaxPool", "a" if activation else "n", "y", kernel_shape=(3, 3)))
    return model(nodes, {"x": (2, 16, 5, 24)}, "y", w, 20)


@pytest.mark.parametrize("activation", [True, False])
def test_a_sum_is_part_of_the_normalization_that_alone_reads_it(activation, tmp_path):
    net = check_against_ort(after_norms(activation), 1e-5, rewrite=chained.offer)
    (options,) = [options for group, options in net.groups if "sum" in group]
    assert options == (("apart", "with the sum", "with the stages", "one") if activation else ("apart", "one"))
    path = tmp_path / "m.onnx"
    onnx.save(after_norms(activation), path)
    engine = gr.build(path, device="h200")
    (layer,) = [layer for layer in engine.plan.layers if layer.type == "normalize"]
    assert layer.nodes == (("sum", "n", "a") if activation else ("sum", "n"))
    judge(engine, path, {"x": rng.standard_normal((2, 16, 5, 24)).astype(np.float32)})
