"""Tensor maps of a convolution's input."""

from cuda_kernels.tensor_maps import Map
from tactics.families.conv_gemm import merged
from tactics.format import Strides
from tactics.problems.problem import ConvProblem

X = ("in", 0)
MOST_OFFSET = 254
CHANNELS = 64
SWIZZLE = 128


def pixels_are_rows(p: ConvProblem, x: Strides) -> bool:
    return p.r * p.s == 1 and p.stride == (1, 1) and not any(p.pad) and (p.n == 1 or x.n == p.h * p.w * x.pixel)


def input_map(p: ConvProblem, x: Strides, pixels: int) -> Map:
    if pixels_are_rows(p, x):
        return Map(X, (p.c, p.n * p.h * p.w), (2 * x.pixel,), box=(CHANNELS, pixels), swizzle=SWIZZLE)
    (top, left, bottom, right), (dil_h, dil_w) = p.pad, p.dilation
    if max((p.r - 1) * dil_h, (p.s - 1) * dil_w) > MOST_OFFSET:
        raise ValueError(f"taps reach {max((p.r - 1) * dil_h, (p.s - 1) * dil_w)} pixels: expected at most {MOST_OFFSET}")
    return Map(
        X,
        (p.c, p.w, p.h, p.n),
        (2 * x.pixel, 2 * x.pixel * p.w, 2 * x.n),
        lower=(-left, -top),
        upper=(right - (p.s - 1) * dil_w, bottom - (p.r - 1) * dil_h),
        channels=CHANNELS,
        pixels=pixels,
        element_strides=(1, p.stride[1], p.stride[0], 1),
        swizzle=SWIZZLE,
    )


def reason(p: ConvProblem, x: Strides, pixels: int) -> str:
    if p.c > 1 << x.log2v and x.block != 1 << x.log2v:
        return "im2col cannot step between planes of channels"
    try:
        input_map(p, x, pixels)
    except ValueError as e:
        return str(e)
    return ""
