"""The rows of elementwise functions and the kernels that compute them; the table of ONNX's operators."""

import re
from pathlib import Path

import pytest

from gpu_runtime.fusion import spelled
from gpu_runtime.lowering import pointwise
from gpu_runtime.pruning import channel_rules
from tactics.problems import operators
from tactics.problems.pointwise_ops import ACTIVATION_CODES, CODES, FIRST_OPERATION, POINTWISE, Stage

INCLUDE = Path(__file__).parents[3] / "cuda_kernels" / "include"


def enumerators(file: str, prefix: str) -> dict[str, int]:
    """Name, in small letters and without the prefix -> number, of the enumerators of a header that begin with `prefix`."""
    found: dict[str, int] = {}
    for body in re.findall(r"enum[^{;]*\{([^}]*)\}", (INCLUDE / file).read_text()):
        number = -1
        for entry in filter(None, map(str.strip, body.split(","))):
            name, _, value = entry.partition(" = ")
            number = int(value) if value else number + 1
            if name.startswith(prefix):
                found[name.removeprefix(prefix).lower()] = number
    return found


def test_the_kernels_number_functions_as_the_rows_do():
    assert enumerators("activation.cuh", "ACT_") == ACTIVATION_CODES
    assert enumerators("stages.cuh", "OP_") == {name: code for name, code in CODES.items() if code >= FIRST_OPERATION}
    assert len(ACTIVATION_CODES) <= FIRST_OPERATION


def test_every_function_has_its_line_in_the_kernels():
    lines = "".join((INCLUDE / file).read_text() for file in ("activation.cuh", "stages.cuh"))
    for name, code in (CODES | ACTIVATION_CODES).items():
        enumerator = f"KIND == ACT_{name.upper()})" if code < FIRST_OPERATION else f"OP == OP_{name.upper()})"
        assert name in ("none", "table") or enumerator in lines, name  # a table is beside `activate`


def test_parameters_with_which_a_function_is_spelled_are_as_many_as_it_has():
    for name, row in POINTWISE.items():
        assert row.spelled is None or Stage(name, params=row.spelled) in spelled.SPELLED


RESPELLED = {"CastLike"}  # the import turns it into an operator of the table; pruning reads the file as it is


@pytest.mark.parametrize("rules", [pointwise.OPS, {*channel_rules.RULES} - {*channel_rules.SIZES} - RESPELLED])
def test_no_rule_is_of_an_operator_that_is_refused(rules):
    assert rules <= operators.OPERATORS
