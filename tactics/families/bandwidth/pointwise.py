"""The pointwise kernel: chains of elementwise stages over tensors that may be broadcast."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import prod

import numpy as np

from cuda_kernels.device import Device
from tactics import stages
from tactics.format import (
    BYTE_LAYOUTS,
    HALF_FORMATS,
    LAYOUTS,
    Format,
    Strides,
    canonical,
    num_elements,
    padded_channels,
    strides,
    too_large,
)
from tactics.problems.pointwise_ops import Stage
from tactics.problems.problem import PointwiseProblem
from tactics.reason import Candidates, unsupported
from tactics.roofline import Counts, streamed, traffic
from tactics.step import NONFINITE, Launch, byte_values, grid, ints, launch, linear, own_strides, view_args
from tactics.tactic import Tactic, tactic_of

_CHAIN = (Stage("mul", "c0"), Stage("add", "t1"), Stage("relu"))
_WHOLE = (*_CHAIN, Stage("quantize", params=(0.0, 127.0)))
CASES = {"pointwise": tuple(PointwiseProblem(2, 40, 5, 3, of, ("nchw", "nchw"), ("c",)) for of in (_CHAIN, _WHOLE))}


def candidates(problem: PointwiseProblem, device: Device) -> Candidates:
    """Yields (tactic, reason against it or None). Whole tensors share the output's format; a broadcast one may have this
    format, hwc8 or chw.
    """
    for out in HALF_FORMATS:
        for ins in product(*stages.formats(problem, out)):
            why = stages.reason_against(problem) or too_large(problem.all_shapes, (*ins, out))
            yield tactic_of("pointwise", None, ins, out), unsupported(why)


def byte_candidates(problem: PointwiseProblem, dtypes: Sequence[str]) -> Iterator[Tactic]:
    """Yields the tactics with tensors of bytes. `dtypes`: of each input, then of the output; "int8", "uint8": that, or FP16."""
    if stages.reason_against(problem) or too_large(problem.all_shapes):
        return
    for layout in BYTE_LAYOUTS:
        for ins, out in stages.byte_formats(problem, dtypes, layout):
            yield tactic_of("pointwise", None, tuple(ins), out)


def _is_flat(p: PointwiseProblem, fmt: Format) -> bool:
    """Whether no stage depends on an element's channel or pixel, so that linear tensors too are read as vectors of 8."""
    return linear(fmt) and set(p.tensors) == {"nchw"} and not p.constants and prod(p.out_shape) % 8 == 0


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
    rows = stages.needs_rows(p)
    values = {"VEC": vec, "ROWS": int(rows), **stages.values(p, tactic.ins), **({"Y_F32": 1} if fmt.dtype == "fp32" else {})}
    values |= byte_values("Y", fmt) | _planes(p, tactic)
    total = p.n * cp * p.h * p.w // vec
    args = {"nonfinite": NONFINITE, "y": ("out", 0)} | view_args("out", strided[-1]) | stages.args(p, strided, rows)
    args |= ints(total=total, inner=inner, pixels=p.h * p.w, blocks=blocks, v=v, c=p.c, w=p.w if rows else p.h * p.w)
    return (launch("pointwise", values, grid(total), 256, 0, args),)


def _planes(p: PointwiseProblem, tactic: Tactic) -> dict[str, int]:
    """The compile-time value PLANES, where a kernel of vectors reads tensors whose channels lie in planes; else none."""
    bits = sum(1 << i for i, (f, axes) in enumerate(zip(tactic.ins, p.tensors, strict=True)) if linear(f) and "c" in axes)
    return {"PLANES": bits} if bits and not linear(tactic.out) else {}


def pack(problem: PointwiseProblem, tactic: Tactic, weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Packs the constants as FP32 in the order n, h, w, c."""
    return stages.pack(problem, weights)


def section_bytes(problem: PointwiseProblem, tactic: Tactic) -> dict[str, int]:
    """Bytes of the sections that `pack` makes."""
    return stages.section_bytes(problem)


def counts(problem: PointwiseProblem, tactic: Tactic, device: Device) -> Counts:
    """Counts each tensor once; an element costs its stages, and narrower accesses cost more."""
    elements = num_elements(tactic.out, problem.out_shape)
    single = linear(tactic.out) and not _is_flat(problem, tactic.out)
    vec, sources = 1 if single else 8, len(problem.tensors) + len(problem.constants)
    work = elements * (30 / vec + stages.instructions(problem, vec, sources))
    if planes := _planes(problem, tactic):  # an access per channel
        work += 4 * planes["PLANES"].bit_count() * num_elements(Format("fp16", "hwc8"), problem.out_shape)
    return streamed(device, launches(problem, tactic), *traffic(problem.all_shapes, tactic), work)
