"""Fine-tuning in PyTorch with the zeros of a pruned ONNX model held fixed; needs torch and onnx."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from onnx import numpy_helper

from gpu_runtime.frontend.load import load_whole, named, stored_tensors

if TYPE_CHECKING:
    import torch


class Masks:
    """Copies the weights of a pruned model into a PyTorch module, and keeps their zeros: call it after each optimizer step.

    `parameters`: the module's `state_dict(keep_vars=True)`, or another mapping of names in the ONNX file to its parameters and
    buffers. Raises ModelError for the file, ValueError for a name or shape that the file does not have. Parameters of integers,
    as num_batches_tracked, stay as they are.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor], path: str | os.PathLike[str]):
        import torch

        with named(Path(path)):
            stored = {name: numpy_helper.to_array(t) for name, t in stored_tensors(load_whole(Path(path)).graph)}
        wanted = {name: p for name, p in parameters.items() if p.is_floating_point()}
        for name, p in wanted.items():
            if name not in stored or stored[name].shape != tuple(p.shape):
                found = f"shape {stored[name].shape}" if name in stored else f"none; it has {', '.join(list(stored)[:3])}, ..."
                cure = "export with torch.onnx.export(..., dynamo=True, optimize=False), or map the file's names to parameters"
                raise ValueError(f"{path}: expected a weight {name!r} of shape {tuple(p.shape)}, got {found}: {cure}")
        self.zeros = []
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
