"""Loads PTX, holds global memory, launches a grid on the CPU's cores, and explains failed checks."""

from __future__ import annotations

import bisect
import ctypes
import functools
import math
import re
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from cuda_kernels.emulator import programs
from cuda_kernels.emulator.build import library
from cuda_kernels.emulator.programs import SHARED_START, Decoded, Triple, check_cluster, cluster_of
from cuda_kernels.emulator.stats import COUNT, LineStats, Stats, of_counts

if TYPE_CHECKING:
    from cuda_kernels.emulator.parse import Module

RED_ZONE = 4096
KEPT = 256  # decoded programs
POISON = 0xCB
APPROXIMATE = ("rcp", "div", "sqrt", "rsqrt", "sin", "cos", "ex2", "lg2", "tanh")  # with .approx (div: .full too), of FP32
MOST = 2**32 - 1  # the largest number of 32 bits
MOST_THREADS = 1024  # of the host, for one launch


class EmulatorError(Exception):
    """Raised where a check fails, or the PTX has an unknown element. `check` names it."""

    def __init__(self, message: str, check: str = ""):
        super().__init__(message)
        self.check = check


@dataclass(frozen=True)
class Options:
    """The way a launch runs. `seed` orders warps and blocks (0: natural order), with preemption after random numbers of
    instructions. `async_mode` "late" completes a cp.async only at its wait, with the destination poisoned until then and the
    source read then. `threads`: of the host, None: all cores. `track_writes` lists addresses of allocations whose writes are
    counted per byte (with checks on). `resident_blocks`: the number of blocks that run at a time, like SMs x occupancy on a
    GPU; 0 for one per host thread. A block that waits for a non-resident block is a deadlock, and an error (unless its loop
    changes memory, a counter that it uses, or polls more than four places). Bounds and alignment are checked even with
    `checks` off. Three checks have switches, for programs that break them on purpose: without `uninitialised_shared` shared
    memory may be read before it is written; without `same_value_races` unordered threads may store the value that is already
    there; without `proxy_fences` asynchronous operations see ordinary stores that no fence.proxy.async covers, as CUTLASS's
    loops of cp.async expect. A wgmma computes when its fourth warp issues it, a bulk copy when it is issued; "late" at the
    first wait for it, with a seed at one of both. Then mbarrier.try_wait may fail, too. `sum_bits`: 0 rounds each sum of
    tensor cores; 24 truncates like Ampere and Ada, 25 like Hopper's mma (Sums in mma.h). `dependent`: the launch may begin
    before the previous one has ended, so until griddepcontrol.wait it may read constants only, even if the kernel never
    waits. A kernel that waits is always checked so. `cluster`: the launch attribute; None: as the kernel declares.
    Instructions of APPROXIMATE are correctly rounded; those in `low_ends` give the lowest result that the PTX ISA allows,
    those in `high_ends` the highest. Raises ValueError for invalid options.
    """

    checks: bool = True
    async_mode: str = "eager"
    seed: int = 0
    threads: int | None = None
    smem_limit: int = 227 * 1024
    track_writes: tuple[int, ...] = ()
    resident_blocks: int = 0
    uninitialised_shared: bool = True
    same_value_races: bool = True
    proxy_fences: bool = True
    sum_bits: int = 0
    dependent: bool = False
    cluster: Triple | None = None
    low_ends: tuple[str, ...] = ()
    high_ends: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, got, fits, expected in (
            (
                "threads",
                self.threads,
                self.threads is None or _whole(self.threads, 1, MOST_THREADS),
                f"a whole number from 1 to {MOST_THREADS} or None (all cores)",
            ),
            ("seed", self.seed, _whole(self.seed, 0, 2**64 - 1), f"a whole number from 0 to {2**64 - 1}"),
            (
                "resident_blocks",
                self.resident_blocks,
                _whole(self.resident_blocks, 0, MOST),
                f"a whole number from 0 to {MOST}",
            ),
            ("async_mode", self.async_mode, self.async_mode in ("eager", "late"), "eager or late"),
            ("sum_bits", self.sum_bits, self.sum_bits in (0, 24, 25), "0 (rounded), 24 (Ampere, Ada) or 25 (Hopper)"),
        ):
            if not fits:
                raise ValueError(f"{name}: expected {expected}, got {got!r}")
        for end in sorted({*self.low_ends, *self.high_ends}):
            if end not in APPROXIMATE or end in self.low_ends and end in self.high_ends:
                known = ", ".join(APPROXIMATE)
                raise ValueError(f"low_ends, high_ends: got '{end}', expected names out of {known}, none in both")


def _whole(value: object, low: int, high: int) -> bool:
    return isinstance(value, int) and low <= value <= high


class Memory:
    """Global memory: real host memory, each allocation alone between red zones and filled with a poison."""

    def __init__(self) -> None:
        self._buffers: dict[int, tuple[np.ndarray, int, str, bool]] = {}
        self._starts: list[int] = []

    def alloc(self, nbytes: int, fill: int = POISON, name: str = "", constant: bool = False) -> int:
        """Allocates memory at a 256-byte aligned address. `name` appears in messages; `constant`: no launch writes it."""
        if nbytes < 0:
            raise ValueError(f"cannot allocate {nbytes} bytes")
        room = np.empty(nbytes + 2 * RED_ZONE + 256, np.uint8)
        address = -(-(room.ctypes.data + RED_ZONE) // 256) * 256
        start = address - room.ctypes.data
        room[:start] = POISON
        room[start : start + nbytes] = fill
        room[start + nbytes :] = POISON
        self._buffers[address] = (room, nbytes, name, constant)
        bisect.insort(self._starts, address)
        return address

    def adopt(self, other: Memory, address: int) -> None:
        """Adds another memory's allocation to this one: the same bytes."""
        self._buffers[address] = other._buffers[address]
        bisect.insort(self._starts, address)

    def free(self, address: int) -> None:
        self._check(address, 0)
        del self._buffers[address]
        self._starts.remove(address)

    def size(self, address: int) -> int:
        self._check(address, 0)
        return self._buffers[address][1]

    def view(self, address: int, nbytes: int | None = None) -> np.ndarray:
        """Returns the bytes from `address` on as an array on the same memory; the address may be inside an allocation."""
        base = self._base(address)
        room, size, *_ = self._buffers[base]
        nbytes = base + size - address if nbytes is None else nbytes
        self._check(address, nbytes)
        start = address - room.ctypes.data
        return room[start : start + nbytes]

    def write(self, address: int, data: bytes | bytearray | memoryview | np.ndarray) -> None:
        raw = np.frombuffer(data, np.uint8) if isinstance(data, bytes | bytearray | memoryview) else np.ascontiguousarray(data)
        raw = raw.reshape(-1).view(np.uint8)
        self.view(address, raw.size)[:] = raw

    def read(self, address: int, nbytes: int) -> np.ndarray:
        return self.view(address, nbytes).copy()

    def upload(self, array: np.ndarray, name: str = "") -> int:
        array = np.ascontiguousarray(array)
        address = self.alloc(array.nbytes, name=name)
        self.write(address, array)
        return address

    def table(self) -> np.ndarray:
        return np.array([(a, self._buffers[a][1], self._buffers[a][3]) for a in self._starts], np.uint64).reshape(-1, 3)

    def nearest(self, address: int) -> str:
        """Describes this address relative to the nearest allocation, for a message."""
        best = None
        i = bisect.bisect_right(self._starts, address)
        for start in self._starts[max(0, i - 1) : i + 1]:
            size, name, _ = self._buffers[start][1:]
            label = f"'{name}' ({size} bytes at 0x{start:x})" if name else f"of {size} bytes at 0x{start:x}"
            if start <= address < start + size:
                return f"at byte {address - start} of the allocation {label}"
            gap, side = (start - address, "before") if address < start else (address - start - size, "past the end of")
            if best is None or gap < best[0]:
                best = gap, f"{gap} bytes {side} the allocation {label}"
        return best[1] if best else "no memory is allocated"

    def check_red_zones(self) -> None:
        """Raises EmulatorError if host code or a kernel without checks wrote outside an allocation."""
        for address, (room, size, name, _) in self._buffers.items():
            start = address - room.ctypes.data
            bad = np.flatnonzero(np.concatenate([room[:start], room[start + size :]]) != POISON)
            if bad.size:
                raise EmulatorError(
                    f"red zone of allocation '{name or hex(address)}' of {size} bytes was overwritten", "red zone"
                )

    def _base(self, address: int) -> int:
        i = bisect.bisect_right(self._starts, address)
        if i == 0:
            raise ValueError(f"address 0x{address:x} is not allocated")
        return self._starts[i - 1]

    def _check(self, address: int, nbytes: int) -> None:
        base = self._base(address)
        if address + nbytes > base + self._buffers[base][1] or nbytes < 0 or (nbytes == 0 and address not in self._buffers):
            raise ValueError(f"{nbytes} bytes at 0x{address:x}: {self.nearest(address)}")


class Program:
    """A decoded kernel, ready to launch any number of times."""

    handle: int | None = None

    def __init__(self, decoded: Decoded) -> None:
        self.decoded = d = decoded
        self.lib = lib = library()
        self.handle = lib.emu_program(
            d.code.ctypes.data,
            len(d.code),
            d.consts.ctypes.data,
            len(d.consts),
            d.tables.ctypes.data,
            len(d.tables),
            d.specials.ctypes.data,
            len(d.specials),
            d.sizes.ctypes.data,
        )

    def __del__(self) -> None:
        if self.handle:
            self.lib.emu_program_free(self.handle)

    @property
    def name(self) -> str:
        return self.decoded.name

    def place(self, pc: int) -> str:
        """Returns the source and PTX line of an instruction."""
        d = self.decoded
        line, file, source, opcode = d.places[min(pc, len(d.places) - 1)].tolist()
        known = d.files.get(str(file))
        return f"{f'{known}:{source}, ' if known else ''}PTX line {line}: {d.opcodes[opcode]}"


_programs: OrderedDict[str, Program] = OrderedDict()
_programs_lock = threading.Lock()


@functools.lru_cache(maxsize=4)
def parsed(ptx: str) -> Module:
    """Parses a module; the last few are cached, because a driver asks for a module and then for each of its kernels."""
    from cuda_kernels.emulator.parse import parse

    return parse(ptx)


def load(ptx: str, kernel: str | None = None, *, keep: bool = False) -> Program:
    """Parses and decodes a kernel; cached by content in memory, with `keep` also on disk. EmulatorError names file and line."""
    key = programs.key_of(ptx, kernel)
    with _programs_lock:
        program = _programs.get(key)
        if program is not None:
            _programs.move_to_end(key)
            return program
    path = programs.cache_path(key) if keep else None
    decoded = programs.read(path) if path else None
    if decoded is None:
        decoded = _decoded(ptx, kernel)
        if path:
            programs.write(path, decoded)
    program = Program(decoded)
    with _programs_lock:
        _programs[key] = program
        while len(_programs) > KEPT:
            _programs.popitem(last=False)
    return program


def _decoded(ptx: str, kernel: str | None) -> Decoded:
    """Decodes a kernel. The decoder is imported here because it imports slowly, and cached programs do not need it."""
    from cuda_kernels.emulator import decode, operands, parse

    try:
        return decode.decode(parsed(ptx), kernel)
    except (parse.ParseError, operands.DecodeError) as e:
        raise EmulatorError(str(e), "unknown instruction") from None


class _Launch(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("smem_base", ctypes.c_uint32),
        ("smem_end", ctypes.c_uint32),
        ("static_end", ctypes.c_uint32),
        ("dynamic_smem", ctypes.c_uint32),
        ("params", ctypes.c_void_p),
        ("param_bytes", ctypes.c_uint64),
        ("allocations", ctypes.c_void_p),
        ("n_allocations", ctypes.c_uint64),
        ("tracked", ctypes.c_void_p),
        ("n_tracked", ctypes.c_uint64),
        ("seed", ctypes.c_uint64),
        ("checks", ctypes.c_uint32),
        ("late", ctypes.c_uint32),
        ("threads", ctypes.c_uint32),
        ("resident", ctypes.c_uint32),
        ("any_shared_read", ctypes.c_uint32),
        ("same_value", ctypes.c_uint32),
        ("sum_bits", ctypes.c_uint32),
        ("unfenced", ctypes.c_uint32),
        ("dependent", ctypes.c_uint32),
        ("cluster", ctypes.c_uint32 * 3),
        ("low_ends", ctypes.c_uint32),
        ("high_ends", ctypes.c_uint32),
    ]


def launch(
    program: Program,
    grid: Triple,
    block: Triple,
    dynamic_smem: int,
    params: bytes,
    memory: Memory,
    *,
    options: Options = Options(),  # noqa: B008  (frozen)
) -> Stats:
    """Runs the grid and returns its counters. Raises EmulatorError for the first failed check; Ctrl-C stops it cleanly."""
    d = program.decoded
    _check_launch(program, grid, block, dynamic_smem, params, options)
    shadows = {a: np.zeros(memory.size(a), np.uint8) for a in map(int, options.track_writes)}
    pointers = (ctypes.c_void_p * max(1, len(shadows)))(*[s.ctypes.data for s in shadows.values()])
    blob = (ctypes.c_char * max(1, len(params))).from_buffer_copy(params or b"\0")
    table, tracked = _allocations(d, memory), np.array(options.track_writes, np.uint64)
    arrays = _Arrays(blob, len(params), table, tracked)
    record = _record(d, grid, block, dynamic_smem, arrays, options)
    totals, counts = np.zeros(10, np.uint64), np.zeros(len(d.code), COUNT)
    numbers, text = np.zeros(8, np.uint64), ctypes.create_string_buffer(1 << 16)
    lib = library()
    run = lib.emu_launch(program.handle, ctypes.addressof(record))
    try:
        while not lib.emu_poll(run, 100):  # between two polls Python handles signals
            pass
    except BaseException:
        lib.emu_stop(run)
        raise
    finally:
        failed = lib.emu_finish(
            run,
            totals.ctypes.data,
            counts.ctypes.data,
            ctypes.addressof(pointers),
            numbers.ctypes.data,
            ctypes.addressof(text),
            len(text),
        )
    if failed:
        raise _explain(program, memory, text.value.decode(), [int(v) for v in numbers], block)
    return of_counts(d, totals, counts, {a: s & 127 for a, s in shadows.items()})


def _allocations(d: Decoded, memory: Memory) -> np.ndarray:
    """Lists the memory's allocations and the module's global variables, by address."""
    table = memory.table()
    if not d.globals:
        return table
    table = np.concatenate([table, np.array([(a.ctypes.data, a.nbytes, 1) for _, a in d.globals], np.uint64)])
    return np.ascontiguousarray(table[np.argsort(table[:, 0])])


class _Arrays(NamedTuple):
    """The arrays to which the interpreter's record points: the parameters, allocations by address, and addresses of tracked
    ones."""

    params: ctypes.Array
    param_bytes: int
    allocations: np.ndarray
    tracked: np.ndarray


def _record(d: Decoded, grid: Triple, block: Triple, dynamic_smem: int, arrays: _Arrays, options: Options) -> _Launch:
    """Makes the interpreter's record of a launch. It holds addresses: the caller keeps the arrays alive."""
    # Shared addresses of both kinds are 32 bits; the dynamic array starts no better aligned than it declares.
    return _Launch(
        grid=tuple(grid),
        block=tuple(block),
        smem_base=SHARED_START,
        smem_end=d.dynamic_at + dynamic_smem if dynamic_smem else d.static_end,
        static_end=d.static_end,
        dynamic_smem=dynamic_smem,
        params=ctypes.addressof(arrays.params),
        param_bytes=arrays.param_bytes,
        allocations=arrays.allocations.ctypes.data,
        n_allocations=len(arrays.allocations),
        tracked=arrays.tracked.ctypes.data,
        n_tracked=len(arrays.tracked),
        seed=options.seed,
        checks=options.checks,
        late=options.async_mode == "late",
        threads=options.threads or 0,
        resident=options.resident_blocks,
        any_shared_read=not options.uninitialised_shared,
        same_value=not options.same_value_races,
        sum_bits=options.sum_bits,
        unfenced=not options.proxy_fences,
        dependent=options.dependent,
        cluster=cluster_of(d, options.cluster),
        low_ends=_bits(options.low_ends),
        high_ends=_bits(options.high_ends),
    )


def _check_launch(program: Program, grid: Triple, block: Triple, dynamic_smem: int, params: bytes, options: Options) -> None:
    d, name = program.decoded, program.name
    for what, values in (("grid", grid), ("block", block)):
        if len(values) != 3 or min(values) < 1:
            raise ValueError(f"{what} {tuple(values)}: expected three positive numbers")
    threads, most = math.prod(block), math.prod(d.maxntid)
    if threads > 1024:
        raise ValueError(f"{name}: expected a block of at most 1024 threads, got {threads}")
    if d.maxntid and threads > most:
        raise ValueError(f"{name}: expected a block of at most {most} threads, as the kernel declares, got {threads}")
    check_cluster(d, options.cluster, grid, options.resident_blocks)
    used = d.static_end - SHARED_START + dynamic_smem
    if used > options.smem_limit:
        raise ValueError(f"{name}: {used} bytes of shared memory, the device allows {options.smem_limit}")
    if not d.param_bytes <= len(params) < d.param_bytes + 8:  # a struct may be padded to its alignment
        raise ValueError(f"{name}: {len(params)} bytes of parameters, the kernel takes {d.param_bytes}")


def _bits(names: tuple[str, ...]) -> int:
    return sum(1 << APPROXIMATE.index(name) for name in set(names))


def _explain(program: Program, memory: Memory, text: str, numbers: list[int], block: Triple) -> EmulatorError:
    check, _, detail = text.partition("\n")
    pc, lanes, bx, by, bz, warp = numbers[:6]
    detail = re.sub(r"@(\d+)@", lambda m: ": " + memory.nearest(int(m[1])), detail)
    detail = re.sub(r"@pc(\d+)@", lambda m: program.place(int(m[1])), detail).rstrip(";")
    lane = (lanes & -lanes).bit_length() - 1 if lanes else 0
    t = warp * 32 + lane
    thread = (t % block[0], t // block[0] % block[1], t // (block[0] * block[1]))
    return EmulatorError(
        f"{check}: {detail}\n  kernel {program.name}, {program.place(pc)}\n  block ({bx},{by},{bz}), warp {warp}, "
        f"lanes 0x{lanes:08x}, first: lane {lane}, thread {thread}",
        check,
    )


__all__ = ["EmulatorError", "LineStats", "Memory", "Options", "Program", "Stats", "launch", "load"]
