"""Row `peers`: the layers of row `layers` by cuDNN, cuBLAS and cuSPARSELt beside our best tactics; clocks and watts of each.

    python -m benchmarks.experiments.peers --out FILE [--seconds 120] [LAYER ...]

Ours: the best tactic of each kind in compute_bound.json beside FILE, where it stands, else of predictions. cuDNN: the
convolution with bias and ReLU, and alone, channels last, `cudnn.benchmark`. cuBLAS: the product of the same sizes, its pixels
already gathered for each tap, in FP16 and in INT8 (sums of 32 bits). cuSPARSELt: the same product with pruned weights
(torch.sparse.to_sparse_semi_structured), in a process of its own (sparselt.py): FP16 once ended the process on an H100 PCIe, so
BF16 is tried after it. Samples alternate, medians of ROUNDS. Then SECOND s of replays of each, one after the other, while NVML
is asked for clock and power.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

from benchmarks.bench_conv import Clock, Cudnn
from benchmarks.experiments import layers
from benchmarks.experiments.layers import Contest, Entry
from benchmarks.experiments.run import Experiment, begun, interleaved
from benchmarks.experiments.sparselt import until
from benchmarks.torch_twin import prepared
from tactics.measure.child import Child, command_of
from tactics.measure.race import times_of
from tactics.tactic import Tactic

ROUNDS, SECOND, POLL_S = 11, 1.0, 0.05
ANSWER_S = 60.0  # the time limit in which cuSPARSELt's process starts, or answers
SPARSE_TYPES = ("float16", "bfloat16")  # the second where the first fails
LABELS = (*layers.KINDS, "cudnn", "cudnn plain", "cublas", "cublas INT8", "cusparselt")
# title -> (numerator, denominator) of a quotient of times; above 1 the denominator is faster
RATIOS = {
    "gain": ("dense", "2:4"),
    "cudnn/dense": ("cudnn", "dense"),
    "lt/2:4": ("cusparselt", "2:4"),
    "lt's gain": ("cublas", "cusparselt"),
    "cublas/INT8": ("cublas INT8", "INT8"),
}


class Contestant(NamedTuple):
    """One way to compute the layer. `sample`: returns microseconds of one run; `replay`: queues runs for about that many
    seconds, and returns when they have ended.
    """

    sample: Callable[[], float]
    replay: Callable[[float], None]
    facts: dict[str, Any]


def chosen(name: str, x: Experiment) -> dict[str, Entry]:
    """Returns kind -> our tactic of a layer."""
    path = x.out.with_name("compute_bound.json")
    rows = json.loads(path.read_bytes())["layers"] if path.exists() else []
    row: dict[str, Any] = next((row for row in rows if row["layer"] == name), {"tactics": []})
    found = {}
    for kind in layers.kinds(name):
        if best := layers.best_of(row, kind):
            found[kind] = Entry(layers.problem(name, kind), Tactic.parse(best["tactic"]))
        else:
            found[kind] = layers.entries(name, x.device, kind, 1)[0]
    return found


def ours(contest: Contest, entry: Entry) -> Contestant:
    error, ready, gpu = contest.add(entry), contest.ready[entry], contest.benches[entry.problem].gpu

    def replay(seconds: float) -> None:
        until(seconds, ready.timed, gpu.synchronize)

    return Contestant(lambda: contest.sample(entry)[0], replay, {"tactic": entry.tactic.name, "rel_error": error})


def of_torch(torch: Any, contest: Contest, entry: Entry, failed: dict[str, str]) -> dict[str, Contestant]:
    """Returns name -> contestant: two by cuDNN and two by cuBLAS, on the data of our dense tactic, under its stopwatch. Adds to
    `failed` why others cannot run.
    """
    bench, p = contest.benches[entry.problem], entry.problem
    stream = torch.cuda.ExternalStream(bench.gpu.stream.ptr)
    cudnn = Cudnn(torch, bench, p)
    pixels, k = p.n * p.p * p.q, p.r * p.s * p.c
    gathered = torch.randn(pixels, k, device="cuda", dtype=torch.float16)
    weights = torch.randn(k, p.k, device="cuda", dtype=torch.float16)
    product = torch.empty(pixels, p.k, device="cuda", dtype=torch.float16)

    whole = torch.randint(-64, 64, (pixels, k), device="cuda", dtype=torch.int8)
    whole_weights = torch.randint(-64, 64, (p.k, k), device="cuda", dtype=torch.int8).t()
    sums = torch.empty(pixels, p.k, device="cuda", dtype=torch.int32)

    def multiply(_: int) -> None:
        torch.matmul(gathered, weights, out=product)

    def multiply_whole(_: int) -> None:
        torch._int_mm(whole, whole_weights, out=sums)

    found = {}
    runs = {"cudnn": cudnn.fused, "cudnn plain": cudnn.plain, "cublas": multiply, "cublas INT8": multiply_whole}
    for label, run in runs.items():
        try:
            with torch.cuda.stream(stream):
                before, timed, count = cudnn.prepare(run, stream)
        except RuntimeError as e:
            failed[label] = str(e)[:500]
            continue

        def sample(before: Any = before, timed: Any = timed, count: int = count) -> float:
            with torch.cuda.stream(stream):
                return bench.stopwatch.sample(before, timed, count)[0]

        def replay(seconds: float, timed: Any = timed) -> None:
            with torch.cuda.stream(stream):
                until(seconds, timed, torch.cuda.synchronize)

        found[label] = Contestant(sample, replay, {})
    return found


class Sparselt:
    """The process of sparselt.py, which computes one product at a time. RuntimeError if it refuses, hangs or dies."""

    def __init__(self) -> None:
        self._child = Child(command_of("benchmarks.experiments.sparselt"))
        self.close = self._child.close

    def ask(self, **request: Any) -> dict[str, Any]:
        answer = {} if self._child.running else self._child.start(ANSWER_S)
        if "error" not in answer:
            answer = self._child.ask(request, ANSWER_S)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer

    def sample(self) -> float:
        return float(self.ask(op="sample")["us"])

    def replay(self, seconds: float) -> None:
        self.ask(op="replay", s=seconds)


def of_sparselt(rows: int, depth: int, columns: int, failed: dict[str, str]) -> tuple[Sparselt, Contestant] | None:
    """Returns cuSPARSELt's process and product [rows, depth] x [depth, columns] in the first type that works; adds to `failed`
    why the others do not.
    """
    for dtype in SPARSE_TYPES:
        child = Sparselt()
        try:
            facts = child.ask(op="product", rows=rows, depth=depth, columns=columns, dtype=dtype)
            child.sample()
            return child, Contestant(child.sample, child.replay, facts)
        except RuntimeError as e:
            failed[f"cusparselt {dtype}"] = str(e)[:500]
            child.close()
    return None


def watched(replay: Callable[[float], None], clock: Clock) -> dict[str, float]:
    """Returns the medians of clock and power while `replay` runs for SECOND: of the second half, when a power limit has had its
    effect.
    """
    from threading import Thread

    worker, seen, begin = Thread(target=replay, args=(SECOND,)), [], time.monotonic()
    worker.start()
    while worker.is_alive():
        watts, mhz = clock.watts(), clock.mhz()
        if time.monotonic() - begin > SECOND / 2 and watts and mhz:
            seen.append((watts[0], mhz))
        time.sleep(POLL_S)
    worker.join()
    if not seen:
        return {}
    return {"watts": round(statistics.median(w for w, _ in seen), 1), "mhz": statistics.median(m for _, m in seen)}


def measured(name: str, x: Experiment, torch: Any) -> None:
    row: dict[str, Any] = {"layer": name, "problem": str(layers.problem(name)), "failed": {}}
    x.data.setdefault("layers", []).append(row)
    contest = Contest(x.device)
    entries = chosen(name, x)
    contestants, dense, p = {kind: ours(contest, e) for kind, e in entries.items()}, entries["dense"], layers.problem(name)
    try:
        contestants |= of_torch(torch, contest, dense, row["failed"])
    except RuntimeError as e:
        row["failed"]["torch"] = str(e)[:500]
    found = of_sparselt(p.k, p.r * p.s * p.c, p.n * p.p * p.q, row["failed"])
    try:
        if found:
            contestants["cusparselt"] = found[1]
        samples = interleaved({label: of.sample for label, of in contestants.items()}, ROUNDS)
        clock = Clock(contest.benches[dense.problem].cupy.cuda.Device().pci_bus_id)
        for label, taken in samples.items():
            times = times_of(taken, 3)
            row[label] = contestants[label].facts | times | {"tflops": round(2e-6 * dense.problem.macs / times["us"], 1)}
            row[label] |= watched(contestants[label].replay, clock) if x.has_time(SECOND + 2) else {}
    finally:
        if found:
            found[0].close()
    print(next(table({"layers": [row]}, head=False)), flush=True)


def table(data: dict[str, Any], head: bool = True) -> Iterator[str]:
    """Yields a line of the result for each layer: microseconds, and RATIOS."""
    if head:
        yield f"{'layer':24} " + " ".join(f"{t:>11}" for t in (*LABELS, *RATIOS))
    for row in data.get("layers", ()):
        times = {label: row[label]["us"] for label in LABELS if label in row}
        ratios = (f"{times[a] / times[b]:11.2f}" if a in times and b in times else f"{'-':>11}" for a, b in RATIOS.values())
        cells = (f"{times[label]:11.1f}" if label in times else f"{'-':>11}" for label in LABELS)
        yield f"{row['layer']:24} " + " ".join([*cells, *ratios])


def main(argv: list[str] | None = None) -> int:
    x = begun(__doc__ or "", argv)
    torch, x.data["torch"] = prepared()
    for name in x.words or layers.shapes(x.small):
        x.step(name, partial(measured, name, x, torch), 8.0)
    return x.done()


if __name__ == "__main__":
    sys.exit(main())
