"""The end of a tile of Hopper's convolutions (include/tma_gemm.cuh), and the shared memory of its stages and its end.

TMA stores parts of 64 channels and `part` pixels, and copies their residual, through slots that both share. Where it cannot, a
warpgroup's threads store them: 2-byte and FP32 outputs, planes, depth-to-space and up-sampled residuals, groups whose channels
are no multiple of 64, and blocks that split K, which may have no tile to store.
"""

import math
from collections.abc import Mapping

from cuda_kernels.tensor_maps import Map
from tactics.families.conv_gemm import own_store
from tactics.families.hopper import maps
from tactics.families.hopper.tiles import FEWEST_STAGES, SMEM
from tactics.families.merged import merged
from tactics.format import LAYOUTS, Strides, padded_channels, strides
from tactics.main_loops import UNTIMED
from tactics.problems.pointwise_ops import POINTWISE
from tactics.problems.problem import ConvProblem
from tactics.roofline import together
from tactics.step import Store, linear
from tactics.tactic import Tactic, Tile

ROWS = 64  # of weights, that an instruction multiplies
MOST_STAGES = 12
MOST_SLOTS = 8
FEWEST_SLOTS = {False: (2, 1), True: (4, 3, 2, 1)}  # without and with a residual, as long as FEWEST_STAGES are left
WINDOW_ROWS = 3  # of strips: taps of a stage
# An output of an end by TMA, counted in its machine code (NVRTC 13.0). OF_ACTIVATION: (instructions more than a ReLU has, MUFU
# among them).
INSTRUCTIONS = {False: 2.9, True: 5.1}  # of a thread, without and with a residual
PORT, ONE_WARPGROUP = 128, 1.4  # bytes per clock of shared memory's port; factor of a single warpgroup, which waits for itself
OVER_SIMULATED = {False: 1.25, True: 1.4}  # an H200's times of older ends over their simulated ones; UNTIMED is a part of it
OF_ACTIVATION = {name: (row.instructions - 2.0, 2.0 * (row.instructions >= 6)) for name, row in POINTWISE.items()}
OF_ACTIVATION |= {"gelu": (9.2, 1.0), "silu": (8.2, 1.5)}
BY_STMATRIX = 0.75  # simulated clocks of ends by threads with stmatrix over the ones with movmatrix, which were timed
BARRIERS = 16  # bytes, two of a stage or of a slot


def taps(t: Tile) -> int:
    """Returns the taps of a stage."""
    return WINDOW_ROWS if t.box else 1


def teams(t: Tile) -> int:
    """Returns the number of warpgroups that multiply."""
    return t.threads // 128 * (1 + t.pingpong)


def part(t: Tile) -> int:
    """Returns how many pixels a warpgroup stores at a time; if a cluster shares K, each block has one part, as long as there
    are enough groups of eight.
    """
    return next(n for n in (64, 32, 16, 8) if t.n % n == 0 and (n == 8 or n * t.cluster[2] <= t.n))


def copied_box(t: Tile) -> tuple[int, int, int]:
    """Returns (images, rows, columns) of the box that one copy stores: the largest share of the tile's box that divides the
    part.
    """
    images, rows, cols = t.box
    of_cols = math.gcd(cols, part(t))
    of_rows = math.gcd(rows, part(t) // cols) if of_cols == cols else 1
    return math.gcd(images, part(t) // (cols * rows)) if (of_rows, of_cols) == (rows, cols) else 1, of_rows, of_cols


def stage_bytes(t: Tile, sparse: bool) -> int:
    """Bytes of a stage: pixels, of a strip with their neighbours, and dense weights."""
    pixels = t.n + (t.box[0] * (WINDOW_ROWS - 1) * t.box[2] if t.box else 0)
    return ((0 if sparse else t.m * taps(t)) + pixels) * t.k * 2


def rest_bytes(t: Tile) -> int:
    """Bytes behind the stages, where threads store: for each warpgroup a part and a table of its pixels; barriers."""
    return teams(t) * part(t) * (ROWS * 2 + 4) + BARRIERS * MOST_STAGES


def smem(tactic: Tactic) -> int:
    """Bytes of dynamic shared memory where threads store, with a residual that is read when it is added."""
    return tactic.gemm.stages * stage_bytes(tactic.gemm, tactic.sparse) + rest_bytes(tactic.gemm)


def end(
    p: ConvProblem, tactic: Tactic, store: Store | None, strided: tuple[Strides, ...] | None
) -> tuple[dict[str, int], int, Mapping[str, Map]]:
    """Returns the end of a tile, the part that stores sums: (compile-time values, bytes of dynamic shared memory of the whole
    kernel, tensor maps by parameter: none where threads store).

    `store`: where the pixels of a ConvTranspose's phase go, None for a plain convolution; `strided`: strides of the tensors
    that lie inside others, None where each lies alone (tactics.families.conv_gemm.arguments).
    """
    stored = {} if store or not stored_by_tma(p, tactic) else _stored_maps(p, tactic, strided)
    values, size = room(p, tactic, bool(stored))
    pixels = math.prod(copied_box(tactic.gemm)) if stored and tactic.gemm.box else part(tactic.gemm)
    whole = not (linear(tactic.out) or store or merged(p).one.k % ROWS)
    return {"OUT_TMA": int(bool(stored)), "PIECE": pixels, "WHOLE_ROWS": int(whole), **values}, size, stored


def room(p: ConvProblem, tactic: Tactic, by_tma: bool) -> tuple[dict[str, int], int]:
    """Returns ({SLOTS of a warpgroup, STAGES that remain, RES_AHEAD}, bytes of dynamic shared memory).

    By TMA: as few slots as a residual on its way needs, and more where memory is left. By threads: slots for the whole tile,
    whose residual is then copied before its products; or one slot, where copies do not help (2-byte accesses), blocks may not
    store their tile (split K), or fewer than FEWEST_STAGES, or than the sums of a cluster along K occupy, would be left.
    """
    t, of_stage = tactic.gemm, stage_bytes(tactic.gemm, tactic.sparse)
    of_slot = teams(t) * (part(t) * ROWS * 2 + BARRIERS * by_tma)
    rest = BARRIERS * MOST_STAGES + (0 if by_tma else teams(t) * part(t) * 4)
    m64, parts = t.m // ROWS // (1 if t.pingpong else teams(t)), -(-(t.n // part(t)) // t.cluster[2])
    ahead = p.epilogue.residual and not (linear(tactic.out) or t.split > 1 or t.stream)
    for few in FEWEST_SLOTS[p.epilogue.residual] if by_tma else (m64 * parts,) * ahead:
        stages = min((SMEM - rest - few * of_slot) // of_stage, t.stages)
        if stages >= min(t.stages, FEWEST_STAGES) and (t.cluster[2] == 1 or stages * of_stage >= t.m * t.n * 4):
            size = stages * of_stage + rest
            many = min((SMEM - size) // of_slot, MOST_SLOTS) if by_tma else few
            return {"SLOTS": many, "STAGES": stages, "RES_AHEAD": int(not by_tma)}, size + many * of_slot
    return {"SLOTS": 1, "STAGES": t.stages, "RES_AHEAD": 0}, smem(tactic)


def stored_by_tma(p: ConvProblem, tactic: Tactic) -> bool:
    """Whether TMA stores the tile: pixels lie in order with all channels together, 64 channels belong to one group, and every
    block is sure to store its tile.
    """
    t, m, layout = tactic.gemm, merged(p), LAYOUTS[tactic.out.layout]
    pixels = layout.vector >= p.k if layout.blocked else layout.vector >= 8
    rows = m.count == 1 or m.one.k % ROWS == 0
    return pixels and rows and not (t.stream or t.split > 1 or own_store(p))


def clocks(p: ConvProblem, tactic: Tactic) -> tuple[float, float]:
    """Clocks of an end by TMA: (of the tile's warpgroups, of the SM where others multiply meanwhile). Not timed."""
    t, acts = tactic.gemm, [act.name for act in (p.epilogue.act, p.epilogue.last)]
    issued = INSTRUCTIONS[p.epilogue.residual] + p.epilogue.affine + sum(OF_ACTIVATION[act][0] for act in acts)
    staged = (2 + 2 * p.epilogue.residual) * 2 / PORT  # bytes of FP16, written and read
    of_output = together((issued / 128, staged, sum(OF_ACTIVATION[act][1] for act in acts) / 16))
    rate = t.m * t.n * of_output * OVER_SIMULATED[p.epilogue.residual] / UNTIMED
    return rate * (ONE_WARPGROUP if t.threads == 128 else 1), rate


def _stored_maps(p: ConvProblem, tactic: Tactic, strided: tuple[Strides, ...] | None) -> Mapping[str, Map]:
    """The tensor maps of y and of the residual; none where one of them lies in memory as no map can describe."""
    t, channels = tactic.gemm, padded_channels(tactic.out.layout, p.out_shape[1])
    y, *others = reversed(strided or (strides(tactic.out, p.out_shape),) * (2 + p.epilogue.residual))
    views = {"y_map": (maps.Y, y), **({"r_map": (maps.RESIDUAL, others[0])} if p.epilogue.residual else {})}
    try:
        return {n: maps.stored_map(p, *view, channels, part(t), copied_box(t) if t.box else ()) for n, view in views.items()}
    except ValueError:
        return {}
