"""The pointwise kernel: chains of elementwise stages over tensors that may be broadcast."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from math import prod

import numpy as np

from cuda_kernels.device import Device
from tactics.format import HALF_FORMATS, LAYOUTS, Format, Strides, canonical, num_bytes, num_elements, padded_channels, strides
from tactics.problems.pointwise_ops import CODES, INSTRUCTIONS, MAX_SOURCES, MAX_STAGES
from tactics.problems.problem import PointwiseProblem
from tactics.roofline import streamed
from tactics.step import (
    NONFINITE,
    Args,
    Launch,
    constant_bytes,
    constant_section,
    constant_strides,
    floats,
    grid,
    ints,
    launch,
    linear,
    member,
    own_strides,
    spread_args,
    view_args,
)
from tactics.tactic import Tactic

TENSOR, TENSOR_ONE_CHANNEL, CONSTANT, CONSTANT_ONE_CHANNEL = 1, 2, 3, 4  # kinds of sources, as in pointwise.cu
TENSOR_F32, TENSOR_F32_ONE_CHANNEL = 5, 6


def candidates(problem: PointwiseProblem, device: Device) -> Iterator[tuple[Tactic, str]]:
    """Whole tensors share the output's format; one that is broadcast may have it too, or hwc8, or chw."""
    for out in HALF_FORMATS:
        ways = []
        for axes in problem.tensors:
            others = dict.fromkeys((out, Format("fp16", "hwc8"), Format("fp16", "chw")))
            vectors = "c" in axes and not linear(out)
            ways.append([f for f in others if not (vectors and linear(f))] if axes != "nchw" else [out])
        for ins in product(*ways):
            yield Tactic("pointwise", None, ins, out), _reason(problem, (*ins, out))


def _reason(p: PointwiseProblem, formats: tuple[Format, ...]) -> str:
    if len(p.stages) > MAX_STAGES or len(p.tensors) + len(p.constants) > MAX_SOURCES:
        return f"a chain of more than {MAX_STAGES} stages or {MAX_SOURCES} tensors and constants"
    shapes = (*p.in_shapes, p.out_shape)
    if any(num_elements(f, s) >= 2**31 for f, s in zip(formats, shapes, strict=True)):
        return "a tensor of 2^31 elements or more: they are counted in 32 bits"
    return ""


def _is_flat(p: PointwiseProblem, fmt: Format) -> bool:
    """Whether no stage asks which channel or pixel an element is, so that linear tensors are vectors of 8 all the same."""
    return linear(fmt) and set(p.tensors) == {"nchw"} and not p.constants and prod(p.out_shape) % 8 == 0


def _long_axes(p: PointwiseProblem, axes: str) -> str:
    """The axes without those of one element, along which nothing needs a stride."""
    return "".join(a for a, d in zip("nchw", p.out_shape, strict=True) if a in axes and d > 1)


def _tensors(p: PointwiseProblem) -> list[str]:
    return [a if a == "nchw" else _long_axes(p, a) for a in p.tensors]


def _constants(p: PointwiseProblem) -> list[str]:
    return [_long_axes(p, a) for a in p.constants]


def _sources(p: PointwiseProblem, tactic: Tactic, strided: tuple[Strides, ...], rows: bool) -> tuple[list[Args], list[int]]:
    """(arguments of the kernel's struct Source, kind) of each tensor, then of each constant."""
    sources: list[Args] = []
    kinds: list[int] = []
    for i, axes in enumerate(_tensors(p)):
        sources.append({"at": ("in", i)} | spread_args("spread", strided[i], axes, p.span(axes)[3], rows))
        whole, half = "c" in axes, tactic.ins[i].dtype == "fp16"
        kinds.append((TENSOR if whole else TENSOR_ONE_CHANNEL) if half else TENSOR_F32 if whole else TENSOR_F32_ONE_CHANNEL)
    for i, axes in enumerate(_constants(p)):
        shape = p.span(axes)
        sources.append({"at": ("weights", f"c{i}")} | spread_args("spread", constant_strides(shape), axes, shape[3], rows))
        kinds.append(CONSTANT if "c" in axes else CONSTANT_ONE_CHANNEL)
    return sources, kinds


def _chain(p: PointwiseProblem, kinds: list[int]) -> dict[str, int]:
    """The stages and the kinds of their sources as the digits that the kernel unpacks."""
    names = ["", *(f"t{i}" for i in range(len(p.tensors))), *(f"c{i}" for i in range(len(p.constants)))]
    return {
        "OPS": sum(CODES[s.op] * 100**i for i, s in enumerate(p.stages)),
        "OPERANDS": sum(names.index(s.operand) * 10**i for i, s in enumerate(p.stages)),
        "SOURCES": sum(kind * 10**i for i, kind in enumerate(kinds)),
    }


def launches(problem: PointwiseProblem, tactic: Tactic, strided: tuple[Strides, ...] | None = None) -> tuple[Launch, ...]:
    p, fmt, alone = problem, tactic.out, strided is None
    strided = strided or own_strides(problem, tactic)
    if _is_flat(p, fmt) and alone and {f.dtype for f in (*tactic.ins, fmt)} == {"fp16"}:
        p, fmt = replace(p, n=1, c=prod(p.out_shape), h=1, w=1), Format("fp16", "hwc8")
        strided = (strides(fmt, p.out_shape),) * len(strided)
    cp, v = padded_channels(fmt.layout, p.c), LAYOUTS[fmt.layout].vector
    vec = 1 if linear(fmt) else 8
    if vec == 1 or canonical(fmt, p.out_shape).planes:
        inner, blocks = v // vec, cp // v
    else:
        inner, blocks, v = cp // vec, 1, cp
    spans = (*_tensors(p), *_constants(p))
    rows = p.h > 1 < p.w and any(("h" in a) != ("w" in a) for a in spans)
    sources, kinds = _sources(p, tactic, strided, rows)
    values = {"VEC": vec, "ROWS": int(rows), **_chain(p, kinds), **({"Y_F32": 1} if fmt.dtype == "fp32" else {})}
    total = p.n * cp * p.h * p.w // vec
    args = {"nonfinite": NONFINITE, "y": ("out", 0)} | view_args("out", strided[-1])
    for i, source in enumerate(sources):
        args |= member(f"source[{i}]", source)
    args |= ints(total=total, inner=inner, pixels=p.h * p.w, blocks=blocks, v=v, c=p.c, w=p.w if rows else p.h * p.w)
    for i, params in enumerate([s.params for s in p.stages] or [()]):
        args |= floats(**{f"param[{i}][{j}]": x for j, x in enumerate((*params, 0.0, 0.0)[:2])})
    return (launch("pointwise", values, grid(total), 256, 0, args),)


def pack(problem: PointwiseProblem, tactic: Tactic, weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Constants as FP32 in the order n, h, w, c."""
    return {f"c{i}": constant_section(weights[f"c{i}"], problem.span(a)) for i, a in enumerate(problem.constants)}


def section_bytes(problem: PointwiseProblem, tactic: Tactic) -> dict[str, int]:
    """Bytes of the sections that `pack` makes."""
    return {f"c{i}": constant_bytes(problem.span(a)) for i, a in enumerate(problem.constants)}


def predict(problem: PointwiseProblem, tactic: Tactic, device: Device) -> dict[str, float | str]:
    """Each tensor travels once; an element costs its stages, and an access costs the more the narrower it is."""
    read = sum(num_bytes(f, s) for f, s in zip(tactic.ins, problem.in_shapes, strict=True))
    written = num_bytes(tactic.out, problem.out_shape)
    elements = num_elements(tactic.out, problem.out_shape)
    single = linear(tactic.out) and not _is_flat(problem, tactic.out)
    access = 30 + 15 * (len(problem.tensors) + len(problem.constants))  # positions, addresses, conversions
    work = elements * (access / (1 if single else 8) + sum(INSTRUCTIONS.get(s.op, 2) for s in problem.stages))
    return streamed(device, launches(problem, tactic), read, written, work)
