"""Moves permutations and selections of channels, however the model writes them, into the columns of the convolutions that read
them.

An order of channels costs one kernel at most, or none: a convolution reads the whole tensor, its columns in that order, with
columns of zeros for channels that were not selected (a grouped one becomes dense); a depthwise one, a pool or a resize computes
in the tensor's own order; a Concat of orders joins the tensors themselves, and is an order of the result.

Zeros cost products and bytes: less than a copy where launches are short, more where images are large. So separate or in the
weights is an option of one fusion group for all orders that depend on each other, and the plan chooses. A third option, where
it differs: ops that compute channel by channel may also read only some of the channels, and then compute all of them.

An example. x has channels a b c d; a shuffle of two groups makes y = a c b d of it, `index` 0 2 1 3. A 1x1 convolution of y
whose row is [p q r s] sums p*a + q*c + r*b + s*d: over x, its row is [p r q s], column index[i] of which is column i of the
other. The second half of y is b d, index 1 3; a convolution of it whose row is [p q] has the row [0 p 0 q] over x. A depthwise
convolution of that half with a factor for each of b and d, [p q], is one of x with the factors [0 p 0 q], and its output is
again channels 1 3 of four.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from cuda_kernels import sparse24
from gpu_runtime.element_maps.orders import Order, composed
from gpu_runtime.network import Network, Op, computes, unique
from gpu_runtime.rewrites import drafts
from tactics.problems.gather import GatherProblem, ResizeProblem
from tactics.problems.problem import ConcatProblem, ConvProblem, MoveProblem, PoolProblem
from tactics.problems.protocol import Feature, Problem

IN_WEIGHTS, DEPTHWISE_TOO = "in weights", "in weights, depthwise too"


def offer(network: Network) -> Network:
    """Returns the network in which each order of channels is one op, and with the alternative without this op if a convolution
    can take the order into its weights.
    """
    network, orders = composed(network)
    if all(order.is_run for order in orders.values()):
        return network
    forms = {IN_WEIGHTS: _Weights(network, orders).form(), DEPTHWISE_TOO: _Weights(network, orders, depthwise=True).form()}
    return drafts.offer(network, forms, "channels of", convolutions=True)


def of_channels(p: Problem, channels: int) -> Problem | None:
    """Returns the same pool, resize or window of rows and columns with this number of channels; None for problems that mix
    channels.
    """
    if isinstance(p, (PoolProblem, ResizeProblem)):
        return replace(p, c=channels)
    if isinstance(p, MoveProblem) and p.kind in ("window", "upsample") and (p.start[0], p.step[0], p.out[0]) == (0, 1, p.c):
        return replace(p, c=channels, out=(channels, *p.out[1:]))
    return None


class _Weights:
    """Builds the form of a network without orders of channels, op by op.

    `known`: a tensor that need not exist -> its Order, a selection of channels of a tensor that does. `instead`: an op that
    then does not exist -> the ops in its place. `depthwise`: whether ops that compute channel by channel may compute more
    channels than are read.
    """

    def __init__(self, network: Network, orders: Mapping[str, Order], *, depthwise: bool = False) -> None:
        self.network, self.orders, self.depthwise = network, orders, depthwise
        self.tensors = dict(network.tensors)
        self.known: dict[str, Order] = {}
        self.instead: dict[str, Sequence[Op[Problem]]] = {}
        for op in network.ops:
            order = self.known.get(op.inputs[0]) if op.inputs else None
            if op.output in orders:
                self._pick(op)
            elif computes(op, ConcatProblem):
                self._join(op)
            elif order is not None and computes(op, ConvProblem):
                self._convolve(op, order)
            elif order is not None and (problem := of_channels(op.problem, self.tensors[order.source][1])):
                self._as_stored(op, order, problem, order.index, op.weights)

    def form(self) -> drafts.Draft:
        ops = [(i, new) for i, op in enumerate(self.network.ops) for new in self.instead.get(op.name, (op,))]
        return drafts.completed(self.network, ops, {})

    def _is(self, op: Op[Problem], order: Order, new: Sequence[Op[Problem]] = ()) -> None:
        """Records that the op's output is `order`, once the ops `new` have made its source; adds a copy if some reader needs
        the output itself.
        """
        self.known[op.output] = order
        readers = self.network.readers[op.output]
        if op.output in self.network.output_names or not all(self._takes(reader, op.output) for reader in readers):
            problem = GatherProblem(self.tensors[order.source], index=((), order.index, (), ()))
            new = *new, Op(f"{op.name} (in order)", problem, (order.source,), op.output, nodes=op.nodes)
            del self.known[op.output]  # all readers read the copy
        self.instead[op.name] = new

    def _takes(self, op: Op[Problem], tensor: str) -> bool:
        """Whether the op can read the source of an order instead of the tensor."""
        if self.network.is_fp32(op.output):  # its replacement would have to be FP32 as well
            return False
        if computes(op, ConvProblem):
            return self._convolution_takes(op, tensor)
        if of_channels(op.problem, 1):
            return self._all_or_more(op)
        return not op.when and (op.output in self.orders or (computes(op, ConcatProblem) and op.problem.axis == 1))

    def _convolution_takes(self, op: Op[ConvProblem], tensor: str) -> bool:
        p, index = op.problem, self.known[tensor].index
        once = op.inputs.count(tensor) == 1 and op.inputs[0] == tensor and len(set(index)) == len(index)
        if not once or not op.layer or p.needs & {Feature.MAX_POOL, Feature.SCALED_INPUT}:
            return False
        return not 1 < p.groups == p.c or (self._all_or_more(op) and Feature.RESIDUAL not in p.needs)

    def _all_or_more(self, op: Op[Problem]) -> bool:
        """Whether an op that computes channel by channel may compute in the order in which its input is stored."""
        order = self.known[op.inputs[0]]
        return not op.when and (self.depthwise or len(order.index) == self.tensors[order.source][1])

    def _pick(self, op: Op[Problem]) -> None:
        order, before = self.orders[op.output], self.known.get(op.inputs[0])
        if before is not None:
            picked = tuple(before.index[i] for i in order.index)
            self._is(op, Order(before.source, picked, (*before.nodes, *order.nodes)))
        elif not order.is_run:
            self._is(op, order)

    def _join(self, op: Op[ConcatProblem]) -> None:
        """Rewrites a Concat of which some inputs are orders: it joins the sources of its inputs, each once, and its output is
        an order of the result.
        """
        p = op.problem
        if p.axis != 1 or op.when or not any(t in self.known for t in op.inputs):
            return
        pieces = [self.known.get(t) or Order(t, tuple(range(c))) for t, c in zip(op.inputs, p.sizes, strict=True)]
        sources = unique(piece.source for piece in pieces)
        sizes = tuple(self.tensors[s][1] for s in sources)
        first = dict(zip(sources, np.cumsum((0, *sizes)).tolist(), strict=False))
        index = tuple(first[piece.source] + i for piece in pieces for i in piece.index)
        nodes = unique((*(name for piece in pieces for name in piece.nodes), *op.nodes))
        if len(sources) == 1:
            self._is(op, Order(sources[0], index, nodes))
            return
        whole = f"{op.output} (all {sum(sizes)} channels)"
        new = Op(f"{op.name} (all channels)", replace(p, sizes=sizes), sources, whole, nodes=op.nodes)
        self.tensors[whole] = new.problem.out_shape
        self._is(op, Order(whole, index, nodes), [new])

    def _convolve(self, op: Op[ConvProblem], order: Order) -> None:
        p, weights = op.problem, dict(op.weights)
        channels, index = self.tensors[order.source][1], np.array(order.index)
        if 1 < p.groups == p.c:  # it computes in the source's order
            rows = (index[:, None] * (p.k // p.c) + np.arange(p.k // p.c)).reshape(-1).tolist()
            wider = replace(p, c=channels, k=channels * (p.k // p.c), groups=channels)
            spread = {name: drafts.spread(array, rows, wider.k) for name, array in weights.items()}
            self._as_stored(op, order, wider, tuple(rows), spread)
            return
        of_groups = zip(np.split(weights["w"], p.groups), index.reshape(p.groups, -1).tolist(), strict=True)
        w = np.concatenate([drafts.spread(own, columns, channels, 1) for own, columns in of_groups])
        dense = replace(p, c=channels, groups=1, sparse24=p.sparse24 and channels % 4 == 0 and sparse24.is_sparse(w))
        self.instead[op.name] = [_over_source(op, order, dense, {**weights, "w": w})]

    def _as_stored(
        self, op: Op[Problem], order: Order, problem: Problem, index: tuple[int, ...], weights: Mapping[str, np.ndarray]
    ) -> None:
        """Makes an op that computes channel by channel compute in its input's order, on all channels of its source.

        The op's own output channel i is channel `index[i]` of the new output.
        """
        made = f"{op.output} (as stored)"
        self.tensors[made] = problem.out_shape
        new = replace(_over_source(op, order, problem, weights), output=made)
        self._is(op, Order(made, index, (*order.nodes, *op.nodes)), [new])


def _over_source(op: Op[Problem], order: Order, problem: Problem, weights: Mapping[str, np.ndarray]) -> Op[Problem]:
    """Returns the op that reads an order's source instead of the order."""
    return replace(
        op,
        name=f"{order.nodes[-1]} + {op.name}",
        problem=problem,
        weights=weights,
        nodes=unique((*order.nodes, *op.nodes)),
        inputs=(order.source, *op.inputs[1:]),
    )
