"""2:4 in NumPy against the definition, and the packed orders against the PTX ISA's layouts, lane by lane."""

import itertools

import numpy as np
import pytest

from cuda_kernels import sparse24

PATTERNS = list(itertools.combinations(range(4), 2))


def decompress(values: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """Undoes sparse24.compress: values [M, K/2], codes [M, K/4] -> [M, K]."""
    pairs = values.reshape(*codes.shape, 2)
    out = np.zeros((*codes.shape, 4), values.dtype)
    index = np.stack([codes & 3, codes >> 2], axis=-1).astype(np.int64)
    np.put_along_axis(out, index, pairs, axis=-1)
    return out.reshape(codes.shape[0], -1)


@pytest.mark.parametrize("pair,code", list(zip(PATTERNS, (0x4, 0x8, 0xC, 0x9, 0xD, 0xE), strict=True)))
def test_each_of_the_six_patterns(pair, code):
    w = np.zeros((1, 4), np.float16)
    w[0, list(pair)] = (1.5, -2.5)
    values, codes = sparse24.compress(w)
    assert codes.tolist() == [[code]] and values.tolist() == [[1.5, -2.5]]
    assert np.array_equal(decompress(values, codes), w)


@pytest.mark.parametrize("kept", [(), (0,), (1,), (2,), (3,)])
def test_fewer_than_two_still_gets_a_legal_code(kept):
    w = np.zeros((1, 4), np.float16)
    w[0, list(kept)] = 7
    values, codes = sparse24.compress(w)
    assert codes[0, 0] in sparse24.CODES
    assert np.array_equal(decompress(values, codes), w)


def test_round_trip_of_random_pruned_weights():
    rng = np.random.default_rng(0)
    w = sparse24.prune(rng.standard_normal((96, 128)).astype(np.float16))
    w[rng.random(w.shape) < 0.1] = 0
    assert np.array_equal(decompress(*sparse24.compress(w)), w)


def test_compress_names_the_first_misfit():
    w = np.zeros((2, 8), np.float16)
    w[1, 4:7] = 1
    with pytest.raises(ValueError, match="row 1, columns 4-7"):
        sparse24.compress(w)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_prune_against_brute_force(axis):
    rng = np.random.default_rng(axis)
    w = rng.integers(-3, 4, (8, 8, 8)).astype(np.float32)  # many ties
    pruned = np.moveaxis(sparse24.prune(w, axis), axis, -1).reshape(-1, 4)
    for got, group in zip(pruned, np.moveaxis(w, axis, -1).reshape(-1, 4), strict=True):
        order = sorted(range(4), key=lambda i: (-abs(group[i]), i))  # of equals the lower index stays
        want = [group[i] if i in order[:2] else 0 for i in range(4)]
        assert got.tolist() == want


def test_fits_counts_along_the_input_channels():
    w = np.zeros((2, 8, 3, 3), np.float32)
    w[1, 4:7, 2, 0] = 1  # three of four
    w[0, 0:2, 1, 1] = 1  # two of four
    ok = sparse24.fits(w)
    assert ok.shape == (2, 2, 3, 3) and not ok[1, 1, 2, 0] and ok.sum() == ok.size - 1


def test_energy(monkeypatch):
    assert sparse24.energy(np.array([[1.0, 1, 1, 1]])) == (2, 4)
    assert sparse24.energy(np.array([[3.0, 0, 4, 0]])) == (0, 25)
    w = np.random.default_rng(0).standard_normal((12, 16, 3, 3)).astype(np.float16)
    gone = (w - sparse24.prune(w)).astype(np.float64)
    for groups in (sparse24.ENERGY_GROUPS, 7):
        monkeypatch.setattr(sparse24, "ENERGY_GROUPS", groups)
        assert sparse24.energy(w) == pytest.approx((np.square(gone).sum(), np.square(w.astype(np.float64)).sum()))


def test_axis_must_be_a_multiple_of_four():
    with pytest.raises(ValueError, match="multiple of 4, got 6"):
        sparse24.fits(np.zeros((2, 6)))


def test_fragments_lie_as_the_isa_draws_them():
    """PTX ISA 9.7.14.5.8, operand A of m16n8k16: a0,a1 (g, 2t..), a2,a3 (g+8, 2t..), a4,a5 (g, 2t+8..), a6,a7 (g+8, ..)."""
    a = np.arange(32 * 48, dtype=np.float16).reshape(32, 48)
    packed = sparse24.pack_fragments(a)
    for m16, k16, lane, i in itertools.product(range(2), range(3), range(32), range(8)):
        g, t = lane >> 2, lane & 3
        row = g if i < 2 or 4 <= i < 6 else g + 8
        col = t * 2 + (i & 1) + (8 if i >= 4 else 0)
        assert packed[m16, k16, lane, i] == a[16 * m16 + row, 16 * k16 + col]


def test_metadata_lies_as_the_isa_draws_it():
    """PTX ISA 9.7.14.6.1, m16n8k32 FP16: row r, 4-group c of a k32 step is nibble 4*(r/8) + c%4 of lane 4*(r%8) + 2*F + c/4,
    where F is the sparsity selector; here step 0 of each 64 columns takes F = 0 and step 1 takes F = 1."""
    rng = np.random.default_rng(1)
    codes = rng.choice(sparse24.CODES, (32, 32)).astype(np.uint8)
    packed = sparse24.pack_metadata(codes)
    assert packed.shape == (1, 2, 32, 2) and packed.dtype == np.uint32
    for row, group in itertools.product(range(32), range(32)):
        r, k64, step, c = row % 16, group // 16, group % 16 // 8, group % 8
        lane, nibble = 4 * (r % 8) + 2 * step + c // 4, 4 * (r // 8) + c % 4
        assert packed[0, k64, lane, row // 16] >> np.uint32(4 * nibble) & np.uint32(15) == codes[row, group]
