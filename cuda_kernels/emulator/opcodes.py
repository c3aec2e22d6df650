"""Arithmetic, bitwise and comparison opcodes: a function for each form of instruction, in a table by stem."""

import re
from functools import partial
from typing import NamedTuple

from cuda_kernels.emulator.decoder import Decoder, Opcode
from cuda_kernels.emulator.operands import Fields, Third, cls, width

HALVES = {"f16", "f16x2", "bf16", "bf16x2"}
ROUNDING = {"rn", "rz", "rm", "rp"}
UNSIGNED_COMPARE = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
COMPARE = {"eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan", *UNSIGNED_COMPARE}
BOOL = {"and": 1, "or": 2, "xor": 3, "not": 4}  # as PRED and TEST number them
# fmt: off
ONE = {"f32": 0x3F800000, "f16": 0x3C00, "f16x2": 0x3C00, "bf16": 0x3F80, "bf16x2": 0x3F80,
       "b16": 0xFFFF, "u16": 0xFFFF, "s16": 0xFFFF}
# fmt: on


def unsigned(t: str) -> str:
    return re.sub("^[sb]", "u", t)


def is_float(t: str) -> bool:
    return t[0] == "f" or t in HALVES


def form(dec: Decoder, stem: str, flags: set[str], t: str) -> str:
    """Returns the name in alu.cpp of a floating-point operation with these modifiers."""
    if t == "f32" and flags & {"approx", "full"}:
        stem += ".approx" if "approx" in flags else ".full"
    directed = next((r for r in ("rz", "rm", "rp") if r in flags), None)
    extra = "".join("." + f for f in ("relu", "sat", "NaN") if f in flags)
    if directed:
        if extra or "ftz" in flags:
            dec.fail("combination of modifiers")
        return f"{stem}.{directed}.{t}"
    return f"{stem}{extra}{'.ftz' if 'ftz' in flags and t == 'f32' else ''}.{t}"


# ---- arithmetic


def arithmetic(stem: str, n: int, dec: Decoder, mods: list[str], ops: list[str]) -> None:
    flags, t = dec.typed(mods, ROUNDING | {"ftz", "sat", "noftz", *(["relu"] if stem == "fma" else [])})
    dec.count(ops, n)
    if flags >= {"rz", "ftz"} and t == "f32":
        return toward_zero_flushed(dec, stem, flags, ops)
    if is_float(t):
        return dec.plain(form(dec, stem, flags, t), t, ops)
    if flags - {"sat"}:
        dec.fail("rounding of an integer")
    return dec.plain(f"{stem}.sat.{t}" if "sat" in flags else f"{stem}.{unsigned(t)}", t, ops)


def toward_zero_flushed(dec: Decoder, stem: str, flags: set[str], ops: list[str]) -> None:
    """Decodes .rz.ftz.f32: subnormal values are zeros before and after."""
    if flags != {"rz", "ftz"}:
        dec.fail("combination of modifiers")
    sources = [flushed(dec, flags, "f32", dec.src(o, "r", "f32")) for o in ops[1:]]
    exact, d = dec.temp("r"), dec.dst(ops[0], "r")
    dec.row(f"{stem}.rz.f32", exact, *sources)
    dec.row("cvt.ftz.f32.f32", d, exact)


# ---- the carry, a row of zeros and ones: mad.lo.cc and madc.hi, which libdevice uses for long products


def mad_lo_cc(dec: Decoder, ops: list[str]) -> None:
    """Decodes d = low half of a * b + c; the carry of that sum is kept."""
    low, addend, total = dec.temp("r"), dec.temp("d"), dec.temp("d")
    a, b, c = (dec.src(o, "r", "u32") for o in ops[1:])
    dec.row("mul.lo.u32", low, a, b)
    dec.row("ext.u32.64.32", addend, c)
    dec.row("ext.u32.64.32", total, low)
    dec.row("add.u64", total, total, addend)
    dec.row("ext.u32.32.64", dec.dst(ops[0], "r"), total)
    dec.row("shr.u64", total, total, dec.const(32, 32))
    dec.row("ext.u32.32.64", dec.vreg("carry", "r"), total)


def madc(dec: Decoder, mods: list[str], ops: list[str]) -> None:
    if mods != ["hi", "u32"]:
        dec.fail("form of madc")
    dec.count(ops, 4)
    total, (a, b, c) = dec.temp("r"), (dec.src(o, "r", "u32") for o in ops[1:])
    dec.row("mad.hi.u32", total, a, b, c)
    dec.row("add.u32", dec.dst(ops[0], "r"), total, dec.vreg("carry", "r"))


def product(stem: str, float_stem: str, n: int, dec: Decoder, mods: list[str], ops: list[str]) -> None:
    """Decodes mul and mad: of integers with .lo, .hi or .wide, else of floating-point numbers."""
    if mods[0] not in ("lo", "hi", "wide"):
        return arithmetic(float_stem, n, dec, mods, ops)
    flags, t = dec.typed(mods, {"lo", "hi", "wide", "cc"})
    dec.count(ops, n)
    if "cc" in flags:
        if stem != "mad" or t != "u32" or "lo" not in flags:
            dec.fail("form of a product with a carry")
        return mad_lo_cc(dec, ops)
    c = cls(t)
    if "wide" in flags:
        out = "d" if width(t) == 32 else "r"
        return dec.plain(f"{stem}.wide.{t}", t, ops, [out, c, c, out][:n])
    return dec.plain(f"{stem}.lo.{unsigned(t)}" if "lo" in flags else f"{stem}.hi.{t}", t, ops)


def mad24(dec: Decoder, mods: list[str], ops: list[str]) -> None:
    _, t = dec.typed(mods, {"lo"})
    low = dec.temp("r")
    dec.row(f"mul24.lo.{t}", low, dec.src(ops[1], "r"), dec.src(ops[2], "r"))
    dec.row("add.u32", dec.dst(ops[0], "r"), low, dec.src(ops[3], "r"))


def div(dec: Decoder, mods: list[str], ops: list[str]) -> None:
    flags, t = dec.typed(mods, ROUNDING | {"approx", "full", "ftz"})
    dec.count(ops, 3)
    dec.plain(form(dec, "div", flags, t) if t[0] == "f" else f"div.{t}", t, ops)


def function(stem: str, dec: Decoder, mods: list[str], ops: list[str]) -> None:
    """Decodes a floating-point function of one operand."""
    flags, t = dec.typed(mods, ROUNDING | {"approx", "ftz"})
    dec.count(ops, 2)
    dec.plain(form(dec, stem, flags, t), t, ops)


def min_max(stem: str, dec: Decoder, mods: list[str], ops: list[str]) -> None:
    flags, t = dec.typed(mods, {"ftz", "NaN"})
    dec.count(ops, 3)
    dec.plain(form(dec, stem, flags, t) if is_float(t) else f"{stem}.{t}", t, ops)


def sign(stem: str, dec: Decoder, mods: list[str], ops: list[str]) -> None:
    """Decodes abs and neg."""
    flags, t = dec.typed(mods, {"ftz"})
    dec.count(ops, 2)
    if t in HALVES:
        return dec.plain(f"{stem}.h{'x2' if t.endswith('x2') else ''}", t, ops)
    return dec.plain(form(dec, stem, flags, t), t, ops)


def same(stem: str, dec: Decoder, mods: list[str], ops: list[str]) -> None:
    """Decodes an instruction whose operands all have its one type."""
    t = dec.typed(mods)[1]
    dec.plain(f"{stem}.{t}", t, ops)


def named(stem: str, dec: Decoder, mods: list[str], ops: list[str]) -> None:
    """Decodes an instruction whose forms alu.cpp lists by name; all operands have 32 bits."""
    dec.plain(".".join([stem, *mods]), "b32", ops)


# ---- bits


def logic(stem: str, dec: Decoder, mods: list[str], ops: list[str]) -> None:
    t = dec.typed(mods)[1]
    if t != "pred":
        return dec.plain(f"{stem}.{unsigned(t)}", t, ops)
    d = dec.dst(ops[0], "p")
    sources = [dec.pred_value(o) for o in ops[1:]]
    return dec.emit("PRED", [d, sources[0], sources[-1]], (d,), sources, Fields(sub=BOOL[stem]))


def cnot(dec: Decoder, mods: list[str], ops: list[str]) -> None:
    t = dec.typed(mods)[1]
    dec.plain(f"cnot.{unsigned(t)}", t, ops)


def shift(stem: str, dec: Decoder, mods: list[str], ops: list[str]) -> None:
    t = dec.typed(mods)[1]
    kind = unsigned(t) if stem == "shl" else t.replace("b", "u")
    dec.plain(f"{stem}.{kind}", t, ops, [cls(t), cls(t), "r"])


def lop3(dec: Decoder, mods: list[str], ops: list[str]) -> None:
    if mods != ["b32"]:
        dec.fail("form of lop3")
    dec.plain("lop3.b32", "b32", ops)


def prmt(dec: Decoder, mods: list[str], ops: list[str]) -> None:
    dec.plain(".".join(["prmt", *(m for m in mods if m != "b32"), "b32"]), "b32", ops)


def bit_field(stem: str, n: int, dec: Decoder, mods: list[str], ops: list[str]) -> None:
    """Decodes bfe and bfi: `n` operands of the type, then position and length."""
    t = dec.typed(mods)[1]
    dec.plain(f"{stem}.{t}", t, ops, [cls(t)] * n + ["r", "r"])


def bfind(dec: Decoder, mods: list[str], ops: list[str]) -> None:
    flags, t = dec.typed(mods, {"shiftamt"})
    dec.plain(f"bfind.{'shiftamt.' if flags else ''}{t}", t, ops, ["r", cls(t)])


def count_bits(stem: str, dec: Decoder, mods: list[str], ops: list[str]) -> None:
    t = dec.typed(mods)[1]
    dec.plain(f"{stem}.{t}", t, ops, ["r", cls(t)])


# ---- comparing and selecting


def comparison(dec: Decoder, mods: list[str]) -> tuple[str, int, list[str]]:
    """Parses modifiers to (comparison, code of the operation with a predicate or 0, the remaining modifiers)."""
    cmp, rest = mods[0], mods[1:]
    if cmp not in COMPARE:
        dec.fail(f"comparison '.{cmp}'")
    if rest[0] in ("and", "or", "xor"):
        return UNSIGNED_COMPARE.get(cmp, cmp), BOOL[rest[0]], rest[1:]
    return UNSIGNED_COMPARE.get(cmp, cmp), 0, rest


def setp(dec: Decoder, mods: list[str], ops: list[str]) -> None:
    cmp, combine, rest = comparison(dec, mods)
    flags, t = dec.typed(rest, {"ftz"})
    dec.count(ops, 4 if combine else 3)
    p, _, q = (s.strip() for s in ops[0].partition("|"))
    compare(dec, Comparison(cmp, combine, t, flags), ops, dec.dst(p, "p"), dec.dst(q, "p") if q else -1)


class Comparison(NamedTuple):
    """A comparison of operands of type t. `combine`: the operation with a predicate, 0 for none."""

    cmp: str
    combine: int
    t: str
    flags: set[str]


def compare(dec: Decoder, how: Comparison, ops: list[str], p: int, q: int) -> None:
    """Compares ops[1] with ops[2], combined with predicate ops[3], into p; q gets the opposite, or for packed types the high
    half.
    """
    cmp, combine, t, flags = how
    sources = [dec.src(o, cls(t), t) for o in ops[1:3]]
    a, b = (flushed(dec, flags, t, s) for s in sources)
    third = Third(combine, *dec.pred_src(ops[3])) if combine else Third()
    if not t.endswith("x2"):
        kind = unsigned(t) if t[0] == "b" and t not in HALVES else t
        return dec.test(f"setp.{cmp}.{kind}", p, a, b, q, third)
    if q < 0:
        dec.fail("a packed comparison needs two predicates")
    # The low half's result must not overwrite the high half's operands.
    first = dec.temp("p") if combine else p
    dec.test(f"setp.{cmp}.{t[:-2]}", first, a, b, -1, third)
    dec.test(f"setp.{cmp}.{t[:-2]}.hi", q, a, b, -1, third)
    if combine:
        dec.emit("PRED", [p, first, first], (p,), (first,))
    return None


def flushed(dec: Decoder, flags: set[str], t: str, s: int) -> int:
    """Returns a source; with .ftz a copy with zeros for its subnormal values."""
    if "ftz" not in flags or t != "f32":
        return s
    v = dec.temp("r")
    dec.row("cvt.ftz.f32.f32", v, s)
    return v


def set_(dec: Decoder, mods: list[str], ops: list[str]) -> None:
    cmp, combine, rest = comparison(dec, mods)
    flags, to, t = dec.typed2(rest, {"ftz"})
    packed = t.endswith("x2")
    preds = [dec.temp("p") for _ in range(1 + packed)]
    compare(dec, Comparison(cmp, combine, t, flags), ops, preds[0], preds[1] if packed else -1)
    one, d = ONE.get(to, 0xFFFFFFFF), dec.dst(ops[0], "r")
    if not packed:
        return dec.row("selp.b32", d, dec.const(one, 32), dec.const(0, 32), preds[0])
    halves = [dec.temp("r"), dec.temp("r")]
    for half, pred in zip(halves, preds, strict=True):
        dec.row("selp.b32", half, dec.const(one & 0xFFFF, 32), dec.const(0, 32), pred)
    return dec.row("pack.16", d, *halves)


def selp(dec: Decoder, mods: list[str], ops: list[str]) -> None:
    t = dec.typed(mods)[1]
    c, negated = dec.pred_src(ops[3])
    a, b = dec.src(ops[1], cls(t), t), dec.src(ops[2], cls(t), t)
    if negated:
        a, b = b, a
    dec.row(f"selp.b{max(width(t), 32)}", dec.dst(ops[0], cls(t)), a, b, c)


def slct(dec: Decoder, mods: list[str], ops: list[str]) -> None:
    _, t, by = dec.typed2(mods, {"ftz"})
    dec.plain(f"slct.b{max(width(t), 32)}.{by}", t, ops, [cls(t)] * 3 + ["r"])


def testp(dec: Decoder, mods: list[str], ops: list[str]) -> None:
    kind, t = mods
    a = dec.src(ops[1], cls(t), t)
    dec.test(f"testp.{kind}.{t}", dec.dst(ops[0], "p"), a, a)


# fmt: off
OPCODES: dict[str, Opcode] = {
    "add": partial(arithmetic, "add", 3), "sub": partial(arithmetic, "sub", 3), "fma": partial(arithmetic, "fma", 4),
    "mul": partial(product, "mul", "mul", 3), "mad": partial(product, "mad", "fma", 4), "madc": madc,
    "mad24": mad24, "div": div,
    **{stem: partial(function, stem) for stem in "rcp sqrt rsqrt sin cos ex2 lg2 tanh".split()},
    **{stem: partial(min_max, stem) for stem in ("min", "max")},
    **{stem: partial(sign, stem) for stem in ("abs", "neg")},
    **{stem: partial(same, stem) for stem in ("rem", "copysign", "sad", "brev")},
    **{stem: partial(named, stem) for stem in ("dp4a", "shf", "bmsk", "mul24")},
    **{stem: partial(logic, stem) for stem in ("and", "or", "xor", "not")},
    **{stem: partial(shift, stem) for stem in ("shl", "shr")},
    **{stem: partial(count_bits, stem) for stem in ("popc", "clz")},
    "cnot": cnot, "lop3": lop3, "prmt": prmt, "bfe": partial(bit_field, "bfe", 2), "bfi": partial(bit_field, "bfi", 3),
    "bfind": bfind, "setp": setp, "set": set_, "selp": selp, "slct": slct, "testp": testp,
}
# fmt: on
