"""Rows `changed`, `untimed` and `ends-1`: tactics of kernels that have changed since a GPU timed them; tactics that predictions
prefer and that nobody has timed, beside the best timed ones of their kind; ends of ResNet-50's layers at batch 1.

    python -m benchmarks.experiments.changed --out FILE [--seconds 90] [--small] [untimed | ends-1]

A row has the hash of the sources that were timed; of older rows, timed.json beside a GPU's tactics.jsonl has it by kernel.
Medians of SAMPLES. `python -m benchmarks.our_times` reads the rows once they are in tactics.jsonl (`--merge FILE`).
"""

import json
import statistics
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import hardware, our_times
from benchmarks.experiments import right
from benchmarks.experiments.run import Experiment, begun
from benchmarks.hardware import NEWEST
from cuda_kernels import files
from cuda_kernels.device import Device, named
from tactics.candidates import candidates
from tactics.families.hopper import conv_wgmma
from tactics.measure.worker import Bench
from tactics.planner.grouping import grouped
from tactics.predict import predict_us
from tactics.problems import codec
from tactics.problems.epilogue import RELU
from tactics.problems.problem import ConvProblem, Problem
from tactics.tactic import Tactic, changed

LEDGER, SAMPLES = "timed.json", 5
FILES = ("tactics.jsonl", "tactics_before.jsonl")
Pair = tuple[Problem, Tactic]
# ResNet-50's layers at batch 1 with K that may be split: input channels, height and width, output channels, window, stride.
LONG_K = (
    (256, 14, 256, 3, 1),
    (512, 7, 512, 3, 1),
    (2048, 7, 512, 1, 1),
    (1024, 14, 256, 1, 1),
    (256, 28, 256, 3, 2),
    (512, 14, 512, 3, 2),
)


def stale(folder: Path) -> list[Pair]:
    """Returns the rows of a GPU's files whose kernels have changed since, and whose tactics are still candidates there."""
    path = folder / LEDGER
    ledger = json.loads(path.read_bytes()) if path.exists() else {}
    found: dict[Pair, None] = {}
    for file in (folder / name for name in FILES if (folder / name).exists()):
        for row in map(json.loads, file.read_text().splitlines()):
            tactic = Tactic.parse(row["tactic"])
            source = row.get("source") or ledger.get(tactic.kernel, [""])[0]
            if source != right.digest(tactic.kernel):
                found[codec.from_json(row["problem"]), tactic] = None
    return list(found)


def pairs(out: Path, device: Device, small: bool) -> list[Pair]:
    """Returns the problems and tactics to time: of the GPU that OUT names, else of the one with most rows, as far as the device
    offers them.
    """
    folder = out if (out / FILES[0]).exists() else our_times.RESULTS / NEWEST
    offered: dict[Problem, set[Tactic]] = {}
    found = []
    for problem, tactic in stale(folder):
        if problem not in offered:
            fp32 = any(f.dtype == "fp32" for f in (*tactic.ins, tactic.out))
            dtypes = tuple(f.dtype for f in (*tactic.ins, tactic.out)) if fp32 else ()
            offered[problem] = set(candidates(problem, device, dtypes))
        if tactic in offered[problem]:
            found.append((problem, tactic))
    return sorted(found, key=lambda pair: pair[0].macs)[:2] if small else found


def untimed(gpu: str, device: Device, small: bool) -> list[Pair]:
    """Returns each tactic that predictions prefer although no GPU has timed it, and the fastest timed tactic with the same
    formats and kind of weights.
    """
    best: dict[object, tuple[float, Tactic]] = {}
    for row in our_times.read(gpu):
        kind = row.problem, row.tactic.ins, row.tactic.out, row.tactic.sparse
        best[kind] = min(best.get(kind, (row.us, row.tactic)), (row.us, row.tactic), key=lambda of: of[0])
    found: list[Pair] = []
    for problem, tactic in our_times.untimed_preferred(gpu):
        found += [(problem, tactic), (problem, best[problem, tactic.ins, tactic.out, tactic.sparse][1])]
    return sorted(dict.fromkeys(found), key=lambda pair: pair[0].macs)[:2] if small else list(dict.fromkeys(found))


def ends_1(device: Device, small: bool) -> list[Pair]:
    """Returns, for each layer of LONG_K, the dense Hopper tactics with the best predictions: one that sums a split K in a
    cluster, the same tile with sums in memory, the best of all with sums in memory; and for a whole K the best tile stored by
    TMA and the same one stored by threads, as planes of 32 channels. [] if the device has no such kernel.
    """
    found: list[Pair] = []
    for c, size, k, r, stride in LONG_K[: 1 if small else None]:
        p = ConvProblem(1, c, size, size, k, r, r, stride=(stride, stride), pad=(r // 2,) * 4, epilogue=RELU)
        able = [t for t in candidates(p, device) if t.kernel == conv_wgmma.NAMES[0] and t.ins[0].layout == "hwc8"]
        able.sort(key=lambda t: (predict_us(p, t, device), t.name))
        last = [t for t in able if t.out.layout == "hwc8"]
        meeting = [t for t in last if t.gemm.cluster[2] > 1][:1]
        in_memory = [replace(t, tile=changed(t.gemm, cluster=(1, 1, 1), split=t.gemm.cluster[2])) for t in meeting]
        in_memory += [t for t in last if t.gemm.split > 1][:1]
        whole = [t for t in last if t.gemm == t.gemm.whole and t.gemm.cluster[2] == 1][:1]
        by_threads = [t for t in able if t.out.layout == "chw32" and t.gemm in [w.gemm for w in whole]]
        found += [(p, t) for t in dict.fromkeys((*meeting, *in_memory, *whole, *by_threads))]
    return found[:2] if small else found


def taken(problem: Problem, tactics: list[Tactic], x: Experiment, bench: Bench) -> None:
    bench.set_problem(problem)
    now = hardware.now("minutes")
    for tactic in tactics:
        us = statistics.median(bench.time([tactic], 3 if x.small else SAMPLES)["us"][tactic.name])
        row = {"problem": codec.to_json(problem), "tactic": tactic.name, "us": round(us, 3), "run": now}
        x.data.setdefault("rows", []).append(row | {"source": right.digest(tactic.kernel)})


def merge(file: Path) -> None:
    """Puts a result's rows into tactics.jsonl beside it, each in the place of the older one. Rows that were not reached keep
    the hash of the sources with which they were timed.
    """
    folder, new = file.parent, hardware.read(file)["rows"]
    path = folder / FILES[0]
    keys = {(json.dumps(row["problem"], sort_keys=True), row["tactic"]) for row in new}
    old = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    kept = [row for row in old if (json.dumps(row["problem"], sort_keys=True), row["tactic"]) not in keys]
    lines = "".join(f"{json.dumps(row, separators=(',', ':'))}\n" for row in (*kept, *new))
    files.write(path, lines.encode())


def table(data: dict[str, Any]) -> Iterator[str]:
    """Yields the lines of our_times about a result's rows."""
    rows = our_times.as_timed(data.get("rows", ()))
    predicted = {row: predict_us(row.problem, row.tactic, named(NEWEST)) for row in rows}
    if rows:
        yield from (*our_times.by_kernel(rows, predicted), our_times.chosen(rows, predicted))


def main(argv: list[str]) -> int:
    if argv[:1] == ["--merge"]:
        merge(Path(argv[1]))
        return 0
    x, bench = begun(__doc__ or "", argv), None
    if "ends-1" in x.words:
        wanted = ends_1(x.device, x.small)
    elif "untimed" in x.words:
        wanted = untimed(NEWEST, x.device, x.small)
    else:
        wanted = pairs(x.out.parent, x.device, x.small)
    for problem, tactics in grouped(wanted).items():
        bench = bench or Bench(x.device)
        x.step(str(problem), partial(taken, problem, tactics, x, bench), 3.0)
    print("\n".join(table(x.data)), flush=True)
    return x.done()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
