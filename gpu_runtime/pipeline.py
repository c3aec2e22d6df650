"""The pipeline, stages in order: an ONNX file in, an engine out. A stage is imported where it begins."""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, TypeAlias, get_args

import numpy as np

from cuda_kernels.compile import compile_many
from cuda_kernels.device import Device, named
from gpu_runtime.engine import Engine, join, seal
from gpu_runtime.errors import ModelError, bounded
from gpu_runtime.frontend import importer
from gpu_runtime.frontend.source import ModelLike, Source, sha256_of, source_of
from gpu_runtime.planning import points, stages
from gpu_runtime.planning.stages import Planned, Planner
from gpu_runtime.progress import LOGGER, Listener, Progress, compiling, ignore, logged, report
from gpu_runtime.runtime.fields import LARGEST
from gpu_runtime.runtime.findings import Solution, Sparsity, SparsityRecord
from gpu_runtime.runtime.plan_record import Flags, LaunchStep, Model, Outlook, Profile
from gpu_runtime.target import LEVEL, make_timer, placed, timing_record, tuning
from gpu_runtime.text import WIDTH
from tactics import predict

if TYPE_CHECKING:
    from gpu_runtime.explain import reasons
    from gpu_runtime.network import Network
    from gpu_runtime.planning import io_formats
    from gpu_runtime.plans import Plans
    from gpu_runtime.precision import ranges
    from tactics.measure.spread import Spread

PRECISIONS = ("fp32", "fp32_output", "fp16")  # of an operator: all of it in FP32, its result alone, as without
SPARSITY: tuple[Sparsity, ...] = get_args(Sparsity)
Explained = tuple[SparsityRecord, Solution]
# A network, what its tensors reach, and the calibration input at its size.
Fitted: TypeAlias = "tuple[Network, ranges.Ranges, Mapping[str, Any] | None]"
Shapes = Mapping[
    str, Sequence[int] | Sequence[Sequence[int]]
]  # of dynamic inputs: a shape, or the smallest, optimal and largest


@bounded
def build(
    model: ModelLike,
    *,
    example_inputs: Sequence[Any] | None = None,
    sparsity: str = "disable",
    device: str | Device | None = None,
    shapes: Shapes | Sequence[Shapes] | None = None,
    batch_invariant: bool = False,
    timing_cache: str | os.PathLike | Literal[False] | None = None,
    only_cached_times: bool = False,
    save_pruned: str | os.PathLike | BinaryIO | None = None,
    embed_cubins: bool = False,
    input_formats: io_formats.Spec | None = None,
    output_formats: io_formats.Spec | None = None,
    exhaustive: bool = False,
    optimization_level: int = LEVEL,
    tuning_time: float | Callable[[], bool] | None = None,
    workspace: int | None = None,
    activations: int | None = None,
    risk: float = predict.RISK,
    calibration: Mapping[str, Any] | None = None,
    precisions: Mapping[str, str] | None = None,
    log: Callable[[str], None] | None = None,
    ray: str | bool | Spread | None = None,
    progress: Listener = ignore,
) -> Engine:
    """Build an engine from an ONNX model: a path, a ModelProto, its bytes, an open file, or a torch.nn.Module.

    `example_inputs`: the arguments of a torch.nn.Module's forward. `sparsity`: "disable"; "enable" considers 2:4 kernels for
    weights that have the pattern; "force" first prunes the initializers to it (`save_pruned`, a path or a file, gets that model
    at the end). `device`: None: the GPU at hand, measured, else an H200, predicted; a name ("a100"): predicted. `shapes`: of
    dynamic inputs, or three each (smallest, optimal, largest) for a range of batches; a list of such for several sizes of
    image. `batch_invariant`: one tactic per layer for all batches: an image gets the same bits in each. `timing_cache`:
    file of times to use and extend, False: none; `only_cached_times`: measure nothing, ValueError where a time is not in it.
    `input_formats`, `output_formats`: memory formats, as "fp16:hwc8" for all, ["chw", "uint8:hwc"] or by name, see io_formats;
    without, linear in the model's types. `exhaustive`: time also what must take the same time. `optimization_level`: on a GPU,
    0 predicts times, 5 measures all, 1 to 4 those that plan and explanation need; `tuning_time`: its seconds, or a function
    that says when they are over; `ray`: the address of a Ray cluster whose GPUs time them, True: of this machine's.
    `workspace`: scratch bytes of a tactic, None: any number; `activations`: bytes of tensors and scratch together, for which a
    batch runs in pieces if need be. `risk`: the least P(sparse kernel faster), 0.5 to below 1, with which predicted plans take
    it. `calibration`: inputs as for `Context.run`: tensors near FP16's limit in an FP32 run of them are stored smaller or in
    FP32, and what rounding harms in a run of the plan reads FP32; without, by random values and known risks. `precisions`: name
    or pattern -> "fp32", "fp32_output", "fp16". `log` gets all timings. Raises ModelError, ValueError for an argument, OSError
    for `save_pruned`, InternalError for bugs.

    >>> build("model.onnx", sparsity="enable", device="a100", shapes={"x": (2, 1, 8, 8)}).sparsity.rows[0].reason
    'channels_not_multiple_of_4'
    """
    _check_arguments(save_pruned, timing_cache, workspace, activations, log, progress, precisions)
    target, tuned = placed(tuning(optimization_level, tuning_time, batch_invariant), device, ray)
    mode, asked, wanted = _mode(sparsity), _risk(risk, target), points.asked(shapes)
    source, progress, pruned = source_of(model, example_inputs), logged(progress), None if save_pruned is None else io.BytesIO()
    progress(Progress("import", str(source)))
    fitted, exact, loaded = _fitted(source, wanted, shapes, pruned, sparsity == "force", calibration, progress, precisions)
    timer = make_timer(target, timing_cache, progress, tuned, only_cached_times, [network for network, *_ in fitted])
    planner = Planner(target, mode, timer, {}, progress, exhaustive, workspace, asked, tuned, not batch_invariant, activations)
    profiles, planned = _planned(fitted, exact, wanted, (input_formats, output_formats), planner, batch_invariant)
    explained, given = _explained(loaded, planned, planner, log), points.optimal(wanted, shapes)
    return _reported(_packed(source, planned, explained, given, profiles, planner, embed_cubins), save_pruned, pruned)


def _fitted(
    source: Path | Source,
    wanted: Sequence[points.Asked],
    given: Shapes | Sequence[Shapes] | None,
    pruned: BinaryIO | None,
    prune: bool,
    calibration: Mapping[str, Any] | None,
    progress: Listener,
    precisions: Mapping[str, str] | None,
) -> tuple[list[Fitted], list[str | None], importer.Loaded]:
    """The network at each size in types that hold its tensors; for each profile why no batch may be padded, None where any; and
    what was loaded without the weights that take memory."""
    loaded, sizes = stages.load(source, lambda m: points.sizes(m, wanted, given), prune, pruned)
    plain: list[Network] = []
    for shapes in sizes:
        lowered = stages.lowered(loaded, shapes, progress)
        plain.append(stages.shared(lowered, plain[0]) if plain else lowered)
    points.check_first(loaded.source, wanted, plain)
    exact = points.meeting(loaded, wanted, plain)
    known: ranges.Known = {}
    fitted = []
    for shapes, lowered in zip(sizes, plain, strict=True):
        rows = points.repeated(calibration, shapes) if wanted else calibration
        fitted.append((*stages.fit(loaded, lowered, rows, progress, known, precisions), rows))
    return fitted, exact, replace(loaded, large={})


def _planned(
    fitted: Sequence[Fitted],
    exact: Sequence[str | None],
    wanted: Sequence[points.Asked],
    formats: tuple[io_formats.Spec | None, io_formats.Spec | None],
    planner: Planner,
    alike: bool,
) -> tuple[tuple[Profile, ...], list[Planned]]:
    """The profiles, and their plans that are worth a place in the engine. `formats`: of the inputs, and of the outputs;
    `alike`: whether one tactic per layer is to compute all batches."""
    planned: list[Planned] = []
    planners: list[Planner] = []
    for network, reached, rows in fitted:
        planners.append(replace(planner, ends=stages.ends_of(network, reached, *formats)))
        planned.append(stages.settle(network, reached, rows, planners[-1], planned[0].table.network if planned else None))
    profiles, stay = points.kept(wanted, planned, exact)
    if alike:
        return profiles, points.alike(profiles, [planned[i] for i in stay])
    if not planner.tuning.whole(planner.target) or planner.timer.early:
        return profiles, [planned[i] for i in stay]
    from gpu_runtime.planning import in_network

    return profiles, [in_network.settle(planned[i], planners[i]) for i in stay]


def _reported(engine: Engine, path: str | os.PathLike | BinaryIO | None, pruned: io.BytesIO | None) -> Engine:
    """The engine, once the pruned model is written and the logger is told."""
    if path is not None and pruned is not None:
        importer.save(path, pruned.getvalue())

    def summary() -> str:
        from gpu_runtime.explain import log

        return log.log_text(engine.record, WIDTH.get(), log.most_lines(engine.record), wrapped=False)

    report(summary)
    return engine


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
    loaded, sizes = stages.load(
        source_of(model),
        lambda m: [importer.at_batch(m, shapes or {}, n) for n in batches] or [shapes],
        sparsity == "force",
    )
    found: list[Outlook] = []
    known: ranges.Known = {}  # networks too large for a run at each batch are run for one image
    for shape in sizes:
        network, reached = stages.fit(loaded, stages.lowered(loaded, shape, progress), None, progress, known)
        network = alternatives(network)
        inputs = {t.name: t.shape for t in network.inputs}
        ends = io_formats.resolve(None, network.inputs, "input") | io_formats.resolve(None, network.outputs, "output")
        for target in targets:
            progress(Progress("device", f"{target.title}{f', batch {next(iter(inputs.values()))[0]}' if batches else ''}"))
            planner = Planner(target, mode, make_timer(target, None), ends, progress, risk=_risk(risk, target))
            sparse, solution = stages.explain(loaded, Planned(*planner.in_pieces(*planner(network)), reached), planner, {})
            found.append(Outlook(Model(network.name), target, timing_record(target), sparse, solution, risk, inputs))
    return Plans(tuple(found), batches)


def _mode(sparsity: str) -> Sparsity:
    """One of SPARSITY. Raises ValueError for another."""
    for mode in SPARSITY:
        if mode == sparsity:
            return mode
    raise ValueError(f"sparsity: expected one of {', '.join(SPARSITY)}, got {sparsity!r}")


def _check_arguments(save_pruned: str | os.PathLike | BinaryIO | None, cache: object, *others: object) -> None:
    """TypeError for an argument of `build` that is none of what it may be, OSError for a file that could not be written.
    `others`: workspace, activations, log, progress and precisions."""
    given = dict(zip(("workspace", "activations", "log", "progress", "precisions"), others, strict=True))
    paths, given["timing_cache"] = (str, os.PathLike), cache
    for name in ("workspace", "activations"):
        if isinstance(nbytes := given[name], int) and not 0 <= nbytes <= LARGEST:
            raise ValueError(f"{name}: expected 0 to {LARGEST} bytes, got {nbytes}")
    for name, wanted, fits in (
        ("timing_cache", "a path, None or False", cache is None or cache is False or isinstance(cache, paths)),
        *((n, "a number of bytes or None", type(given[n]) in (int, type(None))) for n in ("workspace", "activations")),
        (
            "precisions",
            f"names or patterns and one of {', '.join(PRECISIONS)} each, or None",
            _are_precisions(given["precisions"]),
        ),
        ("log", "a function of a text, such as print, or None", given["log"] is None or callable(given["log"])),
        ("progress", "a function of a gpu_runtime.progress.Progress", callable(given["progress"])),
    ):
        if not fits:
            raise TypeError(f"{name}: expected {wanted}, got {given[name]!r}")
    importer.check_target(save_pruned)


def _are_precisions(given: object) -> bool:
    if not isinstance(given, Mapping):
        return given is None
    return all(isinstance(name, str) and name and kind in PRECISIONS for name, kind in given.items())


def _risk(risk: float, target: Device) -> float | None:
    """None where times are measured: they need no premium."""
    if not isinstance(risk, (int, float)) or not 0.5 <= risk < 1:
        raise ValueError(f"risk: expected a probability from 0.5 to below 1, got {risk!r}")
    return None if target.measured else risk


def _explained(
    loaded: importer.Loaded, planned: Sequence[Planned], planner: Planner, log: Callable[[str], None] | None
) -> list[Explained]:
    """Each plan's reasons; `log` and the logger get the timings of each layer. The timer, which is asked no more, is closed."""
    patterns: reasons.Patterns = {}
    explained = [stages.explain(loaded, p, planner, patterns) for p in planned]
    planner.timer.close()
    if log or LOGGER.isEnabledFor(logging.DEBUG):
        from gpu_runtime.explain import autotuning

        for p in planned:
            for block in autotuning.log(p.table, p.chosen, planner.timer.failures, exhaustive=planner.exhaustive):
                LOGGER.debug("%s", block)
                if log:
                    log(block)
    return explained


def _packed(
    source: Path | Source,
    planned: Sequence[Planned],
    explained: Sequence[Explained],
    shapes: points.Shapes,
    profiles: tuple[Profile, ...],
    planner: Planner,
    embed_cubins: bool,
) -> Engine:
    """Weights packed, memory placed, launches derived, all of it checked as reading would."""
    from gpu_runtime.assembly import assemble
    from gpu_runtime.explain import what_if

    model, parts = Model(planned[0].table.network.name, sha256_of(source)), []
    for p in planned:
        planner.progress(Progress("pack", p.table.network.name))
        parts.append(assemble.assemble(p.table, p.chosen))
        takes = parts[-1][0].memory.activation_bytes
        if planner.activations is not None and takes > planner.activations:
            raise planner.too_large(p.table.network, takes, tried=False)
    arena, sections, renamed = join([(arena, data.sections) for data, arena in parts])
    plans = [
        stages.plan_record(data, found, p.reached, what_if.store(p.table), names)
        for (data, _), found, p, names in zip(parts, explained, planned, renamed, strict=True)
    ]
    flags = Flags(planner.sparsity, shapes, planner.scratch, planner.risk, not planner.pieces, planner.activations)
    record = stages.engine_record(model, planner.target, flags, sections, plans, profiles, planner.timer.driver)
    try:
        record = seal(record, arena)
    except ValueError as e:
        raise ModelError(f"{model.name}: {e}") from None
    cubins = {}
    if embed_cubins:
        from gpu_runtime.runtime import feeds
        from gpu_runtime.runtime.steps import kernel_key

        edges = [(step.kernel, step.values) for plan in record.plans for step in feeds.reformats(plan).values()]
        steps = [step.key for plan in record.plans for step in plan.steps if isinstance(step, LaunchStep)]
        keys = dict.fromkeys([*steps, *edges])
        wanted = [(kernel, dict(values), planner.target.sm) for kernel, values in keys]
        compiled = compile_many(wanted, progress=compiling(planner.progress))
        cubins = {kernel_key(*k): c.cubin for k, c in zip(keys, compiled, strict=True)}
    return Engine(record, arena, cubins, checked=True)
