"""Floors by hand and by counting: what no tap touches is in none of them, and no prediction is below one."""

import math
import random
from dataclasses import replace

import pytest

from cuda_kernels.device import named
from cuda_kernels.rates import RATES, rates
from tactics.candidates import candidates
from tactics.predict import predict_us
from tactics.problems.epilogue import MaxPool
from tactics.problems.problem import BackToBackProblem, ConvProblem, ConvTransposeProblem
from tactics.roofline import RESOLUTION_US, Counts, _needs, floors, least_us, moved_us, predicted
from tests.problems import PROBLEMS, conv_case

H200 = named("h200")


@pytest.mark.parametrize(
    "problem, read, macs, weights",
    [
        # 1x1, stride 2: every second pixel of every second row
        (ConvProblem(2, 8, 56, 56, 16, 1, 1, stride=(2, 2)), 2 * 8 * 28 * 28, 2 * 16 * 8 * 28 * 28, 8 * 16),
        # 2x2, stride 4 on 8: indices 0, 1, 4, 5
        (ConvProblem(1, 8, 8, 8, 8, 2, 2, stride=(4, 4)), 8 * 4 * 4, 8 * 8 * 4 * 4, 8 * 8 * 4),
        # 3x3, stride 2, pad 1 on 6: outputs start at -1, 1, 3: 8 of 9 pairs lie inside, all 6 rows are read
        (ConvProblem(1, 4, 6, 6, 4, 3, 3, stride=(2, 2), pad=(1, 1, 1, 1)), 4 * 36, 4 * 4 * 8 * 8, 4 * 4 * 9),
        # 3x3 with pad 1 on one pixel: the tap in the middle alone
        (ConvProblem(1, 16, 1, 1, 16, 3, 3, pad=(1, 1, 1, 1)), 16, 16 * 16, 16 * 16),
        # dilation 12 on 9 x 9: likewise
        (ConvProblem(1, 16, 9, 9, 16, 3, 3, pad=(12, 12, 12, 12), dilation=(12, 12)), 16 * 81, 16 * 16 * 81, 16 * 16),
        # a residual is read whole; two groups have half the products
        (conv_case(1, 8, 4, 4, 8, 1, 1, stride=(2, 1), groups=2, residual=True), 8 * 2 * 4, 8 * 4 * 2 * 4, 8 * 4),
        # a pool of 1 x 1, stride 2, takes rows and columns 0, 2 of a 3x3 convolution without padding on 5: rows 0 to 4
        (conv_case(1, 3, 5, 5, 8, 3, 3, pool=MaxPool((1, 1), (2, 2), (0, 0), (2, 2))), 3 * 25, 8 * 3 * 9 * 4, 8 * 3 * 9),
        # kernel 2, stride 2, its first row and column cut: 1 + 2 * 3 pairs of input row and tap remain
        (ConvTransposeProblem(1, 4, 4, 4, 4, 2, 2, (7, 7), (2, 2), (1, 1)), 4 * 16, 4 * 4 * 7 * 7, 4 * 4 * 4),
        # two rows of output need the first input row only
        (ConvTransposeProblem(1, 4, 4, 4, 4, 2, 2, (2, 2), (2, 2)), 4, 4 * 4 * 2 * 2, 4 * 4 * 4),
        # the second takes every second pixel of the first, a 1x1: so the first need compute no others
        (
            BackToBackProblem(ConvProblem(1, 8, 8, 8, 8, 1, 1), ConvProblem(1, 8, 8, 8, 8, 1, 1, stride=(2, 2))),
            8 * 16,
            2 * 8 * 8 * 16,
            2 * 8 * 8,
        ),
    ],
    ids=str,
)
def test_counts_by_hand(problem, read, macs, weights):
    assert _needs(problem) == (read, macs, weights)


def _by_counting(p: ConvProblem) -> tuple[int, int, int]:
    pixels, pairs, taps = set(), 0, set()
    for y in range(p.p):
        for x in range(p.q):
            for i in range(p.r):
                for j in range(p.s):
                    h, w = y * p.stride[0] + i * p.dilation[0] - p.pad[0], x * p.stride[1] + j * p.dilation[1] - p.pad[1]
                    if 0 <= h < p.h and 0 <= w < p.w:
                        pixels.add((h, w))
                        taps.add((i, j))
                        pairs += 1
    per = p.k * (p.c // p.groups)
    return p.n * p.c * len(pixels), p.n * per * pairs, per * len(taps)


def test_counts_of_drawn_convolutions():
    rng = random.Random(0)
    for _ in range(100):
        r, s = rng.randint(1, 4), rng.randint(1, 4)
        p = ConvProblem(
            rng.randint(1, 2),
            8,
            rng.randint(7, 12),
            rng.randint(7, 12),
            8,
            r,
            s,
            stride=(rng.randint(1, 5), rng.randint(1, 5)),
            pad=tuple(rng.randint(0, 4) for _ in range(4)),
            dilation=(rng.randint(1, 2), rng.randint(1, 2)),
            groups=rng.choice((1, 2)),
        )
        assert _needs(p) == _by_counting(p), p


FAST = rates(H200).boost  # the highest clock, over the data sheet's


def test_bytes_and_seconds_by_hand():
    """1x1, stride 2, 64 to 64 channels, 56 x 56, batch 1: bytes of a quarter of the input, of the output and of the weights."""
    p = ConvProblem(1, 64, 56, 56, 64, 1, 1, stride=(2, 2))
    moved, weights = 2 * 2 * 64 * 28 * 28, 2 * 64 * 64
    f = floors(p, H200)
    assert f["l2_us"] == pytest.approx((moved + weights) / (132 * 64 * 1830 * FAST))
    assert f["dram_us"] == pytest.approx(weights / 4.8e6)  # activations fit L2
    assert f["mma_us"] == pytest.approx(64 * 64 * 28 * 28 / (132 * 2048 * 1830 * FAST))  # wgmma's peak
    pixels = floors(replace(p, c=3), H200, sizes=(1, 2))  # an image of bytes, as it lies
    assert pixels["l2_us"] == pytest.approx((3 * 28 * 28 + 2 * 64 * 28 * 28 + 2 * 3 * 64) / (132 * 64 * 1830 * FAST))
    large = floors(replace(p, n=1024), H200)  # the bytes of input and output that L2 may keep are not counted
    assert large["dram_us"] == pytest.approx((1024 * moved - 2 * H200.l2_bytes + weights) / 4.8e6)


def test_a_published_measurement_is_not_below_its_floor():
    """256 x 56 x 56 to 128, 1x1, stride 2, batch 256, FP16: 512 us on an RTX 3070 (CUTLASS's profiler); counting the whole
    input gave a floor of 1,034 us."""
    p = ConvProblem(256, 256, 56, 56, 128, 1, 1, stride=(2, 2))
    assert 250 < floors(p, named("rtx3070"))["dense_us"] < 512


@pytest.mark.parametrize("device", ["a100", "l4", "h200", "rtx5090"])
def test_no_prediction_is_below_the_floor(device):
    """Drawn convolutions, every tactic: predictions rest on the same peaks, and count what kernels do beyond need."""
    d, rng = named(device), random.Random(device)
    for _ in range(6):
        r = rng.choice((1, 1, 2, 3))
        p = conv_case(
            rng.choice((1, 8, 64)),
            rng.choice((16, 64, 256)),
            *[rng.choice((7, 14, 56))] * 2,
            rng.choice((8, 64, 256)),
            r,
            r,
            stride=(rng.choice((1, 2, 3)),) * 2,
            pad=(r // 2,) * 4,
            sparse24=True,
            residual=rng.random() < 0.3,
        )
        f = floors(p, d)
        for t in candidates(p, d):
            least = f["sparse_us" if t.sparse else "dense_us"]
            assert predict_us(p, t, d) >= math.floor(least * 100) / 100, (p, t.name)


@pytest.mark.parametrize("device", RATES)
@pytest.mark.parametrize("name", ["pool_max", "pointwise_single", "matmul_row", "softmax", "resize_linear", "conv_1x1"])
def test_no_small_launch_is_below_its_floor(device, name):
    """A launch of ours begins before the one ahead has ended (`Rates.early_us`): so does that of the floor."""
    p, d = PROBLEMS[name], named(device)
    found = [(predict_us(p, t, d), least_us(p, t, d)[0]) for t in candidates(p, d)]
    assert found and all(us >= floor - RESOLUTION_US for us, floor in found)


def _step(device, full, weights=0.0):
    """Microseconds of a step that reads and writes alike, `full` times the L2 together."""
    half = full * device.l2_bytes / 2
    return predicted(device, Counts(half, half, weights))["total_us"]


@pytest.mark.parametrize("device", RATES)
@pytest.mark.parametrize("weights", [0, 1 << 20])
def test_a_step_that_grows_takes_longer_but_not_suddenly(device, weights):
    """A batch that grows, from an eighth of L2 to four times it: no time falls, and none grows by
    6 % where bytes grow by 1 % (an L40 was timed at 4.8 %)."""
    d, full = named(device), 1 / 8
    while full < 4:
        before, after = _step(d, full, weights), _step(d, 1.01 * full, weights)
        assert before <= after < 1.06 * before + 2 * RESOLUTION_US, full
        full *= 1.01


@pytest.mark.parametrize("device", RATES)
def test_half_of_l2_is_no_threshold(device):
    """What moves 1 % less, and so takes just less than half of L2, gains no more than it would elsewhere: as a step at half of
    L2 the model promised 1.3 to 3 times the speed."""
    d = named(device)
    assert _step(d, 0.505) < 1.02 * _step(d, 0.5) + 2 * RESOLUTION_US


@pytest.mark.parametrize("device", RATES)
def test_what_l2_may_keep_is_below_what_estimates_let_it_keep(device):
    """However a step divides its bytes, a floor counts no more from DRAM than an estimate does."""
    d = named(device)
    for read in (0.1 * i for i in range(30)):
        for written in (0.1 * i for i in range(30)):
            cold = (max(0, read - 1) + max(0, written - 1)) * d.l2_bytes / (d.dram_gbps * 1e3)
            assert moved_us(d, read * d.l2_bytes, written * d.l2_bytes)["dram"] >= cold
