"""Kernels on tensors that lie inside others: right, and nothing around their part is touched."""

from dataclasses import replace

import numpy as np
import pytest

from cuda_kernels.compile import compile_kernel
from cuda_kernels.device import named
from cuda_kernels.launch import Emulated
from tactics.candidates import candidates
from tactics.families.hopper.maps import pixels_in_order
from tactics.format import DTYPES, Format, from_memory, num_bytes, padded_channels, strides, to_memory
from tactics.kernels import KERNELS, ROWS
from tactics.launches import launches, pack_weights
from tactics.problems.gather import GatherProblem, ResizeProblem
from tactics.problems.pointwise_ops import Activation, Stage
from tactics.problems.problem import (
    ConcatProblem,
    ConvProblem,
    ConvTransposeProblem,
    MoveProblem,
    PointwiseProblem,
    PoolProblem,
)
from tactics.problems.reductions import NormalizeProblem
from tactics.sampling.data import random_data, reference
from tactics.sampling.trial import TOLERANCE, Addresses, bind, relative_error, scratch_for
from tactics.tactic import Patch, Tactic, Tile
from tests.gpu_runtime.assembly.test_assemble_in_place import CHW, CHW32, DENSE, H8, SPARSE
from tests.problems import conv_case, transposed_case
from tests.tactics.problems.test_attention import of_channels, of_tokens

pytestmark = pytest.mark.slow


PATCH = Patch(64, 8, 8, 2, 4)
STRIP = Tile(64, 128, 64, 2, 2, 3)
WGMMA = Tile(64, 64, 64, 4, 1, 4)
TURNS = Tile(64, 64, 64, 4, 1, 4, persist=1, pingpong=True)
LEAKY = Activation("leaky_relu", (0.1,))
LEAKY_STAGE = Stage("leaky_relu", params=(0.1,))
# (problem, kernel, tile, formats, per tensor (first channel, channels of the tensor around it, its format) or None)
# fmt: off
AROUND = {
    "conv": (
        conv_case(2, 24, 6, 5, 40, 3, 3, pad=(1, 1, 1, 1), bias=True), "conv_dense", DENSE, (H8, H8),
        ((8, 56, H8), (16, 72, H8)),
    ),
    "conv_groups": (
        conv_case(1, 32, 6, 5, 32, 3, 3, groups=2, bias=True), "conv_dense", Tile(16, 128, 64, 1, 4, 4), (H8, H8),
        ((8, 56, H8), (16, 72, H8)),
    ),
    "conv_grouped": (
        conv_case(2, 32, 6, 5, 24, 3, 3, pad=(1, 1, 1, 1), groups=4, act=LEAKY), "conv_grouped", Tile(64, 64, 64, 2, 2, 1),
        (CHW32, H8), ((32, 96, CHW32), (8, 40, H8)),
    ),
    "conv_sparse": (
        ConvProblem(1, 32, 6, 5, 36, 1, 1, sparse24=True), "conv_sparse24", SPARSE, (H8, H8),
        ((32, 96, CHW32), (24, 60, H8)),
    ),
    "conv_bytes": (
        conv_case(2, 48, 6, 5, 48, 3, 3, pad=(1, 1, 1, 1), bias=True, multiplied=True), "conv_dense_int8", DENSE,
        (Format("int8", "hwc16"), H8), ((16, 80, Format("int8", "hwc16")), (16, 72, H8)),
    ),
    "conv_sparse_bytes": (
        conv_case(1, 64, 6, 5, 64, 1, 1, sparse24=True, multiplied=True, act=Activation("quantize", (-128.0, 127.0))),
        "conv_sparse24_int8", SPARSE, (Format("int8", "hwc16"), Format("int8", "chw32")),
        ((32, 128, Format("int8", "hwc16")), (32, 96, Format("int8", "chw32"))),
    ),
    "conv_sm90": (
        conv_case(2, 24, 6, 5, 40, 3, 3, pad=(1, 1, 1, 1), bias=True, residual=True), "conv_dense_sm90", WGMMA, (H8, H8, H8),
        ((8, 56, H8), (8, 64, H8), (16, 72, H8)),
    ),
    "conv_sparse_sm90": (
        conv_case(2, 72, 6, 5, 36, 3, 3, pad=(1, 1, 1, 1), sparse24=True), "conv_sparse24_sm90", TURNS, (H8, H8),
        ((32, 128, H8), (24, 60, H8)),
    ),
    # Pixels of all images one behind the other, in a wider tensor.
    "conv_1x1_sm90": (
        conv_case(2, 72, 6, 5, 40, 1, 1, bias=True, residual=True), "conv_dense_sm90", TURNS, (H8, H8, H8),
        ((8, 88, H8), (8, 64, H8), (16, 72, H8)),
    ),
    # A plane of 32 channels of several: images lie apart, so that a 1x1 goes by im2col.
    "conv_plane_sm90": (
        conv_case(3, 32, 6, 5, 32, 1, 1, bias=True), "conv_dense_sm90", WGMMA, (CHW32, CHW32),
        ((32, 96, CHW32), (32, 96, CHW32)),
    ),
    "conv_sparse_plane_sm90": (
        conv_case(3, 32, 6, 5, 40, 3, 1, pad=(1, 0, 1, 0), sparse24=True), "conv_sparse24_sm90", TURNS, (CHW32, CHW),
        ((64, 96, CHW32), (3, 47, CHW)),
    ),
    "conv_split_sm90": (
        conv_case(2, 72, 6, 5, 40, 3, 3, pad=(1, 1, 1, 1), residual=True), "conv_dense_sm90", replace(WGMMA, split=3),
        (H8, CHW, CHW), ((8, 88, H8), (5, 50, CHW), (3, 48, CHW)),
    ),
    "conv_groups_sm90": (
        conv_case(2, 128, 6, 5, 144, 3, 3, groups=2, residual=True), "conv_dense_sm90", TURNS, (H8, H8, H8),
        ((8, 144, H8), (8, 160, H8), (16, 168, H8)),
    ),
    "conv_shuffled_sm90": (
        conv_case(2, 64, 4, 5, 32, 3, 3, pad=(1, 1, 1, 1), d2s=2, residual=True), "conv_dense_sm90", WGMMA, (H8, H8, H8),
        ((16, 96, H8), (8, 32, H8), (8, 24, H8)),
    ),
    "conv_residual": (
        conv_case(2, 16, 6, 5, 24, 1, 1, residual=True), "conv_dense", DENSE, (H8, H8, H8), (None, (8, 48, H8), (16, 56, H8)),
    ),
    "conv_residual_inside": (
        conv_case(2, 16, 6, 5, 40, 1, 1, residual=True), "conv_dense", DENSE, (H8, CHW32, CHW32),
        (None, (32, 72, CHW32), None),
    ),
    "conv_residual_linear": (
        conv_case(2, 16, 6, 5, 24, 1, 1, residual=True), "conv_dense", DENSE, (H8, CHW, CHW), (None, None, (3, 32, CHW)),
    ),
    "transpose_residual": (
        transposed_case(2, 16, 4, 5, 8, 2, 2, (8, 10), (2, 2), residual=True), "transpose_dense", DENSE, (H8, H8, H8),
        (None, (8, 32, H8), (16, 32, H8)),
    ),
    "strip": (
        conv_case(2, 24, 6, 5, 24, 3, 3, pad=(1, 1, 1, 1), residual=True), "conv_strip", STRIP, (CHW32, H8, H8),
        ((32, 96, CHW32), (8, 40, H8), (16, 56, H8)),
    ),
    "strip_sparse": (
        conv_case(2, 64, 6, 5, 24, 3, 3, pad=(1, 1, 1, 1), sparse24=True), "conv_strip_sparse24", STRIP, (H8, H8),
        ((8, 80, H8), (8, 40, H8)),
    ),
    "conv_stem": (
        conv_case(1, 3, 9, 8, 24, 3, 3, pad=(1, 1, 1, 1), residual=True), "conv_stem", None, (CHW, H8, H8),
        ((5, 9, CHW), (8, 40, H8), (16, 48, H8)),
    ),
    "conv_depthwise": (
        conv_case(2, 24, 6, 5, 48, 3, 3, groups=24, pad=(1, 1, 1, 1), bias=True), "conv_depthwise", PATCH, (H8, CHW32),
        ((8, 56, H8), (32, 80, CHW32)),
    ),
    "conv_groups_residual": (
        conv_case(2, 32, 6, 5, 32, 3, 3, groups=2, residual=True), "conv_dense", Tile(16, 128, 64, 1, 4, 4), (H8, H8, H8),
        (None, (8, 56, H8), (16, 72, H8)),
    ),
    "conv_grouped_residual": (
        conv_case(2, 32, 6, 5, 24, 3, 3, groups=4, residual=True, act=LEAKY), "conv_grouped", Tile(64, 64, 64, 2, 2, 1),
        (CHW32, H8, H8), (None, (16, 48, H8), (8, 40, H8)),
    ),
    "conv_grouped_residual_linear": (
        conv_case(2, 32, 6, 5, 24, 3, 3, groups=4, residual=True), "conv_grouped", Tile(64, 64, 64, 2, 2, 1),
        (H8, CHW, CHW), (None, (3, 32, CHW), None),
    ),
    "conv_depthwise_residual": (
        conv_case(2, 24, 6, 5, 24, 3, 3, groups=24, pad=(1, 1, 1, 1), residual=True), "conv_depthwise", PATCH, (H8, H8, H8),
        ((8, 56, H8), (16, 48, H8), (8, 32, H8)),
    ),
    "transpose_grouped": (
        transposed_case(2, 32, 4, 5, 24, 3, 3, (9, 11), (2, 2), groups=4, residual=True), "transpose_grouped",
        Tile(64, 64, 64, 2, 2, 1), (CHW32, H8, H8), ((32, 96, CHW32), (8, 40, H8), (16, 56, H8)),
    ),
    "transpose_depthwise": (
        transposed_case(2, 24, 4, 5, 24, 4, 4, (8, 10), (2, 2), (1, 1), groups=24, residual=True), "transpose_depthwise",
        PATCH, (H8, H8, H8), ((8, 56, H8), (16, 48, H8), (8, 32, H8)),
    ),
    "conv_shuffled_residual": (
        conv_case(2, 16, 4, 5, 32, 3, 3, d2s=2, residual=True), "conv_dense", DENSE, (H8, H8, H8),
        (None, (8, 32, H8), (8, 24, H8)),
    ),
    "conv_shuffled_residual_linear": (
        conv_case(2, 16, 4, 5, 12, 3, 3, d2s=2, residual=True), "conv_dense", DENSE, (H8, CHW, CHW),
        (None, (3, 8, CHW), (1, 5, CHW)),
    ),
    "conv_upsampled_residual": (
        conv_case(2, 16, 6, 9, 24, 1, 1, residual=True, up=3), "conv_dense", DENSE, (H8, H8, H8),
        (None, (8, 48, H8), (16, 56, H8)),
    ),
    "conv_shuffled": (conv_case(1, 16, 4, 5, 32, 3, 3, d2s=2), "conv_dense", DENSE, (H8, H8), ((8, 32, H8), (8, 24, H8))),
    "transpose": (
        transposed_case(1, 16, 4, 5, 8, 2, 2, (8, 10), (2, 2), bias=True), "transpose_dense", DENSE, (H8, H8),
        ((8, 32, H8), (16, 32, H8)),
    ),
    "transpose_sparse": (
        ConvTransposeProblem(1, 32, 4, 5, 8, 2, 2, (8, 10), (2, 2), sparse24=True), "transpose_sparse24", SPARSE, (H8, H8),
        ((8, 48, H8), (16, 32, H8)),
    ),
    "conv_fp32": (
        conv_case(2, 24, 6, 5, 40, 3, 3, pad=(1, 1, 1, 1), bias=True, residual=True), "conv_fp32", None, (H8, CHW32, H8),
        ((8, 56, H8), (32, 80, CHW32), (16, 72, H8)),
    ),
    "conv_fp32_in": (
        ConvProblem(1, 7, 6, 5, 13, 3, 3), "conv_fp32", None, (Format("fp32", "chw"), CHW), (None, (5, 20, CHW)),
    ),
    "conv_fp32_out": (
        ConvProblem(1, 24, 6, 5, 13, 3, 3), "conv_fp32", None, (H8, Format("fp32", "chw")), ((8, 56, H8), None),
    ),
    "transpose_fp32": (
        transposed_case(1, 16, 4, 5, 8, 2, 2, (8, 10), (2, 2), bias=True), "transpose_fp32", None, (H8, H8),
        ((8, 32, H8), (16, 32, H8)),
    ),
    "conv_linear": (ConvProblem(2, 7, 6, 5, 13, 3, 3), "conv_dense", DENSE, (CHW, CHW), ((3, 11, CHW), (5, 20, CHW))),
    "pool": (PoolProblem(2, 16, 9, 8, "max", 3, 3, (4, 4), (2, 2)), "pool", None, (H8, H8), ((8, 32, H8), (8, 40, H8))),
    "pool_global": (PoolProblem(2, 24, 5, 4, "avg", 5, 4, (1, 1)), "pool_global", None, (H8, H8), ((8, 40, H8), (16, 48, H8))),
    "pool_linear": (PoolProblem(1, 5, 6, 6, "avg", 2, 2, (5, 5)), "pool", None, (CHW, CHW), ((2, 9, CHW), (1, 7, CHW))),
    "pointwise": (
        PointwiseProblem(2, 24, 5, 3, (Stage("add", "t1"), LEAKY_STAGE), ("nchw", "nchw")), "pointwise", None, (H8, H8, H8),
        ((8, 40, H8), None, (16, 48, H8)),
    ),
    "pointwise_broadcast": (
        PointwiseProblem(2, 24, 5, 3, (Stage("mul", "t1"),), ("nchw", "nc")), "pointwise", None, (H8, H8, H8),
        ((8, 40, H8), (8, 48, H8), None),
    ),
    "pointwise_channel": (
        PointwiseProblem(2, 32, 5, 3, (Stage("mul", "c0"),), constants=("c",)), "pointwise", None, (H8, H8),
        ((32, 64, CHW32), (8, 48, H8)),
    ),
    "pointwise_planes": (
        PointwiseProblem(2, 40, 5, 3, (LEAKY_STAGE,)), "pointwise", None, (CHW32, CHW32), ((32, 72, CHW32), (64, 104, CHW32)),
    ),
    "pointwise_linear": (
        PointwiseProblem(2, 5, 5, 3, (LEAKY_STAGE,)), "pointwise", None, (CHW, CHW), ((2, 8, CHW), (1, 9, CHW)),
    ),
    "rows": (NormalizeProblem(2, 24, 5, 3, "softmax", "c"), "reduce", None, (H8, H8), ((8, 40, H8), (8, 32, H8))),
    "move": (
        MoveProblem(2, 24, 5, 4, "upsample", (24, 10, 8), step=(1, 2, 2)), "move", None, (H8, H8), ((8, 40, H8), (16, 48, H8)),
    ),
    "move_part": (
        MoveProblem(1, 40, 5, 4, "window", (16, 5, 4), (8, 0, 0)), "move", None, (H8, CHW), ((16, 64, H8), (3, 20, CHW)),
    ),
    "gather": (
        GatherProblem((2, 24, 5, 4), (0, 1, 3, 2), ((), (), (3, -1, 0), ())), "gather", None, (H8, CHW),
        ((8, 40, H8), (3, 29, CHW)),
    ),
    "gather_channels": (
        GatherProblem((1, 24, 5, 4), index=((), tuple(range(23, 7, -1)), (), ())), "gather", None, (H8, H8),
        ((8, 40, H8), (16, 40, H8)),
    ),
    "resize": (
        ResizeProblem(2, 16, 5, 4, (7, 9), "linear", "half_pixel", (1.4, 2.25)), "resize", None, (H8, H8),
        ((8, 40, H8), (16, 48, H8)),
    ),
    "attention": (of_tokens(2, 2, 5, 8), "attention", None, (H8, H8), ((8, 64, H8), (8, 40, H8))),
    "cross_covariance": (of_channels(2, 2, 8, 5), "cross_covariance", None, (H8, H8), ((8, 64, H8), (8, 40, H8))),
    "concat": (ConcatProblem((16, 12), (1, 4, 3)), "move", None, (H8, H8, CHW), ((8, 32, H8), None, (2, 31, CHW))),
}
# fmt: on


def run_inside(problem, tactic, inputs, weights, places, **options):
    """Run one tactic with tensors inside others -> (its output NCHW, padding kept; whether all around it is untouched)."""
    gpu = Emulated(named("h200" if KERNELS[tactic.kernel].sm else "a100"), **options)
    shapes = (*problem.in_shapes, problem.out_shape)
    strided, addresses, images = [], [], []
    for x, fmt, shape, place in zip((*inputs, None), (*tactic.ins, tactic.out), shapes, places, strict=True):
        first, channels, whole_fmt = place or (0, shape[1], fmt)
        outer = (shape[0], channels, *shape[2:])
        s = strides(whole_fmt, outer)
        around = np.full(num_bytes(whole_fmt, outer), 0xFF, np.uint8).view(DTYPES[whole_fmt.dtype])
        image = from_memory(around, whole_fmt, outer, padding=True)
        if x is not None:
            image[:, first : first + shape[1]] = x
            if first + shape[1] == channels:  # the last part owns the padding
                image[:, channels:] = 0
        padded = outer[0], image.shape[1], *outer[2:]
        address = gpu.allocate(around.nbytes)
        gpu.write(address, to_memory(image, whole_fmt))
        strided.append(s)
        images.append((address, whole_fmt, padded))
        elements = (first >> s.log2v) * s.block + (first & ((1 << s.log2v) - 1))
        addresses.append(address + elements * DTYPES[whole_fmt.dtype].itemsize)
    sections = pack_weights(problem, tactic, weights)
    held = {name: gpu.allocate(array.nbytes, constant=True) for name, array in sections.items()}
    for name, array in sections.items():
        gpu.write(held[name], array)
    steps = launches(problem, tactic, tuple(strided))
    scratch = scratch_for(gpu, steps)
    for step in steps:
        kernel = gpu.load(compile_kernel(step.kernel, dict(step.values), gpu.arch))
        gpu.launch(
            kernel,
            step.grid,
            step.block,
            step.smem,
            bind(gpu, step.args, Addresses(addresses[:-1], addresses[-1], held, scratch)),
        )
    address, whole_fmt, padded = images[-1]
    flat = gpu.read(address, num_bytes(whole_fmt, padded)).view(DTYPES[whole_fmt.dtype])
    whole = from_memory(flat, whole_fmt, padded)
    first, c = (places[-1] or (0,))[0], problem.out_shape[1]
    end = first + (padded_channels(tactic.out.layout, c) if first + c == (places[-1] or (0, c))[1] else c)
    ones = np.full(whole.itemsize, 0xFF, np.uint8).view(whole.dtype)[0]  # NaN of floating-point types
    untouched = all(
        np.array_equal(part, np.full_like(part, ones), equal_nan=True) for part in (whole[:, :first], whole[:, end:])
    )
    return whole[:, first:end], untouched, gpu.stats


@pytest.mark.sample(44)
@pytest.mark.parametrize("mode", [{}, {"async_mode": "late", "seed": 1}], ids=["", "late"])
@pytest.mark.parametrize("name", AROUND)
def test_kernels_keep_to_their_part(name, mode):
    problem, kernel, tile, (*ins, out), places = AROUND[name]
    tactic = Tactic(kernel, tile, tuple(ins), out)
    if kernel == "conv_stem":
        tactic = next(t for t in candidates(problem, named("a100")) if (t.kernel, t.ins, t.out) == (kernel, tuple(ins), out))
    inputs, weights = random_data(problem)
    got, untouched, stats = run_inside(problem, tactic, inputs, weights, places, **mode)
    c = problem.out_shape[1]
    assert untouched, "something around the part was written"
    assert not np.isnan(got).any() and not got[:, c:].any()
    assert relative_error(got[:, :c], np.asarray(reference(problem, inputs, weights), np.float32)) < TOLERANCE


def test_a_1x1_of_images_apart_goes_by_im2col():
    for name, apart in (("conv_1x1_sm90", False), ("conv_plane_sm90", True)):
        problem, *_, ((_, channels, fmt), *_) = AROUND[name]
        x = strides(fmt, (problem.n, channels, problem.h, problem.w))
        assert pixels_in_order(problem, x) != apart, name


def test_every_strided_kernel_is_tested():
    assert {kernel for _, kernel, *_ in AROUND.values()} == {k.name for k in ROWS if k.placed}
