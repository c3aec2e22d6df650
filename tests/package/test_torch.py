"""PyTorch's modules as models: exported with open sizes, planned, pruned, with names that their authors know."""

import importlib
import tomllib
import warnings
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest

import gpu_runtime as gr
from gpu_runtime.frontend.files.source import Examples

ROOT = Path(__file__).parents[2]


def test_axes_in_which_sizes_differ_stay_open():
    shape = (1, 3, 8, 8)
    assert Examples(sizes={"x": (4, 3, 8, 8)}).open_axes("x", shape) == [0]
    assert Examples(sizes={"x": [(1, 3, 8, 8), (4, 3, 8, 8), (8, 3, 8, 8)]}).open_axes("x", shape) == [0]
    assert Examples(sizes=[{"x": (1, 3, 8, 8)}, {"x": (1, 3, 16, 8)}]).open_axes("x", shape) == [2]
    assert Examples(sizes={"other": (4, 3, 8, 8)}).open_axes("x", shape) == []
    assert Examples(batches=True).open_axes("x", shape) == [0] and Examples(batches=True).open_axes("x", ()) == []


@pytest.fixture
def torch():
    return pytest.importorskip("torch", reason="torch is not installed")


@pytest.fixture
def net(torch):
    nn = torch.nn
    torch.manual_seed(0)

    def block():
        parts = {"conv1": nn.Conv2d(64, 64, 3, padding=1, bias=False), "bn1": nn.BatchNorm2d(64), "relu": nn.ReLU()}
        return nn.Sequential(OrderedDict(parts, conv2=nn.Conv2d(64, 64, 3, padding=1)))

    parts = {"stem": nn.Conv2d(8, 64, 1), "layer1": nn.Sequential(block(), block()), "pool": nn.AdaptiveAvgPool2d(1)}
    return nn.Sequential(OrderedDict(parts, flat=nn.Flatten(), fc=nn.Linear(64, 8))).eval()


LAYERS = ["stem", *(f"layer1.{i}.conv{j}" for i in (0, 1) for j in (1, 2)), "fc"]


def test_a_module_is_built_for_a_range_of_batches(torch, net):
    stages = []
    sizes = {"input": [(1, 8, 6, 6), (4, 8, 6, 6), (8, 8, 6, 6)]}
    x = torch.randn(1, 8, 6, 6)
    engine = gr.build(net, example_inputs=(x,), shapes=sizes, device="a100", progress=lambda p: stages.append(p.stage))
    assert stages[:2] == ["export", "import"]
    assert [row.layer for row in engine.explain().layers] == LAYERS
    x = torch.randn(3, 8, 6, 6)
    with torch.no_grad(), engine.context(device="emulator") as ctx:
        (y,) = ctx.run({"input": x.numpy()}).values()
        assert y.shape == (3, 8) and np.abs(y - net(x).numpy()).max() < 2e-3


def test_wrappers_of_a_module_are_looked_through(torch, net):
    for wrapped in (torch.nn.DataParallel(net), torch.compile(net), torch.nn.DataParallel(torch.compile(net))):
        engine = gr.build(wrapped, example_inputs=(torch.randn(1, 8, 6, 6),), device="a100")
        assert (engine.record.model.name, engine.inputs[0].name) == ("Sequential", "input")
        assert [row.layer for row in engine.explain().layers] == LAYERS


def test_an_export_that_fails_says_the_cause_first(torch, net):
    x = torch.randn(1, 8, 6, 6)
    for given, cause in (
        (x[:, :1], "RuntimeError: Given groups=1, weight of size"),
        (x.numpy(), "ValueError: Unsupported input"),
    ):
        with pytest.raises(gr.ModelError, match=f"^Sequential: torch.onnx.export cannot export it: {cause}"):
            gr.build(net, example_inputs=(given,))
    with pytest.raises(ValueError, match=r"Sequential.forward.* got none: give example_inputs=\(x,\)"):
        gr.plan(net, "a100")


def test_a_module_is_planned_for_batches(torch, net):
    plans = gr.plan(net, "a100", (1, 16), example_inputs=(torch.randn(2, 8, 6, 6),))
    assert [plan.shapes["input"][0] for plan in plans] == [1, 16]
    program = torch.export.export(net, (torch.randn(2, 8, 6, 6),))
    assert gr.plan(program, "a100")[0].shapes["input"] == (2, 8, 6, 6)


def test_a_module_is_pruned_by_its_layers_names(torch, net):
    x = (torch.randn(2, 8, 6, 6),)
    result = gr.prune(net, example_inputs=x, layers="layer1.*.conv1", device="none")
    assert [r.layers for r in result.rows if r.verdict == "pruned"] == [("layer1.0.conv1",), ("layer1.1.conv1",)]
    with pytest.raises(ValueError, match="example_inputs: expected the tuple of arguments of Sequential.forward"):
        gr.prune(net)


def test_both_exporters_give_the_same_names(torch, net, tmp_path):
    x = (torch.randn(2, 8, 6, 6),)
    found = []
    for dynamo in (True, False):
        torch.onnx.export(net, x, tmp_path / f"{dynamo}.onnx", dynamo=dynamo, external_data=False, verbose=False)
        found.append([row.layer for row in gr.build(tmp_path / f"{dynamo}.onnx", device="a100").explain().layers])
    assert found == [LAYERS, LAYERS]


def test_a_compiled_module_gives_what_the_module_does(torch, net):
    fast = gr.compile(net, emulate=True, device="a100", timing_cache=False)
    for batch in (2, 1, 2):
        x = torch.randn(batch, 8, 6, 6)
        y = fast(x)
        with torch.no_grad():
            assert y.shape == (batch, 8) and not y.requires_grad and (y - net(x)).abs().max() < 2e-3
    assert [e.inputs[0].shape[0] for e in fast.engines] == [2, 1]  # one for each shape
    assert [row.layer for row in fast.engines[0].explain().layers] == LAYERS
    assert str(fast.engines[0].explain()).startswith("Sequential at batch 2")


def test_a_compiled_module_falls_back_and_says_so_once(torch, net):
    x = torch.randn(1, 8, 6, 6)
    fast = gr.compile(net, device="a100")
    with pytest.warns(RuntimeWarning, match="runs in PyTorch, without an engine: tensors that are not on a GPU"):
        y = fast(x)
    assert torch.equal(y, net(x))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(fast(x), y)
    odd = torch.nn.Sequential(torch.nn.Bilinear(4, 4, 2))
    with pytest.raises(ValueError, match="sparsity"):
        gr.compile(odd, sparsity="some")
    with pytest.raises(TypeError, match="gr.compile has no option 'sparsty'; did you mean 'sparsity' instead of 'sparsty'"):
        gr.compile(odd, sparsty="enable")
    with pytest.raises(TypeError, match="module: expected a torch.nn.Module, got str"):
        gr.compile("model.onnx")


def test_no_engine_is_built_while_a_graph_is_captured(torch, net, monkeypatch):
    """With a tensor that says it is on a GPU, and a stream that says it is captured."""

    class OnGpu(torch.Tensor):  # type: ignore[name-defined]
        is_cuda = True

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(
        RuntimeError, match="Sequential: an engine cannot be built while a CUDA graph is captured: call it once"
    ):
        gr.compile(net, device="a100")(torch.randn(1, 8, 6, 6).as_subclass(OnGpu))


def test_what_no_engine_computes_is_pytorchs(torch):
    class Sorted(torch.nn.Module):  # type: ignore[name-defined]
        def forward(self, x):
            return x.sort(dim=1).values if x.sum() > 0 else x  # decided by data

    fast, x = gr.compile(Sorted(), emulate=True, device="a100"), torch.ones(1, 8, 2, 2)
    with pytest.warns(RuntimeWarning, match="runs in PyTorch for inputs of 1x8x2x2, without an engine: torch.export cannot"):
        assert torch.equal(fast(x), x)
    assert not fast.engines


def test_outputs_keep_their_structure(torch):
    class Two(torch.nn.Module):  # type: ignore[name-defined]
        def __init__(self):
            super().__init__()
            self.conv = torch.nn.Conv2d(8, 8, 1)

        def forward(self, a, b):
            y = self.conv(a)
            return {"sum": y + b, "both": (y, torch.relu(y))}

    net, x = Two().eval(), (torch.randn(1, 8, 4, 4), torch.randn(1, 8, 4, 4))
    got = gr.compile(net, emulate=True, device="a100")(*x)
    with torch.no_grad():
        wanted = net(*x)
    for y, z in ((got["sum"], wanted["sum"]), *zip(got["both"], wanted["both"], strict=True)):
        assert (y - z).abs().max() < 2e-3


def test_torch_compile_runs_engines(torch, net):
    options = {"emulate": True, "device": "a100", "timing_cache": False}
    fast = torch.compile(net, backend=backend_of(torch), options=options)
    x = torch.randn(2, 8, 6, 6)
    with torch.no_grad():
        assert 0 < (fast(x) - net(x)).abs().max() < 2e-3  # FP16's rounding: an engine ran
        net.fc.bias.add_(1.0)
        assert 0 < (fast(x) - net(x)).abs().max() < 2e-3
    with pytest.warns(RuntimeWarning, match="inputs that need gradients: call it under torch.no_grad"):
        y = fast(x)
    assert y.requires_grad and torch.equal(y, net(x))


def backend_of(torch):
    """By the entry point where the package is installed with it, else the function that it names."""
    text = (ROOT / "pyproject.toml").read_text()
    place = tomllib.loads(text)["project"]["entry-points"]["torch_dynamo_backends"]["gpu_runtime"]
    module, name = place.split(":")
    return getattr(importlib.import_module(module), name)


def test_an_inference_session_exports_a_module_once(torch):
    net = torch.nn.Sequential(torch.nn.Conv2d(8, 8, 3), torch.nn.ReLU()).eval()
    x = torch.randn(1, 8, 6, 6)
    with gr.InferenceSession(net, example_inputs=(x,), device="a100") as session:
        (y,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    assert np.abs(y - net(x).detach().numpy()).max() < 5e-3
