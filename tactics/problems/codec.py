"""Problems as JSON and back, driven by the fields of the dataclasses: what does not fit a field is refused by its name.

{"type": "ConvProblem", field: value, ...}; fields with their default are left out; tuples are lists; infinity, which JSON has
not, is the text "inf" or "-inf".
"""

from __future__ import annotations

import math
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import get_args, get_origin, get_type_hints

from tactics.problems.problem import Problem

KINDS = {kind.__name__: kind for kind in get_args(Problem)}
LARGEST = 2**31 - 1  # of a problem's whole numbers: kernels take them in 32 bits
DEEPEST = 4  # lists in lists, of a library function's attributes
INFINITE = {"inf": math.inf, "-inf": -math.inf}


def to_json(problem: Problem) -> dict:
    """A problem as plain data."""
    return {"type": type(problem).__name__, **_record(problem)}


def from_json(data) -> Problem:
    """The inverse of to_json. Raises ValueError with a sentence for what no problem is."""
    kind = KINDS.get(data.get("type")) if isinstance(data, dict) and isinstance(data.get("type"), str) else None
    if kind is None:
        raise ValueError(f"problem: expected a record with a type, one of {', '.join(KINDS)}, got {str(data)[:60]}")
    try:
        return _parsed({k: v for k, v in data.items() if k != "type"}, kind, kind.__name__)
    except ArithmeticError as e:  # a stride or a number of groups that is 0
        raise ValueError(f"{kind.__name__}: its sizes make no sense: {e}") from None


def plain(value):
    """A field's value, or a library function's attribute, as JSON has it."""
    if is_dataclass(value):
        return _record(value)
    if isinstance(value, float) and math.isinf(value):
        return "inf" if value > 0 else "-inf"
    return [plain(v) for v in value] if isinstance(value, (list, tuple)) else value


def _record(record) -> dict:
    given = ((f, getattr(record, f.name)) for f in fields(record))
    return {f.name: plain(v) for f, v in given if f.default is MISSING or v != f.default}


@cache
def _hints(kind: type) -> dict[str, object]:
    return get_type_hints(kind)


def _parsed(value, hint, at: str):
    """A JSON value as what a field's type hint says."""
    if is_dataclass(hint):
        return _dataclass(value, hint, at)
    if get_origin(hint) is tuple:
        inner = get_args(hint)
        many = inner[-1] is Ellipsis
        if not isinstance(value, list) or not (many or len(value) == len(inner)):
            raise ValueError(f"{at}: expected a list{'' if many else f' of {len(inner)}'}, got {str(value)[:60]}")
        hints = inner[:1] * len(value) if many else inner
        return tuple(_parsed(v, h, at) for v, h in zip(value, hints, strict=True))
    if hint is object:
        return _attribute(value, at, DEEPEST)
    if hint is float and isinstance(value, str) and value in INFINITE:
        return INFINITE[value]
    if type(value) is not hint and not (hint is float and type(value) is int):
        raise ValueError(f"{at}: expected {hint.__name__}, got {str(value)[:60]}")
    if type(value) is int and abs(value) > LARGEST:
        raise ValueError(f"{at}: expected a number of at most 31 bits, got {str(value)[:60]}")
    return value


def _dataclass(value, kind: type, at: str):
    hints = _hints(kind)
    needed = {f.name for f in fields(kind) if f.default is MISSING}
    if not isinstance(value, dict) or not needed <= set(value) <= set(hints):
        expected = ", ".join(hints)
        raise ValueError(f"{at}: expected a record of {expected}, got {str(value)[:60]}")
    return kind(**{name: _parsed(v, hints[name], f"{at}.{name}") for name, v in value.items()})


def _attribute(value, at: str, deep: int):
    """A text, number, truth value or null, or a list of them."""
    if isinstance(value, list) and deep:
        return tuple(_attribute(v, at, deep - 1) for v in value)
    if isinstance(value, (str, bool, float, type(None))) or (type(value) is int and abs(value) < 2**63):
        return INFINITE.get(value, value) if isinstance(value, str) else value
    raise ValueError(f"{at}: expected an attribute of a library function, got {str(value)[:60]}")
