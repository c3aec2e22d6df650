"""Every operator that lower knows, and the published networks, against onnxruntime on the same file."""

import numpy as np
import onnx
import pytest

from cuda_kernels import sparse24
from gpu_runtime.errors import ModelError
from gpu_runtime.frontend import importer
from gpu_runtime.fusion.fuse import fuse
from gpu_runtime.lowering import lower, pointwise
from tactics.problems.array_functions import FUNCTIONS
from tactics.problems.operators import OPERATORS
from tactics.problems.problem import ConvProblem, MoveProblem, PointwiseProblem, PoolProblem
from tests.reference_run import check_against_ort, feeds_for, given_model, model, network, node, ort_run, relative_error, run

rng = np.random.default_rng(7)


def weights(*shape, dtype=np.float32):
    """Random values that FP16 holds exactly."""
    return rng.standard_normal(shape).astype(np.float16).astype(dtype)


# ---- whole networks


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, shapes, convs",
    [
        ("squeezenet11_fp16", {}, 26),
        ("resnet20_cifar10", {"input": (2, 3, 32, 32)}, 20),
        ("super_resolution_10", {"input": (1, 1, 224, 224)}, 4),
        ("realesr_animevideov3", {"input": (1, 3, 12, 20)}, 18),
        ("realesr_animevideov3_fp16", {"input": (1, 3, 12, 20)}, 18),
        ("mnist8", {}, 3),
        ("carn_m_x2", {"input": (1, 3, 16, 24)}, 44),
        ("sci_180x320", {}, 3),
    ],
)
def test_published_networks(name, shapes, convs):
    net = check_against_ort(given_model(name), low=0, shapes=shapes)
    assert len({op.layer for op in net.ops if op.layer}) == convs
    names = [op.name for op in net.ops]
    assert len(set(names)) == len(names)
    for t in net.outputs:
        assert int(np.prod(t.shape)) == int(np.prod(t.shape4))


def test_rounding_every_tensor_to_fp16_changes_little():
    net = network(given_model("resnet20_cifar10"), shapes={"input": (1, 3, 32, 32)})
    feeds = feeds_for(net, 0)
    half, full = run(net, feeds, fp16=True)["logits"], run(net, feeds)["logits"]
    assert 0 < relative_error(half, full) < 1e-2


@pytest.mark.parametrize("name", ["digits_dense", "digits_sparse"])
def test_digits(name):
    from pathlib import Path

    path = Path(__file__).parents[3] / "benchmarks" / "digits" / f"{name}.onnx"
    if not path.exists():
        pytest.skip(f"{path.name} is not there")
    net = check_against_ort(path, bound=2e-3, shapes={"x": (3, 1, 8, 8)})
    assert net.groups and any(op.problem.sparse24 for op in net.ops if op.layer) == (name == "digits_sparse")


def test_resnet20_shortcuts_are_one_window_each():
    net = network(given_model("resnet20_cifar10"), shapes={"input": (1, 3, 32, 32)})
    moves = [op for op in net.ops if isinstance(op.problem, MoveProblem)]
    assert [op.name for op in moves] == ["n30_Slice + n31_Pad", "n53_Slice + n54_Pad"]
    assert str(moves[0].problem) == "move n1 c16 h32 w32 window out32,16,16 start-8,0,0 step1,2,2 fill0.0"
    assert len(net.groups) == 9 and net.groups[0] == ("n9_Add", ("apart", "into layer1.0.conv2"))


def test_super_resolution_shuffles_pixels_in_its_last_convolution():
    net = network(given_model("super_resolution_10"), shapes={"input": (1, 1, 224, 224)})
    assert [type(op.problem) for op in net.ops] == [ConvProblem] * 4
    assert net.ops[-1].problem.epilogue.d2s_mode == "crd" and net.ops[-1].problem.out_shape == (1, 1, 672, 672)
    assert net.ops[0].name == "conv1 + Relu_1"


# ---- convolutions


@pytest.mark.parametrize("auto_pad", ["NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID"])
@pytest.mark.parametrize("stride, dilation, group", [((1, 1), (1, 1), 1), ((2, 3), (1, 1), 2), ((1, 2), (1, 1), 4)])
def test_conv_geometry(auto_pad, stride, dilation, group):
    extra = {"pads": (1, 0, 2, 1), "dilations": dilation} if auto_pad == "NOTSET" else {"auto_pad": auto_pad}
    w = {"w": weights(8, 8 // group, 3, 2), "b": weights(8)}
    conv = node("Conv", "x w b", "y", strides=stride, group=group, kernel_shape=(3, 2), **extra)
    check_against_ort(model([conv], {"x": (2, 8, 9, 10)}, "y", w), 1e-5)


def test_dilated_conv_with_same_padding():
    conv = node("Conv", "x w", "y", dilations=(2, 2), auto_pad="SAME_UPPER", kernel_shape=(3, 3))
    net = network(model([conv], {"x": (1, 4, 9, 9)}, "y", {"w": weights(4, 4, 3, 3)}))
    assert net.ops[0].problem.pad == (2, 2, 2, 2)  # onnxruntime refuses this; the specification does not


@pytest.mark.parametrize("trans", [0, 1])
@pytest.mark.parametrize("view", ["Flatten", "Reshape"])
def test_flatten_and_gemm_become_one_convolution(trans, view):
    w = {"w": weights(*((10, 5 * 3 * 4) if trans else (5 * 3 * 4, 10))), "b": weights(1, 10), "s": np.int64([0, -1])}
    flat = node("Flatten", "r", "f", axis=1) if view == "Flatten" else node("Reshape", "r s", "f")
    nodes = [node("Relu", "x", "r"), flat, node("Gemm", "f w b", "y", transB=trans, alpha=0.5, beta=2.0)]
    net = check_against_ort(model(nodes, {"x": (2, 5, 3, 4)}, "y", w), 1e-5)
    op = net.ops[1]
    assert str(op.problem) == "conv n2 c5 h3 w4 k10 r3 s4 stride1,1 pad0,0,0,0 dilation1,1 groups1 bias"
    assert op.inputs == ("r",) and op.layer == "y" and net.outputs[0].shape4 == (2, 10, 1, 1)


def test_flattened_input_is_taken_as_channels():
    nodes = [node("Flatten", "x", "f", axis=1), node("Gemm", "f w", "y")]
    net = check_against_ort(model(nodes, {"x": (2, 1, 6, 8)}, "y", {"w": weights(48, 10)}), 1e-5)
    assert str(net.ops[0].problem).startswith("conv n2 c48 h1 w1 k10 r1 s1 ") and net.inputs[0].shape4 == (2, 48, 1, 1)


def test_two_matrix_products_read_one_flatten():
    w = {"a": weights(60, 8), "b": weights(60, 4), "c": weights(4)}
    nodes = [
        node("Tanh", "x", "t"),
        node("Flatten", "t", "f"),
        node("MatMul", "f a", "p"),
        node("Relu", "p", "y"),
        node("MatMul", "f b", "q"),
        node("Add", "q c", "z"),
    ]
    net = check_against_ort(model(nodes, {"x": (2, 5, 3, 4)}, "y z", w), 1e-5)
    assert [op.name for op in net.ops] == ["t", "p + y", "q"] and set(net.ops[2].weights) == {"w", "b"}


def test_weights_stay_fp32_and_2_of_4_is_seen_of_what_fp16_keeps():
    w = rng.standard_normal((8, 8, 3, 3)).astype(np.float32)
    dense = network(model([node("Conv", "x w", "y")], {"x": (1, 8, 4, 4)}, "y", {"w": w})).ops[0]
    assert np.array_equal(dense.weights["w"], w) and not dense.problem.sparse24
    p = sparse24.prune(w, 1)
    p[0, 0] += 1e-9  # below FP16's smallest: zero once rounded
    for group in (1, 2, 4):
        nodes = [node("Conv", "x w", "y", group=group)]
        op = network(model(nodes, {"x": (1, 8, 4, 4)}, "y", {"w": p[:, : 8 // group]})).ops[0]
        assert op.problem.sparse24 is (8 // group % 4 == 0)


def test_weights_that_fp16_cannot_hold_are_not_rounded():
    nodes = [node("Conv", "x w", "y"), node("Mul", "y s", "z")]
    w = weights(4, 4, 1, 1) + 3
    proto = model(nodes, {"x": (1, 4, 4, 4)}, "z", {"w": w, "s": np.float32(1e5)})
    assert np.array_equal(network(proto).ops[0].weights["w"], (np.float64(1e5) * w).astype(np.float32))


# ---- the other operators


@pytest.mark.parametrize("op", ["MaxPool", "AveragePool"])
@pytest.mark.parametrize(
    "attributes",
    [
        {"kernel_shape": (3, 3), "strides": (2, 2)},
        {"kernel_shape": (3, 2), "strides": (2, 2), "ceil_mode": 1, "pads": (1, 1, 1, 1)},
        {"kernel_shape": (3, 3), "strides": (2, 1), "auto_pad": "SAME_UPPER"},
        {"kernel_shape": (3, 3), "strides": (2, 2), "auto_pad": "SAME_LOWER"},
        {"kernel_shape": (2, 2), "strides": (1, 3), "auto_pad": "VALID"},
        {"kernel_shape": (3, 3), "strides": (2, 2), "ceil_mode": 1, "count_include_pad": 1, "pads": (1, 1, 1, 1)},
        {"kernel_shape": (2, 2), "strides": (3, 3), "ceil_mode": 1, "pads": (0, 0, 1, 1)},  # no window begins in the padding
        {"kernel_shape": (2, 3), "strides": (3, 2), "ceil_mode": 1, "count_include_pad": 1, "pads": (0, 1, 1, 1)},
    ],
)
def test_pools(op, attributes):
    if op == "MaxPool":
        attributes = {k: v for k, v in attributes.items() if k != "count_include_pad"}
    check_against_ort(model([node(op, "x", "y", **attributes)], {"x": (2, 3, 11, 14)}, "y", opset=19), 1e-5)


@pytest.mark.parametrize(
    "op, opset, inputs, attributes",
    [
        ("GlobalAveragePool", 13, "x", {}),
        ("GlobalMaxPool", 13, "x", {}),
        ("ReduceMean", 13, "x", {"axes": (2, 3), "keepdims": 0}),
        ("ReduceMean", 18, "x a", {"keepdims": 1}),
        ("ReduceMax", 13, "x", {"axes": (-1, -2)}),
    ],
)
def test_reductions_over_the_image(op, opset, inputs, attributes):
    proto = model([node(op, inputs, "y", **attributes)], {"x": (2, 3, 5, 4)}, "y", {"a": np.int64([-2, -1])}, opset)
    net = check_against_ort(proto, 1e-5)
    assert isinstance(net.ops[0].problem, PoolProblem) and net.ops[0].problem.is_global


@pytest.mark.parametrize(
    "op, opset, inputs, attributes, meaning",
    [
        ("Relu", 13, "x", {}, "relu"),
        ("LeakyRelu", 13, "x", {}, "leaky_relu(0.01)"),
        ("PRelu", 16, "x slope", {}, "prelu"),
        ("PRelu", 16, "x half", {}, "leaky_relu(0.5)"),
        ("Clip", 13, "x zero six", {}, "clip(0,6)"),
        ("Clip", 13, "x zero", {}, "relu"),
        ("Clip", 13, "x _ half", {}, "clip(-3.40282e+38,0.5)"),
        ("Clip", 9, "x", {"min": 0.0, "max": 6.0}, "clip(0,6)"),
        ("Sigmoid", 13, "x", {}, "sigmoid"),
        ("HardSigmoid", 13, "x", {"alpha": 0.3}, "hard_sigmoid(0.3,0.5)"),
        ("HardSwish", 14, "x", {}, "hard_swish"),
        ("Tanh", 13, "x", {}, "tanh"),
    ],
)
@pytest.mark.parametrize("alone", [False, True])
def test_activations(op, opset, inputs, attributes, meaning, alone):
    w = {"w": weights(4, 4, 1, 1), "slope": weights(4, 1, 1), "zero": np.float32(0), "six": np.float32(6)}
    w["half"] = np.float32(0.5)
    first = [] if alone else [node("Conv", "x w", "c")]
    nodes = [*first, node(op, inputs if alone else inputs.replace("x", "c", 1), "y", **attributes)]
    net = check_against_ort(model(nodes, {"x": (2, 4, 3, 5)}, "y", w, opset), 1e-5)
    (only,) = net.ops
    assert isinstance(only.problem, PointwiseProblem) is alone
    assert (str(only.problem.stages[0]).replace("(c0)", "") if alone else str(only.problem.epilogue.act)) == meaning


def test_batch_normalization_without_a_convolution_is_one_chain():
    w = {"g": weights(4), "b": weights(4), "m": weights(4), "v": abs(weights(4)) + 1}
    nodes = [node("MaxPool", "x", "p", kernel_shape=(2, 2)), node("BatchNormalization", "p g b m v", "n")]
    nodes.append(node("Relu", "n", "y"))
    net = check_against_ort(model(nodes, {"x": (2, 4, 5, 5)}, "y", w), 1e-5)
    assert [op.name for op in net.ops] == ["p", "n + y"]
    assert [str(s) for s in net.ops[1].problem.stages] == ["mul(c0)", "add(c1)", "relu"]


@pytest.mark.parametrize("mode", ["DCR", "CRD"])
@pytest.mark.parametrize("written", ["op", "reshapes"])
def test_depth_to_space(mode, written):
    six, perm = {"DCR": ((2, 2, 2, 3, 4, 5), (0, 3, 4, 1, 5, 2)), "CRD": ((2, 3, 2, 2, 4, 5), (0, 1, 4, 2, 5, 3))}[mode]
    w = {"six": np.int64(six), "four": np.int64([2, 3, 8, 10])}
    op = [node("DepthToSpace", "x", "y", mode=mode, blocksize=2)]
    reshapes = [node("Reshape", "x six", "a"), node("Transpose", "a", "b", perm=perm), node("Reshape", "b four", "y")]
    net = check_against_ort(model(op if written == "op" else reshapes, {"x": (2, 12, 4, 5)}, "y", w), 1e-6)
    assert [op.problem.kind for op in net.ops] == [f"d2s_{mode.lower()}"]


def test_slice_pad_and_their_composition():
    w = {"s": np.int64([3, -9]), "e": np.int64([9, 99]), "a": np.int64([2, 1]), "t": np.int64([2, 3])}
    w |= {"p": np.int64([0, 2, 1, 0, 0, 0, 0, 3]), "v": np.float32(0.5)}
    nodes = [node("Slice", "x s e a t", "c"), node("Pad", "c p v", "y")]
    net = check_against_ort(model(nodes, {"x": (2, 8, 9, 5)}, "y", w), 1e-6)
    assert [op.name for op in net.ops] == ["c", "y"]  # the window's rim would show the image: not one window
    w["e"] = np.int64([99, 99])
    w["s"] = np.int64([0, 0])
    net = check_against_ort(model(nodes, {"x": (2, 8, 9, 5)}, "y", w), 1e-6)
    assert [op.name for op in net.ops] == ["c + y"] and net.ops[0].nodes == ("c", "y")


INTO_WINDOWS = {  # name -> the readers of a Pad with this value
    "conv": (0.0, [node("Conv", "p w", "y", kernel_shape=(3, 3))]),
    "conv_pads": (0.0, [node("Conv", "p w", "y", pads=(1, 0, 0, 2), strides=(2, 2), dilations=(2, 1))]),
    "conv_valid": (0.0, [node("Conv", "p w", "y", auto_pad="VALID")]),
    "grouped": (0.0, [node("Conv", "p v", "y", group=2)]),
    "average": (0.0, [node("AveragePool", "p", "y", kernel_shape=(3, 3), strides=(2, 2))]),
    "average_counts": (0.0, [node("AveragePool", "p", "y", kernel_shape=(4, 5), pads=(1, 1, 1, 1), count_include_pad=1)]),
    "max": (-np.inf, [node("MaxPool", "p", "y", kernel_shape=(5, 5))]),
    "max_of_lowest": (-3.4e38, [node("MaxPool", "p", "y", kernel_shape=(3, 3), dilations=(2, 2))]),
    "two": (0.0, [node("Conv", "p w", "q"), node("AveragePool", "p", "r", kernel_shape=(3, 3)), node("Add", "q r", "y")]),
}
APART = {
    "no_zero": (0.5, [node("Conv", "p w", "y")]),
    "average_of_image": (0.0, [node("AveragePool", "p", "y", kernel_shape=(3, 3), pads=(1, 1, 1, 1))]),
    "average_ceil": (0.0, [node("AveragePool", "p", "y", kernel_shape=(3, 3), ceil_mode=1)]),
    "max_of_zeros": (0.0, [node("MaxPool", "p", "y", kernel_shape=(5, 5))]),
    "max_of_pads": (-np.inf, [node("MaxPool", "p", "m", kernel_shape=(2, 2)), node("Relu", "m", "y")]),
    "same": (0.0, [node("Conv", "p w", "y", auto_pad="SAME_UPPER", kernel_shape=(3, 3))]),
    "other_reader": (0.0, [node("Conv", "p w", "q", pads=(1, 1, 1, 1)), node("Add", "p q", "y")]),
}


@pytest.mark.parametrize("case", [*INTO_WINDOWS, *APART])
def test_a_pad_becomes_that_of_what_reads_it(case):
    value, readers = (INTO_WINDOWS | APART)[case]
    w = {"w": weights(4, 4, 3, 3), "v": weights(4, 2, 3, 3), "f": np.float32(value)}
    for k, axes in enumerate(((2, 1, 0, 2), (1, 2, 2, 0))):
        pad = node("Pad", "x s f", "p")
        w["s"] = np.int64([0, 0, *axes[:2], 0, 0, *axes[2:]])
        if k:  # only the axes that it pads, counted from the end
            pad = node("Pad", "x s f a", "p")
            w["s"], w["a"] = np.int64([axes[1], axes[0], axes[3], axes[2]]), np.int64([-1, 2])
        net = check_against_ort(model([pad, *readers], {"x": (2, 4, 9, 7)}, "y", w, opset=18), 1e-5)
        assert any(isinstance(op.problem, MoveProblem) for op in net.ops) == (case in APART)


@pytest.mark.parametrize("opset, op", [(7, "Upsample"), (9, "Upsample"), (10, "Resize"), (11, "Resize"), (13, "sizes")])
def test_nearest_upsampling(opset, op):
    w = {"k": np.float32([1, 1, 2, 3]), "r": np.float32([]), "z": np.int64([1, 2, 8, 15])}
    asymmetric = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    if opset == 7:
        nodes = [node(op, "x", "y", mode="nearest", scales=[1.0, 1.0, 2.0, 3.0])]
    elif opset <= 10:
        nodes = [node(op, "x k", "y", mode="nearest")]
    elif op == "sizes":
        nodes = [node("Resize", "x _ _ z", "y", mode="nearest")]  # half_pixel: the same for whole factors
    else:
        nodes = [node(op, "x r k", "y", mode="nearest", **asymmetric)]
    proto = model(nodes, {"x": (1, 2, 4, 5)}, "y", w, opset)
    net = network(proto)
    feeds = feeds_for(net)
    expected = feeds["x"].repeat(2, axis=2).repeat(3, axis=3)
    assert np.array_equal(run(net, feeds)["y"], expected)
    if opset != 7:  # onnxruntime has no Upsample-7
        assert np.array_equal(ort_run(proto, feeds)["y"], expected)


@pytest.mark.parametrize("opset, axis, shape", [(13, 1, (2, 5, 3, 4)), (13, -1, (2, 5)), (11, 1, (2, 5, 1, 1)), (7, 1, (2, 5))])
def test_softmax(opset, axis, shape):
    check_against_ort(model([node("Softmax", "x", "y", axis=axis)], {"x": shape}, "y", opset=opset), 1e-5)


def test_concat_and_copies():
    nodes = [
        node("Relu", "x", "a"),
        node("Concat", "a x a", "c", axis=1),
        node("Dropout", "c", "d"),
        node("Identity", "d", "y"),
        node("Identity", "x", "z"),
        node("Identity", "y", "again"),
    ]
    net = check_against_ort(model(nodes, {"x": (2, 3, 4, 5)}, "y z again"), 1e-6)
    assert [t.name for t in net.outputs] == ["y", "z", "again"]


def test_views_are_names_only():
    w = {"w": weights(6, 4, 1, 1), "s": np.int64([2, 6]), "axes": np.int64([2, 3]), "img": np.int64([2, 4, 3, 5])}
    nodes = [
        node("Reshape", "x img", "i"),  # the input itself is taken as an image
        node("Conv", "i w", "c"),
        node("GlobalAveragePool", "c", "p"),
        node("Reshape", "p s", "r"),
        node("Sigmoid", "r", "g"),
        node("Unsqueeze", "g axes", "u"),
        node("Relu", "u", "v"),
        node("Squeeze", "v axes", "y"),
        node("Transpose", "u", "t", perm=(0, 3, 2, 1)),
        node("Flatten", "c", "flat"),
    ]
    net = check_against_ort(model(nodes, {"x": (2, 60)}, "y t flat c", w), 1e-5)
    assert net.inputs[0].shape == (2, 60) and net.inputs[0].shape4 == (2, 4, 3, 5)
    assert [(t.name, t.shape, t.shape4) for t in net.outputs] == [
        ("y", (2, 6), (2, 6, 1, 1)),
        ("t", (2, 1, 1, 6), (2, 6, 1, 1)),
        ("flat", (2, 90), (2, 6, 3, 5)),
        ("c", (2, 6, 3, 5), (2, 6, 3, 5)),
    ]
    assert [op.name for op in net.ops] == ["c", "p", "g", "v", "copy to c"]


def test_half_precision_inside_vanishes_and_io_is_as_declared():
    half = onnx.TensorProto.FLOAT16
    w = {"w": weights(4, 4, 1, 1, dtype=np.float16), "w2": weights(4, 4, 1, 1)}
    nodes = [
        node("Cast", "x", "h", to=half),
        node("Conv", "h w", "c"),
        node("Cast", "c", "f", to=1),
        node("Conv", "f w2", "d"),
        node("Cast", "d", "y", to=half),
        node("Relu", "f", "z"),
    ]
    proto = model(nodes, {"x": (1, 4, 3, 3)}, "y z", w)
    proto.graph.output[0].type.tensor_type.elem_type = half
    net = check_against_ort(proto, 2e-3)
    assert [op.name for op in net.ops] == ["c", "d", "z"]
    assert [t.dtype for t in (*net.inputs, *net.outputs)] == ["fp32", "fp16", "fp32"]


# ---- nodes that cannot be expressed


@pytest.mark.parametrize(
    "nodes, message",
    [
        (
            [node("Pad", "x p", "y", mode="edge")],
            "its pads remove all of axis 2 of .1, 4, 6, 6., so mode edge has nothing to repeat",
        ),
        ([node("ConvTranspose", "x m", "y")], "ConvTranspose y: expected constant weights, got the computed 'm'"),
    ],
)
def test_refusals_say_why(nodes, message):
    w = {"p": np.int64([0, 0, -7, 0, 0, 0, 9, 0])}
    inputs = {"x": (1, 4, 6, 6), "m": (4, 1, 1, 1)}
    with pytest.raises(ModelError, match=message):
        network(model(nodes, inputs, "y", w, 13))


@pytest.mark.parametrize("op", ["MatMul", "Gemm"])
def test_a_flattened_image_as_the_second_operand(tmp_path, op):
    """Only a first operand is taken as the image that it was."""
    steps = [node("Relu", "x", "r"), node("Flatten", "r", "f"), node(op, "b f", "y")]
    onnx.save(model(steps, {"x": (4, 5, 3, 3), "b": (7, 4)}, "y"), tmp_path / "m.onnx")
    check_against_ort(tmp_path / "m.onnx")


def test_refusals_are_listed_together():
    nodes = [node("ConvTranspose", "x z", "a"), node("Relu", "a", "b"), node("Pad", "b p", "y", mode="edge")]
    with pytest.raises(ModelError, match="2 nodes used in an unsupported way:\n  ConvTranspose a: .*\n  Pad y: "):
        network(model(nodes, {"x": (1, 4, 6, 6), "z": (4, 4, 1, 1)}, "y", {"p": np.int64([0, 0, -7, 0, 0, 0, 9, 0])}))


def test_every_operator_accepted_on_import_has_a_rule():
    elsewhere = {  # vanish, are views or shuffles, or split before lower
        "Constant",
        "Dropout",
        "Sum",
        "Mean",
        "Upsample",
        "GroupNormalization",
        "DepthToSpace",
        "SpaceToDepth",
        "Swish",
        "Einsum",
        "QuantizeLinear",
        "DequantizeLinear",
    }
    rules = set(lower.PROBLEMS) | elsewhere | pointwise.OPS | set(FUNCTIONS)
    assert rules - {"Pointwise", "Standardize", *lower.SHUFFLES} == OPERATORS


def test_lowering_is_deterministic():
    proto = model([node("Conv", "x w", "c"), node("Relu", "c", "y")], {"x": (1, 4, 3, 3)}, "y", {"w": weights(4, 4, 1, 1)})
    a, b = network(proto), network(proto)
    assert [(o.name, o.problem, o.inputs, o.output, o.when) for o in a.ops] == [
        (o.name, o.problem, o.inputs, o.output, o.when) for o in b.ops
    ]


def test_stages_compose_by_hand(tmp_path):
    proto = model([node("Relu", "x", "y")], {"x": (1, 4, 3, 3)}, "y")
    (tmp_path / "m.onnx").write_bytes(proto.SerializeToString())
    net = fuse(lower.lower(importer.read(tmp_path / "m.onnx")))
    assert net.name == "m" and net.tensors == {"x": (1, 4, 3, 3), "y": (1, 4, 3, 3)}
