"""The reason why a tactic has no time, as the measuring child process and its parent find it.

A fault of the tactic itself is written into the cache, and the tactic is not tried again. A passing fault, which the machine's
state at that moment caused, is reported, and the next build tries again. A fatal fault means that the child process is lost,
with its CUDA context.
"""

import signal
from typing import Any, NamedTuple

from cuda_kernels.driver import OUT_OF_MEMORY, code_of, fatal_code

# CUresult codes of errors by which a kernel itself loses its context. The other codes after which a context is lost (ECC,
# NVLink, MPS, a device or driver that is gone, unknown errors) do not depend on the kernel. (CUDA Driver API, "CUresult".)
OF_A_KERNEL = frozenset((700, 702, 710, 714, 715, 716, 717, 718, 719, 721))
# Signals that a user, a job's scheduler or Linux (when memory is short) sends. A crash has other signals.
FROM_OUTSIDE = frozenset((signal.SIGHUP, signal.SIGINT, signal.SIGKILL, signal.SIGTERM))
MOST_TEXT = 2000  # characters


class Overloaded(RuntimeError):
    """Raised when the host queues work too slowly for the GPU to be timed."""


class Fault(NamedTuple):
    """The reason why a tactic has no time. `fatal`: the process is lost; `passing`: the tactic is not to blame."""

    text: str
    fatal: bool = False
    passing: bool = False

    def answer(self) -> dict[str, Any]:
        """Returns the fault as an answer of the child, which of_answer reads."""
        return {"error": self.text, "fatal": self.fatal, "passing": self.passing}


def of_error(error: Exception) -> Fault:
    """Returns the fault for an exception that was raised while a tactic was timed. (The child waits for all launches of a
    tactic before the next tactic, so an error of the GPU belongs to this one.)"""
    lost = fatal_code(error)
    machine = isinstance(error, Overloaded | MemoryError) or code_of(error) == OUT_OF_MEMORY
    passing = machine if lost is None else lost not in OF_A_KERNEL
    return Fault(f"{type(error).__name__}: {error}"[:MOST_TEXT], lost is not None, passing)


def of_answer(reply: dict[str, Any]) -> Fault:
    """Returns the fault in an answer of the child that has "error"."""
    return Fault(str(reply["error"]), bool(reply.get("fatal")), bool(reply.get("passing")))


def of_end(code: int, told: str) -> Fault:
    """Returns the fault for a process that ended while it timed a tactic.

    `code`: subprocess's return code, -n for signal n; `told`: the end of the text on its standard error.
    """
    passing = code < 0 and -code in FROM_OUTSIDE
    what = f"the child process ended with code {code}" + (", from outside" if passing else "")
    return Fault(what + (f": {told}" if told else ""), True, passing)
