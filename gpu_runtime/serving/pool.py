"""Several contexts of one engine, for threads that run at the same time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from gpu_runtime.runtime.context import Context
from gpu_runtime.runtime.plan_record import EngineData


class Pool:
    """Lends its contexts, which share the engine's weights, each to one user at a time. `options` are Context's.

    >>> with gr.Pool(engine, contexts=2, device="emulator") as pool:
    ...     with pool.context(timeout=10) as ctx:
    ...         ctx.run({"x": x})["y"].shape
    (2, 16, 6, 6)

    Threads may share a pool. Raises ValueError for a number of contexts below 1, and Context's errors.
    """

    def __init__(self, engine: EngineData, contexts: int = 2, **options: Any) -> None:
        if not isinstance(contexts, int) or contexts < 1:
            raise ValueError(f"contexts: expected a whole number, 1 or more, got {contexts!r}")
        self._engine, self._options, self._size = engine, options, contexts
        self._changed = threading.Condition()
        self._busy: dict[Context, int] = {}  # the thread that has it
        self._closed = False
        with ExitStack() as failed:
            self._free = [failed.enter_context(Context(engine, **options)) for _ in range(contexts)]
            failed.pop_all()

    def __repr__(self) -> str:
        return f"<Pool of {self._size} contexts, {'closed' if self._closed else f'{len(self._busy)} busy'}>"

    @contextmanager
    def context(self, timeout: float | None = None) -> Iterator[Context]:
        """Lends one of the contexts for the `with` block, and takes it back even after an exception.

        Waits while all are busy. Raises TimeoutError if none was returned in `timeout` seconds (None: waits without limit),
        ValueError if the pool is closed.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._free or self._closed, timeout):
                raise TimeoutError(
                    f"all {self._size} contexts of the pool are busy, and none was returned in {timeout} seconds: wait longer, "
                    "or make a pool with more contexts"
                )
            self._check_open()
            lent = self._free.pop()
            self._busy[lent] = threading.get_ident()
        try:
            yield lent
        finally:
            self._take_back(lent)

    def close(self) -> None:
        """Waits until all contexts are returned, and closes them; from now on none is lent. Does nothing if it was closed
        before.

        Raises RuntimeError in a thread that has one of the contexts, because it would wait for itself.
        """
        with self._changed:
            if threading.get_ident() in self._busy.values():
                raise RuntimeError("close: this thread has a context of the pool: leave its `with pool.context()` first")
            self._closed = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._busy)
            while self._free:
                self._free.pop().close()

    def _take_back(self, lent: Context) -> None:
        """Puts a context back into the pool; a new one in its place if its user closed it."""
        with self._changed:
            del self._busy[lent]
            self._changed.notify_all()
            self._free.append(lent if lent.is_open else Context(self._engine, **self._options))

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("this pool is closed: make a new one with gpu_runtime.Pool(engine)")

    def __enter__(self) -> Pool:
        self._check_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
