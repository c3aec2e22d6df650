"""The plans of one model for several batches as an HTML page without scripts: for each device a plot of the time per image over
the batch.
"""

import html
import math
from collections.abc import Sequence
from itertools import chain

from gpu_runtime.report.outlooks import Get, by_device, legend, series, text
from gpu_runtime.report.page import HERE, filled
from gpu_runtime.runtime.plan_record import Outlook
from gpu_runtime.text import printable

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 1040, 400, 52, 104, 30, 44  # pixels: a plot's size, and margins, names at the right
LINE, NUMBER = 14, 32  # pixels: the least distance of two names, and the width of a number
NICE = (1.0, 2.0, 5.0)  # ticks between powers of ten


def page(plans: Sequence[Outlook]) -> bytes:
    """Returns the HTML file as bytes: a plot for each device, then the table. `plans`: as pipeline.plan returns them."""
    devices = by_device(plans)
    parts = {
        "title": html.escape(printable(f"{plans[0].model.name} on {', '.join(devices)}")),
        "style": "\n".join((HERE / name).read_text(encoding="utf-8") for name in ("style.css", "batches.css")),
        "legend": html.escape(legend(plans)),
        "plots": "\n".join(_panel(of, series(plans)) for of in devices.values()),
        "table": html.escape(text(plans, [p.batch for p in plans])),
    }
    return filled("batches.html", parts)


def _panel(plans: Sequence[Outlook], columns: Sequence[tuple[str, Get]]) -> str:
    """Returns one device's plot of the time per image over the batch as SVG, both axes logarithmic. `plans`: of this device, by
    rising batch; `columns`: as `series` returns them.
    """
    curves = [[(p.batch, us / p.batch) for p in plans if (us := get(p))] for _, get in columns]
    low, high = (f(us for curve in curves for _, us in curve) for f in (min, max))
    ticks = _ticks(low, high)
    bottom, top = math.log(min(low, ticks[0])), math.log(max(high, ticks[-1]))
    first, last = math.log(plans[0].batch), math.log(plans[-1].batch)

    def x(batch: float) -> float:
        share = (math.log(batch) - first) / (last - first) if last > first else 0.5
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(us: float) -> float:
        return TOP + (top - math.log(us)) / (top - bottom) * (HEIGHT - TOP - BOTTOM)

    title = html.escape(printable(plans[0].device.title))
    lines = [f'<section><h2>{title}</h2><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">']
    lines.append(f"<title>{title}: microseconds per image over the batch</title>")
    for us in ticks:
        lines.append(f'<line class="grid" x1="{LEFT}" y1="{y(us):.1f}" x2="{WIDTH - RIGHT}" y2="{y(us):.1f}"/>')
        lines.append(f'<text x="{LEFT - 6}" y="{y(us) + 4:.1f}" text-anchor="end">{us:g}</text>')
    lines += [f'<text x="{x(p.batch):.1f}" y="{HEIGHT - 26}" text-anchor="middle">{p.batch}</text>' for p in plans]
    lines.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">batch</text>')
    lines.append(f'<text x="4" y="{TOP - 14}">us per image</text>')
    for i, curve in reversed(list(enumerate(curves))):  # the plan's curve is drawn last, above the others
        points = " ".join(f"{x(batch):.1f},{y(us):.1f}" for batch, us in curve)
        lines.append(f'<polyline class="series{i}" points="{points}"/>')
        for batch, us in curve:
            what = f"{columns[i][0]}, batch {batch}: ~{us:.2f} us per image"
            lines.append(f'<circle class="series{i}" cx="{x(batch):.1f}" cy="{y(us):.1f}" r="4"><title>{what}</title></circle>')
    lines += _numbers([[(x(batch), y(us), us) for batch, us in curve] for curve in curves])
    ends = {i: y(curve[-1][1]) for i, curve in enumerate(curves) if curve}
    for i, at in _without_overlap(ends).items():
        ends_at = f'x1="{WIDTH - RIGHT + 8}" y1="{at:.1f}" x2="{WIDTH - RIGHT + 22}" y2="{at:.1f}"'
        lines.append(f'<line class="series{i}" {ends_at}/>')
        lines.append(f'<text x="{WIDTH - RIGHT + 26}" y="{at + 4:.1f}">{columns[i][0]}</text>')
    return "\n".join([*lines, "</svg></section>"])


def _numbers(curves: Sequence[Sequence[tuple[float, float, float]]]) -> list[str]:
    """Returns SVG texts with the times above the points (x, y, us) of curves; a time that would overlap an earlier one is left
    out.
    """
    lines, taken = [], list[tuple[float, float]]()
    for x, y, us in chain(*curves):
        if all(abs(x - other_x) > NUMBER or abs(y - other_y) >= LINE for other_x, other_y in taken):
            taken.append((x, y))
            lines.append(f'<text class="value" x="{x:.1f}" y="{y - 8:.1f}" text-anchor="middle">{_short(us)}</text>')
    return lines


def _short(us: float) -> str:
    """Returns predicted microseconds as a short text, as ~12.3 or ~1,234."""
    return f"~{us:.3g}" if us < 1000 else f"~{us:,.0f}"


def _ticks(low: float, high: float) -> list[float]:
    """Returns the values 1, 2, 5 times powers of ten that span `low` to `high`: the first is at most `low`, the last at least
    `high`.

    >>> _ticks(3.0, 40.0)
    [2.0, 5.0, 10.0, 20.0, 50.0]
    """
    steps = [m * 10.0**e for e in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1) for m in NICE]
    first = max(us for us in steps if us <= low * (1 + 1e-9))
    last = min(us for us in steps if us >= high * (1 - 1e-9))
    return [us for us in steps if first <= us <= last]


def _without_overlap(ends: dict[int, float]) -> dict[int, float]:
    """Returns number of a curve -> the y of its name, in pixels. `ends`: number of a curve -> the y of its end; names that
    would overlap are moved down.
    """
    found: dict[int, float] = {}
    for i, at in sorted(ends.items(), key=lambda end: end[1]):
        found[i] = max(at, max(found.values(), default=-LINE) + LINE)
    return found
