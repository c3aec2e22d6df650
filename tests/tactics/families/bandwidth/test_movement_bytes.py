"""Whole numbers of 8 bits between the formats of a tensor: values stay, none wraps, padded channels are zero."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from cuda_kernels.compile import compile_kernel
from cuda_kernels.device import named
from cuda_kernels.launch import Emulated
from tactics.candidates import accepts, candidates
from tactics.families.bandwidth.movement import byte_candidates, counts
from tactics.format import DTYPES, Format, num_bytes, wording
from tactics.launches import launches
from tactics.problems.problem import ConcatProblem, MoveProblem, PoolProblem, ReformatProblem
from tactics.roofline import predicted
from tactics.sampling.data import random_data, reference
from tactics.sampling.trial import execute
from tactics.tactic import tactic_of
from tests.compiled import fits
from tests.problems import assert_written_once, check

DEVICE = named("h200")
FLOATS = ("fp16:chw", "fp16:hwc8", "fp16:hwc16", "fp16:chw32", "fp32:chw", "fp32:hwc")
PAIRS = {
    f"{src} {dst}": (src, dst)
    for dtype in ("int8", "uint8")
    for src, dst in itertools.permutations((*FLOATS, f"{dtype}:hwc16", f"{dtype}:chw32"), 2)
    if not {src, dst} <= {*FLOATS}
}
SHAPES = ((1, 3, 5, 7), (2, 16, 4, 3), (1, 40, 3, 5), (3, 64, 1, 1), (4, 9, 1, 1), (2, 97, 2, 9), (1, 128, 6, 6))


def every_number(dtype: str, shape) -> np.ndarray:
    """All numbers of the type in turn, from its least one on."""
    info = np.iinfo(DTYPES[dtype])
    return np.resize(np.arange(info.min, info.max + 1), shape).astype(np.float32)


def run(problem, x: np.ndarray) -> np.ndarray:
    """The output with its padded channels, after checks that each of its bytes is stored once."""
    (tactic,) = candidates(problem, DEVICE)
    assert accepts(problem, tactic, DEVICE)
    assert_written_once(problem, tactic, DEVICE, [x], {})
    return execute(Emulated(DEVICE), problem, tactic, [x], {})


def of_bytes(pair: str) -> str:
    return next(dtype for dtype in ("uint8", "int8") if dtype in pair)


@pytest.mark.parametrize("pair", PAIRS)
def test_values_are_the_same_in_every_format(pair):
    for shape in SHAPES:
        x = every_number(of_bytes(pair), shape)
        got = run(ReformatProblem(*shape, *PAIRS[pair]), x)
        assert np.array_equal(got[:, : shape[1]].astype(np.float32), x) and not got[:, shape[1] :].any()


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
@pytest.mark.parametrize("src", ["fp16:chw", "fp16:hwc8", "fp32:chw", "fp32:hwc"])
@pytest.mark.parametrize("layout", ["hwc16", "chw32"])
def test_numbers_are_rounded_and_saturated(dtype, src, layout):
    halves = np.arange(-300, 300, 0.25)
    others = [-65504, 65504, 32768, 1e-6, -1e-6, 127.5, -128.5, 255.5, 0.5, 1.5, -0.5, 2.5]
    x = np.resize(np.concatenate([halves, others]), (1, 40, 6, 11)).astype(np.float32)
    got = run(ReformatProblem(*x.shape, src, f"{dtype}:{layout}"), x)
    info = np.iinfo(DTYPES[dtype])
    stored = x.astype(DTYPES[src[:4]]).astype(np.float64)
    assert np.array_equal(got[:, :40], np.clip(np.rint(stored), info.min, info.max)) and not got[:, 40:].any()


def test_signed_to_unsigned_saturates():
    x = every_number("int8", (1, 48, 4, 4))
    got = run(ReformatProblem(*x.shape, "int8:hwc16", "uint8:chw32"), x)
    assert np.array_equal(got[:, :48], np.maximum(x, 0))


POOLS = {
    "3x3": PoolProblem(2, 40, 11, 9, "max", 3, 3, (6, 5), stride=(2, 2), pad=(1, 1, 1, 1)),
    "2x2": PoolProblem(1, 16, 6, 8, "max", 2, 2, (3, 4), stride=(2, 2)),
    "dilated": PoolProblem(1, 3, 9, 9, "max", 3, 3, (5, 5), dilation=(2, 2)),
    "large": PoolProblem(1, 96, 8, 8, "max", 7, 7, (8, 8), pad=(3, 3, 3, 3)),
    "several outputs of a thread": PoolProblem(2, 512, 46, 46, "max", 3, 3, (46, 46), pad=(1, 1, 1, 1)),
}
MOVES = {
    "slice": MoveProblem(2, 64, 5, 6, "window", (16, 3, 4), start=(32, 1, 2)),
    "askew": MoveProblem(2, 40, 5, 6, "window", (21, 5, 6), start=(3, 0, 0)),
    "backwards": MoveProblem(1, 21, 4, 6, "window", (21, 4, 6), start=(20, 0, 0), step=(-1, 1, 1)),
    "padded": MoveProblem(2, 20, 4, 5, "window", (24, 6, 7), start=(-2, -1, -1), fill=7.0),
    "upsample": MoveProblem(1, 40, 3, 4, "upsample", (40, 6, 8), step=(1, 2, 2)),
    "to space": MoveProblem(1, 64, 3, 4, "d2s_dcr", (16, 6, 8), step=(1, 2, 2)),
    "to space, other order": MoveProblem(1, 48, 3, 4, "d2s_crd", (12, 6, 8), step=(1, 2, 2)),
    "to depth": MoveProblem(1, 16, 4, 6, "s2d_dcr", (64, 2, 3), step=(1, 2, 2)),
    "shuffle": MoveProblem(1, 24, 3, 3, "channels", (24, 3, 3), step=(3, 1, 1)),
    "joined": ConcatProblem((16, 48, 9), (2, 4, 5)),
    "joined askew": ConcatProblem((5, 16, 3), (2, 3, 3)),
}


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
@pytest.mark.parametrize("name", [*POOLS, *MOVES])
def test_bytes_are_moved_as_they_are(name, dtype):
    problem = (POOLS | MOVES)[name]
    tactics = list(byte_candidates(problem, (dtype,) * (len(problem.in_shapes) + 1)))
    assert len(tactics) == 4
    for tactic in tactics[:1] if name.startswith("several") else tactics:  # which is large
        inputs, _ = random_data(problem, formats=tactic.ins)
        got = execute(Emulated(DEVICE), problem, tactic, inputs, {})
        c = problem.out_shape[1]
        assert np.array_equal(got[:, :c], reference(problem, inputs, {})) and not got[:, c:].any(), tactic.name
        assert_written_once(problem, tactic, DEVICE, inputs, {})


def test_bytes_only_of_one_type_and_of_what_keeps_them():
    pool, joined = POOLS["3x3"], MOVES["joined"]
    assert not list(byte_candidates(pool, ("fp16", "fp16"))) and not list(byte_candidates(pool, ("int8", "uint8")))
    assert not list(byte_candidates(replace(pool, kind="avg"), ("int8", "int8")))
    assert not list(byte_candidates(joined, ("int8", "int8", "uint8", "int8")))
    assert not list(byte_candidates(replace(MOVES["padded"], fill=0.5), ("int8", "int8")))
    assert not list(byte_candidates(replace(MOVES["padded"], fill=-1.0), ("uint8", "uint8")))


def test_a_maximum_of_bytes_costs_less():
    pool = PoolProblem(32, 64, 112, 112, "max", 3, 3, (56, 56), stride=(2, 2), pad=(1, 1, 1, 1))
    bytes_ = next(byte_candidates(pool, ("int8", "int8")))
    halves = tactic_of("pool", None, (Format("fp16", "hwc8"),), Format("fp16", "hwc8"))
    a, b = (counts(pool, t, DEVICE) for t in (halves, bytes_))
    assert (a.read, a.written) == (2 * b.read, 2 * b.written)
    assert predicted(DEVICE, b)["total_us"] <= predicted(DEVICE, a)["total_us"]


@pytest.mark.parametrize(
    "pair", ["fp16:hwc8 int8:hwc16", "int8:hwc16 fp16:hwc8", "fp16:chw32 int8:chw32", "int8:chw32 int8:hwc16"]
)
def test_each_sector_is_touched_once(pair):
    problem = ReformatProblem(1, 64, 16, 12, *pair.split())
    (tactic,) = candidates(problem, DEVICE)
    least = sum(num_bytes(f, s) for f, s in zip((*tactic.ins, tactic.out), problem.all_shapes, strict=True))
    assert check(problem, tactic, DEVICE)[1].sectors * 32 <= 1.02 * least


def test_a_byte_costs_half_of_a_half():
    """Of large tensors, whose time is that of their bytes."""

    def priced(*ends: str):
        problem = ReformatProblem(32, 256, 56, 56, *ends)
        (tactic,) = candidates(problem, DEVICE)
        return counts(problem, tactic, DEVICE)

    halves, mixed, bytes_ = (
        priced(*ends) for ends in (("fp16:hwc8", "fp16:chw32"), ("fp16:hwc8", "int8:chw32"), ("int8:hwc16", "int8:chw32"))
    )
    assert mixed.read == halves.read == 2 * bytes_.read and halves.written == 2 * mixed.written == 2 * bytes_.written
    us = [predicted(DEVICE, c)["total_us"] for c in (halves, mixed, bytes_)]
    assert us[1] < 0.8 * us[0] and us[2] < 0.6 * us[0]


def test_names_as_tensorrt_has_them():
    assert wording(Format("int8", "chw32")) == "Thirty-two wide channel vectorized row major INT8 format"
    assert wording(Format("int8", "hwc16")) == "Channel major INT8 format where channel % 16 == 0"


@pytest.mark.parametrize("sm", ["sm_80", "sm_90a", "sm_120"])
def test_maxima_and_reformats_of_bytes_compile_without_spills(sm):
    pool = POOLS["several outputs of a thread"]
    pairs = ("fp16:hwc8 int8:hwc16", "uint8:chw32 fp16:chw", "fp32:chw int8:chw32")
    reformats = [ReformatProblem(32, 64, 56, 56, *pair.split()) for pair in pairs]
    steps = [launches(p, candidates(p, DEVICE)[0]) for p in reformats]
    for (step,) in (launches(pool, next(byte_candidates(pool, ("int8", "int8")))), *steps):
        fits(compile_kernel(step.kernel, dict(step.values), sm))
