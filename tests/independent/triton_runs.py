"""Runs of Triton's kernels in the emulator, each beside NumPy: whole numbers must come out exactly."""

import re
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import erf

import numpy as np

from cuda_kernels.emulator import Memory, Options, Stats, launch, load
from tests.independent.micro import bfloat16
from tests.independent.triton_programs import Triton
from tests.map_calls import encode_tiled

TYPES = {
    "*fp16": np.float16,
    "*fp32": np.float32,
    "*i32": np.int32,
    "*bf16": np.uint16,
    "*i64": np.int64,
    "*u8": np.uint8,
    "*i16": np.int16,
}


@dataclass(frozen=True)
class Run:
    """A launch, or `launches` of them with the same arguments. `inputs` fill pointers by name, `scalars` the other arguments;
    `expected`: the values of the array `out`, which is zero at first if it is `zeroed`, within rtol and atol.
    """

    grid: tuple[int, int, int]
    inputs: Mapping[str, np.ndarray]
    out: str
    expected: np.ndarray
    scalars: Mapping[str, float] = field(default_factory=dict)
    rtol: float = 0.0
    atol: float = 0.0
    zeroed: bool = False
    launches: int = 1


def type_of(kernel: Triton, name: str) -> type:
    kind = kernel.arguments[name]
    return np.float16 if kind.startswith("tensordesc<fp16") else TYPES[kind]


def described(address: int, shape: tuple[int, ...], box: list[int], swizzle: int) -> bytes:
    """Returns a tensor descriptor as Triton's launcher passes it: the map, then sizes and strides."""
    strides = [int(np.prod(shape[i + 1 :])) for i in range(len(shape))]
    tiles = encode_tiled(
        "float16", address, shape[::-1], [2 * s for s in strides[-2::-1]], box[::-1], swizzle=16 << swizzle if swizzle else 0
    )
    packed = tiles + struct.pack(f"<{len(shape)}i", *shape)
    return packed + b"\0" * (-len(packed) % 8) + struct.pack(f"<{len(shape)}q", *strides)


def for_hopper(ptx: str) -> str:
    """Returns Triton's PTX with two changes that hardware does not need: shared memory begins at a multiple of 1,024 bytes, and
    the asynchronous proxy sees new mbarriers without a fence, which CUDA's guide asks for.
    """
    ptx = ptx.replace(".align 16 .b8 global_smem", ".align 1024 .b8 global_smem")
    return re.sub(r"(mbarrier\.init[^;]*;)", r"\1 fence.mbarrier_init.release.cluster;", ptx)


def execute(kernel: Triton, run: Run, options: Options) -> tuple[np.ndarray, Stats]:
    """Runs the launches; returns (the contents of `run.out`, in its type; the last launch's counters)."""
    memory, packed, out = Memory(), bytearray(), 0
    size, maps = run.expected.size * np.dtype(type_of(kernel, run.out)).itemsize, iter(kernel.maps)
    for name, kind_of in kernel.arguments.items():
        if not kind_of.startswith(("*", "tensordesc")):
            code, value = ("f", run.scalars[name]) if kind_of == "fp32" else ("i", int(run.scalars[name]))
        elif name == run.out:
            code, value = "Q", memory.alloc(size, fill=0 if run.zeroed else 0xCB, name=name)
            out = int(value)
        else:
            code, value = "Q", memory.upload(run.inputs[name].astype(type_of(kernel, name), copy=False), name)
        if kind_of.startswith("tensordesc"):
            shape = run.expected.shape if name == run.out else run.inputs[name].shape
            packed += b"\0" * (-len(packed) % 64) + described(int(value), shape, *next(maps))
        else:
            packed += b"\0" * (-len(packed) % struct.calcsize(code)) + struct.pack(f"<{code}", value)
    packed += b"\0" * (-len(packed) % 8) + struct.pack("<QQ", 0, 0)  # scratch memory of Triton's, not used
    # Triton's histogram lets all warps store the same zeros.
    options = replace(options, same_value_races=kernel.name != "histogram", dependent=kernel.dependent)
    program = load(for_hopper(kernel.ptx) if kernel.sm >= 90 else kernel.ptx, kernel.entry)
    for _ in range(run.launches):
        stats = launch(program, run.grid, (32 * kernel.warps, 1, 1), kernel.shared, bytes(packed), memory, options=options)
    memory.check_red_zones()
    return memory.read(out, size).view(type_of(kernel, run.out)).reshape(run.expected.shape), stats


def measure(kernel: Triton, run: Run, options: Options) -> float:
    """Returns the largest error of a launch, in units of the allowed one; for an exact kernel 0 or infinity."""
    got = execute(kernel, run, options)[0].astype(np.float64)
    allowed = run.atol + run.rtol * np.abs(run.expected)
    error = np.abs(got - run.expected)
    if not allowed.any():
        return 0.0 if np.array_equal(got, run.expected) else float("inf")
    return float(np.nan_to_num(error / allowed, nan=np.inf).max())


def whole(rng: np.random.Generator, *shape: int, most: int = 4) -> np.ndarray:
    return rng.integers(-most, most + 1, shape).astype(np.float16)


def tiles(size: int, tile: int) -> int:
    return -(-size // tile)


# ---- matrices and images


def matmuls(k: Triton, rng: np.random.Generator) -> Iterator[Run]:
    c = k.constants
    bm, bn, bk = c["BM"], c["BN"], c["BK"]
    sizes = [(bm, bn, 2 * bk), (bm + 16, 2 * bn, 80)]  # 80: K ends within a tile
    if k.name == "matmul_odd":
        sizes = [(61, 67, 37), (129, 70, 101)]
    for m, n, depth in sizes:
        a, b = whole(rng, m, depth, most=3), whole(rng, depth, n, most=3)  # sums stay below 2048: a half holds them
        left, right = (a.T if "a_m" in c else a), (b.T if "b_k" in c else b)
        given = bfloat16 if k.arguments["a"] == "*bf16" else np.ascontiguousarray
        scalars = {"M": m, "N": n, "K": depth, "a_m": depth, "a_k": m, "b_k": n, "b_n": depth}
        want = a.astype(np.float64) @ b.astype(np.float64)
        yield Run((tiles(m, bm), tiles(n, bn), 1), {"a": given(left), "b": given(right)}, "c", want, scalars)


def copied_products(k: Triton, rng: np.random.Generator) -> Iterator[Run]:
    """Yields runs with whole tiles, with several, and with tiles that lie partly outside, also along K."""
    bm, bn, bk = (k.constants[name] for name in ("BM", "BN", "BK"))
    for m, n, depth in ((bm, bn, 2 * bk), (2 * bm, bn, 5 * bk), (bm + 24, bn + 8, 3 * bk + 8)):
        a, b = whole(rng, m, depth, most=3), whole(rng, depth, n, most=3)
        want = a.astype(np.float64) @ b.astype(np.float64)
        yield Run((tiles(m, bm), tiles(n, bn), 1), {"a": a, "b": b}, "c", want, {"M": m, "N": n, "K": depth})


def boxes(k: Triton, rng: np.random.Generator) -> Iterator[Run]:
    """Yields runs with boxes inside, across each edge, and outside, where nothing is stored."""
    inner = 2 * int(k.name.split("_")[2]) // 4
    box = [int(n) for n in k.arguments["x"].removeprefix("tensordesc<fp16[").removesuffix("]>").split(",")]
    assert box[-1] == inner
    shape = tuple(2 * b + 1 for b in box[:-1]) + (2 * inner + 8,)
    for at in ([0] * len(box), [1] * len(box), [b + 2 for b in box], [-1] * len(box), [*[0] * (len(box) - 1), 2 * inner + 8]):
        x, want = whole(rng, *shape, most=1000), np.zeros(shape)
        part = tuple(slice(max(c, 0), max(c + b, 0)) for c, b in zip(at, box, strict=True))
        want[part] = x[part] + 1.0
        yield Run((1, 1, 1), {"x": x}, "y", want, dict(zip("ijkmn", at, strict=False)), zeroed=True)


def convs(k: Triton, rng: np.random.Generator) -> Iterator[Run]:
    stride = k.constants["STRIDE"]
    for n, h, w, c, out in ((1, 9, 11, 32, 64), (2, 8, 8, 48, 80)):
        x, f = whole(rng, n, h, w, c, most=2), whole(rng, out, 3, 3, c, most=1)
        p, q = (h - 1) // stride + 1, (w - 1) // stride + 1
        padded, want = np.pad(x.astype(np.float64), ((0, 0), (1, 1), (1, 1), (0, 0))), np.zeros((n, p, q, out))
        for r, s in np.ndindex(3, 3):
            want += padded[:, r : r + stride * p : stride, s : s + stride * q : stride][:, :p, :q] @ f[:, r, s].astype(float).T
        scalars = dict(zip("NHWCPQK", (n, h, w, c, p, q, out), strict=True))
        yield Run((tiles(n * p * q, 64), tiles(out, 64), 1), {"x": x, "w": f}, "y", want, scalars)


def attentions(k: Triton, rng: np.random.Generator) -> Iterator[Run]:
    for length in (128, 100):
        q, key, v = (rng.standard_normal((length, 64)).astype(np.float16) for _ in range(3))
        score = q.astype(np.float64) @ key.astype(np.float64).T / 8
        part = np.exp(score - score.max(1, keepdims=True))
        want = part / part.sum(1, keepdims=True) @ v.astype(np.float64)
        inputs, scalars = {"q": q, "k": key, "v": v}, {"L": length, "scale": 0.125}
        yield Run((tiles(length, 64), 1, 1), inputs, "o", want, scalars, rtol=2e-3, atol=1e-3)


def transposes(k: Triton, rng: np.random.Generator) -> Iterator[Run]:
    for m, n in ((128, 64), (80, 176)):
        x = rng.standard_normal((m, n)).astype(np.float16)
        yield Run((tiles(m, 64), tiles(n, 64), 1), {"x": x}, "y", x.T.astype(np.float64), {"M": m, "N": n})


# ---- kernels on rows, and all others


def rows(k: Triton, rng: np.random.Generator) -> Iterator[Run]:
    block = k.constants["B"]
    for count, columns in ((3, block), (2, block if k.name == "sort" else block * 3 // 4 + 5)):
        x, extra, rtol, atol = whole(rng, count, columns, most=100).astype(np.float64), {}, 0.0, 0.0
        if k.name == "softmax":
            x = (3 * rng.standard_normal((count, columns))).astype(np.float16).astype(np.float64)
            part = np.exp(x - x.max(1, keepdims=True))
            want, rtol, atol = part / part.sum(1, keepdims=True), 1e-3, 1e-6
        elif k.name == "layer_norm":
            x = rng.standard_normal((count, columns)).astype(np.float16).astype(np.float64)
            extra = {n: rng.standard_normal(columns).astype(np.float32) for n in ("scale", "shift")}
            off = x - x.mean(1, keepdims=True)
            want, atol = off / np.sqrt(off.var(1, keepdims=True) + 1e-5) * extra["scale"] + extra["shift"], 3e-3
            rtol = 1e-3  # a half is rounded by up to 2^-11
        elif k.name == "argmax":
            x = rng.permuted(np.tile(np.arange(columns, dtype=np.float64), (count, 1)), axis=1)
            want = x.argmax(1).astype(np.float64)
        else:
            want = np.sort(x, 1) if k.name == "sort" else x.cumsum(1)
        yield Run((count, 1, 1), {"x": x, **extra}, "y", want, {"columns": columns}, rtol, atol)


def histograms(k: Triton, rng: np.random.Generator) -> Iterator[Run]:
    x = rng.integers(0, 64, 3000)
    yield Run((3, 1, 1), {"x": x}, "y", np.bincount(x, minlength=64).astype(np.float64), {"n": 3000}, zeroed=True)


def functions(k: Triton, rng: np.random.Generator) -> Iterator[Run]:
    x = (3 * rng.standard_normal(1500)).astype(np.float16)
    d = x.astype(np.float64)
    i = np.trunc(d * 16)
    want = np.vectorize(erf)(d) + 1 / (1 + np.exp(-d)) + np.sin(d) + np.cos(d) + np.sqrt(abs(d)) + np.log1p(abs(d)) + np.exp2(d)
    yield Run((3, 1, 1), {"x": x}, "y", want + np.trunc(i / 7) * 3 + np.fmod(i, 5), {"n": 1500}, rtol=1e-5, atol=1e-5)


def numbers(k: Triton, rng: np.random.Generator) -> Iterator[Run]:
    x, w = rng.uniform(0.5, 9, 1500).astype(np.float32), rng.integers(-(1 << 31), 1 << 31, 1500)
    v, u, wide = x.astype(np.float64), w & 0xFFFFFFFF, w * 1000003
    quotient = np.trunc(w / 16).astype(np.int64) + 1000
    keep = quotient != 0
    x, w, v, u, wide, quotient = (a[keep][:1400] for a in (x, w, v, u, wide, quotient))

    whole = u // 7 % 1000 + u % (v.astype(np.int64) + 3) + np.where(u >= 2000000000, 5, 0)
    whole += np.fmod(divided(wide, quotient).astype(np.int32), 1000) + np.fmod(wide, 97) + np.where(wide >= 0, 9, 0)
    part = v / 3.7 + np.sqrt(v) + 1 / np.sqrt(v + 1) + np.where(v <= 2, 1, 0.25) + 1 / (v + 2)
    yield Run((3, 1, 1), {"x": x, "w": w}, "y", part + whole, {"n": len(w)}, rtol=1e-6, atol=1e-4)


def counters(k: Triton, rng: np.random.Generator) -> Iterator[Run]:
    x = rng.integers(0, 248, 1300)
    bits = np.zeros(8, np.int64)
    np.bitwise_or.at(bits, x % 8, 1 << x // 8)
    want = np.concatenate([np.bincount(x % 8, minlength=8), bits.astype(np.int32)])
    yield Run((3, 1, 1), {"x": x}, "y", want.astype(np.float64), {"n": 1300}, zeroed=True)


def dependents(k: Triton, rng: np.random.Generator) -> Iterator[Run]:
    x = rng.integers(-1000, 1000, 700)
    yield Run((3, 1, 1), {"x": x}, "y", x * (1.0 + 3 + 9), {"n": 700}, zeroed=True, launches=3)


# ---- whole numbers, comparisons, other lanes' values


def drawn(rng: np.random.Generator, bits: int, count: int) -> np.ndarray:
    """Returns whole numbers of all sizes up to `bits` bits, none of them 0."""
    x = rng.integers(-(1 << bits - 1), 1 << bits - 1, count) >> rng.integers(0, bits - 1, count)
    return np.where(x == 0, 1, x)


def divided(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Divides toward zero."""
    return np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(b))


def words(k: Triton, rng: np.random.Generator) -> Iterator[Run]:
    n = 300
    a, b = drawn(rng, 46, n), drawn(rng, 46, n)  # below 2^53 a float of 64 bits holds the results exactly
    b[::5] = a[::5] + 1
    b = np.where(b.astype(np.uint32) == 0, b + 1, b)
    want = np.where(a >= b, a & b, a | b) + np.fmod(a, b) + divided(b, a) + np.where(a == b - 1, b, a)
    want += (a.astype(np.uint32) // b.astype(np.uint32)).astype(np.int64)
    yield Run((3, 1, 1), {"x": a, "w": b}, "y", want.astype(np.float64), {"n": n})


def shorts(k: Triton, rng: np.random.Generator) -> Iterator[Run]:
    n = 300
    a, b = rng.integers(0, 256, n), drawn(rng, 16, n)
    b[::4] = a[::4]
    hashed = np.arange(n) * 40503 & 0xFFFF
    signed, short = hashed.astype(np.uint16).view(np.int16), b.astype(np.int16)
    want = a * 0.5 + hashed * 0.25 + np.where(b != a, 1, 2) + (short ^ signed) + (short & signed) * 0.125
    yield Run((3, 1, 1), {"x": a, "w": b}, "y", want, {"n": n})


def numbers_and_none(rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns pairs of numbers in every order, and with NaN on either side or both."""
    a, b = (rng.integers(-3, 4, count).astype(np.float32) for _ in range(2))
    a[rng.random(count) < 0.2], b[rng.random(count) < 0.2] = np.nan, np.nan
    return a, b


def comparisons(k: Triton, rng: np.random.Generator) -> Iterator[Run]:
    a, b = numbers_and_none(rng, 1008)
    want = (a < b) + 2 * ~(a <= b) + 4 * ~(a > b) + 8 * np.isnan(a) + 16 * (np.isnan(a) | np.isnan(b))
    yield Run((2, 1, 1), {"x": a, "w": b}, "y", want.astype(np.float64), {"n": 1008})


def masks(k: Triton, rng: np.random.Generator) -> Iterator[Run]:
    n = 256
    a, b = drawn(rng, 32, n), drawn(rng, 32, n)
    b[::3], a[::7] = a[::3], 5
    c, d = numbers_and_none(rng, n)
    u, v = a & 0xFFFFFFFF, b & 0xFFFFFFFF
    short = (a & 0xFFFF) != (b & 0xFFFF)
    want = np.stack([u >= v, u <= v, a <= b, ~(c <= d), ~(c > d), 5 * a >= 7 * b, short, (c < d) | (a == 5)])
    inputs = {"x": a, "w": b, "p": c, "q": d}
    yield Run((2, 1, 1), inputs, "y", want.astype(np.float64), {"n": n}, zeroed=True)


def carried(k: Triton, rng: np.random.Generator) -> Iterator[Run]:
    x = rng.integers(0, 9, (64, 7))
    odd, all_large = np.logical_xor.accumulate(x > 3, 1), np.logical_and.accumulate(x > 1, 1)
    want = np.where(odd | all_large, np.arange(7.0), 0)
    yield Run((2, 1, 1), {"x": x}, "y", want, {"n": 7}, zeroed=True)


def rounded(k: Triton, rng: np.random.Generator) -> Iterator[Run]:
    """Yields runs on numbers halfway between two halves, or two of bfloat16, just beside, below the smallest normal half, and
    any others.
    """
    n = 256
    near = 2048.0 + np.arange(64)  # every other one lies halfway between two halves
    odd = 1 + np.arange(64) / 256.0  # of bfloat16 likewise
    tiny = np.arange(64) * 2.0**-26
    x = np.concatenate([near, -odd, tiny, 100 * rng.standard_normal(64)]).astype(np.float32)
    x[7::16] = np.nextafter(x[7::16], np.float32(np.inf))
    w = rng.standard_normal(n).astype(np.float32)
    half = x.astype(np.float16)
    over = np.abs(half.astype(np.float64)) > np.abs(x.astype(np.float64))
    cut = np.where(over, np.nextafter(half, np.float16(0)), half)
    brain = (bfloat16(x).astype(np.uint32) << 16).view(np.float32)
    lost = x.astype(np.float64) * w - (x * w)
    want = np.stack([half, cut, brain, np.trunc(x), lost]).astype(np.float32)
    yield Run((2, 1, 1), {"x": x, "w": w}, "y", want.astype(np.float64), {"n": n})


def gathers(k: Triton, rng: np.random.Generator) -> Iterator[Run]:
    n = k.constants["B"]
    x, at = whole(rng, n, most=1000), rng.integers(0, n, n)
    yield Run((1, 1, 1), {"x": x, "w": at}, "y", x[at].astype(np.float64))


def transposed_by_two(k: Triton, rng: np.random.Generator) -> Iterator[Run]:
    x = whole(rng, k.constants["M"], k.constants["N"], most=2000)
    yield Run((2, 1, 1), {"x": x}, "y", np.ascontiguousarray(x.T.astype(np.float64)))


def roots(k: Triton, rng: np.random.Generator) -> Iterator[Run]:
    x = np.exp2(rng.uniform(-40, 40, 300)).astype(np.float32)
    v = x.astype(np.float64)
    yield Run((3, 1, 1), {"x": x}, "y", 1 / np.sqrt(v) + 1 / v + v / (v + 3) + np.tanh(v), {"n": 300}, rtol=1e-6)


def clipped(k: Triton, rng: np.random.Generator) -> Iterator[Run]:
    x = np.concatenate([np.arange(-100, 100) / 2, 90 * rng.standard_normal(120)]).astype(np.float32)
    w = rng.integers(-40, 41, 320).astype(np.float32)
    yield Run((2, 1, 1), {"x": x, "w": w}, "y", np.minimum(np.rint(x), w).astype(np.float64), {"n": 320})


# fmt: off
RUNS: dict[str, Callable[[Triton, np.random.Generator], Iterator[Run]]] = {
    "matmul": matmuls, "tma": copied_products, "box": boxes, "conv": convs, "attention": attentions, "transpose": transposes,
    "histogram": histograms,
    "functions": functions, "numbers": numbers, "counters": counters, "dependent": dependents, "words": words, "shorts": shorts,
    "compared": comparisons, "masks": masks, "carried": carried, "gathered": gathers, "rounded": rounded, "roots": roots,
    "turned": transposed_by_two, "clipped": clipped,
}
# fmt: on


def runs(kernel: Triton, seed: int = 0) -> Iterator[Run]:
    return RUNS.get(kernel.name.partition("_")[0], rows)(kernel, np.random.default_rng(seed))


def worst(kernel: Triton, options: Options, seed: int = 0) -> float:
    """Returns the largest error of all its runs; at most 1 is right."""
    return max(measure(kernel, run, options) for run in runs(kernel, seed))
