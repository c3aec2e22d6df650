"""Runs that are queued: in the emulator a thread executes them, on a GPU its stream; the same is true of both.

The same tests run again on the emulated driver, where work waits until somebody waits for it: see test_driver_async.py.
"""

import asyncio
import concurrent.futures
import gc
import subprocess
import sys
import threading
import time
import warnings
import weakref

import numpy as np
import pytest

import gpu_runtime as gr
from gpu_runtime.runtime.context import Context
from tests.reference_run import model, node

SHAPE = (2, 16, 6, 6)
RUNS = 6


@pytest.fixture(scope="module")
def engine(small_heap):
    rng = np.random.default_rng(1)
    w = (rng.standard_normal((16, 16, 3, 3)) / 12).astype(np.float32)
    return gr.build(model([node("Conv", "x w", "y", pads=[1, 1, 1, 1])], {"x": SHAPE}, "y", {"w": w}), device="a100")


@pytest.fixture(scope="module")
def cases(engine):
    rng = np.random.default_rng(2)
    xs = [rng.standard_normal(SHAPE).astype(np.float32) for _ in range(RUNS)]
    with engine.context(device="emulator") as ctx:
        return [(x, ctx.run({"x": x})["y"]) for x in xs]


@pytest.fixture
def ctx(engine):
    with engine.context(device="emulator") as ctx:
        yield ctx


@pytest.fixture
def held(ctx, monkeypatch):
    """Runs begin only when this is set."""
    go, replay = threading.Event(), ctx._replay
    monkeypatch.setattr(ctx, "_replay", lambda: (go.wait(30), replay()))
    yield go
    go.set()


def test_a_result_is_that_of_run(ctx, cases):
    future = ctx.run_async({"x": cases[0][0]})
    assert np.array_equal(future.result()["y"], cases[0][1]) and future.done() and future.exception() is None
    assert future.result()["y"] is future.result()["y"] and future.nonfinite() == [] and future.event is None
    assert repr(future) == "<RunFuture done>"


def test_it_returns_before_the_run_has_ended(ctx, cases, held):
    future = ctx.run_async({"x": cases[0][0]})
    assert not future.done() and "under way" in repr(future)
    with pytest.raises(TimeoutError, match="has not ended after 0.01 seconds"):
        future.result(timeout=0.01)
    with pytest.raises(TimeoutError):
        future.exception(timeout=0)
    held.set()
    assert np.array_equal(future.result(timeout=30)["y"], cases[0][1])


def test_several_in_flight_each_have_their_own(ctx, cases, held):
    """One array for all inputs, changed as soon as each run is queued; results asked for in any order."""
    given, futures = np.empty(SHAPE, np.float32), []
    for x, _ in cases:
        given[:] = x
        futures.append(ctx.run_async({"x": given}))
        given[:] = np.nan
    held.set()
    for k in (3, 0, 5, 4, 1, 2):
        assert np.array_equal(futures[k].result()["y"], cases[k][1])


def test_run_comes_after_what_was_queued(ctx, cases, held):
    futures = [ctx.run_async({"x": x}) for x, _ in cases[:3]]
    threading.Timer(0.05, held.set).start()
    assert np.array_equal(ctx.run({"x": cases[3][0]})["y"], cases[3][1])
    assert all(f.done() for f in futures)
    assert np.array_equal(ctx.tensor("y"), cases[3][1])
    assert all(np.array_equal(f.result()["y"], y) for f, (_, y) in zip(futures, cases, strict=False))


def test_outputs_that_are_given(ctx, cases):
    outs = [np.zeros(SHAPE, np.float32) for _ in range(2)]
    futures = [ctx.run_async({"x": x}, out={"y": out}) for out, (x, _) in zip(outs, cases, strict=False)]
    for future, out, (_, y) in zip(futures, outs, cases, strict=False):
        assert future.result()["y"] is out and np.array_equal(out, y)


def test_what_does_not_fit_is_raised_at_once(ctx, cases):
    for wrong in ({"z": cases[0][0]}, {"x": cases[0][0][:1]}):
        with pytest.raises(ValueError, match="expected"):
            ctx.run_async(wrong)
    with pytest.raises(ValueError, match="out 'y': expected shape"):
        ctx.run_async({"x": cases[0][0]}, out={"y": np.zeros(3, np.float32)})


def test_what_goes_wrong_in_a_run_is_raised_by_its_result(ctx, cases, monkeypatch):
    replay, turn = ctx._replay, iter(range(3))

    def fails():
        if next(turn) == 1:
            raise gr.EngineError("indices are out of bounds")
        replay()

    monkeypatch.setattr(ctx, "_replay", fails)
    futures = [ctx.run_async({"x": x}) for x, _ in cases[:3]]
    for _ in range(2):
        with pytest.raises(gr.EngineError, match="out of bounds"):
            futures[1].result()
    assert isinstance(futures[1].exception(), gr.EngineError) and futures[1].done()
    assert np.array_equal(futures[0].result()["y"], cases[0][1]) and np.array_equal(futures[2].result()["y"], cases[2][1])


def test_a_run_that_is_not_finite_says_so_itself(ctx, cases):
    huge = np.full(SHAPE, 1e6, np.float32)
    futures = [ctx.run_async({"x": x}) for x in (huge, np.full_like(huge, np.nan), cases[0][0])]
    with pytest.warns(RuntimeWarning, match="hold infinite values or NaN, first written by"):
        futures[0].result()
    with pytest.warns(RuntimeWarning, match="input 'x' holds NaN at"):
        futures[1].result()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        futures[0].result(), futures[2].result()
        assert [bool(f.nonfinite()) for f in futures] == [True, True, False] and ctx.nonfinite() == []


def test_results_outlive_the_context(engine, cases):
    with engine.context(device="emulator") as ctx:
        futures = [ctx.run_async({"x": x}) for x, _ in cases]
    assert all(f.done() for f in futures)
    assert all(np.array_equal(f.result()["y"], y) for f, (_, y) in zip(futures, cases, strict=True))
    with pytest.raises(ValueError, match="this context is closed"):
        ctx.run_async({"x": cases[0][0]})


@pytest.mark.slow
def test_a_context_that_is_dropped_ends_what_was_queued(engine, cases):
    ctx = engine.context(device="emulator")
    futures = [ctx.run_async({"x": x}) for x, _ in cases[:3]]
    del ctx
    gc.collect()
    assert all(np.array_equal(f.result()["y"], y) for f, (_, y) in zip(futures, cases, strict=False))


def test_threads_queue_at_once(ctx, cases):
    found = {}

    def work(k):
        found[k] = [ctx.run_async({"x": cases[k][0]}) for _ in range(3)]

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    [t.start() for t in threads], [t.join() for t in threads]
    assert all(np.array_equal(f.result()["y"], cases[k][1]) for k, futures in found.items() for f in futures)


def test_the_host_is_free_meanwhile(ctx, cases, held):
    """Queueing takes no longer than the copies of the inputs, whatever is under way."""
    begun = time.perf_counter()
    futures = [ctx.run_async({"x": x}) for x, _ in cases]
    assert time.perf_counter() - begun < 5 and not any(f.done() for f in futures)
    held.set()
    [f.result() for f in futures]


def test_signatures_are_those_of_run():
    import inspect

    run, later = inspect.signature(Context.run), inspect.signature(Context.run_async)
    assert run.parameters == later.parameters


# ---- as concurrent.futures and asyncio take it


def test_wait_and_as_completed(ctx, cases, held):
    futures = [ctx.run_async({"x": x}) for x, _ in cases]
    assert all(isinstance(f, concurrent.futures.Future) and f.running() and not f.cancel() for f in futures)
    assert concurrent.futures.wait(futures, timeout=0.05).done == set()
    held.set()
    first = concurrent.futures.wait(futures, timeout=30, return_when=concurrent.futures.FIRST_COMPLETED).done
    assert first and all(f.done() for f in first)
    found = {futures.index(f): f.result()["y"] for f in concurrent.futures.as_completed(futures, timeout=30)}
    assert sorted(found) == [*range(RUNS)] and all(np.array_equal(found[k], y) for k, (_, y) in enumerate(cases))
    assert concurrent.futures.wait(futures, timeout=0).not_done == set() and not any(
        f.running() or f.cancelled() for f in futures
    )


def test_callbacks_are_called_once(ctx, cases, held):
    called, told = [], threading.Event()
    future = ctx.run_async({"x": cases[0][0]})
    future.add_done_callback(lambda f: (called.append(f.result()["y"]), told.set()))
    assert not told.wait(0.02)
    held.set()
    assert told.wait(30) and called[0] is future.result()["y"] and len(called) == 1
    future.add_done_callback(called.append)
    assert called[1:] == [future]


def test_asyncio(ctx, cases):
    async def answers():
        futures = [asyncio.wrap_future(ctx.run_async({"x": x})) for x, _ in cases]
        return await asyncio.wait_for(asyncio.gather(*futures), 30)

    for found, (_, y) in zip(asyncio.run(answers()), cases, strict=True):
        assert np.array_equal(found["y"], y)


def test_an_error_reaches_those_who_wait(ctx, cases, monkeypatch):
    def fail():
        raise ValueError("no kernel")

    monkeypatch.setattr(ctx, "_replay", fail)
    future = ctx.run_async({"x": cases[0][0]})
    (done,) = concurrent.futures.wait([future], timeout=30).done
    assert done is future and str(future.exception()) == "no kernel"

    async def answer():
        await asyncio.wrap_future(future)

    with pytest.raises(ValueError, match="no kernel"):
        asyncio.run(answer())


def test_the_watch_ends_with_the_runs(ctx, cases):
    """No thread is left, and nothing is kept alive."""
    import weakref

    future = ctx.run_async({"x": cases[0][0]})
    concurrent.futures.wait([future], timeout=30)
    alive = weakref.ref(future)
    del future
    for _ in range(300):
        gc.collect()
        if alive() is None and not any(t.name == "gpu_runtime futures" for t in threading.enumerate()):
            break
        time.sleep(0.01)
    assert alive() is None and not any(t.name == "gpu_runtime futures" for t in threading.enumerate())


# ---- how many


def test_the_queue_is_bounded(ctx, cases, held):
    """The default is 32; what was refused was not queued, and there is room again when a run has ended."""
    x, y = cases[0]
    futures = [ctx.run_async({"x": x}) for _ in range(32)]
    with pytest.raises(gr.QueueFullError, match="run_async: 32 runs have not ended, expected fewer than max_queued=32"):
        ctx.run_async({"x": x})
    held.set()
    futures[0].result()
    futures[-1].result()
    assert np.array_equal(ctx.run_async({"x": x}).result()["y"], y) and issubclass(gr.QueueFullError, RuntimeError)


def test_another_bound(engine, cases):
    with engine.context(device="emulator", max_queued=1) as ctx:
        for x, y in cases:
            assert np.array_equal(ctx.run_async({"x": x}).result()["y"], y)
    for wrong in (0, -1, 2.5, None):
        with pytest.raises(ValueError, match="max_queued: expected a whole number of runs, 1 or more, got"):
            engine.context(device="emulator", max_queued=wrong)


def test_results_that_nobody_keeps_are_freed(ctx, cases):
    """The queue remembers runs, not what they computed."""
    future = ctx.run_async({"x": cases[0][0]})
    kept = weakref.ref(future.result()["y"])
    ctx.run({"x": cases[1][0]})
    del future
    gc.collect()
    assert kept() is None


# ---- memory that is used


@pytest.mark.parametrize("runs", [1000, pytest.param(20_000, marks=pytest.mark.long)])
def test_a_server_does_not_grow(runs):
    """Resident memory, after the first runs, of a process that runs one layer again and again, queued and not."""
    command = [sys.executable, "-c", SERVER, str(runs)]
    grown = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True).stdout
    assert int(grown) < 1 << 20, f"{runs} runs grew by {int(grown)} bytes"


SERVER = """
import resource, sys
import numpy as np
import gpu_runtime as gr
from tests.reference_run import model, node
w = {"w": np.ones((8, 8, 1, 1), np.float32)}
engine = gr.build(model([node("Conv", "x w", "y")], {"x": (1, 8, 2, 2)}, "y", w), device="a100")
x = np.ones((1, 8, 2, 2), np.float32)
def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
def run(ctx, count):
    for _ in range(count // 4):
        futures = [ctx.run_async({"x": x}), ctx.run_async({"x": x})]
        assert (futures[1].result()["y"] == 8).all() and (ctx.run({"x": x})["y"] == 8).all()
        ctx.run({"x": x}, out={"y": np.empty_like(x)})
with engine.context(device="emulator", threads=1, checks=False) as ctx:
    run(ctx, 400)
    before = resident()
    run(ctx, int(sys.argv[1]))
    print(resident() - before)
"""
