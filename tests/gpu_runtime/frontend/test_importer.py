"""Reading models: opsets, sizes, pruning, and every kind of bad file with its one clear message."""

import numpy as np
import onnx
import pytest

import gpu_runtime as gr
from gpu_runtime.errors import ModelError
from gpu_runtime.frontend import importer
from gpu_runtime.frontend.files.convert import OPSET
from gpu_runtime.frontend.summaries import describe
from tests.reference_run import check_against_ort, given_model, model, network, node, ort_run, relative_error, run

rng = np.random.default_rng(11)


def weights(*shape, dtype=np.float32):
    return rng.standard_normal(shape).astype(np.float16).astype(dtype)


def small(**options):
    """Conv, Relu, Flatten, Gemm: one of everything that has weights."""
    nodes = [
        node("Conv", "x w b", "c", pads=(1, 1, 1, 1)),
        node("Relu", "c", "r"),
        node("GlobalAveragePool", "r", "p"),
        node("Flatten", "p", "f"),
        node("Gemm", "f g", "y"),
    ]
    return model(nodes, {"x": (1, 4, 5, 5)}, "y", {"w": weights(8, 4, 3, 3), "b": weights(8), "g": weights(8, 4)}, **options)


def save(tmp_path, proto, name="model.onnx"):
    path = tmp_path / name
    path.write_bytes(proto.SerializeToString())
    return path


def refused(tmp_path, proto, match, **options):
    """read() must raise ModelError with the path in front and no traceback in it; -> the message."""
    path = save(tmp_path, proto)
    with pytest.raises(ModelError, match=match) as e:
        importer.read(path, **options)
    assert str(e.value).startswith(f"{path}: ") and "Traceback" not in str(e.value)
    return str(e.value)


# ---- opsets


@pytest.mark.parametrize("opset", [7, 8, 9, 10, 11, 12, 13, 14, 16, 18, 20, 21, 22, onnx.defs.onnx_opset_version()])
def test_every_opset_becomes_one(tmp_path, opset):
    nodes = [
        node("Conv", "x w b", "c", strides=(2, 2)),
        node("BatchNormalization", "c s b m v", "n"),
        node("LeakyRelu", "n", "l"),
        node("MaxPool", "l", "p", kernel_shape=(2, 2), strides=(2, 2)),
        node("AveragePool", "p", "q", kernel_shape=(2, 2), strides=(1, 1)),
        node("Dropout", "q", "d"),
        node("Flatten", "d", "f"),
        node("Gemm", "f g k", "h"),
        node("Softmax", "h", "y", axis=1),
    ]
    w = {"w": weights(8, 4, 3, 3), "b": weights(8), "s": weights(8), "m": weights(8), "v": abs(weights(8)) + 1}
    proto = model(nodes, {"x": (1, 4, 11, 11)}, "y", w | {"g": weights(8, 5), "k": weights(5)}, opset)
    proto.ir_version = 3 if opset < 9 else 8
    if opset < 9:  # as exporters did then: initializers are inputs too
        for t in proto.graph.initializer:
            proto.graph.input.append(onnx.helper.make_tensor_value_info(t.name, t.data_type, t.dims))
    imported = importer.read(save(tmp_path, proto))
    assert imported.model.opset_imports[""] == OPSET and len(imported.model.graph.inputs) == 1
    net = network(proto)
    feeds = {"x": rng.standard_normal((1, 4, 11, 11)).astype(np.float32)}
    if opset > 21:  # newer than some onnxruntimes: the operators did not change since
        proto.opset_import[0].version = 21
    assert relative_error(run(net, feeds)["y"], ort_run(proto, feeds)["y"]) < 1e-3


@pytest.mark.parametrize("alpha", [1.0, 1.5])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_swish_is_spelled_in_older_words(alpha, dtype):
    proto = model([node("Swish", "x", "y", alpha=alpha)], {"x": (2, 3)}, "y", opset=24, dtype=dtype)
    x = np.linspace(-3, 3, 6, dtype=dtype).reshape(2, 3)
    y = run(network(proto), {"x": x})["y"]
    np.testing.assert_allclose(y, x / (1 + np.exp(-alpha * x.astype(np.float32))), rtol=1e-3)


def test_a_shape_subgraph_may_have_empty_lists(tmp_path):
    """As exporters write Flatten: the sizes before axis 0, none, then -1."""
    nodes = [
        node("Shape", "x", "s"),
        node("Slice", "s zero zero", "before"),
        node("Concat", "before rest", "t", axis=0),
        node("Relu", "x", "r"),
        node("Reshape", "r t", "y"),
    ]
    proto = model(nodes, {"x": (2, 3, 4)}, "y", {"zero": np.int64([0]), "rest": np.int64([-1])})
    assert [int(d) for d in importer.read(save(tmp_path, proto)).model.graph.outputs[0].shape] == [24]


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_an_unoptimized_torch_export_is_read(dtype, tmp_path):
    """torch.onnx.export(dynamo=True, optimize=False) computes a convolution's bias of zeros from its weights' shape."""
    w, norm = weights(8, 8, 3, 3).astype(dtype), np.abs(weights(8)).astype(dtype) + 1
    nodes = [
        node("Shape", "w", "shape"),
        node("Constant", "", "first", value=onnx.numpy_helper.from_array(np.int64([0]))),
        node("Gather", "shape first", "k"),
        node("Constant", "", "zero", value=onnx.numpy_helper.from_array(np.float32(0))),
        node("CastLike", "zero x", "zero_like"),
        node("Expand", "zero_like k", "bias"),
        node("Conv", "x w bias", "c"),
        node("BatchNormalization", "c norm norm norm norm", "y"),
    ]
    proto = model(nodes, {"x": (1, 8, 5, 5)}, "y", {"w": w, "norm": norm}, dtype=dtype)
    check_against_ort(save(tmp_path, proto))
    pruned = importer.load(save(tmp_path, proto), prune=True)
    assert pruned.pruned == ("w",) and not pruned.not_pruned


def test_integer_exponents_become_floating_point():
    proto = model([node("ArgMax", "x", "i", axis=1), node("Pow", "x i", "y")], {"x": (2, 3)}, "y")
    check_against_ort(proto, low=0)


def test_concat_drops_what_has_no_elements():
    nodes = [node("Split", "x p", "a b", axis=1), node("Relu", "a", "r"), node("Concat", "r b", "y", axis=1)]
    proto = model(nodes, {"x": (2, 3)}, "y", {"p": np.int64([3, 0])}, opset=18)
    assert [type(op.problem).__name__ for op in check_against_ort(proto).ops][1:] == ["PointwiseProblem"]


GEMMS = {  # inputs (computed: their names; constants: the arrays'), attributes
    "transposed": ("a w", {"transA": 1}),
    "constant_first": ("v b c", {"alpha": 0.5, "transB": 1, "beta": 2.0}),
    "constant_first_transposed": ("u b", {"transA": 1, "transB": 1}),
    "matrix_addend": ("d w m", {"alpha": 0.5, "beta": 0.25}),
    "column_addend": ("d w k", {"beta": 2.0}),
    "computed_addend": ("d w e", {"alpha": 2.0}),
    "two_computed": ("a b e", {"transA": 1, "transB": 1, "alpha": 0.5, "beta": 0.5}),
    "row_addend": ("a b r", {"transA": 1, "transB": 1}),
}


@pytest.mark.parametrize("name", GEMMS)
def test_every_gemm_is_a_convolution_or_a_product(name):
    """A is [3,8], B [8,5]; a letter is one of them or its transpose, or the addend."""
    computed = {"a": (8, 3), "b": (5, 8), "d": (3, 8), "e": (3, 5), "c": (3, 5)}
    stored = {
        "w": weights(8, 5),
        "v": weights(3, 8),
        "u": weights(8, 3),
        "m": weights(3, 5),
        "k": weights(3, 1),
        "r": weights(1, 5),
    }
    inputs, attributes = GEMMS[name]
    shapes = {n: computed[n] for n in inputs.split() if n in computed}
    proto = model([node("Gemm", inputs, "y", **attributes)], shapes, "y", {n: stored[n] for n in inputs.split() if n in stored})
    check_against_ort(proto)


def test_old_fp16_model_and_names():
    imported = importer.read(given_model("squeezenet11_fp16"))
    assert imported.name == "squeezenet11_fp16" and imported.loaded.dtypes == {"data_0": "fp16", "softmaxout_1": "fp16"}
    names = [n.name for n in imported.model.graph]
    assert len(set(names)) == len(names) and "Conv_0" in names and "Relu_1" in names


def test_constants_shapes_and_functions_are_folded():
    """Constant nodes as weights, Shape arithmetic for a Reshape, and a model-local function."""
    text = """
        <ir_version: 8, opset_import: ["" : 17, "local" : 1]>
        g (float[N, 4, 3, 5] x) => (float[N, C] y) {
            w = Constant<value = float[2, 4, 1, 1] {1, 0, 0, 2, 3, 0, 0, 4}>()
            c = Conv(x, w)
            r = local.twice(c)
            shape = Shape(r)
            zero = Constant<value = int64[1] {0}>()
            n = Gather(shape, zero)
            rest = Constant<value = int64[1] {-1}>()
            target = Concat<axis = 0>(n, rest)
            y = Reshape(r, target)
        }
        <domain: "local", opset_import: ["" : 17]>
        twice (a) => (b) { b = Add(a, a) }
    """
    net = check_against_ort(onnx.parser.parse_model(text), 1e-6, shapes={"x": (2, 4, 3, 5)})
    assert [type(op.problem).__name__ for op in net.ops] == ["ConvProblem", "PointwiseProblem"]
    assert net.outputs[0].shape == (2, 30) and net.outputs[0].shape4 == (2, 2, 3, 5)


def test_duplicate_node_names_and_unsorted_nodes(tmp_path):
    proto = small()
    for n in proto.graph.node:
        n.name = "same"
    shuffled = list(proto.graph.node)[::-1]
    del proto.graph.node[:]
    proto.graph.node.extend(shuffled)
    names = [n.name for n in importer.read(save(tmp_path, proto)).model.graph]
    assert len(set(names)) == 5 and "same" in names


# ---- sizes


def dynamic(shape=("N", 4, "H", "W")):
    proto = model([node("Relu", "x", "y")], {"x": (1, 4, 3, 3)}, "y")
    proto.graph.input[0].CopyFrom(onnx.helper.make_tensor_value_info("x", 1, shape))
    return proto


def test_dynamic_size_given_and_not_given(tmp_path):
    message = refused(tmp_path, dynamic(), "the size of input 'x' \\(Nx4xHxW\\) is dynamic")
    assert message.endswith("give it, for example --shapes=x:1x4x224x224")
    net = network(dynamic(), shapes={"x": (2, 4, 6, 7)})
    assert net.inputs[0].shape == net.outputs[0].shape == (2, 4, 6, 7)
    net = network(dynamic(None), shapes={"x": (2, 4, 6, 7)})
    assert net.outputs[0].shape == (2, 4, 6, 7)


@pytest.mark.parametrize("op", ["Softmax", "LogSoftmax", "Hardmax"])
@pytest.mark.parametrize("opset", range(1, 14))
def test_before_opset_13_all_axes_from_one_on_are_one(tmp_path, op, opset):
    """Without an axis, too: 1 before, the last one since."""
    given = [{}, *({"axis": axis} for axis in range(-4, 4))]
    nodes = [node("Relu", "x", "r"), *(node(op, "r" if i % 2 else "x", f"y{i}", **given[i]) for i in range(len(given)))]
    proto = model(nodes, {"x": (2, 3, 4, 5)}, " ".join(f"y{i}" for i in range(len(given))), opset=opset)
    if opset < 6:
        refused(tmp_path, proto, f"expected opset 6 or newer, got {opset}")
    else:
        check_against_ort(proto)


@pytest.mark.parametrize("opset", [6, 12, 17, 22])
@pytest.mark.parametrize("open_axes", [(0,), (2, 3), (0, 2, 3)])
def test_a_declared_size_below_zero_is_dynamic(tmp_path, opset, open_axes):
    """As PaddlePaddle's exporter writes it, of inputs, outputs and tensors between."""
    proto = model([node("Relu", "x", "r"), node("Abs", "r", "y")], {"x": (2, 4, 5, 6)}, "y", opset=opset)
    for v in (*proto.graph.input, *proto.graph.output, *proto.graph.value_info):
        for axis in open_axes:
            v.type.tensor_type.shape.dim[axis].dim_value = -1 - axis
    path = save(tmp_path, proto)
    assert check_against_ort(path, shapes={"x": (2, 4, 5, 6)}).outputs[0].shape == (2, 4, 5, 6)
    declared = "x".join("?" if axis in open_axes else str(size) for axis, size in enumerate((2, 4, 5, 6)))
    assert describe.describe(path).inputs == (("x", "float32", declared),)
    if open_axes == (0,):
        with pytest.warns(UserWarning, match="dynamic and set to 1"):
            assert network(path).outputs[0].shape == (1, 4, 5, 6)
    else:
        refused(tmp_path, proto, rf"the size of input 'x' \({declared.replace('?', '[?]')}\) is dynamic: give it, for example")


@pytest.mark.parametrize(
    "shapes, match",
    [
        (
            {"x": (1, 3, 8, 8)},
            "input 'x': the model declares Nx4xHxW, the shape given is 1x3x8x8; axis 1 is fixed at 4, got 3, and only ",
        ),
        ({"x": (1, 4, 8)}, "the model declares Nx4xHxW, the shape given is 1x4x8; expected 4 sizes, got 3"),
        ({"x": (1, 4, 0, 8)}, "expected sizes of at least 1 .*got 1x4x0x8"),
        ({"z": (1, 4, 8, 8)}, "a shape is given for 'z', but the inputs are 'x'"),
        ({"xx": (1, 4, 8, 8)}, "but the inputs are 'x'; did you mean 'x' instead of 'xx'"),
    ],
)
def test_contradicting_shapes(tmp_path, shapes, match):
    refused(tmp_path, dynamic(), match, shapes=shapes)


def test_shapes_that_the_graph_contradicts(tmp_path):
    nodes = [node("Reshape", "x s", "r"), node("Relu", "r", "y")]
    proto = model(nodes, {"x": ("N", 4)}, "y", {"s": np.int64([2, 8])})
    assert network(proto, shapes={"x": (4, 4)}).outputs[0].shape == (2, 8)
    refused(tmp_path, proto, r"Reshape r: \[3, 4\] cannot become \[2, 8\]", shapes={"x": (3, 4)})
    nodes = [node("Flatten", "x", "f"), node("Gemm", "f g", "y")]
    fixed = model(nodes, {"x": (1, 4, "H", 2)}, "y", {"g": weights(16, 5)})
    refused(tmp_path, fixed, "Gemm y: .*[Mm]ismatch", shapes={"x": (1, 4, 3, 2)})


def test_an_image_too_small_for_the_network(tmp_path):
    """Such sizes reach an assertion in onnx's C++ that would end the process."""
    w = {"s": np.int64([0]), "e": np.int64([4]), "a": np.int64([2])}
    nodes = [node("MaxPool", "x", "p", kernel_shape=(3, 3)), node("Slice", "p s e a", "y")]
    proto = model(nodes, {"x": (1, 4, "H", "W")}, "y", w)
    match = r"MaxPool p: its output 'p' would have the size \[1, 4, 0, 6\] .*give another input size"
    refused(tmp_path, proto, match, shapes={"x": (1, 4, 2, 8)})
    refused(tmp_path, dynamic(), "input 'x': expected .* 2147483647 elements at most", shapes={"x": (1, 4, 1 << 20, 1 << 20)})


# ---- 2:4 pruning


def brute_force(w, axis):
    """Zero the two smallest magnitudes of each four along `axis`; of equals the lower index stays."""
    w = w.copy()
    moved = np.moveaxis(w, axis, 0)
    for rest in np.ndindex(moved.shape[1:]):
        for i in range(0, moved.shape[0], 4):
            group = [moved[(i + j, *rest)] for j in range(4)]
            for j in sorted(range(4), key=lambda j: (-abs(float(group[j])), j))[2:]:
                moved[(i + j, *rest)] = 0
    return w


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64])
def test_pruning_against_brute_force(tmp_path, dtype):
    w = np.round(weights(8, 8, 3, 2, dtype=dtype) * 2) / 2  # many ties
    shared, gemm, mat = weights(4, 8, 1, 1, dtype=dtype), weights(4, 10, dtype=dtype), weights(10, 8, dtype=dtype)
    nodes = [
        node("Conv", "x w", "a"),
        node("Relu", "a", "b"),
        node("Conv", "b shared", "c"),
        node("Conv", "a shared", "d"),
        node("Add", "c d", "e"),
        node("GlobalAveragePool", "e", "p"),
        node("Flatten", "p", "f"),
        node("Gemm", "f gemm", "g"),
        node("Gemm", "g mat", "y", transB=0, alpha=2.0),
    ]
    stored = {"w": w, "shared": shared, "gemm": gemm, "mat": mat}
    proto = model(nodes, {"x": (1, 8, 6, 6)}, "y", stored, dtype=dtype)
    if dtype is np.float64:  # double weights behind Casts, in a float network
        for v in (*proto.graph.input, *proto.graph.output):
            v.type.tensor_type.elem_type = 1
        del proto.graph.value_info[:]
        casts = [node("Cast", n, f"{n} f".replace(" ", "_"), to=1) for n in stored]
        for n in proto.graph.node:
            for i, name in enumerate(n.input):
                n.input[i] = f"{name}_f" if name in stored else name
        rest = list(proto.graph.node)
        del proto.graph.node[:]
        proto.graph.node.extend(casts + rest)
    path, out = save(tmp_path, proto), tmp_path / "pruned.onnx"
    imported = importer.load(path, prune=True, save_pruned=out)
    assert imported.pruned == ("w", "shared", "gemm")
    assert imported.not_pruned == (("mat", "shape [10, 8]: the input channels (axis 0) are not a multiple of 4"),)
    after = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(out).graph.initializer}
    for name, axis in (("w", 1), ("shared", 1), ("gemm", 0)):
        assert after[name].dtype == dtype and np.array_equal(after[name], brute_force(stored[name], axis))
    assert np.array_equal(after["mat"], mat)


def test_the_saved_model_is_the_one_lowered(tmp_path):
    """Everything but the weights is as it was, and the network lowered from either is the same."""
    path, out = given_model("resnet20_cifar10"), tmp_path / "pruned.onnx"
    shapes = {"input": (1, 3, 32, 32)}
    net = network(path, shapes=shapes, prune=True, save_pruned=out)
    again = check_against_ort(out, low=0, shapes=shapes)
    for a, b in zip(net.ops, again.ops, strict=True):
        assert a.problem == b.problem and all(np.array_equal(a.weights[k], b.weights[k]) for k in a.weights)
    sparse = {op.layer for op in net.ops if op.layer and op.problem.sparse24}
    assert len(sparse) == 19
    before, after = onnx.load(path), onnx.load(out)
    for t in (*before.graph.initializer, *after.graph.initializer):
        for field in ("raw_data", "float_data"):
            t.ClearField(field)
    assert before == after


def test_saved_model_keeps_opset_ir_version_and_inputs(tmp_path):
    out = tmp_path / "pruned.onnx"
    before = onnx.load(given_model("squeezenet11_fp16"))
    imported = importer.load(given_model("squeezenet11_fp16"), prune=True, save_pruned=out)
    after = onnx.load(out)
    assert (after.ir_version, after.opset_import[0].version, len(after.graph.input)) == (3, 7, len(before.graph.input))
    assert len(imported.pruned) == 25 and [n for n, _ in imported.not_pruned] == ["conv1_w_0"]


def test_what_cannot_be_pruned_is_listed_with_its_reason(tmp_path):
    nodes = [
        node("Constant", "", "k", value=onnx.numpy_helper.from_array(weights(8, 8, 1, 1))),
        node("Conv", "x k", "a"),
        node("Conv", "a grouped", "b", group=2),
        node("Conv", "b both", "c"),
        node("Conv", "c both", "d", group=1),
        node("Mul", "d scale", "e"),
        node("Conv", "e scale", "f"),
        node("Reshape", "flat shape", "made"),
        node("Conv", "f made", "g"),
        node("Conv", "g thin", "y", group=4),
    ]
    w = {"grouped": weights(8, 4, 1, 1), "thin": weights(8, 2, 1, 1), "both": weights(8, 8, 1, 1), "scale": weights(1, 8, 1, 1)}
    w |= {"flat": weights(8), "shape": np.int64([8, 1, 1, 1])}
    nodes[6].input[1] = "scale"
    imported = importer.load(save(tmp_path, model(nodes, {"x": (1, 8, 3, 3)}, "y", w)), prune=True)
    assert imported.pruned == ("k", "grouped", "both")  # a Constant node is stored; a weight read twice is pruned once
    assert imported.not_pruned == (
        ("scale", "also read by Mul e"),
        ("flat", "shape [8, 1, 1, 1]: the input channels (axis 1) are not a multiple of 4"),
        ("thin", "shape [8, 2, 1, 1]: the input channels (axis 1) are not a multiple of 4"),
    )
    fewer = model([node("Conv", "x w", "y")], {"x": (1, 3, 3, 3)}, "y", {"w": weights(8, 3, 1, 1)})
    imported = importer.load(save(tmp_path, fewer), prune=True)
    assert imported.not_pruned == (("w", "shape [8, 3, 1, 1]: the input channels (axis 1) are not a multiple of 4"),)


def test_nothing_is_saved_when_the_model_is_refused(tmp_path):
    out = tmp_path / "pruned.onnx"
    out.write_text("mine")
    with pytest.raises(ModelError):
        gr.build(save(tmp_path, dynamic()), sparsity="force", save_pruned=out, device="l4")
    assert out.read_text() == "mine"
    with pytest.raises(ValueError, match="save_pruned is given without prune"):
        importer.load(save(tmp_path, small()), save_pruned=out)
