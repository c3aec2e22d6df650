"""Values that share a key, in lists by that key."""

from collections.abc import Iterable
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


def grouped(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """Returns key -> its values, in the order of the pairs (key, value).

    >>> grouped((len(word), word) for word in ("a", "to", "b"))
    {1: ['a', 'b'], 2: ['to']}
    """
    found: dict[K, list[V]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found
