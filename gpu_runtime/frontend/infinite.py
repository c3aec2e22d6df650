"""Where a model may hold -infinity, as masks of transformers do: tensors of which no reader makes NaN or +infinity."""

from collections.abc import Mapping, Sequence

import onnx

from gpu_runtime.frontend.load import title

MOVES = frozenset(
    "Identity Cast Reshape Unsqueeze Squeeze Flatten Transpose Slice Gather Expand Tile Concat Split Trilu".split()
)
ENDS = frozenset("Equal Less LessOrEqual Greater GreaterOrEqual IsInf Where Max Min".split())
SOFTMAX = frozenset("Softmax LogSoftmax ReduceLogSumExp ReduceMax Exp".split())  # and the parts that one is spelled in
EXPECTED = "only sums before a Softmax, comparisons, Where, Max and Min may read -infinity"
Readers = Mapping[str, Sequence[tuple[onnx.NodeProto, int]]]


def readers_of(graph: onnx.GraphProto) -> Readers:
    """Tensor -> (node, number of the input) of each that reads it."""
    found: dict[str, list[tuple[onnx.NodeProto, int]]] = {}
    for node in graph.node:
        for i, name in enumerate(node.input):
            found.setdefault(name, []).append((node, i))
    return found


def offender(tensor: str, readers: Readers) -> str:
    """The first node that -infinity in a stored tensor or an input must not reach, or an empty string."""
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
