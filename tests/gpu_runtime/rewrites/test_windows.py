"""Convolutions over windows that do not overlap: each option computes what the model does, and plans take the faster one."""

import numpy as np
import pytest

import gpu_runtime as gr
from cuda_kernels import sparse24
from gpu_runtime.planning.alternatives import alternatives
from gpu_runtime.rewrites import windows
from tactics.problems.gather import ViewProblem
from tactics.problems.problem import ConvProblem, MoveProblem
from tests.engines import build, emulated
from tests.reference_run import check_against_ort, model, network, node, ort_run, relative_error

rng = np.random.default_rng(5)


def _w(*shape):
    return (rng.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))).astype(np.float16).astype(np.float32)


def heads(n: int = 13, count: int = 3, d: int = 8, weights: np.ndarray | None = None):
    """Heads [n, 1, count, d] out of attention, read by a Gemm as rows of count * d features."""
    w = {"w": _w(24, count * d) if weights is None else weights, "b": _w(24), "shape": np.int64([n, count * d])}
    nodes = [
        node("Relu", "x", "h"),
        node("Transpose", "h", "t", perm=(2, 0, 1, 3)),
        node("Reshape", "t shape", "rows"),
        node("Gemm", "rows w b", "y", transB=1),
    ]
    return model(nodes, {"x": (1, count, n, d)}, "y", w)


def patches(c: int, b: int, size: int, k: int = 16):
    return model([node("Conv", "x w b", "p", strides=(b, b)), node("Relu", "p", "y")], {"x": (2, c, b * size, b * size)}, "y",
                 {"w": _w(k, c, b, b), "b": _w(k)})  # fmt: skip


def flattened(c: int = 6, h: int = 3, w: int = 2):
    nodes = [node("Relu", "x", "r"), node("Flatten", "r", "f"), node("Gemm", "f w b", "g", transB=1), node("Sigmoid", "g", "y")]
    return model(nodes, {"x": (2, c, h, w)}, "y", {"w": _w(9, c * h * w), "b": _w(9)})


NETWORKS = {
    "heads": heads(),
    "patches of 4": patches(3, 4, 5),
    "patches of 16": patches(3, 16, 2),
    "patches of many channels": patches(8, 2, 3),
    "flattened": flattened(),
    "read twice": model(
        [node("Conv", "x w", "a", strides=(2, 2)), node("Conv", "x v", "b", strides=(2, 2)), node("Add", "a b", "y")],
        {"x": (1, 3, 8, 6)},
        "y",
        {"w": _w(8, 3, 2, 2), "v": _w(8, 3, 2, 2)},
    ),
    "read by others too": model(
        [node("Conv", "x w", "y", strides=(2, 2)), node("Conv", "x v", "z", pads=(1, 1, 1, 1))],
        {"x": (1, 3, 8, 6)},
        "y z",
        {"w": _w(8, 3, 2, 2), "v": _w(8, 3, 3, 3)},
    ),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_every_option_computes_the_same(name, tmp_path):
    found = windows.offer(network(NETWORKS[name]))
    assert [group for group, _ in found.groups if group.startswith("windows of ")]
    (tmp_path / "m.onnx").write_bytes(NETWORKS[name].SerializeToString())
    check_against_ort(tmp_path / "m.onnx", rewrite=windows.offer)
    check_against_ort(tmp_path / "m.onnx", rewrite=alternatives)


@pytest.mark.parametrize(
    "attributes",
    [{"strides": (2, 2), "pads": (0, 0, 1, 1)}, {"strides": (1, 1)}, {"strides": (3, 3)}, {"strides": (2, 2), "group": 2},
     {"strides": (4, 4), "dilations": (3, 3)}],
    ids=str,
)  # fmt: skip
def test_windows_that_overlap_or_leave_pixels_out_stay(attributes):
    groups = attributes.get("group", 1)
    proto = model([node("Conv", "x w", "y", **attributes)], {"x": (1, 4, 8, 8)}, "y", {"w": _w(8, 4 // groups, 2, 2)})
    before = network(proto)
    assert windows.offer(before) is before


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_engines_are_right(name, tmp_path):
    proto = NETWORKS[name]
    engine = build(tmp_path, proto, sparsity="enable")
    feeds = {i.name: rng.standard_normal(i.shape).astype(np.float32) for i in engine.inputs}
    got = emulated(engine, feeds)
    for output, expected in ort_run(proto, feeds).items():
        assert relative_error(got[output], expected) < 5e-3, output


def test_heads_are_rows_of_features_and_no_byte_moves():
    """What torchvision's ViT exports: a product over all heads, which moves nothing and can be 2:4."""
    w = sparse24.prune(_w(24, 768))
    engine = gr.build(heads(197, 12, 64, w), device="h200", sparsity="enable")
    (gemm,) = (layer for layer in engine.plan.layers if isinstance(layer.problem, ConvProblem))
    assert (gemm.problem.c, gemm.problem.r, gemm.problem.s) == (768, 1, 1)
    (row,) = engine.sparsity.rows
    assert (row.c, row.kernel, row.verdict in ("sparse", "dense"), row.pattern_share) == (768, (1, 1), True, 1.0)
    assert any(isinstance(layer.problem, ViewProblem) and layer.tactic is None for layer in engine.plan.layers)
    (row,) = gr.build(heads(197, 12, 64, _w(24, 768)), device="h200", sparsity="enable").sparsity.rows
    assert (row.reason, row.c) == ("pattern_violation", 768) and row.lost_energy


def test_patches_of_images_are_made_by_one_kernel():
    engine = gr.build(patches(3, 16, 14, 768), device="h200")
    moves = [layer.problem.kind for layer in engine.plan.layers if isinstance(layer.problem, MoveProblem)]
    assert "s2d_crd" in moves
    times = [layer.time_us for layer in engine.plan.layers if computes_product(layer)]
    assert len(times) == 1 and times[0] < 15  # 117 us as a convolution of three channels, at batch 2


def computes_product(layer) -> bool:
    return isinstance(layer.problem, ConvProblem) and layer.problem.c == 768
