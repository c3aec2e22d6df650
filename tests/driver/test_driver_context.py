"""Contexts on a GPU, or on the emulated driver, where a missing wait fails every time: streams, threads, memory, formats.

What they compute is judged by the emulator's run of the same engine.
"""

import gc
import threading
import warnings

import numpy as np
import onnx
import pytest

import gpu_runtime as gr
from cuda_kernels.device import NAMED, current, why_no_gpu
from cuda_kernels.launch import CARVEOUT, Cuda
from gpu_runtime.runtime.plan_record import LaunchStep
from tests.reference_run import model, node

WHY = why_no_gpu()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(WHY), reason=WHY)]
SHAPE = (2, 16, 6, 6)


@pytest.fixture(scope="module")
def cupy():
    import cupy

    return cupy


def network(folder, name="net", channels=16, library=False, batch=SHAPE[0], seed=1):
    """conv - relu - conv, and with `library` a function of CuPy's in between; saved."""
    rng = np.random.default_rng(seed)
    w = {i: (rng.standard_normal((channels, channels, 3, 3)) / 12).astype(np.float32) for i in "ab"}
    between = [node("Hardmax", "t", "u", axis=1)] if library else [node("Relu", "t", "u")]
    nodes = [node("Conv", "x a", "t", pads=[1, 1, 1, 1]), *between, node("Conv", "u b", "y", pads=[1, 1, 1, 1])]
    onnx.save(model(nodes, {"x": (batch, channels, *SHAPE[2:])}, "y", w), folder / f"{name}.onnx")
    return folder / f"{name}.onnx"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def engine(folder):
    return build(network(folder))


@pytest.fixture(scope="module")
def x():
    return np.random.default_rng(2).standard_normal(SHAPE).astype(np.float32)


def build(path, **options):
    """For a GPU like the one at hand, planned with predicted times."""
    return gr.build(path, device=next(d.name for d in NAMED.values() if d.sm == current().sm), **options)


def expected(engine, feeds):
    with engine.context(device="emulator") as context:
        return context.run(feeds)["y"]


def test_all_kernels_ask_for_the_same_carveout_and_what_they_need_of_it(engine, x):
    """Two wishes would make the driver synchronise between launches."""
    with engine.context() as context:
        context.run({"x": x})
        kernels = [kernel.prepare.args[0] for kernel in context.gpu._kernels.values()]
        steps = [step for step in engine.plan.steps if isinstance(step, LaunchStep)]
        most = current().smem_per_block
    assert len(kernels) > 1 and {k.preferred_shared_memory_carveout for k in kernels} == {CARVEOUT}
    assert {k.max_dynamic_shared_size_bytes + k.shared_size_bytes for k in kernels} == {most}
    assert 0 < max(step.smem for step in steps) <= most


def close(got, want):
    """FP16 tensor cores may sum in another order; anything that was read too early is far off."""
    return np.abs(np.float32(got) - np.float32(want)).max() < 0.02


@pytest.fixture(scope="module")
def y(engine, x):
    return expected(engine, {"x": x})


@pytest.fixture(params=("null", "own", "blocking", "per_thread"))
def stream(request, cupy):
    """What the caller has made CuPy's current stream, by use()."""
    made = {
        "null": lambda: cupy.cuda.Stream.null,
        "own": lambda: cupy.cuda.Stream(non_blocking=True),
        "blocking": lambda: cupy.cuda.Stream(),
        "per_thread": lambda: cupy.cuda.Stream.ptds,
    }[request.param]()
    made.use()
    yield made
    cupy.cuda.Stream.null.use()


# ---- the first run


@pytest.mark.parametrize("graph", (True, False))
@pytest.mark.parametrize("library", (False, True))
def test_a_first_run_warns_of_nothing(folder, x, graph, library):
    """Memory holds NaN at first, and recording a graph runs the plan on it."""
    engine = build(network(folder, "library" if library else "net", library=library))
    with warnings.catch_warnings(), engine.context(graph=graph) as context:
        warnings.simplefilter("error")
        assert context.nonfinite() == []
        got = context.run({"x": x})["y"]
        assert context.nonfinite() == []
    assert close(got, expected(engine, {"x": x}))


def test_a_run_still_warns_of_what_is_there(engine, x):
    with engine.context() as context:
        context.run({"x": x})
        with pytest.warns(RuntimeWarning, match="input 'x' holds"):
            context.run({"x": np.full_like(x, np.nan)})
        assert context.nonfinite()


def test_a_session_warns_of_what_is_there_wherever_its_inputs_are(engine, cupy, x, y):
    """It gives NumPy arrays for all, so it has waited; each warning is of one run."""
    with gr.InferenceSession(engine) as session, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        wrong = x.copy()
        wrong[0, 0, 3, 3] = np.inf
        for given, count in ((x, 0), (cupy.asarray(x), 0), (wrong, 1), (cupy.asarray(wrong), 2), (cupy.asarray(x), 2)):
            (got,) = session.run(None, {"x": given})
            assert isinstance(got, np.ndarray) and len(told) == count
            assert close(got[1], y[1]) and np.isfinite(got[0]).all() == (given[0, 0, 3, 3] < np.inf)
    assert [w.category for w in told] == [RuntimeWarning] * 2 and told[1].filename == __file__
    assert str(told[0].message).startswith("input 'x' holds infinity at")
    assert str(told[1].message).startswith("outputs hold infinite values or NaN, first written by ")


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("place", ["cpu", "cuda"])
def test_a_session_binds_memory_on_the_gpu(engine, cupy, x, y, stream, place, in_place):
    """By address, as onnxruntime's users bind CuPy's; the run follows the current stream, and has ended when it returns."""
    with gr.InferenceSession(engine) as session:
        bound, half = session.io_binding(), cupy.asarray(x) / 2
        given = half + half
        into = cupy.zeros(SHAPE, np.float32) if place == "cuda" else np.zeros(SHAPE, np.float32)
        address = into.data.ptr if place == "cuda" else into.ctypes.data
        bound.bind_input("x", "cuda", 0, np.float32, given.shape, given.data.ptr)
        bound.bind_output("y", place, 0, *((np.float32, SHAPE, address) if in_place else ()))
        session.run_with_iobinding(bound)
        (value,) = bound.get_outputs()
        assert value.device_name() == place and (value.data_ptr() == address) == in_place
        assert close(bound.copy_outputs_to_cpu()[0], y) and value.shape() == list(SHAPE)
        if in_place:
            assert close(cupy.asnumpy(into), y)
        bound.bind_cpu_input("x", x)
        bound.bind_output("y", "cuda")
        session.run_with_iobinding(bound)
        assert bound.get_outputs()[0].device_name() == "cuda" and close(bound.get_outputs()[0].numpy(), y)


def test_a_session_of_any_size_runs_arrays_on_the_gpu(folder, cupy):
    path = network(folder, name="any")
    proto = onnx.load(path)
    for v in (proto.graph.input[0], proto.graph.output[0]):
        v.type.tensor_type.shape.dim[2].dim_param = "H"
    del proto.graph.value_info[:]
    device = next(d.name for d in NAMED.values() if d.sm == current().sm)
    with gr.InferenceSession(proto, device=device) as session:
        assert session.get_providers() == ["CUDAExecutionProvider"]
        for height in (6, 9):
            x = np.random.default_rng(height).standard_normal((2, 16, height, 6)).astype(np.float32)
            (got,) = session.run(None, {"x": cupy.asarray(x)})
            assert close(got, expected(session.engine, {"x": x})) and not session.context.emulated
        first, second = session.engines
        assert (first.weights is second.weights) == (first.record.sections == second.record.sections)


# ---- the caller's stream


def test_the_callers_stream_stays_current(engine, cupy, x, stream):
    before = cupy.cuda.get_current_stream()
    with engine.context() as context:
        context.run({"x": x})
        context.run({"x": cupy.asarray(x)})
        assert cupy.cuda.get_current_stream() is before
        with pytest.raises(ValueError, match="expected shape"):
            context.run({"x": cupy.zeros(3, np.float32)})
    assert cupy.cuda.get_current_stream() is before


def test_outputs_are_ready_on_the_callers_stream(engine, cupy, x, y, stream):
    with engine.context() as context:
        got = context.run({"x": cupy.asarray(x)})["y"]
        assert close(got.get(), y)  # get() waits for the caller's stream alone
        assert close((context.run({"x": cupy.asarray(x)})["y"] * 2).get(), 2 * y)


def test_inputs_may_be_overwritten_after_run(engine, cupy, x, y, stream):
    """And memory of temporaries given to others: the stream orders it."""
    wide = cupy.zeros((2 * SHAPE[0], *SHAPE[1:]), np.float32)
    wide[::2] = cupy.asarray(x)
    with engine.context() as context:
        given = cupy.asarray(x)
        got = context.run({"x": given})["y"]
        given.fill(9)
        strided = context.run({"x": wide[::2]})["y"]
        junk = [cupy.full(SHAPE, 7, np.float32) for _ in range(3)]
        assert close(got.get(), y) and close(strided.get(), y) and len(junk) == 3


def test_inputs_that_are_still_being_computed(engine, cupy, x, y, stream):
    half = cupy.asarray(x) / 2
    with engine.context() as context:
        assert close(context.run({"x": half + half})["y"].get(), y)


def test_runs_of_arrays_on_the_gpu_do_not_wait(engine, cupy, x, y, monkeypatch):
    """The host queues and goes on: nothing synchronizes, whatever the format of memory."""
    with engine.context() as context:
        given = cupy.asarray(x)
        context.run({"x": given})
        context.gpu.synchronize()

        def waits(*_):
            raise AssertionError("the host waited")

        for name in ("streamSynchronize", "eventSynchronize", "deviceSynchronize", "memcpy"):
            monkeypatch.setattr(cupy.cuda.runtime, name, waits)
        got = context.run({"x": given})["y"]
        monkeypatch.undo()
        assert close(got.get(), y)


# ---- the host's arrays


def test_the_hosts_arrays_may_change_at_once(folder, cupy):
    """More than one block of pinned memory, filled again and again while copies from it wait."""
    gpu = Cuda(current())
    data = np.random.default_rng(0).integers(0, 256, (3, 5 << 20), np.uint8)
    places = [gpu.allocate(row.nbytes) for row in data]
    given = data.copy()
    for place, row in zip(places, given, strict=True):
        gpu.write(place, row)
        row[:] = 0
    gpu.write(places[0] + 8, np.float32([[1, 2], [3, 4]]).T)
    data[0, 8:24] = np.float32([1, 3, 2, 4]).view(np.uint8)
    for place, row in zip(places, data, strict=True):
        assert (gpu.read(place, row.nbytes) == row).all()
    gpu.close()


def test_copies_wait_for_no_other_stream(engine, cupy, x):
    """Nothing of another stream's is waited for: its work is still queued after a run on the host's arrays."""
    other = cupy.cuda.Stream(non_blocking=True)
    with engine.context() as context:
        context.run({"x": x})
        with other:
            a = cupy.zeros(1 << 16, np.float32)
            for _ in range(50):
                a += 1
            context.run({"x": x})
            assert float(a[0]) == 50


# ---- the places of arrays


def test_arrays_of_both_kinds_in_one_run(folder, cupy):
    nodes = [node("Add", "x z", "y")]
    onnx.save(model(nodes, {"x": SHAPE, "z": SHAPE}, "y", {}), folder / "add.onnx")
    engine = build(folder / "add.onnx")
    a, b = np.full(SHAPE, 2, np.float32), np.full(SHAPE, 3, np.float32)
    with engine.context() as context:
        got = context.run({"x": cupy.asarray(a), "z": b})["y"]
        assert isinstance(got, np.ndarray) and (got == 5).all()
        assert (context.run({"x": cupy.asarray(a), "z": cupy.asarray(b)})["y"].get() == 5).all()


FORMATS = ("fp16:hwc8", "fp32:chw32", "fp16:chw2", "uint8:hwc", "fp16:chw16")


@pytest.mark.parametrize("fmt", FORMATS)
def test_any_format_stays_on_the_device(folder, cupy, fmt, stream):
    """No array crosses to the host; the padding of 20 channels is zero again in each run."""
    path = network(folder, "twenty", channels=20)
    kind = fmt.partition(":")[0]
    engine = build(path, input_formats=fmt, output_formats="fp16:hwc8" if kind == "uint8" else fmt)
    dtype = {"fp16": np.float16, "fp32": np.float32, "uint8": np.uint8}[kind]
    given = np.random.default_rng(3).integers(0, 4, (SHAPE[0], 20, *SHAPE[2:])).astype(dtype)
    want = expected(engine, {"x": given})
    with engine.context() as context:
        first, host = context.run({"x": cupy.asarray(given)})["y"], context.run({"x": given})["y"]
        assert first.dtype == host.dtype == want.dtype and first.shape == host.shape == want.shape
        second = context.run({"x": cupy.asarray(given[::-1].copy())})["y"]
        assert close(first.get(), want) and close(host, want) and close(second.get(), want[::-1])
        assert context.nonfinite() == []


class Interface:
    """Another library's array: nothing but its interface."""

    def __init__(self, array, stream, **changes):
        self.array = array
        self.__cuda_array_interface__ = array.__cuda_array_interface__ | {"version": 3, "stream": stream} | changes


def test_the_interface_of_other_libraries_names_its_stream(engine, cupy, x, y):
    theirs = cupy.cuda.Stream(non_blocking=True)
    with theirs:
        half = cupy.asarray(x) / 2
    theirs.synchronize()
    with engine.context() as context:
        with theirs:
            given = half + half
        got = context.run({"x": Interface(given, theirs.ptr)})["y"]
        with theirs:
            given.fill(5)
        assert close(got.get(), y)
        for stream in (None, 1, 2):
            assert close(context.run({"x": Interface(cupy.asarray(x), stream)})["y"].get(), y)
        with pytest.raises(ValueError, match="stream 0"):
            context.run({"x": Interface(given, 0)})
        with pytest.raises(ValueError, match="mask"):
            context.run({"x": Interface(given, None, mask=given)})


class Exporter:
    """Another library's tensor: DLPack, whose producer waits for its own work on the stream that it is given."""

    def __init__(self, array):
        self.array, self.shape, self.streams = array, array.shape, []

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self, **options):
        self.streams.append(options.get("stream"))
        return self.array.__dlpack__(**options)


def test_dlpack(engine, cupy, x, y):
    given = Exporter(cupy.asarray(x))
    cupy.cuda.get_current_stream().synchronize()
    with engine.context() as context:
        got = context.run({"x": given})["y"]
        assert isinstance(got, cupy.ndarray) and close(got.get(), y)
        assert len(given.streams) == 1


# ---- threads, contexts, memory


def test_contexts_and_threads_at_once(engine, cupy, x, y):
    """Two contexts, each used by two threads, with arrays of the host and of the GPU and streams of their own."""
    wrong, contexts = [], [engine.context() for _ in range(2)]

    def work(k):
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            for turn in range(4):
                factor = 1 + (k + turn) % 3
                given = x / factor if k % 2 else cupy.asarray(x) / factor
                got = contexts[k // 2].run({"x": np.float32(given) if k % 2 else given})["y"]
                if not close(got if k % 2 else got.get(), y / factor):
                    wrong.append((k, turn))

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for context in contexts:
        context.close()
    assert not wrong


def test_a_dropped_context_frees_nothing_that_is_still_used(engine, cupy, x, y):
    given = cupy.asarray(x)
    context = engine.context()
    got = context.run({"x": given})["y"]
    with pytest.warns(ResourceWarning, match="close"):
        del context
        gc.collect()
    junk = [cupy.full(1 << 20, 0x3C, np.uint8) for _ in range(4)]
    assert close(got.get(), y) and len(junk) == 4


def test_a_closed_context_gives_its_memory_back(engine, cupy, x):
    pool = cupy.get_default_memory_pool()
    gc.collect()
    pool.free_all_blocks()
    before = pool.total_bytes()
    context = engine.context()
    context.run({"x": x})
    assert pool.total_bytes() > before
    context.close()
    context.close()
    assert pool.total_bytes() == before
    with pytest.raises(ValueError, match="closed"):
        context.replay()
