"""A pool lends each context to one user at a time, and gets it back whatever happens."""

import doctest
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import gpu_runtime as gr
from gpu_runtime.serving import pool as pool_module
from tests.reference_run import model, node

SHAPE = (2, 16, 6, 6)
X = np.ones(SHAPE, np.float32)
OPTIONS = {"device": "emulator", "checks": False, "threads": 1}


@pytest.fixture(scope="module")
def engine():
    w = np.ones((16, 16, 1, 1), np.float32) / 16
    return gr.build(model([node("Conv", "x w", "y")], {"x": SHAPE}, "y", {"w": w}), device="a100")


@pytest.fixture
def pool(engine):
    with gr.Pool(engine, contexts=2, **OPTIONS) as pool:
        yield pool


def test_the_example_runs(engine):
    found = doctest.testmod(pool_module, extraglobs={"engine": engine, "x": X, "gr": gr})
    assert found.attempted == 1 and not found.failed


def test_each_user_has_a_context_alone(pool):
    """Of eight threads at most two run at once, and every one has its turn."""
    users: set[int] = set()
    most = []

    def work(i):
        with pool.context(timeout=60) as ctx:
            assert id(ctx) not in users
            users.add(id(ctx))
            most.append(len(users))
            x = np.full(SHAPE, i, np.float32)
            assert (ctx.run({"x": x})["y"] == i).all() and (ctx.tensor("y") == i).all()
            users.remove(id(ctx))

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, range(40)))
    assert len(most) == 40 and max(most) <= 2 and repr(pool) == "<Pool of 2 contexts, 0 busy>"


def test_busy_contexts_are_told_of(pool):
    with pool.context(), pool.context(timeout=0):
        assert repr(pool) == "<Pool of 2 contexts, 2 busy>"
        for timeout in (0, 0.01):
            told = f"all 2 contexts .* busy, and none was returned in {timeout} seconds"
            with pytest.raises(TimeoutError, match=told), pool.context(timeout=timeout):
                pass
    with pool.context(timeout=0) as ctx:
        assert (ctx.run({"x": X})["y"] == 1).all()


def test_an_error_returns_the_context(pool):
    for _ in range(3):
        with pytest.raises(ValueError, match="expected shape"), pool.context(timeout=0) as ctx:
            ctx.run({"x": X[:1]})
    with pytest.raises(KeyboardInterrupt), pool.context(timeout=0):
        raise KeyboardInterrupt
    with pool.context(timeout=0), pool.context(timeout=0):
        pass


def test_a_context_that_its_user_closed_is_replaced(pool):
    for _ in range(2):
        with pool.context() as ctx, ctx:
            pass
    with pool.context() as a, pool.context() as b:
        assert all((ctx.run({"x": X})["y"] == 1).all() for ctx in (a, b))


def test_close_waits_for_users_and_refuses_new_ones(engine):
    pool = gr.Pool(engine, contexts=1, **OPTIONS)
    lent, done, found = threading.Event(), threading.Event(), []

    def use():
        with pool.context() as ctx:
            lent.set()
            done.wait(30)
            found.append(ctx.run({"x": X})["y"])

    def ask():
        with pytest.raises(ValueError, match="this pool is closed: make a new one"), pool.context():
            pass
        found.append("refused")

    user, asking = threading.Thread(target=use), threading.Thread(target=ask)
    user.start()
    assert lent.wait(30)
    asking.start()  # waits for the context that is lent
    closing = threading.Thread(target=pool.close)
    closing.start()
    asking.join(30)
    assert found == ["refused"] and closing.is_alive() and not asking.is_alive()
    done.set()
    user.join(30), closing.join(30)
    assert not closing.is_alive() and (found[1] == 1).all() and repr(pool) == "<Pool of 1 contexts, closed>"
    pool.close()
    with pytest.raises(ValueError, match="this pool is closed"), pool:
        pass


def test_closing_inside_would_wait_forever_and_says_so(engine):
    pool = gr.Pool(engine, contexts=1, **OPTIONS)
    with pool.context(), pytest.raises(RuntimeError, match="close: this thread has a context of the pool"):
        pool.close()
    pool.close()


def test_what_is_no_number_of_contexts(engine):
    for wrong in (0, -1, 1.5, "2"):
        with pytest.raises(ValueError, match="contexts: expected a whole number, 1 or more, got"):
            gr.Pool(engine, contexts=wrong)
    with pytest.raises(TypeError, match="context: unknown option 'thread', expected one of"):
        gr.Pool(engine, thread=1)


def test_runs_go_on_at_the_same_time(pool, monkeypatch):
    """Two users meet inside their runs."""
    meet = threading.Barrier(2)

    def work(i):
        with pool.context() as ctx:
            replay = ctx._replay
            ctx._replay = lambda: (meet.wait(30), replay())
            try:
                ctx.run({"x": X})
            finally:
                del ctx._replay

    with ThreadPoolExecutor(2) as threads:
        begun = time.monotonic()
        list(threads.map(work, range(2)))
    assert time.monotonic() - begun < 30
