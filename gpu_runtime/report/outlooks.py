"""One model planned for several devices, and for several batches, as tables: which layers go sparse where, and why they differ;
the time of an image, with our kernels and with a library's."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from cuda_kernels.device import Device
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
from gpu_runtime.runtime.findings import SparsityRow
from gpu_runtime.runtime.plan_record import Outlook
from gpu_runtime.text import printable, table, wrap

TIE = 0.01  # kernels whose times differ by less than this share
# The compared times in the order of columns: name, and the microseconds of a whole batch, None where they are not known.
SERIES: tuple[tuple[str, Callable[[Outlook], float | None]], ...] = (
    ("plan", lambda p: p.solution.total_us),
    ("our dense", dense_us),
    ("library dense", lambda p: p.solution.rivals.library.us if p.solution.rivals.library else None),
    ("library 2:4", lambda p: p.solution.rivals.library.sparse_us if p.solution.rivals.library else None),
)
LEGEND = (
    "Time per image in us. Columns: this plan; without sparse kernels; with a library's (cuBLAS, CUTLASS) estimated dense "
    "convolutions, or with 2:4 ones where these are faster. Gain: over our dense plan, and over the faster of both dense plans"
)
CELL = (
    "A cell: the verdict, the best dense / the best sparse kernel in us, and the resource that bounds the layer at the "
    "device's peak rates."
)


def text(plans: Sequence[Outlook], batches: Sequence[int] = ()) -> str:
    """`plans`: as pipeline.plan returns them. With `batches` a row per device and batch; else a column per device and a row per
    layer, then totals, and a line for each layer whose verdict is not the same everywhere."""
    lines = _batch_table(plans) if batches else _device_table(plans)
    for name, of in by_device(plans).items():
        lines += [] if batches else _sources(of[0].device)
        lines += wrap(f"{name}: {known}") if (known := rates_text(of)) else []
    return "\n".join(lines) + "\n"


def by_device(plans: Sequence[Outlook]) -> dict[str, list[Outlook]]:
    """Name -> plans: devices in the order given, batches growing."""
    names = dict.fromkeys(p.device.name for p in plans)
    return {name: sorted((p for p in plans if p.device.name == name), key=lambda p: p.batch) for name in names}


def _picks(p: Outlook) -> str:
    return f"{len(p.sparsity.picked)} of {len(p.sparsity.eligible)}"


def _us(us: float | None, unit: str = " us") -> str:
    return "-" if us is None else us_text(us, PREDICTED, unit=unit)


def _head(plans: Sequence[Outlook], which: str) -> str:
    head = f"{plans[0].model.name} {which}; --sparsity={plans[0].sparsity.mode}"
    return printable(f"{head}; all times are predicted, marked ~; none was measured")


# ---- batches


def _batch_table(plans: Sequence[Outlook]) -> list[str]:
    batches = ", ".join(map(str, sorted({p.batch for p in plans})))
    times = [f"{name},\nper image" for name, _ in SERIES]
    gains = ["sparse of\neligible", "gain over\nour dense", "gain over\nfastest dense"]
    header = ["device", "batch", "plan, us", *times, *gains]
    rows = [
        [
            p.device.name,
            str(p.batch),
            _us(p.solution.total_us, unit=""),
            *(_us(None if (us := get(p)) is None else us / p.batch, unit="") for _, get in SERIES),
            _picks(p),
            *(ratio_text(us / p.solution.total_us) for us in (dense_us(p), fastest_dense_us(p))),
        ]
        for of in by_device(plans).values()
        for p in of
    ]
    shown = table(header, rows, right=range(1, len(header)))
    return [*wrap(_head(plans, f"at batch {batches}")), "", *shown, "", *wrap(LEGEND)]


# ---- devices


def _device_table(plans: Sequence[Outlook]) -> list[str]:
    head = _head(plans, f"planned for {', '.join(p.device.title for p in plans)}")
    if plans[0].sparsity.mode != "disable":
        head += f"; sparse kernels are taken where P(faster) is {100 * plans[0].risk:.3g} % or more (--risk)"
    by_layer = [{name: r for r in p.sparsity.rows for name in r.layers} for p in plans]
    rows = [
        [printable(layer), *(_cell(rows[layer], plan) for rows, plan in zip(by_layer, plans, strict=True))]
        for layer in by_layer[0]
    ]
    rows += [[label, *(cell(p) for p in plans)] for label, cell in TOTALS]
    lines = [*wrap(head), "", *table(["layer", *(p.device.name for p in plans)], rows, gap=True), "", *wrap(CELL)]
    differing = [layer for layer in by_layer[0] if len({rows[layer].verdict for rows in by_layer}) > 1]
    differ = f"{len(differing)} of {len(by_layer[0])} layers have different verdicts:"
    lines += ["", *wrap(differ if differing else "Every layer has the same verdict on all devices.")]
    for layer in differing:
        lines += wrap(f"{printable(layer)}: {_why(layer, by_layer, plans)}")
    return [*lines, "", "Where the facts come from:"]


def _sources(d: Device) -> list[str]:
    held = f"; {held_text(d)}" if held_text(d) else ""
    return wrap(f"{d.name}: {d.sources}{held}" + (f". Assumed: {d.assumed}" if d.assumed else ""))


def _cell(row: SparsityRow, plan: Outlook) -> str:
    dense, sparse = row.best_dense, row.best_sparse
    times = " / ".join(_us(best.us if best else None, unit="") for best in ((dense, sparse) if sparse else (dense,)))
    merged = f"\nas {printable(row.layer)}" if len(row.layers) > 1 else ""
    if row.floor is None:  # runs in FP32: its floors are those of no tensor core
        return f"FP32\n{times}\n{RESOURCES[dense.bound] if dense else '-'}{merged}"
    return f"{REASONS[row.reason].label}\n{times}\n{RESOURCES[row.floor.bound]}{merged}"


def _limits(plan: Outlook) -> str:
    """What limits the best dense kernels of the layers that also have a sparse one, most frequent first."""
    counts = Counter(RESOURCES[r.best_dense.bound] for r in plan.sparsity.rows if r.best_dense and r.best_sparse)
    return "\n".join(f"{n} {resource}" for resource, n in counts.most_common()) or "-"


US = dict(SERIES)
TOTALS: tuple[tuple[str, Callable[[Outlook], str]], ...] = (
    ("sparse of eligible", _picks),
    ("plan", lambda p: _us(US["plan"](p))),
    ("without sparse kernels", lambda p: _us(US["our dense"](p))),
    ("gain over our dense", lambda p: f"{dense_us(p) / p.solution.total_us:.3f}x"),
    ("library dense (estimate)", lambda p: _us(US["library dense"](p))),
    ("library 2:4 (estimate)", lambda p: _us(US["library 2:4"](p))),
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
