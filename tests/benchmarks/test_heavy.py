"""Networks that compute much for each byte: they build, compute what onnxruntime does, and stay in FP16's range."""

import numpy as np
import onnx
import pytest

import gpu_runtime as gr
from benchmarks import heavy
from tests.engines import emulated
from tests.reference_run import largest_values, ort_run, relative_error

TINY = {
    "vgg19": {"size": 32, "width": 16, "hidden": 64},
    "vae_decoder": {"size": 4, "width": 32, "depth": 1},
    "unet_block": {"batch": 1, "size": 16, "width": 32, "depth": 1},
    "realesr": {"height": 12, "width": 20, "channels": 16, "depth": 2},
}


def tiny(name: str) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """The network at a size for a test, and random normal images."""
    model = heavy.NETWORKS[name](**TINY[name])
    shape = [d.dim_value for d in model.graph.input[0].type.tensor_type.shape.dim]
    return model, {"x": np.random.default_rng(0).standard_normal(shape).astype(np.float32)}


def test_all_are_tried():
    assert set(TINY) == set(heavy.NETWORKS)


@pytest.mark.parametrize("name", TINY)
def test_activations_are_in_range(name):
    """FP16's is 65,504. At full width and depth they are within 91."""
    largest = largest_values(*tiny(name))
    assert 1 < max(largest.values()) < 100, max(largest, key=largest.__getitem__)


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
def test_an_engine_computes_what_onnxruntime_does(name, tmp_path):
    model, feeds = tiny(name)
    onnx.save(model, tmp_path / "m.onnx")
    engine = gr.build(tmp_path / "m.onnx", sparsity="disable", device="h200")
    [(output, expected)] = ort_run(model, feeds).items()
    assert relative_error(emulated(engine, feeds)[output], expected) < 3e-3


@pytest.mark.parametrize("name", ["vae_decoder", "unet_block"])
def test_a_group_norm_is_one_launch(name, tmp_path):
    """With its SiLU; two more launches at most than convolutions, norms and resizes."""
    model, _ = tiny(name)
    onnx.save(model, tmp_path / "m.onnx")
    ops = [node.op_type for node in model.graph.node]
    kernels = [step.kernel for step in gr.build(tmp_path / "m.onnx", sparsity="disable", device="h200").plan.steps]
    assert kernels.count("reduce") == ops.count("InstanceNormalization") and "pointwise" not in kernels
    assert len(kernels) <= sum(map(ops.count, ("Conv", "InstanceNormalization", "Resize"))) + 2


def test_vgg19_is_torchvisions():
    """Convolutions' channels, and the fully connected layers behind 512 x 7 x 7."""
    convs = [128] * 2 + [256] * 4 + [512] * 8
    shapes = [tuple(t.dims) for t in heavy.vgg19(width=8, hidden=16).graph.initializer if len(t.dims) > 1]
    assert [8 * k for k, *_ in shapes[:16]] == [64, 64, *convs] and shapes[16:] == [(16, 64 * 49), (16, 16), (1000, 16)]


def test_the_decoders_images_are_eight_times_their_latents():
    model = heavy.vae_decoder(2, 4, 32, 1)
    assert [d.dim_value for d in model.graph.output[0].type.tensor_type.shape.dim] == [2, 3, 32, 32]
    skips = [node.name for node in model.graph.node if node.name.endswith("/skip")]
    assert skips == ["up2/block0/skip", "up3/block0/skip"]  # where channels change
