"""Which module knows a kernel, and which modules may have tactics for a problem. Two tables; a new family is a line in each.

A family has candidates(problem, device), launches(problem, tactic), pack(problem, tactic, weights), section_bytes(problem,
tactic), the sizes of what pack makes, and predict(problem, tactic, device). The launches of kernels in STRIDED take the
strides of inputs and output as `strided`, so that their tensors may lie inside others.
"""

from types import ModuleType

from tactics.families import (
    array_function,
    back_to_back,
    conv_depthwise,
    conv_fp32,
    conv_gemm,
    conv_grouped,
    conv_stem,
    conv_transpose,
    gather,
    matmul,
    movement,
    pointwise,
    reduce,
    squeeze_excite,
)
from tactics.families.attention import channels, tokens
from tactics.families.strips import conv_strip
from tactics.problems.attention import AttentionProblem
from tactics.problems.gather import GatherProblem, ResizeProblem, ViewProblem
from tactics.problems.library_problem import LibraryProblem
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
    ReformatProblem,
    SqueezeExciteProblem,
)
from tactics.problems.protocol import Feature
from tactics.problems.reductions import NormalizeProblem, ReduceProblem

OF_KERNEL = {
    "conv_stem": conv_stem, "conv_depthwise": conv_depthwise, "conv_grouped": conv_grouped,
    "conv_dense": conv_gemm, "conv_sparse24": conv_gemm, "conv_strip": conv_strip, "conv_strip_sparse24": conv_strip,
    "conv_back_to_back": back_to_back, "transpose_dense": conv_transpose, "transpose_sparse24": conv_transpose,
    "transpose_grouped": conv_transpose, "transpose_depthwise": conv_transpose,
    "conv_fp32": conv_fp32, "transpose_fp32": conv_transpose,
    "move": movement, "pointwise": pointwise, "pool": movement, "pool_global": movement, "reduce": reduce,
    "gather": gather, "squeeze_excite": squeeze_excite, "resize": gather, "matmul": matmul, "matmul_fp32": matmul,
    "attention": tokens, "cross_covariance": channels, "library": array_function,
}  # fmt: skip
OF_PROBLEM = {
    ConvProblem: (conv_gemm, conv_strip, conv_stem, conv_depthwise, conv_grouped), ConvTransposeProblem: (conv_transpose,),
    BackToBackProblem: (back_to_back,), SqueezeExciteProblem: (squeeze_excite,), PoolProblem: (movement,),
    PointwiseProblem: (pointwise,), MoveProblem: (movement,),
    ConcatProblem: (movement, gather), ReduceProblem: (reduce,), NormalizeProblem: (reduce,),
    ChainedProblem: (movement, reduce), ReformatProblem: (movement,),
    ViewProblem: (), GatherProblem: (gather,), ResizeProblem: (gather,), MatmulProblem: (matmul,),
    AttentionProblem: (tokens, channels), LibraryProblem: (array_function,),
}  # fmt: skip
EPILOGUE = frozenset({Feature.RESIDUAL, Feature.AFFINE, Feature.LAST_ACTIVATION})  # what every convolution can
# What the kernels of a family can do beside its computation: where a problem needs more, the difference is the logged reason.
SUPPORTS: dict[ModuleType, frozenset[Feature]] = {
    conv_gemm: frozenset(Feature) - {Feature.MAX_POOL},
    conv_stem: EPILOGUE | {Feature.MAX_POOL},
    conv_fp32: EPILOGUE | {Feature.DEPTH_TO_SPACE},
    **dict.fromkeys((conv_strip, conv_depthwise, conv_grouped, conv_transpose), EPILOGUE),
    **dict.fromkeys((back_to_back, squeeze_excite, tokens, channels, gather, array_function), frozenset()),
    **dict.fromkeys((matmul, movement, pointwise, reduce), frozenset()),
}
TABLES = (conv_stem, gather)  # what has sections that follow from the problem alone
STRIDED = (
    "conv_stem", "conv_depthwise", "conv_grouped", "conv_dense", "conv_sparse24", "conv_strip", "conv_strip_sparse24",
    "transpose_dense", "transpose_sparse24", "transpose_grouped", "transpose_depthwise", "conv_fp32", "transpose_fp32", "move",
    "pointwise", "pool", "pool_global", "reduce", "gather", "resize", "attention", "cross_covariance",
)  # fmt: skip
# Of these, the convolutions: they read a residual with strides of its own.
STRIDED_RESIDUAL = tuple(kernel for kernel in STRIDED if kernel.startswith(("conv_", "transpose_")))
