"""Outputs that the caller has allocated, and streams that the caller names, on a GPU or the emulated driver; see
test_driver_context.py."""

import gc
import sys
import types
import weakref

import numpy as np
import onnx
import pytest

import gpu_runtime as gr
from cuda_kernels.device import NAMED, current, why_no_gpu
from tests.driver.test_driver_context import (
    FORMATS,
    SHAPE,
    Exporter,
    Interface,
    build,
    close,
    cupy,
    engine,
    expected,
    folder,
    network,
    stream,
    x,
)
from tests.reference_run import model, node

__all__ = ["cupy", "engine", "folder", "stream", "x"]  # fixtures
WHY = why_no_gpu()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(WHY), reason=WHY)]


@pytest.fixture(scope="module")
def two(folder):
    """y = 2 x, z = -x."""
    onnx.save(model([node("Add", "x x", "y"), node("Neg", "x", "z")], {"x": SHAPE}, "y z", {}), folder / "two.onnx")
    return gr.build(folder / "two.onnx", device=next(d.name for d in NAMED.values() if d.sm == current().sm))


@pytest.fixture(scope="module")
def y(engine, x):
    return expected(engine, {"x": x})


def test_an_output_is_filled_in_place_on_the_callers_stream(engine, cupy, x, y, stream):
    """And after what reads it there: `still` is taken before it changes."""
    given, out = cupy.asarray(x), cupy.full(SHAPE, 3, np.float32)
    with engine.context() as context:
        still = out + 0
        got = context.run({"x": given}, out={"y": out})
        assert got["y"] is out and close(out.get(), y) and (still.get() == 3).all()
        before = out + 0
        context.run({"x": given * 0}, out={"y": out})
        assert close(before.get(), y), "the next run waits for what reads the last one's output"


def strided(cupy, a):
    wide = cupy.zeros((*a.shape[:-1], 2 * a.shape[-1]), a.dtype)
    wide[..., ::2] = a
    return wide[..., ::2]


KINDS = {
    "column-major": lambda cupy, a: a.transpose(3, 2, 1, 0).copy().transpose(3, 2, 1, 0),
    "strided": strided,
    "backwards": lambda cupy, a: a[::-1, :, ::-1].copy()[::-1, :, ::-1],
    "transposed": lambda cupy, a: a.transpose(3, 1, 0, 2).copy().transpose(2, 1, 3, 0),
    "strided, DLPack": lambda cupy, a: Exporter(strided(cupy, a)),
    "strided, interface": lambda cupy, a: Interface(strided(cupy, a), 1),
    "column-major, interface": lambda cupy, a: Interface(a.transpose(3, 2, 1, 0).copy().transpose(3, 2, 1, 0), 1),
    "broadcast": lambda cupy, a: cupy.broadcast_to(a[:1], a.shape),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fmt", ("fp32:chw", "fp16:hwc8", "uint8:hwc"))
def test_inputs_of_every_stride(folder, cupy, kind, fmt):
    """Read where they lie, by a copy or by a kernel that changes the format."""
    dtype = {"fp16": np.float16, "fp32": np.float32, "uint8": np.uint8}[fmt.partition(":")[0]]
    engine = build(network(folder), input_formats=fmt)
    a = np.random.default_rng(4).integers(0, 4, SHAPE).astype(dtype)
    with engine.context() as context:
        given = KINDS[kind](cupy, cupy.asarray(a))
        want = expected(engine, {"x": a if kind != "broadcast" else np.broadcast_to(a[:1], SHAPE)})
        assert close(context.run({"x": given})["y"].get(), want)


def test_where_an_output_lies_is_the_callers_choice(engine, cupy, x, y):
    with engine.context() as context:
        host, device = np.zeros(SHAPE, np.float32), cupy.zeros(SHAPE, np.float32)
        assert context.run({"x": cupy.asarray(x)}, out={"y": host})["y"] is host and close(host, y)
        assert context.run({"x": x}, out={"y": device})["y"] is device and close(device.get(), y)


def test_some_outputs_are_given(two, cupy, x):
    with two.context() as context:
        z = cupy.zeros(SHAPE, np.float32)
        got = context.run({"x": cupy.asarray(x)}, out={"z": z})
        assert list(got) == ["y", "z"] and got["z"] is z
        assert close(got["y"].get(), 2 * x) and close(z.get(), -x)
        got = context.run({"x": x}, out={"z": z})
        assert isinstance(got["y"], np.ndarray) and close(got["y"], 2 * x) and close(z.get(), -x)


def test_an_output_may_be_the_input(two, cupy, x):
    given = cupy.asarray(x)
    with two.context() as context:
        context.run({"x": given}, out={"y": given})
        context.run({"x": given}, out={"y": given})
        assert close(given.get(), 4 * x)


def test_queueing_with_outputs_does_not_wait(engine, cupy, x, y, monkeypatch):
    with engine.context() as context:
        given, out = cupy.asarray(x), cupy.empty(SHAPE, np.float32)
        context.run({"x": given}, out={"y": out})
        context.gpu.synchronize()

        def waits(*_):
            raise AssertionError("the host waited")

        for name in ("streamSynchronize", "eventSynchronize", "deviceSynchronize", "memcpy", "malloc"):
            monkeypatch.setattr(cupy.cuda.runtime, name, waits)
        context.run({"x": given}, out={"y": out})
        monkeypatch.undo()
        assert close(out.get(), y)


@pytest.mark.parametrize("fmt", FORMATS)
def test_any_format_is_written_straight_to_the_output(folder, cupy, fmt):
    path = network(folder, "twenty", channels=20)
    kind = fmt.partition(":")[0]
    engine = build(path, input_formats=fmt, output_formats="fp16:hwc8" if kind == "uint8" else fmt)
    dtype = {"fp16": np.float16, "fp32": np.float32, "uint8": np.uint8}[kind]
    given = np.random.default_rng(3).integers(0, 4, (SHAPE[0], 20, *SHAPE[2:])).astype(dtype)
    want = expected(engine, {"x": given})
    with engine.context() as context:
        host, device = np.empty_like(want), cupy.empty(want.shape, want.dtype)
        context.run({"x": given}, out={"y": host})
        context.run({"x": cupy.asarray(given)}, out={"y": device})
        assert close(host, want) and close(device.get(), want)


def test_outputs_of_other_libraries(engine, cupy, x, y):
    """By interface, ordered on the stream that it names, and by DLPack; the object itself is handed back."""
    theirs, given = cupy.cuda.Stream(non_blocking=True), cupy.asarray(x)
    with engine.context() as context:
        memory = cupy.empty(SHAPE, np.float32)
        with theirs:
            memory.fill(5)
            still = memory + 0
        out = Interface(memory, theirs.ptr)
        assert context.run({"x": given}, out={"y": out})["y"] is out
        with theirs:
            after = memory + 0
        theirs.synchronize()
        assert close(after.get(), y) and (still.get() == 5).all()
        memory.fill(0)
        exported = Exporter(memory)
        exported.flags = memory.flags
        context.run({"x": given}, out={"y": exported})
        assert close(memory.get(), y)


def test_outputs_go_to_other_libraries_without_a_copy(engine, cupy, x, y):
    """By DLPack and by the interface, each with the stream on which they are ready.

    The consumer names its stream, as PyTorch does, and the export makes it wait for CuPy's current stream, the run's. Under
    `with other` CuPy's current stream would be `other` itself, and `from_dlpack` would make it wait for nothing.
    """
    other = cupy.cuda.Stream(non_blocking=True)
    with engine.context() as context:
        got = context.run({"x": cupy.asarray(x)})["y"]
        capsule = got.__dlpack__(stream=other.ptr)
        exported = types.SimpleNamespace(__dlpack__=lambda **_: capsule, __dlpack_device__=got.__dlpack_device__)
        with other:
            theirs = cupy.from_dlpack(exported)
            result = theirs + 0
        assert theirs.data.ptr == got.data.ptr
        other.synchronize()
        assert close(result.get(), y)
        told = got.__cuda_array_interface__
        assert told["data"][0] == got.data.ptr and told["stream"] in (1, 2)


OUT_REFUSED = {
    "shape": (lambda cupy: cupy.empty((2, 3), np.float32), "out 'y': expected shape 2x16x6x6, got 2x3"),
    "dtype": (lambda cupy: cupy.empty(SHAPE, np.float16), "out 'y': expected dtype float32, got float16; allocate it"),
    "strides": (lambda cupy: cupy.empty((*SHAPE[:3], 12), np.float32)[..., ::2], "expected a C-contiguous.*cupy.empty"),
    "column-major": (lambda cupy: cupy.empty(SHAPE, np.float32, "F"), "out 'y': expected a C-contiguous"),
    "read-only": (lambda cupy: read_only(cupy), "out 'y': expected a writable array"),
}


def read_only(cupy):
    memory = cupy.empty(SHAPE, np.float32)
    return Interface(memory, None, data=(memory.data.ptr, True))


@pytest.mark.parametrize("case", OUT_REFUSED)
def test_a_wrong_output_is_refused(engine, cupy, x, case):
    made, text = OUT_REFUSED[case]
    with engine.context() as context:
        for given in (x, cupy.asarray(x)):
            with pytest.raises(ValueError, match=text):
                context.run({"x": given}, out={"y": made(cupy)})


def test_outputs_that_overlap_are_refused(two, cupy, x):
    memory = cupy.empty((3, *SHAPE[1:]), np.float32)
    with two.context() as context, pytest.raises(ValueError, match="the arrays of 'y' and 'z' overlap"):
        context.run({"x": x}, out={"y": memory[:2], "z": memory[1:]})


# ---- streams that are named


class Stream:
    """Another library's stream."""

    def __init__(self, handle):
        self.handle = handle

    def __cuda_stream__(self):
        return 0, self.handle


@pytest.mark.parametrize("named", [lambda s: s, lambda s: s.ptr, lambda s: Stream(s.ptr)], ids=["CuPy's", "handle", "protocol"])
def test_a_stream_may_be_named(engine, cupy, x, y, named):
    """CuPy's current stream has no part in it: what is queued there is still queued."""
    theirs = cupy.cuda.Stream(non_blocking=True)
    with engine.context() as context:
        with theirs:
            given = cupy.asarray(x) / 2
            given += given
            out = cupy.zeros(SHAPE, np.float32)
        got = context.run({"x": given}, out={"y": out}, stream=named(theirs))
        new = context.run({"x": given}, stream=named(theirs))["y"]
        with theirs:
            given.fill(7)
            result = out + 0
        theirs.synchronize()
        assert got["y"] is out and close(result.get(), y) and close(new.get(), y)
        with pytest.raises(TypeError, match="stream: expected a stream of CuPy or PyTorch, .*got str"):
            context.run({"x": given}, stream="0")


class Tensor(Exporter):
    """As PyTorch's: DLPack, ordered by PyTorch's own current stream."""

    device = 0


def test_tensors_of_pytorch_are_ordered_on_its_current_stream(engine, cupy, x, y, monkeypatch):
    theirs = cupy.cuda.Stream(non_blocking=True)
    torch = types.ModuleType("torch")
    torch.Tensor = Tensor
    torch.cuda = types.SimpleNamespace(
        current_stream=lambda device: types.SimpleNamespace(cuda_stream=theirs.ptr), Stream=types.SimpleNamespace
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    with engine.context() as context:
        with theirs:
            given, memory = cupy.asarray(x), cupy.zeros(SHAPE, np.float32)
            tensors = Tensor(given), Tensor(memory)
        theirs.synchronize()
        context.run({"x": tensors[0]}, out={"y": tensors[1]})
        with theirs:
            given.fill(7)
            result = memory + 0
        theirs.synchronize()
        assert close(result.get(), y)


def test_arrays_of_others_live_until_they_are_read(engine, cupy, x, y):
    """Their libraries may give memory away at once: it is kept while the run is queued, and no longer."""
    with engine.context() as context:
        cupy.cuda.get_current_stream().synchronize()
        given = Interface(cupy.asarray(x), None)
        cupy.cuda.get_current_stream().synchronize()
        alive = weakref.ref(given)
        got = context.run({"x": given})["y"]
        del given
        gc.collect()
        assert alive() is not None
        assert close(got.get(), y)
        context.run({"x": cupy.asarray(x)})
        gc.collect()
        assert alive() is None
