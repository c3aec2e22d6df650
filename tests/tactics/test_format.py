"""Formats against the address rule and against each other."""

import itertools

import numpy as np
import pytest

from tactics.format import LAYOUTS, Format, canonical, from_memory, num_elements, strides, to_memory, wording

SHAPES = [(2, 3, 2, 3), (1, 8, 3, 2), (2, 16, 1, 1), (1, 32, 2, 2), (1, 33, 2, 1), (1, 1, 3, 3), (2, 40, 1, 1), (1, 17, 1, 4)]


def addresses(fmt, shape):
    s = strides(fmt, shape)
    n, c, h, w = np.meshgrid(*(np.arange(d) for d in shape), indexing="ij")
    return n * s.n + (c >> s.log2v) * s.block + (h * shape[3] + w) * s.pixel + (c & ((1 << s.log2v) - 1))


@pytest.mark.parametrize("layout,shape", list(itertools.product(LAYOUTS, SHAPES)))
def test_memory_follows_the_address_rule(layout, shape):
    fmt = Format("fp16", layout)
    x = np.random.default_rng(0).integers(1, 1000, shape).astype(np.float16)
    flat = to_memory(x, fmt)
    assert flat.size == num_elements(fmt, shape)
    assert np.array_equal(flat[addresses(fmt, shape)], x)
    assert np.count_nonzero(flat) == x.size  # all padding is zero
    assert np.array_equal(from_memory(flat, fmt, shape), x)


@pytest.mark.parametrize("shape", SHAPES)
def test_equal_keys_exactly_where_memory_coincides(shape):
    for a, b in itertools.combinations(LAYOUTS, 2):
        fa, fb = Format("fp16", a), Format("fp16", b)
        same = num_elements(fa, shape) == num_elements(fb, shape) and np.array_equal(addresses(fa, shape), addresses(fb, shape))
        assert (canonical(fa, shape) == canonical(fb, shape)) == same, (a, b)


def test_the_case_from_the_forum_costs_nothing():
    shape = (1, 288, 88, 64)
    assert canonical(Format("fp16", "hwc16"), shape) == canonical(Format("fp16", "hwc8"), shape)


def test_names():
    assert Format.parse("fp16:hwc8") == Format("fp16", "hwc8") and str(Format("fp32", "chw")) == "fp32:chw"
    assert wording(Format("fp16", "chw32")) == "Thirty-two wide channel vectorized row major FP16 format"
    with pytest.raises(ValueError, match="unknown format fp16:nhwc"):
        Format.parse("fp16:nhwc")
