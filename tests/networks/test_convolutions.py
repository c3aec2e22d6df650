"""Conv, ConvTranspose, Gemm and MatMul in every form: the lowered network against onnxruntime, then the kernels."""

import random

import numpy as np
import pytest

from tactics.problems.gather import ViewProblem
from tactics.problems.problem import ConvProblem, ConvTransposeProblem, MatmulProblem
from tests.engines import check_engine
from tests.networks.test_moves import kinds
from tests.reference_run import check_against_ort, model, node

pytestmark = pytest.mark.slow


def weights(*shape, seed=0):
    w = np.random.default_rng(seed).standard_normal(shape) / np.sqrt(max(1, np.prod(shape[1:])))
    return w.astype(np.float16).astype(np.float32)


def draw_transpose(seed: int):
    """A ConvTranspose with several groups, of rank 3 or 4, all its attributes drawn."""
    rng = random.Random(seed)
    groups, c, k, rank = rng.choice((2, 3, 6)), rng.choice((1, 2, 4)), rng.choice((1, 2, 3)), rng.choice((1, 2, 2))
    size, stride = [rng.randint(1, 4) for _ in range(rank)], [rng.randint(1, 3) for _ in range(rank)]
    dilation, image = [rng.randint(1, 2) for _ in range(rank)], [rng.randint(2, 5) for _ in range(rank)]
    extra = [rng.randint(0, s - 1) for s in stride]
    pads = [rng.randint(0, min(2, (size[i % rank] - 1) * dilation[i % rank])) for i in range(2 * rank)]
    lengths = [
        (image[i] - 1) * stride[i] + (size[i] - 1) * dilation[i] + 1 + extra[i] - pads[i] - pads[i + rank] for i in range(rank)
    ]
    if min(lengths) < 1:
        pads = [0] * (2 * rank)
    how = {"strides": stride, "dilations": dilation, "pads": pads, "output_padding": extra, "group": groups}
    w = {"w": weights(groups * c, k, *size, seed=seed), "b": weights(groups * k, seed=seed + 1)}
    nodes = [node("ConvTranspose", "x w b", "a", **how), node("Relu", "a", "y")]
    return model(nodes, {"x": (2, groups * c, *image)}, "y", w)


@pytest.mark.parametrize("seed", range(30))
def test_grouped_transposed_convolution(seed):
    net = check_against_ort(draw_transpose(seed), 1e-3)
    problem = net.ops[-1].problem
    assert isinstance(problem, (ConvProblem, ConvTransposeProblem)) and problem.groups > 1
    assert all(op.problem is problem or isinstance(op.problem, ViewProblem) for op in net.ops)


@pytest.mark.parametrize("seed", [0, 1])
def test_grouped_transposed_convolution_runs(tmp_path, seed):
    check_engine(tmp_path, draw_transpose(seed))


@pytest.mark.parametrize(
    "op, how, w",
    [
        ("Conv", {"strides": (2,), "pads": (1, 2), "dilations": (2,)}, {"w": weights(6, 4, 3), "b": weights(6)}),
        ("Conv", {"auto_pad": "SAME_UPPER", "strides": (2,), "group": 2}, {"w": weights(6, 2, 4)}),
        ("Conv", {"group": 4, "pads": (1, 1)}, {"w": weights(4, 1, 3)}),
        ("ConvTranspose", {"strides": (2,), "pads": (1, 0), "output_padding": (1,)}, {"w": weights(4, 6, 3)}),
        ("ConvTranspose", {"strides": (2,)}, {"w": weights(4, 6, 2)}),
        ("MaxPool", {"kernel_shape": (3,), "strides": (2,), "pads": (1, 1)}, {}),
        ("AveragePool", {"kernel_shape": (4,), "strides": (3,), "pads": (2, 1), "count_include_pad": 1}, {}),
        ("AveragePool", {"kernel_shape": (3,), "auto_pad": "SAME_LOWER"}, {}),
    ],
)
def test_one_dimension(tmp_path, op, how, w):
    nodes = [node(op, " ".join(["x", *w]), "a", **how), node("Relu", "a", "y")]
    proto = model(nodes, {"x": (2, 4, 11)}, "y", w)
    check_against_ort(proto, 1e-3)
    check_engine(tmp_path, proto)


@pytest.mark.parametrize(
    "shape, w, expected",
    [
        ((2, 5, 12), (12, 7), ["View", "Conv", "View"]),
        ((2, 3, 5, 12), (12, 8), ["View", "Conv", "View"]),
        ((12,), (12, 8), ["Conv"]),
        ((3, 12), (12, 8), ["Conv"]),
    ],
)
def test_matmul_by_a_constant_is_a_convolution(tmp_path, shape, w, expected):
    """Bias and scale of the columns, and an activation, are its epilogue; the views around it launch nothing."""
    constants = {"w": weights(*w), "b": weights(w[1], seed=1), "s": np.abs(weights(w[1], seed=2)) + 0.5}
    nodes = [node("MatMul", "x w", "a"), node("Mul", "a s", "c"), node("Add", "c b", "d"), node("Relu", "d", "y")]
    if len(shape) == 1:
        nodes = [node("MatMul", "x w", "y")]
    proto = model(nodes, {"x": shape}, "y", constants)
    assert kinds(check_against_ort(proto, 1e-3)) == expected
    engine = check_engine(tmp_path, proto, input_formats="fp16:chw", output_formats="fp16:chw")
    assert sum(step.kernel.startswith("conv") for step in engine.plan.steps) == 1
    assert [row.layer for row in engine.sparsity.rows] == [nodes[0].name]


@pytest.mark.parametrize("shape", [(12, 5), (2, 12, 5), (2, 3, 12, 5)])
def test_constant_times_tensor(tmp_path, shape):
    constants = {"w": weights(7, 12), "b": weights(7, 1, seed=1)}
    proto = model([node("MatMul", "w x", "a"), node("Add", "a b", "y")], {"x": shape}, "y", constants)
    net = check_against_ort(proto, 1e-3)
    assert sum(isinstance(op.problem, ConvProblem) for op in net.ops) == 1 and set(kinds(net)) <= {"Conv", "View"}
    check_engine(tmp_path, proto)


def test_weights_are_eligible_for_sparsity_in_every_matmul(tmp_path):
    w = weights(16, 8)
    w[np.arange(16) % 4 > 1] = 0  # 2:4 along the inner dimension
    engine = check_engine(tmp_path, model([node("MatMul", "x w", "y")], {"x": (2, 5, 16)}, "y", {"w": w}), sparsity="enable")
    assert engine.sparsity.eligible == ("y",)


@pytest.mark.parametrize(
    "a, b",
    [
        ((5, 7), (7, 6)),
        ((2, 5, 8), (2, 8, 6)),
        ((2, 3, 5, 8), (3, 8, 6)),
        ((2, 1, 5, 8), (1, 3, 8, 6)),
        ((8,), (2, 8, 6)),
        ((2, 5, 8), (8,)),
        ((2, 2, 3, 5, 8), (2, 2, 3, 8, 6)),
        ((2, 1, 3, 5, 8), (2, 1, 8, 6)),
    ],
)
def test_product_of_two_computed_tensors(tmp_path, a, b):
    proto = model([node("Relu", "x", "r"), node("Relu", "z", "s"), node("MatMul", "r s", "y")], {"x": a, "z": b}, "y")
    net = check_against_ort(proto, 1e-5)
    assert any(isinstance(op.problem, MatmulProblem) for op in net.ops)
    check_engine(tmp_path, proto)


def test_gemm_of_two_computed_tensors(tmp_path):
    proto = model([node("Gemm", "x z", "y", transA=1, transB=1)], {"x": (8, 5), "z": (6, 8)}, "y")
    check_against_ort(proto, 1e-5)
    check_engine(tmp_path, proto)


@pytest.mark.sample(11)
@pytest.mark.parametrize(
    "shape, matrices",
    [
        ((3, 5, 8), (3, 8, 4)),
        ((2, 3, 5, 8), (3, 8, 4)),
        ((2, 3, 5, 8), (1, 3, 8, 4)),
        ((2, 3, 5, 8), (2, 3, 8, 4)),
        ((5, 8), (3, 8, 4)),
        ((8,), (3, 8, 4)),
        ((2, 5, 8), (8,)),
        ((1, 5, 8), (3, 8, 4)),
        ((2, 1, 5, 8), (1, 1, 8, 4)),
        ((3, 2, 5, 8), (3, 1, 8, 4)),
        ((1, 2, 5, 8), (3, 1, 8, 4)),
    ],
)
@pytest.mark.parametrize("first", [False, True])
def test_product_by_a_constant_matrix_for_each_batch(tmp_path, shape, matrices, first):
    shapes = [(*s[:-2], s[-1], s[-2]) if first and len(s) > 1 else s for s in (shape, matrices)]
    nodes = [node("Relu", "x", "r"), node("MatMul", "w r" if first else "r w", "y")]
    proto = model(nodes, {"x": shapes[0]}, "y", {"w": weights(*shapes[1])})
    net = check_against_ort(proto)
    assert any(isinstance(op.problem, ConvProblem) for op in net.ops)
    check_engine(tmp_path, proto)


@pytest.mark.parametrize("axis, shape", [(2, (2, 3, 5, 4)), (-1, (1, 8, 3, 4)), (0, (3, 4)), (-1, (2, 3, 4, 2, 5))])
def test_softmax_of_any_axis(tmp_path, axis, shape):
    proto = model([node("Softmax", "x", "y", axis=axis)], {"x": shape}, "y")
    check_against_ort(proto, 1e-5)
    check_engine(tmp_path, proto)


# ---- volumes: tensors of rank 5


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize(
    "attributes",
    [
        {},
        {"pads": (1, 0, 2, 0, 1, 1)},
        {"strides": (2, 1, 2), "pads": (1, 1, 1, 1, 1, 1)},
        {"dilations": (2, 1, 2)},
        {"auto_pad": "SAME_LOWER", "strides": (2, 2, 1)},
    ],
)
def test_convolution_of_volumes(attributes, groups):
    nodes = [
        node("Conv", "x w b", "c", group=groups, **attributes),
        node("BatchNormalization", "c s b m v", "n"),
        node("Relu", "n", "r"),
        node("Add", "r n", "y"),
    ]
    w = {"w": weights(8, 4 // groups, 3, 2, 3), "b": weights(8), "s": weights(8), "m": weights(8), "v": abs(weights(8)) + 1}
    net = check_against_ort(model(nodes, {"x": (2, 4, 6, 5, 7)}, "y", w))
    assert [type(op.problem).__name__ for op in net.ops].count("ConvProblem") == 1


@pytest.mark.parametrize("op", ["MaxPool", "AveragePool"])
@pytest.mark.parametrize(
    "attributes",
    [
        {},
        {"pads": (1, 0, 1, 0, 1, 1), "strides": (2, 1, 3)},
        {"pads": (1, 1, 1, 1, 1, 1), "strides": (2, 2, 2), "ceil_mode": 1},
        {"pads": (1, 1, 1, 1, 1, 1), "strides": (3, 2, 2), "ceil_mode": 1, "count_include_pad": 1},
        {"dilations": (2, 1, 2)},
    ],
)
def test_pool_of_volumes(op, attributes):
    attributes = {k: v for k, v in attributes.items() if (op, k) != ("MaxPool", "count_include_pad")}
    nodes = [node(op, "x", "y", kernel_shape=(3, 2, 3), **attributes)]
    check_against_ort(model(nodes, {"x": (2, 3, 7, 6, 8)}, "y", opset=19), 1e-5)
