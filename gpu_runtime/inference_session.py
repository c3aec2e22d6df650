"""onnxruntime's InferenceSession, as far as scripts that run a model need it, on an engine of gpu_runtime.

    import gpu_runtime as gr
    session = gr.InferenceSession("model.onnx", sparsity="enable")  # or an engine's path
    (logits,) = session.run(["logits"], {"x": x})

Differences: an engine has fixed sizes, so a model whose sizes are open gets an engine for each size, when a run first brings
it; session and run options have no effect, with a warning; other methods of onnxruntime are refused, with the alternative.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np

from cuda_kernels import device as devices
from cuda_kernels import extras
from gpu_runtime import file_kinds
from gpu_runtime.building.options import BuildOptions
from gpu_runtime.engine import Engine, load
from gpu_runtime.errors import check_options
from gpu_runtime.progress import warn
from gpu_runtime.runtime import arrays
from gpu_runtime.runtime.context import Context
from gpu_runtime.runtime.fields import Batch, TensorSpec
from gpu_runtime.runtime.steps import warning
from gpu_runtime.sessions.io_binding import IOBinding
from gpu_runtime.sessions.open_sizes import ModelMetadata, NodeArg, Opened, OpenSizes, Signature
from gpu_runtime.text import printable

ORT_TYPES = {"float32": "tensor(float)"}  # exceptions from tensor(NumPy's name)
# onnxruntime's providers -> our devices.
PROVIDERS = {"TensorrtExecutionProvider": "cuda", "CUDAExecutionProvider": "cuda", "CPUExecutionProvider": "emulator"}
NAMES = {"cuda": "CUDAExecutionProvider", "emulator": "CPUExecutionProvider"}
ON_GPU = "session.io_binding() binds memory on the GPU; session.context.run takes arrays there, and out= for outputs"
MOST_ENGINES = 8  # that a session keeps of a model whose sizes are open
# Methods that onnxruntime's class has and this one lacks -> the alternative.
UNSUPPORTED = {
    "run_with_ort_values": ON_GPU,
    "run_with_ortvaluevector": ON_GPU,
    "create_ortvalue_from_shape_and_type": ON_GPU,
    "run_async": "session.context.run_async returns a future",
    "get_session_options": "a session has no options",
    "set_providers": "make another session",
    **dict.fromkeys(("enable_fallback", "disable_fallback"), "a run that fails raises, and no other provider runs instead"),
    "end_profiling": "session.context.profile measures layers on a GPU",
    "get_profiling_start_time_ns": "session.context.profile measures layers on a GPU",
}


def type_text(dtype: np.dtype[Any]) -> str:
    """onnxruntime's name of a type."""
    return ORT_TYPES.get(dtype.name, f"tensor({dtype.name})")


def _args(specs: Sequence[TensorSpec]) -> list[NodeArg]:
    """Describes an engine's inputs or outputs."""

    def shape(info: TensorSpec) -> list[int | str | None]:
        return ["batch" if isinstance(n, Batch) else n for n in info.shape]

    return [NodeArg(info.name, type_text(info.dtype), shape(info)) for info in specs]


class InferenceSession:
    """A session that runs a model or an engine, with onnxruntime's methods.

    `path_or_bytes`: an ONNX model or an engine, as a path, as bytes or in another form that gpu_runtime.load and build take, or
    an Engine. A model is built first, with `options` of gpu_runtime.build. `providers`: onnxruntime's names; CUDA's and
    TensorRT's run on the GPU, the CPU's in the emulator, which is exact and slow; the first available one counts, None means
    all. Close it, or use it in a `with`, to free memory before it is garbage-collected.

    A model with open sizes, for which `options` have no `shapes`, is built for each size when a run first brings it: that run
    waits, as long as `optimization_level` lets a build on a GPU take, and threads that bring one size wait for one build.
    `prepare` builds announced sizes in a thread. The last `most_engines` (8) engines are kept; those with equal weights share
    them on the device. The model's file is read at each build, so it must stay.

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
        check_options("InferenceSession", options, {"most_engines", *BuildOptions.__dataclass_fields__})
        _no_effect("sess_options", sess_options)
        _no_effect("provider_options", provider_options)
        place = _place(providers)
        self._emulated = place == "emulator" or place is None and not devices.has_gpu()
        self._declared, opened = _opened(path_or_bytes, place, options)
        self._sizes = opened if isinstance(opened, OpenSizes) else None
        self._last = opened if isinstance(opened, Opened) else None  # the engine of the last run

    @property
    def engine(self) -> Engine:
        """The engine; of a model with open sizes the one of the last run."""
        return self._of_last_run().engine

    @property
    def context(self) -> Context:
        """The context of `engine`."""
        return self._of_last_run().context

    @property
    def engines(self) -> list[Engine]:
        """All engines that are kept, the one used longest ago first."""
        return [self.engine] if self._sizes is None else [opened.engine for opened in self._sizes.kept()]

    def __repr__(self) -> str:
        return f"InferenceSession({', '.join(map(repr, self.engines))})"

    def get_inputs(self) -> list[NodeArg]:
        return [*self._declared.inputs]

    def get_outputs(self) -> list[NodeArg]:
        return [*self._declared.outputs]

    def get_overridable_initializers(self) -> list[NodeArg]:
        """Return []: an engine's weights are constants."""
        return []

    def get_modelmeta(self) -> ModelMetadata:
        """The model's metadata; of an engine, whose file has no other, its graph_name."""
        return self._declared.metadata

    def get_providers(self) -> list[str]:
        return [NAMES["emulator" if self._emulated else "cuda"]]

    def get_provider_options(self) -> dict[str, dict[str, str]]:
        return {name: {} for name in self.get_providers()}

    def prepare(self, *sizes: Mapping[str, Sequence[int]]) -> Future[None]:
        """Build, in a thread, the engines of a model with open sizes for these shapes of its inputs, in this order. The future
        ends with the last, with the error of a size that cannot be built. Raises ValueError for wrong names, or more sizes
        than engines are kept.
        """
        if self._sizes is None:
            raise ValueError("prepare: the engine has fixed sizes: make an InferenceSession of a model whose sizes are open")
        for shapes in sizes:
            arrays.check_names(self._declared.inputs, shapes)
        return self._sizes.ahead(sizes)

    def run(
        self, output_names: Sequence[str] | None, input_feed: Mapping[str, Any], run_options: object = None
    ) -> list[np.ndarray]:
        """Run arrays by input name; return NumPy arrays of the named outputs, in that order, or of all for None or an empty
        list. Raises ValueError or TypeError for a wrong name, shape or type.
        """
        _no_effect("run_options", run_options)
        known = [info.name for info in self._declared.outputs]
        if not isinstance(output_names, Sequence | None) or isinstance(output_names, (str, bytes)):
            raise TypeError(f"output_names: expected a list of names or None, got {arrays.kind(output_names)}")
        wanted = list(output_names or known)
        arrays.check_known("output_names", known, wanted)
        context = self._at(input_feed).context
        found = context.run(input_feed)
        if not all(isinstance(a, np.ndarray) for a in found.values()):  # a run does not wait for its outputs on the GPU
            found = {name: a.get() for name, a in found.items()}
            if text := warning(context.plan, context.nonfinite(), {}, found):
                warn(text)
        return [found[name] for name in wanted]

    def io_binding(self) -> IOBinding:
        """An IOBinding for `run_with_iobinding`: inputs and outputs at addresses on the host, or on the GPU, as CuPy's."""

        def run(inputs: Mapping[str, Any], out: Mapping[str, Any]) -> tuple[Mapping[str, Any], Any]:
            context = self._at(inputs).context
            return context.run(inputs, out=out), getattr(context.gpu, "cupy", None)

        return IOBinding(self._declared, run, self._emulated)

    def run_with_iobinding(self, iobinding: IOBinding, run_options: object = None) -> None:
        """Run the bound inputs, and wait for the end."""
        _no_effect("run_options", run_options)
        if not isinstance(iobinding, IOBinding):
            raise TypeError(f"iobinding: expected an IOBinding of session.io_binding(), got {arrays.kind(iobinding)}")
        iobinding.run()

    def _at(self, feed: Mapping[str, Any]) -> Opened:
        """Returns the engine for these inputs, built now if their sizes are new. Names and types are checked first."""
        if self._sizes is None:
            return self._of_last_run()
        arrays.check_names(self._declared.inputs, feed)
        shapes = {}
        for info in self._declared.inputs:
            array = feed[info.name]
            if (shape := arrays.shape_of(array)) is None:
                raise TypeError(printable(f"input {info.name!r}: expected an array with a shape, got {arrays.kind(array)}"))
            if isinstance(array, np.ndarray) and type_text(array.dtype) != info.type:
                raise ValueError(printable(f"input {info.name!r}: expected {info.type}, got {type_text(array.dtype)}"))
            shapes[info.name] = shape
        self._last = opened = self._sizes.at(shapes)
        return opened

    def _of_last_run(self) -> Opened:
        if self._last is None:
            raise ValueError("there is no engine yet: the first run of a model with open sizes builds one")
        return self._last

    def close(self) -> None:
        if self._sizes is not None:
            self._sizes.close()
        if self._last is not None:
            self._last.context.close()

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


def _opened(given: Any, place: str | None, options: dict[str, Any]) -> tuple[Signature, Opened | OpenSizes]:
    """Returns (signature, engine): the engine as given, or built from a model; engines for any size (OpenSizes) for a model of
    open sizes.
    """
    if hasattr(given, "read"):
        given = given.read()
    if not isinstance(given, Engine) and not _is_engine(given):
        return _built(given, place, options)
    if options:
        text = f"{', '.join(options)}: these options are for a build, but the given engine is already built"
        raise TypeError(printable(text))
    engine = given if isinstance(given, Engine) else load(given)
    metadata = ModelMetadata(engine.record.model.name)
    return Signature(_args(engine.inputs), _args(engine.outputs), metadata), Opened(engine, place)


def _built(model: Any, place: str | None, options: dict[str, Any]) -> tuple[Signature, Opened | OpenSizes]:
    """Builds a model; returns (its signature, the engine), with OpenSizes in the engine's place if sizes are open and no option
    gives them.
    """
    most = options.pop("most_engines", MOST_ENGINES)
    if type(most) is not int or most < 1:
        raise ValueError(f"most_engines: expected a whole number of at least 1, got {most!r}")
    with extras.named():
        from gpu_runtime.sessions.model_builds import builds
    found, build = builds(model, options)
    shapes = options.get("shapes")
    if found.is_open and shapes is None:
        return found, OpenSizes(build, place, most)
    engine = build(shapes)
    return replace(found, inputs=_args(engine.inputs), outputs=_args(engine.outputs)), Opened(engine, place)


def _is_engine(given: Any) -> bool:
    """Whether the first bytes are an engine's. False for an unreadable file: build reports its fault."""
    try:
        if isinstance(given, (str, os.PathLike)):
            return file_kinds.is_engine(file_kinds.head_of(given))
    except (OSError, ValueError):
        return False
    return isinstance(given, (bytes, bytearray, memoryview)) and file_kinds.is_engine(bytes(given[: file_kinds.HEAD_BYTES]))
