"""Compile the interpreter for this CPU on first use and load it; the shared object is cached by the hash of its sources.

Its name in the cache ends in its own hash: a damaged one is built again, never mapped.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from cuda_kernels.files import cache_dir, keep, open_regular

SOURCES = Path(__file__).parent
UNITS = ("alu.cpp", "interp.cpp", "schedule.cpp", "api.cpp")
# GPU_RUNTIME_EMULATOR_MARCH names another instruction set than this CPU's: answers must not depend on it.
MARCH = os.environ.get("GPU_RUNTIME_EMULATOR_MARCH", "native")
# No contraction: a kernel's mul and add stay two roundings. No errno or traps: loops over lanes vectorise.
FLAGS = (
    "-std=c++17",
    "-O3",
    f"-march={MARCH}",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fPIC",
    "-pthread",
)


class BuildError(Exception):
    """No C++17 compiler, or it refused the interpreter's source."""


def compiler() -> str:
    """CXX, or g++, c++, clang++ in this order."""
    for name in (os.environ.get("CXX"), "g++", "c++", "clang++"):
        if name and shutil.which(name.split()[0]):
            return name
    raise BuildError("no C++ compiler found: the emulator needs one with C++17 (set CXX, or install g++)")


def _cpu() -> str:
    """What -march=native depends on: a cache shared between machines must not mix their binaries."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.machine() + platform.processor()
    return "".join(sorted({line for line in text.splitlines() if line.startswith(("model name", "flags", "Features"))}))


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL:
    """The interpreter, compiled if this CPU has no cached build of these sources."""
    cxx = compiler().split()
    digest = hashlib.sha256(" ".join([*cxx, *FLAGS, _cpu()]).encode())
    for path in sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    lib = _load(cxx, digest.hexdigest()[:20])
    lib.emu_program.restype = lib.emu_launch.restype = ctypes.c_void_p
    for name, args in {
        "emu_names": "Pi", "emu_program": "PQPQPQPQP", "emu_program_free": "P", "emu_launch": "PP", "emu_poll": "Pi",
        "emu_stop": "P", "emu_finish": "PPPPPPi",
    }.items():  # fmt: skip
        kinds = {"P": ctypes.c_void_p, "Q": ctypes.c_uint64, "i": ctypes.c_int}
        getattr(lib, name).argtypes = [kinds[a] for a in args]
    return lib


def _load(cxx: list[str], key: str) -> ctypes.CDLL:
    """The cached library of that key, else a new one; from a file of its own where the cache cannot be written."""
    folder = cache_dir() / "emulator"
    for path in folder.glob(f"emulator-{key}-*.so"):
        with suppress(OSError), open_regular(path) as file:
            if path == _path(folder, key, file.read()):
                return ctypes.CDLL(str(path))
    data = _compile(cxx)
    path = _path(folder, key, data)
    if keep(path, data):
        return ctypes.CDLL(str(path))
    with tempfile.NamedTemporaryFile(suffix=".so") as file:
        file.write(data)
        file.flush()
        return ctypes.CDLL(file.name)


def _path(folder: Path, key: str, data: bytes) -> Path:
    return folder / f"emulator-{key}-{hashlib.sha256(data).hexdigest()}.so"


def _compile(cxx: list[str]) -> bytes:
    """The bytes of the shared object. Raises BuildError."""
    with tempfile.TemporaryDirectory(prefix="gpu_runtime-") as folder:
        objects = [str(Path(folder, unit + ".o")) for unit in UNITS]
        jobs = [
            subprocess.Popen([*cxx, *FLAGS, "-c", str(SOURCES / unit), "-o", out], stderr=subprocess.PIPE, text=True)
            for unit, out in zip(UNITS, objects, strict=True)
        ]
        failures = [
            f"{unit}: {err}" for unit, job in zip(UNITS, jobs, strict=True) if (err := job.communicate()[1]) and job.returncode
        ]
        if failures:
            raise BuildError(f"{' '.join(cxx)} does not compile the emulator:\n" + "\n".join(failures))
        built = Path(folder, "emulator.so")
        link = subprocess.run([*cxx, "-shared", "-pthread", *objects, "-o", str(built)], capture_output=True, text=True)
        if link.returncode:
            raise BuildError(f"{' '.join(cxx)} does not link the emulator:\n{link.stderr}")
        return built.read_bytes()


@lru_cache(maxsize=1)
def names() -> tuple[dict[str, int], dict[str, tuple[int, bool]]]:
    """(instruction kind -> number, operation name -> (index, is a test)) as the library has them."""
    lib = library()
    size = lib.emu_names(None, 0)
    buffer = ctypes.create_string_buffer(size + 1)
    lib.emu_names(buffer, size + 1)
    kinds, _, rows = buffer.value.decode().partition("\n\n")
    table = {}
    for i, line in enumerate(rows.split("\n")):
        if line:
            name, kind = line.split()
            table[name] = (i, kind == "test")
    return {name: i for i, name in enumerate(kinds.split("\n"))}, table
