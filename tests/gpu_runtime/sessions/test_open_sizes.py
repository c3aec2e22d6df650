"""Sessions of models whose sizes are open: an engine for each size, the last few of them, one build for all threads."""

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import onnx
import onnxruntime
import pytest

import gpu_runtime as gr
from gpu_runtime.sessions import open_sizes
from tests.reference_run import model, node

rng = np.random.default_rng(7)
W = (rng.standard_normal((8, 8, 3, 3)) / 8).astype(np.float32)
CPU = ["CPUExecutionProvider"]


def opened(*sizes: str | int | None) -> onnx.ModelProto:
    """conv - relu with inputs of these sizes, and metadata."""
    nodes = [node("Conv", "x w", "c", pads=[1] * 4), node("Relu", "c", "y")]
    proto = model(nodes, {"x": (1, 8, 6, 6)}, "y", {"w": W})
    for v, channels in ((proto.graph.input[0], 8), (proto.graph.output[0], 8)):
        for i, (dim, size) in enumerate(zip(v.type.tensor_type.shape.dim, sizes, strict=True)):
            dim.Clear()
            if isinstance(size, str):
                dim.dim_param = size
            elif size is not None:
                dim.dim_value = channels if i == 1 else size
    del proto.graph.value_info[:]
    proto.graph.name, proto.producer_name, proto.domain, proto.model_version = "net", "tests", "org", 3
    proto.doc_string, proto.graph.doc_string = "a model", "a graph"
    onnx.helper.set_model_props(proto, {"character": "a\nb", "stride": "32"})
    return proto


def image(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


@pytest.fixture
def session():
    with gr.InferenceSession(opened("N", 8, "H", "W"), providers=CPU, device="a100", most_engines=2) as made:
        yield made


@pytest.mark.parametrize("sizes", [("N", 8, "H", "W"), (-1, 8, "?", None), (1, 8, 6, 6), (None, 8, 6, 6)], ids=str)
def test_a_model_is_described_as_by_onnxruntime(sizes):
    data = opened(*sizes).SerializeToString()
    theirs = onnxruntime.InferenceSession(data, providers=CPU)
    with gr.InferenceSession(data, providers=CPU, device="a100") as ours:
        for mine, real in ((ours.get_inputs(), theirs.get_inputs()), (ours.get_outputs(), theirs.get_outputs())):
            assert [(i.name, i.type, i.shape) for i in mine] == [(i.name, i.type, i.shape) for i in real]
        meta = theirs.get_modelmeta()
        names = [n for n in dir(meta) if n[0] != "_"]
        assert "custom_metadata_map" in names and meta.version == 3
        assert {n: getattr(ours.get_modelmeta(), n) for n in names} == {n: getattr(meta, n) for n in names}
        assert ours.get_providers() == theirs.get_providers()


def test_an_engine_has_its_models_name_and_no_other_metadata():
    engine = gr.build(opened(1, 8, 6, 6), device="a100")
    with gr.InferenceSession(engine, providers=CPU) as session:
        assert (session.get_modelmeta().graph_name, session.get_modelmeta().custom_metadata_map) == ("net", {})
        with pytest.raises(ValueError, match="prepare: the engine has fixed sizes: make an InferenceSession"):
            session.prepare({"x": (1, 8, 6, 6)})


def test_each_size_is_built_once_and_the_last_ones_stay(session):
    theirs = onnxruntime.InferenceSession(opened("N", 8, "H", "W").SerializeToString(), providers=CPU)
    assert session.engines == [] and repr(session) == "InferenceSession()"
    with pytest.raises(ValueError, match="no engine yet"):
        session.engine  # noqa: B018
    for shape in ((1, 8, 6, 6), (1, 8, 9, 5), (1, 8, 6, 6), (2, 8, 5, 5), (1, 8, 6, 6)):
        x = image(*shape)
        for given in (x, x.tolist()):
            (got,) = session.run(["y"], {"x": given})
            assert np.allclose(got, theirs.run(None, {"x": x})[0], atol=0.02) and got.shape == shape
    assert [e.inputs[0].shape for e in session.engines] == [(2, 8, 5, 5), (1, 8, 6, 6)]
    assert session.engine is session.engines[-1] and session.context.is_open


def test_an_evicted_engine_ends_its_run_and_frees_its_memory(session):
    session.run(None, {"x": image(1, 8, 6, 6)})
    first = session._at({"x": image(1, 8, 6, 6)})
    session.run(None, {"x": image(1, 8, 7, 7)})
    session.run(None, {"x": image(1, 8, 8, 8)})
    assert len(session.engines) == 2 and first.engine not in session.engines
    x, context, gone = image(1, 8, 6, 6), first.context, weakref.ref(first)
    assert context.run({"x": x})["y"].shape == x.shape
    del first
    gc.collect()
    assert gone() is None and not context.is_open


def test_engines_with_equal_weights_share_them(session):
    for n in (6, 7):
        session.run(None, {"x": image(1, 8, n, n)})
    first, second = session.engines
    assert first.record.sections == second.record.sections and first.weights is second.weights


def test_threads_that_meet_one_size_build_it_once(session, monkeypatch):
    calls, build, start = [], session._sizes._build, threading.Barrier(4)

    def counted(shapes):
        calls.append(shapes)
        return build(shapes)

    monkeypatch.setattr(session._sizes, "_build", counted)

    def work(n):
        start.wait(60)
        return session.run(None, {"x": np.full((1, 8, n, n), n, np.float32)})[0].shape

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(work, (5, 6, 5, 6))) == [(1, 8, n, n) for n in (5, 6, 5, 6)]
    assert sorted(c["x"] for c in calls) == [(1, 8, 5, 5), (1, 8, 6, 6)]


def test_what_fails_fails_for_all_who_wait_and_may_be_tried_again(session, monkeypatch):
    build, entered = session._sizes._build, threading.Event()

    def fails(shapes):
        entered.wait(60)
        raise MemoryError("none left")

    monkeypatch.setattr(session._sizes, "_build", fails)
    with ThreadPoolExecutor(2) as threads:
        tries = [threads.submit(session.run, None, {"x": image(1, 8, 6, 6)}) for _ in range(2)]
        entered.set()
        assert [type(t.exception(60)) for t in tries] == [MemoryError] * 2
    monkeypatch.setattr(session._sizes, "_build", build)
    assert session.run(None, {"x": image(1, 8, 6, 6)})[0].shape == (1, 8, 6, 6)


def test_announced_sizes_are_built_ahead(session, monkeypatch):
    session.prepare({"x": (1, 8, 6, 6)}, {"x": [1, 8, 7, 7]}).result(120)
    monkeypatch.setattr(session._sizes, "_build", None)  # nothing is built any more
    for n in (6, 7):
        assert session.run(None, {"x": image(1, 8, n, n)})[0].shape == (1, 8, n, n)
    assert [e.inputs[0].shape for e in session.engines] == [(1, 8, 6, 6), (1, 8, 7, 7)]


def test_wrong_sizes_are_refused_ahead(session):
    with pytest.raises(gr.ModelError, match="the model declares Nx8xHxW, the shape given is 1x3x6x6"):
        session.prepare({"x": (1, 3, 6, 6)}).result(120)
    with pytest.raises(ValueError, match=r"expected the names \['x'\], got \['z'\]"):
        session.prepare({"z": (1, 8, 6, 6)})
    with pytest.raises(ValueError, match="at most most_engines=2 sizes to build ahead, got 3"):
        session.prepare(*[{"x": (1, 8, n, n)} for n in (5, 6, 7)])


@pytest.mark.parametrize(
    "feed, text",
    [
        ({}, r"expected the names \['x'\], got \[\]"),
        ({"z": image(1, 8, 6, 6)}, "expected the names"),
        (image(1, 8, 6, 6), "expected a mapping"),
        ({"x": image(1, 8, 6, 6).astype(np.float64)}, r"input 'x': expected tensor\(float\), got tensor\(float64\)"),
        ({"x": object()}, "the model declares Nx8xHxW, the shape given is none"),
        ({"x": image(1, 3, 6, 6)}, "the model declares Nx8xHxW"),
        ({"x": image(8, 6, 6)}, "the model declares Nx8xHxW"),
        ({"x": image(1, 8, 0, 6)}, "expected sizes of at least 1"),
    ],
)
def test_wrong_inputs_are_refused_and_leave_no_engine(session, feed, text):
    with pytest.raises((ValueError, TypeError), match=text):
        session.run(None, feed)
    assert session.engines == []


def test_what_no_size_would_cure_is_refused_at_once():
    proto = model([node("NonMaxSuppression", "x z", "y")], {"x": (1, 4, 4), "z": (1, 1, 4)}, "y")
    proto.graph.input[0].type.tensor_type.shape.dim[1].dim_param = "boxes"
    with pytest.raises(gr.ModelError, match="NonMaxSuppression"):
        gr.InferenceSession(proto, device="a100")
    with pytest.raises(ValueError, match="most_engines: expected a whole number of at least 1, got 0"):
        gr.InferenceSession(opened("N", 8, 6, 6), most_engines=0)


def test_given_shapes_make_a_session_of_that_size():
    with gr.InferenceSession(opened("N", 8, "H", "W"), device="a100", shapes={"x": (1, 8, 6, 6)}, providers=CPU) as session:
        assert session.get_inputs()[0].shape == [1, 8, 6, 6] and session.get_modelmeta().producer_name == "tests"
        with pytest.raises(ValueError, match="expected shape 1x8x6x6"):
            session.run(None, {"x": image(1, 8, 7, 7)})


def test_a_closed_session_says_so_and_closes_what_is_built_later(session, monkeypatch):
    build, entered, go = session._sizes._build, threading.Event(), threading.Event()

    def slow(shapes):
        entered.set()
        go.wait(60)
        return build(shapes)

    monkeypatch.setattr(session._sizes, "_build", slow)
    made, real = [], open_sizes.Opened

    def recorded(engine, place):
        made.append(real(engine, place))
        return made[-1]

    monkeypatch.setattr(open_sizes, "Opened", recorded)
    ahead = session.prepare({"x": (1, 8, 6, 6)})
    assert entered.wait(60)
    session.close()
    go.set()
    ahead.result(120)
    assert [o.context.is_open for o in made] == [False]
    with pytest.raises(ValueError, match="the InferenceSession is closed"):
        session.run(None, {"x": image(1, 8, 6, 6)})
