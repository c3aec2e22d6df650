"""The types of a record's fields: what tactics.codec reads and writes, each with its bounds."""

from __future__ import annotations

from typing import Annotated

from tactics.codec import As, Check, Text, WholeNumber
from tactics.format import Format, Key
from tactics.tactic import IN_PLACE, Tactic

ALIGN = 256  # bytes, of whatever has memory of its own, in a file's arena and in the activations'
LARGEST = 1 << 62  # no size, offset or time is larger


def _format(text: str) -> Format:
    fmt = Format.parse(text)
    if str(fmt) != text:
        raise ValueError(text)
    return fmt


def _planned(text: str) -> Tactic | None:
    return None if text == IN_PLACE else Tactic.parse(text)


Size = Annotated[int, WholeNumber(0, LARGEST)]
Count = Annotated[int, WholeNumber(1, 2**31 - 1)]
Number = Annotated[float, Check("a number", lambda v: abs(v) < LARGEST)]
Time = Annotated[float, Check("a positive number", lambda v: 0 < v < LARGEST)]
Single = Annotated[float, Check("an FP32 number", lambda v: abs(v) < 3.5e38)]
Exponent = Annotated[int, WholeNumber(-(2**31), 2**31 - 1)]
Value = Annotated[int, WholeNumber(-LARGEST, LARGEST)]
LayerFormat = Annotated[Format, As("a format such as fp16:hwc8", _format, str)]
LayoutKey = Annotated[Key, As("a memory layout such as fp16:last64", Key.parse, str)]
TacticName = Annotated[Tactic, As("the name of a tactic", Tactic.parse, str)]
PlannedTactic = Annotated[Tactic | None, As(f"the name of a tactic, or {IN_PLACE}", _planned, lambda t: str(t or IN_PLACE))]
Shape4 = tuple[Count, Count, Count, Count]
Span = tuple[Size, Size]  # offset, number of bytes
Named = tuple[Text, Text]


def padded(nbytes: int) -> int:
    """Up to the next multiple of ALIGN."""
    return -(-nbytes // ALIGN) * ALIGN
