"""Networks that hold images with channels last, as TensorFlow exports them and detectors' heads do: their transpositions move
nothing where a tensor can be stored without padding between pixels."""

import numpy as np
import onnx
import pytest
from ort_budget import budgets
from reference_run import model, node

import gpu_runtime as gr
from gpu_runtime.pipeline import DEFAULT_DEVICE

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


def built(proto, path, **options):
    """(layers that only move elements, the engine), once its outputs agree with onnxruntime's."""
    onnx.save(proto, path)
    engine = gr.build(path, device=DEFAULT_DEVICE, **options)
    feeds = {i["name"]: np.random.default_rng(1).uniform(-1, 1, i["shape"]).astype(np.float32) for i in engine.inputs}
    with engine.context(device="emulator", poison=True) as ctx:
        got = ctx.run(feeds)
    for name, budget in budgets(path, feeds).items():
        budget.check(got[name], name)
    moved = [x["name"] for x in engine.plan["layers"] if x["type"] in ("move", "gather", "concat", "reformat")]
    return moved, engine


CASES = {
    "odd": tensorflow(), "image_of_8": tensorflow(8, 16), "two_images": tensorflow(3, 21, n=2), "gray": tensorflow(1, 1),
    "stride": tensorflow(4, 10, strides=(2, 2)), "wide": tensorflow(24, 5, size=(6, 7)),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_transpositions_at_the_edges_move_nothing(tmp_path, case):
    """Up to 4 channels are read by the first convolution as they lie, more by way of a reformat; what leaves is made FP32."""
    moved, engine = built(CASES[case], tmp_path / "m.onnx")
    kinds = [x["type"] for x in engine.plan["layers"] if x["name"] in moved]
    assert kinds == ["reformat"] * (1 if engine.plan["inputs"][0]["shape"][3] <= 4 else 2), moved


@pytest.mark.slow
def test_heads_of_a_detector_are_written_as_they_are_read(tmp_path):
    moved, engine = built(heads(), tmp_path / "m.onnx")
    assert moved == ["Reformatting CopyNode for Output Tensor 0 y"]
    last = [x for x in engine.plan["layers"] if x["name"].startswith(("large.h", "small.h"))]
    assert [t["format"] for x in last for t in x["outputs"]] == ["fp16:hwc"] * 2
