"""The benchmark beside CUTLASS and Triton: what needs neither at once, the whole of it where they are downloaded."""

import json

import numpy as np
import pytest
from click.testing import CliRunner

from benchmarks.bench_sass import Row, main, side_by_side
from benchmarks.sass.kernels import DENSE, KERNELS, SPARSE, Assembled, Kernel, missing, selected
from benchmarks.sass.runs import counts, kept, operands, places, run
from cuda_kernels.device import named

WHY = missing(Kernel("CUTLASS", "conv", DENSE[0]))
needs_cutlass = pytest.mark.skipif(bool(WHY), reason=WHY)


@pytest.mark.parametrize("regs, threads, smem, device, blocks", [
    (232, 128, 64 << 10, "a100", 2), (232, 128, 64 << 10, "l40s", 1), (168, 256, 0, "a100", 1), (128, 256, 0, "a100", 2),
    (129, 256, 0, "a100", 1), (32, 1024, 0, "l40s", 1), (32, 1024, 0, "a100", 2), (16, 32, 0, "a100", 32),
    (128, 256, 164 << 10, "a100", 0), (128, 256, 102 << 10, "a40", 0), (128, 256, 0, "a40", 2),
])  # fmt: skip
def test_blocks_that_fit_an_sm(regs, threads, smem, device, blocks):
    assert Assembled(b"", regs, 0, 0).resident(named(device), threads, smem) == blocks


def test_weights_are_packed_as_cutlass_reads_them():
    """Values and places give the weights back."""
    rows = operands(64).rows
    values, words = kept(rows), places(rows)
    assert values.shape == (256, 288) and words.shape == (256, 36) and words.dtype == np.uint16
    which = words[..., None] >> np.arange(0, 16, 2) & 3
    back = np.zeros((256, 144, 4), np.float16)
    np.put_along_axis(back, which.reshape(256, 144, 2).astype(np.int64), values.reshape(256, 144, 2), -1)
    assert np.array_equal(back.reshape(rows.shape), rows) and np.count_nonzero(rows) == values.size


def test_gathered_pixels_are_a_convolution():
    x = operands(64)
    image = np.pad(x.x.reshape(16, 16, 64).astype(float), ((1, 1), (1, 1), (0, 0)))
    at = image[3:6, 7:10].reshape(9, 64)
    assert np.array_equal(x.y[3 * 16 + 7], np.einsum("tc,otc->o", at, x.w.astype(float)))


OURS = [Kernel("ours", "conv_dense", DENSE[0]), Kernel("ours", "conv_sparse24", SPARSE[0])]


@pytest.mark.parametrize("kernel", OURS, ids=str)
def test_our_main_loop_counted(kernel):
    """Per product: an ldmatrix feeds four, whatever the tile's K; 16 bytes per thread and copy; and no bank conflict."""
    shallow, deep = run(kernel, 64), run(kernel, 128)
    assert np.array_equal(deep.answer.astype(float), operands(128).y)
    c, t = counts(shallow.stats, deep.stats), kernel.tile
    products = t.m * t.n * t.k / (16 * 8 * (32 if kernel.sparse else 16))
    copied = t.n * t.k * 2 + t.m * t.k * (2 * 9 / 16 if kernel.sparse else 2)
    assert c.copies == pytest.approx(copied / 512 / products) and 0.2 < c.loads < 0.5 and c.excess == c.excess_end == 0


def test_tables_fit_a_terminal():
    stats = counts(*(run(KERNELS[0], c).stats for c in (64, 128)))
    rows = [Row(k, "sm_86", Assembled(b"", 222, 0, 0), k.tile.threads, 64 << 10, stats, True) for k in KERNELS]
    assert max(map(len, side_by_side(rows, "sm_86").splitlines())) <= 128
    assert "WRONG" in side_by_side([Row(KERNELS[0], "sm_86", rows[0].code, 128, 0, stats, False)], "sm_86")


def test_tiles_are_selected_and_unknown_ones_refused():
    assert {k.tile for k in selected(KERNELS, ["128x256x32"])} == {DENSE[1]} and selected(KERNELS, []) == list(KERNELS)
    done = CliRunner().invoke(main, ["--tiles", "100x100x32"])
    assert done.exit_code == 2 and "100x100x32" in done.output and "128x128x32, 128x256x32" in done.output


def test_what_is_not_downloaded_is_left_out_with_the_reason(tmp_path, monkeypatch):
    monkeypatch.setenv("GPU_RUNTIME_CACHE", str(tmp_path))
    done = CliRunner().invoke(main, ["--tiles", "128x256x32"])
    assert done.exit_code == 0, done.output
    assert "left out: ours conv_dense 128x256x32" in done.output and "make truth" in done.output


@pytest.mark.full
@needs_cutlass
def test_beside_cutlass(tmp_path):
    out = tmp_path / "sass.json"
    done = CliRunner().invoke(main, ["--sm", "sm_80", "--tiles", "128x128x32", "--out", str(out)])
    assert done.exit_code == 0, done.output
    rows = {row["kernel"]: row for row in json.loads(out.read_text())["rows"]}
    mine, theirs = (rows[f"{who} {DENSE[0]}"] for who in ("ours conv_dense", "CUTLASS conv"))
    assert mine["answers_equal"] and theirs["answers_equal"] and mine["spills"] == theirs["spills"] == 0
    for figure in ("loads", "copies", "shared_bytes", "excess"):  # the same tile reads and writes the same
        assert mine["per_product"][figure] == theirs["per_product"][figure]


@pytest.mark.long
@needs_cutlass
def test_all_beside_all():
    done = CliRunner().invoke(main, [])
    assert done.exit_code == 0 and "WRONG" not in done.output, done.output
