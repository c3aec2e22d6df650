"""Problems over rows of a tensor: reductions, and normalizations by a row's own statistics. Shapes are NCHW.

A row is a set of elements whose indices differ along `axes` only, a substring of "nchw"; with axes "hw", a row is a channel of
an image. As in problem.py, records are frozen and hashable, `str()` is the key in caches, `reference()` the meaning over FP32
arrays.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from tactics.problems.intervals import ZERO
from tactics.problems.protocol import OneTensor, Shape4, spanned

# Name -> function of (array, axes). reduce.cu numbers the names in this order, and NORMALIZATIONS after them.
REDUCTIONS: dict[str, Callable[[np.ndarray, tuple[int, ...]], np.ndarray]] = {
    "sum": lambda x, a: x.sum(a, keepdims=True),
    "mean": lambda x, a: x.mean(a, keepdims=True),
    "max": lambda x, a: x.max(a, keepdims=True),
    "min": lambda x, a: x.min(a, keepdims=True),
    "prod": lambda x, a: x.prod(a, keepdims=True),
    "l1": lambda x, a: np.abs(x).sum(a, keepdims=True),
    "l2": lambda x, a: np.sqrt((x * x).sum(a, keepdims=True)),
    "sum_square": lambda x, a: (x * x).sum(a, keepdims=True),
    "log_sum": lambda x, a: np.log(x.sum(a, keepdims=True)),
    "log_sum_exp": lambda x, a: np.log(np.exp(x - x.max(a, keepdims=True)).sum(a, keepdims=True)) + x.max(a, keepdims=True),
    "inv_std": lambda x, a: 1 / np.sqrt(x.var(a, keepdims=True)),  # ReduceProblem adds an epsilon to the variance
}
NORMALIZATIONS = ("softmax", "log_softmax", "standard")
# Kind -> the Cliff of the function that ends it. (Kinds that end in a root or a division by a deviation have none: a sum of
# squares, or a positive epsilon, is in it.)
CLIFFS = {"log_sum": ZERO}


def _check(kind: str, known: Collection[str], axes: str) -> None:
    if kind not in known:
        raise ValueError(f"rows: unknown kind {kind!r}, expected one of {', '.join(known)}")
    if not axes or axes != "".join(a for a in "nchw" if a in axes):
        raise ValueError(f"rows: expected some of the axes, in the order nchw, got {axes!r}")


@dataclass(frozen=True, slots=True)
class ReduceProblem(OneTensor):
    """One statistic of every row; the output has size 1 along `axes`. `kind`: a name in REDUCTIONS; `epsilon`: added to the
    variance by inv_std."""

    TYPE: ClassVar[str] = "reduce"
    kind: str
    axes: str
    epsilon: float = 0.0
    groups: ClassVar[int] = 1  # NormalizeProblem's fields, for code that reads both
    affine: ClassVar[str] = ""
    added: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _check(self.kind, REDUCTIONS, self.axes)

    def __str__(self) -> str:
        epsilon = f" eps{self.epsilon:g}" if self.kind == "inv_std" else ""
        return f"reduce n{self.n} c{self.c} h{self.h} w{self.w} {self.kind} {self.axes}{epsilon}"

    @property
    def out_shape(self) -> Shape4:
        return spanned(self.in_shapes[0], "".join(a for a in "nchw" if a not in self.axes))

    def reference(self, x: np.ndarray) -> np.ndarray:
        x, axes = np.asarray(x, np.float32), tuple(map("nchw".index, self.axes))
        if self.kind == "inv_std":
            return 1 / np.sqrt(x.var(axes, keepdims=True) + np.float32(self.epsilon))
        return REDUCTIONS[self.kind](x, axes)


@dataclass(frozen=True, slots=True)
class NormalizeProblem(OneTensor):
    """The normalization of every row. `kind`: "softmax", "log_softmax", or "standard": (x - mean) / sqrt(variance + epsilon) *
    scale + bias.

    With `groups` > 1 (and c in `axes`) a row has only the channels of one group. `affine`: the axes that scale and bias span;
    "": neither exists. `added`: a second input of the same shape is added to x first.
    """

    TYPE: ClassVar[str] = "normalize"
    kind: str
    axes: str
    groups: int = 1
    epsilon: float = 0.0
    affine: str = ""
    added: bool = False

    def __post_init__(self) -> None:
        _check(self.kind, NORMALIZATIONS, self.axes)
        if self.groups < 1 or self.c % self.groups or (self.groups > 1 and "c" not in self.axes):
            raise ValueError(f"normalize: c={self.c} along axes {self.axes} cannot be in {self.groups} groups")
        if self.affine != "".join(a for a in "nchw" if a in self.affine):
            raise ValueError(f"normalize: expected axes in the order nchw, got {self.affine!r}")

    def __str__(self) -> str:
        how = f" eps{self.epsilon:g}" if self.kind == "standard" else ""
        how += (f" groups{self.groups}" if self.groups > 1 else "") + (f" affine_{self.affine}" if self.affine else "")
        how += " added" if self.added else ""
        return f"normalize n{self.n} c{self.c} h{self.h} w{self.w} {self.kind} {self.axes}{how}"

    @property
    def in_shapes(self) -> tuple[Shape4, ...]:
        return ((self.n, self.c, self.h, self.w),) * (1 + self.added)

    def span(self, axes: str) -> Shape4:
        """Returns the shape of a constant that spans `axes`."""
        return spanned(self.out_shape, axes)

    def reference(self, x: np.ndarray, added: Any = None, *, scale: Any = None, bias: Any = None) -> np.ndarray:
        """Returns the normalized x [n,c,h,w], FP32. `added`: as x; `scale`, `bias`: as many elements as span(self.affine)."""
        x = np.asarray(x, np.float32)
        x = (x + added if self.added else x).reshape(self.n, self.groups, self.c // self.groups, self.h, self.w)
        axes = tuple({"n": 0, "c": 2, "h": 3, "w": 4}[a] for a in self.axes)
        if self.kind == "standard":
            mean = x.mean(axes, keepdims=True, dtype=np.float64)
            y = (x - mean) / np.sqrt(np.square(x - mean).mean(axes, keepdims=True) + self.epsilon)
        else:
            y = x - x.max(axes, keepdims=True)
            total = np.exp(y).sum(axes, keepdims=True)
            y = np.exp(y) / total if self.kind == "softmax" else y - np.log(total)
        y = y.reshape(self.out_shape).astype(np.float32)
        if self.affine:
            scale, bias = (np.asarray(a, np.float32).reshape(self.span(self.affine)) for a in (scale, bias))
            y = y * scale + bias
        return y
