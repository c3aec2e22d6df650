"""Operands of instructions: their types and literals, state spaces, special registers, and the record an opcode emits."""

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

# fmt: off
TYPES = {
    "pred", "b8", "b16", "b32", "b64", "u8", "u16", "u32", "u64", "s8", "s16", "s32", "s64", "f16", "f16x2", "bf16", "bf16x2",
    "f32", "f64", "u16x2", "s16x2",
}
# fmt: on
FLOATS = {"f32": "<f", "f64": "<d"}
# Bits of a record's `flags`, and of its `order` (interp.h's Order).
GUARD_NOT, WIDE, SIGNED, NC, ADDR64, STRONG, PRED_NOT, ASYNC_ALL = 1, 2, 4, 8, 16, 32, 64, 128
UNFENCED, ALIGNED, BY_STATE = NC, ASYNC_ALL, SIGNED  # of Hopper's instructions (interp.h, async.h)
SYNC, ACQUIRE, RELEASE = 1, 2, 4
# State spaces in a record's `space`; 0 is the generic space, which no modifier names.
SPACES = {"global": 1, "const": 1, "shared": 2, "shared::cta": 2, "local": 3, "param": 4, "shared::cluster": 5}
WINDOWS = {
    "shared": 1 << 60,
    "shared::cta": 1 << 60,
    "shared::cluster": 1 << 60,
    "local": 2 << 60,
    "param": 3 << 60,
}  # of generic addresses
SPECIALS = {
    name: i
    for i, name in enumerate(
        "tid.x tid.y tid.z ntid.x ntid.y ntid.z ctaid.x ctaid.y ctaid.z nctaid.x nctaid.y nctaid.z laneid warpid nwarpid smid "
        "nsmid lanemask_eq lanemask_le lanemask_lt lanemask_ge lanemask_gt dynamic_smem_size total_smem_size "
        "clusterid.x clusterid.y clusterid.z nclusterid.x nclusterid.y nclusterid.z cluster_ctaid.x cluster_ctaid.y "
        "cluster_ctaid.z cluster_nctaid.x cluster_nctaid.y cluster_nctaid.z cluster_ctarank cluster_nctarank".split()
    )
}
CLASS_OF = {
    "pred": "p",
    **{f"{c}{n}": "r" for c in "busf" for n in (8, 16, 32)},
    **{f"{c}64": "d" for c in "busf"},
    "f16x2": "r",
    "bf16": "r",
    "bf16x2": "r",
}


@cache
def width(t: str) -> int:
    """Bits of a type."""
    return 32 if t.endswith("x2") else int(re.sub(r"\D", "", t))


def cls(t: str) -> str:
    """The class of registers that hold a type: "d" for 64 bits, else "r"."""
    return "d" if width(t) == 64 else "r"


def literal(text: str, kind: str) -> int:
    """Returns the bits of a number as PTX writes it: 0f and 0d hold the bits of a float or a double, C's notations a value."""
    if text[:2] in ("0f", "0F", "0d", "0D"):
        stored, value = "f32" if text[1] in "fF" else "f64", int(text[2:], 16)
        if kind not in FLOATS or kind == stored:
            return value
        (number,) = struct.unpack(FLOATS[stored], value.to_bytes(struct.calcsize(FLOATS[stored]), "little"))
        return int.from_bytes(struct.pack(FLOATS[kind], number), "little")
    if kind in FLOATS and not re.fullmatch(r"[+-]?0[xX].*", text):
        return int.from_bytes(struct.pack(FLOATS[kind], float(text)), "little")
    text = text.rstrip("U")
    return int(text, 8 if re.fullmatch(r"[+-]?0[0-7]+", text) else 0)  # octal, as in C


class DecodeError(Exception):
    """Raised for an instruction that the emulator does not know; the message names opcode, file and line."""


class Fields(NamedTuple):
    """Fields of a decoded instruction that most leave zero or empty; see Micro. `ends`: the record ends this path, unless it is
    guarded."""

    fn: int = 0
    sub: int = 0
    flags: int = 0
    imm: int = 0
    imm2: int = 0
    space: int = 0
    size: int = 0
    vec: int = 0
    order: int = 0
    labels: Sequence[tuple[int, int]] = ()
    ends: bool = False
    extra: Sequence[int] = ()


class Third(NamedTuple):
    """Predicate c, with which a comparison is combined by operation `combine`; `negated`: PRED_NOT, or 0. -1: none."""

    combine: int = 0
    c: int = -1
    negated: int = 0


@dataclass(slots=True)
class Micro:
    """One record for the interpreter. Operands: a virtual register (>= 0), -1 for none, -2 - offset for a constant row."""

    kind: str
    o: list[int]
    defs: tuple[int, ...]
    uses: tuple[int, ...]
    fn: int
    sub: int
    flags: int
    imm: int
    imm2: int
    space: int
    size: int
    vec: int
    order: int
    guard: int | None
    line: int
    loc: tuple[int, int]
    opcode: str
    labels: Sequence[tuple[int, int]]  # the targets of branches
    ends: bool
    targets: list[int]  # the targets as indices of records, known after decoding
    extra: Sequence[int]  # operands for which a record has no room; `imm` is then their index in the tables
