"""Runs an engine: device memory, kernels, and one call from arrays to arrays. Needs neither onnx nor the planner."""

from __future__ import annotations

import concurrent.futures
import os
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial, wraps
from itertools import accumulate
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np

from cuda_kernels.compile import Compiled, Counter, compile_many, source_hash
from cuda_kernels.driver import explained
from cuda_kernels.launch import Cuda, Kernel, open_gpu
from gpu_runtime.errors import EngineError, QueueFullError
from gpu_runtime.progress import warn
from gpu_runtime.runtime import future as futures
from gpu_runtime.runtime import sizes
from gpu_runtime.runtime import steps as launched
from gpu_runtime.runtime.arrays import check_names, shape_of
from gpu_runtime.runtime.compatibility import check_source
from gpu_runtime.runtime.feeds import Checked, Key, Ready, Rows
from gpu_runtime.runtime.future import Ran, RunFuture
from gpu_runtime.runtime.plan_record import Bound, EngineData, PlanRecord
from gpu_runtime.runtime.point import NAN_HALF, Point, Shared, kernel_keys
from gpu_runtime.runtime.steps import kernel_key
from gpu_runtime.text import printable, size_text


def _ranges() -> Callable[[str], AbstractContextManager[Any]]:
    """Returns a function from a name to a context manager, an NVTX range of that name; without package nvtx it warns and the
    function does nothing.
    """
    try:
        import nvtx
    except ImportError:
        warn("no NVTX ranges: package nvtx is not installed (pip install nvtx)")
        return nullcontext
    return partial(nvtx.annotate, domain="gpu_runtime")


P = ParamSpec("P")
R = TypeVar("R")
AHEAD = 1.3  # the GPU is kept busy before a run for this multiple of the host's time to queue it


def _one_thread(method: Callable[Concatenate[Context, P], R]) -> Callable[Concatenate[Context, P], R]:
    """Decorates a method to run in one thread at a time, on the context's GPU, only while the context is open, and after the
    runs of its own thread.
    """

    @wraps(method)
    def locked(self: Context, *args: P.args, **options: P.kwargs) -> R:
        with self._entered(), explained():
            self._settle()
            return method(self, *args, **options)

    return locked


class Context:
    """Runs an engine: owns the activation and weight memory, the kernels and, on a GPU, a stream and CUDA graphs.

    >>> with engine.context() as ctx:
    ...     outputs = ctx.run({"x": x})
    >>> outputs["y"].shape
    (2, 16, 6, 6)

    Threads may share a context: its calls run one after the other, because they share its memory. `nonfinite` and `tensor`
    describe the last run, so threads that call them need a context each; so do threads that run at the same time.

    `device`: None runs on a GPU if there is one, otherwise in the emulator; "emulator" always emulates; "cuda" runs on the
    current GPU, "cuda:1" on that one. The first run records a CUDA graph, with `warm=True` it is recorded before. `graph=False`
    launches kernels one by one (debugging). `nvtx=True` does so too, each layer inside an NVTX range of its name, for Nsight
    Systems; without package nvtx it only warns. `poison=True` fills free memory of the plan with NaN, so that a read of a dead
    tensor shows. `max_queued`: the most runs of `run_async` that have not ended. `progress(done, total)` reports compiled
    kernels. Other options go to the emulator and have no effect on a GPU: `checks=False` is faster, `threads` is the number of
    its threads (None: one per core), `async_mode`, `seed` and `resident_blocks` are from cuda_kernels.emulator.Options. Raises
    EngineError if the engine is for another device, or if there is no such GPU.

    An engine of a range has a plan for each of some batches. The smallest one with room runs, and copies of the last row fill
    it; outputs have the rows of the inputs. `plan`, `replay`, `outputs`, `tensor` and `trace` are of the plan of the last run.

    Close a context, or use it in a `with`, to free its memory. A context that is garbage-collected while open gives a
    ResourceWarning; one that lives until the script ends does not. It belongs to the process that made it, not to a forked
    one. Contexts of one engine share its weights on each device.
    """

    _closed = True  # until the context has resources

    def __init__(
        self,
        engine: EngineData,
        *,
        device: str | None = None,
        graph: bool = True,
        warm: bool = False,
        nvtx: bool = False,
        poison: bool = False,
        max_queued: int = 32,
        progress: Counter | None = None,
        **options: Any,
    ) -> None:
        launched.check_arguments(engine, options)
        if not isinstance(max_queued, int) or max_queued < 1:
            raise ValueError(f"max_queued: expected a whole number of runs, 1 or more, got {max_queued!r}")
        self.engine, self._max_queued = engine, max_queued
        self._process = os.getpid()
        with launched.chosen(device) as kind:
            self.device = launched.device_for(engine, kind)
            check_source(engine.record, source_hash())
            plans = launched.plans_of(engine)
            self.gpu = open_gpu(self.device, **options)
        self._lock = threading.RLock()
        self._queue: deque[Callable[[], bool]] = deque()  # whether each run of run_async has ended, in their order
        self._thread: ThreadPoolExecutor | None = None  # run_async's thread in the emulator, and its last run
        self._last: concurrent.futures.Future[Ran] | None = None
        self._nonfinite: list[str] = []
        with self.gpu.here():
            self._open(plans, graph, warm, nvtx, poison, progress)
        self._closed = False

    def _open(
        self, plans: Sequence[PlanRecord], graph: bool, warm: bool, nvtx: bool, poison: bool, progress: Counter | None
    ) -> None:
        """Allocates memory, loads kernels, and makes a point (a plan ready to launch) for each plan. Parameters as for
        Context.
        """
        ranges = _ranges() if nvtx else nullcontext
        graph = graph and not nvtx and not poison
        weights, arena, self._flags = self._allocate(plans)
        shared = Shared(self.gpu, weights, arena, self._load(plans, progress), graph, poison, ranges)
        self._arena = arena
        firsts = [0, *accumulate(len(plan.steps) for plan in plans)]
        spare = self._flags + 4 * firsts[-1]
        rows = [Rows(*sizes.batched(self.engine.record, number)) for number in range(len(plans))]
        self._points = [Point(shared, p, r, self._flags + 4 * i, spare) for p, r, i in zip(plans, rows, firsts, strict=False)]
        self._point = self._points[self.engine.record.shown]  # of the last run
        self._point.enter()
        if warm and graph and not self.emulated:
            for point in self._points:
                point.enter()
                point.record(calls=False)
            self.gpu.zero(self._flags, 4 * firsts[-1])  # recording ran kernels on arbitrary memory
            self._point.enter()

    def _allocate(self, plans: Sequence[PlanRecord]) -> tuple[int, int, int]:
        """Returns the addresses of weights, activations, and flags of infinity or NaN: a 32-bit word per step, and a
        spare one.
        """
        weights, most = self.engine.weights, max(plan.memory.activation_bytes for plan in plans)
        words = 1 + sum(len(plan.steps) for plan in plans)
        try:
            stored = self.gpu.share(weights)
            arena, flags = self.gpu.allocate(most), self.gpu.allocate(4 * words)
            self.gpu.write(arena, np.full(-(-most // 2), NAN_HALF).view(np.uint8)[:most])
        except (MemoryError, OverflowError, ValueError):
            raise EngineError(
                f"the engine takes {weights.nbytes} bytes for weights and {most} for activations, "
                "more than are available: free memory, or build it for smaller inputs"
            ) from None
        self.gpu.zero(flags, 4 * words)
        return stored, arena, flags

    @property
    def plan(self) -> PlanRecord:
        """The plan of the last run; before the first run, the plan that the engine shows."""
        return self._point.plan

    @property
    def is_open(self) -> bool:
        """Whether the context is open: until `close`, or the end of its `with`."""
        return not self._closed

    @property
    def emulated(self) -> bool:
        return not isinstance(self.gpu, Cuda)

    @_one_thread
    def run(
        self, inputs: Mapping[str, object], *, out: Mapping[str, Any] | None = None, stream: object = None
    ) -> dict[str, Any]:
        """Arrays by input name -> arrays by output name, in the engine's order.

        Arrays have the shape and dtype of the engine's input (`engine.inputs`); the engine converts memory formats. Arrays are
        NumPy's, objects that NumPy reads, lists of numbers, or on a GPU CuPy's or objects with DLPack or
        __cuda_array_interface__. NumPy in gives NumPy out. If every input is on the GPU, the outputs are CuPy arrays and
        nothing waits: outputs are ready, and inputs may be changed or freed, in the order of `stream` (CuPy's, PyTorch's or a
        handle; by default CuPy's current stream) and of the streams that arrays name, as PyTorch's do.

        `out`: arrays by output name, of the same kinds, to fill and return instead of new ones: C-contiguous, writable and
        without overlap; an input may be one of them.

        >>> y = np.empty((2, 16, 6, 6), np.float32)
        >>> with engine.context() as ctx:
        ...     ctx.run({"x": x}, out={"y": y})["y"] is y
        True

        Warns of layers that stored infinity or NaN, even if a later Clip or Sigmoid hides it; with all outputs on the GPU call
        `nonfinite` instead. Raises ValueError or TypeError for a missing or unknown name, a wrong shape or dtype, or an object
        that is no array.
        """
        ran = self._run(inputs, out, stream)
        if ran.warning:
            warn(ran.warning)
        return ran.outputs

    def run_async(
        self, inputs: Mapping[str, object], *, out: Mapping[str, Any] | None = None, stream: object = None
    ) -> RunFuture:
        """As `run`, but it returns a future when the run is queued, for host arrays too; `result()` waits for the outputs.

        A context executes its runs one after the other, in the order of the calls, `run` included. Each run has its own inputs
        and outputs: host arrays may change as soon as this returns, GPU arrays in the order of the caller's streams, and all
        are kept alive until then. `result()` fills host arrays of `out`. Invalid arguments raise here; errors of the run are
        raised by `result()`. The future's `nonfinite`, not the context's, names the layers that stored infinity or NaN. In the
        emulator a thread of the context executes the runs. Raises QueueFullError while `max_queued` runs have not ended.
        """
        with self._entered():
            while self._queue and self._queue[0]():
                self._queue.popleft()
            if len(self._queue) >= self._max_queued:
                raise QueueFullError(
                    f"run_async: {len(self._queue)} runs have not ended, expected fewer than max_queued={self._max_queued}: "
                    "wait for a result(), or give the context a larger max_queued"
                )
            if isinstance(self.gpu, Cuda):
                try:
                    return self._queued(self.gpu, inputs, out, stream)
                except (EngineError, MemoryError, RuntimeError) as e:  # errors of the plan or the GPU, not of the arguments
                    return futures.failed(e)
            _, call = self._checked(inputs, out)
            given = {name: g.array.copy() for name, g in call.given.items()}
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, thread_name_prefix="gpu_runtime")
            self._last = self._thread.submit(self._run_behind, given, out)
            self._queue.append(futures.ended(self._last))
            return futures.of_thread(self._last, self)

    def _run(self, inputs: Mapping[str, object], out: Mapping[str, Any] | None, stream: object) -> Ran:
        """Runs once and returns the results; waits for the end of the run if an output goes to the host."""
        with self._bound(inputs, out, stream) as ready:
            if not isinstance(self.gpu, Cuda):
                self.gpu.stats.clear()  # keep only the last run's: a server's would grow without end
            self._nonfinite = []
            self._replay()
            outputs = ready.fetch()
        layers = self._read_nonfinite() if ready.waits else []
        return Ran({**outputs, **(out or {})}, layers, launched.warning(self.plan, layers, ready.on_host, outputs))

    def _run_behind(self, inputs: Mapping[str, object], out: Mapping[str, Any] | None) -> Ran:
        """Runs once, in the context's own thread."""
        ran = self._run(inputs, out, None)
        self._nonfinite = []
        return ran

    def _checked(self, inputs: Mapping[str, object], out: Mapping[str, Any] | None) -> tuple[Point, Checked]:
        """Returns the point that runs a call, the one with the smallest batch that has room, and the call's checked arrays."""
        record = self.engine.record
        if not record.profiles:
            return self._point, self._point.feeds.checked(inputs, out, 1)
        check_names(self.plan.inputs, inputs)
        fit = sizes.fit(record, {name: shape for name, a in inputs.items() if (shape := shape_of(a)) is not None})
        return self._points[fit.plan], self._points[fit.plan].feeds.checked(inputs, out, fit.rows)

    @contextmanager
    def _bound(
        self, inputs: Mapping[str, object], out: Mapping[str, Any] | None, stream: object, **how: bool
    ) -> Iterator[Ready]:
        """Copies a call's inputs into their point's memory and yields it ready. `how`: options of the feeds' `bound` (to_host,
        wait).
        """
        point, call = self._checked(inputs, out)
        if point is not self._point:
            point.enter()
        self._point, point.rows = point, call.rows
        with point.feeds.bound(call, stream, **how) as ready:
            yield ready

    def _queued(self, gpu: Cuda, inputs: Mapping[str, object], out: Mapping[str, Any] | None, stream: object) -> RunFuture:
        """Queues one run and returns its future, without waiting for its end."""
        with self._bound(inputs, out, stream, wait=False) as ready:
            point = self._point
            self._replay()
            found = ready.fetch()
            flags = gpu.pinned((len(point.plan.steps),), np.dtype(np.uint32))
            gpu.read_later(flags, point.flags)
            gpu.zero(point.flags, flags.nbytes)
            event = gpu.keep([*ready.used, *found.values(), flags])

        def finish() -> Ran:
            # NumPy's arrays lie in pinned memory.
            outputs = {name: a.copy() if isinstance(a, np.ndarray) else a for name, a in found.items()}
            for name, a in ready.landing.items():
                a[...] = outputs[name]
            layers = launched.flagged(point.plan, flags)
            return Ran({**outputs, **(out or {})}, layers, launched.warning(point.plan, layers, ready.on_host, outputs))

        future = futures.of_event(gpu.cupy, event, finish)
        self._queue.append(future.ended)
        return future

    @_one_thread
    def replay(self) -> None:
        """Run the whole plan on the present inputs; on a GPU as a CUDA graph, without waiting."""
        self._replay()

    def _replay(self) -> None:
        self._point.replay()

    @_one_thread
    def nonfinite(self) -> list[str]:
        """Returns the layers that stored infinite values or NaN in the last run, in order of execution.

        If inputs and outputs are CuPy arrays: in all runs since the last call. Every kernel reports it, so nothing runs
        again.
        """
        return self._read_nonfinite()

    def _read_nonfinite(self) -> list[str]:
        flags = self.gpu.read(self._flags, 4 * sum(len(point.plan.steps) for point in self._points)).view(np.uint32)
        if flags.any():
            self.gpu.zero(self._flags, flags.nbytes)
            names, first = list(self._nonfinite), 0
            for point in self._points:
                last = first + len(point.plan.steps)
                names += launched.flagged(point.plan, flags[first:last])
                first = last
            self._nonfinite = list(dict.fromkeys(names))
        return list(self._nonfinite)

    @_one_thread
    def profile(self, inputs: Mapping[str, object], iterations: int = 20) -> list[list[float]]:
        """Runs the plan and returns the microseconds of each layer, one list per iteration. Raises ValueError without a GPU.

        Each layer runs between two CUDA events, which take time as well (about 4 us on an H200); it never waits for the
        host.
        """
        if not isinstance(self.gpu, Cuda):
            raise ValueError("profile: layer times are measured on a GPU only; here they are predicted, see the plan")
        from tactics.sampling.stopwatch import Spin

        self.run(inputs)
        spin = Spin(self.gpu)
        return self._point.times(iterations + 1, lambda queued_us: spin.delay(AHEAD * queued_us))[1:]

    @_one_thread
    def trace(self, inputs: Mapping[str, object]) -> dict[str, np.ndarray]:
        """Runs the plan layer by layer and returns layer -> its output as NCHW, read before a later layer reuses its memory."""
        with self._bound(inputs, None, None, to_host=True):
            found = self._point.trace()
        self.nonfinite()
        self._nonfinite = []
        return found

    def address(self, edge: Bound) -> int:
        """Returns the device address of an input or output of the last run's plan, whose memory has the plan's format."""
        return self._arena + edge.offset

    @_one_thread
    def outputs(self) -> dict[str, np.ndarray]:
        """Returns the network's outputs by name on the host, as the last `run`, `replay` or `trace` left them."""
        return self._point.feeds.outputs(self._point.rows)

    @_one_thread
    def tensor(self, name: str) -> np.ndarray:
        """Returns a layer's output as NCHW after `run`; wrong values if a later layer reused its memory. Raises ValueError."""
        return self._point.tensor(name)

    def close(self) -> None:
        """Free the memory after the queued work has ended; using the context afterwards is an error. Does nothing in a forked
        process, which owns nothing, nor while Python ends, when a daemon thread may hold the lock forever."""
        if os.getpid() != self._process or sys.is_finalizing():
            return
        with self._lock:
            if not self._closed:
                self._settle()
                self._closed = True
                if self._thread is not None:
                    self._thread.shutdown(wait=False)
                self.gpu.close()

    @contextmanager
    def _entered(self) -> Iterator[None]:
        """Enters the context's GPU, one thread at a time, only while the context is open."""
        if os.getpid() != self._process:  # a thread that was not forked may hold the lock forever
            raise RuntimeError(
                "this context was made before this process was forked, and works only in the process that made it: start "
                "processes with multiprocessing's method 'spawn' or 'forkserver', and make a context in each"
            )
        with self._lock:
            if self._closed:
                raise ValueError("this context is closed: make a new one with engine.context()")
            with self.gpu.here():
                yield

    def _settle(self) -> None:
        """Waits, in the emulator, for the runs of the context's own thread."""
        if self._last is not None:
            concurrent.futures.wait([self._last])
            self._last = None

    def __repr__(self) -> str:
        name = repr(self.engine.record.model.name)
        if self._closed:
            return f"<Context of {name}, closed>"
        where = f"on GPU {self.gpu.number}" if isinstance(self.gpu, Cuda) else "in the emulator"
        weights = size_text(self.engine.weights.nbytes)
        arena = size_text(max(point.plan.memory.activation_bytes for point in self._points))
        memory = f"{len(self.plan.steps)} launches, weights {weights}, activations {arena}"
        return printable(f"<Context of {name} {where}: {self.device.title}, {memory}>")

    def __reduce__(self) -> Any:
        raise TypeError("a context cannot be copied or sent to another process: send its engine, and make a context there")

    def __del__(self) -> None:
        if not self._closed and os.getpid() == self._process and not sys.is_finalizing():
            text = "a context was deleted without close(), which waits for its runs: use `with engine.context() as context`"
            warnings.warn(text, ResourceWarning, stacklevel=2, source=self)
            self.close()

    def __enter__(self) -> Context:
        with self._entered():
            return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _load(self, plans: Sequence[PlanRecord], progress: Counter | None) -> dict[Key, Kernel]:
        """Loads the kernels of all plans, each once, and returns compile key -> kernel. `progress`: called for each that is
        compiled.
        """
        distinct = list(dict.fromkeys(key for plan in plans for key in kernel_keys(plan, not self.emulated)))
        missing = [k for k in distinct if kernel_key(*k) not in self.engine.cubins or self.emulated]
        made = compile_many(((kernel, dict(values), self.gpu.arch) for kernel, values in missing), progress=progress)
        compiled = dict(zip(missing, made, strict=True))
        for k in distinct:
            if k not in compiled:
                compiled[k] = Compiled(*k, self.device.sm, "", self.engine.cubins[kernel_key(*k)], 0, 0, 0, 0, "")
        return {k: self.gpu.load(c) for k, c in compiled.items()}
