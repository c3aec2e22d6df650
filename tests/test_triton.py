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
    "carried gathered_lanes gathered_half rounded roots"
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
