"""Blocks that meet in global memory: resident ones may wait for each other, and what they read must be ordered."""

import contextlib
import re

import numpy as np
import pytest

from cuda_kernels.compile import compile_kernel
from cuda_kernels.emulator import EmulatorError, Options, load
from tests.cuda_kernels.emulator.test_emulator import HERE, program, run

FILE = "golden_blocks.cu"
FENCES = {"RELEASE_FENCE": 1, "ACQUIRE_FENCE": 1}


def last_arriver(options, blocks=6, **fences):
    x = np.arange(64, dtype=np.float32)
    args = [x, np.zeros(64 * blocks, np.float32), np.zeros(1, np.int32), np.zeros(64, np.float32)]
    _, (_, _, counter, out) = run(program(FILE, "last_arriver", **fences), 64, args, grid=blocks, options=options)
    assert counter[0] == 0
    np.testing.assert_array_equal(out, x * (blocks * (blocks + 1) // 2))


@pytest.mark.parametrize("resident", [0, 1, 3, 100])
@pytest.mark.parametrize("seed", range(4))
def test_the_last_arriver_sums(seed, resident):
    for checks in (True, False):
        last_arriver(Options(seed=seed, resident_blocks=resident, checks=checks), **FENCES)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "left_out,words", [("RELEASE_FENCE", "no chain of __threadfence"), ("ACQUIRE_FENCE", "between the atomic")]
)
def test_a_missing_fence_is_found(left_out, words, seed):
    fences = {k: v for k, v in FENCES.items() if k != left_out}
    last_arriver(Options(seed=seed, resident_blocks=4, checks=False), **fences)  # this CPU orders it all the same
    with pytest.raises(EmulatorError, match=words) as caught:
        last_arriver(Options(seed=seed, resident_blocks=4), **fences)
    assert caught.value.check == "global order" and "golden_blocks.cu" in str(caught.value)


@pytest.mark.parametrize("seed", range(3))
def test_a_cache_operator_is_no_fence(seed):
    """PTX ISA, "Cache Operators": hints, which leave a program's memory consistency as it is; so does ld.global.cg here."""
    x, blocks = np.arange(64, dtype=np.float32), 6
    for fences, refused in (({"RELEASE_FENCE": 1}, True), (FENCES, False)):
        ptx = compile_kernel(str(HERE / FILE), fences, "sm_80").ptx
        past_l1 = load(re.sub(r"ld\.global\.([uf]32)", r"ld.global.cg.\1", ptx), "last_arriver")
        args = [x, np.zeros(64 * blocks, np.float32), np.zeros(1, np.int32), np.zeros(64, np.float32)]
        with pytest.raises(EmulatorError, match="between the atomic") if refused else contextlib.nullcontext():
            run(past_l1, 64, args, grid=blocks, options=Options(seed=seed, resident_blocks=4))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "threads, barriers, right",
    [
        (64, {"BEFORE": "__syncthreads"}, True),
        (32, {"BEFORE": "__syncwarp"}, True),
        (64, {}, False),
        (32, {}, False),
        (64, {"BEHIND": "__syncthreads"}, False),
        (32, {"BEHIND": "__syncwarp"}, False),
        (64, {"BEFORE": "__syncwarp"}, False),
    ],
)
def test_a_fence_by_one_thread_orders_what_a_barrier_has_brought_to_it(threads, barriers, right, seed):
    x, blocks = np.arange(threads, dtype=np.float32), 6
    args = [x, np.zeros(threads * blocks, np.float32), np.zeros(1, np.int32), np.zeros(threads, np.float32)]
    options = Options(seed=seed, resident_blocks=4)
    if right:
        _, (_, _, _, out) = run(program(FILE, "one_fence", **barriers), threads, args, grid=blocks, options=options)
        np.testing.assert_array_equal(out, x * (blocks * (blocks + 1) // 2))
        return
    with pytest.raises(EmulatorError, match="by the thread that wrote, or behind a barrier") as caught:
        run(program(FILE, "one_fence", **barriers), threads, args, grid=blocks, options=options)
    assert caught.value.check == "global order"


@pytest.mark.parametrize("seed", range(3))
def test_neighbours_need_an_order(seed):
    args = [np.zeros(64, np.int32), np.zeros(64, np.int32)]
    with pytest.raises(EmulatorError, match="was written in this launch by block"):
        run(program(FILE, "neighbours"), 32, args, grid=2, options=Options(seed=seed, threads=1))
    run(program(FILE, "neighbours", FIXED=1), 32, args, grid=2, options=Options(seed=seed))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("threads", [1, 2])
def test_resident_blocks_wait_for_each_other(seed, threads):
    def chain(resident, **values):
        args = [np.zeros(5, np.int32), np.zeros(5, np.int32)]
        options = Options(seed=seed, threads=threads, resident_blocks=resident)
        return run(program(FILE, "chain", **values), 64, args, grid=5, options=options)[1][1]

    assert chain(5, FIXED=1).tolist() == chain(9, FIXED=1).tolist() == [5, 4, 3, 2, 1]
    for _ in range(30):  # the thread that does not meet the fault must not take the other's end for a deadlock
        with pytest.raises(EmulatorError, match="was written in this launch by block"):
            chain(5)
    if seed == 0:
        for resident in (0, 4):
            with pytest.raises(EmulatorError, match="every resident block waits") as caught:
                chain(resident, FIXED=1)
            assert caught.value.check == "deadlock" and "of 5" in str(caught.value)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("checks", [True, False])
def test_a_barrier_of_the_grid(seed, checks):
    def barrier(resident):
        args = [np.zeros(1, np.int32), np.zeros(12, np.int32)]
        options = Options(seed=seed, resident_blocks=resident, checks=checks)
        return run(program(FILE, "grid_barrier"), 96, args, grid=4, options=options)[1][1]

    assert barrier(4).reshape(3, 4).tolist() == [[0] * 4, [1] * 4, [2] * 4]
    with pytest.raises(EmulatorError, match="places for blocks: 3, started: 3 of 4"):
        barrier(3)


@pytest.mark.parametrize("options", [Options(), Options(seed=3), Options(checks=False, threads=2), Options(resident_blocks=2)])
def test_waiting_for_what_no_one_writes_is_a_deadlock(options):
    with pytest.raises(EmulatorError, match="every resident block waits") as caught:
        run(program(FILE, "nobody_writes"), 64, [np.zeros(1, np.int32), np.zeros(64, np.int32)], grid=3, options=options)
    assert caught.value.check == "deadlock" and "warp 1: at barrier 0" in str(caught.value)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("checks", [True, False])
@pytest.mark.parametrize("kernel, values", [("one_spins", {}), ("semaphore", {"NOBODY": 1})])
def test_one_thread_that_waits_in_vain_is_a_deadlock(kernel, values, checks, seed):
    """Others wait for it at a barrier, or go round with it, from barrier to barrier."""
    args = [np.zeros(1, np.int32), np.zeros(64, np.int32)]
    with pytest.raises(EmulatorError, match="every resident block waits") as caught:
        run(program(FILE, kernel, **values), 64, args, grid=3, options=Options(seed=seed, checks=checks))
    assert caught.value.check == "deadlock"


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("threads", [1, 2])
def test_a_semaphore_lets_block_after_block_go_on(seed, threads):
    options = Options(seed=seed, threads=threads, resident_blocks=5)
    args = [np.zeros(1, np.int32), np.zeros(5, np.int32)]
    _, (turn, out) = run(program(FILE, "semaphore"), 96, args, grid=5, options=options)
    assert turn[0] == 5 and out.tolist() == [0, 10, 20, 30, 40]
    args = [np.zeros(1, np.int32), np.zeros(96, np.int32)]
    _, (_, out) = run(program(FILE, "others_count"), 96, args, grid=3, options=options)
    assert (out == 300).all()


@pytest.mark.parametrize("seed", range(4))
def test_waiting_that_ends_is_not_a_deadlock(seed):
    flag = np.array([0, 2], np.int32)
    _, (_, out) = run(program(FILE, "patience"), 32, [flag, np.zeros(32, np.int32)], options=Options(seed=seed))
    assert (out == 10000).all()


@pytest.mark.parametrize("seed", range(4))
def test_order_is_passed_on(seed):
    args = [np.zeros(1, np.int32), np.zeros(3, np.int32), np.zeros(1, np.int32)]
    options = Options(seed=seed, resident_blocks=3)
    assert run(program(FILE, "relay", FIXED=1), 32, args, grid=3, options=options)[1][2][0] == 7
    with pytest.raises(EmulatorError, match="no chain of __threadfence"):
        run(program(FILE, "relay"), 32, args, grid=3, options=options)
