"""Names round-trip; every rejection has a reason; launches are consistent with tiles; predictions behave."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace

import numpy as np
import pytest

from cuda_kernels.device import NAMED, named
from cuda_kernels.named_devices import MAX_GRID, SMEM_PER_BLOCK
from gpu_runtime.doctor.cases import cases
from tactics.candidates import candidates, rejected
from tactics.families import table
from tactics.families.conv_gemm import conv_smem
from tactics.families.merged import padded_k
from tactics.families.strips.geometry import smem_bytes
from tactics.format import HALF_FORMATS
from tactics.kernels import KERNELS
from tactics.launches import binaries, launches, pack_weights
from tactics.measure.cache import source_key
from tactics.predict import predict, predict_us
from tactics.problems.pointwise_ops import Activation
from tactics.problems.problem import (
    ConvProblem,
    ConvTransposeProblem,
    MatmulProblem,
    PoolProblem,
    ReformatProblem,
    ResizeProblem,
)
from tactics.roofline import one_launch_us
from tactics.tactic import Tactic
from tests.problems import conv_case

RELU = Activation("relu")
CONV = conv_case(1, 64, 14, 14, 96, 3, 3, pad=(1, 1, 1, 1), bias=True, residual=True, act=RELU, sparse24=True)
PROBLEMS = [
    CONV,
    ConvProblem(2, 3, 9, 7, 10, 1, 1),
    PoolProblem(1, 8, 6, 6, "max", 2, 2, (3, 3), (2, 2)),
    PoolProblem(1, 8, 6, 6, "avg", 6, 6, (1, 1)),
    ReformatProblem(1, 8, 6, 6, "fp32:chw", "fp16:hwc8"),
]


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_names_round_trip(problem):
    for tactic in candidates(problem, named("h200")):
        assert Tactic.parse(tactic.name) == tactic
        assert not set(tactic.name) & set("<>&|/ "), "names go into graphs and file names"


NOTHING = (
    *("", "conv_dense", "conv_dense_hmma_16816_1x2__fp16.hwc8", "conv_dense__fp16.hwc8_fp16.hwc8_x"),
    "squeeze_excite_8x1_apart1__fp16.hwc8_fp16.hwc8",
)


@pytest.mark.parametrize("name", NOTHING)
def test_names_of_nothing_are_refused(name):
    with pytest.raises(ValueError, match="not a tactic's name"):
        Tactic.parse(name)


def test_threads_never_give_two_kinds_one_number():
    """Two kernels whose names are hashed at the same moment, after both threads have drawn a number. A cached property has a
    lock of its own, which Python 3.12 takes away."""
    both = threading.Barrier(2, timeout=60)

    class Kernel(str):
        def __hash__(self) -> int:
            both.wait()
            return str.__hash__(self)

    with ThreadPoolExecutor(2) as pool:
        drawn = Tactic.kind.func
        one, other = pool.map(lambda name: drawn(Tactic(Kernel(name), None, (), HALF_FORMATS[0])), ("one", "other"))
    assert one != other


@pytest.mark.parametrize("device", NAMED)
def test_what_is_launchable_fits_and_the_rest_has_reasons(device):
    d = named(device)
    good, bad = candidates(CONV, d), rejected(CONV, d)
    assert any(t.sparse for t in good) and any(not t.sparse for t in good)
    for t in good:
        (launch,) = launches(CONV, t)
        if KERNELS[t.kernel].sm:  # its blocks have a warpgroup more, and two that take turns
            assert launch.block[0] == t.tile.threads * (1 + t.tile.pingpong) + 128 and launch.smem <= d.smem_per_block
            continue
        assert launch.block[0] == t.tile.threads <= 1024
        assert launch.smem == (smem_bytes(CONV, t) if "strip" in t.kernel else conv_smem(t)) <= d.smem_per_block
    assert all(reason for _, reason in bad)
    if d.smem_per_block < 100 * 1024:
        assert any("shared memory" in str(reason) for _, reason in bad)


@pytest.mark.parametrize("change,word", [({"sparse24": False}, "pattern_violation"), ({"c": 66}, "channels_not")])
def test_sparse_is_rejected_with_its_reason(change, word):
    problem = conv_case(**({f.name: getattr(CONV, f.name) for f in fields(CONV)} | change))
    assert not any(t.sparse for t in candidates(problem, named("a100")))
    assert any(word in str(reason) for x, reason in rejected(problem, named("a100")) if "sparse" in str(x))


def test_packed_weights_are_padded_with_zeros_and_rows_of_sixteen():
    problem = conv_case(1, 12, 5, 5, 20, 3, 3, bias=True, sparse24=True)
    w = np.random.default_rng(0).standard_normal((20, 12, 3, 3)).astype(np.float32)
    w[:, 2::4] = 0
    w[:, 3::4] = 0
    by_kernel = {t.kernel: t for t in candidates(problem, named("a100"))}
    dense = pack_weights(problem, by_kernel["conv_dense"], {"w": w, "b": np.ones(20)})
    sparse = pack_weights(problem, by_kernel["conv_sparse24"], {"w": w, "b": np.ones(20)})
    assert padded_k(problem) == 192  # 9 taps of 16 channels, in stages of 64
    assert dense["w"].size == 32 * 192 and sparse["w"].size == 32 * 192 // 2 and sparse["meta"].size * 32 == 32 * 192
    assert np.count_nonzero(dense["w"]) == np.count_nonzero(sparse["w"]) == np.count_nonzero(w)
    assert dense["b"].tolist() == [1.0] * 20 + [0.0] * 12


def test_predictions_grow_with_the_work_and_say_what_bounds_them():
    d = named("h200")
    tactic = next(t for t in candidates(CONV, d) if not t.sparse)
    small, large = (conv_case(n, 64, 56, 56, 64, 3, 3, pad=(1, 1, 1, 1), residual=True) for n in (1, 64))
    assert predict_us(small, tactic, d) < predict_us(large, tactic, d)
    assert predict(large, tactic, d)["bound"] in ("mma", "smem", "l2", "dram", "issue", "latency", "launch")


@pytest.mark.parametrize("device", NAMED)
def test_no_prediction_beats_the_roofline(device):
    d = named(device)
    for n in (1, 32, 256):
        p = ConvProblem(n, 256, 14, 14, 256, 3, 3, pad=(1, 1, 1, 1), sparse24=True)
        for t in candidates(p, d):
            peak = d.dense_tflops * (2 if t.sparse else 1)
            assert predict_us(p, t, d) > 2e-6 * p.macs / peak


HUGE = [
    MatmulProblem((1, 1), (1, 1), 1 << 27, 8, 2),
    MatmulProblem((1 << 20, 1), (1 << 20, 1), 4, 8, 2),
    ConvProblem(1, 8 * 70_000, 4, 4, 8 * 70_000, 3, 3, pad=(1, 1, 1, 1), groups=70_000),
    ConvProblem(1, 1 << 20, 4, 4, 1 << 20, 3, 3, pad=(1, 1, 1, 1), groups=1 << 20),
    ConvTransposeProblem(1, 8 * 70_000, 4, 4, 8 * 70_000, 2, 2, (8, 8), stride=(2, 2), groups=70_000),
    PoolProblem(1 << 17, 8, 16, 16, "max", 2, 2, (8, 8), (2, 2)),
    PoolProblem(1 << 18, 8, 16, 16, "avg", 16, 16, (1, 1)),
    ReformatProblem(1, 1 << 20, 16, 16, "fp32:chw", "fp16:hwc8"),
]


@pytest.mark.parametrize("problem", HUGE, ids=str)
def test_every_launch_of_a_huge_problem_fits_a_grid(problem):
    tactics = candidates(problem, named("a100"))
    assert tactics, "it can run"
    for tactic in tactics:
        for launch in launches(problem, tactic):
            assert all(1 <= n <= most for n, most in zip(launch.grid, MAX_GRID, strict=True)), tactic


# fmt: off
PEAKS = {"a100": 312, "a10": 125, "rtx3090": 71, "rtx4090": 165.2, "l4": 121, "h100": 989, "h200": 989, "b200": 2250,
         "rtx5090": 209.5, "a100_pcie": 312, "a100_40gb": 312, "a40": 149.7, "rtx3070": 40.6, "l40s": 362,
         "rtx_pro_6000": 503.8, "rtx_a6000": 154.8, "a30": 165, "rtx3080": 59.5, "a2": 18, "rtx4080": 97.5, "rtx4070": 58.3,
         "l40": 181.05, "rtx_6000_ada": 364.2, "gh200": 990, "orin_agx64": 85 / 2, "orin_agx32": 54 / 2, "orin_nx16": 30 / 2,
         "orin_nx8": 25 / 2, "orin_nano8": 20 / 2}
# fmt: on


@pytest.mark.parametrize("name", NAMED)
def test_a_device_s_rate_is_its_data_sheet_s(name):
    """SMs x clock x products per clock gives the published FP16 rate with FP32 accumulation, dense, in TFLOP/s."""
    d = named(name)
    rounded = 0.5 / PEAKS[name] if PEAKS[name] < 30 else 0  # data sheets round these to whole numbers
    assert d.dense_tflops == pytest.approx(PEAKS[name], rel=max(0.004, rounded)) and d.sources
    assert d.smem_per_block == SMEM_PER_BLOCK[d.cc]


@pytest.mark.parametrize(
    "problem",
    [
        PoolProblem(1, 96, 56, 56, "avg", 56, 56, (1, 1)),
        PoolProblem(1, 24, 56, 56, "avg", 56, 56, (1, 1)),
        PoolProblem(1, 256, 14, 14, "avg", 14, 14, (1, 1)),
        PoolProblem(1, 64, 112, 112, "max", 3, 3, (56, 56), (2, 2), (1, 1, 1, 1)),
        ResizeProblem(1, 256, 1, 1, (33, 33), "linear", "asymmetric", (33.0, 33.0)),
    ],
    ids=str,
)
def test_windows_over_small_images_are_predicted_in_microseconds(problem):
    """Work is counted by output and tap: by input and tap it would be milliseconds for a global pool."""
    d = named("h200")
    us = [predict_us(problem, t, d) for t in candidates(problem, d)]
    assert one_launch_us(d) < min(us) and max(us) < 12


@pytest.mark.parametrize("name", ["conv_dense", "conv_sparse24_sm90"])
def test_tactics_that_are_alike_take_the_same_time(name):
    family, device, merged = table.OF_KERNEL[name], named("h200"), 0
    for p in (*family.CASES[name], CONV):
        for t in (t for t in candidates(p, device) if table.OF_KERNEL[t.kernel] is family):
            same = family.alike(p, t)
            assert family.alike(p, same) == same
            assert family.counts(p, t, device) == family.counts(p, same, device)
            merged += same != t
    assert merged


@pytest.mark.parametrize("sparse24", [True, False])
@pytest.mark.parametrize("device", ["h200", "rtx4090"])
def test_sparse_tactics_can_be_asked_for_alone(device, sparse24):
    p = replace(CONV, sparse24=sparse24)
    every = candidates(p, named(device))
    assert candidates(p, named(device), only="sparse") == tuple(t for t in every if t.sparse)
    assert any(t.sparse for t in every) == sparse24


@pytest.mark.slow
def test_each_kernel_names_the_sources_that_it_launches():
    """What a time in the timing cache depends on: a kernel without a file of its own launches those of others."""
    launched: dict[str, set[str]] = {name: set() for name in KERNELS}
    for name in ("h200", "l4"):
        for case in cases(named(name)):
            launched[case.kernel] |= {kernel for kernel, _ in binaries(case.problem, case.tactic)}
    assert {name: set(KERNELS[name].sources) for name in KERNELS if name != "library"} == {
        name: of for name, of in launched.items() if name != "library"
    }


def test_each_kernel_has_a_key_in_the_timing_cache():
    """Kernels have equal keys where they launch the same sources, and nowhere else."""
    keys = {name: source_key(name) for name in KERNELS}
    sources = {name: KERNELS[name].sources for name in KERNELS}
    assert all(len(key) == 24 for key in keys.values())
    assert all((keys[a] == keys[b]) == (sources[a] == sources[b]) for a in KERNELS for b in KERNELS)
