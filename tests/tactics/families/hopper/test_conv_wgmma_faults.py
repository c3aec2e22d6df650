"""Each step of the Hopper convolutions' loop and end that is left out, comes too early or is done otherwise: the emulator
notices it, in every order of warps and blocks and both modes of copies."""

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
from tactics.families.hopper import conv_wgmma, ends
from tactics.format import Format
from tactics.problems.problem import ConvProblem
from tactics.sampling import trial
from tactics.tactic import Tile
from tests.problems import RELU, conv_case
from tests.tactics.families.hopper.cases import (
    BOX,
    CHW32,
    DEEPER,
    DENSE,
    HWC8,
    KEPT,
    MOST_BLOCKS,
    NAMES,
    ONE,
    ORDERS,
    SMALL,
    SPARSE,
    TURNS,
    TWO,
    WIDE_TURNS,
    crafted,
    run,
)

GEMM, TILES, STORES = "include/tma_gemm.cuh", "include/tma_tile.cuh", "include/tma_stores.cuh"
PART, PTX = "include/staged_part.cuh", "include/wgmma.cuh"
# A stage read or filled too early: before its bytes are there, while they are on their way, while products read it; or arrivals
# and bytes that belong to another phase, with which some order of warps ends.
EARLY = "race|in flight|uninitialised|mbarrier|deadlock"
# Three rounds of a pipeline of three stages in every tile, several tiles of a block.
PROBLEM = conv_case(2, 72, 9, 7, 72, 3, 3, pad=ONE, bias=True, act=RELU, residual=True, sparse24=True)
ROUND = replace(SMALL, persist=2)
# More parts of a warpgroup than the slots that they go round (`few_slots`); of a tile that two take turns with, and share.
WIDE = conv_case(3, 72, 13, 11, 136, 3, 3, pad=ONE, bias=True, act=RELU, residual=True, sparse24=True)
PLAIN = replace(WIDE, epilogue=replace(WIDE.epilogue, residual=False))
END = replace(TURNS, m=128, n=128, persist=1)
MOST_SLOTS = 2


class Fault(NamedTuple):
    """A source with `text` in it, once, where `other` stands instead; how the error begins, "wrong" for wrong results. `out`:
    planes are stored by threads, pixels with all their channels by TMA."""

    source: str
    text: str
    other: str
    error: str
    kernels: tuple[str, ...] = NAMES
    tile: Tile = ROUND
    out: Format = HWC8
    problem: ConvProblem = PROBLEM


def own(kernel: str, text: str, other: str, error: str, tile: Tile = ROUND) -> Fault:
    """In the kernel's own source."""
    return Fault(f"{kernel}.cu", text, other, error, (kernel,), tile)


def of_threads(text: str, other: str, error: str, tile: Tile = ROUND, source: str = GEMM) -> Fault:
    """In what threads do where TMA cannot store."""
    return Fault(source, text, other, error, tile=tile, out=CHW32)


def of_end(source: str, text: str, other: str, error: str, problem: ConvProblem = WIDE) -> Fault:
    return Fault(source, text, other, error, tile=END, problem=problem)


LEFT, LAST_LEFT = "wgmma_wait<1>();\n      if (k) ring.leave(turn - 1);", "    wgmma_wait<0>();\n    keep_apart(acc);\n"
READ = "      is_last ? wait_for_reading_stores<0>() : wait_for_reading_stores<1>();\n"
# Of 2:4 weights: the next batch of a tile, and the first one of the next tile, here of other rows.
LOADS = """            if (!RESIDENT && slot % BATCH + step == 0)
#pragma unroll
              for (int next = slot + BATCH; next < slot + RING; ++next) fetch(next % RING, k0 * TAPS + next);
"""
NEXT = "    if (AHEAD<Product> && !Product::RESIDENT && next.count) product.begin(p, origin(p, next).m64 + first, next);\n"
OTHER_ROWS = replace(ROUND, persist=1)
SPLIT = replace(ROUND, n=128, split=2, persist=0)
PAIR, PAIR_K = replace(TWO, cluster=(2, 1, 1), persist=2), replace(DEEPER, cluster=(1, 1, 2))
EIGHTS = replace(SMALL, cluster=(1, 1, 4))  # parts of eight pixels
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
    "barriers not fenced": Fault(TILES, "    fence_mbarrier_init();\n", "", "mbarrier"),
    "barriers of others not waited for": Fault(GEMM, "  else\n    __syncthreads();\n", "", "mbarrier|race"),
    "parity of full stages": Fault(TILES, "turn / STAGES % 2); }", "turn / STAGES % 2 ^ 1); }", EARLY),
    "parity of empty stages": Fault(TILES, "turn / STAGES % 2 ^ 1); }", "turn / STAGES % 2); }", EARLY),
    "fewer warps leave than read": Fault(TILES, "WARPS_READING = 4 *", "WARPS_READING = 3 *", EARLY),
    "no turns": Fault(
        GEMM, "if (PINGPONG && number) wait_for", "if (false) wait_for", f"{EARLY}|barrier", tile=replace(TURNS, persist=1)
    ),
    "no wait for the launch ahead: copies": Fault(
        GEMM, "turn, turn);\n  wait_for_previous_launch();\n", "turn, turn);\n", "dependent launch: global load"
    ),
    "no wait for the launch ahead: stores": of_threads(
        "    if (!begun) wait_for_previous_launch();\n", "", "dependent launch: global (load|store)"
    ),
    "a residual of rows past the last": of_threads("ok = row < output_rows(p) &&", "ok =", "out of bounds"),
    "a residual of pixels past the last": of_threads(
        "ok = row < output_rows(p) && offset >= 0", "ok = row < output_rows(p)", "out of bounds|misaligned"
    ),
    "all parts of a residual in one place": of_threads(
        "i * STORED + part / CLUSTER_K : 0", "0 : 0", "cp.async: write", replace(ROUND, n=128)
    ),
    "a part over one that is still stored": of_threads(
        "  sync_threads();  // the last part's stores have read the staging tile, and this one's residual is there\n",
        "",
        "race",
        SPLIT,
        PART,
    ),
    "a part stored before it is staged": of_threads("  sync_threads();\n  store_tile", "  store_tile", "race", SPLIT, PART),
    "no proxy fence": of_end(STORES, "  fence_proxy_async();\n", "", "proxy fence"),
    "a lane arrives for a warp that has not met": of_end(
        STORES, "  __syncwarp();\n  if (threadIdx.x % 32 == 0)", "  if (threadIdx.x % 32 == 0)", "race"
    ),
    "staged by fewer warps": of_end(TILES, "slot * 8, THREADS / 32)", "slot * 8, THREADS / 32 - 1)", EARLY),
    "no wait for a ready slot": of_end(STORES, "  mbarrier_wait(ring.ready(team, number), number / SLOTS % 2);\n", "", EARLY),
    "no wait for a free slot": of_end(
        STORES, "  mbarrier_wait(ring.ready(team, number), number / SLOTS % 2);\n", "", EARLY, PLAIN
    ),
    "no wait for staged parts": of_end(
        STORES, "      mbarrier_wait(ring.staged(team, number), number / SLOTS % 2);\n", "", EARLY
    ),
    "slots given back unread": of_end(STORES, READ, "", "race"),
    "slots given back unread, without a residual": of_end(STORES, READ, "", "race", PLAIN),
    "one store too few waited for": of_end(STORES, "stores<0>() :", "stores<1>() :", "race"),
    "slots given back too early": of_end(STORES, "number + is_last + SLOTS", "number + 1 + SLOTS", "race"),
    "parity of ready slots": of_end(
        STORES, "ready(team, number), number / SLOTS % 2)", "ready(team, number), number / SLOTS % 2 ^ 1)", EARLY
    ),
    "too few bytes of a residual expected": of_end(
        STORES, "expecting(ready, STAGING_BYTES)", "expecting(ready, STAGING_BYTES - 1024)", EARLY
    ),
    "stores in no group": of_end(STORES, "      stores_commit();\n", "", "race"),
    "no wait for the launch ahead: residual": of_end(STORES, "    wait_for_previous_launch();\n", "", "dependent launch"),
    "rows of another chunk": of_end(PART, "warp * 2 + lane / 8 % 2);", "warp * 2 + 1 - lane / 8 % 2);", "wrong"),
    "pixels in another order": of_end(PART, "(lane / 16 * 8 + lane % 8", "(8 - lane / 16 * 8 + lane % 8", "wrong"),
    "parts in another order": of_end(STORES, "first = index % PARTS * BN", "first = (PARTS - 1 - index % PARTS) * BN", "wrong"),
    "another pixel of the tile": of_end(STORES, "TILE_N + first + n, 0", "TILE_N + first + n + 1, 0", "wrong"),
    "no wgmma.fence": Fault(PTX, '"wgmma.fence.sync.aligned;"', '""', "wgmma: .* no wgmma.fence stands between"),
    "sums read too early": Fault(
        GEMM, "wgmma_wait<0>", "wgmma_wait<1>", "wgmma: accesses a (sum|register)|race: .* a wgmma read it"
    ),
    "two groups in flight": own(DENSE, "wgmma_wait<1>", "wgmma_wait<2>", "race"),
    "weights loaded in flight": own(SPARSE, "wgmma_wait<1>", "wgmma_wait<2>", "wgmma: accesses a register|race"),
    "weights loaded ahead of the wait": own(
        SPARSE, f"            wgmma_wait<1>();\n{LOADS}", f"{LOADS}            wgmma_wait<1>();\n", "wgmma: accesses a register"
    ),
    "the next tile's weights ahead of the last wait": Fault(
        GEMM,
        f"{LAST_LEFT}    ring.leave(turn - 1);\n\n{NEXT}",
        f"{NEXT}{LAST_LEFT}    ring.leave(turn - 1);\n\n",
        "wgmma: accesses a register",
        (SPARSE,),
        OTHER_ROWS,
    ),
    "the same tile's weights again": Fault(
        GEMM, "begin(p, origin(p, next).m64 + first, next)", "begin(p, tile.m64 + first, next)", "wrong", (SPARSE,), OTHER_ROWS
    ),
    "weights that are never loaded again": Fault(
        GEMM,
        "(AHEAD<Product> || Product::RESIDENT)",
        "(AHEAD<Product> || true)",
        "wrong",
        (SPARSE,),
        replace(TURNS, persist=1),
        problem=WIDE,
    ),
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
        GEMM, "box.w - p.pad_l + s", "box.w - p.pad_l - s", "wrong", tile=replace(BOX, persist=2)
    ),
    "pixels to one block of a cluster": Fault(GEMM, "copy_column<CLUSTER_M>", "copy_column<1>", EARLY, tile=PAIR),
    "a stage left in one block of a cluster": Fault(TILES, "lane < CLUSTER) mbarrier", "lane < 1) mbarrier", EARLY, tile=PAIR),
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
    "sums read before all are there": Fault(
        GEMM, "acc[i][j]));\n  sync_cluster();\n", "acc[i][j]));\n  meet_cluster();\n", "race", tile=EIGHTS
    ),
    "sums of another part": Fault(GEMM, "part * NT + j) * THREADS * 16, rank", "j) * THREADS * 16, rank", "wrong", tile=EIGHTS),
    "parts stored that nobody sums": Fault(TILES, "CLUSTER_K == rank *", "CLUSTER_K == 0 *", "deadlock", tile=EIGHTS),
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


@pytest.fixture(autouse=True)
def few_slots(monkeypatch):
    """Parts go round them: what comes too early meets another part."""
    monkeypatch.setattr(ends, "MOST_SLOTS", MOST_SLOTS)


def seen(fault: Fault, kernel: str, **options) -> str:
    """How the error begins that a run ends with; "wrong" where results are."""
    with pytest.raises((EmulatorError, AssertionError, trial.Wrong)) as caught:
        run(fault.problem, crafted(kernel, fault.tile, fault.problem, fault.out), **options)
    return str(caught.value) if isinstance(caught.value, EmulatorError) else "wrong"


def cases():
    """Each fault in each kernel that has it; `make check` sees those of a header in the dense and the sparse kernel in turn."""
    for number, (name, fault) in enumerate(FAULTS.items()):
        for i, kernel in enumerate(fault.kernels):
            yield pytest.param(name, kernel, marks=pytest.mark.slow if i != number % len(fault.kernels) else ())


@pytest.mark.sample(40)
@pytest.mark.parametrize("name, kernel", list(cases()))
def test_a_fault_in_the_loop_is_seen(name, kernel, patched):
    fault = FAULTS[name]
    if blocks(fault.tile) > MOST_BLOCKS:
        pytest.skip(f"the emulator starts clusters of {MOST_BLOCKS}")
    patched(fault)
    for options in ({}, *ORDERS):
        error = seen(fault, kernel, **options)
        assert re.match(fault.error, error), error


WITHOUT = sorted({(fault.tile, fault.out) for fault in FAULTS.values()})


@pytest.mark.parametrize("kernel", NAMES)
@pytest.mark.parametrize("tile, out", WITHOUT, ids=str)
def test_without_a_fault_nothing_is_seen(tile, out, kernel):
    if blocks(tile) > MOST_BLOCKS:
        pytest.skip(f"the emulator starts clusters of {MOST_BLOCKS}")
    for problem in {fault.problem for fault in FAULTS.values() if (fault.tile, fault.out) == (tile, out)}:
        for options in ({}, *ORDERS):
            run(problem, crafted(kernel, tile, problem, out), **options)


def test_weights_that_stay_where_rows_change_are_wrong(monkeypatch):
    """By one block, of tiles of three columns of rows."""
    problem = replace(KEPT, k=136)
    tile = replace(WIDE_TURNS, persist=1)
    run(problem, crafted(SPARSE, tile, problem))
    monkeypatch.setattr(conv_wgmma, "_weights_stay", lambda *_: True)
    assert seen(Fault("", "", "", "wrong", tile=tile, problem=problem), SPARSE) == "wrong"


@pytest.mark.parametrize("kernel", NAMES)
def test_a_map_with_another_swizzle_is_seen(kernel, monkeypatch):
    own = conv_wgmma.maps.input_map
    monkeypatch.setattr(conv_wgmma.maps, "input_map", lambda *a: replace(own(*a), swizzle=0))
    assert seen(Fault("", "", "", "wrong"), kernel) == "wrong"
    with pytest.raises(ValueError, match="swizzle"):
        replace(
            own(PROBLEM, conv_wgmma.strides(crafted(kernel, ROUND, PROBLEM).ins[0], PROBLEM.in_shapes[0]), 64, 32), swizzle=64
        )
