"""Warpgroups' asynchronous products and the copies of TMA that feed them, in a simulated SM.

A product (HGMMA) waits until the four warps of its warpgroup have issued it; each sub-core's tensor core takes 16 of its 64
rows. So all four are busy with one product for N / 2 clocks, and products follow each other in the order of their issue. Its
operands come through the port: A's 2,048 bytes, where shared memory holds them, and 32 columns of B at a time, at most a
product ahead of the one that is multiplied. Among many, a product so takes max(N / 2, its bytes / 128) clocks.

Copies of TMA fill a ring of stages. A producer is not simulated: it asks for a stage as soon as all warps have released one,
and its bytes arrive at L2's rate. SYNCS.PHASECHK waits for the next stage of the warp; SYNCS.ARRIVE releases those whose
products a wait has covered.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.simulator.machine import Bulk
from benchmarks.simulator.sass import GMMA, Instruction
from benchmarks.simulator.steps import DRAIN, EMPTY, FULL, GROUP_WARPS, ISSUE, Step

NEVER = 1 << 60
ARRIVING = 2048  # bytes of a stage that arrive, and are written to shared memory, at once


@dataclass(frozen=True, slots=True)
class Ring:
    """The ring of stages that TMA fills. `held`: bytes of a stage; `drawn`: the bytes of these that this SM draws from L2 (a
    cluster shares some); `stages`: the number of stages that fit.
    """

    held: int
    drawn: int
    stages: int


def ring(once: Sequence[Instruction], warpgroups: int, smem: int, drawn: int = 0) -> Ring | None:
    """Returns the ring for the consumers' iteration, in which a block's warpgroups multiply different rows by the same columns;
    None if no instruction waits for an mbarrier. ValueError if not one stage fits.
    """
    waits = sum(i.opcode.startswith("SYNCS.PHASECHK") and not i.predicate for i in once)
    products = [(i, m) for i in once if (m := GMMA.match(i.opcode))]
    if not waits or not products:
        return None
    m64 = len({i.operands[0] for i, _ in products})  # of a warpgroup
    held = 0.0
    for i, m in products:
        columns, k = int(m["n"]), int(m["k"])
        held += columns * k * 2 / m64
        if i.operands[1].startswith("gdesc"):
            held += warpgroups * 64 * k * (9 / 8 if m["sparse"] else 2)  # 2:4: half of the values, a bit of metadata for each
    stage = round(held / waits)
    if (stages := smem // stage) < 1:
        raise ValueError(f"a stage takes {stage} bytes: expected more than {smem} bytes of shared memory")
    return Ring(stage, drawn or stage, stages)


class Product:
    """A product of a warpgroup: the number of warps that have issued it, the clock from which its operands may be read, the
    number of parts that were read, the clocks at which tensor cores begin it and at which its sums are ready.
    """

    __slots__ = ("step", "warpgroup", "warps", "begin", "part", "started", "done")

    def __init__(self, step: Step, warpgroup: int) -> None:
        self.step, self.warpgroup = step, warpgroup
        self.warps, self.begin, self.part, self.started, self.done = 0, 0, 0, 0, NEVER


class Progress:
    """A warp's progress: products issued; groups in flight, by their last product; groups that a wait has found done; stages
    waited for and released.
    """

    __slots__ = ("issued", "groups", "covered", "waited", "released")

    def __init__(self) -> None:
        self.issued, self.covered, self.waited, self.released = 0, 0, 0, 0
        self.groups: deque[Product] = deque()


class Warpgroups:
    """The products and rings of an SM's blocks. `per_stage`: groups of products that read a stage."""

    def __init__(self, warps: int, blocks: int, bulk: Bulk, path: Sequence[Step], filled: Ring | None) -> None:
        if warps % GROUP_WARPS:
            raise ValueError(f"{warps} warps multiply: expected a multiple of {GROUP_WARPS}, they do so as warpgroups")
        self.bulk, self.ring, self.block_warps = bulk, filled, warps
        self.of = [Progress() for _ in range(warps * blocks)]
        self.open: list[dict[int, Product]] = [{} for _ in range(warps * blocks // GROUP_WARPS)]
        self.queue: deque[Product] = deque()
        self.free = self.may_read = 0  # clocks: tensor cores are free; they began the last product
        waits = sum(step.kind == FULL for step in path)
        self.per_stage = max(1, sum(step.commits for step in path) // max(1, waits))
        self.landed: list[list[int]] = [[] for _ in range(blocks)]  # for each stage so far, the clock at which it is full

    # ---- warps

    def until(self, number: int, step: Step) -> int:
        """Returns the clock before which a warp cannot go on."""
        progress = self.of[number]
        if step.kind == DRAIN and len(progress.groups) > step.allowed:
            return progress.groups[-1 - step.allowed].done
        if step.kind == FULL and self.ring:
            landed = self.landed[number // self.block_warps]
            return landed[progress.waited] if progress.waited < len(landed) else NEVER
        return 0

    def issue(self, number: int, step: Step, clock: int) -> bool:
        """Issues a step of a warpgroup; returns whether it released a stage, so that copies may be asked for."""
        progress = self.of[number]
        if step.kind == ISSUE:
            self.multiply(number, progress, step, clock)
        elif step.kind == DRAIN:
            while len(progress.groups) > step.allowed:
                progress.groups.popleft()
                progress.covered += 1
        elif step.kind == FULL:
            progress.waited += 1
        elif step.kind == EMPTY:
            progress.released = progress.covered // self.per_stage
        return step.kind == EMPTY

    def multiply(self, number: int, progress: Progress, step: Step, clock: int) -> None:
        group = number // GROUP_WARPS
        product = self.open[group].setdefault(progress.issued, Product(step, group))
        product.warps += 1
        product.begin = max(product.begin, clock + step.latency)
        if product.warps == GROUP_WARPS:
            self.queue.append(self.open[group].pop(progress.issued))
        progress.issued += 1
        if step.commits:
            progress.groups.append(product)

    # ---- the port

    @property
    def soonest(self) -> int:
        """Returns the clock at which the next part of operands may be read."""
        return max(self.queue[0].begin, self.may_read) if self.queue else NEVER

    def read(self, clock: int) -> tuple[int, int | None]:
        """Reads the next part of operands; returns (clocks of the port that it takes, the warpgroup whose product's end is
        known now or None).
        """
        product = self.queue[0]
        parts = product.step.parts
        taken = parts[product.part]
        starts = max(self.free, clock + taken)
        if product.part == 0:
            product.started = starts
        product.part += 1
        self.free = (
            starts + product.step.tensor * product.part // len(parts) - product.step.tensor * (product.part - 1) // len(parts)
        )
        if product.part < len(parts):
            return taken, None
        self.queue.popleft()
        self.may_read = product.started
        product.done = self.free + self.bulk.depth
        return taken, product.warpgroup

    # ---- copies

    def wanted(self, block: int) -> int:
        """Returns how many stages of a block's ring may be asked for now."""
        if not self.ring:
            return 0
        released = min(p.released for p in self.of[block * self.block_warps : (block + 1) * self.block_warps])
        return released + self.ring.stages - len(self.landed[block])

    def asked(self, block: int, clock: int, free: float) -> tuple[list[tuple[int, int, int]], float]:
        """Asks for a block's next stage; returns ([(clock at which a piece arrives, the stage's number for its last piece else
        -1, clocks of the port)], the clock at which L2 is free again).
        """
        assert self.ring
        pieces = max(1, self.ring.held // ARRIVING)
        wavefronts = round(self.ring.held / pieces / 128 * self.bulk.write_port)
        number, found = len(self.landed[block]), []
        self.landed[block].append(NEVER)
        for piece in range(pieces):
            free = max(clock + self.bulk.latency, free) + self.ring.drawn / pieces / self.bulk.l2
            found.append((math.ceil(free), number if piece == pieces - 1 else -1, wavefronts))
        return found, free
