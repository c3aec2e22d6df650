"""Shares copies of constant arrays in device memory: one copy per array and device, as long as anyone holds it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import numpy as np


@dataclass(eq=False)
class Copy:
    """The bytes of `array` at `address`, in `memory`.

    On a GPU `ready` is the event after the upload, and `stream` the one for which the memory was allocated. The array is kept
    alive so that no other array gets its id(), which is its key.
    """

    array: np.ndarray
    address: int
    memory: Any
    ready: Any = None
    stream: Any = None


_copies: WeakValueDictionary[tuple[int, object], Copy] = WeakValueDictionary()
_lock = threading.Lock()


def shared(array: np.ndarray, place: object, made: Callable[[], Copy]) -> Copy:
    """Returns the copy of `array` at that place, or a new one, which lasts as long as somebody holds it.

    A writable array is not shared: its copy would not follow changes.
    """
    if array.flags.writeable:
        return made()
    with _lock:
        found = _copies.get((id(array), place))
        if found is None:
            found = _copies[id(array), place] = made()
        return found


def _after_fork() -> None:
    """Replaces the lock, which a thread that was not forked may have held."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
