"""Offers attention as one launch: the ops between the products that make queries, keys and values and the product whose output
is the result.

Splits, reshapes and transpositions on the way are followed element by element; if they leave an operand at equal steps in its
source tensor, they become strides of the one kernel. Separate or as one is a choice of the plan. Tensors that other ops read as
well stay under both options.
"""

from dataclasses import dataclass, field, replace
from math import prod

import numpy as np

from gpu_runtime.element_maps.strides import INDEX, Fits, backwards, farthest, fitted, forwards
from gpu_runtime.network import Network, Op, Options, computes, joined, unique
from tactics.problems.attention import AttentionProblem, Operand
from tactics.problems.gather import ViewProblem
from tactics.problems.pointwise_ops import Stage
from tactics.problems.problem import MatmulProblem, PointwiseProblem
from tactics.problems.protocol import Problem, Shape4
from tactics.problems.reductions import NormalizeProblem, ReduceProblem

MOST_ELEMENTS = 1 << 25  # the most elements of an operand, or of all scores, that are followed
_Found = tuple[Op[AttentionProblem], list[Op[Problem]], Op[Problem]]  # (new op, the ops that it replaces, their last one)
UNBOUNDED = 1e30  # an upper end of a Clip this large counts as no upper end


@dataclass(frozen=True, slots=True)
class _Side:
    """An operand of a product. `index`: the numbers, in `tensor`, of the operand's elements; `factor`: a number that multiplies
    it; `unit`: the epsilon with which its rows were normalized to length 1, if they were; `through`: the ops from the tensor to
    the product.
    """

    tensor: str
    index: np.ndarray
    factor: float = 1.0
    unit: float | None = None
    through: tuple[Op[Problem], ...] = ()


@dataclass(slots=True)
class _Scores:
    """The operations on the scores between product and softmax. All arrays have the scores' indices in their order (batch,
    head, row, column); `through`: the ops that compute them.
    """

    scale: np.ndarray
    bias: np.ndarray | None = None
    mask: tuple[str, np.ndarray] | None = None
    through: list[Op[Problem]] = field(default_factory=list)


def offer(network: Network) -> Network:
    """Returns the network with the alternatives added."""
    options = Options(network)
    taken: set[int] = set()
    for op in network.ops:
        found = _attention_of(network, op) if computes(op, MatmulProblem) else None
        if found is None or taken & {id(o) for o in found[1]}:
            continue
        one, region, last = found
        taken |= {id(o) for o in region}
        options.either(f"attention {one.name}", region, [(last, one)])
    return options.network()


def _attention_of(network: Network, second: Op[MatmulProblem]) -> _Found | None:
    """Returns (the one op, the ops that it replaces, the last of these) of the attention whose second product is `second`; None
    if there is no such attention.
    """
    found = _weights_of(network, second)
    if found is None:
        return None
    softmax, on_way, values, y = found
    path = _to_first(network, softmax)
    if path is None or second.when:
        return None
    first, between = path
    sizes = (*first.problem.batch, first.problem.m, first.problem.n)
    if not _plain(network, first, softmax, second) or prod(second.problem.batch) != prod(sizes[:2]):
        return None
    scores = _scored(first.output, between, sizes)
    if scores is None:
        return None
    splits = _splits(sizes[0], sizes[1])

    def fits(tensor: str, index: np.ndarray) -> bool:
        return any(_operand(0, index, split, network.tensors[tensor]) for split in splits)

    q, k = (_side(network, first.inputs[i], _operand_index(first.problem, i), fits, unit=True) for i in (0, 1))
    if q.unit != k.unit:  # no other ops: two products and a softmax alone are not replaced
        q, k = (_side(network, first.inputs[i], _operand_index(first.problem, i), fits, unit=False) for i in (0, 1))
    v = _moved(network, _Side(values[0], values[1].reshape(*sizes[:2], sizes[3], -1)), fits)[0]
    out, y, after = forwards(network, second.output, y.reshape(*sizes[:3], -1), fits)
    built = (_problem(network, scores, (q, k, v), (out, y), split) for split in splits)
    one = next((op for op in built if op is not None), None)
    if one is None:
        return None
    region = _region(network, [first, *between, softmax, *on_way, second, *q.through, *k.through, *v.through, *after], out)
    last = next(op for op in region if op.output == out)
    return joined(*region, one, name=f"{first.name} + {softmax.name} + {second.name}"), region, last


def _plain(network: Network, first: Op[MatmulProblem], softmax: Op[NormalizeProblem], second: Op[MatmulProblem]) -> bool:
    """Whether these ops compute only the two products and the softmax, in FP16, on at most MOST_ELEMENTS elements."""
    largest = max(map(prod, (*first.problem.in_shapes, first.problem.out_shape, *second.problem.in_shapes)))
    ops = (first, softmax, second)
    return largest <= MOST_ELEMENTS and not any(op.problem.needs or op.exact for op in ops)


def _splits(batch: int, heads: int) -> list[tuple[int, int]]:
    """Lists all ways to split a model's batch dimension into (batch, heads), as it may contain both: unchanged first, then the
    most heads first.
    """
    both = batch * heads
    return list(dict.fromkeys([(batch, heads), *((both // h, h) for h in range(both, 0, -1) if both % h == 0)]))


def _operand(tensor: int, index: np.ndarray, split: tuple[int, int], shape: Shape4) -> Operand | None:
    """Returns an operand with this split into batch and heads; None unless each of its indices has a constant step along an
    axis of its tensor.
    """
    index = index.reshape(*split, *index.shape[2:])
    found = fitted(index)
    operand = None if found is None else Operand(tensor, *found)
    return operand if operand is not None and operand.along(index.shape, shape) is not None else None


def _problem(
    network: Network,
    scores: _Scores,
    sides: tuple[_Side, _Side, _Side],
    result: tuple[str, np.ndarray],
    split: tuple[int, int],
) -> Op[AttentionProblem] | None:
    """Returns the one op with this split into batch and heads; None if it is impossible. `result`: (output tensor, numbers of
    its elements).
    """
    (q, k, v), out = sides, result[0]
    placed = {name: (side.tensor, side.index) for name, side in zip("qkv", sides, strict=True)} | {"y": result}
    placed |= {"mask": scores.mask} if scores.mask else {}
    names = unique(tensor for name, (tensor, _) in placed.items() if name != "y")
    at = {name: i for i, name in enumerate((*names, out))}
    lies = {
        name: operand
        for name, (t, index) in placed.items()
        if (operand := _operand(at[t], index, split, network.tensors[t])) is not None
    }
    single = any(network.type(t).fixed for t in names) or network.is_fp32(out) or out in network.exact_outputs
    scale = np.broadcast_to(scores.scale, q.index.shape[:2]).reshape(split) * q.factor * k.factor
    if len(lies) < len(placed) or single or out in names or (scale != scale[:1]).any():
        return None
    axes, bias = _spanned(scores.bias, split, k.index.shape[2])
    weights = {"scale": scale[0].astype(np.float32), **bias}
    problem = AttentionProblem(
        *split,
        q.index.shape[2],
        k.index.shape[2],
        q.index.shape[3],
        v.index.shape[3],
        tuple(network.tensors[t] for t in names),
        network.tensors[out],
        lies["q"],
        lies["k"],
        lies["v"],
        lies["y"],
        lies.get("mask"),
        axes,
        q.unit is not None,
        q.unit or 0.0,
    )
    return Op("", problem, names, out, weights)


def _spanned(bias: np.ndarray | None, split: tuple[int, int], columns: int) -> tuple[str, dict[str, np.ndarray]]:
    """Returns (the axes along which a constant varies, at least one since "" means no constant; the constant along these axes
    as a weight).
    """
    if bias is None:
        return "", {}
    bias = bias.reshape(*split, *bias.shape[2:]) if bias.size > 1 else bias
    axes = "".join(a for i, a in enumerate("nchw") if (bias != bias.take([0], axis=i)).any())
    if not axes:
        return "w", {"bias": np.full((1, 1, 1, columns), bias.flat[0], np.float32)}
    return axes, {"bias": bias[tuple(slice(None) if a in axes else slice(1) for a in "nchw")].astype(np.float32)}


def _region(network: Network, core: list[Op[Problem]], out: str) -> list[Op[Problem]]:
    """Returns the ops of `core` whose results only other ops of `core`, or `out`, need: they do not exist beside the one op.
    They are in the network's order.
    """
    inside = {id(op) for op in core}
    found: dict[int, Op[Problem]] = {}
    for op in reversed(network.ops):
        if id(op) not in inside or op.when:
            continue
        only = op.output not in network.output_names and all(id(r) in found for r in network.readers[op.output])
        if op.output == out or only:
            found[id(op)] = op
    return list(reversed(found.values()))


# ---- products, and the ops between them


def _operand_index(p: MatmulProblem, i: int) -> np.ndarray:
    """Returns the numbers of the elements of operand i, of shape (*batch, rows or columns, inner)."""
    shape, turned = p.in_shapes[i], (p.trans_a, not p.trans_b)[i]
    index = np.arange(prod(shape), dtype=INDEX).reshape(shape)
    index = index.swapaxes(2, 3) if turned else index
    return np.broadcast_to(index, (*p.batch, *index.shape[2:]))


def _weights_of(
    network: Network, second: Op[MatmulProblem]
) -> tuple[Op[NormalizeProblem], list[Op[Problem]], tuple[str, np.ndarray], np.ndarray] | None:
    """Returns (softmax, the ops between it and the product, (the values' tensor, the numbers of its elements (*batch, column,
    width)), the numbers of the output's elements (*batch, row, width)); None if no operand of the product is a softmax's
    result, perhaps transposed.
    """
    p = second.problem
    if prod(p.batch) * max(p.m * p.k, p.k * p.n, p.m * p.n) > MOST_ELEMENTS:
        return None
    y = np.arange(prod(p.out_shape), dtype=INDEX).reshape(p.out_shape)
    for i in (0, 1):
        # As the left operand [row, column], as the right one [column, row]: `_operand_index` has the row first for both.
        whole = _operand_index(p, i)
        for tensor, index, through in ((second.inputs[i], whole, ()), *backwards(network, second.inputs[i], whole)):
            op = network.producer(tensor)
            if not computes(op, NormalizeProblem) or op.problem.kind != "softmax":
                continue
            if np.array_equal(index.reshape(-1), np.arange(index.size)):
                other = _operand_index(p, 1 - i).swapaxes(2, 3)
                return op, list(through), (second.inputs[1 - i], other), y if i == 0 else y.swapaxes(2, 3)
    return None


def _to_first(network: Network, softmax: Op[NormalizeProblem]) -> tuple[Op[MatmulProblem], list[Op[Problem]]] | None:
    """Returns (the product whose elements, in order, the softmax normalizes; the ops between the two, in order); None if there
    is no such product.
    """
    p, between = softmax.problem, list[Op[Problem]]()
    row = p.w if p.axes == "w" else p.c if p.axes == "c" and p.h * p.w == p.groups == 1 else 0
    op, tensor = network.producer(softmax.inputs[0]), softmax.inputs[0]
    while op is not None and not softmax.when:
        if len(network.readers[tensor]) != 1 or tensor in network.output_names:
            return None
        if computes(op, MatmulProblem):
            return (op, between[::-1]) if op.problem.n == row else None
        if computes(op, PointwiseProblem):
            q = op.problem
            whole = [t for t, axes in zip(op.inputs, q.tensors, strict=True) if q.span(axes) == q.out_shape]
            tensor = next((t for t in whole if _leads_to_product(network, t)), "")
        elif computes(op, ViewProblem):
            tensor = op.inputs[0]
        else:
            return None
        between.append(op)
        op = network.producer(tensor) if tensor else None
    return None


def _leads_to_product(network: Network, tensor: str) -> bool:
    op = network.producer(tensor)
    while computes(op, ViewProblem) or computes(op, PointwiseProblem):
        op = network.producer(op.inputs[0])
    return computes(op, MatmulProblem)


def _scored(before: str, between: list[Op[Problem]], sizes: tuple[int, int, int, int]) -> _Scores | None:
    """Collects the operations between product and softmax, factors of heads and addends; None if there are others. `before`:
    the tensor of the scores at first.
    """
    scores = _Scores(np.ones(sizes[1]))
    for op in between:
        if computes(op, PointwiseProblem):
            stages = op.problem.stages
            if op.inputs[0] != before:
                if len(stages) != 1 or stages[0].op != "add":
                    return None
                stages = (Stage("add", operand="t0"),)
            if not all(_staged(scores, op, stage, sizes) for stage in stages):
                return None
        before = op.output
        scores.through.append(op)
    return scores


def _staged(scores: _Scores, op: Op[PointwiseProblem], stage: Stage, sizes: tuple[int, int, int, int]) -> bool:
    """Adds a stage to the scores; returns whether attention supports it."""
    if stage.op not in ("mul", "div", "add", "sub"):
        return False
    p = op.problem
    if stage.operand.startswith("t"):
        at = int(stage.operand[1:])
        if stage.op != "add" or scores.mask is not None:
            return False
        span = p.span(p.tensors[at])
        index = np.broadcast_to(np.arange(prod(span)).reshape(span), p.out_shape).reshape(sizes)
        scores.mask = op.inputs[at], index
        return True
    value = _constant(op, stage)
    value = value if value.size == 1 else np.broadcast_to(value, p.out_shape).reshape(sizes)
    if stage.op in ("add", "sub"):
        scores.bias = (value if stage.op == "add" else -value) + (0 if scores.bias is None else scores.bias)
        return True
    factor = value if stage.op == "mul" else 1 / value
    of_head = factor[:1, :, :1, :1]
    if scores.mask is not None or (factor != of_head).any():
        return False
    scores.scale = scores.scale * of_head.reshape(-1)
    scores.bias = None if scores.bias is None else scores.bias * factor
    return True


def _constant(op: Op[PointwiseProblem], stage: Stage) -> np.ndarray:
    """Returns the constant operand of a stage, with four dimensions."""
    if not stage.operand:
        return np.full((1, 1, 1, 1), stage.params[0], np.float64)
    p = op.problem
    return np.asarray(op.weights[stage.operand], np.float64).reshape(p.span(p.constants[int(stage.operand[1:])]))


# ---- operands


def _moved(network: Network, side: _Side, fits: Fits) -> tuple[_Side, _Side]:
    """Follows moves of an operand backwards: returns (the operand in the farthest tensor in which its elements are at constant
    steps, the operand in the farthest of all).
    """
    best = now = side
    for tensor, index, through in backwards(network, side.tensor, side.index):
        now = replace(side, tensor=tensor, index=index, through=(*side.through, *through))
        best = now if fits(tensor, index) else best
    return best, now


def _side(network: Network, tensor: str, index: np.ndarray, fits: Fits, *, unit: bool) -> _Side:
    """Follows an operand of the scores backwards to the farthest tensor in which its elements are at constant steps; `unit`:
    its rows may be normalized on the way.
    """
    best = now = _Side(tensor, index)
    while True:
        nearer, now = _moved(network, now, fits)
        best = nearer if fits(nearer.tensor, nearer.index) else best
        op = network.producer(now.tensor)
        if not computes(op, PointwiseProblem) or op.when:
            return best
        if now.unit is None and (factor := _factor(op)) is not None:
            now = replace(now, tensor=op.inputs[0], factor=now.factor * factor, through=(*now.through, op))
        elif unit and now.unit is None and (found := _unit(network, op, now.index)) is not None:
            now = replace(now, tensor=op.inputs[0], unit=found[0], through=(*now.through, *found[1]))
        else:
            return best
        best = now if fits(now.tensor, now.index) else best


def _by_number(op: Op[PointwiseProblem]) -> tuple[str, float] | None:
    """Returns (operation, number) of an op that applies one operation with one number to one tensor; None for other ops.

    A Clip without an upper end is "max" with its lower end.
    """
    p = op.problem
    if len(p.stages) != 1 or p.tensors != ("nchw",):  # one input: the operand is no tensor
        return None
    (stage,) = p.stages
    if stage.op == "clip":
        return ("max", float(stage.params[0])) if stage.params[1] > UNBOUNDED else None
    value = _constant(op, stage) if stage.op in ("mul", "div", "max") else None
    return None if value is None or value.size != 1 else (stage.op, float(value.item()))


def _factor(op: Op[PointwiseProblem]) -> float | None:
    """Returns the number by which an op multiplies, or the inverse of the number by which it divides; None for other ops."""
    name, value = _by_number(op) or ("", 0.0)
    return (value if name == "mul" else 1 / value) if name in ("mul", "div") and value else None


def _unit(network: Network, op: Op[PointwiseProblem], index: np.ndarray) -> tuple[float, tuple[Op[Problem], ...]] | None:
    """Returns (epsilon, ops) if the op divides x by the length of its rows, or by epsilon if that is larger; else None.

    The rows must be the operand's: all elements that differ in its last index, and no others.
    """
    p = op.problem
    if [s.op for s in p.stages] != ["div"] or p.stages[0].operand != "t1" or p.tensors[0] != "nchw":
        return None
    shape = p.span(p.tensors[1])
    length = np.broadcast_to(np.arange(prod(shape), dtype=INDEX).reshape(shape), p.out_shape).reshape(-1)
    tensor, length, moved = farthest(network, op.inputs[1], length)
    least = network.producer(tensor)
    name, epsilon = (_by_number(least) if computes(least, PointwiseProblem) else None) or ("", 0.0)
    if least is None or name != "max" or epsilon <= 0:  # the least value that passes
        return None
    tensor, length, passed = farthest(network, least.inputs[0], length)
    made = network.producer(tensor)
    if not computes(made, ReduceProblem) or made.problem.kind != "l2" or made.inputs[0] != op.inputs[0]:
        return None
    r = made.problem
    rows = np.broadcast_to(np.arange(prod(r.out_shape)).reshape(r.out_shape), r.in_shapes[0]).reshape(-1)
    of_operand = rows[index]
    one_row = rows.size // prod(r.out_shape) == index.shape[3] and bool((of_operand == of_operand[..., :1]).all())
    return (epsilon, (op, *moved, least, *passed, made)) if one_row and np.array_equal(rows, length) else None
