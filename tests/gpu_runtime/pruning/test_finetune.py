"""The pruning loop for PyTorch, by files and in Python alone; and masks that other pruners leave in a state_dict: their names,
their zeros, and which are not 2:4 for tensor cores."""

import warnings

import numpy as np
import pytest

import gpu_runtime as gr
from gpu_runtime.pruning.finetune import Masks


@pytest.fixture
def torch():
    return pytest.importorskip("torch", reason="torch is not installed")


def net(torch):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Conv2d(8, 8, 3), torch.nn.Conv2d(8, 4, 1))


@pytest.fixture
def resnet(torch):
    """A stem and a residual block of convolutions without biases, each with a normalization that is not the identity."""
    nn = torch.nn

    class Block(nn.Module):  # type: ignore[name-defined]
        def __init__(self):
            super().__init__()
            self.conv1, self.bn1 = nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
            self.conv2, self.bn2 = nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)

        def forward(self, x):
            return torch.relu(self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x))))) + x)

    torch.manual_seed(0)
    stem = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()
    module = nn.Sequential(*stem, Block(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 8))
    module(torch.randn(8, 3, 8, 8))  # in training mode: the running means and variances are measured
    return module.eval()


@pytest.mark.parametrize("by", ["files", "python"])
def test_the_loop_of_docs_pruning(torch, resnet, by, cli, tmp_path, monkeypatch):
    """Export, prune with --permute, Masks, a step of training, export, build: with biases that the exporter computes."""
    monkeypatch.chdir(tmp_path)
    x = torch.randn(4, 3, 8, 8)
    if by == "files":
        torch.onnx.export(resnet, (x,), "dense.onnx", dynamo=True, optimize=False, verbose=False)
        code, out, _ = cli("prune dense.onnx -o pruned.onnx --permute --device none")
        assert code == 0 and "not permuted: Shape" not in out and "moved no channel" not in out
        hold = Masks(resnet, "pruned.onnx")
    else:
        result = gr.prune(resnet, example_inputs=(x,), permute=True, device="none")
        rows = [r for r in result.rows if r.verdict == "pruned"]
        assert [r.layers for r in rows] == [("3.conv1",), ("3.conv2",), ("6",)] and not any(r.unmoved for r in rows)
        assert result.lost_energy < result.unpermuted
        result.save("pruned.onnx")
        hold = Masks(resnet, result)
    assert repr(hold) == "Masks(3 weights)"
    with gr.build("pruned.onnx", device="a100").context(device="emulator") as ctx, torch.no_grad():
        (y,) = ctx.run({ctx.engine.inputs[0].name: x.numpy()}).values()
        assert np.abs(y - resnet(x).numpy()).max() < 1e-2  # the module has the order of channels of the file
    optimizer = torch.optim.SGD(resnet.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    for _ in range(2):
        optimizer.zero_grad()
        resnet(x).square().sum().backward()
        optimizer.step()
        hold()
    torch.onnx.export(resnet.eval(), (x,), "finetuned.onnx", dynamo=True, verbose=False)
    assert cli("inspect-sparsity finetuned.onnx --require")[0] == 0


def test_a_file_that_masks_cannot_take(torch, resnet, tmp_path):
    x = (torch.randn(4, 3, 8, 8),)
    torch.onnx.export(resnet, x, tmp_path / "folded.onnx", dynamo=True, verbose=False)
    with pytest.raises(ValueError, match="expected a weight '1.weight' .* optimize=False.*, which folds no normalization"):
        Masks(resnet, tmp_path / "folded.onnx")
    torch.onnx.export(resnet, x, tmp_path / "dense.onnx", dynamo=True, optimize=False, verbose=False)
    with pytest.raises(ValueError, match="dense.onnx: expected weights with zeros to keep, got none: prune it first"):
        Masks(resnet, tmp_path / "dense.onnx")


def kept(torch, w):
    """True where the two largest of each four consecutive input channels are."""
    rows = w.detach().movedim(1, -1).reshape(-1, 4).abs()
    keep = torch.zeros_like(rows, dtype=torch.bool).scatter(1, rows.topk(2, 1).indices, True)
    return keep.reshape(w.movedim(1, -1).shape).movedim(-1, 1)


@pytest.mark.parametrize("name", ["0.__weight_mma_mask", "0._weight_mask", "0.weight_mask", "0.parametrizations.weight.0.mask"])
def test_zeros_of_other_pruners_stay(torch, name):
    module = net(torch)
    w, before = module[0].weight, module[0].weight.detach().clone()
    keep = kept(torch, w)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hold = Masks(module.state_dict(keep_vars=True), {**module.state_dict(), name: keep.float()})
    assert torch.equal(w.detach(), before * keep)
    optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)
    module(torch.randn(1, 8, 5, 5)).square().sum().backward()
    optimizer.step()
    assert not torch.equal(w.detach(), w.detach() * keep)
    hold()
    assert torch.equal(w.detach(), w.detach() * keep) and bool((w != 0).any())


def test_torch_aos_sparsifier_is_read_as_it_stands_in_a_module(torch):
    pruner = pytest.importorskip("torch.ao.pruning")
    module = torch.nn.Sequential(torch.nn.Linear(16, 8))
    sparsifier = pruner.WeightNormSparsifier(sparsity_level=1.0, sparse_block_shape=(1, 4), zeros_per_block=2)
    sparsifier.prepare(module, [{"tensor_fqn": "0.weight"}])
    sparsifier.step()
    hold = Masks(module.state_dict(keep_vars=True), dict(module.named_buffers()))  # its state_dict leaves the masks out
    ((p, zero),) = hold.zeros
    assert p is module[0].parametrizations.weight.original
    assert bool((p.detach()[zero] == 0).all()) and int(zero.sum()) == 64


def test_masks_along_another_axis_are_told(torch):
    """Groups along the flattened kernel have two zeros in four, and groups of input channels have not."""
    module = net(torch)
    flat = torch.tensor([True, True, False, False]).repeat(8 * 8 * 9 // 4).reshape(8, 8, 3, 3)
    flat[:, :3, 0, 0] = True
    with pytest.warns(RuntimeWarning, match="no 2:4 along input channels, .*: the masks of 0.weight; prune these again"):
        assert len(Masks(module.state_dict(keep_vars=True), {"0._weight_mask": flat}).zeros) == 1


def test_what_is_no_mask_or_of_another_network_is_refused(torch):
    module = net(torch)
    state = module.state_dict(keep_vars=True)
    with pytest.raises(ValueError, match="expected a state_dict with masks such as .*, got 0.weight, 0.bias, 1.weight"):
        Masks(state, module.state_dict())
    with pytest.raises(ValueError, match="expected a state_dict with masks such as .*, got nothing"):
        Masks(module, {})
    with pytest.raises(ValueError, match="mask '7._weight_mask': expected a parameter 7.weight of the module, got none"):
        Masks(state, {"7._weight_mask": torch.ones(8, 8)})
    with pytest.raises(ValueError, match=r"expected shape \(8, 8, 3, 3\) of 0.weight, got \(8, 8\)"):
        Masks(state, {"0._weight_mask": torch.ones(8, 8)})
