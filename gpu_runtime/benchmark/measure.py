"""The loop that times inferences on a GPU: an engine and arrays in, a `Trace` out.

Each context queues a query on its own stream: copies of the inputs from pinned memory to the plan's memory, the plan's
launches, copies of the outputs back to pinned memory, and an event before, between and after them. One query is queued ahead,
so that the GPU need not wait for the host. Threads of their own wait for the GPU (attend.py), while the caller looks at the
clocks.
"""

import gc
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from cuda_kernels import device as devices
from cuda_kernels.compile import Counter
from cuda_kernels.driver import explained
from cuda_kernels.launch import Cuda
from gpu_runtime.benchmark.attend import Stuck, attend
from gpu_runtime.benchmark.clocks import ClockWatch
from gpu_runtime.benchmark.records import Query, Settings, Trace
from gpu_runtime.engine import Engine
from gpu_runtime.errors import EngineError
from gpu_runtime.runtime.arrays import host_inputs
from gpu_runtime.runtime.context import Context
from gpu_runtime.runtime.plan_record import Bound
from tactics.format import DTYPES, from_memory, to_memory

AHEAD = 2  # queries of a stream that may be under way at once
MOST_QUERIES = 500_000  # queries that are kept, in 150 MB; later queries replace the first
TO_DEVICE, TO_HOST = 1, 2  # cudaMemcpyKind
LEFT_BEHIND: list[object] = []  # benches of a GPU that may hang: they are never closed, since closing waits for the GPU


@dataclass(frozen=True, slots=True)
class Measured:
    """The result of a measurement: the `trace` of all queries, and the outputs of the first stream's last query by name.

    `nonfinite`: the layers that stored infinity or NaN.
    """

    trace: Trace
    outputs: Mapping[str, np.ndarray]
    nonfinite: tuple[str, ...]


class Copy(NamedTuple):
    """A copy of `nbytes` from address `source` to address `to`, one in pinned host memory, the other on the device. `host`: the
    array that keeps the host memory alive.
    """

    to: int
    source: int
    nbytes: int
    host: np.ndarray


class Slot:
    """The four CUDA events of one query: before all, after the inputs' copies, after the plan, after the outputs' copies.

    `spin`: the host waits for an event busily. `enqueued`: the query's begun, enqueue_start and enqueue_end; `busy`: the query
    may still be under way.
    """

    def __init__(self, cupy: Any, spin: bool) -> None:
        self.events = [cupy.cuda.Event(block=not spin) for _ in range(4)]
        self.enqueued = (0.0, 0.0, 0.0)
        self.busy = False


class Lane:
    """One stream of the benchmark: a context with its GPU, its copies and its queries' events.

    `number`: of the stream, from 0; `inputs`: arrays by name; `now`: returns the milliseconds since the loop began, by the
    host's clock. A lane runs the plan once when it is made.
    """

    def __init__(
        self, number: int, context: Context, inputs: Mapping[str, np.ndarray], settings: Settings, now: Callable[[], float]
    ) -> None:
        assert isinstance(context.gpu, Cuda)  # device="cuda"
        self.number, self.context, self.gpu = number, context, context.gpu
        self._settings, self._now = settings, now
        with self.gpu.here():
            self._slots = deque(Slot(self.gpu.cupy, settings.spin) for _ in range(AHEAD))
            given = [(i, inputs[i.name].reshape(i.shape4)) for i in context.plan.inputs]
            self._ins = [self._copy(context, i, to_memory(x, i.format)) for i, x in given]
            self._outs = [self._copy(context, o, None) for o in context.plan.outputs]
            self._move(self._ins, TO_DEVICE)
            context.replay()  # the first run, which loads kernels, is not timed
            self.gpu.synchronize()

    def _copy(self, context: Context, edge: Bound, values: np.ndarray | None) -> Copy:
        """Returns a copy from new pinned memory, filled with `values`, to an input (`edge`); if `values` is None, from an
        output to new pinned memory.
        """
        host = np.frombuffer(self.gpu.cupy.cuda.alloc_pinned_memory(max(edge.nbytes, 1)), np.uint8, edge.nbytes)
        there, here = context.address(edge), host.ctypes.data
        if values is None:
            return Copy(here, there, edge.nbytes, host)
        host[:] = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        return Copy(there, here, edge.nbytes, host)

    def _move(self, copies: Sequence[Copy], kind: int) -> None:
        """Queues the copies on the lane's stream. `kind`: TO_DEVICE or TO_HOST."""
        for copy in copies:
            self.gpu.cupy.cuda.runtime.memcpyAsync(copy.to, copy.source, copy.nbytes, kind, self.gpu.stream.ptr)

    def enqueue(self) -> None:
        """Queues one query on the stream, with the events of the next slot, which must not be busy."""
        slot = self._slots[0]
        before, ready, done, after = slot.events
        stream, transfers = self.gpu.stream, self._settings.transfers
        begun = self._now()
        if transfers:
            before.record(stream)
            self._move(self._ins, TO_DEVICE)
        ready.record(stream)
        start = self._now()
        self.context.replay()
        end = self._now()
        done.record(stream)
        if transfers:
            self._move(self._outs, TO_HOST)
            after.record(stream)
        slot.enqueued, slot.busy = (begun, start, end), True
        self._slots.rotate(-1)

    def finish(self, began: Any) -> Query | None:
        """Waits for the oldest query under way and returns its times; None if no query is under way.

        `began`: the event, recorded when the loop began, from which the GPU's times count.
        """
        slot = next((s for s in self._slots if s.busy), None)
        if slot is None:
            return None
        before, ready, done, after = slot.events
        if not self._settings.transfers:
            before, after = ready, done
        after.synchronize()
        ended, elapsed = self._now(), self.gpu.cupy.cuda.get_elapsed_time
        slot.busy = False
        # Offsets from `began` grow, and have only 32 bits; times between two events of a query are exact to half a microsecond.
        start = elapsed(began, before)
        compute_start = start + (elapsed(before, ready) if before is not ready else 0.0)
        compute_end = compute_start + elapsed(ready, done)
        end = compute_end + (elapsed(done, after) if after is not done else 0.0)
        return Query(self.number, *slot.enqueued, ended, start, compute_start, compute_end, end)

    def outputs(self) -> dict[str, np.ndarray]:
        """Returns the outputs of the last query by name, on the host; they are copied now if queries run without transfers."""
        if not self._settings.transfers:
            self._move(self._outs, TO_HOST)
            self.gpu.synchronize()
        pairs = zip(self.context.plan.outputs, self._outs, strict=True)
        return {o.name: from_memory(c.host.view(DTYPES[o.dtype]), o.format, o.shape4).reshape(o.shape).copy() for o, c in pairs}

    @property
    def full(self) -> bool:
        """Whether no query can be queued before the oldest query under way is finished."""
        return all(slot.busy for slot in self._slots)


class Worker:
    """A loop over lanes that queues their queries and waits for them, until the iterations and the duration of the settings.

    `began`: as for Lane.finish. `queries`: the measured queries that are kept; `warm_up`, `measured`: the number of unmeasured
    and of measured queries so far; `stop`: set it to end the loop early.
    """

    def __init__(self, lanes: Sequence[Lane], settings: Settings, now: Callable[[], float], began: Any) -> None:
        self._lanes, self._settings, self._now, self._began = lanes, settings, now, began
        self.queries: deque[Query] = deque(maxlen=max(1, MOST_QUERIES // settings.streams * len(lanes)))
        self.warm_up = self.measured = 0
        self.stop = False

    def run(self) -> None:
        """Runs the loop in the calling thread. Raises the errors of the GPU, with an explanation."""
        with self._lanes[0].gpu.here(), explained():
            self._run()

    def _run(self) -> None:
        s, rounds, end_ms = self._settings, 0, math.inf
        while not self.stop and (rounds < s.iterations or self._now() < end_ms):
            if (now := self._now()) >= s.warm_up_ms:
                end_ms = end_ms if rounds else now + 1e3 * s.duration_s
                rounds += 1
            for lane in self._lanes:
                lane.enqueue()
            for lane in self._lanes:
                if lane.full:
                    self._keep(lane.finish(self._began))
            if s.idle_ms:
                time.sleep(s.idle_ms / 1e3)
        for _ in range(AHEAD):
            for lane in self._lanes:
                self._keep(lane.finish(self._began))

    def _keep(self, query: Query | None) -> None:
        """Counts a query, and keeps it unless it began during the warm-up; None: does nothing."""
        if query is None:
            return
        if query.begun < self._settings.warm_up_ms:
            self.warm_up += 1
        else:
            self.measured += 1
            self.queries.append(query)


def measure(
    engine: Engine,
    inputs: Mapping[str, np.ndarray],
    settings: Settings,
    *,
    progress: Counter | None = None,
    begins: Callable[[], None] = lambda: None,
) -> Measured:
    """Times queries of an engine on the GPU at hand and returns the measurement.

    `inputs`: as for `Context.run`. `progress`: called for each kernel that is compiled before the loop; `begins`: called when
    the loop begins. Ctrl-C ends the loop early and the queries so far count. Before the loop, and at the second time, Ctrl-C
    raises KeyboardInterrupt and leaves the GPU's work behind, as Stuck does: then end the process by os._exit. Raises
    ValueError without a GPU or for a wrong input, EngineError for an engine that is for another GPU or needs more memory than
    there is, Stuck if no query ends in time, and any error that a query raised.
    """
    if why := devices.why_no_gpu():
        raise ValueError(f"times are measured on a GPU only, and no GPU can be used: {why}")
    arrays = host_inputs(engine.plan.inputs, inputs)
    bench = Bench(engine, arrays, settings, progress)
    try:
        bench.prepare()
        begins()
        return bench.result(bench.measure())
    except (Stuck, KeyboardInterrupt):
        LEFT_BEHIND.append(bench)
        raise
    finally:
        if bench not in LEFT_BEHIND:
            bench.close()


class Bench:
    """The contexts of an engine, one per stream, ready to be timed; `measure` describes the parameters."""

    def __init__(self, engine: Engine, inputs: Mapping[str, np.ndarray], settings: Settings, progress: Counter | None) -> None:
        self._engine, self._inputs, self._settings, self._progress = engine, inputs, settings, progress
        import cupy

        self._device = cupy.cuda.Device()  # the caller's current device: each thread has a current device of its own
        self._start = 0.0
        self._contexts: list[Context] = []
        self._lanes: list[Lane] = []
        self._compiled = 0

    def prepare(self) -> None:
        """Makes the contexts, runs the plan once in each, and allocates their pinned memory. Raises Stuck if the first run does
        not end, EngineError if a context cannot be made.
        """
        attend([self._prepare], signs=self._prepared, patience_s=self._settings.patience_s, what="the first run did not end")

    def _prepare(self) -> None:
        for i in range(self._settings.streams):
            try:
                with self._device:
                    context = self._engine.context(device="cuda", graph=self._settings.graph, progress=self._count)
            except EngineError as e:
                raise EngineError(f"stream {i + 1} of {self._settings.streams}: {e}" if i else str(e)) from None
            self._contexts.append(context)
            self._lanes.append(Lane(i, context, self._inputs, self._settings, self._now))

    def _prepared(self) -> int:
        """Returns a count that grows as `prepare` proceeds."""
        return self._compiled + len(self._contexts) + len(self._lanes)

    def _count(self, done: int, total: int) -> None:
        self._compiled += 1
        if self._progress:
            self._progress(done, total)

    def _now(self) -> float:
        return 1e3 * (time.perf_counter() - self._start)

    def measure(self) -> Trace:
        """Runs the loop, in one thread or in one per stream, and returns the trace. Raises as the function `measure`."""
        settings, gpu = self._settings, self._lanes[0].gpu
        time.sleep(settings.sleep_ms / 1e3)
        with gpu.here():
            watch = ClockWatch(gpu.cupy.cuda.Device().pci_bus_id)
            began = gpu.cupy.cuda.Event()
            began.record(gpu.stream)
            began.synchronize()
        self._start = time.perf_counter()
        groups = [[lane] for lane in self._lanes] if settings.threads else [self._lanes]
        workers = [Worker(group, settings, self._now, began) for group in groups]

        def stop() -> None:
            for worker in workers:
                worker.stop = True

        def ended() -> int:
            return sum(w.warm_up + w.measured for w in workers)

        collects = gc.isenabled()
        gc.disable()  # a garbage collection stops the loop, for longer the more queries are kept
        try:
            runs = [w.run for w in workers]
            interrupted = attend(
                runs, signs=ended, patience_s=settings.patience_s, what="no query ended", stop=stop, look=watch.look
            )
        finally:
            if collects:
                gc.enable()
        queries = sorted((q for w in workers for q in w.queries), key=lambda q: q.h2d_start)
        left_out = sum(w.measured for w in workers) - len(queries)
        return Trace(tuple(queries), sum(w.warm_up for w in workers), left_out, interrupted, watch.seen())

    def result(self, trace: Trace) -> Measured:
        """Returns the measurement with this trace, the outputs and the layers that stored infinity or NaN."""
        layers = dict.fromkeys(name for context in self._contexts for name in context.nonfinite())
        return Measured(trace, self._lanes[0].outputs(), tuple(layers))

    def close(self) -> None:
        for context in self._contexts:
            context.close()
