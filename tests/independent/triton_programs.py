"""Triton's PTX: committed, or compiled where the extra [truth] is installed, and then cached by content.

python -m tests.independent.triton_programs      writes the committed ones anew
"""

import hashlib
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from cuda_kernels.files import cache_dir, write

HERE = Path(__file__).parent
SOURCE = HERE / "triton_kernels.py"
FOLDER = HERE / "triton"
# Committed, 130 kB, so that `make test` runs others' code on any machine: a compiler's output from our own sources, without its
# device library. Between them: mma, ldmatrix with and without .trans, cp.async in a pipeline, warp and block reductions,
# launches that may begin early, whole numbers of 8 to 64 bits, comparisons.
# fmt: off
COMMITTED = (
    "matmul", "attention", "softmax", "transpose", "dependent", "words", "shorts", "compared", "masks", "carried",
    "gathered_lanes", "gathered_half", "rounded", "matmul_hopper", "tma_64x64x32",
)
# fmt: on
ABOUT = ("entry", "shared", "warps", "dependent", "arguments", "constants", "sm", "maps")
SETTINGS = {"TRITON_DISABLE_LINE_INFO": "1"}  # half the text


@dataclass(frozen=True, slots=True)
class Triton:
    """A compiled kernel. `arguments`: name -> type, in order; `constants`: name -> value for which it was compiled;
    `dependent`: its launches may begin before the one ahead has ended; `maps`: for each tensor map the box, and 0 to 3 for no
    swizzle to one of 128 bytes.
    """

    name: str
    ptx: str
    entry: str
    shared: int
    warps: int
    dependent: bool
    arguments: dict[str, str]
    constants: dict[str, int]
    sm: int
    maps: list


def installed() -> str:
    """Returns Triton's version, or ""."""
    try:
        return version("triton")
    except PackageNotFoundError:
        return ""


@lru_cache(maxsize=1)
def all_kernels() -> dict[str, Triton]:
    """Returns every kernel of triton_kernels.py, from the cache if this Triton compiled these sources before."""
    key = hashlib.sha256(SOURCE.read_bytes() + installed().encode()).hexdigest()[:20]
    path = cache_dir() / "independent" / f"triton-{key}.json"
    if not path.exists():
        command = [sys.executable, "-m", "tests.independent.triton_kernels"]
        environment = {**os.environ, **SETTINGS, "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), *sys.path])}
        made = subprocess.run(command, cwd=HERE.parents[1], env=environment, capture_output=True, text=True)
        if made.returncode:
            raise RuntimeError(f"Triton {installed()} does not compile {SOURCE}:\n{made.stderr}")
        write(path, made.stdout.encode())
    return {name: Triton(name, **record) for name, record in json.loads(path.read_text()).items()}


def committed(name: str) -> Triton:
    """Returns a committed kernel; its facts are in its first line."""
    text = (FOLDER / f"{name}.ptx").read_text()
    record = json.loads(text.partition("\n")[0].removeprefix("// "))
    return Triton(name, text, *(record[key] for key in ABOUT))


def main() -> None:
    if not installed():
        raise SystemExit("Triton is not installed: make truth")
    for name in COMMITTED:
        k = all_kernels()[name]
        about = {"compiler": f"Triton {installed()}, MIT", "source": f"tests/independent/{SOURCE.name}: {name}"}
        record = asdict(k)
        head = {**about, **{key: record[key] for key in ABOUT}}
        lines = [line.rstrip() for line in k.ptx.splitlines()]
        write(FOLDER / f"{name}.ptx", "\n".join([f"// {json.dumps(head)}", *lines, ""]).encode())


if __name__ == "__main__":
    main()
