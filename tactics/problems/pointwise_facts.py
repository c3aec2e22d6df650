"""What is known of elementwise functions without running them: the values they can give, and where rounding ruins them.

A function has a cliff at the edges of its domain and at its poles: FP16 rounds 3e-5 - 3e-8 and 3e-5 to the same number, and
the reciprocal of their difference, 3e7 in FP32, becomes infinite. FACTS has a line for every operator of pointwise_ops,
LIBRARY_CLIFFS for every function of the library that has a cliff, and ROW_CLIFFS for every kind of reduction.

An Interval holds all values that a number can have; its ends may be infinite, and both are included.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tactics.problems.pointwise_ops import Stage

NEAR = 2.0**-14  # the smallest normal number of FP16: below it, numbers have fewer digits, and below 2^-25 none
INF = math.inf


@dataclass(frozen=True, slots=True)
class Interval:
    low: float = -INF
    high: float = INF

    def __post_init__(self) -> None:
        if not self.low <= self.high:
            raise ValueError(f"expected an interval, got {self.low} to {self.high}")

    def hull(self, other: Interval) -> Interval:
        return Interval(min(self.low, other.low), max(self.high, other.high))

    def stored(self) -> Interval:
        """In FP16: rounding keeps the order of numbers, so the ends are where the rounded ends are."""
        with np.errstate(over="ignore"):
            return Interval(*(float(np.float16(v)) for v in (self.low, self.high)))


ANY, POSITIVE = Interval(), Interval(0.0)


@dataclass(frozen=True, slots=True)
class Cliff:
    """`edges`: values of the base at which the function is infinite or ceases to be a number. `closed`: the interval, if any,
    up to whose ends it has finite values, so that rounding to them is no harm. `of_operand`: the base is the operand, not v."""

    edges: tuple[float, ...]
    closed: tuple[float, float] | None = None
    of_operand: bool = False

    def clear(self, base: Interval) -> bool:
        """Whether the base is known to stay away: at least NEAR from every edge, or where the function is closed."""
        if self.closed and self.closed[0] <= base.low and base.high <= self.closed[1]:
            return True
        return all(base.low - edge >= NEAR or edge - base.high >= NEAR for edge in self.edges)


@dataclass(frozen=True, slots=True)
class Fact:
    """`image`: (interval of v, interval of the operand or of the scalar in its place, parameters) -> interval of the result.
    `cliff`: (interval of the operand) -> the function's cliff, or None. `pole`: of v itself, as of a reciprocal, whose result
    may leave FP16's range near it."""

    image: Callable[..., Interval]
    cliff: Callable[[Interval], Cliff | None] = lambda b: None
    pole: bool = False


def _corners(op: Callable[[float, float], float]) -> Callable[..., Interval]:
    """The image of what is monotone in each of its arguments apart; anything where a corner is no number."""

    def image(v: Interval, b: Interval, *_: float) -> Interval:
        found = [op(x, y) for x in (v.low, v.high) for y in (b.low, b.high)]
        return ANY if any(map(math.isnan, found)) else Interval(min(found), max(found))

    return image


def _times(x: float, y: float) -> float:
    return 0.0 if not x or not y else x * y  # an infinite end is no value: 0 times what comes near it is 0


def _div(v: Interval, b: Interval, *_: float) -> Interval:
    if b.low > 0 or b.high < 0:
        return MUL(v, Interval(1 / b.high, 1 / b.low))
    positive = v.low >= 0 and b.low >= 0
    return POSITIVE if positive else ANY


def _rising(f: Callable[..., float]) -> Callable[..., Interval]:
    """The image of a function that never falls; parameters follow its argument."""

    def image(v: Interval, b: Interval, *params: float) -> Interval:
        return Interval(f(v.low, *params), f(v.high, *params))

    return image


def _abs(v: Interval, *_: float) -> Interval:
    most = max(abs(v.low), abs(v.high))
    return Interval(0.0 if v.low <= 0 <= v.high else min(abs(v.low), abs(v.high)), most)


def _square(v: Interval, *_: float) -> Interval:
    size = _abs(v)
    return Interval(_safe(lambda x: x * x)(size.low), _safe(lambda x: x * x)(size.high))


def _pow(v: Interval, b: Interval, *_: float) -> Interval:
    if v.low < 0:
        return POSITIVE if b.low == b.high and b.low % 2 == 0 else ANY
    if not 0 <= b.low == b.high < INF:
        return POSITIVE
    return Interval(_safe(math.pow)(v.low, b.low), _safe(math.pow)(v.high, b.low))


def _power_cliff(b: Interval) -> Cliff | None:
    """By the exponent: whole and not negative, fractional, or another."""
    if b.low == b.high and b.low >= 0:
        return None if b.low == int(b.low) else Cliff((0.0,), (0.0, INF))
    return Cliff((0.0,))


def _safe(f: Callable[..., float]) -> Callable[..., float]:
    """`f` with an infinite end for what a double cannot hold."""

    def value(*args: float) -> float:
        try:
            return f(*args)
        except OverflowError:
            return INF

    return value


def _of(cliff: Cliff) -> Callable[[Interval], Cliff | None]:
    return lambda b: cliff


def _within(*interval: float) -> Callable[..., Interval]:
    known = Interval(*interval)
    return lambda v, *_: known


def _leaky(v: Interval, b: Interval, *_: float) -> Interval:
    """v where v >= 0, else v times the slope."""
    below = MUL(Interval(min(v.low, 0.0), min(v.high, 0.0)), b)
    return Interval(max(v.low, 0.0), max(v.high, 0.0)).hull(below)


def _clip(v: Interval, b: Interval, low: float, high: float) -> Interval:
    ends = [min(max(x, low), high) for x in (v.low, v.high)]
    return Interval(*ends)


ADD = _corners(lambda x, y: x + y)
MUL = _corners(_times)
_log = _rising(lambda x: math.log(x) if 0 < x < INF else (INF if x > 0 else -INF))
_sqrt = _rising(lambda x: math.sqrt(x) if x > 0 else 0.0)
ZERO, ROOT = Cliff((0.0,)), Cliff((0.0,), (0.0, INF))
# Of every operator of pointwise_ops.
FACTS: dict[str, Fact] = {
    "none": Fact(lambda v, *_: v),
    "relu": Fact(_rising(lambda x: max(x, 0.0))),
    "leaky_relu": Fact(lambda v, b, slope: _leaky(v, Interval(slope, slope))),
    "prelu": Fact(_leaky),
    "clip": Fact(_clip),
    "sigmoid": Fact(_within(0.0, 1.0)),
    "silu": Fact(lambda v, *_: Interval(-0.2785, max(v.high, 0.0))),
    "hard_sigmoid": Fact(_within(0.0, 1.0)),
    "hard_swish": Fact(lambda v, *_: Interval(-0.375, max(v.high, 0.0))),
    "tanh": Fact(_within(-1.0, 1.0)),
    "abs": Fact(_abs),
    "ceil": Fact(_rising(lambda x: math.ceil(x) if abs(x) < INF else x)),
    "elu": Fact(lambda v, b, a: Interval(min(v.low, 0.0, -abs(a)), max(v.high, abs(a)))),
    "erf": Fact(_rising(math.erf)),
    "exp": Fact(_rising(_safe(math.exp))),
    "floor": Fact(_rising(lambda x: math.floor(x) if abs(x) < INF else x)),
    "gelu": Fact(lambda v, *_: Interval(-0.17, max(v.high, 0.0))),
    "gelu_tanh": Fact(lambda v, *_: Interval(-0.1701, max(v.high, 0.0))),
    "log": Fact(_log, _of(ZERO)),
    "mish": Fact(lambda v, *_: Interval(-0.309, max(v.high, 0.0))),
    "round": Fact(_rising(lambda x: round(x) if abs(x) < INF else x)),
    "sign": Fact(_within(-1.0, 1.0)),
    "softplus": Fact(lambda v, *_: Interval(0.0, max(v.high, 0.0) + 0.6932)),
    "softsign": Fact(_within(-1.0, 1.0)),
    "sqrt": Fact(_sqrt, _of(ROOT)),
    "square": Fact(_square),
    "thresholded_relu": Fact(lambda v, b, a: Interval(min(0.0, max(v.low, a)), max(v.high, 0.0))),
    "add": Fact(ADD),
    "sub": Fact(lambda v, b, *_: ADD(v, Interval(-b.high, -b.low))),
    "rsub": Fact(lambda v, b, *_: ADD(b, Interval(-v.high, -v.low))),
    "mul": Fact(MUL),
    "div": Fact(_div, _of(Cliff((0.0,), of_operand=True))),
    "rdiv": Fact(lambda v, b, *_: _div(b, v), _of(ZERO), pole=True),
    "max": Fact(_corners(max)),
    "min": Fact(_corners(min)),
    "pow": Fact(_pow, _power_cliff, pole=True),
    "rpow": Fact(lambda v, b, *_: POSITIVE if b.low >= 0 else ANY, _of(Cliff((0.0,), of_operand=True))),
}  # fmt: skip
# Of the library's functions, whose base is their one input, and of the reductions that end in a function with a cliff. (Those
# of rows that take a root or divide by a deviation have sums of squares, or a positive epsilon, as their base.)
LIBRARY_CLIFFS = {
    "Asin": Cliff((-1.0, 1.0), (-1.0, 1.0)), "Acos": Cliff((-1.0, 1.0), (-1.0, 1.0)), "Acosh": Cliff((1.0,), (1.0, INF)),
    "Atanh": Cliff((-1.0, 1.0)), "Tan": Cliff(tuple(math.pi * (k + 0.5) for k in range(-64, 64))),
}  # fmt: skip
ROW_CLIFFS = {"log_sum": ZERO}


def stage_interval(stage: Stage, v: Interval, operand: Interval | None = None) -> Interval:
    return FACTS[stage.op].image(v, _operand(stage, operand), *(() if stage.operand else stage.params))


def stage_cliff(stage: Stage, operand: Interval | None = None) -> Cliff | None:
    """Where rounding ruins the stage. `operand`: of one with an operand, what is known of it."""
    return FACTS[stage.op].cliff(_operand(stage, operand))


def stage_base(stage: Stage, v: Interval, operand: Interval | None = None) -> Interval:
    """What the stage's cliff is about."""
    cliff = stage_cliff(stage, operand)
    return _operand(stage, operand) if cliff is not None and cliff.of_operand else v


def _operand(stage: Stage, operand: Interval | None) -> Interval:
    return operand or (Interval(stage.params[0], stage.params[0]) if stage.params else ANY)
