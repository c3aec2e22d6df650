"""Plain records of a benchmark: its settings, queries, clocks and statistics.

Times are in milliseconds unless a name says otherwise, the unit of CUDA's events and of trtexec's lines and files.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

MOST_STREAMS = 64  # each has a context, with weights and activations of its own


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a benchmark, named as trtexec's options, with trtexec's defaults where its versions agree.

    A query is one inference. After `warm_up_ms` of unmeasured queries, queries are measured until each stream has
    `iterations` of them and `duration_s` have passed, both (math.inf: until interrupted). `streams`: contexts that run at
    once, each on a CUDA stream of its own; `threads`: each stream has a host thread of its own; `graph`: a CUDA graph runs
    instead of launches one by one; `transfers`: each query copies inputs to the GPU and outputs from it; `spin`: the host
    waits busily; `sleep_ms`: wait before the first query; `idle_ms`: wait after each query; `patience_s`: after this time in
    which no query ended, the GPU counts as stuck. Raises ValueError for a value out of range.
    """

    warm_up_ms: float = 200.0
    iterations: int = 10
    duration_s: float = 3.0
    streams: int = 1
    threads: bool = False
    graph: bool = True
    transfers: bool = True
    spin: bool = True
    sleep_ms: float = 0.0
    idle_ms: float = 0.0
    patience_s: float = 60.0

    def __post_init__(self) -> None:
        if self.iterations < 1:
            raise ValueError(f"iterations: expected at least 1, got {self.iterations}")
        if not 1 <= self.streams <= MOST_STREAMS:
            raise ValueError(f"streams: expected 1 to {MOST_STREAMS}, got {self.streams}")
        if not self.duration_s >= 0:
            raise ValueError(f"duration_s: expected a time from 0 on, got {self.duration_s}")
        for name, ms in (("warm_up_ms", self.warm_up_ms), ("sleep_ms", self.sleep_ms), ("idle_ms", self.idle_ms)):
            if not 0 <= ms < math.inf:
                raise ValueError(f"{name}: expected a time from 0 on, got {ms}")
        if not 0 < self.patience_s < math.inf:
            raise ValueError(f"patience_s: expected a time above 0, got {self.patience_s}")


class Query(NamedTuple):
    """One inference; all times are milliseconds since the loop began.

    Times by the host's clock: `begun`, when the host began to queue the query; `enqueue_start` and `enqueue_end`, begin and end
    of queueing the query's kernels; `ended`, when the host saw the query's end. The other times are by the GPU's clock, from
    events on the query's stream: copies of inputs (h2d) end when the kernels (compute) start, and copies of outputs (d2h) start
    when these end. Without data transfers, h2d and d2h take no time.
    """

    stream: int
    begun: float
    enqueue_start: float
    enqueue_end: float
    ended: float
    h2d_start: float
    compute_start: float
    compute_end: float
    d2h_end: float

    @property
    def enqueue_ms(self) -> float:
        return self.enqueue_end - self.enqueue_start

    @property
    def h2d_ms(self) -> float:
        return self.compute_start - self.h2d_start

    @property
    def compute_ms(self) -> float:
        return self.compute_end - self.compute_start

    @property
    def d2h_ms(self) -> float:
        return self.d2h_end - self.compute_end

    @property
    def latency_ms(self) -> float:
        return self.d2h_end - self.h2d_start


@dataclass(frozen=True, slots=True)
class Clocks:
    """The GPU's clocks while queries ran, as the management library (NVML) reported them.

    `samples`: the number of samples; `low_mhz` and `high_mhz`: the lowest and highest SM clock among them; `most_mhz`: the
    largest SM clock that the GPU supports; `held`: (reason for which the clock was held down, number of samples with this
    reason), the most frequent reason first.
    """

    samples: int
    low_mhz: int
    high_mhz: int
    most_mhz: int
    held: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Trace:
    """The measured `queries`, in the order in which they began.

    `warm_up`: the number of queries before these, which are not measured; `left_out`: the number of measured queries that are
    no longer kept, since there are too many; `interrupted`: whether the user stopped the run before the iterations and the
    duration of its settings; `clocks`: the GPU's clocks meanwhile, None where they could not be read.
    """

    queries: tuple[Query, ...]
    warm_up: int
    left_out: int = 0
    interrupted: bool = False
    clocks: Clocks | None = None


@dataclass(frozen=True, slots=True)
class Statistics:
    """Statistics of a list of times, in milliseconds.

    `percentiles`: one for each requested percentage, in the order of the request; `variation`: the standard deviation in
    percent of the mean.
    """

    min: float
    max: float
    mean: float
    median: float
    percentiles: tuple[float, ...]
    variation: float


@dataclass(frozen=True, slots=True)
class Summary:
    """The statistics of one measurement; its times are in milliseconds, except for `wall_s`.

    `queries`: the number of measured queries, `warm_up`: the number of queries before these. `wall_s`: seconds by the host's
    clock from the moment when the first query began to be queued to the end of the last query. `percents`: the percentages (0
    to 100) of the `percentiles` that each of the five Statistics has. `throughput`: queries per second of `wall_s`.
    """

    queries: int
    warm_up: int
    wall_s: float
    percents: tuple[float, ...]
    latency: Statistics
    enqueue: Statistics
    h2d: Statistics
    compute: Statistics
    d2h: Statistics

    @property
    def total_compute_s(self) -> float:
        return self.compute.mean * self.queries / 1e3

    @property
    def throughput(self) -> float:
        return self.queries / self.wall_s if self.wall_s else 0.0
