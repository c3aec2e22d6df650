"""The planner beside its rivals: time to plan and the plan's time, on every network at hand.

    python -m benchmarks.bench_planner [--device h200] [--limit 20] NAME[:shape] ...

Rivals: each layer's fastest for itself (greedy), one format everywhere, and the same question written down plainly for HiGHS
(a binary per entry, per format made and per reformat), which gets `--limit` seconds. The times that plans are made of are
predicted; how long planning takes is measured on this machine as CPU time of its one thread, the best of ten runs (what else
runs there adds to it), tables not included.
"""

import json
import math
import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import click
import numpy as np

from benchmarks import light
from benchmarks.bench_plan import MODELS, find
from benchmarks.networks import NETWORKS
from cuda_kernels.device import named
from gpu_runtime.errors import ModelError
from gpu_runtime.frontend import importer
from gpu_runtime.fusion import fuse
from gpu_runtime.lowering import lower
from gpu_runtime.planning import counterfactuals, io_formats, tables
from gpu_runtime.planning.alternatives import alternatives
from tactics.format import Key
from tactics.measure import timing
from tactics.planner import plan
from tactics.planner.graph import MAX_FORMATS, NEVER, Graph, cells_of, formats_of, tensors_of, to_us

RUNS = 10


def plain_highs(graph: Graph, seconds: float) -> tuple[float | None, float, bool]:
    """Solves the plainly written question; returns (microseconds of the plan found or None, seconds it took, whether HiGHS
    calls it optimal).
    """
    cost: list[float] = []
    rows: list[tuple[Mapping[int, int], float, float]] = []  # ({column: coefficient}, low, high)

    def column(us: float = 0.0) -> int:
        cost.append(us)
        return len(cost) - 1

    option = {(g, o): column() for g, names in graph.groups for o in names}
    rows += [({option[g, o]: 1 for o in names}, 1, 1) for g, names in graph.groups]
    makes: dict[tuple[str, Key], list[int]] = {}  # (tensor, format) -> columns of entries
    reads: dict[tuple[int, int, Key], list[int]] = {}  # (choice, position, format) -> columns of entries
    for i, c in enumerate(graph.choices):
        there = column()
        groups = dict.fromkeys(g for g, _ in c.when)
        for g in groups:
            rows.append(({there: 1} | {option[h, o]: -1 for h, o in c.when if h == g}, -math.inf, 0))
        rows.append(({there: -1} | {option[h, o]: 1 for h, o in c.when}, -math.inf, len(groups) - 1))
        entries = {}
        for (ins, out), e in cells_of(graph, c).items():
            y = column(to_us(e.time_ps))
            entries[y] = 1
            makes.setdefault((c.output, out), []).append(y)
            for k, f in enumerate(ins):
                reads.setdefault((i, k, f), []).append(y)
        rows.append((entries | {there: -1}, 0, 0))
    has: dict[tuple[str, Key], int] = {}
    levels: list[int] = []
    for t in tensors_of(graph):
        formats = formats_of(graph, t)
        level = {f: column() for f in formats}
        levels += level.values()
        for f in formats:
            has[t, f] = column()
        into: dict[Key, dict[int, int]] = {f: {} for f in formats}
        for a in formats:
            for b in formats:
                ps = graph.reformat_ps(t, a, b) if a != b else None
                if ps is not None and ps < NEVER:
                    hop = column(to_us(ps))
                    into[b][hop] = 1
                    rows.append(({hop: 1, has[t, a]: -1}, -math.inf, 0))
                    n = len(formats)  # a hop leads to a higher level: none feeds itself
                    rows.append(({level[a]: 1, level[b]: -1, hop: n + 1}, -math.inf, n))
        for f in formats:
            made = {y: -1 for y in makes.get((t, f), ())}
            given = 1 if t in graph.inputs and graph.pinned[t] == f else 0
            rows.append(({has[t, f]: 1} | made | {hop: -1 for hop in into[f]}, -math.inf, given))
        if t in graph.outputs:
            rows.append(({has[t, graph.pinned[t]]: 1} if t in graph.pinned else {has[t, f]: 1 for f in formats}, 1, math.inf))
    for (i, k, f), ys in reads.items():
        rows.append((dict.fromkeys(ys, 1) | {has[graph.choices[i].inputs[k], f]: -1}, -math.inf, 0))
    top = np.ones(len(cost))
    top[levels] = MAX_FORMATS
    return _solved(cost, rows, top, seconds)


def _solved(
    cost: list[float], rows: list[tuple[Mapping[int, int], float, float]], top: np.ndarray, seconds: float
) -> tuple[float | None, float, bool]:
    """Solves an integer program for `plain_highs`: variables are whole numbers from 0 to `top`; rows: ({column: coefficient},
    low, high).
    """
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import coo_array

    place = [(r, col, v) for r, (terms, _, _) in enumerate(rows) for col, v in terms.items()]
    at, cols, values = (np.array(x) for x in zip(*place, strict=True))
    matrix = coo_array((values, (at, cols)), shape=(len(rows), len(cost))).tocsr()
    start = time.perf_counter()
    found = milp(
        np.array(cost),
        constraints=LinearConstraint(matrix, [r[1] for r in rows], [r[2] for r in rows]),
        integrality=np.ones(len(cost)),
        bounds=Bounds(0, top),
        options={"mip_rel_gap": 0, "time_limit": seconds},
    )
    return (None if found.x is None else float(found.fun)), time.perf_counter() - start, found.status == 0


def measure(path: Path, shapes, device: str, limit: float) -> dict:
    """Plans one network by each rival; returns its row."""
    target = named(device)
    network = alternatives(fuse.fuse(lower.lower(importer.sized(importer.load(path, prune=True), shapes))))
    ends = io_formats.resolve(None, network.inputs, "input") | io_formats.resolve(None, network.outputs, "output")
    table = tables.tabulate(network, target, timing.Predicted(target), io=ends, how=tables.Considered(True))
    graph = table.graph
    seconds = []
    for _ in range(RUNS):
        start = time.process_time()
        best = plan.solve(graph)
        seconds.append(time.process_time() - start)
    row = {
        "network": network.name,
        "device": device,
        "ops": len(graph.choices),
        "groups": len(graph.groups),
        "plan_ms": round(1e3 * min(seconds), 1),
        "us": to_us(best.total_ps),
        "status": best.status,
        "method": best.method,
        "width": best.width,
        "gap": best.gap,
    }
    rivals = counterfactuals.rivals(table, best)
    row["greedy_us"], row["single_us"] = rivals.greedy_us, rivals.best_single_format and rivals.best_single_format.us
    row["highs_us"], row["highs_s"], row["highs_optimal"] = plain_highs(graph, limit)
    return row


def text(row: dict) -> str:
    def rival(name: str) -> str:
        us = row[f"{name}_us"]
        return "none" if us is None else f"{us / row['us']:.3f}x"

    highs = f"{rival('highs')} in {row['highs_s']:.2f} s{'' if row['highs_optimal'] else ' (not proven)'}"
    return (
        f"{row['network']:24} {row['ops']:4} ops {row['plan_ms']:8.1f} ms  ~{row['us']:9.2f} us {row['status']} "
        f"({row['method']}, width {row['width']})  greedy {rival('greedy')}  one format {rival('single')}  HiGHS {highs}"
    )


@click.command()
@click.argument("names", nargs=-1)
@click.option("--device", default="h200", show_default=True)
@click.option("--limit", default=20.0, show_default=True, help="Seconds for HiGHS.")
@click.option("--json", "as_json", type=click.Path(), help="Also write the rows to this file.")
def main(names, device, limit, as_json) -> None:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for item in names or (*NETWORKS, *light.NAMES, *(p.stem for p in sorted(MODELS.glob("*.onnx")))):
            try:
                rows.append(measure(*find(item, Path(folder)), device, limit))
                click.echo(text(rows[-1]))
            except (ModelError, ValueError) as e:
                click.echo(f"{item}: {str(e).splitlines()[0]}")
    if as_json:
        machine = {"machine": os.uname().machine, "cores": os.cpu_count()}
        Path(as_json).write_text(json.dumps(machine | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
