"""A base for frozen records that are keys of caches: it computes the hash once, where a dataclass would do so at every
look-up.
"""

from collections.abc import Callable
from functools import cache
from operator import attrgetter
from typing import Any


class Hashed:
    """The base of a frozen dataclass; copies and pickles are made from its fields alone. Without slots, it may also have a
    `functools.cached_property`."""

    __slots__ = ("_hash",)
    _hash: int

    def __init_subclass__(cls) -> None:
        cls.__hash__ = Hashed.__hash__  # type: ignore[method-assign]  # in the class itself, so that dataclass keeps it

    def __hash__(self) -> int:
        try:
            return self._hash
        except AttributeError:
            object.__setattr__(self, "_hash", hash(self._values()))
            return self._hash

    def __reduce__(self) -> tuple:
        return type(self), self._values()

    def _values(self) -> tuple:
        return _getter(type(self))(self)  # type: ignore[arg-type]


@cache
def _getter(kind: type) -> Callable[[Any], tuple]:
    """Returns a function that gets the values of all fields of a dataclass, which has several."""
    return attrgetter(*kind.__match_args__)  # type: ignore[attr-defined]
