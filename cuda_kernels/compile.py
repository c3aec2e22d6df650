"""Compiles (kernel, compile-time values, sm) to PTX and cubin through NVRTC, with or without a GPU; results are cached by
content.

The cache key covers everything that determines the binary: kernel name, values, architecture, options, NVRTC version and the
bytes of the source and of every included header. Folders have no influence, see _nvrtc. An entry (PTX and log in one file,
machine code in another) contains its key and hashes; an entry that does not match them is compiled again.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from cuda_kernels import extras
from cuda_kernels.files import cache_dir, keep, open_regular

if TYPE_CHECKING:
    from tempfile import TemporaryDirectory

ROOT = Path(__file__).parent
INCLUDE = ROOT / "include"
OPTIONS = ("-std=c++17", "--device-as-default-execution-space", "-lineinfo", "--ptxas-options=-v")
NAMED = "/cuda_kernels"  # the sources' folder as NVRTC sees it: binaries must not depend on the real one
INCLUDED = re.compile(r'^(\s*#\s*include\s+")([^"]+)"', re.MULTILINE)


Values = tuple[tuple[str, int | str], ...]  # compile-time values by name, sorted
Result = TypeVar("Result")


class CompileError(Exception):
    """A kernel did not compile; the message holds the compiler's log and the numbered source."""


@dataclass(frozen=True)
class Compiled:
    """One kernel compiled for one architecture. `regs`, `spill_bytes`, `local_bytes`, `static_smem` as ptxas reports them; for
    a virtual architecture there is no machine code: these are 0 and `cubin` is empty."""

    kernel: str
    values: Values
    sm: str
    ptx: str
    cubin: bytes
    regs: int
    spill_bytes: int
    local_bytes: int
    static_smem: int
    log: str


def source_path(kernel: str) -> Path:
    """A kernel's file; a name with a path (tests) is used unchanged."""
    path = Path(kernel)
    return path if path.suffix == ".cu" else ROOT / f"{kernel}.cu"


@lru_cache(maxsize=256)
def source_hash(kernel: str = "") -> str:
    """sha256 over the kernel's source and the headers it includes; without a name, over every source of the project."""
    files = sources(source_path(kernel)) if kernel else [*sorted(INCLUDE.glob("*.cuh")), *sorted(ROOT.glob("*.cu"))]
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def sources(path: Path) -> list[Path]:
    """A source and the project's headers that it includes, directly or through another: the source, then headers by name."""
    found, open_files = set(), [path]
    while open_files:
        for _, name in INCLUDED.findall(open_files.pop().read_text()):
            header = INCLUDE / name
            if header not in found and header.exists():
                found.add(header)
                open_files.append(header)
    return [path, *sorted(found)]


def _bindings() -> Any:
    """NVRTC for Python. ModuleNotFoundError names the extra that contains it."""
    with extras.named():
        from cuda.bindings import nvrtc
    return nvrtc


@lru_cache(maxsize=1)
def nvrtc_version() -> str:
    """The version of the NVRTC that cuda-bindings finds: a wheel's, CUDA_HOME's or the linker's. Raises CompileError without
    any."""
    nvrtc = _bindings()
    try:
        return ".".join(str(v) for v in _call(nvrtc.nvrtcVersion))
    except RuntimeError:  # of cuda.pathfinder, whose versions differ
        raise CompileError(f"NVRTC's library is not found, or does not load: {extras.NVRTC}") from None


def installed_nvrtc() -> str:
    """`nvrtc_version`, or "none" without NVRTC, which plans with predicted times do not need."""
    try:
        return nvrtc_version()
    except (CompileError, ModuleNotFoundError):
        return "none"


HEADERS = {12: ("nvidia.cuda_runtime", "nvidia-cuda-runtime-cu12==12.9.*"), 13: ("nvidia.cu13", "nvidia-cuda-runtime==13.0.*")}


@lru_cache(maxsize=1)
def cuda_include() -> Path:
    """The folder of cuda_fp16.h: from the wheel of NVRTC's CUDA version, else from CUDA_PATH."""
    package, wheel = HEADERS.get(int(nvrtc_version().partition(".")[0]), HEADERS[max(HEADERS)])
    try:
        spec = importlib.util.find_spec(package)
    except ModuleNotFoundError:  # no package nvidia at all
        spec = None
    folders = [Path(base) for base in (spec.submodule_search_locations or [])] if spec else []
    folders += [Path(root) for root in (os.environ.get("CUDA_PATH"), os.environ.get("CUDA_HOME"), "/usr/local/cuda") if root]
    for folder in folders:
        if (folder / "include" / "cuda_fp16.h").exists():
            return folder / "include"
    raise CompileError(f"cuda_fp16.h of CUDA {nvrtc_version()} is not found: pip install '{wheel}', or set CUDA_PATH")


def compile_anew(kernel: str, values: Mapping[str, int | str], sm: str) -> Compiled:
    """`compile_kernel` without the cache, to check that the compiler works."""
    fixed = tuple(sorted(values.items()))
    return _compiled(kernel, fixed, sm, *_nvrtc(kernel, fixed, sm))


def compile_kernel(kernel: str, values: Mapping[str, int | str], sm: str) -> Compiled:
    """Compile `kernel`.cu with each value as a macro, for an architecture such as "sm_80" or "sm_90a", or for a virtual one
    such as "compute_90a": the same PTX in less than half the time, and no machine code.

    Raises CompileError with NVRTC's log. The result comes from the cache if nothing that determines it has changed; if the
    cache cannot be written, from this process's memory.
    """
    fixed: Values = tuple(sorted(dict(values).items()))
    if not source_path(kernel).exists():
        raise CompileError(f"kernel {kernel}: no source {source_path(kernel).name}")
    path = cache_path(kernel, fixed, sm)
    found = _UNKEPT.get(path) or _entry(path)
    if found is None:
        found = ptx, cubin, log = _nvrtc(kernel, fixed, sm)
        meta = {"key": path.stem, "ptx": ptx, "log": log, "cubin_sha256": hashlib.sha256(cubin).hexdigest()}
        entry = json.dumps(meta | {"sha256": entry_hash(meta)}).encode()
        if not (keep(path.with_suffix(".cubin"), cubin) and keep(path, entry)):
            _UNKEPT[path] = found
    return _compiled(kernel, fixed, sm, *found)


_UNKEPT: dict[Path, tuple[str, bytes, str]] = {}  # results that the cache could not store


def _entry(path: Path) -> tuple[str, bytes, str] | None:
    """Reads (PTX, machine code, log) of a cache entry; None if it is absent or differs from the content written under this
    key.
    """
    try:
        with open_regular(path) as file:
            meta = json.loads(file.read())
        with open_regular(path.with_suffix(".cubin")) as file:
            cubin = file.read()
        whole = meta["key"] == path.stem and meta["sha256"] == entry_hash(meta)
        whole = whole and meta["cubin_sha256"] == hashlib.sha256(cubin).hexdigest()
        return (meta["ptx"], cubin, meta["log"]) if whole else None
    except (OSError, ValueError, TypeError, KeyError, RecursionError):  # absent, torn or another file altogether
        return None


def entry_hash(meta: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps([meta[name] for name in ("key", "ptx", "log", "cubin_sha256")]).encode()).hexdigest()


def virtual(sm: str) -> str:
    """The virtual architecture of a real one: sm_90a -> compute_90a."""
    return "compute_" + sm.removeprefix("sm_")


def cubin_path(compiled: Compiled) -> Path:
    """A file with `compiled.cubin`: the cached file, rewritten if its content differs, or a file of this process if the cache
    cannot be written."""
    if not compiled.cubin:
        raise ValueError(f"kernel {compiled.kernel} for {compiled.sm}: no machine code, compile it for an architecture sm_*")
    path = cache_path(compiled.kernel, compiled.values, compiled.sm).with_suffix(".cubin")
    try:
        with open_regular(path) as file:
            if file.read() == compiled.cubin:
                return path
    except OSError:
        pass  # written now
    if keep(path, compiled.cubin):
        return path
    own = Path(_own_folder().name, path.name)
    own.write_bytes(compiled.cubin)
    return own


@lru_cache(maxsize=1)
def _own_folder() -> TemporaryDirectory:
    """A temporary folder, removed when the process ends."""
    import tempfile

    return tempfile.TemporaryDirectory(prefix="gpu_runtime-")


def cache_path(kernel: str, values: Values, sm: str) -> Path:
    parts = [source_path(kernel).name, values, sm, OPTIONS, nvrtc_version(), source_hash(kernel)]
    key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
    return cache_dir() / "kernels" / key[:2] / f"{key}.json"


def _compiled(kernel: str, values: Values, sm: str, ptx: str, cubin: bytes, log: str) -> Compiled:
    def number(pattern: str) -> int:
        return sum(int(m) for m in re.findall(pattern, log))

    return Compiled(
        kernel,
        values,
        sm,
        ptx,
        cubin,
        regs=number(r"Used (\d+) registers"),
        spill_bytes=number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
        local_bytes=number(r"(\d+) bytes stack frame"),
        static_smem=number(r"(\d+) bytes smem"),
        log=log,
    )


def _call(function: Callable, *args: object) -> Any:
    """Calls a function of NVRTC and returns its results without the status. Raises CompileError unless the status is
    success.
    """
    status, *rest = function(*args)
    if status != _bindings().nvrtcResult.NVRTC_SUCCESS:
        raise CompileError(f"{function.__name__}: {status.name}")
    return rest[0] if len(rest) == 1 else tuple(rest)


def _nvrtc(kernel: str, values: Values, sm: str) -> tuple[str, bytes, str]:
    nvrtc, path = _bindings(), source_path(kernel)
    source = path.read_text()
    options = [
        f"--gpu-architecture={sm}",
        *OPTIONS,
        f"-I{cuda_include()}",
        *(f"-D{name}={value}" for name, value in values),
    ]
    # -lineinfo writes the names of all sources into PTX and binary, relative names after the current folder. So sources come
    # from memory under our own absolute names.
    headers = {header.name: header.read_text() for header in sources(path)[1:]}

    def named(text: str) -> bytes:
        return INCLUDED.sub(lambda m: f'{m[1]}{NAMED}/include/{m[2]}"' if m[2] in headers else m[0], text).encode()

    program = _call(
        nvrtc.nvrtcCreateProgram,
        named(source),
        f"{NAMED}/{path.name}".encode(),
        len(headers),
        [*map(named, headers.values())],
        [f"{NAMED}/include/{name}".encode() for name in headers],
    )
    try:
        encoded = [o.encode() for o in options]
        status = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)[0]
        log = bytearray(_call(nvrtc.nvrtcGetProgramLogSize, program))
        _call(nvrtc.nvrtcGetProgramLog, program, log)
        text = log.decode(errors="replace").rstrip("\0")
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            if int(re.sub(r"\D", "", sm)) not in (known := _call(nvrtc.nvrtcGetSupportedArchs)):
                raise CompileError(f"NVRTC {nvrtc_version()} does not compile for {sm}: it knows {', '.join(map(str, known))}")
            numbered = "\n".join(f"{i:4} {line}" for i, line in enumerate(source.splitlines(), 1))
            macros = " ".join(f"-D{n}={v}" for n, v in values)
            raise CompileError(f"{path.name} {macros} for {sm}: {status.name}\n{text}\n{numbered}")
        ptx = bytearray(_call(nvrtc.nvrtcGetPTXSize, program))
        _call(nvrtc.nvrtcGetPTX, program, ptx)
        cubin = bytearray(_call(nvrtc.nvrtcGetCUBINSize, program))
        _call(nvrtc.nvrtcGetCUBIN, program, cubin)
        return ptx.decode().rstrip("\0"), bytes(cubin), text
    finally:
        nvrtc.nvrtcDestroyProgram(program)


Request = tuple[str, Mapping[str, int | str], str]  # (kernel, values, sm)
Counter = Callable[[int, int], None]  # called with the number done and the total


def is_kept(kernel: str, values: Mapping[str, int | str], sm: str) -> bool:
    """Whether the cache has an entry for this kernel, so that it is read instead of compiled."""
    path = cache_path(kernel, tuple(sorted(values.items())), sm)
    return path in _UNKEPT or path.exists()


def compile_many(requests: Iterable[Request], progress: Counter | None = None) -> list[Compiled]:
    """Compiles (kernel, values, sm) triples as compile_kernel does, in parallel threads (NVRTC releases the lock while it
    compiles).

    `progress` counts only kernels that are not in the cache.
    """
    from concurrent.futures import ThreadPoolExecutor

    requests = list(requests)
    new = [progress is not None and not is_kept(*r) for r in requests]
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        return list(counted(pool.map(lambda r: compile_kernel(*r), requests), new, progress))


def counted(results: Iterable[Result], new: Sequence[bool], progress: Counter | None) -> Iterator[Result]:
    """The results, in order; `progress` gets the number of `new` results done, starting at 0."""
    total, done = sum(new), 0
    if progress is not None and total:
        progress(0, total)
    for result, counts in zip(results, new, strict=True):
        done += counts
        if counts and progress is not None:
            progress(done, total)
        yield result
