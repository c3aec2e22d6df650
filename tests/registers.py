"""What kernels take of an SM, held to a committed baseline: registers per thread and static shared memory, by compiler version.

`make registers` compiles every variant that the tests name and writes tests/golden/registers.json anew:
{version of NVRTC: {kernel: {"NAME=VALUE,...": [registers on each of ARCHITECTURES, bytes on each]}}}.
"""

from __future__ import annotations

import json
import os
import sys
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from cuda_kernels.compile import Compiled, nvrtc_version
from cuda_kernels.device import ARCHITECTURES

BASELINE = Path(__file__).parent / "golden" / "registers.json"
RECORD = "GPU_RUNTIME_RECORD"  # a file to which `hold` appends what it sees, instead of comparing


@lru_cache
def compiler() -> str:
    """NVRTC's version to the patch, as its package has it; of one without a package only major and minor are known."""
    try:
        return version("nvidia-cuda-nvrtc")
    except PackageNotFoundError:
        return nvrtc_version()


@lru_cache
def baseline() -> dict[str, dict[str, dict[str, list]]]:
    return json.loads(BASELINE.read_text()) if BASELINE.exists() else {}


def fits(c: Compiled) -> None:
    """AssertionError where a kernel spills registers or keeps arrays in local memory."""
    assert c.spill_bytes == 0 and c.local_bytes == 0, f"{c.kernel} {dict(c.values)} for {c.sm}: {c.log}"


def hold(c: Compiled) -> None:
    """`fits`, and the same registers and shared memory as in the baseline, where that knows this compiler."""
    fits(c)
    if path := os.environ.get(RECORD):
        with open(path, "a") as file:
            file.write(json.dumps([c.kernel, _key(c), c.sm, c.regs, c.static_smem]) + "\n")
        return
    if compiler() not in baseline():
        return  # test_compile.py says so
    found = baseline()[compiler()].get(c.kernel, {}).get(_key(c))
    assert found, f"{c.kernel} {_key(c)} is not in {BASELINE.name}: run `make registers`"
    i = ARCHITECTURES.index(c.sm)
    regs, smem = found[0][i], found[1][i]
    assert (c.regs, c.static_smem) == (regs, smem), (
        f"{c.kernel} {_key(c)} for {c.sm} takes {c.regs} registers and {c.static_smem} bytes of shared memory, in the baseline "
        f"{regs} and {smem}: if that is meant, run `make registers`"
    )


def _key(c: Compiled) -> str:
    return ",".join(f"{name}={value}" for name, value in c.values)


def main() -> None:
    """Write the baseline of this compiler from a recorded file; other compilers' stay."""
    rows: dict[str, dict[str, list]] = {}
    for line in Path(sys.argv[1]).read_text().splitlines():
        kernel, key, sm, regs, smem = json.loads(line)
        row = rows.setdefault(kernel, {}).setdefault(key, [[None] * len(ARCHITECTURES), [None] * len(ARCHITECTURES)])
        row[0][ARCHITECTURES.index(sm)], row[1][ARCHITECTURES.index(sm)] = regs, smem
    kernels = []
    for kernel, variants in sorted(rows.items()):
        lines = (f"   {json.dumps(key)}: {json.dumps(row)}" for key, row in sorted(variants.items()))
        kernels.append(f"  {json.dumps(kernel)}: {{\n" + ",\n".join(lines) + "\n  }")
    known = {name: json.dumps(table) for name, table in baseline().items()}
    known[compiler()] = "{\n" + ",\n".join(kernels) + "\n }"
    BASELINE.write_text("{\n" + ",\n".join(f" {json.dumps(name)}: {table}" for name, table in sorted(known.items())) + "\n}\n")
    print(f"{BASELINE.name}: {sum(map(len, rows.values()))} variants of {len(rows)} kernels for NVRTC {compiler()}")


if __name__ == "__main__":
    main()
