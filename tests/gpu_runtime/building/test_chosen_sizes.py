"""Which sizes a build plans or refuses, and which plans are worth a place in the engine."""

import random

import numpy as np
import pytest

from gpu_runtime.building.chosen_sizes import Asked, asked, candidates, cells, worth
from gpu_runtime.errors import ModelError
from gpu_runtime.runtime.bounds import MOST_PLANS
from tests.engines import build
from tests.reference_run import model, node


def drawn(pick: random.Random) -> dict:
    """A profile: one size, or a range of batches."""
    low, opt, high = sorted(pick.randint(1, pick.choice((4, 64, 5000))) for _ in range(3))
    return {"x": (low, 3, 8, 8) if pick.random() < 0.5 else tuple((n, 3, 8, 8) for n in (low, opt, high))}


@pytest.mark.parametrize("seed", range(40))
def test_no_engine_has_more_plans_than_a_file_may_hold(seed):
    """Whatever is accepted: each range has two plans or more, its optimal and its largest batch among them."""
    pick = random.Random(seed)
    shapes = [drawn(pick) for _ in range(pick.randint(1, 18))]
    try:
        wanted = asked(shapes)
    except ValueError as e:
        assert "expected 16 plans at most" in str(e)
        assert (
            sum(1 + (len({s[0] for s in v} if isinstance(v[0], tuple) else {0}) > 1) for p in shapes for v in p.values()) > 16
        )
        return
    made = cells(wanted)
    assert len(made) <= MOST_PLANS
    for number, a in enumerate(wanted):
        batches = [cell.batch for cell in made if cell.profile == number]
        assert batches == sorted(set(batches)) and len(batches) >= 1 + bool(a.ranged)
        assert not a.ranged or ({a.opt, a.max} <= set(batches) and a.min <= batches[0])


def test_a_large_range_leaves_out_the_nearest_batches():
    assert candidates(Asked({}, ("x",), 1, 1, 64)) == (1, 2, 4, 8, 16, 32, 64)
    assert len(candidates(Asked({}, ("x",), 1, 3, 1 << 20))) == 12


def test_a_plan_stays_only_where_it_is_over_3_percent_faster():
    assert worth({1: 100.0, 2: 103.0, 4: 104.0}, opt=4) == (1, 4) == worth({1: 100.0, 4: 104.0}, opt=4)
    assert worth({1: 100.0, 2: 102.0, 4: 103.0}, opt=2) == (2, 4)


# The first as networks for text have it: T x N x C.
NOT_FIRST = {
    "1x1x6x8 at batch 1, 1x8x6x8 at 8": [node("Transpose", "c", "y", perm=[2, 0, 3, 1])],
    "2x8x1x6 at batch 1, 9x8x1x6 at 8": [node("Concat", "c one", "y", axis=0)],
    "1x8x1x6 at batch 1, 2x8x1x6 at 8": [node("Slice", "c zero two", "y")],
}
FIRST = {
    "alone": [node("Relu", "c", "y")],
    "times six": [node("Transpose", "c", "t", perm=[0, 2, 3, 1]), node("Reshape", "t rows", "y")],
    "none": [node("ReduceMean", "c", "y", axes=[0], keepdims=1)],
}


@pytest.mark.parametrize("case", [*NOT_FIRST, *FIRST])
def test_an_output_without_its_batch_first_is_refused_before_planning(case, tmp_path):
    given = {"w": np.ones((8, 4, 1, 1), np.float32), "one": np.ones((1, 8, 1, 6), np.float32)}
    given |= {"zero": np.int64([0]), "two": np.int64([2]), "rows": np.int64([-1, 8])}
    proto = model([node("Conv", "x w", "c"), *(NOT_FIRST | FIRST)[case]], {"x": ("n", 4, 1, 6)}, "y", given)
    stages: list[str] = []
    shapes = {"x": ((1, 4, 1, 6), (4, 4, 1, 6), (8, 4, 1, 6))}
    if case in FIRST:
        assert build(tmp_path, proto, shapes=shapes).outputs[0].name == "y"
        return
    with pytest.raises(ModelError, match=f"output 'y': expected the batch, .*, got {case}: put a Transpose"):
        build(tmp_path, proto, shapes=shapes, progress=lambda p: stages.append(p.stage))
    assert set(stages) == {"import", "lower"}
