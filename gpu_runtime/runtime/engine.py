"""The engine: one record, one file. The file is data only; reading it runs nothing and takes neither onnx nor planner.

The file is a safetensors file (little-endian u64 header length, JSON header, bytes): `__metadata__` has one key,
`plan`, whose value is canonical JSON (sorted keys, no white space, ASCII); one U8 tensor, `arena`, holds the packed
weights and, if they were asked for, the kernels' machine code. The header is padded with spaces so that the arena
starts at a multiple of 256 bytes. Every byte is protected: the header must be exactly what this module would write for
the plan in it, `plan_sha256` is the sha256 of the plan without that key, each section of the arena has its own sha256,
and the padding between sections is zero.

Hashes tell of damage, not of malice. So a plan is also held to what follows from its layers (runtime.verify): every step,
argument and place in memory is derived again where it is read, and the same when it is sealed. `Engine.checked` says so; only
machine code in the file has to be trusted, by allow_cubins.

The plan (shape4: NCHW as the kernels see it; formats as `fp16:hwc8`; times in microseconds; sizes and offsets in bytes;
`x|null`: null where it does not apply; keys that a reader does not know are ignored):

    format_version, min_reader      what wrote the file; the oldest reader that understands it
    plan_sha256                     filled in by seal()
    producer    {version, nvrtc}
    model       {name, sha256}
    device      {name, title, sm, num_sms, clock_mhz, ...}
    timing      {kind: "predicted"|"measured", label: "predicted(h200)"|"measured(NVIDIA H200)", ...}
    source_hash                     of all kernel sources (cuda_kernels.compile.source_hash)
    flags       {sparsity, ...}     what the build was asked for
    range       {source, high: [[tensor, largest magnitude|null]], exponents: {tensor: e}, single: [[tensor, sentence]],
                  stuck: [[tensor, why]], compared: {skipped: why} or {layers, worst: [tensor, error|null, error of rounding
                  it once], outputs: [the same], far: [tensors], rounds, moved: [tensors]}}: what FP16 cannot hold, stored
                  times 2^e or in FP32 (precision.ranges); how the plan did on a calibration input beside FP32, in relative L2
                  norms (null: infinite or NaN), and what then became FP32 (gpu_runtime.deviations); {} without one
    inputs, outputs  [{name, shape, dtype, format, shape4, offset, nbytes}]    offset: in the activation arena
    layers      in execution order, free NoOps included:
                [{name, type, layer: str|null, nodes: [ONNX names], problem: {type, ...}|null, params,
                  inputs, outputs: [{name, shape4, format, offset, inside}], tactic, time_us, sparse,
                  has_sparse_weights, weights_count, bias_count}]
                inside: {shape4, format, offset, channel} of the tensor in whose memory this one lies (absent: its own)
                type: conv, pool, pointwise, move, concat, reduce, normalize, library, reformat, noop
                problem: fields of the record in tactics (tactics.problems.codec); null: only another name for a tensor
                layer: the name that sparsity rows use, if it is another than `name`
                params: conv {kernel, stride, pad (top, left, bottom, right), dilation, k, groups, act, bias, residual};
                        pool {kind, kernel, stride, pad, count_pad, ceil}; pointwise {stages, tensors}; move {kind};
                        library {function, attributes}
    steps       [{kernel, values, grid, block, smem, args: [[kind, value]], covers: [layer indices]}]
                kind: arena (offset), weights (offset), i32, i64, f32
                or {function, attributes, part, args: [[kind, offset, dtype, shape]|null], covers}: a library function, its
                inputs and then its output
    sparsity    {mode, eligible: [names], picked: [names], pruned: [initializers], pruned_energy: the share of their squares
                  that went, not_pruned: [[initializer, why]] (these three with --sparsity=force),
                  summary: {layers, eligible, picked, total_us, all_dense_us, saved_us, ceiling_us},
                  rows: [{layer, layers: [each of merged siblings], op, verdict: "sparse"|"dense"|"not_eligible", reason,
                  detail|null, sentence|null,
                  c, k, groups, kernel, pattern_groups|null, pattern_share|null, first_violation: [k, c, r, s]|null,
                  stored_share|null, lost_energy|null (both of the weights as the file has them),
                  best_dense, best_sparse: {tactic, in, out, us, low_us, high_us, bound}|null,
                  us (in the plan),
                  if_sparse: {as best_sparse, and dense_us, all predicted}|null (weights that lack the pattern),
                  other: {total_us, cost_us = kernel_us + reformat_us + around_us, reformats, tactic, in, out, us,
                  kernels}|null,
                  other_cost_us|null, flip_speedup|null, p_sparse_faster|null,
                  floor: {mma_us, dram_us, l2_us, launch_us, bound, dense_us, sparse_us}|null (runs in FP32)}]}
                  (gpu_runtime.explain.reasons says what each means)
    plan        {total_us, status ("proven" or not), method, width, gap, rivals: {all_dense_us, best_single_format:
                  {format, us}, greedy_us}, measured_us (end to end, where it was)}
    choices     what the plan was chosen from, for gpu_runtime.explain.what_if: {tensors: [{name, shape4, keys, reformat_ps:
                  [from][to] or null}], tactics: [names], choices: [{op, layer, layers, in: [tensor], out: tensor,
                  when: [[group, option]], entries: [[tactic, key of each input, key of the output, picoseconds]]}],
                  groups: [[name, options]], pinned: {tensor: key}, inputs, outputs}; a key names a memory layout, and
                  after "@" a place in another tensor
    memory      {activation_bytes, largest_live_bytes, weight_bytes, workspace: [offset, nbytes]|null, zeros: [[offset,
                  nbytes]] to clear before the first run,
                  frees: [[step, [[offset, nbytes]]]] what nothing reads after that step}
    sections    [{name, kind: "weights"|"cubin", offset, nbytes, sha256}] each at the next multiple of 256 bytes
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import BinaryIO

import numpy as np

from cuda_kernels import files
from cuda_kernels.compile import source_hash
from gpu_runtime.errors import EngineError
from gpu_runtime.runtime import schema, verify

FORMAT_VERSION = 2
MIN_READER = 2
ALIGN = 256
MAX_HEADER_BYTES = 64_000_000
MAX_HEADER_VALUES = 6_000_000  # of its JSON, counted before it is read: each takes some 70 bytes of memory


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Engine:
    """A plan (plain JSON data, see the module), the packed weights (uint8) and, where embedded, kernel key -> cubin.

    `checked`: the plan's every step follows from its layers, as gpu_runtime.runtime.verify found when it was built or read.
    """

    plan: Mapping
    weights: np.ndarray
    cubins: Mapping[str, bytes] = field(default_factory=dict)
    checked: bool = False

    def __repr__(self) -> str:
        p = self.plan
        return (
            f"Engine({p['model']['name']!r} for {p['device']['title']}, {len(p['layers'])} layers, "
            f"{p['plan']['total_us']:.1f} us {p['timing']['label']})"
        )

    def save(self, path: str | os.PathLike) -> None:
        """Write the engine file; EngineError if that fails, and then nothing is overwritten."""
        write(self, path)

    def layer_info(self) -> dict:
        """TensorRT's layer information (its 10.x and 11.x keys side by side), as plain data."""
        from gpu_runtime.explain.layer_info import layer_info

        return layer_info(self.plan) | {"LaunchesChecked": self.checked}

    @property
    def sparsity(self) -> Mapping:
        """Which layers could run sparse, which do, and why: {mode, eligible, picked, rows}."""
        return self.plan["sparsity"]

    @property
    def inputs(self) -> list[Mapping]:
        return self.plan["inputs"]

    @property
    def outputs(self) -> list[Mapping]:
        return self.plan["outputs"]

    def context(self, **options):
        """Something that runs this engine; see gpu_runtime.runtime.context.Context for the options."""
        from gpu_runtime.runtime.context import Context

        return Context(self, **options)


def pack(arrays: Mapping[str, np.ndarray]) -> tuple[np.ndarray, list[dict]]:
    """Arrays -> (uint8 arena, section rows {name, kind, offset, nbytes}); every section starts 256-byte aligned."""
    rows, end = [], 0
    for name, array in arrays.items():
        rows.append({"name": name, "kind": "weights", "offset": end, "nbytes": array.nbytes})
        end += _padded(array.nbytes)
    arena = np.zeros(end, np.uint8)
    for row, array in zip(rows, arrays.values(), strict=True):
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        arena[row["offset"] : row["offset"] + row["nbytes"]] = flat
    return arena, rows


def seal(plan: Mapping, arena: np.ndarray) -> dict:
    """The plan with versions, the sha256 of each section, and its own. ValueError where sections and arena disagree, or where
    the plan is none that reading would accept."""
    problem = _layout_problem(plan["sections"], arena.nbytes)
    if problem:
        raise ValueError(f"sections: {problem}")
    plan = {k: v for k, v in plan.items() if k != "plan_sha256"}
    plan |= {"format_version": FORMAT_VERSION, "min_reader": MIN_READER}
    plan["sections"] = [s | {"sha256": _sha256(_section(arena, s))} for s in plan["sections"]]
    plan = json.loads(_canonical(plan))
    plan["plan_sha256"] = _plan_sha256(plan)
    problem = _too_large(_header(plan, arena.nbytes)) or _fault(plan, arena)
    if problem:
        raise ValueError(f"the engine could not be loaded again: in its plan, {problem}")
    return plan


def is_checkable(plan: Mapping) -> bool:
    """Whether this gpu_runtime knows what the plan's steps must be; of other kernel sources it does not, nor runs it them."""
    return plan["source_hash"] == source_hash()


def check(plan: Mapping, weights: np.ndarray) -> None:
    """EngineError where a step or place of the plan does not follow from its layers."""
    if problem := verify.fault(plan, weights):
        raise EngineError(f"the engine's plan is not one that this gpu_runtime makes: {problem}. Build the engine again")


def _fault(plan: Mapping, arena: np.ndarray) -> str | None:
    """What keeps a plan from being read, or None."""
    problem = schema.fault(plan, _weight_bytes(plan["sections"], arena.nbytes))
    return problem or (_not_derived(plan, arena) if is_checkable(plan) else None)


def _not_derived(plan: Mapping, arena: np.ndarray) -> str | None:
    """What in a plan does not follow from its layers, or None."""
    return verify.fault(plan, arena[: _weight_bytes(plan["sections"], arena.nbytes)])


def write(engine: Engine, path: str | os.PathLike) -> None:
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
    rows = [s for s in engine.plan["sections"] if s["kind"] == "weights"]
    code, more = pack({key: np.frombuffer(engine.cubins[key], np.uint8) for key in sorted(engine.cubins)})
    rows += [row | {"kind": "cubin", "offset": weights.nbytes + row["offset"]} for row in more]
    arena = np.concatenate([weights, code])
    plan = seal(dict(engine.plan) | {"sections": rows}, arena)
    header = _header(plan, arena.nbytes)
    if problem := _too_large(header):
        raise EngineError(f"the plan is too large for an engine: {problem}")
    return b"".join([struct.pack("<Q", len(header)), header, arena.data])


def read(path: str | os.PathLike, *, verify: bool = True, allow_cubins: bool = False) -> Engine:
    """Read and check an engine file; whatever is wrong with it is an EngineError that says so.

    `verify=False` skips the arena's hashes (the header is always checked). Machine code inside the file is refused
    unless `allow_cubins`: it runs on the GPU as it is, so its maker must be trusted.
    """
    try:
        with files.open_regular(path) as file:
            return decode(file, os.fstat(file.fileno()).st_size, str(path), verify=verify, allow_cubins=allow_cubins)
    except FileNotFoundError:
        raise EngineError(f"{path}: no such file. Build an engine with: build-engine model.onnx -o {path}") from None
    except OSError as e:
        raise EngineError(f"{path}: the engine could not be read: {e.strerror or e}") from None
    except (TypeError, ValueError) as e:
        raise e if isinstance(e, EngineError) else EngineError(f"{path!r}: expected the path of an engine file: {e}") from None
    except MemoryError:
        raise EngineError(f"{path}: it takes more memory than there is. Free memory, or build it for smaller inputs") from None


def decode(file: BinaryIO, size: int, name: str, *, verify: bool = True, allow_cubins: bool = False) -> Engine:
    """`read` for an open file of `size` bytes; `name` stands in the messages."""
    plan, arena_bytes = _read_header(file, size, name)
    arena = np.empty(arena_bytes, np.uint8)
    if file.readinto(memoryview(arena)) != arena_bytes:
        raise EngineError(f"{name}: the file became shorter while it was read. Try again")
    sections = plan["sections"]
    if verify:
        _verify(arena, sections, name)
    checked = is_checkable(plan)
    if checked and (problem := _not_derived(plan, arena)):
        raise _bad(name, f"not an engine that this gpu_runtime makes: in its plan, {problem}")
    coded = [s for s in sections if s["kind"] == "cubin"]
    if coded and not allow_cubins:
        raise EngineError(
            f"{name}: holds machine code for {len(coded)} kernels, which would run as it is. If you trust its maker, "
            "load it with allow_cubins=True; else build the engine without --embed-cubins"
        )
    arena.setflags(write=False)
    weights = arena[: coded[0]["offset"]] if coded else arena
    return Engine(plan, weights, {s["name"]: _section(arena, s).tobytes() for s in coded}, checked)


def check_device(plan: Mapping, device_sm: str) -> None:
    """EngineError unless the plan was made for this architecture, such as "sm_90a"."""
    device = plan["device"]
    if device["sm"].rstrip("af") != device_sm.rstrip("af"):
        raise EngineError(
            f"the engine was built for {device['title']} ({device['sm']}); this device is {device_sm}. "
            "Build the engine again for this device"
        )


def check_source(plan: Mapping, source_hash: str) -> None:
    """EngineError unless the kernels' sources are those the plan was made with."""
    if plan["source_hash"] != source_hash:
        raise EngineError(
            f"the engine was built with other kernel sources: hash {plan['source_hash'][:12]}, "
            f"here {source_hash[:12]}. Build the engine again with this gpu_runtime"
        )


def _read_header(file: BinaryIO, size: int, name: str) -> tuple[dict, int]:
    """The checked plan and the size of the arena, in the order: size, length, JSON, version, data, header, plan."""
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
    head = _json(header, f"{name}: not an engine, or damaged: its header")
    metadata = head.get("__metadata__")
    if not isinstance(metadata, dict) or not isinstance(metadata.get("plan"), str):
        raise EngineError(f"{name}: not an engine: a safetensors file without a plan. Build one with build-engine")
    plan = _json(metadata["plan"].encode(errors="replace"), f"{name}: damaged: the plan in its header")
    versions = plan.get("format_version"), plan.get("min_reader")
    if any(type(v) is not int for v in versions):
        raise _bad(name, f"damaged: expected format_version and min_reader to be integers, got {versions}")
    if versions[1] > FORMAT_VERSION:
        raise EngineError(
            f"{name}: made by a newer gpu_runtime: format {versions[0]}, which takes a reader of format {versions[1]}; "
            f"this one reads up to {FORMAT_VERSION}. Update gpu_runtime, or build the engine again with this one"
        )
    if versions[0] < FORMAT_VERSION:
        raise EngineError(
            f"{name}: made by an older gpu_runtime: format {versions[0]}, which says less than this one needs to check it "
            f"(format {FORMAT_VERSION}). Build the engine again with this gpu_runtime"
        )
    arena = head.get("arena")
    shape = arena.get("shape") if isinstance(arena, dict) else None
    got = size - 8 - length
    if not isinstance(shape, list) or len(shape) != 1 or type(shape[0]) is not int:
        raise _bad(name, "damaged: its header does not describe an arena")
    if shape[0] != got:
        what = "truncated" if got < shape[0] else "damaged: it goes on after its end"
        raise _bad(name, f"{what}: expected {shape[0]} bytes of data, got {got}")
    try:
        intact = header == _header(plan, got)
    except (ValueError, RecursionError):
        intact = False
    if not intact:
        raise _bad(name, "damaged: its header is not the one that belongs to its plan")
    if plan.get("plan_sha256") != _plan_sha256(plan):
        raise _bad(name, "damaged: its plan does not have the sha256 that it states")
    sections = plan.get("sections")
    problem = _layout_problem(sections, got) if isinstance(sections, list) else "there is none"
    if problem:
        raise _bad(name, f"its list of sections is wrong: {problem}")
    problem = schema.fault(plan, _weight_bytes(sections, got))
    if problem:
        raise _bad(name, f"not an engine of this kind: in its plan, {problem}")
    return plan, got


def _weight_bytes(sections: list[Mapping], arena_bytes: int) -> int:
    return next((s["offset"] for s in sections if s["kind"] == "cubin"), arena_bytes)


def _too_large(header: bytes) -> str | None:
    """A sentence where a header is longer than a plan's, or holds more values, which take much more memory than its text."""
    if len(header) > MAX_HEADER_BYTES:
        return f"expected a header of at most {MAX_HEADER_BYTES} bytes, got {len(header)}"
    values = sum(header.count(mark) for mark in (b",", b"[", b"{"))
    return f"expected a header of at most {MAX_HEADER_VALUES} values, got {values}" if values > MAX_HEADER_VALUES else None


def _verify(arena: np.ndarray, sections: list[dict], name: str) -> None:
    for s in sections:
        if _sha256(_section(arena, s)) != s.get("sha256"):
            raise _bad(name, f"damaged: section '{s['name']}' does not have the sha256 that the plan states")
        if arena[s["offset"] + s["nbytes"] : s["offset"] + _padded(s["nbytes"])].any():
            raise _bad(name, f"damaged: the padding after section '{s['name']}' is not zero")


def _bad(name: str, what: str) -> EngineError:
    return EngineError(f"{name}: {what}. Copy the file again, or build the engine again")


def _json(data: bytes, what: str) -> dict:
    try:
        value = json.loads(data.decode("ascii"))
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise EngineError(f"{what} is not a JSON object. Copy the file again, or build the engine again")
    return value


def _layout_problem(sections: list, arena_bytes: int) -> str | None:
    """What is wrong with the sections' names, kinds or places in an arena of that size, or None."""
    end, seen = 0, []
    for s in sections:
        if not isinstance(s, dict) or not isinstance(s.get("name"), str) or s.get("kind") not in ("weights", "cubin"):
            return f"expected a name and a kind (weights or cubin), got {s}"
        if s.get("offset") != end or type(s.get("nbytes")) is not int or s["nbytes"] < 0:
            return f"'{s['name']}': expected offset {end} and a size, got {s.get('offset')} and {s.get('nbytes')}"
        seen.append((s["kind"], s["name"]))
        end += _padded(s["nbytes"])
    if len(set(seen)) < len(seen):
        return "a name occurs twice"
    if [kind for kind, _ in seen] != sorted((kind for kind, _ in seen), reverse=True):
        return "machine code stands before weights"
    if end != arena_bytes:
        return f"they end at byte {end}, the arena at {arena_bytes}"
    return None


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


def _section(arena: np.ndarray, section: Mapping) -> np.ndarray:
    return arena[section["offset"] : section["offset"] + section["nbytes"]]


def _sha256(data: np.ndarray) -> str:
    return hashlib.sha256(data.data).hexdigest()


def _canonical(data) -> str:
    return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _plan_sha256(plan: Mapping) -> str:
    return hashlib.sha256(_canonical({k: v for k, v in plan.items() if k != "plan_sha256"}).encode()).hexdigest()


def _header(plan: Mapping, arena_bytes: int) -> bytes:
    arena = {"data_offsets": [0, arena_bytes], "dtype": "U8", "shape": [arena_bytes]}
    header = _canonical({"__metadata__": {"plan": _canonical(plan)}, "arena": arena}).encode()
    return header + b" " * (-(8 + len(header)) % ALIGN)
