"""Whose fault it is that a tactic could not be timed: decided here alone, for the child process that measures and its parent.

The tactic's: written into the cache, and the tactic is not tried again. Passing, of the machine as it was just then: told, and
tried again by the next build. Beside that: whether the process can go on, or its CUDA context is lost.
"""

import signal
from typing import Any, NamedTuple

from cuda_kernels.driver_errors import OUT_OF_MEMORY, code_of, fatal_code

# Of the codes after which a context is lost, those that a kernel brings about; the others (ECC, NVLink, MPS, a device or driver
# that is gone, or does not know why) may meet any. (CUDA Driver API, "CUresult".)
OF_A_KERNEL = frozenset((700, 702, 710, 714, 715, 716, 717, 718, 719, 721))
# What ends a process from outside: a user, a job's scheduler, the kernel where memory is short. A crash has other signals.
FROM_OUTSIDE = frozenset((signal.SIGHUP, signal.SIGINT, signal.SIGKILL, signal.SIGTERM))
MOST_TEXT = 2000  # characters


class Overloaded(RuntimeError):
    """The host is too slow to time anything just now."""


class Fault(NamedTuple):
    """Why there is no time. `fatal`: the process is lost; `passing`: the tactic is not to blame."""

    text: str
    fatal: bool = False
    passing: bool = False

    def answer(self) -> dict[str, Any]:
        """As the child writes it."""
        return {"error": self.text, "fatal": self.fatal, "passing": self.passing}


def of_error(error: Exception) -> Fault:
    """Of what was raised while a tactic was timed, each of whose launches is over before the next tactic's begins."""
    lost = fatal_code(error)
    machine = isinstance(error, Overloaded | MemoryError) or code_of(error) == OUT_OF_MEMORY
    passing = machine if lost is None else lost not in OF_A_KERNEL
    return Fault(f"{type(error).__name__}: {error}"[:MOST_TEXT], lost is not None, passing)


def of_answer(reply: dict[str, Any]) -> Fault:
    """Of a child's answer that has an error."""
    return Fault(str(reply["error"]), bool(reply.get("fatal")), bool(reply.get("passing")))


def of_end(code: int, told: str) -> Fault:
    """Of a process that ended while it timed a tactic: `code` as subprocess has it, negative for a signal; `told`: the end of
    what it wrote to standard error."""
    passing = code < 0 and -code in FROM_OUTSIDE
    what = f"the child process ended with code {code}" + (", from outside" if passing else "")
    return Fault(what + (f": {told}" if told else ""), True, passing)
