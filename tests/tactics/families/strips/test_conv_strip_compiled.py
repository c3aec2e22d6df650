"""Every tile of strips compiles for every architecture without spills, with the products that it needs and no others."""

from dataclasses import replace

import pytest

from cuda_kernels.device import ARCHITECTURES, named
from cuda_kernels.named_devices import SMEM_PER_BLOCK
from tactics.families.strips.geometry import tile_reason
from tactics.format import Format
from tactics.launches import launches
from tactics.problems.pointwise_ops import Activation
from tactics.step import linear
from tactics.tactic import Tactic
from tactics.tiles import STRIP_DENSE_TILES, STRIP_REGISTERS, STRIP_SPARSE_TILES
from tests.compiled import takes
from tests.problems import conv_case

pytestmark = pytest.mark.slow
HWC8 = Format("fp16", "hwc8")
TILES = [("conv_strip", t) for t in STRIP_DENSE_TILES] + [("conv_strip_sparse24", t) for t in STRIP_SPARSE_TILES]


@pytest.mark.parametrize("sm", ARCHITECTURES)
@pytest.mark.parametrize("kernel, tile", TILES, ids=str)
def test_strips_compile_without_spills(kernel, tile, sm):
    """With most live registers, in as many as residency is predicted from."""
    device = replace(named("h200"), sm=sm, smem_per_block=SMEM_PER_BLOCK[int(sm[3:].rstrip("a"))])
    prelu = Activation("prelu")
    problem = conv_case(2, 136, 9, 14, 40, 3, 3, pad=(1, 1, 1, 1), bias=True, residual=True, act=prelu, sparse24=True)
    for y in ("hwc8", "chw"):
        out = Format("fp16", y)
        tactic = Tactic(kernel, tile, (HWC8, out), out)
        if not tile_reason(problem, tactic, device):
            taken = takes(kernel, launches(problem, tactic)[0].values, sm)
            assert linear(out) or taken.regs <= STRIP_REGISTERS[tactic.sparse, tile.m, tile.n, tile.k, tile.warps_n]
            per_warp = tile.m // tile.warps_m // 16 * (tile.n // tile.warps_n // 8) * tile.k
            assert (taken.mma, taken.mma_sp) == ((0, per_warp // 32) if tactic.sparse else (per_warp // 16, 0))
