"""Chooses the types in which a network holds its tensors, and the formats of its inputs and outputs."""

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gpu_runtime.frontend import importer
from gpu_runtime.network import Network
from gpu_runtime.planning import io_formats
from gpu_runtime.precision import cliffs, execution, ranges, rules, sample
from gpu_runtime.progress import Listener, Progress, warn
from gpu_runtime.runtime.findings import Compared, RangeRecord
from tactics.format import Format


def fit(
    loaded: importer.Loaded,
    plain: Network,
    calibration: Mapping[str, Any] | None,
    progress: Listener,
    known: ranges.Known | None = None,
    precisions: Mapping[str, str] | None = None,
) -> tuple[Network, RangeRecord]:
    """Returns the network in types that hold its tensors, and the tensors' ranges; warns of tensors that FP16 cannot hold.

    Tensors that rules and the user require are FP32, and operators near their cliffs, unless the plan itself will be compared
    with FP32.
    """
    progress(Progress("range", plain.name))
    smaller = functools.partial(sample.smaller, loaded, plain)
    network, found = ranges.fit(plain, calibration, smaller, loaded.maskable, known)
    progress(Progress("range", found.source))
    if found.stuck:
        reached = dict(found.high)
        reaching = ", ".join(f"{t!r} reaches {reached[t]:.4g} ({why})" for t, why in found.stuck[:3])
        warn(f"{network.name}: on {found.source}, {reaching}: FP16's maximum is {ranges.FP16_MAX:g}")
    network, kept, beyond = rules.keep(network, precisions)
    found = replace(found, single=(*found.single, *kept.items()))
    for text in beyond[:1]:
        warn(f"{network.name}: {text}")
    if calibration is None or (large := execution.too_large(network, execution.PLAN)):
        if calibration is not None:
            found = replace(found, compared=Compared(f"{large}: instead, operators with known numerical risks compute in FP32"))
        network, kept = cliffs.keep(network)
        found = replace(found, single=(*found.single, *kept.items()))
    return network, found


def ends_of(
    network: Network, reached: RangeRecord, inputs: io_formats.Spec | None, outputs: io_formats.Spec | None
) -> dict[str, tuple[Format, ...]]:
    """Returns the formats that each input and output may have; warns of an output that FP16 cannot hold."""
    ends = io_formats.resolve(inputs, network.inputs, "input") | io_formats.resolve(outputs, network.outputs, "output")
    for t in network.outputs:
        if network.type(t.name).fixed and network.is_fp32(t.name) and any(f.dtype == "fp16" for f in ends[t.name]):
            warn(f"{network.name}: {dict(reached.single)[t.name]}: request this output as fp32")
    return ends
