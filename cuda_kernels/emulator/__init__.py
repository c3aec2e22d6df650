"""A PTX interpreter: runs NVRTC's output for our .cu files on the CPU, with checks and counters.

    program = load(ptx)
    memory = Memory()
    x = memory.upload(array, "x")
    stats = launch(program, (8, 1, 1), (256, 1, 1), 49152, params, memory, options=Options(seed=1))

The names below are imported on first use: importing this package costs nothing.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cuda_kernels.emulator.run import EmulatorError, LineStats, Memory, Options, Program, Stats, launch, load

__all__ = ["EmulatorError", "LineStats", "Memory", "Options", "Program", "Stats", "launch", "load"]


def __getattr__(name: str) -> object:
    if name in __all__:
        from cuda_kernels.emulator import run

        return getattr(run, name)
    raise AttributeError(f"module 'cuda_kernels.emulator' has no attribute '{name}'")
