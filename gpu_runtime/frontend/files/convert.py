"""Converts a checked ModelProto to one opset: older ones through onnx's converter, newer ones unchanged.

The opset is 22: in it a pool with ceil_mode has no window that begins in the padding, as frameworks and onnxruntime compute it
for every opset. For the supported operators the opsets 22 to 28 otherwise change only types, and add operators that are
respelled in older ones.
"""

import math

import onnx
from onnx import helper, shape_inference, version_converter

from gpu_runtime.errors import ModelError
from gpu_runtime.frontend.files.load import first_line, graphs_in, int_attribute, opset_version, put_nodes, title
from gpu_runtime.text import first_of

OPSET = 22  # every model is converted to this one
CONVERTIBLE = 21  # the newest that onnx's converter reaches from the older ones with every operator
SAME_UNTIL = 28  # operators of opsets up to this one, read as of OPSET, mean the same


def convert(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Returns the model in opset OPSET. Raises ModelError if onnx's converter fails, or if shapes or types contradict each
    other.
    """
    opset = opset_version(proto)
    if opset < 7:
        proto = shape_inference.infer_shapes(proto)
        _align_by_axis(proto.graph)
    newest = max(onnx.defs.get_schema(n.op_type, opset, "").since_version for n in proto.graph.node)
    try:
        if opset < CONVERTIBLE or newest > SAME_UNTIL:
            proto = version_converter.convert_version(proto, CONVERTIBLE)
    except Exception as e:
        raise _refused(proto, e) from e
    if opset < 13:
        put_nodes(proto.graph, (new for node in proto.graph.node for new in _flat_hardmax(node)))
    del proto.graph.value_info[:]
    for v in proto.graph.output:
        v.type.tensor_type.ClearField("shape")  # declared sizes may contradict those that follow from the inputs
    _read_as(proto, max(opset_version(proto), OPSET))
    try:
        inferred = shape_inference.infer_shapes(proto, check_type=True, strict_mode=True, data_prop=True)
    except Exception as e:
        raise ModelError(f"its shapes or types contradict each other: {first_line(e)}") from e
    _read_as(proto, OPSET)
    types = {v.name: v.type.tensor_type.elem_type for v in (*inferred.graph.value_info, *inferred.graph.output)}
    for node in proto.graph.node:
        if node.op_type == "CastLike":
            node.op_type = "Cast"
            del node.input[1:], node.attribute[:]
            node.attribute.append(helper.make_attribute("to", types[node.output[0]]))
        if node.op_type == "Resize" and opset < 11:  # the converter loses Upsample's and Resize-10's meaning
            _put(node, coordinate_transformation_mode="asymmetric", nearest_mode="floor")
    return proto


def _refused(proto: onnx.ModelProto, of_whole: Exception) -> ModelError:
    """Returns the error for a model that onnx's converter refused, with the nodes that it refuses even by themselves, and why.

    `of_whole`: the converter's exception for the whole model.
    """
    for v in proto.graph.output:
        v.type.tensor_type.ClearField("shape")
    try:
        typed = shape_inference.infer_shapes(proto).graph
    except Exception as e:
        return ModelError(f"its shapes or types contradict each other: {first_line(e)}")
    values = {v.name: v for v in (*typed.input, *typed.value_info)}
    stored = {t.name: t for t in typed.initializer}
    found: list[tuple[str, Exception]] = []
    for node in typed.node:
        inputs = [values[n] for n in node.input if n in values and n not in stored]
        outputs = [helper.make_empty_tensor_value_info(n) for n in node.output if n]
        alone = helper.make_graph([node], "alone", inputs, outputs, [stored[n] for n in node.input if n in stored])
        try:
            version_converter.convert_version(helper.make_model(alone, opset_imports=proto.opset_import), CONVERTIBLE)
        except Exception as e:
            found.append((title(node), e))
    names = first_of([name for name, _ in found], 5)
    why = first_line(found[0][1] if found else of_whole).rpartition(" failed: ")[2]  # behind the place in onnx's source
    text = f"{names}: " * bool(found) + f"cannot be converted from opset {opset_version(proto)} to {CONVERTIBLE}: {why}"
    return ModelError(f"{text}; export the model again, with opset {CONVERTIBLE} or newer")


def spell_out_padding(graph: onnx.GraphProto) -> None:
    """Replaces auto_pad SAME of a ConvTranspose with output_padding by pads, in place: onnx's inference wrongly adds
    output_padding to the size that SAME fixes.
    """
    sizes = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in graph.input}
    sizes |= {t.name: list(t.dims) for t in graph.initializer}
    for node in (node for each in (graph, *graphs_in(graph.node)) for node in each.node):
        given = {a.name: a for a in node.attribute}
        mode = given["auto_pad"].s if "auto_pad" in given else b""
        padded = "output_padding" in given and "output_shape" not in given and mode.startswith(b"SAME")
        if node.op_type != "ConvTranspose" or not padded:
            continue
        size = [*given["kernel_shape"].ints] if "kernel_shape" in given else sizes.get(node.input[1], [])[2:]
        stride, dilation = ([*given[name].ints] if name in given else [1] * len(size) for name in ("strides", "dilations"))
        each = zip(size, stride, dilation, given["output_padding"].ints, strict=False)
        total = [max(0, extra + (k - 1) * d + 1 - s) for k, s, d, extra in each]
        begin = [t // 2 if mode == b"SAME_UPPER" else t - t // 2 for t in total]
        if len(begin) == len(size) > 0:
            _put(node, auto_pad=None, pads=[*begin, *(t - b for t, b in zip(total, begin, strict=True))])


def spell_out_group_norms(proto: onnx.ModelProto) -> None:
    """Replaces GroupNormalization of opsets 18 to 20, in place, by Reshape, InstanceNormalization of groups, and Reshape.

    In these opsets it has a scale and a bias for each group, in newer ones for each channel; onnx refuses it or does not
    convert it.
    """
    graphs = (proto.graph, *graphs_in(proto.graph.node)) if opset_version(proto) < 21 else ()
    for graph in reversed(graphs):  # from the inside out: a graph's nodes are copied
        put_nodes(graph, (new for node in graph.node for new in _of_groups(graph, node)))


def _of_groups(graph: onnx.GraphProto, node: onnx.NodeProto) -> list[onnx.NodeProto]:
    """Returns the nodes that compute a GroupNormalization of the graph; another node alone."""
    groups = int_attribute(node, "num_groups", 0)
    if node.op_type != "GroupNormalization" or not groups or len(node.input) != 3:
        return [node]
    (x, *affine), y = node.input, node.output[0]
    within, normal, shape, size = (f"{y}, {what}" for what in ("grouped", "normalized", "shape", "groups"))
    graph.initializer.append(helper.make_tensor(size, onnx.TensorProto.INT64, [3], [0, groups, -1]))
    kept = {a.name: a.f for a in node.attribute if a.name == "epsilon"}
    return [
        helper.make_node("Reshape", [x, size], [within]),
        helper.make_node("InstanceNormalization", [within, *affine], [normal], node.name, **kept),
        helper.make_node("Shape", [x], [shape]),
        helper.make_node("Reshape", [normal, shape], [y]),
    ]


def _flat_hardmax(node: onnx.NodeProto) -> list[onnx.NodeProto]:
    """Returns the nodes that compute a Hardmax of opsets before 13, which is over all axes from `axis` on: one over a single
    axis between Reshapes; onnx's converter does not change it. Another node is returned alone.
    """
    if node.op_type != "Hardmax":
        return [node]
    (x,), (y,) = node.input, node.output
    flat, chosen, shape = (f"{y}, {what}" for what in ("flat", "chosen", "shape"))
    return [
        helper.make_node("Flatten", [x], [flat], axis=int_attribute(node, "axis", 1)),
        helper.make_node("Hardmax", [flat], [chosen], node.name, axis=1),
        helper.make_node("Shape", [x], [shape]),
        helper.make_node("Reshape", [chosen, shape], [y]),
    ]


def _put(node: onnx.NodeProto, **values: object) -> None:
    """Sets attributes of a node; removes those whose value is None."""
    kept = [a for a in node.attribute if a.name not in values]
    del node.attribute[:]
    node.attribute.extend([*kept, *(helper.make_attribute(name, v) for name, v in values.items() if v is not None)])


def _read_as(proto: onnx.ModelProto, opset: int) -> None:
    del proto.opset_import[:]
    proto.opset_import.append(helper.make_opsetid("", opset))


def _align_by_axis(graph: onnx.GraphProto) -> None:
    """Adds trailing axes of size 1 to stored second operands of a model before opset 7, so that they broadcast as in NumPy.

    In these opsets the second operand's first axis is axis `axis` of the first operand; PRelu's slopes are one per channel.
    Example: axis 1 and a bias [C] for x [N, C, H, W]: the bias becomes [C, 1, 1].
    """
    tensors = {t.name: t for t in graph.initializer}
    ranks = {v.name: len(v.type.tensor_type.shape.dim) for v in (*graph.input, *graph.value_info)}
    for node in graph.node:
        axis = 1 if node.op_type == "PRelu" else int_attribute(node, "axis", -1)
        t = tensors.get(node.input[1]) if len(node.input) == 2 else None
        aligned = node.op_type == "PRelu" or (axis >= 0 and int_attribute(node, "broadcast", 0))
        if t is None or not aligned or math.prod(t.dims) == 1:
            continue
        more = ranks.get(node.input[0], 0) - axis - len(t.dims)
        if more <= 0:
            continue
        copy = graph.initializer.add()
        copy.CopyFrom(t)
        copy.name = f"{node.name}_aligned"
        copy.dims.extend([1] * more)
        node.input[1] = copy.name
        _put(node, axis=None)
