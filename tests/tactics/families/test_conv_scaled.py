"""Convolutions whose output squeeze-excite scales, as two launches: values, orders, and inside a network."""

from dataclasses import replace

import numpy as np
import onnx
import pytest

import gpu_runtime as gr
from benchmarks.networks import Net
from cuda_kernels.device import ARCHITECTURES, named
from cuda_kernels.launch import Emulated
from cuda_kernels.named_devices import MAX_GRID
from cuda_kernels.params import members
from gpu_runtime.explain import wording
from gpu_runtime.planning.alternatives import alternatives
from gpu_runtime.rewrites.squeeze_excite import SCALED
from tactics.candidates import accepts, candidates, rejected
from tactics.families import conv_scaled
from tactics.launches import launches
from tactics.predict import predict_us
from tactics.problems import codec
from tactics.problems.batches import at_batch
from tactics.problems.pointwise_ops import NONE, Activation
from tactics.problems.problem import PoolProblem, ScaledConvProblem, SqueezeExciteProblem
from tactics.problems.prologue import Prologue
from tactics.sampling.data import random_data, reference
from tactics.tactic import Tactic
from tests.compiled import takes
from tests.engines import judge
from tests.problems import assert_right, conv_case, execute
from tests.reference_run import choices, feeds_for, network, ort_run, relative_error, run

DEVICE = named("h200")
RELU, SILU, GATE, SWISH = Activation("relu"), Activation("silu"), Activation("sigmoid"), Activation("hard_swish")


def problem(n, c, h, w, mid, r=3, stride=1, act=SILU, behind=NONE, dilation=1, groups=0) -> ScaledConvProblem:
    pad = (r // 2 * dilation,) * 4
    more = {"bias": True, "act": act, "groups": groups or c, "dilation": (dilation, dilation)}
    conv = conv_case(n, c, h, w, c, r, r, (stride, stride), pad, **more)
    pool = PoolProblem(n, c, conv.p, conv.q, "avg", conv.p, conv.q, (1, 1))
    first = conv_case(n, c, 1, 1, mid, 1, 1, bias=True, act=RELU)
    second = conv_case(n, mid, 1, 1, c, 1, 1, bias=True, act=GATE)
    return ScaledConvProblem(conv, SqueezeExciteProblem(pool, first, second), behind)


CASES = {
    "small": problem(2, 16, 5, 7, 8),
    "padded channels": problem(1, 100, 19, 23, 25, behind=Activation("clip", (0.25, 6.0))),
    "stride": problem(2, 72, 29, 30, 24, 5, 2, SWISH),
    "dilation": problem(1, 40, 21, 22, 10, dilation=2, behind=RELU),
    "many hidden": problem(1, 72, 9, 7, 250),
    "many blocks": problem(1, 24, 70, 66, 6, 7),
    "one pixel": problem(3, 136, 1, 1, 5),
    "grouped": problem(2, 104, 15, 13, 26, act=RELU, groups=13),
    "grouped, stride": problem(1, 72, 27, 30, 100, stride=2, groups=9, behind=Activation("clip", (0.25, 6.0))),
    "grouped, odd": problem(1, 60, 9, 8, 7, groups=12),
    "prelu": problem(1, 24, 9, 8, 7, act=Activation("prelu")),
    "grouped, prelu": problem(1, 24, 9, 8, 7, act=Activation("prelu"), groups=3),
}


def tactics_of(p: ScaledConvProblem) -> list[Tactic]:
    """One for each patch, the formats in turn."""
    listed = candidates(p, DEVICE)
    found = {t.tile: [u for u in listed if u.tile == t.tile] for t in listed}
    return [of[i % len(of)] for i, of in enumerate(found.values())]


@pytest.mark.parametrize("name", CASES)
def test_values(name):
    p = CASES[name]
    inputs, weights = random_data(p)
    for tactic in tactics_of(p):
        gpu = Emulated(DEVICE)
        assert_right(p, tactic, execute(gpu, p, tactic, inputs, weights), reference(p, inputs, weights))
        assert len(gpu.stats) == 2 and Tactic.parse(tactic.name) == tactic and accepts(p, tactic, DEVICE)
    assert all(reason for _, reason in rejected(p, DEVICE)) and codec.from_json(codec.to_json(p)) == p
    assert at_batch(at_batch(p, 7), p.first.n) == p


@pytest.mark.parametrize(
    "options", [{"async_mode": "late"}, {"seed": 1}, {"seed": 2}, {"seed": 3, "threads": 1}, {"resident_blocks": 1}], ids=str
)
def test_orders_of_blocks_agree_bit_for_bit(options):
    for p in (CASES["padded channels"], CASES["many blocks"], CASES["grouped"]):
        inputs, weights = random_data(p)
        for tactic in tactics_of(p):
            expected, got = (execute(Emulated(DEVICE, **o), p, tactic, inputs, weights) for o in ({}, options))
            assert np.array_equal(expected, got), tactic.name


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_what_is_not_finite_stays_in_its_image(value):
    """And, behind an average that is not finite, in nobody else's padding."""
    depthwise, grouped = problem(2, 40, 20, 20, 6, act=RELU), problem(2, 40, 20, 20, 6, act=RELU, groups=5)
    for p, tactic in ((q, tactic) for q in (depthwise, grouped) for tactic in tactics_of(q)):
        (x,), weights = random_data(p)
        x[0, 3, 7, 7] = value
        got, expected = execute(Emulated(DEVICE), p, tactic, [x], weights), reference(p, [x], weights)
        assert np.array_equal(np.isnan(got[:, :40]), np.isnan(expected)) and not got[:, 40:].any()
        finite = np.isfinite(expected)
        assert np.abs(got[:, :40][finite] - expected[finite]).max() < 2e-2


@pytest.mark.parametrize("name", CASES)
def test_what_blocks_need_beside_the_convolution(name):
    """Each has hidden values of its own in the workspace, and its first weights behind the convolution's shared memory."""
    p = CASES[name]
    for tactic in tactics_of(p):
        first, second = launches(p, tactic)
        assert first.workspace == second.workspace == first.grid[0] * p.second.first.k * 4
        ahead = conv_scaled.AHEAD[tactic.kernel]
        (alone,) = ahead.launches(p.first, replace(tactic, kernel=ahead.__name__.rpartition(".")[2]))
        assert first.grid == alone.grid and dict(first.values) == dict(alone.values) | {"HIDDEN": 1}
        args = {m.name: value for m, (_, value) in zip(members(first.kernel, first.values), first.args, strict=True)}
        assert alone.smem <= args["share.held_at"] < alone.smem + 16 and first.smem > args["share.held_at"]
        assert args["share.pitch"] % 64 == 0 and args["share.pitch"] >= p.first.k


def test_what_is_not_offered_says_why():
    p = CASES["small"]
    _, c, h, w = p.first.out_shape
    wider = conv_case(2, c // 2, 5, 7, c, 3, 3, (1, 1), (1, 1, 1, 1), groups=c // 2)
    tail = replace(p.first, epilogue=replace(p.first.epilogue, affine=True))
    alone = conv_case(2, c, 5, 7, c, 3, 3, (1, 1), (1, 1, 1, 1))
    cases = [(wider, NONE, "several outputs"), (alone, NONE, "no grouped"), (tail, NONE, "scale behind")]
    for conv, act, why in [*cases, (p.first, SWISH, "hard_swish behind")]:
        assert why in conv_scaled.reason_against(conv, p.second, act)
        ((_, reason),) = rejected(ScaledConvProblem(conv, p.second, act), DEVICE)
        assert why in str(reason)
    assert not conv_scaled.reason_against(p.first, p.second, NONE)
    for c, mid in ((8, 4), (8, 1024), (250, 90), (250, 300)):  # blocks of the second launch, in all three directions
        few, many = problem(1, c, 2048, 2047, mid), problem(1, c, 2048, 2048, mid)
        assert not conv_scaled.reason_against(few.first, few.second, NONE)
        assert all(of <= most for of, most in zip(launches(few, candidates(few, DEVICE)[0])[1].grid, MAX_GRID, strict=True))
        assert "pixels of an image" in conv_scaled.reason_against(many.first, many.second, NONE)
    linear = [t for t, why in rejected(p, DEVICE) if isinstance(t, Tactic) and "chw" in (t.ins[0].layout, t.out.layout)]
    assert linear and not any(t in candidates(p, DEVICE) for t in linear)


@pytest.mark.slow
@pytest.mark.parametrize("sm", ARCHITECTURES)
@pytest.mark.parametrize("r, stride, groups", [(3, 1, 0), (3, 2, 0), (5, 1, 0), (5, 2, 0), (7, 1, 0), (3, 1, 12), (3, 2, 12)])
def test_it_compiles_without_spills(sm, r, stride, groups):
    p = problem(1, 96, 56, 56, 24, r, stride, groups=groups)
    for launch in {launch for tactic in tactics_of(p) for launch in launches(p, tactic)}:
        takes(launch.kernel, launch.values, sm)


# An H200 timed both forms in networks, where neither is ahead: see `test_code_that_nobody_ran_is_counted`.
DEVICES = ("a100", "l4", "rtx4090")


@pytest.mark.parametrize("device", DEVICES)
def test_it_is_predicted_to_save_a_launch_and_a_reading(device):
    """EfficientNet-B0's layer of 672 channels at 14x14 and RegNetY's of 208, beside the convolution and the scale apart."""
    gpu = named(device)
    for p in (problem(1, 672, 14, 14, 28, 5), problem(1, 208, 14, 14, 52, groups=26)):
        least = [min(predict_us(q, t, gpu) for t in candidates(q, gpu)) for q in (p, p.first, p.second)]
        assert least[0] < least[1] + least[2]


# Channels, pixels along a side, taps, stride, hidden values, channels of a group and of the convolution behind; how often.
LAYERS = {
    "efficientnet_b0": (
        *(
            (32, 112, 3, 1, 8, 1, 16, 1),
            (96, 112, 3, 2, 4, 1, 24, 1),
            (144, 56, 3, 1, 6, 1, 24, 1),
            (144, 56, 5, 2, 6, 1, 40, 1),
        ),
        *(
            (240, 28, 5, 1, 10, 1, 40, 1),
            (240, 28, 3, 2, 10, 1, 80, 1),
            (480, 14, 3, 1, 20, 1, 80, 2),
            (480, 14, 5, 1, 20, 1, 112, 1),
        ),
        *((672, 14, 5, 1, 28, 1, 112, 2), (672, 14, 5, 2, 28, 1, 192, 1), (1152, 7, 5, 1, 48, 1, 192, 3)),
        (1152, 7, 3, 1, 48, 1, 320, 1),
    ),
    "mobilenet_v3_large": (
        *((72, 56, 5, 2, 24, 1, 40, 1), (120, 28, 5, 1, 32, 1, 40, 2), (480, 14, 3, 1, 120, 1, 112, 1)),
        *((672, 14, 3, 1, 168, 1, 112, 1), (672, 14, 5, 2, 168, 1, 160, 1), (960, 7, 5, 1, 240, 1, 160, 2)),
    ),
    "regnet_y_400mf": (
        *((48, 112, 3, 2, 8, 8, 48, 1), (104, 56, 3, 2, 12, 8, 104, 1), (104, 28, 3, 1, 26, 8, 104, 2)),
        *((208, 28, 3, 2, 26, 8, 208, 1), (208, 14, 3, 1, 52, 8, 208, 5), (440, 14, 3, 2, 52, 8, 440, 1)),
        (440, 7, 3, 1, 110, 8, 440, 5),
    ),
}
# Microseconds that their squeeze-excites were predicted to take before tensor cores computed them, alone (benchmarks/NOTES.md).
BEFORE = {
    "efficientnet_b0": (98.0, 68.0, 57.2),
    "mobilenet_v3_large": (84.8, 61.0, 50.6),
    "regnet_y_400mf": (98.0, 68.9, 58.6),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYERS)
def test_squeeze_excite_takes_half_of_what_it_took(name):
    """Of all layers of a network at batch 1, with the multiplication, which was a gate of the convolution behind."""
    for device, before in zip(DEVICES, BEFORE[name], strict=True):
        gpu, gates, now = named(device), 0.0, 0.0
        for c, side, r, stride, mid, group, k, times in LAYERS[name]:
            p = problem(1, c, side, side, mid, r, stride, RELU, groups=c // group)
            plain = conv_case(1, *p.first.out_shape[1:], k, 1, 1, bias=True)
            gated = replace(plain, prologue=Prologue(gated=True))
            least = [min(predict_us(q, t, gpu) for t in candidates(q, gpu)) for q in (p, p.first, gated, plain)]
            now, gates = now + times * (least[0] - least[1]), gates + times * (least[2] - least[3])
        assert now <= 0.5 * (before + gates), (device, now, before, gates)


def test_code_that_nobody_ran_is_counted():
    """EfficientNet-B0's layer of 480 channels at 14x14 on an H200: 8.6 us in its network, 4.8 alone (benchmarks/results)."""
    p = problem(1, 480, 14, 14, 20, 3, 1, RELU, groups=480)
    assert min(predict_us(p, t, named("h200")) for t in candidates(p, named("h200"))) == pytest.approx(8.6, rel=0.1)


def block(prune: bool = False, groups: int = 96, gate_read: bool = False) -> onnx.ModelProto:
    net = Net("block", (1, 32, 14, 14))
    x = net.relu(net.conv("x", "before", 96, 1), "before_relu")
    x = net.relu(net.conv(x, "grouped", 96, 3, groups=groups), "grouped_relu")
    s = net.add("GlobalAveragePool", [x], "squeeze", 96)
    s = net.relu(net.conv(s, "reduce", 24, 1, prune=prune), "reduce_relu")
    s = net.add("Sigmoid", [net.conv(s, "expand", 96, 1)], "gate", 96)
    y = net.conv(net.add("Mul", [x, s], "excite", 96), "after", 16, 1)
    return net.finish(y, net.relu(s, "gate_relu")) if gate_read else net.finish(y)


def test_it_is_not_offered_where_the_gate_is_read_elsewhere():
    assert not any(SCALED in options for _, options in alternatives(network(block(gate_read=True))).groups)


@pytest.mark.parametrize("groups, kernel", [(96, "depthwise_scaled"), (12, "grouped_scaled")])
def test_a_block_takes_two_launches_beside_its_1x1_convolutions(tmp_path, groups, kernel):
    """And its answer is onnxruntime's."""
    path = tmp_path / "block.onnx"
    onnx.save(block(groups=groups), path)
    engine = gr.build(path, device="a100")
    (layer,) = [layer for layer in engine.plan.layers if layer.tactic_name.startswith(kernel)]
    assert layer.layer == "grouped -> reduce -> expand" and layer.type == "conv"
    assert {"grouped", "squeeze", "reduce", "expand", "gate", "excite"} <= set(layer.nodes)
    assert layer.weights_count == 96 * 96 // groups * 9 + 2 * 96 * 24
    assert [r.layers for r in engine.sparsity.rows] == [("before",), ("grouped", "reduce", "expand"), ("after",)]
    x = np.random.default_rng(1).standard_normal((1, 32, 14, 14)).astype(np.float32)
    judge(engine, path, {"x": x})


def test_it_is_one_option_beside_the_gates():
    net = alternatives(network(block()))
    (group,) = [g for g, options in net.groups if SCALED in options]
    assert dict(net.groups)[group] == ("apart", "in front", SCALED)
    (one,) = [op for op in net.ops if isinstance(op.problem, ScaledConvProblem)]
    assert one.when == ((group, SCALED),) and one.layers == ("grouped", "reduce", "expand")
    for op in net.ops:
        options = {option for g, option in op.when if g == group}
        if op.output in one.inputs or op is one:
            continue
        reads_product = one.output in op.inputs
        assert not options or (SCALED in options) == reads_product, op.name


def in_pair() -> onnx.ModelProto:
    """Between two such blocks the 1x1 convolutions are one launch too, which cannot multiply while it loads."""
    net = Net("pair", (1, 16, 14, 14))
    x = net.relu(net.conv("x", "grouped", 16, 3, groups=16), "grouped_relu")
    s = net.relu(net.conv(net.add("GlobalAveragePool", [x], "squeeze", 16), "reduce", 8, 1), "reduce_relu")
    x = net.add("Mul", [x, net.add("Sigmoid", [net.conv(s, "expand", 16, 1)], "gate", 16)], "excite", 16)
    x = net.relu(net.conv(net.conv(x, "project", 8, 1), "widen", 48, 1), "widen_relu")
    return net.finish(net.conv(x, "last", 48, 3, groups=48))


def merged() -> onnx.ModelProto:
    """The convolution ahead is two of some channels each, joined, or one with filters that are padded."""
    net = Net("merged", (1, 32, 14, 14))
    net.nodes.append(onnx.helper.make_node("Split", ["x"], parts := ["low", "high"], name="split", axis=1))
    net.channels |= dict.fromkeys(parts, 16)
    made = [net.relu(net.conv(t, f"grouped{r}", 16, r, groups=16), f"relu{r}") for t, r in zip(parts, (3, 5), strict=True)]
    x = net.add("Concat", made, "joined", 32, axis=1)
    s = net.relu(net.conv(net.add("GlobalAveragePool", [x], "squeeze", 32), "reduce", 8, 1), "reduce_relu")
    gate = net.add("Sigmoid", [net.conv(s, "expand", 32, 1)], "gate", 32)
    return net.finish(net.conv(net.add("Mul", [x, gate], "excite", 32), "after", 16, 1))


@pytest.mark.parametrize("make", [block, in_pair, merged], ids=lambda f: f.__name__)
def test_every_combination_of_options_with_a_plan_computes_the_same(tmp_path, make):
    path = tmp_path / "m.onnx"
    onnx.save(make(), path)
    net = alternatives(network(path))
    feeds = feeds_for(net, -1)
    (expected,) = ort_run(path, feeds).values()
    every = choices(net, limit=10**4)
    for group, options in net.groups:
        assert {choice[group] for choice in every} == set(options)
    for choice in every:
        (got,) = run(net, feeds, choice).values()
        assert relative_error(got, expected) < 1e-3, choice
    assert sum(SCALED in choice.values() for choice in every) >= 1


def test_the_pattern_is_told_of_all_layers_that_have_groups_of_four(tmp_path):
    """Forced, a grouped convolution of 8 channels a group has it too, and a depthwise one never."""
    for groups, able in ((12, ("grouped", "reduce", "expand")), (96, ("reduce", "expand"))):
        path = tmp_path / f"{groups}.onnx"
        onnx.save(block(groups=groups), path)
        (row,) = [r for r in gr.build(path, device="a100", sparsity="force").sparsity.rows if "reduce" in r.layers]
        assert row.layers == ("grouped", "reduce", "expand") and (row.reason, row.able) == ("one_launch", able)
        fours = 2 * 96 * 24 // 4 + (96 * 8 * 9 // 4 if groups == 12 else 0)
        assert (row.pattern_groups, row.pattern_share) == (fours, 1.0)


@pytest.mark.parametrize("sparsity, reason", [("disable", "no_sparse_tactic"), ("enable", "one_launch")])
def test_layers_that_could_run_sparse_are_dense_and_the_log_says_so(tmp_path, sparsity, reason):
    path = tmp_path / "block.onnx"
    onnx.save(block(prune=True), path)
    engine = gr.build(path, device="a100", sparsity=sparsity)
    (row,) = [r for r in engine.sparsity.rows if r.layers == ("grouped", "reduce", "expand")]
    assert (row.verdict, row.reason, row.able) == ("dense", reason, ("reduce",))
    assert "None" not in wording.sentence(row, engine.record)
    assert set(row.able) == set(row.layers) & set(engine.sparsity.eligible)
