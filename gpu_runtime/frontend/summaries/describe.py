"""Describes an ONNX file: opset, inputs, operators, weights, and the unsupported nodes."""

import math
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import onnx

from gpu_runtime.errors import ModelError
from gpu_runtime.frontend import importer
from gpu_runtime.frontend.files import check, load, quantized
from gpu_runtime.frontend.summaries import pattern
from gpu_runtime.text import sizes_option
from tactics.problems.operators import OPERATORS


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The description of an ONNX file.

    `inputs`, `outputs`: name, type and shape as declared; `operators`: type -> count, the most frequent first; `unsupported`:
    the nodes that nothing here can run. `layers`: their number after fusion, for the sizes `shapes` of open dimensions; 0 and a
    `problem` where it cannot be built. `sparsity`: the conclusion of `inspect-sparsity`.
    """

    file: str
    nbytes: int
    producer: str
    ir_version: int
    opsets: Mapping[str, int]
    inputs: tuple[tuple[str, str, str], ...]
    outputs: tuple[tuple[str, str, str], ...]
    operators: Mapping[str, int]
    initializers: int
    weights: int
    weight_types: tuple[str, ...]
    sparsity: str
    unsupported: tuple[str, ...]
    shapes: Mapping[str, tuple[int, ...]]
    layers: int = 0
    problem: str = ""

    @property
    def command(self) -> str:
        """The shell command that builds an engine of the model."""
        sizes = [f"--shapes={sizes_option(self.shapes)}"] if self.shapes else []
        return shlex.join(["build-engine", self.file, "-o", f"{Path(self.file).stem}.engine", *sizes])


def describe(path: Path) -> ModelInfo:
    """Reads and describes the model, without trying to build it. Raises ModelError for a file that is no ONNX model."""
    with load.named(path):
        proto = load.load_whole(path)
        check.check_texts(proto.graph)
        graph, weights = proto.graph, [t for _, t in load.stored_tensors(proto.graph)]
        return ModelInfo(
            str(path),
            path.stat().st_size,
            f"{proto.producer_name} {proto.producer_version}".strip(),
            proto.ir_version,
            {o.domain or "ai.onnx": o.version for o in proto.opset_import},
            _values(load.inputs_of(graph)),
            _values(graph.output),
            dict(Counter(node.op_type for node in graph.node).most_common()),
            len(graph.initializer),
            sum(math.prod(t.dims) for t in weights),
            tuple(sorted({_type(t.data_type) for t in weights})),
            _sparsity(path),
            _missing(proto),
            importer.example_shapes(graph),
        )


def _missing(proto: onnx.ModelProto) -> tuple[str, ...]:
    """Returns the titles of nodes without a kernel. Operators of integers that are spelled otherwise have one; `proto` is used
    up.
    """
    with suppress(ModelError):  # the model's problem is found again
        quantized.spell(proto)
    return tuple(load.title(node) for node in check.unsupported(proto, OPERATORS))


def _sparsity(path: Path) -> str:
    try:
        return pattern.summary(pattern.inspect(path))
    except ModelError as e:
        return f"unknown: {str(e).removeprefix(f'{path}: ')}"


def _type(t: int) -> str:
    """Returns NumPy's name of an ONNX element type."""
    return {"float": "float32", "double": "float64"}.get(name := load.type_name(t).lower(), name)


def _values(values: Iterable[onnx.ValueInfoProto]) -> tuple[tuple[str, str, str], ...]:
    found = []
    for v in values:
        t = v.type.tensor_type
        dims = [str(d.dim_value) if d.HasField("dim_value") else d.dim_param or "?" for d in t.shape.dim]
        shape = "x".join(dims) or "scalar" if t.HasField("shape") else "of any rank"
        found.append((v.name, _type(t.elem_type) if t.elem_type else "no tensor", shape))
    return tuple(found)
