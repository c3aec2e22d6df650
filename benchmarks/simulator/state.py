"""The state of a simulated SM's warps and sub-cores."""

from collections import deque

from benchmarks.simulator.machine import SUB_CORES
from benchmarks.simulator.steps import PIPES

NEVER = 1 << 60
WAIT, SHORT, LONG, MATH, MIO, BARRIER, NOT_SELECTED, GMMA = range(8)
REASONS = (
    "wait", "short scoreboard", "long scoreboard", "math pipe throttle", "mio throttle", "barrier", "not selected", "gmma",
)  # fmt: skip


class Group:
    """A warp's copies from one commit to the next: the number under way, the clock at which the last landed and, once the group
    is committed, the scoreboard entry that waits for them.
    """

    __slots__ = ("under_way", "landed", "board")

    def __init__(self) -> None:
        self.under_way, self.landed = 0, 0
        self.board: list[int] | None = None


class Warp:
    """A warp's place on its path, and its scoreboards: each is a list of [clock of release, reason]; `marks`: the clocks at
    which its iterations began.
    """

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
