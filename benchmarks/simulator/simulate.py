"""An SM's clocks over a kernel's main loop: what issues when, and what waits for what.

Each of four sub-cores issues one instruction a clock, of one of its warps, in each warp's order. A warp waits for its stall
count, for scoreboards, for a product's result that it reads, for a free pipe, for room among its sub-core's memory
instructions, and at barriers. Memory instructions go through one port, 128 bytes a clock: first in, first out within a
sub-core, sub-cores in turn; a copy (LDGSTS) takes the port for its request and, an L2 latency later, for its data.

    warps -> sub-core: scheduler -> tensor core, ALU, FMA, XU
                                 -> queue of memory instructions -> port of the SM -> results, copies from L2

Reasons to wait have the names of Nsight Compute's warp states.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.simulator.machine import CENTRE, OLDEST, ROUND_ROBIN, SUB_CORES, SWEEP, YOUNGEST, Machine, Residency, Sweep
from benchmarks.simulator.sass import Instruction, Program
from benchmarks.simulator.steps import COMMIT, COPY, COUNTED, GLOBAL, LOAD, OTHER, PIPES, SYNC, TENSOR_PIPE, Step, steps
from cuda_kernels.shares import Share

STAGES = 8  # over which the steady state is averaged
WARM = 4  # stages before those
NEVER = 1 << 60
WAIT, SHORT, LONG, MATH, MIO, BARRIER, NOT_SELECTED = range(7)
REASONS = ("wait", "short scoreboard", "long scoreboard", "math pipe throttle", "mio throttle", "barrier", "not selected")


class Group:
    """Copies of a warp from one commit to the next: how many are under way, the clock at which the last landed, and, once it is
    committed, the entry of the scoreboard that waits for them."""

    __slots__ = ("under_way", "landed", "board")

    def __init__(self) -> None:
        self.under_way, self.landed = 0, 0
        self.board: list[int] | None = None


class Warp:
    """A warp's place and what it waits for. A scoreboard is a list of [clock of release, reason]; `marks`: clocks at which
    its iterations began."""

    __slots__ = (
        "number",
        "core",
        "block",
        "at",
        "free",
        "boards",
        "ready",
        "copies",
        "committed",
        "since",
        "reason",
        "next",
        "marks",
        "arrived",
    )

    def __init__(self, number: int, block: int, begin: int) -> None:
        self.number, self.block, self.core = number, block, number % SUB_CORES
        self.at, self.free, self.next = 0, begin, begin
        self.boards: list[list[list[int]]] = [[] for _ in range(6)]
        self.ready: dict[int, int] = {}
        self.copies = Group()  # not yet committed
        self.committed = 0
        self.since, self.reason = begin, WAIT
        self.marks: list[int] = []
        self.arrived = False


class Core:
    """A sub-core: its warps, the clocks at which its pipes are free, its memory instructions in order."""

    __slots__ = ("warps", "pipes", "queue", "next", "last", "request")

    def __init__(self) -> None:
        self.warps: list[Warp] = []
        self.pipes = [0] * PIPES
        self.queue: deque = deque()  # of (clock from which it may leave, warp, step, board entries)
        self.next, self.last, self.request = 0, -1, 0


@dataclass(frozen=True, slots=True)
class Steady:
    """A steady state, averaged over at least eight stages: clocks from one iteration of the main loop to a block's next, the
    shares of them at which tensor cores and the port are busy, and of issue slots that are used. By instruction of an
    iteration: when a warp issues it after its iteration's start, and the clocks that it waited, by reason."""

    clocks_per_stage: float
    mma_share: float
    port_share: float
    issue_share: float
    instructions: tuple[Instruction, ...]
    issued_at: tuple[float, ...]
    waited: tuple[Mapping[str, float], ...]


class Sm:
    """The state of one simulated SM."""

    def __init__(
        self, path: Sequence[Step], first: int, last: int, r: Residency, machine: Machine, sweep: Sweep, repeats: int = 0
    ) -> None:
        self.path, self.first, self.last, self.machine, self.sweep = path, first, last, machine, sweep
        self.cores = [Core() for _ in range(SUB_CORES)]
        self.warps = []
        busy = sum(s.interval for s in path[first : last + 1] if s.pipe == TENSOR_PIPE) * r.warps // SUB_CORES
        for number in range(r.warps * r.blocks):
            block = number // r.warps
            self.warps.append(warp := Warp(number, block, 0 if repeats else busy * block // r.blocks))
            self.cores[warp.core].warps.append(warp)
        for core in self.cores:
            core.next = 0 if core.warps else NEVER
        self.round_robin = sweep.arbitration == ROUND_ROBIN
        if sweep.arbitration == YOUNGEST:
            for core in self.cores:
                core.warps.reverse()
        self.block_warps = r.warps
        self.arrived = [(0, 0)] * r.blocks  # of each block: warps at its barrier, when the last came
        self.port_free, self.port_next, self.turn = 0, NEVER, 0
        self.fills: deque = deque()  # data on their way from L2: (clock, warp, group of copies, wavefronts), in order
        self.fill_free = 0
        self.repeats = repeats  # of the loop, 0 for ever
        self.slots: list[list[int]] = []  # of each step: issues, clocks after its iteration's start, clocks waited by reason

    def run(self, marks: int) -> None:
        """Until warps have begun so many iterations in all, or ended. What a sub-core does shows at the port, or in others, so
        many clocks later at the earliest: that far each goes on alone."""
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
        """Issue one instruction, if one of the sub-core's warps may. 1 where its warp begins another iteration, or ends."""
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
        """The warp to try first; the others stay in the order that the sub-core's warps have."""
        last = core.last
        if self.round_robin:
            if due[0].number <= last:
                due.sort(key=lambda warp: warp.number <= last)
        elif due[0].number != last:
            due.sort(key=lambda warp: warp.number != last)

    def account(self, warp: Warp, step: Step, clock: int) -> None:
        """Clocks since the last look, to the reason found then."""
        if warp.since < clock:
            self.slots[step.at][2 + warp.reason] += clock - warp.since
            warp.since = clock

    def blocked(self, warp: Warp, core: Core, step: Step, clock: int) -> tuple[int, int]:
        """(clock before which the warp cannot issue, why); no later than this clock where it can."""
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
        if self.slots and warp.marks:
            slot = self.slots[step.at]
            slot[0] += 1
            slot[1] += clock - warp.marks[-1]
        return self.advance(warp, clock)

    def advance(self, warp: Warp, clock: int) -> int:
        """To the next step. 1 where another iteration begins, or the path ends."""
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
        """Scoreboards at known clocks."""
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
        """Close the group of copies; its scoreboard is released when all have landed."""
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
        """Queue a memory instruction; its scoreboards are released at clocks that are known when it leaves."""
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
        """The port's next request at this clock, or data from L2: those wait while there are requests, but not for ever."""
        if self.port_free <= clock:
            landing = clock - self.fills[0][0] if self.fills else -1
            if landing > self.sweep.hold or not self.request(clock) and landing >= 0:
                _, warp, group, wavefronts = self.fills.popleft()
                self.port_free = clock + wavefronts
                self.landed(warp, group, self.port_free)
        soonest = self.fills[0][0] if self.fills else NEVER
        for core in self.cores:
            if core.queue:
                soonest = min(soonest, max(core.queue[0][0], core.request))
        self.port_next = max(soonest, self.port_free)

    def request(self, clock: int) -> bool:
        """Take the next sub-core's request, if one has any."""
        for n in range(SUB_CORES):
            core = self.cores[(self.turn + n) % SUB_CORES]
            if core.queue and max(core.queue[0][0], core.request) <= clock:
                self.turn = (self.turn + n + 1) % SUB_CORES
                self.grant(core, clock)
                return True
        return False

    def landed(self, warp: Warp, group: Group, clock: int) -> None:
        group.under_way -= 1
        group.landed = max(group.landed, clock)
        if not group.under_way and group.board:
            group.board[0] = warp.committed = max(group.landed, warp.committed)
            self.wake(warp, clock)

    def wake(self, warp: Warp, clock: int) -> None:
        """Look again at a warp that waits for what was not known."""
        if warp.next >= NEVER and not warp.arrived and warp.at < len(self.path):
            warp.next = clock
            core = self.cores[warp.core]
            core.next = min(core.next, clock)

    def grant(self, core: Core, clock: int) -> None:
        """A sub-core's first memory instruction leaves."""
        m = self.machine
        _, issued, warp, step, written, read, group = core.queue.popleft()
        core.request = clock + m.address_interval
        taken = max(m.port_interval, step.wavefronts)
        done = clock + taken + m.shared_latency
        operands = max(issued + m.operands_read, clock)
        if step.kind == COPY:
            taken = max(m.port_interval, self.sweep.copy)
            operands = clock + m.copy_read - m.to_port
            arrives = max(clock + m.l2_latency, self.fill_free)
            self.fill_free = arrives + math.ceil(step.wavefronts * m.port_bytes / m.fill_bytes)
            self.fills.append((arrives, warp, group, step.wavefronts))
        elif step.kind == GLOBAL:
            arrives = max(clock + m.l2_latency, self.fill_free)
            self.fill_free = done = arrives + math.ceil(step.wavefronts * m.port_bytes / m.fill_bytes)
        self.port_free = clock + taken
        written[0], read[0] = done, operands
        for other in core.warps:
            self.wake(other, clock)


def steady(
    program: Program,
    r: Residency,
    machine: Machine,
    sweep: Sweep = CENTRE,
    wavefronts: Mapping[int, int] | None = None,
    taken: Mapping[int, bool] | None = None,
    stages: int = STAGES,
) -> Steady:
    """The steady state of a program's main loop. `wavefronts`: by address, of memory instructions whose accesses are not all
    side by side (bank conflicts); `taken`: by address, of branches that are not as usual (Program.iteration). Raises
    NoMainLoop, and ValueError for products whose rate is not in the table."""
    if stages < STAGES:
        raise ValueError(f"{stages} stages: expected {STAGES} or more, fewer are no steady state")
    once = program.iteration(program.main_loop, taken)
    return steady_of(once, r, machine, sweep, wavefronts, stages)


def steady_of(
    once: Sequence[Instruction],
    r: Residency,
    machine: Machine,
    sweep: Sweep = CENTRE,
    wavefronts: Mapping[int, int] | None = None,
    stages: int = STAGES,
    warm: int = WARM,
) -> Steady:
    """`steady` of the instructions of one iteration. `warm`: iterations before those that count; a loop of hardly any memory
    instructions takes many until their queues are full."""
    path = steps(tuple(once), machine, tuple((wavefronts or {}).items()))
    sm = Sm(path, 0, len(path) - 1, r, machine, sweep)
    warps = len(sm.warps)
    sm.run(warm * warps)
    sm.slots = [[0] * (2 + len(REASONS)) for _ in path]
    sm.run(stages * warps)
    marks = sorted(clock for warp in sm.warps for clock in warp.marks)
    span = marks[(warm + stages) * warps - 1] - marks[warm * warps - 1]
    busy = warps * sum(s.interval for s in path if s.pipe == TENSOR_PIPE) / SUB_CORES
    clocks = max(span / stages, busy)  # a span may begin in the middle of an iteration, and end between two
    port = warps * sum(_port(s, machine, sweep) for s in path)
    return Steady(
        clocks,
        busy / clocks,
        port / clocks,
        warps * len(path) / SUB_CORES / clocks,
        tuple(once),
        tuple(s[1] / max(1, s[0]) for s in sm.slots),
        tuple({name: s[2 + n] / max(1, s[0]) for n, name in enumerate(REASONS) if s[2 + n]} for s in sm.slots),
    )


def _port(s: Step, machine: Machine, sweep: Sweep) -> int:
    """Clocks that a step takes of the port."""
    if s.kind == COPY:
        return max(machine.port_interval, sweep.copy) + s.wavefronts
    return max(machine.port_interval, s.wavefronts) if LOAD <= s.kind <= GLOBAL else 0


def tile_clocks(
    program: Program,
    stages: int,
    r: Residency,
    machine: Machine,
    sweep: Sweep = CENTRE,
    wavefronts: Mapping[int, int] | None = None,
    taken: Mapping[int, bool] | None = None,
) -> int:
    """Clocks from the start of an SM's blocks to the end of the last, each of so many iterations of the main loop, with what is
    before it and behind it on its commonest path: loops there count once, and all loads come from L2."""
    if stages < 1:
        raise ValueError(f"{stages} stages: expected one or more")
    loop = program.main_loop
    before, behind = program.around(loop, taken)
    once = program.iteration(loop, taken)
    path = steps(before + once + behind, machine, tuple((wavefronts or {}).items()))
    sm = Sm(path, len(before), len(before) + len(once) - 1, r, machine, sweep, stages)
    sm.run(stages * len(sm.warps))
    return max(warp.marks[-1] for warp in sm.warps)


def share_of_peak(
    program: Program,
    r: Residency,
    machine: Machine,
    wavefronts: Mapping[int, int] | None = None,
    taken: Mapping[int, bool] | None = None,
) -> Share:
    """Over the sweep and its centre, as `steady` has it."""
    return share_of(program.iteration(program.main_loop, taken), r, machine, wavefronts)


def share_of(once: Sequence[Instruction], r: Residency, machine: Machine, wavefronts: Mapping[int, int] | None = None) -> Share:
    """`share_of_peak` of the instructions of one iteration. Of two warps the youngest but one is the oldest."""
    few = r.warps * r.blocks <= 2 * SUB_CORES
    points = (CENTRE, *(sweep for sweep in SWEEP if not (few and sweep.arbitration == OLDEST)))
    centre, *found = (steady_of(once, r, machine, sweep, wavefronts).mma_share for sweep in points)
    return Share(min(centre, *found), centre, max(centre, *found))
