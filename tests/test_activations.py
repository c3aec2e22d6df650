"""Every activation of the epilogues at every FP16 number, beside the same function in double precision."""

import math

import numpy as np
import pytest

from cuda_kernels.device import named
from tactics.candidates import candidates
from tactics.measure.worker import Emulated
from tactics.problems.pointwise_ops import ACTIVATIONS, Stage
from tactics.problems.problem import PointwiseProblem
from tests.problems import PARAMS, execute

NUMBERS = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
ERFC = np.vectorize(math.erfc, otypes=[np.float64])
# As the kernels compute them, of which nothing cancels: 1 + erf(x) = erfc(-x), 1 + tanh(x) = 2 / (1 + exp(-2x)).
EXACT = {
    "leaky_relu": lambda x, a: np.where(x >= 0, x, a * x),
    "clip": np.clip,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "hard_sigmoid": lambda x, a, b: np.clip(a * x + b, 0, 1),
    "hard_swish": lambda x: x * np.clip(x / 6 + 0.5, 0, 1),
    "tanh": np.tanh,
    "relu": lambda x: np.maximum(x, 0),
    "elu": lambda x, a: np.where(x > 0, x, a * np.expm1(np.minimum(x, 0))),
    "gelu": lambda x: 0.5 * x * ERFC(-x * math.sqrt(0.5)),
    "gelu_tanh": lambda x: x / (1 + np.exp(-2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "mish": lambda x: x * np.tanh(np.logaddexp(0, x)),
    "softplus": lambda x: np.logaddexp(0, x),
}


def computed(name: str, x: np.ndarray) -> np.ndarray:
    problem = PointwiseProblem(1, 8, x.size // 8, 1, (Stage(name, params=PARAMS.get(name, ())),))
    device = named("h200")
    tactic = candidates(problem, device)[0]
    return np.asarray(execute(Emulated(device), problem, tactic, (x.reshape(problem.in_shapes[0]),), {})).ravel()


@pytest.mark.parametrize("name", [name for name in ACTIVATIONS if name not in ("none", "prelu")])
def test_error_at_every_fp16_number(name):
    """FP16's unit in the last place is 2**-10 of a number's power of two, of all numbers below 2**-14 the same 2**-24."""
    x = np.where(np.isfinite(NUMBERS), NUMBERS, 0).astype(np.float32)
    with np.errstate(over="ignore"):
        exact = EXACT[name](x.astype(np.float64), *PARAMS.get(name, ()))
    y = computed(name, x).astype(np.float64)
    units = np.abs(y - exact) / 2.0 ** (np.floor(np.log2(np.maximum(np.abs(exact), 2.0**-14))) - 10)
    assert units.max() <= (1.3 if name == "gelu" else 0.7 if name == "elu" else 0.502), x[units.argmax()]


@pytest.mark.parametrize("name", [name for name in ACTIVATIONS if name not in ("none", "prelu", "clip", "hard_sigmoid")])
def test_nan_stays_and_infinity_is_the_limit(name):
    y = computed(name, np.array([np.nan, np.inf, 0, 0, 0, 0, 0, 0], np.float32))
    assert np.isnan(y[0])
    assert y[1] == (1 if name in ("sigmoid", "tanh") else np.inf)
