"""Lowers onnx-ir nodes to the project's own records: 4-D problems, named tensors, weights as stored or FP64. No later stage
sees ONNX.

Every tensor is NCHW: [N,C] is [N,C,1,1], [N,C,L] is [N,C,1,L]. Reshape, Flatten, Squeeze, Unsqueeze and Transpose that leave
that shape alone are no ops, only names; Flatten before a Gemm becomes the kernel size of a convolution; any other is a view,
which linear memory takes as it is, or a gather.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace

from gpu_runtime.errors import ModelError
from gpu_runtime.frontend.importer import Imported
from gpu_runtime.frontend.queries import Graph, Node, Value, attribute, is_read, name_of, operand, shape_of, type_of
from gpu_runtime.lowering import moves, rare_operators, reductions
from gpu_runtime.lowering.convolutions import CONVOLUTIONS, around, conv, conv_transpose, last, matmul, pair, product_at, window
from gpu_runtime.lowering.moves import Problems, Refused, Shapes, Weights, as_shape4, nchw, runs_of
from gpu_runtime.lowering.normalizations import group_normalization_at, normalization_at
from gpu_runtime.lowering.pointwise import pointwise_at, quantize_at
from gpu_runtime.lowering.shuffles import shuffle_at
from gpu_runtime.lowering.units import Unit, of_nodes, plain
from gpu_runtime.network import Network, Op, TensorInfo, Type, computes, touched
from tactics.problems.gather import GatherProblem, ViewProblem
from tactics.problems.library_problem import EXACT, FLOAT, PIXELS, LibraryProblem
from tactics.problems.operators import VIEWS
from tactics.problems.problem import PointwiseProblem, PoolProblem
from tactics.problems.protocol import Problem, Shape4

SEVERAL = ("Split", "LayerNormalization", "TopK", "MaxPool")  # operators whose outputs are units of their own
FLATTENING = {("Gemm", 0), ("MatMul", 0)}  # operands that may be images: kernels are as large as they are


def lower(imported: Imported) -> Network:
    """Makes one op for each node, or a few in a row. Raises one ModelError that lists every node that no problem can express,
    with the reason."""
    graph = imported.model.graph
    units = _units(graph)
    views = _Views(graph, units)
    ops = _lowered(imported.name, units, views)
    _check_read(imported, ops)
    dtypes = imported.loaded.dtypes
    inputs = tuple(TensorInfo(name_of(v), shape_of(v), dtypes[name_of(v)], views.shape4(v)) for v in graph.inputs)
    outputs = tuple(TensorInfo(name_of(v), shape_of(v), dtypes[name_of(v)], views.shape4(v)) for v in graph.outputs)
    ops += _copies(imported, views, {op.output for op in ops})
    exact = {t.name: t.dtype for t in inputs if t.dtype in EXACT and t.dtype != PIXELS}
    exact |= {op.output: op.problem.dtype for op in ops if computes(op, LibraryProblem) and op.problem.dtype != FLOAT}
    types = {t: Type(dtype) for t, dtype in exact.items()}
    return Network(
        imported.name, inputs, outputs, touched(inputs, ops), tuple(ops), types=types, onnx_names=imported.loaded.onnx_names
    )


def _lowered(model: str, units: Iterable[Unit], views: _Views) -> list[Op[Problem]]:
    ops: list[Op[Problem]] = []
    refused: dict[str, str] = {}
    for unit in units:
        if unit.op in VIEWS and unit.node not in views.moving:
            continue
        try:
            ops += _ops(unit, views)
        except Refused as e:
            refused.setdefault(name_of(unit.node), f"{unit.node.op_type} {unit.node.name}: {e}")
    if refused:
        plural = "s" if len(refused) > 1 else ""
        raise ModelError(
            f"{model}: {len(refused)} node{plural} used in an unsupported way:\n"
            + "\n".join(f"  {text}" for text in refused.values())
        )
    return ops


def _check_read(imported: Imported, ops: list[Op[Problem]]) -> None:
    known = {name_of(v) for v in imported.model.graph.inputs} | {op.output for op in ops}
    for op in ops:
        if absent := [t for t in op.inputs if t not in known]:
            raise ModelError(
                f"{imported.name}: {op.name} reads the constant {absent[0]!r} and could not be folded; "
                "compute its result outside the model and store it as an initializer"
            )


def _copies(imported: Imported, views: _Views, made: set[str]) -> Iterator[Op[Problem]]:
    """Yields copies to the outputs whose tensor already has another output's or an input's name."""
    for v in imported.model.graph.outputs:
        source, shape4 = views.name(v), views.shape4(v)
        if source != v.name:
            shape, kind = shape_of(v), type_of(v)
            copy: Problem = PointwiseProblem(*shape4)
            if kind is not None and kind != FLOAT:
                copy = LibraryProblem("Identity", ("t0",), (shape,), (kind,), shape, kind, (shape4, shape4))
            yield Op(f"copy to {v.name}", copy, (source,), name_of(v))
        elif source not in made:
            raise ModelError(f"{imported.name}: output {v.name!r} is not computed by any operation")


# ---- nodes -> units


def _units(graph: Graph) -> list[Unit]:
    """Lists the operators of a cleaned graph in its order. A node that no rule covers is a unit of its ONNX type."""
    position = {node: i for i, node in enumerate(graph)}
    covered, placed = set[str](), list[tuple[int, Unit]]()
    for node in position:
        if name_of(node) in covered:
            continue
        norm = group_normalization_at(node) or normalization_at(node)
        found = [norm] if norm is not None else [(unit, node) for unit in _units_of(node)]
        placed += [(position[at], unit) for unit, at in found]
        covered.update(name for unit, _ in found for name in unit.nodes)
    return [unit for _, unit in sorted(placed, key=lambda pair: pair[0])]


def _units_of(node: Node) -> list[Unit]:
    """Returns the node's unit; for an operator with several outputs, a unit for each output that has readers."""
    if node.op_type in SEVERAL:
        wanted = [(i, y) for i, y in enumerate(node.outputs) if is_read(y)]
        unit = of_nodes(node.op_type, node, [node], operand(node))
        split = node.op_type == "Split"
        return [replace(unit, label=f"{node.name} part {i}" if i or split else unit.label, output=y) for i, y in wanted]
    return [shuffle_at(node) or product_at(node) or quantize_at(node) or pointwise_at(node) or plain(node)]


# ---- tensors: names, NCHW shapes, views


class _Views:
    """Knows which values are the same tensor, and each tensor's name and NCHW shape."""

    def __init__(self, graph: Graph, units: Iterable[Unit]) -> None:
        self.root: dict[Value, Value] = {}
        self.views: dict[Value, list[Value]] = {}  # root -> all that are views of it
        self.shape: dict[Value, Shape4] = {}  # network inputs that are NCHW otherwise than their own shape says
        self.moving: set[Node] = set()  # nodes whose output is a tensor of its own
        for unit in units:
            if unit.op in VIEWS:
                self._follow(unit.node)
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
    """Returns the [N,C,H,W] value of which `value` [N,C*H*W] is a view, else None."""
    node = value.producer()
    if node is None or node.op_type not in VIEWS or len(shape_of(operand(node))) != 4:
        return None
    n, c, h, w = shape_of(operand(node))
    return operand(node) if shape_of(value) == (n, c * h * w) else None


# ---- one unit -> one problem, or some in a row where it moves elements


def _ops(unit: Unit, views: _Views) -> list[Op[Problem]]:
    node = unit.node
    if rare_operators.takes(unit):
        function, constants = rare_operators.problem(unit)
        sources = tuple(views.name(v) for v in unit.inputs)
        return [Op(unit.label, function, sources, views.name(unit.output), constants, unit.nodes)]
    if unit.op not in PROBLEMS:
        raise Refused(WHY.get(unit.op, "this runtime has no operation that computes it"))
    for v in (*unit.inputs, unit.output):
        if type_of(v) != FLOAT:
            got = "unknown" if v.dtype is None else v.dtype.name
            raise Refused(f"{v.name!r} is of type {got}; expected floating-point tensors")
    for more in node.outputs[1:] if unit.op not in SEVERAL else ():
        if is_read(more):
            raise Refused(f"its output {more.name!r} is used; only the first is supported")
    inputs = unit.inputs
    if unit.op in ("Gemm", "MatMul"):
        image = _flattened(views.root.get(inputs[0], inputs[0]))
        inputs = inputs if image is None else (image, *inputs[1:])
    shapes, out, weights = [views.shape4(v) for v in inputs], views.shape4(unit.output), dict(unit.weights)
    try:
        problem = PROBLEMS[unit.op](unit, shapes, out, weights)
    except ValueError as e:  # of a problem that none of ours can be
        raise Refused(str(e)) from e
    if not all(map(math.isfinite, _numbers(problem))):
        raise Refused("one of its parameters is infinite or NaN")
    names = tuple(views.name(v) for v in inputs)
    problems = problem if isinstance(problem, tuple) else (problem,)
    return _in_a_row(unit, problems, list(zip(names, shapes, strict=True)), (views.name(unit.output), out), weights)


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
    unit: Unit, problems: tuple[Problem, ...], tensors: list[Tensor], result: Tensor, weights: Weights
) -> list[Op[Problem]]:
    """Makes ops of the problems one after the other, with a view wherever two of them state the same elements in different
    shapes.

    Each reads the result of the one before, then as many of `tensors` as it still needs. The weights belong to the problem that
    computes, whose op bears the unit's name.
    """
    ops: list[Op[Problem]] = []
    main = next((p for p in reversed(problems) if not isinstance(p, (GatherProblem, ViewProblem))), problems[-1])

    def add(problem: Problem, sources: tuple[str, ...], last: bool) -> Tensor:
        i, name = len(ops), result[0] if last else f"{result[0]} ({unit.label} {len(ops)})"
        if problem is main:
            identity = name_of(unit.node) if unit.op in CONVOLUTIONS and weights else ""
            ops.append(Op(unit.label, problem, sources, name, weights, unit.nodes, layer=identity))
        else:
            kind = type(problem).__name__.removesuffix("Problem").lower()
            ops.append(Op(f"{unit.label} ({kind} {i})", problem, sources, name, {}, unit.nodes))
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
Rule = Callable[[Unit, Shapes, Shape4, Weights], Problems]


def _view(unit: Unit, shapes: Shapes, out: Shape4, weights: Weights) -> ViewProblem:
    return ViewProblem(shapes[0], out)


def _pool(unit: Unit, shapes: Shapes, out: Shape4, weights: Weights) -> Problems:
    if unit.op.startswith("Global"):
        n, c, h, w = shapes[0]
        return PoolProblem(n, c, h, w, _kind(unit), h, w, (1, 1))
    rank = len(shape_of(operand(unit.node)))
    if rank not in (3, 4, 5):
        raise Refused(f"expected an input of rank 3 to 5, got {list(shape_of(operand(unit.node)))}")
    return _flat_pool(unit, shapes[0], out) if rank < 5 else _pool_of_volume(unit)


def _kind(unit: Unit) -> str:
    return "max" if "Max" in unit.op else "avg"


def _flat_pool(unit: Unit, shape: Shape4, out: Shape4) -> PoolProblem:
    size = last(attribute(unit.node, "kernel_shape"), 1)
    stride, dilation, pad = window(unit.node, size, shape[2:], crop=True)
    count_pad = bool(attribute(unit.node, "count_include_pad", 0))
    return PoolProblem(*shape, _kind(unit), *pair(size), pair(out[2:]), pair(stride), around(pad), pair(dilation), count_pad)


def _pool_of_volume(unit: Unit) -> tuple[PoolProblem, PoolProblem]:
    """Lowers a pool of rank 5 to a window over rows and columns, then one along the depth; maxima and averages allow that."""
    n, c, depth, *area = shape_of(operand(unit.node))
    (first, *rest), kind = shape_of(unit.output)[2:], _kind(unit)
    size = last(attribute(unit.node, "kernel_shape"), 1, 3)
    stride, dilation, pad = window(unit.node, size, (depth, *area), crop=True)
    count_pad = bool(attribute(unit.node, "count_include_pad", 0))
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


def _pointwise(unit: Unit, shapes: Shapes, out: Shape4, weights: Weights) -> PointwiseProblem:
    over = shape_of(unit.output)
    shape4, spans = _spans([*map(shape_of, unit.inputs), *(a.shape for a in weights.values())], over)
    count = len(unit.inputs)
    return PointwiseProblem(*shape4, unit.stages, tuple(spans[:count]), tuple(spans[count:]))


def _spans(shapes: list[tuple[int, ...]], over: tuple[int, ...]) -> tuple[Shape4, list[str]]:
    """Returns (an NCHW shape of the elements of a tensor of shape `over`; for each of `shapes` the axes of it that it spans).
    NumPy aligns dimensions at the end. The NCHW shape is `nchw(over)` where that keeps repeated axes apart, else neighbouring
    axes that are alike become one."""
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


SHUFFLES = ("d2s_crd", "d2s_dcr", "s2d_crd", "s2d_dcr", "channels")
# fmt: off
MOVES: Mapping[str, Rule] = {
    **dict.fromkeys(SHUFFLES, moves.shuffle), **dict.fromkeys(VIEWS, _view), "Transpose": moves.transpose,
    "Concat": moves.concat, "Slice": moves.slice_, "Split": moves.split, "Pad": moves.pad, "Resize": moves.resize,
    "Gather": moves.gather, "Expand": moves.expand, "Tile": moves.tile,
}
# fmt: on
PROBLEMS: Mapping[str, Rule] = {
    "Conv": conv,
    "ConvTranspose": conv_transpose,
    "Gemm": matmul,
    "MatMul": matmul,
    **dict.fromkeys(("MaxPool", "AveragePool", "GlobalMaxPool", "GlobalAveragePool"), _pool),
    "Pointwise": _pointwise,
    **reductions.RULES,
    **MOVES,
}
WHY = {
    "BatchNormalization": "expected inference mode and constant statistics",
    "Dropout": "expected inference mode",
}
