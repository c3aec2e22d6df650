"""The emulator's warp, memory and matrix instructions against independent NumPy models; seeds and async modes must agree."""

import struct
from pathlib import Path

import numpy as np
import pytest

from cuda_kernels.compile import compile_kernel
from cuda_kernels.emulator import Memory, Options, launch, load

HERE = Path(__file__).parents[2] / "faulty"


def program(file: str, kernel: str, **values):
    return load(compile_kernel(str(HERE / file), values, "sm_80").ptx, kernel)


def run(prog, block, args, *, grid=1, smem=0, options=None):
    """Arrays are uploaded, ints are passed as they are; returns (stats, the arrays afterwards)."""
    memory, blob, placed = Memory(), b"", []
    for a in args:
        if isinstance(a, np.ndarray):
            placed.append((memory.upload(a), a))
            blob += b"\0" * (-len(blob) % 8) + struct.pack("<Q", placed[-1][0])
        else:
            blob += struct.pack("<i", a)
    stats = launch(prog, (grid, 1, 1), (block, 1, 1), smem, blob, memory, options=options or Options())
    memory.check_red_zones()
    return stats, [memory.read(address, a.nbytes).view(a.dtype).reshape(a.shape) for address, a in placed]


# ---- warps


def test_shuffles_and_votes():
    x = np.random.default_rng(0).integers(0, 1 << 32, 32, dtype=np.uint64).astype(np.uint32)
    _, (_, out) = run(program("golden_warp.cu", "shuffles"), 32, [x, np.zeros((16, 32), np.uint32)])
    i = np.arange(32)
    seg = i & ~7
    ballot = sum(int(v & 1) << k for k, v in enumerate(x))
    want = [
        x[i * 7 % 32],
        x[np.where(i >= 3, i - 3, i)],
        x[np.where(i < 27, i + 5, i)],
        x[i ^ 9],
        x[seg | 2],
        x[np.where(i % 4 >= 1, i - 1, i)],
        x[np.where(i % 16 < 13, i + 3, i)],
        x[i ^ 5],
        np.full(32, ballot),
        np.full(32, int((x == 3).any())),
        np.full(32, int((x < 4000000000).all())),
        [sum(int(x[j] & 3 == v & 3) << j for j in range(32)) for v in x],
        np.full(32, int(x.astype(np.uint64).sum()) & 0xFFFFFFFF),
        np.full(32, x.max()),
        np.full(32, np.bitwise_xor.reduce(x)),
        np.where(i & 1, (x[i ^ 2].astype(np.uint64) + 0xAAAAAAAA) & 0xFFFFFFFF, 0),
    ]
    np.testing.assert_array_equal(out, np.array(want, np.uint32))


@pytest.mark.parametrize("seed", range(8))
def test_divergence(seed):
    x = np.arange(1, 65, dtype=np.int32)
    _, (_, out) = run(program("golden_warp.cu", "divergence"), 64, [x, np.zeros(64, np.int32)], options=Options(seed=seed))

    def one(i, n):
        steps = 0
        while n != 1:
            n = 3 * n + 1 if n & 1 else n // 2
            steps += 1
        case = i % 7
        if case == 0:
            return steps + 10
        if case == 1:
            return steps * 2
        if case in (2, 3):
            return (steps - 5 if case == 2 else steps) ^ 21
        if case == 4:
            return -1 if steps > 10 else steps
        return -steps

    np.testing.assert_array_equal(out, [one(i, int(n)) for i, n in enumerate(x)])


@pytest.mark.parametrize("options", [Options(), Options(seed=5), Options(checks=False), Options(threads=1, seed=9)])
def test_atomics(options):
    x = np.random.default_rng(1).integers(0, 1 << 20, 512, dtype=np.int32)
    start = np.zeros(12, np.int32)
    start[8:10] = -5, 1 << 30
    _, (_, out, total, wide) = run(
        program("golden_warp.cu", "atomics"),
        128,
        [x, start, np.zeros(1, np.float32), np.zeros(1, np.uint64)],
        grid=4,
        options=options,
    )
    np.testing.assert_array_equal(out[:8], np.bincount(x & 7, minlength=8))
    bits = int(np.bitwise_or.reduce(np.uint32(1) << (x.astype(np.uint32) & 31)))
    assert (out[8], out[9], int(out[10]) & 0xFFFFFFFF, out[11]) == (x.max(), x.min(), bits, 512 % 7)
    assert total[0] == 768 and wide[0] == x.astype(np.uint64).sum()


def test_local_memory_and_calls():
    x = np.random.default_rng(2).standard_normal(64).astype(np.float32)
    _, (_, out) = run(program("golden_warp.cu", "local_and_calls"), 64, [x, np.zeros(64, np.float32), 37])
    for t in range(64):
        keep = [x[t] * i for i in range(16)]
        for i in range(37):
            keep[(t + i) & 15] += i
        want = sum(v * (i + 1) for i, v in enumerate(keep)) + x[t] * 2 ** (t & 3) + 2 ** (t & 3) - 1 - 7
        assert abs(out[t] - want) < 1e-2, t


@pytest.mark.parametrize("seed", [0, 3, 4])
def test_named_barriers_and_reductions(seed):
    x = np.arange(256, dtype=np.int32)
    _, (_, out) = run(
        program("golden_warp.cu", "named_barriers"), 256, [x, np.zeros(128, np.int32)], options=Options(seed=seed)
    )
    np.testing.assert_array_equal(out, (np.arange(128) ^ 127) * 3)
    _, (_, out) = run(
        program("golden_warp.cu", "barrier_reductions"), 96, [x[:96], np.zeros(96, np.int32)], options=Options(seed=seed)
    )
    assert (out == 48 * 4 + 2 + 1).all()


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_spin_lock_inside_a_warp_ends(seed):
    args = [np.zeros(1, np.int32), np.zeros(1, np.int32)]
    _, (lock, out) = run(program("golden_warp.cu", "spin_lock"), 32, args, options=Options(seed=seed))
    assert (lock[0], out[0]) == (0, 32)


# ---- matrices; the fragment layouts below are written from the ISA's tables, per lane and element


def fragment_a(m):  # 16 x 16 halves -> [lane][8]
    rows, cols = zip(*[((i >> 1 & 1) * 8, (i >> 2) * 8 + (i & 1)) for i in range(8)], strict=True)
    return np.array([[m[lane // 4 + rows[i], 2 * (lane % 4) + cols[i]] for i in range(8)] for lane in range(32)], np.float16)


def fragment_b(m):  # k x 8 halves -> [lane][k / 4]
    k = m.shape[0]
    return np.array(
        [[m[2 * (lane % 4) + (i & 1) + 8 * (i >> 1), lane // 4] for i in range(k // 4)] for lane in range(32)], np.float16
    )


def fragment_c(m):  # 16 x 8 -> [lane][4]
    return np.array([[m[lane // 4 + 8 * (i >> 1), 2 * (lane % 4) + (i & 1)] for i in range(4)] for lane in range(32)], m.dtype)


def test_dense_mma_layout():
    rng = np.random.default_rng(3)
    a, b = rng.standard_normal((16, 16)).astype(np.float16), rng.standard_normal((16, 8)).astype(np.float16)
    c = rng.standard_normal((16, 8)).astype(np.float32)
    want = a.astype(np.float64) @ b.astype(np.float64) + c
    stats, out = run(
        program("golden_matrix.cu", "dense"), 32, [fragment_a(a), fragment_b(b), fragment_c(c), np.zeros((32, 4), np.float32)]
    )
    np.testing.assert_allclose(out[-1], fragment_c(want), rtol=1e-5, atol=1e-5)
    assert (stats.mma, stats.mma_sp) == (1, 0)
    half = c.astype(np.float16)
    _, out = run(
        program("golden_matrix.cu", "dense_half"),
        32,
        [fragment_a(a), fragment_b(b), fragment_c(half), np.zeros((32, 4), np.float16)],
    )
    want = a.astype(np.float64) @ b.astype(np.float64) + half
    np.testing.assert_allclose(out[-1].astype(np.float32), fragment_c(want), rtol=2e-3, atol=2e-3)


PATTERNS = [(0, 1), (0, 2), (1, 2), (0, 3), (1, 3), (2, 3)]


def sparse_case(selector, seed):
    """(dense A, compressed fragments, metadata word per lane); lanes the selector does not name hold illegal metadata."""
    rng = np.random.default_rng(seed)
    full, packed = np.zeros((16, 32), np.float16), np.zeros((16, 16), np.float16)
    words = np.zeros(32, np.uint64)
    named = set()
    for r in range(16):
        for c in range(8):
            i, j = PATTERNS[(r + 5 * c + seed) % 6]
            values = rng.standard_normal(2).astype(np.float16)
            full[r, 4 * c + i], full[r, 4 * c + j] = values
            packed[r, 2 * c : 2 * c + 2] = values
            pair = 2 * selector + c // 4  # the lane of the quad that supplies this chunk
            lane, at = 4 * (r % 8) + pair, 16 * (r // 8) + 4 * (c % 4)
            words[lane] |= np.uint64((i | j << 2) << at)
            named.add(lane)
    for lane in set(range(32)) - named:
        words[lane] = 0xFFFFFFFF
    return full, fragment_a(packed), words.astype(np.uint32)


@pytest.mark.parametrize("kernel,selector", [("sparse_0", 0), ("sparse_1", 1)])
@pytest.mark.parametrize("seed", range(6))
def test_sparse_mma_layout(kernel, selector, seed):
    rng = np.random.default_rng(100 + seed)
    full, fragments, words = sparse_case(selector, seed)
    b, c = rng.standard_normal((32, 8)).astype(np.float16), rng.standard_normal((16, 8)).astype(np.float32)
    want = full.astype(np.float64) @ b.astype(np.float64) + c
    stats, out = run(
        program("golden_matrix.cu", kernel), 32, [fragments, fragment_b(b), fragment_c(c), words, np.zeros((32, 4), np.float32)]
    )
    np.testing.assert_allclose(out[-1], fragment_c(want), rtol=1e-5, atol=1e-5)
    assert (stats.mma, stats.mma_sp) == (0, 1)


def test_columns_a_sparse_row_drops_are_not_multiplied():
    full, fragments, words = sparse_case(0, 0)
    b = np.ones((32, 8), np.float16)
    b[1] = np.inf
    _, out = run(
        program("golden_matrix.cu", "sparse_0"),
        32,
        [fragments, fragment_b(b), np.zeros((32, 4), np.float32), words, np.zeros((32, 4), np.float32)],
    )
    keeps = fragment_c(np.repeat((full[:, 1] != 0)[:, None], 8, 1))
    assert (np.isfinite(out[-1]) == ~keeps).all() and keeps.any() and not keeps.all()


def test_ldmatrix_and_movmatrix():
    x = np.arange(2048, dtype=np.uint16)
    rng = np.random.default_rng(4)
    rows = (rng.permutation(256)[:32] * 16).astype(np.uint32)
    _, (_, _, out) = run(program("golden_matrix.cu", "matrices"), 32, [x, rows, np.zeros((7, 32), np.uint32)])
    tiles = np.array([[x[r // 2 : r // 2 + 8] for r in rows[8 * j : 8 * j + 8]] for j in range(4)])

    def fragment(tile):
        return np.array([tile[lane // 4, 2 * (lane % 4) : 2 * (lane % 4) + 2] for lane in range(32)], np.uint16).view(
            np.uint32
        )[:, 0]

    want = [*(fragment(t) for t in tiles), fragment(tiles[0].T), fragment(tiles[1].T), fragment(tiles[0].T)]
    np.testing.assert_array_equal(out, np.array(want))


# ---- cp.async, orders, counters


@pytest.mark.parametrize("checks", [True, False])
def test_async_modes_and_seeds_agree(checks):
    x = np.random.default_rng(5).standard_normal((9 * 64, 4)).astype(np.float32)
    prog = program("golden_memory.cu", "pipeline")
    results = []
    for mode in ("eager", "late"):
        for seed in (0, 1, 2, 3):
            args = [x, np.zeros((3, 64), np.float32), 9, 9 * 64 - 37]
            stats, (_, out) = run(prog, 64, args, grid=3, smem=3 * 64 * 16, options=Options(checks, mode, seed))
            results.append(out)
    padded = x.copy()
    padded[9 * 64 - 37 :] = 0
    t = np.arange(64)
    want = sum(padded[64 * k + (t * 5 + k) % 64] @ np.array([1, 2, 3, 4], np.float32) for k in range(9))
    np.testing.assert_allclose(results[0][0], want, rtol=1e-4, atol=1e-4)
    for r in results[1:]:
        np.testing.assert_array_equal(r, results[0])
    assert stats.async_bytes == 3 * 9 * 64 * 16


def test_ldmatrix_bank_conflicts_are_counted():
    x = np.random.default_rng(6).integers(0, 1 << 31, 1024, dtype=np.uint32)
    plain, (_, first) = run(program("golden_memory.cu", "swizzle"), 32, [x, np.zeros(32, np.uint32)], smem=4096)
    good, (_, second) = run(program("golden_memory.cu", "swizzle", SWIZZLED=1), 32, [x, np.zeros(32, np.uint32)], smem=4096)
    np.testing.assert_array_equal(first, second)
    # 8 instructions of 4 matrices; 8 rows of 128 bytes fall on one bank group: 8 wavefronts where 1 would do
    assert plain.excess == {"ldmatrix": 8 * 4 * 7, "store": 0} and good.excess == {"ldmatrix": 0, "store": 0}
    (line,) = [n for n in plain.lines if n.opcode.startswith("ldmatrix")]
    assert line.excess_wavefronts == 224 and line.file.endswith("golden_memory.cu") and line.line > 20


@pytest.mark.parametrize("stride,excess", [(1, 0), (2, 1), (4, 3), (32, 31), (33, 0)])
def test_word_bank_conflicts(stride, excess):
    stats, _ = run(program("golden_memory.cu", "conflicts"), 32, [np.zeros(32, np.int32), stride], smem=33 * 32 * 4)
    assert stats.excess == {"store": excess, "load": excess}


@pytest.mark.parametrize("stride,sectors", [(1, 4), (2, 8), (8, 32), (0, 1)])
def test_sectors_per_request(stride, sectors):
    stats, _ = run(program("golden_memory.cu", "requests"), 32, [np.zeros(32 * 8, np.int32), np.zeros(32, np.int32), stride])
    assert (stats.sectors, stats.ideal_sectors) == (sectors + 4, (4 if stride else 1) + 4)
    assert (stats.global_loads, stats.global_stores, stats.global_bytes) == (1, 1, 256)
