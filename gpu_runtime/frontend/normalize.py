"""Operators of an onnx-ir graph spelled so that the later stages know them: one spelling of each, and fewer layers.

Each function changes a model in place and keeps what it computes: group_norms and split_sums before constants are folded,
the others behind.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import onnx_ir as ir

LOWEST_HALF = -65504.0
MOST_FOLDED = 2**27  # elements of all constants that an import computes: those of the largest classifiers' weights


def group_norms(model: ir.Model) -> None:
    """GroupNormalization -> InstanceNormalization that keeps num_groups: onnx infers the shape of that one only."""
    for node in model.graph:
        if node.op_type == "GroupNormalization":
            node.op_type = "InstanceNormalization"


def split_sums(model: ir.Model) -> None:
    """Sum, Mean, Max and Min of n tensors -> a chain of operations with two, so that each has one spelling."""
    many = [n for n in model.graph if n.op_type in ("Sum", "Mean") or (n.op_type in ("Max", "Min") and len(n.inputs) != 2)]
    for node in many:
        total, terms = node.inputs[0], node.inputs[1:]
        op = {"Sum": "Add", "Mean": "Add"}.get(node.op_type, node.op_type)
        steps = []
        for i, term in enumerate(terms):
            steps.append(ir.Node("", op, [steps[-1].outputs[0] if steps else total, term], name=f"{node.name}_{i}"))
        if node.op_type == "Mean" and terms:
            share = _initializer(model, f"{node.name}_part", np.float32(1 / len(node.inputs)))
            steps.append(ir.Node("", "Mul", [steps[-1].outputs[0], share], name=node.name))
        steps = steps or [ir.Node("", "Identity", [total], name=node.name)]
        steps[-1].name = node.name
        replace_by(model, node, steps)


def plain_gemms(model: ir.Model) -> None:
    """Gemm that is neither a convolution nor a product as it stands -> one that is, or MatMul by a constant first matrix, with
    what it did besides in operators of their own: a transposition, a factor, an addend that is not constant per column."""
    for node in [n for n in model.graph if n.op_type == "Gemm"]:
        a, b, c = (*node.inputs, None)[:3]
        alpha, beta, turn_a, turn_b = (
            node.attributes[name].value if name in node.attributes else default
            for name, default in (("alpha", 1.0), ("beta", 1.0), ("transA", 0), ("transB", 0))
        )
        left, right, addend = (None if v is None or v.const_value is None else v.const_value.numpy() for v in (a, b, c))
        folds = c is None or (right is not None and addend is not None and math.prod(addend.shape[:-1]) == 1)
        if folds and (not turn_a if right is not None else left is None and alpha == 1):
            continue
        steps: list[ir.Node] = []

        def add(name: str, op: str, *inputs: ir.Value, steps=steps, **attributes) -> ir.Value:
            steps.append(ir.node(op, inputs, attributes, name=name))
            return steps[-1].outputs[0]

        def stored(name: str, array) -> ir.Value:
            return _initializer(model, name, np.asarray(array, np.float32))

        if left is not None:
            matrix = stored(f"{node.name}_left", alpha * (left.T if turn_a else left))
            right = add(f"{node.name}_right", "Transpose", b, perm=[1, 0]) if turn_b else b
            y = add(node.name, "MatMul", matrix, right)
        elif right is not None:
            x = add(f"{node.name}_left", "Transpose", a, perm=[1, 0]) if turn_a else a
            y = add(node.name, "Gemm", x, b, *([c] if folds and c is not None else []), alpha=alpha, beta=beta, transB=turn_b)
        else:
            y = add(node.name, "Gemm", a, b, transA=turn_a, transB=turn_b)
            y = y if alpha == 1 else add(f"{node.name}_scaled", "Mul", y, stored(f"{node.name}_alpha", alpha))
        if c is not None and not folds:
            if beta != 1:
                c = add(f"{node.name}_addend", "Mul", c, stored(f"{node.name}_beta", beta)) if addend is None else stored(
                    f"{node.name}_addend", beta * addend)  # fmt: skip
            y = add(f"{node.name}_sum", "Add", y, c)
        replace_by(model, node, steps)


def float_exponents(model: ir.Model) -> None:
    """Integer exponents of floating-point tensors become floating-point."""
    for node in [n for n in model.graph if n.op_type == "Pow" and n.inputs[0].dtype == ir.DataType.FLOAT]:
        exponent = node.inputs[1]
        if exponent.const_value is not None:
            array = exponent.const_value.numpy().astype(np.float32)
            node.replace_input_with(1, _initializer(model, f"{node.name}_exponent", array))
        elif exponent.dtype in (ir.DataType.INT32, ir.DataType.INT64):
            cast = ir.node("Cast", [exponent], {"to": ir.DataType.FLOAT.value}, name=f"{node.name}_exponent")
            model.graph.insert_before(node, cast)
            node.replace_input_with(1, cast.outputs[0])


def pads_into_windows(model: ir.Model) -> None:
    """A Pad that only convolutions and pools read, which pad by themselves: into their pads, where that says the same."""
    for pad in [n for n in model.graph if n.op_type == "Pad" and not n.outputs[0].is_graph_output()]:
        rows = _padded_pixels(pad)
        readers = [(use.node, use.idx) for use in pad.outputs[0].uses()]
        if rows is None or not readers or not all(_takes_pads(node, slot, rows, _fill(pad)) for node, slot in readers):
            continue
        for node, slot in readers:
            own = node.attributes["pads"].value if "pads" in node.attributes else (0,) * len(rows)
            node.attributes["pads"] = ir.AttrInt64s("pads", [a + b for a, b in zip(own, rows, strict=True)])
            node.attributes.pop("auto_pad", None)
            if node.op_type == "AveragePool":
                node.attributes["count_include_pad"] = ir.AttrInt64("count_include_pad", 1)
            node.replace_input_with(slot, pad.inputs[0])
        model.graph.remove(pad, safe=True)


def _padded_pixels(pad: ir.Node) -> tuple[int, ...] | None:
    """A Pad's sizes as `pads` of a convolution has them, if it adds a constant around the pixels and nothing else."""
    x, sizes, _, axes = (*pad.inputs, None, None)[:4]
    constants = all(v is None or v.const_value is not None for v in pad.inputs[1:])
    plain = "mode" not in pad.attributes or pad.attributes["mode"].value == "constant"
    if not (constants and plain) or sizes is None or x.shape is None or len(x.shape) < 3:
        return None
    rank, given = len(x.shape), [int(v) for v in sizes.const_value.numpy()]
    at = range(rank) if axes is None else [int(a) % rank for a in axes.const_value.numpy()]
    low, high = [0] * rank, [0] * rank
    for i, a in enumerate(at):
        low[a], high[a] = given[i], given[i + len(given) // 2]
    return (*low[2:], *high[2:]) if not any((*low[:2], *high[:2])) and min((*low, *high)) >= 0 else None


def _fill(pad: ir.Node) -> float:
    value = pad.inputs[2] if len(pad.inputs) > 2 else None
    return 0.0 if value is None else float(value.const_value.numpy().reshape(-1)[0])


def _takes_pads(node: ir.Node, slot: int, rows: tuple[int, ...], fill: float) -> bool:
    """Whether a reader's own pads of these sizes do what a Pad before it does."""
    def given(name: str, default):
        return node.attributes[name].value if name in node.attributes else default

    own = given("pads", (0,) * len(rows))
    if slot != 0 or given("auto_pad", "NOTSET") not in ("NOTSET", "VALID") or given("ceil_mode", 0) or len(own) != len(rows):
        return False
    if node.op_type == "AveragePool":
        return fill == 0 and (given("count_include_pad", 0) == 1 or not any(own))
    if node.op_type == "MaxPool":  # its padding never wins: no more does what FP16 has no smaller value for
        size, step = given("kernel_shape", ()), given("dilations", (1,) * (len(rows) // 2))
        reach = [(k - 1) * d for k, d in zip(size, step, strict=True)] * 2
        some = all(a + b <= r for a, b, r in zip(own, rows, reach, strict=True))  # of the image is in every window
        return fill <= LOWEST_HALF and len(node.outputs) == 1 and some
    return node.op_type == "Conv" and fill == 0


def softmax_where_it_lies(model: ir.Model) -> None:
    """A Softmax between a Transpose and the one that undoes it -> a Softmax of the axis that was turned to its."""
    for before in [n for n in model.graph if n.op_type == "Transpose" and "perm" in n.attributes]:
        softmax = _only_reader(before)
        after = softmax and softmax.op_type in ("Softmax", "LogSoftmax") and _only_reader(softmax)
        if not after or after.op_type != "Transpose" or "perm" not in after.attributes:
            continue
        perm = before.attributes["perm"].value
        if [perm[i] for i in after.attributes["perm"].value] != list(range(len(perm))):
            continue
        axis = softmax.attributes["axis"].value if "axis" in softmax.attributes else -1
        plain = ir.node(softmax.op_type, [before.inputs[0]], {"axis": perm[axis]}, name=softmax.name)
        replace_by(model, after, [plain])
        model.graph.remove([softmax, before], safe=True)


def _only_reader(node: ir.Node) -> ir.Node | None:
    """The node that alone reads what `node` gives."""
    uses = node.outputs[0].uses()
    return uses[0].node if len(uses) == 1 and not node.outputs[0].is_graph_output() else None


def join_constants(model: ir.Model) -> None:
    """Concat with constants among floating-point tensors -> the tensors with zeros where constants lie, plus the constants
    with zeros where tensors lie: moves and a sum, which kernels compute and which change no value."""
    for node in [n for n in model.graph if n.op_type == "Concat"]:
        shapes = [() if v.shape is None or not v.shape.is_static() else v.shape.numpy() for v in node.inputs]
        stored = [v.const_value is not None for v in node.inputs]
        kinds = {v.dtype for v, constant in zip(node.inputs, stored, strict=True) if not constant}
        if not all(shapes) or all(stored) or kinds != {ir.DataType.FLOAT}:
            continue
        axis = node.attributes["axis"].value % len(shapes[0])
        if not any(s[axis] for s, constant in zip(shapes, stored, strict=True) if constant):
            continue
        ends = list(itertools.accumulate(s[axis] for s in shapes))
        constants = np.zeros((*shapes[0][:axis], ends[-1], *shapes[0][axis + 1 :]), np.float32)
        pieces: list[list] = []  # a tensor, zeros before it, zeros behind it
        before = 0
        for v, constant, shape, end in zip(node.inputs, stored, shapes, ends, strict=True):
            if constant:
                constants[(*(slice(None),) * axis, slice(end - shape[axis], end))] = v.const_value.numpy()
                if pieces:
                    pieces[-1][2] += shape[axis]
                else:
                    before += shape[axis]
            else:
                pieces.append([v, 0 if pieces else before, 0])
        before_axis, behind_axis = [0] * axis, [0] * (len(shapes[0]) - 1 - axis)
        steps, names = [], iter(f"{node.name}_{i}" for i in range(len(pieces) + 1))
        for i, (v, *zeros) in enumerate(pieces):
            if any(zeros):
                pads = np.int64([p for count in zeros for p in (*before_axis, count, *behind_axis)])
                steps.append(ir.node("Pad", [v, _initializer(model, f"{node.name}_zeros_{i}", pads)], name=next(names)))
                pieces[i][0] = steps[-1].outputs[0]
        if len(pieces) > 1:
            steps.append(ir.node("Concat", [v for v, *_ in pieces], {"axis": axis}, name=next(names)))
        whole = _initializer(model, f"{node.name}_constants", constants)
        steps.append(ir.node("Add", [steps[-1].outputs[0], whole], name=node.name))
        replace_by(model, node, steps)


def whole_batches(model: ir.Model) -> None:
    """MatMul of batches that repeat otherwise than kernels take them -> of operands repeated before it, constants here.

    Kernels take a constant of the last batches of a tensor that has all of them, and two tensors that repeat along one or
    both of two axes, or altogether.
    """
    for node in [n for n in model.graph if n.op_type == "MatMul"]:
        if any(v.shape is None or not v.shape.is_static() for v in node.inputs):
            continue
        shapes = [tuple(v.shape.numpy()) for v in node.inputs]
        over = np.broadcast_shapes(*(s[:-2] for s in shapes))
        stored = [v.const_value is not None for v in node.inputs]
        for slot, (v, shape) in enumerate(zip(node.inputs, shapes, strict=True)):
            own = (1,) * (len(over) - len(shape[:-2])) + shape[:-2]
            first = next((i for i, d in enumerate(own) if d != 1), len(own))
            whole = own == over or math.prod(own) == 1
            if whole or (own[first:] == over[first:] if stored[slot] else len(over) <= 2 and not any(stored)):
                continue
            wanted = (*over, *shape[-2:])
            if not stored[slot]:
                size = _initializer(model, f"{node.name}_batches_{slot}", np.int64(wanted))
                repeated = ir.node("Expand", [v, size], name=f"{node.name}_operand_{slot}")
                model.graph.insert_before(node, repeated)
                node.replace_input_with(slot, repeated.outputs[0])
            elif math.prod(wanted) <= MOST_FOLDED:
                array = np.broadcast_to(v.const_value.numpy(), wanted)
                node.replace_input_with(slot, _initializer(model, f"{node.name}_operand_{slot}", np.ascontiguousarray(array)))


def _initializer(model: ir.Model, name: str, array: np.ndarray) -> ir.Value:
    """A stored constant of the graph."""
    value = ir.Value(name=name, const_value=ir.tensor(array, name=name))
    model.graph.register_initializer(value)
    return value


def replace_by(model: ir.Model, node: ir.Node, steps: list[ir.Node]) -> None:
    """Put `steps` in the place of `node`; the last one's result takes over its output and that one's name."""
    y, made = node.outputs[0], steps[-1].outputs[0]
    name = y.name
    model.graph.insert_before(node, steps)
    ir.convenience.replace_all_uses_with(y, made, replace_graph_outputs=True)
    model.graph.remove(node, safe=True)
    made.name = name
