"""Layers over onnx-ir -> our own records: 4-D problems, named tensors, FP16-rounded weights. No ONNX after this.

Every tensor is NCHW: [N,C] is [N,C,1,1], [N,C,L] is [N,C,1,L]. Reshape, Flatten, Squeeze, Unsqueeze and Transpose that
leave that shape alone are no operations, only names; Flatten before a Gemm becomes the kernel size of a convolution; any
other is a view, which linear memory takes as it is, or a gather.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace

import numpy as np

from gpu_runtime.errors import ModelError
from gpu_runtime.frontend.queries import Node, Value, attribute, is_read, name_of, operand, shape_of, type_of
from gpu_runtime.fusion.fuse import Fused
from gpu_runtime.fusion.layers import SEVERAL, Layer
from gpu_runtime.lowering import moves, rare_operators, reductions
from gpu_runtime.lowering.convolutions import around, conv, conv_transpose, last, matmul, pair, window
from gpu_runtime.lowering.moves import Problems, Refused, Shapes, Weights, as_shape4, compose, nchw, runs_of
from gpu_runtime.lowering.rearranged import rearrange
from gpu_runtime.network import Network, Op, Options, TensorInfo, Type, computes, joined, named_shortly, unique
from tactics.problems.convolution import with_epilogue
from tactics.problems.gather import GatherProblem, ViewProblem
from tactics.problems.library_problem import EXACT, FLOAT, LibraryProblem
from tactics.problems.operators import VIEWS
from tactics.problems.problem import ConvProblem, MoveProblem, PointwiseProblem, PoolProblem
from tactics.problems.protocol import Problem, Shape4

FLATTENING = {("Gemm", 0), ("MatMul", 0)}  # operands that may be images: kernels are as large as they are


def lower(fused: Fused) -> Network:
    """Turn layers into ops. Raises one ModelError that lists every node no problem can express, with its reason."""
    graph = fused.graph
    views = _Views(fused)
    ops = _lowered(fused, views)
    _check_read(fused, ops)
    ends = {views.name(v) for v in graph.outputs}
    ops = _once(ops, ends)
    names, dtypes = fused.imported.name, fused.imported.dtypes
    inputs = tuple(TensorInfo(name_of(v), shape_of(v), dtypes[name_of(v)], views.shape4(v)) for v in graph.inputs)
    outputs = tuple(TensorInfo(name_of(v), shape_of(v), dtypes[name_of(v)], views.shape4(v)) for v in graph.outputs)
    ops += _copies(fused, views, {op.output for op in ops})
    tensors = {t.name: t.shape4 for t in inputs}
    for op in ops:
        tensors.update(zip((*op.inputs, op.output), (*op.problem.in_shapes, op.problem.out_shape), strict=True))
    exact = {t.name: t.dtype for t in inputs if t.dtype in EXACT}
    exact |= {op.output: op.problem.dtype for op in ops if computes(op, LibraryProblem) and op.problem.dtype != FLOAT}
    types = {t: Type(dtype) for t, dtype in exact.items()}
    network = Network(names, inputs, outputs, tensors, tuple(ops), fused.groups, types)
    return named_shortly(_compose_windows(rearrange(network)))


def _lowered(fused: Fused, views: _Views) -> list[Op[Problem]]:
    """The ops of all layers; those of one layer's alternatives share one array of weights."""
    ops: list[Op[Problem]] = []
    refused: dict[str, str] = {}
    kernels: dict[str, np.ndarray] = {}
    for layer in fused.layers:
        if layer.op in VIEWS and layer.node not in views.moving:
            continue
        try:
            for op in _ops(layer, views):
                if op.layer:
                    op = replace(op, weights={**op.weights, "w": kernels.setdefault(op.layer, op.weights["w"])})
                ops.append(op)
        except Refused as e:
            refused.setdefault(name_of(layer.node), f"{layer.node.op_type} {layer.node.name}: {e}")
    if refused:
        plural = "s" if len(refused) > 1 else ""
        raise ModelError(
            f"{fused.imported.name}: {len(refused)} node{plural} used in an unsupported way:\n"
            + "\n".join(f"  {text}" for text in refused.values())
        )
    return ops


def _check_read(fused: Fused, ops: list[Op[Problem]]) -> None:
    known = {name_of(v) for v in fused.graph.inputs} | {op.output for op in ops}
    for op in ops:
        if absent := [t for t in op.inputs if t not in known]:
            raise ModelError(
                f"{fused.imported.name}: {op.name} reads the constant {absent[0]!r} and could not be folded; "
                "compute its result outside the model and store it as an initializer"
            )


def _copies(fused: Fused, views: _Views, made: set[str]) -> Iterator[Op[Problem]]:
    """Copies to the outputs whose tensors bear another output's or an input's name already."""
    for v in fused.graph.outputs:
        source, shape4 = views.name(v), views.shape4(v)
        if source != v.name:
            shape, kind = shape_of(v), type_of(v)
            copy: Problem = PointwiseProblem(*shape4)
            if kind is not None and kind != FLOAT:
                copy = LibraryProblem("Identity", ("t0",), (shape,), (kind,), shape, kind, (shape4, shape4))
            yield Op(f"copy to {v.name}", copy, (source,), name_of(v))
        elif source not in made:
            raise ModelError(f"{fused.imported.name}: output {v.name!r} is not computed by any operation")


# ---- tensors: names, NCHW shapes, views


class _Views:
    """Which value is the same tensor as which, what each tensor is called, and its NCHW shape."""

    def __init__(self, fused: Fused) -> None:
        graph = fused.graph
        self.root: dict[Value, Value] = {}
        self.views: dict[Value, list[Value]] = {}  # root -> all that are views of it
        self.shape: dict[Value, Shape4] = {}  # network inputs that are NCHW otherwise than their own shape says
        self.moving: set[Node] = set()  # nodes whose output is a tensor of its own
        for layer in fused.layers:
            if layer.op in VIEWS:
                self._follow(layer.node)
        self.names: dict[Value, str] = {}
        for v in graph.outputs:
            root = self.root.get(v, v)
            if not root.is_graph_input():
                self.names.setdefault(root, name_of(v))

    def _follow(self, node: Node) -> None:
        x, y = operand(node), node.outputs[0]
        root = self.root.get(x, x)
        after = nchw(shape_of(y))
        if node.op_type == "Transpose" and not _keeps_order(shape_of(x), attribute(node, "perm")):
            self.moving.add(node)
        elif self.shape4(root) == after:
            self._is_view(y, root)
        elif root.is_graph_input() and all(len(v.uses()) == 1 for v in (root, *self.views.get(root, ()))):
            self._is_view(y, root)  # nobody else reads the caller's array: take it as NCHW
            self.shape[root] = after
        elif y.is_graph_output() and not y.uses():
            self._is_view(y, root)  # the caller receives the same elements in ONNX's shape
        elif y.is_graph_output() or _flattened(y) is None or not {(u.node.op_type, u.idx) for u in y.uses()} <= FLATTENING:
            self.moving.add(node)

    def _is_view(self, value: Value, root: Value) -> None:
        self.root[value] = root
        self.views.setdefault(root, []).append(value)

    def shape4(self, value: Value) -> Shape4:
        root = self.root.get(value, value)
        return self.shape.get(root) or nchw(shape_of(root))

    def name(self, value: Value) -> str:
        root = self.root.get(value, value)
        return self.names.get(root, name_of(root))


def _keeps_order(shape: tuple[int, ...], perm: tuple[int, ...] | None) -> bool:
    moved = [p for p in perm or reversed(range(len(shape))) if shape[p] != 1]
    return moved == sorted(moved)


def _flattened(value: Value) -> Value | None:
    """The [N,C,H,W] value that `value` [N,C*H*W] is a view of, else None."""
    node = value.producer()
    if node is None or node.op_type not in VIEWS or len(shape_of(operand(node))) != 4:
        return None
    n, c, h, w = shape_of(operand(node))
    return operand(node) if shape_of(value) == (n, c * h * w) else None


# ---- one layer -> one problem, or some in a row where it moves elements


def _ops(layer: Layer, views: _Views) -> list[Op[Problem]]:
    node = layer.node
    if rare_operators.takes(layer):
        function, constants = rare_operators.problem(layer)
        sources = tuple(views.name(v) for v in layer.inputs)
        return [Op(layer.label, function, sources, views.name(layer.output), constants, layer.nodes, layer.when)]
    if layer.op not in PROBLEMS:
        raise Refused(WHY.get(layer.op, "this runtime has no operation that computes it"))
    for v in (*layer.inputs, layer.output):
        if type_of(v) != FLOAT:
            got = "unknown" if v.dtype is None else v.dtype.name
            raise Refused(f"{v.name!r} is of type {got}; expected floating-point tensors")
    for more in node.outputs[1:] if layer.op not in SEVERAL else ():
        if is_read(more):
            raise Refused(f"its output {more.name!r} is used; only the first is supported")
    inputs = layer.inputs
    if layer.op in ("Gemm", "MatMul"):
        image = _flattened(views.root.get(inputs[0], inputs[0]))
        inputs = inputs if image is None else (image, *inputs[1:])
    shapes, out = [views.shape4(v) for v in inputs], views.shape4(layer.output)
    with np.errstate(over="ignore"):  # refused in the next lines
        weights = {k: np.ascontiguousarray(a, np.float32) for k, a in layer.weights.items()}
    if not all((np.isfinite(a) | np.isneginf(layer.weights[k])).all() for k, a in weights.items()):  # -infinity as a mask
        raise Refused("its constants are not finite after scales and shifts are folded in")
    try:
        problem = PROBLEMS[layer.op](layer, shapes, out, weights)
    except ValueError as e:  # of a problem that none of ours can be
        raise Refused(str(e)) from e
    if not all(map(math.isfinite, _numbers(problem))):
        raise Refused("one of its parameters is infinite or NaN")
    names = tuple(views.name(v) for v in inputs)
    problems = problem if isinstance(problem, tuple) else (problem,)
    return _in_a_row(layer, problems, list(zip(names, shapes, strict=True)), (views.name(layer.output), out), weights)


def _numbers(value: object) -> Iterator[float]:
    """Every floating-point number in a problem, or in several."""
    if isinstance(value, float):
        yield value
    elif isinstance(value, tuple):
        for part in value:
            yield from _numbers(part) if not isinstance(part, int) else ()
    elif is_dataclass(value):
        for f in fields(value):
            yield from _numbers(getattr(value, f.name))


def _in_a_row(
    layer: Layer, problems: tuple[Problem, ...], tensors: list[Tensor], result: Tensor, weights: Weights
) -> list[Op[Problem]]:
    """The problems one after the other, with a view wherever one names the elements by another shape.

    Each reads what the one before has made, then as many of `tensors` as it still takes. The weights are those of
    the problem that computes, whose op bears the layer's name.
    """
    ops: list[Op[Problem]] = []
    main = next((p for p in reversed(problems) if not isinstance(p, (GatherProblem, ViewProblem))), problems[-1])

    def add(problem: Problem, sources: tuple[str, ...], last: bool) -> Tensor:
        i, name = len(ops), result[0] if last else f"{result[0]} ({layer.label} {len(ops)})"
        if problem is main:
            identity = name_of(layer.node) if layer.op in CONVOLUTIONS and weights else ""
            merged = layer.merged
            ops.append(
                Op(layer.label, problem, sources, name, weights, layer.nodes, layer.when, identity, merged, bool(merged))
            )
        else:
            kind = type(problem).__name__.removesuffix("Problem").lower()
            ops.append(Op(f"{layer.label} ({kind} {i})", problem, sources, name, {}, layer.nodes, layer.when))
        return name, problem.out_shape

    def shaped(tensor: Tensor, want: Shape4, last: bool = False) -> str:
        name, have = tensor
        if math.prod(have) != math.prod(want):
            raise Refused(f"expected {list(want)}, the model has {list(have)} ({name})")
        return name if have == want else add(ViewProblem(have, want), (name,), last)[0]

    made: list[Tensor] = []
    for i, problem in enumerate(problems):
        count = len(problem.in_shapes) - len(made)
        sources, tensors = [*made, *tensors[:count]], tensors[count:]
        names = tuple(shaped(tensor, want) for tensor, want in zip(sources, problem.in_shapes, strict=True))
        made = [add(problem, names, i == len(problems) - 1 and problem.out_shape == result[1])]
    shaped(made[0], result[1], last=True)
    return ops


Tensor = tuple[str, Shape4]
Rule = Callable[[Layer, Shapes, Shape4, Weights], Problems]


def _view(layer: Layer, shapes: Shapes, out: Shape4, weights: Weights) -> ViewProblem:
    return ViewProblem(shapes[0], out)


def _conv(layer: Layer, shapes: Shapes, out: Shape4, weights: Weights) -> Problems:
    problem = conv(layer, shapes, out, weights)
    if layer.pool is None or not isinstance(problem, ConvProblem):
        return problem
    q = _flat_pool(replace(layer, op="MaxPool", node=layer.pool), problem.out_shape, out)
    return with_epilogue(problem, pool=(q.r, q.s, *q.stride, *q.pad[:2], *q.out))


def _pool(layer: Layer, shapes: Shapes, out: Shape4, weights: Weights) -> Problems:
    if layer.op.startswith("Global"):
        n, c, h, w = shapes[0]
        return PoolProblem(n, c, h, w, _kind(layer), h, w, (1, 1))
    rank = len(shape_of(operand(layer.node)))
    if rank not in (3, 4, 5):
        raise Refused(f"expected an input of rank 3 to 5, got {list(shape_of(operand(layer.node)))}")
    return _flat_pool(layer, shapes[0], out) if rank < 5 else _pool_of_volume(layer)


def _kind(layer: Layer) -> str:
    return "max" if "Max" in layer.op else "avg"


def _flat_pool(layer: Layer, shape: Shape4, out: Shape4) -> PoolProblem:
    size = last(attribute(layer.node, "kernel_shape"), 1)
    stride, dilation, pad = window(layer.node, size, shape[2:], crop=True)
    count_pad = bool(attribute(layer.node, "count_include_pad", 0))
    return PoolProblem(*shape, _kind(layer), *pair(size), pair(out[2:]), pair(stride), around(pad), pair(dilation), count_pad)


def _pool_of_volume(layer: Layer) -> tuple[PoolProblem, PoolProblem]:
    """One window over rows and columns and then one along the depth, which maxima and averages allow."""
    n, c, depth, *area = shape_of(operand(layer.node))
    (first, *rest), kind = shape_of(layer.output)[2:], _kind(layer)
    size = last(attribute(layer.node, "kernel_shape"), 1, 3)
    stride, dilation, pad = window(layer.node, size, (depth, *area), crop=True)
    count_pad = bool(attribute(layer.node, "count_include_pad", 0))
    flat = PoolProblem(
        n,
        c * depth,
        *pair(area),
        kind,
        *pair(size[1:]),
        pair(rest),
        pair(stride[1:]),
        around((*pad[1:3], *pad[4:])),
        pair(dilation[1:]),
        count_pad,
    )
    return flat, PoolProblem(
        n,
        c,
        depth,
        math.prod(rest),
        kind,
        size[0],
        1,
        (first, math.prod(rest)),
        (stride[0], 1),
        (pad[0], 0, pad[3], 0),
        (dilation[0], 1),
        count_pad,
    )


def _chain(layer: Layer, shapes: Shapes, out: Shape4, weights: Weights) -> PointwiseProblem:
    over = shape_of(layer.output)
    constants = [name for name in weights if name != "slope"]
    shape4, spans = _spans([*map(shape_of, layer.inputs), *(weights[name].shape for name in constants)], over)
    count = len(layer.inputs)
    return PointwiseProblem(*shape4, layer.stages, tuple(spans[:count]), tuple(spans[count:]))


def _spans(shapes: list[tuple[int, ...]], over: tuple[int, ...]) -> tuple[Shape4, list[str]]:
    """(an NCHW shape of the elements of a tensor of shape `over`, along which of its axes each of `shapes` spans it); NumPy
    aligns their dimensions at the end. It is `nchw` where that keeps apart what repeats, else neighbours alike are one axis."""
    wide = [(1,) * (len(over) - len(shape)) + tuple(shape) for shape in shapes]
    sizes, have = nchw(over), [nchw(shape) for shape in wide]
    if any(d not in (1, o) for four in have for d, o in zip(four, sizes, strict=True)):
        axes = [a for a, size in enumerate(over) if size > 1]
        runs = runs_of(over, lambda a: tuple(shape[a] == over[a] for shape in wide), axes)  # neighbours that are spanned alike
        if len(runs) > 4:
            operands = ", ".join(str(list(shape)) for shape in shapes)
            raise Refused(f"{operands} broadcast to {list(over)} along {len(runs)} runs of axes; expected 4 at most")
        sizes = as_shape4([size for size, _ in runs])
        have = [as_shape4([size if among[i] else 1 for size, among in runs]) for i in range(len(shapes))]
    return sizes, [
        "nchw" if shape == over else "".join(a for a, d, o in zip("nchw", four, sizes, strict=True) if d == o > 1)
        for shape, four in zip(wide, have, strict=True)
    ]


CONVOLUTIONS = ("Conv", "Gemm", "MatMul", "ConvTranspose")
SHUFFLES = ("d2s_crd", "d2s_dcr", "s2d_crd", "s2d_dcr", "channels")
# fmt: off
MOVES: Mapping[str, Rule] = {
    **dict.fromkeys(SHUFFLES, moves.shuffle), **dict.fromkeys(VIEWS, _view), "Transpose": moves.transpose,
    "Concat": moves.concat, "Slice": moves.slice_, "Split": moves.split, "Pad": moves.pad, "Resize": moves.resize,
    "Gather": moves.gather, "Expand": moves.expand, "Tile": moves.tile,
}
# fmt: on
PROBLEMS: Mapping[str, Rule] = {
    "Conv": _conv,
    "ConvTranspose": conv_transpose,
    "Gemm": matmul,
    "MatMul": matmul,
    **dict.fromkeys(("MaxPool", "AveragePool", "GlobalMaxPool", "GlobalAveragePool"), _pool),
    "Chain": _chain,
    **reductions.RULES,
    **MOVES,
}
WHY = {
    "BatchNormalization": "expected inference mode and constant statistics",
    "Dropout": "expected inference mode",
}


# ---- moves alike, windows of windows


def _once(ops: list[Op[Problem]], outputs: set[str]) -> list[Op[Problem]]:
    """One op of views and transpositions that do the same to the same tensor: what reads them reads one tensor then, so that
    products of one input are known as such."""
    same: dict[str, str] = {}
    known: dict[tuple[Problem, tuple[str, ...]], int] = {}
    kept: list[Op[Problem]] = []
    for op in ops:
        if same:
            op = replace(op, inputs=tuple(same.get(t, t) for t in op.inputs))
        if (computes(op, ViewProblem) or computes(op, GatherProblem)) and not op.when and op.output not in outputs:
            at = known.setdefault((op.problem, op.inputs), len(kept))
            if at < len(kept):
                same[op.output] = kept[at].output
                kept[at] = replace(kept[at], nodes=unique((*kept[at].nodes, *op.nodes)))
                continue
        kept.append(op)
    return kept


def _compose_windows(network: Network) -> Network:
    """One op of a Slice or Pad and the Slice or Pad that alone reads it, where that is exact."""
    options, made = Options(network), set[int]()
    for second in network.ops:
        ops = network.row(second, MoveProblem, MoveProblem)
        if not ops or id(ops[0]) in made or any(op.problem.kind != "window" for op in ops):
            continue
        if (both := compose(*(op.problem for op in ops))) is not None:
            made.add(id(second))
            options.instead(second, joined(*ops, problem=both, inputs=ops[0].inputs))
    return options.network()
