"""A convolution and the 1x1 convolution behind it in one launch: values, counters, what is offered, and inside a network."""

from dataclasses import replace

import numpy as np
import onnx
import pytest

import gpu_runtime as gr
from benchmarks.networks import Net
from cuda_kernels.device import ARCHITECTURES, named
from cuda_kernels.named_devices import SMEM_PER_BLOCK
from gpu_runtime.rewrites.back_to_back import offer
from tactics.candidates import candidates, rejected
from tactics.families.back_to_back import TILES
from tactics.format import Format
from tactics.launches import launches
from tactics.predict import predict, predict_us
from tactics.problems import codec
from tactics.problems.convolution import with_epilogue
from tactics.problems.pointwise_ops import Activation
from tactics.problems.problem import BackToBackProblem, ConvProblem
from tactics.sampling.data import random_data
from tactics.tactic import Tactic
from tests.compiled import takes
from tests.engines import judge
from tests.problems import assert_written_once, check, conv_case
from tests.reference_run import network

DEVICE = named("h200")
HWC8 = Format("fp16", "hwc8")
RELU, PRELU, SIGMOID = Activation("relu"), Activation("prelu"), Activation("sigmoid")


def pair(first: ConvProblem, k: int, **more) -> BackToBackProblem:
    return BackToBackProblem(first, conv_case(*first.out_shape, k, 1, 1, **more))


PAIRS = {
    "bottleneck": pair(
        conv_case(2, 64, 9, 11, 64, 3, 3, pad=(1, 1, 1, 1), bias=True, act=RELU),
        256,
        bias=True,
        residual=True,
        act=RELU,
    ),
    "narrow": pair(conv_case(1, 20, 13, 7, 36, 3, 2, (2, 1), (1, 0, 1, 1), bias=True, act=SIGMOID), 20, act=PRELU),
    "wide": pair(conv_case(1, 40, 8, 8, 120, 1, 1, act=PRELU), 72, bias=True, residual=True, act_first=True, act=SIGMOID),
}


def run(problem, tactic, **options):
    return check(problem, tactic, DEVICE, **options)


@pytest.mark.slow
@pytest.mark.parametrize("name", PAIRS)
def test_every_tile(name):
    problem = PAIRS[name]
    found = [t for t in candidates(problem, DEVICE) if t.out.layout in ("hwc8", "chw32")]
    found = list({(t.tile, t.out): t for t in found}.values())
    assert len({t.tile for t in found}) == sum(t.m == (128 if name == "wide" else 64) for t in TILES)
    for tactic in found:
        assert Tactic.parse(tactic.name) == tactic
        t, (launch,) = tactic.tile, launches(problem, tactic)
        _, stats = run(problem, tactic)
        first, blocks = problem.first, launch.grid[0]
        steps = -(-first.r * first.s * -(-first.c // 8) * 8 // 64) * 4 + -(-problem.second.k // t.m) * (t.m // 16)
        assert stats.mma == blocks * (t.m // 16) * (t.n // 8) * steps
        assert stats.excess_wavefronts == 0, f"bank conflicts: {stats.excess}"


@pytest.mark.parametrize("options", [{"async_mode": "late"}, {"seed": 1}, {"seed": 2, "async_mode": "late"}], ids=str)
def test_modes_and_orders_agree_bit_for_bit(options):
    problem = PAIRS["bottleneck"]
    tactic = candidates(problem, DEVICE)[0]
    assert np.array_equal(run(problem, tactic)[0], run(problem, tactic, **options)[0])


def test_what_lies_between_never_touches_memory():
    problem = PAIRS["bottleneck"]
    tactic = next(t for t in candidates(problem, DEVICE) if t.ins[0] == t.out == HWC8)
    inputs, weights = random_data(problem)
    assert_written_once(problem, tactic, DEVICE, inputs, weights)
    _, stats = run(problem, tactic)
    out = 2 * np.prod(problem.out_shape)
    assert stats.launch_unique_store_bytes == out
    constants = 2 * sum(weights[n].size for n in ("w", "w2")) + 4 * (64 + 256)
    assert stats.launch_unique_load_bytes <= inputs[0].nbytes + out + constants + 64


def test_every_refusal_has_a_reason():
    assert all(reason for _, reason in rejected(PAIRS["wide"], DEVICE))
    with pytest.raises(ValueError, match="expected a second convolution of the first one's output"):
        BackToBackProblem(PAIRS["wide"].first, PAIRS["narrow"].second)
    assert codec.from_json(codec.to_json(PAIRS["narrow"])) == PAIRS["narrow"]


@pytest.mark.slow
@pytest.mark.parametrize("sm", ARCHITECTURES)
def test_tiles_compile_without_spills(sm):
    device = replace(DEVICE, sm=sm, smem_per_block=SMEM_PER_BLOCK[int(sm[3:].rstrip("a"))])
    wanted = {}
    for problem in (PAIRS["bottleneck"], PAIRS["wide"]):
        full = replace(problem, first=with_epilogue(problem.first, act=PRELU), second=with_epilogue(problem.second, act=PRELU))
        wanted |= {launches(full, t)[0].values: t for t in candidates(full, device) if t.out == HWC8}
    assert {t.tile for t in wanted.values()} == set(TILES)
    for values in wanted:
        takes("conv_back_to_back", values, sm)


# ---- in networks


def bottleneck(prune: bool = False, reader: bool = False) -> onnx.ModelProto:
    net = Net("bottleneck", (1, 64, 56, 56))
    x = net.relu(net.conv("x", "before", 256, 1), "before_relu")
    y = net.relu(net.conv(net.relu(net.conv(x, "narrow", 64, 1), "narrow_relu"), "mid", 64, 3, prune=prune), "mid_relu")
    z = net.relu(net.add("Add", [net.conv(y, "out", 256, 1), x], "add", 256), "relu")
    return net.finish(z, y) if reader else net.finish(z)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "bottleneck.onnx"
    onnx.save(bottleneck(), path)
    return path, gr.build(path, device="a100", output_formats="fp16:hwc8")  # as if there were more of the network


def test_a_bottlenecks_3x3_and_1x1_become_one_launch(built):
    path, engine = built
    (layer,) = [layer for layer in engine.plan.layers if layer.tactic_name.startswith("conv_back_to_back")]
    assert layer.layer == "mid -> out" and {"mid", "mid_relu", "out", "add", "relu"} == set(layer.nodes)
    assert layer.weights_count == 64 * 64 * 9 + 64 * 256 and (layer.problem.second.r, layer.problem.second.s) == (1, 1)
    x = np.random.default_rng(1).standard_normal((1, 64, 56, 56)).astype(np.float32)
    (got,) = judge(engine, path, {"x": x}).values()
    assert got.dtype == np.float16


def test_the_log_has_both_layers(built):
    _, engine = built
    row = next(r for r in engine.sparsity.rows if r.layers == ("mid", "out"))
    assert (row.verdict, row.reason) == ("not_eligible", "pattern_violation") and row.floor.dense_us > 0
    assert (row.layer, row.c, row.k, row.kernel) == ("mid -> out", 64, 64, (3, 3))
    assert row.pattern_groups == 64 * 16 * 9 + 256 * 16 and 0.05 < row.lost_energy < 0.3


def offered(model) -> dict:
    net = offer(network(model))
    return {op.name: dict(op.when) for op in net.ops if isinstance(op.problem, BackToBackProblem)}


def test_it_is_offered_with_the_residual_in_it_and_without():
    assert offered(bottleneck()) == {
        "mid + mid_relu + out": {"add": "apart", "mid -> out": "one"},
        "mid + mid_relu + out + add + relu": {"add": "into out", "mid -> out": "one"},
    }


def test_it_is_not_offered_where_another_layer_reads_the_tensor_between():
    assert not any("mid" in name and "out" in name for name in offered(bottleneck(reader=True)))


def test_layers_that_could_run_sparse_are_a_pair_too_where_that_is_faster(built, tmp_path):
    """Pruning takes no choice away: the plan is as fast as with dense weights, and the log says that one layer gave up 2:4."""
    path = tmp_path / "pruned.onnx"
    onnx.save(bottleneck(prune=True), path)
    engine = gr.build(path, device="a100", output_formats="fp16:hwc8", sparsity="enable")
    assert engine.sparsity.summary.total_us <= built[1].sparsity.summary.total_us
    row = next(r for r in engine.sparsity.rows if "mid" in r.layers)
    assert (row.layers, row.verdict, row.reason, row.able) == (("mid", "out"), "dense", "one_launch", ("mid",))
    assert row.best_sparse.us > 0


def test_what_lies_between_the_two_costs_no_dram():
    """32 images of 64 channels between two of 256 are 77 MB: an L4's L2 holds 48, and they never leave the SMs."""
    p = BackToBackProblem(ConvProblem(32, 64, 56, 56, 64, 1, 1), ConvProblem(32, 64, 56, 56, 64, 1, 1))
    device = named("l4")
    for tactic in candidates(p, device):
        small, large = (predict(p, tactic, replace(device, l2_bytes=size)) for size in (1 << 20, 1 << 30))
        assert small["mma_us"] == large["mma_us"] and float(small["dram_us"]) > float(large["dram_us"])


def test_blocks_of_an_sm_wait_together_where_that_was_timed():
    """One pixel, 672 channels from 28, took an H200 31.4 us, and ResNet-50's first pair at batch 32 85.5 (results/h200)."""
    excite = BackToBackProblem(ConvProblem(1, 672, 1, 1, 28, 1, 1), ConvProblem(1, 28, 1, 1, 672, 1, 1))
    first = BackToBackProblem(ConvProblem(32, 64, 56, 56, 64, 3, 3, pad=(1,) * 4), ConvProblem(32, 64, 56, 56, 256, 1, 1))
    for p, tile, took in ((excite, TILES[2], 31.4), (first, TILES[0], 85.5)):
        least = min(predict_us(p, t, DEVICE) for t in candidates(p, DEVICE) if t.tile == tile)
        assert 0.8 < least / took < 1.25
