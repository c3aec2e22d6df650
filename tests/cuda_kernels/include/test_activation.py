"""Every activation of the epilogues at every FP16 number, beside the same function in double precision."""

import math
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cuda_kernels.compile import compile_kernel
from cuda_kernels.device import named
from cuda_kernels.emulator import Memory, Options, launch, load
from cuda_kernels.launch import Emulated
from tactics.candidates import candidates
from tactics.format import Format
from tactics.problems.epilogue import Epilogue
from tactics.problems.pointwise_ops import ACTIVATIONS, Activation, Stage
from tactics.problems.problem import ConvProblem, PointwiseProblem
from tests.problems import PARAMS, execute

NUMBERS = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
ERFC = np.vectorize(math.erfc, otypes=[np.float64])
# The rows' meanings, and some as the kernels compute them, of which nothing cancels: 1 + erf(x) = erfc(-x),
# 1 + tanh(x) = 2 / (1 + exp(-2x)).
EXACT = {name: row.meaning for name, row in ACTIVATIONS.items()} | {
    "leaky_relu": lambda x, a: np.where(x >= 0, x, a * x),
    "clip": np.clip,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "hard_sigmoid": lambda x, a, b: np.clip(a * x + b, 0, 1),
    "hard_swish": lambda x: x * np.clip(x / 6 + 0.5, 0, 1),
    "tanh": np.tanh,
    "relu": lambda x: np.maximum(x, 0),
    "elu": lambda x, a: np.where(x > 0, x, a * np.expm1(np.minimum(x, 0))),
    "gelu": lambda x: 0.5 * np.maximum(x, -99) * ERFC(-x * math.sqrt(0.5)),  # the limit, 0, at -infinity
    "gelu_tanh": lambda x: np.maximum(x, -99) / (1 + np.exp(-2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "mish": lambda x: x * np.tanh(np.logaddexp(0, x)),
    "softplus": lambda x: np.logaddexp(0, x),
    "quantize": lambda x, a, b: np.clip(np.rint(x), a, b),
}


def computed(name: str, x: np.ndarray) -> np.ndarray:
    problem = PointwiseProblem(1, 8, x.size // 8, 1, (Stage(name, params=PARAMS[name]),))
    device = named("h200")
    tactic = candidates(problem, device)[0]
    return np.asarray(execute(Emulated(device), problem, tactic, (x.reshape(problem.in_shapes[0]),), {})).ravel()


@pytest.mark.parametrize("name", [name for name in ACTIVATIONS if name not in ("none", "prelu")])
def test_error_at_every_fp16_number(name):
    """FP16's unit in the last place is 2**-10 of a number's power of two, of all numbers below 2**-14 the same 2**-24."""
    x = np.where(np.isfinite(NUMBERS), NUMBERS, 0).astype(np.float32)
    with np.errstate(over="ignore"):
        exact = EXACT[name](x.astype(np.float64), *PARAMS[name])
    y = computed(name, x).astype(np.float64)
    units = np.abs(y - exact) / 2.0 ** (np.floor(np.log2(np.maximum(np.abs(exact), 2.0**-14))) - 10)
    assert units.max() <= (1.3 if name == "gelu" else 0.502), x[units.argmax()]


BOUNDED = ("clip", "hard_sigmoid", "quantize", "table")


@pytest.mark.parametrize("name", [name for name in ACTIVATIONS if name not in ("none", "prelu", *BOUNDED)])
def test_nan_stays_and_infinity_is_the_limit(name):
    y = computed(name, np.array([np.nan, np.inf, 0, 0, 0, 0, 0, 0], np.float32))
    assert np.isnan(y[0])
    assert y[1] == (1 if name in ("sigmoid", "tanh") else np.inf)


# In FP32, where the instructions for 2^x and 1 / x are as far off as the PTX ISA lets them be: a multiple of 2^-23 (1 + |x|) of
# the result, where |x| comes from rounding x log2 e, and an absolute error.
BOUNDS = {
    "sigmoid": (4, 0),
    "silu": (4, 0),
    "tanh": (4, 0),
    "elu": (48, 0),
    "gelu": (4, 3.5e-7),
    "gelu_tanh": (10, 0),
    "mish": (4, 0),
    "softplus": (4, 0),
}
BOTH = ("ex2", "rcp")
ENDS = (((), ()), (BOTH, ()), ((), BOTH), (("ex2",), ("rcp",)), (("rcp",), ("ex2",)))


def single(name: str, x: np.ndarray, low: tuple[str, ...] = (), high: tuple[str, ...] = (), pairs: bool = False) -> np.ndarray:
    """The activation of FP32 numbers, unrounded; of `pairs` of neighbours, a multiple of 256, in FP16."""
    source, blocks = str(Path(__file__).parents[2] / "faulty" / "activations.cu"), -(-x.size // (256 << pairs))
    values = {"ACT": list(ACTIVATIONS).index(name), "PAIRS": int(pairs)}
    program = load(compile_kernel(source, values, "sm_80").ptx)
    memory = Memory()
    at, out = memory.upload(x), memory.alloc(x.nbytes >> pairs)
    a, b = (*PARAMS[name], 0, 0)[:2]
    params = struct.pack("<QQiffi", at, out, x.size, a, b, 0)
    options = Options(checks=False, low_ends=low, high_ends=high)
    launch(program, (blocks, 1, 1), (256, 1, 1), 0, params, memory, options=options)
    return memory.read(out, x.nbytes >> pairs).view(np.float16 if pairs else np.float32)


def numbers() -> np.ndarray:
    """All FP16 numbers, FP32 numbers of all sizes, and many where activations bend."""
    rng = np.random.default_rng(0)
    drawn = rng.integers(0, 1 << 32, 1 << 14, dtype=np.uint32).view(np.float32)
    spread, near = rng.uniform(-130, 130, 1 << 14), rng.normal(0, 3, 1 << 14)
    return np.concatenate([NUMBERS.astype(np.float32), drawn, spread.astype(np.float32), near.astype(np.float32)])


@pytest.mark.parametrize("name", BOUNDS)
def test_error_where_approximate_instructions_are_as_wrong_as_documented(name):
    x = numbers()
    with np.errstate(all="ignore"):
        exact, wide = EXACT[name](x.astype(np.float64), *PARAMS[name]), np.abs(x.astype(np.float64))
        share, absolute = BOUNDS[name]
        # From |x| = 87 on, exp(-x) or its reciprocal is below 2^-126, which is 0: of v * sigmoid(v) that leaves |v| 2^-126.
        bound = share * 2.0**-23 * (1 + wide) * np.abs(exact) + absolute + np.maximum(wide, 1) * 2.0**-125
        results = [single(name, x, *ends) for ends in ENDS]
        for ends, y in zip(ENDS, results, strict=True):
            assert np.array_equal(np.isnan(y), np.isnan(exact)), (ends, x[np.isnan(y) != np.isnan(exact)])
            off = np.where(np.isfinite(x) & np.isfinite(exact), np.abs(y - exact) / bound, 0)
            assert off.max() <= 1, (ends, x[off.argmax()], off.max())
            half = np.isfinite(x) & np.isfinite(exact.astype(np.float16)) & (np.arange(x.size) < NUMBERS.size)
            units = np.abs(y.astype(np.float16).astype(np.float64) - exact)
            units = np.where(half, units / 2.0 ** (np.floor(np.log2(np.maximum(np.abs(exact), 2.0**-14))) - 10), 0)
            assert units.max() <= (1.3 if name == "gelu" else 0.505), (ends, x[units.argmax()], units.max())
    changed = [np.count_nonzero(y != results[0]) / x.size for y in results[1:]]
    assert min(changed) > 0.01, f"ends of ex2 and rcp that change {min(changed):.1%} of the results: are they used?"


LIMITS = {  # at -infinity and at infinity
    "sigmoid": (0, 1),
    "silu": (math.nan, math.inf),
    "tanh": (-1, 1),
    "elu": (-0.5, math.inf),
    "gelu": (0, math.inf),
    "gelu_tanh": (0, math.inf),
    "mish": (math.nan, math.inf),
    "softplus": (0, math.inf),
}


@pytest.mark.parametrize("name", LIMITS)
def test_far_out(name):
    """v * sigmoid(v) and v * tanh(softplus(v)) are NaN at -infinity in IEEE arithmetic, as in NumPy."""
    below, above = LIMITS[name]
    far = single(name, np.array([-math.inf, -3e38, -1.5e38, -100, 100, 1.5e38, 3e38, math.inf, math.nan], np.float32))
    limit = 0 if math.isnan(below) else below
    expected = [below, *[limit] * 3, *([1] * 3 if above == 1 else [100, 1.5e38, 3e38]), above, math.nan]
    np.testing.assert_allclose(far, np.array(expected, np.float32), rtol=3e-7, atol=1e-12)


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("name, most", [("gelu", 0.64), ("silu", 0.502)])
def test_pairs_that_are_rounded_next(name, most, shuffled):
    """In units of FP16, of all its numbers and more, with any neighbour, and instructions that are as wrong as documented."""
    x = numbers()
    if shuffled:
        x = x[np.random.default_rng(5).permutation(x.size)]
    with np.errstate(all="ignore"):
        exact = EXACT[name](x.astype(np.float64), *PARAMS[name])
        fits = np.isfinite(x) & np.isfinite(exact.astype(np.float16))
        for ends in ENDS:
            y = single(name, x, *ends, pairs=True).astype(np.float64)
            assert np.array_equal(np.isnan(y), np.isnan(exact)), ends
            assert np.array_equal(y[x == np.inf], [np.inf] * np.count_nonzero(x == np.inf))
            units = np.abs(y - exact) / 2.0 ** (np.floor(np.log2(np.maximum(np.abs(exact), 2.0**-14))) - 10)
            units = np.where(fits, units, 0)
            assert units.max() <= most, (ends, x[units.argmax()], units.max())


@pytest.mark.parametrize(
    "kernel, out", [("conv_dense", "fp16"), ("conv_grouped", "fp16"), ("conv_dense", "fp32"), ("conv_fp32", "fp32")]
)
def test_gelu_of_a_convolution_is_as_exact_as_its_output(kernel, out):
    """Of each finite FP16 number, by weights that leave it as it is: FP32 outputs have the long form."""
    problem, device = ConvProblem(1, 16, 64, 64, 16, 1, 1, epilogue=Epilogue(act=Activation("gelu"))), named("a100")
    found = candidates(problem, device, ("fp16", "fp32") if kernel == "conv_fp32" else ())
    tactic = next(t for t in found if t.kernel == kernel and t.out.layout == "chw")
    tactic = replace(tactic, out=Format(out, "chw"))
    x = np.where(np.isfinite(NUMBERS), NUMBERS, 0).astype(np.float32)
    w = np.eye(16, dtype=np.float32).reshape(16, 16, 1, 1)
    y = np.asarray(execute(Emulated(device), problem, tactic, (x.reshape(problem.in_shapes[0]),), {"w": w}), np.float64).ravel()
    exact = EXACT["gelu"](x.astype(np.float64))
    if out == "fp32":
        np.testing.assert_allclose(y, exact, rtol=1e-6, atol=3.5e-7)
    else:
        units = np.abs(y - exact) / 2.0 ** (np.floor(np.log2(np.maximum(np.abs(exact), 2.0**-14))) - 10)
        assert units.max() <= 0.64, x[units.argmax()]
