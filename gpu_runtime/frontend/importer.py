"""Imports an ONNX file as a clean onnx-ir graph: one opset, static shapes, FP32 constants, constants folded.

Steps: load; check in Python (onnx's C++ converter may abort on broken graphs); prune the stored weights, if asked; fix the
input sizes; convert to one opset; make all floating-point tensors FP32 (constants are rounded to FP16 once, after they are
folded); fold constants; infer shapes. Each fault of a model is a ModelError.
"""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO

import numpy as np
import onnx
import onnx_ir as ir
from onnx import TensorProto

from cuda_kernels import files
from gpu_runtime.errors import ModelError
from gpu_runtime.frontend import control_flow
from gpu_runtime.frontend.clean import clean
from gpu_runtime.frontend.files import check, quantized
from gpu_runtime.frontend.files.convert import convert, spell_out_group_norms, spell_out_padding
from gpu_runtime.frontend.files.load import (
    MOST_DIMS,
    copied,
    drop_texts,
    load_whole,
    named,
    read_by,
    set_aside,
    type_name,
    with_weights,
)
from gpu_runtime.frontend.files.source import Source, stem_of
from gpu_runtime.frontend.files.weights import name_layers, prune_weights, stored_by_layer
from gpu_runtime.progress import warn
from gpu_runtime.stored_pattern import Stored, together
from gpu_runtime.text import several, suggest
from tactics.problems.library_problem import EXACT, PIXELS
from tactics.problems.operators import OPERATORS

READ_PIXELS = ("Cast", quantized.DEQUANTIZE)  # the operators that may read an input of uint8


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model that was read, checked and pruned; its inputs may still have open sizes. `source`: its path or name, for
    messages; `proto`: the model without its `large` initializers, which must not be changed.

    `pruned`: the initializers that were changed to 2:4; `before`: their pattern before, all together; `not_pruned`:
    (initializer, reason) of weights that cannot be 2:4. `stored`: node -> the pattern of its weights in the file, after
    pruning. `dtypes`: input or output of the network -> its declared type, "fp32", "fp16" or one of EXACT; an input may also be
    "uint8", whose values are FP32 in the graph. `open_axes`: input -> the axes whose sizes the file leaves open. `maskable`:
    inputs that may hold -infinity. `onnx_names`: node -> its name in the file, if that differs (see weights.name_layers).
    """

    source: Path | Source
    proto: onnx.ModelProto
    large: Mapping[str, TensorProto]
    dtypes: Mapping[str, str]
    pruned: tuple[str, ...]
    not_pruned: tuple[tuple[str, str], ...]
    before: Stored | None
    stored: Mapping[str, Stored]
    open_axes: Mapping[str, tuple[int, ...]]
    maskable: frozenset[str]
    onnx_names: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Imported:
    """A `loaded` model at given sizes. `model`: the clean graph, in FP32; `name`: of the network."""

    model: ir.Model
    name: str
    loaded: Loaded


def load(
    source: str | os.PathLike | Source,
    *,
    prune: bool = False,
    masks: Mapping[str, np.ndarray] = MappingProxyType({}),
    save_pruned: str | os.PathLike | BinaryIO | None = None,
) -> Loaded:
    """Returns the model at a path or in a Source, checked.

    With `prune`, the two smallest of each four consecutive input channels of the stored weights become zero; before that,
    weights become zero where the mask of their node in `masks`, bool [K, C/g, R, S], is false. `save_pruned` (a path, or a
    binary file) gets the pruned model as ONNX, otherwise unchanged. Raises ModelError, and OSError if `save_pruned` cannot be
    written.
    """
    source = source if isinstance(source, Source) else Path(source)
    if save_pruned is not None and not prune:
        raise ValueError("save_pruned is given without prune: there is no pruned model to save")
    with named(source):
        proto = load_whole(source)
        whole = None if save_pruned is None else copied(proto)
        names = _check(proto, isinstance(source, Path))
        pruned, not_pruned = prune_weights(proto.graph, masks) if prune else ({}, ())
        data = b"" if whole is None else with_weights(whole, proto)
        loaded = _loaded(source, proto, pruned, not_pruned, names)
    if save_pruned is not None:
        save(save_pruned, data)
    return loaded


def _loaded(
    source: Path | Source,
    proto: onnx.ModelProto,
    pruned: Mapping[str, Stored],
    not_pruned: tuple[tuple[str, str], ...],
    names: Mapping[str, str],
) -> Loaded:
    """Returns a checked model as a Loaded; `proto` is changed and must not be used again. `pruned`, `not_pruned`: as
    prune_weights returns them; `names`: as name_layers does.
    """
    dtypes = _dtypes(proto.graph)
    axes = {v.name: _declared(v).open_axes for v in proto.graph.input}
    stored, readers = stored_by_layer(proto.graph, pruned), check.readers_of(proto.graph)
    maskable = frozenset(v.name for v in proto.graph.input if not check.offender(v.name, readers))
    small, large = set_aside(proto)
    before = together(pruned.values())
    return Loaded(source, small, large, dtypes, tuple(pruned), not_pruned, before, stored, axes, maskable, names)


def sized(loaded: Loaded, shapes: Mapping[str, tuple[int, ...]] | None = None) -> Imported:
    """Returns a loaded model as a clean graph at given sizes. Raises ModelError.

    `shapes`: input -> shape, as {"x": (1, 3, 224, 224)}, for inputs with open sizes. For an input without a shape, an open
    batch becomes 1, with a warning; other open sizes are an error.
    """
    sizes = _sizes(shapes or {})
    with named(loaded.source):
        return _sized(loaded, sizes)


def at_batch(loaded: Loaded, shapes: Mapping[str, tuple[int, ...]], batch: int) -> dict[str, tuple[int, ...]]:
    """Returns input -> shape: `shapes` and the declared sizes, with the dynamic first size that most inputs share set to
    `batch`.

    Raises ModelError if no input has a dynamic first size, unless the first input's fixed first size is `batch`.
    """
    declared = {v.name: _declared(v).dims or () for v in loaded.proto.graph.input if v.name not in loaded.large}
    firsts = [dims[0] for name, dims in declared.items() if 0 in loaded.open_axes[name]]
    if not firsts and next(iter(declared.values()), ())[:1] == (batch,):
        return dict(_sizes(shapes))
    if not firsts:
        listed = ", ".join(f"{name!r} ({'x'.join(map(str, dims)) or 'unknown'})" for name, dims in declared.items())
        text = f"{loaded.source}: expected a dynamic batch, but the model fixes the first size of input {listed}"
        raise ModelError(f"{text}: export it with a dynamic first axis, or plan it without other batches")
    shared, found = max(firsts, key=firsts.count), dict(_sizes(shapes))
    for name, dims in declared.items():
        chosen = found.get(name, dims)
        if dims and dims[0] == shared:
            chosen = (batch, *chosen[1:])
        if chosen and all(isinstance(d, int) for d in chosen):
            found[name] = tuple(d for d in chosen if isinstance(d, int))
    return found


def _sized(loaded: Loaded, sizes: Mapping[str, tuple[int, ...]]) -> Imported:
    proto = copied(loaded.proto)
    _fix_inputs([v for v in proto.graph.input if v.name not in loaded.large], sizes)
    del proto.graph.value_info[:]
    check.check_schema(proto)
    spell_out_padding(proto.graph)
    if control_flow.flatten(proto):
        return _sized(_flat(loaded, proto), {})
    check.check_sizes(proto)
    return Imported(clean(convert(proto), loaded.large), stem_of(loaded.source), loaded)


def _flat(loaded: Loaded, proto: onnx.ModelProto) -> Loaded:
    """Returns `proto`, the model of `loaded` after control_flow.flatten, as a Loaded, with the same checks as a file's
    model."""
    names = {name: loaded.onnx_names.get(own, own) for name, own in _check(proto, isinstance(loaded.source, Path)).items()}
    flat = _loaded(loaded.source, proto, {}, loaded.not_pruned, {**loaded.onnx_names, **names})
    return replace(flat, pruned=loaded.pruned, before=loaded.before, stored={**flat.stored, **loaded.stored})


def read(source: str | os.PathLike | Source, *, shapes: Mapping[str, tuple[int, ...]] | None = None) -> Imported:
    """Returns the clean graph of the model at a path or in a Source, as `load` and `sized` do."""
    return sized(load(source), shapes)


def of_proto(proto: onnx.ModelProto, name: str, shapes: Mapping[str, tuple[int, ...]]) -> Imported:
    """Returns a model in memory as a clean graph; `proto` is changed. `name`: for messages; `shapes`: see sized. Raises
    ModelError.
    """
    names = _check(proto, False)
    return _sized(_loaded(Source(name, b""), proto, {}, (), names), shapes)


def _check(proto: onnx.ModelProto, from_file: bool) -> dict[str, str]:
    """Checks a model, removes its texts and names its nodes, in place; returns node's name -> its name in the file, if that
    differs.

    Raises ModelError. `from_file`: the model is a file, so cures may have commands that read it.
    """
    check.check_graph(proto.graph)
    quantized.spell(proto)
    check.check_ops(proto, OPERATORS, from_file)
    check.check_values(proto.graph)
    quantized.check(proto.graph)
    spell_out_group_norms(proto)
    names = name_layers(proto.graph)
    drop_texts(proto)
    return names


def _sizes(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    if not isinstance(shapes, Mapping):
        raise ValueError(f'shapes: expected a mapping of input names to sizes, {{"x": (1, 3, 224, 224)}}, got {shapes!r}')
    sizes = {name: tuple(np.atleast_1d(dims).tolist()) for name, dims in shapes.items()}
    if bad := [(name, dims) for name, dims in sizes.items() if any(type(d) is not int for d in dims)]:
        raise ValueError(f"shapes: expected whole numbers for each input, got {bad[0][1]} for {bad[0][0]!r}")
    return sizes


def check_target(target: str | os.PathLike | BinaryIO | None) -> None:
    """Raises OSError if `target` is a path to which `save` surely cannot write; None: nothing is to be saved."""
    if target is not None and not hasattr(target, "write") and (problem := files.fault(target)):
        raise OSError(errno.EINVAL, problem, os.fspath(target))


def save(target: str | os.PathLike | BinaryIO, data: bytes) -> None:
    """Writes `data` to a binary file object, or to a path."""
    if hasattr(target, "write"):
        target.write(data)
    else:
        files.write_all({target: data})


def _dtypes(graph: onnx.GraphProto) -> dict[str, str]:
    found: dict[str, str] = {}
    types = check.FLOATS | {TensorProto.DataType.Value(name.upper()): name for name in EXACT}
    uncast = {name for node in graph.node if node.op_type not in READ_PIXELS for name in read_by(node)}
    uncast |= {v.name for v in graph.output}
    for kind, values in (("input", graph.input), ("output", graph.output)):
        for v in values:
            t = v.type.tensor_type.elem_type
            dtype = types.get(t)
            if dtype is None or dtype in ("bf16", "fp64") or ((kind, dtype) == ("input", PIXELS) and v.name in uncast):
                got = type_name(t).lower() if t else "no tensor type"
                readers = " or ".join(READ_PIXELS)
                raise ModelError(
                    f"{kind} {v.name!r}: expected float32, float16 or {', '.join(EXACT)} (of inputs where only {readers} reads "
                    f"it), got {got}: cast it outside the model"
                )
            found[v.name] = dtype
    return found


def check_shapes(inputs: Sequence[onnx.ValueInfoProto], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises ModelError if `shapes` names an unknown input, or has a shape that contradicts an input's declared one."""
    given, names = _sizes(shapes), [v.name for v in inputs]
    if unknown := [n for n in given if n not in names]:
        raise ModelError(
            f"a shape is given for {unknown[0]!r}, but the inputs are {', '.join(map(repr, names))}{suggest(unknown, names)}"
        )
    for v in inputs:
        if v.name in given:
            _fixed(v.name, _declared(v), given[v.name])


def _fix_inputs(inputs: Sequence[onnx.ValueInfoProto], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Gives every input its static shape, in place. Without a given shape, an input whose batch is its only open size gets the
    batch 1, with a warning. Raises ModelError.
    """
    check_shapes(inputs, shapes)
    missing, batches = [], []
    for v in inputs:
        declared = _declared(v)
        chosen = shapes.get(v.name)
        if chosen is None and declared.only_batch_is_open:
            batches.append((v.name, declared))
            chosen = (1, *map(int, (declared.dims or ())[1:]))
        elif chosen is None and not declared.is_static:
            missing.append((v.name, declared))
            continue
        shape = _fixed(v.name, declared, chosen)
        v.type.tensor_type.ClearField("shape")
        v.type.tensor_type.shape.SetInParent()  # a scalar has a shape too
        for size in shape:
            v.type.tensor_type.shape.dim.add().dim_value = size
    if missing:
        listed = ", ".join(f"{name!r} ({declared.text})" for name, declared in missing)
        cure = ",".join(f"{name}:{declared.example}" for name, declared in missing)
        raise ModelError(f"the size of input {listed} is dynamic: give it, for example --shapes={cure}")
    if batches:
        warn(_batches_text(batches), UserWarning)


def _batches_text(batches: Iterable[tuple[str, _Declared]]) -> str:
    """Returns the warning that the batch of these inputs is taken as 1, with the option for another batch."""
    listed = ", ".join(f"{name!r} ({declared.text})" for name, declared in batches)
    other = ",".join(f"{name}:{'x'.join(map(str, (8, *(declared.dims or ())[1:])))}" for name, declared in batches)
    return f"the batch of input {listed} is dynamic and set to 1; for another batch give --shapes={other}"


def example_shapes(graph: onnx.GraphProto) -> dict[str, tuple[int, ...]]:
    """Returns input -> example shape, for errors that suggest one, for inputs whose open sizes must be given: usual values.

    Inputs without a declared rank are left out.
    """
    stored = {t.name for t in graph.initializer}
    declared = {v.name: _declared(v) for v in graph.input if v.name not in stored}
    return {n: d.usual for n, d in declared.items() if d.dims and not d.is_static and not d.only_batch_is_open}


@dataclass(frozen=True, slots=True)
class _Declared:
    """The shape that a model declares for an input: for each axis its size, or the name of a dynamic one; None: no rank."""

    dims: tuple[int | str, ...] | None

    @property
    def is_static(self) -> bool:
        return self.dims is not None and not any(isinstance(d, str) for d in self.dims)

    @property
    def only_batch_is_open(self) -> bool:
        """Whether the first size is dynamic and the others are not."""
        return self.open_axes == (0,)

    @property
    def open_axes(self) -> tuple[int, ...]:
        """The axes with dynamic sizes; () if the rank is not declared."""
        return tuple(i for i, d in enumerate(self.dims or ()) if isinstance(d, str))

    @property
    def text(self) -> str:
        return "unknown" if self.dims is None else "x".join(map(str, self.dims))

    @property
    def usual(self) -> tuple[int, ...]:
        """The shape, with usual values for dynamic sizes."""
        dims = self.dims or ()
        sizes = (1, 3, 224, 224) if len(dims) == 4 else (1,) * len(dims)
        return tuple(d if isinstance(d, int) else u for d, u in zip(dims, sizes, strict=True))

    @property
    def example(self) -> str:
        return "x".join(map(str, self.usual or ("N", "C", "H", "W")))

    def refusal(self, shape: tuple[int, ...]) -> str:
        """Returns why `shape` is wrong, with the cure; "" if it differs from the declared one only in dynamic sizes."""
        if self.dims is None:
            return ""
        if len(shape) != len(self.dims):
            return f"expected {several(len(self.dims), 'size')}, got {len(shape)}"
        for axis, (fixed, size) in enumerate(zip(self.dims, shape, strict=True)):
            if not isinstance(fixed, str) and fixed != size:
                return (
                    f"axis {axis} is fixed at {fixed}, got {size}, and only dynamic sizes can be chosen: "
                    f"give {fixed}, export the model with this axis dynamic (dynamic_shapes of torch.onnx.export), "
                    "or name it in the file (update_inputs_outputs_dims of onnx.tools.update_model_dims)"
                )
        return ""


def _declared(v: onnx.ValueInfoProto) -> _Declared:
    t = v.type.tensor_type
    if len(t.shape.dim) > MOST_DIMS:
        raise ModelError(f"input {v.name!r}: expected {MOST_DIMS} dimensions at most, got {len(t.shape.dim)}")
    dims = (d.dim_value if d.HasField("dim_value") else d.dim_param or "?" for d in t.shape.dim)
    return _Declared(tuple(dims) if t.HasField("shape") else None)


def _fixed(name: str, declared: _Declared, chosen: tuple[int, ...] | None) -> tuple[int, ...]:
    """Returns an input's shape: `chosen`, or the declared one if that is None. Raises ModelError if they disagree, or if sizes
    stay open.
    """
    shape = tuple(int(d) for d in declared.dims or ()) if chosen is None else chosen
    if why := declared.refusal(shape):
        given = "x".join(map(str, shape)) or "none"
        raise ModelError(f"input {name!r}: the model declares {declared.text}, the shape given is {given}; {why}")
    if not (shape or declared.dims is not None) or min(shape, default=1) < 1 or math.prod(shape) > check.LARGEST_TENSOR:
        raise ModelError(
            f"input {name!r}: expected sizes of at least 1 and {check.LARGEST_TENSOR} elements at most, "
            f"got {'x'.join(map(str, shape)) or 'none'}"
        )
    return shape
