"""Plans without weights: an engine's header alone, and the engine with weights that are drawn again from a seed.

ResNet-50's engine takes 50 MB, its plan 15 KB. The drawn weights are those that tactics are timed with (tactics.sampling.data):
normal, of a size that keeps outputs near 1, pruned to 2:4 where the problem says so. The engine computes another network than
the one that was planned; its launches, its bytes and the draw of random data are the same.
"""

import json
import lzma
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from cuda_kernels.compile import source_hash
from gpu_runtime import engine_header
from gpu_runtime.engine import Engine, is_checkable, seal
from gpu_runtime.runtime import verify
from gpu_runtime.runtime.fields import padded
from gpu_runtime.runtime.plan_record import EngineRecord, Layer
from tactics.launches import pack_weights
from tactics.sampling.data import WEIGHTS

PACK = Path(__file__).resolve().parents[2] / "out" / "gpu"  # the folder that `make gpu-pack` writes


def folder(device: str) -> Path:
    """Returns the folder of the plans for a named device."""
    return PACK / "plans" / device


def path_of(device: str, name: str, batch: int, kind: str) -> Path:
    return folder(device) / f"{name}_{batch}_{kind}.plan"


def packed(device: str, name: str, batch: int, kind: str) -> bytes | None:
    """Returns the plan that `make gpu-pack` wrote; None if there is none, or if the pack has other kernel sources."""
    path = path_of(device, name, batch, kind)
    return path.read_bytes() if path.exists() and is_current() else None


def is_current() -> bool:
    """Whether the pack was made of the present kernel sources."""
    path = PACK / "manifest.json"
    return path.exists() and json.loads(path.read_bytes()).get("kernels") == source_hash()


def stored(engine: Engine) -> bytes:
    """Returns the engine's plan, compressed."""
    return lzma.compress(engine_header.canonical(engine_header.file_data(engine.record)).encode())


def record_of(data: bytes) -> EngineRecord:
    """Returns the engine record, with its steps, of a stored plan. ValueError for other bytes, or a plan of other kernel
    sources.
    """
    try:
        record = engine_header.record_of(json.loads(lzma.decompress(data)))
    except (lzma.LZMAError, json.JSONDecodeError) as e:
        raise ValueError(f"expected a stored plan, got {len(data)} other bytes: {e}") from None
    if not is_checkable(record):
        raise ValueError("the stored plan is of other kernel sources: make gpu-pack writes it anew")
    return verify.derived(record)


def engine_of(data: bytes, seed: int = 0) -> Engine:
    """Returns the engine of a stored plan with drawn weights; equal layers have equal weights."""
    record = record_of(data)
    arena = np.zeros(max((padded(s.end) for s in record.sections), default=0), np.uint8)
    places = {s.name: s for s in record.sections}
    packed: dict[tuple[Any, Any], dict[str, np.ndarray]] = {}
    for layer in record.plan.layers:
        for name, array in _weights(layer, packed, seed).items():
            place = places.get(f"{layer.name}.{name}")
            if place is not None:  # pieces of a batch share the first one's
                arena[place.offset : place.end] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    arena.setflags(write=False)
    return Engine(seal(record, arena), arena, {}, checked=True)


def _weights(layer: Layer, packed: dict[tuple[Any, Any], dict[str, np.ndarray]], seed: int) -> dict[str, np.ndarray]:
    if layer.problem is None or layer.tactic is None:
        return {}
    alike = layer.problem, layer.tactic
    if alike not in packed:
        number = zlib.crc32(str(layer.problem).encode()) + seed
        draw = WEIGHTS.get(type(layer.problem), lambda *_: {})
        arrays = draw(layer.problem, np.random.default_rng(number), number)
        packed[alike] = pack_weights(layer.problem, layer.tactic, arrays)
    return packed[alike]
