"""Tensor-core products of bytes against sums in NumPy's int64, with fragments laid out by hand (CuTe's: test_layouts.py)."""

import numpy as np
import pytest

from cuda_kernels.emulator import EmulatorError, load
from cuda_kernels.sparse24 import pack_fragments
from tests.cuda_kernels.emulator import test_emulator
from tests.cuda_kernels.emulator.test_emulator import PATTERNS
from tests.independent import micro
from tests.independent.products import LIMITS, Mma

ROWS, QUADS = np.arange(32) // 4, np.arange(32) % 4  # g and t of a lane


def fragment_a(a):  # 16 x k bytes -> [lane][k / 2]: per 16 columns four of row g, then four of row g + 8
    blocks = range(0, a.shape[1], 16)
    return np.stack([a[ROWS + 8 * half, j + 4 * QUADS + i] for j in blocks for half in (0, 1) for i in range(4)], axis=1)


def fragment_b(b):  # k x 8 bytes -> [lane][k / 4]
    return np.stack([b[j + 4 * QUADS + i, ROWS] for j in range(0, b.shape[0], 16) for i in range(4)], axis=1)


def fragment_c(c):  # 16 x 8 -> [lane][4]
    return np.stack([c[ROWS + 8 * (i >> 1), 2 * QUADS + (i & 1)] for i in range(4)], axis=1)


def wrapped(sums):
    return sums.astype(np.uint64).astype(np.uint32).view(np.int32)


def operands(rng, k, other):
    """Returns A and B in int64, over all values of their types, and C, with which some sums exceed 32 bits."""
    a, b = (rng.integers(*LIMITS[t], shape, endpoint=True) for t, shape in (("s8", (16, k)), (other, (k, 8))))
    return a, b, rng.choice([-1, 1], (16, 8)) * rng.integers(2**31 - 2**17, 2**31, (16, 8))


def sparse_case(rng, a):
    """Returns (A with two of each four left, kept bytes [16, 32], words of metadata [32]), every pattern of a group."""
    kept, codes, left = np.zeros((16, 32), np.int64), np.zeros((16, 16), np.uint64), np.zeros_like(a)
    for r in range(16):
        for c in range(16):
            i, j = PATTERNS[rng.integers(6)]
            codes[r, c] = i | j << 2
            kept[r, 2 * c : 2 * c + 2] = a[r, 4 * c + i], a[r, 4 * c + j]
            left[r, [4 * c + i, 4 * c + j]] = kept[r, 2 * c : 2 * c + 2]
    first = np.uint64(4) * np.arange(8, dtype=np.uint64)
    words = [(codes[g + 8 * (t % 2), t // 2 * 8 :][:8] << first).sum() for g, t in zip(ROWS, QUADS, strict=True)]
    return left, kept, np.array(words, np.uint32)


def bytes_of(values):
    return np.ascontiguousarray(values.astype(np.uint8))


@pytest.mark.parametrize("other", ["s8", "u8"])
@pytest.mark.parametrize("seed", range(3))
def test_the_dense_wrapper(other, seed):
    a, b, c = operands(np.random.default_rng(seed), 32, other)
    prog = test_emulator.program("golden_bytes.cu", "dense", UNSIGNED=int(other == "u8"))
    given = [bytes_of(fragment_a(a)), bytes_of(fragment_b(b)), fragment_c(c).astype(np.int32), np.zeros((32, 4), np.int32)]
    stats, out = test_emulator.run(prog, 32, given)
    np.testing.assert_array_equal(out[-1], wrapped(fragment_c(a @ b + c)))
    assert (stats.mma, stats.mma_sp) == (1, 0)
    assert (np.abs(a @ b + c) >= 2**31).any()


@pytest.mark.parametrize("other", ["s8", "u8"])
@pytest.mark.parametrize("seed", range(3))
def test_the_sparse_wrapper(other, seed):
    rng = np.random.default_rng(seed)
    a, b, c = operands(rng, 64, other)
    a, kept, words = sparse_case(rng, a)
    prog = test_emulator.program("golden_bytes.cu", "sparse", UNSIGNED=int(other == "u8"))
    given = [
        bytes_of(fragment_a(kept)),
        bytes_of(fragment_b(b)),
        fragment_c(c).astype(np.int32),
        words,
        np.zeros((32, 4), np.int32),
    ]
    stats, out = test_emulator.run(prog, 32, given)
    np.testing.assert_array_equal(out[-1], wrapped(fragment_c(a @ b + c)))
    assert (stats.mma, stats.mma_sp) == (0, 1)


def test_weights_of_bytes_are_packed_as_halves():
    """Two bytes along K move as one half does."""
    a = np.random.default_rng(1).integers(-128, 128, (16, 32)).astype(np.int8)
    np.testing.assert_array_equal(pack_fragments(a.view(np.float16))[0, 0].view(np.int8).reshape(32, 16), fragment_a(a))


# ---- sums at the ends of 32 bits


def filled(m, a, b, c):
    """Returns the result of an instruction whose A, B and C each hold one value; A's kept columns are the first two of four."""
    of_a, of_b, _ = m.registers
    columns = [np.full((32, of_a), a * 0x01010101), np.full((32, of_b), b * 0x01010101), np.full((32, 4), c & 0xFFFFFFFF)]
    words = [np.full((32, 1), 0x44444444)] if m.sparse else []
    out = micro.run(m.ptx, np.concatenate([*columns, *words], axis=1).astype(np.uint32), 4).view(np.int32)
    assert (out == out[0, 0]).all()
    return int(out[0, 0])


@pytest.mark.parametrize("k, sparse", [(16, False), (32, False), (64, True)])
def test_sums_wrap_or_are_clamped(k, sparse):
    top, bottom, products = 2**31 - 1, -(2**31), min(k, 32)
    for saturate in (False, True):
        m = Mma(k, "u8", "s32", sparse, other="u8", saturate=saturate)
        most = products * 255 * 255
        assert filled(m, 255, 255, 0) == most and filled(m, 255, 255, top - most) == top
        assert filled(m, 255, 255, top - most + 1) == (top if saturate else bottom)
        m = Mma(k, "s8", "s32", sparse, other="u8", saturate=saturate)
        least = products * -128 * 255
        assert filled(m, 0x80, 255, 0) == least and filled(m, 0x80, 255, bottom - least) == bottom
        assert filled(m, 0x80, 255, bottom - least - 1) == (bottom if saturate else top)
        m = Mma(k, "s8", "s32", sparse, other="s8", saturate=saturate)
        assert filled(m, 0x80, 0x80, 5) == products * 2**14 + 5 and filled(m, 0xFF, 0x7F, 0) == -127 * products
        m = Mma(k, "u8", "s32", sparse, other="s8", saturate=saturate)
        assert filled(m, 0x80, 0x80, 0) == products * -(2**14)


# ---- refusals


def metadata_of(lane, word):
    """Runs a sparse product whose metadata is legal but for this lane's."""
    m = Mma(64, "s8", "s32", sparse=True)
    words = np.full(32, 0xEDC98444, np.uint32)
    words[lane] = word
    micro.run(m.ptx, np.concatenate([np.zeros((32, 12), np.uint32), words[:, None]], axis=1), 4)


@pytest.mark.parametrize(
    "lane, word, row, columns",
    [
        (0, 0x44444440, 0, "0 to 3"),
        (3, 0x04444444, 8, "60 to 63"),  # the second row of the quad, its second half
        (7, 0x444444F4, 9, "36 to 39"),
        (29, 0x44A44444, 15, "20 to 23"),
        (30, 0x44446444, 7, "44 to 47"),  # in another order
    ],
)
def test_an_illegal_code_is_a_fault(lane, word, row, columns):
    metadata_of(lane, 0xEDC98444)
    code = next(f"{word >> 4 * i & 15:x}" for i in range(8) if not 0x7310 >> (word >> 4 * i & 15) & 1)
    with pytest.raises(EmulatorError, match=f"metadata: .*row {row}, columns {columns} is 0x{code}") as refused:
        metadata_of(lane, word)
    assert refused.value.check == "metadata" and f"{lane}" in str(refused.value)


SPARSE = Mma(64, "s8", "s32", sparse=True).ptx
DENSE = Mma(32, "s8", "s32").ptx


@pytest.mark.parametrize(
    "text, old, new, words",
    [
        (SPARSE, "%i12, 0;", "%i12, 1;", "sparsity selector 1"),
        (SPARSE, "m16n8k64", "m16n8k32", "combination of mma types or shape"),
        (SPARSE, "sp::ordered_metadata", "sp", "unknown opcode"),
        (SPARSE, "{%i0, %i1, %i2, %i3}", "{%i0, %i1}", "register counts of mma"),
        (DENSE, "m16n8k32", "m16n8k64", "combination of mma types or shape"),
        (DENSE, "m16n8k32", "m16n8k16", "register counts of mma"),
        (DENSE, "m16n8k32", "m8n8k16", "unknown opcode"),
        (DENSE, "s32.s8.s8.s32", "s32.s8.s4.s32", "unknown opcode"),
        (DENSE, "s32.s8.s8.s32", "f32.s8.s8.f32", "unknown opcode"),
        (DENSE, "row.col.s32.s8.s8.s32", "row.col.satfinite.s32.s8.s8.s32.satfinite", "combination of mma types or shape"),
    ],
)
def test_other_forms_are_refused(text, old, new, words):
    load(text, "micro")
    assert text.count(old) == 1
    with pytest.raises(EmulatorError, match=words):
        load(text.replace(old, new), "micro")


def test_satfinite_may_stand_last():
    """CUTLASS writes it there."""
    text = Mma(32, "s8", "s32", saturate=True).ptx
    moved = text.replace("satfinite.s32.s8.s8.s32", "s32.s8.s8.s32.satfinite")
    given = np.full((32, 10), 0x7FFFFFFF, np.uint32)
    np.testing.assert_array_equal(micro.run(moved, given, 4), micro.run(text, given, 4))


@pytest.mark.parametrize("m", [Mma(32, "s8", "s32"), Mma(64, "s8", "s32", sparse=True)], ids=lambda m: m.opcode)
def test_an_operand_that_nobody_has_written_is_a_fault(m):
    """Each register, the metadata's too."""
    for i in range(sum(m.registers) + m.sparse):
        text = m.ptx.replace(f"ld.global.b32 %i{i},", "ld.global.b32 %t0,")
        with pytest.raises(EmulatorError, match="mma reads a register that no instruction has written"):
            micro.run(text, np.full((32, 16), 0x44444444, np.uint32)[:, : sum(m.registers) + m.sparse], 4)
