"""The forms in which a model may be given: a path, the bytes of a file, an open file, a ModelProto, or a torch module."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias

import onnx
from google.protobuf.message import EncodeError

from gpu_runtime import file_kinds
from gpu_runtime.errors import ModelError
from gpu_runtime.text import printable

if TYPE_CHECKING:
    import torch

MOST_NAME = 100  # characters of a graph's name that name the model
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
    """The name of a network of this model."""
    return source.name if isinstance(source, Source) else source.stem


def sha256_of(source: Path | Source) -> str:
    """The hash of the model's bytes."""
    if isinstance(source, Source):
        return hashlib.sha256(source.data).hexdigest()
    with open(source, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def source_of(model: Any, example_inputs: Sequence[Any] | None = None) -> Path | Source:
    """Turns `model`, in one of the forms EXPECTED, into a path or Source, which can be read repeatedly.

    `example_inputs`: the arguments of a torch module's forward for its export. Raises TypeError, ValueError or ModelError.
    """
    if isinstance(model, Source):
        return model
    if _is_of_torch(model, "nn", "Module"):
        return _exported(model, example_inputs)
    if example_inputs is not None:
        raise ValueError(f"example_inputs: only a torch.nn.Module needs them, got a {type(model).__name__} as model")
    if _is_of_torch(model, "export", "ExportedProgram"):
        return _converted("ExportedProgram", model)
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
    """Whether it is an instance of torch's class, without importing torch: such an instance's module has imported it."""
    found = getattr(getattr(sys.modules.get("torch"), package, None), kind, None)
    return found is not None and isinstance(model, found)


def _exported(module: Any, example_inputs: Sequence[Any] | None) -> Source:
    """Exports the module by torch.onnx.export; inputs have the names of forward's arguments."""
    import torch

    name = type(module).__name__
    if example_inputs is None or isinstance(example_inputs, torch.Tensor):
        raise ValueError(
            f"example_inputs: expected the tuple of arguments of {name}.forward, as torch.onnx.export takes it, "
            f"got {'none' if example_inputs is None else 'a tensor'}: build({name.lower()}, example_inputs=(x,))"
        )
    was = module.training
    try:
        return _converted(name, module.eval(), tuple(example_inputs))
    finally:
        module.train(was)


def _converted(name: str, *given: Any) -> Source:
    """Exports a module and its arguments, or an exported program, by torch.onnx.export."""
    import torch

    try:
        program = torch.onnx.export(*given, dynamo=True, verbose=False)
    except Exception as e:  # whatever the exporter or the module's own code raises
        raise ModelError(f"{name}: torch.onnx.export cannot export it: {type(e).__name__}: {e}") from e
    return _serialized(program.model_proto, name)
