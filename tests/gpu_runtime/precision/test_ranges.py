"""Values that FP16 cannot hold: found before they happen, stored times a power of two, and never NaN in silence."""

import re
import warnings

import numpy as np
import pytest
from click.testing import CliRunner

import gpu_runtime as gr
from gpu_runtime.cli import program
from gpu_runtime.explain.layer_info import layer_info
from gpu_runtime.explain.report import inspect_text
from gpu_runtime.frontend.importer import read
from gpu_runtime.fusion.fuse import fuse
from gpu_runtime.lowering.lower import lower
from gpu_runtime.precision import execution, ranges
from tests.engines import build, emulated
from tests.ort_budget import budgets
from tests.reference_run import model, node, ort_run
from tests.small_models import small_models


def weights(*shape, scale=1.0, seed=0):
    w = np.random.default_rng(seed).standard_normal(shape) * scale / np.sqrt(np.prod(shape[1:]))
    return w.astype(np.float16).astype(np.float32)


def large(last=()):
    """Convolutions, a residual, a pool, a concat and pointwise operators, in the middle 5 times what FP16 holds."""
    w = {
        "a": weights(16, 8, 3, 3, scale=2000),
        "b": weights(16, 16, 3, 3, scale=1000, seed=1),
        "c": weights(16, 16, 1, 1, seed=2),
        "bias": weights(16, scale=5e3, seed=3),
        "d": weights(8, 32, 1, 1, scale=1e-3, seed=4),
        "one": np.float32([1000.0]),
    }
    nodes = [
        node("Conv", "x a", "p", pads=(1, 1, 1, 1)),
        node("Relu", "p", "q"),
        node("Conv", "q b bias", "r", pads=(1, 1, 1, 1)),
        node("Relu", "r", "s"),
        node("Conv", "s c", "t"),
        node("Add", "t s", "u"),
        node("Relu", "u", "v"),
        node("Add", "v one", "v2"),
        node("MaxPool", "v2", "m", kernel_shape=(2, 2), strides=(2, 2)),
        node("MaxPool", "s", "n", kernel_shape=(2, 2), strides=(2, 2)),
        node("Concat", "m n", "o", axis=1),
        node("Conv", "o d", "z"),
        *last,
    ]
    return model(nodes, {"x": (1, 8, 10, 10)}, (last or nodes)[-1].output[0], w)


def lowered(tmp_path, proto):
    (tmp_path / "m.onnx").write_bytes(proto.SerializeToString())
    return fuse(lower(read(tmp_path / "m.onnx")))


LAST = {
    "conv": (),
    "sigmoid": (node("Sigmoid", "z", "y"),),
    "softmax": (node("Softmax", "z", "y", axis=1),),
}


@pytest.mark.parametrize("name", ["conv", "sigmoid", "softmax"])
def test_a_network_that_would_overflow_is_right(tmp_path, name):
    proto = large(LAST[name])
    engine = build(tmp_path, proto)
    found = engine.plan.range
    assert found.source == "random values from 0 to 1" and found.high[0][1] > 5 * 65504 and not found.stuck
    assert {"s", "o"} <= set(found.exponents) and not {"x", "z", "y"} & set(found.exponents)
    x = {"x": np.random.default_rng(0).random((1, 8, 10, 10), np.float32)}
    with warnings.catch_warnings(), engine.context(device="emulator") as ctx:
        warnings.simplefilter("error")
        (got,) = ctx.run(x).values()
    (expected,) = ort_run(proto, x).values()
    assert np.abs(got - expected).max() < 3e-3 * np.ptp(expected)


def test_powers_of_two_change_nothing_but_the_range(tmp_path):
    """Every stored tensor is its value times 2^e, to the last bit of FP32."""
    network = lowered(tmp_path, large())
    feeds = {"x": np.random.default_rng(1).random((1, 8, 10, 10), np.float32)}
    fitted, found = ranges.fit(network, feeds)
    before, after = ranges.largest(network, feeds), ranges.largest(fitted, feeds)
    assert found.exponents and max(after.values()) <= ranges.HIGH < max(before.values())
    for tensor, value in before.items():
        assert after[tensor] == pytest.approx(value * 2.0 ** found.exponents.get(tensor, 0), rel=1e-6), tensor


def test_what_fits_is_left_alone(tmp_path):
    network = lowered(tmp_path, model([node("Conv", "x w", "y")], {"x": (1, 4, 5, 5)}, "y", {"w": weights(4, 4, 3, 3)}))
    fitted, found = ranges.fit(network)
    assert fitted is network and not found.high and not found.exponents


def test_what_would_fill_the_memory_is_not_run(tmp_path):
    """8 GB of input: planned like any other, but not run on random values without being asked to."""
    network = lowered(tmp_path, model([node("Relu", "x", "y")], {"x": (1, 1, 32768, 65535)}, "y"))
    fitted, found = ranges.fit(network)
    assert fitted is network and found.source == "not checked: 4295 M elements in all tensors; give a calibration input"


def silu(x, y):
    return node("Sigmoid", x, f"{y}_s"), node("Mul", f"{x} {y}_s", y)


LARGE = weights(8, 4, 3, 3, scale=2e4) + 2e4  # results of these weights reach about 2e5
# Networks with a tensor that no power of two can bring into FP16's range: (nodes, weights, FP32 tensors).
# fmt: off
STUCK = {
    "output": ([node("Conv", "x a", "y")], {"a": LARGE}, ["y"]),
    "silu": ([node("Conv", "x a", "p"), *silu("p", "q"), node("Conv", "q b", "y")],
             {"a": LARGE, "b": weights(4, 8, 1, 1, scale=1e-4)}, ["q"]),
    "residuals": (
        [node("Conv", "x a b", "p", pads=(1, 1, 1, 1)), *silu("p", "q"), node("Conv", "q c", "r"), *silu("r", "s"),
         node("Add", "q s", "t"), node("Conv", "t d", "u"), node("Add", "u t", "v"), *silu("v", "w"), node("Conv", "w e", "y")],
        {"a": LARGE, "b": weights(8, scale=1e3), "c": weights(8, 8, 1, 1, scale=3, seed=1), "d": weights(8, 8, 1, 1, seed=2),
         "e": weights(4, 8, 1, 1, scale=1e-5, seed=3)}, ["q", "s", "t", "w"],
    ),
    "transposed": (
        [node("Conv", "x a", "p"), *silu("p", "q"), node("ConvTranspose", "q b", "r", strides=(2, 2)), *silu("r", "s"),
         node("ConvTranspose", "s c", "y", strides=(2, 2), group=2)],
        {"a": LARGE, "b": weights(8, 6, 3, 3, scale=20, seed=1), "c": weights(6, 2, 2, 2, scale=1e-4, seed=2)}, ["q", "s"],
    ),
    "moves": (
        [node("Conv", "x a", "p"), *silu("p", "q"), node("Split", "q", "r s", axis=1), node("Pad", "r pads", "t"),
         node("Slice", "t starts ends axes", "u"), node("Concat", "u s x3", "v", axis=1), *silu("v", "w"),
         node("Slice", "x starts ends axes", "x2"), node("Pad", "x2 back", "x3"), node("Conv", "w b", "y")],
        {"a": LARGE, "b": weights(4, 12, 1, 1, scale=1e-4), "pads": np.int64([0, 0, 1, 0, 0, 0, 0, 0]), "starts": np.int64([1]),
         "ends": np.int64([7]), "axes": np.int64([2]), "back": np.int64([0, 0, 0, 0, 0, 0, 0, -2])}, ["q", "s", "t", "u", "v"],
    ),
    "normalized": (
        [node("Conv", "x a", "p"), node("InstanceNormalization", "p s t", "q"), node("Conv", "q b", "y")],
        {"a": LARGE, "s": weights(8, seed=1), "t": weights(8, seed=2), "b": weights(4, 8, 1, 1, seed=3)}, ["p"],
    ),
    "softmax": ([node("Conv", "x a b", "p"), node("Softmax", "p", "y", axis=1)],
                {"a": weights(8, 4, 3, 3, scale=3), "b": np.full(8, 9e4, np.float32)}, ["p"]),
    "pools": (  # FP32 too: the tensors from which the divisor is computed, which may come near 0
        [node("Conv", "x a", "p"), *silu("p", "q"), node("MaxPool", "q", "r", kernel_shape=(2, 2)), *silu("r", "s"),
         node("AveragePool", "s", "t", kernel_shape=(2, 2)), node("Resize", "t _ scales", "u", mode="linear"),
         *silu("u", "v"), node("Transpose", "v", "w", perm=(0, 1, 3, 2)), *silu("w", "z"),
         node("ReduceL2", "z", "n", axes=(1,)), node("Div", "z n", "m"), node("Conv", "m b", "y")],
        {"a": LARGE, "scales": np.float32([1, 1, 2, 2]), "b": weights(4, 8, 1, 1, seed=1)}, ["q", "r", *"stuvwzn"],
    ),
    "attention": (
        [node("Conv", "x a", "p"), *silu("p", "q"), node("Reshape", "q rows", "r"),
         node("Transpose", "r", "s", perm=(0, 2, 1)), node("MatMul", "s r", "t"), node("Mul", "t small", "u"),
         node("Softmax", "u", "v", axis=-1), node("MatMul", "r v", "w"), node("Reshape", "w image", "z"),
         node("Conv", "z b", "y")],
        {"a": LARGE, "rows": np.int64([1, 8, 36]), "image": np.int64([1, 8, 6, 6]), "small": np.float32([3e-12]),
         "b": weights(4, 8, 1, 1, scale=1e-5, seed=1)}, ["q", "r", "s", "t", "w", "z"],
    ),
    # Ops that would be one launch if the tensor between them were FP16, and siblings of which one cannot be FP16.
    "launches": (
        [node("Conv", "x a", "p"), *silu("p", "q"), node("Conv", "x a2", "p2"), *silu("p2", "q2"),
         node("GlobalAveragePool", "q", "g"), node("Conv", "g c", "h"), *silu("h", "i"), node("Conv", "i d", "j"),
         node("Sigmoid", "j", "k"), node("Mul", "q k", "l"), node("Add", "l q2", "m"), node("Conv", "m b", "y")],
        {"a": LARGE, "a2": weights(8, 4, 3, 3, seed=1), "b": weights(4, 8, 1, 1, scale=1e-4, seed=2),
         "c": weights(8, 8, 1, 1, seed=3) + 1, "d": weights(8, 8, 1, 1, scale=1e-6, seed=4)}, ["q", "g", "i", "l", "m"],
    ),
    "pairs": (  # the second convolution is an op of two decisions: one launch with the first, and the residual
        [node("Conv", "x a", "p"), *silu("p", "q"), node("Conv", "q b", "r", pads=(1, 1, 1, 1)), node("Relu", "r", "s"),
         node("Conv", "s c", "t"), node("Conv", "x d", "u"), node("Add", "t u", "v"), node("Relu", "v", "y")],
        {"a": LARGE, "b": weights(16, 8, 3, 3, scale=1e-4, seed=1), "c": weights(16, 16, 1, 1, seed=2),
         "d": weights(16, 4, 3, 3, seed=3)}, ["q"],
    ),
    "shuffle": (
        [node("Conv", "x a", "p"), *silu("p", "q"), node("Reshape", "q apart", "r"),
         node("Transpose", "r", "s", perm=(0, 2, 1, 3, 4)), node("Reshape", "s image", "t"), node("Split", "t", "u v", axis=1),
         *silu("u", "w"), node("Concat", "w v", "m", axis=1), node("Conv", "m b", "n", group=2), *silu("n", "o"),
         node("Conv", "o c", "y")],
        {"a": LARGE, "apart": np.int64([1, 2, 4, 6, 6]), "image": np.int64([1, 8, 6, 6]), "b": weights(8, 4, 3, 3, seed=1),
         "c": weights(4, 8, 1, 1, scale=1e-4, seed=2)}, ["q", "t", "u", "v", "w", "m", "o"],
    ),
}
# fmt: on
QUICK = ("output", "residuals", "normalized", "softmax")


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in STUCK])
def test_what_cannot_be_scaled_is_fp32(tmp_path, name):
    """Right answers; FP32 tensors only where they must be; every layer in FP32 says why; nothing infinite anywhere."""
    nodes, constants, wide = STUCK[name]
    proto = model(nodes, {"x": (1, 4, 8, 8)}, "y", constants)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine = build(tmp_path, proto)
    found = engine.plan.range
    assert {t for t, _ in found.single if " (" not in t} == set(wide) and not found.stuck
    x = {"x": np.random.default_rng(0).random((1, 4, 8, 8), np.float32)}
    with engine.context(device="emulator", poison=True) as ctx, warnings.catch_warnings():
        warnings.simplefilter("error")
        (got,) = ctx.run(x).values()
        assert not ctx.nonfinite()
    with np.errstate(over="ignore"):
        budget = budgets(tmp_path / "m.onnx", x)["y"]
    assert np.abs(got - budget.reference).max() < 3e-3 * np.ptp(budget.reference)
    if np.isfinite(budget.allowed):  # else FP16 storage of 16 times the range overflows too
        budget.check(got, name)


@pytest.mark.parametrize("checked", [True, False])
def test_weights_beyond_fp16(tmp_path, monkeypatch, checked):
    """Folded scales of 1e6: in weights times a power of two where the output may be stored so, else in FP32. Also where the
    network is not run to see what it reaches."""
    if not checked:
        monkeypatch.setattr(execution, "QUICK", execution.Budget(10, 10))
        monkeypatch.setattr(execution, "MOST", execution.Budget(10, 10))
    proto = model(
        [
            node("Conv", "x a", "p"),
            node("Mul", "p s", "q"),
            node("Relu", "q", "r"),
            node("Conv", "r b", "y"),
            node("Conv", "x c", "z"),
            node("Mul", "z s", "w"),
            *silu("w", "v"),
        ],
        {"x": (1, 4, 6, 6)},
        "y v",
        {"a": weights(8, 4, 3, 3), "b": weights(4, 8, 1, 1, scale=1e-5), "c": weights(4, 4, 1, 1), "s": np.float32([1e6])},
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", ".*range is not checked")  # as it is said where nothing was run
        engine = build(tmp_path, proto)
    found = engine.plan.range
    ((tensor, why),) = found.single
    assert tensor == "v" and found.exponents.keys() == {"r"} and found.source.startswith("not") != checked
    assert re.fullmatch(
        r"'v' is computed with weights of z \+ v_s \+ v that reach 1\.\d+e\+06; FP16's maximum is 65504, and no power of two "
        "can scale them to fit: it is an output of the network",
        why,
    )
    x = {"x": np.random.default_rng(0).random((1, 4, 6, 6), np.float32)}
    with engine.context(device="emulator", poison=True) as ctx, warnings.catch_warnings():
        warnings.simplefilter("error")
        got = ctx.run(x)
    for name, expected in ort_run(proto, x).items():
        assert np.abs(got[name] - expected).max() < 2e-3 * np.ptp(expected), name


MODELS = small_models()
ODD = (1, 11)  # dilated SAME pads, which onnxruntime refuses; a Cast to FP16 of the model's own


@pytest.mark.parametrize("i", [i for i in range(len(MODELS)) if i not in ODD], ids=lambda i: MODELS[i].graph.node[0].op_type)
def test_every_kind_of_node_on_values_beyond_fp16(tmp_path, i):
    """Inputs, and what follows from them, some 1e5 times as large as usual."""
    rng, proto = np.random.default_rng(i), MODELS[i]
    shapes = {t.name: [d.dim_value for d in t.type.tensor_type.shape.dim] for t in proto.graph.input}
    feeds = {name: (1e5 * rng.standard_normal(shape)).astype(np.float32) for name, shape in shapes.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", ".* comes from integers")
        engine = build(tmp_path, proto, calibration=feeds)
        got = emulated(engine, feeds)
    assert {t for t, _ in engine.plan.range.single} >= set(shapes)
    for name, expected in ort_run(proto, feeds).items():
        assert np.abs(got[name] - expected).max() <= 2e-3 * max(np.ptp(expected), np.abs(expected).max() / 3), name


def test_fp32_layers_say_why(tmp_path):
    """In TensorRT's words for formats, in layer information, in the plan's text, and in the sparsity log of every mode."""
    nodes, constants, _ = STUCK["silu"]
    proto = model(nodes, {"x": (1, 4, 8, 8)}, "y", constants)
    for mode in ("disable", "force"):
        plan = build(tmp_path, proto, sparsity=mode).record
        first, last = layer_info(plan)["Layers"]  # they read the input and write the output as these are, without a copy
        why = first["PrecisionReason"]
        assert re.fullmatch(
            r"'q' reaches \d+ on random values from 0 to 1; FP16's maximum is 65504, and no power of two can scale it to fit: "
            r"p \+ q_s \+ q computes silu",
            why,
        )
        assert last["PrecisionReason"] == why
        assert (first["Weights"]["Type"], last["Weights"]["Type"]) == ("Half", "Float")  # the tensor's writer, then its reader
        assert first["Outputs"][0]["Format"] == "Row major linear FP32" and first["Outputs"][0]["Datatype"] == "Float"
        assert first["Inputs"][0]["Datatype"] == last["Outputs"][0]["Datatype"] == "Float"
        told = " ".join(inspect_text(plan).split())
        assert "FP32 2 layers: p + q_s + q, y 'q' reaches" in told
        assert f"y: Runs in FP32 on CUDA cores, where zeros gain nothing: {why}." in told
        row = plan.sparsity.rows[1]
        assert (row.verdict, row.reason, row.best_sparse) == ("not_eligible", "no_sparse_tactic", None)
        assert len(plan.sparsity.eligible) == (mode == "force")
    told = str(gr.plan(tmp_path / "m.onnx", ["a100", "l4"]))
    assert re.search(r"^y +FP32 +FP32$", told, re.MULTILINE)


@pytest.mark.slow
def test_sums_beyond_fp16_come_from_tensor_cores(tmp_path):
    """Only what reads them needs CUDA cores; 2:4 weights are as good as others."""
    proto = model(
        [node("Conv", "x a b", "p", pads=(1, 1, 1, 1)), *silu("p", "q"), node("Conv", "q c", "y")],
        {"x": (1, 256, 14, 14)},
        "y",
        {"a": weights(256, 256, 3, 3, scale=3e3) + 3e3, "b": weights(256), "c": weights(8, 256, 1, 1, scale=1e-6)},
    )
    x = {"x": np.random.default_rng(0).random((1, 256, 14, 14), np.float32)}
    engine = build(tmp_path, proto)
    layers = {layer.name: layer for layer in engine.plan.layers}
    assert layers["p + q_s + q"].tactic_name.startswith("conv_dense") and layers["y"].tactic_name.startswith("conv_fp32")
    assert str(layers["p + q_s + q"].outputs[0].format) == str(layers["y"].inputs[0].format) == "fp32:chw"
    (got,), (expected,) = emulated(engine, x).values(), ort_run(proto, x).values()
    assert np.abs(got - expected).max() < 2e-3 * np.ptp(expected)
    row = build(tmp_path, proto, sparsity="force").record.sparsity.rows[0]
    assert row.best_sparse.tactic.kernel == "conv_sparse24_sm90" and str(row.best_sparse.out) == "fp32:chw"


@pytest.mark.parametrize("layout", ["chw", "hwc"])
def test_sums_beyond_fp16_are_stored_as_the_caller_wants_them(tmp_path, layout):
    """In one launch on tensor cores, without a reformat behind it."""
    proto = model(STUCK["output"][0], {"x": (1, 4, 8, 8)}, "y", STUCK["output"][1])
    (layer,) = build(tmp_path, proto, output_formats=f"fp32:{layout}").plan.layers
    assert "_hmma_" in layer.tactic_name and str(layer.outputs[0].format) == f"fp32:{layout}"


def test_an_output_that_is_asked_for_in_fp16_is_a_warning(tmp_path):
    proto = model(STUCK["output"][0], {"x": (1, 4, 8, 8)}, "y", STUCK["output"][1])
    with pytest.warns(RuntimeWarning, match="m: 'y' reaches .* it is an output of the network: request this output as fp32"):
        engine = build(tmp_path, proto, output_formats="fp16:hwc8")
    with engine.context(device="emulator") as ctx, pytest.warns(RuntimeWarning, match="first written by Reformatting CopyNode"):
        ctx.run({"x": np.ones((1, 4, 8, 8), np.float32)})


def test_inputs_beyond_fp16(tmp_path):
    """A scan of 16-bit values: the calibration input tells."""
    proto = model(
        [node("Conv", "x w", "a", strides=(2, 2)), node("Relu", "a", "y")],
        {"x": (1, 1, 8, 8)},
        "y",
        {"w": weights(4, 1, 3, 3, scale=1e-3)},
    )
    x = {"x": np.random.default_rng(0).integers(0, 1 << 18, (1, 1, 8, 8)).astype(np.float32)}
    engine = build(tmp_path, proto, calibration=x)
    assert [t for t, _ in engine.plan.range.single] == ["x"]
    assert str(engine.plan.layers[0].inputs[0].format) == "fp32:chw"
    with engine.context(device="emulator") as ctx, warnings.catch_warnings():
        warnings.simplefilter("error")
        (got,) = ctx.run(x).values()
    (expected,) = ort_run(proto, x).values()
    assert np.abs(got - expected).max() < 1e-3 * np.ptp(expected)


def test_an_overflow_that_the_outputs_hide_is_named(tmp_path):
    """100 * 4 * 400 is no FP16 number; HardSigmoid makes 1 of it."""
    proto = model(
        [node("Conv", "x w", "a"), node("MaxPool", "a", "b", kernel_shape=[2, 2]), node("HardSigmoid", "b", "y")],
        {"x": (1, 4, 5, 5)},
        "y",
        {"w": np.full((4, 4, 1, 1), 100, np.float32)},
    )
    engine, feeds = build(tmp_path, proto), {"x": np.full((1, 4, 5, 5), 400, np.float32)}
    with engine.context(device="emulator") as ctx:
        with pytest.warns(RuntimeWarning, match="layers hold infinite values or NaN, first written by a, b"):
            assert (ctx.run(feeds)["y"] == 1).all()
        assert ctx.nonfinite() == ["a", "b"]
        assert ctx.run({"x": np.zeros((1, 4, 5, 5), np.float32)})["y"].max() < 1 and not ctx.nonfinite()
    engine.save(tmp_path / "m.engine")
    np.save(tmp_path / "x.npy", feeds["x"])
    files = ["--input", f"x={tmp_path / 'x.npy'}", "--output", str(tmp_path / "y.npz")]
    ran = CliRunner().invoke(program, ["run", str(tmp_path / "m.engine"), *files, "--emulate"])
    assert ran.exit_code == 0 and "2 layers wrote infinite values or NaN (FP16's maximum is 65504): a, b; " in ran.output
    assert "build with --calibration=FILE.npz of typical inputs" in ran.output


def test_a_calibration_input_decides(tmp_path):
    proto = model(
        [node("Conv", "x w", "a"), node("Relu", "a", "b"), node("Conv", "b v", "y")],
        {"x": (1, 4, 5, 5)},
        "y",
        {"w": np.full((4, 4, 1, 1), 100, np.float32), "v": np.full((4, 4, 1, 1), 1e-3, np.float32)},
    )
    bright = {"x": np.full((1, 4, 5, 5), 255, np.float32)}
    assert not build(tmp_path, proto).plan.range.exponents
    engine = build(tmp_path, proto, calibration=bright)
    assert engine.plan.range.source == "calibration input" and engine.plan.range.exponents == {"b": -3}
    with engine.context(device="emulator") as ctx:
        assert np.allclose(ctx.run(bright)["y"], 408, rtol=2e-3)
    with pytest.raises(ValueError, match="calibration: expected an array for each input, 'x', got 'z'"):
        build(tmp_path, proto, calibration={"z": np.zeros(3)})


def test_what_is_too_large_to_be_run_is_not_and_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(execution, "QUICK", execution.Budget(10, 10))
    network = lowered(tmp_path, large())
    assert ranges.fit(network)[1].source == "random values from 0 to 1"  # slower, but it can be run
    monkeypatch.setattr(execution, "MOST", execution.Budget(10, 10))
    fitted, found = ranges.fit(network)
    assert fitted is network and found.source.startswith("not checked: 0.0 G multiplications")
    with pytest.warns(RuntimeWarning, match="FP16's range is not checked: 0.0 G multiplications; give a calib"):
        build(tmp_path, large())
