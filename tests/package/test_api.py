"""What Python users call: names and their completion, models and engines in every form, messages for what is none of them."""

import inspect
import io
import subprocess
import sys
import tempfile

import numpy as np
import onnx
import pytest

import gpu_runtime as gr
from gpu_runtime import engine as engine_module
from gpu_runtime import pipeline
from gpu_runtime.frontend.files import source
from tests.reference_run import model, node

rng = np.random.default_rng(3)
X = rng.standard_normal((1, 8, 5, 5)).astype(np.float32)


@pytest.fixture(scope="module")
def proto() -> onnx.ModelProto:
    weights = {"w": rng.standard_normal((8, 8, 3, 3)).astype(np.float32)}
    return model([node("Conv", "x w", "c", pads=(1, 1, 1, 1)), node("Relu", "c", "y")], {"x": X.shape}, "y", weights)


@pytest.fixture(scope="module")
def engine(proto) -> gr.Engine:
    return gr.build(proto)


def test_names_are_there_and_complete_themselves():
    assert {"build", "load", "Engine", "Context", "EngineError", "__version__"} <= set(dir(gr))
    assert gr.__version__ == gr.installed_version() and gr.__version__[0].isdigit()
    parameters = inspect.signature(gr.build).parameters
    assert parameters == inspect.signature(pipeline.build).parameters and {"sparsity", "shapes", "risk"} <= set(parameters)
    with pytest.raises(AttributeError, match="has no attribute 'biuld'"):
        gr.biuld  # noqa: B018


def test_what_loads_engines_imports_no_onnx(engine, tmp_path):
    engine.save(tmp_path / "e.engine")
    code = (
        "import sys, gpu_runtime as gr; e = gr.load(sys.argv[1]); e.context(); gr.Context, gr.EngineError, repr(e)\n"
        "print([m for m in ('onnx', 'onnxscript', 'onnx_ir', 'scipy', 'google') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code, tmp_path / "e.engine"], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_a_model_in_every_form_is_the_same_engine(proto, engine, tmp_path):
    path = tmp_path / "m.onnx"
    onnx.save(proto, path)
    with open(path, "rb") as file, tempfile.NamedTemporaryFile() as temporary:
        temporary.write(path.read_bytes())
        temporary.seek(0)
        engines = [gr.build(m) for m in (path, str(path), path.read_bytes(), io.BytesIO(path.read_bytes()), file, temporary)]
    assert {e.record.model.sha256 for e in engines} == {engine.record.model.sha256}
    assert all(np.array_equal(e.weights, engine.weights) and e.plan.layers == engine.plan.layers for e in engines)
    pruned = io.BytesIO()
    gr.build(proto, sparsity="force", save_pruned=pruned)
    assert gr.build(pruned.getvalue(), sparsity="enable").sparsity.eligible


def test_an_engine_in_every_form_is_the_same(engine, tmp_path):
    path = tmp_path / "e.engine"
    engine.save(path)
    with open(path, "rb") as file:
        loaded = [gr.load(e) for e in (path, str(path), path.read_bytes(), bytearray(path.read_bytes()), file)]
    assert all(e.record == loaded[0].record and np.array_equal(e.weights, engine.weights) for e in loaded)
    with engine.context(device="emulator") as a, loaded[-1].context(device="emulator") as b:
        assert np.array_equal(a.run({"x": X})["y"], b.run({"x": X})["y"])


@pytest.mark.parametrize("wrong", [None, 3, [1], np.zeros(3), {"x": 1}, io.StringIO("text")], ids=lambda w: type(w).__name__)
def test_what_is_no_model_and_no_engine(wrong):
    with pytest.raises(TypeError, match="expected a model: the path of an ONNX file, its bytes.* got "):
        gr.build(wrong)
    with pytest.raises(TypeError, match="expected an engine: the path of an engine file, its bytes.*got "):
        gr.load(wrong)


def test_one_in_place_of_the_other(proto, engine, tmp_path):
    engine.save(tmp_path / "e.engine")
    data = (tmp_path / "e.engine").read_bytes()
    for given in (data, tmp_path / "e.engine"):
        with pytest.raises(gr.ModelError, match="expected an ONNX model, got an engine"):
            gr.build(given)
    with pytest.raises(gr.EngineError, match=r"not an engine but an ONNX model: gpu_runtime.build\(model\)"):
        gr.load(proto.SerializeToString())
    with pytest.raises(gr.EngineError, match="truncated"):
        gr.load(data[:-1])
    with pytest.raises(gr.ModelError, match="^model: expected an ONNX model"):
        gr.build(b"not a model")
    with pytest.raises(gr.EngineError):
        gr.load(b"")


@pytest.mark.parametrize(
    "options, told",
    [
        ({"shapes": "x:1x8x5x5"}, r"shapes: expected a mapping .*got 'x:1x8x5x5'"),
        ({"shapes": [(1, 8, 5, 5)]}, r"shapes: expected a mapping .*got \[\(1, 8, 5, 5\)\]"),
        ({"shapes": {"x": "1x8x5x5"}}, "shapes: expected whole numbers.*'x'"),
        ({"calibration": X}, "calibration: expected a mapping of input names to arrays.*got ndarray"),
        ({"sparsity": True}, "sparsity: expected one of disable, enable, force, got True"),
        ({"risk": "high"}, "risk: expected a probability"),
    ],
    ids=str,
)
def test_a_wrong_argument_says_what_was_expected(proto, options, told):
    with pytest.raises((TypeError, ValueError), match=told):
        gr.build(proto, **options)


def test_a_graph_may_be_named_anything(proto):
    """What a file says is no more than a short printable name of the model."""
    other = onnx.ModelProto()
    other.CopyFrom(proto)
    for name in ("\x1b[31m\n", "n" * 20_000):
        other.graph.name = name
        named = gr.build(other).record.model.name
        assert named.isprintable() and 0 < len(named) <= 100
        assert gr.load(io.BytesIO(engine_module.encode(gr.build(other)))).record.model.name == named


def test_external_data_without_its_folder(proto, tmp_path):
    onnx.save(proto, tmp_path / "m.onnx", save_as_external_data=True, size_threshold=0)
    assert gr.build(tmp_path / "m.onnx").plan.layers
    with pytest.raises(gr.ModelError, match="has external data.*give the path"):
        gr.build((tmp_path / "m.onnx").read_bytes())
    assert gr.build(onnx.load(tmp_path / "m.onnx")).plan.layers


def test_example_inputs_are_for_torch_modules(proto):
    with pytest.raises(ValueError, match="example_inputs: only a torch.nn.Module needs them"):
        gr.build(proto, example_inputs=(X,))


def test_a_torch_module():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    nn = torch.nn
    module = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Dropout(), nn.ReLU())
    with pytest.raises(ValueError, match="example_inputs: expected the tuple"):
        gr.build(module)
    with pytest.raises(ValueError, match="example_inputs: expected the tuple.*got a tensor"):
        gr.build(module, example_inputs=torch.zeros(X.shape))
    x = torch.from_numpy(X)
    built = gr.build(module, example_inputs=(x,))
    assert module.training
    (info,) = built.inputs
    with built.context(device="emulator") as ctx:
        (y,) = ctx.run({info.name: X}).values()
    assert np.allclose(y, module.eval()(x).detach().numpy(), atol=0.02)


def test_a_torch_module_that_cannot_be_exported_says_so(monkeypatch):
    """The exporter's own error stands behind the module's name, and the module trains on as before."""

    class Module:
        training = True

        def eval(self):
            self.training = False
            return self

        def train(self, mode):
            self.training = mode

    class Onnx:
        @staticmethod
        def export(*args, **options):
            raise RuntimeError("a loop over a tensor")

    torch = type(sys)("torch")
    torch.nn, torch.onnx, torch.Tensor = type(sys)("nn"), Onnx, np.ndarray
    torch.nn.Module = Module
    monkeypatch.setitem(sys.modules, "torch", torch)
    module = Module()
    with pytest.raises(gr.ModelError, match="^Module: torch.onnx.export cannot export it: RuntimeError: a loop over a tensor"):
        source.source_of(module, source.Examples((1,)))
    assert module.training
