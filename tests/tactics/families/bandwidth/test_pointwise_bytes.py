"""Chains between tensors of bytes, and between them and FP16 and FP32: QuantizeLinear, DequantizeLinear, and both with more."""

from itertools import product

import numpy as np
import pytest

from cuda_kernels.compile import compile_kernel
from cuda_kernels.device import named
from cuda_kernels.launch import Emulated
from tactics.families.bandwidth.pointwise import byte_candidates, counts
from tactics.format import DTYPES, Format, num_bytes
from tactics.launches import launches
from tactics.problems.pointwise_ops import Stage, stage_of
from tactics.problems.problem import PointwiseProblem
from tactics.roofline import predicted
from tactics.sampling.data import random_data, reference
from tactics.sampling.trial import execute
from tactics.tactic import tactic_of
from tests.compiled import fits
from tests.problems import assert_written_once, check, table_of

DEVICE = named("h200")
SHAPES = ((1, 3, 9, 7), (2, 40, 3, 5), (3, 64, 1, 1), (2, 17, 4, 4), (1, 96, 2, 3))
QUANTIZE = {"int8": Stage("quantize", params=(-128.0, 127.0)), "uint8": Stage("quantize", params=(0.0, 255.0))}


def rounded(dtype: str, v: np.ndarray) -> np.ndarray:
    info = np.iinfo(DTYPES[dtype])
    return np.clip(np.rint(v), info.min, info.max)


def run(problem, tactic, inputs, weights=None) -> np.ndarray:
    """The output without its padded channels, which are zero, after a check that each byte is stored once."""
    assert_written_once(problem, tactic, DEVICE, inputs, weights or {})
    got = execute(Emulated(DEVICE), problem, tactic, inputs, weights or {})
    assert not got[:, problem.c :].any()
    return got[:, : problem.c]


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_quantize_is_exact_from_every_format(dtype):
    """A scale of 1/8 is exact in FP32, so that NumPy rounds the same numbers: many halves, and numbers beyond both ends."""
    for shape in SHAPES:
        problem = PointwiseProblem(*shape, (Stage("mul", params=(8.0,)), QUANTIZE[dtype]))
        tactics = list(byte_candidates(problem, ("fp16", dtype)))
        few = [str(t.ins[0]) for t in tactics if t.ins[0].layout == "chw"]
        assert few == (["fp32:chw", "fp16:chw"] * 2 if shape[1] <= 32 else [])
        x = np.random.default_rng(0).integers(-40 * 16, 40 * 16, shape).astype(np.float16) / 16
        for tactic in tactics:
            assert tactic.out.dtype == dtype
            assert np.array_equal(run(problem, tactic, [x]), rounded(dtype, 8 * x.astype(np.float64))), tactic.name


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_a_table_saturates_and_is_exact_in_every_format(dtype):
    """Between bytes, and to and from FP16; numbers beyond the table, halves, and a product and a sum before it."""
    ends = np.iinfo(DTYPES[dtype])
    table = stage_of(table_of(-100, 90, (ends.min, ends.max)))
    entries = np.array(table[0].params[2:])
    for shape in SHAPES:
        x = np.random.default_rng(0).integers(*((-300, 300) if dtype == "int8" else (0, 256)), shape).astype(np.float16)
        chain = PointwiseProblem(*shape, (Stage("mul", params=(0.5,)), Stage("add", "t1"), *table), ("nchw", "nchw"))
        for problem, v in ((PointwiseProblem(*shape, table), x), (chain, 1.5 * x)):
            ins = [x] * len(problem.tensors)
            expected = entries[(np.clip(np.rint(v), -100, 90) + 100).astype(int)]
            for tactic in byte_candidates(problem, (*("fp16" if dtype == "int8" else dtype for _ in ins), dtype)):
                assert np.array_equal(run(problem, tactic, ins), expected), tactic.name


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_dequantize_is_exact(dtype):
    """One product in FP32, rounded once to FP16; a scale per channel is a constant."""
    scale = np.float32(0.0371)
    for shape in SHAPES:
        _, c, _, _ = shape
        x = np.resize(np.arange(np.iinfo(DTYPES[dtype]).min, 256), shape).astype(np.float16)
        x = np.clip(x, np.iinfo(DTYPES[dtype]).min, np.iinfo(DTYPES[dtype]).max)
        one, each = (
            PointwiseProblem(*shape, (Stage("mul", params=(scale,)),)),
            PointwiseProblem(*shape, (Stage("mul", "c0"),), constants=("c",)),
        )
        scales = np.random.default_rng(1).uniform(0.01, 0.1, (1, c, 1, 1)).astype(np.float32)
        for problem, by, weights in ((one, scale, {}), (each, scales, {"c0": scales})):
            tactics = list(byte_candidates(problem, (dtype, "fp16")))
            assert {str(t.out) for t in tactics} == {"fp16:hwc8", "fp16:chw32"}
            for tactic in tactics:
                expected = (x.astype(np.float32) * by).astype(np.float16)
                assert np.array_equal(run(problem, tactic, [x], weights), expected), tactic.name


SUM = (Stage("mul", params=(0.25,)), Stage("add", "t1"), Stage("relu"), Stage("mul", params=(0.5,)))


@pytest.mark.parametrize(
    "dtypes", [("int8", "int8", "int8"), ("int8", "fp16", "int8"), ("uint8", "int8", "uint8"), ("fp16", "uint8", "int8")]
)
def test_sum_of_two(dtypes):
    """DequantizeLinear, Add, Relu and QuantizeLinear in one launch. Powers of two keep all of it exact."""
    *ins, out = dtypes
    for shape in SHAPES:
        problem = PointwiseProblem(*shape, (*SUM, QUANTIZE[out]), ("nchw", "nchw"))
        tactics = list(byte_candidates(problem, dtypes))
        of_bytes = sum(d != "fp16" for d in dtypes)
        assert len({t.name for t in tactics}) == len(tactics) == 2 * (2**of_bytes - 1)
        for tactic in tactics:
            x, y = random_data(problem, formats=[Format(d, "hwc16") for d in ins])[0]
            y = np.round(y * 4) / 4
            v = np.maximum(x.astype(np.float64) / 4 + y, 0) / 2
            got = run(problem, tactic, [x.astype(np.float16), y.astype(np.float16)])
            assert np.array_equal(got, rounded(out, v)), tactic.name


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_broadcast_tensors(dtype):
    """A gate per image and channel may be bytes too; one per pixel stays FP16."""
    for spans in (("nchw", "nc"), ("nchw", "nhw"), ("nc", "nchw"), ("nchw", "chw")):
        problem = PointwiseProblem(2, 40, 3, 5, (Stage("mul", "t1"), QUANTIZE[dtype]), spans)
        dtypes = (dtype, dtype, dtype)
        tactics = list(byte_candidates(problem, dtypes))
        assert all(t.ins[i].dtype == "fp16" for t in tactics for i, axes in enumerate(spans) if "c" not in axes)
        assert any(t.ins[i].dtype == dtype for t in tactics for i, axes in enumerate(spans) if "c" in axes)
        for tactic in tactics:
            inputs, _ = random_data(problem, formats=tactic.ins)
            expected = reference(problem, [x.astype(np.float32) for x in inputs], {})
            assert np.array_equal(run(problem, tactic, inputs), expected), tactic.name


def test_padding_stays_zero_whatever_the_chain_makes_of_zero():
    problem = PointwiseProblem(1, 5, 4, 4, (Stage("add", params=(3.0,)), QUANTIZE["int8"]))
    x = np.zeros((1, 5, 4, 4), np.float16)
    for tactic in byte_candidates(problem, ("int8", "int8")):
        assert (run(problem, tactic, [x]) == 3).all()


def test_nothing_of_bytes_for_fp16_tensors():
    problem = PointwiseProblem(1, 40, 4, 4, SUM, ("nchw", "nchw"))
    assert not list(byte_candidates(problem, ("fp16", "fp16", "fp16"))) and not list(
        byte_candidates(problem, ("fp32", "fp16", "fp32"))
    )


def test_a_byte_costs_half_of_a_half():
    problem = PointwiseProblem(32, 256, 56, 56, (Stage("relu"),))
    halves, bytes_ = (tactic_of("pointwise", None, (f,), f) for f in (Format("fp16", "hwc8"), Format("int8", "hwc16")))
    assert bytes_ in byte_candidates(problem, ("int8", "int8"))
    a, b = counts(problem, halves, DEVICE), counts(problem, bytes_, DEVICE)
    assert (a.read, a.written) == (2 * b.read, 2 * b.written)
    assert predicted(DEVICE, b)["total_us"] < 0.6 * predicted(DEVICE, a)["total_us"]


def test_kernel_values_of_fp16_tensors_are_as_they_were():
    for layouts, spans in product((("hwc8", "hwc8"), ("chw", "chw"), ("chw32", "hwc8")), (("nchw",), ("nchw", "nc"))):
        problem = PointwiseProblem(1, 40, 4, 4, (Stage("add", "t1"),) if spans[1:] else (Stage("relu"),), spans)
        ins = [Format("fp16", layouts[0]), Format("fp16", layouts[1])][: len(spans)]
        (step,) = launches(problem, tactic_of("pointwise", None, tuple(ins), Format("fp16", layouts[0])))
        assert {name for name, _ in step.values} == {"VEC", "ROWS", "OPS", "OPERANDS", "SOURCES"}


LAUNCHED = {
    "an image": (PointwiseProblem(1, 3, 32, 32, (Stage("mul", params=(8.0,)), QUANTIZE["int8"])), ("fp32:chw", "int8:hwc16")),
    "Q": (PointwiseProblem(1, 64, 8, 8, (Stage("mul", params=(8.0,)), QUANTIZE["uint8"])), ("fp16:hwc8", "uint8:hwc16")),
    "DQ": (PointwiseProblem(1, 64, 8, 8, (Stage("mul", "c0"),), constants=("c",)), ("int8:chw32", "fp16:chw32")),
    "sum": (
        PointwiseProblem(1, 64, 8, 8, (*SUM, QUANTIZE["int8"]), ("nchw", "nchw")),
        ("int8:hwc16", "uint8:hwc16", "int8:hwc16"),
    ),
}


def launched(name: str):
    problem, (*ins, out) = LAUNCHED[name]
    return problem, tactic_of("pointwise", None, tuple(map(Format.parse, ins)), Format.parse(out))


@pytest.mark.parametrize("name", LAUNCHED)
def test_each_sector_is_touched_once(name):
    problem, tactic = launched(name)
    least = sum(num_bytes(f, s) for f, s in zip((*tactic.ins, tactic.out), problem.all_shapes, strict=True))
    least += 64 * 4 * 16 * len(problem.constants)  # in each warp, of four pixels
    assert check(problem, tactic, DEVICE)[1].sectors * 32 <= 1.02 * least


@pytest.mark.parametrize("sm", ["sm_80", "sm_90a", "sm_120"])
@pytest.mark.parametrize("name", LAUNCHED)
def test_chains_of_bytes_compile_without_spills(name, sm):
    (step,) = launches(*launched(name))
    fits(compile_kernel(step.kernel, dict(step.values), sm))
