"""gpu_runtime.InferenceSession beside onnxruntime's, on several models: signatures, descriptions, results and refusals."""

import inspect
import io
import subprocess
import sys
import warnings

import numpy as np
import onnxruntime
import pytest

import gpu_runtime as gr
from gpu_runtime import inference_session
from tests.reference_run import model, node

rng = np.random.default_rng(5)
W = (rng.standard_normal((8, 8, 3, 3)) / 8).astype(np.float32)
DIGITS = "benchmarks/digits/digits_sparse.onnx"


def conv(dtype=np.float32):
    nodes = [node("Conv", "image w", "c", pads=[1] * 4), node("Relu", "c", "relu"), node("GlobalAveragePool", "relu", "pooled")]
    return model(nodes, {"image": (2, 8, 6, 6)}, "relu pooled", {"w": W.astype(dtype)}, dtype=dtype)


MODELS = {
    "two outputs": conv,
    "fp16": lambda: conv(np.float16),
    "two inputs": lambda: model([node("Add", "b a", "y")], {"b": (2, 3), "a": (3,)}, "y"),
    "int64": lambda: model([node("Add", "x x", "y")], {"x": (4, 5)}, "y", dtype=np.int64),
    "int32": lambda: model([node("Mul", "x x", "y")], {"x": (4, 5)}, "y", dtype=np.int32),
    "bool": lambda: model([node("Not", "x", "y")], {"x": (4, 5)}, "y", dtype=np.bool_),
}


@pytest.fixture(scope="module", params=MODELS)
def sessions(request):
    proto = MODELS[request.param]()
    ours = gr.InferenceSession(proto.SerializeToString(), device="a100", providers=["CPUExecutionProvider"])
    yield ours, onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    ours.close()


def drawn(infos):
    types = {
        "tensor(float)": np.float32,
        "tensor(float16)": np.float16,
        "tensor(int64)": np.int64,
        "tensor(int32)": np.int32,
        "tensor(bool)": np.bool_,
    }
    return {i.name: rng.integers(-3, 4, i.shape).astype(types[i.type]) for i in infos}


def test_inputs_and_outputs_are_described_alike(sessions):
    ours, theirs = sessions
    for mine, real in ((ours.get_inputs(), theirs.get_inputs()), (ours.get_outputs(), theirs.get_outputs())):
        assert [(i.name, i.type, i.shape) for i in mine] == [(i.name, i.type, i.shape) for i in real]
        assert [str(i) for i in mine] == [str(i) for i in real]
    assert ours.get_providers() == theirs.get_providers() == ["CPUExecutionProvider"]
    assert ours.get_provider_options() == theirs.get_provider_options()
    assert ours.get_overridable_initializers() == list(theirs.get_overridable_initializers())


def test_runs_return_the_same(sessions):
    ours, theirs = sessions
    feed = drawn(theirs.get_inputs())
    names = [o.name for o in theirs.get_outputs()]
    for wanted in (None, [], names, names[::-1], [names[-1]], (names[0], names[0])):
        got, real = ours.run(wanted, feed), theirs.run(wanted, feed)
        assert type(got) is type(real) and len(got) == len(real)
        for a, b in zip(got, real, strict=True):
            assert type(a) is type(b) is np.ndarray and (a.dtype, a.shape) == (b.dtype, b.shape)
            assert np.allclose(a.astype(np.float32), b.astype(np.float32), atol=0.02)
    lists = {name: a.tolist() for name, a in feed.items()}
    assert np.allclose(ours.run(None, lists)[0], theirs.run(None, lists)[0], atol=0.02)


def refused(session, *args):
    with pytest.raises(Exception) as caught:  # onnxruntime's own are direct children of Exception
        session.run(*args)
    return caught.value


def test_what_onnxruntime_refuses_is_refused(sessions):
    ours, theirs = sessions
    feed = drawn(theirs.get_inputs())
    name, a = next(iter(feed.items()))
    other = {k: v for k, v in feed.items() if k != name}
    for wrong in (
        (["nope"], feed),
        ("y", feed),
        (None, other),
        (None, feed | {"nope": a}),
        (None, feed | {name: a.astype(np.float64)}),
        (None, feed | {name: a[..., :1]}),
        (None, a),
        (None, None),
    ):
        refused(theirs, *wrong)
        error = refused(ours, *wrong)
        assert isinstance(error, (ValueError, TypeError)) and "expected" in str(error), error


SHARED = (
    "__init__ run get_inputs get_outputs get_overridable_initializers get_providers get_provider_options "
    "get_modelmeta io_binding run_with_iobinding"
).split()


@pytest.mark.parametrize("name", SHARED)
def test_signatures_are_onnxruntimes(name):
    def parameters(cls):
        return [
            (p.name if p.kind != p.VAR_KEYWORD else "**", p.kind, p.default)
            for p in inspect.signature(getattr(cls, name)).parameters.values()
        ]

    assert parameters(gr.InferenceSession) == parameters(onnxruntime.InferenceSession)


def test_what_is_not_there_says_what_to_do_instead(sessions):
    ours, _ = sessions
    theirs = {n for n in dir(onnxruntime.InferenceSession) if n[0] != "_"}
    assert set(inference_session.UNSUPPORTED) <= theirs
    assert not hasattr(ours, "run_with_ort_values")
    with pytest.raises(AttributeError, match="InferenceSession.run_async: .*session.context.run_async returns a future"):
        ours.run_async(None, {}, print, None)
    with pytest.raises(AttributeError, match="InferenceSession.disable_fallback: .*no other provider runs instead"):
        ours.disable_fallback()
    with pytest.raises(AttributeError, match="has no attribute 'runn'"):
        ours.runn(None, {})


@pytest.mark.slow
def test_an_engine_runs_as_its_model_does(tmp_path):
    x = np.load("benchmarks/digits/heldout.npz")["x"][:4]
    theirs = onnxruntime.InferenceSession(DIGITS).run(["logits"], {"x": x})[0]
    engine = gr.build(DIGITS, sparsity="enable", shapes={"x": x.shape}, device="a100")
    engine.save(tmp_path / "digits.engine")
    data = (tmp_path / "digits.engine").read_bytes()
    for given in (engine, tmp_path / "digits.engine", str(tmp_path / "digits.engine"), data, io.BytesIO(data)):
        with gr.InferenceSession(given, providers=["CPUExecutionProvider"]) as session:
            assert [i.shape for i in session.get_inputs()] == [[4, 1, 8, 8]] and "digits_sparse" in repr(session)
            assert (session.run(["logits"], {"x": x})[0].argmax(1) == theirs.argmax(1)).all()
    with pytest.raises(TypeError, match="sparsity: these options are for a build"):
        gr.InferenceSession(data, sparsity="enable")
    with pytest.raises(TypeError, match="InferenceSession has no option 'shape'; did you mean 'shapes' instead of 'shape'?"):
        gr.InferenceSession(data, shape={"x": x.shape})
    with pytest.raises(ValueError, match="this context is closed"):
        session.run(None, {"x": x})


def test_what_has_no_effect_and_what_is_not_there_warns():
    proto = MODELS["int32"]().SerializeToString()
    options = onnxruntime.SessionOptions()
    with pytest.warns(UserWarning, match="sess_options: gpu_runtime ignores them"):
        session = gr.InferenceSession(proto, options, device="a100")
    x = np.ones((4, 5), np.int32)
    with pytest.warns(UserWarning, match="run_options: "):
        assert (session.run(None, {"x": x}, onnxruntime.RunOptions())[0] == 1).all()
    with pytest.warns(UserWarning, match="'OpenVINOExecutionProvider' is not available, it is unknown; available: CPUExec"):
        gr.InferenceSession(proto, providers=[("OpenVINOExecutionProvider", {}), "CPUExecutionProvider"], device="a100")
    with pytest.raises(TypeError, match="providers: expected a list of names, got 'CPUExecutionProvider'"):
        gr.InferenceSession(proto, providers="CPUExecutionProvider")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gr.InferenceSession(proto, None, ["CPUExecutionProvider"], device="a100").run(None, {"x": x})


@pytest.mark.parametrize("wrong", ["no.onnx", b"", b"not a model", 3, None], ids=repr)
def test_what_is_neither_model_nor_engine(wrong):
    with pytest.raises((gr.ModelError, TypeError), match="no such file|expected"):
        gr.InferenceSession(wrong)


def test_an_engine_takes_no_onnx(tmp_path):
    path = tmp_path / "e.engine"
    gr.build(MODELS["two inputs"](), device="a100").save(path)
    code = (
        "import sys, numpy as np, gpu_runtime as gr; s = gr.InferenceSession(sys.argv[1])\n"
        "s.run(None, {'b': np.ones((2, 3), 'f'), 'a': [1, 2, 3]})\n"
        "print([m for m in ('onnx', 'onnxscript', 'onnx_ir', 'scipy') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
