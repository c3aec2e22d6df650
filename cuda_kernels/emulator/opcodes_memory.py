"""The opcodes that load, store, copy and prefetch memory, or change it atomically."""

import re

from cuda_kernels.emulator.decoder import Address, Decoder, Opcode
from cuda_kernels.emulator.opcodes import is_float
from cuda_kernels.emulator.operands import (
    ACQUIRE,
    ASYNC_ALL,
    NC,
    RELEASE,
    SIGNED,
    SPACES,
    STRONG,
    SYNC,
    WIDE,
    Fields,
    cls,
    width,
)

VECTORS = {"v2": 2, "v4": 4, "v8": 8}
ORDERED = {"volatile", "relaxed", "acquire", "release", "mmio"}
# fmt: off
CACHE = {
    "ca", "cg", "cs", "lu", "cv", "wb", "wt", "nc", "weak", "acq_rel", "cta", "cluster", "gpu", "sys", *ORDERED, *VECTORS,
    "L2::cache_hint", "L1::no_allocate", "L1::evict_first", "L1::evict_last", "L1::evict_normal", "L1::evict_unchanged",
    "L2::evict_first", "L2::evict_last", "L2::evict_normal", "L2::64B", "L2::128B", "L2::256B",
}
# fmt: on
ATOM_OPS = {name: i for i, name in enumerate("add min max and or xor exch cas inc dec".split())}
ATOM_TYPES = {name: i for i, name in enumerate("u32 s32 u64 s64 f32 f64 f16 f16x2 bf16 bf16x2".split())}
ATOM_MODIFIERS = {"relaxed", "acquire", "release", "acq_rel", "cta", "cluster", "gpu", "sys", "noftz", "L2::cache_hint"}


def state_space(mods: list[str]) -> tuple[str, list[str]]:
    """Splits modifiers into (state space or "", the other modifiers)."""
    space = next((m for m in mods if m in SPACES), "")
    return space.replace("::cta", ""), [m for m in mods if m not in SPACES]


def place(dec: Decoder, space: str, text: str) -> Address:
    at = dec.address(text)
    return at if space in ("param", "") and at.space else at._replace(space=space)


def watch(dec: Decoder, space: str, shared_bytes: int, global_bytes: int) -> None:
    """Notes the smallest accesses, which decide how finely memory is watched."""
    if space in ("shared", "shared::cluster", ""):
        dec.cell = min(dec.cell, shared_bytes)
    if space in ("global", ""):
        dec.global_cell = min(dec.global_cell, global_bytes)


def order(flags: set[str], strong: bool) -> int:
    """Returns the effect of an access on the order between blocks. Cache operators, .cg too, are hints without an effect (PTX
    ISA).
    """
    if not strong or flags & {"cta", "cluster"}:
        return 0
    acquire, release = flags & {"acquire", "acq_rel"}, flags & {"release", "acq_rel"}
    return SYNC | (ACQUIRE if acquire else 0) | (RELEASE if release else 0)


def values_of(dec: Decoder, text: str, flags: set[str], t: str) -> list[str]:
    """Returns the registers or numbers that a load writes or a store reads."""
    values = dec.vector(text)
    vec = next((n for name, n in VECTORS.items() if name in flags), 1)
    if len(values) != vec:
        dec.fail(f"{len(values)} values for a vector of {vec}")
    if width(t) // 8 * vec > 32:
        dec.fail("access wider than 32 bytes")
    return values


def row_flags(dec: Decoder, values: list[str], flags: set[str], t: str, store: bool) -> int:
    """Returns WIDE for 64-bit registers, SIGNED if a narrow value is sign-extended, STRONG, NC."""
    wide = any(n != "_" and dec.register(n) is not None and dec.is_wide(n, t) for n in values) or (store and width(t) == 64)
    found = (WIDE if wide else 0) | (SIGNED if t[0] == "s" and not store else 0)
    return found | (STRONG if flags & ORDERED else 0) | (NC if "nc" in flags else 0)


def access(a: Address, size: int, vec: int, bits: int, flags: set[str]) -> Fields:
    """Returns the fields of a load or store of `vec` values of `size` bytes at `a`; `bits`: from row_flags."""
    space, effect = SPACES.get(a.space, 0), order(flags, bool(bits & STRONG))
    return Fields(imm=a.offset, space=space, size=size, vec=vec, flags=bits | a.wide, order=effect)


def load(dec: Decoder, mods: list[str], ops: list[str]) -> None:
    space, rest = state_space(mods)
    flags, t = dec.typed(rest, CACHE)
    dec.count(ops, 2, 3 if "L2::cache_hint" in flags else 2)
    values = values_of(dec, ops[0], flags, t)
    size, vec, a = width(t) // 8, len(values), place(dec, space, ops[1])
    bits = row_flags(dec, values, flags, t, store=False)
    rows = [dec.dst(n, "d" if bits & WIDE else "r") for n in values]
    if a.space == "param" and a.operand <= -2 and -1 not in rows:
        at = a.offset + dec.const_value(a.operand)
        if at % (size * vec) or at + size * vec > dec.param_bytes:
            dec.fail("parameter access is misaligned or outside the parameters")
        return dec.emit("LD_PARAM", rows, rows, of=Fields(imm=at, size=size, vec=vec, flags=bits & (WIDE | SIGNED)))
    watch(dec, a.space, size, size * vec)
    return dec.emit(
        "LD",
        [*rows, *[-1] * (8 - vec), a.operand],
        rows,
        (a.operand,),
        access(a, size, vec, bits, flags),
    )


def store(dec: Decoder, mods: list[str], ops: list[str]) -> None:
    space, rest = state_space(mods)
    flags, t = dec.typed(rest, CACHE)
    dec.count(ops, 2, 3 if "L2::cache_hint" in flags else 2)
    values = values_of(dec, ops[1], flags, t)
    size, vec, a = width(t) // 8, len(values), place(dec, space, ops[0])
    bits = row_flags(dec, values, flags, t, store=True)
    rows = [dec.src(n, "d" if bits & WIDE else "r", t) for n in values]
    watch(dec, a.space, size, size * vec)
    dec.emit(
        "ST",
        [*rows, *[-1] * (8 - vec), a.operand],
        (),
        (*rows, a.operand),
        access(a, size, vec, bits, flags),
    )


def atom(dec: Decoder, mods: list[str], ops: list[str]) -> None:
    space, rest = state_space(mods)
    op = next((m for m in rest if m in ATOM_OPS), "")
    flags, t = dec.typed([m for m in rest if m != op], ATOM_MODIFIERS)
    if not op or space not in ("global", "shared", "shared::cluster", ""):
        dec.fail("form of atomic")
    if "L2::cache_hint" in flags:
        ops = ops[:-1]
    dec.count(ops, 4 if op == "cas" else 3)
    kind = "f16" if t == "b16" else re.sub("^b(?=32|64)", "u", t)
    if kind not in ATOM_TYPES or (is_float(t) and op not in ("add", "exch")):
        dec.fail("type of atomic")
    c, size, a = cls(t), width(t) // 8, place(dec, space, ops[1])
    b = dec.src(ops[2], c, t)
    third = dec.src(ops[3], c, t) if op == "cas" else b
    d = dec.dst(ops[0], c)
    watch(dec, a.space, size, size)
    dec.emit(
        "ATOM",
        [d, a.operand, b, third],
        (d,),
        (a.operand, b, third),
        Fields(
            imm=a.offset,
            flags=a.wide,
            size=size,
            space=SPACES.get(a.space, 0),
            sub=ATOM_OPS[op] | ATOM_TYPES[kind] << 8,
            order=order(flags, True),
        ),
    )


def red(dec: Decoder, mods: list[str], ops: list[str]) -> None:
    atom(dec, mods, ["_", *ops])


# ---- asynchronous copies


def cp(dec: Decoder, mods: list[str], ops: list[str]) -> None:
    form = ".".join(mods)
    if form == "async.commit_group":
        dec.emit("CP_COMMIT", [])
    elif form == "async.wait_group":
        dec.emit("CP_WAIT", [], of=Fields(imm=dec.number(ops[0])))
    elif form == "async.wait_all":
        dec.emit("CP_WAIT", [], of=Fields(flags=ASYNC_ALL))
    elif match := COPY.fullmatch(form):
        copy_async(dec, match[1], ops[:-1] if "L2::cache_hint" in mods else ops)
    else:
        dec.fail(f"unknown opcode 'cp.{form}'")


COPY = re.compile(r"async\.(ca|cg)\.shared(?:::cta)?\.global(?:\.L2::(?:cache_hint|64B|128B|256B))*")


def copy_async(dec: Decoder, cache: str, ops: list[str]) -> None:
    """Decodes cp.async [shared], [global], cp-size, then the bytes to copy (the rest is zeros) or a predicate to copy none."""
    dec.count(ops, 3, 4, 5)
    size = dec.number(ops[2])
    if size not in (4, 8, 16) or (cache == "cg" and size != 16):
        dec.fail(f"cp-size {size}")
    to, of = place(dec, "shared", ops[0]), place(dec, "global", ops[1])
    if not of.wide:
        dec.fail("the global address must have 64 bits")
    take = ignore = -1
    for extra in ops[3:]:
        v = dec.register(extra.lstrip("!"))
        if v is not None and dec.classes[v] == "p":
            ignore = dec.pred_value(extra)
        else:
            take = dec.src(extra, "r")
    watch(dec, "global", size, size)
    dec.emit(
        "CP_ASYNC",
        [to.operand, of.operand, take, ignore],
        (),
        (to.operand, of.operand, take, ignore),
        Fields(imm=to.offset, imm2=of.offset, size=size, flags=to.wide),
    )


def prefetch(dec: Decoder, mods: list[str], ops: list[str]) -> None:
    dec.address(ops[0])
    dec.emit("NOP", [])


def createpolicy(dec: Decoder, mods: list[str], ops: list[str]) -> None:
    dec.row("mov.b64", dec.dst(ops[0], "d"), dec.const(0, 64))


OPCODES: dict[str, Opcode] = {
    "ld": load,
    "ldu": load,
    "st": store,
    "atom": atom,
    "red": red,
    "cp": cp,
    "prefetch": prefetch,
    "prefetchu": prefetch,
    "createpolicy": createpolicy,
}
