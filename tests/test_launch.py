"""What is handed to the driver, without one: parameter structs, and launches that may begin early."""

import ctypes
import struct

import pytest

from cuda_kernels.device import NAMED
from cuda_kernels.launch import launch_dependent, pack_params


def test_parameters_lie_as_in_a_c_struct():
    packed = pack_params([("ptr", 1 << 40), ("i32", -2), ("ptr", 3), ("f32", 1.5), ("i32", 7), ("i32", 8)])
    assert packed == struct.pack("<Qi4xQfii4x", 1 << 40, -2, 3, 1.5, 7, 8)


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
    launch_dependent(0x1234, (3, 4, 1), (128, 1, 1), 99_000, bytes(range(16)), 0x77)
    ((config, function, params),) = calls
    assert function == 0x1234 and params == bytes(range(16))
    assert (config.gridDimX, config.gridDimY, config.gridDimZ, config.blockDimX) == (3, 4, 1, 128)
    assert config.sharedMemBytes == 99_000 and int(config.hStream) == 0x77 and config.numAttrs == 1
    (attribute,) = config.attrs
    assert attribute.id == driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    assert attribute.value.programmaticStreamSerializationAllowed == 1


def test_a_refused_launch_says_what_was_asked(driver):
    with pytest.raises(RuntimeError, match=r"cuLaunchKernelEx: CUDA_ERROR_INVALID_VALUE for grid \(2147483647, 1, 1\)"):
        launch_dependent(1, (2**31 - 1, 1, 1), (32, 1, 1), 0, bytes(16), 1)


def test_which_devices_launch_early():
    assert {d.name for d in NAMED.values() if d.dependent_launch} == {"h100", "h200", "b200", "rtx5090"}
