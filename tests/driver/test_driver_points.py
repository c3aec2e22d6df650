"""Contexts of engines with several plans on a GPU, or on the emulated driver: padding in device memory, a graph for each."""

import itertools

import numpy as np
import pytest

from cuda_kernels.device import why_no_gpu
from tests.driver.test_driver_context import build, close, cupy, folder, network
from tests.ranges import joined

__all__ = ["cupy", "folder"]  # fixtures
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
