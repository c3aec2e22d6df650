"""What each PTX opcode means to the interpreter: one method per stem, which accepts the modifiers it knows and no others."""

from __future__ import annotations

import re

from cuda_kernels.emulator.parse import Instr

WIDE, SIGNED, NC, STRONG, PRED_NOT, ASYNC_ALL = 2, 4, 8, 32, 64, 128
TYPES = {
    "pred", "b8", "b16", "b32", "b64", "u8", "u16", "u32", "u64", "s8", "s16", "s32", "s64", "f16", "f16x2", "bf16", "bf16x2", "f32",
    "f64", "u16x2", "s16x2",
}  # fmt: skip
HALVES = {"f16", "f16x2", "bf16", "bf16x2"}
ROUNDING = {"rn", "rz", "rm", "rp"}
INTEGRAL = {"rni", "rzi", "rmi", "rpi"}
COMPARE = {"eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan", "lo", "ls", "hi", "hs"}
CACHE = {
    "ca", "cg", "cs", "lu", "cv", "wb", "wt", "nc", "weak", "volatile", "relaxed", "acquire", "release", "acq_rel", "mmio", "cta",
    "cluster", "gpu", "sys", "v2", "v4", "v8", "L2::cache_hint", "L1::no_allocate", "L1::evict_first", "L1::evict_last",
    "L1::evict_normal", "L1::evict_unchanged", "L2::evict_first", "L2::evict_last", "L2::evict_normal", "L2::64B", "L2::128B",
    "L2::256B",
}  # fmt: skip
STATE_SPACES = {"global", "shared", "shared::cta", "local", "param", "const"}
ATOM_OPS = {name: i for i, name in enumerate("add min max and or xor exch cas inc dec".split())}
ATOM_TYPES = {name: i for i, name in enumerate("u32 s32 u64 s64 f32 f64 f16 f16x2 bf16 bf16x2".split())}
BOOL = {"and": 1, "or": 2, "xor": 3}


def width(t: str) -> int:
    return 32 if t.endswith("x2") else int(re.sub(r"\D", "", t))


def cls(t: str) -> str:
    return "d" if width(t) == 64 else "r"


def unsigned(t: str) -> str:
    return re.sub("^[sb]", "u", t)


class Opcodes:
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

    # ---- memory

    def memory(self, mods, ops, store: bool) -> None:
        space = next((m for m in mods if m in STATE_SPACES), "generic").replace("::cta", "")
        flags, (t,) = self.split([m for m in mods if m not in STATE_SPACES], CACHE)
        target, values = (ops[0], ops[1]) if store else (ops[1], ops[0])
        if len(ops) > 2 and "L2::cache_hint" not in flags:
            self.fail(f"{len(ops)} operands")
        vec = next((int(f[1:]) for f in ("v2", "v4", "v8") if f in flags), 1)
        names = self.vector(values)
        if len(names) != vec:
            self.fail(f"{len(names)} values for a vector of {vec}")
        size = width(t) // 8
        if size * vec > 32:
            self.fail("access wider than 32 bytes")
        a, imm, wide, known = self.address(target)
        if space in ("param", "generic") and known:
            space = known
        bits = 0
        c = (
            "d"
            if any(self.is_wide(n, t) for n in names if n != "_" and self.register(n) is not None) or (store and size == 8)
            else "r"
        )
        if c == "d":
            bits |= WIDE
        if t[0] == "s" and not store:
            bits |= SIGNED
        rows = [self.src(n, c, t) for n in names] if store else [self.dst(n, c) for n in names]
        if space == "param" and not store and a <= -2 and not (set(rows) & {-1}):
            at = imm + self.const_value(a)
            if at % (size * vec) or at + size * vec > self.param_bytes:
                self.fail("parameter access is misaligned or outside the parameters")
            self.emit("LD_PARAM", rows, rows, imm=at, size=size, vec=vec, flags=bits)
            return
        if flags & {"volatile", "relaxed", "acquire", "release", "mmio"}:
            bits |= STRONG
        if "nc" in flags:
            bits |= NC
        if space in ("shared", "generic"):
            self.cell = min(self.cell, size)
        kind = {"generic": 0, "global": 1, "const": 1, "shared": 2, "local": 3, "param": 4}[space]
        o = rows + [-1] * (8 - len(rows)) + [a]
        uses = (*rows, a) if store else (a,)
        self.emit(
            "ST" if store else "LD", o, () if store else rows, uses, imm=imm, space=kind, size=size, vec=vec, flags=bits | wide
        )

    def const_value(self, operand: int) -> int:
        at = -2 - operand
        return int.from_bytes(self.consts[at : at + 8], "little")

    def op_ld(self, mods, ops):
        self.memory(mods, ops, False)

    def op_ldu(self, mods, ops):
        self.memory(mods, ops, False)

    def op_st(self, mods, ops):
        self.memory(mods, ops, True)

    def op_atom(self, mods, ops):
        self.atomic(mods, ops[0], ops[1:])

    def op_red(self, mods, ops):
        self.atomic(mods, "_", ops)

    def atomic(self, mods, d: str, ops) -> None:
        space = next((m for m in mods if m in STATE_SPACES), "generic").replace("::cta", "")
        op = next((m for m in mods if m in ATOM_OPS), None)
        rest = [m for m in mods if m not in STATE_SPACES and m != op]
        sem = {"relaxed", "acquire", "release", "acq_rel", "cta", "cluster", "gpu", "sys", "noftz", "L2::cache_hint"}
        flags, (t,) = self.split(rest, sem)
        if op is None or space not in ("global", "shared", "generic"):
            self.fail("form of atomic")
        if "L2::cache_hint" in flags:
            ops = ops[:-1]
        self.count(ops, 3 if op == "cas" else 2)
        kind = re.sub("^b(?=32|64)", "u", t) if t != "b16" else "f16"
        if kind not in ATOM_TYPES or (t[0] == "f" or t in HALVES) and op not in ("add", "exch"):
            self.fail("type of atomic")
        c = cls(t)
        a, imm, wide, known = self.address(ops[0])
        if space == "generic" and known:
            space = known
        b = self.src(ops[1], c, t)
        third = self.src(ops[2], c, t) if op == "cas" else b
        dest = self.dst(d, c)
        if space in ("shared", "generic"):
            self.cell = min(self.cell, width(t) // 8)
        self.emit("ATOM", [dest, a, b, third], (dest,), (a, b, third), imm=imm, flags=wide, size=width(t) // 8,
                  space={"generic": 0, "global": 1, "shared": 2}[space], sub=ATOM_OPS[op] | ATOM_TYPES[kind] << 8)  # fmt: skip

    def op_cp(self, mods, ops):
        if mods[:1] != ["async"]:
            self.fail(f"unknown opcode 'cp.{'.'.join(mods)}'")
        rest = mods[1:]
        if rest == ["commit_group"]:
            self.emit("CP_COMMIT", [])
        elif rest == ["wait_group"]:
            self.emit("CP_WAIT", [], imm=self.number(ops[0]))
        elif rest == ["wait_all"]:
            self.emit("CP_WAIT", [], flags=ASYNC_ALL)
        elif rest[:1] in (["ca"], ["cg"]) and len(rest) >= 3 and rest[1] in ("shared", "shared::cta") and rest[2] == "global":
            if set(rest[3:]) - {"L2::cache_hint", "L2::64B", "L2::128B", "L2::256B"}:
                self.fail(f"unknown modifier in 'cp.{'.'.join(mods)}'")
            if "L2::cache_hint" in rest:
                ops = ops[:-1]
            self.count(ops, 3, 4, 5)
            size = self.number(ops[2])
            if size not in (4, 8, 16) or (rest[0] == "cg" and size != 16):
                self.fail(f"cp-size {size}")
            dst, imm, wide, _ = self.address(ops[0])
            src, imm2, src_wide, _ = self.address(ops[1])
            if not src_wide:
                self.fail("the global address must have 64 bits")
            take = ignore = -1
            for extra in ops[3:]:
                name = extra.lstrip("!")
                v = self.register(name)
                if v is not None and self.classes[v] == "p":
                    ignore = self.pred_value(extra)
                else:
                    take = self.src(extra, "r")
            self.emit(
                "CP_ASYNC", [dst, src, take, ignore], (), (dst, src, take, ignore), imm=imm, imm2=imm2, size=size, flags=wide
            )
        else:
            self.fail(f"unknown opcode 'cp.{'.'.join(mods)}'")

    def op_prefetch(self, mods, ops):
        self.address(ops[0])
        self.emit("NOP", [])

    op_prefetchu = op_prefetch

    def op_createpolicy(self, mods, ops):
        self.row("mov.b64", self.dst(ops[0], "d"), self.const(0, 64))

    # ---- matrices

    def op_ldmatrix(self, mods, ops):
        flags = [m for m in mods if m not in ("sync", "aligned", "shared", "shared::cta", "b16")]
        vec = next((int(m[1]) for m in flags if m in ("x1", "x2", "x4")), 0)
        if not vec or set(flags) - {"m8n8", "x1", "x2", "x4", "trans"} or "m8n8" not in flags:
            self.fail("form of ldmatrix")
        rows = [self.dst(r, "r") for r in self.vector(ops[0])]
        if len(rows) != vec or -1 in rows:
            self.fail(f"ldmatrix.x{vec} writes {vec} registers")
        a, imm, wide, _ = self.address(ops[1])
        shared = "shared" in mods or "shared::cta" in mods
        self.emit("LDMATRIX", rows + [-1] * (8 - vec) + [a], rows, (a,), imm=imm, vec=vec, sub=int("trans" in flags),
                  flags=wide, space=2 if shared else 0)  # fmt: skip

    def op_movmatrix(self, mods, ops):
        if mods != ["sync", "aligned", "m8n8", "trans", "b16"]:
            self.fail("form of movmatrix")
        d, s = self.dst(ops[0], "r"), self.src(ops[1], "r")
        self.emit("MOVMATRIX", [d, s], (d,), (s,))

    def op_mma(self, mods, ops):
        text = ".".join(mods)
        match = re.fullmatch(
            r"(sp::ordered_metadata\.)?sync\.aligned\.m16n8k(8|16|32)\.row\.col\.(f32|f16)\.(f16|bf16)\.(f16|bf16)\.(f32|f16)",
            text,
        )
        if not match:
            self.fail(f"unknown opcode 'mma.{text}'")
        sparse, k, d, a, b, c = match[1], int(match[2]), *match.groups()[2:]
        if a != b or d != c or (a == "bf16" and d == "f16") or k not in ((16, 32) if sparse else (8, 16)):
            self.fail("combination of mma types or shape")
        counts = [2 if d == "f16" else 4, k // 8 if sparse else k // 4, k // 8, 2 if d == "f16" else 4]
        self.count(ops, 6 if sparse else 4)
        groups = [self.vector(o) for o in ops[:4]]
        if [len(g) for g in groups] != counts:
            self.fail("register counts of mma")
        rows = [self.dst(r, "r") for r in groups[0]]
        sources = [
            self.src(r, "r", t)
            for g, t in zip(groups[1:], ("b32", "b32", "b32" if c == "f16" else "f32"), strict=True)
            for r in g
        ]
        sub = (1 if a == "bf16" else 0) | (2 if d == "f16" else 0)
        if not sparse:
            self.emit("MMA", rows + sources, rows, sources, size=k, sub=sub)
            return
        e, selector = self.src(ops[4], "r"), self.number(ops[5])
        if not 0 <= selector < (2 if k == 32 else 4):
            self.fail(f"sparsity selector {selector}")
        self.emit("MMA_SP", [*rows, *sources, e], rows, (*sources, e), size=k, sub=sub, imm=selector)

    # ---- warps and blocks

    def op_bar(self, mods, ops):
        if mods[:1] == ["warp"]:
            mask = self.src(ops[0], "r")
            self.emit("BAR_WARP", [-1, mask], (), (mask,))
            return
        mods = [m for m in mods if m not in ("cta", "aligned")]
        if mods == ["sync"] or mods == ["arrive"]:
            number = self.src(ops[0], "r")
            threads = self.src(ops[1], "r") if len(ops) > 1 else -1
            if mods == ["arrive"] and threads == -1:
                self.fail("bar.arrive needs a thread count")
            self.emit("BAR", [-1, number, threads], (), (number, threads), sub=int(mods == ["arrive"]))
        elif mods[:1] == ["red"] and mods[1:] in (["popc", "u32"], ["and", "pred"], ["or", "pred"]):
            code = {"popc": 2, "and": 3, "or": 4}[mods[1]]
            d = self.dst(ops[0], "r" if code == 2 else "p")
            number = self.src(ops[1], "r")
            threads = self.src(ops[2], "r") if len(ops) > 3 else -1
            p, negated = self.pred_src(ops[-1])
            self.emit("BAR", [d, number, threads, p], (d,), (number, threads, p), sub=code, flags=negated)
        else:
            self.fail(f"unknown opcode 'bar.{'.'.join(mods)}'")

    def op_barrier(self, mods, ops):
        if "cluster" in mods:
            self.fail(f"unknown opcode 'barrier.{'.'.join(mods)}'")
        self.op_bar(mods, ops)

    def member_mask(self, kind: str, d: int, p: int, sources, mask: int, **more) -> None:
        o = [d, p, *sources, *[-1] * (3 - len(sources)), mask]
        self.emit(kind, o, (d, p), (*sources, mask), **more)

    def op_shfl(self, mods, ops):
        modes = {"up": 0, "down": 1, "bfly": 2, "idx": 3}
        if len(mods) != 3 or mods[0] != "sync" or mods[1] not in modes or mods[2] != "b32":
            self.fail("form of shfl")
        d, _, p = (s.strip() for s in ops[0].partition("|"))
        self.member_mask("SHFL", self.dst(d, "r"), self.dst(p, "p") if p else -1, [self.src(o, "r") for o in ops[1:4]],
                         self.src(ops[4], "r"), sub=modes[mods[1]])  # fmt: skip

    def op_vote(self, mods, ops):
        modes = {"ballot": 0, "any": 1, "all": 2, "uni": 3}
        if len(mods) != 3 or mods[0] != "sync" or mods[1] not in modes:
            self.fail("form of vote")
        p, negated = self.pred_src(ops[1])
        d = self.dst(ops[0], "r" if mods[1] == "ballot" else "p")
        self.member_mask("VOTE", d, -1, [p], self.src(ops[2], "r"), sub=modes[mods[1]], flags=negated)

    def op_match(self, mods, ops):
        if len(mods) != 3 or mods[0] not in ("any", "all") or mods[1] != "sync" or mods[2] not in ("b32", "b64"):
            self.fail("form of match")
        d, _, p = (s.strip() for s in ops[0].partition("|"))
        self.member_mask("MATCH", self.dst(d, "r"), self.dst(p, "p") if p else -1, [self.src(ops[1], cls(mods[2]))],
                         self.src(ops[2], "r"), sub=int(mods[0] == "all"), size=width(mods[2]) // 8)  # fmt: skip

    def op_redux(self, mods, ops):
        if len(mods) != 3 or mods[0] != "sync" or mods[1] not in ATOM_OPS or mods[2] not in ("u32", "s32", "b32"):
            self.fail("form of redux")
        sub = ATOM_OPS[mods[1]] | ATOM_TYPES[mods[2].replace("b", "u")] << 8
        self.member_mask("REDUX", self.dst(ops[0], "r"), -1, [self.src(ops[1], "r")], self.src(ops[2], "r"), sub=sub)

    def op_activemask(self, mods, ops):
        d = self.dst(ops[0], "r")
        self.emit("ACTIVEMASK", [d], (d,))

    # ---- control

    def op_bra(self, mods, ops):
        if set(mods) - {"uni"}:
            self.fail("form of bra")
        self.emit("BRA", [], targets=[self.label_of(ops[0])], ends=self.guard is None)

    def op_brx(self, mods, ops):
        if mods[:1] != ["idx"] or set(mods[1:]) - {"uni"}:
            self.fail("form of brx")
        function = self.module.functions[self.calling[-1]]
        index = self.src(ops[0], "r")
        if ops[1] not in function.tables:
            self.fail(f"unknown branch table '{ops[1]}'")
        targets = [self.label_of(name) for name in function.tables[ops[1]]]
        self.emit("BRX", [-1, index], (), (index,), targets=targets, ends=self.guard is None)

    def op_ret(self, mods, ops):
        if len(self.calling) == 1:
            return self.op_exit(mods, ops)
        self.emit("BRA", [], targets=[(self.instance, 0)], ends=self.guard is None)
        return None

    def op_exit(self, mods, ops):
        self.emit("EXIT", [], ends=self.guard is None)

    def op_call(self, mods, ops):
        returns = self.names(ops.pop(0)) if ops and ops[0][0] == "(" else []
        name, given = ops[0], self.names(ops[1]) if len(ops) > 1 else []
        if name == "__assertfail":
            self.emit("TRAP", [], ends=True)
            return
        function = self.module.functions.get(name)
        if function is None or self.guard is not None:
            self.fail(f"call of '{name}', which this module does not define, or a call under a guard")
        frame = {}
        for formal, actual in zip([*function.returns, *function.params], [*returns, *given], strict=True):
            var = self.ins.scope.find("vars", actual)
            if var is None:
                self.fail(f"unknown parameter '{actual}'")
            frame[formal.name] = ("local", self.local_slot((self.instance, id(var)), var))
        ins = self.ins
        self.function(function, frame)
        self.ins = ins

    def names(self, text: str) -> list[str]:
        return [p.strip() for p in text.strip()[1:-1].split(",") if p.strip()]

    def op_trap(self, mods, ops):
        self.emit("TRAP", [], ends=self.guard is None)

    op_brkpt = op_trap

    def no_op(self, mods, ops):
        self.emit("NOP", [])

    op_membar = no_op
    op_nanosleep = no_op

    def op_fence(self, mods, ops):
        if mods[:1] == ["proxy"]:
            self.fail(f"unknown opcode 'fence.{'.'.join(mods)}'")
        self.emit("NOP", [])

    def op_griddepcontrol(self, mods, ops):
        if mods not in (["wait"], ["launch_dependents"]):
            self.fail("form of griddepcontrol")
        self.emit("NOP", [])
