"""From an ONNX model to an explained engine, and from an engine to outputs.

    >>> import gpu_runtime as gr
    >>> engine = gr.build("model.onnx", sparsity="enable")
    >>> engine.save("model.engine")
    >>> with gr.load("model.engine").context() as ctx:
    ...     y = ctx.run({"x": x})["logits"]

`plan` plans without building, `prune` makes weights 2:4, `compare` compares an engine with its model. These and `build` need
the packages of the extra `build` (onnx and the planner's); `load` and running engines do not. The logger `gpu_runtime` gets the
texts that the commands print.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

from cuda_kernels import extras

if TYPE_CHECKING:
    from gpu_runtime.accuracy.compare import compare
    from gpu_runtime.engine import Engine, load
    from gpu_runtime.errors import CompileError, EngineError, InternalError, ModelError, QueueFullError
    from gpu_runtime.inference_session import InferenceSession
    from gpu_runtime.pipeline import build, plan
    from gpu_runtime.pruning.prune import prune
    from gpu_runtime.runtime.context import Context
    from gpu_runtime.runtime.fields import TensorSpec
    from gpu_runtime.runtime.future import RunFuture
    from gpu_runtime.serving.pool import Pool
    from gpu_runtime.torch_backend import compile as compile  # not in __all__: it needs PyTorch, and hides a built-in function

    __version__: str

# fmt: off
__all__ = [
    "CompileError", "Context", "Engine", "EngineError", "InferenceSession", "InternalError", "ModelError", "Pool",
    "QueueFullError", "RunFuture", "TensorSpec", "build", "compare", "installed_version", "load", "plan",
    "prune",
]
# fmt: on
# Name -> its module, imported when the name is first used: running engines takes neither onnx nor the planner.
PLACES = {
    **dict.fromkeys(("CompileError", "EngineError", "InternalError", "ModelError", "QueueFullError"), "gpu_runtime.errors"),
    "Context": "gpu_runtime.runtime.context",
    "Engine": "gpu_runtime.engine",
    "InferenceSession": "gpu_runtime.inference_session",
    "Pool": "gpu_runtime.serving.pool",
    "RunFuture": "gpu_runtime.runtime.future",
    "TensorSpec": "gpu_runtime.runtime.plan_record",
    "build": "gpu_runtime.pipeline",
    "compare": "gpu_runtime.accuracy.compare",
    "compile": "gpu_runtime.torch_backend",
    "load": "gpu_runtime.engine",
    "plan": "gpu_runtime.pipeline",
    "prune": "gpu_runtime.pruning.prune",
}

logging.getLogger("gpu_runtime").addHandler(logging.NullHandler())


def installed_version() -> str:
    """Returns the installed version; "uninstalled" when run from the sources only."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("gpu-runtime")
    except PackageNotFoundError:
        return "uninstalled"


def __getattr__(name: str) -> Any:
    """Imports the names of PLACES on first use, and gives __version__ (PEP 562)."""
    if name == "__version__":
        return installed_version()
    if name not in PLACES:
        raise AttributeError(f"module 'gpu_runtime' has no attribute {name!r}")
    with extras.named():
        globals()[name] = found = getattr(import_module(PLACES[name]), name)
    return found


def __dir__() -> list[str]:
    return [*__all__, "compile", "__version__"]
