"""Formats shares, sizes and tables as plain ASCII text of at most WIDTH columns."""

import hashlib
import itertools
import math
import re
import textwrap
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

WIDTH = ContextVar("columns of a text", default=120)  # the command line sets its terminal's
LEAST_CELL = 10  # columns of a table's cell
MOST_NAME = 4096  # characters of a name as repr() has it: an engine's sentences, of 16,384 at most, quote three
SHORT_NAME = 1000  # characters kept of a longer name


def versus(us: float, base: float) -> str:
    if not base:
        return "no comparison"
    change = 100 * (us / base - 1)
    if us == base:
        return "no difference"
    amount = "less than 0.1" if abs(change) < 0.05 else f"{abs(change):.1f}"
    return f"{amount} % {'slower' if change >= 0 else 'faster'}"


def share_text(share: float) -> str:
    """Formats a share in percent, rounded down: 100 means all."""
    return f"{math.floor(share * 10_000) / 100:.2f} %"


def lost_text(share: float) -> str:
    """Formats the share of weight energy that pruning removes: 0 means none."""
    return "less than 0.01 %" if 0 < share < 0.00005 else f"{100 * share:.2f} %"


def dims(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "()"


def shapes_text(shapes: Mapping[str, Sequence[int]]) -> str:
    return ", ".join(f"{name} {dims(shape)}" for name, shape in shapes.items())


def sizes_option(shapes: Mapping[str, Sequence[int]]) -> str:
    """Formats sizes of inputs as --shapes takes them.

    >>> sizes_option({"x": (1, 3, 8, 8), "y": (1, 4)})
    'x:1x3x8x8,y:1x4'
    """
    return ",".join(f"{printable(name)}:{dims(shape)}" for name, shape in shapes.items())


def size_text(nbytes: int) -> str:
    if nbytes < 1 << 20:
        return f"{nbytes / 1024:.1f} KiB"
    return f"{nbytes / (1 << 20):.1f} MiB"


def printable(text: str, keep: str = "") -> str:
    """Escapes every unprintable character of `text`, except those in `keep`: a name may hold control sequences."""
    return text if text.isprintable() else "".join(c if c.isprintable() or c in keep else repr(c)[1:-1] for c in text)


def one_line(text: str) -> str:
    """Joins the lines of an error, such as the problem and the cure, to one sentence."""
    return "; ".join(text.splitlines())


def shortened(name: str) -> str:
    """Shortens a name made of other names to at most MOST_NAME characters: a longer one is cut and ends with its hash."""
    if len(name) <= MOST_NAME // 10 or len(repr(name)) <= MOST_NAME:
        return name
    return f"{printable(name)[:SHORT_NAME]}... ({hashlib.sha256(name.encode()).hexdigest()[:12]})"


def unused_name(name: str, taken: Collection[str]) -> str:
    """Returns the name, with a number behind it if it is taken: conv1, conv1_2, conv1_3."""
    numbered = (f"{name}_{number}" for number in itertools.count(2))
    return next(found for found in itertools.chain([name], numbered) if found not in taken)


def piece_text(first: int, count: int) -> str:
    """Returns the end of the names of a piece of a batch.

    >>> piece_text(8, 8)
    ' [8:16]'
    """
    return f" [{first}:{first + count}]"


def clipped(sentence: str) -> str:
    """Cuts a sentence to the length that an engine's record takes."""
    most = 4 * MOST_NAME - 4
    return sentence if len(sentence) <= most else f"{sentence[: most - 3]}..."


def suggest(unknown: Sequence[str], known: Collection[str]) -> str:
    """Suggests, for a message, known names that are spelt like unknown ones; "" without any."""
    import difflib

    lower = {name.lower(): name for name in known}
    pairs = ((name, difflib.get_close_matches(name[:100].lower(), lower, 1)) for name in unknown[:8])
    return "".join(f"; did you mean {lower[close[0]]!r} instead of {name!r}?" for name, close in pairs if close)


def not_finite(array: Any) -> str:
    """Describes NaN and infinity in an array, with the index of the first, as a part of a sentence; "" without any."""
    import numpy as np

    a = np.asarray(array)
    if a.dtype.kind != "f" or (finite := np.isfinite(a)).all():
        return ""
    at = tuple(int(i) for i in np.argwhere(~finite)[0])
    what = "NaN" if np.isnan(a[at]) else "infinity"
    count = int(a.size - np.count_nonzero(finite))
    return f"{what} at {list(at)}" + (f", the first of {count} values that are not finite" if count > 1 else "")


def wrap(text: str, width: int | None = None, indent: int = 2) -> list[str]:
    return textwrap.wrap(text, width or WIDTH.get(), subsequent_indent=" " * indent, break_on_hyphens=False) or [""]


def listed(facts: Sequence[tuple[str, str]], column: int, width: int | None = None, most: int | None = None) -> list[str]:
    """(key, text) as paragraphs that begin at `column`, of `most` lines each."""
    return [line for key, text in facts for line in wrap(f"{key:{column}}{text}", width, column)[:most]]


def fold(text: str, width: int) -> list[str]:
    """Breaks text into lines of at most `width`, at blanks; a longer word after `/`, `_` or `>`; the rest is indented."""
    if len(text) <= width:
        return [text]
    indent = "    " if text.startswith(" ") else "  "
    lines = [""]
    for word in re.findall(r" *[^ ]+", text):
        room = max(width - len(indent), 2)
        for part in re.findall(rf" *[^/_> ]{{1,{room - 1}}}[/_>]?| *[/_>]", word) if len(word.strip()) > room else [word]:
            if lines[-1].strip() and len(lines[-1]) + len(part) > width:
                lines.append(indent)
                part = part.lstrip()
            lines[-1] += part
    return lines


def table(header: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[int] = (), gap: bool = False) -> list[str]:
    """Formats aligned columns two spaces apart, together no wider than WIDTH: the widest cells are folded. `gap`: empty lines
    between rows.
    """
    whole = [[cell.split("\n") for cell in row] for row in (header, *rows)]
    least = [max(LEAST_CELL, *map(len, lines)) for lines in whole[0]]
    caps = _widths([Counter(len(line) for row in whole for line in row[i]) for i in range(len(header))], least)
    cells = [
        [[part for line in lines for part in fold(line, cap)] for lines, cap in zip(row, caps, strict=True)] for row in whole
    ]
    widths = [max(len(line) for row in cells for line in row[i]) for i in range(len(caps))]
    out = []
    for i, row in enumerate(cells):
        for k in range(max(map(len, row))):
            texts = [cell[k] if k < len(cell) else "" for cell in row]
            texts = [t.rjust(widths[c]) if c in right else t.ljust(widths[c]) for c, t in enumerate(texts)]
            out.append("  ".join(texts).rstrip())
        if i == 0:
            out.append("  ".join("-" * w for w in widths))
        elif gap and i < len(rows):
            out.append("")
    return out


def _widths(columns: Sequence[Counter[int]], least: Sequence[int]) -> list[int]:
    """Returns the width of each column from the lengths of its cells' lines (length -> count).

    Columns get their full width if that fits; else they become narrower, down to their `least`, wide ones first, so that cells
    fold into few lines.
    """
    widths, room = [max(lengths) for lengths in columns], WIDTH.get() - 2 * (len(columns) - 1)

    def folded(i: int, width: int) -> int:
        return sum(n * math.ceil(k / width) ** 2 for k, n in columns[i].items())

    while sum(widths) > room and (able := [i for i, w in enumerate(widths) if w > least[i]]):
        widths[min(able, key=lambda i: (folded(i, widths[i] - 1) - folded(i, widths[i]), -widths[i]))] -= 1
    return widths


def first_of(items: Sequence[str], most: int, more: str = "more") -> str:
    """Joins the first `most` items with commas, and says how many more there are.

    >>> first_of(["a", "b", "c", "d"], 2)
    'a, b and 2 more'
    """
    left = len(items) - most
    return ", ".join(items[:most]) + (f" and {left} {more}" if left > 0 else "")


def several(count: int, what: str) -> str:
    """Formats a count with its noun: 1 sample, 2 samples."""
    return f"{count} {what}{'' if count == 1 else 's'}"
