"""SparseConv2d on a GPU or the emulated driver: the caller's arrays and streams, graphs, threads, memory."""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest

from cuda_kernels import sparse24
from cuda_kernels.device import why_no_gpu
from cuda_kernels.files import cache_dir
from gpu_runtime.building.options import BuildOptions
from gpu_runtime.ops import SparseConv2d, SparseLinear, sparse_conv2d
from tests.driver.test_driver_context import Exporter, cupy, stream
from tests.emulated_driver.settings import environment
from tests.gpu_runtime.ops.test_conv import LIMIT, drawn, image, reference, weights
from tests.on_driver import ON_DRIVER, ROOT, passes, timed

__all__ = ["cupy", "stream"]  # fixtures
WHY = why_no_gpu()
only_emulated = pytest.mark.skipif(not ON_DRIVER, reason="needs the emulated driver")
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


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("residual", [False, True])
def test_fewer_images_run_by_a_prepared_plan(cupy, groups, residual):
    """Its kernel, its scratch memory, nothing compiled or allocated, and in a capture too."""
    conv = SparseConv2d.from_dense(weights(64, 512 // groups), padding=1, prune="magnitude", groups=groups, activation="silu")
    shape, stream = (5, 512, 6, 6), cupy.cuda.Stream(non_blocking=True)
    conv.prepare(shape, residual, stream)
    tactic, held = conv.tactic(shape, residual), dict(conv._gpu._held)
    for n in (3, 1, 4):
        given = [image(n, 512, 6, 6)] + [image(n, 64, 6, 6)] * residual
        x, *r = (on_device(cupy, a) for a in given)
        out = on_device(cupy, image(n, 64, 6, 6))
        cupy.cuda.get_current_stream().synchronize()
        with stream:
            stream.begin_capture()
            assert conv(x, *r, out=out) is out
            stream.end_capture().launch(stream)
            stream.synchronize()
        assert close(out, reference(conv, *given))
        assert conv.tactic((n, *shape[1:]), residual) == tactic and conv._gpu._held == held
    more = [on_device(cupy, image(6, c, 6, 6)) for c in (512, 64)]
    with stream, pytest.raises(RuntimeError, match="x of 6x512x6x6 is new on this stream"):
        stream.begin_capture()
        try:
            conv(*more[: 1 + residual])
        finally:
            stream.end_capture()


def fewer_share_split_sums() -> None:
    """On a GPU without clusters: sums of a split K and their counters lie in scratch memory."""
    import cupy

    conv = SparseConv2d.from_dense(weights(128, 128), padding=1, prune="magnitude")
    shape = (2, 128, 14, 14)
    conv.prepare(shape)
    whole = conv._plans[shape, False]
    assert whole.engine.plan.memory.workspace and whole.engine.plan.memory.zeros
    for _ in range(2):
        for a in (image(1, 128, 14, 14), image(2, 128, 14, 14)):
            assert close(conv(on_device(cupy, a)), reference(conv, a))
    assert conv._plans[(1, *shape[1:]), False].whole is whole


@only_emulated
def test_fewer_images_share_the_sums_of_a_split():
    passes(fewer_share_split_sums, devices=("a100",))


def test_sizes_that_only_ran_are_not_rounded_to(cupy):
    conv = SparseConv2d.from_dense(weights(16, 16), padding=1, prune="magnitude")
    conv(on_device(cupy, image(4, 16, 6, 6)))
    a = image(2, 16, 6, 6)
    assert close(conv(on_device(cupy, a)), reference(conv, a)) and conv._plans[(2, 16, 6, 6), False].whole is None
    conv.prepare((8, 16, 6, 6))
    conv(on_device(cupy, image(3, 16, 6, 6)))
    assert conv._plans[(3, 16, 6, 6), False].whole is conv._plans[(8, 16, 6, 6), False]
    conv.prepare((3, 16, 6, 6))  # a plan of its own
    assert conv._plans[(3, 16, 6, 6), False].whole is None


def test_fewer_rows_run_by_a_prepared_plan(cupy):
    layer = SparseLinear.from_dense(weights(64, 96, 1, 1)[:, :, 0, 0], prune="magnitude")
    layer.conv.prepare((1, 96, 1, 40))
    x = cupy.asarray(image(1, 96, 1, 13).transpose(0, 2, 3, 1).reshape(13, 96))
    expected = x.get().astype(np.float32) @ layer.conv.weight[:, :, 0, 0].T
    assert np.abs(layer(x).get() - expected).max() < LIMIT * np.ptp(expected)
    assert layer.conv._plans[(1, 96, 1, 13), False].whole is not None


@timed
def test_tuning_frees_what_it_replaces_and_fills_the_timing_cache(cupy, tmp_path, monkeypatch):
    for folder in ("kernels", "emulator"):
        (tmp_path / folder).symlink_to(cache_dir() / folder)
    monkeypatch.setenv("GPU_RUNTIME_CACHE", str(tmp_path))  # no times yet
    monkeypatch.setattr("gpu_runtime.ops.conv.BuildOptions", partial(BuildOptions, optimization_level=1))  # few are timed
    w, a, shape = weights(8, 16), image(1, 16, 6, 6), (1, 16, 6, 6)
    conv = SparseConv2d.from_dense(w, padding=1, prune="magnitude")
    conv(on_device(cupy, a))
    assert conv._plans[shape, False].engine.record.timing.kind == "predicted"
    conv.tune(shape)
    assert conv._plans[shape, False].engine.record.timing.kind == "measured"
    assert close(conv(on_device(cupy, a)), reference(conv, a))
    held = len(conv._gpu._held)
    for _ in range(3):
        conv.tune(shape)  # by cached times
        conv(on_device(cupy, a))
        assert len(conv._gpu._held) == held
    other = SparseConv2d.from_dense(w, padding=1, prune="magnitude")
    other.prepare(shape)
    assert other._plans[shape, False].engine.record.timing.kind == "measured" and other.tactic(shape) == conv.tactic(shape)


def test_an_operator_that_is_dropped_frees_its_memory(cupy):
    """After its queued launches have ended, on whichever stream."""
    x = on_device(cupy, a := image(2, 64, 9, 9))
    w = sparse24.prune(weights(64, 64))
    y = sparse_conv2d(x, w, padding=1)
    assert close(y, reference(SparseConv2d.from_dense(w, padding=1), a))


def test_threads_that_prepare_the_same_size(cupy):
    conv = SparseConv2d.from_dense(weights(16, 16), padding=1, prune="magnitude")
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: conv.prepare((2, 16, 7, 7)), range(4)))
    assert len(conv._plans) == 1 and len(conv._plans[(2, 16, 7, 7), False].direct._bases) == 1


TWO = """
import cupy, numpy as np
from gpu_runtime.ops import SparseConv2d
w = np.zeros((8, 16, 1, 1), np.float32)
w[:, ::4] = 1
conv = SparseConv2d.from_dense(w)
x = np.ones((1, 6, 6, 16), np.float16)
with cupy.cuda.Device(1):
    there = cupy.asarray(x).transpose(0, 3, 1, 2)
    assert (conv(there) == 4).all()
here = cupy.asarray(x).transpose(0, 3, 1, 2)
y = conv(there)  # whatever the thread's current device is
assert y.device.id == 1 and cupy.cuda.runtime.getDevice() == 0
with cupy.cuda.Device(1):
    assert (y.get() == 4).all()
for given in ((here,), (there, None, here[:, :8])):
    try:
        conv(*given)
    except ValueError as e:
        print(e)
"""


@only_emulated
def test_an_operator_belongs_to_one_gpu():
    env = os.environ | environment(devices=("h200", "h200"))
    done = subprocess.run([sys.executable, "-c", TWO], env=env, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    says = "it lies on GPU 0, expected GPU 1: copy it there, or use an operator for the first time inside "
    says += "cupy.cuda.Device(0)"
    assert done.stdout.splitlines() == [f"x: {says}", f"out: {says}"]


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
