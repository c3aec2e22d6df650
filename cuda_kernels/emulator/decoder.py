"""Decodes a kernel: its operands and addresses, the records that opcodes emit, and calls, which are inlined.

Each opcode is a function of a `Decoder` in one of the opcodes_* files. It accepts known modifiers and fails on every other, so
unknown code never runs.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import NamedTuple, NoReturn

import numpy as np

from cuda_kernels.emulator.build import names
from cuda_kernels.emulator.layout import parameter_layout, shared_layout
from cuda_kernels.emulator.operands import (
    ADDR64,
    CLASS_OF,
    GUARD_NOT,
    PRED_NOT,
    SPECIALS,
    TYPES,
    WIDE,
    DecodeError,
    Fields,
    Micro,
    Third,
    cls,
    literal,
    width,
)
from cuda_kernels.emulator.parse import Function, Instr, Label, Module, Var


class Address(NamedTuple):
    """An instruction's address: a register or constant, and an offset in bytes. `space` is "" where only the address decides
    it.
    """

    space: str
    operand: int
    offset: int
    wide: int  # ADDR64 or 0


class Decoder:
    """The state of decoding one kernel of a module, and the functions for opcodes."""

    def __init__(self, module: Module, kernel: Function, opcodes: Mapping[str, Opcode]) -> None:
        self.module, self.kernel, self.opcodes = module, kernel, opcodes
        self.kinds, self.rows = names()
        self.code: list[Micro] = []
        self.labels: dict[tuple[int, int], int] = {}
        self.vregs: dict[object, int] = {}
        self.classes: list[str] = []
        self.consts = bytearray()
        self.const_at: dict[tuple[int, int], int] = {}
        self.specials: dict[str, int] = {}
        self.instance, self.instances = 0, 1
        self.frames: list[dict[str, tuple[str, int]]] = []
        self.calling: list[str] = []
        self.shared = shared_layout(module, kernel)
        self.params, self.param_bytes = parameter_layout(kernel)
        self.locals: dict[tuple[int, int], int] = {}
        self.local_bytes = 0
        self.globals: dict[int, tuple[str, np.ndarray]] = {}
        self.cell, self.global_cell = 4, 16  # smallest accesses to shared and to global memory
        self.ins = Instr("", [], "", kernel.line, (0, 0), kernel.scope)
        self.guard: tuple[int, bool] | None = None
        self.const(0, 64)  # the operand of instructions that have fewer than four

    def fail(self, why: str) -> NoReturn:
        ins = self.ins
        if not ins.opcode:
            raise DecodeError(f"kernel {self.kernel.name}: {why}")
        file = self.module.files.get(ins.loc[0], "?")
        raise DecodeError(
            f"kernel {self.kernel.name}: {why}: '{ins.opcode} {', '.join(ins.operands)}' "
            f"({file}:{ins.loc[1]}, PTX line {ins.line})"
        )

    # ---- variables

    def local_slot(self, key: tuple[int, int], var: Var) -> int:
        if key not in self.locals:
            align = max(var.align, 1)
            self.local_bytes = -(-self.local_bytes // align) * align
            self.locals[key] = self.local_bytes
            self.local_bytes += var.size
        return self.locals[key]

    def symbol(self, name: str) -> tuple[str, int] | None:
        """Returns (space, address) of a variable; None for an unknown name."""
        if self.frames and name in self.frames[-1]:
            return self.frames[-1][name]
        if len(self.frames) <= 1 and name in self.params:
            return "param", self.params[name]
        var = self.ins.scope.find_var(name)
        if var is None:
            return None
        if var.space == "shared":
            return "shared", self.shared.addresses[id(var)]
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
        """Returns the operand of a row of 32 equal values in the constant area; predicates are 32-bit masks."""
        value &= (1 << width) - 1
        key = (width, value)
        if key not in self.const_at:
            self.const_at[key] = len(self.consts)
            self.consts += struct.pack("<I" if width == 32 else "<Q", value) * 32
        return -2 - self.const_at[key]

    def vreg(self, key: object, kind: str) -> int:
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
        if kind not in CLASS_OF:
            self.fail(f"register type .{kind}")
        return self.vreg((self.instance, id(scope), text), CLASS_OF[kind])

    def reg_bits(self, text: str) -> int:
        """Returns the declared width of a destination register in bits; 0 for an unknown one."""
        found = self.ins.scope.find_reg(text)
        if found is None:
            return 0
        digits = re.sub(r"x2$", "", found[1])
        return 32 if found[1].endswith("x2") else int(re.sub(r"\D", "", digits) or 1)

    def dst(self, text: str, c: str) -> int:
        if text == "_":
            return -1
        v = self.register(text)
        if v is None:
            self.fail(f"'{text}' is not a register")
        if self.classes[v] != c:
            self.fail(f"register '{text}' has the wrong width for this instruction")
        return v

    def src(self, text: str, c: str, kind: str = "") -> int:
        """Returns a source operand of class "r" (32-bit row) or "d" (64-bit row): register, special register, number,
        symbol.
        """
        v = self.register(text)
        if v is not None:
            if self.classes[v] != c:
                self.fail(f"register '{text}' has the wrong width for this instruction")
            return v
        bits = 64 if c == "d" else 32
        if text[0] == "%":
            return self.special(text[1:], c)
        if text[0].isdigit() or text[0] in "-+":
            return self.const(self.number(text, kind), bits)
        if text == "WARP_SZ":
            return self.const(32, bits)
        match = re.fullmatch(r"([\w$%]+)\s*([+-]\s*-?\d+)?", text)
        found = self.symbol(match[1]) if match else None
        if match is None or found is None:
            self.fail(f"unknown name '{text}'")
        return self.const(found[1] + int((match[2] or "0").replace(" ", "").replace("+-", "-")), bits)

    def number(self, text: str, kind: str = "") -> int:
        """Returns the bits of a literal of type `kind`."""
        try:
            value = literal(text, kind)
        except (ValueError, OverflowError, struct.error):
            self.fail(f"cannot read the number '{text}'")
        return value & 0xFFFF if kind in ("u16", "s16", "b16") else value

    def const_value(self, operand: int) -> int:
        at = -2 - operand
        return int.from_bytes(self.consts[at : at + 8], "little")

    def is_wide(self, text: str, t: str) -> bool:
        """Whether an operand of type t is a 64-bit row."""
        v = self.register(text)
        return self.classes[v] == "d" if v is not None else width(t) == 64

    def special(self, name: str, c: str) -> int:
        name = {"tid": "tid.x", "ctaid": "ctaid.x", "ntid": "ntid.x", "nctaid": "nctaid.x"}.get(name, name)
        if name in ("clock", "clock_hi", "clock64", "globaltimer", "globaltimer_lo"):
            v = self.temp(c)
            self.emit("CLOCK", [v], (v,), of=Fields(sub=int(name.startswith("globaltimer")), flags=WIDE if c == "d" else 0))
            return v
        if name in ("gridid", "envreg0") or name.startswith("pm"):
            return self.const(0, 64 if c == "d" else 32)
        if name not in SPECIALS:
            self.fail(f"special register '%{name}'")
        v = self.specials[name] = self.vreg(("special", name), "r")
        if c == "d":
            wide = self.temp("d")
            self.row("ext.u32.64.32", wide, v)
            return wide
        return v

    def pred_src(self, text: str) -> tuple[int, int]:
        """Returns (operand, PRED_NOT or 0) of a predicate source."""
        negated = text.startswith("!")
        name = text.lstrip("!").strip()
        if name == "%is_explicit_cluster":
            name = str(int(self.kernel.explicit_cluster))
        v = self.register(name)
        if v is None:
            if not re.fullmatch(r"-?\d+|0[xX][0-9a-fA-F]+", name):
                self.fail(f"'{text}' is not a predicate")
            return self.const(0xFFFFFFFF if (int(name, 0) != 0) != negated else 0, 32), 0
        if self.classes[v] != "p":
            self.fail(f"'{name}' is not a predicate")
        return v, PRED_NOT if negated else 0

    def pred_value(self, text: str) -> int:
        """Returns a predicate source with its negation already applied."""
        v, negated = self.pred_src(text)
        if not negated:
            return v
        t = self.temp("p")
        self.emit("PRED", [t, v, v], (t,), (v,), Fields(sub=4))
        return t

    def address(self, text: str) -> Address:
        """Parses `[reg+imm]`, `[symbol+imm]`, `[imm]`; of a symbol, the space is known."""
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
            return Address("", v, offset, ADDR64 if self.classes[v] == "d" else 0)
        if base[0].isdigit():
            return Address("", self.const(int(base, 0), 64), offset, ADDR64)
        found = self.symbol(base)
        if found is None:
            self.fail(f"unknown name '{base}'")
        return Address(found[0], self.const(found[1], 64), offset, ADDR64)

    def vector(self, text: str) -> list[str]:
        text = text.strip()
        return [p.strip() for p in text[1:-1].split(",")] if text[0] == "{" else [text]

    # ---- emitting

    def emit(
        self,
        kind: str,
        o: list[int],
        defs: Iterable[int] = (),
        uses: Iterable[int] = (),
        of: Fields = Fields(),  # noqa: B008  (immutable)
    ) -> None:
        """Appends a record."""
        ins, guard, flags = self.ins, None, of.flags
        written, read = tuple(v for v in defs if v >= 0), tuple(v for v in uses if v >= 0)
        if self.guard is not None:
            guard, negated = self.guard
            flags |= GUARD_NOT if negated else 0
            read += (guard,)
        self.code.append(
            Micro(
                kind,
                o,
                written,
                read,
                *of._replace(flags=flags)[:9],  # as far as they stand in Micro in this order
                guard,
                ins.line,
                ins.loc,
                ins.opcode,
                of.labels,
                of.ends and guard is None,
                [],
                of.extra,
            )
        )

    def row(self, name: str, d: int, *sources: int) -> None:
        """Emits an arithmetic instruction by its name in alu.cpp: d = name(sources)."""
        entry = self.rows.get(name)
        if entry is None or entry[1]:
            self.fail(f"unknown instruction form {name}")
        self.emit("ROW", [d, *sources], (d,), sources, Fields(fn=entry[0], flags=WIDE if self.classes[d] == "d" else 0))

    def test(self, name: str, p: int, a: int, b: int, q: int = -1, third: Third = Third()) -> None:  # noqa: B008  (immutable)
        """A comparison of a with b by its name in alu.cpp, into p; q gets the opposite."""
        entry = self.rows.get(name)
        if entry is None or not entry[1]:
            self.fail(f"unknown comparison {name}")
        self.emit(
            "TEST", [p, a, b, third.c, q], (p, q), (a, b, third.c), Fields(fn=entry[0], sub=third.combine, flags=third.negated)
        )

    def plain(self, name: str, t: str, ops: list[str], classes: Sequence[str] = ()) -> None:
        """Emits the instruction `name` with operands d, a, b, ..., all of type t unless `classes` says otherwise."""
        classes = classes or [cls(t)] * len(ops)
        sources = [self.src(o, c, t) for o, c in zip(ops[1:], classes[1:], strict=True)]
        self.row(name, self.dst(ops[0], classes[0]), *sources)

    # ---- modifiers and operand counts

    def split(self, mods: list[str], allowed: Container[str]) -> tuple[set[str], list[str]]:
        """Splits modifiers into (modifiers, types); a modifier not in `allowed` is an error."""
        flags, types = set(), []
        for m in mods:
            if m in TYPES and m not in allowed:
                types.append(m)
            elif m in allowed:
                flags.add(m)
            else:
                self.fail(f"unknown modifier '.{m}'")
        return flags, types

    def typed(self, mods: list[str], allowed: Container[str] = ()) -> tuple[set[str], str]:
        """Splits modifiers into (modifiers, the one type)."""
        flags, types = self.split(mods, allowed)
        if len(types) != 1:
            self.fail(f"{len(types)} types, expected one")
        return flags, types[0]

    def typed2(self, mods: list[str], allowed: Container[str] = ()) -> tuple[set[str], str, str]:
        """Splits modifiers into (modifiers, the two types)."""
        flags, types = self.split(mods, allowed)
        if len(types) != 2:
            self.fail(f"{len(types)} types, expected two")
        return flags, types[0], types[1]

    def count(self, ops: list[str], *numbers: int) -> None:
        if len(ops) not in numbers:
            self.fail(f"{len(ops)} operands")

    # ---- functions

    def function(self, function: Function, frame: dict[str, tuple[str, int]]) -> None:
        """Decodes a function's body in place; `frame`: the places of a call's parameters."""
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
        label = self.ins.scope.find_label(name)
        if label is None:
            self.fail(f"unknown label '{name}'")
        return self.instance, id(label)

    def opcode(self, ins: Instr) -> None:
        stem, *mods = ins.opcode.split(".")
        meaning = self.opcodes.get(stem)
        if meaning is None:
            self.fail(f"unknown opcode '{ins.opcode}'")
        meaning(self, mods, ins.operands)


Opcode = Callable[[Decoder, list[str], list[str]], None]
