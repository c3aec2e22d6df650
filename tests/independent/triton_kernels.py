"""Kernels in Triton's language, compiled without a GPU, for sm_80 unless a case names another architecture. All PTX is written
by Triton's compiler.

    python -m tests.independent.triton_kernels NAME ...

prints {name: {ptx, entry, shared, warps, dependent, arguments, constants, sm, maps}} as JSON.

Needs the extra [truth]. The sources are plain on purpose: pipelines, swizzles, fragments and barriers are the compiler's.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, libdevice

# ---- kernels


@triton.jit
def matmul(a, b, c, M, N, K, a_m, a_k, b_k, b_n, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SUM: tl.constexpr):
    """Computes c[M, N] = a[M, K] b[K, N], a and b with any strides."""
    m, n = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    total = tl.zeros((BM, BN), dtype=SUM)
    for first in range(0, K, BK):
        k = first + tl.arange(0, BK)
        left = tl.load(a + m[:, None] * a_m + k[None, :] * a_k, mask=(m[:, None] < M) & (k[None, :] < K), other=0.0)
        right = tl.load(b + k[:, None] * b_k + n[None, :] * b_n, mask=(k[:, None] < K) & (n[None, :] < N), other=0.0)
        total = tl.dot(left, right, total, out_dtype=SUM)
    tl.store(c + m[:, None] * N + n[None, :], total.to(c.dtype.element_ty), mask=(m[:, None] < M) & (n[None, :] < N))


@triton.jit
def copied_product(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """Computes c = a b, all three by tensor maps that the host makes: copies in bulk, mbarriers, wgmma."""
    m, n = tl.program_id(0) * BM, tl.program_id(1) * BN
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for k in range(0, K, BK):
        total = tl.dot(a.load([m, k]), b.load([k, n]), total)
    c.store([m, n], total.to(tl.float16))


# Each copies a box of tensor x, plus 1, into the same place of tensor y; tensors have one to five dimensions.


@triton.jit
def box_1(x, y, i):
    y.store([i], x.load([i]) + 1)


@triton.jit
def box_2(x, y, i, j):
    y.store([i, j], x.load([i, j]) + 1)


@triton.jit
def box_3(x, y, i, j, k):
    y.store([i, j, k], x.load([i, j, k]) + 1)


@triton.jit
def box_4(x, y, i, j, k, m):
    y.store([i, j, k, m], x.load([i, j, k, m]) + 1)


@triton.jit
def box_5(x, y, i, j, k, m, n):
    y.store([i, j, k, m, n], x.load([i, j, k, m, n]) + 1)


@triton.jit
def conv(x, w, y, N, H, W, C, P, Q, K, STRIDE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """Computes a 3x3 convolution, pad 1, as an implicit GEMM: x[n, h, w, c], w[k, r, s, c] -> y[n, p, q, k]."""
    pixel, out = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    q, p, image = pixel % Q, pixel // Q % P, pixel // (P * Q)
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for tap in range(9):
        row, column = p * STRIDE + tap // 3 - 1, q * STRIDE + tap % 3 - 1
        inside = (image < N) & (row >= 0) & (row < H) & (column >= 0) & (column < W)
        start = ((image * H + row) * W + column) * C
        for first in range(0, C, BK):
            c = first + tl.arange(0, BK)
            pixels = tl.load(x + start[:, None] + c[None, :], mask=inside[:, None] & (c[None, :] < C), other=0.0)
            at = (out[None, :] * 9 + tap) * C + c[:, None]
            total = tl.dot(pixels, tl.load(w + at, mask=(out[None, :] < K) & (c[:, None] < C), other=0.0), total)
    keep = (pixel[:, None] < N * P * Q) & (out[None, :] < K)
    tl.store(y + pixel[:, None] * K + out[None, :], total.to(tl.float16), mask=keep)


@triton.jit
def attention(q, k, v, o, L, scale, BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr):
    """Computes softmax(scale q k^T) v of one head, keys block by block: one product's result is the other's operand."""
    m, d = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, D)
    query = tl.load(q + m[:, None] * D + d[None, :], mask=m[:, None] < L, other=0.0)
    best, weight = tl.full((BM,), -float("inf"), tl.float32), tl.zeros((BM,), tl.float32)
    total = tl.zeros((BM, D), tl.float32)
    for first in range(0, L, BN):
        n = first + tl.arange(0, BN)
        key = tl.load(k + n[None, :] * D + d[:, None], mask=n[None, :] < L, other=0.0)
        score = tl.where(n[None, :] < L, tl.dot(query, key) * scale, -float("inf"))
        top = tl.maximum(best, tl.max(score, 1))
        part, fade = tl.exp(score - top[:, None]), tl.exp(best - top)
        value = tl.load(v + n[:, None] * D + d[None, :], mask=n[:, None] < L, other=0.0)
        total = tl.dot(part.to(tl.float16), value, total * fade[:, None])
        weight, best = weight * fade + tl.sum(part, 1), top
    tl.store(o + m[:, None] * D + d[None, :], (total / weight[:, None]).to(tl.float16), mask=m[:, None] < L)


@triton.jit
def softmax(x, y, columns, B: tl.constexpr):
    at, i = x + tl.program_id(0) * columns, tl.arange(0, B)
    value = tl.load(at + i, mask=i < columns, other=-float("inf")).to(tl.float32)
    part = tl.exp(value - tl.max(value, 0))
    tl.store(y + tl.program_id(0) * columns + i, (part / tl.sum(part, 0)).to(tl.float16), mask=i < columns)


@triton.jit
def layer_norm(x, scale, shift, y, columns, B: tl.constexpr):
    i = tl.arange(0, B)
    inside, at = i < columns, tl.program_id(0) * columns + i
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    off = tl.where(inside, value - tl.sum(value, 0) / columns, 0.0)
    deviation = tl.sqrt(tl.sum(off * off, 0) / columns + 1e-5)
    result = off / deviation * tl.load(scale + i, mask=inside, other=0.0) + tl.load(shift + i, mask=inside, other=0.0)
    tl.store(y + at, result.to(tl.float16), mask=inside)


@triton.jit
def transpose(x, y, M, N, B: tl.constexpr):
    m, n = tl.program_id(0) * B + tl.arange(0, B), tl.program_id(1) * B + tl.arange(0, B)
    tile = tl.load(x + m[:, None] * N + n[None, :], mask=(m[:, None] < M) & (n[None, :] < N), other=0.0)
    tl.store(y + n[:, None] * M + m[None, :], tl.trans(tile), mask=(n[:, None] < N) & (m[None, :] < M))


@triton.jit
def scan(x, y, columns, B: tl.constexpr):
    i = tl.arange(0, B)
    at = tl.program_id(0) * columns + i
    tl.store(y + at, tl.cumsum(tl.load(x + at, mask=i < columns, other=0.0), 0), mask=i < columns)


@triton.jit
def sort(x, y, columns, B: tl.constexpr):
    at = tl.program_id(0) * columns + tl.arange(0, B)
    tl.store(y + at, tl.sort(tl.load(x + at)))


@triton.jit
def argmax(x, y, columns, B: tl.constexpr):
    i = tl.arange(0, B)
    value = tl.load(x + tl.program_id(0) * columns + i, mask=i < columns, other=-float("inf"))
    tl.store(y + tl.program_id(0), tl.argmax(value, 0))


@triton.jit
def histogram(x, y, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    counts = tl.histogram(tl.load(x + i, mask=i < n, other=0), 64, mask=i < n)
    tl.atomic_add(y + tl.arange(0, 64), counts)


@triton.jit
def functions(x, y, n, B: tl.constexpr):
    """Computes special functions, conversions, and quotients of whole numbers, and stores their sum."""
    i = tl.program_id(0) * B + tl.arange(0, B)
    v = tl.load(x + i, mask=i < n, other=0.0).to(tl.float32)
    whole = (v * 16).to(tl.int32)
    total = tl.erf(v) + tl.sigmoid(v) + tl.sin(v) + tl.cos(v) + tl.sqrt(tl.abs(v)) + tl.log(1 + tl.abs(v)) + tl.exp2(v)
    tl.store(y + i, total + ((whole // 7) * 3 + whole % 5).to(tl.float32), mask=i < n)


@triton.jit
def numbers(x, w, y, n, B: tl.constexpr):
    """Computes correctly rounded roots and quotients, unsigned and 64-bit whole numbers; loads past L1, and volatile ones."""
    i = tl.program_id(0) * B + tl.arange(0, B)
    v = tl.load(x + i, mask=i < n, other=1.0, cache_modifier=".cg")
    k = tl.load(w + i, mask=i < n, other=1, volatile=True)
    u, wide = k.to(tl.uint32, bitcast=True), k.to(tl.int64) * 1000003
    whole = (u // 7 % 1000).to(tl.int32) + (u % (v.to(tl.uint32) + 3)).to(tl.int32) + tl.where(u >= 2000000000, 5, 0)
    whole += (wide // (k.to(tl.int64) // 16 + 1000)).to(tl.int32) % 1000 + (wide % 97).to(tl.int32) + tl.where(wide >= 0, 9, 0)
    part = tl.div_rn(v, 3.7) + tl.sqrt_rn(v) + tl.rsqrt(v + 1) + tl.where(v <= 2.0, 1.0, 0.25) + 1.0 / (v + 2)
    tl.store(y + i, part + whole.to(tl.float32), mask=i < n)


@triton.jit
def counters(x, y, n, B: tl.constexpr):
    """Counts values modulo 8 in y[0:8], and gathers bits of the values in y[8:16], by atomics."""
    i = tl.program_id(0) * B + tl.arange(0, B)
    v = tl.load(x + i, mask=i < n, other=0)
    tl.atomic_add(y + v % 8, 1, mask=i < n)
    tl.atomic_or(y + 8 + v % 8, 1 << (v // 8), mask=i < n)


@triton.jit
def dependent(x, y, n, B: tl.constexpr):
    """Computes y = x + 3 y in a chain of launches, each of which may begin before the launch ahead has ended."""
    i = tl.program_id(0) * B + tl.arange(0, B)
    gdc_wait()
    total = tl.load(x + i, mask=i < n, other=0) + 3 * tl.load(y + i, mask=i < n, other=0)
    gdc_launch_dependents()
    tl.store(y + i, total, mask=i < n)


@triton.jit
def words(x, w, y, n, B: tl.constexpr):
    """Computes with 64-bit whole numbers, and quotients of their low words."""
    i = tl.program_id(0) * B + tl.arange(0, B)
    a, b = tl.load(x + i, mask=i < n, other=1), tl.load(w + i, mask=i < n, other=1)
    total = tl.where(a >= b, a & b, a | b) + a % b + b // a + tl.where(a == b - 1, b, a)
    tl.store(y + i, total + (a.to(tl.uint32) // b.to(tl.uint32)).to(tl.int64), mask=i < n)


@triton.jit
def shorts(x, w, y, n, B: tl.constexpr):
    """Computes with whole numbers of 8 and 16 bits."""
    i = tl.program_id(0) * B + tl.arange(0, B)
    a, b = tl.load(x + i, mask=i < n, other=0), tl.load(w + i, mask=i < n, other=0)
    hashed = (i * 40503).to(tl.uint16)
    both = (b & hashed.to(tl.int16)).to(tl.float32) * 0.125
    total = a.to(tl.float32) * 0.5 + hashed.to(tl.float32) * 0.25 + tl.where(b != a.to(tl.int16), 1.0, 2.0)
    tl.store(y + i, total + both + (b ^ hashed.to(tl.int16)).to(tl.float32), mask=i < n)


@triton.jit
def compared(x, w, y, n, B: tl.constexpr):
    """Stores as bits which of two numbers is less, and which is a NaN."""
    i = tl.program_id(0) * B + tl.arange(0, B)
    a = tl.load(x + i, mask=i < n, other=0.0, cache_modifier=".cg")
    b = tl.load(w + i, mask=i < n, other=0.0, cache_modifier=".cg")
    total = tl.where(a < b, 1, 0) + tl.where(a <= b, 0, 2) + tl.where(a > b, 0, 4) + tl.where(a != a, 8, 0)
    tl.store(y + i, total + tl.where((a != a) | (b != b), 16, 0), mask=i < n)


@triton.jit
def masks(x, w, p, q, y, n, B: tl.constexpr):
    """Stores 1 where a comparison holds; each of eight comparisons has a row of y."""
    i = tl.program_id(0) * B + tl.arange(0, B)
    a, b = tl.load(x + i, mask=i < n, other=0), tl.load(w + i, mask=i < n, other=0)
    u, v = a.to(tl.uint32, bitcast=True), b.to(tl.uint32, bitcast=True)
    c, d = tl.load(p + i, mask=i < n, other=0.0), tl.load(q + i, mask=i < n, other=0.0)
    tl.store(y + i, 1, mask=u >= v)
    tl.store(y + n + i, 1, mask=u <= v)
    tl.store(y + 2 * n + i, 1, mask=a <= b)
    tl.store(y + 3 * n + i, 1, mask=~(c <= d))
    tl.store(y + 4 * n + i, 1, mask=~(c > d))
    tl.store(y + 5 * n + i, 1, mask=a.to(tl.int64) * 5 >= b.to(tl.int64) * 7)
    tl.store(y + 6 * n + i, 1, mask=a.to(tl.int16) != b.to(tl.int16))
    tl.store(y + 7 * n + i, 1, mask=(c < d) | (a == 5))


@triton.jit
def carried(x, y, n, B: tl.constexpr):
    """Stores an index where flags that a loop carries are set; each thread has a row of n values."""
    at = (tl.program_id(0) * B + tl.arange(0, B)) * n
    odd, all_large = tl.full((B,), False, tl.int1), tl.full((B,), True, tl.int1)
    for k in range(n):
        v = tl.load(x + at + k)
        odd, all_large = odd ^ (v > 3), all_large & (v > 1)
        tl.store(y + at + k, k, mask=odd | all_large)


@triton.jit
def gathered(x, w, y, B: tl.constexpr):
    """Gathers y[i] = x[w[i]]: from lanes if one warp holds all values, through shared memory if several do."""
    i = tl.arange(0, B)
    tl.store(y + i, tl.gather(tl.load(x + i), tl.load(w + i), 0))


@triton.jit
def turned(x, y, M: tl.constexpr, N: tl.constexpr):
    """Transposes a matrix by two blocks of a cluster: half of the values that each stores are in the other's shared memory."""
    i = tl.arange(0, M * N)
    tl.store(y + i, tl.reshape(tl.trans(tl.reshape(tl.load(x + i), (M, N))), (M * N,)))


@triton.jit
def rounded(x, w, y, n, B: tl.constexpr):
    """Stores roundings, each in a row of y: to FP16, to nearest and toward zero, to bfloat16, to whole numbers; and the error
    of a rounded product, by a fused multiplication and addition.
    """
    i = tl.program_id(0) * B + tl.arange(0, B)
    inside = i < n
    a, b = tl.load(x + i, mask=inside, other=0.0), tl.load(w + i, mask=inside, other=0.0)
    tl.store(y + i, a.to(tl.float16).to(tl.float32), mask=inside)
    tl.store(y + n + i, a.to(tl.float16, fp_downcast_rounding="rtz").to(tl.float32), mask=inside)
    tl.store(y + 2 * n + i, a.to(tl.bfloat16).to(tl.float32), mask=inside)
    tl.store(y + 3 * n + i, a.to(tl.int32).to(tl.float32), mask=inside)
    product = a * b
    tl.store(y + 4 * n + i, tl.fma(a, b, -product), mask=inside)


@triton.jit
def roots(x, y, n, B: tl.constexpr):
    """Computes roots and quotients by NVIDIA's device library, which here keeps numbers below the smallest normal one."""
    i = tl.program_id(0) * B + tl.arange(0, B)
    v = tl.load(x + i, mask=i < n, other=1.0)
    total = libdevice.rsqrt(v) + libdevice.rcp_rn(v) + libdevice.fast_dividef(v, v + 3) + libdevice.tanh(v)
    tl.store(y + i, total, mask=i < n)


@triton.jit
def clipped(x, w, y, n, B: tl.constexpr):
    """Computes the nearest whole number, halves to even, by NVIDIA's device library; stores b where b is less."""
    i = tl.program_id(0) * B + tl.arange(0, B)
    a, b = tl.load(x + i, mask=i < n, other=0.0), tl.load(w + i, mask=i < n, other=0.0)
    tl.store(y + i, tl.minimum(libdevice.rint(a), b), mask=i < n)


# ---- the cases: kernels with types and sizes

HALF, SINGLE, BRAIN, INT, LONG = "*fp16", "*fp32", "*bf16", "*i32", "*i64"


@dataclass(frozen=True, slots=True)
class Case:
    """A kernel to compile. `types`: of its arguments but constants, in order; integers in `by_16` are multiples of 16."""

    kernel: object
    types: dict[str, str]
    constants: dict[str, object]
    warps: int = 4
    stages: int = 3
    by_16: tuple[str, ...] = ()
    sm: int = 80
    options: Mapping[str, object] = field(default_factory=dict)  # the compiler's


def product(a=HALF, c=HALF, tile=(64, 64, 32), one=("a_k", "b_n"), total=tl.float32, even=True, **how) -> Case:
    """Returns a case of `matmul`. `one`: the strides of 1, which are constants, as Triton's own launcher makes them."""
    sizes = [n for n in ("M", "N", "K", "a_m", "a_k", "b_k", "b_n") if n not in one]
    constants = {**dict.fromkeys(one, 1), **dict(zip(("BM", "BN", "BK"), tile, strict=True)), "SUM": total}
    types = {"a": a, "b": a, "c": c, **dict.fromkeys(sizes, "i32")}
    return Case(matmul, types, constants, **how, by_16=tuple(sizes) if even else ())


def copied(tile, **how) -> Case:
    bm, bn, bk = tile
    maps = {
        name: f"tensordesc<fp16[{rows}, {columns}]>" for name, rows, columns in (("a", bm, bk), ("b", bk, bn), ("c", bm, bn))
    }
    return Case(copied_product, maps | dict.fromkeys("MNK", "i32"), {"BM": bm, "BN": bn, "BK": bk}, **how, sm=90)


def box(*sizes: int) -> Case:
    kernel = (box_1, box_2, box_3, box_4, box_5)[len(sizes) - 1]
    described = f"tensordesc<fp16[{', '.join(map(str, sizes))}]>"
    return Case(kernel, {"x": described, "y": described, **dict.fromkeys("ijkmn"[: len(sizes)], "i32")}, {}, sm=90)


def by_rows(kernel, x: str, y: str, block: int, *more: str) -> Case:
    return Case(kernel, {"x": x, **dict.fromkeys(more, SINGLE), "y": y, "columns": "i32"}, {"B": block})


IMAGE = {"x": HALF, "w": HALF, "y": HALF, **dict.fromkeys(("N", "H", "W", "C", "P", "Q", "K"), "i32")}
# fmt: off
CASES = {
    "matmul": product(), "matmul_128x128": product(tile=(128, 128, 32), warps=8, stages=4),
    "matmul_128x64": product(tile=(128, 64, 64)), "matmul_one_warp": product(tile=(32, 32, 64), warps=1, stages=2),
    "matmul_transposed_a": product(one=("a_m", "b_n")), "matmul_transposed_b": product(one=("a_k", "b_k")),
    "matmul_half_sums": product(total=tl.float16), "matmul_bfloat16": product(BRAIN, SINGLE),
    "matmul_odd": product(even=False), "matmul_float_result": product(c=SINGLE, tile=(64, 128, 32), stages=5),
    "matmul_float": product(SINGLE, SINGLE),
    "matmul_hopper": product(sm=90), "matmul_hopper_128x128": product(tile=(128, 128, 64), warps=8, stages=4, sm=90),
    "matmul_hopper_transposed_b": product(tile=(64, 128, 64), one=("a_k", "b_k"), sm=90),
    "tma_64x64x32": copied((64, 64, 32)), "tma_64x64x16": copied((64, 64, 16)),
    "tma_128x128x64": copied((128, 128, 64)), "tma_128x128x64_8_warps": copied((128, 128, 64), warps=8),
    **{f"box_{len(sizes)}d_{2 * sizes[-1]}_bytes": box(*sizes) for sizes in (
        (256,), (16, 8), (8, 16), (16, 32), (8, 64), (8, 128), (4, 2, 64), (2, 8, 16), (2, 4, 2, 32), (1, 2, 2, 4, 64),
        (2, 1, 2, 4, 8),
    )},
    **{f"conv_stride{stride}": Case(conv, IMAGE, {"STRIDE": stride, "BM": 64, "BN": 64, "BK": 32}, by_16=("C", "K"))
       for stride in (1, 2)},
    "attention": Case(attention, {**dict.fromkeys("qkvo", HALF), "L": "i32", "scale": "fp32"}, {"BM": 64, "BN": 64, "D": 64},
                      stages=2),
    "attention_hopper": Case(attention, {**dict.fromkeys("qkvo", HALF), "L": "i32", "scale": "fp32"},
                             {"BM": 64, "BN": 64, "D": 64}, stages=2, sm=90),
    "softmax": by_rows(softmax, HALF, HALF, 1024), "layer_norm": by_rows(layer_norm, HALF, HALF, 512, "scale", "shift"),
    "scan": by_rows(scan, SINGLE, SINGLE, 1024), "sort": by_rows(sort, INT, INT, 256),
    "argmax": by_rows(argmax, SINGLE, INT, 512),
    "transpose": Case(transpose, {"x": HALF, "y": HALF, "M": "i32", "N": "i32"}, {"B": 64}, by_16=("M", "N")),
    "histogram": Case(histogram, {"x": INT, "y": INT, "n": "i32"}, {"B": 1024}),
    "numbers": Case(numbers, {"x": SINGLE, "w": INT, "y": SINGLE, "n": "i32"}, {"B": 512}),
    "counters": Case(counters, {"x": INT, "y": INT, "n": "i32"}, {"B": 512}),
    "functions": Case(functions, {"x": HALF, "y": SINGLE, "n": "i32"}, {"B": 512}),
    "dependent": Case(dependent, {"x": INT, "y": INT, "n": "i32"}, {"B": 256}, sm=90, options={"launch_pdl": True}),
    "words": Case(words, {"x": LONG, "w": LONG, "y": LONG, "n": "i32"}, {"B": 128}),
    "shorts": Case(shorts, {"x": "*u8", "w": "*i16", "y": SINGLE, "n": "i32"}, {"B": 128}),
    "compared": Case(compared, {"x": SINGLE, "w": SINGLE, "y": INT, "n": "i32"}, {"B": 512}, by_16=("n",)),
    "masks": Case(masks, {"x": INT, "w": INT, "p": SINGLE, "q": SINGLE, "y": INT, "n": "i32"}, {"B": 128}),
    "carried": Case(carried, {"x": INT, "y": INT, "n": "i32"}, {"B": 32}, warps=1),
    "gathered_lanes": Case(gathered, {"x": INT, "w": INT, "y": INT}, {"B": 32}, warps=1),
    "gathered_half": Case(gathered, {"x": HALF, "w": INT, "y": HALF}, {"B": 256}),
    "turned_in_cluster": Case(turned, {"x": HALF, "y": HALF}, {"M": 64, "N": 32}, sm=90, options={"num_ctas": 2}),
    "rounded": Case(rounded, {"x": SINGLE, "w": SINGLE, "y": SINGLE, "n": "i32"}, {"B": 128}),
    "roots": Case(roots, {"x": SINGLE, "y": SINGLE, "n": "i32"}, {"B": 128}, options={"enable_reflect_ftz": False}),
    "clipped": Case(clipped, {"x": SINGLE, "w": SINGLE, "y": SINGLE, "n": "i32"}, {"B": 256}, by_16=("n",),
                    options={"enable_reflect_ftz": False}),
}
# fmt: on


def compiled(case: Case) -> dict:
    names = case.kernel.arg_names
    signature = {n: case.types.get(n, "constexpr") for n in names}
    aligned = {n for n, t in case.types.items() if t.startswith("*")} | set(case.by_16)
    hints = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n in aligned}
    source = ASTSource(fn=case.kernel, signature=signature, constexprs=case.constants, attrs=hints)
    options = {"num_warps": case.warps, "num_stages": case.stages, "enable_fp_fusion": True, **case.options}
    made = triton.compile(source, target=GPUTarget("cuda", case.sm, 32), options=options)
    about = made.metadata
    return {
        "ptx": made.asm["ptx"],
        "entry": about.name,
        "shared": about.shared,
        "warps": about.num_warps,
        "dependent": about.launch_pdl,
        "arguments": {n: signature[n] for n in names if n in case.types},
        "constants": {n: v for n, v in case.constants.items() if isinstance(v, int)},
        "sm": case.sm,
        "maps": [[m["block_size"], m["swizzle"]] for m in about.tensordesc_meta or ()],
    }


if __name__ == "__main__":
    print(json.dumps({name: compiled(CASES[name]) for name in sys.argv[1:] or CASES}))
