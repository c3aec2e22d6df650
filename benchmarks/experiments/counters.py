"""Row `counters`: Nsight Compute's counters of a tile with a long end, and of a long 2:4 loop.

    python -m benchmarks.experiments.counters --out FILE [--seconds 40] [--small] [TARGET ...]

ncu runs this module again with `--target NAME`, which launches the tactic that predictions put first, and reports all metrics
of SECTIONS of its last launch: stall reasons, throughput of L2 and DRAM. Clocks are left as they are.
"""

import csv
import io
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

from benchmarks.experiments import layers
from benchmarks.experiments.layers import Contest, Entry
from benchmarks.experiments.run import Experiment, begun
from benchmarks.processes import program
from cuda_kernels.device import Device, current
from tactics.candidates import candidates
from tactics.launches import Binary, binaries
from tactics.predict import predict_us
from tactics.problems.epilogue import Epilogue
from tactics.problems.pointwise_ops import Activation
from tactics.problems.problem import ConvProblem

SECTIONS = ("SpeedOfLight", "WarpStateStats", "MemoryWorkloadAnalysis", "SchedulerStats", "LaunchStats")
RUNS = 3  # launches of the kernel; the last one is counted
RESIDUAL = ConvProblem(32, 64, 56, 56, 256, 1, 1, epilogue=Epilogue(bias=True, residual=True, act=Activation("relu")))
LONG = "vgg 56x56 256"
STALL = re.compile(r"issue_stalled_(\w+?)_per_issue_active\.ratio$")
SHOWN = ("gpu__time_duration.sum", "sm__throughput", "lts__throughput", "dram__throughput")


def targets(device: Device, small: bool) -> dict[str, Entry]:
    """Returns name -> the entry to count: the end of a tile with a residual, and a long 2:4 loop."""
    end = RESIDUAL if not small else layers.problem("small 1x1")
    able = [t for t in candidates(end, device) if t.ins[0].layout == t.out.layout == "hwc8" and not t.sparse]
    first = min(able, key=lambda t: (predict_us(end, t, device), t.name))
    long = layers.entries(next(iter(layers.SMALL)) if small else LONG, device, "2:4", 1)[0]
    return {"64>256 residual": Entry(end, first), "long 2:4": long}


def kernels(device: Device, small: bool) -> list[Binary]:
    return list(dict.fromkeys(b for e in targets(device, small).values() for b in binaries(*e)))


def launch(name: str, small: bool) -> None:
    """Launches the target, for ncu to watch."""
    contest, entry = Contest(current()), targets(current(), small)[name]
    contest.add(entry)
    for _ in range(RUNS):
        contest.ready[entry].timed()
    contest.benches[entry.problem].gpu.synchronize()


def metrics(text: str, kernel: str) -> dict[str, float]:
    """Returns name -> number for the last launch of a kernel in ncu's CSV, whose rows are names, units, then one per launch.
    ValueError if there is no such launch.
    """
    start = text.find('"ID"')
    rows = list(csv.DictReader(io.StringIO(text[start:]))) if start >= 0 else []
    mine = [row for row in rows if kernel in (row.get("Kernel Name") or "")]
    if not mine:
        raise ValueError(f"ncu reported no launch of {kernel}: {text[-600:].strip()!r}")
    found = {}
    for name, value in mine[-1].items():
        try:
            found[name] = float((value or "").replace(",", ""))
        except (ValueError, AttributeError):  # a name, a unit
            continue
    return found


def counted(name: str, entry: Entry, x: Experiment) -> None:
    kernel = entry.tactic.kernel
    own = [sys.executable, "-m", "benchmarks.experiments.counters", "--target", name, *(["--small"] if x.small else [])]
    sections = [word for section in SECTIONS for word in ("--section", section)]
    how = "--clock-control none --cache-control none --csv --page raw --launch-count 2 --kernel-name".split()
    command = [program("ncu"), *how, kernel, *sections, *own]
    done = subprocess.run(command, capture_output=True, text=True, timeout=max(5.0, x.left))
    if done.returncode:
        raise RuntimeError(f"ncu ended with {done.returncode}: {(done.stdout + done.stderr)[-800:]}")
    found = metrics(done.stdout, kernel)
    x.data.setdefault("targets", {})[name] = {"tactic": entry.tactic.name, "metrics": found}
    print("\n".join(shown(name, found)), flush=True)


def shown(name: str, found: dict[str, float]) -> Iterator[str]:
    """Yields the throughputs, then the reasons why warps wait, the longest first, as cycles per issued instruction."""
    yield f"{name}: " + ", ".join(f"{k} {v:g}" for k, v in found.items() if k.startswith(SHOWN))
    stalls = {m[1]: v for k, v in found.items() if (m := STALL.search(k)) and not m[1].endswith("not_issued")}
    waits = sorted(stalls.items(), key=lambda item: -item[1])[:8]
    yield "  waits: " + ", ".join(f"{reason} {cycles:.2f}" for reason, cycles in waits)


def table(data: dict[str, Any]) -> Iterator[str]:
    for name, of in data.get("targets", {}).items():
        yield from shown(f"{name} ({of['tactic']})", of["metrics"])


def main(argv: list[str]) -> int:
    if argv[:1] == ["--target"]:
        launch(argv[1], "--small" in argv)
        return 0
    x = begun(__doc__ or "", argv)
    for name, entry in targets(x.device, x.small).items():
        if not x.words or name in x.words:
            x.step(name, partial(counted, name, entry, x), 10.0)
    return x.done()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
