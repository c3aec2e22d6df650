"""IOBinding on the host beside onnxruntime's; tests/driver/test_driver_context.py binds memory on the GPU."""

import inspect

import numpy as np
import onnx
import onnxruntime
import pytest
from onnxruntime.capi import onnxruntime_inference_collection as theirs

import gpu_runtime as gr
from gpu_runtime.sessions import io_binding
from tactics.format import DTYPES
from tests.reference_run import model, node

CPU = ["CPUExecutionProvider"]


def proto():
    return model([node("Add", "a b", "sum"), node("Mul", "a b", "product")], {"a": (2, 3), "b": (3,)}, "sum product")


@pytest.fixture(scope="module")
def sessions():
    ours = gr.InferenceSession(proto(), device="a100", providers=CPU)
    yield ours, onnxruntime.InferenceSession(proto().SerializeToString(), providers=CPU)
    ours.close()


A, B = np.arange(6, dtype=np.float32).reshape(2, 3), np.array([1, 2, 4], np.float32)


def ran(session, type_of, in_place):
    """Runs with an input by its array and one by its address, and the outputs in another order, the first in place."""
    bound, filled = session.io_binding(), np.zeros((2, 3), np.float32)
    bound.bind_cpu_input("a", A)
    bound.bind_input("b", "cpu", 0, type_of, B.shape, B.ctypes.data)
    address = (type_of, filled.shape, filled.ctypes.data) if in_place else ()
    bound.bind_output("product", "cpu", 0, *address)
    bound.bind_output("sum")
    bound.synchronize_inputs()
    session.run_with_iobinding(bound)
    bound.synchronize_outputs()
    return bound, filled


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("type_of", [np.float32, 1], ids=["NumPy's type", "ONNX's number"])
def test_it_reads_and_writes_where_onnxruntimes_does(sessions, type_of, in_place):
    (ours, filled), (real, others) = (ran(s, type_of, in_place) for s in sessions)
    for mine, right in ((ours.copy_outputs_to_cpu(), real.copy_outputs_to_cpu()), ([filled], [others])):
        assert [a.tolist() for a in mine] == [a.tolist() for a in right]
    assert filled.any() == in_place
    for mine, right in zip(ours.get_outputs(), real.get_outputs(), strict=True):
        for name in ("shape", "element_type", "device_name"):
            assert getattr(mine, name)() == getattr(right, name)()
        assert mine.numpy().tolist() == right.numpy().tolist()
    if in_place:
        assert ours.get_outputs()[0].data_ptr() == filled.ctypes.data


def test_ortvalues_of_both_kinds_are_bound(sessions):
    ours, _ = sessions
    into = onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros((2, 3), np.float32))
    bound = ours.io_binding()
    bound.bind_ortvalue_input("a", onnxruntime.OrtValue.ortvalue_from_numpy(A))
    bound.bind_ortvalue_input("b", io_binding.OrtValue(B))
    bound.bind_ortvalue_output("sum", into)
    ours.run_with_iobinding(bound)
    assert into.numpy().tolist() == (A + B).tolist()
    bound.clear_binding_outputs()
    assert bound.get_outputs() == []
    bound.clear_binding_inputs()
    with pytest.raises(ValueError, match="expected the names"):
        ours.run_with_iobinding(bound)


def test_signatures_are_onnxruntimes():
    for mine, real in ((io_binding.IOBinding, theirs.IOBinding), (io_binding.OrtValue, theirs.OrtValue)):
        for name, method in vars(mine).items():
            if name[0] != "_" and hasattr(real, name):
                assert str(inspect.signature(method)).count(",") == str(inspect.signature(getattr(real, name))).count(",")
                assert list(inspect.signature(method).parameters) == list(inspect.signature(getattr(real, name)).parameters)


def test_every_type_of_an_engine_has_a_number():
    assert {*io_binding.ELEMENT_TYPES.values()} == {dtype.name for dtype in DTYPES.values()}
    for name, dtype in DTYPES.items():
        number = io_binding.OrtValue(np.zeros(2, dtype)).element_type()
        assert onnx.helper.tensor_dtype_to_np_dtype(number) == dtype, name


def test_wrong_bindings_are_refused(sessions):
    ours, real = sessions
    bound = ours.io_binding()
    with pytest.raises(ValueError, match=r"input: expected names out of \['a', 'b'\], got \['c'\]"):
        bound.bind_cpu_input("c", A)
    with pytest.raises(ValueError, match="output: expected names out of"):
        bound.bind_output("a")
    with pytest.raises(ValueError, match="device_type: expected cpu, which this InferenceSession reads, got 'cuda'"):
        bound.bind_output("sum", "cuda")
    with pytest.raises(ValueError, match=r"element_type: expected NumPy's or one of \[1, 2, .*\], got 16"):
        bound.bind_input("a", "cpu", 0, 16, A.shape, A.ctypes.data)
    with pytest.raises(ValueError, match="buffer_ptr: expected element_type and shape with it"):
        bound.bind_output("sum", "cpu", 0, None, None, A.ctypes.data)
    with pytest.raises(TypeError, match=r"iobinding: expected an IOBinding of session.io_binding\(\), got"):
        ours.run_with_iobinding(real.io_binding())
    bound.bind_input("a", "cpu", 0, np.float32, (3, 2), A.ctypes.data)
    bound.bind_cpu_input("b", B)
    with pytest.raises(ValueError, match="input 'a': expected shape 2x3, got 3x2"):
        ours.run_with_iobinding(bound)
