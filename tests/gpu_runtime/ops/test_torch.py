"""PyTorch's layers by 2:4 kernels, with PyTorch for the CPU over the emulator."""

import copy
import io
import pickle
import subprocess
import sys
from collections import OrderedDict

import pytest

from cuda_kernels.device import why_no_gpu
from tests.on_driver import ROOT

LIMIT = 4e-3  # of the range: FP16 rounding of each layer


@pytest.fixture(scope="module")
def torch():
    found = pytest.importorskip("torch", reason="torch is not installed")
    if not hasattr(found, "library"):
        pytest.skip("torch is the rehearsal's")
    if not why_no_gpu():
        pytest.skip("tensors on the CPU are computed by the emulator only where there is no GPU")
    return found


@pytest.fixture(scope="module")
def ops(torch):
    import gpu_runtime.ops.torch as ops

    return ops


@pytest.fixture
def net(torch):
    nn = torch.nn
    torch.manual_seed(0)
    parts = {
        "stem": nn.Conv2d(3, 16, 3, padding=1),
        "relu": nn.ReLU(),
        "same": nn.Conv2d(16, 32, (3, 2), padding="same"),
        "down": nn.Conv2d(32, 32, 3, stride=2, dilation=2, padding=(2, 1), groups=2, bias=False),
        "pool": nn.AdaptiveAvgPool2d(2),
        "flat": nn.Flatten(),
        "fc": nn.Linear(128, 16),
        "head": nn.Linear(16, 10),
    }
    return nn.Sequential(OrderedDict(parts)).eval().half()


def dense(torch, module, net):
    """The dense network with the pruned weights, in FP32."""
    other = copy.deepcopy(net).float()
    with torch.no_grad():
        for name, layer in other.named_children():
            if hasattr(layer, "weight"):
                layer.weight.copy_(getattr(module, name).weight)
    return other


def near(torch, y, expected) -> bool:
    assert y.dtype == torch.float16 and y.shape == expected.shape
    return bool((y.float() - expected).abs().max() <= LIMIT * (expected.max() - expected.min()))


def sparse_layer(torch, ops, k=16, c=16, bias=True):
    layer = torch.nn.Conv2d(c, k, 3, padding=1, bias=bias).half()
    return ops.sparsify(layer, prune="magnitude").module


def image(torch, n=2, c=16, h=6, w=6):
    return torch.randn(n, c, h, w).half().contiguous(memory_format=torch.channels_last)


# ---- sparsify


def test_layers_are_replaced_and_the_others_are_named_with_the_reason(torch, ops, net):
    before = copy.deepcopy(net)
    found = ops.sparsify(net, prune="magnitude", skip="f*")
    assert found.module is net and found.replaced == ("same", "down")
    assert {name: why.code for name, why in found.others.items()} == {
        "stem": "channels_not_multiple_of_4",
        "fc": "unsupported",
        "head": "no_sparse_tactic",
    }
    assert str(found).splitlines() == [
        "same: runs 2:4 kernels",
        "down: runs 2:4 kernels",
        "stem: stays, channels_not_multiple_of_4: C = 3",
        "fc: stays, skip names it",
        "head: stays, no_sparse_tactic: weight: expected C and K in multiples of 8, got 10: add channels of zeros",
    ]
    with torch.no_grad():
        x = torch.randn(2, 3, 11, 9).half()  # not channels-last
        assert near(torch, net(x), dense(torch, net, before)(x.float()))
    row = net.same.operator("cpu").why((2, 16, 11, 9))
    assert row.verdict in ("sparse", "dense") and row.best_sparse
    with pytest.raises(AttributeError):
        found.replaced = ()


def test_without_pruning_only_weights_that_have_the_pattern_are_taken(torch, ops, net):
    found = ops.sparsify(net)
    assert not found.replaced and found.others["same"].code == found.others["down"].code == "pattern_violation"
    again = ops.sparsify(ops.sparsify(copy.deepcopy(net), prune="magnitude").module)
    assert (again.replaced, [*again.others]) == ((), ["stem", "head"])  # replaced layers are no layers of PyTorch


def test_layers_that_may_compute_something_else_stay(torch, ops):
    class Scaled(torch.nn.Conv2d):  # type: ignore[name-defined]
        def forward(self, x):
            return 2 * super().forward(x)

    conv = torch.nn.Conv2d
    hooked = conv(16, 16, 1)
    hooked.register_forward_hook(lambda module, inputs, y: y + 1)
    layers = torch.nn.Sequential(Scaled(16, 16, 1), hooked, conv(16, 16, 3, padding_mode="reflect"), conv(16, 16, 1, groups=8))
    found = ops.sparsify(layers, prune="magnitude")
    assert not found.replaced and [str(why) for why in found.others.values()] == [
        "Scaled is a class of its own, which may compute something else",
        "it has hooks, which a replacement would lose",
        "kernels pad with zeros, not by padding_mode='reflect'",
        "grouped_conv: a group has 2 input channels, not a multiple of 4",
    ]


def test_a_layer_with_two_names_stays_one(torch, ops):
    layer = torch.nn.Linear(16, 16)
    net = torch.nn.ModuleDict({"a": layer, "b": torch.nn.Sequential(layer)})
    assert ops.sparsify(net, prune="magnitude").replaced == ("a", "b.0") and net["a"] is net["b"][0] is not layer


def test_wrong_arguments(torch, ops, net):
    with pytest.raises(ValueError, match="skip: no nn.Conv2d or nn.Linear is named 'layer1.*', expected some of stem, same"):
        ops.sparsify(net, skip=["stem", "layer1.*"])
    with pytest.raises(TypeError, match="module: expected a torch.nn.Module, got str"):
        ops.sparsify("model.onnx")


# ---- modules


def test_state_dict_copies_and_pickles(torch, ops, net):
    keys = [*net.state_dict()]
    ops.sparsify(net, prune="magnitude")
    assert [*net.state_dict()] == keys and "in_features=128" in repr(net)
    x = torch.randn(1, 3, 9, 9).half()
    file = io.BytesIO()
    with torch.no_grad():
        y = net(x)
        torch.save(net, file)
        file.seek(0)
        others = copy.deepcopy(net), pickle.loads(pickle.dumps(net)), torch.load(file, weights_only=False)
        assert all(torch.equal(other(x), y) for other in others)
        state = {name: 2 * t for name, t in net.state_dict().items()}
        others[0].load_state_dict(state)
        assert torch.equal(net(x), y) and not torch.equal(others[0](x), y)  # packed anew, each its own


def test_weights_that_change_in_place_are_packed_anew(torch, ops):
    layer, x = sparse_layer(torch, ops, bias=False), image(torch)
    with torch.no_grad():
        y = layer(x)
        layer.weight.mul_(2)
        assert torch.allclose(layer(x), 2 * y, atol=1e-3) and len(ops.MADE[layer.weight]) == 1
        layer.weight.fill_(1)
        with pytest.raises(ValueError, match="weight: 0.0 % of its groups of 4 input channels have two zeros"):
            layer(x)
    made, weight = ops.MADE, layer.weight
    assert weight in made and len(made) > 0
    before = len(made)
    del layer, weight
    assert len(made) == before - 1  # operators go with their weights


def test_odd_inputs(torch, ops):
    layer, x = sparse_layer(torch, ops), image(torch, 3)
    with torch.no_grad():
        y = layer(x)
        assert y.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(layer(x.contiguous()), y)  # NCHW
        wide = image(torch, 3, w=12)
        assert torch.equal(layer(wide[..., ::2]), layer(wide[..., ::2].clone()))
        assert layer(x[:0]).shape == (0, 16, 6, 6)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(layer(x.float()), y)
        with pytest.raises(TypeError, match=r"x: expected torch.float16, got torch.bfloat16: make the model .* with .half\(\)"):
            layer(x.bfloat16())
        with pytest.raises(ValueError, match=r"x: expected \[N, 16, H, W\], got 1x8x6x6"):
            layer(x[:1, :8])
        op = torch.ops.gpu_runtime.sparse_conv2d
        with pytest.raises(ValueError, match="x: expected channels-last memory, got strides"):
            op(x.contiguous(), layer.weight, layer.bias, layer.sizes)
    with torch.inference_mode():
        assert torch.equal(layer(x), y) and torch.equal(sparse_layer(torch, ops)(x).isfinite(), torch.ones_like(y).bool())


def test_rows_of_a_linear_layer(torch, ops):
    layer = torch.nn.Linear(16, 24).half()
    w, x = ops.sparsify(layer, prune="magnitude").module, torch.randn(2, 5, 16).half()
    with torch.no_grad():
        for given in (x, x[0], x[0, 0], x.transpose(0, 1), x[:, ::2]):
            expected = torch.nn.functional.linear(given.float(), w.weight.float(), w.bias.float())
            assert near(torch, w(given), expected)
        assert w(x[:0]).shape == (0, 5, 24)


def test_gradients_are_refused_with_the_cure(torch, ops):
    layer, x = sparse_layer(torch, ops), image(torch).requires_grad_()
    y = layer(x)
    assert y.requires_grad
    with pytest.raises(RuntimeError, match="has no gradient, it is for inference: train the model ahead of sparsify"):
        y.sum().backward()


# ---- torch.compile, torch.export


def test_the_operator_keeps_pytorchs_rules(torch, ops):
    for layer, x in ((sparse_layer(torch, ops), image(torch)), (sparse_layer(torch, ops, bias=False), image(torch, 1, h=1))):
        found = torch.library.opcheck(ops.sparse_conv2d, (x, layer.weight, layer.bias, layer.sizes, layer.force))
        assert set(found.values()) == {"SUCCESS"} and len(found) >= 4, found


def test_compiled_and_exported_modules_give_the_same(torch, ops, net):
    ops.sparsify(net, prune="magnitude")
    x = torch.randn(2, 3, 9, 9).half()
    with torch.no_grad():
        y = net(x)
        assert torch.equal(torch.compile(net, fullgraph=True, backend="aot_eager")(x), y)
        fast = torch.compile(net, fullgraph=True, dynamic=True, backend="aot_eager")
        assert torch.equal(fast(x), y) and torch.equal(fast(x[:1]), net(x[:1]))
        program, file = torch.export.export(net, (x,)), io.BytesIO()
        torch.export.save(program, file)
        file.seek(0)
        assert torch.equal(torch.export.load(file).module()(x), y)


@pytest.mark.full
def test_inductor_compiles_around_it(torch, ops, net):
    ops.sparsify(net, prune="magnitude")
    x = torch.randn(2, 3, 9, 9).half()
    with torch.no_grad():
        assert torch.equal(torch.compile(net, fullgraph=True)(x), net(x))


# ---- without PyTorch


def test_without_pytorch_the_cure_is_named():
    code = "import sys; sys.modules['torch'] = None; import gpu_runtime.ops; import gpu_runtime.ops.torch"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode and "PyTorch is not installed: " in done.stderr and "gpu_runtime.ops.torch" in done.stderr
