"""The pipeline, stages in order: an ONNX file in, an engine out. A stage is imported where it begins."""

from __future__ import annotations

import functools
import io
import logging
import math
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, get_args

import numpy as np

from cuda_kernels.compile import compile_many, installed_nvrtc, source_hash
from cuda_kernels.device import Device, named
from gpu_runtime import installed_version
from gpu_runtime.engine import Engine, seal
from gpu_runtime.errors import ModelError, bounded
from gpu_runtime.frontend import importer
from gpu_runtime.frontend.queries import name_of, shape_of
from gpu_runtime.frontend.source import ModelLike, Source, sha256_of, source_of
from gpu_runtime.progress import LOGGER, Listener, Progress, compiling, ignore, logged, report
from gpu_runtime.runtime.findings import Choices, Compared, RangeRecord, Solution, Sparsity, SparsityRecord
from gpu_runtime.runtime.plan_record import EngineRecord, Flags, LaunchStep, Model, Outlook, PlanRecord, Producer
from gpu_runtime.target import make_timer, pick_device, timing_record
from gpu_runtime.text import WIDTH, clipped, printable
from tactics import predict
from tactics.format import DTYPES

if TYPE_CHECKING:
    from gpu_runtime import deviations
    from gpu_runtime.assembly import assemble
    from gpu_runtime.network import Network
    from gpu_runtime.planning import io_formats, tables
    from gpu_runtime.plans import Plans
    from gpu_runtime.precision import ranges
    from tactics.format import Format
    from tactics.planner.plan import Plan

SPARSITY: tuple[Sparsity, ...] = get_args(Sparsity)
Shapes = Mapping[str, tuple[int, ...]]
ROUNDS = 4  # of putting layers into FP32 that a calibration input shows to need it, each with a plan of its own


@bounded
def build(
    model: ModelLike,
    *,
    example_inputs: Sequence[Any] | None = None,
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
    risk: float = predict.RISK,
    calibration: Mapping[str, Any] | None = None,
    log: Callable[[str], None] | None = None,
    progress: Listener = ignore,
) -> Engine:
    """Build an engine from an ONNX model: a path, a ModelProto, its bytes, an open file, or a torch.nn.Module.

    `example_inputs`: the arguments of a torch.nn.Module's forward. `sparsity`: "disable"; "enable" considers 2:4 kernels for
    weights that have the pattern; "force" first prunes the initializers to it (outputs change; `save_pruned`, a path or a file
    for bytes, gets that model once all has succeeded). `device`: None takes the GPU at hand and measures, or, without one,
    plans for an H200 with predicted times; a name ("a100") predicts. `shapes`: sizes of dynamic inputs. `timing_cache`: file of
    measurements to use and extend. `input_formats`, `output_formats`: memory formats of the network's inputs and outputs, as
    "fp16:hwc8" (one for all), ["chw", "uint8:hwc"] (one each) or by name, see io_formats; without, linear in the model's types.
    `exhaustive`: time also what is known to take the same time as something timed. `workspace`: bytes of scratch memory that a
    tactic may use, None: any number. `risk`: the least P(sparse kernel faster), 0.5 to below 1, with which predicted plans take
    it. `calibration`: inputs by name, as `Context.run` takes them, on which the network is run once in FP32: a tensor near
    FP16's limit is stored smaller, or in FP32; without, random values where that is quick (`engine.plan.range` tells); a
    RuntimeWarning if FP16 cannot hold it. On it the plan itself is run too, where that is quick: layers whose rounding makes
    infinity, NaN or an error far above FP16's own get FP32 inputs in a new plan; without, operators that are not known to keep
    away from such points do. `log` gets the timings of each layer, as TensorRT's verbose log. `progress`: gpu_runtime.progress.
    Raises ModelError for the model, ValueError for an argument, OSError for `save_pruned`, InternalError for a wrong plan.

    >>> build("model.onnx", sparsity="enable", device="a100", shapes={"x": (2, 1, 8, 8)}).sparsity.rows[0].reason
    'channels_not_multiple_of_4'
    """
    mode, target = _mode(sparsity), pick_device(device)
    asked = _risk(risk, target)
    _check_arguments(save_pruned, timing_cache=timing_cache, workspace=workspace, log=log, progress=progress)
    source, progress = source_of(model, example_inputs), logged(progress)
    progress(Progress("import", str(source)))
    pruned = None if save_pruned is None else io.BytesIO()
    loaded, (sizes,) = _loaded(source, shapes, sparsity == "force", pruned)
    network, reached = _fitted(loaded, sizes, calibration, progress)
    loaded = replace(loaded, large={})  # its weights take memory
    ends = _ends(network, reached, input_formats, output_formats)
    planner = _Planner(target, mode, make_timer(target, timing_cache, progress), ends, progress, exhaustive, workspace, asked)
    planned = _settled(network, reached, calibration, planner)
    explained = _explained(loaded, planned, planner)
    _log(log, planned, planner)
    flags = Flags(sparsity, {k: tuple(v) for k, v in sorted((shapes or {}).items())}, workspace, asked)
    engine = _packed(Model(network.name, sha256_of(source)), planned, explained, flags, progress, embed_cubins)
    if save_pruned is not None and pruned is not None:
        importer.save(save_pruned, pruned.getvalue())
    report(lambda: _summary(engine))
    return engine


def _summary(engine: Engine) -> str:
    from gpu_runtime.explain import log

    return log.log_text(engine.record, WIDTH.get(), log.most_lines(engine.record), wrapped=False)


@bounded
def plan(
    model: ModelLike,
    devices: str | Sequence[str],
    batches: int | Sequence[int] = (),
    *,
    sparsity: str = "enable",
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    risk: float = predict.RISK,
    progress: Listener = ignore,
) -> Plans:
    """The model planned for each of `batches`, a dynamic first size of its inputs, on each named device, in that order. Times
    are predicted, `risk` as for `build`; the model is read once, nothing is packed or compiled. Raises as `build` does."""
    names = tuple(dict.fromkeys(np.atleast_1d(devices).tolist()))
    sizes = tuple(dict.fromkeys(np.atleast_1d(batches).tolist()))
    if bad := [n for n in sizes if type(n) is not int or n < 1]:
        raise ValueError(f"batches: expected whole numbers of at least 1, got {bad[0]!r}")
    if not names:
        raise ValueError("devices: expected at least one name, as 'a100'")
    plans = outlooks(model, names, sizes, sparsity, shapes, risk, logged(progress))
    report(plans.__str__)
    return plans


def outlooks(
    model: ModelLike,
    devices: Sequence[str],
    batches: tuple[int, ...],
    sparsity: str,
    shapes: Mapping[str, tuple[int, ...]] | None,
    risk: float,
    progress: Listener,
) -> Plans:
    """What `plan` returns; the logger is told nothing."""
    mode = _mode(sparsity)
    from gpu_runtime.planning import io_formats
    from gpu_runtime.plans import Plans
    from gpu_runtime.rewrites.alternatives import alternatives

    targets = [named(name) for name in devices]
    loaded, points = _loaded(source_of(model), shapes, sparsity == "force", batches=batches)
    found: list[Outlook] = []
    known: ranges.Known = {}  # networks too large for a run at each batch are run for one image
    for sizes in points:
        network, reached = _fitted(loaded, sizes, None, progress, known)
        network = alternatives(network)
        inputs = {t.name: t.shape for t in network.inputs}
        ends = io_formats.resolve(None, network.inputs, "input") | io_formats.resolve(None, network.outputs, "output")
        for target in targets:
            progress(Progress("device", f"{target.title}{f', batch {next(iter(inputs.values()))[0]}' if batches else ''}"))
            planner = _Planner(target, mode, make_timer(target, None), ends, progress, risk=_risk(risk, target))
            sparse, solution = _explained(loaded, _Planned(*planner(network), reached), planner)
            found.append(Outlook(Model(network.name), target, timing_record(target), sparse, solution, risk, inputs))
    return Plans(tuple(found), batches)


def _mode(sparsity: str) -> Sparsity:
    """One of SPARSITY. Raises ValueError for another."""
    for mode in SPARSITY:
        if mode == sparsity:
            return mode
    raise ValueError(f"sparsity: expected one of {', '.join(SPARSITY)}, got {sparsity!r}")


def _check_arguments(save_pruned: str | os.PathLike | BinaryIO | None, **given: object) -> None:
    """TypeError for an argument of `build` that is none of what it may be, OSError for a file that could not be written."""
    paths = str, os.PathLike
    for name, wanted, fits in (
        ("timing_cache", "a path or None", given["timing_cache"] is None or isinstance(given["timing_cache"], paths)),
        ("workspace", "a number of bytes or None", given["workspace"] is None or type(given["workspace"]) is int),
        ("log", "a function of a text, such as print, or None", given["log"] is None or callable(given["log"])),
        ("progress", "a function of a gpu_runtime.progress.Progress", callable(given["progress"])),
    ):
        if not fits:
            raise TypeError(f"{name}: expected {wanted}, got {given[name]!r}")
    importer.check_target(save_pruned)


def _risk(risk: float, target: Device) -> float | None:
    """None where times are measured: they need no premium."""
    if not isinstance(risk, (int, float)) or not 0.5 <= risk < 1:
        raise ValueError(f"risk: expected a probability from 0.5 to below 1, got {risk!r}")
    return None if target.measured else risk


@dataclass(frozen=True, slots=True)
class _Planner:
    """A network's tables for one target, and the best plan. `ends`: the formats that inputs and outputs may have."""

    target: Device
    sparsity: Sparsity
    timer: tables.Timer
    ends: Mapping[str, tuple[Format, ...]]
    progress: Listener
    exhaustive: bool = False
    scratch: int | None = None
    risk: float | None = predict.RISK

    def __call__(self, network: Network) -> tuple[tables.Table, Plan]:
        from gpu_runtime.planning import tables
        from tactics.planner.plan import solve

        table = tables.tabulate(
            network,
            self.target,
            self.timer,
            sparse=self.sparsity != "disable",
            io=self.ends,
            exhaustive=self.exhaustive,
            scratch=self.scratch,
            risk=self.risk,
            progress=lambda *op: self.progress(Progress("time", *op)),
        )
        self.progress(Progress("plan", network.name))
        return table, solve(table.graph)


@dataclass(frozen=True, slots=True)
class _Planned:
    """The plan that was chosen, and what the network's tensors reach."""

    table: tables.Table
    chosen: Plan
    reached: ranges.Ranges


def _loaded(
    source: Path | Source,
    shapes: Shapes | None,
    prune: bool,
    save_pruned: BinaryIO | None = None,
    batches: Sequence[int] = (),
) -> tuple[importer.Loaded, list[Shapes | None]]:
    """The model, and the sizes of its inputs for each batch, or those of `shapes` alone; pruned, branches that may become one
    convolution with one pattern for all of them, which takes an import before to find."""
    loaded = importer.load(source)
    points: list[Shapes | None] = [importer.at_batch(loaded, shapes or {}, n) for n in batches] or [shapes]
    if not prune:
        return loaded, points
    from gpu_runtime.fusion import fuse

    before = importer.sized(loaded, points[0])
    points[0] = {name_of(v): shape_of(v) for v in fuse.graph_of(before).inputs}  # of all: what was chosen is not said twice
    return importer.load(source, prune=True, masks=fuse.common_masks(before), save_pruned=save_pruned), points


def _fitted(
    loaded: importer.Loaded,
    shapes: Shapes | None,
    calibration: Mapping[str, Any] | None,
    progress: Listener,
    known: ranges.Known | None = None,
) -> tuple[Network, ranges.Ranges]:
    """The network in types that hold its tensors, and what these reach; warns of what FP16 cannot hold. Operators near their
    cliffs are kept in FP32, unless the plan itself is to be compared with FP32."""
    from gpu_runtime.fusion import fuse
    from gpu_runtime.lowering import lower
    from gpu_runtime.precision import cliffs, execution, ranges, sample

    imported = importer.sized(loaded, shapes)
    progress(Progress("lower", imported.name))
    lowered = lower.lower(fuse.fuse(imported))
    progress(Progress("range", imported.name))
    smaller = functools.partial(sample.smaller, loaded, lowered)
    network, found = ranges.fit(lowered, calibration, smaller, loaded.maskable, known)
    progress(Progress("range", found.source))
    if not found.seen:
        text = f"{network.name}: FP16's range is {found.source}; --calibration FILE.npz checks it, else a run shows overflow"
        warnings.warn(printable(text), RuntimeWarning, stacklevel=3)
    if found.stuck:
        reached = dict(found.high)
        reaching = ", ".join(f"{t!r} reaches {reached[t]:.4g} ({why})" for t, why in found.stuck[:3])
        text = f"{network.name}: on {found.source}, {reaching}: FP16's maximum is {ranges.FP16_MAX:g}"
        warnings.warn(printable(text), RuntimeWarning, stacklevel=3)
    if calibration is None or (large := execution.too_large(network, execution.PLAN)):
        if calibration is not None:
            found = replace(found, compared=Compared(f"{large}: instead, operators with known numerical risks compute in FP32"))
        network, kept = cliffs.keep(network)
        found = replace(found, single=(*found.single, *kept.items()))
    return network, found


def _ends(
    network: Network, reached: ranges.Ranges, inputs: io_formats.Spec | None, outputs: io_formats.Spec | None
) -> dict[str, tuple[Format, ...]]:
    """The formats that each input and output may have; warns of an output that FP16 cannot hold."""
    from gpu_runtime.planning import io_formats

    ends = io_formats.resolve(inputs, network.inputs, "input") | io_formats.resolve(outputs, network.outputs, "output")
    for t in network.outputs:
        if t.name in network.only and network.is_fp32(t.name) and any(f.dtype == "fp16" for f in ends[t.name]):
            text = f"{network.name}: {dict(reached.single)[t.name]}: request this output as fp32"
            warnings.warn(printable(text), RuntimeWarning, stacklevel=3)
    return ends


def _settled(network: Network, found: ranges.Ranges, calibration: Mapping[str, Any] | None, planner: _Planner) -> _Planned:
    """Plans are made, run on the calibration input and compared with FP32 until no layer asks for more FP32, ROUNDS times at
    most; `found` is completed with what was compared."""
    from gpu_runtime.rewrites.alternatives import alternatives

    table, chosen = planner(alternatives(network))
    if calibration is None or found.compared:
        return _Planned(table, chosen, found)
    from gpu_runtime.precision import cliffs

    for done in range(ROUNDS + 1):
        planner.progress(Progress("compare", network.name))
        result = _deviation(table, chosen, calibration, planner)
        grown, more = cliffs.heed(network, result.causes)
        if done == ROUNDS or (grown.wide, grown.reads_wide) == (network.wide, network.reads_wide):
            break
        network, found = grown, replace(found, single=(*found.single, *more.items()))
        table, chosen = planner(alternatives(network))
    if result.far:
        text = "; ".join(result.text(t) for t in result.far[:3])
        warnings.warn(printable(f"{network.name}: on the calibration input, {text}"), RuntimeWarning, stacklevel=3)
    compared = replace(result.record(), rounds=done, moved=tuple(sorted(network.wide)))
    return _Planned(table, chosen, replace(found, compared=compared))


def _deviation(table: tables.Table, chosen: Plan, calibration: Mapping[str, Any], planner: _Planner) -> deviations.Deviations:
    """The plan is run on the calibration input, each layer beside the same in FP32."""
    from gpu_runtime import deviations
    from gpu_runtime.assembly import assemble

    target, compiled = planner.target, compiling(planner.progress)
    data, arena = assemble.assemble(table, chosen)
    unexplained = SparsityRecord("disable", (), (), ())
    engine = Engine(_record(Model(table.network.name), target, data, (unexplained, _solution(chosen)), Flags("disable")), arena)
    feeds = {i.name: np.asarray(calibration[i.name]).astype(DTYPES[i.dtype]) for i in engine.plan.inputs}
    with engine.context(device="cuda" if target.measured else "emulator", graph=False, progress=compiled) as ctx:
        return deviations.compare(table, chosen, feeds, ctx.trace(feeds))


def _explained(loaded: importer.Loaded, planned: _Planned, planner: _Planner) -> tuple[SparsityRecord, Solution]:
    """Everything that is known before weights are packed."""
    from gpu_runtime.explain import reasons
    from gpu_runtime.planning.counterfactuals import counterfactuals

    table, chosen = planned.table, planned.chosen
    planner.progress(Progress("explain", table.network.name))
    others = counterfactuals(table, chosen)
    explained = reasons.sparsity(
        table,
        chosen,
        others,
        planner.sparsity,
        measured=table.device.measured,
        single={t: clipped(why) for t, why in planned.reached.single if t in table.network.only},
        stored=loaded.stored,
    )
    energy = loaded.before.lost_energy if loaded.before else None
    explained = replace(explained, pruned=loaded.pruned, not_pruned=loaded.not_pruned, pruned_energy=energy)
    return explained, replace(_solution(chosen), rivals=others.rivals)


def _log(log: Callable[[str], None] | None, planned: _Planned, planner: _Planner) -> None:
    """The timings of each layer."""
    if log or LOGGER.isEnabledFor(logging.DEBUG):
        from gpu_runtime.explain import autotuning

        for block in autotuning.log(planned.table, planned.chosen, planner.timer.failures, exhaustive=planner.exhaustive):
            LOGGER.debug("%s", block)
            if log:
                log(block)


def _packed(
    model: Model,
    planned: _Planned,
    explained: tuple[SparsityRecord, Solution],
    flags: Flags,
    progress: Listener,
    embed_cubins: bool,
) -> Engine:
    """Weights packed, memory placed, launches derived, all of it checked as reading would."""
    from gpu_runtime.assembly import assemble
    from gpu_runtime.explain import what_if

    table, chosen = planned.table, planned.chosen
    progress(Progress("pack", table.network.name))
    data, arena = assemble.assemble(table, chosen)
    record = _record(model, table.device, data, explained, flags, planned.reached, what_if.store(table))
    try:
        record = seal(record, arena)
    except ValueError as e:
        raise ModelError(f"{model.name}: {e}") from None
    cubins = {}
    if embed_cubins:
        from gpu_runtime.runtime import feeds
        from gpu_runtime.runtime.steps import kernel_key

        edges = [(step.kernel, step.values) for step in feeds.reformats(record.plan).values()]
        keys = dict.fromkeys([*(step.key for step in record.plan.steps if isinstance(step, LaunchStep)), *edges])
        wanted = [(kernel, dict(values), table.device.sm) for kernel, values in keys]
        compiled = compile_many(wanted, progress=compiling(progress))
        cubins = {kernel_key(*k): c.cubin for k, c in zip(keys, compiled, strict=True)}
    return Engine(record, arena, cubins, checked=True)


def _record(
    model: Model,
    target: Device,
    data: assemble.Assembled,
    explained: tuple[SparsityRecord, Solution],
    flags: Flags,
    reached: ranges.Ranges | None = None,
    choices: Choices | None = None,
) -> EngineRecord:
    sparsity, solution = explained
    found = PlanRecord(
        data.inputs,
        data.outputs,
        data.layers,
        data.memory,
        solution,
        sparsity,
        _range_record(reached) if reached else None,
        choices,
    )
    producer = Producer(installed_version(), installed_nvrtc())
    return EngineRecord(model, target, timing_record(target), producer, source_hash(), flags, data.sections, (found,))


def _range_record(found: ranges.Ranges) -> RangeRecord:
    """`found` as JSON takes it, which has no infinities: null stands for what FP32 cannot hold either."""
    high = tuple((t, v if math.isfinite(v) else None) for t, v in found.high)
    single, stuck = (tuple((t, clipped(why)) for t, why in rows) for rows in (found.single, found.stuck))
    return RangeRecord(clipped(found.source), high, found.exponents, single, stuck, found.compared, found.masked)


def _solution(chosen: Plan) -> Solution:
    return Solution(chosen.us, chosen.status, chosen.method, chosen.width, chosen.gap)
