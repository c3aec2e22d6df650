"""One model planned for several batches and devices: the time of an image, with our kernels and with a library's."""

from collections.abc import Callable, Sequence

from gpu_runtime.explain.figures import PREDICTED, dense_us, fastest_dense_us, rates_text, ratio_text, us_text
from gpu_runtime.runtime.plan_record import Outlook
from gpu_runtime.text import printable, table, wrap

# What is compared, in the order of columns: name, and the microseconds of a whole batch, None where it is not known.
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


def text(plans: Sequence[Outlook]) -> str:
    """A row per device and batch. `plans`: as pipeline.plan returns them."""
    batches = ", ".join(map(str, sorted({p.batch for p in plans})))
    head = f"{plans[0].model.name} at batch {batches}; --sparsity={plans[0].sparsity.mode}; all times "
    header = [
        "device",
        "batch",
        "plan, us",
        *(f"{name},\nper image" for name, _ in SERIES),
        "sparse of\neligible",
        "gain over\nour dense",
        "gain over\nfastest dense",
    ]
    rows = [_row(p) for p in by_device(plans)]
    lines = [*wrap(printable(f"{head}are predicted, marked ~; none was measured")), ""]
    lines += [*table(header, rows, right=range(1, len(header))), "", *wrap(LEGEND)]
    for name in dict.fromkeys(p.device.name for p in plans):
        if known := rates_text([p for p in plans if p.device.name == name]):
            lines += wrap(f"{name}: {known}")
    return "\n".join(lines) + "\n"


def by_device(plans: Sequence[Outlook]) -> list[Outlook]:
    """Devices in the order given, batches growing."""
    names = [p.device.name for p in plans]
    return sorted(plans, key=lambda p: (names.index(p.device.name), p.batch))


def _row(p: Outlook) -> list[str]:
    total = p.solution.total_us
    return [
        p.device.name,
        str(p.batch),
        us_text(total, PREDICTED, unit=""),
        *("-" if (us := get(p)) is None else us_text(us / p.batch, PREDICTED, unit="") for _, get in SERIES),
        f"{len(p.sparsity.picked)} of {len(p.sparsity.eligible)}",
        ratio_text(dense_us(p) / total),
        ratio_text(fastest_dense_us(p) / total),
    ]
