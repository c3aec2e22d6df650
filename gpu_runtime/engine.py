"""The engine: one record, one file. The file is data only; reading it runs nothing and takes neither onnx nor planner.

Hashes detect damage, not malice. So a file has no steps: every launch and argument is derived from the layers, and every place
in memory proven, when a plan is sealed and when it is read (runtime.verify). `Engine.checked` says so; only machine code in the
file has to be trusted, by allow_cubins.
"""

from __future__ import annotations

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
from cuda_kernels.driver import explained
from gpu_runtime import engine_header, file_kinds
from gpu_runtime.engine_header import bad, file_data, header_of, layout_problem, record_of, section_of, sha256, too_large
from gpu_runtime.errors import EngineError, NoEngineError
from gpu_runtime.runtime import bounds, sizes
from gpu_runtime.runtime.dataflow import Fault
from gpu_runtime.runtime.fields import TensorSpec, padded
from gpu_runtime.runtime.findings import SparsityRecord
from gpu_runtime.runtime.plan_record import EngineData, EngineRecord, Section
from gpu_runtime.text import printable, size_text
from tactics import codec

if TYPE_CHECKING:
    from gpu_runtime.explain.what_if import Answer
    from gpu_runtime.explain.wording import Explanation
    from gpu_runtime.runtime.context import Context

EXPECTED = "an engine: the path of an engine file, its bytes or a file opened for reading bytes"
EngineLike: TypeAlias = "str | os.PathLike[str] | bytes | BinaryIO"
SHOWN = 3  # inputs, and outputs, in an engine's repr


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Engine(EngineData):
    """An engine, as `build` and `load` return it: the record, the packed weights and embedded machine code."""

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
        """Write the engine to a file's path, or to a file opened for writing bytes. Raises EngineError if that fails; then
        nothing is overwritten.
        """
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
        """Explain why a layer, several or each run sparse or dense; `print` shows it as `gpu-runtime explain` does. A name may
        be a pattern, "layer3.*". Raises ValueError for a name that no layer with weights has.

        >>> engine.explain().layers[0].reason
        'dense_faster'
        """
        from gpu_runtime.explain.wording import explanation

        return explanation(self.record, () if layer is None else (layer,) if isinstance(layer, str) else tuple(layer))

    def what_if(self, wishes: Mapping[str, str]) -> Answer:
        """Return the best plan where a layer must run "sparse", "dense", or with a format ("hwc8") or two ("chw->hwc8"), and
        its difference from the engine's own: {"conv1": "sparse"}. Raises ValueError for an unknown layer or a wish that no
        kernel supports.
        """
        from gpu_runtime.explain.what_if import what_if

        return what_if(self.record, wishes)

    def report(self, path: str | os.PathLike[str], other: Engine | None = None) -> None:
        """Write the plan, or two plans side by side, as one HTML page to that path."""
        from gpu_runtime.report import page

        if not isinstance(other, (Engine, NoneType)):
            raise TypeError(f"other: expected an Engine or None, got {type(other).__name__}")
        files.write_all({path: page.report(self.record, other.record if other else None)})

    @property
    def sparsity(self) -> SparsityRecord:
        """Which layers could run sparse, which do, and why."""
        return self.plan.sparsity

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """The arrays that `Context.run` takes: name, shape and NumPy dtype of each. The first size of an engine of a range is a
        Batch, as 1..64: a number, the optimal one, with attributes `min` and `max`.

        >>> {i.name: np.zeros(i.shape, i.dtype) for i in engine.inputs}["x"].shape
        (2, 16, 6, 6)
        """
        return sizes.specs(self.record, self.plan.inputs)

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """The arrays that `Context.run` returns."""
        return sizes.specs(self.record, self.plan.outputs)

    @property
    def points(self) -> tuple[int, ...]:
        """The batches that have plans of their own, of the profile that is shown; empty for an engine of one size."""
        profile = self.record.profile
        return sizes.batches(self.record, profile) if profile else ()

    def at(self, shapes: int | Mapping[str, Sequence[int]]) -> Engine:
        """Return the same engine, showing the plan that runs inputs of these shapes, or this batch: its layers, times and
        reasons. Raises ValueError where it takes no such inputs.

        >>> engine.at({"x": (2, 16, 6, 6)}).plan is engine.plan
        True
        """
        if isinstance(shapes, int):
            shapes = sizes.whole(self.record, shapes)
        given = {name: tuple(shape) for name, shape in shapes.items()}
        if unknown := set(given) - {i.name for i in self.inputs}:
            raise ValueError(f"shapes: there is no input {min(unknown)!r}, expected {', '.join(i.name for i in self.inputs)}")
        return replace(self, record=replace(self.record, shown=sizes.fit(self.record, given).plan))

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
        """Make a Context, which runs this engine; see Context for the options.

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
    """Packs arrays into (uint8 arena, sections of that kind, the first at `first`); each begins at a multiple of ALIGN
    bytes.
    """
    sections, end = [], first
    for name, array in arrays.items():
        sections.append(Section(name, kind, end, array.nbytes))
        end += padded(array.nbytes)
    arena = np.zeros(end - first, np.uint8)
    for s, array in zip(sections, arrays.values(), strict=True):
        arena[s.offset - first : s.end - first] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    arena.setflags(write=False)  # contexts share it
    return arena, tuple(sections)


def join(
    parts: Sequence[tuple[np.ndarray, tuple[Section, ...]]],
) -> tuple[np.ndarray, tuple[Section, ...], list[dict[str, str]]]:
    """Joins the packed weights of several plans in one arena, equal sections once.

    Returns (arena, sections, for each plan its names of sections -> the names in the arena, where they differ).

    >>> one, two = pack({"a": np.zeros(4)}), pack({"a": np.zeros(4), "b": np.ones(4)})
    >>> [s.name for s in join([one, two])[1]], join([one, pack({"a": np.ones(4)})])[2]
    (['a', 'b'], [{}, {'a': 'a#2'}])
    """
    kept: dict[str, np.ndarray] = {}
    known: dict[str, str] = {}  # sha256 -> the first section of these bytes
    renamed: list[dict[str, str]] = []
    for number, (arena, sections) in enumerate(parts):
        names = {}
        for s in sections:
            data = section_of(arena, s)
            digest = sha256(data)
            name = known.get(digest) if number else None
            if name is None:
                name = s.name if s.name not in kept else next(n for i in range(2, 99) if (n := f"{s.name}#{i}") not in kept)
                kept[name] = data
            known.setdefault(digest, name)
            if name != s.name:
                names[s.name] = name
        renamed.append(names)
    return *pack(kept), renamed


def seal(record: EngineRecord, arena: np.ndarray) -> EngineRecord:
    """Returns the record with the sha256 of each section.

    Raises ValueError where sections and arena disagree, or reading would not accept the record.
    """
    if problem := layout_problem(record.sections, arena.nbytes):
        raise ValueError(f"sections: {problem}")
    record = replace(record, sections=tuple(replace(s, sha256=sha256(section_of(arena, s))) for s in record.sections))
    data = file_data(record)
    if not (problem := too_large(header_of(data, arena.nbytes))):
        try:
            record = record_of(json.loads(engine_header.canonical(data)))
        except codec.Misfit as e:
            problem = str(e)
    if problem := problem or bounds.fault(record):
        raise ValueError(f"the engine could not be loaded again: in its plan, {problem}")
    try:
        return _derived(record, arena)
    except Fault as e:
        raise ValueError(f"the engine could not be loaded again: in its plan, {e}") from None


def is_checkable(record: EngineRecord) -> bool:
    """Whether this gpu_runtime can derive and run the plan's steps: they were planned with the same kernel sources."""
    return record.source_hash == source_hash()


def _derived(record: EngineRecord, arena: np.ndarray) -> EngineRecord:
    """Returns the record with its steps, as these kernel sources have them. Raises Fault where the plan does not follow from
    its layers.

    A record of other sources, which is shown and never run, has no steps.
    """
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
    """Writes the file to `path`, see cuda_kernels.files. Raises EngineError if that fails."""
    data = encode(engine)
    if problem := files.fault(path):
        raise EngineError(f"{os.fspath(path)!s}: the engine could not be written: {problem}; nothing was overwritten")
    try:
        files.write(path, data)
    except OSError as e:
        raise EngineError(
            f"{path}: the engine could not be written: {e.strerror or e}; nothing was overwritten. "
            "Check that the folder exists, is writable and has space"
        ) from None


def encode(engine: Engine) -> bytes:
    """Returns the bytes of the file: the same for the same engine, in every process."""
    weights = np.ascontiguousarray(engine.weights).reshape(-1).view(np.uint8)
    code = {key: np.frombuffer(engine.cubins[key], np.uint8) for key in sorted(engine.cubins)}
    packed, coded = pack(code, "cubin", weights.nbytes)
    arena = np.concatenate([weights, packed])
    sections = (*(s for s in engine.record.sections if s.kind == "weights"), *coded)
    header = header_of(file_data(seal(replace(engine.record, sections=sections), arena)), arena.nbytes)
    if problem := too_large(header):
        raise EngineError(f"the plan is too large for an engine: {problem}")
    return b"".join([struct.pack("<Q", len(header)), header, arena.data])


def load(source: EngineLike, *, verify: bool = True, allow_cubins: bool = False) -> Engine:
    """Read and check an engine: a file's path, its bytes, or a file opened for reading bytes, from its current position. Raises
    EngineError that names any fault.

    `verify=False` skips the arena's hashes (the header is always checked). Machine code inside the file is refused unless
    `allow_cubins`: it runs on the GPU unchanged, so its maker must be trusted.
    """
    path = source if isinstance(source, (str, os.PathLike)) else None
    name = "the engine" if path is None else str(path)
    if not name:
        raise EngineError("expected the path of an engine file, got an empty one")
    try:
        if path is not None:
            with files.open_regular(path) as file:
                return decode(file, os.fstat(file.fileno()).st_size, name, verify=verify, allow_cubins=allow_cubins)
        data = file_kinds.in_memory(source, EXPECTED)
        if file_kinds.is_onnx(data[: file_kinds.HEAD_BYTES]):
            raise EngineError(f"{name}: not an engine but an ONNX model: gpu_runtime.build(model) builds one")
        return decode(io.BytesIO(data), len(data), name, verify=verify, allow_cubins=allow_cubins)
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


def decode(file: BinaryIO, size: int, name: str, *, verify: bool = True, allow_cubins: bool = False) -> Engine:
    """`load` for an open file of `size` bytes; `name` names it in messages."""
    head = file.read(file_kinds.HEAD_BYTES)
    file.seek(0)
    if file_kinds.is_onnx(head):
        raise EngineError(f"{name}: not an engine but an ONNX model: build-engine {name} -o model.engine builds one")
    if other := file_kinds.recognized(head):
        raise EngineError(f"{name}: not an engine: {other}")
    record, arena_bytes = engine_header.read_header(file, size, name)
    arena = np.empty(arena_bytes, np.uint8)
    if file.readinto(arena.data) != arena_bytes:  # type: ignore[attr-defined]
        raise EngineError(f"{name}: the file became shorter while it was read. Try again")
    if verify:
        engine_header.verify_sections(arena, record.sections, name)
    try:
        record = _derived(record, arena)
    except Fault as e:
        raise bad(name, f"not a valid engine: in its plan, {e}") from None
    coded = [s for s in record.sections if s.kind == "cubin"]
    if coded and not allow_cubins:
        raise EngineError(
            f"{name}: holds machine code for {len(coded)} kernels, which nothing checks. If you trust its author, "
            "load it with allow_cubins=True; else build the engine without --embed-cubins"
        )
    arena.setflags(write=False)
    weights = arena[: coded[0].offset] if coded else arena
    return Engine(record, weights, {s.name: section_of(arena, s).tobytes() for s in coded}, is_checkable(record))
