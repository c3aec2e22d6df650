"""(problem, tactic) -> the launches that compute it, and its weights as the kernels read them.

A launch is plain data: kernel, compile-time values, grid, block, shared memory, and arguments in the order of the kernel's
parameter struct. An argument is ("in", i), ("out", 0), ("weights", section) for pointers, or ("i32" | "i64" | "f32", value).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from cuda_kernels import sparse24
from tactics.format import LAYOUTS, Format, canonical, padded_channels, strides
from tactics.problem import (
    ACTIVATIONS,
    POINTWISE_OPS,
    ConcatProblem,
    ConvProblem,
    MoveProblem,
    PointwiseProblem,
    PoolProblem,
    Problem,
    ReformatProblem,
    SoftmaxProblem,
)
from tactics.tactic import Tactic, Tile

Arg = tuple[str, int | float | str]
NULL: Arg = ("i64", 0)
K_STAGE = 64  # packed weights are padded along K to this, so that every tile of a kernel reads the same bytes


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch; `grid` and `block` count blocks and threads, `smem` is dynamic shared memory in bytes."""

    kernel: str
    values: tuple[tuple[str, int], ...]
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    smem: int
    args: tuple[Arg, ...]


def launches(problem: Problem, tactic: Tactic) -> tuple[Launch, ...]:
    """What to launch, in order. Shapes come from the problem, formats from the tactic."""
    return LAUNCHERS[type(problem)](problem, tactic)


def pack_weights(problem: Problem, tactic: Tactic, weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """FP32 weights as `lower` gives them -> sections by name, each a flat array in the kernel's own order."""
    if isinstance(problem, ConvProblem):
        return _pack_conv(problem, tactic, weights)
    return {name: np.ascontiguousarray(w, np.float32).reshape(-1) for name, w in weights.items()}


def linear(fmt: Format) -> bool:
    """Whether channels lie in planes of their own (V = 1), so that 16-byte accesses along channels are impossible."""
    return LAYOUTS[fmt.layout].vector < 8


def conv_smem(tactic: Tactic) -> int:
    """Dynamic shared memory of a convolution tactic in bytes: the pipeline, or the epilogue's staging tile over it."""
    t: Tile = tactic.tile
    return max(t.stages * stage_bytes(tactic), t.m * t.n * 2 + t.n * 4)


def stage_bytes(tactic: Tactic) -> int:
    """Bytes of one pipeline stage: weights (2:4: half the values and a metadata bit per element) and pixels."""
    t: Tile = tactic.tile
    a = t.m * t.k * 2
    return (a // 2 + a // 16 if tactic.sparse else a) + t.n * t.k * 2


def padded_k(problem: ConvProblem) -> int:
    """Logical K of the packed weights: taps x channels padded to 8, padded to whole stages of 64."""
    return -(-problem.r * problem.s * padded_channels("hwc8", problem.c) // K_STAGE) * K_STAGE


def _ints(*values: int) -> tuple[Arg, ...]:
    return tuple(("i32", int(v)) for v in values)


def _view(fmt: Format, shape) -> tuple[Arg, ...]:
    s = strides(fmt, shape)
    return _ints(s.n, s.block, s.pixel, s.log2v)


def _act(problem) -> int:
    return list(ACTIVATIONS).index(problem.act.name)


def _alpha_beta(problem) -> tuple[Arg, Arg]:
    a, b = (*problem.act.params, 0.0, 0.0)[:2]
    return ("f32", a), ("f32", b)


def _conv(p: ConvProblem, tactic: Tactic) -> tuple[Launch, ...]:
    t, x_fmt, y_fmt = tactic.tile, tactic.ins[0], tactic.out
    pixels, y_c = p.n * p.p * p.q, padded_channels(y_fmt.layout, p.k)
    values = {
        "BM": t.m, "BN": t.n, "BK": t.k, "WARPS_M": t.warps_m, "WARPS_N": t.warps_n, "STAGES": t.stages,
        "IN_LINEAR": int(linear(x_fmt)), "OUT_LINEAR": int(linear(y_fmt)), "ACT": _act(p), "RES": int(p.residual),
    }  # fmt: skip
    args = (
        ("in", 0), ("weights", "w"), ("weights", "meta") if tactic.sparse else NULL, ("weights", "b"),
        ("weights", "slope") if p.act.name == "prelu" else NULL, ("in", 1) if p.residual else NULL, ("out", 0),
        *_ints(p.n, p.c, p.h, p.w, p.k, p.p, p.q, p.r, p.s),
        *_ints(-(-p.c // 8), padded_k(p) // t.k, -(-p.k // 16)),
        *_ints(*p.stride, p.pad[0], p.pad[1], *p.dilation),
        *_view(x_fmt, p.in_shapes[0]), *_view(y_fmt, p.out_shape), *_ints(y_c), *_alpha_beta(p),
    )  # fmt: skip
    grid = -(-y_c // t.m) * -(-pixels // t.n)
    return (Launch(tactic.kernel, tuple(sorted(values.items())), (grid, 1, 1), (t.threads, 1, 1), conv_smem(tactic), args),)


def _pack_conv(p: ConvProblem, tactic: Tactic, weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Weights [K,C,R,S] as [K, (r, s, c padded to 8) padded to 64] in fragment order; bias and slope padded to 16 rows."""
    m16 = -(-p.k // 16)
    c8 = padded_channels("hwc8", p.c)
    flat = np.zeros((m16 * 16, padded_k(p)), np.float16)
    taps = np.zeros((p.k, p.r, p.s, c8), np.float16)
    taps[..., : p.c] = np.asarray(weights["w"], np.float16).transpose(0, 2, 3, 1)
    flat[: p.k, : p.r * p.s * c8] = taps.reshape(p.k, -1)
    sections = {}
    if tactic.sparse:
        kept, codes = sparse24.compress(flat)
        sections["w"] = sparse24.pack_fragments(kept).reshape(-1)
        sections["meta"] = sparse24.pack_metadata(codes).reshape(-1)
    else:
        sections["w"] = sparse24.pack_fragments(flat).reshape(-1)
    for name, used in (("b", True), ("slope", p.act.name == "prelu")):
        if used:
            row = np.zeros(m16 * 16, np.float32)
            if weights.get(name) is not None:
                row[: p.k] = weights[name]
            sections[name] = row
    return sections


def _grid(threads: int) -> tuple[int, int, int]:
    return (max(1, -(-threads // 256)), 1, 1)


def _pool(p: PoolProblem, tactic: Tactic) -> tuple[Launch, ...]:
    x_fmt, y_fmt = tactic.ins[0], tactic.out
    vec = 1 if linear(x_fmt) else 8
    groups, in_groups = (padded_channels(f.layout, p.c) // vec for f in (y_fmt, x_fmt))
    values = (("AVG", int(p.kind == "avg")), ("VEC", vec))
    views = (*_view(x_fmt, p.in_shapes[0]), *_view(y_fmt, p.out_shape))
    if tactic.kernel == "pool_global":
        args = (("in", 0), ("out", 0), *views, *_ints(p.n, groups, in_groups, p.h * p.w), ("f32", 1.0 / (p.h * p.w)))
        blocks = p.n * -(-groups // 8) if vec == 8 else -(-p.n * groups // 8)
        return (Launch("pool_global", values, (blocks, 1, 1), (256, 1, 1), 0, args),)
    ends = (p.h + p.pad[2], p.w + p.pad[3]) if p.count_pad else (p.h, p.w)
    args = (
        ("in", 0), ("out", 0), *views, *_ints(p.n, groups, in_groups, p.h, p.w, *p.out, p.r, p.s, *p.stride, p.pad[0], p.pad[1]),
        *_ints(*p.dilation, *ends, p.count_pad),
    )  # fmt: skip
    return (Launch("pool", values, _grid(p.n * groups * p.out[0] * p.out[1]), (256, 1, 1), 0, args),)


def _pointwise(p: PointwiseProblem, tactic: Tactic) -> tuple[Launch, ...]:
    fmt = tactic.out
    key = canonical(fmt, p.out_shape).partition(":")[2]
    cp = padded_channels(fmt.layout, p.c)
    total = p.n * cp * p.h * p.w
    if key.startswith("last"):
        vec = 8 if cp % 8 == 0 else 1
        inner, pixels, blocks, v = cp // vec, p.n * p.h * p.w, 1, cp
    else:
        v = LAYOUTS[fmt.layout].vector
        vec = 8 if v >= 8 else 1
        inner, pixels, blocks = v // vec, p.h * p.w, cp // v
    values = {
        "VEC": vec, "OP": list(POINTWISE_OPS).index(p.op), "SWAP": int(p.swap), "ACT": _act(p),
        "OPERAND": ("none", "tensor", "channel", "scalar").index(p.operand),
    }  # fmt: skip
    args = (
        ("in", 0), ("in", 1) if p.operand == "tensor" else NULL,
        ("weights", "operand") if p.operand in ("channel", "scalar") else NULL,
        ("weights", "slope") if p.act.name == "prelu" else NULL, ("out", 0), ("i64", total // vec),
        *_ints(inner, pixels, blocks, v, p.c), *_alpha_beta(p),
    )  # fmt: skip
    return (Launch("pointwise", tuple(sorted(values.items())), _grid(total // vec), (256, 1, 1), 0, args),)


MOVE_KINDS = ("window", "upsample", "d2s_dcr", "d2s_crd")


def _move_launch(source: int, in_shape, x_fmt: Format, y_fmt: Format, part, whole, *, kind="window", start=(0, 0, 0),
                 step=(1, 1, 1), fill=0.0, first_c=0, last=True) -> Launch:  # fmt: skip
    """One launch of move.cu: the shape `part` of the output `whole`, from channel `first_c` on (`last`: to its padded end)."""
    n, c, h, w = in_shape
    _, part_c, out_h, out_w = part
    covered = padded_channels(y_fmt.layout, whole[1]) - first_c if last else part_c
    half_in, half_out = x_fmt.dtype == "fp16", y_fmt.dtype == "fp16"
    in_vec = half_in and not linear(x_fmt) and kind in ("window", "upsample") and step[0] == 1 and start[0] % 8 == 0
    out_vec = half_out and not linear(y_fmt) and first_c % 8 == 0 and covered % 8 == 0
    values = {"KIND": MOVE_KINDS.index(kind), "IN_VEC": int(in_vec), "OUT_VEC": int(out_vec),
              "IN_F32": int(not half_in), "OUT_F32": int(not half_out)}  # fmt: skip
    args = (
        ("in", source), ("out", 0), *_view(x_fmt, in_shape), *_view(y_fmt, whole), *_ints(n, c, h, w),
        *_ints(covered, out_h, out_w, part_c, first_c, *start, *step), ("f32", fill),
    )  # fmt: skip
    threads = n * -(-covered // 8) * out_h * out_w
    return Launch("move", tuple(sorted(values.items())), _grid(threads), (256, 1, 1), 0, args)


def _move(p: MoveProblem, tactic: Tactic) -> tuple[Launch, ...]:
    how = {"kind": p.kind, "start": p.start, "step": p.step, "fill": p.fill}
    return (_move_launch(0, p.in_shapes[0], tactic.ins[0], tactic.out, p.out_shape, p.out_shape, **how),)


def _reformat(p: ReformatProblem, tactic: Tactic) -> tuple[Launch, ...]:
    return (_move_launch(0, p.in_shapes[0], tactic.ins[0], tactic.out, p.out_shape, p.out_shape),)


def _concat(p: ConcatProblem, tactic: Tactic) -> tuple[Launch, ...]:
    result, first = [], 0
    for i, c in enumerate(p.channels):
        x, last = p.in_shapes[i], i == len(p.channels) - 1
        result.append(_move_launch(i, x, tactic.ins[i], tactic.out, x, p.out_shape, first_c=first, last=last))
        first += c
    return tuple(result)


def _softmax(p: SoftmaxProblem, tactic: Tactic) -> tuple[Launch, ...]:
    args = (
        ("in", 0), ("out", 0), *_view(tactic.ins[0], p.in_shapes[0]), *_view(tactic.out, p.out_shape),
        *_ints(p.n, p.c, p.h * p.w, padded_channels(tactic.out.layout, p.c)),
    )  # fmt: skip
    return (Launch("softmax", (), (-(-p.n * p.h * p.w // 8), 1, 1), (256, 1, 1), 0, args),)


LAUNCHERS = {
    ConvProblem: _conv, PoolProblem: _pool, PointwiseProblem: _pointwise, MoveProblem: _move, ConcatProblem: _concat,
    SoftmaxProblem: _softmax, ReformatProblem: _reformat,
}  # fmt: skip
