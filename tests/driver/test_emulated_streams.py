"""The emulated CUDA driver notices a missing wait, memory used too late, and calls that a capture forbids."""

import ctypes
import gc
import threading

import numpy as np
import pytest

from tests.emulated_driver.settings import ORDERS
from tests.on_driver import Refused, kernel, passes

pytestmark = pytest.mark.driver
N = 256


def setup():
    """(cupy, two non-blocking streams, an array of 3 as the device has it)."""
    import cupy

    a, b = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    x = cupy.full(N, 3, np.float32)
    cupy.cuda.runtime.deviceSynchronize()
    return cupy, a, b, x


def launch(name, stream, *args):
    kernel(name)((1,), (N,), args, stream=stream)


def fresh(cupy) -> bool:
    """Arrays are allocations of their own from now on, and what is freed is freed at once."""
    cupy.cuda.set_allocator(None)
    return True


# ---- order


def missing_wait():
    """One stream reads what another writes: without an event only the order of an eager driver saves it."""
    from tests.on_driver import ORDER

    cupy, a, b, x = setup()
    for ordered in (False, True):
        y, z = cupy.zeros(N, np.float32), cupy.zeros(N, np.float32)
        cupy.cuda.runtime.deviceSynchronize()
        launch("add_one", a, x, y, np.int32(N))
        if ordered:
            b.wait_event(a.record())
        launch("add_one", b, y, z, np.int32(N))
        b.synchronize()
        with b:
            assert (z.get() == (5 if ordered or ORDER == "eager" else 1)).all(), (ordered, z)


@pytest.mark.parametrize("order", ORDERS)
def test_a_missing_wait_between_streams_shows(order):
    passes(missing_wait, order=order)


def legacy_stream():
    """Blocking streams and the legacy one wait for each other; non-blocking ones wait for nobody."""
    cupy, free, _, x = setup()
    blocking = cupy.cuda.Stream()
    for stream, waits in ((blocking, True), (free, False)):
        y, z = cupy.zeros(N, np.float32), cupy.zeros(N, np.float32)
        cupy.cuda.runtime.deviceSynchronize()
        launch("add_one", stream, x, y, np.int32(N))
        launch("add_one", cupy.cuda.Stream.null, y, z, np.int32(N))
        assert (z.get() == (5 if waits else 1)).all()
        y.fill(7)
        launch("add_one", stream, y, z, np.int32(N))
        stream.synchronize()
        with stream:
            assert (z.get() == (8 if waits else 5)).all() or not waits
            assert waits or (z.get() != 8).all()


def test_the_legacy_stream_and_blocking_ones_wait_for_each_other():
    passes(legacy_stream, order="late")


def polling():
    """Time passes while the host polls, one piece of work at a time; a stream that is destroyed still runs."""
    cupy, a, b, x = setup()
    y = cupy.zeros(N, np.float32)
    cupy.cuda.runtime.deviceSynchronize()
    for _ in range(3):
        launch("add_one", a, y, y, np.int32(N))
    done = a.record()
    assert [done.done for _ in range(5)] == [False, False, False, True, True]
    with Refused(600):
        late = b.record()
        cupy.cuda.get_elapsed_time(done, late)
    launch("add_one", a, y, y, np.int32(N))
    del a, done
    gc.collect()
    cupy.cuda.runtime.deviceSynchronize()
    assert (y.get() == 4).all()


def test_polling_and_the_end_of_a_stream():
    passes(polling, order="late")


# ---- copies


def pageable_and_pinned():
    """Where the host waits for a copy, and when its source is read."""
    cupy, a, _, x = setup()
    runtime = cupy.cuda.runtime
    y, z = cupy.zeros(N, np.float32), cupy.zeros(N, np.float32)
    runtime.deviceSynchronize()
    host = np.full(N, 5, np.float32)
    runtime.memcpy(y.data.ptr, host.ctypes.data, y.nbytes, 1)
    host[:] = 6  # it is staged: this is too late to matter
    launch("add_one", a, y, z, np.int32(N))
    a.synchronize()
    with a:
        assert (z.get() == 1).all(), "the call returned before the bytes had arrived, and this stream did not wait for them"
    assert (y.get() == 5).all()
    pinned = np.frombuffer(cupy.cuda.alloc_pinned_memory(y.nbytes), np.float32, N)
    assert np.isnan(pinned.view(np.float16)).all(), "fresh pinned memory is poisoned"
    pinned[:] = 7
    runtime.memcpyAsync(y.data.ptr, pinned.ctypes.data, y.nbytes, 1, a.ptr)
    pinned[:] = 8  # before the copy has read it
    a.synchronize()
    with a:
        assert (y.get() == 8).all()
    launch("set_all", a, y, np.float32(9), np.int32(N))
    runtime.memcpyAsync(pinned.ctypes.data, y.data.ptr, y.nbytes, 2, a.ptr)
    assert (pinned == 8).all(), "the host did not wait for a copy to pinned memory"
    runtime.memcpyAsync(host.ctypes.data, y.data.ptr, y.nbytes, 2, a.ptr)
    assert (host == 9).all() and (pinned == 9).all(), "it waits for one to pageable memory"


def test_pageable_and_pinned_copies():
    passes(pageable_and_pinned, order="late")


def wrong_copies():
    """A copy whose kind is not what the addresses are, or that leaves an allocation, is refused."""
    cupy, a, _, x = setup()
    fresh(cupy)
    runtime, host = cupy.cuda.runtime, np.zeros(N, np.float32)
    y = cupy.zeros(N, np.float32)
    here, there = host.ctypes.data, y.data.ptr
    for to, source, kind in ((there, here, 2), (here, there, 1), (there, here, 3)):
        with Refused(1):
            runtime.memcpy(to, source, y.nbytes, kind)
    for extra in (1, 5000, 1 << 40):
        with Refused(1):
            runtime.memcpyAsync(y.data.ptr, x.data.ptr, y.nbytes + extra, 3, a.ptr)
        with Refused(1):
            runtime.memsetAsync(y.data.ptr, 0, y.nbytes + extra, a.ptr)
    with Refused(400):
        runtime.memsetAsync(y.data.ptr, 0, y.nbytes, 1234567)


def test_copies_outside_of_allocations_are_refused():
    passes(wrong_copies)


# ---- memory


def poison():
    """Fresh memory is NaN in FP16; freed memory can be read by nobody, and holds another NaN behind CUDA's back."""
    cupy, a, _, x = setup()
    fresh(cupy)
    y = cupy.empty(2 * N, np.float16)
    assert np.isnan(y.get()).all()
    at, nbytes = y.data.ptr, y.nbytes
    y.fill(1)
    del y
    with Refused(1):
        cupy.cuda.runtime.memcpy(np.empty(nbytes, np.uint8).ctypes.data, at, nbytes, 2)
    with Refused(1):
        cupy.cuda.runtime.free(at)
    assert set(ctypes.string_at(at, nbytes)) == {0xFE}


def test_fresh_and_freed_memory_is_poisoned():
    passes(poison)


def use_after_free():
    """Work that is queued when its memory is freed has run; what is queued afterwards loses the context."""
    cupy, a, _, x = setup()
    fresh(cupy)
    y, z = cupy.zeros(N, np.float32), cupy.zeros(N, np.float32)
    launch("add_one", cupy.cuda.Stream.null, y, z, np.int32(N))
    at = y.data.ptr
    del y
    assert (z.get() == 1).all()
    launch("add_one", a, np.uint64(at), z, np.int32(N))
    with Refused(700):
        a.synchronize()
    for call in (a.synchronize, cupy.cuda.runtime.deviceSynchronize, lambda: cupy.cuda.runtime.malloc(16), a.record):
        with Refused(700):
            call()
    with Refused(700):
        launch("add_one", a, z, z, np.int32(N))
    with Refused(700):
        cupy.cuda.runtime.memset(z.data.ptr, 0, 4)


def test_use_after_free_loses_the_context_for_good():
    passes(use_after_free)


def guard_bytes():
    """The host wrote into device memory beside an allocation, as through a pointer of its own."""
    cupy, *_ = setup()
    fresh(cupy)
    for offset in (-1, N):
        y = cupy.empty(N, np.uint8)
        ctypes.memset(y.data.ptr + offset, 0, 1)
        try:
            cupy.cuda.runtime.free(y.data.ptr)
        except cupy.cuda.runtime.CUDARuntimeError as e:
            assert e.status == 700
            print("noticed", offset)
            return
    raise AssertionError("not noticed")


def test_guard_bytes():
    assert passes(guard_bytes) == "noticed -1\n"


def past_the_end():
    cupy, a, _, x = setup()
    fresh(cupy)
    y = cupy.zeros(N, np.float32)
    cupy.cuda.runtime.deviceSynchronize()
    kernel("set_all")((2,), (N,), (y, np.float32(1), np.int32(N + 1)), stream=a)
    with Refused(700):
        a.synchronize()


def test_a_store_past_the_end_is_an_illegal_address():
    passes(past_the_end)


def little_memory():
    import cupy

    fresh(cupy)
    first = cupy.empty(600 << 20, np.uint8)
    with Refused(2):
        cupy.empty(600 << 20, np.uint8)
    free, total = cupy.cuda.runtime.memGetInfo()
    assert (total, total - free) == (1 << 30, first.nbytes)
    del first
    cupy.empty(600 << 20, np.uint8)


def test_device_memory_ends():
    passes(little_memory, memory_gb=1)


# ---- launches


def shared_memory():
    """48 KiB without asking; with asking, what the device has, which is less on some."""
    cupy, a, _, x = setup()
    function, y = kernel("shared"), cupy.zeros(N, np.float32)
    most = cupy.cuda.Device().attributes["MaxSharedMemoryPerBlockOptin"]
    cupy.cuda.runtime.deviceSynchronize()
    with Refused(1):
        function((1,), (N,), (y,), shared_mem=48 * 1024 + 16, stream=a)
    with Refused(1):
        function.max_dynamic_shared_size_bytes = most + 16
    function.max_dynamic_shared_size_bytes = most
    function((1,), (N,), (y,), shared_mem=most, stream=a)
    a.synchronize()
    assert (y.get() == np.arange(N)[::-1]).all()
    with Refused(1):
        function((1,), (N,), (y,), shared_mem=most + 16, stream=a)
    print(most)


@pytest.mark.parametrize("device, most", [("a100", 166912), ("rtx3090", 101376), ("h200", 232448)])
def test_shared_memory_is_opted_into(device, most):
    assert passes(shared_memory, devices=(device,)) == f"{most}\n"


def carveout():
    """A wish: what a launch may have of shared memory stays what it is."""
    cupy, a, _, x = setup()
    function, y = kernel("shared"), cupy.zeros(N, np.float32)
    assert function.preferred_shared_memory_carveout == -1
    for percent in (-2, 101):
        with Refused(1):
            function.preferred_shared_memory_carveout = percent
    for percent in (0, 100):
        function.preferred_shared_memory_carveout = percent
        assert function.preferred_shared_memory_carveout == percent
        function((1,), (N,), (y,), shared_mem=48 * 1024, stream=a)
    a.synchronize()


def test_a_carveout_is_a_percentage():
    passes(carveout)


def impossible_launches():
    cupy, a, _, x = setup()
    shapes = [((1,), (1025,)), ((1, 65536), (32,)), ((1,), (1, 1, 65)), ((1,), (32, 33))]
    for grid, block in shapes:
        with Refused(1):
            kernel("spin")(grid, block, (x, np.int32(1)), stream=a)
    with Refused(1):
        kernel("small_block")((1,), (96,), (x,), stream=a)
    kernel("small_block")((1,), (64,), (x,), stream=a)
    a.synchronize()


def test_impossible_launches_are_refused_and_the_context_survives():
    passes(impossible_launches)


# ---- capture


def captures():
    """A capture runs nothing; its graph runs each time, with what the memory holds then."""
    cupy, a, b, x = setup()
    runtime = cupy.cuda.runtime
    y = cupy.zeros(N, np.float32)
    runtime.deviceSynchronize()
    a.begin_capture()
    launch("add_one", a, y, y, np.int32(N))
    b.wait_event(a.record())  # b joins the capture, and comes back
    launch("add_one", b, y, y, np.int32(N))
    a.wait_event(b.record())
    graph = a.end_capture()
    assert (y.get() == 0).all()
    graph.launch(a)
    graph.launch(a)
    a.synchronize()
    assert (y.get() == 4).all()


def test_a_captured_graph_replays():
    passes(captures, order="late")


def broken_captures():
    """Each forbidden call returns its error, and the capture is invalid or unfinished afterwards."""
    cupy, a, b, x = setup()
    runtime, blocking, y = cupy.cuda.runtime, cupy.cuda.Stream(), cupy.zeros(N, np.float32)
    outside, inside = cupy.cuda.Event(), cupy.cuda.Event()
    outside.record(b)
    runtime.deviceSynchronize()
    global_mode, relaxed = runtime.streamCaptureModeGlobal, runtime.streamCaptureModeRelaxed

    def forks():
        inside.record(a)
        b.wait_event(inside)
        launch("add_one", b, y, y, np.int32(N))

    def merges():
        b.begin_capture()
        inside.record(b)
        try:
            a.wait_event(inside)
        finally:
            with Refused(901):
                b.end_capture()

    def in_capture(call):
        inside.record(a)
        call()

    cases = [
        (a, relaxed, a.synchronize, 900, 901),
        (a, relaxed, lambda: a.done, 0, 901),
        (a, relaxed, runtime.deviceSynchronize, 900, 901),
        (a, global_mode, lambda: runtime.malloc(256), 900, 901),
        (a, global_mode, lambda: runtime.memcpy(y.data.ptr, np.zeros(4).ctypes.data, 4, 1), 900, 901),
        (blocking, relaxed, lambda: launch("add_one", cupy.cuda.Stream.null, y, y, np.int32(N)), 906, 901),
        (a, relaxed, lambda: a.wait_event(outside), 905, 901),
        (a, relaxed, lambda: in_capture(inside.synchronize), 907, 901),
        (a, relaxed, merges, 902, 901),
        (a, relaxed, forks, 0, 904),
        (a, relaxed, b.synchronize, 0, 0),
        (a, relaxed, lambda: runtime.free(runtime.malloc(256)), 0, 0),
        (a, relaxed, lambda: launch("add_one", cupy.cuda.Stream.null, y, y, np.int32(N)), 0, 0),
    ]
    for i, (stream, mode, call, status, end) in enumerate(cases):
        stream.begin_capture(mode)
        with Refused(status):
            call()
        with Refused(end):
            stream.end_capture()
        print(i, end=" ")
    with Refused(900):
        cupy.cuda.runtime.streamBeginCapture(0)


def test_what_a_capture_forbids():
    passes(broken_captures)


def thread_ends_capture():
    cupy, a, b, x = setup()
    a.begin_capture(cupy.cuda.runtime.streamCaptureModeThreadLocal)
    found = []

    def end():
        try:
            a.end_capture()
        except cupy.cuda.runtime.CUDARuntimeError as e:
            found.append(e.status)

    thread = threading.Thread(target=end)
    thread.start()
    thread.join()
    assert found == [908]


def test_a_capture_ends_in_its_thread():
    passes(thread_ends_capture)
