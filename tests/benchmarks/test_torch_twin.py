"""The PyTorch beside an engine computes what onnxruntime does, and is what a user of PyTorch writes."""

from importlib.util import find_spec

import numpy as np
import onnx
import pytest

from benchmarks import heavy, networks
from benchmarks.torch_twin import OPS, fused, torch_module
from tests.benchmarks.test_heavy import TINY
from tests.reference_run import given_model, model, node, ort_run, relative_error

MADE = {
    **{name: lambda name=name: heavy.NETWORKS[name](**TINY[name]) for name in TINY},
    "resnet50": lambda: networks.resnet50(size=32),
    "super_resolution": lambda: networks.super_resolution(8, 12),
    "realesr": lambda: onnx.load(given_model("realesr_animevideov3")),
}
SHAPES = {"realesr": (1, 3, 8, 12)}  # of an input that the model leaves open
W = np.random.default_rng(0).standard_normal((8, 4, 3, 3)).astype(np.float32)
SMALL = {
    "pads of one side": ([node("Conv", "x w", "y", pads=[0, 1, 1, 0], strides=[2, 2])], {"w": W}),
    "pool of one side": ([node("MaxPool", "x", "y", kernel_shape=[2, 2], pads=[0, 0, 1, 1])], {}),
    "bilinear": (
        [node("Resize", "x _ s", "y", mode="linear", coordinate_transformation_mode="half_pixel")],
        {"s": np.array([1, 1, 2, 2], np.float32)},
    ),
    "two gates": ([node("Sigmoid", "x", "g"), node("Mul", "x g", "a"), node("Mul", "a g", "y")], {}),
    "concat": ([node("Relu", "x", "a"), node("Concat", "x a", "y", axis=1)], {}),
}


torch_is_there = pytest.mark.skipif(find_spec("torch") is None, reason="PyTorch is not installed")


def feeds_of(proto: onnx.ModelProto, name: str) -> dict[str, np.ndarray]:
    x = proto.graph.input[0]
    shape = SHAPES.get(name) or [d.dim_value for d in x.type.tensor_type.shape.dim]
    return {x.name: np.random.default_rng(0).standard_normal(shape).astype(np.float32)}


def check(proto: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> None:
    import torch

    with torch.no_grad():
        got = torch_module(proto)(*map(torch.from_numpy, feeds.values())).numpy()
    [expected] = ort_run(proto, feeds).values()
    assert relative_error(got, expected) < 1e-5


@torch_is_there
@pytest.mark.slow
@pytest.mark.parametrize("name", MADE)
def test_it_computes_what_onnxruntime_does(name):
    check(proto := MADE[name](), feeds_of(proto, name))


@torch_is_there
@pytest.mark.parametrize("name", SMALL)
def test_operators(name):
    nodes, weights = SMALL[name]
    proto = model(nodes, {"x": (2, 4, 6, 6)}, "y", weights)
    check(proto, feeds_of(proto, name))


def ops(proto: onnx.ModelProto) -> list[str]:
    return [step.op for step in fused(proto, {t.name: onnx.numpy_helper.to_array(t) for t in proto.graph.initializer})]


def test_group_norms_and_silus_are_one_function_each():
    proto = heavy.unet_block(**TINY["unet_block"])
    norms = sum(n.op_type == "InstanceNormalization" for n in proto.graph.node)
    found = ops(proto)
    assert found.count("GroupNorm") == found.count("Silu") == norms == 6
    assert set(found) == {"Conv", "GroupNorm", "Silu", "Add"} <= set(OPS)


def test_a_convolution_has_its_norm():
    assert set(ops(networks.resnet50(size=32))) == {"Conv", "Relu", "MaxPool", "Add", "GlobalAveragePool", "Flatten", "Gemm"}


@torch_is_there
def test_nothing_but_calls_is_left_to_run_time():
    """Shapes and scales are numbers in the code: no tensor is asked for its size or its values."""
    net = torch_module(heavy.vae_decoder(**TINY["vae_decoder"]))
    called = {step.target for step in net.graph.nodes if step.op == "call_method"}
    assert called == {"reshape"} and ".shape" not in net.code and "group_norm" in net.code


def test_a_gate_that_others_read_stays():
    nodes, _ = SMALL["two gates"]
    assert ops(model(nodes, {"x": (2, 4, 6, 6)}, "y")) == ["Sigmoid", "Mul", "Mul"]


@torch_is_there
def test_weights_move_with_the_module():
    import torch

    net = torch_module(heavy.unet_block(**TINY["unet_block"])).half()
    assert {b.dtype for b in net.buffers()} == {torch.float16} and len(list(net.buffers())) > 20


@torch_is_there
@pytest.mark.parametrize("op, attributes, said", [("Erf", {}, "Erf the_node"), ("DepthToSpace", {"blocksize": 2}, "DCR")])
def test_what_is_not_known_is_refused(op, attributes, said):
    unknown = node(op, "x", "y", name="the_node", **attributes)
    with pytest.raises(ValueError, match=said):
        torch_module(model([unknown], {"x": (1, 4, 6, 6)}, "y"))
