"""Which tactics a plan can want, beside a look at all of them."""

import random

import pytest

from cuda_kernels.device import named
from gpu_runtime.planning.entries import addresses, fastest
from tactics.candidates import candidates
from tactics.kernels import KERNELS
from tactics.measure.timing import Time
from tactics.planner.graph import to_ps
from tactics.problems.problem import ConvProblem

PROBLEM = ConvProblem(1, 32, 14, 14, 64, 3, 3, pad=(1, 1, 1, 1), sparse24=True)


@pytest.mark.parametrize("seed", range(12))
def test_the_fastest_of_each_cell_are_those_that_a_look_at_all_finds(seed):
    """With drawn times, many of them equal, and drawn premiums, which are never negative."""
    rng, tactics = random.Random(seed), candidates(PROBLEM, named("h200"))
    us = {t: float(rng.randint(1, 20)) for t in rng.sample(sorted(tactics), 400)}
    premiums = {t: rng.choice((1.0, 1.0, 1.5, 3.0)) for t in us}
    cells: dict[tuple, list[tuple]] = {}
    for t in us:
        kernel = KERNELS[t.kernel]
        cell = addresses(PROBLEM, t), t.sparse, kernel.placed, kernel.placed_residual
        cells.setdefault(cell, []).append((to_ps(us[t], premiums[t]), t.name, t))
    wanted = [(t, ps, ps - to_ps(us[t]), False) for ps, _, t in map(min, cells.values())]
    times = {t: Time(us[t], us[t], us[t], timed=False) for t in us}
    found = fastest(PROBLEM, times, lambda _, t, time: to_ps(time.us, premiums[t]))
    assert found == wanted and len(found) > 4
