"""Finds an interval of possible values for each of a network's tensors, without running it.

The values of convolutions and network inputs are unknown, but later operators bound them: a Sigmoid is between 0 and 1, a sum
of squares is not negative, and that sum plus 1e-3 stays away from 0. Intervals also hold for tensors rounded to FP16.
"""

import functools
import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from gpu_runtime.network import Network, Op
from gpu_runtime.precision import execution
from tactics.problems.epilogue import AFFINE
from tactics.problems.gather import GatherProblem, ResizeProblem, ViewProblem
from tactics.problems.intervals import ANY, POSITIVE, Image, Interval
from tactics.problems.library_problem import FLOAT, LibraryProblem
from tactics.problems.pointwise_ops import OPERATIONS, Stage, stage_of
from tactics.problems.problem import (
    ConcatProblem,
    ConvProblem,
    ConvTransposeProblem,
    MoveProblem,
    PointwiseProblem,
    PoolProblem,
)
from tactics.problems.reductions import NormalizeProblem, ReduceProblem

POSITIVE_SUMS = ("l1", "l2", "sum_square", "inv_std")
END = Stage("abs")
BYTES = {"uint8": Interval(0.0, 255.0), "int8": Interval(-128.0, 127.0)}
OF_TYPE = BYTES | {"bool": Interval(0.0, 1.0), "int32": Interval(-(2.0**31), 2.0**31)}
IMAGES: dict[str, Image] = {
    **{name: OPERATIONS[name.lower()].image for name in ("Add", "Sub", "Mul", "Div", "Max", "Min")},
    "Mod": lambda v, b: Interval(-max(abs(b.low), abs(b.high)), max(abs(b.low), abs(b.high))),
}
INDICES = {"ArgMax": 0, "ArgMin": 0, "TopK": 1}  # function -> the output that numbers elements along an axis
Known = Mapping[str, Interval]


def known(network: Network) -> dict[str, Interval]:
    """Returns tensor -> its interval, in the unfused network."""
    found = {t.name: OF_TYPE.get(t.dtype, ANY) for t in network.inputs}
    maker: dict[str, Op] = {}
    for op in execution.plain(network):
        v = _interval(op, found, maker)
        found[op.output] = v.stored() if network.type(op.output).dtype == "fp16" else v
        maker[op.output] = op
    return found


class Reached(NamedTuple):
    """A stage of a pointwise op, with the intervals of its input and of its operand (None: a scalar), and the tensors that its
    input was computed from.
    """

    stage: Stage
    input: Interval
    operand: Interval | None
    of: frozenset[str]


def along(op: Op, found: Known) -> Iterator[Reached]:
    """Yields every stage of a pointwise op; the last one is END, whose input is the op's result."""
    v, of = found[op.inputs[0]], frozenset(op.inputs[:1])
    for stage in op.problem.stages:
        name = stage.operand
        operand = _operand(op, name, found) if name else None
        yield Reached(stage, v, operand, of)
        alone = stage == Stage("mul", "t0") and stage is op.problem.stages[0]  # x * x
        v = (Stage("square") if alone else stage).interval(v, operand)
        of |= {op.inputs[int(name[1:])]} if name.startswith("t") else set()
    yield Reached(END, v, None, of)


def _interval(op: Op, found: Known, maker: Mapping[str, Op]) -> Interval:
    p = op.problem
    if isinstance(p, PointwiseProblem):
        return [*along(op, found)][-1].input
    if isinstance(p, (ConvProblem, ConvTransposeProblem)):
        return _convolution(op, found)
    if isinstance(p, (ViewProblem, MoveProblem, GatherProblem, ConcatProblem)):
        return _moved(op, found)
    if isinstance(p, PoolProblem):
        x = found[op.inputs[0]]
        return x.hull(Interval(0.0, 0.0)) if p.kind == "avg" and p.count_pad else x
    if isinstance(p, ResizeProblem):
        x = found[op.inputs[0]]
        outside = Interval(p.extrapolation, p.extrapolation) if p.coordinate_mode == "tf_crop_and_resize" else x
        return x.hull(outside) if p.mode == "linear" else ANY
    if isinstance(p, ReduceProblem):
        return _reduction(op, found[op.inputs[0]], maker)
    if isinstance(p, LibraryProblem):
        return _library(op, found)
    if isinstance(p, NormalizeProblem):
        return {"softmax": Interval(0.0, 1.0), "log_softmax": Interval(high=0.0)}.get(p.kind, ANY)
    return ANY


def _library(op: Op, found: Known) -> Interval:
    p = op.problem
    if p.part == INDICES.get(p.function):
        axis = dict(p.attributes).get("axis", -1 if p.function == "TopK" else 0)
        return Interval(0.0, float(p.shapes[0][axis] - 1))
    if p.dtype == "bool":
        return OF_TYPE["bool"]
    if p.function in ("Cast", "Identity", "Reshape", "Transpose", "Slice"):
        v, limits = found[op.inputs[0]], BYTES.get(p.dtype, ANY)
        if p.function == "Cast" and p.dtype != FLOAT:
            v = v.hull(Interval(0.0, 0.0))  # 0.5 becomes 0
        return v if limits.low <= v.low and v.high <= limits.high else limits  # a Cast to 8 bits wraps
    if p.function in IMAGES and all(p.arguments):
        return functools.reduce(IMAGES[p.function], (_operand(op, a, found) for a in p.arguments))
    return OF_TYPE.get(p.dtype, ANY)


def _operand(op: Op, name: str, found: Known) -> Interval:
    """Returns the interval of an op's operand: an input (t0, t1, ...) or a weight."""
    return found[op.inputs[int(name[1:])]] if name.startswith("t") else _of(op.weights[name])


def _of(values: np.ndarray) -> Interval:
    return Interval(float(np.min(values)), float(np.max(values)))


def _convolution(op: Op, found: Known) -> Interval:
    p, v, slopes = op.problem, ANY, op.weights.get("slope")
    operand = None if slopes is None else _of(slopes)
    for stage in stage_of(p.epilogue.act, "slope"):
        v = stage.interval(v, operand)
    for name, step in zip(AFFINE, ("mul", "add"), strict=True) if p.epilogue.affine else ():
        v = Stage(step, "c0").interval(v, _of(op.weights[name]))
    if p.epilogue.act_first:
        v = Stage("add", "t1").interval(v, found[op.inputs[1]])
    for stage in stage_of(p.epilogue.last):
        v = stage.interval(v)
    return v


def _moved(op: Op, found: Known) -> Interval:
    p, v = op.problem, found[op.inputs[0]]
    for t in op.inputs[1:]:
        v = v.hull(found[t])
    if isinstance(p, GatherProblem):
        filled = any(-1 in index for index in p.index)
    else:
        filled = isinstance(p, MoveProblem) and p.kind == "window" and _reaches_out(p)
    return v.hull(Interval(p.fill, p.fill)) if filled else v


def _reaches_out(p: MoveProblem) -> bool:
    """Whether a window has elements outside of its input."""
    sizes = zip(p.start, p.step, p.out, (p.c, p.h, p.w), strict=True)
    return any(start < 0 or start + (count - 1) * step >= size for start, step, count, size in sizes)


def _reduction(op: Op, x: Interval, maker: Mapping[str, Op]) -> Interval:
    p = op.problem
    count = math.prod(d for a, d in zip("nchw", p.in_shapes[0], strict=True) if a in p.axes)
    if p.kind in ("mean", "max", "min"):
        return x
    if p.kind == "sum":
        low = 1.0 if _largest_is_one(op, maker) else count * x.low if x.low else 0.0
        return Interval(low, max(low, count * x.high if x.high else 0.0))
    return POSITIVE if p.kind in POSITIVE_SUMS or (p.kind == "prod" and x.low >= 0) else ANY


def _largest_is_one(op: Op, maker: Mapping[str, Op]) -> bool:
    """Whether a sum is over exp(x - maximum along the same axes), whose largest value is 1: a Softmax written as nodes."""
    chain = maker.get(op.inputs[0])
    if chain is None or not isinstance(chain.problem, PointwiseProblem) or len(chain.inputs) != 2:
        return False
    top = maker.get(chain.inputs[1])
    if top is None or not isinstance(top.problem, ReduceProblem) or top.problem.kind != "max":
        return False
    return (
        chain.problem.stages == (Stage("sub", "t1"), Stage("exp"))
        and top.inputs == chain.inputs[:1]
        and (top.problem.axes == op.problem.axes)
    )
