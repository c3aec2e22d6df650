"""Launches by the driver itself, through cuda-bindings: CuPy's RawKernel cannot begin one before the last has ended."""

from __future__ import annotations

from collections.abc import Callable

from cuda_kernels.driver_errors import check_status

Triple = tuple[int, int, int]
Starter = Callable[[int], None]  # starts a prepared launch on the stream of that handle


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
    import ctypes

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
