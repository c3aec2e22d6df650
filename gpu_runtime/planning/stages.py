"""The stages between a model and the contents of its engine, in order: load, fit into types, plan, compare, explain. Each takes
the records of the one before; pipeline.py calls them."""

from __future__ import annotations

import functools
import gc
import math
import warnings
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from cuda_kernels.compile import installed_nvrtc, source_hash
from cuda_kernels.device import Device
from gpu_runtime import installed_version
from gpu_runtime.engine import Engine
from gpu_runtime.errors import ModelError
from gpu_runtime.frontend import importer
from gpu_runtime.frontend.queries import name_of, shape_of
from gpu_runtime.frontend.source import Source, stem_of
from gpu_runtime.progress import Listener, Progress, compiling, ignore
from gpu_runtime.runtime.findings import (
    Apart,
    Choices,
    Compared,
    RangeRecord,
    Replaced,
    Solution,
    Sparsity,
    SparsityRecord,
    Tuned,
)
from gpu_runtime.runtime.plan_record import EngineRecord, Flags, Model, PlanRecord, Producer, Profile, Section
from gpu_runtime.runtime.sizes import batch_of
from gpu_runtime.target import Tuning, timing_record
from gpu_runtime.text import clipped, printable, size_text
from tactics import predict
from tactics.format import DTYPES

if TYPE_CHECKING:
    from gpu_runtime import deviations
    from gpu_runtime.assembly import assemble
    from gpu_runtime.explain.reasons import Patterns
    from gpu_runtime.network import Network
    from gpu_runtime.planning import io_formats, tables
    from gpu_runtime.precision import ranges
    from tactics.format import Format
    from tactics.measure.timing import Timer
    from tactics.planner.plan import Plan

Shapes = Mapping[str, tuple[int, ...]]
ROUNDS = 4  # of putting layers into FP32 that a calibration input shows to need it, each with a plan of its own


@dataclass(frozen=True, slots=True)
class Planner:
    """A network's tables for one target, and the best plan; where tactics are timed step by step, once those of the plan and of
    all that is said of it are. `ends`: the formats that inputs and outputs may have; `pieces`: whether batches may run in
    pieces; `activations`: bytes that a plan's activations may take, None: any number."""

    target: Device
    sparsity: Sparsity
    timer: Timer
    ends: Mapping[str, tuple[Format, ...]]
    progress: Listener
    exhaustive: bool = False
    scratch: int | None = None
    risk: float | None = predict.RISK
    tuning: Tuning = Tuning()
    pieces: bool = True
    activations: int | None = None

    def __call__(self, network: Network) -> tuple[tables.Table, Plan]:
        from gpu_runtime.planning import tables
        from gpu_runtime.planning.counterfactuals import launched, quoted
        from gpu_runtime.planning.surroundings import half_zeros
        from tactics.planner.plan import solve

        self.timer.zeros.update(half_zeros(network))
        while True:
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
            chosen = solve(table.graph)
            plans = launched(table, chosen.options, chosen.entries, chosen.reformats), quoted(table, chosen)
            if not any(map(self.timer.refine, plans)):
                return table, chosen

    def in_pieces(self, table: tables.Table, chosen: Plan) -> tuple[tables.Table, Plan]:
        """The best plan with layers that run pieces of the batch, where that takes less time than the one given."""
        from gpu_runtime.planning import batch_pieces

        pieces = batch_pieces.worthwhile(table, chosen) if self.pieces else None
        if pieces is None:
            return table, chosen
        found = self(batch_pieces.offer(table.network, pieces, self.target, chosen))
        return found if found[1].total_ps < (1 - batch_pieces.LEAST_GAIN) * chosen.total_ps else (table, chosen)

    def settled(self, table: tables.Table, chosen: Plan, reached: ranges.Ranges) -> Planned:
        """The plan that is taken, `in_pieces` or not. Where its activations take more than they may, the fastest one found in
        pieces that fits, see docs/plans.md; ModelError where none does."""
        from gpu_runtime.assembly import assemble
        from gpu_runtime.planning import batch_pieces

        free = self.in_pieces(table, chosen)
        if self.activations is None or not self.pieces or assemble.arena_bytes(*free) <= self.activations:
            return Planned(*free, reached)
        allowed, takes = self.activations, [whole := assemble.arena_bytes(table, chosen)]
        best = (table, chosen) if whole <= allowed else None

        def enough(pieces: batch_pieces.Pieces) -> bool:
            """Whether no more blocks are to run in pieces: the plan fits, or takes no less time than one that does, as it would
            with more of them, or no tactic runs one of them in pieces."""
            nonlocal best
            try:
                found = self(batch_pieces.offer(table.network, pieces, self.target, chosen))
            except ModelError:
                return True
            if best is not None and found[1].total_ps >= best[1].total_ps:
                return True
            takes.append(assemble.arena_bytes(*found))
            if takes[-1] <= allowed:
                best = found
            return takes[-1] <= allowed

        for rising in batch_pieces.smaller(table.network):
            bisect_left(rising, True, key=enough)
        if best is None:
            raise self.too_large(table.network, min(takes), tried=len(takes) > 1)
        return Planned(*best, reached, whole=None if best[1] is chosen else (chosen.us, whole))

    def too_large(self, network: Network, least: int, tried: bool) -> ModelError:
        """Activations take `least` bytes, which is too much; `tried`: with the batch in pieces."""
        how = "and no layer can run in pieces of the batch" if self.pieces else "and --batchInvariant allows no pieces"
        how, allowed = "at least, in pieces of the batch" if tried else how, self.activations or 0
        return ModelError(
            f"{network.name} at batch {network.images}: activations need {size_text(least)} {how}, but {size_text(allowed)} "
            f"({allowed} bytes) are allowed: allow as much (--memPoolSize=activations:{least}B), or give a smaller batch"
        )


@dataclass(frozen=True, slots=True)
class Planned:
    """The plan that was chosen, and what the network's tensors reach; `own`: the batch's own plan, where one was chosen
    for all batches, and `dense_us`: the time of that one without sparse kernels; `measured_us`, `apart`, `replaced`: of the
    plan as a whole, where it ran on a GPU; `whole`: microseconds of the plan without pieces and bytes of its activations, where
    a limit of these is why there are others."""

    table: tables.Table
    chosen: Plan
    reached: ranges.Ranges
    own: Plan | None = None
    dense_us: float | None = None
    measured_us: float | None = None
    apart: tuple[Apart, ...] = ()
    replaced: tuple[Replaced, ...] = ()
    whole: tuple[float, int] | None = None


def load(
    source: Path | Source,
    sizes: Callable[[importer.Loaded], list[Shapes | None]],
    prune: bool,
    save_pruned: BinaryIO | None = None,
) -> tuple[importer.Loaded, list[Shapes | None]]:
    """The model, and the sizes of its inputs for each plan; pruned, branches that may become one convolution with one pattern
    for all of them, which takes an import before to find."""
    loaded = importer.load(source)
    points = sizes(loaded)
    if not prune:
        return loaded, points
    from gpu_runtime.fusion import fuse

    before = importer.sized(loaded, points[0])
    points[0] = {name_of(v): shape_of(v) for v in fuse.graph_of(before).inputs}  # of all: what was chosen is not said twice
    return importer.load(source, prune=True, masks=fuse.common_masks(before), save_pruned=save_pruned), points


def lowered(loaded: importer.Loaded, shapes: Shapes | None, progress: Listener = ignore) -> Network:
    """The network for inputs of these shapes, in FP16's types as they come."""
    from gpu_runtime.fusion import fuse
    from gpu_runtime.lowering import lower

    progress(Progress("lower", stem_of(loaded.source)))
    network = lower.lower(fuse.fuse(importer.sized(loaded, shapes)))
    gc.collect(0)  # the model's graph, in cycles with its weights
    return network


def fit(
    loaded: importer.Loaded,
    plain: Network,
    calibration: Mapping[str, Any] | None,
    progress: Listener,
    known: ranges.Known | None = None,
    precisions: Mapping[str, str] | None = None,
) -> tuple[Network, ranges.Ranges]:
    """The network in types that hold its tensors, and what these reach; warns of what FP16 cannot hold. What rules and the
    user ask for is FP32, and operators near their cliffs, unless the plan itself is to be compared with FP32."""
    from gpu_runtime.precision import cliffs, execution, ranges, rules, sample

    progress(Progress("range", plain.name))
    smaller = functools.partial(sample.smaller, loaded, plain)
    network, found = ranges.fit(plain, calibration, smaller, loaded.maskable, known)
    progress(Progress("range", found.source))
    if not found.seen:
        text = f"{network.name}: FP16's range is {found.source}; --calibration FILE.npz checks it, else a run shows overflow"
        warnings.warn(printable(text), RuntimeWarning, stacklevel=5)
    if found.stuck:
        reached = dict(found.high)
        reaching = ", ".join(f"{t!r} reaches {reached[t]:.4g} ({why})" for t, why in found.stuck[:3])
        text = f"{network.name}: on {found.source}, {reaching}: FP16's maximum is {ranges.FP16_MAX:g}"
        warnings.warn(printable(text), RuntimeWarning, stacklevel=5)
    network, kept, beyond = rules.keep(network, precisions)
    found = replace(found, single=(*found.single, *kept.items()))
    for text in beyond[:1]:
        warnings.warn(printable(f"{network.name}: {text}"), RuntimeWarning, stacklevel=5)
    if calibration is None or (large := execution.too_large(network, execution.PLAN)):
        if calibration is not None:
            found = replace(found, compared=Compared(f"{large}: instead, operators with known numerical risks compute in FP32"))
        network, kept = cliffs.keep(network)
        found = replace(found, single=(*found.single, *kept.items()))
    return network, found


def ends_of(
    network: Network, reached: ranges.Ranges, inputs: io_formats.Spec | None, outputs: io_formats.Spec | None
) -> dict[str, tuple[Format, ...]]:
    """The formats that each input and output may have; warns of an output that FP16 cannot hold."""
    from gpu_runtime.planning import io_formats

    ends = io_formats.resolve(inputs, network.inputs, "input") | io_formats.resolve(outputs, network.outputs, "output")
    for t in network.outputs:
        if network.type(t.name).fixed and network.is_fp32(t.name) and any(f.dtype == "fp16" for f in ends[t.name]):
            text = f"{network.name}: {dict(reached.single)[t.name]}: request this output as fp32"
            warnings.warn(printable(text), RuntimeWarning, stacklevel=5)
    return ends


def shared(network: Network, first: Network) -> Network:
    """The network with the very arrays of `first` where it has equal weights: plans of many batches hold them once."""
    known = {op.name: op.weights for op in first.ops}

    def same(name: str, weights: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        others = known.get(name, {})
        return {k: others[k] if k in others and np.array_equal(others[k], w) else w for k, w in weights.items()}

    return replace(network, ops=tuple(replace(op, weights=same(op.name, op.weights)) for op in network.ops))


def settle(
    network: Network,
    found: ranges.Ranges,
    calibration: Mapping[str, Any] | None,
    planner: Planner,
    first: Network | None = None,
) -> Planned:
    """Plans are made, run on the calibration input and compared with FP32 until no layer asks for more FP32, ROUNDS times at
    most; `found` is completed with what was compared. `first`: of another batch, whose equal weights are taken."""
    from gpu_runtime.rewrites.alternatives import alternatives

    options = alternatives(network)
    table, chosen = planner(shared(options, first) if first else options)
    if calibration is None or found.compared:
        return planner.settled(table, chosen, found)
    from gpu_runtime.precision import cliffs

    for done in range(ROUNDS + 1):
        planner.progress(Progress("compare", network.name))
        result = _deviation(table, chosen, calibration, planner)
        grown, more = cliffs.heed(network, result.causes)
        if done == ROUNDS or grown is network:
            break
        network, found = grown, replace(found, single=(*found.single, *more.items()))
        table, chosen = planner(alternatives(network))
    if result.far:
        text = "; ".join(result.text(t) for t in result.far[:3])
        warnings.warn(printable(f"{network.name}: on the calibration input, {text}"), RuntimeWarning, stacklevel=5)
    moved = sorted(t for t, of in network.types.items() if of.copies)
    compared = replace(result.record(), rounds=done, moved=tuple(moved))
    return planner.settled(table, chosen, replace(found, compared=compared))


def trial(table: tables.Table, chosen: Plan, target: Device) -> Engine:
    """An engine of a plan, to run it before it is explained."""
    from gpu_runtime.assembly import assemble

    data, arena = assemble.assemble(table, chosen)
    unexplained = SparsityRecord("disable", (), (), ())
    plans = (plan_record(data, (unexplained, solution_of(chosen))),)
    return Engine(engine_record(Model(table.network.name), target, Flags("disable"), data.sections, plans), arena)


def _deviation(table: tables.Table, chosen: Plan, calibration: Mapping[str, Any], planner: Planner) -> deviations.Deviations:
    """The plan is run on the calibration input, each layer beside the same in FP32."""
    from gpu_runtime import deviations

    target, compiled = planner.target, compiling(planner.progress)
    engine = trial(table, chosen, target)
    feeds = {i.name: np.asarray(calibration[i.name]).astype(DTYPES[i.dtype]) for i in engine.plan.inputs}
    with engine.context(device="cuda" if target.measured else "emulator", graph=False, progress=compiled) as ctx:
        return deviations.compare(table, chosen, feeds, ctx.trace(feeds))


def explain(loaded: importer.Loaded, planned: Planned, planner: Planner, known: Patterns) -> tuple[SparsityRecord, Solution]:
    """Everything that is known before weights are packed; `known`: of weights, from plans for other batches."""
    from gpu_runtime.explain import reasons
    from gpu_runtime.planning.counterfactuals import counterfactuals

    table, chosen = planned.table, planned.chosen
    planner.progress(Progress("explain", table.network.name))
    others = counterfactuals(table, planned.own or chosen)
    rivals = others.rivals
    if planned.own:
        rivals = replace(rivals, all_dense_us=planned.dense_us, own_us=planned.own.us)
    if planned.whole:
        rivals = replace(rivals, whole_us=planned.whole[0], whole_bytes=planned.whole[1])
    explained = reasons.sparsity(
        table,
        chosen,
        others,
        planner.sparsity,
        own=planned.own,
        all_dense_us=rivals.all_dense_us,
        measured=table.device.measured,
        single={t: clipped(why) for t, why in planned.reached.single if table.network.type(t).fixed},
        stored=loaded.stored,
        patterns=known,
    )
    energy = loaded.before.lost_energy if loaded.before else None
    explained = replace(explained, pruned=loaded.pruned, not_pruned=loaded.not_pruned, pruned_energy=energy)
    return explained, replace(
        solution_of(chosen),
        rivals=rivals,
        tuned=_tuned(table, chosen, planner),
        measured_us=planned.measured_us,
        apart=planned.apart,
        replaced=planned.replaced,
    )


def _tuned(table: tables.Table, chosen: Plan, planner: Planner) -> Tuned | None:
    """What was timed for the plan; None where that is everything."""
    ops = [(op.problem, times) for op, times in zip(table.network.ops, table.times, strict=True)]
    timed = {(p, t): time.timed for p, times in (*ops, *table.reformats.items()) for t, time in times.items()}
    if all(timed.values()):
        return None
    count, early = sum(timed.values()), planner.timer.early
    missing = tuple(clipped(name) for name, e in chosen.entries.items() if not e.timed)
    return Tuned(count, len(timed) - count, 0.0 if early else planner.tuning.sigmas, early, missing)


def plan_record(
    data: assemble.Assembled,
    explained: tuple[SparsityRecord, Solution],
    reached: ranges.Ranges | None = None,
    choices: Choices | None = None,
    renamed: Mapping[str, str] = MappingProxyType({}),
) -> PlanRecord:
    """`renamed`: sections of the plan that others have in the engine."""
    sparsity, solution = explained
    return PlanRecord(
        data.inputs,
        data.outputs,
        data.layers,
        data.memory,
        solution,
        sparsity,
        _range_record(reached) if reached else None,
        choices,
        {**{name: renamed.get(first, first) for name, first in data.renamed.items()}, **renamed},
    )


def engine_record(
    model: Model,
    target: Device,
    flags: Flags,
    sections: tuple[Section, ...],
    plans: Sequence[PlanRecord],
    profiles: tuple[Profile, ...] = (),
    driver: str | None = None,
) -> EngineRecord:
    """The record that shows the plan of the first profile's optimal batch. `driver`: as of `timing_record`."""
    producer, timing, shown = Producer(installed_version(), installed_nvrtc()), timing_record(target, driver), 0
    if profiles:
        shown = next(number for number in profiles[0].plans if batch_of(plans[number], profiles[0]) == profiles[0].opt)
    return EngineRecord(model, target, timing, producer, source_hash(), flags, sections, tuple(plans), profiles, shown)


def _range_record(found: ranges.Ranges) -> RangeRecord:
    """`found` as JSON takes it, which has no infinities: null stands for what FP32 cannot hold either."""
    high = tuple((t, v if math.isfinite(v) else None) for t, v in found.high)
    single, stuck = (tuple((t, clipped(why)) for t, why in rows) for rows in (found.single, found.stuck))
    return RangeRecord(clipped(found.source), high, found.exponents, single, stuck, found.compared, found.masked)


def solution_of(chosen: Plan) -> Solution:
    return Solution(chosen.us, chosen.status, chosen.method, chosen.width, chosen.gap)
