"""A committed record of the kernels' SM resources and machine code, which tests read instead of compiling.

tests/golden/compiled.json: {version of NVRTC: {kernel: {"source": hash of its sources, "variants": {"NAME=VALUE,...":
{architecture: the fields of Taken}}}}}. A row is believed while the kernel's sources are those of the record; otherwise, and
where RECOMPILE says so, the variant is compiled and must be as recorded, or, if the sources are others, without spills.

`make compiled` writes the record anew (only what changed is compiled). RECOMPILE in the environment: "all"; or "SEED" or
"SEED:BASE", as CI has it: one row in 20, drawn by SEED (the commit), and one in 4 of those that differ from the record of
commit BASE, if that has one: a change of the main loop changes 2,000 rows, 50 minutes of a CPU.
"""

import collections
import hashlib
import json
import os
import re
import subprocess
import sys
from dataclasses import astuple, dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from benchmarks.simulator.sass import programs
from cuda_kernels.compile import Compiled, compile_kernel, nvrtc_version, source_hash

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "tests" / "golden" / "compiled.json"
WRITE = "GPU_RUNTIME_RECORD"  # a file to which `takes` appends its rows, instead of comparing them
RECOMPILE = "GPU_RUNTIME_RECOMPILE"
DRAWN, CHANGED = 20, 4  # with a seed, one row in DRAWN is compiled again; one in CHANGED of the rows that differ from BASE


@dataclass(frozen=True, slots=True)
class Taken:
    """A compiled variant's resources: `regs` per thread; bytes of static shared memory (`smem`); bytes of `spills` and local
    arrays; numbers of `instructions`, and among them of tensor core products (`mma`), 2:4 sparse ones (`mma_sp`), 16-byte
    `copies` to shared memory (LDGSTS) and loads of four `matrices` (LDSM).

    For kernels with asynchronous products (HGMMA) also: `bulk`, TMA's copies (UTMALDG, UBLKCP); `in_flight`, the number of
    groups of products that the shortest wait in a main loop leaves in flight, -1 without a wait; `serialized`, the number of
    C75xx lines, with which ptxas reports that it waits for each product.
    """

    regs: int
    smem: int
    spills: int
    instructions: int
    mma: int
    mma_sp: int
    copies: int
    matrices: int
    bulk: int = 0
    in_flight: int = -1
    serialized: int = 0

    @property
    def row(self) -> tuple[int, ...]:
        """The fields as the record has them: without the last three if these have their defaults."""
        return astuple(self)[: -3 if (self.bulk, self.in_flight, self.serialized) == (0, -1, 0) else None]


@lru_cache
def compiler() -> str:
    """Returns NVRTC's version with the patch number, from its package; without a package, major and minor version."""
    try:
        return version("nvidia-cuda-nvrtc")
    except PackageNotFoundError:
        return nvrtc_version()


@lru_cache
def record(base: str = "") -> dict:
    """Returns the committed record, as it is or as it was at commit `base` ({} if that commit has none)."""
    if not base:
        return json.loads(RECORD.read_text()) if RECORD.exists() else {}
    path = RECORD.relative_to(ROOT).as_posix()
    shown = subprocess.run(["git", "show", f"{base}:{path}"], cwd=ROOT, capture_output=True, text=True)
    return json.loads(shown.stdout) if shown.returncode == 0 else {}


def takes(kernel: str, values, sm: str) -> Taken:
    """Returns the resources of a variant. Raises AssertionError if it spills, waits for all its products, or differs from the
    record. `values`: the kernel's compile-time values; `sm`: the architecture.
    """
    key = ",".join(f"{name}={value}" for name, value in sorted(dict(values).items()))
    known = _row(record(), kernel, key, sm)
    fresh = known is not None and record()[compiler()][kernel]["source"] == source_hash(kernel)
    if known is not None and fresh and (WRITE in os.environ or not _again(kernel, key, sm, known)):
        found = known
    else:
        found = measured(compile_kernel(kernel, dict(values), sm))
    if path := os.environ.get(WRITE):
        with open(path, "a") as file:
            file.write(json.dumps([kernel, key, sm, found.row]) + "\n")
    assert found.spills == 0, f"{kernel} {key} for {sm}: {found.spills} bytes of spills and local arrays"
    assert found.serialized == 0, f"{kernel} {key} for {sm}: ptxas serialises asynchronous products (C75xx)"
    assert found.in_flight != 0, f"{kernel} {key} for {sm}: a main loop waits for all its products"
    if WRITE not in os.environ and compiler() in record():
        assert known is not None, f"{kernel} {key} for {sm} is not in {RECORD.name}: run `make compiled`"
        assert found == known or not fresh, f"{kernel} {key} for {sm}: {found}, in {RECORD.name} {known}: run `make compiled`"
    return found


def fits(c: Compiled) -> None:
    """Raises AssertionError if a kernel, in the record or not, spills registers or keeps arrays in local memory."""
    assert c.spill_bytes == 0 and c.local_bytes == 0, f"{c.kernel} {dict(c.values)} for {c.sm}: {c.log}"


def measured(c: Compiled) -> Taken:
    ops, in_flight = disassemble(c.cubin), [p.in_flight for p in programs(c.cubin).values()]

    def count(start: str, end: str) -> int:
        return sum(n for op, n in ops.items() if op.startswith(start) and op.endswith(end))

    return Taken(
        c.regs,
        c.static_smem,
        c.spill_bytes + c.local_bytes,
        sum(ops.values()),
        count("HMMA.16816", "") + count("HGMMA.64", "") + count("IMMA.16832", ""),
        count("HMMA.SP", "") + count("HGMMA.SP", "") + count("IMMA.SP", ""),
        count("LDGSTS", "128"),
        count("LDSM", ".4"),
        count("UTMALDG", "") + count("UBLKCP", ""),
        min((n for n in in_flight if n is not None), default=-1),
        len(re.findall(r"\(C75\d\d\)", c.log)),
    )


def disassemble(cubin: bytes) -> collections.Counter:
    """Returns mnemonic -> how often it occurs in the machine code."""
    return collections.Counter(i.opcode for p in programs(cubin).values() for i in p.instructions)


def _row(table: dict, kernel: str, key: str, sm: str) -> Taken | None:
    row = table.get(compiler(), {}).get(kernel, {}).get("variants", {}).get(key, {}).get(sm)
    return row and Taken(*row)


def _again(kernel: str, key: str, sm: str, known: Taken) -> bool:
    """Returns whether RECOMPILE demands that this row is compiled although the sources are the recorded ones."""
    wish = os.environ.get(RECOMPILE, "")
    if wish in ("", "all"):
        return wish == "all"
    seed, _, base = wish.partition(":")
    drawn = hashlib.sha256(f"{seed} {kernel} {key} {sm}".encode()).digest()
    then = record(base) if base else {}
    one_in = CHANGED if then and _row(then, kernel, key, sm) != known else DRAWN
    return int.from_bytes(drawn[:4], "big") % one_in == 0


def main() -> None:
    """Writes this compiler's record from the file to which `takes` appended; other compilers' rows stay unchanged."""
    rows: dict[str, dict[str, dict[str, list]]] = {}
    for line in Path(sys.argv[1]).read_text().splitlines():
        kernel, key, sm, taken = json.loads(line)
        rows.setdefault(kernel, {}).setdefault(key, {})[sm] = taken
    kernels = []
    for kernel, variants in sorted(rows.items()):
        lines = (f"   {json.dumps(key)}: {json.dumps(row, sort_keys=True)}" for key, row in sorted(variants.items()))
        head = f'  {json.dumps(kernel)}: {{"source": "{source_hash(kernel)}", "variants": {{\n'
        kernels.append(head + ",\n".join(lines) + "\n  }}")
    tables = {name: json.dumps(table) for name, table in record().items()}
    tables[compiler()] = "{\n" + ",\n".join(kernels) + "\n }"
    RECORD.write_text("{\n" + ",\n".join(f" {json.dumps(name)}: {table}" for name, table in sorted(tables.items())) + "\n}\n")
    print(f"{RECORD.name}: {sum(map(len, rows.values()))} variants of {len(rows)} kernels for NVRTC {compiler()}")


if __name__ == "__main__":
    main()
