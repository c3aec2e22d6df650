"""The pipeline, stages in order: an ONNX file in, an engine out."""

from __future__ import annotations

import hashlib
import io
import math
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import BinaryIO

import numpy as np

from cuda_kernels import device as devices
from cuda_kernels.compile import compile_many, nvrtc_version, source_hash
from cuda_kernels.device import Device
from cuda_kernels.files import cache_dir
from gpu_runtime import deviations
from gpu_runtime.assembly import assemble
from gpu_runtime.errors import ModelError, bounded
from gpu_runtime.explain import autotuning, reasons, what_if
from gpu_runtime.frontend import fuse, importer
from gpu_runtime.lowering import lower
from gpu_runtime.network import Network
from gpu_runtime.planning import io_formats, tables
from gpu_runtime.precision import cliffs, ranges
from gpu_runtime.rewrites import (
    back_to_back,
    blocks,
    channels,
    shared_concats,
    siblings,
    squeeze_excite,
    upsampling,
)
from gpu_runtime.runtime.context import kernel_key
from gpu_runtime.runtime.engine import Engine, seal
from gpu_runtime.text import printable
from tactics import predict
from tactics.format import DTYPES
from tactics.measure import timing
from tactics.planner import plan

SPARSITY = ("disable", "enable", "force")
ROUNDS = 4  # of putting layers into FP32 that a calibration input shows to need it, each with a plan of its own
DEFAULT_DEVICE = "h200"  # what is planned for where there is no GPU and no name was given


@bounded
def build(
    model: str | os.PathLike,
    *,
    sparsity: str = "disable",
    device: str | Device | None = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    timing_cache: str | os.PathLike | None = None,
    save_pruned: str | os.PathLike | BinaryIO | None = None,
    embed_cubins: bool = False,
    input_formats: io_formats.Spec | None = None,
    output_formats: io_formats.Spec | None = None,
    exhaustive: bool = False,
    workspace: int | None = None,
    calibration: Mapping[str, object] | None = None,
    log: Callable[[str], None] | None = None,
    progress: Callable[[str, str], None] = lambda stage, detail: None,
) -> Engine:
    """Build an engine from an ONNX file.

    `sparsity`: "disable"; "enable" considers 2:4 kernels for weights that have the pattern; "force" first prunes the
    initializers to it (outputs change; `save_pruned`, a path or a file opened for writing bytes, gets that model once
    the build has succeeded). `device`: None takes the GPU at hand and measures, or, without one, plans for an H200 with
    predicted times; a name ("a100") always predicts. `shapes`: sizes of dynamic inputs. `timing_cache`: file of
    measurements to use and extend. `input_formats`, `output_formats`: memory formats of the network's inputs and outputs,
    as "fp16:hwc8" (one for all), ["chw", "uint8:hwc"] (one each) or by name, see io_formats; without, linear in the
    model's types. `exhaustive`: time also what is known to take the same time as something timed. `workspace`: bytes of
    scratch memory that a tactic may use, None: any number. `calibration`: inputs by name, as `Context.run` takes them, on
    which the network is run once in FP32: what comes near FP16's limit is stored smaller, or in FP32; without, random values
    where that is quick (`engine.plan["range"]` tells), and a RuntimeWarning for what cannot be. On it the plan itself is run
    too, where that is quick: layers whose rounding makes infinity, NaN or an error far above FP16's own get FP32 inputs, and
    all is planned again; without, operators that are not known to keep away from such points do. `log` is given the timings of
    each layer, as TensorRT's verbose log shows them. `progress(stage, detail)` is told what is being done. Raises ModelError
    for the model, ValueError for a bad argument, OSError if `save_pruned` cannot be written, InternalError instead of an engine
    whose layers would read anything but what was written for them.
    """
    if sparsity not in SPARSITY:
        raise ValueError(f"sparsity: expected one of {', '.join(SPARSITY)}, got {sparsity!r}")
    target = pick_device(device)
    if save_pruned is not None:
        importer.check_target(save_pruned)

    progress("import", str(model))
    pruned = None if save_pruned is None else io.BytesIO()
    imported = importer.read(model, shapes=shapes, prune=sparsity == "force", save_pruned=pruned)
    network, found = _fitted(imported, calibration)
    imported = replace(imported, model=None)

    ends = io_formats.resolve(input_formats, network.inputs, "input")
    ends |= io_formats.resolve(output_formats, network.outputs, "output")
    for t in network.outputs:
        if t.name in network.only and network.is_fp32(t.name) and any(f.dtype == "fp16" for f in ends[t.name]):
            text = f"{network.name}: {dict(found.single)[t.name]}: ask for the output as fp32"
            warnings.warn(printable(text), RuntimeWarning, stacklevel=2)
    timer = make_timer(target, timing_cache)
    planned = partial(_planned, ends, target, sparsity, timer, progress, exhaustive=exhaustive, scratch=workspace)
    table, chosen, found = _settled(network, found, calibration, planned, target, progress)
    explained, beside = _explained(imported, table, chosen, found, sparsity, progress)
    for block in autotuning.log(table, chosen, timer.failures, exhaustive=exhaustive) if log else ():
        log(block)
    progress("pack", network.name)
    data, arena = assemble.assemble(table, chosen)

    data |= {
        "producer": {"version": _version(), "nvrtc": nvrtc_version()},
        "model": {"name": network.name, "sha256": _file_sha256(model)},
        "device": asdict(target),
        "timing": timing_record(target),
        "source_hash": source_hash(),
        "range": _range_record(found),
        "flags": {
            "sparsity": sparsity, "shapes": {k: list(v) for k, v in sorted((shapes or {}).items())},
            **({} if workspace is None else {"memPoolSize": f"workspace:{workspace}B"}),
        },
        "sparsity": explained, "choices": what_if.store(table),
        "plan": _plan_record(chosen, beside),
    }  # fmt: skip
    cubins = {}
    if embed_cubins:
        keys = dict.fromkeys((s["kernel"], tuple(sorted(s["values"].items()))) for s in data["steps"] if "kernel" in s)
        compiled = compile_many((*k, target.sm) for k in keys)
        cubins = {kernel_key(*k): c.cubin for k, c in zip(keys, compiled, strict=True)}
    try:
        engine = Engine(seal(data, arena), arena, cubins, checked=True)
    except ValueError as e:
        raise ModelError(f"{network.name}: {e}") from None
    if pruned is not None:
        importer.save(save_pruned, pruned.getvalue())
    return engine


@bounded
def compare(
    model: str | os.PathLike,
    device_names: Sequence[str],
    *,
    sparsity: str = "enable",
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    progress: Callable[[str, str], None] = lambda stage, detail: None,
) -> list[dict]:
    """The model planned for each named device, times predicted: per device {device, timing, plan, sparsity, model}, as they
    stand in an engine. Nothing is packed or compiled. Raises as `build` does."""
    if sparsity not in SPARSITY:
        raise ValueError(f"sparsity: expected one of {', '.join(SPARSITY)}, got {sparsity!r}")
    targets = [devices.named(name) for name in dict.fromkeys(device_names)]
    imported = importer.read(model, shapes=shapes, prune=sparsity == "force")
    network, reached = _fitted(imported, None)
    network = alternatives(network)
    ends = io_formats.resolve(None, network.inputs, "input") | io_formats.resolve(None, network.outputs, "output")
    found = []
    for target in targets:
        progress("device", target.title)
        timer = make_timer(target, None)
        table, chosen = _planned(ends, target, sparsity, timer, progress, network)
        explained, beside = _explained(imported, table, chosen, reached, sparsity, progress)
        found.append({
            "model": {"name": network.name}, "device": asdict(target), "timing": timing_record(target), "sparsity": explained,
            "plan": _plan_record(chosen, beside),
        })  # fmt: skip
    return found


def _fitted(imported, calibration: Mapping[str, object] | None) -> tuple[Network, ranges.Ranges]:
    """The network in types that hold its tensors, and what these reach; warns of what FP16 cannot hold. Operators near their
    cliffs are kept in FP32, unless the plan itself is to be compared with FP32."""
    network, found = ranges.fit(lower.lower(fuse.fuse(imported)), calibration)
    if found.stuck:
        reached = dict(found.high)
        told = ", ".join(f"{t!r} reaches {reached[t]:.4g} ({why})" for t, why in found.stuck[:3])
        text = f"{network.name}: on {found.source}, {told}: FP16 ends at {ranges.FP16_MAX:g}"
        warnings.warn(printable(text), RuntimeWarning, stacklevel=3)
    if calibration is None or (large := ranges.too_large(network, deviations.MOST_MACS)):
        if calibration is not None:
            found = replace(found, compared={"skipped": f"{large}: what operators are known to need is in FP32 instead"})
        network, kept = cliffs.keep(network)
        found = replace(found, single=(*found.single, *kept.items()))
    return network, found


def _settled(network, found: ranges.Ranges, calibration, planned, target: Device, progress):
    """(table, plan, `found` with what was compared): plans are made, run on the calibration input and compared with FP32 until
    no layer asks for more FP32, ROUNDS times at most. `planned`: (network) -> (table, plan)."""
    table, chosen = planned(alternatives(network))
    if calibration is None or found.compared:
        return table, chosen, found
    for done in range(ROUNDS + 1):
        progress("compare", network.name)
        data, arena = assemble.assemble(table, chosen)
        engine = Engine(data | {"device": asdict(target), "source_hash": source_hash()}, arena)
        feeds = {i["name"]: np.asarray(calibration[i["name"]]).astype(DTYPES[i["dtype"]]) for i in engine.inputs}
        with engine.context(device="cuda" if target.measured else "emulator", graph=False) as ctx:
            result = deviations.compare(table, chosen, feeds, ctx.trace(feeds))
        grown, more = cliffs.heed(network, result.causes)
        if done == ROUNDS or (grown.wide, grown.reads_wide) == (network.wide, network.reads_wide):
            break
        network, found = grown, replace(found, single=(*found.single, *more.items()))
        table, chosen = planned(alternatives(network))
    if result.far:
        told = "; ".join(result.text(t) for t in result.far[:3])
        warnings.warn(printable(f"{network.name}: on the calibration input, {told}"), RuntimeWarning, stacklevel=3)
    return table, chosen, replace(found, compared=result.record() | {"rounds": done, "moved": sorted(network.wide)})


def alternatives(network: Network) -> Network:
    """The network with every other way to run it that a plan may choose."""
    for offer in (
        blocks.offer, channels.offer, upsampling.offer, shared_concats.share, siblings.merge, squeeze_excite.offer,
        back_to_back.offer,
    ):  # fmt: skip
        network = offer(network)
    return network


def _planned(ends, target: Device, sparsity: str, timer, progress, network, **limits) -> tuple[tables.Table, plan.Plan]:
    table = tables.tabulate(
        network, target, timer, sparse=sparsity != "disable", io=ends, progress=lambda name: progress("time", name), **limits
    )
    progress("plan", network.name)
    return table, plan.solve(table.graph)


def _explained(imported, table: tables.Table, chosen: plan.Plan, reached: ranges.Ranges, sparsity: str, progress):
    """(sparsity record, rivals): everything that is known before weights are packed."""
    network = table.network
    progress("explain", network.name)
    beside = tables.rivals(table)
    explained = reasons.sparsity(
        table, chosen, sparsity, measured=table.device.measured, all_dense_us=beside["all_dense_us"],
        single={t: why for t, why in reached.single if t in network.only}, stored=imported.stored,
    )  # fmt: skip
    explained["pruned"], explained["not_pruned"] = list(imported.pruned), [list(row) for row in imported.not_pruned]
    explained["pruned_energy"] = imported.before and imported.before.lost_energy
    return explained, beside


def _file_sha256(path: str | os.PathLike) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _range_record(found: ranges.Ranges) -> dict:
    """`found` as JSON takes it, which has no infinities: null stands for what FP32 cannot hold either."""
    return asdict(found) | {"high": [[t, v if math.isfinite(v) else None] for t, v in found.high]}


def _plan_record(chosen: plan.Plan, beside: dict) -> dict:
    return {
        "total_us": chosen.total_ps / 1e6, "status": chosen.status, "method": chosen.method, "width": chosen.width,
        "gap": chosen.gap, "rivals": beside,
    }  # fmt: skip


def pick_device(device: str | Device | None) -> Device:
    """None: the GPU at hand, else the default named one; a name: that device, for prediction."""
    if isinstance(device, Device):
        return device
    if device is not None:
        return devices.named(device)
    return devices.current() if devices.has_gpu() else devices.named(DEFAULT_DEVICE)


def make_timer(device: Device, timing_cache: str | os.PathLike | None) -> tables.Timer:
    """Measured times where the device is one at hand, else predicted ones (which no cache ever holds)."""
    if not device.measured:
        return timing.predicted(device)
    path = Path(timing_cache) if timing_cache else cache_dir() / "timings.jsonl"
    return timing.measured(device, timing.Cache(path))


def timing_record(device: Device) -> dict:
    """How the plan's times came about; `label` is what every printed time carries."""
    if device.measured:
        return {"kind": "measured", "label": f"measured({device.title})"} | timing.environment()
    return {"kind": "predicted", "label": f"predicted({device.name})", "sigma": predict.SIGMA}


def _version() -> str:
    try:
        return version("gpu-runtime")
    except PackageNotFoundError:
        return "uninstalled"


__all__ = ["ModelError", "alternatives", "build", "compare", "pick_device"]
