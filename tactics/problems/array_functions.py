"""Rare operators, each one plain function over arrays of NumPy or CuPy; `xp` is the module that the arrays belong to.

Arrays come in ONNX's order and shapes, floating-point ones as FP32 (None: an absent input); attributes are ONNX's, by name. A
function returns its output, or a tuple of outputs, as the ONNX operator of its name defines them. No function waits for the
device: sizes come from shapes and attributes, never from values.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from tactics.problems.intervals import INF, Cliff

Sizes = Sequence[int]
Array = np.ndarray  # or CuPy's
Taps = list[tuple[Any, Any]]  # (index, weight) of each neighbour along an axis, arrays
Function = Callable[..., Any]  # (xp, arrays, attributes by name) -> an array, or a tuple of them


def bound(function: str, attributes: Mapping[str, object], part: int = 0) -> Callable:
    """Binds attributes to a function in FUNCTIONS: returns a function (xp, input arrays) -> output number `part`. It computes
    in FP32.
    """

    def run(xp: ModuleType, arrays: Array) -> Array:
        wide = [a.astype(xp.float32) if a is not None and a.dtype.kind == "f" else a for a in arrays]
        with np.errstate(all="ignore"):  # infinities and NaN are results like others
            y = FUNCTIONS[function](xp, *wide, **attributes)
        return y[part] if isinstance(y, tuple) else y

    return run


# ---- windows


def lrn(xp: ModuleType, x: Array, *, size: int, alpha: float = 1e-4, beta: float = 0.75, bias: float = 1.0) -> Array:
    """Divide by the neighbouring channels: x / (bias + alpha / size * sum of squares over `size` channels) ** beta."""
    channels = x.shape[1]
    before, behind = min((size - 1) // 2, channels - 1), min(size // 2, channels - 1)  # there is nothing further away
    squares = xp.pad(x * x, [(0, 0), (before, behind)] + [(0, 0)] * (x.ndim - 2))
    total = sum(squares[:, i : i + channels] for i in range(before + behind + 1))
    return x / (bias + alpha / size * total) ** beta


class Windows(NamedTuple):
    """Attributes of ONNX's convolutions and pools: for rows, columns, ... each. `out`: sizes of the output; `pads`: before
    each, then behind each."""

    kernel_shape: Sizes
    out: Sizes
    strides: Sizes
    pads: Sizes
    dilations: Sizes


def _framed(xp: ModuleType, x: Array, windows: Windows, value: float = 0) -> Array:
    """Pads x [N,C,*sizes] with `value` as far as the windows reach before and behind it; a negative pad cuts rows or columns
    off.
    """
    kernel_shape, out, strides, pads, dilations = windows
    before = pads[: len(out)]
    reach = [(o - 1) * s + (k - 1) * d + 1 for o, s, k, d in zip(out, strides, kernel_shape, dilations, strict=True)]
    behind = [max(r - size - b, 0) for r, size, b in zip(reach, x.shape[2:], before, strict=True)]
    kept = x[(slice(None), slice(None), *(slice(max(-b, 0), None) for b in before))]
    return xp.pad(kept, [(0, 0), (0, 0), *((max(b, 0), e) for b, e in zip(before, behind, strict=True))], constant_values=value)


def conv(xp: ModuleType, x: Array, w: Array, b: Array | None = None, *, group: int = 1, **attributes: Sizes) -> Array:
    """Convolves x [N,C,*sizes] with computed weights w [K,C/g,*kernel_shape] and bias b [K] to [N,K,*out]; `attributes`: of
    Windows.
    """
    kernel_shape, out, strides, _, dilations = windows = Windows(**attributes)
    x = _framed(xp, x, windows)
    x, w = x.reshape(x.shape[0], group, -1, *x.shape[2:]), w.reshape(group, -1, *w.shape[1:])
    y: Any = 0
    for at in itertools.product(*map(range, kernel_shape)):
        steps = zip(at, out, strides, dilations, strict=True)
        index: tuple[Any, ...] = tuple(slice(i * d, i * d + (o - 1) * s + 1, s) for i, o, s, d in steps)
        taps = x[(..., *index)]
        y = y + xp.matmul(w[(slice(None),) * 3 + at], taps.reshape(*taps.shape[:3], -1))
    y = y.reshape(x.shape[0], -1, *out)
    return y if b is None else y + b.reshape(-1, *(1,) * len(out))


def lp_pool(xp: ModuleType, x: Array, *, p: float = 2, **attributes: Sizes) -> Array:
    """The p-norm of each window: x [N,C,*sizes] -> [N,C,*out]. `attributes`: of Windows."""
    windows = Windows(**attributes)
    total = _framed(xp, abs(x) ** p, windows)
    for axis in reversed(range(len(windows.out))):  # one by one: the sum of the window's sizes in steps, not their product
        taps = _taps(axis, windows)
        total = sum((total[tap] for tap in taps[1:]), total[taps[0]])
    return total ** (1 / p)


def _taps(axis: int, windows: Windows) -> list[tuple[slice, ...]]:
    """Returns, for each position in a window along `axis`, the slices of [N,C,...] that select this element of every window.

    With kernel 3, out 2, stride 2, dilation 1: elements 0 and 2, elements 1 and 3, elements 2 and 4.
    """
    size, o, s, d = (row[axis] for row in (windows.kernel_shape, windows.out, windows.strides, windows.dilations))
    return [(slice(None),) * (2 + axis) + (slice(i * d, i * d + (o - 1) * s + 1, s),) for i in range(size)]


def max_pool(xp: ModuleType, x: Array, *, storage_order: int = 0, **attributes: Sizes) -> tuple[Array, ...]:
    """Returns (maximum of each window, its flat index in x), both [N,C,*out]; of equal elements the first counts. With
    storage_order 1 the index counts the pixels of a channel column by column. `attributes`: of Windows.
    """
    windows = Windows(**attributes)
    n, sizes = len(windows.out), x.shape[2:]
    padded = _framed(xp, x, windows, -np.inf)
    pixels = xp.arange(math.prod(sizes)).reshape(sizes[::-1] if storage_order else sizes)
    numbers = xp.arange(math.prod(x.shape[:2])).reshape(*x.shape[:2], *(1,) * n) * math.prod(sizes)
    numbers = numbers + (pixels.T if storage_order else pixels)
    numbers = _framed(xp, numbers, windows, -1)
    for axis in reversed(range(n)):  # as lp_pool; the last axis first, so that the first of equal ones is so in rows' order
        taps = _taps(axis, windows)
        best, where = padded[taps[0]], numbers[taps[0]]
        for tap in taps[1:]:
            value, number = padded[tap], numbers[tap]
            larger = (number >= 0) & ((value > best) | (where < 0))
            best, where = xp.where(larger, value, best), xp.where(larger, number, where)
        padded, numbers = best, where
    return padded, numbers.astype(xp.int64)


def global_lp_pool(xp: ModuleType, x: Array, *, p: float = 2) -> Array:
    return (abs(x) ** p).sum(axis=tuple(range(2, x.ndim)), keepdims=True) ** (1 / p)


# ---- order


def top_k(xp: ModuleType, x: Array, *, k: int, axis: int = -1, largest: int = 1, sorted: int = 1) -> tuple[Array, ...]:
    """Returns (values, indices) of the k largest or smallest along `axis`, in order; of equal elements the first come first."""
    order = xp.argsort(-x if largest else x, axis=axis, kind="stable")
    chosen = xp.take(order, xp.arange(k), axis=axis)
    return xp.take_along_axis(x, chosen, axis=axis), chosen.astype(xp.int64)


def arg_max(xp: ModuleType, x: Array, *, axis: int = 0, keepdims: int = 1, select_last_index: int = 0) -> Array:
    found = xp.argmax(xp.flip(x, axis) if select_last_index else x, axis=axis)
    found = x.shape[axis] - 1 - found if select_last_index else found
    return (xp.expand_dims(found, axis) if keepdims else found).astype(xp.int64)


def arg_min(xp: ModuleType, x: Array, **attributes: Any) -> Array:
    return arg_max(xp, -x, **attributes)


# ---- sampling


def grid_sample(
    xp: ModuleType, x: Array, grid: Array, *, mode: str = "linear", padding_mode: str = "zeros", align_corners: int = 0
) -> Array:
    """Samples x [N,C,*sizes] at the points of grid [N,*out,len(sizes)] -> [N,C,*out].

    A point's last coordinate belongs to the first of `sizes` (x, y for height, width); -1 and 1 are the ends of an axis.
    """
    sizes, n = x.shape[2:], x.shape[0]
    points = []
    for size, g in zip(sizes, (grid[..., i] for i in reversed(range(len(sizes)))), strict=True):
        at = (g + 1) / 2 * (size - 1) if align_corners else ((g + 1) * size - 1) / 2
        if mode not in ("cubic", "bicubic"):
            at = _inside(xp, at, size, padding_mode, align_corners)
        points.append(at)
    taps: list[Taps]
    if mode == "nearest":
        taps = [[(xp.rint(at).astype(xp.int64), 1.0)] for at in points]
    elif mode in ("cubic", "bicubic"):
        taps = [_cubic_taps(xp, at) for at in points]
    else:
        taps = [_linear_taps(xp, at) for at in points]
    batch = xp.arange(n).reshape(n, *(1,) * (grid.ndim - 2))
    channels_last = xp.moveaxis(x, 1, -1)
    total = 0
    for corner in itertools.product(*taps):
        weight, indices, valid = 1.0, [], True
        for (index, w), size in zip(corner, sizes, strict=True):
            if mode in ("cubic", "bicubic") and padding_mode != "zeros":
                index = xp.rint(_inside(xp, index.astype(xp.float32), size, padding_mode, align_corners)).astype(xp.int64)
            valid = valid & (index >= 0) & (index < size)
            indices.append(xp.clip(index, 0, size - 1))
            weight = weight * w
        total = total + channels_last[(batch, *indices)] * xp.where(valid, weight, 0)[..., None]
    return xp.moveaxis(total, -1, 1).astype(xp.float32)


def _inside(xp: ModuleType, at: Array, size: int, padding_mode: str, align_corners: int) -> Array:
    """Brings coordinates outside an axis of `size` pixels back into it, if `padding_mode` is border or reflection."""
    if padding_mode == "border":
        return xp.clip(at, 0, size - 1)
    if padding_mode != "reflection":
        return at
    low, high = (0.0, size - 1.0) if align_corners else (-0.5, size - 0.5)
    span = high - low
    if span <= 0:
        return xp.zeros_like(at)
    away = abs(at - low) % (2 * span)
    return xp.clip(low + xp.where(away > span, 2 * span - away, away), 0, size - 1)


def _linear_taps(xp: ModuleType, at: Array) -> Taps:
    first = xp.floor(at)
    index = first.astype(xp.int64)
    return [(index, 1 - (at - first)), (index + 1, at - first)]


def _cubic_taps(xp: ModuleType, at: Array, a: float = -0.75) -> Taps:
    """The four neighbours of each coordinate and their weights by Keys' cubic convolution."""
    first = xp.floor(at)
    index, t = first.astype(xp.int64), at - first

    def near(d: Array) -> Array:
        return ((a + 2) * d - (a + 3)) * d * d + 1

    def far(d: Array) -> Array:
        return ((a * d - 5 * a) * d + 8 * a) * d - 4 * a

    return [(index - 1, far(t + 1)), (index, near(t)), (index + 1, near(1 - t)), (index + 2, far(2 - t))]


# ---- elements by computed indices


def gather(xp: ModuleType, x: Array, indices: Array, *, axis: int = 0) -> Array:
    return xp.take(x, _wrapped(xp, indices, x.shape[axis]), axis=axis)


def gather_elements(xp: ModuleType, x: Array, indices: Array, *, axis: int = 0) -> Array:
    return x[_along(xp, x, indices, axis)]


def _along(xp: ModuleType, x: Array, indices: Array, axis: int) -> tuple[Array, ...]:
    """The full index of the elements that `indices` select along `axis`: on the other axes an element keeps its own
    position.
    """
    axis %= x.ndim
    rows = xp.ogrid[tuple(slice(d) for d in indices.shape)]
    rows = list(rows) if isinstance(rows, (list, tuple)) else [rows]
    rows[axis] = _wrapped(xp, indices, x.shape[axis])
    return tuple(rows)


def scatter_elements(
    xp: ModuleType, x: Array, indices: Array, updates: Array, *, axis: int = 0, reduction: str = "none"
) -> Array:
    return _scattered(xp, x, _along(xp, x, indices, axis), updates, reduction)


def scatter_nd(xp: ModuleType, x: Array, indices: Array, updates: Array, *, reduction: str = "none") -> Array:
    at = tuple(_wrapped(xp, indices[..., i], x.shape[i]) for i in range(indices.shape[-1]))
    return _scattered(xp, x, at, updates, reduction)


def _scattered(xp: ModuleType, x: Array, at: tuple[Array, ...], updates: Array, reduction: str) -> Array:
    y = x.copy()
    if reduction == "none":
        y[at] = updates
    else:
        getattr(xp, SCATTERED[reduction]).at(y, at, updates)
    return y


def gather_nd(xp: ModuleType, x: Array, indices: Array, *, batch_dims: int = 0) -> Array:
    depth = indices.shape[-1]
    batch = [xp.arange(d).reshape(*(1,) * i, d, *(1,) * (indices.ndim - 2 - i)) for i, d in enumerate(x.shape[:batch_dims])]
    return x[(*batch, *(_wrapped(xp, indices[..., i], x.shape[batch_dims + i]) for i in range(depth)))]


def _wrapped(xp: ModuleType, indices: Array, size: Array) -> Array:
    return xp.where(indices < 0, indices + size, indices)


# ---- elementwise, of any type


def where(xp: ModuleType, condition: Array, x: Array, y: Array) -> Array:
    return xp.where(condition, x, y)


def cast(xp: ModuleType, x: Array, *, to: str) -> Array:
    """Casts to `to`: float32, int32, int64, int8, uint8 or bool. Fractions are cut off towards zero; 8 bits are the lowest of
    an int32 (300 -> 44), as onnxruntime has it on x86: ONNX leaves floating-point numbers beyond their range undefined."""
    if to in ("uint8", "int8") and x.dtype.kind == "f":
        x = x.astype("int32")
    return x != 0 if to == "bool" else x.astype(to)


def is_inf(xp: ModuleType, x: Array, *, detect_negative: int = 1, detect_positive: int = 1) -> Array:
    return xp.isinf(x) & ((x > 0) & bool(detect_positive) | (x < 0) & bool(detect_negative))


def cum_sum(xp: ModuleType, x: Array, *, axis: int, exclusive: int = 0, reverse: int = 0) -> Array:
    x = xp.flip(x, axis) if reverse else x
    y = xp.cumsum(x, axis=axis, dtype=x.dtype)
    y = y - x if exclusive else y
    return xp.flip(y, axis) if reverse else y


def mod(xp: ModuleType, a: Array, b: Array, *, fmod: int = 0) -> Array:
    return xp.fmod(a, b) if fmod else xp.mod(a, b)


def div(xp: ModuleType, a: Array, b: Array) -> Array:
    """Divides integers and cuts the quotient off towards zero."""
    return xp.sign(a) * xp.sign(b) * (abs(a) // abs(b))


def clip(xp: ModuleType, x: Array, low: Array | None = None, high: Array | None = None) -> Array:
    x = x if low is None else xp.maximum(x, low)
    return x if high is None else xp.minimum(x, high)


def power(xp: ModuleType, a: Array, b: Array) -> Array:
    """a ** b. Of integers the result is exact; with a negative exponent it is 1 / a ** -b, cut off towards zero."""
    if b.dtype.kind == "f":
        return xp.power(a.astype(xp.float64), b)
    odd = 1 - 2 * (b % 2)
    return xp.where(b >= 0, xp.power(a, xp.maximum(b, 0)), xp.where(a == 1, 1, xp.where(a == -1, odd, 0)))


# ---- elements elsewhere, of any type


def concat(xp: ModuleType, *arrays: Array, axis: Array) -> Array:
    return xp.concatenate(arrays, axis=axis)


def slice_(xp: ModuleType, x: Array, *, axes: Sizes, starts: Sizes, counts: Sizes, steps: Sizes) -> Array:
    """Takes `counts` elements from `starts` on, every `steps`, along each of `axes`."""
    for axis, start, count, step in zip(axes, starts, counts, steps, strict=True):
        x = xp.take(x, start + step * xp.arange(count), axis=axis)
    return x


def split(xp: ModuleType, x: Array, *, axis: int, sizes: Sizes) -> tuple[Array, ...]:
    ends = list(itertools.accumulate(sizes))
    return tuple(x[(*(slice(None),) * axis, slice(end - size, end))] for end, size in zip(ends, sizes, strict=True))


# ---- rows


def _reduction(name: str) -> Function:
    def reduced(xp: ModuleType, x: Array, *, axes: Sizes, keepdims: int) -> Array:
        more = {"dtype": x.dtype} if name in ("sum", "prod") else {}  # NumPy would widen int32
        return getattr(xp, name)(x, axis=tuple(axes), keepdims=bool(keepdims), **more) if axes else x

    return reduced


def lp_normalization(xp: ModuleType, x: Array, *, axis: int = -1, p: float = 2) -> Array:
    size = abs(x).sum(axis=axis, keepdims=True) if p == 1 else xp.sqrt((x * x).sum(axis=axis, keepdims=True))
    return x / xp.where(size == 0, 1, size)


def hardmax(xp: ModuleType, x: Array, *, axis: int = -1) -> Array:
    first = xp.argmax(x, axis=axis)
    along = xp.arange(x.shape[axis]).reshape(*(1,) * (axis % x.ndim), -1, *(1,) * (x.ndim - 1 - axis % x.ndim))
    return (along == xp.expand_dims(first, axis)).astype(xp.float32)


def shrink(xp: ModuleType, x: Array, *, lambd: float = 0.5, bias: float = 0.0) -> Array:
    return xp.where(x < -lambd, x + bias, xp.where(x > lambd, x - bias, 0))


def _unary(name: str) -> Function:
    return lambda xp, x: getattr(xp, name)(x)


def _binary(name: str) -> Function:
    return lambda xp, a, b: getattr(xp, name)(a, b)


# ONNX operator -> its function: of each element by itself, of elements at the same place of arrays that broadcast, of windows.
ALIKE: dict[str, Function] = {
    "Cast": cast,
    "IsInf": is_inf,
    "IsNaN": _unary("isnan"),
    "Not": _unary("logical_not"),
    "Shrink": shrink,
    **{op: _unary(op.lower()) for op in ("Sin", "Cos", "Tan", "Sinh", "Cosh")},
    **{op: _unary(f"arc{op.lower()[1:]}") for op in ("Asin", "Acos", "Atan", "Asinh", "Acosh", "Atanh")},
}
JOINED: dict[str, Function] = {
    "Where": where,
    "Equal": _binary("equal"),
    "Greater": _binary("greater"),
    "Less": _binary("less"),
    "GreaterOrEqual": _binary("greater_equal"),
    "LessOrEqual": _binary("less_equal"),
    "And": _binary("logical_and"),
    "Or": _binary("logical_or"),
    "Xor": _binary("logical_xor"),
    "Mod": mod,
}
WINDOWS: dict[str, Function] = {"LpPool": lp_pool, "GlobalLpPool": global_lp_pool}
SCATTERED = {"add": "add", "max": "maximum", "min": "minimum"}  # reduction -> the ufunc, of those that CuPy has atomics for
# Operators that have kernels for floating-point numbers: their functions are for integers and truth values.
# fmt: off
OF_INTEGERS: dict[str, Function] = {
    "Add": _binary("add"), "Sub": _binary("subtract"), "Mul": _binary("multiply"), "Neg": _unary("negative"),
    "Div": div, "Max": _binary("maximum"), "Min": _binary("minimum"), "Abs": _unary("abs"), "Identity": lambda xp, x: x,
    "Reshape": lambda xp, x, *, out: x.reshape(out), "Transpose": lambda xp, x, *, perm: x.transpose(perm),
    "Concat": concat, "Slice": slice_, "Expand": lambda xp, x, *, out: xp.broadcast_to(x, out),
    "Tile": lambda xp, x, *, repeats: xp.tile(x, repeats), "Split": split, "Sign": _unary("sign"), "Pow": power,
    **{f"Reduce{name.capitalize()}": _reduction(name) for name in ("max", "min", "prod", "sum")},
    "MaxPool": max_pool,  # where the maxima stood
}
FUNCTIONS: dict[str, Function] = ALIKE | JOINED | WINDOWS | OF_INTEGERS | {
    "LRN": lrn, "LpNormalization": lp_normalization, "Hardmax": hardmax, "TopK": top_k, "ArgMax": arg_max, "ArgMin": arg_min,
    "GridSample": grid_sample, "Gather": gather, "GatherElements": gather_elements, "GatherND": gather_nd, "CumSum": cum_sum,
    "Clip": clip, "Conv": conv, "ScatterElements": scatter_elements, "ScatterND": scatter_nd,
}
# fmt: on
CLIFFS = {  # of functions of one input, which is the base
    "Asin": Cliff((-1.0, 1.0), (-1.0, 1.0)),
    "Acos": Cliff((-1.0, 1.0), (-1.0, 1.0)),
    "Acosh": Cliff((1.0,), (1.0, INF)),
    "Atanh": Cliff((-1.0, 1.0)),
    "Tan": Cliff(tuple(math.pi * (k + 0.5) for k in range(-64, 64))),
}
