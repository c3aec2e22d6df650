"""What is handed to the driver, without one: parameter structs, and launches that may begin early."""

import ctypes
import struct

import pytest

from cuda_kernels.device import NAMED
from cuda_kernels.driver import DriverError, dependent, param_bytes
from cuda_kernels.launch import Cuda, Emulated, Kernel
from cuda_kernels.params import check_launch, pack_params


def test_parameters_lie_as_in_a_c_struct():
    packed = pack_params([("ptr", 1 << 40), ("i32", -2), ("ptr", 3), ("f32", 1.5), ("i32", 7), ("i32", 8)])
    assert packed == struct.pack("<Qi4xQfii4x", 1 << 40, -2, 3, 1.5, 7, 8)
    packed = pack_params([("ptr", 1), ("map", bytes(range(128))), ("i32", 7), ("map", bytes(128)), ("i32", 8)])
    assert packed == struct.pack("<Q56x128si60x128si60x", 1, bytes(range(128)), 7, bytes(128), 8), (
        "aligned to 64, as its end is"
    )


@pytest.fixture
def driver(monkeypatch):
    """The driver's launch call, writing down what it is given."""
    driver = pytest.importorskip("cuda.bindings.driver")
    calls = []

    def launch(config, function, params, extra):
        pointer = ctypes.cast(params, ctypes.POINTER(ctypes.c_void_p))[0]
        calls.append((config, int(function), ctypes.string_at(pointer, 16)))
        return (driver.CUresult.CUDA_SUCCESS if config.gridDimX < 2**31 - 1 else driver.CUresult.CUDA_ERROR_INVALID_VALUE,)

    monkeypatch.setattr(driver, "cuLaunchKernelEx", launch)
    return driver, calls


def test_a_dependent_launch_says_so_and_passes_the_struct_by_value(driver):
    driver, calls = driver
    dependent(0x1234, (3, 4, 1), (128, 1, 1), 99_000, bytearray(range(16)))(0x77)
    ((config, function, params),) = calls
    assert function == 0x1234 and params == bytes(range(16))
    assert (config.gridDimX, config.gridDimY, config.gridDimZ, config.blockDimX) == (3, 4, 1, 128)
    assert config.sharedMemBytes == 99_000 and int(config.hStream) == 0x77 and config.numAttrs == 1
    (attribute,) = config.attrs
    assert attribute.id == driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    assert attribute.value.programmaticStreamSerializationAllowed == 1


def test_a_refused_launch_says_what_was_asked(driver):
    with pytest.raises(DriverError, match=r"cuLaunchKernelEx: CUDA_ERROR_INVALID_VALUE for grid \(2147483647, 1, 1\)"):
        dependent(1, (2**31 - 1, 1, 1), (32, 1, 1), 0, bytearray(16))(1)


def test_which_devices_launch_early():
    hopper, blackwell = {"h100", "h200", "gh200"}, {"b200", "rtx5090", "rtx_pro_6000"}
    assert {d.name for d in NAMED.values() if d.dependent_launch} == hopper | blackwell


@pytest.mark.parametrize(
    "grid, block, length, says",
    [
        ((1, 65536, 1), (32, 1, 1), 16, r"grid of 1 to 2147483647 x 65535 x 65535, got \(1, 65536, 1\)"),
        ((1, 1, 65536), (32, 1, 1), 16, "grid"),
        ((2**31, 1, 1), (32, 1, 1), 16, "grid"),
        ((0, 1, 1), (32, 1, 1), 16, "grid"),
        ((1, 1, 1), (32, 1, 128), 16, "block of 1 to 1024 x 1024 x 64"),
        ((1, 1, 1), (1024, 2, 1), 16, "at most 1024 threads per block, got 2048"),
        ((1, 1, 1), (32, 1, 1), 15, "15 bytes of parameters, the kernel takes 16"),
        ((1, 1, 1), (32, 1, 1), 24, "24 bytes of parameters, the kernel takes 16"),
    ],
)
def test_a_launch_that_the_driver_would_misread_is_refused(grid, block, length, says):
    check_launch("k", (2**31 - 1, 65535, 65535), (16, 1, 64), bytes(23), 16)
    with pytest.raises(ValueError, match=says):
        check_launch("k", grid, block, bytes(length), 16)


def test_both_machines_check_before_they_launch(monkeypatch):
    gpu = Cuda.__new__(Cuda)
    gpu.device = NAMED["a100"]
    with pytest.raises(ValueError, match="8 bytes of parameters, the kernel takes 16"):
        gpu.launch(Kernel("k", 16, pytest.fail), (1, 1, 1), (32, 1, 1), 0, bytes(8))
    with pytest.raises(ValueError, match="grid"):
        Emulated(NAMED["a100"]).launch(Kernel("k", 16, pytest.fail), (1, 65536, 1), (32, 1, 1), 0, bytes(16))


def test_what_a_kernel_takes_is_asked_of_the_driver(monkeypatch):
    driver = pytest.importorskip("cuda.bindings.driver")
    fine, bad = driver.CUresult.CUDA_SUCCESS, driver.CUresult.CUDA_ERROR_INVALID_VALUE
    answers = {7: (fine, 0, 88), 8: (bad, 0, 0), 9: (fine, 48, 256)}
    monkeypatch.setattr(driver, "cuFuncGetParamInfo", lambda function, index: answers[int(function)])
    assert param_bytes(7) == 88
    assert param_bytes(9) == 256, "the driver copies the struct alone, wherever it lies on the device"
    with pytest.raises(DriverError, match="cuFuncGetParamInfo: CUDA_ERROR_INVALID_VALUE"):
        param_bytes(8)
