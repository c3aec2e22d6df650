"""Makes a network's plan, repeatedly until no layer needs more FP32."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from gpu_runtime.building import deviations
from gpu_runtime.building.load import shared
from gpu_runtime.building.planner import PlannedNetwork, Planner
from gpu_runtime.building.record import trial
from gpu_runtime.network import Network
from gpu_runtime.planning import tables
from gpu_runtime.planning.alternatives import alternatives
from gpu_runtime.precision import cliffs
from gpu_runtime.progress import Progress, compiling, warn
from gpu_runtime.runtime.findings import RangeRecord
from tactics.format import DTYPES
from tactics.planner.plan import Plan

ROUNDS = 4  # rounds of making layers FP32 that a calibration input shows to need it, each with a plan of its own


def settle(
    network: Network,
    found: RangeRecord,
    calibration: Mapping[str, Any] | None,
    planner: Planner,
    first: Network | None = None,
) -> PlannedNetwork:
    """Plans a network, and on a calibration input moves layers to FP32 until none deviates too far from FP32.

    One round: the plan runs on `calibration`, each layer is compared with the same layer in FP32, and the layers that caused
    a large deviation are computed in FP32 by a new plan. There are at most ROUNDS rounds; if tensors are still far off then,
    the last plan is returned with a warning that names up to three of them. If `calibration` is None, or `found` already
    holds a comparison, the first plan is returned as it is. `found`: the ranges of the network's tensors, which the returned
    plan records together with the comparison. `first`: the same network at another batch, whose equal weight arrays are
    shared; None: none are shared.
    """
    options = alternatives(network)
    table, chosen = planner(shared(options, first) if first else options)
    if calibration is None or found.compared:
        return planner.settled(table, chosen, found)
    for done in range(ROUNDS + 1):
        planner.options.progress(Progress("compare", network.name))
        result = _deviation(table, chosen, calibration, planner)
        grown, more = cliffs.heed(network, result.causes)
        if done == ROUNDS or grown is network:
            break
        network, found = grown, replace(found, single=(*found.single, *more.items()))
        table, chosen = planner(alternatives(network))
    if result.far:
        text = "; ".join(result.text(t) for t in result.far[:3])
        warn(f"{network.name}: on the calibration input, {text}")
    moved = sorted(t for t, of in network.types.items() if of.copies)
    compared = replace(result.record(), rounds=done, moved=tuple(moved))
    return planner.settled(table, chosen, replace(found, compared=compared))


def _deviation(table: tables.Table, chosen: Plan, calibration: Mapping[str, Any], planner: Planner) -> deviations.Deviations:
    """Runs the plan on the calibration input and compares each layer with the same layer in FP32."""
    target, compiled = planner.target, compiling(planner.options.progress)
    engine = trial(table, chosen, target)
    feeds = {i.name: np.asarray(calibration[i.name]).astype(DTYPES[i.dtype]) for i in engine.plan.inputs}
    with engine.context(device="cuda" if target.measured else "emulator", graph=False, progress=compiled) as ctx:
        return deviations.compare(table, chosen, feeds, ctx.trace(feeds))
