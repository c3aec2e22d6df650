"""Each check is proven by a kernel with exactly that fault, which it must name, and by the corrected twin, which must pass."""

import contextlib
import os
import signal
import struct
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from cuda_kernels.compile import compile_kernel
from cuda_kernels.device import NAMED
from cuda_kernels.emulator import EmulatorError, Memory, Options, launch, load
from cuda_kernels.emulator.build import BuildError, compiler
from cuda_kernels.launch import Emulated

HERE = Path(__file__).parents[2] / "faulty"
N = 64


def run(name: str, fixed: bool, options: Options):
    path = str(HERE / f"{name}.cu")
    sm = "sm_90a" if name.startswith("early") else "sm_80"
    program = load(compile_kernel(path, {"FIXED": 1} if fixed else {}, sm).ptx)
    memory = Memory()
    x = memory.upload(np.random.default_rng(0).standard_normal(N).astype(np.float32), name="x")
    y = memory.alloc(4 * N, name="y")
    if options.track_writes:
        options = Options(track_writes=(y,))
    stats = launch(program, (1, 1, 1), (N, 1, 1), 4 * N, struct.pack("<QQi", x, y, N), memory, options=options)
    return stats, y


FAULTS = {  # kernel -> the check, and words its message must contain
    "out_of_bounds_read": (
        "out of bounds",
        ["global load of 4 bytes", "0 bytes past the end of the allocation 'x'", "lane 31", "warp 1"],
    ),
    "out_of_bounds_write": (
        "out of bounds",
        ["global store of 4 bytes", "0 bytes past the end of the allocation 'y'", "thread (63, 0, 0)"],
    ),
    "misaligned": ("misaligned", ["load of 16 bytes", "lane 5"]),
    "shared_out_of_bounds": ("out of bounds", ["shared store of 4 bytes", "lane 31", "warp 1"]),
    "uninitialised": ("uninitialised", ["read of 4 bytes at shared address", "never written"]),
    "uninitialised_register": ("uninitialised", ["global store of a register", "lane 8", "warp 1"]),
    "uninitialised_mma": ("uninitialised", ["mma reads a register that no instruction has written"]),
    "cp_async_no_wait": ("cp.async", ["read of shared address", "has not waited for"]),
    "cp_async_no_barrier": ("race", ["no barrier orders"]),
    "missing_barrier": ("race", ["no barrier orders"]),
    "missing_loop_barrier": ("race", ["no barrier orders"]),
    "cp_async_overwrites_stage": ("race", ["shared address"]),
    "write_write_race": ("race", ["write after write"]),
    "divergent_barrier": ("deadlock", ["lanes of one warp wait at different places"]),
    "barrier_deadlock": ("deadlock", ["no warp of the block can run", "at barrier 1", "32 of 64 threads"]),
    "illegal_metadata": ("metadata", ["row 10, columns 16 to 19", "0x0", "lane 9"]),
    "nc_of_written": ("non-coherent load", ["ld.global.nc", "the allocation 'y'"]),
    "early_read": ("dependent launch", ["global load", "before griddepcontrol.wait", "may still write it", "'x'"]),
    "early_write": ("dependent launch", ["global store", "before griddepcontrol.wait", "may still use it", "'y'"]),
    "partial_collective": ("deadlock", ["lanes of one warp wait at different places"]),
    "trap": ("trap", ["lane 8", "warp 1"]),
}
ASYNC = ("cp_async_no_wait", "cp_async_no_barrier", "cp_async_overwrites_stage")


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_caught(name, seed):
    check, words = FAULTS[name]
    for mode in ("eager", "late") if name in ASYNC else ("eager",):
        with pytest.raises(EmulatorError) as caught:
            run(name, False, Options(async_mode=mode, seed=seed))
        message = str(caught.value)
        also = "cp.async" if name in ASYNC else check  # another order of warps may meet the copy while it is in flight
        assert caught.value.check in (check, also), message
        if seed == 0:
            for word in [*words, "kernel kernel", f"{name}.cu:", "PTX line", "block (0,0,0)"]:
                assert word in message, (word, message)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", [*FAULTS, "unknown_opcode", "written_twice"])
def test_corrected_twin_passes(name, seed):
    run(name, True, Options(seed=seed))
    run(name, True, Options(seed=seed, async_mode="late"))


def test_a_launch_that_may_begin_early_and_never_waits_is_found():
    """Without a wait the PTX does not tell: who launches it says so. Constants may be read before, nothing stored."""
    ptx = compile_kernel(str(HERE / "early_read.cu"), {}, "sm_90a").ptx
    assert ptx.count("griddepcontrol.wait;") == 1
    program = load(ptx.replace("griddepcontrol.wait;", ""))
    for dependent, constant, refused in ((False, False, ""), (True, False, "load"), (True, True, "store")):
        memory = Memory()
        x, y = memory.alloc(4 * N, fill=0, name="x", constant=constant), memory.alloc(4 * N, name="y")
        params = struct.pack("<QQi", x, y, N)
        words = f"^dependent launch: global {refused}"
        with pytest.raises(EmulatorError, match=words) if refused else contextlib.nullcontext():
            launch(program, (1, 1, 1), (N, 1, 1), 0, params, memory, options=Options(dependent=dependent))


def test_our_launches_begin_early_where_the_device_lets_them():
    compiled = compile_kernel(str(HERE / "trap.cu"), {"FIXED": 1}, "sm_90a")
    for device, refused in (("h200", True), ("a100", False)):
        gpu = Emulated(NAMED[device])
        x, y = gpu.allocate(4 * N), gpu.allocate(4 * N)
        gpu.write(x, np.zeros(N, np.float32))
        with pytest.raises(EmulatorError, match="before griddepcontrol.wait") if refused else contextlib.nullcontext():
            gpu.launch(gpu.load(compiled), (1, 1, 1), (N, 1, 1), 0, struct.pack("<QQi", x, y, N))


READ_BY_TWO = """.version 8.0\n.target sm_80\n.address_size 64\n.visible .entry kernel()\n{{
.shared .align 16 .b8 line[16];\n.reg .pred %w<4>, %p<2>;\n.reg .b32 %r<8>;
mov.u32 %r0, %tid.x; shr.u32 %r1, %r0, 5;
setp.eq.u32 %w0, %r1, 0; setp.eq.u32 %w1, %r1, 1; setp.eq.u32 %w2, %r1, 2; setp.eq.u32 %w3, %r1, 3; setp.eq.u32 %p0, %r0, 0;
@%p0 st.shared.v4.b32 [line], {{%r0, %r0, %r0, %r0}};\nbar.sync 0;
@%w2 bra A; @%w3 bra A; bar.sync 1, 64; A:
@%w1 ld.shared.v4.b32 {{%r2, %r3, %r4, %r5}}, [line];\n@%w2 ld.shared.v4.b32 {{%r2, %r3, %r4, %r5}}, [line];
{between}\n{order}\nsetp.eq.u32 %p1, %r0, 96;\n@%p1 {write};\nret;\n}}\n"""
JOIN = "@%w{} bra B; @%w3 bra B; bra C; B: bar.sync 2, 64; C:"  # the writer and one of the readers


@pytest.mark.parametrize("write", ["st.shared.v4.b32 [line], {%r0, %r0, %r0, %r0}", "st.shared.b32 [line+4], %r0"])
@pytest.mark.parametrize("between", ["", "@%w2 ld.shared.b32 %r6, [line+4];", "@%w1 ld.shared.b32 %r6, [line+4];"])
@pytest.mark.parametrize("ordered", [1, 2, None])
def test_every_reader_since_the_last_write_is_remembered(ordered, between, write):
    """Warps 1 and 2 read in different epochs, the line or a cell of it; who writes is ordered after one of them, or both."""
    order = "bar.sync 0;" if ordered is None else JOIN.format(ordered)
    program = load(READ_BY_TWO.format(between=between, order=order, write=write))
    for seed in range(6):
        other = 3 - (ordered or 0)
        words = f"^race: write after read .* warp {other} read it"
        words += f"|(?s:^race: read after write .* warp 3 wrote it .*warp {other}, lanes)" if seed else ""  # it came too late
        with contextlib.nullcontext() if ordered is None else pytest.raises(EmulatorError, match=words):
            launch(program, (1, 1, 1), (128, 1, 1), 0, b"", Memory(), options=Options(seed=seed, threads=1))


def test_unknown_opcode_names_file_and_line():
    with pytest.raises(EmulatorError) as caught:
        run("unknown_opcode", False, Options())
    message = str(caught.value)
    assert "unknown opcode 'vadd.u32.u32.u32'" in message and "unknown_opcode.cu:8" in message and "PTX line" in message


def test_unknown_modifier_is_an_error():
    ptx = compile_kernel(str(HERE / "missing_barrier.cu"), {"FIXED": 1}, "sm_80").ptx
    assert "ld.global.f32" in ptx
    with pytest.raises(EmulatorError, match="unknown modifier '.sideways'"):
        load(ptx.replace("ld.global.f32", "ld.global.sideways.f32"))


def test_bytes_not_written_exactly_once_are_reported():
    stats, y = run("written_twice", False, Options(track_writes=(1,)))
    never, twice = stats.writes_not_once(y)
    assert never.tolist() == [24, 25, 26, 27] and twice.tolist() == [20, 21, 22, 23]
    stats, y = run("written_twice", True, Options(track_writes=(1,)))
    assert all(a.size == 0 for a in stats.writes_not_once(y))


def test_out_of_bounds_is_an_error_with_checks_off_too():
    with pytest.raises(EmulatorError, match="out of bounds"):
        run("out_of_bounds_write", False, Options(checks=False))


def test_a_missing_compiler_is_named(monkeypatch, tmp_path):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError, match="no C.. compiler found"):
        compiler()


def test_launch_arguments_are_checked():
    program = load(compile_kernel(str(HERE / "trap.cu"), {}, "sm_80").ptx)
    memory = Memory()
    for grid, block, smem, params, words in [
        ((0, 1, 1), (32, 1, 1), 0, b"\0" * 20, "grid"),
        ((1, 1, 1), (2048, 1, 1), 0, b"\0" * 20, "at most 1024 threads, got 2048"),
        ((1, 1, 1), (32, 1, 1), 1 << 20, b"\0" * 20, "shared memory"),
        ((1, 1, 1), (32, 1, 1), 0, b"\0" * 8, "8 bytes of parameters, the kernel takes 20"),
    ]:
        with pytest.raises(ValueError, match=words):
            launch(program, grid, block, smem, params, memory)


def test_memory_keeps_its_bounds():
    memory = Memory()
    a = memory.alloc(100, fill=0x7E, name="a")
    assert a % 256 == 0 and (memory.read(a, 100) == 0x7E).all()
    memory.write(a + 4, np.arange(3, dtype=np.int32))
    assert memory.read(a + 4, 12).view(np.int32).tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match="past the end|at byte"):
        memory.read(a + 90, 11)
    memory.free(a)
    with pytest.raises(ValueError):
        memory.read(a, 1)


def test_interrupt_stops_a_kernel_that_never_ends(tmp_path):
    source = tmp_path / "endless.cu"
    source.write_text('extern "C" __global__ void kernel(volatile int* x) { while (x[0] == 0) x[1] += 1; }\n')
    program = load(compile_kernel(str(source), {}, "sm_80").ptx)
    memory = Memory()
    x = memory.upload(np.zeros(2, np.int32))
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        launch(program, (4, 1, 1), (64, 1, 1), 0, struct.pack("<Q", x), memory)
    assert time.monotonic() - start < 20
