"""Statistics of the times of queries, and remarks on the statistics: pure functions of lists of times, in milliseconds."""

import math
import statistics
from collections.abc import Sequence
from fractions import Fraction

from gpu_runtime.benchmark.records import Query, Settings, Statistics, Summary, Trace
from gpu_runtime.runtime.plan_record import EngineRecord
from tactics.measure.timing import Time
from tactics.predict import predict_us, sigma

ENQUEUE_BOUND = 0.8  # enqueue time / compute time, medians: above it the GPU may wait for the host (trtexec)
UNSTABLE = 1.0  # percent of variation from which compute times count as unstable (trtexec 8.6; later ones: 2.5)


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Returns the smallest of the times (ascending) that at least `percent` of the times do not exceed (nearest rank), as
    trtexec computes it.

    floor((1 - percent / 100) * n) of the n times lie behind it. trtexec's arithmetic in 32 bits is off by one for some n;
    this is exact. Raises ValueError for a percent outside of 0 to 100.

    >>> percentile([1.0, 2.0, 3.0, 4.0], 50), percentile([1.0, 2.0, 3.0, 4.0], 95)
    (2.0, 4.0)
    """
    if not 0 <= percent <= 100:
        raise ValueError(f"percentile: expected 0 to 100, got {percent:g}")
    behind = math.floor((1 - Fraction(str(percent)) / 100) * len(ordered))
    return ordered[max(len(ordered) - 1 - behind, 0)]


def of_times(times: Sequence[float], percents: Sequence[float] = ()) -> Statistics:
    """Returns the statistics of one or more times in milliseconds, with a percentile for each of `percents`, 0 to 100.

    `variation` is 0 if the mean is 0. Raises ValueError without a time.
    """
    if not times:
        raise ValueError("expected at least one time, got none")
    ordered, mean = sorted(times), statistics.fmean(times)
    variation = 100 * statistics.pstdev(times, mean) / mean if mean else 0.0
    found = tuple(percentile(ordered, p) for p in percents)
    return Statistics(ordered[0], ordered[-1], mean, statistics.median(ordered), found, variation)


def summarize(trace: Trace, percents: Sequence[float] = (90, 95, 99)) -> Summary:
    """Returns the statistics of all measured queries. `percents`: the percentages, 0 to 100, of the percentiles to compute.
    Raises ValueError if no query was measured.
    """
    queries = trace.queries
    if not queries:
        raise ValueError("no query was measured before the end: give a shorter --warmUp, or wait longer")
    wall_s = (max(q.ended for q in queries) - min(q.begun for q in queries)) / 1e3
    times = zip(*((q.latency_ms, q.enqueue_ms, q.h2d_ms, q.compute_ms, q.d2h_ms) for q in queries), strict=True)
    return Summary(len(queries), trace.warm_up, wall_s, tuple(percents), *(of_times(each, percents) for each in times))


def averages(queries: Sequence[Query], runs: int) -> list[tuple[float, ...]]:
    """Returns the mean (compute, latency, enqueue) times in ms of each group of `runs` consecutive queries; a shorter last
    group is left out.
    """
    whole = [queries[i : i + runs] for i in range(0, len(queries) - runs + 1, runs)]
    times = ([(q.compute_ms, q.latency_ms, q.enqueue_ms) for q in part] for part in whole)
    return [tuple(map(statistics.fmean, zip(*part, strict=True))) for part in times]


def remarks(found: Summary, settings: Settings) -> list[str]:
    """Returns warnings, a sentence each, in the cases in which trtexec warns, and one on the latency of several streams."""
    notes, compute = [], found.compute.median
    if found.enqueue.median > ENQUEUE_BOUND * compute:
        cure = (
            "without --noCudaGraph the host enqueues less" if not settings.graph else "a larger batch gives the GPU more work"
        )
        text = "The GPU may have waited for the host, which takes about as long to enqueue kernels as the GPU to run them"
        notes.append(f"{text}: {cure}")
    for what, times in (("inputs to", found.h2d), ("outputs from", found.d2h)):
        if settings.transfers and times.median >= compute:
            notes.append(f"Copies of {what} the GPU take as long as its kernels: --noDataTransfers leaves them out")
    if found.compute.variation > UNSTABLE:
        notes.append(
            f"GPU Compute Time varies: its standard deviation is {found.compute.variation:.1f} % of the mean; to reduce "
            "it, lock the clocks (nvidia-smi --lock-gpu-clocks) and stop other work on the GPU"
        )
    if settings.streams > 1:
        notes.append(
            f"{settings.streams} streams share the GPU, so each query takes longer than it does alone: compare "
            "the throughput, since latency is measured on a busy GPU"
        )
    return notes


def predicted(record: EngineRecord) -> Time:
    """Returns the predicted time of the kernels of one query, the sum over the layers, with the range that its error allows.

    If the engine's times were measured, the time of each layer is predicted now; else the time is the engine's own prediction.
    """
    device, pairs = record.device, [(e.problem, e.tactic) for e in record.plan.layers if e.problem and e.tactic]
    times = [predict_us(problem, tactic, device) for problem, tactic in pairs]
    us = record.plan.solution.total_us if record.timing.is_predicted else sum(times)
    most = math.exp(sum(t * sigma(*pair, device) for t, pair in zip(times, pairs, strict=True)) / (sum(times) or 1.0))
    return Time(us, us / most, us * most)
