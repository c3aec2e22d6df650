"""The types of records' fields, which tactics.codec reads and writes, each with its bounds; and the Python view of records: a
short text, plain data on request, and the shape and type of an input or output.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import Annotated, Any

import numpy as np

from gpu_runtime.text import printable
from tactics import codec
from tactics.codec import As, Check, Text, whole_number
from tactics.format import Format, Key
from tactics.tactic import IN_PLACE, Tactic

ALIGN = 256  # bytes, of every tensor or section with memory of its own, in a file's arena and in the activations'
MOST_FIELDS, MOST_ITEMS, MOST_TEXT = 9, 3, 60  # of a repr; items of a collection in it, characters of a text
LARGEST = 1 << 62  # no size, offset or time is larger


def _format(text: str) -> Format:
    fmt = Format.parse(text)
    if str(fmt) != text:
        raise ValueError(text)
    return fmt


def _planned(text: str) -> Tactic | None:
    return None if text == IN_PLACE else Tactic.parse(text)


Size = Annotated[int, whole_number(0, LARGEST)]
Count = Annotated[int, whole_number(1, 2**31 - 1)]
Number = Annotated[float, Check("a number", lambda v: abs(v) < LARGEST)]
Time = Annotated[float, Check("a positive number", lambda v: 0 < v < LARGEST)]
Single = Annotated[float, Check("an FP32 number", lambda v: abs(v) < 3.5e38)]
Exponent = Annotated[int, whole_number(-(2**31), 2**31 - 1)]
Value = Annotated[int, whole_number(-LARGEST, LARGEST)]
LayerFormat = Annotated[Format, As("a format such as fp16:hwc8", _format, str)]
LayoutKey = Annotated[Key, As("a memory layout such as fp16:last64", Key.parse, str)]
TacticName = Annotated[Tactic, As("the name of a tactic", Tactic.parse, str)]
PlannedTactic = Annotated[Tactic | None, As(f"the name of a tactic, or {IN_PLACE}", _planned, lambda t: str(t or IN_PLACE))]
Shape4 = tuple[Count, Count, Count, Count]
Span = tuple[Size, Size]  # offset, number of bytes
Named = tuple[Text, Text]


def padded(nbytes: int) -> int:
    """Rounds up to the next multiple of ALIGN bytes."""
    return -(-nbytes // ALIGN) * ALIGN


class Shown:
    """A base of frozen dataclasses that are declared with repr=False: it gives a short repr and `to_dict`."""

    __slots__ = ()

    def __repr__(self) -> str:
        """Returns a short text with the first fields whose values are not their defaults; a collection is shown by its size."""
        assert is_dataclass(self)
        parts = []
        for f in fields(self):
            value = getattr(self, f.name)
            default = f.default_factory() if f.default_factory is not MISSING else f.default
            if value != default and "derived" not in f.metadata:
                parts.append(f"{f.name}={_short(value)}")
        more = ", ..." if len(parts) > MOST_FIELDS else ""
        return printable(f"{type(self).__name__}({', '.join(parts[:MOST_FIELDS])}{more})")

    def to_dict(self) -> dict[str, Any]:
        """Returns the record for JSON: dictionaries, lists, texts and numbers."""
        found: dict[str, Any] = codec.to_json(type(self), self, defaults=True)
        return found


@dataclass(frozen=True, slots=True, repr=False)
class Told(Shown):
    """The base of results that have an account in words, `text`, which `print` shows."""

    text: str = field(default="", metadata=codec.DERIVED, kw_only=True)

    def __str__(self) -> str:
        return self.text


def _short(value: object) -> str:
    if isinstance(value, str):
        return repr(value if len(value) <= MOST_TEXT else f"{value[: MOST_TEXT - 3]}...")
    if isinstance(value, bytes):
        return f"<{len(value)} bytes>"
    if is_dataclass(value):
        return f"{type(value).__name__}(...)" if type(value).__str__ is object.__str__ else str(value)
    if isinstance(value, Collection) and (len(value) > MOST_ITEMS or any(is_dataclass(v) for v in value)):
        return f"<{len(value)} items>"
    return repr(float(f"{value:.9g}") if isinstance(value, float) else value)


class Batch(int):
    """The first size of an input or output that takes several sizes: as a number the one that the plan was optimized for.

    >>> Batch(8, (1, 64)), Batch(8, (1, 64)) + 1, Batch(2, (1, 4), (1, 2, 4))
    (1..64, 9, 1|2|4)
    """

    min: int
    max: int
    exact: tuple[int, ...]  # the sizes that it takes; empty: any from min to max

    def __new__(cls, opt: int, limits: tuple[int, int], exact: tuple[int, ...] = ()) -> Batch:
        made = super().__new__(cls, opt)
        (made.min, made.max), made.exact = limits, exact
        return made

    def __repr__(self) -> str:
        return "|".join(map(str, self.exact)) or f"{self.min}..{self.max}"

    __str__ = __repr__

    def __reduce__(self) -> tuple[Any, ...]:
        return Batch, (int(self), (self.min, self.max), self.exact)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """The array that a caller must give for an input, or gets for an output; the first size is a Batch where the engine takes
    several.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def __str__(self) -> str:
        return printable(f"{self.name} {'x'.join(map(str, self.shape)) or 'scalar'} {self.dtype}")
