"""SparseConv2d on a GPU or the emulated driver: the caller's arrays and streams, graphs, threads, memory."""

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from cuda_kernels.device import why_no_gpu
from gpu_runtime.ops import SparseConv2d
from tests.driver.test_driver_context import Exporter, cupy, stream
from tests.gpu_runtime.ops.test_conv import LIMIT, drawn, image, reference, weights

__all__ = ["cupy", "stream"]  # fixtures
WHY = why_no_gpu()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(WHY), reason=WHY)]


def on_device(cupy, a: np.ndarray):
    return cupy.asarray(np.ascontiguousarray(a.transpose(0, 2, 3, 1))).transpose(0, 3, 1, 2)


def close(y, expected) -> bool:
    return bool(np.abs(y.get() - expected).max() <= LIMIT * max(np.ptp(expected), np.abs(expected).max() / 3))


@pytest.fixture(scope="module")
def conv():
    return SparseConv2d.from_dense(weights(64, 64), padding=1, activation="relu", prune="magnitude")


@pytest.mark.parametrize("seed", range(6))
def test_drawn_convolutions(cupy, seed):
    conv, given = drawn(seed)
    conv._device = None  # the GPU at hand, not the drawn one
    y = conv(*(on_device(cupy, a) for a in given))
    assert close(y, reference(conv, *given))


def test_it_runs_in_the_order_of_the_callers_stream(conv, cupy, stream):
    """The input is computed there just before, and overwritten just behind; another stream has scratch of its own."""
    a = image(2, 64, 9, 9)
    x, expected = on_device(cupy, a * 0), reference(conv, a)
    for s in (stream, cupy.cuda.Stream(non_blocking=True)):
        with s:
            conv.prepare(a.shape)
            x[...] = on_device(cupy, a)
            y = conv(x)
            x[...] = 0
            kept = y + 0
        s.synchronize()
        assert close(kept, expected)


def test_a_named_stream_and_dlpack(conv, cupy, stream):
    a = image(1, 64, 8, 8)
    x = on_device(cupy, a)
    cupy.cuda.get_current_stream().synchronize()
    y = conv(Exporter(x), stream=stream)
    stream.synchronize()
    assert close(y, reference(conv, a))


def test_inside_a_graph(conv, cupy):
    stream = cupy.cuda.Stream(non_blocking=True)
    a, b = image(1, 64, 7, 9), image(1, 64, 7, 9)
    x, out = on_device(cupy, a), on_device(cupy, a)
    with stream:
        stream.begin_capture()
        with pytest.raises(RuntimeError, match=r"x of 1x64x7x9 is new on this stream, which is captured: call prepare"):
            conv(x, out=out)
        stream.end_capture()
        conv.prepare(a.shape)
        stream.begin_capture()
        conv(x, out=out)
        graph = stream.end_capture()
        for given in (a, b):
            x[...] = on_device(cupy, given)
            graph.launch(stream)
            stream.synchronize()
            assert close(out, reference(conv, given))


def test_threads(conv, cupy):
    images = [image(1, 64, 8, 8) for _ in range(8)]

    def one(a):
        with cupy.cuda.Stream(non_blocking=True) as s:
            y = conv(on_device(cupy, a))
            s.synchronize()
        return y

    with ThreadPoolExecutor(4) as pool:
        assert all(close(y, reference(conv, a)) for y, a in zip(pool.map(one, images), images, strict=True))


def test_memory_stays_and_nothing_is_allocated(conv, cupy):
    x = on_device(cupy, image(1, 64, 8, 8))
    out = conv(x)
    pool = cupy.get_default_memory_pool()
    before = pool.used_bytes(), pool.total_bytes()
    for _ in range(200):
        conv(x, out=out)
    cupy.cuda.get_current_stream().synchronize()
    assert (pool.used_bytes(), pool.total_bytes()) == before


def test_a_named_device_is_emulated_beside_a_gpu():
    conv = SparseConv2d.from_dense(weights(16, 16), prune="magnitude", device="l4")
    a = image(1, 16, 6, 6)
    y = conv(a)
    assert isinstance(y, np.ndarray) and np.abs(y - reference(conv, a)).max() <= LIMIT * np.ptp(reference(conv, a))


def test_an_output_that_is_still_read(conv, cupy):
    x = on_device(cupy, image(1, 64, 8, 8))
    with pytest.raises(ValueError, match="out: it shares memory with x"):
        conv(x, out=x)
    with pytest.raises(ValueError, match="x: expected an array on the GPU, got"):
        conv(image(1, 64, 8, 8))


def test_the_host_takes_microseconds(conv, cupy, monkeypatch):
    """Of a call, binding and arguments: the kernel's start is stubbed."""
    x = on_device(cupy, image(1, 64, 8, 8))
    out, plan = conv(x), conv._plan(x.shape, False)
    handle, addresses = cupy.cuda.get_current_stream().ptr, [x.data.ptr, conv(x).data.ptr]
    prepared = plan.direct._on[handle]
    plan.direct._on[handle] = [p._replace(start=lambda stream: None) for p in prepared]
    try:
        times = []
        for _ in range(10_000):
            begun = time.perf_counter()
            plan.direct.run(addresses, handle)
            times.append(time.perf_counter() - begun)
    finally:
        plan.direct._on[handle] = prepared
    assert out.shape and np.median(times) < 6e-6, np.median(times)
