"""Predictions beside what an H200 took (benchmarks/results/h200): the tactics that were timed, and layers in networks."""

import math
import statistics
from collections import defaultdict
from dataclasses import replace

import pytest

from benchmarks import our_times, timeline
from cuda_kernels.device import named
from tactics.candidates import candidates
from tactics.families.hopper import ends
from tactics.families.squeeze_excite import CASES
from tactics.predict import predict_us
from tactics.problems.problem import ConvProblem, PoolProblem, SqueezeExciteProblem
from tactics.step import linear
from tactics.tactic import Parts, Tactic

H200 = named("h200")


@pytest.mark.slow
def test_tensor_core_tactics_are_predicted_within_a_tenth_in_the_median():
    """And with residuals, where ping-pong tiles were predicted to take two thirds of what they take."""
    ratios, rows = defaultdict(list), our_times.read("h200")
    for row, us in our_times.predictions(rows, H200).items():
        if row.tactic.kernel in our_times.TILED and isinstance(row.problem, ConvProblem):
            kind = row.tactic.kernel, row.tactic.gemm.pingpong, row.problem.epilogue.residual and row.problem.n > 1
            ratios[kind].append(row.us / us)
    assert len(ratios) > 8 and all(0.9 < statistics.median(of) < 1.21 for of in ratios.values()), {
        kind: (len(of), statistics.median(of)) for kind, of in ratios.items()
    }


@pytest.mark.slow
def test_predictions_choose_tactics_that_are_near_the_best():
    rows = our_times.read("h200")
    line = our_times.chosen(rows, our_times.predictions(rows, H200))
    assert float(line.split()[3]) < 1.06, line


@pytest.mark.slow
def test_prices_that_one_half_of_the_problems_fits_choose_well_in_the_other():
    """All problems alike, and by the layers of three networks at batch 32; and over both halves."""
    rows, layers = our_times.read("h200"), our_times.layers("h200")
    predicted = our_times.predictions(rows, H200)
    for which, most, most_weighted in ((False, 1.04, 1.03), (None, 1.04, 1.04)):
        some = our_times.half(rows, which)
        sums = our_times.weighted(some, predicted, layers)
        us, best = sums["together"]
        assert our_times.cost(some, predicted) <= most and us / best <= most_weighted, (which, sums)
        assert set(sums) == {*our_times.WEIGHTED, "together"} and best == pytest.approx(
            sum(sums[name][1] for name in our_times.WEIGHTED)
        )


@pytest.mark.parametrize("kernel, by_tma", [("conv_dense_sm90", True), ("conv_sparse24_sm90", False)])
def test_rows_are_beside_the_ends_and_loops_that_they_were_timed_with(kernel, by_tma):
    """Rows of before TMA stored: the price of that day; a later one, and what follows: today's, which is the lower. Of a 2:4
    tile whose end is the same its loop's is."""
    rows = [row for row in our_times.read("h200") if row.tactic.kernel == kernel and row.problem.n == 32]
    row = next(r for r in rows if ends.stored_by_tma(r.problem, r.tactic) == by_tma != linear(r.tactic.out))
    later = row._replace(run="2026-11-29T08:00+00:00")
    found, today = our_times.predictions([row, later], H200), predict_us(row.problem, row.tactic, H200)
    assert found[later] == today < found[row]


def test_halves_are_stable_disjoint_and_alike_for_both_kinds_of_weights():
    rows = our_times.read("h200")
    fitting, judging = (our_times.half(rows, which) for which in (True, False))
    assert {r.problem for r in fitting}.isdisjoint(r.problem for r in judging) and len(fitting) + len(judging) == len(rows)
    sizes = [len({r.problem for r in some}) for some in (fitting, judging)]
    assert min(sizes) > 0.4 * sum(sizes)
    found = {n: our_times.fits(ConvProblem(n, 256, 14, 14, 256, 3, 3, pad=(1, 1, 1, 1))) for n in (1, 2, 8, 16, 32)}
    assert found == {1: True, 2: False, 8: True, 16: True, 32: False}  # a hash of text: the same on every machine
    problems = [r.problem for r in rows if isinstance(r.problem, ConvProblem)]
    assert all(our_times.fits(p) == our_times.fits(replace(p, sparse24=not p.sparse24)) for p in problems)


def test_what_is_chosen_and_its_weight():
    """Of two problems, one chosen badly, in two layers of a network."""
    tactics = [Tactic.parse(f"conv_depthwise_{patch}__fp16.hwc8_fp16.hwc8") for patch in ("32c8x8_t2x4", "64c7x7_t1x7")]
    a, b = (ConvProblem(1, c, 8, 8, c, 3, 3, groups=c) for c in (32, 64))
    rows = [
        our_times.Timed(p, t, us, 0)
        for p, times in ((a, (2.0, 3.0)), (b, (8.0, 4.0)))
        for t, us in zip(tactics, times, strict=True)
    ]
    predicted = {row: float(row.tactic == tactics[1]) for row in rows}  # the first of both
    assert our_times.choices(rows, predicted) == {a: (2.0, 2.0), b: (8.0, 4.0)}
    assert our_times.cost(rows, predicted) == pytest.approx(math.sqrt(2))
    network = our_times.WEIGHTED[0]
    layers = [
        our_times.Layer(n, p, tactics[0], 1.0, count) for n, p, count in ((network, a, 1), (network, b, 2), ("x:1", b, 9))
    ]
    assert our_times.weighted(rows, predicted, layers) == {network: (18.0, 10.0), "together": (18.0, 10.0)}


AT_BATCH_1 = (
    *("resnet50", "tv_convnext_tiny", "timm_nfnet_l0", "timm_mobileone_s0"),
    *("tv_mobilenet_v3_large", "tv_efficientnet_b0", "tv_regnet_y_400mf"),
)


def test_plans_at_batch_1_are_predicted_within_a_tenth():
    found = our_times.at_batch_1(our_times.layers("h200"), H200)
    ratios = {network: guess / us for network, (guess, us) in found.items()}
    assert ratios.keys() == {f"{network}:1" for network in AT_BATCH_1}
    assert all(0.9 <= ratio <= 1.1 for ratio in ratios.values()), ratios


@pytest.mark.slow
def test_tactics_that_are_preferred_but_untimed_are_candidates_that_nobody_timed():
    timed = defaultdict(set)
    for row in our_times.read("h200"):
        timed[row.problem].add(row.tactic)
    found = our_times.untimed_preferred()
    assert found and len(set(found)) == len(found)
    for problem, tactic in found:
        assert tactic not in timed[problem] and tactic in candidates(problem, H200)
        alike = [t for t in timed[problem] if (t.ins, t.out, t.sparse) == (tactic.ins, tactic.out, tactic.sparse)]
        assert alike and all(predict_us(problem, tactic, H200) <= predict_us(problem, t, H200) for t in alike)


def test_clusters_of_eight_blocks_run_thirty_at_a_time():
    """32 images by clusters of 8 take two rounds, of 4 one: as many blocks are faster by half of the cluster."""
    average = PoolProblem(32, 480, 14, 14, "avg", 14, 14, (1, 1))
    one = CASES["squeeze_excite"][0]
    first, second = ConvProblem(32, 480, 1, 1, 120, 1, 1, epilogue=one.first.epilogue), ConvProblem(32, 120, 1, 1, 480, 1, 1)
    problem = SqueezeExciteProblem(average, first, second)
    tactic = Tactic.parse("squeeze_excite_8x1_cluster__fp16.hwc8_fp16.hwc8")
    eight, four = (predict_us(problem, Tactic(tactic.kernel, Parts(n, 1, True), tactic.ins, tactic.out), H200) for n in (8, 4))
    assert four < eight


def test_spacing_is_from_end_to_end():
    """Of two kernels of which the second begins early: 5 and 3 us, whatever their own durations are."""
    kernels = [["a", 0.0, 5.0, [1], [32]], ["b", 1.0, 7.0, [2], [32]]]
    rows = [[name, begin + 8 * k, us, grid, block] for k in range(timeline.REPLAYS) for name, begin, us, grid, block in kernels]
    assert timeline.spacing(rows) == [("a", [1], 5.0), ("b", [2], 3.0)]
    assert math.isclose(sum(us for *_, us in timeline.spacing(rows)), 8.0)
