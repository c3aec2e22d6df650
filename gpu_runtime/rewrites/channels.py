"""Channels that trade places or are picked, however that is written: into the columns of the convolutions that read them.

A run of Reshape, Transpose, Gather, Split or Slice may leave every pixel where it is and give some channels of a tensor in
another order: a channel shuffle, the even half of one. Such an order costs one kernel at most, or none: a convolution reads the
whole tensor, its columns in that order, with columns of zeros for channels that were not picked (a grouped one becomes dense);
a depthwise one, a pool or a resize computes in the tensor's own order; a Concat of orders joins the tensors themselves, and is
an order of that.

Zeros are products and bytes for nothing: less than a copy where launches are short, more where images are large. So apart or
in the weights is an option of one fusion group for all orders that hang together, and the plan chooses. A third option, where
it differs: what computes channel by channel may read only some of the channels too, and then computes all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from cuda_kernels import sparse24
from gpu_runtime.network import Network, Op
from tactics.problems.gather import GatherProblem, ResizeProblem, ViewProblem
from tactics.problems.problem import ConcatProblem, ConvProblem, MoveProblem, PoolProblem, Problem
from tactics.problems.protocol import Feature

MOVES = (ViewProblem, GatherProblem, MoveProblem)
APART, IN_WEIGHTS, DEPTHWISE_TOO = "apart", "in weights", "in weights, depthwise too"


LONGEST_RUN = 16  # moves that may be one order: a shuffle and what splits it are 4 or 5


@dataclass(frozen=True, slots=True)
class Order:
    """Channel i of a tensor is channel `index[i]` of `source`, in every pixel; `nodes`: the ONNX nodes that say so."""

    source: str
    index: tuple[int, ...]
    nodes: tuple[str, ...] = ()


def offer(network: Network) -> Network:
    """The network with each order as one op and, where a convolution can take it, as the alternative to have none."""
    network, orders = _composed(network)
    if all(_is_run(order.index) for order in orders.values()):
        return network
    ways = {IN_WEIGHTS: _Weights(network, orders, depthwise=False), DEPTHWISE_TOO: _Weights(network, orders, depthwise=True)}
    return _with_options(network, ways)


def _is_run(index: tuple[int, ...]) -> bool:
    """Whether these are neighbouring channels in order: what inplace.py reads where it lies."""
    return index == tuple(range(index[0], index[0] + len(index)))


# ---- runs of moves that are an order


def _composed(network: Network) -> tuple[Network, dict[str, Order]]:
    """(the network where each order is one op, those orders by the tensor they give)."""
    runs: dict[str, tuple[str, tuple[Op, ...]]] = {}  # tensor -> (what it was moved from, the ops that did)
    orders, ops = {}, []
    for op in network.ops:
        if isinstance(op.problem, MOVES) and not op.when:
            source, before = runs.get(op.inputs[0], (op.inputs[0], ()))
            if len(before) == LONGEST_RUN:
                source, before = op.inputs[0], ()
            run = runs[op.output] = source, (*before, op)
            index = _channels(network.tensors[source], [o.problem for o in run[1]])
            if index is not None and not network.is_fp32(source):
                nodes = tuple(dict.fromkeys(name for o in run[1] for name in o.nodes))
                orders[op.output] = Order(source, index, nodes)
                if before and not _is_run(index):
                    problem = GatherProblem(network.tensors[source], index=((), index, (), ()))
                    op = replace(op, problem=problem, inputs=(source,), nodes=nodes)
                elif before:
                    orders[op.output] = Order(op.inputs[0], _channels(op.problem.in_shapes[0], [op.problem]) or (), op.nodes)
        ops.append(op)
    orders = {t: order for t, order in orders.items() if order.index}
    return (_reached(replace(network, ops=tuple(ops))) if orders else network), orders


def _channels(shape, problems: list[Problem]) -> tuple[int, ...] | None:
    """Which channel of a tensor of that shape each one of the last problem's output is, if pixels stay where they are."""
    out = problems[-1].out_shape
    if (out[0], *out[2:]) != (shape[0], *shape[2:]):
        return None
    size = out[2] * out[3]
    images, pixels, found = np.arange(out[0])[:, None], np.arange(size), []
    if all(map(_only_channels, problems)):  # then one pixel speaks for all
        images, pixels = images[:1], pixels[:1]
    for c in range(out[1]):
        at = (images * out[1] + c) * size + pixels
        for problem in reversed(problems):
            at = None if at is None else _sources(problem, at)
        if at is None:
            return None
        first = int(at[0, 0]) // size
        if not np.array_equal(at, (images * shape[1] + first) * size + pixels):
            return None
        found.append(first)
    return tuple(found)


def _only_channels(p: Problem) -> bool:
    """Whether the problem's own form says that pixels stay where they are."""
    if isinstance(p, MoveProblem):
        stays = (p.start[1:], p.step[1:], p.out[1:]) == ((0, 0), (1, 1), (p.h, p.w))
        return p.kind == "channels" or (p.kind == "window" and stays)
    return isinstance(p, GatherProblem) and p.perm == (0, 1, 2, 3) and not (p.index[0] or p.index[2] or p.index[3])


def _sources(problem: Problem, at: np.ndarray) -> np.ndarray | None:
    """Row-major input positions of row-major output positions; None where one has none."""
    if isinstance(problem, ViewProblem):
        return at
    (shape,), where = problem.in_shapes, np.unravel_index(at, problem.out_shape)
    if isinstance(problem, MoveProblem):
        where = where[0], *problem.source(*where[1:])
    else:
        axes = [where[0]] * 4
        for a, table, i in zip(problem.perm, problem.index, where, strict=True):
            axes[a] = np.asarray(table)[i] if table else i
        where = tuple(axes)
    if any(np.any((i < 0) | (i >= size)) for i, size in zip(where, shape, strict=True)):
        return None
    return np.ravel_multi_index(where, shape)


def _reached(network: Network) -> Network:
    """Without moves that nothing reads."""
    ops, read = [], {t.name for t in network.outputs}
    for op in reversed(network.ops):
        if not isinstance(op.problem, MOVES) or op.output in read:
            ops.append(op)
            read.update(op.inputs)
    used = {t.name for t in network.inputs} | {t for op in ops for t in (*op.inputs, op.output)}
    return replace(network, ops=tuple(reversed(ops)), tensors={t: s for t, s in network.tensors.items() if t in used})


# ---- orders in the weights


def _of_channels(p: Problem, channels: int) -> Problem | None:
    """The same pool, resize or window of rows and columns for so many channels; None for what mixes channels."""
    if isinstance(p, (PoolProblem, ResizeProblem)):
        return replace(p, c=channels)
    if isinstance(p, MoveProblem) and p.kind in ("window", "upsample") and (p.start[0], p.step[0], p.out[0]) == (0, 1, p.c):
        return replace(p, c=channels, out=(channels, *p.out[1:]))
    return None


def _with_options(network: Network, ways: Mapping[str, _Weights]) -> Network:
    """The network with an option for each way that replaces a convolution of a component; `ways`: the last replaces most."""
    most = list(ways.values())[-1]
    options: dict[str, dict[str, None]] = {}  # component -> the options in which a convolution is replaced
    for op in network.ops:
        for option, way in ways.items():
            if op.layer and op.name in way.apart:
                options.setdefault(most.component(op), {})[option] = None
    alike = {c for c in options if all(
        _same(*(way.instead.get(op.name) for way in ways.values())) for op in network.ops if most.component(op) == c
    )}  # fmt: skip
    options = {c: (IN_WEIGHTS,) if c in alike else tuple(found) for c, found in options.items()}
    ops, tensors, named = [], dict(network.tensors), set()
    for op in network.ops:
        component = most.component(op)
        if component not in options:
            ops.append(op)
            continue
        group, asked, new = f"channels of {component}", options[component], {}
        kept = (APART, *(option for option in asked if op.name not in ways[option].apart))
        if len(kept) == 1 + len(asked):
            ops.append(op)
            continue
        ops.append(replace(op, when=(*op.when, *((group, option) for option in kept))))
        for option in asked:
            for made in ways[option].instead.get(op.name, ()):
                new.setdefault(_key(made), []).append((option, made))
        for found in new.values():
            option, made = found[0]
            name = made.name if made.name not in named else f"{made.name} ({option})"
            named.add(name)
            ops.append(replace(made, name=name, when=(*made.when, *((group, option) for option, _ in found))))
            tensors |= dict(zip((*made.inputs, made.output), (*made.problem.in_shapes, made.problem.out_shape), strict=True))
    used = {t.name for t in network.inputs} | {t for op in ops for t in (*op.inputs, op.output)}
    groups = tuple((f"channels of {c}", (APART, *asked)) for c, asked in options.items())
    return replace(
        network, ops=tuple(ops), tensors={t: s for t, s in tensors.items() if t in used}, groups=(*network.groups, *groups)
    )  # fmt: skip


def _key(op: Op):
    """What two ops that are one have in common."""
    return op.inputs, op.output, op.problem, op.nodes, tuple((name, a.tobytes()) for name, a in op.weights.items())


def _same(a: list[Op] | None, b: list[Op] | None) -> bool:
    return (a is None) == (b is None) and (a is None or list(map(_key, a)) == list(map(_key, b)))


class _Weights:
    """What replaces a network's orders, op by op.

    `known`: tensor that need not exist -> the Order it is, of one that does. Orders that hang together are a component, named
    by one of its tensors. `apart`: op that then does not exist -> its component; `instead`: op -> what does in its place.
    `depthwise`: whether what computes channel by channel may compute more of them than are read.
    """

    def __init__(self, network: Network, orders: Mapping[str, Order], depthwise: bool):
        self.orders, self.depthwise = orders, depthwise
        self.tensors = dict(network.tensors)
        self.outputs = {t.name for t in network.outputs}
        self.single = {t for t in network.tensors if network.is_fp32(t)}
        self.readers: dict[str, list[Op]] = {}
        for op in network.ops:
            for tensor in op.inputs:
                self.readers.setdefault(tensor, []).append(op)
        self.known: dict[str, Order] = {}
        self.parent: dict[str, str] = {}
        self.apart: dict[str, str] = {}
        self.instead: dict[str, list[Op]] = {}
        for op in network.ops:
            if op.output in orders:
                self._pick(op)
            elif isinstance(op.problem, ConcatProblem):
                self._join(op)
            elif isinstance(op.problem, ConvProblem) and op.inputs[0] in self.known:
                self._convolve(op)
            elif op.inputs and op.inputs[0] in self.known and _of_channels(op.problem, 1):
                order = self.known[op.inputs[0]]
                self._as_stored(op, _of_channels(op.problem, self.tensors[order.source][1]), np.array(order.index), op.weights)

    def component(self, op: Op) -> str | None:
        """Of an op that is replaced."""
        return self._root(self.apart[op.name]) if op.name in self.apart else None

    def _root(self, tensor: str) -> str:
        while tensor in self.parent:
            tensor = self.parent[tensor]
        return tensor

    def _replace(self, op: Op, *new: Op, made_of: tuple[str, ...] = ()) -> None:
        """`new` instead of `op`, in the component of all orders in `made_of`, the op's output among them."""
        first, *others = {self._root(t): None for t in made_of}
        self.parent.update((other, first) for other in others)
        self.apart[op.name], self.instead[op.name] = first, list(new)

    def _is(self, op: Op, order: Order, made_of: tuple[str, ...], *new: Op) -> None:
        """The op's output is `order`, once `new` has made its source; and a copy where somebody wants the tensor itself."""
        self.known[op.output] = order
        if op.output in self.outputs or not all(self._takes(reader, op.output) for reader in self.readers.get(op.output, ())):
            problem = GatherProblem(self.tensors[order.source], index=((), order.index, (), ()))
            new = *new, Op(f"{op.name} (in order)", problem, (order.source,), op.output, nodes=op.nodes)
            del self.known[op.output]  # all read the copy
        self._replace(op, *new, made_of=(op.output, *made_of))

    def _takes(self, op: Op, tensor: str) -> bool:
        """Whether the op can do without the tensor, an order."""
        p, index = op.problem, self.known[tensor].index
        if op.output in self.single:  # a tensor instead of it would have to be FP32 as well
            return False
        if isinstance(p, ConvProblem):
            once = op.inputs.count(tensor) == 1 and op.inputs[0] == tensor and len(set(index)) == len(index)
            if not once or not op.layer or p.needs & {Feature.MAX_POOL, Feature.SCALED_INPUT}:
                return False
            return not 1 < p.groups == p.c or (self._all_or_more(op) and not p.epilogue.residual)
        if _of_channels(p, 1):
            return self._all_or_more(op)
        return not op.when and (op.output in self.orders or (isinstance(p, ConcatProblem) and p.axis == 1))

    def _all_or_more(self, op: Op) -> bool:
        """Whether an op that computes channel by channel may compute in the order in which its input is stored."""
        order = self.known[op.inputs[0]]
        return not op.when and (self.depthwise or len(order.index) == self.tensors[order.source][1])

    def _pick(self, op: Op) -> None:
        order, before = self.orders[op.output], self.known.get(op.inputs[0])
        if before is not None:
            picked = tuple(before.index[i] for i in order.index)
            self._is(op, Order(before.source, picked, (*before.nodes, *order.nodes)), (op.inputs[0],))
        elif not _is_run(order.index):
            self._is(op, order, ())

    def _join(self, op: Op) -> None:
        """A Concat with orders among its pieces: the pieces' sources, each once, joined; and an order of that."""
        p, made_of = op.problem, tuple(t for t in op.inputs if t in self.known)
        if p.axis != 1 or op.when or not made_of:
            return
        pieces = [self.known.get(t) or Order(t, tuple(range(c))) for t, c in zip(op.inputs, p.sizes, strict=True)]
        sources = tuple(dict.fromkeys(piece.source for piece in pieces))
        sizes = tuple(self.tensors[s][1] for s in sources)
        first = dict(zip(sources, np.cumsum((0, *sizes)).tolist(), strict=False))
        index = tuple(first[piece.source] + i for piece in pieces for i in piece.index)
        nodes = tuple(dict.fromkeys((*(name for piece in pieces for name in piece.nodes), *op.nodes)))
        whole, new = sources[0], ()
        if len(sources) > 1:
            whole = f"{op.output} (all {sum(sizes)} channels)"
            new = (Op(f"{op.name} (all channels)", replace(p, sizes=sizes), sources, whole, nodes=op.nodes),)
            self.tensors[whole] = new[0].problem.out_shape
        self._is(op, Order(whole, index, nodes), made_of, *new)

    def _convolve(self, op: Op) -> None:
        tensor, p, weights = op.inputs[0], op.problem, dict(op.weights)
        order = self.known[tensor]
        channels, index = self.tensors[order.source][1], np.array(order.index)
        if 1 < p.groups == p.c:  # it computes in the source's order
            rows = (index[:, None] * (p.k // p.c) + np.arange(p.k // p.c)).reshape(-1)
            problem = replace(p, c=channels, k=channels * (p.k // p.c), groups=channels)
            for name, given in op.weights.items():
                weights[name] = np.zeros((problem.k, *given.shape[1:]), np.float32)
                weights[name][rows] = given
            self._as_stored(op, problem, rows, weights)
            return
        columns, rows = index.reshape(p.groups, -1), p.k // p.groups
        w = np.zeros((p.k, channels, p.r, p.s), np.float32)
        for group in range(p.groups):
            own = slice(group * rows, (group + 1) * rows)
            w[own, columns[group]] = weights["w"][own]
        weights["w"] = w
        fits = p.sparse24 and channels % 4 == 0 and bool(sparse24.fits(w).all())
        problem = replace(p, c=channels, groups=1, sparse24=fits)
        self._replace(op, replace(op, problem=problem, weights=weights, **self._about(op)), made_of=(tensor,))

    def _about(self, op: Op) -> dict:
        """Name, nodes and inputs of what reads an order's source instead of the order."""
        order = self.known[op.inputs[0]]
        return {"name": f"{order.nodes[-1]} + {op.name}", "nodes": tuple(dict.fromkeys((*order.nodes, *op.nodes))),
                "inputs": (order.source, *op.inputs[1:])}  # fmt: skip

    def _as_stored(self, op: Op, problem: Problem, index: np.ndarray, weights: Mapping[str, np.ndarray]) -> None:
        """An op that computes channel by channel computes in its input's order: channel i of it is channel index[i] of that."""
        order, made = self.known[op.inputs[0]], f"{op.output} (as stored)"
        self.tensors[made] = problem.out_shape
        new = replace(op, problem=problem, output=made, weights=weights, **self._about(op))
        self._is(op, Order(made, tuple(index.tolist()), (*order.nodes, *op.nodes)), (op.inputs[0],), new)
