"""PyTorch's layers by 2:4 kernels: `sparsify`, which replaces nn.Conv2d and nn.Linear. Importing it takes torch.

The operator gpu_runtime::sparse_conv2d is a function, which torch.compile and torch.export take as it is. It packs weights at
their first use on a device, and anew after a change in place. On a GPU it runs on PyTorch's current stream; tensors on the CPU
are computed by the emulator, where there is no GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from cuda_kernels import extras, sparse24

with extras.named():
    import torch
    from torch import nn
    from torch.utils.weak import WeakTensorKeyDictionary

from gpu_runtime.ops.conv import SparseConv2d, _host
from gpu_runtime.ops.graph import Geometry
from tactics.families.conv_gemm import not_sparse
from tactics.problems.problem import ConvProblem
from tactics.reason import UNSUPPORTED, Reason, unsupported

KINDS = (nn.Conv2d, nn.Linear)
MADE = WeakTensorKeyDictionary()  # weight -> {device and options: (versions of weight and bias, the operator made from them)}


def versions(tensors: Iterable[Any]) -> tuple[int, ...]:
    """Returns numbers that change as soon as one of these tensors is another one, or is changed in place."""
    return tuple(v for t in tensors for v in (t.data_ptr(), 0 if t.is_inference() else t._version))


def operator(device: Any, weight: Any, bias: Any, sizes: Sequence[int], force: str = "") -> SparseConv2d:
    """Returns the operator for tensors on a device, made from the weights as they are now. Arguments as for `sparse_conv2d`."""
    made, key = MADE.setdefault(weight, {}), (torch.device(device), *sizes, force)
    now = versions((weight,) if bias is None else (weight, bias))
    if key not in made or made[key][0] != now:
        given = weight.reshape((*weight.shape, 1, 1)[:4]), bias
        made[key] = now, SparseConv2d.from_dense(*given, force=force, **Geometry.of(sizes)._asdict())
    return made[key][1]  # type: ignore[no-any-return]


@torch.library.custom_op("gpu_runtime::sparse_conv2d", mutates_args=())
def sparse_conv2d(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, sizes: Sequence[int], force: str = ""
) -> torch.Tensor:
    """Computes and returns a convolution of x; x and the result are FP16 and channels-last.

    `weight`: 2:4, [K, C / groups, R, S], or [K, C] for a linear layer; `sizes`: two strides, padding (top, left, bottom,
    right), two dilations, groups; `force`: as for SparseConv2d.from_dense.
    """
    if not (y := _empty(x, weight, bias, sizes, force)).numel():
        return y
    conv, x = operator(x.device, weight, bias, sizes, force), x.detach()
    if x.is_cuda:
        with torch.cuda.device(x.device):
            conv(x, out=y)
    else:
        conv(x.numpy(), out=y.numpy())
    return y


@sparse_conv2d.register_fake
def _empty(x: Any, weight: Any, bias: Any, sizes: Sequence[int], force: str = "") -> Any:
    """Allocates the output of `sparse_conv2d`, whose arguments it takes, with undefined values; a fake tensor while PyTorch
    traces. Raises TypeError unless x is FP16."""
    if x.dtype != torch.float16:
        cure = "make the model and its inputs so with .half(), or call it within torch.autocast"
        raise TypeError(f"x: expected torch.float16, got {x.dtype}: {cure}")
    images, *shape = x.shape
    _, *out = Geometry.of(sizes).out_shape((*weight.shape, 1, 1)[:4], (1, *shape))  # of any number of images, none too
    return torch.empty((images, *out), dtype=x.dtype, device=x.device, memory_format=torch.channels_last)


@sparse_conv2d.register_autograd
def _backward(ctx: Any, grad: Any) -> None:
    cure = "train the model ahead of sparsify, and call this one under torch.no_grad()"
    raise RuntimeError(f"gpu_runtime::sparse_conv2d has no gradient, it is for inference: {cure}")


# ---- modules


class Sparse24(nn.Module):
    """Computes the output of an nn.Conv2d or nn.Linear, for inference, by 2:4 kernels. Inputs are FP16, within torch.autocast
    of any type; images become channels-last. `weight`, `bias`: buffers, so its state_dict is the layer's."""

    def __init__(self, layer: Any, weight: Any, sizes: Sequence[int], force: str) -> None:
        super().__init__()
        self.sizes, self.force, self.text = sizes, force, layer.extra_repr()
        self.register_buffer("weight", weight)
        self.register_buffer("bias", None if layer.bias is None else layer.bias.detach())
        self.train(layer.training)

    def operator(self, device: Any) -> SparseConv2d:
        """Returns the SparseConv2d for tensors on a device, with its why, tactic, prepare and tune.

        These take shapes [N, C, H, W], or [1, C, 1, rows] for a linear layer.
        """
        return operator(device, self.weight, self.bias, self.sizes, self.force)

    def forward(self, x: Any) -> Any:
        x, more = x.half() if torch.is_autocast_enabled(x.device.type) else x, (self.weight, self.bias, self.sizes, self.force)
        if self.weight.dim() > 2:
            return sparse_conv2d(x.contiguous(memory_format=torch.channels_last), *more)
        shape = (*x.shape[:-1], self.weight.shape[0])
        if not x.numel():
            return x.new_empty(shape)
        y = sparse_conv2d(x.reshape(1, 1, -1, x.shape[-1]).permute(0, 3, 1, 2), *more)
        return y.permute(0, 2, 3, 1).reshape(shape)

    def extra_repr(self) -> str:
        return str(self.text)


@dataclass(frozen=True, slots=True)
class Sparsified:
    """A model in which layers were replaced, and its nn.Conv2d and nn.Linear layers by name; `print` shows them.

    `replaced`: the layers that now run by 2:4 kernels; `others`: layer -> the reason why it was not replaced.
    """

    module: Any
    replaced: tuple[str, ...]
    others: Mapping[str, Reason]

    def __str__(self) -> str:
        rows = [f"{name}: runs 2:4 kernels" for name in self.replaced]
        return "\n".join([*rows, *(f"{name}: stays, {why}" for name, why in self.others.items())])


def sparsify(module: Any, skip: str | Sequence[str] = (), prune: str = "refuse", force: str = "") -> Sparsified:
    """Replaces nn.Conv2d and nn.Linear layers of a model in place by 2:4 ones, for inference. `skip`: names or patterns of
    layers that stay; `prune`, `force`: as for SparseConv2d.from_dense. Raises ValueError for a pattern that fits no layer.

    >>> print(sparsify(model.half().cuda(), skip="head.*"))
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module: expected a torch.nn.Module, got {type(module).__name__}")
    modules = dict(module.named_modules(remove_duplicate=False))
    layers = {name: layer for name, layer in modules.items() if isinstance(layer, KINDS)}
    skipped = {p: {n for n in layers if fnmatchcase(n, p)} for p in ([skip] if isinstance(skip, str) else skip)}
    if unused := [p for p, names in skipped.items() if not names]:
        raise ValueError(f"skip: no nn.Conv2d or nn.Linear is named {unused[0]!r}, expected some of {', '.join(layers)}")
    stay = set[str]().union(*skipped.values())
    made = {layer: _replacement(layer, prune, force) for name, layer in layers.items() if name not in stay}  # once each
    found = {n: Reason(UNSUPPORTED, "skip names it") if n in stay else made[layer] for n, layer in layers.items()}
    replaced = {name: new for name, new in found.items() if isinstance(new, Sparse24)}
    for name, new in replaced.items():
        parent, _, child = name.rpartition(".")
        setattr(modules[parent], child, new) if name else (module := new)
    return Sparsified(module, tuple(replaced), {n: why for n, why in found.items() if isinstance(why, Reason)})


def _replacement(layer: Any, prune: str, force: str) -> Sparse24 | Reason:
    """Returns the module that replaces a layer, or the reason why none can."""
    if against := unsupported(_special(layer)):
        return against
    weight, sizes = _host(layer.weight), (1, 1, 0, 0, 0, 0, 1, 1, 1)
    if isinstance(layer, nn.Conv2d):
        left, right, top, bottom = layer._reversed_padding_repeated_twice
        sizes = (*layer.stride, top, left, bottom, right, *layer.dilation, layer.groups)
    k, channels, r, s = shape = (*weight.shape, 1, 1)[:4]
    fits, groups = prune == "magnitude" or channels % 4 == 0 and sparse24.is_sparse(weight), sizes[-1]
    if reason := not_sparse(ConvProblem(1, channels * groups, r, s, k, r, s, groups=groups, sparse24=fits)):
        return reason
    options: Any = Geometry.of(sizes)._asdict()
    try:
        conv = SparseConv2d.from_dense(weight.reshape(shape), layer.bias, prune=prune, force=force, **options)
    except ValueError as e:
        return Reason("no_sparse_tactic", str(e))
    return Sparse24(layer, torch.from_numpy(conv.weight.reshape(weight.shape)).to(layer.weight), sizes, force)


def _special(layer: Any) -> str:
    """Returns, in words, why a layer may compute something else than its class; "" if nothing suggests so."""
    mode = getattr(layer, "padding_mode", "zeros")
    reasons = {
        f"{type(layer).__name__} is a class of its own, which may compute something else": type(layer) not in KINDS,
        "it has hooks, which a replacement would lose": layer._forward_hooks or layer._forward_pre_hooks,
        f"kernels pad with zeros, not by padding_mode={mode!r}": mode != "zeros",
    }
    return next((why for why, holds in reasons.items() if holds), "")
