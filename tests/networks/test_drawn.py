"""Drawn networks through build and emulator against onnxruntime, within FP16's own error; onnx's reference settles disputes."""

import sys
import warnings

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator
from onnxruntime.capi.onnxruntime_pybind11_state import RuntimeException

import gpu_runtime as gr
from cuda_kernels.device import DEFAULT_DEVICE
from tests.drawn import ALL, MOVES, network, squeeze_excite
from tests.ort_budget import FACTOR, RANGE_SHARE, TINY, Budget, relative_l2, run, with_casts
from tests.reference_run import model, node

GROUP = 10  # networks in one test
ROUNDING = 2.0**-11  # relative error of one rounding to FP16


def feeds_of(proto: onnx.ModelProto) -> dict[str, np.ndarray]:
    """Random inputs that FP16 holds."""
    rng = np.random.default_rng(1)
    shapes = {i.name: [d.dim_value for d in i.type.tensor_type.shape.dim] for i in proto.graph.input}
    return {name: rng.uniform(-1, 1, shape).astype(np.float16).astype(np.float32) for name, shape in shapes.items()}


def budgets(proto: onnx.ModelProto, feeds) -> dict[str, Budget]:
    """As ort_budget.budgets, for networks of which some only move data. An output of equal elements has one error, which is 0
    where FP16 happens to hold the number: there, one rounding of a weight into which another is folded is allowed."""
    reference, rounded = run(proto, feeds), run(with_casts(proto), feeds)
    found = {}
    for name, y in reference.items():
        error = relative_l2(rounded[name], y)
        slack = RANGE_SHARE * float(np.ptp(y)) * np.sqrt(y.size) / max(np.linalg.norm(y), TINY)
        found[name] = Budget(y, error, max(FACTOR * error + slack, 0.0 if np.ptp(y) else ROUNDING))
    return found


def emulated(proto: onnx.ModelProto, feeds, path, **options) -> dict[str, np.ndarray]:
    """The outputs of an engine, with NaN wherever its plan says that memory is free."""
    onnx.save(proto, path)
    engine = gr.build(path, device=DEFAULT_DEVICE, **options)
    with warnings.catch_warnings(), engine.context(device="emulator", poison=True) as ctx:
        warnings.simplefilter("ignore", RuntimeWarning)
        return ctx.run(feeds)


def alone(ours: np.ndarray, ort: np.ndarray, reference: np.ndarray, allowed: float) -> str:
    """Which of three answers differs from the other two: "ours", "onnxruntime", "reference", "none" or "each"."""

    def alike(a, b) -> bool:
        return a.shape == b.shape and bool(np.isfinite(a).all() and np.isfinite(b).all()) and relative_l2(a, b) <= allowed

    pairs = {"reference": alike(ours, ort), "onnxruntime": alike(ours, reference), "ours": alike(ort, reference)}
    if all(pairs.values()):
        return "none"
    return next((name for name, same in pairs.items() if same), "each")


def disputes(proto: onnx.ModelProto, path, **options) -> list[str]:
    """A sentence for each output that is not onnxruntime's; none for those where onnx's reference sides with ours."""
    feeds = feeds_of(proto)
    got, found = emulated(proto, feeds, path, **options), []
    for name, budget in budgets(proto, feeds).items():
        try:
            budget.check(got[name], name)
        except AssertionError as e:
            third = dict(zip(got, ReferenceEvaluator(proto).run(list(got), feeds), strict=True))[name]
            who = alone(got[name], budget.reference, third, budget.allowed)
            if who != "onnxruntime":
                found.append(f"{e}; alone: {who}")
    return found


def agree(seeds: range, rules, tmp_path) -> None:
    wrong = {seed: found for seed in seeds if (found := disputes(network(seed, rules), tmp_path / f"{seed}.onnx"))}
    assert not wrong, "\n".join(f"seed {seed}: {text}" for seed, found in wrong.items() for text in found)


@pytest.mark.parametrize("images", [1, 3])
def test_pieces_of_a_piece_lie_in_a_block_of_channels(images, tmp_path):
    """Of 48 channels in chw32 the first 32 are a Concat of 16 and 16: each is a tensor inside the block, channels last."""
    proto, path = network(2093, ALL), tmp_path / "m.onnx"
    for outputs in (proto.graph.node, proto.graph.output):  # all but a Resize, which is of one image
        for one in [o for o in outputs if {"t5", "t6", "t7"} & {getattr(o, "name", ""), *getattr(o, "output", ())}]:
            outputs.remove(one)
    for value in (*proto.graph.input, *proto.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = images
    asked = {"output_formats": {"t10": "fp16:chw32"}}
    assert not disputes(proto, path) and not disputes(proto, path, **asked)
    tensors = [t for layer in gr.build(path, device=DEFAULT_DEVICE, **asked).plan.layers for t in layer.tensors if t.inside]
    assert any(str(t.inside.format) == "fp16:chw32" and (t.shape4[1], t.inside.channel) == (16, 16) for t in tensors)


def test_a_stem_reads_planes_that_begin_at_an_odd_element(monkeypatch, tmp_path):
    """A transposed tensor of 20 columns is the end of a Concat, behind 5 elements: pairs of columns are not aligned there."""
    monkeypatch.setattr("tests.networks.test_drawn.DEFAULT_DEVICE", "a100")
    proto, path = network(90756, ALL), tmp_path / "m.onnx"
    assert not disputes(proto, path)
    layers = gr.build(path, device="a100").plan.layers
    assert [x.inputs[0].offset % 4 for x in layers if x.tactic and x.tactic.kernel == "conv_stem"] == [2]


@pytest.mark.sample(2)
@pytest.mark.slow
@pytest.mark.parametrize("group", range(10))
def test_drawn_networks(group, tmp_path):
    agree(range(GROUP * group, GROUP * group + GROUP), ALL, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["a100", "h200", "l4", "rtx4090"])
def test_drawn_networks_with_squeeze_excite(device, monkeypatch, tmp_path):
    """From seed 10 on: at 3 the only element that is not zero has an error of one rounding, the budget's of storage less."""
    monkeypatch.setattr("tests.networks.test_drawn.DEFAULT_DEVICE", device)
    rules = (*ALL, *(squeeze_excite,) * 6)
    agree(range(10, 20), rules, tmp_path)
    tactics = [layer.tactic for layer in gr.build(network(11, rules), device=device).plan.layers]
    fused = device != "h200"  # which has timed the fused form in networks: it is not ahead there
    assert any(tactic.kernel == ("depthwise_scaled" if fused else "squeeze_excite") for tactic in tactics if tactic)


@pytest.mark.long
@pytest.mark.parametrize("group", range(50))
def test_many_drawn_networks(group, tmp_path):
    agree(range(1000 + 40 * group, 1000 + 40 * group + 40), ALL if group % 5 else MOVES, tmp_path)


def test_who_stands_alone():
    x, y = np.arange(8, dtype=np.float32), np.arange(8, dtype=np.float32) + 1
    assert alone(x, x, x, 1e-3) == "none"
    assert (alone(y, x, x, 1e-3), alone(x, y, x, 1e-3), alone(x, x, y, 1e-3)) == ("ours", "onnxruntime", "reference")
    assert alone(x, y, -y, 1e-3) == "each" and alone(x * np.nan, x, x, 1e-3) == "ours"
    assert alone(x[:4], x, x, 1e-3) == "ours"


def test_a_wrong_answer_is_a_dispute(tmp_path, monkeypatch):
    """One element of one output off by an eighth of the range is more than FP16 explains."""

    def off(proto, feeds, path, right=emulated):
        got = right(proto, feeds, path)
        y = next(iter(got.values()))
        y.flat[y.size // 2] += np.float32(0.125 * (np.ptp(y) + 1))
        return got

    monkeypatch.setattr(sys.modules[__name__], "emulated", off)
    assert "alone: ours" in disputes(network(0), tmp_path / "m.onnx")[0]


# ---- where onnxruntime and onnx's reference differ


def three(proto: onnx.ModelProto, feeds, path) -> tuple:
    """(ours, onnxruntime's, the reference's) first output; None of those that refuse the network."""
    found = []
    for answer in (
        lambda: next(iter(emulated(proto, feeds, path).values())),
        lambda: next(iter(run(proto, feeds).values())),
        lambda: ReferenceEvaluator(proto).run(None, feeds)[0],
    ):
        try:
            found.append(answer().ravel().tolist())
        except (ValueError, RuntimeError, IndexError, RuntimeException):
            found.append(None)
    return tuple(found)


def row(op: str, inputs: str, size: int, path, weights=None, **attributes) -> tuple:
    """The three answers over the row 0, 1, 2, ..."""
    proto = model([node(op, f"x {inputs}", "y", **attributes)], {"x": (1, 1, 1, size)}, "y", weights, opset=19)
    return three(proto, {"x": np.arange(size, dtype=np.float32).reshape(1, 1, 1, -1)}, path)


def resized(size: int, scale: float, path, **attributes) -> tuple:
    scales = {"s": np.array([1, 1, 1, scale], np.float32)}
    return row("Resize", "_ s", size, path, scales, **{"coordinate_transformation_mode": "align_corners"} | attributes)


def test_corners_are_aligned_with_the_last_whole_pixel(tmp_path):
    """x_original = x_resized * (length_original - 1) / (length_resized - 1), and length_resized is "the length of the resized
    tensor": a whole number. The reference divides by scale * length_original - 1, so that its last pixel is not the image's
    last: it stands alone."""
    ours, ort, reference = resized(5, 1.5, tmp_path / "m.onnx", mode="nearest", nearest_mode="floor")
    assert ours == ort == [0, 0, 1, 2, 2, 3, 4] and reference[-1] == 3
    ours, ort, reference = resized(4, 0.6, tmp_path / "m.onnx", mode="linear")
    assert ours == ort == [0, 3] and reference[-1] == pytest.approx(3 / 1.4, 1e-3)


def test_the_length_of_a_resize_is_the_floor_of_the_exact_product(tmp_path):
    """5 times 2.6 in FP32, 2.5999999, is below 13: 12 pixels, as onnx's shape inference says too. onnxruntime rounds the
    product to FP32 first, to 13. So with corners aligned there are three answers, and each of the others is wrong once."""
    ours, ort, reference = resized(5, 2.6, tmp_path / "m.onnx", mode="nearest", nearest_mode="floor")
    assert (len(ours), len(ort), len(reference)) == (12, 13, 12)
    assert ours == [i * 4 // 11 for i in range(12)] and ours[-1] == 4 != reference[-1]


@pytest.mark.parametrize("op", ["AveragePool", "MaxPool", "LpPool"])
@pytest.mark.parametrize("mode, first", [("SAME_UPPER", {9: 1, 10: 0}), ("SAME_LOWER", {9: 1, 10: 1})])
def test_same_with_a_stride_above_the_window_cuts_the_image(op, mode, first, tmp_path):
    """The pools' pad_shape = (output - 1) * stride + kernel - input may be negative: -2 of 9 pixels (one from both ends), -1 of
    10 (from the end; with SAME_LOWER from the beginning). Of two equal parts neither is in dispute, and for them onnxruntime's
    SAME_UPPER and the reference's MaxPool say so; onnxruntime's SAME_LOWER rounds (pad + 1) / 2 to 0 and begins at 0, it
    refuses MaxPool, and the reference refuses the other two."""
    for size, stride in ((9, 3), (10, 4)):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            how = {"kernel_shape": [1, 1], "strides": [1, stride], "auto_pad": mode}
            ours, ort, reference = row(op, "", size, tmp_path / "m.onnx", **how)
        differs = mode == "SAME_LOWER" and op != "MaxPool"
        assert any("SAME_LOWER with a stride above the window" in str(w.message) for w in told) == differs
        assert ours == [*range(first[size], size, stride)], size
        if op == "MaxPool":
            assert ort is None and (reference == ours or size == 10)
        else:
            assert reference is None and (ort == ours if mode == "SAME_UPPER" else ort[0] == 0)


def test_conv_with_a_stride_above_the_window_does_not_cut(tmp_path):
    """Conv's SAME "pads the input"; no formula makes that negative, and all three begin at pixel 0."""
    one = {"w": np.ones((1, 1, 1, 1), np.float32)}
    answers = row("Conv", "w", 9, tmp_path / "m.onnx", one, strides=[1, 3], auto_pad="SAME_UPPER")
    assert answers == ([0, 3, 6],) * 3


def test_a_flattened_tensor_may_leave_before_a_gemm(tmp_path):
    """The Gemm reads the image as it is; the caller wants the Flatten's output all the same."""
    nodes = [node("Relu", "x", "r"), node("Flatten", "r", "f"), node("Gemm", "f w", "y", transB=1)]
    w = np.random.default_rng(0).uniform(-1, 1, (4, 24)).astype(np.float16).astype(np.float32)
    proto = model(nodes, {"x": (2, 4, 2, 3)}, "y f", {"w": w})
    assert not disputes(proto, tmp_path / "m.onnx")
