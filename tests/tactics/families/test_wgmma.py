"""conv_dense_sm90 and conv_sparse24_sm90, convolutions on Hopper's asynchronous tensor cores, in the emulator: beside the
reference, beside each other, in every order and mode; and that it notices each step of their loop that is left out."""

import random
import re
import shutil
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.simulator.sass import programs
from cuda_kernels import compile as compiling
from cuda_kernels.compile import compile_anew, compile_kernel
from cuda_kernels.device import named
from cuda_kernels.emulator import EmulatorError
from cuda_kernels.launch import Emulated
from cuda_kernels.sparse24 import prune
from tactics.candidates import accepts, candidates, on_request, rejected
from tactics.families.conv_gemm import merged, num_tiles, padded_k
from tactics.families.hopper.conv_wgmma import TILES
from tactics.format import Format
from tactics.kernels import CP_ASYNC, KERNELS
from tactics.launches import launches, pack_weights, section_bytes
from tactics.measure import trial
from tactics.measure.data import random_data, reference
from tactics.problems.pointwise_ops import NONE, Activation
from tactics.problems.problem import ConvProblem
from tactics.step import linear
from tactics.tactic import Tactic, Tile
from tactics.tiles import out_of_registers
from tests.compiled import takes
from tests.problems import RELU, TAILS, assert_right, assert_written_once, conv_case, execute

slow = pytest.mark.slow
DEVICE = named("h200")
NAMES = DENSE, SPARSE = "conv_dense_sm90", "conv_sparse24_sm90"
ONE, HWC8 = (1, 1, 1, 1), Format("fp16", "hwc8")
SMALL = Tile(64, 32, 64, 4, 1, 4)
TWO = Tile(128, 128, 64, 4, 1, 4)  # two 16-row tiles of a warp
ORDERS = ({"async_mode": "late"}, {"seed": 1}, {"seed": 2, "async_mode": "late"}, {"seed": 3, "threads": 1})

# What each case is there for. No size is a multiple of a tile's.
CASES = {
    "one_stage": conv_case(1, 64, 5, 7, 40, 1, 1, bias=True, sparse24=True),
    "two_stages": conv_case(2, 100, 6, 5, 72, 1, 1, act=RELU, sparse24=True),
    "three_stages": conv_case(1, 64, 6, 9, 64, 1, 3, pad=(0, 1, 0, 1), bias=True, sparse24=True),
    "stages_span_taps": conv_case(2, 40, 9, 7, 72, 3, 3, pad=ONE, bias=True, act=RELU, sparse24=True),
    "few_channels": conv_case(1, 4, 12, 11, 24, 5, 5, pad=(2, 2, 2, 2), sparse24=True),
    "images_in_a_tile": conv_case(9, 72, 1, 3, 136, 3, 3, pad=ONE, bias=True, sparse24=True),
    "strides": conv_case(2, 64, 11, 13, 80, 3, 3, stride=(2, 3), pad=ONE, bias=True, sparse24=True),
    "dilations": conv_case(1, 64, 11, 13, 40, 3, 3, dilation=(2, 3), pad=(2, 3, 2, 3), sparse24=True),
    "asymmetric": conv_case(
        2, 12, 11, 13, 20, 3, 2, stride=(2, 1), pad=(0, 2, 1, 0), dilation=(2, 3), bias=True, sparse24=True
    ),
    "long_k": conv_case(1, 132, 6, 6, 24, 3, 3, pad=ONE, bias=True, act=Activation("silu"), sparse24=True),
    "residual": conv_case(1, 200, 7, 10, 88, 1, 1, bias=True, residual=True, act=RELU, sparse24=True),
    "tail": conv_case(2, 72, 6, 5, 40, 3, 3, pad=ONE, bias=True, act=Activation("prelu"), sparse24=True, **TAILS[""]),
    "d2s": conv_case(1, 72, 5, 6, 48, 3, 3, pad=ONE, bias=True, act=RELU, d2s=2, sparse24=True),
    "d2s_residual": conv_case(1, 64, 5, 6, 32, 3, 3, residual=True, act=RELU, act_first=True, d2s=2, sparse24=True),
    "upsampled_residual": conv_case(1, 64, 6, 9, 24, 1, 1, residual=True, up=3, sparse24=True),
    "groups": conv_case(2, 160, 6, 5, 144, 3, 3, pad=ONE, groups=2, bias=True, residual=True, sparse24=True),
    "gemm": conv_case(5, 200, 1, 1, 10, 1, 1, bias=True, sparse24=True),
}


@lru_cache
def data(name):
    """(problem, inputs, weights, expected) of a case, drawn and computed once."""
    inputs, weights = random_data(CASES[name])
    return CASES[name], inputs, weights, reference(CASES[name], inputs, weights)


def tactics(problem, kernel):
    return on_request(kernel, problem, DEVICE)[0]


def run(name, tactic, **options):
    """(output with padding, counters) of a tactic, checks on, after comparing with the reference."""
    problem, inputs, weights, expected = data(name)
    gpu = Emulated(DEVICE, **options)
    got = execute(gpu, problem, tactic, inputs, weights)
    assert_right(problem, tactic, got, expected)
    return got, gpu.stats[-1]


def held(name, tactic):
    """The products that the tile needs and no others, without a bank conflict; the same bits in every order and mode."""
    got, stats = run(name, tactic)
    t, problem = tactic.tile, CASES[name]
    of_one = 16 * 8 * (32 if tactic.sparse else 16)
    products = num_tiles(problem, tactic) * padded_k(merged(problem).one) * t.m * t.n // of_one
    assert (stats.mma, stats.mma_sp) == ((0, products) if tactic.sparse else (products, 0))
    assert stats.excess_wavefronts == 0, f"bank conflicts: {stats.excess}"
    for options in ORDERS:
        assert np.array_equal(got, run(name, tactic, **options)[0], equal_nan=True)


# ---- quick: one tile each, and what is asked of whom


@pytest.mark.parametrize("kernel", NAMES)
@pytest.mark.parametrize("name", ["stages_span_taps", "residual"])
def test_it_is_right_in_every_order(name, kernel):
    held(name, next(t for t in tactics(CASES[name], kernel) if t.tile == SMALL and t.out == t.ins[0] == HWC8))


def test_no_plan_holds_them_and_the_log_says_why():
    problem = CASES["residual"]
    for device in (DEVICE, named("h100")):
        assert not any(t.kernel in NAMES for t in candidates(problem, device))
        assert [str(why) for name, why in rejected(problem, device) if name in NAMES] == [CP_ASYNC] * 2
    assert "cp.async reach 41 %" in CP_ASYNC
    assert not any(name in NAMES for name, _ in rejected(problem, named("a100")))
    for kernel in NAMES:
        asked = tactics(problem, kernel)
        assert {replace(t.tile, split=1, stream=0) for t in asked} == set(TILES)
        assert not any(accepts(problem, t, DEVICE) for t in asked)
        assert all(Tactic.parse(t.name) == t and t.sparse == KERNELS[kernel].sparse for t in asked)


REFUSED = {
    "channels in registers": ({"scaled": True}, "change pixels in registers"),
    "gate": ({"gated": NONE}, "change pixels in registers"),
    "norm": ({"norm": 1e-5}, "change pixels in registers"),
    "short K": ({"c": 40}, "K = 40: less than a stage of 64"),
    "depthwise": ({"groups": 72, "k": 72}, "depthwise"),
    "taps": ({"r": 16, "s": 1, "pad": (8, 0, 8, 0)}, "15 x 15 at most"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_problem_is_refused_with_its_reason(name):
    changes, word = REFUSED[name]
    sizes = {"n": 2, "c": 72, "h": 7, "w": 9, "k": 40, "r": 1, "s": 1} | changes
    problem = conv_case(**sizes)
    good, bad = on_request(DENSE, problem, DEVICE)
    assert not good and any(word in str(why) for _, why in bad), bad


def test_a_tactic_is_refused_with_its_reason():
    problem = ConvProblem(2, 72, 7, 9, 40, 1, 1)
    assert [str(why) for _, why in on_request(DENSE, problem, named("a100"))[1]] == ["sm_80 has no wgmma: sm_90a has"]
    (why,) = (why for _, why in on_request(SPARSE, problem, DEVICE)[1])
    assert why.code == "pattern_violation"
    good, bad = on_request(DENSE, problem, DEVICE)
    assert {linear(t.ins[0]) for t, _ in bad} == {True} and {linear(t.ins[0]) for t in good} == {False}
    small = replace(DEVICE, smem_per_block=100 * 1024)
    assert any("needs 196608 bytes of shared memory" in str(why) for _, why in on_request(DENSE, problem, small)[1])


def test_weights_are_packed_as_those_of_mma_sync():
    problem, _, weights, _ = data("groups")
    for kernel, other in zip(NAMES, ("conv_dense", "conv_sparse24"), strict=True):
        mine = next(t for t in tactics(problem, kernel) if t.tile == SMALL and t.out == HWC8)
        packed, theirs = (pack_weights(problem, t, weights) for t in (mine, replace(mine, kernel=other)))
        assert {n: a.nbytes for n, a in packed.items()} == section_bytes(problem, mine)
        assert packed.keys() == theirs.keys() and all(np.array_equal(a, theirs[n]) for n, a in packed.items())


# ---- faults: each step of the loop that is left out, or comes too early, is seen in every order

FAULTS = {  # name -> header, its text, what stands there instead, how the error begins
    "no fence of proxies": ("wgmma_gemm.cuh", "      fence_proxy_async();\n", "", "proxy fence"),
    "registers loaded too early": ("wgmma_gemm.cuh", "wgmma_wait<1>", "wgmma_wait<2>", "wgmma: accesses a register"),
    "sums read too early": ("wgmma_gemm.cuh", "wgmma_wait<0>", "wgmma_wait<1>", "wgmma: accesses a (sum|register)"),
    "a stage not waited for": (
        "wgmma_gemm.cuh",
        "cp_async_wait<AHEAD - 1>",
        "cp_async_wait<AHEAD>",
        "cp.async: read of shared",
    ),
    "a stage filled too early": ("wgmma_gemm.cuh", "AHEAD = STAGES - 2,", "AHEAD = STAGES - 1,", "race|proxy"),
    "no barrier": ("wgmma_gemm.cuh", "      __syncthreads();\n", "", "race|uninitialised|proxy|cp.async"),
    "no wgmma.fence": ("wgmma.cuh", '"wgmma.fence.sync.aligned;"', '""', "wgmma: .* no wgmma.fence stands between"),
    "no swizzle": ("wgmma.cuh", " | 1ull << 62", "", "wrong"),
    "another step of rows": ("wgmma.cuh", "64ull << 32", "32ull << 32", "wrong"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_loop_is_seen(fault, tmp_path, monkeypatch):
    header, text, other, beginning = FAULTS[fault]
    shutil.copytree(compiling.INCLUDE, tmp_path / "include")
    source = (compiling.INCLUDE / header).read_text()
    assert source.count(text) == 1
    (tmp_path / "include" / header).write_text(source.replace(text, other))
    monkeypatch.setattr(compiling, "INCLUDE", tmp_path / "include")
    monkeypatch.setattr(trial, "compile_kernel", lru_cache(lambda kernel, values, sm: compile_anew(kernel, dict(values), sm)))
    monkeypatch.setattr(
        trial, "loaded", lambda gpu, steps: [gpu.load(trial.compile_kernel(s.kernel, s.values, gpu.arch)) for s in steps]
    )
    for options in ({}, *ORDERS):
        with pytest.raises((EmulatorError, AssertionError)) as caught:
            run("stages_span_taps", Tactic(SPARSE, SMALL, (HWC8,), HWC8), **options)
        seen = str(caught.value) if isinstance(caught.value, EmulatorError) else "wrong"
        assert re.match(beginning, seen), seen


# ---- the grid


@slow
@pytest.mark.sample(6)
@pytest.mark.parametrize("kernel", NAMES)
@pytest.mark.parametrize("name", CASES)
def test_every_case(name, kernel):
    """With the smallest tile, which ends within images most often, and one where a warp has two tiles of 16 rows."""
    for tile in (SMALL, TWO):
        found = [t for t in tactics(CASES[name], kernel) if t.tile == tile]
        if found or merged(CASES[name]).count == 1:
            held(name, random.Random(f"{name}{kernel}{tile}").choice(found))


@slow
@pytest.mark.sample(6)
@pytest.mark.parametrize("kernel", NAMES)
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_every_tile_and_side(tile, kernel):
    for name, side in (("stages_span_taps", True), ("residual", False)):
        found = [t for t in tactics(CASES[name], kernel) if t.tile == tile and linear(t.out) == side]
        held(name, random.Random(f"{tile}{kernel}").choice(found))


@slow
@pytest.mark.parametrize("kernel", NAMES)
@pytest.mark.parametrize("tile", [SMALL, TWO], ids=str)
def test_shares_of_k_give_the_same_bits_in_every_order(tile, kernel):
    """Shorter than the pipeline, and longer; stream-K's blocks go on to another tile."""
    whole = Tactic(kernel, tile, (HWC8,), HWC8)
    ways = [{"split": 2}, {"split": 3}, {"split": 6}, {"stream": 2}, {"stream": 7}]
    problem = CASES["stages_span_taps"]
    assert padded_k(problem) == 6 * 64
    for way in ways:
        for out in (HWC8, Format("fp16", "chw")):
            tactic = replace(whole, tile=replace(tile, **way), out=out)
            got, stats = run("stages_span_taps", tactic)
            assert stats.excess_wavefronts == 0
            assert all(np.array_equal(got, run("stages_span_taps", tactic, **options)[0]) for options in ORDERS)


@slow
@pytest.mark.parametrize("kernel", NAMES)
@pytest.mark.parametrize("name", ["residual", "d2s", "groups"])
def test_each_output_byte_is_written_once(name, kernel):
    problem, inputs, weights, _ = data(name)
    for y in ("hwc8", "chw"):
        tactic = next(t for t in tactics(problem, kernel) if t.tile == SMALL and t.out.layout == y)
        assert_written_once(problem, tactic, DEVICE, inputs, weights)


@slow
@pytest.mark.parametrize(
    "name", [n for n, p in CASES.items() if not p.epilogue.residual and p.epilogue.act.name in ("none", "relu")]
)
def test_dense_sparse_and_reference_are_equal_on_integers(name):
    """Sums below 2,048 are exact in FP16, in whatever order they are added."""
    problem, rng = CASES[name], np.random.default_rng(7)
    inputs = [rng.integers(-3, 4, s).astype(np.float16) for s in problem.in_shapes]
    w = prune(rng.integers(-3, 4, (problem.k, problem.c // problem.groups, problem.r, problem.s)).astype(np.float32))
    weights = {"w": w} | ({"b": rng.integers(-9, 10, problem.k).astype(np.float32)} if problem.epilogue.bias else {})
    expected = reference(problem, inputs, weights)
    assert 20 < np.abs(expected).max() < 2048
    for kernel in NAMES:
        tactic = next(t for t in tactics(problem, kernel) if t.tile == SMALL and t.out == HWC8)
        for options in ({}, ORDERS[2]):
            got = execute(Emulated(DEVICE, **options), problem, tactic, inputs, weights)
            np.testing.assert_array_equal(got[:, : problem.out_shape[1]], expected)


@slow
@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.data())
def test_random_convolutions(data):
    draw = data.draw
    n, c, h, w, k = draw(st.tuples(*(st.integers(1, most) for most in (4, 40, 12, 15, 20))))
    window, stride, dilation = (draw(st.tuples(*2 * (st.integers(1, most),))) for most in (4, 3, 3))
    pad = draw(st.tuples(*(st.integers(0, e - 1) for e in 2 * window)))
    reach = [(e - 1) * d + 1 for e, d in zip(window, dilation, strict=True)]
    h, w = max(h, reach[0]), max(w, reach[1])
    how = {name: draw(st.booleans()) for name in ("bias", "residual")}
    problem = conv_case(n, 4 * c, h, w, 4 * k, *window, stride, pad, dilation, act=RELU, sparse24=True, **how)
    tile = draw(st.sampled_from([t for t in TILES if t.m * t.n <= 64 * 128]))
    for kernel in NAMES:
        found = [t for t in tactics(problem, kernel) if t.tile == tile]
        inputs, weights = random_data(problem)
        gpu = Emulated(DEVICE, async_mode=draw(st.sampled_from(["eager", "late"])), seed=draw(st.integers(1, 9)))
        for tactic in found and [draw(st.sampled_from(found))]:
            assert_right(problem, tactic, execute(gpu, problem, tactic, inputs, weights), reference(problem, inputs, weights))
            assert gpu.stats[-1].excess_wavefronts == 0


# ---- machine code


@slow
@pytest.mark.parametrize("way", [{}, {"split": 2}, {"stream": 100}], ids=str)
@pytest.mark.parametrize("kernel", NAMES)
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_wgmma_compiles_without_spills(tile, kernel, way):
    """With most live registers, as products of the tensor cores' own and no others, which ptxas does not serialise (C75xx); a
    warp's steps of a stage stand in its loop once."""
    problem = conv_case(2, 72, 9, 9, 40, 3, 3, pad=ONE, bias=True, residual=True, act=Activation("prelu"), sparse24=True)
    for y in ("hwc8", "chw"):
        out = Format("fp16", y)
        tactic = Tactic(kernel, replace(tile, **way), (HWC8, out), out)
        if "stream" in way and out_of_registers(tactic):
            continue  # not offered
        values = launches(problem, tactic)[0].values
        taken = takes(kernel, values, "sm_90a")
        products = tile.m // tile.warps_m // 16 * tile.k // (32 if tactic.sparse else 16)
        assert (taken.mma, taken.mma_sp) == ((0, products) if tactic.sparse else (products, 0))
        assert taken.regs * tile.threads <= 65536
        found = compile_kernel(kernel, dict(values), "sm_90a")
        assert not re.search("C75[0-9][0-9]|erializ", found.log)
        code = "".join(f"{i}\n" for p in programs(found.cubin).values() for i in p.instructions)
        waits = re.findall(r"WARPGROUP\.DEPBAR\.LE gsb0, (\w+)", code)
        assert waits == ["0x1"] * (tile.k // (32 if tactic.sparse else 16)) + ["0x0"], "a wait for all in the loop"
