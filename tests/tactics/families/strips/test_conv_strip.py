"""Strips (conv_strip, conv_strip_sparse24) in the emulator against the reference: images whose rows and ends lie anywhere in a
tile, more and fewer channels than a strip has, and what a strip is for, its bytes."""

import random
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cuda_kernels.device import named
from cuda_kernels.launch import Emulated
from tactics.candidates import candidates, rejected
from tactics.families import conv_gemm
from tactics.families.strips import conv_strip, geometry
from tactics.format import Format
from tactics.launches import pack_weights, packing_key, section_bytes
from tactics.predict import predict_us
from tactics.problems.pointwise_ops import Activation
from tactics.problems.problem import ConvProblem
from tactics.sampling.data import random_data, reference
from tactics.step import linear
from tactics.tactic import Tactic
from tactics.tiles import STRIP_DENSE_TILES, STRIP_SPARSE_TILES
from tests.problems import RELU, assert_right, assert_written_once, conv_case, execute

pytestmark = pytest.mark.slow
DEVICE = named("h200")
ONE, HWC8 = (1, 1, 1, 1), Format("fp16", "hwc8")
KERNELS = ("conv_strip", "conv_strip_sparse24")
TILES = [(k, t) for k, tiles in zip(KERNELS, (STRIP_DENSE_TILES, STRIP_SPARSE_TILES), strict=True) for t in tiles]
SMALL = STRIP_DENSE_TILES[-2]  # 4 pixels of a lane: windows up to 7 x 7

# The purpose of each case: a tile over several images; one block of channels; three, of which the last is partial; images of
# one row, of one column, of one pixel, where nearly every tap is outside; other windows than 3 x 3.
CASES = {
    "images": conv_case(3, 136, 6, 5, 88, 3, 3, pad=ONE, bias=True, residual=True, act=RELU, sparse24=True),
    "one_block": conv_case(2, 40, 9, 7, 72, 3, 3, pad=ONE, bias=True, act=RELU, sparse24=True),
    "wide": conv_case(1, 72, 5, 57, 40, 3, 3, pad=ONE, bias=True, act=Activation("prelu"), sparse24=True),
    "row": conv_case(9, 72, 1, 3, 64, 3, 3, pad=ONE, bias=True, sparse24=True),
    "column": conv_case(2, 80, 40, 1, 24, 3, 3, pad=ONE, residual=True, sparse24=True),
    "pixels": conv_case(70, 72, 1, 1, 64, 3, 3, pad=ONE, bias=True, sparse24=True),
    "5x5": conv_case(1, 72, 12, 11, 64, 5, 5, pad=(2, 2, 2, 2), bias=True, sparse24=True),
    "1x7": conv_case(1, 72, 6, 9, 64, 1, 7, pad=(0, 3, 0, 3), bias=True, sparse24=True),
    "7x1": conv_case(1, 72, 9, 6, 64, 7, 1, pad=(3, 0, 3, 0), bias=True, sparse24=True),
    "tail": conv_case(2, 72, 6, 5, 40, 3, 3, pad=ONE, bias=True, residual=True, act=RELU, affine=True, sparse24=True),
}


@lru_cache
def data(name):
    """(inputs, weights, expected) of a case, drawn and computed once."""
    inputs, weights = random_data(CASES[name])
    return inputs, weights, reference(CASES[name], inputs, weights)


def tactics(problem, kernel, device=DEVICE):
    return [t for t in candidates(problem, device) if t.kernel == kernel]


def run(name, tactic, **options):
    inputs, weights, expected = data(name)
    gpu = Emulated(DEVICE, **options)
    got = execute(gpu, CASES[name], tactic, inputs, weights)
    assert_right(CASES[name], tactic, got, expected)
    return got, gpu.stats[-1]


def held(name, tactic):
    """The products that the tile needs and no others, no bank conflict, and the same bits in every order."""
    got, stats = run(name, tactic)
    t, p = tactic.tile, CASES[name]
    tiles, of_one = geometry.num_tiles(p, tactic), 16 * 8 * (32 if tactic.sparse else 16)
    products = tiles * geometry.turns(p) * t.m * t.n * t.k // of_one
    assert (stats.mma, stats.mma_sp) == ((0, products) if tactic.sparse else (products, 0))
    assert stats.excess_wavefronts == 0, f"bank conflicts: {stats.excess}"
    return got


@pytest.mark.sample(4)
@pytest.mark.parametrize("kernel, tile", TILES, ids=str)
def test_every_tile_and_side(kernel, tile):
    for side in (False, True):
        found = [t for t in tactics(CASES["images"], kernel) if t.tile == tile and linear(t.out) == side]
        held("images", random.Random(str(tile)).choice(found))


@pytest.mark.sample(4)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", CASES)
def test_every_case(name, kernel):
    """With the smallest tile, which ends within images most often; all orders of blocks, warps and copies agree."""
    found = [t for t in tactics(CASES[name], kernel) if t.tile == SMALL]
    assert found
    for tactic in random.Random(name + kernel).sample(found, min(2, len(found))):
        got = held(name, tactic)
        for options in ({"async_mode": "late"}, {"seed": 1}, {"seed": 2, "async_mode": "late"}, {"seed": 3, "threads": 1}):
            assert np.array_equal(got, run(name, tactic, **options)[0], equal_nan=True)


@pytest.mark.parametrize("kernel", KERNELS)
def test_each_output_byte_is_written_once(kernel):
    inputs, weights, _ = data("images")
    for y in ("hwc8", "chw"):
        tactic = next(t for t in tactics(CASES["images"], kernel) if t.tile == SMALL and t.out.layout == y)
        assert_written_once(CASES["images"], tactic, DEVICE, inputs, weights)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(st.data())
def test_random_convolutions(data):
    draw = data.draw
    sizes = draw(st.tuples(*(st.integers(1, most) for most in (4, 150, 9, 19, 70))))
    r, s = draw(st.sampled_from([(3, 3), (3, 1), (1, 3), (5, 3), (5, 5)]))
    problem = conv_case(
        *sizes,
        r,
        s,
        pad=(r // 2, s // 2) * 2,
        bias=draw(st.booleans()),
        residual=draw(st.booleans()),
        act=RELU,
        sparse24=sizes[1] % 4 == 0,
    )
    kernel = draw(st.sampled_from(KERNELS if problem.sparse24 else KERNELS[:1]))
    found = [t for t in tactics(problem, kernel) if t.tile.m * t.tile.n == 64 * 128]
    tactic = draw(st.sampled_from(found))
    inputs, weights = random_data(problem)
    gpu = Emulated(DEVICE, async_mode=draw(st.sampled_from(["eager", "late"])), seed=draw(st.integers(1, 9)))
    assert_right(problem, tactic, execute(gpu, problem, tactic, inputs, weights), reference(problem, inputs, weights))
    assert gpu.stats[-1].excess_wavefronts == 0


def test_a_strip_draws_each_pixel_once_for_all_taps():
    """Bytes of a launch: the implicit GEMM loads the pixels of its tiles nine times, a strip little more than once."""
    problem = ConvProblem(1, 128, 14, 14, 64, 3, 3, pad=ONE)
    inputs, weights = random_data(problem)
    loaded, tile = {}, STRIP_DENSE_TILES[-1]
    for kernel in ("conv_dense", "conv_strip"):
        gpu = Emulated(DEVICE)
        execute(gpu, problem, Tactic(kernel, tile, (HWC8,), HWC8), inputs, weights)
        loaded[kernel] = gpu.stats[-1].sectors * 32
    weights_read = 2 * 64 * 9 * 128 * 2  # by each of two tiles
    pixels = 14 * 14 * 128 * 2
    assert loaded["conv_dense"] > weights_read + 7 * pixels  # less than 9, since taps outside of the image load nothing
    tile_and_halo = 2 * 128 * geometry.strip_rows(problem, Tactic("conv_strip", tile, (HWC8,), HWC8)) * 2
    assert loaded["conv_strip"] < weights_read + tile_and_halo + 64 * 14 * 14 * 2 + 4096


def test_reasons():
    def why(**changes):
        problem = ConvProblem(**{"n": 1, "c": 64, "h": 20, "w": 20, "k": 64, "r": 3, "s": 3, "pad": ONE} | changes)
        found = [str(r) for t, r in rejected(problem, DEVICE) if str(getattr(t, "kernel", t)).startswith("conv_strip")]
        assert bool(found) == (not any(t.kernel == "conv_strip" for t in candidates(problem, DEVICE)))
        return found[:1]

    assert (
        "need stride 1 and dilation 1" in why(stride=(2, 2))[0]
        and "need stride 1 and dilation 1" in why(dilation=(2, 2), pad=(2,) * 4)[0]
    )
    assert "differs from the input's" in why(pad=(0, 0, 0, 0))[0] and "one group only" in why(groups=2)[0]
    wide = ConvProblem(1, 128, 9, 900, 64, 3, 3, pad=ONE, sparse24=True)
    assert not any(t.kernel in KERNELS for t in candidates(wide, DEVICE))
    needs = [str(reason) for t, reason in rejected(wide, DEVICE) if getattr(t, "kernel", "") in KERNELS]
    assert needs and all("pixels: needs" in reason and "sm_90a gives" in reason for reason in needs)
    assert not any("strip" in str(t) for t, _ in rejected(ConvProblem(1, 64, 9, 9, 64, 1, 1), DEVICE))  # one tap


@pytest.mark.parametrize("name", ["images", "one_block"])
def test_packed_weights_are_those_of_any_tile(name):
    """And their sizes are known without packing; names of tactics parse back."""
    problem, (_, weights, _) = CASES[name], data(name)
    for kernel in KERNELS:
        every = tactics(problem, kernel)
        assert len({packing_key(problem, t) for t in every}) == 1
        packed = pack_weights(problem, every[0], weights)
        assert {n: a.nbytes for n, a in packed.items()} == section_bytes(problem, every[0])
        for tactic in (every[0], every[-1]):
            other = pack_weights(problem, tactic, weights)
            assert all(np.array_equal(packed[n], other[n]) for n in packed) and Tactic.parse(tactic.name) == tactic


def test_images_whose_ends_do_not_meet():
    """In planes of 32 channels an image's first pixel is not a step behind the last one of the image before."""
    planes = [t for t in tactics(CASES["images"], "conv_strip") if t.ins[0].layout == "chw32" and t.tile == SMALL]
    held("images", planes[0])


def test_predictions_count_a_strip_s_bytes():
    """With one main loop a strip is not slower than the implicit GEMM by more than its first strip; wider images cost more."""
    device = named("a100")
    for w in (14, 28, 56):
        problem = ConvProblem(32, 256, w, w, 256, 3, 3, pad=ONE, sparse24=True)
        for ours, theirs, tile in (
            ("conv_strip", "conv_dense", "128x128x64_w2x4_s3"),
            ("conv_strip_sparse24", "conv_sparse24", "128x128x64_w2x4_s3"),
        ):
            at = next(t for _, t in TILES if str(t) == tile)
            strip, gemm = (predict_us(problem, Tactic(k, at, (HWC8,), HWC8), device) for k in (ours, theirs))
            assert strip < 1.05 * gemm
    narrow, wide = (ConvProblem(32, 256, 3136 // w, w, 256, 3, 3, pad=ONE) for w in (14, 56))
    tactic = Tactic("conv_strip", SMALL, (HWC8,), HWC8)
    assert geometry.smem_bytes(narrow, tactic) < geometry.smem_bytes(wide, tactic)
    assert conv_strip.resident_blocks(wide, tactic, device) <= conv_strip.resident_blocks(narrow, tactic, device)
    assert conv_gemm.weight_bytes(narrow, replace(tactic, kernel="conv_dense")) == conv_strip.weight_bytes(narrow, tactic)
