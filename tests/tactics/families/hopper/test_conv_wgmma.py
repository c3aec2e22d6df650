"""conv_dense_sm90 and conv_sparse24_sm90, convolutions on Hopper's asynchronous tensor cores whose operands come by TMA, in the
emulator: beside the reference, beside each other, in every order and mode."""

import math
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cuda_kernels.launch import Emulated
from cuda_kernels.sparse24 import prune
from tactics.candidates import accepts, candidates
from tactics.families.hopper.conv_wgmma import TILES, counts, k_stages
from tactics.families.hopper.ends import room
from tactics.families.hopper.maps import pixels_in_order
from tactics.families.merged import merged
from tactics.format import strides
from tactics.launches import launches
from tactics.predict import predict_us
from tactics.sampling.data import random_data, reference
from tactics.sampling.trial import relative_error
from tactics.step import linear
from tactics.tactic import Tile
from tests.problems import RELU, assert_right, assert_written_once, conv_case, execute
from tests.tactics.families.hopper.cases import (
    BOX,
    BOXES,
    CASES,
    CHW,
    CHW32,
    DEEP,
    DEEPER,
    DEVICE,
    HWC8,
    MOST_BLOCKS,
    NAMES,
    ORDERS,
    SINGLE,
    SMALL,
    SPARSE,
    STAY,
    STRIPPED,
    TURNS,
    TWO,
    WAYS,
    alone,
    crafted,
    data,
    fitting,
    held,
    named_tiles,
    run,
    shared,
    strips,
    tactics,
)

slow = pytest.mark.slow


# ---- quick: one tile each


@pytest.mark.parametrize("kernel", NAMES)
@pytest.mark.parametrize(
    "name, tile", [("parts_of_a_stage", TURNS), ("residual", SMALL), ("residual", TURNS), ("tail", BOXES)], ids=str
)
def test_it_is_right_in_every_order(name, tile, kernel):
    held(CASES[name], crafted(kernel, replace(tile, persist=2), CASES[name]))


@pytest.mark.parametrize("kernel", NAMES)
def test_copies_and_stores_move_whole_sectors(kernel):
    """Of pixels that are whole sectors: four for each 64 channels, in both directions."""
    problem = conv_case(2, 64, 8, 8, 128, 1, 1, residual=True, bias=True, sparse24=True)
    _, stats = run(problem, crafted(kernel, replace(TURNS, persist=1), problem))
    assert stats.sectors == stats.ideal_sectors


@pytest.mark.skipif(MOST_BLOCKS < 2, reason="the emulator starts no clusters")
@pytest.mark.parametrize(
    "kernel, cluster", [(NAMES[0], (2, 1, 1)), (NAMES[0], (1, 2, 1)), (SPARSE, (2, 1, 1)), (SPARSE, (1, 1, 2))], ids=str
)
def test_a_cluster_is_right_in_every_order(cluster, kernel):
    held(CASES["parts_of_a_stage"], crafted(kernel, replace(DEEPER, cluster=cluster), CASES["parts_of_a_stage"]))


@pytest.mark.parametrize("kernel", NAMES)
@pytest.mark.parametrize("way", WAYS[2:7:2], ids=str)
def test_tiles_are_shared_by_blocks(way, kernel):
    held(CASES["parts_of_a_stage"], crafted(kernel, replace(SMALL, **way), CASES["parts_of_a_stage"]))


@pytest.mark.parametrize("name", STAY)
def test_weights_stay_in_registers(name):
    """Loaded once, where all tiles of a block have the same rows."""
    problem, tile = STAY[name]
    if math.prod(tile.cluster) > MOST_BLOCKS:
        pytest.skip("the emulator starts no clusters")
    tactic = crafted(SPARSE, tile, problem)
    values = dict(launches(problem, tactic)[0].values)
    assert (values["WEIGHTS_STAY"], values["BATCH"]) == (1, k_stages(problem))
    held(problem, tactic)


def test_weights_stay_only_where_rows_and_registers_allow_it():
    """Two columns of rows by an odd number of blocks, blocks of one tile, shares of K, narrow tiles, planes, which
    threads store, and K that is too long."""
    problem, tile = STAY["two columns of rows"]
    longest = replace(problem, c=(232 - 30 - 64) // 10 * 64)
    narrow, wrong = (
        replace(tile, n=64),
        ({"persist": 3}, {"persist": 0}, {"persist": 0, "split": 2}, {"persist": 0, "stream": 4}),
    )
    others = ((problem, replace(tile, **other), HWC8) for other in wrong)
    more = ((problem, narrow, HWC8), (problem, tile, CHW32), (replace(longest, c=longest.c + 1), tile, HWC8))
    for p, t, out in (*others, *more):
        assert "WEIGHTS_STAY" not in dict(launches(p, crafted(SPARSE, t, p, out))[0].values)
    assert "WEIGHTS_STAY" in dict(launches(longest, crafted(SPARSE, tile, longest))[0].values)


def test_plans_hold_every_tile():
    """Alone, persistent, split and stream-K, and every one parses back."""
    wide, long = conv_case(16, 64, 56, 56, 512, 3, 3, pad=(1, 1, 1, 1)), conv_case(1, 512, 7, 7, 512, 3, 3, pad=(1, 1, 1, 1))
    found = {t for p in (wide, long) for t in tactics(p, NAMES[0])}
    assert {alone(t) for t in found if not t.gemm.box} == {t for t in TILES[NAMES[0]] if math.prod(t.cluster) <= MOST_BLOCKS}
    assert any(t.gemm.box for t in found) and (MOST_BLOCKS < 2 or any(t.gemm.cluster[2] > 1 for t in found))
    assert any(t.gemm.persist for t in found) and any(t.gemm.split > 1 for t in found) and any(t.gemm.stream for t in found)
    assert all(type(t).parse(t.name) == t for t in found)
    for name in ("residual", "parts_of_a_stage"):
        small = tactics(CASES[name], SPARSE)
        assert {alone(t) for t in small} >= {t for t in TILES[SPARSE] if math.prod(t.cluster) == 1}
        assert all(accepts(CASES[name], t, DEVICE) for t in small)


@pytest.mark.parametrize("n", [1, 32])
@pytest.mark.parametrize("c, size", [(64, 56), (128, 28), (256, 14), (512, 7)])
def test_a_residual_is_copied_ahead(c, size, n):
    """In every tactic of ResNet-50's layers that stores vectors and whole tiles, with three stages at least: by TMA, where all
    channels of a pixel lie together, else by threads."""
    problem = conv_case(n, c, size, size, 4 * c, 1, 1, act=RELU, bias=True, residual=True, sparse24=True)
    kinds = set()
    for tactic in (t for kernel in NAMES for t in tactics(problem, kernel)):
        t, (launch,) = tactic.gemm, launches(problem, tactic)
        values = dict(launch.values)
        whole = not linear(tactic.out) and t.split == 1 and not t.stream
        by_tma = whole and tactic.out.layout.startswith("hwc")
        assert (values["OUT_TMA"], values["RES_AHEAD"]) == (by_tma, whole and not by_tma)
        assert values["STAGES"] == t.stages or (whole and 3 <= values["STAGES"] < t.stages)
        assert values["SLOTS"] >= 2 if by_tma else values["SLOTS"] == 1 or whole
        assert launch.smem <= DEVICE.smem_per_block
        kinds.add((values["OUT_TMA"], values["RES_AHEAD"]))
    assert kinds == {(1, 0), (0, 1), (0, 0)}


def test_a_residual_waits_where_too_few_stages_are_left():
    """Strips of 128 x 256 have two stages, beside which all of a residual does not fit, but two parts of it do."""
    problem = conv_case(1, 64, 56, 56, 128, 3, 3, pad=(1, 1, 1, 1), residual=True)
    wide = crafted(NAMES[0], Tile(128, 256, 64, 8, 1, 2, box=(1, 4, 64)), problem)
    assert room(problem, wide, False)[0] == {"SLOTS": 1, "STAGES": 2, "RES_AHEAD": 0}
    assert room(problem, wide, True)[0] == {"SLOTS": 2, "STAGES": 2, "RES_AHEAD": 0}
    narrow = crafted(NAMES[0], Tile(128, 192, 64, 8, 1, 2, box=(1, 6, 32)), problem)
    assert room(problem, narrow, False)[0] == {"SLOTS": 3, "STAGES": 2, "RES_AHEAD": 1}


# The most that the model of tiles (tactics/families/hopper/tiles.py) lets 2:4 gain over dense loops within the power limit.
CEILING = 1.84


@pytest.mark.parametrize("n", [1, 8, 32, 128])
@pytest.mark.parametrize(
    "c, k, size, r", [(64, 64, 56, 3), (128, 128, 28, 3), (256, 256, 14, 3), (512, 512, 7, 3), (256, 1024, 14, 1)]
)
def test_no_2_4_gain_above_the_ceiling_is_promised(c, k, size, r, n):
    problem = conv_case(n, c, size, size, k, r, r, pad=(r // 2,) * 4, act=RELU, bias=True, sparse24=True)
    best = {s: min(predict_us(problem, t, DEVICE) for t in candidates(problem, DEVICE) if t.sparse == s) for s in (False, True)}
    assert best[False] / best[True] < CEILING


def test_two_warpgroups_hide_the_end_of_a_tile_only_where_a_block_goes_on():
    """Blocks that share K have a part each: a second round of them takes as long as the first."""
    tile = next(t for t in TILES[NAMES[0]] if (t.m, t.n, t.pingpong, max(t.cluster)) == (128, 128, True, 1))
    rounds = []
    for n in (33, 66):  # 132 and 264 blocks
        problem = conv_case(n, 512, 16, 16, 128, 3, 3, pad=(1, 1, 1, 1), bias=True)
        (us,) = counts(problem, crafted(NAMES[0], replace(tile, split=2), problem), DEVICE).limits.values()
        rounds.append(us)
    assert rounds[1] == pytest.approx(2 * rounds[0])


# ---- the grid


@slow
@pytest.mark.sample(8)
@pytest.mark.parametrize("kernel", NAMES)
@pytest.mark.parametrize("name", CASES)
def test_every_case(name, kernel):
    """With a small tile, which ends within images most often, with one that two warpgroups share or take turns with, and with
    one that plans hold, in formats of its own."""
    problem = CASES[name]
    for tile in (SMALL, replace(random.Random(name + kernel).choice((TWO, TURNS)), persist=1)):
        held(problem, crafted(kernel, tile, problem))
    found = tactics(problem, kernel)
    assert found
    held(problem, random.Random(name + kernel).choice(found))


@slow
@pytest.mark.sample(10)
@pytest.mark.parametrize("out", [HWC8, CHW], ids=str)
@pytest.mark.parametrize("kernel, tile", named_tiles())
def test_every_tile_and_side(kernel, tile, out):
    """As it is, with a residual; and with a way to share its work, that goes round."""
    if linear(out) and tile.n < 32:
        pytest.skip("a warpgroup stores rows of 32 pixels")
    ways = random.Random(f"{kernel}{tile}{out}").sample(WAYS[1:], 2)
    deep = DEEP[:1] if max(tile.cluster) == 1 and not tile.pingpong and out == HWC8 else ()
    for way in ({}, *ways, *deep):
        problem = fitting(tile, way)
        held(problem, crafted(kernel, shared(tile, way), problem, out))


@slow
@pytest.mark.sample(8)
@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("tile", [SMALL, TWO, TURNS, BOX], ids=str)
@pytest.mark.parametrize("kernel", NAMES)
def test_every_way_of_sharing(kernel, tile, way):
    """Shares shorter than the pipeline, and longer; persistent blocks with one tile, with some and with all of them."""
    for name in ("parts_of_a_stage", "images_in_a_tile", "d2s_residual"):
        for out in (HWC8, CHW):
            held(CASES[name], crafted(kernel, replace(tile, **way), CASES[name], out))


@slow
@pytest.mark.skipif(MOST_BLOCKS < 8, reason="the emulator starts no clusters of 8")
@pytest.mark.parametrize("deep", [2, 3, 4, 8])
@pytest.mark.parametrize("kernel", NAMES)
def test_clusters_share_k(kernel, deep):
    """Of one warpgroup, of two, and of strips; a block's part of the tile may be nothing."""
    for name, tile in (
        ("parts_of_a_stage", DEEPER),
        ("long_k", SMALL),
        ("residual", replace(SMALL, n=16)),
        ("d2s_residual", replace(DEEPER, n=128)),
        ("tail", BOXES),
    ):
        if deep <= k_stages(CASES[name]) // (3 if tile.box else 1):
            held(CASES[name], crafted(kernel, replace(tile, cluster=(1, 1, deep)), CASES[name]))


@pytest.mark.skipif(MOST_BLOCKS < 4, reason="the emulator starts no clusters of 4")
@pytest.mark.parametrize("kernel", NAMES)
@pytest.mark.parametrize("out", [HWC8, CHW32], ids=str)
def test_sums_of_a_cluster_are_those_of_memory(out, kernel):
    """Both add in ascending K: the same bits. Of 16 pixels two blocks store eight each, and two none."""
    problem = CASES["long_k"]
    for tile in (SMALL, replace(SMALL, n=16)):
        found = [run(problem, crafted(kernel, replace(tile, **way), problem, out))[0] for way in (DEEP[1], {"split": 4})]
        assert np.array_equal(*found)


@slow
@pytest.mark.sample(4)
@pytest.mark.parametrize("cluster", [c for c in ((1, 1, 1), (2, 1, 1), (1, 2, 1)) if math.prod(c) <= MOST_BLOCKS], ids=str)
@pytest.mark.parametrize("problem", STRIPPED, ids=str)
@pytest.mark.parametrize("kernel", NAMES)
def test_every_strip(kernel, problem, cluster):
    """Boxes of every size, that end within images; a cluster's blocks copy half of a box's rows each."""
    if kernel == SPARSE and cluster[1] > 1:
        pytest.skip("2:4 weights are in registers")
    of_problem = strips(problem, kernel)
    assert len({t.box for t in of_problem}) > 1
    for tile in of_problem:
        halves = cluster[0] == 1 or (tile.box[0] == 1 and tile.box[1] % 2 == 0)
        for out in (HWC8, CHW)[: 2 if tile.n % 32 == 0 else 1]:
            if halves:
                pick = random.Random(f"{tile}{out}").choice(({}, {"persist": 1}, {"split": 2}, {"stream": 2}))
                held(problem, crafted(kernel, shared(replace(tile, cluster=cluster), pick), problem, out), ORDERS[1:3])


@slow
@pytest.mark.sample(6)
@pytest.mark.parametrize(
    "tile", [SMALL, TWO, replace(TURNS, persist=1), replace(SMALL, split=2), replace(TURNS, stream=2)], ids=str
)
@pytest.mark.parametrize("name", ["parts_of_a_stage", "residual", "d2s", "groups"])
def test_fp32_outputs(name, tile):
    """Sums as they are: closer to the reference than FP16 could be."""
    problem = CASES[name]
    if (tile.split > 1 and merged(problem).count > 1) or (tile.box and name in ("residual", "groups")):
        pytest.skip("not offered")
    _, _, expected = data(problem)
    for kernel in NAMES:
        for out in SINGLE[: 1 if problem.epilogue.residual else 2]:
            got = held(problem, crafted(kernel, tile, problem, out), ORDERS[2:])
            assert relative_error(got, expected) < 1e-5


@slow
def test_plans_hold_fp32_outputs():
    for name in ("parts_of_a_stage", "residual", "d2s"):
        found = [t for t in tactics(CASES[name], SPARSE) if t.out == CHW]
        assert found and all(accepts(CASES[name], replace(t, out=SINGLE[0]), DEVICE) for t in found)


@slow
@pytest.mark.parametrize("kernel", NAMES)
@pytest.mark.parametrize("name", ["residual", "d2s", "groups", "images_in_a_tile"])
def test_each_output_byte_is_written_once(name, kernel):
    inputs, weights, _ = data(CASES[name])
    whole = merged(CASES[name]).count > 1
    for tile in (
        SMALL,
        TWO,
        replace(TURNS, persist=1),
        *(() if whole else (replace(SMALL, split=2), replace(TURNS, stream=3))),
    ):
        for y in (HWC8, CHW, SINGLE[0]):
            assert_written_once(CASES[name], crafted(kernel, tile, CASES[name], y), DEVICE, inputs, weights)


EXACT = [n for n, p in CASES.items() if not p.epilogue.residual and p.epilogue.act.name in ("none", "relu")]


@slow
@pytest.mark.parametrize("name", EXACT)
def test_dense_sparse_and_reference_are_equal_on_integers(name):
    """Sums below 2,048 are exact in FP16, in whatever order they are added."""
    problem, rng = CASES[name], np.random.default_rng(7)
    inputs = [rng.integers(-3, 4, s).astype(np.float16) for s in problem.in_shapes]
    w = prune(rng.integers(-3, 4, (problem.k, problem.c // problem.groups, problem.r, problem.s)).astype(np.float32))
    weights = {"w": w} | ({"b": rng.integers(-9, 10, problem.k).astype(np.float32)} if problem.epilogue.bias else {})
    expected = reference(problem, inputs, weights)
    assert 20 < np.abs(expected).max() < 2048
    for kernel in NAMES:
        for tile, options in ((SMALL, {}), (TWO, ORDERS[2]), (replace(TURNS, persist=1), ORDERS[0])):
            got = execute(Emulated(DEVICE, **options), problem, crafted(kernel, tile, problem), inputs, weights)
            np.testing.assert_array_equal(got[:, : problem.out_shape[1]], expected)


@slow
@pytest.mark.parametrize("kernel", NAMES)
@pytest.mark.parametrize("n, x", [(1, CHW32), (5, CHW32), (5, HWC8)], ids=str)
def test_images_apart_go_by_im2col(n, x, kernel):
    """In planes of 32 channels an image of one pixel has them all together, but the next image lies further than a pixel."""
    problem = conv_case(n, 200, 1, 1, 72, 1, 1, bias=True, sparse24=True)
    apart = not pixels_in_order(problem, strides(x, problem.in_shapes[0]))
    assert apart == (n > 1 and x == CHW32)
    found = [t for t in tactics(problem, kernel) if t.ins == (x,) and t.out == HWC8]
    assert found
    for tactic in random.Random(f"{n}{kernel}").sample(found, 4):
        assert ("i32", int(apart)) in launches(problem, tactic)[0].args
        held(problem, tactic, ORDERS[2:3])


# ---- random ones


@st.composite
def convolutions(draw):
    """Windows of 1 to 5, strides and dilations to 3, padding below the window's reach, 4 to 200 channels, or groups of 64."""
    window, stride, dilation = (draw(st.tuples(*2 * (st.integers(1, most),))) for most in (5, 3, 3))
    n, h, w = draw(st.tuples(*(st.integers(1, most) for most in (4, 12, 15))))
    reach = [(e - 1) * d + 1 for e, d in zip(window, dilation, strict=True)]
    pad = draw(st.tuples(*(st.integers(0, e - 1) for e in 2 * reach)))
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    b = draw(st.sampled_from([1, 1, 2])) if groups == 1 else 1
    channels = 4 * draw(st.integers(1, 50)) if groups == 1 else 64 * groups * draw(st.integers(1, 2))
    kinds = ({}, {"residual": True}, {"residual": True, "act_first": True}, {"residual": True, "affine": True})
    added = draw(st.sampled_from(kinds))
    mode = draw(st.sampled_from(["dcr", "crd"]))
    k = draw(st.integers(1, 20)) * 4 * (2 * groups if groups > 1 else b**2)
    return conv_case(
        n, channels, max(h, reach[0]), max(w, reach[1]), k, *window, stride, pad, dilation, groups,
        bias=draw(st.booleans()), act=RELU, d2s=b, d2s_mode=mode, sparse24=True, **added,
    )  # fmt: skip


@slow
@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.data())
def test_random_convolutions(data):
    problem, kernel = data.draw(convolutions()), data.draw(st.sampled_from(NAMES))
    found = tactics(problem, kernel)
    if not found:
        return
    tile = data.draw(st.sampled_from(sorted({alone(t) for t in found})))
    of_tile = [t for t in found if alone(t) == tile]
    inputs, weights = random_data(problem)
    expected = reference(problem, inputs, weights)
    for tactic in (
        data.draw(st.sampled_from(of_tile)),
        replace(of_tile[0], tile=replace(shared(tile, {"persist": 1}), stages=min(tile.stages, 3))),
    ):
        gpu = Emulated(DEVICE, async_mode=data.draw(st.sampled_from(["eager", "late"])), seed=data.draw(st.integers(1, 9)))
        assert_right(problem, tactic, execute(gpu, problem, tactic, inputs, weights), expected)
        assert gpu.stats[-1].excess_wavefronts == 0


def test_a_wrong_result_is_noticed():
    """`run` is what the grid calls: it notices a wrong result."""
    problem = CASES["one_stage"]
    tactic = crafted(SPARSE, SMALL, problem)
    run(problem, tactic)
    inputs, weights, expected = data(problem)
    got = execute(Emulated(DEVICE), problem, tactic, inputs, weights)
    with pytest.raises(AssertionError, match="relative error"):
        assert_right(problem, tactic, got, expected[:, :, ::-1])
