"""onnx's backend interface (see onnx.backend.base): a ModelProto and arrays in, arrays out. `onnx.backend.test` runs on it.

    import onnx
    from tests import onnx_backend
    y, = onnx_backend.prepare(onnx.load("model.onnx"), "CPU").run([x])

"CPU" executes the kernels in the emulator, "CUDA" on this machine's GPU. A model that cannot be built raises unittest.SkipTest
with the reason. In an engine, weights, shapes and bounds are constants. If a model has them as inputs, an engine is built for
each set of their values, when `run` gets them.
"""

import unittest
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, helper, numpy_helper, shape_inference
from onnx.backend.base import BackendRep, namedtupledict

from cuda_kernels import device as devices
from gpu_runtime import pipeline
from gpu_runtime.errors import ModelError
from gpu_runtime.frontend.files.convert import OPSET
from gpu_runtime.lowering.reductions import REDUCE
from gpu_runtime.runtime.context import Context
from gpu_runtime.text import printable

# The inputs of an operator that an engine holds as constants: weights, and whatever decides sizes.
# fmt: off
CONSTANT_INPUTS = {
    "BatchNormalization": (1, 2, 3, 4), "Clip": (1, 2), "ConstantOfShape": (0,), "Conv": (1, 2), "ConvTranspose": (1, 2),
    "CumSum": (1,), "Dropout": (1, 2), "Expand": (1,), "Gather": (1,), "Gemm": (1, 2), "GroupNormalization": (1, 2),
    "InstanceNormalization": (1, 2), "LayerNormalization": (1, 2), "PRelu": (1,), "Pad": (1, 2, 3), "Range": (0, 1, 2),
    "Reshape": (1,), "Resize": (1, 2, 3), "Slice": (1, 2, 3, 4), "Split": (1,), "Squeeze": (1,), "Tile": (1,), "TopK": (1,),
    "Unsqueeze": (1,), "Upsample": (1,),
    **dict.fromkeys(REDUCE, (1,)),
}
# fmt: on


class Prepared(BackendRep):
    """A model that can be run several times, and keeps its engines between runs. `device`: "emulator" or "cuda". For one
    thread."""

    def __init__(self, model: ModelProto, device: str, options: Mapping[str, Any]):
        self._model, self._device, self._options = model, device, dict(options)
        stored = {t.name for t in model.graph.initializer}
        self._inputs = [v.name for v in model.graph.input if v.name not in stored]
        self._constant = _constant_inputs(model)
        self._contexts: dict[tuple[object, ...], Context] = {}
        dims = {v.name: shape for v in model.graph.input if (shape := _static_shape(v)) is not None}
        if not self._constant and len(dims) == len(model.graph.input):
            self._context({name: np.empty(dims[name], np.float32) for name in self._inputs})

    def run(self, inputs: Sequence[Any] | Mapping[str, object], **options: object) -> tuple[Any, ...]:
        """Runs arrays, in the order of the graph's inputs or by name; returns a named tuple of arrays, one for each output.

        Raises SkipTest if the model cannot be built for these inputs, ValueError for inputs that do not fit it.
        """
        if options:
            raise ValueError(printable(f"run: expected no options, got {', '.join(options)}"))
        if not isinstance(inputs, Mapping):
            given = [inputs] if isinstance(inputs, np.ndarray) else list(inputs)
            if len(given) != len(self._inputs):
                raise ValueError(_count_text(self._inputs, len(given)))
            inputs = dict(zip(self._inputs, given, strict=True))
        if set(inputs) != set(self._inputs):
            raise ValueError(f"inputs: expected the names {sorted(self._inputs)}, got {sorted(map(str, inputs))}")
        arrays = {name: np.asarray(a) for name, a in inputs.items()}
        context = self._context(arrays)
        outputs = context.run({info.name: arrays[info.name] for info in context.plan.inputs})
        names = [v.name for v in self._model.graph.output]
        named: Any = namedtupledict("Outputs", names)
        return cast(tuple[Any, ...], named(*(outputs[name] for name in names)))

    def __del__(self) -> None:
        for context in self.__dict__.get("_contexts", {}).values():
            context.close()

    def _context(self, arrays: Mapping[str, np.ndarray]) -> Context:
        """Returns the context of an engine for arrays of these shapes, with the values of the inputs that are constants in
        it."""
        constants = {name: a for name, a in arrays.items() if name in self._constant}
        shapes = {name: a.shape for name, a in arrays.items() if name not in self._constant}
        values = tuple((name, a.dtype.str, a.shape, a.tobytes()) for name, a in sorted(constants.items()))
        key = (values, tuple(sorted(shapes.items())))
        if key not in self._contexts:
            model = _with_constants(self._model, constants)
            # A named device, so that nothing is measured: in the emulator there is nothing to measure.
            target = devices.DEFAULT_DEVICE if self._device == "emulator" else None
            try:
                engine = pipeline.build(model, device=target, shapes=shapes, **self._options)
            except ModelError as e:
                raise unittest.SkipTest(str(e)) from e
            self._contexts[key] = engine.context(device=self._device)
        return self._contexts[key]


def prepare(model: ModelProto, device: str = "CPU", **options: Any) -> Prepared:
    """Returns a model ready for repeated runs; `options`: of gpu_runtime.build. Raises ValueError for an unknown device, and
    SkipTest, here or in `run`, if the model cannot be built.
    """
    if not supports_device(device):
        raise ValueError(f"device: expected CPU or, where there is a GPU, CUDA, got {device!r}")
    return Prepared(model, "emulator" if _kind(device) == "CPU" else "cuda", options)


def run_model(
    model: ModelProto, inputs: Sequence[Any] | Mapping[str, object], device: str = "CPU", **options: Any
) -> tuple[Any, ...]:
    """Prepares a model, runs it once and returns its outputs."""
    return prepare(model, device, **options).run(inputs)


def run_node(
    node: NodeProto,
    inputs: Sequence[Any],
    device: str = "CPU",
    outputs_info: Sequence[tuple[np.typing.DTypeLike, tuple[int, ...]]] | None = None,
    **options: Any,
) -> tuple[Any, ...]:
    """Runs a model of one node and returns its outputs. `inputs`: an array for each input that the node names; `outputs_info`:
    (dtype, shape) of each output, by default as onnx infers them; option `opset_version`: of the node, by default OPSET.
    """
    opset = options.pop("opset_version", OPSET)
    named = [name for name in node.input if name]
    if len(named) != len(inputs):
        raise ValueError(_count_text(named, len(inputs)))
    given = {name: np.asarray(a) for name, a in zip(named, inputs, strict=True)}
    if outputs_info is None:
        outputs = [onnx.ValueInfoProto(name=name) for name in node.output if name]
    else:
        outputs = [_value(name, *info) for name, info in zip(node.output, outputs_info, strict=True)]
    graph = helper.make_graph([node], node.op_type, [_value(n, a.dtype, a.shape) for n, a in given.items()], outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    return run_model(shape_inference.infer_shapes(model), given, device, **options)


def supports_device(device: str) -> bool:
    """Returns whether the device can be used: CPU (the emulator) always, CUDA and CUDA:0 if there is a GPU."""
    return _kind(device) == "CPU" or (device in ("CUDA", "CUDA:0") and devices.has_gpu())


def _count_text(names: Sequence[str], got: int) -> str:
    return printable(f"inputs: expected {len(names)} ({', '.join(names)}), got {got}")


def _kind(device: str) -> str:
    return device.split(":")[0]


def _value(name: str, dtype: np.dtype, shape: tuple[int, ...]) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), shape)


def _static_shape(value: onnx.ValueInfoProto) -> tuple[int, ...] | None:
    t = value.type.tensor_type
    dims = tuple(d.dim_value for d in t.shape.dim if d.HasField("dim_value"))
    return dims if t.HasField("shape") and len(dims) == len(t.shape.dim) else None


def _constant_inputs(model: ModelProto) -> set[str]:
    """Returns the names of the graph's inputs on whose values an engine's constants depend; an empty set if these are all
    inputs.
    """
    decisive: set[str] = set()
    for node in reversed(model.graph.node):
        if node.op_type in ("Shape", "Size"):
            continue
        for i, name in enumerate(node.input):
            if i in CONSTANT_INPUTS.get(node.op_type, ()) or decisive.intersection(node.output):
                decisive.add(name)
    stored = {t.name for t in model.graph.initializer}
    inputs = {v.name for v in model.graph.input} - stored
    return decisive & inputs if inputs - decisive else set()


def _with_constants(model: ModelProto, constants: Mapping[str, np.ndarray]) -> ModelProto:
    """Returns the model with these inputs (name -> array) as initializers."""
    changed = ModelProto()
    changed.CopyFrom(model)
    kept = [v for v in changed.graph.input if v.name not in constants]
    del changed.graph.input[:]
    changed.graph.input.extend(kept)
    changed.graph.initializer.extend(numpy_helper.from_array(a, name) for name, a in constants.items())
    return changed
