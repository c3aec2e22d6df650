"""Scatter plots of predicted against published times, as SVG: one panel, both axes logarithmic, a colour for each regime."""

from __future__ import annotations

import math
from collections.abc import Sequence

COLOURS = {"launch": "#888888", "l2": "#1f77b4", "dram": "#2ca02c", "math": "#d62728"}
SIZE, EDGE = 320, 44  # pixels of a panel's side, and of the room for its labels


def svg(title: str, points: Sequence[tuple[float, float, str]]) -> str:
    """`points`: (published, predicted, regime), microseconds. The line is where both agree, the band is 20 % around it."""
    low = math.floor(math.log10(min(min(a, b) for a, b, _ in points)))
    high = math.ceil(math.log10(max(max(a, b) for a, b, _ in points)))

    def at(us: float) -> float:
        return (math.log10(us) - low) / (high - low) * SIZE

    def x(us: float) -> str:
        return f"{EDGE + at(us):.1f}"

    def y(us: float) -> str:
        return f"{EDGE / 2 + SIZE - at(us):.1f}"

    first, last = 10.0**low, 10.0**high
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{SIZE + EDGE + 12}" height="{SIZE + EDGE + 24}" '
        f'font-family="sans-serif" font-size="11">'
        '<rect width="100%" height="100%" fill="white"/>'
        f'<text x="{EDGE}" y="14">{title}</text>',
        f'<rect x="{EDGE}" y="{EDGE / 2}" width="{SIZE}" height="{SIZE}" fill="none" stroke="#444"/>',
    ]
    for factor, dash in ((1.0, ""), (1.2, ' stroke-dasharray="3 3"'), (1 / 1.2, ' stroke-dasharray="3 3"')):
        a, b = max(first, first / factor), min(last, last / factor)
        lines.append(f'<line x1="{x(a)}" y1="{y(a * factor)}" x2="{x(b)}" y2="{y(b * factor)}" stroke="#444"{dash}/>')
    for power in range(low, high + 1):
        us = 10.0**power
        lines.append(f'<text x="{x(us)}" y="{EDGE / 2 + SIZE + 14}" text-anchor="middle">{us:g}</text>')
        lines.append(f'<text x="{EDGE - 4}" y="{y(us)}" text-anchor="end">{us:g}</text>')
    lines += [f'<circle cx="{x(a)}" cy="{y(b)}" r="1.4" fill="{COLOURS[r]}" fill-opacity="0.6"/>' for a, b, r in points]
    lines.append(f'<text x="{EDGE}" y="{EDGE / 2 + SIZE + 32}">published us across, predicted us up;</text>')
    for i, (name, colour) in enumerate(COLOURS.items()):
        lines.append(f'<text x="{EDGE + 192 + 34 * i}" y="{EDGE / 2 + SIZE + 32}" fill="{colour}">{name}</text>')
    return "\n".join([*lines, "</svg>\n"])
