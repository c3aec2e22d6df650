"""A kernel's main loop in its steady state, and its tiles, from the clocks of a simulated SM (sm.py)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.simulator.machine import BULK_SWEEP, CENTRE, LOADED_SWEEP, OLDEST, SUB_CORES, SWEEP, Machine, Residency, Sweep
from benchmarks.simulator.sass import GMMA, Instruction, Program
from benchmarks.simulator.sm import Course, Sm
from benchmarks.simulator.state import REASONS
from benchmarks.simulator.steps import COPY, FULL, GLOBAL, GROUP_WARPS, ISSUE, LOAD, Step, steps
from benchmarks.simulator.warpgroups import Ring
from cuda_kernels.shares import Share

STAGES = 8  # stages over which the steady state is averaged
WARM = 4  # stages before them


@dataclass(frozen=True, slots=True)
class Steady:
    """A steady state, averaged over at least eight stages: clocks from one iteration of the main loop to a block's next; the
    shares of them in which tensor cores and the port are busy; the share of issue slots that are used. For each instruction of
    an iteration: `issued_at`, the clock after its iteration's start at which a warp issues it; `waited`, the clocks that it
    waited, by reason.
    """

    clocks_per_stage: float
    mma_share: float
    port_share: float
    issue_share: float
    instructions: tuple[Instruction, ...]
    issued_at: tuple[float, ...]
    waited: tuple[Mapping[str, float], ...]


def points_of(once: Sequence[Instruction]) -> tuple[Sweep, ...]:
    """Returns the points of the sweep for a loop; loops with asynchronous products also sweep Bulk."""
    return (*SWEEP, *LOADED_SWEEP, *(BULK_SWEEP if any(GMMA.match(i.opcode) for i in once) else ()))


def steady(
    program: Program,
    r: Residency,
    machine: Machine,
    sweep: Sweep = CENTRE,
    ring: Ring | None = None,
) -> Steady:
    """Returns the steady state of a program's main loop. `ring`: the stages that TMA fills, whose producer is not simulated;
    without it these stages are always full. Raises NoMainLoop, and ValueError for products whose rate the table lacks.
    """
    return steady_of(program.iteration(program.main_loop), r, machine, sweep, ring=ring)


def steady_of(
    once: Sequence[Instruction],
    r: Residency,
    machine: Machine,
    sweep: Sweep = CENTRE,
    wavefronts: Mapping[int, int] | None = None,
    stages: int = STAGES,
    warm: int = WARM,
    ring: Ring | None = None,
) -> Steady:
    """Does the work of `steady` for the instructions of one iteration. `wavefronts`: address -> wavefronts of memory
    instructions with bank conflicts. `warm`: iterations before the counted ones; a loop with hardly any memory instructions
    takes many until their queues are full.
    """
    path = steps(tuple(once), machine, tuple((wavefronts or {}).items()))
    sm = Sm(Course(path, 0, len(path) - 1), r, machine, sweep, ring)
    warps = len(sm.warps)
    sm.run(warm * warps)
    sm.slots = [[0] * (2 + len(REASONS)) for _ in path]
    sm.run(stages * warps)
    marks = sorted(clock for warp in sm.warps for clock in warp.marks)
    span = marks[(warm + stages) * warps - 1] - marks[warm * warps - 1]
    busy = warps * sum(s.tensor for s in path) / SUB_CORES
    clocks = max(span / stages, busy)  # a span may begin in the middle of an iteration, and end between two
    port = warps * sum(_port(s, machine, sweep) for s in path)
    if ring:
        waits = sum(s.kind == FULL for s in path)
        port += r.blocks * waits * ring.held / machine.port_bytes * sweep.bulk.write_port
    return Steady(
        clocks,
        busy / clocks,
        port / clocks,
        warps * len(path) / SUB_CORES / clocks,
        tuple(once),
        tuple(s[1] / max(1, s[0]) for s in sm.slots),
        tuple({name: s[2 + n] / max(1, s[0]) for n, name in enumerate(REASONS) if s[2 + n]} for s in sm.slots),
    )


def _port(s: Step, machine: Machine, sweep: Sweep) -> float:
    """Returns the clocks that a step takes of the port."""
    if s.kind == ISSUE:
        return sum(s.parts) / GROUP_WARPS
    if s.kind == COPY:
        return max(machine.port_interval, sweep.copy) + s.wavefronts
    return max(machine.port_interval, s.wavefronts) if LOAD <= s.kind <= GLOBAL else 0


def tile_clocks(program: Program, stages: int, r: Residency, machine: Machine, sweep: Sweep = CENTRE) -> int:
    """Returns the clocks from the start of an SM's blocks to the end of the last one. Each block runs `stages` iterations of
    the main loop and the code before and behind it on its commonest path, where other loops count once; all loads come from L2.
    """
    if stages < 1:
        raise ValueError(f"{stages} stages: expected one or more")
    loop = program.main_loop
    before, behind = program.around(loop)
    once = program.iteration(loop)
    path = steps(before + once + behind, machine, ())
    sm = Sm(Course(path, len(before), len(before) + len(once) - 1, stages), r, machine, sweep)
    sm.run(stages * len(sm.warps))
    return max(warp.marks[-1] for warp in sm.warps)


def share_of(once: Sequence[Instruction], r: Residency, machine: Machine, swept: Sequence[Sweep] = SWEEP) -> Share:
    """Returns the share of the tensor cores' time over the sweep and at its centre, for the instructions of one iteration. With
    two warps, "youngest" and "oldest" arbitration choose the same one.
    """
    few = r.warps * r.blocks <= 2 * SUB_CORES
    points = (CENTRE, *(sweep for sweep in swept if not (few and sweep.arbitration == OLDEST)))
    centre, *found = (steady_of(once, r, machine, sweep).mma_share for sweep in points)
    return Share(min(centre, *found), centre, max(centre, *found))
