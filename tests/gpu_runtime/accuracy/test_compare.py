"""`gpu-runtime compare`: engines that are right, engines of other weights, and whose fault a difference is."""

import json
import math
import warnings

import numpy as np
import onnx
import pytest

import gpu_runtime as gr
from cuda_kernels.device import DEFAULT_DEVICE
from gpu_runtime.accuracy.compare import Tolerance, compare
from gpu_runtime.accuracy.wording import text
from tests.channel_networks import network
from tests.conftest import DIGITS, model_path
from tests.reference_run import model, node, ort_run, relative_error


def with_weights(source, target, **values) -> None:
    """The model with other values of some initializers."""
    proto = onnx.load(source)
    for t in proto.graph.initializer:
        if t.name in values:
            t.CopyFrom(onnx.numpy_helper.from_array(values[t.name].astype(np.float32), t.name))
    onnx.save(proto, target)


def weights_of(path) -> dict[str, np.ndarray]:
    return {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer}


@pytest.fixture
def chain(tmp_path, monkeypatch):
    """Three convolutions that no kernel joins, as a model and as an engine, in the test's folder."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    w = {f"w{i}": rng.normal(0, 0.1, (8, 8, 3, 3)).astype(np.float32) for i in (1, 2, 3)}
    nodes = [
        node("Conv", "x w1", "a", name="first", pads=[1] * 4),
        node("Relu", "a", "b", name="act"),
        node("Conv", "b w2", "c", name="second", pads=[1] * 4),
        node("Conv", "c w3", "y", name="third", pads=[1] * 4),
    ]
    onnx.save(model(nodes, {"x": (1, 8, 6, 6)}, "y", w), "tiny.onnx")
    gr.build("tiny.onnx", device="h200").save("tiny.engine")
    return tmp_path


def test_an_engine_that_is_right(chain, cli):
    code, out, err = cli("compare tiny.onnx tiny.engine")
    assert (code, err) == (0, "")
    assert out.startswith(
        "tiny.engine, run in the CPU emulator, against tiny.onnx, run by onnxruntime in FP32, on 1 sample of random "
    )
    assert "\nThe engine agrees with the model: 1 of 1 outputs are within tolerance\n" in out
    found = json.loads(cli("compare tiny.onnx tiny.engine --json")[1])
    assert found["passed"] and found["same_file"] and found["first_divergence"] is None and found["not_compared"] == []
    assert [(r["layer"], r["tensor"]) for r in found["layers"]] == [("first + act", "b"), ("second", "c"), ("third", "y")]
    x = np.random.default_rng(0).random((1, 8, 6, 6), np.float32)
    with gr.load("tiny.engine").context(device="emulator") as context:
        got, y = context.run({"x": x})["y"], ort_run(chain / "tiny.onnx", {"x": x})["y"]
    assert found["outputs"][0]["error"] == pytest.approx(relative_error(got, y), rel=1e-3)
    assert found["outputs"][0]["largest"] == pytest.approx(np.abs(got - y).max(), rel=1e-3)
    assert found["outputs"][0]["error"] < found["outputs"][0]["allowed"] < 2e-2


@pytest.mark.parametrize("weight, first", [("w1", "first + act"), ("w2", "second"), ("w3", "third")])
def test_the_first_layer_that_diverges_is_named(weight, first, chain, cli):
    """One weight of the model is off by its largest."""
    w = weights_of("tiny.onnx")[weight].copy()
    w.flat[5] += np.abs(w).max()
    with_weights("tiny.onnx", "other.onnx", **{weight: w})
    code, out, _ = cli("compare other.onnx tiny.engine")
    words = " ".join(out.split())
    assert (
        code == 5
        and f"First layer that diverges: {first}, in " in words
        and "1 of 1 outputs are outside the tolerance" in words
    )
    assert "The model is not the file that the engine was built from" in words
    assert json.loads(cli("compare other.onnx tiny.engine --json")[1])["first_divergence"] == first


def test_a_forced_engine_is_judged_by_the_pruned_model(files, cli):
    """Its outputs are far from the original's, and that is pruning's doing; the pruned model tells of the engine's."""
    assert cli("build tiny.onnx -o s.engine --device h200 --sparsity=force --savePruned=pruned.onnx")[0] == 0
    code, out, _ = cli("compare tiny.onnx s.engine --json")
    found = json.loads(out)
    x = {"x": np.random.default_rng(0).random((1, 8, 6, 6), np.float32)}
    apart = relative_error(ort_run(files / "pruned.onnx", x)["y"], ort_run(files / "tiny.onnx", x)["y"])
    assert code == 0 and found["passed"] and found["pruning"]["error"] == pytest.approx(apart, rel=1e-4) and apart > 0.1
    assert found["pruning"]["snr_db"] == pytest.approx(-20 * np.log10(apart), abs=0.01)
    words = " ".join(cli("compare tiny.onnx s.engine")[1].split())
    assert "The engine agrees with the pruned model: 1 of 1 outputs are within tolerance" in words
    assert f"Pruning (--sparsity=force), not the engine, changes the original model's outputs by {100 * apart:.1f} %" in words
    code, out, _ = cli("compare pruned.onnx s.engine")
    assert code == 0 and "not the engine" not in out and "is not the file" in out
    other = weights_of("tiny.onnx")["w2"][::-1]
    with_weights("tiny.onnx", "other.onnx", w2=other)
    code, out, _ = cli("compare other.onnx s.engine")
    assert code == 5 and "The engine differs from the pruned model" in " ".join(out.split())


def test_samples_and_tolerances_of_the_caller(files, cli):
    np.savez("inputs.npz", x=np.random.default_rng(1).uniform(-1, 1, (3, 8, 6, 6)))
    found = json.loads(cli("compare tiny.onnx tiny.engine --inputs inputs.npz --json")[1])
    assert found["samples"] == 3 and found["passed"]
    for args, code in (("--rtol 0.1 --atol 0.05", 0), ("--atol 1e-7", 5), ("--rtol 0", 5), ("--atol 1", 0)):
        got, out, _ = cli(f"compare tiny.onnx tiny.engine --inputs inputs.npz {args}")
        assert got == code and "elements beyond" in out, args


def test_what_overflows_differs(chain, cli):
    np.savez("inputs.npz", x=np.full((1, 8, 6, 6), 3e4, np.float32))
    with_weights("tiny.onnx", "large.onnx", w1=np.full((8, 8, 3, 3), 4.0))
    gr.build("large.onnx", device="h200", calibration={"x": np.ones((1, 8, 6, 6), np.float32)}).save("large.engine")
    code, out, _ = cli("compare large.onnx large.engine --inputs inputs.npz --json")
    found = json.loads(out)
    assert code == 5 and found["first_divergence"] == "first + act" and found["layers"][0]["error"] is None
    assert " inf " in cli("compare large.onnx large.engine --inputs inputs.npz")[1]
    assert cli("compare large.onnx large.engine")[0] == 0


@pytest.mark.parametrize(
    "args, message",
    [
        ("tiny.onnx none.engine", "none.engine"),
        ("none.onnx tiny.engine", "none.onnx: no such file"),
        ("sparse.onnx tiny.engine", "sparse.onnx: expected the engine's inputs x and outputs y, got x and logits"),
        ("tiny.onnx tiny.engine --inputs none.npz", "--inputs none.npz: no such file"),
        ("tiny.onnx tiny.engine --inputs other.npz", "inputs: expected the names ['x'], got ['z']"),
        ("tiny.onnx tiny.engine --inputs nan.npz", "input 'x' holds NaN or infinity"),
        ("tiny.onnx tiny.onnx", "tiny.onnx"),
    ],
)
def test_what_does_not_fit_is_said(args, message, files, cli):
    np.savez("other.npz", z=np.zeros((1, 8, 6, 6), np.float32))
    np.savez("nan.npz", x=np.full((1, 8, 6, 6), np.nan, np.float32))
    code, out, err = cli(f"compare {args}")
    assert (code, out) == (1, "") and message in err and "Traceback" not in err


def test_without_onnxruntime_the_cure_is_said(files, cli, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "onnxruntime", None)
    code, _, err = cli("compare tiny.onnx tiny.engine")
    assert code == 1 and "error: onnxruntime is not installed, and this needs it: pip install onnxruntime" in err


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("group", range(4))
def test_drawn_networks_pass_layer_by_layer(group, tmp_path):
    """Engines that are right are called so, in every tensor: pruned ones of drawn networks."""
    for seed in range(500 + 5 * group, 505 + 5 * group):
        onnx.save(network(seed, (6, 14)), tmp_path / "m.onnx")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            engine = gr.build(tmp_path / "m.onnx", device=DEFAULT_DEVICE, sparsity="force")
            found = compare(tmp_path / "m.onnx", engine, seed=seed)
        assert found.passed and found.first is None, f"seed {seed}: {text(found)}"
        assert found.same_file and len(found.layers) + len(found.unnamed) <= len(engine.plan.layers)


@pytest.mark.parametrize(
    "name, shape",
    [
        ("mnist8", (1, 1, 28, 28)),
        pytest.param("resnet20_cifar10", (1, 3, 32, 32), marks=pytest.mark.slow),
        pytest.param("fastestdet", (1, 3, 352, 352), marks=pytest.mark.full),
        pytest.param("deeplabv3_mnv2_257", (1, 257, 257, 3), marks=pytest.mark.full),
    ],
)
def test_real_networks_pass_layer_by_layer(name, shape):
    path = model_path(name)
    dynamic = {onnx.load(path).graph.input[0].name: shape} if name == "resnet20_cifar10" else None
    found = compare(path, gr.build(path, device=DEFAULT_DEVICE, sparsity="force", shapes=dynamic))
    assert found.passed and found.first is None, text(found)
    assert len(found.layers) >= 0.7 * (len(found.layers) + len(found.unnamed)) and found.pruning_error > 0.05
    assert max(map(len, text(found).splitlines())) <= 120


def test_accuracy_is_by_labels_and_none_is_read_off_random_values(tmp_path, monkeypatch, cli):
    monkeypatch.chdir(tmp_path)
    heldout = np.load(DIGITS / "heldout.npz")
    x, y = heldout["x"][:8], heldout["y"][:8]
    np.savez("both.npz", x=x, y=y)
    path = DIGITS / "digits_dense.onnx"
    engine = gr.build(path, device="a100", sparsity="force", shapes={"x": (4, 1, 8, 8)}, save_pruned="pruned.onnx")
    engine.save("e.engine")
    code, out, _ = cli(f"compare {path} e.engine --inputs both.npz --labels y --json")
    found = json.loads(out)
    was, now = ((ort_run(p, {"x": x})["logits"].argmax(1) == y).mean() for p in (path, "pruned.onnx"))
    with engine.context(device="emulator") as ctx:
        mine = np.concatenate([ctx.run({"x": x[i : i + 4]})["logits"].argmax(1) for i in (0, 4)])
    assert code == 0 and found["samples"] == 8 and was > now
    assert found["scores"] == {"metric": "top-1 accuracy", "engine": (mine == y).mean(), "model": now, "original": was}
    assert found["pruning"]["agreement"] is not None
    words = " ".join(cli(f"compare {path} e.engine --inputs both.npz --labels y")[1].split())
    assert f"On 8 samples, the top-1 accuracy of the engine is {100 * (mine == y).mean():.2f} %" in words
    assert "% of 8 samples" in words
    one = str(
        compare(path, gr.build(path, sparsity="force", device="a100", shapes={"x": (1, 1, 8, 8)}), {"x": x[:1]}, labels=y[:1])
    )
    assert "On 1 sample, the" in one and "% of 1 sample." in one
    random = compare(path, engine)
    assert random.pruning.agreement is None and "top-1" not in str(random) and random.samples == 4
    with pytest.raises(ValueError, match="labels: expected one for each of 8 samples, got 7"):
        compare(path, engine, {"x": x}, labels=y[:-1])
    assert compare(path, engine, {"x": x}, labels=y, metric=lambda got, y: float(len(y))).scores.engine == 8
    assert "--labels needs --inputs" in cli(f"compare {path} e.engine --labels y")[2]


def test_tolerances_are_by_element():
    assert Tolerance(rtol=0.1).is_given and Tolerance(atol=0.0).is_given and not Tolerance().is_given


@pytest.mark.parametrize(
    "options,error,message",
    [
        ({"rtol": math.nan}, ValueError, "rtol: expected a number from 0 on, got nan"),
        ({"atol": math.inf}, ValueError, "atol: expected a number from 0 on, got inf"),
        ({"rtol": -1}, ValueError, "rtol: expected a number from 0 on, got -1"),
        ({"engine": "tiny.engine"}, TypeError, "engine: expected an Engine, as gpu_runtime.load gives it, got str"),
        ({"inputs": np.ones(3)}, TypeError, "inputs: expected a mapping of names to arrays, .*, got ndarray"),
    ],
)
def test_arguments_that_would_pass_anything_are_refused(options, error, message, chain):
    with pytest.raises(error, match=message):
        compare(**{"model": "tiny.onnx", "engine": gr.load("tiny.engine")} | options)


def test_a_model_of_another_size_is_refused(chain, cli):
    proto = onnx.load("tiny.onnx")
    del proto.graph.node[-1].attribute[:]
    del proto.graph.value_info[:]
    proto.graph.output[0].type.tensor_type.ClearField("shape")
    onnx.save(proto, "small.onnx")
    code, _, err = cli("compare small.onnx tiny.engine")
    assert code == 1 and "output 'y' is (1, 8, 6, 6) in the engine and (1, 8, 4, 4) in the model: give the model" in err


def test_an_output_that_fp16_ruins_is_not_right(tmp_path, monkeypatch, cli):
    """Two channels around 3,000 are stored in FP16, whose step is 2 there, and subtracted by a convolution; of their largest
    column the index is an output."""
    monkeypatch.chdir(tmp_path)
    w = np.eye(8, dtype=np.float32)[..., None, None]
    minus = np.zeros((8, 8, 1, 1), np.float32)
    minus[:, 0], minus[:, 1] = 1, -1
    nodes = [
        node("Conv", "x w b", "c", name="large"),
        node("Conv", "c minus", "y", name="difference"),
        node("Reshape", "y row", "r"),
        node("ArgMax", "r", "best", axis=1, keepdims=0),
    ]
    weights = {"w": w, "b": np.full(8, 3000, np.float32), "minus": minus, "row": np.int64([1, -1])}
    proto = model(nodes, {"x": (1, 8, 16, 16)}, "y best", weights)
    proto.graph.output[1].type.tensor_type.elem_type = onnx.TensorProto.INT64
    onnx.save(proto, "m.onnx")
    x = np.random.default_rng(0).random((1, 8, 16, 16), np.float32)
    np.savez("x.npz", x=x)
    gr.build("m.onnx", device="h200").save("m.engine")
    code, out, _ = cli("compare m.onnx m.engine --inputs=x.npz")
    words = " ".join(out.split())
    assert code == 5 and "agrees" not in words
    assert "FP16 ruins output y: its largest error is" in words and "--layerPrecisions=y:fp32" in words
    assert "FP16 ruins output best: 1 integer differs," in words
    found = json.loads(cli("compare m.onnx m.engine --inputs=x.npz --json")[1])
    assert [(r["tensor"], r["ruined"], r["changed"], r["passed"]) for r in found["outputs"]] == [
        ("y", True, 0, False),
        ("best", True, 1, False),
    ]
