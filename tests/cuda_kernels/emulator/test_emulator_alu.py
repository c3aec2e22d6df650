"""Each arithmetic instruction against NumPy, on values that include the awkward ones."""

import struct
from pathlib import Path

import numpy as np
import pytest

from cuda_kernels.compile import compile_kernel
from cuda_kernels.emulator import Memory, Options, launch, load

SOURCE = str(Path(__file__).parents[2] / "faulty" / "golden_alu.cu")
N = 300


def run(kernel: str, columns: int, *arrays) -> np.ndarray:
    program = load(compile_kernel(SOURCE, {}, "sm_80").ptx, kernel)
    memory = Memory()
    inputs = [memory.upload(a) for a in arrays]
    out = memory.alloc(columns * N * 4)
    params = struct.pack("<QQQQi", *inputs, out, N)
    launch(program, (3, 1, 1), (128, 1, 1), 0, params, memory, options=Options())
    return memory.read(out, columns * N * 4).view(np.uint32).reshape(columns, N)


def u(x):
    return (
        np.asarray(x).astype(np.int64).astype(np.uint32)
        if np.asarray(x).dtype != object
        else np.array([int(v) & 0xFFFFFFFF for v in x], np.uint32)
    )


def each(f, *xs):
    return u(np.array([f(*(int(x) for x in t)) for t in zip(*xs, strict=True)], object))


def tdiv(x, y):
    return -1 if y == 0 else abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)


def trem(x, y):
    return -1 if y == 0 else abs(x) % abs(y) * (1 if x >= 0 else -1)


def shr(x, n, top):
    return x >> min(n, 32) if not top else x >> min(n, 31)


def prmt(x, y, s):
    v, r = x | y << 32, 0
    for i in range(4):
        byte = v >> 8 * (s >> 4 * i & 7) & 255
        r |= ((255 if byte & 128 else 0) if s >> 4 * i & 8 else byte) << 8 * i
    return r


def bfe(x, pos, length, signed):
    bits = [(x >> i & 1) if i < 32 else None for i in range(pos, pos + length)]
    sign = x >> min(pos + length - 1, 31) & 1 if signed and length else 0
    value = sum((sign if v is None else v) << i for i, v in enumerate(bits))
    return value | (-1 << length if sign else 0)


def bfi(x, y, pos, length):
    for i in range(length):
        if pos + i < 32:
            y = y & ~(1 << pos + i) | (x >> i & 1) << pos + i
    return y


def clamp(x):
    return max(-(1 << 31), min((1 << 31) - 1, x))


def dp4a(x, y, z):
    def s8(v, i):
        return ((v >> 8 * i & 255) ^ 128) - 128

    return z + sum(s8(x, i) * s8(y, i) for i in range(4))


def reverse(x, w):
    return int(format(x, f"0{w}b")[::-1], 2)


def test_32_bit_integers():
    rng = np.random.default_rng(1)
    special = np.array([0, 1, 2, 5, 31, 32, 33, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0xFFFF, 0x8000, 0x80, 1000], np.uint32)
    a, b, c = (rng.integers(0, 1 << 32, N, dtype=np.uint64).astype(np.uint32) for _ in range(3))
    a[:196], b[:196] = np.repeat(special, 14), np.tile(special, 14)
    c[:100:2] %= 64
    A, B, C = (x.astype(object) for x in (a, b, c))
    SA, SB, SC = (x.astype(np.int32).astype(object) for x in (a, b, c))

    want = {
        "add": u(A + B),
        "sub": u(A - B),
        "mul.lo": u(SA * SB),
        "mul.hi.u": u(A * B >> 32),
        "mul.hi.s": u(SA * SB >> 32),
        "mad.lo": u(A * B + C),
        "mad.hi": u((SA * SB >> 32) + SC),
        "div.u": each(tdiv, A, B),
        "div.s": each(tdiv, SA, SB),
        "rem.u": each(trem, A, B),
        "rem.s": each(trem, SA, SB),
        "min.u": np.minimum(a, b),
        "min.s": u(np.minimum(SA, SB)),
        "max.u": np.maximum(a, b),
        "max.s": u(np.maximum(SA, SB)),
        "abs": u(abs(SA)),
        "neg": u(-SA),
        "and": a & b,
        "or": a | b,
        "xor": a ^ b,
        "not": ~a,
        "shl": each(lambda x, n: x << min(n, 32), A, B),
        "shr.u": each(lambda x, n: shr(x, n, False), A, B),
        "shr.s": each(lambda x, n: shr(x, n, True), SA, B),
        "shf.l": each(lambda x, y, n: (y << 32 | x) << (n & 31) >> 32, A, B, C),
        "shf.r": each(lambda x, y, n: (y << 32 | x) >> (n & 31), A, B, C),
        "shf.clamp": each(lambda x, y, n: (y << 32 | x) >> min(n & 63, 32), A, B, C),
        "lop3": (a & b) | (b & c) | (a & c),
        "prmt": each(prmt, A, B, C),
        "bfe.u": each(lambda x, y, z: bfe(x, y & 31, z & 31, False), A, B, C),
        "bfe.s": each(lambda x, y, z: bfe(x, y & 31, z & 31, True), A, B, C),
        "bfi": each(lambda x, y, z: bfi(x, y, y & 31, z & 31), A, B, C),
        "bfind": each(lambda x: x.bit_length() - 1, A),
        "popc": each(lambda x: bin(x).count("1"), A),
        "clz": each(lambda x: 32 - x.bit_length(), A),
        "brev": each(lambda x: reverse(x, 32), A),
        "sad": u(abs(SA - SB) + SC),
        "mul24": u((A & 0xFFFFFF) * (B & 0xFFFFFF)),
        "add.sat": each(lambda x, y: clamp(x + y), SA, SB),
        "dp4a": each(dp4a, A, B, SC),
        "selp": np.where(SA < SB, a, c),
        "setp.and": ((a < b) & ~(b > c)).astype(np.uint32),
        "setp.q": np.where(SA >= SB, 3, 2).astype(np.uint32),
        "halves": a >> 16 | a << 16,
        "cvt.s16": u(a.astype(np.int16)),
        "cvt.s8": u(a.astype(np.int8)),
        "cvt.u8": a & 255,
        "set": np.where(SA <= SB, 0xFFFFFFFF, 0).astype(np.uint32),
        "wide.u": each(lambda x, y: x * y >> 7, A, B),
        "wide.s": each(lambda x, y: trem(x * y, 1000003), SA, SB),
        "brev64": each(lambda x, y: reverse(x | y << 32, 64), A, B),
    }
    got = run("alu32", len(want), a, b, c)
    for row, (name, expected) in zip(got, want.items(), strict=True):
        bad = np.flatnonzero(row != expected)
        assert not bad.size, (name, hex(a[bad[0]]), hex(b[bad[0]]), hex(c[bad[0]]), hex(row[bad[0]]), hex(expected[bad[0]]))


def flush(x):
    return np.where(np.abs(x) < np.float32(2**-126), np.copysign(np.float32(0), x), x).astype(np.float32)


def toward_zero(x, y):
    exact = x.astype(np.float64) * y.astype(np.float64)
    r = (x * y).astype(np.float32)
    back = np.abs(r.astype(np.float64)) > np.abs(exact)
    return np.where(back & ~(np.isnan(exact) | np.isinf(x) | np.isinf(y)), np.nextafter(r, np.float32(0)), r)


def saturate(x, low, high, kind):
    safe = np.where(np.isnan(x), 0, np.clip(x.astype(np.float64), low, high))
    return safe.astype(np.int64).astype(kind).view(np.uint32)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_floats():
    rng = np.random.default_rng(2)
    special = np.array(
        [0, -0.0, 1, -1, 0.5, 1.5, 2.5, -2.5, 1e-42, -1e-42, 65520, 65519, 3e38, np.inf, -np.inf, np.nan, 6e-8, 3e-8],
        np.float32,
    )
    a, b, c = (rng.standard_normal(N).astype(np.float32) * np.float32(10) for _ in range(3))
    k = len(special)
    a[: k * 16], b[: k * 16] = np.repeat(special, 16), np.tile(special[:16], k)
    wide = a.astype(np.float64)

    fma = wide * b.astype(np.float64) + c.astype(np.float64)
    half = a.astype(np.float16)
    low, high = (np.where(np.isnan(x), 0x7FFF, x.astype(np.float16).view(np.uint16)).astype(np.uint32) for x in (b, a))
    pair = low | high << 16
    bits = a.view(np.uint32).astype(np.uint64)
    bf = np.where(np.isnan(a), 0x7FFF, (bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint32)
    exact = {
        "add": a + b,
        "sub": a - b,
        "mul": a * b,
        "div": a / b,
        "fma": fma.astype(np.float32),
        "min": np.fmin(a, b),
        "max": np.fmax(a, b),
        "max.nan": np.maximum(a, b),
        "abs": np.abs(a),
        "neg": -a,
        "copysign": np.copysign(b, a),
        "rcp": np.float32(1) / a,
        "sqrt": np.sqrt(a),
        "add.ftz": flush(flush(a) + flush(b)),
        "mul.rz": toward_zero(a, b),
        "mul.sat": np.clip(np.nan_to_num(a * b, nan=0, posinf=1, neginf=0), 0, 1) + np.float32(0),
        "rni": np.rint(a),
        "rzi": np.trunc(a),
        "rmi": np.floor(a),
        "rpi": np.ceil(a),
        "s32": saturate(np.trunc(wide), -(2**31), 2**31 - 1, np.int32),
        "u32": saturate(np.rint(wide), 0, 2**32 - 1, np.uint32),
        "from s32": a.view(np.int32).astype(np.float32),
        "f16": half.astype(np.float32),
        "f16x2": pair,
        "f64": (wide * wide).astype(np.float32),
        "ltu": np.where(~(a >= b), a, b),
        "ne": np.where((a < b) | (a > b), a, b),
        "bf16": bf | bf << 16,
    }
    close = {
        "ex2": np.exp2(a),
        "lg2": np.log2(a),
        "rsqrt": 1 / np.sqrt(a),
        "sin": np.sin(a),
        "cos": np.cos(a),
        "tanh": np.tanh(a),
    }
    got = run("alu_float", len(exact) + len(close), a, b, c)
    for row, (name, expected) in zip(got, exact.items(), strict=False):
        same = (
            row == expected.view(np.uint32)
            if expected.dtype != np.float32
            else (row == expected.view(np.uint32)) | (np.isnan(expected) & np.isnan(row.view(np.float32)))
        )
        if name in ("min", "max", "max.nan"):  # NumPy leaves the sign of zero open
            same |= (a == 0) & (b == 0)
        bad = np.flatnonzero(~same)
        assert not bad.size, (name, a[bad[0]], b[bad[0]], row.view(np.float32)[bad[0]], expected[bad[0]])
    for row, (name, expected) in zip(got[len(exact) :], close.items(), strict=True):
        sane = np.abs(a) < 100
        np.testing.assert_allclose(row.view(np.float32)[sane], expected[sane], rtol=2e-6, atol=1e-6, err_msg=name)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_halves():
    rng = np.random.default_rng(3)
    special = np.array([0, 0x8000, 0x3C00, 0xBC00, 0x7BFF, 0x0001, 0x03FF, 0x0400, 0x7C00, 0xFC00, 0x7E00, 0x3555], np.uint16)
    a, b, c = (rng.integers(0, 1 << 32, N, dtype=np.uint64).astype(np.uint32) for _ in range(3))
    a[:144] = np.repeat(special, 12) | np.uint32(0x35550000)
    b[:144] = np.tile(special, 12) | np.uint32(0x03FF0000)
    A, B, C = (x.view(np.float16).reshape(N, 2) for x in (a, b, c))
    wide = [x.astype(np.float64) for x in (A, B, C)]
    fma = (wide[0] * wide[1] + wide[2]).astype(np.float16)
    relu = np.where(np.isnan(fma), fma, np.maximum(fma, np.float16(0)))
    less, at_least = wide[0] < wide[1], wide[0] >= wide[1]
    total = (A[:, 0] + A[:, 1]).astype(np.float16)
    low = wide[0][:, 0]
    rounded = np.where(np.isnan(low), 0, np.clip(np.rint(low), -(2**31), 2**31 - 1)).astype(np.int64).astype(np.int32)
    ints = a.view(np.int32).astype(np.float64).astype(np.float16)

    def both(x):
        return np.stack([x, x], 1)

    want = {
        "add": A + B,
        "sub": A - B,
        "mul": A * B,
        "fma": fma,
        "min": np.fmin(A, B),
        "max": np.fmax(A, B),
        "abs": np.abs(A),
        "neg": -A,
        "fma.relu": relu,
        "setp": less[:, 0] + 2 * less[:, 1].astype(np.uint32),
        "set": at_least.astype(np.float16),
        "add.f16": both(total),
        "cvt.s32": rounded.view(np.uint32),
        "from s32": both(ints),
    }
    got = run("alu_half", len(want), a, b, c)
    for row, (name, expected) in zip(got, want.items(), strict=True):
        if expected.dtype == np.float16:
            values = row.view(np.float16).reshape(N, 2)
            same = (values.view(np.uint16) == expected.view(np.uint16)) | (np.isnan(values) & np.isnan(expected))
            if name in ("min", "max", "fma.relu"):
                same |= (values == 0) & (expected == 0)
            same = same.all(1)
        else:
            same = row == expected.astype(np.uint32)
        bad = np.flatnonzero(~same)
        assert not bad.size, (name, hex(a[bad[0]]), hex(b[bad[0]]), hex(c[bad[0]]), hex(row[bad[0]]), expected[bad[0]])


# ---- approximate instructions: PTX ISA 9.7.3. Largest difference of a result from f(x) in FP64: units in the last place, a
# share of f(x), or an absolute error where |f(x)| <= 1.

DOCUMENTED = {
    "rcp.approx": (lambda x: 1 / x, 1, 0, 0),
    "div.approx": (lambda x: 3 / x, 2, 0, 0),
    "div.full": (lambda x: 3 / x, 2, 0, 0),
    "sqrt.approx": (np.sqrt, 0, 2**-23, 0),
    "rsqrt.approx": (lambda x: 1 / np.sqrt(x), 0, 2**-22.9, 0),
    "sin.approx": (np.sin, 0, 0, 2**-20.5),
    "cos.approx": (np.cos, 0, 0, 2**-20.5),
    "ex2.approx": (np.exp2, 2, 0, 0),
    "lg2.approx": (np.log2, 0, 2**-22, 2**-22),
    "tanh.approx": (np.tanh, 0, 2**-11, 0),
}
ONE_FUNCTION = """
.version 8.0
.target sm_80
.address_size 64
.visible .entry one(.param .u64 at) {{
  .reg .f32 %f<3>; .reg .b32 %r<4>; .reg .b64 %rd<4>;
  ld.param.u64 %rd0, [at];
  mov.u32 %r0, %ctaid.x; mov.u32 %r1, %ntid.x; mov.u32 %r2, %tid.x; mad.lo.u32 %r3, %r0, %r1, %r2;
  mul.wide.u32 %rd1, %r3, 4; add.u64 %rd2, %rd0, %rd1;
  ld.global.f32 %f1, [%rd2]; mov.f32 %f0, 0f40400000;
  {}.f32 %f2, {}%f1;
  st.global.f32 [%rd2], %f2;
  ret;
}}
"""


def one(instruction: str, x: np.ndarray, **options: tuple[str, ...]) -> np.ndarray:
    """The instruction of each number; div: of 3 and each."""
    program = load(ONE_FUNCTION.format(instruction, "%f0, " if instruction[:3] == "div" else ""))
    memory = Memory()
    at = memory.upload(x)
    launch(program, (x.size // 32, 1, 1), (32, 1, 1), 0, struct.pack("<Q", at), memory, options=Options(**options))
    return memory.read(at, x.nbytes).view(np.float32)


@pytest.mark.parametrize("flush", ["", ".ftz"])
@pytest.mark.parametrize("name", DOCUMENTED)
def test_both_ends_of_a_documented_error(name, flush):
    function, units, share, absolute = DOCUMENTED[name]
    x = np.random.default_rng(5).uniform(0.01, 6.2, 4096).astype(np.float32)
    exact, stem = function(x.astype(np.float64)), name.partition(".")[0]
    ulp = 2.0 ** (np.floor(np.log2(np.abs(exact))) - 23)
    bound = np.where((absolute > 0) & (np.abs(exact) <= 1), absolute, units * ulp + share * np.abs(exact))
    near, low, high = (one(name + flush, x, **ends) for ends in ({}, {"low_ends": (stem,)}, {"high_ends": (stem,)}))
    assert (np.abs(near - exact) <= 2.6 * ulp).all(), "as libm has it"
    for y, way in ((low, -1), (high, 1)):
        off = way * (y.astype(np.float64) - near)  # a share in whole units, sums rounded
        assert (off > 0).all() and (off <= bound + 1.1 * ulp).all() and (off >= bound - 2.1 * ulp).all()


@pytest.mark.parametrize("name", ["ex2.approx", "rcp.approx", "lg2.approx", "tanh.approx"])
def test_ends_leave_infinity_and_nan(name):
    x = np.tile(np.array([np.nan, np.inf, -np.inf, 0], np.float32), 8)
    with np.errstate(all="ignore"):
        exact = DOCUMENTED[name][0](x)
    for end in ("low_ends", "high_ends"):
        got = one(name, x, **{end: (name.partition(".")[0],)})
        whole = ~np.isfinite(exact)
        np.testing.assert_array_equal(got[whole], exact[whole])


def test_quotient_where_the_reciprocal_is_zero():
    x = np.tile(np.array([2.0**126, 2.0**126 * 1.01, np.inf, np.nan], np.float32), 8)
    np.testing.assert_array_equal(one("div.approx", x)[:4], np.array([3 * 2.0**-126, 0, 0, np.nan], np.float32))
    np.testing.assert_array_equal(one("div.full", x)[:3], np.float32(3) / x[:3])


@pytest.mark.parametrize("ends", [{"low_ends": ("exp",)}, {"low_ends": ("ex2",), "high_ends": ("ex2",)}])
def test_ends_of_no_instruction(ends):
    with pytest.raises(ValueError, match=r"got 'ex(p|2)', expected names out of rcp, div, .* none in both"):
        one("ex2.approx", np.ones(32, np.float32), **ends)
