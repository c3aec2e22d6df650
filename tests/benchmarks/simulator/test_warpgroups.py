"""Asynchronous products in the simulated SM: beside published clocks, the model of tiles, and loops worked out by hand."""

from dataclasses import replace

import pytest

from benchmarks.simulator.machine import BULK_SOURCES, BULK_SWEEP, BULK_SWEPT, CENTRE, Bulk, Residency, machine
from benchmarks.simulator.simulate import Steady, steady_of
from benchmarks.simulator.warpgroups import Ring, ring
from cuda_kernels.device import named
from tactics.families.hopper import figures
from tactics.families.hopper.tiles import HopperTile, stage
from tests.benchmarks.test_cycles import code

H100 = machine(named("h100"))
ONE, TWO = Residency(4, 1), Residency(8, 1)  # warpgroups
FREE = replace(CENTRE, bulk=Bulk(l2=1e6, latency=0, write_port=0))


def products(n: int, count: int = 4, a: str = "gdesc[UR4]", sparse: bool = False, m64: int = 1) -> list[str]:
    """A group of products, of `m64` blocks of sums in turn, the last of which ends it."""
    name, metadata = ("HGMMA.SP.64x{}x32.F32", ", R20, 0x0") if sparse else ("HGMMA.64x{}x16.F32", "")
    b = "" if a.startswith("gdesc") else ", gdesc[UR4]"
    sums = [f"R{24 + 128 * (i % m64)}" for i in range(count)]
    rows = [f"{name.format(n)} {s}, {a}{b}, {s}{metadata}" for s in sums]
    return [*rows[:-1], rows[-1] + ", gsb0"]


def alone(*rows: str, pending: int = 1, r: Residency = ONE) -> Steady:
    return steady_of(code(*rows, f"WARPGROUP.DEPBAR.LE gsb0, {pending:#x}"), r, H100, FREE)


@pytest.mark.parametrize("n, clocks", [(8, 18), (16, 20), (32, 24), (64, 32), (128, 64), (256, 128)])
def test_products_take_what_was_measured_on_an_h800(n, clocks):
    """arXiv 2402.13499, m64nNk16 with both operands in shared memory, clocks of one among many."""
    found = alone(*products(n))
    assert found.clocks_per_stage == pytest.approx(4 * clocks, rel=0.02)
    assert found.mma_share == pytest.approx(n / 2 / clocks, rel=0.02)


def test_registers_leave_the_port_to_the_columns():
    """arXiv 2402.13499, N = 32: 471 of an H800 PCIe's 756 TFLOP/s from shared memory, 634 from registers."""
    shared, registers = (alone(*products(32, a=a)).mma_share for a in ("gdesc[UR4]", "R88"))
    assert shared == pytest.approx(471 / 756, rel=0.08) and 634 / 756 < registers <= 1


@pytest.mark.parametrize(
    "a, n, clocks", [("gdesc[UR4]", 128, 80), ("gdesc[UR4]", 256, 144), ("R88", 128, 64), ("R88", 256, 128)]
)
def test_sparse_products_take_as_long_as_their_columns_cross_the_port(a, n, clocks):
    """Twice the columns' bytes: 64 N, which take N / 2 clocks of the port, and 16 more for A."""
    assert alone(*products(n, a=a, sparse=True)).clocks_per_stage == pytest.approx(4 * clocks, rel=0.02)


def test_warpgroups_share_the_tensor_cores():
    one, two = (alone(*products(128), r=r) for r in (ONE, TWO))
    assert two.clocks_per_stage == pytest.approx(2 * one.clocks_per_stage, rel=0.01) and two.mma_share > 0.99
    assert "gmma" in two.waited[-1]
    with pytest.raises(ValueError, match="6 warps multiply: expected a multiple of 4"):
        alone(*products(128), r=Residency(6, 1))


def test_a_wait_for_all_leaves_the_tensor_cores_idle():
    """From the last sums to the next operands: the way to the port, the first part of them, the depth of the product."""
    none, some = (alone(*products(128), pending=n) for n in (0, 1))
    idle = H100.to_port + (2048 + 32 * 32) // 128 + FREE.bulk.depth
    assert none.clocks_per_stage == pytest.approx(4 * 64 + idle, abs=8) and some.mma_share > 0.99
    assert alone(*products(128), pending=0, r=TWO).mma_share > 0.99, "another warpgroup multiplies meanwhile"


def consumer(tile: HopperTile, pending: int = 1) -> list[str]:
    """The loop of a warpgroup over stages of 64 of K."""
    a = "gdesc[UR4]" if tile.weights == "smem" else "R88"
    count = 64 // (32 if tile.sparse else 16) * tile.m64
    waits = ["SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [R5+URZ], R4", "WARPGROUP.ARRIVE"]
    ends = [f"WARPGROUP.DEPBAR.LE gsb0, {pending:#x}", "SYNCS.ARRIVE.TRANS64.RED.A1T0 RZ, [R4+URZ], RZ", "@P2 BRA `(.L_x)"]
    return [*waits, *products(tile.n, count, a, tile.sparse, tile.m64), *ends]


TILES = [
    HopperTile(128, 256),  # waits for L2
    HopperTile(128, 256, shared="pixels"),  # tensor cores
    HopperTile(64, 64, groups=1),  # L2
    HopperTile(128, 128, True),  # L2
    HopperTile(128, 128, True, shared="pixels"),  # the port
    HopperTile(256, 128, True, shared="pixels"),
]


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_a_loop_takes_what_the_model_of_tiles_says(tile):
    """What bounds a stage there bounds it here; nothing that the simulation adds costs more than a tenth."""
    expected, once = stage(tile, figures.CENTRE), code(*consumer(tile))
    filled = ring(once, tile.groups, 227 * 1024)
    shared = tile.n * 64 if tile.shared else 0  # half of the pixels' bytes
    weights = tile.m * 64 * (9 / 8 if tile.sparse else 2)
    assert filled and filled.held == tile.n * 128 + weights and filled.stages >= expected.stages
    found = steady_of(
        once, Residency(4 * tile.groups, 1), H100, CENTRE, ring=replace(filled, drawn=filled.held - shared), stages=16
    )
    assert expected.clocks <= 1.01 * found.clocks_per_stage <= 1.1 * expected.clocks


def test_few_stages_wait_for_the_latency():
    """With products of two stages in flight a stage is asked for when all but one are in use or on their way."""
    once = code(*consumer(HopperTile(128, 128)))
    clocks = {n: steady_of(once, TWO, H100, CENTRE, ring=Ring(32768, 32768, n)).clocks_per_stage for n in (2, 3, 8)}
    arrives = CENTRE.bulk.latency + 32768 / CENTRE.bulk.l2
    assert clocks[2] == pytest.approx(arrives, rel=0.05) and clocks[3] == pytest.approx(arrives / 2, rel=0.05)
    assert clocks[8] == pytest.approx(32768 / CENTRE.bulk.l2, rel=0.02)
    waited = steady_of(once, TWO, H100, CENTRE, ring=Ring(32768, 32768, 2)).waited[0]
    assert max(waited, key=lambda name: waited[name]) == "long scoreboard"
    with pytest.raises(ValueError, match="a stage takes 32768 bytes: expected more than 20000 bytes of shared memory"):
        ring(once, 2, 20000)
    assert ring(code(*products(64)), 1, 1 << 17) is None


def test_what_is_unpublished_is_swept_and_has_a_source():
    assert set(BULK_SWEPT) == set(BULK_SOURCES) and len(set(BULK_SWEEP)) == 16 and CENTRE not in BULK_SWEEP
    once = code(*consumer(HopperTile(128, 256)))
    shares = [steady_of(once, TWO, H100, point, ring=ring(once, 2, 227 * 1024)).mma_share for point in (CENTRE, *BULK_SWEEP)]
    assert min(shares) < shares[0] < max(shares) <= 1
