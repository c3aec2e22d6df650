"""(kernel, compile-time values, sm) -> PTX and cubin through NVRTC, with or without a GPU; results are cached by content.

The cache key names everything that decides the binary: kernel name, values, architecture, options, NVRTC version and the
bytes of the source and of every header it includes. Files appear by rename only, so a killed process leaves no torn entry.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

ROOT = Path(__file__).parent
INCLUDE = ROOT / "include"
OPTIONS = ("-std=c++17", "--device-as-default-execution-space", "-lineinfo", "--ptxas-options=-v")


class CompileError(Exception):
    """A kernel did not compile; the message holds the compiler's log and the numbered source."""


@dataclass(frozen=True)
class Compiled:
    """One kernel compiled for one architecture. `regs`, `spill_bytes`, `local_bytes`, `static_smem` as ptxas reports them; for
    a virtual architecture there is no machine code: these are 0 and `cubin` is empty."""

    kernel: str
    values: tuple[tuple[str, int], ...]
    sm: str
    ptx: str
    cubin: bytes
    regs: int
    spill_bytes: int
    local_bytes: int
    static_smem: int
    log: str


def cache_dir() -> Path:
    """Where compiled kernels, the emulator and timings are kept: GPU_RUNTIME_CACHE, or the user's cache folder."""
    root = os.environ.get("GPU_RUNTIME_CACHE")
    path = Path(root) if root else Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "gpu_runtime"
    path.mkdir(parents=True, exist_ok=True)
    return path


def write_atomic(path: Path, data: bytes) -> None:
    """Write a sibling temporary file and rename it over `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temp = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with open(temp, "wb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        os.replace(temp, path)
    except BaseException:
        temp.unlink(missing_ok=True)
        raise


def source_path(kernel: str) -> Path:
    """A kernel's file; a name with a path in it (tests) is taken as it is."""
    path = Path(kernel)
    return path if path.suffix == ".cu" else ROOT / f"{kernel}.cu"


@lru_cache(maxsize=256)
def source_hash(kernel: str = "") -> str:
    """sha256 over the kernel's source and the headers it includes; without a name, over every source of the project."""
    files = _with_headers(source_path(kernel)) if kernel else [*sorted(INCLUDE.glob("*.cuh")), *sorted(ROOT.glob("*.cu"))]
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _with_headers(path: Path) -> list[Path]:
    """A source and the project's headers that it includes, directly or through another: the source, then headers by name."""
    found, open_files = set(), [path]
    while open_files:
        for name in re.findall(r'^\s*#\s*include\s+"([^"]+)"', open_files.pop().read_text(), re.MULTILINE):
            header = INCLUDE / name
            if header not in found and header.exists():
                found.add(header)
                open_files.append(header)
    return [path, *sorted(found)]


@lru_cache(maxsize=1)
def nvrtc_version() -> str:
    from cuda.bindings import nvrtc

    return ".".join(str(v) for v in _call(nvrtc.nvrtcVersion))


@lru_cache(maxsize=1)
def cuda_include() -> Path:
    """The folder of cuda_fp16.h: the nvidia-cuda-runtime wheel's, else CUDA_PATH's."""
    import importlib.util

    for package, parts in (("nvidia.cu13", ("include",)), ("nvidia.cuda_runtime", ("include",))):
        try:
            spec = importlib.util.find_spec(package)
        except ModuleNotFoundError:
            continue
        for base in (spec.submodule_search_locations or []) if spec else []:
            if (Path(base, *parts) / "cuda_fp16.h").exists():
                return Path(base, *parts)
    for base in (os.environ.get("CUDA_PATH"), os.environ.get("CUDA_HOME"), "/usr/local/cuda"):
        if base and (Path(base) / "include" / "cuda_fp16.h").exists():
            return Path(base) / "include"
    raise CompileError("cuda_fp16.h not found: install the wheel nvidia-cuda-runtime==13.0.* or set CUDA_PATH")


def compile_kernel(kernel: str, values: Mapping[str, int | str], sm: str) -> Compiled:
    """Compile `kernel`.cu with each value as a macro, for an architecture such as "sm_80" or "sm_90a", or for a virtual one
    such as "compute_90a": the same PTX in less than half the time, and no machine code.

    Raises CompileError with NVRTC's log. The result comes from the cache when nothing that decides it has changed.
    """
    values = tuple(sorted(dict(values).items()))
    if not source_path(kernel).exists():
        raise CompileError(f"kernel {kernel}: no source {source_path(kernel).name}")
    path = _cache_path(kernel, values, sm)
    try:
        meta = json.loads(path.read_text())
        cubin = path.with_suffix(".cubin").read_bytes()
        if hashlib.sha256(cubin).hexdigest() == meta["cubin_sha256"]:
            return _compiled(kernel, values, sm, meta["ptx"], cubin, meta["log"])
    except (OSError, ValueError, KeyError):
        pass  # not cached, or torn: compile again
    ptx, cubin, log = _nvrtc(kernel, values, sm)
    write_atomic(path.with_suffix(".cubin"), cubin)
    meta = {"ptx": ptx, "log": log, "cubin_sha256": hashlib.sha256(cubin).hexdigest()}
    write_atomic(path, json.dumps(meta).encode())
    return _compiled(kernel, values, sm, ptx, cubin, log)


def virtual(sm: str) -> str:
    """The virtual architecture of a real one: sm_90a -> compute_90a."""
    return "compute_" + sm.removeprefix("sm_")


def cubin_path(compiled: Compiled) -> Path:
    """The cached file that holds `compiled.cubin`, written again where the cache has lost it."""
    if not compiled.cubin:
        raise ValueError(f"kernel {compiled.kernel} for {compiled.sm}: no machine code, compile it for an architecture sm_*")
    path = _cache_path(compiled.kernel, compiled.values, compiled.sm).with_suffix(".cubin")
    if not path.exists():
        write_atomic(path, compiled.cubin)
    return path


def _cache_path(kernel: str, values, sm: str) -> Path:
    parts = [source_path(kernel).name, values, sm, OPTIONS, nvrtc_version(), source_hash(kernel)]
    key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
    return cache_dir() / "kernels" / key[:2] / f"{key}.json"


def _compiled(kernel, values, sm, ptx, cubin, log) -> Compiled:
    def number(pattern: str) -> int:
        return sum(int(m) for m in re.findall(pattern, log))

    return Compiled(
        kernel, values, sm, ptx, cubin,
        regs=number(r"Used (\d+) registers"),
        spill_bytes=number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
        local_bytes=number(r"(\d+) bytes stack frame"),
        static_smem=number(r"(\d+) bytes smem"),
        log=log,
    )  # fmt: skip


def _call(function, *args):
    from cuda.bindings import nvrtc

    status, *rest = function(*args)
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise CompileError(f"{function.__name__}: {status.name}")
    return rest[0] if len(rest) == 1 else tuple(rest)


def _nvrtc(kernel: str, values: tuple[tuple[str, int | str], ...], sm: str) -> tuple[str, bytes, str]:
    from cuda.bindings import nvrtc

    path = source_path(kernel)
    source = path.read_text()
    options = [
        f"--gpu-architecture={sm}", *OPTIONS, f"-I{INCLUDE}", f"-I{cuda_include()}",
        *(f"-D{name}={value}" for name, value in values),
    ]  # fmt: skip
    # The program is named by its file alone, so that -lineinfo does not put this machine's paths into the binary.
    program = _call(nvrtc.nvrtcCreateProgram, source.encode(), path.name.encode(), 0, [], [])
    try:
        encoded = [o.encode() for o in options]
        status = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)[0]
        log = bytearray(_call(nvrtc.nvrtcGetProgramLogSize, program))
        _call(nvrtc.nvrtcGetProgramLog, program, log)
        text = log.decode(errors="replace").rstrip("\0")
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
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


def compile_many(requests, workers: int | None = None) -> list[Compiled]:
    """compile_kernel over (kernel, values, sm) triples, in parallel threads (NVRTC releases the lock while it compiles)."""
    from concurrent.futures import ThreadPoolExecutor

    requests = list(requests)
    with ThreadPoolExecutor(workers or os.cpu_count() or 1) as pool:
        return list(pool.map(lambda r: compile_kernel(*r), requests))
