"""What is to be computed, without how: frozen, hashable records. `str()` is the key of caches; `reference()` the meaning.

Shapes are NCHW. All tensors are FP16 in memory; arithmetic is FP32 inside one problem and rounded once at its end.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from tactics.gather_problem import GatherProblem, ResizeProblem, ViewProblem
from tactics.pointwise_ops import NONE, Activation, Stage
from tactics.row_problem import NormalizeProblem, ReduceProblem


def _key(problem, kind: str) -> str:
    parts = []
    for f in fields(problem):
        v = getattr(problem, f.name)
        if isinstance(v, bool):
            if v:
                parts.append(f.name)
        elif isinstance(v, tuple):
            if not v:
                continue
            parts.append(f.name + ",".join(str(i) for i in v))
        elif isinstance(v, Activation):
            if v != NONE:
                parts.append(str(v))
        elif isinstance(v, str):
            parts.append(v)
        else:
            parts.append(f"{f.name}{v}")
    return " ".join([kind, *parts])


@dataclass(frozen=True, slots=True)
class ConvProblem:
    """act(conv(x, w) + bias + residual): x [n,c,h,w], w [k,c/groups,r,s], cross-correlation as ONNX Conv.

    `pad` = top, left, bottom, right; `residual`: a tensor of the output's shape is added before the activation,
    or, with `act_first`, after it. `sparse24`: the FP16 weights obey 2:4 along c, so a sparse tactic may run them. With
    `d2s` = b > 1 the k channels are stored as k/b^2 channels of b times the size (ONNX DepthToSpace, `d2s_mode` dcr or
    crd); a residual has that shape. `pool` = r, s, stride_h, stride_w, pad_top, pad_left, out_h, out_w: a max pool follows.
    `pre`: x is max(x * scale + shift, 0) first, with scale and shift [c] FP16 values; of 1 x 1 kernels without padding only.
    """

    n: int
    c: int
    h: int
    w: int
    k: int
    r: int
    s: int
    stride: tuple[int, int] = (1, 1)
    pad: tuple[int, int, int, int] = (0, 0, 0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1
    bias: bool = False
    residual: bool = False
    act: Activation = NONE
    sparse24: bool = False
    d2s: int = 1
    d2s_mode: str = "dcr"
    act_first: bool = False
    pool: tuple[int, ...] = ()
    pre: bool = False

    def __post_init__(self):
        if self.pool and (len(self.pool) != 8 or self.residual or self.d2s > 1):
            raise ValueError(f"conv: expected a pool of 8 numbers after a convolution with no residual or d2s, got {self}")
        if self.pre and ((self.r, self.s) != (1, 1) or any(self.pad) or self.groups > 1):
            raise ValueError(f"conv: only a 1 x 1 kernel without padding or groups scales its input first, got {self}")
        if self.d2s < 1 or self.k % self.d2s**2 or self.d2s_mode not in ("dcr", "crd"):
            raise ValueError(f"conv: expected d2s = b with k a multiple of b*b, mode dcr or crd, got {self}")
        if self.c % self.groups or self.k % self.groups:
            raise ValueError(f"conv: c={self.c} and k={self.k} must be multiples of groups={self.groups}")
        if min(self.n, self.c, self.h, self.w, self.k, self.r, self.s, self.p, self.q, *self.stride, *self.dilation) < 1:
            raise ValueError(f"conv: every size must be positive, got {self}")

    def __str__(self) -> str:
        return _key(self, "conv").replace(" d2s1 dcr", "").replace(" d2s1 crd", "")

    @property
    def p(self) -> int:
        """Output height, before depth-to-space."""
        return (self.h + self.pad[0] + self.pad[2] - self.dilation[0] * (self.r - 1) - 1) // self.stride[0] + 1

    @property
    def q(self) -> int:
        """Output width, before depth-to-space."""
        return (self.w + self.pad[1] + self.pad[3] - self.dilation[1] * (self.s - 1) - 1) // self.stride[1] + 1

    @property
    def in_shapes(self) -> tuple[tuple[int, int, int, int], ...]:
        x = (self.n, self.c, self.h, self.w)
        return (x, self.out_shape) if self.residual else (x,)

    @property
    def out_shape(self) -> tuple[int, int, int, int]:
        if self.pool:
            return (self.n, self.k, *self.pool[6:])
        return (self.n, self.k // self.d2s**2, self.p * self.d2s, self.q * self.d2s)

    @property
    def macs(self) -> int:
        return self.n * self.k * self.p * self.q * (self.c // self.groups) * self.r * self.s

    def reference(self, x, w, bias=None, residual=None, slope=None, scale=None, shift=None) -> np.ndarray:
        """FP32 arrays in (x [n,c,h,w], w [k,c/groups,r,s], bias [k], residual as the output, slope [k], scale, shift [c]),
        FP32 out. Bias and slope belong to the k channels before depth-to-space.
        """
        if self.pre:
            scale, shift = (np.asarray(v, np.float32).reshape(1, -1, 1, 1) for v in (scale, shift))
            x = np.maximum(np.asarray(x, np.float32) * scale + shift, 0)
        xp = np.pad(np.asarray(x, np.float32), ((0, 0), (0, 0), (self.pad[0], self.pad[2]), (self.pad[1], self.pad[3])))
        w = np.asarray(w, np.float32)
        cg, kg, (sh, sw), (dh, dw) = self.c // self.groups, self.k // self.groups, self.stride, self.dilation
        y = np.zeros((self.n, self.k, self.p, self.q), np.float32)
        for g in range(self.groups):
            xs, ws, ys = xp[:, g * cg : (g + 1) * cg], w[g * kg : (g + 1) * kg], y[:, g * kg : (g + 1) * kg]
            for i in range(self.r):
                for j in range(self.s):
                    tap = xs[:, :, i * dh : i * dh + (self.p - 1) * sh + 1 : sh, j * dw : j * dw + (self.q - 1) * sw + 1 : sw]
                    flat = tap.transpose(1, 0, 2, 3).reshape(cg, -1)
                    ys += (ws[:, :, i, j] @ flat).reshape(kg, self.n, self.p, self.q).transpose(1, 0, 2, 3)
        if bias is not None:
            y += np.asarray(bias, np.float32).reshape(1, -1, 1, 1)
        if residual is not None:
            residual = space_to_depth(np.asarray(residual, np.float32), self.d2s, self.d2s_mode)
            y = self.act.apply(y, slope) + residual if self.act_first else self.act.apply(y + residual, slope)
        else:
            y = self.act.apply(y, slope)
        return self.maxima(y) if self.pool else depth_to_space(y, self.d2s, self.d2s_mode)

    def maxima(self, y: np.ndarray) -> np.ndarray:
        """`pool` over the convolution's result."""
        r, s, stride_h, stride_w, top, left, *out = self.pool
        window = (r, s, tuple(out), (stride_h, stride_w), (top, left, 0, 0))
        return PoolProblem(self.n, self.k, self.p, self.q, "max", *window).reference(y)


def depth_to_space(x: np.ndarray, b: int, mode: str) -> np.ndarray:
    """[n, k, h, w] -> [n, k/b^2, h*b, w*b], as ONNX DepthToSpace."""
    n, k, h, w = x.shape
    if mode == "dcr":
        x = x.reshape(n, b, b, k // b**2, h, w).transpose(0, 3, 4, 1, 5, 2)
    else:
        x = x.reshape(n, k // b**2, b, b, h, w).transpose(0, 1, 4, 2, 5, 3)
    return x.reshape(n, k // b**2, h * b, w * b)


def space_to_depth(x: np.ndarray, b: int, mode: str) -> np.ndarray:
    """The inverse of depth_to_space; mode dcr is ONNX SpaceToDepth."""
    n, c, h, w = x.shape
    x = x.reshape(n, c, h // b, b, w // b, b)
    return x.transpose((0, 3, 5, 1, 2, 4) if mode == "dcr" else (0, 1, 3, 5, 2, 4)).reshape(n, c * b * b, h // b, w // b)


@dataclass(frozen=True, slots=True)
class ConvTransposeProblem:
    """act(conv_transpose(x, w) + bias + residual), as ONNX ConvTranspose: x [n,c,h,w], w [k,c,r,s] (output channel first).

    Input pixel i and tap t reach output pixel i*stride + t*dilation - pad; `out` = output height and width, `pad` = top,
    left (whatever lies outside `out` is cut). `residual`, `sparse24` as in ConvProblem.
    """

    n: int
    c: int
    h: int
    w: int
    k: int
    r: int
    s: int
    out: tuple[int, int]
    stride: tuple[int, int] = (1, 1)
    pad: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    bias: bool = False
    residual: bool = False
    act: Activation = NONE
    sparse24: bool = False

    def __post_init__(self):
        if min(self.n, self.c, self.h, self.w, self.k, self.r, self.s, *self.out, *self.stride, *self.dilation) < 1:
            raise ValueError(f"conv_transpose: every size must be positive, got {self}")

    def __str__(self) -> str:
        return _key(self, "conv_transpose")

    @property
    def groups(self) -> int:
        return 1

    @property
    def in_shapes(self) -> tuple[tuple[int, int, int, int], ...]:
        x = (self.n, self.c, self.h, self.w)
        return (x, self.out_shape) if self.residual else (x,)

    @property
    def out_shape(self) -> tuple[int, int, int, int]:
        return (self.n, self.k, *self.out)

    @property
    def macs(self) -> int:
        return self.n * self.c * self.h * self.w * self.k * self.r * self.s

    def reference(self, x, w, bias=None, residual=None, slope=None) -> np.ndarray:
        """FP32 arrays in (x [n,c,h,w], w [k,c,r,s], bias [k], residual as the output, slope [k]), FP32 out."""
        x, w = np.asarray(x, np.float32), np.asarray(w, np.float32)
        (sh, sw), (dh, dw), (top, left) = self.stride, self.dilation, self.pad
        high = max((self.h - 1) * sh + (self.r - 1) * dh + 1, top + self.out[0])
        wide = max((self.w - 1) * sw + (self.s - 1) * dw + 1, left + self.out[1])
        full = np.zeros((self.n, self.k, high, wide), np.float32)
        flat = x.transpose(1, 0, 2, 3).reshape(self.c, -1)
        for i in range(self.r):
            for j in range(self.s):
                part = (w[:, :, i, j] @ flat).reshape(self.k, self.n, self.h, self.w).transpose(1, 0, 2, 3)
                full[:, :, i * dh : i * dh + (self.h - 1) * sh + 1 : sh, j * dw : j * dw + (self.w - 1) * sw + 1 : sw] += part
        y = full[:, :, top : top + self.out[0], left : left + self.out[1]]
        if bias is not None:
            y = y + np.asarray(bias, np.float32).reshape(1, -1, 1, 1)
        if residual is not None:
            y = y + np.asarray(residual, np.float32)
        return self.act.apply(y, slope)


@dataclass(frozen=True, slots=True)
class PoolProblem:
    """Max or average over a window; `out` = output height and width (ceil_mode decides them). Padding never wins a max.

    An average divides by the window's size with `count_pad` (clipped to the padded image), else by its valid pixels.
    """

    n: int
    c: int
    h: int
    w: int
    kind: str
    r: int
    s: int
    out: tuple[int, int]
    stride: tuple[int, int] = (1, 1)
    pad: tuple[int, int, int, int] = (0, 0, 0, 0)
    dilation: tuple[int, int] = (1, 1)
    count_pad: bool = False

    def __post_init__(self):
        if self.kind not in ("max", "avg"):
            raise ValueError(f"pool: expected kind max or avg, got {self.kind!r}")

    def __str__(self) -> str:
        return _key(self, "pool")

    @property
    def in_shapes(self):
        return ((self.n, self.c, self.h, self.w),)

    @property
    def out_shape(self) -> tuple[int, int, int, int]:
        return (self.n, self.c, *self.out)

    @property
    def is_global(self) -> bool:
        return self.out == (1, 1) and (self.r, self.s) == (self.h, self.w) and not any(self.pad)

    def reference(self, x) -> np.ndarray:
        x = np.asarray(x, np.float32)
        (p, q), (sh, sw), (dh, dw) = self.out, self.stride, self.dilation
        total = np.full(self.out_shape, -np.inf if self.kind == "max" else 0, np.float32)
        count = np.zeros((p, q), np.float32)
        hh, ww = np.arange(p) * sh - self.pad[0], np.arange(q) * sw - self.pad[1]
        for i in range(self.r):
            for j in range(self.s):
                hi, wi = hh + i * dh, ww + j * dw
                ok = ((hi >= 0) & (hi < self.h))[:, None] & ((wi >= 0) & (wi < self.w))[None, :]
                inside = ((hi < self.h + self.pad[2])[:, None]) & ((wi < self.w + self.pad[3])[None, :])
                tap = x[:, :, np.clip(hi, 0, self.h - 1)][:, :, :, np.clip(wi, 0, self.w - 1)]
                if self.kind == "max":
                    total = np.where(ok, np.maximum(total, tap), total)
                else:
                    total += np.where(ok, tap, 0)
                count += inside if self.count_pad else ok
        return total if self.kind == "max" else total / np.maximum(count, 1)


@dataclass(frozen=True, slots=True)
class PointwiseProblem:
    """A chain of elementwise stages over tensor 0: v = t0, then v = stage(v) for each of `stages`; [n,c,h,w] out.

    `tensors` and `constants`: along which axes each one spans the output; along the others it has size 1 and is repeated
    (NumPy's broadcasting). "nchw" is a whole tensor, "nc" one value per image and channel, "hw" one per pixel, "" one.
    Tensor i is "t<i>" to a stage and an input; constant i is "c<i>" to a stage and a weight of that name.
    """

    n: int
    c: int
    h: int
    w: int
    stages: tuple[Stage, ...] = ()
    tensors: tuple[str, ...] = ("nchw",)
    constants: tuple[str, ...] = ()

    def __post_init__(self):
        named = {f"t{i}" for i in range(len(self.tensors))} | {f"c{i}" for i in range(len(self.constants))}
        if unknown := [s for s in self.stages if s.operand and s.operand not in named]:
            raise ValueError(f"pointwise: {unknown[0]} reads none of {', '.join(sorted(named))}")
        if wrong := [a for a in (*self.tensors, *self.constants) if a != "".join(x for x in "nchw" if x in a)]:
            raise ValueError(f"pointwise: axes are written in the order nchw, got {wrong[0]!r}")

    def __str__(self) -> str:
        return _key(self, "pointwise")

    def span(self, axes: str) -> tuple[int, int, int, int]:
        """The shape of a tensor or constant that spans `axes`."""
        return tuple(d if a in axes else 1 for a, d in zip("nchw", self.out_shape, strict=True))

    @property
    def in_shapes(self):
        return tuple(self.span(axes) for axes in self.tensors)

    @property
    def out_shape(self) -> tuple[int, int, int, int]:
        return (self.n, self.c, self.h, self.w)

    def reference(self, *tensors, **constants) -> np.ndarray:
        """FP32 arrays of in_shapes, and constants c0, c1, ... as many values as they span; FP32 out."""
        operands = {f"t{i}": np.asarray(x, np.float32) for i, x in enumerate(tensors)}
        for i, axes in enumerate(self.constants):
            operands[f"c{i}"] = np.asarray(constants[f"c{i}"], np.float32).reshape(self.span(axes))
        v = operands["t0"]
        with np.errstate(all="ignore"):
            for stage in self.stages:
                v = stage.apply(v, operands.get(stage.operand)).astype(np.float32)
        return np.array(np.broadcast_to(v, self.out_shape))


@dataclass(frozen=True, slots=True)
class MoveProblem:
    """Output elements copied from other places of the input; what lies outside the input is `fill`.

    kind "window": out[n, c, h, w] = x[n, start_c + c*step_c, start_h + h*step_h, start_w + w*step_w] (Slice, Pad);
    kind "upsample": x[n, c, h // step_h, w // step_w] (nearest, integer factors);
    kind "d2s_dcr" / "d2s_crd": ONNX DepthToSpace with blocks of step_h x step_h; "s2d_dcr" / "s2d_crd" its inverse;
    kind "channels": a shuffle of step_h groups, out[n, j*groups + g] = x[n, g*(c/groups) + j].
    """

    n: int
    c: int
    h: int
    w: int
    kind: str
    out: tuple[int, int, int]
    start: tuple[int, int, int] = (0, 0, 0)
    step: tuple[int, int, int] = (1, 1, 1)
    fill: float = 0.0

    def __post_init__(self):
        if self.kind not in ("window", "upsample", "d2s_dcr", "d2s_crd", "s2d_dcr", "s2d_crd", "channels"):
            raise ValueError(f"move: unknown kind {self.kind!r}")

    def __str__(self) -> str:
        return _key(self, "move")

    @property
    def in_shapes(self):
        return ((self.n, self.c, self.h, self.w),)

    @property
    def out_shape(self) -> tuple[int, int, int, int]:
        return (self.n, *self.out)

    @property
    def is_part(self) -> bool:
        """Whether the output is nothing but some neighbouring channels of the input."""
        rows_and_columns = (self.start[1:], self.step, self.out[1:]) == ((0, 0), (1, 1, 1), (self.h, self.w))
        return self.kind == "window" and rows_and_columns and self.start[0] >= 0 and self.start[0] + self.out[0] <= self.c

    def source(self, c, h, w):
        """Input coordinates of output coordinates (integer arrays that broadcast)."""
        b = self.step[1]
        if self.kind == "window":
            return tuple(s + i * t for s, i, t in zip(self.start, (c, h, w), self.step, strict=True))
        if self.kind == "upsample":
            return c, h // self.step[1], w // self.step[2]
        if self.kind == "d2s_dcr":
            return ((h % b) * b + w % b) * self.out[0] + c, h // b, w // b
        if self.kind == "d2s_crd":
            return (c * b + h % b) * b + w % b, h // b, w // b
        if self.kind == "channels":
            return c % b * (self.c // b) + c // b, h, w
        corner, c = (c // self.c, c % self.c) if self.kind == "s2d_dcr" else (c % b**2, c // b**2)
        return c, h * b + corner // b, w * b + corner % b

    def reference(self, x) -> np.ndarray:
        x = np.asarray(x, np.float32)
        c, h, w = np.meshgrid(*(np.arange(d) for d in self.out), indexing="ij")
        c, h, w = self.source(c, h, w)
        ok = (c >= 0) & (c < self.c) & (h >= 0) & (h < self.h) & (w >= 0) & (w < self.w)
        picked = x[:, np.clip(c, 0, self.c - 1), np.clip(h, 0, self.h - 1), np.clip(w, 0, self.w - 1)]
        return np.where(ok, picked, np.float32(self.fill))


@dataclass(frozen=True, slots=True)
class ConcatProblem:
    """Inputs one after the other along `axis`: of `sizes` there, of the shape `rest` along the other three axes."""

    sizes: tuple[int, ...]
    rest: tuple[int, int, int]
    axis: int = 1

    def __post_init__(self):
        if self.axis not in range(4) or len(self.rest) != 3 or not self.sizes:
            raise ValueError(f"concat: expected an axis 0 to 3, sizes along it and 3 sizes along the others, got {self}")

    def __str__(self) -> str:
        return _key(self, "concat")

    def _shape(self, size: int) -> tuple[int, int, int, int]:
        return (*self.rest[: self.axis], size, *self.rest[self.axis :])

    @property
    def in_shapes(self):
        return tuple(self._shape(size) for size in self.sizes)

    @property
    def out_shape(self) -> tuple[int, int, int, int]:
        return self._shape(sum(self.sizes))

    def reference(self, *xs) -> np.ndarray:
        return np.concatenate([np.asarray(x, np.float32) for x in xs], axis=self.axis)


@dataclass(frozen=True, slots=True)
class ReformatProblem:
    """The same values in another format; `src` and `dst` as printed by Format."""

    n: int
    c: int
    h: int
    w: int
    src: str
    dst: str

    def __str__(self) -> str:
        return _key(self, "reformat")

    @property
    def in_shapes(self):
        return ((self.n, self.c, self.h, self.w),)

    @property
    def out_shape(self) -> tuple[int, int, int, int]:
        return (self.n, self.c, self.h, self.w)

    def reference(self, x) -> np.ndarray:
        return np.asarray(x, np.float32)


@dataclass(frozen=True, slots=True)
class MatmulProblem:
    """a @ b of two computed tensors, [*batch, m, k] and [*batch, k, n] -> [*batch, m, n], two batch dimensions.

    `trans_a`: a is [*batch, k, m]; `trans_b`: b is [*batch, n, k]. `a_batch`, `b_batch`: a dimension of 1 is repeated.
    """

    a_batch: tuple[int, int]
    b_batch: tuple[int, int]
    m: int
    n: int
    k: int
    trans_a: bool = False
    trans_b: bool = False

    def __post_init__(self):
        if any(a != b and 1 not in (a, b) for a, b in zip(self.a_batch, self.b_batch, strict=True)):
            raise ValueError(f"matmul: batches {self.a_batch} and {self.b_batch} do not broadcast")

    def __str__(self) -> str:
        return _key(self, "matmul")

    @property
    def batch(self) -> tuple[int, int]:
        return tuple(max(a, b) for a, b in zip(self.a_batch, self.b_batch, strict=True))

    @property
    def in_shapes(self):
        a = (self.k, self.m) if self.trans_a else (self.m, self.k)
        b = (self.n, self.k) if self.trans_b else (self.k, self.n)
        return (*self.a_batch, *a), (*self.b_batch, *b)

    @property
    def out_shape(self) -> tuple[int, int, int, int]:
        return (*self.batch, self.m, self.n)

    def reference(self, a, b) -> np.ndarray:
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        return (a.swapaxes(2, 3) if self.trans_a else a) @ (b.swapaxes(2, 3) if self.trans_b else b)


@dataclass(frozen=True, slots=True)
class BackToBackProblem:
    """second(first(x)): two ConvProblems, the second with a 1x1 kernel; a residual is the second's."""

    first: ConvProblem
    second: ConvProblem

    def __post_init__(self):
        if self.second.in_shapes[0] != self.first.out_shape or self.first.residual:
            raise ValueError(f"back to back: expected a second convolution of the first one's output, got {self}")

    def __str__(self) -> str:
        return f"back_to_back {self.first} -> {self.second}"

    @property
    def in_shapes(self):
        return (*self.first.in_shapes, *self.second.in_shapes[1:])

    @property
    def out_shape(self) -> tuple[int, int, int, int]:
        return self.second.out_shape

    @property
    def c(self) -> int:
        return self.first.c

    @property
    def k(self) -> int:
        return self.second.k

    @property
    def r(self) -> int:
        return self.first.r

    @property
    def s(self) -> int:
        return self.first.s

    @property
    def groups(self) -> int:
        return 1

    @property
    def sparse24(self) -> bool:
        """Whether both fit 2:4; its one kernel is dense all the same."""
        return self.first.sparse24 and self.second.sparse24

    @property
    def bias(self) -> bool:
        return self.second.bias

    @property
    def act(self) -> Activation:
        return self.second.act

    @property
    def act_first(self) -> bool:
        return self.second.act_first

    @property
    def residual(self) -> bool:
        return self.second.residual

    @property
    def macs(self) -> int:
        return self.first.macs + self.second.macs

    def reference(self, x, residual=None, **weights) -> np.ndarray:
        """FP32 arrays; weights "w", "b", "slope" of the first and "w2", "b2", "slope2" of the second. What lies between is
        rounded to FP16."""
        first = {k: weights.get(n) for k, n in (("w", "w"), ("bias", "b"), ("slope", "slope"))}
        second = {k: weights.get(n) for k, n in (("w", "w2"), ("bias", "b2"), ("slope", "slope2"))}
        with np.errstate(over="ignore"):
            z = self.first.reference(x, **first).astype(np.float16).astype(np.float32)
        return self.second.reference(z, residual=residual, **second)


@dataclass(frozen=True, slots=True)
class SqueezeExciteProblem:
    """second(first(average(x))): a global average and two 1x1 convolutions of what it leaves."""

    average: PoolProblem
    first: ConvProblem
    second: ConvProblem

    def __post_init__(self):
        if self.first.in_shapes[0] != self.average.out_shape or self.second.in_shapes != (self.first.out_shape,):
            raise ValueError(f"squeeze_excite: expected each to read the one before, got {self}")

    def __str__(self) -> str:
        return f"squeeze_excite {self.average} -> {self.first} -> {self.second}"

    @property
    def in_shapes(self):
        return self.average.in_shapes

    @property
    def out_shape(self) -> tuple[int, int, int, int]:
        return self.second.out_shape

    @property
    def c(self) -> int:
        return self.first.c

    @property
    def k(self) -> int:
        return self.second.k

    @property
    def r(self) -> int:
        return 1

    @property
    def s(self) -> int:
        return 1

    @property
    def groups(self) -> int:
        return 1

    @property
    def sparse24(self) -> bool:
        """Whether both fit 2:4; its one kernel is dense all the same."""
        return self.first.sparse24 and self.second.sparse24

    @property
    def bias(self) -> bool:
        return self.second.bias

    @property
    def residual(self) -> bool:
        return False

    @property
    def act(self) -> Activation:
        return self.second.act

    @property
    def macs(self) -> int:
        return self.first.macs + self.second.macs

    def reference(self, x, **weights) -> np.ndarray:
        """FP32 arrays; weights "w", "b" of the first and "w2", "b2" of the second convolution."""
        hidden = self.first.reference(self.average.reference(x), weights["w"], weights.get("b"))
        return self.second.reference(hidden, weights["w2"], weights.get("b2"))


Problem = (
    ConvProblem | BackToBackProblem | SqueezeExciteProblem | ConvTransposeProblem | PoolProblem | PointwiseProblem
    | MoveProblem | ConcatProblem | MatmulProblem | ReformatProblem | ViewProblem | GatherProblem | ResizeProblem
    | ReduceProblem | NormalizeProblem
)  # fmt: skip
