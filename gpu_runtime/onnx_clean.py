"""A checked ModelProto -> a clean onnx-ir graph: FP32 throughout, nothing left that constants decide, every size known."""

from __future__ import annotations

import math

import numpy as np
import onnx
import onnx_ir as ir

from gpu_runtime.errors import ModelError
from gpu_runtime.onnx_load import first_line
from gpu_runtime.onnx_weights import name_nodes


def clean(proto: onnx.ModelProto) -> ir.Model:
    from onnx_ir.passes import common
    from onnxscript import optimizer

    try:
        model = ir.from_proto(proto)
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
        _erase_half(model)
        _split_sums(model)
        _group_norms(model)
        common.ShapeInferencePass()(model)
        optimizer.fold_constants(
            model,
            onnx_shape_inference=True,
            input_size_limit=1 << 40,
            output_size_limit=1 << 40,
            should_fold=lambda node: True if node.op_type == "ConstantOfShape" else None,
        )
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
        _drop_identities(model)
        common.RemoveUnusedNodesPass()(model)
        common.TopologicalSortPass()(model)
        common.ShapeInferencePass()(model)
    except Exception as e:
        cause = e.__cause__ or e
        raise ModelError(f"its constants cannot be folded: {first_line(cause)}") from e
    for v in model.graph.outputs:
        if v.is_initializer():
            raise ModelError(f"output {v.name!r} does not depend on any input: remove it from the model")
    unknown = [
        f"{out.name!r} of {node.op_type} {node.name}"
        for node in model.graph
        for out in node.outputs
        if out.uses() and (out.shape is None or not out.shape.is_static())
    ]
    if unknown:
        raise ModelError(f"the sizes of {', '.join(unknown[:5])} depend on the data; expected sizes that the inputs fix")
    name_nodes(model.graph)
    for node in model.graph:
        if node.op_type == "Reshape" and math.prod(node.inputs[0].shape) != math.prod(node.outputs[0].shape):
            before, after = ([int(d) for d in v.shape] for v in (node.inputs[0], node.outputs[0]))
            raise ModelError(f"Reshape {node.name}: {before} cannot become {after}; the model is fixed to other input sizes")
    return model


def _erase_half(model: ir.Model) -> None:
    """Make every floating-point constant, input and Cast FP32; forget the types of the values between."""
    floats = {ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE}
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


def _group_norms(model: ir.Model) -> None:
    """GroupNormalization -> InstanceNormalization that keeps num_groups: onnx infers the shape of that one only."""
    for node in model.graph:
        if node.op_type == "GroupNormalization":
            node.op_type = "InstanceNormalization"


def _split_sums(model: ir.Model) -> None:
    """Sum, Mean, Max and Min of n tensors -> a chain of operations with two, so that each has one spelling."""
    many = [n for n in model.graph if n.op_type in ("Sum", "Mean") or (n.op_type in ("Max", "Min") and len(n.inputs) != 2)]
    for node in many:
        total, terms = node.inputs[0], node.inputs[1:]
        op = {"Sum": "Add", "Mean": "Add"}.get(node.op_type, node.op_type)
        steps = []
        for i, term in enumerate(terms):
            steps.append(ir.Node("", op, [steps[-1].outputs[0] if steps else total, term], name=f"{node.name}_{i}"))
        if node.op_type == "Mean" and terms:
            part = f"{node.name}_part"
            share = ir.Value(name=part, const_value=ir.tensor(np.float32(1 / len(node.inputs)), name=part))
            model.graph.register_initializer(share)
            steps.append(ir.Node("", "Mul", [steps[-1].outputs[0], share], name=node.name))
        steps = steps or [ir.Node("", "Identity", [total], name=node.name)]
        steps[-1].name = node.name
        name = node.outputs[0].name
        model.graph.insert_before(node, steps)
        ir.convenience.replace_all_uses_with(node.outputs[0], steps[-1].outputs[0], replace_graph_outputs=True)
        model.graph.remove(node, safe=True)
        steps[-1].outputs[0].name = name
