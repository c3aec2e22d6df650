"""Times of our tactics that a GPU took, beside their predictions: benchmarks/results/GPU/tactics.jsonl.

    python -m benchmarks.our_times [h200]
    python -m benchmarks.our_times [h200] --untimed    all tactics that are preferred and were never timed
    python -m benchmarks.our_times h200 --take 300     on that GPU: all rows again, as far as 300 seconds reach
    python -m benchmarks.our_times FILE --take 300     the same for the rows of a file; those beyond the time are left out

Each line is a problem (tactics.problems.codec), a tactic, its median in microseconds, and the run that took it. `ratio`: the
median of measured over predicted; `error`: the mean absolute value of its logarithm. `chosen`: the time of the tactic that
predictions choose over the best one timed, the geometric mean over problems; `weighted`: the quotient of the sums over the
layers, at batch 32, whose problems have several timed tactics. Prices are fitted to the half of the problems that `fits` names,
and judged by the other one; a problem and the same with 2:4 weights are in one half. Then the errors of layers.jsonl: layers in
networks, without the ones that are predicted to take less than half of the time of the events around them, and the sums of
plans at batch 1. Last, tactics that are preferred among all candidates and were never timed: only good guesses were, so prices
are blind there.

Ends of Hopper tiles by TMA, and 2:4 loops whose loads of weights are ahead of copies, were never timed: older rows stand beside
the prices of the ends and loops that they had, so the fit can still be checked. Today's prices decide which tactic is
preferred.
"""

import hashlib
import json
import math
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from benchmarks.hardware import now
from cuda_kernels import files
from cuda_kernels.device import Device, named
from tactics.candidates import candidates
from tactics.families.hopper import conv_wgmma, ends
from tactics.families.hopper.figures import Figures
from tactics.families.hopper.tiles import HopperTile, Stage, stage, weight_bytes
from tactics.planner.grouping import grouped
from tactics.predict import predict_alike, predict_us
from tactics.problems import codec
from tactics.problems.protocol import Problem
from tactics.tactic import Tactic

RESULTS = Path(__file__).parent / "results"
EVENTS_US = 4.1  # the time of two events around a layer: the layer's time between them less its share of the graph
LEAST_US, LEAST_PREDICTED_US = 0.3, 2.0
TILED = ("conv_dense", "conv_dense_sm90", "conv_sparse24", "conv_sparse24_sm90")
WEIGHTED = ("resnet50:32", "tv_convnext_tiny:32", "tv_efficientnet_b0:32")
CHANGED = ("conv_fp32", "gather", "reduce")  # kernels whose sources have changed since layers were timed
SHOWN = 3  # the most tactics to list that were never timed
TMA_SINCE = "2026-11-28"  # runs from this date on have ends by TMA, and loads of weights ahead of copies
# Clocks of loads of 2:4 weights in batches of two stages, under load; and of strips' loads behind a stage's products, which
# waited for copies of the stage just freed.
LOADED_CLK, STRIP_LOADED_CLK = 620, 150
HALVES = {"judging half": False, "fitting half": True, "whole": None}


class Timed(NamedTuple):
    problem: Problem
    tactic: Tactic
    us: float
    run: int | str


def is_kept(gpu: str) -> bool:
    """Whether the argument is a GPU whose results are kept; else it is a file of rows."""
    return (RESULTS / gpu).is_dir()


def file_of(gpu: str) -> Path:
    return RESULTS / gpu / "tactics.jsonl" if is_kept(gpu) else Path(gpu)


def read(gpu: str) -> list[Timed]:
    return as_timed(map(json.loads, file_of(gpu).read_text().splitlines()))


def as_timed(rows: Iterable[Mapping[str, Any]]) -> list[Timed]:
    return [Timed(codec.from_json(r["problem"]), Tactic.parse(r["tactic"]), r["us"], r["run"]) for r in rows]


@lru_cache(maxsize=65536)
def loop_as_timed(tile: HopperTile, figures: Figures, l2: float) -> Stage:
    """Returns the clocks of a stage as loops were when they were timed: 2:4 weights came behind the copies of the next stage,
    and were loaded for each tile.
    """
    at = stage(tile, figures, l2)
    waited = STRIP_LOADED_CLK + at.tensor if tile.box else LOADED_CLK / 2
    return replace(at, latency=weight_bytes(tile.m, True) / l2 + waited) if tile.sparse else at


@contextmanager
def tiles_as_timed() -> Iterator[None]:
    """In the block, Hopper tiles have the prices of their timed form: threads store without stmatrix, products include zeros,
    2:4 loops load weights behind copies.
    """
    loops: dict[str, Any] = {"k_steps": lambda *_: conv_wgmma.K_STAGE // 16, "stage": loop_as_timed}
    with ExitStack() as after:
        for cached in (conv_wgmma._limits, predict_alike):
            cached.cache_clear()
            after.callback(cached.cache_clear)
        after.enter_context(mock.patch.multiple(ends, stored_by_tma=lambda *_: False, BY_STMATRIX=1.0))
        after.enter_context(mock.patch.multiple(conv_wgmma, **loops))
        yield


def predictions(rows: list[Timed], device: Device) -> dict[Timed, float]:
    """Returns row -> predicted microseconds, with the ends and loops with which it was timed."""
    found = {row: 0.0 if is_before_tma(row) else predict_us(row.problem, row.tactic, device) for row in rows}
    with tiles_as_timed():
        return found | {row: predict_us(row.problem, row.tactic, device) for row in rows if is_before_tma(row)}


def is_before_tma(row: Timed) -> bool:
    """Whether a row's run is older than ends by TMA; runs are named by numbers or dates."""
    return isinstance(row.run, int) or row.run < TMA_SINCE


def by_kernel(rows: list[Timed], predicted: Mapping[Timed, float]) -> Iterator[str]:
    logs = grouped((row.tactic.kernel, math.log(row.us / predicted[row])) for row in rows)
    yield f"{'kernel':22} {'tactics':>7} {'ratio':>6} {'error':>6}"
    for kernel, of in sorted(logs.items()):
        yield f"{kernel:22} {len(of):7} {math.exp(statistics.median(of)):6.2f} {statistics.mean(map(abs, of)):6.2f}"


def fits(problem: Problem) -> bool:
    """Whether prices are fitted to the problem; else it judges them. A hash of its JSON decides, the same with and without 2:4
    weights.
    """
    data = {key: value for key, value in codec.to_json(problem).items() if key != "sparse24"}
    return hashlib.sha256(json.dumps(data, sort_keys=True, separators=(",", ":")).encode()).digest()[0] % 2 == 0


def half(rows: list[Timed], which: bool | None) -> list[Timed]:
    return [row for row in rows if which is None or fits(row.problem) == which]


def choices(rows: list[Timed], predicted: Mapping[Timed, float]) -> dict[Problem, tuple[float, float]]:
    """Returns problem -> (microseconds of the tactic that predictions choose, microseconds of the fastest), for problems with
    several timed tactics.
    """
    problems = grouped((row.problem, row) for row in rows)
    several = {problem: of for problem, of in problems.items() if len({row.tactic for row in of}) > 1}
    return {p: (min(of, key=predicted.__getitem__).us, min(row.us for row in of)) for p, of in several.items()}


def cost(rows: list[Timed], predicted: Mapping[Timed, float]) -> float:
    """Returns the geometric mean over problems of the chosen tactic's time over the fastest one's."""
    return math.exp(statistics.mean(math.log(us / best) for us, best in choices(rows, predicted).values()))


def chosen(rows: list[Timed], predicted: Mapping[Timed, float]) -> str:
    found = choices(rows, predicted).values()
    if not found:
        return "one tactic of each problem: none to choose from"
    worst = f"over {len(found)} problems; at worst {max(us / best for us, best in found):.2f}"
    return f"chosen by predictions: {cost(rows, predicted):.3f} of the best timed, {worst}"


class Layer(NamedTuple):
    network: str
    problem: Problem
    tactic: Tactic
    us: float
    alike: int  # the number of layers of the network


def layers(gpu: str) -> list[Layer]:
    """Returns the timed layers of networks, without the time of the events around them; of ResNet-50 the layers of a dense and
    of a 2:4 plan.
    """
    lines = map(json.loads, (RESULTS / gpu / "layers.jsonl").read_text().splitlines())
    return [
        Layer(r["network"], codec.from_json(r["problem"]), Tactic.parse(r["tactic"]), r["us"] - EVENTS_US, r["layers"])
        for r in lines
    ]


def weighted(rows: list[Timed], predicted: Mapping[Timed, float], of: list[Layer]) -> dict[str, tuple[float, float]]:
    """Returns name -> (microseconds with the tactics that predictions choose, microseconds with the fastest timed), summed over
    the layers of each of WEIGHTED, and of all.
    """
    found, sums = choices(rows, predicted), {name: (0.0, 0.0) for name in (*WEIGHTED, "together")}
    for layer in of:
        if layer.network in WEIGHTED and layer.problem in found:
            us, best = found[layer.problem]
            for name in (layer.network, "together"):
                sums[name] = sums[name][0] + layer.alike * us, sums[name][1] + layer.alike * best
    return {name: (us, best) for name, (us, best) in sums.items() if best}


def by_halves(rows: list[Timed], predicted: Mapping[Timed, float], of: list[Layer]) -> Iterator[str]:
    for name, which in HALVES.items():
        some = half(rows, which)
        yield f"{name + ':':14}{chosen(some, predicted)}"
        sums = weighted(some, predicted, of)
        yield " " * 14 + "weighted: " + ", ".join(f"{n.partition(':')[0]} {us / best:.3f}" for n, (us, best) in sums.items())


def at_batch_1(of: list[Layer], device: Device) -> dict[str, tuple[float, float]]:
    """Returns network -> (predicted, measured) sum of its layers at batch 1, without the kernels of CHANGED."""
    sums: dict[str, tuple[float, float]] = {}
    with tiles_as_timed():
        for layer in of:
            if layer.network.endswith(":1") and layer.tactic.kernel not in CHANGED:
                guess, us = sums.get(layer.network, (0.0, 0.0))
                more = layer.alike * predict_us(layer.problem, layer.tactic, device), layer.alike * layer.us
                sums[layer.network] = guess + more[0], us + more[1]
    return sums


def untimed_preferred(gpu: str = "h200") -> list[tuple[Problem, Tactic]]:
    """Returns (problem, tactic) for each tactic that was never timed and that predictions prefer to all candidates with the
    formats, and the kind of weights, of some timed tactic.
    """
    device, found = named(gpu), []
    for problem, those in grouped((row.problem, row.tactic) for row in read(gpu)).items():
        best: dict[object, tuple[float, str, Tactic]] = {}
        kinds = {(t.ins, t.out, t.sparse) for t in those}
        for t in candidates(problem, device):
            kind = t.ins, t.out, t.sparse
            if kind in kinds:
                rated = predict_us(problem, t, device), t.name, t
                best[kind] = min(best.get(kind, rated), rated, key=lambda r: r[:2])
        found += [(problem, t) for _, _, t in best.values() if t not in those]
    return found


def in_networks(gpu: str, alone: list[Timed], device: Device) -> Iterator[str]:
    """Yields lines on the times of layers in networks (layers.jsonl), beside predictions and beside the same tactics by
    themselves.
    """
    found = {(layer.problem, layer.tactic): layer.us for layer in layers(gpu)}
    rows = [Timed(problem, tactic, max(us, LEAST_US), "") for (problem, tactic), us in found.items()]
    predicted = predictions(rows, device)
    yield from by_kernel([row for row in rows if predicted[row] >= LEAST_PREDICTED_US], predicted)
    times = {row[:2]: row.us for row in alone}
    both = sorted((row.us / times[row[:2]] for row in rows if row[:2] in times and row.tactic.kernel in TILED), key=float)
    middle = f"{both[len(both) // 10]:.2f} to {both[-1 - len(both) // 10]:.2f}"
    median = f"{statistics.median(both):.2f}"
    yield f"in networks over alone: median {median} of {len(both)} tensor-core tactics, 80 % of them {middle}"


def take(gpu: str, seconds: float) -> None:
    """Times the rows again, medians of 5, and writes them. Rows beyond the time stay, rows that fail are left out and
    reported.
    """
    from cuda_kernels.device import current
    from tactics.measure.worker import Bench

    begun, bench, rows, run = time.monotonic(), Bench(current()), [], now("minutes")
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
        except RuntimeError as e:  # the output is wrong, or the kernel is no longer offered
            print(f"{row.problem}: {row.tactic.name}: {e}", file=sys.stderr)
        if i % 100 == 99 and not is_kept(gpu):  # timed rows are written, however the run ends
            keep(gpu, rows)
    keep(gpu, rows)


def keep(gpu: str, rows: list[Timed]) -> None:
    lines = [{"problem": codec.to_json(r.problem), "tactic": r.tactic.name, "us": round(r.us, 3), "run": r.run} for r in rows]
    files.write(file_of(gpu), "".join(f"{json.dumps(r, separators=(',', ':'))}\n" for r in lines).encode())


def main(argv: list[str]) -> None:
    gpu = argv[0] if argv and not argv[0].startswith("--") else "h200"
    if "--take" in argv:
        take(gpu, float(argv[argv.index("--take") + 1]))
    device, rows = named(gpu if is_kept(gpu) else "h200"), read(gpu)
    predicted = predictions(rows, device)
    print("\n".join(by_kernel(rows, predicted)))
    if not is_kept(gpu) or not (RESULTS / gpu / "layers.jsonl").exists():
        print(chosen(rows, predicted))
        return
    of = layers(gpu)
    print("\n".join(by_halves(rows, predicted, of)))
    print("\n" + "\n".join(in_networks(gpu, rows, device)))
    print(f"\nlayers at batch 1, predicted over measured (without {', '.join(CHANGED)}, whose source has changed since):")
    for network, (guess, us) in at_batch_1(of, device).items():
        print(f"{network.removesuffix(':1'):22} {guess:6.1f} of {us:6.1f} us, {guess / us:.2f}")
    found = untimed_preferred(gpu)
    print(
        f"\n{len(found)} tactics are preferred and were never timed" + (":" if "--untimed" in argv else f", {SHOWN} of them:")
    )
    for problem, tactic in found if "--untimed" in argv else found[:SHOWN]:
        print(f"{tactic.name}, {type(problem).__name__} of {'x'.join(map(str, problem.in_shapes[0]))}")


if __name__ == "__main__":
    main(sys.argv[1:])
