"""Layers over onnx-ir -> our own records: 4-D problems, named tensors, FP16-rounded weights. No ONNX after this.

Every tensor is NCHW: [N,C] is [N,C,1,1], [N,C,L] is [N,C,1,L]. Reshape, Flatten, Squeeze, Unsqueeze and Transpose that
leave that shape alone are no operations, only names; Flatten before a Gemm becomes the kernel size of a convolution; any
other is a view, which linear memory takes as it is, or a gather.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace

import numpy as np

from gpu_runtime.errors import ModelError
from gpu_runtime.frontend.fuse import Fused
from gpu_runtime.frontend.layers import SEVERAL, VIEWS, Layer
from gpu_runtime.frontend.queries import attribute, shape_of, type_of
from gpu_runtime.lowering import library, moves, reductions
from gpu_runtime.lowering.convolutions import conv, conv_transpose, last, matmul, window
from gpu_runtime.lowering.moves import Refused, compose, nchw
from gpu_runtime.network import Network, Op, Shape4, TensorInfo
from tactics.format import Format
from tactics.problems.convolution import with_epilogue
from tactics.problems.gather import GatherProblem, ViewProblem
from tactics.problems.library import EXACT, FLOAT, LibraryProblem
from tactics.problems.problem import (
    ConvProblem,
    MoveProblem,
    PointwiseProblem,
    PoolProblem,
    Problem,
)


def lower(fused: Fused) -> Network:
    """Turn layers into ops. Raises one ModelError that lists every node no problem can express, with its reason."""
    graph = fused.imported.model.graph
    views = _Views(fused)
    ops, refused, kernels = [], {}, {}
    for layer in fused.layers:
        if layer.op in VIEWS and layer.node not in views.moving:
            continue
        try:
            for op in _ops(layer, views):
                if op.layer:  # the alternatives of one layer share one array
                    op = replace(op, weights={**op.weights, "w": kernels.setdefault(op.layer, op.weights["w"])})
                ops.append(op)
        except Refused as e:
            refused.setdefault(layer.node.name, f"{layer.node.op_type} {layer.node.name}: {e}")
    if refused:
        plural = "s" if len(refused) > 1 else ""
        raise ModelError(
            f"{fused.imported.name}: {len(refused)} node{plural} used in an unsupported way:\n"
            + "\n".join(f"  {text}" for text in refused.values())
        )
    known = {v.name for v in graph.inputs} | {op.output for op in ops}
    for op in ops:
        if absent := [t for t in op.inputs if t not in known]:
            raise ModelError(
                f"{fused.imported.name}: {op.name} reads {absent[0]!r}, which is constant, and its result was not folded; "
                "compute it outside the model, and store it as an initializer"
            )
    ops = _compose_windows(ops, {views.name(v) for v in graph.outputs})
    inputs = tuple(TensorInfo(v.name, shape_of(v), fused.imported.dtypes[v.name], views.shape4(v)) for v in graph.inputs)
    outputs = []
    made = {op.output for op in ops}
    for v in graph.outputs:
        source, shape4 = views.name(v), views.shape4(v)
        if source != v.name:  # the tensor already bears another output's or an input's name
            shape, kind = shape_of(v), type_of(v)
            copy = PointwiseProblem(*shape4)
            if kind != FLOAT:
                copy = LibraryProblem("Identity", ("t0",), (shape,), (kind,), shape, kind, (shape4, shape4))
            ops.append(Op(f"copy to {v.name}", copy, (source,), v.name))
        elif source not in made:
            raise ModelError(f"{fused.imported.name}: output {v.name!r} is not computed by any operation")
        outputs.append(TensorInfo(v.name, shape_of(v), fused.imported.dtypes[v.name], shape4))
    tensors = {t.name: t.shape4 for t in inputs}
    for op in ops:
        tensors.update(zip((*op.inputs, op.output), (*op.problem.in_shapes, op.problem.out_shape), strict=True))
    exact = {t.name: t.dtype for t in inputs if t.dtype in EXACT}
    exact |= {op.output: op.problem.dtype for op in ops if isinstance(op.problem, LibraryProblem) and op.problem.dtype != FLOAT}
    only = {t: Format(dtype, "chw") for t, dtype in exact.items()}
    return Network(fused.imported.name, inputs, tuple(outputs), tensors, tuple(ops), fused.groups, only)


# ---- tensors: names, NCHW shapes, views


class _Views:
    """Which value is the same tensor as which, what each tensor is called, and its NCHW shape."""

    def __init__(self, fused: Fused):
        graph = fused.imported.model.graph
        self.root: dict = {}
        self.views: dict = {}  # root -> all that are views of it
        self.shape: dict = {}  # network inputs that are NCHW otherwise than their own shape says
        self.moving: set = set()  # nodes whose output is a tensor of its own
        for layer in fused.layers:
            if layer.op in VIEWS:
                self._follow(layer.node)
        self.names: dict = {}
        for v in graph.outputs:
            root = self.root.get(v, v)
            if not root.is_graph_input():
                self.names.setdefault(root, v.name)

    def _follow(self, node) -> None:
        x, y = node.inputs[0], node.outputs[0]
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
        elif y.is_graph_output() or _flattened(y) is None or not all(u.node.op_type in ("Gemm", "MatMul") for u in y.uses()):
            self.moving.add(node)

    def _is_view(self, value, root) -> None:
        self.root[value] = root
        self.views.setdefault(root, []).append(value)

    def shape4(self, value) -> Shape4:
        root = self.root.get(value, value)
        return self.shape.get(root) or nchw(shape_of(root))

    def name(self, value) -> str:
        root = self.root.get(value, value)
        return self.names.get(root, root.name)


def _keeps_order(shape: tuple[int, ...], perm: tuple[int, ...] | None) -> bool:
    moved = [p for p in perm or reversed(range(len(shape))) if shape[p] != 1]
    return moved == sorted(moved)


def _flattened(value):
    """The [N,C,H,W] value that `value` [N,C*H*W] is a view of, else None."""
    node = value.producer()
    if node is None or node.op_type not in VIEWS or len(shape_of(node.inputs[0])) != 4:
        return None
    n, c, h, w = shape_of(node.inputs[0])
    return node.inputs[0] if shape_of(value) == (n, c * h * w) else None


# ---- one layer -> one problem, or some in a row where it moves elements


def _ops(layer: Layer, views: _Views) -> list[Op]:
    node = layer.node
    if library.takes(layer):
        problem, constants = library.problem(layer)
        inputs = tuple(views.name(v) for v in layer.inputs)
        return [Op(layer.label, problem, inputs, views.name(layer.output), constants, layer.nodes, layer.when)]
    if layer.op not in PROBLEMS:
        raise Refused(WHY.get(layer.op, "no operation of this runtime computes it"))
    for v in (*layer.inputs, layer.output):
        if type_of(v) != FLOAT:
            raise Refused(f"{v.name!r} is of type {v.dtype.name}; expected floating-point tensors")
    for out in node.outputs[1:] if layer.op not in SEVERAL else ():
        if out.uses() or out.is_graph_output():
            raise Refused(f"its output {out.name!r} is used; only the first is supported")
    inputs = layer.inputs
    if layer.op in ("Gemm", "MatMul"):
        image = _flattened(views.root.get(inputs[0], inputs[0]))
        inputs = inputs if image is None else (image, *inputs[1:])
    shapes, out = [views.shape4(v) for v in inputs], views.shape4(layer.output)
    with np.errstate(over="ignore"):  # refused in the next lines
        weights = {k: np.ascontiguousarray(a, np.float32) for k, a in layer.weights.items()}
    if not all(np.isfinite(a).all() for a in weights.values()):
        raise Refused("its constants, with all scales and shifts folded in, are not finite")
    problem = PROBLEMS[layer.op](layer, shapes, out, weights)
    if not all(map(math.isfinite, _numbers(problem))):
        raise Refused("a number that it computes with is infinite or NaN")
    names = tuple(views.name(v) for v in inputs)
    problems = problem if isinstance(problem, tuple) else (problem,)
    return _in_a_row(layer, problems, list(zip(names, shapes, strict=True)), (views.name(layer.output), out), weights)


def _numbers(value) -> Iterator[float]:
    """Every floating-point number in a problem, or in several."""
    if isinstance(value, float):
        yield value
    elif isinstance(value, tuple):
        for part in value:
            yield from _numbers(part) if not isinstance(part, int) else ()
    elif is_dataclass(value):
        for f in fields(value):
            yield from _numbers(getattr(value, f.name))


def _in_a_row(layer: Layer, problems, given: list[tuple[str, Shape4]], result: tuple[str, Shape4], weights) -> list[Op]:
    """The problems one after the other, with a view wherever one names the elements by another shape.

    Each reads what the one before has made, then as many of the tensors given as it still takes. The weights are those of
    the problem that computes, whose op bears the layer's name.
    """
    ops: list[Op] = []
    main = next((p for p in reversed(problems) if not isinstance(p, (GatherProblem, ViewProblem))), problems[-1])

    def add(problem: Problem, sources: tuple[str, ...], last: bool) -> tuple[str, Shape4]:
        i, name = len(ops), result[0] if last else f"{result[0]} ({layer.label} {len(ops)})"
        if problem is main:
            identity = layer.node.name if layer.op in CONVOLUTIONS and weights else ""
            ops.append(Op(layer.label, problem, sources, name, weights, layer.nodes, layer.when, identity))
        else:
            kind = type(problem).__name__.removesuffix("Problem").lower()
            ops.append(Op(f"{layer.label} ({kind} {i})", problem, sources, name, {}, layer.nodes, layer.when))
        return name, problem.out_shape

    def shaped(tensor: tuple[str, Shape4], want: Shape4, last: bool = False) -> str:
        name, have = tensor
        if math.prod(have) != math.prod(want):
            raise Refused(f"expected {list(want)}, the model has {list(have)} ({name})")
        return name if have == want else add(ViewProblem(have, want), (name,), last)[0]

    made: list[tuple[str, Shape4]] = []
    for i, problem in enumerate(problems):
        count = len(problem.in_shapes) - len(made)
        sources, given = [*made, *given[:count]], given[count:]
        names = tuple(shaped(tensor, want) for tensor, want in zip(sources, problem.in_shapes, strict=True))
        made = [add(problem, names, i == len(problems) - 1 and problem.out_shape == result[1])]
    shaped(made[0], result[1], last=True)
    return ops


def _view(layer: Layer, shapes, out, weights) -> ViewProblem:
    return ViewProblem(shapes[0], out)


def _conv(layer: Layer, shapes, out, weights) -> ConvProblem:
    problem = conv(layer, shapes, out, weights)
    if layer.pool is None:
        return problem
    q = _pool(replace(layer, op="MaxPool", node=layer.pool), [problem.out_shape], out, {})
    return with_epilogue(problem, pool=(q.r, q.s, *q.stride, *q.pad[:2], *q.out))


def _pool(layer: Layer, shapes, out, weights) -> PoolProblem | tuple[PoolProblem, PoolProblem]:
    """One window; a volume's is one over rows and columns and then one along the depth, which maxima and averages allow."""
    node, (n, c, h, w) = layer.node, shapes[0]
    kind = "max" if "Max" in layer.op else "avg"
    if layer.op.startswith("Global"):
        return PoolProblem(n, c, h, w, kind, h, w, (1, 1))
    shape, image = shape_of(node.inputs[0]), (h, w)
    if len(shape) not in (3, 4, 5):
        raise Refused(f"expected an input of rank 3 to 5, got {list(shape)}")
    count_pad = bool(attribute(node, "count_include_pad", 0))
    if len(shape) == 5:
        image = shape[2:]
    size = last(attribute(node, "kernel_shape"), 1, len(image))
    stride, dilation, pad = window(node, size, image, crop=True)
    if len(shape) < 5:
        return PoolProblem(n, c, h, w, kind, *size, out[2:], stride, pad, dilation, count_pad)
    (depth, *area), (reach, *_) = image, size
    first, *rest = shape_of(layer.output)[2:]
    flat = PoolProblem(n, c * depth, *area, kind, *size[1:], tuple(rest), stride[1:], (*pad[1:3], *pad[4:]), dilation[1:],
                       count_pad)  # fmt: skip
    return flat, PoolProblem(n, c, depth, math.prod(rest), kind, reach, 1, (first, math.prod(rest)), (stride[0], 1),
                             (pad[0], 0, pad[3], 0), (dilation[0], 1), count_pad)  # fmt: skip


def _chain(layer: Layer, shapes, out, weights) -> PointwiseProblem:
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
        runs: list[tuple[int, tuple[bool, ...]]] = []  # size, which of `shapes` span it
        for a, size in enumerate(over):
            among = tuple(shape[a] == size for shape in wide)
            if size == 1:
                continue
            if runs and runs[-1][1] == among:
                runs[-1] = (runs[-1][0] * size, among)
            else:
                runs.append((size, among))
        if len(runs) > 4:
            given = ", ".join(str(list(shape)) for shape in shapes)
            raise Refused(f"{given} repeat over {list(over)} along {len(runs)} runs of axes; expected 4 at most")
        runs = [(1, (False,) * len(shapes))] * (4 - len(runs)) + runs
        sizes = tuple(size for size, _ in runs)
        have = [tuple(size if among[i] else 1 for size, among in runs) for i in range(len(shapes))]
    return sizes, [
        "nchw" if shape == over else "".join(a for a, d, o in zip("nchw", four, sizes, strict=True) if d == o > 1)
        for shape, four in zip(wide, have, strict=True)
    ]


CONVOLUTIONS = ("Conv", "Gemm", "MatMul", "ConvTranspose")
SHUFFLES = ("d2s_crd", "d2s_dcr", "s2d_crd", "s2d_dcr", "channels")
MOVES = {
    **dict.fromkeys(SHUFFLES, moves.shuffle), **dict.fromkeys(VIEWS, _view), "Transpose": moves.transpose,
    "Concat": moves.concat, "Slice": moves.slice_, "Split": moves.split, "Pad": moves.pad, "Resize": moves.resize,
    "Gather": moves.gather, "Expand": moves.expand, "Tile": moves.tile,
}  # fmt: skip
PROBLEMS = {
    "Conv": _conv, "ConvTranspose": conv_transpose, "Gemm": matmul, "MatMul": matmul,
    **dict.fromkeys(("MaxPool", "AveragePool", "GlobalMaxPool", "GlobalAveragePool"), _pool),
    "Chain": _chain,
    **reductions.RULES, **MOVES,
}  # fmt: skip
WHY = {
    "BatchNormalization": "expected inference mode and constant statistics",
    "Dropout": "expected inference mode",
}


# ---- windows of windows


def _compose_windows(ops: list[Op], outputs: set[str]) -> list[Op]:
    """Make one op of a Slice or Pad and the Slice or Pad that alone reads it, where that is exact."""
    readers: dict[str, list[int]] = {}
    for i, op in enumerate(ops):
        for t in dict.fromkeys(op.inputs):
            readers.setdefault(t, []).append(i)
    result: dict[int, Op | None] = dict(enumerate(ops))
    for i, first in enumerate(ops):
        found = readers.get(first.output, ())
        if len(found) != 1 or first.output in outputs or result[i] is not first or first.when != ops[found[0]].when:
            continue
        second = ops[found[0]]
        if all(isinstance(op.problem, MoveProblem) and op.problem.kind == "window" for op in (first, second)):
            both = compose(first.problem, second.problem)
            if both is not None:
                result[i] = None
                result[found[0]] = replace(
                    second, name=f"{first.name} + {second.name}", problem=both, inputs=first.inputs,
                    nodes=first.nodes + second.nodes,
                )  # fmt: skip
    return [op for op in result.values() if op is not None]
