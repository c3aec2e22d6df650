"""Intervals of numbers, their images under functions, and cliffs: operands near which FP16 rounding ruins a function's result.

A cliff is at an edge of a function's domain or at a pole. Example: 3e-5 - 3e-8 and 3e-5 round to the same number in FP16, so
the reciprocal of their difference is infinite instead of 3e7.

An Image is a function (interval of v, interval of the operand, parameters) -> interval of the result; a scalar in place of the
operand is an interval of one number.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

NEAR = 2.0**-14  # the smallest normal number of FP16: smaller numbers have fewer digits, and below 2^-25 they round to 0
INF = math.inf


@dataclass(frozen=True, slots=True)
class Interval:
    """All numbers from `low` to `high`, both included; either may be infinite."""

    low: float = -INF
    high: float = INF

    def __post_init__(self) -> None:
        if not self.low <= self.high:
            raise ValueError(f"expected an interval, got {self.low} to {self.high}")

    def hull(self, other: Interval) -> Interval:
        return Interval(min(self.low, other.low), max(self.high, other.high))

    def stored(self) -> Interval:
        """Returns the interval of the numbers rounded to FP16: rounding keeps their order, so only the ends are rounded."""
        with np.errstate(over="ignore"):
            return Interval(*(float(np.float16(v)) for v in (self.low, self.high)))


Image = Callable[..., Interval]
ANY, POSITIVE = Interval(), Interval(0.0)


@dataclass(frozen=True, slots=True)
class Cliff:
    """The values near which rounding ruins a function's result: values of its base, which is v, or the operand if `of_operand`.

    `edges`: base values at which the function is infinite or undefined. `closed`: an interval on which the function is finite,
    its ends included, so that rounding to an end does no harm; None: there is no such interval. Example: sqrt has the edge 0,
    and is finite on 0 to infinity.
    """

    edges: tuple[float, ...]
    closed: tuple[float, float] | None = None
    of_operand: bool = False

    def clear(self, base: Interval) -> bool:
        """Returns whether all values of `base` are safe: inside `closed`, or at least NEAR away from each edge."""
        if self.closed and self.closed[0] <= base.low and base.high <= self.closed[1]:
            return True
        return all(base.low - edge >= NEAR or edge - base.high >= NEAR for edge in self.edges)


ZERO, ROOT, DIVISOR = Cliff((0.0,)), Cliff((0.0,), (0.0, INF)), Cliff((0.0,), of_operand=True)


def at_power(b: Interval) -> Cliff | None:
    """Returns the cliff of v ** b for exponents b: None for one whole b >= 0, ROOT for one fractional b >= 0, else ZERO."""
    if b.low == b.high and b.low >= 0:
        return None if b.low == int(b.low) else ROOT
    return ZERO


# ---- makers of images


def rising(f: Callable[..., float]) -> Image:
    """Returns the image of a monotonically rising function f(v, *parameters)."""

    def image(v: Interval, b: Interval, *params: float) -> Interval:
        return Interval(f(v.low, *params), f(v.high, *params))

    return image


def within(low: float, high: float) -> Image:
    """Returns the image of a function whose values lie between `low` and `high`, for any v."""
    known = Interval(low, high)
    return lambda v, *_: known


def dips_to(low: float) -> Image:
    """Returns the image of a function like SiLU: its values are at least `low`, at most v for v > 0, and at most 0 for v <
    0."""
    return lambda v, *_: Interval(low, max(v.high, 0.0))


def corners(op: Callable[[float, float], float]) -> Image:
    """Returns the image of an operation of v and an operand that is monotone in each, so that its extremes are at the ends of
    both; the image is ANY if a value there is NaN."""

    def image(v: Interval, b: Interval, *_: float) -> Interval:
        found = [op(x, y) for x in (v.low, v.high) for y in (b.low, b.high)]
        return ANY if any(map(math.isnan, found)) else Interval(min(found), max(found))

    return image


def bounded(f: Callable[..., float]) -> Callable[..., float]:
    """Returns f, but infinity in place of an OverflowError."""

    def value(*args: float) -> float:
        try:
            return f(*args)
        except OverflowError:
            return INF

    return value


# ---- images


def _times(x: float, y: float) -> float:
    return 0.0 if not x or not y else x * y  # an infinite end stands for finite values of any size: 0 times these is 0


plus, times = corners(lambda x, y: x + y), corners(_times)
root = rising(lambda x: math.sqrt(x) if x > 0 else 0.0)
logarithm = rising(lambda x: math.log(x) if 0 < x < INF else (INF if x > 0 else -INF))


def minus(v: Interval, b: Interval, *_: float) -> Interval:
    return plus(v, Interval(-b.high, -b.low))


def over(v: Interval, b: Interval, *_: float) -> Interval:
    if b.low > 0 or b.high < 0:
        return times(v, Interval(1 / b.high, 1 / b.low))
    positive = v.low >= 0 and b.low >= 0
    return POSITIVE if positive else ANY


def power(v: Interval, b: Interval, *_: float) -> Interval:
    if v.low < 0:
        return POSITIVE if b.low == b.high and b.low % 2 == 0 else ANY
    if not 0 <= b.low == b.high < INF:
        return POSITIVE
    return Interval(bounded(math.pow)(v.low, b.low), bounded(math.pow)(v.high, b.low))


def size(v: Interval, *_: float) -> Interval:
    most = max(abs(v.low), abs(v.high))
    return Interval(0.0 if v.low <= 0 <= v.high else min(abs(v.low), abs(v.high)), most)


def square(v: Interval, *_: float) -> Interval:
    found = size(v)
    return Interval(*(bounded(lambda x: x * x)(x) for x in (found.low, found.high)))


def leaky(v: Interval, b: Interval, *_: float) -> Interval:
    """Returns the image of leaky ReLU, v if v >= 0, else v times the slope b."""
    below = times(Interval(min(v.low, 0.0), min(v.high, 0.0)), b)
    return Interval(max(v.low, 0.0), max(v.high, 0.0)).hull(below)
