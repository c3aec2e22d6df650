"""The patch of a stem's input (conv_stem.py): the shape of a tile, the pitch of its patch, and the order of taps along K."""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from cuda_kernels.device import Device
from tactics.problems.epilogue import MaxPool
from tactics.problems.problem import ConvProblem
from tactics.tactic import Tile

BANKS = 32
IN_PLACE = Tile(64, 256, 16, 4, 2, 1)  # the tile whose pixels wgmma reads in the patch, without a gather; for stems with a pool


@dataclass(frozen=True, slots=True)
class Geometry:
    """A tile of 2**log2_th x 2**log2_tw pixels, and the patch of the image that it reads: `rows` rows, each of `pairs` pairs of
    columns. Only the first `cols` columns are read. The first window begins at column `shift`.

    `taps` [steps of K, 2 registers, 4 lanes, 2 halfs]: the index of the tap (c, r, s) at that place of K, -1 for none. `slots`
    [steps, 4 lanes, loads]: the byte offset in the patch that a lane's load adds to its pixel's; a load reads a word, for one
    register, if `paired`, else a half. In the steps from `full` on, masks clear the bits without taps. `excess`: whether some
    load needs two words of one bank.
    """

    log2_th: int
    log2_tw: int
    rows: int
    cols: int
    shift: int
    pairs: int
    full: int
    paired: bool
    taps: np.ndarray
    slots: np.ndarray
    excess: bool

    @property
    def steps(self) -> int:
        return self.taps.shape[0]

    @property
    def masks(self) -> np.ndarray:
        """The bits that belong to taps, uint32 [steps from `full` on, 4 lanes, 2 registers]."""
        real = (self.taps[self.full :] >= 0).astype(np.uint32) * 0xFFFF
        return (real[..., 0] | real[..., 1] << 16).transpose(0, 2, 1)


@lru_cache(maxsize=1024)
def geometry(p: ConvProblem, pixels: int, wide: bool) -> Geometry:
    """Returns the geometry with the least work for tiles of `pixels`; `wide`: tile rows of at least 16, for stores along
    rows."""
    options = []
    for th, tw in shapes(pixels, wide):
        rows, cols = (
            (t - 1) * s + (k - 1) * d + 1 for t, s, k, d in zip((th, tw), p.stride, (p.r, p.s), p.dilation, strict=True)
        )
        if tile := outputs(p, th, tw):
            tiles = math.prod(-(-size // t) for size, t in zip(p.out_shape[2:], tile, strict=True))
            # To convert an element of the patch takes about half of the time of a pixel's products with 16 taps.
            options.append((tiles * (p.c * rows * (cols + 4) / 2 + pixels * 8), 1 - tw.bit_length(), rows, cols))
    for _, minus, rows, cols in sorted(options):
        best = _ordered(p, pixels, -minus, rows, cols)
        if not best.excess:
            return best
    return _ordered(p, pixels, -min(options)[1], *min(options)[2:])


def _shift(p: ConvProblem) -> int:
    """Returns the number of columns before a tile's first window with which every patch begins at an even column of the
    image."""
    return p.pad[1] % 2 if p.stride[1] % 2 == 0 or not p.epilogue.pool else 0


def shapes(pixels: int, wide: bool) -> list[tuple[int, int]]:
    """Returns (height, width), powers of 2, of every tile of this many pixels; the width is at least 16 if `wide`, else 4."""
    return [(pixels >> log2_tw, 1 << log2_tw) for log2_tw in range(4 if wide else 2, pixels.bit_length())]


def pool_of(p: ConvProblem) -> MaxPool:
    """Returns Epilogue.pool; for a convolution without a pool, a pool of 1x1 windows."""
    return p.epilogue.pool or MaxPool((1, 1), (1, 1), (0, 0), (p.p, p.q))


def outputs(p: ConvProblem, th: int, tw: int) -> tuple[int, int] | None:
    """Returns (rows, columns) of the output that a tile of th x tw results of the convolution gives: as many, or the number of
    the pool's windows inside it; None if no window fits.
    """
    (r, s), (stride_h, stride_w), _, _ = pool_of(p)
    return ((th - r) // stride_h + 1, (tw - s) // stride_w + 1) if th >= r and tw >= s else None


def _ordered(p: ConvProblem, pixels: int, log2_tw: int, rows: int, cols: int) -> Geometry:
    """Returns the geometry with the best of 32 pitches: its slots form the fewest fours. `rows`, `cols`: of the patch."""
    n, tw, shift = np.arange(8), 1 << log2_tw, _shift(p)
    paired = p.stride[1] * p.c % 2 == 0
    found: list[Geometry] = []
    least = -(-(cols + shift) // 2)
    for pairs in range(least, least + BANKS):
        pitch = 2 * pairs * p.c
        base = (n >> log2_tw) * p.stride[0] * pitch + (n & tw - 1) * p.stride[1] * p.c
        c, r, s = (i.reshape(-1) for i in np.indices((p.c, p.r, p.s)))
        halfs = c + r * p.dilation[0] * pitch + (s * p.dilation[1] + shift) * p.c
        members = _slots(halfs, paired)
        at = np.where(members[:, 0] >= 0, halfs[members[:, 0]], halfs[members[:, 1]] - 1)
        clash = _clashes(base, at)
        fours, real = _fours(clash, 2 if paired else 4)
        taps = np.where(real[..., None], members[fours], -1)
        # taps [steps, loads, lanes, halfs] -> [steps, registers, lanes, halfs]: a load fills a register, or one half of it.
        shape = (len(fours), 2, 4, 2)
        whole = (members[fours] >= 0).all(axis=(1, 2, 3)) if paired else np.ones(len(fours), bool)
        taps = taps.reshape(shape) if paired else taps[..., 0].reshape(len(fours), 2, 2, 4).swapaxes(2, 3)
        full = len(fours) if whole.all() else int(whole.argmin())
        slots = np.ascontiguousarray(at[fours].swapaxes(1, 2) * 2, np.uint32)
        log2_th, excess = pixels.bit_length() - 1 - log2_tw, bool(clash.diagonal().any())
        found.append(Geometry(log2_th, log2_tw, rows, cols + shift, shift, pairs, full, paired, taps, slots, excess))
        if len(fours) == -(-len(members) // (8 if paired else 16)):
            break
    return min(found, key=lambda g: len(g.taps))


def _slots(halfs: np.ndarray, paired: bool) -> np.ndarray:
    """Returns the taps that each slot's load reads: [slots, 2 halfs], -1 for none. `halfs`: the offset of each tap in the
    patch.

    A load reads one tap, or if `paired` the taps in a word, one or two; slots with two come first.
    """
    if not paired:
        return np.stack([np.arange(len(halfs)), np.full(len(halfs), -1)], axis=1)
    words, word = np.unique(halfs // 2, return_inverse=True)
    members = np.full((len(words), 2), -1)
    members[word, halfs % 2] = np.arange(len(halfs))
    return members[np.argsort((members < 0).any(axis=1), kind="stable")]


def _clashes(base: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Returns bool [slots, slots]: whether the loads of two slots (on the diagonal: of one) for 8 pixels need two words of one
    bank.

    `base`: the offsets in halfs of 8 pixels; `offsets`: of the slots.
    """
    words = (base + offsets[:, None]) // 2
    held = np.full((len(offsets), BANKS), -1)
    rows = np.arange(len(offsets))[:, None]
    held[rows, words % BANKS] = words
    alone = (held[rows, words % BANKS] != words).any(axis=1)
    clash = np.zeros((len(offsets),) * 2, bool)
    for bank in held.T:
        clash |= (bank[:, None] >= 0) & (bank >= 0) & (bank[:, None] != bank)
    return clash | np.diag(alone)


def _fours(clash: np.ndarray, loads: int) -> tuple[np.ndarray, np.ndarray]:
    """Groups slots into fours without a clash, by first fit; returns (slot, whether it is one and no filling), both [steps,
    loads, 4 lanes].

    A four with fewer slots is filled with its first one. With clashes only of slots 0 and 1, five slots give 1 1 1 1 and 0 2 3
    4.
    """
    fours: list[list[int]] = []
    todo = list(range(len(clash)))
    while todo:
        four = [todo.pop(0)]
        for slot in todo:
            if len(four) < 4 and not clash[slot, four].any():
                four.append(slot)
        todo = [t for t in todo if t not in four]
        fours.append(four)
    fours.sort(key=max)  # slots with one tap stay last
    order = [(four + four[:1] * 3)[:4] for four in fours]
    real = [[i < len(four) for i in range(4)] for four in fours]
    empty = -len(fours) % loads
    padded = np.array(order + order[-1:] * empty), np.array(real + [[False] * 4] * empty)
    return padded[0].reshape(-1, loads, 4), padded[1].reshape(-1, loads, 4)


def in_place(t: Tile) -> bool:
    """Returns whether wgmma reads this tile's pixels in the patch, as with IN_PLACE."""
    return (t.m, t.warps_m) == (IN_PLACE.m, IN_PLACE.warps_m)


def fits_in_place(p: ConvProblem, device: Device) -> bool:
    """Returns whether wgmma can read the pixels in the patch: with 4 channels per pixel, windows begin 16 bytes apart (stride
    2); a row of a window, with the column before it, is a whole number of steps of K; and a pool follows.
    """
    windows = p.stride[1] == 2 and p.s % 4 == 3 and p.pad[1] % 2 == 1 and p.dilation == (1, 1)
    return device.sm == "sm_90a" and p.c >= 3 and windows and bool(p.epilogue.pool and outputs(p, IN_PLACE.n // 16, 16))


@lru_cache(maxsize=1024)
def geometry_in_place(p: ConvProblem, t: Tile) -> Geometry:
    """Returns the geometry of a patch that wgmma reads: a warpgroup has 8 columns of pixels; a row of a window is pairs of
    columns, beginning with the column before it, whose weights are 0.
    """
    tw, shift = 8 * t.warps_n, _shift(p)
    r, s, c = np.indices((p.r, p.s + 1, 4)) - np.array([0, 1, 0])[:, None, None, None]
    taps = np.where((s >= 0) & (c < p.c), (c * p.r + r) * p.s + s, -1).reshape(-1, 2, 4, 2)
    log2_tw, slots = tw.bit_length() - 1, np.zeros((len(taps), 4, 2), np.uint32)  # the kernel does not read these slots
    shape = t.n.bit_length() - 1 - log2_tw, log2_tw, (t.n // tw - 1) * p.stride[0] + p.r, (tw - 1) * 2 + p.s + shift
    return Geometry(*shape, shift, tw - 1 + (p.s + 1) // 2, len(taps), True, taps, slots, False)
