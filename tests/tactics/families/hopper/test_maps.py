"""Tensor maps of a convolution's input: copies by them beside the window that the problem describes, and every rule."""

import random
from dataclasses import replace

import numpy as np
import pytest

from cuda_kernels.device import NAMED
from cuda_kernels.launch import Emulated
from tactics.families.hopper.maps import convolution_map, input_map, pixels_map
from tactics.format import Format, Strides, padded_channels, strides, to_memory
from tactics.problems.problem import ConvProblem
from tests.copied_boxes import copied, launch, swizzled

HWC8 = Format("fp16", "hwc8")


def drawn(seed: int) -> ConvProblem:
    """Sizes of 1 to 14, windows of 1 to 5, stride and dilation to 4, any padding."""
    pick = random.Random(seed)
    while True:
        sizes = [
            pick.randint(1, 3),
            pick.randint(1, 80),
            pick.randint(1, 14),
            pick.randint(1, 14),
            8,
            *pick.choices(range(1, 6), k=2),
        ]
        stride, dilation = ((pick.randint(1, 4), pick.randint(1, 4)) for _ in range(2))
        try:
            return ConvProblem(*sizes, stride, tuple(pick.choices(range(5), k=4)), dilation)
        except ValueError:  # a window larger than the image
            continue


def lies(p: ConvProblem, pick: random.Random) -> tuple[np.ndarray, np.ndarray, Strides]:
    """(the input NCHW with its padding, memory from its first byte on, its strides): on its own, or in a wider tensor."""
    rng = np.random.default_rng(pick.randrange(1000))
    own = padded_channels("hwc8", p.c)
    before, behind = pick.choice([(0, 0), (8, 0), (16, 24)])
    x = rng.integers(1, 1000, (p.n, before + own + behind, p.h, p.w)).astype(np.float16)
    x[:, before + p.c : before + own] = 0
    return x[:, before : before + own], to_memory(x, HWC8)[before:], strides(HWC8, x.shape)


def window(p: ConvProblem, x: np.ndarray, first: int, pixels: int, tap: tuple[int, int], channels: slice) -> np.ndarray:
    """[pixels][channels] that the problem multiplies by the weights of tap (r, s), from output pixel `first` on."""
    around = np.pad(x, ((0, 0), (0, channels.stop), (p.pad[0], p.pad[2]), (p.pad[1], p.pad[3])))
    out = np.zeros((pixels, channels.stop - channels.start), x.dtype)
    for i in range(min(pixels, p.n * p.p * p.q - first)):
        n, row, column = np.unravel_index(first + i, (p.n, p.p, p.q))
        at = (d * t + s * o for d, t, s, o in zip(p.dilation, tap, p.stride, (row, column), strict=True))
        out[i] = around[(n, channels, *at)]
    return out


def check(p: ConvProblem, seed: int, make) -> None:
    pick = random.Random(seed)
    x, memory, s = lies(p, pick)
    channels, pixels = pick.choice((16, 32, 64)), 16
    m = make(p, s, channels, pixels)
    first, c = pick.randrange(p.n * p.p * p.q), pick.randrange(0, p.c, channels)
    tap = pick.randrange(p.r), pick.randrange(p.s)
    n, row, column = (int(i) for i in np.unravel_index(first, (p.n, p.p, p.q)))
    at, offsets = (
        (c, column * p.stride[1] - p.pad[1], row * p.stride[0] - p.pad[0], n),
        (tap[1] * p.dilation[1], tap[0] * p.dilation[0]),
    )
    if m.box:
        at, offsets = (c, first, 0, 0), (0, 0)
    expected = window(p, x, first, pixels, tap, slice(c, c + channels))
    got = copied(Emulated(NAMED["h200"]), memory, launch(m, at, offsets, expected.nbytes))
    assert np.array_equal(got, swizzled(expected.view(np.uint8), m.swizzle)), (p, at, offsets)


@pytest.mark.parametrize("seed", range(60))
def test_a_column_is_the_tile_of_a_tap(seed):
    """So the box has p x q pixels, at whatever coordinates a tile begins."""
    check(drawn(seed), seed, convolution_map)


@pytest.mark.parametrize("seed", range(20))
def test_a_plain_1x1_window_reads_rows_of_pixels(seed):
    p = drawn(seed)
    p = ConvProblem(p.n, p.c, p.h, p.w, 8, 1, 1)
    assert input_map(p, strides(HWC8, p.in_shapes[0]), 64, 16).box == (64, 16)
    check(p, seed, input_map)
    check(p, seed, convolution_map)


P3 = ConvProblem(2, 64, 9, 7, 8, 3, 3, pad=(1, 1, 1, 1))
P1 = ConvProblem(2, 64, 9, 7, 8, 1, 1)
OWN = strides(HWC8, P3.in_shapes[0])
WIDE = ConvProblem(1, 64, 400, 400, 8, 3, 3)
RULES = {
    "planes of channels": (P3, strides(Format("fp16", "chw32"), P3.in_shapes[0]), {}, "channels: .* planes of 32"),
    "linear": (P3, strides(Format("fp16", "chw"), P3.in_shapes[0]), {}, "channels: .* planes of 1"),
    "pixels between multiples of 16 bytes": (P3, replace(OWN, pixel=68), {}, "strides: expected multiples of 16"),
    "images between multiples of 16 bytes": (P3, replace(OWN, n=4036), {}, "strides: expected multiples of 16"),
    "images 2^40 bytes apart": (P3, replace(OWN, n=1 << 39), {}, "strides: expected multiples of 16 below 2\\^40"),
    "rows of no swizzle": (P3, OWN, {"channels": 24}, "channels: expected 16, 32 or 64"),
    "rows beyond the swizzle": (P3, OWN, {"channels": 128}, "channels: expected 16, 32 or 64"),
    "1x1: boxes of 257": (P1, OWN, {"pixels": 257}, "box: expected sizes from 1 to 256"),
    "columns of 1,025": (P3, OWN, {"pixels": 1025}, "pixels: expected 1 to 1024"),
    "strides of 9": (replace(P3, stride=(1, 9)), OWN, {}, "element_strides: expected 1 to 8"),
    "padding of 129": (replace(WIDE, pad=(129, 0, 0, 0)), OWN, {}, "lower: expected numbers from -128 to 127"),
    "padding of 130 behind": (replace(WIDE, pad=(0, 0, 0, 130)), OWN, {}, "upper: expected numbers from -128 to 127"),
    "reach of 130 without padding": (replace(WIDE, dilation=(65, 1)), OWN, {}, "upper: expected numbers from -128"),
    "reach of 255": (
        replace(WIDE, s=2, dilation=(1, 255), pad=(0, 0, 0, 127)),
        OWN,
        {},
        "offsets: .* at most 254 pixels, got 255",
    ),
}


@pytest.mark.parametrize("rule", RULES)
def test_a_rule(rule):
    p, s, how, says = RULES[rule]
    how = {"channels": 64, "pixels": 128} | how
    with pytest.raises(ValueError, match=f"^{says}"):
        input_map(p, s, **how)


def test_what_is_just_allowed():
    ends = replace(WIDE, pad=(128, 128, 127, 127), dilation=(127, 127), stride=(8, 8))
    m = input_map(ends, strides(HWC8, ends.in_shapes[0]), 64, 1024)
    assert (m.lower, m.upper, m.element_strides) == ((-128, -128), (-127, -127), (1, 8, 8, 1))
    assert pixels_map(P1, OWN, 64, 256).nbytes == convolution_map(P3, OWN, 64, 64).nbytes == 2 * 9 * 7 * 64 * 2
    one = ConvProblem(1, 32, 9, 7, 8, 3, 3)
    planes = strides(Format("fp16", "chw32"), (1, 96, 9, 7))
    assert input_map(one, planes, 32, 64).strides[0] == 64, "32 channels of a tensor in planes"
