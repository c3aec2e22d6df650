"""The opcodes that move and convert registers."""

from cuda_kernels.emulator.decoder import Decoder, Opcode
from cuda_kernels.emulator.opcodes import ROUNDING, flushed
from cuda_kernels.emulator.operands import SPACES, WINDOWS, Fields, cls, width

INTEGRAL = {"rni", "rzi", "rmi", "rpi"}


def mov(dec: Decoder, mods: list[str], ops: list[str]) -> None:
    flags, t = dec.typed(mods, {"v2", "v4"})
    dec.count(ops, 2)
    if t == "pred":
        d, s = dec.dst(ops[0], "p"), dec.pred_value(ops[1])
        return dec.emit("PRED", [d, s, s], (d,), (s,))
    if flags:  # old vector form: element by element
        for to, of in zip(dec.vector(ops[0]), dec.vector(ops[1]), strict=True):
            mov(dec, [t], [to, of])
        return None
    if ops[0][0] == "{":
        return unpack(dec, t, dec.vector(ops[0]), ops[1])
    if ops[1][0] == "{":
        return pack(dec, t, ops[0], dec.vector(ops[1]))
    return copy(dec, t, dec.dst(ops[0], cls(t)), dec.src(ops[1], cls(t), t))


def copy(dec: Decoder, t: str, d: int, s: int) -> None:
    dec.row("mov.b64" if cls(t) == "d" else "mov.b32", d, s)


def unpack(dec: Decoder, t: str, parts: list[str], source: str) -> None:
    bits = width(t) // len(parts)
    s = dec.src(source, cls(t), t)
    if bits not in (8, 16, 32):
        dec.fail("split of a register")
    saved = dec.temp(cls(t))  # a destination may be the source
    copy(dec, t, saved, s)
    for i, part in enumerate(parts):
        if part != "_":
            dec.row(f"part{bits}.{max(width(t), 32)}", dec.dst(part, "r"), saved, dec.const(bits * i, 32))


def pack(dec: Decoder, t: str, d: str, parts: list[str]) -> None:
    bits = width(t) // len(parts)
    rows = [dec.src(p, "r", f"b{bits}") for p in parts]
    if bits not in (8, 16, 32):
        dec.fail("way of putting a register together")
    while len(rows) > 1:
        merged = [dec.temp("r") for _ in rows[::2]] if len(rows) > 2 else [dec.dst(d, cls(t))]
        for whole, low, high in zip(merged, rows[::2], rows[1::2], strict=True):
            dec.row(f"pack.{bits}", whole, low, high)
        rows, bits = merged, bits * 2


# ---- conversions: one function for each pair of integer and floating-point


def cvt(dec: Decoder, mods: list[str], ops: list[str]) -> None:
    flags, to, of = dec.typed2(mods, ROUNDING | INTEGRAL | {"ftz", "sat", "relu"})
    d = dec.dst(ops[0], cls(to) if dec.reg_bits(ops[0]) != 64 else "d")
    sources = [dec.src(o, "d" if dec.is_wide(o, of) else "r", of) for o in ops[1:]]
    if to[0] in "us" and of[0] in "us":
        return integer_to_integer(dec, flags, to, of, d, sources[0], dec.reg_bits(ops[0]))
    if to[0] in "us":
        return float_to_integer(dec, flags, to, of, d, sources[0])
    if of[0] in "us":
        return integer_to_float(dec, flags, to, of, d, sources[0])
    return float_to_float(dec, flags, to, of, d, sources)


def integer_to_integer(dec: Decoder, flags: set[str], to: str, of: str, d: int, s: int, register_bits: int) -> None:
    if flags - {"sat"}:
        dec.fail("rounding between integers")
    if "sat" in flags:
        return dec.row(f"cvt.sat.{to}.{of}", d, s)
    narrows = width(to) <= width(of)
    # A signed or narrow result fills its destination register.
    out = max((register_bits or width(to)) if to[0] == "s" or narrows else width(to), 16)
    if out < 64 and dec.classes[d] == "d":
        out = 64
    wide = 64 if (dec.classes[s] if s >= 0 else cls(of)) == "d" else 32
    return dec.row(f"ext.{to if narrows else of}.{out}.{wide}", d, s)


def float_to_integer(dec: Decoder, flags: set[str], to: str, of: str, d: int, s: int) -> None:
    rounding = next(iter(flags & INTEGRAL), None)
    if rounding is None:
        dec.fail("float to integer needs .rni, .rzi, .rmi or .rpi")
    dec.row(f"cvt.{rounding}.{to}.{of}", d, flushed(dec, flags, of, s))  # saturates with .sat and without


def integer_to_float(dec: Decoder, flags: set[str], to: str, of: str, d: int, s: int) -> None:
    rounding = next(iter(flags & ROUNDING), None)
    if rounding is None or flags & {"sat", "relu"}:
        dec.fail("integer to float needs a rounding, and no saturation")
    dec.row(f"cvt.{rounding}.{to}.{of}", d, s)


def float_to_float(dec: Decoder, flags: set[str], to: str, of: str, d: int, sources: list[int]) -> None:
    """Decodes a conversion between floating-point types; two `sources` make a pair of halves."""
    extra = [f for f in ("sat", "relu") if f in flags]
    rounding = list(flags & (INTEGRAL if to == of else ROUNDING | INTEGRAL))
    sources = [flushed(dec, flags, of, s) for s in sources]
    if to == of and not rounding and not extra:
        return copy(dec, to, d, sources[0])
    if to == of and rounding and extra:
        dec.fail("integral rounding with saturation")
    if width(to) > width(of) and not to.endswith("x2"):
        rounding = []  # exact
    return dec.row(".".join(["cvt", *rounding, *extra, to, of]), d, *sources)


def cvta(dec: Decoder, mods: list[str], ops: list[str]) -> None:
    spaces = [m for m in mods if m in SPACES]
    if mods[-1] != "u64" or len(spaces) != 1 or set(mods) - {"to", "u64", *spaces}:
        dec.fail("form of cvta")
    window, d, s = WINDOWS.get(spaces[0]), dec.dst(ops[0], "d"), dec.src(ops[1], "d")
    if window is None:
        return dec.row("mov.b64", d, s)
    return dec.row("sub.u64" if "to" in mods else "add.u64", d, s, dec.const(window, 64))


def isspacep(dec: Decoder, mods: list[str], ops: list[str]) -> None:
    d, a = dec.dst(ops[0], "p"), dec.src(ops[1], "d")
    if mods[0] not in SPACES:
        dec.fail(f"space '.{mods[0]}'")
    if mods[0] == "const":
        return dec.emit("PRED", [d, dec.const(0, 32), dec.const(0, 32)], (d,))
    return dec.emit("ISSPACEP", [d, a], (d,), (a,), of=Fields(sub=SPACES[mods[0]]))


OPCODES: dict[str, Opcode] = {"mov": mov, "cvt": cvt, "cvta": cvta, "isspacep": isspacep}
