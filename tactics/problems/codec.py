"""Writes problems as JSON and reads them, by the rules of tactics.codec: {"type": "ConvProblem", field: value, ...}."""

from typing import Any

from tactics import codec
from tactics.problems.problem import AnyProblem
from tactics.problems.protocol import Problem


def to_json(problem: Problem) -> dict[str, Any]:
    """A problem as plain data."""
    data: dict[str, Any] = codec.to_json(AnyProblem, problem)
    return data


def from_json(data: object) -> Problem:
    """Reads a problem that to_json wrote. Raises ValueError with a sentence for data that describes no problem."""
    problem: Problem = codec.from_json(AnyProblem, data)  # type: ignore[arg-type]
    return problem
