"""Records and problems as JSON and back; what fits no field is refused; sections have the sizes that packing gives them."""

import json
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

import pytest

from cuda_kernels.device import named
from tactics import codec as records
from tactics.candidates import accepts, candidates
from tactics.launches import pack_weights, section_bytes, tables
from tactics.problems import codec
from tactics.problems.convolution import with_epilogue
from tactics.problems.epilogue import MaxPool
from tactics.problems.problem import MoveProblem, PoolProblem
from tactics.sampling.data import random_data
from tests.problems import PROBLEMS, conv_case, pairs
from tests.tactics.families.test_conv_transpose import GROUPED as TRANSPOSED

DEVICE = named("h200")
CONV = conv_case(1, 8, 9, 9, 16, 3, 3, pad=(1, 1, 1, 1), bias=True)


@pytest.mark.parametrize("problem", [*PROBLEMS.values(), *TRANSPOSED.values()], ids=str)
def test_problems_come_back(problem):
    assert codec.from_json(json.loads(json.dumps(codec.to_json(problem), allow_nan=False))) == problem


def test_infinity_comes_back():
    problem = MoveProblem(1, 3, 4, 4, "window", (3, 6, 6), (0, -1, -1), fill=float("-inf"))
    data = codec.to_json(problem)
    assert data["fill"] == "-inf" and codec.from_json(data) == problem


def test_a_max_pool_is_eight_numbers():
    problem = with_epilogue(CONV, pool=MaxPool(window=(3, 2), stride=(2, 1), pad=(1, 0), out=(4, 5)))
    data = codec.to_json(problem)
    assert data["epilogue"]["pool"] == [3, 2, 2, 1, 1, 0, 4, 5] and "pool3,2,2,1,1,0,4,5" in str(problem)
    assert codec.from_json(data) == problem and codec.from_json(data).epilogue.pool.window == (3, 2)
    assert records.to_json(type(CONV), CONV, defaults=True)["epilogue"]["pool"] == []
    data["epilogue"]["pool"] = []
    assert codec.from_json(data) == CONV


@pytest.mark.parametrize(
    "numbers", [[3, 3, 2, 2, 1, 1], [3, 3, 2, 2, 1, 1, 4], [3, 3, 2, 2, 1, 1, 4, 4, 1, 1], [3, 3, 2, 2, 1, 1, 4, "4"], "none"]
)
def test_no_other_numbers_are_a_max_pool(numbers):
    data = codec.to_json(CONV)
    data["epilogue"]["pool"] = numbers
    with pytest.raises(ValueError, match=r"epilogue\.pool: expected a list of 8 numbers"):
        codec.from_json(data)


@pytest.mark.parametrize(
    "change",
    [
        {"type": "Problem"},
        {"type": 3},
        {"k": 16.0},
        {"k": "16"},
        {"k": True},
        {"k": 2**31},
        {"k": 0},
        {"k": None},
        {"bias": True},
        {"epilogue": {"bias": 1}},
        {"stride": [1]},
        {"stride": [1, 0]},
        {"stride": 1},
        {"groups": 0},
        {"groups": -1},
        {"groups": 3},
        {"dilation": [2**62, 1]},
        {"epilogue": {"pool": [3, 3]}},
        {"epilogue": {"act": "relu"}},
        {"epilogue": {"act": {"name": "rel"}}},
        {"epilogue": {"act": {"name": "clip", "params": [0]}}},
        {"more": 1},
        {"pad": [1, 1, 1, "inf"]},
        {"epilogue": {"d2s": 0}},
        {"h": -9},
    ],
    ids=str,
)
def test_what_no_problem_is(change):
    with pytest.raises(ValueError, match=r"expected|must|make no sense|takes 2"):
        codec.from_json(codec.to_json(CONV) | change)


def test_a_missing_field_is_named():
    data = codec.to_json(CONV)
    del data["k"]
    with pytest.raises(ValueError, match="has no 'k'"):
        codec.from_json(data)


@pytest.mark.parametrize(
    "how",
    [
        lambda: MoveProblem(1, 4, 5, 5, "s2d_dcr", (16, 3, 3), step=(1, 2, 2)),
        lambda: MoveProblem(1, 4, 4, 4, "upsample", (4, 9, 8), step=(1, 2, 2)),
        lambda: MoveProblem(1, 4, 4, 4, "channels", (4, 4, 4), step=(1, 3, 3)),
        lambda: PoolProblem(1, 4, 4, 4, "max", 2, 0, (2, 2)),
    ],
)
def test_sizes_that_would_read_outside(how):
    with pytest.raises(ValueError, match="expected|positive"):
        how()


@pytest.mark.slow
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


# ---- any record


@dataclass(frozen=True)
class Part:
    size: Annotated[int, records.whole_number(0, 9)]
    in_: Annotated[complex, records.As("a complex number", complex, str)] = 1j


@dataclass(frozen=True)
class Other:
    """Told from a Part by its type."""


@dataclass(frozen=True)
class Whole:
    name: Annotated[str, records.Check("a text of at most 3 characters", lambda v: len(v) <= 3)]
    parts: tuple[Part, ...] = ()
    either: Part | Other | None = None
    kind: Literal["a", "b"] = "a"
    numbers: Mapping[str, float] = field(default_factory=dict)
    pair: tuple[bool, float | None] = (True, None)


WHOLE = Whole("x", (Part(3), Part(4, 2j)), Part(5), "b", {"one": 1.5, "most": math.inf}, (False, 2.0))


def test_a_record_comes_back():
    data = json.loads(json.dumps(records.to_json(Whole, WHOLE), allow_nan=False))
    assert data == {
        "name": "x",
        "parts": [{"size": 3}, {"size": 4, "in": "2j"}],
        "either": {"type": "Part", "size": 5},
        "kind": "b",
        "numbers": {"one": 1.5, "most": "inf"},
        "pair": [False, 2.0],
    }
    assert records.from_json(Whole, data) == WHOLE
    assert records.from_json(Whole, {"name": "y"}) == Whole("y")
    assert records.from_json(Whole, {"name": "y", "either": {"type": "Other"}}).either == Other()
    full = records.to_json(Whole, Whole("y"), defaults=True)
    assert full["either"] is None and full["pair"] == [True, None] and records.from_json(Whole, full) == Whole("y")


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (7, "expected a record, got 7"),
        ({}, "has no 'name'"),
        ({"name": 7}, "name: expected a text of at most 3 characters, got 7"),
        ({"name": "long"}, "name: expected a text of at most 3"),
        ({"name": "x", "more": 1}, "has an unknown 'more', expected only name"),
        ({"name": "x", "parts": [{"size": 1}, {"size": 10}]}, r"parts\[1\].size: expected a whole number from 0 to 9, got 10"),
        ({"name": "x", "parts": [{"size": True}]}, r"parts\[0\].size: expected a whole number"),
        ({"name": "x", "parts": [{}]}, r"parts\[0\]: has no 'size'"),
        ({"name": "x", "parts": {}}, "parts: expected a list, got"),
        ({"name": "x", "parts": [{"size": 1, "in": "j+"}]}, r"parts\[0\].in: expected a complex number, got j+"),
        ({"name": "x", "either": {"size": 5}}, "either: expected a record with a type, one of Part, Other"),
        ({"name": "x", "either": {"type": "Whole", "name": "y"}}, "either: expected a record with a type"),
        ({"name": "x", "either": {"type": "Part", "size": -1}}, "either.size: expected"),
        ({"name": "x", "kind": "c"}, "kind: expected one of a, b, got c"),
        ({"name": "x", "kind": None}, "kind: expected"),
        ({"name": "x", "numbers": {"one": "1"}}, "numbers.one: expected a number, got 1"),
        ({"name": "x", "pair": [True]}, "pair: expected a list of 2"),
        ({"name": "x", "pair": [True, "?"]}, r"pair\[1\]: expected a number"),
    ],
)
def test_what_does_not_fit_is_refused_by_its_place(data, sentence):
    with pytest.raises(records.Misfit, match=f"^{sentence}"):
        records.from_json(Whole, data)


def test_a_record_is_described():
    assert {name: records.words(hint) for name, (_, _, hint) in records.json_fields(Whole).items()} == {
        "name": "a text of at most 3 characters",
        "parts": "[Part, ...]",
        "either": "Part or Other or null",
        "kind": "one of a, b",
        "numbers": "{name: a number}",
        "pair": "[true or false, a number or null]",
    }
