"""Problems that move data by tables of indices: views, gathers along every axis, resizing. Shapes are NCHW.

As in problem.py, records are frozen and hashable, `str()` is the key in caches, `reference()` the meaning over FP32 arrays.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

import numpy as np

from tactics.problems.protocol import OneTensor, Problem, Shape4

LONGEST_PRINTED = 16  # entries; a problem's text has a longer table as its length and hash
MOST_SCALE = 1 << 24  # the largest scale, 1/scale and coordinate of a resize: indices then fit 64 bits, and weights are finite
MOST_TAPS = 1 << 16  # of a resize along an axis: with antialiasing a small scale has many
Scale = float | np.float32 | Fraction  # of a resize: the model's number, or the ratio of the sizes


def _text(table: tuple) -> str:
    if len(table) <= LONGEST_PRINTED:
        return ",".join(f"{v:g}" for v in table)
    return f"{len(table)}#{hashlib.sha256(repr(table).encode()).hexdigest()[:12]}"


def _dims(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


@dataclass(frozen=True, slots=True)
class ViewProblem(Problem):
    """A reshape of `shape` to `out`, elements row-major. No kernel runs: linear memory stays unchanged."""

    TYPE: ClassVar[str] = "view"
    shape: Shape4
    out: Shape4

    def __post_init__(self) -> None:
        if np.prod(self.shape, dtype=object) != np.prod(self.out, dtype=object):
            raise ValueError(f"view: {self.shape} and {self.out} have different numbers of elements")

    def __str__(self) -> str:
        return f"view {_dims(self.shape)} {_dims(self.out)}"

    @property
    def in_shapes(self) -> tuple[Shape4, ...]:
        return (self.shape,)

    @property
    def out_shape(self) -> Shape4:
        return self.out

    def reference(self, x: np.ndarray) -> np.ndarray:
        return np.asarray(x, np.float32).reshape(self.out)


@dataclass(frozen=True, slots=True)
class GatherProblem(Problem):
    """A permutation of axes, then a selection of indices along each: output axis a is input axis perm[a] at the indices
    index[a].

    An empty index[a] takes every index in order; index -1 gives `fill`. Transpose, Slice with any steps, Pad in every mode,
    Gather by constants, Tile, Expand, nearest Resize in every coordinate mode, and sequences of these are such problems.

    Example: shape (1, 2, 4, 4), perm (0, 1, 3, 2), index ((), (), (3, 2), ()): out[n,c,i,j] = x[n,c,j,3-i], of shape (1, 2, 2,
    4).
    """

    TYPE: ClassVar[str] = "gather"
    shape: Shape4
    perm: tuple[int, int, int, int] = (0, 1, 2, 3)
    index: tuple[tuple[int, ...], ...] = ((), (), (), ())
    fill: float = 0.0

    def __post_init__(self) -> None:
        if sorted(self.perm) != [0, 1, 2, 3] or len(self.index) != 4:
            raise ValueError(f"gather: expected a permutation of 4 axes and 4 tables, got {self.perm}, {len(self.index)}")
        for axis, table in zip(self.perm, self.index, strict=True):
            if table and not -1 <= min(table) <= max(table) < self.shape[axis]:
                raise ValueError(f"gather: expected indices -1 to {self.shape[axis] - 1}, got {min(table)} to {max(table)}")

    def __str__(self) -> str:
        tables = "".join(f" {'nchw'[a]}:{_text(t)}" for a, t in enumerate(self.index) if t)
        fill = f" fill{self.fill:g}" if self.fill else ""
        return f"gather {_dims(self.shape)} {''.join(map(str, self.perm))}{tables}{fill}"

    @property
    def in_shapes(self) -> tuple[Shape4, ...]:
        return (self.shape,)

    @property
    def out_shape(self) -> Shape4:
        n, c, h, w = (len(t) or self.shape[a] for a, t in zip(self.perm, self.index, strict=True))
        return n, c, h, w

    @property
    def is_images(self) -> bool:
        """Whether the output is a contiguous range of the input's images and nothing else is changed."""
        table, *others = self.index
        first = table[0] if table else -1
        alike = table == tuple(range(first, first + len(table))) and not any(others)
        return first >= 0 and alike and self.perm == (0, 1, 2, 3)

    @property
    def is_transpose(self) -> bool:
        return not any(self.index)

    def reference(self, x: np.ndarray) -> np.ndarray:
        y = np.asarray(x, np.float32).transpose(self.perm)
        for axis, table in enumerate(self.index):
            if table:
                chosen = np.asarray(table)
                y = np.take(y, np.maximum(chosen, 0), axis=axis)
                shape = [1] * 4
                shape[axis] = -1
                y = np.where((chosen < 0).reshape(shape), np.float32(self.fill), y)
        return y


@dataclass(frozen=True, slots=True)
class ResizeProblem(OneTensor):
    """ONNX Resize over rows and columns with more than one tap per axis: `mode` linear or cubic.

    `out`: output height and width; `coordinate_mode`: ONNX's coordinate_transformation_mode; `scale`: along rows and columns,
    as the model gives them; `cubic_a`, `exclude_outside`, `antialias`: ONNX's attributes. Only tf_crop_and_resize reads `roi`,
    start and end along rows, then along columns, and `extrapolation`, the value outside the image.
    """

    TYPE: ClassVar[str] = "resize"
    out: tuple[int, int]
    mode: str
    coordinate_mode: str
    scale: tuple[float, float]
    cubic_a: float = -0.75
    exclude_outside: bool = False
    antialias: bool = False
    roi: tuple[float, float, float, float] = (0.0, 1.0, 0.0, 1.0)
    extrapolation: float = 0.0

    def __post_init__(self) -> None:
        if self.mode not in ("linear", "cubic") or self.coordinate_mode not in COORDINATES:
            raise ValueError(f"resize: unknown mode {self.mode!r} or coordinate transformation {self.coordinate_mode!r}")
        if not all(1 / MOST_SCALE <= s <= MOST_SCALE for s in self.scale) or max(map(self.num_taps, (0, 1))) > MOST_TAPS:
            raise ValueError(f"resize: expected scales of 1/{MOST_SCALE} to {MOST_SCALE}, {MOST_TAPS} taps at most, got {self}")
        if not all(abs(v) <= MOST_SCALE for v in (*self.roi, self.cubic_a)):
            raise ValueError(f"resize: expected a roi and cubic_coeff_a up to {MOST_SCALE}, got {self.roi}, {self.cubic_a}")

    def __str__(self) -> str:
        more = f" a{self.cubic_a:g}" if self.mode == "cubic" else ""
        more += " exclude_outside" if self.exclude_outside else ""
        more += " antialias" if self.antialias else ""
        more += f" roi{_text(self.roi)} outside{self.extrapolation:g}" if self.coordinate_mode == "tf_crop_and_resize" else ""
        shape = f"n{self.n} c{self.c} h{self.h} w{self.w} out{_text(self.out)}"
        return f"resize {shape} {self.mode} {self.coordinate_mode} scale{self.scale[0]!r},{self.scale[1]!r}{more}"

    @property
    def out_shape(self) -> Shape4:
        return (self.n, self.c, *self.out)

    def _stretch(self, axis: int) -> float:
        return max(1.0, 1.0 / self.scale[axis]) if self.antialias else 1.0

    def num_taps(self, axis: int) -> int:
        """Returns the number T of input rows (axis 0) or columns (1) of which an output pixel is the weighted sum."""
        return max(1, math.ceil(2 * (1 if self.mode == "linear" else 2) * self._stretch(axis)))

    def taps(self, axis: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns (index int32 [out, T], weight FP32 [out, T]) of rows (axis 0) or columns (1): out[i] is the sum over t of
        weight[i, t] * x[index[i, t]]. If index[i] is -1, the pixel lies outside the image and is `extrapolation`.

        By ONNX's Resize-19, linear has the weights 1 - |distance|, cubic has Keys' kernel with coefficient `cubic_a`, and
        antialias widens the kernel by 1/scale if the image shrinks.
        """
        size, out, scale = (self.h, self.w)[axis], self.out[axis], self.scale[axis]
        x = COORDINATES[self.coordinate_mode](np.arange(out, dtype=np.float64), scale, size, out, self.roi[2 * axis :][:2])
        stretch = self._stretch(axis)
        reach = (1 if self.mode == "linear" else 2) * stretch
        index = np.floor(x - reach).astype(int)[:, None] + 1 + np.arange(self.num_taps(axis))
        far = np.abs(index - x[:, None]) / stretch
        weight = np.maximum(1 - far, 0) if self.mode == "linear" else _keys(far, self.cubic_a)
        if self.exclude_outside:
            weight = np.where((index >= 0) & (index < size), weight, 0)
        sums = weight.sum(axis=1, keepdims=True)
        weight = weight / np.where(sums, sums, 1)  # without a tap in the image all weights stay 0
        index = np.clip(index, 0, size - 1)
        if self.coordinate_mode == "tf_crop_and_resize":
            index[(x < 0) | (x > size - 1)] = -1
        return index.astype(np.int32), weight.astype(np.float32)

    def reference(self, x: np.ndarray) -> np.ndarray:
        y = np.asarray(x, np.float32)
        outside = np.zeros(self.out, bool)
        for axis in (0, 1):
            index, weight = self.taps(axis)
            shape = (-1, 1) if axis == 0 else (1, -1)
            taps = zip(np.maximum(index.T, 0), weight.T, strict=True)
            y = sum(np.take(y, i, axis=2 + axis) * w.reshape(shape) for i, w in taps)
            outside |= np.expand_dims(index[:, 0] < 0, 1 - axis)
        return np.where(outside, np.float32(self.extrapolation), y).astype(np.float32)


def _keys(far: np.ndarray, a: float) -> np.ndarray:
    """Returns Keys' cubic convolution kernel with coefficient `a` at the distances `far`."""
    near = ((a + 2) * far - (a + 3)) * far**2 + 1
    outer = ((a * far - 5 * a) * far + 8 * a) * far - 4 * a
    return np.where(far < 1, near, np.where(far < 2, outer, 0))


def _over(i: np.ndarray, scale: Scale) -> np.ndarray:
    """Returns i / scale. With a Fraction the quotient is rounded once, so that a coordinate on a pixel, or midway between two
    pixels, is exact.
    """
    return i * scale.denominator / scale.numerator if isinstance(scale, Fraction) else i / scale


def _half_pixel(i: np.ndarray, scale: Scale, size: int, out: int, roi: Sequence[float]) -> np.ndarray:
    return _over(i + 0.5, scale) - 0.5


def _half_pixel_symmetric(i: np.ndarray, scale: Scale, size: int, out: int, roi: Sequence[float]) -> np.ndarray:
    """Returns half-pixel coordinates for out = floor(size * scale): the lost fraction of a pixel is shared by both ends."""
    return size / 2 * (1 - out / (scale * size)) + _over(i + 0.5, scale) - 0.5


def _crop(i: np.ndarray, scale: Scale, size: int, out: int, roi: Sequence[float]) -> np.ndarray:
    start, end = roi
    if out > 1:
        return start * (size - 1) + i * (end - start) * (size - 1) / (out - 1)
    return i * 0.0 + 0.5 * (start + end) * (size - 1)


# ONNX Resize's coordinate_transformation_mode -> function (output indices, scale, input size, output size, (start, end) of the
# roi) -> input coordinates, all along one axis.
COORDINATES: dict[str, Callable[[np.ndarray, Scale, int, int, Sequence[float]], np.ndarray]] = {
    "asymmetric": lambda i, scale, size, out, roi: _over(i, scale),
    "half_pixel": _half_pixel,
    "half_pixel_symmetric": _half_pixel_symmetric,
    "pytorch_half_pixel": lambda i, scale, size, out, roi: _half_pixel(i, scale, size, out, roi) if out > 1 else i * 0.0,
    "align_corners": lambda i, scale, size, out, roi: i * (size - 1) / (out - 1) if out > 1 else i * 0.0,
    "tf_crop_and_resize": _crop,
}
ROUNDINGS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "floor": np.floor,
    "ceil": np.ceil,
    "round_prefer_floor": lambda x: np.ceil(x - 0.5),
    "round_prefer_ceil": lambda x: np.floor(x + 0.5),
}


def nearest(
    size: int, out: int, scale: Scale, coordinate_mode: str, rounding: str, roi: Sequence[float] = (0.0, 1.0)
) -> tuple[int, ...]:
    """Returns, for each of `out` pixels of a nearest Resize along an axis of `size` pixels, the input index; -1 for a pixel
    outside the image (tf_crop_and_resize only).

    `rounding`: a name in ROUNDINGS. A `scale` that is a Fraction, the ratio of the sizes, gives exact coordinates on a pixel or
    midway between two. The model's scale is applied in FP32, as other runtimes do, so that ties are rounded to the same side.
    """
    exact = isinstance(scale, Fraction)
    i = np.arange(out, dtype=np.float64 if exact else np.float32)
    x = COORDINATES[coordinate_mode](i, scale if exact else np.float32(scale), size, out, roi)
    index = np.clip(ROUNDINGS[rounding](x), 0, size - 1).astype(int)
    if coordinate_mode == "tf_crop_and_resize":
        index = np.where((x < 0) | (x > size - 1), -1, index)
    return tuple(index.tolist())
