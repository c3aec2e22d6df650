"""Each step of the Hopper convolutions' loop that is left out, comes too early or is done otherwise: the emulator notices it,
in every order of warps and blocks and both modes of copies."""

import math
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
from tactics.sampling import trial
from tactics.tactic import Tile
from tests.problems import RELU, conv_case
from tests.tactics.families.hopper.cases import (
    BOX,
    DEEPER,
    DENSE,
    MOST_BLOCKS,
    NAMES,
    ONE,
    ORDERS,
    SMALL,
    SPARSE,
    TURNS,
    TWO,
    crafted,
    run,
)

GEMM, PTX = "include/tma_gemm.cuh", "include/wgmma.cuh"
# A stage read or filled too early: before its bytes are there, while they are on their way, while products read it; or arrivals
# and bytes that belong to another phase, with which some order of warps ends.
EARLY = "race|in flight|uninitialised|mbarrier|deadlock"
# Three rounds of a pipeline of three stages in every tile, several tiles of a block.
PROBLEM = conv_case(2, 72, 9, 7, 72, 3, 3, pad=ONE, bias=True, act=RELU, residual=True, sparse24=True)
ROUND = replace(SMALL, persist=2)


class Fault(NamedTuple):
    """A source with `text` in it, once, where `other` stands instead; how the error begins, "wrong" for wrong results."""

    source: str
    text: str
    other: str
    error: str
    kernels: tuple[str, ...] = NAMES
    tile: Tile = ROUND


def own(kernel: str, text: str, other: str, error: str, tile: Tile = ROUND) -> Fault:
    """In the kernel's own source."""
    return Fault(f"{kernel}.cu", text, other, error, (kernel,), tile)


LEFT, LAST_LEFT = "wgmma_wait<1>();\n      if (k) ring.leave(turn - 1);", "    wgmma_wait<0>();\n    keep_apart(acc);\n"
PAIR, PAIR_K = replace(TWO, cluster=(2, 1, 1), persist=2), replace(DEEPER, cluster=(1, 1, 2))
FAULTS = {
    "products of a stage that is not full": own(DENSE, "      ring.wait_until_full(turn);\n", "", EARLY),
    "sparse products of a stage that is not full": own(SPARSE, "        ring.wait_until_full(turn);\n", "", EARLY),
    "copies to a stage that is not empty": Fault(GEMM, "        ring.wait_until_empty(turn);\n", "", EARLY),
    "a stage left while products read it": own(DENSE, LEFT, "ring.leave(turn);\n      wgmma_wait<1>();", EARLY),
    "the next stage left instead": own(
        SPARSE, "if (r + step == 0 && k0 + k) ring.leave(turn - 1)", "if (r + step == TAPS) ring.leave(turn)", EARLY
    ),
    "the last stage left while products read it": Fault(
        GEMM, f"{LAST_LEFT}    ring.leave(turn - 1);\n", f"    ring.leave(turn - 1);\n{LAST_LEFT}", "race"
    ),
    "the last stage never left": Fault(GEMM, "    ring.leave(turn - 1);\n\n", "\n", "deadlock"),
    "too many bytes expected": Fault(
        GEMM, "ring.full(turn), Ring<Product>::BYTES", "ring.full(turn), Ring<Product>::BYTES + 16", "deadlock"
    ),
    "too few bytes expected": Fault(
        GEMM, "ring.full(turn), Ring<Product>::BYTES", "ring.full(turn), Ring<Product>::BYTES - 16", EARLY
    ),
    "barriers not fenced": Fault(GEMM, "    fence_mbarrier_init();\n", "", "mbarrier"),
    "barriers of others not waited for": Fault(GEMM, "  else\n    __syncthreads();\n", "", "mbarrier|race"),
    "parity of full stages": Fault(GEMM, "turn / STAGES % 2); }", "turn / STAGES % 2 ^ 1); }", EARLY),
    "parity of empty stages": Fault(GEMM, "turn / STAGES % 2 ^ 1); }", "turn / STAGES % 2); }", EARLY),
    "fewer warps leave than read": Fault(GEMM, "WARPS_READING = 4 *", "WARPS_READING = 3 *", EARLY),
    "no turns": Fault(
        GEMM, "if (PINGPONG && number) wait_for", "if (false) wait_for", f"{EARLY}|barrier", tile=replace(TURNS, persist=1)
    ),
    "no wait for the launch ahead: copies": Fault(
        GEMM, "turn, turn);\n  wait_for_previous_launch();\n", "turn, turn);\n", "dependent launch: global load"
    ),
    "no wait for the launch ahead: stores": Fault(
        GEMM, "    if (!begun) wait_for_previous_launch();\n", "", "dependent launch: global (load|store)"
    ),
    "a residual over what is still stored": Fault(
        GEMM, "  sync_threads();  // the last tile's stores have read all of this\n", "", "race"
    ),
    "places of a residual read too early": Fault(
        GEMM, "  sync_threads();\n  const int m =", "  const int m =", "race|uninitialised"
    ),
    "a residual of rows past the last": Fault(GEMM, "real = row < output_rows(p)", "real = true", "out of bounds"),
    "a residual of pixels past the last": Fault(GEMM, "real && offsets[k] >= 0", "real", "out of bounds|misaligned"),
    "all parts of a residual in one place": Fault(
        GEMM, "i * STORED + part / CLUSTER_K : 0", "0 : 0", "cp.async: write", tile=replace(ROUND, n=128)
    ),
    "no wgmma.fence": Fault(PTX, '"wgmma.fence.sync.aligned;"', '""', "wgmma: .* no wgmma.fence stands between"),
    "sums read too early": Fault(
        GEMM, "wgmma_wait<0>", "wgmma_wait<1>", "wgmma: accesses a (sum|register)|race: .* a wgmma read it"
    ),
    "two groups in flight": own(DENSE, "wgmma_wait<1>", "wgmma_wait<2>", "race"),
    "weights loaded in flight": own(SPARSE, "wgmma_wait<1>", "wgmma_wait<2>", "wgmma: accesses a register"),
    "weights of another step": own(SPARSE, "k0 * TAPS + next)", "k0 * TAPS + next - 1)", "wrong"),
    "no swizzle": Fault(PTX, "| 64ull << 32 | 1ull << 62", "| 64ull << 32", "wrong|descriptor"),
    "another swizzle": Fault(PTX, "| 64ull << 32 | 1ull << 62", "| 64ull << 32 | 2ull << 62", "wrong|descriptor"),
    "another step of rows": Fault(PTX, "64ull << 32", "32ull << 32", "wrong"),
    "taps in another order": Fault(GEMM, "r * p.dil_h, s * p.dil_w, ring", "s * p.dil_h, r * p.dil_w, ring", "wrong"),
    "channels of another stage": Fault(GEMM, "group_c + c * 64, at", "group_c + (c ^ 1) * 64, at", "wrong"),
    "rows past the last ones": Fault(GEMM, "min(m64 + i, last)", "(m64 + i)", "out of bounds", (DENSE,), replace(ROUND, m=256)),
    "sparse rows past the last ones": own(
        SPARSE, "min(m64 + i, p.m16 / 4 - 1)", "m64 + i", "out of bounds", replace(ROUND, m=256)
    ),
    "steps past the last": own(SPARSE, "min(number, last)", "number", "out of bounds"),
    "registers not given back": Fault(
        GEMM, "if (TEAMS > 1) keep_registers<40>();", "", "setmaxnreg|deadlock", tile=replace(TURNS, persist=1)
    ),
    "rows of a box in another order": own(
        DENSE, "r * TAP_BYTES", "(TAPS - 1 - r) * TAP_BYTES", "wrong", replace(BOX, persist=2)
    ),
    "sparse rows of a box in another order": own(
        SPARSE, "r * TAP_BYTES", "(TAPS - 1 - r) * TAP_BYTES", "wrong", replace(BOX, persist=2)
    ),
    "a box's columns in another order": Fault(
        GEMM, "box.q - p.pad_l + s", "box.q - p.pad_l - s", "wrong", tile=replace(BOX, persist=2)
    ),
    "pixels to one block of a cluster": Fault(GEMM, "copy_column<CLUSTER_M>", "copy_column<1>", EARLY, tile=PAIR),
    "a stage left in one block of a cluster": Fault(GEMM, "lane < CLUSTER) mbarrier", "lane < 1) mbarrier", EARLY, tile=PAIR),
    "no barrier of the cluster ahead": Fault(
        GEMM,
        "    meet_cluster();  // barriers are visible by their fence\n",
        "    __syncthreads();\n",
        "cluster|mbarrier",
        tile=PAIR,
    ),
    "no barrier of the cluster at its end": Fault(
        GEMM,
        "  if (CLUSTER * CLUSTER_K > 1) sync_cluster();  // no",
        "  // no",
        "cluster|shared memory|mbarrier|bulk copy|pending",
        tile=PAIR,
    ),
    "sums over stages that are multiplied": Fault(
        GEMM, "  if (TEAMS > 1) wait_for_other_warpgroup(OTHERS_TURN);", "  //", "race", tile=PAIR_K
    ),
    "sums of one block alone": Fault(GEMM, "* THREADS * 16, rank);", "* THREADS * 16, 0);", "wrong", tile=PAIR_K),
}


def blocks(tile: Tile) -> int:
    return math.prod(tile.cluster)


@pytest.fixture
def patched(tmp_path, monkeypatch):
    """Compiles kernels with a header changed."""

    def patch(fault: Fault) -> None:
        shutil.copytree(compiling.INCLUDE, tmp_path / "include")
        for kernel in NAMES:
            shutil.copy(compiling.source_path(kernel), tmp_path)
        path = tmp_path / fault.source
        source = path.read_text()
        assert source.count(fault.text) == 1
        path.write_text(source.replace(fault.text, fault.other))
        monkeypatch.setattr(compiling, "INCLUDE", tmp_path / "include")
        anew = lru_cache(lambda kernel, values, sm: compile_anew(str(tmp_path / f"{kernel}.cu"), dict(values), sm))
        monkeypatch.setattr(trial, "loaded", lambda gpu, steps: [gpu.load(anew(s.kernel, s.values, gpu.arch)) for s in steps])

    return patch


def seen(kernel: str, tile: Tile, **options) -> str:
    """How the error begins that a run ends with; "wrong" where results are."""
    with pytest.raises((EmulatorError, AssertionError)) as caught:
        run(PROBLEM, crafted(kernel, tile, PROBLEM), **options)
    return str(caught.value) if isinstance(caught.value, EmulatorError) else "wrong"


def cases():
    """Each fault in each kernel that has it; `make check` sees those of a header in the dense and the sparse kernel in turn."""
    for number, (name, fault) in enumerate(FAULTS.items()):
        for i, kernel in enumerate(fault.kernels):
            yield pytest.param(name, kernel, marks=pytest.mark.slow if i != number % len(fault.kernels) else ())


@pytest.mark.parametrize("name, kernel", list(cases()))
def test_a_fault_in_the_loop_is_seen(name, kernel, patched):
    fault = FAULTS[name]
    if blocks(fault.tile) > MOST_BLOCKS:
        pytest.skip(f"the emulator starts clusters of {MOST_BLOCKS}")
    patched(fault)
    for options in ({}, *ORDERS):
        error = seen(kernel, fault.tile, **options)
        assert re.match(fault.error, error), error


@pytest.mark.parametrize("kernel", NAMES)
@pytest.mark.parametrize("tile", sorted({fault.tile for fault in FAULTS.values()}), ids=str)
def test_without_a_fault_nothing_is_seen(tile, kernel):
    if blocks(tile) > MOST_BLOCKS:
        pytest.skip(f"the emulator starts clusters of {MOST_BLOCKS}")
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
