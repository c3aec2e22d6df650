"""Scatter plots of predicted against published times, as SVG: one panel, both axes logarithmic, a colour for each regime.

Colours follow the reader's light or dark theme, and are told apart without red against green.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from xml.sax.saxutils import escape

REGIMES = {"launch": "launch-bound", "l2": "L2-bound", "dram": "DRAM-bound", "math": "math-bound"}
LIGHT = {
    "ground": "#ffffff",
    "ink": "#24292f",
    "grid": "#d8dee4",
    "launch": "#6e7781",
    "l2": "#0969da",
    "dram": "#bc4c00",
    "math": "#8250df",
}
DARK = {
    "ground": "#0d1117",
    "ink": "#e6edf3",
    "grid": "#30363d",
    "launch": "#9ea7b3",
    "l2": "#58a6ff",
    "dram": "#f0883e",
    "math": "#c297ff",
}
SIZE, LEFT, TOP, RIGHT, BOTTOM = 320, 58, 28, 24, 44  # pixels: a panel's side, and the margins around it
BAND = 1.2  # dashed: predictions off by this factor
Scale = Callable[[float], str]


def svg(title: str, what: str, points: Sequence[tuple[float, float, str]]) -> str:
    """Returns a plot as SVG. `points`: (published, predicted, regime), microseconds; `what`: their noun. The line marks equal
    times, the band 20 % around it.
    """
    low = math.floor(math.log10(min(min(a, b) for a, b, _ in points)))
    high = max(low + 1, math.ceil(math.log10(max(max(a, b) for a, b, _ in points))))

    def along(us: float) -> float:
        return (math.log10(us) - low) / (high - low) * SIZE

    def x(us: float) -> str:
        return f"{LEFT + along(us):.1f}"

    def y(us: float) -> str:
        return f"{TOP + SIZE - along(us):.1f}"

    width, height = LEFT + SIZE + RIGHT, TOP + SIZE + BOTTOM
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
        'font-family="sans-serif" font-size="11">',
        f"<title>{escape(title)}: predicted against published times of {len(points)} {escape(what)}</title>",
        f"<style>\n{_style(LIGHT)}\n@media (prefers-color-scheme: dark) {{\n{_style(DARK)}\n}}\n</style>",
        '<rect class="ground" width="100%" height="100%"/>',
        f'<text class="ink" x="{LEFT}" y="{TOP - 10}" font-size="12" font-weight="bold">{escape(title)}</text>',
        *_axes(low, high, f"published time of {len(points)} {escape(what)}, us", x, y),
        *_diagonals(10.0**low, 10.0**high, x, y),
    ]
    for regime in REGIMES:
        lines.append(f'<g class="{regime}" fill-opacity="0.65">')
        lines += [f'<circle cx="{x(a)}" cy="{y(b)}" r="1.6"/>' for a, b, r in points if r == regime]
        lines.append("</g>")
    return "\n".join([*lines, *_legend({r for *_, r in points}), "</svg>\n"])


def _style(colours: dict[str, str]) -> str:
    return "\n".join(f".{name} {{ fill: {colour}; }}" for name, colour in colours.items()) + (
        f"\n.line {{ stroke: {colours['ink']}; fill: none; }}\n.rule {{ stroke: {colours['grid']}; }}"
    )


def _axes(low: int, high: int, across: str, x: Scale, y: Scale) -> Iterator[str]:
    """Yields the frame, a rule and a number at each power of ten, and the axes' titles."""
    for power in range(low, high + 1):
        us = 10.0**power
        yield f'<line class="rule" x1="{x(us)}" y1="{TOP}" x2="{x(us)}" y2="{TOP + SIZE}"/>'
        yield f'<line class="rule" x1="{LEFT}" y1="{y(us)}" x2="{LEFT + SIZE}" y2="{y(us)}"/>'
        yield f'<text class="ink" x="{x(us)}" y="{TOP + SIZE + 15}" text-anchor="middle">{us:,.6g}</text>'
        yield f'<text class="ink" x="{LEFT - 6}" y="{float(y(us)) + 4:.1f}" text-anchor="end">{us:,.6g}</text>'
    yield f'<rect class="line" x="{LEFT}" y="{TOP}" width="{SIZE}" height="{SIZE}"/>'
    middle = TOP + SIZE / 2
    yield f'<text class="ink" x="{LEFT + SIZE / 2}" y="{TOP + SIZE + 34}" text-anchor="middle">{across}</text>'
    yield (
        f'<text class="ink" x="14" y="{middle}" text-anchor="middle" transform="rotate(-90 14 {middle})">'
        "predicted time, us</text>"
    )


def _diagonals(first: float, last: float, x: Scale, y: Scale) -> Iterator[str]:
    for factor, dash in ((1.0, ""), (BAND, ' stroke-dasharray="3 3"'), (1 / BAND, ' stroke-dasharray="3 3"')):
        a, b = max(first, first / factor), min(last, last / factor)
        yield f'<line class="line" x1="{x(a)}" y1="{y(a * factor)}" x2="{x(b)}" y2="{y(b * factor)}"{dash}/>'


def _legend(seen: set[str]) -> Iterator[str]:
    """Yields the legend in the lower right corner, where predictions would be far too low."""
    rows = [r for r in REGIMES if r in seen]
    left, top = LEFT + SIZE - 104, TOP + SIZE - 16 * (len(rows) + 1) - 4
    for i, regime in enumerate(rows):
        yield f'<circle class="{regime}" cx="{left + 9}" cy="{top + 16 * i + 5}" r="3"/>'
        yield f'<text class="ink" x="{left + 24}" y="{top + 16 * i + 9}">{REGIMES[regime]}</text>'
    at = top + 16 * len(rows) + 5
    yield f'<line class="line" x1="{left}" y1="{at}" x2="{left + 18}" y2="{at}" stroke-dasharray="3 3"/>'
    yield f'<text class="ink" x="{left + 24}" y="{at + 4}">off by {100 * (BAND - 1):.0f} %</text>'
