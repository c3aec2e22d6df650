"""Turns a checked ModelProto into a clean onnx-ir graph: FP32 throughout, constants folded, every size known."""

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import numpy as np
import onnx
import onnx_ir as ir

from gpu_runtime.errors import ModelError
from gpu_runtime.frontend import channels_first, constants, normalize, split_attention, whole_numbers
from gpu_runtime.frontend.files.check import LARGEST_TENSOR, unusable_size
from gpu_runtime.frontend.files.load import MOST_DIMS, first_line
from gpu_runtime.frontend.files.weights import name_nodes
from gpu_runtime.frontend.queries import attribute, is_read, is_static, name_of, operand, operands, shape_of

FLOATS = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE)


def clean(proto: onnx.ModelProto, large: Mapping[str, onnx.TensorProto]) -> ir.Model:
    """Returns the clean graph of a checked model. Raises ModelError.

    `large`: initializers that load.set_aside made inputs of `proto`; they become initializers again.
    """
    model = _folded(proto, large)
    for v in model.graph.outputs:
        if v.is_initializer():
            raise ModelError(f"output {v.name!r} does not depend on any input: remove it from the model")
    unknown = [
        f"{out.name!r} of {node.op_type} {node.name}"
        for node in model.graph
        for out in node.outputs
        if is_read(out) and not is_static(out)
    ]
    if unknown:
        raise ModelError(f"the sizes of {', '.join(unknown[:5])} depend on the data; expected sizes that the inputs fix")
    name_nodes(model.graph)
    normalize.respell({"Concat": _nonempty}, model)
    for node in model.graph:
        _check_node(node)
    return model


def _folded(proto: onnx.ModelProto, large: Mapping[str, onnx.TensorProto]) -> ir.Model:
    """Returns the model with each operator in one form, constants folded and all shapes inferred. Raises ModelError."""
    from onnx_ir.passes import common

    stages: tuple[Callable[[ir.Model], object], ...] = (
        lambda model: _put_back(model.graph, large),
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        _erase_half,
        partial(normalize.respell, normalize.SPLIT),
        normalize.group_norms,
        common.ShapeInferencePass(),
        constants.fold,
        whole_numbers.respell,
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        _drop_identities,
        partial(normalize.respell, normalize.PLAIN),
        normalize.pads_into_windows,
        normalize.softmax_where_it_lies,
        partial(normalize.respell, normalize.JOINED),
        common.RemoveUnusedNodesPass(),
        channels_first.products,
        split_attention.of_two,
        common.RemoveUnusedNodesPass(),
        common.TopologicalSortPass(),
    )
    try:
        with _logged() as caught:
            model = ir.from_proto(proto)
            for stage in stages:
                stage(model)
            caught.clear()
            common.ShapeInferencePass()(model)
    except (ModuleNotFoundError, ModelError):  # a package is missing, or the message is clear already
        raise
    except Exception as e:
        raise ModelError(f"its constants cannot be folded: {first_line(e.__cause__ or e)}") from e
    if caught:
        raise ModelError(f"its shapes contradict each other once constants are folded: {first_line(caught[-1])}")
    return model


def _check_node(node: ir.Node) -> None:
    title, inputs = f"{node.op_type} {node.name}", [shape_of(v) for v in operands(node) if v.shape is not None]
    for out in filter(is_read, node.outputs):
        dims = shape_of(out)
        if len(dims) > MOST_DIMS:
            raise ModelError(f"{title}: expected {MOST_DIMS} dimensions at most, got {len(dims)}")
        dims = _floored(node, dims) if node.op_type == "Conv" or attribute(node, "ceil_mode", 0) else dims
        if any(d < 1 for d in dims) or math.prod(dims) > LARGEST_TENSOR:
            raise unusable_size(title, name_of(out), dims, inputs)
    if node.op_type == "Conv" and (bias := (*inputs, (1,))[2]) not in ((1,), (channels := shape_of(node.outputs[0])[1],)):
        raise ModelError(f"{title}: expected a bias for each of {channels} output channels, got the shape {list(bias)}")
    if node.op_type == "Reshape":
        before, after = (list(shape_of(v)) for v in (operand(node), node.outputs[0]))
        if math.prod(before) != math.prod(after):
            raise ModelError(f"{title}: {before} cannot become {after}; the model is fixed to other input sizes")


def _floored(node: ir.Node, dims: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the output sizes `dims` of a Conv, or of a pool with ceil_mode; below 1 where its window exceeds the padded
    image.

    onnx infers 1 there. (onnxruntime computes such a pool if it has no ceil_mode, and so does this runtime.)
    """
    mode, image = attribute(node, "auto_pad", "NOTSET"), shape_of(operand(node))[2:]
    size = shape_of(operand(node, 1))[2:] if node.op_type == "Conv" else attribute(node, "kernel_shape")
    rank, ones = len(image), (1,) * len(image)
    if mode.startswith("SAME") or len(size) != rank:
        return dims
    pads = attribute(node, "pads", (0,) * 2 * rank) if mode == "NOTSET" else (0,) * 2 * rank
    dilations, strides = attribute(node, "dilations", ones), attribute(node, "strides", ones)
    room = [image[i] + pads[i] + pads[i + rank] - dilations[i] * (size[i] - 1) - 1 for i in range(rank)]
    return (*dims[:2], *(r // s + 1 for r, s in zip(room, strides, strict=True))) if min(room) < 0 else dims


def _put_back(graph: ir.Graph, large: Mapping[str, onnx.TensorProto]) -> None:
    inputs = [*graph.inputs]
    graph.inputs.clear()
    graph.inputs.extend(v for v in inputs if v.name not in large)
    for v in inputs:
        if (name := name_of(v)) in large:
            v.const_value = ir.serde.deserialize_tensor(large[name])
            graph.register_initializer(v)


@contextmanager
def _logged() -> Iterator[list[BaseException]]:
    """Yields a list that receives the exceptions which onnx-ir's and onnxscript's passes catch and log; nothing is printed."""
    caught: list[BaseException] = []

    def keep(record: logging.LogRecord) -> bool:
        if record.exc_info and record.exc_info[1]:
            caught.append(record.exc_info[1])
        return False  # the handler emits nothing

    handler = logging.Handler()
    handler.addFilter(keep)
    logs = [logging.getLogger(name) for name in ("onnx_ir", "onnxscript")]
    before = [log.propagate for log in logs]
    for log in logs:
        log.addHandler(handler)
        log.propagate = False
    try:
        yield caught
    finally:
        for log, propagate in zip(logs, before, strict=True):
            log.removeHandler(handler)
            log.propagate = propagate


def _erase_half(model: ir.Model) -> None:
    """Makes every floating-point constant, input and Cast FP32, and uint8 inputs too; clears the types and shapes of all other
    values, which inference finds anew.
    """
    for v in model.graph.inputs:
        if v.dtype == ir.DataType.UINT8:  # only Casts read it, and FP32 holds all of its values
            v.dtype = ir.DataType.FLOAT
    for v in (*model.graph.inputs, *model.graph.initializers.values()):
        kinds = (v.dtype, None if v.const_value is None else v.const_value.dtype)
        if any(kind in FLOATS for kind in kinds):
            if v.const_value is not None:
                v.const_value = ir.tensor(v.const_value.numpy().astype(np.float32), name=v.name)
            v.dtype = ir.DataType.FLOAT
    for node in model.graph:
        to, fill = attribute(node, "to"), attribute(node, "value")
        if node.op_type == "Cast" and to is not None and ir.DataType(to) in FLOATS:
            node.attributes["to"] = ir.AttrInt64("to", ir.DataType.FLOAT.value)
        if node.op_type == "ConstantOfShape" and fill is not None and fill.dtype in FLOATS:
            node.attributes["value"] = ir.AttrTensor("value", ir.tensor(fill.numpy().astype(np.float32)))
        for out in node.outputs:
            out.type = out.shape = None


def _drop_identities(model: ir.Model) -> None:
    """Removes Identity nodes, except between an input and an output, or two outputs, of the network."""
    for node in [n for n in model.graph if n.op_type == "Identity"]:
        x, y = operand(node), node.outputs[0]
        if y.is_graph_output():
            if x.producer() is None or x.is_graph_output():
                continue
            normalize.stand_in(model, node, x)
        else:
            ir.convenience.replace_all_uses_with(y, x)
            model.graph.remove(node, safe=True)


def _nonempty(build: normalize.Steps, node: ir.Node) -> ir.Value | None:
    """Adds a Concat of those inputs of a Concat that have elements. Returns its output; None if all inputs have elements, or
    none has."""
    kept = [v for v in operands(node) if 0 not in shape_of(v)]
    return build.add("", "Concat", *kept, axis=attribute(node, "axis")) if 0 < len(kept) < len(node.inputs) else None
