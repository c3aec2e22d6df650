"""A checked ModelProto -> a clean onnx-ir graph: FP32 throughout, nothing left that constants decide, every size known."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import onnx
import onnx_ir as ir
from onnx import shape_inference

from gpu_runtime.errors import ModelError
from gpu_runtime.frontend import normalize
from gpu_runtime.frontend.check import LARGEST_TENSOR, MOST_DIMS, unusable_size
from gpu_runtime.frontend.load import first_line
from gpu_runtime.frontend.normalize import MOST_FOLDED
from gpu_runtime.frontend.weights import name_nodes


def clean(proto: onnx.ModelProto, large: Mapping[str, onnx.TensorProto]) -> ir.Model:
    """`large`: initializers that stand among the inputs (see onnx_load.set_aside); they are initializers again."""
    from onnx_ir.passes import common
    from onnxscript import optimizer

    try:
        with _logged() as told:
            model = ir.from_proto(proto)
            _put_back(model.graph, large)
            common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
            _erase_half(model)
            normalize.split_sums(model)
            normalize.group_norms(model)
            common.ShapeInferencePass()(model)
            optimizer.fold_constants(
                model,
                onnx_shape_inference=True,
                input_size_limit=1 << 40,
                output_size_limit=1 << 40,
                should_fold=_bounded(),
            )
            common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
            _drop_identities(model)
            normalize.plain_gemms(model)
            normalize.float_exponents(model)
            normalize.pads_into_windows(model)
            normalize.softmax_where_it_lies(model)
            normalize.join_constants(model)
            normalize.whole_batches(model)
            common.RemoveUnusedNodesPass()(model)
            common.TopologicalSortPass()(model)
            told.clear()
            common.ShapeInferencePass()(model)
    except Exception as e:
        cause = e.__cause__ or e
        raise ModelError(f"its constants cannot be folded: {first_line(cause)}") from e
    if told:
        raise ModelError(f"its shapes contradict each other once constants are folded: {first_line(told[-1])}")
    for v in model.graph.outputs:
        if v.is_initializer():
            raise ModelError(f"output {v.name!r} does not depend on any input: remove it from the model")
    unknown = [
        f"{out.name!r} of {node.op_type} {node.name}"
        for node in model.graph
        for out in node.outputs
        if (out.uses() or out.is_graph_output()) and (out.shape is None or not out.shape.is_static())
    ]
    if unknown:
        raise ModelError(f"the sizes of {', '.join(unknown[:5])} depend on the data; expected sizes that the inputs fix")
    name_nodes(model.graph)
    _drop_empty(model)
    for node in model.graph:
        inputs = [v.shape.numpy() for v in node.inputs if v is not None and v.shape is not None]
        for out in (v for v in node.outputs if v.uses() or v.is_graph_output()):
            dims = () if out.shape is None else out.shape.numpy()
            if len(dims) > MOST_DIMS:
                raise ModelError(f"{node.op_type} {node.name}: expected {MOST_DIMS} dimensions at most, got {len(dims)}")
            if any(d < 1 for d in dims) or math.prod(dims) > LARGEST_TENSOR:
                raise unusable_size(f"{node.op_type} {node.name}", out.name, dims, inputs)
        if node.op_type == "Reshape" and math.prod(node.inputs[0].shape) != math.prod(node.outputs[0].shape):
            before, after = ([int(d) for d in v.shape] for v in (node.inputs[0], node.outputs[0]))
            raise ModelError(f"Reshape {node.name}: {before} cannot become {after}; the model is fixed to other input sizes")
    return model


def _put_back(graph: ir.Graph, large: Mapping[str, onnx.TensorProto]) -> None:
    inputs = [*graph.inputs]
    graph.inputs.clear()
    graph.inputs.extend(v for v in inputs if v.name not in large)
    for v in inputs:
        if v.name in large:
            v.const_value = ir.from_proto(large[v.name])
            graph.register_initializer(v)


@contextmanager
def _logged() -> Iterator[list[BaseException]]:
    """The exceptions that onnx-ir's and onnxscript's passes catch and write to their logs, which stay silent."""
    told: list[BaseException] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.exc_info[1]) if record.exc_info else None
    logs = [logging.getLogger(name) for name in ("onnx_ir", "onnxscript")]
    before = [log.propagate for log in logs]
    for log in logs:
        log.addHandler(handler)
        log.propagate = False
    try:
        yield told
    finally:
        for log, propagate in zip(logs, before, strict=True):
            log.removeHandler(handler)
            log.propagate = propagate


def _bounded() -> Callable[[ir.Node], bool | None]:
    """What tells constant folding whether to fold a node: as it sees fit, until its constants become too large in all."""
    total = 0

    def fold(node: ir.Node) -> bool | None:
        nonlocal total
        inputs = {v.name: v for v in node.inputs if v is not None}
        if all(v.const_value is not None for v in inputs.values()):
            tensors = {name: ir.to_proto(v.const_value) for name, v in inputs.items() if v.const_value.size <= 64}
            types = {n: onnx.helper.make_tensor_type_proto(v.dtype, list(v.const_value.shape)) for n, v in inputs.items()}
            schema = onnx.defs.get_schema(node.op_type, node.graph.opset_imports[""], "")
            found = shape_inference.infer_node_outputs(schema, ir.to_proto(node), types, tensors)
            total += sum(math.prod(d.dim_value for d in kind.tensor_type.shape.dim) for kind in found.values())
            if total > MOST_FOLDED:
                raise ValueError(f"{node.op_type} {node.name} would make them {total} elements; expected {MOST_FOLDED} at most")
        return True if node.op_type == "ConstantOfShape" else None

    return fold


def _erase_half(model: ir.Model) -> None:
    """Make every floating-point constant, input and Cast FP32, inputs of pixels too; forget the types of values between."""
    floats = {ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE}
    for v in model.graph.inputs:
        if v.dtype == ir.DataType.UINT8:  # only Casts read it, and they keep what FP32 holds exactly
            v.dtype = ir.DataType.FLOAT
    for v in (*model.graph.inputs, *model.graph.initializers.values()):
        if v.dtype in floats or (v.const_value is not None and v.const_value.dtype in floats):
            if v.const_value is not None:
                v.const_value = ir.tensor(v.const_value.numpy().astype(np.float32), name=v.name)
            v.dtype = ir.DataType.FLOAT
    for node in model.graph:
        to = node.attributes.get("to")
        if node.op_type == "Cast" and to is not None and ir.DataType(to.value) in floats:
            node.attributes["to"] = ir.AttrInt64("to", ir.DataType.FLOAT.value)
        fill = node.attributes.get("value")
        if node.op_type == "ConstantOfShape" and fill is not None and fill.value.dtype in floats:
            node.attributes["value"] = ir.AttrTensor("value", ir.tensor(fill.value.numpy().astype(np.float32)))
        for out in node.outputs:
            out.type = out.shape = None


def _drop_identities(model: ir.Model) -> None:
    """Remove copies; one that gives a second name to an input or output stays."""
    for node in [n for n in model.graph if n.op_type == "Identity"]:
        x, y = node.inputs[0], node.outputs[0]
        if y.is_graph_output():
            if x.producer() is None or x.is_graph_output():
                continue
            name = y.name
            ir.convenience.replace_all_uses_with(y, x, replace_graph_outputs=True)
            model.graph.remove(node, safe=True)
            x.name = name
        else:
            ir.convenience.replace_all_uses_with(y, x)
            model.graph.remove(node, safe=True)


def _drop_empty(model: ir.Model) -> None:
    """Concat without the tensors that have no elements."""
    for node in [n for n in model.graph if n.op_type == "Concat"]:
        kept = [v for v in node.inputs if v.shape is None or 0 not in v.shape.numpy()]
        if 0 < len(kept) < len(node.inputs):
            fewer = ir.Node("", "Concat", kept, node.attributes.values(), name=node.name)
            fewer.outputs[0].shape, fewer.outputs[0].type = node.outputs[0].shape, node.outputs[0].type
            normalize.replace_by(model, node, [fewer])
