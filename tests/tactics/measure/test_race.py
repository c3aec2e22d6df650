"""Who gets how many samples: the decisions of a race, without a child process."""

import random
import statistics

import pytest

from tactics.measure import race as race_module
from tactics.measure.race import FAR, FIRST_FAR, MOST_IN_CELL, STEPS, Race, quantiles


def run(times, cells=None, *, noise=0.03, begun=None, known=None, seed=0):
    """Tactic -> its samples, once nobody wants more; and the requests."""
    rng, asked = random.Random(seed), []
    race = Race(cells or dict.fromkeys([*times, *(known or {})], "cell"), begun or {}, known or {})
    while True:
        race.settle()
        names, count = race.request()
        if not count:
            return race.samples, asked
        asked.append((names, count))
        for name in names:
            race.add(name, [times[name] * rng.gauss(1, noise) for _ in range(count)])


def counts(samples):
    return {name: len(found) for name, found in samples.items()}


def test_the_first_request_is_one_sample_of_each():
    assert run({"a": 10.0, "b": 11.0})[1][0] == (["a", "b"], 1)


def test_who_is_far_behind_is_asked_once_and_the_best_until_it_is_known():
    found = counts(run({"best": 100.0, "near": 101.0, "half": 160.0, "far": 1100.0})[0])
    assert found["far"] == 1 and found["half"] == 2 and found["best"] >= found["near"] > MOST_IN_CELL


def test_short_kernels_have_more_room():
    assert counts(run({"a": 5.0, "b": 8.0})[0])["b"] > 2 == counts(run({"a": 50.0, "b": 80.0})[0])["b"]


def test_a_quiet_gpu_is_asked_less_often():
    times = {"a": 100.0, "b": 103.0, "c": 108.0}
    loud, quiet = (sum(counts(run(times, noise=noise)[0]).values()) for noise in (0.05, 0.005))
    assert quiet <= 12 < loud


def test_the_best_of_another_cell_gets_what_a_cell_gets():
    times = {"a": 100.0, "b": 150.0}
    found = counts(run(times, {"a": "one", "b": "other"}, noise=0.05)[0])
    assert found["b"] == MOST_IN_CELL and found["a"] == STEPS[-1]


def test_fewer_steps_end_a_race_too(monkeypatch):
    """None is left that may have no more samples, but is not over."""
    monkeypatch.setattr(race_module, "STEPS", (1, 2, 3))
    times, cells = {"a": 100.0, "b": 140.0}, {"a": "one", "b": "other"}
    race = Race(cells, {name: [us, 1.01 * us, 0.99 * us] for name, us in times.items()}, {})
    assert set(race.settle()) == {"a", "b"} and race.request() == ([], 0)


def test_what_is_known_counts_and_gets_no_sample():
    samples, _ = run({"b": 100.0 * (FAR + 0.2)}, {"a": 0, "b": 0}, known={"a": (100.0, 30)})
    assert counts(samples) == {"b": 2}
    assert counts(run({"b": 110.0 * FIRST_FAR}, {"a": 0, "b": 0}, known={"a": (100.0, 30)})[0]) == {"b": 1}


def test_a_race_that_was_cut_off_goes_on_where_it_stood():
    four = [100.0, 104.0, 96.0, 101.0]
    race = Race(dict.fromkeys("abc", 0), dict.fromkeys("abc", four), {})
    assert race.settle() == [] and race.request() == (["a", "b", "c"], 3)
    late = Race(dict.fromkeys("abc", 0), {"a": four, "b": four}, {})
    assert late.settle() == [] and late.request() == (["c"], 1)


def test_a_tactic_that_failed_is_asked_no_more():
    race = Race({"a": 0, "b": 0}, {}, {})
    race.drop("a")
    assert race.request() == (["b"], 1)
    race.drop("b")
    assert race.request() == ([], 0) and race.settle() == []


def test_an_outlier_moves_no_time():
    assert quantiles([5.0, 5.0, 50.0])[1] == 5.0 and quantiles([1.0, 5.0, 5.2, 50.0])[1] == 5.0
    assert quantiles([5.0, 20.0])[1] == quantiles([5.0, 5.0, 20.0, 20.0])[1] == 5.0


@pytest.mark.parametrize("n", range(1, 40))
def test_the_time_lies_between_its_quantiles(n):
    for seed in range(20):
        samples = [random.Random(seed * 100 + i).choice((1.1, 1.1, 2.3, 7.7)) for i in range(n)]
        low, us, high = (round(v, 4) for v in quantiles(samples))
        assert min(samples) <= low <= us <= high <= max(samples)


def test_the_time_is_nearer_to_the_truth_than_the_median_is():
    rng = random.Random(1)
    draws = [[rng.gauss(100, 5) for _ in range(20)] for _ in range(2000)]
    mine, median = (statistics.pstdev(f(d) for d in draws) for f in (lambda d: quantiles(d)[1], statistics.median))
    assert mine < 0.95 * median
