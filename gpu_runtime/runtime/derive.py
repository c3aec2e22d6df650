"""Derives a layer's steps from its record. Files do not contain steps; verify.py derives them when a plan is sealed or read.

A layer (plan_record.Layer) has a problem, a tactic and the places of its tensors. These determine the kernel, compile-time
values, grid, block, shared memory and every argument of its launches.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from gpu_runtime.runtime.plan_record import CallStep, LaunchStep, Layer, Step
from tactics.format import Strides, strides
from tactics.step import Arg, Call, Launch

WORKSPACE, COUNTERS = "workspace", "counters"  # scratch memory, and the arguments that point to it


def layer_strides(layer: Layer) -> tuple[Strides, ...] | None:
    """Returns the strides of a layer's inputs, then of its output, in memory.

    None if no tensor is placed: each has memory of its own that begins at a multiple of 16 bytes.
    """
    if not any(t.is_placed for t in layer.tensors):
        return None
    return tuple(strides(t.whole.format, t.whole.shape4) for t in layer.tensors)


def steps(
    todo: Sequence[Launch | Call], layer: Layer, index: int, section_at: Mapping[str, int], scratch: Mapping[str, int]
) -> list[Step]:
    """Returns the steps of layer number `index`: its launches with every argument as an offset in weights or activations.

    `section_at`: weight section -> its offset; `scratch`: workspace and counters -> their offsets in the arena.
    """

    def argument(arg: Arg) -> tuple[str, Any]:
        kind, value = arg
        if kind == "map":
            return kind, replace(value, of=argument(value.of))
        if kind == "in":
            return "arena", layer.inputs[int(value)].offset
        if kind == "out":
            return "arena", layer.outputs[0].offset
        if kind == "weights":
            return "weights", section_at[f"{layer.name}.{value}"]
        return ("arena", scratch[kind]) if kind in (WORKSPACE, COUNTERS) else (kind, value)

    return [_step(launch, argument, (index,)) for launch in todo]


def _step(launch: Launch | Call, argument: Callable[[Arg], tuple[str, Any]], covers: tuple[int, ...]) -> Step:
    if isinstance(launch, Call):
        args = tuple(a and a._replace(at=argument(a.at)) for a in (*launch.ins, launch.out))
        return CallStep(launch.function, dict(launch.attributes), launch.part, args, covers)
    args_ = tuple(map(argument, launch.args))
    return LaunchStep(launch.kernel, dict(launch.values), launch.grid, launch.block, launch.smem, args_, covers)
