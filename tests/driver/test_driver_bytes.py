"""Tactics with tensors of bytes, verified and timed on a GPU or on the emulated driver."""

import pytest

from cuda_kernels.device import current, why_no_gpu
from tactics.families.bandwidth.pointwise import byte_candidates
from tactics.format import Format
from tactics.measure import worker
from tactics.problems.pointwise_ops import Stage
from tactics.problems.problem import PointwiseProblem
from tactics.sampling import trial
from tactics.sampling.data import fits
from tactics.tactic import Tactic
from tests.on_driver import timed

WHY = why_no_gpu()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(WHY), reason=WHY), timed]
HWC8 = Format("fp16", "hwc8")


def test_tensors_of_bytes_get_numbers_that_they_hold():
    """In one request with FP16 tensors, and after one without bytes."""
    chain = (Stage("mul", params=(0.25,)), Stage("add", "t1"), Stage("quantize", params=(-128.0, 127.0)))
    problem = PointwiseProblem(1, 40, 6, 5, chain, ("nchw", "nchw"))
    tactics = list(byte_candidates(problem, ("int8", "fp16", "int8")))[:3]
    assert {t.ins[0].dtype for t in tactics} == {"fp16", "int8"}
    bench = worker.Bench(current())
    bench.set_problem(problem)
    for some in ([Tactic("pointwise", None, (HWC8, HWC8), HWC8)], tactics):
        assert max(bench.time(some, 1)["rel_error"].values()) < trial.TOLERANCE
    assert all(map(fits, bench.inputs, tactics[1].ins))
