"""Names of layers: many in little room, as `layer{1..3}.0/conv{1,2}`, and found again by such a text or by a pattern."""

import difflib
import fnmatch
import math
import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from typing import TypeVar

from gpu_runtime.runtime.plan_record import PlanRecord
from gpu_runtime.text import first_of, printable

Parts = tuple[tuple[str, ...], ...]  # of a name, each with all values that it takes
Row = TypeVar("Row")
BRACES = re.compile(r"\{([^{}]*)\}")
SHOWN = 4  # names that an error proposes
MOST_PATTERNS = 10_000  # that braces may stand for
LONG = 300  # characters of a name that is compared with no other one


# ---- many names in little room


def grouped(names: Iterable[str]) -> list[str]:
    """Returns fewer names: names that differ in one number or word only become one, with both values in a shell's braces.

    The order is that of the first names; layer1.conv and layer2.conv become layer{1,2}.conv.
    """
    found: dict[object, list[Parts]] = {}  # by what the names have in common: all but numbers and words
    for name in dict.fromkeys(names):
        alone = len(name) > LONG or re.search(r"[{}]|\.\.", name)
        parts = [name] if alone else re.findall(r"\d+|[^\W\d_]+|[\W_]", name)
        alike = name if alone else tuple("" if part.isalnum() else part for part in parts)
        found.setdefault(alike, []).append(tuple((part,) for part in parts))
    return ["".join(map(_braced, parts)) for same in found.values() for parts in _merged(same)]


def _merged(names: list[Parts]) -> list[Parts]:
    """Merges names, split into parts with a tuple of values each, that differ in one part, until no two of them do."""
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
    """Writes the values of one part: a single one as it is, several in braces, three or more consecutive numbers as `1..3`."""
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
    """Returns `write` applied to as many of the first names as `fits` accepts, followed by the number of names left out.

    `fits`: whether these texts have room. If all names fit, no number follows.
    """
    whole = write(names)
    if fits(whole):
        return whole
    least, most = 0, len(names)  # the first fits, or nothing does; the second does not
    while most - least > 1:
        tried = (least + most) // 2
        least, most = (tried, most) if fits(_and_more(write(names[:tried]), len(names) - tried)) else (least, tried)
    return _and_more(write(names[:least]), len(names) - least)


def _and_more(texts: list[str], more: int) -> list[str]:
    return [*texts, f"and {more} more" if texts else f"{more} layers"]


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
    """Cuts a text into parts of at most `room` characters, after one of / . _ or a space where possible."""
    return [part for word in re.findall(r"[^/._ ]*[/._ ]*", text) for part in re.findall(f".{{1,{room}}}", word)]


# ---- a name that a user typed


def others_of(plan: PlanRecord) -> Callable[[str, Iterable[str]], list[str]]:
    """Returns a function (name of a row, names of its layers) -> further names by which users may know these layers.

    These are the names of their ONNX nodes and of their weights ("conv1.weight").
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
    """Returns the rows that `wanted` names: by a name, else by a pattern, else as a part of the names of a single row.

    Patterns are a shell's (`layer3.*`, `conv[12]`) with braces (`layer{1..3}/conv`). `names`: gives a row's names; `others`:
    gives further names, which messages do not propose. `what`: the kind of thing that is named, for messages. Raises
    ValueError if no row fits, or if `wanted` is a part of several rows' names.
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
    """Returns a function that says whether a name fits the pattern `text`: a shell's pattern, with braces as `grouped` writes
    them.
    """
    pieces = [_values(part) if i % 2 else [part] for i, part in enumerate(BRACES.split(text))]
    patterns = ["".join(p) for p in product(*pieces)] if math.prod(map(len, pieces)) <= MOST_PATTERNS else [text]
    plain = {p for p in patterns if not re.search(r"[*?[]", p)}
    others = [re.compile(fnmatch.translate(p)) for p in patterns if p not in plain]
    return lambda name: name in plain or any(p.match(name) for p in others)


def _values(text: str) -> list[str]:
    """Returns the values that stand in braces: `1..3,7` gives 1, 2, 3 and 7, as texts."""
    values: list[str] = []
    for item in text.split(","):
        ends = re.fullmatch(r"(\d{1,4})\.\.(\d{1,4})", item)
        values += map(str, range(int(ends[1]), int(ends[2]) + 1)) if ends else [item]
    return values


def _few(names: Sequence[str]) -> str:
    return first_of([*map(printable, names)], SHOWN)
