"""The forms in which a model may be given: a path, the bytes of a file, an open file, a ModelProto, or a torch module."""

from __future__ import annotations

import hashlib
import inspect
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias

import onnx
from google.protobuf.message import EncodeError

from gpu_runtime import file_kinds
from gpu_runtime.errors import ModelError
from gpu_runtime.progress import Listener, Progress, ignore
from gpu_runtime.text import printable

if TYPE_CHECKING:
    import torch

NAME = "gpu_runtime.name"  # the key, in an exported graph_module's meta, of the module's name, which torch.export drops
# torch's wrapper -> its attribute with the wrapped module
WRAPPERS = {"DataParallel": "module", "DistributedDataParallel": "module", "OptimizedModule": "_orig_mod"}
MOST_NAME = 100  # the most characters of a graph's name that become the model's name
EXPECTED = (
    "a model: the path of an ONNX file, its bytes, a file opened for reading bytes, an onnx.ModelProto, a torch.nn.Module or a "
    "torch.export.ExportedProgram"
)


ModelLike: TypeAlias = (
    "str | os.PathLike[str] | bytes | BinaryIO | onnx.ModelProto | torch.nn.Module | torch.export.ExportedProgram"
)


@dataclass(frozen=True, slots=True)
class Source:
    """A model in memory: the bytes of its ModelProto, and its name in messages."""

    name: str
    data: bytes

    def __str__(self) -> str:
        return self.name


def stem_of(source: Path | Source) -> str:
    """Returns the name of the network in this model: the Source's name, or the file's name without its suffix."""
    return source.name if isinstance(source, Source) else source.stem


def sha256_of(source: Path | Source) -> str:
    """Returns the SHA-256 of the model's bytes in hexadecimal."""
    if isinstance(source, Source):
        return hashlib.sha256(source.data).hexdigest()
    with open(source, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


Sizes: TypeAlias = Mapping[str, Sequence[Any]]  # input -> a shape, or several shapes


@dataclass(frozen=True, slots=True)
class Examples:
    """The options with which a torch module is exported.

    `inputs`: arguments of its forward, for tracing; `sizes`: input -> further shapes, or several such mappings: an axis whose
    size differs there from the argument's stays open in the model; `batches`: all first axes stay open; `as_written`: nothing
    is folded, so that parameters and buffers keep their names and values.
    """

    inputs: Sequence[Any] | None = None
    sizes: Sizes | Sequence[Sizes] | None = None
    batches: bool = False
    as_written: bool = False

    def open_axes(self, name: str, shape: Sequence[int]) -> list[int]:
        """Returns the axes of input `name` that stay open; `shape`: of its example."""
        given = (self.sizes,) if isinstance(self.sizes, Mapping) else self.sizes or ()
        several = [s if s and isinstance(s[0], Sequence) else (s,) for sizes in given if (s := sizes.get(name))]
        found = {i for shapes in several for s in shapes for i, (n, was) in enumerate(zip(s, shape, strict=False)) if n != was}
        return sorted(found | ({0} if self.batches and shape else set()))


def _unwrapped(module: Any) -> Any:
    """Returns the module inside torch's wrappers; a wrapper's forward has no names for the arguments."""
    while type(module).__module__.startswith("torch.") and (held := WRAPPERS.get(type(module).__name__)):
        module = getattr(module, held)
    return module


def source_of(model: Any, examples: Examples | None = None, progress: Listener = ignore) -> Path | Source:
    """Returns a model, given in one of the forms in EXPECTED, as a path or a Source, which can be read more than once.

    `examples`: for the export of a torch module. Raises TypeError, ValueError or ModelError.
    """
    if isinstance(model, Source):
        return model
    examples = examples or Examples()
    if _is_of_torch(model, "nn", "Module"):
        model = _unwrapped(model)
        progress(Progress("export", type(model).__name__))
        return _exported(model, examples)
    if examples.inputs is not None:
        raise ValueError(f"example_inputs: only a torch.nn.Module needs them, got a {type(model).__name__} as model")
    if _is_of_torch(model, "export", "ExportedProgram"):
        name = model.graph_module.meta.get(NAME, "ExportedProgram")
        progress(Progress("export", name))
        return _converted(name, model)
    if isinstance(model, (str, os.PathLike)):
        if not os.fspath(model):
            raise ModelError("expected the path of an ONNX model, got an empty one")
        return Path(model)
    if isinstance(model, onnx.ModelProto):
        return _serialized(model, printable(model.graph.name)[:MOST_NAME] or "model")
    return Source("model", file_kinds.in_memory(model, EXPECTED))


def _serialized(model: onnx.ModelProto, name: str) -> Source:
    try:
        return Source(name, model.SerializeToString())
    except (EncodeError, ValueError) as e:  # above 2 GiB, which protobuf cannot write
        raise ModelError(f"{name}: expected less than 2 GiB, or the path of a file with external data: {e}") from None


def _is_of_torch(model: object, package: str, kind: str) -> bool:
    """Returns whether `model` is an instance of torch.`package`.`kind`, without an import of torch: if it is one, torch is
    imported already.
    """
    found = getattr(getattr(sys.modules.get("torch"), package, None), kind, None)
    return found is not None and isinstance(model, found)


def _exported(module: Any, examples: Examples) -> Source:
    """Returns the module, exported by torch.onnx.export; its inputs have the names of forward's arguments."""
    import torch

    name = type(module).__name__
    if examples.inputs is None or isinstance(examples.inputs, torch.Tensor):
        raise ValueError(
            f"example_inputs: expected the tuple of arguments of {name}.forward, as torch.onnx.export takes it, "
            f"got {'none' if examples.inputs is None else 'a tensor'}: give example_inputs=(x,)"
        )
    given, options = _opened(torch, module, examples)
    was = module.training
    try:
        return _converted(name, module.eval(), given, optimize=not examples.as_written, **options)
    finally:
        module.train(was)


def _opened(torch: Any, module: Any, examples: Examples) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns (the arguments, the options that keep sizes open) for torch.onnx.export. An example's open size of 1 becomes 2,
    since torch.export would make it fixed.
    """
    given, dynamic = list(examples.inputs or ()), list[Any]()
    if not (examples.sizes or examples.batches):
        return tuple(given), {}
    for i, (argument, a) in enumerate(zip(_arguments(module, len(given)), given, strict=True)):
        axes = examples.open_axes(argument, a.shape) if isinstance(a, torch.Tensor) else []
        for axis in axes:
            if a.shape[axis] == 1:
                given[i] = torch.cat((given[i], given[i]), axis)
        dynamic.append(dict.fromkeys(axes, torch.export.Dim.DYNAMIC) if axes else None)
    return tuple(given), {"dynamic_shapes": tuple(dynamic)} if any(dynamic) else {}


def _arguments(module: Any, count: int) -> list[str]:
    """Returns the names of the first `count` arguments of a module's forward; "" for an argument that belongs to `*args`."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [p.name for p in inspect.signature(module.forward).parameters.values() if p.kind in kinds][:count]
    return names + [""] * (count - len(names))


def _converted(name: str, *given: Any, **options: Any) -> Source:
    """Returns torch.onnx.export(*given, **options) as a Source; `given`: a module and its arguments, or an exported program."""
    import torch

    try:
        program = torch.onnx.export(*given, dynamo=True, verbose=False, **options)
    except Exception as e:  # whatever the exporter or the module's own code raises; the exporter wraps the cause in advice
        cause = e.__cause__ or e
        raise ModelError(f"{name}: torch.onnx.export cannot export it: {type(cause).__name__}: {cause}") from e
    return _serialized(program.model_proto, name)
