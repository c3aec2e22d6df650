"""Convolutions of 1 to 4 channels read the network's input as it lies: values, counters, machine code, predicted times."""

import math
from dataclasses import replace

import numpy as np
import pytest

import gpu_runtime as gr
from cuda_kernels.compile import compile_kernel, compile_many, virtual
from cuda_kernels.device import ARCHITECTURES, NAMED, named
from cuda_kernels.launch import Emulated
from cuda_kernels.params import members
from tactics.candidates import accepts, candidates, rejected
from tactics.families import conv_stem
from tactics.families.conv_stem import INPUTS, TILES, family_reason, geometry, shared_bytes
from tactics.format import Format, num_bytes, padded_channels
from tactics.launches import launches
from tactics.predict import predict_us
from tactics.problems.convolution import with_epilogue
from tactics.problems.epilogue import MaxPool
from tactics.problems.pointwise_ops import Activation
from tactics.problems.problem import ConvProblem, PoolProblem, ReformatProblem
from tactics.roofline import resident
from tactics.sampling.data import random_data
from tactics.step import linear
from tactics.tactic import Tactic
from tests.compiled import takes
from tests.problems import check, conv_case, execute
from tests.reference_run import model, node

pytestmark = pytest.mark.slow

DEVICE = named("h200")
RELU, SIGMOID, PRELU = Activation("relu"), Activation("sigmoid"), Activation("prelu")
SMALL = next(t for t in TILES if (t.m, t.n) == (16, 64))
HWC8 = Format("fp16", "hwc8")

PROBLEMS = {
    "7x7_s2_c3": conv_case(1, 3, 37, 45, 33, 7, 7, (2, 2), (3, 3, 3, 3), bias=True, act=RELU),
    "3x3_s2_c3": conv_case(2, 3, 20, 31, 64, 3, 3, (2, 2), bias=True),
    "3x3_s1_c1": conv_case(3, 1, 8, 8, 20, 3, 3, pad=(1, 1, 1, 1), bias=True, act=SIGMOID),
    "11x11_s4_c3": conv_case(1, 3, 40, 47, 10, 11, 11, (4, 4), (2, 2, 2, 2), residual=True, act=PRELU),
    "9x9_s1_c1": conv_case(1, 1, 19, 22, 16, 9, 9, pad=(4, 4, 4, 4), bias=True),
    "4x4_s4_c4": ConvProblem(1, 4, 33, 40, 20, 4, 4, (4, 4)),
    "3x3_s1_c4": conv_case(1, 4, 12, 9, 130, 3, 3, pad=(1, 1, 1, 1), bias=True),
    "5x3_dilated_c2": conv_case(1, 2, 17, 19, 16, 5, 3, (1, 2), (2, 1, 2, 1), (2, 1), bias=True, residual=True, act=RELU),
    "1x1_s1_c3": ConvProblem(2, 3, 7, 5, 16, 1, 1),
}
SOME = [("fp32:chw", "hwc8"), ("uint8:hwc", "hwc8"), ("fp16:chw", "chw")]
IMAGENET = {
    "resnet50": conv_case(1, 3, 224, 224, 64, 7, 7, (2, 2), (3, 3, 3, 3), bias=True, act=RELU),
    "squeezenet": conv_case(1, 3, 224, 224, 64, 3, 3, (2, 2), bias=True, act=RELU),
}


def stem(problem, x, y=HWC8, tile=SMALL):
    return Tactic("conv_stem", tile, (x, y) if problem.epilogue.residual else (x,), y)


def run(problem, tactic, **options):
    return check(problem, tactic, DEVICE, **options)


def check_counters(problem, tactic, stats):
    t, g = tactic.tile, geometry(problem, tactic.tile.n, linear(tactic.out))
    rows, cols = (-(-size // 2**log2) for size, log2 in zip(problem.out_shape[2:], (g.log2_th, g.log2_tw), strict=True))
    tiles = problem.n * rows * cols * -(-padded_channels(tactic.out.layout, problem.k) // t.m)
    assert stats.mma == tiles * g.steps * (t.m // 16) * (t.n // 8)
    # Pixels 8 words apart: 4 of them have the banks of the other 4.
    assert g.excess == (problem.stride[1] * problem.c == 16)
    assert g.excess or stats.excess_wavefronts == 0, f"bank conflicts: {stats.excess}"


def layouts(problem):
    """Once, every kind of input with vectors and with planes as output; three of the pairs elsewhere."""
    pairs = [(x, y) for x in INPUTS for y in (HWC8, Format("fp16", "chw"))]
    some = [(str(x), y.layout) for x, y in pairs] if problem is PROBLEMS["7x7_s2_c3"] else SOME
    return [stem(problem, x, y) for x, y in pairs if (str(x), y.layout) in some]


@pytest.fixture(scope="module", autouse=True)
def compiled():
    steps = [s for p in PROBLEMS.values() for t in layouts(p) for s in launches(p, t)]
    compile_many(dict.fromkeys((s.kernel, s.values, virtual(DEVICE.sm)) for s in steps))


@pytest.mark.parametrize("name", PROBLEMS)
def test_every_input_and_side(name):
    problem = PROBLEMS[name]
    outputs = {}
    for tactic in layouts(problem):
        got, stats = run(problem, tactic)
        check_counters(problem, tactic, stats)
        outputs.setdefault(tactic.out, []).append(got)
    for same in outputs.values():  # whole numbers: the type of the stored input makes no difference
        assert all(np.array_equal(same[0], other, equal_nan=True) for other in same[1:]) or problem.epilogue.residual


@pytest.mark.slow
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_every_tile(tile):
    problem = replace(PROBLEMS["7x7_s2_c3"], k=130)
    for x in ("fp32:chw", "uint8:hwc"):
        tactic = stem(problem, Format.parse(x), Format("fp16", "chw32"), tile)
        assert tactic in candidates(problem, DEVICE)
        check_counters(problem, tactic, run(problem, tactic)[1])


@pytest.mark.parametrize("options", [{"async_mode": "late"}, {"seed": 1}, {"seed": 2, "async_mode": "late"}], ids=str)
def test_modes_and_orders_agree_bit_for_bit(options):
    problem = PROBLEMS["7x7_s2_c3"]
    tactic = stem(problem, Format("fp32", "chw"))
    assert np.array_equal(run(problem, tactic)[0], run(problem, tactic, **options)[0])


@pytest.mark.parametrize(("name", "seeing"), [("3x3_s1_c1", 9), ("3x3_s2_c3", 4), ("3x3_s1_c4", 9)])
def test_what_is_not_finite_stays_in_its_windows(name, seeing):
    """Empty places of K repeat a tap of the window, or are cleared, as is a word's half outside of it: an infinite pixel
    reaches the outputs that see it, and no others."""
    problem = PROBLEMS[name]
    (x,), weights = random_data(problem)
    x[0, 0, 4, 4] = np.inf
    got = execute(Emulated(DEVICE), problem, stem(problem, Format("fp32", "chw")), [x], weights)[:, : problem.k]
    y = with_epilogue(problem, act=Activation()).reference(x, weights["w"], weights["b"])
    seen = ~np.isfinite(y)
    assert np.isfinite(got[~seen]).all() and seen.sum() == seeing * problem.k


@pytest.mark.parametrize("x", ["fp32:chw", "fp16:chw", "uint8:hwc"])
@pytest.mark.parametrize("name", IMAGENET)
def test_only_the_images_own_bytes_move(name, x):
    problem, fmt = IMAGENET[name], Format.parse(x)
    tactic = best(problem, fmt)
    _, stats = run(problem, tactic)
    check_counters(problem, tactic, stats)
    ideal = num_bytes(fmt, problem.in_shapes[0]) + num_bytes(HWC8, problem.out_shape) + 2 * problem.k * problem.c * problem.r**2
    assert stats.launch_unique_bytes <= 1.05 * ideal


def best(problem, x, kernel="conv_stem"):
    found = [t for t in candidates(problem, DEVICE) if t.kernel == kernel and t.ins[0] == x and t.out == HWC8]
    return min(found, key=lambda t: (predict_us(problem, t, DEVICE), t))


@pytest.mark.parametrize("name", IMAGENET)
def test_predicted_below_reformat_and_dense(name):
    problem = IMAGENET[name]
    direct = predict_us(problem, best(problem, Format("fp32", "chw")), DEVICE)
    for layout in ("chw", "hwc8", "chw32"):
        fmt = Format("fp16", layout)
        copy = ReformatProblem(*problem.in_shapes[0], "fp32:chw", str(fmt))
        dense = predict_us(problem, best(problem, fmt, "conv_dense"), DEVICE)
        assert direct < dense + min(predict_us(copy, t, DEVICE) for t in candidates(copy, DEVICE))


@pytest.mark.parametrize("device", NAMED)
def test_what_is_launchable_fits_and_the_rest_has_reasons(device):
    d = named(device)
    for problem in (*PROBLEMS.values(), *IMAGENET.values()):
        for t in candidates(problem, d):
            if t.kernel == "conv_stem":
                assert shared_bytes(problem, t) <= d.smem_per_block and Tactic.parse(t.name) == t
    bad = dict(rejected(ConvProblem(1, 8, 9, 9, 8, 3, 3), d))
    assert str(bad["conv_stem"]) == "a stem has at most 4 input channels, not 8"
    assert "512" in family_reason(ConvProblem(1, 4, 20, 20, 8, 12, 12))


@pytest.mark.slow
@pytest.mark.parametrize("sm", ARCHITECTURES)
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_compiles_without_spills(tile, sm):
    problem = replace(with_epilogue(PROBLEMS["5x3_dilated_c2"], act=PRELU), k=130)
    for x, y in (("fp32:chw", "hwc8"), ("uint8:hwc", "chw")):
        (launch,) = launches(problem, stem(problem, Format.parse(x), Format("fp16", y), tile))
        taken = takes(launch.kernel, launch.values, sm)
        assert taken.regs * tile.threads <= 65536
        per_step = (tile.m // tile.warps_m // 16) * (tile.n // tile.warps_n // 8)
        assert taken.mma and taken.mma % per_step == 0


# ---- a max pool in the epilogue

POOLED = {
    "resnet50": conv_case(
        1, 3, 45, 61, 64, 7, 7, (2, 2), (3, 3, 3, 3), bias=True, act=RELU, pool=MaxPool((3, 3), (2, 2), (1, 1), (12, 16))
    ),
    "squeezenet": conv_case(2, 3, 37, 50, 64, 3, 3, (2, 2), bias=True, act=RELU, pool=MaxPool((3, 3), (2, 2), (0, 0), (8, 11))),
    "ceil": conv_case(1, 3, 21, 21, 70, 3, 3, bias=True, act=RELU, pool=MaxPool((3, 3), (2, 2), (0, 0), (9, 9))),
    "apart": conv_case(
        1, 1, 20, 22, 64, 5, 5, pad=(2, 2, 2, 2), bias=True, act=SIGMOID, pool=MaxPool((2, 2), (2, 2), (0, 0), (10, 11))
    ),
    "negative": conv_case(
        1, 4, 16, 17, 128, 3, 3, pad=(1, 1, 1, 1), bias=True, act=PRELU, pool=MaxPool((3, 2), (1, 2), (1, 0), (16, 8))
    ),
}


@pytest.mark.parametrize("sms", [1, 3, 5])
@pytest.mark.parametrize("out", ["hwc8", "chw"])
def test_blocks_take_tiles_in_turn_as_evenly_as_they_can(out, sms, monkeypatch):
    """Of few SMs, and so few blocks: all have as many, and some have one more."""
    monkeypatch.setattr(conv_stem, "SMS", sms)
    problem = conv_case(3, 3, 25, 70, 20, 3, 3, pad=(1, 1, 1, 1), bias=True)
    tile = next(t for t in TILES if (t.m, t.n) == (64, 128))
    tactic = Tactic("conv_stem", tile, (Format("fp32", "chw"),), Format("fp16", out))
    (step,) = launches(problem, tactic)
    given = {m.name: value for m, (_, value) in zip(members("conv_stem", step.values), step.args, strict=True)}
    tiles = 3 * math.prod(conv_stem._sizes(problem, conv_stem._geometry(problem, tactic)))
    assert 1 < step.grid[0] < tiles == step.grid[0] * given["per_block"] + given["longer"] and given["longer"] < step.grid[0]
    check(problem, tactic, DEVICE)


SHARED = conv_case(10, 3, 224, 224, 64, 7, 7, (2, 2), (3, 3, 3, 3), bias=True, pool=MaxPool((3, 3), (2, 2), (1, 1), (56, 56)))


def shares(tactic):
    """(the launch, tiles of each block)."""
    (step,) = launches(SHARED, tactic)
    given = {m.name: value for m, (_, value) in zip(members("conv_stem", step.values), step.args, strict=True)}
    return step, [given["per_block"] + (i < given["longer"]) for i in range(step.grid[0])]


def test_no_sm_has_more_than_its_share():
    """Blocks that are resident together, one after the other on each SM: ten images are 640 tiles, 4.85 for each."""
    tile = next(t for t in TILES if (t.m, t.n) == (64, 256))
    _, tiles = shares(Tactic("conv_stem", tile, (Format("fp16", "chw"),), Format("fp16", "hwc8")))
    assert sum(tiles) == 640 and max(sum(tiles[sm :: DEVICE.num_sms]) for sm in range(DEVICE.num_sms)) == 5


@pytest.mark.slow
@pytest.mark.parametrize("size", [(64, 256), (64, 64)], ids="{0[0]}x{0[1]}".format)
@pytest.mark.parametrize("device", NAMED)
def test_a_gpu_holds_all_blocks_at_once(device, size):
    """By the registers that the compiled kernel takes."""
    d, ends = named(device), ((Format("fp16", "chw"),), Format("fp16", "hwc8"))
    found = (t for t in candidates(SHARED, d) if t.kernel == "conv_stem" and (t.ins, t.out) == ends)
    tactic = next(t for t in found if (t.gemm.m, t.gemm.n) == size)
    step, tiles = shares(tactic)
    registers = compile_kernel("conv_stem", dict(step.values), d.sm).regs
    assert step.grid[0] <= d.num_sms * resident(d, tactic.gemm.threads, registers, step.smem)
    assert sum(tiles) == 10 * math.prod(conv_stem._sizes(SHARED, conv_stem._geometry(SHARED, tactic)))
    assert max(sum(tiles[sm :: d.num_sms]) for sm in range(d.num_sms)) == math.ceil(sum(tiles) / d.num_sms)
    assert accepts(replace(SHARED, n=2), tactic, d), "of any batch, whose pieces take it too"


@pytest.mark.parametrize("name", POOLED)
def test_maxima_are_stored_and_the_convolution_is_not(name):
    problem = POOLED[name]
    tactics = [t for t in candidates(problem, DEVICE) if str(t.ins[0]) in ("fp32:chw", "uint8:hwc") and t.out.layout != "chw16"]
    assert {t.out.layout for t in tactics} == {"hwc8", "hwc16", "chw32"} and all(t.kernel == "conv_stem" for t in tactics)
    tactics = [t for t in tactics if (t.out.layout, t.ins[0].dtype) != ("chw32", "uint8")]
    for tactic in tactics if name == "resnet50" else tactics[:: len(tactics) // 3]:
        got, stats = run(problem, tactic)
        assert stats.excess_wavefronts == 0, f"bank conflicts: {stats.excess}"
        assert stats.launch_unique_store_bytes == -(-got.size * 2 // 32) * 32
    assert any("no max pool" in str(reason) for _, reason in rejected(problem, DEVICE))


def test_pooling_in_the_epilogue_saves_the_convolutions_bytes():
    """ResNet-50's stem: what is moved is image and maxima; apart, the convolution's result goes out and comes back."""
    whole = conv_case(1, 3, 224, 224, 64, 7, 7, (2, 2), (3, 3, 3, 3), bias=True, act=RELU)
    pooled = with_epilogue(whole, pool=MaxPool((3, 3), (2, 2), (1, 1), (56, 56)))
    tactic = min(
        (t for t in candidates(pooled, DEVICE) if str(t.ins[0]) == "fp32:chw" and t.out == HWC8),
        key=lambda t: predict_us(pooled, t, DEVICE),
    )
    _, stats = run(pooled, tactic)
    image, maxima = 3 * 224 * 224 * 4, 64 * 56 * 56 * 2
    assert stats.launch_unique_bytes <= 1.02 * (image + maxima + 64 * 3 * 49 * 2)
    after = PoolProblem(1, 64, 112, 112, "max", 3, 3, (56, 56), (2, 2), (1, 1, 1, 1))
    stems = [t for t in candidates(whole, DEVICE) if str(t.ins[0]) == "fp32:chw" and t.out == HWC8]
    apart = min(predict_us(whole, t, DEVICE) for t in stems)
    apart += min(predict_us(after, t, DEVICE) for t in candidates(after, DEVICE) if t.ins[0] == t.out == HWC8)
    assert predict_us(pooled, tactic, DEVICE) < apart


def test_a_pool_that_no_stem_takes_stays_apart(tmp_path):
    """The option is dropped, and the network builds."""
    weights = {"w": np.random.default_rng(0).standard_normal((8, 1, 5, 5)).astype(np.float32)}
    nodes = [
        node("Conv", "x w", "a", pads=(2, 2, 2, 2)),
        node("Relu", "a", "b"),
        node("MaxPool", "b", "y", kernel_shape=(2, 2), strides=(2, 2)),
    ]
    (tmp_path / "m.onnx").write_bytes(model(nodes, {"x": (1, 1, 28, 28)}, "y", weights).SerializeToString())
    engine = gr.build(tmp_path / "m.onnx", device="h200")
    assert [layer.type for layer in engine.plan.layers if layer.type != "reformat"] == ["conv", "pool"]
