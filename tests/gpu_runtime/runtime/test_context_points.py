"""Contexts of engines with several plans: which one runs, what fills its batch, and that none is disturbed by another."""

import numpy as np
import pytest

import gpu_runtime as gr
from tests.ranges import joined, of_batches
from tests.reference_run import model, node

BATCHES, CHANNELS = (1, 4, 8), 16
rng = np.random.default_rng(0)
W = {name: (rng.standard_normal((CHANNELS, CHANNELS, 3, 3)) / 12).astype(np.float32) for name in "ab"}


def network(n: int, size: int = 6):
    nodes = [node("Conv", "x a", "t", pads=[1, 1, 1, 1]), node("Relu", "t", "u"), node("Conv", "u b", "y", pads=[1, 1, 1, 1])]
    return model(nodes, {"x": (n, CHANNELS, size, size)}, "y", W)


def rows(n: int, size: int = 6, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, CHANNELS, size, size)).astype(np.float32)


@pytest.fixture(scope="module")
def engine():
    return of_batches(network, BATCHES)


@pytest.fixture(scope="module")
def singles():
    return {n: gr.build(network(n), device="a100") for n in BATCHES}


@pytest.fixture(scope="module")
def answers(singles):
    """For each batch, what engines of one size answer, padded by hand with zeros."""
    found = {}
    for n in range(1, 9):
        at = next(b for b in BATCHES if b >= n)
        x = np.zeros((at, *rows(1).shape[1:]), np.float32)
        x[:n] = rows(n)
        with singles[at].context(device="emulator") as ctx:
            found[n] = ctx.run({"x": x})["y"][:n]
    return found


@pytest.mark.parametrize("options", [{}, {"poison": True}, {"graph": False}], ids=str)
def test_every_batch_runs_by_the_next_plan(engine, answers, options):
    """In any order; what the plan has beside the caller's rows is never seen, and no run disturbs the next."""
    with engine.context(device="emulator", **options) as ctx:
        assert ctx.plan.inputs[0].shape[0] == 8
        for n in (3, 8, 1, 5, 1, 2, 7, 4, 6, 3):
            y = ctx.run({"x": rows(n)})["y"]
            assert y.shape == (n, CHANNELS, 6, 6) and np.array_equal(y, answers[n]), n
            assert ctx.plan.inputs[0].shape[0] == next(b for b in BATCHES if b >= n)
            assert np.array_equal(ctx.outputs()["y"], y) and np.array_equal(ctx.tensor("y"), y) and ctx.nonfinite() == []
            assert ctx.trace({"x": rows(n)})["y"].shape == y.shape


def test_outputs_that_are_given_have_the_rows(engine, answers):
    with engine.context(device="emulator") as ctx:
        out = np.full((3, CHANNELS, 6, 6), np.nan, np.float32)
        assert ctx.run({"x": rows(3)}, out={"y": out})["y"] is out and np.array_equal(out, answers[3])
        with pytest.raises(ValueError, match="out 'y': expected shape 3x16x6x6, got 4x16x6x6"):
            ctx.run({"x": rows(3)}, out={"y": np.empty((4, CHANNELS, 6, 6), np.float32)})
        assert np.array_equal(ctx.outputs()["y"], answers[3])  # a refused call disturbs nothing
        futures = [ctx.run_async({"x": rows(n)}) for n in range(1, 9)]
        assert all(np.array_equal(f.result()["y"], answers[n]) for n, f in zip(range(1, 9), futures, strict=True))
        assert np.array_equal(ctx.run({"x": rows(2).tolist()})["y"], answers[2])


def test_other_sizes_are_refused(engine):
    x = rows(9)
    with engine.context(device="emulator") as ctx:
        for run in (ctx.run, ctx.run_async, ctx.trace):
            with pytest.raises(ValueError, match="x: expected 1 to 8 rows of 16x6x6, got 9"):
                run({"x": x})
        for wrong in (x[:0], x[:2, :8], x[0]):
            with pytest.raises(ValueError, match="x: expected 1 to 8 rows of 16x6x6, got"):
                ctx.run({"x": wrong})
        with pytest.raises(ValueError, match=r"inputs: expected the names \['x'\], got \['z'\]"):
            ctx.run({"z": x})
        with pytest.raises(ValueError, match="input 'x': expected dtype float32, got float16"):
            ctx.run({"x": x[:3].astype(np.float16)})
        with pytest.raises(ValueError, match="nested lists"):
            ctx.run({"x": [[1.0], [1.0, 2.0]]})


def test_an_engine_may_take_its_own_batches_only(singles, answers):
    engine = joined([[singles[1], singles[4]]], exact="images depend on each other")
    with engine.context(device="emulator") as ctx:
        assert all(np.array_equal(ctx.run({"x": rows(n)})["y"], answers[n]) for n in (4, 1))
        with pytest.raises(ValueError, match="x: expected 1 or 4 rows of 16x6x6, got 3: images depend on each other"):
            ctx.run({"x": rows(3)})


@pytest.mark.slow
def test_several_sizes_of_images(singles):
    large = {n: gr.build(network(n, 10), device="a100") for n in (1, 2)}
    engine = joined([[singles[1], singles[4]], [large[1], large[2]]])
    with engine.context(device="emulator") as ctx:
        for single, x in ((singles[4], rows(4)), (large[2], rows(2, 10)), (singles[1], rows(1)), (large[1], rows(1, 10))):
            with single.context(device="emulator") as alone:
                assert np.array_equal(ctx.run({"x": x})["y"], alone.run({"x": x})["y"])
        with pytest.raises(ValueError, match="x 1 to 4 x 16x6x6; x 1 to 2 x 16x10x10, got x 3x16x8x8"):
            ctx.run({"x": rows(3, 8)})


def test_the_last_row_fills_the_batch(tmp_path):
    """Zeros would divide by zero, and be reported."""
    engine = of_batches(lambda n: model([node("Div", "x z", "y")], {"x": (n, 8, 2, 2), "z": (n, 8, 2, 2)}, "y", {}), (4,))
    x = {name: np.random.default_rng(i).uniform(1, 2, (3, 8, 2, 2)).astype(np.float32) for i, name in enumerate("xz")}
    with engine.context(device="emulator", poison=True) as ctx:
        assert np.allclose(ctx.run(x)["y"], x["x"] / x["z"], rtol=2e-3) and ctx.nonfinite() == []
        with pytest.raises(ValueError, match="expected the same number of rows in all inputs, got 3 in x, 2 in z"):
            ctx.run(x | {"z": x["z"][:2]})


def split(n: int):
    """A product whose sum is split over blocks, which count up in memory that is zero before."""
    w = (np.random.default_rng(3).standard_normal((1024, 2048)) / 45).astype(np.float32)
    nodes = [node("Relu", "x", "r"), node("Gemm", "r w", "t", transB=1), node("Relu", "t", "y")]
    return model(nodes, {"x": (n, 2048)}, "y", {"w": w})


def test_counters_survive_other_plans():
    """Each plan has counters elsewhere, in memory that the other's tensors overwrite."""
    engine = of_batches(split, (8, 64))
    assert any(plan.memory.zeros for plan in engine.record.plans)
    x = np.random.default_rng(4).standard_normal((64, 2048)).astype(np.float32)
    with engine.context(device="emulator") as ctx:
        want = {n: ctx.run({"x": x[:n]})["y"] for n in (8, 64, 5)}
        for n in (64, 8, 5, 64, 64, 5):
            assert np.array_equal(ctx.run({"x": x[:n]})["y"], want[n])
    assert np.allclose(want[64][:5], want[5], atol=1e-2)
