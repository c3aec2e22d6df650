"""Operators computed by library functions: beside onnxruntime, with integers and truth values exact, inside engines."""

import itertools

import cupy
import numpy as np
import onnx
import pytest
from onnx import TensorProto

import gpu_runtime as gr
from cuda_kernels.device import named
from cuda_kernels.launch import Emulated
from gpu_runtime.errors import ModelError
from gpu_runtime.explain import report
from gpu_runtime.runtime.plan_record import LaunchStep
from tactics.candidates import candidates
from tactics.predict import predict
from tactics.problems import codec
from tactics.problems.array_functions import FUNCTIONS, bound
from tactics.problems.problem import LibraryProblem
from tests.engines import build, emulated, judge
from tests.reference_run import check_against_ort, model, network, node, ort_run, relative_error, run

X = (2, 6, 5, 7)
INT, BOOL = TensorProto.INT64, TensorProto.BOOL
DTYPES = {TensorProto.FLOAT: np.float32, INT: np.int64, BOOL: np.bool_}

# name -> (node, {input: (shape, type or FP32)}, {constant: array}, opset, type of the output)
# fmt: off
CASES = {
    "lrn": (node("LRN", "x", "y", size=5, alpha=0.5, beta=0.75, bias=2.0), {"x": X}, {}),
    "lp_pool": (node("LpPool", "x", "y", kernel_shape=[3, 2], strides=[2, 1], pads=[1, 0, 1, 1]), {"x": X}, {}),
    "lp_pool_1": (node("LpPool", "x", "y", kernel_shape=[3, 3], p=1, dilations=[1, 2]), {"x": X}, {}, 18),
    "lp_pool_ceil": (node("LpPool", "x", "y", kernel_shape=[2, 2], strides=[2, 2], ceil_mode=1), {"x": X}, {}, 18),
    "lp_pool_same": (node("LpPool", "x", "y", kernel_shape=[3, 3], strides=[2, 2], auto_pad="SAME_UPPER"), {"x": X}, {}),
    "lp_pool_same_low": (node("LpPool", "x", "y", kernel_shape=[2, 2], strides=[2, 2], auto_pad="SAME_LOWER"), {"x": X}, {}),
    "lp_pool_rank_3": (node("LpPool", "x", "y", kernel_shape=[3], p=3), {"x": (2, 4, 9)}, {}),
    "global_lp_pool": (node("GlobalLpPool", "x", "y", p=3), {"x": X}, {}),
    "lp_normalization": (node("LpNormalization", "x", "y", axis=1), {"x": X}, {}),
    "lp_normalization_1": (node("LpNormalization", "x", "y", axis=-1, p=1), {"x": X}, {}),
    "hardmax": (node("Hardmax", "x", "y", axis=1), {"x": X}, {}),
    "shrink": (node("Shrink", "x", "y", lambd=0.4, bias=0.2), {"x": X}, {}),
    "arg_max": (node("ArgMax", "x", "y", axis=1), {"x": X}, {}, 17, INT),
    "arg_max_last": (node("ArgMax", "x", "y", axis=-1, keepdims=0, select_last_index=1), {"x": X}, {}, 17, INT),
    "arg_min": (node("ArgMin", "x", "y", axis=2, keepdims=0), {"x": X}, {}, 17, INT),
    "top_k_values": (node("TopK", "x k", "y i"), {"x": X}, {"k": np.int64([3])}),
    "top_k_indices": (node("TopK", "x k", "v y", axis=1, name="y"), {"x": X}, {"k": np.int64([4])}, 17, INT),
    "top_k_smallest": (node("TopK", "x k", "v y", axis=2, largest=0, name="y"), {"x": X}, {"k": np.int64([5])}, 17, INT),
    "top_k_attribute": (node("TopK", "x", "y i", k=2, axis=1), {"x": X}, {}, 9),
    "where": (node("Where", "c x z", "y"), {"c": (X, BOOL), "x": X, "z": (6, 1, 7)}, {}),
    "where_constant": (node("Where", "c x z", "y"), {"c": ((5, 1), BOOL), "x": X}, {"z": np.float32(-np.inf)}),
    **{f"{op}": (node(op, "x z", "y"), {"x": X, "z": (5, 7)}, {}, 17, BOOL)
       for op in ("Equal", "Greater", "Less", "GreaterOrEqual", "LessOrEqual")},
    **{f"{op}": (node(op, "x z", "y"), {"x": (X, BOOL), "z": ((5, 7), BOOL)}, {}, 17, BOOL) for op in ("And", "Or", "Xor")},
    "equal_integers": (node("Equal", "x z", "y"), {"x": (X, INT)}, {"z": np.int64(1)}, 17, BOOL),
    "not": (node("Not", "x", "y"), {"x": (X, BOOL)}, {}, 17, BOOL),
    "is_nan": (node("IsNaN", "x", "y"), {"x": X}, {}, 17, BOOL),
    "is_inf": (node("IsInf", "x", "y", detect_negative=0), {"x": X}, {}, 17, BOOL),
    "cast_to_bool": (node("Cast", "x", "y", to=BOOL), {"x": X}, {}, 17, BOOL),
    "cast_to_integer": (node("Cast", "x", "y", to=INT), {"x": X}, {}, 17, INT),
    "cast_from_bool": (node("Cast", "x", "y", to=1), {"x": (X, BOOL)}, {}),
    "add_integers": (node("Add", "x z", "y"), {"x": (X, INT)}, {"z": np.int64([[5]])}, 17, INT),
    "identity_of_integers": (node("Identity", "x", "y"), {"x": (X, INT)}, {}, 17, INT),
    "squeeze_integers": (node("Squeeze", "x a", "y"), {"x": ((2, 1, 3, 4), INT)}, {"a": np.int64([1])}, 17, INT),
    "div_integers": (node("Div", "x z", "y"), {"x": (X, INT)}, {"z": np.int64(-3)}, 17, INT),
    "concat_integers": (node("Concat", "x z k", "y", axis=1), {"x": (X, INT), "z": ((2, 3, 5, 7), INT)},
                        {"k": np.full((2, 1, 5, 7), 4)}, 17, INT),
    "slice_integers": (node("Slice", "x s e a t", "y"), {"x": (X, INT)},
                       {"s": np.int64([4, 0]), "e": np.int64([-99, 5]), "a": np.int64([-3, 3]), "t": np.int64([-2, 2])},
                       17, INT),
    "expand_integers": (node("Expand", "x s", "y"), {"x": ((6, 1, 7), INT)}, {"s": np.int64([2, 6, 5, 1])}, 17, INT),
    "tile_integers": (node("Tile", "x r", "y"), {"x": ((2, 3), INT)}, {"r": np.int64([2, 3])}, 17, INT),
    "transpose_integers": (node("Transpose", "x", "y", perm=[0, 2, 3, 1]), {"x": (X, INT)}, {}, 17, INT),
    **{f"{op}_integers": (node(op, "x a", "y", keepdims=0), {"x": (X, INT)}, {"a": np.int64([1, -1])}, 18, INT)
       for op in ("ReduceMax", "ReduceMin", "ReduceProd", "ReduceSum")},
    "reduce_all_integers": (node("ReduceSum", "x", "y"), {"x": (X, INT)}, {}, 17, INT),
    "reduce_no_integers": (node("ReduceSum", "x", "y", noop_with_empty_axes=1), {"x": (X, INT)}, {}, 17, INT),
    "reduce_integers_by_attribute": (node("ReduceMax", "x", "y", axes=[2]), {"x": (X, INT)}, {}, 13, INT),
    "split_integers": (node("Split", "x s", "u y", axis=-1, name="y"), {"x": (X, INT)}, {"s": np.int64([3, 4])}, 17, INT),
    "clip_integers": (node("Clip", "x lo", "y"), {"x": (X, INT)}, {"lo": np.int64(1)}, 17, INT),
    "sign_integers": (node("Sign", "x", "y"), {"x": (X, INT)}, {}, 17, INT),
    "pow_integers": (node("Pow", "x z", "y"), {"x": (X, INT), "z": ((5, 7), INT)}, {}, 17, INT),
    "pow_of_integers": (node("Pow", "x z", "y"), {"x": (X, INT)}, {"z": np.float32(1.5)}, 17, INT),
    **{f"max_pool_indices_{order}": (
        node("MaxPool", "x", "v y", kernel_shape=[3, 2], strides=[2, 1], pads=[1, 0, 1, 1], dilations=[1, 2], ceil_mode=1,
             storage_order=order, name="y"), {"x": X}, {}, 17, INT) for order in (0, 1)},
    "max_pool_indices_of_rank_3": (node("MaxPool", "x", "v y", kernel_shape=[4], auto_pad="SAME_LOWER", strides=[3], name="y"),
                                   {"x": (2, 4, 9)}, {}, 17, INT),
    "scalar": (node("Where", "c x z", "y"), {"c": ((), BOOL), "x": ()}, {"z": np.float32(2)}),
    "gather_integers": (node("Gather", "x i", "y", axis=1), {"x": (X, INT)}, {"i": np.int64([3, -1])}, 17, INT),
    "gather": (node("Gather", "x i", "y", axis=1), {"x": X, "i": ((2, 2), INT)}, {}),
    "gather_elements": (node("GatherElements", "x i", "y", axis=2), {"x": X, "i": ((2, 6, 3, 7), INT)}, {}),
    "gather_nd": (node("GatherND", "x i", "y"), {"x": X, "i": ((3, 2), INT)}, {}),
    "gather_nd_batch": (node("GatherND", "x i", "y", batch_dims=1), {"x": X, "i": ((2, 4, 2), INT)}, {}),
    **{f"scatter_elements_{how}": (node("ScatterElements", "x i u", "y", axis=1, reduction=how),
                                   {"x": X, "i": ((2, 3, 5, 2), INT), "u": (2, 3, 5, 2)}, {}, 18)
       for how in ("add", "max", "min")},
    "scatter_elements": (node("ScatterElements", "x i u", "y", axis=-3), {"x": X, "u": (1, 2, 3, 4)},
                         {"i": np.tile(np.int64([[[3]], [[-1]]]), (1, 1, 3, 4))}),
    "scatter_integers": (node("ScatterElements", "x i u", "y"), {"x": (X, INT), "u": ((1, 2, 2, 2), INT)},
                         {"i": np.ones((1, 2, 2, 2), np.int64)}, 17, INT),
    "scatter_nd": (node("ScatterND", "x i u", "y"), {"x": X, "u": (2, 5, 7)}, {"i": np.int64([[0, -1], [1, 2]])}),
    "scatter_nd_constant": (node("ScatterND", "x i u", "y"), {"u": (1, 2, 7)},
                            {"x": np.ones(X, np.float32), "i": np.int64([[[0, 5, 1], [1, 0, -2]]])}),
    "scatter_nd_added": (node("ScatterND", "x i u", "y", reduction="add"), {"x": X, "i": ((4, 2), INT), "u": (4, 5, 7)},
                         {}, 18),
    "conv_depthwise": (node("Conv", "x w", "y", group=6), {"x": X, "w": (6, 1, 3, 4)}, {}),
    "conv_grouped": (node("Conv", "x w b", "y", group=2, strides=[2, 1], dilations=[1, 2], pads=[1, 0, 2, 3]),
                     {"x": X, "w": (4, 3, 3, 2), "b": (4,)}, {}),
    **{f"conv_{pad}": (node("Conv", "x w", "y", auto_pad=pad, strides=[2, 3], kernel_shape=[2, 3]),
                       {"x": X, "w": (4, 6, 2, 3)}, {})
       for pad in ("SAME_UPPER", "SAME_LOWER", "VALID")},
    "conv_rank_3": (node("Conv", "x w", "y", pads=[1, 1]), {"x": (2, 4, 9), "w": (3, 4, 3)}, {}),
    "conv_volume": (node("Conv", "x w", "y"), {"x": (1, 2, 4, 5, 3), "w": (3, 2, 2, 3, 1)}, {}),
    "conv_of_a_constant": (node("Conv", "x w", "y"), {"w": (2, 6, 3, 3)}, {"x": np.ones(X, np.float32)}),
    "conv_computed_bias": (node("Conv", "x w b", "y"), {"x": X, "b": (3,)}, {"w": np.ones((3, 6, 2, 2), np.float32)}),
    "cum_sum": (node("CumSum", "x a", "y", exclusive=1, reverse=1), {"x": X}, {"a": np.int64(1)}),
    "mod": (node("Mod", "x z", "y", fmod=1), {"x": X}, {"z": np.float32(0.3)}),
    **{f"{op}": (node(op, "x", "y"), {"x": X}, {}) for op in ("Sin", "Cos", "Tan", "Asin", "Acos", "Atan")},
    **{f"{op}": (node(op, "x", "y"), {"x": X}, {}) for op in ("Sinh", "Cosh", "Asinh", "Atanh")},
    **{f"grid_{mode}_{pad}_{corners}": (
        node("GridSample", "x g", "y", mode=mode, padding_mode=pad, align_corners=corners), {"x": X, "g": (2, 4, 3, 2)}, {})
       for mode in ("bilinear", "nearest", "bicubic") for pad in ("zeros", "border", "reflection") for corners in (0, 1)},
}
# fmt: on


def case(name: str):
    """(model, inputs that FP16 holds exactly, some of them far outside an image's -1 to 1)."""
    operator, inputs, constants, *rest = CASES[name]
    opset, kind = (*rest, *(17, TensorProto.FLOAT)[len(rest) :])
    kinds = {n: s if s and isinstance(s[0], tuple) else (s, TensorProto.FLOAT) for n, s in inputs.items()}
    proto = model([operator], {n: s for n, (s, _) in kinds.items()}, "y", constants, opset)
    for v in (*proto.graph.input, *proto.graph.output):
        v.type.tensor_type.elem_type = kinds[v.name][1] if v.name in kinds else kind
    del proto.graph.value_info[:]  # inferred from other types
    rng = np.random.default_rng(4)
    feeds = {n: np.round(rng.uniform(-1, 1, s) * 512) / 512 * (1.5 if n == "g" else 1) for n, (s, _) in kinds.items()}
    feeds = {n: a if kinds[n][1] == TensorProto.FLOAT else rng.integers(0, 2, np.shape(a)) for n, a in feeds.items()}
    return proto, {n: np.asarray(a, DTYPES[kinds[n][1]]) for n, a in feeds.items()}


@pytest.mark.parametrize("name", CASES)
def test_as_onnxruntime(name):
    proto, feeds = case(name)
    net = network(proto)
    (op,) = net.ops
    assert isinstance(op.problem, LibraryProblem) and codec.from_json(codec.to_json(op.problem)) == op.problem
    (got,), (expected,) = run(net, feeds).values(), ort_run(proto, feeds).values()
    if expected.dtype == np.float32:
        assert relative_error(np.nan_to_num(got, neginf=-9), np.nan_to_num(expected, neginf=-9)) < 2e-6
        assert np.array_equal(np.isinf(got), np.isinf(expected))
    else:
        assert np.array_equal(got, expected) and got.shape == expected.shape


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_engine_as_onnxruntime(name, tmp_path):
    proto, feeds = case(name)
    onnx.save(proto, tmp_path / "m.onnx")
    with gr.build(tmp_path / "m.onnx", device="h200").context(device="emulator", poison=True) as ctx:
        (got,) = ctx.run(feeds).values()
    (expected,) = ort_run(proto, feeds).values()
    assert got.dtype == expected.dtype and got.shape == expected.shape
    if expected.dtype == np.float32:
        finite = np.isfinite(expected)
        assert np.array_equal(got[~finite], expected[~finite])
        assert relative_error(got[finite], expected[finite]) < 2e-3
    else:
        assert np.array_equal(got, expected)


REFUSED = {  # of operators that have a function
    "scatter_mul": (
        "ScatterND",
        {"x": X, "i": ((4, 2), INT), "u": (4, 5, 7)},
        {"reduction": "mul"},
        "none, add, max, min, got mul",
    ),
    "scatter_integers": (
        "ScatterND",
        {"x": (X, INT), "i": ((4, 2), INT), "u": ((4, 5, 7), INT)},
        {"reduction": "add"},
        "expected the reduction none, got add",
    ),
    "conv_channels": ("Conv", {"x": X, "w": (4, 2, 3, 3)}, {}, r"weights \[4, 2, 3, 3\] in 1 group.* do not fit its input"),
    "conv_groups": ("Conv", {"x": X, "w": (3, 3, 3, 3)}, {"group": 2}, r"weights \[3, 3, 3, 3\] in 2 group.* do not fit"),
    "conv_window": (
        "Conv",
        {"x": (1, 1, 300, 300), "w": (1, 1, 300, 300)},
        {},
        r"window of \[300, 300\]; expected 65536",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_function_does_not_take(name, monkeypatch):
    op, inputs, attributes, match = REFUSED[name]
    operator = node(op, " ".join(inputs), "y", **attributes)
    monkeypatch.setitem(CASES, name, (operator, inputs, {}, 18, INT if name == "scatter_integers" else TensorProto.FLOAT))
    with pytest.raises(ModelError, match=match):
        network(case(name)[0])


def siamese():
    """A tracker's head: features of an image are searched for those of a template, channel by channel."""
    rng = np.random.default_rng(2)
    nodes = [
        node("Conv", "image w", "searched", pads=[1, 1, 1, 1]),
        node("Conv", "template w", "t"),
        node("Reshape", "t kernels", "sought"),
        node("Conv", "searched sought", "found", group=16),
        node("Relu", "found", "r"),
        node("Conv", "r v", "y"),
    ]
    w = {"w": rng.standard_normal((16, 8, 3, 3)) / 8, "v": rng.standard_normal((8, 16, 1, 1)) / 4}
    w = {name: a.astype(np.float16).astype(np.float32) for name, a in w.items()} | {"kernels": np.int64([16, 1, 5, 5])}
    return model(nodes, {"image": (1, 8, 20, 20), "template": (1, 8, 7, 7)}, "y", w)


def test_computed_weights_in_an_engine(tmp_path):
    """The layer says why no kernel is timed; the others run as ever."""
    net = check_against_ort(siamese())
    assert [type(op.problem).__name__ for op in net.ops if op.output == "found"] == ["LibraryProblem"]
    engine = build(tmp_path, siamese(), sparsity="enable")
    info = {layer["Name"]: layer for layer in engine.layer_info()["Layers"]}
    assert info["found"]["Function"] == "Conv" and info["found"]["Reason"] == "kernels take constant weights and biases"
    assert {row.layer for row in engine.sparsity.rows} == {"searched", "t", "y"}
    feeds = {t.name: np.random.default_rng(5).uniform(-1, 1, t.shape).astype(np.float32) for t in net.inputs}
    judge(engine, siamese(), feeds)


class AsCupy:
    """NumPy as far as CuPy has the same: what a function would call on a GPU exists there, by that name."""

    def __getattr__(self, name):
        assert hasattr(cupy, name), f"CuPy has no {name}"
        return getattr(np, name)


@pytest.mark.parametrize("name", CASES)
def test_cupy_has_what_is_called(name):
    proto, feeds = case(name)
    (op,) = network(proto).ops
    p = op.problem
    given = {f"t{i}": feeds[t].reshape(p.shapes[i]) for i, t in enumerate(op.inputs)} | dict(op.weights)
    y = bound(p.function, dict(p.attributes), p.part)(AsCupy(), [given.get(a) for a in p.arguments])
    assert y.shape == p.shape


def test_every_function_has_a_case():
    tested = {CASES[name][0].op_type for name in CASES} | {"Reshape"}  # as Squeeze
    assert set(FUNCTIONS) - tested == {"Sub", "Mul", "Neg", "Max", "Min", "Abs", "Acosh"}  # NumPy's own, as Add and Sinh are


def after_lrn():
    """Scores behind a normalization: the best three channels, the best one, and where that is above zero."""
    nodes = [
        node("LRN", "x", "a", size=5, alpha=1e-3, beta=0.75, bias=2.0),
        node("TopK", "a k", "values which", axis=1),
        node("ArgMax", "a", "best", axis=1, keepdims=0),
        node("Greater", "a zero", "above"),
        node("Where", "above a zero", "positive"),
        node("Conv", "positive w", "y"),
    ]
    rng = np.random.default_rng(8)
    weights = {"k": np.int64([3]), "zero": np.float32(0), "w": rng.standard_normal((8, 16, 1, 1)).astype(np.float32)}
    proto = model(nodes, {"x": (2, 16, 5, 6)}, "values which best above y", weights)
    for v, kind in zip(proto.graph.output, (TensorProto.FLOAT, INT, INT, BOOL, TensorProto.FLOAT), strict=True):
        v.type.tensor_type.elem_type = kind
    return proto, {"x": rng.standard_normal((2, 16, 5, 6)).astype(np.float16).astype(np.float32)}


def test_in_an_engine(tmp_path):
    proto, feeds = after_lrn()
    onnx.save(proto, tmp_path / "m.onnx")
    gr.build(tmp_path / "m.onnx", device="h200").save(tmp_path / "m.engine")
    engine = gr.load(tmp_path / "m.engine")
    with engine.context(device="emulator", poison=True) as ctx:
        got = ctx.run(feeds)
        assert len(ctx.gpu.stats) == len(engine.plan.steps)
    for name, y in ort_run(proto, feeds).items():
        assert got[name].dtype == y.dtype, name
        if y.dtype == np.float32:
            assert relative_error(got[name], y) < 1e-3, name
        else:
            assert np.array_equal(got[name], y), name
    types = [layer.type for layer in engine.plan.layers]
    assert types.count("library") == 6 and "conv" in types
    info = {layer["Name"]: layer for layer in engine.layer_info()["Layers"]}
    assert (info["a"]["LayerType"], info["a"]["ParameterType"], info["a"]["Function"]) == ("Library", "Library", "LRN")
    text = report.plan_text(engine.record)
    assert (
        "calls    6 functions without a kernel, together ~" in text
        and "estimated as one launch that moves each byte once" in text
    )
    assert (
        info["a"]["TimeBasis"].startswith("estimated as one launch that moves each byte once")
        and info["best"]["Outputs"][0]["Datatype"] == "Int64"
    )
    assert [o["DataType"] for o in engine.layer_info()["I/O Tensors"]] == ["Float", "Float", "Int64", "Int64", "Bool", "Float"]


def test_graphs_hold_the_kernels_between_library_functions(tmp_path, monkeypatch):
    proto, feeds = after_lrn()
    engine = build(tmp_path, proto)
    recorded = []
    monkeypatch.setattr(Emulated, "record", lambda self, run: (run(), recorded.append(run), run)[-1])
    with engine.context(device="emulator") as ctx:
        got = ctx.run(feeds)
        runs = [kernels for kernels, _ in itertools.groupby(isinstance(step, LaunchStep) for step in engine.plan.steps)]
        assert len(recorded) == runs.count(True) and runs.count(False) > 0 and len(ctx.gpu.stats) == len(engine.plan.steps)
    with engine.context(device="emulator", graph=False) as ctx:
        assert all(np.array_equal(got[name], y) for name, y in ctx.run(feeds).items())


def test_the_best_detections_of_a_transformer(tmp_path):
    """What such detectors end with: the best (query, class) pairs, their classes, and the boxes of their queries."""
    queries, classes, k = 40, 6, 9
    nodes = [
        node("Sigmoid", "logits", "s"),
        node("Reshape", "s flat", "f"),
        node("TopK", "f k", "scores which", axis=1),
        node("Mod", "which classes", "labels"),
        node("Div", "which classes", "query"),
        node("Unsqueeze", "query last", "u"),
        node("Tile", "u four", "at"),
        node("GatherElements", "boxes at", "found", axis=1),
    ]
    weights = {
        "flat": np.int64([1, -1]),
        "k": np.int64([k]),
        "classes": np.int64(classes),
        "last": np.int64([-1]),
        "four": np.int64([1, 1, 4]),
    }
    proto = model(nodes, {"logits": (1, queries, classes), "boxes": (1, queries, 4)}, "scores labels found", weights)
    proto.graph.output[1].type.tensor_type.elem_type = INT
    onnx.save(proto, tmp_path / "m.onnx")
    rng = np.random.default_rng(3)
    logits = rng.permutation(np.linspace(-4, 4, queries * classes)).astype(np.float16).reshape(1, queries, classes)
    feeds = {"logits": logits.astype(np.float32), "boxes": rng.uniform(0, 1, (1, queries, 4)).astype(np.float32)}
    with gr.build(tmp_path / "m.onnx", device="h200").context(device="emulator", poison=True) as ctx:
        got = ctx.run(feeds)
    for name, y in ort_run(proto, feeds).items():
        if name == "labels":
            assert np.array_equal(got[name], y)
        else:
            assert got[name].shape == y.shape and np.abs(got[name] - y).max() < 1e-3, name


def test_tactics_are_linear_and_their_time_is_that_of_their_bytes():
    problem = LibraryProblem(
        "LRN", ("t0",), ((1, 64, 56, 56),), ("fp16",), (1, 64, 56, 56), "fp16", ((1, 64, 56, 56),) * 2, (("size", 5),)
    )
    tactics = candidates(problem, named("h200"))
    types = ("fp16", "fp32")
    assert {f"{t.ins[0]}->{t.out}" for t in tactics} == {f"{x}:chw->{y}:chw" for x in types for y in types}
    half = predict(problem, next(t for t in tactics if str(t.ins[0]) == str(t.out) == "fp16:chw"), named("h200"))
    wide = predict(problem, next(t for t in tactics if str(t.ins[0]) == str(t.out) == "fp32:chw"), named("h200"))
    assert wide["l2_us"] == 2 * half["l2_us"] > 0


def test_integers_reach_no_kernel():
    proto = model([node("Pad", "x p", "y")], {"x": (2, 3)}, "y", {"p": np.int64([0, 1, 0, 0])})
    for v in (*proto.graph.input, *proto.graph.output):
        v.type.tensor_type.elem_type = INT
    with pytest.raises(ModelError, match="Pad y: 'x' is of type INT64; expected floating-point tensors"):
        network(proto)


def test_powers_with_negative_exponents():
    got = bound("Pow", {})(np, [np.int64([2, -1, 1, 0, -3]), np.int64([-1, -3, -2, 2, 3])])
    assert got.tolist() == [0, -1, 1, 0, -27]


def test_maxima_and_where_they_stood(tmp_path):
    """Both outputs of one node: the maxima by the pool's kernel."""
    proto = model([node("MaxPool", "x", "y i", kernel_shape=[2, 2], strides=[2, 2])], {"x": (2, 3, 6, 8)}, "y i")
    proto.graph.output[1].type.tensor_type.elem_type = INT
    onnx.save(proto, tmp_path / "m.onnx")
    x = np.random.default_rng(2).permutation(2 * 3 * 6 * 8).reshape(2, 3, 6, 8).astype(np.float32)
    engine = gr.build(tmp_path / "m.onnx", device="h200")
    got = emulated(engine, {"x": x})
    assert all(np.array_equal(got[name], y) for name, y in ort_run(proto, {"x": x}).items())
    assert sorted(layer.type for layer in engine.plan.layers if layer.type != "reformat") == ["library", "pool"]


def test_wrong_functions_are_refused():
    with pytest.raises(ValueError, match="unknown function 'Nonsense'"):
        LibraryProblem("Nonsense", (), (), (), (1,), "fp16", ((1, 1, 1, 1),))
    with pytest.raises(ValueError, match="takes 'c0', expected some of t0"):  # a crafted engine without its constant
        LibraryProblem("LRN", ("t0", "c0"), ((2, 3),), ("fp16",), (2, 3), "fp16", ((1, 6, 1, 1), (1, 6, 1, 1)))
    with pytest.raises(ValueError, match="different numbers of elements"):
        LibraryProblem("LRN", ("t0",), ((2, 3),), ("fp16",), (2, 3), "fp16", ((1, 6, 1, 1), (1, 5, 1, 1)))


def test_lrn_between_convolutions_keeps_every_fusion():
    nodes = [
        node("Conv", "x w", "a", pads=[1] * 4),
        node("Relu", "a", "b"),
        node("LRN", "b", "c", size=3),
        node("Conv", "c v", "y"),
    ]
    rng = np.random.default_rng(1)
    w, v = (0.2 * rng.standard_normal(s).astype(np.float32) for s in ((16, 3, 3, 3), (8, 16, 1, 1)))
    net = check_against_ort(model(nodes, {"x": (1, 3, 9, 9)}, "y", {"w": w, "v": v}))
    assert len(net.ops) == 3
