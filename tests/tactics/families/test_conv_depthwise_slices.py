"""Depthwise filters wider than 32 columns, or higher than shared memory holds: slices of their columns, in any format."""

import random

import numpy as np
import onnx
import pytest

import gpu_runtime as gr
from cuda_kernels.device import ARCHITECTURES
from tactics.candidates import candidates
from tactics.families.conv_depthwise import LINEAR_PATCHES, VECTOR_PATCHES
from tactics.launches import launches
from tactics.predict import predict_us
from tactics.step import linear
from tests.compiled import takes
from tests.engines import judge
from tests.problems import TAILS, depthwise
from tests.reference_run import model, node
from tests.tactics.families.test_conv_depthwise import DEVICE, compiles, tactic

pytestmark = pytest.mark.slow


def test_larger_filters_are_taken_in_slices():
    """Any width and height, in the formats of smaller ones; not where shared memory holds the input."""
    for r, s in ((1, 33), (51, 51), (33, 101), (400, 31)):
        problem = depthwise(1, 16, 40, 120, r, s, pad=(r // 2, s // 2) * 2)
        found = candidates(problem, DEVICE)
        assert {t.tile for t in found} == {*VECTOR_PATCHES, *LINEAR_PATCHES}
        assert all(dict(launches(problem, t)[0].values)["SLICE"] == (16 if linear(t.out) else 8) for t in found)
    strided = depthwise(1, 16, 40, 120, 3, 33, stride=(1, 4))
    assert {t.tile for t in candidates(strided, DEVICE)} == {*LINEAR_PATCHES}, "a row under four strided outputs would spill"


@pytest.mark.parametrize("kind", ["hwc16", "chw"])
def test_the_price_of_a_slice(kind):
    """Time grows with columns and rows, across the limit too; rows of the filter that no image fills cost little."""
    patch = LINEAR_PATCHES[2] if kind == "chw" else VECTOR_PATCHES[1]

    def us(r, s, height=64):
        problem = depthwise(4, 64, height, 64, r, s, pad=(r // 2, s // 2) * 2)
        return predict_us(problem, tactic(problem, patch, kind, kind), DEVICE)

    widths, heights = [us(9, s) for s in (17, 25, 33, 51, 87)], [us(r, 33) for r in (1, 9, 33, 65)]
    assert widths == sorted(widths) and heights == sorted(heights)
    assert us(51, 51) > 10 * us(1, 51) and us(65, 33, height=1) < 2.5 * us(1, 33, height=1)


@pytest.mark.parametrize("sm", ARCHITECTURES)
@pytest.mark.parametrize("patch,layout", [(VECTOR_PATCHES[0], "hwc8"), (LINEAR_PATCHES[0], "chw")])
def test_slices_of_the_widest_stride_compile_without_spills(patch, layout, sm):
    problem = depthwise(1, 64, 30, 90, 5, 45, 2, stride=(3, 3), pad=(2, 22, 2, 22), bias=True, **TAILS[""])
    compiles(problem, tactic(problem, patch, layout, layout), sm, takes)


@pytest.mark.parametrize("seed,device", [*enumerate(("h200", "a100", "l4", "rtx5090", "h200", "a10"))])
def test_drawn_filters_wider_than_32_columns(tmp_path, seed, device):
    """1-D and 2-D, with strides, dilations, multipliers, bias and activation, against onnxruntime."""
    rng = random.Random(seed)
    flat, c, many, s = rng.random() < 0.5, rng.choice((3, 8, 20)), rng.choice((1, 1, 2)), rng.randint(33, 101)
    r, dil, stride = (
        rng.choice((1, 2, 7, 33, 65)),
        [rng.randint(1, 2), rng.randint(1, 3)],
        [rng.randint(1, 2), rng.randint(1, 4)],
    )
    size = (s,) if flat else (r, s)
    axes = slice(-len(size), None)
    pads = [rng.randint(d * (t - 1) // 4, d * (t - 1)) for d, t in zip(dil[axes], size, strict=True)]
    image = [d * (t - 1) + rng.randint(1, 40) - p for d, t, p in zip(dil[axes], size, pads, strict=True)]
    window = {"group": c, "pads": pads * 2, "dilations": dil[axes], "strides": stride[axes]}
    draw = np.random.default_rng(seed).standard_normal
    w = draw((c * many, 1, *size), np.float32) / np.float32(np.sqrt(np.prod(size)))
    nodes = [node("Conv", "x w b", "conv", **window), node(rng.choice(("Relu", "Sigmoid", "HardSwish")), "conv", "y")]
    proto = model(nodes, {"x": (2, c, *image)}, "y", {"w": w, "b": draw(c * many, np.float32)})
    onnx.save(proto, tmp_path / "m.onnx")
    engine = gr.build(tmp_path / "m.onnx", device=device)
    judge(engine, proto, {"x": draw((2, c, *image), np.float32)})
    assert any("conv_depthwise" in layer.tactic_name for layer in engine.plan.layers)
