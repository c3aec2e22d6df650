"""Kernels on FP32 tensors: any mix of FP16 and FP32 sides against the FP32 reference, with values that FP16 cannot hold."""

import random
from itertools import product
from typing import get_args

import numpy as np
import pytest

from cuda_kernels.device import ARCHITECTURES, named
from cuda_kernels.launch import Emulated
from tactics import fp32
from tactics.candidates import candidates, rejected
from tactics.kernels import OF_FP32
from tactics.launches import launches
from tactics.predict import predict, predict_us
from tactics.problems.epilogue import MaxPool
from tactics.problems.problem import AnyProblem, ConcatProblem, ConvProblem
from tactics.sampling.data import random_data, reference
from tactics.step import linear
from tactics.tactic import Tactic
from tests.compiled import takes
from tests.problems import ACTS, OTHERS, assert_right, assert_written_once, conv_case, execute, transposed_case

DEVICE = named("h200")
TYPES = ("fp16", "fp32")
LARGE = 2.0**17  # the factor of FP32 inputs


def types_of(problem):
    """Every mix of types of inputs and output in which something is FP32."""
    return [t for t in product(TYPES, repeat=len(problem.in_shapes) + 1) if "fp32" in t]


def tactics_of(problem, dtypes):
    """Those in which every tensor has its type."""
    return [t for t in candidates(problem, DEVICE, dtypes) if tuple(f.dtype for f in (*t.ins, t.out)) == tuple(dtypes)]


def check(problem, tactic, dtypes, scale=LARGE):
    """FP32 inputs are large; where the output is FP16, weights bring it back."""
    inputs, weights = random_data(problem)
    inputs = [x * np.float32(scale) if t == "fp32" else x for x, t in zip(inputs, dtypes, strict=False)]
    if dtypes[-1] == "fp16" and "w" in weights:
        weights = {n: a / np.float32(scale) if n == "w" else a for n, a in weights.items()}
        inputs[1:] = [x if t == "fp16" else x / np.float32(scale) for x, t in zip(inputs[1:], dtypes[1:], strict=False)]
    expected = reference(problem, [np.float32(x) for x in inputs], weights)
    if problem.c > 4 and dtypes[0] == dtypes[-1] == "fp32":  # fewer channels of one sign may all end in a Relu
        assert np.abs(expected).max() > 65504
    assert_right(problem, tactic, execute(Emulated(DEVICE), problem, tactic, inputs, weights), expected)


def drawn_convolution(rng: random.Random) -> ConvProblem:
    few = [(1, 5, 9), (1, 16, 3), (3, 6, 12), (2, 8, 34), (7, 7, 7), (1, 1, 1), (4, 4, 8)]
    groups, c, k = rng.choice([*few, (1, 37, 9), (2, 80, 34), (1, 150, 3), (2, 66, 2), (1, 515, 12)])  # shared by threads
    r, s, h, w = rng.choice((1, 2, 3)), rng.choice((1, 3, 4)), rng.randint(4, 9), rng.randint(4, 9)
    dilation = tuple(rng.choice((1, 1, 2)) if d > 1 else 1 for d in (r, s))
    pad = tuple(rng.randint(0, 2) for _ in range(4))
    pad = (pad[0] + (r - 1) * dilation[0] // 2, pad[1] + (s - 1) * dilation[1] // 2, pad[2] + r, pad[3] + s)
    residual = rng.random() < 0.5
    stride, bias, after = (rng.randint(1, 2), rng.randint(1, 3)), rng.random() < 0.7, residual and rng.random() < 0.5
    return conv_case(
        rng.randint(1, 3),
        c,
        h,
        w,
        k,
        r,
        s,
        stride,
        pad,
        dilation,
        groups,
        bias=bias,
        residual=residual,
        act=rng.choice(ACTS[:4]),
        act_first=after,
    )


@pytest.mark.parametrize("seed", [*range(12), *(pytest.param(i, marks=pytest.mark.long) for i in range(12, 412))])
def test_drawn_convolution(seed):
    rng = random.Random(seed)
    problem = drawn_convolution(rng)
    dtypes = rng.choice([t for t in types_of(problem) if t[0] == "fp32"])
    check(problem, rng.choice(tactics_of(problem, dtypes)), dtypes)


@pytest.mark.parametrize("dtypes", types_of(conv_case(1, 1, 1, 1, 1, 1, 1, residual=True)), ids="-".join)
def test_every_mix_of_types(dtypes):
    problem = conv_case(2, 24, 7, 6, 20, 3, 3, pad=(1, 0, 2, 1), bias=True, residual=True, act=ACTS[1])
    tactics = tactics_of(problem, dtypes)
    assert {linear(t.out) for t in tactics} == ({True} if dtypes[-1] == "fp32" else {True, False})
    tactic = max(tactics, key=lambda t: [not linear(f) for f in (*t.ins, t.out)])  # vectors wherever there may be
    inputs, weights = random_data(problem)
    expected = reference(problem, [np.float32(x) for x in inputs], weights)
    assert_right(problem, tactic, execute(Emulated(DEVICE), problem, tactic, inputs, weights), expected)


@pytest.mark.parametrize("k,groups", [(20, 1), (20, 4), (20, 20), (20, 2)])
def test_every_byte_is_written_once(k, groups):
    problem = ConvProblem(1, 20, 5, 5, k, 3, 3, pad=(1, 1, 1, 1), groups=groups)
    tactic = next(t for t in candidates(problem, DEVICE, ("fp32", "fp16")) if t.out.layout == "chw32")
    inputs, weights = random_data(problem)
    assert_written_once(problem, tactic, DEVICE, inputs, weights)


def test_transposed_convolution():
    problem = transposed_case(2, 6, 5, 4, 10, 3, 4, (11, 8), (2, 2), (0, 1), groups=2, bias=True, act=ACTS[1])
    for dtypes in types_of(problem):
        check(problem, tactics_of(problem, dtypes)[-1], dtypes, LARGE if dtypes[0] == "fp32" else 1)


# fmt: off
FEW = (
    "pool_max_dilated", "pool_avg_count_pad", "pool_global_max", "pointwise_add", "pointwise_from_nc", "pointwise_by_hw",
    "pointwise_constant_ncw", "pointwise_chain", "instance_norm", "group_norm_small", "layer_norm", "softmax", "reduce_mean",
    "reduce_over_ch", "reduce_to_one", "move_slice", "move_d2s_crd", "concat_odd", "concat_rows", "gather_pad",
    "gather_reverse_all", "matmul", "matmul_both_turned",
)
# fmt: on
MANY = [n for n, p in OTHERS.items() if not fp32.reason(p) and n not in FEW]


def check_types(name):
    """Both types on each side: the values of the FP16 problem, and for FP32 on all sides large ones too."""
    problem = OTHERS[name]
    inputs, weights = random_data(problem)
    rng = random.Random(name)
    count = len(problem.in_shapes)
    mixed = rng.choice([t for t in types_of(problem) if len(set(t)) > 1])
    for dtypes in (("fp32",) * (count + 1), mixed):
        (tactic,) = tactics_of(problem, dtypes)
        got = execute(Emulated(DEVICE), problem, tactic, inputs, weights)
        assert_right(problem, tactic, got, reference(problem, inputs, weights))


@pytest.mark.parametrize("name", FEW)
def test_other_kernels(name):
    check_types(name)


@pytest.mark.sample(30)
@pytest.mark.slow
@pytest.mark.parametrize("name", MANY)
def test_all_other_kernels(name):
    check_types(name)


@pytest.mark.parametrize("name", ["pool_avg", "pointwise_mul", "softmax", "instance_norm", "concat_odd", "matmul"])
def test_values_beyond_fp16(name):
    problem = OTHERS[name]
    inputs, weights = random_data(problem)
    inputs = [np.float32(x) * np.float32(3e5) for x in inputs]
    (tactic,) = candidates(problem, DEVICE, ("fp32",) * (len(inputs) + 1))
    got = execute(Emulated(DEVICE), problem, tactic, inputs, weights)
    assert_right(problem, tactic, got, reference(problem, inputs, weights))


@pytest.mark.parametrize("kernel", ["conv", "pool_avg", "pointwise_mul", "softmax", "move_pad", "concat_odd"])
def test_launches_tell_of_infinity(kernel):
    """`execute` compares what a launch says with what it stored."""
    problem = OTHERS.get(kernel) or ConvProblem(1, 3, 5, 5, 4, 3, 3)
    inputs, weights = random_data(problem)
    inputs = [np.float32(x) for x in inputs]
    inputs[0].reshape(-1)[-1] = np.inf
    (tactic, *_) = candidates(problem, DEVICE, ("fp32",) * (len(inputs) + 1))
    assert not np.isfinite(execute(Emulated(DEVICE), problem, tactic, inputs, weights)).all()


@pytest.mark.parametrize("mode", ["dcr", "crd"])
def test_depth_to_space_in_the_stores(mode):
    problem = conv_case(2, 5, 4, 5, 36, 3, 3, pad=(1, 1, 1, 1), bias=True, residual=True, act=ACTS[1], d2s=3, d2s_mode=mode)
    check(problem, candidates(problem, DEVICE, ("fp32", "fp32", "fp32"))[0], ("fp32", "fp32", "fp32"))
    tactic = next(t for t in candidates(problem, DEVICE, ("fp32", "fp32", "fp16")) if t.out.layout == "hwc16")
    check(problem, tactic, ("fp32", "fp32", "fp16"))
    inputs, weights = random_data(problem)
    assert_written_once(problem, tactic, DEVICE, inputs, weights)


def test_names_and_reasons():
    problem = ConvProblem(1, 16, 8, 8, 16, 3, 3)
    tactics = candidates(problem, DEVICE, ("fp32", "fp16"))
    assert [str(t.out) for t in tactics] == ["fp16:chw", "fp16:hwc8", "fp16:hwc16", "fp16:chw32", "fp32:chw"]
    assert all(Tactic.parse(t.name) == t and not t.sparse and str(t.ins[0]) == "fp32:chw" for t in tactics)
    assert not any(t.kernel == "conv_fp32" for t in candidates(problem, DEVICE))
    pooled = conv_case(1, 3, 8, 8, 16, 3, 3, pool=MaxPool((2, 2), (2, 2), (0, 0), (3, 3)))
    assert not candidates(pooled, DEVICE, ("fp32", "fp16"))
    assert "no max pool in its stores in FP32" in [str(why) for _, why in rejected(pooled, DEVICE, ("fp32", "fp16"))]


def test_many_inputs_have_few_tactics():
    joined = ConcatProblem((3,) * 40, (1, 4, 4))
    (tactic,) = candidates(joined, DEVICE, ("fp16",) * 20 + ("fp32",) * 21)
    assert [f.dtype for f in tactic.ins] == ["fp16"] * 20 + ["fp32"] * 20


def test_every_kind_of_problem_has_a_kernel():
    """But those that are options of a plan only, that launch nothing, or that take both types anyway."""
    options = {"AttentionProblem", "BackToBackProblem", "ChainedProblem", "ScaledConvProblem", "SqueezeExciteProblem"}
    others = options | {"ViewProblem", "ReformatProblem", "LibraryProblem"}
    assert {c.__name__ for c in get_args(AnyProblem)} == others | {c.__name__ for c in OF_FP32}


def test_predicted_times_follow_the_cuda_cores():
    """67 TFLOP/s of FP32 on an H200, 19.5 on an A100: a large layer takes somewhat longer than its products there, a tiny one
    a launch; on tensor cores it would take a tenth or less."""
    large = ConvProblem(8, 256, 56, 56, 256, 3, 3, pad=(1, 1, 1, 1))
    for name, tflops in (("h200", 61.8), ("a100", 19.5)):
        device = named(name)
        (tactic, *_) = candidates(large, device, ("fp32", "fp32"))
        found = predict(large, tactic, device)
        assert 1 < found["total_us"] / (2 * large.macs / tflops / 1e6) < 2 and found["bound"] in ("alu", "issue")
        dense = min(predict_us(large, t, device) for t in candidates(large, device))
        assert found["total_us"] > 5 * dense
    tiny = ConvProblem(1, 8, 4, 4, 8, 1, 1)
    (tactic,) = candidates(tiny, DEVICE, ("fp32", "fp32"))
    assert DEVICE.launch_us < predict_us(tiny, tactic, DEVICE) < 4 * DEVICE.launch_us


@pytest.mark.parametrize("c, k, size, split", [(37, 9, 3, 8), (512, 512, 7, 32), (1024, 1000, 1, 128), (256, 256, 56, 1)])
def test_threads_share_a_pixel_where_pixels_are_few(c, k, size, split):
    """Each has 4 input channels at least. One thread of a pixel was predicted to take 85 us for a classifier's last layer."""
    problem = ConvProblem(1, c, size, size, k, 1, 1)
    (tactic, *_) = candidates(problem, DEVICE, ("fp32", "fp32"))
    (launch,) = launches(problem, tactic)
    assert dict(launch.values)["SPLIT"] == split and predict_us(problem, tactic, DEVICE) < 25


@pytest.mark.slow
@pytest.mark.parametrize("sm", ARCHITECTURES)
@pytest.mark.parametrize("k,n,c", [(64, 64, 8), (64, 1, 8), (4, 64, 8), (1, 64, 8), (8, 1, 32), (8, 1, 128), (1, 1, 512)])
def test_compiles_without_spills(k, n, c, sm):
    size = 64 if c == 8 else 12
    problem = conv_case(n, c, size, size, k, 3, 3, residual=True, act=ACTS[3])
    tactic = candidates(problem, DEVICE, ("fp32", "fp32", "fp32"))[0]
    (launch,) = launches(problem, tactic)
    assert (dict(launch.values)["SPLIT"] > 1) == (c > 8)
    takes(launch.kernel, launch.values, sm)
