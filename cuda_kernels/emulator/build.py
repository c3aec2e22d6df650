"""Loads the interpreter: the wheel's library, else one compiled for this CPU on first use and kept in the cache.

Both are stored under the hash of their sources, so neither serves other sources, and of their bytes, so no damaged library
loads.
"""

import ctypes
import hashlib
import logging
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from importlib.metadata import distributions
from pathlib import Path

from cuda_kernels.compile import CompileError
from cuda_kernels.files import cache_dir, keep, open_regular

SOURCES = Path(__file__).parent
UNITS = ("alu.cpp", "interp.cpp", "hopper.cpp", "schedule.cpp", "api.cpp")
# GPU_RUNTIME_EMULATOR_MARCH names an instruction set, native this CPU's own: answers must not depend on it.
MARCH = os.environ.get("GPU_RUNTIME_EMULATOR_MARCH", "")
# No contraction: a kernel's mul and add stay two roundings. No errno or traps: loops over lanes vectorise.
FLAGS = ("-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-pthread")
PREBUILT, LEVEL = SOURCES / "prebuilt", "x86-64-v3"  # the library that setup.py compiles into a wheel, and its CPU level
# The level's instructions as Linux names them (x86-64 psABI, "Micro-Architecture Levels"); abm is lzcnt's set.
LEVEL_FLAGS = set("avx avx2 bmi1 bmi2 f16c fma abm movbe xsave".split())
# Newest symbols of libstdc++, GLIBCXX_3.4.N -> the first manylinux_2_N that grants them (auditwheel's manylinux-policy.json).
GRANTED = {19: 17, 22: 24, 24: 27, 28: 31, 29: 34, 30: 35, 33: 39}


LOG = logging.getLogger(__name__)


class BuildError(CompileError):
    """Raised without a C++17 compiler, or if it refuses the interpreter's source."""


def compiler() -> str:
    """Returns the compiler's command: CXX, or g++, c++, clang++ in this order. Raises BuildError without one."""
    for name in (os.environ.get("CXX"), "g++", "c++", "clang++"):
        if name and shutil.which(name.split()[0]):
            return name
    cure = "install g++, or set CXX"
    if any(_shadowed()):
        cure += f", or run outside of {SOURCES.parents[1]}, whose sources hide the installed gpu-runtime and its emulator"
    raise BuildError(f"no C++ compiler found: the emulator needs one with C++17, once ({cure})")


def _shadowed() -> Iterator[Path]:
    """Yields the folder of the library that a wheel installed, where Python imports these sources, as of the current folder."""
    for installed in distributions(name="gpu-runtime"):
        folder = Path(str(installed.locate_file("cuda_kernels/emulator/prebuilt")))
        if folder.is_dir() and folder.resolve() != PREBUILT.resolve():
            yield folder


def _cpu() -> str:
    """Returns the CPU facts that -march=native depends on: a cache shared between machines must not mix their binaries."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.machine() + platform.processor()
    return "".join(sorted({line for line in text.splitlines() if line.startswith(("model name", "flags", "Features"))}))


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL:
    """Loads the interpreter, compiled if neither the wheel nor the cache has it from these sources for this CPU."""
    lib = None
    if not MARCH and has_level():
        key = _key(LEVEL)
        lib = next((found for folder in (PREBUILT, *_shadowed()) if (found := _loaded(folder, key))), None)
    if lib is None:
        cxx, march = compiler().split(), MARCH or "native"
        lib = _load(cxx, march, _key(march, *cxx, _cpu()))
    lib.emu_program.restype = lib.emu_launch.restype = ctypes.c_void_p
    for name, args in {
        "emu_names": "Pi",
        "emu_program": "PQPQPQPQP",
        "emu_program_free": "P",
        "emu_launch": "PP",
        "emu_poll": "Pi",
        "emu_stop": "P",
        "emu_finish": "PPPPPPi",
    }.items():
        kinds = {"P": ctypes.c_void_p, "Q": ctypes.c_uint64, "i": ctypes.c_int}
        getattr(lib, name).argtypes = [kinds[a] for a in args]
    return lib


def _key(march: str, *others: str) -> str:
    """Hashes all that determines the library: sources, flags and further values."""
    digest = hashlib.sha256(" ".join([march, *FLAGS, *others]).encode())
    for path in sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:20]


def has_level(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this CPU has the instructions of LEVEL, as far as the system tells."""
    try:
        text = cpuinfo.read_text()
    except OSError:
        return False
    return set(text.partition("\nflags")[2].partition("\n")[0].split()) >= LEVEL_FLAGS


def prebuild(folder: Path) -> Path:
    """Compiles a wheel's library into `folder` and returns its file. Raises BuildError."""
    data = _compile(compiler().split(), LEVEL)
    path = _path(folder, _key(LEVEL), data)
    folder.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def platform_of(library: bytes) -> str:
    """Returns the tag of a wheel with this library: the oldest platform with all glibc and libstdc++ symbols that it needs.

    linux_x86_64, which no index accepts, if GRANTED has none.
    """
    glibc = max(int(n) for n in re.findall(rb"GLIBC_2\.(\d+)", library))
    cxx = max((int(n) for n in re.findall(rb"GLIBCXX_3\.4\.(\d+)", library)), default=0)
    oldest = min((granting for newest, granting in GRANTED.items() if cxx <= newest), default=None)
    return "linux_x86_64" if oldest is None else f"manylinux_2_{max(glibc, oldest)}_x86_64"


def _loaded(folder: Path, key: str) -> ctypes.CDLL | None:
    """Loads the library of that key in `folder`; None if it is absent or damaged."""
    for path in folder.glob(f"emulator-{key}-*.so"):
        with suppress(OSError), open_regular(path) as file:
            if path == _path(folder, key, file.read()):
                return ctypes.CDLL(str(path))
    return None


def _load(cxx: list[str], march: str, key: str) -> ctypes.CDLL:
    """Loads the cached library of that key, else compiles it; from a temporary file if the cache cannot be written."""
    folder = cache_dir() / "emulator"
    if (lib := _loaded(folder, key)) is not None:
        return lib
    # On stderr unless configured otherwise: the user of the first kernel would not know the reason for the wait.
    LOG.warning("compiling the emulator for this CPU with %s: it takes about half a minute and is done once", " ".join(cxx))
    data = _compile(cxx, march)
    path = _path(folder, key, data)
    if keep(path, data):
        return ctypes.CDLL(str(path))
    with tempfile.NamedTemporaryFile(suffix=".so") as file:
        file.write(data)
        file.flush()
        return ctypes.CDLL(file.name)


def _path(folder: Path, key: str, data: bytes) -> Path:
    return folder / f"emulator-{key}-{hashlib.sha256(data).hexdigest()}.so"


def _compile(cxx: list[str], march: str) -> bytes:
    """Compiles the library and returns its bytes. Raises BuildError."""
    with tempfile.TemporaryDirectory(prefix="gpu_runtime-") as folder:
        objects = [str(Path(folder, unit + ".o")) for unit in UNITS]
        jobs = [
            subprocess.Popen(
                [*cxx, *FLAGS, f"-march={march}", "-c", str(SOURCES / unit), "-o", out], stderr=subprocess.PIPE, text=True
            )
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
    """Returns (instruction kind -> number, operation name -> (index, is a test)) as the library has them."""
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
