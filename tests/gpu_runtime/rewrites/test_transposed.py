"""Transposed convolutions as one convolution with depth-to-space: each option computes the same; plans take the faster."""

import numpy as np
import onnx
import pytest

import gpu_runtime as gr
from gpu_runtime.planning.alternatives import alternatives
from gpu_runtime.rewrites import transposed
from tactics.problems.problem import ConvProblem, ConvTransposeProblem
from tests.engines import check_engine
from tests.reference_run import check_against_ort, model, network, node

rng = np.random.default_rng(9)


def _w(*shape):
    return (rng.standard_normal(shape) / np.sqrt(shape[0] * 4)).astype(np.float16).astype(np.float32)


def spread(size: int = 3, stride: int = 2, c: int = 8, k: int = 5, high: int = 5, wide: int = 4, **attributes):
    groups = attributes.get("group", 1)
    nodes = [node("ConvTranspose", "x w b", "t", strides=(stride, stride), **attributes), node("Relu", "t", "y")]
    return model(nodes, {"x": (2, c, high, wide)}, "y", {"w": _w(c, k // groups, size, size), "b": _w(k)})


def added():
    """With an Add behind it, which either side may take."""
    nodes = [
        node("ConvTranspose", "x w", "t", strides=(2, 2), pads=(1, 1, 1, 1), output_padding=(1, 1)),
        node("Conv", "z v", "u"),
        node("Add", "t u", "s"),
        node("Relu", "s", "y"),
    ]
    return model(nodes, {"x": (1, 16, 4, 6), "z": (1, 8, 8, 12)}, "y", {"w": _w(16, 8, 3, 3), "v": _w(8, 8, 1, 1)})


CASES = {
    "2x2, cut": spread(2, pads=(0, 0, 1, 0)),
    "3x3, cut": spread(3),
    "3x3, as large": spread(3, pads=(1, 1, 1, 1), output_padding=(1, 1)),
    "3x3, to the left": spread(3, pads=(0, 0, 1, 1)),
    "4x4": spread(4, pads=(1, 1, 1, 1)),
    "5x5": spread(5, pads=(2, 2, 2, 2), output_padding=(1, 1)),
    "stride 3": spread(3, 3, pads=(1, 1, 2, 2)),
    "stride 3, cut": spread(4, 3),
    "added": added(),
}


@pytest.mark.parametrize("name", CASES)
def test_every_option_computes_the_same(name, tmp_path):
    found = transposed.offer(network(CASES[name]))
    assert [group for group, _ in found.groups if group.startswith("phases of ")]
    (tmp_path / "m.onnx").write_bytes(CASES[name].SerializeToString())
    check_against_ort(tmp_path / "m.onnx", rewrite=transposed.offer)
    check_against_ort(tmp_path / "m.onnx", rewrite=alternatives)


def test_drawn_convolutions(tmp_path):
    drawn = 0
    while drawn < 25:
        size, stride = int(rng.integers(1, 6)), int(rng.integers(2, 4))
        pads = tuple(int(v) for v in rng.integers(0, size, 4))
        more = tuple(int(v) for v in rng.integers(0, stride, 2))
        c, k, high, wide = (int(v) for v in rng.integers(1, 7, 4))
        out = [
            (n - 1) * stride + size + m - pads[i] - pads[i + 2] for i, (n, m) in enumerate(zip((high, wide), more, strict=True))
        ]
        if min(out) < 1:
            continue
        proto = spread(size, stride, c, k, high, wide, pads=pads, output_padding=more)
        before = network(proto)
        if transposed.offer(before) is before:
            continue
        onnx.save(proto, tmp_path / "m.onnx")
        check_against_ort(tmp_path / "m.onnx", rewrite=transposed.offer)
        drawn += 1


@pytest.mark.parametrize(
    "proto",
    [spread(3, 1), spread(2, c=4, k=4, group=2), spread(3, dilations=(2, 2)), spread(1, 3)],
    ids=["stride 1", "groups", "dilation", "one tap for nine phases"],
)
def test_others_stay(proto):
    before = network(proto)
    assert transposed.offer(before) is before


def test_short_launches_become_one():
    """prisma's decoder: four phases of 16 x 16 pixels took four launches, 15 us on an H200."""
    engine = gr.build(spread(3, 2, 128, 128, 16, 16, pads=(0, 0, 1, 1)), device="h200")
    (conv,) = (op for op in engine.plan.layers if isinstance(op.problem, (ConvProblem, ConvTransposeProblem)))
    assert isinstance(conv.problem, ConvProblem) and conv.problem.epilogue.d2s == 2 and conv.time_us < 8


def test_large_images_keep_their_phases():
    """Where products cost more than launches, no zeros are multiplied."""
    engine = gr.build(spread(3, 2, 256, 256, 96, 96, pads=(0, 0, 1, 1)), device="a100")
    assert [op for op in engine.plan.layers if isinstance(op.problem, ConvTransposeProblem)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["3x3, cut", "added"])
def test_engines_are_right(name, tmp_path):
    check_engine(tmp_path, CASES[name])
