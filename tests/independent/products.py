"""A matrix product by one tensor-core instruction, its fragments laid out as CuTe's table says."""

from dataclasses import dataclass

import numpy as np

from cuda_kernels.emulator import Options
from cuda_kernels.sparse24 import compress, prune
from tests.independent import micro
from tests.independent.layouts import places, table

MOVMATRIX = micro.ptx("movmatrix.sync.aligned.m8n8.trans.b16 %o0, %i0;", 1, 1)


@dataclass(frozen=True, slots=True)
class Mma:
    """A tensor-core instruction. `sum`: the type of C and D; `factor`: the type of A and B."""

    k: int
    factor: str
    sum: str = "f32"
    sparse: bool = False
    selector: int = 0

    @property
    def opcode(self) -> str:
        types = f"{self.sum}.{self.factor}.{self.factor}.{self.sum}"
        return f"mma{'.sp::ordered_metadata' if self.sparse else ''}.sync.aligned.m16n8k{self.k}.row.col.{types}"

    @property
    def registers(self) -> tuple[int, int, int]:
        """The numbers of registers of A, B and C."""
        each = 1 if self.factor == "tf32" else 2
        return self.k // (4 * each if self.sparse else 2 * each), self.k // (4 * each), 4 if self.sum == "f32" else 2

    @property
    def ptx(self) -> str:
        a, b, c = self.registers
        given = ", ".join([micro.group("i", 0, a), micro.group("i", a, b), micro.group("i", a + b, c)])
        last = f", %i{a + b + c}, {self.selector}" if self.sparse else ""
        return micro.ptx(f"{self.opcode} {micro.group('o', 0, c)}, {given}{last};", a + b + c + self.sparse, c)


def dense_name(m: Mma) -> str:
    return f"m16n8k{m.k} {m.factor}{' to f16' if m.sum == 'f16' else ''}"


def sparse_operands(m: Mma, a: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns (kept values [32, 8] in lanes' order, words of metadata [32, 1]) of A [16, 32] that fits 2:4. A lane of
    wgmma.sp's A holds runs of four logical columns, of which two are stored; the lanes that the selector leaves out hold an
    invalid code.
    """
    kept, codes = compress(a)
    rows, columns = (x[:32] for x in places("wgmma.sp A"))  # the first warp's 16 rows
    first, group = rows[:, ::4], columns[:, ::4] // 4
    values = np.stack([kept[first, 2 * group], kept[first, 2 * group + 1]], axis=-1).reshape(32, -1)
    rows, columns = (x[:32] for x in places("wgmma.sp metadata"))
    nibbles = codes[rows[:, ::4], columns[:, ::4] // 4].astype(np.uint64)
    words = (nibbles << (4 * np.arange(8, dtype=np.uint64))).sum(axis=1).astype(np.uint32)
    reads = np.arange(32) % 4 // 2 == m.selector
    return values, np.where(reads, words, np.uint32(0xFFFFFFFF))[:, None]


def fragments(m: Mma, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Returns A [16, k], B [k, 8], C [16, 8] as uint32 [32, registers]. CuTe names no B of mma.sp.m16n8k32: it is two of
    m16n8k16, one after the other, as example 15 of CUTLASS loads it.
    """
    extra = []
    if m.sparse:
        values, words = sparse_operands(m, a)
        extra, parts = [words], [micro.packed(m.factor, values)]
        name = dense_name(Mma(16, m.factor, m.sum))
        at_n, at_k = places(f"{name} B")
        parts += [micro.packed(m.factor, b[at_k + half, at_n]) for half in (0, 16)]
    else:
        name = dense_name(m)
        row, column = places(f"{name} A")
        at_n, at_k = places(f"{name} B")
        parts = [micro.packed(m.factor, a[row, column]), micro.packed(m.factor, b[at_k, at_n])]
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


def wrong(m: Mma, seed: int = 0, text: str = "", options: Options = Options()) -> int:  # noqa: B008  (frozen)
    """Returns how many of the 128 results differ from the product of drawn whole numbers; `text`: PTX to run instead of its
    own.
    """
    rng = np.random.default_rng(seed)
    a, b, c = (rng.integers(-3, 4, shape).astype(np.float64) for shape in ((16, m.k), (m.k, 8), (16, 8)))
    a += (a == 0) * 2.0  # every product counts, and sums are below 2048: halves hold them
    if m.sparse:
        a = prune(a * (1 + rng.permuted(np.tile(np.arange(4), (16, m.k // 4)), axis=1)))  # every pattern of a group
    out = micro.run(text or m.ptx, fragments(m, a, b, c), m.registers[2], options)
    got = np.empty((16, 8))
    name = dense_name(Mma(16, m.factor, m.sum) if m.sparse else m)
    got[places(f"{name} C")] = out.view(np.float16 if m.sum == "f16" else np.float32).reshape(32, -1)
    return int((got != a @ b + c).sum())
