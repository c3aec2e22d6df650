"""Simulated clocks of the 2:4 loops of Hopper's kernels, 64 of K of a tile, and the prices that predictions have of them."""

import pytest

from benchmarks import cycles
from benchmarks.simulator.machine import CENTRE, Residency, machine
from benchmarks.simulator.simulate import steady
from cuda_kernels.device import named
from tactics.families.hopper import conv_wgmma
from tests.problems import RELU, conv_case

H200, SPARSE = named("h200"), "conv_sparse24_sm90"
WIDE = conv_case(32, 512, 32, 32, 512, 3, 3, pad=(1, 1, 1, 1), act=RELU, sparse24=True)
KEPT = conv_case(64, 64, 56, 56, 64, 3, 3, pad=(1, 1, 1, 1), act=RELU, sparse24=True)  # weights stay in registers
KEPT_1X1 = conv_case(64, 512, 28, 28, 128, 1, 1, act=RELU, sparse24=True)
# In brackets clocks with loads of weights behind the copies of a stage that is left, in shorter batches.
LOOPS = {
    "128x112x64_w8x1_s12_b1x14x8": (WIDE, 425),  # (658)
    "128x112x64_w8x1_s12_b1x14x8_c2x1x1": (WIDE, 354),  # (589)
    "128x112x64_w8x1_s12_b2x7x8": (WIDE, 442),  # (668)
    "128x224x64_w8x1_s5_b4x7x8": (WIDE, 675),  # (849)
    "128x224x64_w8x1_s7_b1x28x8": (WIDE, 619),  # (929)
    "128x256x64_w8x1_s5_b1x32x8": (WIDE, 681),  # (968)
    "128x128x64_w8x1_s12_c2x1x1": (WIDE, 495),  # (718)
    "128x192x64_w8x1_s8_c2x1x1": (WIDE, 656),  # (775)
    "128x256x64_w8x1_s6_c2x1x1": (WIDE, 848),  # (850)
    "64x224x64_w4x1_s7_b1x28x8_pingpong_p132": (KEPT, 310),  # (786)
    "128x192x64_w8x1_s8_p132": (KEPT_1X1, 647),  # (935)
}
QUICK = ("128x128x64_w8x1_s12_c2x1x1", "64x224x64_w4x1_s7_b1x28x8_pingpong_p132")


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in LOOPS])
def test_2_4_loops_take_the_clocks_of_their_price(name):
    """Of the largest limit, within a tenth, with the rate of L2 that both have."""
    problem, clocks = LOOPS[name]
    tile = cycles.tile(SPARSE, name)
    code = cycles.ours(SPARSE, tile, "sm_90a", {}, problem)
    found = steady(code.program, code.simulated(Residency(0, 1, "")), machine(H200), CENTRE, ring=code.ring)
    simulated = found.clocks_per_stage / code.k64
    assert simulated == pytest.approx(clocks, rel=0.02)
    price = max(conv_wgmma._stage_clk(problem, cycles.tactic(SPARSE, tile), CENTRE.bulk.l2).values())
    assert price == pytest.approx(simulated, rel=0.1)
