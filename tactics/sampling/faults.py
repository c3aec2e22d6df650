"""Decides, for the measuring child process and its parent, whose fault it is that a tactic has no time.

The tactic's fault: written into the cache, and the tactic is not tried again. Passing, caused by the machine's state just then:
reported, and tried again by the next build. Also decided: whether the process can go on, or its CUDA context is lost.
"""

import signal
from typing import Any, NamedTuple

from cuda_kernels.driver import OUT_OF_MEMORY, code_of, fatal_code

# The codes by which a kernel loses its context. The other codes after which a context is lost (ECC, NVLink, MPS, a device or
# driver that is gone, or does not know why) may meet any kernel. (CUDA Driver API, "CUresult".)
OF_A_KERNEL = frozenset((700, 702, 710, 714, 715, 716, 717, 718, 719, 721))
# Signals from outside: by a user, a job's scheduler, the kernel where memory is short. A crash has other signals.
FROM_OUTSIDE = frozenset((signal.SIGHUP, signal.SIGINT, signal.SIGKILL, signal.SIGTERM))
MOST_TEXT = 2000  # characters


class Overloaded(RuntimeError):
    """Raised when the host is too slow to time anything just now."""


class Fault(NamedTuple):
    """The reason why there is no time. `fatal`: the process is lost; `passing`: the tactic is not to blame."""

    text: str
    fatal: bool = False
    passing: bool = False

    def answer(self) -> dict[str, Any]:
        """The fault as the child writes it, for of_answer."""
        return {"error": self.text, "fatal": self.fatal, "passing": self.passing}


def of_error(error: Exception) -> Fault:
    """The fault of an exception raised while a tactic was timed; each tactic's launches end before the next tactic's begin."""
    lost = fatal_code(error)
    machine = isinstance(error, Overloaded | MemoryError) or code_of(error) == OUT_OF_MEMORY
    passing = machine if lost is None else lost not in OF_A_KERNEL
    return Fault(f"{type(error).__name__}: {error}"[:MOST_TEXT], lost is not None, passing)


def of_answer(reply: dict[str, Any]) -> Fault:
    """The fault in a child's answer that has an error."""
    return Fault(str(reply["error"]), bool(reply.get("fatal")), bool(reply.get("passing")))


def of_end(code: int, told: str) -> Fault:
    """The fault of a process that ended while it timed a tactic.

    `code`: as subprocess has it, negative for a signal; `told`: the end of its standard error.
    """
    passing = code < 0 and -code in FROM_OUTSIDE
    what = f"the child process ended with code {code}" + (", from outside" if passing else "")
    return Fault(what + (f": {told}" if told else ""), True, passing)
