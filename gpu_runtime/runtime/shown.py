"""Records as Python users see them: a short text each, and plain data on request."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

from gpu_runtime.text import printable
from tactics import codec

MOST_FIELDS, MOST_ITEMS, MOST_TEXT = 9, 3, 60  # of a repr; items of a collection in it, characters of a text


class Shown:
    """A base of frozen dataclasses that are declared with repr=False."""

    __slots__ = ()

    def __repr__(self) -> str:
        """The first fields whose values are not their defaults; collections by their size."""
        assert is_dataclass(self)
        parts = []
        for field in fields(self):
            value = getattr(self, field.name)
            default = field.default_factory() if field.default_factory is not MISSING else field.default
            if value != default and "derived" not in field.metadata:
                parts.append(f"{field.name}={_short(value)}")
        more = ", ..." if len(parts) > MOST_FIELDS else ""
        return printable(f"{type(self).__name__}({', '.join(parts[:MOST_FIELDS])}{more})")

    def to_dict(self) -> dict[str, Any]:
        """The record as JSON has it: dictionaries, lists, texts and numbers."""
        found: dict[str, Any] = codec.to_json(type(self), self, defaults=True)
        return found


def _short(value: object) -> str:
    if isinstance(value, str):
        return repr(value if len(value) <= MOST_TEXT else f"{value[: MOST_TEXT - 3]}...")
    if isinstance(value, bytes):
        return f"<{len(value)} bytes>"
    if is_dataclass(value):
        return f"{type(value).__name__}(...)" if type(value).__str__ is object.__str__ else str(value)
    if isinstance(value, Collection) and (len(value) > MOST_ITEMS or any(is_dataclass(v) for v in value)):
        return f"<{len(value)} items>"
    return repr(value)
