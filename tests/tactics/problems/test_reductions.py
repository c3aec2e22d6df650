"""Reductions, softmax and normalizations beside onnxruntime: every axis and rank, opset variants, engines of them."""

import random

import numpy as np
import onnx
import pytest

import gpu_runtime as gr
from cuda_kernels.device import named
from cuda_kernels.launch import Emulated
from gpu_runtime.errors import ModelError
from tactics.candidates import candidates
from tactics.problems import codec
from tactics.problems.gather import ViewProblem
from tactics.problems.problem import PointwiseProblem, PoolProblem
from tactics.problems.reductions import NORMALIZATIONS, REDUCTIONS, NormalizeProblem, ReduceProblem
from tactics.sampling.data import random_data, reference
from tests.engines import judge
from tests.problems import ROWS, assert_right, execute
from tests.reference_run import check_against_ort, feeds_for, model, network, node

pytestmark = pytest.mark.slow

rng = np.random.default_rng(17)
# fmt: off
REDUCE = ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2", "ReduceSumSquare",
          "ReduceLogSum", "ReduceLogSumExp")
# fmt: on
AXES = [(0,), (1,), (2,), (3,), (-1,), (1, 2), (2, 3), (0, 2, 3), (1, 3), (0, 1, 2, 3)]


def only(proto, bound=1e-5, low=-1.0):
    """The one problem, beside views, of a model that agrees with onnxruntime."""
    (op,) = [op for op in check_against_ort(proto, bound, low).ops if not isinstance(op.problem, ViewProblem)]
    return op.problem


@pytest.mark.parametrize("keepdims", [0, 1])
@pytest.mark.parametrize("axes", AXES)
@pytest.mark.parametrize("op", REDUCE)
def test_reduce(op, axes, keepdims):
    low = 0.1 if op in ("ReduceLogSum", "ReduceProd") else -1
    proto = model([node(op, "x a", "y", keepdims=keepdims)], {"x": (2, 5, 3, 4)}, "y", {"a": np.int64(axes)}, 18)
    p = only(proto, low=low)
    assert isinstance(p, PoolProblem if axes == (2, 3) and op in ("ReduceMean", "ReduceMax") else ReduceProblem)


OPSETS = [("ReduceSum", 11), ("ReduceSum", 13), ("ReduceL2", 13), ("ReduceMin", 11), ("ReduceMax", 12)]


@pytest.mark.parametrize("op, opset", OPSETS)
def test_axes_are_attributes_or_inputs(op, opset):
    given = op == "ReduceSum" and opset >= 13
    reduce = node(op, "x a", "y") if given else node(op, "x", "y", axes=[1, -1])
    p = only(model([reduce], {"x": (2, 5, 3, 4)}, "y", {"a": np.int64([1, -1])} if given else {}, opset))
    assert p.axes == "cw"


RANKS = [
    ((7,), (0,)),
    ((3, 7), (0,)),
    ((3, 7), (1,)),
    ((2, 3, 7), (1,)),
    ((2, 3, 4, 5, 6), (2, 3, 4)),
    ((2, 3, 4, 5, 6), (1,)),
    ((2, 3, 4, 5, 6), (0, 4)),
    ((2, 3, 2, 5, 2, 3), (2, 3)),
]


@pytest.mark.parametrize("shape, axes", RANKS)
def test_reduce_any_rank(shape, axes):
    only(model([node("ReduceL1", "x a", "y")], {"x": shape}, "y", {"a": np.int64(axes)}, 18))
    only(model([node("ReduceMean", "x", "y", axes=axes, keepdims=0)], {"x": shape}, "y", {}, 13))


@pytest.mark.parametrize("axes", [(1, 3), (0, 2, 4), (-1, 0, 2)])
@pytest.mark.parametrize("op", ["ReduceMean", "ReduceMax", "ReduceSum"])
def test_reduce_more_runs_than_axes_of_a_problem(op, axes):
    """One run of axes after the other; what depends on all of them at once is refused."""
    proto = model([node(op, "x a", "y", keepdims=0)], {"x": (2, 3, 4, 5, 6)}, "y", {"a": np.int64(axes)}, 18)
    problems = [op.problem for op in check_against_ort(proto, 1e-5).ops if not isinstance(op.problem, ViewProblem)]
    assert [p.kind for p in problems] == [op.removeprefix("Reduce").lower()] * len(axes)
    with pytest.raises(ModelError, match="expected at most 4 dimensions"):
        network(model([node("ReduceL2", "x a", "y")], {"x": (2, 3, 4, 5, 6)}, "y", {"a": np.int64(axes)}, 18))


def test_reduce_nothing():
    empty = {"a": np.int64([])}
    p = only(model([node("ReduceSum", "x a", "y", noop_with_empty_axes=1)], {"x": (2, 5, 3, 4)}, "y", empty, 18))
    assert p == PointwiseProblem(2, 5, 3, 4)


def test_reduce_everything_without_axes():
    p = only(model([node("ReduceMean", "x", "y", keepdims=0)], {"x": (2, 5, 3, 4)}, "y", {}, 13))
    assert p.axes == "nchw"


@pytest.mark.parametrize("op", ["Softmax", "LogSoftmax"])
@pytest.mark.parametrize(
    "shape, axis",
    [*(((2, 5, 3, 4), a) for a in (0, 1, 2, -1)), ((2, 7), 1), ((2, 7), 0), ((2, 3, 9), -1), ((2, 3, 4, 5, 6), 2), ((9,), 0)],
)
def test_softmax_over_any_axis(op, shape, axis):
    assert isinstance(only(model([node(op, "x", "y", axis=axis)], {"x": shape}, "y")), NormalizeProblem)


@pytest.mark.parametrize("opset, axis", [(7, 1), (11, 1), (11, 2), (11, -1)])
def test_softmax_of_old_opsets_is_over_all_from_an_axis(opset, axis):
    only(model([node("Softmax", "x", "y", axis=axis)], {"x": (2, 5, 3, 4)}, "y", {}, opset))


@pytest.mark.parametrize("op", ["Softmax", "LogSoftmax"])
@pytest.mark.parametrize(
    "perm, back, axis", [((0, 2, 3, 1), (0, 3, 1, 2), -1), ((2, 0, 3, 1), (1, 3, 0, 2), 0), ((0, 2, 3, 1), (0, 3, 1, 2), 1)]
)
def test_softmax_between_transpositions_is_one_of_another_axis(op, perm, back, axis):
    nodes = [node("Transpose", "x", "t", perm=perm), node(op, "t", "s", axis=axis), node("Transpose", "s", "y", perm=back)]
    assert only(model(nodes, {"x": (2, 5, 3, 4)}, "y")).axes == "nchw"[perm[axis]]
    nodes[2] = node("Transpose", "s", "y", perm=perm)  # not back
    assert len(check_against_ort(model(nodes, {"x": (2, 5, 3, 4)}, "y"), 1e-5, -1.0).ops) == 3
    nodes[2] = node("Transpose", "s", "y", perm=back)  # and read in between
    assert len(check_against_ort(model(nodes, {"x": (2, 5, 3, 4)}, "y s"), 1e-5, -1.0).ops) == 3


def values(*shape):
    return rng.uniform(-2, 2, shape).astype(np.float32)


@pytest.mark.parametrize("shape", [(2, 6, 5, 4), (2, 6, 9), (2, 6, 3, 4, 5)])
@pytest.mark.parametrize("op", ["InstanceNormalization", "BatchNormalization"])
def test_instance_and_batch_normalization(op, shape):
    w = {"s": values(6), "b": values(6), "m": values(6), "v": abs(values(6)) + 0.5}
    inputs = "x s b" if op[0] == "I" else "x s b m v"
    only(model([node(op, inputs, "y", epsilon=1e-3)], {"x": shape}, "y", w))


@pytest.mark.parametrize("groups", [1, 2, 3, 6])
def test_group_normalization(groups):
    w = {"s": values(6), "b": values(6)}
    p = only(model([node("GroupNormalization", "x s b", "y", num_groups=groups)], {"x": (2, 6, 5, 4)}, "y", w, 21), 1e-4)
    assert (p.groups, p.axes) == ((1, "hw") if groups == 6 else (groups, "chw"))


@pytest.mark.parametrize("opset", [18, 19, 20])
@pytest.mark.parametrize("shape", [(2, 6, 9), (2, 6, 5, 4), (2, 6, 3, 4, 5)])
@pytest.mark.parametrize("groups", [1, 3, 6])
def test_group_normalization_that_scales_groups(opset, shape, groups):
    """As opsets 18 to 20 have it; also inside of an If."""
    w = {"s": values(groups), "b": values(groups)}
    whole = node("GroupNormalization", "x s b", "y", num_groups=groups, epsilon=1e-3)
    p = only(model([whole], {"x": shape}, "y", w, opset), 1e-4)
    assert (p.groups, p.affine) == (1 if groups == 6 else groups, "c")
    out = onnx.helper.make_tensor_value_info("y", 1, None)
    branch = onnx.helper.make_graph([whole], "t", [], [out])
    choose = node("If", "c", "y", then_branch=branch, else_branch=branch, name="choose")
    assert only(model([choose], {"x": shape}, "y", w | {"c": np.True_}, opset), 1e-4) == p


@pytest.mark.parametrize(
    "shape, axis", [*(((2, 6, 5, 4), a) for a in (-1, 1, 2)), ((3, 7, 8), -1), ((3, 8), -1), ((2, 3, 4, 5, 6), 3)]
)
@pytest.mark.parametrize("bias", [False, True])
def test_layer_normalization(shape, axis, bias):
    w = {"s": values(*shape[axis:])} | ({"b": values(*shape[axis:])} if bias else {})
    only(model([node("LayerNormalization", "x s b" if bias else "x s", "y", axis=axis)], {"x": shape}, "y", w))


def test_layer_normalization_gives_its_statistics():
    w = {"s": values(5, 4), "b": values(5, 4)}
    nodes = [node("LayerNormalization", "x s b", "y mean inv", axis=2, epsilon=0.01, name="ln")]
    net = check_against_ort(model(nodes, {"x": (2, 6, 5, 4)}, "y mean inv", w), 1e-5)
    assert [op.problem.kind for op in net.ops] == ["standard", "mean", "inv_std"]


@pytest.mark.parametrize("shape, axes", [*(((2, 6, 5, 4), a) for a in ([1], [-1], [1, 2, 3])), ((2, 9, 8), [-1])])
@pytest.mark.parametrize("square", ["Pow", "Mul"])
def test_normalization_written_in_nodes_is_one_kernel(shape, axes, square):
    w = {"e": np.float32(1e-3), "two": np.float32(2), "b": values(*shape[-1:])}
    w["s"] = values(*shape[1:2], *[1] * (len(shape) - 2))
    power = node("Pow", "d two", "q") if square == "Pow" else node("Mul", "d d", "q")
    nodes = [
        node("ReduceMean", "x", "m", axes=axes),
        node("Sub", "x m", "d"),
        power,
        node("ReduceMean", "q", "v", axes=axes),
        node("Add", "v e", "ve"),
        node("Sqrt", "ve", "r"),
        node("Div", "d r", "n"),
        node("Mul", "n s", "o"),
        node("Add", "o b", "y"),
    ]
    net = check_against_ort(model(nodes, {"x": shape}, "y", w, 13), 1e-5)
    kinds = [op for op in net.ops if not isinstance(op.problem, ViewProblem)]
    taken = axes != [-1]  # the scale along channels is the normalization's own, where that does not go along columns
    assert [type(op.problem) for op in kinds] == [NormalizeProblem, PointwiseProblem]
    assert kinds[0].problem.affine == ("c" if taken else "") and kinds[0].problem.epsilon == pytest.approx(1e-3)
    assert kinds[0].nodes == ("m", "d", "q", "v", "ve", "r", "n", *(["o"] if taken else []))
    net = check_against_ort(model(nodes, {"x": shape}, "y v", w, 13), 1e-5)  # the variance is wanted: apart
    assert not any(isinstance(op.problem, NormalizeProblem) for op in net.ops)


@pytest.mark.parametrize("op", ["Mul Add", "Mul", "Sub", "Div"])
def test_scale_and_shift_along_the_columns_are_the_normalizations_own(op):
    w = {"e": np.float32(1e-3), "two": np.float32(2), "s": abs(values(8)) + 0.5, "b": values(8)}
    nodes = [
        node("ReduceMean", "x", "m", axes=[-1]),
        node("Sub", "x m", "d"),
        node("Pow", "d two", "q"),
        node("ReduceMean", "q", "v", axes=[-1]),
        node("Add", "v e", "ve"),
        node("Sqrt", "ve", "r"),
        node("Div", "d r", "n"),
    ]
    first, *more = op.split()
    nodes += [node(first, "n s", "o" if more else "y"), *(node(o, "o b", "y") for o in more)]
    p = only(model(nodes, {"x": (2, 9, 8)}, "y", w, 13))
    assert p.affine == p.axes == "w"


@pytest.mark.parametrize("shape", [(2, 6, 5, 4), (2, 6, 9)])
@pytest.mark.parametrize("groups", [1, 3, 6])
def test_group_normalization_between_reshapes_is_one_kernel(shape, groups):
    """As PyTorch's exporter writes it for operator sets without GroupNormalization."""
    one = (1,) * (len(shape) - 2)
    w = {
        "to": np.int64([0, groups, -1]),
        "back": np.int64(shape),
        "s": values(groups),
        "b": values(groups),
        "g": values(6, *one),
        "h": values(6, *one),
    }
    nodes = [
        node("Reshape", "x to", "t"),
        node("InstanceNormalization", "t s b", "i", epsilon=1e-3),
        node("Reshape", "i back", "u"),
        node("Mul", "u g", "m"),
        node("Add", "m h", "y"),
    ]
    p = only(model(nodes, {"x": shape}, "y", w), 1e-4)
    pixels = "hw" if len(shape) == 4 else "w"
    assert (p.groups, p.axes, p.affine) == ((1, pixels, "c") if groups == 6 else (groups, f"c{pixels}", "c"))
    assert len(check_against_ort(model(nodes, {"x": shape}, "y i", w), 1e-4).ops) > 1  # an inner tensor is an output


def test_normalization_of_a_large_offset_keeps_its_bits():
    """Mean 500, deviation 1: one pass of sums would cancel all that matters."""
    p = NormalizeProblem(1, 8, 30, 30, "standard", "hw", epsilon=1e-5)
    x = (500 + rng.standard_normal((1, 8, 30, 30))).astype(np.float16)
    exact = x.astype(np.float64)
    exact = (exact - exact.mean((2, 3), keepdims=True)) / exact.std((2, 3), keepdims=True)
    assert np.allclose(p.reference(x), exact, atol=1e-4)
    (tactic,) = [t for t in candidates(p, named("h200")) if str(t.ins[0]) == str(t.out) == "fp16:hwc8"]
    assert_right(p, tactic, execute(Emulated(named("h200")), p, tactic, [x], {}), exact)


def test_problems_survive_json_and_random_data_suits_them():
    for name, p in ROWS.items():
        assert codec.from_json(codec.to_json(p)) == p
        assert np.isfinite(reference(p, *random_data(p))).all(), name
    assert len({str(p) for p in ROWS.values()}) == len(ROWS) and {p.kind for p in ROWS.values()} >= set(REDUCTIONS)


@pytest.mark.parametrize("wrong", [("median", "hw"), ("sum", ""), ("sum", "wh")])
def test_wrong_rows_are_refused(wrong):
    with pytest.raises(ValueError, match="rows: "):
        ReduceProblem(1, 1, 1, 1, *wrong)
    with pytest.raises(ValueError, match="cannot be in 2 groups"):
        NormalizeProblem(1, 6, 1, 1, "standard", "hw", 2)


def test_an_engine_of_rows_runs(tmp_path):
    """A tail of a style network and an attention over channels: every kind of rows in one plan."""
    w = {name: values(16) for name in "sbg"} | {"w": values(16, 8, 3, 3) / 8, "a": np.int64([1])}
    nodes = [
        node("Conv", "x w", "c", pads=(1, 1, 1, 1)),
        node("InstanceNormalization", "c s b", "i"),
        node("Relu", "i", "r"),
        node("GroupNormalization", "r g b", "n", num_groups=2),
        node("ReduceMean", "n a", "m"),
        node("Sub", "n m", "d"),
        node("Softmax", "d", "p", axis=1),
        node("LogSoftmax", "d", "y", axis=3),
        node("ReduceL2", "p a", "z"),
    ]
    path = tmp_path / "m.onnx"
    path.write_bytes(model(nodes, {"x": (2, 8, 6, 7)}, "y z", w, opset=21).SerializeToString())
    engine = gr.build(path, device="h200")
    feeds = {name: x.astype(np.float16).astype(np.float32) for name, x in feeds_for(network(path)).items()}
    judge(engine, path, feeds)
    types = {layer["LayerType"] for layer in engine.layer_info()["Layers"]}
    assert {"Normalization", "SoftMax", "Reduce"} <= types


# ---- drawn problems


def drawn(seed: int) -> ReduceProblem | NormalizeProblem:
    pick = random.Random(seed)
    dims = [pick.choice(sizes) for sizes in ((1, 2, 3), (1, 3, 8, 24, 40, 65), (1, 2, 9), (1, 3, 13))]
    axes = "".join(a for a in "nchw" if pick.random() < 0.5) or "c"
    if pick.random() < 0.5:
        return ReduceProblem(*dims, pick.choice([k for k in REDUCTIONS if k not in ("prod", "inv_std")]), axes)
    kind = pick.choice(NORMALIZATIONS)
    groups = pick.choice([g for g in (1, 1, 2, 4, 5) if dims[1] % g == 0]) if "c" in axes else 1
    affine = "".join(a for a in "chw" if pick.random() < 0.5) if kind == "standard" else ""
    return NormalizeProblem(*dims, kind, axes, groups, 0.1, affine)


def check_drawn(seed: int, count: int | None = None) -> None:
    """`count` of its tactics, or each."""
    problem, device = drawn(seed), named("h200")
    inputs, weights = random_data(problem)
    tactics = candidates(problem, device)
    for tactic in random.Random(seed).sample(tactics, min(count or len(tactics), len(tactics))):
        got = execute(Emulated(device), problem, tactic, inputs, weights)
        assert_right(problem, tactic, got, reference(problem, inputs, weights))


@pytest.mark.parametrize("seed", range(20))
def test_drawn_rows(seed):
    check_drawn(seed, 3)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1000, 1300))
def test_many_drawn_rows(seed):
    check_drawn(seed)
