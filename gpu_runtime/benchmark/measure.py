"""The loop that times inferences on a GPU: an engine and arrays in, a `Trace` out.

Each context queues a query on its own stream: inputs from pinned memory to where the plan reads them, the plan, outputs back to
pinned memory, an event between any two of them. One query is queued ahead, so that the GPU need not wait for the host. All
that waits for the GPU is done by threads of their own (attend.py), while the caller looks at the clocks.
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
MOST_QUERIES = 500_000  # that are kept, in 150 MB; of more, the last
TO_DEVICE, TO_HOST = 1, 2  # cudaMemcpyKind
LEFT_BEHIND: list[object] = []  # contexts of a GPU that may hang, which nothing may close: that would wait for it


@dataclass(frozen=True, slots=True)
class Measured:
    """The result of a measurement: the `trace` of all queries, and the outputs of the first stream's last query by name.

    `nonfinite`: the layers that stored infinity or NaN.
    """

    trace: Trace
    outputs: Mapping[str, np.ndarray]
    nonfinite: tuple[str, ...]


class Copy(NamedTuple):
    """A copy of `nbytes` between addresses of pinned host memory and of the device. `host`: the array that keeps the host
    memory alive.
    """

    to: int
    source: int
    nbytes: int
    host: np.ndarray


class Slot:
    """The four CUDA events of one query: before all, after the inputs' copies, after the plan, after the outputs' copies.

    `busy`: the query may still be under way.
    """

    def __init__(self, cupy: Any, spin: bool) -> None:
        self.events = [cupy.cuda.Event(block=not spin) for _ in range(4)]
        self.enqueued = (0.0, 0.0, 0.0)
        self.busy = False


class Lane:
    """One stream of the benchmark: a context with its GPU, its copies and its queries' events.

    `now`: returns the milliseconds since the loop began, by the host's clock.
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
            context.replay()  # before anything is timed: whatever is loaded with the first run
            self.gpu.synchronize()

    def _copy(self, context: Context, edge: Bound, values: np.ndarray | None) -> Copy:
        """Returns a copy from new pinned memory, filled with `values`, to an input; if `values` is None, from an output to such
        memory.
        """
        host = np.frombuffer(self.gpu.cupy.cuda.alloc_pinned_memory(max(edge.nbytes, 1)), np.uint8, edge.nbytes)
        there, here = context.address(edge), host.ctypes.data
        if values is None:
            return Copy(here, there, edge.nbytes, host)
        host[:] = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        return Copy(there, here, edge.nbytes, host)

    def _move(self, copies: Sequence[Copy], kind: int) -> None:
        for copy in copies:
            self.gpu.cupy.cuda.runtime.memcpyAsync(copy.to, copy.source, copy.nbytes, kind, self.gpu.stream.ptr)

    def enqueue(self) -> None:
        """Queue one query, with the events of the next free slot."""
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
        """Wait for the oldest query under way and return its times; None if no query is under way.

        `began`: the event that was recorded on the stream when the loop began, from which the GPU's times count.
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
        # Offsets grow, and have only 32 bits; what lies between two events of a query is exact to half a microsecond.
        start = elapsed(began, before)
        compute_start = start + (elapsed(before, ready) if before is not ready else 0.0)
        compute_end = compute_start + elapsed(ready, done)
        end = compute_end + (elapsed(done, after) if after is not done else 0.0)
        return Query(self.number, *slot.enqueued, ended, start, compute_start, compute_end, end)

    def outputs(self) -> dict[str, np.ndarray]:
        """Returns the outputs of the last query by name, on the host. Without transfers in each query they are copied now."""
        if not self._settings.transfers:
            self._move(self._outs, TO_HOST)
            self.gpu.synchronize()
        pairs = zip(self.context.plan.outputs, self._outs, strict=True)
        return {o.name: from_memory(c.host.view(DTYPES[o.dtype]), o.format, o.shape4).reshape(o.shape).copy() for o, c in pairs}

    @property
    def full(self) -> bool:
        return all(slot.busy for slot in self._slots)


class Worker:
    """Queues and waits for the queries of some lanes until each has the iterations, and the time has passed, that Settings ask
    for.
    """

    def __init__(self, lanes: Sequence[Lane], settings: Settings, now: Callable[[], float], began: Any) -> None:
        self._lanes, self._settings, self._now, self._began = lanes, settings, now, began
        self.queries: deque[Query] = deque(maxlen=max(1, MOST_QUERIES // settings.streams * len(lanes)))
        self.warm_up = self.measured = 0
        self.stop = False

    def run(self) -> None:
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
    """Time queries of an engine on the GPU at hand.

    `inputs`: as for `Context.run`. `progress`: called for each kernel that is compiled before; `begins`: called when the
    loop begins. Ctrl-C ends the loop early and the queries so far count. Before the loop, and at the second time, it raises
    KeyboardInterrupt and leaves the GPU's work behind, as Stuck does: then end the process by os._exit. Raises ValueError
    without a GPU or for a wrong input, EngineError for an engine of another GPU or one that needs more memory than there is,
    Stuck if nothing proceeds, and any error that a query raised.
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

        self._device = cupy.cuda.Device()  # the caller's: each thread has a current one of its own
        self._start = 0.0
        self._contexts: list[Context] = []
        self._lanes: list[Lane] = []
        self._compiled = 0

    def prepare(self) -> None:
        """Makes the contexts, runs the plan once in each, and allocates their pinned memory. Raises Stuck if the first run does
        not end.
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
        return self._compiled + len(self._contexts) + len(self._lanes)

    def _count(self, done: int, total: int) -> None:
        self._compiled += 1
        if self._progress:
            self._progress(done, total)

    def _now(self) -> float:
        return 1e3 * (time.perf_counter() - self._start)

    def measure(self) -> Trace:
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
        gc.disable()  # it would stop the loop now and then, for longer the more queries are kept
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
        layers = dict.fromkeys(name for context in self._contexts for name in context.nonfinite())
        return Measured(trace, self._lanes[0].outputs(), tuple(layers))

    def close(self) -> None:
        for context in self._contexts:
            context.close()
