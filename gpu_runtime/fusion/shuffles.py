"""Nodes whose elements only change places between channels and blocks of pixels: depth-to-space, space-to-depth, shuffles."""

from dataclasses import dataclass

import onnx_ir as ir

from gpu_runtime.frontend.queries import attribute, operand, row, shape_of, single_reader
from gpu_runtime.fusion.layers import Layer, followed


@dataclass(frozen=True, slots=True)
class Shuffle:
    """`kind`: d2s_dcr, d2s_crd, s2d_dcr or s2d_crd by blocks of `size`, or channels (a shuffle of `size` groups)."""

    kind: str
    size: int
    nodes: tuple[ir.Node, ...]

    @property
    def source(self) -> ir.Value:
        return operand(self.nodes[0])

    @property
    def output(self) -> ir.Value:
        return self.nodes[-1].outputs[0]


# Reshape to six dimensions, Transpose, Reshape: kind -> (where c and the two block sizes stand in the six, the permutation).
SIX = {
    "d2s_crd": ((1, 2, 3), (0, 1, 4, 2, 5, 3)),
    "d2s_dcr": ((3, 1, 2), (0, 3, 4, 1, 5, 2)),
    "s2d_crd": ((1, 3, 5), (0, 1, 3, 5, 2, 4)),
    "s2d_dcr": ((1, 3, 5), (0, 3, 5, 1, 2, 4)),
}
OPERATORS = {"DepthToSpace": "d2s", "SpaceToDepth": "s2d"}


def shuffle_at(node: ir.Node) -> Shuffle | None:
    """The shuffle that begins at `node`: DepthToSpace, SpaceToDepth, or one written as Reshape, Transpose, Reshape."""
    if node.op_type not in (*OPERATORS, "Reshape") or len(shape_of(operand(node))) != 4:
        return None
    if node.op_type in OPERATORS:
        kind = f"{OPERATORS[node.op_type]}_{attribute(node, 'mode', 'DCR').lower()}"
        return Shuffle(kind, attribute(node, "blocksize"), (node,))
    if not (nodes := row(node, "Reshape", "Transpose", "Reshape")):
        return None
    _, permute, back = nodes
    x, apart, y = (shape_of(v) for v in (operand(node), node.outputs[0], back.outputs[0]))
    perm = attribute(permute, "perm")
    if perm in ((0, 2, 1, 3), (0, 2, 1, 3, 4)) and x == y and apart[0] == x[0] and apart[1] * apart[2] == x[1]:
        return Shuffle("channels", apart[1], nodes)
    kind = next((kind for kind, (_, order) in SIX.items() if order == perm), "")
    return Shuffle(kind, apart[SIX[kind][0][1]], nodes) if kind and _is_of_blocks(kind, x, apart, y) else None


def _is_of_blocks(kind: str, x: tuple[int, ...], apart: tuple[int, ...], y: tuple[int, ...]) -> bool:
    """Whether six dimensions `apart`, permuted as the kind says, are depth-to-space or space-to-depth of x."""
    (n, c, h, w), (k, b, b2) = x, (apart[i] for i in SIX[kind][0])
    if apart[0] != n or b != b2:
        return False
    if kind.startswith("d2s"):
        return apart[4:] == (h, w) and y == (n, k, h * b, w * b)
    return (k, apart[2], apart[4]) == (c, h // b, w // b) and y == (n, c * b * b, h // b, w // b)


def with_depth_to_space(layer: Layer) -> Layer:
    """A convolution with the depth-to-space that alone reads its output; the same one where none does."""
    reader = single_reader(layer.output)
    shuffle = None if reader is None or layer.op != "Conv" or layer.d2s > 1 else shuffle_at(reader)
    if shuffle is None or not shuffle.kind.startswith("d2s"):
        return layer
    if attribute(layer.node, "group", 1) != 1 and (shuffle.kind != "d2s_crd" or layer.weights["w"].shape[1] == 1):
        return layer  # only crd keeps the channels of one group together; depthwise kernels store as they compute
    return followed(layer, shuffle.nodes, d2s=shuffle.size, d2s_mode=shuffle.kind[4:])
