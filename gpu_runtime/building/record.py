"""Explains a plan, and makes the records that an engine stores."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

from cuda_kernels.compile import installed_nvrtc, source_hash
from cuda_kernels.device import Device
from gpu_runtime import installed_version
from gpu_runtime.assembly import assemble
from gpu_runtime.building.planner import PlannedNetwork, Planner
from gpu_runtime.building.target import timing_record
from gpu_runtime.engine import Engine
from gpu_runtime.explain import reasons
from gpu_runtime.frontend import importer
from gpu_runtime.planning import tables
from gpu_runtime.planning.counterfactuals import counterfactuals
from gpu_runtime.progress import Progress
from gpu_runtime.rewrites import integers
from gpu_runtime.runtime.findings import Choices, IfPruned, RangeRecord, Solution, SparsityRecord, Tuned
from gpu_runtime.runtime.plan_record import EngineRecord, Flags, Model, PlanRecord, Producer, Profile, Section
from gpu_runtime.runtime.sizes import batch_of
from gpu_runtime.text import clipped
from tactics.format import is_bytes
from tactics.planner.plan import Plan


def explain(
    loaded: importer.Loaded, planned: PlannedNetwork, planner: Planner, known: reasons.Patterns
) -> tuple[SparsityRecord, Solution]:
    """Returns the explanation and the solution, before weights are packed; `known`: patterns of weights, from plans for other
    batches.
    """
    table, chosen = planned.table, planned.chosen
    planner.options.progress(Progress("explain", table.network.name))
    others = counterfactuals(table, planned.own or chosen)
    rivals = others.rivals
    if planned.own:
        rivals = replace(rivals, all_dense_us=planned.dense_us, own_us=planned.own.us)
    if planned.whole:
        rivals = replace(rivals, whole_us=planned.whole[0], whole_bytes=planned.whole[1])
    facts = reasons.Known(
        table,
        chosen,
        others,
        planner.options.sparsity,
        table.device.measured,
        own=planned.own,
        single=fp32_reasons(planned),
        stored=loaded.stored,
        patterns=known,
        forced=planner.options.forced,
    )
    explained = reasons.sparsity(facts, rivals.all_dense_us)
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


def fp32_reasons(planned: PlannedNetwork) -> dict[str, str]:
    """Returns FP32 tensor -> the sentence on why it cannot be FP16."""
    return {t: clipped(why) for t, why in planned.reached.single if planned.table.network.type(t).fixed}


def _tuned(table: tables.Table, chosen: Plan, planner: Planner) -> Tuned | None:
    """Returns how many tactics were timed, and how many not; None if all were."""
    every = [*{id(times): times for times in table.times}.values(), *table.reformats.values()]  # ops alike share one
    if all(time.timed for times in every for time in times.values()):
        return None
    ops = [(op.problem, times) for op, times in zip(table.network.ops, table.times, strict=True)]
    timed = {(p, t): time.timed for p, times in (*ops, *table.reformats.items()) for t, time in times.items()}
    count, early = sum(timed.values()), planner.timer.early
    missing = tuple(clipped(name) for name, e in chosen.entries.items() if not e.timed)
    return Tuned(count, len(timed) - count, 0.0 if early else planner.options.sigmas, early, missing)


def trial(table: tables.Table, chosen: Plan, target: Device) -> Engine:
    """Makes an engine of a plan, to run it before it is explained."""
    data, arena = assemble.assemble(table, chosen)
    unexplained = SparsityRecord("disable", (), (), ())
    plans = (plan_record(data, (unexplained, solution_of(chosen))),)
    return Engine(engine_record(Model(table.network.name), target, Built(Flags("disable"), data.sections, plans)), arena)


def plan_record(
    data: assemble.Assembled,
    explained: tuple[SparsityRecord, Solution],
    reached: RangeRecord | None = None,
    choices: Choices | None = None,
    renamed: Mapping[str, str] = MappingProxyType({}),
    if_pruned: IfPruned | None = None,
) -> PlanRecord:
    """Makes the record of one plan: its tensors, layers and memory from `data`, its sparsity and solution from `explained`.

    `reached`: the tensors' ranges, for a build that scaled tensors, else None; `choices`: the alternatives that what-if may
    reload, or None; `renamed`: the plan's names of sections -> their names in the engine.
    """
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
        if_pruned,
    )


def precisions(table: tables.Table, chosen: Plan) -> dict[str, str]:
    """Returns layer with weights -> why it is in FP16, or "" if it is in INT8; {} for a network without quantised tensors."""
    network, found = table.network, {}
    if not any(of.whole for of in network.types.values()) and not integers.offered(network):
        return {}
    for op in network.ops:
        entry = chosen.entry_of(op.name, op.when)
        if not op.layer or entry is None or entry.tactic is None:
            continue
        found[op.layer] = "" if is_bytes(entry.tactic.ins[0]) else integers.reason_against(network, op)
    return found


class Built(NamedTuple):
    """The results of a build of one model: its flags, its sections, its plans and their profiles."""

    flags: Flags
    sections: tuple[Section, ...]
    plans: Sequence[PlanRecord]
    profiles: tuple[Profile, ...] = ()


def engine_record(model: Model, target: Device, built: Built, driver: str | None = None) -> EngineRecord:
    """Makes the engine's record, which shows the plan of the first profile's optimal batch. `driver`: as for
    `timing_record`.
    """
    producer, timing, shown = Producer(installed_version(), installed_nvrtc()), timing_record(target, driver), 0
    flags, sections, plans, profiles = built
    if profiles:
        shown = next(number for number in profiles[0].plans if batch_of(plans[number], profiles[0]) == profiles[0].opt)
    return EngineRecord(model, target, timing, producer, source_hash(), flags, sections, tuple(plans), profiles, shown)


def _range_record(found: RangeRecord) -> RangeRecord:
    """Converts `found` for JSON, which has no infinities: null stands for values that FP32 cannot hold either."""
    high = tuple((t, v if v is not None and math.isfinite(v) else None) for t, v in found.high)
    single, stuck = (tuple((t, clipped(why)) for t, why in rows) for rows in (found.single, found.stuck))
    return replace(found, source=clipped(found.source), high=high, single=single, stuck=stuck)


def solution_of(chosen: Plan) -> Solution:
    return Solution(chosen.us, chosen.status, chosen.method, chosen.width, chosen.gap)
