"""Engines for several batches, joined from engines of one batch each."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import onnx

import gpu_runtime as gr
from gpu_runtime.engine import Engine, join, seal
from gpu_runtime.runtime.plan_record import Profile


def joined(profiles: Sequence[Sequence[Engine]], least: int = 1, exact: str | None = None) -> Engine:
    """Returns one engine with a profile for each sequence of engines of rising batch, the first size of all inputs and outputs.

    `least`: the smallest batch of each profile; `exact`: Profile.exact, in which case the first engine's batch is the smallest.
    """
    engines = [engine for of_one in profiles for engine in of_one]
    parts = [(e.weights, tuple(s for s in e.record.sections if s.kind == "weights")) for e in engines]
    arena, sections, renamed = join(parts)
    plans = tuple(replace(e.plan, renamed=names, steps=(), frees=()) for e, names in zip(engines, renamed, strict=True))
    made, first = [], 0
    for of_one in profiles:
        most = of_one[-1].plan.inputs[0].shape[0]
        names = tuple(b.name for b in (*of_one[0].plan.inputs, *of_one[0].plan.outputs))
        low = of_one[0].plan.inputs[0].shape[0] if exact else least
        made.append(Profile(low, most, most, tuple(range(first, first + len(of_one))), names, exact))
        first += len(of_one)
    record = replace(engines[0].record, sections=sections, plans=plans, profiles=tuple(made), shown=len(profiles[0]) - 1)
    return Engine(seal(record, arena), arena, checked=True)


def of_batches(
    model: Callable[[int], onnx.ModelProto], batches: Sequence[int], device: str = "a100", **options: object
) -> Engine:
    """Returns one engine for several batches. `model`: batch -> ONNX model; `options`: of `joined`."""
    return joined([[gr.build(model(n), device=device) for n in batches]], **options)
