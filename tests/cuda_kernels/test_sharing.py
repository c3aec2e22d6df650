"""Contexts of one engine share its weights, and never another's, whichever threads open and close them."""

import gc
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import gpu_runtime as gr
from cuda_kernels import sharing
from gpu_runtime.engine import Engine, encode
from tests.reference_run import model, node

SHAPE = (1, 8, 2, 2)
X = np.ones(SHAPE, np.float32)


def scaled(factor: float) -> bytes:
    """An engine that multiplies by a factor."""
    w = (factor * np.eye(8, dtype=np.float32)).reshape(8, 8, 1, 1)
    return encode(gr.build(model([node("Conv", "x w", "y")], {"x": SHAPE}, "y", {"w": w}), device="a100"))


@pytest.fixture(scope="module")
def files(small_heap):
    return {factor: scaled(factor) for factor in (1.0, 2.0, 4.0)}


def opened(engine):
    return engine.context(device="emulator", checks=False, threads=1)


def test_contexts_share_the_weights_until_the_last_is_closed(files):
    engine, other = gr.load(files[2.0]), gr.load(files[2.0])
    gc.collect()
    before = len(sharing._copies)
    with opened(engine) as a:
        with opened(engine) as b, opened(other) as c:
            assert len(sharing._copies) == before + 2, "another engine of the same bytes has its own"
            assert all((ctx.run({"x": X})["y"] == 2).all() for ctx in (a, b, c))
        gc.collect()
        assert len(sharing._copies) == before + 1 and (a.run({"x": X})["y"] == 2).all()
    gc.collect()
    assert len(sharing._copies) == before
    with opened(engine) as again:
        assert (again.run({"x": X})["y"] == 2).all()


def test_an_engine_that_was_built_shares_too_and_what_may_change_does_not(files):
    proto = model([node("Conv", "x w", "y")], {"x": SHAPE}, "y", {"w": np.ones((8, 8, 1, 1), np.float32)})
    engine = gr.build(proto, device="a100")
    before = len(sharing._copies)
    with opened(engine), opened(engine):
        assert len(sharing._copies) == before + 1
    changing = Engine(engine.record, engine.weights.copy(), checked=True)
    with opened(changing) as a:
        assert (a.run({"x": X})["y"] == 8).all()
        changing.weights[:] = 0
        with opened(changing) as b:
            assert (b.run({"x": X})["y"] == 0).all() and (a.run({"x": X})["y"] == 8).all()


def test_nothing_writes_to_what_is_shared(files):
    """The emulator's checks know that it is constant in each context."""
    engine = gr.load(files[1.0])
    with opened(engine) as a, opened(engine) as b:
        tables = [{int(address): bool(constant) for address, _, constant in ctx.gpu._memory.table()} for ctx in (a, b)]
        (shared,) = tables[0].keys() & tables[1].keys()
        assert tables[0][shared] and tables[1][shared]


def test_engines_that_come_and_go_are_never_mixed_up(files):
    """Each new one may lie where another lay before."""
    choose, wrong, begin = random.Random(0), [], threading.Barrier(4)

    def work(seed):
        own = random.Random(seed)
        begin.wait()
        for _ in range(30):
            factor = own.choice(list(files))
            engine = gr.load(files[factor], verify=False)
            with opened(engine) as ctx:
                if own.random() < 0.5:
                    del engine
                if not (ctx.run({"x": X})["y"] == factor).all():
                    wrong.append(factor)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, [choose.random() for _ in range(4)]))
    assert not wrong


def test_threads_open_and_close_contexts_of_one_engine(files):
    engine, begin = gr.load(files[4.0]), threading.Barrier(4)
    gc.collect()
    before = len(sharing._copies)

    def work(_):
        begin.wait()
        for _ in range(20):
            with opened(engine) as ctx:
                assert (ctx.run({"x": X})["y"] == 4).all()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    gc.collect()
    assert len(sharing._copies) == before
