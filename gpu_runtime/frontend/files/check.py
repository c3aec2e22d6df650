"""Checks of a ModelProto in Python, before onnx's C++ code reads it, which may abort on a broken graph.

Each fault is a ModelError.
"""

import graphlib
import math
import re
from collections import Counter
from collections.abc import Collection, Container, Iterable, Mapping, Sequence

import numpy as np
import onnx
from onnx import TensorProto, checker, shape_inference

from gpu_runtime.errors import ModelError
from gpu_runtime.frontend.files.load import (
    NOT_UTF8,
    first_line,
    graphs_in,
    inputs_of,
    is_control,
    opset_version,
    put_nodes,
    read_by,
    stored_tensors,
    title,
    to_array,
)
from gpu_runtime.text import MOST_NAME, first_of, printable
from tactics.planner.grouping import grouped

LARGEST_TENSOR = 2**31 - 1  # elements
QUANTIZED = {"DynamicQuantizeLinear", "ConvInteger", "MatMulInteger"}
WIDE = ("value_int", "value_ints", "starts", "ends")  # attributes of Constant and Slice that may be above LARGEST_TENSOR
# (operator, attribute) -> its allowed values
INTS = {
    ("LRN", "size"): range(1, LARGEST_TENSOR),
    ("LpPool", "p"): range(1, LARGEST_TENSOR),
    ("GlobalLpPool", "p"): range(1, LARGEST_TENSOR),
    ("LpNormalization", "p"): range(1, 3),
    ("GroupNormalization", "num_groups"): range(1, LARGEST_TENSOR),
}
SIZED_BY_VALUES = ("Compress", "NonMaxSuppression", "NonZero", "Unique")  # operators whose output's size depends on values
TERM = r"[A-Za-z]*(\.\.\.)?[A-Za-z]*"
EQUATION = re.compile(f"(?=.){TERM}(,{TERM})*(->{TERM})?")  # of an Einsum
SIZES = ("Shape", "Size")  # operators that read no value
FLOATS = {
    TensorProto.FLOAT: "fp32",
    TensorProto.FLOAT16: "fp16",
    TensorProto.BFLOAT16: "bf16",
    TensorProto.DOUBLE: "fp64",
}

# (operator, or "" for any operator; attribute) -> its allowed values, which onnx's own checks do not test.
STRINGS = {
    ("", "auto_pad"): ("NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID"),
    ("DepthToSpace", "mode"): ("DCR", "CRD"),
    ("Gelu", "approximate"): ("none", "tanh"),
    ("GridSample", "mode"): ("linear", "bilinear", "cubic", "bicubic", "nearest"),
    ("GridSample", "padding_mode"): ("zeros", "border", "reflection"),
    ("Pad", "mode"): ("constant", "reflect", "edge", "wrap"),
    ("Resize", "mode"): ("nearest", "linear", "cubic"),
    ("Resize", "coordinate_transformation_mode"): (
        "half_pixel",
        "half_pixel_symmetric",
        "pytorch_half_pixel",
        "align_corners",
        "asymmetric",
        "tf_half_pixel_for_nn",
        "tf_crop_and_resize",
    ),
    ("Resize", "nearest_mode"): ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil"),
    ("Resize", "keep_aspect_ratio_policy"): ("stretch", "not_larger", "not_smaller"),
    ("Upsample", "mode"): ("nearest", "linear"),
}

# Operators that may read -infinity, as transformers have it in masks: MOVES copy it, the results of ENDS are finite, and
# SOFTMAX operators may read it as a term of a sum.
MOVES = frozenset(
    "Identity Cast Reshape Unsqueeze Squeeze Flatten Transpose Slice Gather Expand Tile Concat Split Trilu".split()
)
ENDS = frozenset("Equal Less LessOrEqual Greater GreaterOrEqual IsInf Where Max Min".split())
SOFTMAX = frozenset("Softmax LogSoftmax ReduceLogSumExp ReduceMax Exp".split())  # and operators that together are a Softmax
MASKS = "only sums before a Softmax, comparisons, Where, Max and Min may read -infinity"
Readers = Mapping[str, Sequence[tuple[onnx.NodeProto, int]]]


def check_graph(graph: onnx.GraphProto) -> None:
    """Checks names, inputs, outputs and initializers of a graph; removes initializers from its inputs, and sorts its nodes, in
    place. Raises ModelError.
    """
    check_texts(graph)
    _check_unique(graph)
    inputs = inputs_of(graph)
    del graph.input[:]
    graph.input.extend(inputs)
    if not inputs:
        raise ModelError("the graph has no input that is not an initializer: nothing to run")
    if not graph.output:
        raise ModelError("the graph has no output: nothing to run")
    producer = _producers(graph, {v.name for v in (*graph.initializer, *inputs)})
    _check_outputs(graph, producer)
    _sort(graph, producer)


def check_texts(graph: onnx.GraphProto) -> None:
    graphs = (graph, *graphs_in(graph.node))
    names, nodes = [v.name for g in graphs for v in (*g.input, *g.output, *g.initializer)], [n for g in graphs for n in g.node]
    for node in nodes:
        names += [node.op_type, node.domain, node.name, *node.input, *node.output, *(a.name for a in node.attribute)]
    if not all(isinstance(name, str) for name in names):  # protobuf gives a text that is not UTF-8 as bytes
        raise ModelError(NOT_UTF8)
    for name in names:
        if len(name) > MOST_NAME // 10 and (size := len(repr(name))) > MOST_NAME:
            raise ModelError(
                f"the name {printable(name)[:40]!r}... takes {size} characters when printed; expected {MOST_NAME} at most: "
                "give nodes and tensors shorter names"
            )
    for node in nodes:
        for a in node.attribute:
            for text in (a.s, *a.strings):
                text.decode()  # a UnicodeDecodeError says NOT_UTF8


def _check_unique(graph: onnx.GraphProto) -> None:
    kinds: Mapping[str, Iterable[onnx.ValueInfoProto | TensorProto]] = {
        "input": graph.input,
        "initializer": graph.initializer,
        "output": graph.output,
    }
    for kind, values in kinds.items():
        if twice := sorted(name for name, count in Counter(v.name for v in values).items() if count > 1):
            raise ModelError(f"{kind} names must be unique, got twice: {', '.join(map(repr, twice))}")


def _producers(graph: onnx.GraphProto, fed: Container[str]) -> dict[str, int]:
    """Returns tensor -> index of the node that makes it. Raises ModelError if two nodes make a tensor, or a node reads a tensor
    that no node makes and that is not in `fed`.
    """
    producer: dict[str, int] = {}
    for i, node in enumerate(graph.node):
        for out in filter(None, node.output):
            if out in fed or out in producer:
                other = f"by {title(graph.node[producer[out]])}" if out in producer else "as an input or initializer"
                raise ModelError(f"tensor {out!r} is defined twice: {other} and by {title(node)}")
            producer[out] = i
    for node in graph.node:
        for name in filter(None, node.input):
            if name not in fed and name not in producer:
                raise ModelError(
                    f"tensor {name!r}, read by {title(node)}, is not an input, initializer or node output: "
                    "an initializer is missing, export the model again"
                )
    return producer


def _check_outputs(graph: onnx.GraphProto, producer: Container[str]) -> None:
    inputs, stored = {v.name for v in graph.input}, {t.name for t in graph.initializer}
    for v in graph.output:
        if v.name in inputs:
            raise ModelError(f"output {v.name!r} is also an input, the same array: remove it from the outputs")
        if v.name not in producer and v.name not in stored:
            raise ModelError(f"output {v.name!r} is not computed by any node")


def _sort(graph: onnx.GraphProto, producer: Mapping[str, int]) -> None:
    """Sorts the nodes in place so that each follows the nodes that make its inputs."""
    depends = {i: {producer[n] for n in read_by(node) if n in producer} for i, node in enumerate(graph.node)}
    if all(d < i for i, ds in depends.items() for d in ds):
        return
    try:
        order = list(graphlib.TopologicalSorter(depends).static_order())
    except graphlib.CycleError as e:
        ring = " -> ".join(title(graph.node[i]) for i in reversed(e.args[1]))
        raise ModelError(f"the graph has a cycle: {ring}") from None
    put_nodes(graph, (onnx.NodeProto.FromString(graph.node[i].SerializeToString()) for i in order))


def unsupported(proto: onnx.ModelProto, ops: Collection[str]) -> list[onnx.NodeProto]:
    """Returns the nodes whose operator is not in `ops` and that constant folding does not remove; nodes inside an If or Loop
    are not examined.
    """
    versions = {"" if o.domain == "ai.onnx" else o.domain: o.version for o in proto.opset_import}
    constant = {t.name for t in proto.graph.initializer}
    bad = []
    for node in proto.graph.node:
        domain = "" if node.domain == "ai.onnx" else node.domain
        known = not domain and onnx.defs.has(node.op_type, max_inclusive_version=versions[""], domain="")
        nested = any(graphs_in([node]))
        like = node.op_type == "CastLike"  # its second input gives a type only; it becomes Cast
        read = node.input[:1] if like else node.input
        if known and not nested and (node.op_type in SIZES or all(n in constant for n in read if n)):
            constant.update(node.output)
        elif not is_control(node) and (not known or ("Cast" if like else node.op_type) not in ops or _not_a_product(node)):
            bad.append(node)
    return bad


def inferred(proto: onnx.ModelProto, data_prop: bool = False) -> onnx.ModelProto:
    """Returns the model with the types and shapes that onnx infers. Raises ModelError if inference fails."""
    try:
        return shape_inference.infer_shapes(proto, data_prop=data_prop)
    except Exception as e:  # its exceptions share no base class
        raise ModelError(f"its shapes cannot be inferred: {first_line(e)}") from e


def check_ops(proto: onnx.ModelProto, ops: Collection[str], from_file: bool) -> None:
    """Raises ModelError if nodes have operators that are not supported; the message names them and the cure.

    `ops`: the supported operators; `from_file`: the model is a file, so the cure may have commands that read it.
    """
    bad = unsupported(proto, ops)
    if not bad:
        return
    if any(_is_quantized(node) for node in bad):
        counts = Counter(node.op_type for node in proto.graph.node if _is_quantized(node))
        others = [node for node in bad if not _is_quantized(node)]
        raise ModelError(
            f"it is quantized ({', '.join(f'{n} {op}' for op, n in counts.items())}), and no kernel computes in integers"
            + (f"; these operators have no kernel either: {unsupported_text(others)}" if others else "")
            + "\nquantize it with QuantizeLinear and DequantizeLinear of stored scales (QDQ), or give the model from before"
        )
    listed = "`gpu-runtime inspect --json` lists all, docs/operators.md" if from_file else "docs/operators.md lists"
    count = "1 node has" if len(bad) == 1 else f"{len(bad)} nodes have"
    raise ModelError(
        f"{count} an operator that is not supported: {unsupported_text(bad)}\n"
        f"export the model without them, or compute them outside it; {listed} the supported ones{_why_sized(bad)}"
        + (_cut(proto.graph, bad) if from_file else "")
    )


def _why_sized(bad: Iterable[onnx.NodeProto]) -> str:
    found = " and ".join(dict.fromkeys(node.op_type for node in bad if node.op_type in SIZED_BY_VALUES))
    return f"\nvalues decide how much {found} gives, and a plan's tensors have fixed sizes" if found else ""


def _cut(graph: onnx.GraphProto, bad: Iterable[onnx.NodeProto]) -> str:
    """Returns a line with a shell command that extracts all nodes that do not depend on `bad` ones; "" if there are none."""
    inputs = [v.name for v in inputs_of(graph)]
    made, behind = {*inputs}, {t for node in bad for t in node.output if t}
    ends = {v.name: None for v in graph.output}
    for node in graph.node:
        reads = {*read_by(node)} & made
        if behind.isdisjoint((*read_by(node), *node.output)):
            made.update(t for t in node.output if reads)
        else:
            behind.update(filter(None, node.output))
            ends |= dict.fromkeys(t for t in read_by(node) if t in reads)
    outputs = [t for t in ends if t in made and t not in inputs]
    call = f"extract_model('model.onnx', 'cut.onnx', {inputs}, {outputs})"
    return f'\nto cut the model in front of them: python -c "from onnx.utils import extract_model; {call}"' if outputs else ""


def _is_quantized(node: onnx.NodeProto) -> bool:
    return node.op_type in QUANTIZED or node.op_type.startswith("QLinear")


def unsupported_text(bad: Iterable[onnx.NodeProto]) -> str:
    """Returns a list of the nodes' operators, with their domains unless ONNX's, at most 8, each with at most 3 nodes' names."""
    by_type: dict[str, list[str]] = {}
    for node in bad:
        domain = "" if node.domain in ("", "ai.onnx") else f"{node.domain}."
        by_type.setdefault(domain + node.op_type + _not_a_product(node), []).append(node.name or ", ".join(node.output))
    return first_of([f"{op} ({first_of(names, 3)})" for op, names in by_type.items()], 8, "more operators")


def _not_a_product(node: onnx.NodeProto) -> str:
    """Returns an Einsum's equation and why it is not supported; "" for a supported one and for other operators.

    (onnx's inference hangs on some invalid equations.)
    """
    equation = next((a.s.decode(errors="replace") for a in node.attribute if a.name == "equation"), "")
    sides, terms = EQUATION.fullmatch(equation.replace(" ", "")), re.split(",|->", equation.replace("...", "").replace(" ", ""))
    if node.op_type != "Einsum" or (sides and len(node.input) < 3 and all(len({*term}) == len(term) for term in terms)):
        return ""
    why = "that is no equation of its inputs" if not sides else "with a diagonal" if len(node.input) < 3 else "of more tensors"
    return f" {equation!r} {why}"


def check_values(graph: onnx.GraphProto) -> None:
    """Raises ModelError if a stored constant or an attribute is NaN or infinite, except for bounds and masks."""
    for node in graph.node:
        _check_attributes(node)
    readers = readers_of(graph)
    for name, t in stored_tensors(graph):
        array = to_array(name, t)
        if array.dtype.kind != "f" and t.data_type not in FLOATS:
            continue
        wide = array.astype(np.float32) if array.dtype.itemsize == 2 else array
        finite = np.isfinite(wide)
        lone = wide.size == 1 and not np.isnan(wide).any()  # an infinity may be a bound of Clip or a Pad value
        if finite.all() or lone:
            continue
        reader = offender(name, readers)
        if not reader and np.isneginf(wide[~finite]).all():
            continue
        expected = f"{MASKS}, but {reader} reads it" if reader else "+infinity and NaN are not valid weights"
        raise ModelError(
            f"tensor {name!r} holds {np.count_nonzero(~finite)} values that are NaN or infinite, first at "
            f"{np.argwhere(~finite)[0].tolist()}: expected finite weights; {expected}"
        )


def readers_of(graph: onnx.GraphProto) -> Readers:
    """Returns tensor -> (node, number of the input) of each reader."""
    plain = (node for node in graph.node if not is_control(node))
    return grouped((name, (node, i)) for node in plain for i, name in enumerate(node.input))


def offender(tensor: str, readers: Readers) -> str:
    """Returns the title of a node that must not read -infinity, but could from this stored tensor or input; "" if none does."""
    todo, seen = [(tensor, False)], {(tensor, False)}
    while todo:
        name, summed = todo.pop()
        for node, i in readers.get(name, ()):
            kind = node.op_type
            if kind in ENDS or (summed and kind in SOFTMAX):
                continue
            is_sum = kind == "Add" or (kind == "Sub" and i == 0)
            if not is_sum and not (kind in MOVES and i == 0) and kind != "Concat":
                return title(node)
            new = [(output, summed or is_sum) for output in node.output]
            todo += [at for at in new if at not in seen]
            seen.update(new)
    return ""


def _check_attributes(node: onnx.NodeProto) -> None:
    for a in node.attribute:
        expected = STRINGS.get((node.op_type, a.name), STRINGS.get(("", a.name)))
        if expected and a.s.decode() not in expected:
            raise ModelError(f"{title(node)}: expected {a.name} to be one of {', '.join(expected)}, got {a.s.decode()!r}")
        whole = [a.i] if a.type == onnx.AttributeProto.INT else a.ints
        if a.name not in WIDE and any(abs(v) > LARGEST_TENSOR for v in whole):
            raise ModelError(f"{title(node)}: expected {a.name} of at most {LARGEST_TENSOR}, got {list(whole)[:8]}")
        allowed = INTS.get((node.op_type, a.name))
        if allowed and any(v not in allowed for v in whole):
            ends = f"{allowed[0]} to {allowed[-1]}"
            raise ModelError(f"{title(node)}: expected {a.name} to be a number from {ends}, got {list(whole)[:8]}")
        values = [a.f] if a.type == onnx.AttributeProto.FLOAT else a.floats
        bounds = node.op_type in ("Clip", "Pad")  # attributes of which may be infinite
        if any(math.isnan(v) or (math.isinf(v) and not bounds) for v in values):
            raise ModelError(f"{title(node)}: its attribute {a.name!r} is NaN or infinite: expected a finite number")


def check_schema(proto: onnx.ModelProto) -> None:
    proto.ir_version = max(proto.ir_version, 10)  # which OPSET of convert.py needs
    for v in proto.graph.output:
        v.type.tensor_type.shape.SetInParent()  # the checker demands a shape, other readers do not
    try:
        checker.check_model(proto)
    except Exception as e:
        raise ModelError(f"it breaks the ONNX specification: {first_line(e)}") from e


def check_sizes(proto: onnx.ModelProto) -> None:
    """Infers sizes node by node, and raises ModelError for an input that is too small for the network: onnx's C++ would abort
    on it later. The inputs must have sizes.
    """
    types = {v.name: v.type for v in proto.graph.input}
    data = {}
    for name, t in stored_tensors(proto.graph):
        types[name] = onnx.helper.make_tensor_type_proto(t.data_type, t.dims)
        if math.prod(t.dims) <= 64:
            data[name] = t
    for node in proto.graph.node:
        if any(n and n not in types for n in node.input):
            continue  # its type is not known before constants are folded
        found = inferred_types(proto, node, types, data)
        sizes = [sizes_of(types[n]) or [] for n in node.input if n]
        _check_padding(node, sizes)
        for name, kind in found.items():
            dims = sizes_of(kind)
            if dims is None:
                continue
            # Only these may be empty: lists of sizes, constants, and parts of a Split, which a Concat then drops.
            least = int(kind.tensor_type.elem_type in FLOATS and node.op_type not in ("Constant", "Split"))
            if any(d < least for d in dims) or math.prod(dims) > LARGEST_TENSOR:
                raise unusable_size(title(node), name, dims, sizes)
            types[name] = kind


def sizes_of(kind: onnx.TypeProto) -> list[int] | None:
    """Returns the sizes of a tensor type, None if one is unknown."""
    t = kind.tensor_type
    known = t.HasField("shape") and all(d.HasField("dim_value") for d in t.shape.dim)
    return [d.dim_value for d in t.shape.dim] if known else None


def inferred_types(
    proto: onnx.ModelProto, node: onnx.NodeProto, types: Mapping[str, onnx.TypeProto], data: Mapping[str, TensorProto]
) -> dict[str, onnx.TypeProto]:
    """Returns output -> its inferred type for one node. `types`: tensor -> its type; `data`: tensor -> its values, if they are
    known. Raises ModelError if inference fails.
    """
    opset, read = opset_version(proto), list(filter(None, node.input))
    try:
        return shape_inference.infer_node_outputs(
            onnx.defs.get_schema(node.op_type, opset, ""),
            node,
            {n: types[n] for n in read},
            {n: data[n] for n in read if n in data},
            opset_imports=[onnx.helper.make_opsetid("", opset)],
            ir_version=proto.ir_version,
        )
    except Exception as e:
        raise ModelError(f"{title(node)}: {first_line(e)}") from e


def _check_padding(node: onnx.NodeProto, shapes: Sequence[Sequence[int]]) -> None:
    """Raises ModelError if a node's padded input, which kernels index like a tensor, is too large. `shapes`: of the inputs."""
    written = {a.name: list(a.ints) for a in node.attribute if a.name in ("pads", "kernel_shape", "dilations")}
    if node.op_type not in ("Conv", "MaxPool", "AveragePool", "LpPool") or len(shapes[0]) < 3:
        return
    n = len(shapes[0]) - 2
    kernel, dilations = written.get("kernel_shape", shapes[-1][2:]), written.get("dilations", [1] * n)
    pads = written.get("pads", [0] * (2 * n))
    if any(a.name == "auto_pad" and a.s.startswith(b"SAME") for a in node.attribute):
        pads = [(k - 1) * d for k, d in zip(kernel, dilations, strict=False)] + [0] * n
    padded = [*shapes[0][:2], *(size + a + b for size, a, b in zip(shapes[0][2:], pads, pads[n:], strict=False))]
    if math.prod(padded) > LARGEST_TENSOR:
        most = f"expected {LARGEST_TENSOR} elements at most"
        raise ModelError(f"{title(node)}: with its padding, its input would have the size {padded}; {most}")


def unusable_size(node: str, output: str, dims: Sequence[int], inputs: Sequence[Sequence[int]]) -> ModelError:
    """Returns the error for an output that is empty or too large to be indexed; `inputs`: the shapes of the node's inputs."""
    return ModelError(
        f"{node}: its output {output!r} would have the size {list(map(int, dims))} (inputs "
        f"{[list(map(int, s)) for s in inputs]}); expected sizes of at least 1 and {LARGEST_TENSOR} elements at most: give "
        "another input size with --shapes"
    )
