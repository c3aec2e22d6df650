"""The tiles that convolutions on tensor cores are tried with, the registers that they take, and the cost of split K's sums."""

import math

from cuda_kernels import sparse24
from tactics.format import is_bytes
from tactics.step import linear
from tactics.tactic import Tactic, Tile


def _tiles(*sizes: tuple[int, int, int, int, int, int]) -> tuple[Tile, ...]:
    return tuple(Tile(*size) for size in sizes)


# Registers of a thread by (sparse, rows, pixels and K of the tile, warps along pixels): the most of any architecture in the
# record of compiled kernels (tests/golden/compiled.json), with vectors in and out.
# fmt: off
REGISTERS = {
    (False, 16, 128, 64, 4): 118, (False, 32, 64, 64, 4): 96, (False, 32, 128, 64, 4): 142, (False, 64, 32, 64, 2): 92,
    (False, 64, 64, 64, 2): 126, (False, 64, 128, 64, 2): 192, (False, 64, 256, 32, 4): 254, (False, 128, 64, 64, 2): 195,
    (False, 128, 128, 32, 2): 254, (False, 128, 128, 32, 4): 177, (False, 128, 128, 64, 4): 195, (False, 128, 256, 32, 4): 255,
    (False, 256, 128, 32, 2): 246, (True, 16, 128, 64, 4): 110, (True, 32, 64, 64, 4): 116, (True, 32, 128, 64, 4): 128,
    (True, 64, 32, 64, 2): 108, (True, 64, 64, 64, 2): 124, (True, 64, 128, 64, 2): 186, (True, 64, 256, 64, 4): 248,
    (True, 128, 64, 64, 2): 168, (True, 128, 128, 64, 2): 250, (True, 128, 128, 64, 4): 175, (True, 128, 256, 64, 4): 248,
    (True, 256, 128, 64, 2): 243,
}

# Tiles to try. Large ones reuse most per byte, small ones fill the GPU when a layer is small; few warps leave more registers
# to each. 16 and 32 rows serve layers with few output channels.
DENSE_TILES = _tiles(
    (128, 256, 32, 2, 4, 3), (256, 128, 32, 4, 2, 3), (128, 128, 64, 2, 4, 3), (128, 128, 32, 2, 4, 4),
    (128, 128, 32, 2, 2, 4), (128, 64, 64, 2, 2, 3), (64, 128, 64, 2, 2, 3), (64, 256, 32, 1, 4, 4),
    (64, 64, 64, 2, 2, 4), (64, 32, 64, 2, 2, 4), (32, 128, 64, 1, 4, 4), (32, 64, 64, 1, 4, 4),
    (16, 128, 64, 1, 4, 4),
)
SPARSE_TILES = _tiles(
    (256, 128, 64, 4, 2, 3), (128, 256, 64, 2, 4, 3), (128, 256, 64, 2, 4, 2), (128, 128, 64, 2, 4, 3),
    (128, 128, 64, 2, 2, 3), (64, 256, 64, 1, 4, 3), (64, 256, 64, 1, 4, 2), (128, 64, 64, 2, 2, 4),
    (64, 128, 64, 2, 2, 4), (64, 64, 64, 2, 2, 4),
    (64, 32, 64, 2, 2, 4), (32, 128, 64, 1, 4, 4), (32, 64, 64, 1, 4, 4), (16, 128, 64, 1, 4, 4),
)
# fmt: on
# Tiles of strips (conv_strip.cu, conv_strip_sparse24.cu). Simulated, they beat the tile of this size above on an A100, H100 and
# a B200 (benchmarks/NOTES.md); with two stages the copies, which begin a step later in a turn, do not arrive in time.
STRIP_DENSE_TILES = _tiles(
    (128, 256, 64, 2, 4, 3),
    (256, 128, 64, 4, 2, 3),
    (128, 128, 64, 2, 4, 3),
    (128, 64, 64, 2, 2, 3),
    (64, 128, 64, 2, 2, 3),
)
STRIP_SPARSE_TILES = _tiles(
    (128, 256, 64, 2, 4, 3),
    (256, 128, 64, 4, 2, 3),
    (128, 128, 64, 2, 4, 3),
    (128, 128, 64, 2, 2, 3),
    (64, 256, 64, 1, 4, 3),
    (128, 64, 64, 2, 2, 3),
    (64, 128, 64, 2, 2, 3),
)
# As REGISTERS, for strips.
# fmt: off
STRIP_REGISTERS = {
    (False, 64, 128, 64, 2): 176, (False, 128, 64, 64, 2): 175, (False, 128, 128, 64, 4): 172, (False, 128, 256, 64, 4): 230,
    (False, 256, 128, 64, 2): 232, (True, 64, 128, 64, 2): 175, (True, 64, 256, 64, 4): 236, (True, 128, 64, 64, 2): 183,
    (True, 128, 128, 64, 2): 234, (True, 128, 128, 64, 4): 183, (True, 128, 256, 64, 4): 234, (True, 256, 128, 64, 2): 234,
}
# fmt: on
KEPT_SUMS = 64  # sums per thread up to which the last block to arrive keeps its own and reads only the others' (split_k.cuh)
MOST_REGISTERS = 248  # per thread, as recorded plus those of a norm, that still compile without spills


def out_of_registers(tactic: Tactic) -> bool:
    """Whether accumulators and sparse operands, or the addresses of a linear output, leave no registers for stream-K's loop
    over tiles.
    """
    return (tactic.sparse or linear(tactic.out)) and tactic.gemm.m * tactic.gemm.n // tactic.gemm.threads >= 128


def no_room_for_border(tactic: Tactic, shared: bool = False) -> str:
    """Returns why the kernel would spill registers if it read a border, whose address joins the addresses of a thread's pixels;
    "" if it would not. `shared`: blocks share K.
    """
    t = tactic.gemm
    pixels, sums = t.n * t.k // 8 // t.threads, t.m * t.n // t.threads
    crowded = sums >= 128 and (shared or tactic.sparse) and pixels >= (8 if shared else 16)
    return f"a border, {pixels} pixels and {sums} accumulators per thread would spill registers" if crowded else ""


def no_room_for_norm(tactic: Tactic) -> str:
    """Why a norm before the convolution would spill registers, or "".

    With 128 dense results per thread the kernel fetches half a step's pixels at a time (include/dense_stage.cuh): room for 20
    registers of a norm, however many the tile takes without one.
    """
    kept, t = registers_of_norm(tactic), tactic.gemm
    if not tactic.sparse and t.m * t.n // t.threads >= 128:
        return f"norm: needs {kept} registers per thread, more than 20 may spill" if kept > 20 else ""
    held = registers(tactic) + kept
    return f"norm: needs {held} registers per thread, more than {MOST_REGISTERS} may spill" if held > MOST_REGISTERS else ""


def registers(tactic: Tactic) -> int:
    """Registers per thread as compiled; for a tile that the record lacks an estimate: accumulators, operands, addresses."""
    t = tactic.gemm
    known = REGISTERS.get((tactic.sparse, t.m, t.n, t.k, t.warps_n))
    acc = t.m * t.n // t.threads
    return known or min(255, acc + acc // 4 + 48)


def registers_of_norm(tactic: Tactic) -> int:
    """Registers per thread that a norm before the convolution keeps: 5 for each 8 pixels of a warp (include/prologue.cuh)."""
    t = tactic.gemm
    return 5 * -(-t.n // 8 // (t.threads // 32))


def early_residual(tactic: Tactic, gated: bool = False) -> bool:
    """Whether a convolution's residual, its second input, is copied during the main loop's last turn.

    Then it has a table: RESIDUAL_EARLY in include/conv.cuh, LAST_TURN_APART of the kernels. `gated`: the last input is a gate.
    """
    t = tactic.gemm
    apart = t.m * t.n // t.threads < 128 or (t.threads > 128 and not tactic.sparse)
    return len(tactic.ins) > 1 + gated and apart and not (linear(tactic.out) or t.stream or t.split > 1)


def stage_bytes(tactic: Tactic) -> int:
    """Returns the bytes of one pipeline stage: weights (2:4: half the values and a metadata bit per element) and pixels.

    Where elements are bytes, the tile's K counts pairs of them.
    """
    t = tactic.gemm
    a, meta = t.m * t.k * 2, sparse24.metadata_bytes(t.m, t.k) * (2 if is_bytes(tactic.ins[0]) else 1)
    return (a // 2 + meta if tactic.sparse else a) + t.n * t.k * 2


def stored_bytes(tactic: Tactic, residual: bool) -> int:
    """Bytes that a block stores, and its residual; times four for planes, whose sectors are partly filled."""
    return staging_bytes(tactic) * (2 if residual else 1) * (4 if linear(tactic.out) else 1)


def staging_bytes(tactic: Tactic) -> int:
    """Bytes of a tile's results in shared memory, in the type that is stored, or as FP16."""
    return tactic.gemm.m * tactic.gemm.n * (1 if is_bytes(tactic.out) else 2)


def in_parts(end: float, tactic: Tactic, tiles: int, blocks: int, bytes_per_clk: float, latency: float) -> float:
    """Returns the clocks of a tile's end with the summing of a split K; just `end` without a split.

    Partial sums are stored, the arrival is counted, and the last block to arrive reads all sums one after the other. A run of
    stages (stream-K) begins in one tile and ends in another.
    """
    t = tactic.gemm
    if t.split == 1 and not t.stream:
        return end
    parts = t.split if t.split > 1 else math.ceil(blocks / tiles) + 1
    read = parts - (t.m * t.n <= KEPT_SUMS * t.threads)
    end += (3 + read) * latency + (1 + read) * t.m * t.n * 4 / bytes_per_clk
    return end * (math.ceil(tiles / blocks) + 1) if t.stream else end
