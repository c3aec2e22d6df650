"""From an ONNX file to an explained engine, and from an engine to outputs.

    engine = gpu_runtime.build("model.onnx", sparsity="enable")
    engine.save("model.engine")
    with gpu_runtime.load("model.engine").context() as ctx:
        y = ctx.run({"x": x})["logits"]
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from gpu_runtime.errors import CompileError, EngineError, InternalError, ModelError

if TYPE_CHECKING:
    from gpu_runtime.runtime.engine import Engine

__all__ = ["CompileError", "EngineError", "InternalError", "ModelError", "build", "installed_version", "load"]


def build(model: str | os.PathLike[str], **options: Any) -> Engine:
    """Build an engine from an ONNX file; see gpu_runtime.pipeline.build for the options."""
    from gpu_runtime.pipeline import build as run  # imports onnx: only where something is built

    return run(model, **options)


def installed_version() -> str:
    """The version that is installed; "uninstalled" where this is run from its sources only."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("gpu-runtime")
    except PackageNotFoundError:
        return "uninstalled"


def load(path: str | os.PathLike[str], *, verify: bool = True, allow_cubins: bool = False) -> Engine:
    """Read and check an engine file. Raises EngineError."""
    from gpu_runtime.runtime.engine import read

    return read(path, verify=verify, allow_cubins=allow_cubins)
