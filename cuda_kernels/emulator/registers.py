"""Assigns virtual registers to a compact register file.

PTX names every value anew; with one row each, a warp's registers would not fit the CPU's caches. Liveness is that of one
thread, so it holds under divergence too: lanes on another path own their lanes of every row. Linear scan over [first, last]
intervals, one pool for predicates, one for 32-bit rows, one for 64-bit rows.
"""

import heapq
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from cuda_kernels.emulator.operands import Micro


class Block(NamedTuple):
    """A basic block, code[start:end]: bit masks of registers that it reads before writing and that it writes; its
    successors.
    """

    start: int
    end: int
    uses: int
    defs: int
    successors: list[int]


def _blocks(code: Sequence[Micro], labels: set[int]) -> list[Block]:
    leaders = {0} | labels | {i + 1 for i, ins in enumerate(code) if ins.targets or ins.ends}
    starts = sorted(i for i in leaders if i < len(code))
    index = {start: b for b, start in enumerate(starts)}
    blocks = []
    for start, end in zip(starts, [*starts[1:], len(code)], strict=True):
        used = defined = 0
        for ins in code[start:end]:
            for v in ins.uses:
                used |= (1 << v) & ~defined
            for v in ins.defs:
                if ins.guard is not None:  # may keep the old value, which is a use
                    used |= (1 << v) & ~defined
                else:
                    defined |= 1 << v
        last = code[end - 1]
        successors = [index[t] for t in last.targets]
        if not last.ends and end < len(code):
            successors.append(index[end])
        blocks.append(Block(start, end, used, defined, successors))
    return blocks


def _liveness(blocks: list[Block]) -> tuple[list[int], list[int]]:
    """Returns the registers that are live before, and after, each block, as bit masks."""
    live_in, live_out = [block.uses for block in blocks], [0] * len(blocks)
    changed = True
    while changed:
        changed = False
        for b in range(len(blocks) - 1, -1, -1):
            out = 0
            for s in blocks[b].successors:
                out |= live_in[s]
            if out != live_out[b]:
                live_out[b] = out
                new = blocks[b].uses | (out & ~blocks[b].defs)
                if new != live_in[b]:
                    live_in[b], changed = new, True
    return live_in, live_out


def _bits(x: int) -> Iterator[int]:
    while x:
        low = x & -x
        yield low.bit_length() - 1
        x ^= low


def _intervals(code: Sequence[Micro], labels: set[int], n: int) -> tuple[list[int], list[int]]:
    """Returns the first and last live point of each of n virtual registers; a use is at 2i, a definition at 2i + 1."""
    first, last = [1 << 60] * n, [-1] * n

    def touch(v: int, at: int) -> None:
        if at < first[v]:
            first[v] = at
        if at > last[v]:
            last[v] = at

    blocks = _blocks(code, labels)
    for block, live_in, live_out in zip(blocks, *_liveness(blocks), strict=True):
        for v in _bits(live_in):
            touch(v, 2 * block.start)
        for v in _bits(live_out):
            touch(v, 2 * block.end)
        for i in range(block.start, block.end):
            for v in code[i].uses:
                touch(v, 2 * i)
            for v in code[i].defs:
                touch(v, 2 * i + 1)
    return first, last


def in_flight(code: Sequence[Micro]) -> None:
    """Keeps the registers of every wgmma alive until a wait, as if the wait read them: until then the hardware may."""
    flying = {v for m in code if m.kind == "WGMMA" for v in (*m.extra, m.o[3]) if v >= 0}
    for m in code:
        if m.kind == "WGMMA_WAIT":
            m.uses = (*m.uses, *flying)


def unfenced(code: Sequence[Micro], labels: set[int]) -> list[int]:
    """Returns the records of wgmma that are reached with one of their registers accessed since the last wgmma.fence.

    The first wgmma needs a fence too (PTX ISA, wgmma.fence, which names sums and A: CUTLASS writes metadata behind it). Other
    wgmmas and the waits access no register in that sense.
    """
    if not any(m.kind == "WGMMA" for m in code):
        return []
    blocks, every = _blocks(code, labels), -1
    dirty = [0] * len(blocks)  # at a block's start: bit masks, of all registers at the kernel's
    dirty[0], todo, found = every, [0], set[int]()
    visited = set[int]()
    while todo:
        b = todo.pop()
        visited.add(b)
        now = dirty[b]
        for i in range(blocks[b].start, blocks[b].end):
            m = code[i]
            if m.kind == "WGMMA":
                if any(v >= 0 and now >> v & 1 for v in m.extra):
                    found.add(i)
            elif m.kind == "WGMMA_FENCE":
                now = 0
            elif m.kind != "WGMMA_WAIT":
                for v in (*m.uses, *m.defs):
                    now |= 1 << v
        for s in blocks[b].successors:
            if dirty[s] | now != dirty[s] or s not in visited:
                dirty[s] |= now
                todo.append(s)
    return sorted(found)


def allocate(code: Sequence[Micro], labels: set[int], classes: list[str], pinned: set[int]) -> tuple[list[int], dict[str, int]]:
    """Returns the slot of every virtual register in its class ("p", "r" 32-bit, "d" 64-bit), and the number of slots per class.

    A result may reuse the slot of an operand whose last reader is the same instruction.
    """
    n = len(classes)
    first, last = _intervals(code, labels, n)
    for v in pinned:
        first[v], last[v] = -1, 2 * len(code) + 2
    slots, count = [0] * n, {"p": 0, "r": 0, "d": 0}
    free: dict[str, list[int]] = {"p": [], "r": [], "d": []}
    ending: list[tuple[int, int]] = []
    for v in sorted((v for v in range(n) if last[v] >= first[v]), key=first.__getitem__):
        while ending and ending[0][0] < first[v]:
            done = heapq.heappop(ending)[1]
            heapq.heappush(free[classes[done]], slots[done])
        kind = classes[v]
        if free[kind]:
            slots[v] = heapq.heappop(free[kind])
        else:
            slots[v] = count[kind]
            count[kind] += 1
        heapq.heappush(ending, (last[v], v))
    return slots, count
