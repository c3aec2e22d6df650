"""Turns matrix products over the last axis into 1x1 convolutions, if a Transpose then makes that axis the channels.

ConvNeXt and similar networks transpose to channels last for a LayerNorm and two MatMuls, then back, and add a residual. As
convolutions the products take in bias, activation, a scale per channel and that residual.

Example. Transpose[0,3,1,2](Gelu(MatMul(x, W) + b)) becomes Gelu(Conv(Transpose[0,3,1,2](x), W^T) + b'), b' being b as [C,1,1].
If x comes from a Transpose[0,2,3,1], this and the new one cancel.
"""

from collections.abc import Callable, Iterable

import numpy as np
import onnx_ir as ir

from gpu_runtime.frontend.normalize import shaped, stand_in, stored
from gpu_runtime.frontend.queries import attribute, constant, name_of, operand, operands, shape_of
from tactics.problems.operators import BINARY, UNARY


def products(model: ir.Model) -> None:
    """Replaces, in place, each region of products and elementwise nodes before a Transpose to channels first by convolutions.

    A region is changed only if no node outside of it reads its tensors.
    """
    for last in [n for n in model.graph if n.op_type == "Transpose"]:
        if not _to_channels(last):
            continue
        if region := _region(last):
            _turn(model, last, region)


def _to_channels(node: ir.Node) -> bool:
    """Returns whether a Transpose of three or four axes moves channels from last to second: (N, ..., C) -> (N, C, ...)."""
    rank = len(shape_of(operand(node)))
    return rank in (3, 4) and attribute(node, "perm") == (0, rank - 1, *range(1, rank - 1))


def _from_channels(node: ir.Node | None) -> bool:
    """Returns whether a node is the inverse Transpose: (N, C, ...) -> (N, ..., C)."""
    if node is None or node.op_type != "Transpose":
        return False
    rank = len(shape_of(operand(node)))
    return rank in (3, 4) and attribute(node, "perm") == (0, *range(2, rank), 1)


def _region(last: ir.Node) -> list[ir.Node]:
    """Returns the region before the Transpose `last`, in the graph's order: nodes that can have channels first and whose
    outputs only the region and `last` read; [] if there is no product among them.
    """
    inside = {last}
    todo = [operand(last).producer()]
    while todo:
        node = todo.pop(0)
        if node is None or node in inside or not _turns(node, last):
            continue
        y = node.outputs[0]
        if y.is_graph_output() or any(use.node not in inside for use in y.uses()):
            continue  # comes again after its other readers, if they are inside
        inside.add(node)
        todo += [v.producer() for v in operands(node)]
    inside.discard(last)
    graph, some = last.graph, any(node.op_type == "MatMul" for node in inside)
    return [node for node in graph if node in inside] if some and isinstance(graph, ir.Graph) else []


def _turns(node: ir.Node, last: ir.Node) -> bool:
    """Returns whether a node can have channels first: a product by a constant matrix, or an elementwise node whose constants
    are scalars or have one element per channel. `last`: the Transpose, whose rank the node must have.
    """
    shape = shape_of(operand(last))
    if len(node.outputs) != 1 or len(shape_of(node.outputs[0])) != len(shape):
        return False
    if node.op_type == "MatMul":
        w = constant(node.inputs[1])
        return w is not None and w.ndim == 2 and len(shape_of(operand(node))) == len(shape)
    if node.op_type not in UNARY and node.op_type not in BINARY:
        return False
    out = shape_of(node.outputs[0])
    return all(_follows(v, out) for v in operands(node))


def _follows(value: ir.Value, out: tuple[int, ...]) -> bool:
    a = constant(value)
    if a is None:
        return shape_of(value) == out
    return a.size == 1 or (a.shape[-1] == a.size == out[-1] and a.ndim <= len(out))


def _turn(model: ir.Model, last: ir.Node, region: Iterable[ir.Node]) -> None:
    """Replaces `last` by copies of the region's nodes over tensors with channels first; the old nodes stay, without readers."""
    turned: dict[ir.Value, ir.Value] = {}
    made: list[ir.Node] = []

    def first(value: ir.Value) -> ir.Value:
        """Returns the value with channels first, if necessary after a new Transpose."""
        if value not in turned:
            producer = value.producer()
            if producer is not None and _from_channels(producer):
                turned[value] = operand(producer)
            else:
                perm = list(attribute(last, "perm"))
                made.append(ir.node("Transpose", [value], {"perm": perm}, name=f"{name_of(value)}_channels_first"))
                turned[value] = _like(made[-1].outputs[0], value)
        return turned[value]

    for node in region:
        new = _product(model, node, first(operand(node))) if node.op_type == "MatMul" else _elementwise(model, node, first)
        made.append(new)
        turned[node.outputs[0]] = _like(new.outputs[0], node.outputs[0])
    model.graph.insert_before(last, made)
    stand_in(model, last, turned[operand(last)])


def _like(value: ir.Value, other: ir.Value) -> ir.Value:
    """Gives `value` the type of `other`, and its shape (N, ..., C) as (N, C, ...); returns it."""
    n, *pixels, c = shape_of(other)
    return shaped(value, (n, c, *pixels), other)


def _product(model: ir.Model, node: ir.Node, x: ir.Value) -> ir.Node:
    w = np.asarray(constant(node.inputs[1]))
    kernel = np.ascontiguousarray(w.T).reshape(*w.T.shape, *(1,) * (len(shape_of(operand(node))) - 2))
    return ir.node("Conv", [x, stored(model, f"{name_of(node)}_kernel", kernel)], name=name_of(node))


def _elementwise(model: ir.Model, node: ir.Node, first: Callable[[ir.Value], ir.Value]) -> ir.Node:
    inputs = []
    for i, v in enumerate(node.inputs):
        a = constant(v)
        if v is None or a is None:
            inputs.append(None if v is None else first(v))
        elif a.size == 1:
            inputs.append(v)
        else:
            spread = a.reshape(-1, *(1,) * (len(shape_of(node.outputs[0])) - 2))
            inputs.append(stored(model, f"{name_of(node)}_operand_{i}", spread))
    return ir.node(node.op_type, inputs, {name: a for name, a in node.attributes.items()}, name=name_of(node))
