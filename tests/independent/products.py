"""A matrix product by one tensor-core instruction, its fragments laid out as CuTe's table says."""

from dataclasses import dataclass

import numpy as np

from cuda_kernels.emulator import Options
from cuda_kernels.sparse24 import compress, prune
from tests.independent import micro
from tests.independent.layouts import places, table

LIMITS = {"s8": (-128, 127), "u8": (0, 255)}
MOVMATRIX = micro.ptx("movmatrix.sync.aligned.m8n8.trans.b16 %o0, %i0;", 1, 1)


@dataclass(frozen=True, slots=True)
class Mma:
    """A tensor-core instruction. `sum`: the type of C and D; `factor`: the type of A, and of B unless `other` names that;
    `saturate`: .satfinite, of sums of integers.
    """

    k: int
    factor: str
    sum: str = "f32"
    sparse: bool = False
    selector: int = 0
    other: str = ""
    saturate: bool = False

    @property
    def b(self) -> str:
        return self.other or self.factor

    @property
    def opcode(self) -> str:
        types = f"{'satfinite.' if self.saturate else ''}{self.sum}.{self.factor}.{self.b}.{self.sum}"
        return f"mma{'.sp::ordered_metadata' if self.sparse else ''}.sync.aligned.m16n8k{self.k}.row.col.{types}"

    @property
    def registers(self) -> tuple[int, int, int]:
        """The numbers of registers of A, B and C."""
        each = micro.EACH[self.factor]
        return self.k // (4 * each if self.sparse else 2 * each), self.k // (4 * each), 2 if self.sum == "f16" else 4

    @property
    def ptx(self) -> str:
        a, b, c = self.registers
        given = ", ".join([micro.group("i", 0, a), micro.group("i", a, b), micro.group("i", a + b, c)])
        last = f", %i{a + b + c}, {self.selector}" if self.sparse else ""
        return micro.ptx(f"{self.opcode} {micro.group('o', 0, c)}, {given}{last};", a + b + c + self.sparse, c)


def dense_name(m: Mma) -> str:
    """The table's name of a dense instruction, or of the one of half the K that a sparse one's B is two of."""
    factor = "s8" if m.factor == "u8" else m.factor  # a sign moves nothing
    return f"m16n8k{m.k // (1 + m.sparse)} {factor}{' to f16' if m.sum == 'f16' else ''}"


def sparse_operands(m: Mma, a: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns (kept values [32, k / 4] in lanes' order, words of metadata [32, 1]) of A [16, k] that fits 2:4. A lane of
    wgmma.sp's A holds runs of four or, of bytes, eight logical columns, of which half are stored. Of halves, the lanes that the
    selector leaves out hold an invalid code.
    """
    kept, codes = compress(a)
    of = " of bytes" if m.sum == "s32" else ""
    rows, columns = (x[:32] for x in places(f"wgmma.sp A{of}"))  # the first warp's 16 rows
    first, group = rows[:, ::4], columns[:, ::4] // 4
    values = np.stack([kept[first, 2 * group], kept[first, 2 * group + 1]], axis=-1).reshape(32, -1)
    rows, columns = (x[:32] for x in places(f"wgmma.sp metadata{of}"))
    nibbles = codes[rows[:, ::4], columns[:, ::4] // 4].astype(np.uint64)
    words = (nibbles << (4 * np.arange(8, dtype=np.uint64))).sum(axis=1).astype(np.uint32)
    reads = (np.arange(32) % 4 // 2 == m.selector) | (m.sum == "s32")
    return values, np.where(reads, words, np.uint32(0xFFFFFFFF))[:, None]


def fragments(m: Mma, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Returns A [16, k], B [k, 8], C [16, 8] as uint32 [32, registers]. CuTe names no B of mma.sp.m16n8k32: it is two of
    m16n8k16, one after the other, as example 15 of CUTLASS loads it; of bytes, that of m16n8k64 is two of m16n8k32.
    """
    extra, name = [], dense_name(m)
    at_n, at_k = places(f"{name} B")
    if m.sparse:
        values, words = sparse_operands(m, a)
        extra, parts = [words], [micro.packed(m.factor, values)]
        parts += [micro.packed(m.b, b[at_k + half, at_n]) for half in (0, m.k // 2)]
    else:
        row, column = places(f"{name} A")
        parts = [micro.packed(m.factor, a[row, column]), micro.packed(m.b, b[at_k, at_n])]
    return np.concatenate([*parts, micro.packed(m.sum, c[places(f"{name} C")]), *extra], axis=1)


def moved_wrong(text: str = "") -> int:
    """Returns how many halves a movmatrix puts elsewhere than a store of all lanes' values and CuTe's transposed ldmatrix of it
    would.
    """
    halves = np.random.default_rng(0).permutation(64).astype(np.uint16).reshape(32, 2)
    got = micro.run(text or MOVMATRIX, micro.words(halves), 1).view(np.uint16).reshape(32, 2)
    stored = np.empty(64, np.uint16)
    stored[table()["ldmatrix x1"]["at"]] = halves
    return int((got != stored[table()["ldmatrix x1 trans"]["at"]]).sum())


def loaded_wrong(count: int, trans: bool) -> int:
    """Returns how many halves an ldmatrix puts elsewhere than CuTe says: every lane stores 16 bytes into shared memory, rows in
    their own order, and loads a fragment.
    """
    rng = np.random.default_rng(count)
    halves, row = rng.permutation(256).astype(np.uint16).reshape(32, 8), rng.permutation(32)
    body = (
        "mov.u32 %t0, tile; mad.lo.u32 %t1, %i4, 16, %t0; st.shared.v4.b32 [%t1], {%i0, %i1, %i2, %i3}; bar.sync 0;\n"
        f"ldmatrix.sync.aligned.m8n8.x{count}{'.trans' if trans else ''}.shared.b16 {micro.group('o', 0, count)}, [%t1];"
    )
    given = np.concatenate([micro.words(halves), row[:, None].astype(np.uint32)], axis=1)
    got = micro.run(micro.ptx(body, 5, count, shared=512), given, count).view(np.uint16).reshape(32, -1)
    return int((got != halves.reshape(-1)[table()[f"ldmatrix x{count}{' trans' if trans else ''}"]["at"]]).sum())


def drawn(m: Mma, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns A, B and C of whole numbers, of which every product counts. Of halves, sums are below 2048, which halves hold; of
    bytes, all values occur, and those of C reach so far that some sums exceed 32 bits.
    """
    shapes = (16, m.k), (m.k, 8)
    if m.sum == "s32":
        whole = [rng.integers(*LIMITS[of], shape, endpoint=True) for of, shape in zip((m.factor, m.b), shapes, strict=True)]
        return whole[0] + (whole[0] == 0), whole[1], rng.choice([-1, 1], (16, 8)) * rng.integers(2**31 - 2**18, 2**31, (16, 8))
    a, b, c = (rng.integers(-3, 4, shape).astype(np.float64) for shape in (*shapes, (16, 8)))
    return a + (a == 0) * 2.0, b, c


def product(m: Mma, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Returns A B + C as the instruction has it; of integers, wrapped or clamped to 32 bits."""
    want = a @ b + c
    if m.sum != "s32":
        return want
    return np.clip(want, -(2**31), 2**31 - 1) if m.saturate else want.astype(np.int32).astype(np.int64)


def wrong(m: Mma, seed: int = 0, text: str = "", options: Options = Options()) -> int:  # noqa: B008  (frozen)
    """Returns how many of the 128 results differ from the product of drawn whole numbers; `text`: PTX to run instead of its
    own.
    """
    rng = np.random.default_rng(seed)
    a, b, c = drawn(m, rng)
    if m.sparse:
        order = rng.permuted(np.tile(np.arange(4), (16, m.k // 4)), axis=1)  # every pattern of a group
        a = np.where(prune(1 + order) != 0, a, 0)
    out = micro.run(text or m.ptx, fragments(m, a, b, c), m.registers[2], options)
    got = np.empty((16, 8))
    got[places(f"{dense_name(m)} C")] = out.view(micro.TYPES[m.sum]).reshape(32, -1)
    return int((got != product(m, a, b, c)).sum())
