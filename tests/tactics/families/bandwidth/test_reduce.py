"""Rows that the reduce kernel keeps in registers: which they are, by how many lanes each, and their values."""

import pytest

from cuda_kernels.compile import compile_kernel
from cuda_kernels.device import named
from tactics.families.bandwidth.reduce import HELD_REGISTERS, counts, launches
from tactics.format import Format
from tactics.problems.pointwise_ops import Stage
from tactics.problems.problem import ChainedProblem, PointwiseProblem
from tactics.problems.reductions import NormalizeProblem, ReduceProblem
from tactics.roofline import predicted
from tactics.sampling.data import random_data
from tactics.tactic import Tactic
from tests.problems import assert_written_once, check

DEVICE = named("h200")


def layer_norm(n, c, h, w, axes="w", **how) -> NormalizeProblem:
    return NormalizeProblem(n, c, h, w, "standard", axes, epsilon=1e-5, affine=how.pop("affine", axes), **how)


def chained(first: NormalizeProblem, *stages: Stage, **how) -> ChainedProblem:
    return ChainedProblem(first, PointwiseProblem(*first.out_shape, stages, **how))


# The problem, the format of all of its tensors, and (vectors of a lane, lanes of a row, threads of a block, scales first, all
# lanes' vectors are real), or nothing where rows are read once for each statistic.
CASES = {
    "96": (layer_norm(1, 50, 1, 96), "chw", (3, 4, 32, 1, 1)),
    "192_added": (layer_norm(1, 70, 1, 192, added=True), "chw", (3, 8, 32, 1, 1)),
    "768": (layer_norm(2, 7, 3, 768), "chw", (3, 32, 32, 1, 1)),
    "many": (layer_norm(1, 17000, 1, 96), "chw", (3, 4, 32, 0, 1)),
    "two_axes": (layer_norm(2, 9, 5, 16, "hw", affine=""), "chw", (3, 4, 32, 0, 0)),
    "softmax": (NormalizeProblem(2, 7, 3, 1000, "softmax", "w"), "chw", (4, 32, 32, 0, 0)),
    "log_softmax": (NormalizeProblem(3, 40, 1, 1, "log_softmax", "c"), "hwc8", (3, 2, 32, 0, 0)),
    "four_warps": (layer_norm(2, 3, 1, 2048), "chw", (2, 128, 128, 1, 1)),
    "eight_warps": (NormalizeProblem(2, 9, 3, 4096, "softmax", "w"), "chw", (2, 256, 256, 0, 1)),
    "too_long": (NormalizeProblem(1, 2, 3, 8200, "softmax", "w"), "chw", None),
    "channels": (layer_norm(2, 96, 5, 7, "c"), "hwc8", (3, 4, 32, 1, 1)),
    "padding": (layer_norm(2, 40, 5, 7, "c"), "hwc16", (3, 2, 32, 1, 0)),
    "odd": (layer_norm(2, 42, 5, 7, "c"), "hwc8", None),
    "apart": (layer_norm(2, 40, 5, 7, "c"), "chw32", None),
    "scales_everywhere": (layer_norm(2, 40, 5, 7, "c", affine="chw"), "hwc8", (3, 2, 32, 1, 0)),
    "groups": (layer_norm(2, 96, 5, 7, "c", groups=4, affine="c"), "hwc8", (3, 1, 32, 1, 1)),
    "uneven_groups": (layer_norm(2, 160, 5, 7, "c", groups=4, affine="c"), "hwc8", (3, 2, 32, 1, 0)),
    "softmax_of_groups": (NormalizeProblem(2, 160, 5, 7, "softmax", "c", groups=4), "hwc16", (3, 2, 32, 0, 0)),
    "pixels": (layer_norm(2, 40, 5, 7, "hw", affine="c"), "hwc8", None),
    "mean": (ReduceProblem(2, 40, 5, 7, "mean", "c"), "hwc8", (3, 2, 32, 0, 0)),
    "inv_std": (ReduceProblem(2, 64, 5, 7, "inv_std", "c", 0.1), "hwc8", (2, 4, 32, 0, 1)),
    "max": (ReduceProblem(2, 8, 5, 7, "max", "c"), "hwc8", (1, 1, 32, 0, 1)),
    "chain": (chained(layer_norm(1, 50, 1, 96), Stage("mul", "c0"), Stage("add", "t1"), Stage("gelu"),
                      tensors=("nchw", "nchw"), constants=("w",)), "chw", (3, 4, 32, 1, 1)),
    "chain_and_padding": (chained(layer_norm(2, 40, 5, 7, "c"), Stage("exp"), Stage("mul", "c0"), constants=("h",)),
                          "hwc16", (3, 2, 32, 1, 0)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_rows_in_registers(name):
    problem, layout, expected = CASES[name]
    fmt = Format("fp16", layout)
    tactic = Tactic("reduce", None, (fmt,) * len(problem.in_shapes), fmt)
    (step,) = launches(problem, tactic)
    values = dict(step.values)
    if expected is None:
        assert "HELD" not in values
    else:
        assert (values["HELD"], values["LANES"], step.block[0], values["EARLY"], values["WHOLE"]) == expected
    check(problem, tactic, DEVICE)
    inputs, weights = random_data(problem)
    assert_written_once(problem, tactic, DEVICE, inputs, weights)


@pytest.mark.parametrize("sm", ["sm_80", "sm_90a", "sm_120"])
@pytest.mark.parametrize("held", HELD_REGISTERS)
def test_registers_are_as_counted(held, sm):
    """No more than the prediction counts with, nothing spilled, whatever else a kernel does beside."""
    values = {"KIND": 13, "VEC": 8, "MIX": 1, "C_FAST": 1, "HELD": held, "LANES": 64, "SCALED": 1, "WHOLE": 0}
    for early in (0, 1):
        for added in (0, 1):
            found = compile_kernel("reduce", values | {"EARLY": early, "ADDED": added}, sm)
            assert found.spill_bytes == 0
            if sm == "sm_90a":
                assert found.regs <= HELD_REGISTERS[held][early] or added


def test_predictions_of_long_and_many_rows():
    """100,352 rows of 96, which an H200 takes 9.0 us for."""
    fmt = Format("fp16", "chw")
    found = predicted(DEVICE, counts(layer_norm(1, 100352, 1, 96), Tactic("reduce", None, (fmt,), fmt), DEVICE))
    assert found["bound"] in ("dram", "issue") and 6 < found["total_us"] < 13
