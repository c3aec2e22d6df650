"""Assigns byte offsets in one arena from live ranges. Plain integers, deterministic.

Two blocks may share bytes when no step needs both. Placing them in the smallest arena is NP-hard; several greedy orders and a
few repairs of the best one (blocks that end at the top are placed earlier) usually reach the lower bound, which is the largest
sum of sizes alive in one step.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from gpu_runtime.runtime.fields import padded

REPAIRS = 32
MANY_PAIRS = 2_000_000  # pairs of blocks alive together; with more pairs, the orders and repairs take too long


@dataclass(frozen=True, slots=True)
class Block:
    """`nbytes` bytes needed from step `first` to step `last`, both included."""

    name: str
    nbytes: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Placement:
    """Byte offset of every block, in the order given. `total_bytes` is the arena's size; it is minimal when it equals
    `largest_live_bytes`, the most that is alive in one step. Both count sizes rounded up to ALIGN."""

    offsets: Mapping[str, int]
    total_bytes: int
    largest_live_bytes: int


def place(tensors: Sequence[Block]) -> Placement:
    """Returns offsets, multiples of ALIGN bytes, for blocks of different names."""
    blocks = [Block(b.name, padded(b.nbytes), b.first, b.last) for b in tensors]
    bound = max(_live(blocks, sorted({b.first for b in blocks})), default=0)
    offsets, total = _in_time(blocks) if _pairs(blocks) > MANY_PAIRS else _repaired(blocks, bound)
    return Placement({b.name: offsets[i] for i, b in enumerate(blocks)}, total, bound)


def _repaired(blocks: Sequence[Block], bound: int) -> tuple[dict[int, int], int]:
    """Returns (offsets by block, size of the arena): the best of several greedy orders, and of repairs in which blocks that end
    at the top go first.

    `bound`: no arena is smaller.
    """
    alive_with = _alive_with(blocks)
    found: list[tuple[int, list[int], dict[int, int]]] = []
    for key in _orders(blocks):
        order = sorted(range(len(blocks)), key=lambda i: (key(blocks[i]), i))
        offsets, total = _place_in_order(blocks, order, alive_with)
        found.append((total, order, offsets))
        if total == bound:
            break
    best_total, order, best = min(found, key=lambda row: row[0])
    for _ in range(REPAIRS):
        if best_total == bound:
            break
        offsets, total = _place_in_order(blocks, order, alive_with)
        if total < best_total:
            best, best_total = offsets, total
        top = [i for i in order if offsets[i] + blocks[i].nbytes == total]
        first = set(top)
        order = top + [i for i in order if i not in first]
    return best, best_total


def _orders(blocks: Sequence[Block]) -> tuple[Callable[[Block], Any], ...]:
    steps = sorted({b.first for b in blocks})
    live = _live(blocks, steps)
    crowds: dict[tuple[int, int], int] = {}

    def crowd(b: Block) -> int:
        span = bisect_left(steps, b.first), bisect_right(steps, b.last)
        if span not in crowds:
            crowds[span] = max(live[slice(*span)])
        return crowds[span]

    return (
        lambda b: -b.nbytes,
        lambda b: (-crowd(b), -b.nbytes),
        lambda b: -b.nbytes * (b.last - b.first + 1),
        lambda b: (b.first - b.last, -b.nbytes),
        lambda b: (b.first, -b.nbytes),
        lambda b: (-b.last, -b.nbytes),
    )


def _place_in_order(
    blocks: Sequence[Block], order: Sequence[int], alive_with: Sequence[Sequence[int]]
) -> tuple[dict[int, int], int]:
    """Places blocks in this order, each in the smallest sufficient gap between earlier blocks, or above them."""
    offsets: dict[int, int] = {}
    total = 0
    for i in order:
        taken = sorted((offsets[j], offsets[j] + blocks[j].nbytes) for j in alive_with[i] if j in offsets)
        size, end = blocks[i].nbytes, 0
        best: int | None = None
        best_gap: int | None = None
        for start, stop in taken:
            gap = start - end
            if gap >= size and (best_gap is None or gap < best_gap):
                best, best_gap = end, gap
            end = max(end, stop)
        offsets[i] = end if best is None else best
        total = max(total, offsets[i] + size)
    return offsets, total


def _alive_with(blocks: Sequence[Block]) -> list[list[int]]:
    """Returns, for every block, the non-empty blocks that share a live step with it."""
    found: list[list[int]] = [[] for _ in blocks]
    active: list[int] = []
    for i in sorted((i for i, b in enumerate(blocks) if b.nbytes), key=lambda i: (blocks[i].first, i)):
        active = [j for j in active if blocks[j].last >= blocks[i].first]
        for j in active:
            found[i].append(j)
            found[j].append(i)
        active.append(i)
    return found


def _live(blocks: Sequence[Block], steps: Sequence[int]) -> list[int]:
    """Returns the bytes alive at each of the ascending `steps`."""
    change = [0] * (len(steps) + 1)
    for b in blocks:
        change[bisect_left(steps, b.first)] += b.nbytes
        change[bisect_right(steps, b.last)] -= b.nbytes
    return [*accumulate(change[:-1])]


def _pairs(blocks: Sequence[Block]) -> int:
    """Counts the pairs of blocks that share a live step."""
    firsts, lasts = sorted(b.first for b in blocks), sorted(b.last for b in blocks)
    return sum(i - bisect_left(lasts, first) for i, first in enumerate(firsts))


def _in_time(blocks: Sequence[Block]) -> tuple[dict[int, int], int]:
    """Places too many live blocks fast: in the order of their first steps each goes to the smallest sufficient gap, and leaves
    a gap after its last step.
    """
    starts: dict[int, int] = {}  # start of a gap -> its end
    ends: dict[int, int] = {}
    gaps: list[tuple[int, int]] = []  # (size, start), ascending
    offsets: dict[int, int] = {}
    total = 0

    def take(start: int) -> int:
        end = starts.pop(start)
        del ends[end]
        del gaps[bisect_left(gaps, (end - start, start))]
        return end

    def leave(start: int, end: int) -> None:
        if start == end:
            return
        if start in ends:
            start = ends[start]
            take(start)
        if end in starts:
            end = take(end)
        starts[start], ends[end] = end, start
        insort(gaps, (end - start, start))

    events = [(b.first, 1, -b.nbytes, i) for i, b in enumerate(blocks)] + [(b.last + 1, 0, 0, i) for i, b in enumerate(blocks)]
    for _, begins, _, i in sorted(events):
        size = blocks[i].nbytes
        if not begins:
            leave(offsets[i], offsets[i] + size)
            continue
        at = bisect_left(gaps, (size, -1))
        if not size:
            offsets[i] = 0
        elif at < len(gaps):
            offsets[i] = gaps[at][1]
            leave(offsets[i] + size, take(offsets[i]))
        else:
            offsets[i] = ends.get(total, total)  # the last gap, if it ends at the top, grows
            if total in ends:
                take(offsets[i])
            total = offsets[i] + size
    return offsets, total
