"""Writes problems as JSON and reads them, by the rules of tactics.codec: {"type": "ConvProblem", field: value, ...}."""

from typing import Any

from tactics import codec
from tactics.problems.problem import AnyProblem
from tactics.problems.protocol import Problem


def to_json(problem: Problem) -> dict[str, Any]:
    """Returns a problem as JSON data, which from_json reads."""
    data: dict[str, Any] = codec.to_json(AnyProblem, problem)
    return data


def from_json(data: object) -> Problem:
    """Returns the problem that to_json wrote as `data`. Raises ValueError if `data` describes no problem."""
    problem: Problem = codec.from_json(AnyProblem, data)  # type: ignore[arg-type]
    return problem
