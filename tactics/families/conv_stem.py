"""Convolution of a 1- to 4-channel image straight from the network's input (conv_stem.cu): tiles, tap order, launches, time.

The kernel reads a patch of the image, whatever its dtype, into FP16 planes in shared memory and gathers the pixels operand
from there: element (tap, pixel) is the half at base(pixel) + offset(tap). One load instruction reads 4 taps for 8 pixels.
`geometry` chooses the tile's shape and the patch's pitch, and sorts the taps into fours whose 32 halfs never need two words
of one bank; the packed weights' columns follow that order.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

import numpy as np

from cuda_kernels import sparse24
from cuda_kernels.device import Device
from tactics.format import HALF_FORMATS, Format, Strides, num_bytes, padded_channels, too_large
from tactics.problems.epilogue import RELU
from tactics.problems.problem import ConvProblem
from tactics.reason import Candidates, no_room, unsupported
from tactics.roofline import LATENCY_CLK, Counts, convolved, moved_us, resident, rounds_us, tensor_rate, throttled
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
from tactics.tactic import Only, Tactic, Tile, restrict

MAX_CHANNELS, MAX_TAPS = 4, 512
BANKS = 32
# An image as it comes from outside.
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
MMA_EFFICIENCY = 0.8  # of the rate of long main loops: operands come element by element, behind each other
FILL_CLK, EPILOGUE_CLK = 900, 600
SMEM_BYTES_PER_CLK = 128
CASES = {"conv_stem": (ConvProblem(1, 3, 23, 21, 33, 7, 7, (2, 2), (3, 3, 3, 3), epilogue=RELU),)}


@dataclass(frozen=True, slots=True)
class Geometry:
    """A tile is 2**log2_th x 2**log2_tw pixels; its patch has rows x cols pixels, `pitch` and `plane` are halfs.

    `order` [steps of K, 4 instructions, 4 lanes]: index of the tap (c, r, s) read there; `real`: whether it counts (weight
    0 where not). `excess`: whether some instruction needs two words of one bank.
    """

    log2_th: int
    log2_tw: int
    rows: int
    cols: int
    pitch: int
    plane: int
    offsets: np.ndarray
    order: np.ndarray
    real: np.ndarray
    excess: bool

    @property
    def steps(self) -> int:
        return self.order.shape[0]


def candidates(p: ConvProblem, device: Device, only: Only = None) -> Candidates:
    """(tactic or family, reason against it or None). `only`: of the tiles this one alone."""
    if reason := family_reason(p):
        yield "conv_stem", unsupported(reason)
        return
    for tile, x, y in product(restrict("conv_stem", TILES, only), INPUTS, HALF_FORMATS):
        tactic = Tactic("conv_stem", tile, (x, y) if p.epilogue.residual else (x,), y)
        if tile.m >= 2 * padded_channels("hwc16", p.k):
            yield tactic, unsupported(f"a tile of {tile.m} channels for {p.k}")
            continue
        yield tactic, unsupported(tile_reason(p, tactic, device))


def tile_reason(p: ConvProblem, tactic: Tactic, device: Device) -> str:
    """Why this tile cannot run there, or an empty string."""
    if p.epilogue.pool and (tactic.gemm.m % 64 or linear(tactic.out)):
        return "max pool: expected a vector format for the output and a tile of a multiple of 64 channels"
    if p.epilogue.pool and not any(_outputs(p, *shape) for shape in _shapes(tactic.gemm.n, False)):
        r, s = p.epilogue.pool[:2]
        return f"max pool: a window of {r} x {s} does not fit a tile of {tactic.gemm.n} pixels"
    if why := no_room(shared_bytes(p, tactic), device):
        return why
    elements = p.c * _geometry(p, tactic).plane
    return "" if elements < 2**16 else f"a patch of {elements} elements: they are counted with 16 bits"


def family_reason(p: ConvProblem) -> str:
    """Why this is no stem, or an empty string."""
    if p.c > MAX_CHANNELS:
        return f"a stem has at most {MAX_CHANNELS} input channels, not {p.c}"
    if p.groups != 1:
        return f"grouped convolution (groups = {p.groups})"
    if p.c * p.r * p.s > MAX_TAPS:
        return f"{p.c * p.r * p.s} taps: at most {MAX_TAPS} are kept in shared memory"
    return too_large((p.in_shapes[0], p.out_shape))


def interleaved(p: ConvProblem, tactic: Tactic) -> bool:
    """Whether a pixel's channels are neighbours in the input (one channel is a plane either way)."""
    return tactic.ins[0].layout == "hwc" and p.c > 1


@lru_cache(maxsize=1024)
def geometry(p: ConvProblem, pixels: int, hwc: bool, wide: bool) -> Geometry:
    """The least work for `pixels` per tile; `wide`: rows of 16 at least, for stores along pixels."""
    options = []
    for th, tw in _shapes(pixels, wide):
        rows, cols = (
            (t - 1) * s + (k - 1) * d + 1 for t, s, k, d in zip((th, tw), p.stride, (p.r, p.s), p.dilation, strict=True)
        )
        if tile := _outputs(p, th, tw):
            tiles = math.prod(-(-size // t) for size, t in zip(p.out_shape[2:], tile, strict=True))
            # Threads that convert cost about as much per element as those that multiply do per pixel and 16 taps.
            options.append((tiles * (p.c * rows * (cols + 4) + pixels * 8), 1 - tw.bit_length(), rows, cols))
    for _, minus, rows, cols in sorted(options)[:3]:
        best = _ordered(p, pixels, hwc, -minus, rows, cols)
        if not best.excess:
            return best
    return _ordered(p, pixels, hwc, -min(options)[1], *min(options)[2:])


def _shapes(pixels: int, wide: bool) -> list[tuple[int, int]]:
    """(height, width) of tiles of so many pixels, powers of two."""
    return [(pixels >> log2_tw, 1 << log2_tw) for log2_tw in range(4 if wide else 2, pixels.bit_length())]


def _outputs(p: ConvProblem, th: int, tw: int) -> tuple[int, int] | None:
    """Rows and columns of the output that a tile of th x tw results gives: those, or the pool's windows inside."""
    if not p.epilogue.pool:
        return th, tw
    r, s, stride_h, stride_w = p.epilogue.pool[:4]
    return ((th - r) // stride_h + 1, (tw - s) // stride_w + 1) if th >= r and tw >= s else None


def _ordered(p: ConvProblem, pixels: int, hwc: bool, log2_tw: int, rows: int, cols: int) -> Geometry:
    """The pitch (of the next 24) whose taps sort into the fewest fours."""
    n, tw = np.arange(8), 1 << log2_tw
    fewest = -(-p.c * p.r * p.s // 16)
    found: list[Geometry] = []
    for pitch in range(cols, cols + 24):
        plane = rows * pitch
        if hwc:  # a warp writes C runs of 32/C halfs: planes a whole run apart, modulo the banks
            run = BANKS if p.c == 2 else BANKS // 2
            plane += (run - plane) % (2 * BANKS)
        base = (n >> log2_tw) * p.stride[0] * pitch + (n & tw - 1) * p.stride[1]
        c, r, s = (i.reshape(-1) for i in np.indices((p.c, p.r, p.s)))
        offsets = c * plane + r * p.dilation[0] * pitch + s * p.dilation[1]
        clash = _clashes(base, offsets)
        order, real = _fours(clash)
        log2_th, excess = pixels.bit_length() - 1 - log2_tw, bool(clash.diagonal().any())
        found.append(Geometry(log2_th, log2_tw, rows, cols, pitch, plane, offsets, order, real, excess))
        if len(order) == fewest:
            break
    return min(found, key=lambda g: len(g.order))


def _clashes(base: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """bool [taps, taps]: whether the halfs base + offset of two taps (or of one) need two words of one bank."""
    words = (base + offsets[:, None]) // 2
    held = np.full((len(offsets), BANKS), -1)
    rows = np.arange(len(offsets))[:, None]
    held[rows, words % BANKS] = words
    alone = (held[rows, words % BANKS] != words).any(axis=1)
    clash = np.zeros((len(offsets),) * 2, bool)
    for bank in held.T:
        clash |= (bank[:, None] >= 0) & (bank >= 0) & (bank[:, None] != bank)
    return clash | np.diag(alone)


def _fours(clash: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Taps into fours without clashes, first fit -> (order, real) as in Geometry; empty places repeat their four's first."""
    fours: list[list[int]] = []
    todo = list(range(len(clash)))
    while todo:
        four = [todo.pop(0)]
        for tap in todo:
            if len(four) < 4 and not clash[tap, four].any():
                four.append(tap)
        todo = [t for t in todo if t not in four]
        fours.append(four)
    order = [(four + four[:1] * 3)[:4] for four in fours]
    real = [[i < len(four) for i in range(4)] for four in fours]
    empty = -len(fours) % 4
    padded = np.array(order + order[:1] * empty), np.array(real + [[False] * 4] * empty)
    return padded[0].reshape(-1, 4, 4), padded[1].reshape(-1, 4, 4)


def _geometry(p: ConvProblem, tactic: Tactic) -> Geometry:
    return geometry(p, tactic.gemm.n, interleaved(p, tactic), linear(tactic.out))


def shared_bytes(p: ConvProblem, tactic: Tactic) -> int:
    """Tap table, all weights of the tile and the patch, or the epilogue's staging tile over them."""
    t, g = tactic.gemm, _geometry(p, tactic)
    return max(g.steps * (64 + t.m * 32) + (p.c * g.plane * 2 + 15) // 16 * 16, t.m * t.n * 2 + t.n * 4)


# Members of the kernel's struct under POOL: Epilogue.pool, then outputs of the pool per tile.
POOL_ARGS = "pool_r pool_s pool_stride_h pool_stride_w pool_pad_t pool_pad_l pool_h pool_w tile_h tile_w".split()


def launches(p: ConvProblem, tactic: Tactic, strided: tuple[Strides, ...] | None = None) -> tuple[Launch, ...]:
    t, g, x_fmt, y_fmt = tactic.gemm, _geometry(p, tactic), tactic.ins[0], tactic.out
    x, *added, y = strided or own_strides(p, tactic)
    hwc, y_c = interleaved(p, tactic), padded_channels(y_fmt.layout, p.k)
    values = {
        **t.values,
        "IN_TYPE": IN_TYPES[x_fmt.dtype],
        "IN_HWC": int(hwc),
        "OUT_LINEAR": int(linear(y_fmt)),
        **epilogue_values(p),
        "POOL": int(bool(p.epilogue.pool)),
        **({"OUT_F32": 1} if y_fmt.dtype == "fp32" else {}),
    }
    tile = _outputs(p, 1 << g.log2_th, 1 << g.log2_tw)
    if tile is None:
        raise ValueError(f"{tactic}: the pool's window does not fit the tile")
    tiles_h, tiles_w = (-(-size // t) for size, t in zip(p.out_shape[2:], tile, strict=True))
    conv = conv_pointers(p) | {"meta": NULL} | window_args(p) | alpha_beta(p) | view_args("x_", x) | view_args("y_", y)
    conv |= ints(n=p.n, c=p.c, h=p.h, w_in=p.w, k=p.k, p=p.p, q=p.q, r=p.r, s=p.s)
    conv |= ints(c8=1, k_tiles=g.steps, m16=-(-p.k // 16), y_c=y_c)
    for s in added:
        conv |= view_args("r_", s)
    args = member("c", conv) | {"taps": ("weights", "taps")}
    args |= ints(log2_tw=g.log2_tw, tiles_h=tiles_h, tiles_w=tiles_w, rows=g.rows, cols=g.cols, pitch=g.pitch, plane=g.plane)
    args |= ints(by_pitch=2**32 // g.pitch + 1, by_plane_or_c=_signed(2**32 // (p.c if hwc else g.plane) + 1))
    if p.epilogue.pool:
        args |= ints(**dict(zip(POOL_ARGS, (*p.epilogue.pool, *tile), strict=True)))
    blocks = -(-y_c // t.m) * p.n * tiles_h * tiles_w
    return (launch("conv_stem", values, (blocks, 1, 1), t.threads, shared_bytes(p, tactic), args),)


def _signed(v: int) -> int:
    """The 32-bit integer with these bits."""
    return v - 2**32 if v >= 2**31 else v


def pack(p: ConvProblem, tactic: Tactic, weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Weights [K,C,R,S] with their columns in the geometry's order, in fragment order; the taps' byte offsets; bias, slope."""
    g, m16 = _geometry(p, tactic), -(-p.k // 16)
    # Instruction j of lane t reads k = 8 * (j >> 1) + 2 * t + (j & 1) of its step.
    j, t = np.indices((4, 4))
    column = np.arange(g.steps)[:, None, None] * 16 + 8 * (j >> 1) + 2 * t + (j & 1)
    flat = np.zeros((m16 * 16, g.steps * 16), np.float16)
    flat[: p.k, column[g.real]] = np.asarray(weights["w"], np.float16).reshape(p.k, -1)[:, g.order[g.real]]
    sections = {"w": sparse24.pack_fragments(flat).reshape(-1), **tables(p, tactic)}
    return sections | vector_sections(p, weights, m16 * 16)


def section_bytes(p: ConvProblem, tactic: Tactic) -> dict[str, int]:
    """Bytes of the sections that `pack` makes."""
    g, rows16 = _geometry(p, tactic), -(-p.k // 16) * 16
    return {"w": rows16 * g.steps * 32, "taps": g.steps * 64} | dict.fromkeys(p.epilogue.vectors, 4 * rows16)


def tables(p: ConvProblem, tactic: Tactic) -> dict[str, np.ndarray]:
    """The section that follows from the problem: byte offsets of the taps."""
    g = _geometry(p, tactic)
    return {"taps": np.ascontiguousarray((g.offsets[g.order] * 2).transpose(0, 2, 1), np.uint32).reshape(-1)}


def counts(p: ConvProblem, tactic: Tactic, device: Device) -> Counts:
    """An SM's blocks convert their patches, then multiply; resident blocks overlap one's loads with another's products."""
    t, g = tactic.gemm, _geometry(p, tactic)
    (launch,) = launches(p, tactic)
    blocks = launch.grid[0]
    warps, mt, nt = t.threads // 32, t.m // t.warps_m // 16, t.n // t.warps_n // 8
    at_once = resident(device, t.threads, min(255, mt * nt * 5 + 64), launch.smem)
    at_work = min(at_once, math.ceil(blocks / device.num_sms))
    mma = t.m * t.n * 16 / (tensor_rate(device, at_work * warps) * MMA_EFFICIENCY)
    # Per step and warp: 4 gathers per 8 pixels, one clock each; weights 512 bytes per 16 rows. Issue: 4 warps at once.
    smem = warps * (nt * 4 + mt * 512 / SMEM_BYTES_PER_CLK + 1)
    issue = warps / 4 * (nt * (10 + mt) + mt + 2)
    clk = {"mma": mma, "smem": smem, "issue": issue}
    loop = g.steps * (max(clk.values()) + throttled(device, mma))
    patch = p.c * g.plane
    fill = FILL_CLK + math.ceil(patch / (t.threads * 8)) * LATENCY_CLK / 2
    ends = t.m * t.n * epilogue_instructions(p) / 128
    convert = patch * 22 / 128  # about 22 instructions per element
    epilogue = EPILOGUE_CLK + t.m * t.n * 2 * (2 if p.epilogue.residual else 1) * (4 if linear(tactic.out) else 1) / 64
    overlap = (at_work - 1) * epilogue / 2
    limits = rounds_us(device, clk, blocks, at_once, loop + convert, fill + epilogue + ends, overlap)
    found = convolved(p, tactic, -(-p.k // 16) * g.steps * 512 + g.steps * 64, limits)
    # Patches overlap: their halos come from L2 again.
    x, element = num_bytes(tactic.ins[0], p.in_shapes[0]), num_bytes(tactic.ins[0], (1, 1, 1, 1))
    l2 = moved_us(device, found.read, found.written, found.weights)["l2"] * (1 + blocks * patch * element / (x + found.written))
    return replace(found, limits={"l2": l2, **limits})
