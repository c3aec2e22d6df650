"""Tensor maps of a convolution for sm_90a: the input pixels and channels that a copy brings for a tap of the window, and the
output and residual elements of a part of a tile.

A tile's pixel (n, p, q) and tap (r, s) lie at coordinates (channel, q * stride - left, p * stride - top, n) of
`convolution_map` with offsets (s * dilation, r * dilation). The hardware goes on from pixel to pixel, row to row and image to
image.
"""

from cuda_kernels.tensor_maps import SWIZZLES, Map
from tactics.format import Strides, padded_channels
from tactics.problems.problem import ConvProblem
from tactics.step import Arg

X: Arg = ("in", 0)
RESIDUAL: Arg = ("in", 1)
Y: Arg = ("out", 0)
HALF = 2  # bytes of an element
MOST_OFFSET = 254  # of im2col, by CUTLASS's bound (conv/collective/sm90_implicit_gemm_gmma_ss_warpspecialized.hpp)


def input_map(p: ConvProblem, x: Strides, channels: int, pixels: int) -> Map:
    """Returns the tensor map of the input, whose strides are `x`, for copies of `pixels` pixels with `channels` channels.
    Raises ValueError with the broken rule.
    """
    return (pixels_map if pixels_in_order(p, x) else convolution_map)(p, x, channels, pixels)


def pixels_in_order(p: ConvProblem, x: Strides) -> bool:
    """Whether output pixel i reads only input pixel i, and input pixels are equally far apart within and between images."""
    plain = (p.r, p.s, p.stride, p.pad) == (1, 1, (1, 1), (0, 0, 0, 0))
    return plain and (p.n == 1 or x.n == p.h * p.w * x.pixel)


def pixels_map(p: ConvProblem, x: Strides, channels: int, pixels: int) -> Map:
    """Returns a map of the input as [pixels of all images][channels]."""
    _in_order(p.n, p.h * p.w, x)
    swizzle = _swizzle(p, x, channels)
    dims = padded_channels("hwc8", p.c), p.n * p.h * p.w
    return Map(X, dims, (x.pixel * HALF,), box=(channels, pixels), swizzle=swizzle)


def convolution_map(p: ConvProblem, x: Strides, channels: int, pixels: int) -> Map:
    """Returns a map [n][h][w][channels] in im2col mode: a column's pixels begin in the box between the corners, which has p x q
    of them.
    """
    swizzle = _swizzle(p, x, channels)
    top, left, bottom, right = p.pad
    reach = [(size - 1) * dilation for size, dilation in zip((p.s, p.r), reversed(p.dilation), strict=True)]
    if max(reach) > MOST_OFFSET:
        raise ValueError(f"offsets: expected a window that reaches over at most {MOST_OFFSET} pixels, got {max(reach)}")
    return Map(
        X,
        # 16-byte multiples of channels, as CUTLASS has them: padded channels are zero.
        (padded_channels("hwc8", p.c), p.w, p.h, p.n),
        (x.pixel * HALF, x.pixel * p.w * HALF, x.n * HALF),
        lower=(-left, -top),
        upper=(right - reach[0], bottom - reach[1]),
        channels=channels,
        pixels=pixels,
        element_strides=(1, *reversed(p.stride), 1),
        swizzle=swizzle,
    )


def box_map(p: ConvProblem, x: Strides, channels: int, box: tuple[int, int, int]) -> Map:
    """Returns a map [n][h][w][channels] of the input, copied in boxes (images, rows, columns) that may begin or end outside of
    it.
    """
    images, rows, cols = box
    dims, steps = (padded_channels("hwc8", p.c), p.w, p.h, p.n), (x.pixel, x.pixel * p.w, x.n)
    strides = tuple(s * HALF for s in steps)
    return Map(X, dims, strides, box=(channels, cols, rows, images), swizzle=_swizzle(p, x, channels))


def stored_map(p: ConvProblem, of: Arg, y: Strides, channels: int, pixels: int, box: tuple[int, ...]) -> Map:
    """Returns the map of the output, or of a residual with the same layout, for copies of 64 of its `channels`.

    A copy has a box of images, rows and columns or, without `box`, `pixels` consecutive pixels as one row. Raises ValueError
    with the broken rule.
    """
    _together(channels, y)
    if not box:
        _in_order(p.n, p.p * p.q, y)
    dims, sizes = ((p.q, p.p, p.n), box) if box else ((p.n * p.p * p.q, 1, 1), (1, 1, pixels))
    steps = (y.pixel, y.pixel * p.q, y.n)
    return Map(of, (channels, *dims), tuple(s * HALF for s in steps), box=(64, *reversed(sizes)), swizzle=128)


def _swizzle(p: ConvProblem, x: Strides, channels: int) -> int:
    """The swizzle in bytes: a pixel's channels in shared memory are a row of its pattern."""
    _together(padded_channels("hwc8", p.c), x)
    if channels * HALF not in SWIZZLES:
        raise ValueError(f"channels: expected 16, 32 or 64 in a copy, a row of a swizzle, got {channels}")
    return channels * HALF


def _together(channels: int, x: Strides) -> None:
    vector = 1 << x.log2v
    if channels > vector != x.block:
        raise ValueError(f"channels: expected all of a pixel together, got planes of {vector}")


def _in_order(images: int, pixels: int, x: Strides) -> None:
    if images > 1 and x.n != pixels * x.pixel:
        raise ValueError(f"strides: expected {pixels * x.pixel} elements from image to image, got {x.n}")
