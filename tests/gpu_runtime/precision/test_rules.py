"""Integers, coordinates and what decides keep FP32: engines beside onnxruntime from the heads' raw outputs on."""

import warnings

import numpy as np
import onnx
import pytest

import gpu_runtime as gr
from gpu_runtime.precision import rules
from tests.engines import build, emulated
from tests.heads import draw
from tests.reference_run import model, network, node, ort_run

OWN = 2.0**-19  # of the image: two thousandths of a pixel at 1,024


def check_head(folder, seed):
    proto, feeds, size = draw(seed)
    got = emulated(build(folder, proto), feeds)
    for name, y in ort_run(proto, feeds, optimized=False).items():
        if y.dtype.kind == "f":
            assert np.abs(got[name] - y).max() <= OWN * size, (seed, name)
        else:
            np.testing.assert_array_equal(got[name], y, f"{seed} {name}")


@pytest.mark.parametrize("seed", range(7))
def test_each_kind_of_head(seed, tmp_path):
    check_head(tmp_path, seed)


@pytest.mark.full
def test_sixty_heads(tmp_path):
    for seed in range(7, 67):
        check_head(tmp_path, seed)


@pytest.mark.long
@pytest.mark.parametrize("part", range(20))
def test_two_thousand_heads(part, tmp_path):
    for seed in range(100 + part, 2100, 20):
        check_head(tmp_path, seed)


def with_integers(proto, **types):
    """The model with other types of inputs or outputs than FP32."""
    for v in (*proto.graph.input, *proto.graph.output):
        v.type.tensor_type.elem_type = types.get(v.name, v.type.tensor_type.elem_type)
    del proto.graph.value_info[:]
    return proto


def fp32_of(proto) -> set[str]:
    """The tensors that rules put into FP32."""
    return set(rules.keep(network(proto))[1])


def in_fp32(engine) -> list[str]:
    """The convolutions that read FP32 tensors from inside the network."""
    convolutions = [layer for layer in engine.plan.layers if layer.tactic and layer.tactic.kernel.startswith("conv")]
    return [layer.op_output for layer in convolutions[1:] if layer.inputs[0].format.dtype == "fp32"]


RNG = np.random.default_rng(0)
W = {name: RNG.normal(0, 0.3, (8, 8, 1, 1)).astype(np.float32) for name in ("w", "v", "u")}


def test_integers_are_exact_and_those_beyond_fp32_are_named(tmp_path):
    nodes = [node("Cast", "n", "f", to=1), node("Add", "f x", "y")]
    proto = with_integers(model(nodes, {"n": (1, 6), "x": (1, 6)}, "y"), n=onnx.TensorProto.INT64)
    feeds = {"n": np.int64([[0, 2049, 4097, 99_999, -70_001, 2**24]]), "x": np.float32([[1, 2, -3, 4, 0.5, -1]])}
    with pytest.warns(RuntimeWarning, match=r"'f' comes from integers \(f\): FP32 rounds those above 2\^24"):
        engine = build(tmp_path, proto)
    np.testing.assert_array_equal(emulated(engine, feeds)["y"], ort_run(proto, feeds)["y"])


def test_indices_that_fp32_holds_warn_of_nothing(tmp_path):
    nodes = [node("ArgMax", "x", "i", axis=1, keepdims=1), node("Cast", "i", "f", to=1), node("Sqrt", "f", "y")]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine = build(tmp_path, model(nodes, {"x": (1, 5000)}, "y"))
    x = np.zeros((1, 5000), np.float32)
    x[0, 4099] = 1
    assert emulated(engine, {"x": x})["y"].item() == pytest.approx(4099**0.5, rel=1e-6)


def test_moved_values_keep_their_bits(tmp_path):
    nodes = [node("Transpose", "x", "t", perm=[0, 2, 1]), node("Reshape", "t shape", "y")]
    proto = model(nodes, {"x": (1, 3, 4)}, "y", {"shape": np.int64([2, 6])})
    x = np.float32([2049, 0.1, 1e-9, 3e38, -70000, 1 / 3, *range(5001, 5007)]).reshape(1, 3, 4)
    np.testing.assert_array_equal(emulated(build(tmp_path, proto), {"x": x})["y"], ort_run(proto, {"x": x})["y"])


def test_an_argmax_takes_the_sums_of_its_convolution_and_no_more():
    nodes = [node("Conv", "x w", "a"), node("Relu", "a", "b"), node("Conv", "b v", "c"), node("ArgMax", "c", "y", axis=1)]
    proto = with_integers(model(nodes, {"x": (1, 8, 4, 4)}, "y", W), y=onnx.TensorProto.INT64)
    assert fp32_of(proto) == {"c"}
    nodes += [node("Conv", "c u", "z")]
    proto = with_integers(model(nodes, {"x": (1, 8, 4, 4)}, "y z", W), y=onnx.TensorProto.INT64)
    assert not fp32_of(proto), "a convolution reads c, too"


def test_a_tail_ends_where_tensor_cores_read():
    """y = f(s) + b with s = sigmoid(c), which the convolution computes: b is not of the tail, since a convolution reads it."""
    nodes = [node("Conv", "x w", "a"), node("Relu", "a", "b"), node("Conv", "b v", "c"), node("Sigmoid", "c", "s")]
    nodes += [node("Mul", "s s", "q"), node("Exp", "q", "e"), node("Add", "e b", "y")]
    assert fp32_of(model(nodes, {"x": (1, 8, 4, 4)}, "y", W)) >= {"s", "y"}
    assert not fp32_of(model(nodes, {"x": (1, 8, 4, 4)}, "y", W)) & {"a", "b"}
    halves = {name: w.astype(np.float16) for name, w in W.items()}
    assert not fp32_of(model(nodes, {"x": (1, 8, 4, 4)}, "y", halves, dtype=np.float16))


def test_a_view_has_the_type_of_what_it_views(tmp_path):
    """b is FP16, since a convolution reads it, so its views are that, though one leaves the network and one decides."""
    nodes = [node("Conv", "x w", "a"), node("Relu", "a", "b"), node("Reshape", "b row", "y"), node("Conv", "b v", "z")]
    nodes += [node("ArgMax", "y", "i", axis=1)]
    proto = model(nodes, {"x": (1, 8, 4, 4)}, "y z i", {**W, "row": np.int64([1, -1])})
    engine = build(tmp_path, with_integers(proto, i=onnx.TensorProto.INT64))
    assert not {"b", "y"} & set(dict(engine.plan.range.single))


def test_whole_numbers_that_fp16_holds_decide_without_fp32():
    nodes = [node("Conv", "x w", "a"), node("Clip", "a low high", "b"), node("Round", "b", "r"), node("Equal", "r one", "e")]
    nodes += [node("Cast", "e", "f", to=1), node("Conv", "f v", "y")]
    weights = {**W, "low": np.float32(0), "high": np.float32(9), "one": np.float32(1)}
    assert "r" not in fp32_of(model(nodes, {"x": (1, 8, 4, 4)}, "y", weights))


LARGE = {name: RNG.normal(0, 0.1, (64, 64, 1, 1)).astype(np.float32) for name in ("w", "v", "u")}  # not fast in FP32


@pytest.mark.parametrize(
    "first", [[node("Sub", "x k", "a")], [node("Sub", "x z", "a")], [node("InstanceNormalization", "x s b", "a")]]
)
def test_differences_of_inputs_are_of_fp32(first, tmp_path):
    """Values around 3,000, which FP16 stores in steps of 2."""
    weights = {"k": np.float32(3000), "w": W["w"], "s": np.ones(8, np.float32), "b": np.zeros(8, np.float32)}
    inputs = {"x": (1, 8, 6, 6)} | ({"z": (1, 8, 6, 6)} if "z" in first[0].input else {})
    proto = model([*first, node("Conv", "a w", "y")], inputs, "y", weights)
    feeds = {name: (3000 + RNG.uniform(-1, 1, shape)).astype(np.float32) for name, shape in inputs.items()}
    got, y = emulated(build(tmp_path, proto), feeds)["y"], ort_run(proto, feeds)["y"]
    assert np.abs(got - y).max() < 2e-3 * np.abs(y).max()


@pytest.mark.parametrize("squares", ["Sub m q", "Sub q m"])
def test_a_variance_of_mean_squares_is_of_fp32(squares, tmp_path):
    """E[x^2] - E[x]^2 of values around 4 +- 0.5, as JAX's LayerNorm has it: FP16 statistics would be 3 % off."""
    nodes = [
        node("Conv", "x w b", "c"),
        *(node("Mul", "c c", "cc"), node("ReduceMean", "cc", "m", axes=[1]), node("ReduceMean", "c", "e", axes=[1])),
        *(node("Mul", "e e", "q"), node(*squares.split(" ", 1), "v"), node("Abs", "v", "y")),
    ]
    w, b = np.eye(64, dtype=np.float32)[:, :, None, None] * 0.5, np.full(64, 4, np.float32)
    proto = model(nodes, {"x": (1, 64, 4, 8)}, "y", {"w": w, "b": b})
    found = fp32_of(proto)
    assert {"m", "e"} <= found and not found & {"c", "cc"}
    feeds = {"x": np.random.default_rng(1).normal(size=(1, 64, 4, 8)).astype(np.float32)}
    got, y = emulated(build(tmp_path, proto), feeds)["y"], ort_run(proto, feeds)["y"]
    assert np.abs(got / y - 1).max() < 6e-3


def test_a_mask_is_no_difference():
    nodes = [node("Conv", "x w", "a"), node("Add", "a mask", "b"), node("Softmax", "b", "s", axis=3), node("Conv", "s v", "y")]
    for value in (-100, -1e4, -1e9):
        mask = np.where(np.eye(4), 0, value).astype(np.float32)
        assert not fp32_of(model(nodes, {"x": (1, 8, 4, 4)}, "y", {**W, "mask": mask})), value


CHAIN = [node("Conv", "x w", "a", name="first"), node("Relu", "a", "b"), node("Conv", "b v", "c", name="/head/second")]
CHAIN += [node("Tanh", "c", "d"), node("Conv", "d u", "y", name="third")]


@pytest.mark.parametrize("name, count", [("third", 1), ("/head/*", 1), ("y", 1), ("*", 2)])
def test_operators_that_a_user_wants_in_fp32(name, count, tmp_path):
    proto = model(CHAIN, {"x": (1, 64, 14, 14)}, "y", LARGE)
    engine = build(tmp_path, proto, precisions={name: "fp32"})
    assert len(in_fp32(engine)) == count
    x = RNG.uniform(-1, 1, (1, 64, 14, 14)).astype(np.float32)
    got, y = emulated(engine, {"x": x})["y"], ort_run(proto, {"x": x})["y"]
    assert np.abs(got - y).max() < (2e-6 if name == "*" else 2e-3) * np.abs(y).max()


def test_a_result_alone_is_fp32(tmp_path):
    engine = build(tmp_path, model(CHAIN, {"x": (1, 64, 14, 14)}, "y", LARGE), precisions={"/head/second": "fp32_output"})
    assert not in_fp32(engine)
    assert dict(engine.plan.range.single)["d"] == "/head/second:fp32_output was asked for"


def test_names_with_brackets_and_views_are_obeyed(tmp_path):
    nodes = [node("Conv", "x w", "a", name="stem[0]"), node("Reshape", "a shape", "b", name="view"), node("Tanh", "b", "y")]
    proto = model(nodes, {"x": (1, 8, 4, 4)}, "y", {"w": W["w"], "shape": np.int64([1, 16, 4, 2])})
    for name in ("stem[0]", "view"):
        types = rules.keep(network(proto), {name: "fp32_output"})[0].types
        assert types and all(t.dtype == "fp32" for t in types.values()), name


@pytest.mark.parametrize(
    "given, message",
    [
        ({"secnd": "fp32"}, "precisions: no operator or output is named 'secnd'; the nearest names are /head/second"),
        ({"third": "int8"}, "precisions: expected names or patterns and one of fp32, fp32_output, fp16 each, or None, got"),
        ("third", "precisions: expected names"),
    ],
)
def test_what_cannot_be_is_refused(given, message, tmp_path):
    with pytest.raises((ValueError, TypeError), match=message):
        build(tmp_path, model(CHAIN, {"x": (1, 64, 14, 14)}, "y", LARGE), precisions=given)


def test_the_command_line_names_operators_as_trtexec_does(tmp_path, monkeypatch, cli):
    monkeypatch.chdir(tmp_path)
    onnx.save(model(CHAIN, {"x": (1, 64, 14, 14)}, "y", LARGE), "m.onnx")
    line = "build m.onnx --device=h200 -o m.engine --layerPrecisions=/head/*:fp32,first:fp16 --layerOutputTypes=third:fp32"
    assert cli(line)[0] == 0
    assert "d" in in_fp32(gr.load("m.engine"))
    code, _, err = cli(f"{line} --precisionConstraints=none")
    assert code == 0 and "ignored: --layerPrecisions and --layerOutputTypes, as --precisionConstraints=none asks" in err
    assert not in_fp32(gr.load("m.engine"))
    code, _, err = cli("build m.onnx --layerPrecisions=third:int8")
    assert code == 2 and "--layerPrecisions: expected NAME:TYPE[,NAME:TYPE...], TYPE fp32 or fp16, got 'third:int8'" in err
