"""The model of Hopper's tiles beside measurements of others and tiles worked out by hand."""

import math
from dataclasses import fields, replace

import pytest

from tactics.families.hopper.figures import CENTRE, SOURCES, Figures
from tactics.families.hopper.tiles import REGISTERS, Box, HopperTile, batch, held, stage, stages

FREE = replace(CENTRE, l2=math.inf, write_port=0, latency=0, register_latency=0)  # an instruction alone


def over_dense(tile: HopperTile, figures: Figures) -> float:
    """Products of a clock over the dense tensor cores' peak, 2,048 of an SM, in a long loop."""
    return tile.m * tile.n * 64 / 2048 / stage(tile, figures).clocks


@pytest.mark.parametrize("n, clocks", [(64, 32), (32, 24), (16, 20), (8, 18)])
def test_wgmma_takes_what_was_measured(n, clocks):
    """arXiv 2402.13499, dense m64nNk16 with both operands in shared memory: four of them are a stage."""
    assert stage(HopperTile(64, n, groups=1), FREE).clocks == 4 * clocks


def test_weights_in_registers_leave_the_port_to_pixels():
    """arXiv 2402.13499, N = 32: 471 of an H800 PCIe's 756 TFLOP/s from shared memory, 634 from registers."""
    shared, registers = (
        over_dense(HopperTile(64, 32, weights=w, groups=1), replace(FREE, register_port=0)) for w in ("smem", "registers")
    )
    assert shared == pytest.approx(471 / 756, rel=0.08) and registers == 1.0 > 634 / 756


@pytest.mark.parametrize(
    "tile, share",
    [
        (HopperTile(128, 256), 0.79),  # (128 + 256) * 128 bytes at 38 a clock: 1,293 for 1,024 clocks of products
        (HopperTile(128, 256, shared="pixels"), 1.0),
        (HopperTile(256, 128, True, "registers"), 1.12),  # 256 * 72 + 128 * 128 bytes: 916 for dense products' 1,024
        (HopperTile(128, 256, True, "registers", "pixels"), 1.22),  # port: 65,536 + 32,768 + 9,216 bytes at 128: 840
    ],
)
def test_the_tiles_that_hopper_was_planned_with(tile, share):
    assert over_dense(tile, CENTRE) == pytest.approx(share, abs=0.005)


def test_where_the_clocks_of_a_stage_are():
    at = stage(HopperTile(128, 256), CENTRE)
    assert (at.tensor, at.port, at.stages, at.bound) == (1024, (8 * (8192 + 2048) + 49152) / 128, 4, "l2")
    assert at.port == 1024 and at.l2 == pytest.approx(49152 / 38) and at.latency == 1080 / 3
    sparse = HopperTile(128, 256, True, "registers", "pixels")
    at = stage(sparse, CENTRE)
    assert (at.tensor, at.port, at.bound) == (512, 840, "port") and at.l2 == pytest.approx((9216 + 16384) / 38)
    assert batch(sparse) == 3 and at.latency == pytest.approx(600 / 3 + 9216 / 38)
    assert stage(sparse, replace(CENTRE, register_port=2)).port == 840 + 72
    at = stage(replace(sparse, weights="held"), CENTRE)
    assert at.port == 840 - 72 and at.l2 == pytest.approx(16384 / 38) and at.latency == 1080 / (at.stages - 1)


@pytest.mark.parametrize(
    "m, n, weights, share",
    [
        (128, 128, "smem", 0.97),
        (128, 256, "smem", 1.12),
        (256, 192, "smem", 1.23),
        (128, 256, "registers", 1.33),
        (256, 128, "registers", 1.60),
        (384, 128, "registers", 1.71),
    ],
)
def test_sparse_tiles_are_bound_by_the_port(m, n, weights, share):
    """Worked out by hand without loads to registers: bytes of pixels, weights, metadata and writes, at 128 a clock."""
    only_port = replace(CENTRE, l2=math.inf, latency=0, register_latency=0, register_port=0)
    assert over_dense(HopperTile(m, n, True, weights), only_port) == pytest.approx(share, abs=0.006)


def test_cusparselt_reaches_the_ceiling_of_its_tile():
    """H100 PCIe, 4096^3 BF16: 728 of a dense peak of 756 TFLOP/s (vllmbench); SXM, 8192^3: 1.2 of 780 to 800, of 989. CUTLASS's
    tile for it is 128x128 with clusters of two."""
    ceiling = over_dense(HopperTile(128, 128, True, shared="pixels"), CENTRE)
    assert ceiling == pytest.approx(728 / 756, rel=0.02)
    assert ceiling + 0.01 >= 1.2 * 780 / 989 and ceiling <= 1.2 * 800 / 989 + 0.01


def test_a_copy_for_each_column():
    box = Box(1, 14, 16)
    assert (box.n, box.copied, box.per_tap) == (224, 256, 3 * 256 / 9)
    assert stages(HopperTile(128, 224, True, "registers", box=box)) == 3 * ((227 * 1024 - 17 * 1024) // (256 * 128))


def test_registers_are_what_ptxas_gives():
    """A block has 384 threads of 168, then 40 and 232, or 32 and 160 for three warpgroups that multiply. Weights of two m64 are
    20 of them for 64 of K, beside 128 sums."""
    sparse = HopperTile(256, 128, True, "registers")
    assert (sparse.m64, sparse.sums, held(sparse)) == (2, 128, 3)
    assert 384 * 168 <= 65536 and 128 * 40 + 2 * 128 * REGISTERS[2] <= 65536 and 128 * 32 + 3 * 128 * REGISTERS[3] <= 65536


def test_every_figure_has_its_source():
    assert {f.name for f in fields(Figures)} == set(SOURCES)
    assert all(len(text) > 10 for text in SOURCES.values())
