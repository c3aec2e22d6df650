"""Damaged models and engine files by number, and a program that reads them with the code under test.

    python -m tests.mutants models|engines|crafted FIRST COUNT FOLDER

tries mutants FIRST to FIRST + COUNT - 1, which it writes to FOLDER, and prints two lines for each: before it is read its number
and mutations, afterwards the outcome. A mutant depends only on its number. The program's memory is limited, and so is the time
of a mutant: at its end the program is killed, and the missing last line shows which mutant did it.
"""

import json
import resource
import signal
import struct
import sys
import tempfile
import traceback
import warnings
from collections import defaultdict
from pathlib import Path

import numpy as np
import onnx

from tests.engines import SPARSE_DEVICE
from tests.mutations import HUGE, MODEL_MUTATIONS, pick
from tests.small_models import small_models

MEMORY = 6 << 30  # bytes of address space, of which the libraries take about 2 GB
SECONDS = 60  # seconds of one mutant; the slowest takes about 4 on an idle core


def damage(rng, data: bytes, where: np.ndarray) -> bytes:
    """Returns the bytes with some flipped, or with a range removed, repeated, zeroed or cut off, at drawn offsets of
    `where`."""
    out = bytearray(data)
    kind, at = int(rng.integers(6)), int(pick(rng, where))
    size = int(rng.integers(1, 40))
    if kind <= 1:
        for i in rng.choice(where, min(len(where), int(pick(rng, (1, 3, 20)))), replace=False):
            out[int(i)] ^= 1 << int(rng.integers(8))
    elif kind == 2:
        del out[at : at + size]
    elif kind == 3:
        out[at:at] = out[at : at + size]
    elif kind == 4:
        out[at : at + size] = bytes(size)
    else:
        del out[at:]
    return bytes(out)


def structure(data: bytes, m: onnx.ModelProto) -> np.ndarray:
    """Returns the offsets in a serialised model outside of long tensors' values, where a flipped byte changes how it is
    parsed."""
    keep = np.ones(len(data), bool)
    for t in m.graph.initializer:
        at = data.find(t.raw_data) if len(t.raw_data) > 64 else -1
        if at >= 0:
            keep[at : at + len(t.raw_data)] = False
    return np.flatnonzero(keep)


# ---- the models that are mutated, and the check of each


def sources(real: Path) -> list[tuple[str, bytes]]:
    """Returns (name, bytes) of models: small ones, repeated to be half of all, then the real models in folder `real`."""
    found = [(p.name, p.read_bytes()) for p in sorted(real.glob("*.onnx"))]
    made = [(f"small{i}", m.SerializeToString()) for i, m in enumerate(small_models())]
    return made + made[: max(0, len(found) - len(made))] + found


def mutate_model(number: int, given: list[tuple[str, bytes]], folder: Path) -> tuple[str, bytes]:
    """Returns (a text on the mutations, bytes) of mutant `number` of the models `given`: one to three mutations of its fields
    or its bytes."""
    rng = np.random.default_rng(number)
    name, data = given[int(rng.integers(len(given)))]
    told = [name]
    m = onnx.ModelProto.FromString(data)
    if rng.integers(4) == 0:
        where = structure(data, m)
        return f"{name}: flipped bytes", damage(rng, data, where)
    for _ in range(int(pick(rng, (1, 1, 1, 2, 2, 3)))):
        if m.graph.node:
            mutation = pick(rng, MODEL_MUTATIONS)
            told.append(mutation.__name__)
            mutation(rng, m, folder)
    return ", ".join(told), m.SerializeToString()


def sizes(data: bytes) -> dict[str, tuple[int, ...]]:
    """Returns input -> a small shape for every input with dynamic sizes, so that the model can be built; {} if it is
    unreadable."""
    try:
        m = onnx.ModelProto.FromString(data)
        stored = {t.name for t in m.graph.initializer}
        found = {}
        for v in m.graph.input:
            dims = [d.dim_value for d in v.type.tensor_type.shape.dim]
            if v.name not in stored and not all(dims):
                usual = (1, 3, 64, 64) if len(dims) == 4 else (1,) * len(dims)
                found[v.name] = tuple(d or size for d, size in zip(dims, usual, strict=True))
        return found
    except Exception:  # damaged: then it is offered without sizes
        return {}


def try_model(number: int, given: list[tuple[str, bytes]], folder: Path) -> str:
    """Builds mutant `number`; returns "fine" or the text of its ModelError. Other exceptions are not caught."""
    from gpu_runtime import pipeline
    from gpu_runtime.errors import ModelError
    from gpu_runtime.frontend import importer
    from gpu_runtime.fusion import fuse
    from gpu_runtime.lowering import lower

    told, data = mutate_model(number, given, folder)
    print(f"{number}\t{told}", flush=True)
    path = folder / "mutant.onnx"
    path.write_bytes(data)
    try:
        if told.startswith("small") and number % 4 == 0:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # warnings of values beyond FP16, as of a small model with one weight of 1e30
                pipeline.build(path, sparsity="force", shapes=sizes(data), device="h200")
        else:
            fuse.fuse(lower.lower(importer.sized(importer.load(path, prune=number % 2 == 0), sizes(data))))
    except ModelError as e:
        return f"refused\t{e}"
    return "fine\t"


# ---- engine files: bytes, and plans with hashes that fit again


ODD = (None, True, -1, 0, 1, 7, 2**31, 2**62, 10**30, 0.5, "", "x", "../x", "sm_80", [], [1], {}, {"x": 1})


def engine_files() -> list[tuple[str, bytes]]:
    """Returns (name, bytes) of engines of small models."""
    from gpu_runtime import engine, pipeline

    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # warnings of values that may exceed FP16 or FP32
        path = Path(folder) / "m.onnx"
        made = []
        for i, m in enumerate(small_models()):
            path.write_bytes(m.SerializeToString())
            made.append((f"small{i}", engine.encode(pipeline.build(path, sparsity="force", device=SPARSE_DEVICE))))
        return made


def places(value, at: tuple = ()):
    """Yields the path, a tuple of keys and indices, of every value in a plan."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield (*at, key)
        yield from places(inner, (*at, key))


def alter(rng, plan: dict) -> str:
    """Changes, removes or exchanges one to three values of a plan, in place; returns a text on their paths."""
    told = []
    for _ in range(int(pick(rng, (1, 1, 2, 3)))):
        parts = plan  # of the header, or, mostly, of the plan
        if plan.get("plans") and isinstance(plan["plans"], list) and isinstance(plan["plans"][0], dict) and rng.integers(3):
            parts = plan["plans"][0]
        heads = [k for k in parts if k not in ("choices", "plans")]  # choices: read by what-if questions only, and very long
        if not heads:
            continue
        head = pick(rng, heads)
        path = pick(rng, [(head,), *places(parts[head], (head,))])
        holder = parts
        for key in path[:-1]:
            holder = holder[key]
        kind, key = int(rng.integers(4)), path[-1]
        if kind == 0:
            del holder[key]
        elif kind == 1 and type(holder[key]) in (int, float):
            holder[key] = pick(rng, (-holder[key] - 1, holder[key] + 1, holder[key] * 1000, *HUGE))
        elif kind == 2:
            other = pick(rng, list(places(parts[head], (head,))) or [(head,)])
            found = parts
            for k in other:
                found = found[k]
            holder[key] = json.loads(json.dumps(found))
        else:
            holder[key] = pick(rng, ODD)
        told.append(".".join(map(str, path)))
    return ", ".join(told)


def reseal(plan: dict, arena: bytes) -> bytes:
    """Returns an engine file with this plan and arena, with right hashes."""
    from gpu_runtime import engine_header

    plan["plan_sha256"] = engine_header.plan_sha256(plan)
    header = engine_header.header_of(plan, len(arena))
    return struct.pack("<Q", len(header)) + header + arena


def mutate_engine(number: int, given: list[tuple[str, bytes]]) -> tuple[str, bytes]:
    """Returns (a text on the mutations, bytes) of mutant `number`: its bytes are damaged, or its plan is altered."""
    rng = np.random.default_rng(number)
    name, data = given[int(rng.integers(len(given)))]
    if rng.integers(3) == 0:
        return f"{name}: flipped bytes", damage(rng, data, np.arange(len(data)))
    (length,) = struct.unpack("<Q", data[:8])
    plan = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["plan"])
    where = alter(rng, plan)
    return f"{name}: {where}", reseal(plan, data[8 + length :])


def try_engine(number: int, given: list[tuple[str, bytes]], folder: Path) -> str:
    """Reads, describes and prepares mutant `number`, without loading kernels; returns "fine" or the text of its EngineError."""
    from gpu_runtime import engine
    from gpu_runtime.errors import EngineError
    from gpu_runtime.explain import layer_info, report, wording
    from gpu_runtime.runtime.context import Context

    told, data = mutate_engine(number, given)
    print(f"{number}\t{told}", flush=True)
    path = folder / "mutant.engine"
    path.write_bytes(data)
    try:
        made = engine.load(path)
        json.dumps(layer_info.layer_info(made.record))
        report.plan_text(made.record)
        wording.sparsity_text(made.record)
        # Kernels are compiled from the launches, which are elsewhere.
        setattr(Context, "_load", lambda self, *_: defaultdict(lambda: None))  # noqa: B010
        Context(made, device="emulator").close()
    except EngineError as e:
        return f"refused\t{e}"
    return "fine\t"


def try_crafted(number: int, given: object, folder: Path) -> str:
    """Reads, describes and runs a crafted engine (crafted.attempt)."""
    from tests import crafted

    told, data = crafted.craft(number)
    print(f"{number}\t{told}", flush=True)
    return crafted.attempt(data, folder / "crafted.engine")


def main(kind: str, first: int, count: int, folder: Path) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    from tests.conftest import MODELS

    given = {"engines": engine_files, "models": lambda: sources(MODELS), "crafted": lambda: None}[kind]()
    for number in range(first, first + count):
        signal.alarm(SECONDS)
        try:
            outcome = {"models": try_model, "engines": try_engine, "crafted": try_crafted}[kind](number, given, folder)
        except Exception as e:
            outcome = f"{type(e).__name__}\t{e}\n{traceback.format_exc(limit=-6)}"
        signal.alarm(0)
        print(f"{number}\t{json.dumps(outcome)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
