"""Operators that only move elements, of any rank and along any axis: the lowered network against onnxruntime, then kernels."""

import itertools
import math
import random
import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_runtime.lowering import moves
from tactics.problems.gather import COORDINATES, GatherProblem, ResizeProblem, ViewProblem
from tactics.problems.problem import MoveProblem
from tests.engines import check_engine
from tests.reference_run import check_against_ort, feeds_for, model, network, node, ort_run, run

pytestmark = pytest.mark.slow

INT = np.int64


def drawn(*shape) -> np.ndarray:
    return np.random.default_rng(0).uniform(-1, 1, shape).astype(np.float32)


def kinds(net) -> list[str]:
    return [type(op.problem).__name__.removesuffix("Problem") for op in net.ops]


# (nodes, shape of x, constants, problems); opset 18 with Slice, Pad and Resize as they are today.
# fmt: off
CASES = {
    "slice_backwards": (
        [node("Slice", "x s e a t", "y")], (2, 6, 5, 4),
        {"s": INT([-1, 3]), "e": INT([-1000, 0]), "a": INT([1, 3]), "t": INT([-2, -1])}, ["Gather"],
    ),
    "slice_images": ([node("Slice", "x s e a", "y")], (5, 6, 2, 2), {"s": INT([1]), "e": INT([4]), "a": INT([0])}, ["Gather"]),
    "slice_strided_of_rank_5": (
        [node("Slice", "x s e a t", "y")], (2, 3, 4, 5, 6),
        {"s": INT([1, 0]), "e": INT([4, 9]), "a": INT([2, -1]), "t": INT([2, 3])}, ["View", "Move", "View"],
    ),
    "pad_reflect": ([node("Pad", "x p", "y", mode="reflect")], (1, 3, 4, 5), {"p": INT([0, 1, 2, 3, 0, 0, 3, 4])}, ["Gather"]),
    "pad_edge": ([node("Pad", "x p", "y", mode="edge")], (1, 3, 4, 5), {"p": INT([0, 0, 2, 3, 1, 0, 3, 4])}, ["Gather"]),
    "pad_wrap": ([node("Pad", "x p", "y", mode="wrap")], (1, 3, 4, 5), {"p": INT([0, 0, 2, 3, 0, 0, 3, 4])}, ["Gather"]),
    "pad_crops": ([node("Pad", "x p", "y")], (1, 3, 4, 5), {"p": INT([0, 0, -1, 3, 0, 0, 3, -2])}, ["Move"]),
    "pad_wrap_crops": (  # the cropped elements are not the ones that wrap
        [node("Pad", "x p", "y", mode="wrap")], (1, 3, 4, 5), {"p": INT([0, 0, -1, 3, 0, 0, 3, -2])}, ["Gather"],
    ),
    "pad_images": (
        [node("Pad", "x p v", "y")], (1, 3, 4), {"p": INT([1, 0, 0, 1, 0, 2]), "v": np.float32(2.5)}, ["Gather"],
    ),
    "gather_channels": ([node("Gather", "x i", "y", axis=1)], (2, 6, 3, 4), {"i": INT([5, 0, -2, 0])}, ["Gather"]),
    "gather_one": ([node("Gather", "x i", "y", axis=0)], (2, 1, 6, 3, 4), {"i": INT(1)}, ["View", "Move", "View"]),
    "gather_table": ([node("Gather", "x i", "y", axis=2)], (2, 3, 5), {"i": INT([[0, 4], [2, 2]])}, ["Gather", "View"]),
    "expand": ([node("Expand", "x s", "y")], (3, 1, 4), {"s": INT([2, 3, 5, 4])}, ["View", "Gather"]),
    "tile": ([node("Tile", "x r", "y")], (2, 3, 2, 4), {"r": INT([1, 2, 3, 1])}, ["Gather"]),
    "concat_rows": ([node("Relu", "x", "r"), node("Concat", "x r x", "y", axis=2)], (2, 3, 2, 4), {}, ["Pointwise", "Concat"]),
    "concat_columns": ([node("Relu", "x", "r"), node("Concat", "x r", "y", axis=-1)], (2, 3, 4), {}, ["Pointwise", "Concat"]),
    "concat_images": ([node("Relu", "x", "r"), node("Concat", "x r", "y", axis=0)], (2, 3, 4, 1), {}, ["Pointwise", "Concat"]),
    "concat_constant": ([node("Concat", "x c", "y", axis=1)], (2, 3, 4, 5), {"c": drawn(2, 8, 4, 5)},
                        ["Move", "Pointwise"]),
    "concat_constant_token": ([node("Concat", "c x", "y", axis=1)], (2, 4, 16), {"c": drawn(2, 1, 16)},
                              ["Move", "Pointwise"]),
    "concat_constants_between": (
        [node("Relu", "x", "r"), node("Concat", "c r d x e c", "y", axis=-1)], (2, 3, 4, 5),
        {"c": drawn(2, 3, 4, 2), "d": drawn(2, 3, 4, 1), "e": drawn(2, 3, 4, 0)},
        ["Pointwise", "Move", "Move", "Concat", "Pointwise"],
    ),
    "concat_of_rank_5": (
        [node("Relu", "x", "r"), node("Concat", "x r", "y", axis=4)], (2, 3, 2, 2, 3), {},
        ["Pointwise", "View", "View", "Concat", "View"],
    ),
    "split_rows": ([node("Split", "x", "y z", axis=2, num_outputs=2)], (1, 3, 5, 4), {}, ["Move", "Move"]),
    "split_images": ([node("Split", "x", "y z", axis=0, num_outputs=2)], (3, 3, 5), {}, ["Gather", "Gather"]),
    "nhwc": (
        [
            node("Transpose", "x", "t", perm=(0, 3, 1, 2)), node("Relu", "t", "r"),
            node("Transpose", "r", "y", perm=(0, 2, 3, 1)),
        ],
        (2, 5, 6, 3), {}, ["Gather", "Pointwise", "Gather"],
    ),
    "reshape_mixes": (
        [node("Relu", "x", "r"), node("Reshape", "r s", "t"), node("Relu", "t", "y")], (2, 6, 3, 4), {"s": INT([2, 3, 24])},
        ["Pointwise", "View", "Pointwise"],
    ),
    "anchors": (  # the head of a detector: [N, A*K, H, W] -> [N, A*H*W, K]
        [
            node("Relu", "x", "r"), node("Reshape", "r s", "t"), node("Transpose", "t", "u", perm=(0, 1, 3, 4, 2)),
            node("Reshape", "u v", "w"), node("Relu", "w", "y"),
        ],
        (2, 6, 3, 4), {"s": INT([2, 3, 2, 3, 4]), "v": INT([2, -1, 2])},
        ["Pointwise", "View", "View", "Gather", "View", "View", "Pointwise"],
    ),
    "six_axes": (
        [node("Transpose", "x", "y", perm=(5, 3, 1, 4, 2, 0))], (2, 3, 2, 2, 3, 2), {}, None,
    ),
}
# fmt: on


@pytest.mark.parametrize("name", CASES)
def test_moves(name):
    nodes, shape, constants, expected = CASES[name]
    net = check_against_ort(model(nodes, {"x": shape}, " ".join(nodes[-1].output), constants, 18), 1e-6)
    assert expected is None or kinds(net) == expected


@pytest.mark.parametrize("rank", [2, 3, 4, 5])
def test_every_permutation(rank):
    shape = (2, 3, 4, 5, 2)[:rank]
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    for perm in itertools.permutations(range(rank)):
        nodes = [node("Relu", "x", "r"), node("Transpose", "r", "t", perm=perm), node("Relu", "t", "y")]
        net = network(model(nodes, {"x": shape}, "y"))
        assert np.array_equal(run(net, {"x": x})["y"], x.transpose(perm)), perm


MODES = ("nearest", "linear", "cubic")
TURNS = ("half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "align_corners", "asymmetric", "tf_crop_and_resize")


@pytest.mark.parametrize("turn", TURNS)
@pytest.mark.parametrize("mode", MODES)
def test_resize(mode, turn):
    rng = random.Random(f"{mode} {turn}")
    for _ in range(12):
        h, w = rng.randint(1, 7), rng.randint(1, 7)
        how = {"mode": mode, "coordinate_transformation_mode": turn}
        constants: dict[str, Any] = {}
        slots = ["x", "_", "_", "_"]
        if turn == "tf_crop_and_resize":
            constants["r"] = np.float32([0, 0, rng.uniform(-0.2, 0.4), 0, 1, 1, rng.uniform(0.6, 1.3), 1])
            slots[1], how["extrapolation_value"] = "r", 2.5
        if rng.random() < 0.5:
            constants["s"], slots[2] = np.float32([1, 1, rng.choice((0.6, 1, 1.5, 2, 3.2)), rng.choice((0.7, 1, 2, 2.3))]), "s"
            if min(int(h * constants["s"][2]), int(w * constants["s"][3])) < 1:
                continue
        else:
            constants["z"], slots[3] = INT([1, 3, rng.randint(1, 12), rng.randint(1, 12)]), "z"
        if turn == "tf_crop_and_resize":
            sizes = constants["s"][2:] if "s" in constants else constants["z"][2:] / (h, w)
            if 1 in sizes:  # onnxruntime then ignores the region
                continue
        if mode == "nearest":
            how["nearest_mode"] = rng.choice(("floor", "ceil", "round_prefer_floor", "round_prefer_ceil"))
        if mode == "cubic":
            how["cubic_coeff_a"] = rng.choice((-0.75, -0.5))
            how["exclude_outside"] = rng.choice((0, 1))
        proto = model([node("Resize", " ".join(slots), "y", **how)], {"x": (1, 3, h, w)}, "y", constants, 19)
        net = network(proto)
        feeds = feeds_for(net)
        expected = ort_run(proto, feeds)["y"]
        got = run(net, feeds)["y"]
        assert got.shape == expected.shape
        assert np.abs(got - expected).max() < 2e-5, (how, {k: v.tolist() for k, v in constants.items()}, (h, w))


@pytest.mark.parametrize(
    "shape, scales, problems",
    [
        ((2, 3, 6), (1, 1, 2.5), ["Resize"]),
        ((2, 5, 4, 3), (1, 2, 3.5, 1), ["Gather", "Resize", "Gather"]),  # rows and columns of an NHWC tensor
        ((2, 3, 5, 4), (1, 1, 1.6, 1), ["Resize"]),
        ((4, 6), (1.5, 2), ["Gather", "Resize", "Gather"]),
        ((1, 2, 3, 4, 5), (1, 1, 2, 1.5, 2.2), ["View", "Resize", "View", "Resize", "View"]),
        ((1, 2, 3, 4, 5), (1, 1, 1.7, 1, 1), ["View", "Resize", "View"]),
        ((1, 2, 3, 4, 5), (1, 1, 1, 1, 1), ["View", "Resize", "View"]),
    ],
)
def test_linear_resize_of_other_axes(shape, scales, problems):
    proto = model([node("Resize", "x _ s", "y", mode="linear")], {"x": shape}, "y", {"s": np.float32(scales)}, 19)
    assert kinds(check_against_ort(proto, 1e-6)) == problems


def test_antialiased_resize_narrows_no_kernel():
    constants = {"z": INT([1, 3, 5, 20])}
    for mode in ("linear", "cubic"):
        proto = model([node("Resize", "x _ _ z", "y", mode=mode, antialias=1)], {"x": (1, 3, 17, 13)}, "y", constants, 19)
        check_against_ort(proto, 2e-5)


def test_windows_are_found_in_tables():
    assert moves._window(np.array([-1, 0, 2, 4, -1]), 5) == (-2, 2, 5)
    assert moves._window(np.array([-1, 0, 1, -1]), 3) is None
    assert moves._window(np.array([-1, 0, 1, -1]), 2) == (-1, 1, 4)
    assert moves._window(np.array([1, 4, 7]), 9) == (1, 3, 3)
    assert moves._window(np.array([3, 2, 1]), 4) is None


# ---- through the planner and the kernels


RUN = ("anchors", "nhwc", "gather_one", "concat_columns", "six_axes", "pad_reflect", "reshape_mixes")


@pytest.mark.parametrize("name", RUN)
def test_kernels_agree(tmp_path, name):
    nodes, shape, constants, _ = CASES[name]
    check_engine(tmp_path, model(nodes, {"x": shape}, nodes[-1].output[0], constants, 18))


def test_views_launch_nothing(tmp_path):
    """A view is an alias: not one byte is copied for it, chains of views and views of network inputs and outputs included."""
    constants = {"s": INT([2, 3, 24]), "t": INT([2, 12, 6]), "u": INT([6, 24])}
    nodes = [
        node("Relu", "x", "a"),
        node("Reshape", "a s", "b"),
        node("Sigmoid", "b", "c"),
        node("Reshape", "c t", "d"),
        node("Reshape", "d u", "e"),
        node("Relu", "e", "y"),
    ]
    engine = check_engine(
        tmp_path, model(nodes, {"x": (2, 6, 3, 4)}, "y", constants), input_formats="fp16:chw", output_formats="fp16:chw"
    )
    assert sum(isinstance(layer.problem, ViewProblem) for layer in engine.plan.layers) == 3
    assert {step.kernel for step in engine.plan.steps} == {"pointwise"} and len(engine.plan.steps) == 3


def test_a_transposition_that_the_format_already_is_launches_nothing(tmp_path):
    """hwc8 of [N,C,H,W] with C a multiple of 8 is linear [N,H,W,C]."""
    nodes = [node("Relu", "x", "a"), node("Transpose", "a", "b", perm=(0, 2, 3, 1)), node("Sigmoid", "b", "y")]
    proto = model(nodes, {"x": (2, 16, 5, 4)}, "y")
    engine = check_engine(tmp_path, proto, input_formats="fp16:hwc8", output_formats="fp16:chw")
    assert [step.kernel for step in engine.plan.steps] == ["pointwise", "pointwise"]


def test_a_split_of_a_view_lies_in_the_views_memory(tmp_path):
    nodes = [
        node("Relu", "x", "a"),
        node("Reshape", "a s", "b"),
        node("Split", "b", "c d", axis=1, num_outputs=2),
        node("Sigmoid", "c", "y"),
        node("Sigmoid", "d", "z"),
    ]
    proto = model(nodes, {"x": (1, 6, 3, 8)}, "y z", {"s": INT([1, 4, 36])}, 18)
    engine = check_engine(tmp_path, proto, input_formats="fp16:chw", output_formats="fp16:chw")
    assert {step.kernel for step in engine.plan.steps} == {"pointwise"}


def test_problems_check_themselves():
    with pytest.raises(ValueError, match="different numbers of elements"):
        ViewProblem((1, 2, 3, 4), (1, 2, 3, 5))
    with pytest.raises(ValueError, match="expected indices -1 to 2, got 0 to 3"):
        GatherProblem((1, 3, 1, 1), index=((), (0, 3), (), ()))
    with pytest.raises(ValueError, match="unknown mode 'quintic'"):
        ResizeProblem(1, 1, 2, 2, (4, 4), "quintic", "half_pixel", (2.0, 2.0))
    backwards = GatherProblem((1, 99, 1, 1), index=((), tuple(range(98, -1, -1)), (), ()))
    assert str(backwards).startswith("gather 1x99x1x1 0123 c:99#")
    assert MoveProblem(1, 4, 4, 4, "window", (2, 4, 4)).is_part


@given(st.data())
def test_a_resize_has_finite_taps_or_is_refused(data):
    """Whatever its numbers, as of a crafted engine. Taps past the image's end weigh nothing, without a division by zero."""
    number = st.sampled_from((0.0, -0.75, 0.5, 1.0, 3.0, 2.0**24, 1e-3, 1e-7, 1e-300, 1e300, -1e300, math.inf, math.nan))
    size, out = (data.draw(st.tuples(st.integers(1, 9), st.integers(1, 9))) for _ in range(2))
    mode, at = data.draw(st.sampled_from(("linear", "cubic"))), data.draw(st.sampled_from(sorted(COORDINATES)))
    numbers = data.draw(st.tuples(*[number] * 7))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            more = data.draw(st.booleans()), data.draw(st.booleans()), numbers[3:]
            p = ResizeProblem(1, 8, *size, out, mode, at, numbers[:2], numbers[2], *more)
        except ValueError as e:
            assert "resize: expected" in str(e)
            return
        for axis in (0, 1):
            index, weight = p.taps(axis)
            assert np.isfinite(weight).all() and index.min() >= -1 and index.max() < size[axis]
