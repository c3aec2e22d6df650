"""What contexts on GPUs have in common, and give back: weights, devices, and a queue that ends."""

import gc
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier

import numpy as np
import pytest

import gpu_runtime as gr
from cuda_kernels import sharing
from cuda_kernels.device import why_no_gpu
from gpu_runtime.engine import encode
from tests.driver.test_driver_context import SHAPE, build, close, cupy, engine, expected, folder, network, x, y
from tests.driver.test_driver_devices import only_emulated
from tests.on_driver import ON_DRIVER, ORDER, passes

__all__ = ["cupy", "engine", "folder", "x", "y"]  # fixtures
WHY = why_no_gpu()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(WHY), reason=WHY)]


def in_use(cupy) -> int:
    """Bytes of the device, whoever holds them."""
    cupy.cuda.runtime.deviceSynchronize()
    free, total = cupy.cuda.runtime.memGetInfo()
    return total - free


@pytest.fixture
def padded(engine):
    """With 8 MB of weights, most of which no layer reads."""
    weights = np.concatenate([engine.weights, np.zeros(8 << 20, np.uint8)])
    weights.setflags(write=False)
    return replace(engine, weights=weights)


def test_one_upload_for_all_contexts_and_none_is_left(padded, cupy, x, y):
    gc.collect()
    cupy.get_default_memory_pool().free_all_blocks()
    held, copies = in_use(cupy), len(sharing._copies)
    with padded.context() as a:
        assert close(a.run({"x": x})["y"], y)
        first = in_use(cupy) - held
        with padded.context() as b, padded.context() as c:
            assert all(close(ctx.run({"x": x})["y"], y) for ctx in (b, c))
            assert in_use(cupy) - held - first < 8 << 20 <= first and len(sharing._copies) == copies + 1
        assert close(a.run({"x": x})["y"], y)
        b = padded.context()
    with b:  # which did not allocate them
        assert close(b.run({"x": x})["y"], y)
    gc.collect()
    assert in_use(cupy) <= held and len(sharing._copies) == copies


def test_a_second_context_waits_for_the_upload(engine, cupy, x, y):
    """It is queued in another stream, and may not have begun."""
    for _ in range(3):
        weights = engine.weights.copy()
        weights.setflags(write=False)
        fresh = replace(engine, weights=weights)
        with fresh.context() as _first, fresh.context() as second:
            assert close(second.run({"x": x})["y"], y)


def test_threads_open_and_close_contexts(engine, folder, cupy, x, y):
    """Of two engines, whose weights are never mixed up."""
    other = gr.load(encode(build(network(folder, "other", seed=9))))
    pairs = [(engine, y), (other, expected(other, {"x": x}))]
    assert not close(*(want for _, want in pairs))
    gc.collect()
    cupy.get_default_memory_pool().free_all_blocks()
    held, begin = in_use(cupy), Barrier(4)

    def work(i):
        begin.wait()
        for k in range(4):
            made, want = pairs[(i + k) % 2]
            with made.context() as ctx:
                assert close(ctx.run({"x": x})["y"], want)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    gc.collect()
    assert in_use(cupy) <= held


def test_a_pool_of_contexts(engine, x, y):
    with gr.Pool(engine, contexts=2) as pool, ThreadPoolExecutor(4) as threads:

        def work(_):
            with pool.context(timeout=120) as ctx:
                return close(ctx.run({"x": x})["y"], y)

        assert all(threads.map(work, range(12)))


@pytest.mark.skipif(not ON_DRIVER or ORDER != "late", reason="needs the emulated driver's late order")
def test_the_queue_is_bounded(engine, cupy, x, y):
    """By runs whose event has not come; nothing was queued by the call that was refused."""
    with engine.context(max_queued=3) as ctx:
        futures = [ctx.run_async({"x": given}) for given in (x, cupy.asarray(x), x)]
        for _ in range(2):
            with pytest.raises(gr.QueueFullError, match="run_async: 3 runs have not ended, expected fewer than max_queued=3"):
                ctx.run_async({"x": x})
        assert close(futures[0].result()["y"], y)
        futures.append(ctx.run_async({"x": x}))
        assert all(f.result()["y"].shape == SHAPE for f in futures)


def test_the_number_of_a_gpu(engine, cupy, x, y):
    with engine.context(device="cuda:0") as ctx:
        assert ctx.gpu.number == 0 and close(ctx.run({"x": x})["y"], y)
    count = cupy.cuda.runtime.getDeviceCount()
    with pytest.raises(
        gr.EngineError, match=rf"device: expected cuda:0.*, because CUDA shows {count} here, got 'cuda:99'; nvi"
    ):
        engine.context(device="cuda:99")
    assert cupy.cuda.runtime.getDevice() == 0


def two_devices():
    """Contexts by number, each with its own copy of the weights."""
    from pathlib import Path
    from tempfile import mkdtemp

    import cupy

    from tests.driver.test_driver_context import network

    engine = build(network(Path(mkdtemp())))
    given = np.random.default_rng(2).standard_normal(SHAPE).astype(np.float32)
    want = expected(engine, {"x": given})
    contexts = [engine.context(device=f"cuda:{i % 2}") for i in range(4)]
    assert len(sharing._copies) == 2 and cupy.cuda.runtime.getDevice() == 0
    for i, ctx in enumerate(contexts):
        assert ctx.gpu.number == i % 2 and close(ctx.run({"x": given})["y"], want)
        assert close(ctx.run_async({"x": given}).result()["y"], want)
        with cupy.cuda.Device(1):
            there = cupy.asarray(given)
        if i % 2:
            assert ctx.run({"x": there})["y"].device.id == 1
        else:
            with pytest.raises(ValueError, match="lies on GPU 1, expected GPU 0.*device='cuda:1'"):
                ctx.run({"x": there})
    for ctx in contexts:
        ctx.close()
    gc.collect()
    assert not sharing._copies
    with pytest.raises(gr.EngineError, match="expected cuda:0 to cuda:1, because CUDA shows 2 here, got 'cuda:2'"):
        engine.context(device="cuda:2")


@only_emulated
def test_contexts_by_the_number_of_their_gpu():
    from cuda_kernels.device import NAMED, current

    name = next(d.name for d in NAMED.values() if d.sm == current().sm)
    passes(two_devices, seconds=300, devices=(name, name))
