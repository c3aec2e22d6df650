"""Counters of a launch, and of each source line that accesses memory."""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from cuda_kernels.emulator.programs import Decoded

COUNTED = ("executed", "bytes", "sectors", "ideal_sectors", "wavefronts", "min_wavefronts")
COUNT = np.dtype([(n, "<u8") for n in COUNTED])
NOTHING = (0,) * 5
KIND_OF_ACCESS = {"ld": "load", "ldu": "load", "st": "store", "cp": "cp.async", "atom": "atomic", "red": "atomic"}


@dataclass(frozen=True)
class LineStats:
    """Memory behaviour of one source line (only lines that access shared or global memory)."""

    file: str
    line: int
    opcode: str
    requests: int
    sectors: int
    ideal_sectors: int
    wavefronts: int
    excess_wavefronts: int


@dataclass(frozen=True)
class Stats:
    """Counters of one launch. Requests are per warp.

    Instructions, MMAs (a wgmma counts as its number of m16n8 products) and bytes of asynchronous copies always; the rest with
    checks on. `*_unique_*bytes`: 32 x distinct 32-byte sectors of global memory touched (loaded, stored; an atomic does both,
    cp.async loads its source), counted once per launch - the least DRAM traffic - or once per block, summed over blocks.
    """

    instructions: int = 0
    mma: int = 0
    mma_sp: int = 0
    mma_kinds: dict[str, int] = field(default_factory=dict)
    async_bytes: int = 0
    global_loads: int = 0
    global_stores: int = 0
    global_bytes: int = 0
    sectors: int = 0
    ideal_sectors: int = 0
    launch_unique_bytes: int = 0
    launch_unique_load_bytes: int = 0
    launch_unique_store_bytes: int = 0
    block_unique_bytes: int = 0
    block_unique_load_bytes: int = 0
    block_unique_store_bytes: int = 0
    shared_bytes: int = 0
    wavefronts: int = 0
    min_wavefronts: int = 0
    excess: dict[str, int] = field(default_factory=dict)  # bank conflicts by "load", "store", "ldmatrix", "cp.async", "atomic"
    lines: tuple[LineStats, ...] = ()
    writes: dict[int, np.ndarray] = field(default_factory=dict)  # tracked address -> times each byte was written

    @property
    def excess_wavefronts(self) -> int:
        return self.wavefronts - self.min_wavefronts

    def writes_not_once(self, address: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the offsets of the tracked allocation's bytes that were never written, and of those written more than
        once.
        """
        counts = self.writes[address]
        return np.flatnonzero(counts == 0), np.flatnonzero(counts > 1)


def of_counts(d: Decoded, totals: np.ndarray, counts: np.ndarray, writes: dict[int, np.ndarray]) -> Stats:
    """Makes the Stats from `totals` of the launch and `counts` of each instruction, as COUNT."""
    total: Counter[str] = Counter()
    excess: Counter[str] = Counter()
    mma: Counter[str] = Counter()
    lines: dict[tuple[int, int, str], list[int]] = {}
    ran = np.flatnonzero(counts["executed"])
    for (_, file, line, number), row in zip(d.places[ran].tolist(), counts[ran].tolist(), strict=True):
        executed, nbytes, sectors, ideal, wavefronts, fewest = row
        opcode = d.opcodes[number]
        if opcode.startswith(("mma", "wgmma.mma")):
            mma[opcode] += executed
        if not (wavefronts or sectors):
            continue
        stem = opcode.partition(".")[0]
        kind = KIND_OF_ACCESS.get(stem, stem)
        if wavefronts:
            excess[kind] += wavefronts - fewest
            total["shared_bytes"] += nbytes
        if sectors:
            total["global_bytes"] += nbytes
            total["global_stores" if kind in ("store", "atomic") else "global_loads"] += executed
        measured = executed, sectors, ideal, wavefronts, fewest
        lines[file, line, opcode] = [a + b for a, b in zip(lines.get((file, line, opcode), NOTHING), measured, strict=True)]
    total.update({name: int(counts[name].sum()) for name in ("sectors", "ideal_sectors", "wavefronts", "min_wavefronts")})
    listed = [(d.files.get(str(f), "?"), n, o, v) for (f, n, o), v in sorted(lines.items(), key=lambda e: e[0])]
    of_launch = [int(n) for n in totals]
    return Stats(
        of_launch[0],
        of_launch[1],
        of_launch[2],
        dict(mma),
        of_launch[3],
        total["global_loads"],
        total["global_stores"],
        total["global_bytes"],
        total["sectors"],
        total["ideal_sectors"],
        of_launch[4],
        of_launch[5],
        of_launch[6],
        of_launch[7],
        of_launch[8],
        of_launch[9],
        total["shared_bytes"],
        total["wavefronts"],
        total["min_wavefronts"],
        dict(excess),
        tuple(LineStats(file, line, opcode, v[0], v[1], v[2], v[3], v[3] - v[4]) for file, line, opcode, v in listed),
        writes,
    )
