"""One iteration's instructions, decoded once for the simulation: their kind, pipe, wavefronts and waits."""

import math
import re
from functools import lru_cache

from benchmarks.simulator.machine import Machine, interval
from benchmarks.simulator.sass import GMMA, Instruction

PLAIN, LOAD, STORE, COPY, GLOBAL, SYNC, COUNTED, COMMIT, OTHER = range(9)
# Steps of warpgroups: a product, the wait for products, the wait for a stage of TMA's copies, a stage's release.
ISSUE, DRAIN, FULL, EMPTY = range(9, 13)
GROUP_WARPS = 4
PART = 32  # columns of B that are read at a time
# fmt: off
KINDS = {
    "LDS": LOAD, "LDSM": LOAD, "LDL": LOAD, "ATOMS": LOAD, "STS": STORE, "STSM": STORE, "STL": STORE, "LDGSTS": COPY,
    "LDG": GLOBAL, "LD": GLOBAL, "ATOM": GLOBAL, "ATOMG": GLOBAL, "STG": STORE, "ST": STORE, "RED": STORE, "REDG": STORE,
    "BAR": SYNC, "DEPBAR": COUNTED, "LDGDEPBAR": COMMIT,
}
# fmt: on
ALU = frozenset("IADD3 LOP3 ISETP SEL LEA SHF IMNMX PRMT IABS VIADD VIADDMNMX VIMNMX FSETP FSEL FMNMX PLOP3 MOV F2FP".split())
FMA = frozenset("FFMA FADD FMUL HADD2 HMUL2 HFMA2".split())
XU = frozenset("MUFU I2F F2I F2F I2I POPC FLO BREV".split())
TENSOR_PIPE, ALU_PIPE, FMA_PIPE, XU_PIPE, NO_PIPE = range(PIPES := 5)


class Step:
    """An instruction of the simulated path, decoded once."""

    __slots__ = (
        *"at kind stall waits write read after pipe interval latency wavefronts simple".split(),
        *"allowed counted tensor parts commits".split(),
    )

    def __init__(self, at: int, i: Instruction, machine: Machine, wavefronts: int | None) -> None:
        root = i.opcode.split(".")[0]
        self.at = at
        self.kind = PLAIN if i.nothing else KINDS.get(root, OTHER if i.write_barrier is not None else PLAIN)
        self.stall = max(i.stall, 2 if i.yields else 1)
        self.waits = tuple(b for b in range(6) if i.wait_mask >> b & 1)
        self.write, self.read = i.write_barrier, i.read_barrier
        self.after: tuple[int, ...] = ()  # products whose results it reads
        self.pipe, self.interval = _pipe(root, i, machine)
        self.latency = machine.constant_latency if root == "LDC" else machine.other_latency
        self.wavefronts = usual_wavefronts(i) if wavefronts is None else wavefronts
        self.simple = False  # waits for nothing but its pipe
        self.counted, self.allowed = 0, 0
        self.tensor = self.interval if self.pipe == TENSOR_PIPE else 0  # clocks of the tensor core
        self.parts: tuple[int, ...] = ()
        self.commits = False  # ends a group of products
        self._of_a_warpgroup(root, i, machine)
        if self.kind == COUNTED:
            self.counted = int(i.operands[0].removeprefix("SB"))
            self.allowed = int(i.operands[1], 16) if len(i.operands) > 1 else 0
            self.waits += tuple(int(digit) for digit in re.findall(r"\d", "".join(i.operands[2:])))  # "{4,3}": none of those

    def _of_a_warpgroup(self, root: str, i: Instruction, machine: Machine) -> None:
        """Fills the fields of a warpgroup's instruction. `parts`: clocks of the port for A, if shared memory holds it, and the
        first 32 columns of B; then for each further 32 columns.
        """
        if root == "SYNCS" and not i.nothing:
            tried = ".PHASECHK" in i.opcode
            self.kind = EMPTY if ".ARRIVE" in i.opcode else FULL if tried and not i.predicate else PLAIN
        elif i.pending is not None:
            self.kind, self.allowed = DRAIN, i.pending
        elif m := GMMA.match(i.opcode):
            self.kind, self.tensor, self.latency = ISSUE, interval(machine, i), machine.to_port
            columns, k = int(m["n"]), int(m["k"])
            of_a = 2048 if i.operands[1].startswith("gdesc") else 0
            bytes_ = [2 * k * min(PART, columns - at) + (of_a if not at else 0) for at in range(0, columns, PART)]
            self.parts = tuple(math.ceil(size / machine.port_bytes) for size in bytes_)
            self.commits = "gsb0" in i.operands


def _pipe(root: str, i: Instruction, machine: Machine) -> tuple[int, int]:
    """Returns (pipe, clocks for which the instruction takes it)."""
    if i.mma and not GMMA.match(i.opcode):
        return TENSOR_PIPE, interval(machine, i)
    if root == "IMAD":
        return FMA_PIPE, machine.imad_interval
    for names, pipe, clocks in (
        (ALU, ALU_PIPE, machine.alu_interval),
        (FMA, FMA_PIPE, machine.fma_interval),
        (XU, XU_PIPE, machine.xu_interval),
    ):
        if root in names:
            return pipe, clocks
    return NO_PIPE, 0


def usual_wavefronts(i: Instruction) -> int:
    """Returns the wavefronts, 128 bytes each, of a memory instruction without bank conflicts, whose lanes access neighbouring
    words.
    """
    parts = i.opcode.split(".")
    if parts[0] in ("LDSM", "STSM"):
        return int(parts[-1]) if parts[-1].isdigit() else 1
    return 4 if "128" in parts else 2 if "64" in parts else 1


@lru_cache(maxsize=32)
def steps(path: tuple[Instruction, ...], machine: Machine, wavefronts: tuple[tuple[int, int], ...]) -> tuple[Step, ...]:
    """Returns the decoded instructions, each with the products whose results it reads: of its own iteration or, if none
    precedes it there, of the iteration before.
    """
    given = dict(wavefronts)
    found = tuple(Step(n, i, machine, given.get(i.address)) for n, i in enumerate(path))
    writer: dict[str, int] = {}
    for _ in range(2):
        for step, i in zip(found, path, strict=True):
            step.after = tuple({writer[name] for name in (*i.reads, *i.writes) if name in writer})
            waits = step.waits or step.after or step.kind == COUNTED or step.kind >= ISSUE
            step.simple = not (waits or LOAD <= step.kind <= GLOBAL)
            for name in i.writes:
                if step.pipe == TENSOR_PIPE:
                    writer[name] = step.at
                else:
                    writer.pop(name, None)
    return found
