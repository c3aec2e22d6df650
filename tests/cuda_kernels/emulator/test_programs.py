"""Decoded programs in the cache: as good as decoded anew, in every kernel; what is none, or another's, is decoded again."""

import os
import random
import re
import shutil
import subprocess
import sys
import warnings
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest

from cuda_kernels import files
from cuda_kernels.compile import compile_kernel, virtual
from cuda_kernels.device import named
from cuda_kernels.emulator import EmulatorError, Memory, Options, build, launch, load, programs, run
from cuda_kernels.emulator.decode import decode
from cuda_kernels.emulator.parse import parse
from cuda_kernels.emulator.programs import Decoded
from cuda_kernels.launch import Emulated, fill_params
from tactics.candidates import candidates
from tactics.launches import launches
from tactics.step import Launch
from tests.conftest import ROOT
from tests.cuda_kernels.emulator.test_emulator_checks import FAULTS, HERE, N
from tests.independent.triton_programs import COMMITTED, committed
from tests.problems import PROBLEMS

ENV = os.environ | {"PYTHONPATH": str(ROOT)}
KERNEL = ("flush_l2", {}, "compute_80")
MICRO = """.version 8.0\n.target sm_80\n.address_size 64\n.const .align 4 .b32 table[2] = {7, 8};
.visible .entry k(.param .u64 out)\n{\n.reg .b64 %rd<3>;\n.reg .b32 %r<2>;\nld.const.b32 %r1, [table+4];
ld.param.u64 %rd1, [out];\nst.global.b32 [%rd1], %r1;\nret;\n}\n"""


@pytest.fixture(scope="module")
def ptx() -> str:
    """A small kernel's; and the emulator is loaded from the user's cache."""
    build.library()
    return compile_kernel(*KERNEL).ptx


@pytest.fixture
def cache(ptx, tmp_path, monkeypatch) -> Path:
    """An empty cache folder, and a process that remembers no program and has complained about nothing."""
    monkeypatch.setenv("GPU_RUNTIME_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(files, "_TOLD", set())
    forget(monkeypatch)
    return tmp_path / "cache"


@pytest.fixture
def cache_of_programs(tmp_path, monkeypatch) -> None:
    """Programs in a folder of their own, compiled kernels where they are."""
    monkeypatch.setattr(programs, "cache_path", lambda of: tmp_path / f"{of}.program")


def forget(monkeypatch) -> None:
    monkeypatch.setattr(run, "_programs", type(run._programs)())


@pytest.fixture
def decoded_again(monkeypatch) -> list[str]:
    """Grows by the PTX that is decoded."""
    again: list[str] = []
    real = run._decoded
    monkeypatch.setattr(run, "_decoded", lambda ptx, kernel: again.append(ptx) or real(ptx, kernel))
    return again


def ptx_of(kernel: str, values: dict, arch: str) -> str:
    return compile_kernel(kernel, values, arch).ptx


def path_of(ptx: str, kernel: str | None = None) -> Path:
    return programs.cache_path(programs.key_of(ptx, kernel))


def assert_same(kept: Decoded, fresh: Decoded) -> None:
    for f in fields(Decoded):
        a, b = getattr(kept, f.name), getattr(fresh, f.name)
        if isinstance(b, np.ndarray):
            assert (a.dtype, a.shape) == (b.dtype, b.shape) and a.tobytes() == b.tobytes(), f.name
        else:
            assert a == b and type(a) is type(b), f.name


def kept_and_fresh(ptx: str, kernel: str | None = None) -> tuple[Decoded, Decoded]:
    """A program out of its file, and decoded."""
    fresh = decode(parse(ptx), kernel)
    programs.write(path_of(ptx, kernel), fresh)
    kept = programs.read(path_of(ptx, kernel))
    assert kept is not None
    assert_same(kept, fresh)
    return kept, fresh


# ---- the same as decoded anew


def outcome(program: Decoded, memory: Memory, grid, block, smem: int, params: bytes, options: Options) -> object:
    """Counters of a launch, or the words and the check of what was found wrong."""
    try:
        return launch(run.Program(program), grid, block, smem, params, memory, options=options)
    except EmulatorError as e:
        return str(e), e.check


@lru_cache(maxsize=1)
def variants() -> dict[tuple, tuple[Launch, str]]:
    """(kernel, values) -> a launch of it and what it is compiled for: of each problem, its first and its last tactic."""
    device = named("h200")
    found = {}
    for problem in PROBLEMS.values():
        tactics = candidates(problem, device)
        for tactic in (tactics[0], tactics[-1]):
            for step in launches(problem, tactic):
                if isinstance(step, Launch):
                    found[step.kernel, tuple(sorted(step.values))] = step, virtual(device.sm)
    return found


def check_variant(key: tuple) -> None:
    """Its program; and what a launch whose pointers lead nowhere finds, the place in source and PTX included."""
    step, arch = variants()[key]
    kept, fresh = kept_and_fresh(ptx_of(step.kernel, dict(step.values), arch))
    params = fill_params(Emulated(named("h200")), step.args, lambda _: 256)
    a, b = (
        outcome(program, Memory(), step.grid, step.block, step.smem, params, Options(threads=1)) for program in (kept, fresh)
    )
    assert a == b and isinstance(a, tuple) and re.search(r"\.cuh?:\d+, PTX line \d+: ", a[0]), (key, a)


@pytest.mark.slow
def test_each_kernel_is_the_same_out_of_its_file(cache_of_programs):
    keys = random.Random(5).sample(sorted(variants(), key=str), len(variants()))
    for key in {kernel: (kernel, values) for kernel, values in keys}.values():
        check_variant(key)


@pytest.mark.full
@pytest.mark.parametrize("part", range(8))
def test_every_variant_is_the_same_out_of_its_file(cache_of_programs, part):
    for key in sorted(variants(), key=str)[part::8]:
        check_variant(key)


@pytest.mark.parametrize("name", COMMITTED)
def test_programs_of_triton_are_the_same_out_of_their_files(cache, name):
    kernel = committed(name)
    kept_and_fresh(kernel.ptx)
    kept_and_fresh(kernel.ptx, kernel.entry)


@pytest.mark.parametrize("name", FAULTS)
def test_faults_and_counters_are_told_in_the_same_words(cache_of_programs, name):
    arch, given = "compute_90a" if name.startswith("early") else "compute_80", np.random.default_rng(0).standard_normal(N)
    for values in ({}, {"FIXED": 1}):
        memory = Memory()
        x, y = memory.upload(given.astype(np.float32), "x"), memory.alloc(4 * N, name="y")
        params = np.array([x, y, N], np.uint64).tobytes()[:20]
        both = kept_and_fresh(ptx_of(str(HERE / f"{name}.cu"), values, arch))
        found = []
        for program in both:
            memory.view(y)[:] = 0xCB
            found.append(outcome(program, memory, (1, 1, 1), (N, 1, 1), 4 * N, params, Options(threads=1)))
        assert found[0] == found[1] and isinstance(found[0], tuple) == (not values)


RUN = """
import numpy as np
import gpu_runtime as gr
with gr.load("tiny.engine").context(device="emulator") as ctx:
    y, = ctx.run({"x": np.load("x.npy")}).values()
    print(y.tobytes().hex(), ctx.gpu.stats)
"""
WITHOUT = """
import sys
for name in ("decode", "decoder", "parse", "opcodes"):
    sys.modules[f"cuda_kernels.emulator.{name}"] = None  # importing it fails
"""


def test_a_warm_process_parses_nothing(files):
    found = []
    for code in (RUN, WITHOUT + RUN):
        done = subprocess.run([sys.executable, "-c", code], cwd=files, env=ENV, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        found.append(done.stdout)
    assert found[0] == found[1] and "Stats(" in found[0]


# ---- files that hold no program, or another one


def test_a_program_is_decoded_once(cache, decoded_again, monkeypatch, ptx):
    for _ in range(3):
        assert load(ptx, keep=True).name == "flush_l2"
        forget(monkeypatch)
    assert decoded_again == [ptx]
    load(ptx)  # not to be kept: nor is it looked for
    assert decoded_again == [ptx] * 2


def damages(data: bytes) -> Iterator[bytes]:
    """Cut and altered everywhere, drawn."""
    rng = random.Random(7)
    for end in {*range(80), *rng.sample(range(len(data)), 200), len(data) - 1}:
        yield data[:end]
    for at in {*range(80), *rng.sample(range(len(data)), 400), len(data) - 1}:
        yield data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
    for _ in range(100):
        first, last = sorted(rng.sample(range(len(data)), 2))
        yield data[:first] + data[last:]
        yield data[:first] + rng.randbytes(last - first) + data[last:]
        yield data[:first] + bytes(last - first) + data[last:]
    yield from (data + b"x", data * 2, bytes(len(data)), rng.randbytes(len(data)), zlib.compress(b"{}"))


def test_a_damaged_file_is_a_miss(cache, ptx):
    kept_and_fresh(ptx)
    path = path_of(ptx)
    whole = path.read_bytes()
    for data in damages(whole):
        path.write_bytes(data)
        assert data == whole or programs.read(path) is None
    path.write_bytes(whole)
    assert programs.read(path) is not None


DAMAGES = {
    "cut": lambda p: os.truncate(p, 100),
    "empty": lambda p: p.write_bytes(b""),
    "absent": Path.unlink,
    "altered": lambda p: p.write_bytes(p.read_bytes()[:-1] + b"x"),
    "text": lambda p: p.write_bytes(b"{}\n"),
    "device": lambda p: (p.unlink(), p.symlink_to("/dev/zero")),
    "pipe": lambda p: (p.unlink(), os.mkfifo(p)),
    "folder": lambda p: (p.unlink(), p.mkdir()),
    "another's": lambda p: shutil.copy(another(p), p),
}


def another(path: Path) -> Path:
    """The file of another program, whole."""
    text = MICRO.replace("[table+4]", "[table]").replace(".const", ".shared")
    programs.write(path_of(text), decode(parse(text)))
    return path_of(text)


@pytest.mark.parametrize("how", DAMAGES)
def test_what_is_no_program_is_decoded_again(cache, decoded_again, monkeypatch, ptx, how):
    load(ptx, keep=True)
    DAMAGES[how](path_of(ptx))
    forget(monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a folder in its place
        assert_same(load(ptx, keep=True).decoded, decode(parse(ptx)))
    assert len(decoded_again) == 2
    if how not in ("device", "pipe", "folder"):  # a path that is no regular file is left alone
        forget(monkeypatch)
        load(ptx, keep=True)
        assert len(decoded_again) == 2


def test_other_ptx_another_kernel_another_decoder_and_another_library_are_other_programs(cache, monkeypatch, tmp_path, ptx):
    found = {path_of(ptx), path_of(ptx.replace("sm_80", "sm_81")), path_of(ptx + "\n"), path_of(ptx, "flush_l2")}
    for path in programs.SOURCES.glob("*.py"):
        shutil.copy(path, tmp_path / path.name)
    monkeypatch.setattr(programs, "SOURCES", tmp_path)
    programs._version.cache_clear()
    assert path_of(ptx) in found  # the same sources elsewhere
    for name in ("opcodes_move.py", "registers.py", "parse.py"):
        tmp_path.joinpath(name).write_text(tmp_path.joinpath(name).read_text() + "#\n")
        programs._version.cache_clear()
        found.add(path_of(ptx))
    kinds, rows = programs.names()
    monkeypatch.setattr(programs, "names", lambda: (kinds | {"NEW": len(kinds)}, rows))
    programs._version.cache_clear()
    found.add(path_of(ptx))
    monkeypatch.undo()
    programs._version.cache_clear()
    assert len(found) == 4 + 3 + 1


def test_code_that_holds_addresses_of_the_process_is_not_kept(cache, decoded_again, monkeypatch):
    for _ in range(2):
        memory = Memory()
        out = memory.alloc(4)
        launch(load(MICRO, keep=True), (1, 1, 1), (1, 1, 1), 0, out.to_bytes(8, "little"), memory)
        assert memory.read(out, 4).view(np.uint32) == 8
        forget(monkeypatch)
    assert decoded_again == [MICRO] * 2 and not list(cache.rglob("*.program"))


def test_a_cache_that_cannot_be_written_is_one_warning(cache, decoded_again, monkeypatch, ptx):
    cache.write_bytes(b"mine")
    with pytest.warns(RuntimeWarning, match="cannot be written") as told:
        for _ in range(3):
            load(ptx, keep=True)
            forget(monkeypatch)
    assert len(told) == 1 and len(decoded_again) == 3 and cache.read_bytes() == b"mine"


MANY = """
import os, sys
from cuda_kernels.emulator import programs, run
ptx = sys.stdin.read()
expected = run._decoded(ptx, None).code.tobytes()
os.environ["GPU_RUNTIME_CACHE"] = sys.argv[1]
for _ in range(60):
    run._programs.clear()
    assert run.load(ptx, keep=True).decoded.code.tobytes() == expected
    programs.cache_path(programs.key_of(ptx, None)).unlink(missing_ok=True)
"""


def test_processes_and_threads_share_a_file(cache, monkeypatch, ptx):
    """Each writes it and removes it again."""
    line = [sys.executable, "-c", MANY, str(cache)]
    running = [subprocess.Popen(line, env=ENV, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    with ThreadPoolExecutor(len(running)) as pool:
        errors = list(pool.map(lambda process: process.communicate(ptx, timeout=120)[1], running))
    assert not any(process.returncode for process in running), errors
    expected = decode(parse(ptx))

    def work(_: int) -> None:
        programs.write(path_of(ptx), expected)
        kept = programs.read(path_of(ptx))
        assert kept is not None
        assert_same(kept, expected)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(100)))
