"""Networks that people deploy today: each builds in as few launches as it was brought to, and computes what onnxruntime does,
dense and pruned to 2:4 by force."""

import io
from dataclasses import replace

import numpy as np
import onnx
import pytest

import gpu_runtime as gr
from benchmarks import topologies
from benchmarks.bench_networks import images
from cuda_kernels.device import named
from gpu_runtime.runtime.plan_record import LaunchStep, PlanRecord, Step
from tactics.kernels import ROWS
from tests.engines import BOUND, SPARSE_DEVICE, emulated, resized
from tests.reference_run import largest_values, ort_run, relative_error, run
from tests.reference_run import network as network_of

# Name -> (most launches on an H200 at batch 1 with products by mma.sync, the size of image that it is executed at here). Of two
# networks 12 and 2 more than when a launch was predicted at 1.26 us: an H200 takes 0.68.
# fmt: off
MOST = {
    "timm_edgenext_x_small": (111, 224), "timm_fastvit_t8": (62, 64), "timm_ghostnet_100": (112, 64),
    "timm_hrnet_w18_small": (100, 64), "timm_mixnet_s": (64, 64), "timm_mobileone_s0": (50, 64), "timm_nfnet_l0": (113, 64),
    "timm_poolformer_s12": (67, 64), "timm_repvgg_a0": (24, 64), "timm_res2net50_26w_4s": (90, 64),
    "timm_resnest14d": (35, 224), "timm_rexnet_100": (63, 64), "tv_convnext_tiny": (65, 64), "tv_efficientnet_b0": (67, 64),
    "tv_lraspp": (66, 224), "tv_mobilenet_v3_large": (61, 64), "tv_regnet_y_400mf": (71, 64), "tv_resnext50": (54, 64),
}
# fmt: on


@pytest.fixture
def network(request, tmp_path):
    """(a network of this name, its image's size here)."""
    if request.param not in topologies.NAMES:
        pytest.skip(f"{request.param} is not in {topologies.FOLDER}: set GPU_RUNTIME_TOPOLOGIES to the folder of topologies")
    return topologies.filled(request.param), MOST[request.param]


def test_all_that_are_given_are_tried():
    assert not topologies.NAMES or set(topologies.NAMES) == set(MOST)


@pytest.mark.parametrize(
    "network", [pytest.param(name, marks=() if name in topologies.SCALES else pytest.mark.full) for name in MOST], indirect=True
)
def test_activations_are_in_range(network, request):
    """The scaled networks' are within 100. RepVGG's reach 23,473 of FP16's 65,504."""
    model, _ = network
    x = model.graph.input[0]
    feeds = {x.name: images([d.dim_value for d in x.type.tensor_type.shape.dim]).astype(np.float32)}
    largest = largest_values(model, feeds)
    name = max(largest, key=largest.__getitem__)
    scaled = request.node.callspec.params["network"] in topologies.SCALES
    assert 1 < largest[name] < (100 if scaled else 32_768), (name, largest[name])


@pytest.mark.full
def test_no_layer_of_mobileone_computes_in_fp32(tmp_path):
    """With its weights as they are drawn, 17 do."""
    name = "timm_mobileone_s0"
    if name not in topologies.NAMES:
        pytest.skip(f"{name} is not in {topologies.FOLDER}")
    onnx.save(topologies.filled(name), tmp_path / "m.onnx")
    kernels = {step.kernel for step in gr.build(tmp_path / "m.onnx", device="h200").plan.steps}
    assert "conv_dense" in kernels and "conv_fp32" not in kernels


@pytest.mark.full
@pytest.mark.parametrize("network", MOST, indirect=True)
def test_launches(network, tmp_path):
    model, (most, _) = network
    onnx.save(model, tmp_path / "m.onnx")
    h200 = named("h200")
    without = replace(h200, left_out=tuple((k.name, "a norm cannot be part of it") for k in ROWS if k.sm))
    before, now = (gr.build(tmp_path / "m.onnx", device=device).plan for device in (without, h200))
    assert len(launched(before)) <= most
    assert len(launched(now)) <= most or now.solution.total_us < before.solution.total_us  # Hopper's products pay for launches


def launched(plan: PlanRecord) -> list[Step]:
    """Launches but for the second one of squeeze-excites, which is one more for less time."""
    return [s for s in plan.steps if not isinstance(s, LaunchStep) or s.values.get("LAYER") != 2]


@pytest.mark.full
@pytest.mark.parametrize("sparsity", ["disable", pytest.param("force", marks=pytest.mark.long)])
@pytest.mark.parametrize("network", MOST, indirect=True)
def test_values(network, sparsity, tmp_path):
    """Within BOUND, or three times what rounding every tensor to FP16 costs by itself."""
    model, (_, size) = network
    model = resized(model, size)
    onnx.save(model, tmp_path / "m.onnx")
    pruned = io.BytesIO()
    engine = gr.build(
        tmp_path / "m.onnx", device=SPARSE_DEVICE, sparsity=sparsity, save_pruned=pruned if sparsity == "force" else None
    )
    asked = onnx.load_from_string(pruned.getvalue()) if sparsity == "force" else model
    feeds = {i.name: np.random.default_rng(0).uniform(-1, 1, i.shape).astype(np.float32) for i in engine.plan.inputs}
    got, expected = emulated(engine, feeds), ort_run(asked, feeds)
    for name, y in expected.items():
        error = relative_error(got[name], y)
        assert error < BOUND or error < 3 * relative_error(_rounded(asked, feeds)[name], y), error


def _rounded(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What NumPy gives where every tensor is rounded to FP16 and nothing is fused: FP16's own error."""
    return run(network_of(model), feeds, fp16=True)
