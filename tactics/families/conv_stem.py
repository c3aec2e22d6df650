"""Convolution of a 1- to 4-channel image straight from the network's input (conv_stem.cu): tiles, tap order, launches, time.

The kernel converts a patch of the image, of any type, to FP16 in shared memory and gathers the operand of pixels from there:
element (tap, pixel) is the half at base(pixel) + offset(tap). One load instruction reads 4 taps of 8 pixels. `geometry`
(stem_patch.py) chooses the tile's shape and the patch's pitch, and sorts the taps into fours whose 32 halfs are never in two
words of one bank. The columns of the packed weights have the same order.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache, partial
from itertools import product

import numpy as np

from cuda_kernels import sparse24
from cuda_kernels.device import Device
from tactics.families.stem_patch import (
    IN_PLACE,
    Geometry,
    fits_in_place,
    geometry,
    geometry_in_place,
    in_place,
    outputs,
    pool_of,
    shapes,
)
from tactics.format import HALF_FORMATS, Format, Strides, num_bytes, padded_channels, too_large
from tactics.problems.epilogue import RELU, MaxPool
from tactics.problems.problem import ConvProblem
from tactics.reason import Candidates, no_room, unsupported
from tactics.roofline import (
    LATENCY_CLK,
    Counts,
    Spent,
    best_fma,
    convolved,
    moved_us,
    resident,
    rounds_us,
    tensor_rate,
    throttled,
)
from tactics.step import (
    NULL,
    Launch,
    alpha_beta,
    conv_pointers,
    epilogue_instructions,
    epilogue_values,
    ints,
    launch,
    linear,
    member,
    own_strides,
    vector_sections,
    view_args,
    window_args,
)
from tactics.tactic import Only, Tactic, Tile, changed, restrict, tactic_of

MAX_CHANNELS, MAX_TAPS = 4, 512
# The formats of an image as a network's input.
INPUTS = tuple(Format.parse(f) for f in ("fp16:chw", "fp32:chw", "uint8:chw", "fp16:hwc", "fp32:hwc", "uint8:hwc"))
IN_TYPES = {"fp16": 0, "fp32": 1, "uint8": 2}
TILES = tuple(
    Tile(*t, 16, *w, 1)
    for t, w in (
        ((64, 256), (1, 8)),
        ((64, 128), (1, 4)),
        ((64, 64), (2, 2)),
        ((32, 256), (1, 8)),
        ((32, 128), (1, 4)),
        ((16, 256), (1, 8)),
        ((16, 64), (1, 4)),
        ((128, 128), (2, 4)),
    )
)
MMA_EFFICIENCY = 0.8  # share of the MMA rate of long main loops: operands are gathered element by element
FILL_CLK, EPILOGUE_CLK = 900, 600
SMEM_BYTES_PER_CLK = 128
# For IN_PLACE, simulated (benchmarks/simulator) with ReLU and a pool of 3x3 with stride 2, two blocks on an SM; not timed.
PORT_CLK, INSTRUCTIONS = 880, 750  # of a tile without its steps: clocks of shared memory's port; instructions of a warp
BUSY, START_CLK = 0.92, 4000  # the share of a tile's time in which the busiest unit works; clocks of a block's start and end
SMS = 132  # the number of SMs that a tile without `persist` stands for
_CASE = ConvProblem(1, 3, 23, 21, 33, 7, 7, (2, 2), (3, 3, 3, 3), epilogue=RELU)
CASES = {"conv_stem": (_CASE, replace(_CASE, epilogue=replace(RELU, pool=MaxPool((3, 3), (2, 2), (1, 1), (6, 6)))))}


def candidates(p: ConvProblem, device: Device, only: Only = None) -> Candidates:
    """Yields (tactic or family, reason against it or None). `only`: restricts the tiles."""
    if reason := family_reason(p):
        yield "conv_stem", unsupported(reason)
        return
    tiles = (*TILES, IN_PLACE) if fits_in_place(p, device) else TILES
    for tile, x, y in product(restrict("conv_stem", tiles, only), INPUTS, HALF_FORMATS):
        tactic = tactic_of("conv_stem", tile, (x, y) if p.epilogue.residual else (x,), y)
        if tile.m >= 2 * padded_channels("hwc16", p.k):
            yield tactic, unsupported(f"a tile of {tile.m} channels for {p.k}")
            continue
        why = tile_reason(p, tactic, device)
        yield tactic if why else _on(p, tactic, device), unsupported(why)


def _on(p: ConvProblem, tactic: Tactic, device: Device) -> Tactic:
    """Returns the tactic with `persist` set to the number of blocks that this GPU holds at once, unless the default is
    equal."""
    held = device.num_sms * _held(p, tactic, device)
    if held == SMS * _min_blocks(p, tactic.gemm):
        return tactic
    return tactic_of(tactic.kernel, changed(tactic.gemm, persist=held), tactic.ins, tactic.out)


def _held(p: ConvProblem, tactic: Tactic, device: Device) -> int:
    """Returns the number of blocks that an SM holds at a time, with the registers that MIN_BLOCKS leaves to the compiler."""
    t = tactic.gemm
    registers = device.regs_per_sm // (_min_blocks(p, t) * t.threads) // 8 * 8
    return resident(device, t.threads, registers, shared_bytes(p, tactic))


def tile_reason(p: ConvProblem, tactic: Tactic, device: Device) -> str:
    """Returns why this tile cannot run on the device, or ""."""
    if p.epilogue.pool and (tactic.gemm.m % 64 or linear(tactic.out)):
        return "max pool: expected a vector format for the output and a tile of a multiple of 64 channels"
    if p.epilogue.pool and not any(outputs(p, *shape) for shape in shapes(tactic.gemm.n, False)):
        r, s = p.epilogue.pool.window
        return f"max pool: a window of {r} x {s} does not fit a tile of {tactic.gemm.n} pixels"
    return no_room(shared_bytes(p, tactic), device)


def family_reason(p: ConvProblem) -> str:
    """Returns why the problem is no stem, or ""."""
    if p.c > MAX_CHANNELS:
        return f"a stem has at most {MAX_CHANNELS} input channels, not {p.c}"
    if p.groups != 1:
        return f"grouped convolution (groups = {p.groups})"
    if p.c * p.r * p.s > MAX_TAPS:
        return f"{p.c * p.r * p.s} taps: at most {MAX_TAPS} are kept in shared memory"
    return too_large((p.in_shapes[0], p.out_shape))


def interleaved(p: ConvProblem, tactic: Tactic) -> bool:
    """Returns whether a pixel's channels are neighbours in the input; False for one channel, a plane in every layout."""
    return tactic.ins[0].layout == "hwc" and p.c > 1


def _geometry(p: ConvProblem, tactic: Tactic) -> Geometry:
    t = tactic.gemm
    if in_place(t):
        return geometry_in_place(_one_image(p), replace(t, persist=0))
    return geometry(_one_image(p), t.n, linear(tactic.out))


_one_image = lru_cache(maxsize=4096)(partial(replace, n=1))  # a tile lies in one image, so all batches share its geometry


def _tap_bytes(g: Geometry) -> int:
    return (g.slots.size + (g.masks.size if g.paired else 0)) * 4


def shared_bytes(p: ConvProblem, tactic: Tactic) -> int:
    """Returns the bytes of a block's shared memory: tap table, bias, all weights of the tile, two patches, and the epilogue's
    staging tile, if any.
    """
    t, g = tactic.gemm, _geometry(p, tactic)
    staging = t.m * t.n * 2 + t.n * 4 if linear(tactic.out) or p.epilogue.pool else 0
    patch = 2 * g.rows * g.pairs * 16 if in_place(t) else -(-g.rows * g.pairs * p.c // 4) * 16
    return _tap_bytes(g) + t.m * 4 + g.steps * t.m * 32 + 2 * patch + staging


def _sizes(p: ConvProblem, g: Geometry, carried: int = 0) -> tuple[int, int]:
    """Returns the number of tiles along (rows, columns) of an image, if a tile keeps `carried` rows of the tile above.

    Raises ValueError if a pool's window does not fit the tile.
    """
    tile = outputs(p, (1 << g.log2_th) + carried, 1 << g.log2_tw)
    if tile is None:
        raise ValueError(f"{p}: the pool's window does not fit the tile")
    tiles_h, tiles_w = (-(-size // t) for size, t in zip(p.out_shape[2:], tile, strict=True))
    return tiles_h, tiles_w


def _min_blocks(p: ConvProblem, t: Tile) -> int:
    """Returns the number of blocks per SM for which registers suffice, by the accumulators and the epilogue's reads per
    thread."""
    mmas, end = t.m // t.warps_m // 16 * (t.n // t.warps_n // 8), p.epilogue
    reads = end.residual or end.affine or end.act.name == "prelu"
    warps = (12 if reads else 16) if mmas >= 16 else (16 if reads else 20) if mmas >= 8 else 24 if reads else 32
    return max(1, warps * 32 // t.threads)


def _carried(p: ConvProblem, tactic: Tactic) -> int:
    """Returns the number of rows that a block keeps from tile to tile, since a pool's windows share them with the windows
    above; 0 if it keeps none.

    A block that keeps rows computes a whole column of an image's tiles, so there must be enough columns for all resident
    blocks.
    """
    t, (r, stride, pad, _) = tactic.gemm, (pair[0] for pair in pool_of(p))  # along rows
    if not in_place(t) or r - stride != pad or t.n // 16 % stride:
        return 0
    g, columns, held = _geometry(p, tactic), p.n * _rows(p, tactic) // t.m, t.persist or SMS * _min_blocks(p, t)
    (apart, across), (together, _) = _sizes(p, g), _sizes(p, g, pad)
    return pad if math.ceil(columns * across / held) * together < math.ceil(columns * across * apart / held) else 0


def _workers(p: ConvProblem, t: Tile, m_tiles: int, tiles: int) -> int:
    """Returns the number of blocks that share `tiles` tiles of pixels, for each of `m_tiles` tiles of channels: as many as are
    resident at once. Some of them have one tile more than others.
    """
    return min(tiles, max(1, (t.persist or SMS * _min_blocks(p, t)) // m_tiles))


def _aligned_pairs(p: ConvProblem, x: Strides, hwc: bool) -> bool:
    """Returns whether columns 2i and 2i + 1 are one aligned access, and both inside the image or both outside, for every i, if
    the input's start is aligned. `x`: the input's strides; `hwc`: see interleaved.
    """
    even = p.w % 2 == 0 and x.n % 2 == 0 and (p.stride[1] % 2 == 0 or not p.epilogue.pool)
    return even and (x.pixel == p.c if hwc else x.pixel == 1 and x.block % 2 == 0)


def launches(p: ConvProblem, tactic: Tactic, strided: tuple[Strides, ...] | None = None) -> tuple[Launch, ...]:
    t, g, x_fmt, y_fmt, carried = tactic.gemm, _geometry(p, tactic), tactic.ins[0], tactic.out, _carried(p, tactic)
    pool, (x, *added, y) = pool_of(p), strided or own_strides(p, tactic)
    hwc, y_c = interleaved(p, tactic), padded_channels(y_fmt.layout, p.k)
    in_pairs = strided is None and _aligned_pairs(p, x, hwc)  # a tensor inside another one may start at any element
    values = {
        **t.values,
        "IN_TYPE": IN_TYPES[x_fmt.dtype],
        "IN_HWC": int(hwc),
        "OUT_LINEAR": int(linear(y_fmt)),
        **epilogue_values(p),
        "POOL": int(bool(p.epilogue.pool)),
        **dict(zip(("POOL_R", "POOL_S", "POOL_STRIDE_H", "POOL_STRIDE_W"), (*pool.window, *pool.stride), strict=True)),
        **({"OUT_F32": 1} if y_fmt.dtype == "fp32" else {}),
        **{"CHANNELS": p.c, "STRIDE_H": p.stride[0], "STRIDE_W": p.stride[1], "LOG2_TW": g.log2_tw},
        **{"ROWS": g.rows, "PAIRS": g.pairs, "STEPS": g.steps, "FULL": g.full, "PAIRED": int(g.paired)},
        **{"ROW_STEPS": g.steps // p.r if in_place(t) else 0, "CARRIED": carried},
        **{"VEC": int(in_pairs), "WHOLE": int(p.k % t.m == 0 and y_c == p.k), "MIN_BLOCKS": _min_blocks(p, t)},
    }
    tiles_h, tiles_w = _sizes(p, g, carried)
    conv = conv_pointers(p) | {"meta": NULL} | window_args(p) | alpha_beta(p) | view_args("x_", x) | view_args("y_", y)
    conv |= ints(n=p.n, c=p.c, h=p.h, w_in=p.w, k=p.k, p=p.p, q=p.q, r=p.r, s=p.s)
    conv |= ints(c8=1, k_tiles=g.steps, m16=_rows(p, tactic) // 16, y_c=y_c)
    for s in added:
        conv |= view_args("r_", s)
    tiles, m_tiles = p.n * (1 if carried else tiles_h) * tiles_w, -(-y_c // t.m)  # carried: columns of tiles
    args = member("c", conv) | {"taps": ("weights", "taps")}
    workers = _workers(p, t, m_tiles, tiles)
    args |= ints(per_block=tiles // workers, longer=tiles % workers, tiles_h=tiles_h, tiles_w=tiles_w, cols=g.cols)
    args |= ints(shift=g.shift, pool_pad_t=pool.pad[0], pool_pad_l=pool.pad[1], pool_h=pool.out[0], pool_w=pool.out[1])
    return (launch("conv_stem", values, (m_tiles * workers, 1, 1), t.threads, shared_bytes(p, tactic), args),)


def _rows(p: ConvProblem, tactic: Tactic) -> int:
    """Returns the number of rows of packed weights, a multiple of the tile's."""
    return -(-padded_channels(tactic.out.layout, p.k) // tactic.gemm.m) * tactic.gemm.m


def pack(p: ConvProblem, tactic: Tactic, weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns weights [K,C,R,S] in fragment order, their columns in the geometry's order; the taps' byte offsets; bias and
    slope.

    For vector outputs, rows g and g + 8 of a warp's 16-row tile, which lane 4g + t has, are neighbouring channels.
    """
    g, rows = _geometry(p, tactic), _rows(p, tactic)
    # In a step of 16 along K, register j of lane t holds the two halfs e of K = 8 * j + 2 * t + e.
    j, t, e = np.indices((2, 4, 2))
    column, real = np.arange(g.steps)[:, None, None, None] * 16 + 8 * j + 2 * t + e, g.taps >= 0
    flat = np.zeros((rows, g.steps * 16), np.float16)
    flat[: p.k, column[real]] = np.asarray(weights["w"], np.float16).reshape(p.k, -1)[:, g.taps[real]]
    if not linear(tactic.out):
        warp = tactic.gemm.m // tactic.gemm.warps_m
        flat = flat.reshape(-1, 8, warp // 8, g.steps * 16).swapaxes(1, 2).reshape(rows, -1)
    if in_place(tactic.gemm):  # [64 rows of channels][8 of K][row][K]: wgmma's blocks of 8 rows of 16 bytes
        packed = np.ascontiguousarray(flat.reshape(-1, 64, g.steps * 2, 8).swapaxes(1, 2))
    else:
        packed = sparse24.pack_fragments(flat)
    sections = {"w": packed.reshape(-1), **tables(p, tactic)}
    return sections | vector_sections(p, weights, rows)


def section_bytes(p: ConvProblem, tactic: Tactic) -> dict[str, int]:
    """Returns section name -> bytes of the sections that `pack` makes, computed from sizes alone."""
    g, rows = _geometry(p, tactic), _rows(p, tactic)
    return {"w": rows * g.steps * 32, "taps": _tap_bytes(g)} | dict.fromkeys(p.epilogue.vectors, 4 * rows)


def tables(p: ConvProblem, tactic: Tactic) -> dict[str, np.ndarray]:
    """Returns the section "taps", which does not depend on weights: the byte offsets of the slots, then the masks."""
    g = _geometry(p, tactic)
    return {"taps": np.concatenate([g.slots.reshape(-1), *([g.masks.reshape(-1)] if g.paired else [])]).astype(np.uint32)}


def _in_place_us(p: ConvProblem, tactic: Tactic, device: Device) -> dict[str, float]:
    """Returns limit -> microseconds for tiles that wgmma reads in the patch; the next patch's loads overlap with the
    products."""
    t, g, carried = tactic.gemm, _geometry(p, tactic), _carried(p, tactic)
    rows, columns = _sizes(p, g, carried)
    columns *= p.n * _rows(p, tactic) // t.m
    mma, smem = t.m * t.n * 16 / best_fma(device), t.warps_n * (2048 + t.n // t.warps_n * 32) / SMEM_BYTES_PER_CLK
    issue = t.threads / 128 * (INSTRUCTIONS + 10 * g.steps)
    clk = {"mma": g.steps * mma, "smem": g.steps * smem + PORT_CLK, "issue": issue}
    tile, together = max(clk.values()) / BUSY + throttled(device, clk["mma"]), rows if carried else 1
    return rounds_us(device, clk, columns * rows // together, 1, Spent(together * tile, 0, START_CLK))


def _gathered_us(p: ConvProblem, tactic: Tactic, device: Device, blocks: int, tiles: int) -> dict[str, float]:
    """Returns limit -> microseconds for tiles whose pixels lanes gather: a block converts its patch, then multiplies; its loads
    overlap with other blocks' products.
    """
    t, g = tactic.gemm, _geometry(p, tactic)
    patch, warps, mt, nt = g.rows * g.pairs, t.threads // 32, t.m // t.warps_m // 16, t.n // t.warps_n // 8
    at_once = _held(p, tactic, device)
    at_work = min(at_once, math.ceil(blocks / device.num_sms))
    mma = t.m * t.n * 16 / (tensor_rate(device, at_work * warps) * MMA_EFFICIENCY)
    loads = 2 if g.paired else 4
    # A warp has per step `loads` gathers of one clock for 8 pixels, and 512 bytes of weights for 16 rows. 4 warps issue at
    # once.
    smem = warps * (nt * loads + mt * 512 / SMEM_BYTES_PER_CLK + 1)
    issue = warps / 4 * (nt * (loads * 1.5 - 1 + mt) + mt + 6)
    clk = {"mma": mma, "smem": smem, "issue": issue}
    loop = g.steps * (max(clk.values()) + throttled(device, mma))
    fill = FILL_CLK + math.ceil(patch / (t.threads * 4)) * LATENCY_CLK / 2
    ends = t.m * t.n * (3 + epilogue_instructions(p)) / 128
    convert = patch * (18 + 4 * p.c) / 128  # instructions per pair of columns
    epilogue = EPILOGUE_CLK + t.m * t.n * 2 * (2 if p.epilogue.residual else 1) * (4 if linear(tactic.out) else 1) / 64
    return rounds_us(device, clk, tiles, at_once, Spent(loop + convert + ends, fill + epilogue, (at_work - 1) * epilogue / 2))


def counts(p: ConvProblem, tactic: Tactic, device: Device) -> Counts:
    """Returns counts of the launch. Patches overlap: halos are read from L2 again, and so are each block's weights."""
    t, g = tactic.gemm, _geometry(p, tactic)
    (launch,) = launches(p, tactic)
    tiles = math.prod(_sizes(p, g)) * p.n * -(-padded_channels(tactic.out.layout, p.k) // t.m)
    blocks = launch.grid[0]
    limits = _in_place_us(p, tactic, device) if in_place(t) else _gathered_us(p, tactic, device, blocks, tiles)
    found = convolved(p, tactic, _rows(p, tactic) * g.steps * 32 + _tap_bytes(g), limits)
    x, element = num_bytes(tactic.ins[0], p.in_shapes[0]), num_bytes(tactic.ins[0], (1, 1, 1, 1))
    again = tiles * 2 * g.rows * g.pairs * p.c * element + blocks * g.steps * t.m * 32
    l2 = moved_us(device, found.read, found.written, found.weights)["l2"] * (1 + again / (x + found.written))
    return replace(found, limits={"l2": l2, **limits})
