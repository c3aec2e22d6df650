"""Folds constants when a model is imported: with onnxscript's folder, and for nodes that it declines, with onnx's reference
implementation.

The folder declines, for example, a BatchNormalization in training mode over the weights, as in networks that standardize their
weights (NFNet).
"""

import math
from collections.abc import Callable

import numpy as np
import onnx
import onnx_ir as ir
from onnx import helper, shape_inference

from gpu_runtime.frontend.files.convert import OPSET
from gpu_runtime.frontend.normalize import MOST_FOLDED, stored
from gpu_runtime.frontend.queries import constant, is_read, name_of, operands

NESTED = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)


def fold(model: ir.Model) -> None:
    """Folds a model's constants in place. Raises ValueError if all results together have more than MOST_FOLDED elements."""
    from onnxscript import optimizer

    allowed = _bounded()
    optimizer.fold_constants(
        model, onnx_shape_inference=True, input_size_limit=1 << 40, output_size_limit=1 << 40, should_fold=allowed
    )
    for node in list(model.graph):
        arrays = {name_of(v): constant(v) for v in operands(node)}
        nested = any(a.type in NESTED for a in node.attributes.values())
        if node.op_type == "Constant" or not arrays or nested or any(a is None for a in arrays.values()):
            continue
        if any(v.is_graph_output() for v in node.outputs):  # a network output stays its node's
            continue
        allowed(node)
        _replace(model, node, evaluated(ir.to_proto(node), {n: a for n, a in arrays.items() if a is not None}))


def _bounded() -> Callable[[ir.Node], bool | None]:
    """Returns a function node -> whether to fold it, for onnxscript's folder: None, the folder's own choice, until the results
    together become too large.
    """
    total = 0

    def fold(node: ir.Node) -> bool | None:
        nonlocal total
        inputs = {name_of(v): v.const_value for v in operands(node) if v.const_value is not None}
        if len(inputs) == len({name_of(v) for v in operands(node)}):
            tensors = {name: ir.to_proto(value) for name, value in inputs.items() if value.size <= 64}
            types = {n: helper.make_tensor_type_proto(value.dtype, value.shape.numpy()) for n, value in inputs.items()}
            schema = onnx.defs.get_schema(node.op_type, OPSET, "")
            found = shape_inference.infer_node_outputs(schema, ir.to_proto(node), types, tensors)
            total += sum(math.prod(d.dim_value for d in kind.tensor_type.shape.dim) for kind in found.values())
            if total > MOST_FOLDED:
                raise ValueError(f"{node.op_type} {node.name} would make them {total} elements; expected {MOST_FOLDED} at most")
        return True if node.op_type == "ConstantOfShape" else None

    return fold


def evaluated(node: onnx.NodeProto, feeds: dict[str, np.ndarray], opset: int = OPSET) -> list[np.ndarray]:
    """Returns an array for each output of the node that has a name, computed by onnx's reference implementation. `feeds`: input
    -> array.
    """
    from onnx.reference import ReferenceEvaluator

    values = [helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape) for n, a in feeds.items()]
    outputs = [helper.make_empty_tensor_value_info(name) for name in node.output if name]
    graph = helper.make_graph([node], "constants", values, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    return [np.asarray(a) for a in ReferenceEvaluator(model).run(None, feeds)]


def _replace(model: ir.Model, node: ir.Node, arrays: list[np.ndarray]) -> None:
    """Replaces a node by stored constants: `arrays`, one for each output."""
    for value, array in zip([v for v in node.outputs if v.name], arrays, strict=True):
        if is_read(value):
            ir.convenience.replace_all_uses_with(value, stored(model, f"{name_of(value)} (folded)", array))
    model.graph.remove(node, safe=True)
