"""Queued runs on a GPU, or on the emulated driver, where a missing wait fails every time; see test_context_async.py."""

import concurrent.futures
import gc
import threading
import warnings
import weakref

import numpy as np
import pytest

from cuda_kernels.device import why_no_gpu
from tests.driver.test_driver_context import SHAPE, Interface, build, close, cupy, engine, expected, folder, network, stream
from tests.emulated_driver.settings import Fault
from tests.on_driver import ON_DRIVER, ORDER, passes

__all__ = ["cupy", "engine", "folder", "stream"]  # fixtures
WHY = why_no_gpu()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(WHY), reason=WHY)]
only_late = pytest.mark.skipif(not ON_DRIVER or ORDER != "late", reason="needs the emulated driver's late order")
RUNS = 5


@pytest.fixture(scope="module")
def cases(engine):
    rng = np.random.default_rng(2)
    xs = [rng.standard_normal(SHAPE).astype(np.float32) for _ in range(RUNS)]
    return [(x, expected(engine, {"x": x})) for x in xs]


def never(*_):
    raise AssertionError("the host waited")


@pytest.fixture
def no_waiting(cupy, monkeypatch):
    """Every call that waits fails, until this is called."""
    for name in ("streamSynchronize", "eventSynchronize", "deviceSynchronize", "memcpy"):
        monkeypatch.setattr(cupy.cuda.runtime, name, never)
    return monkeypatch.undo


def test_the_hosts_arrays_are_not_waited_for(engine, cases, request):
    """All in flight at once, from one array that changes as soon as each is queued."""
    with engine.context() as context:
        context.run({"x": cases[0][0]})
        given, futures = np.empty(SHAPE, np.float32), []
        allow = request.getfixturevalue("no_waiting")
        for x, _ in cases:
            given[:] = x
            futures.append(context.run_async({"x": given}))
            given[:] = np.nan
        allow()
        for k in (3, 0, 4, 1, 2):
            assert close(futures[k].result()["y"], cases[k][1])
        assert futures[0].result()["y"] is futures[0].result()["y"] and futures[0].nonfinite() == []


@only_late
def test_they_are_under_way_until_somebody_waits(engine, cases):
    with engine.context() as context:
        futures = [context.run_async({"x": x}) for x, _ in cases]
        assert not futures[-1].done() and "under way" in repr(futures[-1])
        with pytest.raises(TimeoutError, match="has not ended after 0 seconds"):
            futures[-1].result(timeout=0)
        futures[1].result()
        assert futures[0].done() and not futures[-1].done()  # each question lets a little time pass
        assert close(futures[-1].result(timeout=60)["y"], cases[-1][1])


@only_late
def test_a_result_without_its_wait_is_wrong(engine, cases, monkeypatch):
    """So the wait is what makes the others right: memory that was never written is NaN, or what another run left."""
    x = 3 - cases[1][0]
    with engine.context() as context, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        context.run({"x": x})
        future = context.run_async({"x": x})
        monkeypatch.setattr(future, "_wait", lambda timeout: True)
        assert not close(future.result()["y"], expected(engine, {"x": x}))


def test_run_comes_after_what_was_queued(engine, cases):
    with engine.context() as context:
        futures = [context.run_async({"x": x}) for x, _ in cases[:3]]
        assert close(context.run({"x": cases[3][0]})["y"], cases[3][1])
        assert all(close(f.result()["y"], y) for f, (_, y) in zip(futures, cases, strict=False))


@pytest.mark.parametrize("fmt", ("fp16:hwc8", "fp32:chw32"))
def test_any_format(folder, cases, fmt, request):
    engine = build(network(folder, "twenty", channels=20), input_formats=fmt, output_formats=fmt)
    dtype = np.float16 if fmt.startswith("fp16") else np.float32
    xs = [np.random.default_rng(k).integers(0, 4, (SHAPE[0], 20, *SHAPE[2:])).astype(dtype) for k in range(3)]
    want = [expected(engine, {"x": x}) for x in xs]
    with engine.context() as context:
        context.run({"x": xs[0]})
        outs = [np.empty_like(y) for y in want]
        context.run_async({"x": xs[0]}).result()
        allow = request.getfixturevalue("no_waiting")
        futures = [context.run_async({"x": x}, out={"y": out}) for x, out in zip(xs, outs, strict=True)]
        allow()
        for future, out, y in zip(futures, outs, want, strict=True):
            assert future.result()["y"] is out and close(out, y)


def test_whoever_waits_is_told(engine, cases):
    """The driver calls nobody back: a thread asks for the events while somebody waits."""
    with engine.context() as context:
        futures = [context.run_async({"x": x}) for x, _ in cases]
        called = []
        futures[2].add_done_callback(called.append)
        found = [f for f in concurrent.futures.as_completed(futures, timeout=60)]
        assert sorted(map(futures.index, found)) == [*range(RUNS)] and called == [futures[2]]
        assert all(close(f.result()["y"], y) and f.event is not None for f, (_, y) in zip(futures, cases, strict=True))


def test_arrays_on_the_gpu(engine, cupy, cases, stream):
    """In the order of the caller's stream, as of `run`; `result` waits besides."""
    with engine.context() as context:
        given, out = cupy.asarray(cases[0][0]), cupy.full(SHAPE, 3, np.float32)
        future = context.run_async({"x": given}, out={"y": out})
        given.fill(9)
        after = out + 0
        assert future.result()["y"] is out and close(after.get(), cases[0][1])
        other = cupy.cuda.Stream(non_blocking=True)
        future = context.run_async({"x": cupy.asarray(cases[1][0])})
        other.wait_event(future.event)
        host = context.run_async({"x": cupy.asarray(cases[2][0])}, out={"y": np.zeros(SHAPE, np.float32)})
        assert close(future.result()["y"].get(), cases[1][1]) and close(host.result()["y"], cases[2][1])


def test_results_outlive_the_context_and_futures_need_not_be_kept(engine, cases):
    with engine.context() as context:
        for x, _ in cases:
            context.run_async({"x": x})
        gc.collect()
        futures = [context.run_async({"x": x}) for x, _ in cases]
    assert all(f.done() for f in futures)
    assert all(close(f.result()["y"], y) for f, (_, y) in zip(futures, cases, strict=True))


def test_inputs_live_until_they_are_read(engine, cupy, cases):
    with engine.context() as context:
        given = Interface(cupy.asarray(cases[0][0]), None)
        cupy.cuda.get_current_stream().synchronize()
        alive = weakref.ref(given)
        future = context.run_async({"x": given})
        del given
        gc.collect()
        assert alive() is not None and close(future.result()["y"].get(), cases[0][1])
        context.run({"x": cases[1][0]})
        gc.collect()
        assert alive() is None


def test_a_run_that_is_not_finite_says_so_itself(engine, cases, cupy):
    huge = np.full(SHAPE, 60000, np.float32)
    with engine.context() as context:
        futures = [context.run_async({"x": x}) for x in (huge, np.full_like(huge, np.nan), cases[0][0], cupy.asarray(huge))]
        with pytest.warns(RuntimeWarning, match="hold infinite values or NaN"):
            futures[0].result()
        with pytest.warns(RuntimeWarning, match="input 'x' holds NaN at"):
            futures[1].result()
        with pytest.warns(RuntimeWarning, match="hold infinite values or NaN"):
            futures[3].result()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            futures[2].result()
        assert [bool(f.nonfinite()) for f in futures] == [True, True, False, True] and context.nonfinite() == []


def test_threads_queue_and_run_at_once(engine, cupy, cases):
    """On one context, each with a stream of its own, arrays of the host and of the GPU, futures and runs."""
    wrong = []

    def work(k):
        x, y = cases[k]
        with cupy.cuda.Stream(non_blocking=True):
            for turn in range(3):
                given = cupy.asarray(x) if k % 2 else x.copy()
                future = context.run_async({"x": given})
                now = context.run({"x": given})["y"]
                given.fill(turn)
                for got in (future.result()["y"], now):
                    if not close(got.get() if k % 2 else got, y):
                        wrong.append((k, turn))

    with engine.context() as context:
        threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    assert not wrong


def faults():
    """A kernel's fault is raised by the result of its run, with what to do; then nothing runs any more, and says so."""
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        engine = build(network(Path(folder)))
    x = np.ones(SHAPE, np.float32)
    context = engine.context(graph=False)
    first, second = context.run_async({"x": x}), context.run_async({"x": x})
    try:
        second.result()
    except RuntimeError as e:
        print(e, *e.__notes__)
    print(type(first.exception()).__name__, second.done(), first.done())
    later = context.run_async({"x": x})
    print(type(later.exception()).__name__, later.done())
    context.close()


@only_late
def test_a_fault_is_raised_by_the_result():
    told = passes(faults, faults=(Fault("conv*", 2, "illegal_address"),))
    assert "start a new process" in told and told.count("CUDARuntimeError True") == 2
