"""Convolution as an implicit GEMM on mma.sync (conv_dense.cu) and mma.sp (conv_sparse24.cu): tiles, launches, packing, time.

Prediction: an SM computes its share of the blocks; per pipeline stage a block takes the combined time of these limits

    main loop   m*n*k products at the share of the tensor cores' peak that is simulated from its machine code (main_loops)
    L2          the stage's bytes at the SM's share of L2 bandwidth
    latency     of the loads that the pipeline's depth does not hide, under load

plus filling the pipeline and the epilogue, which other resident blocks hide in part. The shape follows DeLTA (arXiv 1904.01691)
and the shared-memory model that reproduces published wgmma latencies.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import product
from types import MappingProxyType

import numpy as np

from cuda_kernels import sparse24
from cuda_kernels.device import Device
from cuda_kernels.named_devices import MAX_GRID
from tactics import main_loops
from tactics.families.merged import merged, padded_k
from tactics.format import HALF_FORMATS, LAYOUTS, Format, Strides, num_bytes, num_elements, padded_channels, strides, too_large
from tactics.problems.epilogue import RELU
from tactics.problems.problem import ConvProblem, ConvTransposeProblem
from tactics.problems.prologue import Prologue
from tactics.reason import Candidates, Reason, no_room, unsupported
from tactics.roofline import L2_LATENCY_CLK, Counts, Spent, convolved, resident, rounds_us, sm_l2, throttled, together
from tactics.step import (
    NULL,
    Args,
    Launch,
    Store,
    alpha_beta,
    conv_pointers,
    epilogue_instructions,
    epilogue_values,
    floats,
    ints,
    launch,
    linear,
    residual_pixels,
    store_pixels,
    vector_sections,
    view_args,
    window_args,
)
from tactics.tactic import Only, Tactic, Tile, changed, restrict, tactic_of
from tactics.tiles import (
    DENSE_TILES,
    SPARSE_TILES,
    early_residual,
    in_parts,
    no_room_for_border,
    no_room_for_norm,
    out_of_registers,
    registers,
    registers_of_norm,
    stage_bytes,
    staging_bytes,
    stored_bytes,
)

TILES = {"conv_dense": DENSE_TILES, "conv_sparse24": SPARSE_TILES}
SPLITS = (2, 3, 4, 6, 8, 12, 16)
MAX_TAPS = 15  # rows and columns of a kernel, for vector inputs (include/pixels.cuh)
GATE_BYTES = 128  # of a stage, for gates
NORM_CLK = 150  # clocks of a block from its last product to normalized sums: two barriers, a table written and read
PLAIN = Prologue()
# Clocks until weights arrive from DRAM behind other blocks' loads: 361 per stage, for three, fitted to products on an A100.
LOADED_LATENCY_CLK = 1080
FILL_CLK = 1300  # clocks of a block's first loads (addresses, DRAM and L2 latency, barriers), fitted to products on an A100
EARLY_CLK = 500  # the part of FILL_CLK that a launch that may begin early spends before the launch ahead has ended
EPILOGUE_CLK = 1000
STORED_AGAIN = {"sm_90a": 1}  # sm -> how many times more stored vectors and residuals count, fitted to an H200's times
OUTPUT_INSTRUCTIONS = 6  # instructions for an output: bias, activation, bounds, packing, to shared memory and back
# Problems on which gpu-runtime doctor runs each kernel: small, and no size is a multiple of a tile's.
CASES = dict.fromkeys(
    ("conv_dense", "conv_sparse24"),
    (
        ConvProblem(2, 40, 9, 7, 72, 3, 3, pad=(1, 1, 1, 1), epilogue=RELU, sparse24=True),
        ConvProblem(1, 24, 7, 10, 88, 1, 1, epilogue=replace(RELU, residual=True), sparse24=True),
        *(
            ConvProblem(2, 72, 7, 9, 40, 1, 1, epilogue=RELU, sparse24=True, prologue=first)
            for first in (Prologue(scaled=True), Prologue(gated=True), Prologue(normalized=True, epsilon=1e-5))
        ),
    ),
)


def not_sparse(p: ConvProblem | ConvTransposeProblem) -> Reason | None:
    """Returns why no sparse tactic may run these weights; None if one may."""
    channels = p.c // p.groups
    if channels % 4:
        return Reason.of("grouped_conv" if p.groups != 1 else "channels_not_multiple_of_4", channels=channels)
    return None if p.sparse24 else Reason.of("pattern_violation")


def candidates(p: ConvProblem, device: Device, only: Only = None) -> Candidates:
    """Yields (tactic or family, reason against it or None). `only`: restricts the tiles."""
    if 1 < p.groups == p.c:
        why = f"depthwise (groups = C = {p.c}): a matrix product would waste 7 of 8 multiplications"
    else:
        why = too_large(p.all_shapes, others=p.n * p.p * p.q)
    if why:
        yield "conv_dense", unsupported(why)
        return
    dense_only = not_sparse(p)
    if dense_only:
        yield "conv_sparse24", dense_only
    known: dict[tuple[str, Tile, Format], tuple[Tile, ...]] = {}  # (kernel, tile, output's format) -> split-K, stream-K tiles
    for kernel in ("conv_dense",) if dense_only else ("conv_dense", "conv_sparse24"):
        for tactic, reason in _of_tiles(kernel, only, p.epilogue.residual, p.prologue, device):
            reason = reason or problem_reason(p, tactic)
            yield tactic, unsupported(reason)
            if reason or linear(tactic.ins[0]):
                continue
            stored = kernel, tactic.gemm, tactic.out
            if stored not in known:
                known[stored] = *splits(p, tactic, device), *streams(p, tactic, device)
            for shared in known[stored]:
                yield tactic_of(kernel, shared, tactic.ins, tactic.out), None


@lru_cache(maxsize=512)
def _of_tiles(kernel: str, only: Only, residual: bool, prologue: Prologue, device: Device) -> tuple[tuple[Tactic, str], ...]:
    """Returns (tactic, reason against it or "") for every tile and format, without the reasons from the problem's sizes."""
    found = []
    for tile, x, y in product(restrict(kernel, TILES[kernel], only), HALF_FORMATS, HALF_FORMATS):
        tactic = tactic_of(kernel, tile, (x, *((y,) if residual else ()), *((x,) if prologue.gated else ())), y)
        found.append((tactic, tile_reason(tactic, device, prologue)))
    return tuple(found)


def splits(p: ConvProblem, tactic: Tactic, device: Device) -> tuple[Tile, ...]:
    """Returns the tile with split-K values worth trying: if tiles leave half of the GPU idle; a block keeps two stages."""
    tiles, stages = num_tiles(p, tactic), merged(p).k // tactic.gemm.k
    crowded = p.prologue.border and no_room_for_border(tactic, shared=True)
    if p.prologue.normalized or crowded or 2 * tiles > device.num_sms:
        return ()
    ways = [s for s in SPLITS if 2 * s <= stages and tiles * s <= 2 * device.num_sms][-3:]
    return tuple(changed(tactic.gemm, split=s) for s in ways)


def streams(p: ConvProblem, tactic: Tactic, device: Device) -> tuple[Tile, ...]:
    """Returns the tile with a stream-K value if it is worth trying: a tenth of the time is idle in the last round of blocks."""
    m, t = merged(p), tactic.gemm
    tiles, stages = num_tiles(p, tactic), m.k // t.k
    blocks = device.num_sms * resident_blocks(tactic, device)
    rounds = tiles / blocks
    full = rounds > 8 or math.ceil(rounds) < 1.1 * rounds or p.prologue.normalized
    crowded = out_of_registers(tactic) or (p.prologue.border and no_room_for_border(tactic, shared=True))
    if crowded or m.parts > 1 or full or tiles * stages < 2 * blocks:
        return ()
    return (changed(t, stream=blocks),)


def problem_reason(p: ConvProblem, tactic: Tactic) -> str:
    """Returns why this tactic cannot run this problem, or ""."""
    m = merged(p)
    if linear(tactic.ins[0]) and p.prologue.needs:
        return "the input's scale and shift, gate, norm or border are of whole vectors"
    if p.prologue.border and (reason := no_room_for_border(tactic)):
        return reason
    if max(p.r, p.s) > MAX_TAPS and not linear(tactic.ins[0]):
        return f"{p.r} x {p.s} taps: expected {MAX_TAPS} x {MAX_TAPS} at most, so that their mask fits a register"
    if p.prologue.gated and p.n > MAX_GRID[2]:
        return f"{p.n} images with gates: a grid holds at most {MAX_GRID[2]} along z"
    if m.count == 1:
        return ""
    if m.count > MAX_GRID[1]:
        return f"{m.count} groups: a grid holds at most {MAX_GRID[1]} along y"
    if tactic.gemm.m >= 2 * (-(-m.one.k // 16) * 16):
        return f"a group of {m.one.k} output channels fills half of the tile or less"
    for side, fmt, c in (("input", tactic.ins[0], m.one.c), ("output", tactic.out, m.one.out_shape[1])):
        layout = LAYOUTS[fmt.layout]
        if (layout.blocked or p.epilogue.d2s > 1) and c % layout.vector:
            return f"{side}: a group of {c} channels does not start a plane of {fmt}"
    if padded_channels(tactic.out.layout, p.out_shape[1]) != p.out_shape[1]:
        return f"output: {tactic.out} has padded channels, which belong to no group"
    return ""


def tile_reason(tactic: Tactic, device: Device, prologue: Prologue = PLAIN) -> str:
    """Returns why this tile cannot run on the device, or ""."""
    tile = tactic.gemm
    if why := no_room(conv_smem(tactic, prologue), device):
        return why
    if linear(tactic.ins[0]) and tile.threads % tile.n and tile.n % tile.threads:
        return f"linear input: {tile.n} pixels do not divide evenly among {tile.threads} threads"
    if prologue.normalized and (reason := no_room_for_norm(tactic)):
        return reason
    chunks, accumulators = tile.n * tile.k // 8 // tile.threads, tile.m * tile.n // tile.threads
    if linear(tactic.ins[0]) and (chunks > 8 or 4 * chunks + accumulators > 150):
        return f"linear input: {chunks} chunks and {accumulators} accumulators per thread would spill registers"
    return ""


def conv_smem(tactic: Tactic, prologue: Prologue = PLAIN) -> int:
    """Returns the bytes of dynamic shared memory: the larger of the pipeline and, later in the same memory, the epilogue's
    staging tile with a table of rows; an early residual's table is in addition to both."""
    t = tactic.gemm
    constants = 4 * t.k if prologue.scaled else GATE_BYTES if prologue.gated else 0
    pipeline, staging, table = t.stages * (stage_bytes(tactic) + constants), staging_bytes(tactic), t.n * 4
    return max(pipeline, staging) + table if early_residual(tactic, prologue.gated) else max(pipeline, staging + table)


def launches(
    p: ConvProblem, tactic: Tactic, store: Store | None = None, strided: tuple[Strides, ...] | None = None
) -> tuple[Launch, ...]:
    t, store = tactic.gemm, store or own_store(p)
    tiles, shared = num_tiles(p, tactic), t.stream or t.split > 1
    count = merged(p).parts
    blocks = t.stream or tiles // count * t.split
    args = arguments(p, tactic, store, strided)
    if shared:
        args |= {"partial": ("workspace", 0), "counters": ("counters", 0), **ints(splits=t.split, tiles=tiles // count)}
    scratch = (count * blocks * (2 if t.stream else 1) * t.m * t.n * 4, tiles * 4) if shared else (0, 0)
    smem = conv_smem(tactic, p.prologue)
    grid = blocks, merged(p).count, count // merged(p).count
    return (launch(tactic.kernel, values(p, tactic, store), grid, t.threads, smem, args, *scratch),)


def own_store(p: ConvProblem) -> Store | None:
    """Returns the Store for a depth-to-space or an upsampled residual; None if the GEMM's pixels are y's pixels in order."""
    end = p.epilogue
    return Store(p.out_shape, step=(end.d2s, end.d2s)) if end.d2s > 1 or end.up > 1 else None


def values(p: ConvProblem, tactic: Tactic, store: Store | None) -> dict[str, int]:
    """Returns the kernel's compile-time values; values of rare features are left out if the layer lacks them."""
    t, x, y = tactic.gemm, tactic.ins[0], tactic.out
    return {
        **t.values,
        "BK": t.k,
        "STAGES": t.stages,
        "IN_LINEAR": int(linear(x)),
        "OUT_LINEAR": int(linear(y)),
        **epilogue_values(p),
        "SPLIT": 2 if t.stream else int(t.split > 1),
        **({"D2S": p.epilogue.d2s} if store else {}),
        **({"GROUPED": 1} if merged(p).count > 1 else {}),
        **p.prologue.values,
        **({"OUT_F32": 1} if y.dtype == "fp32" else {}),
    }


def arguments(p: ConvProblem, tactic: Tactic, store: Store | None, strided: tuple[Strides, ...] | None) -> Args:
    """Returns the members of the struct ConvParams (include/conv.cuh), except the ones that only split-K and stream-K read."""
    m, x_fmt, y_fmt, up = merged(p), tactic.ins[0], tactic.out, p.epilogue.up
    one, (out, name) = m.one, (store.out, store.name) if store else (p.out_shape, "")
    residual, gate = p.in_shapes[1 : 1 + p.epilogue.residual], p.in_shapes[1 + p.epilogue.residual :]
    x, *added, y = strided or (
        strides(x_fmt, p.in_shapes[0]),
        *(strides(y_fmt, out if up == 1 else s) for s in residual),
        *(strides(x_fmt, s) for s in gate),
        strides(y_fmt, out),
    )
    gates = [added.pop() for _ in gate]
    args = conv_pointers(p, name) | {"meta": ("weights", "meta" + name) if tactic.sparse else NULL}
    args |= ints(n=1 if gates else p.n, c=one.c, h=p.h, w_in=p.w, k=one.k, p=p.p, q=p.q, r=p.r, s=p.s) | window_args(p)
    args |= ints(c8=-(-one.c // 8), k_tiles=padded_k(one) // tactic.gemm.k, m16=-(-num_rows(one, y_fmt.layout) // 16))
    args |= view_args("x_", x) | view_args("y_", y) | alpha_beta(p)
    args |= ints(y_c=padded_channels(y_fmt.layout, out[1]) if m.count == 1 else one.out_shape[1])
    for s in added:
        args |= view_args("r_", s)
    if store:
        args |= store_pixels(store, y.pixel)
    if store and added:
        args |= residual_pixels(p, store, added[0].pixel)
    if m.count > 1:
        args |= ints(x_group=x.channel(one.c), y_group=y.channel(one.out_shape[1]))
    for s in gates:
        args |= _gate(p, s)
    if p.prologue.normalized:
        args |= {"sums": ("weights", "sums" + name), **floats(per_channel=1 / p.c, epsilon=p.prologue.epsilon)}
    read = ("affine", p.prologue.scaled), ("border", p.prologue.border)
    return args | {name: ("weights", name) for name, needed in read if needed}


def _gate(p: ConvProblem, s: Strides) -> Args:
    """Returns the arguments for the gate, the last input, and the bounds to which its product is clipped."""
    low, high = (*p.prologue.act.params, 0.0, 0.0)[:2]
    strides_of = ints(g_n=s.n, g_block=s.block, g_log2v=s.log2v, g_group=s.channel(merged(p).one.c))
    return {"gate": ("in", len(p.in_shapes) - 1), **strides_of, **floats(low=low, high=high)}


def num_tiles(p: ConvProblem, tactic: Tactic) -> int:
    """Returns the number of a tactic's output tiles in all groups, which is its number of blocks before K is split."""
    m, t = merged(p), tactic.gemm
    channels = padded_channels(tactic.out.layout, m.channels) if m.count == 1 else m.channels
    return m.parts * -(-(p.epilogue.d2s**2) * channels // t.m) * -(-m.pixels // t.n)


@lru_cache(maxsize=1024)
def row_order(p: ConvProblem, layout: str) -> tuple[int, ...]:
    """Returns the output channel of each row of the GEMM, -1 for a row of zeros (why this order: include/conv.cuh, D2S)."""
    b, dcr = p.epilogue.d2s, p.epilogue.d2s_mode == "dcr"
    if b == 1:
        return tuple(range(p.k))
    c = p.k // b**2
    channel = np.arange(p.k).reshape((b, b, c) if dcr else (c, b, b))
    channel = channel if dcr else channel.transpose(1, 2, 0)  # [i, j, channel of y]
    if LAYOUTS[layout].vector < 8:
        return tuple(channel.transpose(2, 0, 1).reshape(-1).tolist())
    padding = ((0, 0), (0, 0), (0, padded_channels(layout, c) - c))
    return tuple(np.pad(channel, padding, constant_values=-1).reshape(-1).tolist())


def num_rows(p: ConvProblem, layout: str) -> int:
    """Returns the number of rows of the GEMM: len(row_order())."""
    b = p.epilogue.d2s
    return b**2 * padded_channels(layout, p.k // b**2) if b > 1 and LAYOUTS[layout].vector >= 8 else p.k


def pack(p: ConvProblem, tactic: Tactic, weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns weights [K,C/g,R,S] as `matrix` arranges them, in fragment order; bias and slope in the same order of rows."""
    m = merged(p)
    flat, vectors = matrix(p, tactic, weights, padded_channels("hwc8", m.one.c), m.k, 16)
    sections = sparse24.fragments(flat, tactic.sparse)
    if p.prologue.scaled:
        affine = np.zeros((2, m.k), np.float16)
        affine[0, : p.c], affine[1, : p.c] = weights["scale"], weights["shift"]
        sections["affine"] = np.ascontiguousarray(affine.reshape(2, -1, 32).transpose(1, 0, 2)).reshape(-1)
    if p.prologue.normalized:
        sections["sums"] = flat.sum(2, dtype=np.float64).astype(np.float32).reshape(-1)
    if p.prologue.border:
        sections["border"] = np.full(8, p.prologue.border, np.float16)
    return sections | vectors


def matrix(
    p: ConvProblem, tactic: Tactic, weights: Mapping[str, np.ndarray], of_a_tap: int, k: int, of_rows: int
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Returns (weights [K,C/g,R,S] of the merged groups as [count][rows][(r, s, c)], the epilogue's vectors in the same order
    of rows). Rows are padded to a multiple of `of_rows`, c to `of_a_tap`, and each row to `k` elements."""
    m, cg, kg = merged(p), p.c // p.groups, p.k // p.groups
    one = m.one
    order = np.array(row_order(one, tactic.out.layout))
    rows, sources, height = np.flatnonzero(order >= 0), order[order >= 0], -(-len(order) // of_rows) * of_rows
    taps = np.zeros((m.count, one.k, p.r, p.s, of_a_tap), np.float16)
    w = np.asarray(weights["w"], np.float16).reshape(m.count, m.groups, kg, cg, p.r, p.s).transpose(0, 1, 2, 4, 5, 3)
    for i in range(m.groups):
        taps[:, i * kg : (i + 1) * kg, :, :, i * cg : (i + 1) * cg] = w[:, i]
    flat = np.zeros((m.count, height, k), np.float16)
    flat[:, rows, : p.r * p.s * of_a_tap] = taps.reshape(m.count, one.k, -1)[:, sources]
    at, taken = (np.arange(m.count)[:, None] * size + index for size, index in ((height, rows), (one.k, sources)))
    return flat, vector_sections(p, weights, m.count * height, at, taken)


def section_bytes(p: ConvProblem, tactic: Tactic) -> dict[str, int]:
    """Returns section name -> bytes of the sections that `pack` makes, computed from sizes alone."""
    m = merged(p)
    sections, row = dict(_fragments(p, tactic.out.layout, tactic.sparse)), m.count * _rows16(m.one, tactic.out.layout) * 4
    if p.prologue.scaled:
        sections["affine"] = 4 * m.k
    if p.prologue.border:
        sections["border"] = 16
    return sections | dict.fromkeys((*p.epilogue.vectors, *(["sums"] if p.prologue.normalized else [])), row)


@lru_cache(maxsize=4096)
def _fragments(p: ConvProblem, layout: str, sparse: bool) -> Mapping[str, int]:
    m = merged(p)
    return MappingProxyType(sparse24.fragment_bytes(m.count, _rows16(m.one, layout), m.k, sparse))


def _rows16(p: ConvProblem, layout: str) -> int:
    return -(-num_rows(p, layout) // 16) * 16


def counts(p: ConvProblem, tactic: Tactic, device: Device) -> Counts:
    gate = num_bytes(tactic.ins[-1], p.in_shapes[-1]) if p.prologue.gated else 0
    return convolved(p, tactic, weight_bytes(p, tactic), limits(p, tactic, device), gate, untimed=main_loops.UNTIMED)


def alike(p: ConvProblem, tactic: Tactic) -> Tactic:
    """Returns one tactic in place of all with the same predicted time: their formats are equally linear and equally padded."""
    ins = tuple(_plain(x, shape[1]) for x, shape in zip(tactic.ins, p.in_shapes, strict=True))
    return tactic_of(tactic.kernel, tactic.tile, ins, _plain(tactic.out, p.out_shape[1]))


@lru_cache(maxsize=4096)
def _plain(fmt: Format, channels: int) -> Format:
    """Returns a format with the same predicted time: equally linear, with equal padding of this many channels."""
    same = (f for f in HALF_FORMATS if (f.dtype, linear(f)) == (fmt.dtype, linear(fmt)) and fmt.layout != "hwc")
    return next((f for f in same if num_elements(f, (1, channels, 1, 1)) == num_elements(fmt, (1, channels, 1, 1))), fmt)


def limits(p: ConvProblem, tactic: Tactic, device: Device) -> dict[str, float]:
    t, m = tactic.gemm, merged(p)
    tiles = num_tiles(p, tactic)
    blocks = t.stream or tiles * t.split
    at_once = resident_blocks(tactic, device, p.prologue)
    hidden = min(at_once, math.ceil(blocks / device.num_sms))
    limit, stage, products = main_loops.stage(tactic, p.prologue, device, hidden)
    bytes_per_clk = sm_l2(device, blocks)
    # The latency is shared by the STAGES - 1 stages in flight; linear inputs have one in flight.
    in_flight = 1 if linear(tactic.ins[0]) else t.stages - 1
    arrival = LOADED_LATENCY_CLK / (in_flight * hidden)
    clk = {limit: stage, "l2": stage_bytes(tactic) / bytes_per_clk, "latency": arrival}
    loop = tiles * (m.k // t.k) / blocks * (together(clk.values()) + throttled(device, products))  # of a block
    # Blocks of a round end together, so their stores do not overlap. A partly filled last round takes a whole block's time.
    end = epilogue_clk(p, tactic, tiles, blocks, bytes_per_clk)
    end += (
        0 if linear(tactic.out) else STORED_AGAIN.get(device.sm, 0) * stored_bytes(tactic, p.epilogue.residual) / bytes_per_clk
    )
    return rounds_us(device, clk, blocks, at_once, Spent(loop + end, FILL_CLK + EPILOGUE_CLK, once(device)))


def once(device: Device) -> int:
    """Returns the clocks added once per launch: negative if it may begin before the launch ahead has ended."""
    return -EARLY_CLK if device.dependent_launch else 0


def epilogue_issue_clk(p: ConvProblem, tactic: Tactic) -> float:
    """Returns the clocks in which a block issues the instructions of its epilogue."""
    instructions = OUTPUT_INSTRUCTIONS + epilogue_instructions(p) + 4  # 4 bytes of staging, in and out
    return tactic.gemm.m * tactic.gemm.n * (instructions + (2 if p.prologue.normalized else 0)) / 128


def epilogue_clk(p: ConvProblem, tactic: Tactic, tiles: int, blocks: int, bytes_per_clk: float) -> float:
    """Returns the clocks of a block from its last product to its last store, without latencies."""
    clk = epilogue_issue_clk(p, tactic) + stored_bytes(tactic, p.epilogue.residual) / bytes_per_clk + scattered_clk(p, tactic)
    clk += NORM_CLK if p.prologue.normalized else 0
    return in_parts(clk, tactic, tiles, blocks, bytes_per_clk, L2_LATENCY_CLK)


def scattered_clk(p: ConvProblem, tactic: Tactic) -> float:
    """Returns the clocks that a tile's stores take longer with layout hwc: up to 16 sectors where a plane's store has 2."""
    t = tactic.gemm
    return min(t.m, p.k) * t.n * min(16, p.k) / 32 if tactic.out.layout == "hwc" else 0.0


def weight_bytes(p: ConvProblem, tactic: Tactic) -> int:
    """Returns the bytes of the packed weights that a convolution tactic reads from DRAM."""
    return sum(_fragments(p, tactic.out.layout, tactic.sparse).values())


@lru_cache(maxsize=16384)
def resident_blocks(tactic: Tactic, device: Device, prologue: Prologue = PLAIN) -> int:
    """Returns the number of blocks that an SM holds at a time. (A norm gets twice the registers that it needs, up to 255.)"""
    regs = min(255, registers(tactic) + (2 * registers_of_norm(tactic) if prologue.normalized else 0))
    return resident(device, tactic.gemm.threads, regs, conv_smem(tactic, prologue))
