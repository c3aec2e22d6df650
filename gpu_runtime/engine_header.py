"""Writes and reads the header of an engine's file, and checks each byte.

The file is a safetensors file (little-endian u64 header length, JSON header, bytes): `__metadata__` has one key, `plan`, whose
value is canonical JSON (sorted keys, no white space, ASCII); one U8 tensor, `arena`, holds the packed weights and, if they were
requested, the kernels' machine code. The header is padded with spaces so that the arena starts at a multiple of 256 bytes.
Every byte is protected: the header must be exactly what this module would write for the plan in it, `plan_sha256` is the sha256
of the plan without that key, each section of the arena has its own sha256, and the padding between sections is zero.

The plan is {"format_version", "plan_sha256"} and the fields of an EngineRecord (plan_record.py; docs/engine.md lists them all).
An unknown key is refused: another version wrote it.
"""

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO

import numpy as np

from gpu_runtime.errors import EngineError
from gpu_runtime.runtime import bounds
from gpu_runtime.runtime.fields import ALIGN, padded
from gpu_runtime.runtime.plan_record import FORMAT_VERSION, EngineRecord, Section
from tactics import codec

MAX_HEADER_BYTES = 64_000_000
MAX_HEADER_VALUES = 6_000_000  # of its JSON, counted before it is read: each takes some 70 bytes of memory


def file_data(record: EngineRecord) -> dict[str, Any]:
    """Returns the plan as the file has it."""
    data = {"format_version": FORMAT_VERSION, **codec.to_json(EngineRecord, record)}
    return data | {"plan_sha256": plan_sha256(data)}


def record_of(data: Mapping[str, Any]) -> EngineRecord:
    return codec.from_json(EngineRecord, {k: v for k, v in data.items() if k not in ("format_version", "plan_sha256")})


def read_header(file: BinaryIO, size: int, name: str) -> tuple[EngineRecord, int]:
    """Reads an engine file's header from its start, checks it, and returns (the engine's record, the bytes of its arena of
    weights).

    `size`: the bytes of the whole file; `name`: the file's name for messages. Raises EngineError for a file that is no
    engine, truncated, damaged, of another format version, or whose record breaks a rule. Checks run in the order: size,
    length, JSON, version, data, header, plan.
    """
    header = _header_bytes(file, size, name)
    head = _json(header, f"{name}: not an engine, or damaged: its header")
    metadata = head.get("__metadata__")
    if not isinstance(metadata, dict) or not isinstance(metadata.get("plan"), str):
        raise EngineError(f"{name}: not an engine: a safetensors file without a plan. Build one with build-engine")
    data = _json(metadata["plan"].encode(errors="replace"), f"{name}: damaged: the plan in its header")
    _check_version(data.get("format_version"), name)
    got = size - 8 - len(header)
    _check_size(head.get("arena"), got, name)
    try:
        intact = header == header_of(data, got)
    except (ValueError, RecursionError):
        intact = False
    if not intact:
        raise bad(name, "damaged: its header does not match its plan")
    if data.get("plan_sha256") != plan_sha256(data):
        raise bad(name, "damaged: the sha256 of its plan differs from the stored one")
    try:
        record = record_of(data)
    except codec.Misfit as e:
        raise bad(name, f"not a valid engine: in its plan, {e}") from None
    if problem := layout_problem(record.sections, got):
        raise bad(name, f"its list of sections is wrong: {problem}")
    if problem := bounds.fault(record):
        raise bad(name, f"not a valid engine: in its plan, {problem}")
    return record, got


def _header_bytes(file: BinaryIO, size: int, name: str) -> bytes:
    if not size:
        raise bad(name, "not an engine: it is empty")
    if size < 8:
        raise bad(name, f"not an engine: expected at least 8 bytes, got {size}")
    began = file.read(8)
    (length,) = struct.unpack("<Q", began)
    if length > MAX_HEADER_BYTES and file.read(1) != b"{":
        raise bad(name, f"not an engine: it begins with the bytes {began.hex(' ')}")
    if length > MAX_HEADER_BYTES:
        raise bad(name, f"not an engine, or damaged: expected a header of at most {MAX_HEADER_BYTES} bytes, got {length}")
    if 8 + length > size:
        raise bad(name, f"truncated, or not an engine: its header ends at byte {8 + length}, the file at {size}")
    header = file.read(length)
    if problem := too_large(header):
        raise bad(name, f"not an engine, or damaged: {problem}")
    return header


def _check_version(version: object, name: str) -> None:
    if type(version) is not int:
        raise bad(name, f"damaged: expected format_version to be a whole number, got {str(version)[:60]}")
    if version > FORMAT_VERSION:
        raise EngineError(
            f"{name}: made by a newer gpu_runtime: format {version}; this one reads {FORMAT_VERSION}. "
            "Update gpu_runtime, or build the engine again with this one"
        )
    if version < FORMAT_VERSION:
        raise EngineError(
            f"{name}: made by an older gpu_runtime: format {version}; this one reads {FORMAT_VERSION}. "
            "Build the engine again with this gpu_runtime"
        )


def _check_size(arena: object, got: int, name: str) -> None:
    """Raises EngineError unless the file has as many bytes of data as its header says."""
    shape = arena.get("shape") if isinstance(arena, dict) else None
    if not isinstance(shape, list) or len(shape) != 1 or type(shape[0]) is not int:
        raise bad(name, "damaged: its header has no valid entry for the arena")
    if shape[0] != got:
        what = "truncated" if got < shape[0] else "damaged: it has extra bytes at its end"
        raise bad(name, f"{what}: expected {shape[0]} bytes of data, got {got}")


def too_large(header: bytes) -> str | None:
    """Returns a sentence if a header is longer than a plan's can be, or holds more values, which take much more memory than its
    text; else None.
    """
    if len(header) > MAX_HEADER_BYTES:
        return f"expected a header of at most {MAX_HEADER_BYTES} bytes, got {len(header)}"
    values = sum(header.count(mark) for mark in (b",", b"[", b"{"))
    return f"expected a header of at most {MAX_HEADER_VALUES} values, got {values}" if values > MAX_HEADER_VALUES else None


def verify_sections(arena: np.ndarray, sections: Sequence[Section], name: str) -> None:
    for s in sections:
        if sha256(section_of(arena, s)) != s.sha256:
            raise bad(name, f"damaged: the sha256 of section '{s.name}' differs from the one in the plan")
        if arena[s.end : s.offset + padded(s.nbytes)].any():
            raise bad(name, f"damaged: the padding after section '{s.name}' is not zero")


def bad(name: str, what: str) -> EngineError:
    return EngineError(f"{name}: {what}. Copy the file again, or build the engine again")


def _json(data: bytes, what: str) -> dict[str, Any]:
    try:
        value = json.loads(data.decode("ascii"))
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise EngineError(f"{what} is not a JSON object. Copy the file again, or build the engine again")
    return value


def layout_problem(sections: Sequence[Section], arena_bytes: int) -> str | None:
    """Returns the fault of the sections' names, kinds or places in an arena of that size, or None."""
    end = 0
    for s in sections:
        if s.offset != end:
            return f"section '{s.name}': expected offset {end}, got {s.offset}"
        end += padded(s.nbytes)
    if len({(s.kind, s.name) for s in sections}) < len(sections):
        return "two sections have the same name"
    kinds = [s.kind for s in sections]
    if kinds != sorted(kinds, reverse=True):
        return "machine code comes before weights"
    if end != arena_bytes:
        return f"the sections end at byte {end}, the arena at {arena_bytes}"
    return None


def section_of(arena: np.ndarray, section: Section) -> np.ndarray:
    return arena[section.offset : section.end]


def sha256(data: np.ndarray) -> str:
    return hashlib.sha256(data.data).hexdigest()


def canonical(data: object) -> str:
    return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)


def plan_sha256(plan: Mapping[str, Any]) -> str:
    return hashlib.sha256(canonical({k: v for k, v in plan.items() if k != "plan_sha256"}).encode()).hexdigest()


def header_of(plan: Mapping[str, Any], arena_bytes: int) -> bytes:
    arena = {"data_offsets": [0, arena_bytes], "dtype": "U8", "shape": [arena_bytes]}
    header = canonical({"__metadata__": {"plan": canonical(plan)}, "arena": arena}).encode()
    return header + b" " * (-(8 + len(header)) % ALIGN)
