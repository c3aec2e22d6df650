"""Fine-tuning in PyTorch with the zeros of a pruned ONNX model held fixed; needs torch and onnx."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from onnx import numpy_helper

from cuda_kernels import sparse24
from gpu_runtime.frontend.load import load_whole, named, stored_tensors
from gpu_runtime.progress import warn

if TYPE_CHECKING:
    import torch

# The name of a mask in a state_dict: of apex's ASP, of ModelOpt (with "_") and torch.nn.utils.prune, of torch.ao and torchao.
MASK = re.compile(r"(.*\.|)(?:__(\w+)_mma_mask|_?(weight)_mask|parametrizations\.(\w+)\.0\.mask)")
PLACES = ("{}{}", "{}{}_orig", "{}parametrizations.{}.original")  # of the weight itself, from its module and name


class Masks:
    """Copies the weights of a pruned model into a PyTorch module, and keeps their zeros: call it after each optimizer step.

    `parameters`: the module's `state_dict(keep_vars=True)`, or another mapping of names in the ONNX file to its parameters and
    buffers. `pruned`: the path of the ONNX file; or a state_dict or buffers with the masks of ASP, ModelOpt,
    torch.nn.utils.prune or torch.ao (torchao): then weights are only set to zero, with a warning of masks that are not 2:4
    along input channels. Raises ModelError for the file, ValueError for a name or shape that `pruned` does not have, or no
    masks in it. Parameters of integers, as num_batches_tracked, stay as they are.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor], pruned: str | os.PathLike[str] | Mapping[str, torch.Tensor]):
        self.zeros: list[tuple[torch.Tensor, torch.Tensor]] = []
        if isinstance(pruned, Mapping):
            self.zeros = _of_others(parameters, pruned)
            self()
        else:
            self._copy(parameters, pruned)

    def _copy(self, parameters: Mapping[str, torch.Tensor], path: str | os.PathLike[str]) -> None:
        import torch

        with named(Path(path)):
            stored = {name: numpy_helper.to_array(t) for name, t in stored_tensors(load_whole(Path(path)).graph)}
        wanted = {name: p for name, p in parameters.items() if p.is_floating_point()}
        for name, p in wanted.items():
            if name not in stored or stored[name].shape != tuple(p.shape):
                found = f"shape {stored[name].shape}" if name in stored else f"none; it has {', '.join(list(stored)[:3])}, ..."
                cure = "export with torch.onnx.export(..., dynamo=True, optimize=False), or map the file's names to parameters"
                raise ValueError(f"{path}: expected a weight {name!r} of shape {tuple(p.shape)}, got {found}: {cure}")
        with torch.no_grad():
            for name, p in wanted.items():
                values = torch.from_numpy(stored[name].copy()).to(p)
                p.copy_(values)
                if p.ndim > 1 and bool((values == 0).any()):
                    self.zeros.append((p, values == 0))

    def __call__(self) -> None:
        """Sets the pruned weights to zero. (To mask only gradients is not enough: momentum and weight decay change zeros
        too.)
        """
        for parameter, zero in self.zeros:
            parameter.data.masked_fill_(zero, 0)


def _of_others(
    parameters: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Returns (parameter, where it is zero) for each mask of a state_dict; a mask is true, or not 0, where a weight stays."""
    found, others = [], []
    for name, mask in state.items():
        if not (parts := MASK.fullmatch(name)):
            continue
        module, *names = parts.groups()
        weight = next(filter(None, names))
        p = next((p for place in PLACES if (p := parameters.get(place.format(module, weight))) is not None), None)
        if p is None or p.shape != mask.shape:
            got = "none" if p is None else f"shape {tuple(p.shape)}"
            raise ValueError(f"mask {name!r}: expected a parameter {module}{weight} of shape {tuple(mask.shape)}, got {got}")
        keep = mask.bool()
        found.append((p, ~keep.to(p.device)))
        if p.ndim > 1 and p.shape[1] % 4 == 0 and not sparse24.fits(keep.cpu().numpy().astype(np.float32), 1).all():
            others.append(f"{module}{weight}")
    if not found:
        wanted = "CONV.__weight_mma_mask (ASP), CONV._weight_mask (ModelOpt) or CONV.parametrizations.weight.0.mask (torch.ao)"
        raise ValueError(f"expected a state_dict with masks such as {wanted}, got {', '.join(list(state)[:3])}, ...")
    if others:
        warn(
            f"no 2:4 along input channels, as sparse tensor cores need it: the masks of {', '.join(others)}; prune these again"
        )
    return found
