"""Every tile of convolutions of bytes compiles without spills, with the products of bytes that it needs and no others."""

from dataclasses import replace

import pytest

from cuda_kernels.device import named
from tactics.candidates import candidates
from tactics.families import conv_bytes
from tactics.format import Format
from tactics.launches import launches
from tactics.problems.epilogue import Epilogue
from tactics.problems.pointwise_ops import Activation
from tactics.problems.problem import ConvProblem
from tactics.problems.prologue import Prologue
from tactics.tactic import Tactic
from tactics.tiles import DENSE_TILES, SPARSE_TILES, early_residual, no_room_for_border
from tests.compiled import takes

pytestmark = pytest.mark.slow
TILES = [("conv_dense_int8", t) for t in DENSE_TILES] + [("conv_sparse24_int8", t) for t in SPARSE_TILES]
X, BYTES, PLANES = Format("uint8", "hwc16"), Format("int8", "hwc16"), Format("fp16", "chw")
# Of every tile: bytes and planes as results, and blocks that share a tile, on architectures that take most registers.
WAYS = [("sm_80", BYTES, 1), ("sm_120", BYTES, 1), ("sm_90a", PLANES, 1), ("sm_89", BYTES, 2)]
# With most live registers: numbers around the input, a residual, and all vectors of the epilogue but a slope.
END = Epilogue(
    bias=True,
    residual=True,
    act=Activation("silu"),
    affine=True,
    last=Activation("quantize", (-128.0, 127.0)),
    multiplied=True,
    residual_multiplied=True,
)
PROBLEM = ConvProblem(2, 40, 9, 9, 40, 3, 3, pad=(1, 1, 1, 1), prologue=Prologue(border=37.0), sparse24=True, epilogue=END)


def problem_of(tactic: Tactic) -> ConvProblem:
    return replace(PROBLEM, prologue=Prologue()) if no_room_for_border(tactic) else PROBLEM


def tactic_of(kernel: str, tile, y: Format, split: int = 1) -> Tactic:
    return Tactic(kernel, replace(tile, split=split), (X, y), y)


@pytest.mark.parametrize("sm, y, split", WAYS, ids=str)
@pytest.mark.parametrize("kernel, tile", TILES, ids=str)
def test_tiles_of_bytes_compile_without_spills(kernel, tile, sm, y, split):
    """Twice as many products where a residual is copied during the last turn, which stands behind the loop."""
    tactic = tactic_of(kernel, tile, y, split)
    taken = takes(conv_bytes.SOURCES[kernel], launches(problem_of(tactic), tactic)[0].values, sm)
    of_a_warp = (tile.m // tile.warps_m // 16) * (tile.n // tile.warps_n // 8) * tile.k // (32 if tactic.sparse else 16)
    products = of_a_warp * (1 + early_residual(conv_bytes.as_halves(tactic)))
    assert (taken.mma, taken.mma_sp) == ((0, products) if tactic.sparse else (products, 0))
    assert taken.regs * tile.threads <= 65536 and taken.copies and taken.matrices


def test_those_tactics_are_offered():
    tactics = {tactic_of(kernel, tile, y) for kernel, tile in TILES for y in (BYTES, PLANES)}
    problems = {problem_of(tactic) for tactic in tactics}
    found = {t: p for p in problems for t in candidates(p, named("h200"), ("uint8", "int8", "int8"))}
    assert tactics <= set(found) and len(problems) == 2
