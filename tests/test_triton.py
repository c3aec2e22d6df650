"""Kernels compiled by Triton, run in the emulator beside NumPy: PTX that none of us wrote."""

from dataclasses import replace

import pytest

from cuda_kernels.emulator import EmulatorError, Options
from tests.independent import triton_programs
from tests.independent.triton_programs import COMMITTED, all_kernels, committed
from tests.independent.triton_runs import worst

ORDERS = [Options(), Options(async_mode="late"), Options(async_mode="late", seed=5), Options(seed=11)]
NAMES = (
    "matmul matmul_128x128 matmul_128x64 matmul_one_warp matmul_transposed_a matmul_transposed_b matmul_half_sums "
    "matmul_bfloat16 matmul_odd matmul_float_result matmul_float conv_stride1 conv_stride2 attention softmax layer_norm scan "
    "sort argmax transpose histogram functions numbers counters dependent words shorts compared masks "
    "carried gathered_lanes gathered_half turned_in_cluster rounded roots clipped matmul_hopper matmul_hopper_128x128 "
    "matmul_hopper_transposed_b attention_hopper tma_64x64x32 tma_64x64x16 tma_128x128x64 tma_128x128x64_8_warps "
    "box_1d_512_bytes box_2d_16_bytes box_2d_32_bytes box_2d_64_bytes box_2d_128_bytes box_2d_256_bytes box_3d_128_bytes "
    "box_3d_32_bytes box_4d_64_bytes box_5d_128_bytes box_5d_16_bytes"
).split()
needs_triton = pytest.mark.skipif(not triton_programs.installed(), reason="Triton is not installed: make truth")


def name(options: Options) -> str:
    return f"{options.async_mode}-{options.seed}"


@pytest.mark.parametrize("kernel", COMMITTED)
@pytest.mark.parametrize("options", ORDERS, ids=name)
def test_a_committed_kernel_is_right(kernel, options):
    assert worst(committed(kernel), options) <= 1


@pytest.mark.full
@needs_triton
@pytest.mark.parametrize("kernel", NAMES)
def test_triton_is_right(kernel):
    for seed, options in enumerate(ORDERS):
        assert worst(all_kernels()[kernel], options, seed) <= 1


@pytest.mark.full
@needs_triton
def test_every_kernel_is_run_and_the_committed_are_what_triton_makes():
    assert sorted(all_kernels()) == sorted(NAMES)
    for kernel in COMMITTED:
        made, kept = all_kernels()[kernel], committed(kernel)
        assert kept.ptx.partition("\n")[2].split() == made.ptx.split()
        assert replace(kept, ptx=made.ptx) == made


@pytest.mark.long
@needs_triton
@pytest.mark.parametrize("seed", range(20, 50))
@pytest.mark.parametrize("kernel", NAMES)
def test_triton_is_right_in_any_order(kernel, seed):
    options = Options(async_mode="late" if seed % 2 else "eager", seed=seed, threads=1 + seed % 2)
    assert worst(all_kernels()[kernel], options, seed) <= 1


def test_a_pipeline_that_waits_for_too_little_is_found():
    """Triton's own program, one stage short of what it waits for."""
    kernel = committed("matmul")
    assert "cp.async.wait_group \t2;" in kernel.ptx
    early = replace(kernel, ptx=kernel.ptx.replace("cp.async.wait_group \t2;", "cp.async.wait_group \t3;"))
    with pytest.raises(EmulatorError) as caught:
        worst(early, Options())
    assert caught.value.check == "cp.async"


@pytest.mark.parametrize("instead", ["", "griddepcontrol.launch_dependents;"])
def test_a_chain_of_early_launches_that_does_not_wait_is_found(instead):
    """Triton's own wait, dropped, or taken for the trigger, which orders nothing."""
    kernel = committed("dependent")
    assert kernel.dependent and "griddepcontrol.wait ;" in kernel.ptx
    early = replace(kernel, ptx=kernel.ptx.replace("griddepcontrol.wait ;", instead))
    with pytest.raises(EmulatorError) as caught:
        worst(early, Options())
    assert caught.value.check == "dependent launch"
    assert worst(replace(early, dependent=False), Options()) == 0


BROKEN = {  # fault -> (a kernel for Hopper, a part of its text, the replacement, the checks that find the fault)
    "a wgmma still reads the stage that is copied to": (
        "matmul_hopper",
        "wait_group.sync.aligned 1;",
        "wait_group.sync.aligned 2;",
        "race",
    ),
    "copies by threads, no fence between proxies": ("matmul_hopper", "fence.proxy.async.shared::cta;", "", "proxy fence"),
    "no wgmma.fence": ("matmul_hopper", "wgmma.fence.sync.aligned;", "", "wgmma"),
    "sums read too early": ("matmul_hopper", "wgmma.wait_group.sync.aligned 0;", "", "wgmma"),
    "a group is not committed": ("tma_64x64x32", "wgmma.commit_group.sync.aligned;", "", "wgmma race"),
    "a bulk copy into a stage that is read": (
        "tma_64x64x32",
        "wait_group.sync.aligned 1;",
        "wait_group.sync.aligned 2;",
        "race",
    ),
    "too many bytes": ("tma_64x64x32", "[%r5], 8192;", "[%r5], 8208;", "deadlock"),
    "too few bytes": ("tma_64x64x32", "[%r5], 8192;", "[%r5], 4096;", "race mbarrier"),
    "the other parity": ("tma_64x64x32", "complete, [%r25], %r90;", "complete, [%r25], 1;", "race in flight deadlock"),
    "the source of a store is not fenced": ("tma_64x64x32", "fence.proxy.async.shared::cta;", "", "proxy fence"),
    "a store that nobody waits for": ("tma_64x64x32", "cp.async.bulk.wait_group \t0;", "", "pending"),
}


@pytest.mark.parametrize("options", ORDERS, ids=name)
@pytest.mark.parametrize("fault", BROKEN)
def test_a_kernel_for_hopper_that_was_broken_is_refused(fault, options):
    kernel, old, new, checks = BROKEN[fault]
    text = committed(kernel).ptx
    assert text.count(old) == 1
    with pytest.raises(EmulatorError) as caught:
        worst(replace(committed(kernel), ptx=text.replace(old, new)), options)
    assert caught.value.check in checks, caught.value
