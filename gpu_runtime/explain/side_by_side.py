"""One model planned for several devices: which layers go sparse where, and why they differ."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from gpu_runtime.explain.figures import (
    PREDICTED,
    RESOURCES,
    dense_us,
    fastest_dense_us,
    held_text,
    rates_text,
    ratio_text,
    us_text,
)
from gpu_runtime.explain.reason_texts import REASONS
from gpu_runtime.runtime.findings import LibraryPlan, SparsityRow
from gpu_runtime.runtime.plan_record import Outlook
from gpu_runtime.text import printable, table, wrap

TIE = 0.01  # kernels whose times differ by less than this share


def text(plans: Sequence[Outlook]) -> str:
    """A column per device and a row per layer: verdict, dense and sparse time; then totals, and a line for each layer whose
    verdict is not the same everywhere. `plans`: as pipeline.plan returns them."""
    names = [p.device.name for p in plans]
    head = f"{plans[0].model.name} planned for {', '.join(p.device.title for p in plans)}; "
    head += f"--sparsity={plans[0].sparsity.mode}; all times are predicted, marked ~; none was measured"
    if plans[0].sparsity.mode != "disable":
        head += f"; sparse kernels are taken where P(faster) is {100 * plans[0].risk:.3g} % or more (--risk)"
    by_layer = [{name: r for r in p.sparsity.rows for name in r.layers} for p in plans]
    rows = [
        [printable(layer), *(_cell(rows[layer], plan) for rows, plan in zip(by_layer, plans, strict=True))]
        for layer in by_layer[0]
    ]
    rows += [[label, *(cell(p) for p in plans)] for label, cell in TOTALS]
    lines = [*wrap(head), "", *table(["layer", *names], rows, gap=True)]
    lines += [
        "",
        *wrap(
            "A cell: the verdict, the best dense / the best sparse kernel in us, and the resource that bounds the layer "
            "at the device's peak rates."
        ),
    ]
    differing = [layer for layer in by_layer[0] if len({rows[layer].verdict for rows in by_layer}) > 1]
    differ = f"{len(differing)} of {len(by_layer[0])} layers have different verdicts:"
    lines += ["", *wrap(differ if differing else "Every layer has the same verdict on all devices.")]
    for layer in differing:
        lines += wrap(f"{printable(layer)}: {_why(layer, by_layer, plans)}")
    lines += ["", "Where the facts come from:"]
    for p in plans:
        d = p.device
        held = f"; {held_text(d)}" if held_text(d) else ""
        lines += wrap(f"{d.name}: {d.sources}{held}" + (f". Assumed: {d.assumed}" if d.assumed else ""))
        if known := rates_text([p]):
            lines += wrap(f"{d.name}: {known}")
    return "\n".join(lines) + "\n"


def _cell(row: SparsityRow, plan: Outlook) -> str:
    dense, sparse = row.best_dense, row.best_sparse
    known = [us_text(best.us, plan.timing, unit="") if best else "-" for best in ((dense, sparse) if sparse else (dense,))]
    times = " / ".join(known)
    merged = f"\nas {printable(row.layer)}" if len(row.layers) > 1 else ""
    if row.floor is None:  # runs in FP32: its floors are those of no tensor core
        return f"FP32\n{times}\n{RESOURCES[dense.bound] if dense else '-'}{merged}"
    return f"{REASONS[row.reason].label}\n{times}\n{RESOURCES[row.floor.bound]}{merged}"


def _limits(plan: Outlook) -> str:
    """What limits the best dense kernels of the layers that also have a sparse one, most frequent first."""
    counts = Counter(RESOURCES[r.best_dense.bound] for r in plan.sparsity.rows if r.best_dense and r.best_sparse)
    return "\n".join(f"{n} {resource}" for resource, n in counts.most_common()) or "-"


def _of_library(p: Outlook, get: Callable[[LibraryPlan], float | None]) -> str:
    found = p.solution.rivals.library
    us = get(found) if found else None
    return "-" if us is None else us_text(us, PREDICTED)


TOTALS: tuple[tuple[str, Callable[[Outlook], str]], ...] = (
    ("sparse of eligible", lambda p: f"{len(p.sparsity.picked)} of {len(p.sparsity.eligible)}"),
    ("plan", lambda p: us_text(p.solution.total_us, p.timing)),
    ("without sparse kernels", lambda p: us_text(dense_us(p), p.timing)),
    ("gain over our dense", lambda p: f"{dense_us(p) / p.solution.total_us:.3f}x"),
    ("library dense (estimate)", lambda p: _of_library(p, lambda found: found.us)),
    ("library 2:4 (estimate)", lambda p: _of_library(p, lambda found: found.sparse_us)),
    ("gain over fastest dense", lambda p: f"{fastest_dense_us(p) / p.solution.total_us:.3f}x"),
    ("dense kernels limited by", _limits),
)


def _why(layer: str, by_layer: Sequence[Mapping[str, SparsityRow]], plans: Sequence[Outlook]) -> str:
    """Per verdict the devices, each with how the sparse kernel compares there and what the layer is bound by."""
    places: dict[str, list[str]] = {}
    for rows, plan in zip(by_layer, plans, strict=True):
        row, name = rows[layer], plan.device.name
        dense, sparse, floor = row.best_dense, row.best_sparse, row.floor
        if dense and sparse and floor:
            ratio = dense.us / sparse.us
            tie = "a tie" if abs(ratio - 1) < TIE else f"sparse kernel {ratio_text(ratio)}"
            share = 100 * floor.mma_us / floor.dense_us
            detail = f"{tie}; bound by {RESOURCES[floor.bound]}, {share:.0f} % of the least time is tensor-core work"
        else:
            detail = row.reason
        places.setdefault(row.verdict, []).append(f"{name} ({detail})")
    return ". ".join(f"{verdict} on {', '.join(found)}" for verdict, found in places.items())
