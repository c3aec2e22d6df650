"""Virtual registers -> a compact register file.

PTX names every value anew; kept one row each, a warp's registers would not fit the CPU's caches. Liveness is that of one
thread, so it holds under divergence too: lanes on another path own their lanes of every row. Linear scan over [first, last]
intervals, one pool for predicates, one for 32-bit rows, one for 64-bit rows.
"""

from __future__ import annotations

import heapq


def _liveness(code, labels) -> list[tuple[int, int]]:
    """[(start, end)] per basic block, then live-in/live-out sets as bit masks."""
    n = len(code)
    leaders = {0} | set(labels)
    for i, ins in enumerate(code):
        if ins.targets or ins.ends:
            leaders.add(i + 1)
    starts = sorted(i for i in leaders if i < n)
    blocks = list(zip(starts, [*starts[1:], n], strict=True))
    index = {start: b for b, (start, _) in enumerate(blocks)}
    uses, defs, successors = [], [], []
    for start, end in blocks:
        used = defined = 0
        for ins in code[start:end]:
            for v in ins.uses:
                used |= (1 << v) & ~defined
            for v in ins.defs:
                if ins.guard is not None:  # may leave the old value: that is a use
                    used |= (1 << v) & ~defined
                else:
                    defined |= 1 << v
        last = code[end - 1]
        to = [index[t] for t in last.targets]
        if not (last.ends and last.guard is None) and end < n:
            to.append(index[end])
        uses.append(used), defs.append(defined), successors.append(to)
    live_in, live_out = list(uses), [0] * len(blocks)
    changed = True
    while changed:
        changed = False
        for b in range(len(blocks) - 1, -1, -1):
            out = 0
            for s in successors[b]:
                out |= live_in[s]
            if out != live_out[b]:
                live_out[b] = out
                new = uses[b] | (out & ~defs[b])
                if new != live_in[b]:
                    live_in[b], changed = new, True
    return [(start, end, i, o) for (start, end), i, o in zip(blocks, live_in, live_out, strict=True)]


def _bits(x: int):
    while x:
        low = x & -x
        yield low.bit_length() - 1
        x ^= low


def allocate(code, labels, classes: list[str], pinned: set[int]) -> tuple[list[int], dict[str, int]]:
    """Slot of every virtual register in its class ("p", "r" 32-bit, "d" 64-bit), and how many slots each class needs.

    A use lies at 2i and a definition at 2i + 1, so a result may take the place of an operand that ends there.
    """
    n = len(classes)
    first, last = [1 << 60] * n, [-1] * n

    def touch(v: int, at: int) -> None:
        if at < first[v]:
            first[v] = at
        if at > last[v]:
            last[v] = at

    for start, end, live_in, live_out in _liveness(code, labels):
        for v in _bits(live_in):
            touch(v, 2 * start)
        for v in _bits(live_out):
            touch(v, 2 * end)
        for i in range(start, end):
            for v in code[i].uses:
                touch(v, 2 * i)
            for v in code[i].defs:
                touch(v, 2 * i + 1)
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
