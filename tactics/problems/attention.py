"""Attention as a problem: softmax(queries x keys) x values, with every operand read from its place in a larger tensor.

As in problem.py, records are frozen and hashable, `str()` is the key in caches, `reference()` the meaning over FP32 arrays.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar

import numpy as np

from tactics.problems.protocol import Problem, Shape4, spanned

LONGEST = 1 << 24  # the largest size of an operand's index
Steps = tuple[int, int, int, int]
Place = tuple[int, int, int]  # image, channel, pixel


@dataclass(frozen=True, slots=True)
class Operand:
    """A strided view with four indices of a tensor: element (i, j, k, l) is the tensor's element number `start` + i*step[0] +
    j*step[1] + k*step[2] + l*step[3], counted row-major in NCHW.

    `tensor`: the index of the tensor among the problem's inputs, then the output. A step of 0 repeats elements. Each index
    moves along one axis of the tensor (images, channels or pixels) and never leaves it, so the view has steps in every layout.

    Example: one product gives q, k and v as [1, 50 tokens, 3 * 2 heads * 16]. k of (image, head, token, inner) has start 32 and
    steps (4800, 16, 96, 1).
    """

    tensor: int
    start: int
    step: Steps

    def __str__(self) -> str:
        return f"t{self.tensor}+{self.start}:{','.join(map(str, self.step))}"

    def along(self, sizes: Sequence[int], shape: Shape4) -> tuple[Place, tuple[tuple[int, int], ...]] | None:
        """Returns ((image, channel, pixel) of the first element, for each index (its axis: 0, 1, 2 of these three; its step
        there)).

        `sizes`: of the four indices; `shape`: of the tensor. Returns None if an index leaves its axis, or the tensor.
        """
        n, c, height, width = shape
        pixels = height * width
        units, room = (c * pixels, pixels, 1), (n, c, pixels)
        first = self.start // units[0], self.start // pixels % c, self.start % pixels
        reach, steps = list(first), []
        for step, size in zip(self.step, sizes, strict=True):
            moves = step if size > 1 else 0
            axis = next(a for a, unit in enumerate(units) if moves % unit == 0)
            reach[axis] += (size - 1) * (moves // units[axis])
            steps.append((axis, moves // units[axis]))
        inside = min(self.start, *self.step) >= 0 and all(r < end for r, end in zip(reach, room, strict=True))
        return (first, tuple(steps)) if inside else None

    def seen(self, flat: np.ndarray, sizes: Sequence[int]) -> np.ndarray:
        """Returns the operand as an array of shape `sizes`, a view of `flat`: the tensor's elements, row-major, in one
        dimension."""
        strides = tuple(s * flat.itemsize for s in self.step)
        return np.lib.stride_tricks.as_strided(flat[self.start :], tuple(sizes), strides)


@dataclass(frozen=True, slots=True)
class AttentionProblem(Problem):
    """y[b,h,i,e] = sum over j of p[b,h,i,j] * v[b,h,j,e], with p = softmax over j of the scores
    scale[h] * (sum over c of q[b,h,i,c] * k[b,h,j,c]) + mask[b,h,i,j] + bias[b,h,i,j].

    `tensors`, `out`: shapes of the inputs and the output. The operands are views of them: `q` (batch, heads, rows, inner), `k`
    (batch, heads, columns, inner), `v` (batch, heads, columns, width), `mask` (batch, heads, rows, columns), and `y` (batch,
    heads, rows, width), which has each element of the output once. `bias`: the axes that the constant "bias" spans, a substring
    of "nchw" for (batch, heads, rows, columns); "": no constant. `unit`: rows of q and k are divided by their length first, or
    by `epsilon` if that is larger. Weights: "scale" [heads], "bias".

    Rows and columns are tokens in most networks. In cross-covariance attention they are channels; inner and width are tokens.
    """

    TYPE: ClassVar[str] = "attention"
    batch: int
    heads: int
    rows: int
    columns: int
    inner: int
    width: int
    tensors: tuple[Shape4, ...]
    out: Shape4
    q: Operand
    k: Operand
    v: Operand
    y: Operand
    mask: Operand | None = None
    bias: str = ""
    unit: bool = False
    epsilon: float = 0.0

    def __post_init__(self) -> None:
        shapes = [size for shape in (*self.tensors, self.out) for size in shape]
        sizes = self.batch, self.heads, self.rows, self.columns, self.inner, self.width
        if min(*sizes, *shapes) < 1 or max(sizes) > LONGEST:
            raise ValueError(f"attention: expected sizes from 1 to {LONGEST}, got {self}")
        if {o.tensor for _, o, _ in self.operands()} != {*range(len(self.tensors) + 1)}:
            raise ValueError(f"attention: expected every tensor to be read, and the output to be the last, got {self}")
        if self.bias != "".join(a for a in "nchw" if a in self.bias):
            raise ValueError(f"attention: expected axes in the order nchw, got {self.bias!r}")
        for name, operand, of in self.operands():
            if operand.along(of, (*self.tensors, self.out)[operand.tensor]) is None:
                raise ValueError(f"attention: {name} leaves its tensor, or an axis of it, got {self}")
        count, end = 1, prod(self.out)
        written = self.batch, self.heads, self.rows, self.width
        for step, size in sorted((s, n) for s, n in zip(self.y.step, written, strict=True) if n > 1):
            if step != count:
                raise ValueError(f"attention: expected each element of the output once, got {self}")
            count *= size
        if count != end or self.y.tensor != len(self.tensors):
            raise ValueError(f"attention: expected each element of the output once, got {self}")

    def __str__(self) -> str:
        sizes = f"n{self.batch} h{self.heads} i{self.rows} j{self.columns} c{self.inner} e{self.width}"
        dims = " ".join("x".join(map(str, s)) for s in (*self.tensors, self.out))
        more = f" mask={self.mask}" if self.mask else ""
        more += (f" bias_{self.bias}" if self.bias else "") + (f" unit eps{self.epsilon:g}" if self.unit else "")
        return f"attention {sizes} {dims} q={self.q} k={self.k} v={self.v} y={self.y}{more}"

    @property
    def score_sizes(self) -> Shape4:
        return self.batch, self.heads, self.rows, self.columns

    def operands(self) -> list[tuple[str, Operand, Shape4]]:
        """Returns (name, operand, its four sizes) of every operand, the output last."""
        b, h, i, j = self.score_sizes
        sizes = {"q": (i, self.inner), "k": (j, self.inner), "v": (j, self.width), "mask": (i, j), "y": (i, self.width)}
        all_of = {"q": self.q, "k": self.k, "v": self.v, "mask": self.mask, "y": self.y}
        return [(name, o, (b, h, *sizes[name])) for name, o in all_of.items() if o is not None]

    @property
    def in_shapes(self) -> tuple[Shape4, ...]:
        return self.tensors

    @property
    def out_shape(self) -> Shape4:
        return self.out

    @property
    def macs(self) -> int:
        return prod(self.score_sizes) * (self.inner + self.width)

    def span(self, axes: str) -> Shape4:
        """Returns the shape of a constant that spans `axes` of the scores and has size 1 along the others."""
        return spanned(self.score_sizes, axes)

    def reference(self, *tensors: np.ndarray, scale: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
        """Returns y, FP32 of shape `out`. `tensors`: FP32 arrays of in_shapes; `scale`: [heads]; `bias`: as many elements as
        span(self.bias) has."""
        flat = [np.ascontiguousarray(x, np.float32).reshape(-1) for x in tensors]
        q, k, v = (o.seen(flat[o.tensor], sizes) for name, o, sizes in self.operands() if name in "qkv")
        if self.unit:
            q, k = (x / np.maximum(np.sqrt((x * x).sum(3, keepdims=True)), self.epsilon) for x in (q, k))
        scores = q @ k.swapaxes(2, 3) * np.asarray(scale, np.float32).reshape(-1, 1, 1)
        if self.mask is not None:
            scores = scores + self.mask.seen(flat[self.mask.tensor], self.score_sizes)
        if bias is not None:
            scores = scores + np.asarray(bias, np.float32).reshape(self.span(self.bias))
        with np.errstate(invalid="ignore"):
            weight = np.exp(scores - scores.max(3, keepdims=True))
        weight /= weight.sum(3, keepdims=True)
        y = np.empty(prod(self.out), np.float32)
        self.y.seen(y, (*self.score_sizes[:3], self.width))[...] = weight @ v
        return y.reshape(self.out)
