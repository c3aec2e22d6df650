"""Turns parsed PTX into the interpreter's instruction records.

The tables of the opcodes_* files list the opcodes; decoder.py has the functions for them. Calls are inlined (parameters become
local memory), so the interpreter knows no call stack.
"""

import numpy as np

from cuda_kernels.emulator import opcodes, opcodes_async, opcodes_memory, opcodes_move, opcodes_warp
from cuda_kernels.emulator.decoder import Decoder, Opcode
from cuda_kernels.emulator.layout import thread_registers
from cuda_kernels.emulator.operands import SPECIALS, UNFENCED, DecodeError, Fields
from cuda_kernels.emulator.parse import Function, Instr, Module
from cuda_kernels.emulator.programs import INS, Decoded
from cuda_kernels.emulator.registers import allocate, in_flight, unfenced

FIELDS = ("fn", "imm", "imm2", "sub", "flags", "space", "size", "vec", "order", "line")  # copied unchanged from a record
OPCODES: dict[str, Opcode] = (
    opcodes.OPCODES | opcodes_move.OPCODES | opcodes_memory.OPCODES | opcodes_warp.OPCODES | opcodes_async.OPCODES
)


def decode(module: Module, kernel: str | None = None) -> Decoded:
    """Decodes the named kernel, or the only one. Raises DecodeError without exactly one."""
    entries = [f for f in module.functions.values() if f.entry]
    chosen = [f for f in entries if kernel is None or f.name == kernel]
    if len(chosen) != 1:
        listed = ", ".join(f.name for f in entries) or "none"
        raise DecodeError(f"expected one kernel{f' named {kernel}' if kernel else ''}; the module has: {listed}")
    return _arrays(_decoded(module, chosen[0]))


def _decoded(module: Module, kernel: Function) -> Decoder:
    dec = Decoder(module, kernel, OPCODES)
    dec.function(kernel, {})
    if not dec.code or not dec.code[-1].ends:
        dec.ins = next((i for i in reversed(kernel.body) if isinstance(i, Instr)), dec.ins)
        dec.guard = None
        dec.emit("EXIT", [], of=Fields(ends=True))
    return dec


def _branch_tables(dec: Decoder) -> list[int]:
    """Gives branches their target records, and table branches their table's place and length; returns the concatenated
    tables.
    """
    tables: list[int] = []
    for m in dec.code:
        m.targets = [dec.labels[label] for label in m.labels]
        if m.kind == "BRA":
            m.imm = m.targets[0]
        elif m.kind == "BRX":
            m.imm, m.imm2 = len(tables), len(m.targets)
            tables += m.targets
    return tables


def _arrays(dec: Decoder) -> Decoded:
    tables = _branch_tables(dec)
    labels = set(dec.labels.values())
    in_flight(dec.code)
    for i in unfenced(dec.code, labels):
        dec.code[i].flags |= UNFENCED
    slots, count = allocate(dec.code, labels, dec.classes, set(dec.specials.values()))
    pred_bytes = -(-4 * count["p"] // 128) * 128 or 128
    base = {"p": 0, "r": pred_bytes, "d": pred_bytes + 128 * count["r"]}
    size = {"p": 4, "r": 128, "d": 256}
    at = [2 * (base[c] + size[c] * s) for c, s in zip(dec.classes, slots, strict=True)]

    def operand(x: int) -> int:
        """Encodes an operand: twice the byte offset in a warp's registers, or twice the offset in the constants plus one."""
        return at[x] if x >= 0 else -1 if x == -1 else 2 * (-2 - x) + 1

    code = np.zeros(len(dec.code), INS)
    operands = code["o"]
    operands[:] = -1
    for i, m in enumerate(dec.code):
        o = [operand(x) for x in m.o]
        if m.kind == "ROW":
            o += [1] * (5 - len(o))  # the constant at offset 0
        operands[i, : len(o)] = o
        if m.extra:
            m.imm = len(tables)
            tables += map(operand, m.extra)
    for name in FIELDS:
        code[name] = [getattr(m, name) for m in dec.code]
    code["kind"] = [dec.kinds[m.kind] for m in dec.code]
    code["guard"] = [-1 if m.guard is None else operand(m.guard) for m in dec.code]
    specials = np.array([(SPECIALS[n], at[v] // 2) for n, v in dec.specials.items()], np.uint32).reshape(-1, 2)
    cells, registers = [dec.cell.bit_length() - 1, dec.global_cell.bit_length() - 1], thread_registers(dec.kernel)
    sizes = np.array([base["d"] + 256 * count["d"], pred_bytes, -(-dec.local_bytes // 16) * 16, *cells, registers], np.uint32)
    numbers = {opcode: i for i, opcode in enumerate(dict.fromkeys(m.opcode for m in dec.code))}
    places = np.array([(m.line, *m.loc, numbers[m.opcode]) for m in dec.code], np.int32)
    return Decoded(
        dec.kernel.name,
        code,
        np.frombuffer(dec.consts, np.uint8),
        np.array(tables, np.uint32),
        specials,
        sizes,
        places,
        list(numbers),
        {str(number): name for number, name in dec.module.files.items()},
        dec.shared.static_end,
        dec.shared.dynamic_at,
        dec.param_bytes,
        list(dec.kernel.maxntid or ()),
        list(dec.kernel.cluster),
        list(dec.globals.values()),
    )
