"""Every kernel tells when it has stored infinity or NaN, and is silent when it has not.

tests.problems.execute compares what the launches say with what lies in memory, in every test that runs a kernel.
"""

import numpy as np
import pytest

from cuda_kernels.device import named
from cuda_kernels.launch import Emulated
from tactics.sampling.data import random_data
from tactics.step import linear
from tests.problems import conv_case, execute, pairs

DEVICE = named("a100")


def one_of_each() -> dict[str, tuple]:
    """A problem and a tactic for each kernel, kind of activation, side of its input and side of its output."""
    found = {}
    for _, problem, tactic in pairs(DEVICE, per_conv=4):
        if tactic.ins[0].dtype == "fp16" and not {"clip", "sign"} & {s.op for s in getattr(problem, "stages", ())}:
            x, y = ("linear" if linear(f) else "vectors" for f in (tactic.ins[0], tactic.out))
            found.setdefault(f"{tactic.kernel}-{x}-{y}", (problem, tactic))
    return found


CASES = one_of_each()
PLAIN = [t for _, t in CASES.values() if t.kernel in ("conv_dense", "conv_sparse24")]


@pytest.mark.sample(18)
@pytest.mark.parametrize("case", CASES)
def test_infinite_inputs_are_told(case):
    problem, tactic = CASES[case]
    inputs, weights = random_data(problem)
    assert np.isfinite(execute(Emulated(DEVICE), problem, tactic, inputs, weights)).all()
    inputs[0][-1] = np.inf
    assert not np.isfinite(execute(Emulated(DEVICE), problem, tactic, inputs, weights)).all()


@pytest.mark.slow
@pytest.mark.parametrize("pixel", (0, 13, 62))
def test_what_rounds_to_infinity_in_one_place_is_told(pixel):
    """65,519 is stored as 65,504 and 65,520 as infinity: one channel of one pixel."""
    problem = conv_case(1, 16, 9, 7, 40, 1, 1, bias=True, sparse24=True)
    (x,), weights = random_data(problem)
    for channel in (0, 21, 39):
        x[:], weights["w"][:] = 0, 0
        x[0, 3, pixel // 7, pixel % 7] = weights["w"][channel, 3] = 1
        for bias, finite in ((65518, True), (65519, False), (np.nan, False)):
            weights["b"][:] = 0
            weights["b"][channel] = bias
            for tactic in PLAIN:
                got = execute(Emulated(DEVICE), problem, tactic, [x], weights)
                assert np.isfinite(got).all() == finite and (bias != 65519 or np.isinf(got).sum() == 1)
