"""Threads for work that may hang in the driver: Ctrl-C reaches the caller, which can give up and leave the threads behind."""

import threading
import time
from collections.abc import Callable, Sequence

LOOK_S = 0.1  # seconds between two looks at the threads


class Stuck(RuntimeError):
    """Raised when the GPU may never answer again.

    All code that waits for this GPU hangs, too, even the end of a process that used it: a command must end by os._exit.
    """


class Task:
    """A function that runs in a daemon thread, which the end of the process does not wait for, and the error that it raised."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as e:  # `attend` raises it again
            self.error = e

    def ended(self, within_s: float = 0.0) -> bool:
        """Returns whether the function has ended, after waiting for it for at most `within_s` seconds."""
        self._thread.join(within_s)
        return not self._thread.is_alive()


def attend(
    works: Sequence[Callable[[], None]],
    *,
    signs: Callable[[], int],
    patience_s: float,
    what: str,
    stop: Callable[[], None] | None = None,
    look: Callable[[], None] = lambda: None,
) -> bool:
    """Runs all functions (`works`) at once, each in a thread, and waits for them. Returns whether the user pressed Ctrl-C
    meanwhile.

    `signs`: returns a count that grows as work proceeds; if the count stays equal for `patience_s` seconds, Stuck is raised,
    with a text that begins with `what`, such as "no query ended". `stop`: asks the functions to end soon; called at Ctrl-C or
    when a function failed. If `stop` is None, and at the second Ctrl-C, KeyboardInterrupt is raised and the threads are left
    behind. `look`: called repeatedly while waiting. Raises the first error that a function raised.
    """
    interrupted, tasks = False, [Task(work) for work in works]
    seen, since = signs(), time.monotonic()
    while running := [t for t in tasks if not t.ended()]:
        try:
            running[0].ended(LOOK_S)
            look()
        except KeyboardInterrupt:
            if stop is None or interrupted:
                raise
            interrupted = True
        if stop and (interrupted or any(t.error for t in tasks)):
            stop()
        if (now := signs()) != seen:
            seen, since = now, time.monotonic()
        elif time.monotonic() - since > patience_s:
            raise Stuck(
                f"{what} for {patience_s:g} s: the GPU hangs, or other work keeps it busy; nvidia-smi shows who uses it, "
                "gpu-runtime doctor examines it, and --timeout=SECONDS waits longer"
            )
    if error := next((t.error for t in tasks if t.error is not None), None):
        raise error
    return interrupted
