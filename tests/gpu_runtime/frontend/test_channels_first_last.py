"""Networks that hold images with channels last, as TensorFlow exports them and detectors' heads do: their transpositions move
nothing where a tensor can be stored without padding between pixels."""

import numpy as np
import onnx
import pytest

from tests.ort_budget import engine_within_budget
from tests.reference_run import model, node

rng = np.random.default_rng(11)


def conv(x: str, y: str, c: int, k: int, weights: dict, size: int = 3, **more) -> list:
    w = rng.standard_normal((k, c, size, size)) / (c * size * size) ** 0.5
    weights[f"{y}.w"] = w.astype(np.float16).astype(np.float32)
    weights[f"{y}.b"] = rng.uniform(-0.5, 0.5, k).astype(np.float32)
    return [node("Conv", f"{x} {y}.w {y}.b", f"{y}.c", pads=[size // 2] * 4, **more), node("Relu", f"{y}.c", y)]


def tensorflow(c: int = 3, k: int = 6, n: int = 1, size=(11, 13), **more) -> onnx.ModelProto:
    """An image [n, h, w, c], two convolutions between transpositions, and a result with channels last."""
    w = {}
    nodes = [node("Transpose", "x", "t", perm=(0, 3, 1, 2)), *conv("t", "a", c, 40, w, **more), *conv("a", "b", 40, k, w)]
    return model([*nodes, node("Transpose", "b", "y", perm=(0, 2, 3, 1))], {"x": (n, *size, c)}, "y", w)


def heads(k: int = 6, n: int = 1) -> onnx.ModelProto:
    """Two maps of different size, each pixel's k values a row of one table."""
    w, nodes, rows = {}, [], []
    for name, stride in (("large", 1), ("small", 2)):
        nodes += [*conv("x", f"{name}.a", 3, 32, w, strides=(stride, stride)), *conv(f"{name}.a", f"{name}.h", 32, k, w)]
        w[f"{name}.shape"] = np.int64([n, -1, 2])
        nodes.append(node("Transpose", f"{name}.h", f"{name}.t", perm=(0, 2, 3, 1)))
        rows.append(nodes.append(node("Reshape", f"{name}.t {name}.shape", f"{name}.r")) or f"{name}.r")
    return model([*nodes, node("Concat", " ".join(rows), "y", axis=1)], {"x": (n, 3, 12, 10)}, "y", w)


def moved(engine) -> list[tuple[str, str]]:
    """(type, name) of the layers that only move elements."""
    found = [(x.type, x.name) for x in engine.plan.layers]
    return [(kind, name) for kind, name in found if kind in ("move", "gather", "concat", "reformat")]


CASES = {
    "odd": tensorflow(),
    "image_of_8": tensorflow(8, 16),
    "two_images": tensorflow(3, 21, n=2),
    "gray": tensorflow(1, 1),
    "stride": tensorflow(4, 10, strides=(2, 2)),
    "wide": tensorflow(24, 5, size=(6, 7)),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_transpositions_at_the_edges_move_nothing(tmp_path, case):
    """Up to 4 channels are read by the first convolution as they lie, more by way of a reformat; the last one writes FP32."""
    engine = engine_within_budget(CASES[case], tmp_path / "m.onnx")
    kinds = [kind for kind, _ in moved(engine)]
    assert kinds == ["reformat"] * (engine.plan.inputs[0].shape[3] > 4), moved(engine)


@pytest.mark.slow
def test_heads_of_a_detector_are_written_as_they_are_read(tmp_path):
    engine = engine_within_budget(heads(), tmp_path / "m.onnx")
    assert moved(engine) == [("reformat", "Reformatting CopyNode for Output Tensor 0 y")]
    last = [x for x in engine.plan.layers if x.name.startswith(("large.h", "small.h"))]
    assert [str(t.format) for x in last for t in x.outputs] == ["fp16:hwc"] * 2


@pytest.mark.slow
def test_rows_of_several_images_are_joined_by_a_copy(tmp_path):
    """They are not one run of memory each."""
    assert ("concat", "y") in moved(engine_within_budget(heads(n=2), tmp_path / "m.onnx"))


ENDS = {  # name -> the nodes behind a convolution of 24 channels
    "convolution": [node("Add", "a a.c", "s"), node("Conv", "s k", "y")],
    "transposed": [node("ConvTranspose", "a k", "y", strides=(2, 2))],
    "softmax": [node("GlobalAveragePool", "a", "p"), node("Flatten", "p", "f"), node("Softmax", "f", "y")],
    "gelu": [node("Gelu", "a", "y")],
    "pool": [node("AveragePool", "a", "y", kernel_shape=(2, 2), strides=(2, 2))],
    "resize": [node("Resize", "a _ scales", "r", mode="linear"), node("Transpose", "r", "y", perm=(0, 2, 3, 1))],
    "rows": [node("ReduceMean", "a axes", "m", keepdims=0), node("Reshape", "m flat", "y")],
}


@pytest.mark.slow
@pytest.mark.parametrize("end", ENDS)
def test_what_computes_in_fp32_writes_a_network_s_output_so(tmp_path, end):
    w = {"k": rng.standard_normal((24, 24, 1, 1)).astype(np.float16).astype(np.float32)}
    w |= {"scales": np.float32([1, 1, 2, 2]), "flat": np.int64([1, -1]), "axes": np.int64([1])}
    proto = model([*conv("x", "a", 3, 24, w), *ENDS[end]], {"x": (1, 3, 10, 12)}, "y", w, opset=20)
    engine = engine_within_budget(proto, tmp_path / "m.onnx")
    assert str(engine.plan.layers[-1].outputs[0].format).startswith("fp32"), moved(engine)
    assert "Reformatting CopyNode for Output Tensor 0 y" not in [name for _, name in moved(engine)]
