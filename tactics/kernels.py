"""The table of all kernels that a tactic may name: the problems that each computes and the features that it supports.

A new kernel is a row here and a file in tactics/families, its family, with

    candidates(problem, device)       each tactic with the reason against it, or ""
    launches(problem, tactic)         its launches; of `placed` kernels also with the strides of inputs and output, `strided`
    counts(problem, tactic, device)   its bytes and computations, from which tactics.roofline makes a time
    CASES                             kernel -> small problems, on which gpu-runtime doctor runs it
    pack(problem, tactic, weights)    its weights as the kernel reads them, where it has any
    section_bytes(problem, tactic)    the sizes of the sections that pack makes
    tables(problem, tactic)           of kernels with `tables`: the sections that follow from the problem alone
"""

from dataclasses import dataclass
from typing import Literal

from tactics.problems.attention import AttentionProblem
from tactics.problems.gather import GatherProblem, ResizeProblem
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
    Problem,
    ReformatProblem,
    ScaledConvProblem,
    SqueezeExciteProblem,
)
from tactics.problems.protocol import Feature
from tactics.problems.reductions import NormalizeProblem, ReduceProblem

HMMA, SPARSE_HMMA = "hmma_16816", "hmma_sp_16832"
IMMA, SPARSE_IMMA = "imma_16832", "imma_sp_16864"  # of bytes
HGMMA, SPARSE_HGMMA = "hgmma_64n16", "hgmma_sp_64n32"  # wgmma, as machine code calls it
EPILOGUE = frozenset({Feature.RESIDUAL, Feature.AFFINE, Feature.LAST_ACTIVATION, Feature.TABLE})  # of every convolution
NOTHING: frozenset[Feature] = frozenset()
GEMM = frozenset(Feature) - {Feature.MAX_POOL}
SM90 = GEMM - {Feature.BORDER, Feature.MULTIPLIED, Feature.RESIDUAL_MULTIPLIED}
BYTES = EPILOGUE | {Feature.MULTIPLIED, Feature.RESIDUAL_MULTIPLIED, Feature.BORDER}


@dataclass(frozen=True, slots=True)
class Kernel:
    """A row: `family`: the module in tactics.families; `problems`: those it computes on FP16 tensors, `fp32`: those on FP32
    ones, `whole`: those of whose tensors some are bytes of whole numbers.

    `tile`: "tile" of a product on tensor cores, "patch" of a depthwise convolution, "parts" of images, or ""; `mark`: its
    instruction in a tactic's name, as TensorRT's names have it, where tools look for "hmma". `supports`: its optional features.
    `any_input`, `any_output`: it takes strides at run time, so that as hwc8 it reads (writes) every FP16 layout of V >= 8, as
    chw every one of V < 8. `fp32_output`: it also writes FP32, in linear memory, from linear inputs or from any. `placed`: its
    tensors may lie inside others. `tables`: sections that follow from the problem alone. `sm`: the only architecture that has
    its instructions, or "". `launches`: the .cu files that it launches, if not the one of its own name.
    """

    name: str
    family: str
    problems: tuple[type[Problem], ...] = ()
    fp32: tuple[type[Problem], ...] = ()
    tile: Literal["", "tile", "patch", "parts"] = ""
    mark: str = ""
    supports: frozenset[Feature] = NOTHING
    any_input: bool = False
    any_output: bool = False
    fp32_output: Literal["", "linear", "any"] = ""
    placed: bool = True
    tables: bool = False
    sm: str = ""
    launches: tuple[str, ...] = ()
    whole: tuple[type[Problem], ...] = ()

    @property
    def sources(self) -> tuple[str, ...]:
        """The .cu files that it launches, by name."""
        return self.launches or (self.name,)

    @property
    def sparse(self) -> bool:
        """Whether it skips the zeros of 2:4 weights."""
        return self.mark in (SPARSE_HMMA, SPARSE_HGMMA, SPARSE_IMMA)

    @property
    def placed_residual(self) -> bool:
        """Whether the kernel reads a residual with strides of its own, as convolutions do."""
        return self.placed and self.name.startswith(("conv_", "transpose_"))


def _conv(
    name: str, family: str, problem: type[Problem] = ConvProblem, supports: frozenset[Feature] = EPILOGUE, *launches: str
) -> Kernel:
    """A row for a convolution on tensor cores in any layout; `launches` as in Kernel."""
    mark = SPARSE_HMMA if name.endswith("sparse24") else HMMA
    return Kernel(name, family, (problem,), (), "tile", mark, supports, True, True, "any", launches=launches)


# Families of one problem in the order in which their candidates are named.
# fmt: off
ROWS = (
    _conv("conv_dense", "conv_gemm", supports=GEMM),
    _conv("conv_sparse24", "conv_gemm", supports=GEMM),
    *(Kernel(f"{name}_int8", "conv_bytes", (), (), "tile", mark, BYTES, launches=(name,), whole=(ConvProblem,))
      for name, mark in (("conv_dense", IMMA), ("conv_sparse24", SPARSE_IMMA))),
    *(Kernel(name, "hopper.conv_wgmma", (ConvProblem,), (), "tile", mark, SM90, False, True, "any",
             sm="sm_90a") for name, mark in (("conv_dense_sm90", HGMMA), ("conv_sparse24_sm90", SPARSE_HGMMA))),
    _conv("conv_strip", "strips.conv_strip"),
    _conv("conv_strip_sparse24", "strips.conv_strip"),
    Kernel("conv_stem", "conv_stem", (ConvProblem,), (), "tile", HMMA, EPILOGUE | {Feature.MAX_POOL}, False, True, "any",
           tables=True),
    Kernel("conv_depthwise", "conv_depthwise", (ConvProblem,), (), "patch", "", EPILOGUE, True, True),
    Kernel("conv_grouped", "conv_grouped", (ConvProblem,), (), "tile", HMMA, EPILOGUE),
    Kernel("conv_back_to_back", "back_to_back", (BackToBackProblem,), (), "tile", HMMA, placed=False),
    _conv("transpose_dense", "conv_transpose", ConvTransposeProblem, EPILOGUE, "conv_dense"),
    _conv("transpose_sparse24", "conv_transpose", ConvTransposeProblem, EPILOGUE, "conv_sparse24"),
    Kernel("transpose_grouped", "conv_transpose", (ConvTransposeProblem,), (), "tile", HMMA, EPILOGUE,
           launches=("conv_grouped",)),
    Kernel("transpose_depthwise", "conv_transpose", (ConvTransposeProblem,), (), "patch", "", EPILOGUE, True, True,
           launches=("conv_depthwise",)),
    Kernel("conv_fp32", "conv_fp32", (), (ConvProblem,), supports=EPILOGUE | {Feature.DEPTH_TO_SPACE}),
    Kernel("transpose_fp32", "conv_transpose", (), (ConvTransposeProblem,), supports=EPILOGUE, launches=("conv_fp32",)),
    Kernel("move", "bandwidth.movement", (MoveProblem, ConcatProblem, ReformatProblem), (MoveProblem, ConcatProblem),
           any_input=True, any_output=True, fp32_output="linear", whole=(MoveProblem, ConcatProblem)),
    Kernel("pointwise", "bandwidth.pointwise", (PointwiseProblem,), (PointwiseProblem,), fp32_output="linear",
           whole=(PointwiseProblem,)),
    Kernel("pool", "bandwidth.movement", (PoolProblem, ChainedProblem), (PoolProblem,), any_input=True, any_output=True,
           fp32_output="linear", whole=(PoolProblem,)),
    Kernel("pool_global", "bandwidth.movement", (PoolProblem, ChainedProblem), any_input=True, any_output=True),
    Kernel("reduce", "bandwidth.reduce", (ReduceProblem, NormalizeProblem, ChainedProblem), (ReduceProblem, NormalizeProblem),
           any_input=True, any_output=True, fp32_output="linear"),
    Kernel("gather", "bandwidth.gather", (GatherProblem, ConcatProblem), (GatherProblem,), any_input=True, any_output=True,
           fp32_output="linear", tables=True),
    Kernel("resize", "bandwidth.gather", (ResizeProblem,), (ResizeProblem,), any_input=True, any_output=True,
           fp32_output="linear", tables=True),
    Kernel("matmul", "matmul", (MatmulProblem,), placed=False),
    Kernel("matmul_fp32", "matmul", (), (MatmulProblem,), placed=False),
    Kernel("squeeze_excite", "squeeze_excite", (SqueezeExciteProblem,), (), "parts", placed=False),
    Kernel("depthwise_scaled", "conv_scaled", (ScaledConvProblem,), (), "patch", placed=False,
           launches=("conv_depthwise", "squeeze_excite")),
    Kernel("grouped_scaled", "conv_scaled", (ScaledConvProblem,), (), "tile", HMMA, placed=False,
           launches=("conv_grouped", "squeeze_excite")),
    Kernel("attention", "attention.tokens", (AttentionProblem,)),
    Kernel("cross_covariance", "attention.channels", (AttentionProblem,)),
    Kernel("library", "array_function", (LibraryProblem,), placed=False),
)
# fmt: on
KERNELS = {kernel.name: kernel for kernel in ROWS}
SPARSE = frozenset(kernel.name for kernel in ROWS if kernel.sparse)  # they skip the zeros of 2:4 weights
OF_FP32 = {problem: kernel for kernel in ROWS for problem in kernel.fp32}  # each problem with FP32 tensors -> its one kernel
ANY_FP16 = ("conv_fp32", "transpose_fp32")  # of FP32 tensors: these take an FP16 tensor in any layout
