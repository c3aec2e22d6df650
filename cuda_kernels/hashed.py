"""Frozen records that are keys of caches: each computes its hash once, where a dataclass would do so for every look-up."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any


class Hashed:
    """The base of a frozen dataclass with slots."""

    __slots__ = ("_hash",)
    _hash: int
    _fields: Callable[[Any], Any]

    def __init_subclass__(cls) -> None:
        cls.__hash__ = Hashed.__hash__  # type: ignore[method-assign]  # in the class itself, so that dataclass keeps it
        if names := cls.__dict__.get("__slots__"):
            cls._fields = attrgetter(*names)

    def __hash__(self) -> int:
        try:
            return self._hash
        except AttributeError:
            found = hash(type(self)._fields(self))
            object.__setattr__(self, "_hash", found)
            return found
