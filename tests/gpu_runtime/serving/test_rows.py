"""Requests joined into runs: every answer is bit by bit the one of the request alone, and a bad request fails alone."""

import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import gpu_runtime as gr
from cuda_kernels.device import DRIVER_NAMES, Device, named
from cuda_kernels.driver import DriverError
from gpu_runtime.building import chosen_sizes
from gpu_runtime.errors import EngineError
from gpu_runtime.runtime import steps
from gpu_runtime.runtime.fields import Batch, TensorSpec
from gpu_runtime.serving.rows import Failure, answer, checked, opened, point, sizes
from tests.engines import build
from tests.reference_run import model, node

MOST = 8
QUICK = {"device": "emulator", "checks": False, "threads": 1}


def made(folder: Path, *batches: int) -> gr.Engine:
    """Two inputs, two outputs, two layers with weights; for one batch, or a range of them."""
    rng = np.random.default_rng(1)
    weights = {"w": rng.normal(0, 0.3, (16, 8, 3, 3)), "v": rng.normal(0, 0.3, (8, 16, 1, 1))}
    nodes = [node("Conv", "x w", "a", name="first", pads=[1, 1, 1, 1]), node("Add", "a z", "b"), node("Conv", "b v", "y")]
    shapes = {"x": (8, 6, 6), "z": (16, 1, 1)}
    open_ = {name: ("N", *shape) for name, shape in shapes.items()}
    proto = model(nodes, open_, "y b", {k: w.astype(np.float32) for k, w in weights.items()})
    sized = {name: [(n, *shape) for n in batches] if len(batches) > 1 else (*batches, *shape) for name, shape in shapes.items()}
    return build(folder, proto, shapes=sized)


@pytest.fixture(scope="module")
def exact(tmp_path_factory) -> gr.Engine:
    return made(tmp_path_factory.mktemp("exact"), MOST)


@pytest.fixture(scope="module")
def engine(tmp_path_factory) -> gr.Engine:
    """Of one plan, whatever the plan for one row would gain."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chosen_sizes, "WORTH", 2.0)
        return made(tmp_path_factory.mktemp("range"), 1, MOST, MOST)


def request(rng, rows: int) -> dict[str, np.ndarray]:
    return {
        "x": rng.uniform(-1, 1, (rows, 8, 6, 6)).astype(np.float32),
        "z": rng.uniform(-1, 1, (rows, 16, 1, 1)).astype(np.float32),
    }


# Name -> (a function that makes a good request bad, words of the error).
BAD = {
    "missing": (lambda r: {"x": r["x"]}, "expected the names ['x', 'z'], got ['x']"),
    "unknown": (lambda r: r | {"q": r["x"]}, "got ['q', 'x', 'z']"),
    "no mapping": (lambda r: [r["x"], r["z"]], "expected a mapping of input names to arrays"),
    "shape": (lambda r: r | {"x": r["x"][:, :, :5]}, "x: expected 1 to 8 rows of 8x6x6 float32, got an array"),
    "dtype": (lambda r: r | {"x": r["x"].astype(np.float64)}, "x: expected float32, got float64"),
    "other bytes": (lambda r: r | {"x": r["x"].astype(">f4")}, ">f4"),
    "scalar": (lambda r: r | {"x": np.float32(1)[...]}, "x: expected 1 to 8 rows"),
    "list": (lambda r: r | {"x": r["x"].tolist()}, "in a NumPy array, got list"),
    "no rows": (lambda r: {n: a[:0] for n, a in r.items()}, "x: expected 1 to 8 rows of 8x6x6 float32, got 0"),
    "too many": (
        lambda r: {n: np.concatenate([a] * 9) for n, a in r.items()},
        "x: expected 1 to 8 rows of 8x6x6 float32, got ",
    ),
    "unequal": (lambda r: r | {"z": np.concatenate([r["z"]] * 2)}, "the same number of rows in every input, got x "),
}


@pytest.mark.parametrize("seed", range(6))
def test_each_request_gets_its_own_answer_and_only_bad_ones_fail(engine, seed):
    rng = np.random.default_rng(seed)
    names = list(BAD)
    assert engine.points == (MOST,)  # so that a request's bits are the same in each run
    requests, wrong = [], {}
    for i in range(int(rng.integers(1, 14))):
        requests.append(request(rng, int(rng.integers(1, 5))))
        if rng.random() < 0.3:
            spoil, wrong[i] = BAD[names[rng.integers(len(names))]]
            requests[i] = spoil(requests[i])
    with engine.context(**QUICK) as context:
        joined = answer(engine, context, requests)
        assert len(joined.answers) == len(requests)
        for i, (asked, got) in enumerate(zip(requests, joined.answers, strict=True)):
            if i in wrong:
                assert isinstance(got, Failure) and got.kind == "request" and wrong[i] in got.message
                continue
            single = context.run(asked)
            assert list(got) == ["y", "b"]
            assert all(got[n].tobytes() == single[n].tobytes() for n in got)
    good = [len(asked["x"]) for i, asked in enumerate(requests) if i not in wrong]
    assert sum(run.rows for run in joined.runs) == sum(good)
    assert all(run.rows <= run.point == MOST and run.seconds > 0 and run.nonfinite == () for run in joined.runs)
    assert len(joined.runs) <= -(-sum(good) // 5)  # two groups never fit into one run: each but one has over half of it


@pytest.mark.parametrize("what", BAD)
def test_a_bad_request_says_why(engine, what):
    spoil, words = BAD[what]
    with pytest.raises((TypeError, ValueError)) as e:
        checked(engine.inputs, spoil(request(np.random.default_rng(0), 2)))
    assert words in str(e.value)


def test_an_exact_batch_runs_requests_that_fill_it_alone(exact):
    """Two requests of 5 and 3 rows are not joined to 8: nothing says that the rows do not depend on each other."""
    rng = np.random.default_rng(0)
    assert sizes(exact).min == sizes(exact).max == MOST
    with exact.context(**QUICK) as context:
        joined = answer(exact, context, [request(rng, n) for n in (5, 8, 6, 3, 1)])
    assert [run.rows for run in joined.runs] == [8]
    few = joined.answers[2]
    assert isinstance(few, Failure) and few.message.startswith(
        "expected 8 rows in a run, got 6: send exactly so many in one request"
    )
    assert [isinstance(a, Failure) for a in joined.answers] == [True, False, True, True, True]


def test_a_range_that_begins_above_one_takes_smaller_requests_together(tmp_path):
    rng, engine = np.random.default_rng(0), made(tmp_path, 3, 5, 5)
    with engine.context(**QUICK) as context:
        joined = answer(engine, context, [request(rng, n) for n in (2, 1)])
        assert [run.rows for run in joined.runs] == [3]
        assert isinstance(answer(engine, context, [request(rng, 2)]).answers[0], Failure)


def test_requests_whose_rows_depend_on_each_other_run_alone(tmp_path):
    nodes = [node("ReduceMean", "x", "m", axes=[0], keepdims=1), node("Sub", "x m", "y")]
    proto = model(nodes, {"x": ("N", 4, 2, 2)}, "y")
    engine = build(tmp_path, proto, shapes={"x": [(n, 4, 2, 2) for n in (2, 8, 8)]})
    assert len(engine.points) > 1 and sizes(engine).exact == engine.points
    x = [np.random.default_rng(n).uniform(-1, 1, (n, 4, 2, 2)).astype(np.float32) for n in (2, 3, 2)]
    with engine.context(**QUICK) as context:
        joined = answer(engine, context, [{"x": a} for a in x])
    assert [(run.rows, run.point) for run in joined.runs] == [(2, 2), (2, 2)]
    assert np.allclose(joined.answers[2]["y"], x[2] - x[2].mean(0), atol=1e-3)
    assert " rows in a run, got 3: send exactly so many in one request" in joined.answers[1].message


def test_a_run_is_padded_to_the_next_point():
    some = SimpleNamespace(inputs=[spec(Batch(2, (2, 8)))], outputs=[], points=(2, 4, 8))
    assert [point(some, n) for n in (1, 2, 3, 4, 5, 8, 9)] == [None, 2, 4, 4, 8, 8, None] and str(sizes(some)) == "2..8"
    alone = SimpleNamespace(inputs=[spec(Batch(2, (2, 8), (2, 4, 8)))], outputs=[], points=(2, 4, 8))
    assert [point(alone, n) for n in (1, 2, 3, 4)] == [None, 2, None, 4] and str(sizes(alone)) == "2|4|8"


def spec(rows: int) -> TensorSpec:
    return TensorSpec("x", (rows, 3), np.dtype(np.float32))


def test_layers_that_stored_nan_are_reported(engine):
    rng = np.random.default_rng(0)
    bad = request(rng, 1)
    bad["x"][...] = np.nan
    with engine.context(**QUICK) as context:
        joined = answer(engine, context, [bad, request(rng, 2)])
    assert joined.runs[0].nonfinite and {"first", "y"} <= set(joined.runs[0].nonfinite)
    assert np.isfinite(joined.answers[1]["y"]).all()


class Fails:
    """A context whose runs fail where a row has a negative number, or always by a lost GPU."""

    def __init__(self, error=None):
        self.error, self.runs = error, []

    def run(self, inputs):
        self.runs.append(len(inputs["x"]))
        if self.error:
            raise self.error
        if (inputs["x"] < 0).any():
            raise EngineError("g: Gather cannot run on its inputs")
        return {"y": inputs["x"][:, 0]}

    def nonfinite(self):
        return []


def test_where_a_run_fails_only_the_request_at_fault_does(engine):
    context = Fails()
    requests = [{n: np.abs(a) for n, a in request(np.random.default_rng(0), 2).items()} for _ in range(3)]
    requests[1]["x"][0] = -1
    joined = answer(engine, context, requests)
    assert context.runs == [6, 2, 2, 2] and len(joined.runs) == 2
    assert joined.answers[1] == Failure("run", "g: Gather cannot run on its inputs")
    assert np.array_equal(joined.answers[2]["y"], requests[2]["x"][:, 0])


def test_after_a_fatal_error_nothing_runs_again(engine):
    context = Fails(DriverError("cuEventSynchronize", 700, "CUDA_ERROR_ILLEGAL_ADDRESS"))
    joined = answer(engine, context, [request(np.random.default_rng(0), 2)] * 2)
    assert context.runs == [4] and joined.runs == ()
    assert joined.answers == (Failure("fatal", "cuEventSynchronize: CUDA_ERROR_ILLEGAL_ADDRESS"),) * 2


def test_an_engine_without_a_batch_is_refused(tmp_path):
    proto = model([node("MatMul", "x w", "y")], {"x": (4, 8)}, "y", {"w": np.ones((8, 3), np.float32)})
    assert sizes(build(tmp_path, proto)).max == 4
    proto = model([node("Transpose", "x", "y", perm=(1, 0))], {"x": (4, 8)}, "y")
    with pytest.raises(EngineError, match="first dimension"):
        sizes(build(tmp_path, proto))


def reported(name: str) -> Device:
    """The device as its driver reports it."""
    title = next(title for title, known in DRIVER_NAMES.items() if known == name)
    return replace(named(name), name=title.lower(), title=title)


@pytest.mark.parametrize(("here", "warned"), [(named("h200"), False), (reported("h200"), False), (reported("h100"), True)])
def test_an_engine_that_was_tuned_on_another_gpu_of_the_architecture_warns(engine, tmp_path, monkeypatch, here, warned):
    """Not one that was planned for this GPU by its name."""
    engine.save(tmp_path / "e.engine")
    monkeypatch.setattr(steps, "device_for", lambda engine, device: here)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        opened(tmp_path / "e.engine", "cuda")[1].close()
    words = "its tactics were chosen for H200 SXM 141GB, this is NVIDIA H100 80GB HBM3: build it here to be faster"
    assert [str(w.message) for w in told] == [f"{tmp_path / 'e.engine'}: {words}"] * warned
