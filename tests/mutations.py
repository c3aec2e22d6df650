"""Mutations of a ModelProto for mutants.py: functions (rng, model, folder) that change the model in place, if they find a
place.

`folder`: where a mutation may write external data.
"""

from collections.abc import Callable

import numpy as np
import onnx
from onnx import AttributeProto, TensorProto, helper

HUGE = (0, -1, -7, 1, 2, 3, 5, 17, 255, 65536, 2**31 - 1, 2**31, 2**40, 2**62, -(2**63), 2**63 - 1)


def pick(rng: np.random.Generator, items):
    """Returns one of `items`, which is any sequence."""
    return items[int(rng.integers(len(items)))]


# ---- mutations of a ModelProto, in place; each may find nothing to do


def _dims(rng, dims) -> None:
    kind = int(rng.integers(5))
    if kind == 0 and dims:
        dims[int(rng.integers(len(dims)))] = pick(rng, HUGE)
    elif kind == 1:
        dims.append(pick(rng, HUGE))
    elif kind == 2 and dims:
        dims.pop()
    elif kind == 3:
        dims.reverse()
    else:
        dims.extend([1] * int(rng.integers(1, 70)))


def drop_node(rng, m, folder):
    if m.graph.node:
        del m.graph.node[int(rng.integers(len(m.graph.node)))]


def repeat_node(rng, m, folder):
    m.graph.node.add().CopyFrom(pick(rng, m.graph.node))


def shuffle_nodes(rng, m, folder):
    nodes = [onnx.NodeProto.FromString(n.SerializeToString()) for n in m.graph.node]
    del m.graph.node[:]
    m.graph.node.extend(nodes[i] for i in rng.permutation(len(nodes)))


def cycle(rng, m, folder):
    outputs = [out for n in m.graph.node for out in n.output]
    node = pick(rng, m.graph.node)
    if node.input:
        node.input[int(rng.integers(len(node.input)))] = pick(rng, outputs)


def rename(rng, m, folder):
    """Changes a tensor's name in one input or output, so that a tensor is missing, made twice, or read by another node."""
    node = pick(rng, m.graph.node)
    names = pick(rng, (node.input, node.output))
    others = [t.name for t in m.graph.initializer] + [n for k in m.graph.node for n in (*k.input, *k.output)]
    if names:
        names[int(rng.integers(len(names)))] = pick(rng, ("", "absent", "x" * 5000, "\0", "../../x", pick(rng, others)))


def operands(rng, m, folder):
    node = pick(rng, m.graph.node)
    names = pick(rng, (node.input, node.output))
    if rng.integers(2) and names:
        names.pop()
    else:
        names.append(pick(rng, ("", "more", *(t.name for t in m.graph.initializer), *node.input)))


def missing_initializer(rng, m, folder):
    if m.graph.initializer:
        del m.graph.initializer[int(rng.integers(len(m.graph.initializer)))]


def duplicate_name(rng, m, folder):
    kind = pick(rng, (m.graph.initializer, m.graph.input, m.graph.output, m.graph.node))
    if kind:
        kind.add().CopyFrom(pick(rng, kind))


def initializer_shape(rng, m, folder):
    if m.graph.initializer:
        _dims(rng, pick(rng, m.graph.initializer).dims)


def initializer_type(rng, m, folder):
    if m.graph.initializer:
        pick(rng, m.graph.initializer).data_type = int(rng.integers(-1, 30))


def initializer_bytes(rng, m, folder):
    if m.graph.initializer:
        t = pick(rng, m.graph.initializer)
        t.raw_data = pick(rng, (b"", t.raw_data[:-1], t.raw_data + b"\0", t.raw_data[: len(t.raw_data) // 2], t.raw_data * 2))


def bad_values(rng, m, folder):
    """Writes NaN, infinity or a type's largest numbers into a floating-point tensor, or large whole numbers into an integer
    one."""
    if m.graph.initializer:
        t = pick(rng, m.graph.initializer)
        if t.data_location == TensorProto.EXTERNAL:
            return
        try:
            a = onnx.numpy_helper.to_array(t).copy()
            values = (np.nan, np.inf, -np.inf, 1e30, 1e-40) if a.dtype.kind == "f" else HUGE
            if a.size:
                with np.errstate(all="ignore"):
                    a.reshape(-1)[int(rng.integers(a.size))] = pick(rng, values)
        except (ValueError, TypeError, OverflowError, KeyError):
            return
        t.CopyFrom(onnx.numpy_helper.from_array(a, t.name))


def input_shape(rng, m, folder):
    kind = pick(rng, (m.graph.input, m.graph.output, m.graph.value_info))
    if not kind:
        return
    shape = pick(rng, kind).type.tensor_type.shape
    dims = [d.dim_value for d in shape.dim]
    _dims(rng, dims)
    del shape.dim[:]
    for d in dims:
        shape.dim.add().dim_value = d
    if rng.integers(4) == 0 and dims:
        pick(rng, shape.dim).dim_param = "N"


def input_type(rng, m, folder):
    v = pick(rng, [*m.graph.input, *m.graph.output] or [onnx.ValueInfoProto()])
    kind = int(rng.integers(4))
    if kind == 0:
        v.ClearField("type")
    elif kind == 1:
        v.type.sequence_type.elem_type.tensor_type.elem_type = 1
    elif kind == 2:
        v.type.optional_type.elem_type.tensor_type.elem_type = 1
    else:
        v.type.tensor_type.elem_type = int(rng.integers(-1, 30))


def drop_end(rng, m, folder):
    kind = pick(rng, (m.graph.input, m.graph.output))
    if kind:
        del kind[int(rng.integers(len(kind)))]


def other_output(rng, m, folder):
    names = [n for k in m.graph.node for n in (*k.input, *k.output)] + ["", "absent"]
    if m.graph.output:
        pick(rng, m.graph.output).name = pick(rng, names)


def op_type(rng, m, folder):
    from tactics.problems.operators import OPERATORS

    others = ["", "LSTM", "If", "Loop", "NonZero", "Range", "ConstantOfShape", "Shape", "Einsum", "\0", "Relu6"]
    pick(rng, m.graph.node).op_type = pick(rng, sorted(OPERATORS) + others)


def attribute(rng, m, folder):
    """Gives an attribute a value that is out of range, of another length or of another type."""
    node = pick(rng, [n for n in m.graph.node if n.attribute] or m.graph.node)
    if not node.attribute:
        return
    a = pick(rng, node.attribute)
    kind = int(rng.integers(6))
    if kind == 0:
        a.type = int(rng.integers(0, 15))
    elif kind == 1:
        a.CopyFrom(helper.make_attribute(a.name, pick(rng, (1, 1.5, "text", [1], [1.5], ["text"], [0] * 9, [-1, 2**62]))))
    elif a.type == AttributeProto.INT:
        a.i = pick(rng, HUGE)
    elif a.type == AttributeProto.FLOAT:
        a.f = pick(rng, (0.0, -1.0, float("nan"), float("inf"), 1e30))
    elif a.type == AttributeProto.STRING:
        a.s = pick(rng, (b"", b"\xff\xfe", b"SAME_UPPER", b"x" * 1000))
    elif a.type == AttributeProto.TENSOR:
        _dims(rng, a.t.dims)
    else:
        values = a.ints if a.type == AttributeProto.INTS else a.floats
        if kind == 2 and values:
            values.pop()
        elif kind == 3:
            values.append(1)
        elif values:
            values[int(rng.integers(len(values)))] = pick(rng, HUGE)


def drop_attribute(rng, m, folder):
    node = pick(rng, [n for n in m.graph.node if n.attribute] or m.graph.node)
    if node.attribute:
        del node.attribute[int(rng.integers(len(node.attribute)))]


def more_attribute(rng, m, folder):
    names = ("axis", "axes", "pads", "strides", "kernel_shape", "group", "to", "perm", "auto_pad", "dilations", "value", "mode")
    made = helper.make_attribute(pick(rng, names), pick(rng, (0, -1, 2**40, [1, 1], [0, 2**40], 0.5, "x")))
    pick(rng, m.graph.node).attribute.append(made)


def versions(rng, m, folder):
    kind = int(rng.integers(4))
    if kind == 0:
        m.ir_version = pick(rng, HUGE)
    elif kind == 1 and m.opset_import:
        m.opset_import[0].version = pick(rng, (*HUGE, 6, 7, 8, 9, 10, 11, 12, 13, 18, 22))
    elif kind == 2:
        m.opset_import.append(helper.make_opsetid(pick(rng, ("", "ai.onnx", "ai.onnx.ml", "mine")), pick(rng, HUGE)))
    else:
        pick(rng, m.graph.node).domain = pick(rng, ("mine", "ai.onnx", "ai.onnx.ml", "com.microsoft", "\0"))


def external(rng, m, folder):
    if not m.graph.initializer:
        return
    t = pick(rng, m.graph.initializer)
    (folder / "beside.bin").write_bytes(t.raw_data)
    t.data_location = TensorProto.EXTERNAL
    places = ("../beside.bin", "beside.bin", "/etc/passwd", "", ".", "a/../../beside.bin", "\0", "x" * 5000, "/dev/zero")
    told = {"location": pick(rng, places)}
    if rng.integers(2):
        told |= {"offset": str(pick(rng, HUGE)), "length": str(pick(rng, HUGE))}
    if rng.integers(4) == 0:
        told["length"] = pick(rng, ("x", "", "1e3", "9" * 5000))
    del t.external_data[:]
    for key, value in told.items():
        t.external_data.add(key=key, value=value)
    if rng.integers(2):
        t.ClearField("raw_data")


def functions(rng, m, folder):
    """Adds a function to the model: a harmless one, one that calls itself, two that call each other, or one of many calls."""
    kind = int(rng.integers(4))
    m.opset_import.append(helper.make_opsetid("mine", 1))
    ops = [helper.make_opsetid("", 17), helper.make_opsetid("mine", 1)]
    bodies = {"f": ["Relu"]} if kind == 0 else {"f": ["f"]} if kind == 1 else {"f": ["g"], "g": ["f"]}
    if kind == 3:  # 2^40 nodes, were they all written out
        bodies = {"f": ["f0", "f0"]} | {f"f{i}": [f"f{i + 1}"] * 2 for i in range(40)} | {"f40": ["Relu"]}
    for name, calls in bodies.items():
        names = ["a", *(f"t{i}" for i in range(len(calls) - 1)), "z"]
        nodes = [
            helper.make_node(c, [i], [o], domain="" if c == "Relu" else "mine")
            for c, i, o in zip(calls, names, names[1:], strict=False)
        ]
        m.functions.append(helper.make_function("mine", name, ["a"], ["z"], nodes, ops))
    node = pick(rng, m.graph.node)
    node.op_type, node.domain = "f", "mine"


def subgraph(rng, m, folder):
    """Nests graphs inside nodes, some deeper than protobuf reads."""
    graph = onnx.GraphProto(name="inner")
    graph.node.add(op_type="Relu", input=["x"], output=["q"])
    for _ in range(int(pick(rng, (1, 5, 30)))):
        outer = onnx.GraphProto(name="outer")
        outer.node.add(op_type="If", input=["x"], output=["q"]).attribute.append(helper.make_attribute("then_branch", graph))
        graph = outer
    pick(rng, m.graph.node).attribute.append(helper.make_attribute("then_branch", graph))


def sparse(rng, m, folder):
    m.graph.sparse_initializer.add().values.name = "sparse"


def long_chain(rng, m, folder):
    """Adds hundreds of nodes in a row, too many for a recursive function over the graph."""
    last = next((n for n in reversed(m.graph.node) if n.output), None)
    if last is None or not m.graph.output:
        return
    last.output[0], end = "chain0", last.output[0]
    n = int(pick(rng, (50, 800)))
    for i in range(n):
        m.graph.node.add(op_type="Neg", input=[f"chain{i}"], output=[end if i == n - 1 else f"chain{i + 1}"])


MODEL_MUTATIONS: tuple[Callable, ...] = (
    drop_node,
    repeat_node,
    shuffle_nodes,
    cycle,
    rename,
    operands,
    missing_initializer,
    duplicate_name,
    initializer_shape,
    initializer_type,
    initializer_bytes,
    bad_values,
    bad_values,
    input_shape,
    input_shape,
    input_type,
    drop_end,
    other_output,
    op_type,
    op_type,
    attribute,
    attribute,
    attribute,
    drop_attribute,
    more_attribute,
    versions,
    external,
    functions,
    subgraph,
    sparse,
    long_chain,
)
