"""Every kernel, tile and format pair, executed from its PTX by the emulator with all checks on, against the FP32 reference.

Both cp.async modes and several orders of warps and blocks must agree bit for bit; the counters must show the MMAs that the
tile needs, no bank conflicts, and whole sectors on every vector-format access of a convolution.
"""

import random
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest

from cuda_kernels.device import ARCHITECTURES, named
from cuda_kernels.launch import Emulated
from cuda_kernels.named_devices import SMEM_PER_BLOCK
from tactics.candidates import candidates
from tactics.families.conv_gemm import DENSE_TILES, SPARSE_TILES, num_tiles
from tactics.families.merged import merged, padded_k
from tactics.format import Format, num_bytes
from tactics.launches import launches, section_bytes
from tactics.predict import predict_us
from tactics.problems.pointwise_ops import NONE, Activation
from tactics.problems.problem import ConvProblem
from tactics.sampling.data import random_data, reference
from tactics.step import linear
from tactics.tactic import Tactic, Tile
from tactics.tiles import early_residual
from tests.compiled import takes
from tests.problems import (
    CHAINED,
    CONVS,
    EVERY_TACTIC,
    OTHERS,
    POINTWISE,
    PROBLEMS,
    RELU,
    assert_right,
    assert_written_once,
    conv_case,
    execute,
)

DEVICE = named("h200")
pytestmark = pytest.mark.slow
TILE = Tile(64, 64, 64, 2, 2, 4)


@lru_cache
def data(name):
    """(problem, inputs, weights, expected) of a case, drawn and computed once."""
    problem = PROBLEMS[name]
    inputs, weights = random_data(problem)
    return problem, inputs, weights, reference(problem, inputs, weights)


def run(name, tactic, **options):
    """(output with padding, records of the launches) of a tactic in the emulator, after comparing with the reference."""
    problem, inputs, weights, expected = data(name)
    gpu = Emulated(DEVICE, **options)
    got = execute(gpu, problem, tactic, inputs, weights)
    assert_right(problem, tactic, got, expected)
    return got, gpu.stats


def variants(problem):
    """One tactic of each kernel x linear or vector input x output, layouts drawn by the problem's own seed; convolutions
    with one tile, so that many problems share a binary, and with every activation on one side only."""
    found = {}
    tactics = sorted(candidates(problem, DEVICE))
    for t in random.Random(str(problem)).sample(tactics, len(tactics)):
        if t.tile in (None, TILE):
            found.setdefault((t.kernel, linear(t.ins[0]), linear(t.out)), t)
    one_side = isinstance(problem, ConvProblem) and problem.epilogue.act.name not in ("none", "relu")
    return [t for (_, x, y), t in sorted(found.items()) if not one_side or (x, y) == (False, False)]


def by_tile(problem):
    """Per tile all combinations of linear and vector sides, the layouts drawn."""
    found = {}
    tactics = sorted(candidates(problem, DEVICE))
    for t in random.Random(str(problem)).sample(tactics, len(tactics)):
        found.setdefault((t.kernel, t.tile, linear(t.ins[0]), linear(t.out)), t)
    return [found[k] for k in sorted(found)]


SIDES = {True: "linear", False: "vector"}
TILES = {
    (t.kernel, t.tile, f"{SIDES[linear(t.ins[0])]}_{SIDES[linear(t.out)]}"): t for t in by_tile(EVERY_TACTIC["conv_residual"])
}


@pytest.mark.sample(len({tile for _, tile, _ in TILES}))
@pytest.mark.parametrize("kernel, tile, sides", TILES, ids=str)
def test_every_tile_and_side(kernel, tile, sides):
    tactic = TILES[kernel, tile, sides]
    _, stats = run("conv_residual", tactic)
    check_counters(data("conv_residual")[0], tactic, stats[-1])


@pytest.mark.sample(10)
@pytest.mark.parametrize("name", [*CONVS, "conv"])
def test_convolution(name):
    for tactic in variants(PROBLEMS[name]):
        _, stats = run(name, tactic)
        check_counters(PROBLEMS[name], tactic, stats[-1])


def check_counters(problem: ConvProblem, tactic, stats):
    t = tactic.tile
    first = launches(problem, tactic)[0]
    steps = dict(first.values).get("K_STEPS", t.k // 16)  # of a stage's 16 channels each, the others are zeros
    multiplied = padded_k(merged(problem).one) * steps * 16 // t.k
    mmas = np.prod(first.grid) * multiplied * t.m * t.n // (16 * 8 * (32 if tactic.sparse else 16))
    assert (stats.mma_sp, stats.mma) == ((mmas, 0) if tactic.sparse else (0, mmas))
    assert stats.excess_wavefronts == 0, f"bank conflicts: {stats.excess}"
    if problem.c % 16 == 0 and problem.k % 16 == 0 and not linear(tactic.ins[0]) and not linear(tactic.out):
        assert stats.sectors == stats.ideal_sectors


@pytest.mark.sample(68)
@pytest.mark.parametrize("name", [*OTHERS, *CHAINED])
def test_other_kernels(name):
    for tactic in variants(PROBLEMS[name]):
        _, stats = run(name, tactic)
        assert not any(s.excess_wavefronts for s in stats), f"bank conflicts: {stats[-1].excess}"


@pytest.mark.parametrize("name", [n for n, p in POINTWISE.items() if set(p.tensors) == {"nchw"} and not p.constants])
def test_chains_over_whole_tensors_move_whole_sectors(name):
    """In vectors of 8, linear tensors too where their elements can be counted in eights."""
    p = PROBLEMS[name]
    for layout in ("hwc8", "chw"):
        fmt = Format("fp16", layout)
        (tactic,) = [t for t in candidates(p, DEVICE) if {*t.ins, t.out} == {fmt}]
        (stats,) = run(name, tactic)[1]
        assert stats.sectors == stats.ideal_sectors
        read = [*(num_bytes(fmt, s) for s in p.in_shapes), *section_bytes(p, tactic).values()]
        assert stats.launch_unique_load_bytes == sum(-(-size // 32) * 32 for size in read)
        assert dict(launches(p, tactic)[0].values)["VEC"] == (1 if layout == "chw" and np.prod(p.out_shape) % 8 else 8)


MODES = [{"async_mode": "late"}, {"seed": 1}, {"seed": 2, "async_mode": "late"}, {"seed": 3, "threads": 1}]


@pytest.mark.sample(8)
@pytest.mark.parametrize("options", MODES, ids=str)
@pytest.mark.parametrize("name", ["conv_residual_prelu", "conv_asymmetric", "conv_stem", "pool_global_avg"])
def test_modes_and_orders_agree_bit_for_bit(name, options):
    for tactic in variants(PROBLEMS[name]):
        assert np.array_equal(run(name, tactic)[0], run(name, tactic, **options)[0], equal_nan=True)


@pytest.mark.parametrize(
    "name",
    [
        "conv_residual",
        "conv_one_output",
        "pool_max",
        "concat_odd",
        "move_d2s_crd",
        "softmax",
        "softmax_w",
        "instance_norm",
        "group_norm",
        "reduce_sum",
        "reduce_mean",
        "pointwise_chain",
        "pointwise_outer",
    ],
)
def test_each_output_byte_is_written_once(name):
    problem, inputs, weights, _ = data(name)
    for tactic in variants(problem):
        assert_written_once(problem, tactic, DEVICE, inputs, weights)


@pytest.mark.long
@pytest.mark.parametrize("name", EVERY_TACTIC)
def test_every_tactic_of_every_format_pair(name):
    for tactic in candidates(PROBLEMS[name], DEVICE):
        run(name, tactic)


@pytest.mark.long
@pytest.mark.parametrize("name", CONVS)
def test_every_tile_on_every_problem(name):
    for tactic in by_tile(PROBLEMS[name]):
        run(name, tactic)


SPLIT_PROBLEM = conv_case(1, 144, 7, 7, 72, 3, 3, pad=(1, 1, 1, 1), bias=True, residual=True, act=RELU, sparse24=True)


def same_bits(problem, tactics):
    """Partial sums are added in ascending K by whoever arrives last: no order of blocks or warps may change a bit."""
    inputs, weights = random_data(problem)
    expected = reference(problem, inputs, weights)
    for tactic in tactics:
        outputs = []
        for options in ({}, {"seed": 1}, {"seed": 2, "async_mode": "late"}, {"seed": 3, "threads": 1}):
            gpu = Emulated(DEVICE, **options)
            outputs.append(execute(gpu, problem, tactic, inputs, weights))
            assert_right(problem, tactic, outputs[-1], expected)
            assert gpu.stats[-1].excess_wavefronts == 0
        assert all(np.array_equal(outputs[0], o) for o in outputs[1:])


@pytest.mark.parametrize("kernel", ["conv_dense", "conv_sparse24"])
def test_split_k_gives_the_same_bits_in_every_order(kernel):
    tactics = [t for t in candidates(SPLIT_PROBLEM, DEVICE) if t.kernel == kernel and t.ins[0].layout == t.out.layout == "hwc8"]
    tactics = [t for t in tactics if t.tile.split > 1 and replace(t.tile, split=1) == TILE]
    assert len(tactics) == 3
    same_bits(SPLIT_PROBLEM, tactics)


@pytest.mark.parametrize("kernel", ["conv_dense", "conv_sparse24"])
def test_stream_k_gives_the_same_bits_in_every_order(kernel):
    """4 tiles of 21 stages each: fewer blocks than tiles, a tile in many blocks, cuts in whole tiles, uneven cuts."""
    problem = replace(SPLIT_PROBLEM, n=2, h=8, w=8)
    hwc8 = Format("fp16", "hwc8")
    whole = Tactic(kernel, TILE, (hwc8, hwc8), hwc8)
    assert num_tiles(problem, whole) == 4 and padded_k(problem) // TILE.k == 21
    tactics = [replace(whole, tile=replace(TILE, stream=blocks)) for blocks in (2, 3, 11, 42)]
    assert [Tactic.parse(t.name) for t in tactics] == tactics
    same_bits(problem, tactics)


@pytest.mark.parametrize("kernel", ["conv_dense", "conv_sparse24"])
@pytest.mark.parametrize("more", [{"residual": True}, {"d2s": 2}], ids=["residual", "depth to space"])
def test_shared_tiles_write_linear_memory(kernel, more):
    """Planes, FP16 and FP32, and channels of a pixel: split-K, and stream-K, whose blocks go on to another tile."""
    problem = conv_case(2, 144, 8, 7, 72, 3, 3, pad=(1, 1, 1, 1), bias=True, act=RELU, sparse24=True, **more)
    tactics = [t for t in candidates(problem, DEVICE) if (t.kernel, t.ins[0].layout, t.out.layout) == (kernel, "hwc8", "chw")]
    split = next(t for t in tactics if t.tile.split > 1 and replace(t.tile, split=1) == TILE)
    streams = [replace(split, tile=replace(TILE, stream=blocks)) for blocks in (3, 11)]
    single = [replace(t, out=Format("fp32", "chw")) for t in (split, streams[1])]
    pixels = Format("fp16", "hwc")
    same_bits(problem, [split, replace(split, ins=(split.ins[0], pixels)[: len(split.ins)], out=pixels), *streams, *single])


@pytest.mark.parametrize("kernel", ["conv_dense", "conv_sparse24"])
def test_a_classifier_splits_k_and_writes_linear_memory(kernel):
    """FP16 and, as at the network's edge, FP32."""
    problem = conv_case(3, 1000, 1, 1, 90, 1, 1, bias=True, sparse24=True)
    tactics = [t for t in candidates(problem, DEVICE) if t.kernel == kernel and linear(t.out) and t.ins[0].layout == "hwc8"]
    tactics = [t for t in tactics if t.tile.split > 1 and replace(t.tile, split=1) == TILE]
    assert {t.out.layout for t in tactics} == {"chw"}
    same_bits(problem, [tactics[0], replace(tactics[-1], out=Format("fp32", "chw"))])


EARLY = [
    ("conv_dense", TILE),
    ("conv_sparse24", TILE),
    ("conv_dense", Tile(128, 256, 32, 2, 4, 3)),
    ("conv_sparse24", Tile(128, 128, 64, 2, 4, 3)),
    ("conv_dense", Tile(16, 128, 64, 1, 4, 4)),
]


@pytest.mark.parametrize("kernel, tile", EARLY, ids=str)
def test_a_residual_comes_early_whatever_the_number_of_stages(kernel, tile):
    """Fewer stages than the pipeline holds, as many, and more: the last one's memory is never the residual's. Of 256 pixels 192
    fit below it, the others come behind it."""
    hwc8 = Format("fp16", "hwc8")
    tactic = Tactic(kernel, tile, (hwc8, hwc8), hwc8)
    assert early_residual(tactic)
    for stages in range(1, tile.stages + 3):
        same_bits(conv_case(1, 64 * stages, 9, 15, 72, 1, 1, bias=True, act=RELU, residual=True, sparse24=True), [tactic])


def test_split_k_is_offered_where_tiles_leave_the_gpu_idle():
    assert any(t.tile.split > 1 for t in candidates(SPLIT_PROBLEM, DEVICE) if t.tile)
    wide = replace(SPLIT_PROBLEM, n=64, h=56, w=56)
    assert not any(t.tile.split > 1 for t in candidates(wide, DEVICE))


def test_stream_k_is_offered_where_the_last_round_leaves_the_gpu_idle():
    def streams(n, *layouts):
        problem = ConvProblem(n, 256, 14, 14, 256, 3, 3, pad=(1, 1, 1, 1), sparse24=True)
        tactics = [t for t in candidates(problem, named("h200")) if t.kernel in ("conv_dense", "conv_sparse24")]
        return {t.tile.stream for t in tactics if t.out.layout in layouts}

    for layout in ("hwc8", "chw"):
        assert any(blocks % 132 == 0 for blocks in streams(32, layout) - {0}) and streams(4096, layout) == {0}


def test_a_linear_output_is_no_reason_against_splitting_k():
    """7 x 7 pixels: 9 of 10 SMs would wait, and a linear output costs a split nothing that it does not cost the whole."""
    problem, device = ConvProblem(1, 512, 7, 7, 512, 3, 3, pad=(1, 1, 1, 1)), named("h200")
    tactics = [t for t in candidates(problem, device) if t.kernel == "conv_dense" and not t.tile.stream]
    tactics = [t for t in tactics if (t.ins[0].layout, t.out.layout) == ("hwc8", "chw")]
    whole, split = (min(predict_us(problem, t, device) for t in tactics if (t.tile.split > 1) == way) for way in (False, True))
    assert split < 0.6 * whole


# ---- scale, shift and ReLU, or a gate and an activation, in front of a 1x1 convolution

PRE = {
    "plain": conv_case(2, 72, 7, 9, 40, 1, 1, bias=True, act=RELU, sparse24=True, scaled=True),
    "odd": conv_case(1, 44, 5, 5, 24, 1, 1, (2, 2), residual=True, sparse24=True, scaled=True),
    "gate": conv_case(3, 72, 7, 9, 40, 1, 1, bias=True, act=RELU, sparse24=True, gated=NONE),
    "gate and ReLU": conv_case(2, 200, 6, 6, 24, 1, 1, residual=True, sparse24=True, gated=RELU),
    "gate and groups": conv_case(2, 48, 7, 5, 40, 1, 1, bias=True, residual=True, sparse24=True, groups=2, gated=NONE),
    "gate and clip": conv_case(
        1,
        44,
        5,
        5,
        28,
        1,
        1,
        (2, 2),
        residual=True,
        sparse24=True,
        gated=Activation("clip", (-0.2, 1.5)),
    ),
    "border": conv_case(2, 72, 7, 9, 40, 3, 3, (2, 1), (1, 2, 0, 1), bias=True, act=RELU, sparse24=True, border=-1.5),
    "norm": PROBLEMS["norm_in_front"],
    "norm and residual": conv_case(1, 44, 5, 5, 28, 1, 1, (2, 2), residual=True, act=RELU, sparse24=True, norm=1e-5),
}


EVERYWHERE = [(name, sm) for name in ("border", "gate and clip", "norm") for sm in ARCHITECTURES]


@pytest.mark.parametrize("name, sm", [*((name, DEVICE.sm) for name in PRE), *EVERYWHERE])
def test_prologues_compile_without_spills(name, sm):
    device = replace(DEVICE, sm=sm, smem_per_block=SMEM_PER_BLOCK[int(sm[3:].rstrip("a"))])
    by_tile = {(t.kernel, t.tile): t for t in candidates(PRE[name], device) if not linear(t.ins[0])}
    for tactic in by_tile.values():
        (launch,) = launches(PRE[name], tactic)
        takes(launch.kernel, launch.values, sm)


PROLOGUES = {(name, t.kernel, t.tile): t for name, problem in PRE.items() for t in candidates(problem, DEVICE)}


def test_every_tile_can_have_a_prologue_and_nothing_else_can():
    tiles = {("conv_dense", t) for t in DENSE_TILES} | {("conv_sparse24", t) for t in SPARSE_TILES}
    most = [name for name, problem in PRE.items() if problem.prologue.normalized or problem.prologue.border]
    few = {(name, *tile) for name in most for tile in tiles} - set(PROLOGUES)
    assert {(name, *tile) for name in PRE for tile in tiles} - few <= set(PROLOGUES)
    assert {tile.m * tile.n // tile.threads for *_, tile in few} == {128} and len(few) < len(tiles)  # out of registers
    assert all(t.ins[-1] == t.ins[0] for (name, *_), t in PROLOGUES.items() if PRE[name].prologue.gated)
    every = [t for problem in PRE.values() for t in candidates(problem, DEVICE)]
    assert all(t.kernel in ("conv_dense", "conv_sparse24") and not linear(t.ins[0]) for t in every)


@pytest.mark.sample(8)
@pytest.mark.parametrize("name, tactic", [(name, t) for (name, *_), t in PROLOGUES.items()], ids=str)
def test_a_prologue_scales_what_the_tensor_cores_read(name, tactic):
    inputs, weights = random_data(PRE[name])
    gpu = Emulated(DEVICE)
    got = execute(gpu, PRE[name], tactic, inputs, weights)
    assert_right(PRE[name], tactic, got, reference(PRE[name], inputs, weights))
    assert gpu.stats[-1].excess_wavefronts == 0
