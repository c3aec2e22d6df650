"""The reduce kernel, rows of a tensor: reductions along any axes, softmax, and instance, group and layer normalization."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from math import prod

import numpy as np

from cuda_kernels.device import Device
from tactics.format import HALF_FORMATS, Format, Strides, num_bytes, num_elements, padded_channels
from tactics.problems.protocol import spanned
from tactics.problems.reductions import NORMALIZATIONS, REDUCTIONS, NormalizeProblem, ReduceProblem
from tactics.roofline import streamed
from tactics.step import (
    NONFINITE,
    NULL,
    Launch,
    constant_bytes,
    constant_section,
    constant_strides,
    f32_values,
    floats,
    ints,
    launch,
    linear,
    member,
    own_strides,
    spread_args,
)
from tactics.tactic import Tactic

Problem = ReduceProblem | NormalizeProblem
THREADS = 256
NEIGHBOURS = 8  # vectors of channels that a block reads side by side, where rows keep their channels: 128 bytes of a pixel
FEW_ROWS = 1024  # below this many vectors, two side by side: a sector; more blocks are worth more than wider ones
L1_BYTES = 64 * 1024  # a row larger than this comes from L2 in every pass


def candidates(problem: Problem, device: Device) -> Iterator[tuple[Tactic, str]]:
    """Any pair of formats; one that has lost its channels is written as hwc8 or chw."""
    outs = (Format("fp16", "hwc8"), Format("fp16", "chw")) if single_channel(problem) else HALF_FORMATS
    for x, y in product(HALF_FORMATS, outs):
        tactic = Tactic("reduce", None, (x,), y)
        yield tactic, _reason(problem, tactic)


def single_channel(p: Problem) -> bool:
    return isinstance(p, ReduceProblem) and "c" in p.axes


def _reason(p: Problem, tactic: Tactic) -> str:
    if single_channel(p) and linear(tactic.ins[0]) and not linear(tactic.out):
        return "a thread that reads single channels writes single channels, and padding would stay as it was"
    if p.groups > 1 and p.c != padded_channels(tactic.out.layout, p.c):
        return "groups of channels, and padding that belongs to none"
    if any(num_elements(f, s) >= 2**31 for f, s in zip((*tactic.ins, tactic.out), (*p.in_shapes, p.out_shape), strict=True)):
        return "a tensor of 2^31 elements or more: they are counted in 32 bits"
    return ""


def _vector(p: Problem, tactic: Tactic) -> int:
    """Channels per access: vectors on both sides, none of them across two groups."""
    groups = p.groups
    return 1 if linear(tactic.ins[0]) or linear(tactic.out) or (groups > 1 and p.c // groups % 8) else 8


def _sizes(p: Problem, tactic: Tactic) -> tuple[list[int], list[int], bool]:
    """(how many indices each of n, c, h, w has among the rows, and inside one, whether h and w are taken apart)."""
    vec, groups = _vector(p, tactic), p.groups
    n, _, h, w = p.in_shapes[0]
    c = padded_channels(tactic.out.layout if p.out_shape[1] == p.c else tactic.ins[0].layout, p.c) // vec
    affine = p.affine
    apart = ("h" in p.axes) != ("w" in p.axes) or ("h" in affine) != ("w" in affine)
    sizes = (n, c, h, w) if apart else (n, c, 1, h * w)
    inside = [d if a in p.axes else 1 for a, d in zip("nchw", sizes, strict=True)]
    if not apart:
        inside[3] = h * w if "h" in p.axes else 1
    kept = [d // i for d, i in zip(sizes, inside, strict=True)]
    if groups > 1:
        kept[1], inside[1] = groups, c // groups
    return kept, inside, apart


def _lanes(rows: int, elements: int, inner: bool) -> tuple[int, int]:
    """(threads of one row, how far apart they are): neighbouring threads read neighbouring memory."""
    lanes = min(THREADS, 1 << (elements - 1).bit_length())
    if inner:
        return lanes, 1
    lanes = min(lanes, THREADS // (NEIGHBOURS if rows >= FEW_ROWS else 2))
    return lanes, THREADS // lanes


def _flat(p: Problem, tactic: Tactic) -> tuple[Problem, Tactic]:
    """The same rows read as vectors of 8, where the last axes of linear FP16 tensors make them: memory is that of one image
    whose channels are a row's elements and whose pixels are the rows."""
    if not isinstance(p, NormalizeProblem) or p.groups > 1 or not "nchw".endswith(p.axes):
        return p, tactic
    length = prod(p.out_shape[-len(p.axes) :])
    same_constants = p.affine in ("", "w") and p.affine in ("", p.axes)  # of more axes they lie in another order
    if length % 8 or not same_constants or any(str(f) != "fp16:chw" for f in (*tactic.ins, tactic.out)):
        return p, tactic
    rows = prod(p.out_shape) // length
    same = replace(p, n=1, c=length, h=1, w=rows, axes="c", affine="c" if p.affine else "")
    return same, replace(tactic, ins=(Format("fp16", "hwc8"),), out=Format("fp16", "hwc8"))


def launches(problem: Problem, tactic: Tactic, strided: tuple[Strides, ...] | None = None) -> tuple[Launch, ...]:
    p = problem
    if strided is None:
        p, tactic = _flat(problem, tactic)
        strided = own_strides(p, tactic)
    vec, (kept, inside, apart) = _vector(p, tactic), _sizes(p, tactic)
    c_fast = vec == 8 or not linear(tactic.ins[0])
    mix = "c" in p.axes
    rows, elements = prod(kept), prod(inside)
    lanes, step = _lanes(rows, elements, inside[1] > 1 if c_fast else inside[3] > 1)
    values = {"KIND": [*REDUCTIONS, *NORMALIZATIONS].index(p.kind), "VEC": vec, "MIX": int(mix), "C_FAST": int(c_fast),
              **f32_values(tactic.ins[0], tactic.out)}  # fmt: skip
    affine = p.affine
    constant = constant_strides(spanned(p.in_shapes[0], affine)) if affine else Strides(0, 0, 0, 0)
    _, c, h, w = p.in_shapes[0]
    count = prod(d for a, d in zip("nchw", p.in_shapes[0], strict=True) if a in p.axes) // p.groups
    args = {"nonfinite": NONFINITE, "x.at": ("in", 0), "y": ("out", 0)} | spread_args("x.spread", strided[0], "nchw", w, apart)
    args |= {name: ("weights", name) if affine else NULL for name in ("scale", "bias")}
    args |= spread_args("out", strided[-1], "nchw", p.out_shape[3], apart)
    args |= spread_args("affine", constant, affine, spanned(p.in_shapes[0], affine)[3] if affine else 1, apart)
    for name, (n, channel, row, column) in (("kept", kept), ("element", inside)):
        args |= member(name, ints(image=n, channel=channel, row=row, column=column))
    args |= ints(rows=rows, elements=elements, lanes=lanes, lane_step=step, c=c, per_vector="c" in affine)
    args |= floats(count=count, epsilon=p.epsilon)
    return (launch("reduce", values, (-(-rows // (THREADS // lanes)), 1, 1), THREADS, 0, args),)


def pack(problem: Problem, tactic: Tactic, weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Scale and bias as FP32 in the order n, h, w, c."""
    return {name: constant_section(a, spanned(problem.in_shapes[0], problem.affine)) for name, a in weights.items()}


def section_bytes(problem: Problem, tactic: Tactic) -> dict[str, int]:
    """Bytes of the sections that `pack` makes."""
    affine = problem.affine
    return dict.fromkeys(("scale", "bias"), constant_bytes(spanned(problem.in_shapes[0], affine))) if affine else {}


def predict(problem: Problem, tactic: Tactic, device: Device) -> dict[str, float | str]:
    """A pass over the input for each statistic and one for the result; those after the first from L1 where a row fits."""
    steps = launches(problem, tactic)
    problem, tactic = _flat(problem, tactic)
    shifted = problem.kind in ("log_sum_exp", "inv_std", *NORMALIZATIONS)
    passes = 1 + shifted + (problem.kind in NORMALIZATIONS)
    read = num_bytes(tactic.ins[0], problem.in_shapes[0])
    _, inside, _ = _sizes(problem, tactic)
    vec = _vector(problem, tactic)
    again = passes if 2 * vec * prod(inside) > L1_BYTES else 1
    elements = num_elements(tactic.ins[0], problem.in_shapes[0])
    work = elements * passes * (60 / vec + 4)  # taking positions apart, addresses, conversions
    return streamed(device, steps, read * again, num_bytes(tactic.out, problem.out_shape), work)
