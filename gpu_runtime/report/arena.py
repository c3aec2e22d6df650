"""What lies where in the arena of activations, and from which launch to which."""

from __future__ import annotations

from dataclasses import dataclass

from gpu_runtime.runtime.plan_record import PlanRecord
from gpu_runtime.text import printable


@dataclass(frozen=True, slots=True)
class Block:
    """Memory of its own that holds `tensors`, one after the other, from before step `first` runs until step `last` has."""

    offset: int
    nbytes: int
    first: int
    last: int
    layer: int | None  # the first that writes it; None of an input
    tensors: tuple[str, ...]


def blocks(plan: PlanRecord) -> tuple[Block, ...]:
    """Every block of the arena, by when it is first written: an input from the start, an output to the end."""
    # (offset, bytes) -> (first step, first layer, names) of what is alive
    alive: dict[tuple[int, int], tuple[int, int | None, dict[str, None]]] = {}
    alive |= {(t.offset, t.nbytes): (0, None, {t.name: None}) for t in plan.inputs}
    frees, found = dict(plan.frees), list[Block]()

    def close(span: tuple[int, int], last: int) -> None:
        first, layer, names = alive.pop(span)
        found.append(Block(*span, first, last, layer, tuple(map(printable, names))))

    for number, step in enumerate(plan.steps):
        for i in step.covers:
            for t in plan.layers[i].outputs:
                alive.setdefault((t.whole.offset, t.whole.nbytes), (number, i, {}))[2][t.name] = None
        for offset, nbytes in frees.get(number, ()):
            for span in [s for s in alive if offset <= s[0] and s[0] + s[1] <= offset + nbytes]:
                close(span, number)
    for span in [*alive]:
        close(span, max(0, len(plan.steps) - 1))
    return tuple(sorted(found, key=lambda b: (b.first, b.offset)))
