"""A queued run, the result of `Context.run_async`."""

from __future__ import annotations

import concurrent.futures
import threading
import time
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from cuda_kernels.driver_errors import explained

if TYPE_CHECKING:
    from cupy.cuda import Event

NOT_READY = 600  # cudaErrorNotReady
POLL_S = 0.0002  # between two polls of an event, for waits with a timeout


class Ran(NamedTuple):
    """A run's results: outputs by name, the layers that stored infinity or NaN, and the text of a warning, or an empty
    string."""

    outputs: dict[str, Any]
    nonfinite: list[str]
    warning: str


class RunFuture:
    """One run, queued after the earlier runs of its context. It continues even if nobody waits for it.

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
        self._wait, self._done, self.event = wait, done, event
        self._lock = threading.Lock()
        self._left: Callable[[], Ran] | Ran = finish
        self._warned = False

    def __repr__(self) -> str:
        return f"<RunFuture {'done' if self._done() else 'under way'}>"

    def done(self) -> bool:
        """Whether it has ended, with or without an error; does not wait."""
        return self._done()

    def result(self, timeout: float | None = None) -> dict[str, Any]:
        """Wait for the run, and return the outputs of `Context.run`, the same ones each time. Warns as `run` does. Raises the
        run's error, and TimeoutError if the run has not ended after `timeout` seconds."""
        ran = self._ended(timeout)
        if ran.warning and not self._warned:
            self._warned = True
            warnings.warn(ran.warning, RuntimeWarning, stacklevel=2)
        return ran.outputs

    def exception(self, timeout: float | None = None) -> Exception | None:
        """The run's error or None; waits as `result` does."""
        try:
            with explained():
                ended = self._wait(timeout)
        except Exception as e:  # any error is the answer
            return e
        if not ended:
            raise _late(timeout)
        return None

    def nonfinite(self) -> list[str]:
        """The layers that stored infinite values or NaN in this run, in order, once it has ended."""
        return list(self._ended(None).nonfinite)

    def _ended(self, timeout: float | None) -> Ran:
        with explained():
            if not self._wait(timeout):
                raise _late(timeout)
        with self._lock:
            if not isinstance(self._left, Ran):
                self._left = self._left()  # and release the arrays that it read
            return self._left


def _late(timeout: float | None) -> TimeoutError:
    return TimeoutError(f"the run has not ended after {timeout} seconds: it continues, so wait again")


def of_thread(future: concurrent.futures.Future[Ran]) -> RunFuture:
    """A run executed by a thread."""

    def wait(timeout: float | None) -> bool:
        if future not in concurrent.futures.wait([future], timeout).done:
            return False
        future.result()
        return True

    return RunFuture(wait, future.done, future.result, None)


def of_event(cupy: Any, event: Event, finish: Callable[[], Ran]) -> RunFuture:
    """A run on a GPU, which ends with the event or the loss of the GPU. `cupy`: the module."""

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
    """A run that could not be queued."""

    def wait(timeout: float | None) -> bool:
        raise error

    def finish() -> Ran:
        raise error

    return RunFuture(wait, lambda: True, finish, None)
