"""Problems that are made of others: what everything but their kernels asks of them follows from PARTS."""

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest

from cuda_kernels.device import named
from tactics.problems.batches import at_batch
from tactics.problems.problem import (
    BackToBackProblem,
    ConvProblem,
    PoolProblem,
    ScaledConvProblem,
    SqueezeExciteProblem,
)
from tactics.problems.protocol import Problem
from tactics.roofline import floors
from tactics.sampling import data

H200 = named("h200")
CONV = ConvProblem(2, 16, 8, 8, 24, 3, 3, pad=(1, 1, 1, 1))
AVERAGE = PoolProblem(2, 24, 8, 8, "avg", 8, 8, (1, 1))
SQUEEZE, EXCITE = ConvProblem(2, 24, 1, 1, 8, 1, 1), ConvProblem(2, 8, 1, 1, 24, 1, 1)
SCALE = SqueezeExciteProblem(AVERAGE, SQUEEZE, EXCITE)
SECOND, THIRD = ConvProblem(2, 24, 8, 8, 40, 1, 1), ConvProblem(2, 40, 8, 8, 8, 1, 1)


@dataclass(frozen=True, slots=True)
class Twice(Problem):
    """A composite that nothing but this test knows: second(first(x)), each a convolution or made of several."""

    first: Problem
    second: Problem
    PARTS: ClassVar[tuple[str, ...]] = ("first", "second")
    LATER: ClassVar[str] = "_later"

    def __str__(self) -> str:
        return f"twice {self.first} -> {self.second}"

    @property
    def in_shapes(self):
        return self.first.in_shapes

    @property
    def out_shape(self):
        return self.second.out_shape

    def reference(self, x, **weights):
        later = {name.removesuffix("_later"): w for name, w in weights.items() if name.endswith("_later")}
        own = {name: w for name, w in weights.items() if not name.endswith("_later")}
        return self.second.reference(self.first.reference(x, **own), **later)


@pytest.mark.parametrize(
    "problem,parts,judged",
    [
        (CONV, (CONV,), CONV),
        (SCALE, (AVERAGE, SQUEEZE, EXCITE), SQUEEZE),
        (ScaledConvProblem(CONV, SCALE), (CONV, AVERAGE, SQUEEZE, EXCITE), SQUEEZE),
        (Twice(CONV, Twice(SECOND, THIRD)), (CONV, SECOND, THIRD), None),
    ],
)
def test_parts_of_parts_are_parts(problem, parts, judged):
    assert problem.parts == parts and problem.judged == (judged or problem)


@pytest.mark.parametrize(
    "problem",
    [BackToBackProblem(CONV, SECOND), SCALE, ScaledConvProblem(CONV, SCALE), Twice(CONV, SECOND)],
)
def test_a_composite_has_data_batches_and_a_floor(problem):
    inputs, weights = data.random_data(problem, 1)
    y = data.reference(problem, inputs, weights)
    assert y.shape == problem.out_shape and np.isfinite(y).all()
    one = at_batch(problem, 1)
    assert {part.out_shape[0] for part in one.parts} == {1}
    first = data.reference(one, [x[:1] for x in inputs], weights)
    np.testing.assert_allclose(first, y[:1], rtol=1e-5, atol=1e-5)
    found = floors(problem, H200)
    assert found["dense_us"] > found["launch_us"] > 0
    counted = sum(p.k * p.c * p.r * p.s for p in problem.parts if isinstance(p, ConvProblem))
    assert sum(w.size for name, w in weights.items() if name[0] == "w") == counted


def test_a_stride_behind_leaves_rows_out():
    """A 1x1 convolution with stride 2 reads every second row and column of the one ahead: a quarter of its products."""
    behind = replace(SECOND, stride=(2, 2))
    whole, some = floors(BackToBackProblem(CONV, SECOND), H200), floors(BackToBackProblem(CONV, behind), H200)
    assert some["mma_us"] < 0.3 * whole["mma_us"]
