"""Cases of TMA copies, boxes of a tensor by a tensor map (cuda_kernels/copy_box.cu), run in the emulator or on a GPU."""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from cuda_kernels.compile import compile_kernel
from cuda_kernels.launch import Cuda, Emulated
from cuda_kernels.params import arrange
from cuda_kernels.tensor_maps import Map
from gpu_runtime.engine import Engine
from tactics.sampling.trial import Addresses, Scratch, bind
from tactics.step import Launch
from tests.engines import build
from tests.independent.layouts import table
from tests.reference_run import model, node

SOURCE = str(Path(__file__).parent / "cuda_kernels" / "copy_box.cu")
SHAPE = (2, 5, 6, 24)  # n, h, w, c


def swizzled(rows: np.ndarray, swizzle: int) -> np.ndarray:
    """Returns rows of bytes in the order of shared memory with this swizzle (0, 32, 64 or 128 bytes), by CuTe's table."""
    if not swizzle:
        return rows.reshape(-1)
    at = table()[f"rows of {swizzle} bytes"]["at"].reshape(32, -1)
    period, out = 8, np.empty_like(rows).reshape(-1, 16)
    for r, row in enumerate(rows.reshape(len(rows), -1, 16)):
        out[r // period * period * len(row) + at[r % period]] = row
    return out.reshape(-1)


def launch(m: Map, at: tuple[int, int, int, int], offsets: tuple[int, int], nbytes: int, **more: int) -> Launch:
    """Returns a launch that copies `nbytes` by the map `m`. `at`: coordinates, innermost first; `offsets`: im2col's (s, r)."""
    values = tuple(sorted({"BYTES": nbytes, "IM2COL": int(not m.box)}.items()))
    named = {f"at[{i}]": ("i32", c) for i, c in enumerate(at)} | {"s": ("i32", offsets[0]), "r": ("i32", offsets[1])}
    args = arrange(SOURCE, values, {"y": ("out", 0), "map": ("map", m)} | named)
    return Launch(SOURCE, values, (1, 1, 1), (32, 1, 1), 0, args, **more)


def copied(gpu: Cuda | Emulated, x: np.ndarray, step: Launch) -> np.ndarray:
    """Returns the bytes that the launch copies from `x` into shared memory."""
    nbytes = dict(step.values)["BYTES"]
    source, to = gpu.allocate(x.nbytes), gpu.allocate(nbytes)
    gpu.write(source, x)
    gpu.write(to, np.full(nbytes, 0xFF, np.uint8))
    kernel = gpu.load(compile_kernel(SOURCE, dict(step.values), gpu.arch))
    gpu.launch(kernel, step.grid, step.block, step.smem, bind(gpu, step.args, Addresses([source], to, {}, Scratch())))
    got = gpu.read(to, nbytes)
    for address in (source, to):
        gpu.free(address)
    return got


class Case(NamedTuple):
    """A tensor map of a tensor of SHAPE, and the coordinates and im2col offsets of one copy."""

    map: Map
    at: tuple[int, int, int, int]
    offsets: tuple[int, int] = (0, 0)


def _columns(strides: tuple[int, int], pad: int, dilation: int, swizzle: int = 0) -> Map:
    """Returns an im2col map of a 3x3 convolution."""
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
    """Checks that the kernel's copy in case `name` equals _expected's."""
    m, at, offsets = CASES[name]
    x = np.random.default_rng(0).integers(1, 1000, SHAPE).astype(np.float16)
    expected = _expected(x, m, at, offsets)
    got = copied(gpu, x, launch(m, at, offsets, expected.nbytes))
    assert np.array_equal(got, swizzled(expected.view(np.uint8), m.swizzle)), name


def _expected(x: np.ndarray, m: Map, at: tuple[int, ...], offsets: tuple[int, int]) -> np.ndarray:
    """Returns the copy [pixels][channels], computed by loops; elements outside the tensor are 0."""
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


MAPPED = Map(("in", 0), (8, 64), (16,), box=(8, 64))  # of the input of `relu`


def relu(folder: Path) -> Engine:
    """Returns an engine with y = x for positive x [2, 8, 4, 8] in fp16:hwc8, whose only launch tests replace by MAPPED's
    copy."""
    proto = model([node("Relu", "x", "y")], {"x": (2, 8, 4, 8)}, "y", {})
    return build(folder, proto, input_formats="fp16:hwc8", output_formats="fp16:hwc8")
