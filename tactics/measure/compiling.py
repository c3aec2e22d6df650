"""Kernels compiled in threads while others are measured; a compiler error is kept until a tactic asks for its kernel."""

import os
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from cuda_kernels.compile import CompileError, Counter, compile_kernel, is_kept
from tactics.launches import Binary


class Compiling:
    """Compiles kernels for the architecture `sm` in threads. `progress`(done, all) is called, while `log` waits, with the
    numbers of the kernels that were not in the cache of compiled kernels."""

    def __init__(self, sm: str, progress: Counter | None):
        self._sm, self._progress = sm, progress
        self._pool: ThreadPoolExecutor | None = None
        self._logs: dict[Binary, Future[str]] = {}
        self._new: set[Future[str]] = set()

    def begin(self, items: Iterable[Binary]) -> None:
        """Compiles the binaries that are not compiled yet, in this order, in threads; returns at once."""
        for item in items:
            if item not in self._logs:
                if self._pool is None:  # a core is left for the process that measures, which must queue in time
                    self._pool = ThreadPoolExecutor(max(1, (os.cpu_count() or 1) - 1))
                self._logs[item] = self._pool.submit(self._log, item)
                if self._progress is not None and not is_kept(item[0], dict(item[1]), self._sm):
                    self._new.add(self._logs[item])

    def log(self, items: Iterable[Binary]) -> str:
        """Waits until all binaries are compiled and returns the log of the first that does not compile, "" if all do."""
        items = list(items)
        self.begin(items)
        for item in items:
            if self._logs[item] in self._new and not self._logs[item].done():
                self._tell()
            self._logs[item].result()
        return next(filter(None, (self._logs[item].result() for item in items)), "")

    def close(self) -> None:
        """Cancels all compilations that have not begun."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None
            self._logs = {item: log for item, log in self._logs.items() if not log.cancelled()}

    def _tell(self) -> None:
        if self._progress is not None:
            self._progress(sum(log.done() for log in self._new), len(self._new))

    def _log(self, item: Binary) -> str:
        try:
            compile_kernel(item[0], dict(item[1]), self._sm)
            return ""
        except CompileError as e:
            return str(e)
