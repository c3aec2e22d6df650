"""Boxes of tensors that cuda_kernels/copy_box.cu copies by a map: in the emulator, and on a GPU."""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from cuda_kernels.compile import compile_kernel
from cuda_kernels.launch import Cuda, Emulated, fill_params
from cuda_kernels.params import arrange
from cuda_kernels.tensor_maps import Map
from tests.independent.layouts import table

SOURCE = str(Path(__file__).parent / "cuda_kernels" / "copy_box.cu")
SHAPE = (2, 5, 6, 24)  # n, h, w, c


def swizzled(rows: np.ndarray, swizzle: int) -> np.ndarray:
    """Rows of bytes as they lie in shared memory, by CuTe's table of 32 rows."""
    if not swizzle:
        return rows.reshape(-1)
    at = table()[f"rows of {swizzle} bytes"]["at"].reshape(32, -1)
    period, out = 8, np.empty_like(rows).reshape(-1, 16)
    for r, row in enumerate(rows.reshape(len(rows), -1, 16)):
        out[r // period * period * len(row) + at[r % period]] = row
    return out.reshape(-1)


def copied(
    gpu: Cuda | Emulated, x: np.ndarray, m: Map, at: tuple[int, int, int, int], offsets: tuple[int, int], nbytes: int
) -> np.ndarray:
    """What the map of `x` brings into shared memory, in bytes. `at`: coordinates, innermost first; `offsets`: s, r."""
    values = {"BYTES": nbytes, "IM2COL": int(not m.box)}
    named = {f"at[{i}]": ("i32", c) for i, c in enumerate(at)} | {"s": ("i32", offsets[0]), "r": ("i32", offsets[1])}
    args = arrange(SOURCE, tuple(sorted(values.items())), {"y": ("out", 0), "map": ("map", m)} | named)
    source, to = gpu.allocate(x.nbytes), gpu.allocate(nbytes)
    gpu.write(source, x)
    gpu.write(to, np.full(nbytes, 0xFF, np.uint8))
    params = fill_params(gpu, args, lambda arg: {"in": source, "out": to}[arg[0]])
    gpu.launch(gpu.load(compile_kernel(SOURCE, values, gpu.arch)), (1, 1, 1), (32, 1, 1), 0, params)
    got = gpu.read(to, nbytes)
    for address in (source, to):
        gpu.free(address)
    return got


class Case(NamedTuple):
    """A map of a tensor of SHAPE, and which coordinates and offsets are copied."""

    map: Map
    at: tuple[int, int, int, int]
    offsets: tuple[int, int] = (0, 0)


def _columns(strides: tuple[int, int], pad: int, dilation: int, swizzle: int = 0) -> Map:
    """Of a 3x3 convolution."""
    n, h, w, c = SHAPE
    low, high = (-pad, -pad), (pad - 2 * dilation,) * 2
    steps = (1, *strides, 1)
    return Map(("in", 0), (c, w, h, n), (2 * c, 2 * c * w, 2 * c * w * h), (), low, high, 16, 16, steps, swizzle)


PIXELS = Map(("in", 0), (24, 60), (48,), box=(16, 24))
CASES = {
    "rows of pixels": Case(PIXELS, (0, 0, 0, 0)),
    "beyond both ends": Case(PIXELS, (16, 50, 0, 0)),
    "swizzled": Case(Map(("in", 0), (24, 60), (48,), box=(16, 8), swizzle=32), (8, 3, 0, 0)),
    "a 3x3 window's first tap": Case(_columns((1, 1), 1, 1), (0, -1, -1, 0)),
    "its last tap, over the end of an image": Case(_columns((1, 1), 1, 1), (8, 2, 2, 0), (2, 2)),
    "strides of 2": Case(_columns((2, 2), 1, 1), (0, -1, -1, 0), (1, 0)),
    "dilation of 2": Case(_columns((1, 1), 2, 2, 32), (0, -2, -2, 1), (4, 2)),
}


def check(gpu: Cuda | Emulated, name: str) -> None:
    """The kernel's copy equals NumPy's."""
    m, at, offsets = CASES[name]
    x = np.random.default_rng(0).integers(1, 1000, SHAPE).astype(np.float16)
    expected = _expected(x, m, at, offsets)
    got = copied(gpu, x, m, at, offsets, expected.nbytes)
    assert np.array_equal(got, swizzled(expected.view(np.uint8), m.swizzle)), name


def _expected(x: np.ndarray, m: Map, at: tuple[int, ...], offsets: tuple[int, int]) -> np.ndarray:
    """[pixels][channels] by loops, zeros outside."""
    n, h, w, c = x.shape
    if m.box:
        pixels = [divmod(at[1] + i, h * w) for i in range(m.box[1])]
        places = [(image, rest // w, rest % w) for image, rest in pixels]
        channels = m.box[0]
    else:
        (low_w, low_h), (_, step_w, step_h, _) = m.lower, m.element_strides
        wide, high = (
            (d - 1 + up - low) // s + 1 for d, up, low, s in zip((w, h), m.upper, m.lower, (step_w, step_h), strict=True)
        )
        first = (at[3] * high + (at[2] - low_h) // step_h) * wide + (at[1] - low_w) // step_w
        places, channels = [], m.channels
        for i in range(first, first + m.pixels):
            image, row, column = i // (high * wide), i // wide % high, i % wide
            places.append((image, low_h + row * step_h + offsets[1], low_w + column * step_w + offsets[0]))
    out = np.zeros((len(places), channels), x.dtype)
    for i, (image, row, column) in enumerate(places):
        if 0 <= image < n and 0 <= row < h and 0 <= column < w:
            found = x[image, row, column, at[0] : at[0] + channels]
            out[i, : len(found)] = found
    return out
