"""Kernels of a few instructions, run by one warp: registers in, registers out, and the PTX between them written by a test."""

import re
import struct

import numpy as np

from cuda_kernels.emulator import Memory, Options, launch, load

# Types of operands: how a test holds them, and how many are in a register.
TYPES = {
    "f16": np.float16,
    "bf16": np.uint16,
    "f32": np.float32,
    "tf32": np.float32,
    "s8": np.int8,
    "u8": np.uint8,
    "s32": np.int32,
}
EACH = {name: 4 // np.dtype(kind).itemsize for name, kind in TYPES.items()} | {"e4m3": 4}
HEAD = ".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry micro(.param .u64 in, .param .u64 out)\n{"


def ptx(body: str, given: int, taken: int, shared: int = 0) -> str:
    """Returns a kernel in which `body` finds %i0, %i1, ... loaded for its lane and leaves %o0, ...; it may use `%lane` and
    `%t*`.
    """
    lines = [HEAD, f".shared .align 16 .b8 tile[{shared}];"] if shared else [HEAD]
    lines += [
        f".reg .b32 %i<{given + 1}>, %o<{taken + 1}>, %t<16>, %lane;",
        ".reg .b64 %in, %out;",
        ".reg .pred %p<4>;",
        "mov.u32 %lane, %laneid;",
        "ld.param.u64 %in, [in];",
        "ld.param.u64 %out, [out];",
        f"mad.wide.u32 %in, %lane, {4 * given}, %in;",
        f"mad.wide.u32 %out, %lane, {4 * taken}, %out;",
    ]
    lines += [f"ld.global.b32 %i{j}, [%in+{4 * j}];" for j in range(given)]
    lines += [body]
    lines += [f"st.global.b32 [%out+{4 * j}], %o{j};" for j in range(taken)]
    return "\n".join([*lines, "ret;", "}"])


def run(text: str, given: np.ndarray, taken: int, options: Options = Options()) -> np.ndarray:  # noqa: B008  (frozen)
    """Runs a kernel on `given` uint32 [32 lanes, registers]; returns uint32 [32, taken]."""
    memory = Memory()
    source = memory.upload(np.ascontiguousarray(given, np.uint32), "given")
    target = memory.alloc(128 * max(1, taken), name="out")
    launch(load(text, "micro"), (1, 1, 1), (32, 1, 1), 0, struct.pack("<QQ", source, target), memory, options=options)
    memory.check_red_zones()
    return memory.read(target, 128 * taken).view(np.uint32).reshape(32, taken)


def group(letter: str, first: int, count: int) -> str:
    """Returns registers as an operand: `{%i4, %i5}`."""
    return "{" + ", ".join(f"%{letter}{j}" for j in range(first, first + count)) + "}"


def words(values: np.ndarray) -> np.ndarray:
    """Converts [32, values] of halves, bfloat16's bits or floats to [32, registers]: a lower index is lower in a register."""
    return np.ascontiguousarray(values).view(np.uint32).reshape(32, -1)


def bfloat16(x: np.ndarray) -> np.ndarray:
    """Returns the bits of the nearest bfloat16, ties to even."""
    u = x.astype(np.float32).view(np.uint32)
    return ((u + 0x7FFF + (u >> 16 & 1)) >> 16).astype(np.uint16)


def opcodes(text: str) -> set[str]:
    """Returns the opcodes of a PTX text, with their modifiers and without guards."""
    body = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.S)
    return set(re.findall(r"(?:^|[;{}:])\s*(?:@!?[%$\w]+\s+)?([a-z][\w]*(?:[.:]+[\w]+)*)(?=[\s;])", body, flags=re.M))


def packed(kind: str, values: np.ndarray) -> np.ndarray:
    """Returns [32, values] as the registers of an operand of that type."""
    return words(bfloat16(values) if kind == "bf16" else values.astype(TYPES[kind]))
