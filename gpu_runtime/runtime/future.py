"""A queued run, the result of `Context.run_async`."""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from cuda_kernels.driver import explained
from gpu_runtime.progress import warn

if TYPE_CHECKING:
    from cupy.cuda import Event

NOT_READY = 600  # cudaErrorNotReady
POLL_S = 0.0002  # between two polls of an event


class Ran(NamedTuple):
    """A run's results: outputs by name, the layers that stored infinity or NaN, and the text of a warning, or ""."""

    outputs: dict[str, Any]
    nonfinite: list[str]
    warning: str


class RunFuture(concurrent.futures.Future[dict[str, Any]]):
    """One run, queued after the earlier runs of its context. It continues even if nobody waits for it, and cannot be cancelled.
    `concurrent.futures.wait`, `as_completed` and `asyncio.wrap_future` take it like any future.

    >>> with engine.context() as ctx:
    ...     futures = [ctx.run_async({"x": x}), ctx.run_async({"x": 2 * x})]
    >>> [f.result()["y"].shape for f in futures]
    [(2, 16, 6, 6), (2, 16, 6, 6)]

    `event`: CuPy's event after the queued work, for streams that wait; None in the emulator and if queueing failed.
    `wait(timeout)` returns whether the run has ended, and raises its error; `finish` is called once after that.
    """

    def __init__(
        self, wait: Callable[[float | None], bool], done: Callable[[], bool], finish: Callable[[], Ran], event: Event | None
    ) -> None:
        super().__init__()
        self.set_running_or_notify_cancel()
        self._waiters = _Waiters(self)
        self._wait, self.ended, self.event = wait, done, event
        self._lock = threading.Lock()
        self._left: Callable[[], Ran] | Ran = finish
        self._ended_once = self._warned = False

    def __repr__(self) -> str:
        return f"<RunFuture {'done' if self.done() else 'under way'}>"

    def done(self) -> bool:
        """Returns whether the run has ended, with or without an error; does not wait."""
        return self.ended()

    def running(self) -> bool:
        return not self.done()

    def result(self, timeout: float | None = None) -> dict[str, Any]:
        """Wait for the run, and return the outputs of `Context.run`, the same ones each time. Warns as `run` does. Raises the
        run's error, and TimeoutError if the run has not ended after `timeout` seconds."""
        ran = self._ended(timeout)
        if ran.warning and not self._warned:
            self._warned = True
            warn(ran.warning)
        return ran.outputs

    def exception(self, timeout: float | None = None) -> Exception | None:
        """Returns the run's error, None if it has none; waits as `result` does. Raises TimeoutError after `timeout` seconds."""
        try:
            self._ended(timeout)
        except _Late:
            raise
        except Exception as e:  # any error is the answer
            return e
        return None

    def nonfinite(self) -> list[str]:
        """Returns the layers that stored infinite values or NaN in this run, in order. Waits for its end, and raises the run's
        error.
        """
        return list(self._ended(None).nonfinite)

    def add_done_callback(self, fn: Callable[[concurrent.futures.Future[dict[str, Any]]], object]) -> None:
        """Calls `fn` with the future once the run has ended, in another thread; at once if it is known to have ended."""
        super().add_done_callback(fn)
        WATCHER.watch(self)

    def _ended(self, timeout: float | None) -> Ran:
        """Waits for the run, notifies those who wait for the future, and returns the results. Raises the run's error, or
        _Late.
        """
        try:
            with explained():
                if not self._wait(timeout):
                    raise _Late(f"the run has not ended after {timeout} seconds: it continues, so wait again")
            with self._lock:
                if not isinstance(self._left, Ran):
                    self._left = self._left()  # and release the arrays that it read
                ran = self._left
        except _Late:
            raise
        except Exception as e:
            if self._is_first():
                self.set_exception(e)
            raise
        if self._is_first():
            self.set_result(ran.outputs)
        return ran

    def _is_first(self) -> bool:
        """Returns whether this is the first call: only one thread may set the future's result."""
        with self._lock:
            first, self._ended_once = not self._ended_once, True
            return first


class _Late(TimeoutError):
    """Raised when the run has not ended in the given time; it continues."""


class _Waiters(list[Any]):
    """The list in which concurrent.futures puts those who wait for a future; an entry starts the watch."""

    def __init__(self, future: RunFuture) -> None:
        self._future = weakref.ref(future)

    def append(self, waiter: Any) -> None:
        super().append(waiter)
        if (future := self._future()) is not None:
            WATCHER.watch(future)


class _Watcher:
    """A thread that asks the driver which runs have ended, because the driver notifies nobody.

    It runs only while somebody waits for a future or has given it a callback.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watched: dict[RunFuture, None] = {}  # in the order of watching
        self._thread: threading.Thread | None = None

    def watch(self, future: RunFuture) -> None:
        with self._lock:
            self._watched[future] = None
            if self._thread is None or not self._thread.is_alive():  # none after a fork
                self._thread = threading.Thread(target=self._ask, name="gpu_runtime futures", daemon=True)
                self._thread.start()

    def _ask(self) -> None:
        while self._end_watched():
            time.sleep(POLL_S)

    def _end_watched(self) -> bool:
        """Ends the futures of runs that have ended; returns whether others remain."""
        with self._lock:
            ended = [f for f in self._watched if f.done()]
            for f in ended:
                del self._watched[f]
        for f in ended:
            with contextlib.suppress(Exception):  # the future keeps the error for its callers
                f._ended(None)
        with self._lock:
            if not self._watched:
                self._thread = None
            return bool(self._watched)


WATCHER = _Watcher()


def of_thread(future: concurrent.futures.Future[Ran], owner: object) -> RunFuture:
    """Returns the future of a run that a thread of `owner` executes.

    The future keeps the owner alive: else the thread could be the last to hold it, and would have to wait for itself.
    """

    def wait(timeout: float | None, _: object = owner) -> bool:
        if future not in concurrent.futures.wait([future], timeout).done:
            return False
        future.result()
        return True

    return RunFuture(wait, future.done, future.result, None)


def ended(future: concurrent.futures.Future[Ran]) -> Callable[[], bool]:
    """Returns a function that tells whether a thread has executed the run, and that does not keep the run's results alive."""
    kept = weakref.ref(future)  # by its thread, until then
    return lambda: (found := kept()) is None or found.done()


def of_event(cupy: Any, event: Event, finish: Callable[[], Ran]) -> RunFuture:
    """Returns the future of a run on a GPU, which ends with `event` or when the GPU is lost.

    `cupy`: the module; `finish`: called once after the end, returns the results.
    """

    def done() -> bool:
        return cupy.cuda.runtime.eventQuery(event.ptr) != NOT_READY

    def wait(timeout: float | None) -> bool:
        if timeout is not None:
            end = time.monotonic() + timeout
            while not done():
                if time.monotonic() >= end:
                    return False
                time.sleep(POLL_S)
        event.synchronize()
        return True

    return RunFuture(wait, done, finish, event)


def failed(error: Exception) -> RunFuture:
    """Returns the future of a run that could not be queued, because of `error`."""

    def wait(timeout: float | None) -> bool:
        raise error

    def finish() -> Ran:
        raise error

    return RunFuture(wait, lambda: True, finish, None)
