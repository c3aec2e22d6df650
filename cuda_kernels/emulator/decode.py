"""Parsed PTX -> the interpreter's instruction records.

Each opcode has a method `op_<stem>` that accepts the modifiers it knows and raises on every other: what is not understood
does not run. Calls are inlined (parameters become local memory), so the interpreter knows no call stack.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, field

import numpy as np

from cuda_kernels.emulator.build import names
from cuda_kernels.emulator.opcodes import Arithmetic
from cuda_kernels.emulator.opcodes_machine import Machine
from cuda_kernels.emulator.parse import Function, Instr, Label, Module, Var
from cuda_kernels.emulator.registers import allocate

INS = np.dtype([
    ("fn", "<u8"), ("imm", "<i8"), ("imm2", "<i8"), ("guard", "<i4"), ("kind", "<u2"), ("sub", "<u2"), ("flags", "u1"),
    ("space", "u1"), ("size", "u1"), ("vec", "u1"), ("line", "<i4"), ("o", "<i4", (20,)), ("order", "<i4"), ("pad", "<i4"),
])  # fmt: skip
assert INS.itemsize == 128

GUARD_NOT, WIDE, ADDR64, PRED_NOT = 1, 2, 16, 64
SPACES = {"generic": 0, "global": 1, "const": 1, "shared": 2, "local": 3, "param": 4}
WINDOWS = {"shared": 1 << 60, "local": 2 << 60, "param": 3 << 60}
SPECIALS = {
    name: i
    for i, name in enumerate(
        "tid.x tid.y tid.z ntid.x ntid.y ntid.z ctaid.x ctaid.y ctaid.z nctaid.x nctaid.y nctaid.z laneid warpid nwarpid smid "
        "nsmid lanemask_eq lanemask_le lanemask_lt lanemask_ge lanemask_gt dynamic_smem_size total_smem_size".split()
    )
}
CLASS_OF = {"pred": "p", **{f"{c}{n}": "r" for c in "busf" for n in (8, 16, 32)}, **{f"{c}64": "d" for c in "busf"},
            "f16x2": "r", "bf16": "r", "bf16x2": "r"}  # fmt: skip
SHARED_START = 16  # address 0 stays unused, and nothing is better aligned than it asked to be


class DecodeError(Exception):
    """An instruction the emulator does not know; the message names opcode, file and line."""


@dataclass(slots=True)
class Micro:
    """One record for the interpreter. Operands: a virtual register (>= 0), -1 for none, -2 - offset for a constant row."""

    kind: str
    o: list[int]
    defs: tuple[int, ...] = ()
    uses: tuple[int, ...] = ()
    fn: int = 0
    sub: int = 0
    flags: int = 0
    imm: int | Label = 0
    imm2: int = 0
    space: int = 0
    size: int = 0
    vec: int = 0
    order: int = 0
    guard: int | None = None
    line: int = 0
    loc: tuple[int, int] = (0, 0)
    opcode: str = ""
    targets: list = field(default_factory=list)
    ends: bool = False


@dataclass
class Decoded:
    """Arrays for emu_program, and what run.py needs to launch and to explain."""

    name: str
    code: np.ndarray
    consts: bytes
    tables: np.ndarray
    specials: np.ndarray
    sizes: np.ndarray  # warp bytes, predicate bytes, local bytes, log2 of a shared and of a global cell
    lines: list[tuple[int, tuple[int, int], str]]  # per instruction: PTX line, (file, line), opcode
    files: dict[int, str]
    static_end: int  # shared addresses: one past the static variables, and where the dynamic array begins
    dynamic_at: int
    param_bytes: int
    maxntid: tuple[int, ...] | None
    rows32: int
    globals: list[tuple[str, np.ndarray]]


class Decoder(Arithmetic, Machine):
    """Decodes one kernel of a module: operands, addresses, calls, layout. What opcodes mean is in the two opcodes files."""

    def __init__(self, module: Module, kernel: Function):
        self.module, self.kernel = module, kernel
        self.kinds, self.rows = names()
        self.code: list[Micro] = []
        self.labels: dict[tuple[int, int], int] = {}
        self.vregs: dict[tuple, int] = {}
        self.classes: list[str] = []
        self.consts = bytearray()
        self.const_at: dict[tuple[int, int], int] = {}
        self.specials: dict[str, int] = {}
        self.tables: list = []
        self.instance, self.instances = 0, 1
        self.frames: list[dict[str, tuple[str, int]]] = []
        self.calling: list[str] = []
        self.shared: dict[int, int] = {}
        self.locals: dict[tuple[int, int], int] = {}
        self.local_bytes = 0
        self.globals: dict[int, np.ndarray] = {}
        self.cell, self.global_cell = 4, 16  # smallest accesses to shared and to global memory
        self.ins: Instr | None = None
        self.guard: tuple[int, bool] | None = None
        self.const(0, 64)  # the operand of instructions that have fewer than four
        self.params: dict[str, int] = {}
        at = 0
        for p in kernel.params:
            at = -(-at // p.align) * p.align
            self.params[p.name] = at
            at += p.size
        self.param_bytes = at
        self.layout_shared()

    def fail(self, why: str):
        ins = self.ins
        if ins is None:
            raise DecodeError(f"kernel {self.kernel.name}: {why}")
        file = self.module.files.get(ins.loc[0], "?")
        raise DecodeError(
            f"kernel {self.kernel.name}: {why}: '{ins.opcode} {', '.join(ins.operands)}' "
            f"({file}:{ins.loc[1]}, PTX line {ins.line})"
        )

    # ---- memory layout

    def layout_shared(self) -> None:
        """Static variables of every function, then the dynamic array at the least alignment it declares."""
        at = SHARED_START
        static: list[Var] = []
        dynamic: list[Var] = []
        seen: set[int] = set()

        def collect(scope) -> None:
            for var in scope.vars.values():
                if var.space == "shared" and id(var) not in seen:
                    seen.add(id(var))
                    (dynamic if var.extern else static).append(var)

        collect(self.module.scope)
        for function in self.module.functions.values():
            if function is self.kernel or not function.entry:
                for item in function.body:
                    scope = item.scope
                    while scope is not None:
                        collect(scope)
                        scope = scope.parent
        used = {o for i in self._reachable() for text in i.operands for o in re.findall(r"[\w$%]+", text)}
        for var in static:
            if var.name in used:
                at = -(-at // var.align) * var.align
                self.shared[id(var)] = at
                at += var.size
        self.static_end = at
        align = max([16, *(v.align for v in dynamic if v.name in used)])
        at = -(-at // align) * align
        if align < 1024 and at % (2 * align) == 0:
            at += align
        for var in dynamic:
            self.shared[id(var)] = at
        self.dynamic_at = at

    def _reachable(self):
        todo, seen = [self.kernel], set()
        while todo:
            function = todo.pop()
            if function.name in seen:
                continue
            seen.add(function.name)
            for item in function.body:
                if isinstance(item, Instr):
                    yield item
                    if item.opcode.startswith("call"):
                        todo += [self.module.functions[o] for o in item.operands if o in self.module.functions]

    def local_slot(self, key: tuple[int, int], var: Var) -> int:
        if key not in self.locals:
            align = max(var.align, 1)
            self.local_bytes = -(-self.local_bytes // align) * align
            self.locals[key] = self.local_bytes
            self.local_bytes += var.size
        return self.locals[key]

    def symbol(self, name: str) -> tuple[str, int] | None:
        """(space, address) of a variable."""
        if self.frames and name in self.frames[-1]:
            return self.frames[-1][name]
        if len(self.frames) <= 1 and name in self.params:
            return "param", self.params[name]
        var = self.ins.scope.find("vars", name)
        if var is None:
            return None
        if var.space == "shared":
            return "shared", self.shared[id(var)]
        if var.space in ("local", "param"):
            return "local", self.local_slot((self.instance, id(var)), var)
        if var.extern and var.init is None:
            self.fail(f"external variable '{name}'")
        if id(var) not in self.globals:
            data = np.frombuffer((var.init or b"").ljust(max(var.size, 1), b"\0"), np.uint8)
            room = np.zeros(len(data) + 256, np.uint8)
            start = -room.ctypes.data % 256
            room[start : start + len(data)] = data
            self.globals[id(var)] = (name, room[start : start + len(data)])
        return "global", self.globals[id(var)][1].ctypes.data

    # ---- operands

    def const(self, value: int, width: int) -> int:
        """A row of 32 equal values in the constant area; predicates are 32-bit masks."""
        value &= (1 << width) - 1
        key = (width, value)
        if key not in self.const_at:
            self.const_at[key] = len(self.consts)
            self.consts += struct.pack("<I" if width == 32 else "<Q", value) * 32
        return -2 - self.const_at[key]

    def vreg(self, key, kind: str) -> int:
        v = self.vregs.get(key)
        if v is None:
            v = self.vregs[key] = len(self.classes)
            self.classes.append(kind)
        return v

    def temp(self, kind: str) -> int:
        return self.vreg(("temp", len(self.classes)), kind)

    def register(self, text: str) -> int | None:
        found = self.ins.scope.find_reg(text)
        if found is None:
            return None
        scope, kind = found
        cls = CLASS_OF.get(kind)
        if cls is None:
            self.fail(f"register type .{kind}")
        return self.vreg((self.instance, id(scope), text), cls)

    def reg_bits(self, text: str) -> int:
        """Declared width of a destination register."""
        found = self.ins.scope.find_reg(text)
        if found is None:
            return 0
        digits = re.sub(r"x2$", "", found[1])
        return 32 if found[1].endswith("x2") else int(re.sub(r"\D", "", digits) or 1)

    def dst(self, text: str, cls: str) -> int:
        if text == "_":
            return -1
        v = self.register(text)
        if v is None:
            self.fail(f"'{text}' is not a register")
        if self.classes[v] != cls:
            self.fail(f"register '{text}' has the wrong width for this instruction")
        return v

    def src(self, text: str, cls: str, kind: str = "") -> int:
        """A source operand of class "r" (32-bit row) or "d" (64-bit row): register, special register, number, symbol."""
        v = self.register(text)
        if v is not None:
            if self.classes[v] != cls:
                self.fail(f"register '{text}' has the wrong width for this instruction")
            return v
        width = 64 if cls == "d" else 32
        if text[0] == "%":
            return self.special(text[1:], cls)
        if text[0].isdigit() or text[0] in "-+":
            return self.const(self.number(text, kind), width)
        if text == "WARP_SZ":
            return self.const(32, width)
        match = re.match(r"([\w$%]+)\s*([+-]\s*-?\d+)?$", text)
        found = self.symbol(match[1]) if match else None
        if found is None:
            self.fail(f"unknown name '{text}'")
        return self.const(found[1] + (int(match[2].replace(" ", "").replace("+-", "-")) if match[2] else 0), width)

    def number(self, text: str, kind: str = "") -> int:
        try:
            if text[:2] in ("0f", "0F", "0d", "0D"):
                value = int(text[2:], 16)
                if kind == "f64" and text[1] in "fF":
                    value = struct.unpack("<Q", struct.pack("<d", struct.unpack("<f", struct.pack("<I", value))[0]))[0]
                elif kind == "f32" and text[1] in "dD":
                    value = struct.unpack("<I", struct.pack("<f", struct.unpack("<d", struct.pack("<Q", value))[0]))[0]
                return value
            if kind in ("f32", "f64") and not re.fullmatch(r"[+-]?0[xX].*", text):
                code = "<f" if kind == "f32" else "<d"
                return int.from_bytes(struct.pack(code, float(text)), "little")
            value = text.rstrip("U")
            if re.fullmatch(r"[+-]?0[0-7]+", value):  # octal, as in C
                return int(value, 8)
            value = int(value, 0)
        except (ValueError, struct.error):
            return self.fail(f"cannot read the number '{text}'")
        if kind in ("u16", "s16", "b16"):
            value &= 0xFFFF
        return value

    def special(self, name: str, cls: str) -> int:
        name = {"tid": "tid.x", "ctaid": "ctaid.x", "ntid": "ntid.x", "nctaid": "nctaid.x"}.get(name, name)
        if name in ("clock", "clock_hi", "clock64", "globaltimer", "globaltimer_lo"):
            v = self.temp(cls)
            self.emit("CLOCK", [v], defs=(v,), sub=int(name.startswith("globaltimer")), flags=WIDE if cls == "d" else 0)
            return v
        if name in ("gridid", "envreg0") or name.startswith("pm"):
            return self.const(0, 64 if cls == "d" else 32)
        if name not in SPECIALS:
            self.fail(f"special register '%{name}'")
        v = self.specials.get(name)
        if v is None:
            v = self.specials[name] = self.vreg(("special", name), "r")
        if cls == "d":
            wide = self.temp("d")
            self.row("ext.u32.64.32", wide, v)
            return wide
        return v

    def pred_src(self, text: str) -> tuple[int, int]:
        """(operand, PRED_NOT or 0) of a predicate source."""
        negated = text.startswith("!")
        name = text.lstrip("!").strip()
        v = self.register(name)
        if v is None:
            if not re.fullmatch(r"-?\d+|0[xX][0-9a-fA-F]+", name):
                self.fail(f"'{text}' is not a predicate")
            return self.const(0xFFFFFFFF if (int(name, 0) != 0) != negated else 0, 32), 0
        if self.classes[v] != "p":
            self.fail(f"'{name}' is not a predicate")
        return v, PRED_NOT if negated else 0

    def pred_value(self, text: str) -> int:
        """A predicate source with its negation already applied."""
        v, negated = self.pred_src(text)
        if not negated:
            return v
        t = self.temp("p")
        self.emit("PRED", [t, v, v], defs=(t,), uses=(v,), sub=4)
        return t

    def address(self, text: str) -> tuple[int, int, int, str | None]:
        """`[reg+imm]`, `[symbol+imm]`, `[imm]` -> (operand, offset, ADDR64 or 0, the symbol's space if there is one)."""
        inner = text.strip()
        if inner[0] != "[" or inner[-1] != "]":
            self.fail(f"'{text}' is not an address")
        match = re.match(r"\s*([\w$%.]+)\s*((?:[+-]\s*-?\s*(?:0[xX][0-9a-fA-F]+|\d+)\s*)*)$", inner[1:-1])
        if not match:
            self.fail(f"cannot read the address '{text}'")
        base, tail = match[1], match[2].replace(" ", "").replace("+-", "-").replace("--", "+")
        offset = sum(int(part, 0) for part in re.findall(r"[+-](?:0[xX][0-9a-fA-F]+|\d+)", tail))
        v = self.register(base)
        if v is not None:
            if self.classes[v] == "p":
                self.fail(f"'{base}' is not an address")
            return v, offset, ADDR64 if self.classes[v] == "d" else 0, None
        if base[0].isdigit():
            return self.const(int(base, 0), 64), offset, ADDR64, None
        found = self.symbol(base)
        if found is None:
            self.fail(f"unknown name '{base}'")
        return self.const(found[1], 64), offset, ADDR64, found[0]

    def vector(self, text: str) -> list[str]:
        text = text.strip()
        return [p.strip() for p in text[1:-1].split(",")] if text[0] == "{" else [text]

    # ---- emitting

    def emit(self, kind: str, o: list[int], defs=(), uses=(), **more) -> Micro:
        ins = self.ins
        m = Micro(kind, o, tuple(v for v in defs if v >= 0), tuple(v for v in uses if v >= 0), **more)
        m.line, m.loc, m.opcode = ins.line, ins.loc, ins.opcode
        if self.guard is not None:
            m.guard = self.guard[0]
            m.flags |= GUARD_NOT if self.guard[1] else 0
            m.uses += (m.guard,)
        self.code.append(m)
        return m

    def row(self, name: str, d: int, *sources: int) -> None:
        """An arithmetic instruction by its name in alu.cpp."""
        entry = self.rows.get(name)
        if entry is None or entry[1]:
            self.fail(f"unknown instruction form {name}")
        self.emit("ROW", [d, *sources], (d,), sources, fn=entry[0], flags=WIDE if self.classes[d] == "d" else 0)

    def test(self, name: str, p: int, a: int, b: int, q: int = -1, combine: int = 0, c: int = -1, flags: int = 0) -> None:
        entry = self.rows.get(name)
        if entry is None or not entry[1]:
            self.fail(f"unknown comparison {name}")
        self.emit("TEST", [p, a, b, c, q], (p, q), (a, b, c), fn=entry[0], sub=combine, flags=flags)

    # ---- functions

    def run(self) -> Decoded:
        self.function(self.kernel, {})
        self.ins = None
        if not self.code or not self.code[-1].ends:
            self.ins = next(i for i in reversed(self.kernel.body) if isinstance(i, Instr))
            self.guard = None
            self.emit("EXIT", [], ends=True)
        return self.finish()

    def function(self, function: Function, frame: dict) -> None:
        if function.name in self.calling:
            self.fail(f"recursive call of {function.name}")
        self.calling.append(function.name)
        self.frames.append(frame)
        outer, self.instance = self.instance, self.instances
        self.instances += 1
        for item in function.body:
            if isinstance(item, Label):
                self.labels[self.instance, id(item)] = len(self.code)
                continue
            self.ins, self.guard = item, None
            if item.guard:
                v, negated = self.pred_src(item.guard)
                self.guard = (v, bool(negated))
            self.opcode(item)
        self.labels[self.instance, 0] = len(self.code)  # where `ret` goes
        self.instance = outer
        self.frames.pop()
        self.calling.pop()

    def label_of(self, name: str) -> tuple[int, int]:
        label = self.ins.scope.find("labels", name)
        if label is None:
            self.fail(f"unknown label '{name}'")
        return self.instance, id(label)

    def finish(self) -> Decoded:
        for m in self.code:
            m.targets = [self.labels[t] for t in m.targets]
            if m.kind == "BRA":
                m.imm = m.targets[0]
        tables = []
        for m in self.code:
            if m.kind == "BRX":
                m.imm, m.imm2 = len(tables), len(m.targets)
                tables += m.targets
        pinned = set(self.specials.values())
        slots, count = allocate(self.code, set(self.labels.values()), self.classes, pinned)
        pred_bytes = -(-4 * count["p"] // 128) * 128 or 128
        base = {"p": 0, "r": pred_bytes, "d": pred_bytes + 128 * count["r"]}
        size = {"p": 4, "r": 128, "d": 256}
        at = [2 * (base[c] + size[c] * s) for c, s in zip(self.classes, slots, strict=True)]
        code = np.zeros(len(self.code), INS)
        operands = code["o"]
        operands[:] = -1
        for i, m in enumerate(self.code):
            o = [at[x] if x >= 0 else -1 if x == -1 else 2 * (-2 - x) + 1 for x in m.o]
            if m.kind == "ROW":
                o += [1] * (5 - len(o))  # the constant at offset 0
            operands[i, : len(o)] = o
        for name in ("fn", "imm", "imm2", "sub", "flags", "space", "size", "vec", "order", "line"):
            code[name] = [getattr(m, name) for m in self.code]
        code["kind"] = [self.kinds[m.kind] for m in self.code]
        code["guard"] = [-1 if m.guard is None else at[m.guard] if m.guard >= 0 else 2 * (-2 - m.guard) + 1 for m in self.code]
        specials = np.array([(SPECIALS[n], at[v] // 2) for n, v in self.specials.items()], np.uint32).reshape(-1, 2)
        cells = [self.cell.bit_length() - 1, self.global_cell.bit_length() - 1]
        sizes = np.array([base["d"] + 256 * count["d"], pred_bytes, -(-self.local_bytes // 16) * 16, *cells], np.uint32)
        return Decoded(
            self.kernel.name, code, bytes(self.consts), np.array(tables, np.uint32), specials, sizes,
            [(m.line, m.loc, m.opcode) for m in self.code], self.module.files, self.static_end, self.dynamic_at,
            self.param_bytes, self.kernel.maxntid, count["r"], list(self.globals.values()),
        )  # fmt: skip


def decode(module: Module, kernel: str | None = None) -> Decoded:
    """Decode the named kernel, or the only one there is."""
    entries = [f for f in module.functions.values() if f.entry]
    chosen = [f for f in entries if kernel is None or f.name == kernel]
    if len(chosen) != 1:
        listed = ", ".join(f.name for f in entries) or "none"
        raise DecodeError(f"kernel {kernel or '(unnamed)'} is not the one kernel meant; the module has: {listed}")
    return Decoder(module, chosen[0]).run()
