"""Contexts of engines with several plans on a GPU, or on the emulated driver: padding in device memory, a graph for each."""

import itertools

import numpy as np
import onnx
import pytest

from cuda_kernels.device import why_no_gpu
from tests.driver.test_driver_context import FORMATS, build, close, cupy, expected, folder, network, stream
from tests.gpu_runtime.runtime.test_context_points import split
from tests.ranges import joined

__all__ = ["cupy", "folder", "stream"]  # fixtures
WHY = why_no_gpu()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(WHY), reason=WHY)]
BATCHES, ORDER = (1, 2, 5), (3, 1, 5, 4, 2, 3, 5, 1)
X = np.random.default_rng(5).standard_normal((5, 16, 6, 6)).astype(np.float32)


@pytest.fixture(scope="module", params=("net", "library"))
def engine(request, folder):
    """Of kernels alone, and with a function of CuPy's between two graphs."""
    library = request.param == "library"
    paths = [network(folder, f"{request.param}{n}", library=library, batch=n) for n in BATCHES]
    return joined([[build(path) for path in paths]])


@pytest.fixture(scope="module")
def answers(engine):
    with engine.context(device="emulator") as context:
        return {n: context.run({"x": X[:n]})["y"] for n in range(1, 6)}


@pytest.mark.parametrize("options", [{}, {"warm": True}, {"graph": False}, {"poison": True}], ids=str)
def test_host_arrays(engine, answers, options):
    with engine.context(**options) as context:
        for n in ORDER:
            y = context.run({"x": X[:n]})["y"]
            assert y.shape == answers[n].shape and close(y, answers[n]) and context.nonfinite() == []
            assert close(context.outputs()["y"], answers[n]) and close(context.tensor("y"), answers[n])


def test_device_arrays(engine, answers, cupy):
    """Contiguous or not, with outputs of our own or the caller's; nothing beside the rows is written."""
    with engine.context() as context:
        given, kept = cupy.asarray(X), []
        odd = cupy.asarray(np.ascontiguousarray(X.transpose(0, 2, 3, 1))).transpose(0, 3, 1, 2)
        for n, x in itertools.product(ORDER, (given, odd)):
            out = cupy.full((6, 16, 6, 6), 7, np.float32)
            assert context.run({"x": x[:n]}, out={"y": out[:n]})["y"].data.ptr == out.data.ptr
            kept.append((n, out, context.run({"x": x[:n]})["y"]))
        for n, out, y in kept:
            assert close(out[:n].get(), answers[n]) and (out[n:] == 7).all() and close(y.get(), answers[n])
        assert context.nonfinite() == []


def test_queued_runs(engine, answers, cupy):
    with engine.context() as context:
        futures = [(n, context.run_async({"x": x[:n]})) for n, x in itertools.product(ORDER, (X, cupy.asarray(X)))]
        for n, future in futures:
            y = future.result()["y"]
            assert close(y if isinstance(y, np.ndarray) else y.get(), answers[n]) and future.nonfinite() == []


def test_profile_and_replay_are_of_the_last_run(engine, answers):
    with engine.context() as context:
        context.run({"x": X[:1]})
        assert [len(row) for row in context.profile({"x": X[:4]}, 2)] == [len(context.plan.layers)] * 2
        context.run({"x": X[:2]})
        context.gpu.synchronize()
        assert context.plan is engine.record.plans[1]
        with pytest.raises(ValueError, match="x: expected 1 to 5 rows of 16x6x6, got 6"):
            context.run({"x": np.concatenate([X, X[:1]])})


@pytest.mark.parametrize("fmt", FORMATS)
def test_no_call_waits_whatever_the_format(folder, cupy, fmt, stream, monkeypatch):
    """Padding, a change of the plan and the counters' memory are all queued; the first run of each plan, too."""
    kind = fmt.partition(":")[0]
    paths = [network(folder, f"twenty{n}", channels=20, batch=n) for n in (2, 5)]
    formats = {"input_formats": fmt, "output_formats": "fp16:hwc8" if kind == "uint8" else fmt}
    engine = joined([[build(path, **formats) for path in paths]])
    dtype = {"fp16": np.float16, "fp32": np.float32, "uint8": np.uint8}[kind]
    x = np.random.default_rng(3).integers(0, 4, (5, 20, 6, 6)).astype(dtype)
    want = expected(engine, {"x": x})
    with engine.context() as context:

        def waits(*_):
            raise AssertionError("the host waited")

        given = cupy.asarray(x)
        for name in ("streamSynchronize", "eventSynchronize", "deviceSynchronize", "memcpy"):
            monkeypatch.setattr(cupy.cuda.runtime, name, waits)
        got = [(n, context.run({"x": given[:n]})["y"]) for n in ORDER]
        monkeypatch.undo()
        assert all(y.shape == want[:n].shape and close(y.get(), want[:n]) for n, y in got)
        assert all(close(context.run({"x": x[:n]})["y"], want[:n]) for n in ORDER)


@pytest.mark.parametrize("options", [{}, {"warm": True}, {"graph": False}], ids=str)
def test_counters_survive_other_plans(folder, cupy, options):
    """Each plan's lie in memory that the other's tensors overwrite, and are cleared in the order of the stream."""
    paths = {n: folder / f"split{n}.onnx" for n in (8, 64)}
    for n, path in paths.items():
        onnx.save(split(n), path)
    engine = joined([[build(path) for path in paths.values()]])
    assert any(plan.memory.zeros for plan in engine.record.plans)
    x = np.random.default_rng(4).standard_normal((64, 2048)).astype(np.float32)
    want, given = expected(engine, {"x": x}), cupy.asarray(x)
    with engine.at(8).context(**options) as context:
        got = [(n, context.run({"x": given[:n]})["y"]) for n in (8, 64, 5, 64, 64, 8)]
        assert all(close(y.get(), want[:n]) for n, y in got)
