"""Every tile of the Hopper convolutions compiles without spills, with the products and copies that it needs and no others, and
ptxas leaves its products asynchronous."""

from dataclasses import replace

import pytest

from cuda_kernels.compile import compile_kernel
from tactics.families.hopper.conv_wgmma import TILES
from tactics.launches import launches
from tactics.problems.pointwise_ops import Activation
from tactics.problems.problem import ConvProblem
from tactics.tactic import Tile
from tests.compiled import measured, takes
from tests.problems import RELU, TAILS, conv_case
from tests.tactics.families.hopper.cases import CHW, HWC8, NAMES, ONE, SINGLE, crafted

pytestmark = pytest.mark.slow
EVERY = [(kernel, tile) for kernel in NAMES for tile in TILES[kernel]]
PRELU = Activation("prelu")
# With most live registers.
PROBLEM = conv_case(2, 72, 9, 9, 600, 3, 3, pad=ONE, bias=True, residual=True, act=PRELU, sparse24=True)


def variant(kernel: str, tile: Tile, out, problem: ConvProblem = PROBLEM) -> dict[str, int]:
    return dict(launches(problem, crafted(kernel, tile, problem, out))[0].values)


@pytest.mark.parametrize("out, way", [(HWC8, {}), (CHW, {}), (SINGLE[0], {})] + [
    (out, way) for out in (HWC8, CHW) for way in ({"split": 2}, {"stream": 100})
], ids=str)  # fmt: skip
@pytest.mark.parametrize("kernel, tile", EVERY, ids=str)
def test_wgmma_compiles_without_spills(kernel, tile, out, way):
    """A stage's products stand in the loop once, and its copies twice: of the first stages before the wait for the launch
    ahead, and in the loop. Pixels come by rows or by columns. All products are waited for behind the loop alone."""
    if out != HWC8 and tile.n < 32:
        pytest.skip("not offered: rows of 32 pixels are stored")
    taken = takes(kernel, variant(kernel, replace(tile, **way), out), "sm_90a")
    sparse, m64 = kernel == NAMES[1], tile.m // 64
    products = m64 // (tile.threads // 128) * (2 if sparse else 4)
    assert (taken.mma, taken.mma_sp) == ((0, products) if sparse else (products, 0))
    assert (taken.boxes, taken.bulks, taken.drains, taken.serialised) == (2, 2 * m64 * (1 + sparse), 1, 0)
    assert taken.regs * (tile.threads * (1 + tile.pingpong) + 128) <= 65536


OTHERS = {
    "silu": conv_case(2, 72, 9, 9, 600, 3, 3, pad=ONE, bias=True, act=Activation("silu"), sparse24=True),
    "tail": conv_case(2, 72, 9, 9, 600, 3, 3, pad=ONE, bias=True, act=PRELU, sparse24=True, **TAILS[""]),
    "d2s": conv_case(2, 72, 9, 9, 600, 3, 3, pad=ONE, bias=True, residual=True, act=PRELU, d2s=2, sparse24=True),
    "groups": conv_case(2, 128, 9, 9, 1200, 3, 3, pad=ONE, groups=2, bias=True, residual=True, act=RELU, sparse24=True),
}


@pytest.mark.long
@pytest.mark.parametrize("out", [HWC8, CHW], ids=str)
@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("kernel, tile", EVERY, ids=str)
def test_other_epilogues_of_wgmma_compile(kernel, tile, name, out):
    """Their main loops are those of the variants above."""
    if out != HWC8 and tile.n < 32:
        pytest.skip("not offered: rows of 32 pixels are stored")
    taken = measured(compile_kernel(kernel, variant(kernel, tile, out, OTHERS[name]), "sm_90a"))
    assert (taken.spills, taken.serialised, taken.drains) == (0, 0, 1)
