"""Tables as the first or last activation in every kernel of convolutions, bit for bit, on sums that are exact."""

import random

import numpy as np
import pytest

from cuda_kernels import sparse24
from cuda_kernels.device import named
from cuda_kernels.launch import Emulated
from tactics.candidates import candidates
from tactics.problems.pointwise_ops import Activation
from tactics.sampling.data import random_data, reference
from tests.problems import conv_case, execute, table_of, transposed_case

TABLE = table_of(-128, 127)
ENDS = {"first": {"act": TABLE}, "last": {"act": Activation("relu"), "last": TABLE}}


def problems(end: dict) -> dict:
    around = {"pad": (1,) * 4, "bias": True, **end}
    return {
        "dense": conv_case(2, 64, 9, 7, 72, 3, 3, residual=True, sparse24=True, **around),
        "groups": conv_case(1, 128, 6, 5, 128, 3, 3, groups=2, sparse24=True, **around),
        "small groups": conv_case(1, 48, 9, 9, 48, 3, 3, groups=6, residual=True, **around),
        "depthwise": conv_case(1, 40, 9, 9, 40, 3, 3, groups=40, **around),
        "stem": conv_case(1, 3, 23, 21, 33, 7, 7, stride=(2, 2), **around),
        "transposed": transposed_case(1, 16, 5, 4, 24, 4, 4, (10, 8), (2, 2), (1, 1), bias=True, **end),
    }


@pytest.mark.parametrize("device", ["a100", "h200"])
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("name", problems({}))
def test_every_kernel_equals_whole_numbers(name, end, device):
    p, rng, pick = problems(ENDS[end])[name], np.random.default_rng(0), random.Random(name + end)
    w = rng.integers(-4, 5, random_data(p)[1]["w"].shape).astype(np.float32)
    weights = {"w": sparse24.prune(w) if p.sparse24 else w, "b": rng.integers(-64, 64, p.k).astype(np.float32) / 2}
    xs = [rng.integers(0, 9, shape).astype(np.float16) for shape in p.in_shapes]
    expected, found = reference(p, xs, weights), candidates(p, named(device))
    for kernel in dict.fromkeys(t.kernel for t in found):
        tactic = pick.choice([t for t in found if t.kernel == kernel])
        got = np.asarray(execute(Emulated(named(device)), p, tactic, xs, weights))
        assert np.array_equal(got[:, : p.out_shape[1]], expected), tactic.name
