"""The CUDA driver's errors, one exception with the code and the only list of fatal codes; and its own launches.

The driver's API and the runtime's (CuPy raises errors of both) use the same numbers for the codes here.
"""

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# After one of these errors every later call of the process fails too: the context, with all its memory, is lost. The failing
# call need not be the cause, because kernels run long after their launch. (CUDA Runtime API, "cudaError_t": "the process must
# be terminated and relaunched"; and the errors of an absent driver or device.)
FATAL = {
    3: "CUDA cannot be initialized in this process; a process forked after CUDA was initialized cannot use it",
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
    714: "a hardware stack error",
    715: "an illegal instruction",
    716: "a misaligned address",
    717: "an access to the wrong address space",
    718: "an invalid program counter",
    719: "a launch failed",
    721: "tensor memory was not freed",
    806: "the MPS server did not answer",
    810: "the MPS server ended this process",
    911: "an error outside the GPU",
    999: "an unknown error",
}
OUT_OF_MEMORY = 2
Triple = tuple[int, int, int]
Starter = Callable[[int], None]  # starts a prepared launch on the stream of that handle


class DriverError(RuntimeError):
    """A failed call of the driver. `code`: its CUresult; `name`: the code in words; `detail`: the request."""

    def __init__(self, call: str, code: int, name: str, detail: str = "") -> None:
        super().__init__(f"{call}: {name}{detail and ' '}{detail}")
        self.call, self.code, self.name = call, code, name


def check_status(call: str, status: object, detail: str = "") -> None:
    """Raises DriverError unless `status`, a CUresult of cuda.bindings, is success."""
    from cuda.bindings.driver import CUresult

    result = CUresult(status)
    if result != CUresult.CUDA_SUCCESS:
        raise DriverError(call, int(result), result.name, detail)


def code_of(error: BaseException) -> int | None:
    """The driver's code of an error, ours or CuPy's, or of its first cause with a code; None without any."""
    return next((code for e in _behind(error) if (code := _own_code(e)) is not None), None)


def fatal_code(error: BaseException) -> int | None:
    """The fatal code of `error` or of its causes, after which this process can run nothing; None without any."""
    return next((code for e in _behind(error) if (code := _own_code(e)) in FATAL), None)


def why_fatal(error: BaseException) -> str | None:
    """Says why this process can run nothing after `error`; None if it can."""
    code = fatal_code(error)
    return None if code is None else FATAL[code]


def is_fatal(error: BaseException) -> bool:
    """Whether this process's CUDA context is lost, so that only a new process can continue."""
    return why_fatal(error) is not None


@contextmanager
def explained() -> Iterator[None]:
    """Adds a note, once, to a fatal error that passes through: the work that each process can still do."""
    try:
        yield
    except RuntimeError as e:
        if (why := why_fatal(e)) and not hasattr(e, "__notes__"):
            e.add_note(
                f"This process can no longer use the GPU ({why}): start a new process. Any kernel that ran may be the cause: "
                "CUDA_LAUNCH_BLOCKING=1 and graph=False, or compute-sanitizer, show which one."
            )
        raise


def _behind(error: BaseException | None) -> Iterator[BaseException]:
    """Yields the error, then the errors that it was raised from or while handling."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _own_code(error: BaseException) -> int | None:
    if isinstance(error, DriverError):
        return error.code
    if "cupy" not in sys.modules:  # then the error is not CuPy's
        return None
    from cupy.cuda.memory import OutOfMemoryError
    from cupy_backends.cuda.api.driver import CUDADriverError
    from cupy_backends.cuda.api.runtime import CUDARuntimeError

    if isinstance(error, CUDADriverError | CUDARuntimeError):
        return int(error.status)
    return OUT_OF_MEMORY if isinstance(error, OutOfMemoryError) else None


# ---- launches through cuda-bindings: CuPy's RawKernel cannot begin one before the last has ended


def param_bytes(function: int) -> int:
    """Returns the size of our kernel's single parameter struct, as the driver reads it from the code: the bytes that it copies.

    `function`: driver handle. Parameters of sm_90a begin at 0x210, so a struct with a map begins 48 bytes behind.
    """
    from cuda.bindings import driver

    status, _, size = driver.cuFuncGetParamInfo(driver.CUfunction(function), 0)
    check_status("cuFuncGetParamInfo", status)
    return int(size)


def dependent(function: int, grid: Triple, block: Triple, smem: int, params: bytearray) -> Starter:
    """Prepares a launch that may begin before the previous one in its stream has ended; sm_90 and newer.

    Only for kernels that execute griddepcontrol.wait before they access other launches' data; all of ours do. CUDA Programming
    Guide, "Programmatic Dependent Launch and Synchronization". `function`: the driver's handle; `params`: as they are at the
    start, when the driver copies them.
    """
    from cuda.bindings import driver

    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid
    config.blockDimX, config.blockDimY, config.blockDimZ = block
    config.sharedMemBytes = smem
    config.attrs, config.numAttrs = [attribute], 1
    struct_bytes = (ctypes.c_char * len(params)).from_buffer(params)
    pointers = (ctypes.c_void_p * 1)(ctypes.addressof(struct_bytes))
    handle, values = driver.CUfunction(function), ctypes.addressof(pointers)

    def start(stream: int, owners: object = (struct_bytes, pointers)) -> None:
        config.hStream = driver.CUstream(stream)
        (status,) = driver.cuLaunchKernelEx(config, handle, values, 0)
        if status:
            check_status("cuLaunchKernelEx", status, f"for grid {grid}, block {block}, {smem} bytes of shared memory")

    return start
