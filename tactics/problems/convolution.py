"""Convolutions and pools as problems (problem.py says what problems are)."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.lib.stride_tricks import as_strided

from tactics.problems.epilogue import Epilogue, Given
from tactics.problems.pointwise_ops import NONE, Activation
from tactics.problems.prologue import Prologue
from tactics.problems.protocol import Feature, OneTensor, Problem, Shape4

MOST_GATHERED = 1 << 21  # elements of the gathered matrix in window_sums: 8 MB


class Keyed(Problem):
    """A problem that `str()` writes as its type, its sizes, and its other fields if set: "conv n1 c64 h56 ... relu"."""

    __slots__ = ()

    def __str__(self) -> str:
        return " ".join((self.TYPE, *_parts(self)))


def _parts(record: Any) -> Iterator[str]:
    for f in fields(record):
        v = getattr(record, f.name)
        if isinstance(v, Prologue):
            yield from (f"in_{part}" if part != "scaled" else part for part in _parts(v))
        elif isinstance(v, Epilogue):
            yield from _parts(v)
        elif isinstance(record, (Prologue, Epilogue)) and v == f.default:
            continue
        elif isinstance(record, Prologue) and isinstance(v, float):
            yield f"{f.name}{v:g}"
        elif isinstance(v, bool):
            if v:
                yield f.name
        elif isinstance(v, tuple):
            if v:
                yield f.name + ",".join(str(i) for i in v)
        elif isinstance(v, Activation):
            if v != NONE:
                yield f"last_{v}" if f.name == "last" else str(v)
        else:
            yield v if isinstance(v, str) else f"{f.name}{v}"


@dataclass(frozen=True)
class ConvProblem(Keyed, OneTensor):
    """act(conv(x, w) + bias + residual): x [n,c,h,w], w [k,c/groups,r,s], cross-correlation as ONNX Conv.

    k output channels, r x s taps; pairs are (along rows, along columns); `pad` = top, left, bottom, right. `sparse24`: the FP16
    weights have the 2:4 pattern along c, so a sparse tactic may run them. `prologue`, `epilogue`: the steps of the same kernel
    before and after the products; these add inputs: x, then the residual, then the gate.
    """

    TYPE: ClassVar[str] = "conv"
    k: int
    r: int
    s: int
    stride: tuple[int, int] = (1, 1)
    pad: tuple[int, int, int, int] = (0, 0, 0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1
    sparse24: bool = False
    prologue: Prologue = Prologue()
    epilogue: Epilogue = Epilogue()

    def __post_init__(self) -> None:
        end = self.epilogue
        if any(d % end.up for d in self.out_shape[2:]):
            raise ValueError(f"conv: expected a residual whose pixels are repeated as often as the output's, got {self}")
        alone = self.groups == 1 or self.prologue.gated
        wide = (self.r, self.s) != (1, 1) or any(self.pad)
        if self.prologue.needs and ((wide and not self.prologue.border) or not alone):
            raise ValueError(f"conv: only a 1 x 1 kernel without padding, of one group, scales its input first, got {self}")
        if self.k % end.d2s**2:
            raise ValueError(f"conv: expected d2s = b with k a multiple of b*b, mode dcr or crd, got {self}")
        if self.c % self.groups or self.k % self.groups:
            raise ValueError(f"conv: c={self.c} and k={self.k} must be multiples of groups={self.groups}")
        sizes = self.n, self.c, self.h, self.w, self.k, self.r, self.s, self.groups, self.p, self.q
        if min(*sizes, *end.pool[:4], *end.pool[6:], *self.stride, *self.dilation) < 1:
            raise ValueError(f"conv: every size must be positive, got {self}")

    @cached_property
    def needs(self) -> frozenset[Feature]:
        return self.prologue.needs | self.epilogue.needs

    @cached_property
    def p(self) -> int:
        """Output height, before depth-to-space."""
        return (self.h + self.pad[0] + self.pad[2] - self.dilation[0] * (self.r - 1) - 1) // self.stride[0] + 1

    @cached_property
    def q(self) -> int:
        """Output width, before depth-to-space."""
        return (self.w + self.pad[1] + self.pad[3] - self.dilation[1] * (self.s - 1) - 1) // self.stride[1] + 1

    @cached_property
    def in_shapes(self) -> tuple[Shape4, ...]:
        x, (n, k, high, wide) = (self.n, self.c, self.h, self.w), self.out_shape
        u = self.epilogue.up
        added = ((n, k, high // u, wide // u),) if self.epilogue.residual else ()
        return (x, *added, (self.n, self.c, 1, 1)) if self.prologue.gated else (x, *added)

    @cached_property
    def out_shape(self) -> Shape4:
        if self.epilogue.pool:
            high, wide = self.epilogue.pool[6:]
            return (self.n, self.k, high, wide)
        b = self.epilogue.d2s
        return (self.n, self.k // b**2, self.p * b, self.q * b)

    @property
    def table(self) -> tuple[float, ...]:
        return self.epilogue.table

    @property
    def macs(self) -> int:
        return self.n * self.k * self.p * self.q * (self.c // self.groups) * self.r * self.s

    def reference(
        self,
        x: np.ndarray,
        w: np.ndarray,
        bias: Given = None,
        residual: Given = None,
        slope: Given = None,
        scale: Given = None,
        shift: Given = None,
        gate: Given = None,
        **vectors: Given,
    ) -> np.ndarray:
        """Returns the output, FP32 of out_shape, computed in FP32 from FP32 arrays.

        x [n,c,h,w], w [k,c/groups,r,s]; residual as in in_shapes; scale, shift [c] and gate [n,c,1,1] of the prologue; bias,
        slope and `vectors` (scales, shifts, multipliers, residual_multipliers) [k], by channels before depth-to-space.
        """
        if self.prologue.scaled:
            scale, shift = (np.asarray(v, np.float32).reshape(1, -1, 1, 1) for v in (scale, shift))
            x = np.maximum(np.asarray(x, np.float32) * scale + shift, 0)
        if gate is not None:
            x = self.prologue.act.apply(np.asarray(x, np.float32) * np.asarray(gate, np.float32))
        if self.prologue.normalized:
            x = self.prologue.normalize(x)
        around = (0, 0), (0, 0), (self.pad[0], self.pad[2]), (self.pad[1], self.pad[3])
        xp = np.pad(np.asarray(x, np.float32), around, constant_values=self.prologue.border)
        y = window_sums(xp, np.asarray(w, np.float32), (self.p, self.q), self.stride, self.dilation)
        end = self.epilogue
        if residual is not None:
            residual = np.asarray(residual, np.float32).repeat(end.up, axis=2).repeat(end.up, axis=3)
            residual = space_to_depth(residual, end.d2s, end.d2s_mode)
        y = end.finish(y, bias, residual, slope, **vectors)
        return self.maxima(y) if end.pool else depth_to_space(y, end.d2s, end.d2s_mode)

    def maxima(self, y: np.ndarray) -> np.ndarray:
        """Returns the epilogue's max pool of the convolution's result y [n,k,p,q]."""
        r, s, stride_h, stride_w, top, left, high, wide = self.epilogue.pool
        pool = PoolProblem(self.n, self.k, self.p, self.q, "max", r, s, (high, wide), (stride_h, stride_w), (top, left, 0, 0))
        return pool.reference(y)


def with_epilogue(problem: ConvProblem, **changes: Any) -> ConvProblem:
    """Returns the problem with some fields of its epilogue changed."""
    return replace(problem, epilogue=replace(problem.epilogue, **changes))


def depth_to_space(x: np.ndarray, b: int, mode: str) -> np.ndarray:
    """Returns x [n, k, h, w] as [n, k/b^2, h*b, w*b], as ONNX DepthToSpace does. `mode`: "dcr" or "crd"."""
    n, k, h, w = x.shape
    if mode == "dcr":
        x = x.reshape(n, b, b, k // b**2, h, w).transpose(0, 3, 4, 1, 5, 2)
    else:
        x = x.reshape(n, k // b**2, b, b, h, w).transpose(0, 1, 4, 2, 5, 3)
    return x.reshape(n, k // b**2, h * b, w * b)


def space_to_depth(x: np.ndarray, b: int, mode: str) -> np.ndarray:
    """Returns x [n, c, h, w] as [n, c*b^2, h/b, w/b]: the inverse of depth_to_space. Mode "dcr" is ONNX SpaceToDepth."""
    n, c, h, w = x.shape
    x = x.reshape(n, c, h // b, b, w // b, b)
    return x.transpose((0, 3, 5, 1, 2, 4) if mode == "dcr" else (0, 1, 3, 5, 2, 4)).reshape(n, c * b * b, h // b, w // b)


@dataclass(frozen=True, slots=True)
class ConvTransposeProblem(Keyed, OneTensor):
    """act(conv_transpose(x, w) + bias + residual), as ONNX ConvTranspose: x [n,c,h,w], w [k,c/groups,r,s] (ONNX has c first).

    Input pixel i times tap t is added to output pixel i*stride + t*dilation - pad, if that is inside `out` = output height and
    width; `pad` = top, left. `sparse24`, `epilogue`: as in ConvProblem, but an epilogue of bias, residual, activations, scale
    and shift only.
    """

    TYPE: ClassVar[str] = "conv_transpose"
    k: int
    r: int
    s: int
    out: tuple[int, int]
    stride: tuple[int, int] = (1, 1)
    pad: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1
    sparse24: bool = False
    epilogue: Epilogue = Epilogue()

    def __post_init__(self) -> None:
        if self.epilogue.act_first or self.needs - {Feature.RESIDUAL, Feature.AFFINE, Feature.LAST_ACTIVATION, Feature.TABLE}:
            raise ValueError(f"conv_transpose: expected no pool, reordering or residual behind the activation, got {self}")
        if self.c % self.groups or self.k % self.groups:
            raise ValueError(f"conv_transpose: c={self.c} and k={self.k} must be multiples of groups={self.groups}")
        sizes = self.n, self.c, self.h, self.w, self.k, self.r, self.s, self.groups, *self.out
        if min(*sizes, *self.stride, *self.dilation) < 1:
            raise ValueError(f"conv_transpose: every size must be positive, got {self}")

    @property
    def table(self) -> tuple[float, ...]:
        return self.epilogue.table

    @property
    def needs(self) -> frozenset[Feature]:
        return self.epilogue.needs

    @property
    def in_shapes(self) -> tuple[Shape4, ...]:
        x = (self.n, self.c, self.h, self.w)
        return (x, self.out_shape) if self.epilogue.residual else (x,)

    @property
    def out_shape(self) -> Shape4:
        return (self.n, self.k, *self.out)

    @property
    def macs(self) -> int:
        return self.n * (self.c // self.groups) * self.h * self.w * self.k * self.r * self.s

    def reference(
        self,
        x: np.ndarray,
        w: np.ndarray,
        bias: Given = None,
        residual: Given = None,
        slope: Given = None,
        **affine: Given,
    ) -> np.ndarray:
        """Returns the output [n,k,*out], computed in FP32 from FP32 arrays: x [n,c,h,w], w [k,c/groups,r,s], residual as the
        output; bias, slope and `affine` (scales, shifts) [k]."""
        x, w = np.asarray(x, np.float32), np.asarray(w, np.float32)
        (sh, sw), (dh, dw), (top, left) = self.stride, self.dilation, self.pad
        high = max((self.h - 1) * sh + (self.r - 1) * dh + 1, top + self.out[0])
        wide = max((self.w - 1) * sw + (self.s - 1) * dw + 1, left + self.out[1])
        full = np.zeros((self.n, self.k, high, wide), np.float32)
        groups = self.groups, self.k // self.groups, self.c // self.groups
        flat = x.transpose(1, 0, 2, 3).reshape(groups[0], groups[2], -1)
        for i in range(self.r):
            for j in range(self.s):
                part = (w[:, :, i, j].reshape(groups) @ flat).reshape(self.k, self.n, self.h, self.w).transpose(1, 0, 2, 3)
                full[:, :, i * dh : i * dh + (self.h - 1) * sh + 1 : sh, j * dw : j * dw + (self.w - 1) * sw + 1 : sw] += part
        y = full[:, :, top : top + self.out[0], left : left + self.out[1]]
        return self.epilogue.finish(y, bias, residual, slope, **affine)


@dataclass(frozen=True, slots=True)
class PoolProblem(Keyed, OneTensor):
    """The maximum (`kind` "max") or average ("avg") of windows of r x s pixels; padding never wins a maximum.

    `out` = output height and width, which depend on ONNX's ceil_mode; `pad` = top, left, bottom, right. An average divides by
    the number of the window's pixels inside the image, or with `count_pad` inside the padded image.
    """

    TYPE: ClassVar[str] = "pool"
    kind: str
    r: int
    s: int
    out: tuple[int, int]
    stride: tuple[int, int] = (1, 1)
    pad: tuple[int, int, int, int] = (0, 0, 0, 0)
    dilation: tuple[int, int] = (1, 1)
    count_pad: bool = False

    def __post_init__(self) -> None:
        if self.kind not in ("max", "avg"):
            raise ValueError(f"pool: expected kind max or avg, got {self.kind!r}")
        if min(self.n, self.c, self.h, self.w, self.r, self.s, *self.out, *self.stride, *self.dilation) < 1:
            raise ValueError(f"pool: every size must be positive, got {self}")

    @property
    def out_shape(self) -> Shape4:
        return (self.n, self.c, *self.out)

    @property
    def is_global(self) -> bool:
        return self.out == (1, 1) and (self.r, self.s) == (self.h, self.w) and not any(self.pad)

    def reference(self, x: np.ndarray) -> np.ndarray:
        x, columns = self._along(np.asarray(x, np.float32), 1)  # along the columns, then along the rows: R + S steps, not R * S
        x, rows = self._along(x, 0)
        return x if self.kind == "max" else x / np.maximum(np.outer(rows, columns), 1)

    def _along(self, x: np.ndarray, axis: int) -> tuple[np.ndarray, np.ndarray]:
        """Pools x [n,c,*,*] along `axis` (0 rows, 1 columns); returns (maxima or sums; for each window, the number of pixels by
        which an average divides, [out]).
        """
        size, window, along = (self.h, self.w)[axis], (self.r, self.s)[axis], axis + 2
        first = np.arange(self.out[axis]) * self.stride[axis] - self.pad[axis]
        shape = (*x.shape[:along], len(first), *x.shape[along + 1 :])
        total = np.full(shape, -np.inf if self.kind == "max" else 0, np.float32)
        count = np.zeros(len(first), np.float32)
        for i in range(window):
            at = first + i * self.dilation[axis]
            ok = (at >= 0) & (at < size)
            count += at < size + self.pad[axis + 2] if self.count_pad else ok
            if not ok.any():
                continue
            tap, valid = np.take(x, np.clip(at, 0, size - 1), along), ok.reshape(-1, *(1,) * (3 - along))
            if self.kind == "max":
                np.maximum(total, tap, out=total, where=valid)
            else:
                np.add(total, tap, out=total, where=valid)
        return total, count


def window_sums(
    x: np.ndarray, w: np.ndarray, out: tuple[int, int], stride: tuple[int, int], dilation: tuple[int, int]
) -> np.ndarray:
    """Returns the convolution [n,k,*out] of x [n,c,h,w], already padded, with w [k,c/groups,r,s], in FP32.

    Windows are gathered as the columns of a matrix (im2col), which weights multiply. Output row i reads rows i*stride +
    t*dilation.
    """
    (n, c), (k, cg, r, s), (p, q) = x.shape[:2], w.shape, out
    groups = c // cg
    reach = (p - 1) * stride[0] + (r - 1) * dilation[0] + 1, (q - 1) * stride[1] + (s - 1) * dilation[1] + 1
    if reach[0] > x.shape[2] or reach[1] > x.shape[3]:
        raise ValueError(f"window_sums: the windows reach {reach}, the padded input has {x.shape[2:]}")
    along_n, along_c, along_h, along_w = x.strides
    taps = (along_h * dilation[0], along_w * dilation[1], along_h * stride[0], along_w * stride[1])
    windows = as_strided(x, (n, groups, cg, r, s, p, q), (along_n, along_c * cg, along_c, *taps), writeable=False)
    y = np.zeros((n, groups, k // groups, p, q), np.float32)
    if cg == 1:  # depthwise: a product of whole images for each tap, nothing is gathered
        by_tap = w.reshape(1, groups, k // groups, r, s, 1, 1)
        for i, j in np.ndindex(r, s):
            y += by_tap[:, :, :, i, j] * windows[:, :, :, i, j]
        return y.reshape(n, k, p, q)
    matrix = w.reshape(groups, k // groups, cg * r * s)
    rows = max(1, MOST_GATHERED // (groups * cg * r * s * q))
    for image in range(n):
        for top in range(0, p, rows):
            columns = windows[image, ..., top : top + rows, :].reshape(groups, cg * r * s, -1)
            y[image, :, :, top : top + rows] = (matrix @ columns).reshape(groups, k // groups, -1, q)
    return y.reshape(n, k, p, q)
