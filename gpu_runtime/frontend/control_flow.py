"""Replaces every If and Loop by the nodes that run, if constants and the inputs' sizes decide which nodes these are."""

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx
from onnx import helper, numpy_helper

from gpu_runtime.errors import ModelError
from gpu_runtime.frontend.constants import evaluated
from gpu_runtime.frontend.files.check import FLOATS, SIZES, inferred_types, sizes_of
from gpu_runtime.frontend.files.load import MOST_NODES, SMALL_BYTES, is_control, opset_version, put_nodes, title, to_array

MOST_KNOWN = 1024  # elements of a tensor whose values are followed
CURE = "export the model with fixed sizes and from torch.jit.trace, which leaves control flow out, or simplify it with onnxsim"


def flatten(proto: onnx.ModelProto) -> bool:
    """Replaces every If and Loop in place, in a model whose inputs have sizes and whose schema is checked; returns whether it
    has any.

    Raises ModelError if the values of inputs decide one, or if more than MOST_NODES nodes, outputs and iterations run in them.
    """
    graph = proto.graph
    if not any(map(is_control, graph.node)):
        return False
    taken = {v.name for v in (*graph.input, *graph.initializer, *graph.node)}
    walk = _Walk(proto, taken | {out for node in graph.node for out in node.output})
    walk.types |= {v.name: v.type for v in graph.input}
    for t in graph.initializer:
        walk.know(t.name, t)
    walk.run(graph.node, {}, "")
    put_nodes(graph, walk.nodes)
    return True


@dataclass(slots=True)
class _Walk:
    """The state of a replacement: the nodes that run, in order, and the known types and values of their tensors.

    `taken`: names of tensors and nodes that are in use; `numbers`: for new names; `left`: how many more nodes, outputs and
    iterations may follow.
    """

    proto: onnx.ModelProto
    taken: set[str]
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    types: dict[str, onnx.TypeProto] = field(default_factory=dict)
    data: dict[str, onnx.TensorProto] = field(default_factory=dict)
    numbers: itertools.count = field(default_factory=itertools.count)
    left: int = MOST_NODES

    def run(self, nodes: Iterable[onnx.NodeProto], names: Mapping[str, str], within: str) -> None:
        """Appends the nodes of a graph that run.

        `names`: tensor of a graph inside a node -> its name in the model; `within`: the name of the node that contains the
        graph, "" for the model's own graph.
        """
        for given in nodes:
            node = onnx.NodeProto()
            node.CopyFrom(given)
            for ends in (node.input, node.output):
                ends[:] = [names.get(name, name) for name in ends]
            if is_control(node):
                (self._if if node.op_type == "If" else self._loop)(node, names)
            else:
                node.name = self._fresh(node.name or f"{within}_{node.op_type}") if within else node.name
                self._append(node)

    def know(self, name: str, t: onnx.TensorProto) -> None:
        """Records a tensor's type, and its values if there are at most MOST_KNOWN."""
        self.types[name] = helper.make_tensor_type_proto(t.data_type, t.dims)
        if math.prod(t.dims) <= MOST_KNOWN:
            self.data[name] = t

    def _append(self, node: onnx.NodeProto) -> None:
        self.nodes.append(node)
        read = [n for n in node.input if n]
        if any(n not in self.types for n in read):
            return
        try:
            found = inferred_types(self.proto, node, self.types, self.data)
        except ModelError:  # the same error is raised later, when the graph without control flow is checked
            return
        for name, kind in found.items():
            sizes, least = sizes_of(kind), int(kind.tensor_type.elem_type in FLOATS)
            if sizes is None or any(d < least for d in sizes):
                return
            self.types[name] = kind
        few = all(math.prod(sizes_of(kind) or ()) <= MOST_KNOWN for kind in found.values())
        if few and node.op_type in SIZES:
            self._evaluate(node, {n: np.broadcast_to(np.uint8(0), sizes_of(self.types[n]) or ()) for n in read})
        elif few and all(n in self.data for n in read):
            self._evaluate(node, {n: to_array(n, self.data[n]) for n in read})

    def _evaluate(self, node: onnx.NodeProto, feeds: dict[str, np.ndarray]) -> None:
        try:
            arrays = evaluated(node, feeds, opset_version(self.proto))
        except Exception:  # onnx's reference implementation does not have every type and opset
            return
        for name, array in zip(filter(None, node.output), arrays, strict=True):
            self.know(name, numpy_helper.from_array(array))

    def _decision(self, node: onnx.NodeProto, name: str, what: str) -> int:
        """Returns the one number in tensor `name`, which decides which nodes of an If or Loop run. Raises ModelError if it is
        unknown.

        `what`: the tensor's role, for the message.
        """
        found = to_array(name, self.data[name]) if name in self.data else np.zeros(0)
        if found.size != 1 or found.dtype.kind not in "bi":
            text = f"its {what} {name!r} depends on values of inputs; expected one that constants and sizes decide"
            raise ModelError(f"{title(node)}: {text}: {CURE}")
        return int(found.reshape(-1)[0])

    def _if(self, node: onnx.NodeProto, names: Mapping[str, str]) -> None:
        branch = "then_branch" if self._decision(node, node.input[0], "condition") else "else_branch"
        for made, out in zip(self._inlined(node, _graph(node, branch), names), node.output, strict=False):
            self._add("Identity", [made], out)

    def _loop(self, node: onnx.NodeProto, names: Mapping[str, str]) -> None:
        trips, condition, *carried = (*node.input, "")[: max(2, len(node.input))]
        body, n = _graph(node, "body"), len(carried)
        if len(body.input) != 2 + n or len(body.output) < 1 + n:
            got = f"{len(body.input)} inputs and {len(body.output)} outputs"
            raise ModelError(f"{title(node)}: its body has {got}, expected {2 + n} and {1 + n} at least")
        most = self._decision(node, trips, "trip count") if trips else math.inf
        scanned: list[tuple[str, ...]] = []
        while len(scanned) < most and (not condition or self._decision(node, condition, "condition")):
            numbers = (self._stored("iteration", np.int64(len(scanned))), self._stored("runs", np.True_))
            given = dict(zip((v.name for v in body.input), (*numbers, *carried), strict=True))
            condition, *made = self._inlined(node, body, {**names, **given})
            carried, rows = made[:n], made[n:]
            scanned.append(tuple(rows))
        for name, out in zip(carried, node.output, strict=False):
            self._add("Identity", [name], out)
        for i, out in enumerate(node.output[n:]):
            if scanned:
                self._stack([rows[i] for rows in scanned], out)
            elif out:  # without an iteration it has no elements
                kind = body.output[1 + n + i].type.tensor_type
                empty = np.zeros((0, *(d.dim_value for d in kind.shape.dim)), helper.tensor_dtype_to_np_dtype(kind.elem_type))
                self.proto.graph.initializer.append(numpy_helper.from_array(empty, out))

    def _inlined(self, node: onnx.NodeProto, graph: onnx.GraphProto, names: Mapping[str, str]) -> list[str]:
        """Appends the nodes of a graph inside `node`; returns the names of its outputs in the model. Raises ModelError."""
        self.left -= 1 + len(graph.node) + len(graph.output) + graph.ByteSize() // SMALL_BYTES
        if self.left < 0:
            raise ModelError(f"{title(node)}: more than {MOST_NODES} nodes run in the model's control flow: {CURE}")
        inside = {**names}
        for t in graph.initializer:
            inside[t.name] = self._stored(t.name, t)
        inside |= {out: self._fresh(out) for n in graph.node for out in n.output if out}
        self.run(graph.node, inside, node.name or node.op_type)
        return [inside.get(v.name, v.name) for v in graph.output]

    def _stored(self, name: str, value: onnx.TensorProto | np.ndarray | np.generic) -> str:
        """Adds a constant to the model; returns its name, which is `name` or begins with it."""
        t = self.proto.graph.initializer.add()
        t.CopyFrom(value if isinstance(value, onnx.TensorProto) else numpy_helper.from_array(np.asarray(value)))
        t.name = self._fresh(name)
        self.know(t.name, t)
        return t.name

    def _stack(self, parts: Iterable[str], out: str) -> None:
        """Appends nodes that stack the tensors `parts`, one per iteration, along a new first axis into tensor `out`."""
        old = opset_version(self.proto) < 13
        axis = [] if old else [self._stored(f"{out}_axis", np.array([0]))]
        rows = [self._add("Unsqueeze", [name, *axis], self._fresh(out), **({"axes": [0]} if old else {})) for name in parts]
        self._add("Concat", rows, out, axis=0)

    def _add(self, op: str, inputs: list[str], out: str, **attributes: int | list[int]) -> str:
        """Appends a node that makes tensor `out`, unless `out` is ""; returns `out`."""
        if out:
            node = helper.make_node(op, inputs, [out], self._fresh(f"{op}_{out}"))
            node.attribute.extend(helper.make_attribute(name, value) for name, value in attributes.items())
            self._append(node)
        return out

    def _fresh(self, name: str) -> str:
        """Returns a name that is not in use, `name` or one that begins with it, and marks it as taken."""
        found = name
        while found in self.taken:
            found = f"{name}_{next(self.numbers)}"
        self.taken.add(found)
        return found


def _graph(node: onnx.NodeProto, name: str) -> onnx.GraphProto:
    """Returns the graph in the node's attribute `name`, which the schema demands."""
    return next(a.g for a in node.attribute if a.name == name)
