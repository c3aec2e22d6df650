"""How a tile of Hopper's convolutions ends (include/tma_gemm.cuh), and the shared memory of its stages and its end.

TMA stores parts of 64 channels and `part` pixels, and copies their residual, through slots that both share. Where it cannot, a
warpgroup's threads store them: of 2-byte and FP32 outputs, planes, depth-to-space and up-sampled residuals, of groups whose
channels are no multiple of 64, and of blocks that split K, which may have no tile to store.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

from cuda_kernels.tensor_maps import Map
from tactics.families.hopper import maps
from tactics.families.hopper.tiles import FEWEST_STAGES, SMEM
from tactics.families.merged import merged
from tactics.format import Strides, padded_channels, strides
from tactics.problems.problem import ConvProblem
from tactics.step import Store, linear
from tactics.tactic import Tactic, Tile

ROWS = 64  # of weights, that an instruction multiplies
MOST_STAGES = 12
MOST_SLOTS = 8
FEWEST_SLOTS = {False: (2, 1), True: (4, 3, 2, 1)}  # with a residual or not, as far as FEWEST_STAGES are left
WINDOW_ROWS = 3  # of strips: taps of a stage
BARRIERS = 16  # bytes, two of a stage or of a slot


class End(NamedTuple):
    """Compile-time values, dynamic shared memory in bytes, tensor maps by the parameters' names: none where threads store."""

    values: Mapping[str, int]
    smem: int
    maps: Mapping[str, Map]


def taps(t: Tile) -> int:
    """Of a stage."""
    return WINDOW_ROWS if t.box else 1


def teams(t: Tile) -> int:
    """Warpgroups that multiply."""
    return t.threads // 128 * (1 + t.pingpong)


def part(t: Tile) -> int:
    """Pixels that a warpgroup stores at a time; where a cluster shares K, each block has some of them."""
    return next(n for n in (64, 32, 16) if t.n % n == 0 and (n == 16 or n * t.cluster[2] <= t.n))


def piece(t: Tile) -> tuple[int, int, int]:
    """Images, rows and columns of a box that one copy of a part has: of the tile's box, as much as divides the part."""
    images, rows, cols = t.box
    of_cols = math.gcd(cols, part(t))
    of_rows = math.gcd(rows, part(t) // cols) if of_cols == cols else 1
    return math.gcd(images, part(t) // (cols * rows)) if (of_rows, of_cols) == (rows, cols) else 1, of_rows, of_cols


def stage_bytes(t: Tile, sparse: bool) -> int:
    """Pixels, of a strip with those around, and dense weights."""
    pixels = t.n + (t.box[0] * (WINDOW_ROWS - 1) * t.box[2] if t.box else 0)
    return ((0 if sparse else t.m * taps(t)) + pixels) * t.k * 2


def rest_bytes(t: Tile, staged: int = 1, tables: int = 1) -> int:
    """Behind the stages, where threads store: `staged` parts of each warpgroup, and its tables of their pixels; barriers."""
    return teams(t) * part(t) * (ROWS * 2 * staged + 4 * tables) + BARRIERS * MOST_STAGES


def smem(tactic: Tactic) -> int:
    """Dynamic shared memory in bytes, where threads store, of a residual that comes when it is added."""
    return tactic.gemm.stages * stage_bytes(tactic.gemm, tactic.sparse) + rest_bytes(tactic.gemm)


def end(p: ConvProblem, tactic: Tactic, store: Store | None, strided: tuple[Strides, ...] | None) -> End:
    """Of a launch whose pixels go where `store` says, of tensors with these strides (tactics.families.conv_gemm.arguments)."""
    whole = {"WHOLE_ROWS": 1} if not linear(tactic.out) and not store and merged(p).one.k % ROWS == 0 else {}
    stages, many, size = slots(p, tactic)
    if stages and not store and stores_whole_tiles(p, tactic) and (found := _stored_maps(p, tactic, strided)):
        pieces = {"PIECE": math.prod(piece(tactic.gemm))} if tactic.gemm.box else {}
        return End({"OUT_TMA": 1, "STAGES": stages, "SLOTS": many, **pieces, **whole}, size, found)
    stages, size = residual_ahead(p, tactic)
    return End(({"RES_AHEAD": 1, "STAGES": stages} if stages else {}) | whole, size or smem(tactic), {})


def stores_whole_tiles(p: ConvProblem, tactic: Tactic) -> bool:
    """Vectors of 64 channels of one group, by blocks that are sure to store their tile."""
    t, m = tactic.gemm, merged(p)
    return not (linear(tactic.out) or t.stream or t.split > 1) and (m.count == 1 or m.one.k % ROWS == 0)


def _stored_maps(p: ConvProblem, tactic: Tactic, strided: tuple[Strides, ...] | None) -> Mapping[str, Map]:
    """Of y and of the residual; none where one of them lies as no map has it."""
    t, channels = tactic.gemm, padded_channels(tactic.out.layout, p.out_shape[1])
    y, *others = reversed(strided or (strides(tactic.out, p.out_shape),) * (2 + p.epilogue.residual))
    views = {"y_map": (maps.Y, y), **({"r_map": (maps.RESIDUAL, others[0])} if p.epilogue.residual else {})}
    try:
        return {n: maps.stored_map(p, *view, channels, part(t), piece(t) if t.box else ()) for n, view in views.items()}
    except ValueError:
        return {}


def slots(p: ConvProblem, tactic: Tactic) -> tuple[int, int, int]:
    """(stages, slots of a warpgroup, dynamic shared memory in bytes) where TMA stores: as few slots as a residual on its way
    needs, and more where memory is left; 0 where too few stages would be."""
    t = tactic.gemm
    of_slot, barriers = teams(t) * (part(t) * ROWS * 2 + BARRIERS), BARRIERS * MOST_STAGES
    for few in FEWEST_SLOTS[p.epilogue.residual]:
        if stages := _stages_beside(few * of_slot + barriers, tactic):
            size = stages * stage_bytes(t, tactic.sparse) + barriers
            many = min((SMEM - size) // of_slot, MOST_SLOTS)
            return stages, many, size + many * of_slot
    return 0, 0, 0


def residual_ahead(p: ConvProblem, tactic: Tactic) -> tuple[int, int]:
    """(stages, dynamic shared memory in bytes) where threads store, and all of a tile's residual is copied before its products,
    which takes the room of some of the tactic's stages; stages 0: it is copied part by part when it is added, for 2-byte
    accesses are no copies, blocks that split K may not store their tile, or too few stages are left."""
    t = tactic.gemm
    if not p.epilogue.residual or linear(tactic.out) or t.split > 1 or t.stream:
        return 0, 0
    parts, m64 = t.n // part(t), t.m // ROWS // (1 if t.pingpong else teams(t))
    rest = rest_bytes(t, m64 * -(-parts // t.cluster[2]), 2 * parts)
    stages = _stages_beside(rest, tactic)
    return stages, (stages * stage_bytes(t, tactic.sparse) + rest) * bool(stages)


def _stages_beside(rest: int, tactic: Tactic) -> int:
    """Stages that fit beside `rest` bytes; 0 where copies would not run ahead far enough, or where a cluster shares K and the
    sums of a tile would not fit over the stages."""
    t, of_stage = tactic.gemm, stage_bytes(tactic.gemm, tactic.sparse)
    stages = min((SMEM - rest) // of_stage, t.stages)
    enough = stages >= min(t.stages, FEWEST_STAGES) and (t.cluster[2] == 1 or stages * of_stage >= t.m * t.n * 4)
    return stages if enough else 0
