"""Work that may hang in the driver, done by threads that the caller can leave behind: Ctrl-C reaches it, and it can give up."""

import threading
import time
from collections.abc import Callable, Sequence

LOOK_S = 0.1  # between two looks at the threads


class Stuck(RuntimeError):
    """The GPU may never answer again. Whatever waits for it hangs too, even the end of a process that has used it, so a command
    then ends with os._exit."""


class Task:
    """A function in a thread of its own, which the end of the process does not wait for, and the error that it raised."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as e:  # raised again by who waits for it
            self.error = e

    def ended(self, within_s: float = 0.0) -> bool:
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
    """Do all at once, and wait for them; whether Ctrl-C came. `stop`: asks them to end soon, at Ctrl-C or where one has failed;
    without it, and at the second time, Ctrl-C passes on and leaves them behind. `look`: called between. Raises the first error
    that one raised, and Stuck, which says `what` did not happen, where `signs` has not changed for `patience_s`."""
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
