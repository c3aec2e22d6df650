"""What rows of zeros become."""

import numpy as np
import pytest

from gpu_runtime.rewrites.drafts import of_zeros
from tactics.problems.convolution import ConvProblem
from tactics.problems.epilogue import Epilogue
from tactics.problems.pointwise_ops import Activation

SILU, BOUNDS = Activation("silu"), Activation("quantize", (-128.0, 127.0))
HALF = Activation("hard_sigmoid", (0.2, 0.5))


def of(**epilogue) -> ConvProblem:
    return ConvProblem(1, 8, 4, 4, 16, 1, 1, epilogue=Epilogue(bias=True, **epilogue))


@pytest.mark.parametrize("affine", [False, True])
def test_rows_of_zeros_give_what_their_activations_make_of_zero(affine):
    assert of_zeros(of(act=SILU, affine=affine, last=BOUNDS)).tolist() == [[[[0.0]]]]
    assert of_zeros(of(act=SILU, affine=affine, last=HALF)).tolist() == [[[[0.5]]]]


@pytest.mark.parametrize("affine", [False, True])
def test_rows_of_zeros_add_the_residual(affine):
    p = of(residual=True, act_first=True, affine=affine, last=BOUNDS)
    assert of_zeros(p, np.array([0.6, -3.0, 200.0])).reshape(-1).tolist() == [1.0, -3.0, 127.0]
