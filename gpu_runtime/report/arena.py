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


@dataclass(slots=True)
class _Open:
    first: int
    layer: int | None
    tensors: list[str]


Span = tuple[int, int]  # offset, bytes


def blocks(plan: PlanRecord) -> tuple[Block, ...]:
    """Every block of the arena, by when it is first written: an input from the start, an output to the end."""
    alive: dict[Span, _Open] = {(t.offset, t.nbytes): _Open(0, None, [t.name]) for t in plan.inputs}
    frees, found = dict(plan.frees), []
    writes = _writes(plan)
    for number in range(len(plan.steps)):
        for layer, span, name in writes[number]:
            block = alive.setdefault(span, _Open(number, layer, []))
            if name not in block.tensors:
                block.tensors.append(name)
        for offset, nbytes in frees.get(number, ()):
            gone = [s for s in alive if offset <= s[0] and s[0] + s[1] <= offset + nbytes]
            found += [_closed(s, alive.pop(s), number) for s in gone]
    found += [_closed(s, block, max(0, len(plan.steps) - 1)) for s, block in alive.items()]
    return tuple(sorted(found, key=lambda b: (b.first, b.offset)))


def _writes(plan: PlanRecord) -> list[list[tuple[int, Span, str]]]:
    """Of each step: the layers that it is, the memory that each writes, and the tensor."""
    writes: list[list[tuple[int, Span, str]]] = [[] for _ in plan.steps]
    for number, step in enumerate(plan.steps):
        for i in step.covers:
            for t in plan.layers[i].outputs:
                writes[number].append((i, (t.whole.offset, t.whole.nbytes), t.name))
    return writes


def _closed(span: Span, block: _Open, last: int) -> Block:
    return Block(*span, block.first, last, block.layer, tuple(map(printable, block.tensors)))
