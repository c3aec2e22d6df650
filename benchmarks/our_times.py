"""Times of our tactics that a GPU took, beside their predictions: benchmarks/results/GPU/tactics.jsonl.

    python -m benchmarks.our_times [h200]
    python -m benchmarks.our_times h200 --take 300     on that GPU: all rows again, as far as 300 seconds reach
    python -m benchmarks.our_times FILE --take 300     the same for the rows of a file; those beyond the time are left out

Each line is a problem (tactics.problems.codec), a tactic, its median in microseconds, and the run that took it. `ratio`: the
median of measured over predicted; `error`: the mean absolute value of its logarithm. `chosen`: what the tactic that predictions
take costs over the best one timed, the geometric mean over problems. Then the same of layers.jsonl: layers in networks, those
aside that are predicted to take less than half of what the events around them do.
"""

import json
import math
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from cuda_kernels import files
from cuda_kernels.device import Device, named
from tactics.predict import predict_us
from tactics.problems import codec
from tactics.problems.protocol import Problem
from tactics.tactic import Tactic

RESULTS = Path(__file__).parent / "results"
EVENTS_US = 4.1  # what two events around a layer take: its time between them less its share of the graph
LEAST_US, LEAST_PREDICTED_US = 0.3, 2.0
TILED = ("conv_dense", "conv_dense_sm90", "conv_sparse24", "conv_sparse24_sm90")


class Timed(NamedTuple):
    problem: Problem
    tactic: Tactic
    us: float
    run: int | str


def is_kept(gpu: str) -> bool:
    """Whether it is a GPU whose results are kept; else it is a file of rows."""
    return (RESULTS / gpu).is_dir()


def file_of(gpu: str) -> Path:
    return RESULTS / gpu / "tactics.jsonl" if is_kept(gpu) else Path(gpu)


def read(gpu: str) -> list[Timed]:
    lines = file_of(gpu).read_text().splitlines()
    rows = map(json.loads, lines)
    return [Timed(codec.from_json(r["problem"]), Tactic.parse(r["tactic"]), r["us"], r["run"]) for r in rows]


def by_kernel(rows: list[Timed], predicted: Mapping[Timed, float]) -> Iterator[str]:
    logs: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        logs[row.tactic.kernel].append(math.log(row.us / predicted[row]))
    yield f"{'kernel':22} {'tactics':>7} {'ratio':>6} {'error':>6}"
    for kernel, of in sorted(logs.items()):
        yield f"{kernel:22} {len(of):7} {math.exp(statistics.median(of)):6.2f} {statistics.mean(map(abs, of)):6.2f}"


def chosen(rows: list[Timed], predicted: Mapping[Timed, float]) -> str:
    problems: dict[Problem, list[Timed]] = defaultdict(list)
    for row in rows:
        problems[row.problem].append(row)
    losses = [
        min(of, key=predicted.__getitem__).us / min(row.us for row in of)
        for of in problems.values()
        if len({r.tactic for r in of}) > 1
    ]
    if not losses:
        return "one tactic of each problem: none to choose from"
    mean = math.exp(statistics.mean(map(math.log, losses)))
    return f"chosen by predictions: {mean:.3f} of the best timed, over {len(losses)} problems; at worst {max(losses):.2f}"


def in_networks(gpu: str, alone: list[Timed], device: Device) -> Iterator[str]:
    """Of layers.jsonl, the times of layers in networks: beside predictions, and beside the same tactics alone."""
    lines = (RESULTS / gpu / "layers.jsonl").read_text().splitlines()
    found = {(codec.from_json(r["problem"]), Tactic.parse(r["tactic"])): r["us"] - EVENTS_US for r in map(json.loads, lines)}
    rows = [Timed(problem, tactic, max(us, LEAST_US), "") for (problem, tactic), us in found.items()]
    predicted = {row: predict_us(row.problem, row.tactic, device) for row in rows}
    yield from by_kernel([row for row in rows if predicted[row] >= LEAST_PREDICTED_US], predicted)
    times = {row[:2]: row.us for row in alone}
    both = sorted((row.us / times[row[:2]] for row in rows if row[:2] in times and row.tactic.kernel in TILED), key=float)
    middle = f"{both[len(both) // 10]:.2f} to {both[-1 - len(both) // 10]:.2f}"
    median = f"{statistics.median(both):.2f}"
    yield f"in networks over alone: median {median} of {len(both)} tensor-core tactics, 80 % of them {middle}"


def take(gpu: str, seconds: float) -> None:
    """Time the rows again, medians of 5, and write them; those beyond the time stay, those that fail are left out and told."""
    from cuda_kernels.device import current
    from tactics.measure.worker import Bench

    begun, bench, rows, run = time.monotonic(), Bench(current()), [], datetime.now(UTC).isoformat(timespec="minutes")
    problem: Problem | None = None
    for i, row in enumerate(read(gpu)):
        if time.monotonic() - begun > seconds:
            rows += [row] if is_kept(gpu) else []
            continue
        if row.problem != problem:
            problem = row.problem
            bench.set_problem(problem)
        try:
            us = statistics.median(bench.time([row.tactic], 5)["us"][row.tactic.name])
            rows.append(row._replace(us=us, run=run))
        except RuntimeError as e:  # a wrong output, or a kernel that is no longer offered
            print(f"{row.problem}: {row.tactic.name}: {e}", file=sys.stderr)
        if i % 100 == 99 and not is_kept(gpu):  # what was timed stays, however the run ends
            keep(gpu, rows)
    keep(gpu, rows)


def keep(gpu: str, rows: list[Timed]) -> None:
    lines = [{"problem": codec.to_json(r.problem), "tactic": r.tactic.name, "us": round(r.us, 3), "run": r.run} for r in rows]
    files.write(file_of(gpu), "".join(f"{json.dumps(r, separators=(',', ':'))}\n" for r in lines).encode())


def main(argv: list[str]) -> None:
    gpu = argv[0] if argv else "h200"
    if "--take" in argv:
        take(gpu, float(argv[argv.index("--take") + 1]))
    device, rows = named(gpu if is_kept(gpu) else "h200"), read(gpu)
    predicted = {row: predict_us(row.problem, row.tactic, device) for row in rows}
    print("\n".join(by_kernel(rows, predicted)))
    print(chosen(rows, predicted))
    if (RESULTS / gpu / "layers.jsonl").exists():
        print("\n" + "\n".join(in_networks(gpu, rows, device)))


if __name__ == "__main__":
    main(sys.argv[1:])
