"""What each arithmetic opcode means: one method per stem, which accepts the modifiers it knows and no others."""

from __future__ import annotations

import re

from cuda_kernels.emulator.parse import Instr

TYPES = {
    "pred", "b8", "b16", "b32", "b64", "u8", "u16", "u32", "u64", "s8", "s16", "s32", "s64", "f16", "f16x2", "bf16", "bf16x2",
    "f32", "f64", "u16x2", "s16x2",
}  # fmt: skip
HALVES = {"f16", "f16x2", "bf16", "bf16x2"}
ROUNDING = {"rn", "rz", "rm", "rp"}
INTEGRAL = {"rni", "rzi", "rmi", "rpi"}
COMPARE = {"eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan", "lo", "ls", "hi", "hs"}
BOOL = {"and": 1, "or": 2, "xor": 3}


def width(t: str) -> int:
    return 32 if t.endswith("x2") else int(re.sub(r"\D", "", t))


def cls(t: str) -> str:
    return "d" if width(t) == 64 else "r"


def unsigned(t: str) -> str:
    return re.sub("^[sb]", "u", t)


class Arithmetic:
    """Mixed into Decoder: its operand and emit helpers, these meanings."""

    def opcode(self, ins: Instr) -> None:
        stem, *mods = ins.opcode.split(".")
        method = getattr(self, "op_" + stem.replace("::", "_"), None)
        if method is None:
            self.fail(f"unknown opcode '{ins.opcode}'")
        method(mods, ins.operands)

    def split(self, mods, allowed) -> tuple[set[str], list[str]]:
        """(modifiers, types); a modifier not in `allowed` is an error."""
        flags, types = set(), []
        for m in mods:
            if m in TYPES and m not in allowed:
                types.append(m)
            elif m in allowed:
                flags.add(m)
            else:
                self.fail(f"unknown modifier '.{m}'")
        if not types:
            self.fail("no type")
        return flags, types

    def count(self, ops, *numbers) -> None:
        if len(ops) not in numbers:
            self.fail(f"{len(ops)} operands")

    def plain(self, name: str, t: str, ops, classes=None) -> None:
        """d, a, b, ...: all of type t unless `classes` says otherwise."""
        classes = classes or [cls(t)] * len(ops)
        sources = [self.src(o, c, t) for o, c in zip(ops[1:], classes[1:], strict=True)]
        self.row(name, self.dst(ops[0], classes[0]), *sources)

    # ---- arithmetic

    def float_name(self, stem: str, flags: set[str], t: str) -> str:
        directed = next((r for r in ("rz", "rm", "rp") if r in flags), None)
        extra = "".join("." + f for f in ("relu", "sat", "NaN") if f in flags)
        if directed:
            if extra or "ftz" in flags:
                self.fail("combination of modifiers")
            return f"{stem}.{directed}.{t}"
        return f"{stem}{extra}{'.ftz' if 'ftz' in flags and t == 'f32' else ''}.{t}"

    def arith(self, stem: str, mods, ops, n: int, extra=()) -> None:
        flags, types = self.split(mods, {"rn", "rz", "rm", "rp", "ftz", "sat", "noftz", *extra})
        t = types[0]
        self.count(ops, n)
        if t[0] in "fb" and t not in ("b16", "b32", "b64"):
            return self.plain(self.float_name(stem, flags, t), t, ops)
        if flags - {"sat"}:
            self.fail("rounding of an integer")
        if "sat" in flags:
            return self.plain(f"{stem}.sat.{t}", t, ops)
        return self.plain(f"{stem}.{unsigned(t)}", t, ops)

    def op_add(self, mods, ops):
        self.arith("add", mods, ops, 3)

    def op_sub(self, mods, ops):
        self.arith("sub", mods, ops, 3)

    def op_fma(self, mods, ops):
        self.arith("fma", mods, ops, 4, {"relu"})

    def op_mul(self, mods, ops):
        if mods[0] in ("lo", "hi", "wide"):
            return self.integer_product("mul", mods, ops)
        return self.arith("mul", mods, ops, 3)

    def op_mad(self, mods, ops):
        if mods[0] in ("lo", "hi", "wide"):
            return self.integer_product("mad", mods, ops)
        return self.arith("fma", mods, ops, 4)

    def op_mul24(self, mods, ops):
        flags, (t,) = self.split(mods, {"lo"})
        self.plain(f"mul24.lo.{t}", t, ops)

    def op_mad24(self, mods, ops):
        flags, (t,) = self.split(mods, {"lo"})
        product = self.temp("r")
        self.row(f"mul24.lo.{t}", product, self.src(ops[1], "r"), self.src(ops[2], "r"))
        self.row("add.u32", self.dst(ops[0], "r"), product, self.src(ops[3], "r"))

    def integer_product(self, stem: str, mods, ops) -> None:
        flags, (t,) = self.split(mods, {"lo", "hi", "wide"})
        self.count(ops, 3 if stem == "mul" else 4)
        c = cls(t)
        if "wide" in flags:
            out = "d" if width(t) == 32 else "r"
            return self.plain(f"{stem}.wide.{t}", t, ops, [out, c, c, out][: len(ops)])
        return self.plain(f"{stem}.lo.{unsigned(t)}" if "lo" in flags else f"{stem}.hi.{t}", t, ops)

    def op_div(self, mods, ops):
        flags, (t,) = self.split(mods, {"rn", "rz", "rm", "rp", "approx", "full", "ftz"})
        self.count(ops, 3)
        self.plain(self.float_name("div", flags, t) if t[0] == "f" else f"div.{t}", t, ops)

    def op_rem(self, mods, ops):
        _, (t,) = self.split(mods, ())
        self.plain(f"rem.{t}", t, ops)

    def unary_float(self, stem: str, mods, ops) -> None:
        flags, (t,) = self.split(mods, {"rn", "rz", "rm", "rp", "approx", "ftz"})
        self.count(ops, 2)
        self.plain(self.float_name(stem, flags, t), t, ops)

    def op_rcp(self, mods, ops):
        self.unary_float("rcp", mods, ops)

    def op_sqrt(self, mods, ops):
        self.unary_float("sqrt", mods, ops)

    def op_rsqrt(self, mods, ops):
        self.unary_float("rsqrt", mods, ops)

    def op_sin(self, mods, ops):
        self.unary_float("sin", mods, ops)

    def op_cos(self, mods, ops):
        self.unary_float("cos", mods, ops)

    def op_ex2(self, mods, ops):
        self.unary_float("ex2", mods, ops)

    def op_lg2(self, mods, ops):
        self.unary_float("lg2", mods, ops)

    def op_tanh(self, mods, ops):
        self.unary_float("tanh", mods, ops)

    def min_max(self, stem: str, mods, ops) -> None:
        flags, (t,) = self.split(mods, {"ftz", "NaN"})
        self.count(ops, 3)
        self.plain(self.float_name(stem, flags, t) if t[0] == "f" or t in HALVES else f"{stem}.{t}", t, ops)

    def op_min(self, mods, ops):
        self.min_max("min", mods, ops)

    def op_max(self, mods, ops):
        self.min_max("max", mods, ops)

    def sign(self, stem: str, mods, ops) -> None:
        flags, (t,) = self.split(mods, {"ftz"})
        self.count(ops, 2)
        if t in HALVES:
            return self.plain(f"{stem}.h{'x2' if t.endswith('x2') else ''}", t, ops)
        return self.plain(self.float_name(stem, flags, t), t, ops)

    def op_abs(self, mods, ops):
        self.sign("abs", mods, ops)

    def op_neg(self, mods, ops):
        self.sign("neg", mods, ops)

    def op_copysign(self, mods, ops):
        _, (t,) = self.split(mods, ())
        self.plain(f"copysign.{t}", t, ops)

    def op_sad(self, mods, ops):
        _, (t,) = self.split(mods, ())
        self.plain(f"sad.{t}", t, ops)

    def op_dp4a(self, mods, ops):
        self.plain("dp4a." + ".".join(mods), "b32", ops)

    # ---- bits

    def logic(self, stem: str, mods, ops) -> None:
        _, (t,) = self.split(mods, ())
        if t == "pred":
            d = self.dst(ops[0], "p")
            sources = [self.pred_value(o) for o in ops[1:]]
            code = {"and": 1, "or": 2, "xor": 3, "not": 4}[stem]
            self.emit("PRED", [d, sources[0], sources[-1]], (d,), sources, sub=code)
            return
        self.plain(f"{stem}.{unsigned(t)}", t, ops)

    def op_and(self, mods, ops):
        self.logic("and", mods, ops)

    def op_or(self, mods, ops):
        self.logic("or", mods, ops)

    def op_xor(self, mods, ops):
        self.logic("xor", mods, ops)

    def op_not(self, mods, ops):
        self.logic("not", mods, ops)

    def op_cnot(self, mods, ops):
        _, (t,) = self.split(mods, ())
        self.plain(f"cnot.{unsigned(t)}", t, ops)

    def op_shl(self, mods, ops):
        _, (t,) = self.split(mods, ())
        self.plain(f"shl.{unsigned(t)}", t, ops, [cls(t), cls(t), "r"])

    def op_shr(self, mods, ops):
        _, (t,) = self.split(mods, ())
        self.plain(f"shr.{t.replace('b', 'u')}", t, ops, [cls(t), cls(t), "r"])

    def op_shf(self, mods, ops):
        self.plain("shf." + ".".join(mods), "b32", ops)

    def op_lop3(self, mods, ops):
        if mods != ["b32"]:
            self.fail("form of lop3")
        self.plain("lop3.b32", "b32", ops)

    def op_prmt(self, mods, ops):
        mode = [m for m in mods if m != "b32"]
        self.plain(".".join(["prmt", *mode, "b32"]), "b32", ops)

    def op_bfe(self, mods, ops):
        _, (t,) = self.split(mods, ())
        self.plain(f"bfe.{t}", t, ops, [cls(t), cls(t), "r", "r"])

    def op_bfi(self, mods, ops):
        _, (t,) = self.split(mods, ())
        self.plain(f"bfi.{t}", t, ops, [cls(t)] * 3 + ["r", "r"])

    def op_bfind(self, mods, ops):
        flags, (t,) = self.split(mods, {"shiftamt"})
        self.plain(f"bfind.{'shiftamt.' if flags else ''}{t}", t, ops, ["r", cls(t)])

    def op_bmsk(self, mods, ops):
        self.plain("bmsk." + ".".join(mods), "b32", ops)

    def count_bits(self, stem: str, mods, ops, out: str | None) -> None:
        _, (t,) = self.split(mods, ())
        self.plain(f"{stem}.{t}", t, ops, [out or cls(t), cls(t)])

    def op_popc(self, mods, ops):
        self.count_bits("popc", mods, ops, "r")

    def op_clz(self, mods, ops):
        self.count_bits("clz", mods, ops, "r")

    def op_brev(self, mods, ops):
        self.count_bits("brev", mods, ops, None)

    # ---- comparing and selecting

    def op_setp(self, mods, ops):
        cmp, combine, rest = mods[0], 0, mods[1:]
        if rest[0] in BOOL:
            combine, rest = BOOL[rest[0]], rest[1:]
        flags, (t,) = self.split(rest, {"ftz"})
        self.count(ops, 4 if combine else 3)
        p, _, q = (s.strip() for s in ops[0].partition("|"))
        p = self.dst(p, "p")
        q = self.dst(q, "p") if q else -1
        self.compare(cmp, t, flags, ops[1], ops[2], p, q, combine, ops[3] if combine else "")

    def compare(self, cmp, t, flags, a, b, p, q=-1, combine=0, c="") -> None:
        if cmp not in COMPARE:
            self.fail(f"comparison '.{cmp}'")
        cmp = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}.get(cmp, cmp)
        a, b = self.src(a, cls(t), t), self.src(b, cls(t), t)
        if "ftz" in flags and t == "f32":
            flushed = []
            for x in (a, b):
                flushed.append(self.temp("r"))
                self.row("cvt.ftz.f32.f32", flushed[-1], x)
            a, b = flushed
        third, negated = self.pred_src(c) if combine else (-1, 0)
        if t.endswith("x2"):
            if q < 0:
                self.fail("a packed comparison needs two predicates")
            low = t[:-2]
            # The low half's result must not disturb what the high half still reads.
            first = self.temp("p") if combine else p
            self.test(f"setp.{cmp}.{low}", first, a, b, -1, combine, third, negated)
            self.test(f"setp.{cmp}.{low}.hi", q, a, b, -1, combine, third, negated)
            if combine:
                self.emit("PRED", [p, first, first], (p,), (first,), sub=0)
            return
        self.test(f"setp.{cmp}.{unsigned(t) if t[0] == 'b' and t not in HALVES else t}", p, a, b, q, combine, third, negated)

    def op_set(self, mods, ops):
        cmp, combine, rest = mods[0], 0, mods[1:]
        if rest[0] in BOOL:
            combine, rest = BOOL[rest[0]], rest[1:]
        flags, types = self.split(rest, {"ftz"})
        if len(types) != 2:
            self.fail("set needs two types")
        to, t = types
        p, q = self.temp("p"), self.temp("p") if t.endswith("x2") else -1
        self.compare(cmp, t, flags, ops[1], ops[2], p, q, combine, ops[3] if combine else "")
        one = {"f32": 0x3F800000, "f16": 0x3C00, "f16x2": 0x3C00, "bf16": 0x3F80, "bf16x2": 0x3F80}.get(to, 0xFFFFFFFF)
        d = self.dst(ops[0], "r")
        if q < 0:
            if width(to) == 16 and one == 0xFFFFFFFF:
                one = 0xFFFF
            return self.row("selp.b32", d, self.const(one, 32), self.const(0, 32), p)
        halves = []
        for pred in (p, q):
            halves.append(self.temp("r"))
            self.row("selp.b32", halves[-1], self.const(one & 0xFFFF, 32), self.const(0, 32), pred)
        return self.row("pack.16", d, *halves)

    def op_selp(self, mods, ops):
        _, (t,) = self.split(mods, ())
        c, negated = self.pred_src(ops[3])
        a, b = self.src(ops[1], cls(t), t), self.src(ops[2], cls(t), t)
        if negated:
            a, b = b, a
        self.row(f"selp.b{64 if width(t) == 64 else 32}", self.dst(ops[0], cls(t)), a, b, c)

    def op_slct(self, mods, ops):
        flags, types = self.split(mods, {"ftz"})
        t, by = types
        self.plain(f"slct.b{64 if width(t) == 64 else 32}.{by}", t, ops, [cls(t)] * 3 + ["r"])

    def op_testp(self, mods, ops):
        p = self.dst(ops[0], "p")
        a = self.src(ops[1], cls(mods[1]), mods[1])
        self.test(f"testp.{mods[0]}.{mods[1]}", p, a, a)

    # ---- moving and converting

    def op_mov(self, mods, ops):
        flags, (t,) = self.split(mods, {"v2", "v4"})
        self.count(ops, 2)
        if t == "pred":
            d, s = self.dst(ops[0], "p"), self.pred_value(ops[1])
            self.emit("PRED", [d, s, s], (d,), (s,), sub=0)
            return
        if flags:  # old vector form: element by element
            for d, s in zip(self.vector(ops[0]), self.vector(ops[1]), strict=True):
                self.op_mov([t], [d, s])
            return
        if ops[0][0] == "{":
            return self.unpack(t, self.vector(ops[0]), ops[1])
        if ops[1][0] == "{":
            return self.pack(t, ops[0], self.vector(ops[1]))
        c = cls(t)
        self.row("mov.b64" if c == "d" else "mov.b32", self.dst(ops[0], c), self.src(ops[1], c, t))

    def unpack(self, t: str, parts, source: str) -> None:
        bits = width(t) // len(parts)
        s = self.src(source, cls(t), t)
        if bits not in (8, 16, 32):
            self.fail("way of taking a register apart")
        if width(t) == 16:
            t = "b32"
        saved = self.temp(cls(t))  # a destination may be the source
        self.row(f"mov.b{width(t)}", saved, s)
        for i, part in enumerate(parts):
            if part != "_":
                self.row(f"part{bits}.{width(t)}", self.dst(part, "r"), saved, self.const(bits * i, 32))

    def pack(self, t: str, d: str, parts) -> None:
        bits = width(t) // len(parts)
        rows = [self.src(p, "r", f"b{bits}") for p in parts]
        if bits not in (8, 16, 32):
            self.fail("way of putting a register together")
        while len(rows) > 1:
            last = len(rows) == 2
            merged = []
            for a, b in zip(rows[::2], rows[1::2], strict=True):
                merged.append(self.dst(d, cls(t)) if last else self.temp("r"))
                self.row(f"pack.{bits}", merged[-1], a, b)
            rows, bits = merged, bits * 2

    def op_cvt(self, mods, ops):
        allowed = ROUNDING | INTEGRAL | {"ftz", "sat", "relu"}
        flags, types = self.split(mods, allowed)
        if len(types) != 2:
            self.fail("cvt needs two types")
        to, of = types
        is_int = [t[0] in "us" for t in types]
        d = self.dst(ops[0], cls(to) if self.reg_bits(ops[0]) != 64 else "d")
        sources = [self.src(o, "d" if self.is_wide(o, of) else "r", of) for o in ops[1:]]
        rounding = next((f for f in flags if f in ROUNDING | INTEGRAL), None)
        if all(is_int):
            if flags - {"sat"}:
                self.fail("rounding between integers")
            if "sat" in flags:
                return self.row(f"cvt.sat.{to}.{of}", d, *sources)
            kept = to if width(to) <= width(of) else of
            reg = self.reg_bits(ops[0]) or width(to)
            out = max(reg if to[0] == "s" or width(to) <= width(of) else width(to), 16)
            if out < 64 and self.classes[d] == "d":
                out = 64
            wide = "64" if (self.classes[sources[0]] if sources[0] >= 0 else cls(of)) in ("d", "64") else "32"
            return self.row(f"ext.{kept}.{out}.{wide}", d, *sources)
        extra = "".join("." + f for f in ("sat", "relu") if f in flags)
        if is_int[0]:  # float to integer saturates anyway
            if rounding not in INTEGRAL:
                self.fail("float to integer needs .rni, .rzi, .rmi or .rpi")
            return self.row(f"cvt.{rounding}.{to}.{of}", d, self.flushed(flags, of, sources[0]))
        if is_int[1]:
            if rounding not in ROUNDING or extra:
                self.fail("integer to float needs a rounding, and no saturation")
            return self.row(f"cvt.{rounding}.{to}.{of}", d, *sources)
        if of == "f32" and "ftz" in flags:
            sources = [self.flushed(flags, of, s) for s in sources]
        if to == of and rounding in ROUNDING:
            rounding = None
        if to == of and not rounding and not extra:
            return self.row("mov.b64" if cls(to) == "d" else "mov.b32", d, *sources)
        if to == of and rounding and extra:
            self.fail("integral rounding with saturation")
        widening = width(to) > width(of) and not to.endswith("x2")
        name = ".".join(filter(None, ["cvt", None if widening else rounding, extra.strip("."), to, of]))
        return self.row(name, d, *sources)

    def is_wide(self, text: str, t: str) -> bool:
        v = self.register(text)
        return self.classes[v] == "d" if v is not None else width(t) == 64

    def flushed(self, flags, t: str, s: int) -> int:
        if "ftz" not in flags or t != "f32":
            return s
        v = self.temp("r")
        self.row("cvt.ftz.f32.f32", v, s)
        return v

    def op_cvta(self, mods, ops):
        to_space = "to" in mods
        names = [m for m in mods if m in ("global", "shared", "local", "const", "param", "shared::cta")]
        if mods[-1] != "u64" or len(names) != 1 or set(mods) - {"to", "u64", names[0]}:
            self.fail("form of cvta")
        window = {"shared": 1 << 60, "shared::cta": 1 << 60, "local": 2 << 60, "param": 3 << 60}.get(names[0], 0)
        d, s = self.dst(ops[0], "d"), self.src(ops[1], "d")
        if not window:
            return self.row("mov.b64", d, s)
        return self.row("sub.u64" if to_space else "add.u64", d, s, self.const(window, 64))

    def op_isspacep(self, mods, ops):
        d, a = self.dst(ops[0], "p"), self.src(ops[1], "d")
        code = {"global": 1, "const": 1, "shared": 2, "shared::cta": 2, "local": 3, "param": 4}.get(mods[0])
        if code is None:
            self.fail(f"space '.{mods[0]}'")
        if mods[0] == "const":
            self.emit("PRED", [d, self.const(0, 32), self.const(0, 32)], (d,), sub=0)
            return
        self.emit("ISSPACEP", [d, a], (d,), (a,), sub=code)
