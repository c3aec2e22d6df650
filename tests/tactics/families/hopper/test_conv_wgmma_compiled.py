"""Every tile of the Hopper convolutions compiles without spills, with the products and copies that it needs and no others, and
ptxas leaves its products asynchronous."""

from dataclasses import replace

import pytest

from benchmarks.simulator.sass import program
from cuda_kernels.compile import compile_kernel
from tactics.families.hopper import ends
from tactics.families.hopper.conv_wgmma import TILES, k_stages
from tactics.format import Format
from tactics.launches import launches
from tactics.problems.pointwise_ops import Activation
from tactics.problems.problem import ConvProblem
from tactics.tactic import Tile
from tests.compiled import measured, takes
from tests.problems import RELU, TAILS, conv_case
from tests.tactics.families.hopper.cases import CHW, HWC8, NAMES, ONE, SINGLE, SPARSE, alone, crafted, tactics

pytestmark = pytest.mark.slow
PRELU = Activation("prelu")
# With most live registers; strips of it are those of a network's layers of 28 x 28.
PROBLEM = conv_case(2, 72, 28, 28, 600, 3, 3, pad=ONE, bias=True, residual=True, act=PRELU, sparse24=True)
SHARED, LINEAR = [{"split": 2}, {"stream": 100}], SINGLE[0]


def variants(kernel: str) -> list[tuple[Tile, Format]]:
    """Of every tile alone every output and way to share work; some of clusters, which differ in copies and in sums along K."""
    ways = {HWC8: [{}, *SHARED], CHW: [{}, *SHARED], LINEAR: [{}]}
    found = []
    offered = {alone(t) for t in tactics(PROBLEM, kernel) if t.gemm.box}
    for tile in (*TILES[kernel], *sorted(t for t in offered if max(t.cluster) == 1)):
        if max(tile.cluster) > 1:
            found += [(replace(tile, **way), HWC8) for way in ({}, SHARED[1])]
        elif tile.box:
            found += [(tile, out) for out in (HWC8, CHW)]
        else:
            found += [(replace(tile, **way), out) for out, of_out in ways.items() for way in of_out]
        if max(tile.cluster) == 1 and not tile.pingpong:
            found.append((replace(tile, cluster=(1, 1, 4)), HWC8))
    return list(dict.fromkeys((tile, out) for tile, out in found if out == HWC8 or tile.n % 32 == 0))


def compiled_values(kernel: str, tile: Tile, out: Format, problem: ConvProblem = PROBLEM) -> dict[str, int]:
    return dict(launches(problem, crafted(kernel, tile, problem, out))[0].values)


@pytest.mark.parametrize("kernel, tile, out", [(k, tile, out) for k in NAMES for tile, out in variants(k)], ids=str)
def test_wgmma_compiles_without_spills(kernel, tile, out):
    """A stage's products stand in the loop once, of 2:4 weights those of as many stages as registers hold. Weights are copied
    for the first stages before the wait for the launch ahead, and in the loop; pixels by rows and by columns, or by boxes; a
    residual, where TMA stores, to slots that are free from the start, which ptxas may unroll, and to those that are again. All
    products are waited for behind the loop alone."""
    values = compiled_values(kernel, tile, out)
    taken = takes(kernel, values, "sm_90a")
    own, images, taps = tile.m // 64 // (tile.threads // 128), (tile.box or (1,))[0], 3 if tile.box else 1
    copies = (1 if tile.box else 2) + (0 if kernel == SPARSE else 2 * tile.m // 64)
    products = (0, 4 * values["BATCH"] * own * images) if kernel == SPARSE else (4 * taps * own * images, 0)
    assert (taken.mma, taken.mma_sp) == products
    assert taken.bulk - copies in ((2, values["SLOTS"] + 1) if values["OUT_TMA"] else (0,))
    assert (taken.in_flight, taken.serialized) == (1, 0)
    assert taken.regs * (tile.threads * (1 + tile.pingpong) + 128) <= 65536


# With as much of K as stays beside the sums of 256, 192 and 128 columns, and with less.
KEPT = [replace(PROBLEM, k=128, c=c, r=1, s=1, pad=(0, 0, 0, 0)) for c in (64, 448, 640, 832)]
KEPT += [replace(PROBLEM, k=64, c=64, h=56, w=56)]


def staying() -> list[tuple[ConvProblem, Tile]]:
    """Of each problem the tiles whose weights stay in registers, in blocks of many tiles."""
    found = []
    for problem in KEPT:
        tiles = {replace(alone(t), persist=132) for t in tactics(problem, SPARSE) if max(t.gemm.cluster) == 1}
        found += [(problem, tile) for tile in sorted(tiles) if "WEIGHTS_STAY" in compiled_values(SPARSE, tile, HWC8, problem)]
    return found


@pytest.mark.parametrize("problem, tile", staying(), ids=str)
def test_wgmma_whose_weights_stay_compiles_without_spills(problem, tile):
    """Products of all of K stand in the loop once."""
    taken = takes(SPARSE, compiled_values(SPARSE, tile, HWC8, problem), "sm_90a")
    products = 2 * k_stages(problem) * (tile.m // 64 // (tile.threads // 128)) * (tile.box or (1,))[0]
    assert (taken.mma, taken.mma_sp, taken.in_flight, taken.serialized) == (0, products, 1, 0)


OTHERS = {
    "silu": conv_case(2, 72, 9, 9, 600, 3, 3, pad=ONE, bias=True, act=Activation("silu"), sparse24=True),
    "tail": conv_case(2, 72, 9, 9, 600, 3, 3, pad=ONE, bias=True, act=PRELU, sparse24=True, **TAILS[""]),
    "d2s": conv_case(2, 72, 9, 9, 600, 3, 3, pad=ONE, bias=True, residual=True, act=PRELU, d2s=2, sparse24=True),
    "groups": conv_case(2, 128, 9, 9, 1200, 3, 3, pad=ONE, groups=2, bias=True, residual=True, act=RELU, sparse24=True),
}


@pytest.mark.long
@pytest.mark.parametrize("out", [HWC8, CHW], ids=str)
@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("kernel, tile", [(k, tile) for k in NAMES for tile in TILES[k] if max(tile.cluster) == 1], ids=str)
def test_other_epilogues_of_wgmma_compile(kernel, tile, name, out):
    """Their main loops are those of the variants above."""
    if out != HWC8 and tile.n < 32:
        pytest.skip("not offered: rows of 32 pixels are stored")
    taken = measured(compile_kernel(kernel, compiled_values(kernel, tile, out, OTHERS[name]), "sm_90a"))
    assert (taken.spills, taken.serialized, taken.in_flight) == (0, 0, 1)


# Instructions of a thread for 64 x 64 outputs, at most; before ends by TMA there were 298, 417, 750.
ENDS = {"relu": (False, 95), "none": (True, 170), "gelu": (False, 390), "silu": (False, 360)}


def end_instructions(problem: ConvProblem, tile: Tile) -> int:
    """From the wait for a tile's last products on, to the loop over tiles, no branch taken but those that always are."""
    compiled = compile_kernel(NAMES[0], compiled_values(NAMES[0], tile, HWC8, problem), "sm_90a")
    found = program(compiled.cubin, NAMES[0])
    code, loop = found.instructions, found.main_loop
    over_tiles = min((x for x in found.loops if loop in x), key=lambda x: x.last - x.first)
    at = next(n for n in range(loop.last, len(code)) if code[n].pending == 0)
    places, count = {ins.address: n for n, ins in enumerate(code)}, 1
    while at != over_tiles.last:
        jumps = code[at].opcode.startswith("BRA") and code[at].target is not None and not code[at].conditional
        at = places[code[at].target] if jumps else at + 1
        count += 1
    return count


@pytest.mark.parametrize("act", ENDS)
def test_an_end_takes_the_instructions_that_its_price_counts(act):
    residual, most = ENDS[act]
    problem = conv_case(32, 96, 56, 56, 384, 1, 1, bias=True, act=Activation(act), residual=residual)
    tile = next(t for t in TILES[NAMES[0]] if (t.m, t.n, max(t.cluster)) == (128, 192, 1))
    found = end_instructions(problem, tile) / 3  # parts of a warpgroup
    assert found <= most
    assert found / 32 == pytest.approx(ends.INSTRUCTIONS[residual] + ends.OF_ACTIVATION[act][0], rel=0.04)
