"""Recognises nodes that move elements between channels and blocks of pixels: depth-to-space, space-to-depth, shuffles."""

from dataclasses import replace

from gpu_runtime.frontend.queries import Node, attribute, name_of, operand, row, shape_of
from gpu_runtime.lowering.units import Unit, of_nodes

# Reshape to six dimensions, Transpose, Reshape: kind -> (where c and the two block sizes stand in the six, the permutation).
SIX = {
    "d2s_crd": ((1, 2, 3), (0, 1, 4, 2, 5, 3)),
    "d2s_dcr": ((3, 1, 2), (0, 3, 4, 1, 5, 2)),
    "s2d_crd": ((1, 3, 5), (0, 1, 3, 5, 2, 4)),
    "s2d_dcr": ((1, 3, 5), (0, 3, 5, 1, 2, 4)),
}
OPERATORS = {"DepthToSpace": "d2s", "SpaceToDepth": "s2d"}


def shuffle_at(node: Node) -> Unit | None:
    """Returns the shuffle that begins at `node`, else None: DepthToSpace, SpaceToDepth, or one spelled as Reshape, Transpose,
    Reshape. Its `op` is d2s_dcr, d2s_crd, s2d_dcr or s2d_crd for blocks, or channels (a shuffle of groups)."""
    if node.op_type not in (*OPERATORS, "Reshape") or len(shape_of(operand(node))) != 4:
        return None
    if node.op_type in OPERATORS:
        kind = f"{OPERATORS[node.op_type]}_{attribute(node, 'mode', 'DCR').lower()}"
        return _shuffle(kind, attribute(node, "blocksize"), (node,))
    if not (nodes := row(node, "Reshape", "Transpose", "Reshape")):
        return None
    _, permute, back = nodes
    x, apart, y = (shape_of(v) for v in (operand(node), node.outputs[0], back.outputs[0]))
    perm = attribute(permute, "perm")
    if perm in ((0, 2, 1, 3), (0, 2, 1, 3, 4)) and x == y and apart[0] == x[0] and apart[1] * apart[2] == x[1]:
        return _shuffle("channels", apart[1], nodes)
    kind = next((kind for kind, (_, order) in SIX.items() if order == perm), "")
    return _shuffle(kind, apart[SIX[kind][0][1]], nodes) if kind and _is_of_blocks(kind, x, apart, y) else None


def _shuffle(kind: str, size: int, nodes: tuple[Node, ...]) -> Unit:
    unit = of_nodes(kind, nodes[0], nodes, operand(nodes[0]))
    return replace(unit, label=name_of(nodes[len(nodes) // 2]), block=size)


def _is_of_blocks(kind: str, x: tuple[int, ...], apart: tuple[int, ...], y: tuple[int, ...]) -> bool:
    """Whether six dimensions `apart`, permuted as the kind says, are depth-to-space or space-to-depth of x."""
    (n, c, h, w), (k, b, b2) = x, (apart[i] for i in SIX[kind][0])
    if apart[0] != n or b != b2:
        return False
    if kind.startswith("d2s"):
        return apart[4:] == (h, w) and y == (n, k, h * b, w * b)
    return (k, apart[2], apart[4]) == (c, h // b, w // b) and y == (n, c * b * b, h // b, w // b)
