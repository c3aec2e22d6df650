"""Masks that other pruners leave in a state_dict: their names, their zeros, and which are not 2:4 for tensor cores."""

import warnings

import pytest

from gpu_runtime.pruning.finetune import Masks


@pytest.fixture
def torch():
    return pytest.importorskip("torch", reason="torch is not installed")


def net(torch):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Conv2d(8, 8, 3), torch.nn.Conv2d(8, 4, 1))


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
    with pytest.raises(ValueError, match="expected a state_dict with masks such as .*, got 0.weight, 0.bias, 1.weight, ..."):
        Masks(state, module.state_dict())
    with pytest.raises(ValueError, match="mask '7._weight_mask': expected a parameter 7.weight of shape .*, got none"):
        Masks(state, {"7._weight_mask": torch.ones(8, 8)})
    with pytest.raises(ValueError, match=r"expected a parameter 0.weight of shape \(8, 8\), got shape \(8, 8, 3, 3\)"):
        Masks(state, {"0._weight_mask": torch.ones(8, 8)})
