"""Allocate, copy, load, launch: one small interface with two implementations, `Cuda` (CuPy) and `Emulated` (the CPU).

Both: allocate(nbytes, constant) -> address (constant: no launch writes it); share(array) -> the address of a constant copy, one
for all users of the array on that device; free; write(address, array); zero(address, nbytes); read(address, nbytes) -> uint8
array; load(compiled for `arch`) -> kernel; encode(map, address) -> a tensor map's 128 bytes; launch(kernel, grid, block, smem,
params); call(function, ins, out, nonfinite), a function of arrays instead of a kernel; synchronize(); record(run) -> replay,
after a first run, a CUDA graph where there is a GPU; close(); `with here()`: work for that device. `params` are the bytes of
the kernel's parameter struct, as `pack_params` lays them out. An `Array` is row-major data at an address; `call` stores
function(module, arrays) as `out`'s type; the arrays belong to `module`, NumPy or CuPy. If it stores infinity or NaN, it sets
the 4-byte word at `nonfinite` to 1, as kernels do.
"""

from __future__ import annotations

import contextlib
import math
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cuda_kernels import emulator, extras
from cuda_kernels.compile import Compiled, cubin_path, virtual
from cuda_kernels.device import Device
from cuda_kernels.driver import Starter, Triple, dependent, is_fatal, param_bytes
from cuda_kernels.params import KINDS, check_launch, pack_params
from cuda_kernels.sharing import Copy, shared
from cuda_kernels.staging import TO_DEVICE, TO_HOST, Staging
from cuda_kernels.tensor_maps import Map, encode, encode_by_driver

if TYPE_CHECKING:
    from cupy import RawKernel
    from cupy.cuda import Event, Stream

    from cuda_kernels.emulator import Program, Stats

# Options of Emulated.
EMULATOR_OPTIONS = ("checks", "async_mode", "seed", "threads", "resident_blocks", "low_ends", "high_ends")
# Percent of an SM's L1 that every kernel requests as shared memory: all. The driver may synchronise between two launches with
# different wishes (cuFuncSetCacheConfig in its documentation), which no early launch hides; the largest tiles need all of it.
CARVEOUT = 100


class Array(NamedTuple):
    """An array in device memory."""

    address: int
    dtype: np.dtype
    shape: tuple[int, ...]


class Kernel(NamedTuple):
    """A loaded kernel: the bytes of its code's parameters, and the function that starts it (grid, block, smem, params).
    `prepare`, of a GPU's: the same with a buffer of parameters that may change -> a function that starts it on a stream."""

    name: str
    param_bytes: int
    start: Callable[[Triple, Triple, int, bytes], None]
    prepare: Callable[[Triple, Triple, int, bytearray], Starter] | None = None


def fill_params(gpu: Cuda | Emulated, args: Iterable[tuple[str, Any]], address: Callable[[tuple[str, Any]], int]) -> bytes:
    """Packs a launch's arguments into the bytes of its parameter struct.

    `address` gives the address of an argument whose kind is not in KINDS; a map (tensor_maps.Map) is encoded for the address of
    its tensor.
    """

    def filled(arg: tuple[str, Any]) -> tuple[str, Any]:
        kind, value = arg
        if kind == "map":
            return kind, gpu.encode(value, address(value.of))
        return arg if kind in KINDS else ("ptr", address(arg))

    return pack_params(map(filled, args))


class Emulated:
    """The PTX of the same kernels, executed on the CPU. `options`: fields of emulator.Options (checks, modes, seeds)."""

    name = "emulator"

    def __init__(self, device: Device, **options: Any) -> None:
        self.device = device
        self.arch = virtual(device.sm)
        own = {"smem_limit": device.smem_per_block, "dependent": device.dependent_launch}
        self._options = emulator.Options(**own | options)
        self._memory = emulator.Memory()
        self._shared: list[Copy] = []
        self.stats: list[Stats] = []  # one record per launch, in order; cleared by whoever reads them

    def here(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def allocate(self, nbytes: int, constant: bool = False) -> int:
        return self._memory.alloc(max(nbytes, 16), constant=constant)

    def share(self, array: np.ndarray) -> int:
        self._shared.append(copy := shared(array, self.name, partial(self._copied, array)))
        self._memory.adopt(copy.memory, copy.address)
        return copy.address

    def _copied(self, array: np.ndarray) -> Copy:
        memory = emulator.Memory()
        address = memory.alloc(max(array.nbytes, 16), constant=True)
        memory.write(address, array)
        return Copy(array, address, memory)

    def free(self, address: int) -> None:
        self._memory.free(address)

    def write(self, address: int, array: np.ndarray) -> None:
        self._memory.write(address, np.ascontiguousarray(array).view(np.uint8).reshape(-1))

    def zero(self, address: int, nbytes: int) -> None:
        self.write(address, np.zeros(nbytes, np.uint8))

    def read(self, address: int, nbytes: int) -> np.ndarray:
        return self._memory.read(address, nbytes)

    def load(self, compiled: Compiled) -> Kernel:
        program = emulator.load(compiled.ptx, keep=True)
        return Kernel(program.name, program.decoded.param_bytes, partial(self._start, program))

    def encode(self, given: Map, address: int) -> bytes:
        return encode(given, address)

    def launch(self, kernel: Kernel, grid: Triple, block: Triple, smem: int, params: bytes) -> None:
        check_launch(kernel.name, grid, block, params, kernel.param_bytes)
        kernel.start(grid, block, smem, params)

    def _start(self, program: Program, grid: Triple, block: Triple, smem: int, params: bytes) -> None:
        self.stats.append(emulator.launch(program, grid, block, smem, params, self._memory, options=self._options))

    def call(self, function: Callable, ins: Sequence[Array | None], out: Array, nonfinite: int) -> None:
        def array(a: Array) -> np.ndarray:
            return self.read(a.address, math.prod(a.shape) * a.dtype.itemsize).view(a.dtype).reshape(a.shape)

        y = function(np, [a and array(a) for a in ins])
        with np.errstate(over="ignore"):  # rounded as kernels do: to infinity
            stored = np.broadcast_to(y, out.shape).astype(out.dtype)
        self.write(out.address, stored)
        if not np.isfinite(stored).all():
            self.write(nonfinite, np.ones(1, np.uint32))
        self.stats.append(emulator.Stats())

    def synchronize(self) -> None:
        pass

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        run()
        return run

    def close(self) -> None:
        self._memory = emulator.Memory()
        self._shared.clear()


class Cuda:
    """This machine's GPU through CuPy: the device that is current at construction. Loads our own cubins, so architectures such
    as sm_90a are exact.

    Owns one stream for all work, copies included, which waits for nothing else. CuPy's current stream stays the caller's;
    `follow` and `lead` order the two streams without making the host wait. Memory is freed when no queued work uses it, even if
    this object is dropped without `close`.
    """

    name = "cuda"

    def __init__(self, device: Device) -> None:
        with extras.named():
            import cupy

        self.device = device
        self.arch = device.sm
        self.early = device.launches_early
        self.cupy = cupy
        self.number = int(cupy.cuda.runtime.getDevice())
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self._events = cupy.cuda.Event(disable_timing=True), cupy.cuda.Event(disable_timing=True)
        self._staging = Staging(cupy, self.stream)
        self._held: dict[int, object] = {}
        self._streams = [self.stream]  # all streams for which memory was allocated
        self._kept: deque[tuple[Event, object]] = deque()
        self._kernels: dict[str, Kernel] = {}
        self._process = os.getpid()
        self._give_back = weakref.finalize(self, release, self._process, self.stream, self._held, self._kept, self._staging)

    @contextlib.contextmanager
    def here(self) -> Iterator[None]:
        """Makes its device the thread's current device. Raises RuntimeError in a forked process, where CUDA does not work."""
        if os.getpid() != self._process:
            raise RuntimeError(
                "the GPU was opened before this process was forked, and CUDA works only in the process that opened it: start "
                "processes with multiprocessing's method 'spawn' or 'forkserver', and open the GPU in each"
            )
        with self.cupy.cuda.Device(self.number):
            yield

    @contextlib.contextmanager
    def current(self, stream: int | None = None) -> Iterator[None]:
        """Makes this GPU's stream, or the stream with this handle, CuPy's current one; restores the caller's afterwards.

        CuPy itself forgets a stream that was set by use() at the end of a `with`.
        """
        before = self.cupy.cuda.get_current_stream()
        try:
            with self.stream if stream is None else external(self.cupy, stream):
                yield
        finally:
            before.use()

    def follow(self, stream: int | None = None) -> None:
        """Makes later work here wait for the present work of `stream` (a handle; None: CuPy's current stream)."""
        handle = self.cupy.cuda.get_current_stream().ptr if stream is None else stream
        self.cupy.cuda.runtime.eventRecord(self._events[0].ptr, handle)
        self.stream.wait_event(self._events[0])

    def lead(self, stream: int | None = None) -> None:
        """Makes later work on `stream` (a handle; None: CuPy's current stream) wait for the present work here."""
        handle = self.cupy.cuda.get_current_stream().ptr if stream is None else stream
        self._events[1].record(self.stream)
        self.cupy.cuda.runtime.streamWaitEvent(handle, self._events[1].ptr)

    def keep(self, objects: Sequence[object]) -> Event:
        """Keeps objects alive until the queued work that uses them has ended; returns the event."""
        self.let_go()
        event = self.cupy.cuda.Event(disable_timing=True)
        event.record(self.stream)
        self._kept.append((event, objects))
        return event

    def let_go(self) -> None:
        """Drops the references to objects that were kept for work that has ended."""
        while self._kept and self._kept[0][0].done:
            self._kept.popleft()

    def allocate(self, nbytes: int, constant: bool = False) -> int:
        with self.current():  # pools hand out again in the order of the stream for which they allocated
            memory = self.cupy.cuda.alloc(max(nbytes, 16))
        self._held[memory.ptr] = memory
        return memory.ptr

    def share(self, array: np.ndarray) -> int:
        copy = shared(array, self.number, partial(self._copied, array))
        self.stream.wait_event(copy.ready)
        self._held[copy.address] = copy
        self._streams.append(copy.stream)
        return copy.address

    def _copied(self, array: np.ndarray) -> Copy:
        """Uploads an array to memory allocated for a stream of its own, so that its last user, whoever it is, can free it."""
        stream, ready = self.cupy.cuda.Stream(non_blocking=True), self.cupy.cuda.Event(disable_timing=True)
        with self.current(stream.ptr):
            memory = self.cupy.cuda.alloc(max(array.nbytes, 16))
        self.write(memory.ptr, array)
        ready.record(self.stream)
        return Copy(array, memory.ptr, memory, ready, stream)

    def free(self, address: int) -> None:
        del self._held[address]

    def write(self, address: int, array: np.ndarray) -> None:
        self._staging.upload(address, np.ascontiguousarray(array).reshape(-1).view(np.uint8))

    def read(self, address: int, nbytes: int) -> np.ndarray:
        out = np.empty(nbytes, np.uint8)
        self.read_into(out, address)
        return out

    def read_into(self, out: np.ndarray, address: int) -> None:
        """Fills a contiguous array from that address; waits for the queued work."""
        self._staging.download(out.reshape(-1).view(np.uint8), address)

    def pinned(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Makes a new array for `write_later` and `read_later`; keep it until their queued work has ended."""
        count = math.prod(shape)
        memory = self.cupy.cuda.alloc_pinned_memory(max(count * dtype.itemsize, 1))
        return np.frombuffer(memory, dtype, count).reshape(shape)

    def write_later(self, address: int, pinned: np.ndarray) -> None:
        """Queues a copy from pinned memory to the device, without waiting."""
        self.cupy.cuda.runtime.memcpyAsync(address, pinned.ctypes.data, pinned.nbytes, TO_DEVICE, self.stream.ptr)

    def read_later(self, pinned: np.ndarray, address: int) -> None:
        """Queues a copy from the device to pinned memory, without waiting."""
        self.cupy.cuda.runtime.memcpyAsync(pinned.ctypes.data, address, pinned.nbytes, TO_HOST, self.stream.ptr)

    def zero(self, address: int, nbytes: int) -> None:
        self.cupy.cuda.runtime.memsetAsync(address, 0, nbytes, self.stream.ptr)

    def copy(self, to: int, source: int, nbytes: int) -> None:
        """Queues a copy from device to device."""
        self.cupy.cuda.runtime.memcpyAsync(to, source, nbytes, 3, self.stream.ptr)  # cudaMemcpyDeviceToDevice

    def array(self, a: Array) -> Any:
        """Makes a CuPy array on that memory, which it does not own."""
        memory = self.cupy.cuda.UnownedMemory(a.address, math.prod(a.shape) * a.dtype.itemsize, self, self.number)
        return self.cupy.ndarray(a.shape, a.dtype, self.cupy.cuda.MemoryPointer(memory, 0))

    def load(self, compiled: Compiled) -> Kernel:
        path = str(cubin_path(compiled))
        if path not in self._kernels:
            name = compiled.kernel.rpartition("/")[2].removesuffix(".cu")
            function = self.cupy.RawModule(path=path).get_function(name)
            # Once, as much as there is: CuPy gives one function to all that load it, and their threads launch it with any size.
            function.max_dynamic_shared_size_bytes = self.device.smem_per_block - function.shared_size_bytes
            function.preferred_shared_memory_carveout = CARVEOUT
            prepare = partial(self._prepared, function)
            self._kernels[path] = Kernel(name, param_bytes(function.kernel.ptr), partial(self._start, prepare), prepare)
        return self._kernels[path]

    def encode(self, given: Map, address: int) -> bytes:
        return encode_by_driver(given, address)

    def launch(self, kernel: Kernel, grid: Triple, block: Triple, smem: int, params: bytes) -> None:
        check_launch(kernel.name, grid, block, params, kernel.param_bytes)
        kernel.start(grid, block, smem, params)

    def prepare(self, kernel: Kernel, grid: Triple, block: Triple, smem: int, params: bytearray) -> Starter:
        """Checks a launch once, and returns the function that starts it on a stream, with `params` as they are then."""
        check_launch(kernel.name, grid, block, bytes(params), kernel.param_bytes)
        assert kernel.prepare is not None  # a GPU's
        return kernel.prepare(grid, block, smem, params)

    def _start(self, prepare: Callable[..., Starter], grid: Triple, block: Triple, smem: int, params: bytes) -> None:
        prepare(grid, block, smem, bytearray(params))(self.stream.ptr)

    def _prepared(self, function: RawKernel, grid: Triple, block: Triple, smem: int, params: bytearray) -> Starter:
        if self.early:
            return dependent(function.kernel.ptr, grid, block, smem, params)
        # A one-element array of raw bytes is passed by value: the parameter struct itself.
        blob = np.frombuffer(params, np.dtype(f"V{len(params)}"))

        def start(stream: int) -> None:
            own = stream == self.stream.ptr
            function(grid, block, (blob,), shared_mem=smem, stream=self.stream if own else external(self.cupy, stream))

        return start

    def call(self, function: Callable, ins: Sequence[Array | None], out: Array, nonfinite: int) -> None:
        with self.current():
            stored, word = self.array(out), self.array(Array(nonfinite, np.dtype(np.uint32), (1,)))
            stored[...] = function(self.cupy, [a and self.array(a) for a in ins])
            word |= ~self.cupy.isfinite(stored).all()

    def synchronize(self) -> None:
        self.stream.synchronize()

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """Queues one run (kernels load lazily), then captures a CUDA graph; returns a function that replays it on the
        stream.
        """
        run()
        with self.current():
            self.stream.begin_capture()
            try:
                run()
            finally:
                graph = self.stream.end_capture()
        graph.upload(self.stream)
        return lambda: graph.launch(self.stream)

    def close(self) -> None:
        """Frees all memory after the queued work has ended, to the device if CuPy's own pool held it.

        Does nothing in a forked process, which does not own the memory.
        """
        if self._give_back():
            with self.here():
                for stream in self._streams:
                    self.cupy.get_default_memory_pool().free_all_blocks(stream=stream)


def external(cupy: ModuleType, handle: int) -> Stream:
    """Wraps another library's stream, by its handle, as a CuPy stream."""
    if not hasattr(cupy.cuda.Stream, "from_external"):  # CuPy 13
        return cupy.cuda.ExternalStream(handle)
    return cupy.cuda.Stream.from_external(SimpleNamespace(__cuda_stream__=lambda: (0, handle)))


def release(process: int, stream: Stream, held: dict[int, object], kept: deque[tuple[Event, object]], staging: Staging) -> bool:
    """Waits for the queued work, then drops memory, kept objects and `staging`; returns whether the GPU still answers.

    After a fatal error nothing runs, and a forked process cannot ask.
    """
    if os.getpid() != process:
        return False
    try:
        stream.synchronize()
    except RuntimeError as e:
        if not is_fatal(e):
            raise
        return False
    held.clear()
    kept.clear()
    return True


def open_gpu(device: Device, **options: Any) -> Cuda | Emulated:
    """Opens the GPU if `device` is this machine's (device.measured), else the emulator with these options."""
    return Cuda(device) if device.measured else Emulated(device, **options)
