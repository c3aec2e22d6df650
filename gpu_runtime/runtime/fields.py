"""The types of a record's fields: what tactics.codec reads and writes, each with its bounds."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from tactics import codec
from tactics.codec import As, Check, Whole
from tactics.format import DTYPES, Format, Key
from tactics.problems.array_functions import FUNCTIONS
from tactics.tactic import IN_PLACE, Tactic

ALIGN = 256  # bytes, of whatever has memory of its own, in a file's arena and in the activations'
LARGEST = 1 << 62  # no size, offset or time is larger
LONGEST = 16_384  # characters of a text: tables and paragraphs are made of them
MOST_SHARED = 256 << 10  # bytes of shared memory: no GPU has more
INTEGERS = {  # kinds of arguments -> the least and the most that they may be
    "arena": (0, LARGEST), "weights": (0, LARGEST), "nonfinite": (0, 0), "i32": (-(2**31), 2**31 - 1),
    "i64": (-(2**63) + 1, 2**63 - 1),
}  # fmt: skip


def _format(text: str) -> Format:
    fmt = Format.parse(text)
    if str(fmt) != text:
        raise ValueError(text)
    return fmt


def _planned(text: str) -> Tactic | None:
    return None if text == IN_PLACE else Tactic.parse(text)


def _argument(value: list[object]) -> tuple[str, float]:
    kind, v = value
    if isinstance(v, int) and not isinstance(v, bool) and (limits := INTEGERS.get(str(kind))) and limits[0] <= v <= limits[1]:
        return str(kind), v
    if kind == "f32" and isinstance(v, (int, float)) and not isinstance(v, bool) and abs(v) < 3.5e38:
        return str(kind), v
    raise ValueError(kind)


Text = Annotated[str, Check(f"a text of at most {LONGEST} characters", lambda v: len(v) <= LONGEST)]
Size = Annotated[int, Whole(0, LARGEST)]
Count = Annotated[int, Whole(1, 2**31 - 1)]
Number = Annotated[float, Check("a number", lambda v: abs(v) < LARGEST)]
Time = Annotated[float, Check("a positive number", lambda v: 0 < v < LARGEST)]
Single = Annotated[float, Check("an FP32 number", lambda v: abs(v) < 3.5e38)]
Exponent = Annotated[int, Whole(-(2**31), 2**31 - 1)]
Dtype = Annotated[str, codec.one_of(tuple(DTYPES))]
Function = Annotated[str, codec.one_of(tuple(FUNCTIONS))]
KernelName = Annotated[str, Check("the name of a kernel", lambda v: re.fullmatch(r"[a-z][a-z0-9_]*", v) is not None)]
ValueName = Annotated[str, Check("a name in capitals", lambda v: re.fullmatch(r"[A-Z][A-Z0-9_]*", v) is not None)]
Value = Annotated[int, Whole(-LARGEST, LARGEST)]
LayerFormat = Annotated[Format, As("a format such as fp16:hwc8", _format, str)]
LayoutKey = Annotated[Key, As("a memory layout such as fp16:last64", Key.parse, str)]
TacticName = Annotated[Tactic, As("the name of a tactic", Tactic.parse, str)]
PlannedTactic = Annotated[Tactic | None, As(f"the name of a tactic, or {IN_PLACE}", _planned, lambda t: str(t or IN_PLACE))]
Argument = Annotated[tuple[str, float], As("a kernel's argument, [kind, value]", _argument, list, list)]
Shape4 = tuple[Count, Count, Count, Count]
Span = tuple[Size, Size]  # offset, number of bytes
ArrayArgument = tuple[Literal["arena", "weights"], Size, Dtype, tuple[Size, ...]]  # memory, offset, dtype, shape
Named = tuple[Text, Text]


def padded(nbytes: int) -> int:
    """Up to the next multiple of ALIGN."""
    return -(-nbytes // ALIGN) * ALIGN
