"""Each step of the Hopper convolutions' loop that is left out, comes too early or is done otherwise: the emulator notices it,
in every order of warps and blocks and both modes of copies."""

import re
import shutil
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import pytest

from cuda_kernels import compile as compiling
from cuda_kernels.compile import compile_anew
from cuda_kernels.emulator import EmulatorError
from tactics.families.hopper import conv_wgmma
from tactics.measure import trial
from tactics.tactic import Tile
from tests.problems import RELU, conv_case
from tests.tactics.families.hopper.cases import DENSE, NAMES, ONE, ORDERS, SMALL, SPARSE, TURNS, crafted, run

GEMM, PTX, COPY = "tma_gemm.cuh", "wgmma.cuh", "bulk.cuh"
FULL, EMPTY = "        wait_until_full(turn);\n        wgmma_fence", "        mbarrier_wait(smem + In::EMPTY_AT"
# A stage read or filled too early: before its bytes are there, while they are on their way, while products read it; or arrivals
# and bytes that belong to another phase, with which some order of warps ends.
EARLY = "race|in flight|uninitialised|mbarrier|deadlock"
# Three rounds of a pipeline of three stages in every tile, several tiles of a block.
PROBLEM = conv_case(2, 72, 9, 7, 72, 3, 3, pad=ONE, bias=True, act=RELU, residual=True, sparse24=True)
ROUND = replace(SMALL, persist=2)


class Fault(NamedTuple):
    """A header with `text` in it, once, where `other` stands instead; how the error begins, "wrong" for wrong results."""

    header: str
    text: str
    other: str
    error: str
    kernels: tuple[str, ...] = NAMES
    tile: Tile = ROUND


FAULTS = {
    "products of a stage that is not full": Fault(GEMM, FULL, "        wgmma_fence", EARLY, (DENSE,)),
    "metadata of a first stage that is not full": Fault(
        GEMM, "      wait_until_full(turn);\n      fetch_metadata", "      fetch_metadata", EARLY, (SPARSE,)
    ),
    "metadata of a stage that is not full": Fault(GEMM, "            wait_until_full(turn + 1);\n", "", EARLY, (SPARSE,)),
    "copies to a stage that is not empty": Fault(GEMM, EMPTY, "        if (false) mbarrier_wait(smem + In::EMPTY_AT", EARLY),
    "a stage left while products read it": Fault(
        GEMM, "wgmma_wait<1>();\n        if (k) leave(turn - 1);", "leave(turn);\n        wgmma_wait<1>();", EARLY, (DENSE,)
    ),
    "the next stage left instead": Fault(
        GEMM, "if (k) leave(turn - 1);\n            fetch", "if (k) leave(turn);\n            fetch", EARLY, (SPARSE,)
    ),
    "the last stage left while products read it": Fault(
        GEMM,
        "    wgmma_wait<0>();\n    keep_apart(acc);\n    leave(turn - 1);\n",
        "    leave(turn - 1);\n    wgmma_wait<0>();\n    keep_apart(acc);\n",
        "race",
    ),
    "the last stage never left": Fault(GEMM, "    leave(turn - 1);\n\n", "\n", "deadlock"),
    "too many bytes expected": Fault(
        GEMM,
        "+ TILE_N * 128;\n  static constexpr int STAGING_AT",
        "+ TILE_N * 128 + 16;\n  static constexpr int STAGING_AT",
        "deadlock",
    ),
    "too few bytes expected": Fault(
        GEMM,
        "+ TILE_N * 128;\n  static constexpr int STAGING_AT",
        "+ TILE_N * 128 - 16;\n  static constexpr int STAGING_AT",
        EARLY,
    ),
    "barriers not fenced": Fault(GEMM, "    fence_mbarrier_init();\n", "", "mbarrier"),
    "barriers of others not waited for": Fault(GEMM, "  else\n    __syncthreads();\n", "", "mbarrier|race"),
    "parity of full stages": Fault(GEMM, "turn / STAGES % 2); };", "turn / STAGES % 2 ^ 1); };", EARLY),
    "parity of empty stages": Fault(GEMM, "turn / STAGES % 2 ^ 1);", "turn / STAGES % 2);", EARLY),
    "fewer warps leave than read": Fault(GEMM, "WARPS_READING = 4 *", "WARPS_READING = 3 *", EARLY),
    "no turns": Fault(GEMM, "if (PINGPONG && number) wait_for", "if (false) wait_for", EARLY, tile=replace(TURNS, persist=1)),
    "no wait for the launch ahead: copies": Fault(
        GEMM, "stage);\n  wait_for_previous_launch();\n", "stage);\n", "dependent launch: global load"
    ),
    "no wait for the launch ahead: stores": Fault(GEMM, "  };\n  wait_for_previous_launch();\n", "  };\n", "dependent launch"),
    "no wgmma.fence": Fault(PTX, '"wgmma.fence.sync.aligned;"', '""', "wgmma: .* no wgmma.fence stands between"),
    "sums read too early": Fault(
        GEMM, "wgmma_wait<0>", "wgmma_wait<1>", "wgmma: accesses a (sum|register)|race: .* a wgmma read it"
    ),
    "two groups in flight": Fault(GEMM, "wgmma_wait<1>();\n        if", "wgmma_wait<2>();\n        if", "race", (DENSE,)),
    "metadata overwritten in flight": Fault(
        GEMM, "wgmma_wait<1>();\n          if", "wgmma_wait<2>();\n          if", "wgmma: accesses a register", (SPARSE,)
    ),
    "no swizzle of pixels": Fault(PTX, "| 64ull << 32 | 1ull << 62", "| 64ull << 32", "wrong|descriptor"),
    "another swizzle of weights": Fault(PTX, "| 2ull << 62", "| 3ull << 62", "wrong|descriptor", (SPARSE,)),
    "another step of rows": Fault(PTX, "64ull << 32", "32ull << 32", "wrong"),
    "taps in another order": Fault(GEMM, "r * p.dil_h, s * p.dil_w, full", "s * p.dil_h, r * p.dil_w, full", "wrong"),
    "channels of another stage": Fault(GEMM, "group_c + c * 64, at", "group_c + (c ^ 1) * 64, at", "wrong"),
    "rows past the last ones": Fault(
        GEMM, "min(m64 + i, last)", "(m64 + i)", "out of bounds", tile=replace(ROUND, m=256, warps_m=8)
    ),
    "a warp that gives no registers back": Fault(
        GEMM, "if (TEAMS > 1) keep_registers<40>();", "", "setmaxnreg|deadlock", tile=replace(TURNS, persist=1)
    ),
}


@pytest.fixture
def patched(tmp_path, monkeypatch):
    """Compiles kernels with a header changed."""

    def patch(fault: Fault) -> None:
        shutil.copytree(compiling.INCLUDE, tmp_path / "include")
        source = (compiling.INCLUDE / fault.header).read_text()
        assert source.count(fault.text) == 1
        (tmp_path / "include" / fault.header).write_text(source.replace(fault.text, fault.other))
        monkeypatch.setattr(compiling, "INCLUDE", tmp_path / "include")
        anew = lru_cache(lambda kernel, values, sm: compile_anew(kernel, dict(values), sm))
        monkeypatch.setattr(trial, "loaded", lambda gpu, steps: [gpu.load(anew(s.kernel, s.values, gpu.arch)) for s in steps])

    return patch


def seen(kernel: str, tile: Tile, **options) -> str:
    """How the error begins that a run ends with; "wrong" where results are."""
    with pytest.raises((EmulatorError, AssertionError)) as caught:
        run(PROBLEM, crafted(kernel, tile, PROBLEM), **options)
    return str(caught.value) if isinstance(caught.value, EmulatorError) else "wrong"


@pytest.mark.parametrize("name, kernel", [(name, kernel) for name, fault in FAULTS.items() for kernel in fault.kernels])
def test_a_fault_in_the_loop_is_seen(name, kernel, patched):
    fault = FAULTS[name]
    patched(fault)
    for options in ({}, *ORDERS):
        error = seen(kernel, fault.tile, **options)
        assert re.match(fault.error, error), error


@pytest.mark.parametrize("kernel", NAMES)
@pytest.mark.parametrize("tile", sorted({fault.tile for fault in FAULTS.values()}), ids=str)
def test_without_a_fault_nothing_is_seen(tile, kernel):
    for options in ({}, *ORDERS):
        run(PROBLEM, crafted(kernel, tile, PROBLEM), **options)


@pytest.mark.parametrize("kernel", NAMES)
def test_a_map_with_another_swizzle_is_seen(kernel, monkeypatch):
    own = conv_wgmma.maps.input_map
    monkeypatch.setattr(conv_wgmma.maps, "input_map", lambda *a: replace(own(*a), swizzle=0))
    assert seen(kernel, ROUND) == "wrong"
    with pytest.raises(ValueError, match="swizzle"):
        replace(
            own(PROBLEM, conv_wgmma.strides(crafted(kernel, ROUND, PROBLEM).ins[0], PROBLEM.in_shapes[0]), 64, 32), swizzle=64
        )
