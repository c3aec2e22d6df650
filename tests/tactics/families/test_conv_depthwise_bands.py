"""Depthwise convolution on tensor cores: what it executes, and what is not finite under every kind of epilogue."""

import numpy as np
import pytest

from cuda_kernels.launch import Emulated
from tactics.families import conv_depthwise
from tactics.families.conv_depthwise import TENSOR_PATCHES
from tactics.launches import launches
from tactics.problems.pointwise_ops import Activation
from tactics.sampling.data import random_data, reference
from tests.problems import assert_right, depthwise, execute
from tests.tactics.families.test_conv_depthwise import DEVICE, LIMITS, run, tactic

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("reach", LIMITS)
@pytest.mark.parametrize("patch", TENSOR_PATCHES, ids=str)
def test_the_prediction_counts_what_tensor_cores_execute(patch, reach):
    """Products exactly, instructions (of PTX, here; the prediction's are of machine code) and wavefronts nearly."""
    problem = depthwise(1, 64, 56, 64, reach, reach, pad=(reach // 2,) * 4, bias=True)
    t = tactic(problem, patch)
    _, stats = run(problem, t)
    (launch,) = launches(problem, t)
    blocks = launch.grid[0]
    clocks, _ = conv_depthwise._tensor(problem, patch, launch.block[0], rate=1.0)  # of a block, one product in a clock
    assert stats.mma * 16 * 8 * 16 == blocks * clocks["tensor"]
    assert 0.55 < blocks * 4 * clocks["issue"] / stats.instructions < 1.4  # four warps issue in a clock
    lines = stats.sectors * 16 / patch.channels  # a pixel's sectors of 16 channels lie in one
    assert 0.9 < blocks * clocks["l1"] / (stats.wavefronts + lines) < 1.1


@pytest.mark.parametrize("reach", LIMITS)
@pytest.mark.parametrize("patch", TENSOR_PATCHES, ids=str)
def test_what_is_not_finite_reaches_those_that_read_it_alone(patch, reach):
    """A band of zeros beside a filter row would spread it to neighbours; sums that infinities cancel are NaN, as anywhere."""
    problem = depthwise(1, 60, 20, 19, reach, reach, pad=(reach // 2,) * 4, bias=True)
    (x,), weights = random_data(problem)
    x[0, 3, 7, 8], x[0, 12, 0, 18], x[0, 58, 19, 0] = np.inf, np.nan, -np.inf  # one beside padding
    t = tactic(problem, patch)
    whole = execute(Emulated(DEVICE), problem, t, [x], weights)
    got = whole[:, : problem.k]
    with np.errstate(invalid="ignore"):
        expected = reference(problem, [x], weights)
    spoilt = ~np.isfinite(expected)
    assert 0 < spoilt.sum() <= 3 * reach**2
    infinite = spoilt & ~np.isnan(expected)
    assert np.array_equal(np.isnan(got), np.isnan(expected)) and np.array_equal(got[infinite], expected[infinite])
    got[spoilt] = 0
    assert_right(problem, t, whole, np.where(spoilt, 0, expected))


KEPT = ("none", "relu", "leaky_relu", "silu")  # activations that give NaN for NaN; the others hide it
DROPPED = ("clip", "hard_sigmoid")


@pytest.mark.parametrize("residual", [False, True], ids=["alone", "residual"])
@pytest.mark.parametrize("act", [*KEPT, *DROPPED])
def test_infinities_under_each_epilogue(act, residual):
    """Where an activation keeps NaN, a spoilt output tells that it is; clip and hard_sigmoid would hide it, and a residual may
    be NaN of its own. Infinities far apart and positive weights: no output is NaN but of SiLU."""
    params = {"clip": (0.0, 6.0), "hard_sigmoid": (0.2, 0.5), "leaky_relu": (0.1,)}.get(act, ())
    problem = depthwise(1, 32, 11, 19, 5, 5, pad=(2,) * 4, bias=True, residual=residual, act=Activation(act, params))
    inputs, weights = random_data(problem)
    weights["w"] = np.abs(weights["w"]) + 0.1
    inputs[0][0, 3, 5, 8], inputs[0][0, 12, 0, 18] = np.inf, -np.inf
    t = tactic(problem, TENSOR_PATCHES[0])
    gpu = Emulated(DEVICE)
    got = execute(gpu, problem, t, inputs, weights)
    with np.errstate(invalid="ignore", over="ignore"):
        expected = reference(problem, inputs, weights)
    spoilt = ~np.isfinite(expected)
    assert spoilt.any() != (act in DROPPED), "infinities come out unless clipped"
    assert np.array_equal(np.isnan(got), np.isnan(expected)) and np.array_equal(
        got[np.isinf(expected)], expected[np.isinf(expected)]
    )
    assert_right(problem, t, np.where(spoilt, 0, got), np.where(spoilt, 0, expected))


@pytest.mark.parametrize("size", [(1, 1), (7, 7), (14, 14), (29, 33), (3, 65)], ids=str)
@pytest.mark.parametrize("window", [(3, 3), (5, 5), (7, 7), (1, 7), (7, 1), (2, 5), (6, 4)], ids=lambda w: "{}x{}".format(*w))
def test_windows_and_sizes(window, size):
    """Rows of a filter are loaded four, two or one at a time, and images end anywhere in a patch."""
    (r, s), (h, w) = window, size
    pad = (r // 2, s // 2, (r - 1) // 2, (s - 1) // 2)
    problem = depthwise(2, 24, h, w, r, s, pad=pad, bias=True)
    for patch in (TENSOR_PATCHES[0], TENSOR_PATCHES[-1]):
        run(problem, tactic(problem, patch))


def test_larger_windows_are_refused():
    problem = depthwise(1, 16, 20, 20, 3, 9, pad=(1, 4, 1, 4))
    why = conv_depthwise.reason(problem, tactic(problem, TENSOR_PATCHES[0]), DEVICE, limit=9.0)
    assert why == "tensor cores take filters of at most 7x7, not 3x9"
