"""Builds the driver's library and CuPy's one recompiled module into the cache, and makes the environment that a process needs.

NVIDIA's libcudart is linked statically into CuPy's module cupy_backends.cuda.api.runtime and asks a driver for more than is
documented. So that module alone, from CuPy's released source, is compiled again and linked with our library; it lies in a
folder of links to the installed cupy_backends, which PYTHONPATH names first. Nothing is installed anywhere.

Each part is a folder named by the hash of its sources, made beside its place and renamed: two processes may build at once.
"""

import contextlib
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cuda_kernels.compile import cuda_include
from cuda_kernels.emulator.build import BuildError, compiler
from cuda_kernels.files import cache_dir
from tests.emulated_driver.settings import ROOT_VARIABLE, VARIABLE, Settings

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CUPY, CYTHON, CRT = "14.2.0", "3.2.4", "13.0.*"  # Cython: the version that made the wheel
FLAGS = ("-std=c++17", "-O1", "-fPIC", "-fvisibility=hidden", "-pthread", "-w")
MODULE = Path("cupy_backends", "cuda", "api", "runtime")
DIRECTIVES = ("embedsignature=True", "c_api_binop_methods=True", "binding=False", "freethreading_compatible=True")
CONSTANTS = ",".join(
    (
        "CUPY_USE_CUDA_PYTHON=False",
        "CUPY_CUFFT_STATIC=False",
        f"CUPY_CYTHON_VERSION={CYTHON}",
        "CUPY_CUDA_VERSION=13000",
        "CUPY_HIP_VERSION=0",
    )
)
PROFILER_HEADER = (  # of the toolkit, in no wheel
    '#pragma once\n#include <driver_types.h>\nextern "C" cudaError_t cudaProfilerStart(void);\n'
    'extern "C" cudaError_t cudaProfilerStop(void);\n'
)


def environment(settings: Settings = Settings()) -> dict[str, str]:  # noqa: B008  (frozen)
    """Returns the environment of a process that is to find the emulated driver. Builds the parts that the cache lacks;
    BuildError says why that fails.
    """
    found = importlib.util.find_spec("cupy_backends")
    version = next((d.version for d in importlib.metadata.distributions() if d.name == "cupy-cuda13x"), "none")
    if found is None or version != CUPY:
        cure = f"pip install cupy-cuda13x=={CUPY}"
        raise BuildError(f"the emulated driver needs cupy-cuda13x {CUPY}, got {version}: {cure}")
    library, overlay = _library(), _overlay(_installed())

    def before(name: str, *folders: Path) -> str:
        rest = [p for p in os.environ.get(name, "").split(os.pathsep) if p and p not in map(str, folders)]
        return os.pathsep.join([*map(str, folders), *rest])

    return os.environ | {
        "LD_LIBRARY_PATH": before("LD_LIBRARY_PATH", library),
        "PYTHONPATH": before("PYTHONPATH", overlay, ROOT),
        "PATH": before("PATH", Path(sys.executable).parent),
        "CUPY_COMPILE_WITH_PTX": "1",  # machine code cannot be run here
        "CUPY_ACCELERATORS": "",  # CUB's kernels come as machine code
        "CUPY_CACHE_DIR": str(_folder() / "cupy"),
        VARIABLE: settings.to_json(),
        ROOT_VARIABLE: str(ROOT),
    }


def _folder() -> Path:
    return cache_dir() / "emulated_driver"


def _installed() -> Path:
    """Returns the folder of the installed cupy_backends, also if PYTHONPATH already names an overlay."""
    files = importlib.metadata.distribution("cupy-cuda13x")
    return Path(str(files.locate_file("cupy_backends")))


def _made(kind: str, parts: list[str | bytes], fill: Callable[[Path], None]) -> Path:
    """Returns the cached folder for these parts; `fill` makes it if it is absent."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part if isinstance(part, bytes) else part.encode())
        digest.update(b"\0")
    place = _folder() / f"{kind}-{digest.hexdigest()[:20]}"
    if place.exists():
        return place
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        lock = open(place.parent / f".{kind}.lock", "w")  # noqa: SIM115  (open until the end)
        own = Path(tempfile.mkdtemp(prefix=f".{kind}-", dir=place.parent))
    except OSError as e:
        raise BuildError(f"the emulated driver cannot be built: {place.parent} cannot be written ({e.strerror})") from None
    try:
        with contextlib.suppress(OSError):  # a file system without locks: both build, and the second finds the first's
            fcntl.flock(lock, fcntl.LOCK_EX)
        if place.exists():
            return place
        print(f"[emulated driver] building {kind} into {place.parent}", file=sys.stderr, flush=True)
        fill(own)
        own.chmod(0o755)
        with contextlib.suppress(OSError):
            own.rename(place)
        if not place.exists():
            raise BuildError(f"the emulated driver cannot be built: {own} could not be renamed to {place.name}")
    finally:
        shutil.rmtree(own, ignore_errors=True)
        lock.close()
    return place


def _run(what: str, command: list[str], cwd: Path | None = None, variables: Mapping[str, str] | None = None) -> None:
    done = subprocess.run(command, cwd=cwd, env=os.environ | dict(variables or {}), capture_output=True, text=True)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line.lower()] or done.stderr.splitlines()[-3:]
        raise BuildError(f"the emulated driver cannot be built: {what} failed: {' '.join(lines[:3])[:600]}")


def _pip(what: str, *args: str, **variables: str) -> None:
    """Runs pip; its own words become the error if it fails: mostly that there is no network."""
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    _run(f"{what} (once, from the package index)", [*pip, *args], variables=variables)


def _headers() -> list[str]:
    """Returns -I options for CUDA's headers: of the wheel nvidia-cuda-runtime, and crt/, which is another wheel."""
    include = cuda_include()
    if (include / "crt" / "host_defines.h").exists():
        return [f"-I{include}"]

    def fill(folder: Path) -> None:
        _pip("downloading nvidia-cuda-crt", "install", "--no-deps", "--target", str(folder), f"nvidia-cuda-crt=={CRT}")

    crt = _made("headers", [CRT], fill)
    return [f"-I{include}", f"-I{crt / 'nvidia' / 'cu13' / 'include'}"]


def _library() -> Path:
    """Returns the folder of libcuda.so.1 and libnvidia-ml.so.1, which are one file."""
    sources = sorted(HERE.glob("*.cpp"))
    cxx = compiler().split()

    def fill(folder: Path) -> None:
        include = _headers()
        with tempfile.TemporaryDirectory() as temporary:
            objects = [str(Path(temporary, source.stem + ".o")) for source in sources]

            def one(source: Path, out: str) -> None:
                _run(f"compiling {source.name}", [*cxx, *FLAGS, *include, "-c", str(source), "-o", out])

            with ThreadPoolExecutor(os.cpu_count()) as pool:
                list(pool.map(one, sources, objects))
            options = ["-shared", "-pthread", "-Wl,--no-undefined", "-Wl,-soname,libcuda.so.1"]
            _run("linking", [*cxx, *options, *objects, "-o", str(folder / "libcuda.so.1"), "-ldl"])
        (folder / "libnvidia-ml.so.1").symlink_to("libcuda.so.1")

    parts = [
        part
        for source in [*sources, HERE / "driver.h", HERE.parent / "map_calls.h"]
        for part in (source.name, source.read_bytes())
    ]
    return _made("driver", [*cxx, *FLAGS, *parts], fill)


def _overlay(installed: Path) -> Path:
    """Returns a folder whose cupy_backends consists of links to the installed one, except for the recompiled module."""
    suffix = sysconfig.get_config_var("EXT_SUFFIX")

    def fill(folder: Path) -> None:
        target = folder / "cupy_backends"
        for path in installed.rglob("*"):
            place = target / path.relative_to(installed)
            if path.is_dir():
                if path.name != "__pycache__":
                    place.mkdir(parents=True, exist_ok=True)
            elif path.parent.name != "__pycache__":
                place.parent.mkdir(parents=True, exist_ok=True)
                place.symlink_to(path)
        own = folder / MODULE.with_name(MODULE.name + suffix)
        own.unlink(missing_ok=True)
        _compile_runtime(own)

    return _made("overlay", [CUPY, CYTHON, CONSTANTS, str(installed), sys.version, suffix, PROFILER_HEADER, *FLAGS], fill)


def _compile_runtime(out: Path) -> None:
    """Compiles CuPy's runtime.pyx to the module `out`, which needs a libcuda.so.1 with our part of the runtime API."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        tools, sdist = folder / "tools", folder / "sdist"
        _pip("downloading Cython", "install", "--no-deps", "--target", str(tools), f"cython=={CYTHON}")
        fetch = ("download", "--no-deps", "--no-binary", "cupy", "--dest", str(sdist), f"cupy=={CUPY}")
        _pip("downloading CuPy's source distribution", *fetch, CUPY_INSTALL_USE_STUB="1")
        with tarfile.open(next(sdist.glob("cupy-*.tar.gz"))) as archive:
            archive.extractall(folder, filter="data")
        source = folder / f"cupy-{CUPY}"
        options = [word for d in DIRECTIVES for word in ("-X", d)] + ["-E", CONSTANTS]
        cython = [sys.executable, "-m", "cython", "--cplus", "-3", *options, f"{MODULE}.pyx", "-o", "runtime.cpp"]
        _run("Cython", cython, cwd=source, variables={"PYTHONPATH": str(tools)})
        (source / "cuda_profiler_api.h").write_text(PROFILER_HEADER)
        include = [f"-I{sysconfig.get_path('include')}", f"-I{source}", f"-I{source / MODULE.parent}", *_headers()]
        link = ["-shared", "runtime.cpp", f"-L{_library()}", "-l:libcuda.so.1", "-o", str(out)]
        _run("compiling CuPy's runtime module", [*compiler().split(), *FLAGS, *include, *link], cwd=source)
