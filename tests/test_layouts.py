"""The emulator's and the kernels' layouts against CuTe's, as tests/independent/layouts.jsonl has them."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from cuda_kernels.compile import compile_kernel
from cuda_kernels.emulator import EmulatorError, load
from cuda_kernels.sparse24 import compress, pack_fragments, pack_metadata, prune
from tests.independent import layouts, micro, packages
from tests.independent.layouts import places, table
from tests.independent.products import Mma, dense_name, loaded_wrong, moved_wrong, sparse_operands, wrong

FACTORS = ("f16", "bf16", "tf32", "e4m3")
FLOATS = [(factor, factor, total, False) for factor in FACTORS for total in ("f32", "f16")]
BYTES = [(*signs, "s32", saturate) for signs in itertools.product(("s8", "u8"), repeat=2) for saturate in (False, True)]
SHAPES = [
    Mma(k, factor, total, sparse, other=other, saturate=saturate)
    for sparse in (False, True)
    for k in (4, 8, 16, 32, 64)
    for factor, other, total, saturate in (*FLOATS, *BYTES)
]


def executes(m: Mma) -> bool:
    try:
        load(m.ptx, "micro")
    except EmulatorError as e:
        assert e.check == "unknown instruction"
        return False
    return True


EXECUTED = [m for m in SHAPES if executes(m)]


@pytest.mark.parametrize("m", EXECUTED, ids=lambda m: m.opcode)
def test_every_mma_has_the_layout_of_cute(m):
    """The table has a record for each shape that the emulator executes, and by it the product comes out exactly."""
    for seed, selector in itertools.product(range(3), (0, 1) if m.sparse and m.sum != "s32" else (0,)):
        assert wrong(replace(m, selector=selector), seed) == 0


def test_the_shapes_that_are_executed():
    assert len(EXECUTED) == 34 and sum(m.sparse for m in EXECUTED) == 11
    assert {(m.k, m.sparse) for m in EXECUTED if m.sum == "s32"} == {(16, False), (32, False), (64, True)}
    for m in EXECUTED:
        assert m.sparse or f"{dense_name(m)} A" in table()


@pytest.mark.parametrize("trans", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_ldmatrix_has_the_layout_of_cute(count, trans):
    assert loaded_wrong(count, trans) == 0


def test_movmatrix_is_a_store_and_a_transposed_load():
    """No program of others uses it: it is held to CuTe's ldmatrix.trans of the matrix that its lanes hold."""
    assert moved_wrong() == 0


@pytest.mark.parametrize("chunks", [2, 4, 8, 16])
def test_the_kernels_swizzle_is_that_of_cute(chunks):
    source = str(layouts.HERE / "swizzle.cu")
    text = compile_kernel(source, {"CHUNKS": chunks}, "sm_80").ptx
    given = np.zeros((32, 1), np.uint32)  # out is [32 rows][chunks]
    got = micro.run(text, given, chunks)
    np.testing.assert_array_equal(got, 16 * table()[f"rows of {16 * chunks} bytes"]["at"].reshape(32, chunks))


def test_weights_are_packed_as_cute_lays_them_out():
    rng = np.random.default_rng(5)
    a = rng.standard_normal((16, 16)).astype(np.float16)
    np.testing.assert_array_equal(pack_fragments(a)[0, 0], a[places("m16n8k16 f16 A")])


@pytest.mark.parametrize("step", [0, 1])
def test_sparse_weights_are_packed_as_cute_lays_them_out(step):
    """A word per lane serves two steps of 32 columns; a step's lanes are those that its selector reads."""
    w = prune(np.random.default_rng(6).standard_normal((16, 64)).astype(np.float16))
    values, words = sparse_operands(Mma(32, "f16", sparse=True, selector=step), w[:, 32 * step :][:, :32])
    kept, codes = compress(w)
    np.testing.assert_array_equal(pack_fragments(kept)[0, step], values)
    read = words[:, 0] != 0xFFFFFFFF
    assert read.sum() == 16
    np.testing.assert_array_equal(pack_metadata(codes)[0, 0, read, 0], words[read, 0])


# ---- Hopper: descriptors as the ISA's text defines them, independent of our kernels

TILES = [name for name, record in table().items() if "descriptors" in record]
WIDTHS = {0: 1, 1: 8, 2: 4, 3: 2}  # bits 62-63 of a descriptor -> 16-byte units in a row of the swizzle's pattern


def offsets(descriptor: int, major: str) -> np.ndarray:
    """Bytes of the halves [64, 16] that a descriptor of wgmma describes (PTX ISA, matrix descriptor and canonical layouts)."""
    start, leading, stride = (16 * (descriptor >> at & 0x3FFF) for at in (0, 16, 32))
    unit = WIDTHS[descriptor >> 62]
    mn, k = np.arange(64)[:, None], np.arange(16)[None, :]
    if major == "k":
        inside = k * 2 if unit > 1 else k // 8 * leading + k % 8 * 2
        at = start + mn % 8 * unit * 16 + mn // 8 * stride + inside
    else:
        wide = 8 * unit
        across, along = (leading, stride) if unit > 1 else (stride, leading)
        at = start + mn % wide * 2 + mn // wide * across + k % 8 * unit * 16 + k // 8 * along
    return at ^ (at >> 7 & unit - 1) << 4


@pytest.mark.parametrize("name", TILES)
def test_a_descriptor_of_wgmma_means_what_cute_means(name):
    record = table()[name]
    want = 2 * record["at"].reshape(64, 4, 16)
    for step, text in enumerate(record["descriptors"]):
        np.testing.assert_array_equal(offsets(int(text, 16), record["major"]), want[:, step])


@pytest.mark.parametrize("name", ["wgmma A", "wgmma C"])
def test_a_fragment_of_wgmma_is_four_of_mma(name):
    """Warp w holds rows 16w to 16w + 15 as an mma's A, or two of its C side by side."""
    row, column = places(name)
    lane, value = np.arange(128)[:, None], np.arange(8)[None, :]
    np.testing.assert_array_equal(row, 16 * (lane // 32) + lane % 32 // 4 + 8 * (value // 2 % 2))
    np.testing.assert_array_equal(column, 8 * (value // 4) + lane % 4 * 2 + value % 2)


def test_metadata_of_hopper_is_a_permutation_of_bytes():
    """CUTLASS stores 128 x 128 columns' codes, a byte for eight columns, without a hole: two rows of a k32 step to a word."""
    at = table()["metadata of 128 x 128"]["at"].reshape(128, 16)
    assert sorted(at.reshape(-1)) == list(range(2048))
    row, byte = np.arange(128)[:, None], np.arange(16)[None, :]
    np.testing.assert_array_equal(at % 2, np.broadcast_to(byte % 2, at.shape))
    assert (np.diff(at.reshape(128, 8, 2), axis=2) == 1).all() and row.size == 128


@pytest.mark.long
@pytest.mark.skipif(bool(packages.missing(packages.CUTLASS, *packages.TOOLKIT)), reason="CUTLASS's headers: make truth")
def test_the_table_is_what_the_headers_say():
    assert layouts.compute() == layouts.TABLE.read_text()
