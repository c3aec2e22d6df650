"""Problems as JSON and back; what fits no field is refused; sections have the sizes that packing gives them."""

import json
import random

import pytest

from cuda_kernels.device import named
from tactics.candidates import accepts, candidates
from tactics.launches import pack_weights, section_bytes, tables
from tactics.measure.worker import random_data
from tactics.problems import codec
from tactics.problems.problem import ConvProblem, MoveProblem, PoolProblem
from tests.problems import PROBLEMS, pairs
from tests.test_transpose import GROUPED as TRANSPOSED

DEVICE = named("h200")
CONV = ConvProblem(1, 8, 9, 9, 16, 3, 3, pad=(1, 1, 1, 1), bias=True)


@pytest.mark.parametrize("problem", [*PROBLEMS.values(), *TRANSPOSED.values()], ids=str)
def test_problems_come_back(problem):
    assert codec.from_json(json.loads(json.dumps(codec.to_json(problem), allow_nan=False))) == problem


def test_infinity_comes_back():
    problem = MoveProblem(1, 3, 4, 4, "window", (3, 6, 6), (0, -1, -1), fill=float("-inf"))
    data = codec.to_json(problem)
    assert data["fill"] == "-inf" and codec.from_json(data) == problem


@pytest.mark.parametrize(
    "change",
    [
        {"type": "Problem"}, {"type": 3}, {"k": 16.0}, {"k": "16"}, {"k": True}, {"k": 2**31}, {"k": 0}, {"k": None},
        {"bias": 1},
        {"stride": [1]}, {"stride": [1, 0]}, {"stride": 1}, {"groups": 0}, {"groups": -1}, {"groups": 3},
        {"dilation": [2**62, 1]},
        {"pool": [3, 3]}, {"act": "relu"}, {"act": {"name": "rel"}}, {"act": {"name": "clip", "params": [0]}}, {"more": 1},
        {"pad": [1, 1, 1, "inf"]}, {"d2s": 0}, {"h": -9},
    ],
    ids=str,
)  # fmt: skip
def test_what_no_problem_is(change):
    with pytest.raises(ValueError, match=r"expected|must|make no sense|takes 2"):
        codec.from_json(codec.to_json(CONV) | change)


def test_a_missing_field_is_named():
    data = codec.to_json(CONV)
    del data["k"]
    with pytest.raises(ValueError, match="expected a record of n, c, h, w, k"):
        codec.from_json(data)


@pytest.mark.parametrize("how", [
    lambda: MoveProblem(1, 4, 5, 5, "s2d_dcr", (16, 3, 3), step=(1, 2, 2)),
    lambda: MoveProblem(1, 4, 4, 4, "upsample", (4, 9, 8), step=(1, 2, 2)),
    lambda: MoveProblem(1, 4, 4, 4, "channels", (4, 4, 4), step=(1, 3, 3)),
    lambda: PoolProblem(1, 4, 4, 4, "max", 2, 0, (2, 2)),
])  # fmt: skip
def test_sizes_that_would_read_outside(how):
    with pytest.raises(ValueError, match="expected|positive"):
        how()


def test_sections_are_as_large_as_they_are_packed():
    """For every kernel, tile and output format that the small problems reach; and so are the tables."""
    seen, rng = set(), random.Random(5)
    cases = [(p, t) for _, p, t in pairs(DEVICE, 2)]
    cases += [(p, t) for p in TRANSPOSED.values() for t in rng.sample(candidates(p, DEVICE), 3)]
    for problem, tactic in cases:
        if (key := (problem, tactic.kernel, tactic.out)) in seen:
            continue
        seen.add(key)
        packed = pack_weights(problem, tactic, random_data(problem)[1])
        assert section_bytes(problem, tactic) == {name: a.nbytes for name, a in packed.items()}, (str(problem), tactic.name)
        for name, table in tables(problem, tactic).items():
            assert (packed[name] == table).all()
    assert len(seen) > 300


def test_every_candidate_is_accepted_and_no_other():
    rng = random.Random(1)
    for problem in (*PROBLEMS.values(), *TRANSPOSED.values()):
        able = candidates(problem, DEVICE)
        for tactic in rng.sample(able, min(len(able), 4)):
            assert accepts(problem, tactic, DEVICE), (str(problem), tactic.name)
    others = candidates(CONV, DEVICE), candidates(PROBLEMS["pool_max"], DEVICE)
    assert not any(accepts(CONV, t, DEVICE) for t in others[1])
    assert not any(accepts(PROBLEMS["pool_max"], t, DEVICE) for t in others[0])
