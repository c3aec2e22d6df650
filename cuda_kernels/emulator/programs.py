"""Decoded programs of kernels' PTX, and their cache, next to the PTX of compiled kernels.

The PTX, the decoder's sources and the library's instruction numbers determine a program. A file is named by their hash, and
begins with a hash of this name and of its content. So a file of another program, a torn or an altered file is a miss. The
hashes detect accidents only: users who can write the cache can run any code, as with the machine code and the library there.
"""

import hashlib
import json
import math
import zlib
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from cuda_kernels import files
from cuda_kernels.emulator.build import SOURCES, names

# fmt: off
INS = np.dtype([
    ("fn", "<u8"), ("imm", "<i8"), ("imm2", "<i8"), ("guard", "<i4"), ("kind", "<u2"), ("sub", "<u2"), ("flags", "u1"),
    ("space", "u1"), ("size", "u1"), ("vec", "u1"), ("line", "<i4"), ("o", "<i4", (20,)), ("order", "<i4"), ("pad", "<i4"),
])
# fmt: on
assert INS.itemsize == 128
SHARED_START = 16  # address 0 stays unused, and no variable is better aligned than declared
ARRAYS: dict[str, tuple[Any, tuple[int, ...]]] = {  # of a program: dtype and shape
    "code": (INS, (-1,)),
    "places": ("<i4", (-1, 4)),
    "tables": ("<u4", (-1,)),
    "specials": ("<u4", (-1, 2)),
    "sizes": ("<u4", (6,)),
    "consts": ("u1", (-1,)),
}
HASH_BYTES = 32
MOST_BLOCKS = 8  # of a cluster, on every device (CUDA C++ Programming Guide, "Thread Block Clusters")
Triple = tuple[int, int, int]


@dataclass(frozen=True)
class Decoded:
    """A kernel decoded for the interpreter. The interpreter reads the arrays; `places`, `opcodes` and `files` name instructions
    in messages; the rest describes the kernel's memory and launch limits."""

    name: str
    code: np.ndarray
    consts: np.ndarray
    tables: np.ndarray
    specials: np.ndarray
    sizes: np.ndarray  # warp bytes, predicate bytes, local bytes, log2 of a shared and of a global cell, registers of a thread
    places: np.ndarray  # per instruction: PTX line, file, line of the file, opcode
    opcodes: list[str]
    files: dict[str, str]  # number -> name
    static_end: int  # shared addresses: one past the static variables, and where the dynamic array begins
    dynamic_at: int
    param_bytes: int
    maxntid: list[int]  # empty: not declared
    cluster: list[int]  # blocks of a cluster, x, y, z; empty: not declared
    globals: list[tuple[str, np.ndarray]]  # at the addresses that the code has


def cluster_of(d: Decoded, attribute: Triple | None) -> Triple:
    """Returns the blocks of a cluster along x, y, z, from a launch's attribute or else the kernel."""
    x, y, z = attribute or d.cluster or (1, 1, 1)
    return x, y, z


def check_cluster(d: Decoded, attribute: Triple | None, grid: Triple, resident: int) -> None:
    """Raises ValueError for clusters that are impossible for this grid; `resident`: blocks at a time, 0 for any."""
    cluster = cluster_of(d, attribute)
    blocks, declared = math.prod(cluster), tuple(d.cluster)
    if declared and declared != cluster:
        raise ValueError(f"{d.name}: expected clusters of {declared} blocks, as the kernel declares, got {cluster}")
    if min(cluster) < 1 or blocks > MOST_BLOCKS:
        raise ValueError(f"{d.name}: clusters of {cluster} blocks: expected 1 to {MOST_BLOCKS}, which every device can run")
    if any(g % c for g, c in zip(grid, cluster, strict=True)):
        raise ValueError(f"{d.name}: a grid of {tuple(grid)} blocks: expected whole clusters of {cluster}")
    if 0 < resident < blocks:
        raise ValueError(f"{d.name}: {resident} resident blocks: expected at least a cluster's {blocks}")


@lru_cache(maxsize=1)
def _version() -> bytes:
    """Hashes all inputs of a program except the PTX."""
    digest = hashlib.sha256(repr(names()).encode())
    for path in sorted(SOURCES.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.digest()


def key_of(ptx: str, kernel: str | None) -> str:
    """A program's key: its PTX, and the kernel's name if the PTX has several."""
    return hashlib.sha256(f"{kernel}\0{ptx}".encode()).hexdigest()


def cache_path(of: str) -> Path:
    """The file of the program with this key."""
    key = hashlib.sha256(_version() + of.encode()).hexdigest()
    return files.cache_dir() / "kernels" / key[:2] / f"{key}.program"


def read(path: Path) -> Decoded | None:
    """Reads the program written under this name; None if it is absent or damaged."""
    try:
        with files.open_regular(path) as file:
            digest, packed = file.read(HASH_BYTES), file.read()
    except OSError:
        return None
    if digest != _digest(path, packed):
        return None
    data = zlib.decompress(packed)
    head, _, _ = data.partition(b"\n")
    found, rest = json.loads(head), np.frombuffer(data, np.uint8, offset=len(head) + 1)
    for name, (kind, shape) in ARRAYS.items():
        array, rest = np.split(rest, [found[name]])
        found[name] = array.view(kind).reshape(shape)
    return Decoded(**found, globals=[])


def write(path: Path, program: Decoded) -> None:
    """Stores a program, unless its code has addresses of this process."""
    if program.globals:
        return
    arrays = {name: np.ascontiguousarray(getattr(program, name), kind) for name, (kind, _) in ARRAYS.items()}
    head = {f.name: getattr(program, f.name) for f in fields(program) if f.name not in (*ARRAYS, "globals")}
    text = json.dumps(head | {name: array.nbytes for name, array in arrays.items()}).encode()
    text += b" " * (-(len(text) + 1) % 16) + b"\n"  # the arrays behind the header are aligned
    packed = zlib.compress(text + b"".join(array.tobytes() for array in arrays.values()), 1)
    files.keep(path, _digest(path, packed) + packed)


def _digest(path: Path, packed: bytes) -> bytes:
    return hashlib.sha256(path.stem.encode() + packed).digest()
