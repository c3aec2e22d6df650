"""What several threads do at once: run one context, run one each, load kernels, ask and close."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import numpy as np
import pytest

import gpu_runtime as gr
from benchmarks.networks import Net
from cuda_kernels import emulator
from gpu_runtime.engine import encode
from tests.reference_run import ort_run

THREADS, RUNS = 8, 1000


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """Two convolutions, and a tensor between them that a second run would overwrite."""
    n = Net("small", (1, 8, 6, 6))
    path = tmp_path_factory.mktemp("threads") / "small.onnx"
    path.write_bytes(n.finish(n.conv(n.relu(n.conv("x", "a", 16), "r"), "b", 8)).SerializeToString())
    return gr.build(path, device="a100"), path


@pytest.fixture(scope="module")
def cases(engine):
    """(input, what one context alone answers) pairs that differ from each other."""
    rng = np.random.default_rng(0)
    xs = [rng.standard_normal((1, 8, 6, 6)).astype(np.float32) for _ in range(THREADS)]
    with engine[0].context(device="emulator") as ctx:
        answers = [next(iter(ctx.run({"x": x}).values())) for x in xs]
    (expected,) = ort_run(engine[1], {"x": xs[0]}).values()
    assert np.abs(answers[0] - expected).max() < 1e-2
    return list(zip(xs, answers, strict=True))


def at_once(count: int, work) -> list:
    """work(i) in `count` threads that begin together."""
    barrier = Barrier(count)

    def begin(i):
        barrier.wait()
        return work(i)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(begin, range(count)))


@pytest.mark.slow
def test_threads_share_a_context(engine, cases):
    with engine[0].context(device="emulator", checks=False, threads=1) as ctx:

        def work(i):
            x, answer = cases[i]
            return sum(not np.array_equal(*ctx.run({"x": x}).values(), answer) for _ in range(RUNS // THREADS))

        assert sum(at_once(THREADS, work)) == 0
        assert len(ctx.gpu.stats) == len(engine[0].plan.steps), "counters of one run are kept, not of a thousand"


def test_threads_with_a_context_each(engine, cases):
    def work(i):
        x, answer = cases[i]
        with engine[0].context(device="emulator", checks=False, threads=1) as ctx:
            return sum(not np.array_equal(*ctx.run({"x": x}).values(), answer) for _ in range(5))

    assert sum(at_once(THREADS, work)) == 0


def test_a_context_closed_by_another_thread_says_so(engine, cases):
    ctx = engine[0].context(device="emulator", checks=False, threads=1)

    def work(i):
        if i == 0:
            return ctx.close()
        try:
            for _ in range(50):
                assert np.array_equal(*ctx.run({"x": cases[i][0]}).values(), cases[i][1])
        except ValueError as e:
            return str(e)
        return None

    told = set(at_once(4, work)) - {None}
    assert told <= {"this context is closed: make a new one with engine.context()"}
    for ask in (lambda: ctx.run({"x": cases[0][0]}), ctx.nonfinite, lambda: ctx.tensor("b")):
        with pytest.raises(ValueError, match="this context is closed"):
            ask()


def test_threads_build_the_same_engine(engine):
    found = at_once(4, lambda i: encode(gr.build(engine[1], device="a100")))
    assert found == [encode(engine[0])] * 4


def test_programs_are_remembered_by_several_threads_at_once(monkeypatch):
    """More programs than are kept: what one thread evicts another may just be looking up."""
    monkeypatch.setattr(emulator.run, "KEPT", 4)
    head = ".version 8.0\n.target sm_80\n.address_size 64\n"

    def work(i):
        for k in range(60):
            name = f"k{(7 * i + k) % 12}"
            assert emulator.load(f"{head}.visible .entry {name}()\n{{\nret;\n}}\n").name == name

    at_once(THREADS, work)
