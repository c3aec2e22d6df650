"""Kernels that are set side by side: ours, CUTLASS's and Triton's, each as PTX, and as machine code of one assembler.

`KERNELS` lists them. CUTLASS's are templates of its own, instantiated by the three sources here; Triton's come from its
compiler, run over the plain product of tests/independent. All PTX goes through the ptxas of CUDA 13.0, which is the one inside
NVRTC 13.0 that ours are shipped with, so that only code differs. Compiled files are cached by content.
"""

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from benchmarks.simulator.machine import residency
from cuda_kernels.device import Device, named
from cuda_kernels.files import cache_dir, write
from tactics.families.hopper import conv_wgmma
from tactics.tactic import Tile
from tests.independent import packages, triton_programs
from tests.independent.cuda_programs import shared_object
from tests.independent.triton_programs import Triton

HERE = Path(__file__).parent
AMPERE, HOPPER = ("sm_80", "sm_86", "sm_89"), ("sm_90a",)
DEVICES = dict(zip((*AMPERE, *HOPPER), map(named, ("a100", "a40", "l40s", "h100")), strict=True))  # one of full rate each


@dataclass(frozen=True, slots=True, order=True)
class Kernel:
    """A kernel. `maker`: ours, CUTLASS or Triton; `name`: of its source; `tile`: its m lies along pixels in CUTLASS's conv and
    gemm, along output channels in the others.
    """

    maker: str
    name: str
    tile: Tile

    @property
    def sparse(self) -> bool:
        return "sparse" in self.name

    @property
    def sms(self) -> tuple[str, ...]:
        """Returns the architectures for which the kernel is: one with Hopper's asynchronous products is for no other."""
        return HOPPER if self.name.endswith("_sm90") else AMPERE

    @property
    def pingpong(self) -> bool:
        return "pingpong" in self.name or self.tile.pingpong

    def __str__(self) -> str:
        return f"{self.maker} {self.name} {self.tile}"


DENSE = (Tile(128, 128, 32, 2, 2, 4), Tile(128, 256, 32, 2, 4, 3))
SPARSE = (Tile(256, 128, 64, 4, 2, 3), Tile(128, 256, 64, 2, 4, 3))
STAGES = tuple(Tile(128, 128, 32, 2, 2, stages) for stages in (3, 5))
KERNELS = (
    *(Kernel("ours", "conv_dense", tile) for tile in DENSE),
    *(Kernel("CUTLASS", "conv", tile) for tile in (*DENSE, *STAGES)),
    *(Kernel("Triton", "matmul", tile) for tile in DENSE),
    *(Kernel("ours", "conv_sparse24", tile) for tile in SPARSE),
    *(Kernel("CUTLASS", "sparse_gemm", tile) for tile in SPARSE),
)


def _ours(name: str, *shapes: str) -> Iterator[Tile]:
    """Yields tiles by themselves, and in clusters of two that share pixels."""
    return (t for t in conv_wgmma.TILES[name] if str(t).startswith(shapes) and t.cluster[1:] == (1, 1))


# For Hopper: the warps of a tile are the ones that multiply it.
# fmt: off
ON_HOPPER = (
    *(Kernel("ours", "conv_dense_sm90", t) for t in _ours("conv_dense_sm90", "128x256x64_w8x1", "128x128x64_w4x1")),
    *(Kernel("CUTLASS", "gemm_sm90", Tile(*tile)) for tile in ((128, 256, 64, 8, 1, 4), (128, 128, 64, 8, 1, 6))),
    *(Kernel("CUTLASS", "gemm_pingpong_sm90", Tile(*tile)) for tile in ((64, 256, 64, 4, 1, 5), (128, 128, 64, 4, 1, 6))),
    *(Kernel("CUTLASS", "conv_sm90", Tile(*tile)) for tile in ((128, 128, 64, 4, 1, 6), (64, 64, 64, 4, 1, 3))),
    *(Kernel("ours", "conv_sparse24_sm90", t) for t in _ours("conv_sparse24_sm90", "256x128x64_w8x1", "128x256x64_w8x1")),
    *(Kernel("CUTLASS", "sparse_gemm_sm90", Tile(*tile)) for tile in ((128, 128, 128, 8, 1, 4), (128, 256, 64, 8, 1, 4))),
)
# fmt: on
# The tiles of CUTLASS's generator for Ampere (GenerateSM80_TensorOp_16816): cuBLAS chooses from these, as far as is known.
# fmt: off
GEMMS = tuple(
    Kernel("CUTLASS", "gemm", Tile(*tile))
    for tile in (
        (256, 128, 32, 4, 2, 3), (128, 256, 32, 2, 4, 3), (256, 64, 32, 4, 1, 4), (64, 256, 32, 1, 4, 4),
        (128, 128, 32, 2, 2, 5), (128, 64, 32, 2, 2, 6), (64, 128, 32, 2, 2, 6), (64, 64, 32, 2, 2, 10),
        (256, 128, 64, 4, 2, 3), (128, 256, 64, 2, 4, 3), (256, 64, 64, 4, 1, 4), (64, 256, 64, 1, 4, 4),
        (128, 128, 64, 2, 2, 3), (128, 64, 64, 2, 2, 3), (64, 128, 64, 2, 2, 3), (64, 64, 64, 2, 2, 5),
    )
)
# fmt: on


def missing(kernel: Kernel) -> str:
    """Says why a kernel cannot be had here, or ""; without the toolkit, which has the assembler, none can."""
    if kernel.maker == "Triton" and not triton_programs.installed():
        return "Triton is not installed: make truth"
    return packages.missing(*packages.TOOLKIT, *((packages.CUTLASS,) if kernel.maker == "CUTLASS" else ()))


# ---- others' PTX


def cutlass(kernel: Kernel) -> Path:
    """Returns the program of a CUTLASS kernel, with run() and its PTX inside; compiling takes a quarter of a minute."""
    t = kernel.tile
    values = {"BM": t.m, "BN": t.n, "BK": t.k, "WARPS_M": t.warps_m, "WARPS_N": t.warps_n, "STAGES": t.stages}
    if kernel.sms != HOPPER:
        return shared_object(f"{kernel.name}_{t}", (HERE / f"{kernel.name}.cu").read_text(), values=values)
    # A failed assertion is a call, which no product may be in flight across: with them ptxas waits for each product (C7510).
    values |= {"NDEBUG": 1, "PINGPONG": int(kernel.pingpong)}
    text = (HERE / f"{kernel.name.replace('_pingpong', '')}.cu").read_text()
    return shared_object(f"{kernel.name}_{t}", text, values=values, capability="90a")


@lru_cache(maxsize=1)
def triton() -> dict[Tile, Triton]:
    """Returns tile -> Triton's product, compiled in a process of its own."""
    sources = [HERE / "triton_matmul.py", triton_programs.SOURCE]
    tiles = [kernel.tile for kernel in KERNELS if kernel.maker == "Triton"]
    words = [",".join(map(str, (t.m, t.n, t.k, t.threads // 32, t.stages))) for t in tiles]
    path = _cached("triton", b"".join(p.read_bytes() for p in sources), triton_programs.installed(), *words)
    if not path.exists():
        root = HERE.parents[1]
        environment = {**os.environ, **triton_programs.SETTINGS, "PYTHONPATH": os.pathsep.join([str(root), *sys.path])}
        command = [sys.executable, "-m", "benchmarks.sass.triton_matmul", *words]
        made = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
        if made.returncode:
            raise RuntimeError(f"Triton {triton_programs.installed()} does not compile its product:\n{made.stderr}")
        write(path, made.stdout.encode())
    records = json.loads(path.read_text())
    return {tile: Triton("matmul", **records[word]) for tile, word in zip(tiles, words, strict=True)}


def _cached(name: str, *parts: bytes | str) -> Path:
    digest = hashlib.sha256()
    for part in parts:
        digest.update((part if isinstance(part, bytes) else part.encode()) + b"\0")
    return cache_dir() / "independent" / f"sass-{name}-{digest.hexdigest()[:20]}"


# ---- one assembler


@dataclass(frozen=True, slots=True)
class Assembled:
    """Machine code, and ptxas' numbers: registers of a thread, bytes of static shared memory and of spills, `serialized`: how
    often it had to wait for asynchronous products (C75xx).
    """

    cubin: bytes
    regs: int
    static_smem: int
    spills: int
    serialized: int = 0

    def resident(self, device: Device, threads: int, dynamic_smem: int) -> int:
        """Returns the number of blocks that an SM holds at a time; 0 if not even one fits."""
        smem = self.static_smem + dynamic_smem
        try:
            return residency(device, threads, self.regs, smem).blocks if smem <= device.smem_per_block else 0
        except ValueError:
            return 0


def assemble(ptx: str, sm: str, entry: str = "") -> Assembled:
    """Assembles PTX with one kernel, or its kernel `entry`, for its own architecture or a later one. RuntimeError with ptxas'
    words.
    """
    path = _cached("code", ptx, sm, *packages.TOOLKIT)
    log = path.with_suffix(".log")
    if not (path.exists() and log.exists()):
        with tempfile.TemporaryDirectory(prefix="gpu_runtime-") as folder:
            source, out = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
            source.write_text(ptx)
            command = [str(packages.toolkit() / "bin" / "ptxas"), "-v", f"-arch={sm}", str(source), "-o", str(out)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"ptxas refuses PTX for {sm}: {done.stderr[-2000:]}")
            write(path, out.read_bytes())
            write(log, done.stderr.encode())
    said = log.read_text()
    serialized = sum("(C75" in line and entry in line for line in said.splitlines())
    if entry:
        (said,) = re.findall(rf"Compiling entry function '{re.escape(entry)}'.*?(?=Compiling entry|\Z)", said, re.S)

    def number(pattern: str) -> int:
        return sum(map(int, re.findall(pattern, said)))

    spills = number(r"(\d+) bytes spill") + number(r"(\d+) bytes stack frame")
    return Assembled(path.read_bytes(), number(r"Used (\d+) registers"), number(r"(\d+) bytes smem"), spills, serialized)


def selected(kernels: Iterable[Kernel], tiles: Iterable[str]) -> list[Kernel]:
    """Returns the kernels whose tile begins with one of `tiles`, as "128x256x32"; all if there are none. Raises ValueError for
    a text that no tile begins with.
    """
    listed, wanted = list(kernels), list(tiles)
    for tile in wanted:
        if not any(str(kernel.tile).startswith(tile) for kernel in listed):
            known = sorted({str(kernel.tile).partition("_w")[0] for kernel in listed})
            raise ValueError(f"no kernel with a tile {tile}: expected one of {', '.join(known)}")
    return [k for k in listed if not wanted or any(str(k.tile).startswith(tile) for tile in wanted)]
