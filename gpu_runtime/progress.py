"""What a long call tells while it works."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Progress:
    """A stage, and what of it begins now: `done` of `total` items are ready; total 0: nobody counts them."""

    stage: str
    detail: str = ""
    done: int = 0
    total: int = 0


Listener = Callable[[Progress], None]


def ignore(progress: Progress) -> None:
    """Listens to nothing."""


def compiling(listener: Listener) -> Callable[[int, int], None]:
    """Tells a listener how many kernels are compiled, of those that no cache has."""
    return lambda done, total: listener(Progress("compile", "", done, total))
