"""Squeeze-excite's scale in one launch or two: values, counters, what is offered, and inside a network."""

from dataclasses import replace

import numpy as np
import onnx
import pytest

import gpu_runtime as gr
from benchmarks.networks import Net
from cuda_kernels.device import ARCHITECTURES, named
from cuda_kernels.launch import Emulated
from cuda_kernels.params import members
from gpu_runtime.explain import wording
from gpu_runtime.rewrites import back_to_back, squeeze_excite
from tactics.candidates import candidates, rejected
from tactics.families.squeeze_excite import MANY_AHEAD, THREADS, ways
from tactics.format import Format
from tactics.launches import launches
from tactics.problems import codec
from tactics.problems.pointwise_ops import Activation
from tactics.problems.problem import PoolProblem, SqueezeExciteProblem
from tactics.sampling.data import random_data, reference
from tactics.tactic import Tactic
from tests.compiled import takes
from tests.engines import judge
from tests.problems import assert_right, assert_written_once, conv_case, execute
from tests.reference_run import network

DEVICE, HWC8 = named("h200"), Format("fp16", "hwc8")
RELU, GATE = Activation("relu"), Activation("hard_sigmoid", (0.2, 0.5))


def problem(n, c, h, w, mid, k=None, bias=True) -> SqueezeExciteProblem:
    pool = PoolProblem(n, c, h, w, "avg", h, w, (1, 1))
    first = conv_case(n, c, 1, 1, mid, 1, 1, bias=bias, act=RELU)
    return SqueezeExciteProblem(pool, first, conv_case(n, mid, 1, 1, k or c, 1, 1, bias=bias, act=GATE))


CASES = {
    "small": problem(2, 16, 5, 7, 8),
    "odd": problem(1, 100, 9, 13, 25),
    "wide": problem(3, 960, 7, 7, 240),
    "another": problem(1, 72, 14, 14, 20, 40, bias=False),
    "alone": problem(1, 8, 1, 1, 3),
    "runs": problem(2, 32, 48, 45, 8),
    "slices and runs": problem(1, 136, 33, 35, 70),
    "many hidden": problem(2, 24, 20, 19, 1023, 56),
    "more outputs than threads": problem(1, 40, 9, 7, 5, 2100),
    "more vectors than threads": problem(1, 4104, 1, 1, 6, 16),
}


def ways_of(p: SqueezeExciteProblem, device: str = "h200", sm: str = "") -> list[Tactic]:
    """One tactic for each way in which blocks share an image."""
    found = named(device)
    return list({t.tile: t for t in candidates(p, replace(found, sm=sm or found.sm))}.values())


@pytest.mark.parametrize("name", CASES)
def test_values_and_counters(name):
    p = CASES[name]
    inputs, weights = random_data(p)
    for tactic in candidates(p, DEVICE):
        gpu = Emulated(DEVICE)
        assert_right(p, tactic, execute(gpu, p, tactic, inputs, weights), reference(p, inputs, weights))
        assert gpu.stats[0].excess_wavefronts == 0, gpu.stats[0].excess
        assert Tactic.parse(tactic.name) == tactic
    for tactic in ways_of(p):
        assert_written_once(p, tactic, DEVICE, inputs, weights)
    assert all(reason for _, reason in rejected(p, DEVICE)) and codec.from_json(codec.to_json(p)) == p


@pytest.mark.parametrize(
    "options", [{"async_mode": "late"}, {"seed": 1}, {"seed": 2}, {"seed": 3, "threads": 1}, {"resident_blocks": 8}], ids=str
)
def test_orders_of_blocks_agree_bit_for_bit(options):
    """Whichever block comes last adds the same sums in the same order, and leaves the counters as it found them."""
    p = CASES["slices and runs"]
    inputs, weights = random_data(p)
    shared = [t.parts for t in ways_of(p) if t.parts.slices > 1 < t.parts.runs]
    assert {(parts.cluster, min(parts.apart, 2)) for parts in shared} == {(True, 0), (False, 0), (False, 1), (False, 2)}
    for tactic in ways_of(p):
        expected, got = (execute(Emulated(DEVICE, **o), p, tactic, inputs, weights) for o in ({}, options))
        assert np.array_equal(expected, got), tactic.name


@pytest.mark.parametrize("seed", range(3))
def test_no_block_waits_for_one_that_has_not_begun(seed):
    """One at a time, in any order; of a cluster its own."""
    p = CASES["runs"]
    inputs, weights = random_data(p)
    for tactic in ways_of(p):
        blocks = tactic.parts.slices * tactic.parts.runs
        few = {"resident_blocks": blocks if tactic.parts.cluster else 1, "seed": seed}
        expected, got = (execute(Emulated(DEVICE, **o), p, tactic, inputs, weights) for o in ({}, few))
        assert np.array_equal(expected, got), tactic.name


@pytest.mark.parametrize(
    "n, c, h, mid", [(1, 8, 1, 1), (32, 32, 112, 8), (1, 96, 56, 4), (1, 1152, 7, 48), (512, 24, 64, 6), (1, 1 << 20, 1, 64)]
)
def test_ways_to_share_an_image(n, c, h, mid):
    """All pixels of all channels are somebody's; all blocks are few enough."""
    found = ways(problem(n, c, h, h, mid))
    assert found and len(set(found)) == len(found) <= 10
    for parts in found:
        launch, *second = launches(problem(n, c, h, h, mid), Tactic("squeeze_excite", parts, (HWC8,), HWC8))
        args = {m.name: value for m, (_, value) in zip(members(launch.kernel, launch.values), launch.args, strict=True)}
        assert parts.slices * args["chunks"] * 32 >= c and 1 << args["log_near"] <= THREADS // 32
        blocks = parts.slices * parts.runs * max(parts.apart, 1)
        assert parts.runs * args["run"] >= h * h and args["run"] % 8 == 0 and launch.grid == (blocks, n, 1)
        assert bool(launch.counters) == (not parts.cluster and not second and launch.grid[0] > 1)
        assert len(second) == bool(parts.apart) and all(s.grid[0] * args["each"] * 16 >= c and not s.counters for s in second)
        assert all(s.workspace == launch.workspace == n * parts.slices * parts.runs * mid * 4 for s in second)
    assert any(n * parts.slices * parts.runs >= min(8, -(-c // 8) * h * h // THREADS) for parts in found)


def test_what_is_padded_takes_no_part_where_a_mean_is_infinite():
    """Of one hidden value, beside which the kernel has three that are nobody's."""
    p = problem(1, 40, 24, 25, 1)
    (x,), weights = random_data(p)
    x[0, 3, 7, 7] = np.inf
    for tactic in ways_of(p):
        assert_right(p, tactic, execute(Emulated(DEVICE), p, tactic, [x], weights), reference(p, [x], weights))


@pytest.mark.parametrize("more, weight, least", [(1, 1, 0.1), (1e4, 10, 1e5), (1e4, 1e4, 1e8)])
def test_hidden_values_too_large_for_fp16(more, weight, least):
    """Between the layers they are FP32: as large as these weights make them, to gates that are all 0 or 1."""
    p = problem(1, 64, 12, 12, 20)
    (x,), weights = random_data(p)
    x, large = np.abs(x) * more, weights | {"b": weights["b"] * 0}
    large["w"] = np.abs(weights["w"]) * weight
    hidden = np.einsum("kc,c->k", large["w"].reshape(20, 64).astype(np.float64), x.mean((0, 2, 3), dtype=np.float64))
    large["w2"] = (weights["w2"] * max(1 / hidden.max(), 1e-4)).astype(np.float16)
    assert hidden.max() > least and large["w"].max() < 65504
    for tactic in ways_of(p):
        assert_right(p, tactic, execute(Emulated(DEVICE), p, tactic, [x], large), reference(p, [x], large))


def test_divisions_by_products_are_exact():
    for d in range(1, 1025):
        inverse = -(-(1 << 22) // d)
        assert 1023 * inverse < 1 << 32
        assert all(i * inverse >> 22 == i // d for i in (*range(0, 1024, 7), *range(d - 1, 1024, d), *range(0, 1024, d)))


def test_clusters_are_offered_where_the_device_has_them():
    p = CASES["runs"]
    assert any(t.parts.cluster for t in ways_of(p)) and not any(t.parts.cluster for t in ways_of(p, "a100"))
    assert {r.sentence for t, r in rejected(p, named("a100")) if t.parts.cluster} == {"sm_80 has no clusters"}
    assert {t.tile for t in ways_of(p, "a100")} < {t.tile for t in ways_of(p)}


@pytest.mark.slow
@pytest.mark.parametrize("sm", ARCHITECTURES)
def test_it_compiles_without_spills(sm):
    for tactic in ways_of(CASES["runs"], sm=sm):
        for launch in launches(CASES["runs"], tactic):
            blocks = 1 if dict(launch.values)["AHEAD"] == MANY_AHEAD else 3 if launch.workspace else 2  # of 256 threads
            assert takes(launch.kernel, launch.values, sm).regs <= 256 // blocks // 8 * 8


def block(prune: bool = False) -> onnx.ModelProto:
    net = Net("block", (1, 64, 14, 14))
    x = net.relu(net.conv("x", "before", 96, 1), "before_relu")
    s = net.add("GlobalAveragePool", [x], "squeeze", 96)
    s = net.relu(net.conv(s, "reduce", 24, 1, prune=prune), "reduce_relu")
    s = net.add("Sigmoid", [net.conv(s, "expand", 96, 1)], "gate", 96)
    return net.finish(net.conv(net.add("Mul", [x, s], "excite", 96), "after", 16, 1))


def test_a_block_takes_one_launch_beside_its_convolutions(tmp_path):
    """For the scale; the convolution behind it multiplies. And its answer is onnxruntime's."""
    path = tmp_path / "block.onnx"
    onnx.save(block(), path)
    engine = gr.build(path, device="h200")
    (layer,) = [layer for layer in engine.plan.layers if layer.tactic_name.startswith("squeeze_excite")]
    assert layer.layer == "reduce -> expand" and {"squeeze", "reduce", "expand", "gate"} <= set(layer.nodes)
    assert sum(bool(layer.tactic_name) for layer in engine.plan.layers if layer.type != "reformat") == 3
    assert engine.plan.layers[-1].problem.prologue.gated and "excite" in engine.plan.layers[-1].nodes
    assert ("reduce", "expand") in [r.layers for r in engine.sparsity.rows]
    x = np.random.default_rng(1).standard_normal((1, 64, 14, 14)).astype(np.float32)
    judge(engine, path, {"x": x})


def test_all_three_are_one_launch_or_apart():
    net = back_to_back.offer(squeeze_excite.offer(network(block())))
    kinds = [(type(op.problem).__name__, dict(op.when)) for op in net.ops if len(op.layers) == 2 and "reduce" in op.layers]
    group = "reduce -> expand (squeeze-excite)"
    assert sorted(kinds, key=str) == [
        ("BackToBackProblem", {group: "apart", "reduce -> expand": "one"}),
        ("SqueezeExciteProblem", {group: "one"}),
    ]


@pytest.mark.parametrize(
    "sparsity, reason",
    [
        ("disable", "no_sparse_tactic"),
        ("enable", "one_launch"),
        ("force", "one_launch"),
    ],
)
def test_layers_that_could_run_sparse_are_one_dense_launch_and_the_log_says_so(tmp_path, sparsity, reason):
    """The first layer's weights are 2:4; forced, those of both are, and the plan with them sparse is compared."""
    path = tmp_path / "block.onnx"
    onnx.save(block(prune=True), path)
    engine = gr.build(path, device="h200", sparsity=sparsity)
    (row,) = [r for r in engine.sparsity.rows if r.layers == ("reduce", "expand")]
    assert (row.verdict, row.reason) == ("dense", reason) and row.if_sparse is None
    assert (row.best_sparse is not None) == (sparsity != "disable")
    assert (row.other_cost_us or 0) > 0 if sparsity == "force" else row.other_cost_us is None
    unknown = replace(row, best_dense=None, best_sparse=None, other=None)
    told, bare = (wording.sentence(r, engine.record) for r in (row, unknown))
    assert "None" not in told + bare and ("its 2 layers run dense in one tactic" in told) == (reason == "one_launch")
    assert row.able == (("reduce", "expand") if sparsity == "force" else ("reduce",))
    assert set(row.able) == set(row.layers) & set(engine.sparsity.eligible)
    assert ("Only reduce could run sparse" in told) == (sparsity == "enable")  # forced, both could


def test_of_layers_that_cannot_run_sparse_the_pattern_is_told(tmp_path):
    path = tmp_path / "block.onnx"
    onnx.save(block(), path)
    (row,) = [r for r in gr.build(path, device="h200", sparsity="enable").sparsity.rows if r.layers == ("reduce", "expand")]
    assert (row.verdict, row.reason) == ("not_eligible", "pattern_violation")
