"""Composes runs of Reshape, Transpose, Gather, Split or Slice that leave every pixel in place to one op: an order of
channels.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gpu_runtime.element_maps.strides import MOVES, sources
from gpu_runtime.network import Network, Op, Options, unique
from tactics.problems.gather import GatherProblem
from tactics.problems.problem import MoveProblem
from tactics.problems.protocol import Problem, Shape4

LONGEST_RUN = 16  # moves that may be one order: a shuffle with its split has 4 or 5


@dataclass(frozen=True, slots=True)
class Order:
    """A selection of channels: channel i of a tensor is channel `index[i]` of `source`, in every pixel; `nodes`: its ONNX
    nodes.
    """

    source: str
    index: tuple[int, ...]
    nodes: tuple[str, ...] = ()

    @property
    def is_run(self) -> bool:
        """Whether these are contiguous channels in order, which a reader may take in place."""
        return self.index == tuple(range(self.index[0], self.index[0] + len(self.index)))


def composed(network: Network) -> tuple[Network, Mapping[str, Order]]:
    """Returns (the network where each order is one op, these orders by their output tensor)."""
    runs: dict[str, tuple[str, tuple[Op[Problem], ...]]] = {}  # tensor -> (its source, the moves from there)
    orders: dict[str, Order] = {}
    options = Options(network)
    for op in network.ops:
        if not isinstance(op.problem, MOVES) or op.when:
            continue
        source, before = runs.get(op.inputs[0], (op.inputs[0], ()))
        if len(before) == LONGEST_RUN:
            source, before = op.inputs[0], ()
        run = (*before, op)
        runs[op.output] = source, run
        order = _order(network.tensors[source], source, run)
        if order is None or network.is_fp32(source):
            continue
        if before and order.is_run:  # for example a Slice of a Slice: the last move alone is cheaper than one from the source
            order = _order(op.problem.in_shapes[0], op.inputs[0], (op,))
        elif before:
            problem = GatherProblem(network.tensors[source], index=((), order.index, (), ()))
            options.instead(op, replace(op, problem=problem, inputs=(source,), nodes=order.nodes))
        if order is not None:
            orders[op.output] = order
    return options.network(), orders


def _order(shape: Shape4, source: str, run: Sequence[Op[Problem]]) -> Order | None:
    """Returns the order that a run of moves applies to a tensor, if pixels stay in place; else None."""
    index = _channels(shape, [op.problem for op in run])
    return Order(source, index, unique(name for op in run for name in op.nodes)) if index else None


def _channels(shape: Shape4, problems: Sequence[Problem]) -> tuple[int, ...] | None:
    """Returns the source channel of each channel of the last problem's output, if pixels stay in place; else None."""
    out = problems[-1].out_shape
    if (out[0], *out[2:]) != (shape[0], *shape[2:]):
        return None
    size = out[2] * out[3]
    images, pixels, found = np.arange(out[0])[:, None], np.arange(size), []
    if all(map(_only_channels, problems)):  # then one pixel is enough
        images, pixels = images[:1], pixels[:1]
    for c in range(out[1]):
        at: np.ndarray | None = (images * out[1] + c) * size + pixels
        for problem in reversed(problems):
            at = None if at is None else sources(problem, at)
        if at is None:
            return None
        first = int(at[0, 0]) // size
        if not np.array_equal(at, (images * shape[1] + first) * size + pixels):
            return None
        found.append(first)
    return tuple(found)


def _only_channels(p: Problem) -> bool:
    """Whether the problem's own form shows that pixels stay in place."""
    if isinstance(p, MoveProblem):
        stays = (p.start[1:], p.step[1:], p.out[1:]) == ((0, 0), (1, 1), (p.h, p.w))
        return p.kind == "channels" or (p.kind == "window" and stays)
    return isinstance(p, GatherProblem) and p.perm == (0, 1, 2, 3) and not (p.index[0] or p.index[2] or p.index[3])
