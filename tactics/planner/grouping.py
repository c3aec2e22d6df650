"""Values that share a key, in lists by that key; and disjoint sets."""

from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")
R = TypeVar("R")


def grouped(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """Returns key -> its values, in the order of the pairs (key, value).

    >>> grouped((len(word), word) for word in ("a", "to", "b"))
    {1: ['a', 'b'], 2: ['to']}
    """
    found: dict[K, list[V]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found


def each_once(function: Callable[[V], R], items: Iterable[V]) -> list[R]:
    """Returns the function's result for each item; it is called once for an object that comes several times."""
    listed, known = list(items), dict[int, R]()
    for item in listed:
        if id(item) not in known:
            known[id(item)] = function(item)
    return [known[id(item)] for item in listed]


class Together(Generic[K]):
    """Disjoint sets of things; each set has one of its things as its root."""

    def __init__(self) -> None:
        self._parent: dict[K, K] = {}

    def root(self, thing: K) -> K:
        last = thing
        while last in self._parent:
            last = self._parent[last]
        while thing != last:  # shortens the path
            self._parent[thing], thing = last, self._parent[thing]
        return last

    def unite(self, a: K, b: K) -> None:
        first, second = self.root(a), self.root(b)
        if first != second:
            self._parent[second] = first
