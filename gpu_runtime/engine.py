"""The engine: one record, one file. The file is data only; reading it runs nothing and takes neither onnx nor planner.

The file is a safetensors file (little-endian u64 header length, JSON header, bytes): `__metadata__` has one key,
`plan`, whose value is canonical JSON (sorted keys, no white space, ASCII); one U8 tensor, `arena`, holds the packed
weights and, if they were asked for, the kernels' machine code. The header is padded with spaces so that the arena
starts at a multiple of 256 bytes. Every byte is protected: the header must be exactly what this module would write for
the plan in it, `plan_sha256` is the sha256 of the plan without that key, each section of the arena has its own sha256,
and the padding between sections is zero.

Hashes tell of damage, not of malice. So a file has no steps: every launch and argument is derived from the layers, and every
place in memory proven, when a plan is sealed and when it is read (runtime.verify). `Engine.checked` says so; only machine code
in the file has to be trusted, by allow_cubins.

The plan is {"format_version", "plan_sha256"} and the fields of an EngineRecord (plan_record.py; docs/engine.md lists them all).
A key that the record has not is refused: another version wrote it.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import NoneType
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, TypeAlias

import numpy as np

from cuda_kernels import files
from cuda_kernels.compile import Counter, source_hash
from cuda_kernels.driver_errors import explained
from gpu_runtime import file_kinds
from gpu_runtime.errors import EngineError, NoEngineError
from gpu_runtime.runtime import bounds
from gpu_runtime.runtime.dataflow import Fault
from gpu_runtime.runtime.fields import ALIGN, padded
from gpu_runtime.runtime.findings import SparsityRecord
from gpu_runtime.runtime.plan_record import FORMAT_VERSION, EngineData, EngineRecord, Section, TensorSpec
from gpu_runtime.text import printable, size_text
from tactics import codec

if TYPE_CHECKING:
    from gpu_runtime.explain.what_if import Answer
    from gpu_runtime.explain.wording import Explanation
    from gpu_runtime.runtime.context import Context

EXPECTED = "an engine: the path of an engine file, its bytes or a file opened for reading bytes"
EngineLike: TypeAlias = "str | os.PathLike[str] | bytes | BinaryIO"
SHOWN = 3  # inputs, and outputs, in an engine's repr
MAX_HEADER_BYTES = 64_000_000
MAX_HEADER_VALUES = 6_000_000  # of its JSON, counted before it is read: each takes some 70 bytes of memory


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Engine(EngineData):
    """What `build` and `load` return: the record, the packed weights and embedded machine code."""

    def __repr__(self) -> str:
        from gpu_runtime.explain.figures import us_text

        r = self.record
        ends = " -> ".join(", ".join(map(str, e[:SHOWN])) + ", ..." * (len(e) > SHOWN) for e in (self.inputs, self.outputs))
        sparsity, launches = r.plan.sparsity, len(r.plan.steps)
        layers = f"{launches} launches, {len(sparsity.picked)} of {len(sparsity.layers)} layers with weights sparse"
        return printable(
            f"Engine({r.model.name!r} for {r.device.title}: {ends}; {layers}, {size_text(self.weights.nbytes)} of weights, "
            f"{us_text(r.plan.solution.total_us, r.timing)} {r.timing.label})"
        )

    def save(self, path: str | os.PathLike[str] | BinaryIO) -> None:
        """Write the engine to a file's path, or to a file opened for writing bytes. EngineError if that fails; nothing is
        overwritten then."""
        if isinstance(path, (str, os.PathLike)):
            return write(self, path)
        if not hasattr(path, "write"):
            raise TypeError(f"expected the path of a file, or a file opened for writing bytes, got {type(path).__name__}")
        path.write(encode(self))

    def layer_info(self) -> dict[str, object]:
        """TensorRT's layer information (its 10.x and 11.x keys side by side), as plain data."""
        from gpu_runtime.explain.layer_info import layer_info

        return layer_info(self.record) | {"LaunchesChecked": self.checked}

    def explain(self, layer: str | Sequence[str] | None = None) -> Explanation:
        """Why that layer runs sparse or dense, or these, or each: `print` shows it as `gpu-runtime explain` does. A name may be
        a pattern, "layer3.*". Raises ValueError for a name that no layer with weights has.

        >>> engine.explain().layers[0].reason
        'dense_faster'
        """
        from gpu_runtime.explain.wording import explanation

        return explanation(self.record, () if layer is None else (layer,) if isinstance(layer, str) else tuple(layer))

    def what_if(self, wishes: Mapping[str, str]) -> Answer:
        """The best plan where a layer has to run "sparse", "dense", or with a format ("hwc8") or two ("chw->hwc8"), beside the
        engine's own: {"conv1": "sparse"}. Raises ValueError for an unknown layer or a wish that no kernel grants."""
        from gpu_runtime.explain.what_if import what_if

        return what_if(self.record, wishes)

    def report(self, path: str | os.PathLike[str], other: Engine | None = None) -> None:
        """Write the plan, or two plans side by side, as one HTML page to that path."""
        from gpu_runtime.report import page

        if not isinstance(other, (Engine, NoneType)):
            raise TypeError(f"other: expected an Engine or None, got {type(other).__name__}")
        files.write(path, page.report(self.record, other.record if other else None))

    @property
    def sparsity(self) -> SparsityRecord:
        """Which layers could run sparse, which do, and why."""
        return self.plan.sparsity

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """What `Context.run` takes: name, shape and NumPy dtype of each.

        >>> {i.name: np.zeros(i.shape, i.dtype) for i in engine.inputs}["x"].shape
        (2, 16, 6, 6)
        """
        return tuple(b.spec for b in self.plan.inputs)

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """What `Context.run` returns."""
        return tuple(b.spec for b in self.plan.outputs)

    def context(
        self,
        *,
        device: str | None = None,
        graph: bool = True,
        nvtx: bool = False,
        poison: bool = False,
        progress: Counter | None = None,
        **options: Any,
    ) -> Context:
        """Something that runs this engine; see Context for the options.

        >>> with engine.context(device="emulator") as ctx:
        ...     ctx.run({"x": x})["y"].dtype
        dtype('float32')
        """
        from gpu_runtime.runtime.context import Context

        with explained():
            return Context(self, device=device, graph=graph, nvtx=nvtx, poison=poison, progress=progress, **options)


def pack(
    arrays: Mapping[str, np.ndarray], kind: Literal["weights", "cubin"] = "weights", first: int = 0
) -> tuple[np.ndarray, tuple[Section, ...]]:
    """Arrays -> (uint8 arena, sections of that kind, the first at `first`); each begins at a multiple of ALIGN bytes."""
    sections, end = [], first
    for name, array in arrays.items():
        sections.append(Section(name, kind, end, array.nbytes))
        end += padded(array.nbytes)
    arena = np.zeros(end - first, np.uint8)
    for s, array in zip(sections, arrays.values(), strict=True):
        arena[s.offset - first : s.end - first] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return arena, tuple(sections)


def seal(record: EngineRecord, arena: np.ndarray) -> EngineRecord:
    """The record with the sha256 of each section. ValueError where sections and arena disagree, or where the record is none
    that reading would accept."""
    if problem := _layout_problem(record.sections, arena.nbytes):
        raise ValueError(f"sections: {problem}")
    record = replace(record, sections=tuple(replace(s, sha256=_sha256(_section(arena, s))) for s in record.sections))
    data = file_data(record)
    if not (problem := _too_large(_header(data, arena.nbytes))):
        try:
            record = _record(json.loads(_canonical(data)))
        except codec.Misfit as e:
            problem = str(e)
    if problem := problem or bounds.fault(record):
        raise ValueError(f"the engine could not be loaded again: in its plan, {problem}")
    try:
        return _derived(record, arena)
    except Fault as e:
        raise ValueError(f"the engine could not be loaded again: in its plan, {e}") from None


def file_data(record: EngineRecord) -> dict[str, Any]:
    """The plan as the file has it."""
    data = {"format_version": FORMAT_VERSION, **codec.to_json(EngineRecord, record)}
    return data | {"plan_sha256": _plan_sha256(data)}


def _record(data: Mapping[str, Any]) -> EngineRecord:
    return codec.from_json(EngineRecord, {k: v for k, v in data.items() if k not in ("format_version", "plan_sha256")})


def is_checkable(record: EngineRecord) -> bool:
    """Whether this gpu_runtime knows what the plan's steps must be; of other kernel sources it does not, nor runs it them."""
    return record.source_hash == source_hash()


def _derived(record: EngineRecord, arena: np.ndarray) -> EngineRecord:
    """The record with its steps, as these kernel sources have them. Raises Fault where something in the plan does not follow
    from its layers; one of other sources, which is shown and never run, then has no steps."""
    from gpu_runtime.runtime import verify  # imports every family of kernels: a caller that reads no plan should not wait

    known = is_checkable(record)
    weight_bytes = next((s.offset for s in record.sections if s.kind == "cubin"), arena.nbytes)
    try:
        return verify.derived(record, arena[:weight_bytes] if known else None)
    except Fault:
        if known:
            raise
        return record


def write(engine: Engine, path: str | os.PathLike[str]) -> None:
    """Put the file in place at `path`, see cuda_kernels.files. Raises EngineError where that cannot be done."""
    data = encode(engine)
    try:
        files.write(path, data)
    except OSError as e:
        raise EngineError(
            f"{path}: the engine could not be written: {e.strerror or e}; nothing was overwritten. "
            "Check that the folder exists, is writable and has space"
        ) from None


def encode(engine: Engine) -> bytes:
    """The bytes of the file: the same for the same engine, in every process."""
    weights = np.ascontiguousarray(engine.weights).reshape(-1).view(np.uint8)
    code = {key: np.frombuffer(engine.cubins[key], np.uint8) for key in sorted(engine.cubins)}
    packed, coded = pack(code, "cubin", weights.nbytes)
    arena = np.concatenate([weights, packed])
    sections = (*(s for s in engine.record.sections if s.kind == "weights"), *coded)
    header = _header(file_data(seal(replace(engine.record, sections=sections), arena)), arena.nbytes)
    if problem := _too_large(header):
        raise EngineError(f"the plan is too large for an engine: {problem}")
    return b"".join([struct.pack("<Q", len(header)), header, arena.data])


def load(source: EngineLike, *, verify: bool = True, allow_cubins: bool = False) -> Engine:
    """Read and check an engine: a file's path, its bytes, or a file opened for reading bytes, from where it stands. Whatever is
    wrong with it is an EngineError that says so.

    `verify=False` skips the arena's hashes (the header is always checked). Machine code inside the file is refused
    unless `allow_cubins`: it runs on the GPU as it is, so its maker must be trusted.
    """
    path = source if isinstance(source, (str, os.PathLike)) else None
    name = "the engine" if path is None else str(path)
    if not name:
        raise EngineError("expected the path of an engine file, got an empty one")
    try:
        if path is not None:
            with files.open_regular(path) as file:
                return _read(file, os.fstat(file.fileno()).st_size, name, verify, allow_cubins)
        data = file_kinds.in_memory(source, EXPECTED)
        if file_kinds.is_onnx(data[: file_kinds.HEAD_BYTES]):
            raise EngineError(f"{name}: not an engine but an ONNX model: gpu_runtime.build(model) builds one")
        return _read(io.BytesIO(data), len(data), name, verify, allow_cubins)
    except FileNotFoundError:
        raise NoEngineError(f"{name}: no such file. Build an engine with: build-engine model.onnx -o {name}", name) from None
    except OSError as e:
        raise EngineError(f"{name}: the engine could not be read: {e.strerror or e}") from None
    except ValueError as e:
        raise e if isinstance(e, EngineError) else EngineError(f"{name!r}: expected the path of an engine file: {e}") from None
    except MemoryError:
        raise EngineError(
            f"{name}: it needs more memory than is available. Free memory, or build it for smaller inputs"
        ) from None


def _read(file: BinaryIO, size: int, name: str, verify: bool, allow_cubins: bool) -> Engine:
    head = file.read(file_kinds.HEAD_BYTES)
    file.seek(0)
    if file_kinds.is_onnx(head):
        raise EngineError(f"{name}: not an engine but an ONNX model: build-engine {name} -o model.engine builds one")
    if other := file_kinds.recognized(head):
        raise EngineError(f"{name}: not an engine: {other}")
    return decode(file, size, name, verify=verify, allow_cubins=allow_cubins)


def decode(file: BinaryIO, size: int, name: str, *, verify: bool = True, allow_cubins: bool = False) -> Engine:
    """`load` for an open file of `size` bytes; `name` stands in the messages."""
    record, arena_bytes = _read_header(file, size, name)
    arena = np.empty(arena_bytes, np.uint8)
    if file.readinto(arena.data) != arena_bytes:  # type: ignore[attr-defined]
        raise EngineError(f"{name}: the file became shorter while it was read. Try again")
    if verify:
        _verify(arena, record.sections, name)
    try:
        record = _derived(record, arena)
    except Fault as e:
        raise _bad(name, f"not a valid engine: in its plan, {e}") from None
    coded = [s for s in record.sections if s.kind == "cubin"]
    if coded and not allow_cubins:
        raise EngineError(
            f"{name}: holds machine code for {len(coded)} kernels, which nothing checks. If you trust its author, "
            "load it with allow_cubins=True; else build the engine without --embed-cubins"
        )
    arena.setflags(write=False)
    weights = arena[: coded[0].offset] if coded else arena
    return Engine(record, weights, {s.name: _section(arena, s).tobytes() for s in coded}, is_checkable(record))


def _read_header(file: BinaryIO, size: int, name: str) -> tuple[EngineRecord, int]:
    """The checked record and the size of the arena, in the order: size, length, JSON, version, data, header, plan."""
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
        intact = header == _header(data, got)
    except (ValueError, RecursionError):
        intact = False
    if not intact:
        raise _bad(name, "damaged: its header does not match its plan")
    if data.get("plan_sha256") != _plan_sha256(data):
        raise _bad(name, "damaged: the sha256 of its plan differs from the stored one")
    try:
        record = _record(data)
    except codec.Misfit as e:
        raise _bad(name, f"not a valid engine: in its plan, {e}") from None
    if problem := _layout_problem(record.sections, got):
        raise _bad(name, f"its list of sections is wrong: {problem}")
    if problem := bounds.fault(record):
        raise _bad(name, f"not a valid engine: in its plan, {problem}")
    return record, got


def _header_bytes(file: BinaryIO, size: int, name: str) -> bytes:
    if not size:
        raise _bad(name, "not an engine: it is empty")
    if size < 8:
        raise _bad(name, f"not an engine: expected at least 8 bytes, got {size}")
    (length,) = struct.unpack("<Q", file.read(8))
    if length > MAX_HEADER_BYTES:
        raise _bad(name, f"not an engine, or damaged: expected a header of at most {MAX_HEADER_BYTES} bytes, got {length}")
    if 8 + length > size:
        raise _bad(name, f"truncated, or not an engine: its header ends at byte {8 + length}, the file at {size}")
    header = file.read(length)
    if problem := _too_large(header):
        raise _bad(name, f"not an engine, or damaged: {problem}")
    return header


def _check_version(version: object, name: str) -> None:
    if type(version) is not int:
        raise _bad(name, f"damaged: expected format_version to be a whole number, got {str(version)[:60]}")
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
    """Whether the file has as many bytes of data as its header says."""
    shape = arena.get("shape") if isinstance(arena, dict) else None
    if not isinstance(shape, list) or len(shape) != 1 or type(shape[0]) is not int:
        raise _bad(name, "damaged: its header has no valid entry for the arena")
    if shape[0] != got:
        what = "truncated" if got < shape[0] else "damaged: it has extra bytes at its end"
        raise _bad(name, f"{what}: expected {shape[0]} bytes of data, got {got}")


def _too_large(header: bytes) -> str | None:
    """A sentence where a header is longer than a plan's, or holds more values, which take much more memory than its text."""
    if len(header) > MAX_HEADER_BYTES:
        return f"expected a header of at most {MAX_HEADER_BYTES} bytes, got {len(header)}"
    values = sum(header.count(mark) for mark in (b",", b"[", b"{"))
    return f"expected a header of at most {MAX_HEADER_VALUES} values, got {values}" if values > MAX_HEADER_VALUES else None


def _verify(arena: np.ndarray, sections: Sequence[Section], name: str) -> None:
    for s in sections:
        if _sha256(_section(arena, s)) != s.sha256:
            raise _bad(name, f"damaged: the sha256 of section '{s.name}' differs from the one in the plan")
        if arena[s.end : s.offset + padded(s.nbytes)].any():
            raise _bad(name, f"damaged: the padding after section '{s.name}' is not zero")


def _bad(name: str, what: str) -> EngineError:
    return EngineError(f"{name}: {what}. Copy the file again, or build the engine again")


def _json(data: bytes, what: str) -> dict[str, Any]:
    try:
        value = json.loads(data.decode("ascii"))
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise EngineError(f"{what} is not a JSON object. Copy the file again, or build the engine again")
    return value


def _layout_problem(sections: Sequence[Section], arena_bytes: int) -> str | None:
    """What is wrong with the sections' names, kinds or places in an arena of that size, or None."""
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


def _section(arena: np.ndarray, section: Section) -> np.ndarray:
    return arena[section.offset : section.end]


def _sha256(data: np.ndarray) -> str:
    return hashlib.sha256(data.data).hexdigest()


def _canonical(data: object) -> str:
    return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _plan_sha256(plan: Mapping[str, Any]) -> str:
    return hashlib.sha256(_canonical({k: v for k, v in plan.items() if k != "plan_sha256"}).encode()).hexdigest()


def _header(plan: Mapping[str, Any], arena_bytes: int) -> bytes:
    arena = {"data_offsets": [0, arena_bytes], "dtype": "U8", "shape": [arena_bytes]}
    header = _canonical({"__metadata__": {"plan": _canonical(plan)}, "arena": arena}).encode()
    return header + b" " * (-(8 + len(header)) % ALIGN)
