"""What the driver's codes mean: one error for ours and CuPy's, and one place that says after which nothing runs any more."""

import subprocess
import sys

import pytest

from cuda_kernels.driver import FATAL, DriverError, check_status, code_of, is_fatal, why_fatal

driver = pytest.importorskip("cuda.bindings.driver")


def of_a_launch(code) -> DriverError:
    with pytest.raises(DriverError) as caught:
        check_status("cuLaunchKernelEx", code, "for 3 blocks")
    return caught.value


def test_success_is_no_error():
    check_status("cuInit", driver.CUresult.CUDA_SUCCESS)
    check_status("cuInit", 0)


def test_an_error_names_the_call_the_code_and_what_was_asked():
    error = of_a_launch(driver.CUresult.CUDA_ERROR_INVALID_VALUE)
    assert str(error) == "cuLaunchKernelEx: CUDA_ERROR_INVALID_VALUE for 3 blocks"
    assert (error.call, error.code, error.name) == ("cuLaunchKernelEx", 1, "CUDA_ERROR_INVALID_VALUE")
    assert not is_fatal(error) and why_fatal(error) is None


def test_a_fault_is_fatal_whoever_reports_it():
    runtime = pytest.importorskip("cupy_backends.cuda.api.runtime")
    import cupy  # noqa: F401 (its errors are known by then)

    for error in (of_a_launch(driver.CUresult.CUDA_ERROR_MISALIGNED_ADDRESS), runtime.CUDARuntimeError(716)):
        assert code_of(error) == 716 and is_fatal(error) and why_fatal(error) == "a misaligned address"
    assert not is_fatal(runtime.CUDARuntimeError(1)) and code_of(runtime.CUDARuntimeError(900)) == 900


def test_a_fault_behind_another_error_is_found():
    try:
        try:
            raise of_a_launch(driver.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS)
        except DriverError:
            raise KeyError("while cleaning up")  # noqa: B904 (that it was raised meanwhile is the point)
    except KeyError as e:
        assert code_of(e) == 700 and is_fatal(e)
    assert code_of(ValueError("CUDA_ERROR_ILLEGAL_ADDRESS")) is None  # words are no code


def test_memory_that_runs_out_is_not_fatal():
    memory = pytest.importorskip("cupy.cuda.memory")
    error = memory.OutOfMemoryError(1 << 40, 0, 0)
    assert code_of(error) == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY and not is_fatal(error)


def test_every_fatal_code_is_one_of_the_drivers():
    named = {int(code): code.name for code in driver.CUresult}
    assert set(FATAL) <= set(named)
    harmless = ("INVALID_VALUE", "OUT_OF_MEMORY", "NO_BINARY_FOR_GPU", "NOT_SUPPORTED", "LAUNCH_OUT_OF_RESOURCES", "NOT_READY")
    assert not {f"CUDA_ERROR_{name}" for name in harmless} & {named[code] for code in FATAL}


def test_no_error_is_told_without_cupy():
    code = (
        "import sys; from cuda_kernels.driver import code_of\n"
        "assert code_of(ValueError()) is None and not {'cupy', 'cuda'} & {m.split('.')[0] for m in sys.modules}"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).returncode == 0
