"""Depth-to-space, space-to-depth and channel shuffles may be part of a convolution: no layer, no bytes of their own."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

import gpu_runtime as gr
from cuda_kernels.device import ARCHITECTURES, DEFAULT_DEVICE, named
from cuda_kernels.launch import Emulated
from gpu_runtime.network import APART
from gpu_runtime.rewrites import blocks, channels, upsampling
from tactics.candidates import candidates
from tactics.families.conv_gemm import row_order
from tactics.families.merged import padded_k
from tactics.format import Format, num_bytes, padded_channels
from tactics.launches import launches
from tactics.planner.graph import holds
from tactics.problems.convolution import depth_to_space, space_to_depth
from tactics.problems.pointwise_ops import Activation
from tactics.problems.problem import MoveProblem
from tactics.sampling.data import random_data, reference
from tactics.step import linear
from tactics.tactic import Tactic, Tile
from tests.compiled import takes
from tests.conftest import model_path
from tests.problems import assert_right, conv_case, execute
from tests.reference_run import check_against_ort, feeds_for, model, network, node, ort_run, relative_error, run

pytestmark = pytest.mark.slow

DEVICE = named("h200")
TILE = Tile(64, 64, 64, 2, 2, 4)
rng = np.random.default_rng(5)
RELU, SIGMOID, PRELU = Activation("relu"), Activation("sigmoid"), Activation("prelu")


def weights(*shape):
    return rng.standard_normal(shape).astype(np.float16).astype(np.float32) / 4


# ---- the kernels' store map


def problem(b, mode, k, **more):
    return conv_case(2, 16, 5, 7, k, 3, 3, pad=(1, 1, 1, 1), bias=True, sparse24=True, d2s=b, d2s_mode=mode, **more)


# A residual lies in the shuffled layout; sigmoid(0) is not 0, so padded channels must be masked; 3 channels per corner need it.
CASES = {
    "dcr": problem(2, "dcr", 12, residual=True, act=PRELU),
    "crd": problem(2, "crd", 12, residual=True, act=SIGMOID),
    "three": problem(3, "crd", 27, act=SIGMOID),
    "three_dcr": problem(3, "dcr", 9, act=PRELU),
    "four": problem(4, "dcr", 48, residual=True, act=SIGMOID),
    "wide": problem(2, "crd", 160, act=RELU),
    # A residual with fewer pixels: one for each block, or one for 3 x 3 pixels of a convolution that shuffles nothing.
    "upsampled": problem(2, "dcr", 12, residual=True, act=PRELU, up=2),
    "upsampled_four": problem(4, "crd", 48, residual=True, act=SIGMOID, act_first=True, up=4),
    "upsampled_plain": conv_case(2, 16, 9, 6, 20, 3, 3, pad=(1, 1, 1, 1), residual=True, act=SIGMOID, sparse24=True, up=3),
}


def tactic(kernel, p, x, y):
    formats = [Format("fp16", layout) for layout in (x, y)]
    return Tactic(kernel, TILE, tuple(formats) if p.epilogue.residual else tuple(formats[:1]), formats[1])


@pytest.mark.sample(6)
@pytest.mark.parametrize("kernel", ["conv_dense", "conv_sparse24"])
@pytest.mark.parametrize("name", CASES)
def test_stores(name, kernel):
    p = CASES[name]
    inputs, w = random_data(p)
    expected = reference(p, inputs, w)
    for y in ("hwc8", "chw32", "chw", "chw2"):
        t = tactic(kernel, p, "hwc8", y)
        if y != "chw2":
            assert t in candidates(p, DEVICE)
        outputs = []
        for options in ({}, {"async_mode": "late", "seed": 1}):
            gpu = Emulated(DEVICE, **options)
            outputs.append(execute(gpu, p, t, inputs, w))
            assert_right(p, t, outputs[-1], expected)
            (stats,) = gpu.stats
            rows = p.epilogue.d2s**2 * padded_channels(y, p.out_shape[1])
            blocks = -(-rows // TILE.m) * -(-p.n * p.p * p.q // TILE.n)
            mmas = blocks * padded_k(p) * TILE.m * TILE.n // (16 * 8 * (32 if t.sparse else 16))
            assert stats.mma + stats.mma_sp == mmas
            assert stats.excess_wavefronts == 0, f"{y}: bank conflicts: {stats.excess}"
        assert np.array_equal(*outputs)


def test_unpadded_linear_rows_are_fewer_mmas_and_a_candidate():
    """48 channels become 3 of 4 x 4 pixels: 128 rows of vectors, or 48 rows of linear stores; both are candidates."""
    p = CASES["four"]
    assert len(row_order(p, "hwc8")) == 128 and len(row_order(p, "chw")) == 48
    assert {linear(t.out) for t in candidates(p, DEVICE)} == {False, True}
    for layout in ("hwc8", "chw"):
        order = np.array(row_order(p, layout))
        assert sorted(order[order >= 0]) == list(range(48))


@pytest.mark.parametrize("up", [1, 2])
def test_split_k_and_depth_to_space(up):
    """Parameters of both stand in one struct."""
    p = conv_case(1, 64, 5, 7, 12, 3, 3, pad=(1, 1, 1, 1), bias=True, residual=True, act=PRELU, sparse24=True, d2s=2, up=up)
    inputs, w = random_data(p)
    for kernel in ("conv_dense", "conv_sparse24"):
        t = tactic(kernel, p, "hwc8", "hwc8")
        t = replace(t, tile=replace(TILE, split=4))
        assert t in candidates(p, DEVICE)
        assert_right(p, t, execute(Emulated(DEVICE), p, t, inputs, w), reference(p, inputs, w))


@pytest.mark.parametrize(
    "p",
    [
        conv_case(1, 16, 8, 8, 128, 1, 1, d2s=2),
        conv_case(1, 16, 8, 8, 48, 1, 1, d2s=4, d2s_mode="crd"),
    ],
    ids=str,
)
def test_the_shuffled_tensor_is_stored_once_in_whole_sectors(p):
    """Launch-unique bytes are the output's with its padding, and nothing else; for vectors no sector is stored twice."""
    for y in ("hwc8", "chw"):
        t = tactic("conv_dense", p, "hwc8", y)
        gpu = Emulated(DEVICE)
        execute(gpu, p, t, *random_data(p))
        (stats,) = gpu.stats
        assert stats.launch_unique_store_bytes == num_bytes(t.out, p.out_shape)
        if y == "hwc8":
            assert stats.sectors == stats.ideal_sectors


@pytest.mark.slow
@pytest.mark.parametrize("sm", ARCHITECTURES)
@pytest.mark.parametrize(
    "b, kernel, y",
    [
        *itertools.product((2, 4), ("conv_dense", "conv_sparse24"), ("hwc8", "chw")),
        (3, "conv_dense", "chw"),
        (1, "conv_dense", "hwc8"),
        (1, "conv_sparse24", "hwc8"),
        (1, "conv_dense", "chw"),
    ],
)
def test_compiles_without_spills(b, kernel, y, sm):
    p = problem(b, "dcr", 48 if b != 3 else 27, residual=True, act=PRELU) if b > 1 else CASES["upsampled_plain"]
    for tile in (TILE, Tile(128, 128, 64, 2, 4, 3)):
        step = launches(p, Tactic(kernel, tile, (Format("fp16", "hwc8"), Format("fp16", y)), Format("fp16", y)))[0]
        takes(step.kernel, step.values, sm)


# ---- fusion, against onnxruntime


@pytest.mark.parametrize("b", [2, 3])
@pytest.mark.parametrize("mode", ["dcr", "crd"])
def test_reference_is_onnx_depth_to_space(mode, b):
    x = rng.standard_normal((2, 4 * b * b, 3, 5)).astype(np.float32)
    proto = model([node("DepthToSpace", "x", "y", blocksize=b, mode=mode.upper())], {"x": x.shape}, "y")
    assert np.array_equal(depth_to_space(x, b, mode), ort_run(proto, {"x": x})["y"])
    assert np.array_equal(space_to_depth(depth_to_space(x, b, mode), b, mode), x)


X = {"x": (2, 8, 6, 4)}


def written_out(kind: str, x: str, y: str, shape, b: int):
    """(nodes, weights) of Reshape, Transpose, Reshape for a shuffle of a tensor of that shape."""
    n, c, h, w = shape
    six, perm, out = {
        "d2s_crd": ((n, c // b**2, b, b, h, w), (0, 1, 4, 2, 5, 3), (n, c // b**2, h * b, w * b)),
        "d2s_dcr": ((n, b, b, c // b**2, h, w), (0, 3, 4, 1, 5, 2), (n, c // b**2, h * b, w * b)),
        "s2d_crd": ((n, c, h // b, b, w // b, b), (0, 1, 3, 5, 2, 4), (n, c * b * b, h // b, w // b)),
        "s2d_dcr": ((n, c, h // b, b, w // b, b), (0, 3, 5, 1, 2, 4), (n, c * b * b, h // b, w // b)),
        "channels": ((n, b, c // b, h, w), (0, 2, 1, 3, 4), shape),
    }[kind]
    nodes = [
        node("Reshape", f"{x} {y}_six", f"{y}_a"),
        node("Transpose", f"{y}_a", f"{y}_b", perm=perm),
        node("Reshape", f"{y}_b {y}_out", y),
    ]
    return nodes, {f"{y}_six": np.array(six), f"{y}_out": np.array(out)}


@pytest.mark.parametrize("mode", ["DCR", "CRD"])
@pytest.mark.parametrize("act", ["", "before", "after"])
@pytest.mark.parametrize("spelling", ["DepthToSpace", "Reshape"])
def test_depth_to_space_joins_the_convolution(mode, act, spelling):
    w = {"w": weights(12, 8, 3, 3), "b": weights(12), "s": weights(12 if act == "before" else 3, 1, 1)}
    nodes = [node("Conv", "x w b", "a", pads=(1, 1, 1, 1))]
    nodes += [node("PRelu", "a s", "p")] if act == "before" else []
    source = "p" if act == "before" else "a"
    if spelling == "Reshape":
        more, extra = written_out(f"d2s_{mode.lower()}", source, "d", (2, 12, 6, 4), 2)
        nodes, w = nodes + more, w | extra
    else:
        nodes.append(node("DepthToSpace", source, "d", blocksize=2, mode=mode))
    nodes.append(node("PRelu", "d s", "y") if act == "after" else node("Identity", "d", "y"))
    net = check_against_ort(model(nodes, X, "y", w), 1e-5)
    (op,) = net.ops
    end = op.problem.epilogue
    assert (end.d2s, end.d2s_mode) == (2, mode.lower()) and op.problem.out_shape == (2, 3, 12, 8)
    assert end.act.name == ("prelu" if act else "none")


def test_residual_after_depth_to_space_is_still_an_alternative():
    w = {"w": weights(12, 8, 1, 1), "v": weights(3, 3, 3, 3)}
    nodes = [node("Conv", "x w", "a"), node("DepthToSpace", "a", "d", blocksize=2), node("Conv", "z v", "c", pads=(1, 1, 1, 1))]
    nodes += [node("Add", "d c", "s"), node("Relu", "s", "y")]
    net = check_against_ort(model(nodes, X | {"z": (2, 3, 12, 8)}, "y", w), 1e-5)
    assert net.groups == (("s", ("apart", "into a", "into c")),)
    assert not any(isinstance(op.problem, MoveProblem) for op in net.ops)
    assert {op.problem.epilogue.d2s for op in net.ops if op.layer == "a"} == {2}


@pytest.mark.parametrize("act", ["", "Relu"])
@pytest.mark.parametrize("b", [1, 2])
def test_an_enlarged_residual_is_read_where_it_is_small(b, act):
    """After depth-to-space, as super-resolution adds its input, and in a pyramid of features."""
    w = {"w": weights(3 * b * b, 8, 1, 1), "s": np.float32([1, 1, 2, 2])}
    nodes = [node("Conv", "x w", "a"), *([node("DepthToSpace", "a", "d", blocksize=b)] if b > 1 else [])]
    how = {"mode": "nearest", "nearest_mode": "floor", "coordinate_transformation_mode": "asymmetric"}
    nodes += [node("Resize", "z _ s", "u", **how), node("Add", f"{'d' if b > 1 else 'a'} u", "t" if act else "y")]
    nodes += [node(act, "t", "y")] if act else []
    proto = model(nodes, X | {"z": (2, 3, 3 * b, 2 * b)}, "y", w)
    net = upsampling.offer(check_against_ort(proto, 1e-5))
    (group,) = net.groups
    assert group[1] == ("apart", "into a", "into a, upsampled")
    feeds = feeds_for(net)
    for option in group[1]:
        got = run(net, feeds, {group[0]: option})["y"]
        assert relative_error(got, ort_run(proto, feeds)["y"]) < 1e-5
    choice = {group[0]: "into a, upsampled"}
    (op,) = (op for op in net.ops if holds(op.when, choice))
    assert op.problem.epilogue.up == 2 and op.inputs == ("x", "z")


def test_an_enlarged_tensor_with_other_readers_stays():
    w = {"w": weights(3, 8, 1, 1), "s": np.float32([1, 1, 2, 2])}
    nodes = [
        node("Conv", "x w", "a"),
        node("Resize", "z _ s", "u", mode="nearest", nearest_mode="floor", coordinate_transformation_mode="asymmetric"),
    ]
    nodes += [node("Add", "a u", "y"), node("Tanh", "u", "t")]
    net = upsampling.offer(network(model(nodes, X | {"z": (2, 3, 3, 2)}, "y t", w)))
    assert [op.when for op in net.ops if isinstance(op.problem, MoveProblem)] == [()]


@pytest.mark.parametrize("tail", ["a d", "other"])
def test_depth_to_space_of_a_tensor_with_other_readers_stays(tail):
    nodes = [node("Conv", "x w", "a"), node("DepthToSpace", "a", "d", blocksize=2)]
    if tail == "other":
        nodes.append(node("Tanh", "a", "t"))
    net = check_against_ort(model(nodes, X, "a d" if tail == "a d" else "d t", {"w": weights(12, 8, 1, 1)}), 1e-5)
    assert sum(isinstance(op.problem, MoveProblem) for op in net.ops) == 1


def chosen(net, option):
    """The problems that there are where the one group has that option."""
    ((group, _),) = net.groups
    return [op.problem for op in net.ops if holds(op.when, {group: option})]


@pytest.mark.parametrize("kind", ["s2d_dcr", "s2d_crd", "SpaceToDepth"])
def test_space_to_depth_becomes_taps(kind):
    w = {"w": weights(5, 32, 3, 3), "v": weights(4, 32, 1, 1)}
    first, extra = written_out("s2d_dcr" if kind == "SpaceToDepth" else kind, "x", "d", (2, 8, 6, 4), 2)
    if kind == "SpaceToDepth":
        first, extra = [node("SpaceToDepth", "x", "d", blocksize=2)], {}
    nodes = [*first, node("Conv", "d w", "y", pads=(1, 0, 1, 1), strides=(1, 2)), node("Conv", "d v", "z")]
    net = check_against_ort(model(nodes, X, "y z", w | extra), 1e-5, rewrite=blocks.offer)
    a, b = chosen(net, blocks.IN_WEIGHTS)
    assert (a.c, a.r, a.s, a.stride, a.pad) == (8, 6, 6, (2, 4), (2, 0, 2, 2))
    assert (b.c, b.r, b.s, b.stride, b.pad) == (8, 2, 2, (2, 2), (0, 0, 0, 0))


def test_space_to_depth_keeps_the_2_to_4_pattern():
    w = weights(8, 32, 1, 1)
    w[:, 1::2] = 0
    net = network(model([node("SpaceToDepth", "x", "d", blocksize=2), node("Conv", "d w", "y")], X, "y", {"w": w}))
    (problem,) = chosen(blocks.offer(net), blocks.IN_WEIGHTS)
    assert problem.sparse24


@pytest.mark.parametrize("kind", ["s2d_dcr", "s2d_crd", "channels", "SpaceToDepth"])
def test_a_shuffle_that_no_convolution_takes_is_one_move(kind):
    first, extra = [node("SpaceToDepth", "x", "d", blocksize=2)], {}
    if kind != "SpaceToDepth":
        first, extra = written_out(kind, "x", "d", X["x"], 2)
    net = check_against_ort(model([*first, node("Relu", "d", "y")], X, "y", extra), 1e-6)
    assert [op.problem.kind for op in net.ops if isinstance(op.problem, MoveProblem)] == [
        "s2d_dcr" if kind == "SpaceToDepth" else kind
    ]


def test_a_dilated_or_grouped_convolution_takes_no_shuffle():
    w = {"w": weights(4, 32, 2, 2), "v": weights(32, 1, 3, 3)}
    nodes = [node("SpaceToDepth", "x", "d", blocksize=2), node("Conv", "d w", "y", dilations=(2, 1))]
    nodes += [node("Conv", "d v", "z", group=32, pads=(1, 1, 1, 1))]
    net = check_against_ort(model(nodes, X, "y z", w), 1e-5, rewrite=blocks.offer)
    assert sum(isinstance(op.problem, MoveProblem) for op in net.ops) == 1 and not net.groups


@pytest.mark.parametrize("where", ["after", "both"])
def test_channel_shuffle_is_an_order_of_columns(where):
    """Also where a convolution before is read only by the shuffle."""
    w = {"w": weights(8, 8, 1, 1), "b": weights(8), "s": weights(8, 1, 1), "v": weights(5, 8, 3, 3), "u": weights(4, 8, 1, 1)}
    nodes = [] if where == "after" else [node("Conv", "x w b", "a"), node("PRelu", "a s", "p")]
    more, extra = written_out("channels", "x" if where == "after" else "p", "d", (2, 8, 6, 4), 2)
    tail = [node("Conv", "d v", "y"), node("Conv", "d u", "z")]
    proto = model(nodes + more + tail, X, "y z", w | extra)
    net = check_against_ort(proto, 1e-5, rewrite=channels.offer)
    one = chosen(net, channels.IN_WEIGHTS)
    assert len(one) == {"after": 2, "both": 3}[where] and len(chosen(net, APART)) == len(one) + 1


# ---- built engines


def moved(engine):
    """Layers that only move data, reformats aside."""
    return [x.name for x in engine.plan.layers if x.type in ("move", "gather", "concat")]


@pytest.mark.slow
@pytest.mark.parametrize("sparsity", ["disable", "force"])
@pytest.mark.parametrize(
    "name, shape, device, blocks",
    [
        ("super_resolution_10", (1, 1, 224, 224), DEFAULT_DEVICE, [3]),
        # Nine channels: the convolution that stores no blocks is faster by more than the launch of the layer that moves them.
        ("super_resolution_10", (1, 1, 224, 224), "rtx4090", []),
        ("realesr_animevideov3", (1, 3, 32, 40), DEFAULT_DEVICE, [4]),
        ("realesr_animevideov3_fp16", (1, 3, 32, 40), DEFAULT_DEVICE, [4]),
        ("carn_m_x2", (1, 3, 24, 32), DEFAULT_DEVICE, [2]),
    ],
)
def test_no_layer_is_left_for_pixel_shuffles(name, shape, device, blocks, sparsity):
    engine = gr.build(model_path(name), sparsity=sparsity, device=device, shapes={"input": shape})
    convs = [layer for layer in engine.plan.layers if layer.type == "conv"]
    assert [layer.problem.epilogue.d2s for layer in convs if layer.problem.epilogue.d2s > 1] == blocks
    assert len(moved(engine)) == (not blocks)
