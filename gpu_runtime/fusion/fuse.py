"""Fuses a network with one op for each node: each op absorbs the ops that its kernel can do in the same launch.

Each pass takes a network and gives one. Their order is part of the plan: convolutions claim the ops that they wait for before
chains do, and moves that are alike are joined last, when each convolution has its own.
"""

import numpy as np

from gpu_runtime.frontend.importer import Imported
from gpu_runtime.frontend.queries import name_of, operand, shape_of
from gpu_runtime.fusion import branches, concats, epilogues, moves, prologues, tables
from gpu_runtime.fusion.common_pattern import common
from gpu_runtime.fusion.rearranged import rearrange
from gpu_runtime.fusion.rounded import rounded
from gpu_runtime.lowering.lower import lower
from gpu_runtime.network import Network, named_shortly


def fuse(network: Network) -> Network:
    """Returns the network with every fusion that always pays, and options where the plan has a choice; weights are FP32. Raises
    ModelError if folding makes weights that FP32 cannot hold.
    """
    fused = rounded(branches.offer(_apart(network)))
    return named_shortly(moves.windows(rearrange(moves.once(fused))))


def sums(imported: Imported) -> list[branches.Sum]:
    """Lists the sums of branches, Convs over images, that may become one convolution each. Raises ModelError."""
    graph = imported.model.graph
    convs = {name_of(node) for node in graph if node.op_type == "Conv" and len(shape_of(operand(node))) == 4}
    return [s for s in branches.sums(_apart(lower(imported))) if all(b.conv in convs for b in s.branches)]


def common_masks(imported: Imported) -> dict[str, np.ndarray]:
    """Returns node -> mask of the weights that pruning to 2:4 keeps, for branches that may become one convolution
    (common_pattern). Raises ModelError.
    """
    return {name: mask for s in sums(imported) for name, mask in common(s, imported.loaded.stored).masks.items()}


def _apart(network: Network) -> Network:
    """Returns the network after all passes but the one that offers sums of branches."""
    return prologues.offer(concats.into_convolutions(epilogues.fused(moves.direct(tables.offer(network)))))
