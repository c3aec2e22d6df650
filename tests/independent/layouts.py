"""Places of values as CuTe gives them: fragments of tensor-core instructions, ldmatrix, swizzles, Hopper's tiles, metadata.

    python -m tests.independent.layouts      computes layouts.jsonl anew from CUTLASS's headers (g++, half a minute)

layouts.cpp evaluates NVIDIA's own layouts on the host; its head describes the records. The table is committed, so the
comparison (tests/test_layouts.py) needs neither the headers nor a network. It holds numbers alone, no text of CUTLASS.
"""

import json
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path

import numpy as np

from tests.independent import packages

HERE = Path(__file__).parent
TABLE = HERE / "layouts.jsonl"
HEAD = {
    "source": packages.CUTLASS,
    "license": "computed with CUTLASS and CuTe, (c) NVIDIA CORPORATION & AFFILIATES, BSD-3-Clause",
    "command": "python -m tests.independent.layouts",
}


@lru_cache(maxsize=1)
def table() -> dict[str, dict]:
    """Returns name -> record; `at` is an array, for fragments [thread, value]."""
    found = {}
    for line in TABLE.read_text().splitlines()[1:]:
        record = json.loads(line)
        record["at"] = np.array(record["at"])
        if "threads" in record:
            record["at"] = record["at"].reshape(record["threads"], record["values"])
        found[record["name"]] = record
    return found


def places(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the row and the column of each (thread, value) of a fragment; for operand B the row is n, the column k."""
    record = table()[name]
    return record["at"] % record["rows"], record["at"] // record["rows"]


def compute() -> str:
    include = packages.toolkit() / "include"
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "layouts"
        paths = [f"-I{path}" for path in (packages.cutlass() / "include", include, include / "cccl")]
        subprocess.run(["g++", "-std=c++17", "-O0", "-w", *paths, str(HERE / "layouts.cpp"), "-o", str(program)], check=True)
        rows = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout
    records = (HEAD, *map(json.loads, rows.splitlines()))
    return "".join(json.dumps(record, separators=(",", ":")) + "\n" for record in records)


def main() -> None:
    if reason := packages.missing(packages.CUTLASS, *packages.TOOLKIT):
        raise SystemExit(reason)
    TABLE.write_text(compute())
    print(f"{TABLE}: {TABLE.stat().st_size} bytes")


if __name__ == "__main__":
    main()
