"""A record for the NVRTC of another CUDA version: the rows of tests/compiled.py, with the numbers in that compiler's log.

tests/golden/compiled_cuda12.json: {version of NVRTC: {kernel: {"source": hash of its sources, "variants": {"NAME=VALUE,...":
{architecture: [registers, bytes of static shared memory, bytes of spills and local arrays]}}}}}. Machine code is not
disassembled: only the other compiler's record counts its instructions. Run by the Python of an environment with that NVRTC,
which needs nothing but this package:

    python -m tests.other_nvrtc write [SECONDS]    adds rows that the record lacks, or has of other sources
    python -m tests.other_nvrtc check SEED NUMBER  compiles NUMBER rows: without spills, and as recorded; of variants that have
                                                   none on record first, then as SEED draws them

`write` begins with one row of each variant, the architecture drawn, so that every kernel and tile comes first.
"""

import hashlib
import json
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from itertools import islice
from pathlib import Path

from cuda_kernels.compile import compile_anew, nvrtc_version, source_hash

FOLDER = Path(__file__).parent / "golden"
FIRST, OTHER = FOLDER / "compiled.json", FOLDER / "compiled_cuda12.json"
Row = tuple[str, str, str]  # kernel, "NAME=VALUE,...", architecture


def compiler() -> str:
    """Returns NVRTC's version with the patch number."""
    package = "nvidia-cuda-nvrtc-cu12" if nvrtc_version().startswith("12.") else "nvidia-cuda-nvrtc"
    return version(package)


def rows(seed: str) -> Iterator[Row]:
    """Yields every row of compiled.py's record in an order drawn by `seed`: first one row of each variant, then the others."""

    def drawn(row: Row) -> bytes:
        return hashlib.sha256(" ".join((seed, *row)).encode()).digest()

    kernels = next(iter(json.loads(FIRST.read_text()).values()))
    variants = [
        sorted(((kernel, key, sm) for sm in found), key=drawn)
        for kernel, table in kernels.items()
        for key, found in table["variants"].items()
    ]
    yield from sorted((first for first, *_ in variants), key=drawn)
    yield from sorted((row for _, *others in variants for row in others), key=drawn)


def taken(row: Row) -> list[int]:
    """Compiles a row now; returns [registers, bytes of static shared memory, bytes of spills and local arrays]."""
    kernel, key, sm = row
    found = compile_anew(kernel, dict(item.split("=", 1) for item in key.split(",") if item), sm)
    return [found.regs, found.static_smem, found.spill_bytes + found.local_bytes]


def recorded(record: dict, row: Row) -> list[int] | None:
    """Returns the recorded numbers of a row; None if there are none for the present sources."""
    kernel, key, sm = row
    table = record.get(compiler(), {}).get(kernel, {"source": "", "variants": {}})
    return table["variants"].get(key, {}).get(sm) if table["source"] == source_hash(kernel) else None


def write(limit_s: float) -> None:
    """Compiles rows that the record lacks for `limit_s` seconds, and writes the record."""
    record = json.loads(OTHER.read_text()) if OTHER.exists() else {}
    kernels, start, new = record.setdefault(compiler(), {}), time.monotonic(), 0
    for row in rows("record"):
        if time.monotonic() - start > limit_s:
            break
        if recorded(record, row) is not None:
            continue
        kernel, key, sm = row
        source, found = source_hash(kernel), taken(row)
        if kernels.get(kernel, {}).get("source") != source:
            kernels[kernel] = {"source": source, "variants": {}}
        kernels[kernel]["variants"].setdefault(key, {})[sm] = found
        new += 1
        if found[2]:
            print(f"{kernel} {key} for {sm}: {found[2]} bytes of spills and local arrays", flush=True)
    versions = []
    for name, table in sorted(record.items()):
        entries = []
        for kernel, about in sorted(table.items()):
            lines = (f'   "{key}": {json.dumps(row, sort_keys=True)}' for key, row in sorted(about["variants"].items()))
            entries.append(f'  "{kernel}": {{"source": "{about["source"]}", "variants": {{\n' + ",\n".join(lines) + "\n  }}")
        versions.append(f' "{name}": {{\n' + ",\n".join(entries) + "\n }")
    OTHER.write_text("{\n" + ",\n".join(versions) + "\n}\n")
    print(f"{OTHER.name}: {new} rows more of NVRTC {compiler()}, {time.process_time():.0f} CPU seconds")


def check(seed: str, number: int) -> int:
    """Compiles `number` rows, prints those that spill or differ from the record, and returns how many these are."""
    record, wrong, known = json.loads(OTHER.read_text()), 0, 0
    tables = record.get(compiler(), {})
    fresh = {kernel: table for kernel, table in tables.items() if table["source"] == source_hash(kernel)}
    seen = {(kernel, key) for kernel, table in fresh.items() for key in table["variants"]}
    for row in islice(sorted(rows(seed), key=lambda row: row[:2] in seen), number):
        found, expected = taken(row), recorded(record, row)
        known += expected is not None
        if found[2] or expected not in (None, found):
            wrong += 1
            print(f"{' '.join(row)}: {found}, expected {expected or 'no spills'}")
    print(f"{number} rows with NVRTC {compiler()}, {known} of them on record, {wrong} are not as they should be")
    return wrong


if __name__ == "__main__":
    if sys.argv[1] == "write":
        write(float(sys.argv[2]) if len(sys.argv) > 2 else float("inf"))
    else:
        sys.exit(check(sys.argv[2], int(sys.argv[3])) > 0)
