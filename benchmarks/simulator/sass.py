"""A cubin's machine code (SASS) as frozen instructions: their operands, their control words, and their loops.

nvdisasm writes the text; the control words, which it does not write, are the top bits of an instruction's 128: `high >> 41`
holds the stall count (4 bits), yield (1, 0 = yields), the scoreboards of write and read (3 each, 7 = none), the scoreboards
waited for (6, a mask) and the operands kept for reuse (4), alike on sm_80 to sm_120.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

CONTROL_BIT = 41  # of the upper 64 bits
NO_SCOREBOARD = 7
# An instruction: its address, perhaps a predicate, the mnemonic, operands, its lower 64 bits; the upper ones on the next line.
LINE = re.compile(
    r"^\s*/\*(?P<address>[0-9a-f]{4,})\*/\s+(?:@(?P<predicate>!?U?P\w+)\s+)?(?P<opcode>[A-Z][A-Za-z0-9_.]*)(?P<operands>[^;]*);"
    r"\s*/\* (?P<low>0x[0-9a-f]{16}) \*/\s*\n\s*/\* (?P<high>0x[0-9a-f]{16}) \*/"
    r"|^(?P<label>\.L\w+):\s*$"
    r"|^\.text\.(?P<function>\S+):\s*$"
    r"|^\s*\.target\s+(?P<sm>sm_\w+)",
    re.MULTILINE,
)
REGISTER = re.compile(r"\b(U?[RP])(\d+)\b((?:\.\w+)*)")  # not the zeros RZ, URZ, PT, UPT
LABEL = re.compile(r"\(?(\.L\w+)\)?")
NO_RESULT = re.compile(  # their first operand is not written
    r"(ST[SGL]?|STSM|RED|REDG|LDGSTS|LDGDEPBAR|DEPBAR|BAR|BRA|BRX|EXIT|NOP|BSSY|BSYNC|CALL|RET|WARPSYNC|CCTL\w*|MEMBAR|ERRBAR"
    r"|ARRIVES|UTMA\w+|UBLK\w+|SYNCS(?!\.PHASECHK)|WARPGROUP|PREEXIT|ACQBULK|YIELD|JMP|KILL|FENCE|BPT|NANOSLEEP)\b"
)
WORK = re.compile(  # with products, the purpose of a loop
    r"(LDS|LDSM|LDG|LDGSTS|LD|STS|STSM|STG|ST|RED|REDG|ATOM|ATOMG|BAR|UTMALDG|UBLKCP|SYNCS\.ARRIVE|WARPGROUP)\b"
)
# Of FP16 or BF16 by the type of the sums, and of whole numbers of 8 bits (IMMA) by their signs, of shapes with published rates.
MMA = re.compile(r"(HMMA|IMMA(?=\.16832|\.SP\.16864))\.(?P<sparse>SP\.)?(?P<shape>1688|168\d\d)\.(?P<of>F32|F16|[SU]8\.[SU]8)")
TENSOR = re.compile(r"(HGMMA|QGMMA|IGMMA|BGMMA|UTC\w*MMA|IMMA|DMMA|BMMA|QMMA|OMMA|HMMA)\b")
# An asynchronous product of a warpgroup, of FP16 or BF16; its last of a group names gsb0, a counter of groups in flight.
GMMA = re.compile(r"HGMMA\.(?P<sparse>SP\.)?64x(?P<n>\d+)x(?P<k>16|32)\.(?P<sum>F32|F16)(\.BF16)?$")
PENDING = re.compile(r"WARPGROUP\.DEPBAR\b")  # waits until at most its number of groups are in flight
BULK = re.compile(r"(UTMALDG|UBLKCP)\b")  # TMA's copies to shared memory
# Registers of a thread in (result, A, B, sum, metadata), by sparse and shape, but for sparse 16832 and 16864; of FP16 sums and
# results half.
MMA_REGISTERS = {
    (False, "1688"): (4, 2, 1, 4),
    (False, "16816"): (4, 4, 2, 4),
    (True, "16816"): (4, 2, 2, 4, 1),
    (False, "16832"): (4, 4, 2, 4),
}


class ToolMissing(Exception):
    """No nvdisasm is at hand; the message says how to get it."""


class NoMainLoop(ValueError):
    """The machine code has no loop over tensor core products that can be simulated."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction. `predicate` as written ("P0", "!PT", "" for none); `target`: the address that a branch goes to.
    `write_barrier` and `read_barrier`: the scoreboard (0 to 5) that is released when results are written or operands read,
    None where none is; `wait_mask`: bit i waits for scoreboard i. Registers by name, as "R4", "UR2", "P0"."""

    address: int
    opcode: str
    operands: tuple[str, ...]
    predicate: str
    target: int | None
    stall: int
    yields: bool
    write_barrier: int | None
    read_barrier: int | None
    wait_mask: int
    reuse: int

    @property
    def reads(self) -> tuple[str, ...]:
        return _registers(self.opcode, self.operands, self.predicate)[0]

    @property
    def writes(self) -> tuple[str, ...]:
        return _registers(self.opcode, self.operands, self.predicate)[1]

    @property
    def mma(self) -> bool:
        return TENSOR.match(self.opcode) is not None

    @property
    def bulk(self) -> bool:
        return BULK.match(self.opcode) is not None

    @property
    def pending(self) -> int | None:
        """The number of groups of asynchronous products that may go on behind this instruction; None if it waits for none."""
        return int(self.operands[1], 16) if PENDING.match(self.opcode) else None

    @property
    def nothing(self) -> bool:
        """Whether it is never executed: `@!PT LDS`, which ptxas writes in front of copies, only takes an issue slot."""
        return self.predicate in ("!PT", "!UPT")

    @property
    def conditional(self) -> bool:
        return bool(self.predicate) or any(name.startswith(("UP", "P")) for name in self.reads)

    def __str__(self) -> str:
        guard = f"@{self.predicate} " if self.predicate else ""
        return f"{guard}{self.opcode} {', '.join(self.operands)}".rstrip()


@dataclass(frozen=True, slots=True)
class Loop:
    """Instructions `first` to `last` of a program; the last one branches back to the first."""

    first: int
    last: int

    def __contains__(self, other: Loop) -> bool:
        return self != other and self.first <= other.first and other.last <= self.last


@dataclass(frozen=True, slots=True)
class Program:
    """A kernel's instructions in order."""

    name: str
    sm: str
    instructions: tuple[Instruction, ...]

    @property
    def registers(self) -> int:
        """The registers of a thread, as ptxas reports them: up to the highest that is named, and two that the hardware
        keeps.
        """
        named = (name for i in self.instructions for name in (*i.reads, *i.writes) if name[0] == "R")
        return 3 + max((int(name[1:]) for name in named), default=-1)

    @property
    def loops(self) -> tuple[Loop, ...]:
        """The loops, by their backward branches. Not counted are a branch to itself, as behind every kernel's end, and a branch
        into the middle of a loop from behind the kernel's end, where a wait for an mbarrier tries on.
        """
        at = {i.address: n for n, i in enumerate(self.instructions)}
        found: dict[int, int] = {}
        for n, i in enumerate(self.instructions):
            first = at.get(i.target) if i.target is not None and i.opcode.startswith("BRA") else None
            if first is not None and first < n and (i.conditional or not self._tries_on(n)):
                found[first] = max(n, found.get(first, 0))  # several branches to one head: one loop
        return tuple(Loop(first, last) for first, last in sorted(found.items()))

    def _tries_on(self, n: int) -> bool:
        """Whether this branch follows a loop of tries: SYNCS.PHASECHK and the branch back to it."""
        before = self.instructions[max(0, n - 2) : n]
        return [i.opcode.split(".")[:2] for i in before] == [["SYNCS", "PHASECHK"], ["BRA"]]

    def innermost(self, counted: Callable[[Instruction], bool]) -> dict[Loop, int]:
        """Returns loop -> number of the counted instructions in it, for the loops that have some and contain no other such
        loop.
        """
        found = {loop: sum(map(counted, self.instructions[loop.first : loop.last + 1])) for loop in self.loops}
        loops = [loop for loop, n in found.items() if n]
        return {loop: found[loop] for loop in loops if not any(other in loop for other in loops)}

    @property
    def main_loop(self) -> Loop:
        """Returns the innermost loop with the most tensor core products. Raises NoMainLoop."""
        products = self.innermost(lambda i: i.mma)
        if not products:
            what = "its products are unrolled" if any(i.mma for i in self.instructions) else "it has no tensor core products"
            raise NoMainLoop(f"{self.name}: no loop multiplies on tensor cores ({what}); expected a kernel with a loop over K")
        return max(products, key=lambda loop: products[loop])

    @property
    def in_flight(self) -> int | None:
        """The groups of asynchronous products that go on behind the shortest wait of the loops that multiply; None if there is
        no wait.
        """
        loops = [self.instructions[loop.first : loop.last + 1] for loop in self.innermost(lambda i: i.mma)]
        return min((i.pending for loop in loops for i in loop if i.pending is not None), default=None)

    @property
    def bulk_copies(self) -> int:
        """The number of TMA's copies to shared memory in an iteration of the producers' loop: the innermost one with most
        copies.
        """
        return max(self.innermost(lambda i: i.bulk).values(), default=0)

    def iteration(self, loop: Loop, taken: Mapping[int, bool] | None = None) -> tuple[Instruction, ...]:
        """Returns the instructions that a warp commonly issues in one iteration. Conditional branches out of the loop, and
        backwards inside it, are not taken; one ahead is taken unless it skips loads, copies, barriers or products. `taken`:
        address of a branch -> whether it is taken instead.
        """
        return self._path(loop.first, loop.last, taken or {})

    def around(self, loop: Loop, taken: Mapping[int, bool] | None = None) -> tuple[tuple[Instruction, ...], ...]:
        """Returns the instructions that a warp commonly issues (before the loop, behind it until the warp ends); other loops
        count once.
        """
        ends = [n for n, i in enumerate(self.instructions) if n > loop.last and i.opcode == "EXIT" and not i.predicate]
        end = ends[-1] if ends else len(self.instructions) - 1
        return self._path(0, loop.first - 1, taken or {}), self._path(loop.last + 1, end, taken or {})

    def _path(self, first: int, last: int, taken: Mapping[int, bool]) -> tuple[Instruction, ...]:
        at = {i.address: n for n, i in enumerate(self.instructions)}
        path, n = [], first
        while n <= last:
            i = self.instructions[n]
            path.append(i)
            n += 1
            if i.opcode == "EXIT" and not i.predicate:
                break
            if not i.opcode.startswith("BRA") or i.target is None or n > last:
                continue
            to = at[i.target]
            ahead = n <= to <= last
            usual = ahead and (not i.conditional or not any(map(_works, self.instructions[n:to])))
            if taken.get(i.address, usual):
                if to < n:
                    raise ValueError(f"{self.name}: a branch back, at {i.address:#x}, cannot be taken within one iteration")
                n = to
        return tuple(path)


def _works(i: Instruction) -> bool:
    return i.mma or WORK.match(i.opcode) is not None


def nvdisasm() -> str:
    """Returns the path of nvdisasm: of NVIDIA's wheel, or else on PATH. Raises ToolMissing."""
    for package, inside in (("nvidia.cu13", "bin"), ("nvidia.cuda_nvdisasm", "bin")):
        try:
            spec = importlib.util.find_spec(package)
        except ModuleNotFoundError:  # no package nvidia at all
            spec = None
        for folder in (spec.submodule_search_locations or []) if spec else []:
            if (wheel := Path(folder) / inside / "nvdisasm").exists():
                return str(wheel)
    if tool := shutil.which("nvdisasm"):
        return tool
    raise ToolMissing("nvdisasm is not installed, and reading machine code takes it: pip install 'nvidia-cuda-nvdisasm>=13.0'")


@lru_cache(maxsize=64)
def disassembly(cubin: bytes) -> str:
    """Returns nvdisasm's text with the encoding of each instruction. Raises ToolMissing, and ValueError for bytes that are no
    cubin.
    """
    tool = nvdisasm()
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([tool, "-c", "-hex", file.name], capture_output=True, text=True)
    if done.returncode:
        why = done.stderr.strip().replace(file.name, "it")
        raise ValueError(f"nvdisasm does not read these {len(cubin)} bytes: {why}; expected a cubin")
    return done.stdout


@lru_cache(maxsize=64)
def programs(cubin: bytes) -> Mapping[str, Program]:
    """Returns name -> kernel or function of a cubin."""
    sm = ""
    labels: dict[str, int] = {}
    waiting: list[str] = []
    sections: dict[str, list[re.Match]] = {}
    rows: list[re.Match] = []
    for m in LINE.finditer(disassembly(cubin)):
        if m["sm"]:
            sm = m["sm"]
        elif m["function"]:
            rows = sections.setdefault(m["function"], [])
        elif m["label"]:
            waiting.append(m["label"])
        else:
            labels |= {label: int(m["address"], 16) for label in waiting}
            waiting = []
            rows.append(m)
    return {name: Program(name, sm, tuple(_instruction(m, labels) for m in found)) for name, found in sections.items()}


def program(cubin: bytes, name: str = "") -> Program:
    """Returns the kernel of that name; without a name the only kernel, or the one with the most products. Raises ValueError."""
    found = programs(cubin)
    if name and name not in found:
        raise ValueError(f"no kernel {name!r} in the cubin: expected one of {', '.join(found) or 'none: it is empty'}")
    if not found:
        raise ValueError("the cubin holds no machine code")
    return found[name] if name else max(found.values(), key=lambda p: sum(i.mma for i in p.instructions))


def _instruction(m: re.Match, labels: Mapping[str, int]) -> Instruction:
    operands = tuple(part.strip() for part in re.split(r",(?![^\[]*\])", m["operands"]) if part.strip())
    control = int(m["high"], 16) >> CONTROL_BIT
    write, read = control >> 5 & 7, control >> 8 & 7
    label = LABEL.search(m["operands"])
    return Instruction(
        int(m["address"], 16),
        m["opcode"],
        operands,
        m["predicate"] or "",
        labels.get(label[1]) if label else None,
        control & 15,
        not control >> 4 & 1,
        None if write == NO_SCOREBOARD else write,
        None if read == NO_SCOREBOARD else read,
        control >> 11 & 63,
        control >> 17 & 15,
    )


@lru_cache(maxsize=1 << 16)
def _registers(opcode: str, operands: tuple[str, ...], predicate: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns (registers read, registers written), without the ones that are always zero or true. The first operand is the
    result, and so are predicates right behind it: carries, and the second result of a comparison.
    """
    results = 0 if NO_RESULT.match(opcode) else 1
    while results and results < len(operands) and re.fullmatch(r"U?P[\dT]", operands[results]):
        results += 1
    if results and ("SETP" in opcode or "PLOP3" in opcode):
        results = 2  # later predicates are read
    read: list[str] = [predicate.lstrip("!")]
    written: list[str] = []
    for n, (operand, width) in enumerate(zip(operands, _widths(opcode, operands), strict=True)):
        names = written if n < results and "[" not in operand else read
        for kind, number, suffix in REGISTER.findall(operand):
            plain = "[" not in operand or operand.startswith("gdesc")
            count = 2 if ".64" in suffix else width if plain and "P" not in kind else 1
            names += [f"{kind}{int(number) + k}" for k in range(count)]
    return tuple(dict.fromkeys(x for x in read if x not in ("", "PT", "UPT"))), tuple(dict.fromkeys(written))


def _widths(opcode: str, operands: tuple[str, ...]) -> list[int]:
    """Returns the number of registers of each operand."""
    count = len(operands)
    if g := GMMA.match(opcode):  # D, perhaps A, the descriptors of A and B, the sum, perhaps a predicate and metadata
        sums, at = int(g["n"]) // (2 if g["sum"] == "F32" else 4), [o.startswith("gdesc") for o in operands].index(True)
        return [sums, *[4] * at, sums, *[1] * count][:count]
    if m := MMA.match(opcode):
        widths = list(MMA_REGISTERS.get((bool(m["sparse"]), m["shape"]), (4, 4, 4, 4, 1)))
        if m["of"] == "F16":
            widths[0], widths[3] = widths[0] // 2, widths[3] // 2
        return (widths + [1] * count)[:count]
    parts = opcode.split(".")
    if parts[0] == "LDSM" or parts[0] == "STSM":
        return [int(parts[-1]) if parts[-1].isdigit() else 1] * count
    if "WIDE" in parts:  # two 32-bit factors; result and summand of 64 bits
        return [2, 1, 1, 2, *[1] * count][:count]
    if parts[0] == "CS2R" and "32" not in parts:
        return [2] * count
    if parts[0] in ("DADD", "DMUL", "DFMA", "DSETP"):
        return [2] * count
    memory = parts[0].startswith(("LD", "ST", "UL", "ATOM", "RED"))
    return [4 if memory and "128" in parts else 2 if memory and "64" in parts else 1] * count
