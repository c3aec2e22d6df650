"""Pools over small windows, for which the kernel is compiled: several outputs of a thread, edges, NaN, and registers."""

import numpy as np
import pytest

from cuda_kernels.compile import compile_kernel
from cuda_kernels.device import named
from cuda_kernels.launch import Emulated
from tactics.families.bandwidth import movement
from tactics.format import Format
from tactics.problems.pointwise_ops import Stage
from tactics.problems.problem import ChainedProblem, PointwiseProblem, PoolProblem
from tactics.sampling.data import random_data
from tactics.tactic import Tactic
from tests.problems import assert_written_once, check, execute

DEVICE = named("h200")
HALVED = {"stride": (2, 2), "pad": (1, 1, 1, 1)}
CHAIN = PointwiseProblem(2, 40, 6, 5, (Stage("mul", "c0"), Stage("add", "t1")), ("nchw", "nchw"), ("h",))
# The problem, and the window that the kernel is compiled for and the outputs of a thread of it where threads are many.
CASES = {
    "halved": (PoolProblem(2, 40, 11, 9, "max", 3, 3, (6, 5), **HALVED), (3, 3, 2)),
    "halved_average": (PoolProblem(1, 24, 13, 13, "avg", 3, 3, (7, 7), **HALVED), (3, 3, 2)),
    "padding_counts": (PoolProblem(1, 24, 13, 13, "avg", 3, 3, (7, 7), **HALVED, count_pad=True), (3, 3, 2)),
    "same_size": (PoolProblem(1, 24, 13, 13, "avg", 3, 3, (13, 13), pad=(1, 1, 1, 1)), (3, 3, 4)),
    "same_size_maximum": (PoolProblem(1, 24, 6, 5, "max", 3, 2, (6, 4), pad=(1, 0, 1, 0)), (3, 2, 4)),
    "apart": (PoolProblem(1, 16, 13, 14, "max", 2, 2, (7, 7), stride=(2, 2)), (2, 2, 1)),
    "five": (PoolProblem(1, 24, 12, 13, "max", 5, 5, (12, 13), pad=(2, 2, 2, 2)), (5, 5, 1)),
    "nine": (PoolProblem(1, 16, 13, 14, "max", 9, 9, (13, 14), pad=(4, 4, 4, 4)), (0, 0, 1)),
    "nine_average": (PoolProblem(1, 16, 13, 14, "avg", 9, 9, (13, 14), pad=(4, 4, 4, 4)), (0, 0, 1)),
    "dilated": (PoolProblem(1, 33, 9, 9, "max", 2, 3, (7, 5), dilation=(2, 2)), (2, 3, 1)),
    "dilated_columns": (PoolProblem(1, 33, 9, 9, "max", 3, 2, (4, 7), stride=(2, 1), dilation=(1, 2)), (3, 2, 2)),
    "chain": (ChainedProblem(PoolProblem(2, 40, 11, 9, "max", 3, 3, (6, 5), **HALVED), CHAIN), (3, 3, 2)),
}  # fmt: skip


def pool(x: str, y: str, inputs: int = 1) -> Tactic:
    x_fmt, y_fmt = Format("fp16", x), Format("fp16", y)
    return Tactic("pool", None, (x_fmt, *(y_fmt,) * (inputs - 1)), y_fmt)


@pytest.mark.parametrize("many", [0, 10**9], ids=["several", "one"])
@pytest.mark.parametrize("pair", [("hwc8", "hwc8"), ("hwc8", "chw32"), ("chw16", "hwc8"), ("chw", "chw")], ids="_".join)
@pytest.mark.parametrize("name", CASES)
def test_pools(name, pair, many, monkeypatch):
    monkeypatch.setattr(movement, "MANY_THREADS", many)
    problem, (r, s, outputs) = CASES[name]
    tactic = pool(*pair, inputs=len(problem.in_shapes))
    (step,) = movement.launches(problem, tactic)
    values = dict(step.values)
    several = outputs if many == 0 and pair[0] != "chw" else 1
    assert (values.get("R", 0), values.get("S", 0), values.get("OUTPUTS", 1)) == (r, s, several)
    check(problem, tactic, DEVICE)
    assert_written_once(problem, tactic, DEVICE, *random_data(problem))


def test_maxima_keep_nan_and_infinity(monkeypatch):
    """As FP16 maxima they are: whoever has a NaN in its window is one, and -65504 wins over padding."""
    monkeypatch.setattr(movement, "MANY_THREADS", 0)
    problem, x = CASES["halved"][0], np.full((2, 40, 11, 9), -65504, np.float16)
    x[0, 3, 4, 5], x[1, 39, 10, 8], x[1, 0, 0, 0] = np.nan, np.inf, -np.inf
    for first in (0.0, np.nan):
        x[0, 3, 3, 4] = first
        got = execute(Emulated(DEVICE), problem, pool("hwc8", "hwc8"), [x], {})
        assert np.array_equal(got[:, :40], problem.reference(x).astype(np.float16), equal_nan=True)


@pytest.mark.parametrize("sm", ["sm_80", "sm_90a", "sm_120"])
@pytest.mark.parametrize("average", [0, 1])
def test_no_window_spills(average, sm):
    for r, s, outputs, stride in ((3, 3, 1, 0), (3, 3, 2, 2), (3, 3, 4, 1), (9, 1, 2, 8), (5, 5, 1, 0), (1, 25, 1, 0)):
        values = {"VEC": 8, "AVG": average, "R": r, "S": s, "OUTPUTS": outputs, "STRIDE": stride}
        assert compile_kernel("pool", values, sm).spill_bytes == 0, values


@pytest.mark.parametrize("kind", ["avg", "max"])
def test_whole_images_are_combined_in_few_steps(kind):
    """A block's 32 partial results of 64 channels: four within a warp without shared memory, then eight by a thread for each
    channel; per channel no more than two turns at the port of shared memory."""
    problem = PoolProblem(2, 128, 7, 7, kind, 7, 7, (1, 1))
    tactic = Tactic("pool_global", None, (Format("fp16", "hwc8"),), Format("fp16", "hwc8"))
    _, stats = check(problem, tactic, DEVICE)
    assert stats.excess_wavefronts == 0 and stats.wavefronts <= 4 * 2 * 64
