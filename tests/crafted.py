"""Engine files as an attacker could write them: one fact of the plan is changed, and all hashes are right.

A crafted engine depends only on its number. An even number changes one fact of a plan; an odd one changes a fact of a layer or
of the memory, and the rest of the plan is recomputed to agree with it, as by somebody who knows this code.
"""

import json
import struct
import tempfile
import warnings
from contextlib import suppress
from functools import cache
from pathlib import Path

import numpy as np

from gpu_runtime import engine, engine_header, pipeline
from gpu_runtime.errors import EngineError
from gpu_runtime.explain import layer_info, report, wording
from gpu_runtime.runtime.plan_record import EngineRecord, Layer
from tactics import codec
from tests.engines import SPARSE_DEVICE
from tests.reference_run import model, node
from tests.small_models import small_models

NUMBERS = (0, 1, -1, 2, 3, 7, 8, 255, 256, 4096, 65536, 2**24, 2**31 - 1, -(2**31), 2**31, 2**40, 2**62, -(2**63))
TEXTS = ("", "x", "fp16:hwc8", "fp16:chw", "fp32:chw", "uint8:hwc", "arena", "weights", "i64", "i32", "f32", "conv_dense")
HEADS = ("layers", "layers", "layers", "memory", "memory", "sections", "inputs", "outputs", "device")
FREE = {"name", "nodes", "layer", "time_us", "weights_count", "title", "sources", "assumed", "sha256", "largest_live_bytes"}


def _joined():
    """Returns a network with split-K, a residual, 2:4 weights, inputs of a Concat in place and parts of a Split, a pool and a
    library function.
    """
    rng = np.random.default_rng(3)
    w = {
        name: (rng.standard_normal(shape) / 16).astype(np.float32)
        for name, shape in {
            "deep": (32, 512, 3, 3),
            "a": (32, 32, 3, 3),
            "b": (32, 32, 3, 3),
            "c": (64, 64, 1, 1),
            "d": (32, 1, 3, 3),
        }.items()
    }
    nodes = [
        node("Conv", "x deep", "h", pads=(1, 1, 1, 1)),
        node("Relu", "h", "r"),
        node("Conv", "r a", "p", pads=(1, 1, 1, 1)),
        node("Conv", "p d", "s", pads=(1, 1, 1, 1), group=32),
        node("Add", "s r", "t"),
        node("Conv", "t b", "q", pads=(1, 1, 1, 1)),
        node("Concat", "t q", "j", axis=1),
        node("Conv", "j c", "k"),
        node("MaxPool", "k", "m", kernel_shape=(2, 2), strides=(2, 2)),
        node("LRN", "m", "l", size=5),
        node("Split", "l", "u v", axis=1),
        node("Conv", "u a", "e", pads=(1, 1, 1, 1)),
        node("Add", "e v", "y"),
    ]
    return model(nodes, {"x": (1, 512, 7, 7)}, "y", w)


@cache
def bases() -> tuple[tuple[str, bytes], ...]:
    """Returns (name, bytes) of the valid engines from which crafted ones are made."""
    small = small_models()
    found = []
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for i, proto in enumerate((_joined(), *(small[i] for i in (0, 2, 3, 7, 8, 9, 14)))):
            path = Path(folder) / "m.onnx"
            path.write_bytes(proto.SerializeToString())
            found.append((f"base{i}", engine.encode(pipeline.build(path, sparsity="force", device=SPARSE_DEVICE))))
    return tuple(found)


def opened(data: bytes) -> tuple[dict, bytearray]:
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["plan"]), bytearray(data[8 + length :])


def sealed(plan: dict, arena: bytes) -> bytes:
    """Returns an engine file with this plan and arena, with right hashes but no check of the plan."""
    for s in plan["sections"] if isinstance(plan["sections"], list) else ():
        at, size = (s.get("offset"), s.get("nbytes")) if isinstance(s, dict) else (None, None)
        if type(at) is int and type(size) is int and 0 <= at <= len(arena):
            s["sha256"] = engine_header.sha256(np.frombuffer(bytes(arena[at : at + max(size, 0)]), np.uint8))
    plan["plan_sha256"] = engine_header.plan_sha256(plan)
    header = engine_header.header_of(plan, len(arena))
    return struct.pack("<Q", len(header)) + header + bytes(arena)


def places(value, at: tuple = ()):
    """Yields the path, a tuple of keys and indices, of every value inside a nested value."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield (*at, key)
        yield from places(inner, (*at, key))


def change(rng: np.random.Generator, plan: dict, heads=HEADS) -> tuple:
    """Changes one fact of the plan; returns its path."""

    def pick(items):
        return items[int(rng.integers(len(items)))]

    parts = plan | plan["plans"][0]
    head = pick([h for h in heads if parts[h]])
    path = pick([(head, *at) for at in places(parts[head]) if not FREE & {*map(str, at)}])
    holder = parts
    for key in path[:-1]:
        holder = holder[key]
    old, key = holder[path[-1]], path[-1]
    if type(old) is int:
        near = (old + 1, old - 1, old * 2, old // 2, old + 16, old + 256, old - 256, -old)
        holder[key] = pick([v for v in (*near, *NUMBERS) if v != old])
    elif isinstance(old, bool):
        holder[key] = not old
    elif isinstance(old, float):
        holder[key] = pick((old + 1, 0.0, -old - 1, 1e30, 1e-30))
    elif isinstance(old, str):
        same = [v for v in _texts(parts[head], path[-1]) if v != old]
        holder[key] = pick(same) if same and rng.integers(3) else pick([v for v in TEXTS if v != old])
    elif isinstance(old, list) and old and rng.integers(3):
        kind = int(rng.integers(3))
        if kind == 0:
            old.pop(int(rng.integers(len(old))))
        elif kind == 1:
            old.append(json.loads(json.dumps(pick(old))))
        else:
            old.reverse()
    else:
        others = [None, [], {}, 7, "x", *(parts[head] if isinstance(parts[head], list) else ())]
        holder[key] = json.loads(json.dumps(pick(others)))
    return path


def _texts(value, key) -> list[str]:
    return sorted({at[-1] == key and _at(value, at) for at in places(value) if isinstance(_at(value, at), str)} - {False})


def _at(value, path):
    for key in path:
        value = value[key]
    return value


def agree(plan: dict) -> None:
    """Recomputes, in place, the tensors and the memory's size that follow from changed layers."""
    record = codec.from_json(EngineRecord, {k: v for k, v in plan.items() if k not in ("format_version", "plan_sha256")})
    one, memory = plan["plans"][0], plan["plans"][0]["memory"]
    for layer, data in zip(record.plan.layers, one["layers"], strict=True):
        if layer.tactic:
            for t, fmt, shape in zip(
                (*data["inputs"], *data["outputs"]),
                (*layer.tactic.ins, layer.tactic.out),
                (*layer.problem.in_shapes, layer.problem.out_shape),
                strict=True,
            ):
                t["shape4"], t["format"] = list(shape), str(fmt)
    tensors = [t for data in one["layers"] for t in codec.from_json(Layer, data).tensors]
    ends = [t.whole.offset + t.whole.nbytes for t in tensors]
    ends += [sum(r) for r in (memory.get("workspace"), *memory.get("zeros", ())) if r]
    memory["activation_bytes"] = max(-(-end // 256) * 256 for end in ends)


def craft(number: int) -> tuple[str, bytes]:
    """Returns (a text on the change, the file's bytes) of crafted engine `number`."""
    rng = np.random.default_rng(number)
    given = bases()
    name, data = given[int(rng.integers(len(given)))]
    plan, arena = opened(data)
    if number % 2 == 0:
        path = change(rng, plan)
        return f"{name}: {'.'.join(map(str, path))}", sealed(plan, arena)
    path = change(rng, plan, ("layers", "layers", "layers", "memory", "sections"))
    with suppress(ValueError, TypeError, KeyError, IndexError, ArithmeticError, AttributeError, MemoryError):
        agree(plan)  # a plan that makes no sense is offered as it is
    return f"{name}: {'.'.join(map(str, path))}, and all that follows", sealed(plan, arena)


def attempt(data: bytes, path: Path) -> str:
    """Reads, describes and runs an engine; returns "fine" or the text of its EngineError. Other exceptions are not caught."""
    path.write_bytes(data)
    try:
        made = engine.load(path)
    except EngineError as e:
        return f"refused\t{e}"
    assert made.checked
    json.dumps(layer_info.layer_info(made.record))
    report.inspect_text(made.record, made.checked)
    wording.explain_text(made.record, wording.rows_of(made.record))
    rng = np.random.default_rng(0)
    inputs = {t.name: rng.uniform(-1, 1, t.shape).astype(t.dtype) for t in made.inputs}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with made.context(device="emulator") as context:
                context.run(inputs)
        except EngineError as e:  # for example a library function with impossible attributes
            return f"refused\t{e}"
    return "fine\t"
