"""Weights as whole numbers, tensors of whole numbers, and convolutions on both beside their FP16 forms."""

import numpy as np
import pytest

from gpu_runtime.rewrites import integers

rng = np.random.default_rng(52)


def quantised(k: int, c: int, scales: np.ndarray, largest: int = 127) -> tuple[np.ndarray, np.ndarray]:
    v = rng.integers(-largest, largest + 1, (k, c, 3, 3))
    return v, (v * scales.reshape(-1, 1, 1, 1).astype(np.float32)).astype(np.float32)


@pytest.mark.parametrize("largest", [127, 60, 7, 1])
@pytest.mark.parametrize("alike", [False, True])
def test_whole_weights_are_found(largest, alike):
    for _ in range(20):
        k, c = rng.integers(1, 9, 2)
        scales = np.exp(rng.normal(-5, 2, 1 if alike else k)).repeat(k if alike else 1)
        v, w = quantised(k, c, scales, largest)
        found = integers.whole(w)
        assert found is not None
        assert np.abs(found.numbers).max(initial=0) <= 127 and np.array_equal(found.numbers, np.rint(found.numbers))
        np.testing.assert_allclose(found.numbers * found.scales.reshape(-1, 1, 1, 1), w, rtol=1e-6, atol=0)
        assert np.array_equal(found.numbers != 0, v != 0)


def test_minus_128_is_a_byte_and_128_is_not():
    w = np.array([-128, 127, 64, 3], np.float32).reshape(1, 4, 1, 1)
    found = integers.whole(w * np.float32(0.01))
    assert found is not None and found.numbers.min() == -128 and integers.whole(w * np.float32(-0.01)) is None


def test_a_scale_that_was_folded_into_weights_stays_found():
    _, w = quantised(8, 16, np.exp(rng.normal(-5, 2, 8)))
    factor = rng.uniform(0.01, 30, 8).reshape(-1, 1, 1, 1)
    assert integers.whole((w.astype(np.float64) * factor).astype(np.float32)) is not None


def test_other_weights_are_none():
    for _ in range(200):
        w = rng.standard_normal((4, rng.integers(2, 40), 3, 3)).astype(np.float32)
        assert integers.whole(w) is None
    v, w = quantised(4, 16, np.full(4, 0.01))
    w[2, 5, 1, 1] += np.float32(0.002)  # a fifth of a step
    assert integers.whole(w) is None


def test_channels_of_zeros_and_single_weights():
    w = np.zeros((3, 2, 1, 1), np.float32)
    w[1, 0] = -0.3
    found = integers.whole(w)
    assert found is not None and found.scales[0] == 1 and found.scales[2] == 1
    np.testing.assert_allclose(found.numbers[1, 0, 0, 0] * found.scales[1], -0.3, rtol=1e-6)
