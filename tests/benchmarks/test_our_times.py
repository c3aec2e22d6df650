"""Predictions beside what an H200 took (benchmarks/results/h200): the tactics that were timed, and layers in networks."""

import math
import statistics
from collections import defaultdict

import pytest

from benchmarks import our_times, timeline
from cuda_kernels.device import named
from tactics.families.squeeze_excite import CASES
from tactics.predict import predict_us
from tactics.problems.problem import ConvProblem, PoolProblem, SqueezeExciteProblem
from tactics.tactic import Parts, Tactic

H200 = named("h200")


@pytest.mark.slow
def test_tensor_core_tactics_are_predicted_within_a_tenth_in_the_median():
    """And with residuals, where ping-pong tiles were predicted to take two thirds of what they take."""
    ratios = defaultdict(list)
    for row in our_times.read("h200"):
        if row.tactic.kernel in our_times.TILED and isinstance(row.problem, ConvProblem):
            kind = row.tactic.kernel, row.tactic.gemm.pingpong, row.problem.epilogue.residual and row.problem.n > 1
            ratios[kind].append(row.us / predict_us(row.problem, row.tactic, H200))
    assert len(ratios) > 8 and all(0.9 < statistics.median(of) < 1.21 for of in ratios.values()), {
        kind: (len(of), statistics.median(of)) for kind, of in ratios.items()
    }


@pytest.mark.slow
def test_predictions_choose_tactics_that_are_near_the_best():
    rows = our_times.read("h200")
    line = our_times.chosen(rows, {row: predict_us(row.problem, row.tactic, H200) for row in rows})
    assert float(line.split()[3]) < 1.06, line


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
