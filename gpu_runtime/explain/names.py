"""Names of layers: many of them as one short text, `layer{1..3}.0/conv{1,2}`, and layers by such a text or by a pattern."""

import difflib
import fnmatch
import math
import re
import textwrap
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from typing import TypeVar

from gpu_runtime.runtime.plan_record import PlanRecord
from gpu_runtime.text import first_of, printable

Parts = tuple[tuple[str, ...], ...]  # the parts of several alike names: for each part all of its values
Row = TypeVar("Row")
BRACES = re.compile(r"\{([^{}]*)\}")
SHOWN = 4  # names that an error proposes
MOST_PATTERNS = 10_000  # texts that the braces of one pattern may stand for
LONG = 300  # characters; a longer name is not compared with other names


# ---- many names as one short text


def grouped(names: Iterable[str]) -> list[str]:
    """Returns fewer names: names that differ in one number or word only become one, with all values in a shell's braces.

    Each is at the place of the first of its names.

    >>> grouped(["layer1.conv", "fc", "layer2.conv", "layer3.conv"])
    ['layer{1..3}.conv', 'fc']
    """
    found: dict[object, list[Parts]] = {}  # the name without its numbers and words -> the parts of names that share it
    for name in dict.fromkeys(names):
        alone = len(name) > LONG or re.search(r"[{}]|\.\.", name)
        parts = [name] if alone else re.findall(r"\d+|[^\W\d_]+|[\W_]", name)
        alike = name if alone else tuple("" if part.isalnum() else part for part in parts)
        found.setdefault(alike, []).append(tuple((part,) for part in parts))
    return ["".join(map(_braced, parts)) for same in found.values() for parts in _merged(same)]


def _merged(names: list[Parts]) -> list[Parts]:
    """Merges names that differ in one part only, until no two such names are left. A name is a tuple of parts, and a part a
    tuple of values.
    """
    before, vary = None, [i for i in reversed(range(len(names[0]))) if len({parts[i] for parts in names}) > 1]
    while before != len(names):
        before = len(names)
        for i in vary:
            rest: dict[tuple[Parts, Parts], tuple[str, ...]] = {}
            for parts in names:
                key = parts[:i], parts[i + 1 :]
                rest[key] = tuple(dict.fromkeys((*rest.get(key, ()), *parts[i])))
            names = [(*head, values, *tail) for (head, tail), values in rest.items()]
    return names


def _braced(values: tuple[str, ...]) -> str:
    """Returns the values of one part as text: one value as it is, several in braces.

    >>> _braced(("a",)), _braced(("a", "b")), _braced(("1", "2", "3", "7"))
    ('a', '{a,b}', '{1..3,7}')
    """
    if len(values) == 1:
        return values[0]
    if not all(v.isdecimal() and str(int(v)) == v for v in values):
        return "{" + ",".join(values) + "}"
    numbers, texts = sorted(map(int, values)), []
    while numbers:
        run = next((i for i, n in enumerate(numbers) if n != numbers[0] + i), len(numbers))
        texts += [f"{numbers[0]}..{numbers[run - 1]}"] if run > 2 else [str(n) for n in numbers[:run]]
        numbers = numbers[run:]
    return "{" + ",".join(texts) + "}"


def fitting(
    names: Sequence[str], fits: Callable[[list[str]], bool], write: Callable[[Sequence[str]], list[str]] = grouped
) -> list[str]:
    """Returns the texts that `write` makes of the first names, as many as fit, and a last text with the number of other names.

    `fits`: returns whether these texts have room. If all names fit, no number follows.
    """
    whole = write(names)
    if fits(whole):
        return whole

    def first(count: int) -> list[str]:
        texts, more = write(names[:count]), len(names) - count
        return [*texts, f"and {more} more" if texts else f"{more} layers"]

    return first(bisect_left(range(1, len(names)), True, key=lambda count: not fits(first(count))))


def packed(head: str, texts: Sequence[str], width: int, indent: int) -> list[str]:
    """Returns the lines of a paragraph: the head, then the texts with commas, in at most `width` columns.

    Lines after the first begin with `indent` spaces. A line ends after a comma; a text longer than a line is cut after a
    character that separates words.
    """
    lines = textwrap.wrap(head, width, subsequent_indent=" " * indent, break_on_hyphens=False)
    room = width - indent
    pieces = re.findall(r"[^,]+(?:, ?)?|, ?", ", ".join(map(printable, texts)))
    parts = [part for p in pieces for part in ([p] if len(p.rstrip()) <= room else _words(p, room))]
    for i, part in enumerate(parts):
        lines[-1] += "" if i else " "
        if len(lines[-1]) + len(part.rstrip()) > width:
            lines.append(" " * indent)
        lines[-1] += part
    return [line.rstrip() for line in lines]


def _words(text: str, room: int) -> list[str]:
    """Returns a text cut into parts of at most `room` characters, after one of / . _ or a space where possible."""
    return [part for word in re.findall(r"[^/._ ]*[/._ ]*", text) for part in re.findall(f".{{1,{room}}}", word)]


# ---- a name that a user typed


def others_of(plan: PlanRecord) -> Callable[[str, Iterable[str]], list[str]]:
    """Returns a function (name of a row, names of the row's layers) -> further names by which users may know these layers.

    Further names are the names of the layers' ONNX nodes and of their weights ("conv1.weight").
    """
    nodes = {layer.layer or layer.op_name: layer.nodes for layer in plan.layers}
    return lambda name, layers: [*nodes.get(name, ()), *(f"{layer}.weight" for layer in (name, *layers))]


def matching(
    wanted: str,
    rows: Sequence[Row],
    names: Callable[[Row], Iterable[str]],
    what: str,
    others: Callable[[Row], Iterable[str]] = lambda _: (),
) -> list[Row]:
    """Returns the rows that the text `wanted` names: by a whole name, else by a pattern, else by a part of one row's names.

    Patterns are a shell's (`layer3.*`, `conv[12]`) with braces (`layer{1..3}/conv`). `names`: returns a row's names; `others`:
    returns further names of a row, which messages do not propose. `what`: the noun for a row, for messages. Raises ValueError
    if no row fits, or if `wanted` is a part of several rows' names.
    """
    known = [(row, tuple(names(row))) for row in rows]
    for called in (known, [(row, tuple(others(row))) for row in rows]):
        for fits in (wanted.__eq__, _fits(wanted)):
            if found := [row for row, own in called if any(map(fits, own))]:
                return found
    parts = [row for row, own in known if any(wanted in name for name in own)]
    if len(parts) == 1:
        return parts
    everything = list(dict.fromkeys(name for _, own in known for name in own))
    if parts:
        several = _few([min((name for name in own if wanted in name), key=len) for row, own in known if row in parts])
        raise ValueError(f"{wanted!r} is part of the names of {len(parts)} layers: {several}; write '*{wanted}*' for all")
    short = [name for name in everything if len(name) < LONG]
    close = difflib.get_close_matches(wanted[:LONG], short, SHOWN, 0.5)
    cure = f"did you mean {_few(close)}?" if close else f"expected one of {_few(everything)}"
    opened = "a brace is not closed; " if wanted.count("{") > wanted.count("}") else ""
    raise ValueError(f"{wanted!r} is not a {what}: {opened}{cure}")


def _fits(text: str) -> Callable[[str], bool]:
    """Returns the function that tests whether a name fits the pattern `text`, a shell's pattern with braces as `grouped` writes
    them.
    """
    pieces = [_values(part) if i % 2 else [part] for i, part in enumerate(BRACES.split(text))]
    patterns = ["".join(p) for p in product(*pieces)] if math.prod(map(len, pieces)) <= MOST_PATTERNS else [text]
    plain = {p for p in patterns if not re.search(r"[*?[]", p)}
    others = [re.compile(fnmatch.translate(p)) for p in patterns if p not in plain]
    return lambda name: name in plain or any(p.match(name) for p in others)


def _values(text: str) -> list[str]:
    """Returns the values that a text in braces stands for.

    >>> _values("1..3,7")
    ['1', '2', '3', '7']
    """
    values: list[str] = []
    for item in text.split(","):
        ends = re.fullmatch(r"(\d{1,4})\.\.(\d{1,4})", item)
        values += map(str, range(int(ends[1]), int(ends[2]) + 1)) if ends else [item]
    return values


def _few(names: Sequence[str]) -> str:
    return first_of([*map(printable, names)], SHOWN)
