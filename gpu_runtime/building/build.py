"""The stages of a build, in order, each with the records of the stage before: an ONNX file in, an engine out."""

import io
import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from cuda_kernels.compile import compile_many
from cuda_kernels.device import named
from gpu_runtime.assembly import assemble
from gpu_runtime.building import chosen_sizes
from gpu_runtime.building.fit import ends_of, fit
from gpu_runtime.building.if_pruned import with_pruned
from gpu_runtime.building.load import load, lowered, shared
from gpu_runtime.building.options import BuildOptions
from gpu_runtime.building.planner import PlannedNetwork, Planner
from gpu_runtime.building.plans import Plans
from gpu_runtime.building.record import Built, engine_record, explain, plan_record, precisions
from gpu_runtime.building.settle import settle
from gpu_runtime.building.target import make_timer, placed, runs_whole, timing_record
from gpu_runtime.engine import Engine, join, seal
from gpu_runtime.errors import ModelError
from gpu_runtime.explain import log, reasons, what_if
from gpu_runtime.frontend import importer
from gpu_runtime.frontend.files.source import Examples, ModelLike, Source, sha256_of, source_of
from gpu_runtime.network import Network
from gpu_runtime.planning import io_formats
from gpu_runtime.planning.alternatives import alternatives
from gpu_runtime.precision import ranges
from gpu_runtime.progress import LOGGER, Progress, compiling, logged, report
from gpu_runtime.runtime.findings import RangeRecord, Solution, SparsityRecord
from gpu_runtime.runtime.plan_record import Flags, Model, Outlook, Profile
from gpu_runtime.text import WIDTH

Explained = tuple[SparsityRecord, Solution]
Fitted = tuple[Network, RangeRecord, Any]  # a network, its tensors' ranges, and the calibration input at its size


def build(model: ModelLike, options: BuildOptions) -> Engine:
    """Builds an engine; see pipeline.build."""
    options = replace(options.checked(), progress=logged(options.progress))
    importer.check_target(options.save_pruned)
    target, options = placed(options)
    wanted = chosen_sizes.asked(options.shapes)
    source = source_of(model, Examples(options.example_inputs, options.shapes), options.progress)
    options.progress(Progress("import", str(source)))
    pruned = None if options.save_pruned is None else io.BytesIO()
    fitted, exact, loaded = _fitted(source, wanted, options, pruned)
    planner = Planner(target, make_timer(target, options, [network for network, *_ in fitted]), options)
    profiles, planned = _planned(fitted, exact, wanted, planner)
    planned = [with_pruned(loaded, p, planner) for p in planned]
    explained, given = _explained(loaded, planned, planner), chosen_sizes.optimal(wanted, options.shapes)
    return _reported(_packed(source, planned, explained, given, profiles, planner), options.save_pruned, pruned)


def _fitted(
    source: Path | Source, wanted: Sequence[chosen_sizes.Asked], options: BuildOptions, pruned: BinaryIO | None
) -> tuple[list[Fitted], list[str | None], importer.Loaded]:
    """Returns (the network at each size in types that hold its tensors; for each profile why no batch may be padded, None if
    any may; the loaded model without its large weights).
    """
    progress, calibration, prune = options.progress, options.calibration, options.sparsity == "force"
    loaded, sizes = load(source, lambda m: chosen_sizes.sizes(m, wanted, options.shapes), prune, pruned)
    plain: list[Network] = []
    for shapes in sizes:
        network = lowered(loaded, shapes, progress)
        plain.append(shared(network, plain[0]) if plain else network)
    chosen_sizes.check_first(loaded.source, wanted, plain)
    exact = chosen_sizes.meeting(loaded, wanted, plain)
    known: ranges.Known = {}
    fitted = []
    for shapes, network in zip(sizes, plain, strict=True):
        rows = chosen_sizes.repeated(calibration, shapes) if wanted else calibration
        fitted.append((*fit(loaded, network, rows, progress, known, options.precisions), rows))
    return fitted, exact, replace(loaded, large={})


def _planned(
    fitted: Sequence[Fitted], exact: Sequence[str | None], wanted: Sequence[chosen_sizes.Asked], planner: Planner
) -> tuple[tuple[Profile, ...], list[PlannedNetwork]]:
    """Plans each fitted network; returns the profiles, and the plans that the engine keeps (chosen_sizes.kept: some batch runs
    fastest with them).

    `exact`: for each profile why it takes only the batches of its plans, or None where others may be padded.
    """
    planned: list[PlannedNetwork] = []
    planners: list[Planner] = []
    options = planner.options
    for network, reached, rows in fitted:
        ends = ends_of(network, reached, options.input_formats, options.output_formats)
        planners.append(replace(planner, ends=ends))
        first = planned[0].table.network if planned else None
        planned.append(replace(settle(network, reached, rows, planners[-1], first), fitted=network))
    profiles, stay = chosen_sizes.kept(wanted, planned, exact)
    if options.batch_invariant:
        return profiles, chosen_sizes.alike(profiles, [planned[i] for i in stay])
    if not runs_whole(planner.target, options) or planner.timer.early:
        return profiles, [planned[i] for i in stay]
    from gpu_runtime.building import in_network

    return profiles, [in_network.settle(planned[i], planners[i]) for i in stay]


def _reported(engine: Engine, path: str | os.PathLike | BinaryIO | None, pruned: io.BytesIO | None) -> Engine:
    """Writes the pruned model, tells the logger, and returns the engine."""
    if path is not None and pruned is not None:
        importer.save(path, pruned.getvalue())

    def summary() -> str:
        return log.log_text(engine.record, WIDTH.get(), log.most_lines(engine.record))

    report(summary)
    return engine


def _explained(loaded: importer.Loaded, planned: Sequence[PlannedNetwork], planner: Planner) -> list[Explained]:
    """Returns each plan's reasons; the logger and the options' `log` get the timings of each layer. Closes the timer."""
    patterns: reasons.Patterns = {}
    explained, tell = [explain(loaded, p, planner, patterns) for p in planned], planner.options.log
    planner.timer.close()
    if tell or LOGGER.isEnabledFor(logging.DEBUG):
        from gpu_runtime.explain import autotuning

        for p in planned:
            for block in autotuning.log(p.table, p.chosen, planner.timer.failures, exhaustive=planner.options.exhaustive):
                LOGGER.debug("%s", block)
                if tell:
                    tell(block)
    return explained


def _packed(
    source: Path | Source,
    planned: Sequence[PlannedNetwork],
    explained: Sequence[Explained],
    shapes: chosen_sizes.Shapes,
    profiles: tuple[Profile, ...],
    planner: Planner,
) -> Engine:
    """Returns the engine: weights packed, memory placed, launches derived, all of it checked as reading a file would."""
    options = planner.options
    model, parts = Model(planned[0].table.network.name, sha256_of(source)), []
    for p in planned:
        options.progress(Progress("pack", p.table.network.name))
        parts.append(assemble.assemble(p.table, p.chosen))
        takes = parts[-1][0].memory.activation_bytes
        if options.activations is not None and takes > options.activations:
            raise planner.too_large(p.table.network, takes, tried=False)
    arena, sections, renamed = join([(arena, data.sections) for data, arena in parts])
    plans = [
        replace(
            plan_record(data, found, p.reached, what_if.store(p.table, p.pruned_table), names, p.if_pruned),
            int8=precisions(p.table, p.chosen),
        )
        for (data, _), found, p, names in zip(parts, explained, planned, renamed, strict=True)
    ]
    flags = Flags(options.sparsity, shapes, options.workspace, planner.risk, options.batch_invariant, options.activations)
    record = engine_record(model, planner.target, Built(flags, sections, plans, profiles), planner.timer.driver)
    try:
        record = seal(record, arena)
    except ValueError as e:
        raise ModelError(f"{model.name}: {e}") from None
    cubins = {}
    if options.embed_cubins:
        from gpu_runtime.runtime import point, steps

        keys = dict.fromkeys(key for plan in record.plans for key in point.kernel_keys(plan, True))
        wanted = [(kernel, dict(values), planner.target.sm) for kernel, values in keys]
        compiled = compile_many(wanted, progress=compiling(options.progress))
        cubins = {steps.kernel_key(*k): c.cubin for k, c in zip(keys, compiled, strict=True)}
    return Engine(record, arena, cubins, checked=True)


def plan(model: ModelLike, devices: str | Sequence[str], batches: int | Sequence[int], options: BuildOptions) -> Plans:
    """Plans a model for several devices and batches; see pipeline.plan. The logger gets no messages."""
    names = tuple(dict.fromkeys(np.atleast_1d(devices).tolist()))
    sizes = tuple(dict.fromkeys(np.atleast_1d(batches).tolist()))
    if bad := [n for n in sizes if type(n) is not int or n < 1]:
        raise ValueError(f"batches: expected whole numbers of at least 1, got {bad[0]!r}")
    if not names:
        raise ValueError("devices: expected at least one name, as 'a100'")
    options, targets = options.checked(), [named(name) for name in names]
    progress = options.progress
    shapes: Any = options.shapes  # one size of each input
    source = source_of(model, Examples(options.example_inputs, shapes, bool(sizes)), progress)
    sha256 = sha256_of(source)
    loaded, sized = load(
        source,
        lambda m: [importer.at_batch(m, shapes or {}, n) for n in sizes] or [shapes],
        options.sparsity == "force",
    )
    found: list[Outlook] = []
    known: ranges.Known = {}  # networks too large for a run at each batch are run for one image
    for shape in sized:
        fitted, reached = fit(loaded, lowered(loaded, shape, progress), None, progress, known)
        network = alternatives(fitted)
        inputs = {t.name: t.shape for t in network.inputs}
        ends = io_formats.resolve(None, network.inputs, "input") | io_formats.resolve(None, network.outputs, "output")
        for target in targets:
            progress(Progress("device", f"{target.title}{f', batch {next(iter(inputs.values()))[0]}' if sizes else ''}"))
            planner = Planner(target, make_timer(target), options, ends)
            planned = PlannedNetwork(*planner.in_pieces(*planner(network)), reached, fitted=fitted)
            explained, pruned = explain(loaded, planned, planner, {}), with_pruned(loaded, planned, planner).if_pruned
            found.append(
                Outlook(Model(network.name, sha256), target, timing_record(target), *explained, options.risk, inputs, pruned)
            )
    return Plans(tuple(found), sizes)
