"""Transposed convolution: one implicit GEMM per output phase, against onnxruntime; dense and 2:4; nothing zero-stuffed."""

import math
import random

import numpy as np
import onnx
import pytest

import gpu_runtime as gr
from cuda_kernels import sparse24
from cuda_kernels.device import ARCHITECTURES, DEFAULT_DEVICE, named
from cuda_kernels.launch import Emulated
from tactics.candidates import candidates, rejected
from tactics.families.conv_transpose import phases
from tactics.families.merged import padded_k
from tactics.format import Format, num_bytes, padded_channels
from tactics.launches import launches, pack_weights
from tactics.predict import predict
from tactics.problems.pointwise_ops import Activation
from tactics.problems.problem import ConvProblem, ConvTransposeProblem
from tactics.sampling.data import random_data, reference
from tactics.step import linear
from tactics.tactic import Tactic, Tile
from tests.compiled import takes
from tests.engines import SPARSE_DEVICE, emulated, judge
from tests.ort_budget import budgets
from tests.problems import assert_right, execute, transposed_case
from tests.reference_run import check_against_ort, feeds_for, given_model, model, network, node, ort_run

pytestmark = pytest.mark.slow

DEVICE = named("h200")
TILE, SIGMOID = Tile(64, 64, 64, 2, 2, 4), Activation("sigmoid")
PROBLEM = transposed_case(2, 16, 5, 7, 24, 4, 4, (10, 14), (2, 2), (1, 1), bias=True, residual=True, act=SIGMOID, sparse24=True)
# Depthwise patches whose copies or filters meet in a bank of shared memory, at every window: a few dozen times in a block.
MEETING = ("32c16x16_t2x8", "16c28x28_t4x7", "32c28x32_t7x8_mma", "16c28x32_t7x8_mma", "32c56x16_t7x8_mma")


GROUPS = ((2, 16, 8), (3, 12, 9), (4, 32, 32), (2, 48, 80), (8, 8, 8), (20, 20, 20), (6, 6, 12), (5, 40, 40))


def draw(seed: int, groups: int = 1, c: int = 0, k: int = 0):
    """(model, weights) of one ConvTranspose, all its attributes drawn; 2:4 along axis 0 for every second seed."""
    rng, values = random.Random(seed), np.random.default_rng(seed)
    c, k = c or rng.choice((3, 8, 12, 20)), k or rng.choice((1, 5, 16, 40))
    size, stride = (rng.randint(1, 5), rng.randint(1, 5)), (rng.randint(1, 3), rng.randint(1, 3))
    dilation = (1, 1) if seed % 3 else (rng.randint(1, 3), rng.randint(1, 3))
    image = (rng.randint(1, 6), rng.randint(2, 6))
    attributes = {"strides": stride, "dilations": dilation, "group": groups}
    mode = rng.choice(("pads", "pads", "pads", "SAME_UPPER", "SAME_LOWER", "output_shape"))
    if mode == "pads":
        reach = [(size[i] - 1) * dilation[i] for i in range(2)]
        pads = [rng.randint(0, max(min(reach[i % 2], 2), 0)) for i in range(4)]
        extra = [rng.randint(0, stride[i] - 1) for i in range(2)]
        lengths = [(image[i] - 1) * stride[i] + reach[i] + 1 + extra[i] - pads[i] - pads[i + 2] for i in range(2)]
        attributes |= {"pads": pads if min(lengths) > 0 else (0, 0, 0, 0), "output_padding": extra}
    elif mode == "output_shape":
        full = [(image[i] - 1) * stride[i] + (size[i] - 1) * dilation[i] + 1 for i in range(2)]
        attributes |= {"output_shape": [max(i, f - rng.randint(0, 2)) for i, f in zip(image, full, strict=True)]}
    else:
        attributes |= {"auto_pad": mode}
        attributes.pop("dilations")
    w = values.standard_normal((c, k // groups, *size)).astype(np.float16).astype(np.float32)
    w /= np.float32(math.sqrt(c // groups))
    if c // groups % 4 == 0 and seed % 2:
        w = sparse24.prune(w, 0)
    named_weights = {"w": w.astype(np.float16).astype(np.float32), "b": values.standard_normal(k).astype(np.float32)}
    nodes = [node("ConvTranspose", "x w b", "a", **attributes), node("Relu", "a", "y")]
    return model(nodes, {"x": (rng.randint(1, 2), c, *image)}, "y", named_weights)


def run(problem, tactic, inputs, weights, **options):
    gpu = Emulated(DEVICE, **options)
    return execute(gpu, problem, tactic, inputs, weights), gpu.stats


@pytest.mark.sample(20)
@pytest.mark.parametrize("seed", range(40))
def test_against_onnxruntime(seed):
    proto = draw(seed)
    net = network(proto)
    (op,) = net.ops
    feeds = {name: x.astype(np.float16).astype(np.float32) for name, x in feeds_for(net, seed=seed).items()}
    expected = ort_run(proto, feeds)["y"]
    assert op.problem.out_shape == expected.shape and op.problem.epilogue.act.name == "relu" and op.problem.epilogue.bias
    kernels = (
        ["conv_dense", "conv_sparse24"] if isinstance(op.problem, ConvProblem) else ["transpose_dense", "transpose_sparse24"]
    )
    assert op.problem.sparse24 or seed % 2 == 0 or op.problem.c % 4
    x = feeds["x"].astype(np.float16)
    for kernel in kernels[: 2 if op.problem.sparse24 else 1]:
        tactic = Tactic(kernel, TILE, (Format("fp16", "hwc8"),), Format("fp16", ("hwc8", "chw")[seed % 2]))
        assert tactic in candidates(op.problem, DEVICE)
        got, _ = run(op.problem, tactic, [x], op.weights)
        assert_right(op.problem, tactic, got, expected)


@pytest.mark.sample(8)
@pytest.mark.parametrize("seed", range(32))
def test_groups_against_onnxruntime(seed):
    """Every kernel that may run it; nothing but the convolution is launched, and nothing between them is stored."""
    groups, c, k = GROUPS[seed % len(GROUPS)]
    proto = draw(seed, groups, c, k)
    net = network(proto)
    (op,) = net.ops
    p = op.problem
    feeds = {name: x.astype(np.float16).astype(np.float32) for name, x in feeds_for(net, seed=seed).items()}
    expected = ort_run(proto, feeds)["y"]
    assert p.out_shape == expected.shape and p.groups == groups and (p.sparse24 or seed % 2 == 0 or c // groups % 4)
    found = {}
    for t in candidates(p, DEVICE):
        if t.tile.m * t.tile.n <= 64 * 128 if isinstance(t.tile, Tile) else t.tile.channels <= 64:
            found.setdefault((t.kernel, linear(t.ins[0]), linear(t.out)), []).append(t)
    kernels = {kernel.partition("_")[2] for kernel, *_ in found}
    assert kernels >= ({"depthwise"} if c == groups else {"dense"} | ({"sparse24"} if p.sparse24 else set()))
    pick = random.Random(seed)
    for kernel, *sides in found:
        if sides == [False, False] or pick.random() < 0.2:
            tactic = pick.choice(found[kernel, *sides])
            got, stats = run(p, tactic, [feeds["x"].astype(np.float16)], op.weights)
            assert_right(p, tactic, got, expected)
            assert str(tactic.tile) in MEETING or all(s.excess_wavefronts == 0 for s in stats)
            assert len(stats) == (len(phases(p)) if isinstance(p, ConvTransposeProblem) else 1)


GROUPED = {
    "depthwise": transposed_case(2, 32, 9, 11, 32, 4, 4, (18, 22), (2, 2), (1, 1), groups=32, bias=True, residual=True),
    "depthwise_dilated": transposed_case(1, 32, 9, 8, 64, 3, 3, (22, 20), (2, 2), (0, 0), (2, 2), groups=32, bias=True),
    "grouped": transposed_case(1, 64, 8, 8, 64, 3, 3, (17, 17), (2, 2), groups=8, act=SIGMOID, sparse24=True),
    "halves": transposed_case(1, 64, 8, 8, 64, 4, 4, (16, 16), (2, 2), (1, 1), groups=2, bias=True, sparse24=True),
}


@pytest.mark.parametrize("name", GROUPED)
def test_bytes_of_groups(name):
    """No zeros between pixels: a launch touches the input once, its phase of the output, its taps, and nothing else."""
    p = GROUPED[name]
    inputs, weights = random_data(p)
    expected = reference(p, inputs, weights)
    seen = set()
    for tactic in candidates(p, DEVICE):
        if tactic.kernel in seen or linear(tactic.ins[0]) or linear(tactic.out):
            continue
        seen.add(tactic.kernel)
        got, stats = run(p, tactic, inputs, weights)
        assert_right(p, tactic, got, expected)
        assert np.array_equal(got, run(p, tactic, inputs, weights, async_mode="late", seed=3)[0])
        x, y = num_bytes(tactic.ins[0], p.in_shapes[0]), num_bytes(tactic.out, p.out_shape)
        constants = sum(a.nbytes for a in pack_weights(p, tactic, weights).values())
        assert sum(s.launch_unique_store_bytes for s in stats) == y
        phase = y // len(stats)
        for s in stats:
            assert s.launch_unique_bytes <= x + phase * (2 if p.epilogue.residual else 1) + constants + 2048
            assert s.sectors == s.ideal_sectors and s.excess_wavefronts == 0
        if name.startswith("depthwise"):
            assert sum(s.mma + s.mma_sp for s in stats) == 0
    assert seen == (
        {"transpose_depthwise"}
        if name.startswith("depthwise")
        else {"transpose_dense", "transpose_sparse24", "transpose_grouped"}
    )


@pytest.mark.parametrize("sm", ARCHITECTURES)
@pytest.mark.parametrize("name", GROUPED)
def test_phases_of_groups_compile_without_spills(name, sm):
    p = GROUPED[name]
    firsts = {t.kernel: t for t in reversed(candidates(p, named("a10"))) if not linear(t.ins[0]) and not linear(t.out)}
    for t in firsts.values():
        for step in launches(p, t)[:2]:
            takes(step.kernel, step.values, sm)


@pytest.mark.parametrize("kernel", ["transpose_dense", "transpose_sparse24"])
def test_counters_residual_and_orders(kernel):
    """Kernel 4, stride 2: 2 x 2 of the 16 taps in each of 4 phases; no conflicts; late copies and other orders agree."""
    rng = np.random.default_rng(1)
    p = PROBLEM
    x, res = (rng.standard_normal(s).astype(np.float16) for s in p.in_shapes)
    w = sparse24.prune((rng.standard_normal((p.k, p.c, p.r, p.s)) / 8).astype(np.float16)).astype(np.float32)
    weights = {"w": w, "b": rng.standard_normal(p.k).astype(np.float32)}
    expected = p.reference(x, w, weights["b"], res)
    for y in ("hwc8", "chw32"):
        tactic = Tactic(kernel, TILE, (Format("fp16", "hwc8"), Format("fp16", y)), Format("fp16", y))
        got, stats = run(p, tactic, [x, res], weights)
        assert_right(p, tactic, got, expected)
        assert np.array_equal(got, run(p, tactic, [x, res], weights, async_mode="late", seed=2)[0])
        assert len(stats) == 4
        for conv, s in zip((phase.conv for phase in phases(p)), stats, strict=True):
            assert (conv.r, conv.s) == (2, 2)
            tiles = -(-padded_channels(y, p.k) // TILE.m) * -(-(p.n * 5 * 7) // TILE.n)
            useful = tiles * padded_k(conv) * TILE.m * TILE.n // (16 * 8 * (32 if tactic.sparse else 16))
            assert s.mma + s.mma_sp == useful and (s.mma_sp > 0) == tactic.sparse
            assert s.excess_wavefronts == 0


def test_phases_hold_every_tap_once():
    for p in (
        PROBLEM,
        ConvTransposeProblem(1, 8, 4, 4, 8, 5, 3, (13, 9), (3, 2), (0, 1), (1, 1)),
        ConvTransposeProblem(1, 8, 4, 4, 8, 3, 3, (11, 11), (2, 2), (0, 0), (2, 2)),
    ):
        pairs = [(r, s) for phase in phases(p) for r in phase.rows for s in phase.columns]
        real = [pair for pair in pairs if min(pair) >= 0]
        assert sorted(real) == sorted((r, s) for r in range(p.r) for s in range(p.s))


def test_kernel_equal_to_stride_is_one_convolution_with_depth_to_space():
    rng = np.random.default_rng(0)
    w = {"w": rng.standard_normal((8, 5, 2, 2)).astype(np.float16).astype(np.float32), "b": np.arange(5, dtype=np.float32)}
    w["s"] = rng.uniform(0, 1, (5, 1, 1)).astype(np.float32)
    nodes = [node("ConvTranspose", "x w b", "a", strides=(2, 2)), node("PRelu", "a s", "y")]
    net = check_against_ort(model(nodes, {"x": (2, 8, 3, 4)}, "y", w), 1e-5)
    (op,) = net.ops
    assert isinstance(op.problem, ConvProblem) and (op.problem.k, op.problem.r, op.problem.epilogue.d2s) == (20, 1, 2)


def test_residual_and_scale():
    rng = np.random.default_rng(0)
    w = {
        "w": rng.standard_normal((8, 4, 3, 3)).astype(np.float16).astype(np.float32),
        "m": np.float32([1, 2, 0.5, -1]).reshape(4, 1, 1),
    }
    nodes = [node("ConvTranspose", "x w", "a", strides=(2, 2)), node("Mul", "a m", "p"), node("Add", "p z", "y")]
    net = check_against_ort(model(nodes, {"x": (1, 8, 3, 4), "z": (1, 4, 7, 9)}, "y", w), 1e-3)
    assert net.groups == (("y", ("apart", "into a")),)


def test_names_predictions_and_reasons():
    good = candidates(PROBLEM, DEVICE)
    assert {t.kernel for t in good} == {"transpose_dense", "transpose_sparse24"}
    for t in good[::40]:
        assert Tactic.parse(t.name) == t
        assert predict(PROBLEM, t, DEVICE)["total_us"] > 3 * DEVICE.launch_us
    dense = ConvTransposeProblem(1, 16, 5, 7, 24, 4, 4, (10, 14), (2, 2), (1, 1))
    assert any(name == "transpose_sparse24" and "pattern_violation" in str(reason) for name, reason in rejected(dense, DEVICE))


@pytest.mark.parametrize("sparsity", ["disable", "force"])
def test_an_engine(tmp_path, sparsity):
    """--sparsity=force prunes along axis 0, the plan says what it picked, and the outputs are those of the pruned model."""
    rng = np.random.default_rng(4)
    w = {"w": rng.standard_normal((128, 128, 4, 4)).astype(np.float32) / 16, "b": rng.standard_normal(128).astype(np.float32)}
    path = tmp_path / "up.onnx"
    nodes = [node("ConvTranspose", "x w b", "a", strides=(2, 2), pads=(1, 1, 1, 1), name="up"), node("Relu", "a", "y")]
    onnx.save(model(nodes, {"x": (1, 128, 56, 56)}, "y", w), path)
    pruned = tmp_path / "pruned.onnx" if sparsity == "force" else None
    engine = gr.build(path, sparsity=sparsity, device=SPARSE_DEVICE, save_pruned=pruned)
    x = rng.standard_normal((1, 128, 56, 56)).astype(np.float32)
    judge(engine, pruned or path, {"x": x})
    (row,) = engine.sparsity.rows
    assert row.layer == "up" and engine.sparsity.eligible == engine.sparsity.picked == (("up",) if sparsity == "force" else ())
    if pruned:
        stored = onnx.numpy_helper.to_array(next(t for t in onnx.load(pruned).graph.initializer if t.name == "w"))
        assert sparse24.fits(stored, 0).all()
    types = [layer["LayerType"] for layer in engine.layer_info()["Layers"]]
    assert types.count("Deconvolution") == 1


@pytest.mark.full
def test_a_published_u_net(tmp_path):
    """The illumination estimator of tbefn: 3 ConvTransposes, one of which cuts its last row, and dilated convolutions."""
    whole = onnx.shape_inference.infer_shapes(onnx.load(given_model("tbefn_180x320")))
    path = tmp_path / "estimator.onnx"
    onnx.save(onnx.utils.Extractor(whole).extract_model(["Placeholder"], ["mul:0"]), path)
    engine = gr.build(path, device=DEFAULT_DEVICE)
    types = [layer.type for layer in engine.plan.layers]
    up = [layer for layer in engine.plan.layers if "transpose" in layer.name]
    assert [layer.type for layer in up].count("conv") == 3 and "conv_transpose" not in types and types.count("move") == 1
    assert [layer.problem.epilogue.d2s for layer in up if layer.type == "conv"] == [2, 2, 2]
    x = np.random.default_rng(0).uniform(0, 1, (1, 3, 180, 320)).astype(np.float32)
    got = emulated(engine, {"Placeholder": x})
    for name, budget in budgets(path, {"Placeholder": x}).items():
        budget.check(got[name], name)
