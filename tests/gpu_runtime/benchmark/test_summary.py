"""What is told of measured times: pure functions, held to numpy and to values worked out by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest

from gpu_runtime.benchmark.records import Query, Settings, Trace
from gpu_runtime.benchmark.summary import averages, of_times, percentile, remarks, summarize


def query(start, h2d=1.0, compute=5.0, d2h=2.0, enqueue=0.5, stream=0):
    a, b = start + h2d, start + h2d + compute
    return Query(stream, start, start + 0.1, start + 0.1 + enqueue, b + d2h + 0.25, start, a, b, b + d2h)


@pytest.mark.parametrize("n", (1, 2, 3, 10, 99, 100, 101, 1525))
def test_statistics_are_numpys(n):
    times = np.random.default_rng(n).gamma(2, 3, n)
    found = of_times(list(times), (0, 50, 90, 99, 99.9, 100))
    assert (found.min, found.max) == (times.min(), times.max())
    assert found.mean == pytest.approx(times.mean()) and found.median == pytest.approx(np.median(times))
    assert found.variation == pytest.approx(100 * times.std() / times.mean())
    for p, value in zip((50, 90, 99, 99.9, 100), found.percentiles[1:], strict=True):
        assert value == np.percentile(times, p, method="inverted_cdf"), p
    assert found.percentiles[0] == times.min()


def test_percentiles_by_hand():
    """Of 1 to 100, p % are at most p, exactly: 1 - 0.99 is no 0.01 in binary."""
    hundred = [float(i) for i in range(1, 101)]
    assert [percentile(hundred, p) for p in (0, 1, 90, 95, 99, 99.5, 100)] == [1, 1, 90, 95, 99, 100, 100]
    assert [percentile([3.0], p) for p in (0, 50, 100)] == [3, 3, 3]
    assert [percentile([1.0, 2.0, 3.0, 4.0], p) for p in (25, 26, 50, 75, 76)] == [1, 2, 2, 3, 4]
    for wrong in (-0.1, 100.5, 101, math.nan):
        with pytest.raises(ValueError, match="expected 0 to 100, got"):
            percentile(hundred, wrong)


def test_times_of_nothing():
    assert of_times([0.0, 0.0], (99,)).variation == 0
    with pytest.raises(ValueError, match="at least one time"):
        of_times([])


def test_a_summary_by_hand():
    queries = (query(10), query(20, h2d=3, compute=7, enqueue=1.5), query(32.0, compute=6))
    found = summarize(Trace(queries, warm_up=4), (50,))
    assert (found.queries, found.warm_up) == (3, 4)
    assert found.wall_s == pytest.approx((32 + 1 + 6 + 2 + 0.25 - 10) / 1e3)
    assert found.throughput == pytest.approx(3 / found.wall_s)
    assert (found.latency.min, found.latency.max, found.latency.median) == (8, 12, 9)
    assert (found.enqueue.max, found.h2d.max, found.d2h.max) == (pytest.approx(1.5), 3, 2)
    assert found.compute.mean == 6 and found.total_compute_s == pytest.approx(0.018)
    assert found.compute.percentiles == (6,)
    with pytest.raises(ValueError, match="no query was measured"):
        summarize(Trace((), 7))


def test_streams_that_overlap_count_once():
    """Wall time is of all streams together, so two of them side by side double the throughput."""
    one = [query(10.0 * i) for i in range(20)]
    two = [query(10.0 * i, stream=1) for i in range(20)]
    alone, both = (summarize(Trace(tuple(q), 0)) for q in (one, one + two))
    assert both.wall_s == alone.wall_s and both.throughput == pytest.approx(2 * alone.throughput)


def test_averages_of_whole_groups():
    queries = [query(10.0 * i, compute=float(i), enqueue=2.0 * i) for i in range(7)]
    assert averages(queries, 3) == [(1, 4, 2), (4, 7, 8)]
    assert averages(queries, 8) == [] and len(averages(queries, 7)) == 1 and len(averages(queries, 1)) == 7


def told(settings=None, **times):
    spread = {"compute": (5.0, 5.0)} | times
    n = len(spread["compute"])
    queries = tuple(query(20.0 * i, **{k: v[i % len(v)] for k, v in spread.items()}) for i in range(n))
    return remarks(summarize(Trace(queries, 0)), settings or Settings())


def test_remarks():
    assert told() == []
    assert told(enqueue=(4.0,)) == [] and "waited for the host" in told(enqueue=(4.1,))[0]
    assert "without --noCudaGraph" in told(Settings(graph=False), enqueue=(4.1,))[0]
    assert told(h2d=(4.9,)) == [] and "Copies of inputs to" in told(h2d=(5.0,))[0]
    assert "Copies of outputs from" in told(d2h=(5.0,))[0]
    assert told(Settings(transfers=False), h2d=(0.0,), d2h=(0.0,)) == []
    assert told(compute=(5.0, 5.09)) == [] and "standard deviation is 2.0 %" in told(compute=(4.9, 5.1))[0]
    assert "2 streams share the GPU" in told(Settings(streams=2))[0]


@pytest.mark.parametrize(
    "wrong, words",
    [
        ({"iterations": 0}, "iterations: expected at least 1, got 0"),
        ({"streams": 0}, "streams: expected 1 to 64, got 0"),
        ({"streams": 65}, "1 to 64, got 65"),
        ({"warm_up_ms": -1}, "warm_up_ms: expected a time from 0 on"),
        ({"warm_up_ms": math.inf}, "warm_up_ms"),
        ({"duration_s": math.nan}, "duration_s"),
        ({"patience_s": 0}, "patience_s"),
    ],
)
def test_settings_that_mean_nothing(wrong, words):
    with pytest.raises(ValueError, match=words):
        replace(Settings(), **wrong)
    assert Settings(duration_s=math.inf).duration_s == math.inf
