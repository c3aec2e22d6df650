"""The plans of one model for several devices and batches as tables: the verdict of each layer on each device, and the reasons
for differences; the time of an image, with our kernels and with a library's.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from cuda_kernels.device import Device
from gpu_runtime.explain.figures import (
    PREDICTED,
    RESOURCES,
    dense_us,
    fastest_dense_us,
    held_text,
    pruned_outlook,
    pruning_text,
    rates_text,
    ratio_text,
    us_text,
)
from gpu_runtime.explain.reason_texts import REASONS
from gpu_runtime.runtime.findings import SparsityRow
from gpu_runtime.runtime.plan_record import Outlook
from gpu_runtime.text import printable, table, wrap

TIE = 0.01  # share of a time; kernels whose times differ by less are called a tie
MOST_PROSE = 10  # lines per device below the tables
Get = Callable[[Outlook], float | None]  # the microseconds of a whole batch, None where they are not known
LEGEND = (
    "Time per image in us. Columns: {}; with a library's (cuBLAS, CUTLASS) estimated dense convolutions, or with 2:4 ones "
    "where these are faster. Gain: over {}, and over the faster of both dense plans"
)
CELL = (
    "A cell: the verdict, the best dense / the best sparse kernel in us, and the resource that bounds the layer at the "
    "device's peak rates."
)


def shown(p: Outlook) -> Outlook:
    """Returns the plan with pruned weights if one was made, else the plan itself."""
    return pruned_outlook(p) or p


def dense(p: Outlook) -> float:
    """Returns the microseconds per batch of the plan to compare with: with present weights if `shown` has pruned weights, else
    the plan without sparse kernels.
    """
    return p.if_pruned.now_us if p.if_pruned else dense_us(p)


def series(plans: Sequence[Outlook]) -> tuple[tuple[str, Get], ...]:
    """Returns (column name, getter) for the four times that the table compares, in the order of its columns.

    A getter takes an Outlook and returns the microseconds of its whole batch, None if the time is not known. `plans`: all
    plans in the table; if one of them has pruned weights, the first two columns are "pruned" and "as it is" instead of "plan"
    and "our dense".
    """
    names = ("pruned", "as it is") if any(p.if_pruned for p in plans) else ("plan", "our dense")
    return (
        (names[0], lambda p: shown(p).solution.total_us),
        (names[1], dense),
        ("library dense", lambda p: found.us if (found := shown(p).solution.rivals.library) else None),
        ("library 2:4", lambda p: found.sparse_us if (found := shown(p).solution.rivals.library) else None),
    )


def legend(plans: Sequence[Outlook]) -> str:
    """Returns the sentences on the columns of the table with these plans."""
    if any(p.if_pruned for p in plans):
        now = "with the weights as they are"
        return LEGEND.format(f"the plan with all weights pruned that can be 2:4; {now}", f"the plan {now}")
    return LEGEND.format("this plan; without sparse kernels", "our dense plan")


def text(plans: Sequence[Outlook], batches: Sequence[int] = ()) -> str:
    """Returns the comparison of `plans` (as pipeline.plan returns them) as text for a terminal.

    It begins with a table that has a row per device and batch. If `batches` is empty, a table follows with a column per
    device and a row per layer. Prose follows last, at most MOST_PROSE lines per device.
    """
    lines = [*_batch_table(plans), *wrap(legend(plans)), "", *([] if batches else [*_device_table(plans), *wrap(CELL), ""])]
    each = by_device(plans).values()
    best = [max(of, key=lambda p: dense(p) / shown(p).solution.total_us) for of in each]
    paragraphs = [wrap(f"{p.device.name}, batch {p.batch}: {found}") for p in best if (found := pruning_text(p))]
    paragraphs += [wrap(f"{of[0].device.name}: {known}") for of in each if (known := rates_text([*map(shown, of)]))]
    paragraphs += [] if batches else [*_differing(plans), *(_sources(of[0].device) for of in each)]
    left = MOST_PROSE * len(best) - 1
    for i, paragraph in enumerate(paragraphs):
        if len(paragraph) > left:
            return "\n".join([*lines, f"{len(paragraphs) - i} more notes are in --json"]) + "\n"
        lines, left = lines + paragraph, left - len(paragraph)
    return "\n".join(lines) + "\n"


def by_device(plans: Sequence[Outlook]) -> dict[str, list[Outlook]]:
    """Returns device name -> its plans by rising batch; the devices are in the order of `plans`."""
    names = dict.fromkeys(p.device.name for p in plans)
    return {name: sorted((p for p in plans if p.device.name == name), key=lambda p: p.batch) for name in names}


def _picks(p: Outlook) -> str:
    return f"{len(p.sparsity.picked)} of {len(p.sparsity.eligible)}"


def _us(us: float | None) -> str:
    """Returns predicted microseconds as text, without their unit; "-" for an unknown time."""
    return "-" if us is None else us_text(us, PREDICTED, unit="")


def _head(plans: Sequence[Outlook], which: str) -> str:
    """Returns the line above the table: model, batches (`which`), sparsity and the origin of times."""
    head = f"{plans[0].model.name} {which}; --sparsity={plans[0].sparsity.mode}"
    if any(p.if_pruned for p in plans):
        head += "; not all weights are 2:4: the table is of the network with all of them pruned"
    head += "; all times are predicted, marked ~; none was measured"
    if plans[0].sparsity.mode != "disable":
        head += f"; sparse kernels are taken where P(faster) is {100 * plans[0].risk:.3g} % or more (--risk)"
    return printable(head)


# ---- batches


def _batch_table(plans: Sequence[Outlook]) -> list[str]:
    """Returns the head and the table with a row per device and batch."""
    batches = ", ".join(map(str, sorted({p.batch for p in plans})))
    (first, _), (second, _), *_ = columns = series(plans)
    times = [f"{name},\nper image" for name, _ in columns]
    picks = "sparse if\npruned" if any(p.if_pruned for p in plans) else "sparse of\neligible"
    header = ["device", "batch", f"{first}, us", *times, picks, f"gain over\n{second}", "gain over\nfastest dense"]
    rows = [
        [
            p.device.name,
            str(p.batch),
            _us(shown(p).solution.total_us),
            *(_us(None if (us := get(p)) is None else us / p.batch) for _, get in columns),
            _picks(shown(p)),
            *(ratio_text(us / shown(p).solution.total_us) for us in (dense(p), fastest_dense_us(shown(p), dense(p)))),
        ]
        for of in by_device(plans).values()
        for p in of
    ]
    shown_rows = table(header, rows, right=range(1, len(header)))
    return [*wrap(_head(plans, f"at batch {batches}")), "", *shown_rows, ""]


# ---- devices


def _by_layer(plans: Sequence[Outlook]) -> list[dict[str, SparsityRow]]:
    """Returns, for each plan, layer -> its sparsity row."""
    return [{name: r for r in shown(p).sparsity.rows for name in r.layers} for p in plans]


def _device_table(plans: Sequence[Outlook]) -> list[str]:
    """Returns the table with a row per layer and a column per plan, each of another device."""
    by_layer = _by_layer(plans)
    rows = [
        [printable(layer), *(_cell(rows[layer], plan) for rows, plan in zip(by_layer, plans, strict=True))]
        for layer in by_layer[0]
    ]
    rows.append(["dense kernels limited by", *(_limits(shown(p)) for p in plans)])
    return [*table(["layer", *(p.device.name for p in plans)], rows, gap=True), ""]


def _differing(plans: Sequence[Outlook]) -> list[list[str]]:
    """Returns a paragraph for each layer whose verdict differs among the devices, after a paragraph that counts these
    layers.
    """
    by_layer = _by_layer(plans)
    differing = [layer for layer in by_layer[0] if len({rows[layer].verdict for rows in by_layer}) > 1]
    differ = f"{len(differing)} of {len(by_layer[0])} layers have different verdicts:"
    head = wrap(differ if differing else "Every layer has the same verdict on all devices.")
    return [head, *(wrap(f"{printable(layer)}: {_why(layer, by_layer, plans)}") for layer in differing)]


def _sources(d: Device) -> list[str]:
    """Returns the paragraph on the sources of a device's rates, and on assumed rates."""
    held = f"; {held_text(d)}" if held_text(d) else ""
    return wrap(f"{d.name}: {d.sources}{held}" + (f". Assumed: {d.assumed}" if d.assumed else ""))


def _cell(row: SparsityRow, plan: Outlook) -> str:
    """Returns the lines of a cell: the reason's label, the times of the best kernels, the limiting resource."""
    dense, sparse = row.best_dense, row.best_sparse
    times = " / ".join(_us(best.us if best else None) for best in ((dense, sparse) if sparse else (dense,)))
    merged = f"\nas {printable(row.layer)}" if len(row.layers) > 1 else ""
    if row.floor is None:  # a layer in FP32 uses no tensor cores, whose floors these are
        return f"FP32\n{times}\n{RESOURCES[dense.bound] if dense else '-'}{merged}"
    return f"{REASONS[row.reason].label}\n{times}\n{RESOURCES[row.floor.bound]}{merged}"


def _limits(plan: Outlook) -> str:
    """Returns the resources that limit the best dense kernels of layers that also have a sparse kernel, as lines "count
    resource", the most frequent first; "-" without such layers.
    """
    counts = Counter(RESOURCES[r.best_dense.bound] for r in plan.sparsity.rows if r.best_dense and r.best_sparse)
    return "\n".join(f"{n} {resource}" for resource, n in counts.most_common()) or "-"


def _why(layer: str, by_layer: Sequence[Mapping[str, SparsityRow]], plans: Sequence[Outlook]) -> str:
    """Returns a clause for each verdict on a layer: the devices with this verdict, each with dense time / sparse time and the
    resource that bounds the layer.
    """
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
