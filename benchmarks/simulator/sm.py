"""An SM's clocks over a kernel's main loop: when each instruction issues, and its waits.

Each of four sub-cores issues one instruction a clock, of one of its warps, in each warp's order. A warp waits for its stall
count, for scoreboards, for a product's result that it reads, for a free pipe, for room among its sub-core's memory
instructions, and at barriers. Memory instructions go through one port, 128 bytes a clock: first in, first out within a
sub-core, sub-cores in turn; a copy (LDGSTS) takes the port for its request and, an L2 latency later, for its data. Hopper's
asynchronous products and TMA's copies are in warpgroups.py.

    warps -> sub-core: scheduler -> tensor core, ALU, FMA, XU
                                 -> queue of memory instructions -> port of the SM -> results, copies from L2

Reasons to wait have the names of Nsight Compute's warp states.
"""

import math
from collections import deque
from collections.abc import Sequence
from random import Random
from typing import NamedTuple

from benchmarks.simulator.machine import (
    ROUND_ROBIN,
    SUB_CORES,
    YOUNGEST,
    Machine,
    Residency,
    Sweep,
)
from benchmarks.simulator.state import (
    BARRIER,
    GMMA,
    LONG,
    MATH,
    MIO,
    NEVER,
    NOT_SELECTED,
    SHORT,
    WAIT,
    Core,
    Group,
    Warp,
)
from benchmarks.simulator.steps import (
    COMMIT,
    COPY,
    COUNTED,
    DRAIN,
    GLOBAL,
    GROUP_WARPS,
    ISSUE,
    LOAD,
    OTHER,
    SYNC,
    TENSOR_PIPE,
    Step,
)
from benchmarks.simulator.warpgroups import Ring, Warpgroups


def begins(r: Residency, busy: int, shift: int) -> list[int]:
    """Returns the clock at which each warp begins: blocks are spread over the `busy` clocks of an iteration; with a `shift`
    each block begins a random part of these later, and each warp up to 63 more.
    """
    random, found = Random(shift), list[int]()
    for block in range(r.blocks):
        later = random.randrange(busy + 1) if shift else 0
        found += [busy * block // r.blocks + later + (random.randrange(64) if shift else 0) for _ in range(r.warps)]
    return found


class Course(NamedTuple):
    """The path of a warp: steps `first` to `last` are a loop; `repeats`: of the loop, 0 for ever."""

    path: Sequence[Step]
    first: int
    last: int
    repeats: int = 0


class Sm:
    """The state of one simulated SM."""

    def __init__(self, course: Course, r: Residency, machine: Machine, sweep: Sweep, ring: Ring | None = None) -> None:
        path, first, last, repeats = course
        self.path, self.first, self.last, self.machine, self.sweep = path, first, last, machine, sweep
        self.cores = [Core() for _ in range(SUB_CORES)]
        self.warps = []
        busy = sum(s.tensor for s in path[first : last + 1]) * r.warps // SUB_CORES
        for number, begin in enumerate(begins(r, 0 if repeats else busy, sweep.shift)):
            self.warps.append(warp := Warp(number, number // r.warps, begin))
            self.cores[warp.core].warps.append(warp)
        for core in self.cores:
            core.next = 0 if core.warps else NEVER
        self.round_robin = sweep.arbitration == ROUND_ROBIN
        if sweep.arbitration == YOUNGEST:
            for core in self.cores:
                core.warps.reverse()
        self.block_warps = r.warps
        self.arrived = [(0, 0)] * r.blocks  # for each block: (warps at its barrier, clock of the last arrival)
        self.port_free, self.port_next, self.turn = 0, NEVER, 0
        # Data on their way from L2, in order: (clock, warp, group of copies, wavefronts), or (clock, None, (block, stage), ..)
        self.fills: deque = deque()
        self.fill_free: float = 0
        asynchronous = any(step.kind == ISSUE for step in path)
        self.groups = Warpgroups(r.warps, r.blocks, sweep.bulk, path, ring) if asynchronous else None
        self.l2_latency = (sweep.l2_latency or machine.l2_latency) + sweep.shift
        self.fill_bytes = sweep.bulk.l2 if asynchronous else machine.fill_bytes
        self.repeats = repeats
        self.slots: list[list[int]] = []  # for each step: issues, clocks after its iteration's start, clocks waited by reason
        if self.groups:
            for block in range(r.blocks):
                self.ask(block, 0)

    def run(self, marks: int) -> None:
        """Runs until warps have begun `marks` iterations in all, or ended. A sub-core's actions show at the port, or in other
        sub-cores, some clocks later at the earliest: for that time each runs by itself.
        """
        alone = min(self.machine.to_port, self.sweep.barrier)
        while marks > 0:
            clock = min(self.port_next, *(core.next for core in self.cores))
            if clock >= NEVER:
                raise ValueError("the simulated warps wait for each other: a scoreboard that nothing releases, or a barrier")
            if self.port_next <= clock:
                self.serve(clock)
            end = clock + alone
            for core in self.cores:
                while core.next < end and (core.next < self.port_next or core.next <= clock):
                    marks -= self.choose(core, core.next)

    def choose(self, core: Core, clock: int) -> int:
        """Issues one instruction, if one of the sub-core's warps may. Returns 1 if its warp begins another iteration, or
        ends.
        """
        warps, done, issued = core.warps, 0, False
        due = [warp for warp in warps if warp.next <= clock]
        if len(due) > 1:
            self.put_first(core, due)
        for warp in due:
            if issued:
                warp.next = clock + 1  # looked at again; why it waits is found then
                continue
            step = self.path[warp.at]
            until, reason = (core.pipes[step.pipe], MATH) if step.simple else self.blocked(warp, core, step, clock)
            if self.slots:
                self.account(warp, step, clock)
            if until > clock:
                warp.next, warp.reason = until, reason
                continue
            warp.reason = NOT_SELECTED
            issued = True
            done = self.issue(warp, core, step, clock)
            core.last = warp.number
        core.next = warps[0].next if len(warps) == 1 else min([warp.next for warp in warps])
        return done

    def put_first(self, core: Core, due: list[Warp]) -> None:
        """Puts the warp to try first in front; the others stay in the order of the sub-core's warps."""
        last = core.last
        if self.round_robin:
            if due[0].number <= last:
                due.sort(key=lambda warp: warp.number <= last)
        elif due[0].number != last:
            due.sort(key=lambda warp: warp.number != last)

    def account(self, warp: Warp, step: Step, clock: int) -> None:
        """Adds the clocks since the last look to the reason that was found then."""
        if warp.since < clock:
            self.slots[step.at][2 + warp.reason] += clock - warp.since
            warp.since = clock

    def blocked(self, warp: Warp, core: Core, step: Step, clock: int) -> tuple[int, int]:
        """Returns (clock before which the warp cannot issue, the reason); a clock of now or earlier if it can."""
        for b in step.waits:
            if board := warp.boards[b]:
                until, reason = max(board)
                if until > clock:
                    return until, reason
                board.clear()
        if step.kind == COUNTED and len(board := warp.boards[step.counted]) > step.allowed:
            until, reason = max(board[: len(board) - step.allowed])
            if until > clock:
                return until, reason
            del board[: len(board) - step.allowed]
        for product in step.after:
            if warp.ready.get(product, 0) > clock:
                return warp.ready[product], WAIT
        if self.groups and step.kind >= DRAIN and (until := self.groups.until(warp.number, step)) > clock:
            return until, GMMA if step.kind == DRAIN else LONG
        if core.pipes[step.pipe] > clock:
            return core.pipes[step.pipe], MATH
        if LOAD <= step.kind <= GLOBAL and len(core.queue) >= self.sweep.queue:
            return NEVER, MIO
        return clock, NOT_SELECTED

    def issue(self, warp: Warp, core: Core, step: Step, clock: int) -> int:
        warp.free = warp.next = warp.since = clock + step.stall
        core.pipes[step.pipe] = clock + step.interval
        kind = step.kind
        if step.pipe == TENSOR_PIPE:
            done = clock + step.interval + self.machine.mma_depth
            warp.ready[step.at] = done
            self.release(warp, step, done, clock + step.interval)
        elif LOAD <= kind <= GLOBAL:
            self.send(warp, core, step, clock)
        elif kind == OTHER:
            self.release(warp, step, clock + step.latency, clock + step.latency)
        elif kind == SYNC:
            self.arrive(warp, clock)
        elif kind == COMMIT:
            self.commit(warp, step, clock)
        elif kind >= ISSUE and self.groups:
            if self.groups.issue(warp.number, step, clock):
                self.ask(warp.block, clock)
            self.port_next = min(self.port_next, max(self.port_free, self.groups.soonest))
            self.release(warp, step, clock + step.latency, clock + self.machine.operands_read)
        if self.slots and warp.marks:
            slot = self.slots[step.at]
            slot[0] += 1
            slot[1] += clock - warp.marks[-1]
        return self.advance(warp, clock)

    def advance(self, warp: Warp, clock: int) -> int:
        """Goes on to the warp's next step. Returns 1 if another iteration begins, or the path ends."""
        if warp.at == self.last and (not self.repeats or len(warp.marks) + 1 < self.repeats):
            warp.at = self.first
        else:
            warp.at += 1
            if warp.at < len(self.path):
                return 0
            warp.next = NEVER
        warp.marks.append(clock + 1)
        return 1

    @staticmethod
    def release(warp: Warp, step: Step, written: int, read: int, reason: int = SHORT) -> None:
        """Releases scoreboards at known clocks."""
        if step.write is not None:
            warp.boards[step.write].append([written, reason])
        if step.read is not None:
            warp.boards[step.read].append([read, reason])

    def arrive(self, warp: Warp, clock: int) -> None:
        warp.arrived, warp.reason = True, BARRIER
        count, last = self.arrived[warp.block]
        self.arrived[warp.block] = count + 1, max(last, clock)
        if count + 1 < self.block_warps:
            warp.next = NEVER
            return
        going_on = max(last, clock) + self.sweep.barrier
        self.arrived[warp.block] = 0, 0
        for other in self.warps[warp.block * self.block_warps : (warp.block + 1) * self.block_warps]:
            other.arrived = False
            other.free = other.next = max(other.free, going_on)
            core = self.cores[other.core]
            core.next = min(core.next, other.next)

    def commit(self, warp: Warp, step: Step, clock: int) -> None:
        """Closes the warp's group of copies; its scoreboard is released when all copies have landed."""
        board = [clock, LONG]
        if step.write is not None:
            warp.boards[step.write].append(board)
        group = warp.copies
        if group.under_way:
            board[0] = NEVER
            group.board, warp.copies = board, Group()
        else:
            board[0] = max(clock, group.landed, warp.committed)

    def send(self, warp: Warp, core: Core, step: Step, clock: int) -> None:
        """Queues a memory instruction; the clocks at which its scoreboards are released are known when it leaves the queue."""
        written, read = [NEVER, LONG if step.kind == GLOBAL else SHORT], [NEVER, MIO]
        if step.write is not None:
            warp.boards[step.write].append(written)
        if step.read is not None:
            warp.boards[step.read].append(read)
        group = warp.copies
        group.under_way += step.kind == COPY
        core.queue.append((clock + self.machine.to_port, clock, warp, step, written, read, group))
        self.port_next = min(self.port_next, max(self.port_free, core.request, core.queue[0][0]))

    def serve(self, clock: int) -> None:
        """Serves the port's next request at this clock, or data from L2, which wait while there are requests, but not for
        ever.
        """
        if self.port_free <= clock:
            landing = clock - self.fills[0][0] if self.fills else -1
            if landing > self.sweep.hold or not (self.request(clock) or self.operands(clock)) and landing >= 0:
                _, warp, group, wavefronts = self.fills.popleft()
                self.port_free = clock + wavefronts
                if warp is None:
                    self.filled(group, self.port_free)
                else:
                    self.landed(warp, group, self.port_free)
        soonest = self.fills[0][0] if self.fills else NEVER
        if self.groups:
            soonest = min(soonest, self.groups.soonest)
        for core in self.cores:
            if core.queue:
                soonest = min(soonest, max(core.queue[0][0], core.request))
        self.port_next = max(soonest, self.port_free)

    def request(self, clock: int) -> bool:
        """Takes the next sub-core's request; returns whether there was one."""
        for n in range(SUB_CORES):
            core = self.cores[(self.turn + n) % SUB_CORES]
            if core.queue and max(core.queue[0][0], core.request) <= clock:
                self.turn = (self.turn + n + 1) % SUB_CORES
                self.grant(core, clock)
                return True
        return False

    def operands(self, clock: int) -> bool:
        """Reads a part of the next asynchronous product's operands; returns whether it could."""
        if not self.groups or self.groups.soonest > clock:
            return False
        taken, ended = self.groups.read(clock)
        self.port_free = clock + taken
        if ended is not None:
            self.wake_all(GROUP_WARPS * ended, GROUP_WARPS, clock)
        return True

    def ask(self, block: int, clock: int) -> None:
        """Begins TMA's copies to the free stages of a block."""
        while self.groups and self.groups.wanted(block):
            pieces, self.fill_free = self.groups.asked(block, clock, self.fill_free)
            self.fills.extend((at, None, (block, stage), wavefronts) for at, stage, wavefronts in pieces)
        if self.fills:
            self.port_next = min(self.port_next, max(self.port_free, self.fills[0][0]))

    def wake_all(self, first: int, number: int, clock: int) -> None:
        for warp in self.warps[first : first + number]:
            self.wake(warp, clock)

    def filled(self, piece: tuple[int, int], clock: int) -> None:
        """Records the arrival of a piece (block, stage) of a stage; with its last piece the stage is full."""
        block, stage = piece
        if self.groups and stage >= 0:
            self.groups.landed[block][stage] = clock
            self.wake_all(block * self.block_warps, self.block_warps, clock)

    def landed(self, warp: Warp, group: Group, clock: int) -> None:
        group.under_way -= 1
        group.landed = max(group.landed, clock)
        if not group.under_way and group.board:
            group.board[0] = warp.committed = max(group.landed, warp.committed)
            self.wake(warp, clock)

    def wake(self, warp: Warp, clock: int) -> None:
        """Looks again at a warp that waited for something unknown until now."""
        if warp.next >= NEVER and not warp.arrived and warp.at < len(self.path):
            warp.next = clock
            core = self.cores[warp.core]
            core.next = min(core.next, clock)

    def grant(self, core: Core, clock: int) -> None:
        """Lets a sub-core's first memory instruction leave its queue."""
        m = self.machine
        _, issued, warp, step, written, read, group = core.queue.popleft()
        core.request = clock + m.address_interval
        taken = max(m.port_interval, step.wavefronts)
        done = clock + taken + m.shared_latency
        operands = max(issued + m.operands_read, clock)
        if step.kind == COPY:
            taken = max(m.port_interval, self.sweep.copy)
            operands = clock + m.copy_read - m.to_port
            arrives = max(clock + self.l2_latency, math.ceil(self.fill_free))
            self.fill_free = arrives + math.ceil(step.wavefronts * m.port_bytes / self.fill_bytes)
            self.fills.append((arrives, warp, group, step.wavefronts))
        elif step.kind == GLOBAL:
            arrives = max(clock + self.l2_latency, math.ceil(self.fill_free))
            self.fill_free = done = arrives + math.ceil(step.wavefronts * m.port_bytes / self.fill_bytes)
        self.port_free = clock + taken
        written[0], read[0] = done, operands
        for other in core.warps:
            self.wake(other, clock)
