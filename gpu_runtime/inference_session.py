"""onnxruntime's InferenceSession, as far as scripts that run a model need it, on an engine of gpu_runtime.

    import gpu_runtime as gr
    session = gr.InferenceSession("model.onnx", sparsity="enable")  # or an engine's path
    (logits,) = session.run(["logits"], {"x": x})

Differences: an engine has fixed sizes, which `shapes` gives to a model whose sizes are open; session and run options have no
effect, with a warning; other methods of onnxruntime are refused, with the alternative.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cuda_kernels import device as devices
from cuda_kernels import extras
from gpu_runtime import file_kinds
from gpu_runtime.engine import Engine, load
from gpu_runtime.progress import warn
from gpu_runtime.runtime import arrays
from gpu_runtime.runtime.context import Context
from gpu_runtime.runtime.fields import Batch, TensorSpec
from gpu_runtime.runtime.steps import warning
from gpu_runtime.text import printable

ORT_TYPES = {"float32": "tensor(float)"}  # exceptions from tensor(NumPy's name)
# onnxruntime's providers -> our devices.
PROVIDERS = {"TensorrtExecutionProvider": "cuda", "CUDAExecutionProvider": "cuda", "CPUExecutionProvider": "emulator"}
NAMES = {"cuda": "CUDAExecutionProvider", "emulator": "CPUExecutionProvider"}
ON_GPU = "session.context.run takes arrays on the GPU, and out= for outputs"
# Methods that onnxruntime's class has and this one lacks -> the alternative.
UNSUPPORTED = {
    "io_binding": ON_GPU,
    "run_with_iobinding": ON_GPU,
    "run_with_ort_values": ON_GPU,
    "run_with_ortvaluevector": ON_GPU,
    "create_ortvalue_from_shape_and_type": ON_GPU,
    "run_async": "session.context.run_async returns a future",
    "get_modelmeta": "session.engine.record.model has the model's name and hash; read other metadata from the ONNX file",
    "get_session_options": "a session has no options",
    "set_providers": "make another session",
    "end_profiling": "session.context.profile measures layers on a GPU",
    "get_profiling_start_time_ns": "session.context.profile measures layers on a GPU",
}


@dataclass(frozen=True, slots=True)
class NodeArg:
    """An input or output, as onnxruntime describes it."""

    name: str
    type: str
    shape: list[int | str]  # a size that may vary has a name

    @staticmethod
    def of(info: TensorSpec) -> NodeArg:
        shape = ["batch" if isinstance(n, Batch) else n for n in info.shape]
        return NodeArg(info.name, ORT_TYPES.get(info.dtype.name, f"tensor({info.dtype})"), shape)


class InferenceSession:
    """A session that runs a model or an engine, with onnxruntime's methods.

    `path_or_bytes`: an ONNX model or an engine, as a path, as bytes or in another form that gpu_runtime.load and build take, or
    an Engine. A model is built first, with `options` of gpu_runtime.build. `providers`: onnxruntime's names; CUDA's and
    TensorRT's run on the GPU, the CPU's in the emulator, which is exact and slow; the first available one counts, None means
    all. Close it, or use it in a `with`, to free memory before it is garbage-collected.

    >>> session = gr.InferenceSession(engine)
    >>> session.get_inputs()
    [NodeArg(name='x', type='tensor(float)', shape=[2, 16, 6, 6])]
    >>> (y,) = session.run(["y"], {"x": x})
    """

    def __init__(
        self,
        path_or_bytes: Any,
        sess_options: object = None,
        providers: Sequence[Any] | None = None,
        provider_options: Sequence[Mapping[Any, Any]] | None = None,
        **options: Any,
    ) -> None:
        _no_effect("sess_options", sess_options)
        _no_effect("provider_options", provider_options)
        place = _place(providers)
        self.engine = _engine(path_or_bytes, options)
        self.context: Context = self.engine.context(device=place)

    def __repr__(self) -> str:
        return f"InferenceSession({self.engine!r})"

    def get_inputs(self) -> list[NodeArg]:
        return [NodeArg.of(info) for info in self.engine.inputs]

    def get_outputs(self) -> list[NodeArg]:
        return [NodeArg.of(info) for info in self.engine.outputs]

    def get_overridable_initializers(self) -> list[NodeArg]:
        """Return []: an engine's weights are constants."""
        return []

    def get_providers(self) -> list[str]:
        return [NAMES["emulator" if self.context.emulated else "cuda"]]

    def get_provider_options(self) -> dict[str, dict[str, str]]:
        return {name: {} for name in self.get_providers()}

    def run(
        self, output_names: Sequence[str] | None, input_feed: Mapping[str, Any], run_options: object = None
    ) -> list[np.ndarray]:
        """Run arrays by input name; return NumPy arrays of the named outputs, in that order, or of all for None or an empty
        list. Raises ValueError or TypeError for a wrong name, shape or type.
        """
        _no_effect("run_options", run_options)
        known = [info.name for info in self.engine.outputs]
        if not isinstance(output_names, Sequence | None) or isinstance(output_names, (str, bytes)):
            raise TypeError(f"output_names: expected a list of names or None, got {arrays.kind(output_names)}")
        wanted = list(output_names or known)
        arrays.check_known("output_names", known, wanted)
        found = self.context.run(input_feed)
        if not all(isinstance(a, np.ndarray) for a in found.values()):  # a run does not wait for its outputs on the GPU
            found = {name: a.get() for name, a in found.items()}
            if text := warning(self.context.plan, self.context.nonfinite(), {}, found):
                warn(text)
        return [found[name] for name in wanted]

    def close(self) -> None:
        self.context.close()

    def __del__(self) -> None:
        if "context" in self.__dict__:  # else its construction failed
            self.close()

    def __enter__(self) -> InferenceSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        """Raises AttributeError; for other methods of onnxruntime's class with the alternative."""
        if name in UNSUPPORTED:
            raise AttributeError(f"InferenceSession.{name}: gpu_runtime has no such method: {UNSUPPORTED[name]}")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


def _no_effect(name: str, given: object) -> None:
    if given:
        text = f"{name}: gpu_runtime ignores them; the options of gpu_runtime.build control how a model is built"
        warn(text, UserWarning)


def _place(providers: Sequence[Any] | None) -> str | None:
    """Returns where to run, as Context's `device`. Warns of an unavailable provider, as onnxruntime does."""
    if isinstance(providers, (str, bytes)):
        raise TypeError(f"providers: expected a list of names, got {providers!r}")
    names = [p if isinstance(p, str) else p[0] for p in providers or ()]
    there = {n for n, place in PROVIDERS.items() if place == "emulator" or devices.has_gpu()}
    for name in names:
        if name not in there:
            why = "no GPU is found" if name in PROVIDERS else "it is unknown"
            text = f"providers: {name!r} is not available, {why}; available: {', '.join(sorted(there))}"
            warn(text, UserWarning)
    return next((PROVIDERS[n] for n in names if n in there), "emulator" if names else None)


def _engine(given: Any, options: Mapping[str, Any]) -> Engine:
    """Returns the given engine, or builds one of the given model."""
    if hasattr(given, "read"):
        given = given.read()
    if isinstance(given, Engine):
        engine = given
    elif _is_engine(given):
        engine = load(given)
    else:
        with extras.named():
            from gpu_runtime.pipeline import build
        return build(given, **options)
    if options:
        text = f"{', '.join(options)}: these options are for a build, but the given engine is already built"
        raise TypeError(printable(text))
    return engine


def _is_engine(given: Any) -> bool:
    """Whether the first bytes are an engine's. False for an unreadable file: build reports its fault."""
    try:
        if isinstance(given, (str, os.PathLike)):
            return file_kinds.is_engine(file_kinds.head_of(given))
    except (OSError, ValueError):
        return False
    return isinstance(given, (bytes, bytearray, memoryview)) and file_kinds.is_engine(bytes(given[: file_kinds.HEAD_BYTES]))
