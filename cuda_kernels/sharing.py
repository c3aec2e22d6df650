"""Copies of constant arrays in device memory that several users share: one per array and device, while anyone holds it."""

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
    """The bytes of `array` at `address`, in `memory`. On a GPU `ready` is the event after the upload, and `stream` the one for
    which the memory was allocated. The array is kept, so that no other one takes its place in memory, and so its name."""

    array: np.ndarray
    address: int
    memory: Any
    ready: Any = None
    stream: Any = None


_copies: WeakValueDictionary[tuple[int, object], Copy] = WeakValueDictionary()
_lock = threading.Lock()


def shared(array: np.ndarray, place: object, made: Callable[[], Copy]) -> Copy:
    """The copy of `array` at that place, or a new one, which lasts as long as somebody holds it. An array that can be written
    is not shared: its copy would not follow."""
    if array.flags.writeable:
        return made()
    with _lock:
        found = _copies.get((id(array), place))
        if found is None:
            found = _copies[id(array), place] = made()
        return found


def _after_fork() -> None:
    """A thread that was not forked may have held the lock."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
