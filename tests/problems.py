"""Small problems that together use every kernel, tile, pair of formats and option, and functions that run and check a tactic.

`python -m tests.problems` runs sanitize_cases on the GPU, for compute-sanitizer.
"""

import random
import sys
from dataclasses import replace

import numpy as np

from cuda_kernels.device import Device
from cuda_kernels.launch import Emulated
from tactics.candidates import candidates
from tactics.format import padded_channels
from tactics.problems.attention import AttentionProblem, Operand
from tactics.problems.epilogue import Epilogue, MaxPool
from tactics.problems.gather import GatherProblem, ResizeProblem
from tactics.problems.pointwise_ops import ACTIVATIONS, FUNCTIONS, OPERATIONS, Activation, Stage, stage_of
from tactics.problems.pointwise_ops import POINTWISE as POINTWISE_ROWS
from tactics.problems.problem import (
    BackToBackProblem,
    ChainedProblem,
    ConcatProblem,
    ConvProblem,
    ConvTransposeProblem,
    MatmulProblem,
    MoveProblem,
    PointwiseProblem,
    PoolProblem,
    Problem,
    ReformatProblem,
    ScaledConvProblem,
    SqueezeExciteProblem,
)
from tactics.problems.prologue import Prologue
from tactics.problems.reductions import REDUCTIONS, NormalizeProblem, ReduceProblem
from tactics.sampling.data import random_data, reference
from tactics.sampling.trial import TOLERANCE, execute, relative_error
from tactics.step import linear
from tactics.tactic import Tactic


def table_of(low: int, high: int, ends: tuple[float, float] = (-128.0, 127.0)) -> Activation:
    """A table of drawn whole numbers for those from low to high."""
    return Activation("table", (low, high, *map(float, np.random.default_rng(high).integers(*ends, high - low + 1))))


# Function -> parameters: ONNX's, or others if ONNX's would leave something untested.
PARAMS = {name: tuple(row.parameters.values()) for name, row in POINTWISE_ROWS.items()} | {
    "leaky_relu": (0.1,),
    "clip": (-0.5, 1.0),
    "elu": (0.5,),
    "thresholded_relu": (0.3,),
    "table": table_of(-3, 4).params,
}
ACTS = tuple(Activation(name, PARAMS[name]) for name in ACTIVATIONS)
RELU, SIGMOID, PRELU = (Activation(name) for name in ("relu", "sigmoid", "prelu"))


def _grouped(fields: dict) -> dict:
    """Returns the fields with those of Prologue and Epilogue moved into such records."""
    inside = {f: fields.pop(f) for f in Epilogue.__dataclass_fields__ if f in fields}
    if "scaled" in fields:
        fields["prologue"] = Prologue(fields.pop("scaled"))
    if "gated" in fields:
        fields["prologue"] = Prologue(gated=True, act=fields.pop("gated"))
    if "norm" in fields:
        fields["prologue"] = Prologue(normalized=True, epsilon=fields.pop("norm"))
    if "border" in fields:
        fields["prologue"] = Prologue(border=fields.pop("border"))
    return fields | {"epilogue": Epilogue(**inside)}


def conv_case(*sizes, **fields) -> ConvProblem:
    """Returns a ConvProblem; fields of its prologue and epilogue are keywords as well: conv_case(..., bias=True)."""
    return ConvProblem(*sizes, **_grouped(fields))


def transposed_case(*sizes, **fields) -> ConvTransposeProblem:
    """Returns a ConvTransposeProblem; fields of its epilogue are keywords as well."""
    return ConvTransposeProblem(*sizes, **_grouped(fields))


# Steps that may follow an activation: a scale and a shift, a residual, a second activation.
TAILS: dict[str, dict] = {
    "": {"residual": True, "act_first": True, "affine": True, "last": Activation("hard_sigmoid", (0.2, 0.5))},
    "_affine": {"affine": True},
    "_after_residual": {"residual": True, "affine": True},
    "_second": {"residual": True, "act_first": True, "last": Activation("relu")},
    "_of_two": {"last": Activation("clip", (-0.1, 0.4))},
}
# All of their tactics are run: every tile x format pair, without and with a residual. Odd sizes: no tile fits.
EVERY_TACTIC: dict[str, Problem] = {
    "conv": conv_case(2, 40, 9, 7, 72, 3, 3, pad=(1, 1, 1, 1), bias=True, act=RELU, sparse24=True),
    "conv_residual": conv_case(1, 24, 7, 10, 88, 1, 1, bias=True, residual=True, act=RELU, sparse24=True),
}

CONVS: dict[str, Problem] = {
    "conv_1x1": ConvProblem(1, 64, 8, 8, 96, 1, 1, sparse24=True),
    "conv_stem": conv_case(1, 3, 23, 21, 33, 7, 7, stride=(2, 2), pad=(3, 3, 3, 3), bias=True, act=RELU),
    "conv_asymmetric": conv_case(
        2, 12, 11, 13, 20, 3, 2, stride=(2, 1), pad=(0, 2, 1, 0), dilation=(2, 3), bias=True, sparse24=True
    ),
    "conv_one_output": conv_case(1, 16, 5, 5, 1, 3, 3, pad=(1, 1, 1, 1), bias=True, sparse24=True),
    "conv_odd_channels": conv_case(3, 7, 6, 5, 13, 3, 3, pad=(1, 1, 1, 1), bias=True, act=SIGMOID),
    "conv_c20": ConvProblem(1, 20, 6, 6, 24, 3, 3, pad=(1, 1, 1, 1), sparse24=True),
    "conv_gemm": conv_case(5, 200, 1, 1, 10, 1, 1, bias=True, sparse24=True),
    "conv_deep": conv_case(1, 256, 4, 4, 64, 3, 3, pad=(1, 1, 1, 1), bias=True, act=RELU, sparse24=True),
    "conv_wide": conv_case(1, 32, 40, 41, 40, 3, 3, pad=(1, 1, 1, 1), bias=True, act=RELU, sparse24=True),
    "conv_grouped": conv_case(1, 128, 6, 5, 128, 3, 3, pad=(1, 1, 1, 1), groups=2, bias=True, act=RELU, sparse24=True),
    "conv_grouped_small": conv_case(1, 48, 9, 9, 48, 3, 3, pad=(1, 1, 1, 1), groups=6, bias=True, residual=True),
    "conv_many_outputs": conv_case(1, 16, 3, 3, 600, 1, 1, bias=True, sparse24=True),
    "conv_residual_none": conv_case(2, 16, 5, 6, 40, 3, 3, pad=(1, 1, 1, 1), residual=True, sparse24=True),
    "conv_residual_prelu": conv_case(1, 16, 5, 6, 40, 3, 3, bias=True, residual=True, act=PRELU, sparse24=True),
    "conv_residual_after": conv_case(1, 16, 5, 6, 40, 3, 3, bias=True, residual=True, act=PRELU, act_first=True, sparse24=True),
    "conv_residual_after_d2s": conv_case(
        1, 16, 5, 6, 32, 3, 3, bias=True, residual=True, act=SIGMOID, act_first=True, d2s=2, sparse24=True
    ),
    **{f"conv_{a.name}": conv_case(1, 24, 6, 5, 40, 1, 1, bias=True, act=a, sparse24=True) for a in ACTS},
    **{
        f"conv_tail{name}": conv_case(2, 24, 6, 5, 40, 3, 3, bias=True, act=Activation("gelu"), sparse24=True, **how)
        for name, how in TAILS.items()
    },
}

BROADCAST = ("", "nc", "c", "nhw", "hw", "n", "nch", "ncw", "chw", "h", "w")
ODD = (2, 40, 5, 3)
# fmt: off
POINTWISE: dict[str, Problem] = {
    "pointwise_copy": PointwiseProblem(*ODD),
    **{f"pointwise_{a.name}": PointwiseProblem(*ODD, stage_of(a)) for a in ACTS if a.name not in ("none", "prelu")},
    **{f"pointwise_{f}": PointwiseProblem(*ODD, (Stage(f, params=PARAMS[f]),)) for f in FUNCTIONS},
    **{f"pointwise_{op}": PointwiseProblem(*ODD, (Stage(op, "t1"),), ("nchw", "nchw")) for op in OPERATIONS},
    "pointwise_channel": PointwiseProblem(*ODD, (Stage("mul", "c0"), Stage("relu")), constants=("c",)),
    "pointwise_scalar": PointwiseProblem(1, 24, 7, 7, (Stage("rdiv", params=(1.5,)),)),
    "pointwise_odd_channels": PointwiseProblem(1, 3, 9, 9, (Stage("sigmoid"),)),
    "pointwise_1x1": PointwiseProblem(3, 20, 1, 1, (Stage("add", "t1"), Stage("relu")), ("nchw", "nchw")),
    # Broadcast operands, from each side.
    **{f"pointwise_by_{a or 'one'}": PointwiseProblem(2, 20, 5, 3, (Stage("mul", "t1"),), ("nchw", a)) for a in BROADCAST},
    **{f"pointwise_from_{a}": PointwiseProblem(2, 20, 5, 3, (Stage("exp"), Stage("mul", "t1")), (a, "nchw"))
       for a in ("nc", "hw")},
    "pointwise_outer": PointwiseProblem(2, 40, 5, 3, (Stage("add", "t1"),), ("nc", "hw")),
    **{f"pointwise_constant_{a}": PointwiseProblem(2, 20, 5, 3, (Stage("add", "c0"),), constants=(a,)) for a in BROADCAST[1:]},
    "pointwise_single": PointwiseProblem(2, 1, 5, 3, (Stage("add", "c0"), Stage("mul", "t1")), ("nchw", "nchw"), ("nchw",)),
    "pointwise_chain": PointwiseProblem(
        2, 40, 5, 3,
        (Stage("mul", "c0"), Stage("add", "t1"), Stage("prelu", "c1"), Stage("mul", "t2"), Stage("rsub", params=(1.0,)),
         Stage("clip", params=(-1.0, 2.0)), Stage("mul", "t0"), Stage("abs")),
        ("nchw", "nchw", "nc"), ("c", "c"),
    ),
}
# fmt: on

ROWS: dict[str, Problem] = {
    "softmax": NormalizeProblem(2, 21, 5, 4, "softmax", "c"),
    "softmax_rows": NormalizeProblem(3, 1000, 1, 1, "softmax", "c"),
    "softmax_w": NormalizeProblem(2, 12, 3, 37, "softmax", "w"),
    "log_softmax": NormalizeProblem(2, 40, 5, 4, "log_softmax", "c"),
    "log_softmax_h": NormalizeProblem(1, 10, 7, 4, "log_softmax", "h"),
    "instance_norm": NormalizeProblem(2, 20, 9, 11, "standard", "hw", epsilon=1e-5, affine="c"),
    "instance_norm_many": NormalizeProblem(3, 40, 5, 4, "standard", "hw", epsilon=1e-3, affine="c"),
    "group_norm": NormalizeProblem(2, 32, 5, 4, "standard", "chw", 4, 1e-5, "c"),
    "group_norm_small": NormalizeProblem(2, 24, 5, 4, "standard", "chw", 6, 1e-5, "c"),
    "layer_norm": NormalizeProblem(2, 19, 1, 40, "standard", "w", epsilon=1e-5, affine="w"),
    "layer_norm_chw": NormalizeProblem(2, 20, 3, 5, "standard", "chw", epsilon=1e-5, affine="chw"),
    "layer_norm_vectors": NormalizeProblem(2, 20, 3, 6, "standard", "chw", epsilon=1e-5),
    "softmax_vectors": NormalizeProblem(2, 3, 5, 48, "softmax", "w"),
    # Few long rows, by several blocks each.
    "group_norm_parts": NormalizeProblem(2, 20, 31, 29, "standard", "chw", epsilon=1e-5, affine="c"),
    "group_norm_parts_of_groups": NormalizeProblem(1, 64, 33, 17, "standard", "chw", 2, 1e-5, "c"),
    "instance_norm_parts": NormalizeProblem(2, 20, 65, 34, "standard", "hw", epsilon=1e-5, affine="c"),
    "layer_norm_parts": NormalizeProblem(1, 2, 3, 20480, "standard", "w", epsilon=1e-5, affine="w"),
    "group_norm_of_channels": NormalizeProblem(2, 24, 33, 17, "standard", "chw", 6, 1e-5, "c"),
    "group_norm_of_odd_channels": NormalizeProblem(2, 30, 45, 13, "standard", "chw", 3, 1e-5, "c"),
    "group_norm_padded": NormalizeProblem(1, 21, 7, 5, "standard", "chw", 3, 1e-5, "c"),
    "layer_norm_added": NormalizeProblem(2, 19, 1, 40, "standard", "w", epsilon=1e-5, affine="w", added=True),
    "group_norm_parts_added": NormalizeProblem(2, 20, 31, 29, "standard", "chw", epsilon=1e-5, affine="c", added=True),
    "group_norm_added": NormalizeProblem(1, 21, 7, 5, "standard", "chw", 3, 1e-5, "c", added=True),
    "softmax_added": NormalizeProblem(2, 21, 5, 4, "softmax", "c", added=True),
    "mean_variance": NormalizeProblem(3, 12, 5, 4, "standard", "nhw", epsilon=1e-18),
    **{
        f"reduce_{kind}": ReduceProblem(2, 20, 5, 7, kind, axes)
        for kind, axes in zip(REDUCTIONS, ("c", "hw", "nch", "nhw", "w", "hw", "ch", "nhw", "w", "h", "cw"), strict=True)
    },
    **{f"reduce_over_{a}": ReduceProblem(2, 40, 5, 6, "sum", a) for a in ("n", "c", "h", "w", "nc", "ch", "cw", "chw", "nhw")},
    "reduce_to_one": ReduceProblem(2, 20, 5, 7, "sum", "nchw"),
    "reduce_long": ReduceProblem(1, 24, 40, 41, "mean", "hw"),
    "reduce_many": ReduceProblem(4, 2100, 3, 1, "max", "h"),
}

# fmt: off
OTHERS: dict[str, Problem] = {
    "pool_max": PoolProblem(2, 40, 11, 9, "max", 3, 3, (6, 5), stride=(2, 2), pad=(1, 1, 1, 1)),
    "pool_max_ceil": PoolProblem(1, 8, 12, 12, "max", 3, 3, (6, 6), stride=(2, 2)),
    "pool_max_dilated": PoolProblem(1, 33, 9, 9, "max", 2, 3, (7, 5), dilation=(2, 2)),
    "pool_avg": PoolProblem(2, 24, 8, 7, "avg", 3, 3, (8, 7), pad=(1, 1, 1, 1)),
    "pool_avg_count_pad": PoolProblem(1, 40, 8, 7, "avg", 3, 3, (4, 4), stride=(2, 2), pad=(1, 1, 1, 1), count_pad=True),
    "pool_global_avg": PoolProblem(3, 72, 7, 7, "avg", 7, 7, (1, 1)),
    "pool_global_max": PoolProblem(1, 19, 5, 13, "max", 5, 13, (1, 1)),
    **POINTWISE,
    "move_slice": MoveProblem(2, 40, 9, 8, "window", (16, 4, 7), start=(8, 1, 0), step=(1, 2, 1)),
    "move_channel_step": MoveProblem(1, 21, 5, 4, "window", (7, 5, 4), start=(1, 0, 0), step=(3, 1, 1)),
    "move_pad": MoveProblem(1, 12, 6, 5, "window", (20, 9, 10), start=(-4, -2, -3), fill=1.5),
    "move_reverse": MoveProblem(1, 10, 6, 5, "window", (10, 6, 5), start=(0, 5, 4), step=(1, -1, -1)),
    "move_upsample": MoveProblem(2, 20, 4, 5, "upsample", (20, 8, 15), step=(1, 2, 3)),
    "move_d2s_dcr": MoveProblem(1, 36, 4, 5, "d2s_dcr", (4, 12, 15), step=(1, 3, 3)),
    "move_d2s_crd": MoveProblem(2, 48, 3, 5, "d2s_crd", (12, 6, 10), step=(1, 2, 2)),
    "move_s2d_dcr": MoveProblem(1, 5, 6, 8, "s2d_dcr", (20, 3, 4), step=(1, 2, 2)),
    "move_s2d_crd": MoveProblem(2, 3, 9, 6, "s2d_crd", (27, 3, 2), step=(1, 3, 3)),
    "move_channels": MoveProblem(2, 24, 5, 3, "channels", (24, 5, 3), step=(1, 4, 4)),
    "concat_aligned": ConcatProblem((16, 32, 16), (2, 5, 4)),
    "concat_odd": ConcatProblem((3, 5, 40), (1, 6, 7)),
    "concat_rows": ConcatProblem((3, 1, 4), (2, 20, 5), axis=2),
    "concat_columns": ConcatProblem((3, 1, 4), (2, 24, 5), axis=3),
    "concat_images": ConcatProblem((2, 1), (9, 5, 3), axis=0),
    "gather_nhwc_to_nchw": GatherProblem((2, 9, 5, 3), (0, 3, 1, 2)),
    "gather_nchw_to_nhwc": GatherProblem((2, 21, 9, 5), (0, 2, 3, 1)),
    "gather_reverse_all": GatherProblem((3, 10, 4, 5), (3, 2, 1, 0)),
    "gather_channels": GatherProblem((2, 20, 3, 5), index=((), (19, 0, 0, 7, 3, -1, 5, 5, 1), (), ()), fill=-2.5),
    "gather_reflect": GatherProblem((2, 20, 3, 5), index=((), (), (2, 1, 0, 1, 2, 1), (1, 0, 1, 2, 3, 4, 3))),
    "gather_pad": GatherProblem((2, 20, 3, 5), index=((), (), (-1, 0, 1, 2, -1), (-1, -1, 0, 2, 4)), fill=1.5),
    "gather_images": GatherProblem((3, 12, 4, 3), index=((2, 0, -1, 2), (), (3, 1), ()), fill=4.0),
    "gather_transposed": GatherProblem((1, 7, 6, 5), (0, 2, 1, 3), ((), (5, 3, 1), (0, 2, 4, 6, -1), ())),
    "matmul": MatmulProblem((1, 1), (1, 1), 70, 40, 33),
    "matmul_batched": MatmulProblem((2, 3), (1, 3), 20, 66, 48),
    "matmul_both_turned": MatmulProblem((1, 2), (2, 1), 9, 17, 40, True, True),
    "matmul_many": MatmulProblem((70000, 1), (1, 1), 1, 2, 3),
    "matmul_tall": MatmulProblem((1, 1), (1, 1), 4_200_000, 1, 2),
    "matmul_row": MatmulProblem((1, 1), (1, 4), 1, 5, 7, trans_b=True),
    "resize_linear": ResizeProblem(2, 20, 5, 4, (9, 7), "linear", "half_pixel", (9 / 5, 7 / 4)),
    "resize_from_a_pixel": ResizeProblem(1, 24, 1, 1, (5, 6), "linear", "asymmetric", (5.0, 6.0)),
    "resize_align_corners": ResizeProblem(1, 3, 5, 6, (12, 3), "linear", "align_corners", (2.4, 0.5)),
    "resize_cubic": ResizeProblem(1, 12, 6, 7, (13, 5), "cubic", "half_pixel", (13 / 6, 5 / 7), -0.5),
    "resize_crop": ResizeProblem(
        1, 12, 6, 7, (5, 9), "linear", "tf_crop_and_resize", (5 / 6, 9 / 7), roi=(-0.2, 0.9, 0.3, 1.4), extrapolation=3.0
    ),
    "resize_antialias": ResizeProblem(1, 12, 16, 15, (5, 6), "linear", "half_pixel", (5 / 16, 0.4), antialias=True),
    **ROWS,
    **{
        f"reformat_{src}_{dst}".replace(":", ""): ReformatProblem(2, 40, 6, 5, src, dst)
        for src, dst in (
            ("fp32:chw", "fp16:chw"), ("fp32:chw", "fp16:hwc8"), ("fp32:chw", "fp16:chw32"), ("fp16:chw", "fp32:chw"),
            ("fp16:hwc8", "fp32:chw"), ("fp16:chw32", "fp32:chw"), ("fp16:chw", "fp16:hwc8"), ("fp16:hwc8", "fp16:chw"),
            ("fp16:hwc8", "fp16:hwc16"), ("fp16:hwc16", "fp16:hwc8"), ("fp16:chw", "fp16:chw32"),
            ("fp16:chw32", "fp16:hwc8"), ("fp16:hwc8", "fp16:chw32"), ("fp16:chw", "fp16:chw2"),
            ("fp16:chw16", "fp16:hwc"), ("fp16:hwc", "fp16:hwc16"), ("fp16:chw2", "fp32:chw16"), ("fp32:hwc", "fp16:chw2"),
            ("uint8:hwc", "fp16:hwc8"), ("uint8:chw", "fp16:chw"),
        )
    },
}
# fmt: on


def depthwise(n, c, h, w, r, s, multiplier=1, **how) -> ConvProblem:
    return conv_case(n, c, h, w, c * multiplier, r, s, groups=c, **how)


SAME = {"pad": (1, 1, 1, 1), "bias": True}
DEPTHWISE: dict[str, Problem] = {
    "depthwise_3x3": depthwise(2, 32, 18, 21, 3, 3, **SAME, act=RELU),
    "depthwise_stride": depthwise(1, 48, 23, 17, 3, 3, **SAME, stride=(2, 2), residual=True, act=RELU),
    "depthwise_5x5": depthwise(1, 24, 13, 12, 5, 5, pad=(2, 2, 2, 2), act=SIGMOID),
    "depthwise_7x7": depthwise(1, 72, 7, 7, 7, 7, pad=(3, 3, 3, 3), bias=True, residual=True),
    "depthwise_dilated": depthwise(1, 20, 19, 26, 3, 3, pad=(4, 2, 4, 2), dilation=(4, 2)),
    "depthwise_asymmetric": depthwise(2, 9, 14, 23, 2, 5, stride=(3, 2), pad=(0, 4, 1, 2), dilation=(2, 3), bias=True),
    "depthwise_larger_dilation": depthwise(1, 16, 4, 5, 3, 3, pad=(6, 6, 6, 6), dilation=(6, 6), bias=True),
    **{f"depthwise_x{m}": depthwise(1, 21, 6, 9, 3, 3, m, **SAME, act=PRELU) for m in (2, 3, 4, 5, 8, 11)},
    **{f"depthwise_{a.name}": depthwise(1, 12, 9, 3, 3, 1, bias=True, residual=True, act=a) for a in ACTS},
    "depthwise_tail": depthwise(2, 20, 9, 7, 3, 3, **SAME, act=PRELU, **TAILS[""]),
    "depthwise_87_columns": depthwise(1, 20, 1, 61, 1, 87, pad=(0, 86, 0, 86), dilation=(1, 2), bias=True, act=RELU),
    "depthwise_x2_of_37_columns": depthwise(
        2, 10, 12, 40, 3, 37, 2, stride=(2, 3), pad=(1, 18, 1, 17), bias=True, act=PRELU, residual=True
    ),
    "depthwise_51x51": depthwise(1, 16, 9, 20, 51, 51, pad=(25, 25, 25, 25), act=SIGMOID, **TAILS["_after_residual"]),
}

_AVERAGE = PoolProblem(2, 20, 8, 7, "avg", 3, 3, (8, 7), pad=(1, 1, 1, 1))
_SCALED = (Stage("sub", "t1"), Stage("mul", "c0"), Stage("add", "t2"))
_LAYER_NORM = NormalizeProblem(2, 19, 3, 40, "standard", "w", epsilon=1e-5, affine="w")
CHAINED: dict[str, Problem] = {
    "pool_and_chain": ChainedProblem(_AVERAGE, PointwiseProblem(2, 20, 8, 7, _SCALED, ("nchw",) * 3, ("c",))),
    "pool_and_rows": ChainedProblem(
        PoolProblem(1, 24, 9, 8, "max", 2, 3, (8, 6)),
        PointwiseProblem(1, 24, 8, 6, (Stage("mul", "t1"), Stage("gelu"), Stage("sub", "t0")), ("nchw", "nh")),
    ),
    "norm_and_chain": ChainedProblem(
        ROWS["group_norm"],
        PointwiseProblem(2, 32, 5, 4, (Stage("silu"), Stage("add", "t1")), ("nchw", "nchw")),
    ),
    "norm_and_gate": ChainedProblem(
        ROWS["instance_norm"],
        PointwiseProblem(2, 20, 9, 11, (Stage("relu"), Stage("mul", "t1")), ("nchw", "nc")),
    ),
    "norm_parts_and_chain": ChainedProblem(
        ROWS["group_norm_parts"],
        PointwiseProblem(2, 20, 31, 29, _SCALED, ("nchw",) * 3, ("c",)),
    ),
    "layer_norm_and_chain": ChainedProblem(
        _LAYER_NORM,
        PointwiseProblem(2, 19, 3, 40, (Stage("gelu"), Stage("mul", "c0"), Stage("add", "t1")), ("nchw",) * 2, ("w",)),
    ),
    "layer_norm_and_rows": ChainedProblem(
        _LAYER_NORM,
        PointwiseProblem(2, 19, 3, 40, (Stage("mul", "c0"), Stage("add", "t1")), ("nchw", "nh"), ("ch",)),
    ),
    "added_norm_and_chain": ChainedProblem(
        ROWS["group_norm_parts_added"],
        PointwiseProblem(2, 20, 31, 29, _SCALED, ("nchw",) * 3, ("c",)),
    ),
    "softmax_and_chain": ChainedProblem(
        ROWS["softmax"],
        PointwiseProblem(2, 21, 5, 4, (Stage("rsub", params=(1.0,)), Stage("mul", "t0")), ("nchw",)),
    ),
}
_BETWEEN = conv_case(1, 32, 9, 7, 48, 3, 3, pad=(1, 1, 1, 1), bias=True, act=RELU)
_HIDDEN = conv_case(2, 40, 1, 1, 12, 1, 1, bias=True, act=RELU)
_GATES = conv_case(2, 12, 1, 1, 40, 1, 1, bias=True, act=SIGMOID)
# fmt: off
JOINED: dict[str, Problem] = {  # more than one layer per launch
    "stem_pooled": conv_case(
        1, 3, 37, 45, 64, 7, 7, (2, 2), (3, 3, 3, 3), bias=True, act=RELU, pool=MaxPool((3, 3), (2, 2), (1, 1), (10, 12)),
    ),
    "prologue": conv_case(2, 72, 7, 9, 40, 1, 1, bias=True, act=RELU, sparse24=True, scaled=True),
    "norm_in_front": conv_case(2, 72, 7, 9, 40, 1, 1, bias=True, act=Activation("gelu"), sparse24=True, norm=1e-6),
    "back_to_back": BackToBackProblem(_BETWEEN, conv_case(1, 48, 9, 7, 72, 1, 1, bias=True, residual=True, act=PRELU)),
    "attention_tokens": AttentionProblem(
        2, 2, 9, 9, 16, 16, ((18, 96, 1, 1),), (18, 32, 1, 1), *(Operand(0, 32 * i, (864, 16, 96, 1)) for i in range(3)),
        Operand(1, 0, (288, 16, 32, 1)), bias="chw",
    ),
    "attention_channels": AttentionProblem(
        2, 3, 8, 8, 20, 20, ((40, 72, 1, 1),), (40, 24, 1, 1), *(Operand(0, 24 * i, (1440, 8, 1, 72)) for i in range(3)),
        Operand(1, 0, (480, 8, 1, 24)), unit=True, epsilon=1e-12,
    ),
    "grouped_tail": conv_case(2, 36, 9, 7, 36, 3, 3, **SAME, groups=6, act=PRELU, **TAILS[""]),
    "stem_tail": conv_case(1, 3, 20, 21, 33, 3, 3, (2, 2), (1, 1, 1, 1), bias=True, act=PRELU, **TAILS[""]),
    "squeeze_excite": SqueezeExciteProblem(PoolProblem(2, 40, 30, 26, "avg", 30, 26, (1, 1)), _HIDDEN, _GATES),
    **{
        f"scaled_{groups}": ScaledConvProblem(
            conv_case(2, 40, 30, 26, 40, 3, 3, **SAME, groups=groups, act=RELU),
            SqueezeExciteProblem(PoolProblem(2, 40, 30, 26, "avg", 30, 26, (1, 1)), _HIDDEN, _GATES), RELU,
        )
        for groups in (40, 5)
    },
}
# fmt: on

PROBLEMS = EVERY_TACTIC | CONVS | DEPTHWISE | OTHERS | CHAINED | JOINED


def pairs(device: Device, per_conv: int = 6) -> list[tuple[str, Problem, Tactic]]:
    """Returns (case, problem, tactic) triples: for CONVS, DEPTHWISE and JOINED `per_conv` drawn tactics, dense and sparse each;
    for all other problems all tactics; and for each problem the tactics with FP32 tensors only.
    """
    result = []
    for name, problem in PROBLEMS.items():
        tactics = candidates(problem, device)
        if name in CONVS | DEPTHWISE | JOINED:
            families = [t for t in tactics if not t.sparse], [t for t in tactics if t.sparse]
            tactics = tuple(t for f in families for t in random.Random(name).sample(f, min(per_conv, len(f))))
        tactics = *tactics, *candidates(problem, device, ("fp32",) * (len(problem.in_shapes) + 1))
        result += [(name, problem, tactic) for tactic in tactics]
    return result


def check(problem: Problem, tactic: Tactic, device: Device, **options):
    """Runs a tactic in the emulator on random data and returns (output with padded channels, emulator.Stats of the last
    launch).

    Raises AssertionError if the output differs from the reference. `options`: of the emulator.
    """
    inputs, weights = random_data(problem, formats=tactic.ins)
    gpu = Emulated(device, **options)
    got = execute(gpu, problem, tactic, inputs, weights)
    assert_right(problem, tactic, got, reference(problem, inputs, weights))
    return got, gpu.stats[-1]


class _Tracked(Emulated):
    """An emulated GPU that counts how often each byte of its newest allocation is written; `execute` allocates the output
    last."""

    def allocate(self, nbytes: int, constant: bool = False) -> int:
        self.newest = super().allocate(nbytes, constant)
        return self.newest

    def launch(self, *args) -> None:
        self._options = replace(self._options, track_writes=(self.newest,))
        super().launch(*args)


def assert_written_once(problem: Problem, tactic: Tactic, device: Device, inputs, weights) -> None:
    """Raises AssertionError unless each byte of the output, padding included, is stored exactly once."""
    gpu = _Tracked(device)
    execute(gpu, problem, tactic, inputs, weights)
    counts = sum(s.writes[gpu.newest].astype(int) for s in gpu.stats)
    assert (counts == 1).all(), f"{tactic.name}: {(counts == 0).sum()} bytes never, {(counts > 1).sum()} more than once"


def assert_right(problem: Problem, tactic: Tactic, got: np.ndarray, expected: np.ndarray) -> float:
    """Returns the relative error of an output of `execute`. Raises AssertionError if an element was not written, padding is not
    zero, or the error is not below TOLERANCE.
    """
    c = problem.out_shape[1]
    assert got.shape[1] == padded_channels(tactic.out.layout, c)
    assert not np.isnan(got).any(), f"{np.isnan(got).sum()} of {got.size} elements are NaN or were never written"
    assert not got[:, c:].any(), "padded channels are not zero"
    error = relative_error(got[:, :c], np.asarray(expected, np.float32))
    assert error < TOLERANCE, f"relative error {error:.2e} of the output's range"
    return error


def sanitize_cases(device: Device) -> list[tuple[str, Problem, Tactic]]:
    """Returns (case, problem, tactic) triples: for each kernel and tile a small problem with linear tensors only, and one with
    vector formats only.
    """
    seen, result = set(), []
    for name, problem, tactic in pairs(device, per_conv=1):
        sides = {linear(f) for f in (*tactic.ins, tactic.out)}
        key = tactic.kernel, tactic.tile, *sides
        if (name == "conv" or name not in EVERY_TACTIC | CONVS) and len(sides) == 1 and key not in seen:
            seen.add(key)
            result.append((name, problem, tactic))
    return result


def main() -> int:
    """Runs sanitize_cases on the GPU, each buffer in its own allocation; returns the exit status."""
    import cupy

    from cuda_kernels.device import current
    from cuda_kernels.launch import Cuda

    cupy.cuda.set_allocator(None)  # no pool: the sanitizer sees every buffer's end
    device = current()
    gpu = Cuda(device)
    cases = sanitize_cases(device)
    for name, problem, tactic in cases:
        inputs, weights = random_data(problem)
        assert_right(problem, tactic, execute(gpu, problem, tactic, inputs, weights), reference(problem, inputs, weights))
        print(f"{name}: {tactic.name}")
    print(f"{len(cases)} tactics ran")
    return 0


if __name__ == "__main__":
    sys.exit(main())
