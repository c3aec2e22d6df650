"""What the CUDA driver answers: one error with its code, and the one place that says which codes are fatal.

The driver's API and the runtime's (CuPy raises the errors of both) number alike all that is told here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

# After one of these, every later call of the process fails too, whoever makes it: the context, with all its memory, is lost.
# What reports it need not be what caused it: kernels run long after they were launched. (CUDA Runtime API, "cudaError_t":
# "the process must be terminated and relaunched"; and those that say that there is no driver or device to talk to.)
FATAL = {
    3: "CUDA cannot begin in this process; one that was forked after CUDA began cannot use it",
    4: "the driver is shutting down",
    46: "the device is unavailable",
    201: "the context is invalid",
    214: "an uncorrectable ECC error",
    220: "an uncorrectable NVLink error",
    226: "a contained memory error",
    700: "an illegal memory access",
    702: "a kernel ran into the driver's time limit",
    709: "the context was destroyed",
    710: "a kernel's assertion failed",
    714: "an error of the hardware's stack",
    715: "an illegal instruction",
    716: "a misaligned address",
    717: "an access to the wrong address space",
    718: "an invalid program counter",
    719: "a launch failed",
    721: "tensor memory was not given back",
    806: "the MPS server did not answer",
    810: "the MPS server ended this process",
    911: "an error outside the GPU",
    999: "an unknown error",
}
OUT_OF_MEMORY = 2


class DriverError(RuntimeError):
    """A call of the driver that failed. `code`: its CUresult, `name` that in words; `detail` says what was asked for."""

    def __init__(self, call: str, code: int, name: str, detail: str = "") -> None:
        super().__init__(f"{call}: {name}{detail and ' '}{detail}")
        self.call, self.code, self.name = call, code, name


def check_status(call: str, status: object, detail: str = "") -> None:
    """DriverError unless `status`, a CUresult of cuda.bindings, is success."""
    from cuda.bindings.driver import CUresult

    result = CUresult(status)
    if result != CUresult.CUDA_SUCCESS:
        raise DriverError(call, int(result), result.name, detail)


def code_of(error: BaseException) -> int | None:
    """The driver's code of an error, ours or CuPy's, or of the first one behind it that has one; None without any."""
    return next((code for e in _behind(error) if (code := _own_code(e)) is not None), None)


def fatal_code(error: BaseException) -> int | None:
    """The code after which nothing more can run in this process, of `error` or one behind it; None where it can."""
    return next((code for e in _behind(error) if (code := _own_code(e)) in FATAL), None)


def why_fatal(error: BaseException) -> str | None:
    """In words, why nothing more can run in this process after `error`; None where it can."""
    code = fatal_code(error)
    return None if code is None else FATAL[code]


def is_fatal(error: BaseException) -> bool:
    """Whether the CUDA context of this process is lost: only a new process can go on."""
    return why_fatal(error) is not None


@contextmanager
def explained() -> Iterator[None]:
    """A fatal error that passes gets a note: which process can still do what, once."""
    try:
        yield
    except RuntimeError as e:
        if (why := why_fatal(e)) and not hasattr(e, "__notes__"):
            e.add_note(
                f"The GPU is lost to this process ({why}): start a new process. The fault may be of any kernel that ran: "
                "CUDA_LAUNCH_BLOCKING=1 and graph=False, or compute-sanitizer, show which."
            )
        raise


def _behind(error: BaseException | None) -> Iterator[BaseException]:
    """The error, then what it was raised from or while handling."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _own_code(error: BaseException) -> int | None:
    if isinstance(error, DriverError):
        return error.code
    if "cupy" not in sys.modules:  # then the error is none of CuPy's
        return None
    from cupy.cuda.memory import OutOfMemoryError
    from cupy_backends.cuda.api.driver import CUDADriverError
    from cupy_backends.cuda.api.runtime import CUDARuntimeError

    if isinstance(error, CUDADriverError | CUDARuntimeError):
        return int(error.status)
    return OUT_OF_MEMORY if isinstance(error, OutOfMemoryError) else None
