"""Grouped convolution with small groups (conv_grouped.cu): units, tiles, launches, packing, time.

A unit is one group, or a few groups packed block-diagonally, whichever needs fewer MMAs. Its output channels are covered by
tiles of 8, its taps x chunks of 8 input channels by steps of 16 along K. A unit may start at any channel: its weights are
shifted within the chunks that it touches. Groups too large for this kernel run as an implicit GEMM each
(tactics/families/conv_gemm.py).

Example: 8 groups of 6 -> 6 channels, each a unit. Unit 1 has input channels 6 to 11, in chunks 0 and 1: its weights start at 6.

Prediction: a block loads all that it reads, computes, then stores; blocks of one SM overlap. An SM takes the longest of its
tensor cores', shared memory's, L2's and instruction issue's times for all its blocks, plus the latency of each round of blocks.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

import numpy as np

from cuda_kernels.device import Device
from tactics.format import HALF_FORMATS, Strides, padded_channels, too_large
from tactics.problems.epilogue import Epilogue
from tactics.problems.problem import ConvProblem
from tactics.reason import Candidates, no_room, unsupported
from tactics.roofline import FULL_WARPS, Counts, Extra, Spent, convolved, resident, rounds_us, sm_l2, tensor_rate, throttled
from tactics.step import (
    Launch,
    Share,
    Store,
    conv_args,
    epilogue_instructions,
    epilogue_values,
    ints,
    launch,
    linear,
    vector_sections,
)
from tactics.tactic import Only, Tactic, Tile, restrict, tactic_of

MMA_EFFICIENCY = 0.7  # share of the MMA rate of long main loops: one or two MMAs per operand load do not hide issue and latency
SMEM_BYTES_PER_CLK = 128
ROUND_CLK = 2500  # clocks of a block that do not overlap with its work: addresses, first loads, barriers, stores
MAX_ALONE_K = 16  # an ungrouped convolution runs here up to this many output channels: they are an MMA's 8 columns, not 16 rows
MAX_UNIT_K, MAX_UNIT_CHUNKS = 64, 8  # the most a warp's accumulators hold, and a patch row of 128 bytes

# Tiles (m: channels of the staging tile, n: pixels, k: channels of the patch, warps over units, over pixels), one stage.
# fmt: off
TILES = tuple(
    Tile(*t, 1)
    for t in (
        (64, 64, 64, 4, 1), (64, 128, 64, 4, 1), (64, 128, 64, 2, 2), (64, 128, 64, 1, 4), (64, 256, 64, 2, 4),
        (64, 64, 64, 1, 4), (64, 64, 64, 2, 2), (32, 128, 32, 2, 2), (32, 64, 32, 1, 4), (128, 64, 64, 4, 1),
        (128, 128, 128, 4, 2), (16, 128, 16, 1, 4), (16, 64, 32, 1, 4),
    )
)
# fmt: on
CASE = ConvProblem(1, 48, 9, 9, 48, 3, 3, pad=(1, 1, 1, 1), groups=6, epilogue=Epilogue(bias=True, residual=True))
CASES = {"conv_grouped": (CASE,)}


@dataclass(frozen=True, slots=True)
class Unit:
    """A unit of `groups` groups packed together, with `c` input and `k` output channels. The problem has `count` such units;
    the last may have fewer groups.

    `chunks`: the number of chunks of 8 channels that a unit touches per tap; `steps`: its steps of 16 along K, over all taps.
    """

    groups: int
    c: int
    k: int
    count: int
    chunks: int
    steps: int

    @property
    def n8(self) -> int:
        return -(-self.k // 8)


@dataclass(frozen=True, slots=True)
class Geometry:
    """The division of a problem among blocks. For each tile of pixels there are `blocks` blocks of `per_block` units, which
    touch at most `span` chunks.

    `tile`, `patch`: (height, width) in pixels of a tile of outputs, and of its input; `tiles`: the number of tiles along (h,
    w); `pitch`: pixels from row to row of the patch in shared memory, where columns of equal remainder by the stride lie
    together, `phase` columns of each.
    """

    per_block: int
    blocks: int
    span: int
    tile: tuple[int, int]
    tiles: tuple[int, int]
    patch: tuple[int, int]
    phase: int
    pitch: int


Pair = tuple[int, int]
Cut = tuple[Pair, Pair, Pair, int, int]  # tile, tiles, patch, phase, pitch


@lru_cache(maxsize=1024)
def unit(p: ConvProblem) -> Unit | None:
    """Returns the unit that needs the fewest MMAs; None if a group is too large for this kernel."""
    found = []
    for groups in range(1, min(p.groups, 16) + 1):
        c, k = groups * (p.c // p.groups), groups * (p.k // p.groups)
        count = -(-p.groups // groups)
        chunks = max(-(-(u + 1) * c // 8) - u * c // 8 for u in range(min(count, 8)))  # the pattern repeats every 8 units
        if k <= MAX_UNIT_K and chunks <= MAX_UNIT_CHUNKS:
            u = Unit(groups, c, k, count, chunks, -(-p.r * p.s * chunks // 2))
            found.append((u.count * u.n8 * u.steps, groups, u))
    return min(found, default=(0, 0, None))[2]


def packed(p: ConvProblem) -> Unit:
    """Returns unit(p). Raises ValueError if a group is too large for this kernel."""
    found = unit(p)
    if found is None:
        raise ValueError(f"{p}: a group is too large for this kernel")
    return found


@lru_cache(maxsize=16384)
def geometry(p: ConvProblem, tactic: Tactic) -> Geometry | str:
    """Returns the tactic's division of the problem, or a text on why it cannot run the problem."""
    u, t = packed(p), tactic.gemm
    y_c = padded_channels(tactic.out.layout, p.k)
    for per_block in range(min(t.m // u.k, u.count), 0, -1):
        blocks = -(-u.count // per_block)
        firsts = [i * per_block for i in range(min(blocks, 8))]
        span = max((min(f + per_block, u.count) - 1) * u.c // 8 + u.chunks - f * u.c // 8 for f in firsts)
        aligned = linear(tactic.out) or blocks == 1 or per_block * u.k % 8 == 0
        padded = linear(tactic.out) or y_c - (blocks - 1) * per_block * u.k <= t.m
        if span * 8 <= t.k and aligned and padded:
            break
    else:
        return f"no run of units of {u.c} -> {u.k} channels fills a tile of {t.k} -> {t.m} channels with stores of 8"
    if t.warps_m > per_block:
        return f"{t.warps_m} warps for {per_block} units"
    return Geometry(per_block, blocks, span, *_best(p, t))


def cut(p: ConvProblem, tactic: Tactic) -> Geometry:
    """Returns geometry(p, tactic). Raises ValueError if the tactic cannot run the problem."""
    found = geometry(p, tactic)
    if isinstance(found, str):
        raise ValueError(f"{tactic}: {found}")
    return found


@lru_cache(maxsize=4096)
def _best(p: ConvProblem, t: Tile) -> Cut:
    """Returns the Cut with the least cost for a tile."""
    return min((_tile(p, t, width) for width in _widths(p, t)), key=lambda found: found[0])[1]


def _widths(p: ConvProblem, t: Tile) -> Iterator[int]:
    """Yields the tile widths in pixels with which 8 neighbouring pixels of a tile can be in 8 different banks."""
    if p.stride[0] == 1:
        yield from range(min(8, p.q), min(p.q, t.n) + 1)
    yield from range(8, min(-(-p.q // 8) * 8, t.n) + 1, 8)


def _tile(p: ConvProblem, t: Tile, width: int) -> tuple[float, Cut]:
    """Returns (cost, Cut) for tiles of this width with as many rows as fit, the same number in all tiles.

    The cost is the number of elements loaded and stored.
    """
    rows = min(max(t.n // width, 1), p.p)
    rows = -(-p.p // -(-p.p // rows))
    tiles = -(-p.p // rows), -(-p.q // width)
    axes = zip((rows, width), p.stride, (p.r, p.s), p.dilation, strict=True)
    high, wide = ((n - 1) * st + (f - 1) * d + 1 for n, st, f, d in axes)
    patch = high, wide
    phase = -(-patch[1] // p.stride[1])
    pitch = phase * p.stride[1]
    if width % 8:
        pitch += (width - pitch) % 8
    cost = tiles[0] * tiles[1] * (patch[0] * (patch[1] + pitch) / 2 * t.k + t.n * t.m)
    return cost, ((rows, width), tiles, patch, phase, pitch)


def candidates(p: ConvProblem, device: Device, only: Only = None) -> Candidates:
    """Yields (tactic or family, reason against it or None). `only`: restricts the tiles."""
    if p.c == p.groups or (p.groups == 1 and (p.k > MAX_ALONE_K or unit(p) is None)):
        return
    if unit(p) is None:
        why = f"a group has {p.c // p.groups} -> {p.k // p.groups} channels, more than one block's tile"
    elif max(p.stride) > 31:
        why = f"stride {p.stride}: a patch has at most 31 phases"
    else:
        why = too_large(p.all_shapes, others=p.n * p.p * p.q)
    if why:
        yield "conv_grouped", unsupported(why)
        return
    for tile, x, y in product(restrict("conv_grouped", TILES, only), HALF_FORMATS, HALF_FORMATS):
        tactic = tactic_of("conv_grouped", tile, (x, y) if p.epilogue.residual else (x,), y)
        found = geometry(p, tactic)
        yield tactic, unsupported(found if isinstance(found, str) else no_room(shared_bytes(p, tactic), device))


def shared_bytes(p: ConvProblem, tactic: Tactic) -> int:
    """Returns the bytes of a block's shared memory: patch, weights, staging tile, tables."""
    u, g, t = packed(p), cut(p, tactic), tactic.gemm
    patch = -(-g.patch[0] * g.pitch // 8) * 8 * t.k * 2
    return patch + g.per_block * u.steps * u.n8 * 256 + t.n * t.m * 2 + t.n * 4 + 2 * u.steps * 4


def launches(
    p: ConvProblem,
    tactic: Tactic,
    store: Store | None = None,
    strided: tuple[Strides, ...] | None = None,
    share: Share | None = None,
) -> tuple[Launch, ...]:
    """Returns one launch. `share`: the part of a squeeze-excite that it also computes (conv_scaled)."""
    t, u, g, x_fmt, y_fmt = tactic.gemm, packed(p), cut(p, tactic), tactic.ins[0], tactic.out
    values = {
        "PIXELS": t.n,
        "IN_CHUNKS": t.k // 8,
        "OUT_CHUNKS": t.m // 8,
        "NT": u.n8,
        "ODD": u.k % 2,
        "WARPS_UNIT": t.warps_m,
        "WARPS_PIXEL": t.warps_n,
        "IN_LINEAR": int(linear(x_fmt)),
        "OUT_LINEAR": int(linear(y_fmt)),
        **epilogue_values(p),
    }
    used = [sum({1 << i * d % st for i in range(f)}) for f, d, st in zip((p.r, p.s), p.dilation, p.stride, strict=True)]
    whole = u.count % g.per_block == 0 and p.k == u.count * u.k == padded_channels(tactic.out.layout, p.k)
    values |= {"UNIT_C": u.c, "UNIT_K": u.k, "PER_BLOCK": g.per_block, "WHOLE": int(whole)}
    values |= {"CHUNKS": u.chunks, "SPAN": g.span, "CHUNKS_K": p.r * p.s * u.chunks, "STEPS": u.steps}
    values |= {"TILE_H": g.tile[0], "TILE_W": g.tile[1], "PATCH_H": g.patch[0], "PATCH_W": g.patch[1]}
    values |= {"PITCH": g.pitch, "PHASE": g.phase, "ROW_MASK": used[0], "COLUMN_MASK": used[1]}
    values |= {"DIL_W": p.dilation[1], "STRIDE_H": p.stride[0], "STRIDE_W": p.stride[1], "TAPS_W": p.s, "DIL_H": p.dilation[0]}
    values |= {"HIDDEN": 1} if share else {}
    args = conv_args(p, tactic, store, strided, ("x_", "y_", "r_")) | ints(c=p.c)
    args |= ints(units=u.count, blocks_of_units=g.blocks, tiles_h=g.tiles[0], tiles_w=g.tiles[1])
    more, smem = share.behind(shared_bytes(p, tactic)) if share else ({}, shared_bytes(p, tactic))
    grid, workspace = (p.n * blocks_of(p, tactic), 1, 1), share.workspace if share else 0
    return (launch(tactic.kernel, values, grid, t.threads, smem, args | more, workspace),)


def blocks_of(p: ConvProblem, tactic: Tactic) -> int:
    """Returns the number of blocks per image."""
    g = cut(p, tactic)
    return g.blocks * g.tiles[0] * g.tiles[1]


def pack(p: ConvProblem, tactic: Tactic, weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns weights [K,C/g,R,S] as [unit][k16 step][n8 tile][32 lanes][4], operand B of m16n8k16 (PTX ISA 9.7.14.5.8).

    Lane 4g+t holds column g and rows 2t, 2t+1, 2t+8, 2t+9; K runs over (tap, chunk of the unit, channel).
    """
    u, cg, kg = packed(p), p.c // p.groups, p.k // p.groups
    taps = np.zeros((u.count, u.n8 * 8, p.r * p.s, u.chunks * 8), np.float16)
    w = np.asarray(weights["w"], np.float16).reshape(p.groups, kg, cg, p.r * p.s)
    for group in range(p.groups):
        i, member = divmod(group, u.groups)
        c0 = group * cg - i * u.c // 8 * 8
        taps[i, member * kg : (member + 1) * kg, :, c0 : c0 + cg] = w[group].transpose(0, 2, 1)
    flat = np.zeros((u.count, u.n8 * 8, u.steps * 16), np.float16)
    flat[..., : p.r * p.s * u.chunks * 8] = taps.reshape(u.count, u.n8 * 8, -1)
    tiles = flat.reshape(u.count, u.n8, 8, u.steps, 2, 4, 2)  # [unit, n8 tile, g, step, half of K, t, pair]
    sections = {"w": np.ascontiguousarray(tiles.transpose(0, 3, 1, 2, 5, 4, 6)).reshape(-1)}
    return sections | vector_sections(p, weights, p.k)


def section_bytes(p: ConvProblem, tactic: Tactic) -> dict[str, int]:
    """Returns section name -> bytes of the sections that `pack` makes, computed from sizes alone."""
    u = packed(p)
    return {"w": u.count * u.n8 * u.steps * 256} | dict.fromkeys(p.epilogue.vectors, 4 * p.k)


def mmas(p: ConvProblem, tactic: Tactic) -> int:
    """Returns the number of MMAs of the launch: tiles of 16 pixels with at least one pixel x tiles of 8 channels x steps."""
    u, g = packed(p), cut(p, tactic)
    rows = [min(g.tile[0], p.p - i * g.tile[0]) for i in range(g.tiles[0])]
    return p.n * g.tiles[1] * sum(-(-r * g.tile[1] // 16) for r in rows) * u.count * u.n8 * u.steps


def counts(p: ConvProblem, tactic: Tactic, device: Device, more: Extra | None = None) -> Counts:
    """Returns counts of the launch."""
    t, u, g, more = tactic.gemm, packed(p), cut(p, tactic), more or Extra()
    blocks = p.n * blocks_of(p, tactic)
    tiles = min(t.n // 16 // t.warps_n, -(-g.tile[0] * g.tile[1] // 16))
    registers = min(255, -(-(tiles * (4 * u.n8 + 4) + 42) // 8) * 8)
    at_once = resident(device, t.threads, registers, shared_bytes(p, tactic) + more.smem)
    a_tiles = mmas(p, tactic) / blocks / u.n8  # loads of operand A by a block, 512 bytes each
    weights = g.per_block * u.steps * u.n8 * 256
    patch = g.patch[0] * g.patch[1] * g.span * 16
    staging = t.n * g.per_block * u.k * 2
    plain = 8 * (linear(tactic.ins[0])), 8 * (linear(tactic.out))  # 2-byte accesses instead of one of 16
    warps = min(at_once, math.ceil(blocks / device.num_sms)) * t.threads / 32
    moves = patch * (1.5 + plain[0]) + staging * (1.5 + plain[1])
    ends = staging / 64 * epilogue_instructions(p)  # a warp's instruction is for 32 outputs of two bytes
    clk = {
        "mma": a_tiles * u.n8 * 16 * 8 * 16 / (tensor_rate(device, FULL_WARPS) * MMA_EFFICIENCY),
        "smem": (a_tiles * 512 + weights * (1 + t.warps_n) + patch + 3 * staging) / SMEM_BYTES_PER_CLK,
        "l2": (patch + weights + staging * (2 if p.epilogue.residual else 1)) / sm_l2(device, blocks),
        # Four warps issue per clock; addresses and swizzles cost about as much as the accesses themselves.
        "issue": (a_tiles * (8 + u.n8 * 3) + moves / 16 + ends + t.threads / 32 * more.instructions) / min(4, warps),
    }
    # A block loads, then computes; other blocks' work hides the shorter of the two.
    hidden = min(clk["l2"], max(clk["mma"], clk["smem"], clk["issue"]))
    block = max(clk.values()) + hidden / at_once + throttled(device, clk["mma"])
    limits = rounds_us(device, clk, blocks, at_once, Spent(block, ROUND_CLK + more.clocks))
    return convolved(p, tactic, u.count * u.steps * u.n8 * 256, limits)
