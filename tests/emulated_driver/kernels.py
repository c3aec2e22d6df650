"""The Python half of the emulated driver: images to PTX, PTX to programs, launches to the emulator.

The library imports it on the first call into it, and calls `load`, `function`, `called`, `launch`, `get_global` and `encode`
under its lock. Each returns a CUresult; the error is printed too, because the caller sees only a number, as on a GPU.
"""

import atexit
import ctypes
import functools
import hashlib
import itertools
import json
import re
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cuda_kernels import emulator
from cuda_kernels.device import Device, named
from cuda_kernels.emulator.parse import Module, ParseError
from cuda_kernels.emulator.programs import SHARED_START
from cuda_kernels.emulator.run import EmulatorError, parsed
from cuda_kernels.files import cache_dir
from tests.emulated_driver.settings import ERRORS, CFacts, CSettings, Settings, c_facts, c_settings, from_environment, visible
from tests.map_calls import MapCall, encoded

INVALID_VALUE, INVALID_IMAGE, NO_BINARY, INVALID_PTX, NOT_FOUND = 1, 200, 209, 218, 500
ILLEGAL_ADDRESS, MISALIGNED, LAUNCH_FAILED, UNKNOWN = 700, 716, 719, 999
HANGS = -1
FAILED = {"out of bounds": ILLEGAL_ADDRESS, "misaligned": MISALIGNED}  # by the emulator's check; any other: LAUNCH_FAILED
FLUSHED_WORDS = 512  # words that flush_l2 reads, for whose duration they do not matter: 120 MB would take minutes
U64, INT, POINTER = ctypes.c_uint64, ctypes.c_int, ctypes.c_void_p


class Kernel(NamedTuple):
    program: emulator.Program
    name: str
    skips: bool  # skips launches that would change nothing; our own kernels' parameters hold all addresses


class Image(NamedTuple):
    """An image's PTX and facts, not the parsed module, which is a hundred times as large: a process that times tactics loads
    hundreds.
    """

    ptx: str
    params: dict[str, list[tuple[int, int]]]  # kernel -> (offset, bytes) of each parameter
    registers: int  # registers of its kernel, 0 if unknown
    ours: bool


@dataclass
class State:
    """The state of this process: the loaded images and kernels, and how often each fault's pattern has matched."""

    lib: ctypes.CDLL
    settings: Settings
    devices: list[Device]
    images: list[Image]
    kernels: list[Kernel]
    seen: Counter[tuple[int, bool]]
    settled: dict[bytes, float]  # launch that left memory as it found it -> its microseconds
    last: dict[int, str]  # device -> the kernel that ran last


_state: State
_kept: list[object] = []  # callbacks that C code holds


class Memory:
    """The driver's allocations, in the form that the emulator asks for."""

    def __init__(self, device: int) -> None:
        self.device = device

    def table(self) -> np.ndarray:
        lib = _state.lib
        rows = np.zeros((lib.emulated_driver_allocations(self.device, None, 0), 3), np.uint64)
        lib.emulated_driver_allocations(self.device, rows.ctypes.data, len(rows))
        # Which allocation holds weights, that a dependent launch may read early, no driver knows: early reads of all are let
        # pass (early writes are not). Runs on the emulator itself check them, where the runtime names the constant arrays.
        rows[:, 2] = 1
        return rows

    def behind(self, params: bytes) -> list[tuple[int, int]]:
        """Returns (address, bytes) of the allocations into which the parameters point."""
        rows = self.table()
        words = np.frombuffer(params[: len(params) // 8 * 8], np.uint64)
        at = np.searchsorted(rows[:, 0], words, side="right").astype(int) - 1
        inside = [i for i, word in zip(at.tolist(), words, strict=True) if i >= 0 and word < rows[i, 0] + rows[i, 1]]
        return [(int(rows[i, 0]), int(rows[i, 1])) for i in sorted(set(inside))]

    def rows(self) -> list[tuple[int, int]]:
        return [(int(a), int(n)) for a, n, _ in self.table()]

    def size(self, address: int) -> int:
        return dict(self.rows())[address]

    def nearest(self, address: int) -> str:
        at, size = min(self.rows(), key=lambda r: max(r[0] - address, address - r[0] - r[1], 0), default=(0, 0))
        return f"0x{address:x}: nearest is the allocation of {size} bytes at 0x{at:x}"


def tell(text: str) -> None:
    print(f"[emulated driver] {text}", file=sys.stderr, flush=True)


def status_of(function: Callable[..., int]) -> Callable[..., int]:
    """Returns the function with its exceptions printed and turned into a status: no exception may pass through C."""

    @functools.wraps(function)
    def call(*args: Any) -> int:
        try:
            return function(*args)
        except KeyboardInterrupt:  # a GPU's kernel does not see it: Python's handler runs when the call is over
            ctypes.pythonapi.PyErr_SetInterrupt()
            return LAUNCH_FAILED
        except ParseError as e:
            tell(str(e))
            return INVALID_PTX
        except EmulatorError as e:
            tell(str(e))
            return FAILED.get(e.check, LAUNCH_FAILED)
        except Exception:
            tell(f"{function.__name__} failed:\n{traceback.format_exc()}")
            return UNKNOWN

    return call


# ---- images


def entry_beside(cubin: Path, digest: str) -> dict | None:
    """Returns the compile cache's entry for machine code with that hash, which lies beside it; None without one."""
    try:
        meta = json.loads(cubin.with_suffix(".json").read_text())
    except (OSError, ValueError):
        return None
    return meta if meta.get("cubin_sha256") == digest else None


@functools.lru_cache(maxsize=256)
def ptx_of_cubin(digest: str, size: int, path: str) -> tuple[str, str] | None:
    """Returns (PTX, compiler's log) from which the compile cache has that machine code; None if it does not know it."""
    loaded = [Path(path)] if path else []
    for cubin in itertools.chain(loaded, (cache_dir() / "kernels").glob("*/*.cubin")):
        meta = entry_beside(cubin, digest) if cubin.stat().st_size == size else None
        if meta:
            return meta["ptx"], meta["log"]
    return None


def runs_on(target: str, cc: int, machine_code: bool) -> bool:
    """Whether code for `target` (sm_90a) runs on a device: PTX runs on newer devices too, machine code within a major
    version.
    """
    made_for, exact = int(target[3:].rstrip("af")), target.endswith("a")
    if exact or made_for == cc:
        return made_for == cc
    return made_for <= cc and (not machine_code or made_for // 10 == cc // 10)


def placed(module: Module) -> dict[str, list[tuple[int, int]]]:
    """Returns kernel -> (offset, bytes) of each of its parameters, as members of a struct."""
    found = {}
    for name, kernel in module.functions.items():
        at, rows = 0, []
        for p in kernel.params:
            at = -(-at // p.align) * p.align
            rows.append((at, p.size))
            at += p.size
        found[name] = rows
    return found


@status_of
def load(device: int, image: int, size: int, path: bytes, out: Any) -> int:
    data, log = ctypes.string_at(image, size), ""
    machine_code = data.startswith(b"\x7fELF")
    if machine_code:
        found = ptx_of_cubin(hashlib.sha256(data).hexdigest(), size, path.decode())
        if found is None:
            tell("machine code whose PTX is not in the compile cache: only that runs here")
            return NO_BINARY
        ptx, log = found
    else:
        ptx = data.rstrip(b"\0").decode()
    target = re.search(r"^\.target\s+(sm_\w+)", ptx, re.M)
    if target is None:
        return INVALID_IMAGE
    if not runs_on(target[1], _state.devices[device].cc, machine_code):
        tell(f"an image for {target[1]} on a device of sm_{_state.devices[device].cc}")
        return NO_BINARY if machine_code else INVALID_PTX
    registers = re.findall(r"Used (\d+) registers", log)
    _state.images.append(Image(ptx, placed(parsed(ptx)), max(map(int, registers), default=0), machine_code))
    out[0] = len(_state.images)
    return 0


@status_of
def function(image: int, name: bytes, out: Any, facts: Any, params: Any) -> int:
    """Finds a kernel of an image. `facts` gets: static shared memory in bytes, registers, threads per block (0: any); `params`:
    count, (offset, bytes)...
    """
    ptx, kernels, registers, ours = _state.images[image - 1]
    kernel = name.decode()
    if kernel not in kernels:
        return NOT_FOUND
    program, rows = emulator.load(ptx, kernel), kernels[kernel]
    decoded = program.decoded
    threads = int(np.prod(decoded.maxntid)) if decoded.maxntid else 0
    facts[0], facts[1], facts[2] = decoded.static_end - SHARED_START, registers or 32, threads
    params[0] = len(rows)
    for i, (offset, size) in enumerate(rows):
        params[1 + 2 * i], params[2 + 2 * i] = offset, size
    _state.kernels.append(Kernel(program, kernel, ours and kernel != "flush_l2"))
    out[0] = len(_state.kernels)
    return 0


@status_of
def get_global(image: int, name: bytes, address: Any, size: Any) -> int:
    ptx = _state.images[image - 1].ptx
    for kernel in _state.images[image - 1].params:
        for known, array in emulator.load(ptx, kernel).decoded.globals:
            if known == name.decode():
                address[0], size[0] = array.ctypes.data, array.nbytes
                return 0
    return NOT_FOUND


@status_of
def encode(call: Any, out: int) -> int:
    try:
        made = encoded(call.contents)
    except ValueError as e:
        tell(f"tensor map: {e}")
        return INVALID_VALUE
    ctypes.memmove(out, made, len(made))
    return 0


# ---- launches


def fault_of(kernel: str, call: bool) -> str:
    """Returns the error in which this launch is asked to end, or "". Calls and runs of a kernel are counted separately."""
    found = ""
    for i, fault in enumerate(_state.settings.faults):
        if fault.call == call and fault.matches(kernel):
            _state.seen[i, call] += 1
            if fault.hits(kernel, _state.seen[i, call]):
                found = found or fault.error
    return found


@status_of
def called(handle: int) -> int:
    error = fault_of(_state.kernels[handle - 1].name, call=True)
    return ERRORS[error] if error else 0


@status_of
def launch(device: int, handle: int, dims: Any, params: int, size: int, took: Any) -> int:
    """Runs a launch. `took` gets: microseconds, and the SM clocks that the kernel spins in addition."""
    kernel = _state.kernels[handle - 1]
    name, facts = kernel.name, _state.devices[device]
    error = fault_of(name, call=False)
    if error == "hang":
        tell(f"{name} hangs, as the settings ask")
        return HANGS
    if error in ERRORS:
        tell(f"{name} fails, as the settings ask: {error}")
        return ERRORS[error]
    grid, block, smem = tuple(dims[0:3]), tuple(dims[3:6]), dims[6]
    blob = ctypes.string_at(params, size)
    clocks = 0
    if name == "flush_l2":
        data, sink, words, clocks = np.frombuffer(blob, np.int64)[:4].tolist()
        blob = np.array([data, sink, min(words, FLUSHED_WORDS), 0], np.int64).tobytes()
        grid = (min(grid[0], 2), 1, 1)
    memory = Memory(device)
    behind = memory.behind(blob)
    touched = behind + [(a.ctypes.data, a.nbytes) for _, a in kernel.program.decoded.globals]
    options = emulator.Options(
        checks=_state.settings.checks or error == "wrong",
        smem_limit=facts.smem_per_block,
        track_writes=tuple(a for a, _ in behind) if error == "wrong" else (),
    )

    def run() -> float:
        stats = emulator.launch(kernel.program, grid, block, smem, blob, memory, options=options)  # type: ignore[arg-type]
        spoil(stats)
        return estimate(facts, grid, stats)

    if kernel.skips and not error and not _state.settings.repeats:
        took[0] = run_unless_settled(run, repr((device, handle, grid, block, smem, touched)).encode() + blob, touched)
    else:
        took[0] = run()
    before, _state.last[device] = _state.last.get(device, ""), name
    for rule in _state.settings.behind:
        took[0] *= rule.factor if rule.applies(name, before) else 1.0
    took[1] = clocks
    return 0


def run_unless_settled(run: Callable[[], float], shape: bytes, touched: Iterable[tuple[int, int]]) -> float:
    """Returns the microseconds of a launch. It is not run if an equal launch left all memory that it may touch as it found it,
    and that memory has not changed since: the emulator would only write the same bytes again. Most launches that are timed are
    such.
    """
    before = digest(shape, touched)
    if before not in _state.settled:
        us = run()
        if digest(shape, touched) != before:
            return us
        _state.settled[before] = us
    return _state.settled[before]


def digest(shape: bytes, touched: Iterable[tuple[int, int]]) -> bytes:
    """Hashes a launch and all memory that it may read and write, as (address, bytes)."""
    found = hashlib.sha1(shape, usedforsecurity=False)
    for address, size in touched:
        found.update((ctypes.c_char * size).from_address(address))
    return found.digest()


def estimate(d: Device, grid: tuple[int, ...], stats: emulator.Stats) -> float:
    """Returns microseconds by a rough roofline, so that more work takes longer. It says nothing about a real GPU."""
    sms = min(int(np.prod(grid)), d.num_sms)
    issue = (stats.instructions - stats.mma - stats.mma_sp) / (2 * sms * d.clock_mhz)
    mma = (stats.mma + 0.6 * stats.mma_sp) * 2048 / (d.mma_fma_per_clk * d.mma_sync_share * sms * d.clock_mhz)
    moved = stats.launch_unique_bytes / (1e3 * d.dram_gbps)
    return d.launch_us + max(issue, mma, moved)


def spoil(stats: emulator.Stats) -> None:
    """Changes a kernel's results: every third byte of the first allocation that it wrote to."""
    for address, counts in stats.writes.items():
        places = np.flatnonzero(counts)[::3]
        if places.size:
            np.ctypeslib.as_array((ctypes.c_uint8 * counts.size).from_address(address))[places] ^= 0x15
            return


# ---- into the library


def register(path: str) -> None:
    """Gives the library the settings, the devices' facts and the functions above; the library calls it."""
    global _state
    settings = from_environment()
    lib = ctypes.CDLL(path)
    lib.emulated_driver_allocations.restype = U64
    lib.emulated_driver_allocations.argtypes = [INT, POINTER, U64]
    lib.emulated_driver_register.argtypes = [POINTER, POINTER, POINTER]
    numbers = visible(len(settings.devices))
    shown = len(numbers)
    numbers += [i for i in range(len(settings.devices)) if i not in numbers]
    devices = [named(settings.devices[i]) for i in numbers]
    _state = State(lib, settings, devices, [], [], Counter(), {}, {})
    u64s, ints = ctypes.POINTER(U64), ctypes.POINTER(INT)
    kinds: dict[Callable[..., int], list[Any]] = {
        load: [INT, POINTER, U64, ctypes.c_char_p, u64s],
        function: [U64, ctypes.c_char_p, u64s, ints, ints],
        called: [U64],
        launch: [INT, U64, ctypes.POINTER(ctypes.c_uint), POINTER, U64, ctypes.POINTER(ctypes.c_double)],
        get_global: [U64, ctypes.c_char_p, u64s, u64s],
        encode: [ctypes.POINTER(MapCall), POINTER],
    }
    made = [ctypes.CFUNCTYPE(INT, *args)(f) for f, args in kinds.items()]
    _kept.extend(made)
    table = (POINTER * len(made))(*(ctypes.cast(m, POINTER) for m in made))
    facts = (CFacts * len(devices))(*(c_facts(i, d) for i, d in zip(numbers, devices, strict=True)))
    own: CSettings = c_settings(settings, shown)
    lib.emulated_driver_register(ctypes.addressof(own), ctypes.addressof(facts), ctypes.addressof(table))
    atexit.register(lib.emulated_driver_stop)
