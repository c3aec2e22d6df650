"""Rows `tests` and `sanitizer`: pytest over the gpu marker, by several processes where pytest-xdist is installed.

    python -m benchmarks.experiments.hardware_tests --out FILE [--seconds 160] [--small] [sanitizer]

The end of its output goes into the file. Where all passed, the kernels of now are right: kernels.json (right.py) learns it.
"""

import importlib.util
import os
import sys
import time
from typing import Any

from benchmarks.experiments import right
from benchmarks.experiments.run import PARTLY, begun
from benchmarks.processes import run
from tactics.kernels import KERNELS

ALONE = "tests/driver/test_driver_sharing.py"  # asks how much of the GPU's memory is in use, whoever holds it
ON_GPU = "tests/driver/test_gpu.py"
SMALL_TESTS = "naive_kernel and (residual_after or tail) or recorded_graph"


def main(argv: list[str] | None = None) -> int:
    x = begun(__doc__ or "", argv)
    sanitizer = "sanitizer" in x.words
    files = ON_GPU if x.small or sanitizer else "tests"
    expression = "sanitizer" if sanitizer else SMALL_TESTS if x.small else "not sanitizer"
    options = ["-m", "gpu", "-k", expression, "-rs", "--tb=short", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
    command = [sys.executable, "-m", "pytest", *options, "--durations=8"]
    parallel = importlib.util.find_spec("xdist") is not None and files == "tests"
    runs = [[files, "-n", str(min(12, os.cpu_count() or 1)), f"--ignore={ALONE}"], [ALONE]] if parallel else [[files]]
    started, done = time.monotonic(), []
    for arguments in runs:
        done.append(run([*command, *arguments], max(1.0, x.left - 2.0)))
    text = "".join(text for _, text in done)
    code = next((code for code, _ in done if code != 0), 0)
    lines = [[row for row in text.splitlines() if row.strip()][-1:] or [""] for _, text in done]
    data: dict[str, Any] = {"returncode": code, "timed_out": code is None, "output_tail": text[-20000:]}
    x.data |= data | {"last_line": "; ".join(line[0] for line in lines), "seconds": round(time.monotonic() - started, 1)}
    x.save()
    print(text[-2500:] if code else x.data["last_line"], flush=True)
    if code == 0 and not x.small and not sanitizer:
        right.learn(x.out.with_name(right.LEDGER), dict.fromkeys(KERNELS, 0))
    return PARTLY if code is None else code


if __name__ == "__main__":
    sys.exit(main())
