"""A chain of elementwise stages as kernels take it (cuda_kernels/include/stages.cuh): compile-time digits, sources, scalars."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product

import numpy as np

from tactics.format import WHOLE, Format, Strides
from tactics.problems.pointwise_ops import CODES, MAX_SOURCES, MAX_STAGES, POINTWISE
from tactics.problems.problem import PointwiseProblem
from tactics.step import NULL, Args, constant_bytes, constant_section, constant_strides, floats, linear, member, spread_args

TENSOR, TENSOR_ONE_CHANNEL, CONSTANT, CONSTANT_ONE_CHANNEL = 1, 2, 3, 4  # kinds of sources, as in stages.cuh
TENSOR_F32, TENSOR_F32_ONE_CHANNEL, RESULT = 5, 6, 7
OF_BYTES = {"int8": 8, "uint8": 9}
FEW = 32  # channels of a pixel: then a warp that reads planes touches half a sector or more of each
NOWHERE = Strides(0, 0, 0, 0)  # of a tensor that is not in memory


def reason_against(p: PointwiseProblem) -> str:
    """Why no kernel runs the chain, or ""."""
    if len(p.stages) > MAX_STAGES or len(p.tensors) + len(p.constants) + bool(p.table) > MAX_SOURCES:
        return f"a chain of more than {MAX_STAGES} stages or {MAX_SOURCES} tensors and constants"
    return ""


def _long_axes(p: PointwiseProblem, axes: str) -> str:
    """The axes without those of one element, which need no stride."""
    return "".join(a for a, d in zip("nchw", p.out_shape, strict=True) if a in axes and d > 1)


def tensors(p: PointwiseProblem) -> list[str]:
    """Returns, for each tensor, the axes along which it needs strides."""
    return [a if a == "nchw" else _long_axes(p, a) for a in p.tensors]


def needs_rows(p: PointwiseProblem) -> bool:
    """Whether the kernel must split a pixel into row and column: a source spans one of the axes h and w without the other."""
    spans = (*tensors(p), *(_long_axes(p, a) for a in p.constants))
    return p.h > 1 < p.w and any(("h" in a) != ("w" in a) for a in spans)


def formats(p: PointwiseProblem, out: Format, result: bool = False) -> list[list[Format]]:
    """For each tensor, the formats that it may have with an output in `out`.

    Whole tensors have the same format; a broadcast one may also be hwc8 or chw, where vectors fit. `result`: leaves out tensor
    0, which the kernel computes itself.
    """
    ways = []
    for axes in p.tensors[int(result) :]:
        others = dict.fromkeys((out, Format("fp16", "hwc8"), Format("fp16", "chw")))
        vectors = "c" in axes and not linear(out)
        ways.append([f for f in others if not (vectors and linear(f))] if axes != "nchw" else [out])
    return ways


def byte_formats(p: PointwiseProblem, dtypes: Sequence[str], layout: str) -> Iterator[tuple[list[Format], Format]]:
    """Yields (formats of the tensors, format of the output) of which at least one is of bytes in this layout of vectors.

    `dtypes`: of each tensor, then of the output; "int8" or "uint8": it may be FP16 or that. A chain to bytes from one
    whole tensor of few channels, such as an image, also reads it from planes of channels, as FP16 or FP32.
    """
    half = Format("fp16", "hwc8" if layout == "hwc16" else layout)
    ways = []
    for halves, axes, dtype in zip((*formats(p, half), [half]), (*tensors(p), "nchw"), dtypes, strict=True):
        own = [Format(dtype, layout)] if dtype in WHOLE and "c" in axes else []
        ways.append(own if dtype == "fp32" else halves + own)
    *ins, outs = ways
    if p.tensors == ("nchw",) and p.c <= FEW:
        planes = [Format("fp32", "chw"), *([Format("fp16", "chw")] if dtypes[0] != "fp32" else [])]
        yield from (([x], y) for x, y in product(planes, outs) if y.dtype in WHOLE)
    for *xs, y in product(*ins, outs):
        if any(f.dtype in WHOLE for f in (*xs, y)):
            yield xs, y


def values(p: PointwiseProblem, ins: Sequence[Format], result: bool = False) -> dict[str, int]:
    """Returns the compile-time values of the chain: the numbers of its stages, and of the kinds of their sources, as the digits
    that the kernel unpacks. `ins`: the tensors' formats; `result`: the kernel computes tensor 0 itself.
    """
    kinds = []
    for i, axes in enumerate(tensors(p)):
        whole, dtype = "c" in axes, ins[i].dtype
        one = TENSOR_ONE_CHANNEL if dtype == "fp16" else TENSOR_F32_ONE_CHANNEL
        kinds.append(OF_BYTES.get(dtype, TENSOR if dtype == "fp16" else TENSOR_F32) if whole else one)
    bytes_ = {"BYTES": 1} if {*kinds} & {*OF_BYTES.values()} else {}
    if result:
        kinds[0] = RESULT
    kinds += [CONSTANT if "c" in _long_axes(p, a) else CONSTANT_ONE_CHANNEL for a in (*p.constants, *[""][: len(p.table)])]
    names = ["", *(f"t{i}" for i in range(len(p.tensors))), *(f"c{i}" for i in range(len(p.constants))), "table"]
    operands = ["table" if s.op == "table" else s.operand for s in p.stages]
    return {
        "OPS": sum(CODES[s.op] * 100**i for i, s in enumerate(p.stages)),
        "OPERANDS": sum(names.index(name) * 10**i for i, name in enumerate(operands)),
        "SOURCES": sum(kind * 10**i for i, kind in enumerate(kinds)),
        **bytes_,
        **({"TABLE": 1} if p.table else {}),
    }


def args(p: PointwiseProblem, strided: Sequence[Strides], rows: bool, first: int | None = None) -> Args:
    """The kernel arguments of sources and scalars, for tensors with these strides.

    `first`: the input number of tensor 1, where the kernel computes tensor 0 itself; `rows`: whether it splits pixels into rows
    and columns.
    """
    sources: list[Args] = []
    for i, axes in enumerate(tensors(p)):
        if first is not None and i == 0:
            sources.append({"at": NULL} | spread_args("spread", NOWHERE, "", 1, rows))
            continue
        at = i if first is None else first + i - 1
        sources.append({"at": ("in", at)} | spread_args("spread", strided[i], axes, p.span(axes)[3], rows))
    for i, spanned in enumerate(p.constants):
        axes = _long_axes(p, spanned)
        shape = p.span(axes)
        sources.append({"at": ("weights", f"c{i}")} | spread_args("spread", constant_strides(shape), axes, shape[3], rows))
    if p.table:
        sources.append({"at": ("weights", "table")} | spread_args("spread", NOWHERE, "", 1, rows))
    found: Args = {}
    for i, source in enumerate(sources):
        found |= member(f"source[{i}]", source)
    for i, params in enumerate([s.params for s in p.stages] or [()]):
        found |= floats(**{f"param[{i}][{j}]": x for j, x in enumerate((*params, 0.0, 0.0)[:2])})
    return found


def pack(p: PointwiseProblem, weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Packs the constants as FP32 in the order n, h, w, c."""
    return {f"c{i}": constant_section(weights[f"c{i}"], p.span(a)) for i, a in enumerate(p.constants)}


def section_bytes(p: PointwiseProblem) -> dict[str, int]:
    """Bytes of the sections that `pack` makes."""
    return {f"c{i}": constant_bytes(p.span(a)) for i, a in enumerate(p.constants)}


def instructions(p: PointwiseProblem, vec: int, sources: int) -> float:
    """Instructions per element: the stages, and accesses of `vec` elements each to `sources` tensors and constants (positions,
    addresses, conversions).
    """
    return 15 * sources / vec + sum(POINTWISE[s.op].instructions for s in p.stages)
