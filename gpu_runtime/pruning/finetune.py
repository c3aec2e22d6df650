"""Fine-tuning in PyTorch with the zeros of a pruned ONNX model held fixed; needs torch and onnx."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from onnx import numpy_helper

from cuda_kernels import sparse24
from gpu_runtime.frontend.files.load import load_whole, named, stored_tensors
from gpu_runtime.frontend.files.source import source_of
from gpu_runtime.progress import warn
from gpu_runtime.pruning.result import Result
from gpu_runtime.text import several

if TYPE_CHECKING:
    import torch

# The name of a mask in a state_dict: of apex's ASP, of ModelOpt (with "_") and torch.nn.utils.prune, of torch.ao and torchao.
MASK = re.compile(r"(.*\.|)(?:__(\w+)_mma_mask|_?(weight)_mask|parametrizations\.(\w+)\.0\.mask)")
Zeros: TypeAlias = "list[tuple[torch.Tensor, torch.Tensor]]"  # a parameter, and where it is zero
PLACES = ("{}{}", "{}{}_orig", "{}parametrizations.{}.original")  # of the weight itself, from its module and name


class Masks:
    """Copies the weights of a pruned model into a PyTorch module, and keeps their zeros: call it after each optimizer step.

    `parameters`: the module; or a mapping of names in the ONNX file to its parameters and buffers, as the module's
    `state_dict(keep_vars=True)`. `pruned`: the path of the ONNX file, or what `gr.prune` returned; or a state_dict or buffers
    with the masks of ASP, ModelOpt, torch.nn.utils.prune or torch.ao (torchao): then weights are only set to zero, with a
    warning of masks that are not 2:4 along input channels. Raises ModelError for the file, ValueError for a name or shape that
    `pruned` does not have, or no masks in it. Parameters of integers, as num_batches_tracked, stay as they are.
    """

    def __init__(
        self,
        parameters: torch.nn.Module | Mapping[str, torch.Tensor],
        pruned: str | os.PathLike[str] | Result | Mapping[str, torch.Tensor],
    ):
        given = parameters if isinstance(parameters, Mapping) else parameters.state_dict(keep_vars=True)
        self.zeros = _of_others(given, pruned) if isinstance(pruned, Mapping) else _copied(given, pruned)
        self()

    def __repr__(self) -> str:
        return f"Masks({several(len(self.zeros), 'weight')})"

    def __call__(self) -> None:
        """Sets the pruned weights to zero. To mask only gradients is not enough: momentum and weight decay change zeros,
        too.
        """
        for parameter, zero in self.zeros:
            parameter.data.masked_fill_(zero, 0)


def _copied(parameters: Mapping[str, torch.Tensor], pruned: str | os.PathLike[str] | Result) -> Zeros:
    """Copies the pruned model's stored weights into the parameters of the same name.

    Returns (parameter, boolean tensor of its zeros) for each parameter that has zeros.
    """
    import torch

    source = source_of(pruned.model if isinstance(pruned, Result) else pruned)
    with named(source):
        stored = {name: numpy_helper.to_array(t) for name, t in stored_tensors(load_whole(source).graph)}
    wanted = {name: p for name, p in parameters.items() if p.is_floating_point()}
    for name, p in wanted.items():
        if name not in stored or stored[name].shape != tuple(p.shape):
            found = f"shape {stored[name].shape}" if name in stored else f"none; it has {', '.join(list(stored)[:3])}, ..."
            cure = "export with torch.onnx.export(..., dynamo=True, optimize=False), which folds no normalization into weights"
            cure += ", or map the file's names to parameters"
            raise ValueError(f"{source}: expected a weight {name!r} of shape {tuple(p.shape)}, got {found}: {cure}")
    if not any((stored[name] == 0).any() for name, p in wanted.items() if p.ndim > 1):
        raise ValueError(f"{source}: expected weights with zeros to keep, got none: prune it first (gr.prune)")
    zeros = []
    with torch.no_grad():
        for name, p in wanted.items():
            values = torch.from_numpy(stored[name].copy()).to(p)
            p.copy_(values)
            if p.ndim > 1 and bool((values == 0).any()):
                zeros.append((p, values == 0))
    return zeros


def _of_others(parameters: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor]) -> Zeros:
    """Returns (parameter, boolean tensor of the weights to set to zero) for each mask in a state_dict of another tool.

    A weight stays where its mask is true or not 0.
    """
    found, others = [], []
    for name, mask in state.items():
        if not (parts := MASK.fullmatch(name)):
            continue
        module, *names = parts.groups()
        weight = next(filter(None, names))
        p = next((p for place in PLACES if (p := parameters.get(place.format(module, weight))) is not None), None)
        if p is None:
            raise ValueError(f"mask {name!r}: expected a parameter {module}{weight} of the module, got none of this name")
        if p.shape != mask.shape:
            raise ValueError(f"mask {name!r}: expected shape {tuple(p.shape)} of {module}{weight}, got {tuple(mask.shape)}")
        keep = mask.bool()
        found.append((p, ~keep.to(p.device)))
        if p.ndim > 1 and p.shape[1] % 4 == 0 and not sparse24.fits(keep.cpu().numpy().astype(np.float32), 1).all():
            others.append(f"{module}{weight}")
    if not found:
        wanted = "CONV.__weight_mma_mask (ASP), CONV._weight_mask (ModelOpt) or CONV.parametrizations.weight.0.mask (torch.ao)"
        raise ValueError(f"expected a state_dict with masks such as {wanted}, got {', '.join(list(state)[:3]) or 'nothing'}")
    if others:
        warn(
            f"no 2:4 along input channels, as sparse tensor cores need it: the masks of {', '.join(others)}; prune these again"
        )
    return found
