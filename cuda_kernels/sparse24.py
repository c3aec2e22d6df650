"""2:4 sparsity in NumPy: check, prune, compress, and the order in which the tensor cores read it.

A group is 4 consecutive input channels of one (output channel, tap); it fits when at most 2 of them are not zero.
`compress` keeps exactly 2 values per group and a 4-bit code: index of the first in bits 0-1, of the second in bits 2-3,
ascending, as `::ordered_metadata` demands (PTX ISA 9.7.14.6): {0,1}=4 {0,2}=8 {1,2}=9 {0,3}=C {1,3}=D {2,3}=E.

Operand A of one mma.sp.m16n8k32 (16 rows, 32 logical = 16 kept columns), lane = 4*g + t:

    values    the m16n8k16 fragment over the kept columns: (g, 2t) (g+8, 2t) (g, 2t+8) (g+8, 2t+8), two halfs each
    metadata  a pair of lanes per quad supplies one 32-bit word each: selector 0 reads t = 0, 1, selector 1 reads t = 2, 3
              word of column half j = t & 1:   bits 0-15 row g,   logical columns 16j .. 16j+15, 4 codes, lowest first
                                               bits 16-31 row g+8, the same columns

So lanes t = 0, 1 hold one k32 step and t = 2, 3 the next: a word per lane serves two instructions.
"""

import itertools

import numpy as np

ENERGY_GROUPS = 1 << 18  # groups squared at a time: 8 MiB of doubles
CODES = (0x4, 0x8, 0x9, 0xC, 0xD, 0xE)
# Bits of a group's nonzero values -> code of the first pair that contains them, a legal code even where fewer than 2
# are set; 0: there is none.
CODE_OF = np.array([next((c for c in CODES if not bits & ~(1 << (c & 3) | 1 << (c >> 2))), 0) for bits in range(16)], np.uint8)


def _groups(w: np.ndarray, axis: int) -> np.ndarray:
    """Returns a view with the groups of `axis` as the last axis of size 4."""
    moved = np.moveaxis(w, axis, -1)
    if moved.shape[-1] % 4:
        raise ValueError(f"2:4 needs an axis that is a multiple of 4, got {moved.shape[-1]}")
    return moved.reshape(*moved.shape[:-1], -1, 4)


def fits(w: np.ndarray, axis: int = 1) -> np.ndarray:
    """Returns bool [K, C // 4, ...] for w [K, C, ...] with C % 4 == 0: true where at most 2 of the 4 channels are not zero."""
    ok = np.count_nonzero(_groups(w, axis), axis=-1) <= 2
    return np.moveaxis(ok, -1, axis)


def stored(w: np.ndarray) -> np.ndarray:
    """Converts weights to FP16, as the tensor cores read them, with underflow to zero and overflow to infinity."""
    with np.errstate(over="ignore"):
        return w.astype(np.float16)


def is_sparse(w: np.ndarray) -> bool:
    """Whether all groups fit once the weights are stored in FP16; the first row is tried first, as most misfits show there."""
    return bool(fits(stored(w[:1])).all() and fits(stored(w)).all())


def prune(w: np.ndarray, axis: int = 1) -> np.ndarray:
    """Returns a copy with the two smallest magnitudes of each group of 4 along `axis` set to zero; of equal ones the lower
    index stays.
    """
    groups = _groups(w, axis)
    sizes, larger = np.abs(groups.astype(np.result_type(w, np.float32))), np.zeros(groups.shape, np.uint8)
    for i, j in itertools.combinations(range(4), 2):
        stays = sizes[..., i] >= sizes[..., j]
        larger[..., j] += stays
        larger[..., i] += ~stays
    pruned = np.where(larger < 2, groups, np.zeros((), w.dtype))
    moved_shape = np.moveaxis(w, axis, -1).shape
    return np.ascontiguousarray(np.moveaxis(pruned.reshape(moved_shape), -1, axis))


def energy(w: np.ndarray, axis: int = 1) -> tuple[float, float]:
    """Returns (sum of the squares that `prune` sets to zero, sum of all squares): the first is 0 to 0.5 of the second."""
    groups, lost, total = _groups(w, axis).reshape(-1, 4), 0.0, 0.0
    for at in range(0, len(groups), ENERGY_GROUPS):
        squares = np.sort(np.square(groups[at : at + ENERGY_GROUPS], dtype=np.float64), axis=-1)
        lost, total = lost + float(squares[:, :2].sum()), total + float(squares.sum())
    return lost, total


def compress(w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Compresses w [M, K] that fits to (values [M, K/2] of w's dtype, codes uint8 [M, K/4]). Raises ValueError naming the first
    misfit.
    """
    groups = _groups(w, 1)
    code = CODE_OF[np.packbits(groups != 0, axis=-1, bitorder="little")[..., 0]]
    if not code.all():
        m, g = np.argwhere(code == 0)[0]
        raise ValueError(f"row {m}, columns {4 * g}-{4 * g + 3}: {groups[m, g].tolist()} has more than 2 non-zeros of 4")
    index = np.stack([code & 3, code >> 2], axis=-1).astype(np.int64)
    return np.take_along_axis(groups, index, axis=-1).reshape(w.shape[0], -1), code


def pack_fragments(a: np.ndarray) -> np.ndarray:
    """Reorders FP16 [M, K], multiples of 16, to [M/16, K/16, 32 lanes, 8]: operand A of m16n8k16 in registers' order a0..a3.

    PTX ISA 9.7.14.5.8: lane 4g+t holds (g, 2t..), (g+8, 2t..), (g, 2t+8..), (g+8, 2t+8..).
    """
    m, k = a.shape
    tiles = a.reshape(m // 16, 2, 8, k // 16, 2, 4, 2)  # m16, row half, g, k16, column half, t, pair
    return np.ascontiguousarray(tiles.transpose(0, 3, 2, 5, 4, 1, 6)).reshape(m // 16, k // 16, 32, 8)


def metadata_bytes(m: int, k: int) -> int:
    """Bytes of packed metadata of M x K weights: a bit for each weight, M padded to 32."""
    return -(-m // 32) * 4 * k


def pack_metadata(codes: np.ndarray) -> np.ndarray:
    """Packs codes uint8 [.., M, K/4], M % 16 == 0 and K % 64 == 0, to uint32 [.., M/32 rounded up, K/64, 32 lanes, 2].

    A lane has one word for two k32 steps of a 16-row tile next to the word of the next tile, so that it loads both at once. A
    missing next tile has legal codes.
    """
    *many, m, quarters = codes.shape
    even = np.full((*many, -(-m // 32) * 32, quarters), CODES[0], np.uint32)
    even[..., :m, :] = codes
    c = even.reshape(-1, 2, 2, 8, quarters // 16, 4, 4)  # m32, m16, row half, g, k64, t, code
    halves = (c << (4 * np.arange(4, dtype=np.uint32))).sum(axis=-1, dtype=np.uint32)  # 16 bits each
    words = halves[:, :, 0] | halves[:, :, 1] << np.uint32(16)  # m32, m16, g, k64, t
    return np.ascontiguousarray(words.transpose(0, 3, 2, 4, 1)).reshape(*many, -1, quarters // 16, 32, 2)


def fragments(rows: np.ndarray, sparse: bool) -> dict[str, np.ndarray]:
    """Packs weights [count][rows][K] as "w" in fragment order; 2:4 ones as their kept values "w" and metadata "meta"."""
    if not sparse:
        return {"w": pack_fragments(rows.reshape(-1, rows.shape[2])).reshape(-1)}
    kept, codes = compress(rows.reshape(-1, rows.shape[2]))
    meta = pack_metadata(codes.reshape(*rows.shape[:2], -1))
    return {"w": pack_fragments(kept).reshape(-1), "meta": meta.reshape(-1)}


def byte_fragments(rows: np.ndarray, sparse: bool) -> dict[str, np.ndarray]:
    """Packs int8 weights [rows][K], K % 128 == 0, as `fragments` does for mma.m16n8k32 and mma.sp.m16n8k64 of bytes.

    Pairs of bytes lie as halfs do. A word of metadata has the codes of 32 columns of one row; lane 4g + t has those of row
    g + 8 (t % 2), columns 32 (t / 2) to 32 (t / 2) + 31 of 64: [M/32 rounded up, K/128, 32 lanes, 2 tiles, 2 steps] words.
    """
    if not sparse:
        return {"w": pack_fragments(rows.view(np.uint16)).reshape(-1)}
    kept, codes = compress(rows)
    even = np.full((-(-len(rows) // 32) * 32, codes.shape[1]), CODES[0], np.uint32)
    even[: len(rows)] = codes
    c = even.reshape(-1, 2, 2, 8, codes.shape[1] // 32, 2, 2, 8)  # m32, tile, row half, g, k128, step, column half, code
    words = (c << (4 * np.arange(8, dtype=np.uint32))).sum(axis=-1, dtype=np.uint32)
    meta = np.ascontiguousarray(words.transpose(0, 4, 3, 6, 2, 1, 5))  # m32, k128, g, column half, row half, tile, step
    return {"w": pack_fragments(kept.view(np.uint16)).reshape(-1), "meta": meta.reshape(-1)}


def fragment_bytes(count: int, rows: int, k: int, sparse: bool) -> dict[str, int]:
    """Bytes of the sections that `fragments` makes."""
    w = count * rows * k * 2
    return {"w": w // 2, "meta": count * metadata_bytes(rows, k)} if sparse else {"w": w}
