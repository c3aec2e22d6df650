"""2:4 patterns of quantised weights: of their whole numbers, and pruning that keeps them quantised."""

import numpy as np
import onnx
import pytest

import gpu_runtime as gr
from cuda_kernels import sparse24
from gpu_runtime.frontend import importer
from gpu_runtime.frontend.files.load import stored_tensors
from gpu_runtime.frontend.files.weights import put, weights
from gpu_runtime.frontend.summaries import pattern
from gpu_runtime.pruning.prune import prune
from tests.reference_run import model, network, node, ort_run

X = (1, 8, 6, 6)
QUANTISERS = {"xs": np.float32(0.02), "xz": np.uint8(128), "ys": np.float32(0.05), "yz": np.uint8(117)}
FORMS = ("int8", "uint8", "float", "half", "operator", "turned")


def numbers(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(-127, 128, (16, 8, 3, 3)).astype(np.int8)


def quantised(form: str, q: np.ndarray | None = None) -> onnx.ModelProto:
    """A convolution whose weights are quantised in one of the ways of quantisers; `q`: their whole numbers."""
    q = numbers() if q is None else q
    scales = np.random.default_rng(1).uniform(0.001, 0.01, len(q)).astype(np.float32)
    more, real = dict(QUANTISERS), q * scales[:, None, None, None]
    ends = [
        node("QuantizeLinear", "x xs xz", "xq"),
        node("DequantizeLinear", "xq xs xz", "xd"),
        node("Conv", "xd d", "y", name="conv"),
    ]
    if form == "int8":
        own = [node("DequantizeLinear", "w s", "d", axis=0)]
        more |= {"w": q, "s": scales}
    elif form == "uint8":  # one scale and zero point for all
        own = [node("DequantizeLinear", "w s z", "d")]
        more |= {"w": (q.astype(np.int32) + 128).astype(np.uint8), "s": np.float32(0.003), "z": np.uint8(128)}
    elif form in ("float", "half"):  # real numbers, quantised in the graph
        own = [node("QuantizeLinear", "w s z", "q", axis=0), node("DequantizeLinear", "q s z", "d", axis=0)]
        kind = np.float32 if form == "float" else np.float16
        more |= {"w": real.astype(kind), "s": scales.astype(kind), "z": np.zeros(len(q), np.int8)}
        if form == "half":
            own += [node("Cast", "d", "e", to=onnx.TensorProto.FLOAT)]
            ends[-1] = node("Conv", "xd e", "y", name="conv")
    elif form == "turned":
        own = [node("Transpose", "w", "t", perm=[3, 2, 0, 1]), node("DequantizeLinear", "t s", "d", axis=0)]
        more |= {"w": q.transpose(2, 3, 1, 0), "s": scales}
    else:
        own = []
        ends[1:] = [node("QLinearConv", "xq xs xz w s z ys yz", "yq", name="conv"), node("DequantizeLinear", "yq ys yz", "y")]
        more |= {"w": q, "s": scales, "z": np.zeros(len(q), np.int8)}
    used = {name for each in (*own, *ends) for name in each.input}
    proto = model([*own, *ends], {"x": X}, "y", {k: v for k, v in more.items() if k in used}, opset=19)
    onnx.checker.check_model(proto)
    return proto


def whole(proto: onnx.ModelProto, form: str) -> np.ndarray:
    """The whole numbers [K,C,R,S] of a model's weights, zero point subtracted; of real ones, these."""
    w = {name: onnx.numpy_helper.to_array(t) for name, t in stored_tensors(proto.graph)}["w"]
    return {"uint8": lambda: w.astype(np.int32) - 128, "turned": lambda: w.transpose(3, 2, 0, 1)}.get(form, lambda: w)()


@pytest.mark.parametrize("form", FORMS)
def test_the_pattern_is_that_of_the_whole_numbers(form, tmp_path):
    for q, verdict in ((numbers(), "dense"), (sparse24.prune(numbers(), 1), "2:4")):
        onnx.save(quantised(form, q), tmp_path / "m.onnx")
        (row,) = pattern.inspect(tmp_path / "m.onnx")
        assert (row["layer"], row["weight"], row["verdict"], row["shape"]) == ("conv", "w", verdict, [16, 8, 3, 3])
        assert row["zeros"] == np.mean(q == 0) and row["fit"] == np.mean(sparse24.fits(q, 1))


def test_weights_that_rounding_makes_zero_are_zero(tmp_path):
    """FP32 weights below half a step in front of QuantizeLinear: the kernels see zeros."""
    proto = quantised("float", np.where(sparse24.prune(numbers(), 1) == 0, 0, 1).astype(np.int8))
    t = dict(stored_tensors(proto.graph))["w"]
    dense = onnx.numpy_helper.to_array(t) + np.float32(1e-4)
    t.CopyFrom(onnx.numpy_helper.from_array(dense, "w"))
    onnx.save(proto, tmp_path / "m.onnx")
    assert np.all(dense) and pattern.inspect(tmp_path / "m.onnx")[0]["verdict"] == "2:4"


@pytest.mark.parametrize("form", FORMS)
def test_pruned_weights_stay_quantised(form, tmp_path):
    proto, path = quantised(form), tmp_path / "m.onnx"
    onnx.save(proto, path)
    result = prune(path, device="none")
    pruned = onnx.load_from_string(result.model)
    before, after = whole(proto, form), whole(pruned, form)
    gone = after != before
    assert not np.any(after[gone]) and sparse24.fits(after, 1).all() and 0.45 < gone.mean() < 0.51
    for tensors in zip(proto.graph.initializer, pruned.graph.initializer, strict=True):
        old, new = tensors
        assert (old.name, old.data_type, old.dims) == (new.name, new.data_type, new.dims)
        assert old.name == "w" or old == new
    assert pruned.graph.node == proto.graph.node
    sizes, stays = (a.reshape(16, 2, 4, 3, 3) for a in (np.abs(before.astype(np.float64)), after != 0))
    assert np.all(np.where(stays, 0, sizes).max(2) <= np.where(stays, sizes, 999).min(2))
    assert abs(result.lost_energy - pattern.inspect(path)[0]["lost_energy"]) < 1e-9


@pytest.mark.parametrize("form", FORMS)
def test_a_build_that_prunes_saves_the_same(form, tmp_path):
    onnx.save(quantised(form), tmp_path / "m.onnx")
    loaded = importer.load(tmp_path / "m.onnx", prune=True, save_pruned=tmp_path / "forced.onnx")
    assert loaded.pruned == ("w",) and loaded.stored["conv"].fits
    assert onnx.load(tmp_path / "forced.onnx") == onnx.load_from_string(prune(tmp_path / "m.onnx", device="none").model)
    net = network(tmp_path / "forced.onnx")
    assert any(getattr(op.problem, "sparse24", False) for op in net.ops)


@pytest.mark.parametrize("form", FORMS)
def test_every_change_can_be_undone(form):
    """`put` of what was there, behind another change, gives the same whole numbers again."""
    proto = quantised(form)
    if form == "operator":
        gr.frontend.files.quantized.spell(proto)
    (w,) = weights(proto.graph)
    before = w.values.copy()
    stored = onnx.numpy_helper.to_array(w.tensor).copy()
    put(w.name, w.tensor, w.views, np.where(np.arange(8)[:, None, None] % 2, before, 0))
    assert np.array_equal(w.values[:, ::2], np.zeros_like(before[:, ::2])) and np.array_equal(
        w.values[:, 1::2], before[:, 1::2]
    )
    put(w.name, w.tensor, w.views, before)
    assert np.array_equal(w.values, before)
    if form not in ("float", "half"):
        assert np.array_equal(onnx.numpy_helper.to_array(w.tensor), stored)


def test_limits_restore_weights(tmp_path):
    """Weights whose pruning harms too much stay dense, and quantised."""
    proto = quantised("int8")
    onnx.save(proto, tmp_path / "m.onnx")
    x = np.random.default_rng(0).uniform(-2, 2, (4, *X[1:])).astype(np.float32)
    result = prune(tmp_path / "m.onnx", device="none", calibration={"x": x}, min_snr=1000.0)
    assert onnx.load_from_string(result.model) == proto


def test_channels_of_quantised_weights_keep_their_order(tmp_path):
    onnx.save(quantised("int8"), tmp_path / "m.onnx")
    permuted, plain = (onnx.load_from_string(prune(tmp_path / "m.onnx", device="none", permute=p).model) for p in (True, False))
    assert permuted == plain


def test_a_scale_that_is_not_stored_keeps_weights_dense(tmp_path):
    proto = quantised("int8")
    proto.graph.node.insert(0, node("Mul", "s one", "s2"))
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.float32([1]), "one"))
    proto.graph.node[1].input[1] = "s2"
    onnx.save(proto, tmp_path / "m.onnx")
    assert "computed by DequantizeLinear" in pattern.inspect(tmp_path / "m.onnx")[0]["verdict"]
    x = {"x": np.random.default_rng(0).uniform(-2, 2, X).astype(np.float32)}
    assert np.allclose(list(ort_run(proto, x).values())[0], list(ort_run(quantised("int8"), x).values())[0])


@pytest.mark.parametrize("form", FORMS)
def test_inspect_describes_quantised_models(form, tmp_path, cli):
    """No operator is missing; one without a kernel is named."""
    onnx.save(quantised(form), tmp_path / "m.onnx")
    code, out, err = cli(f"inspect {tmp_path / 'm.onnx'}")
    assert (code, err) == (0, "") and "missing" not in out and "dense (" in out and "build-engine" in out
    proto = quantised(form)
    quantizer = next(n for n in proto.graph.node if n.input[0] == "x")
    quantizer.op_type = "DynamicQuantizeLinear"
    del quantizer.input[1:]
    onnx.save(proto, tmp_path / "m.onnx")
    out = cli(f"inspect {tmp_path / 'm.onnx'}")[1]
    assert "DynamicQuantizeLinear" in out[out.index("missing") :]
