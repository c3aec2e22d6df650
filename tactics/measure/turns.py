"""A lock for each GPU, so that one process at a time measures there: two at once would disturb each other's times."""

import contextlib
import fcntl
import os
import re
from collections.abc import Callable, Iterator
from functools import lru_cache

from cuda_kernels import device as devices
from cuda_kernels.files import cache_dir


@lru_cache(maxsize=1)
def gpu_id() -> str:
    """Returns a name of this process's current GPU that is unique on the machine: its UUID, else its PCI bus ID; "gpu" without
    a GPU."""
    if not devices.has_gpu():
        return "gpu"
    import cupy

    number = cupy.cuda.Device().id
    uuid = cupy.cuda.runtime.getDeviceProperties(number).get("uuid", b"")
    return uuid.hex() if any(uuid) else cupy.cuda.runtime.deviceGetPCIBusId(number)


@contextlib.contextmanager
def turn(gpu: str, waits: Callable[[], None]) -> Iterator[None]:
    """Holds the lock of a GPU for the `with` block; `waits` is called before a wait for another process.

    The operating system releases the lock of a process that ends. If no lock can be made (no folder, or a file system without
    locks), the block runs at once.
    """
    file = None
    with contextlib.suppress(OSError):
        folder = cache_dir() / "locks"
        folder.mkdir(parents=True, exist_ok=True)
        file = os.open(folder / (re.sub(r"\W", "_", gpu) + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        if file is not None:
            _lock(file, waits)
        yield
    finally:
        if file is not None:
            os.close(file)


def _lock(file: int, waits: Callable[[], None]) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        waits()
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
    except OSError:  # a file system without locks
        pass
